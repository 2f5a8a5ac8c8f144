//! Extractors of the answer of a completion, for votes and tables. Each is a line of [`EXTRACTORS`].

use super::Judged;
use crate::evaluate::estimate::vote;
use crate::fixes::unknown;
use crate::reward::Rewards;
use crate::rollout::Actor;
use ferrl_engine::Result;
use ferrl_engine::generate::{GenerationRequest, SamplingParams};
use serde_json::json;

/// Input of extractors.
pub struct AnswerReader<'r, 'a> {
    /// The policy, for extractors that ask it.
    pub actor: &'r mut Actor<'a>,
    /// The verifier, if there is one.
    pub rewards: Option<&'r Rewards>,
    /// How completions are sampled.
    pub params: &'r SamplingParams,
}

pub struct Extractor {
    /// The name of option `extractor`.
    pub name: &'static str,
    pub about: &'static str,
    how: How,
}

enum How {
    /// A function of the text and of the verifier's extracted answer.
    Text(fn(&str, Option<&Rewards>) -> Option<String>),
    /// A follow-up turn asks the model for the answer, which is read from its reply.
    Turn { ask: &'static str, read: fn(&str) -> Option<String> },
}

/// Text before a solution in openrl's plain prompts.
const SOLUTION: &str = "Solution:";
/// Maximum tokens of a reply.
const REPLY: usize = 128;

pub const EXTRACTORS: &[Extractor] = &[
    Extractor {
        name: "verifier",
        about: "the answer extracted by the verifier, else the same as tagged",
        how: How::Text(|text, rewards| {
            rewards.and_then(|r| r.extract(text)).or_else(|| Some(vote(text).to_string()))
        }),
    },
    Extractor {
        name: "tagged",
        about: "the last <answer>, else the last \\boxed{}, else the whole text",
        how: How::Text(|text, _| Some(vote(text).to_string())),
    },
    Extractor {
        name: "identity",
        about: "the whole text",
        how: How::Text(|text, _| Some(text.trim().to_string())),
    },
    Extractor {
        name: "identity_with_solution_prefix",
        about: "the whole text after the word Solution",
        how: How::Text(|text, _| Some(format!("{SOLUTION}{text}"))),
    },
    Extractor {
        name: "next_chat_turn",
        about: "the reply to a follow-up turn that asks for the final answer",
        how: How::Turn {
            ask: "What is the final answer? Reply with the answer alone.",
            read: |reply| Some(reply.trim().to_string()).filter(|r| !r.is_empty()),
        },
    },
    Extractor {
        name: "next_chat_turn_code",
        about: "the last code block of the reply to a follow-up turn that asks for the program",
        how: How::Turn { ask: "Write the final program in one block of code.", read: code },
    },
    Extractor {
        name: "next_chat_turn_ABCD_choices",
        about: "the first of A, B, C, D in the reply to a follow-up turn that asks for a letter",
        how: How::Turn {
            ask: "Which choice is right: A, B, C or D? Reply with the letter alone.",
            read: letter,
        },
    },
];

impl Extractor {
    pub fn find(name: &str) -> Result<&'static Extractor> {
        EXTRACTORS.iter().find(|e| e.name == name).ok_or_else(|| {
            let fix = |near: &str| format!("--option extractor={near}");
            unknown("extractor", name, EXTRACTORS.iter().map(|e| e.name), fix)
        })
    }

    /// The answers of whole completions, in order, and the number of tokens sampled for each; `None` for prefixes.
    pub fn answers(
        &self,
        all: &[Judged<'_>],
        reader: &mut AnswerReader<'_, '_>,
    ) -> Result<Vec<(Option<String>, usize)>> {
        match &self.how {
            How::Text(read) => {
                let one = |j: &Judged<'_>| if j.terminal { read(j.text, reader.rewards) } else { None };
                Ok(all.iter().map(|j| (one(j), 0)).collect())
            }
            How::Turn { ask, read } => {
                let (mut asked, mut requests) = (Vec::new(), Vec::new());
                for (i, judged) in all.iter().enumerate().filter(|(_, j)| j.terminal) {
                    if let Some(request) = reader.request(judged, ask)? {
                        asked.push(i);
                        requests.push(request);
                    }
                }
                let replies = reader.actor.generator.generate(reader.actor.policy, requests)?;
                let mut out = vec![(None, 0); all.len()];
                for (i, reply) in asked.into_iter().zip(replies) {
                    let text = reader.actor.stops.text(reader.actor.tokenizer, &reply)?;
                    out[i] = (read(&text), reply.ids.len());
                }
                Ok(out)
            }
        }
    }
}

impl AnswerReader<'_, '_> {
    /// The follow-up turn after a completion, in the model's chat template if the prompt is a conversation; `None` if the model has
    /// no position left for a reply.
    fn request(&self, judged: &Judged<'_>, ask: &str) -> Result<Option<GenerationRequest>> {
        let mut prompt = judged.context.to_vec();
        let chat = self.actor.environments.encoder().filter(|_| !judged.prompt.messages.is_empty());
        let next = match chat {
            Some(encoder) => encoder.next_turn(&[json!({ "role": "user", "content": ask })])?,
            None => self.actor.tokenizer.encode_text(&format!("\n{ask}\n"))?,
        };
        let repeats = prompt.last().is_some_and(|last| next.first() == Some(last));
        prompt.extend(&next[usize::from(repeats)..]);
        // The last token is sampled, but never an input.
        let left = |most: usize| (most + 1).saturating_sub(prompt.len());
        let max_new_tokens = self.actor.policy.config.max_positions_hard().map_or(REPLY, left).min(REPLY);
        let params = SamplingParams { temperature: 0.0, max_new_tokens, ..self.params.clone() };
        let stream = [judged.prompt.index as u32, 0, 0];
        Ok((max_new_tokens > 0).then_some(GenerationRequest { prompt, params, stream }))
    }
}

/// The last block between triple backticks, without the language.
fn code(reply: &str) -> Option<String> {
    let Some(block) = reply.split("```").skip(1).step_by(2).last() else {
        return Some(reply.trim().to_string()).filter(|r| !r.is_empty());
    };
    let (language, body) = block.split_once('\n').unwrap_or(("", block));
    let named = language.chars().all(|c| c.is_alphanumeric() || c == '+');
    Some(if named { body } else { block }.trim().to_string())
}

/// The first of the four letters that stands alone.
fn letter(reply: &str) -> Option<String> {
    let alone = |word: &&str| matches!(*word, "A" | "B" | "C" | "D");
    reply.split(|c: char| !c.is_alphanumeric()).find(alone).map(str::to_string)
}

#[cfg(test)]
mod tests {
    use super::*;

    fn text(name: &str, completion: &str) -> Option<String> {
        match &Extractor::find(name).unwrap().how {
            How::Text(read) => read(completion, None),
            How::Turn { read, .. } => read(completion),
        }
    }

    #[test]
    fn the_verifier_s_answer_counts_where_it_looks_for_one() {
        let how = &Extractor::find("verifier").unwrap().how;
        let How::Text(read) = how else { panic!("reads text") };
        let source = crate::recipe::RewardSettings { verifier: Some("gsm8k".into()), ..Default::default() };
        let rewards = Rewards::new(&[source]).unwrap();
        assert_eq!(read("so 1,234\n#### 1,234", Some(&rewards)).unwrap().replace(',', ""), "1234");
        assert_eq!(read("<answer>7</answer>", None).as_deref(), Some("7"));
    }
    #[test]
    fn tags_hold_the_answer() {
        assert_eq!(text("tagged", "x \\boxed{3}").as_deref(), Some("3"));
    }
    #[test]
    fn the_text_is_the_answer() {
        assert_eq!(text("identity", " all of it\n").as_deref(), Some("all of it"));
    }
    #[test]
    fn the_text_stands_behind_the_word_solution() {
        assert_eq!(text("identity_with_solution_prefix", " 4").as_deref(), Some("Solution: 4"));
    }
    #[test]
    fn the_next_turn_states_the_answer() {
        assert_eq!(text("next_chat_turn", " 42\n").as_deref(), Some("42"));
        assert_eq!(text("next_chat_turn", " \n"), None);
    }
    #[test]
    fn the_next_turn_has_a_block_of_code() {
        let reply = "First:\n```\nold\n```\nthen\n```python\nprint(1)\n```\ndone";
        assert_eq!(text("next_chat_turn_code", reply).as_deref(), Some("print(1)"));
        assert_eq!(text("next_chat_turn_code", "print(2)").as_deref(), Some("print(2)"));
    }
    #[test]
    fn the_next_turn_names_a_letter() {
        assert_eq!(text("next_chat_turn_ABCD_choices", "A good one is (C).").as_deref(), Some("A"));
        assert_eq!(text("next_chat_turn_ABCD_choices", "The answer: (C)").as_deref(), Some("C"));
        assert_eq!(text("next_chat_turn_ABCD_choices", "none"), None);
        assert!(Extractor::find("identitty").err().unwrap().to_string().contains("extractor=identity"));
    }
}

//! Sums, lost rewards, and what is left out.

use super::*;
use crate::verify::{Score, Verifier};
use serde_json::json;

/// Scores all but the last.
struct Forgetful;

impl Verifier for Forgetful {
    fn name(&self) -> &str {
        "forgetful"
    }
    fn score(&self, _sample: &Sample<'_>) -> Result<Score> {
        Ok(Score::default())
    }
    fn score_batch(&self, samples: &[Sample<'_>], _at: Progress) -> Result<Vec<Outcome>> {
        samples.iter().skip(1).map(|s| self.score(s).map(Outcome::Scored)).collect()
    }
}

/// Its process dies over one text, and it has no opinion on another.
struct Fragile;

impl Verifier for Fragile {
    fn name(&self) -> &str {
        "fragile"
    }
    fn score(&self, _sample: &Sample<'_>) -> Result<Score> {
        Ok(Score { reward: 1.0, ..Score::default() })
    }
    fn score_batch(&self, samples: &[Sample<'_>], _at: Progress) -> Result<Vec<Outcome>> {
        let one = |s: &Sample<'_>| {
            Ok(match s.completion {
                "bad" => Outcome::Lost(Error::device("the worker died").at("rewards.py")),
                "?" => Outcome::Abstained,
                _ => Outcome::Scored(self.score(s)?),
            })
        };
        samples.iter().map(one).collect()
    }
}

fn rewards(judges: Vec<(f64, Box<dyn Verifier>)>) -> Rewards {
    judges.into_iter().fold(Rewards::default(), |all, (weight, verifier)| {
        all.with(weight, Verified { verifier, truncated: Truncated::default() })
    })
}

fn completion(text: &str) -> RolloutCompletion {
    RolloutCompletion { text: text.into(), tokens: 1, ..Default::default() }
}

fn experience(n: usize) -> Experience {
    let sequence = |trajectory| crate::experience::Sequence {
        ids: vec![1, 2],
        trained: vec![false, true],
        reward: vec![0.0; 2],
        trajectory,
        ..Default::default()
    };
    Experience { sequences: (0..n).map(sequence).collect() }
}

fn score(
    rewards: &Rewards,
    completions: &[RolloutCompletion],
    e: &mut Experience,
) -> Result<Vec<CompletionScores>> {
    let at = Progress { steps: 5, ..Default::default() };
    let batch = CompletionBatch { prompts: &[Prompt::default()], completions, at };
    rewards.score(batch, e, &mut Metrics::default())
}

fn regex(pattern: &str) -> Box<dyn Verifier> {
    let options = json!({ "pattern": pattern, "whole": false });
    verify::build("regex", options.as_object().unwrap()).unwrap()
}

#[test]
fn an_answer_whose_reward_failed_is_not_learned_from() {
    let rewards = rewards(vec![(1.0, Box::new(Fragile))]);
    let mut e = experience(3);
    let scores = score(&rewards, &["a", "bad", "b"].map(completion), &mut e).unwrap();
    let got: Vec<_> = scores.iter().map(|g| g.reward).collect();
    assert_eq!(got, [Some(1.0), None, Some(1.0)], "lost is not zero");
    let left: Vec<_> = e.sequences.iter().map(|s| (s.trajectory, s.total_reward())).collect();
    assert_eq!(left, [(0, 1.0), (2, 1.0)]);
    let warning = rewards.hooks.warnings.take().remove(0);
    assert!(warning.message.contains("1 of 3 completions") && warning.message.contains("the worker died"));
}

/// Was: a step whose rewards all failed "trained" on nothing, with a loss of NaN and exit code 0.
#[test]
fn a_step_without_any_reward_stops_with_the_first_failure() {
    let rewards = rewards(vec![(1.0, Box::new(Fragile))]);
    let error = score(&rewards, &["bad", "bad"].map(completion), &mut experience(2)).unwrap_err();
    assert_eq!(error.class, ferrl_engine::Class::Device);
    assert!(error.to_string().contains("no completion of step 1 got a reward (2 lost)"), "{error}");
    assert!(error.to_string().contains("the worker died"), "{error}");
    let error = score(&rewards, &["?", "?"].map(completion), &mut experience(2)).unwrap_err();
    assert!(error.to_string().contains("None"), "{error}");
}

#[test]
fn a_source_without_an_opinion_leaves_it_to_the_others() {
    let rewards = rewards(vec![(1.0, Box::new(Fragile)), (0.5, regex("."))]);
    let mut e = experience(2);
    let scores = score(&rewards, &["?", "a"].map(completion), &mut e).unwrap();
    assert_eq!(scores.iter().map(|g| g.reward).collect::<Vec<_>>(), [Some(0.5), Some(1.5)]);
    assert_eq!(e.sequences[0].sources, [(1.0, None), (0.5, Some(1.0))]);
}

/// Was: of two parts of one name a page and a metric showed only one, or the mean of both.
#[test]
fn parts_of_the_same_name_are_told_apart() {
    let rewards = rewards(vec![(1.0, regex("4")), (0.5, regex("[0-9]")), (0.5, regex("x"))]);
    let scores = score(&rewards, &["5"].map(completion), &mut experience(1)).unwrap();
    let parts: Vec<_> = scores[0].components.iter().map(|(name, value)| (name.as_str(), *value)).collect();
    assert_eq!(parts, [("format", 0.0), ("format_2", 1.0), ("format_3", 0.0)]);
}

#[test]
fn the_first_verifier_says_whether_an_answer_is_right() {
    let rewards = rewards(vec![(1.0, regex("4")), (0.5, regex("[0-9]"))]);
    let scores = score(&rewards, &["4", "5", "x"].map(completion), &mut experience(0)).unwrap();
    let both: Vec<_> = scores.iter().map(|g| (g.reward, g.score)).collect();
    let want = [(1.5, 1.0), (0.5, 0.0), (0.0, 0.0)].map(|(r, s)| (Some(r), Some(s)));
    assert_eq!(both, want, "a digit is well formed, not right");
}

#[test]
fn as_many_scores_as_answers() {
    let rewards = rewards(vec![(1.0, Box::new(Forgetful))]);
    let error = score(&rewards, &["a", "a"].map(completion), &mut experience(0)).unwrap_err();
    assert!(error.to_string().contains("forgetful gave 1 scores for 2 completions"), "{error}");
}

/// Was: `numeric` rewarded a completion that was cut off for the last number in it.
#[test]
fn a_truncated_completion_is_wrong_unless_the_recipe_says_otherwise() {
    let prompt = Prompt {
        columns: json!({ "answer": "12", "terms": [7, 5], "nums": [3, 4], "target": 7 })
            .as_object()
            .cloned()
            .unwrap(),
        ..Default::default()
    };
    let cases = [
        (json!({ "verifier": "numeric" }), "so far 12"),
        (json!({ "verifier": "exact" }), "12"),
        (json!({ "verifier": "chain" }), "7+5=12"),
        (json!({ "verifier": "regex", "options": { "pattern": "12" } }), "12"),
        (json!({ "verifier": "countdown", "options": { "format": "plain" } }), "3+4"),
    ];
    for (recipe, text) in cases {
        for (truncated, word, want) in [(false, "wrong", 1.0), (true, "wrong", 0.0), (true, "score", 1.0)] {
            let mut source: recipe::RewardSettings = serde_json::from_value(recipe.clone()).unwrap();
            source.truncated = Some(word.into());
            let rewards = Rewards::new(&[source]).unwrap();
            let completions = [RolloutCompletion { truncated, ..completion(text) }];
            let batch = CompletionBatch {
                prompts: std::slice::from_ref(&prompt),
                completions: &completions,
                at: Progress::default(),
            };
            let scores = rewards.score(batch, &mut experience(1), &mut Metrics::default()).unwrap();
            assert_eq!(scores[0].reward, Some(want), "{recipe} truncated {truncated}, {word}");
            assert_eq!(scores[0].score, Some(want), "{recipe} truncated {truncated}, {word}");
            assert!(scores[0].components.iter().all(|c| c.1 == want as f32), "{scores:?}");
        }
    }
}

/// Was: `verifier = "length"` needed a column of expected answers.
#[test]
fn the_length_of_a_completion_is_known_without_a_column() {
    let source = json!({ "verifier": "length", "options": { "max": 10, "cache": 4 } });
    let rewards = Rewards::new(&[serde_json::from_value(source).unwrap()]).unwrap();
    let cut = RolloutCompletion { tokens: 10, truncated: true, ..completion("a") };
    let completions = [
        RolloutCompletion { tokens: 6, ..completion("a") },
        RolloutCompletion { tokens: 8, ..completion("a") },
        cut,
    ];
    let scores = score(&rewards, &completions, &mut experience(3)).unwrap();
    let got: Vec<_> = scores.iter().map(|g| g.reward).collect();
    assert_eq!(got, [Some(0.0), Some(-0.5), Some(-1.0)], "a penalty for length is felt when it is cut off");
}

#[test]
fn a_stop_text_that_the_verifier_reads_is_refused() {
    let source = json!({ "verifier": "countdown" });
    let rewards = Rewards::new(&[serde_json::from_value(source).unwrap()]).unwrap();
    let stop = ["</answer>".to_string()];
    let error = rewards.check_stops(&stop, false).unwrap_err().to_string();
    assert!(error.contains("rollout.stop") && error.contains("include_stop"), "{error}");
    rewards.check_stops(&stop, true).unwrap();
    rewards.check_stops(&["\n\n".to_string()], false).unwrap();
}

/// Completions of characters behind a prompt of one token.
fn read(texts: &[&str]) -> (Vec<RolloutCompletion>, Experience, Arc<Tokenizer>) {
    let all: String = (' '..='~').chain(['\n']).collect();
    let specials = ["<pad>", "<eos>"].map(String::from);
    let tokenizer = ferrl_engine::tokenizer::train_chars([all].into_iter(), &specials).unwrap();
    let one = |(trajectory, text): (usize, &&str)| {
        let ids = [vec![0], tokenizer.encode_text(text).unwrap()].concat();
        let trained = (0..ids.len()).map(|i| i > 0).collect();
        let reward = vec![0.0; ids.len()];
        crate::experience::Sequence { ids, trained, reward, trajectory, ..Default::default() }
    };
    let e = Experience { sequences: texts.iter().enumerate().map(one).collect() };
    (texts.iter().map(|t| completion(t)).collect(), e, Arc::new(tokenizer))
}

/// The rewards of tokens that have one.
fn placed(e: &Experience, i: usize) -> Vec<(usize, f32)> {
    let all = e.sequences[i].reward.iter().copied().enumerate();
    all.filter(|(_, reward)| *reward != 0.0).collect()
}

#[test]
fn a_step_verifier_rewards_the_steps_and_the_sum_is_the_completions_reward() {
    let source = json!({ "verifier": "chain", "steps": "lines", "weight": 2.0 });
    let (completions, mut e, tokenizer) =
        read(&["1+2=3\n3+3=6\n", "1+2=3\n3+3=7\n", "1+2=4\n4+3=7\n", "1+2=3\n"]);
    let rewards = Rewards::new(&[serde_json::from_value(source).unwrap()]).unwrap().reading(&tokenizer);
    let columns = json!({ "terms": [1, 2, 3] }).as_object().cloned().unwrap();
    let prompts = [Prompt { columns, ..Default::default() }];
    let batch = CompletionBatch { prompts: &prompts, completions: &completions, at: Progress::default() };
    let scores = rewards.score(batch, &mut e, &mut Metrics::default()).unwrap();
    let total: Vec<f64> = scores.iter().filter_map(|g| g.reward).collect();
    assert_eq!(total, [2.0, 0.0, 0.0, 0.0]);
    // Values of the prefixes 1, 1; 1, 0; 0, 0; and 0 for one line of two: what each line adds, times 2.
    assert_eq!(placed(&e, 0), [(5, 2.0)]);
    assert_eq!(placed(&e, 1), [(5, 2.0), (11, -2.0)]);
    assert_eq!((placed(&e, 2), placed(&e, 3)), (vec![], vec![]));
    let ends: Vec<&[usize]> = e.sequences.iter().map(|s| &s.steps[..]).collect();
    assert_eq!(ends, [&[5, 11][..], &[5, 11], &[5, 11], &[5]]);
}

#[test]
fn a_python_function_rewards_steps_with_a_list() {
    let dir = tempfile::tempdir().unwrap();
    let file = dir.path().join("steps.py");
    let code = "def reward(completions, steps, **columns):\n    \
                assert [''.join(lines) for lines in steps] == completions\n    \
                return [len(t) if 'x' in t else [len(l) for l in lines] for t, lines in zip(completions, steps)]\n\n\
                def short(completions, steps, **columns):\n    return [[1.0] for s in steps]\n";
    std::fs::write(&file, code).unwrap();
    let source = |function: &str| {
        let value = json!({ "python": file, "function": function, "steps": "lines", "weight": 0.5 });
        serde_json::from_value(value).unwrap()
    };
    let (completions, mut e, tokenizer) = read(&["abc\nd\n", "x\ny"]);
    let rewards = Rewards::new(&[source("reward")]).unwrap().reading(&tokenizer);
    let scores = score(&rewards, &completions, &mut e).unwrap();
    assert_eq!(scores.iter().filter_map(|g| g.reward).collect::<Vec<_>>(), [3.0, 1.5]);
    assert_eq!(placed(&e, 0), [(3, 2.0), (5, 1.0)], "half the length of each line");
    assert_eq!(placed(&e, 1), [(2, 1.5)], "a number stands at the end");
    // As many rewards as there are steps, or the completion is lost.
    let (completions, mut e, tokenizer) = read(&["a\nb", "c"]);
    let rewards = Rewards::new(&[source("short")]).unwrap().reading(&tokenizer);
    let scores = score(&rewards, &completions, &mut e).unwrap();
    assert_eq!(scores.iter().map(|g| g.reward).collect::<Vec<_>>(), [None, Some(0.5)]);
    let warning = rewards.hooks.warnings.take().remove(0);
    assert!(warning.message.contains("1 rewards for 2 steps"), "{}", warning.message);
}

#[test]
fn a_verifier_of_whole_completions_is_refused_for_steps() {
    let source = json!({ "verifier": "exact", "steps": "lines" });
    let error = Rewards::new(&[serde_json::from_value(source).unwrap()]).err().unwrap().to_string();
    assert!(error.contains("rewards whole completions, not steps"), "{error}");
}

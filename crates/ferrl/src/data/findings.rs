//! Warnings about rows: counted by kind, with the first place of each, and raised once.

use super::RowCounts;

/// A finding in some rows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Finding {
    /// How many.
    pub rows: usize,
    /// Where it was found first, and how long the row is.
    pub first: String,
    /// The longest of them, in tokens.
    pub longest: usize,
}

impl Finding {
    /// Counts a row; `length` is 0 where it says nothing.
    pub fn add(&mut self, yes: bool, place: &str, length: usize) {
        if yes {
            if self.rows == 0 {
                self.first = if length > 0 { format!("{place}, {length} tokens") } else { place.to_owned() };
            }
            self.rows += 1;
            self.longest = self.longest.max(length);
        }
    }

    /// Adds what was found in later rows.
    pub fn join(&mut self, later: Finding) {
        if self.rows == 0 {
            self.first = later.first;
        }
        self.rows += later.rows;
        self.longest = self.longest.max(later.longest);
    }
}

/// All kinds of findings.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Findings {
    /// Cut to `data.max_length`.
    pub truncated: Finding,
    /// Left out because nothing would be left to learn.
    pub dropped: Finding,
    /// Responses with their end written out.
    pub ended: Finding,
    /// Responses with the name of a special token.
    pub spelled: Finding,
    /// Responses without text.
    pub empty: Finding,
    /// Plain text for a model with a chat template.
    pub raw: Finding,
    /// Pairs that do not differ.
    pub equal: Finding,
    /// Messages of unknown roles.
    pub strange: Finding,
    /// Turns that no token ends.
    pub endless: Finding,
    /// Prompts that run into their responses.
    pub glued: Finding,
    /// Pairs whose prompt is another.
    pub other_prompt: Finding,
}

impl Findings {
    /// Counts what the encoder noted of one row.
    pub fn add(&mut self, counts: &RowCounts, place: &str) {
        self.truncated.add(counts.truncated > 0 && counts.dropped == 0, place, counts.longest);
        self.dropped.add(counts.dropped > 0, place, counts.longest);
        self.ended.add(counts.ended > 0, place, 0);
        self.spelled.add(counts.spelled > 0, place, 0);
        self.empty.add(counts.empty > 0, place, 0);
        self.raw.add(counts.raw > 0, place, 0);
        self.strange.add(counts.strange > 0, place, 0);
        self.endless.add(counts.endless > 0, place, 0);
        self.glued.add(counts.glued > 0, place, 0);
        self.other_prompt.add(counts.other_prompt > 0, place, 0);
    }

    /// Adds what was found in later rows.
    pub fn join(&mut self, mut later: Findings) {
        for kind in KINDS {
            (kind.of)(self).join(std::mem::take((kind.of)(&mut later)));
        }
    }

    /// Gives `raise` the name, message and fix of each kind that was found; `rows` says of how many, such as `40 rows`.
    pub fn say(mut self, rows: &str, max_length: usize, raise: &mut dyn FnMut(&'static str, String, String)) {
        for kind in KINDS {
            let found = (kind.of)(&mut self);
            if found.rows > 0 {
                let what = kind.what.replace("{max}", &max_length.to_string());
                let fix = kind.fix.replace("{longest}", &found.longest.to_string());
                raise(kind.name, format!("{} of {rows} {what} (first: {})", found.rows, found.first), fix);
            }
        }
    }
}

/// A kind of finding, as it is said; `{max}` is `data.max_length`, `{longest}` the longest row found.
struct FindingKind {
    name: &'static str,
    of: fn(&mut Findings) -> &mut Finding,
    what: &'static str,
    fix: &'static str,
}

const KINDS: &[FindingKind] = &[
    FindingKind {
        name: "truncated-rows",
        of: |f| &mut f.truncated,
        what: "are truncated to data.max_length = {max}",
        fix: "data.max_length = {longest} for whole rows",
    },
    FindingKind {
        name: "dropped-rows",
        of: |f| &mut f.dropped,
        what: "are left out: truncation to data.max_length = {max} leaves no trained token",
        fix: "data.max_length = {longest} for whole rows",
    },
    FindingKind {
        name: "equal-pairs",
        of: |f| &mut f.equal,
        what: "have chosen = rejected, which gives no learning signal",
        fix: "remove them",
    },
    FindingKind {
        name: "empty-responses",
        of: |f| &mut f.empty,
        what: "have an empty response: the model learns to say nothing",
        fix: "remove them",
    },
    FindingKind {
        name: "written-end",
        of: |f| &mut f.ended,
        what: "end their response with the end-of-turn token as text; it is taken for the token itself, not learned \
               twice",
        fix: "remove it from the text: the stop token is added to every response",
    },
    FindingKind {
        name: "spelled-tokens",
        of: |f| &mut f.spelled,
        what: "have the name of a special token in a response; unless the chat template acts on it, its characters are \
               learned, not the token",
        fix: "give reasoning and tool calls in fields of the message (reasoning_content, tool_calls), which the template \
              writes, or make it an added token that is not special in tokenizer.json",
    },
    FindingKind {
        name: "raw-prompts",
        of: |f| &mut f.raw,
        what: "are plain text although the model has a chat template: prompt and response are joined without a separator",
        fix: "data.apply_chat_template = true applies the template; false confirms plain text",
    },
    FindingKind {
        name: "unknown-roles",
        of: |f| &mut f.strange,
        what: "have a message with a role other than system, user, assistant and tool: such turns are never trained",
        fix: "rename the role to one of these",
    },
    FindingKind {
        name: "endless-turns",
        of: |f| &mut f.endless,
        what: "end the assistant's turn without a stop token: completions run until the maximum number of new tokens",
        fix: "a chat template that ends turns with the eos token, or the text that ends them in rollout.stop",
    },
    FindingKind {
        name: "joined-words",
        of: |f| &mut f.glued,
        what: "join the prompt's last word and the response's first, with nothing between them",
        fix: "data.template = \"{{ prompt }}\\n\" puts a line break between them, or train with a chat template",
    },
    FindingKind {
        name: "other-prompts",
        of: |f| &mut f.other_prompt,
        what: "have a prompt that chosen and rejected do not start with; it is not used",
        fix: "check that the columns belong to the same row, or leave prompt out",
    },
];

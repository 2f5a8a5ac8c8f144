//! What is doubtful about rows: counted, with the first place of each kind, and said once.

use super::Counts;

/// Something that was found in some rows.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Found {
    /// How many.
    pub rows: usize,
    /// Where it was found first, and how long the row is.
    pub first: String,
    /// The longest of them, in tokens.
    pub longest: usize,
}

impl Found {
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
    pub fn join(&mut self, later: Found) {
        if self.rows == 0 {
            self.first = later.first;
        }
        self.rows += later.rows;
        self.longest = self.longest.max(later.longest);
    }
}

/// Everything of which a row can be suspected by itself.
#[derive(Clone, Debug, Default, PartialEq)]
pub struct Findings {
    /// Cut to `data.max_length`.
    pub truncated: Found,
    /// Left out because nothing would be left to learn.
    pub dropped: Found,
    /// Responses with their end written out.
    pub ended: Found,
    /// Responses without text.
    pub empty: Found,
    /// Plain text for a model with a chat template.
    pub raw: Found,
    /// Pairs that do not differ.
    pub equal: Found,
    /// Messages of unknown roles.
    pub strange: Found,
    /// Turns that no token ends.
    pub endless: Found,
    /// Prompts that run into their responses.
    pub glued: Found,
    /// Pairs whose prompt is another.
    pub other_prompt: Found,
}

impl Findings {
    /// Counts what the encoder noted of one row.
    pub fn add(&mut self, counts: &Counts, place: &str) {
        self.truncated.add(counts.truncated > 0 && counts.dropped == 0, place, counts.longest);
        self.dropped.add(counts.dropped > 0, place, counts.longest);
        self.ended.add(counts.ended > 0, place, 0);
        self.empty.add(counts.empty > 0, place, 0);
        self.raw.add(counts.raw > 0, place, 0);
        self.strange.add(counts.strange > 0, place, 0);
        self.endless.add(counts.endless > 0, place, 0);
        self.glued.add(counts.glued > 0, place, 0);
        self.other_prompt.add(counts.other_prompt > 0, place, 0);
    }

    /// Adds what was found in later rows.
    pub fn join(&mut self, later: Findings) {
        self.truncated.join(later.truncated);
        self.dropped.join(later.dropped);
        self.ended.join(later.ended);
        self.empty.join(later.empty);
        self.raw.join(later.raw);
        self.equal.join(later.equal);
        self.strange.join(later.strange);
        self.endless.join(later.endless);
        self.glued.join(later.glued);
        self.other_prompt.join(later.other_prompt);
    }

    /// Gives `raise` the name, message and fix of each kind that was found; `rows` says of how many, such as `40 rows`.
    pub fn say(&self, rows: &str, max_length: usize, raise: &mut dyn FnMut(&'static str, String, String)) {
        let whole = |found: &Found| format!("data.max_length = {} for whole rows", found.longest);
        let kinds: [(&'static str, &Found, String, String); 10] = [
            (
                "truncated-rows",
                &self.truncated,
                format!("are cut to data.max_length = {max_length}"),
                whole(&self.truncated),
            ),
            (
                "dropped-rows",
                &self.dropped,
                format!("are left out: data.max_length = {max_length} leaves nothing of them to learn"),
                whole(&self.dropped),
            ),
            (
                "equal-pairs",
                &self.equal,
                "have chosen = rejected, which gives no learning signal".into(),
                "remove them".into(),
            ),
            (
                "empty-responses",
                &self.empty,
                "have a response without text: the model learns to say nothing".into(),
                "remove them".into(),
            ),
            (
                "written-end",
                &self.ended,
                "end their response with the end-of-turn token as text; it is taken for the token itself, not \
                 learned twice"
                    .into(),
                "remove it from the text: every response is ended anyway".into(),
            ),
            (
                "raw-prompts",
                &self.raw,
                "are plain text although the model has a chat template: prompt and response are joined without a \
                 separator"
                    .into(),
                "data.apply_chat_template = true puts them into the template; false says that plain text is meant"
                    .into(),
            ),
            (
                "unknown-roles",
                &self.strange,
                "have a message whose role is none of system, user, assistant and tool: such turns are never trained"
                    .into(),
                "rename the role, if it is one of them by another name".into(),
            ),
            (
                "endless-turns",
                &self.endless,
                "end their turn in no token that stops: completions go on until the limit of new tokens".into(),
                "a chat template that ends turns with the eos token, or the text that ends them in rollout.stop".into(),
            ),
            (
                "joined-words",
                &self.glued,
                "join the prompt's last word and the response's first, with nothing between them".into(),
                "data.template = \"{{ prompt }}\\n\" puts an end of line between, or train with a chat template".into(),
            ),
            (
                "other-prompts",
                &self.other_prompt,
                "have a prompt that chosen and rejected do not begin with; it is not used".into(),
                "check that the columns belong to the same row, or leave prompt out".into(),
            ),
        ];
        for (name, found, what, fix) in kinds {
            if found.rows > 0 {
                raise(name, format!("{} of {rows} {what} (first: {})", found.rows, found.first), fix);
            }
        }
    }
}

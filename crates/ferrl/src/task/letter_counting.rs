//! Counting the occurrences of a letter in a short text: GEM's `rg:letter_counting` as a task of one turn.
//!
//! Texts are drawn from a list of common words. Texts are held out by a hash of their words alone, so that no question about a
//! held-out text is trained on, for any letter.

use super::{Entry, Task, TaskExample, options, schema_for};
use crate::verify::countdown::TaskDraw;
use ferrl_engine::{Error, Result};
use ferrl_kernels::philox::{name_words, philox4x32};
use serde_json::{Map, Value, json};

pub(super) const ENTRY: Entry = Entry {
    name: "letter_counting",
    about: "how often a letter occurs in a short text, answered in \\boxed{}",
    schema: || schema_for!(Options),
    build: |values, seed| Ok(Box::new(LetterCounting { options: Options::read(values)?, seed })),
};

with_defaults! {
struct Options {
    /// Words of the shortest text.
    min_words: usize = 5,
    /// Words of the longest text.
    max_words: usize = 15,
}
}

impl Options {
    fn read(values: &Map<String, Value>) -> Result<Self> {
        let o: Options = options(values)?;
        // Texts of one or two words are too few to hold some out.
        if o.min_words < 3 || o.max_words < o.min_words || o.max_words > 1000 {
            let what = format!(
                "texts of {} to {} words, expected 3 <= min_words <= max_words <= 1000",
                o.min_words, o.max_words
            );
            return Err(Error::usage(what)
                .at("data.task")
                .fix("data.task.min_words = 5, data.task.max_words = 15"));
        }
        Ok(o)
    }
}

struct LetterCounting {
    options: Options,
    seed: u64,
}

const WORDS: &[&str] = &[
    "about", "above", "across", "after", "again", "along", "apple", "bridge", "bright", "brother", "butter",
    "candle", "carry", "castle", "circle", "clear", "coffee", "corner", "cotton", "dinner", "doctor",
    "dream", "early", "eleven", "engine", "evening", "every", "family", "farmer", "field", "finger",
    "flower", "follow", "forest", "friend", "garden", "glass", "green", "happy", "heavy", "hidden", "honey",
    "house", "island", "jacket", "journey", "jungle", "kettle", "kitchen", "ladder", "letter", "little",
    "marble", "meadow", "middle", "mirror", "morning", "mountain", "music", "narrow", "needle", "never",
    "number", "ocean", "office", "orange", "paper", "pepper", "pillow", "planet", "pocket", "puzzle",
    "quarter", "quick", "quiet", "rabbit", "river", "rubber", "sailor", "school", "second", "shadow",
    "silver", "simple", "sister", "summer", "table", "teacher", "thirteen", "thunder", "tomorrow", "travel",
    "umbrella", "under", "valley", "village", "water", "weather", "window", "winter", "wonder", "yellow",
    "yesterday", "zebra",
];

/// Fraction of all texts that is held out.
const HELD_OUT: f64 = 0.1;

fn is_held_out(text: &str) -> bool {
    let words = name_words(text);
    let mixed = philox4x32([words[0], words[1], 0, 0], name_words("letter counting split"))[0];
    f64::from(mixed) < HELD_OUT * 4_294_967_296.0
}

impl LetterCounting {
    /// A text and a letter.
    fn question(&self, index: u64, held_out: bool) -> Result<(String, char)> {
        let stream = if held_out { "letter counting held out" } else { "letter counting" };
        let mut draw = TaskDraw::new(stream, self.seed, index);
        let o = &self.options;
        for _ in 0..10_000 {
            let words = o.min_words + draw.below(o.max_words - o.min_words + 1);
            let text = (0..words).map(|_| WORDS[draw.below(WORDS.len())]).collect::<Vec<_>>().join(" ");
            if is_held_out(&text) != held_out {
                continue;
            }
            // Mostly a letter of the text; sometimes any letter, so that 0 is possible.
            let letters: Vec<char> = text.chars().filter(|c| c.is_alphabetic()).collect();
            let any = draw.chance(0.1);
            let letter =
                if any { (b'a' + draw.below(26) as u8) as char } else { letters[draw.below(letters.len())] };
            return Ok((text, letter));
        }
        Err(Error::usage("found no such text in 10000 draws").at("data.task").fix("more words"))
    }
}

impl Task for LetterCounting {
    fn example(&self, index: u64, held_out: bool) -> Result<TaskExample> {
        let (text, letter) = self.question(index, held_out)?;
        let count = text.chars().filter(|&c| c == letter).count();
        let prompt = format!(
            "How many times does the letter \"{letter}\" appear in the text: \"{text}\"? Put the answer in \\boxed{{}}.\n"
        );
        let columns = json!({ "answer": count }).as_object().cloned().unwrap_or_default();
        Ok(TaskExample { prompt, answer: format!("\\boxed{{{count}}}"), columns, ..Default::default() })
    }

    fn reward(&self) -> Option<(&'static str, Map<String, Value>)> {
        Some(("numeric", json!({ "take": "last" }).as_object().cloned().unwrap_or_default()))
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use std::collections::HashSet;

    #[test]
    fn texts_are_counted_right_and_held_out_by_their_words() {
        let task = LetterCounting { options: Options::default(), seed: 3 };
        let text_of = |e: &TaskExample| e.prompt.split('"').nth(3).unwrap().to_string();
        let (mut trained, mut zeros) = (HashSet::new(), 0);
        for index in 0..500 {
            let e = task.example(index, false).unwrap();
            let (letter, text) = (e.prompt.split('"').nth(1).unwrap().to_string(), text_of(&e));
            let count = text.matches(&letter).count();
            assert_eq!(e.columns["answer"], count);
            assert_eq!(e.answer, format!("\\boxed{{{count}}}"));
            assert!((5..=15).contains(&text.split(' ').count()) && !is_held_out(&text));
            zeros += usize::from(count == 0);
            trained.insert(text);
        }
        assert!(trained.len() > 450 && (1..100).contains(&zeros), "{} texts, {zeros} zeros", trained.len());
        for index in 0..200 {
            let text = text_of(&task.example(index, true).unwrap());
            assert!(is_held_out(&text) && !trained.contains(&text));
        }
        assert_eq!(task.example(7, false).unwrap(), task.example(7, false).unwrap());
    }

    #[test]
    fn settings_that_cannot_be_are_refused() {
        let read = |v: Value| Options::read(v.as_object().unwrap()).is_err();
        assert!(read(json!({ "min_words": 9, "max_words": 5 })) && read(json!({ "min_words": 1 })));
        assert!(read(json!({ "words": 5 })) && !read(json!({ "min_words": 3, "max_words": 3 })));
    }
}

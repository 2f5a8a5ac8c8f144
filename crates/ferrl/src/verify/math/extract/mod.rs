//! What a completion gives as its answer.

mod boxes;
mod formulas;

use crate::verify::last_answer;
use boxes::boxed;
use formulas::{announced, final_answer, is_bare, last, listed};
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};

/// Bytes at the end of a completion in which an answer without a mark is looked for.
const TAIL: usize = 4_000;

/// Where the answer is.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum Take {
    /// The last box, else "the final answer is", else the answer tag, else `####`, else "the answer is" or "the roots
    /// are", else all of it where it is one formula, else the last formula or number.
    Auto,
    /// The last `\boxed{..}`.
    Boxed,
    /// The last `<answer>..</answer>`.
    #[serde(rename = "answer")]
    Tag,
    /// Behind the last `####`.
    Hashes,
    /// The last formula or number.
    Last,
    /// The whole completion.
    Whole,
}

/// The answer in a completion; none where there is none.
pub fn answer(text: &str, take: Take) -> Option<String> {
    let text = visible(text);
    let end = tail(text, 16 * TAIL);
    match take {
        Take::Whole => Some(text.trim().to_string()),
        Take::Boxed => boxed(end),
        Take::Tag => last_answer(text).map(str::to_string),
        Take::Hashes => hashes(text).map(str::to_string),
        Take::Last => last(text).map(str::to_string),
        Take::Auto => boxed(end)
            .or_else(|| final_answer(end))
            .or_else(|| last_answer(text).map(|inner| announced(inner).unwrap_or_else(|| inner.to_string())))
            .or_else(|| closing_hashes(text).map(str::to_string))
            .or_else(|| announced(end))
            .or_else(|| hashes(text).map(str::to_string))
            .or_else(|| listed(end))
            .or_else(|| {
                if is_bare(text) { Some(text.trim().to_string()) } else { last(text).map(str::to_string) }
            }),
    }
    .filter(|answer| !answer.trim().is_empty())
}

/// The expected answer of a data row: the box or `####` of a worked solution, otherwise the text itself.
pub fn expected(text: &str) -> String {
    boxed(tail(text, 16 * TAIL))
        .or_else(|| hashes(text).map(str::to_string))
        .unwrap_or_else(|| text.trim().to_string())
}

/// The text behind the reasoning and before the tokens that end a turn.
fn visible(text: &str) -> &str {
    let text = match text.rsplit_once("</think>") {
        Some((_, rest)) if !rest.trim().is_empty() => rest,
        _ => text,
    };
    let end = ["<|im_start|>", "<|im_end|>", "<|endoftext|>", "<|eot_id|>", "</s>"]
        .iter()
        .filter_map(|mark| text.find(mark))
        .min()
        .unwrap_or(text.len());
    &text[..end]
}

/// The last `most` bytes of a text, or a few less.
fn tail(text: &str, most: usize) -> &str {
    let mut from = text.len().saturating_sub(most);
    while !text.is_char_boundary(from) {
        from += 1;
    }
    &text[from..]
}

/// What follows `####` on the last line; elsewhere it may be a heading.
fn closing_hashes(text: &str) -> Option<&str> {
    let line = text.trim_end().lines().last()?.trim();
    line.strip_prefix("####").map(str::trim).filter(|answer| !answer.is_empty())
}

fn hashes(text: &str) -> Option<&str> {
    let (_, tail) = text.rsplit_once("####")?;
    tail.trim_start().lines().next().map(str::trim)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn answers_are_found_where_they_stand() {
        for (text, want) in [
            ("so \\boxed{\\frac{1}{2}} and done", "\\frac{1}{2}"),
            ("\\boxed{1}, no: \\boxed{2}", "2"),
            ("\\boxed{1} and \\boxed{2}", "1, 2"),
            ("$\\boxed{3 \\text{ and } \\boxed{4}}$", "3 \\text{ and } \\boxed{4}"),
            ("$\\boxed{28}$\\%", "28\\%"),
            ("$\\boxed{28", "28"),
            ("The final answer is $(0, 1)$. I hope it is correct.", "$(0, 1)$"),
            ("Final Answer: The largest $n$ is 34.", "34"),
            ("Therefore, the answer is 12.5.", "12.5"),
            ("Answer: x = 3 or x = 4", "x = 3 or x = 4"),
            ("<answer> 7 </answer>", "7"),
            ("the answer is below: <answer>7</answer>", "7"),
            ("the answer is not 9\n#### 10", "10"),
            ("#### Answer\nThe answer is 5.", "5"),
            ("5 + 5 = 10\n#### 10", "10"),
            ("The final answer is $5$. <answer>6</answer>", "$5$"),
            ("The final answer is in the tag. <answer>6</answer>", "6"),
            ("<answer>The final answer is 7</answer>", "7"),
            ("The roots are $x = 1$ and $x = 2$.", "$x = 1$ and $x = 2$"),
            ("The answers are 2 and 3.", "2 and 3"),
            ("The roots are $1$ and $2$. Only the second is positive, so $x=2$.", "$x=2$"),
            ("By induction, $a_n = n^2$ for all $n \\ge 1$.", "$a_n = n^2$"),
            ("We get $5$ (since $x>0$).", "$5$"),
            ("Each gets 3.5 oranges.", "3.5"),
            ("The ratio of shaded to total is \\frac{5}{8}.", "\\frac{5}{8}"),
            ("The area of it is 12π.", "12π"),
            ("The population will be 1 million.", "1 million"),
            ("It holds for $x\\le-1$ or $x\\ge3$.", "$x\\le-1$ or $x\\ge3$"),
            ("The value of $f(3)$ is therefore 7, since $f(3) = 2\\cdot 3+1$.", "7"),
            ("it is $3$ or rather $4$.", "$4$"),
            ("wins the game with probability 2/3. <|im_start|>user 5", "2/3"),
            ("which makes $1,250.50.", "1,250.50"),
            ("it increases by 100%.", "100%"),
            ("x = 1, y = 2", "x = 1, y = 2"),
            ("10 square units", "10 square units"),
            ("<think> 5 </think> 6", "6"),
            ("\\text{The midpoints form a hexagon}", "\\text{The midpoints form a hexagon}"),
        ] {
            assert_eq!(answer(text, Take::Auto).as_deref(), Some(want), "{text}");
        }
        assert_eq!(answer("no idea what it is", Take::Auto), None);
        assert_eq!(answer("\\boxed{}", Take::Auto), None);
        assert_eq!(answer("5", Take::Boxed), None);
        assert_eq!(expected("long\n#### 12"), "12");
    }
}

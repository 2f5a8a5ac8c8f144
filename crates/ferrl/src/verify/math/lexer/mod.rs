//! Text to tokens: LaTeX, ASCII and Unicode mathematics alike.

mod commands;
pub mod number;

use super::language::{unicode, units, words};
use number::Literal;

/// A token.
#[derive(Clone, Debug, PartialEq)]
pub enum Tok {
    Num(Literal),
    /// A variable: a letter, or the name of a Greek one.
    Name(String),
    /// A word: a unit, a name, a conjunction.
    Word(String),
    /// A function or construct by its LaTeX name without the backslash.
    Cmd(&'static str),
    /// `\begin{..}` and `\end{..}` of a table, by its kind.
    Begin(String),
    /// See [`Tok::Begin`].
    End,
    /// Anything else, as one character.
    Sym(char),
}

/// A token and how it stands in the text.
#[derive(Clone, Debug)]
pub struct Token {
    pub tok: Tok,
    /// Whether space precedes it.
    pub space: bool,
    /// Whether it stands inside `\text{..}`.
    pub text: bool,
}

/// How commas between digits are read.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Commas {
    /// Between groups of three digits they belong to the number.
    Thousands,
    /// They separate numbers, except where LaTeX says otherwise (`1{,}000`, `1,\!000`).
    Separate,
}

/// More tokens than any answer needs.
const MOST_TOKENS: usize = 4_000;

struct Lexer<'a> {
    chars: &'a [char],
    at: usize,
    commas: Commas,
    odd_dollars: bool,
    /// Positions of the braces that close the open `\text{..}`, the innermost last.
    text_ends: Vec<usize>,
    out: Vec<Token>,
    space: bool,
    /// Tables that are open.
    tables: usize,
}

/// The tokens of a text; none where there are too many or a character has no meaning.
pub fn tokens(text: &str, commas: Commas) -> Option<Vec<Token>> {
    let text = unicode::to_latex(text);
    let chars: Vec<char> = text.chars().collect();
    let dollars =
        chars.iter().enumerate().filter(|(i, c)| **c == '$' && (*i == 0 || chars[i - 1] != '\\')).count();
    let odd_dollars = dollars % 2 == 1;
    let mut lexer = Lexer {
        chars: &chars,
        at: 0,
        commas,
        odd_dollars,
        text_ends: Vec::new(),
        out: Vec::new(),
        space: false,
        tables: 0,
    };
    while lexer.at < chars.len() {
        lexer.step()?;
        if lexer.out.len() > MOST_TOKENS {
            return None;
        }
    }
    Some(lexer.out)
}

impl Lexer<'_> {
    fn peek(&self, ahead: usize) -> char {
        self.chars.get(self.at + ahead).copied().unwrap_or('\0')
    }

    fn push(&mut self, tok: Tok) {
        let text = !self.text_ends.is_empty();
        self.out.push(Token { tok, space: self.space, text });
        self.space = false;
    }

    fn symbol(&mut self, c: char) {
        self.push(Tok::Sym(c));
    }

    fn step(&mut self) -> Option<()> {
        if self.text_ends.last() == Some(&self.at) {
            self.text_ends.pop();
            self.at += 1;
            return Some(());
        }
        let c = self.peek(0);
        if c.is_whitespace() || c == '~' {
            self.space = true;
            self.at += 1;
        } else if c.is_ascii_digit() || c == '.' && (self.peek(1).is_ascii_digit() || self.repeats()) {
            let before = self.out.last().map(|t| &t.tok);
            let free = !matches!(before, Some(Tok::Sym('_' | '^')));
            let (literal, end) = number::literal(self.chars, self.at, self.commas, free)?;
            self.push(Tok::Num(literal));
            self.at = end;
        } else if self.is_times() {
            self.symbol('*');
            self.at += 1;
        } else if c.is_ascii_alphabetic() {
            self.letters();
        } else if c == '\\' {
            self.at += 1;
            self.command()?;
        } else {
            self.punctuation(c)?;
        }
        Some(())
    }

    /// Whether a repeating decimal without a zero starts at the point that stands here.
    fn repeats(&self) -> bool {
        let ahead = |mark: &str| mark.chars().enumerate().all(|(i, c)| self.peek(1 + i) == c);
        ahead("\\overline{") || ahead("\\bar{")
    }

    /// Whether the letter x stands for a sign of multiplication, as in `3 x 10^8`.
    fn is_times(&self) -> bool {
        let after_number = matches!(self.out.last().map(|t| &t.tok), Some(Tok::Num(_)));
        if !after_number || !matches!(self.peek(0), 'x' | 'X') {
            return false;
        }
        let next = (1..).find(|ahead| self.peek(*ahead) != ' ').unwrap_or(1);
        let power = ['1', '0', '^'].iter().enumerate().all(|(i, c)| self.peek(next + i) == *c);
        power || ['1', '0', '*', '*'].iter().enumerate().all(|(i, c)| self.peek(next + i) == *c)
    }

    fn punctuation(&mut self, c: char) -> Option<()> {
        let two = [c, self.peek(1)];
        let (tok, len) = match two {
            ['*', '*'] => (Some('^'), 2),
            ['<', '='] => (Some('≤'), if self.peek(2) == '>' { 3 } else { 2 }),
            ['=', '<'] => (Some('≤'), 2),
            ['>', '='] => (Some('≥'), 2),
            ['!', '='] => (Some('≠'), 2),
            ['=', '='] => (Some('='), 2),
            ['-', '>'] | ['=', '>'] => (Some('→'), 2),
            ['$', _] if self.odd_dollars && self.peek(1).is_ascii_digit() => (Some('$'), 1),
            ['$', _] => (None, 1),
            ['.', '.'] if self.peek(2) == '.' => (Some('…'), 3),
            // A full stop that ends a sentence or an abbreviation.
            ['.', _] => (None, 1),
            ['"' | '`' | '?', _] => (None, 1),
            // Outside a table it aligns lines.
            ['&', _] if self.tables == 0 => (None, 1),
            ['+' | '-' | '*' | '/' | '^' | '_' | '(' | ')' | '[' | ']' | '{' | '}' | '|' | ',', _]
            | [';' | ':' | '!' | '\'' | '=' | '<' | '>' | '&' | '%' | '€' | '£' | '¥' | '₹' | '¢', _] => {
                (Some(c), 1)
            }
            [c, _] if c.is_alphabetic() => return self.foreign(),
            _ => return None,
        };
        if let Some(tok) = tok {
            self.symbol(tok);
        } else {
            self.space = true;
        }
        self.at += len;
        Some(())
    }

    /// A word in another alphabet.
    fn foreign(&mut self) -> Option<()> {
        let mut word = String::new();
        let mut end = self.at;
        while let Some(c) = self.chars.get(end).filter(|c| c.is_alphanumeric()) {
            word.push(*c);
            end += 1;
        }
        self.push(Tok::Word(word));
        self.at = end;
        Some(())
    }

    /// A run of letters: functions, units, words, or one variable a letter.
    fn letters(&mut self) {
        let mut end = self.at;
        while self.chars.get(end).is_some_and(char::is_ascii_alphabetic) {
            end += 1;
        }
        let run: String = self.chars[self.at..end].iter().collect();
        let in_text = !self.text_ends.is_empty();
        let after_number = match &self.out[..] {
            [.., last] if matches!(last.tok, Tok::Num(_)) => true,
            // The second unit of \mathrm{m\,s^{-2}}.
            [.., last]
                if in_text && last.text && matches!(&last.tok, Tok::Word(unit) if units::is_known(unit)) =>
            {
                true
            }
            // The second unit of m/s.
            [.., unit, sign] => matches!(unit.tok, Tok::Word(_)) && matches!(sign.tok, Tok::Sym('/' | '*')),
            _ => false,
        };
        if self.whole_run(&run, in_text, after_number) {
            self.at = end;
            return;
        }
        // One by one, with the names of functions and Greek letters taken where they stand.
        while self.at < end {
            let rest = &run[run.len() - (end - self.at)..];
            let len = match words::command_prefix(rest) {
                Some((tok, len)) => {
                    self.push(tok);
                    len
                }
                None => {
                    self.push(Tok::Name(rest[..1].to_string()));
                    1
                }
            };
            self.at += len;
        }
    }

    /// Takes a run of letters as one token where it is one.
    fn whole_run(&mut self, run: &str, in_text: bool, after_number: bool) -> bool {
        let next = self.peek(run.len());
        let tok = if run.len() == 1 {
            // A letter in roman type after a number is a unit; elsewhere a variable.
            if in_text && after_number && units::is_known(run) {
                Tok::Word(run.to_string())
            } else {
                Tok::Name(run.to_string())
            }
        } else if let Some(tok) = words::command_whole(run) {
            tok
        } else if run == "dx" || run == "dt" || run == "dy" || run == "du" || run == "dz" {
            return false;
        } else if run.bytes().all(|b| b.is_ascii_uppercase()) && !units::is_known(run) {
            // Points and segments: AB is one thing.
            Tok::Name(run.to_string())
        } else if in_text || words::is_word(run) || units::is_unit_word(run) && next != '(' {
            Tok::Word(run.to_string())
        } else {
            return false;
        };
        self.push(tok);
        true
    }
}

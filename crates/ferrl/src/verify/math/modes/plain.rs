//! What the graders written in Python share: LaTeX as plain text, numbers as Python reads them, and equality as a
//! computer algebra system sees it.

use super::super::{Budget, Commas, Const, Expr, Num, VariableNames, parser, scalar};

/// A text as Python's `float` reads it.
pub fn float(text: &str) -> Option<f64> {
    text.trim().parse().ok()
}

/// `7 3/4` as `7+3/4`.
pub fn mixed_numbers(text: &str) -> String {
    let chars: Vec<char> = text.chars().collect();
    let mut out = String::with_capacity(text.len());
    let mut at = 0;
    while at < chars.len() {
        out.push(chars[at]);
        if chars[at].is_ascii_digit() && chars.get(at + 1) == Some(&' ') {
            let mut next = at + 1;
            while chars.get(next) == Some(&' ') {
                next += 1;
            }
            if let Some(digit) = chars.get(next).filter(|c| c.is_ascii_digit()) {
                out.push('+');
                out.push(*digit);
                at = next + 1;
                continue;
            }
        }
        at += 1;
    }
    out
}

/// LaTeX as the text that a plain renderer gives: `\frac{a}{b}` is `a/b`, without brackets.
pub fn latex_to_text(latex: &str) -> String {
    let chars: Vec<char> = latex.chars().collect();
    let mut out = String::new();
    let mut reader = Reader { chars: &chars, at: 0, depth: 0 };
    while reader.at < chars.len() {
        reader.piece(&mut out);
    }
    out
}

struct Reader<'a> {
    chars: &'a [char],
    at: usize,
    depth: usize,
}

impl Reader<'_> {
    fn piece(&mut self, out: &mut String) {
        let c = self.chars[self.at];
        self.at += 1;
        match c {
            '\\' => self.macro_call(out),
            '{' | '}' | '$' => {}
            '~' => out.push(' '),
            '&' => out.push(' '),
            c => out.push(c),
        }
    }

    /// The text of an argument: a group, a macro or one character.
    fn argument(&mut self) -> String {
        let mut out = String::new();
        while self.chars.get(self.at).is_some_and(|c| c.is_whitespace()) {
            self.at += 1;
        }
        if self.depth > 40 {
            self.at = self.chars.len();
            return out;
        }
        self.depth += 1;
        match self.chars.get(self.at) {
            Some('{') => {
                self.at += 1;
                let mut open = 1;
                while let Some(c) = self.chars.get(self.at) {
                    match c {
                        '{' => open += 1,
                        '}' => open -= 1,
                        _ => {}
                    }
                    if open == 0 {
                        self.at += 1;
                        break;
                    }
                    self.piece(&mut out);
                }
            }
            Some(_) => self.piece(&mut out),
            None => {}
        }
        self.depth -= 1;
        out
    }

    fn macro_call(&mut self, out: &mut String) {
        let start = self.at;
        while self.chars.get(self.at).is_some_and(char::is_ascii_alphabetic) {
            self.at += 1;
        }
        let name: String = self.chars[start..self.at].iter().collect();
        if name.is_empty() {
            match self.chars.get(self.at) {
                Some('\\') => out.push('\n'),
                Some(',' | ';' | ':' | ' ') => out.push(' '),
                Some('!' | '(' | ')' | '[' | ']') | None => {}
                Some(c) => out.push(*c),
            }
            self.at += 1;
            return;
        }
        match name.as_str() {
            "frac" => {
                let (top, bottom) = (self.argument(), self.argument());
                out.push_str(&format!("{top}/{bottom}"));
            }
            "sqrt" => {
                if self.chars.get(self.at) == Some(&'[') {
                    while self.chars.get(self.at).is_some_and(|c| *c != ']') {
                        self.at += 1;
                    }
                    self.at += 1;
                }
                let inner = self.argument();
                out.push_str(&format!("√({inner})"));
            }
            "text" | "mathrm" | "mathbf" | "textbf" | "mbox" | "textit" | "textrm" | "mathit"
            | "textnormal" | "operatorname" | "boxed" => out.push_str(&self.argument()),
            "begin" | "end" => {
                let kind = self.argument();
                if kind.ends_with("matrix") || kind == "array" {
                    out.push_str(if name == "begin" { "[ " } else { " ]" });
                }
            }
            "left" | "right" | "big" | "Big" | "displaystyle" => {}
            "quad" | "qquad" => out.push(' '),
            "sin" | "cos" | "tan" | "cot" | "sec" | "csc" | "log" | "ln" | "exp" | "arcsin" | "arccos"
            | "arctan" | "min" | "max" | "gcd" | "sinh" | "cosh" | "tanh" => out.push_str(&name),
            _ => out.push_str(symbol(&name)),
        }
    }
}

/// The character of a command.
fn symbol(name: &str) -> &'static str {
    match name {
        "pi" => "π",
        "infty" => "∞",
        "cup" => "∪",
        "cap" => "∩",
        "cdot" => "·",
        "times" => "×",
        "pm" => "±",
        "le" | "leq" => "≤",
        "ge" | "geq" => "≥",
        "ne" | "neq" => "≠",
        "in" => "∈",
        "approx" => "≈",
        "to" | "rightarrow" => "→",
        "circ" => "∘",
        "sum" => "∑",
        "int" => "∫",
        "ldots" | "dots" => "…",
        "alpha" => "α",
        "beta" => "β",
        "gamma" => "γ",
        "theta" => "θ",
        "lambda" => "λ",
        "phi" => "ϕ",
        "omega" => "ω",
        _ => "",
    }
}

/// [`latex_to_text`], with the few signs that computer algebra knows by name.
pub fn parse_latex(latex: &str) -> String {
    let latex = latex.replace("\\tfrac", "\\frac").replace("\\dfrac", "\\frac").replace("\\frac", " \\frac");
    let text = latex_to_text(&latex).replace('√', "sqrt").replace('π', "pi").replace('∞', "inf");
    text.replace('∪', "U").replace(['·', '×'], "*").trim().to_string()
}

/// A formula in the syntax of Python's computer algebra, where `e` and `i` are plain variables.
fn formula(text: &str, budget: &Budget) -> Option<Expr> {
    // What Python's grammar does not have is an error there.
    let foreign = text.chars().any(|c| "{}[]|,;:=<>%\\\"'&?".contains(c)) || !text.is_ascii();
    let bytes = text.as_bytes();
    let digit = |at: Option<&u8>| at.is_some_and(u8::is_ascii_digit);
    let index = (0..bytes.len())
        .any(|i| bytes[i] == b'_' && !(i > 0 && digit(bytes.get(i - 1)) && digit(bytes.get(i + 1))));
    if foreign || index {
        return None;
    }
    // An underscore between digits is part of the number.
    let text: String = text.chars().filter(|c| *c != '_').collect();
    let expr = parser::parse(&text, Commas::Separate, budget)?;
    let odd = expr.any(&|e| {
        matches!(
            e,
            Expr::Text(_)
                | Expr::Unit(..)
                | Expr::List(..)
                | Expr::Chain(..)
                | Expr::Tuple(..)
                | Expr::PlusMinus(..)
        )
    });
    (!odd).then(|| symbols(&expr))
}

fn symbols(expr: &Expr) -> Expr {
    match expr {
        Expr::Const(Const::E) => Expr::Var("e".into()),
        Expr::Const(Const::I) => Expr::Var("i".into()),
        Expr::Const(Const::Infinity) => Expr::Var("inf".into()),
        other => other.map(&mut symbols),
    }
}

pub fn difference_is_zero(gold: &str, answer: &str, budget: &Budget) -> bool {
    match (formula(gold, budget), formula(answer, budget)) {
        (Some(gold), Some(answer)) => scalar::identical(&gold, &answer, budget),
        _ => false,
    }
}

/// The value of a formula without variables and without products that only juxtapose, in machine precision.
pub fn value(text: &str, budget: &Budget) -> Option<f64> {
    let bytes = text.as_bytes();
    let implicit = bytes.windows(2).any(|w| {
        let (a, b) = (w[0], w[1]);
        a.is_ascii_digit() && (b.is_ascii_alphabetic() && b != b'e' || b == b'(')
            || a == b')' && (b == b'(' || b.is_ascii_alphanumeric())
            || a == b' ' && b.is_ascii_alphanumeric()
    });
    if implicit {
        return None;
    }
    let expr = formula(text, budget)?;
    let names = VariableNames::of(&[&expr]);
    if !names.all.is_empty() {
        return None;
    }
    let value: Num = names.at(0, budget).num(&expr).ok()?;
    Some(value.real().ok()?.float().to_f64())
}

/// Python's `math.isclose` with an absolute tolerance.
pub fn close(a: f64, b: f64, tolerance: f64) -> bool {
    a == b || (a - b).abs() <= (1e-9 * a.abs().max(b.abs())).max(tolerance)
}

//! Parses literals of Python and JSON; nothing is evaluated.

use super::object::Object;

/// Parses a text that is one literal: numbers of any size, texts, bytes, lists, tuples, sets, dictionaries, `None`, `True`,
/// `False` (or JSON's names for them), `set()`, `set([...])`, `float("inf")`.
pub(super) fn parse(text: &str) -> Result<Object, String> {
    let mut parser = LiteralParser::new(text);
    let value = parser.literal()?;
    parser.end()?;
    Ok(value)
}

/// Maximum nesting of brackets.
const DEEPEST: usize = 60;

/// A parser with a position in its text.
pub(super) struct LiteralParser<'a> {
    text: &'a str,
    at: usize,
    depth: usize,
}

impl<'a> LiteralParser<'a> {
    pub(super) fn new(text: &'a str) -> Self {
        LiteralParser { text, at: 0, depth: 0 }
    }

    fn rest(&self) -> &'a str {
        &self.text[self.at..]
    }

    /// The next character after white space and comments.
    pub(super) fn peek(&mut self) -> Option<char> {
        loop {
            let rest = self.rest();
            let blank = rest.len() - rest.trim_start_matches([' ', '\t', '\n', '\r', '\\']).len();
            self.at += blank;
            match self.rest().strip_prefix('#') {
                Some(comment) => self.at += 1 + comment.find('\n').unwrap_or(comment.len()),
                None => return self.rest().chars().next(),
            }
        }
    }

    /// Consumes `piece` if it is next.
    pub(super) fn take(&mut self, piece: &str) -> bool {
        self.peek();
        let there = self.rest().starts_with(piece);
        if there {
            self.at += piece.len();
        }
        there
    }

    /// Consumes a name if one is next.
    pub(super) fn name(&mut self) -> Option<&'a str> {
        self.peek().filter(|c| c.is_alphabetic() || *c == '_')?;
        let rest = self.rest();
        let end = rest.find(|c: char| !c.is_alphanumeric() && c != '_').unwrap_or(rest.len());
        self.at += end;
        Some(&rest[..end])
    }

    /// The present position, to return to.
    pub(super) fn place(&self) -> usize {
        self.at
    }

    /// Returns to an earlier position.
    pub(super) fn back(&mut self, place: usize) {
        self.at = place;
    }

    /// Checks that only white space follows.
    pub(super) fn end(&mut self) -> Result<(), String> {
        match self.peek() {
            None => Ok(()),
            Some(_) => Err(self.unexpected("the end")),
        }
    }

    pub(super) fn expect(&mut self, piece: &str) -> Result<(), String> {
        if self.take(piece) { Ok(()) } else { Err(self.unexpected(&format!("{piece:?}"))) }
    }

    pub(super) fn unexpected(&mut self, wanted: &str) -> String {
        self.peek();
        let rest: String = self.rest().chars().take(24).collect();
        if rest.is_empty() {
            format!("it ends where {wanted} is expected")
        } else {
            format!("{wanted} expected before {rest:?}")
        }
    }

    pub(super) fn literal(&mut self) -> Result<Object, String> {
        self.depth += 1;
        if self.depth > DEEPEST {
            return Err(format!("more than {DEEPEST} brackets within each other"));
        }
        let value = self.sum();
        self.depth -= 1;
        value
    }

    /// A literal, or a complex number written as a sum.
    fn sum(&mut self) -> Result<Object, String> {
        let first = self.signed()?;
        let real = match &first {
            Object::Float(x) => *x,
            Object::Int(digits) => digits.parse().unwrap_or(f64::NAN),
            _ => return Ok(first),
        };
        let place = self.at;
        let sign = match self.peek() {
            Some('+') => 1.0,
            Some('-') => -1.0,
            _ => return Ok(first),
        };
        self.at += 1;
        match self.signed()? {
            Object::Complex(0.0, im) => Ok(Object::Complex(real, sign * im)),
            _ => {
                self.at = place;
                Err(self.unexpected("the end of a literal"))
            }
        }
    }

    fn signed(&mut self) -> Result<Object, String> {
        if self.take("-") {
            return match self.signed()? {
                Object::Int(digits) => Object::int(&match digits.strip_prefix('-') {
                    Some(rest) => rest.to_string(),
                    None => format!("-{digits}"),
                })
                .ok_or_else(|| "not a number".into()),
                Object::Float(x) => Ok(Object::Float(-x)),
                Object::Complex(re, im) => Ok(Object::Complex(-re, -im)),
                _ => Err("a minus before a value that is not a number".into()),
            };
        }
        if self.take("+") {
            return self.signed();
        }
        self.atom()
    }

    fn atom(&mut self) -> Result<Object, String> {
        match self.peek() {
            Some('[') => Ok(Object::List(self.items("[", "]")?.0)),
            Some('(') => {
                let (mut items, comma) = self.items("(", ")")?;
                match (items.len(), comma) {
                    (1, false) => Ok(items.swap_remove(0)),
                    _ => Ok(Object::Tuple(items)),
                }
            }
            Some('{') => self.braces(),
            Some('"' | '\'') => self.texts(),
            Some(c) if c.is_ascii_digit() || c == '.' => self.number(),
            Some(_) => self.named(),
            None => Err(self.unexpected("a value")),
        }
    }

    /// The items between two brackets, and whether the last is followed by a comma.
    fn items(&mut self, open: &str, close: &str) -> Result<(Vec<Object>, bool), String> {
        self.expect(open)?;
        let (mut items, mut comma) = (Vec::new(), false);
        while !self.take(close) {
            if !items.is_empty() && !comma {
                return Err(self.unexpected(&format!("\",\" or {close:?}")));
            }
            items.push(self.literal()?);
            comma = self.take(",");
        }
        Ok((items, comma))
    }

    fn braces(&mut self) -> Result<Object, String> {
        self.expect("{")?;
        let (mut pairs, mut members) = (Vec::new(), Vec::new());
        loop {
            if self.take("}") {
                break;
            }
            let first = self.literal()?;
            if members.is_empty() && self.take(":") {
                pairs.push((first, self.literal()?));
            } else if pairs.is_empty() {
                members.push(first);
            } else {
                return Err(self.unexpected("\":\""));
            }
            if !self.take(",") {
                self.expect("}")?;
                break;
            }
        }
        Ok(if members.is_empty() { Object::Dict(pairs) } else { Object::Set(distinct(members)) })
    }

    fn number(&mut self) -> Result<Object, String> {
        let rest = self.rest();
        let lower = rest.get(..2).unwrap_or_default().to_ascii_lowercase();
        if let Some(base) =
            [("0x", 16), ("0o", 8), ("0b", 2)].iter().find(|(p, _)| *p == lower).map(|(_, b)| *b)
        {
            let end = rest.find(|c: char| !c.is_ascii_alphanumeric() && c != '_').unwrap_or(rest.len());
            self.at += end;
            let digits = rest[2..end].replace('_', "");
            let value =
                u128::from_str_radix(&digits, base).map_err(|_| format!("not a number: {}", &rest[..end]))?;
            return Ok(Object::Int(value.to_string()));
        }
        let mut end = 0;
        let bytes = rest.as_bytes();
        while end < bytes.len() {
            let sign = matches!(bytes[end], b'+' | b'-') && end > 0 && matches!(bytes[end - 1], b'e' | b'E');
            if !(bytes[end].is_ascii_digit() || matches!(bytes[end], b'.' | b'_' | b'e' | b'E') || sign) {
                break;
            }
            end += 1;
        }
        let digits = rest[..end].replace('_', "");
        self.at += end;
        let wrong = || format!("not a number: {}", &rest[..end]);
        if self.rest().starts_with(['j', 'J']) {
            self.at += 1;
            return Ok(Object::Complex(0.0, digits.parse().map_err(|_| wrong())?));
        }
        match Object::int(&digits) {
            Some(int) => Ok(int),
            None => Ok(Object::Float(digits.parse().map_err(|_| wrong())?)),
        }
    }

    /// A named constant, a text with a prefix, or a call of a constructor with a literal.
    fn named(&mut self) -> Result<Object, String> {
        let place = self.at;
        let Some(name) = self.name() else { return Err(self.unexpected("a value")) };
        if self.rest().starts_with(['"', '\'']) {
            self.at = place;
            return self.texts();
        }
        match name {
            "None" | "null" => return Ok(Object::None),
            "True" | "true" => return Ok(Object::Bool(true)),
            "False" | "false" => return Ok(Object::Bool(false)),
            "inf" | "Infinity" => return Ok(Object::Float(f64::INFINITY)),
            "nan" | "NaN" => return Ok(Object::Float(f64::NAN)),
            _ => {}
        }
        if !["set", "frozenset", "tuple", "list", "float"].contains(&name) || self.peek() != Some('(') {
            self.at = place;
            return Err(self.unexpected("a value"));
        }
        let (mut given, _) = self.items("(", ")")?;
        let of = match given.len() {
            0 => Object::Tuple(Vec::new()),
            1 => given.swap_remove(0),
            _ => return Err(format!("{name} of more than one value")),
        };
        match (name, of) {
            ("float", Object::Str(text)) => {
                text.trim().parse().map(Object::Float).map_err(|_| format!("not a number: {text:?}"))
            }
            ("float", Object::Float(x)) => Ok(Object::Float(x)),
            ("float", Object::Int(digits)) => {
                digits.parse().map(Object::Float).map_err(|_| "not a number".into())
            }
            ("tuple", Object::List(all) | Object::Tuple(all)) => Ok(Object::Tuple(all)),
            ("list", Object::List(all) | Object::Tuple(all)) => Ok(Object::List(all)),
            ("set" | "frozenset", Object::List(all) | Object::Tuple(all) | Object::Set(all)) => {
                Ok(Object::Set(distinct(all)))
            }
            ("set" | "frozenset", Object::Str(text)) => {
                Ok(Object::Set(distinct(text.chars().map(|c| Object::Str(c.into())).collect())))
            }
            (name, _) => Err(format!("{name} of such a value is not evaluated")),
        }
    }

    /// Consecutive texts are concatenated.
    fn texts(&mut self) -> Result<Object, String> {
        let mut whole: Option<Object> = None;
        loop {
            let place = self.at;
            let prefix = self.name().unwrap_or_default().to_ascii_lowercase();
            if !self.rest().starts_with(['"', '\'']) {
                self.at = place;
                return whole.ok_or_else(|| self.unexpected("a text"));
            }
            if !["", "r", "u", "b", "br", "rb"].contains(&prefix.as_str()) {
                return Err(format!("texts with the prefix {prefix:?} are not read"));
            }
            let part = self.quoted(prefix.contains('r'), prefix.contains('b'))?;
            whole = Some(match (whole, part) {
                (None, part) => part,
                (Some(Object::Str(a)), Object::Str(b)) => Object::Str(a + &b),
                (Some(Object::Bytes(a)), Object::Bytes(b)) => Object::Bytes([a, b].concat()),
                _ => return Err("texts and bytes cannot be concatenated".into()),
            });
            self.peek();
        }
    }

    fn quoted(&mut self, raw: bool, bytes: bool) -> Result<Object, String> {
        let quote = self.rest().chars().next().unwrap_or('"');
        let triple = quote.to_string().repeat(3);
        let end = if self.rest().starts_with(&triple) { triple } else { quote.to_string() };
        self.at += end.len();
        let (mut text, mut units) = (String::new(), Vec::new());
        loop {
            let rest = self.rest();
            if rest.starts_with(&end) {
                self.at += end.len();
                break;
            }
            let Some(c) = rest.chars().next() else { return Err("a text that does not end".into()) };
            self.at += c.len_utf8();
            let c = match c {
                '\n' if end.len() == 1 => return Err("a text that does not end".into()),
                '\\' if raw => {
                    text.push('\\');
                    let next = self.rest().chars().next().ok_or("a text that does not end")?;
                    self.at += next.len_utf8();
                    Some(next)
                }
                '\\' => self.escape(bytes)?,
                c => Some(c),
            };
            if bytes {
                units.extend(text.drain(..).chain(c).map(|c| u8::try_from(u32::from(c)).unwrap_or(b'?')));
            } else {
                text.extend(c);
            }
        }
        Ok(if bytes { Object::Bytes(units) } else { Object::Str(text) })
    }

    /// The character of an escape sequence; none for an escaped line break.
    fn escape(&mut self, bytes: bool) -> Result<Option<char>, String> {
        let rest = self.rest();
        let Some(c) = rest.chars().next() else { return Err("a text that does not end".into()) };
        self.at += c.len_utf8();
        let length = match c {
            'n' => return Ok(Some('\n')),
            't' => return Ok(Some('\t')),
            'r' => return Ok(Some('\r')),
            'a' => return Ok(Some('\x07')),
            'b' => return Ok(Some('\x08')),
            'f' => return Ok(Some('\x0c')),
            'v' => return Ok(Some('\x0b')),
            '\n' => return Ok(None),
            '\\' | '\'' | '"' | '/' => return Ok(Some(c)),
            '0'..='7' => {
                let digits: String = rest.chars().take(3).take_while(|c| ('0'..='7').contains(c)).collect();
                self.at += digits.len() - 1;
                return Ok(u32::from_str_radix(&digits, 8).ok().and_then(char::from_u32));
            }
            'x' => 2,
            'u' if !bytes => 4,
            'U' if !bytes => 8,
            other => return Err(format!("the escape \\{other} is not read")),
        };
        let mut code = self.hex(length)?;
        // JSON writes characters beyond the basic plane as surrogate pairs.
        if (0xD800..0xDC00).contains(&code) && self.rest().starts_with("\\u") {
            self.at += 2;
            let low = self.hex(4)?;
            code = 0x10000 + ((code - 0xD800) << 10) + low.saturating_sub(0xDC00);
        }
        char::from_u32(code).map(Some).ok_or_else(|| "an unpaired surrogate in a text".into())
    }

    fn hex(&mut self, length: usize) -> Result<u32, String> {
        let digits = self.rest().get(..length).ok_or("an escape that does not end")?;
        self.at += length;
        u32::from_str_radix(digits, 16).map_err(|_| format!("not a character code: {digits}"))
    }
}

fn distinct(members: Vec<Object>) -> Vec<Object> {
    let mut kept: Vec<Object> = Vec::new();
    for member in members {
        if !kept.iter().any(|k| super::compare::equal(k, &member, 0.0)) {
            kept.push(member);
        }
    }
    kept
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn literals_are_read_as_python_reads_them() {
        for (text, shown) in [
            ("[1, -2.5, 'a' \"b\", (3,), (4), (), {}]", "[1, -2.5, \"ab\", (3,), 4, (), {}]"),
            ("{'k': [True, None], 2: {1, 1.0, 2}}", "{\"k\": [True, None], 2: {1, 2}}"),
            ("0xff", "255"),
            ("1_000", "1000"),
            ("-0", "0"),
            ("1e3", "1000.0"),
            ("1-2j", "(1.0-2.0j)"),
            ("set()", "set()"),
            ("set([2, 2])", "{2}"),
            ("-float('inf')", "-inf"),
            (r"'\x41\u00e9\n\''", "\"Aé\\n'\""),
            (r#""\ud83d\ude00""#, "\"😀\""),
            (r"r'\d'", r#""\\d""#),
            (r"b'\x00a'", r#"b"\x00a""#),
            ("[1, # one\n 2]", "[1, 2]"),
            ("[true, null]", "[True, None]"),
        ] {
            assert_eq!(parse(text).map(|v| v.to_string()).as_deref(), Ok(shown), "{text}");
        }
    }

    #[test]
    fn what_would_have_to_be_evaluated_is_refused() {
        let deep = "[".repeat(100);
        for text in [
            "", "f(1)", "1 + 1", "2 ** 3", "[x for x in y]", "__import__('os')", "f'{x}'", "[1", "'a",
            "{1: 2, 3}", "1 2", "a.b", "{**x}", "[1,,2]", "'\\N{DASH}'", "lambda: 1", "open('f')", "-'a'",
            &deep, "1..2", "é",
        ] {
            assert!(parse(text).is_err(), "{text}: {:?}", parse(text));
        }
    }
}

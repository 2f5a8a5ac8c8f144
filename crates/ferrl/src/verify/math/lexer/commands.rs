//! What follows a backslash.

use super::super::Tok;
use super::super::language::words;
use super::Lexer;

impl Lexer<'_> {
    /// What follows a backslash.
    pub(super) fn command(&mut self) -> Option<()> {
        let c = self.peek(0);
        if !c.is_ascii_alphabetic() {
            self.at += 1;
            match c {
                '{' => self.symbol('⦃'),
                '}' => self.symbol('⦄'),
                '%' => self.symbol('%'),
                '$' => self.symbol('$'),
                '|' => self.symbol('‖'),
                '\\' => self.symbol('\n'),
                '_' | '#' | '&' => self.space = true,
                ',' | ';' | ':' | '!' | ' ' | '(' | ')' | '[' | ']' | '>' | '\n' | '/' => self.space = true,
                '\0' => {}
                _ => return None,
            }
            return Some(());
        }
        let start = self.at;
        let mut end = start;
        while self.chars.get(end).is_some_and(char::is_ascii_alphabetic) {
            end += 1;
        }
        let name: String = self.chars[start..end].iter().collect();
        self.at = end;
        self.named_command(&name)
    }

    pub(super) fn named_command(&mut self, name: &str) -> Option<()> {
        if words::is_text_command(name) {
            self.space |= self.peek(0) == ' ';
            self.open_text();
            return Some(());
        }
        if words::is_font_command(name)
            || matches!(name, "boxed" | "fbox" | "mathop" | "mathrel" | "ensuremath")
        {
            return Some(());
        }
        if words::is_skipped(name) {
            self.space = true;
            return Some(());
        }
        match name {
            "begin" | "end" => return self.environment(name == "begin"),
            "quad" | "qquad" => self.symbol(','),
            "mathbb" | "Bbb" => self.blackboard()?,
            "newline" | "cr" => self.symbol('\n'),
            "hspace" | "vspace" | "phantom" | "hphantom" | "label" | "tag" | "color" | "textcolor" => {
                self.group()?;
            }
            _ => match words::command_exact(name) {
                Some(tok) => self.push(tok),
                None => return self.split_command(name),
            },
        }
        Some(())
    }

    /// A command that runs into what follows it, such as `\quadx`.
    pub(super) fn split_command(&mut self, name: &str) -> Option<()> {
        for len in (2..name.len()).rev() {
            let head = &name[..len];
            let known = words::command_exact(head).is_some()
                || words::is_skipped(head)
                || matches!(head, "quad" | "qquad");
            if known {
                self.at -= name.len() - len;
                return self.named_command(head);
            }
        }
        self.push(Tok::Name(name.to_string()));
        Some(())
    }

    /// The text of a group in braces, which is skipped.
    pub(super) fn group(&mut self) -> Option<String> {
        while self.peek(0).is_whitespace() {
            self.at += 1;
        }
        if self.peek(0) != '{' {
            return Some(String::new());
        }
        let (mut depth, start) = (0usize, self.at + 1);
        for end in self.at..self.chars.len() {
            match self.chars[end] {
                '{' => depth += 1,
                '}' => depth -= 1,
                _ => {}
            }
            if depth == 0 {
                self.at = end + 1;
                return Some(self.chars[start..end].iter().collect());
            }
        }
        None
    }

    /// Enters the group that follows as text; its braces are no tokens.
    pub(super) fn open_text(&mut self) {
        let back = self.at;
        if self.group().is_some() && self.at > back {
            let open = (back..self.at).find(|i| self.chars[*i] == '{').unwrap_or(back);
            self.text_ends.push(self.at - 1);
            self.at = open + 1;
        }
    }

    pub(super) fn blackboard(&mut self) -> Option<()> {
        let name = if self.peek(0) == '{' {
            self.group()?
        } else {
            self.at += 1;
            self.chars.get(self.at - 1).map(char::to_string).unwrap_or_default()
        };
        self.push(Tok::Cmd(match name.trim() {
            "R" => "setR",
            "Z" => "setZ",
            "N" => "setN",
            "Q" => "setQ",
            "C" => "setC",
            _ => return None,
        }));
        Some(())
    }

    /// Whether the array that starts here stands behind a brace that nothing closes, as systems do; the brace is
    /// dropped.
    fn opens_system(&mut self) -> bool {
        let brace = matches!(self.out.last().map(|t| &t.tok), Some(Tok::Sym('⦃')));
        let rest: String = self.chars[self.at..].iter().collect();
        let after = rest.rsplit_once("\\end{array}").map(|(_, after)| after.trim());
        let system = brace
            && after
                .is_some_and(|after| after.is_empty() || after == "\\right" || after.starts_with("\\right."));
        if system {
            self.out.pop();
        }
        system
    }

    pub(super) fn environment(&mut self, begin: bool) -> Option<()> {
        let kind = self.group()?;
        let kind = kind.trim().trim_end_matches('*');
        match kind {
            "pmatrix" | "bmatrix" | "vmatrix" | "Vmatrix" | "Bmatrix" | "matrix" | "smallmatrix"
            | "array" | "cases" | "psmallmatrix" => {
                if begin && kind == "array" {
                    self.group()?;
                }
                let kind = if begin && kind == "array" && self.opens_system() { "cases" } else { kind };
                self.tables = if begin { self.tables + 1 } else { self.tables.saturating_sub(1) };
                self.push(if begin { Tok::Begin(kind.to_string()) } else { Tok::End });
            }
            // Environments of display mathematics say nothing about what stands in them.
            _ => self.space = true,
        }
        Some(())
    }
}

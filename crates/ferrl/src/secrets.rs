//! Secrets (keys and tokens) from the environment, or from a file `.env` in the working directory that git ignores. Only code that
//! requests them by name gets them: a run folder has their names, and logs replace their values.

use ferrl_engine::{Error, Result};
use ferrl_kernels::lock;
use std::borrow::Cow;
use std::path::Path;
use std::sync::{LazyLock, Mutex};

/// The file in the working directory.
pub const FILE: &str = ".env";

/// Endings of the names of secrets; other variables (a path, a number) may be shown.
const SECRET: &[&str] = &["KEY", "TOKEN", "SECRET", "PASSWORD", "CREDENTIAL"];

/// Shorter values would black out ordinary words.
const SHORTEST: usize = 8;

/// Secrets that were asked for: name and value.
static GIVEN: Mutex<Vec<(String, String)>> = Mutex::new(Vec::new());

/// The lines of [`FILE`], read when first needed.
static LINES: LazyLock<Result<Vec<(String, String)>>> = LazyLock::new(|| read(Path::new(FILE)));

/// A variable of the environment, or of the file `.env` where the environment has none; `None` where neither has it, or
/// it is empty.
pub fn get(name: &str) -> Result<Option<String>> {
    let there = |value: &String| !value.trim().is_empty();
    let value = match std::env::var(name) {
        Ok(value) if there(&value) => Some(value),
        Err(std::env::VarError::NotUnicode(_)) => {
            return Err(Error::usage("the variable of the environment is not UTF-8 text").at(name));
        }
        _ => file()?.iter().find(|(n, _)| n == name).map(|(_, value)| value.clone()).filter(there),
    };
    value.iter().for_each(|value| keep(name, value));
    Ok(value)
}

pub fn is_secret(name: &str) -> bool {
    let name = name.to_ascii_uppercase();
    SECRET.iter().any(|word| name.ends_with(word) || name.ends_with(&format!("{word}S")))
}

/// Remembers a secret, so that it is blacked out.
fn keep(name: &str, value: &str) {
    if is_secret(name) && value.len() >= SHORTEST {
        let mut given = lock(&GIVEN);
        if !given.iter().any(|(n, v)| n == name && v == value) {
            given.push((name.to_string(), value.to_string()));
        }
    }
}

/// The variables of the file `.env` that the environment does not have, for programs that are started here.
pub fn for_children() -> Vec<(String, String)> {
    let lines = file().unwrap_or_default();
    // What a program is given it may print.
    lines.iter().for_each(|(name, value)| keep(name, value));
    std::env::vars_os()
        .filter_map(|(n, v)| n.into_string().ok().zip(v.into_string().ok()))
        .for_each(|(n, v)| keep(&n, &v));
    lines.iter().filter(|(name, _)| std::env::var_os(name).is_none()).cloned().collect()
}

/// The text with every secret that was asked for replaced by its name.
pub fn redact(text: &str) -> Cow<'_, str> {
    let given = lock(&GIVEN);
    let mut text = Cow::Borrowed(text);
    for (name, value) in given.iter() {
        // As it stands in JSON too.
        let quoted = serde_json::Value::from(value.as_str()).to_string();
        for form in [value.as_str(), quoted.trim_matches('"')] {
            if text.contains(form) {
                text = Cow::Owned(text.replace(form, &format!("${{{name}}}")));
            }
        }
    }
    text
}

fn file() -> Result<&'static [(String, String)]> {
    LINES.as_ref().map(Vec::as_slice).map_err(Clone::clone)
}

/// `NAME=value` lines; none where there is no file.
fn read(path: &Path) -> Result<Vec<(String, String)>> {
    match std::fs::read_to_string(path) {
        Ok(text) => parse(text.strip_prefix('\u{feff}').unwrap_or(&text)),
        Err(e) if e.kind() == std::io::ErrorKind::NotFound => Ok(Vec::new()),
        Err(e) => Err(Error::usage(format!("cannot read: {e}")).at(FILE)),
    }
}

fn parse(text: &str) -> Result<Vec<(String, String)>> {
    let mut lines: Vec<(String, String)> = Vec::new();
    for (number, line) in text.lines().enumerate() {
        let line = line.trim();
        if line.is_empty() || line.starts_with('#') {
            continue;
        }
        // The line itself is not shown: it may hold a secret.
        let wrong = |what: &str| {
            Error::usage(what).at(format!("{FILE}:{}", number + 1)).fix("NAME=value, one to a line")
        };
        let line = line.strip_prefix("export ").unwrap_or(line);
        let (name, value) = line.split_once('=').ok_or_else(|| wrong("a line without `=`"))?;
        let name = name.trim();
        if !is_name(name) {
            return Err(wrong("not a name of letters, digits and _ before ="));
        }
        let value = unquoted(value.trim()).ok_or_else(|| wrong("a quote is not closed"))?;
        lines.retain(|(n, _)| n != name); // the last one counts, as in a shell
        lines.push((name.to_string(), value));
    }
    Ok(lines)
}

/// Without its quotes, or without the comment behind it.
fn unquoted(value: &str) -> Option<String> {
    if let Some(inner) = value.strip_prefix('\'') {
        return inner.split_once('\'').map(|(text, _)| text.to_string());
    }
    let Some(inner) = value.strip_prefix('"') else {
        let end = value.find(" #").unwrap_or(value.len());
        return Some(value[..end].trim_end().to_string());
    };
    let (mut out, mut letters) = (String::new(), inner.chars());
    loop {
        match letters.next()? {
            '"' => return Some(out),
            '\\' => match letters.next()? {
                'n' => out.push('\n'),
                't' => out.push('\t'),
                other => out.push(other),
            },
            letter => out.push(letter),
        }
    }
}

pub fn is_name(name: &str) -> bool {
    let letter = |c: char| c.is_ascii_alphabetic() || c == '_';
    name.starts_with(letter) && name.chars().all(|c| letter(c) || c.is_ascii_digit())
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn lines_are_read_as_a_shell_reads_them() {
        let text =
            "# keys\n\nA=1\nexport B = two words # not this\nC=\"x \\\"y\\\" # z\\n\"\nD='$x \"'\nA=3\n";
        let want = [("B", "two words"), ("C", "x \"y\" # z\n"), ("D", "$x \""), ("A", "3")];
        let got = parse(text).unwrap();
        assert_eq!(got, want.map(|(n, v)| (n.to_string(), v.to_string())));
    }

    #[test]
    fn a_broken_line_is_named_and_not_shown() {
        for (text, place) in
            [("A=1\nsecret-value\n", ".env:2"), ("1A=secret-value", ".env:1"), ("A=\"secret-value", ".env:1")]
        {
            let error = parse(text).unwrap_err().to_string();
            assert!(error.contains(place) && !error.contains("secret-value"), "{error}");
        }
    }

    #[test]
    fn secrets_are_blacked_out_once_they_were_asked_for() {
        assert_eq!(redact("say swordfish-42"), "say swordfish-42");
        GIVEN.lock().unwrap().push(("MY_KEY".into(), "swordfish-\"42".into()));
        assert_eq!(redact("say swordfish-\"42!"), "say ${MY_KEY}!");
        assert_eq!(redact(r#"{"message": "swordfish-\"42"}"#), r#"{"message": "${MY_KEY}"}"#);
    }
}

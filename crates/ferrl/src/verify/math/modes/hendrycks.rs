//! `is_equiv` of the MATH benchmark: rewrites of the text, then equality.

/// Whether two answers are the same text after the rewrites; the raw texts where a rewrite fails.
pub fn equal(gold: &str, answer: &str) -> bool {
    match (normal(gold), normal(answer)) {
        (Some(gold), Some(answer)) => gold == answer,
        _ => gold == answer,
    }
}

/// The rewrites; none where the text is malformed.
pub fn normal(text: &str) -> Option<String> {
    let mut text = text.replace('\n', "").replace("\\!", "").replace("\\\\", "\\");
    text =
        text.replace("tfrac", "frac").replace("dfrac", "frac").replace("\\left", "").replace("\\right", "");
    text = text.replace("^{\\circ}", "").replace("^\\circ", "").replace("\\$", "");
    text = without_unit(&text)?;
    text = text.replace("\\%", "").replace(" .", " 0.").replace("{.", "{0.");
    if text.is_empty() {
        return Some(text);
    }
    if text.starts_with('.') {
        text.insert(0, '0');
    }
    // k = at the start, where the name is short.
    let sides: Vec<&str> = text.split('=').collect();
    if let [name, value] = sides[..]
        && name.chars().count() <= 2
    {
        text = value.to_string();
    }
    text = roots(&text)?.replace(' ', "");
    text = fractions(&text)?;
    if text == "0.5" {
        text = "\\frac{1}{2}".into();
    }
    Some(slash(text))
}

/// What stands before the only `\text{ `, which is a unit.
fn without_unit(text: &str) -> Option<String> {
    let parts: Vec<&str> = text.split("\\text{ ").collect();
    match parts[..] {
        [all] => Some(all.to_string()),
        [value, _] => Some(value.to_string()),
        _ => None,
    }
}

/// `\sqrt3` as `\sqrt{3}`.
fn roots(text: &str) -> Option<String> {
    let mut parts = text.split("\\sqrt");
    let mut out = parts.next()?.to_string();
    for part in parts {
        out.push_str("\\sqrt");
        match part.chars().next()? {
            '{' => out.push_str(part),
            first => {
                out.push_str(&format!("{{{first}}}"));
                out.push_str(&part[first.len_utf8()..]);
            }
        }
    }
    Some(out)
}

/// `\frac12` and `\frac1{2}` with braces.
pub fn fractions(text: &str) -> Option<String> {
    let mut parts = text.split("\\frac");
    let mut out = parts.next()?.to_string();
    for part in parts {
        out.push_str("\\frac");
        let mut chars = part.chars();
        let first = chars.next()?;
        if first == '{' {
            out.push_str(part);
            continue;
        }
        let Some(second) = chars.next() else { return Some(text.to_string()) };
        out.push_str(&format!("{{{first}}}"));
        match second {
            '{' => out.push('{'),
            digit => out.push_str(&format!("{{{digit}}}")),
        }
        out.push_str(chars.as_str());
    }
    Some(out)
}

/// `a/b` of two integers as a fraction.
fn slash(text: String) -> String {
    let parts: Vec<&str> = text.split('/').collect();
    let integer = |part: &str| part.parse::<i128>().is_ok_and(|n| n.to_string() == part);
    match parts[..] {
        [top, bottom] if integer(top) && integer(bottom) => format!("\\frac{{{top}}}{{{bottom}}}"),
        _ => text,
    }
}

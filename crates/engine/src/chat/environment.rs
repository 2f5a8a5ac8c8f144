//! The Jinja environment that Hugging Face templates expect.

use std::fmt;
use std::time::{SystemTime, UNIX_EPOCH};

use minijinja::syntax::SyntaxConfig;
use minijinja::value::{Kwargs, ValueKind};
use minijinja::{Environment, Error, ErrorKind, State, Template, Value};

use super::json;

/// The filter that `{% generation %}` blocks are turned into.
pub(super) const GENERATION: &str = "filter ferrl_generation";
/// The variable with the two characters to put around a generation block.
pub(super) const MARKS: &str = "ferrl_generation_marks";

/// Maximum operations per rendering. The longest real templates need some hundred per message.
const FUEL: u64 = 2_000_000;
/// Maximum output bytes per rendering.
const OUTPUT: usize = 32 << 20;
/// Maximum nesting of macros and blocks.
const DEPTH: usize = 100;

/// Maximum template bytes, and operators in one expression: parsers recurse once per operator.
const SOURCE: usize = 1 << 20;
const OPERATORS: usize = 1000;

/// Refuses a template nested so deeply that parsing it would overflow the stack.
pub fn bounded(source: &str) -> std::result::Result<(), String> {
    if source.len() > SOURCE {
        return Err(format!("it has more than {} MiB", SOURCE >> 20));
    }
    let (mut inside, mut quote, mut count, mut before) = (false, None, 0, ' ');
    for c in source.chars() {
        match (quote, c) {
            (Some(q), c) if c == q && before != '\\' => quote = None,
            (Some(_), _) => {}
            (None, '{' | '%') if before == '{' => (inside, count) = (true, 0),
            (None, '}') if inside && (before == '}' || before == '%') => inside = false,
            (None, '"' | '\'') if inside => quote = Some(c),
            // Symbols, and word operators: `not not not`.
            (None, c) if inside && ("+-*/~|.<>=!([{,".contains(c) || (c == ' ' && before != ' ')) => {
                count += 1
            }
            _ => {}
        }
        before = if before == '\\' && c == '\\' { ' ' } else { c };
        if count > OPERATORS {
            return Err(format!("it has more than {OPERATORS} operators in one expression"));
        }
    }
    Ok(())
}

/// Message of a template's `raise_exception`.
#[derive(Debug)]
struct Raised(String);

impl fmt::Display for Raised {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(&self.0)
    }
}

impl std::error::Error for Raised {}

/// An environment with the syntax, filters and functions of `transformers`.
pub(super) fn new() -> Environment<'static> {
    let mut environment = Environment::new();
    let syntax = SyntaxConfig::builder().trim_blocks(true).lstrip_blocks(true).build();
    environment.set_syntax(syntax.expect("the standard delimiters are valid"));
    environment.set_auto_escape_callback(|_| minijinja::AutoEscape::None);
    environment.set_unknown_method_callback(minijinja_contrib::pycompat::unknown_method_callback);
    environment.add_filter("tojson", tojson);
    for name in ["length", "count"] {
        environment.add_filter(name, |value: &Value| match value.is_undefined() {
            true => Ok(0),
            false => minijinja::filters::length(value),
        });
    }
    environment.add_test("iterable", |value: &Value| !value.is_none() && value.try_iter().is_ok());
    // In Python, strings and mappings are sequences, too.
    environment.add_test("sequence", |value: &Value| {
        matches!(value.kind(), ValueKind::Seq | ValueKind::String | ValueKind::Map | ValueKind::Undefined)
    });
    // In Python, booleans are numbers, too.
    environment.add_test("number", |value: &Value| {
        matches!(value.kind(), ValueKind::Number | ValueKind::Bool) || json::is_exponent(value)
    });
    environment.add_test("float", |value: &Value| {
        (value.is_number() && !value.is_integer()) || json::is_exponent(value)
    });
    environment.add_filter("ferrl_generation", |state: &State, body: String| {
        let marks = state.lookup(MARKS).map(|m| m.to_string()).unwrap_or_default();
        let mut marks = marks.chars();
        match (marks.next(), marks.next()) {
            (Some(open), Some(close)) => format!("{open}{body}{close}"),
            _ => body,
        }
    });
    environment.add_function("raise_exception", |words: String| -> Result<Value, Error> {
        Err(Error::new(ErrorKind::InvalidOperation, "raise_exception").with_source(Raised(words)))
    });
    environment.set_fuel(Some(FUEL));
    environment.set_recursion_limit(DEPTH);
    set_now(&mut environment, Now::from_unix(today()));
    environment
}

/// The beginning of this day in UTC, in seconds since 1970.
pub fn today() -> i64 {
    let seconds = SystemTime::now().duration_since(UNIX_EPOCH).map_or(0, |d| d.as_secs() as i64);
    seconds - seconds.rem_euclid(86_400)
}

/// The beginning of a day written `2026-01-31`, in seconds since 1970.
pub fn unix_day(date: &str) -> Option<i64> {
    let mut parts =
        date.split('-').map(|p| p.parse::<i64>().ok().filter(|_| p.bytes().all(|b| b.is_ascii_digit())));
    let (year, month, day) = (parts.next()??, parts.next()??, parts.next()??);
    let known = parts.next().is_none() && (1970..10_000).contains(&year) && (1..=12).contains(&month);
    let shifted = if month > 2 { (year, month - 3) } else { (year - 1, month + 9) };
    let days =
        365 * shifted.0 + shifted.0 / 4 - shifted.0 / 100 + shifted.0 / 400 + (153 * shifted.1 + 2) / 5;
    let seconds = (days + day - 1 - 719_468) * 86_400;
    // An invalid day of the month wraps around to another date.
    let now = Now::from_unix(seconds);
    (known && (now.year, now.month as i64, now.day) == (year, month, day)).then_some(seconds)
}

/// Renders; exceeding the output limit is an error.
pub(super) fn render(template: &Template<'_, '_>, context: Value) -> Result<String, Error> {
    let mut out = Bounded(Vec::new());
    template.render_captured_to(context, &mut out).map_err(|e| match e.kind() {
        ErrorKind::WriteFailure => {
            Error::new(ErrorKind::WriteFailure, format!("it writes more than {} MiB", OUTPUT >> 20))
        }
        ErrorKind::OutOfFuel => {
            Error::new(ErrorKind::OutOfFuel, format!("it takes more than {FUEL} operations"))
        }
        _ => e,
    })?;
    Ok(String::from_utf8_lossy(&out.0).into_owned())
}

/// Output limited to [`OUTPUT`] bytes.
struct Bounded(Vec<u8>);

impl std::io::Write for Bounded {
    fn write(&mut self, bytes: &[u8]) -> std::io::Result<usize> {
        if self.0.len() + bytes.len() > OUTPUT {
            return Err(std::io::Error::other("too much text"));
        }
        self.0.extend_from_slice(bytes);
        Ok(bytes.len())
    }
    fn flush(&mut self) -> std::io::Result<()> {
        Ok(())
    }
}

/// Sets the time of `strftime_now`.
pub(super) fn set_now(environment: &mut Environment<'static>, now: Now) {
    environment.add_function("strftime_now", move |format: &str| now.format(format));
}

/// The message of `raise_exception`, if that stopped the template.
pub(super) fn raised(e: &Error) -> Option<String> {
    let mut source: Option<&(dyn std::error::Error + 'static)> = Some(e);
    while let Some(error) = source {
        if let Some(Raised(words)) = error.downcast_ref() {
            return Some(words.clone());
        }
        source = error.source();
    }
    None
}

/// One line: the error and its place in the template.
pub(super) fn explain(e: &Error) -> String {
    let what = e.detail().map_or_else(|| e.kind().to_string(), str::to_owned);
    match e.line() {
        Some(line) => format!("{what} (line {line})"),
        None => what,
    }
}

/// Normalises newlines as Jinja does, and turns `{% generation %}` blocks into filter blocks that mark them.
pub(super) fn rewrite(source: &str) -> String {
    let source = source.replace("\r\n", "\n").replace('\r', "\n");
    let mut out = String::with_capacity(source.len() + 64);
    let mut rest = source.as_str();
    while let Some(at) = rest.find("{%") {
        let (before, tag) = rest.split_at(at);
        out.push_str(before);
        let Some(end) = tag.find("%}") else {
            rest = tag;
            break;
        };
        let inside = &tag[2..end];
        let word = inside.trim_start_matches(['-', '+']).trim_end_matches(['-', '+']).trim();
        let new = match word {
            "generation" => inside.replace("generation", GENERATION),
            "endgeneration" => inside.replace("endgeneration", "endfilter"),
            _ => inside.to_owned(),
        };
        out.push_str("{%");
        out.push_str(&new);
        out.push_str("%}");
        rest = &tag[end + 2..];
    }
    out.push_str(rest);
    out
}

/// `json.dumps` with the keywords of `transformers`; no HTML escapes.
fn tojson(value: &Value, ensure_ascii: Option<bool>, options: Kwargs) -> Result<Value, Error> {
    let wrong = |what: String| Error::new(ErrorKind::InvalidOperation, what);
    let ensure_ascii = match ensure_ascii {
        Some(yes) => yes,
        None => options.get::<Option<bool>>("ensure_ascii")?.unwrap_or(false),
    };
    let indent = options.get::<Option<Value>>("indent")?.filter(|v| !v.is_none() && !v.is_undefined());
    let indent = match indent {
        None => None,
        Some(text) if text.as_str().is_some() => text.as_str().map(str::to_owned),
        Some(number) => Some(" ".repeat(i64::try_from(number)?.clamp(0, 64) as usize)),
    };
    let separators = options.get::<Option<Vec<String>>>("separators")?;
    let separators = match separators.as_deref() {
        None => (if indent.is_some() { "," } else { ", " }.to_owned(), ": ".to_owned()),
        Some([item, key]) => (item.clone(), key.clone()),
        Some(other) => {
            return Err(wrong(format!("tojson: separators has {} parts, expected 2", other.len())));
        }
    };
    let sort_keys = options.get::<Option<bool>>("sort_keys")?.unwrap_or(false);
    options.assert_all_used()?;
    if value.is_undefined() {
        return Err(wrong("tojson: the value is undefined".into()));
    }
    let value = json::from_template(value, 0)?;
    Ok(json::Style { ensure_ascii, indent, separators, sort_keys }.dump(&value).into())
}

/// A moment in UTC.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct Now {
    year: i64,
    month: usize,
    day: i64,
    of_day: i64,
    days: i64,
}

impl Now {
    /// The civil date of a Unix time (Gregorian, from a March-based year of 400-year eras).
    pub fn from_unix(seconds: i64) -> Self {
        let days = seconds.div_euclid(86_400);
        let z = days + 719_468;
        let era = z.div_euclid(146_097);
        let doe = z.rem_euclid(146_097);
        let yoe = (doe - doe / 1_460 + doe / 36_524 - doe / 146_096) / 365;
        let doy = doe - (365 * yoe + yoe / 4 - yoe / 100);
        let shifted = (5 * doy + 2) / 153;
        let month = if shifted < 10 { shifted + 3 } else { shifted - 9 };
        let year = yoe + era * 400 + i64::from(month <= 2);
        let day = doy - (153 * shifted + 2) / 5 + 1;
        Now { year, month: month as usize, day, of_day: seconds.rem_euclid(86_400), days }
    }

    fn format(self, format: &str) -> String {
        const MONTHS: [&str; 12] = [
            "January", "February", "March", "April", "May", "June", "July", "August", "September", "October",
            "November", "December",
        ];
        const DAYS: [&str; 7] =
            ["Thursday", "Friday", "Saturday", "Sunday", "Monday", "Tuesday", "Wednesday"];
        let month = MONTHS[self.month - 1];
        let weekday = DAYS[self.days.rem_euclid(7) as usize];
        let (hour, minute, second) = (self.of_day / 3600, self.of_day / 60 % 60, self.of_day % 60);
        let twelve = (hour + 11) % 12 + 1;
        let mut out = String::new();
        let mut chars = format.chars();
        while let Some(c) = chars.next() {
            if c != '%' {
                out.push(c);
                continue;
            }
            let code = chars.next();
            let (bare, code) = if code == Some('-') { (true, chars.next()) } else { (false, code) };
            let number = |n: i64| if bare { n.to_string() } else { format!("{n:02}") };
            out.push_str(&match code {
                Some('Y') => self.year.to_string(),
                Some('y') => number(self.year.rem_euclid(100)),
                Some('m') => number(self.month as i64),
                Some('d') => number(self.day),
                Some('H') => number(hour),
                Some('I') => number(twelve),
                Some('M') => number(minute),
                Some('S') => number(second),
                Some('B') => month.to_owned(),
                Some('b' | 'h') => month[..3].to_owned(),
                Some('A') => weekday.to_owned(),
                Some('a') => weekday[..3].to_owned(),
                Some('p') => if hour < 12 { "AM" } else { "PM" }.to_owned(),
                Some('e') => format!("{:>2}", self.day),
                Some('F') => format!("{}-{:02}-{:02}", self.year, self.month, self.day),
                Some('T') => format!("{hour:02}:{minute:02}:{second:02}"),
                Some('%') => "%".to_owned(),
                Some(other) => format!("%{other}"),
                None => "%".to_owned(),
            });
        }
        out
    }
}

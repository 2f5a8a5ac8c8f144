//! The tests of a row: calls of a function, or runs of a program.

use super::compare::{close, equal, is_true, same_members};
use super::object::Object;
use super::{asserts, compare, literal};
use crate::verify::Sample;
use ferrl_engine::{Error, Result};
use serde_json::Value;

/// Tests of a completion.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Tests {
    /// Calls of one of its functions.
    Calls { entry: String, cases: Vec<TestCase> },
    /// Runs as a program: stdin and expected stdout.
    Runs(Vec<(String, String)>),
}

impl Tests {
    pub(super) fn count(&self) -> usize {
        match self {
            Tests::Calls { cases, .. } => cases.len(),
            Tests::Runs(runs) => runs.len(),
        }
    }
}

/// One call and its expected value.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TestCase {
    pub(super) args: Vec<Object>,
    pub(super) kwargs: Vec<(String, Object)>,
    pub(super) expect: Expect,
}

/// Expected value of a call.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Expect {
    /// A value, compared through a view.
    Equal(Object, View),
    /// A number, compared by `math.isclose`.
    Close { value: f64, relative: f64, absolute: f64 },
    /// A truthy or falsy value.
    Truth(bool),
}

/// View of a value that is compared.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum View {
    /// The value.
    AsIs,
    /// Its distinct elements, in any order.
    Set,
    /// Its elements, in any order.
    Sorted,
}

impl Expect {
    /// Whether a returned value is the expected one.
    pub(super) fn accepts(&self, got: &Object, tolerance: f64) -> bool {
        match self {
            Expect::Equal(want, View::AsIs) => equal(got, want, tolerance),
            Expect::Equal(want, view) => match (elements(got, *view), elements(want, *view)) {
                (Some(got), Some(want)) => same_members(&got, &want, tolerance),
                _ => false,
            },
            Expect::Close { value, relative, absolute } => {
                compare::as_float(got).is_some_and(|got| close(got, *value, *relative, *absolute))
            }
            Expect::Truth(want) => is_true(got) == *want,
        }
    }

    /// For messages.
    pub(super) fn shown(&self) -> String {
        match self {
            Expect::Equal(want, View::Set) => format!("the elements of {want}"),
            Expect::Equal(want, _) => want.to_string(),
            Expect::Close { value, .. } => format!("a number near {value}"),
            Expect::Truth(true) => "a true value".into(),
            Expect::Truth(false) => "a false value".into(),
        }
    }
}

fn elements(value: &Object, view: View) -> Option<Vec<Object>> {
    let all = match value {
        Object::List(all) | Object::Tuple(all) | Object::Set(all) => all.clone(),
        Object::Str(text) => text.chars().map(|c| Object::Str(c.into())).collect(),
        Object::Dict(pairs) => pairs.iter().map(|(k, _)| k.clone()).collect(),
        _ => return None,
    };
    let mut kept: Vec<Object> = Vec::new();
    for one in all {
        if view != View::Set || !kept.iter().any(|k| equal(k, &one, 0.0)) {
            kept.push(one);
        }
    }
    Some(kept)
}

/// The tests of a row: columns `entry` and `cases`, or `io`, or `test_list`.
pub(super) fn of(sample: &Sample<'_>) -> Result<Tests> {
    let tests = match (sample.column("cases"), sample.column("io"), sample.column("test_list")) {
        (Some(cases), _, _) => calls(sample, cases),
        (None, Some(io), _) => runs(io),
        (None, None, Some(list)) => assertions(list),
        (None, None, None) => {
            let names = sample.columns.names();
            let there = if names.is_empty() { "none".to_string() } else { names.join(", ") };
            Err(Error::data(format!("code needs columns entry and cases, or io, or test_list; the row has {there}"))
                .fix("the columns entry (a function's name) and cases, [{\"args\": [1], \"expect\": 2}]; or io, [{\"stdin\": \"\", \"stdout\": \"\"}]"))
        }
    };
    tests.map_err(|e| sample.error(e))
}

fn calls(sample: &Sample<'_>, cases: &Value) -> Result<Tests> {
    let entry = match sample.column("entry") {
        Some(Value::String(name)) if is_entry(name) => name.clone(),
        Some(other) => return Err(Error::data(format!("entry must be the name of a function, got {other}"))),
        None => return Err(Error::data("column cases needs column entry, the function that is called")),
    };
    let wrong = |i: usize, what: String| {
        Error::data(what).at(format!("cases[{i}]")).fix(
            "{\"args\": [1, \"a\"], \"expect\": 2}, with args a list and expect the value that is returned",
        )
    };
    let list = listed(cases, "cases")?;
    let mut all = Vec::new();
    for (i, case) in list.iter().enumerate() {
        let Object::Dict(pairs) = case else { return Err(wrong(i, format!("not an object: {case}"))) };
        let field = |name: &str| pairs.iter().find(|(k, _)| *k == Object::Str(name.into())).map(|(_, v)| v);
        let args = match field("args") {
            Some(Object::List(args) | Object::Tuple(args)) => args.clone(),
            Some(other) => return Err(wrong(i, format!("args must be a list, got {other}"))),
            None => return Err(wrong(i, "it has no args".into())),
        };
        let kwargs = match field("kwargs") {
            None | Some(Object::None) => Vec::new(),
            Some(Object::Dict(pairs)) => pairs
                .iter()
                .map(|(k, v)| match k {
                    Object::Str(key) => Ok((key.clone(), v.clone())),
                    other => Err(wrong(i, format!("a key of kwargs must be a name, got {other}"))),
                })
                .collect::<Result<_>>()?,
            Some(other) => return Err(wrong(i, format!("kwargs must be an object, got {other}"))),
        };
        if let (Value::Array(_), Some(x)) =
            (cases, args.iter().chain(kwargs.iter().map(|(_, v)| v)).find_map(Object::rounded))
        {
            return Err(Error::data(format!(
                "{x} in args has more than 64 bits, of which JSON rows keep 53"
            ))
            .at(format!("cases[{i}]"))
            .fix("write cases as text: \"cases\": \"[{'args': [...], 'expect': ...}]\""));
        }
        let Some(expect) = field("expect") else { return Err(wrong(i, "it has no expect".into())) };
        all.push(TestCase { args, kwargs, expect: Expect::Equal(expect.clone(), View::AsIs) });
    }
    Ok(Tests::Calls { entry, cases: all })
}

/// A function's name, or `Class.method`.
fn is_entry(name: &str) -> bool {
    let is_name = |part: &str| {
        part.starts_with(|c: char| c.is_alphabetic() || c == '_')
            && part.chars().all(|c| c.is_alphanumeric() || c == '_')
    };
    name.split('.').count() <= 2 && name.split('.').all(is_name)
}

/// A list, or a text with one: in a text, numbers of any size are exact, and tuples and sets are possible.
fn listed(value: &Value, name: &str) -> Result<Vec<Object>> {
    let list = match value {
        Value::String(text) => literal::parse(text)
            .map_err(|why| Error::data(format!("{name} is a text that cannot be read: {why}")))?,
        other => Object::from_json(other),
    };
    match list {
        Object::List(list) | Object::Tuple(list) if !list.is_empty() => Ok(list),
        Object::List(_) | Object::Tuple(_) => {
            Err(Error::data(format!("{name} is empty: there are no tests")))
        }
        other => Err(Error::data(format!("{name} must be a list, got {other}"))),
    }
}

fn runs(io: &Value) -> Result<Tests> {
    let fix = "{\"stdin\": \"1 2\\n\", \"stdout\": \"3\\n\"}";
    let one = |(i, run): (usize, &Object)| {
        let Object::Dict(pairs) = run else {
            return Err(Error::data(format!("not an object: {run}")).at(format!("io[{i}]")).fix(fix));
        };
        let text = |name: &str| match pairs.iter().find(|(k, _)| *k == Object::Str(name.into())) {
            Some((_, Object::Str(text))) => Ok(text.clone()),
            Some((_, other)) => Err(Error::data(format!("{name} must be a text, got {other}"))),
            None => Err(Error::data(format!("it has no {name}"))),
        };
        let both = text("stdin").and_then(|stdin| Ok((stdin, text("stdout")?)));
        both.map_err(|e| e.at(format!("io[{i}]")).fix(fix))
    };
    Ok(Tests::Runs(listed(io, "io")?.iter().enumerate().map(one).collect::<Result<_>>()?))
}

fn assertions(list: &Value) -> Result<Tests> {
    let fix = "assertions of the form: assert f(1, [2]) == 3; others as columns entry and cases";
    let texts: Option<Vec<&str>> = list.as_array().map(|l| l.iter().filter_map(Value::as_str).collect());
    let Some(texts) = texts.filter(|t| !t.is_empty()) else {
        return Err(Error::data("test_list must be a list of assertions").fix(fix));
    };
    let (mut entry, mut cases) = (None, Vec::new());
    for (i, text) in texts.into_iter().enumerate() {
        let at = |e: Error| e.at(format!("test_list[{i}]")).fix(fix);
        let (name, case) = asserts::parse(text)
            .map_err(|why| at(Error::data(format!("{text:?} cannot be read as a case: {why}"))))?;
        if entry.get_or_insert(name.clone()) != &name {
            return Err(at(Error::data(format!(
                "it calls {name}, the others {}",
                entry.unwrap_or_default()
            ))));
        }
        cases.push(case);
    }
    Ok(Tests::Calls { entry: entry.unwrap_or_default(), cases })
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn read(row: Value) -> Result<Tests> {
        let columns = row.as_object().unwrap();
        of(&Sample { columns: columns.into(), place: "rows.jsonl:1", ..Default::default() })
    }

    #[test]
    fn rows_are_read() {
        let tests = read(json!({"entry": "f", "cases": [{"args": [1], "expect": [1, 2]}]})).unwrap();
        let Tests::Calls { entry, cases } = tests else { panic!() };
        assert_eq!((entry.as_str(), cases.len()), ("f", 1));
        let text = "[{'args': [100000000000000000000000], 'expect': (1, {2})}]";
        let Tests::Calls { cases, .. } = read(json!({"entry": "A.f", "cases": text})).unwrap() else {
            panic!()
        };
        assert_eq!(cases[0].args[0], Object::Int("100000000000000000000000".into()));
        let tests = read(json!({"io": [{"stdin": "1", "stdout": "2"}]})).unwrap();
        assert_eq!(tests, Tests::Runs(vec![("1".into(), "2".into())]));
        let list = ["assert f(1) == 2", "assert f(2) == 3"];
        let Tests::Calls { cases, .. } = read(json!({"test_list": list})).unwrap() else { panic!() };
        assert_eq!(cases.len(), 2);
    }

    #[test]
    fn rows_that_cannot_be_read_name_the_place() {
        for (row, said) in [
            (json!({"a": 1}), "the row has a"),
            (json!({"cases": [{"args": [], "expect": 1}]}), "entry"),
            (json!({"entry": "f; import os", "cases": [{"args": [], "expect": 1}]}), "name of a function"),
            (json!({"entry": "f", "cases": []}), "empty"),
            (json!({"entry": "f", "cases": [{"args": [1], "expect": 1}, {"args": 2}]}), "cases[1]"),
            (json!({"entry": "f", "cases": [{"args": [1]}]}), "no expect"),
            (json!({"entry": "f", "cases": [{"args": [1e30], "expect": 1}]}), "64 bits"),
            (json!({"entry": "f", "cases": "[{'args': [f(1)]}]"}), "cannot be read"),
            (json!({"io": [{"stdin": 1, "stdout": ""}]}), "io[0]"),
            (json!({"io": {"stdin": "", "stdout": ""}}), "must be a list"),
            (json!({"test_list": ["assert f(1) == 2", "assert g(1) == 2"]}), "test_list[1]"),
            (json!({"test_list": ["assert f(1) < 2"]}), "test_list[0]"),
            (json!({"test_list": []}), "assertions"),
        ] {
            let error = read(row.clone()).unwrap_err().to_string();
            assert!(error.starts_with("rows.jsonl:1") && error.contains(said), "{row}: {error}");
        }
    }

    #[test]
    fn views_compare_elements() {
        let value = |text: &str| literal::parse(text).unwrap();
        let set = Expect::Equal(value("{1, 2}"), View::Set);
        assert!(
            set.accepts(&value("[2, 1, 1]"), 0.0)
                && !set.accepts(&value("[1]"), 0.0)
                && !set.accepts(&value("3"), 0.0)
        );
        let sorted = Expect::Equal(value("[1, 1, 2]"), View::Sorted);
        assert!(sorted.accepts(&value("(2, 1, 1)"), 0.0) && !sorted.accepts(&value("[1, 2]"), 0.0));
    }
}

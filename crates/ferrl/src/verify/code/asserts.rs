//! Parses assertions as in MBPP's `test_list` to test cases: `assert f(1, [2]) == 3`.
//!
//! The sandboxed program gets only the arguments; what it returns is compared here.

use super::cases::{Expect, TestCase, View};
use super::literal::LiteralParser;
use super::object::Object;

/// Conversion of the returned value before the comparison.
const VIEWS: [(&str, View); 5] = [
    ("set", View::Set),
    ("frozenset", View::Set),
    ("sorted", View::Sorted),
    ("list", View::AsIs),
    ("tuple", View::AsIs),
];

/// The function that an assertion calls, and the test case.
pub(super) fn parse(text: &str) -> Result<(String, TestCase), String> {
    let mut parser = LiteralParser::new(text.trim());
    if parser.name() != Some("assert") {
        return Err("no assertion".into());
    }
    let place = parser.place();
    // `f(..) == v`, `v == f(..)`, `f(..)`, `not f(..)` or `math.isclose(f(..), v)`, in brackets or not.
    let attempts = [comparison, reversed, close, truth];
    let mut first = None;
    for attempt in attempts {
        parser.back(place);
        match attempt(&mut parser).and_then(|found| message(&mut parser).map(|()| found)) {
            Ok(found) => return Ok(found),
            Err(why) => first = first.or(Some(why)),
        }
    }
    Err(first.unwrap_or_default())
}

/// `, "message"` at the end.
fn message(parser: &mut LiteralParser<'_>) -> Result<(), String> {
    if parser.take(",") {
        parser.literal()?;
    }
    parser.end()
}

type NamedTest = (String, TestCase);

fn comparison(parser: &mut LiteralParser<'_>) -> Result<NamedTest, String> {
    let bracket = parser.peek() == Some('(') && parser.take("(");
    let (name, mut case, view) = viewed(parser)?;
    if bracket && parser.take(")") {
        operator(parser)?;
        case.expect = Expect::Equal(parser.literal()?, view);
        return Ok((name, case));
    }
    operator(parser)?;
    case.expect = Expect::Equal(parser.literal()?, view);
    if bracket {
        parser.expect(")")?;
    }
    Ok((name, case))
}

fn reversed(parser: &mut LiteralParser<'_>) -> Result<NamedTest, String> {
    let value = parser.literal()?;
    operator(parser)?;
    let (name, mut case, view) = viewed(parser)?;
    case.expect = Expect::Equal(value, view);
    Ok((name, case))
}

fn operator(parser: &mut LiteralParser<'_>) -> Result<(), String> {
    if parser.take("==") {
        return Ok(());
    }
    let place = parser.place();
    match parser.name() {
        Some("is") => {
            let inner = parser.place();
            if parser.name() == Some("not") {
                return Err("\"is not\" has no expected value".into());
            }
            parser.back(inner);
            Ok(())
        }
        _ => {
            parser.back(place);
            Err(parser.unexpected("\"==\""))
        }
    }
}

fn close(parser: &mut LiteralParser<'_>) -> Result<NamedTest, String> {
    let place = parser.place();
    if parser.name() != Some("math") || !parser.take(".") {
        parser.back(place);
    }
    if parser.name() != Some("isclose") {
        return Err(parser.unexpected("isclose"));
    }
    parser.expect("(")?;
    let (name, mut case) = call(parser)?;
    parser.expect(",")?;
    let value =
        super::compare::as_float(&parser.literal()?).ok_or("isclose of a value that is not a number")?;
    let (mut relative, mut absolute) = (1e-9, 0.0);
    while parser.take(",") {
        let key = parser.name().map(String::from);
        parser.expect("=")?;
        let number =
            super::compare::as_float(&parser.literal()?).ok_or("a tolerance that is not a number")?;
        match key.as_deref() {
            Some("rel_tol") => relative = number,
            Some("abs_tol") => absolute = number,
            _ => return Err("isclose takes rel_tol and abs_tol".into()),
        }
    }
    parser.expect(")")?;
    case.expect = Expect::Close { value, relative, absolute };
    Ok((name, case))
}

fn truth(parser: &mut LiteralParser<'_>) -> Result<NamedTest, String> {
    let place = parser.place();
    let not = parser.name() == Some("not");
    if !not {
        parser.back(place);
    }
    let (name, mut case) = call(parser)?;
    case.expect = Expect::Truth(!not);
    Ok((name, case))
}

/// A call, or one within `set(...)` and the like.
fn viewed(parser: &mut LiteralParser<'_>) -> Result<(String, TestCase, View), String> {
    let place = parser.place();
    let view = parser.name().and_then(|name| VIEWS.iter().find(|(n, _)| *n == name)).map(|(_, view)| *view);
    if let Some(view) = view.filter(|_| parser.take("(")) {
        let (name, case) = call(parser)?;
        parser.expect(")")?;
        return Ok((name, case, view));
    }
    parser.back(place);
    let (name, case) = call(parser)?;
    Ok((name, case, View::AsIs))
}

/// A call of a function with literals.
fn call(parser: &mut LiteralParser<'_>) -> Result<NamedTest, String> {
    let Some(name) = parser.name().map(String::from) else { return Err(parser.unexpected("a call")) };
    if !parser.take("(") {
        return Err(parser.unexpected("\"(\" of a call"));
    }
    let mut case =
        TestCase { args: Vec::new(), kwargs: Vec::new(), expect: Expect::Equal(Object::None, View::AsIs) };
    while !parser.take(")") {
        let place = parser.place();
        match parser.name().map(String::from) {
            Some(key) if parser.take("=") => case.kwargs.push((key, parser.literal()?)),
            _ => {
                parser.back(place);
                case.args.push(parser.literal()?);
            }
        }
        if !parser.take(",") {
            parser.expect(")")?;
            break;
        }
    }
    Ok((name, case))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn assertions_become_cases() {
        for (text, name, args, expect) in [
            ("assert f(1, [2]) == 3", "f", "[1, [2]]", "3"),
            ("assert is_ok('a,b') == True, 'message'", "is_ok", "[\"a,b\"]", "True"),
            ("assert (f(2)) == (1, 2)", "f", "[2]", "(1, 2)"),
            ("assert (f(2) == 4)", "f", "[2]", "4"),
            ("assert f() is None", "f", "[]", "None"),
            ("assert 3 == f(1)", "f", "[1]", "3"),
            ("assert set(f((3, 4),(4,))) == set((4,))", "f", "[(3, 4), (4,)]", "{4}"),
        ] {
            let (got, case) = parse(text).unwrap_or_else(|e| panic!("{text}: {e}"));
            let Expect::Equal(value, _) = &case.expect else { panic!("{text}") };
            assert_eq!((got.as_str(), value.to_string().as_str()), (name, expect), "{text}");
            assert_eq!(Object::List(case.args).to_string(), args, "{text}");
        }
        let truth = |text| match parse(text).unwrap().1.expect {
            Expect::Truth(t) => t,
            other => panic!("{other:?}"),
        };
        assert!(truth("assert f(1)") && !truth("assert not f(1)"));
        let (_, case) = parse("assert math.isclose(f(2), 0.5, rel_tol=0.001)").unwrap();
        assert_eq!(case.expect, Expect::Close { value: 0.5, relative: 0.001, absolute: 0.0 });
        assert_eq!(parse("assert f(a=1) == 2").unwrap().1.kwargs[0].0, "a");
    }

    #[test]
    fn what_is_more_than_a_call_is_refused() {
        for text in [
            "f(1) == 2",
            "assert f(1) != 2",
            "assert f(1) is not None",
            "assert f(g(1)) == 2",
            "assert f(1) == 1 + 1",
            "assert f(1)[0] == 1",
            "assert f(1) == 2; import os",
            "assert f(1) == 2 and f(2) == 3",
            "assert abs(f(1) - 2) < 1e-6",
            "assert Solution().f(1) == 2",
        ] {
            assert!(parse(text).is_err(), "{text}: {:?}", parse(text));
        }
    }
}

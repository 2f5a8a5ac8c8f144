//! Comparison of a returned with an expected value: Python's `==`, with three differences.
//!
//! 1. Lists and tuples of the same elements are equal: JSON has no tuples.
//! 2. Floats are equal within a relative tolerance (1e-9, as in `math.isclose`), or within 1e-12 of an expected 0: correct
//!    programs with another order of additions differ by about 1e-16. Whole numbers of any size are compared exactly.
//! 3. NaN equals an expected NaN: otherwise no program could pass.
//!
//! Keys of dictionaries in JSON are texts: `{"1": 2}` equals Python's `{1: 2}`, as `json.dumps` writes it.

use super::object::Object;

/// Absolute tolerance of an expected 0.
const NEAR_ZERO: f64 = 1e-12;

/// Whether `got` equals `want`, floats within `tolerance`.
pub(super) fn equal(got: &Object, want: &Object, tolerance: f64) -> bool {
    use Object::*;
    let each = |a: &[Object], b: &[Object]| {
        a.len() == b.len() && a.iter().zip(b).all(|(a, b)| equal(a, b, tolerance))
    };
    match (got, want) {
        (None, None) => true,
        (Str(a), Str(b)) => a == b,
        (Bytes(a), Bytes(b)) => a == b,
        (List(a) | Tuple(a), List(b) | Tuple(b)) => each(a, b),
        (Set(a), Set(b)) => same_members(a, b, tolerance),
        (Dict(a), Dict(b)) => {
            a.len() == b.len()
                && b.iter().all(|(key, value)| {
                    a.iter()
                        .any(|(k, v)| (equal(k, key, 0.0) || key_text(k, key)) && equal(v, value, tolerance))
                })
        }
        (Complex(..), _) | (_, Complex(..)) => match (parts(got), parts(want)) {
            (Some((a, b)), Some((c, d))) => near(a, c, tolerance) && near(b, d, tolerance),
            _ => false,
        },
        _ => numbers(got, want, tolerance),
    }
}

/// Whether two lists are equal as multisets.
pub(super) fn same_members(got: &[Object], want: &[Object], tolerance: f64) -> bool {
    let mut left: Vec<&Object> = got.iter().collect();
    got.len() == want.len()
        && want.iter().all(|w| {
            let at = left.iter().position(|g| equal(g, w, tolerance));
            at.map(|at| left.swap_remove(at)).is_some()
        })
}

/// Whether a text is the JSON form of a key.
fn key_text(key: &Object, text: &Object) -> bool {
    let Object::Str(text) = text else { return false };
    match key {
        Object::Int(digits) => digits == text,
        Object::Bool(b) => text == if *b { "true" } else { "false" },
        Object::None => text == "null",
        Object::Float(x) => text.parse() == Ok(*x),
        _ => false,
    }
}

fn numbers(got: &Object, want: &Object, tolerance: f64) -> bool {
    match (whole(got), whole(want)) {
        (Some(a), Some(b)) => a == b,
        (a, b) => match (real(got), real(want)) {
            // With tolerance 0 a whole number equals a float of the same value.
            (Some(x), Some(y)) if tolerance == 0.0 => {
                let exact =
                    |digits: Option<String>, float: f64| digits.is_none_or(|d| d == format!("{float:.0}"));
                x == y && exact(a, y) && exact(b, x) || x.is_nan() && y.is_nan()
            }
            (Some(x), Some(y)) => near(x, y, tolerance),
            _ => false,
        },
    }
}

/// Digits of a whole number; `True` is 1 in Python.
fn whole(value: &Object) -> Option<String> {
    match value {
        Object::Int(digits) => Some(digits.clone()),
        Object::Bool(b) => Some(u8::from(*b).to_string()),
        _ => None,
    }
}

fn real(value: &Object) -> Option<f64> {
    match value {
        Object::Float(x) => Some(*x),
        _ => whole(value)?.parse().ok(),
    }
}

fn parts(value: &Object) -> Option<(f64, f64)> {
    match value {
        Object::Complex(re, im) => Some((*re, *im)),
        _ => Some((real(value)?, 0.0)),
    }
}

/// Whether two floats are equal within a relative tolerance.
fn near(got: f64, want: f64, tolerance: f64) -> bool {
    if got == want || got.is_nan() && want.is_nan() {
        return true;
    }
    if !got.is_finite() || !want.is_finite() || tolerance == 0.0 {
        return false;
    }
    close(got, want, tolerance, if want == 0.0 { NEAR_ZERO } else { 0.0 })
}

/// Python's `math.isclose`.
pub(super) fn close(a: f64, b: f64, relative: f64, absolute: f64) -> bool {
    a == b
        || a.is_finite() && b.is_finite() && (a - b).abs() <= (relative * a.abs().max(b.abs())).max(absolute)
}

/// A number as a float.
pub(super) fn as_float(value: &Object) -> Option<f64> {
    real(value)
}

/// Python's `bool(value)`.
pub(super) fn is_true(value: &Object) -> bool {
    match value {
        Object::None => false,
        Object::Bool(b) => *b,
        Object::Int(digits) => digits != "0",
        Object::Float(x) => *x != 0.0,
        Object::Complex(re, im) => *re != 0.0 || *im != 0.0,
        Object::Str(s) => !s.is_empty(),
        Object::Bytes(b) => !b.is_empty(),
        Object::List(all) | Object::Tuple(all) | Object::Set(all) => !all.is_empty(),
        Object::Dict(pairs) => !pairs.is_empty(),
    }
}

#[cfg(test)]
mod tests {
    use super::super::literal::parse;
    use super::*;

    fn check(got: &str, want: &str) -> bool {
        equal(&parse(got).unwrap(), &parse(want).unwrap(), 1e-9)
    }

    #[test]
    fn equal_values_are_equal() {
        for (got, want) in [
            ("2", "2.0"),
            ("2.0", "2"),
            ("True", "1"),
            ("(1, [2, 'a'])", "[1, (2, 'a')]"),
            ("0.30000000000000004", "0.3"),
            ("5.6e-17", "0.0"),
            ("{1: 'a', 2: 'b'}", "{'2': 'b', '1': 'a'}"),
            ("{3, 1, 2}", "{1, 2, 3}"),
            ("nan", "nan"),
            ("inf", "inf"),
            ("100000000000000000000000000000000000001", "100000000000000000000000000000000000001"),
            ("1+2j", "(1.0+2j)"),
            ("b'a'", "b'a'"),
            ("None", "null"),
        ] {
            assert!(check(got, want), "{got} == {want}");
        }
    }

    #[test]
    fn unequal_values_are_not() {
        for (got, want) in [
            ("2", "3"),
            ("'2'", "2"),
            ("0.3001", "0.3"),
            ("100000000000000000000000000000000000001", "100000000000000000000000000000000000002"),
            ("9007199254740993", "9007199254740992"),
            ("[1, 2]", "[2, 1]"),
            ("[1]", "[1, 1]"),
            ("{1, 2}", "[1, 2]"),
            ("[1, 2]", "{1, 2}"),
            ("'a'", "b'a'"),
            ("None", "0"),
            ("''", "None"),
            ("nan", "0.0"),
            ("1e-9", "0.0"),
            ("inf", "1e308"),
            ("{'a': 1}", "{'a': 1, 'b': 2}"),
            ("{'a': 1, 'b': 1}", "{'a': 1, 'c': 1}"),
            ("'nan'", "nan"),
        ] {
            assert!(!check(got, want), "{got} == {want}");
        }
    }

    #[test]
    fn without_tolerance_numbers_are_compared_bit_by_bit() {
        let exact = |a: &str, b: &str| equal(&parse(a).unwrap(), &parse(b).unwrap(), 0.0);
        assert!(exact("2", "2.0") && exact("0.1", "0.1"));
        assert!(!exact("0.30000000000000004", "0.3") && !exact("9007199254740993", "9007199254740992.0"));
    }
}

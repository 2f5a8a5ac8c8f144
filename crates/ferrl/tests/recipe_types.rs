//! Every key of a recipe with a value of another type, and with a typo: refused with line, key, and what was expected.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::algo::ALGORITHMS;
use ferrl::recipe::{Key, KeyKind, Recipe, algorithm_keys, keys};

/// Values that a key of this kind does not take.
fn wrong(kind: &KeyKind) -> &'static [&'static str] {
    match kind {
        KeyKind::Text | KeyKind::Choice(_) => &["3", "true", "[\"a\"]", "{ a = 1 }"],
        KeyKind::Whole => &["\"x\"", "true", "[1]", "1.5", "{ a = 1 }"],
        KeyKind::Number => &["\"x\"", "true", "[1]", "{ a = 1 }"],
        KeyKind::Flag => &["1", "\"yes\"", "[true]"],
        KeyKind::List(of) if **of == KeyKind::Number => &["\"x\"", "[\"x\"]", "true"],
        KeyKind::List(of) if **of == KeyKind::Text => &["3", "[3]", "true"],
        KeyKind::List(of) if **of == KeyKind::Whole => &["2.5", "[2.5]", "true", "\"nonsense\""],
        _ => &["3", "true", "\"nonsense\""],
    }
}

/// Keys with the algorithm that has them; not those that stand for others in short (`algo`, `reward`, `stage`).
fn all() -> Vec<(&'static str, Key)> {
    let own = keys().iter().filter(|k| !["algo", "reward", "stage", "base"].contains(&k.path.as_str()));
    let own = own.cloned().map(|k| ("sft", k));
    let settings = ALGORITHMS.iter().flat_map(|e| algorithm_keys(e).into_iter().map(|k| (e.name, k)));
    own.chain(settings).collect()
}

/// The error of a recipe whose line 2 gives the key that value.
fn error(algorithm: &str, path: &str, value: &str) -> String {
    let (list, path) = match path.split_once("reward.N.") {
        Some((_, rest)) => ("reward = [{ KEY = VALUE }]", rest.to_string()),
        None => ("KEY = VALUE", path.to_string()),
    };
    let line = list.replace("KEY", &path).replace("VALUE", value);
    let text = format!("algo.name = {algorithm:?}\n{line}\n");
    match Recipe::parse(&text, "r.toml", "r", &[]) {
        Ok(_) => panic!("{line} is accepted"),
        Err(e) => {
            assert_eq!(e.class, ferrl_kernels::Class::Usage, "{line}: {e}");
            e.to_string()
        }
    }
}

#[test]
fn a_value_of_another_type_is_refused_with_line_key_and_expected_type() {
    let mut tried = 0;
    for (algorithm, key) in all() {
        for value in wrong(&key.kind) {
            let said = error(algorithm, &key.path, value);
            let named = key.path.replace(".N.", ".0.");
            let expected = key.words();
            let expected = expected.split(" from ").next().unwrap().split(" above ").next().unwrap();
            assert!(said.contains("r.toml:2"), "{named} = {value}: {said}");
            assert!(said.contains(&named), "{named} = {value}: {said}");
            // An entry of a list is blamed by itself.
            let entry = matches!(key.kind, KeyKind::List(_)) && value.starts_with('[');
            assert!(entry || said.contains(&format!("expected {expected}")), "{named} = {value}: {said}");
            assert!(said.contains("got "), "{named} = {value}: {said}");
            for internal in ["usize", "u64", "f64", "struct", "variant", "serde", "untagged", "i64"] {
                assert!(!said.contains(internal), "{named} = {value}: {said}");
            }
            tried += 1;
        }
    }
    assert!(tried > 500, "{tried}");
}

#[test]
fn a_typo_in_any_key_names_the_key() {
    let mut missed = Vec::new();
    for (algorithm, key) in all() {
        let (parent, leaf) = key.path.rsplit_once('.').unwrap_or(("", &key.path));
        let typo = format!("{}{}", leaf, &leaf[leaf.len() - 1..]);
        let path = if parent.is_empty() { typo.clone() } else { format!("{parent}.{typo}") };
        let said = error(algorithm, &path, "1");
        let named = path.replace(".N.", ".0.");
        assert!(said.contains("r.toml:2") && said.contains(&named), "{path}: {said}");
        assert!(said.contains("unknown key"), "{path}: {said}");
        if !said.contains(&format!("mean {}?", key.path.replace(".N.", ".0."))) {
            missed.push(format!("{path}: {said}"));
        }
    }
    assert!(missed.is_empty(), "{}", missed.join("\n"));
}

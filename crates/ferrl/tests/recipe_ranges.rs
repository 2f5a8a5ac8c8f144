//! Every number a recipe may hold has a range, and no number in or out of it ends in a panic or a wrong plan.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::algo::ALGORITHMS;
use ferrl::plan::Plan;
use ferrl::recipe::{Key, KeyKind, Recipe, algorithm_keys, keys, policy_keys};

fn is_number(kind: &KeyKind) -> bool {
    match kind {
        KeyKind::Whole | KeyKind::Number => true,
        KeyKind::List(of) => is_number(of),
        _ => false,
    }
}

/// Every numeric key of the recipe, and of each algorithm, with the algorithm that has it.
fn numbers() -> Vec<(&'static str, Key)> {
    let own = keys().iter().filter(|k| !k.path.starts_with("stage")).cloned().map(|k| ("dr_grpo", k));
    let settings = ALGORITHMS.iter().flat_map(|e| algorithm_keys(e).into_iter().map(|k| (e.name, k)));
    own.chain(settings).filter(|(_, k)| is_number(&k.kind)).collect()
}

#[test]
fn every_number_has_a_range_and_its_default_lies_in_it() {
    assert!(numbers().len() > 100);
    for (algorithm, key) in numbers().into_iter().chain(policy_keys().iter().cloned().map(|k| ("", k))) {
        if is_number(&key.kind) {
            let range = key.range.unwrap_or_else(|| panic!("{algorithm} {}: no range", key.path));
            assert!(range.low < range.high, "{}", key.path);
            if let Some(default) = key.default.as_f64() {
                assert!(range.holds(default), "{algorithm} {}: {default} is not {range}", key.path);
            }
        }
    }
}

/// A recipe in which the key may stand.
fn recipe(algorithm: &str, path: &str) -> String {
    let model = match path.starts_with("model.init") {
        true => "model.init.hidden = 64\n",
        false => "model.init = { hidden = 64, layers = 1, heads = 2, max_positions = 4096 }\n",
    };
    format!(
        "{model}data.train = \"task:countdown\"\ndata.max_length = 64\ntrain.steps = 3\ndevice = \"cpu\"\n\
         reward = \"countdown\"\nrollout.max_new_tokens = 16\nalgo.name = {algorithm:?}\n"
    )
}

/// What loading, checking and planning say.
fn outcome(text: &str, words: &[String]) -> Result<(), String> {
    let resolved = Recipe::parse(text, "r.toml", "r", words).map_err(|e| e.to_string())?;
    resolved.check(&["countdown"]).map_err(|e| e.to_string())?;
    let plan = Plan::new(&resolved).map_err(|e| e.to_string())?;
    for stage in &plan.stages {
        assert!(stage.bytes() > 1 << 20, "{words:?}: {} bytes", stage.bytes());
        assert!(stage.work.train.is_finite() && stage.work.train > 0.0, "{words:?}");
    }
    plan.fit(u64::MAX).map_err(|e| e.to_string())
}

#[test]
fn numbers_out_of_range_are_refused_by_key_value_and_range() {
    for (algorithm, key) in numbers() {
        let (path, range) = (key.path.replace(".N.", ".0."), key.range.unwrap());
        let text = recipe(algorithm, &path);
        for value in ["0", "-1", "1e300", "1e18", "1000000000000000000", "9223372036854775807", "nan", "inf"]
        {
            let word = match key.kind {
                KeyKind::List(_) => format!("{path}=[{value}]"),
                _ => format!("{path}={value}"),
            };
            let said = outcome(&text, std::slice::from_ref(&word));
            let number: f64 = value.parse().unwrap();
            let whole = !matches!(key.kind, KeyKind::Whole) || !value.contains('e');
            if range.holds(number) && whole {
                continue; // settled by the rules of the recipe, without a panic
            }
            let message = said.expect_err(&word);
            assert!(message.contains(&path), "{word}: {message}");
            let finite = number.is_finite();
            assert!(!finite || message.contains(&format!("{range}")), "{word}: {message}");
            assert!(finite || message.contains("finite"), "{word}: {message}");
        }
    }
}

/// Both ends of every range, one key at a time and all at once.
#[test]
fn the_ends_of_a_range_are_planned_or_refused_without_overflow() {
    let end = |key: &Key, high: bool| {
        let range = key.range.unwrap();
        let (at, open) = if high { (range.high, range.below) } else { (range.low, range.above) };
        let inside = range.low + (range.high - range.low) * if high { 0.999 } else { 0.001 };
        let value = if open { inside } else { at };
        let whole = match &key.kind {
            KeyKind::List(of) => **of == KeyKind::Whole,
            kind => *kind == KeyKind::Whole,
        };
        let value = if whole { format!("{}", value as i64) } else { format!("{value:e}") };
        let path = key.path.replace(".N.", ".0.");
        if matches!(key.kind, KeyKind::List(_)) {
            format!("{path}=[{value}]")
        } else {
            format!("{path}={value}")
        }
    };
    for high in [false, true] {
        for (algorithm, key) in numbers() {
            let word = end(&key, high);
            if let Err(message) = outcome(&recipe(algorithm, &key.path), std::slice::from_ref(&word)) {
                assert!(!message.contains("expected a"), "{word} is in its range: {message}");
            }
        }
        for entry in ALGORITHMS {
            let of = |(name, key): &(&str, Key)| {
                *name == entry.name || (*name == "dr_grpo" && !key.path.starts_with("algo."))
            };
            let words: Vec<String> = numbers().iter().filter(|n| of(n)).map(|(_, k)| end(k, high)).collect();
            let _ = outcome(&recipe(entry.name, "model.init"), &words);
        }
    }
}

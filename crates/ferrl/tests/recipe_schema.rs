//! The JSON Schema of recipes, against every recipe that comes with Ferrl and against mistakes.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::algo::ALGORITHMS;
use ferrl::recipe::{json_schema, keys};
use serde_json::{Value, json};
use std::path::{Path, PathBuf};

/// The words of JSON Schema that the recipe's uses; any other is a gap of this test.
const KNOWN: &[&str] = &[
    "$schema", "title", "description", "default", "format", "$defs", "$ref", "anyOf", "oneOf", "const",
    "enum", "type", "pattern", "minimum", "maximum", "exclusiveMinimum", "exclusiveMaximum", "properties",
    "additionalProperties", "required", "items",
];

/// Whether a value fits a schema.
fn fits(root: &Value, schema: &Value, value: &Value) -> bool {
    let Value::Object(rules) = schema else { return schema != &json!(false) };
    rules.iter().all(|(word, rule)| match word.as_str() {
        "$ref" => fits(root, root.pointer(rule.as_str().unwrap().trim_start_matches('#')).unwrap(), value),
        "anyOf" | "oneOf" => rule.as_array().unwrap().iter().any(|one| fits(root, one, value)),
        "const" => rule == value,
        "enum" => rule.as_array().unwrap().contains(value),
        "type" => match rule {
            Value::Array(types) => types.iter().any(|t| is(t, value)),
            one => is(one, value),
        },
        "pattern" => value.as_str().is_none_or(|s| s.contains("${")),
        "minimum" => value.as_f64().is_none_or(|v| v >= rule.as_f64().unwrap()),
        "maximum" => value.as_f64().is_none_or(|v| v <= rule.as_f64().unwrap()),
        "exclusiveMinimum" => value.as_f64().is_none_or(|v| v > rule.as_f64().unwrap()),
        "exclusiveMaximum" => value.as_f64().is_none_or(|v| v < rule.as_f64().unwrap()),
        "properties" => {
            let held = rule.as_object().unwrap().iter();
            held.filter_map(|(key, of)| Some((of, value.get(key)?))).all(|(of, v)| fits(root, of, v))
        }
        "additionalProperties" => {
            let known = |key: &String| schema["properties"].get(key).is_some();
            rule == &json!(true) || value.as_object().is_none_or(|map| map.keys().all(known))
        }
        "required" => value.as_object().is_none_or(|map| {
            rule.as_array().unwrap().iter().all(|key| map.contains_key(key.as_str().unwrap()))
        }),
        "items" => value.as_array().is_none_or(|list| list.iter().all(|v| fits(root, rule, v))),
        other => KNOWN.contains(&other) || panic!("the schema says {other:?}"),
    })
}

fn is(kind: &Value, value: &Value) -> bool {
    match kind.as_str().unwrap() {
        "string" => value.is_string(),
        "integer" => value.is_u64(),
        "number" => value.is_number(),
        "boolean" => value.is_boolean(),
        "array" => value.is_array(),
        "object" => value.is_object(),
        _ => value.is_null(),
    }
}

fn recipes(dir: &Path, out: &mut Vec<PathBuf>) {
    for path in std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()) {
        match path.is_dir() {
            true => recipes(&path, out),
            false => out.extend(Some(path).filter(|p| p.extension().is_some_and(|e| e == "toml"))),
        }
    }
}

fn value(toml: &str) -> Value {
    serde_json::to_value(toml.parse::<toml::Table>().unwrap()).unwrap()
}

#[test]
fn every_shipped_recipe_fits_the_schema() {
    let schema = json_schema();
    let mut all = Vec::new();
    recipes(&Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes"), &mut all);
    assert!(all.len() > 25);
    for path in all {
        let recipe = value(&std::fs::read_to_string(&path).unwrap());
        for (key, inner) in recipe.as_object().unwrap() {
            assert!(fits(&schema, &schema, &json!({ key: inner })), "{}: {key} = {inner}", path.display());
        }
    }
}

#[test]
fn mistakes_do_not_fit_the_schema() {
    let schema = json_schema();
    let check = |toml: &str| fits(&schema, &schema, &value(toml));
    for good in [
        "algo = \"sft\"",
        "algo.clip_high = 0.3",
        "algo = { name = \"kto\", beta = 0.2 }",
        "optim.ema = \"off\"",
        "data.train = \"rows.jsonl\"",
        "seed = \"${SEED}\"",
        "[[stage]]\nalgo = \"sft\"\n[[stage]]\nalgo.kl.coef = 0.1",
    ] {
        assert!(check(good), "{good}");
    }
    for bad in [
        "algo = \"stf\"",
        "algo = { name = \"sft\", beta = 0.2 }",
        "algo = { name = \"kto\", beta = 0 }",
        "rollout.temprature = 1.0",
        "rollout.samples = 0",
        "rollout.samples = \"8\"",
        "optim.lr = \"off\"",
        "[[stage]]\nalgo = \"stf\"",
    ] {
        assert!(!check(bad), "{bad}");
    }
}

#[test]
fn the_schema_explains_every_key_and_algorithm() {
    let schema = json_schema();
    for key in keys().iter().filter(|k| !k.path.contains('.')) {
        assert!(schema["properties"][&key.path]["description"].is_string(), "{}", key.path);
    }
    for entry in ALGORITHMS {
        let table = &schema["$defs"][format!("algo.{}", entry.name)];
        let defaults = (entry.defaults)();
        for name in defaults.as_object().unwrap().keys() {
            assert!(table["properties"][name]["description"].is_string(), "{}: {name}", entry.name);
        }
    }
}

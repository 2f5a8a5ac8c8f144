//! The JSON Schema of a recipe, for editors: `ferrl recipe --json-schema`.

use super::range::Range;
use super::{OFF, Recipe};
use crate::algo::{ALGORITHMS, DEFAULT};
use schemars::schema_for;
use serde_json::{Map, Value, json};

/// Every key with type, range and meaning; those of `algo` by the algorithm's name.
pub fn json_schema() -> Value {
    let mut schema = schema_for!(Recipe).to_value();
    schema["title"] = "Ferrl recipe".into();
    widen(&mut schema);
    for entry in ALGORITHMS {
        let mut settings = (entry.schema)().to_value();
        widen(&mut settings);
        // Types that several algorithms share occur once, under their name.
        let owner = match settings["title"].as_str() {
            Some("Options") | None => entry.name,
            Some(shared) => shared,
        }
        .to_string();
        for (name, def) in settings["$defs"].as_object().cloned().unwrap_or_default() {
            schema["$defs"][format!("{owner}.{name}")] = renamed(def, &owner);
        }
        let Value::Object(mut table) = renamed(settings, &owner) else { continue };
        table.retain(|key, _| !key.starts_with('$') && key != "title");
        table.insert("description".into(), entry.about.into());
        let properties = table.entry("properties").or_insert_with(|| json!({}));
        for (name, default) in (entry.defaults)().as_object().into_iter().flatten() {
            properties[name]["default"] = default.clone();
        }
        properties["name"] = json!({ "const": entry.name });
        if entry.name != DEFAULT.name {
            table.insert("required".into(), json!(["name"]));
        }
        schema["$defs"][format!("algo.{}", entry.name)] = Value::Object(table);
    }
    let names: Vec<&str> = ALGORITHMS.iter().map(|e| e.name).collect();
    let tables = names.iter().map(|name| json!({ "$ref": format!("#/$defs/algo.{name}") }));
    let algo: Vec<Value> = std::iter::once(json!({ "enum": names })).chain(tables).collect();
    let properties = &mut schema["properties"];
    properties["algo"] = json!({ "description": properties["algo"]["description"], "anyOf": algo });
    let about = properties["stage"]["description"].clone();
    properties["stage"] = json!({ "description": about, "type": "array", "items": { "$ref": "#" } });
    schema
}

/// Renames references into an algorithm's own definitions.
fn renamed(mut schema: Value, algorithm: &str) -> Value {
    match &mut schema {
        Value::String(text) => {
            if let Some(name) = text.strip_prefix("#/$defs/") {
                *text = format!("#/$defs/{algorithm}.{name}");
            }
        }
        Value::Array(list) => list.iter_mut().for_each(|v| *v = renamed(v.take(), algorithm)),
        Value::Object(map) => map.values_mut().for_each(|v| *v = renamed(v.take(), algorithm)),
        _ => {}
    }
    schema
}

/// Adds what recipes allow beyond the types (`"off"` for no value, one value for a list of one, a variable for any value) and the
/// ranges at the end of comments.
fn widen(schema: &mut Value) {
    let inside = |table: &'_ mut Value, key: &str, each: &dyn Fn(&mut Value)| {
        let map = table.get_mut(key).and_then(Value::as_object_mut);
        map.into_iter().flat_map(|m| m.values_mut()).for_each(each);
    };
    inside(schema, "properties", &widen_field);
    inside(schema, "$defs", &|table| inside(table, "properties", &widen_field));
}

fn widen_field(field: &mut Value) {
    let comment = field["description"].as_str().unwrap_or_default().replace('\n', " ");
    let (about, range) = Range::split(&comment);
    let optional = field["type"].as_array().is_some_and(|types| types.iter().any(|t| t == "null"))
        || field["anyOf"].as_array().is_some_and(|any| any.iter().any(|one| one["type"] == "null"));
    let Value::Object(mut inner) = field.take() else { return };
    let default = inner.remove("default");
    inner.remove("description");
    if let Some(range) = range {
        let low = if range.above { "exclusiveMinimum" } else { "minimum" };
        let high = if range.below { "exclusiveMaximum" } else { "maximum" };
        let limits = Map::from_iter([(low.into(), json!(range.low)), (high.into(), json!(range.high))]);
        match inner.get_mut("items").and_then(Value::as_object_mut) {
            Some(items) => items.extend(limits),
            None => inner.extend(limits),
        }
    }
    let mut any = vec![Value::Object(inner.clone())];
    if inner.get("type").is_some_and(|t| t == "array") {
        any.push(inner["items"].clone());
    }
    if optional {
        any.push(json!({ "const": OFF }));
    }
    any.push(json!({ "type": "string", "pattern": "\\$\\{" }));
    *field = json!({ "description": about, "anyOf": any });
    if let Some(default) = default {
        field["default"] = default;
    }
}

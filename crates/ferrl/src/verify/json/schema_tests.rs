//! What values a schema admits, and which schemas are refused.

use super::*;
use serde_json::json;

#[test]
fn values_match_or_say_why_not() {
    for (schema, right, wrong) in [
        (
            json!({"type": "integer"}),
            vec![json!(1), json!(1.0), json!(-3)],
            vec![json!(1.5), json!("1"), json!(null)],
        ),
        (json!({"type": ["string", "null"]}), vec![json!("x"), json!(null)], vec![json!(0), json!([])]),
        (
            json!({"enum": [1, "a", null]}),
            vec![json!(1.0), json!("a"), json!(null)],
            vec![json!("b"), json!(2)],
        ),
        (json!({"const": {"a": [1]}}), vec![json!({"a": [1.0]})], vec![json!({"a": [1, 2]}), json!({})]),
        (
            json!({"minimum": 1, "exclusiveMaximum": 3}),
            vec![json!(1), json!(2.9), json!("x")],
            vec![json!(0.9), json!(3)],
        ),
        (json!({"multipleOf": 0.1}), vec![json!(0.3), json!(7)], vec![json!(0.35)]),
        (
            json!({"minLength": 2, "maxLength": 3}),
            vec![json!("éé"), json!("abc"), json!(1)],
            vec![json!("a"), json!("abcd")],
        ),
        (json!({"pattern": "^a+$"}), vec![json!("aa")], vec![json!("ab")]),
        (
            json!({"items": {"type": "number"}, "minItems": 1, "maxItems": 2}),
            vec![json!([1]), json!([1, 2])],
            vec![json!([]), json!([1, "x"]), json!([1, 2, 3])],
        ),
        (
            json!({"prefixItems": [{"type": "string"}], "items": false}),
            vec![json!(["x"]), json!([])],
            vec![json!([1]), json!(["x", 1])],
        ),
        (json!({"uniqueItems": true}), vec![json!([1, 2])], vec![json!([1, 2, 1.0])]),
        (json!({"contains": {"const": 1}}), vec![json!([0, 1])], vec![json!([0]), json!([])]),
        (
            json!({"properties": {"a": {"type": "string"}}, "required": ["a"], "additionalProperties": false}),
            vec![json!({"a": "x"})],
            vec![json!({}), json!({"a": 1}), json!({"a": "x", "b": 1})],
        ),
        (json!({"additionalProperties": {"type": "number"}}), vec![json!({"x": 1})], vec![json!({"x": "1"})]),
        (
            json!({"patternProperties": {"^x_": {"type": "number"}}, "additionalProperties": false}),
            vec![json!({"x_a": 1})],
            vec![json!({"x_a": "1"}), json!({"y": 1})],
        ),
        (json!({"propertyNames": {"maxLength": 1}}), vec![json!({"a": 1})], vec![json!({"ab": 1})]),
        (
            json!({"dependentRequired": {"a": ["b"]}}),
            vec![json!({"b": 1}), json!({"a": 1, "b": 2})],
            vec![json!({"a": 1})],
        ),
        (
            json!({"anyOf": [{"type": "string"}, {"minimum": 5, "type": "number"}]}),
            vec![json!("x"), json!(5)],
            vec![json!(4), json!(null)],
        ),
        (
            json!({"oneOf": [{"multipleOf": 2}, {"multipleOf": 3}]}),
            vec![json!(2), json!(3)],
            vec![json!(6), json!(5)],
        ),
        (json!({"allOf": [{"minimum": 1}, {"maximum": 2}]}), vec![json!(1)], vec![json!(0), json!(3)]),
        (json!({"not": {"type": "string"}}), vec![json!(1)], vec![json!("x")]),
        (
            json!({"if": {"type": "string"}, "then": {"minLength": 1}, "else": {"type": "number"}}),
            vec![json!("x"), json!(1)],
            vec![json!(""), json!(null)],
        ),
        (
            json!({"$ref": "#/$defs/node", "$defs": {"node": {"type": "object", "required": ["v"], "properties": {"next": {"$ref": "#/$defs/node"}}}}}),
            vec![json!({"v": 1, "next": {"v": 2}})],
            vec![json!({"v": 1, "next": {}})],
        ),
        (json!(true), vec![json!(1)], vec![]),
        (json!(false), vec![], vec![json!(1)]),
    ] {
        let checked = Schema::read(&schema).expect("a schema");
        right.iter().for_each(|v| assert_eq!(checked.problem(v), None, "{schema} {v}"));
        wrong.iter().for_each(|v| assert!(checked.problem(v).is_some(), "{schema} {v}"));
    }
    let nested =
        Schema::read(&json!({"properties": {"a": {"items": {"type": "string"}}}})).expect("a schema");
    assert_eq!(nested.problem(&json!({"a": ["x", 1]})).as_deref(), Some("/a/1 is 1, expected string"));
}

#[test]
fn what_is_not_understood_is_refused() {
    for schema in [
        json!({"type": "txt"}),
        json!({"type": []}),
        json!({"minimum": "1"}),
        json!({"requierd": ["a"]}),
        json!({"unevaluatedProperties": false}),
        json!({"$ref": "https://example.com/schema"}),
        json!({"$ref": "#/$defs/none"}),
        json!({"pattern": "("}),
        json!({"anyOf": []}),
        json!({"properties": []}),
        json!([]),
        json!("object"),
    ] {
        assert!(Schema::read(&schema).is_err(), "{schema}");
    }
    let typo = Schema::read(&json!({"requierd": ["a"]})).err().map(|e| e.to_string());
    assert!(typo.is_some_and(|e| e.contains("\"required\"")));
}

#[test]
fn recursive_schemas_end() {
    let endless = Schema::read(&json!({"$ref": "#"})).expect("a schema");
    assert!(endless.problem(&json!(1)).is_some());
    let hidden = Schema::read(&json!({"not": {"$ref": "#"}})).expect("a schema");
    assert!(hidden.problem(&json!(1)).is_some());
    let many: Vec<Value> = (0..40).map(|_| json!({"$ref": "#/$defs/a"})).collect();
    let wide = json!({"$defs": {"a": {"anyOf": many.clone()}}, "oneOf": many});
    assert!(Schema::read(&wide).expect("a schema").problem(&json!(1)).is_some());
}

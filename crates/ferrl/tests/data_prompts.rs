//! Prompts from columns, lengths, what does not fit, and the report of `ferrl data check`.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

mod data_help;

use data_help::{encode, encoder, no_cache, row, settings, shown, write};
use ferrl::data::check::{ReportLimits, check, read};
use ferrl::data::prompt::PromptSettings;
use ferrl::data::schema::RowKind;
use ferrl::data::{DataSource, Encoder, Example, RowCounts};
use serde_json::{Value, json};

fn fails(encoder: &Encoder, value: Value, kind: RowKind, parts: &[&str]) {
    let message = encode(encoder, value.clone(), kind).unwrap_err().to_string();
    assert!(message.starts_with("rows.jsonl:1: "), "{message}");
    assert!(message.contains("fix:"), "{message}");
    for part in parts {
        assert!(message.contains(part), "{value}: no {part:?} in {message}");
    }
}

#[test]
fn template_over_columns_with_system_prefill_and_examples() {
    let chat = encoder(settings(json!({
        "template": "Make {{ target }} from {{ nums | join(' ') }}.\n",
        "system": "Think.",
        "prefill": "<think>",
        "apply_chat_template": "on",
        "examples": [{ "target": 3, "nums": [1, 2], "response": "1+2" }],
    })));
    let value = json!({ "target": 7, "nums": [3, 4], "answer": "3+4" });
    assert_eq!(
        shown(&chat, value.clone(), RowKind::Prompt),
        "<|im_start|>system\nThink.<|im_end|>\n\
         <|im_start|>user\nMake 3 from 1 2.\n<|im_end|>\n<|im_start|>assistant\n1+2<|im_end|>\n\
         <|im_start|>user\nMake 7 from 3 4.\n<|im_end|>\n<|im_start|>assistant\n<think>"
    );
    let sample = encode(&chat, value, RowKind::Prompt).unwrap();
    assert_eq!(Value::from(sample.extra), json!({ "target": 7, "nums": [3, 4], "answer": "3+4" }));
    assert_eq!(sample.prompt[3]["content"], "Make 7 from 3 4.\n");

    let raw = encoder(settings(json!({
        "template": "Q: {{ q }}\nA:",
        "prefill": " So",
        "examples": [{ "q": "1", "response": " 2" }],
    })));
    assert_eq!(shown(&raw, json!({ "q": "3" }), RowKind::Prompt), "Q: 1\nA: 2\n\nQ: 3\nA: So");
}

#[test]
fn prefill_is_given_and_never_trained() {
    for (apply, before) in
        [("off", "Hi?<think>"), ("on", "<|im_start|>user\nHi?<|im_end|>\n<|im_start|>assistant\n<think>")]
    {
        let encoder = encoder(settings(json!({ "prefill": "<think>", "apply_chat_template": apply })));
        let value = json!({ "prompt": "Hi?", "completions": ["Yes", "No"], "rewards": [1, 0] });
        assert_eq!(
            shown(&encoder, value, RowKind::Group),
            format!("reward 1: {before}⟦Yes<|im_end|>⟧\nreward 0: {before}⟦No<|im_end|>⟧")
        );
    }
}

#[test]
fn columns_are_renamed_and_reached_into() {
    let encoder = encoder(settings(json!({
        "columns": { "prompt": "question", "answer": "reward_model.ground_truth" },
    })));
    let value = json!({ "question": "1+1", "reward_model": { "ground_truth": "2" }, "ability": "math" });
    let sample = encode(&encoder, value, RowKind::Prompt).unwrap();
    assert_eq!(sample.prompt, "1+1");
    assert_eq!(sample.extra["answer"], "2");
    assert_eq!(sample.extra["ability"], "math");
    assert!(!sample.extra.contains_key("question"));
    fails(
        &encoder,
        json!({ "questoin": "1+1" }),
        RowKind::Prompt,
        &["\"question\"", "did you mean \"questoin\""],
    );
}

#[test]
fn max_length_cuts_each_side_apart_and_counts() {
    let pair = row(json!({ "prompt": "abcd", "chosen": "yes", "rejected": "nononono" }));
    let encoder = encoder(settings(json!({ "max_length": 8 })));
    let mut counts = RowCounts::default();
    let sample = encoder.encode(&pair, RowKind::Preference, "x:1", &mut counts).unwrap().unwrap();
    let Example::Pair { chosen, rejected } = sample.example else { panic!("not a pair") };
    assert_eq!((chosen.ids.len(), rejected.ids.len()), (8, 8));
    assert_eq!((counts.truncated, counts.dropped, counts.longest), (1, 0, 13));
    fails(
        &data_help::encoder(settings(json!({ "max_length": 4 }))),
        Value::Object(pair.clone()),
        RowKind::Preference,
        &["chosen", "8 tokens", "data.max_length = 4", "overlong"],
    );
    let drop = data_help::encoder(settings(json!({ "max_length": 4, "overlong": "drop" })));
    assert!(drop.encode(&pair, RowKind::Preference, "x:1", &mut counts).unwrap().is_none());
    assert_eq!(counts.dropped, 1);
    let steps = json!({ "prompt": "p", "completions": ["ab", "cd", "ef"], "labels": [1, 1, 0] });
    let Example::Steps { ends, labels, .. } = encode(&encoder, steps, RowKind::Steps).unwrap().example else {
        panic!("not steps");
    };
    assert_eq!((ends, labels), (vec![3, 6], vec![1.0, 1.0]));
    // Prompts to sample from are never cut: they are refused or left out.
    let long = json!({ "prompt": "0123456789" });
    fails(&encoder, long.clone(), RowKind::Prompt, &["10 tokens", "data.max_length is 8", "overlong"]);
    let drop = data_help::encoder(settings(json!({ "max_length": 8, "overlong": "drop" })));
    assert!(drop.encode(&row(long), RowKind::Prompt, "x:1", &mut counts).unwrap().is_none());
}

#[test]
fn rows_that_do_not_fit_say_what_was_found_and_expected() {
    use RowKind::*;
    let e = encoder(PromptSettings::default());
    let user = json!([{ "role": "user", "content": "a" }]);
    let talk = json!([{ "role": "user", "content": "a" }, { "role": "assistant", "content": "b" }]);
    fails(
        &e,
        json!({ "promt": "a", "response": "b" }),
        Sft,
        &["got columns promt, response", "prompt + response", "prompt = \"promt\""],
    );
    fails(
        &e,
        json!({ "prompt": "a", "choosen": "b", "rejected": "c" }),
        Preference,
        &["chosen", "\"choosen\""],
    );
    fails(
        &e,
        json!({ "prompt": "a", "chosen": "b", "rejected": null }),
        Preference,
        &["the row has no value in rejected", "fill in rejected"],
    );
    fails(&e, json!({ "prompt": ["x"], "response": "b" }), Sft, &["column prompt", "message 1", "got text"]);
    fails(&e, json!({ "messages": [{ "content": "x" }] }), Sft, &["has no role"]);
    fails(&e, json!({ "messages": [] }), Sft, &["empty"]);
    fails(&e, json!({ "messages": "x" }), Sft, &["column messages", "got text, expected a list of messages"]);
    fails(
        &e,
        json!({ "messages": [{ "role": "user", "content": { "a": 1 } }] }),
        Sft,
        &["content", "an object"],
    );
    fails(&e, json!({ "messages": talk }), Prompt, &["last message is from \"assistant\""]);
    fails(&e, json!({ "messages": user, "label": true }), Unpaired, &["last message is from \"user\""]);
    fails(
        &e,
        json!({ "prompt": "a", "completion": "b", "label": "maybe" }),
        Unpaired,
        &["column label", "true or false"],
    );
    fails(&e, json!({ "prompt": "a", "response": "b", "target": 1.5 }), Target, &["column target", "is 1.5"]);
    fails(
        &e,
        json!({ "prompt": "a", "completions": ["b"], "rewards": [1, 2] }),
        Group,
        &["2 entries for 1 completions"],
    );
    fails(
        &e,
        json!({ "prompt": "a", "completions": ["b"], "rewards": ["x"] }),
        Group,
        &["item 1", "expected a number"],
    );
    fails(
        &e,
        json!({ "prompt": "a", "completions": [], "rewards": [] }),
        Group,
        &["column completions", "empty"],
    );
    fails(&e, json!({ "prompt": "a", "completions": ["b"], "rewards": { "r": [] } }), Group, &["rewards"]);
    fails(&e, json!({ "prompt": "a", "completions": [1, ["x"]], "labels": [1, 0] }), Steps, &["item 2"]);
    fails(&e, json!({ "chosen": talk, "rejected": talk }), Preference, &["do not differ"]);
    fails(&e, json!({ "chosen": "a", "rejected": talk }), Preference, &["column rejected", "both"]);
    fails(&e, json!({ "messages": talk, "tools": 3 }), Sft, &["column tools"]);
    fails(&e, json!({}), Prompt, &["got columns nothing"]);
    let off = encoder(settings(json!({ "apply_chat_template": "off" })));
    fails(&off, json!({ "messages": user }), Prompt, &["apply_chat_template is false"]);
    let system = encoder(settings(json!({ "system": "x" })));
    fails(&system, json!({ "prompt": "a" }), Prompt, &["data.system", "apply_chat_template"]);
    let template = encoder(settings(json!({ "template": "{{ quest }}" })));
    fails(&template, json!({ "question": "a" }), Prompt, &["data.template", "columns are question"]);
    let bare = Encoder::new(data_help::tokenizer(), None, PromptSettings::default()).unwrap();
    fails(&bare, json!({ "messages": user }), Prompt, &["no chat template"]);
}

#[test]
fn numbers_roles_and_ends_of_conversations_are_named_as_they_are() {
    use RowKind::*;
    let e = encoder(PromptSettings::default());
    let talk = |role: &str| json!([{ "role": "user", "content": "a" }, { "role": role, "content": "b" }]);
    // It said: got columns messages; expected messages.
    fails(
        &e,
        json!({ "messages": talk("assistent") }),
        Sft,
        &["column messages", "message 2", "\"assistent\"", "\"assistant\""],
    );
    fails(&e, json!({ "messages": talk("User") }), Sft, &["message 2", "did you mean \"user\""]);
    fails(
        &e,
        json!({ "messages": talk("user") }),
        Sft,
        &["column messages", "last message is from \"user\""],
    );
    fails(&e, json!({ "conversations": talk("user") }), Sft, &["column conversations"]);
    // It said: got a number, expected a number.
    fails(
        &e,
        json!({ "prompt": "a", "completions": ["b"], "rewards": [1e300] }),
        Group,
        &["item 1", "1e+300", "32 bits"],
    );
    fails(
        &e,
        json!({ "prompt": "a", "completions": ["b"], "rewards": ["0.5"] }),
        Group,
        &["\"0.5\"", "without quotes"],
    );
    fails(
        &e,
        json!({ "prompt": "a", "response": "b", "target": "0.5" }),
        Target,
        &["column target", "without quotes"],
    );
}

#[test]
fn content_in_parts_is_joined_and_images_are_refused() {
    let e = encoder(PromptSettings::default());
    let user = |content: Value| json!({ "messages": [{ "role": "user", "content": content }, { "role": "assistant", "content": "b" }] });
    let text = |t: &str| json!({ "type": "text", "text": t });
    let whole = shown(&e, user(json!("one two")), RowKind::Sft);
    assert_eq!(shown(&e, user(json!([text("one "), text("two")])), RowKind::Sft), whole);
    assert_eq!(shown(&e, user(json!(["one ", { "text": "two" }])), RowKind::Sft), whole);
    let image = user(json!([text("what?"), { "type": "image", "image": "cat.png" }]));
    fails(&e, image, RowKind::Sft, &["column messages", "message 1", "part 2", "image"]);
    let pair = json!({ "prompt": [{ "role": "user", "content": [{ "type": "image_url", "image_url": {} }] }], "chosen": "a", "rejected": "b" });
    fails(&e, pair, RowKind::Preference, &["column prompt", "part 1"]);
}

#[test]
fn tool_calls_that_the_template_drops_are_refused() {
    let e = encoder(PromptSettings::default());
    let call = json!([{ "type": "function", "function": { "name": "add", "arguments": { "a": 1 } } }]);
    let talk = |last: Value| json!({ "messages": [{ "role": "user", "content": "1+1" }, last] });
    let calls = talk(json!({ "role": "assistant", "content": "", "tool_calls": call }));
    fails(&e, calls, RowKind::Sft, &["message 2 (assistant)", "tool_calls"]);
    let tools = json!([{ "type": "function", "function": { "name": "add", "parameters": {} } }]);
    let mut row = talk(json!({ "role": "assistant", "content": "2" }));
    row["tools"] = tools;
    fails(&e, row, RowKind::Sft, &["tools"]);
}

#[test]
fn bad_settings_are_refused_at_once() {
    let refused = |value: Value| {
        let e = Encoder::new(data_help::tokenizer(), None, settings(value)).err();
        e.unwrap().to_string()
    };
    assert!(refused(json!({ "template": "{{ x" })).contains("does not compile"));
    assert!(refused(json!({ "columns": { "prompt": 3 } })).contains("data.columns.prompt"));
    assert!(refused(json!({ "examples": [{ "q": "x" }] })).contains("data.examples 1"));
    assert!(refused(json!({ "max_length": 0 })).contains("max_length"));
    assert!(serde_json::from_value::<PromptSettings>(json!({ "templte": "x" })).is_err());
}

#[test]
fn the_report_shows_examples_lengths_and_every_problem() {
    let folder = tempfile::tempdir().unwrap();
    let lines = [
        r#"{"prompt": "2+2=", "response": "4"}"#,
        r#"{"prompt": "3+3=", "respons": "6"}"#,
        "",
        r#"{"prompt": "4+4=", "response": "8""#,
        r#"{"prompt": "5+5=", "response": "a longer answer to it"}"#,
        r#"[1]"#,
    ];
    let path = write(folder.path(), "train.jsonl", lines.join("\n"));
    let source = DataSource::parse(path.to_str().unwrap()).unwrap();
    let e = encoder(settings(json!({ "max_length": 20 })));
    let limits = ReportLimits { examples: 1, problems: 2 };
    let look = |limits: ReportLimits| {
        let (datasets, report) = read(std::slice::from_ref(&source), &no_cache(), limits).unwrap();
        check(&datasets, report, &e, RowKind::Sft, limits, &|_| Ok(())).unwrap()
    };
    let report = look(limits);
    assert_eq!((report.rows, report.files, report.found, report.problems.len()), (5, 1, 3, 2));
    assert_eq!(report.counts.truncated, 1);
    assert_eq!(report.lengths, [6, 20]);
    let text = report.to_string();
    for part in [
        "train.jsonl:1\n  2+2=⟦4<|im_end|>⟧",
        "train.jsonl:4: is not valid JSON",
        "train.jsonl:6: a row is a list",
        "3 problems, 2 of them shown",
        "least 6, median 6",
        "1 of 5 rows are truncated",
    ] {
        assert!(text.contains(part), "no {part:?} in\n{text}");
    }
    let all = look(ReportLimits::default()).to_string();
    assert!(all.contains("train.jsonl:2: the row does not fit"), "{all}");
}

#[test]
fn one_fault_in_many_rows_is_one_problem() {
    let folder = tempfile::tempdir().unwrap();
    let lines: String =
        (0..500).map(|i| format!("{{\"question\": \"{i}\", \"answer\": \"{i}\"}}\n")).collect();
    let path = write(folder.path(), "qa.jsonl", lines + "{\"prompt\": 3}\n");
    let source = DataSource::parse(path.to_str().unwrap()).unwrap();
    let (datasets, report) = read(&[source], &no_cache(), ReportLimits::default()).unwrap();
    let e = encoder(PromptSettings::default());
    let report = check(&datasets, report, &e, RowKind::Sft, ReportLimits::default(), &|_| Ok(())).unwrap();
    assert_eq!((report.found, report.problems.len()), (501, 2));
    let text = report.to_string();
    for part in [
        "500 rows",
        "qa.jsonl:1, ",
        "qa.jsonl:3 and 497 more",
        "prompt = \"question\", response = \"answer\"",
    ] {
        assert!(text.contains(part), "no {part:?} in\n{text}");
    }
    assert!(!text.contains("qa.jsonl:4,"), "{text}");
}

#[test]
fn alpaca_columns_are_read() {
    let e = encoder(PromptSettings::default());
    let row = |input: Value| json!({ "instruction": "Add.", "input": input, "output": "3" });
    assert_eq!(shown(&e, row(json!("1+2")), RowKind::Sft), "Add.\n1+2⟦3<|im_end|>⟧");
    for none in [json!(""), Value::Null] {
        assert_eq!(shown(&e, row(none), RowKind::Sft), "Add.⟦3<|im_end|>⟧");
    }
    assert_eq!(shown(&e, json!({ "instruction": "Add." }), RowKind::Prompt), "Add.");
    let pair = json!({ "instruction": "Add.", "input": "1", "chosen": "1", "rejected": "2" });
    assert!(shown(&e, pair, RowKind::Preference).contains("Add.\n1⟦1"));
    // Columns of these names beside a prompt of its own are columns like any other.
    assert_eq!(
        shown(&e, json!({ "prompt": "p", "response": "r", "input": "x", "output": "y" }), RowKind::Sft),
        "p⟦r<|im_end|>⟧"
    );
}

#[test]
fn a_recipe_s_worked_examples_stand_before_every_prompt() {
    let text = r#"
        [data]
        columns = { prompt = "question" }
        separator = " | "
        examples = [{ prompt = "1+1=", response = "2" }, { question = "2+2=", response = "4" }]
    "#;
    let recipe = ferrl::recipe::Recipe::parse(text, "r.toml", "r", &[]).unwrap();
    let settings = ferrl::source::encoding(&recipe.stages[0].recipe.data).unwrap();
    let encoder = encoder(settings);
    assert_eq!(shown(&encoder, json!({ "question": "3+3=" }), RowKind::Prompt), "1+1=2 | 2+2=4 | 3+3=");
    assert_eq!(
        shown(&encoder, json!({ "question": "3+3=", "response": "6" }), RowKind::Sft),
        "1+1=2 | 2+2=4 | 3+3=⟦6<|im_end|>⟧"
    );
    let chat =
        shown(&encoder, json!({ "question": [{ "role": "user", "content": "3+3=" }] }), RowKind::Prompt);
    assert!(
        chat.starts_with("<|im_start|>user\n1+1=<|im_end|>\n<|im_start|>assistant\n2<|im_end|>"),
        "{chat}"
    );
}

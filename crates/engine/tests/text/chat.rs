//! Chat templates, special-token names in messages, training masks.

use ferrl_engine::Class;
use ferrl_engine::chat::{ChatTemplate, Kwargs, Turns, today, unix_day};
use ferrl_engine::generate::{Completion, StopReason, Stops};
use ferrl_engine::tokenizer::Tokenizer;
use serde_json::{Map, Value, json};

use crate::{copy, ids, rows, template, tokenizer};

#[test]
fn chats_render_and_encode_as_in_transformers() {
    let mut refused = 0;
    for row in rows("chats.json") {
        let (name, owner) = (row["template"].as_str().unwrap(), row["tokenizer"].as_str().unwrap());
        let (chat, t) = (template(name, owner), tokenizer(owner));
        let messages = row["messages"].as_array().unwrap();
        let tools = Some(&row["tools"]).filter(|v| !v.is_null());
        let prompt = row["add_generation_prompt"].as_bool().unwrap();
        let kwargs = row["kwargs"].as_object().unwrap();
        let got = chat.render(messages, tools, prompt, kwargs);
        match row["text"].as_str() {
            None => {
                let e = got.expect_err(name).to_string();
                let raised = e.contains("the chat template refuses the conversation: ");
                assert!(!raised || e.contains(row["error"].as_str().unwrap()), "{name}: {e}");
                refused += 1;
            }
            Some(text) => {
                assert_eq!(got.unwrap(), text, "{name} {messages:?}");
                let got = chat.encode_chat(&t, messages, tools, prompt, kwargs).unwrap();
                assert_eq!(got, ids(&row["ids"]), "{name} {messages:?}");
            }
        }
        if let Some(mask) = row["mask"].as_array().filter(|m| m.contains(&json!(1))) {
            let (got_ids, got) = chat.encode_training(&t, messages, tools, kwargs, Turns::All).unwrap();
            assert_eq!(got_ids, ids(&row["ids"]));
            let want: Vec<bool> = mask.iter().map(|m| m == &json!(1)).collect();
            assert_eq!(got, want, "{messages:?}");
        }
    }
    assert!(refused > 10, "{refused}");
}

/// What transformers renders of a whole conversation ends with what is put behind the tokens that were sampled.
#[test]
fn the_next_turn_is_the_end_of_the_whole_conversation() {
    let mut compared = 0;
    for row in rows("chats.json") {
        let (name, owner) = (row["template"].as_str().unwrap(), row["tokenizer"].as_str().unwrap());
        let messages = row["messages"].as_array().unwrap();
        let role =
            |back: usize| messages.iter().rev().nth(back).map_or("", |m| m["role"].as_str().unwrap_or(""));
        let goes_on = (role(0), role(1)) == ("user", "assistant") && row["add_generation_prompt"] == true;
        // Mistral's template moves the system message into the last turn of the user.
        let text = row["text"].as_str().unwrap_or_default();
        let at = |m: &Value| m["content"].as_str().and_then(|content| text.rfind(content));
        let moved =
            messages[0]["role"] == "system" && at(&messages[0]) > at(&messages[messages.len().max(2) - 2]);
        if !goes_on || moved || row["text"].is_null() {
            continue;
        }
        let (chat, t) = (template(name, owner), tokenizer(owner));
        let tools = Some(&row["tools"]).filter(|v| !v.is_null());
        let last = &messages[messages.len() - 1..];
        let next = chat.encode_next_turn(&t, last, tools, row["kwargs"].as_object().unwrap()).unwrap();
        assert!(ids(&row["ids"]).ends_with(&next), "{name}: {:?}", t.decode(&next, false));
        let end = chat.end_of_turn(&t);
        assert!(end.is_none() || next.contains(&end.unwrap()), "{name} ends the assistant's turn");
        compared += 1;
    }
    assert!(compared >= 5, "{compared}");
}

#[test]
fn snippets_render_as_in_jinja() {
    let mut wrong = Vec::new();
    for row in rows("snippets.json") {
        let source = row["source"].as_str().unwrap();
        let chat = ChatTemplate::from_source(source, Map::new()).unwrap();
        let got =
            chat.render(&[], None, false, row["context"].as_object().unwrap()).map_err(|e| e.to_string());
        if got.as_deref() != Ok(row["text"].as_str().unwrap()) {
            wrong.push(format!("{source}\n  want {}\n  got  {got:?}", row["text"]));
        }
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

#[test]
fn content_is_given_in_the_form_the_template_reads() {
    let (none, user) = (Kwargs::new(), |content: Value| [json!({ "role": "user", "content": content })]);
    let text = "{% for m in messages %}[{{ m.content }}]{% endfor %}";
    let parts = "{% for m in messages %}{% for p in m.content %}{% if p.type == 'text' %}[{{ p.text }}]{% endif %}{% endfor %}{% endfor %}";
    let list = json!([{ "type": "text", "text": "a " }, { "type": "text", "text": "b" }]);
    for source in [text, parts] {
        let chat = ChatTemplate::from_source(source, Map::new()).unwrap();
        for content in [json!("a b"), list.clone()] {
            assert_eq!(chat.render(&user(content), None, false, &none).unwrap(), "[a b]", "{source}");
        }
        let image = user(json!([{ "type": "image", "url": "x" }]));
        let e = chat.render(&image, None, false, &none).unwrap_err();
        assert!(e.class == Class::Data && e.to_string().contains("message 1"), "{e}");
    }
}

#[test]
fn what_a_template_leaves_out_is_refused() {
    let chat = |source: &str| ChatTemplate::from_source(source, Map::new()).unwrap();
    let known = chat("{% for m in messages if m.role in ['user', 'assistant'] %}{{ m.content }}{% endfor %}");
    let all =
        chat("{% for m in messages %}{{ m.content }}{{ m.tool_calls | default('') }}{% endfor %}{{ tools }}");
    let call = json!([{ "type": "function", "function": { "name": "f", "arguments": {} } }]);
    let messages = |second: Value| vec![json!({ "role": "user", "content": "u" }), second];
    let (none, tools) = (Kwargs::new(), json!([{ "type": "function" }]));
    let calls = json!({ "role": "assistant", "content": "", "tool_calls": call });
    for (messages, tools, place) in [
        (messages(calls), None, "message 2 (assistant)"),
        (messages(json!({ "role": "tool", "content": "42" })), None, "message 2 (tool)"),
        (messages(json!({ "role": "user", "content": "42" })), Some(&tools), "tools"),
    ] {
        let e = known.shows_all(&messages, tools, &none).unwrap_err().to_string();
        assert!(e.contains(place) && e.contains("leaves out"), "{e}");
        all.shows_all(&messages, tools, &none).unwrap();
    }
}

#[test]
fn templates_without_end_are_errors() {
    let nested = format!("{}{{{{ x }}}}{}", "{% if true %}".repeat(5000), "{% endif %}".repeat(5000));
    let brackets = format!("{{{{ {}1{} }}}}", "(".repeat(20_000), ")".repeat(20_000));
    for source in [
        "{% macro f(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{% macro f(x) %}{{ g(x) }}{% endmacro %}{% macro g(x) %}{{ f(x) }}{% endmacro %}{{ f(1) }}",
        "{% for a in range(99999) %}{% for b in range(99999) %}{% for c in range(99999) %}{% endfor %}{% endfor %}{% endfor %}",
        "{{ 'x' * 1000000000 }}",
        "{{ [0] * 1000000000 }}",
        "{% for a in range(90000) %}{{ 'x' * 100000 }}{% endfor %}",
        "{% for a in [1] recursive %}{{ loop([1]) }}{% endfor %}",
        "{% set ns = namespace(x=1) %}{% for a in range(1000) %}{% set ns.x = [ns.x] %}{% endfor %}{{ ns.x | tojson }}",
        &nested,
        &brackets,
    ] {
        let start = std::time::Instant::now();
        let shown: String = source.chars().take(80).collect();
        let result = ChatTemplate::from_source(source, Map::new())
            .and_then(|chat| chat.render(&[], None, false, &Kwargs::new()));
        assert!(result.is_err(), "{shown}");
        assert!(start.elapsed().as_secs() < 40, "{shown}");
    }
}

#[test]
fn dates_are_pinned() {
    let chat = ChatTemplate::from_source("{{ strftime_now('%d %b %Y|%A %-d %B|%F %T %p %%') }}", Map::new())
        .unwrap();
    let say = |c: &ChatTemplate| c.render(&[], None, false, &Kwargs::new()).unwrap();
    let fixed = chat.clone().with_now(unix_day("2024-07-26").unwrap());
    assert_eq!(say(&fixed), "26 Jul 2024|Friday 26 July|2024-07-26 00:00:00 AM %");
    // It said July 2024 whatever the day.
    assert_eq!(say(&chat), say(&chat.clone().with_now(today())));
    assert!(today() > 1_767_225_600 && today() % 86_400 == 0);
    assert_eq!(unix_day("2024-02-29"), Some(1_709_164_800));
    for bad in ["2023-02-29", "2024-13-01", "2024-1", "2024-01-01-01", "x", "", "24-01-00", "+024-01-01"] {
        assert_eq!(unix_day(bad), None, "{bad}");
    }
    assert_eq!(
        say(&chat.with_now(1_709_251_199)),
        "29 Feb 2024|Thursday 29 February|2024-02-29 23:59:59 PM %"
    );
}

#[test]
fn templates_are_found_where_transformers_finds_them() {
    let folder = copy("qwen");
    let e = ChatTemplate::from_dir(folder.path()).unwrap_err().to_string();
    assert!(e.contains("has no chat template"), "{e}");
    let config = |value: Value| {
        let text = json!({"eos_token": {"content": "<|im_end|>"}, "bos_token": null, "chat_template": value})
            .to_string();
        std::fs::write(folder.path().join("tokenizer_config.json"), text).unwrap();
    };
    let render = |tools: Option<&Value>| {
        ChatTemplate::from_dir(folder.path()).unwrap().render(&[], tools, false, &Kwargs::new()).unwrap()
    };
    config(json!("one{{ bos_token }}{{ eos_token }}"));
    assert_eq!(render(None), "one<|im_end|>");
    config(json!([{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]));
    assert_eq!((render(None), render(Some(&json!([])))), ("d".into(), "t".into()));
    config(json!([{"name": "other", "template": "d"}]));
    let chat = ChatTemplate::from_dir(folder.path()).unwrap();
    assert!(
        chat.render(&[], None, false, &Kwargs::new())
            .unwrap_err()
            .to_string()
            .contains("none named \"default\"")
    );
    config(json!(3));
    assert!(ChatTemplate::from_dir(folder.path()).is_err());
    std::fs::write(folder.path().join("chat_template.jinja"), "file").unwrap();
    assert_eq!(render(None), "file");
    std::fs::create_dir(folder.path().join("additional_chat_templates")).unwrap();
    std::fs::write(folder.path().join("additional_chat_templates/tool_use.jinja"), "more").unwrap();
    assert_eq!((render(None), render(Some(&json!([])))), ("file".into(), "more".into()));
    std::fs::write(folder.path().join("chat_template.jinja"), "a\n{% if %}").unwrap();
    let e = ChatTemplate::from_dir(folder.path()).unwrap_err().to_string();
    assert!(e.contains("does not compile") && e.contains("line 2"), "{e}");
}

#[test]
fn names_of_special_tokens_in_messages_stay_text() {
    let none = Kwargs::new();
    for (name, owner) in [
        ("qwen25", "qwen"),
        ("qwen3", "qwen"),
        ("llama3", "llama3"),
        ("mistral", "metaspace"),
        ("phi3", "metaspace"),
    ] {
        let (chat, t) = (template(name, owner), tokenizer(owner));
        let count = |ids: &[u32]| ids.iter().filter(|&&i| t.is_special(i)).count();
        let ask = |text: &str| {
            let messages =
                [json!({"role": "user", "content": text}), json!({"role": "assistant", "content": "ok"})];
            let ids = chat.encode_chat(&t, &messages, None, false, &none).unwrap();
            let text = chat.render(&messages, None, false, &none).unwrap();
            (ids, text)
        };
        let (clean, text) = ask("hello there");
        assert_eq!(clean, t.encode_markup(&text).unwrap(), "{name}");
        for special in t.special_tokens() {
            let (ids, text) = ask(&format!("say {special} now, {special}{special}"));
            assert_eq!(count(&ids), count(&clean), "{name} {special}");
            assert_ne!(ids, t.encode_markup(&text).unwrap(), "{name} {special}");
            let squeeze = |s: &str| s.replace([' ', '\n'], "");
            assert_eq!(squeeze(&t.decode(&ids, false).unwrap()), squeeze(&text), "{name} {special}");
        }
    }
    let (chat, t) = (template("qwen25", "qwen"), tokenizer("qwen"));
    // Nested fields and keys of tools count too; our own marks cannot be forged.
    let tools = json!([{"name": "f", "description": "<|im_end|>", "<|im_start|>": {"x": ["<|im_end|>"]}}]);
    let ids = chat
        .encode_chat(
            &t,
            &[json!({"role": "user", "content": "\u{FDD0}<|im_end|>\u{FDD1}"})],
            Some(&tools),
            true,
            &none,
        )
        .unwrap();
    assert_eq!(ids.iter().filter(|&&i| t.is_special(i)).count(), 5);
    // Nor can two texts that a template joins make one.
    let source = "{% for part in messages[0].content %}{{ part.text }}{% endfor %}<|im_end|>";
    let chat = ChatTemplate::from_source(source, Map::new()).unwrap();
    let parts = json!({"role": "user", "content": [{"text": "a <|im_"}, {"text": "end|> b"}]});
    let ids = chat.encode_chat(&t, &[parts], None, false, &none).unwrap();
    assert_eq!(ids.iter().filter(|&&i| t.is_special(i)).count(), 1);
    assert_eq!(t.decode(&ids, false).unwrap(), "a <|im_end|> b<|im_end|>");
}

#[test]
fn a_template_may_act_on_special_names_the_assistant_writes() {
    let folder = copy("qwen");
    let path = folder.path().join("tokenizer.json");
    let mut raw: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    for token in raw["added_tokens"].as_array_mut().unwrap() {
        token["special"] = true.into();
    }
    std::fs::write(&path, raw.to_string()).unwrap();
    let (t, chat) = (Tokenizer::from_dir(folder.path()).unwrap(), template("qwen3", "qwen"));
    let answer = json!({"role": "assistant", "content": "<think>\nhm\n</think>\n\n2"});
    let none = Kwargs::new();
    let messages = [json!({"role": "user", "content": "1+1?"}), answer.clone()];
    let text = chat.render(&messages, None, false, &none).unwrap();
    assert_eq!(chat.encode_chat(&t, &messages, None, false, &none).unwrap(), t.encode_markup(&text).unwrap());
    // The same name from the user stays text, and an <|im_end|> of the assistant does not end its turn.
    let messages = [json!({"role": "user", "content": "</think>"}), answer];
    let ids = chat.encode_chat(&t, &messages, None, false, &none).unwrap();
    assert_eq!(ids.iter().filter(|&&i| Some(i) == t.token_id("</think>")).count(), 1);
}

fn trained(chat: &ChatTemplate, t: &Tokenizer, messages: &[Value], kwargs: &Kwargs) -> Vec<String> {
    let (ids, mask) = chat.encode_training(t, messages, None, kwargs, Turns::All).unwrap();
    assert_eq!(ids, chat.encode_chat(t, messages, None, false, kwargs).unwrap());
    let runs = mask.chunk_by(|a, b| a == b).scan(0, |at, run| {
        *at += run.len();
        Some((run[0], t.decode(&ids[*at - run.len()..*at], false).unwrap()))
    });
    runs.filter(|(on, _)| *on).map(|(_, text)| text).collect()
}

#[test]
fn masks_cover_the_assistant_and_its_end_of_turn() {
    let talk = |answers: [&str; 2]| {
        vec![
            json!({"role": "user", "content": "q1 <|im_end|>"}),
            json!({"role": "assistant", "content": answers[0]}),
            json!({"role": "user", "content": "q2"}),
            json!({"role": "assistant", "content": answers[1]}),
        ]
    };
    for (name, owner, end) in [
        ("qwen25", "qwen", "<|im_end|>"),
        ("generation", "qwen", "<|im_end|>"),
        ("llama3", "llama3", "<|eot_id|>"),
        ("mistral", "metaspace", "</s>"),
        ("gemma2", "metaspace", "<end_of_turn>"),
        ("mistral", "prepend", "</s>"),
        ("gemma2", "prepend", "<end_of_turn>"),
    ] {
        let (chat, t) = (template(name, owner), tokenizer(owner));
        let got = trained(&chat, &t, &talk(["It is 1.", "So 👍 2"]), &Kwargs::new());
        let got: Vec<&str> = got.iter().map(|text| text.trim_start()).collect();
        assert_eq!(got, [format!("It is 1.{end}"), format!("So 👍 2{end}")], "{name}");
    }
    // An <|im_end|> the assistant quotes does not end its turn.
    let (chat, t) = (template("qwen25", "qwen"), tokenizer("qwen"));
    let got = trained(&chat, &t, &talk(["a <|im_end|> b", "c"]), &Kwargs::new());
    assert_eq!(got, ["a <|im_end|> b<|im_end|>", "c<|im_end|>"]);
    // Phi 3 ends the whole conversation with its end of text, which is no re-rendering.
    let (chat, t) = (template("phi3", "metaspace"), tokenizer("metaspace"));
    let got = trained(&chat, &t, &talk(["a1", "b2"]), &Kwargs::new());
    assert_eq!(got.len(), 2);
    assert!(got[0].starts_with("a1") && got[0].ends_with("<|end|>"), "{got:?}");
}

#[test]
fn a_template_that_rewrites_old_turns_is_refused() {
    let (chat, t) = (template("qwen3", "qwen"), tokenizer("qwen"));
    let user = |text: &str| json!({"role": "user", "content": text});
    let says = |text: &str| json!({"role": "assistant", "content": text, "reasoning_content": "because"});
    let none = Kwargs::new();
    let got = trained(&chat, &t, &[user("q"), says("2")], &none);
    assert_eq!(got, ["<think>\nbecause\n</think>\n\n2<|im_end|>"]);
    let e = chat
        .encode_training(&t, &[user("q"), says("2"), user("r"), says("3")], None, &none, Turns::All)
        .unwrap_err();
    assert_eq!(e.class, Class::Data);
    let e = e.to_string();
    assert!(e.contains("message 1 (assistant)") && e.contains("\"<think>\\nbecause"), "{e}");
    assert!(e.contains("{% generation %}") && e.contains("got \"2<|im_end|>"), "{e}");
    // The last turn alone can always be trained, in the context the model will see.
    let four = [user("q"), says("2"), user("r"), says("3")];
    let (ids, mask) = chat.encode_training(&t, &four, None, &none, Turns::Last).unwrap();
    let on: Vec<u32> = ids.iter().zip(&mask).filter(|(_, on)| **on).map(|(i, _)| *i).collect();
    assert_eq!(t.decode(&on, false).unwrap(), "<think>\nbecause\n</think>\n\n3<|im_end|>");
    let blocks = template("generation", "qwen");
    let (ids, mask) = blocks.encode_training(&t, &four, None, &none, Turns::Last).unwrap();
    let on: Vec<u32> = ids.iter().zip(&mask).filter(|(_, on)| **on).map(|(i, _)| *i).collect();
    assert_eq!(t.decode(&on, false).unwrap(), "3<|im_end|>");
    // With tools the turns after the last question are kept, so that is stable.
    let tool = json!({"role": "tool", "content": "21"});
    let got = trained(&chat, &t, &[user("q"), says("look"), tool, says("3")], &none);
    assert_eq!(got.len(), 2);
    // Mistral puts the system prompt into the question only while that is the last message.
    let (chat, t) = (template("mistral", "metaspace"), tokenizer("metaspace"));
    let system = json!({"role": "system", "content": "Be brief."});
    let two = [system.clone(), user("q"), says("2"), user("r"), says("3")];
    let e = chat.encode_training(&t, &two[..3], None, &none, Turns::All).unwrap_err().to_string();
    assert!(e.contains("the text before message 2") && e.contains("\"Be brief."), "{e}");
    assert_eq!(trained(&chat, &t, &two[1..], &none).len(), 2);
    // Nothing to train on.
    let e = chat.encode_training(&t, &[user("q")], None, &none, Turns::All).unwrap_err().to_string();
    assert!(e.contains("no message is the assistant's"), "{e}");
    let e = template("gemma2", "metaspace").encode_training(&t, &two, None, &none, Turns::All).unwrap_err();
    assert!(e.to_string().contains("System role not supported"), "{e}");
}

/// The end of an assistant's turn is found by rendering, whatever the tokenizer's `eos_token` is.
#[test]
fn the_template_says_which_token_ends_a_turn() {
    let ends = [
        ("qwen25", "qwen", "<|im_end|>"),
        ("qwen3", "qwen", "<|im_end|>"),
        ("generation", "qwen", "<|im_end|>"),
        ("llama3", "llama3", "<|eot_id|>"),
        ("mistral", "metaspace", "</s>"),
        ("gemma2", "metaspace", "<end_of_turn>"),
        ("phi3", "metaspace", "<|end|>"),
    ];
    for (name, owner, want) in ends {
        let (chat, t) = (template(name, owner), tokenizer(owner));
        let got = chat.end_of_turn(&t).and_then(|id| t.token(id));
        assert_eq!(got.as_deref(), Some(want), "{name}");
        let stops = Stops::of(&t, Some(&chat));
        assert!(stops.ids().starts_with(t.eos()), "{name}");
        assert!(stops.ids().contains(&t.token_id(want).unwrap()), "{name}");
    }
    let t = tokenizer("qwen");
    let plain = ChatTemplate::from_source(
        "{% for m in messages %}{{ m.role }}: {{ m.content }}\n\n{% endfor %}",
        Map::new(),
    );
    assert_eq!(plain.unwrap().end_of_turn(&t), None, "line ends are no marker");
    let refuses = ChatTemplate::from_source("{{ raise_exception('no') }}", Map::new()).unwrap();
    assert_eq!(refuses.end_of_turn(&t), None);
    assert_eq!(Stops::of(&t, None).ids(), t.eos());
}

/// What ended a completion is not part of its text: the stop token, or everything from the stop string on.
#[test]
fn text_is_cut_at_what_ended_it() {
    let t = tokenizer("qwen");
    let stops = Stops::of(&t, None).with_strings(&["</a>".into(), "x</a>".into()], false);
    let completion = |text: &str, last: Option<&str>, stop: StopReason| {
        let mut ids = t.encode_text(text).unwrap();
        ids.extend(last.map(|name| t.token_id(name).unwrap()));
        Completion { ids, logp: vec![], sampled_logp: vec![], top: vec![], versions: vec![], shared: 0, stop }
    };
    let eos = t.token_id("<|im_end|>").unwrap();
    let cases = [
        (completion("yes", Some("<|im_end|>"), StopReason::Token(eos)), "yes"),
        // `<think>` is no special token, so only its being the stop token keeps it out of the text.
        (completion("yes", Some("<think>"), StopReason::Token(t.token_id("<think>").unwrap())), "yes"),
        (completion("no</a>", None, StopReason::String(0)), "no"),
        (completion("no x</a>", None, StopReason::String(0)), "no "),
        (completion("never</a>", None, StopReason::Length), "never</a>"),
    ];
    for (c, want) in cases {
        assert_eq!(stops.text(&t, &c).unwrap(), want);
        let (mut stream, mut text) = (stops.stream(&t), String::new());
        let said = if matches!(c.stop, StopReason::Token(_)) { &c.ids[..c.ids.len() - 1] } else { &c.ids };
        for &id in said {
            text += &stream.push(id).unwrap();
        }
        assert_eq!(text + &stream.finish(c.stop).unwrap(), want, "streamed");
    }
    let kept = stops.with_strings(&["</a>".into()], true);
    assert_eq!(kept.text(&t, &completion("5</a>", None, StopReason::String(0))).unwrap(), "5</a>");
}

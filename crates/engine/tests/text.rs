//! Tokenizers and chat templates against what `transformers` and `jinja2` gave (tools/make_text_fixtures.py).

#![allow(clippy::unwrap_used)]

use std::path::{Path, PathBuf};

use ferrl_engine::Class;
use ferrl_engine::chat::{ChatTemplate, Kwargs};
use ferrl_engine::tokenizer::{Tokenizer, train_bpe, train_chars};
use serde_json::{Map, Value, json};

const TOKENIZERS: [&str; 4] = ["qwen", "llama3", "metaspace", "prepend"];

fn fixtures() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/text")
}

fn rows(name: &str) -> Vec<Value> {
    serde_json::from_str(&std::fs::read_to_string(fixtures().join(name)).unwrap()).unwrap()
}

fn tokenizer(name: &str) -> Tokenizer {
    Tokenizer::from_dir(&fixtures().join(name)).unwrap()
}

fn template(name: &str, owner: &str) -> ChatTemplate {
    let read = |p: PathBuf| std::fs::read_to_string(p).unwrap();
    let config: Value =
        serde_json::from_str(&read(fixtures().join(owner).join("tokenizer_config.json"))).unwrap();
    let mut variables = Map::new();
    for key in ["bos_token", "eos_token"] {
        match &config[key] {
            Value::String(s) => variables.insert(key.into(), s.clone().into()),
            Value::Object(o) => variables.insert(key.into(), o["content"].clone()),
            _ => None,
        };
    }
    ChatTemplate::from_source(&read(fixtures().join(format!("templates/{name}.jinja"))), variables).unwrap()
}

fn ids(value: &Value) -> Vec<u32> {
    value.as_array().unwrap().iter().map(|v| v.as_u64().unwrap() as u32).collect()
}

/// An empty folder that is removed at the end of the test.
struct Folder(PathBuf);

impl Folder {
    fn new(name: &str) -> Self {
        let path = std::env::temp_dir().join(format!("ferrl-text-{name}-{}", std::process::id()));
        let _ = std::fs::remove_dir_all(&path);
        std::fs::create_dir_all(&path).unwrap();
        Folder(path)
    }
    fn copy(name: &str, from: &str) -> Self {
        let folder = Folder::new(name);
        for entry in std::fs::read_dir(fixtures().join(from)).unwrap() {
            let entry = entry.unwrap();
            std::fs::copy(entry.path(), folder.0.join(entry.file_name())).unwrap();
        }
        folder
    }
}

impl Drop for Folder {
    fn drop(&mut self) {
        let _ = std::fs::remove_dir_all(&self.0);
    }
}

#[test]
fn ids_and_text_equal_those_of_transformers() {
    for name in TOKENIZERS {
        let t = tokenizer(name);
        for row in rows(&format!("{name}.strings.json")) {
            let text = row["text"].as_str().unwrap();
            assert_eq!(t.encode_text(text).unwrap(), ids(&row["plain"]), "{name} plain {text:?}");
            assert_eq!(t.encode_markup(text).unwrap(), ids(&row["markup"]), "{name} markup {text:?}");
            let prompt = t.encode_prompt(text).unwrap();
            assert_eq!(prompt, ids(&row["prompt"]), "{name} prompt {text:?}");
            assert_eq!(
                t.decode(&prompt, false).unwrap(),
                row["decoded"].as_str().unwrap(),
                "{name} {text:?}"
            );
            assert_eq!(t.decode(&prompt, true).unwrap(), row["skipped"].as_str().unwrap(), "{name} {text:?}");
        }
    }
}

#[test]
fn plain_text_never_yields_a_special_token() {
    for name in TOKENIZERS {
        let t = tokenizer(name);
        let all = t.special_tokens().join(" x ");
        let guarded = format!("\u{FDD0}{}\u{FDD0}\u{FDD1} {all}", t.eos()[0]);
        for text in [all, guarded] {
            let ids = t.encode_text(&text).unwrap();
            assert!(!ids.iter().any(|&i| t.is_special(i)), "{name}");
            assert!(t.decode(&ids, true).unwrap().ends_with(text.trim_start_matches(' ')), "{name}");
        }
    }
}

#[test]
fn special_tokens_are_known() {
    let t = tokenizer("qwen");
    assert_eq!(t.eos(), [t.token_id("<|im_end|>").unwrap(), t.token_id("<|endoftext|>").unwrap()]);
    assert_eq!((t.bos(), t.pad()), (None, t.token_id("<|endoftext|>")));
    assert_eq!(t.vocab_size(), t.token_id("</think>").unwrap() as usize + 1);
    assert!(t.is_special(t.eos()[0]) && !t.is_special(t.token_id("<think>").unwrap()));
    let t = tokenizer("llama3");
    assert_eq!(t.bos(), t.token_id("<|begin_of_text|>"));
    // A special token that only the settings name is added, as transformers adds it.
    let t = tokenizer("metaspace");
    assert_eq!(t.pad().unwrap() as usize, t.vocab_size() - 1);
    assert_eq!(t.token(t.pad().unwrap()).as_deref(), Some("<|pad|>"));
}

#[test]
fn streaming_gives_the_same_text() {
    for name in TOKENIZERS {
        let t = tokenizer(name);
        let stream = |ids: &[u32], skip: bool| -> (Vec<String>, String) {
            let mut s = t.stream(skip);
            let pieces = ids.iter().map(|&i| s.push(i).unwrap()).collect();
            (pieces, s.finish().unwrap())
        };
        for row in rows(&format!("{name}.strings.json")) {
            for skip in [false, true] {
                let ids = ids(&row["prompt"]);
                let (pieces, last) = stream(&ids, skip);
                assert!(!pieces.concat().contains('\u{FFFD}'), "{name} gave out half a character");
                assert_eq!(pieces.concat() + &last, t.decode(&ids, skip).unwrap());
            }
        }
        let mut state = 7u64;
        for round in 0..400 {
            let random: Vec<u32> = (0..1 + round % 40)
                .map(|_| {
                    state = state.wrapping_mul(6364136223846793005).wrapping_add(1442695040888963407);
                    (state >> 33) as u32 % (t.vocab_size() as u32 + 3)
                })
                .collect();
            for skip in [false, true] {
                let (pieces, last) = stream(&random, skip);
                assert_eq!(pieces.concat() + &last, t.decode(&random, skip).unwrap(), "{name} {random:?}");
            }
        }
    }
}

#[test]
fn streaming_does_not_wait_longer_than_it_must() {
    let t = tokenizer("qwen");
    let mut s = t.stream(true);
    let pieces: Vec<String> =
        t.encode_text("Hello 👍!").unwrap().iter().map(|&i| s.push(i).unwrap()).collect();
    assert_eq!(pieces.concat(), "Hello 👍!");
    assert!(pieces[0].starts_with('H'));
}

#[test]
fn broken_directories_are_named() {
    let gone = Tokenizer::from_dir(Path::new("/no/such/dir")).unwrap_err();
    assert_eq!(gone.class, Class::Model);
    assert!(gone.to_string().contains("no such model directory"), "{gone}");
    let folder = Folder::new("broken");
    let e = Tokenizer::from_dir(&folder.0).unwrap_err().to_string();
    assert!(e.contains("no tokenizer.json") && e.contains("fix:"), "{e}");
    let whole = std::fs::read_to_string(fixtures().join("qwen/tokenizer.json")).unwrap();
    std::fs::write(folder.0.join("tokenizer.json"), &whole[..whole.len() / 2]).unwrap();
    let e = Tokenizer::from_dir(&folder.0).unwrap_err().to_string();
    assert!(e.contains("tokenizer.json: is not a usable tokenizer") && e.contains("again"), "{e}");
    std::fs::write(folder.0.join("tokenizer.json"), b"\xff\xfe\x00").unwrap();
    assert!(Tokenizer::from_dir(&folder.0).unwrap_err().to_string().contains("not UTF-8"));
    std::fs::write(folder.0.join("tokenizer.json"), &whole).unwrap();
    std::fs::write(folder.0.join("tokenizer_config.json"), "[1]").unwrap();
    let e = Tokenizer::from_dir(&folder.0).unwrap_err().to_string();
    assert!(e.contains("tokenizer_config.json: holds a list, expected a JSON object"), "{e}");
    std::fs::write(folder.0.join("tokenizer_config.json"), "{\"a\": ").unwrap();
    assert!(Tokenizer::from_dir(&folder.0).unwrap_err().to_string().contains("is not valid JSON"));
    assert!(ChatTemplate::from_dir(&folder.0).unwrap_err().to_string().contains("is not valid JSON"));
}

#[test]
fn saving_and_loading_changes_nothing() {
    for name in TOKENIZERS {
        let (t, folder) = (tokenizer(name), Folder::new(&format!("save-{name}")));
        t.save(&folder.0.join("deep/er")).unwrap();
        let again = Tokenizer::from_dir(&folder.0.join("deep/er")).unwrap();
        assert_eq!((again.bos(), again.pad(), again.eos()[0]), (t.bos(), t.pad(), t.eos()[0]));
        for row in rows(&format!("{name}.strings.json")) {
            let text = row["text"].as_str().unwrap();
            assert_eq!(again.encode_prompt(text).unwrap(), ids(&row["prompt"]), "{name} {text:?}");
        }
    }
}

fn corpus() -> impl Iterator<Item = String> + Send {
    ["the cat sat on the mat", "the dog sat on the log", "1 + 22 = 23\n", "Grüße 你好 👍"]
        .into_iter()
        .map(String::from)
}

fn names(list: &[&str]) -> Vec<String> {
    list.iter().map(|s| s.to_string()).collect()
}

/// Saves, with ids for `make_text_fixtures.py --load`, when FERRL_TEXT_OUT names a folder.
fn offer(t: &Tokenizer, name: &str, texts: &[&str]) {
    if let Ok(out) = std::env::var("FERRL_TEXT_OUT") {
        let dir = Path::new(&out).join(name);
        t.save(&dir).unwrap();
        let row = |text: &&str| {
            let ids = t.encode_markup(text).unwrap();
            json!({"text": text, "decoded": t.decode(&ids, false).unwrap(), "ids": ids})
        };
        let rows: Vec<Value> = texts.iter().map(row).collect();
        std::fs::write(dir.join("ids.json"), Value::from(rows).to_string()).unwrap();
    }
}

#[test]
fn trained_bpe_reads_everything_back() {
    let specials = names(&["<|endoftext|>", "<|im_start|>", "<|im_end|>"]);
    let t = train_bpe(corpus(), 300, &specials).unwrap();
    assert_eq!((t.token_id("<|endoftext|>"), t.token_id("<|im_end|>")), (Some(0), Some(2)));
    assert!(t.vocab_size() > 259 && t.vocab_size() <= 300, "{}", t.vocab_size());
    assert_eq!((t.eos(), t.pad(), t.bos()), (&[2u32][..], Some(0), None));
    let texts = ["", " ", "the mat", "unseen Ω ☃ 👨‍👩‍👧‍👦\r\n\t", "1234", "  two  ", "<|im_end|>", "don't"];
    let folder = Folder::new("bpe");
    t.save(&folder.0).unwrap();
    let again = Tokenizer::from_dir(&folder.0).unwrap();
    let twin = train_bpe(corpus(), 300, &specials).unwrap();
    for text in texts {
        let ids = t.encode_text(text).unwrap();
        assert_eq!(t.decode(&ids, true).unwrap(), text);
        assert_eq!(again.encode_text(text).unwrap(), ids);
        assert_eq!(twin.encode_text(text).unwrap(), ids);
    }
    assert!(t.encode_text("the").unwrap().len() < 3);
    let chat = ChatTemplate::from_dir(&folder.0).unwrap();
    let messages = [json!({"role": "user", "content": "hi"}), json!({"role": "assistant", "content": "yo"})];
    let text = chat.render(&messages, None, false, &Kwargs::new()).unwrap();
    assert_eq!(text, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n");
    let (ids, mask) = chat.encode_training(&t, &messages, None, &Kwargs::new()).unwrap();
    let trained: Vec<u32> = ids.iter().zip(&mask).filter(|(_, m)| **m).map(|(i, _)| *i).collect();
    assert_eq!(t.decode(&trained, false).unwrap(), "yo<|im_end|>");
    offer(&t, "bpe", &texts);
}

#[test]
fn training_the_same_text_gives_the_same_file() {
    let [a, b] = ["same-a", "same-b"].map(Folder::new);
    for folder in [&a, &b] {
        train_bpe(corpus(), 290, &names(&["<s>"])).unwrap().save(&folder.0).unwrap();
    }
    let read = |f: &Folder| std::fs::read(f.0.join("tokenizer.json")).unwrap();
    assert_eq!(read(&a), read(&b));
    let e = train_bpe(corpus(), 100, &names(&["<s>"])).unwrap_err().to_string();
    assert!(e.contains("at least 257"), "{e}");
    assert!(train_bpe(corpus(), 300, &names(&["<s>", "<s>"])).unwrap_err().to_string().contains("twice"));
}

#[test]
fn trained_characters_read_back_and_strangers_are_refused() {
    let t = train_chars(corpus(), &names(&["<|im_start|>", "<|im_end|>"])).unwrap();
    let texts = ["the cat", "1 + 1 = 2\n", "Grüße 你好 👍", "", " ", "<|im_start|>the<|im_end|>\n"];
    let folder = Folder::new("chars");
    t.save(&folder.0).unwrap();
    let again = Tokenizer::from_dir(&folder.0).unwrap();
    for text in texts {
        let ids = t.encode_markup(text).unwrap();
        assert_eq!(t.decode(&ids, false).unwrap(), text);
        assert_eq!(again.encode_markup(text).unwrap(), ids);
    }
    assert_eq!(t.encode_text("the").unwrap().len(), 3);
    for text in ["xyz", "the x", "thex", "<|im_start|>", "axa"] {
        for e in [t.encode_text(text).unwrap_err(), again.encode_text(text).unwrap_err()] {
            assert_eq!(e.class, Class::Data);
            assert!(e.to_string().contains("is not in the vocabulary"), "{e}");
        }
    }
    let lenient = train_chars(corpus(), &names(&["<unk>"])).unwrap();
    assert_eq!(lenient.encode_text("axa").unwrap()[1], lenient.token_id("<unk>").unwrap());
    offer(&t, "chars", &texts);
    offer(&lenient, "chars-unk", &["axa", "the", " the  cat "]);
}

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
            let (got_ids, got) = chat.encode_training(&t, messages, tools, kwargs).unwrap();
            assert_eq!(got_ids, ids(&row["ids"]));
            let want: Vec<bool> = mask.iter().map(|m| m == &json!(1)).collect();
            assert_eq!(got, want, "{messages:?}");
        }
    }
    assert!(refused > 10, "{refused}");
}

#[test]
fn snippets_render_as_in_jinja() {
    for row in rows("snippets.json") {
        let source = row["source"].as_str().unwrap();
        let chat = ChatTemplate::from_source(source, Map::new()).unwrap();
        let got = chat.render(&[], None, false, row["context"].as_object().unwrap()).unwrap();
        assert_eq!(got, row["text"].as_str().unwrap(), "{source}");
    }
}

#[test]
fn dates_are_pinned() {
    let chat = ChatTemplate::from_source("{{ strftime_now('%d %b %Y|%A %-d %B|%F %T %p %%') }}", Map::new())
        .unwrap();
    let say = |c: &ChatTemplate| c.render(&[], None, false, &Kwargs::new()).unwrap();
    assert_eq!(say(&chat), "26 Jul 2024|Friday 26 July|2024-07-26 00:00:00 AM %");
    assert_eq!(
        say(&chat.with_now(1_709_251_199)),
        "29 Feb 2024|Thursday 29 February|2024-02-29 23:59:59 PM %"
    );
}

#[test]
fn templates_are_found_where_transformers_finds_them() {
    let folder = Folder::copy("where", "qwen");
    let e = ChatTemplate::from_dir(&folder.0).unwrap_err().to_string();
    assert!(e.contains("has no chat template"), "{e}");
    let config = |value: Value| {
        let text = json!({"eos_token": {"content": "<|im_end|>"}, "bos_token": null, "chat_template": value})
            .to_string();
        std::fs::write(folder.0.join("tokenizer_config.json"), text).unwrap();
    };
    let render = |tools: Option<&Value>| {
        ChatTemplate::from_dir(&folder.0).unwrap().render(&[], tools, false, &Kwargs::new()).unwrap()
    };
    config(json!("one{{ bos_token }}{{ eos_token }}"));
    assert_eq!(render(None), "one<|im_end|>");
    config(json!([{"name": "default", "template": "d"}, {"name": "tool_use", "template": "t"}]));
    assert_eq!((render(None), render(Some(&json!([])))), ("d".into(), "t".into()));
    config(json!([{"name": "other", "template": "d"}]));
    let chat = ChatTemplate::from_dir(&folder.0).unwrap();
    assert!(
        chat.render(&[], None, false, &Kwargs::new())
            .unwrap_err()
            .to_string()
            .contains("none named \"default\"")
    );
    config(json!(3));
    assert!(ChatTemplate::from_dir(&folder.0).is_err());
    std::fs::write(folder.0.join("chat_template.jinja"), "file").unwrap();
    assert_eq!(render(None), "file");
    std::fs::create_dir(folder.0.join("additional_chat_templates")).unwrap();
    std::fs::write(folder.0.join("additional_chat_templates/tool_use.jinja"), "more").unwrap();
    assert_eq!((render(None), render(Some(&json!([])))), ("file".into(), "more".into()));
    std::fs::write(folder.0.join("chat_template.jinja"), "a\n{% if %}").unwrap();
    let e = ChatTemplate::from_dir(&folder.0).unwrap_err().to_string();
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
}

#[test]
fn a_template_may_act_on_special_names_the_assistant_writes() {
    let folder = Folder::copy("special-think", "qwen");
    let path = folder.0.join("tokenizer.json");
    let mut raw: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    for token in raw["added_tokens"].as_array_mut().unwrap() {
        token["special"] = true.into();
    }
    std::fs::write(&path, raw.to_string()).unwrap();
    let (t, chat) = (Tokenizer::from_dir(&folder.0).unwrap(), template("qwen3", "qwen"));
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
    let (ids, mask) = chat.encode_training(t, messages, None, kwargs).unwrap();
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
    let e = chat.encode_training(&t, &[user("q"), says("2"), user("r"), says("3")], None, &none).unwrap_err();
    assert_eq!(e.class, Class::Data);
    let e = e.to_string();
    assert!(e.contains("message 1 (assistant)") && e.contains("\"<think>\\nbecause"), "{e}");
    assert!(e.contains("{% generation %}") && e.contains("got \"2<|im_end|>"), "{e}");
    // With tools the turns after the last question are kept, so that is stable.
    let tool = json!({"role": "tool", "content": "21"});
    let got = trained(&chat, &t, &[user("q"), says("look"), tool, says("3")], &none);
    assert_eq!(got.len(), 2);
    // Mistral puts the system prompt into the question only while that is the last message.
    let (chat, t) = (template("mistral", "metaspace"), tokenizer("metaspace"));
    let system = json!({"role": "system", "content": "Be brief."});
    let two = [system.clone(), user("q"), says("2"), user("r"), says("3")];
    let e = chat.encode_training(&t, &two[..3], None, &none).unwrap_err().to_string();
    assert!(e.contains("the text before message 2") && e.contains("\"Be brief."), "{e}");
    assert_eq!(trained(&chat, &t, &two[1..], &none).len(), 2);
    // Nothing to train on.
    let e = chat.encode_training(&t, &[user("q")], None, &none).unwrap_err().to_string();
    assert!(e.contains("no message is the assistant's"), "{e}");
    let e = template("gemma2", "metaspace").encode_training(&t, &two, None, &none).unwrap_err();
    assert!(e.to_string().contains("System role not supported"), "{e}");
}

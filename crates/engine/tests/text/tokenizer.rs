//! Ids and text, streaming, saving, training.

use std::path::Path;

use ferrl_engine::Class;
use ferrl_engine::chat::{ChatTemplate, Kwargs, Turns};
use ferrl_engine::tokenizer::{Tokenizer, train_bpe, train_chars};
use serde_json::{Value, json};

use crate::{fixtures, ids, rows, tokenizer};

const TOKENIZERS: [&str; 4] = ["qwen", "llama3", "metaspace", "prepend"];

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
fn added_tokens_of_the_settings_alone_have_the_ids_they_are_listed_with() {
    // As in InternLM2: tokenizer.json knows the ids under the names of unused tokens.
    let folder = tempfile::tempdir().unwrap();
    let names: Vec<String> =
        ["a", "b", "[UNUSED_TOKEN_145]", "[UNUSED_TOKEN_146]", "c"].map(String::from).into();
    train_chars(["abc ".to_string()].into_iter(), &["<s>".to_string()]).unwrap().save(folder.path()).unwrap();
    let path = folder.path().join("tokenizer.json");
    let mut json: Value = serde_json::from_str(&std::fs::read_to_string(&path).unwrap()).unwrap();
    let vocab: serde_json::Map<String, Value> = [String::from("<s>")]
        .into_iter()
        .chain(names)
        .enumerate()
        .map(|(id, name)| (name, json!(id)))
        .collect();
    json["model"]["vocab"] = Value::Object(vocab);
    std::fs::write(&path, json.to_string()).unwrap();
    let token = |name: &str| json!({ "content": name, "special": true });
    let settings = json!({ "eos_token": "<|im_end|>", "added_tokens_decoder": {
        "0": token("<s>"), "3": token("<|im_end|>"), "4": token("<|im_start|>"), "6": token("<|new|>"),
    } });
    std::fs::write(folder.path().join("tokenizer_config.json"), settings.to_string()).unwrap();
    let t = Tokenizer::from_dir(folder.path()).unwrap();
    assert_eq!(
        [t.token_id("<|im_end|>"), t.token_id("<|im_start|>"), t.token_id("<|new|>")],
        [Some(3), Some(4), Some(6)]
    );
    assert_eq!((t.eos(), t.vocab_size()), (&[3][..], 7));
    assert!(t.is_special(3) && t.encode_markup("<|im_start|>ab<|im_end|>").unwrap() == [4, 1, 2, 3]);
    assert!(!t.encode_text("ab").unwrap().contains(&3));
    assert_eq!(t.decode(&[1, 3], false).unwrap(), "a<|im_end|>");
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
    let folder = tempfile::tempdir().unwrap();
    let e = Tokenizer::from_dir(folder.path()).unwrap_err().to_string();
    assert!(e.contains("no tokenizer.json") && e.contains("fix:"), "{e}");
    let whole = std::fs::read_to_string(fixtures().join("qwen/tokenizer.json")).unwrap();
    std::fs::write(folder.path().join("tokenizer.json"), &whole[..whole.len() / 2]).unwrap();
    let e = Tokenizer::from_dir(folder.path()).unwrap_err().to_string();
    assert!(e.contains("tokenizer.json: is not a usable tokenizer") && e.contains("again"), "{e}");
    std::fs::write(folder.path().join("tokenizer.json"), b"\xff\xfe\x00").unwrap();
    assert!(Tokenizer::from_dir(folder.path()).unwrap_err().to_string().contains("not UTF-8"));
    std::fs::write(folder.path().join("tokenizer.json"), &whole).unwrap();
    std::fs::write(folder.path().join("tokenizer_config.json"), "[1]").unwrap();
    let e = Tokenizer::from_dir(folder.path()).unwrap_err().to_string();
    assert!(e.contains("tokenizer_config.json: holds a list, expected a JSON object"), "{e}");
    std::fs::write(folder.path().join("tokenizer_config.json"), "{\"a\": ").unwrap();
    assert!(Tokenizer::from_dir(folder.path()).unwrap_err().to_string().contains("is not valid JSON"));
    assert!(ChatTemplate::from_dir(folder.path()).unwrap_err().to_string().contains("is not valid JSON"));
}

#[test]
fn saving_and_loading_changes_nothing() {
    for name in TOKENIZERS {
        let (t, folder) = (tokenizer(name), tempfile::tempdir().unwrap());
        t.save(&folder.path().join("deep/er")).unwrap();
        let again = Tokenizer::from_dir(&folder.path().join("deep/er")).unwrap();
        assert_eq!((again.bos(), again.pad(), again.eos()[0]), (t.bos(), t.pad(), t.eos()[0]));
        let rows = rows(&format!("{name}.strings.json"));
        offer(&t, name, &rows.iter().map(|row| row["text"].as_str().unwrap()).collect::<Vec<_>>());
        for row in rows {
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
    let folder = tempfile::tempdir().unwrap();
    t.save(folder.path()).unwrap();
    let again = Tokenizer::from_dir(folder.path()).unwrap();
    let twin = train_bpe(corpus(), 300, &specials).unwrap();
    for text in texts {
        let ids = t.encode_text(text).unwrap();
        assert_eq!(t.decode(&ids, true).unwrap(), text);
        assert_eq!(again.encode_text(text).unwrap(), ids);
        assert_eq!(twin.encode_text(text).unwrap(), ids);
    }
    assert!(t.encode_text("the").unwrap().len() < 3);
    let chat = ChatTemplate::from_dir(folder.path()).unwrap();
    let messages = [json!({"role": "user", "content": "hi"}), json!({"role": "assistant", "content": "yo"})];
    let text = chat.render(&messages, None, false, &Kwargs::new()).unwrap();
    assert_eq!(text, "<|im_start|>user\nhi<|im_end|>\n<|im_start|>assistant\nyo<|im_end|>\n");
    let (ids, mask) = chat.encode_training(&t, &messages, None, &Kwargs::new(), Turns::All).unwrap();
    let trained: Vec<u32> = ids.iter().zip(&mask).filter(|(_, m)| **m).map(|(i, _)| *i).collect();
    assert_eq!(t.decode(&trained, false).unwrap(), "yo<|im_end|>");
    offer(&t, "bpe", &texts);
}

#[test]
fn training_the_same_text_gives_the_same_file() {
    let [a, b] = [(); 2].map(|()| tempfile::tempdir().unwrap());
    for folder in [&a, &b] {
        train_bpe(corpus(), 290, &names(&["<s>"])).unwrap().save(folder.path()).unwrap();
    }
    let read = |f: &tempfile::TempDir| std::fs::read(f.path().join("tokenizer.json")).unwrap();
    assert_eq!(read(&a), read(&b));
    let e = train_bpe(corpus(), 100, &names(&["<s>"])).unwrap_err().to_string();
    assert!(e.contains("at least 257"), "{e}");
    assert!(train_bpe(corpus(), 300, &names(&["<s>", "<s>"])).unwrap_err().to_string().contains("twice"));
}

/// Was: the line breaks and roles of its own chat template were not in the vocabulary, and no conversation could be encoded.
#[test]
fn trained_characters_cover_the_chat_template() {
    let markers = names(&["<|im_start|>", "<|im_end|>"]);
    let t = train_chars(["12".to_string()].into_iter(), &markers).unwrap();
    let turns = "<|im_start|>user\n1<|im_end|>\n<|im_start|>assistant\n2<|im_end|>\n";
    assert_eq!(t.decode(&t.encode_markup(turns).unwrap(), false).unwrap(), turns);
    let plain = train_chars(["12".to_string()].into_iter(), &markers[..1]).unwrap();
    assert_eq!(plain.vocab_size(), 3);
}

#[test]
fn trained_characters_read_back_and_strangers_are_refused() {
    let t = train_chars(corpus(), &names(&["<|im_start|>", "<|im_end|>"])).unwrap();
    let texts = ["the cat", "1 + 1 = 2\n", "Grüße 你好 👍", "", " ", "<|im_start|>the<|im_end|>\n"];
    let folder = tempfile::tempdir().unwrap();
    t.save(folder.path()).unwrap();
    let again = Tokenizer::from_dir(folder.path()).unwrap();
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
    // The one that is named is the one that is missing, wherever it stands and however many bytes its neighbours have.
    for (text, stranger, byte) in [
        ("axa", 'x', 1),
        ("thexü", 'x', 3),
        ("xü", 'x', 0),
        ("aéa", 'é', 1),
        ("你éx", 'é', 3),
        ("<|im_start|>the x<|im_end|>\n", 'x', 16),
        ("<|im_start|>the<|im_end|>éx", 'é', 25),
    ] {
        let e = t.encode_markup(text).unwrap_err().to_string();
        assert!(e.contains(&format!("the character {stranger:?} is not")), "{text}: {e}");
        assert!(e.contains(&format!("byte {byte} of the text")), "{text}: {e}");
    }
    let lenient = train_chars(corpus(), &names(&["<unk>"])).unwrap();
    assert_eq!(lenient.encode_text("axa").unwrap()[1], lenient.token_id("<unk>").unwrap());
    offer(&t, "chars", &texts);
    offer(&lenient, "chars-unk", &["axa", "the", " the  cat "]);
}

//! `ferrl init` and `ferrl tokenizer`.

use crate::common::*;

#[test]
fn every_family_is_made_and_used() {
    let folder = Folder::new("init");
    for family in [
        "llama", "qwen2", "qwen3", "mistral", "gemma2", "gemma3", "phi3", "olmo2", "smollm3", "granite",
        "glm4", "gpt2",
    ] {
        for head in ["lm", "score", "value"] {
            let out = folder.path(&format!("{family}-{head}"));
            let sizes =
                ["--hidden", "32", "--layers", "2", "--heads", "2", "--kv-heads", "2", "--vocab", "50"];
            let said =
                ok(&[&["init", "--family", family, "--head", head, "--out", &out], &sizes[..]].concat());
            assert!(said.contains(family) && said.contains("vocabulary 50"), "{said}");
            let scored = rows(&ok_with(&["score", "--model", &out, "--input", "-"], "{\"ids\": [1, 2, 3]}"));
            assert_eq!(scored[0].get("logprobs").is_some(), head != "score");
            assert_eq!(scored[0].get("score").is_some(), head != "lm");
        }
    }
}

#[test]
fn the_seed_decides_the_weights() {
    let folder = Folder::new("init-seed");
    let weights = |name: &str, more: &[&str]| {
        let out = folder.path(name);
        ok(&[&["init", "--hidden", "64", "--layers", "1", "--vocab", "40", "--out", &out], more].concat());
        std::fs::read(folder.0.join(name).join("model.safetensors")).unwrap()
    };
    assert_eq!(weights("a", &["--seed", "1"]), weights("b", &["--seed", "1"]));
    assert_ne!(weights("c", &["--seed", "2"]), weights("d", &["--seed", "3"]));
    assert!(weights("e", &["--dtype", "bf16"]).len() < weights("f", &[]).len());
    let again = folder.path("a");
    fails(&["init", "--vocab", "40", "--out", &again], 2, &["/a:", "already exists", "fix: "]);
    ok(&["init", "--vocab", "40", "--out", &again, "--overwrite"]);
}

#[test]
fn tokenizers_encode_and_decode() {
    let folder = Folder::new("tokenizer");
    let text = folder.write("text.txt", "one two three\n".repeat(30));
    let (bpe, chars) = (folder.path("bpe"), folder.path("char"));
    let said = ok(&["tokenizer", "train", "--input", &text, "--vocab", "300", "--out", &bpe]);
    assert!(said.contains("tokens") && said.contains("3 of them special"), "{said}");
    ok(&[
        "tokenizer", "train", "--input", &text, "--kind", "char", "--special", "<eos>", "<unk>", "--out",
        &chars,
    ]);
    for model in [&bpe, &chars] {
        let ids = ok(&["tokenizer", "encode", "--model", model, "two one"]);
        assert_eq!(ok(&["tokenizer", "decode", "--model", model, ids.trim()]), "two one\n");
        assert_eq!(ok_with(&["tokenizer", "encode", "--model", model, "-"], "two one"), ids);
    }
    assert_eq!(ok(&["tokenizer", "encode", "--model", &bpe, "<|im_end|>"]), "2\n");
    assert_ne!(ok(&["tokenizer", "encode", "--model", &bpe, "--plain", "<|im_end|>"]), "2\n");
    assert!(ok(&["tokenizer", "encode", "--model", &chars, "--tokens", "tw"]).contains("\tw\n"));
    // Every kind of row, the same bytes each time.
    let rows = folder.write(
        "rows.jsonl",
        "\"one two\"\n{\"text\": \"three\"}\n{\"messages\": [{\"role\": \"user\", \"content\": \"four\"}]}\n\
         {\"prompt\": \"five\", \"completion\": \"six\"}\n",
    );
    let (a, b) = (folder.path("a"), folder.path("b"));
    ok(&["tokenizer", "train", "--input", &rows, &text, "--vocab", "290", "--no-special", "--out", &a]);
    ok(&["tokenizer", "train", "--input", &rows, &text, "--vocab", "290", "--no-special", "--out", &b]);
    assert_eq!(folder.read("a/tokenizer.json"), folder.read("b/tokenizer.json"));
}

//! Models that are broken or do not fit what is asked of them, and devices.

use crate::case::Case;
use std::process::Command;
use std::sync::OnceLock;

/// Files of a model directory.
type Files = Vec<(String, Vec<u8>)>;

/// A model of one layer with 20 tokens and 16 positions; its last file is a tokenizer of more tokens than that.
fn model(family: &'static str) -> &'static Files {
    static LLAMA: OnceLock<Files> = OnceLock::new();
    static GPT2: OnceLock<Files> = OnceLock::new();
    let made = if family == "gpt2" { &GPT2 } else { &LLAMA };
    made.get_or_init(|| {
        let folder = tempfile::tempdir().unwrap();
        let path = |name: &str| folder.path().join(name).to_str().unwrap().to_string();
        let make = |command: String| {
            let out = Command::new(env!("CARGO_BIN_EXE_ferrl"))
                .args(command.split_whitespace())
                .current_dir(folder.path())
                .output()
                .unwrap();
            assert!(out.status.success(), "{command}\n{}", String::from_utf8_lossy(&out.stderr));
        };
        std::fs::write(path("text.jsonl"), "{\"text\": \"abcdefghijklmnopqrstuvwxyz\"}\n").unwrap();
        make("tokenizer train --input text.jsonl --kind char --out tok".into());
        let sizes = "--vocab 20 --hidden 8 --layers 1 --heads 2 --ffn 8 --max-positions 16 --std 0.3";
        make(format!("init --family {family} {sizes} --out m"));
        let read = |from: &str, name: &str| (name.to_string(), std::fs::read(path(from)).unwrap());
        vec![
            read("m/config.json", "config.json"),
            read("m/model.safetensors", "model.safetensors"),
            read("tok/tokenizer.json", "tokenizer.json"),
        ]
    })
}

/// The same with one of its files changed.
fn changed(family: &'static str, file: &str, change: impl FnOnce(&mut Vec<u8>)) -> Files {
    let mut files = bare(family);
    change(&mut files.iter_mut().find(|(name, _)| name == file).unwrap().1);
    files
}

/// With a number in a tensor of f32.
fn with_number(family: &'static str, tensor: &str, at: usize, value: f32) -> Files {
    changed(family, "model.safetensors", |bytes| {
        let header = u64::from_le_bytes(bytes[..8].try_into().unwrap()) as usize;
        let fields: serde_json::Value = serde_json::from_slice(&bytes[8..8 + header]).unwrap();
        assert_eq!(fields[tensor]["dtype"], "F32");
        let from = fields[tensor]["data_offsets"][0].as_u64().unwrap() as usize;
        let from = 8 + header + from + 4 * at;
        bytes[from..from + 4].copy_from_slice(&value.to_le_bytes());
    })
}

/// With a field of `config.json`.
fn with_field(family: &'static str, field: &str, value: impl Into<serde_json::Value>) -> Files {
    changed(family, "config.json", |bytes| {
        let mut config: serde_json::Value = serde_json::from_slice(bytes).unwrap();
        config[field] = value.into();
        *bytes = config.to_string().into_bytes();
    })
}

/// A case whose model is in the folder `m`.
fn on(name: &'static str, command: &str, files: &Files) -> Case {
    files.iter().fold(Case::new(name, command), |case, (file, bytes)| {
        case.file(Box::leak(format!("m/{file}").into_boxed_str()), bytes)
    })
}

/// The files without the tokenizer.
fn bare(family: &'static str) -> Files {
    model(family).iter().filter(|(name, _)| name != "tokenizer.json").cloned().collect()
}

/// A row of `count` tokens with the same id.
fn row(id: u32, count: usize) -> String {
    format!("{{\"ids\": {:?}}}\n", vec![id; count])
}

const SCORE: &str = "score --model m --input rows.jsonl";
const GENERATE: &str = "generate --model m --input rows.jsonl --max-new-tokens 8";
const SFT: &str = "algo = \"sft\"\nmodel.path = \"{model}\"\ndata.train = [\"rows.jsonl\"]\ntrain = { batch = 1, steps = 1 }\n";
const SFT_ROW: &str = "{\"prompt\": \"2 + 2 = \", \"response\": \"4\"}\n";

pub fn cases() -> Vec<Case> {
    let weights = "m/model.safetensors";
    let down = "model.layers.0.mlp.down_proj.weight";
    let cut = |family, keep: fn(usize) -> usize| {
        changed(family, "model.safetensors", move |bytes| bytes.truncate(keep(bytes.len())))
    };
    let broken = vec![
        on("a NaN in a model's weights", SCORE, &with_number("llama", down, 11, f32::NAN))
            .says(&[weights, down, "[1, 3]"]),
        on("an infinity in a model that is sampled from", GENERATE, &{
            with_number("llama", "model.norm.weight", 7, f32::NEG_INFINITY)
        })
        .says(&[weights, "model.norm.weight", "[7]"]),
        on("a NaN in a matrix that is stored transposed", SCORE, &{
            with_number("gpt2", "transformer.h.0.mlp.c_fc.weight", 8 + 2, f32::NAN)
        })
        .says(&[weights, "transformer.h.0.mlp.c_fc.weight", "[1, 2]"]),
        on("weights that were cut short", SCORE, &cut("llama", |n| n - 1)).says(&[weights]),
        on("weights without their numbers", SCORE, &cut("llama", |_| 8)).says(&[weights]),
        on("an empty file of weights", SCORE, &cut("llama", |_| 0)).says(&[weights]),
        on("weights whose header lies about its length", SCORE, &{
            changed("llama", "model.safetensors", |bytes| bytes[..8].copy_from_slice(&[0xff; 8]))
        })
        .says(&[weights]),
        on("a vocabulary that is not that of the weights", SCORE, &with_field("llama", "vocab_size", 21))
            .says(&[weights, "model.embed_tokens.weight", "vocab_size"]),
        on("more positions than the weights have", SCORE, &with_field("gpt2", "n_positions", 17))
            .says(&[weights, "transformer.wpe.weight", "n_positions"]),
        // Was: ignored, so that every completion ran to the length limit.
        on(
            "an end token that is no id",
            "generate --model m --input rows.jsonl --max-new-tokens 2",
            &with_field("llama", "eos_token_id", "</s>"),
        )
        .says(&["config.json", "eos_token_id", "</s>"]),
        on("a model type nobody knows", SCORE, &with_field("llama", "model_type", "lama"))
            .says(&["config.json", "lama", "llama"]),
    ];
    let mut cases: Vec<Case> =
        broken.into_iter().map(|case| case.exit(4).file("rows.jsonl", row(1, 3))).collect();
    cases.extend([
        on("a tokenizer of more tokens than the model has", SCORE, model("llama"))
            .file("rows.jsonl", "{\"text\": \"abc\"}\n")
            .exit(4)
            .says(&["tokenizer", "vocab_size", "20"]),
        on("a token id that the model has not", SCORE, &bare("llama"))
            .file("rows.jsonl", row(1, 3) + &row(20, 2))
            .exit(3)
            .says(&["rows.jsonl:2", "20"]),
        on("more tokens than learned positions", SCORE, &bare("gpt2"))
            .file("rows.jsonl", row(1, 16) + &row(1, 17))
            .exit(3)
            .says(&["rows.jsonl:2", "17", "16"]),
        on("a prompt and a completion beyond learned positions", GENERATE, &bare("gpt2"))
            .file("rows.jsonl", row(1, 10))
            .exit(3)
            .says(&["rows.jsonl:1", "10", "8", "16"]),
        Case::new("more threads than a machine can have", "train r.toml threads=10000")
            .file("r.toml", SFT)
            .file("rows.jsonl", SFT_ROW)
            .says(&["threads", "10000"]),
        Case::new("as many threads as there are numbers", "train r.toml threads=9223372036854775807")
            .file("r.toml", SFT)
            .file("rows.jsonl", SFT_ROW)
            .says(&["threads", "9223372036854775807"]),
        Case::new("a kind of device nobody knows", "train r.toml device=gpu")
            .file("r.toml", SFT)
            .file("rows.jsonl", SFT_ROW)
            .says(&["device", "gpu", "fix: device = \"cuda\""]),
        Case::new("a chat with a model without a chat template", "chat --model {model}")
            .exit(4)
            .says(&["chat template", "ferrl generate"]),
        Case::new("an instruction set nobody knows", "train r.toml")
            .file("r.toml", SFT)
            .file("rows.jsonl", SFT_ROW)
            .env("FERRL_SIMD", "avx1024")
            .says(&["FERRL_SIMD", "avx1024"]),
    ]);
    cases
}

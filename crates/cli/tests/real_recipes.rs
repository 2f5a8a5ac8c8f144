//! The recipes for public models pass a dry run with their plan of memory, without the models: a config.json is enough.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use serde_json::{Value, json};
use std::path::{Path, PathBuf};
use std::process::Command;

fn llama_8b(vocab: usize) -> Value {
    let rope = json!({ "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192, "rope_type": "llama3" });
    json!({ "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 4096, "intermediate_size": 14336,
        "num_hidden_layers": 32, "num_attention_heads": 32, "num_key_value_heads": 8, "vocab_size": vocab,
        "max_position_embeddings": 131_072, "rope_theta": 500_000.0, "rope_scaling": rope, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "tie_word_embeddings": false })
}

/// What the public configurations say about sizes.
fn models() -> Vec<(&'static str, Value)> {
    let qwen = |kind: &str, class: &str, layers: usize, ffn: usize, kv: usize| {
        json!({ "architectures": [class], "model_type": kind, "hidden_size": 2048, "intermediate_size": ffn,
            "num_hidden_layers": layers, "num_attention_heads": 16, "num_key_value_heads": kv, "head_dim": 128,
            "vocab_size": 151_936, "max_position_embeddings": 32_768, "rope_theta": 1_000_000.0, "rms_norm_eps": 1e-6,
            "hidden_act": "silu", "tie_word_embeddings": true })
    };
    let rho = json!({ "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 2048,
        "intermediate_size": 5632, "num_hidden_layers": 22, "num_attention_heads": 32, "num_key_value_heads": 4,
        "vocab_size": 32_000, "max_position_embeddings": 2048, "rope_theta": 10_000.0, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "tie_word_embeddings": false });
    let smol = json!({ "architectures": ["LlamaForCausalLM"], "model_type": "llama", "hidden_size": 576,
        "intermediate_size": 1536, "num_hidden_layers": 30, "num_attention_heads": 9, "num_key_value_heads": 3,
        "vocab_size": 49_152, "max_position_embeddings": 8192, "rope_theta": 100_000.0, "rms_norm_eps": 1e-5,
        "hidden_act": "silu", "tie_word_embeddings": true });
    vec![
        ("HuggingFaceTB/SmolLM2-135M-Instruct", smol),
        ("Qwen/Qwen2.5-3B-Instruct", qwen("qwen2", "Qwen2ForCausalLM", 36, 11_008, 2)),
        ("Qwen/Qwen3-1.7B-Base", qwen("qwen3", "Qwen3ForCausalLM", 28, 6144, 8)),
        ("meta-llama/Llama-3.1-8B-Instruct", llama_8b(128_256)),
        ("allenai/Llama-3.1-Tulu-3-8B-SFT", llama_8b(128_264)),
        ("realtreetune/rho-1b-sft-GSM8K", rho),
    ]
}

/// Millions of weights that the models have; a reward model has no output embedding.
const WEIGHTS: &[(&str, &str)] = &[
    ("countdown_3b", "3085.94"),
    ("gem_letter_counting", "1720.57"),
    ("gsm8k_ppo", "1100.05"),
    ("research", "3085.94"),
    ("skywork_rm", "7504.93"),
    ("smollm2_gsm8k", "134.52"),
    ("ultrafeedback_dpo", "8030.33"),
];

/// A Hugging Face cache with those files and nothing else.
fn cache(root: &Path) {
    for (name, config) in models() {
        let folder = root.join("hub").join(format!("models--{}", name.replace('/', "--")));
        let snapshot = folder.join("snapshots/0");
        std::fs::create_dir_all(&snapshot).unwrap();
        std::fs::create_dir_all(folder.join("refs")).unwrap();
        std::fs::write(folder.join("refs/main"), "0").unwrap();
        std::fs::write(snapshot.join("config.json"), config.to_string()).unwrap();
    }
}

#[test]
fn recipes_for_public_models_resolve_and_are_planned() {
    let recipes = Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().join("recipes/real");
    let home = std::env::temp_dir().join(format!("ferrl-real-{}", std::process::id()));
    cache(&home);
    let mut all: Vec<PathBuf> = std::fs::read_dir(recipes).unwrap().map(|e| e.unwrap().path()).collect();
    all.sort();
    assert!(all.len() >= 5);
    for recipe in all {
        let out = Command::new(env!("CARGO_BIN_EXE_ferrl"))
            .args(["plan", "--memory", "1000GiB"])
            .arg(&recipe)
            .env("HF_HOME", &home)
            .env_remove("HF_HUB_CACHE")
            .output()
            .unwrap();
        let (printed, said) = (String::from_utf8_lossy(&out.stdout), String::from_utf8_lossy(&out.stderr));
        assert!(out.status.success(), "{}: {said}", recipe.display());
        let name = recipe.file_stem().unwrap().to_string_lossy().into_owned();
        let weights = WEIGHTS.iter().find(|w| w.0 == name).map(|w| w.1);
        let weights = weights.unwrap_or_else(|| panic!("{name}: how many weights has its model?"));
        assert!(printed.contains(&format!(": {weights} M weights")), "{name}\n{printed}");
        assert!(printed.contains("  memory "), "{name}: no plan of memory\n{printed}");
    }
    std::fs::remove_dir_all(&home).unwrap();
}

//! Stop tokens: a chat template whose turns end in another token than the tokenizer's eos.

use crate::help::{metrics, run, stage, write};
use ferrl::algo::Feed;
use ferrl::evaluate::evaluate;
use ferrl::reward::Rewards;
use ferrl::rollout::Actor;
use ferrl::setup;
use ferrl_engine::checkpoint::{InitOptions, SaveOptions, StorageFormat, init_model};
use ferrl_engine::generate::{CacheOptions, Sampler};
use ferrl_engine::model::FAMILIES;
use ferrl_engine::tokenizer::train_chars;
use serde_json::{Value, json};
use std::path::Path;

const TEMPLATE: &str = "{% for m in messages %}<|im_start|>{{ m.role[0] }} {{ m.content }}<|im_end|>\n{% endfor %}\
                        {% if add_generation_prompt %}<|im_start|>a {% endif %}";

/// A random model whose eos is `<|endoftext|>` and whose turns end in `<|im_end|>`, as in Qwen's base models.
fn chat_model(dir: &Path) -> String {
    let text: String = (' '..='~').chain(['\n']).collect();
    let specials = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"].map(String::from);
    let tokenizer = train_chars([text].into_iter(), &specials).unwrap();
    let path = dir.join("model");
    let mut options = InitOptions::new(FAMILIES[0].name());
    (options.vocab, options.hidden, options.layers) = (tokenizer.vocab_size(), 32, 2);
    (options.heads, options.kv_heads, options.ffn) = (Some(2), Some(1), Some(48));
    (options.max_positions, options.seed, options.tied) = (64, 3, Some(true));
    options.eos = tokenizer.token_id("<|endoftext|>");
    init_model(&path, &options, &SaveOptions { dtype: StorageFormat::F32, ..Default::default() }).unwrap();
    tokenizer.save(&path).unwrap();
    for file in ["tokenizer_config.json", "special_tokens_map.json"] {
        let mut config: Value =
            serde_json::from_str(&std::fs::read_to_string(path.join(file)).unwrap()).unwrap();
        config["eos_token"] = json!("<|endoftext|>");
        std::fs::write(path.join(file), config.to_string()).unwrap();
    }
    std::fs::write(path.join("chat_template.jinja"), TEMPLATE).unwrap();
    path.to_string_lossy().into()
}

fn rows() -> String {
    let row = |i: usize| {
        let (ask, say) = ([("up", "down"), ("left", "right"), ("yes", "no")])[i % 3];
        let turn = |role: &str, content: &str| json!({ "role": role, "content": content });
        let prompt = [turn("user", ask)];
        json!({ "messages": [turn("user", ask), turn("assistant", say)], "prompt": prompt, "answer": say })
    };
    (0..12).map(|i| format!("{}\n", row(i))).collect()
}

/// Was: rollouts and evaluation stopped at the tokenizer's eos alone, so that every completion after such an SFT stage was
/// truncated and got reward 0.
#[test]
fn rollouts_and_evaluation_stop_at_the_end_of_the_turn() {
    let dir = tempfile::tempdir().unwrap();
    let (model, data) = (chat_model(dir.path()), write(dir.path(), "rows.jsonl", &rows()));
    let recipe = format!(
        "model.path = {model:?}\ndata = {{ train = {data:?}, max_length = 32 }}\ntrain.micro_batch_tokens = 512\n\
         rollout = {{ prompts = 6, samples = 4, max_new_tokens = 16, cache_mib = 8 }}\n\
         eval = {{ data = {data:?}, every = 1, prompts = 6, temperature = 0.0 }}\n\
         [[stage]]\nalgo = \"sft\"\noptim.lr = 1e-2\ntrain = {{ steps = 60, batch = 12 }}\neval.every = 100\n\
         [[stage]]\nalgo = \"dr_grpo\"\ntrain.steps = 2\n[[stage.reward]]\nverifier = \"exact\"\n"
    );
    run(dir.path(), &recipe, false, u64::MAX).unwrap();
    let last = metrics(dir.path()).pop().unwrap();
    let get = |name: &str| last.get(name).unwrap_or_else(|| panic!("{name}: {last:?}"));
    assert!(get("completions/clipped_ratio") < 0.2, "{last:?}");
    assert!(get("reward") > 0.5, "{last:?}");
    assert_eq!((get("eval/pass@1"), get("eval/clipped_ratio")), (1.0, 0.0));
    // The model that the run leaves stops in the same way when it is evaluated by itself.
    let left = dir.path().join("test/stages/1").to_string_lossy().into_owned();
    let stage =
        stage(&left, &format!("algo = \"sft\"\ndata.train = {data:?}\ntrain.micro_batch_tokens = 4096"))
            .unwrap();
    let mut source = setup::source(
        &stage.recipe,
        Path::new(&left),
        &stage.tokenizer,
        Feed::Rollouts,
        false,
        &stage.warnings,
    )
    .unwrap();
    let exact: ferrl::recipe::RewardSettings =
        serde_json::from_value(json!({ "verifier": "exact" })).unwrap();
    let cache = CacheOptions { bytes: 8 << 20, ..Default::default() };
    let mut sampler = Sampler::new(&stage.policy.model, cache).unwrap();
    let (policy, tokenizer, stops) = (&stage.policy.model, &*stage.tokenizer, &stage.stops);
    let (environments, ranks) = (&stage.environments, &stage.ranks);
    let mut actor = Actor { generator: &mut sampler, policy, tokenizer, stops, environments, ranks };
    let settings = ferrl::recipe::Rollout { temperature: 0.0, max_new_tokens: 16, ..Default::default() };
    let rewards = Rewards::new(&[exact]).unwrap();
    let all = evaluate(&mut actor, &mut source, &rewards, &settings, (6, 1, 0), Default::default()).unwrap();
    assert_eq!(all.metrics.get("eval/pass@1"), Some(1.0));
}

/// What a demonstration teaches includes the token that rollouts stop at.
#[test]
fn the_end_of_the_turn_is_trained() {
    let dir = tempfile::tempdir().unwrap();
    let (model, data) = (chat_model(dir.path()), write(dir.path(), "rows.jsonl", &rows()));
    let mut stage =
        stage(&model, &format!("algo = \"sft\"\ndata.train = {data:?}\ntrain.micro_batch_tokens = 4096"))
            .unwrap();
    let end = stage.tokenizer.token_id("<|im_end|>").unwrap();
    let eos = stage.tokenizer.token_id("<|endoftext|>").unwrap();
    assert_eq!(stage.stops.ids(), [eos, end]);
    for item in stage.source.next(12).unwrap() {
        let ferrl::source::Item::Sequences(sequences) = item else { panic!("a demonstration") };
        let s = &sequences[0];
        assert_eq!((s.ids.last(), s.trained.last()), (Some(&end), Some(&true)));
    }
}

/// A stop string is cut from what rewards see, unless the recipe keeps it.
#[test]
fn rewards_see_the_text_before_the_stop_string() {
    let dir = tempfile::tempdir().unwrap();
    let (model, data) = (chat_model(dir.path()), write(dir.path(), "rows.jsonl", &rows()));
    for (include, want) in [(false, false), (true, true)] {
        let recipe = format!(
            "algo = \"dr_grpo\"\ndata = {{ train = {data:?}, max_length = 32 }}\ntrain.micro_batch_tokens = 512\n\
             rollout = {{ prompts = 6, samples = 8, max_new_tokens = 16, cache_mib = 8, stop = [\"e\"], include_stop = {include} }}\n\
             reward = {{ verifier = \"regex\", options = {{ pattern = \"e\", whole = false }} }}"
        );
        let mut stage = stage(&model, &recipe).unwrap();
        let report = stage.step().unwrap();
        let ended: Vec<_> = report.rollouts.iter().filter(|r| !r.completion.truncated).collect();
        assert!(report.rollouts.iter().any(|r| r.completion.text.ends_with('e')) == want);
        assert!(ended.len() > 4 && report.rollouts.iter().all(|r| want || !r.completion.text.contains('e')));
    }
}

//! A reward model as a reward: in process, from a directory or from an earlier stage.

use crate::help::{backend, fails, metrics, model, run, write};
use ferrl::recipe::Recipe;
use ferrl::reward::RewardModel;
use ferrl::verify::Sample;
use ferrl_engine::checkpoint::ModelDir;
use ferrl_engine::model::{Model, Options};
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::train::{Batch, stats};
use ferrl_kernels::DType;
use std::path::Path;

const PAIRS: &str = r#"
{"prompt": "say a: ", "chosen": "a", "rejected": "bbb"}
{"prompt": "say aa: ", "chosen": "aa", "rejected": "c"}
{"prompt": "say x: ", "chosen": "a", "rejected": "xyz"}
{"prompt": "say y: ", "chosen": "aaa", "rejected": "y"}
"#;

/// A judge is trained, then serves as reward and as the critic's start.
fn pipeline(dir: &Path) -> String {
    let pairs = write(dir, "pairs.jsonl", PAIRS);
    let prompts = write(dir, "prompts.jsonl", "{\"prompt\": \"say a: \"}\n{\"prompt\": \"say y: \"}\n");
    let model = model(dir);
    format!(
        "model.path = {model:?}\ndata.max_length = 32\ntrain.micro_batch_tokens = 128\noptim.lr = 1e-3\n\
         [[stage]]\nname = \"judge\"\nalgo = \"rm\"\ndata.train = {pairs:?}\ntrain = {{ steps = 6, batch = 4 }}\n\
         [[stage]]\nname = \"tune\"\nalgo = \"ppo\"\nmodel.path = {model:?}\ncritic.path = \"stage:judge\"\n\
         data.train = {prompts:?}\nreward = [{{ model = \"stage:judge\", weight = 2.0 }}]\n\
         train.steps = 2\nrollout = {{ prompts = 2, samples = 2, max_new_tokens = 5 }}\n"
    )
}

#[test]
fn a_stage_rewards_the_next_and_scores_are_those_of_the_engine() {
    let dir = tempfile::tempdir().unwrap();
    let text = pipeline(dir.path());
    let runs = dir.path().join("runs");
    run(&runs, &text, false, 100).unwrap();
    let tuned: Vec<_> = metrics(&runs).into_iter().filter(|r| r.stage == "tune").collect();
    for record in &tuned {
        let (reward, part) = (record.get("reward").unwrap(), record.get("rewards/model/mean").unwrap());
        assert!(part != 0.0 && part.is_finite());
        // The weight counts in the reward, parts are shown before it.
        assert!((reward - 2.0 * part).abs() < 1e-5, "{reward} and {part}");
    }
    assert_eq!(tuned.len(), 2);

    let judge = runs.join("test/stages/0");
    let recipe = Recipe::parse(&text, "r.toml", "r", &[]).unwrap().stages[1].recipe.clone();
    let scorer = RewardModel::open(&judge, &recipe, DType::F32, &backend(), false).unwrap();
    let completion =
        |completion, truncated| Sample { prompt: "say a: ", completion, truncated, ..Default::default() };
    let completions = [
        completion("a", false),
        completion("bbbbbbbbbb", false),
        completion("a", true),
        completion("", false),
    ];
    let scores = scorer.values(&completions).unwrap();
    // The same by hand: prompt, answer, end, and the value at the last token.
    let tokenizer = Tokenizer::from_dir(&judge).unwrap();
    let engine = Model::load(backend(), &ModelDir::open(&judge).unwrap(), Options::default()).unwrap();
    for (answer, score) in completions.iter().zip(&scores) {
        let mut ids = tokenizer.encode_prompt("say a: ").unwrap();
        ids.extend(tokenizer.encode_text(answer.completion).unwrap());
        ids.extend(tokenizer.eos().first().filter(|_| !answer.truncated));
        let value = stats(&engine, &Batch::of([ids]), 1.0).unwrap().value;
        assert_eq!(f64::from(*value.last().unwrap()), *score, "{answer:?}");
    }
    assert!(scores[0] > scores[1], "{scores:?}");
}

#[test]
fn models_that_cannot_judge_are_refused() {
    let dir = tempfile::tempdir().unwrap();
    let text = pipeline(dir.path());
    let error = |text: &str| run(&dir.path().join("runs"), text, false, 1).err().unwrap().to_string();
    let wrong = error(&text.replace("model = \"stage:judge\"", "model = \"stage:juge\""));
    assert!(wrong.contains("no stage \"juge\"") && wrong.contains("\"stage:judge\""), "{wrong}");
    let wrong = error(&text.replace("critic.path = \"stage:judge\"", "critic.path = \"stage:tune\""));
    assert!(wrong.contains("critic.path: no stage \"tune\" comes before"), "{wrong}");
    let model = dir.path().join("model").to_string_lossy().into_owned();
    let prompts = dir.path().join("prompts.jsonl");
    let recipe = format!(
        "algo = \"grpo\"\ndata.train = {prompts:?}\ndata.max_length = 32\ntrain.steps = 1\nreward = [{{ model = {model:?} }}]\n"
    );
    let wrong = fails(&model, &recipe);
    assert!(wrong.contains("a language model has no score head"), "{wrong}");
}

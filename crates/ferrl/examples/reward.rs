//! Your own rows and your own reward: `cargo run --release --example reward -- MODEL OUT`

use ferrl::api::{Config, Result, Sample, Trainer};
use serde_json::{Value, json};

pub(crate) fn train(model: &str, out: &str) -> Result<Vec<f64>> {
    let rows = (0..8).map(|n| json!({ "prompt": format!("{n} + {n} = "), "sum": (2 * n).to_string() }));
    let right = |s: &Sample<'_>| {
        let sum = s.column("sum").and_then(Value::as_str);
        f64::from(sum.is_some_and(|sum| s.completion.contains(sum)))
    };
    let config =
        Config { lr: 1e-3, batch_size: 8, group_size: 8, max_new_tokens: 4, ..Config::new("grpo", model) };
    let mut trainer = Trainer::with_reward(config, rows, right)?;
    let steps = trainer.train(20)?;
    trainer.save(out)?;
    Ok(steps.iter().filter_map(|step| step.get("reward")).collect())
}

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [model, out] = words.as_slice() else { panic!("usage: reward MODEL OUT") };
    println!("mean reward of each step: {:.2?}; the model is in {out}", train(model, out)?);
    Ok(())
}

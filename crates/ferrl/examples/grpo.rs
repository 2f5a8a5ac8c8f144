//! Group relative policy optimisation on completions that are already scored:
//! `cargo run --release --example grpo -- MODEL OUT`

use ferrl::api::{Config, Result, Trainer};
use serde_json::json;

pub(crate) fn train(model: &str, out: &str) -> Result<f64> {
    // Sums with one right and two wrong completions each.
    let rows = (0..4).map(|n| {
        let completions = [2 * n, 2 * n + 1, 7].map(|sum| sum.to_string());
        let rewards = completions.clone().map(|c| f64::from(c == (2 * n).to_string()));
        json!({ "prompt": format!("{n} + {n} = "), "completions": completions, "rewards": rewards })
    });
    let config =
        Config { beta: Some(0.01), lr: 1e-3, batch_size: 4, max_length: 64, ..Config::new("grpo", model) };
    let mut trainer = Trainer::new(config, rows)?;
    let steps = trainer.train(20)?;
    trainer.save(out)?;
    Ok(steps[steps.len() - 1].get("entropy").unwrap_or(0.0))
}

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [model, out] = words.as_slice() else { panic!("usage: grpo MODEL OUT") };
    println!("entropy at the end: {:.3}; the model is in {out}", train(model, out)?);
    Ok(())
}

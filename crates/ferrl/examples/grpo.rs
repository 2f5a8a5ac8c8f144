//! Group relative policy optimisation on answers that are already graded:
//! `cargo run --release --example grpo -- MODEL OUT`

use ferrl::api::{Agent, Config, Dataset, Result, Trainer};
use serde_json::{Value, json};

/// Sums with one right and two wrong answers; a row may also have named rewards.
struct Sums;

impl Dataset for Sums {
    fn len(&self) -> usize {
        4
    }
    fn row(&self, index: usize) -> Value {
        let (sum, completions) = (2 * index, [2 * index, 2 * index + 1, 7].map(|n| n.to_string()));
        let rewards = completions.clone().map(|c| f64::from(c == sum.to_string()));
        json!({ "prompt": format!("{index} + {index} = "), "completions": completions, "rewards": rewards })
    }
}

pub(crate) fn train(model: &str, out: &str) -> Result<f64> {
    let config = Config { beta: Some(0.01), lr: 1e-3, batch_size: 4, max_length: 64, ..Default::default() };
    let agent = Agent::new("grpo", &config, model, None)?;
    let mut trainer = Trainer::new(agent, Sums, config)?;
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

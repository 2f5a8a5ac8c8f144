//! Direct preference optimisation on your own data: `cargo run --release --example dpo -- MODEL OUT`

use ferrl::api::{Agent, Config, Dataset, Result, Trainer};
use serde_json::{Value, json};

/// Three ways to greet, each better and worse.
struct Greetings;

impl Dataset for Greetings {
    fn len(&self) -> usize {
        3
    }
    fn row(&self, index: usize) -> Value {
        let name = ["Ada", "Grace", "Alan"][index];
        json!({ "prompt": format!("Greet {name}: "), "chosen": format!("Hello {name}!"), "rejected": "What?" })
    }
}

pub(crate) fn train(model: &str, out: &str) -> Result<(f64, f64)> {
    let config = Config { beta: Some(0.1), lr: 1e-3, batch_size: 3, max_length: 64, ..Default::default() };
    let agent = Agent::new("dpo", &config, model, None)?;
    let mut trainer = Trainer::new(agent, Greetings, config)?;
    let steps = trainer.train(20)?;
    trainer.save(out)?;
    let margin = |step: usize| steps[step].get("rewards/margins").unwrap_or(0.0);
    Ok((margin(0), margin(steps.len() - 1)))
}

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [model, out] = words.as_slice() else { panic!("usage: dpo MODEL OUT") };
    let (before, after) = train(model, out)?;
    println!("margin of the better answer: {before:.3} before, {after:.3} after; the model is in {out}");
    Ok(())
}

//! Direct preference optimisation on your own rows: `cargo run --release --example dpo -- MODEL OUT`

use ferrl::api::{Config, Result, Trainer};
use serde_json::json;

pub(crate) fn train(model: &str, out: &str) -> Result<(f64, f64)> {
    let rows = ["Ada", "Grace", "Alan"].map(|name| {
        json!({ "prompt": format!("Greet {name}: "), "chosen": format!("Hello {name}!"), "rejected": "What?" })
    });
    let config =
        Config { beta: Some(0.1), lr: 1e-3, batch_size: 3, max_length: 64, ..Config::new("dpo", model) };
    let mut trainer = Trainer::new(config, rows)?;
    let steps = trainer.train(20)?;
    trainer.save(out)?;
    let margin = |step: usize| steps[step].get("rewards/margins").unwrap_or(0.0);
    Ok((margin(0), margin(steps.len() - 1)))
}

fn main() -> Result<()> {
    let words: Vec<String> = std::env::args().skip(1).collect();
    let [model, out] = words.as_slice() else { panic!("usage: dpo MODEL OUT") };
    let (before, after) = train(model, out)?;
    println!("margin of the chosen response: {before:.3} before, {after:.3} after; the model is in {out}");
    Ok(())
}

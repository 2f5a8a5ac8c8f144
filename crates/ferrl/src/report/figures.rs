//! The tiles at the top of a report: steps, time, and what the run is judged by.

use crate::run::StepRecord;

/// Evaluations that get a tile, most important first.
const EVALUATIONS: [&str; 5] = ["eval/pass@1", "eval/greedy", "eval/accuracy", "eval/margin", "eval/loss"];

/// Label, value and a note of each tile.
pub(super) fn figures(history: &[StepRecord]) -> Vec<[String; 3]> {
    let Some(last) = history.last() else {
        return vec![["Steps".into(), "0".into(), "nothing has been measured yet".into()]];
    };
    let mut stages: Vec<&str> = history.iter().map(|r| r.stage.as_str()).collect();
    stages.dedup();
    // Generated tasks have no end, and so no epochs.
    let epochs = if last.epoch > 0.0 { format!("{:.2} epochs", last.epoch) } else { String::new() };
    let mut out = vec![
        ["Steps".into(), last.step.to_string(), stages.join(" → ")],
        ["Time".into(), duration(last.seconds), epochs],
    ];
    let evaluated = |name: &&str| history.iter().any(|r| r.get(name).is_some());
    let evals = EVALUATIONS.iter().copied().filter(evaluated).take(3);
    // A policy loss says little about progress; the reward does.
    let main = if history.iter().any(|r| r.get("reward").is_some()) { "reward" } else { "loss" };
    out.extend([main].into_iter().chain(evals).filter_map(|name| tile(history, name, name == main)));
    out
}

fn tile(history: &[StepRecord], name: &str, noisy: bool) -> Option<[String; 3]> {
    let point = |r: &StepRecord| Some((r.step, r.get(name)?)).filter(|v| v.1.is_finite());
    let values: Vec<(u64, f64)> = history.iter().filter_map(point).collect();
    let mean = |part: &[(u64, f64)]| part.iter().map(|v| v.1).sum::<f64>() / part.len() as f64;
    // Single steps are noisy, a tenth of the run is not. Evaluations are few and count as they are.
    let n = if noisy { (values.len() / 10).max(1) } else { 1 };
    let (from, to) = (mean(values.get(..n)?), mean(&values[values.len() - n..]));
    let low = name.ends_with("loss");
    let best = values.iter().copied().reduce(|a, b| if (b.1 < a.1) == low && b.1 != a.1 { b } else { a });
    let note = match best {
        Some((step, v)) if !noisy => format!("best {} at step {step}", short(v)),
        _ => "mean of the first and of the last tenth".into(),
    };
    let value = if values.len() == 1 { short(to) } else { format!("{} → {}", short(from), short(to)) };
    Some([name.into(), value, note])
}

fn short(x: f64) -> String {
    let size = x.abs();
    match size {
        _ if size != 0.0 && !(1e-3..1e5).contains(&size) => format!("{x:.2e}"),
        _ if size >= 100.0 => format!("{x:.0}"),
        _ => format!("{x:.3}"),
    }
}

fn duration(seconds: f64) -> String {
    let s = seconds.max(0.0) as u64;
    match s {
        0..60 => format!("{seconds:.1} s"),
        60..3600 => format!("{} min {} s", s / 60, s % 60),
        _ => format!("{} h {} min", s / 3600, s % 3600 / 60),
    }
}

//! Every algorithm of the registry: gradients against finite differences, and invariance to how an update is cut.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::algo::metrics::TRUST;
use ferrl::algo::{ALGORITHMS, Algorithm, Feed, find};
use ferrl::experience::{ByRole, Evidence, Experience, Metrics, MicroBatch, Role, Sequence, UpdateCounts};
use ferrl_engine::train::Stats;
use serde_json::{Value, json};
use std::collections::BTreeSet;

/// A number in (-1, 1) that depends on its arguments alone.
fn noise(a: usize, b: usize) -> f32 {
    let x = (a as u64 * 0x9E37_79B9 + b as u64 * 0x85EB_CA6B + 12345).wrapping_mul(0x2545_F491_4F6C_DD1D);
    ((x >> 40) as f32 / (1 << 23) as f32) - 1.0
}

/// Sequences fit for the algorithm, with every column filled.
fn experience(feed: Feed) -> Experience {
    let mut sequences = Vec::new();
    for k in 0..8usize {
        let n = 4 + k % 3 + 2 * (k % 2);
        let column = |tag: usize, scale: f32, shift: f32| -> Vec<f32> {
            (0..n).map(|i| noise(k * 100 + tag, i) * scale + shift).collect()
        };
        let trained: Vec<bool> = (0..n).map(|i| i >= 2 && (k != 3 || i != 3)).collect();
        let tokens = trained.iter().filter(|&&t| t).count();
        let logp = column(1, 0.5, -1.5);
        let mut reward = vec![0.0; n];
        reward[n - 2] = noise(k, 77);
        sequences.push(Sequence {
            ids: vec![1; n],
            trained,
            trajectory: k,
            group: k / 4,
            pair: feed.paired().then_some(k / 2),
            kind: match feed {
                _ if feed.paired() && k % 2 == 0 => Evidence::Chosen,
                _ if feed.paired() => Evidence::Rejected,
                Feed::Labelled => Evidence::Labelled(k % 3 != 0),
                Feed::Targets => Evidence::Target(k as f32 / 8.0),
                _ => Evidence::Plain,
            },
            weight: 1.0,
            margin: 0.2 * k as f32,
            trajectory_tokens: tokens,
            reward,
            components: vec![("part".into(), noise(k, 79))],
            sources: vec![(1.0, Some(noise(k, 77))), (0.5, Some(noise(k, 78)))],
            old_logp: logp.clone(),
            sampled_logp: logp,
            ref_logp: column(2, 0.5, -1.4),
            old_value: column(3, 0.5, 0.0),
            credit: column(4, 0.5, 0.0),
            ..Default::default()
        });
    }
    Experience { sequences }
}

/// What an algorithm learns from after its `prepare`, probes annotated as the trainer would.
fn prepared(algorithm: &mut dyn Algorithm, feed: Feed) -> Experience {
    prepared_with_metrics(algorithm, feed).0
}

fn prepared_with_metrics(algorithm: &mut dyn Algorithm, feed: Feed) -> (Experience, Metrics) {
    let mut e = experience(feed);
    if algorithm.needs().mismatched {
        e.add_mismatched();
    }
    for (k, s) in e.sequences.iter_mut().enumerate().filter(|(_, s)| s.kind == Evidence::Probe) {
        s.old_logp = (0..s.ids.len()).map(|i| noise(k * 100 + 9, i) * 0.5 - 1.3).collect();
        s.ref_logp = (0..s.ids.len()).map(|i| noise(k * 100 + 10, i) * 0.5 - 1.5).collect();
    }
    let metrics = algorithm.prepare(&mut e).unwrap().metrics;
    assert!(e.sequences.iter().all(|s| s.kind != Evidence::Probe), "probes are not trained on");
    (e, metrics)
}

/// Statistics near the old ones but away from every kink.
fn stats(e: &Experience, score: bool) -> ByRole<Stats> {
    let mut policy = Stats::default();
    let mut critic = Stats::default();
    for (k, s) in e.sequences.iter().enumerate() {
        for i in 0..s.ids.len() {
            let mut step = 0.35 * noise(k * 31 + 5, i);
            while [0.8f32, 1.2, 1.28, 1.3].iter().any(|kink| (step.exp() - kink).abs() < 0.01) {
                step += 0.02;
            }
            policy.logp.push(s.old_logp[i] + step);
            policy.entropy.push(1.0 + 0.3 * noise(k * 31 + 6, i));
            policy.kl.push(0.5 + 0.4 * noise(k * 31 + 9, i));
            critic.value.push(s.old_value[i] + 0.9 * noise(k * 31 + 7, i));
            if score {
                policy.value.push(noise(k * 31 + 8, i));
            }
        }
    }
    let mut all = ByRole::default();
    all.set(Role::Policy, policy);
    all.set(Role::Critic, critic);
    all
}

fn whole(e: &Experience) -> MicroBatch<'_> {
    MicroBatch { sequences: e.sequences.iter().collect(), counts: UpdateCounts::of(&e.sequences) }
}

type Column = fn(&mut Stats) -> &mut Vec<f32>;
const COLUMNS: [(&str, Column); 4] = [
    ("logp", |s| &mut s.logp),
    ("entropy", |s| &mut s.entropy),
    ("value", |s| &mut s.value),
    ("kl", |s| &mut s.kl),
];

fn check_gradients(name: &str, algorithm: &dyn Algorithm, e: &Experience) {
    let base = stats(e, algorithm.needs().score);
    let loss = algorithm.loss(&whole(e), &base);
    let mut moved = 0;
    for role in [Role::Policy, Role::Critic] {
        let grads = loss.grads.get(role).cloned().unwrap_or_default();
        for (column, of) in COLUMNS {
            let mut grads = grads.clone();
            let rows = of(&mut base.get(role).unwrap().clone()).len();
            for row in 0..rows {
                let at = |step: f32| {
                    let mut shifted = base.clone();
                    let mut own = base.get(role).unwrap().clone();
                    of(&mut own)[row] += step;
                    shifted.set(role, own);
                    algorithm.loss(&whole(e), &shifted).value
                };
                let h = 1e-3;
                let numeric = (at(h) - at(-h)) / (2.0 * h as f64);
                let analytic = of(&mut grads).get(row).copied().unwrap_or(0.0) as f64;
                let close = (numeric - analytic).abs() < 1e-3 * (0.01 + numeric.abs());
                assert!(close, "{name} {role:?} {column}[{row}]: {analytic} against {numeric}");
                moved += usize::from(analytic != 0.0);
            }
        }
    }
    assert!(moved > 5, "{name}: the loss depends on something");
}

/// Settings that switch on what the defaults leave out.
fn variants(name: &str) -> Vec<Value> {
    let mut all = vec![json!({})];
    match name {
        "sft" => all.extend(["sequence", "constant"].map(|a| json!({ "aggregate": a }))),
        "mle" => {
            all.extend(["sequence", "constant"].map(|a| json!({ "aggregate": a })));
            all.push(json!({ "baseline": "group", "divide_by_std": true, "clip_negative": false }));
        }
        "rest_em" => {
            let easy = |more: Value| {
                let mut all = json!({ "threshold": -0.5 });
                all.as_object_mut().unwrap().extend(more.as_object().unwrap().clone());
                all
            };
            all = vec![easy(json!({})), easy(json!({ "aggregate": "token", "per_prompt": 2 }))];
        }
        "rm" => all.push(json!({ "centre": 0.1 })),
        "dpo" | "dpo_positive" | "step_dpo" => {
            all.push(json!({ "beta": 0.5, "label_smoothing": 0.1 }));
            all.push(json!({ "sft_coef": 0.7, "positive": 5.0 }));
        }
        "ipo" => all.push(json!({ "average": false })),
        "kto" => all.push(json!({ "beta": 0.4, "desirable_weight": 1.3, "undesirable_weight": 0.8 })),
        "orpo" => all.push(json!({ "beta": 2.0 })),
        "simpo" => all.push(json!({ "sft_coef": 0.3, "gamma": 0.0 })),
        _ if find(name).unwrap().feed.sampled() => {
            for place in ["reward", "loss", "advantage"] {
                for estimator in ["k1", "abs", "k2", "k3", "k3_sequence", "full"] {
                    let kl = json!({ "coef": 0.1, "place": place, "estimator": estimator });
                    all.push(json!({ "kl": kl, "entropy_coef": 0.01, "clip_high": 0.28 }));
                }
            }
            all.push(json!({ "aggregate": "constant", "length": 16 }));
            all.push(json!({ "advantage": { "baseline": "batch", "normalise": "scale" } }));
            all.push(json!({ "advantage": { "baseline": "moving", "to_go": true, "gamma": 0.9 } }));
            all.push(json!({ "advantage": { "baseline": "turns", "gamma": 0.9, "divide_by_std": true, "parts": false } }));
            all.push(json!({ "correction": { "kind": "truncate", "cap": 1.1 } }));
            all.push(json!({ "critic": { "clip": 0.3, "half": true, "coef": 0.5 } }));
            let critic = json!({ "baseline": "critic", "parts": false, "to_go": false });
            all.push(json!({ "advantage": critic, "refills": 0 }));
            all.push(json!({ "filter_equal": true, "overlong": 0.5, "length": 8, "mask_truncated": true }));
            let batch = json!({ "baseline": "batch" });
            all.push(json!({ "filter_equal": true, "overlong": 0.5, "length": 8, "mask_truncated": true, "advantage": batch }));
            for surrogate in ["clip", "truncate", "ratio", "logp", "kimi"] {
                for ratio in ["token", "mean", "product"] {
                    all.push(json!({ "surrogate": surrogate, "ratio": ratio, "clip_high": 0.28 }));
                }
            }
            all.push(json!({ "dual_clip": 1.3, "clip_high": 0.28 }));
            all.push(json!({ "scores": { "scale": true, "centre": true, "clip": 0.7 } }));
            for aggregate in ["token", "sequence", "constant"] {
                let kl = json!({ "coef": 0.1, "place": "loss", "estimator": "k3", "clip": 1.7, "sum": true });
                all.push(json!({ "kl": kl, "aggregate": aggregate, "length": 16 }));
            }
            for ratio in ["token", "mean", "product"] {
                for estimator in ["k1", "abs", "k2", "k3"] {
                    let kl =
                        json!({ "coef": 0.1, "place": "loss", "estimator": estimator, "unbiased": true });
                    all.push(json!({ "kl": kl, "ratio": ratio }));
                }
            }
            all.push(json!({ "surrogate": "kimi", "ratio": "product", "aggregate": "sequence", "tau": 0.3 }));
            // What a method refuses is not a variant of it.
            all.retain(|values| (find(name).unwrap().build)(values.clone()).is_ok());
            let shared = (find(name).unwrap().defaults)().get("surrogate").is_some();
            assert!(!shared || all.len() > 12, "{name} takes {} of the shared settings", all.len());
            let own = match name {
                "trpo" => {
                    let kl = json!({ "entropy_coef": 0.01, "filter_equal": true, "kl": { "coef": 0.1 } });
                    vec![kl, json!({ "advantage": { "baseline": "critic" } })]
                }
                "distill" => vec![json!({ "full": false }), json!({ "reward_coef": 0.5 })],
                _ => vec![],
            };
            all.extend(own);
        }
        _ => {}
    }
    all
}

#[test]
fn gradients_are_those_of_the_loss() {
    for entry in ALGORITHMS {
        for values in variants(entry.name) {
            let mut algorithm = (entry.build)(values.clone()).unwrap();
            let e = prepared(&mut *algorithm, entry.feed);
            check_gradients(&format!("{} {values}", entry.name), &*algorithm, &e);
        }
    }
}

#[test]
fn constant_gradients_do_not_depend_on_the_statistics() {
    let mut constant = 0;
    for entry in ALGORITHMS {
        for settings in variants(entry.name) {
            let mut algorithm = (entry.build)(settings).unwrap();
            if !algorithm.needs().constant_gradients {
                continue;
            }
            let mut e = experience(entry.feed);
            algorithm.prepare(&mut e).unwrap();
            let batch = whole(&e);
            let mut unknown = ByRole::default();
            let (logp, entropy) = (vec![0.0; batch.len()], vec![f32::NAN; batch.len()]);
            unknown.set(Role::Policy, Stats { logp, entropy, ..Default::default() });
            let before = algorithm.loss(&batch, &unknown).grads;
            let after = algorithm.loss(&batch, &stats(&e, algorithm.needs().score)).grads;
            assert_eq!(before.get(Role::Policy), after.get(Role::Policy), "{}", entry.name);
            assert!(after.get(Role::Critic).is_none(), "{}", entry.name);
            constant += 1;
        }
    }
    assert!(constant > 0, "those of supervised fine-tuning are");
}

#[test]
fn micro_batches_add_up_to_the_whole() {
    for entry in ALGORITHMS {
        let mut algorithm = (entry.build)(variants(entry.name)[0].clone()).unwrap();
        let e = prepared(&mut *algorithm, entry.feed);
        let all = stats(&e, algorithm.needs().score);
        let want = algorithm.loss(&whole(&e), &all);
        for size in [2, 4] {
            let (mut value, mut dlogp, mut row) = (0.0, Vec::new(), 0);
            for part in e.sequences.chunks(size) {
                let n: usize = part.iter().map(|s| s.ids.len()).sum();
                let mut own = ByRole::default();
                for role in [Role::Policy, Role::Critic] {
                    let cut = |c: &Vec<f32>| if c.is_empty() { vec![] } else { c[row..row + n].to_vec() };
                    let s = all.get(role).unwrap();
                    let s = Stats {
                        logp: cut(&s.logp),
                        entropy: cut(&s.entropy),
                        value: cut(&s.value),
                        kl: cut(&s.kl),
                        others: vec![],
                    };
                    own.set(role, s);
                }
                let batch =
                    MicroBatch { sequences: part.iter().collect(), counts: UpdateCounts::of(&e.sequences) };
                let loss = algorithm.loss(&batch, &own);
                value += loss.value;
                dlogp.extend_from_slice(&loss.grads.get(Role::Policy).unwrap().logp);
                row += n;
            }
            assert!((value - want.value).abs() < 1e-12 * (1.0 + want.value.abs()), "{}", entry.name);
            assert_eq!(dlogp, want.grads.get(Role::Policy).unwrap().logp, "{}", entry.name);
        }
    }
}

/// Under some settings or other an algorithm writes every metric that its entry lists, and it never writes another.
#[test]
fn metrics_are_those_that_the_registry_lists() {
    for entry in ALGORITHMS {
        let mut written: BTreeSet<String> = BTreeSet::new();
        for values in variants(entry.name) {
            let mut algorithm = (entry.build)(values).unwrap();
            let (e, mut metrics) = prepared_with_metrics(&mut *algorithm, entry.feed);
            metrics.join(algorithm.loss(&whole(&e), &stats(&e, algorithm.needs().score)).metrics);
            written.extend(metrics.means().map(|(name, _)| name.to_string()));
        }
        let listed: Vec<_> = entry.metrics.iter().copied().flatten().collect();
        let exactly = |name: &str| listed.iter().any(|m| m.name == name);
        for name in &written {
            assert!(listed.iter().any(|m| m.covers(name)), "{}: {name} is not listed", entry.name);
        }
        // What the search for a step writes is seen in `trust_region.rs`.
        for m in listed.iter().filter(|m| !TRUST.contains(m)) {
            let shown = written.iter().any(|w| w == m.name || (m.covers(w) && !exactly(w)));
            assert!(shown, "{}: {} is listed and never written", entry.name, m.name);
            assert!(m.about.len() > 3 && m.about.ends_with('.'), "{}", m.name);
        }
        let names: BTreeSet<&str> = listed.iter().map(|m| m.name).collect();
        assert_eq!(names.len(), listed.len(), "{} lists a metric twice", entry.name);
    }
}

#[test]
fn dpo_at_the_reference_is_log_two() {
    let mut algorithm = (find("dpo").unwrap().build)(json!({})).unwrap();
    let mut e = experience(Feed::Pairs);
    e.sequences.iter_mut().for_each(|s| s.ref_logp = s.old_logp.clone());
    algorithm.prepare(&mut e).unwrap();
    let mut all = ByRole::default();
    let logp: Vec<f32> = e.sequences.iter().flat_map(|s| s.old_logp.clone()).collect();
    all.set(Role::Policy, Stats { logp, ..Default::default() });
    let loss = algorithm.loss(&whole(&e), &all);
    assert!((loss.value - std::f64::consts::LN_2).abs() < 1e-12);
    assert_eq!(loss.metrics.get("rewards/margins"), Some(0.0));
}

#[test]
fn group_advantages_are_centred_and_grpo_divides_by_the_deviation() {
    for (name, divided) in [("grpo", true), ("dr_grpo", false)] {
        let mut algorithm = (find(name).unwrap().build)(json!({})).unwrap();
        let mut e = experience(Feed::Rollouts);
        algorithm.prepare(&mut e).unwrap();
        for group in e.sequences.chunks(4) {
            let a: Vec<f64> = group.iter().map(|s| s.advantage[s.actions().next().unwrap()] as f64).collect();
            let r: Vec<f64> = group.iter().map(|s| s.total_reward()).collect();
            let mean = r.iter().sum::<f64>() / 4.0;
            let std = (r.iter().map(|r| (r - mean).powi(2)).sum::<f64>() / 3.0).sqrt();
            for (a, r) in a.iter().zip(&r) {
                let want = if divided { (r - mean) / (std + 1e-4) } else { r - mean };
                assert!((a - want).abs() < 1e-5, "{name}");
            }
        }
    }
}

#[test]
fn groups_with_equal_rewards_are_left_out_where_asked_for() {
    let mut algorithm = (find("grpo").unwrap().build)(json!({ "filter_equal": true })).unwrap();
    let mut e = experience(Feed::Rollouts);
    e.sequences[..4].iter_mut().for_each(|s| s.reward.fill(0.0));
    let metrics = algorithm.prepare(&mut e).unwrap().metrics;
    assert_eq!(metrics.get("dynamic_filtering_ratio"), Some(0.5));
    assert!(e.sequences.len() == 4 && e.sequences.iter().all(|s| s.group == 1));
    // Nothing left is no error: the step makes no update.
    e.sequences.iter_mut().for_each(|s| s.reward.fill(0.0));
    algorithm.prepare(&mut e).unwrap();
    assert!(e.sequences.is_empty());
}

#[test]
fn ppo_whitens_its_advantages_and_places_the_kl_in_the_reward() {
    let mut algorithm = (find("ppo").unwrap().build)(json!({ "kl": { "coef": 0.5 } })).unwrap();
    let mut e = experience(Feed::Rollouts);
    let before = e.clone();
    algorithm.prepare(&mut e).unwrap();
    let all: Vec<f64> = e
        .sequences
        .iter()
        .flat_map(|s| s.actions().map(|i| s.advantage[i] as f64).collect::<Vec<_>>())
        .collect();
    let mean = all.iter().sum::<f64>() / all.len() as f64;
    let var = all.iter().map(|a| (a - mean).powi(2)).sum::<f64>() / (all.len() - 1) as f64;
    assert!(mean.abs() < 1e-6 && (var - 1.0).abs() < 1e-5);
    for (s, old) in e.sequences.iter().zip(&before.sequences) {
        for i in s.actions() {
            let want = old.reward[i] - 0.5 * (s.old_logp[i] - s.ref_logp[i]);
            assert!((s.reward[i] - want).abs() < 1e-6);
        }
    }
}

#[test]
fn the_kl_weight_follows_its_target_and_survives_a_restart() {
    let settings = json!({ "kl": { "coef": 0.1, "target": 0.01, "horizon": 100 } });
    let mut algorithm = (find("ppo").unwrap().build)(settings.clone()).unwrap();
    let metrics = algorithm.prepare(&mut experience(Feed::Rollouts)).unwrap().metrics;
    let (kl, coef) = (metrics.get("objective/kl").unwrap(), metrics.get("kl_coef").unwrap());
    let want = 0.1 * (1.0 + (kl / 0.01 - 1.0).clamp(-0.2, 0.2) * 8.0 / 100.0);
    assert!((coef - want).abs() < 1e-12 && coef != 0.1);
    let mut other = (find("ppo").unwrap().build)(settings).unwrap();
    other.restore(&algorithm.state()).unwrap();
    assert_eq!(other.state(), algorithm.state());
}

#[test]
fn settings_that_cannot_learn_are_refused() {
    for (name, values, says) in [
        ("grpo", json!({ "clip_lo": 0.1 }), "clip_low"),
        ("grpo", json!({ "kl": { "estimater": "k1" } }), "estimator"),
        ("ppo", json!({ "clip_low": 0.0 }), "clip_low: expected a number above 0, up to 1"),
        ("ppo", json!({ "epochs": 0 }), "epochs: expected a whole number from 1"),
        ("dr_grpo", json!({ "kl": { "target": 6.0 } }), "kl.coef"),
        ("dr_grpo", json!({ "kl": { "unbiased": true } }), "kl.coef above 0"),
        ("ppo", json!({ "kl": { "unbiased": true } }), "kl.place = \"loss\""),
        ("dr_grpo", json!({ "aggregate": "constant" }), "length"),
        ("ppo", json!({ "skip_ratio": 2.0 }), "nothing to skip"),
        ("dpo", json!({ "bta": 0.1 }), "beta"),
    ] {
        let error = (find(name).unwrap().build)(values).err().unwrap().to_string();
        assert!(error.contains(says), "{error}");
    }
    assert!(find("gpro").err().unwrap().to_string().contains("\"grpo\""));
}

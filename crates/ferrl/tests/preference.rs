//! Closed forms of the supervised and the preference methods, and the sequences that the loader makes for them.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::algo::{Algorithm, find};
use ferrl::experience::{ByRole, Evidence, Experience, Loss, MicroBatch, Role, Sequence, UpdateCounts};
use ferrl_engine::train::Stats;
use serde_json::{Value, json};

const LN_2: f64 = std::f64::consts::LN_2;

fn build(name: &str, settings: Value) -> Box<dyn Algorithm> {
    (find(name).unwrap().build)(settings).unwrap()
}

/// A question of two tokens and an answer; `logp` are the current numbers of the answer's tokens.
fn answer(kind: Evidence, pair: Option<usize>, reference: &[f32]) -> Sequence {
    let n = 2 + reference.len();
    let mut ref_logp = vec![0.0; n];
    ref_logp[1..n - 1].copy_from_slice(reference);
    Sequence {
        ids: (0..n as u32).collect(),
        trained: (0..n).map(|i| i >= 2).collect(),
        trajectory_tokens: reference.len(),
        weight: 1.0,
        kind,
        pair,
        ref_logp,
        ..Default::default()
    }
}

fn pair(chosen: &[f32], rejected: &[f32]) -> Experience {
    let sides = [answer(Evidence::Chosen, Some(0), chosen), answer(Evidence::Rejected, Some(0), rejected)];
    Experience { sequences: sides.to_vec() }
}

/// The loss where each answer's tokens have these log-probabilities.
fn loss(algorithm: &dyn Algorithm, e: &Experience, logps: &[&[f32]]) -> Loss {
    let mut stats = Stats::default();
    for (s, logp) in e.sequences.iter().zip(logps) {
        let mut column = vec![0.0; s.ids.len()];
        column[1..=logp.len()].copy_from_slice(logp);
        stats.logp.extend(&column);
        stats.entropy.extend(vec![0.0; s.ids.len()]);
    }
    let mut all = ByRole::default();
    all.set(Role::Policy, stats);
    let batch =
        MicroBatch { sequences: e.sequences.iter().collect(), counts: UpdateCounts::of(&e.sequences) };
    algorithm.loss(&batch, &all)
}

fn scores(algorithm: &dyn Algorithm, e: &Experience, scores: &[f32]) -> Loss {
    let mut stats = Stats::default();
    for (s, score) in e.sequences.iter().zip(scores) {
        stats.logp.extend(vec![0.0; s.ids.len()]);
        stats.value.extend(vec![9.0; s.ids.len() - 1]);
        stats.value.push(*score);
    }
    let mut all = ByRole::default();
    all.set(Role::Policy, stats);
    let batch =
        MicroBatch { sequences: e.sequences.iter().collect(), counts: UpdateCounts::of(&e.sequences) };
    algorithm.loss(&batch, &all)
}

#[test]
fn at_the_reference_the_loss_is_log_two_whatever_the_smoothing() {
    let (c, r) = ([-1.0, -0.5, -2.0], [-0.3, -0.7]);
    let e = pair(&c, &r);
    for name in ["dpo", "dpo_positive", "step_dpo"] {
        for smoothing in [0.0, 0.2] {
            let l = loss(&*build(name, json!({ "label_smoothing": smoothing })), &e, &[&c, &r]);
            assert!((l.value - LN_2).abs() < 1e-7, "{name}");
        }
    }
}

#[test]
fn smoothing_moves_the_optimum_to_a_finite_margin() {
    // With a share e of wrong labels the best margin is log((1 - e) / e) / beta.
    let e = pair(&[0.0], &[0.0]);
    let algorithm = build("dpo", json!({ "beta": 0.5, "label_smoothing": 0.1 }));
    let margin = (0.9f64 / 0.1).ln() / 0.5;
    let l = loss(&*algorithm, &e, &[&[margin as f32], &[0.0]]);
    let slope = l.grads.get(Role::Policy).unwrap().logp[1];
    assert!(slope.abs() < 1e-7, "{slope}");
}

#[test]
fn imitation_beside_preference_is_the_token_mean_of_the_chosen_answers() {
    let (c, r) = ([-1.0, -0.5, -2.0], [-0.3, -0.7]);
    let e = pair(&c, &r);
    let l = loss(&*build("dpo", json!({ "sft_coef": 2.0 })), &e, &[&c, &r]);
    assert!((l.value - LN_2 - 2.0 * 3.5 / 3.0).abs() < 1e-6);
}

#[test]
fn dpo_positive_pulls_up_a_chosen_answer_that_fell_below_the_reference() {
    let e = pair(&[-1.0], &[-1.0]);
    let algorithm = build("dpo_positive", json!({ "beta": 0.1, "positive": 50.0 }));
    let fell = loss(&*algorithm, &e, &[&[-1.1], &[-3.0]]);
    let z = 0.1 * (-0.1 + 2.0 - 50.0 * 0.1f64);
    assert!((fell.value - (1.0 + (-z).exp()).ln()).abs() < 1e-5);
    let rose = loss(&*algorithm, &e, &[&[-0.9], &[-3.0]]);
    let z = 0.1 * 2.1f64;
    assert!((rose.value - (1.0 + (-z).exp()).ln()).abs() < 1e-6);
    let slope = |l: &Loss| l.grads.get(Role::Policy).unwrap().logp[1].abs();
    assert!(slope(&fell) > 50.0 * slope(&rose));
}

#[test]
fn ipo_has_its_optimum_at_a_margin_of_half_over_tau() {
    let (c, r) = ([-2.0f32, -1.0], [-1.0f32, -1.0, -1.0, -1.0]);
    let e = pair(&c, &r);
    let tau = 0.25;
    for (average, lift) in [(false, 1.0f32), (true, 2.0)] {
        let algorithm = build("ipo", json!({ "tau": tau, "average": average }));
        // A margin of 2 = 1 / (2 tau): in sum, or in the mean over the chosen answer's tokens.
        let up: Vec<f32> = c.iter().map(|x| x + lift).collect();
        let l = loss(&*algorithm, &e, &[&up, &r]);
        assert!(l.value < 1e-12, "{}", l.value);
        assert!(l.grads.get(Role::Policy).unwrap().logp.iter().all(|g| g.abs() < 1e-6));
        let l = loss(&*algorithm, &e, &[&c, &r]);
        assert!((l.value - 4.0).abs() < 1e-9, "at the reference it is 1 / (2 tau) squared");
    }
}

#[test]
fn the_reference_point_is_taken_over_mismatched_pairs_and_never_negative() {
    let labels = [true, false, true];
    let mut e = Experience::default();
    for (i, &good) in labels.iter().enumerate() {
        let mut s = answer(Evidence::Labelled(good), None, &vec![-1.0; i + 1]);
        s.ids.iter_mut().for_each(|id| *id += 100 * i as u32);
        e.sequences.push(s);
    }
    let mut algorithm = build("kto", json!({ "beta": 0.5, "desirable_weight": 2.0 }));
    e.add_mismatched();
    assert_eq!(e.sequences.len(), 6);
    // Each question with the answer of the question before it; the first with the last one's.
    assert_eq!(e.sequences[3].ids, [0, 1, 202, 203, 204]);
    assert_eq!(e.sequences[4].ids, [100, 101, 2]);
    assert_eq!(e.sequences[5].trained, [false, false, true, true]);
    for (s, gain) in e.sequences[3..].iter_mut().zip([0.6f32, -0.2, 0.5]) {
        (s.ref_logp, s.old_logp) = (vec![-1.0; s.ids.len()], vec![-1.0; s.ids.len()]);
        s.old_logp[1] += gain;
    }
    let metrics = algorithm.prepare(&mut e).unwrap().metrics;
    let z = (0.6f64 - 0.2 + 0.5) / 3.0;
    assert!((metrics.get("kl").unwrap() - z).abs() < 1e-6);
    assert_eq!(e.sequences.len(), 3);
    let l = loss(&*algorithm, &e, &[&[-1.0], &[-1.0, -1.0], &[-1.0, -1.0, -1.0]]);
    let s = |x: f64| 1.0 / (1.0 + (-x).exp());
    let want = (2.0 * 2.0 * (1.0 - s(-0.5 * z)) + (1.0 - s(0.5 * z))) / 3.0;
    assert!((l.value - want).abs() < 1e-6, "{} {want}", l.value);

    e.add_mismatched();
    e.sequences[3..].iter_mut().for_each(|s| {
        (s.ref_logp, s.old_logp) = (vec![-1.0; s.ids.len()], vec![-2.0; s.ids.len()]);
    });
    assert_eq!(algorithm.prepare(&mut e).unwrap().metrics.get("kl"), Some(0.0), "held at zero");
    e.sequences.truncate(1);
    // The last batch of an epoch may be a single example; `train.batch = 1` is refused before the first step.
    e.add_mismatched();
    assert_eq!((e.sequences.len(), algorithm.needs().batch), (1, 2));
    assert_eq!(algorithm.prepare(&mut e).unwrap().metrics.get("kl"), Some(0.0), "nothing to pair with");
}

#[test]
fn odds_stay_finite_where_an_answer_is_nearly_certain() {
    let e = pair(&[0.0], &[0.0]);
    let algorithm = build("orpo", json!({ "beta": 1.0 }));
    // p = 1 - 6e-8 against p = e^-2.
    let x = -6e-8f32;
    let l = loss(&*algorithm, &e, &[&[x], &[-2.0]]);
    let log_odds = |logp: f64| logp - (-logp.exp_m1()).ln();
    let ratio = log_odds(x as f64) - log_odds(-2.0);
    let want = -(x as f64) + (-ratio).exp().ln_1p();
    assert!((l.value - want).abs() < 1e-15, "{} {want}", l.value);
    for logps in [[0.0f32, -2.0], [-2.0, 0.0], [0.0, 0.0]] {
        let l = loss(&*algorithm, &e, &[&logps[..1], &logps[1..]]);
        let g = l.grads.get(Role::Policy).unwrap();
        assert!(l.value.is_finite() && g.logp.iter().all(|g| g.is_finite()), "{logps:?}");
    }
    // Equal answers: log 2 of the odds ratio, and the likelihood.
    let l = loss(&*algorithm, &e, &[&[-1.5], &[-1.5]]);
    assert!((l.value - 1.5 - LN_2).abs() < 1e-9);
}

#[test]
fn simpo_wants_the_target_margin_per_token() {
    let e = pair(&[0.0; 2], &[0.0; 4]);
    let algorithm = build("simpo", json!({ "beta": 2.0, "gamma": 1.0 }));
    let l = loss(&*algorithm, &e, &[&[-0.5, -1.5], &[-1.5; 4]]);
    assert!((l.value - LN_2).abs() < 1e-9, "the margin of 2 (1.5 - 1) is the target");
}

#[test]
fn a_margin_and_centring_shift_the_reward_model() {
    let mut e = pair(&[0.0], &[0.0]);
    e.sequences[0].margin = 1.5;
    let l = scores(&*build("rm", json!({})), &e, &[2.0, 0.5]);
    assert!((l.value - LN_2).abs() < 1e-9);
    let l = scores(&*build("rm", json!({ "centre": 0.1 })), &e, &[2.0, 0.5]);
    assert!((l.value - LN_2 - 0.1 * 6.25).abs() < 1e-9);
}

#[test]
fn the_classifier_is_at_its_optimum_where_probabilities_are_the_targets() {
    let targets = [0.0f32, 0.25, 1.0];
    let e = Experience { sequences: targets.map(|t| answer(Evidence::Target(t), None, &[0.0])).to_vec() };
    let logit = (0.25f64 / 0.75).ln();
    let l = scores(&*build("classifier", json!({})), &e, &[-40.0, logit as f32, 40.0]);
    let entropy = -(0.25 * 0.25f64.ln() + 0.75 * 0.75f64.ln());
    assert!((l.value - entropy / 3.0).abs() < 1e-7);
    assert!(l.grads.get(Role::Policy).unwrap().value.iter().all(|g| g.abs() < 1e-7));
}

#[test]
fn answers_count_for_their_advantage() {
    let mut e = Experience::default();
    for (i, reward) in [1.0f32, 0.0, -2.0, 3.0].into_iter().enumerate() {
        let s = Sequence { group: i / 2, trajectory: i, ..answer(Evidence::Plain, None, &[0.0, 0.0]) };
        e.sequences.push(s.rewarded(reward));
    }
    let logps: [&[f32]; 4] = [&[-1.0, -2.0]; 4];
    let mut plain = build("mle", json!({}));
    plain.prepare(&mut e).unwrap();
    assert!((loss(&*plain, &e, &logps).value - 3.0 * 4.0 / 8.0).abs() < 1e-9, "negative ones count as 0");
    let mut grouped = build("mle", json!({ "baseline": "group", "clip_negative": false }));
    grouped.prepare(&mut e).unwrap();
    let first: Vec<f32> = e.sequences.iter().map(|s| s.advantage[1]).collect();
    assert_eq!(first, [0.5, -0.5, -2.5, 2.5]);
}

#[test]
fn rejection_keeps_right_answers_once_and_at_most_so_many_of_a_question() {
    let mut e = Experience::default();
    for i in 0..8usize {
        let mut s = Sequence { group: i / 4, trajectory: i, ..answer(Evidence::Plain, None, &[0.0]) };
        // Answers 1 and 2 to the first question are the same; the second question has one right answer.
        s.ids[2] = if i == 2 { 1 } else { i as u32 };
        e.sequences.push(s.rewarded(if i < 4 || i == 6 { 1.0 } else { 0.5 }));
    }
    let mut algorithm = build("rest_em", json!({ "per_prompt": 2 }));
    let metrics = algorithm.prepare(&mut e).unwrap().metrics;
    assert_eq!(e.sequences.iter().map(|s| s.trajectory).collect::<Vec<_>>(), [0, 1, 6]);
    assert_eq!(metrics.get("kept"), Some(3.0 / 8.0));
    let mut algorithm = build("rest_em", json!({ "per_prompt": 10, "threshold": 1.5 }));
    algorithm.prepare(&mut e).unwrap();
    assert!(e.sequences.is_empty());
}

#[test]
fn settings_that_cannot_work_are_refused() {
    for (name, settings, says) in [
        ("dpo", json!({ "beta": 0.0 }), "beta: expected a number above 0"),
        ("dpo", json!({ "label_smoothing": 0.5 }), "label_smoothing"),
        ("dpo_positive", json!({ "positiv": 1.0 }), "positive"),
        ("ipo", json!({ "tau": -1.0 }), "tau"),
        ("kto", json!({ "desirable_wight": 1.0 }), "desirable_weight"),
        ("orpo", json!({ "beta": -0.1 }), "beta"),
        ("simpo", json!({ "beta": 0.0 }), "beta"),
        ("rm", json!({ "centre": -1.0 }), "centre"),
        ("rest_em", json!({ "per_prompt": 0 }), "per_prompt"),
        ("mle", json!({ "baseline": "batch" }), "group"),
    ] {
        let error = (find(name).unwrap().build)(settings).err().unwrap().to_string();
        assert!(error.contains(says), "{error}");
    }
}

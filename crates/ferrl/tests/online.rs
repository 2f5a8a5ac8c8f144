//! What the online methods promise in closed form.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::algo::{ALGORITHMS, Algorithm, find};
use ferrl::experience::{ByRole, Experience, Loss, MicroBatch, Role, Sequence, UpdateCounts};
use ferrl_engine::train::Stats;
use serde_json::{Value, json};

fn build(name: &str, values: Value) -> Box<dyn Algorithm> {
    (find(name).unwrap().build)(values).unwrap()
}

/// Answers of `lengths` tokens to prompts of two, four to a group, with these rewards at their ends.
fn rollout(lengths: &[usize], rewards: &[f32]) -> Experience {
    let answer = |(k, (&tokens, &reward)): (usize, (&usize, &f32))| {
        let n = tokens + 2;
        let column = |scale: f32, shift: f32| -> Vec<f32> {
            (0..n).map(|i| ((k * 7 + i * 5) % 11) as f32 / 11.0 * scale + shift).collect()
        };
        let mut given = vec![0.0; n];
        given[n - 2] = reward;
        Sequence {
            ids: vec![1; n],
            trained: (0..n).map(|i| i >= 2).collect(),
            trajectory: k,
            group: k / 4,
            weight: 1.0,
            trajectory_tokens: tokens,
            reward: given,
            sources: vec![(1.0, Some(reward))],
            sampled_logp: column(1.0, -2.0),
            ref_logp: column(0.7, -1.8),
            old_value: column(0.5, 0.0),
            credit: column(0.4, -0.2),
            ..Default::default()
        }
    };
    Experience { sequences: lengths.iter().zip(rewards).enumerate().map(answer).collect() }
}

fn usual() -> Experience {
    rollout(&[3, 5, 2, 7, 4, 4, 6, 1], &[1.0, 0.0, 0.25, 0.5, 0.0, 0.0, 1.0, 0.0])
}

/// The loss with each logp moved by `step` of its place from the old one.
fn loss(algorithm: &dyn Algorithm, e: &Experience, step: impl Fn(usize) -> f32) -> Loss {
    let mut policy = Stats::default();
    for s in &e.sequences {
        policy.logp.extend(s.old_logp.iter().enumerate().map(|(i, l)| l + step(i)));
        policy.entropy.extend(s.ids.iter().map(|_| 1.0));
        policy.kl.extend(s.ids.iter().map(|_| 0.5));
        policy.value.extend_from_slice(&s.old_value);
    }
    let mut all = ByRole::default();
    all.set(Role::Policy, policy);
    let batch =
        MicroBatch { sequences: e.sequences.iter().collect(), counts: UpdateCounts::of(&e.sequences) };
    algorithm.loss(&batch, &all)
}

fn advantages(e: &Experience) -> Vec<f64> {
    let of = |s: &Sequence| s.actions().map(|i| s.advantage[i] as f64).collect::<Vec<_>>();
    e.sequences.iter().flat_map(of).collect()
}

fn mean_and_variance(values: &[f64]) -> (f64, f64) {
    let n = values.len() as f64;
    let mean = values.iter().sum::<f64>() / n;
    (mean, values.iter().map(|v| (v - mean).powi(2)).sum::<f64>() / (n - 1.0))
}

#[test]
fn no_clip_is_active_on_the_policy_that_sampled() {
    for entry in ALGORITHMS.iter().filter(|a| (a.defaults)().get("clip_low").is_some()) {
        let mut algorithm = build(entry.name, json!({}));
        let mut e = usual();
        algorithm.prepare(&mut e).unwrap();
        let loss = loss(&*algorithm, &e, |_| 0.0);
        for (name, want) in [
            ("policy/ratio", 1.0),
            ("clip_ratio/low_mean", 0.0),
            ("clip_ratio/high_mean", 0.0),
            ("clip_ratio/region_mean", 0.0),
        ] {
            assert_eq!(loss.metrics.get(name), Some(want), "{} {name}", entry.name);
        }
    }
}

#[test]
fn all_surrogates_have_one_gradient_on_the_policy_that_sampled() {
    let gradient = |surrogate: &str| {
        let mut algorithm = build("dr_grpo", json!({ "surrogate": surrogate }));
        let mut e = usual();
        algorithm.prepare(&mut e).unwrap();
        loss(&*algorithm, &e, |_| 0.0).grads.get(Role::Policy).unwrap().logp.clone()
    };
    let want = gradient("clip");
    assert!(want.iter().any(|&g| g != 0.0));
    for surrogate in ["truncate", "ratio", "logp"] {
        assert_eq!(gradient(surrogate), want, "{surrogate}");
    }
}

#[test]
fn reinforce_subtracts_what_it_is_told_to() {
    let first = |baseline: &str, e: &mut Experience| {
        let mut algorithm = build("reinforce", json!({ "advantage": { "baseline": baseline } }));
        algorithm.prepare(e).unwrap();
        e.sequences.iter().map(|s| s.advantage[1] as f64).collect::<Vec<_>>()
    };
    let rewards: Vec<f64> = usual().sequences.iter().map(|s| s.total_reward()).collect();
    let mean = rewards.iter().sum::<f64>() / 8.0;
    assert_eq!(first("none", &mut usual()), rewards);
    for (a, r) in first("batch", &mut usual()).iter().zip(&rewards) {
        assert!((a - (r - mean)).abs() < 1e-6);
    }
}

#[test]
fn a_moving_baseline_lags_one_rollout_behind_and_survives_a_restart() {
    let settings = json!({ "advantage": { "baseline": "moving", "decay": 0.75 } });
    let mut algorithm = build("reinforce", settings.clone());
    let step = |algorithm: &mut dyn Algorithm, reward: f32| {
        let mut e = rollout(&[2; 4], &[reward; 4]);
        algorithm.prepare(&mut e).unwrap();
        e.sequences[0].advantage[1]
    };
    assert_eq!(step(&mut *algorithm, 1.0), 0.0, "the first rollout is its own baseline");
    assert_eq!(step(&mut *algorithm, 3.0), 2.0);
    let mut other = build("reinforce", settings);
    other.restore(&algorithm.state()).unwrap();
    assert_eq!(step(&mut *other, 3.0), 1.5, "1 * 0.75 + 3 * 0.25 = 1.5");
}

/// A sequence of a trajectory: for each turn its tokens and its reward, with a token that was read before each.
fn turns(trajectory: usize, turns: &[(usize, f32)]) -> Sequence {
    let (mut trained, mut reward) = (vec![], vec![]);
    for &(tokens, earned) in turns {
        trained.push(false);
        trained.extend(vec![true; tokens]);
        reward.extend(vec![0.0; tokens]);
        reward[trained.len() - 2] = earned;
        reward.push(0.0);
    }
    let n = trained.len();
    let trajectory_tokens = trained.iter().filter(|t| **t).count();
    let (ids, sampled_logp) = (vec![1; n], vec![-1.0; n]);
    let own =
        Sequence { ids, trained, reward, sampled_logp, trajectory, trajectory_tokens, ..Default::default() };
    Sequence { group: trajectory, weight: 1.0, ..own }
}

#[test]
fn rebn_compares_the_discounted_returns_of_turns_over_the_rollout() {
    // The first trajectory has two sequences: its returns are 4 + 3.5 / 2, 3 + 1 / 2 and 1; those of the second 2 / 2 and 2.
    let experience = || Experience {
        sequences: vec![
            turns(0, &[(3, 4.0), (1, 3.0)]),
            turns(0, &[(2, 1.0)]),
            turns(1, &[(5, 0.0), (1, 2.0)]),
        ],
    };
    let settings =
        |divide| json!({ "advantage": { "baseline": "turns", "gamma": 0.5, "divide_by_std": divide } });
    let returns = [5.75, 3.5, 1.0, 1.0, 2.0];
    let (mean, variance) = mean_and_variance(&returns);
    for (divide, scale) in [(false, 1.0), (true, variance.sqrt() + 1e-9)] {
        let mut e = experience();
        build("reinforce", settings(divide)).prepare(&mut e).unwrap();
        let lengths = [3, 1, 2, 5, 1];
        let want = returns.iter().zip(lengths).flat_map(|(r, n)| vec![(r - mean) / scale; n]);
        let got = advantages(&e);
        assert_eq!(got.len(), 12);
        for (got, want) in got.iter().zip(want) {
            assert!((got - want).abs() < 1e-6, "{got} {want}");
        }
    }
}

#[test]
fn reinforce_pp_has_mean_zero_and_variance_one_over_all_tokens() {
    for name in ["reinforce_pp", "reinforce_pp_baseline"] {
        let mut algorithm = build(name, json!({}));
        let mut e = usual();
        algorithm.prepare(&mut e).unwrap();
        let (mean, variance) = mean_and_variance(&advantages(&e));
        assert!(mean.abs() < 1e-6 && (variance - 1.0).abs() < 1e-5, "{name}: {mean} {variance}");
    }
}

#[test]
fn reinforce_pp_credits_a_token_with_the_kl_from_it_on() {
    let kl = json!({ "coef": 0.3, "place": "reward", "estimator": "k1" });
    let mut algorithm = build("reinforce_pp", json!({ "kl": kl, "advantage": { "normalise": "none" } }));
    let mut e = usual();
    let before = e.clone();
    algorithm.prepare(&mut e).unwrap();
    for (s, old) in e.sequences.iter().zip(&before.sequences) {
        for t in s.actions() {
            let kl: f64 =
                s.actions().filter(|&i| i >= t).map(|i| (s.old_logp[i] - s.ref_logp[i]) as f64).sum();
            assert!((s.advantage[t] as f64 - (old.total_reward() - 0.3 * kl)).abs() < 1e-5);
        }
    }
}

#[test]
fn rloo_leaves_one_out() {
    let mut algorithm = build("rloo", json!({ "kl": { "coef": 0.0 } }));
    let mut e = usual();
    algorithm.prepare(&mut e).unwrap();
    for group in e.sequences.chunks(4) {
        let total: f64 = group.iter().map(Sequence::total_reward).sum();
        for s in group {
            let (r, a) = (s.total_reward(), s.advantage[1] as f64);
            assert!((a - (r - (total - r) / 3.0)).abs() < 1e-6);
            // The identity with the group's mean: n / (n - 1) times the centred reward.
            assert!((a - 4.0 / 3.0 * (r - total / 4.0)).abs() < 1e-6);
        }
        let sum: f64 = group.iter().map(|s| s.advantage[1] as f64).sum();
        assert!(sum.abs() < 1e-6);
    }
}

#[test]
fn gspo_weighs_an_answer_by_the_geometric_mean_of_its_ratios() {
    let wide = json!({ "clip_low": 0.9, "clip_high": 9.0 });
    let mut algorithm = build("gspo", wide);
    let mut e = usual();
    algorithm.prepare(&mut e).unwrap();
    let step = |i: usize| 0.05 * (i as f32 - 3.0);
    let got = loss(&*algorithm, &e, step);
    let (mut value, mut row) = (0.0, 0);
    for s in &e.sequences {
        let at: Vec<usize> = s.actions().collect();
        let n = at.len() as f64;
        // As the engine sees them: sums in f32 of logp and step.
        let gap = |i: usize| (s.old_logp[i] + step(i)) as f64 - s.old_logp[i] as f64;
        let ratio = (at.iter().map(|&i| gap(i)).sum::<f64>() / n).exp();
        let a = s.advantage[at[0]] as f64;
        value -= ratio * a / 8.0;
        for &i in &at {
            let slope = got.grads.get(Role::Policy).unwrap().logp[row + i] as f64;
            assert!((slope + ratio * a / n / 8.0).abs() < 1e-7);
        }
        row += s.ids.len();
    }
    assert!((got.value - value).abs() < 1e-9);
}

#[test]
fn gspo_clips_whole_answers() {
    let mut algorithm = build("gspo", json!({ "clip_low": 0.1, "clip_high": 0.1 }));
    let mut e = usual();
    algorithm.prepare(&mut e).unwrap();
    let got = loss(&*algorithm, &e, |_| 0.3);
    let mut row = 0;
    for s in &e.sequences {
        for i in s.actions() {
            let slope = got.grads.get(Role::Policy).unwrap().logp[row + i];
            assert_eq!(
                slope == 0.0,
                s.advantage[i] >= 0.0,
                "a raised good answer stops, a raised bad one does not"
            );
        }
        row += s.ids.len();
    }
}

#[test]
fn cispo_bounds_the_weight_and_keeps_the_gradient() {
    let mut algorithm = build("cispo", json!({ "clip_high": 0.5 }));
    let mut e = usual();
    algorithm.prepare(&mut e).unwrap();
    let tokens: usize = e.sequences.iter().map(Sequence::action_count).sum();
    for step in [0.1f32, 2.0] {
        let got = loss(&*algorithm, &e, |_| step);
        let mut row = 0;
        for s in &e.sequences {
            for i in s.actions() {
                let ratio = ((s.old_logp[i] + step) as f64 - s.old_logp[i] as f64).exp();
                let want = -ratio.min(1.5) * s.advantage[i] as f64 / tokens as f64;
                assert!((got.grads.get(Role::Policy).unwrap().logp[row + i] as f64 - want).abs() < 1e-7);
            }
            row += s.ids.len();
        }
    }
}

#[test]
fn dapo_leaves_out_equal_groups_and_punishes_length_evenly() {
    let mut algorithm = build("dapo", json!({ "length": 10, "overlong": 0.5 }));
    let mut e = rollout(
        &[3, 5, 6, 7, 8, 10, 2, 9, 1, 2, 3, 10],
        &[0.0, 0.0, 0.0, 0.0, 1.0, 1.0, 0.0, 0.0, 1.0, 1.0, 1.0, 1.0],
    );
    let metrics = algorithm.prepare(&mut e).unwrap().metrics;
    // The first and the last group differ in length only, which is no difference of their answers.
    assert_eq!(metrics.get("dynamic_filtering_ratio"), Some(2.0 / 3.0));
    let rewards: Vec<f64> = e.sequences.iter().map(Sequence::total_reward).collect();
    let want = [1.0 - 0.6, 1.0 - 1.0, 0.0, -0.8];
    assert!(rewards.iter().zip(want).all(|(r, w)| (r - w).abs() < 1e-6), "{rewards:?}");
}

#[test]
fn cut_off_answers_are_compared_with_but_not_learned_from() {
    let mut algorithm = build("dr_grpo", json!({ "mask_truncated": true }));
    let mut e = rollout(&[3, 5, 2, 7], &[1.0, 0.0, 0.0, 0.0]);
    e.sequences[3].truncated = true;
    algorithm.prepare(&mut e).unwrap();
    assert_eq!(e.sequences.len(), 3);
    assert_eq!(e.sequences[0].advantage[1], 0.75, "the mean counts the fourth");
}

#[test]
fn gdpo_with_one_reward_is_grpo_normalised_over_the_answers() {
    let mut grpo = build("grpo", json!({ "kl": { "coef": 0.0 } }));
    let mut gdpo = build("gdpo", json!({}));
    let (mut a, mut b) = (usual(), usual());
    grpo.prepare(&mut a).unwrap();
    gdpo.prepare(&mut b).unwrap();
    let of = |e: &Experience| e.sequences.iter().map(|s| s.advantage[1] as f64).collect::<Vec<_>>();
    let mut alone = usual();
    alone.sequences.iter_mut().for_each(|s| s.sources.clear());
    gdpo.prepare(&mut alone).unwrap();
    assert_eq!(of(&alone), of(&b), "a reward that came without sources is one");
    let (a, b) = (of(&a), of(&b));
    let (mean, variance) = mean_and_variance(&a);
    for (a, b) in a.iter().zip(&b) {
        assert!(((a - mean) / (variance.sqrt() + 1e-4) - b).abs() < 1e-5);
    }
}

#[test]
fn gdpo_lets_a_reward_with_a_small_spread_count() {
    // One reward of 0 or 1, one of 0 or 0.01: both tell the same two answers apart from the others.
    let mut e = rollout(&[2; 4], &[0.0; 4]);
    for (k, (big, small)) in [(1.0, 0.0), (0.0, 0.01), (0.0, 0.0), (1.0, 0.01)].into_iter().enumerate() {
        e.sequences[k].reward[2] = big + small;
        e.sequences[k].sources = vec![(1.0, Some(big)), (1.0, Some(small))];
    }
    build("gdpo", json!({})).prepare(&mut e).unwrap();
    let a: Vec<f32> = e.sequences.iter().map(|s| s.advantage[1]).collect();
    assert!((a[0] - a[1]).abs() < 0.05 * a[3] && a[3] > 1.0 && a[2] < -1.0, "{a:?}");
}

#[test]
fn gdpo_keeps_a_group_whose_rewards_trade_off() {
    // Every sum is 1, so the sums tell nothing apart; the parts do.
    let trade = || {
        let mut e = rollout(&[2; 8], &[1.0; 8]);
        for (k, s) in e.sequences.iter_mut().enumerate().take(4) {
            let first = k as f32 / 4.0;
            s.sources = vec![(1.0, Some(first)), (1.0, Some(1.0 - first))];
        }
        e.sequences.iter_mut().skip(4).for_each(|s| s.sources = vec![(1.0, Some(0.5)), (1.0, Some(0.5))]);
        e
    };
    let mut e = trade();
    let metrics = build("gdpo", json!({ "filter_equal": true })).prepare(&mut e).unwrap().metrics;
    assert_eq!((metrics.get("dynamic_filtering_ratio"), e.sequences.len()), (Some(0.5), 4));
    let mut e = trade();
    build("grpo", json!({ "filter_equal": true })).prepare(&mut e).unwrap();
    assert!(e.sequences.is_empty());
}

#[test]
fn settings_that_would_do_nothing_are_refused() {
    for (name, values, says) in [
        ("reinforce", json!({ "ratio": "mean" }), "no ratio"),
        ("grpo", json!({ "dual_clip": 1.1 }), "above 1 + clip_high"),
        ("cispo", json!({ "dual_clip": 9.0 }), "clipped surrogate only"),
        ("grpo", json!({ "refills": 2 }), "filter_equal"),
        ("dapo", json!({ "overlong": 1.5 }), "overlong: expected a number from 0 to 1"),
        ("dapo", json!({ "length": 0 }), "length"),
        ("grpo", json!({ "advantage": { "gamma": 1.9 } }), "advantage.gamma: expected a number from 0 to 1"),
        ("gdpo", json!({ "kl": { "coef": 0.1, "place": "reward" } }), "parts"),
        ("ppo", json!({ "advantage": { "to_go": true } }), "already"),
        (
            "reinforce",
            json!({ "advantage": { "baseline": "turns", "to_go": true } }),
            "already sum the rewards from each turn on",
        ),
    ] {
        let error = (find(name).unwrap().build)(values).err().unwrap().to_string();
        assert!(error.contains(says), "{error}");
    }
}

#[test]
fn running_moments_of_scores_survive_a_restart() {
    let settings =
        json!({ "scores": { "scale": true, "centre": true }, "advantage": { "baseline": "none" } });
    let mut whole = build("reinforce", settings.clone());
    whole.prepare(&mut rollout(&[2, 2, 3], &[1.0, 2.0, 6.0])).unwrap();
    let mut resumed = build("reinforce", settings);
    resumed.restore(&whole.state()).unwrap();
    let after = |algorithm: &mut dyn Algorithm| {
        let mut e = rollout(&[2, 2, 3], &[0.0, 1.0, 5.0]);
        algorithm.prepare(&mut e).unwrap();
        advantages(&e)
    };
    let (a, b) = (after(&mut *whole), after(&mut *resumed));
    assert_eq!(a, b);
    // Six scores of mean 2.5: the first of the second rollout lies below it.
    assert!(a[0] < 0.0 && a.iter().any(|a| *a > 0.0), "{a:?}");
}

#[test]
fn kimis_surrogate_is_the_square_of_one_ratio_per_completion() {
    let settings = json!({ "surrogate": "kimi", "ratio": "product", "aggregate": "sequence", "tau": 0.5 });
    let mut algorithm = build("dr_grpo", settings);
    let mut e = usual();
    algorithm.prepare(&mut e).unwrap();
    let got = loss(&*algorithm, &e, |_| 0.1).value;
    let completion = |s: &ferrl::experience::Sequence| {
        let (l, a) = (0.1 * s.action_count() as f64, s.advantage[s.actions().next().unwrap()] as f64);
        -a * l + 0.25 * l * l
    };
    let want = e.sequences.iter().map(completion).sum::<f64>() / e.sequences.len() as f64;
    assert!((got - want).abs() < 1e-6, "{got} against {want}");
}

#[test]
fn a_kl_that_is_summed_does_not_depend_on_the_aggregation_of_the_loss() {
    let of = |aggregate: &str| {
        let kl = json!({ "coef": 0.5, "place": "loss", "estimator": "k3", "sum": true });
        let values = json!({ "kl": kl, "aggregate": aggregate, "length": 7 });
        let (mut with, mut e) = (build("dr_grpo", values), usual());
        e.sequences.iter_mut().for_each(|s| s.ref_logp = s.sampled_logp.iter().map(|l| l - 0.3).collect());
        with.prepare(&mut e).unwrap();
        e.sequences.iter_mut().for_each(|s| s.advantage.fill(0.0));
        loss(&*with, &e, |_| 0.0).value
    };
    let tokens = usual().sequences.iter().map(|s| s.action_count() as f64).sum::<f64>();
    let k3 = (-0.3f64).exp() - 1.0 + 0.3;
    let want = 0.5 * k3 * tokens / usual().sequences.len() as f64;
    for aggregate in ["token", "sequence", "constant"] {
        assert!((of(aggregate) - want).abs() < 1e-6, "{aggregate}: {} against {want}", of(aggregate));
    }
}

/// Two completions to one prompt: steps of 2 and 1 tokens with rewards 1 and 0, and one of 3 tokens with 0.5.
fn rewarded_steps() -> Experience {
    let mut e = rollout(&[3, 3], &[0.0, 0.5]);
    e.sequences[0].reward[2] = 1.0;
    e.sequences[0].steps = vec![2, 3];
    e
}

#[test]
fn process_supervision_normalises_steps_and_sums_from_each_on() {
    let mut e = rewarded_steps();
    let values =
        json!({ "kl": { "coef": 0.0 }, "advantage": { "baseline": "process", "divide_by_std": false } });
    build("grpo", values).prepare(&mut e).unwrap();
    // Rewards of steps 1, 0 and 0.5: mean 0.5. First step 0.5 + (-0.5), second -0.5, the other completion 0.
    let got: Vec<Vec<f32>> =
        e.sequences.iter().map(|s| s.actions().map(|i| s.advantage[i]).collect()).collect();
    assert_eq!(got, [vec![0.0, 0.0, -0.5], vec![0.0; 3]]);
    let mut e = rewarded_steps();
    let values = json!({ "kl": { "coef": 0.0 }, "advantage": { "baseline": "process", "gamma": 0.5 } });
    build("grpo", values).prepare(&mut e).unwrap();
    // The standard deviation of 1, 0, 0.5 is 0.5: normalised 1, -1 and 0; the first step has 1 - 0.5.
    let got: Vec<f32> = e.sequences[0].actions().map(|i| e.sequences[0].advantage[i]).collect();
    assert!(got.iter().zip([0.5, 0.5, -1.0]).all(|(a, b)| (a - b).abs() < 1e-3), "{got:?}");
}

#[test]
fn rewards_of_steps_go_through_gae_where_they_stand() {
    let mut e = rewarded_steps();
    e.sequences.iter_mut().for_each(|s| s.old_value.fill(0.25));
    let advantage = json!({ "normalise": "none", "gamma": 1.0, "lambda": 0.5 });
    build("ppo", json!({ "kl": { "coef": 0.0 }, "advantage": advantage })).prepare(&mut e).unwrap();
    // Errors 0, 1, -0.25 at the three tokens: A3 = -0.25, A2 = 1 - 0.125, A1 = 0.4375.
    let got: Vec<f32> = e.sequences[0].actions().map(|i| e.sequences[0].advantage[i]).collect();
    assert_eq!(got, [0.4375, 0.875, -0.25]);
    // The return that a group method sees is the sum.
    let mut e = rewarded_steps();
    build("rloo", json!({ "kl": { "coef": 0.0 } })).prepare(&mut e).unwrap();
    assert_eq!(e.sequences[0].advantage[1], 0.5);
    // A completion against the others, from each token on.
    let mut e = rewarded_steps();
    build("rloo", json!({ "kl": { "coef": 0.0 }, "advantage": { "to_go": true } })).prepare(&mut e).unwrap();
    let got: Vec<f32> = e.sequences[0].actions().map(|i| e.sequences[0].advantage[i]).collect();
    assert_eq!(got, [0.5, 0.5, -0.5]);
}

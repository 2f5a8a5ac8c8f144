//! Rewards by hand, the split, and that nothing of the future is seen.

use super::*;

fn options(values: Value) -> Options {
    serde_json::from_value(values).unwrap()
}

fn small() -> Options {
    options(json!({ "days": 300, "window": 3, "horizon": 6 }))
}

fn days(o: &Options, seed: u64) -> Vec<Day> {
    Synthetic { days: o.days, signal: o.signal, drift: o.drift, volatility: o.volatility }.days(seed)
}

/// Texts and rewards of an episode in which the same random player acts.
fn played(task: &Trading, index: u64, held_out: bool) -> (Vec<String>, Vec<f64>) {
    let (mut episode, mut player) = (task.play(index, held_out), TaskDraw::new("player", 3, index));
    let (mut texts, mut rewards) = (vec![episode.start().unwrap()], Vec::new());
    loop {
        let turn = episode.step(POSITIONS[player.below(3)].0).unwrap();
        let Next::Observation(text) = turn.next else { panic!("trading appends") };
        texts.push(text);
        rewards.push(turn.reward);
        if turn.end.is_some() {
            return (texts, rewards);
        }
    }
}

/// Changes every single row after the present one, its price and its headline, and plays again: observations up to now and
/// rewards before now stay the same. The observation of the last day and its reward know the last row, and no later one.
#[test]
fn no_row_of_the_future_changes_an_observation_or_a_reward_up_to_now() {
    let o = small();
    let honest = days(&o, 1);
    for held_out in [false, true] {
        for index in 0..4 {
            let task = Trading::of(honest.clone(), o.clone(), 5).unwrap();
            let (texts, rewards) = played(&task, index, held_out);
            let start = task.play(index, held_out).start;
            for row in start..(start + o.horizon + 3).min(honest.len()) {
                let mut changed = honest.clone();
                changed[row] = Day { price: changed[row].price * 1.7, headline: "a leak".into() };
                let task = Trading::of(changed, o.clone(), 5).unwrap();
                let (other_texts, other_rewards) = played(&task, index, held_out);
                // Row `start + t` is first seen in text `t`, and first pays in reward `t - 1`.
                let t = row - start;
                let (seen, paid) = (t.min(texts.len()), t.saturating_sub(1).min(rewards.len()));
                assert_eq!(other_texts[..seen], texts[..seen], "row {row} of episode {index} from {start}");
                assert_eq!(
                    other_rewards[..paid],
                    rewards[..paid],
                    "row {row} of episode {index} from {start}"
                );
                // The test can fail: the row itself is seen.
                assert!(t >= texts.len() || other_texts[t] != texts[t]);
            }
        }
    }
}

#[test]
fn training_never_touches_a_row_of_the_evaluation_and_each_fold_is_later() {
    for fold in 1..=4 {
        let o = Options { fold, ..small() };
        let honest = days(&o, 1);
        let task = Trading::of(honest.clone(), o.clone(), 5).unwrap();
        assert_eq!((task.train.clone(), task.test.clone()), (0..60 * fold, 60 * fold..60 * (fold + 1)));
        let mut changed = honest;
        changed[60 * fold..].iter_mut().for_each(|day| *day = Day { price: 1.0, headline: "later".into() });
        let other = Trading::of(changed, o, 5).unwrap();
        for index in 0..300 {
            assert_eq!(played(&task, index, false), played(&other, index, false));
            let start = task.play(index, true).start;
            assert!(start >= task.test.start + 3 && start + 6 < task.test.end, "{start}");
        }
    }
}

#[test]
fn rewards_are_the_position_times_the_return_less_costs_and_risk() {
    let prices = [100.0, 100.0, 110.0, 99.0, 99.0, 99.0, 99.0, 99.0, 99.0, 99.0];
    let market: Vec<Day> = prices.iter().map(|&price| Day { price, headline: "x".into() }).collect();
    let o = options(json!({ "window": 1, "horizon": 2, "cost": 0.01, "risk": 0.1, "folds": 1, "fold": 1 }));
    let task = Trading::of(market, o, 0).unwrap();
    let mut episode = TradingEpisode { start: 1, ..task.play(0, false) };
    assert_eq!(episode.start().unwrap(), "returns +0.0; x\n");
    let turn = episode.step("I go LONG.").unwrap();
    assert_eq!(turn.next, Next::Observation("\n+10.0; x\n".into()));
    assert!((turn.reward - (10.0 - 1.0 - 0.05 * 100.0)).abs() < 1e-9, "{}", turn.reward);
    let turn = episode.step("not long but short").unwrap();
    assert!((turn.reward - (10.0 - 2.0 - 0.05 * 100.0)).abs() < 1e-9, "{}", turn.reward);
    assert_eq!((turn.end, turn.score), (Some(EpisodeEnd::Terminated), Some(1.0)));
    assert!((turn.extra["net_return"].as_f64().unwrap() - 17.0).abs() < 1e-9);
    // Long on both days: 10 - 1 - 5, then -10 - 5.
    assert!((turn.extra["buy_and_hold"].as_f64().unwrap() + 11.0).abs() < 1e-9);
    let mut silent = TradingEpisode { start: 1, ..task.play(0, false) };
    assert_eq!(silent.step("hmm").unwrap().reward, -UNREAD);
}

#[test]
fn a_random_player_earns_on_average_what_the_column_says() {
    let task = Trading::new(small(), 2).unwrap();
    let expected = task.play(0, true).random_player();
    let mean: f64 = (0..4000)
        .map(|i| {
            let mut episode = TradingEpisode { draw: TaskDraw::new("many", 1, i), ..task.play(0, true) };
            (0..6)
                .map(|_| {
                    let a = episode.random_action().unwrap();
                    episode.step(&a).unwrap().reward
                })
                .sum::<f64>()
        })
        .sum::<f64>()
        / 4000.0;
    assert!((mean - expected).abs() < 0.15, "{mean} and {expected}");
}

/// Share of the next return's variance that good and bad headlines explain.
fn explained(days: &[Day]) -> f64 {
    let pairs: Vec<(f64, f64)> = days
        .windows(2)
        .map(|w| {
            let good = ["beats", "raises", "wins", "opens", "cuts", "gains"];
            let news = if good.iter().any(|word| w[0].headline.contains(word)) { 1.0 } else { -1.0 };
            (news, w[1].price / w[0].price - 1.0)
        })
        .collect();
    let n = pairs.len() as f64;
    let mean = |f: &dyn Fn(&(f64, f64)) -> f64| pairs.iter().map(f).sum::<f64>() / n;
    let (x, y) = (mean(&|p| p.0), mean(&|p| p.1));
    let covariance = mean(&|p| (p.0 - x) * (p.1 - y));
    covariance.powi(2) / mean(&|p| (p.0 - x).powi(2)) / mean(&|p| (p.1 - y).powi(2))
}

#[test]
fn headlines_explain_the_share_they_are_set_to_and_shuffled_ones_nothing() {
    let o = Options { days: 20_000, ..small() };
    let market = days(&o, 4);
    assert!((explained(&market) - 0.1).abs() < 0.015, "{}", explained(&market));
    let placebo = Trading::of(market, Options { shuffle_headlines: true, ..o.clone() }, 4).unwrap();
    assert!(explained(&placebo.days) < 0.001, "{}", explained(&placebo.days));
    let error = (ENTRY.build)(json!({ "signal": 0.2 }).as_object().unwrap(), 0).err().unwrap().to_string();
    assert!(error.contains("signal"), "{error}");
}

#[test]
fn following_the_headlines_beats_holding_and_chance_after_costs() {
    let task = Trading::new(Options { days: 20_000, horizon: 10, ..small() }, 1).unwrap();
    let (mut follow, mut hold, mut random) = (0.0, 0.0, 0.0);
    for index in 0..300 {
        let mut episode = task.play(index, true);
        hold += episode.buy_and_hold();
        random += episode.random_player();
        loop {
            let good = explained_word(episode.past().headline());
            let turn = episode.step(if good { "long" } else { "short" }).unwrap();
            follow += turn.reward;
            if turn.end.is_some() {
                break;
            }
        }
    }
    assert!(follow > hold + 300.0 && follow > random + 300.0, "{follow}, {hold}, {random}");
}

fn explained_word(headline: &str) -> bool {
    ["beats", "raises", "wins", "opens", "cuts", "gains"].iter().any(|word| headline.contains(word))
}

#[test]
fn files_are_read_and_headlines_meet_the_first_close_after_them() {
    let dir = tempfile::tempdir().unwrap();
    let write = |name: &str, text: &str| {
        let path = dir.path().join(name);
        std::fs::write(&path, text).unwrap();
        path
    };
    let prices = write("p.csv", "date,close\n2024-01-05,10\n2024-01-08,11\n2024-01-09,12.5\n");
    let news = write(
        "n.csv",
        "date,headline\n2024-01-06,weekend news\n2024-01-08,monday news\n2024-02-01,too late\n",
    );
    let read = market::read(&prices, Some(&news)).unwrap();
    let of = |price: f64, headline: &str| Day { price, headline: headline.into() };
    assert_eq!(read, [of(10.0, ""), of(11.0, "weekend news; monday news"), of(12.5, "")]);
    let late = write("late.csv", "date,close\n2024-01-05,10\n2024-01-04,11\n");
    assert!(market::read(&late, None).unwrap_err().to_string().contains("late.csv:3"));
    let free = write("free.csv", "date,close\n2024-01-05,0\n");
    assert!(market::read(&free, None).unwrap_err().to_string().contains("positive `close`"));
    let error = Trading::new(options(json!({ "prices": prices })), 0).err().unwrap().to_string();
    assert!(error.contains("3 days in 5 blocks"), "{error}");
}

#[test]
fn episodes_repeat_by_seed_and_their_prompt_is_the_example() {
    let task = Trading::new(small(), 9).unwrap();
    for index in 0..20 {
        for held_out in [false, true] {
            let example = task.example(index, held_out).unwrap();
            assert_eq!(example, Trading::new(small(), 9).unwrap().example(index, held_out).unwrap());
            assert_eq!(example.prompt, task.play(index, held_out).start().unwrap());
            assert_eq!(example.turns.len(), 6);
        }
    }
    assert_ne!(
        task.example(0, false).unwrap(),
        Trading::new(small(), 10).unwrap().example(0, false).unwrap()
    );
}

#[test]
fn demonstrations_with_hindsight_take_the_better_side() {
    let task = Trading::new(Options { hindsight: 1.0, cost: 0.0, risk: 0.0, ..small() }, 9).unwrap();
    for index in 0..20 {
        let (example, mut episode) = (task.example(index, false).unwrap(), task.play(index, false));
        assert_eq!(episode.start().unwrap(), example.prompt);
        for (action, shown) in &example.turns {
            let turn = episode.step(action).unwrap();
            assert!(turn.reward >= 0.0 && turn.next == Next::Observation(shown.clone()));
        }
    }
}

//! Trading one asset: each day the policy reads the last returns and the day's headline, and is short, flat or long until the
//! next close. The reward of a day, in percent, is `r - cost * |change of position| - risk / 2 * r^2` with `r` the position
//! times the asset's return: mean-variance utility after costs.
//!
//! Days are split walk-forward: with `folds` and `fold`, the time line has `folds + 1` equal blocks, training plays in
//! the first `fold` of them and evaluations in the next. An episode never shows a row after its current day: observations are
//! made from the [`Past`] alone. Demonstrations of training days may use the next return (`hindsight`). `score` is 1 if the episode
//! earned more than buying and holding.

mod market;

use super::{Environment, EpisodeEnd, Next, Turn, demonstrate};
use crate::env;
use crate::task::{Entry, Task, TaskExample, options};
use crate::verify::countdown::TaskDraw;
use ferrl_engine::{Error, Result};
use market::{Day, Synthetic};
use schemars::schema_for;
use serde_json::{Map, Value, json};
use std::ops::Range;
use std::path::Path;
use std::sync::Arc;

pub(crate) const ENTRY: Entry = Entry {
    name: "trading",
    about: "trade one asset (short, flat or long) by prices and headlines: risk-adjusted return after costs",
    schema: || schema_for!(Options),
    build: |values, seed| Ok(Box::new(Trading::new(options(values)?, seed)?)),
};

with_defaults! {
struct Options {
    /// CSV of days in order: `close` or `price`, `headline`, `date`; unset generates a market.
    prices: Option<String> = None,
    /// CSV of headlines with `date` and `headline`, if the prices have none.
    headlines: Option<String> = None,
    /// Returns shown at the start of an episode. [1, 1000]
    window: usize = 5,
    /// Days of an episode. [1, 10000]
    horizon: usize = 20,
    /// Cost of a change of position by one, as a fraction of its value. [0, 1]
    cost: f64 = 0.0005,
    /// Risk aversion: weight of the squared daily return, in percent. [0, 1000]
    risk: f64 = 0.02,
    /// Number of walk-forward folds: equal blocks after the first. [1, 100]
    folds: usize = 4,
    /// The fold: its block is for evaluations, the blocks before it are for training. [1, 100]
    fold: usize = 4,
    /// Placebo: shuffle the headlines, separately for training and evaluations.
    shuffle_headlines: bool = false,
    /// Fraction of demonstrated positions that are chosen with the next return; the others are random. [0, 1]
    hindsight: f64 = 0.0,
    /// Days of a generated market. [100, 10000000]
    days: usize = 5000,
    /// Fraction of the next return's variance that a generated headline explains. [0, 0.1]
    signal: f64 = 0.1,
    /// Mean daily return of a generated market. [-0.1, 0.1]
    drift: f64 = 0.0002,
    /// Standard deviation of daily returns of a generated market. (0, 0.1]
    volatility: f64 = 0.01,
}
}

struct Trading {
    days: Arc<[Day]>,
    train: Range<usize>,
    test: Range<usize>,
    seed: u64,
    o: Options,
}

impl Trading {
    fn new(o: Options, seed: u64) -> Result<Self> {
        let days = match (&o.prices, &o.headlines) {
            (Some(prices), headlines) => market::read(Path::new(prices), headlines.as_ref().map(Path::new))?,
            (None, Some(_)) => {
                return Err(Error::usage("headlines without prices")
                    .at("data.task.prices")
                    .fix("data.task.prices = \"prices.csv\""));
            }
            (None, None) => {
                let Options { days, signal, drift, volatility, .. } = o;
                Synthetic { days, signal, drift, volatility }.days(seed)
            }
        };
        Self::of(days, o, seed)
    }

    fn of(mut days: Vec<Day>, o: Options, seed: u64) -> Result<Self> {
        if o.fold > o.folds {
            return Err(Error::usage(format!("fold {} of {}", o.fold, o.folds))
                .at("data.task.fold")
                .fix(format!("data.task.fold = {}", o.folds)));
        }
        let edge = |block: usize| days.len() * block / (o.folds + 1);
        let (train, test) = (0..edge(o.fold), edge(o.fold)..edge(o.fold + 1));
        let least = o.window + o.horizon + 1;
        if train.len().min(test.len()) < least {
            let what = format!(
                "{} days in {} blocks leave less than window + horizon + 1 = {least}",
                days.len(),
                o.folds + 1
            );
            let place = o.prices.clone().unwrap_or_else(|| "data.task.days".into());
            return Err(Error::data(what)
                .at(place)
                .fix("more days, fewer folds, or a shorter window or horizon"));
        }
        if o.shuffle_headlines {
            market::shuffle(&mut days[train.clone()], seed);
            market::shuffle(&mut days[test.clone()], seed);
        }
        Ok(Trading { days: days.into(), train, test, seed, o })
    }

    /// Training episodes start anywhere in the earlier blocks; those of evaluations are consecutive.
    fn play(&self, index: u64, held_out: bool) -> TradingEpisode {
        let stream = if held_out { "trading held out" } else { "trading" };
        let mut draw = TaskDraw::new(stream, self.seed, index);
        let Options { window, horizon, cost, risk, .. } = self.o;
        // The first day that acts has `window` returns before it; the last has a close after it.
        let starts = |part: &Range<usize>| part.len() - window - horizon;
        let start = match held_out {
            false => self.train.start + window + draw.below(starts(&self.train)),
            true => {
                let windows = starts(&self.test).div_ceil(horizon);
                self.test.start + window + index as usize % windows * horizon
            }
        };
        let rules = TradingRules { window, horizon, cost, risk };
        TradingEpisode {
            days: self.days.clone(),
            start,
            rules,
            turn: 0,
            position: 0,
            earned: Vec::new(),
            utility: 0.0,
            draw,
        }
    }
}

impl Task for Trading {
    fn example(&self, index: u64, held_out: bool) -> Result<TaskExample> {
        let mut episode = self.play(index, held_out);
        let mut columns = Map::new();
        columns.insert("episode".into(), index.into());
        columns.insert("buy_and_hold".into(), json!(episode.buy_and_hold()));
        columns.insert("random".into(), json!(episode.random_player()));
        demonstrate(&mut episode, columns, |episode| Some(episode.demonstration(self.o.hindsight)))
    }

    fn episode(&self, index: u64, held_out: bool) -> Option<Box<dyn Environment>> {
        Some(Box::new(self.play(index, held_out)))
    }
}

#[derive(Clone, Copy)]
struct TradingRules {
    window: usize,
    horizon: usize,
    cost: f64,
    risk: f64,
}

impl TradingRules {
    /// Net return of a day and its reward, both in percent.
    fn reward(&self, change: f64, position: i32, before: i32) -> (f64, f64) {
        let gross = 100.0 * f64::from(position) * change;
        let net = gross - 100.0 * self.cost * f64::from((position - before).abs());
        (net, net - self.risk / 2.0 * gross * gross)
    }
}

/// All rows up to the current day, and none after it.
struct Past<'a>(&'a [Day]);

impl Past<'_> {
    /// Return of the day `back` days ago, in percent.
    fn change(&self, back: usize) -> f64 {
        let last = self.0.len() - 1 - back;
        100.0 * (self.0[last].price / self.0[last - 1].price - 1.0)
    }

    fn headline(&self) -> &str {
        self.0.last().map_or("", |day| day.headline.as_str())
    }

    fn first(&self, window: usize) -> String {
        let changes: Vec<String> =
            (0..window).rev().map(|back| format!("{:+.1}", self.change(back))).collect();
        format!("returns {}; {}\n", changes.join(" "), self.headline())
    }

    fn next(&self) -> String {
        format!("\n{:+.1}; {}\n", self.change(0), self.headline())
    }
}

const POSITIONS: [(&str, i32); 3] = [("short", -1), ("flat", 0), ("long", 1)];

/// The last position that a text names.
fn position(action: &str) -> Option<i32> {
    let words = action.split(|c: char| !c.is_alphabetic()).filter(|word| !word.is_empty());
    let named = |word: &str| POSITIONS.iter().find(|(name, _)| word.eq_ignore_ascii_case(name));
    words.filter_map(named).next_back().map(|(_, position)| *position)
}

/// Cost, in percent, of an action without a position; the position is kept.
const UNREAD: f64 = 0.1;

struct TradingEpisode {
    days: Arc<[Day]>,
    /// The first day that acts.
    start: usize,
    rules: TradingRules,
    turn: usize,
    position: i32,
    /// Sum of the net returns so far, in percent.
    earned: Vec<f64>,
    /// Sum of the rewards so far.
    utility: f64,
    draw: TaskDraw,
}

impl TradingEpisode {
    fn past(&self) -> Past<'_> {
        Past(&self.days[..=self.start + self.turn])
    }

    /// Return of the asset on day `turn` of the episode.
    fn change(&self, turn: usize) -> f64 {
        let day = self.start + turn;
        self.days[day + 1].price / self.days[day].price - 1.0
    }

    /// The return of buying on the first day and holding.
    fn buy_and_hold(&self) -> f64 {
        let day = |turn| self.rules.reward(self.change(turn), 1, i32::from(turn > 0)).1;
        (0..self.rules.horizon).map(day).sum()
    }

    /// The expected return of a player with uniformly random positions.
    fn random_player(&self) -> f64 {
        let mean = |turn: usize| {
            let before: &[i32] = if turn == 0 { &[0] } else { &[-1, 0, 1] };
            let pairs = before.iter().flat_map(|b| [-1, 0, 1].map(|p| (*b, p)));
            let rewards: Vec<f64> =
                pairs.map(|(b, p)| self.rules.reward(self.change(turn), p, b).1).collect();
            rewards.iter().sum::<f64>() / rewards.len() as f64
        };
        (0..self.rules.horizon).map(mean).sum()
    }

    /// With probability `hindsight` the position with the sign of the next return, else a random one.
    fn demonstration(&mut self, hindsight: f64) -> String {
        let knows = self.draw.chance(hindsight);
        let position = match (knows, self.change(self.turn) > 0.0) {
            (true, true) => 2,
            (true, false) => 0,
            (false, _) => self.draw.below(3),
        };
        POSITIONS[position].0.to_string()
    }

    fn extra(&self) -> Map<String, Value> {
        let n = self.earned.len() as f64;
        let mean = self.earned.iter().sum::<f64>() / n;
        let variance = self.earned.iter().map(|r| (r - mean).powi(2)).sum::<f64>() / n;
        let sharpe = if variance > 0.0 { mean / variance.sqrt() * 252f64.sqrt() } else { 0.0 };
        let mut extra = Map::new();
        extra.insert("net_return".into(), json!(mean * n));
        extra.insert("sharpe".into(), json!(sharpe));
        extra.insert("buy_and_hold".into(), json!(self.buy_and_hold()));
        extra
    }
}

impl Environment for TradingEpisode {
    fn start(&mut self) -> env::Result<String> {
        Ok(self.past().first(self.rules.window))
    }

    fn step(&mut self, action: &str) -> env::Result<Turn> {
        let named = position(action);
        let (before, position) = (self.position, named.unwrap_or(self.position));
        let (net, mut reward) = self.rules.reward(self.change(self.turn), position, before);
        reward -= if named.is_none() { UNREAD } else { 0.0 };
        self.position = position;
        self.earned.push(net);
        self.utility += reward;
        self.turn += 1;
        let next = Next::Observation(self.past().next());
        if self.turn < self.rules.horizon {
            return Ok(Turn { next, reward, ..Default::default() });
        }
        let extra = self.extra();
        let better = f64::from(u8::from(self.utility > self.buy_and_hold()));
        Ok(Turn {
            next,
            reward,
            score: Some(better),
            end: Some(EpisodeEnd::Terminated),
            extra,
            ..Default::default()
        })
    }

    fn random_action(&mut self) -> Option<String> {
        Some(POSITIONS[self.draw.below(3)].0.to_string())
    }
}

#[cfg(test)]
mod tests;

//! A series of prices with headlines: from CSV files, or generated from a seed.

use crate::data::{columns_of, each_row};
use crate::verify::countdown::TaskDraw;
use ferrl_engine::{Error, Result};
use serde_json::Value;
use std::path::Path;

/// One row of a market: information at its close.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Day {
    pub price: f64,
    /// Published before the close; may be empty.
    pub headline: String,
}

/// Parameters of a generated market.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct Synthetic {
    pub days: usize,
    /// Fraction of the next return's variance that a headline explains.
    pub signal: f64,
    /// Mean and standard deviation of a daily return.
    pub drift: f64,
    pub volatility: f64,
}

const SUBJECTS: [&str; 8] = ["Acme", "Bolt", "Cobalt", "Delta", "Ember", "Fjord", "Glade", "Harbor"];
const GOOD: [&str; 6] = [
    "beats forecasts", "raises outlook", "wins big order", "opens new plant", "cuts debt",
    "gains market share",
];
const BAD: [&str; 6] = [
    "misses forecasts", "lowers outlook", "loses big order", "closes old plant", "adds debt", "faces lawsuit",
];

/// A number with mean 0 and variance 1: the sum of twelve uniform ones minus 6.
fn normal(draw: &mut TaskDraw) -> f64 {
    let sum: f64 = (0..12).map(|_| (f64::from(draw.word()) + 0.5) / 4_294_967_296.0).sum();
    sum - 6.0
}

impl Synthetic {
    /// Generates days. The headline of a day is good or bad news about the next return.
    pub(super) fn days(&self, seed: u64) -> Vec<Day> {
        let (mut price, mut days) = (100.0f64, Vec::with_capacity(self.days));
        for day in 0..self.days {
            let mut draw = TaskDraw::new("trading market", seed, day as u64);
            let good = draw.chance(0.5);
            let words = if good { GOOD } else { BAD };
            let headline = format!("{} {}", SUBJECTS[draw.below(8)], words[draw.below(6)]);
            days.push(Day { price, headline });
            let news = if good { 1.0 } else { -1.0 };
            let shock = self.signal.sqrt() * news + (1.0 - self.signal).sqrt() * normal(&mut draw);
            // A return of minus one would end the market.
            price *= 1.0 + (self.drift + self.volatility * shock).max(-0.5);
        }
        days
    }
}

/// Days of a file with `close` or `price`, and optionally `headline`. `headlines` is a second file with `date` and `headline`:
/// each belongs to the first day whose close it precedes.
pub(super) fn read(prices: &Path, headlines: Option<&Path>) -> Result<Vec<Day>> {
    let (mut days, mut dates) = (Vec::new(), Vec::new());
    each_row(prices, |place, row| {
        let price = ["close", "price", "Close", "Price"].iter().find_map(|name| row.get(*name));
        let price = price.and_then(Value::as_f64).filter(|p| p.is_finite() && *p > 0.0).ok_or_else(|| {
            let there = columns_of(&row);
            Error::data(format!("a row needs a positive `close` or `price`; it has {there}")).at(place)
        })?;
        let headline = row.get("headline").and_then(Value::as_str).unwrap_or_default().trim().to_string();
        let date = row.get("date").or_else(|| row.get("Date")).and_then(Value::as_str).unwrap_or_default();
        if let Some(last) = dates.last().filter(|last: &&String| !date.is_empty() && date <= last.as_str()) {
            return Err(Error::data(format!("date {date} comes after {last}"))
                .at(place)
                .fix("sort the rows by date, each once, as YYYY-MM-DD"));
        }
        dates.push(date.to_string());
        days.push(Day { price, headline });
        Ok(())
    })?;
    let Some(headlines) = headlines else { return Ok(days) };
    if dates.iter().any(String::is_empty) {
        return Err(
            Error::data("with a file of headlines every row here needs a `date`").at(prices.display())
        );
    }
    each_row(headlines, |place, row| {
        let of = |name: &str| row.get(name).and_then(Value::as_str).map(str::trim);
        let (Some(date), Some(text)) = (of("date").or_else(|| of("Date")), of("headline")) else {
            return Err(Error::data("a row needs `date` and `headline`").at(place));
        };
        // Headlines after the last close are not used.
        let day = dates.partition_point(|known| known.as_str() < date);
        if let Some(Day { headline, .. }) = days.get_mut(day) {
            *headline = if headline.is_empty() { text.to_string() } else { format!("{headline}; {text}") };
        }
        Ok(())
    })?;
    Ok(days)
}

/// The headlines of a range of days in a random order, for a placebo.
pub(super) fn shuffle(days: &mut [Day], seed: u64) {
    let mut draw = TaskDraw::new("trading shuffle", seed, days.len() as u64);
    for i in (1..days.len()).rev() {
        let j = draw.below(i + 1);
        let (left, right) = days.split_at_mut(i);
        if let (Some(a), Some(b)) = (left.get_mut(j), right.first_mut()) {
            std::mem::swap(&mut a.headline, &mut b.headline);
        }
    }
}

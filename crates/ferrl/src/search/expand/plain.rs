//! Independent draws, at one temperature or two, to a depth, with several system messages.

use super::{ChildDraw, Drawn, Expander, missing};
use crate::verify::Options;
use ferrl_engine::{Error, Result};

struct Iid;

pub(super) fn iid(_: &Options<'_>) -> Result<Box<dyn Expander>> {
    Ok(Box::new(Iid))
}

impl Expander for Iid {
    fn draws(&self, so_far: &Drawn<'_>) -> Vec<ChildDraw> {
        vec![ChildDraw::default(); missing(so_far)]
    }
}

struct MaxDepth(usize);

pub(super) fn max_depth(options: &Options<'_>) -> Result<Box<dyn Expander>> {
    Ok(Box::new(MaxDepth(options.size("branch_depth", 2, 0..=4096)? as usize)))
}

impl Expander for MaxDepth {
    fn draws(&self, so_far: &Drawn<'_>) -> Vec<ChildDraw> {
        match so_far.depth < self.0 {
            true => vec![ChildDraw::default(); missing(so_far)],
            false if so_far.draws == 0 => vec![ChildDraw { to_the_end: true, ..Default::default() }],
            false => Vec::new(),
        }
    }
}

struct HighLow {
    high: f32,
    low: f32,
}

pub(super) fn high_low(options: &Options<'_>) -> Result<Box<dyn Expander>> {
    let temperature = |key: &str, default: f64| options.between(key, default, 1e-4..=100.0).map(|t| t as f32);
    Ok(Box::new(HighLow { high: temperature("high", 1.0)?, low: temperature("low", 0.35)? }))
}

impl Expander for HighLow {
    /// The first half is high; of an odd number the one more is.
    fn draws(&self, so_far: &Drawn<'_>) -> Vec<ChildDraw> {
        let high = so_far.asked.samples.div_ceil(2);
        let draw = |i: usize| ChildDraw {
            temperature: Some(if i < high { self.high } else { self.low }),
            ..Default::default()
        };
        (so_far.draws..so_far.asked.samples).map(draw).collect()
    }
}

struct Systems(Vec<String>);

pub(super) fn systems(options: &Options<'_>) -> Result<Box<dyn Expander>> {
    let systems = options.texts("systems", &[])?;
    if systems.is_empty() {
        return Err(Error::usage("iid_with_different_system_message needs system messages")
            .at("systems")
            .fix("--option 'systems=[\"Be brief.\", \"Think step by step.\"]'"));
    }
    Ok(Box::new(Systems(systems)))
}

impl Expander for Systems {
    fn draws(&self, so_far: &Drawn<'_>) -> Vec<ChildDraw> {
        let turn = |i: usize| (so_far.depth == 0).then(|| i % self.0.len());
        let draw = |i: usize| ChildDraw { system: turn(i), ..Default::default() };
        (so_far.draws..so_far.asked.samples).map(draw).collect()
    }
    fn systems(&self) -> &[String] {
        &self.0
    }
}

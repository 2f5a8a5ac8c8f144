//! Expanders with independent samples: at one temperature or two, to a maximum depth, with several system messages.

use super::{ChildDraw, Drawn, Expander, ExpanderOptions, missing};
use ferrl_engine::{Error, Result};

struct Iid;

pub(super) fn iid(_: &ExpanderOptions) -> Result<Box<dyn Expander>> {
    Ok(Box::new(Iid))
}

impl Expander for Iid {
    fn draws(&self, so_far: &Drawn<'_>) -> Vec<ChildDraw> {
        vec![ChildDraw::default(); missing(so_far)]
    }
}

struct MaxDepth(usize);

pub(super) fn max_depth(options: &ExpanderOptions) -> Result<Box<dyn Expander>> {
    Ok(Box::new(MaxDepth(options.branch_depth)))
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

pub(super) fn high_low(options: &ExpanderOptions) -> Result<Box<dyn Expander>> {
    Ok(Box::new(HighLow { high: options.high as f32, low: options.low as f32 }))
}

impl Expander for HighLow {
    /// The first half, rounded up, at the high temperature.
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

pub(super) fn systems(options: &ExpanderOptions) -> Result<Box<dyn Expander>> {
    if options.systems.is_empty() {
        return Err(Error::usage("iid_with_different_system_message needs system messages")
            .at("systems")
            .fix("systems = [\"Be brief.\", \"Think step by step.\"]"));
    }
    Ok(Box::new(Systems(options.systems.clone())))
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

//! Changes of settings with which a stage fits.

use super::memory::{self, is_f32};
use super::show::size;
use super::{Inputs, Plan, StagePlan};
use crate::recipe::AdapterSettings;
use ferrl_engine::Error;
use ferrl_kernels::DType;

/// A setting and its new value, as on the command line.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Change {
    /// `key=value`
    pub text: String,
    /// Bytes at the peak with it.
    pub bytes: u64,
}

/// Bytes at the peak: of one process, or of a rank in some layout.
pub(super) type PeakOf<'a> = &'a dyn Fn(&Inputs) -> u64;

fn of_one(i: &Inputs) -> u64 {
    memory::parts(i).iter().map(|p| p.bytes).sum()
}

/// The largest micro-batch that fits, in steps of 256 tokens and at least the longest sequence (or pair).
fn fewer_tokens(i: &Inputs, bytes: PeakOf<'_>, available: u64) -> Option<(usize, Inputs)> {
    let longest = i.lengths.longest * if i.feed.paired() { 2 } else { 1 };
    let with = |tokens: usize| {
        let mut now = i.clone();
        now.recipe.train.micro_batch_tokens = tokens;
        now
    };
    let least = longest.next_multiple_of(64).max(64);
    let most = i.micro_tokens().next_multiple_of(256);
    // Steps down from there; fewer tokens never take more memory.
    let tokens = |step: usize| most.saturating_sub(256 * step).max(least);
    let (mut low, mut high) = (1, most.saturating_sub(least).div_ceil(256));
    if high == 0 || bytes(&with(tokens(high))) > available {
        return None;
    }
    while low < high {
        let middle = (low + high) / 2;
        if bytes(&with(tokens(middle))) <= available { high = middle } else { low = middle + 1 }
    }
    Some((tokens(high), with(tokens(high))))
}

fn recompute(i: &Inputs) -> Option<Inputs> {
    let mut now = i.clone();
    now.recipe.model.recompute = true;
    (!i.recipe.model.recompute).then_some(now)
}

fn half(i: &Inputs) -> Option<Inputs> {
    let mut now = i.clone();
    now.recipe.model.dtype = Some(DType::Bf16.name().into());
    is_f32(i).then_some(now)
}

/// 8-bit moments, unless they are few (an adapter's).
fn eight_bits(i: &Inputs) -> Option<Inputs> {
    let mut now = i.clone();
    now.recipe.optim.name = "adamw8".into();
    (i.recipe.optim.name == "adamw" && i.recipe.adapter.is_none()).then_some(now)
}

/// Offloaded moments, if the device has its own memory.
fn offload(i: &Inputs, bytes: PeakOf<'_>) -> Option<Inputs> {
    let mut now = i.clone();
    now.recipe.optim.offload = "moments".into();
    (i.device.own_memory && !i.recipe.optim.offloads() && bytes(&now) < bytes(i)).then_some(now)
}

/// Another storage of the base weights.
fn base(i: &Inputs, bytes: PeakOf<'_>, home: &str) -> Option<Inputs> {
    let mut now = i.clone();
    now.recipe.adapter.as_mut()?.base = home.into();
    (bytes(&now) < bytes(i)).then_some(now)
}

/// The largest cache that fits, of at least 16 MiB.
fn smaller_cache(i: &Inputs, bytes: PeakOf<'_>, available: u64) -> Option<(usize, Inputs)> {
    let over = bytes(i).saturating_sub(available).div_ceil(1 << 20) as usize;
    let mib = i.recipe.rollout.cache_mib.saturating_sub(over + over / 8);
    let mut now = i.clone();
    now.recipe.rollout.cache_mib = mib;
    let samples = i.feed.sampled() || i.evaluates();
    (samples && mib >= 16 && bytes(&now) <= available).then_some((mib, now))
}

/// The KV cache freed while the policy trains.
fn release_cache(i: &Inputs, bytes: PeakOf<'_>) -> Option<Inputs> {
    let mut now = i.clone();
    now.recipe.rollout.release_cache = true;
    (i.feed.sampled() && !i.recipe.rollout.release_cache && bytes(&now) < bytes(i)).then_some(now)
}

/// A cache of 64 MiB.
fn least_cache(i: &Inputs) -> Option<Inputs> {
    let mut now = i.clone();
    now.recipe.rollout.cache_mib = 64;
    ((i.feed.sampled() || i.evaluates()) && i.recipe.rollout.cache_mib > 64).then_some(now)
}

/// Offloads the reference to host memory between uses.
fn park_reference(i: &Inputs, bytes: PeakOf<'_>) -> Option<Inputs> {
    let mut now = i.clone();
    now.recipe.reference.offload = true;
    (bytes(&now) < bytes(i)).then_some(now)
}

/// The teacher, likewise.
fn park_teacher(i: &Inputs, bytes: PeakOf<'_>) -> Option<Inputs> {
    let mut now = i.clone();
    now.recipe.teacher.offload = true;
    (bytes(&now) < bytes(i)).then_some(now)
}

/// Reward models, likewise.
fn park_rewards(i: &Inputs, bytes: PeakOf<'_>) -> Option<Proposal> {
    let (mut now, mut texts) = (i.clone(), Vec::new());
    for (n, reward) in now.recipe.reward.iter_mut().enumerate() {
        if !reward.offload && reward.model_paths().next().is_some() {
            reward.offload = true;
            texts.push(format!("reward.{n}.offload=true"));
        }
    }
    now.judges.iter_mut().for_each(|(_, offload)| *offload = true);
    (bytes(&now) < bytes(i)).then(|| (texts.join(" "), now))
}

/// Settings as on the command line, and what is planned with them.
type Proposal = (String, Inputs);

/// A change that saves memory; `None` if it has no effect.
type Saving = fn(&Inputs, PeakOf<'_>) -> Option<Proposal>;

fn set(text: &str, now: Option<Inputs>) -> Option<Proposal> {
    now.map(|now| (text.to_string(), now))
}

/// Single changes with which the stage fits; if there are none, a combination, if that fits.
pub fn changes(i: &Inputs, available: u64) -> Vec<Change> {
    changes_of(i, &of_one, available)
}

/// The same by another measure.
pub(super) fn changes_of(i: &Inputs, bytes: PeakOf<'_>, available: u64) -> Vec<Change> {
    let mut out = single_changes(i, bytes, available);
    out.retain(|c| c.bytes <= available);
    if out.is_empty() {
        out.extend(Some(combined_change(i, bytes, available)).filter(|c| c.bytes <= available));
    }
    out
}

/// Each setting that saves memory, alone.
fn single_changes(i: &Inputs, bytes: PeakOf<'_>, available: u64) -> Vec<Change> {
    let tokens =
        fewer_tokens(i, bytes, available).map(|(n, now)| (format!("train.micro_batch_tokens={n}"), now));
    let cache =
        smaller_cache(i, bytes, available).map(|(mib, now)| (format!("rollout.cache_mib={mib}"), now));
    let all = [
        tokens,
        set("model.recompute=true", recompute(i)),
        cache,
        set("rollout.release_cache=true", release_cache(i, bytes)),
        set("model.dtype=bf16", half(i)),
        set("reference.offload=true", park_reference(i, bytes)),
        set("teacher.offload=true", park_teacher(i, bytes)),
        park_rewards(i, bytes),
        set("optim.name=adamw8", eight_bits(i)),
        set("optim.offload=moments", offload(i, bytes)),
        set("adapter.base=host", base(i, bytes, "host")),
        set("adapter.base=nf4", base(i, bytes, "nf4")),
    ];
    all.into_iter().flatten().map(|(text, now)| Change { text, bytes: bytes(&now) }).collect()
}

/// bf16, activation checkpointing and a small cache, then more as needed; settings that change results last: 8-bit moments and an NF4
/// base.
fn combined_change(i: &Inputs, bytes: PeakOf<'_>, available: u64) -> Change {
    let savings: [(bool, Saving); 11] = [
        (true, |i, _| set("model.dtype=bf16", half(i))),
        (true, |i, _| set("model.recompute=true", recompute(i))),
        (true, |i, _| set("rollout.cache_mib=64", least_cache(i))),
        (false, |i, b| set("rollout.release_cache=true", release_cache(i, b))),
        (false, |i, b| set("reference.offload=true", park_reference(i, b))),
        (false, |i, b| set("teacher.offload=true", park_teacher(i, b))),
        (false, park_rewards),
        (false, |i, b| set("adapter.base=host", base(i, b, "host"))),
        (false, |i, b| set("optim.offload=moments", offload(i, b))),
        (false, |i, _| set("optim.name=adamw8", eight_bits(i))),
        (false, |i, b| set("adapter.base=nf4", base(i, b, "nf4"))),
    ];
    let fits = |i: &Inputs| bytes(i) <= available || fewer_tokens(i, bytes, available).is_some();
    let (mut now, mut texts) = (i.clone(), Vec::new());
    for (always, saving) in savings {
        if (always || !fits(&now))
            && let Some((text, next)) = saving(&now, bytes)
        {
            texts.push(text);
            now = next;
        }
    }
    if bytes(&now) > available
        && let Some((tokens, next)) = fewer_tokens(&now, bytes, available)
    {
        texts.push(format!("train.micro_batch_tokens={tokens}"));
        now = next;
    }
    Change { text: texts.join(" "), bytes: bytes(&now) }
}

/// What trains otherwise and fits, where no setting that saves memory suffices: an adapter, or an optimizer without moments.
pub(super) fn other_training(i: &Inputs, bytes: PeakOf<'_>, available: u64) -> Vec<Change> {
    if i.recipe.adapter.is_some() {
        return Vec::new();
    }
    let mut adapted = i.clone();
    adapted.recipe.adapter = (!i.recipe.model.train_router).then(AdapterSettings::default);
    let mut plain = i.clone();
    plain.recipe.optim.name = "sgd".into();
    let adapted = adapted.recipe.adapter.is_some().then_some(("adapter.r=32", adapted));
    let with = |(text, now): (&str, Inputs)| {
        let more = combined_change(&now, bytes, available);
        Change { text: format!("{text} {}", more.text).trim_end().into(), ..more }
    };
    adapted
        .into_iter()
        .chain([("optim.name=sgd", plain)])
        .map(with)
        .filter(|c| c.bytes <= available)
        .collect()
}

/// Changes and the bytes with each.
pub(super) fn listed(stage: &StagePlan, all: &[Change]) -> String {
    let each = |c: &Change| format!("{} ({})", stage.own_names(&c.text), size(c.bytes));
    all.iter().map(each).collect::<Vec<_>>().join(", or ")
}

/// The error for a stage that does not fit.
pub fn refusal(stage: &StagePlan, available: u64) -> Error {
    let largest = stage.parts.iter().max_by_key(|p| p.bytes);
    let largest =
        largest.map_or(String::new(), |p| format!("; the largest part is {} ({})", p.name, size(p.bytes)));
    let what = format!(
        "{} needs about {} of memory, {} is available{largest}",
        stage.name,
        size(stage.bytes()),
        size(available)
    );
    let list = |all: &[Change]| listed(stage, all);
    let found = changes(&stage.inputs, available);
    let fix = match &found[..] {
        [] => {
            let fixed = ["weights", "gradients", "optimizer", "reference", "teacher", "rewards", "average"];
            let fixed = stage.parts.iter().filter(|p| fixed.contains(&p.name)).map(|p| p.bytes).sum();
            let others = other_training(&stage.inputs, &of_one, available);
            let others = if others.is_empty() {
                String::new()
            } else {
                format!("train otherwise: {}, or ", list(&others))
            };
            format!(
                "no setting alone makes it fit: what the model itself takes is {}; {others}a smaller model, or a machine with more memory",
                size(fixed)
            )
        }
        found => format!("add {}", list(found)),
    };
    Error::resource(what).fix(fix)
}

/// The error for a run whose checkpoints do not fit on the disk.
pub fn disk_refusal(plan: &Plan, free: u64) -> Error {
    let what =
        format!("checkpoints and models need about {} of disk, {} is free", size(plan.disk()), size(free));
    let largest = plan.stages.iter().map(|s| s.disk).max_by_key(|d| d.checkpoint * d.copies as u64);
    let fix = match largest {
        Some(d) if d.copies > 2 => "checkpoint.keep = 1, or --runs on another disk",
        _ => "--runs on another disk",
    };
    Error::resource(what).fix(fix)
}

//! Changes of settings with which a stage fits.

use super::memory::{self, is_f32};
use super::show::size;
use super::{Inputs, Plan, StagePlan};
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

fn bytes(i: &Inputs) -> u64 {
    memory::parts(i).iter().map(|p| p.bytes).sum()
}

fn change(text: String, i: &Inputs) -> Change {
    Change { text, bytes: bytes(i) }
}

/// The largest micro-batch that fits, in steps of 256 tokens and at least the longest sequence (or pair).
fn fewer_tokens(i: &Inputs, available: u64) -> Option<(usize, Inputs)> {
    let longest = i.lengths.longest * if i.feed.paired() { 2 } else { 1 };
    let with = |tokens: usize| {
        let mut now = i.clone();
        now.recipe.train.micro_batch_tokens = tokens;
        now
    };
    let least = longest.next_multiple_of(64).max(64);
    let mut tokens = i.micro_tokens().next_multiple_of(256);
    while tokens > least {
        tokens = tokens.saturating_sub(256).max(least);
        let now = with(tokens);
        if bytes(&now) <= available {
            return Some((tokens, now));
        }
    }
    None
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
fn offload(i: &Inputs) -> Option<Inputs> {
    let mut now = i.clone();
    now.recipe.optim.offload = "moments".into();
    (i.device.own_memory && !i.recipe.optim.offloads() && bytes(&now) < bytes(i)).then_some(now)
}

/// Another storage of the base weights.
fn base(i: &Inputs, home: &str) -> Option<Inputs> {
    let mut now = i.clone();
    now.recipe.adapter.as_mut()?.base = home.into();
    (bytes(&now) < bytes(i)).then_some(now)
}

/// The largest cache that fits, of at least 16 MiB.
fn smaller_cache(i: &Inputs, available: u64) -> Option<(usize, Inputs)> {
    let over = bytes(i).saturating_sub(available).div_ceil(1 << 20) as usize;
    let mib = i.recipe.rollout.cache_mib.saturating_sub(over + over / 8);
    let mut now = i.clone();
    now.recipe.rollout.cache_mib = mib;
    let samples = i.feed.sampled() || i.evaluates();
    (samples && mib >= 16 && bytes(&now) <= available).then_some((mib, now))
}

/// The KV cache freed while the policy trains.
fn release_cache(i: &Inputs) -> Option<Inputs> {
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

/// A change that saves memory; `None` if it has no effect.
type Saving = fn(&Inputs) -> Option<Inputs>;

/// Single changes with which the stage fits; if there are none, a combination, if that fits.
pub fn changes(i: &Inputs, available: u64) -> Vec<Change> {
    let mut out = single_changes(i, available);
    out.retain(|c| c.bytes <= available);
    if out.is_empty() {
        out.extend(Some(combined_change(i, available)).filter(|c| c.bytes <= available));
    }
    out
}

/// Each setting that saves memory, alone.
fn single_changes(i: &Inputs, available: u64) -> Vec<Change> {
    let set = |text: &str, now: Option<Inputs>| now.map(|now| (text.to_string(), now));
    let tokens = fewer_tokens(i, available).map(|(n, now)| (format!("train.micro_batch_tokens={n}"), now));
    let cache = smaller_cache(i, available).map(|(mib, now)| (format!("rollout.cache_mib={mib}"), now));
    let all = [
        tokens,
        set("model.recompute=true", recompute(i)),
        cache,
        set("rollout.release_cache=true", release_cache(i)),
        set("model.dtype=bf16", half(i)),
        set("optim.name=adamw8", eight_bits(i)),
        set("optim.offload=moments", offload(i)),
        set("adapter.base=host", base(i, "host")),
        set("adapter.base=nf4", base(i, "nf4")),
    ];
    all.into_iter().flatten().map(|(text, now)| change(text, &now)).collect()
}

/// bf16, activation checkpointing and a small cache, then more as needed; 8-bit moments last, since they change results.
fn combined_change(i: &Inputs, available: u64) -> Change {
    let savings: [(&str, bool, Saving); 7] = [
        ("model.dtype=bf16", true, half),
        ("model.recompute=true", true, recompute),
        ("rollout.cache_mib=64", true, least_cache),
        ("rollout.release_cache=true", false, release_cache),
        ("adapter.base=host", false, |i| base(i, "host")),
        ("optim.offload=moments", false, offload),
        ("optim.name=adamw8", false, eight_bits),
    ];
    let fits = |i: &Inputs| bytes(i) <= available || fewer_tokens(i, available).is_some();
    let (mut now, mut texts) = (i.clone(), Vec::new());
    for (text, always, saving) in savings {
        if (always || !fits(&now))
            && let Some(next) = saving(&now)
        {
            texts.push(text.to_string());
            now = next;
        }
    }
    if bytes(&now) > available
        && let Some((tokens, next)) = fewer_tokens(&now, available)
    {
        texts.push(format!("train.micro_batch_tokens={tokens}"));
        now = next;
    }
    change(texts.join(" "), &now)
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
    let found = changes(&stage.inputs, available);
    let fix = match &found[..] {
        [] => {
            let fixed = ["weights", "gradients", "optimizer", "reference", "teacher", "rewards", "average"];
            let fixed = stage.parts.iter().filter(|p| fixed.contains(&p.name)).map(|p| p.bytes).sum();
            format!(
                "no setting alone makes it fit: what the model itself takes is {}; a smaller model, optim.name = \
                 \"sgd\", or a machine with more memory",
                size(fixed)
            )
        }
        list => {
            let each = |c: &Change| format!("{} ({})", c.text, size(c.bytes));
            format!("add {}", list.iter().map(each).collect::<Vec<_>>().join(", or "))
        }
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

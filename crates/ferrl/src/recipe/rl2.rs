//! Translates RL2's options, in recipes and overrides, to Ferrl's.
//!
//! Options with a counterpart are renamed. Those that determine the algorithm (`kl.*`, `adv.*`, `actor.avg_level`) are read
//! together: if the recipe names no algorithm, they become `algo = "ppo"` (OpenAI's PPO) or `algo = "grpo"` (DeepSeek's), with the
//! differences from its defaults as settings. An option without a counterpart is accepted with a note if it does not affect what is
//! learned, otherwise refused with the reason.

mod names;

use super::elsewhere;
use super::keys::keys;
use super::load::leaves;
use super::tree::{KeyPath, Place, ValueTree, dotted, path};
use crate::algo;
use ferrl_engine::{Error, Result, nearest};
use names::{NOTED, PER_DEVICE, REFUSED, RENAMED, SAME, STOP};
use serde_json::{Value, json};
use std::collections::BTreeMap;

/// Options that are settings of the algorithm.
const ALGORITHM: &[&str] = &[
    "actor.agg_mode",
    "actor.avg_level",
    "actor.beta",
    "actor.clip",
    "actor.entropy.coef",
    "actor.freeze_steps",
    "actor.tis_coef",
    "actor.update_per_rollout",
    "adv.estimator",
    "adv.gamma",
    "adv.global_norm",
    "adv.lamda",
    "adv.norm_var",
    "critic.clip",
    "kl.coef",
    "kl.loss_estimator",
    "kl.reward_estimator",
    "kl.type",
    "rollout.dynamic_filtering",
];

/// Tables of RL2 alone.
const TABLES: &[&str] = &[
    "actor",
    "adv",
    "kl",
    "ref_actor",
    "test_data",
    "train_data",
    "trainer",
    "rollout.gem_env",
    "rollout.server_args",
    "rollout.test_sampling_params",
    "rollout.train_sampling_params",
];

/// The names of all known options.
pub(super) fn names() -> impl Iterator<Item = &'static str> {
    let mapped = RENAMED.iter().map(|r| r.0).chain(ALGORITHM.iter().copied());
    let other = SAME.iter().map(|r| r.0).chain(NOTED.iter().map(|r| r.0)).chain(REFUSED.iter().map(|r| r.0));
    mapped.chain(other).filter(|name| name.contains('.'))
}

/// The key of an override as [`translate`] reads it: `data.train.path`, although `data.train` is a list here.
pub(super) fn key(path: KeyPath) -> KeyPath {
    names::TABLES.iter().fold(path, |path, (from, to)| {
        let from = super::tree::path(from);
        let inner =
            path.strip_prefix(&from[..]).filter(|rest| !rest.is_empty() && rest[0].parse::<usize>().is_err());
        match inner {
            Some(rest) => super::tree::path(to).into_iter().chain(rest.iter().cloned()).collect(),
            None => path,
        }
    })
}

/// An option accepted without effect, and what Ferrl does instead.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct Note {
    pub option: &'static str,
    pub instead: &'static str,
}

/// Replaces RL2's options in a recipe or stage. Of two names of a setting the later one wins. Unknown options of RL2's tables are
/// added to `unknown`.
pub(super) fn translate(tree: &mut ValueTree, unknown: &mut Vec<Error>) -> Result<Vec<Note>> {
    one_name(tree)?;
    let renamed: Vec<_> =
        RENAMED.iter().filter_map(|(theirs, ours)| Some((*theirs, *ours, take(tree, theirs)?))).collect();
    let per_device = renamed.iter().any(|(_, ours, _)| *ours == PER_DEVICE);
    for (theirs, ours, (value, place)) in renamed {
        let value = if ours == "model.dtype" { dtype(value) } else { value };
        once(tree, theirs, ours, &value, &place)?;
        set(tree, ours, value, &place)?;
        if theirs == STOP && tree.get(&path("rollout.include_stop")).is_none() {
            set(tree, "rollout.include_stop", true.into(), &place)?;
        }
    }
    let notes = without_key(tree)?;
    if per_device {
        count_all_devices(tree)?;
    }
    algorithm(tree, unknown)?;
    Ok(notes)
}

/// Removes an option and returns it. In some versions the same name is a table with options of its own.
fn take(tree: &mut ValueTree, option: &str) -> Option<(Value, Place)> {
    let at = path(option);
    if tree.get(&at)?.is_object() { None } else { tree.take(&at) }
}

/// Renames tables to the names in the lists of options; those of RL2's reward model trainer (`critic`) become the policy's.
fn one_name(tree: &mut ValueTree) -> Result<()> {
    let mut tables: Vec<(&str, &str)> = names::TABLES.to_vec();
    if tree.get(&path("algo.name")).is_some_and(|name| name == algo::REWARD_MODEL.name) {
        tables.push(("critic", "actor"));
    }
    for (from, to) in tables {
        let at = path(from);
        if let Some(Value::Object(map)) = tree.get(&at) {
            // Ferrl's own settings of the critic are not moved.
            let ours = |key: &str| keys().iter().any(|k| k.path == format!("{from}.{key}"));
            for key in map.keys().filter(|key| !ours(key)).cloned().collect::<Vec<_>>() {
                let inner: KeyPath = at.iter().cloned().chain([key.clone()]).collect();
                let to: KeyPath = path(to).into_iter().chain([key]).collect();
                if let Some((value, place)) = tree.take(&inner) {
                    tree.set(&to, value, place)?;
                }
            }
        }
    }
    Ok(())
}

/// Translates PyTorch's names of dtypes.
fn dtype(value: Value) -> Value {
    match value.as_str() {
        Some("bfloat16") => "bf16".into(),
        Some("float32") => "f32".into(),
        _ => value,
    }
}

/// Options that repeat another, that have no effect, or that request something that is not a setting.
fn without_key(tree: &mut ValueTree) -> Result<Vec<Note>> {
    for (theirs, ours, why) in SAME {
        let Some((value, place)) = take(tree, theirs) else { continue };
        let value = if *ours == "model.dtype" { dtype(value) } else { value };
        let default = default(ours);
        let there = tree.get(&path(ours)).or(default.as_ref());
        let samples = ["rollout.model_name", "rollout.server_args.model_path"].contains(theirs);
        match there {
            None if samples => set(tree, ours, value, &place)?,
            Some(there) if same(there, &value) => {}
            there => {
                let other = there.map_or("its default".into(), Value::to_string);
                return Err(Error::usage(format!("{theirs} is {value} and {ours} {other}: {why}"))
                    .at(place.text)
                    .fix(format!("leave out {theirs}")));
            }
        }
    }
    let off = |value: &Value| matches!(value, Value::Null | Value::Bool(false)) || value == "";
    for (theirs, what, fix) in REFUSED {
        match tree.take(&path(theirs)) {
            Some((value, place)) if !off(&value) => {
                return Err(Error::usage(format!("{theirs}: {what}")).at(place.text).fix(*fix));
            }
            _ => {}
        }
    }
    let noted =
        NOTED.iter().filter(|(theirs, _)| tree.take(&path(theirs)).is_some_and(|(value, _)| !off(&value)));
    Ok(noted.map(|(option, instead)| Note { option, instead }).collect())
}

/// The default of a key here or of an option of RL2's.
fn default(key: &str) -> Option<Value> {
    match key {
        "actor.avg_level" => Some("token".into()),
        "actor.update_per_rollout" => Some(1.into()),
        "adv.estimator" => Some(algo::WITHOUT_CRITIC.name.into()),
        "adv.gamma" => Some(1.0.into()),
        _ if key.starts_with("data.columns.") => key.rsplit('.').next().map(Value::from),
        _ => super::keys::find(&path(key)).map(|k| k.default.clone()).filter(|v| !v.is_null()),
    }
}

/// Multiplies the tokens per device to those of a micro-batch.
fn count_all_devices(tree: &mut ValueTree) -> Result<()> {
    let size = |key: &str| tree.get(&path(key)).and_then(Value::as_u64).unwrap_or(1).max(1);
    let ranks = size("parallel.sp_size").saturating_mul(size("parallel.tp_size"));
    let at = path(PER_DEVICE);
    let there = tree.get(&at).and_then(Value::as_u64).zip(tree.place(&at).cloned());
    match there {
        Some((tokens, place)) if ranks > 1 => tree.set(&at, tokens.saturating_mul(ranks).into(), place),
        _ => Ok(()),
    }
}

/// Options that determine the algorithm and its settings.
fn algorithm(tree: &mut ValueTree, unknown: &mut Vec<Error>) -> Result<()> {
    let given: BTreeMap<&str, (Value, Place)> =
        ALGORITHM.iter().filter_map(|name| Some((*name, tree.take(&path(name))?))).collect();
    take_leftovers(tree, unknown);
    if given.is_empty() {
        return Ok(());
    }
    let options = Options { given, named: tree.get(&path("algo.name")).is_some() };
    let preset = options.preset();
    let defaults = preset_settings(preset);
    if !options.named && preset != super::DEFAULT_ALGORITHM {
        let place = options.given.values().next().map(|g| g.1.clone()).unwrap_or_default();
        set(tree, "algo.name", preset.into(), &place)?;
    }
    for (key, value, place) in options.settings(&defaults)? {
        let at = path(&format!("algo.{key}"));
        let default = path(key).iter().fold(&defaults, |v, k| &v[k]);
        let says_nothing = same(default, &value) && tree.get(&at).is_none();
        if options.named || !says_nothing {
            set(tree, &format!("algo.{key}"), value, &place)?;
        }
    }
    Ok(())
}

/// Refuses a file with both names of a setting and different values.
fn once(tree: &ValueTree, theirs: &str, ours: &str, value: &Value, place: &Place) -> Result<()> {
    let at = path(ours);
    let there = tree.get(&at).zip(tree.place(&at));
    match there.filter(|(v, p)| p.order == place.order && !same(v, value)) {
        None => Ok(()),
        Some((_, p)) => {
            Err(Error::usage(format!("{theirs} and {ours} are the same setting, with two values"))
                .at(format!("{} and {}", p.text, place.text))
                .fix(format!("leave out {theirs}")))
        }
    }
}

/// Sets a value unless a later source has set it.
fn set(tree: &mut ValueTree, key: &str, value: Value, place: &Place) -> Result<()> {
    let at = path(key);
    let later = tree.get(&at).is_some() && tree.place(&at).is_some_and(|p| p.order > place.order);
    if later { Ok(()) } else { tree.set(&at, value, place.clone()) }
}

fn same(a: &Value, b: &Value) -> bool {
    match (a.as_f64(), b.as_f64()) {
        (Some(a), Some(b)) => a == b,
        _ => a == b,
    }
}

/// Removes the unknown options left under RL2's tables; some are another library's.
fn take_leftovers(tree: &mut ValueTree, unknown: &mut Vec<Error>) {
    for mut table in TABLES.iter().map(|table| path(table)) {
        let mut left = Vec::new();
        if let Some(value) = tree.get(&table) {
            leaves(value, &mut table, &mut left);
        }
        unknown.extend(left.iter().map(|at| leftover(tree, at)));
        left.iter().for_each(|at| drop(tree.take(at)));
    }
}

fn leftover(tree: &ValueTree, at: &[String]) -> Error {
    let place = tree.place(at).map_or_else(String::new, |p| p.text.clone());
    let error = Error::usage(format!("unknown key {}", dotted(at))).at(place);
    match (elsewhere::find(at), nearest(&dotted(at), names())) {
        (Some(answer), _) => error.fix(answer.fix()),
        (None, Some(near)) => error.fix(format!("did you mean {near}?")),
        (None, None) => error.fix("leave it out: Ferrl has no such option"),
    }
}

struct Options {
    given: BTreeMap<&'static str, (Value, Place)>,
    /// Whether the recipe names its algorithm; then only the given options are changed.
    named: bool,
}

type Setting = (&'static str, Value, Place);

impl Options {
    fn is(&self, name: &str, value: impl Into<Value>) -> bool {
        self.given.get(name).is_some_and(|g| g.0 == value.into())
    }

    /// The algorithm nearest to the options.
    fn preset(&self) -> &'static str {
        let deepseek = self.is("actor.avg_level", "sequence")
            && self.is("kl.type", "loss")
            && self.is("kl.loss_estimator", "k3")
            && self.is("adv.norm_var", true);
        match () {
            () if self.is("adv.estimator", "gae") => algo::WITH_CRITIC.name,
            () if deepseek => algo::GROUP_RELATIVE.name,
            () => super::DEFAULT_ALGORITHM,
        }
    }

    /// One of a list of words.
    fn word(&self, name: &'static str, known: &[&'static str]) -> Result<Option<(String, Place)>> {
        let Some((value, place)) = self.given.get(name) else { return Ok(None) };
        if let Some(word) = known.iter().find(|k| value == **k) {
            return Ok(Some((word.to_string(), place.clone())));
        }
        let what = format!("{name}: expected one of {}, got {value}", known.join(", "));
        let near = value.as_str().and_then(|v| nearest(v, known.iter().copied())).unwrap_or(known[0]);
        Err(Error::usage(what).at(&place.text).fix(format!("{name}={near}")))
    }

    fn settings(&self, defaults: &Value) -> Result<Vec<Setting>> {
        let mut all = self.kl(defaults)?;
        all.extend(self.advantage()?);
        if let Some((level, place)) = self.word("actor.avg_level", &["token", "sequence", "constant"])? {
            all.push(("aggregate", level.into(), place));
        }
        let modes = ["token_mean", "sequence_mean"];
        if let Some((mode, place)) = self.word("actor.agg_mode", &modes)? {
            all.push(("aggregate", mode.trim_end_matches("_mean").into(), place));
        }
        const COPIED: &[(&str, &str)] = &[
            ("actor.beta", "beta"),
            ("actor.clip", "clip_low"),
            ("actor.clip", "clip_high"),
            ("actor.entropy.coef", "entropy_coef"),
            ("actor.freeze_steps", "critic_warmup"),
            ("actor.update_per_rollout", "minibatches"),
            ("adv.gamma", "advantage.gamma"),
            ("adv.lamda", "advantage.lambda"),
            ("adv.norm_var", "advantage.divide_by_std"),
            ("critic.clip", "critic.clip"),
            ("rollout.dynamic_filtering", "filter_equal"),
        ];
        for (theirs, ours) in COPIED {
            all.extend(self.given.get(theirs).map(|(value, place)| (*ours, value.clone(), place.clone())));
        }
        if let Some((cap, place)) = self.given.get("actor.tis_coef") {
            let on = cap.as_f64() != Some(0.0);
            let kind = if on { "truncate" } else { "none" };
            all.push(("correction.kind", kind.into(), place.clone()));
            all.extend(on.then(|| ("correction.cap", cap.clone(), place.clone())));
        }
        Ok(all)
    }

    /// Place, weight and estimator of the KL penalty.
    fn kl(&self, defaults: &Value) -> Result<Vec<Setting>> {
        let estimators = ["k1", "abs", "k2", "k3"];
        let by_reward = self.word("kl.reward_estimator", &estimators)?;
        let by_loss = self.word("kl.loss_estimator", &estimators)?;
        let coef = self.given.get("kl.coef").cloned();
        let mut all: Vec<Setting> = Vec::new();
        let Some((kind, at)) = self.word("kl.type", &["null", "reward", "loss", "advantage"])? else {
            // Without `kl.type` RL2 has no KL, but the preset's defaults may have.
            let none = (!self.named && coef.is_none()).then(|| self.given.values().next()).flatten();
            all.extend(none.map(|(_, place)| ("kl.coef", json!(0.0), place.clone())));
            all.extend(coef.map(|(value, place)| ("kl.coef", value, place)));
            all.extend(by_loss.or(by_reward).map(|(e, place)| ("kl.estimator", e.into(), place)));
            return Ok(all);
        };
        if kind == "null" {
            return Ok(vec![("kl.coef", json!(0.0), at)]);
        }
        let (estimator, usual) = if kind == "loss" { (by_loss, "k2") } else { (by_reward, "k1") };
        let usual = (!self.named).then(|| (usual.to_string(), at.clone()));
        all.extend(estimator.or(usual).map(|(e, place)| ("kl.estimator", e.into(), place)));
        let own = defaults["kl"]["coef"].as_f64().filter(|c| *c > 0.0 || self.named);
        match (coef, own) {
            (Some((value, place)), _) => all.push(("kl.coef", value, place)),
            (None, Some(_)) => {}
            (None, None) => {
                let what = "kl.type without kl.coef has no effect: the coefficient is 0";
                return Err(Error::usage(what).at(at.text).fix("kl.coef=0.001"));
            }
        }
        all.push(("kl.place", kind.into(), at));
        Ok(all)
    }

    fn advantage(&self) -> Result<Vec<Setting>> {
        if let Some((_, place)) = self.given.get("adv.estimator").filter(|(value, _)| value == "zeros") {
            let what =
                "adv.estimator: zeros is on-policy distillation: the reward is the KL to a teacher alone";
            return Err(Error::usage(what).at(&place.text).fix("algo=distill teacher.path=DIR"));
        }
        let estimator = self.word("adv.estimator", &[algo::WITHOUT_CRITIC.name, "gae"])?;
        let global = self.given.get("adv.global_norm").cloned();
        let by = |baseline: &str, place: Place| ("advantage.baseline", Value::from(baseline), place);
        Ok(match (estimator, global) {
            (Some((gae, place)), _) if gae == "gae" => {
                vec![by("critic", place.clone()), ("advantage.normalise", "whiten".into(), place)]
            }
            (_, Some((Value::Bool(global), place))) => {
                vec![by(if global { "batch" } else { "group" }, place)]
            }
            (_, Some((_, place))) => {
                let what = "adv.global_norm: expected true or false";
                return Err(Error::usage(what).at(place.text).fix("adv.global_norm=true"));
            }
            (Some((_, place)), None) => vec![by("group", place)],
            (None, None) => Vec::new(),
        })
    }
}

/// The defaults of an algorithm.
pub(super) fn preset_settings(name: &str) -> Value {
    (algo::find(name).unwrap_or(algo::DEFAULT).defaults)()
}

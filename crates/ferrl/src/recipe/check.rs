//! Settings that are well-formed but cannot work, each with a reason and a fix.

mod search;

use super::optim::OFFLOADS;
use super::{InitSettings, OPTIMIZERS, Recipe, RewardSettings, StageRecipe};
use crate::algo::metrics::{EVALUATED, SAMPLED, STEP};
use crate::algo::{self, Algorithm, Refusal};
use crate::credit::StepSplit;
use ferrl_engine::model::{self, FAMILIES};
use ferrl_engine::{Error, nearest};
use ferrl_kernels::{AUTO, BACKENDS, DType};

/// Compute types.
pub const DTYPES: &[&str] = &["f32", "bf16"];
/// Optimizers.
/// Learning-rate schedules.
pub const SCHEDULES: &[&str] = &["constant", "linear", "cosine"];
/// Choices for rows whose trained tokens `max_length` truncates.
pub const OVERLONG: &[&str] = &["error", "drop"];
/// Choices for training rows that overlap with evaluation rows.
pub const OVERLAP: &[&str] = &["warn", "drop", "error", "off"];
/// Tokenizers of new models.
pub const TOKENIZERS: &[&str] = &["char", "bpe"];

/// Maximum number of completions in memory at once.
const COMPLETIONS: u64 = 1 << 24;

type DottedKey = std::borrow::Cow<'static, str>;

/// A setting that cannot work.
pub(super) struct RecipeProblem {
    /// The setting to change.
    pub key: DottedKey,
    what: String,
    fix: String,
}

impl RecipeProblem {
    /// The error about the key at that place.
    pub fn error(&self, key: &str, place: &str) -> Error {
        let error = Error::usage(&self.what).at(key).fix(&self.fix);
        if place.is_empty() { error } else { error.at(place) }
    }
}

#[derive(Default)]
struct Problems(Vec<RecipeProblem>);

impl Problems {
    fn when(
        &mut self,
        bad: bool,
        key: impl Into<DottedKey>,
        what: impl Into<String>,
        fix: impl Into<String>,
    ) {
        if bad {
            self.0.push(RecipeProblem { key: key.into(), what: what.into(), fix: fix.into() });
        }
    }

    fn refuse(&mut self, algorithm: &str, refusal: Option<Refusal>) {
        if let Some(Refusal { key, why, fix }) = refusal {
            self.when(true, key, format!("{algorithm} {why}"), fix);
        }
    }

    fn word(&mut self, key: impl Into<DottedKey>, word: &str, known: &[&str]) {
        if !known.contains(&word) {
            let key = key.into();
            let what = format!("unknown name {word:?}, expected one of {}", known.join(", "));
            // Names of PyTorch and others. The last device is a GPU's; `float16` and `half` have as many bits as bf16.
            let device = BACKENDS.iter().map(|device| device.name).rfind(|name| known.contains(name));
            let meant = match word.to_lowercase().as_str() {
                "gpu" => device.unwrap_or(word),
                "bfloat16" | "float16" | "fp16" | "half" => "bf16",
                "float32" | "float" => "f32",
                word if word.contains("8bit") => "adamw8",
                // `cosine_with_min_lr`, `adamw_torch`
                _ => known.iter().copied().rfind(|k| word.starts_with(k)).unwrap_or(word),
            };
            let near = nearest(meant, known.iter().copied());
            let fix = near.or(known.first().copied()).map(|n| format!("{key} = {n:?}"));
            self.when(true, key, what, fix.unwrap_or_default());
        }
    }
}

/// Everything wrong with a stage that follows the `earlier` ones.
pub(super) fn problems(
    stage: &StageRecipe,
    earlier: &[StageRecipe],
    verifiers: &[&str],
) -> Vec<RecipeProblem> {
    let (recipe, mut p) = (&stage.recipe, Problems::default());
    let what = "a base belongs at the top of a recipe's file";
    p.when(recipe.base.is_some(), "base", what, "@base.toml on the command line");
    names(recipe, &mut p);
    references(recipe, earlier, &mut p);
    evaluation(recipe, &mut p);
    held_out(recipe, &mut p);
    checkpoints(recipe, &mut p);
    metric(recipe, &mut p);
    starting_point(stage, &mut p);
    data(recipe, &mut p);
    env(recipe, &mut p);
    let Ok(entry) = algo::find(recipe.algorithm_name()) else { return p.0 };
    let needs = recipe.algorithm().ok().map(|a| a.needs());
    p.when(
        recipe.teacher.path.is_some() && !needs.is_some_and(|n| n.teacher),
        "teacher.path",
        format!("{} has no teacher", recipe.algorithm_name()),
        "leave out teacher.path",
    );
    search::check(recipe, entry.feed.sampled(), &mut p);
    if entry.feed.sampled() {
        rollouts(stage, &mut p);
        rewards(recipe, verifiers, &mut p);
    } else {
        // A mismatched probe may put the longest completion after the longest prompt.
        let (each, one) = match entry.feed.paired() {
            true => (2, "one pair, each side of"),
            false if needs.is_some_and(|n| n.mismatched) => (2, "a prompt and another's completion, each of"),
            false => (1, "one sequence of"),
        };
        let (budget, longest) = (recipe.train.micro_batch_tokens, each * recipe.data.max_length);
        p.when(
            budget < longest,
            "train.micro_batch_tokens",
            format!("{budget} tokens do not hold {one} data.max_length = {}", recipe.data.max_length),
            format!("train.micro_batch_tokens = {longest}, or a smaller data.max_length"),
        );
    }
    p.0
}

fn names(r: &Recipe, p: &mut Problems) {
    if ferrl_kernels::check_name(&r.device).is_err() {
        let devices: Vec<&str> = std::iter::once(AUTO).chain(BACKENDS.iter().map(|b| b.name)).collect();
        p.word("device", &r.device, &devices);
    }
    let size = r.device_memory.as_deref().map(super::size::device_bytes).and_then(|size| size.err());
    if let Some(what) = size {
        p.when(true, "device_memory", what, "device_memory = \"24GiB\"");
    }
    p.word("optim.name", &r.optim.name, OPTIMIZERS);
    p.word("optim.offload", &r.optim.offload, OFFLOADS);
    p.word("optim.schedule", &r.optim.schedule, SCHEDULES);
    if let Some(dtype) = &r.model.dtype {
        p.word("model.dtype", dtype, DTYPES);
    }
    adapter(r, p);
    if let Some(init) = &r.model.init {
        p.word("model.init.tokenizer", &init.tokenizer, TOKENIZERS);
        let families: Vec<&str> = model::FAMILIES.iter().map(|f| f.name()).collect();
        p.word("model.init.family", &init.family, &families);
    }
}

/// Settings that contradict an adapter.
fn adapter(r: &Recipe, p: &mut Problems) {
    if let Some(adapter) = &r.adapter {
        const OTHERS: &[&str] = &["pissa", "olora", "eva", "corda", "loftq"];
        let other = OTHERS.iter().any(|name| adapter.init.to_lowercase().starts_with(name));
        let what = format!(
            "adapter.init = {:?} computes A and B from the weights, which Ferrl does not do",
            adapter.init
        );
        p.when(
            other,
            "adapter.init",
            what,
            "adapter.init = \"kaiming\", or an adapter that PEFT initialised as model.path",
        );
        if !other {
            p.word("adapter.init", &adapter.init, super::INITS);
        }
        p.word("adapter.base", &adapter.base, super::adapter::BASES);
        let what = "with an adapter all weights of the model are frozen";
        p.when(
            !r.model.frozen.is_empty(),
            "model.frozen",
            what,
            "leave out model.frozen; adapter.exclude_modules excludes modules",
        );
    }
    p.when(
        r.adapter.is_some() && r.model.train_router,
        "model.train_router",
        "with an adapter the routers are frozen",
        "adapter.modules_to_save = [\"mlp.gate\"] trains them",
    );
    p.when(
        r.model.router_aux_loss_coef > 0.0 && !r.model.train_router,
        "model.router_aux_loss_coef",
        match r.adapter {
            Some(_) => "the load-balance loss trains routers, which an adapter freezes",
            None => "the load-balance loss trains routers, which are frozen",
        },
        match r.adapter {
            Some(_) => "model.router_aux_loss_coef = 0.0",
            None => "model.train_router = true, or model.router_aux_loss_coef = 0.0",
        },
    );
}

/// Whether `stage:NAME` names a stage that has run by then.
fn references(r: &Recipe, earlier: &[StageRecipe], p: &mut Problems) {
    let named = |own: String, options: String, reward: &RewardSettings| -> Vec<_> {
        let others = reward
            .models()
            .map(|(key, path)| (DottedKey::from(format!("{options}.{key}")), Some(path.to_string())));
        std::iter::once((own.into(), reward.model.clone())).chain(others).collect()
    };
    let rewards = r.reward.iter().enumerate();
    let rewards = rewards
        .flat_map(|(i, reward)| named(format!("reward.{i}.model"), format!("reward.{i}.options"), reward));
    let scorer = r.search.model_reward();
    let scorer = scorer.iter().flat_map(|s| named("search.scorer".into(), "search.scorer_options".into(), s));
    let places =
        [("model.path", &r.model.path), ("critic.path", &r.critic.path), ("teacher.path", &r.teacher.path)];
    let places = places.map(|(key, path)| (key.into(), path.clone()));
    for (key, path) in places.into_iter().chain(rewards).chain(scorer) {
        let Some(name) = path.as_ref().and_then(|p| p.strip_prefix("stage:")) else { continue };
        let known: Vec<&str> = earlier.iter().map(|s| s.name.as_str()).collect();
        if !known.contains(&name) {
            let near = nearest(name, known.iter().copied()).or(known.last().copied());
            let fix = near.map_or("a directory".into(), |n| format!("{key} = \"stage:{n}\""));
            p.when(true, key, format!("no stage {name:?} comes before this one"), fix);
        }
    }
}

fn starting_point(stage: &StageRecipe, p: &mut Problems) {
    let m = &stage.recipe.model;
    p.when(
        m.path.is_some() && m.init.is_some(),
        "model",
        "both a directory (model.path) and a new model (model.init)",
        "leave one out",
    );
    let nothing = m.path.is_none() && m.init.is_none() && !stage.continues;
    p.when(nothing, "model", "no model to train", "model.path = \"directory\", or a [model.init] table");
    let c = &stage.recipe.critic;
    p.when(
        c.shared && c.path.is_some(),
        "critic.path",
        "a critic that shares the policy's trunk has no weights of its own",
        "leave out critic.path or critic.shared",
    );
    let Some(init) = &m.init else { return };
    let heads = init.heads.unwrap_or((init.hidden / 64).max(1));
    let what = format!("model.init.hidden = {} does not divide into {heads} heads", init.hidden);
    let divides = init.hidden.is_multiple_of(heads);
    p.when(!divides, "model.init.heads", what, "model.init.heads = a divisor of model.init.hidden");
    let kv = init.kv_heads.unwrap_or(heads);
    let what = format!("{heads} heads do not divide into {kv} key and value heads");
    let divides = heads.is_multiple_of(kv);
    p.when(!divides, "model.init.kv_heads", what, "model.init.kv_heads = a divisor of model.init.heads");
    experts(init, p);
    p.when(
        init.tokenizer == "bpe" && init.vocab < 256,
        "model.init.vocab",
        "a bpe tokenizer has at least the 256 bytes",
        "model.init.vocab = 4096",
    );
}

/// Experts in a family without them, or fewer than the experts per token.
fn experts(init: &InitSettings, p: &mut Problems) {
    let has = |name: &str| FAMILIES.iter().any(|f| f.name() == name && f.has_experts());
    let keys = [
        ("model.init.experts", init.experts),
        ("model.init.experts_per_token", init.experts_per_token),
        ("model.init.expert_ffn", init.expert_ffn),
    ];
    let with: Vec<&str> = FAMILIES.iter().filter(|f| f.has_experts()).map(|f| f.name()).collect();
    for (key, _) in keys.into_iter().filter(|(_, set)| set.is_some() && !has(&init.family)) {
        let what = format!("the family {} has no experts", init.family);
        p.when(
            true,
            key,
            what,
            format!("leave it out, or model.init.family = \"{}\"", with.join("\" or \"")),
        );
    }
    if let (Some(all), Some(each)) = (init.experts, init.experts_per_token) {
        let what = format!("{each} experts per token, but only {all} experts");
        p.when(
            each > all && has(&init.family),
            "model.init.experts_per_token",
            what,
            "at most model.init.experts",
        );
    }
}

fn data(r: &Recipe, p: &mut Problems) {
    let d = &r.data;
    p.when(d.train.is_empty(), "data.train", "no training data", "data.train = \"file.jsonl\"");
    let (weights, sources) = (d.weights.len(), d.train.len());
    p.when(
        weights > 0 && weights != sources,
        "data.weights",
        format!("{weights} weights for {sources} sources"),
        "one weight for each entry of data.train",
    );
    p.word("data.overlong", &d.overlong, OVERLONG);
    p.word("data.overlap", &d.overlap, OVERLAP);
}

fn env(r: &Recipe, p: &mut Problems) {
    let named: Vec<&str> = r.env.named().iter().map(|(key, _)| *key).collect();
    let what = format!("several environments: {}", named.join(", "));
    p.when(named.len() > 1, format!("env.{}", named.last().unwrap_or(&"path")), what, "name one");
    let both = !named.is_empty() && !r.env.tools.is_empty();
    p.when(both, "env.tools", "env.tools works only without another environment", "leave out env.tools");
    for name in &r.env.tools {
        let known: Vec<&str> = crate::tool::TOOLS.iter().map(|tool| tool.name).collect();
        p.word("env.tools", name, &known);
    }
    if named.is_empty() && r.env.tools.is_empty() {
        let default = super::EnvSettings::default();
        let set = [
            ("env.options", r.env.options != default.options),
            ("env.workers", r.env.workers != default.workers),
            ("env.timeout", r.env.timeout != default.timeout),
            ("env.memory_mib", r.env.memory_mib != default.memory_mib),
        ];
        let set = set.iter().find(|(_, set)| *set).map(|(key, _)| *key);
        p.when(set.is_some(), set.unwrap_or_default(), "there is no environment", "env.path = \"env.py\"");
    }
}

fn evaluation(r: &Recipe, p: &mut Problems) {
    // Evaluations of any stage may sample.
    let empty = r.rollout.stop.iter().any(String::is_empty);
    let what = "an empty stop text would end every completion before its first token";
    p.when(empty, "rollout.stop", what, "leave the empty text out");
    let asks = r.eval.every > 0 || r.eval.at_start;
    p.when(asks && r.eval.prompts == 0, "eval.prompts", "evaluations need prompts", "eval.prompts = 200");
    let cold = r.eval.temperature.is_some_and(|t| t > 0.0 && t < 1e-4);
    p.when(cold, "eval.temperature", "must be 0 or at least 0.0001", "eval.temperature = 0");
    let completions = r.eval.prompts as u64 * r.eval.samples as u64;
    let what = format!(
        "eval.prompts = {} times eval.samples = {} are {completions} completions; at most {COMPLETIONS}",
        r.eval.prompts, r.eval.samples
    );
    p.when(completions > COMPLETIONS, "eval.samples", what, "fewer eval.prompts or eval.samples");
    let greedy = r.eval.temperature == Some(0.0) && r.eval.samples > 1;
    let what = format!("{} samples at temperature 0 are all the same", r.eval.samples);
    p.when(greedy, "eval.samples", what, "eval.samples = 1, or a temperature above 0");
}

/// Held-out data and evaluations need each other.
fn held_out(r: &Recipe, p: &mut Problems) {
    let asks = r.eval.every > 0 || r.eval.at_start;
    let (split, task) = (r.eval.split, r.data.train.iter().any(|t| t.starts_with("task:")));
    let files = r.data.train.iter().any(|t| !t.starts_with("task:"));
    p.when(
        split > 0.0 && task && !files,
        "eval.split",
        "a generated task has a held-out part of its own",
        "leave it out",
    );
    let both = split > 0.0 && !r.eval.data.is_empty();
    p.when(both, "eval.split", "eval.data is held out already", "leave out eval.split or eval.data");
    let idle = split > 0.0 && !asks;
    p.when(idle, "eval.split", "rows are held out, but no evaluation runs", "eval.every = 50");
    let nothing = asks && !task && split == 0.0 && r.eval.data.is_empty();
    p.when(
        nothing,
        "eval",
        "there is nothing to evaluate on",
        "eval.split = 0.05, or eval.data = \"file.jsonl\"",
    );
}

/// Which checkpoints are kept, and by which metric.
fn checkpoints(r: &Recipe, p: &mut Problems) {
    let c = &r.checkpoint;
    p.when(c.keep == 0, "checkpoint.keep", "the run could not be resumed", "checkpoint.keep = 1");
    p.when(
        c.keep_best > 0 && c.metric.is_none(),
        "checkpoint.metric",
        "checkpoint.keep_best needs a metric",
        "checkpoint.metric = \"eval/pass@1\"",
    );
    p.when(
        c.use_best && c.keep_best == 0,
        "checkpoint.keep_best",
        "checkpoint.use_best needs the best checkpoint to be kept",
        "checkpoint.keep_best = 1",
    );
    let judged = c.metric.as_ref().is_some_and(|m| m.starts_with("eval/"));
    p.when(
        c.keep_best > 0 && judged && r.eval.every == 0,
        "eval.every",
        "checkpoint.keep_best needs an evaluation, and none is set up",
        "eval.every = 50",
    );
    p.when(
        c.patience > 0 && !judged,
        "checkpoint.metric",
        "checkpoint.patience needs a metric of the evaluation",
        "checkpoint.metric = \"eval/pass@1\"",
    );
    p.when(
        c.patience > 0 && judged && r.eval.every == 0,
        "eval.every",
        "checkpoint.patience counts evaluations, but none runs before the end",
        "eval.every = 50",
    );
    let upside_down = c.metric.as_ref().is_some_and(|m| m.ends_with("loss")) && !c.lower_is_better;
    p.when(
        (c.keep_best > 0 || c.patience > 0) && upside_down,
        "checkpoint.lower_is_better",
        "the checkpoints with the largest loss would be kept",
        "checkpoint.lower_is_better = true",
    );
}

/// Checks that the stage writes `checkpoint.metric`.
fn metric(r: &Recipe, p: &mut Problems) {
    let (Some(name), Ok(entry)) = (&r.checkpoint.metric, algo::find(r.algorithm_name())) else { return };
    let own = || entry.metrics.iter().copied().flatten();
    let held_out = || EVALUATED.iter().filter(|m| !m.name.ends_with("/METRIC"));
    let known = STEP.iter().chain(SAMPLED).chain(own()).chain(held_out()).any(|m| m.covers(name));
    let known = known || name.strip_prefix("eval/").is_some_and(|name| own().any(|m| m.covers(name)));
    let names = held_out().chain(own()).map(|m| m.name);
    let near = nearest(name, names).unwrap_or("eval/loss");
    let what = format!("{} writes no metric {name:?}", r.algorithm_name());
    p.when(!known, "checkpoint.metric", what, format!("checkpoint.metric = {near:?}"));
}

fn rollouts(stage: &StageRecipe, p: &mut Problems) {
    let (recipe, r) = (&stage.recipe, &stage.recipe.rollout);
    let completions = r.prompts as u64 * r.samples as u64;
    let what = format!(
        "rollout.prompts = {} times rollout.samples = {} are {completions} completions a step; at most {COMPLETIONS}",
        r.prompts, r.samples
    );
    p.when(completions > COMPLETIONS, "rollout.samples", what, "fewer rollout.prompts or rollout.samples");
    let why = "log-probabilities of truncated sampling are not the policy's, so gradients are biased";
    for (key, truncated) in [("rollout.top_k", r.top_k > 0), ("rollout.top_p", r.top_p < 1.0)] {
        let off = if key == "rollout.top_k" { 0 } else { 1 };
        let fix = format!("{key} = {off}, or rollout.allow_off_policy = true");
        p.when(truncated && !r.allow_off_policy, key, why, fix);
    }
    let (budget, longest) = (recipe.train.micro_batch_tokens, recipe.data.max_length + r.max_new_tokens);
    p.when(
        budget < longest,
        "train.micro_batch_tokens",
        format!(
            "{budget} tokens do not hold one prompt of data.max_length = {} and an answer of \
             rollout.max_new_tokens = {}",
            recipe.data.max_length, r.max_new_tokens
        ),
        format!("train.micro_batch_tokens = {longest}, or a smaller data.max_length"),
    );
    if let Some(init) = recipe.model.init.as_ref().filter(|i| r.max_new_tokens >= i.max_positions) {
        let what = format!(
            "completions of {} tokens do not fit a model of {}",
            r.max_new_tokens, init.max_positions
        );
        p.when(true, "rollout.max_new_tokens", what, "a larger model.init.max_positions");
    }
    if let Ok(algorithm) = recipe.algorithm() {
        sampling_algorithm(recipe, &*algorithm, p);
    }
}

/// Requirements of algorithms that sample.
fn sampling_algorithm(recipe: &Recipe, algorithm: &dyn Algorithm, p: &mut Problems) {
    let (r, needs, name) = (&recipe.rollout, algorithm.needs(), recipe.algorithm_name());
    let completions = r.prompts.saturating_mul(r.samples);
    p.refuse(name, needs.one_per_prompt.filter(|_| r.samples == 1));
    p.refuse(name, needs.one_per_step.filter(|_| completions == 1));
    p.refuse(name, needs.random_reference.filter(|_| recipe.model.init.is_some()));
    p.when(
        needs.teacher && recipe.teacher.path.is_none(),
        "teacher.path",
        format!("{name} needs a teacher"),
        "teacher.path = \"directory\"",
    );
    p.when(
        needs.f32 && recipe.dtype().is_ok_and(|dtype| dtype != DType::F32),
        "model.dtype",
        format!("{name} measures small changes of the weights, which bf16 rounds away"),
        "model.dtype = \"f32\"",
    );
    let searches = algorithm.updates().trust_region.is_some();
    p.when(
        searches && recipe.optim.ema.is_some(),
        "optim.ema",
        format!("{name} updates the weights without the optimizer, which keeps the EMA"),
        "leave out optim.ema",
    );
    p.when(
        searches && recipe.model.router_aux_loss_coef > 0.0,
        "model.router_aux_loss_coef",
        format!("{name}'s line search has no load-balance loss"),
        "model.router_aux_loss_coef = 0.0",
    );
    p.when(
        searches && needs.critic && recipe.critic.shared,
        "critic.shared",
        format!("{name} bounds the change of the policy, but a critic on its trunk would change with it"),
        "critic.shared = false",
    );
    let partial = r.partial_tokens > 0;
    p.when(
        partial && algorithm.updates().refill.is_some(),
        algo::REFILLS,
        "with rollout.partial_tokens refilled prompts would not be completed in their step",
        format!("{} = 0, or rollout.partial_tokens = 0", algo::REFILLS),
    );
    let episodes = !recipe.env.named().is_empty() || !recipe.env.tools.is_empty();
    p.when(
        partial && episodes,
        "rollout.partial_tokens",
        "episodes of several turns cannot be continued in a later step",
        "rollout.partial_tokens = 0",
    );
    if let Some(misfit) = algorithm.updates().fits_completions(completions) {
        p.when(true, misfit.key, misfit.what, misfit.fix);
    }
}

/// A recipe without rewards can work: generated tasks and rows may bring rewards.
fn rewards(r: &Recipe, verifiers: &[&str], p: &mut Problems) {
    let silent = !r.reward.is_empty() && r.reward.iter().all(|x| x.weight == Some(0.0));
    let what = "all rewards have weight 0: there is no learning signal";
    p.when(silent, "reward.0.weight", what, "reward.0.weight = 1.0");
    for (i, reward) in r.reward.iter().enumerate() {
        let sources = [reward.verifier.is_some(), reward.python.is_some(), reward.model.is_some()];
        let count = sources.iter().filter(|s| **s).count();
        p.when(
            count != 1,
            format!("reward.{i}"),
            format!("one [[reward]] has {count} sources"),
            "exactly one of verifier, python, model",
        );
        p.when(
            reward.function.is_some() && reward.python.is_none(),
            format!("reward.{i}.function"),
            "function needs a python file",
            format!("reward.{i}.python = \"file.py\""),
        );
        p.when(
            reward.model.is_some() && !reward.options.is_empty() && reward.model_kind().is_none(),
            format!("reward.{i}.options"),
            "a reward model has no options",
            "reward.0.options.kind = \"generative\" for verdicts of a language model, or \"implicit\" for its log-ratio",
        );
        if let Some(verifier) = &reward.verifier {
            p.word(format!("reward.{i}.verifier"), verifier, verifiers);
        }
        p.when(
            reward.step_tokens.is_some() && reward.steps != Some(StepSplit::Tokens),
            format!("reward.{i}.step_tokens"),
            "step_tokens has no effect unless steps are \"tokens\"",
            format!("reward.{i}.steps = \"tokens\""),
        );
        if let Some(word) = &reward.truncated {
            p.word("reward", word, crate::reward::TRUNCATED);
        }
    }
}

//! Settings that are well-formed and yet cannot work, each with a reason and a way out.

use super::{Recipe, Stage};
use crate::algo::{self, Wants};
use ferrl_engine::{Error, model, nearest};
use ferrl_kernels::{AUTO, BACKENDS};

/// Storage of activations.
pub const DTYPES: &[&str] = &["f32", "bf16"];
/// Rules that turn gradients into steps.
pub const OPTIMIZERS: &[&str] = &["adamw", "sgd"];
/// Courses of the learning rate.
pub const SCHEDULES: &[&str] = &["constant", "linear", "cosine"];
/// Tokenizers of new models.
pub const TOKENIZERS: &[&str] = &["char", "bpe"];

/// Something that cannot work.
pub(super) struct Problem {
    /// The setting to change.
    pub key: &'static str,
    what: String,
    fix: String,
}

impl Problem {
    /// As an error about the key, written at the place.
    pub fn error(&self, key: &str, place: &str) -> Error {
        let error = Error::usage(&self.what).at(key).fix(&self.fix);
        if place.is_empty() { error } else { error.at(place) }
    }
}

#[derive(Default)]
struct Problems(Vec<Problem>);

impl Problems {
    fn when(&mut self, bad: bool, key: &'static str, what: impl Into<String>, fix: impl Into<String>) {
        if bad {
            self.0.push(Problem { key, what: what.into(), fix: fix.into() });
        }
    }

    fn word(&mut self, key: &'static str, word: &str, known: &[&str]) {
        if !known.contains(&word) {
            let what = format!("unknown name {word:?}, expected one of {}", known.join(", "));
            let near = nearest(word, known.iter().copied());
            let fix = near.or(known.first().copied()).map(|n| format!("{key} = {n:?}"));
            self.when(true, key, what, fix.unwrap_or_default());
        }
    }
}

/// Everything wrong with a stage.
pub(super) fn problems(stage: &Stage, verifiers: &[&str]) -> Vec<Problem> {
    let (recipe, mut p) = (&stage.recipe, Problems::default());
    names(recipe, &mut p);
    starting_point(stage, &mut p);
    data(recipe, &mut p);
    optimizer(recipe, &mut p);
    portions(recipe, &mut p);
    let Ok(entry) = algo::find(recipe.algorithm_name()) else { return p.0 };
    if entry.wants == Wants::Rollouts {
        rollouts(stage, &mut p);
        rewards(recipe, verifiers, &mut p);
    } else {
        let each = if entry.wants == Wants::Pairs { 2 } else { 1 };
        let (budget, longest) = (recipe.train.micro_batch_tokens, each * recipe.data.max_length);
        let one = if each == 2 { "one pair, each side of" } else { "one sequence of" };
        p.when(
            budget < longest,
            "train.micro_batch_tokens",
            format!("{budget} tokens do not hold {one} data.max_length = {}", recipe.data.max_length),
            format!("train.micro_batch_tokens = {longest}, or a smaller data.max_length"),
        );
        p.when(recipe.train.batch == 0, "train.batch", "an update needs examples", "train.batch = 64");
    }
    p.0
}

fn names(r: &Recipe, p: &mut Problems) {
    if ferrl_kernels::check_name(&r.device).is_err() {
        let devices: Vec<&str> = std::iter::once(AUTO).chain(BACKENDS.iter().map(|b| b.name)).collect();
        p.word("device", &r.device, &devices);
    }
    p.word("optim.name", &r.optim.name, OPTIMIZERS);
    p.word("optim.schedule", &r.optim.schedule, SCHEDULES);
    if let Some(dtype) = &r.model.dtype {
        p.word("model.dtype", dtype, DTYPES);
    }
    if let Some(init) = &r.model.init {
        p.word("model.init.tokenizer", &init.tokenizer, TOKENIZERS);
        let families: Vec<&str> = model::FAMILIES.iter().map(|f| f.name()).collect();
        p.word("model.init.family", &init.family, &families);
    }
}

fn starting_point(stage: &Stage, p: &mut Problems) {
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
    p.when(c.lr.is_some_and(|lr| lr <= 0.0), "critic.lr", "must be above 0", "critic.lr = 5e-6");
    let Some(init) = &m.init else { return };
    let sizes = [init.hidden, init.layers, init.max_positions, init.heads.unwrap_or(1)];
    p.when(sizes.contains(&0), "model.init", "a size is 0", "hidden = 128, layers = 4");
    if let Some(heads) = init.heads.filter(|h| *h > 0) {
        let even = init.hidden.is_multiple_of(heads);
        let what = format!("hidden = {} does not divide into {heads} heads", init.hidden);
        p.when(!even, "model.init.heads", what, "a divisor of hidden");
        let kv = init.kv_heads.unwrap_or(heads);
        let bad = kv == 0 || !heads.is_multiple_of(kv);
        let what = format!("{heads} heads do not divide into {kv} key and value heads");
        p.when(bad, "model.init.kv_heads", what, "a divisor of heads");
    }
    p.when(
        init.tokenizer == "bpe" && init.vocab < 256,
        "model.init.vocab",
        "a bpe tokenizer has at least the 256 bytes",
        "model.init.vocab = 4096",
    );
}

fn data(r: &Recipe, p: &mut Problems) {
    let d = &r.data;
    p.when(d.train.is_empty(), "data.train", "nothing to learn from", "data.train = \"file.jsonl\"");
    let (weights, sources) = (d.weights.len(), d.train.len());
    p.when(
        weights > 0 && weights != sources,
        "data.weights",
        format!("{weights} weights for {sources} sources"),
        "one weight for each entry of data.train",
    );
    let bad = d.weights.iter().any(|w| *w < 0.0) || (weights > 0 && d.weights.iter().sum::<f64>() <= 0.0);
    p.when(bad, "data.weights", "weights must not be negative, nor all 0", "data.weights = [1.0, 1.0]");
    p.when(d.max_length == 0, "data.max_length", "nothing would be left", "data.max_length = 2048");
}

fn optimizer(r: &Recipe, p: &mut Problems) {
    let o = &r.optim;
    p.when(o.lr <= 0.0, "optim.lr", "must be above 0", "optim.lr = 1e-6");
    for (key, beta) in [("optim.beta1", o.beta1), ("optim.beta2", o.beta2)] {
        p.when(!(0.0..1.0).contains(&beta), key, format!("{beta} is not in [0, 1)"), format!("{key} = 0.9"));
    }
    p.when(o.eps <= 0.0, "optim.eps", "must be above 0", "optim.eps = 1e-8");
    p.when(o.weight_decay < 0.0, "optim.weight_decay", "must not be negative", "optim.weight_decay = 0.0");
    p.when(o.max_grad_norm < 0.0, "optim.max_grad_norm", "must not be negative", "0 switches it off");
    for (key, share) in [("optim.warmup", o.warmup), ("optim.min_ratio", o.min_ratio)] {
        let what = format!("{share} is not a share between 0 and 1");
        p.when(!(0.0..=1.0).contains(&share), key, what, format!("{key} = 0.1"));
    }
    let ema = o.ema.is_some_and(|e| !(e > 0.0 && e < 1.0));
    p.when(ema, "optim.ema", "must lie between 0 and 1", "optim.ema = 0.999");
}

fn portions(r: &Recipe, p: &mut Problems) {
    p.when(r.train.steps == Some(0), "train.steps", "nothing would be learned", "train.steps = 100");
    let none = r.train.steps.is_none() && r.train.epochs <= 0.0;
    p.when(none, "train.epochs", "nothing would be learned", "train.epochs = 1.0, or train.steps");
    p.when(r.eval.samples == 0, "eval.samples", "no answers to judge", "eval.samples = 1");
    let asks = r.eval.every > 0 || r.eval.at_start;
    p.when(asks && r.eval.prompts == 0, "eval.prompts", "no prompts to judge by", "eval.prompts = 200");
    let cold = r.eval.temperature.is_some_and(|t| t < 0.0);
    p.when(cold, "eval.temperature", "must not be negative", "0 takes the likeliest token");
    let greedy = r.eval.temperature == Some(0.0) && r.eval.samples > 1;
    let what = format!("{} samples at temperature 0 are all the same", r.eval.samples);
    p.when(greedy, "eval.samples", what, "eval.samples = 1, or a temperature above 0");
    let c = &r.checkpoint;
    p.when(c.keep == 0, "checkpoint.keep", "the run could not be resumed", "checkpoint.keep = 1");
    p.when(
        c.keep_best > 0 && c.metric.is_none(),
        "checkpoint.metric",
        "keep_best does not know what best means",
        "checkpoint.metric = \"eval/pass@1\"",
    );
    let judged = c.metric.as_ref().is_some_and(|m| m.starts_with("eval/"));
    p.when(
        c.keep_best > 0 && judged && r.eval.every == 0,
        "eval.every",
        "keep_best goes by an evaluation that never happens",
        "eval.every = 50",
    );
}

fn rollouts(stage: &Stage, p: &mut Problems) {
    let (recipe, r) = (&stage.recipe, &stage.recipe.rollout);
    p.when(r.prompts == 0, "rollout.prompts", "a rollout needs prompts", "rollout.prompts = 32");
    p.when(r.samples == 0, "rollout.samples", "a prompt needs answers", "rollout.samples = 8");
    p.when(r.max_new_tokens == 0, "rollout.max_new_tokens", "answers would be empty", "max_new_tokens = 256");
    p.when(
        r.temperature <= 0.0,
        "rollout.temperature",
        format!("{} leaves nothing to explore: all answers to a prompt are the same", r.temperature),
        "rollout.temperature = 1.0",
    );
    let share = r.top_p > 0.0 && r.top_p <= 1.0;
    p.when(!share, "rollout.top_p", format!("{} is not in (0, 1]", r.top_p), "rollout.top_p = 1.0");
    let why = "log-probabilities of truncated sampling are not the policy's, so gradients are biased";
    for (key, truncated) in [("rollout.top_k", r.top_k > 0), ("rollout.top_p", share && r.top_p < 1.0)] {
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
        let what =
            format!("answers of {} tokens do not fit a model of {}", r.max_new_tokens, init.max_positions);
        p.when(true, "rollout.max_new_tokens", what, "a larger model.init.max_positions");
    }
    let Ok(algorithm) = recipe.algorithm() else { return };
    let (needs, name) = (algorithm.needs(), recipe.algorithm_name());
    p.when(
        r.samples > 0 && r.samples < needs.group,
        "rollout.samples",
        format!(
            "{name} compares answers to the same prompt, and {} leaves nothing to compare with",
            r.samples
        ),
        "rollout.samples = 8, or algo.advantage.baseline = \"batch\"",
    );
    p.when(
        needs.reference && recipe.model.init.is_some(),
        "algo.kl.coef",
        "KL to the reference would hold the policy to a random model (model.init)",
        "algo.kl.coef = 0, or an SFT stage before this one",
    );
    let (_, minibatches) = algorithm.passes();
    let answers = r.prompts * r.samples;
    p.when(
        answers > 0 && minibatches > answers,
        "algo.minibatches",
        format!("{answers} answers do not make {minibatches} minibatches"),
        format!("algo.minibatches = {answers} at most, or more rollout.prompts"),
    );
    let filters = recipe.algo.get("filter_equal").is_some_and(|f| f == true);
    p.when(
        filters && r.samples == 1,
        "algo.filter_equal",
        "with one answer to a prompt all rewards of a group are equal: nothing passes the filter",
        "rollout.samples = 8, or algo.filter_equal = false",
    );
}

fn rewards(r: &Recipe, verifiers: &[&str], p: &mut Problems) {
    let name = r.algorithm_name();
    let what = format!("{name} learns from rewards, and there is none");
    p.when(r.reward.is_empty(), "reward", what, "reward = \"name of a verifier\", or a [[reward]] table");
    for reward in &r.reward {
        let sources = [reward.verifier.is_some(), reward.python.is_some()];
        let count = sources.iter().filter(|s| **s).count();
        p.when(
            count != 1,
            "reward",
            format!("one [[reward]] has {count} sources"),
            "exactly one of verifier, python",
        );
        p.when(
            reward.function.is_some() && reward.python.is_none(),
            "reward",
            "function names a function of a python file, and there is none",
            "python = \"file.py\"",
        );
        p.when(reward.weight == Some(0.0), "reward", "a weight of 0 has no effect", "leave the reward out");
        if let Some(verifier) = &reward.verifier {
            p.word("reward", verifier, verifiers);
        }
    }
}

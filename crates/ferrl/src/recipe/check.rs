//! Settings that are well-formed and yet cannot work, each with a reason and a way out.

use super::{Recipe, Stage};
use crate::algo::{self, Wants};
use crate::data::loader::{MAX_EPOCHS, MAX_WEIGHT};
use ferrl_engine::{Error, model, nearest};
use ferrl_kernels::{AUTO, BACKENDS};

/// Storage of activations.
pub const DTYPES: &[&str] = &["f32", "bf16"];
/// Rules that turn gradients into steps.
pub const OPTIMIZERS: &[&str] = &["adamw", "sgd"];
/// Courses of the learning rate.
pub const SCHEDULES: &[&str] = &["constant", "linear", "cosine"];
/// What becomes of rows that `max_length` leaves nothing of.
pub const OVERLONG: &[&str] = &["error", "drop"];
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

/// Everything wrong with a stage that follows the `earlier` ones.
pub(super) fn problems(stage: &Stage, earlier: &[Stage], verifiers: &[&str]) -> Vec<Problem> {
    let (recipe, mut p) = (&stage.recipe, Problems::default());
    let what = "a base belongs at the top of a recipe's file";
    p.when(recipe.base.is_some(), "base", what, "@base.toml on the command line");
    names(recipe, &mut p);
    references(recipe, earlier, &mut p);
    evaluation(recipe, &mut p);
    starting_point(stage, &mut p);
    data(recipe, &mut p);
    optimizer(recipe, &mut p);
    portions(recipe, &mut p);
    let Ok(entry) = algo::find(recipe.algorithm_name()) else { return p.0 };
    let taught = recipe.algorithm().is_ok_and(|a| a.needs().teacher);
    p.when(
        recipe.teacher.path.is_some() && !taught,
        "teacher.path",
        format!("{} has no teacher", recipe.algorithm_name()),
        "leave out teacher.path",
    );
    if entry.wants == Wants::Rollouts {
        rollouts(stage, &mut p);
        rewards(recipe, verifiers, &mut p);
    } else {
        // A reference point over mismatched answers puts the longest answer after the longest question.
        let (each, one) = match entry.wants {
            wants if wants.paired() => (2, "one pair, each side of"),
            Wants::Labelled => (2, "a question and another's answer, each of"),
            _ => (1, "one sequence of"),
        };
        let (budget, longest) = (recipe.train.micro_batch_tokens, each * recipe.data.max_length);
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

/// Whether `stage:NAME` names a stage that has run by then.
fn references(r: &Recipe, earlier: &[Stage], p: &mut Problems) {
    let rewards = r.reward.iter().map(|reward| ("reward", &reward.model));
    let places =
        [("model.path", &r.model.path), ("critic.path", &r.critic.path), ("teacher.path", &r.teacher.path)];
    for (key, path) in places.into_iter().chain(rewards) {
        let Some(name) = path.as_ref().and_then(|p| p.strip_prefix("stage:")) else { continue };
        let known: Vec<&str> = earlier.iter().map(|s| s.name.as_str()).collect();
        if !known.contains(&name) {
            let near = nearest(name, known.iter().copied()).or(known.last().copied());
            let fix = near.map_or("a directory".into(), |n| format!("\"stage:{n}\""));
            p.when(true, key, format!("no stage {name:?} comes before this one"), fix);
        }
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
    if let Some(bad) = d.weights.iter().find(|w| !(**w > 0.0 && **w <= MAX_WEIGHT)) {
        let what = format!("a weight is {bad}, expected a number above 0, at most {MAX_WEIGHT}");
        p.when(true, "data.weights", what, "data.weights = [1.0, 1.0]");
    }
    p.when(d.max_length == 0, "data.max_length", "nothing would be left", "data.max_length = 2048");
    p.word("data.overlong", &d.overlong, OVERLONG);
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
    let (epochs, many) = (r.train.epochs, r.train.steps.is_none() && !(r.train.epochs <= MAX_EPOCHS));
    p.when(many, "train.epochs", format!("{epochs} epochs, at most {MAX_EPOCHS}"), "train.epochs = 3.0");
}

fn evaluation(r: &Recipe, p: &mut Problems) {
    p.when(r.eval.samples == 0, "eval.samples", "no answers to judge", "eval.samples = 1");
    let asks = r.eval.every > 0 || r.eval.at_start;
    p.when(asks && r.eval.prompts == 0, "eval.prompts", "no prompts to judge by", "eval.prompts = 200");
    let cold = r.eval.temperature.is_some_and(|t| t < 0.0);
    p.when(cold, "eval.temperature", "must not be negative", "0 takes the likeliest token");
    let greedy = r.eval.temperature == Some(0.0) && r.eval.samples > 1;
    let what = format!("{} samples at temperature 0 are all the same", r.eval.samples);
    p.when(greedy, "eval.samples", what, "eval.samples = 1, or a temperature above 0");
    let (split, task) = (r.eval.split, r.data.train.iter().any(|t| t.starts_with("task:")));
    let files = r.data.train.iter().any(|t| !t.starts_with("task:"));
    let share = (0.0..1.0).contains(&split);
    p.when(!share, "eval.split", format!("{split} is not a share from 0 up to 1"), "eval.split = 0.05");
    p.when(
        split > 0.0 && task && !files,
        "eval.split",
        "a generated task has a held-out part of its own",
        "leave it out",
    );
    let both = split > 0.0 && !r.eval.data.is_empty();
    p.when(both, "eval.split", "eval.data is held out already", "leave out eval.split or eval.data");
    let idle = split > 0.0 && !asks;
    p.when(idle, "eval.split", "rows are held out for an evaluation that never happens", "eval.every = 50");
    let nothing = asks && !task && split == 0.0 && r.eval.data.is_empty();
    p.when(
        nothing,
        "eval",
        "there is nothing to evaluate on",
        "eval.split = 0.05, or eval.data = \"file.jsonl\"",
    );
    let c = &r.checkpoint;
    let odd = !(0.0..=1e9).contains(&c.minutes);
    p.when(
        odd,
        "checkpoint.minutes",
        format!("{} is no time to wait", c.minutes),
        "10, or 0 to save by steps alone",
    );
    p.when(c.keep == 0, "checkpoint.keep", "the run could not be resumed", "checkpoint.keep = 1");
    p.when(
        c.keep_best > 0 && c.metric.is_none(),
        "checkpoint.metric",
        "keep_best does not know what best means",
        "checkpoint.metric = \"eval/pass@1\"",
    );
    p.when(
        c.use_best && c.keep_best == 0,
        "checkpoint.keep_best",
        "use_best needs the best checkpoint to be kept",
        "checkpoint.keep_best = 1",
    );
    let judged = c.metric.as_ref().is_some_and(|m| m.starts_with("eval/"));
    p.when(
        c.keep_best > 0 && judged && r.eval.every == 0,
        "eval.every",
        "keep_best goes by an evaluation that never happens",
        "eval.every = 50",
    );
    p.when(
        c.patience > 0 && !judged,
        "checkpoint.metric",
        "patience waits for a metric of the evaluation to improve, and none is named",
        "checkpoint.metric = \"eval/pass@1\"",
    );
    p.when(
        c.patience > 0 && judged && r.eval.every == 0,
        "eval.every",
        "patience counts evaluations, and there are none before the end",
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
        needs.reference && !needs.teacher && recipe.model.init.is_some(),
        "algo.kl.coef",
        "KL to the reference would hold the policy to a random model (model.init)",
        "algo.kl.coef = 0, or an SFT stage before this one",
    );
    p.when(
        needs.teacher && recipe.teacher.path.is_none(),
        "teacher.path",
        format!("{name} learns from a teacher, and there is none"),
        "teacher.path = \"directory\"",
    );
    p.when(
        needs.f32 && recipe.model.dtype.as_deref() == Some("bf16"),
        "model.dtype",
        format!("{name} measures small moves of the weights, which bf16 loses"),
        "model.dtype = \"f32\"",
    );
    let searches = algorithm.trust_region().is_some();
    p.when(
        searches && recipe.optim.ema.is_some(),
        "optim.ema",
        format!("{name} moves the weights without the optimizer, which would average nothing"),
        "leave out optim.ema",
    );
    p.when(
        searches && needs.critic && recipe.critic.shared,
        "critic.shared",
        format!("{name} moves the policy alone, and a critic on its trunk would move with it"),
        "critic.shared = false",
    );
    let (_, minibatches) = algorithm.passes();
    let answers = r.prompts * r.samples;
    p.when(
        answers > 0 && minibatches > answers,
        "algo.minibatches",
        format!("{answers} answers do not make {minibatches} minibatches"),
        format!("algo.minibatches = {answers} at most, or more rollout.prompts"),
    );
    let baseline = recipe.algo.get("advantage").and_then(|a| a.get("baseline"));
    p.when(
        answers == 1 && baseline.is_some_and(|b| b == "batch"),
        "algo.advantage.baseline",
        "one answer is its own mean: every advantage is 0",
        "rollout.prompts = 32",
    );
    let filters = recipe.algo.get("filter_equal").is_some_and(|f| f == true);
    p.when(
        filters && r.samples == 1,
        "algo.filter_equal",
        "with one answer to a prompt all rewards of a group are equal: nothing passes the filter",
        "rollout.samples = 8, or algo.filter_equal = false",
    );
}

/// A recipe without any is not wrong by itself: a generated task has its own, and rows may bring theirs.
fn rewards(r: &Recipe, verifiers: &[&str], p: &mut Problems) {
    let silent = !r.reward.is_empty() && r.reward.iter().all(|x| x.weight == Some(0.0));
    p.when(silent, "reward", "all weights are 0, so nothing is learned from", "weight = 1.0");
    for reward in &r.reward {
        let sources = [reward.verifier.is_some(), reward.python.is_some(), reward.model.is_some()];
        let count = sources.iter().filter(|s| **s).count();
        p.when(
            count != 1,
            "reward",
            format!("one [[reward]] has {count} sources"),
            "exactly one of verifier, python, model",
        );
        p.when(
            reward.function.is_some() && reward.python.is_none(),
            "reward",
            "function names a function of a python file, and there is none",
            "python = \"file.py\"",
        );
        if let Some(verifier) = &reward.verifier {
            p.word("reward", verifier, verifiers);
        }
    }
}

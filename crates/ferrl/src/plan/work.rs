//! FLOPs of a step, and the seconds they take at a fraction of the machine's peak.
//!
//! A product of a `t x k` and a `k x n` matrix is `2 t k n` operations. Backward has two products for each of forward's; the
//! head recomputes its logits; causal attention processes half of the keys on average.

use super::Inputs;
use super::memory::weights;
use crate::credit::StepSplit;
use crate::recipe::Recipe;
use ferrl_engine::model::ModelConfig;
use ferrl_engine::model::config::Experts;
use ferrl_kernels::Footprint;

/// Operations of one step.
#[derive(Clone, Copy, Debug, Default, PartialEq)]
pub struct Work {
    /// Forward and backward of all passes.
    pub train: f64,
    /// Passes of reference and critic.
    pub annotate: f64,
    /// Sampling, prompts included.
    pub sample: f64,
    /// All evaluations of the stage, not of one step.
    pub evaluate: f64,
}

/// Speed of the machine.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Rates {
    /// Operations a second while training.
    pub training: f64,
    /// While sampling.
    pub sampling: f64,
}

impl Rates {
    /// The measured fractions of a given peak of multiply-adds per second (two operations each) that a device reaches, in the
    /// stage's number format.
    pub fn of(device: &Footprint, peak: f64) -> Self {
        Rates { training: device.training_share * peak, sampling: device.sampling_share * peak }
    }
}

impl Work {
    pub fn step_seconds(&self, rates: Rates) -> f64 {
        (self.train + self.annotate) / rates.training + self.sample / rates.sampling
    }

    pub fn evaluation_seconds(&self, rates: Rates) -> f64 {
        self.evaluate / rates.sampling
    }
}

/// Sizes of the groups of ranks that compute a pass together. They repeat some of its work: each tensor-parallel rank computes
/// all experts, and each context-parallel rank sums the experts' gradients over all tokens.
#[derive(Clone, Copy)]
pub(super) struct Together {
    pub tp: usize,
    pub sp: usize,
    pub rollout_tp: usize,
}

impl Together {
    const ALONE: Together = Together { tp: 1, sp: 1, rollout_tp: 1 };
}

/// Operations per token of the layers' matrices; of experts, those of the few it is sent to.
fn layers(c: &ModelConfig) -> f64 {
    let matrices = c.params().into_iter().filter(|p| p.id.layer.is_some() && !p.id.is_vector());
    let idle = weights(c) - c.active_weights();
    2.0 * (matrices.map(|p| p.len()).sum::<usize>() - idle) as f64
}

/// Those of experts.
fn experts(c: &ModelConfig) -> f64 {
    let of = |e: &Experts| e.per_token * (e.width + c.expert_up_width(e)) * c.hidden;
    2.0 * (0..c.layers).filter_map(|layer| c.experts_of(layer)).map(of).sum::<usize>() as f64
}

/// Operations per token of attention that ranks which share tokens compute beside their part of it: beyond the key heads each GPU
/// attends for all rows, and a CPU computes scores twice in backward.
fn attention_again(i: &Inputs, c: &ModelConfig, t: Together, passes: f64) -> f64 {
    let whole = attention(c, i.lengths.sequence);
    match (c.shares_heads(t.tp, t.sp), i.device.own_memory) {
        (true, _) => 0.0,
        (false, true) => passes * (t.sp - 1) as f64 * whole,
        (false, false) if passes > 1.0 => whole,
        _ => 0.0,
    }
}

/// Operations per token of attention in sequences of that length.
fn attention(c: &ModelConfig, length: f64) -> f64 {
    let seen = |window: &Option<usize>| window.map_or(length / 2.0, |w| (w as f64).min(length / 2.0));
    4.0 * c.attention_width() as f64 * c.windows.iter().map(seen).sum::<f64>()
}

fn head(c: &ModelConfig) -> f64 {
    if c.head.has_lm() { 2.0 * (c.vocab * c.hidden) as f64 } else { 2.0 * c.hidden as f64 }
}

/// Operations of one step.
pub fn work(i: &Inputs) -> Work {
    work_of(i, Together::ALONE)
}

/// Operations of one step of all ranks.
pub(super) fn work_of(i: &Inputs, t: Together) -> Work {
    let (r, l) = (&i.recipe, &i.lengths);
    let (passes, minibatches) = (i.updates.epochs, i.updates.minibatches);
    let tokens = (i.update_tokens() * minibatches) as f64;
    let repeated = |c: &ModelConfig, tp: usize| (tp - 1) as f64 * experts(c);
    let trunk = |c: &ModelConfig| layers(c) + attention(c, l.sequence);
    let forward = |c: &ModelConfig| trunk(c) + head(c) + repeated(c, t.tp) + attention_again(i, c, t, 1.0);
    let passes_over = if r.model.recompute { 4.0 } else { 3.0 };
    let both = |c: &ModelConfig| {
        let sums = (t.tp * (t.sp - 1)) as f64 * experts(c);
        let repeated = passes_over * repeated(c, t.tp) + sums + attention_again(i, c, t, passes_over);
        passes_over * trunk(c) + 4.0 * head(c) + repeated
    };
    let sampled = |c: &ModelConfig| trunk(c) + repeated(c, t.rollout_tp);
    let train = passes as f64 * tokens * (both(&i.config) + i.critic.as_ref().map_or(0.0, both));
    let compared = i.teacher.as_ref().unwrap_or(&i.config);
    let reference = if i.needs.reference || i.teacher.is_some() { forward(compared) } else { 0.0 };
    let critic =
        if i.needs.critic { i.critic.as_ref().map_or_else(|| forward(&i.config), forward) } else { 0.0 };
    let judges: f64 = i.judges.iter().map(|(c, _)| forward(c)).sum();
    let mut work = Work { train, annotate: tokens * (reference + critic + judges), ..Default::default() };
    if i.feed.sampled() {
        let answers = |prompts: f64, samples: f64| {
            let read = prompts * l.prompt * sampled(&i.config); // once for all completions of the prompt
            let token = sampled(&i.config) + head(&i.config);
            read + prompts * samples * r.rollout.max_new_tokens as f64 * token
        };
        let completions = r.rollout.prompts as f64 * r.rollout.samples as f64;
        work.sample = answers(r.rollout.prompts as f64, r.rollout.samples as f64)
            + continued(r, completions) * (sampled(&i.config) + head(&i.config));
        let times = match (r.eval.every, steps(i)) {
            (0, _) | (_, None) => f64::from(r.eval.at_start),
            (every, Some(steps)) => (steps / every) as f64,
        } + f64::from(r.eval.at_start);
        work.evaluate = times * answers(r.eval.prompts as f64, (r.eval.samples + 1) as f64);
    }
    work
}

/// Tokens of a step's rollouts: those of prompts, which completions share, and those that are sampled.
pub(super) fn sampled_tokens(i: &Inputs) -> (f64, f64) {
    let r = &i.recipe;
    let (prompts, completions) = (r.rollout.prompts as f64, (r.rollout.prompts * r.rollout.samples) as f64);
    (prompts * i.lengths.prompt, completions * r.rollout.max_new_tokens as f64 + continued(r, completions))
}

/// Tokens of a step, where its text decides.
const STEP_TOKENS: usize = 16;

/// Tokens of the continuations that estimate the values of steps: from the prompt, and for each completion from the end of
/// every step but the last, each on average half as long as a completion.
fn continued(r: &Recipe, completions: f64) -> f64 {
    let algorithm = r.algorithm().ok();
    let Some(vine) = algorithm.as_ref().and_then(|a| a.vine()).filter(|_| !r.search.train) else {
        return 0.0;
    };
    let most = r.rollout.max_new_tokens;
    let step = if vine.split == StepSplit::Tokens { vine.step_tokens } else { STEP_TOKENS };
    let steps = most.div_ceil(step.max(1)).max(1);
    let inner = (steps - 1).min(vine.max_steps) as f64;
    let k = if vine.interval.is_some() { vine.max_samples.max(vine.samples) } else { vine.samples } as f64;
    let whole = most as f64;
    k * (r.rollout.prompts as f64 * whole + completions * inner * whole / 2.0)
}

/// Steps of a stage, where they are known.
pub fn steps(i: &Inputs) -> Option<u64> {
    let r = &i.recipe;
    let portion = i.feed.per_step(r);
    // The last batch of an epoch is smaller.
    let epochs = |rows: usize| (r.train.epochs * rows.div_ceil(portion) as f64).ceil().max(1.0) as u64;
    r.train.steps.or_else(|| i.lengths.rows.map(epochs))
}

/// Millions of weights, for people; of a model with experts also how many a token computes with.
pub(super) fn millions(c: &ModelConfig) -> String {
    let (all, active) = (weights(c) as f64 / 1e6, c.active_weights() as f64 / 1e6);
    if c.experts.is_some() {
        format!("{all:.2} M weights ({active:.2} M active)")
    } else {
        format!("{all:.2} M weights")
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrl_engine::checkpoint::InitOptions;

    /// Hidden 256, four layers, four and two heads of 64, feed-forward 1024, vocabulary 4096.
    fn config() -> ModelConfig {
        let mut o = InitOptions::new("qwen2");
        (o.hidden, o.layers, o.vocab, o.ffn) = (256, 4, 4096, Some(1024));
        (o.heads, o.kv_heads, o.tied) = (Some(4), Some(2), Some(true));
        o.build().expect("a model").0
    }

    #[test]
    fn continuations_of_vineppo_are_counted() {
        let text = "algo = { name = \"vineppo\", vine = { samples = 3, split = \"tokens\", step_tokens = 5 } }\n\
                    rollout = { prompts = 2, samples = 4, max_new_tokens = 20 }\nmodel.init.hidden = 32\n\
                    data.train = [\"task:countdown\"]\n";
        let plan = Recipe::parse(text, "r.toml", "r", &[]).expect("a recipe");
        let recipe = &plan.stages[0].recipe;
        // Four steps of five tokens: 3 continuations of 20 for 2 prompts, and of 10 from 3 ends for 8 completions.
        assert_eq!(continued(recipe, 8.0), 3.0 * (2.0 * 20.0 + 8.0 * 3.0 * 10.0));
        let grpo = Recipe { algo: Default::default(), ..recipe.clone() };
        assert_eq!(continued(&grpo, 8.0), 0.0);
    }

    #[test]
    fn idle_experts_cost_nothing_and_are_counted() {
        let mut o = InitOptions::new("qwen3_moe");
        (o.hidden, o.layers, o.vocab, o.heads) = (64, 2, 100, Some(2));
        (o.experts, o.experts_per_token, o.expert_ffn) = (Some(8), Some(2), Some(32));
        (o.tied, o.ffn) = (Some(true), Some(256));
        let c = o.build().expect("a model").0;
        let (attention, expert) = (4 * 64 * 64, 3 * 32 * 64);
        assert_eq!(layers(&c), 2.0 * (2 * (attention + 8 * 64 + 2 * expert)) as f64);
        assert_eq!(weights(&c) - c.active_weights(), 2 * 6 * expert);
        assert_eq!(millions(&c), "0.14 M weights (0.07 M active)");
        assert_eq!(experts(&c), 2.0 * (2 * 2 * expert) as f64);
    }

    #[test]
    fn operations_of_a_known_model() {
        let c = config();
        let matrices = 4 * (512 * 256 + 256 * 256 + 2048 * 256 + 256 * 1024);
        assert_eq!(layers(&c), 2.0 * matrices as f64);
        assert_eq!(head(&c), 2.0 * 4096.0 * 256.0);
        // Scores and sums over half of 128 keys: 2 + 2 operations for each of 256 numbers, in four layers.
        assert_eq!(attention(&c, 128.0), 4.0 * 256.0 * 64.0 * 4.0);
    }
}

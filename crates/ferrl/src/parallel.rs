//! The parallel layout of a run, from the recipe's sizes and the number of ranks.
//!
//! Weights are on a mesh (ddp, fsdp, tp), sequences on a mesh (dp, sp, tp); both contain all ranks of the run.

use crate::plan::{new_config, read_config};
use crate::recipe::{Parallel, Recipe, Resolved};
use ferrl_engine::model::ModelConfig;
use ferrl_engine::{Error, Result};
use std::path::Path;

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct RankLayout {
    /// All ranks.
    pub ranks: usize,
    /// Copies of the weights.
    pub ddp: usize,
    /// Ranks that split one copy (ZeRO-3); 1 is a whole copy.
    pub fsdp: usize,
    /// Tensor parallelism: ranks that compute one layer together.
    pub tp: usize,
    /// Context parallelism: ranks that share the tokens of a sequence.
    pub sp: usize,
    /// Ranks that sample one prompt together.
    pub rollout_tp: usize,
}

impl RankLayout {
    /// The layout of a recipe on `ranks` ranks; an error if its sizes do not divide them.
    pub fn of(recipe: &Recipe, ranks: usize) -> Result<RankLayout> {
        let Parallel { ddp_size, tp_size: tp, sp_size: sp } = recipe.parallel;
        let rollout_tp = if recipe.rollout.tp_size == 0 { tp } else { recipe.rollout.tp_size };
        divides("parallel.tp_size", tp, ranks)?;
        divides("parallel.sp_size", sp, ranks)?;
        divides("parallel.sp_size times parallel.tp_size", sp.saturating_mul(tp), ranks)?;
        divides("rollout.tp_size", rollout_tp, ranks)?;
        let ddp = if ddp_size == 0 { ranks / tp } else { ddp_size };
        divides("parallel.ddp_size times parallel.tp_size", ddp.saturating_mul(tp), ranks)?;
        Ok(RankLayout { ranks, ddp, fsdp: ranks / (ddp * tp), tp, sp, rollout_tp })
    }

    /// Whether a rank owns a part of the weights.
    pub fn splits(&self) -> bool {
        self.fsdp * self.tp * self.sp > 1
    }

    /// Sizes of the groups of ranks that compute with one model together, where there are any, with their keys.
    pub fn teams(&self) -> Vec<(&'static str, usize)> {
        let all = [
            ("parallel.tp_size", self.tp),
            ("parallel.sp_size", self.sp),
            ("rollout.tp_size", self.rollout_tp),
        ];
        all.into_iter().filter(|(_, size)| *size > 1).collect()
    }

    /// Refuses layouts that a run does not support: models that the groups cannot split, a trust region over an adapter with a split
    /// base. Used by runs and plans.
    pub fn serves<'a>(
        &self,
        recipe: &Recipe,
        models: impl IntoIterator<Item = &'a ModelConfig>,
    ) -> Result<()> {
        let trusts = || recipe.algorithm().is_ok_and(|a| a.updates().trust_region.is_some());
        if self.splits() && recipe.adapter.is_some() && trusts() {
            let what = "a trust region compares with a copy of the policy, which is not made of an adapter whose base is split";
            let fix = "parallel.ddp_size = 0, and parallel.tp_size and parallel.sp_size = 1";
            return Err(Error::usage(what).at("parallel").fix(fix));
        }
        models.into_iter().try_for_each(|config| self.shares(config))
    }

    fn shares(&self, config: &ModelConfig) -> Result<()> {
        let all = [("parallel.tp_size", self.tp), ("rollout.tp_size", self.rollout_tp)];
        all.into_iter().try_for_each(|(key, tp)| config.check_team(tp).map_err(|e| e.at(key)))
    }

    /// Data-parallel size: number of groups with separate micro-batches.
    pub fn dp(&self) -> usize {
        self.ranks / (self.sp * self.tp)
    }
}

fn divides(what: &str, size: usize, ranks: usize) -> Result<()> {
    if size > 0 && ranks.is_multiple_of(size) {
        return Ok(());
    }
    let all = if ranks == 1 { "1 rank".to_string() } else { format!("{ranks} ranks") };
    let key = what.split(' ').next().unwrap_or(what);
    Err(Error::usage(format!("{what} is {size}, which does not divide {all}")).at(key).fix(format!(
        "sizes whose product divides {ranks}, or another number of ranks: ferrl launch -n {size} -- train ..."
    )))
}

/// Refuses a run with a stage that does not support this number of ranks.
pub fn check_stages(resolved: &Resolved, ranks: usize) -> Result<()> {
    for stage in &resolved.stages {
        let place = |e: Error| if stage.staged { e.at(format!("stage {}", stage.name)) } else { e };
        check(&stage.recipe, ranks).map_err(place)?;
    }
    Ok(())
}

/// The layout of a recipe on `ranks` ranks; an error where sizes do not divide them or the engine cannot do it, as far as the
/// recipe tells: `device = "auto"`, and a model that an earlier stage leaves, are known when the stage begins.
pub fn check(recipe: &Recipe, ranks: usize) -> Result<RankLayout> {
    let layout = RankLayout::of(recipe, ranks)?;
    let named = Some(&recipe.device).filter(|device| *device != ferrl_kernels::AUTO);
    named.map(|device| ferrl_kernels::footprint(device)).transpose()?;
    // Any model can be computed with by a rank alone, and its configuration need not be read.
    let groups = !layout.teams().is_empty();
    let models = groups.then(|| [known_config(recipe), known_critic(recipe)]);
    layout.serves(recipe, models.iter().flatten().flatten())?;
    Ok(layout)
}

/// The model's configuration where it can be read before anything else is.
fn known_config(recipe: &Recipe) -> Option<ModelConfig> {
    match &recipe.model.init {
        Some(init) => new_config(recipe, init).ok(),
        None => read_config(Path::new(recipe.model.path.as_ref()?)).ok(),
    }
}

/// The same of a critic with weights of its own.
fn known_critic(recipe: &Recipe) -> Option<ModelConfig> {
    let own = recipe.algorithm().is_ok_and(|a| a.needs().critic) && !recipe.critic.shared;
    read_config(Path::new(recipe.critic.path.as_ref().filter(|_| own)?)).ok()
}

#[cfg(test)]
mod tests {
    use super::*;

    fn recipe(ddp: usize, tp: usize, sp: usize, rollout_tp: usize) -> Recipe {
        let parallel = Parallel { ddp_size: ddp, tp_size: tp, sp_size: sp };
        let mut r = Recipe { parallel, ..Default::default() };
        r.rollout.tp_size = rollout_tp;
        r
    }

    #[test]
    fn sizes_become_a_layout() {
        let of = |ddp, tp, sp, rollout, ranks| RankLayout::of(&recipe(ddp, tp, sp, rollout), ranks).unwrap();
        assert_eq!(
            of(0, 1, 1, 0, 8),
            RankLayout { ranks: 8, ddp: 8, fsdp: 1, tp: 1, sp: 1, rollout_tp: 1 },
            "whole weights everywhere"
        );
        assert_eq!(of(1, 1, 1, 0, 8).fsdp, 8, "ZeRO-3");
        assert_eq!(of(2, 2, 1, 0, 8), RankLayout { ranks: 8, ddp: 2, fsdp: 2, tp: 2, sp: 1, rollout_tp: 2 });
        assert_eq!(of(1, 2, 4, 8, 64).dp(), 8);
        assert_eq!(of(0, 4, 1, 1, 8).ddp, 2);
    }

    #[test]
    fn products_divide_the_ranks() {
        let error = |r: Recipe, ranks| RankLayout::of(&r, ranks).unwrap_err().to_string();
        assert!(error(recipe(3, 1, 1, 0), 4).contains("3, which does not divide 4 ranks"));
        assert!(error(recipe(2, 4, 1, 0), 4).contains("parallel.ddp_size times parallel.tp_size is 8"));
        assert!(error(recipe(0, 2, 4, 0), 4).contains("parallel.sp_size times parallel.tp_size is 8"));
        assert!(error(recipe(0, 1, 1, 2), 1).contains("does not divide 1 rank"));
        assert!(error(recipe(usize::MAX, 2, 1, 0), 2).contains("does not divide"));
    }

    #[test]
    fn what_the_engine_does_not_serve_is_refused() {
        assert!(check(&recipe(0, 1, 1, 0), 3).is_ok());
        assert!(check(&recipe(3, 1, 1, 1), 3).is_ok(), "as many copies as ranks");
        assert!(check(&recipe(1, 1, 1, 1), 3).is_ok(), "ZeRO-3");
        assert!(check(&recipe(0, 2, 1, 1), 4).is_ok(), "tensor parallelism in training");
        assert!(check(&recipe(0, 1, 1, 2), 4).is_ok(), "and in rollouts");
        assert!(check(&recipe(1, 1, 2, 0), 4).is_ok(), "context parallelism");
        assert!(check(&recipe(0, 2, 2, 0), 4).is_ok(), "both");
    }

    fn with_two_key_heads(mut r: Recipe) -> Recipe {
        let init = serde_json::json!({ "family": "qwen2", "hidden": 48, "heads": 6, "kv_heads": 2 });
        r.model.init = Some(serde_json::from_value(init).unwrap());
        r
    }

    #[test]
    fn tokens_are_shared_beyond_the_key_heads() {
        for (tp, sp) in [(1, 4), (2, 2), (1, 12), (2, 6)] {
            assert!(check(&with_two_key_heads(recipe(0, tp, sp, 1)), 12).is_ok(), "tp {tp}, sp {sp}");
        }
    }

    #[test]
    fn heads_that_ranks_cannot_share_are_named_before_work_is_spent() {
        for (r, key) in [(recipe(0, 4, 1, 1), "parallel.tp_size"), (recipe(0, 1, 1, 4), "rollout.tp_size")] {
            let r = with_two_key_heads(r);
            let error = check(&r, 4).unwrap_err().to_string();
            let said = "4 ranks cannot share 6 query and 2 key heads equally";
            assert!(error.contains(key) && error.contains(said) && error.contains("one of 1, 2"), "{error}");
        }
    }

    #[test]
    fn a_layout_is_taken_on_every_device() {
        let on = |device: &str, r: Recipe| check(&Recipe { device: device.into(), ..r }, 4);
        for device in ["cpu", "cuda", "cuda:1"] {
            for r in [recipe(1, 1, 1, 1), recipe(0, 2, 2, 0), recipe(0, 1, 1, 2), recipe(0, 1, 4, 1)] {
                assert!(on(device, r).is_ok(), "{device}");
            }
        }
        assert!(on("abacus", recipe(0, 2, 2, 0)).is_err());
    }

    #[test]
    fn a_trust_region_over_a_split_adapter_is_refused_before_its_first_update() {
        let text =
            "algo = \"trpo\"\nmodel.init.hidden = 32\nadapter.r = 4\ndata.train = [\"task:countdown\"]\n";
        let plan = Recipe::parse(text, "r.toml", "r", &[]).unwrap();
        let mut r = plan.stages[0].recipe.clone();
        assert!(check(&r, 2).is_ok(), "whole weights");
        r.parallel.ddp_size = 1;
        assert!(check(&r, 2).unwrap_err().to_string().contains("trust region"), "ZeRO-3");
        r.adapter = None;
        assert!(check(&r, 2).is_ok());
    }
}

//! Which parameters are trained: all but the tensors of `model.frozen`, and without routers unless
//! `model.train_router` says so.

use crate::recipe::ModelSettings;
use ferrl_engine::model::{ModelConfig, Slot, family};
use ferrl_engine::{Error, Result, nearest};

/// Names of a model's tensors, as in its files.
fn names(config: &ModelConfig) -> Result<Vec<String>> {
    let tensors = family(config.family)?.tensors(config);
    Ok(tensors.into_iter().flat_map(|t| t.parts.into_iter().map(|p| p.name)).collect())
}

/// Names of the routers' tensors.
fn routers(config: &ModelConfig) -> Result<impl Iterator<Item = String>> {
    let tensors = family(config.family)?.tensors(config).into_iter();
    let routers = tensors.filter(|t| t.param.id.slot == Slot::Router);
    Ok(routers.flat_map(|t| t.parts.into_iter().map(|p| p.name)))
}

/// The patterns of `model.frozen`, and the routers unless they are trained.
pub fn patterns(config: &ModelConfig, model: &ModelSettings) -> Result<Vec<String>> {
    let names = names(config)?;
    let hits = |part: &&String| names.iter().any(|name| name.contains(part.as_str()));
    let mut frozen: Vec<String> = model.frozen.iter().filter(hits).cloned().collect();
    if !model.train_router {
        frozen.extend(routers(config)?);
    }
    Ok(frozen)
}

/// Refuses patterns that freeze nothing, patterns that freeze all of the policy or critic, and training of routers in a model without
/// any.
pub fn check(config: &ModelConfig, critic: Option<&ModelConfig>, model: &ModelSettings) -> Result<()> {
    let (frozen, wrong) = (&model.frozen, |what: String| Error::usage(what).at("model.frozen"));
    if model.train_router && config.experts.is_none() {
        let what = format!("the family {} has no experts and thus no routers", config.family);
        return Err(Error::usage(what).at("model.train_router").fix("model.train_router = false"));
    }
    let mut all: Vec<String> = Vec::new();
    for (who, config) in [("the policy", Some(config)), ("the critic", critic)] {
        let Some(config) = config else { continue };
        let names = names(config)?;
        let left = names.iter().filter(|n| !frozen.iter().any(|part| n.contains(part.as_str()))).count();
        if left == 0 {
            let what = format!("all {} tensors of {who} are frozen", names.len());
            return Err(wrong(what).fix("leave the tensors out that should be trained"));
        }
        all.extend(names);
    }
    let Some(part) = frozen.iter().find(|part| !all.iter().any(|n| n.contains(part.as_str()))) else {
        return Ok(());
    };
    // The whole name, or one of its parts, whichever is meant.
    let words = all.iter().flat_map(|n| n.split('.'));
    let near = nearest(part, words).or_else(|| nearest(part, all.iter().map(String::as_str)));
    let near = near.or(all.first().map(String::as_str)).unwrap_or_default();
    Err(wrong(format!("{part:?} is part of no tensor's name")).fix(format!("model.frozen = [{near:?}]")))
}

#[cfg(test)]
mod tests {
    use super::*;
    use ferrl_engine::checkpoint::InitOptions;
    use ferrl_engine::model::Head;

    fn model(frozen: &[&str], train_router: bool) -> ModelSettings {
        let frozen = frozen.iter().map(|f| f.to_string()).collect();
        ModelSettings { frozen, train_router, ..Default::default() }
    }

    #[test]
    fn routers_are_frozen_unless_the_recipe_trains_them() {
        let config = InitOptions::new("qwen3_moe").build().unwrap().0;
        let frozen = patterns(&config, &model(&["embed"], false)).unwrap();
        assert_eq!(frozen.len(), 1 + config.layers);
        assert_eq!(frozen[1], "model.layers.0.mlp.gate.weight");
        assert_eq!(patterns(&config, &model(&["embed"], true)).unwrap(), ["embed"]);
        let dense = InitOptions::new("llama").build().unwrap().0;
        assert!(patterns(&dense, &model(&[], false)).unwrap().is_empty());
        let said = check(&dense, None, &model(&[], true)).unwrap_err().to_string();
        assert!(said.contains("model.train_router") && said.contains("has no experts"), "{said}");
        check(&config, None, &model(&[], true)).unwrap();
    }

    #[test]
    fn frozen_tensors_are_named_and_something_is_left() {
        let config = InitOptions::new("llama").build().unwrap().0;
        let check = |frozen: &[&str], critic: Option<&ModelConfig>| {
            super::check(&config, critic, &model(frozen, false)).map_err(|e| e.to_string())
        };
        check(&[], None).unwrap();
        // Two that name the same tensor are no mistake.
        check(&["embed_tokens", "embed", "layers.0."], None).unwrap();
        let said = check(&["embd_tokens"], None).unwrap_err();
        assert!(said.contains("model.frozen") && said.contains("[\"embed_tokens\"]"), "{said}");
        for all in [&[""][..], &["model.", "lm_head"][..]] {
            let said = check(all, None).unwrap_err();
            assert!(
                said.contains("model.frozen") && said.contains("tensors of the policy are frozen"),
                "{said}"
            );
        }
        // A head that only the policy has may be frozen beside a critic.
        let critic = ModelConfig { head: Head::Score, ..config.clone() };
        check(&["lm_head"], Some(&critic)).unwrap();
        assert!(patterns(&critic, &model(&["lm_head", "layers"], false)).unwrap() == ["layers"]);
    }
}

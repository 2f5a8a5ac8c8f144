//! What of a model is trained: all tensors but those that `model.frozen` names.

use ferrl_engine::model::{Config, family};
use ferrl_engine::{Error, Result, nearest};

/// Names of a model's tensors, as in its files.
fn names(config: &Config) -> Result<Vec<String>> {
    let tensors = family(config.family)?.tensors(config);
    Ok(tensors.into_iter().flat_map(|t| t.parts.into_iter().map(|p| p.name)).collect())
}

/// Those of `frozen` that are part of some tensor's name.
pub fn patterns(config: &Config, frozen: &[String]) -> Result<Vec<String>> {
    let names = names(config)?;
    let hits = |part: &&String| names.iter().any(|name| name.contains(part.as_str()));
    Ok(frozen.iter().filter(hits).cloned().collect())
}

/// Refuses patterns that freeze nothing, of policy or critic, and patterns that leave nothing to train.
pub fn check(config: &Config, critic: Option<&Config>, frozen: &[String]) -> Result<()> {
    let wrong = |what: String| Error::usage(what).at("model.frozen");
    let mut all: Vec<String> = Vec::new();
    for (who, config) in [("the policy", Some(config)), ("the critic", critic)] {
        let Some(config) = config else { continue };
        let names = names(config)?;
        let left = names.iter().filter(|n| !frozen.iter().any(|part| n.contains(part.as_str()))).count();
        if left == 0 {
            let what = format!("all {} tensors of {who} are frozen: nothing would be learned", names.len());
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

    #[test]
    fn frozen_tensors_are_named_and_something_is_left() {
        let config = InitOptions::new("llama").build().unwrap().0;
        let check = |frozen: &[&str], critic: Option<&Config>| {
            let frozen: Vec<String> = frozen.iter().map(|f| f.to_string()).collect();
            super::check(&config, critic, &frozen).map_err(|e| e.to_string())
        };
        check(&[], None).unwrap();
        // Two that name the same tensor are no mistake.
        check(&["embed_tokens", "embed", "layers.0."], None).unwrap();
        let said = check(&["embd_tokens"], None).unwrap_err();
        assert!(said.contains("model.frozen") && said.contains("[\"embed_tokens\"]"), "{said}");
        for all in [&[""][..], &["model.", "lm_head"][..]] {
            assert!(check(all, None).unwrap_err().contains("frozen: nothing would be learned"), "{all:?}");
        }
        // A head that only the policy has may be frozen beside a critic.
        let critic = Config { head: Head::Score, ..config.clone() };
        check(&["lm_head"], Some(&critic)).unwrap();
        assert!(patterns(&critic, &["lm_head".into(), "layers".into()]).unwrap() == ["layers"]);
    }
}

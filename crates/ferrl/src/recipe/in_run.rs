//! A stage's recipe outside of its run, for later evaluations and analyses.

use super::{Recipe, StageRecipe};
use std::convert::Infallible;
use std::path::Path;

/// The recipe with the folders of a run in place of `stage:NAME`.
pub fn in_run(recipe: &Recipe, stages: &[StageRecipe], run: &Path) -> Recipe {
    let dir = |path: &str| {
        let stage = path.strip_prefix("stage:").and_then(|name| stages.iter().find(|s| s.name == name))?;
        Some(run.join("stages").join(stage.index.to_string()).display().to_string())
    };
    let mut recipe = recipe.clone();
    for reward in &mut recipe.reward {
        if let Some(found) = reward.model.as_deref().and_then(dir) {
            reward.model = Some(found);
        }
        for option in reward.models_mut() {
            if let Some(found) = option.as_str().and_then(dir) {
                *option = found.into();
            }
        }
    }
    for path in [&mut recipe.model.path, &mut recipe.critic.path, &mut recipe.teacher.path] {
        if let Some(found) = path.as_deref().and_then(dir) {
            *path = Some(found);
        }
    }
    let placed =
        recipe.search.place_models(|path| Ok::<_, Infallible>(dir(path).unwrap_or_else(|| path.into())));
    placed.unwrap_or_else(|never| match never {});
    recipe
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Was: `ferrl eval RUN` looked for a folder of the name `stage:NAME` where a stage rewards with the model of another.
    #[test]
    fn models_of_other_stages_are_found_in_the_run() {
        let text = "model.path = \"m\"\ndata.train = [\"task:calibration\"]\n[[stage]]\nname = \"a\"\nalgo = \"sft\"\n\
                    [[stage]]\nname = \"b\"\nalgo = \"grpo\"\nmodel.path = \"stage:a\"\n\
                    reward = [{ model = \"stage:a\", options = { kind = \"decision\", extractor = \"stage:a\" } }]\n\
                    search = { strategy = \"mcts\", train = true, scorer = \"stage:a\",\n\
                    scorer_options = { kind = \"implicit\", reference = \"stage:a\" } }\n";
        let stages = Recipe::parse(text, "r.toml", "r", &[]).unwrap().stages;
        let found = in_run(&stages[1].recipe, &stages, Path::new("runs/x"));
        assert_eq!(found.model.path.as_deref(), Some("runs/x/stages/0"));
        assert_eq!(found.reward[0].model.as_deref(), Some("runs/x/stages/0"));
        assert_eq!(found.reward[0].options["extractor"], "runs/x/stages/0");
        assert_eq!(found.search.scorer, "runs/x/stages/0");
        assert_eq!(found.search.scorer_options["reference"], "runs/x/stages/0");
        assert_eq!(in_run(&stages[0].recipe, &stages, Path::new("x")).model.path.as_deref(), Some("m"));
    }
}

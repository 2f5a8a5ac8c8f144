//! Settings of TRL, verl and OpenRLHF, as their published configurations name them: each is answered with its counterpart here.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::recipe::Recipe;

const RECIPE: &str = "model.path = \"m\"\ndata.train = [\"p.jsonl\"]\nreward = \"numeric\"\n";

/// Lines of `their.key` and what the fix must name; `-` stands for "leave it out".
const LISTS: [(&str, &str); 3] = [
    ("TRL", include_str!("fixtures/elsewhere/trl.txt")),
    ("verl", include_str!("fixtures/elsewhere/verl.txt")),
    ("OpenRLHF", include_str!("fixtures/elsewhere/openrlhf.txt")),
];

fn answer(recipe: &str, overrides: &[String]) -> String {
    match Recipe::parse(recipe, "r.toml", "r", overrides) {
        Err(e) => e.to_string(),
        Ok(_) => String::new(),
    }
}

#[test]
fn settings_of_other_libraries_are_answered_with_their_counterparts() {
    let mut wrong = Vec::new();
    for (library, list) in LISTS {
        assert!(list.lines().count() > 100);
        for line in list.lines() {
            let (theirs, here) = line.split_once(' ').unwrap();
            let here = if here == "-" { "leave it out" } else { here };
            // On the command line and in a file.
            let table = theirs.rsplit_once('.').map_or(String::new(), |(table, _)| format!("[{table}]\n"));
            let file = format!("{RECIPE}{table}{} = 1\n", theirs.rsplit('.').next().unwrap());
            let clash = ["data.", "reward."].iter().any(|table| theirs.starts_with(table));
            let file = if clash { None } else { Some(file) };
            let said = [Some(answer(RECIPE, &[format!("{theirs}=1")])), file.map(|f| answer(&f, &[]))];
            for said in said.into_iter().flatten() {
                let fix = said.split_once("fix: ").map_or("", |(_, fix)| fix);
                let named =
                    said.contains(&format!("unknown key {theirs}")) || said.contains(&format!("{theirs}:"));
                if !fix.contains(here) || !(named || theirs == here) {
                    wrong.push(format!("{library} {theirs}: {here:?} is not in {said:?}"));
                }
            }
        }
    }
    assert!(wrong.is_empty(), "{} wrong:\n{}", wrong.len(), wrong.join("\n"));
}

/// Was: an unknown table hid everything in it, and one problem was reported at a time.
#[test]
fn a_whole_configuration_is_answered_at_once() {
    let verl = "[actor_rollout_ref.actor]\nppo_epochs = 2\noptim.lr = 1e-6\n[critic]\noptim.lr = 1e-5\n[trainer]\nnnodes = 2\n";
    let said = answer(&format!("{RECIPE}{verl}"), &["algorithm.adv_estimator=grpo".into()]);
    for part in
        ["actor_rollout_ref.actor.ppo_epochs", "mean optim.lr?", "mean critic.lr?", "algorithm.adv_estimator"]
    {
        assert!(said.contains(part), "{part}: {said}");
    }
    assert!(said.contains("r.toml:8: unknown key critic.optim.lr"), "the line: {said}");
    assert!(!said.contains("unknown key actor_rollout_ref\n"), "{said}");
    // A misspelt table of ours is still one problem.
    let said = answer(&format!("{RECIPE}[rolout]\nsamples = 4\nn = 2\n"), &[]);
    assert!(said.contains("unknown key rolout\n") && said.contains("did you mean rollout?"), "{said}");
}

/// Was: the fix for `mini_batch_size = 64` was a number of updates, for `epsilon` half of the clip range, and for
/// `greater_is_better` its opposite.
#[test]
fn what_has_another_unit_is_not_offered_as_the_same_setting() {
    for theirs in [
        "ppo_mini_batch_size", "num_mini_batches", "epsilon", "clip_ratio", "greater_is_better",
        "train_batch_size",
    ] {
        let said = answer(RECIPE, &[format!("{theirs}=1")]);
        assert!(said.contains("fix: ") && !said.contains("did you mean"), "{theirs}: {said}");
    }
}

#[test]
fn a_recipe_in_another_format_is_told_how_toml_writes_it() {
    let said = Recipe::parse("optim:\n  lr: 1e-6\n", "ppo.yaml", "ppo", &[]).unwrap_err().to_string();
    assert!(said.contains("ppo.yaml:1") && said.contains("not YAML") && said.contains("[optim]"), "{said}");
    let said = Recipe::parse("{\"optim\": {\"lr\": 1e-6}}", "r.json", "r", &[]).unwrap_err().to_string();
    assert!(said.contains("not JSON"), "{said}");
}

#[test]
fn schedulers_and_optimizers_of_other_libraries_have_the_nearest_of_ours() {
    let check = |over: &str| {
        let recipe = Recipe::parse(RECIPE, "r.toml", "r", &[over.to_string()]).unwrap();
        recipe.check(&["numeric"]).unwrap_err().to_string()
    };
    assert!(check("optim.schedule=cosine_with_min_lr").contains("optim.schedule = \"cosine\""));
    assert!(check("optim.schedule=constant_with_warmup").contains("optim.schedule = \"constant\""));
    assert!(check("optim.name=adamw_torch").contains("optim.name = \"adamw\""));
    assert!(check("optim.name=paged_adamw_8bit").contains("optim.name = \"adamw8\""));
}

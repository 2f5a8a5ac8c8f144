//! `ferrl analyze` and `ferrl credit` on runs as training leaves them.

use crate::common::*;
use crate::eval::tiny_run;
use serde_json::{Value, json};

/// A short run on a reward that is right in about half of the cases; returns its folder.
fn trained(folder: &Folder, name: &str, algo: &str) -> String {
    let python = folder.write(
        "odd.py",
        "def reward(completions, **columns):\n    return [float(len(c) % 2) for c in completions]\n",
    );
    let model = format!("{}/stages/0", tiny_run(folder));
    let recipe = folder.write(
        &format!("{name}.toml"),
        format!(
            "algo = {algo}\nmodel.path = {model:?}\n\
             data = {{ train = [\"task:countdown\"], max_length = 48 }}\nreward = [{{ python = {python:?} }}]\n\
             rollout = {{ prompts = 3, samples = 4, max_new_tokens = 8, cache_mib = 4 }}\n\
             train.steps = 2\ncheckpoint = {{ every = 1, keep = 4 }}\noptim.lr = 1e-3\n"
        ),
    );
    let runs = folder.path("runs");
    ok(&["train", &recipe, "--runs", &runs]);
    format!("{runs}/{name}")
}

fn analysed(run: &str, flags: &[&str]) -> Value {
    serde_json::from_str(&ok(&[&["analyze", run, "--json", "--threads", "1"], flags].concat())).unwrap()
}

#[test]
fn credit_of_a_run_is_recomputed_and_its_advantages_are_counted() {
    let folder = Folder::new("analyze-vine");
    let run = trained(
        &folder,
        "vine",
        "{ name = \"vineppo\", vine = { samples = 3, split = \"tokens\", step_tokens = 3 } }",
    );
    let out = folder.path("credit.jsonl");
    ok(&["credit", "vine", "--input", &run, "--output", &out]);
    let rows = rows(&folder.read("credit.jsonl"));
    assert_eq!(rows.len(), 24, "two steps of three prompts with four completions");
    for row in &rows {
        assert_eq!(
            (&row["values"], &row["advantages"]),
            (&row["credit"]["values"], &row["credit"]["advantages"])
        );
    }
    let of_step = |rows: &[Value]| -> Vec<f64> {
        rows.iter().flat_map(|r| r["advantages"].as_array().unwrap()).map(|a| a.as_f64().unwrap()).collect()
    };
    let tables = analysed(&run, &[]);
    for (table, rows) in tables["advantages"].as_array().unwrap().iter().zip(rows.chunks(12)) {
        let all = of_step(rows);
        assert_eq!((&table["of"], &table["count"]), (&json!("steps"), &json!(all.len())));
        let mean = all.iter().sum::<f64>() / all.len() as f64;
        assert!((table["mean"].as_f64().unwrap() - mean).abs() < 1e-12, "{table}");
    }
    assert_eq!(tables["values"][0]["continuations"], 3.0);
    assert!(tables["diversity"][0]["prompts"] == 3 && tables["kl"].is_array(), "{tables}");
    let moved = &tables["weights"][0];
    assert!(moved["from"].as_str().unwrap().ends_with("tiny/stages/0"), "{moved}");
    assert!(moved["to"] == "vineppo" && moved["distance"].as_f64().unwrap() > 0.0, "{moved}");
    assert!(folder.read("runs/vine/analysis.html").contains("distribution of advantages"));
}

#[test]
fn analyses_that_sample_measure_critic_gradients_and_checkpoints() {
    let folder = Folder::new("analyze-ppo");
    let run = trained(&folder, "ppo", "\"ppo\"");
    let flags = ["critic", "gradients", "checkpoints", "--prompts", "4", "--truth", "8"];
    let tables = analysed(&run, &flags);
    let [critic, monte_carlo] = [0, 1].map(|i| &tables["critic"][i]);
    assert!(critic["estimate"] == "critic" && monte_carlo["estimate"] == "Monte Carlo", "{tables}");
    for key in ["states", "pairs"] {
        assert!(critic[key] == monte_carlo[key] && critic[key].as_u64().unwrap() > 0, "{key}: {tables}");
    }
    let error = |row: &Value| row["error"].as_f64().unwrap();
    assert!((0.0..=1.0).contains(&error(monte_carlo)) && error(critic) > 0.0, "{tables}");
    let gradient = &tables["gradients"][0];
    let number = |key: &str| gradient[key].as_f64().unwrap();
    assert!(number("norm") > 0.0 && number("cosine").abs() <= 1.0 && gradient["rollouts"] == 8, "{gradient}");
    assert!(number("norm of mean") <= number("norm") && gradient["completions"] == 12, "{gradient}");
    let models = tables["checkpoints"].as_array().unwrap();
    let names: Vec<&Value> = models.iter().map(|m| &m["model"]).collect();
    assert_eq!(names, ["baseline", "stage 0, final", "step 1", "step 2"]);
    let figures = |m: &Value| ["accuracy", "greedy", "tokens"].map(|key| m[key].clone());
    assert_eq!(figures(&models[1]), figures(&models[3]), "the last checkpoint is the final model");
    assert_eq!(analysed(&run, &flags), tables, "the same again");
    let page = folder.read("runs/ppo/analysis.html");
    assert!(page.contains("Monte Carlo") && page.contains("<rect"), "accuracies as bars");
}

/// Was: no data for a stage that starts from a run's folder, and no analysis at all of a recipe with a variable that is not set.
#[test]
fn weights_are_compared_with_the_run_that_a_stage_started_from() {
    let folder = Folder::new("analyze-start");
    let first = tiny_run(&folder);
    let recipe = folder.write(
        "second.toml",
        format!(
            "algo = \"sft\"\nmodel.path = {first:?}\ntrain = {{ steps = 1, batch = 4 }}\noptim.lr = 1e-3\n\
             data = {{ train = [\"task:countdown\"], max_length = 48 }}\n"
        ),
    );
    ok(&["train", &recipe, "--runs", &folder.path("runs")]);
    let moved = &analysed(&folder.path("runs/second"), &["weights"])["weights"][0];
    assert!(moved["from"] == first.as_str() && moved["distance"].as_f64().unwrap() > 0.0, "{moved}");

    let folder = Folder::new("analyze-variable");
    let run = trained(&folder, "grpo", "\"grpo\"");
    let text = folder.read("runs/grpo/recipe.toml").replace("task:countdown", "${FERRL_IS_NOT_SET}");
    folder.write("runs/grpo/recipe.toml", text);
    let tables = analysed(&run, &[]);
    assert!(tables["advantages"].is_array() && tables["weights"].is_null(), "{tables}");
    fails(&["analyze", &run, "weights"], 2, &["FERRL_IS_NOT_SET"]);
}

/// Was: the critic's values every four tokens beside the Monte-Carlo values of turns.
#[test]
fn a_critic_of_episodes_is_asked_before_every_turn() {
    let folder = Folder::new("analyze-game");
    let recipe = folder.write(
        "game.toml",
        "algo = { name = \"ppo\", kl = { coef = 0.0 } }\n\
         model.init = { hidden = 16, layers = 1, heads = 1, kv_heads = 1, max_positions = 128 }\n\
         data = { train = [\"task:guess\"], task = { min = 1, max = 5, turns = 3, format = \"line\" }, max_length = 128 }\n\
         rollout = { prompts = 4, samples = 4, max_new_tokens = 6, max_turns = 3, cache_mib = 4 }\n\
         train.steps = 1\neval.prompts = 2\n",
    );
    let runs = folder.path("runs");
    ok(&["train", &recipe, "--runs", &runs]);
    let tables = analysed(&format!("{runs}/game"), &["critic", "--prompts", "4", "--truth", "4"]);
    // Four prompts with four episodes of three turns each at most, which have six tokens at most.
    let states = tables["critic"][0]["states"].as_u64().unwrap();
    assert!((16..=48).contains(&states), "{tables}");
    assert_eq!(tables["critic"][1]["states"], states, "{tables}");
}

#[test]
fn what_cannot_be_analysed_is_said() {
    let folder = Folder::new("analyze-errors");
    let run = trained(&folder, "grpo", "\"grpo\"");
    fails(&["analyze", &run, "advantage"], 2, &["advantage", "advantages"]);
    fails(&["analyze", &run, "critc"], 2, &["analyze RUN critic"]);
    // Without a critic there are the Monte-Carlo estimates.
    let tables = analysed(&run, &["critic", "--prompts", "4", "--truth", "8"]);
    let rows = tables["critic"].as_array().unwrap();
    assert!(rows.len() == 1 && rows[0]["estimate"] == "Monte Carlo", "{tables}");
    // Was: the gradient of SFT on its rows, called the policy's.
    let sft = folder.path("runs/tiny");
    fails(&["analyze", &sft, "gradients"], 2, &["sft learns from given rows", "grpo"]);
    // Nothing was kept: the models of the stages are all there is.
    std::fs::remove_dir_all(format!("{run}/checkpoints")).unwrap();
    assert_eq!(
        analysed(&run, &["checkpoints", "--prompts", "2"])["checkpoints"].as_array().unwrap().len(),
        2
    );
    fails(&["analyze", &run, "critic"], 3, &["has no checkpoint"]);
    fails(&["analyze", &run, "values"], 3, &["no data for values"]);
    fails(&["analyze", &folder.path("runs/gpro")], 2, &["no such run", "runs/grpo"]);
    fails(&["credit", "vine", "--input", &run], 3, &["none of 24 rows has credit"]);
}

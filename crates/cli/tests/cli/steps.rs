//! `ferrl steps`: from a model's own mistakes to data that Step-DPO learns from.

use crate::common::*;
use ferrl::verify::chain::Chain;
use std::path::Path;

const RECIPE: &str = r#"
name = "imitate"
algo = "sft"
model = { init = { hidden = 32, layers = 1, heads = 2, kv_heads = 2, ffn = 64, max_positions = 64 } }
data = { train = ["task:chain"], task = { steps = 2, max_number = 4, noise = 0.5 }, max_length = 32 }
rollout = { max_new_tokens = 24, cache_mib = 8 }
train = { steps = 150, batch = 32 }
optim = { lr = 4e-3 }
"#;

#[test]
fn mistakes_become_rows_that_step_dpo_reads() {
    let folder = Folder::new("steps");
    let (recipe, runs) = (folder.write("recipe.toml", RECIPE), folder.path("runs"));
    ok(&["train", &recipe, "--runs", &runs]);
    let model = folder.path("runs/imitate/stages/0");
    let ask = ["--model", &model, "--prompts", "80", "--samples", "2"];
    let steps = |output: &str, more: &[&str]| {
        let args = [&["steps", &recipe][..], &ask, &["--output", output], more].concat();
        ferrl(&args, "")
    };
    let file = folder.path("steps.jsonl");
    let out = steps(&file, &["--threads", "1"]);
    let said = String::from_utf8(out.stderr).unwrap();
    assert!(out.status.success() && said.contains("160 completions"), "{said}");
    let found = rows(&folder.read("steps.jsonl"));
    assert!(found.len() > 10 && said.contains(&format!("{} pairs", found.len())), "{said}");
    for row in &found {
        let text = |column: &str| row[column].as_str().unwrap();
        let chain = Chain::read(&row["terms"]).unwrap();
        assert_eq!(text("prompt"), chain.prompt());
        let (before, right) = (text("initial_reason_steps"), chain.lines(None).concat());
        assert!(right.starts_with(&format!("{before}{}", text("chosen"))), "{row}");
        assert!(text("chosen").ends_with('\n') && text("rejected") != text("chosen"), "{row}");
        assert!(!right.starts_with(&format!("{before}{}", text("rejected"))), "{row}");
    }
    // The same rows on standard output, under another number of threads.
    let again = steps("-", &["--threads", "2"]);
    assert_eq!(String::from_utf8(again.stdout).unwrap(), folder.read("steps.jsonl"));

    let learn = format!(
        "name = \"prefer\"\nalgo = \"step_dpo\"\nmodel.path = {model:?}\noptim.lr = 1e-3\n\
         data = {{ train = [{file:?}], max_length = 32 }}\ntrain = {{ steps = 12, batch = 8 }}\n"
    );
    ok(&["train", &folder.write("prefer.toml", learn), "--runs", &runs]);
    let lines = rows(&folder.read("runs/prefer/metrics.jsonl"));
    let margin = |i: usize| lines[i]["rewards/margins"].as_f64().unwrap();
    assert!(lines.len() == 12 && margin(0) == 0.0 && margin(11) > 0.1, "{} {}", margin(0), margin(11));
}

#[test]
fn what_cannot_make_pairs_is_said() {
    let folder = Folder::new("steps-bad");
    let recipe = folder.write("recipe.toml", RECIPE);
    let (model, out) = (folder.model(), folder.path("steps.jsonl"));
    let with = |recipe: &str, more: &[&str], code: i32, parts: &[&str]| {
        let base = ["steps", recipe, "--model", &model, "--output", &out];
        fails(&[&base[..], more].concat(), code, parts);
        assert!(!Path::new(&out).exists() || code == 3, "{more:?} left a file");
    };
    with(&recipe, &["--separator", ""], 2, &["--separator", "is empty", "fix: "]);
    with(&recipe, &["--prompts", "0"], 2, &["--prompts", "from 1"]);
    with(&recipe, &["--tries", "many"], 2, &["--tries", "many"]);
    with(&folder.path("recip.toml"), &[], 2, &["recip.toml", "recipe.toml"]);
    with(&recipe, &["train.stepz=3"], 2, &["stepz", "steps"]);
    // A verifier of whole answers finds no step; questions from a file name none at all.
    with(&recipe, &["reward=[{ verifier = \"exact\" }]"], 2, &["scores whole completions", "chain"]);
    let rows = folder.write("rows.jsonl", "{\"prompt\": \"the fox\"}\n");
    let from_file = format!("algo = \"sft\"\nmodel.path = {model:?}\ndata.train = {rows:?}\n");
    let from_file = folder.write("file.toml", from_file);
    with(&from_file, &[], 2, &["no verifier finds wrong steps", "fix: "]);
    // A model that has learned nothing is never right.
    with(&recipe, &["--prompts", "4", "--tries", "2"], 3, &["no pair was found", "--prompts"]);
    fails(&["steps", &recipe, "--model", &folder.path("modle"), "--output", "-"], 4, &["modle"]);
}

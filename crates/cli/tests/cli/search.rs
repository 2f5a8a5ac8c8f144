//! `ferrl search`: trees, replays and figures as a user gets them.

use crate::common::*;
use crate::eval::tiny_run;
use ferrl::search::STRATEGIES;
use serde_json::{Value, json};
use std::collections::HashMap;

fn parsed(text: &str) -> Value {
    serde_json::from_str(text.trim()).unwrap()
}

/// The trees of a folder, without the time and what the cache had.
fn trees(folder: &Folder, dir: &str, n: usize) -> Vec<Value> {
    let tree = |i: usize| {
        let mut tree = parsed(&folder.read(&format!("{dir}/tree-{i}.json")));
        let keys = [
            "prompt", "strategy", "options", "nodes", "answer", "generated_tokens", "shared_tokens",
            "seconds",
        ];
        keys.iter().for_each(|key| assert!(tree.get(key).is_some(), "{key} is missing"));
        ["shared_tokens", "seconds"].iter().for_each(|key| drop(tree.as_object_mut().unwrap().remove(*key)));
        tree
    };
    (0..n).map(tree).collect()
}

fn consistent(tree: &Value) {
    let nodes = tree["nodes"].as_array().unwrap();
    let mut priors: HashMap<u64, f64> = HashMap::new();
    for (i, n) in nodes.iter().enumerate() {
        assert_eq!((n["id"].as_u64(), n["parent"].is_null()), (Some(i as u64), i == 0));
        let number = |key: &str| n[key].as_f64().unwrap_or_else(|| panic!("{key} of {n}"));
        assert!(
            (0.0..=1.0).contains(&number("value")) && number("logprob") <= 0.0 && number("visits") >= 0.0,
            "{n}"
        );
        assert!(n["text"].is_string() && n["tokens"].is_array() && n["depth"].is_u64(), "{n}");
        assert_eq!(n["terminal"].as_bool().unwrap(), n["reward"].is_number(), "{n}");
        if let Some(parent) = n["parent"].as_u64() {
            assert_eq!(n["depth"].as_u64().unwrap(), nodes[parent as usize]["depth"].as_u64().unwrap() + 1);
            *priors.entry(parent).or_default() += number("prior");
        }
    }
    priors.values().for_each(|sum| assert!((sum - 1.0).abs() < 1e-9, "{sum}"));
}

#[test]
fn every_strategy_saves_trees_that_replay_to_the_same_object() {
    let folder = Folder::new("search-all");
    let run = tiny_run(&folder);
    for entry in STRATEGIES {
        let dir = folder.path(entry.name);
        let common =
            ["search", &run, "--strategy", entry.name, "--prompts", "3", "--option", "step_tokens=2"];
        let got = ok(&[&common[..], &["--save", &dir, "--json", "--seed", "4", "--threads", "1"]].concat());
        trees(&folder, entry.name, 3).iter().for_each(consistent);
        assert_eq!(ok(&["search", "--replay", &dir, "--json"]), got, "{}", entry.name);
        let other = folder.path("other");
        ok(&[&common[..], &["--save", &other, "--seed", "4", "--threads", "2", "--at-once", "1"]].concat());
        assert_eq!(trees(&folder, "other", 3), trees(&folder, entry.name, 3), "{}", entry.name);
    }
    let mcts = trees(&folder, "mcts", 3);
    assert!(mcts.iter().all(|t| t["nodes"][0]["visits"] == 32), "as many as simulations");
}

#[test]
fn tables_pages_and_paths_come_from_saved_trees() {
    let folder = Folder::new("search-shown");
    let run = tiny_run(&folder);
    let dir = folder.path("trees");
    let options = ["--option", "branch=3,2,1", "--option", "step_tokens=2", "--prompts", "2", "--stats"];
    let table = ok(&[&["search", &run, "--strategy", "tree", "--save", &dir], &options[..]].concat());
    for part in ["tree: 2 prompts, scorer oracle", "accuracy", "tokens sampled", "prefix shared", "time"] {
        assert!(table.contains(part), "{part}: {table}");
    }
    let (page, paths) = (folder.path("trees.html"), folder.path("paths.jsonl"));
    let post = ["--post", "negative_advantages_to_zero,apply_importance_weights"];
    let some =
        ["search", "--replay", &dir, "--html", &page, "--paths", &paths, "--aggregate", "max_k_paths=4"];
    ok(&[&some[..], &post].concat());
    let rows = rows(&folder.read("paths.jsonl"));
    assert_eq!(rows.len(), 8);
    for row in rows {
        let steps = row["steps"].as_array().unwrap();
        let text: String = steps.iter().map(|s| s["text"].as_str().unwrap()).collect();
        assert_eq!(row["completion"], text);
        assert!(steps.iter().all(|s| s["advantage"].as_f64().unwrap() >= 0.0), "{row}");
    }
    assert!(folder.read("trees.html").contains("<details"));
    ok(&["report", &dir]);
    assert!(folder.read("trees/report.html").contains("visits"));
    let listed = parsed(&ok(&["search", "--list", "--json"]));
    assert_eq!(listed["strategies"].as_array().unwrap().len(), STRATEGIES.len());
    assert!(ok(&["search", "--list"]).contains("iid_with_max_branching_depth"));
    // A budget counts tokens, and a reward model or the model itself may be what a search goes by.
    let budget = ["--budget", "60", "--json", "--prompts", "2", "--verifier", "logp"];
    let got = parsed(&ok(&[&["search", &run, "--strategy", "majority"], &budget[..]].concat()));
    assert!(got["scorer"] == "logp" && got["generated_tokens"].as_u64().unwrap() >= 120, "{got}");
    let rows = folder.write("q.jsonl", "{\"prompt\": \"1,2:3=\", \"answer\": \"1+2\"}\n");
    let model = format!("{run}/stages/0");
    let small = ["--max-new-tokens", "6", "--cache-mib", "4", "--json", "--option", "samples=3"];
    let file =
        ["search", &model, "--data", &rows, "--verifier", "exact", "--verifier-option", "column=answer"];
    let got = parsed(&ok(&[&file[..], &small].concat()));
    assert!(got["accuracy"].is_number() && got["scorer"] == "oracle", "{got}");
    let unknown = parsed(&ok(&[&["search", &model, "--data", &rows][..], &small].concat()));
    assert!(unknown["accuracy"].is_null() && unknown["scorer"] == "logp", "{unknown}");
    let one = ok(&["search", &model, "--prompt", "1,2:3=", "--max-new-tokens", "4", "--cache-mib", "4"]);
    assert!(one.contains("unknown"), "{one}");
    assert_eq!(unknown["results"][0]["correct"], json!(null));
}

#[test]
fn saved_completions_are_chosen_among_again() {
    let folder = Folder::new("search-choose");
    let run = tiny_run(&folder);
    let common = ["search", &run, "--prompts", "3", "--seed", "4", "--threads", "1", "--json"];
    let sampled = |strategy: &str, samples: &str, dir: &str| {
        let samples = format!("samples={samples}");
        parsed(&ok(&[
            &common[..],
            &["--strategy", strategy, "--option", &samples, "--save", &folder.path(dir)],
        ]
        .concat()))
    };
    let chosen = |flags: &[&str]| {
        parsed(&ok(&[&["search", "--json", "--replay", &folder.path("eight"), "--choose"], flags].concat()))
    };
    let result = |of: &Value| -> Vec<Value> {
        let rows = of["results"].as_array().unwrap().iter();
        rows.map(|r| json!([r["answer"], r["correct"], r["answer_node"], r["generated_tokens"]])).collect()
    };
    let eight = sampled("best_of_n", "8", "eight");
    assert_eq!(result(&chosen(&["best"])), result(&eight));
    // The first three of eight completions are the three that a search for three samples.
    for (strategy, rule) in [("majority", "vote"), ("best_of_n", "best"), ("weighted_best_of_n", "weighted")]
    {
        assert_eq!(
            result(&chosen(&[rule, "--first", "3"])),
            result(&sampled(strategy, "3", "three")),
            "{rule}"
        );
    }
    fails(
        &["search", "--replay", &folder.path("eight"), "--choose", "best", "--first", "9"],
        2,
        &["8 completions"],
    );
    fails(&["search", "--replay", &folder.path("eight"), "--choose", "most"], 2, &["vote"]);
    fails(&["search", &run, "--choose", "best"], 2, &["--choose", "cannot be used with"]);
    ok(&[&common[..], &["--strategy", "mcts", "--save", &folder.path("mcts")]].concat());
    let first = ["search", "--replay", &folder.path("mcts"), "--choose", "vote", "--first", "2"];
    fails(&first, 2, &["no independent completions", "majority"]);
}

#[test]
fn mistakes_are_named_before_the_model_is_read() {
    let folder = Folder::new("search-errors");
    let run = tiny_run(&folder);
    fails(&["search", &run, "--strategy", "mtcs"], 2, &["mtcs", "--strategy mcts"]);
    fails(&["search", &run, "--option", "sample=3"], 2, &["sample", "samples"]);
    fails(&["search", &run, "--option", "samples=0"], 2, &["samples", "from 1"]);
    fails(&["search", &run, "--option", "expander=idd"], 2, &["expander=iid"]);
    fails(&["search", &run, "--option", "extractor=x"], 2, &["extractor"]);
    fails(&["search", &run, "--strategy", "tree", "--option", "branch=3,x"], 2, &["branch", "3,2,1"]);
    fails(&["search", &run, "--strategy", "mcts", "--option", "evaluate=score"], 2, &["evaluate=rollout"]);
    fails(&["search", &run, "--option", "step="], 2, &["step_tokens=16"]);
    fails(&["search", &run, "--verifier", "oracel"], 2, &["oracel", "--verifier oracle"]);
    fails(&["search", &run, "--temperature", "0"], 2, &["temperature"]);
    fails(&["search", &run, "--paths", "x", "--filter", "sucessful"], 2, &["successful"]);
    fails(&["search", &run, "--paths", "x", "--aggregate", "max_k_paths=x"], 2, &["max_k_paths=4"]);
    // Was: these were taken and changed nothing.
    fails(&["search", &run, "--paths", "x", "--aggregate", "unique=5"], 2, &["unique has no number"]);
    fails(&["search", &run, "--option", "high=2"], 2, &["expander=high_low_temperature_iid, or no high"]);
    for scorer in ["oracle", "logp", "step_oracle"] {
        let given = ["search", &run, "--verifier", scorer, "--verifier-option", "kind=generative"];
        fails(&given, 2, &[scorer, "has no options", "kind"]);
    }
    for flag in [["--strategy", "beam"], ["--verifier", "logp"], ["--budget", "3"], ["--prompts", "2"]] {
        fails(&["search", "--replay", "trees", flag[0], flag[1]], 2, &[flag[0], "cannot be used with"]);
    }
    let greedy = ["search.strategy=majority", "search.eval=true", "--temperature", "0"];
    fails(&[&["eval", &run][..], &greedy].concat(), 2, &["search at temperature 0", "search.eval=false"]);
    let countdown = ["search", &run, "--verifier", "step_oracle"];
    fails(&countdown, 2, &["step_oracle", "finds wrong steps"]);
    fails(&["search", &run, "--option", "samples"], 2, &["--option samples=VALUE"]);
    let tree = ["search", &run, "--strategy", "tree", "--option"];
    fails(
        &[&tree[..], &["branch=65536"]].concat(),
        2,
        &["a level of the tree has", "at most 1048576", "max_depth"],
    );
    let beams = ["--option", "width=65536", "--option", "branch=65536"];
    fails(&[&["search", &run, "--strategy", "beam"], &beams[..]].concat(), 2, &["too many", "1048576"]);
    fails(
        &["search", &run, "--verifier", "runs/none"],
        3,
        &["--verifier", "\"runs/none\" is neither a path"],
    );
    let model = format!("{run}/stages/0");
    let judge = |options: &[&str], parts: &[&str]| {
        let options: Vec<&str> = options.iter().flat_map(|o| ["--verifier-option", *o]).collect();
        fails(&[&["search", &run, "--verifier", &model], &options[..]].concat(), 2, parts);
    };
    judge(&[], &["has no score head", "--verifier-option kind=generative"]);
    judge(&["kind=generativ"], &["generativ", "--verifier-option kind=generative"]);
    judge(&["kind=implicit"], &["--verifier-option reference=DIR"]);
    judge(&["kind=decision"], &["--verifier-option extractor=DIR"]);
    judge(&["votes"], &["--verifier-option votes=VALUE"]);
    let pairs = folder.write("pairs.jsonl", r#"{"prompt": "1", "chosen": "2", "rejected": "3"}"#);
    fails(&["eval", &run, "--pairs", &pairs], 2, &["has no score head", "--judge kind=generative"]);
    fails(&["search", "--replay", &folder.path("none")], 3, &["none"]);
    fails(&["search", "--replay", &folder.write("tree-0.json", "{}")], 3, &["no saved tree"]);
}

#[test]
fn every_strategy_searches_games_and_environments_of_users() {
    let folder = Folder::new("search-episodes");
    let model = folder.model();
    let world = "class World:\n    def reset(self, seed=None, options=None):\n        self.left = 2 + (seed or 0) % 2\n\
                 \x20       return 'go', {}\n    def step(self, action):\n        self.left -= 1\n        hit = 'a' in action\n\
                 \x20       return ('yes' if hit else 'no'), float(hit) / 2, self.left == 0, False, {}\n";
    let path = format!("env.path={}:World", folder.write("world.py", world));
    let game = ["--task", "guess", "data.task.format=line", "data.task.turns=3"].to_vec();
    for (name, from) in [("game", game), ("world", vec![path.as_str(), "env.workers=1"])] {
        for entry in STRATEGIES {
            let dir = folder.path(&format!("{name}-{}", entry.name));
            let small = [
                "--max-new-tokens", "3", "--cache-mib", "4", "--prompts", "2", "--threads", "1", "--option",
                "step=",
            ];
            let command = [&["search", &model, "--strategy", entry.name], &from[..], &small].concat();
            let got = ok(&[&command[..], &["--save", &dir, "--json"]].concat());
            trees(&folder, &format!("{name}-{}", entry.name), 2).iter().for_each(consistent);
            assert_eq!(ok(&["search", "--replay", &dir, "--json"]), got, "{name} {}", entry.name);
        }
    }
    let tree = trees(&folder, "game-mcts", 1).remove(0);
    assert!(
        tree["nodes"].as_array().unwrap().iter().any(|n| n["turns"][0]["observation"].is_string()),
        "{tree}"
    );
    ok(&["report", &folder.path("game-mcts")]);
    assert!(folder.read("game-mcts/report.html").contains("<th>observation</th>"));
}

#[test]
fn the_replay_table_names_the_rule_and_uses_the_singular() {
    let folder = Folder::new("search-words");
    let run = tiny_run(&folder);
    let dir = folder.path("four");
    let one = ["search", &run, "--strategy", "best_of_n", "--option", "samples=4", "--prompts", "1"];
    let table = ok(&[&one[..], &["--save", &dir]].concat());
    assert!(table.starts_with("best_of_n: 1 prompt, scorer oracle\n"), "{table}");
    let again = ["search", "--replay", &dir, "--choose", "vote"];
    let table = ok(&[&again[..], &["--first", "1"]].concat());
    let head = "best_of_n: 1 prompt, scorer oracle, result by vote of the first 1 completion\n";
    assert!(table.starts_with(head), "{table}");
    let object = parsed(&ok(&[&again[..], &["--json"]].concat()));
    assert_eq!((&object["choose"], &object["first"]), (&json!("vote"), &Value::Null));
    ok(&["report", &dir]);
    assert!(folder.read("four/report.html").contains("<i>1 prompt</i>"));
}

#[test]
fn what_cannot_be_written_is_said_before_the_search() {
    let folder = Folder::new("search-places");
    let run = tiny_run(&folder);
    let refused = |flag: &str, path: &str, parts: &[&str]| {
        let save = folder.path("saved");
        fails(&["search", &run, "--prompts", "2", "--save", &save, flag, path], 2, parts);
        assert!(!std::path::Path::new(&save).exists(), "{flag} {path}: nothing was searched");
    };
    refused("--html", &folder.path("none/trees.html"), &["none", "mkdir -p"]);
    refused("--html", &folder.path(""), &["is a folder", "report.html"]);
    refused("--html", &folder.write("notes.html", "mine"), &["not a report of Ferrl"]);
    refused("--paths", &folder.path("none/paths.jsonl"), &["none", "mkdir -p"]);
    assert_eq!(folder.read("notes.html"), "mine");
}

#[test]
fn rewards_beyond_0_and_1_are_told_of() {
    let folder = Folder::new("search-bounds");
    let run = tiny_run(&folder);
    let grade = |name: &str, expression: &str| {
        let python = folder.write(
            &format!("{name}.py"),
            format!("def reward(prompts, completions, **columns):\n    return [{expression} for c in completions]\n"),
        );
        let recipe = folder.write(
            &format!("{name}.toml"),
            format!(
                "algo = \"sft\"\ndata.train = [\"task:countdown\"]\nreward = [{{ python = {python:?} }}]\n\
                 rollout = {{ max_new_tokens = 8, cache_mib = 4 }}\n"
            ),
        );
        let out =
            ferrl(&["search", &run, "--recipe", &recipe, "--strategy", "best_of_n", "--prompts", "2"], "");
        assert!(out.status.success());
        String::from_utf8(out.stderr).unwrap()
    };
    let far = grade("far", "2.0 + len(c)");
    assert!(
        far.contains("clips rewards to the range from 0 to 1") && far.matches("warning").count() == 1,
        "{far}"
    );
    let near = grade("near", "0.01 * len(c)");
    assert!(!near.contains("warning"), "{near}");
}

/// Was said after the run had begun.
#[test]
fn a_recipe_s_scorer_is_looked_at_before_the_first_step() {
    let folder = Folder::new("search-scorer");
    let run = tiny_run(&folder);
    let model = format!("{run}/stages/0");
    let with = |scorer: &str, options: &str, code: i32, parts: &[&str]| {
        let recipe = folder.write(
            "scored.toml",
            format!(
                "algo = \"vineppo\"\nmodel.path = {model:?}\ndata.train = [\"task:countdown\"]\n\
                 search = {{ strategy = \"mcts\", train = true, scorer = {scorer:?}, scorer_options = {{ {options} }} }}\n\
                 rollout = {{ prompts = 1, max_new_tokens = 8, cache_mib = 4 }}\ntrain.steps = 1\n"
            ),
        );
        fails(&["train", &recipe, "--runs", &folder.path("runs")], code, parts);
        assert!(!std::path::Path::new(&folder.path("runs/scored")).exists(), "{scorer}: no run folder");
    };
    with("nowhere", "", 4, &["search.scorer", "nowhere"]);
    with(&model, "", 2, &["search.scorer", "search.scorer_options.kind=generative"]);
    with(&model, "kind = \"implicit\"", 2, &["search.scorer_options.reference=DIR"]);
    with("stage:judge", "", 2, &["no stage \"judge\" comes before"]);
    // Were said when the stage had begun, or never.
    let implicit = |reference: &str| format!("kind = \"implicit\", reference = {reference:?}");
    with(&model, &implicit("stage:judge"), 2, &["search.scorer_options.reference", "no stage \"judge\""]);
    with(&model, &implicit("nowhere"), 4, &["search.scorer", "nowhere"]);
    with("logp", "kind = \"generative\"", 2, &["search.scorer_options", "the scorer is \"logp\""]);
}

#[test]
fn a_search_whose_episodes_were_all_lost_says_why() {
    let folder = Folder::new("search-lost");
    let model = folder.model();
    let world = "class World:\n    def reset(self, seed=None, options=None):\n        return 'go', {}\n\
                 \x20   def step(self, action):\n        raise ValueError('boom')\n";
    let path = format!("env.path={}:World", folder.write("world.py", world));
    let search = ["search", &model, &path, "env.workers=1", "--max-new-tokens", "3", "--cache-mib", "4"];
    fails(
        &[&search[..], &["--prompts", "1", "--option", "samples=2"]].concat(),
        3,
        &["every episode was lost", "boom"],
    );
}

/// Was: the trees of an interrupted search were deleted by the same command.
#[test]
fn an_interrupted_search_is_resumed_to_the_same_trees() {
    let folder = Folder::new("search-resume");
    let run = tiny_run(&folder);
    let dir = folder.path("trees");
    let command = |more: &[&'static str]| {
        let base = ["search", &run, "--strategy", "mcts", "--prompts", "4", "--save", &dir, "--json"];
        base.iter().copied().chain(more.iter().copied()).map(str::to_string).collect::<Vec<_>>()
    };
    let run_it = |more: &[&'static str]| {
        let args = command(more);
        ferrl(&args.iter().map(String::as_str).collect::<Vec<_>>(), "")
    };
    assert!(run_it(&[]).status.success());
    let (want, kept) = (trees(&folder, "trees", 4), folder.read("trees/tree-1.json"));
    std::fs::remove_file(folder.0.join("trees/tree-2.json")).unwrap();
    let out = run_it(&["--resume"]);
    assert!(String::from_utf8_lossy(&out.stderr).contains("resumed after 3 prompts"));
    assert_eq!(parsed(&String::from_utf8(out.stdout).unwrap())["prompts"], 4);
    assert_eq!(trees(&folder, "trees", 4), want);
    assert_eq!(folder.read("trees/tree-1.json"), kept, "not searched again");
    // Other settings would mix trees that cannot be compared.
    let refused = |more: &[&'static str], parts: &[&str]| {
        let args = command(more);
        fails(&args.iter().map(String::as_str).collect::<Vec<_>>(), 2, parts);
    };
    refused(&["--resume", "--option", "c=2"], &["its trees were made with option", "c=2", "no --resume"]);
    refused(&["--resume", "--seed", "9"], &["its trees were made with seed"]);
    refused(&["--resume", "--temperature", "0.7"], &["its trees were made with temperature"]);
    std::fs::remove_file(folder.0.join("trees/search.json")).unwrap();
    refused(&["--resume"], &["search.json is missing"]);
    fails(&["search", &run, "--resume"], 2, &["--save"]);
}

/// Was: without a word no search, or an error in the flags of another command.
#[test]
fn a_search_that_an_evaluation_would_not_use_is_refused() {
    let folder = Folder::new("search-unused");
    let run = tiny_run(&folder);
    let eval = |settings: &[&str], code: i32, parts: &[&str]| {
        fails(&[&["eval", &run, "--prompts", "1"], settings].concat(), code, parts);
    };
    eval(&["search.eval=true"], 2, &["search.strategy", "a search without a strategy"]);
    eval(&["search.strategy=majority"], 2, &["neither in rollouts nor in evaluations"]);
    eval(&["search.budget=9"], 2, &["search.budget", "has no effect without search.strategy"]);
    let used = ["search.eval=true", "search.strategy=mcts"];
    eval(&["search.eval=true", "search.strategy=mtcs"], 2, &["search.strategy = \"mcts\""]);
    let systems = "search.options.expander=iid_with_different_system_message";
    eval(&[&used[..], &[systems]].concat(), 2, &["systems = [\"Be brief.\""]);
    for (name, near) in [("oracle", "reward"), ("stepp_oracle", "step_oracle")] {
        let scorer = format!("search.scorer={name}");
        let fix = format!("search.scorer = {near:?}");
        eval(&[&used[..], &[&scorer]].concat(), 4, &["is neither a scorer nor a folder", &fix]);
    }
}

/// Was: said by the stage after the run had begun, minutes into a recipe with stages.
#[test]
fn options_of_a_judge_are_read_before_the_first_step() {
    let folder = Folder::new("judge-options");
    let model = format!("{}/stages/0", tiny_run(&folder));
    let with = |options: &str, code: i32, parts: &[&str]| {
        let recipe = folder.write(
            "judged.toml",
            format!(
                "algo = \"dr_grpo\"\nmodel.path = {model:?}\ndata.train = [\"task:countdown\"]\n\
                 reward = [{{ model = {model:?}, options = {{ {options} }} }}]\n\
                 rollout = {{ prompts = 1, samples = 2, max_new_tokens = 8, cache_mib = 4 }}\ntrain.steps = 1\n"
            ),
        );
        fails(&["train", &recipe, "--runs", &folder.path("runs")], code, parts);
        assert!(!std::path::Path::new(&folder.path("runs/judged")).exists(), "{options}: no run folder");
    };
    with("kind = \"decision\", extractr = \"x\"", 2, &["unknown key \"extractr\"", "\"extractor\""]);
    with("kind = \"generative\", votes = -1", 2, &["votes", "got the number -1"]);
    with("kind = \"decision\", extractor = \"nowhere\"", 4, &["reward.0.options.extractor", "nowhere"]);
    with("kind = \"implicit\", reference = \"nowhere\"", 4, &["reward.0.options.reference", "nowhere"]);
}

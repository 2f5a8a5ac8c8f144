//! Runs: every stage is checked before the first one starts; existing files and finished work are kept.

use crate::case::Case;
use std::path::Path;

/// A stage of imitation that would be trained for a while, and a stage after it that has a fault.
fn later(fault: &str) -> String {
    let data = if fault.contains("data.train") { "" } else { "data.train = \"rows.jsonl\"\n" };
    format!(
        "model.path = \"{{model}}\"\ntrain.steps = 100000\ndata.max_length = 32\n\
         rollout = {{ prompts = 2, samples = 2, max_new_tokens = 4, cache_mib = 4 }}\n\
         [[stage]]\nname = \"imitate\"\nalgo = \"sft\"\ndata.train = \"good.jsonl\"\n\
         [[stage]]\nname = \"second\"\n{fault}\n{data}"
    )
}

const GOOD: &str =
    "{\"prompt\": \"1+1=\", \"response\": \"2\"}\n{\"prompt\": \"1+2=\", \"response\": \"3\"}\n";

/// A fault of a later stage, found by the run and by `--dry-run` alike, before anything is made.
fn faults(name: [&'static str; 2], rows: &str, fault: &str, exit: i32, says: &[&str]) -> [Case; 2] {
    let case = |name, command| {
        Case::new(name, command)
            .file("good.jsonl", GOOD)
            .file("rows.jsonl", rows)
            .file("r.toml", later(fault))
            .exit(exit)
            .says(says)
            .says(&["second"])
            .leaves_no(&["runs"])
    };
    [case(name[0], "train r.toml"), case(name[1], "train r.toml --dry-run")]
}

fn rows(n: usize, bad: usize, line: &str) -> String {
    let good = |i: usize| format!("{{\"prompt\": \"{i}+1=\", \"response\": \"2\", \"answer\": \"2\"}}\n");
    (1..=n).map(|i| if i == bad { format!("{line}\n") } else { good(i) }).collect()
}

fn later_stages() -> Vec<Case> {
    let good = rows(4, 0, "");
    let mut out = Vec::new();
    out.extend(faults(
        ["a later stage without a reward", "a later stage without a reward (--dry-run)"],
        &good,
        "algo = \"grpo\"",
        2,
        &["reward"],
    ));
    out.extend(faults(
        [
            "a later stage whose row lacks the reward's column",
            "a row that lacks the reward's column (--dry-run)",
        ],
        &rows(400, 351, "{\"prompt\": \"x\"}"),
        "algo = \"grpo\"\nreward = { verifier = \"exact\", options = { column = \"answer\" } }",
        3,
        &["rows.jsonl:351", "answer"],
    ));
    out.extend(faults(
        ["a typo in the verifier options of a later stage", "a typo in later verifier options (--dry-run)"],
        &good,
        "algo = \"grpo\"\nreward = { verifier = \"exact\", options = { colum = \"answer\" } }",
        2,
        &["colum", "column"],
    ));
    out.extend(faults(
        ["a bad row in the middle of a later stage's data", "a bad row in later data (--dry-run)"],
        &rows(400, 351, "{\"prompt\": \"x\"}"),
        "algo = \"sft\"",
        3,
        &["rows.jsonl:351"],
    ));
    out.extend(faults(
        ["a row of a later stage that is no JSON", "a row of later data that is no JSON (--dry-run)"],
        &rows(40, 31, "{\"prompt\": "),
        "algo = \"sft\"",
        3,
        &["rows.jsonl:31"],
    ));
    out.extend(faults(
        ["a later stage's data file that is not there", "later data that are not there (--dry-run)"],
        &good,
        "algo = \"sft\"\ndata.train = \"rowz.jsonl\"",
        3,
        &["rowz.jsonl"],
    ));
    out.extend(faults(
        ["a later stage's evaluation data that are not there", "later evaluation data not there (--dry-run)"],
        &good,
        "algo = \"sft\"\neval = { every = 1, data = [\"held.jsonl\"] }",
        3,
        &["held.jsonl"],
    ));
    out.extend(faults(
        ["a Python reward of a later stage that is not there", "a later Python reward not there (--dry-run)"],
        &good,
        "algo = \"grpo\"\nreward = { python = \"rewardz.py\" }",
        2,
        &["rewardz.py"],
    ));
    out.extend(faults(
        ["a reward model of a later stage that is not there", "a later reward model not there (--dry-run)"],
        &good,
        "algo = \"grpo\"\nreward = { model = \"./nowhere\" }",
        4,
        &["./nowhere"],
    ));
    out.extend(faults(
        ["a language model as reward model of a later stage", "a language model as reward model (--dry-run)"],
        &good,
        "algo = \"grpo\"\nreward = { model = \"stage:imitate\" }",
        4,
        &["reward", "imitate"],
    ));
    out.extend(faults(
        ["a critic of a later stage that is not there", "a later critic not there (--dry-run)"],
        &good,
        "algo = \"ppo\"\ncritic.path = \"./nowhere\"\nreward = { verifier = \"exact\" }",
        4,
        &["critic.path", "./nowhere"],
    ));
    out.extend(faults(
        ["a frozen name of a later stage that no tensor has", "a frozen name that no tensor has (--dry-run)"],
        &good,
        "algo = \"sft\"\nmodel.frozen = [\"q_porj\"]",
        2,
        &["model.frozen", "q_porj"],
    ));
    out.extend(faults(
        ["a later stage with every weight frozen", "a later stage with every weight frozen (--dry-run)"],
        &good,
        "algo = \"sft\"\nmodel.frozen = [\"model\", \"lm_head\"]",
        2,
        &["model.frozen"],
    ));
    out.extend(faults(
        [
            "a later stage's checkpoints rated by a metric that nobody measures",
            "a metric nobody measures (--dry-run)",
        ],
        &good,
        "algo = \"sft\"\neval = { every = 1, split = 0.5 }\n\
         checkpoint = { keep_best = 1, metric = \"eval/los\", lower_is_better = true }",
        2,
        &["checkpoint.metric", "eval/los", "eval/loss"],
    ));
    out
}

/// Whatever a command left alone is byte for byte what it was.
fn mine(folder: &Path, name: &str) {
    assert_eq!(std::fs::read_to_string(folder.join(name)).unwrap(), "mine\n", "{name}");
}

fn folders() -> Vec<Case> {
    let small = "algo = \"sft\"\nmodel.path = \"{model}\"\ndata.train = \"good.jsonl\"\ntrain.steps = 2\n";
    let run = |name, command| Case::new(name, command).file("good.jsonl", GOOD).file("r.toml", small);
    vec![
        Case::new(
            "init --overwrite where a user keeps other files",
            "init --vocab 9 --hidden 16 --out m --overwrite",
        )
        .file("m/notes.txt", "mine\n")
        .file("m/data/rows.jsonl", "mine\n")
        .exit(0)
        .leaves(&["m/config.json", "m/model.safetensors"])
        .check(|folder, _| ["m/notes.txt", "m/data/rows.jsonl"].iter().for_each(|f| mine(folder, f))),
        Case::new("init --overwrite onto a file", "init --vocab 9 --hidden 16 --out notes.txt --overwrite")
            .file("notes.txt", "mine\n")
            .says(&["notes.txt"])
            .check(|folder, _| mine(folder, "notes.txt")),
        Case::new("a tokenizer trained into a model's folder", "tokenizer train --input text.txt --out m")
            .file("text.txt", "some text\n")
            .file("m/tokenizer.json", "mine\n")
            .says(&["m/tokenizer.json", "--overwrite"])
            .check(|folder, _| mine(folder, "m/tokenizer.json")),
        run("a run whose name is taken by a folder", "train r.toml --name taken")
            .file("runs/taken/notes.txt", "mine\n")
            .says(&["runs/taken", "--name taken-2"])
            .check(|folder, _| mine(folder, "runs/taken/notes.txt")),
        run("--resume of a folder that is no run", "train r.toml --name taken --resume")
            .file("runs/taken/notes.txt", "mine\n")
            .says(&["runs/taken", "recipe.toml"])
            .check(|folder, _| mine(folder, "runs/taken/notes.txt")),
        run("--resume of a run that is not there", "train r.toml --resume").says(&["runs/r"]),
        run("--resume of a misspelt run", "train r.toml --name tkaen --resume")
            .file("runs/taken/recipe.toml", small)
            .says(&["runs/tkaen", "runs/taken"]),
        run("a report of a misspelt run", "report runs/tkaen")
            .file("runs/taken/recipe.toml", small)
            .says(&["runs/tkaen", "runs/taken"]),
        run("wandb of a misspelt run", "sync runs/tkaen --to wandb")
            .file("runs/taken/recipe.toml", small)
            .says(&["runs/tkaen", "runs/taken"]),
        run("a run folder that lost its recipe", "train r.toml --name taken --resume")
            .file("runs/taken/metrics.jsonl", "mine\n")
            .says(&["runs/taken", "--dry-run > runs/taken/recipe.toml"])
            .never_says(&["remove"]),
        run("a run folder whose recipe is cut short", "train r.toml --name taken --resume")
            .file("runs/taken/recipe.toml", "name = \"taken\"\nalg")
            .says(&["runs/taken/recipe.toml:2", "--dry-run > runs/taken/recipe.toml"]),
        run("a file as the folder of runs", "train r.toml --runs notes.txt")
            .file("notes.txt", "mine\n")
            .exit(3)
            .says(&["notes.txt", "another path"])
            .check(|folder, _| mine(folder, "notes.txt")),
        run("a run folder as a recipe", "train runs/taken")
            .file("runs/taken/recipe.toml", small)
            .says(&["runs/taken/recipe.toml"]),
        run("--allow-changed without --resume", "train r.toml --allow-changed").says(&["--resume"]),
        Case::new("checkpoints that the disk cannot hold", "train r.toml")
            .file("r.toml", HUGE)
            .exit(5)
            .says(&["checkpoint.keep", "free", "runs/r"])
            .leaves_no(&["runs"]),
        run("a negative time between checkpoints", "train r.toml checkpoint.minutes=-1")
            .says(&["checkpoint.minutes"]),
    ]
}

/// Commands that would write their rows over a file that they read, or over one that holds no rows.
fn outputs() -> Vec<Case> {
    const ROW: &str = "{\"prompt\": \"1+1=\", \"answer\": \"2\"}\n";
    const CODE: &str = "def reward(completions, **kw):\n    return [1.0 for c in completions]\n";
    const SAMPLED: &str = "--max-new-tokens 2 --cache-mib 4";
    let case = |name, command: &str| {
        Case::new(name, &command.replace("SAMPLED", SAMPLED))
            .file("d/test.jsonl", ROW)
            .file("my.py", CODE)
            .file("r.toml", "data.train = \"d/test.jsonl\"\n")
            .file("acts.jsonl", "\"5\"\n")
            .check(|folder, _| {
                let read = |name: &str| std::fs::read_to_string(folder.join(name)).unwrap();
                assert_eq!((read("d/test.jsonl"), read("my.py")), (ROW.into(), CODE.into()));
                assert_eq!(read("acts.jsonl"), "\"5\"\n");
            })
    };
    vec![
        case(
            "eval over its data",
            "eval {model} --data test@d --verifier exact SAMPLED --output d/test.jsonl",
        )
        .says(&["d/test.jsonl", "input"]),
        case(
            "eval over its reward function",
            "eval {model} --data test@d --reward my.py SAMPLED --output my.py",
        )
        .says(&["my.py", "JSON lines"]),
        case(
            "eval over its recipe",
            "eval {model} --recipe r.toml --data test@d --verifier exact SAMPLED --output r.toml",
        )
        .says(&["r.toml", "JSON lines"]),
        case(
            "search over its data",
            "search {model} --data test@d --verifier exact SAMPLED --paths d/test.jsonl",
        )
        .says(&["d/test.jsonl", "input"]),
        case("an episode over its actions", "env run guess --actions acts.jsonl --output acts.jsonl")
            .says(&["acts.jsonl", "input"]),
    ]
}

/// A model of which no disk holds a checkpoint.
const HUGE: &str = "algo = \"sft\"\nmodel.init = { hidden = 131072 }\ndata.train = [\"task:countdown\"]\ntrain = { batch = 1, steps = 1 }\n";

/// Processes of launchers that do not know each other, or that each start a run.
fn launched() -> Vec<Case> {
    let of_slurm = |name, command| {
        let case = Case::new(name, command).file("r.toml", later("algo = \"sft\"")).file("good.jsonl", GOOD);
        let case = case.file("rows.jsonl", GOOD).leaves_no(&["runs"]).env("SLURM_STEP_NUM_TASKS", "2");
        case.env("SLURM_LOCALID", "0").env("SLURM_JOB_ID", "1")
    };
    let train = "train r.toml";
    let launch = "launch -n 2 -- train r.toml";
    vec![
        of_slurm("tasks of `srun` that no MPI connects", train).env("SLURM_PROCID", "0").says(&[
            "srun started 2 processes",
            "srun --mpi=pmix",
            "FERRL_MPI=off",
        ]),
        of_slurm("the other such tasks, which say nothing", train)
            .env("SLURM_PROCID", "1")
            .never_says(&["error"]),
        of_slurm("`ferrl launch` as every task of `srun`", launch)
            .env("SLURM_PROCID", "0")
            .says(&["launch", "several times", "srun ferrl train"]),
        of_slurm("the other tasks of `ferrl launch`, which say nothing", launch)
            .env("SLURM_PROCID", "1")
            .never_says(&["error"]),
        Case::new("a number of ranks and no number of this one", train)
            .file("r.toml", later("algo = \"sft\""))
            .file("good.jsonl", GOOD)
            .file("rows.jsonl", GOOD)
            .env("WORLD_SIZE", "2")
            .says(&["WORLD_SIZE is 2", "RANK"])
            .leaves_no(&["runs"]),
    ]
}

pub fn cases() -> Vec<Case> {
    let mut all = later_stages();
    all.extend(launched());
    all.extend(folders());
    all.extend(outputs());
    all
}

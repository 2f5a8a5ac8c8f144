//! Recipes, overrides and flags.

use crate::case::Case;

/// A recipe that trains: one step of SFT on one row.
const SFT: &str = "algo = \"sft\"\nmodel.path = \"{model}\"\ndata.train = [\"rows.jsonl\"]\ntrain = { batch = 1, steps = 1 }\n";
const ROW: &str = "{\"prompt\": \"2 + 2 = \", \"response\": \"4\"}\n";

/// A case about that recipe: what is added to the command line, or stands in `r.toml` from line 5 on.
fn sft(name: &'static str, command: &str, more: &str) -> Case {
    Case::new(name, command).file("r.toml", format!("{SFT}{more}")).file("rows.jsonl", ROW)
}

pub fn cases() -> Vec<Case> {
    [general(), limits()].into_iter().flatten().collect()
}

fn general() -> Vec<Case> {
    vec![
        Case::new("a recipe that is not there", "train nowhere.toml").says(&["nowhere.toml"]),
        sft("an unknown key", "train r.toml optim.learning_rate=1", "")
            .says(&["optim.learning_rate", "optim.lr"]),
        sft("options of a generated task, and no task", "train r.toml data.task.numbers=3", "")
            .exit(0)
            .says(&["warning", "data.task", "numbers"]),
    ]
}

/// Numbers that are too large, too small, or no numbers.
fn limits() -> Vec<Case> {
    vec![
        sft("ten thousand threads", "train r.toml threads=10000", "")
            .says(&["threads", "10000", "from 0 to 1024"])
            .leaves_no(&["runs"]),
        sft("more threads than there are numbers", "train r.toml", "threads = 9223372036854775807\n")
            .says(&["r.toml:5", "threads", "9223372036854775807", "1024"])
            .leaves_no(&["runs"]),
        sft("a million million completions", "train r.toml rollout.samples=1000000000000", "").says(&[
            "rollout.samples",
            "1000000000000",
            "65536",
        ]),
        sft(
            "more completions than memory",
            "train r.toml algo=grpo rollout.prompts=1000000 rollout.samples=65536",
            "",
        )
        .says(&["rollout.prompts", "rollout.samples", "65536000000"]),
        sft("epochs without end", "train r.toml ~train.steps train.epochs=1e300", "")
            .says(&["train.epochs", "1e+300"]),
        sft("a whole number written as 1e18", "train r.toml train.batch=1e18", "").says(&["train.batch"]),
        sft("a negative temperature", "train r.toml rollout.temperature=-1", "").says(&[
            "rollout.temperature",
            "-1",
            "0.0001",
        ]),
        sft("SFT at temperature 0", "train r.toml rollout.temperature=0", "")
            .says(&["rollout.temperature"])
            .never_says(&["learning rate"]),
        sft("a learning rate that is not a number", "train r.toml", "optim.lr = nan\n")
            .says(&["r.toml:5", "optim.lr", "finite"]),
        sft("an infinite learning rate", "train r.toml optim.lr=inf", "").says(&["optim.lr", "finite"]),
        sft("a learning rate that f32 rounds to 0", "train r.toml optim.lr=1e-300", "")
            .says(&["optim.lr", "1e-300", "1e-12"]),
        sft("an epsilon that f32 rounds to 0", "train r.toml optim.eps=1e-300", "").says(&["optim.eps"]),
        sft("a clip range above 1", "train r.toml algo=grpo algo.clip_low=2", "")
            .says(&["algo.clip_low", "up to 1"]),
        sft("a model as wide as the sea", "train r.toml ~model.path model.init.hidden=1000000000", "")
            .says(&["model.init.hidden", "131072"]),
        sft("a cache of half the world", "train r.toml rollout.cache_mib=9223372036854775807", "")
            .says(&["rollout.cache_mib", "16777216"]),
        sft("weight decay that turns the weights around", "train r.toml optim.lr=1 optim.weight_decay=3", "")
            .exit(0)
            .says(&["warning", "optim.weight_decay", "optim.lr", "3"]),
        sft("the same in a dry run", "train r.toml optim.lr=1 optim.weight_decay=3 --dry-run", "")
            .exit(0)
            .says(&["warning", "optim.weight_decay", "optim.lr", "3"]),
        sft("updates below the rounding of the weights", "train r.toml optim.lr=1e-11", "")
            .exit(0)
            .says(&["warning", "optim.lr"]),
        sft(
            "rollouts that are nearly uniform",
            "train r.toml algo=grpo reward=numeric rollout.temperature=50 --dry-run",
            "",
        )
        .file("rows.jsonl", "{\"prompt\": \"2 + 2 = \", \"answer\": \"4\"}\n")
        .exit(0)
        .says(&["warning", "rollout.temperature", "50"]),
        Case::new("ten thousand threads on the command line", "doctor --threads 10000").says(&[
            "--threads",
            "10000",
            "1024",
        ]),
        Case::new("a temperature of NaN", "generate --model m --prompt x --temperature nan")
            .says(&["--temperature", "nan"]),
        Case::new("a plan for no memory", "plan r.toml --memory 0GiB").says(&["--memory"]),
    ]
}

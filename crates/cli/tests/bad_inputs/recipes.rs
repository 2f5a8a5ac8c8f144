//! Recipes, overrides and flags.

use crate::case::Case;

/// A recipe that trains: one step of SFT on one row.
const SFT: &str = "algo = \"sft\"\nmodel.path = \"{model}\"\ndata.train = [\"rows.jsonl\"]\ntrain = { batch = 1, steps = 1 }\n";
const ROW: &str = "{\"prompt\": \"2 + 2 = \", \"response\": \"4\"}\n";

pub fn cases() -> Vec<Case> {
    vec![
        Case::new("a recipe that is not there", "train nowhere.toml").says(&["nowhere.toml"]),
        Case::new("an unknown key", "train r.toml optim.learning_rate=1")
            .file("r.toml", SFT)
            .says(&["optim.learning_rate", "optim.lr"]),
        Case::new("options of a generated task, and no task", "train r.toml data.task.numbers=3")
            .file("r.toml", SFT)
            .file("rows.jsonl", ROW)
            .exit(0)
            .says(&["warning", "data.task", "numbers"]),
    ]
}

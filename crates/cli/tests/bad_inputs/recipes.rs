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
    [general(), limits(), environment(), files(), overrides(), options()].into_iter().flatten().collect()
}

fn general() -> Vec<Case> {
    vec![
        Case::new("a recipe that is not there", "train nowhere.toml").says(&["nowhere.toml"]),
        sft("an unknown key", "train r.toml optim.learning_rate=1", "")
            .says(&["optim.learning_rate", "optim.lr"]),
        sft("a key of TRL's that has another name", "train r.toml num_train_epochs=2", "")
            .says(&["num_train_epochs", "train.epochs"]),
        sft("a key of TRL's that is two keys here", "train r.toml train.per_device_train_batch_size=2", "")
            .says(&["per_device_train_batch_size", "train.batch", "rollout.prompts"]),
        sft(
            "a configuration of verl's",
            "train r.toml actor_rollout_ref.actor.optim.lr=1e-6 critic.optim.lr=1e-5 trainer.nnodes=2",
            "",
        )
        .says(&["3 problems", "optim.lr?", "critic.lr?", "trainer.nnodes", "ferrl launch"]),
        sft("a setting as a flag", "train r.toml --learning_rate 1e-5", "")
            .says(&["--learning_rate", "optim.lr=1e-5"])
            .never_says(&["-- --"]),
        sft("a setting as a flag of another meaning", "train r.toml --dry-run --train_batch_size=64", "")
            .says(&["--train_batch_size", "rollout.prompts"]),
        Case::new("an algorithm as a command", "grpo --model m").says(&["grpo", "ferrl recipe new grpo"]),
        Case::new("a recipe in YAML", "train r.yaml")
            .file("r.yaml", "optim:\n  lr: 1e-6\n")
            .says(&["r.yaml:1", "TOML", "optim.lr=1e-6"]),
        sft("LoRA", "train r.toml lora.r=8", "").says(&["lora.r", "adapters"]),
        sft("bfloat16", "train r.toml model.dtype=bfloat16", "").says(&["bfloat16", "\"bf16\""]),
        sft("a warm-up as long as the run", "train r.toml optim.warmup=1.0", "").says(&["optim.warmup"]),
        sft("a variable that is not closed", "train r.toml", "name = \"${HOM\"\n")
            .says(&["r.toml:5", "name", "${HOM"]),
        sft("a secret as the name of a run", "train r.toml", "name = \"run-${FERRL_TOKEN}\"\n")
            .env("FERRL_TOKEN", "abcdefgh12345")
            .says(&["name", "secret"])
            .never_says(&["abcdefgh12345"]),
        sft("a file as the folder to rescue to", "train r.toml --rescue rows.jsonl", "")
            .says(&["rows.jsonl", "--rescue"]),
        sft("settings that change nothing", "train r.toml rollout.samples=4 train.epochs=2", "")
            .exit(0)
            .says(&["warning", "rollout.samples", "train.epochs"]),
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
        sft("a million million completions", "train r.toml rollout.samples=1000000000000", "")
            .says(&["rollout.samples", "1000000000000", "65536"]),
        sft(
            "more completions than memory",
            "train r.toml algo=grpo rollout.prompts=1000000 rollout.samples=65536",
            "",
        )
        .says(&["rollout.prompts", "rollout.samples", "65536000000"]),
        sft("epochs without end", "train r.toml ~train.steps train.epochs=1e300", "")
            .says(&["train.epochs", "1e+300"]),
        sft("a whole number written as 1e18", "train r.toml train.batch=1e18", "").says(&["train.batch"]),
        sft("a negative temperature", "train r.toml rollout.temperature=-1", "")
            .says(&["rollout.temperature", "-1", "0.0001"]),
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
        Case::new("a negative seed on the command line", "generate --model m --prompt x --seed -1")
            .says(&["--seed", "-1", "from 0 to"]),
        Case::new("a misspelt algorithm to show", "algorithms grpoo")
            .says(&["grpoo", "ferrl algorithms grpo"]),
        Case::new("the name of a recipe that is no algorithm", "recipe show quickstart")
            .says(&["ferrl recipe new quickstart"]),
        Case::new("ten thousand threads on the command line", "doctor --threads 10000")
            .says(&["--threads", "10000", "1024"]),
        Case::new("a temperature of NaN", "generate --model m --prompt x --temperature nan")
            .says(&["--temperature", "nan"]),
        Case::new("a plan for no memory", "plan r.toml --memory 0GiB").says(&["--memory"]),
    ]
}

/// Variables that are missing, and secrets that must not be seen.
fn environment() -> Vec<Case> {
    vec![
        sft("a variable that is not set", "train r.toml", "name = \"${FERRL_NO_SUCH}\"\n")
            .says(&["r.toml:5", "name", "FERRL_NO_SUCH", ".env"])
            .leaves_no(&["runs"]),
        sft("a variable that is empty", "train r.toml", "name = \"${FERRL_EMPTY}\"\n")
            .env("FERRL_EMPTY", "")
            .says(&["r.toml:5", "FERRL_EMPTY"]),
        sft("a variable that is no number", "train r.toml", "threads = \"${FERRL_KEY}\"\n")
            .env("FERRL_KEY", "swordfish-42")
            .says(&["r.toml:5", "threads", "FERRL_KEY", "1024"])
            .never_says(&["swordfish"]),
        sft("a line of .env that is none", "train r.toml", "name = \"${FERRL_NAME}\"\n")
            .file(".env", "# names\nFERRL_NAME swordfish-42\n")
            .says(&[".env:2"])
            .never_says(&["swordfish"]),
        sft(
            "a secret stays out of the run folder",
            "train r.toml",
            "data.separator = \"${FERRL_TOKEN}\"\nname = \"secret\"\n",
        )
        .file(".env", "export FERRL_TOKEN='swordfish-42'\n")
        .exit(0)
        .never_says(&["swordfish"])
        .check(|folder, _| {
            let recipe = std::fs::read_to_string(folder.join("runs/secret/recipe.toml")).unwrap();
            assert!(recipe.contains("separator = \"${FERRL_TOKEN}\""), "{recipe}");
            let found = holding(&folder.join("runs"), b"swordfish");
            assert!(found.is_empty(), "{found:?}");
        }),
        sft("a secret in an error", "train r.toml model.path=${FERRL_TOKEN}", "")
            .env("FERRL_TOKEN", "swordfish-42")
            .exit(4)
            .says(&["${FERRL_TOKEN}"])
            .never_says(&["swordfish"]),
    ]
}

/// Files below a folder that contain some bytes.
fn holding(folder: &std::path::Path, bytes: &[u8]) -> Vec<std::path::PathBuf> {
    let mut found = Vec::new();
    for path in std::fs::read_dir(folder).unwrap().map(|e| e.unwrap().path()) {
        if path.is_dir() {
            found.extend(holding(&path, bytes));
        } else if std::fs::read(&path).unwrap().windows(bytes.len()).any(|w| w == bytes) {
            found.push(path);
        }
    }
    found
}

/// Files that are no recipes.
fn files() -> Vec<Case> {
    let large = "# no recipe\n".repeat(5_000_000);
    vec![
        Case::new("a directory as a recipe", "train folder").file("folder/r.toml", SFT).says(&["folder"]),
        Case::new("an empty recipe", "train r.toml").file("r.toml", "").says(&["model", "data.train"]),
        Case::new("a recipe that is no text", "train r.toml")
            .file("r.toml", b"algo = \"\xff\xfe\"\n")
            .says(&["r.toml", "UTF-8"])
            .never_says(&["did you mean r.toml"]),
        Case::new("a recipe of 60 MB", "train r.toml").file("r.toml", large).says(&["r.toml", "4 MiB"]),
        Case::new("a recipe without end", "train /dev/zero").says(&["/dev/zero"]),
        Case::new("a recipe with 100000 keys", "train r.toml")
            .file("r.toml", (0..100_000).map(|i| format!("data.columns.c{i} = \"x\"\n")).collect::<String>())
            .says(&["model", "data.train"]),
        Case::new("a recipe whose tables have no end", "train r.toml")
            .file("r.toml", format!("data.task = {}1{}\n", "{ a = ".repeat(5000), " }".repeat(5000)))
            .says(&["r.toml"]),
        sft("a key twice", "train r.toml", "seed = 1\nseed = 2\n").says(&["r.toml:6", "duplicate"]),
        sft("a line that is no TOML", "train r.toml", "optim.lr = = 3\n").says(&["r.toml:5"]),
        sft("a setting below a shorthand", "train r.toml", "algo.length = 3\n")
            .says(&["r.toml:5", "algo = {"]),
        sft("a setting and its alias", "train r.toml", "optim.lr = 1e-3\nactor.lr = 1e-4\n")
            .says(&["r.toml:5", "r.toml:6", "actor.lr", "optim.lr"]),
        Case::new("recipes in a circle", "train a.toml")
            .file("a.toml", "base = \"b.toml\"\n")
            .file("b.toml", "base = \"a.toml\"\n")
            .says(&["a.toml -> b.toml -> a.toml"]),
        Case::new("a recipe that is its own base", "train a.toml")
            .file("a.toml", "base = \"a.toml\"\n")
            .says(&["a.toml:1", "base"]),
        Case::new("a base that is not there", "train a.toml")
            .file("a.toml", "\nbase = \"no.toml\"\n")
            .says(&["a.toml:2", "no.toml"]),
    ]
}

fn overrides() -> Vec<Case> {
    vec![
        sft("a table that is not closed", "train r.toml optim={lr=1", "").says(&["optim={lr=1", "key={"]),
        sft("a key twice in an override", "train r.toml optim={lr=1,lr=2}", "")
            .says(&["override", "duplicate"]),
        sft("NaN on the command line", "train r.toml optim.lr=nan", "")
            .says(&["optim.lr", "finite"])
            .never_says(&[": v:"]),
        sft("a stage of a recipe without stages", "train r.toml stage.0.train.steps=3", "")
            .says(&["stage", "train.steps"]),
        sft("an unknown key of a first reward", "train r.toml reward.0.verifyer=x", "")
            .says(&["reward.0.verifyer", "reward.0.verifier"]),
        sft("a word that is no override", "train r.toml optim.lr", "").says(&["optim.lr", "key=value"]),
        sft("an overlay that is not there", "train r.toml @nowhere.toml", "").says(&["nowhere.toml"]),
        sft("text with braces needs no quotes", "train r.toml --dry-run", "")
            .arg("data.template={{ prompt }} = ")
            .exit(0)
            .says(&["{{ prompt }}"]),
    ]
}

/// Options that a task, a verifier or an evaluation checks itself.
fn options() -> Vec<Case> {
    let task = "algo.name = \"sft\"\nmodel.init = { hidden = 16, layers = 1, heads = 2, max_positions = 64 }\ndata.train = \"task:countdown\"\ntrain.steps = 1\n";
    let task =
        |name, command: &str, more: &str| Case::new(name, command).file("r.toml", format!("{task}{more}"));
    vec![
        task("a typo in the options of a task", "train r.toml", "data.task.numberss = 3\n")
            .says(&["r.toml:5", "data.task.numberss", "numbers"]),
        task("an option of a task with another type", "train r.toml", "data.task = { numbers = 3, noise = \"much\" }\n")
            .says(&["r.toml:5", "data.task.noise", "a number"])
            .never_says(&["f64"]),
        task("a negative option of a task", "train r.toml data.task.tries=-1", "").says(&["data.task.tries", "-1"]).never_says(&["usize"]),
        task("a task that does not exist", "train r.toml data.train=task:coutdown", "").says(&["data.train", "countdown"]),
        task("a typo in the options of a verifier of the last stage", "train r.toml", "[[stage]]\nname = \"one\"\n[[stage]]\nalgo = \"grpo\"\nreward = [{ verifier = \"numeric\", options = { colum = \"x\" } }]\n")
            .says(&["r.toml:9", "reward.0.options.colum", "column"])
            .leaves_no(&["runs"]),
        task("best by a metric that nobody writes", "train r.toml eval.every=1 checkpoint.keep_best=1 checkpoint.metric=eval/pas@1", "")
            .says(&["checkpoint.metric", "eval/pas@1", "eval/pass@1"])
            .leaves_no(&["runs"]),
        task("a cache that is larger than the machine", "train r.toml algo=grpo algo.kl.coef=0 rollout.max_new_tokens=8 rollout.cache_mib=16777216", "")
            .exit(5)
            .says(&["rollout.cache_mib = 16777216", "MiB"]),
        task("a cache that holds no completion", "train r.toml algo=grpo algo.kl.coef=0 rollout.max_new_tokens=50000 rollout.cache_mib=1 model.init.max_positions=100000 train.micro_batch_tokens=100000", "")
            .exit(5)
            .says(&["rollout.cache_mib = 1", "rollout.max_new_tokens"]),
    ]
}

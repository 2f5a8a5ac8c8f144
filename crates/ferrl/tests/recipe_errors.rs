//! What a recipe's errors say: place, full key, got and expected, nearest name, fix.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::recipe::Recipe;

const GOOD: &str = "reward = \"countdown\"\nmodel.path = \"m\"\ndata.train = [\"a.jsonl\"]\n";

/// The error of loading and checking.
fn error(text: &str, overrides: &[&str]) -> String {
    let overrides: Vec<String> = overrides.iter().map(|o| o.to_string()).collect();
    let result = Recipe::parse(text, "r.toml", "r", &overrides);
    match result.and_then(|r| r.check(&["countdown", "math", "format"])) {
        Ok(()) => panic!("no error for {text:?} {overrides:?}"),
        Err(e) => {
            assert_eq!(e.class, ferrl_kernels::Class::Usage, "{e}");
            e.to_string()
        }
    }
}

fn says(message: &str, parts: &[&str]) {
    for part in parts {
        assert!(message.contains(part), "{message:?} does not say {part:?}");
    }
}

/// Good text with lines added (from line 4 on).
fn with(lines: &str, parts: &[&str]) {
    says(&error(&format!("{GOOD}{lines}"), &[]), parts);
}

fn over(words: &[&str], parts: &[&str]) {
    says(&error(GOOD, words), parts);
}

#[test]
fn unknown_keys() {
    with(
        "rollout.temprature = 1.0",
        &["r.toml:4: unknown key rollout.temprature", "did you mean rollout.temperature?"],
    );
    with("[rolout]\nsamples = 1", &["r.toml:4: unknown key rolout", "did you mean rollout?"]);
    with("[optim]\n\nlearning_rate = 1.0", &["r.toml:6: unknown key optim.learning_rate", "mean optim.lr?"]);
    with("lr = 1.0", &["r.toml:4: unknown key lr", "did you mean optim.lr?"]);
    with("[model.init]\nhiden = 3", &["r.toml:5: unknown key model.init.hiden", "model.init.hidden?"]);
    with("model.qqqqqqqqqqqq = 3", &["unknown key model.qqqqqqqqqqqq", "known keys here: path, init, dtype"]);
    with("[[stage]]\noptim.lrr = 3", &["r.toml:5: unknown key stage.0.optim.lrr", "mean stage.0.optim.lr?"]);
    with("[[stage]]\n[[stage.stage]]", &["r.toml:5: stage.0.stage", "cannot have stages"]);
    over(
        &["rollout.sampels=3"],
        &["override rollout.sampels=3: unknown key rollout.sampels", "mean rollout.samples?"],
    );
    over(&["num_generations=3"], &["unknown key num_generations", "did you mean rollout.samples?"]);
    let text = "model.path = \"m\"\n[[reward]]\nverifyer = \"x\"\n";
    says(&error(text, &[]), &["r.toml:3: unknown key reward.0.verifyer", "reward.0.verifier?"]);
}

#[test]
fn unknown_settings_of_an_algorithm() {
    with("algo.clip_hi = 0.3", &["r.toml:4: unknown key algo.clip_hi: dr_grpo has", "mean algo.clip_high?"]);
    with(
        "[algo]\nname = \"grpo\"\nkl.cof = 1.0",
        &["r.toml:6: unknown key algo.kl.cof: grpo", "algo.kl.coef?"],
    );
    // The same word is a setting one level up, and only the wrong one is blamed.
    with("[algo]\nlength = 3\nkl.length = 1", &["r.toml:6: unknown key algo.kl.length"]);
    with("[algo]\nkl.coef = 0.1\ncoef = 1", &["r.toml:6: unknown key algo.coef", "mean algo.kl.coef?"]);
    with("[algo]\nname = \"sft\"\nbeta = 1", &["unknown key algo.beta: sft has no such setting"]);
    with("[algo]\nname = \"rm\"\nbeta = 1", &["unknown key algo.beta: rm", "known keys here: centre"]);
    with(
        "[[stage]]\n[stage.algo]\nclip_lo = 1",
        &["r.toml:6: unknown key stage.0.algo.clip_lo", "stage.0.algo.clip_low?"],
    );
    over(
        &["algo=gpro"],
        &["override algo=gpro: algo.name: unknown algorithm \"gpro\"", "algo.name = \"grpo\""],
    );
    over(&["algo.name=3"], &["override algo.name=3: algo.name: expected text, got the number 3"]);
    over(
        &["algo.kl.place=los"],
        &[
            "algo.kl.place: expected one of \"reward\", \"loss\", \"advantage\", got the text \"los\"",
            "= \"loss\"",
        ],
    );
    over(
        &["algo.epochs=two"],
        &["algo.epochs: expected a whole number from 1 to 1000, got the text \"two\""],
    );
    over(&["algo.kl=0.1"], &["override algo.kl=0.1: algo.kl: expected a table, got the number 0.1"]);
    over(&["algo.filter_equal=1"], &["algo.filter_equal: expected true or false, got the number 1"]);
    over(
        &["algo.clip_low=2"],
        &[
            "override algo.clip_low=2: algo.clip_low: expected a number above 0, up to 1",
            "fix: algo.clip_low = 0.2",
        ],
    );
}

#[test]
fn wrong_types() {
    with(
        "[optim]\nlr = \"fast\"",
        &["r.toml:5: optim.lr: expected a number from 1e-12 to 10, got the text \"fast\""],
    );
    with("seed = \"3\"", &["r.toml:4: seed: expected a whole number from 0 to", "without quotes"]);
    with(
        "rollout.prompts = -1",
        &["rollout.prompts: expected a whole number from 1 to 1000000, got the number -1"],
    );
    with("train.batch = 1e3", &["train.batch: expected a whole number", "fix: train.batch = 1000"]);
    with("data.shuffle = 1", &["data.shuffle: expected true or false, got the number 1"]);
    with("optim = 3", &["optim: expected a table, got the number 3"]);
    with("rollout.stop = [1]", &["rollout.stop.0: expected text, got the number 1"]);
    with(
        "data.weights = \"x\"",
        &["data.weights: expected a list of numbers above 0, up to 1000, got the text \"x\""],
    );
    with("stage = 3", &["stage: expected a list of tables", "[[stage]]"]);
    with("name = 123", &["r.toml:4: name: expected text, got the number 123", "name = \"123\""]);
    over(&["algo.kl.target=6"], &["override algo.kl.target=6", "kl.target adapts kl.coef, which is 0"]);
    over(&["seed=1", "seed.x=1"], &["override seed.x=1: seed is the number 1, not a table"]);
    over(&["reward.3.weight=1"], &["reward has 1 entries, numbered from 0, and none \"3\""]);
}

#[test]
fn text_that_is_not_toml_or_not_an_override() {
    with("[model", &["r.toml:4: "]);
    with("a = = 3", &["r.toml:4: "]);
    with("seed = 1\nseed = 2", &["r.toml:5: duplicate key"]);
    with("optim.lr = nan", &["r.toml:4: optim.lr: nan is not a finite number"]);
    with(
        "seed = 99999999999999999999",
        &["r.toml:4: seed: the whole number 99999999999999999999 is out of range"],
    );
    over(
        &["optim.lr"],
        &["override optim.lr: not an override", "key=value, +key=value, ~key or @overlay.toml"],
    );
    over(&["optim.lr="], &["no value after =", "~optim.lr deletes"]);
    over(&["~optim.lr=3"], &["a deletion takes no value", "fix: ~optim.lr"]);
    over(&["~optim.lrr"], &["there is no optim.lrr to delete", "~optim.lr"]);
    over(&["a b=3"], &["\"a b\" is not a dotted key"]);
    over(&["rollout.stop=[a, b]"], &["override rollout.stop=[a, b]: ", "needs quotes"]);
    over(&["+model.path=x"], &["model.path is the text \"m\", not a list to add to"]);
    over(&["@missing.toml"], &["override @missing.toml: missing.toml: cannot read the recipe"]);
    let missing = Recipe::load("nowhere/none.toml", &[]).unwrap_err().to_string();
    says(&missing, &["nowhere/none.toml: cannot read the recipe"]);
}

#[test]
fn rollouts_that_cannot_work() {
    over(
        &["rollout.samples=1"],
        &[
            "override rollout.samples=1: rollout.samples: dr_grpo needs several completions",
            "rollout.samples = 8",
        ],
    );
    over(
        &["rollout.samples=0"],
        &["rollout.samples: expected a whole number from 1 to", "rollout.samples = 8"],
    );
    over(&["rollout.prompts=0"], &["rollout.prompts: expected a whole number from 1 to"]);
    over(
        &["rollout.prompts=1000000", "rollout.samples=65536"],
        &["65536000000 completions", "rollout.samples"],
    );
    over(
        &["rollout.temperature=0"],
        &["rollout.temperature: expected a number from 0.0001 to 100, got", "= 1.0"],
    );
    over(
        &["rollout.top_k=50"],
        &["rollout.top_k: log-probabilities of truncated", "rollout.allow_off_policy = true"],
    );
    over(&["rollout.top_p=0.9"], &["rollout.top_p: log-probabilities of truncated", "rollout.top_p = 1"]);
    over(&["rollout.top_p=1.5"], &["rollout.top_p: expected a number above 0, up to 1, got the number 1.5"]);
    over(
        &["train.micro_batch_tokens=1000"],
        &["1000 tokens do not hold one prompt", "micro_batch_tokens = 2304"],
    );
    over(&["algo.minibatches=1000"], &["256 completions cannot be split into 1000 minibatches"]);
    over(&["rollout.max_new_tokens=0"], &["rollout.max_new_tokens: expected", "from 1 to 1048576"]);
    over(
        &["~model.path", "model.init.layers=2", "algo=grpo"],
        &["regularise the policy towards a random model", "algo.kl.coef = 0"],
    );
    over(
        &["~model.path", "model.init.max_positions=64"],
        &["completions of 256 tokens do not fit a model of 64"],
    );
    over(
        &["algo=ppo", "rollout.samples=1", "algo.filter_equal=true"],
        &["groups of one completion always are", "algo.filter_equal = false"],
    );
    over(
        &["rollout.prompts=1", "rollout.samples=1", "algo.advantage.baseline=batch"],
        &["with one completion every advantage is 0", "rollout.prompts = 32"],
    );
    over(
        &["reward=contdown"],
        &["unknown name \"contdown\", expected one of countdown, math", "= \"countdown\""],
    );
    over(&["reward.0.python=r.py"], &["one [[reward]] has 2 sources", "verifier, python, model"]);
    over(&["reward.0.function=f"], &["function needs a python file"]);
}

#[test]
fn other_settings_that_cannot_work() {
    over(&["~data.train"], &["data.train: no training data"]);
    over(&["~model.path"], &["model: no model to train", "[model.init]"]);
    over(&["model.init.layers=2"], &["both a directory (model.path) and a new model", "leave one out"]);
    over(
        &["model.dtype=fp16"],
        &["model.dtype: unknown name \"fp16\", expected one of f32, bf16", "model.dtype = \"bf16\""],
    );
    over(&["device=cup"], &["device: unknown name \"cup\"", "device = \"cpu\""]);
    over(&["optim.schedule=cosin"], &["optim.schedule: unknown name", "optim.schedule = \"cosine\""]);
    over(&["optim.name=adam"], &["optim.name = \"adamw\""]);
    over(
        &["optim.lr=0"],
        &["optim.lr: expected a number from 1e-12 to 10, got the number 0", "optim.lr = 1e-5"],
    );
    over(&["optim.beta1=1"], &["optim.beta1: expected a number from 0 to below 1"]);
    over(&["optim.warmup=3"], &["optim.warmup: expected a number from 0 to 1, got the number 3"]);
    over(&["eval.samples=0"], &["eval.samples: expected a whole number from 1 to"]);
    over(&["checkpoint.keep=0"], &["checkpoint.keep: expected a whole number from 1 to"]);
    over(&["checkpoint.keep_best=1"], &["checkpoint.metric: checkpoint.keep_best needs a metric"]);
    over(&["train.steps=0"], &["train.steps: expected a whole number from 1 to"]);
    over(&["algo=sft", "train.micro_batch_tokens=2047"], &["do not hold one sequence", "= 2048"]);
    over(&["algo=dpo", "train.micro_batch_tokens=4000"], &["do not hold one pair", "= 4096"]);
    over(&["algo=sft", "train.batch=0"], &["train.batch: expected a whole number from 1 to"]);
    over(&["data.weights=[1, 2]"], &["2 weights for 1 sources"]);
    over(&["critic.shared=true", "critic.path=x"], &["has no weights of its own"]);
    over(&["~model.path", "model.init={heads = 3}"], &["hidden = 128 does not divide into 3 heads"]);
    over(&["~model.path", "model.init={family = \"quen2\"}"], &["model.init.family = \"qwen2\""]);
}

#[test]
fn settings_that_do_not_apply_are_no_error() {
    for algo in ["rm", "dpo", "sft"] {
        let words = [format!("algo={algo}"), "rollout.samples=1".into(), "~reward".into()];
        Recipe::parse(GOOD, "r.toml", "r", &words).unwrap().check(&[]).unwrap();
    }
}

#[test]
fn all_problems_are_told_at_once_and_stages_by_number() {
    let text = "model.path = \"m\"\ndata.train = \"a\"\n[[stage]]\nalgo = \"sft\"\n[[stage]]\nalgo = \"ppo\"\nrollout.prompts = 0\n";
    let message = error(text, &["optim.lr=-1"]);
    says(&message, &["2 problems", "override optim.lr=-1: optim.lr: expected a number from 1e-12 to 10"]);
    says(&message, &["r.toml:7: stage.1.rollout.prompts: expected a whole number from 1 to"]);
    let twice = "[[stage]]\nname = \"a\"\n[[stage]]\nname = \"a\"\n";
    says(&error(twice, &[]), &["r.toml:3: stage.1: two stages are called \"a\"", "its own name"]);
}

#[test]
fn rl2_options_that_are_wrong() {
    over(&["kl.typ=loss"], &["override kl.typ=loss: unknown key kl.typ", "did you mean kl.type?"]);
    over(&["actor.sp_siz=2"], &["unknown key actor.sp_siz", "did you mean actor.sp_size?"]);
    over(&["kl.type=los"], &["kl.type: expected one of null, reward, loss, advantage", "kl.type=loss"]);
    over(&["kl.type=loss"], &["kl.type without kl.coef has no effect", "kl.coef=0.001"]);
    over(&["adv.estimator=gea"], &["adv.estimator: expected one of reinforce, gae", "adv.estimator=gae"]);
    over(
        &["kl.type=loss", "kl.coef=x"],
        &["override kl.coef=x: algo.kl.coef: expected a number from 0 to 1000, got the text \"x\""],
    );
    over(&["actor.lr=x"], &["override actor.lr=x: optim.lr: expected a number"]);
    over(
        &["data.responses_per_prompt=1"],
        &["override data.responses_per_prompt=1: rollout.samples: dr_grpo needs several completions"],
    );
}

//! Recipes: overrides, overlays, stages, shorthands, the round trip, the table of keys.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::recipe::{Recipe, Resolved, keys, keys_markdown, policy_keys};
use serde_json::{Value, json};

const BASE: &str = r#"
seed = 7
reward = "countdown"
[model]
path = "models/tiny"
[data]
train = ["a.jsonl"]
[optim]
lr = 1e-5
"#;

fn load(text: &str, overrides: &[&str]) -> Resolved {
    let overrides: Vec<String> = overrides.iter().map(|o| o.to_string()).collect();
    Recipe::parse(text, "r.toml", "r", &overrides).unwrap()
}

fn one(text: &str, overrides: &[&str]) -> Recipe {
    load(text, overrides).stages.remove(0).recipe
}

fn scratch(name: &str, text: &str) -> String {
    let dir = std::env::temp_dir().join(format!("ferrl-recipe-{}", std::process::id()));
    std::fs::create_dir_all(&dir).unwrap();
    let path = dir.join(name);
    std::fs::write(&path, text).unwrap();
    path.display().to_string()
}

#[test]
fn a_file_gives_typed_settings_over_defaults() {
    let r = one(BASE, &[]);
    assert_eq!((r.seed, r.optim.lr, r.rollout.samples), (7, 1e-5, 8));
    assert_eq!(r.reward[0].verifier.as_deref(), Some("countdown"));
    assert_eq!(r.algo["name"], "dr_grpo", "the default algorithm");
    load(BASE, &[]).check(&["countdown"]).unwrap();
}

#[test]
fn a_string_and_a_table_name_the_same_algorithm() {
    let text = one(&format!("algo = \"grpo\"\n{BASE}"), &[]);
    let table = one(&format!("{BASE}\n[algo]\nname = \"grpo\""), &[]);
    assert_eq!(text, table);
    assert_eq!(text, one(BASE, &["algo=grpo"]));
    assert_eq!(text, one(BASE, &["algo.name=grpo"]));
    assert!(text.algorithm().unwrap().needs().reference);
}

#[test]
fn overrides_apply_from_left_to_right() {
    let r = one(BASE, &["optim.lr=2e-6", "optim.lr=3e-6", "seed=9", "model.recompute=true"]);
    assert_eq!((r.optim.lr, r.seed, r.model.recompute), (3e-6, 9, true));
    let r = one(BASE, &["rollout.stop=[\"</answer>\", \"x\"]", "+rollout.stop=y z", "train.steps=5"]);
    assert_eq!(r.rollout.stop, ["</answer>", "x", "y z"]);
    assert_eq!(r.train.steps, Some(5));
    let r = one(BASE, &["train.steps=5", "~train.steps", "~optim.lr"]);
    assert_eq!((r.train.steps, r.optim.lr), (None, Recipe::default().optim.lr));
    assert_eq!(one(BASE, &["train.steps=5", "train.steps=null"]).train.steps, None);
    assert_eq!(one(BASE, &["optim.lr=.5"]).optim.lr, 0.5);
    assert!(!one(BASE, &["data.shuffle=False"]).data.shuffle);
    assert_eq!(one(BASE, &["data.columns.\"a.b\"=x"]).data.columns["a.b"], "x");
    assert_eq!(one(BASE, &["data.system=be brief = good"]).data.system.unwrap(), "be brief = good");
}

#[test]
fn a_lone_value_is_a_list_of_one() {
    let r = one(BASE, &["data.train=b.jsonl", "+data.train=task:countdown", "model.frozen=embed"]);
    assert_eq!(r.data.train, ["b.jsonl", "task:countdown"]);
    assert_eq!(r.model.frozen, ["embed"]);
    let r = one(BASE, &["+reward=format", "+reward={python = \"r.py\", weight = 0.5}"]);
    let names: Vec<_> = r.reward.iter().map(|w| w.verifier.as_deref()).collect();
    assert_eq!(names, [Some("countdown"), Some("format"), None]);
    assert_eq!(r.reward[2].weight, Some(0.5));
    assert_eq!(one(BASE, &["reward=[\"a\", \"b\"]"]).reward.len(), 2);
    assert_eq!(one(BASE, &["reward.0.weight=2"]).reward[0].weight, Some(2.0));
}

#[test]
fn overlays_join_tables_and_keep_their_turn() {
    let file = scratch("over.toml", "[optim]\nlr = 9e-6\nwarmup = 0.5\n[algo]\nclip_high = 0.28\n");
    let over = format!("@{file}");
    let r = one(BASE, &[&over]);
    assert_eq!((r.optim.lr, r.optim.warmup, r.seed), (9e-6, 0.5, 7));
    assert_eq!(r.algo["clip_high"], 0.28);
    assert_eq!(one(BASE, &[&over, "optim.lr=1e-7"]).optim.lr, 1e-7);
    assert_eq!(one(BASE, &["optim.lr=1e-7", &over]).optim.lr, 9e-6);
    // Another algorithm does not inherit settings, and a new model replaces a directory.
    let file = scratch("other.toml", "algo = \"sft\"\n[model.init]\nlayers = 2\n");
    let r = one(BASE, &["algo.clip_high=0.3", &format!("@{file}")]);
    assert_eq!(json!(r.algo), json!({ "name": "sft" }));
    assert!(r.model.path.is_none() && r.model.init.unwrap().layers == 2);
}

const STAGED: &str = r#"
name = "two"
[model]
init = { layers = 2 }
[data]
train = ["task:countdown"]
[optim]
lr = 1e-4
[[stage]]
name = "warm"
algo = "sft"
train.steps = 10
[[stage]]
algo = "grpo"
reward = "countdown"
optim.lr = 1e-6
[[stage]]
algo = { name = "grpo", kl = { coef = 0.0 } }
reward = [{ verifier = "countdown", weight = 2.0 }]
model = { path = "other" }
"#;

#[test]
fn stages_are_merged_over_the_recipe_and_hand_the_model_on() {
    let all = load(STAGED, &["rollout.samples=4", "stage.warm.train.steps=20", "stage.1.seed=3"]);
    let names: Vec<&str> = all.stages.iter().map(|s| s.name.as_str()).collect();
    assert_eq!((all.name.as_str(), names), ("two", vec!["warm", "grpo", "grpo_2"]));
    let [warm, rl, last] = &all.stages[..] else { panic!("three stages") };
    assert_eq!((warm.recipe.train.steps, warm.recipe.optim.lr), (Some(20), 1e-4));
    assert_eq!((rl.recipe.train.steps, rl.recipe.optim.lr, rl.recipe.seed), (None, 1e-6, 3));
    assert!(!warm.continues && rl.continues && !last.continues);
    assert!(warm.recipe.model.init.is_some() && rl.recipe.model.init.is_none());
    assert_eq!(last.recipe.model.path.as_deref(), Some("other"));
    assert_eq!(last.recipe.rollout.samples, 4);
    assert!(all.stages.iter().all(|s| s.recipe.stage.is_empty() && s.recipe.name.as_deref() == Some("two")));
    all.check(&["countdown"]).unwrap();
}

#[test]
fn the_resolved_recipe_loads_to_itself() {
    let cases: &[(&str, &[&str])] = &[
        (BASE, &[]),
        (BASE, &["algo=ppo", "algo.kl.target=6", "optim.lr=1", "data.system=a\nb \"c\""]),
        (BASE, &["algo.aggregate=constant", "data.columns={a = \"b\"}", "reward.0.options={max = 3}"]),
        (BASE, &["kl.type=loss", "kl.coef=0.1", "critic.clip=0.2", "actor.clip=0.3"]),
        (STAGED, &[]),
        (STAGED, &["rollout.stop=x", "stage.2.actor.clip=0.1"]),
    ];
    for (text, overrides) in cases {
        let first = load(text, overrides);
        let again = Recipe::parse(&first.toml, "again.toml", "again", &[]).unwrap();
        assert_eq!(first, again, "{}", first.toml);
        let file = scratch("again.toml", &first.toml);
        assert_eq!(Recipe::load(&file, &[]).unwrap(), first);
    }
}

#[test]
fn a_constant_divisor_is_the_generation_limit() {
    let r = one(BASE, &["algo.aggregate=constant", "rollout.max_new_tokens=300"]);
    assert_eq!(r.algo["length"], 300);
    let r = one(BASE, &["algo.aggregate=constant", "algo.length=77"]);
    assert_eq!(r.algo["length"], 77);
    assert!(!one(BASE, &["algo=sft", "algo.aggregate=constant"]).algo.contains_key("length"));
}

#[test]
fn the_name_is_the_files_unless_given() {
    let file = scratch("my-run.toml", BASE);
    assert_eq!(Recipe::load(&file, &[]).unwrap().name, "my-run");
    assert_eq!(Recipe::load(&file, &["name=other".into()]).unwrap().name, "other");
}

#[test]
fn every_algorithm_loads_by_its_name_alone() {
    for entry in ferrl::algo::ALGORITHMS {
        let algo = format!("algo={}", entry.name);
        let r = one(BASE, &[&algo]);
        assert_eq!(r.algorithm_name(), entry.name);
        let taught = r.algorithm().unwrap().needs().teacher;
        let words: &[&str] = if taught { &[&algo, "teacher.path=t"] } else { &[&algo] };
        load(BASE, words).check(&["countdown"]).unwrap();
    }
}

/// Every path of a value that is not a table.
fn leaves(value: &Value, prefix: &str, out: &mut Vec<String>) {
    match value.as_object().filter(|m| !m.is_empty()) {
        Some(map) => map.iter().for_each(|(k, v)| leaves(v, &format!("{prefix}{k}."), out)),
        None => out.push(prefix.trim_end_matches('.').to_string()),
    }
}

#[test]
fn every_key_has_a_type_a_default_and_a_meaning() {
    for (defaults, table, prefix) in [
        (json!(Recipe::default()), keys(), ""),
        (json!(ferrl::recipe::InitSettings::default()), keys(), "model.init."),
        (json!(ferrl::recipe::RewardSettings::default()), keys(), "reward.N."),
        (json!(ferrl::algo::policy::Policy::default()), policy_keys(), "algo."),
    ] {
        let mut paths = Vec::new();
        leaves(&defaults, prefix, &mut paths);
        assert!(paths.len() > 4);
        for path in paths {
            let key =
                table.iter().find(|k| k.path == path).unwrap_or_else(|| panic!("{path} is not in the table"));
            assert!(key.about.len() > 5, "{path} has no description");
            let pointer = format!("/{}", path.strip_prefix(prefix).unwrap().replace('.', "/"));
            assert_eq!(Some(&key.default), defaults.pointer(&pointer), "{path}");
        }
    }
    for key in keys().iter().chain(policy_keys()) {
        assert!(!key.about.is_empty(), "{} has no description", key.path);
    }
    let words = |path: &str| {
        let key = keys().iter().chain(policy_keys()).find(|k| k.path == path).unwrap();
        (key.words(), key.optional)
    };
    assert_eq!(words("rollout.top_k"), ("a whole number from 0 to 16777216".into(), false));
    assert_eq!(words("train.steps"), ("a whole number from 1 to 1000000000".into(), true));
    assert_eq!(words("data.weights"), ("a list of numbers above 0, up to 1000".into(), false));
    assert_eq!(words("reward.N.python"), ("text".into(), true));
    assert_eq!(words("algo.aggregate"), ("one of \"token\", \"sequence\", \"constant\"".into(), false));
    assert_eq!(words("algo.correction.kind"), ("one of \"none\", \"truncate\", \"mask\"".into(), false));
}

#[test]
fn the_manual_page_lists_every_key_once() {
    let page = keys_markdown();
    for key in ["optim.lr", "model.init.layers", "reward.N.verifier", "algo.kl.estimator", "stage", "seed"] {
        assert_eq!(page.matches(&format!("| `{key}` |")).count(), 1, "{key}");
    }
    assert!(
        page.contains("| `optim.lr` | a number from 1e-12 to 10 | `1e-5` | Peak learning rate. |"),
        "{page}"
    );
    assert!(page.contains("## `[[reward]]`") && page.contains("## `[model.init]`"));
}

#[test]
fn what_may_have_no_value_can_be_switched_off() {
    let clip = |overrides: &[&str]| one(BASE, overrides).algorithm().map(|_| one(BASE, overrides).algo);
    assert_eq!(clip(&["algo=ppo", "algo.critic.clip=off"]).unwrap()["critic"]["clip"], "off");
    assert_eq!(clip(&["algo=ppo", "algo.critic.clip=null"]).unwrap()["critic"]["clip"], "off");
    let ppo = |values| ferrl::algo::settings::<ferrl::algo::policy::Policy>("ppo", values).unwrap();
    assert_eq!(ppo(json!({ "critic": { "clip": "off" } })).critic.clip, None);
    assert_eq!(ppo(json!({})).critic.clip, Some(0.5));
    let staged = format!("{BASE}\nema = 0.9\n[[stage]]\n[[stage]]\noptim.ema = \"off\"\n");
    let resolved = load(&staged, &[]);
    assert_eq!(resolved.stages[0].recipe.optim.ema, Some(0.9));
    assert_eq!(resolved.stages[1].recipe.optim.ema, None);
    let again = load(&resolved.toml, &[]);
    assert_eq!(again.stages, resolved.stages, "and stays so in the run folder's recipe");
    assert_eq!(one(BASE, &["optim.ema=0.5", "optim.ema=off"]).optim.ema, None);
    // What must have a value is not switched off.
    let words = ["optim.lr=off".to_string()];
    let error = Recipe::parse(BASE, "r.toml", "r", &words).unwrap_err().to_string();
    assert!(error.contains("optim.lr: expected a number"), "{error}");
    let words = ["algo=ppo".to_string(), "algo.clip_low=off".to_string()];
    let error = Recipe::parse(BASE, "r.toml", "r", &words).unwrap_err().to_string();
    assert!(error.contains("algo.clip_low: expected a number"), "{error}");
    assert!(keys_markdown().contains("| `optim.ema` | a number above 0, up to 0.999999 or \"off\" |"));
}

#[test]
fn a_recipe_that_is_not_there_is_looked_for_nearby() {
    let dir = tempfile::tempdir().unwrap();
    std::fs::write(dir.path().join("quickstart.toml"), BASE).unwrap();
    let error = Recipe::load(dir.path().join("quikstart.toml"), &[]).unwrap_err().to_string();
    assert!(error.contains("quickstart.toml?"), "{error}");
    let error = Recipe::load(dir.path().join("nowhere/r.toml"), &[]).unwrap_err().to_string();
    assert!(error.contains("fix: give the path of a .toml file"), "{error}");
}

/// Bug: text on the command line had to be TOML, so that `data.template='{{ question }}'` failed.
#[test]
fn text_on_the_command_line_needs_no_quotes() {
    for (word, want) in [
        ("data.template={{ question }}", "{{ question }}"),
        ("data.template={% if a %}{{ a }}{% endif %}", "{% if a %}{{ a }}{% endif %}"),
        ("data.template=[INST] {{ q }} [/INST]", "[INST] {{ q }} [/INST]"),
        ("data.template=\"{{ q }}\" is", "\"{{ q }}\" is"),
        ("data.template=\"{{ q }}\\n\"", "{{ q }}\n"),
        ("data.template='{{ q }}'", "{{ q }}"),
        ("data.template=a # b", "a # b"),
        ("data.template=1e5", "1e5"),
        ("data.template=line\nname = \"x\"", "line\nname = \"x\""),
    ] {
        assert_eq!(one(BASE, &[word]).data.template.as_deref(), Some(want), "{word}");
    }
    assert_eq!(load(BASE, &["name=my run"]).name, "my run");
    assert_eq!(load(BASE, &["name=123"]).name, "123");
    assert_eq!(one(BASE, &["data.system=true"]).data.system.as_deref(), Some("true"));
    assert_eq!(one(BASE, &["rollout.stop=</answer>"]).rollout.stop, ["</answer>"]);
    assert_eq!(
        one(BASE, &["rollout.stop=[\"a\", \"b\"]", "+rollout.stop=[x"]).rollout.stop,
        ["a", "b", "[x"]
    );
    assert_eq!(one(BASE, &["reward.0.options.pattern={{x}}"]).reward[0].options["pattern"], "{{x}}");
}

/// Bug: an alias and the key itself in one file were both taken, and the alias won without a word.
#[test]
fn one_setting_under_two_names() {
    let error = |text: &str, words: &[&str]| {
        let words: Vec<String> = words.iter().map(|w| w.to_string()).collect();
        Recipe::parse(text, "r.toml", "r", &words).unwrap_err().to_string()
    };
    let said = error("optim.lr = 1e-3\nactor.lr = 1e-4\n", &[]);
    assert!(said.contains("r.toml:1") && said.contains("r.toml:2") && said.contains("actor.lr"), "{said}");
    // The same value twice is no harm, and a later word wins.
    assert_eq!(load("optim.lr = 1e-3\nactor.lr = 1e-3\n", &[]).stages[0].recipe.optim.lr, 1e-3);
    assert_eq!(load("optim.lr = 1e-3\n", &["actor.lr=1e-4"]).stages[0].recipe.optim.lr, 1e-4);
    assert_eq!(load("actor.lr = 1e-3\n", &["optim.lr=1e-4"]).stages[0].recipe.optim.lr, 1e-4);
}

#[test]
fn values_may_refer_to_the_environment_and_the_saved_recipe_keeps_the_reference() {
    // Cargo sets these for every test.
    let (name, version) = (env!("CARGO_PKG_NAME"), env!("CARGO_PKG_VERSION_MINOR"));
    let text = "name = \"run-${CARGO_PKG_NAME}\"\nmodel.path = \"m\"\ndata.train = \"${CARGO_PKG_NAME}.jsonl\"\n\
                seed = \"${CARGO_PKG_VERSION_MINOR}\"\ndata.template = \"$${CARGO_PKG_NAME} costs ${{ price }} or ${\"\n\
                [[reward]]\nverifier = \"exact\"\noptions = { column = \"${CARGO_PKG_NAME}\" }\n\
                [[stage]]\nname = \"one\"\noptim.lr = \"${CARGO_PKG_VERSION_MINOR}\"\n";
    let resolved = load(text, &[]);
    let recipe = &resolved.stages[0].recipe;
    assert_eq!(resolved.name, format!("run-{name}"));
    assert_eq!(recipe.data.train, [format!("{name}.jsonl")]);
    assert_eq!(recipe.seed.to_string(), version);
    assert_eq!(recipe.optim.lr.to_string(), version);
    assert_eq!(recipe.data.template.as_deref(), Some("${CARGO_PKG_NAME} costs ${{ price }} or ${"));
    assert_eq!(recipe.reward[0].options["column"], name);
    for kept in [
        "\"run-${CARGO_PKG_NAME}\"",
        "[\"${CARGO_PKG_NAME}.jsonl\"]",
        "\"${CARGO_PKG_VERSION_MINOR}\"",
        "$${",
    ] {
        assert!(resolved.toml.contains(kept), "no {kept} in\n{}", resolved.toml);
    }
    assert!(!resolved.toml.contains(&format!("{name}.jsonl")), "{}", resolved.toml);
    assert_eq!(load(&resolved.toml, &[]).stages, resolved.stages, "and it resolves to the same again");
    assert_eq!(load(&resolved.toml, &[]).toml, resolved.toml);
}

#[test]
fn a_missing_variable_names_key_line_and_variable() {
    let error = |text: &str, words: &[&str]| {
        let words: Vec<String> = words.iter().map(|w| w.to_string()).collect();
        let error = Recipe::parse(text, "r.toml", "r", &words).unwrap_err();
        assert_eq!(error.class, ferrl_kernels::Class::Usage);
        error.to_string()
    };
    let said = error("seed = 1\nmodel.path = \"${FERRL_NO_SUCH}\"\n", &[]);
    assert!(["r.toml:2", "model.path", "FERRL_NO_SUCH"].iter().all(|w| said.contains(w)), "{said}");
    let said = error("[[reward]]\nverifier = \"exact\"\noptions = { column = \"${FERRL_NO_SUCH}\" }\n", &[]);
    assert!(["r.toml:3", "reward.0.options.column"].iter().all(|w| said.contains(w)), "{said}");
    let said = error("", &["model.path=${FERRL_NO_SUCH}"]);
    assert!(["override", "model.path", "FERRL_NO_SUCH"].iter().all(|w| said.contains(w)), "{said}");
    let said = error("base = \"${FERRL_NO_SUCH}.toml\"\n", &[]);
    assert!(["r.toml:1", "base", "FERRL_NO_SUCH"].iter().all(|w| said.contains(w)), "{said}");
    // What a variable holds is not shown where it is wrong.
    let said = error("threads = \"${CARGO_PKG_NAME}\"\n", &[]);
    assert!(
        said.contains("${CARGO_PKG_NAME}") && !said.contains(&format!("{:?}", env!("CARGO_PKG_NAME"))),
        "{said}"
    );
}

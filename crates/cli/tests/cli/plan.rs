//! `ferrl plan`: agrees with real runs, refuses what cannot fit and says what would.

use crate::common::*;
use serde_json::Value;

const RECIPE: &str = "name = \"planned\"\n\
    model.init = { hidden = 128, layers = 3, max_positions = 128 }\n\
    data = { train = [\"task:countdown\"], max_length = 64 }\n\
    rollout = { prompts = 16, samples = 8, max_new_tokens = 32, cache_mib = 16 }\n\
    train = { steps = 2, batch = 192, micro_batch_tokens = 1536 }\n\
    threads = 2\n\
    device = \"cpu\"\n";

fn plan(recipe: &str, changes: &[&str]) -> Value {
    serde_json::from_str(&ok(&[&["plan", recipe, "--json", "--memory", "1TiB"], changes].concat())).unwrap()
}

/// The most memory a program had, as the system counts it for whoever waits for it.
#[cfg(target_os = "linux")]
fn peak_of(args: &[&str]) -> Option<u64> {
    let wait = "import resource, subprocess, sys\n\
        code = subprocess.run(sys.argv[1:], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL).returncode\n\
        print(code, resource.getrusage(resource.RUSAGE_CHILDREN).ru_maxrss)";
    let mut python = std::process::Command::new("python3");
    let Ok(out) = python.args(["-c", wait, env!("CARGO_BIN_EXE_ferrl")]).args(args).output() else {
        eprintln!("SKIPPED: python3 was not found, real peaks are not measured");
        return None;
    };
    let text = String::from_utf8_lossy(&out.stdout).into_owned();
    let (code, kib) = text.trim().split_once(' ').unwrap();
    assert_eq!(code, "0", "ferrl {args:?}");
    Some(kib.parse::<u64>().unwrap() * 1024)
}

/// Supervised, sampled, with a critic, with an evaluation: within 15 % of what the runs take.
#[test]
#[cfg(target_os = "linux")]
fn the_estimate_agrees_with_the_peak_of_real_runs() {
    let folder = Folder::new("plan-real");
    let recipe = folder.write("planned.toml", RECIPE);
    // A random model gets something right by this reward, so that there is something to learn from.
    let reward = "reward=[{ verifier = \"regex\", truncated = \"score\", options = { pattern = \"[0-4]\", whole = false } }]";
    let sampled = |name: &str| vec![format!("algo={name}"), "algo.kl.coef=0.0".into(), reward.into()];
    let cases = [
        vec!["algo=sft".to_string()],
        vec!["algo=sft".into(), "model.dtype=bf16".into(), "optim.ema=0.9".into()],
        vec!["algo=sft".into(), "model.recompute=true".into()],
        sampled("grpo"),
        sampled("ppo"),
        [sampled("grpo"), vec!["eval.at_start=true".into(), "eval.prompts=256".into()]].concat(),
        vec!["algo=sft".into(), "eval.at_start=true".into(), "eval.prompts=256".into()],
    ];
    let mut wrong = Vec::new();
    for (i, changes) in cases.iter().enumerate() {
        let changes: Vec<&str> = changes.iter().map(String::as_str).collect();
        wrong.extend(compare(&folder, &recipe, &changes, &format!("runs-{i}")));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Plans a recipe and runs it; says what is wrong where the plan's largest stage is more than 15 % off.
#[cfg(target_os = "linux")]
fn compare(folder: &Folder, recipe: &str, changes: &[&str], runs: &str) -> Option<String> {
    let stages = plan(recipe, changes)["stages"].as_array().unwrap().clone();
    let planned = stages.iter().map(|s| s["bytes"].as_f64().unwrap()).fold(0.0, f64::max);
    let real = peak_of(&[&["train", recipe, "--runs", &folder.path(runs)], changes].concat())? as f64;
    let text =
        format!("{changes:?}: planned {:.0} MiB, real {:.0} MiB", planned / 1048576.0, real / 1048576.0);
    println!("{text}");
    (!(0.85..=1.15).contains(&(planned / real))).then_some(text)
}

/// Bug: plans left out the teacher, reward models, and the evaluation's own cache, and `stage:NAME` had none at all.
#[test]
#[cfg(target_os = "linux")]
fn teachers_reward_models_and_critics_of_earlier_stages_are_planned() {
    let folder = Folder::new("plan-others");
    let text = |stages: &str| format!("{RECIPE}algo.kl.coef = 0.0\n{stages}");
    let large = "model.init = { hidden = 192, layers = 4, max_positions = 128 }";
    let sft = |name: &str, more: &str| {
        format!("[[stage]]\nname = {name:?}\nalgo = \"sft\"\ntrain = {{ steps = 1, batch = 8 }}\n{more}\n")
    };
    let score = "[[stage]]\nname = \"score\"\nalgo = \"rm\"\ntrain = { steps = 1, batch = 8 }\n";
    let teacher = sft("teacher", large)
        + &sft("student", "model.init = { hidden = 64, layers = 2, max_positions = 128 }")
        + "[[stage]]\nalgo = \"distill\"\nteacher.path = \"stage:teacher\"\n";
    let judge = sft("start", "")
        + score
        + "[[stage]]\nalgo = { name = \"grpo\", kl = { coef = 0.0 } }\nmodel.path = \"stage:start\"\n\
           [[stage.reward]]\nmodel = \"stage:score\"\n";
    let critic = sft("start", "")
        + score
        + "[[stage]]\nalgo = \"ppo\"\nmodel.path = \"stage:start\"\ncritic.path = \"stage:score\"\n\
           eval = { at_start = true, prompts = 64 }\n[[stage.reward]]\nmodel = \"stage:score\"\n";
    let mut wrong = Vec::new();
    for (name, stages, part) in
        [("teacher", teacher, "teacher"), ("judge", judge, "rewards"), ("critic", critic, "evaluation")]
    {
        let text = text(&stages).replace("task:countdown", "task:chain");
        let recipe = folder.write(&format!("{name}.toml"), text.replace("algo.kl.coef = 0.0\n", ""));
        let parts = plan(&recipe, &[])["stages"][2]["parts"].clone();
        assert!(parts.as_array().unwrap().iter().any(|p| p["name"] == part), "{name}: {parts}");
        wrong.extend(compare(&folder, &recipe, &[], name));
    }
    assert!(wrong.is_empty(), "{}", wrong.join("\n"));
}

/// Bug: `ferrl plan recipes/rlhf.toml` looked for a directory called `stage:imitate`.
#[test]
fn every_shipped_recipe_is_planned() {
    let recipes = std::path::Path::new(env!("CARGO_MANIFEST_DIR")).join("../../recipes");
    let mut planned = 0;
    for path in std::fs::read_dir(recipes).unwrap().map(|e| e.unwrap().path()) {
        if path.extension().is_some_and(|e| e == "toml") {
            let path = path.to_str().unwrap();
            let stages = plan(path, &[])["stages"].clone();
            assert!(stages.as_array().is_some_and(|s| !s.is_empty()), "{path}: {stages}");
            planned += 1;
        }
    }
    assert!(planned > 20);
}

#[test]
fn disk_is_planned_and_assumed_lengths_are_told() {
    let folder = Folder::new("plan-disk");
    let recipe = folder.write("planned.toml", RECIPE);
    let got = plan(&recipe, &["algo=sft", "checkpoint.keep=3"]);
    let stage = &got["stages"][0];
    // Masters, two moments and the model in f32; three are kept and one is being written; the stage leaves its model.
    let weights = stage["weights"].as_u64().unwrap();
    assert_eq!(stage["checkpoint_bytes"].as_u64(), Some(16 * weights));
    assert_eq!(got["disk_bytes"].as_u64(), Some(4 * 16 * weights + 4 * weights));
    assert!(stage["lengths_assumed"].is_null(), "{stage}");
    let table = ok(&["plan", &recipe, "algo=sft", "--memory", "1TiB"]);
    assert!(table.contains("disk ") && !table.contains("assumed"), "{table}");
    let missing =
        ["plan", &recipe, "algo=sft", "data.train=nowhere.jsonl", "train.steps=3", "--memory", "1TiB"];
    let path = format!("model.path={}", fixture("llama2"));
    let table = ok(&[&missing[..], &["~model.init", &path]].concat());
    assert!(table.contains("assumed") && table.contains("disk "), "{table}");
}

#[test]
fn what_does_not_fit_is_refused_and_the_named_change_fits() {
    let folder = Folder::new("plan-fit");
    let recipe = folder.write("planned.toml", RECIPE);
    let whole = plan(&recipe, &["algo=sft"])["stages"][0]["bytes"].as_u64().unwrap();
    let memory = format!("{}MiB", whole * 8 / 10 / 1048576);
    let args = ["plan", &recipe, "algo=sft", "--memory", &memory];
    let out = ferrl(&args, "");
    let message = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(5), "{message}");
    assert!(String::from_utf8_lossy(&out.stdout).contains("activations"), "the table comes first");
    let fix = message.split("fix: add ").nth(1).unwrap();
    let mut tried = 0;
    for change in fix.split(", or ") {
        let change = change.split(" (").next().unwrap();
        ok(&[&args[..], &change.split(' ').collect::<Vec<_>>()].concat());
        tried += 1;
    }
    assert!(tried >= 2 && fix.contains("train.micro_batch_tokens="), "{message}");
    fails(&["plan", &recipe, "algo=sft", "--memory", "3MiB"], 5, &["no setting alone", "smaller model"]);
    fails(&["plan", &recipe, "--memory", "3apples"], 2, &["apples", "GiB"]);
    fails(&["plan", &folder.path("palnned.toml")], 2, &["cannot read the recipe"]);
    // A file that is there is not asked whether it was meant.
    let bytes = folder.write("bytes.toml", b"algo = \"\xff\"\n");
    fails(&["plan", &bytes], 2, &["bytes.toml", "UTF-8", "fix: give the path of a .toml file"]);
}

#[test]
fn a_large_model_needs_only_its_configuration() {
    let folder = Folder::new("plan-large");
    let model = folder.0.join("qwen");
    std::fs::create_dir_all(&model).unwrap();
    // Qwen2.5-0.5B's published sizes: 494 M weights.
    let config = r#"{"architectures": ["Qwen2ForCausalLM"], "model_type": "qwen2", "hidden_size": 896,
        "intermediate_size": 4864, "num_hidden_layers": 24, "num_attention_heads": 14, "num_key_value_heads": 2,
        "vocab_size": 151936, "max_position_embeddings": 32768, "rms_norm_eps": 1e-6, "rope_theta": 1000000.0,
        "tie_word_embeddings": true, "hidden_act": "silu", "use_sliding_window": false}"#;
    std::fs::write(model.join("config.json"), config).unwrap();
    let path = format!("model.path={}", model.display());
    let rows = folder.write("rows.jsonl", "{\"prompt\": \"a\", \"response\": \"b\"}\n");
    let recipe =
        folder.write("r.toml", format!("algo = \"sft\"\ndata.train = [{rows:?}]\ntrain.steps = 10\n"));
    // Masters and two bf16 forms are 8 bytes a weight, or 12 where the CPU has no bf16 products and they are held widened; on a
    // card 4, where the one form is the master's upper half; the moments 8; the gradients 4, and those of the embedding once more.
    let forms = (ferrl_kernels::cpu::FOOTPRINT.weight)(1024, 1024, 2, true) as f64 / (1 << 20) as f64;
    assert!([4.0, 8.0].contains(&forms), "{forms}");
    for (device, bytes) in [("device=cpu", 4.0 + forms), ("device=cuda", 4.0)] {
        let got = plan(&recipe, &[&path, device, "model.dtype=bf16", "train.micro_batch_tokens=16384"]);
        let stage = &got["stages"][0];
        assert_eq!(stage["weights"].as_u64(), Some(494_032_768));
        let part = |name: &str| {
            let parts = stage["parts"].as_array().unwrap();
            parts.iter().find(|p| p["name"] == name).map_or(0, |p| p["bytes"].as_u64().unwrap())
        };
        for (name, bytes) in [("weights", bytes), ("optimizer", 8.0), ("gradients", 5.1)] {
            let per_weight = part(name) as f64 / 494_032_768.0;
            assert!((per_weight - bytes).abs() < 0.1, "{device} {name}: {per_weight} bytes a weight");
        }
        // A card's memory holds its context, not the program.
        assert_eq!([part("context") > 0, part("program") > 0], [bytes == 4.0, bytes > 4.0], "{device}");
    }
    // 8-bit moments of the 358 M weights in layers; moments that are not on the card.
    let parts = |more: &str| {
        let args = [&path, "device=cuda", "model.dtype=bf16", "train.micro_batch_tokens=16384", more];
        let stage = plan(&recipe, &args)["stages"][0].clone();
        let of = |name: &str| {
            stage["parts"].as_array().unwrap().iter().find(|p| p["name"] == name).cloned().unwrap_or_default()
        };
        [of("optimizer")["bytes"].as_u64().unwrap_or(0), stage["host_bytes"].as_u64().unwrap()]
    };
    let [eight, none] = parts("optim.name=adamw8");
    let want = 8.0 * 136.3e6 + (2.0 + 8.0 / 256.0) * 357.8e6;
    assert!((eight as f64 / want - 1.0).abs() < 0.01 && none == 0, "{eight} bytes of 8-bit moments, {want}");
    assert_eq!(parts("optim.offload=moments"), [0, 8 * 494_032_768]);
    let broken = folder.write("qwen/config.json", "{");
    fails(&["plan", &recipe, &path], 4, &[&broken, "JSON"]);
    fails(&["plan", &recipe, "model.path=nowhere"], 4, &["config.json", "needs no weights"]);
}

/// A directory with the configuration of Qwen2.5-7B and nothing else.
fn seven(folder: &Folder, name: &str, more: &str) -> String {
    let config = format!(
        r#"{{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 3584, "num_hidden_layers": 28,
        "num_attention_heads": 28, "num_key_value_heads": 4, "intermediate_size": 18944, "vocab_size": 152064,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0,
        "tie_word_embeddings": false{more}}}"#
    );
    std::fs::create_dir_all(folder.path(name)).unwrap();
    folder.write(&format!("{name}/config.json"), config);
    folder.path(name)
}

/// What the error for a card of that size advises, and the plan with the first proposal.
fn advised(recipe: &str, memory: &str, changes: &[&str]) -> (String, Value) {
    let args = [&["plan", recipe, "device=cuda", "--memory", memory], changes].concat();
    let out = ferrl(&args, "");
    let message = String::from_utf8_lossy(&out.stderr).into_owned();
    assert_eq!(out.status.code(), Some(5), "{message}");
    let fix = message.split("fix: ").nth(1).unwrap().to_string();
    let words = fix.split(", or ").next().unwrap().split(" (").next().unwrap();
    let settings: Vec<&str> = words.split(' ').filter(|word| word.contains('=')).collect();
    assert!(!settings.is_empty(), "{message}");
    let fits = ok(&[&args[..], &settings, &["--json"]].concat());
    (fix, serde_json::from_str(&fits).unwrap())
}

/// A stage's own keys are stronger than those for all stages: advice for them had no effect.
#[test]
fn advice_for_a_stage_names_the_keys_that_the_stage_sets() {
    let folder = Folder::new("plan-own");
    let text = format!(
        "model = {{ path = {:?}, dtype = \"bf16\" }}\n\
         data = {{ train = [\"rows.jsonl\"], max_length = 2048 }}\n[[stage]]\nalgo = \"sft\"\n\
         train = {{ steps = 100, batch = 32, micro_batch_tokens = 16384 }}\nadapter = {{ r = 16, base = \"device\" }}\n",
        seven(&folder, "7b", "")
    );
    let recipe = folder.write("own.toml", text);
    let (fix, _) = advised(&recipe, "50GiB", &[]);
    assert!(
        fix.contains("add stage.0.train.micro_batch_tokens=") && fix.contains("or model.recompute"),
        "{fix}"
    );
    let (fix, _) = advised(&recipe, "30GiB", &[]);
    assert!(fix.contains("add model.recompute=true stage.0.adapter.base=host ("), "{fix}");
}

/// The advice was for the first stage that did not fit: what it said made room for that one alone.
#[test]
fn advice_is_for_the_stage_that_needs_the_most() {
    let folder = Folder::new("plan-largest");
    let text = format!(
        "model = {{ path = {:?}, dtype = \"bf16\" }}\nadapter.r = 16\n\
         data = {{ train = [\"rows.jsonl\"], max_length = 2048 }}\n[[stage]]\nname = \"first\"\nalgo = \"sft\"\n\
         train = {{ steps = 10, batch = 4 }}\n[[stage]]\nname = \"second\"\nalgo = \"grpo\"\ntrain.steps = 10\n\
         reward = [{{ verifier = \"numeric\" }}]\n\
         rollout = {{ prompts = 16, samples = 8, max_new_tokens = 512, cache_mib = 8000 }}\n",
        seven(&folder, "7b", "")
    );
    let recipe = folder.write("stages.toml", text);
    let (fix, _) = advised(&recipe, "24GiB", &[]);
    assert!(fix.contains("stage.1.rollout.cache_mib="), "{fix}");
}

/// A reference, teacher or reward model in the machine's memory was never proposed, and where no setting sufficed
/// `optim.name = "sgd"` was, whether it fitted or not.
#[test]
fn everything_that_saves_memory_is_proposed_and_fits() {
    let folder = Folder::new("plan-all");
    let (policy, judge) =
        (seven(&folder, "7b", ""), seven(&folder, "rm", r#", "num_labels": 1, "id2label": {"0": "x"}"#));
    let head = format!("model = {{ path = {policy:?}, dtype = \"bf16\", recompute = true }}\n");
    let data = "data = { train = [\"rows.jsonl\"], max_length = 512 }\n";
    let grpo = format!(
        "algo = {{ name = \"grpo\", kl = {{ coef = 0.01 }} }}\n{head}{data}reward = [{{ model = {judge:?} }}]\n\
         rollout = {{ prompts = 16, samples = 8, max_new_tokens = 256, cache_mib = 64 }}\ntrain.steps = 10\n\
         optim = {{ name = \"adamw8\", offload = \"moments\" }}\n"
    );
    let judge_json = std::fs::read_to_string(folder.path("rm/config.json")).unwrap();
    folder.write("rm/config.json", judge_json.replace("ForCausalLM", "ForSequenceClassification"));
    let (fix, _) = advised(&folder.write("grpo.toml", &grpo), "77GiB", &[]);
    assert!(fix.contains("reference.offload=true") && fix.contains("reward.0.offload=true"), "{fix}");
    let sft = folder
        .write("sft.toml", format!("algo = \"sft\"\n{head}{data}train = {{ steps = 10, batch = 32 }}\n"));
    let (fix, got) = advised(&sft, "24GiB", &[]);
    assert!(fix.contains("train otherwise: adapter.r=32 adapter.base=host") && !fix.contains("sgd"), "{fix}");
    assert!(got["stages"][0]["host_bytes"].as_u64() > Some(10 << 30), "{got}");
    fails(
        &["plan", &sft, "device=cuda", "--memory", "8GiB"],
        5,
        &["alone makes it fit", "; a smaller model, or"],
    );
}

/// 18,624 modules were compared with one another: a plan of an adapter of Qwen3-30B-A3B that did not fit took more than five minutes.
#[test]
fn an_adapter_of_many_experts_is_planned_in_seconds() {
    let folder = Folder::new("plan-experts");
    let config = r#"{"model_type": "qwen3_moe", "architectures": ["Qwen3MoeForCausalLM"], "hidden_size": 2048,
        "num_hidden_layers": 48, "num_attention_heads": 32, "num_key_value_heads": 4, "head_dim": 128, "intermediate_size": 6144,
        "moe_intermediate_size": 768, "num_experts": 128, "num_experts_per_tok": 8, "norm_topk_prob": true,
        "vocab_size": 151936, "max_position_embeddings": 40960, "rms_norm_eps": 1e-06, "tie_word_embeddings": false}"#;
    std::fs::create_dir_all(folder.path("moe")).unwrap();
    folder.write("moe/config.json", config);
    let recipe = folder.write(
        "moe.toml",
        format!(
            "algo = \"sft\"\nmodel = {{ path = {:?}, dtype = \"bf16\" }}\nadapter = {{ r = 16, alpha_pattern = {{ q_proj = 8 }} }}\n\
             data = {{ train = [\"rows.jsonl\"], max_length = 2048 }}\ntrain = {{ steps = 10, batch = 32 }}\n",
            folder.path("moe")
        ),
    );
    let began = std::time::Instant::now();
    fails(&["plan", &recipe, "device=cuda", "--memory", "24GiB"], 5, &["alone makes it fit"]);
    assert!(began.elapsed().as_secs() < 60, "{:?}", began.elapsed());
}

#[test]
fn a_dry_run_is_a_recipe_with_the_plan_in_its_comments() {
    let folder = Folder::new("plan-dry");
    let recipe = folder.write("planned.toml", RECIPE);
    let text = ok(&["train", &recipe, "algo=sft", "--dry-run"]);
    assert!(text.contains("\n#   activations"), "{text}");
    let again = folder.write("again.toml", &text);
    assert_eq!(ok(&["train", &again, "--dry-run"]).split("\n# ").next(), text.split("\n# ").next());
}

#[test]
fn a_device_has_the_memory_that_the_recipe_says() {
    let folder = Folder::new("plan-limit");
    let recipe = folder.write("planned.toml", RECIPE);
    let runs = folder.path("runs");
    let sft = |command: &'static str| [command, &recipe, "algo=sft", "device=cpu", "--runs", &runs];
    ok(&[&sft("plan")[..], &["device_memory=2GiB"]].concat());
    fails(&[&sft("plan")[..], &["device_memory=1MiB"]].concat(), 5, &["of memory", "1.0 MiB"]);
    fails(&[&sft("train")[..], &["device_memory=200KiB"]].concat(), 5, &["memory"]);
    fails(&[&sft("train")[..], &["device_memory=12 parsecs"]].concat(), 2, &["device_memory", "24GiB"]);
}

#[test]
fn a_card_that_is_not_here_needs_a_size() {
    let folder = Folder::new("plan-card");
    let recipe = folder.write("planned.toml", RECIPE);
    let runs = folder.path("runs");
    let refused = ["train", &recipe, "algo=sft", "exact=false", "--runs", &runs];
    fails(&refused, 2, &["exact", "changes nothing", "fix: "]);
    assert!(!folder.0.join("runs").join("planned").exists(), "a run that never began leaves nothing behind");
    if ok(&["doctor"]).contains("cuda: not usable") {
        fails(&["plan", &recipe, "algo=sft", "device=cuda"], 6, &["libcuda", "--memory"]);
        let table = ok(&["plan", &recipe, "algo=sft", "device=cuda", "--memory", "80GiB"]);
        assert!(table.contains("of 80.0 GiB") && !table.contains("a step"), "{table}");
    }
}

/// A directory with the configuration of Qwen2.5-72B and nothing else.
fn large(folder: &Folder) -> String {
    std::fs::create_dir_all(folder.path("72b")).unwrap();
    let config = r#"{"model_type": "qwen2", "architectures": ["Qwen2ForCausalLM"], "hidden_size": 8192, "num_hidden_layers": 80,
        "num_attention_heads": 64, "num_key_value_heads": 8, "intermediate_size": 29568, "vocab_size": 152064,
        "max_position_embeddings": 32768, "rms_norm_eps": 1e-06, "rope_theta": 1000000.0, "tie_word_embeddings": false,
        "hidden_act": "silu", "use_sliding_window": false}"#;
    folder.write("72b/config.json", config);
    folder.write(
        "large.toml",
        format!(
            "algo = \"sft\"\nmodel = {{ path = {:?}, dtype = \"bf16\", recompute = true }}\n\
             data = {{ train = [\"rows.jsonl\"], max_length = 8192 }}\n\
             train = {{ steps = 10, batch = 64, micro_batch_tokens = 8192 }}\nparallel.ddp_size = 1\n",
            folder.path("72b")
        ),
    )
}

/// The figures of the manual: 16 bytes a weight over the ranks, and what every rank has whole.
#[test]
fn a_model_of_72b_is_planned_for_8_16_and_64_cards() {
    let folder = Folder::new("plan-72b");
    let recipe = large(&folder);
    let plan = |ranks: &str, nodes: &str, changes: &[&str]| -> Value {
        let words = [
            &["plan", &recipe, "--json", "--ranks", ranks, "--nodes", nodes, "--card", "B200-180GB"],
            changes,
        ]
        .concat();
        serde_json::from_str(ok(&words).lines().next().unwrap()).unwrap()
    };
    let of = |plan: &Value, name: &str| -> f64 {
        let parts = plan["stages"][0]["layout"]["parts"].as_array().unwrap();
        parts.iter().find(|p| p["name"] == name).map_or(0.0, |p| p["bytes"].as_f64().unwrap())
    };
    let (sixteen, many) = (plan("16", "2", &[]), plan("64", "8", &[]));
    let weights = 72.7e9;
    for (plan, ranks) in [(&sixteen, 16.0), (&many, 64.0)] {
        let split = of(plan, "masters") + of(plan, "moments") + of(plan, "gradients");
        assert!((split / (16.0 * weights / ranks) - 1.0).abs() < 0.01, "{split}");
        let rest = plan["stages"][0]["layout"]["bytes"].as_f64().unwrap() - split;
        assert!((30e9..60e9).contains(&rest), "about 46 GB are whole on every rank: {rest}");
    }
    // Weights of 80 layers are gathered twice in the one round of micro-batches but for the last, which backward finds there;
    // embedding and head once, in f32. Gradients leave once.
    let exchange = |plan: &Value, name: &str| -> f64 {
        let all = plan["stages"][0]["layout"]["exchanges"].as_array().unwrap();
        all.iter().find(|x| x["name"] == name).map_or(0.0, |x| x["bytes"].as_f64().unwrap())
    };
    let table = 152_064.0 * 8192.0;
    let gathered = 2.0 * (159.0 / 80.0) * (weights - 2.0 * table) + (4.0 + 4.0) * table;
    assert!((exchange(&many, "weights") / gathered - 63.0 / 64.0).abs() < 0.001);
    assert!((exchange(&many, "gradients") / (4.0 * weights) - 63.0 / 64.0).abs() < 0.01);
    // Eight ranks that share features and vocabulary gather, for each token of 80 layers, 231,808 numbers of two bytes a layer; of
    // the vocabulary an embedding in f32, three numbers a tile of 256 (an eighth of them), and the gradients of 152,064 logits
    // and of 8,192 columns.
    let words =
        ["plan", &recipe, "--json", "--ranks", "64", "--nodes", "8", "--card", "cpu", "parallel.tp_size=8"];
    let shared = String::from_utf8(ferrl(&words, "").stdout).unwrap();
    let shared: Value = serde_json::from_str(shared.lines().next().unwrap()).unwrap();
    let tiles = 12.0 * 594.0 / 8.0;
    let want = (4.0 * 8192.0 + tiles + 2.0 * (152_064.0 + 8192.0)) / (80.0 * 2.0 * 231_808.0);
    assert!((exchange(&shared, "vocabulary") / exchange(&shared, "activations") / want - 1.0).abs() < 0.001);
    assert_eq!(exchange(&many, "vocabulary"), 0.0);
    // One micro-batch for each of 64 ranks; with 40 of them idle, a step is no shorter.
    assert_eq!(many["stages"][0]["layout"]["idle"], 0.0);
    let fewer = plan("64", "8", &["train.batch=24"]);
    assert_eq!(fewer["stages"][0]["layout"]["idle"], 1.0 - 24.0 / 64.0);
    assert_eq!(fewer["stages"][0]["layout"]["train_seconds"], many["stages"][0]["layout"]["train_seconds"]);
}

#[test]
fn what_does_not_fit_on_many_cards_is_refused_with_a_layout_that_does() {
    let folder = Folder::new("plan-many");
    let recipe = large(&folder);
    let whole =
        ["plan", &recipe, "parallel.ddp_size=0", "--ranks", "64", "--nodes", "8", "--card", "h100-80gb"];
    fails(&whole, 5, &["a rank, and a H100-80GB has", "parallel.ddp_size = 1"]);
    fails(&["plan", &recipe, "--ranks", "8", "--card", "H100-80GB"], 5, &["or more ranks"]);
    // Bug: where no layout fits, the advice was recomputation, which this recipe has, and smaller micro-batches, which do not suffice.
    let many = ["plan", &recipe, "--ranks", "16", "--nodes", "2", "--card", "H100-80GB"];
    let said = String::from_utf8_lossy(&ferrl(&many, "").stderr).into_owned();
    let proposed = said.split("fix: add ").nth(1).and_then(|rest| rest.split(" (").next()).unwrap();
    assert!(!proposed.contains("recompute"), "{said}");
    ok(&[&many[..], &proposed.split(' ').collect::<Vec<_>>()].concat());
    fails(&["plan", &recipe, "--ranks", "8", "--card", "H100"], 2, &["--card H100-80GB"]);
    fails(&["plan", &recipe, "--ranks", "8", "--nodes", "3"], 2, &["8 ranks on 3 nodes"]);
    fails(&["plan", &recipe, "parallel.tp_size=3", "--ranks", "8"], 2, &["does not divide 8 ranks"]);
    // Bug: one rank, which exchanges nothing, took -0 ms for it.
    let alone = ferrl(&["plan", &recipe, "--ranks", "1", "--card", "B200-180GB"], "");
    let text = String::from_utf8_lossy(&alone.stdout).into_owned();
    assert!(text.contains("exchanges 0 ms"), "{text}");
}

/// Bug: `plan --ranks` planned and proposed layouts that `ferrl train` refuses.
#[test]
fn a_layout_that_a_run_refuses_is_refused_with_its_words() {
    let folder = Folder::new("plan-refused");
    let recipe = folder.write("planned.toml", RECIPE);
    let said = |words: &[&str]| {
        let out = ferrl(words, "");
        assert_eq!(out.status.code(), Some(2), "{words:?}");
        String::from_utf8_lossy(&out.stderr).into_owned()
    };
    let runs = folder.path("runs");
    // Two key heads: four ranks cannot share them.
    for change in ["parallel.tp_size=4", "rollout.tp_size=4"] {
        let heads = ["algo=sft", "model.init.heads=4", "model.init.kv_heads=2", change];
        let on =
            |card: &str| said(&[&["plan", &recipe, "--ranks", "4", "--card", card], &heads[..]].concat());
        for card in ["cpu", "H100-80GB"] {
            let shared = on(card);
            assert!(shared.contains("cannot share 4 query and 2 key heads"), "{card}: {shared}");
        }
        let train = ["train", &recipe, "--runs", &runs, "device=cuda"];
        assert!(said(&[&train[..], &heads].concat()).contains("does not divide 1 rank"));
        assert!(said(&[&["plan", &recipe], &heads[..]].concat()).contains("does not divide 1 rank"));
    }
    // Four ranks that share tokens share queries where there are too few key heads.
    let heads = ["algo=sft", "model.init.heads=4", "model.init.kv_heads=2", "parallel.sp_size=4"];
    for card in ["cpu", "H100-80GB"] {
        let shared = ok(&[&["plan", &recipe, "--ranks", "4", "--card", card], &heads[..]].concat());
        assert!(shared.contains("keys"), "{card}: {shared}");
    }
    // What is proposed is taken: what the heads allow. On cards groups exchange through the machine's memory, which takes longer.
    for (card, tp, sp) in [("H100-80GB", 1, 1), ("cpu", 2, 4)] {
        let words = ["plan", &recipe, "--ranks", "4", "--json", "--card", card, "algo=sft"];
        let plan: Value = serde_json::from_str(ok(&words).lines().next().unwrap()).unwrap();
        let best = &plan["stages"][0]["best"];
        let size = |key: &str| best[key].as_u64().unwrap();
        assert!(size("tp_size") <= tp && size("sp_size") <= sp, "{card}: {best}");
    }
}

/// Bug: `plan --ranks` counted masters, gradients and moments of all weights under an adapter, and moments that are not on the card.
#[test]
fn adapters_and_offloaded_moments_are_planned_on_many_cards() {
    let folder = Folder::new("plan-adapter");
    let recipe = large(&folder);
    let layout = |changes: &[&str]| -> Value {
        let words = [&["plan", &recipe, "--json", "--ranks", "8", "--card", "B200-180GB"], changes].concat();
        let out = String::from_utf8(ferrl(&words, "").stdout).unwrap();
        serde_json::from_str::<Value>(out.lines().next().unwrap()).unwrap()["stages"][0]["layout"].clone()
    };
    let of = |layout: &Value, list: &str, name: &str| -> f64 {
        let found = layout[list].as_array().unwrap().iter().find(|p| p["name"] == name).cloned();
        found.map_or(0.0, |p| p["bytes"].as_f64().unwrap())
    };
    let (weights, whole) = (72.7e9, layout(&[]));
    assert!((of(&whole, "parts", "moments") / (8.0 * weights / 8.0) - 1.0).abs() < 0.01);
    let offloaded = layout(&["optim.offload=moments"]);
    assert_eq!(of(&offloaded, "parts", "moments"), 0.0);
    assert_eq!(offloaded["host_bytes"].as_f64(), Some(of(&whole, "parts", "moments")));
    let fewer = whole["bytes"].as_f64().unwrap() - offloaded["bytes"].as_f64().unwrap();
    assert_eq!(fewer, of(&whole, "parts", "moments"));
    // LoRA of rank 16 on all seven modules of 80 layers: r (in + out) weights each.
    let (h, kv, f) = (8192.0, 1024.0, 29568.0);
    let low = 80.0 * 16.0 * (4.0 * h + 2.0 * (h + kv) + 3.0 * (h + f));
    let adapted = layout(&["adapter.r=16", "adapter.target_modules=all-linear"]);
    assert!((of(&adapted, "parts", "moments") / (8.0 * low / 8.0) - 1.0).abs() < 0.001, "{adapted}");
    // The base in bf16, tables in f32, norms and biases beside; the adapter in f32.
    let tables = 2.0 * 152_064.0 * h;
    let base = 2.0 * (weights - tables) + 4.0 * tables + 4.0 * low;
    assert!((of(&adapted, "parts", "masters") / (base / 8.0) - 1.0).abs() < 0.01, "{adapted}");
    assert!(
        (of(&adapted, "exchanges", "gradients") / (8.0 * 4.0 * low) - 7.0 / 8.0).abs() < 0.001,
        "{adapted}"
    );
}

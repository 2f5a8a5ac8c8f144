//! `ferrl bench` and `ferrl doctor`.

use crate::common::*;
use serde_json::Value;

const SMALL: [&str; 12] =
    ["--hidden", "32", "--layers", "1", "--heads", "2", "--inter", "64", "--vocab", "64", "--batch", "2"];

#[test]
fn workers_answer_each_line() {
    for (what, more) in [("train", ["--seq", "8"]), ("decode", ["--new", "8"])] {
        for dtype in ["f32", "bf16"] {
            let args = [&["bench", what, "--worker", "--dtype", dtype], &SMALL[..], &more].concat();
            let answers = rows(&ok_with(&args, "run 2\nnonsense\nrun 1\n"));
            assert_eq!(answers.len(), 3, "{what}");
            assert_eq!(answers[0]["seconds"].as_array().unwrap().len(), 2);
            assert!(answers[0]["tokens_per_s"].as_f64().unwrap() > 0.0);
            assert!(answers[0]["peak_rss_mib"].as_f64().unwrap() > 0.0);
            assert!(answers[1]["error"].as_str().unwrap().contains("expected `run N`"));
            assert_eq!(answers[2]["seconds"].as_array().unwrap().len(), 1);
        }
    }
}

#[test]
fn whole_steps_are_measured() {
    let sizes = ["--hidden", "32", "--layers", "1", "--heads", "2", "--inter", "64", "--vocab", "300"];
    let step = ["--prompts", "2", "--samples", "2", "--words", "3", "--new", "8"];
    for dtype in ["f32", "bf16"] {
        let args = [&["bench", "grpo", "--dtype", dtype][..], &sizes, &step].concat();
        let answers = rows(&ok_with(&[&args[..], &["--worker"]].concat(), "run 2\nrun 1\n"));
        let times = |i: usize| answers[i]["seconds"].as_array().unwrap().len();
        assert_eq!((answers.len(), times(0), times(1)), (2, 2, 1));
        let json: Value =
            serde_json::from_str(&ok(&[&args[..], &["--repeats", "2", "--json"]].concat())).unwrap();
        assert!(json["gflops"].as_f64().unwrap() > 0.0 && json["tokens_per_s"].as_f64().unwrap() > 0.0);
        let sum: f64 = ["rollout", "reward", "training"]
            .iter()
            .map(|part| {
                let seconds = json["parts"][part].as_array().unwrap();
                assert_eq!(seconds.len(), 2, "{part}");
                seconds[1].as_f64().unwrap()
            })
            .sum();
        let whole = json["seconds"][1].as_f64().unwrap();
        assert!(sum <= whole && sum > 0.5 * whole, "{sum} of {whole}");
    }
    let table = ok(&[&["bench", "grpo", "--repeats", "1"][..], &sizes, &step].concat());
    assert!(table.contains("rollout") && table.contains("training"), "{table}");
}

#[test]
fn tables_and_json() {
    for what in ["train", "decode"] {
        let args = [&["bench", what, "--repeats", "2"], &SMALL[..]].concat();
        let table = ok(&args);
        for word in ["tokens/s", "of a measured peak", "peak RSS", "f32"] {
            assert!(table.contains(word), "{table}");
        }
        let json: Value = serde_json::from_str(&ok(&[&args[..], &["--json"]].concat())).unwrap();
        assert_eq!(json["seconds"].as_array().unwrap().len(), 2);
    }
}

#[test]
fn continuations_of_states_compute_their_prefixes_once() {
    let shape = ["--hidden", "32", "--layers", "1", "--heads", "2", "--inter", "64", "--vocab", "64"];
    let sizes = [
        "--prompts", "3", "--prompt", "40", "--new", "12", "--step", "5", "--samples", "4", "--repeats", "1",
    ];
    let args = [&["bench", "continuations"], &shape[..], &sizes].concat();
    let json: Value = serde_json::from_str(&ok(&[&args[..], &["--json"]].concat())).unwrap();
    // States behind 0, 5 and 10 tokens; their continuations have 12, 7 and 2.
    assert_eq!((json["states"].as_u64(), json["tokens"].as_u64()), (Some(9), Some(3 * 4 * 21)));
    // Every new token but the first is a row; a state's prefix is computed from its last whole block on, once.
    let rows = json["continuations_rows"].as_f64().unwrap();
    assert!((252.0..252.0 + 9.0 * 32.0).contains(&rows), "{json}");
    assert!(json["ratio"].as_f64().unwrap() > 0.0);
    let table = ok(&args);
    assert!(table.contains("9 states, 4 continuations each") && table.contains("times as long"), "{table}");
}

#[test]
fn matrix_products_are_listed() {
    let args = ["bench", "gemm", "--max-elements", "70000", "--window", "0.001", "--repeats", "2"];
    assert!(ok(&args).contains("geometric mean"));
    for (mode, input) in [("--json", ""), ("--worker", "run 2\n")] {
        let json: Value = serde_json::from_str(&ok_with(&[&args[..], &[mode]].concat(), input)).unwrap();
        let results = json["results"].as_array().unwrap();
        assert_eq!(results.len(), 2 * 4, "2048, 1, 8 and 32 rows of 256 x 256 in both formats");
        for r in results {
            assert_eq!(r["seconds"].as_array().unwrap().len(), 2);
            assert!(r["gflops"].as_f64().unwrap() > 0.0 && r["layout"] == "nt");
        }
    }
}

#[test]
fn the_doctor_lists_what_there_is() {
    let text = ok(&["doctor"]);
    for word in ["processor", "features", "FERRL_SIMD", "threads", "memory", "cpu", "qwen2", "gpt2"] {
        assert!(text.contains(word), "{text}");
    }
}

#[test]
fn inexact_is_refused_where_it_changes_nothing() {
    let why = ["--inexact", "changes nothing", "fix: "];
    fails(&[&["bench", "train", "--inexact"], &SMALL[..]].concat(), 2, &why);
}

#[test]
fn a_check_compares_with_reference_models() {
    let fixtures = concat!(env!("CARGO_MANIFEST_DIR"), "/../engine/tests/fixtures");
    let args = ["bench", "--check", "--device", "cpu", "--only", "reference qwen2", "--fixtures"];
    let table = ok(&[&args[..], &[fixtures]].concat());
    for word in ["reference qwen2 ", "reference qwen2_score", "reference qwen2_sliding", "all passed"] {
        assert!(table.contains(word), "{table}");
    }
    fails(&[&args[..], &["nowhere"]].concat(), 3, &["nowhere", "bf16_errors.json", "fix: "]);
    fails(&["bench", "--fixtures", fixtures], 2, &["--check"]);
}

/// A typo must not pass for a device that is right; a row of the table can be asked for by its name.
#[test]
fn a_check_that_is_not_there_is_refused() {
    fails(
        &["bench", "--check", "--device", "cpu", "--only", "curvs"],
        2,
        &["\"curvs\"", "fix: --only \"curves\""],
    );
    let table = ok(&["bench", "--check", "--device", "cpu", "--only", "qwen2 odd f32"]);
    assert_eq!(table.lines().filter(|l| l.starts_with("qwen2")).count(), 1, "{table}");
}

/// A device beside itself: whatever is compared is the same, in imitation and in learning from answers.
#[test]
fn a_check_trains_on_two_devices() {
    for (only, comparisons) in [("curves sft bf16", 3), ("curves grpo f32", 5)] {
        let table = ok(&["bench", "--check", "--device", "cpu", "--only", only]);
        let compared: Vec<&str> = table.lines().filter(|l| l.contains(", allowed ")).collect();
        assert_eq!(compared.len(), comparisons, "{table}");
        assert!(compared.iter().all(|l| l.contains(": 0.000e0, allowed ")), "{table}");
        assert!(table.contains("all passed"), "{table}");
    }
}

/// Ranks that compute with one model together: on the CPU every bit is that of one process, also in bf16.
#[test]
fn a_check_trains_on_groups_of_ranks() {
    let table = ok(&["bench", "--check", "--device", "cpu", "--ranks", "2", "--only", "2 ranks tp 2"]);
    assert_eq!(table.lines().filter(|l| l.starts_with("2 ranks tp 2 sp 1")).count(), 4, "{table}");
    let other: Vec<&str> =
        table.lines().filter(|l| l.contains("other bits") || l.contains("distance")).collect();
    assert_eq!(other.len(), 4 * 6, "{table}");
    assert!(other.iter().all(|l| l.contains(": 0.000e0, allowed ")), "{table}");
    assert!(table.contains("sampled and trained logp: 0.000e0") && table.contains("all passed"), "{table}");
}

#[test]
fn ranks_leave_the_weights_of_one_process() {
    for (ranks, dtype) in [("2", "f32"), ("3", "bf16")] {
        let args = [
            &["bench", "ranks", "--ranks", ranks, "--threads", "1", "--repeats", "1", "--dtype", dtype],
            &SMALL[..],
        ]
        .concat();
        let json: Value =
            serde_json::from_str(&ok(&[&args[..], &["--seq", "8", "--json"]].concat())).unwrap();
        assert_eq!(json["same_weights"], true, "{json}");
        assert!(
            json["simulated_seconds"].as_f64().unwrap() > 0.0 && json["sent_bytes"].as_f64().unwrap() > 0.0
        );
    }
    let table = ok(&[&["bench", "ranks", "--threads", "1", "--repeats", "1"], &SMALL[..]].concat());
    assert!(table.contains("overhead of 2 ranks") && table.contains("simulated step"), "{table}");
    fails(&["bench", "ranks", "--ranks", "1"], 2, &["nothing to compare"]);
    let split = ["bench", "ranks", "--split", "--ranks", "3", "--threads", "1", "--repeats", "1"];
    let table = ok(&[&split, &SMALL[..]].concat());
    assert!(table.contains("3 x 1 in turn"), "{table}");
}

/// Masters, moments and gradients are what is planned to the byte; how far the whole is off is what the command is for.
#[test]
#[cfg(target_os = "linux")]
fn memory_is_measured_beside_the_plan() {
    let folder = Folder::new("bench-memory");
    let text = "name = \"memory\"\nalgo = \"sft\"\n\
        model.init = { hidden = 128, layers = 2, max_positions = 128 }\n\
        data = { train = [\"task:countdown\"], max_length = 64 }\n\
        train = { steps = 2, batch = 8 }\ndevice = \"cpu\"\nthreads = 1\n";
    let recipe = folder.write("memory.toml", text);
    let json: Value = serde_json::from_str(&ok(&["bench", "memory", &recipe, "--json"])).unwrap();
    let planned = |name: &str| {
        let part = json["parts"].as_array().unwrap().iter().find(|p| p["name"] == name).unwrap();
        part["bytes"].as_f64().unwrap()
    };
    let rank = &json["ranks"][0];
    for (name, plan) in [("weights", planned("weights")), ("optimizer", planned("optimizer"))] {
        let measured = rank["buffers"][name].as_f64().unwrap();
        assert!((0.95..1.15).contains(&(measured / plan)), "{name}: {measured} of {plan}");
    }
    assert!(rank["peak"].as_f64().unwrap() > planned("weights") + planned("optimizer"));
    let table = ok(&["bench", "memory", &recipe]);
    assert!(table.contains("outside of buffers") && table.contains("rank 0"), "{table}");
    fails(
        &["bench", "memory", &recipe, "--within", "0.0001"],
        5,
        &["differs from the plan by", "expected 0.0001 % at most"],
    );
}

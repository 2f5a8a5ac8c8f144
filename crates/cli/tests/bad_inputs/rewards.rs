//! Rewards that fail, completions that say nothing, sampling that cannot work.

use crate::case::Case;
use std::path::Path;

pub const ROWS: &str =
    "{\"prompt\": \"1+1=\", \"answer\": \"2\"}\n{\"prompt\": \"2+2=\", \"answer\": \"4\"}\n";
const CHAT: &str = "{\"prompt\": [{\"role\": \"user\", \"content\": \"1+1=\"}], \"answer\": \"2\"}\n";

/// Two prompts, four completions each, a step or two, rewarded by `my.py` unless more is said.
pub fn grpo(more: &str) -> String {
    format!(
        "name = \"run\"\nalgo = \"dr_grpo\"\nmodel.path = \"{{model}}\"\ndata = {{ train = [\"rows.jsonl\"], max_length = 32 }}\n\
         rollout = {{ prompts = 2, samples = 4, max_new_tokens = 4, cache_mib = 4 }}\n\
         train = {{ steps = 2, micro_batch_tokens = 64 }}\n{more}"
    )
}

const PYTHON: &str = "reward = { python = \"my.py\" }\n";

/// A recipe with a Python reward, whose file is `body`.
fn python(name: &'static str, body: &str) -> Case {
    Case::new(name, "train r.toml").file("r.toml", grpo(PYTHON)).file("rows.jsonl", ROWS).file("my.py", body)
}

/// Every completion of a kind fails, the others are rewarded by chance.
fn partly(name: &'static str, fault: &str) -> Case {
    let body = format!(
        "import os, sys, time\ndef reward(prompts, completions, **kw):\n    out = []\n    \
         for c in completions:\n        if sum(map(ord, c)) % 3 == 0:\n            {fault}\n        out.append(float(len(set(c))))\n    return out\n"
    );
    python(name, &body).exit(0).says(&["warning", "my.py", "no reward"]).check(lost_is_not_zero)
}

fn rollouts(folder: &Path) -> String {
    std::fs::read_to_string(folder.join("runs/run/rollouts/step_1.jsonl")).unwrap()
}

fn lost_is_not_zero(folder: &Path, _output: &str) {
    let rows = rollouts(folder);
    let lost: Vec<&str> = rows.lines().filter(|r| r.contains("\"lost\":true")).collect();
    assert!(!lost.is_empty() && lost.len() < 8, "{rows}");
    assert!(lost.iter().all(|r| r.contains("\"reward\":null")), "{rows}");
    let metrics = std::fs::read_to_string(folder.join("runs/run/metrics.jsonl")).unwrap();
    let first: serde_json::Value = serde_json::from_str(metrics.lines().next().unwrap()).unwrap();
    assert_eq!(first["rollouts/lost"].as_f64(), Some(lost.len() as f64), "{first}");
}

fn prints_are_logged(folder: &Path, _output: &str) {
    let log = std::fs::read_to_string(folder.join("runs/run/log.jsonl")).unwrap();
    assert!(log.contains("\"event\":\"print\"") && log.contains("looking at 8"), "{log}");
    assert!(log.contains("\\u001b"), "kept as it is in the file: {log}");
}

pub fn cases() -> Vec<Case> {
    let mut all = failing_rewards();
    all.extend(partly_failing_rewards());
    all.extend([names_of_the_run(), column_with_a_default()]);
    all.extend(environments());
    all.extend(settings());
    all.extend(commands());
    all
}

/// Was: every reward was what the function says of `None`, and the run advised longer completions.
fn column_with_a_default() -> Case {
    let body = "def reward(completions, solution=None, **kw):\n    return [float(c == solution) for c in completions]\n";
    python("a reward function whose argument for a column has a default and another name", body)
        .exit(0)
        .says(&["warning", "rows.jsonl:1", "my.py", "solution", "answer"])
}

/// Was: the run's own reward and loss were averaged with what was logged, and "epoch" ended the run so that it could not be resumed.
fn names_of_the_run() -> Case {
    let body = "def reward(completions, log_metric, **kw):\n    \
                for name in ['reward', 'loss', 'epoch', 'mine']:\n        log_metric(name, 1000.0)\n    \
                return [float(len(set(c))) for c in completions]\n";
    python("a reward function that logs under names of the run's own metrics", body)
        .exit(0)
        .says(&["warning", "log_metric", "\"logged/reward\""])
        .check(|folder, _| {
            let metrics = std::fs::read_to_string(folder.join("runs/run/metrics.jsonl")).unwrap();
            let step: serde_json::Value = serde_json::from_str(metrics.lines().next().unwrap()).unwrap();
            assert_eq!(step["reward"], step["rewards/reward/mean"], "{step}");
            assert_ne!(step["epoch"], 1000.0, "{step}");
            for name in ["logged/reward", "logged/loss", "logged/epoch", "mine"] {
                assert_eq!(step[name], 1000.0, "{name}: {step}");
            }
        })
}

/// An environment whose answer to every action is `answer`, with a dict of Python after `return`.
fn environment(name: &'static str, answer: &str) -> Case {
    let rows = "{\"prompt\": \"1+1=\", \"extra_info\": {}}\n{\"prompt\": \"2+2=\", \"extra_info\": {}}\n";
    let body = format!("def step(state, action, extra_info):\n    return {answer}\n");
    Case::new(name, "train r.toml rollout.max_turns=2")
        .file("r.toml", grpo("env = { path = \"my.py\", timeout = 10 }\n"))
        .file("rows.jsonl", rows)
        .file("my.py", body)
        .says(&["my.py"])
}

fn environments() -> Vec<Case> {
    vec![
        // Was: the text counted as true, and every episode ended with its first turn.
        environment(
            "an environment whose done is a text",
            "{'next_state': state + action, 'reward': 1.0, 'done': 'False'}",
        )
        .says(&["turn 1", "step 1", "done", "'False'", "True or False"]),
        // Was: "sequence 1: it has no tokens", without the environment, its row or its turn.
        environment(
            "an environment that goes on from an empty state",
            "{'next_state': '', 'reward': 1.0, 'done': False}",
        )
        .says(&["turn 2", "step 1", "no tokens"]),
        // Was: "expected a number after 0.0 s (schema) after 0.0 s (schema)".
        environment(
            "an environment whose reward is a text",
            "{'next_state': state + action, 'reward': '1', 'done': True}",
        )
        .says(&["reward is '1', expected a number (after", "ferrl env check"])
        .never_says(&["schema"]),
        // Was: three hundred zeros.
        environment(
            "an environment whose reward is beyond 32 bits",
            "{'next_state': state + action, 'reward': 1e300, 'done': True}",
        )
        .says(&["1e300"])
        .never_says(&["00000000"]),
        // Was: only the metrics and the log told.
        environment("an environment that loses some of its episodes", "{}")
            .file(
                "my.py",
                "def step(state, action, extra_info):\n    if state.startswith('2'):\n        raise ValueError('no twos')\n    \
                 return {'next_state': state + action, 'reward': 1.0, 'done': True}\n",
            )
            .exit(0)
            .says(&["warning: 4 of 8 episodes of step 1 were lost", "episodes/lost", "no twos", "traceback"]),
        environment("an environment file without a step", "{}")
            .file("my.py", "def stepp(state, action, extra_info):\n    return {}\n")
            .says(&["step(state, action, extra_info)", "fix:"])
            .leaves_no(&["runs"]),
        Case::new("an environment server that is not there", "env run http://127.0.0.1:9 --actions a.jsonl")
            .file("a.jsonl", "\"5\"\n")
            .exit(6)
            .says(&["127.0.0.1:9", "start the server"]),
    ]
}

fn failing_rewards() -> Vec<Case> {
    let always = |name, body: &str| python(name, body).says(&["my.py", "step 1"]).leaves_no(&["runs/run"]);
    vec![
        always(
            "a reward function that always raises",
            "def reward(prompts, completions, **kw):\n    return [len(c) / nothing for c in completions]\n",
        )
        .says(&["NameError", "my.py:2"]),
        python(
            "a reward function that asks for a column that is not there",
            "def reward(completions, solution):\n    return [1.0 for c in completions]\n",
        )
        .says(&["rows.jsonl:1", "my.py", "solution", "completions"])
        .leaves_no(&["runs"]),
        python(
            "a reward function that asks for a column that one row lacks",
            "def reward(completions, answer):\n    return [1.0 for c in completions]\n",
        )
        .file("rows.jsonl", format!("{ROWS}{{\"prompt\": \"3+3=\"}}\n"))
        .arg("--dry-run")
        .says(&["rows.jsonl:3", "my.py", "answer"]),
        python("a reward function of other arguments", "def reward(a, b):\n    return 1\n")
            .arg("--dry-run")
            .says(&["my.py", "reward(a, b)", "completions"]),
        always(
            "a reward function that returns numbers beyond 32 bits",
            "def reward(completions, **kw):\n    return [1e300 for c in completions]\n",
        )
        .says(&["1e300", "f32"]),
        always(
            "a reward function that returns one number",
            "def reward(completions, **kw):\n    return 1.0\n",
        )
        .says(&["float", "list"]),
        always(
            "a reward function that returns a list too short",
            "def reward(completions, **kw):\n    return []\n",
        )
        .says(&["list of 0"]),
        always(
            "a reward function that returns texts",
            "def reward(completions, **kw):\n    return ['1' for c in completions]\n",
        )
        .says(&["str"]),
        always(
            "a reward function that returns NaN",
            "def reward(completions, **kw):\n    return [float('nan') for c in completions]\n",
        )
        .says(&["nan"]),
        always(
            "a reward function that returns None for everything",
            "def reward(completions, **kw):\n    return [None for c in completions]\n",
        )
        .says(&["None"])
        .never_says(&["Traceback"]),
        always(
            "a reward function that calls sys.exit",
            "import sys\ndef reward(completions, **kw):\n    sys.exit(3)\n",
        )
        .says(&["SystemExit", "my.py:3"]),
        always(
            "a reward function that crashes its process",
            "import os\ndef reward(completions, **kw):\n    os.kill(os.getpid(), 11)\n",
        )
        .exit(6)
        .says(&["SIGSEGV"]),
        python(
            "a reward function that hangs",
            "import time\ndef reward(completions, **kw):\n    time.sleep(3600)\n",
        )
        .arg("reward.0.options.timeout=0.3")
        .exit(6)
        .says(&["my.py", "0.3 s", "step 1"]),
        python("a reward file that does not compile", "def reward(:\n").says(&["my.py", "SyntaxError"]),
        python("a reward file without the function", "def rewards(completions, **kw):\n    return []\n")
            .says(&["my.py", "reward", "rewards"]),
        python("a reward file that hangs while it is loaded", "import time\ntime.sleep(3600)\n")
            .arg("reward.0.options.start_timeout=0.5")
            .says(&["my.py", "0.5 s", "start_timeout"])
            .leaves_no(&["runs"]),
        python("a reward file without any function", "x = 1\n").says(&["my.py", "reward", "none", "fix:"]),
        python("a misspelt reward file", "def reward(completions, **kw):\n    return []\n")
            .arg("reward.0.python=myy.py")
            .says(&["myy.py", "did you mean", "my.py?"]),
        Case::new("a reward file that is not there", "train r.toml")
            .file("r.toml", grpo(PYTHON))
            .file("rows.jsonl", ROWS)
            .says(&["my.py"]),
        Case::new(
            "eval with a reward that always raises",
            "eval {model} --data rows.jsonl --reward my.py:grade --max-new-tokens 4",
        )
        .file("rows.jsonl", ROWS)
        .file("my.py", "def grade(completions, **kw):\n    raise ValueError('\\x1b[31mno')\n")
        .says(&["ValueError", "my.py:2", "\\x1b[31mno"])
        .never_says(&["\x1b"]),
    ]
}

fn partly_failing_rewards() -> Vec<Case> {
    vec![
        partly("a reward function that raises over one completion", "raise KeyError('no')").says(&["KeyError"]),
        // Was: no message said that every call failed and was repeated for each completion.
        python(
            "a reward function that works for one completion and not for several",
            "def reward(completions, **kw):\n    return [float(len(set(c))) for c in completions[:1]]\n",
        )
        .exit(0)
        .says(&["warning", "my.py", "8 completions at once", "list of 1"])
        .never_says(&["no reward"]),
        partly("a reward function that ends its process over one completion", "os._exit(5)").says(&["exit status: 5"]),
        partly("a reward that is NaN for one completion", "out.append(float('nan')); continue").says(&["nan"]),
        partly("a reward beyond 32 bits for one completion", "out.append(-1e300); continue").says(&["-1e300"]),
        partly("a reward that is a text for one completion", "out.append('good'); continue").says(&["str"]),
        python(
            "a reward function that prints escape codes",
            "def reward(completions, **kw):\n    print('\\x1b[2Jlooking at', len(completions))\n    \
             return [float(len(set(c))) for c in completions]\n",
        )
        .exit(0)
        .never_says(&["\x1b[2J"])
        .check(prints_are_logged),
        Case::new("a TRL reward function on chat data", "train r.toml model.path={chat}")
            .file("r.toml", grpo(PYTHON).replace("prompts = 2", "prompts = 1"))
            .file("rows.jsonl", CHAT)
            .file(
                "my.py",
                "def reward(prompts, completions, completion_ids, trainer_state, log_extra, **kw):\n    \
                 assert prompts[0] == [{'role': 'user', 'content': '1+1='}]\n    \
                 texts = [c[0]['content'] for c in completions]\n    assert completions[0][0]['role'] == 'assistant'\n    \
                 log_extra('step', [trainer_state.global_step for _ in texts])\n    \
                 return [float(len(set(t))) + len(i) for t, i in zip(texts, completion_ids)]\n",
            )
            .exit(0)
            .check(|folder, _| assert!(rollouts(folder).contains("\"extra\":{\"step\":0}"))),
    ]
}

fn settings() -> Vec<Case> {
    let exact = |name, more: &str| {
        Case::new(name, "train r.toml")
            .file("r.toml", grpo("reward = { verifier = \"exact\" }\n"))
            .file("rows.jsonl", ROWS)
            .arg(more)
    };
    vec![
        exact("a negative sampling temperature", "rollout.temperature=-1")
            .says(&["rollout.temperature", "-1"]),
        exact("an absurd sampling temperature", "rollout.temperature=1e9")
            .says(&["rollout.temperature", "100"]),
        exact("a sampling temperature beyond reason", "rollout.temperature=5").exit(0).says(&[
            "warning",
            "rollout.temperature",
            "5",
        ]),
        Case::new(
            "a negative sampling temperature in supervised training",
            "train r.toml rollout.temperature=-0.5",
        )
        .file("r.toml", "algo = \"sft\"\nmodel.path = \"{model}\"\ndata.train = [\"rows.jsonl\"]\n")
        .file("rows.jsonl", "{\"prompt\": \"a\", \"response\": \"b\"}\n")
        .says(&["rollout.temperature", "-0.5"]),
        exact("a million million samples", "rollout.samples=1000000000000")
            .says(&["rollout.samples", "65536"]),
        exact("samples that make too many completions", "rollout.samples=65536")
            .arg("rollout.prompts=1000000")
            .says(&["rollout.samples", "16777216"]),
        exact("a cache beyond all memory", "rollout.cache_mib=1000000000000").says(&["rollout.cache_mib"]),
        Case::new("a hundred thousand workers", "train r.toml reward.0.options.workers=100000")
            .file("r.toml", grpo(PYTHON))
            .file("rows.jsonl", ROWS)
            .file("my.py", "def reward(completions, **kw):\n    return [1.0 for c in completions]\n")
            .says(&["workers", "100000", "256"]),
        Case::new("a time-out without end", "train r.toml reward.0.options.timeout=1e300")
            .file("r.toml", grpo(PYTHON))
            .file("rows.jsonl", ROWS)
            .file("my.py", "def reward(completions, **kw):\n    return [1.0 for c in completions]\n")
            .says(&["timeout", "1e+300", "1000000"]),
        Case::new("a reward times its weight beyond 32 bits", "train r.toml reward.0.weight=1e6")
            .file("r.toml", grpo(PYTHON))
            .file("rows.jsonl", ROWS)
            .file("my.py", "def reward(completions, **kw):\n    return [1e35 for c in completions]\n")
            .says(&["reward", "1e35", "1000000", "f32"]),
        exact("an empty stop text", "rollout.stop=[\"\"]").says(&["rollout.stop", "empty"]),
        Case::new("an empty stop text in supervised training", "train r.toml")
            .file("r.toml", "algo = \"sft\"\nmodel.path = \"{model}\"\ndata.train = [\"rows.jsonl\"]\nrollout.stop = [\"\"]\n")
            .file("rows.jsonl", "{\"prompt\": \"a\", \"response\": \"b\"}\n")
            .says(&["rollout.stop", "empty"]),
        exact("an unknown word for truncated completions", "reward.0.truncated=zero")
            .says(&["zero", "wrong", "score"]),
        exact("a warm-up for a critic that is not there", "algo.critic_warmup=3")
            .says(&["critic_warmup", "algo"]),
        exact("a run without any signal", "train.steps=4").exit(0).says(&[
            "warning",
            "the last 3 steps",
            "rollout.max_new_tokens",
        ]),
        exact("rewards that never differ, with a penalty", "train.steps=3")
            .arg("algo=grpo")
            .arg("algo.kl.coef=0.04")
            .exit(0)
            .says(&["warning", "the last 3 steps", "reward"]),
        Case::new("a stop text that the verifier reads", "train r.toml")
            .file("r.toml", grpo("reward = { verifier = \"exact\", options = { take = \"answer\" } }\n"))
            .file("rows.jsonl", ROWS)
            .arg("rollout.stop=[\"</answer>\"]")
            .says(&["rollout.stop", "include_stop", "</answer>"]),
        exact("a verifier's column that the rows lack", "reward.0.options.column=solution")
            .exit(3)
            .says(&["solution", "answer"]),
        Case::new("an unknown verifier", "train r.toml reward.0.verifier=exactly")
            .file("r.toml", grpo("reward = { verifier = \"exact\" }\n"))
            .file("rows.jsonl", ROWS)
            .says(&["exactly", "exact"]),
        Case::new("an unknown option of a verifier", "train r.toml reward.0.options.colum=answer")
            .file("r.toml", grpo("reward = { verifier = \"exact\" }\n"))
            .file("rows.jsonl", ROWS)
            .says(&["colum", "column"]),
    ]
}

fn commands() -> Vec<Case> {
    let marked = |text: &str| format!("\u{feff}{text}");
    let huge = format!("{{\"completion\": \"{}\", \"answer\": \"a\"}}\n", "a".repeat(9 << 20));
    vec![
        Case::new("verify by tokens that nobody counted", "verify length --input rows.jsonl --option max=4")
            .file("rows.jsonl", "{\"completion\": \"abc\"}\n")
            .exit(3)
            .says(&["rows.jsonl:1", "--model", "completion_tokens"]),
        Case::new("verify by tokens", "verify length --input rows.jsonl --option max=4 --model {model}")
            .file("rows.jsonl", "{\"completion\": \"abcde\"}\n")
            .exit(0)
            .says(&["\"reward\":-1.0"]),
        Case::new("verify with a text for truncated", "verify exact --input rows.jsonl")
            .file("rows.jsonl", "{\"completion\": \"2\", \"answer\": \"2\", \"truncated\": \"true\"}\n")
            .exit(3)
            .says(&["rows.jsonl:1", "truncated"]),
        Case::new("verify with a byte order mark", "verify exact --input rows.jsonl")
            .file("rows.jsonl", marked("{\"completion\": \"a\", \"answer\": \"a\"}\n"))
            .exit(0)
            .says(&["1 scored"]),
        Case::new("verify with a line of megabytes", "verify exact --input rows.jsonl")
            .file("rows.jsonl", format!("{huge}{}", "{\"completion\": \"a\", \"answer\": \"a\"}\n"))
            .exit(0)
            .says(&["rows.jsonl:1", "8 MiB", "2 rows, 1 scored"]),
        Case::new("verify with lines that are no rows", "verify exact --input rows.jsonl")
            .file("rows.jsonl", "{\"completion\": \"a\", \"answer\": \"a\"}\n{\"compl\n[1]\n")
            .exit(0)
            .says(&[
                "rows.jsonl:2", "cut short", "rows.jsonl:3", "expected a JSON object", "3 rows, 1 scored",
            ]),
        Case::new("verify with no line that is a row", "verify exact --input rows.jsonl")
            .file("rows.jsonl", "no\n[1]\n")
            .exit(3)
            .says(&["rows.jsonl:1", "none of 2 rows"]),
        Case::new("steps of an unknown kind", "data steps --kind maths --input rows.jsonl")
            .file("rows.jsonl", "{\"text\": \"a\"}\n")
            .says(&["maths", "did you mean \"math\""]),
        Case::new("steps of rows without texts", "data steps --kind math --input rows.jsonl")
            .file("rows.jsonl", "{\"solution\": \"a\"}\n")
            .exit(3)
            .says(&["rows.jsonl:1", "\"text\" is missing"]),
        Case::new("steps of a solution with two answers", "data steps --kind gsm8k --input rows.jsonl")
            .file("rows.jsonl", "{\"text\": \"a\\n#### 1\\n#### 2\"}\n{\"text\": \"b\"}\n")
            .exit(0)
            .says(&["2 answers", "\"steps\":[\"b\"]", "2 rows, 1 split"]),
        Case::new("score with a byte order mark", "score --model {model} --input rows.jsonl")
            .file("rows.jsonl", marked("{\"text\": \"ab\"}\n"))
            .exit(0)
            .says(&["logprobs"]),
        Case::new(
            "generate with a byte order mark",
            "generate --model {model} --input rows.jsonl --max-new-tokens 2",
        )
        .file("rows.jsonl", marked("{\"prompt\": \"ab\"}\n"))
        .exit(0)
        .says(&["completions"]),
        Case::new("verify with an unknown verifier", "verify numberic --input rows.jsonl")
            .file("rows.jsonl", ROWS)
            .says(&["numberic", "numeric"]),
        Case::new("verify with an unknown option", "verify exact --input rows.jsonl --option tak=whole")
            .file("rows.jsonl", ROWS)
            .says(&["tak", "take"]),
        Case::new("verify with rows without completions", "verify exact --input rows.jsonl")
            .file("rows.jsonl", ROWS)
            .exit(3)
            .says(&["rows.jsonl:1", "completion"]),
        Case::new("verify with one row that cannot be graded", "verify numeric --input rows.jsonl")
            .file(
                "rows.jsonl",
                "{\"completion\": \"4\", \"answer\": \"4\"}\n{\"completion\": \"4\", \"answer\": \"four\"}\n",
            )
            .exit(0)
            .says(&["\"reward\":1.0", "\"reward\":null", "holds no number", "2 rows, 1 scored"]),
        Case::new("verify without anything to grade", "verify exact").says(&["--input"]),
        Case::new("eval of a model that is not there", "eval nowhere --task countdown")
            .exit(4)
            .says(&["nowhere"]),
        Case::new("eval without anything that says what is right", "eval {model} --data rows.jsonl")
            .file("rows.jsonl", ROWS)
            .says(&["--verifier", "--reward"]),
        Case::new(
            "generate with an absurd temperature",
            "generate --model {model} --prompt a --temperature 1e30",
        )
        .says(&["--temperature", "100"]),
        Case::new("generate --raw without a prompt", "generate --model {model} --input rows.jsonl --raw")
            .file("rows.jsonl", ROWS)
            .says(&["--raw"]),
    ]
}

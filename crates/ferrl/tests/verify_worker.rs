//! Python workers under every fault: the caller always gets an answer or a failure that says why.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::verify::{Outcome, Progress, Sample, Verifier, build, python::Python};
use ferrl::worker::{Answer, Arguments, Failure, FailureKind, WorkerOptions, WorkerPool};
use ferrl_engine::Class;
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::time::{Duration, Instant};

fn file() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/verify/rewards.py")
}

/// Whether there is a Python to test with; without one the tests say so and pass.
fn python() -> bool {
    let found =
        std::process::Command::new("python3").arg("--version").output().is_ok_and(|o| o.status.success());
    if !found {
        eprintln!("SKIPPED: python3 was not found, the Python workers are not tested");
    }
    found
}

fn pool(functions: &[&str], timeout_ms: u64) -> WorkerPool {
    let timeout = Duration::from_millis(timeout_ms);
    WorkerPool::start(WorkerOptions { timeout, max_line: 1 << 20, ..WorkerOptions::new(file(), functions) })
        .unwrap()
}

/// A path nobody has used, as the prompt by which a function finds its marker file.
fn marker() -> String {
    static NEXT: AtomicU64 = AtomicU64::new(0);
    let name = format!("ferrl-worker-{}-{}", std::process::id(), NEXT.fetch_add(1, Ordering::Relaxed));
    let path = Path::new(env!("CARGO_TARGET_TMPDIR")).join(name);
    let _ = std::fs::remove_file(&path);
    path.to_string_lossy().into_owned()
}

fn call(pool: &WorkerPool, function: &str, completions: &[&str]) -> Vec<Answer> {
    call_as(pool, function, &marker(), completions)
}

fn call_as(pool: &WorkerPool, function: &str, prompt: &str, completions: &[&str]) -> Vec<Answer> {
    let ids: Vec<u64> = (40..).take(completions.len()).collect();
    let mut arguments = Arguments::default();
    arguments.columns.insert("prompts".into(), json!(vec![prompt; completions.len()]));
    arguments.columns.insert("completions".into(), json!(completions));
    pool.call(function, &ids, &arguments).answers
}

/// Longer than anything here takes on a busy machine, and shorter than what hangs.
const PATIENCE: Duration = Duration::from_secs(40);

/// The failure of a call on two completions, and that the worker is sound again afterwards.
fn failure(pool: &WorkerPool, function: &str) -> Box<Failure> {
    let answers = call(pool, function, &["a", "bb"]);
    assert_eq!(answers.len(), 2);
    let failure = answers[0].clone().unwrap_err();
    assert_eq!(failure.ids, [40], "each rollout was tried by itself");
    assert_eq!(answers[1].clone().unwrap_err().ids, [41]);
    let began = Instant::now();
    assert_eq!(call(pool, "reward", &["abc"]), [Ok(Some(3.0))]);
    assert!(began.elapsed() < PATIENCE, "{function}: back after {:?}", began.elapsed());
    failure
}

#[test]
fn well_behaved_functions_return_their_rewards() {
    if !python() {
        return;
    }
    let pool = pool(&["reward", "later", "kinds"], 5_000);
    assert_eq!(call(&pool, "reward", &["a", "", "abc"]), [Ok(Some(1.0)), Ok(Some(0.0)), Ok(Some(3.0))]);
    assert_eq!(call(&pool, "later", &["a"]), [Ok(Some(2.0))]);
    let want = [Some(1.0), Some(3.0), Some(0.25), None, Some(0.5)].map(Ok);
    assert_eq!(call(&pool, "kinds", &["a"; 5]), want);
    let text = "é\u{2028}\"\n".repeat(100_000);
    assert_eq!(call(&pool, "reward", &[&text]), [Ok(Some(400_000.0))], "a request larger than any pipe");
    assert_eq!((pool.counts().calls, pool.counts().restarts), (4, 0));
}

#[test]
fn a_worker_that_ends_is_replaced_and_its_call_made_again() {
    if !python() {
        return;
    }
    let pool = pool(&["reward", "exits", "aborts", "exits_once", "hangs_once", "raises_once"], 3_000);
    for round in 0..3 {
        let f = failure(&pool, "exits");
        assert_eq!((&f.kind, f.attempts), (&FailureKind::Exited("exit status: 3".into()), 2), "{round}");
        assert_eq!(f.stderr, ["leaving now"]);
        let f = failure(&pool, "aborts");
        assert!(matches!(&f.kind, FailureKind::Exited(s) if s.contains("SIGABRT")), "{f}");
    }
    // Both rollouts at once, then each by itself.
    assert_eq!((pool.counts().restarts, pool.counts().failures), (18, 12));
    for function in ["exits_once", "hangs_once", "raises_once"] {
        assert_eq!(call(&pool, function, &["a"]), [Ok(Some(1.0))], "{function}");
    }
    assert_eq!((pool.counts().restarts, pool.counts().retries), (20, 15));
}

#[test]
fn a_worker_that_hangs_or_is_late_is_ended_at_the_deadline() {
    if !python() {
        return;
    }
    let pool = pool(&["reward", "hangs", "spins", "stops", "late"], 1_000);
    for function in ["hangs", "spins", "stops", "late"] {
        let began = Instant::now();
        let f = failure(&pool, function);
        assert_eq!(f.kind, FailureKind::TimedOut(Duration::from_millis(1_000)), "{function}");
        assert!(f.waited >= Duration::from_millis(2_000) && began.elapsed() < PATIENCE);
        // A hang says where it hangs.
        let told = f.stderr.iter().any(|l| l.contains(&format!("in {function}")));
        assert!(told || function == "stops", "{f}");
    }
}

#[test]
fn stray_output_is_never_taken_for_the_workers_reply() {
    if !python() {
        return;
    }
    let pool = pool(&["reward", "twice", "forks", "garbage", "forges", "huge", "prints", "quits"], 5_000);
    for _ in 0..3 {
        assert_eq!(call(&pool, "twice", &["a"]), [Ok(Some(1.0))]);
        assert_eq!(
            call(&pool, "reward", &["abc"]),
            [Ok(Some(3.0))],
            "the second answer is not the next one's"
        );
    }
    assert_eq!((pool.counts().stale, pool.counts().restarts), (3, 0));
    for _ in 0..3 {
        assert_eq!(call(&pool, "prints", &["a"]), [Ok(Some(1.0))]);
        assert_eq!(call(&pool, "forks", &["a"]), [Ok(Some(1.0))]);
    }
    assert_eq!((pool.counts().stale, pool.counts().restarts), (3, 0));
    assert!(matches!(failure(&pool, "garbage").kind, FailureKind::Garbage(t) if t.contains("not json")));
    let f = failure(&pool, "forges");
    assert!(matches!(f.kind, FailureKind::Garbage(_)), "{f}");
    assert_eq!(failure(&pool, "huge").kind, FailureKind::TooLong(1 << 20));
    let f = failure(&pool, "quits");
    assert!(matches!(f.kind, FailureKind::Raised { trace, .. } if trace.contains("SystemExit")));
}

#[test]
fn contracts_are_told_with_got_and_expected() {
    if !python() {
        return;
    }
    let names = ["reward", "empty", "scalar", "words", "nothing", "raises", "nan", "asks_too_much"];
    let pool = pool(&names, 5_000);
    let one = "a list of 1 item, each a number or None";
    for (function, got, expected) in [
        ("empty", "list of 0", one),
        ("scalar", "float 1.0", one),
        ("words", "str '1.0'", "a number or None for each completion"),
        ("nothing", "NoneType None", one),
    ] {
        let f = failure(&pool, function);
        assert_eq!(f.kind, FailureKind::Contract { got: got.into(), expected: expected.into() });
        let error = ferrl_engine::Error::from(f);
        assert!(error.class == Class::Usage, "{error}");
    }
    let f = failure(&pool, "raises");
    assert!(
        matches!(&f.kind, FailureKind::Raised { trace, place } if trace.contains("ValueError")
            && trace.contains("in raises") && !trace.contains("<string>") && place.starts_with("rewards.py:")),
        "{f}"
    );
    let error = ferrl_engine::Error::from(f);
    assert_eq!(error.class, Class::Usage, "the function is the user's");
    let text = error.to_string();
    for part in ["raises", "rollout 40", "2 tries in ", "rewards-0", "ValueError: no such"] {
        assert!(text.contains(part), "{part} is not in {text}");
    }
    // A function that cannot be called is not called again and again.
    let retries = pool.counts().retries;
    let answers = call(&pool, "asks_too_much", &["a", "b", "c"]);
    let f = answers[2].clone().unwrap_err();
    assert!(
        matches!(&f.kind, FailureKind::Signature { problem, given } if problem.contains("'solution'")
        && given.contains("completions")),
        "{f}"
    );
    assert_eq!((pool.counts().retries, f.attempts), (retries, 1));
    // A bad number costs its own sample only.
    let answers = call(&pool, "nan", &["good", "bad", "good"]);
    assert_eq!((&answers[0], &answers[2]), (&Ok(Some(1.0)), &Ok(Some(1.0))));
    let f = answers[1].clone().unwrap_err();
    assert_eq!((f.kind, f.ids), (FailureKind::NonFinite("nan".into()), vec![41]));
    assert_eq!(pool.counts().restarts, 0);
}

/// Was: whatever one completion did to the function cost the rewards of all completions of the call.
#[test]
fn one_bad_completion_costs_its_own_reward_only() {
    if !python() {
        return;
    }
    let pool = pool(&["fussy"], 1_000);
    let texts = ["raise", "exit", "segfault", "nan", "text", "quit", "short"];
    for bad in texts {
        let mut completions = vec!["fine"; 40];
        completions[17] = bad;
        let answers = call(&pool, "fussy", &completions);
        let lost: Vec<usize> = (0..40).filter(|&i| answers[i].is_err()).collect();
        assert_eq!(lost, [17], "{bad}");
        assert!(answers.iter().enumerate().all(|(i, a)| i == 17 || *a == Ok(Some(1.0))), "{bad}");
    }
    // A hang costs time-outs; those that are left are given up rather than waited for one by one.
    let began = Instant::now();
    let mut completions = vec!["fine"; 40];
    completions[17] = "hang";
    let answers = call(&pool, "fussy", &completions);
    assert!(answers[17].is_err() && began.elapsed() < PATIENCE, "{:?}", began.elapsed());
    assert!(answers.iter().filter(|a| a.is_ok()).count() >= 30, "{answers:?}");
    let began = Instant::now();
    assert!(call(&pool, "fussy", &["hang"; 40]).iter().all(Result::is_err));
    assert!(began.elapsed() < PATIENCE, "{:?}", began.elapsed());
}

#[test]
fn an_interrupt_ends_the_wait_for_a_function_that_hangs() {
    if !python() {
        return;
    }
    let flag = std::sync::Arc::new(AtomicBool::new(false));
    let options = WorkerOptions { interrupt: flag.clone(), ..WorkerOptions::new(file(), &["hangs"]) };
    let pool = WorkerPool::start(options).unwrap();
    let wait = std::thread::spawn(move || {
        std::thread::sleep(Duration::from_millis(300));
        flag.store(true, Ordering::SeqCst);
        Instant::now()
    });
    let answers = call(&pool, "hangs", &["a", "b"]);
    let since = wait.join().unwrap().elapsed();
    assert!(answers.iter().all(|a| matches!(a, Err(f) if f.kind == FailureKind::Interrupted)), "{answers:?}");
    assert!(since < PATIENCE, "{since:?}");
}

/// TRL's arguments: conversations as lists of messages, tokens, the trainer's state, and its two ways to log.
#[test]
fn functions_get_what_trl_gives_them() {
    if !python() {
        return;
    }
    let verifier = Python::with(WorkerOptions::new(file(), &["trl"]), vec![1.0], 0).unwrap();
    let columns = json!({"answer": "42"});
    let messages = [json!({"role": "user", "content": "6 * 7?"})];
    let chat = Sample {
        id: 0,
        prompt: "[...]",
        messages: &messages,
        completion: "42",
        ids: &[5, 6, 7],
        columns: columns.as_object().unwrap().into(),
        ..Default::default()
    };
    let plain = Sample { id: 1, prompt: "6 * 7?", messages: &[], ..chat };
    let at = Progress { step: 3, steps: 9, epoch: 0.5 };
    let outcomes = verifier.score_batch(&[chat, plain], at).unwrap();
    let Outcome::Scored(score) = &outcomes[0] else { panic!("{outcomes:?}") };
    assert_eq!(score.reward, 42.0 + 3.0 + 0.1 * 3.0 + 0.01 * 9.0);
    assert_eq!(score.extra["seen"], json!([{"role": "assistant", "content": "42"}]));
    let Outcome::Scored(score) = &outcomes[1] else { panic!("{outcomes:?}") };
    assert_eq!((&score.extra["seen"], &score.extra["asked"]), (&json!("42"), &json!("6 * 7?")));
    assert_eq!(verifier.take_metrics(), [("seen/count".to_string(), 2.0)]);
    assert!(verifier.take_metrics().is_empty());
}

fn lives(pid: &str) -> bool {
    let status = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    !status.is_empty() && !status.contains(") Z ")
}

#[test]
fn processes_of_a_worker_end_with_it() {
    if !python() || !Path::new("/proc/self/environ").exists() {
        return;
    }
    let pool = pool(&["reward", "leaks", "leaks_and_exits"], 60_000);
    let (left, dead) = (marker(), marker());
    assert_eq!(call_as(&pool, "leaks", &left, &["a"]), [Ok(Some(1.0))]);
    assert_eq!(call(&pool, "reward", &["a"]), [Ok(Some(1.0))]);
    let first = std::fs::read_to_string(&left).unwrap();
    assert!(first.split_whitespace().count() == 2 && first.split_whitespace().all(lives), "{first}");
    // The end of the process is seen although its children hold the pipes open.
    let f = call_as(&pool, "leaks_and_exits", &dead, &["a"])[0].clone().unwrap_err();
    assert!(matches!(f.kind, FailureKind::Exited(_)) && f.waited < PATIENCE, "{f}");
    let started = std::fs::read_to_string(&dead).unwrap();
    assert_eq!(started.lines().count(), 2, "both tries");
    drop(pool);
    let began = Instant::now();
    for pid in first.split_whitespace().chain(started.split_whitespace()) {
        while lives(pid) {
            assert!(began.elapsed() < PATIENCE, "process {pid} is left over");
            std::thread::sleep(Duration::from_millis(10));
        }
    }
}

/// Not a test: the trainer that the next test kills.
#[test]
#[ignore = "started by workers_end_with_a_trainer_that_is_killed"]
fn a_trainer_to_be_killed() {
    let Ok(marker) = std::env::var("FERRL_TEST_MARKER") else { return };
    call_as(&pool(&["tells_and_hangs"], 60_000), "tells_and_hangs", &marker, &["a"]);
}

#[test]
fn workers_end_with_a_trainer_that_is_killed() {
    if !python() || !Path::new("/proc/self/stat").exists() {
        return;
    }
    let marker = marker();
    let mut trainer = std::process::Command::new(std::env::current_exe().unwrap())
        .args(["--exact", "a_trainer_to_be_killed", "--ignored"])
        .env("FERRL_TEST_MARKER", &marker)
        .stdout(std::process::Stdio::null())
        .spawn()
        .unwrap();
    let patience = Instant::now() + PATIENCE;
    while !Path::new(&marker).exists() {
        assert!(Instant::now() < patience, "the worker did not start");
        std::thread::sleep(Duration::from_millis(10));
    }
    let pids = std::fs::read_to_string(&marker).unwrap();
    assert!(pids.split_whitespace().count() == 2 && pids.split_whitespace().all(lives), "{pids}");
    trainer.kill().unwrap();
    trainer.wait().unwrap();
    let patience = Instant::now() + PATIENCE;
    while pids.split_whitespace().any(lives) {
        assert!(Instant::now() < patience, "left over: {pids}");
        std::thread::sleep(Duration::from_millis(10));
    }
}

#[test]
fn a_file_that_cannot_be_used_is_refused_at_the_start() {
    if !python() {
        return;
    }
    let refused = |options: WorkerOptions| WorkerPool::start(options).err().unwrap();
    let error = refused(WorkerOptions::new(file(), &["rewrad"]));
    assert!(error.class == Class::Usage && error.to_string().contains("did you mean \"reward\""), "{error}");
    let error = refused(WorkerOptions::new("no/such/file.py", &["reward"]));
    assert!(error.to_string().contains("no/such/file.py"), "{error}");
    let broken = marker() + ".py";
    std::fs::write(&broken, "def reward(:\n").unwrap();
    let error = refused(WorkerOptions::new(&broken, &["reward"]));
    assert!(error.to_string().contains("SyntaxError"), "{error}");
    let python = "no-such-python".to_string();
    let error = refused(WorkerOptions { python, ..WorkerOptions::new(file(), &["reward"]) });
    assert!(error.to_string().contains("no-such-python"), "{error}");
    let slow = marker() + ".py";
    std::fs::write(&slow, "import time\ntime.sleep(60)\n").unwrap();
    let start_timeout = Duration::from_millis(300);
    let error = refused(WorkerOptions { start_timeout, ..WorkerOptions::new(&slow, &["reward"]) });
    assert!(error.to_string().contains("no answer within 0.3 s"), "{error}");
}

fn samples<'a>(completions: &'a [&'a str], columns: &'a Map<String, Value>) -> Vec<Sample<'a>> {
    let numbered = completions.iter().zip(100..);
    let sample = |(completion, id): (&&'a str, u64)| Sample {
        id,
        prompt: "p",
        completion,
        columns: columns.into(),
        ..Default::default()
    };
    numbered.map(sample).collect()
}

#[test]
fn the_verifier_adds_up_functions_over_several_workers() {
    if !python() {
        return;
    }
    let options = json!({
        "file": file(), "functions": ["reward", "narrow"], "weights": [0.5, 10], "workers": 2, "batch": 3,
    });
    let verifier = build("python", options.as_object().unwrap()).unwrap();
    let columns = json!({"answer": "aa", "prompt": "left out"});
    let texts = ["a", "aa", "aaa", "aaaa", "aaaaa", "aa", ""];
    let scores = verifier.score_batch(&samples(&texts, columns.as_object().unwrap()), Progress::default());
    for (text, score) in texts.iter().zip(scores.unwrap()) {
        let Outcome::Scored(score) = score else { panic!("{score:?}") };
        let (length, right) = (text.len() as f64, *text == "aa");
        assert_eq!(score.reward, 0.5 * length + if right { 10.0 } else { 0.0 });
        let names: Vec<&str> = score.components.iter().map(|(n, _)| n.as_str()).collect();
        assert_eq!(names, if right { vec!["reward", "narrow"] } else { vec!["reward"] });
    }
    assert!(verifier.score_batch(&[], Progress::default()).unwrap().is_empty());
    let options = json!({"file": file(), "weights": [1, 2]});
    assert!(build("python", options.as_object().unwrap()).is_err());
}

#[test]
fn a_broken_part_of_a_batch_costs_that_part_only() {
    if !python() {
        return;
    }
    let workers = WorkerOptions { workers: 2, ..WorkerOptions::new(file(), &["nan"]) };
    let verifier = Python::with(workers, vec![1.0], 1).unwrap();
    let columns = Map::new();
    let samples = |texts| samples(texts, &columns);
    let scores =
        verifier.score_batch(&samples(&["good", "bad", "good", "good"]), Progress::default()).unwrap();
    let kept: Vec<bool> = scores.iter().map(|s| matches!(s, Outcome::Scored(_))).collect();
    assert_eq!(kept, [true, false, true, true]);
    assert!(matches!(&scores[1], Outcome::Lost(_)));
    let verifier = Python::with(WorkerOptions::new(file(), &["none"]), vec![1.0], 0).unwrap();
    let scores = verifier.score_batch(&samples(&["a"]), Progress::default()).unwrap();
    assert_eq!(scores, [Outcome::Abstained]);
    let error = verifier.score(&samples(&["a"])[0]).unwrap_err();
    assert!(error.to_string().contains("None from every function"), "{error}");
}

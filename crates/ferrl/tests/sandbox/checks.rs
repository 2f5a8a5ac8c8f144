//! What is checked of the tables.

use super::attacks::{ATTACKS, Attack, Control, ENDLESS, ENDS_BY_ITSELF, LEFT_BEHIND, PRELUDE};
use super::world::{World, marked};
use super::{exploits, honest};
use ferrl::sandbox::{
    Confinement, Interpreter, Limits, ProgramEnd, Ran, Sandbox, SandboxMode, SandboxOptions, SandboxProgram,
};
use ferrl::verify::{self, Outcome, Progress, Sample, Verifier};
use serde_json::{Map, Value, json};
use std::collections::HashMap;
use std::time::Instant;

/// Runs every check; one that fails does not keep the others from running.
pub fn all() {
    let only = std::env::args().nth(1).filter(|a| !a.starts_with('-'));
    let checks: [(&str, fn()); 10] = [
        ("attacks", attacks),
        ("endless_programs_are_ended", endless_programs_are_ended),
        ("nobody_is_left_behind", nobody_is_left_behind),
        ("exploits_are_not_rewarded", exploits_are_not_rewarded),
        ("honest_programs_are_rewarded", honest_programs_are_rewarded),
        ("mode_on_names_the_missing_layer", mode_on_names_the_missing_layer),
        ("a_fault_cannot_be_faked", a_fault_cannot_be_faked),
        ("an_interruption_ends_a_run", an_interruption_ends_a_run),
        ("programs_die_with_ferrl", programs_die_with_ferrl),
        ("overhead", overhead),
    ];
    let mut failed = Vec::new();
    for (name, check) in
        checks.into_iter().filter(|(n, _)| only.as_ref().is_none_or(|o| n.contains(o.as_str())))
    {
        let start = Instant::now();
        let ended = std::panic::catch_unwind(check);
        println!(
            "{name}: {} in {:.1} s",
            if ended.is_ok() { "ok" } else { "FAILED" },
            start.elapsed().as_secs_f64()
        );
        failed.extend(ended.err().map(|_| name));
    }
    assert!(failed.is_empty(), "failed: {}", failed.join(", "));
}

fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

/// Sandboxes by what is left out of them; making one takes as long as a run.
struct Boxes {
    python: Interpreter,
    made: HashMap<Vec<Confinement>, Sandbox>,
    off: Sandbox,
}

impl Boxes {
    fn new() -> Boxes {
        let python = Interpreter::find("python3").unwrap();
        let off = Sandbox::new(SandboxOptions { mode: SandboxMode::Off, ..Default::default() }).unwrap();
        Boxes { python, made: HashMap::new(), off }
    }

    fn without(&mut self, layers: &[Confinement]) -> &Sandbox {
        let reads = self.python.reads.clone();
        self.made.entry(layers.to_vec()).or_insert_with(|| {
            Sandbox::new(SandboxOptions { without: layers.to_vec(), reads, ..Default::default() }).unwrap()
        })
    }

    /// A sandbox of this layer alone, or with the one that it needs, unless that would stop the attack too: namespaces need a
    /// user namespace of whoever is not root, and another user reaches an interpreter in a closed home folder only through
    /// a root of our own.
    fn only(&mut self, layer: Confinement, attack: &Attack) -> Option<&Sandbox> {
        let mut kept = vec![layer];
        let others = |kept: &[Confinement]| {
            Confinement::ALL.into_iter().filter(|l| !kept.contains(l)).collect::<Vec<_>>()
        };
        if !self.without(&others(&kept)).report().has(layer) {
            kept.push(if is_root() { Confinement::Mount } else { Confinement::User });
        }
        // For others than root, `user` is a user namespace, in which they are still themselves.
        let usable = kept.len() == 1 || !is_root() || !attack.layers.contains(&Confinement::Mount);
        Some(self.without(&others(&kept))).filter(|s| usable && s.report().has(layer))
    }

    fn has(&mut self, layer: Confinement) -> bool {
        self.without(&[]).report().has(layer)
    }
}

fn limits() -> Limits {
    Limits {
        wall_s: 10.0,
        memory_mib: 200,
        processes: 16,
        scratch_mib: 8,
        output_kib: 64,
        ..Default::default()
    }
}

fn larger() -> Limits {
    Limits {
        wall_s: 10.0,
        memory_mib: 4096,
        processes: 400,
        scratch_mib: 64,
        output_kib: 64,
        ..Default::default()
    }
}

fn program(python: &Interpreter, code: &str, arguments: &[String]) -> SandboxProgram {
    let mut program = python.program(code, Vec::new());
    program.argv.extend(arguments.iter().cloned());
    program
}

fn escaped(ran: &Ran) -> bool {
    String::from_utf8_lossy(&ran.stdout).contains("ESCAPED")
}

fn said(ran: &Ran) -> String {
    format!("{}: {}{}", ran.end, String::from_utf8_lossy(&ran.stdout), String::from_utf8_lossy(&ran.stderr))
}

/// What came of a part of the table.
#[derive(Default)]
struct Tally {
    stopped: usize,
    alone: usize,
    shown: usize,
    wrong: Vec<String>,
}

fn attacks() {
    assert!(ATTACKS.len() + ENDLESS.len() + LEFT_BEHIND.len() >= 60);
    assert!(std::env::vars().count() > 3, "an empty environment has nothing to hide");
    println!("{}", Boxes::new().without(&[]).report());
    let halves = [0, 1].map(|half| ATTACKS.iter().skip(half).step_by(2));
    let tallies = std::thread::scope(|scope| {
        halves.map(|half| scope.spawn(|| attack_all(half))).map(|thread| thread.join().unwrap())
    });
    let sum = |of: fn(&Tally) -> usize| tallies.iter().map(of).sum::<usize>();
    let (stopped, alone, shown) = (sum(|t| t.stopped), sum(|t| t.alone), sum(|t| t.shown));
    println!(
        "{stopped} of {} attacks stopped, {alone} times by one layer alone; {shown} shown to work unconfined",
        ATTACKS.len()
    );
    let wrong: Vec<&str> = tallies.iter().flat_map(|t| &t.wrong).map(String::as_str).collect();
    assert!(wrong.is_empty(), "\n{}", wrong.join("\n"));
    assert!(shown >= 40 || !is_root(), "{shown}");
}

fn attack_all<'a>(attacks: impl Iterator<Item = &'a Attack>) -> Tally {
    let (mut boxes, mut tally) = (Boxes::new(), Tally::default());
    for attack in attacks {
        let layers: Vec<Confinement> = attack.layers.iter().copied().filter(|l| boxes.has(*l)).collect();
        if layers.is_empty() && !attack.layers.is_empty() {
            let missing: Vec<&str> = attack.layers.iter().map(|l| l.name()).collect();
            println!("not run: {}: needs one of {}", attack.name, missing.join(", "));
            continue;
        }
        let mut world = World::new();
        let python = boxes.python.clone();
        let code = format!("{PRELUDE}{}", attack.code);
        let program = program(&python, &code, &world.arguments());
        let ran = boxes.without(&[]).run(&program, &limits()).unwrap();
        match (escaped(&ran), world.is_whole()) {
            (false, Ok(())) => tally.stopped += 1,
            (true, _) => tally.wrong.push(format!("{}: ESCAPED the sandbox: {}", attack.name, said(&ran))),
            (false, Err(harm)) => tally.wrong.push(format!("{}: did harm: {harm}", attack.name)),
        }
        for layer in layers.into_iter().filter(|l| is_root() || *l != Confinement::User) {
            let Some(sandbox) = boxes.only(layer, attack) else {
                println!("not run: {} against {layer} alone", attack.name);
                continue;
            };
            let ran = sandbox.run(&program, &limits()).unwrap();
            match escaped(&ran) {
                false => tally.alone += 1,
                true => {
                    tally.wrong.push(format!("{}: {layer} does not stop it: {}", attack.name, said(&ran)))
                }
            }
        }
        // One success shows that the attack works; a busy machine may spoil a try.
        let mut unconfined = control(attack, &mut boxes, &program);
        for _ in 0..2 {
            if unconfined.as_ref().is_some_and(|ran| !escaped(ran)) {
                unconfined = control(attack, &mut boxes, &program);
            }
        }
        match unconfined {
            Some(ran) if escaped(&ran) => tally.shown += 1,
            Some(ran) => {
                tally.wrong.push(format!("{}: it does not work unconfined: {}", attack.name, said(&ran)))
            }
            None => {}
        }
    }
    tally
}

/// The attack where nothing stops it.
fn control(attack: &Attack, boxes: &mut Boxes, program: &SandboxProgram) -> Option<Ran> {
    let ran = match attack.control {
        Control::Off => boxes.off.run(program, &larger()),
        Control::OffRoot if is_root() => boxes.off.run(program, &larger()),
        Control::Without if is_root() => boxes.without(attack.layers).run(program, &larger()),
        Control::Larger => boxes.without(&[]).run(program, &larger()),
        _ => return None,
    };
    Some(ran.unwrap())
}

/// With and without a pid namespace.
fn endless_programs_are_ended() {
    let both = [Vec::new(), vec![Confinement::Pid]];
    std::thread::scope(|scope| {
        for part in ENDLESS.chunks(3) {
            let both = &both;
            scope.spawn(move || {
                let mut boxes = Boxes::new();
                for ((name, end, code), without) in part.iter().flat_map(|p| both.iter().map(move |w| (p, w)))
                {
                    ends(&mut boxes, name, end, code, without);
                }
            });
        }
    });
}

fn ends(boxes: &mut Boxes, name: &str, end: &str, code: &str, without: &[Confinement]) {
    let python = boxes.python.clone();
    let sandbox = boxes.without(without);
    // What another limit ends must reach it first, on a busy machine too.
    let wall_s = if end == "time-out" { 1.0 } else { 30.0 };
    let limits = Limits { wall_s, ..limits() };
    let start = Instant::now();
    let arguments = ["/", "1", "1", "1", "x"].map(String::from);
    let ran = sandbox.run(&program(&python, &format!("{PRELUDE}{code}"), &arguments), &limits).unwrap();
    let seconds = start.elapsed().as_secs_f64();
    assert!(ran.end.to_string().contains(end), "{name} without {without:?}: {}", said(&ran));
    assert!(seconds < 60.0, "{name}: {seconds} s");
    assert!(ran.stdout.len() + ran.stderr.len() <= 64 << 10, "{name}");
}

/// With and without a pid namespace; in mode `off` a daemon does survive, which shows that it would.
fn nobody_is_left_behind() {
    let mut boxes = Boxes::new();
    let mut survived = 0;
    for (i, (name, code)) in LEFT_BEHIND.iter().enumerate() {
        let mut run = |without: Option<&[Confinement]>, j: usize| {
            let mark = format!("{}", 4_000_000 + std::process::id() as usize * 100 + i * 10 + j);
            let code = format!("import os\nMARK = '{mark}'\n{code}");
            let python = boxes.python.clone();
            let sandbox = match without {
                Some(layers) => boxes.without(layers),
                None => &boxes.off,
            };
            // What holds stdout is waited for until the time-out; a busy machine may start Python later than that, so that one
            // of them ends by itself.
            let wall_s = if *name == ENDS_BY_ITSELF { 60.0 } else { 0.5 };
            sandbox.run(&program(&python, &code, &[]), &Limits { wall_s, ..limits() }).unwrap();
            let left = marked(&mark);
            for pid in left.iter().filter_map(|pid| rustix::process::Pid::from_raw(*pid)) {
                let _ = rustix::process::kill_process(pid, rustix::process::Signal::KILL);
            }
            left.len()
        };
        assert_eq!(run(Some(&[]), 0), 0, "{name}");
        assert_eq!(run(Some(&[Confinement::Pid]), 1), 0, "{name} without a pid namespace");
        survived += run(None, 2);
    }
    assert!(survived > 0, "nothing would have been left behind");
}

fn verifier(options: Value) -> Box<dyn Verifier> {
    verify::build("code", options.as_object().unwrap()).unwrap()
}

fn score(verifier: &dyn Verifier, rows: &[(&str, Value, &str)]) -> Vec<verify::Score> {
    let rows: Vec<(Map<String, Value>, &str)> =
        rows.iter().map(|(_, row, code)| (row.as_object().unwrap().clone(), *code)).collect();
    let samples: Vec<Sample<'_>> = rows
        .iter()
        .map(|(row, code)| Sample { completion: code, columns: row.into(), ..Default::default() })
        .collect();
    let outcomes = verifier.score_batch(&samples, Progress::default()).unwrap();
    outcomes
        .into_iter()
        .map(|outcome| match outcome {
            Outcome::Scored(score) => score,
            other => panic!("{other:?}"),
        })
        .collect()
}

fn exploits_are_not_rewarded() {
    let table = |list: &'static [(&'static str, &'static str)], row: Value| {
        list.iter().map(move |(name, code)| (*name, row.clone(), *code)).collect::<Vec<_>>()
    };
    let mut rows = table(exploits::EXPLOITS, exploits::row());
    rows.extend(table(exploits::GUESSES, exploits::yes_no_row()));
    rows.extend(table(exploits::IO_EXPLOITS, exploits::io_row()));
    assert!(rows.len() >= 20);
    let within = |wall_s: f64| verifier(json!({"wall_s": wall_s, "memory_mib": 256, "output_kib": 256}));
    let scores = score(&*within(1.0), &rows);
    for ((name, _, _), score) in rows.iter().zip(&scores) {
        assert_eq!(score.reward, 0.0, "{name}: {score:?}");
        assert!(score.why.as_ref().is_some_and(|w| !w.is_empty()), "{name}: {score:?}");
    }
    println!("{} exploits, 0 rewarded", rows.len());
    // The same rows are passed by whoever does the work.
    let honest = [
        ("add", exploits::row(), "def add(a, b): return a + b"),
        ("even", exploits::yes_no_row(), "def even(n): return n % 2 == 0"),
        ("program", exploits::io_row(), "print(sum(map(int, input().split())))"),
    ];
    let scores = score(&*within(60.0), &honest);
    assert!(scores.iter().all(|s| s.reward == 1.0), "{scores:?}");
}

fn honest_programs_are_rewarded() {
    let rows = honest::rows();
    assert!(rows.len() >= 15);
    for options in [json!({}), json!({"sandbox": "off"})] {
        for ((name, _, _), score) in rows.iter().zip(score(&*verifier(options.clone()), &rows)) {
            assert_eq!(score.reward, 1.0, "{name} with {options}: {score:?}");
            assert!(score.why.is_none(), "{name}: {score:?}");
        }
    }
    println!("{} honest programs rewarded", rows.len());
}

fn mode_on_names_the_missing_layer() {
    let python = Interpreter::find("python3").unwrap();
    let sandbox = |mode, without: &[Confinement]| {
        Sandbox::new(SandboxOptions {
            mode,
            without: without.to_vec(),
            reads: python.reads.clone(),
            ..Default::default()
        })
    };
    for layer in Confinement::ALL {
        let auto = sandbox(SandboxMode::Auto, &[layer]).unwrap();
        assert!(!auto.report().has(layer) && auto.report().missing.iter().any(|(l, _)| *l == layer));
        match sandbox(SandboxMode::On, &[layer]).err().map(|e| e.to_string()) {
            Some(error) => assert!(error.contains("lacks the layer"), "{error}"),
            None => assert_eq!(layer, Confinement::Scope, "mode on does without {layer}"),
        }
    }
    let full = sandbox(SandboxMode::Auto, &[]).unwrap();
    match (full.report().hole(), sandbox(SandboxMode::On, &[])) {
        (None, on) => assert_eq!(on.unwrap().report().in_force, full.report().in_force),
        (Some((layer, _)), on) => assert!(on.err().unwrap().to_string().contains(layer.name())),
    }
}

/// Was to be feared: a program that says in the stage's words that it never ran would be lost, not wrong.
fn a_fault_cannot_be_faked() {
    let mut boxes = Boxes::new();
    let python = boxes.python.clone();
    let code = "import sys; sys.stderr.write('0' * 32 + 'layer pid: no'); sys.exit(125)";
    let ran = boxes.without(&[]).run(&program(&python, code, &[]), &limits()).unwrap();
    assert_eq!(ran.end, ProgramEnd::Finished(125));
    let missing = SandboxProgram { argv: vec!["/bin/nothing".into()], ..Default::default() };
    let ran = boxes.without(&[]).run(&missing, &limits()).unwrap();
    assert!(
        matches!(&ran.end, ProgramEnd::CannotStart(why) if why.contains("/bin/nothing")),
        "{:?}",
        ran.end
    );
}

fn an_interruption_ends_a_run() {
    use std::sync::Arc;
    use std::sync::atomic::{AtomicBool, Ordering};
    let python = Interpreter::find("python3").unwrap();
    for mode in [SandboxMode::Auto, SandboxMode::Off] {
        let interrupt = Arc::new(AtomicBool::new(false));
        let options = SandboxOptions {
            mode,
            reads: python.reads.clone(),
            interrupt: interrupt.clone(),
            ..Default::default()
        };
        let sandbox = Sandbox::new(options).unwrap();
        let mark = format!("{}", 5_000_000 + std::process::id() as usize + mode as usize);
        let code = format!("import os; os.execv('/bin/sleep', ['sleep', '{mark}'])");
        let start = Instant::now();
        let error = std::thread::scope(|scope| {
            let run = scope.spawn(|| sandbox.run(&program(&python, &code, &[]), &Limits::default()));
            while marked(&mark).is_empty() && start.elapsed().as_secs() < 30 {
                std::thread::sleep(std::time::Duration::from_millis(20));
            }
            interrupt.store(true, Ordering::SeqCst);
            run.join().unwrap().unwrap_err()
        });
        assert!(ferrl::interrupt::is_interruption(&error), "{error}");
        assert!(start.elapsed().as_secs_f64() < 60.0 && marked(&mark).is_empty(), "{mode:?}");
    }
}

/// Asked of this executable: run a program that sleeps until somebody kills us.
pub const VICTIM: &str = "--sleep-in-a-sandbox";

pub fn sleep_in_a_sandbox() {
    let (python, mark) = (Interpreter::find("python3").unwrap(), std::env::args().nth(2).unwrap());
    let sandbox = Sandbox::new(SandboxOptions { reads: python.reads.clone(), ..Default::default() }).unwrap();
    let code =
        format!("import os\nif os.fork() == 0: os.setsid()\nos.execv('/bin/sleep', ['sleep', '{mark}'])");
    let _ = sandbox.run(&program(&python, &code, &[]), &Limits { wall_s: 60.0, ..Default::default() });
}

/// Killed alone, or together with its supervisor; nothing is left in the folder of temporary files either.
fn programs_die_with_ferrl() {
    use rustix::process::{Pid, Signal, kill_process};
    let kill = |pid: u32| kill_process(Pid::from_raw(pid as i32).unwrap(), Signal::KILL).unwrap();
    let wait = |until: &dyn Fn() -> bool| {
        let start = Instant::now();
        while !until() && start.elapsed().as_secs() < 40 {
            std::thread::sleep(std::time::Duration::from_millis(20));
        }
        until()
    };
    for together in [false, true] {
        let mark = format!("{}", 6_000_000 + std::process::id() as usize * 10 + usize::from(together));
        let temporary = tempfile::tempdir().unwrap();
        std::fs::set_permissions(temporary.path(), std::os::unix::fs::PermissionsExt::from_mode(0o755))
            .unwrap();
        let mut child = std::process::Command::new(std::env::current_exe().unwrap())
            .args([VICTIM, &mark])
            .env("TMPDIR", temporary.path())
            .spawn()
            .unwrap();
        let asleep = format!("sleep\0{mark}");
        assert!(wait(&|| marked(&asleep).len() == 2), "the program does not start");
        let tasks = format!("/proc/{}/task/{}/children", child.id(), child.id());
        let supervisors = std::fs::read_to_string(tasks).unwrap();
        kill(child.id());
        if together {
            supervisors.split_whitespace().for_each(|pid| kill(pid.parse().unwrap()));
        }
        child.wait().unwrap();
        assert!(wait(&|| marked(&asleep).is_empty()), "the program lives on, together: {together}");
        let empty = || std::fs::read_dir(temporary.path()).unwrap().next().is_none();
        assert!(together || wait(&empty), "its folder is left behind");
    }
}

/// What the sandbox costs over a plain process: printed, and refused where it is far off.
fn overhead() {
    let mut boxes = Boxes::new();
    let program = program(&boxes.python.clone(), "pass", &[]);
    let limits = limits();
    boxes.without(&[]);
    let time = |sandbox: &Sandbox| {
        let start = Instant::now();
        assert_eq!(sandbox.run(&program, &limits).unwrap().end, ProgramEnd::Finished(0));
        start.elapsed().as_secs_f64() * 1e3
    };
    let (mut confined, mut plain): (Vec<f64>, Vec<f64>) =
        (0..25).map(|_| (time(&boxes.made[&Vec::new()]), time(&boxes.off))).unzip();
    confined.sort_by(f64::total_cmp);
    plain.sort_by(f64::total_cmp);
    println!(
        "a Python that does nothing: {:.1} ms confined and {:.1} ms plain at the median of 25, {:.1} and {:.1} at best",
        confined[12], plain[12], confined[0], plain[0]
    );
    // A machine that does other things too has no better figure than an order of magnitude.
    assert!(confined[0] - plain[0] < 100.0);
}

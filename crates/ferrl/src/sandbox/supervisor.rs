//! The supervisor: a process that starts confined programs, one at a time, and outlives none of them.
//!
//! It creates the namespaces and the root that all its programs share, and a pid namespace for each; it ends, with its running
//! program, when Ferrl closes its stdin.

use super::family::ProcessFamily;
use super::layer::{Confinement, ConfinementReport};
use super::protocol::{DoneFrame, Hello, OpenFrame, RunFrame, VERSION, receive, send};
use super::stage::{FAILED, SandboxStage};
use super::watch::{Surroundings, run};
use super::{Limits, ProgramEnd, launcher, nonce, root};
use nix::sched::{CloneFlags, unshare};
use std::io::{Error, Read, Result, Write};
use std::os::fd::AsFd;
use std::os::unix::fs::{DirBuilderExt, MetadataExt};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::Command;
use std::time::Instant;

/// Serves until stdin ends.
pub(super) fn main() -> ! {
    let served = serve();
    std::process::exit(served.map_or(1, |()| 0))
}

fn serve() -> Result<()> {
    close_inherited();
    let (mut input, mut output) = (std::io::stdin(), std::io::stdout());
    let Some((open, _)) = receive::<OpenFrame>(&mut input)? else { return Ok(()) };
    if open.version != VERSION {
        return send(&mut output, &Hello { version: VERSION, report: ConfinementReport::default() }, &[]);
    }
    let mut supervisor = Supervisor { open, root: None, scratch: None, id: None, runs: 0 };
    let report = supervisor.set_up();
    let usable = supervisor.open.probe || report.missing.is_empty();
    supervisor.open.layers = report.in_force.clone();
    send(&mut output, &Hello { version: VERSION, report }, &[])?;
    let served = if usable { supervisor.programs(&mut input, &mut output) } else { Ok(()) };
    supervisor.clean_up(); // also where Ferrl is gone
    served
}

/// Closes file descriptors inherited from the process that started Ferrl: programs must not reach them.
fn close_inherited() {
    let Ok(open) = std::fs::read_dir("/proc/self/fd") else { return };
    let open: Vec<i32> = open.flatten().filter_map(|e| e.file_name().to_str()?.parse().ok()).collect();
    // Nothing of ours is open yet but the listing itself, which is closed by now.
    open.into_iter().filter(|fd| *fd > 2).for_each(|fd| nix::unistd::close(fd).unwrap_or_default());
}

struct Supervisor {
    open: OpenFrame,
    /// The prepared root, and the scratch folder in it.
    root: Option<PathBuf>,
    scratch: Option<PathBuf>,
    /// The user that programs become.
    id: Option<u32>,
    runs: u64,
}

impl Supervisor {
    fn set_up(&mut self) -> ConfinementReport {
        let mut report = ConfinementReport::default();
        // Orphans become our children (subreaper), so that none escapes.
        let _ = rustix::process::set_child_subreaper(Some(rustix::process::getpid()));
        for layer in [Confinement::User, Confinement::Net, Confinement::Ipc, Confinement::Mount] {
            if self.open.layers.contains(&layer)
                && let Err(e) = self.make(layer)
            {
                report.missing.push((layer, e.to_string()));
            }
        }
        self.open.layers.retain(|l| report.missing.iter().all(|(m, _)| m != l));
        report.missing.extend(self.probe());
        let missing = |l: &Confinement| report.missing.iter().any(|(m, _)| m == l);
        report.in_force = self.open.layers.iter().copied().filter(|l| !missing(l)).collect();
        report
    }

    fn make(&mut self, layer: Confinement) -> Result<()> {
        match layer {
            Confinement::User if rustix::process::geteuid().is_root() => {
                self.readable_by_others()?;
                self.id = Some(own_id().ok_or_else(|| Error::other("no user id of its own is mapped here"))?);
                Ok(())
            }
            Confinement::User => user_namespace(),
            Confinement::Net => Ok(unshare(CloneFlags::CLONE_NEWNET)?),
            Confinement::Ipc => Ok(unshare(CloneFlags::CLONE_NEWIPC | CloneFlags::CLONE_NEWUTS)?),
            _ => {
                unshare(CloneFlags::CLONE_NEWNS)?;
                let folder = self.open.base.join("root");
                std::fs::DirBuilder::new().mode(0o755).create(&folder)?;
                let scratch =
                    root::build(&folder, &self.open.reads).inspect_err(|_| root::remove(&folder))?;
                (self.root, self.scratch) = (Some(folder), Some(scratch));
                Ok(())
            }
        }
    }

    /// Another user reaches files through folders that all may walk through; with a root of our own, the binds alone count.
    fn readable_by_others(&self) -> Result<()> {
        let closed = |path: &Path| path.metadata().is_ok_and(|m| m.is_dir() && m.mode() & 0o001 == 0);
        let hidden = |path: &&PathBuf| match self.open.layers.contains(&Confinement::Mount) {
            true => closed(path),
            false => path.ancestors().any(closed),
        };
        match self.open.reads.iter().find(hidden) {
            Some(path) => Err(Error::other(format!("{} is closed to other users", path.display()))),
            None => Ok(()),
        }
    }

    /// Layers that a stage could not apply, or all of them without a report.
    fn probe(&mut self) -> Vec<(Confinement, String)> {
        let mut missing = Vec::new();
        let limits = Limits { wall_s: 30.0, ..Default::default() };
        let mut request = RunFrame { argv: Vec::new(), env: Vec::new(), limits };
        if self.open.layers.contains(&Confinement::Pid) {
            // In a thread of its own: the children of this one stay in this namespace.
            let tried = std::thread::spawn(|| unshare(CloneFlags::CLONE_NEWPID)).join();
            if let Ok(Err(e)) = tried {
                missing.push((Confinement::Pid, Error::from(e).to_string()));
                self.open.layers.retain(|l| *l != Confinement::Pid);
            }
        }
        request.limits.memory_mib = 1 << 20; // the stage is a large program itself
        let (end, stdout, stderr) = self.stage(&request, &[], true);
        match (end, serde_json::from_slice::<Vec<(Confinement, Option<String>)>>(&stdout)) {
            (ProgramEnd::Finished(0), Ok(results)) => {
                missing.extend(results.into_iter().filter_map(|(layer, why)| Some((layer, why?))));
            }
            (end, _) => {
                let why = format!("its probe failed: {end}: {}", String::from_utf8_lossy(&stderr).trim());
                missing.extend(self.open.layers.iter().map(|l| (*l, why.clone())));
            }
        }
        missing
    }

    /// Runs a requested program.
    fn programs(&mut self, input: &mut impl Read, output: &mut impl Write) -> Result<()> {
        while let Some((request, stdin)) = receive::<RunFrame>(input)? {
            let start = Instant::now();
            let (end, stdout, stderr) = self.stage(&request, &stdin, false);
            let done = DoneFrame { end, stdout: stdout.len(), seconds: start.elapsed().as_secs_f64() };
            send(output, &done, &[stdout, stderr].concat())?;
        }
        Ok(())
    }

    /// Runs a stage, which becomes the program.
    fn stage(&mut self, request: &RunFrame, stdin: &[u8], probe: bool) -> (ProgramEnd, Vec<u8>, Vec<u8>) {
        self.runs += 1;
        let has = |layer| self.open.layers.contains(&layer);
        let own_scratch = match &self.scratch {
            Some(_) if has(Confinement::Mount) => None,
            _ => match self.scratch_folder() {
                Ok(folder) => Some(folder),
                Err(e) => return cannot_start(format!("the scratch folder: {e}")),
            },
        };
        let scratch = own_scratch.clone().or(self.scratch.clone()).unwrap_or_default();
        let stage = SandboxStage {
            layers: self.open.layers.clone(),
            probe,
            nonce: nonce(),
            argv: request.argv.clone(),
            limits: request.limits.clone(),
            reads: self.open.reads.clone(),
            root: self.root.clone(),
            scratch: scratch.clone(),
            id: self.id.filter(|_| has(Confinement::User)),
        };
        let (pid_namespace, count) =
            (has(Confinement::Pid), !has(Confinement::User) || !has(Confinement::Rlimits));
        // A thread can leave for one pid namespace only, so that each program has a thread. The program dies with it.
        let watched = std::thread::scope(|scope| {
            let body = || {
                if pid_namespace && let Err(e) = unshare(CloneFlags::CLONE_NEWPID) {
                    return cannot_start(format!("layer pid: {e}"));
                }
                let family =
                    if pid_namespace { ProcessFamily::Namespace } else { ProcessFamily::Descendants };
                let stdin_of_ours = std::io::stdin();
                let around = Surroundings {
                    family,
                    control: Some(stdin_of_ours.as_fd()),
                    stopped: &|| false,
                    scratch: own_scratch.as_deref(),
                    count,
                };
                run(command(&stage, request, &scratch), stdin, &request.limits, &around)
            };
            let thread = std::thread::Builder::new().stack_size(1 << 20).spawn_scoped(scope, body);
            thread
                .map_err(|e| e.to_string())
                .and_then(|t| t.join().map_err(|_| "a bug in the supervisor".into()))
        });
        own_scratch.iter().for_each(|folder| drop(std::fs::remove_dir_all(folder)));
        match watched {
            Ok((ProgramEnd::Finished(FAILED), _, stderr)) if stderr.starts_with(stage.nonce.as_bytes()) => {
                cannot_start(String::from_utf8_lossy(&stderr[stage.nonce.len()..]).into_owned())
            }
            Ok(watched) => watched,
            Err(why) => cannot_start(why),
        }
    }

    /// A scratch folder on disk, for want of a mount namespace.
    fn scratch_folder(&self) -> Result<PathBuf> {
        let folder = self.open.base.join(format!("run-{}", self.runs));
        std::fs::DirBuilder::new().mode(0o700).create(&folder)?;
        if let Some(id) = self.id {
            std::os::unix::fs::chown(&folder, Some(id), Some(id))?;
        }
        Ok(folder)
    }

    fn clean_up(&self) {
        self.root.iter().for_each(|root| root::remove(root));
        let _ = std::fs::remove_dir(&self.open.base);
        // The folder of all supervisors is Ferrl's to remove, unless it is gone: it holds nothing then.
        let _ = self.open.base.parent().map(std::fs::remove_dir);
    }
}

/// The command of a stage: this executable again, with an environment of our making.
fn command(stage: &SandboxStage, request: &RunFrame, scratch: &Path) -> Command {
    let mut command = Command::new("/proc/self/exe");
    command.arg0("ferrl").arg(launcher::STAGE).arg(serde_json::to_string(stage).unwrap_or_default());
    command.env_clear().env("HOME", scratch).env("TMPDIR", scratch).envs(request.env.iter().cloned());
    command
}

/// A user namespace in which this user is itself, with the capability to mount passed on to stages.
fn user_namespace() -> Result<()> {
    use rustix::thread::{
        CapabilitySet, capabilities, configure_capability_in_ambient_set, set_capabilities,
    };
    let (uid, gid) = (rustix::process::geteuid().as_raw(), rustix::process::getegid().as_raw());
    unshare(CloneFlags::CLONE_NEWUSER)?;
    std::fs::write("/proc/self/uid_map", format!("{uid} {uid} 1"))?;
    std::fs::write("/proc/self/setgroups", "deny")?;
    std::fs::write("/proc/self/gid_map", format!("{gid} {gid} 1"))?;
    let mut sets = capabilities(None)?;
    sets.inheritable |= CapabilitySet::SYS_ADMIN;
    set_capabilities(None, sets)?;
    configure_capability_in_ambient_set(CapabilitySet::SYS_ADMIN, true)?;
    Ok(())
}

/// The result of a program that did not start: without output.
fn cannot_start(why: String) -> (ProgramEnd, Vec<u8>, Vec<u8>) {
    (ProgramEnd::CannotStart(why), Vec::new(), Vec::new())
}

/// A user and group id that no other process has, so that limits count this supervisor's programs alone.
fn own_id() -> Option<u32> {
    let pid = std::process::id();
    let map = |name: &str| std::fs::read_to_string(format!("/proc/self/{name}")).unwrap_or_default();
    let maps = [map("uid_map"), map("gid_map")];
    let mapped = |id: u32| {
        maps.iter().all(|map| {
            map.lines().any(|line| {
                let mut numbers = line.split_whitespace().filter_map(|n| n.parse::<u64>().ok());
                let (Some(inside), Some(_), Some(count)) = (numbers.next(), numbers.next(), numbers.next())
                else {
                    return false;
                };
                (inside..inside + count).contains(&id.into())
            })
        })
    };
    [0x6000_0000 + pid % 0x1000_0000, 60_000 + pid % 5_000].into_iter().find(|id| mapped(*id))
}

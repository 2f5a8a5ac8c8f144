//! The last process before the program: it confines itself, layer by layer, and becomes the program.

use super::layer::Confinement;
use super::{Limits, landlock, root, seccomp};
use nix::sched::{CloneFlags, unshare};
use rustix::process::{Resource, Rlimit, Signal, set_parent_process_death_signal, setrlimit};
use rustix::thread::{
    CapabilitySet, CapabilitySets, clear_ambient_capability_set, set_capabilities, set_no_new_privs,
    set_thread_groups, set_thread_res_gid, set_thread_res_uid,
};
use serde::{Deserialize, Serialize};
use std::io::Write;
use std::os::unix::process::CommandExt;
use std::path::PathBuf;
use std::process::Command;

/// Arguments of a stage, passed as one JSON text.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct SandboxStage {
    pub(super) layers: Vec<Confinement>,
    /// Report on stdout which layers could be applied, instead of becoming a program.
    pub(super) probe: bool,
    /// Secret prefix of failure messages, so that no program can fake one.
    pub(super) nonce: String,
    pub(super) argv: Vec<String>,
    pub(super) limits: Limits,
    pub(super) reads: Vec<PathBuf>,
    /// The prepared root; `None` without one.
    pub(super) root: Option<PathBuf>,
    /// The scratch folder, as the program sees it.
    pub(super) scratch: PathBuf,
    /// The user and group to become.
    pub(super) id: Option<u32>,
}

/// Exit status of a stage that failed.
pub(super) const FAILED: i32 = 125;

/// Applies the layers and runs the program; returns only after a failure.
pub(super) fn main(config: &str) -> ! {
    let failed = |nonce: &str, why: String| -> ! {
        let _ = std::io::stderr().write_all(format!("{nonce}{why}").as_bytes());
        std::process::exit(FAILED)
    };
    let stage: SandboxStage = match serde_json::from_str(config) {
        Ok(stage) => stage,
        Err(e) => failed("", e.to_string()),
    };
    let mut results: Vec<(Confinement, Option<String>)> = Vec::new();
    if let Err(e) = set_no_new_privs(true) {
        failed(&stage.nonce, format!("no_new_privs: {e}"));
    }
    let mut apply = |layers: &[Confinement]| {
        for layer in layers.iter().copied().filter(|l| stage.layers.contains(l)) {
            match stage.apply(layer) {
                Err(why) if !stage.probe => failed(&stage.nonce, format!("layer {layer}: {why}")),
                applied => results.push((layer, applied.err())),
            }
        }
    };
    apply(&[Confinement::Mount, Confinement::User]);
    // After the change of user, which would untie it, and before the filter, which would refuse it.
    if let Err(e) = stage.tie_to_supervisor() {
        failed(&stage.nonce, format!("parent death signal: {e}"));
    }
    apply(&[Confinement::Landlock, Confinement::Scope, Confinement::Seccomp, Confinement::Rlimits]);
    if stage.probe {
        let text = serde_json::to_string(&results).unwrap_or_default();
        let _ = std::io::stdout().write_all(text.as_bytes());
        std::process::exit(0);
    }
    if let Err(e) = std::env::set_current_dir(&stage.scratch) {
        failed(&stage.nonce, format!("the scratch folder {}: {e}", stage.scratch.display()));
    }
    let Some(program) = stage.argv.first() else { failed(&stage.nonce, "no program was given".into()) };
    let error = Command::new(program).args(&stage.argv[1..]).exec();
    failed(&stage.nonce, format!("{program}: {error}"))
}

impl SandboxStage {
    fn apply(&self, layer: Confinement) -> Result<(), String> {
        match layer {
            Confinement::Mount => {
                let Some(root) = &self.root else { return Err("there is no root to enter".into()) };
                unshare(CloneFlags::CLONE_NEWNS).map_err(|e| e.to_string())?;
                root::enter(root, &self.scratch, self.limits.scratch(), self.id).map_err(|e| e.to_string())
            }
            Confinement::User => self.give_up_rights().map_err(|e| e.to_string()),
            Confinement::Landlock => landlock::files(&self.reads, &self.scratch),
            Confinement::Scope => landlock::scopes(),
            Confinement::Seccomp => seccomp::apply(self.layers.contains(&Confinement::Mount)),
            Confinement::Rlimits => self.limit().map_err(|e| e.to_string()),
            Confinement::Pid | Confinement::Net | Confinement::Ipc => Ok(()), // the supervisor's
        }
    }

    fn give_up_rights(&self) -> rustix::io::Result<()> {
        if let Some(id) = self.id {
            let (uid, gid) = (rustix::process::Uid::from_raw(id), rustix::process::Gid::from_raw(id));
            set_thread_groups(&[])?;
            set_thread_res_gid(gid, gid, gid)?;
            set_thread_res_uid(uid, uid, uid)?;
        }
        clear_ambient_capability_set()?;
        let none = CapabilitySet::empty();
        set_capabilities(None, CapabilitySets { effective: none, permitted: none, inheritable: none })
    }

    /// Makes the program die with the supervisor, even if that is killed.
    fn tie_to_supervisor(&self) -> rustix::io::Result<()> {
        use rustix::event::{PollFd, PollFlags, Timespec, poll};
        set_parent_process_death_signal(Some(Signal::KILL))?;
        // One that is gone already reads nothing.
        let out = std::io::stdout();
        let mut fds = [PollFd::new(&out, PollFlags::empty())];
        let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 0 }));
        match fds[0].revents().contains(PollFlags::ERR) {
            true => Err(rustix::io::Errno::PIPE),
            false => Ok(()),
        }
    }

    fn limit(&self) -> rustix::io::Result<()> {
        let limits = &self.limits;
        let mut all = vec![
            (Resource::Cpu, limits.cpu_s()),
            (Resource::Fsize, limits.scratch()),
            (Resource::Nofile, limits.files),
            (Resource::Core, 0),
            (Resource::Memlock, 0),
            (Resource::Msgqueue, 0),
            (Resource::As, limits.memory()),
        ];
        if self.layers.contains(&Confinement::User) {
            all.push((Resource::Nproc, limits.processes)); // of a user who has no other processes
        }
        all.into_iter()
            .try_for_each(|(what, most)| setrlimit(what, Rlimit { current: Some(most), maximum: Some(most) }))
    }
}

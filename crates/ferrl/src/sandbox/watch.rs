//! Runs one command within its limits: writes its stdin, collects its output, checks memory and time, and kills it with all its
//! descendants at the end.

use super::ProgramEnd;
use super::family::ProcessFamily;
use super::limits::Limits;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use rustix::fs::{OFlags, fcntl_getfl, fcntl_setfl};
use std::io::{ErrorKind, Read, Write};
use std::os::fd::{AsFd, BorrowedFd, OwnedFd};
use std::os::unix::process::{CommandExt, ExitStatusExt};
use std::path::Path;
use std::process::{Child, ChildStdin, Command, ExitStatus, Stdio};
use std::time::{Duration, Instant};

/// Interval of checks of memory, processes and the scratch folder.
const LOOK: Duration = Duration::from_millis(20);
/// How long to wait for pipes that a process outside of the family holds open.
const DRAIN: Duration = Duration::from_millis(200);

/// What surrounds a run.
pub(super) struct Surroundings<'a> {
    pub(super) family: ProcessFamily,
    /// End of file (the other side is closed) ends the run.
    pub(super) control: Option<BorrowedFd<'a>>,
    /// Requests the end of the run.
    pub(super) stopped: &'a dyn Fn() -> bool,
    /// A scratch folder whose size nothing else limits.
    pub(super) scratch: Option<&'a Path>,
    /// Whether the count of processes is for this loop to limit.
    pub(super) count: bool,
}

/// How it ended, stdout and stderr.
pub(super) type Watched = (ProgramEnd, Vec<u8>, Vec<u8>);

/// Runs a command to its end, or to the first limit it hits.
pub(super) fn run(mut command: Command, stdin: &[u8], limits: &Limits, around: &Surroundings<'_>) -> Watched {
    command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped()).process_group(0);
    let child = match command.spawn() {
        Ok(child) => child,
        Err(e) => return (ProgramEnd::CannotStart(e.to_string()), Vec::new(), Vec::new()),
    };
    let mut running = match Running::new(child, stdin, limits) {
        Ok(running) => running,
        Err((mut child, why)) => {
            around.family.kill(child.id() as i32);
            let _ = child.wait();
            return (ProgramEnd::CannotStart(why), Vec::new(), Vec::new());
        }
    };
    let cut = running.until_it_ends(around);
    around.family.kill(running.pid());
    let status = running.child.wait();
    around.family.reap();
    let flood = running.drain();
    let end = match (cut.or(flood), status) {
        (Some(end), _) => end,
        (None, Ok(status)) => ended(status),
        (None, Err(e)) => ProgramEnd::Killed(e.to_string()),
    };
    let [(_, out), (_, err)] = running.output;
    (end, out, err)
}

fn ended(status: ExitStatus) -> ProgramEnd {
    match (status.code(), status.signal()) {
        (Some(code), _) => ProgramEnd::Finished(code),
        (None, Some(signal)) => ProgramEnd::Killed(format!("signal {signal}")),
        (None, None) => ProgramEnd::Killed(status.to_string()),
    }
}

struct Running<'a> {
    child: Child,
    /// Readable once the process has ended, where the system has such a thing.
    ending: Option<OwnedFd>,
    stdin: Option<ChildStdin>,
    unsent: &'a [u8],
    /// stdout and stderr: the pipe while it is open, and what came.
    output: [(Option<std::fs::File>, Vec<u8>); 2],
    limits: &'a Limits,
    start: Instant,
}

impl<'a> Running<'a> {
    fn new(mut child: Child, stdin: &'a [u8], limits: &'a Limits) -> Result<Self, (Child, String)> {
        let pipes = (child.stdin.take(), child.stdout.take(), child.stderr.take());
        let (Some(input), Some(out), Some(err)) = pipes else {
            return Err((child, "it has no pipes".into()));
        };
        let (out, err) = (OwnedFd::from(out), OwnedFd::from(err));
        for fd in [input.as_fd(), out.as_fd(), err.as_fd()] {
            let made = fcntl_getfl(fd).and_then(|flags| fcntl_setfl(fd, flags | OFlags::NONBLOCK));
            if let Err(e) = made {
                return Err((child, e.to_string()));
            }
        }
        let output = [out, err].map(|fd| (Some(std::fs::File::from(fd)), Vec::new()));
        let ending = ending(&child);
        Ok(Running {
            child,
            ending,
            stdin: Some(input),
            unsent: stdin,
            output,
            limits,
            start: Instant::now(),
        })
    }

    fn pid(&self) -> i32 {
        self.child.id() as i32
    }

    /// Until the program ends; the limit that it hit, where it hit one.
    fn until_it_ends(&mut self, around: &Surroundings<'_>) -> Option<ProgramEnd> {
        let deadline = self.start + self.limits.wall().min(Duration::from_secs(1 << 30));
        let mut look = self.start + LOOK;
        loop {
            let now = Instant::now();
            if now >= deadline {
                return Some(ProgramEnd::TimeOut);
            }
            let wait = look.min(deadline).saturating_duration_since(now);
            let wait = if self.ending.is_some() { wait } else { wait.min(Duration::from_millis(2)) };
            let (over, lost) = self.wait(wait, around.control);
            if lost || (around.stopped)() {
                return Some(ProgramEnd::Stopped);
            }
            self.feed();
            if let Some(flood) = self.collect() {
                return Some(flood);
            }
            if over || self.ending.is_none() && has_ended(self.pid()) {
                return None;
            }
            let begun = Instant::now();
            if begun >= look {
                if let Some(end) = self.excess(around) {
                    return Some(end);
                }
                // Checks of many processes or files take at most a tenth of the time.
                look = Instant::now() + LOOK.max(begun.elapsed() * 10);
            }
        }
    }

    /// Waits for an event; returns whether the program is over, and whether the client has gone.
    fn wait(&self, time: Duration, control: Option<BorrowedFd<'_>>) -> (bool, bool) {
        let mut fds: Vec<PollFd<'_>> = Vec::with_capacity(5);
        let (mut ending, mut asker) = (None, None);
        if let Some(fd) = &self.ending {
            ending = Some(fds.len());
            fds.push(PollFd::new(fd, PollFlags::IN));
        }
        if let Some(fd) = control {
            asker = Some(fds.len());
            fds.push(PollFd::from_borrowed_fd(fd, PollFlags::empty()));
        }
        fds.extend(
            self.output.iter().filter_map(|(pipe, _)| pipe.as_ref()).map(|p| PollFd::new(p, PollFlags::IN)),
        );
        fds.extend(self.stdin.iter().map(|pipe| PollFd::new(pipe, PollFlags::OUT)));
        let time = Timespec { tv_sec: time.as_secs() as i64, tv_nsec: time.subsec_nanos().into() };
        if poll(&mut fds, Some(&time)).is_err() {
            return (false, false);
        }
        let over = ending.is_some_and(|i| !fds[i].revents().is_empty());
        let lost = asker.is_some_and(|i| fds[i].revents().intersects(PollFlags::HUP | PollFlags::ERR));
        (over, lost)
    }

    fn feed(&mut self) {
        let Some(pipe) = &mut self.stdin else { return };
        while !self.unsent.is_empty() {
            match pipe.write(self.unsent) {
                Ok(0) => break,
                Ok(n) => self.unsent = &self.unsent[n..],
                Err(e) if e.kind() == ErrorKind::WouldBlock => return,
                Err(e) if e.kind() == ErrorKind::Interrupted => {}
                Err(_) => break, // it does not read on, which is its own business
            }
        }
        self.stdin = None;
    }

    /// Takes what has come; an end where it is more than the program may write.
    fn collect(&mut self) -> Option<ProgramEnd> {
        let mut chunk = [0u8; 1 << 16];
        let mut left = self.limits.output() - self.output.iter().map(|(_, b)| b.len()).sum::<usize>();
        for (pipe, bytes) in &mut self.output {
            while let Some(open) = pipe {
                match open.read(&mut chunk) {
                    Ok(0) => *pipe = None,
                    Ok(n) if n > left => {
                        bytes.extend(&chunk[..left]);
                        return Some(ProgramEnd::Output);
                    }
                    Ok(n) => {
                        bytes.extend(&chunk[..n]);
                        left -= n;
                    }
                    Err(e) if e.kind() == ErrorKind::WouldBlock => break,
                    Err(e) if e.kind() == ErrorKind::Interrupted => {}
                    Err(_) => *pipe = None,
                }
            }
        }
        None
    }

    /// What was written before the end.
    fn drain(&mut self) -> Option<ProgramEnd> {
        let patience = Instant::now() + DRAIN;
        loop {
            if let Some(flood) = self.collect() {
                return Some(flood);
            }
            if self.output.iter().all(|(pipe, _)| pipe.is_none()) || Instant::now() > patience {
                return None;
            }
            let mut fds: Vec<PollFd<'_>> = Vec::with_capacity(2);
            let open = self.output.iter().filter_map(|(pipe, _)| pipe.as_ref());
            fds.extend(open.map(|p| PollFd::new(p, PollFlags::IN)));
            let _ = poll(&mut fds, Some(&Timespec { tv_sec: 0, tv_nsec: 10_000_000 }));
        }
    }

    /// Checks the limits that need polling.
    fn excess(&self, around: &Surroundings<'_>) -> Option<ProgramEnd> {
        let usage = around.family.usage(self.pid());
        if usage.resident > self.limits.memory() {
            return Some(ProgramEnd::Memory);
        }
        if around.count && usage.tasks > self.limits.processes {
            return Some(ProgramEnd::Killed(format!(
                "{} processes of {} allowed",
                usage.tasks, self.limits.processes
            )));
        }
        let folder = around.scratch?;
        let size = folder_size(folder);
        (size > self.limits.scratch()).then(|| {
            ProgramEnd::Killed(format!(
                "{size} bytes in the scratch folder of {} allowed",
                self.limits.scratch()
            ))
        })
    }
}

#[cfg(target_os = "linux")]
fn ending(child: &Child) -> Option<OwnedFd> {
    use rustix::process::{Pid, PidfdFlags, pidfd_open};
    pidfd_open(Pid::from_raw(child.id() as i32)?, PidfdFlags::empty()).ok()
}

#[cfg(not(target_os = "linux"))]
fn ending(_: &Child) -> Option<OwnedFd> {
    None
}

/// Whether it has ended; it is not reaped, so that its number stays taken until its group is killed.
fn has_ended(pid: i32) -> bool {
    use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
    let Some(pid) = Pid::from_raw(pid) else { return true };
    let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
    !matches!(waitid(WaitId::Pid(pid), look), Ok(None))
}

/// Bytes on disk in a folder, by the blocks that files take.
fn folder_size(folder: &Path) -> u64 {
    use std::os::unix::fs::MetadataExt;
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    entries
        .filter_map(|entry| Some((entry.path(), entry.metadata().ok()?)))
        .map(|(path, meta)| if meta.is_dir() { folder_size(&path) + 4096 } else { meta.blocks() * 512 })
        .sum()
}

//! Client of a supervisor process: starts it, sends requests with a deadline, and ends it with its program.

use super::protocol::{DoneFrame, Hello, OpenFrame, RunFrame, VERSION, receive, send};
use super::{ProgramEnd, Ran, SandboxProgram, launcher};
use crate::sandbox::Limits;
use rustix::event::{PollFd, PollFlags, Timespec, poll};
use std::io::{Error, ErrorKind, Read};
use std::os::unix::process::CommandExt;
use std::path::{Path, PathBuf};
use std::process::{Child, ChildStdin, ChildStdout, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::time::{Duration, Instant};

/// Interval of interrupt checks.
const LOOK: Duration = Duration::from_millis(50);
/// Additional time of a supervisor beyond the program's limit.
const GRACE: Duration = Duration::from_secs(10);

/// Error kind of a cancelled read; `Interrupted` would be retried.
const INTERRUPTED: ErrorKind = ErrorKind::ConnectionAborted;

/// A running supervisor.
pub(super) struct SupervisorClient {
    child: Child,
    /// Open as long as its programs may run.
    input: Option<ChildStdin>,
    output: ChildStdout,
    base: PathBuf,
}

pub(super) enum ExchangeFailed {
    Interrupted,
    /// The supervisor does not work.
    Broken(String),
}

impl From<Error> for ExchangeFailed {
    fn from(error: Error) -> Self {
        match error.kind() {
            INTERRUPTED => ExchangeFailed::Interrupted,
            ErrorKind::UnexpectedEof | ErrorKind::BrokenPipe => {
                ExchangeFailed::Broken("the supervisor has ended".into())
            }
            _ => ExchangeFailed::Broken(error.to_string()),
        }
    }
}

impl SupervisorClient {
    /// Starts one; its report says which layers it has.
    pub(super) fn start(
        executable: &Path,
        open: &OpenFrame,
        interrupt: &AtomicBool,
    ) -> Result<(SupervisorClient, super::ConfinementReport), ExchangeFailed> {
        use std::os::unix::fs::DirBuilderExt;
        std::fs::DirBuilder::new().mode(0o711).create(&open.base)?;
        let mut command = Command::new(executable);
        command.arg0("ferrl").arg(launcher::SUPERVISOR).env_clear().process_group(0);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::null());
        let mut child = command.spawn().map_err(|e| {
            let _ = std::fs::remove_dir(&open.base);
            ExchangeFailed::Broken(format!("{}: {e}", executable.display()))
        })?;
        let (Some(input), Some(output)) = (child.stdin.take(), child.stdout.take()) else {
            return Err(ExchangeFailed::Broken("it has no pipes".into()));
        };
        let mut supervisor = SupervisorClient { child, input: Some(input), output, base: open.base.clone() };
        supervisor.send(open, &[])?;
        let deadline = Instant::now() + 3 * GRACE;
        let hello: (Hello, Vec<u8>) = supervisor.receive(deadline, interrupt)?;
        if hello.0.version != VERSION {
            return Err(ExchangeFailed::Broken(format!(
                "the launcher {} is of another version of ferrl",
                executable.display()
            )));
        }
        Ok((supervisor, hello.0.report))
    }

    pub(super) fn run(
        &mut self,
        program: &SandboxProgram,
        limits: &Limits,
        interrupt: &AtomicBool,
    ) -> Result<Ran, ExchangeFailed> {
        let request =
            RunFrame { argv: program.argv.clone(), env: program.env.clone(), limits: limits.clone() };
        self.send(&request, &program.stdin)?;
        let deadline = Instant::now() + limits.wall().min(Duration::from_secs(1 << 30)) + GRACE;
        let (done, mut stdout): (DoneFrame, Vec<u8>) = self.receive(deadline, interrupt)?;
        let stderr = stdout.split_off(done.stdout.min(stdout.len()));
        match done.end {
            ProgramEnd::Stopped => Err(ExchangeFailed::Interrupted),
            end => Ok(Ran { end, stdout, stderr, seconds: done.seconds }),
        }
    }

    fn send<T: serde::Serialize>(&mut self, header: &T, bytes: &[u8]) -> Result<(), ExchangeFailed> {
        let Some(input) = &mut self.input else {
            return Err(ExchangeFailed::Broken("it has been ended".into()));
        };
        Ok(send(input, header, bytes)?)
    }

    fn receive<T: serde::de::DeserializeOwned>(
        &mut self,
        deadline: Instant,
        interrupt: &AtomicBool,
    ) -> Result<(T, Vec<u8>), ExchangeFailed> {
        let mut timed = Timed { pipe: &mut self.output, deadline, interrupt };
        receive(&mut timed)?.ok_or_else(|| ExchangeFailed::Broken("the supervisor has ended".into()))
    }
}

impl Drop for SupervisorClient {
    /// With its stdin closed it kills its program, cleans up and ends.
    fn drop(&mut self) {
        self.input = None;
        let patience = Instant::now() + Duration::from_secs(2);
        while Instant::now() < patience {
            match self.child.try_wait() {
                Ok(None) => std::thread::sleep(Duration::from_micros(500)),
                _ => break,
            }
        }
        let _ = self.child.kill();
        let _ = self.child.wait();
        let _ = std::fs::remove_dir_all(&self.base);
    }
}

/// Reads with a deadline.
struct Timed<'a> {
    pipe: &'a mut ChildStdout,
    deadline: Instant,
    interrupt: &'a AtomicBool,
}

impl Read for Timed<'_> {
    fn read(&mut self, into: &mut [u8]) -> std::io::Result<usize> {
        loop {
            if self.interrupt.load(Ordering::SeqCst) {
                return Err(INTERRUPTED.into());
            }
            let left = self.deadline.saturating_duration_since(Instant::now());
            if left.is_zero() {
                return Err(ErrorKind::TimedOut.into());
            }
            let time = Timespec { tv_sec: 0, tv_nsec: left.min(LOOK).as_nanos() as i64 };
            let mut fds = [PollFd::new(&*self.pipe, PollFlags::IN)];
            if matches!(poll(&mut fds, Some(&time)), Ok(n) if n > 0) {
                return self.pipe.read(into);
            }
        }
    }
}

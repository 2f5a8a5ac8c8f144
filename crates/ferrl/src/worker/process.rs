//! One worker process: started, spoken to under a deadline, and ended with everything it started.

use super::failure::Kind;
use super::{WorkerOptions, pipes};
use serde_json::{Value, json};
use std::hash::{BuildHasher, Hasher, RandomState};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{Receiver, RecvTimeoutError, SyncSender, TrySendError};
use std::time::{Duration, Instant};

const HOST: &str = include_str!("host.py");
/// The variable by which stray descendants are found.
const TAG: &str = "FERRL_WORKER";
/// How often a wait looks whether the process is still there.
const LOOK: Duration = Duration::from_millis(50);

/// A running worker.
pub(super) struct Process {
    child: Child,
    tag: String,
    input: SyncSender<Vec<u8>>,
    output: Receiver<pipes::Line>,
    stderr: pipes::Tail,
    calls: u64,
    killed: bool,
    /// Answers that came for calls that were over.
    pub(super) stale: u64,
}

impl Process {
    /// Starts one and waits until the user's file is loaded.
    pub(super) fn start(options: &WorkerOptions, label: &str) -> Result<Process, (Kind, Vec<String>)> {
        let failed = |why: String| (Kind::Start(why), Vec::new());
        let tag = nonce();
        let mut command = Command::new(&options.python);
        command.args(["-c", HOST]).envs(crate::secrets::for_children()).env(TAG, &tag);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut child = command.spawn().map_err(|e| failed(format!("{}: {e}", options.python)))?;
        let (Some(stdin), Some(stdout), Some(errors)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            return Err(failed("it has no pipes".into()));
        };
        let mut process = Process {
            child,
            tag,
            input: pipes::writer(stdin),
            output: pipes::reader(stdout, options.max_line),
            stderr: pipes::Tail::follow(errors, label, options.log.clone()),
            calls: 0,
            killed: false,
            stale: 0,
        };
        let request = json!({
            "file": options.file, "functions": options.functions, "parent": std::process::id(),
        });
        match process.ask(request, options.start_timeout, &options.interrupt) {
            Ok(answer) => match refusal(&answer) {
                None => Ok(process),
                Some(why) => Err((Kind::Start(why), process.end().1)),
            },
            Err(kind) => {
                let (status, stderr) = process.end();
                Err((kind.with_status(status), stderr))
            }
        }
    }

    /// Sends a request and waits for its own answer; anything else that comes is refused.
    pub(super) fn ask(
        &mut self,
        mut request: Value,
        timeout: Duration,
        interrupt: &AtomicBool,
    ) -> Result<Value, Kind> {
        let deadline = Instant::now() + timeout;
        self.calls += 1;
        let nonce = nonce();
        request["id"] = json!(self.calls);
        request["nonce"] = json!(nonce);
        request["timeout"] = json!(timeout.as_secs_f64());
        let mut line = request.to_string().into_bytes();
        line.push(b'\n');
        // The writer holds one line at a time; full means that the last one was never read.
        match self.input.try_send(line) {
            Err(TrySendError::Full(_)) => return Err(Kind::TimedOut(timeout)),
            Err(TrySendError::Disconnected(_)) => return Err(Kind::Exited(String::new())),
            Ok(()) => {}
        }
        loop {
            let left = deadline.saturating_duration_since(Instant::now());
            match self.output.recv_timeout(left.min(LOOK)) {
                Ok(pipes::Line::Text(text)) => {
                    let garbage = || Kind::Garbage(String::from_utf8_lossy(&text).chars().take(80).collect());
                    let answer: Value = serde_json::from_slice(&text).map_err(|_| garbage())?;
                    match answer["id"].as_u64() {
                        Some(id) if id == self.calls && answer["nonce"] == nonce.as_str() => {
                            return Ok(answer);
                        }
                        Some(id) if id < self.calls && answer["nonce"].is_string() => self.stale += 1,
                        _ => return Err(garbage()),
                    }
                }
                Ok(pipes::Line::TooLong(limit)) => return Err(Kind::TooLong(limit)),
                Err(RecvTimeoutError::Disconnected) => return Err(Kind::Exited(String::new())),
                Err(RecvTimeoutError::Timeout) if self.has_ended() => {
                    return Err(Kind::Exited(String::new()));
                }
                Err(RecvTimeoutError::Timeout) => {}
            }
            if interrupt.load(Ordering::SeqCst) {
                return Err(Kind::Interrupted);
            }
            if Instant::now() >= deadline {
                return Err(Kind::TimedOut(timeout));
            }
        }
    }

    /// The last lines of stderr.
    pub(super) fn tail(&self) -> Vec<String> {
        self.stderr.lines()
    }

    /// Ends it and all it started; its exit status and last words.
    pub(super) fn end(mut self) -> (String, Vec<String>) {
        let status = self.kill();
        // With every writer gone the pipe ends and the last words are complete.
        self.stderr.wait(Duration::from_millis(200));
        (status, self.stderr.lines())
    }

    #[cfg(unix)]
    fn has_ended(&mut self) -> bool {
        use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
        // Without reaping, so that the process group's number stays taken until it is killed.
        let Some(pid) = Pid::from_raw(self.child.id() as i32) else { return true };
        let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        !matches!(waitid(WaitId::Pid(pid), look), Ok(None))
    }

    #[cfg(not(unix))]
    fn has_ended(&mut self) -> bool {
        !matches!(self.child.try_wait(), Ok(None))
    }

    fn kill(&mut self) -> String {
        self.killed = true;
        // A process that ended by itself is given the time to be seen as ended, for its own status.
        for _ in 0..20 {
            if self.has_ended() || !self.output_closed() {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        #[cfg(unix)]
        {
            use rustix::process::{Pid, Signal, kill_process, kill_process_group};
            if let Some(pid) = Pid::from_raw(self.child.id() as i32) {
                let _ = kill_process_group(pid, Signal::KILL);
            }
            for _ in 0..3 {
                let strays = tagged(&self.tag);
                if strays.is_empty() {
                    break;
                }
                for pid in strays.into_iter().filter_map(Pid::from_raw) {
                    let _ = kill_process(pid, Signal::KILL);
                }
            }
        }
        let _ = self.child.kill();
        let patience = Instant::now() + Duration::from_secs(1);
        while Instant::now() < patience {
            match self.child.try_wait() {
                Ok(None) => std::thread::sleep(Duration::from_millis(1)),
                Ok(Some(status)) => return status.to_string(),
                Err(e) => return e.to_string(),
            }
        }
        "it cannot be ended".into()
    }

    fn output_closed(&self) -> bool {
        matches!(self.output.try_recv(), Err(std::sync::mpsc::TryRecvError::Disconnected))
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        if !self.killed {
            self.kill();
        }
    }
}

impl Kind {
    /// An end without a status gets the one that was found.
    pub(super) fn with_status(self, status: String) -> Kind {
        match self {
            Kind::Exited(_) => Kind::Exited(status),
            other => other,
        }
    }
}

/// Why the host script did not accept the user's file.
fn refusal(answer: &Value) -> Option<String> {
    if answer["ready"] == true {
        return None;
    }
    if let Some(name) = answer["missing"].as_str() {
        let there: Vec<&str> =
            answer["there"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let hint = ferrl_engine::nearest(name, there.iter().copied());
        let hint = hint.map(|h| format!("; did you mean {h:?}?")).unwrap_or_default();
        return Some(format!("the file has no function {name:?}; it has {}{hint}", there.join(", ")));
    }
    Some(answer["refused"].as_str().unwrap_or("the host script gave no reason").trim_end().to_string())
}

/// Processes that carry the tag in their environment, zombies aside.
#[cfg(unix)]
fn tagged(tag: &str) -> Vec<i32> {
    let want = format!("{TAG}={tag}").into_bytes();
    let entries = std::fs::read_dir("/proc").into_iter().flatten().flatten();
    entries
        .filter_map(|e| e.file_name().to_str()?.parse::<i32>().ok())
        .filter(|pid| {
            let environment = std::fs::read(format!("/proc/{pid}/environ")).unwrap_or_default();
            environment.split(|b| *b == 0).any(|entry| entry == want)
        })
        .collect()
}

/// A word nobody can guess.
fn nonce() -> String {
    let word = || RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}", word(), word())
}

//! One worker process: started, spoken to under a deadline, and ended with everything it started.

use super::failure::{FUNCTIONS, FailureKind, NO_PYTHON};
use super::{WorkerLog, pipes};
use ferrl_kernels::lock;
use serde_json::{Value, json};
use std::collections::HashMap;
use std::hash::{BuildHasher, Hasher, RandomState};
use std::process::{Child, Command, Stdio};
use std::sync::atomic::{AtomicBool, Ordering};
use std::sync::mpsc::{RecvTimeoutError, SyncSender, TrySendError, sync_channel};
use std::sync::{Arc, Mutex};
use std::time::{Duration, Instant};

/// The variable by which stray descendants are found.
const TAG: &str = "FERRL_WORKER";
/// How often a wait looks whether the process is still there, and how large it is.
const LOOK: Duration = Duration::from_millis(50);

/// How a worker is started.
pub(crate) struct Spawn<'a> {
    pub python: &'a str,
    /// The script at the other end of the pipe; `guard.py` is prepended to it.
    pub script: &'a str,
    /// The first request: what to load.
    pub request: Value,
    /// The longest that loading may take.
    pub start_timeout: Duration,
    /// The longest answer in bytes.
    pub max_line: usize,
    /// The most resident memory in bytes, looked at while a call is waited for.
    pub memory: Option<u64>,
    /// Who wants to see what the worker prints.
    pub log: Option<WorkerLog>,
    /// Ends every wait when it is raised.
    pub interrupt: Arc<AtomicBool>,
}

/// A running worker. Several threads may ask it at once, where its script can serve them.
pub(crate) struct Process {
    child: Mutex<Child>,
    id: u32,
    tag: String,
    input: SyncSender<Vec<u8>>,
    routes: Arc<Mutex<Routes>>,
    stderr: pipes::Tail,
    killed: AtomicBool,
    memory: Option<u64>,
    interrupt: Arc<AtomicBool>,
    /// What it reported of itself when it was ready.
    pub ready: Value,
}

/// Who waits for which answer.
#[derive(Default)]
struct Routes {
    /// Requests so far.
    calls: u64,
    waiting: HashMap<u64, (String, SyncSender<Value>)>,
    /// Why nothing more comes.
    over: Option<FailureKind>,
    /// Answers that came for calls that were over.
    stale: u64,
}

impl Routes {
    /// Notes who waits; the number of the request.
    fn wait(&mut self, nonce: String, sender: SyncSender<Value>) -> Result<u64, FailureKind> {
        if let Some(kind) = &self.over {
            return Err(kind.clone());
        }
        self.calls += 1;
        self.waiting.insert(self.calls, (nonce, sender));
        Ok(self.calls)
    }

    /// Passes a reply to the caller that waits for it; any other message ends the process.
    fn take(&mut self, text: &[u8]) {
        let answer = serde_json::from_slice::<Value>(text).ok();
        let id = answer.as_ref().and_then(|a| a["id"].as_u64());
        if let (Some(answer), Some(id)) = (answer, id) {
            let ours = self.waiting.get(&id).is_some_and(|(nonce, _)| answer["nonce"] == nonce.as_str());
            if ours && let Some((_, waiting)) = self.waiting.remove(&id) {
                let _ = waiting.try_send(answer);
                return;
            }
            if !self.waiting.contains_key(&id) && id <= self.calls && answer["nonce"].is_string() {
                self.stale += 1;
                return;
            }
        }
        self.end(FailureKind::Garbage(String::from_utf8_lossy(text).chars().take(80).collect()));
    }

    fn end(&mut self, kind: FailureKind) {
        self.over.get_or_insert(kind);
        self.waiting.clear(); // callers that wait get an error
    }
}

impl Process {
    /// Starts one and waits until it has loaded what it is to run.
    pub(crate) fn start(spawn: Spawn<'_>, label: &str) -> Result<Process, (FailureKind, Vec<String>)> {
        let failed = |why: String| (FailureKind::Start(why), Vec::new());
        let tag = nonce();
        let mut command = Command::new(spawn.python);
        let script = format!("{}\n{}", include_str!("guard.py"), spawn.script);
        command.args(["-c", &script]).envs(crate::secrets::for_children()).env(TAG, &tag);
        command.stdin(Stdio::piped()).stdout(Stdio::piped()).stderr(Stdio::piped());
        #[cfg(unix)]
        std::os::unix::process::CommandExt::process_group(&mut command, 0);
        let mut child = command.spawn().map_err(|e| failed(format!("{NO_PYTHON} {}: {e}", spawn.python)))?;
        let (Some(stdin), Some(stdout), Some(errors)) =
            (child.stdin.take(), child.stdout.take(), child.stderr.take())
        else {
            return Err(failed("it has no pipes".into()));
        };
        let mut process = Process {
            id: child.id(),
            child: Mutex::new(child),
            tag,
            input: pipes::writer(stdin),
            routes: Arc::default(),
            stderr: pipes::Tail::follow(errors, label, spawn.log),
            killed: AtomicBool::new(false),
            memory: spawn.memory,
            interrupt: spawn.interrupt,
            ready: Value::Null,
        };
        let routes = process.routes.clone();
        pipes::reader(stdout, spawn.max_line, move |line| {
            let mut routes = lock(&routes);
            match line {
                Some(pipes::WorkerLine::Text(text)) => routes.take(&text),
                Some(pipes::WorkerLine::TooLong(limit)) => routes.end(FailureKind::TooLong(limit)),
                None => routes.end(FailureKind::Exited(String::new())),
            }
            routes.over.is_none()
        });
        let mut request = spawn.request;
        request["parent"] = json!(std::process::id());
        match process.ask(request, spawn.start_timeout) {
            Ok(answer) => match refusal(&answer) {
                None => {
                    process.ready = answer;
                    Ok(process)
                }
                Some(why) => Err((FailureKind::Start(why), process.end().1)),
            },
            Err(kind) => {
                let (status, stderr) = process.end();
                Err((kind.with_status(status), stderr))
            }
        }
    }

    /// Sends a request and waits for its own answer.
    pub(crate) fn ask(&self, mut request: Value, timeout: Duration) -> Result<Value, FailureKind> {
        let deadline = Instant::now() + timeout;
        let (nonce, (sender, answer)) = (nonce(), sync_channel(1));
        request["nonce"] = json!(nonce);
        if request["timeout"].is_null() {
            request["timeout"] = json!(timeout.as_secs_f64());
        }
        let id = lock(&self.routes).wait(nonce, sender)?;
        request["id"] = json!(id);
        // Thousands may wait for one process: together they look as often as one would.
        let look = LOOK * (1 + lock(&self.routes).waiting.len() as u32 / 16);
        let result = self.send(&request, timeout).and_then(|()| {
            loop {
                let left = deadline.saturating_duration_since(Instant::now());
                match answer.recv_timeout(left.min(look)) {
                    Ok(answer) => return Ok(answer),
                    Err(RecvTimeoutError::Disconnected) => {
                        return Err(lock(&self.routes)
                            .over
                            .clone()
                            .unwrap_or(FailureKind::Exited(String::new())));
                    }
                    Err(RecvTimeoutError::Timeout) if self.has_ended() => {
                        return Err(FailureKind::Exited(String::new()));
                    }
                    Err(RecvTimeoutError::Timeout) => {}
                }
                if self.interrupt.load(Ordering::SeqCst) {
                    return Err(FailureKind::Interrupted);
                }
                if let Some((limit, size)) =
                    self.memory.zip(self.resident()).filter(|(limit, size)| size > limit)
                {
                    return Err(FailureKind::Memory { size, limit });
                }
                if Instant::now() >= deadline {
                    return Err(FailureKind::TimedOut(timeout));
                }
            }
        });
        lock(&self.routes).waiting.remove(&id);
        result
    }

    /// Tells it something that it does not answer.
    pub(crate) fn tell(&self, request: &Value) {
        let _ = self.send(request, Duration::ZERO);
    }

    /// The writer holds few lines; full means that the process reads nothing.
    fn send(&self, request: &Value, timeout: Duration) -> Result<(), FailureKind> {
        let mut line = request.to_string().into_bytes();
        line.push(b'\n');
        match self.input.try_send(line) {
            Err(TrySendError::Full(_)) => Err(FailureKind::TimedOut(timeout)),
            Err(TrySendError::Disconnected(_)) => Err(FailureKind::Exited(String::new())),
            Ok(()) => Ok(()),
        }
    }

    /// Answers that came too late or twice since this was asked last: they come between calls as well as within them.
    pub(crate) fn new_stale(&self) -> u64 {
        std::mem::take(&mut lock(&self.routes).stale)
    }

    /// The last lines of stderr.
    pub(crate) fn tail(&self) -> Vec<String> {
        self.stderr.lines()
    }

    /// Ends it and all it started; its exit status and last words.
    pub(crate) fn end(&self) -> (String, Vec<String>) {
        let status = self.kill();
        // With every writer gone the pipe ends and the last words are complete.
        self.stderr.wait(Duration::from_millis(200));
        (status, self.stderr.lines())
    }

    /// Bytes of memory it has, where the system says so.
    fn resident(&self) -> Option<u64> {
        let status = std::fs::read_to_string(format!("/proc/{}/status", self.id)).ok()?;
        let line = status.lines().find_map(|line| line.strip_prefix("VmRSS:"))?;
        Some(line.split_whitespace().next()?.parse::<u64>().ok()? << 10)
    }

    #[cfg(unix)]
    fn has_ended(&self) -> bool {
        use rustix::process::{Pid, WaitId, WaitIdOptions, waitid};
        // Without reaping, so that the process group's number stays taken until it is killed.
        let Some(pid) = Pid::from_raw(self.id as i32) else { return true };
        let look = WaitIdOptions::EXITED | WaitIdOptions::NOHANG | WaitIdOptions::NOWAIT;
        !matches!(waitid(WaitId::Pid(pid), look), Ok(None))
    }

    #[cfg(not(unix))]
    fn has_ended(&self) -> bool {
        !matches!(lock(&self.child).try_wait(), Ok(None))
    }

    fn kill(&self) -> String {
        let mut child = lock(&self.child);
        if self.killed.swap(true, Ordering::SeqCst) {
            return child.try_wait().ok().flatten().map_or_else(String::new, |status| status.to_string());
        }
        // A process that ended by itself is given the time to be seen as ended, for its own status.
        for _ in 0..20 {
            if self.has_ended() || lock(&self.routes).over != Some(FailureKind::Exited(String::new())) {
                break;
            }
            std::thread::sleep(Duration::from_millis(1));
        }
        #[cfg(unix)]
        {
            use rustix::process::{Pid, Signal, kill_process, kill_process_group};
            if let Some(pid) = Pid::from_raw(self.id as i32) {
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
        let _ = child.kill();
        let patience = Instant::now() + Duration::from_secs(1);
        while Instant::now() < patience {
            match child.try_wait() {
                Ok(None) => std::thread::sleep(Duration::from_millis(1)),
                Ok(Some(status)) => return status.to_string(),
                Err(e) => return e.to_string(),
            }
        }
        "it cannot be ended".into()
    }
}

impl Drop for Process {
    fn drop(&mut self) {
        self.kill();
    }
}

impl FailureKind {
    /// An end without a status gets the one that was found.
    pub(crate) fn with_status(self, status: String) -> FailureKind {
        match self {
            FailureKind::Exited(_) => FailureKind::Exited(status),
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
        let mut there: Vec<&str> =
            answer["there"].as_array().into_iter().flatten().filter_map(Value::as_str).collect();
        let near = ferrl_engine::nearest(name, there.iter().copied());
        // The nearest name first: the fix names it.
        there.sort_by_key(|other| near.is_some_and(|near| near != *other));
        let hint = near.map(|near| format!("; did you mean {near:?}?")).unwrap_or_default();
        let there = if there.is_empty() { "none".to_string() } else { there.join(", ") };
        return Some(format!("the file has no function {name:?}{FUNCTIONS}{there}{hint}"));
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

/// A random token that cannot be guessed.
fn nonce() -> String {
    let word = || RandomState::new().build_hasher().finish();
    format!("{:016x}{:016x}", word(), word())
}

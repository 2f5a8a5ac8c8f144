//! Output of results: a file that gets its name once complete, or standard output.

use ferrl::interrupt;
use ferrl::warnings::Warnings;
use ferrl_engine::checkpoint::FILE_LIMIT;
use ferrl_engine::files::undisturbed;
use ferrl_engine::{Class, Error, Result};
use ferrl_kernels::lock;
use serde::Serialize;
use std::borrow::Cow;
use std::fs::{File, OpenOptions, TryLockError};
use std::io::{BufWriter, ErrorKind, IsTerminal, Read, Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};
use std::sync::atomic::AtomicBool;
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Writer of JSON rows to a file or standard output.
///
/// A file is written as `NAME.part` and renamed in [`JsonlOutput::finish`], so that a file of that name is always complete; after a
/// failure the part has the rows written so far.
///
/// A signal that ends the process waits for the row being written, and says where the rows so far are ([`stop`]).
pub struct JsonlOutput {
    target: OutputTarget,
}

enum OutputTarget {
    Stdout(BufWriter<std::io::Stdout>),
    /// An existing device or pipe.
    Direct(PathBuf, BufWriter<File>),
    Part {
        path: PathBuf,
        part: PathBuf,
        file: BufWriter<File>,
    },
}

impl JsonlOutput {
    /// Opens `path`, or standard output for `-`, unless it is one of the inputs or holds something other than rows.
    pub fn beside(path: &Path, inputs: &[impl AsRef<Path>]) -> Result<Self> {
        Self::open(path, inputs, false)
    }

    /// The same with the part of an earlier process as it is; [`JsonlOutput::keep`] cuts it.
    pub fn continuing(path: &Path, inputs: &[impl AsRef<Path>]) -> Result<Self> {
        Self::open(path, inputs, true)
    }

    fn open(path: &Path, inputs: &[impl AsRef<Path>], continues: bool) -> Result<Self> {
        let real = |p: &Path| p.canonicalize().ok();
        let is_read = |input: &Path| real(input).is_some() && real(input) == real(path);
        if path.is_file() && !holds_rows(path) {
            return Err(Error::usage(
                "exists and holds no JSON lines, so it was not written by this command",
            )
            .at(path.display())
            .fix("another name for what is written, or remove the file"));
        }
        if path.is_file() && inputs.iter().any(|input| is_read(input.as_ref())) {
            return Err(Error::usage("is also the input; its rows would be lost")
                .at(path.display())
                .fix("another name for the output"));
        }

        let target = if path.as_os_str() == "-" {
            OutputTarget::Stdout(BufWriter::new(std::io::stdout()))
        } else if path.is_dir() {
            return Err(Error::usage("is a directory, expected a file to write")
                .at(path.display())
                .fix(format!("a file in it, such as {}", path.join("out.jsonl").display())));
        } else if path.exists() && !path.is_file() {
            let file = OpenOptions::new().write(true).open(path).map_err(|e| unwritable(path, &e))?;
            OutputTarget::Direct(path.into(), BufWriter::new(file))
        } else {
            let mut part = path.as_os_str().to_owned();
            part.push(".part");
            let part = PathBuf::from(part);
            let file = Self::own_part(path, &part)?;
            OutputTarget::Part { path: path.into(), part, file }
        };
        let mut output = JsonlOutput { target };
        if !continues {
            output.keep(0)?;
        }
        Ok(output)
    }

    /// Creates and locks a part: two processes writing to one part would mix their rows.
    fn own_part(path: &Path, part: &Path) -> Result<BufWriter<File>> {
        let open = OpenOptions::new().write(true).create(true).truncate(false).open(part);
        let file = open.map_err(|e| unwritable(path, &e))?;
        // A killed process releases its lock after some milliseconds; some file systems have no locks.
        let taken = |_| {
            let taken = matches!(file.try_lock(), Err(TryLockError::WouldBlock));
            taken && {
                std::thread::sleep(Duration::from_millis(10));
                true
            }
        };
        if (0..50).all(taken) {
            return Err(Error::usage("another process is writing it")
                .at(path.display())
                .fix("wait for it, or choose another name"));
        }
        lock(&PARTS).push(part.into());
        Ok(BufWriter::new(file))
    }

    /// Keeps the first bytes of a part that [`JsonlOutput::continuing`] has opened: rows of an earlier process.
    pub fn keep(&mut self, len: u64) -> Result<()> {
        let OutputTarget::Part { part, file, .. } = &mut self.target else { return Ok(()) };
        let kept = file.get_ref().set_len(len).and_then(|()| file.seek(SeekFrom::End(0)));
        kept.map(|_| ()).map_err(|e| unwritable(part, &e))
    }

    /// Writes one row; in a part it is there whatever happens to the process.
    pub fn row(&mut self, row: &impl Serialize) -> Result<()> {
        let mut line =
            serde_json::to_vec(row).map_err(|e| Error::data(format!("cannot write a row as JSON: {e}")))?;
        line.push(b'\n');
        let (written, path) = match &mut self.target {
            OutputTarget::Stdout(out) => (out.write_all(&line), Path::new("standard output")),
            OutputTarget::Direct(path, out) => (out.write_all(&line), path.as_path()),
            OutputTarget::Part { part, file, .. } => {
                let _held = undisturbed();
                (file.write_all(&line).and_then(|()| file.flush()), part.as_path())
            }
        };
        written.map_err(|e| unwritable(path, &e))
    }

    /// `NAME.part`, which holds the rows until all are written.
    pub fn part(&self) -> Option<&Path> {
        match &self.target {
            OutputTarget::Part { part, .. } => Some(part),
            _ => None,
        }
    }

    pub fn flush(&mut self) -> Result<()> {
        let (flushed, path) = match &mut self.target {
            OutputTarget::Stdout(out) => (out.flush(), Path::new("standard output")),
            OutputTarget::Direct(path, out) => (out.flush(), path.as_path()),
            OutputTarget::Part { part, file, .. } => (file.flush(), part.as_path()),
        };
        flushed.map_err(|e| unwritable(path, &e))
    }

    /// Completes the file and gives it its name.
    pub fn finish(mut self) -> Result<()> {
        self.flush()?;
        if let OutputTarget::Part { path, part, file } = &self.target {
            let _held = undisturbed();
            let named = file.get_ref().sync_all().and_then(|()| std::fs::rename(part, path));
            named.map_err(|e| unwritable(path, &e))?;
            forget(&PARTS, part);
        }
        Ok(())
    }
}

/// Whether a file is empty or begins with a line of JSON, as far as 64 KiB tell.
fn holds_rows(path: &Path) -> bool {
    let mut start = Vec::new();
    let read = File::open(path).and_then(|file| file.take(64 << 10).read_to_end(&mut start));
    let line = start.split(|&b| b == b'\n').next().unwrap_or_default();
    let whole = line.len() < start.len() || start.len() < 64 << 10;
    match read {
        Ok(0) => true,
        Ok(_) if whole => serde_json::from_slice::<serde_json::Value>(line).is_ok(),
        Ok(_) => matches!(line[0], b'{' | b'[' | b'"'),
        Err(_) => true, // what cannot be read cannot be judged; writing it fails with its reason
    }
}

impl Drop for JsonlOutput {
    fn drop(&mut self) {
        if let OutputTarget::Part { part, file, .. } = &self.target
            && file.get_ref().metadata().is_ok_and(|m| m.len() == 0)
            && forget(&PARTS, part)
        {
            let _ = std::fs::remove_file(part); // an empty file is of no use
        }
    }
}

/// Writes text to standard output and flushes.
pub fn print(text: &str) -> Result<()> {
    let mut out = std::io::stdout().lock();
    let written = out.write_all(text.as_bytes()).and_then(|()| out.flush());
    written.map_err(|e| unwritable(Path::new("standard output"), &e))
}

/// Writes and flushes generated text: [`visible`] on a terminal, unchanged into a pipe.
pub fn print_generated(text: &str) -> Result<()> {
    match std::io::stdout().is_terminal() {
        true => print(&visible(text)),
        false => print(text),
    }
}

/// Escapes untrusted text for a terminal: data, prompts, completions, output and exceptions of user code. Control characters, which
/// could move the cursor or set a window title, and marks of text direction become escapes such as `\x1b`.
pub fn visible(text: &str) -> Cow<'_, str> {
    let harmless = |c: char| {
        matches!(c, '\n' | '\t')
            || !(c.is_control() || matches!(c, '\u{202a}'..='\u{202e}' | '\u{2066}'..='\u{2069}'))
    };
    if text.chars().all(harmless) {
        return Cow::Borrowed(text);
    }
    let mut out = String::with_capacity(text.len() + 16);
    for c in text.chars() {
        match c {
            c if harmless(c) => out.push(c),
            c if (c as u32) < 0x100 => out.push_str(&format!("\\x{:02x}", c as u32)),
            c => out.push_str(&format!("\\u{{{:x}}}", c as u32)),
        }
    }
    Cow::Owned(out)
}

/// Prints warnings on standard error as they are raised.
pub fn warn(warnings: &Warnings) {
    for warning in warnings.take() {
        eprintln!("warning: {}", visible(&warning.to_string()));
    }
}

/// Flushes standard output and exits.
pub fn exit(code: i32) -> ! {
    ferrl_kernels::BACKENDS.iter().for_each(|device| (device.settle)());
    std::process::exit(code)
}

/// Parts of outputs that have rows but no name yet.
static PARTS: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());
/// Temporary folders.
static SCRATCH: Mutex<Vec<PathBuf>> = Mutex::new(Vec::new());

/// Whether it was in the list.
fn forget(list: &Mutex<Vec<PathBuf>>, path: &Path) -> bool {
    let mut list = lock(list);
    let before = list.len();
    list.retain(|p| p != path);
    list.len() < before
}

/// A folder that is removed when the process is stopped, until [`discard`] removes it.
pub fn scratch(path: &Path) {
    lock(&SCRATCH).push(path.into());
}

pub fn discard(path: &Path) {
    forget(&SCRATCH, path);
    let _ = std::fs::remove_dir_all(path);
}

type Handler = Box<dyn FnMut() + Send>;

/// What Ctrl-C, SIGTERM and SIGHUP do; [`stop`] where a command has set nothing.
static HANDLER: Mutex<Option<Handler>> = Mutex::new(None);

/// Listens for signals. A signal that was ignored when the process started (`nohup`) stays ignored.
pub fn listen() -> Result<()> {
    let handle = || match &mut *lock(&HANDLER) {
        Some(handler) => handler(),
        None => stop(),
    };
    ctrlc::set_handler(handle).map_err(|e| Error::usage(format!("cannot listen for Ctrl-C: {e}")))
}

/// Sets what a signal does from now on.
pub fn on_interrupt(handler: impl FnMut() + Send + 'static) {
    *lock(&HANDLER) = Some(Box::new(handler));
}

/// Ends the process at a signal: no file is half written, and the user learns where the rows so far are.
pub fn stop() -> ! {
    let _held = undisturbed();
    let mut said = String::from("stopped");
    for part in lock(&PARTS).iter() {
        if std::fs::metadata(part).is_ok_and(|m| m.len() > 0) {
            said = format!("stopped; the rows so far are in {}", part.display());
        } else {
            let _ = std::fs::remove_file(part);
            said = "stopped before the first row was complete".into();
        }
    }
    // Whoever writes into it goes on until the process ends.
    let gone =
        |folder: &PathBuf| (0..100).any(|_| std::fs::remove_dir_all(folder).is_ok() || !folder.exists());
    let _ = lock(&SCRATCH).iter().all(gone);
    eprintln!("\n{said}");
    exit(i32::from(crate::exit_code(Class::Interrupted)));
}

/// The flag that Ctrl-C raises from now on: the save that reads it removes what it has written. The handler itself touches no file,
/// because the save goes on beside it.
pub fn stop_of_save() -> Arc<AtomicBool> {
    on_interrupt(interrupt::request);
    interrupt::handle()
}

/// Whether a person at a terminal can send a second Ctrl-C. Batch systems repeat their signals before they kill: Slurm sends SIGTERM
/// twice at the end of a job's time, LSF sends SIGINT and then SIGTERM.
pub fn at_terminal() -> bool {
    std::io::stdin().is_terminal() || std::io::stderr().is_terminal()
}

/// The first Ctrl-C requests an interrupt and prints `finishing`; the second, at a terminal, ends the process.
pub fn finish_on_interrupt(finishing: &'static str) {
    on_interrupt(move || match (interrupt::requested(), at_terminal()) {
        (true, true) => stop(),
        (true, false) => {}
        (false, typed) => {
            interrupt::request();
            eprintln!("\n{finishing}{}", if typed { "; Ctrl-C again stops at once" } else { "" });
        }
    });
}

/// The error of a failed write. A closed pipe (`| head`) ends the program without a message.
pub fn unwritable(path: &Path, e: &std::io::Error) -> Error {
    let class = match e.kind() {
        ErrorKind::BrokenPipe => exit(0),
        ErrorKind::StorageFull | ErrorKind::QuotaExceeded | ErrorKind::FileTooLarge => Class::Resource,
        _ => Class::Usage,
    };
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty() && !p.is_dir());
    let error = Error::new(class, format!("cannot write: {e}")).at(path.display());
    match (e.kind(), parent) {
        (_, Some(parent)) => error.fix(format!("mkdir -p {}", parent.display())),
        (ErrorKind::PermissionDenied, _) => error.fix("choose a folder you may write to"),
        (ErrorKind::FileTooLarge, _) => error.fix(FILE_LIMIT),
        _ if class == Class::Resource => error.fix("free some disk space or choose another disk"),
        _ => error.fix("choose another folder"),
    }
}

#[cfg(test)]
mod tests {
    use super::{JsonlOutput, visible};
    use std::path::Path;

    const NOTHING: &[&Path] = &[];

    #[test]
    fn two_processes_do_not_write_one_file() {
        let folder = tempfile::tempdir().expect("a folder");
        let path = folder.path().join("rows.jsonl");
        let mut first = JsonlOutput::beside(&path, NOTHING).expect("the first writer");
        first.row(&1).expect("a row");
        let second = JsonlOutput::beside(&path, NOTHING).err().expect("a refusal").to_string();
        assert!(
            second.contains("another process is writing it") && second.contains("rows.jsonl"),
            "{second}"
        );
        first.finish().expect("all rows");
        assert_eq!(std::fs::read_to_string(&path).expect("the file"), "1\n");
        JsonlOutput::beside(&path, NOTHING).expect("a writer after it").finish().expect("a name");
    }

    /// Bug: `eval --resume` emptied the part and wrote its rows anew, and a kill in between lost them.
    #[test]
    fn rows_of_an_earlier_process_stay_where_they_are() {
        let folder = tempfile::tempdir().expect("a folder");
        let (path, part) = (folder.path().join("rows.jsonl"), folder.path().join("rows.jsonl.part"));
        std::fs::write(&part, "1\n2\n3").expect("a part");
        let read = || std::fs::read_to_string(&part).expect("the part");
        drop(JsonlOutput::continuing(&path, NOTHING).expect("a refusal of its rows comes later"));
        assert_eq!(read(), "1\n2\n3");
        let mut output = JsonlOutput::continuing(&path, NOTHING).expect("a writer");
        output.keep(4).expect("two rows");
        output.row(&4).expect("a row");
        assert_eq!(read(), "1\n2\n4\n");
        output.finish().expect("all rows");
        drop(JsonlOutput::beside(&path, NOTHING).expect("a writer without rows"));
        assert!(!part.exists());
    }

    #[test]
    fn escape_codes_of_foreign_text_do_not_reach_a_terminal() {
        assert_eq!(visible("plain é\n\ttext"), "plain é\n\ttext");
        assert_eq!(visible("\x1b]0;owned\x07\r\u{9b}2J"), "\\x1b]0;owned\\x07\\x0d\\x9b2J");
        assert_eq!(visible("a\u{202e}b\u{7f}"), "a\\u{202e}b\\x7f");
    }
}

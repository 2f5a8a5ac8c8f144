//! The folder of one run: made once, never overwritten, used by one process at a time.
//!
//! ```text
//! runs/<name>/
//!   recipe.toml     the resolved recipe
//!   metrics.jsonl   one object per step
//!   log.jsonl       what happened, in words
//!   rollouts/       step_N.jsonl
//!   checkpoints/    step_N/
//!   tensorboard/    event files, derived from metrics.jsonl
//!   lock            the process that has it open
//! ```

use super::files::{Files, error};
use super::resume::names;
use crate::data::nearest_path;
use ferrl_engine::{Error, Result};
use std::fs::{self, File, OpenOptions, TryLockError};
use std::io::{Read, Seek, Write};
use std::path::{Path, PathBuf};
use std::sync::Mutex;
use std::time::{Duration, SystemTime, UNIX_EPOCH};

/// Whether a folder is that of a run; where it is not, the error names the nearest run beside it.
pub fn ensure_run(path: &Path) -> Result<()> {
    if path.join("recipe.toml").is_file() {
        return Ok(());
    }
    let error = match path.is_dir() {
        true => Error::usage("not the folder of a run: recipe.toml is missing"),
        false => Error::usage("no such run"),
    };
    Err(error.at(path.display()).fix(match nearest_run(path) {
        Some(near) if !path.is_dir() => format!("did you mean {}?", near.display()),
        _ if holds_a_run(path) => format!(
            "put its recipe.toml back; `ferrl train RECIPE --dry-run > {}` writes it from the recipe of the run",
            path.join("recipe.toml").display()
        ),
        _ => "give the folder of a run, such as runs/quickstart".into(),
    }))
}

/// The run beside a path whose name is nearest to the path's.
fn nearest_run(path: &Path) -> Option<PathBuf> {
    nearest_path(path, |name| path.with_file_name(name).join("recipe.toml").is_file())
}

/// Whether a folder without a recipe has what a run leaves.
fn holds_a_run(path: &Path) -> bool {
    ["metrics.jsonl", "checkpoints", "stages"].iter().any(|name| path.join(name).exists())
}

/// A run's folder, open and locked until dropped.
#[derive(Debug)]
pub struct RunFolder {
    path: PathBuf,
    files: Files,
    /// None for a guest, who writes nothing.
    lock: Option<File>,
    /// Why a line of `log.jsonl` could not be written.
    pub(super) unlogged: Mutex<Option<Error>>,
}

impl RunFolder {
    /// Makes `root/name` with the recipe and empty places for the rest. A folder that is already there is an error.
    pub fn create(root: &Path, name: &str, resolved_toml: &str) -> Result<RunFolder> {
        Self::create_with(root, name, resolved_toml, Files::new()?)
    }

    /// Whether a run of this name may be made there.
    pub fn free(root: &Path, name: &str) -> Result<()> {
        check_name(name)?;
        match fs::symlink_metadata(root.join(name)) {
            Ok(_) => Err(taken(root, name)),
            Err(_) => Ok(()),
        }
    }

    /// Removes the folder of a run that never saved nor measured anything, and nothing but what a run writes.
    pub fn discard_unused(path: &Path) {
        let measured = fs::metadata(path.join("metrics.jsonl")).is_ok_and(|m| m.len() > 0);
        let saved = !names(&path.join("checkpoints")).unwrap_or_default().is_empty();
        if measured || saved {
            return;
        }
        for name in names(path).unwrap_or_default() {
            let made = name.strip_prefix("start_").or(name.strip_prefix(".start_"));
            let made = made.is_some_and(|n| n.starts_with(|c: char| c.is_ascii_digit()));
            let entry = path.join(&name);
            match name.as_str() {
                "rollouts" | "checkpoints" => drop(fs::remove_dir(entry)), // empty
                "tensorboard" | "stages" => drop(fs::remove_dir_all(entry)),
                _ if made => drop(fs::remove_dir_all(entry)),
                "recipe.toml" | "metrics.jsonl" | "log.jsonl" | "lock" => drop(fs::remove_file(entry)),
                _ => {}
            }
        }
        let _ = fs::remove_dir(path); // unless somebody put something there
    }

    /// As [`RunFolder::create`], through these files.
    pub fn create_with(root: &Path, name: &str, resolved_toml: &str, files: Files) -> Result<RunFolder> {
        Self::free(root, name)?;
        let path = root.join(name);
        files.create_dir_all(root)?;
        // Made aside: a process that is killed here leaves no half of a run that neither starts nor resumes.
        let aside = root.join(format!(".{name}.new"));
        if aside.is_dir() {
            drop(lock(&aside)?); // unless another process is at it right now, somebody was killed here
            if fs::symlink_metadata(&path).is_ok() {
                return Err(taken(root, name)); // it was at it, and is done
            }
            files.remove_dir_all(&aside)?;
        }
        files.create_dir(&aside)?; // fails if another process was faster
        let lock = lock(&aside)?;
        for inner in ["rollouts", "checkpoints", "tensorboard"] {
            files.create_dir(&aside.join(inner))?;
        }
        files.write_whole(&aside.join("recipe.toml"), resolved_toml.as_bytes())?;
        files.rename(&aside, &path)?;
        files.sync_dir(root)?;
        Ok(RunFolder { path, files, lock: Some(lock), unlogged: Mutex::default() })
    }

    /// An existing folder, to resume.
    pub fn open(path: &Path) -> Result<RunFolder> {
        Self::open_with(path, Files::new()?)
    }

    /// As [`RunFolder::open`], through these files.
    pub fn open_with(path: &Path, files: Files) -> Result<RunFolder> {
        if !path.exists() && nearest_run(path).is_none() {
            return Err(Error::usage("no such run")
                .at(path.display())
                .fix("check the name, or start it without --resume"));
        }
        ensure_run(path)?;
        let lock = lock(path)?;
        for inner in ["rollouts", "checkpoints", "tensorboard"] {
            files.create_dir_all(&path.join(inner))?;
        }
        Ok(RunFolder { path: path.into(), files, lock: Some(lock), unlogged: Mutex::default() })
    }

    /// A folder that another rank of the same run writes: this one reads it, and writes nothing, not even log lines.
    pub fn guest(path: &Path) -> Result<RunFolder> {
        Ok(RunFolder { path: path.into(), files: Files::new()?, lock: None, unlogged: Mutex::default() })
    }

    /// Whether this process may write in it.
    pub(super) fn is_guest(&self) -> bool {
        self.lock.is_none()
    }

    pub fn path(&self) -> &Path {
        &self.path
    }
    /// Its last component.
    pub fn name(&self) -> String {
        self.path.file_name().unwrap_or_default().to_string_lossy().into_owned()
    }
    /// Through which it is written.
    pub fn files(&self) -> &Files {
        &self.files
    }
    /// The resolved recipe it was made with.
    pub fn recipe(&self) -> Result<String> {
        let path = self.path.join("recipe.toml");
        fs::read_to_string(&path).map_err(|e| error("cannot read", &path, &e))
    }
    /// `metrics.jsonl`
    pub fn metrics(&self) -> PathBuf {
        self.path.join("metrics.jsonl")
    }
    /// `rollouts/`
    pub fn rollouts(&self) -> PathBuf {
        self.path.join("rollouts")
    }
    /// `checkpoints/`
    pub fn checkpoints(&self) -> PathBuf {
        self.path.join("checkpoints")
    }
    /// `tensorboard/`
    pub fn tensorboard(&self) -> PathBuf {
        self.path.join("tensorboard")
    }

    /// Another recipe from now on; the one before stays beside it.
    pub fn replace_recipe(&self, toml: &str, step: u64) -> Result<()> {
        let old = self.path.join(format!("recipe_until_step_{step}.toml"));
        if !old.exists() {
            self.files.write_whole(&old, self.recipe()?.as_bytes())?;
        }
        self.files.write_whole(&self.path.join("recipe.toml"), toml.as_bytes())
    }

    /// Removes what a process that was killed left half done, as far as it can be removed: models of stages, rollouts, files
    /// that were about to get their name.
    pub fn tidy(&self) {
        let left = |dir: &Path, ours: &dyn Fn(&str) -> bool| {
            for name in names(dir).unwrap_or_default().into_iter().filter(|name| ours(name)) {
                let path = dir.join(name);
                let _ = if path.is_dir() {
                    self.files.remove_dir_all(&path)
                } else {
                    self.files.remove_file(&path)
                };
            }
        };
        let number = |text: &str| !text.is_empty() && text.bytes().all(|b| b.is_ascii_digit());
        let stage = |name: &str| {
            let parts: Vec<&str> = name.split('.').collect();
            matches!(parts[..], ["", stage, process, "tmp" | "old"] if number(stage) && number(process))
        };
        left(&self.path.join("stages"), &stage);
        let rollout =
            |name: &str| name.strip_prefix("step_").and_then(|n| n.strip_suffix(".tmp")).is_some_and(number);
        left(&self.rollouts(), &rollout);
        let aside = |name: &str| name.starts_with(".start_") && name.ends_with(".tmp");
        let page = |name: &str| name.starts_with("report.html.") && name.ends_with(".tmp");
        left(&self.path, &|name| name == "recipe.toml.tmp" || page(name) || aside(name));
    }

    /// Whether the folder is still what was opened: files that are open can be written long after they were removed, and
    /// what was written would be lost.
    pub fn still_there(&self) -> Result<()> {
        let path = self.path.join("lock");
        let gone = |what: String| {
            Err(Error::data(format!("the folder of this run is missing: {what}"))
                .at(self.path.display())
                .fix("restore it and resume from its last checkpoint, or start the run again"))
        };
        match fs::metadata(&path) {
            Ok(now) if self.lock.as_ref().is_none_or(|lock| same_file(&now, lock)) => Ok(()),
            Ok(_) => gone("another one is in its place".into()),
            Err(e) if e.kind() == std::io::ErrorKind::NotFound => gone("it was moved or removed".into()),
            Err(e) => Err(error("cannot read", &path, &e)),
        }
    }
}

/// Whether an open file is the one that is found by its name now.
#[cfg(unix)]
fn same_file(now: &fs::Metadata, open: &File) -> bool {
    use std::os::unix::fs::MetadataExt;
    open.metadata().is_ok_and(|then| (now.dev(), now.ino()) == (then.dev(), then.ino()))
}

#[cfg(not(unix))]
fn same_file(_now: &fs::Metadata, _open: &File) -> bool {
    true
}

pub(crate) fn unix_seconds() -> f64 {
    SystemTime::now().duration_since(UNIX_EPOCH).map_or(0.0, |d| d.as_secs_f64())
}

/// Whether a run may have this name: one plain component, the same on every system.
pub fn check_name(name: &str) -> Result<()> {
    let fix = "letters, digits, '-', '_' and '.', beginning with a letter or digit, at most 100";
    let refuse = |why: &str| Err(Error::usage(format!("a run cannot be named {name:?}: {why}")).fix(fix));
    if name.is_empty() {
        return refuse("it is empty");
    }
    if name.len() > 100 {
        return refuse("it is too long");
    }
    if let Some(c) = name.chars().find(|c| !c.is_ascii_alphanumeric() && !"-_.".contains(*c)) {
        return refuse(&format!("it contains {c:?}"));
    }
    if !name.starts_with(|c: char| c.is_ascii_alphanumeric()) {
        return refuse("it starts with a punctuation mark");
    }
    if name.ends_with('.') {
        return refuse("it ends with a full stop");
    }
    let stem = name.split('.').next().unwrap_or(name).to_ascii_lowercase();
    let numbered = |s: &str| s.len() == 4 && (s.starts_with("com") || s.starts_with("lpt"));
    let device = matches!(stem.as_str(), "con" | "prn" | "aux" | "nul")
        || numbered(&stem) && stem.ends_with(|c: char| c.is_ascii_digit());
    if device {
        return refuse("it is the name of a device on Windows");
    }
    Ok(())
}

/// The folder is there already: what to do.
fn taken(root: &Path, name: &str) -> Error {
    let free = (2..).map(|n| format!("{name}-{n}")).find(|n| fs::symlink_metadata(root.join(n)).is_err());
    Error::usage("this run exists already, and a run is never overwritten")
        .at(root.join(name).display())
        .fix(format!("--resume to resume it, or --name {} for a new one", free.unwrap_or_default()))
}

/// How often a lock is tried, 10 ms apart: a process that was killed holds it until the system has cleared it away, and a
/// worker that this process is just starting has all of its open files until the new program runs.
const ATTEMPTS: usize = 100;

/// Takes the folder for this process. The system gives the lock back when the process ends, however it ends.
fn lock(folder: &Path) -> Result<File> {
    let path = folder.join("lock");
    let fail = |e: std::io::Error| error("cannot lock the run's folder", &path, &e);
    let mut how = OpenOptions::new();
    let mut file = how.read(true).write(true).create(true).truncate(false).open(&path).map_err(fail)?;
    for attempt in 0.. {
        match file.try_lock() {
            Ok(()) => break,
            Err(TryLockError::WouldBlock) if attempt < ATTEMPTS => {
                std::thread::sleep(Duration::from_millis(10));
            }
            Err(TryLockError::WouldBlock) => {
                let mut holder = String::new();
                let _ = file.rewind().and_then(|()| file.read_to_string(&mut holder)); // only for the message
                let holder: String = holder.chars().filter(char::is_ascii_digit).take(20).collect();
                return Err(Error::usage(format!("process {holder} is using this run"))
                    .at(folder.display())
                    .fix("wait until it ends, or choose another --name"));
            }
            // Some network disks have no locks; a run there is the user's to keep alone.
            Err(TryLockError::Error(e)) if e.kind() == std::io::ErrorKind::Unsupported => break,
            Err(TryLockError::Error(e)) => return Err(fail(e)),
        }
    }
    file.set_len(0).map_err(fail)?;
    file.rewind().map_err(fail)?;
    file.write_all(format!("{}\n", std::process::id()).as_bytes()).map_err(fail)?;
    Ok(file)
}

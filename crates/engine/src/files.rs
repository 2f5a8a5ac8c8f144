//! Files that appear whole or not at all, and the lock that keeps a signal from ending the process meanwhile.

use ferrl_kernels::lock;
use std::io::Write;
use std::path::Path;
use std::sync::{Mutex, MutexGuard};
use std::{fs, io};

static WRITING: Mutex<()> = Mutex::new(());

/// While this is held, no signal ends the process: its handler takes the lock before it exits, and keeps it. For short writes; a
/// write of gigabytes must check for an interrupt instead.
pub fn undisturbed() -> MutexGuard<'static, ()> {
    lock(&WRITING)
}

/// Writes a file that appears whole or not at all, whatever ends the process.
pub fn write_whole(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let _held = undisturbed();
    write_aside(path, bytes)
}

/// The same, for a caller that holds the lock.
pub(crate) fn write_aside(path: &Path, bytes: &[u8]) -> io::Result<()> {
    let mut name = path.file_name().unwrap_or_default().to_os_string();
    name.push(format!(".{}.tmp", std::process::id()));
    let aside = path.with_file_name(name);
    let filled = |mut file: fs::File| file.write_all(bytes).and_then(|()| file.sync_all());
    let written = fs::File::create(&aside).and_then(filled).and_then(|()| fs::rename(&aside, path));
    if written.is_err() {
        let _ = fs::remove_file(&aside); // the earlier error is returned
    }
    written
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_file_that_cannot_get_its_name_leaves_nothing() {
        let folder = tempfile::tempdir().unwrap();
        let path = folder.path().join("page.html");
        write_whole(&path, b"old").unwrap();
        write_whole(&path, b"new").unwrap();
        assert_eq!(fs::read(&path).unwrap(), b"new");
        fs::create_dir_all(folder.path().join("taken/inner")).unwrap();
        assert!(write_whole(&folder.path().join("taken"), b"x").is_err());
        let mut names: Vec<_> =
            fs::read_dir(folder.path()).unwrap().map(|e| e.unwrap().file_name()).collect();
        names.sort();
        assert_eq!(names, ["page.html", "taken"]);
    }
}

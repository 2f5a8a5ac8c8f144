//! Memory-mapped files.

use std::fs::File;
use std::io::ErrorKind;
use std::path::Path;

use memmap2::Mmap;

use crate::{Error, Result};

/// A file, mapped read-only.
#[derive(Debug)]
pub struct Mapped(Mmap);

impl AsRef<[u8]> for Mapped {
    fn as_ref(&self) -> &[u8] {
        &self.0
    }
}

pub fn map_file(path: &Path) -> Result<Mapped> {
    let fail = |e: std::io::Error| {
        let what = match e.kind() {
            ErrorKind::NotFound => "file is missing".to_string(),
            _ => format!("cannot read the file: {e}"),
        };
        Error::model(what).at(path.display())
    };
    let file = File::open(path).map_err(fail)?;
    if !file.metadata().map_err(fail)?.is_file() {
        return Err(Error::model("not a regular file").at(path.display()));
    }
    // SAFETY: the mapping is private and read-only, and Ferrl never writes to a file it has mapped: it writes new files and
    // renames them over. Another process that modifies the file in place would change the data read, as with any reader.
    let map = unsafe { Mmap::map(&file) }.map_err(fail)?;
    Ok(Mapped(map))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn maps_a_file_and_names_a_missing_one() {
        let path = std::env::temp_dir().join(format!("ferrl-mmap-{}.bin", std::process::id()));
        std::fs::write(&path, b"abc").unwrap();
        assert_eq!(map_file(&path).unwrap().as_ref(), b"abc");
        std::fs::remove_file(&path).unwrap();
        let message = map_file(&path).unwrap_err().to_string();
        assert!(message.contains("file is missing") && message.contains("ferrl-mmap"), "{message}");
    }

    #[test]
    fn a_directory_is_refused() {
        assert!(map_file(&std::env::temp_dir()).unwrap_err().to_string().contains("not a regular file"));
    }
}

//! Finds NVIDIA's shared libraries at run time: the driver, NVRTC, cuBLASLt, and NCCL.
//!
//! A missing library is an ordinary error that says what was searched for and where. A library found outside the loader's path is
//! opened by its full path; the bindings then find it already loaded.

use crate::error::{Error, Result};
use std::path::{Path, PathBuf};
use std::sync::OnceLock;

/// Supported major versions of the CUDA toolkit, newest first.
const MAJORS: [&str; 2] = ["13", "12"];

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Library {
    /// libcuda, part of the driver.
    Driver,
    /// NVRTC.
    Compiler,
    /// cuBLASLt.
    Products,
    /// NCCL.
    Transfers,
}

impl Library {
    fn names(self) -> Vec<String> {
        let stem = match self {
            Library::Driver => return vec!["libcuda.so.1".into(), "libcuda.so".into()],
            Library::Compiler => "libnvrtc.so",
            Library::Products => "libcublasLt.so",
            Library::Transfers => return vec!["libnccl.so.2".into(), "libnccl.so".into()],
        };
        MAJORS.iter().map(|m| format!("{stem}.{m}")).chain([stem.to_string()]).collect()
    }

    fn fix(self) -> &'static str {
        match self {
            Library::Driver => "install NVIDIA's driver, or use the device cpu",
            Library::Compiler => {
                "install the CUDA toolkit, or `pip install nvidia-cuda-nvrtc`; or set CUDA_HOME to where it is"
            }
            Library::Products => {
                "install the CUDA toolkit, or `pip install nvidia-cublas`; or set CUDA_HOME to where it is"
            }
            Library::Transfers => "pip install nvidia-nccl-cu13, or FERRL_NCCL=/path/to/libnccl.so.2",
        }
    }
}

/// Opens a library for good; returns where it was found.
pub fn open(library: Library) -> Result<String> {
    static FOUND: [OnceLock<std::result::Result<String, Error>>; 4] = [const { OnceLock::new() }; 4];
    FOUND[library as usize].get_or_init(|| search(library)).clone()
}

fn search(library: Library) -> Result<String> {
    let names = library.names();
    for name in &names {
        if load(Path::new(name)) {
            return Ok(format!("{name} in the loader's path"));
        }
    }
    let folders = if library == Library::Driver { Vec::new() } else { folders() };
    for folder in &folders {
        for path in names.iter().map(|n| folder.join(n)).filter(|p| p.exists()) {
            if load(&path) {
                return Ok(path.display().to_string());
            }
        }
    }
    let mut places = vec!["the loader's path".to_string()];
    places.extend(folders.iter().map(|f| f.display().to_string()));
    Err(Error::device(format!("found none of {}; looked in {}", names.join(", "), places.join(", ")))
        .fix(library.fix()))
}

/// Opens a library until the process ends.
fn load(path: &Path) -> bool {
    // SAFETY: NVIDIA's libraries have initialisers that may run at any time.
    match unsafe { libloading::Library::new(path) } {
        Ok(library) => {
            std::mem::forget(library);
            true
        }
        Err(_) => false,
    }
}

/// Folders outside the loader's path that may have the libraries: CUDA_HOME, the toolkit's default, Python packages.
fn folders() -> Vec<PathBuf> {
    let mut all = Vec::new();
    for name in ["CUDA_HOME", "CUDA_PATH"] {
        all.extend(std::env::var_os(name).map(PathBuf::from));
    }
    all.push("/usr/local/cuda".into());
    let mut all: Vec<PathBuf> = all.iter().flat_map(|home| [home.join("lib64"), home.join("lib")]).collect();
    all.extend(pythons().iter().flat_map(|prefix| packages(prefix)));
    all.retain(|folder| folder.is_dir());
    let mut seen = Vec::new();
    all.retain(|folder| !seen.contains(folder) && (seen.push(folder.clone()), true).1);
    all
}

/// Prefixes of available Python environments: the active one, that of `python3`, and the user's.
fn pythons() -> Vec<PathBuf> {
    let mut all: Vec<PathBuf> = std::env::var_os("VIRTUAL_ENV").map(PathBuf::from).into_iter().collect();
    for folder in std::env::split_paths(&std::env::var_os("PATH").unwrap_or_default()) {
        let python = folder.join("python3");
        if python.exists() {
            all.extend(folder.parent().map(Path::to_path_buf));
            // A symlink in a bin folder may lead to the environment itself.
            let real = std::fs::canonicalize(&python).ok();
            all.extend(real.and_then(|p| Some(p.parent()?.parent()?.to_path_buf())));
            break;
        }
    }
    all.extend(std::env::var_os("HOME").map(|home| PathBuf::from(home).join(".local")));
    all
}

/// `lib/python3.*/{site,dist}-packages/nvidia/*/lib` below a prefix.
fn packages(prefix: &Path) -> Vec<PathBuf> {
    let below = |folder: &Path| -> Vec<PathBuf> {
        let mut all: Vec<PathBuf> =
            std::fs::read_dir(folder).into_iter().flatten().flatten().map(|e| e.path()).collect();
        all.sort();
        all
    };
    let python =
        |p: &PathBuf| p.file_name().is_some_and(|name| name.to_string_lossy().starts_with("python3"));
    below(&prefix.join("lib"))
        .into_iter()
        .filter(python)
        .flat_map(|p| [p.join("site-packages/nvidia"), p.join("dist-packages/nvidia")])
        .flat_map(|nvidia| below(&nvidia))
        .map(|package| package.join("lib"))
        .collect()
}

//! The Python interpreter for confined programs: the executable itself, not a wrapper of a version manager, and the folders that
//! it reads.

use super::SandboxProgram;
use ferrl_engine::{Error, Result};
use serde::Deserialize;
use std::path::PathBuf;
use std::process::{Command, Stdio};

#[derive(Clone, Debug)]
pub struct Interpreter {
    pub executable: String,
    /// Where it finds modules.
    pub path: Vec<String>,
    /// Folders that it reads.
    pub reads: Vec<PathBuf>,
}

/// What an interpreter says of itself.
#[derive(Deserialize)]
struct About {
    executable: String,
    prefixes: Vec<PathBuf>,
    path: Vec<String>,
}

const ASK: &str = "import json, sys; print(json.dumps({'executable': sys.executable, \
    'prefixes': [sys.prefix, sys.exec_prefix, sys.base_prefix, sys.base_exec_prefix], \
    'path': [p for p in sys.path if p]}))";

impl Interpreter {
    /// Finds the interpreter of a command such as `python3`.
    pub fn find(command: &str) -> Result<Self> {
        let fix = "python = \"/usr/bin/python3\", or install Python 3.8 or later";
        let failed = |why: String| Error::usage(format!("cannot run {command}: {why}")).at("python").fix(fix);
        let asked = Command::new(command).args(["-I", "-c", ASK]).stdin(Stdio::null()).output();
        let output = asked.map_err(|e| failed(e.to_string()))?;
        let about: About = serde_json::from_slice(&output.stdout).map_err(|_| {
            let said = String::from_utf8_lossy(&output.stderr);
            failed(format!(
                "{}; {}",
                output.status,
                said.lines().last().unwrap_or("it says nothing of itself")
            ))
        })?;
        // The executable itself: links of virtual environments and version managers may be in folders that programs cannot read.
        // Modules are found all the same, because the script sets `sys.path`.
        let real = std::fs::canonicalize(&about.executable)
            .map_err(|e| failed(format!("{}: {e}", about.executable)))?;
        let mut reads: Vec<PathBuf> = about.prefixes;
        reads.extend(real.parent().and_then(|bin| bin.parent()).map(PathBuf::from));
        // Neither everything nor all that a user owns is a folder of Python's.
        let home = std::env::home_dir();
        reads.retain(|path| path.is_absolute() && path.parent().is_some() && Some(path) != home.as_ref());
        reads.sort();
        reads.dedup();
        // Folders elsewhere are the user's own, such as packages that are being worked on.
        let path = about
            .path
            .into_iter()
            .filter(|p| reads.iter().any(|r| PathBuf::from(p).starts_with(r)))
            .collect();
        Ok(Interpreter { executable: real.display().to_string(), path, reads })
    }

    /// A program that runs one of Ferrl's scripts, with its input on stdin.
    ///
    /// Start-up files of sites (`-S`) are left out, which takes most of the time of a start; `sys.path` is for the script to
    /// set from its first argument.
    pub fn program(&self, script: &str, stdin: Vec<u8>) -> SandboxProgram {
        let mut argv: Vec<String> = vec![self.executable.clone()];
        argv.extend(["-s", "-S", "-B", "-u", "-X", "utf8", "-c", script].map(String::from));
        argv.push(self.path.join(":"));
        let env = [
            ("PATH", "/usr/bin:/bin"),
            ("LANG", "C.UTF-8"),
            // Sets and dictionaries of texts iterate in the same order every time.
            ("PYTHONHASHSEED", "0"),
            // Libraries that start a thread for every core would reach the limits of processes and address space.
            ("OMP_NUM_THREADS", "1"),
            ("OPENBLAS_NUM_THREADS", "1"),
            ("MALLOC_ARENA_MAX", "2"),
        ];
        SandboxProgram { argv, env: env.map(|(n, v)| (n.to_string(), v.to_string())).to_vec(), stdin }
    }
}

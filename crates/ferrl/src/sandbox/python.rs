//! Python code in the sandbox: one interpreter for each run, and a script that runs the code in it.

use super::{ConfinementReport, Interpreter, Limits, ProgramEnd, Ran, Sandbox, SandboxOptions};
use ferrl_engine::{Error, Result};

const RUNNER: &str = include_str!("runner.py");

/// How code is run.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum PythonTask {
    /// The text is work of the verifier `code`: a function is called and its values returned.
    Calls,
    /// The text is a program.
    Program,
    /// The text is a program whose last line's value is printed too.
    Show,
}

/// A sandbox in which Python starts.
pub struct PythonSandbox {
    sandbox: Sandbox,
    interpreter: Interpreter,
    limits: Limits,
}

impl PythonSandbox {
    /// Finds the interpreter that a command such as `python3` starts, makes the sandbox and tries both together.
    pub fn start(command: &str, limits: Limits, mut options: SandboxOptions) -> Result<Self> {
        let interpreter = Interpreter::find(command)?;
        options.reads.extend(interpreter.reads.iter().cloned());
        let python = PythonSandbox { sandbox: Sandbox::new(options)?, interpreter, limits };
        // Reports a Python that cannot start now, instead of once per completion.
        let patient = Limits { wall_s: 60.0, ..python.limits.clone() };
        let ran = python.sandbox.run(&python.interpreter.program("pass", Vec::new()), &patient)?;
        match ran.end {
            ProgramEnd::Finished(0) => Ok(python),
            end => {
                let errors = String::from_utf8_lossy(&ran.stderr);
                let last = errors.lines().last().unwrap_or_default();
                let what =
                    format!("{} does not start in the sandbox: {end} {last}", python.interpreter.executable);
                Err(Error::device(what.trim_end()).at("python").fix("a larger memory_mib, or another python"))
            }
        }
    }

    /// Runs code in an interpreter of its own; `stdin` is what the code may read.
    pub fn run(&self, task: PythonTask, code: &str, stdin: &str) -> Result<Ran> {
        let name = match task {
            PythonTask::Calls => "calls",
            PythonTask::Program => "program",
            PythonTask::Show => "show",
        };
        // A header of 32 bytes, the code, and the rest.
        let bytes = format!("{name:<11} {:>20}{code}{stdin}", code.len()).into_bytes();
        let ran = self.sandbox.run(&self.interpreter.program(RUNNER, bytes), &self.limits)?;
        match ran.end {
            ProgramEnd::CannotStart(why) => {
                Err(Error::device(format!("the sandbox cannot start Python: {why}")))
            }
            _ => Ok(ran),
        }
    }

    /// Layers in force and missing.
    pub fn report(&self) -> &ConfinementReport {
        self.sandbox.report()
    }
}

//! A Python interpreter in the sandbox, started anew for each call.

use super::{Entry, Tool, one_text, schema_for, text_argument};
use crate::recipe::read_settings;
use crate::sandbox::{self, Limits, PythonSandbox, PythonTask, Ran, SandboxMode};
use ferrl_engine::Result;
use ferrl_kernels::lock;
use serde_json::{Map, Value};
use std::sync::{Arc, Mutex};

pub(super) const ENTRY: Entry = Entry {
    name: "python",
    about: "runs a Python program in the sandbox and returns its output",
    schema: || schema_for!(Options),
    build: |values| {
        let options: Options = read_settings("env.tool.python", values)?;
        let (mode, limits) = (options.sandbox, options.limits());
        let (command, started) = (options.python, Mutex::new(None));
        Ok(Arc::new(PythonTool { command, mode, limits, started }))
    },
};

with_defaults! {
struct Options {
    /// Confinement: `auto` (every layer that the kernel supports), `on` (an error if a layer is missing) or `off` (none).
    sandbox: SandboxMode = SandboxMode::Auto,
    /// Maximum seconds of a call. [0.05, 86400]
    wall_s: f64 = 5.0,
    /// Maximum memory of the program and its child processes, in MiB. [32, 1048576]
    memory_mib: u64 = Limits::default().memory_mib,
    /// Maximum number of concurrent processes and threads. [1, 4096]
    processes: u64 = Limits::default().processes,
    /// Maximum size of the scratch folder in MiB. [1, 1048576]
    scratch_mib: u64 = Limits::default().scratch_mib,
    /// Maximum size of stdout and stderr together, in KiB. [1, 262144]
    output_kib: u64 = Limits::default().output_kib,
    /// The Python interpreter.
    python: String = "python3".into(),
}
}

impl Options {
    fn limits(&self) -> Limits {
        let Options { wall_s, memory_mib, processes, scratch_mib, output_kib, .. } = *self;
        Limits { wall_s, memory_mib, processes, scratch_mib, output_kib, ..Default::default() }
    }
}

/// The tool. Its sandbox is created at the first call.
struct PythonTool {
    command: String,
    mode: SandboxMode,
    limits: Limits,
    started: Mutex<Option<Arc<PythonSandbox>>>,
}

const ARGUMENT: &str = "code";

impl PythonTool {
    fn python(&self) -> Result<Arc<PythonSandbox>> {
        let mut started = lock(&self.started);
        if let Some(python) = &*started {
            return Ok(python.clone());
        }
        let options = sandbox::SandboxOptions { mode: self.mode, ..Default::default() };
        let python = Arc::new(PythonSandbox::start(&self.command, self.limits.clone(), options)?);
        Ok(started.insert(python).clone())
    }
}

impl Tool for PythonTool {
    fn name(&self) -> &str {
        ENTRY.name
    }
    fn about(&self) -> &str {
        "Runs a Python program and gives what it prints, and the value of its last line."
    }
    fn parameters(&self) -> Value {
        one_text(ARGUMENT, "a whole program; nothing is kept from one call to the next")
    }
    fn waits(&self) -> bool {
        true
    }
    fn call(&self, arguments: &Map<String, Value>) -> Result<String> {
        let code = match text_argument(arguments, ARGUMENT) {
            Ok(code) => crate::verify::code::extracted(code),
            Err(why) => return Ok(why),
        };
        Ok(shown(&self.python()?.run(PythonTask::Show, code, "")?))
    }
}

/// The result for the policy: the output, or the error with the last line of stderr.
fn shown(ran: &Ran) -> String {
    let text = |bytes: &[u8]| String::from_utf8_lossy(bytes).trim_end().to_string();
    let (out, err) = (text(&ran.stdout), text(&ran.stderr));
    match &ran.end {
        sandbox::ProgramEnd::Finished(0) if out.is_empty() => "(it printed nothing)".into(),
        sandbox::ProgramEnd::Finished(0) => out,
        sandbox::ProgramEnd::Finished(_) => {
            let last = err.lines().last().unwrap_or("it failed and said nothing");
            format!("error: {last}\n{out}").trim_end().to_string()
        }
        end => format!("error: {end}\n{out}").trim_end().to_string(),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use serde_json::json;

    fn call(code: &str) -> String {
        let tool = (ENTRY.build)(json!({"wall_s": 1.0}).as_object().unwrap()).unwrap();
        tool.call(json!({ "code": code }).as_object().unwrap()).unwrap()
    }

    /// Was: `"off"` was taken for no value, and refused as no text.
    #[test]
    fn the_sandbox_can_be_switched_off() {
        assert!((ENTRY.build)(json!({"sandbox": "off"}).as_object().unwrap()).is_ok());
    }

    #[test]
    fn a_program_is_answered_in_text() {
        assert_eq!(call("x = 6 * 7\nprint('so:', x)\nx + 1"), "so: 42\n43");
        assert_eq!(call("```python\n2 ** 100\n```"), "1267650600228229401496703205376");
        assert_eq!(call("x = 1"), "(it printed nothing)");
        assert_eq!(call("print(1)\n1 / 0"), "error: ZeroDivisionError: division by zero\n1");
        assert!(call("x = (").starts_with("error: SyntaxError"), "{}", call("x = ("));
        assert_eq!(call("while True: pass"), "error: time-out");
        assert_eq!(call("import sys; sys.exit(3)"), "error: it failed and said nothing");
    }

    #[test]
    fn settings_out_of_range_are_refused() {
        for (options, part) in [
            (json!({"sandbox": "maybe"}), "one of \"auto\", \"on\", \"off\""),
            (json!({"memory_mib": 1}), "memory_mib"),
            (json!({"wall_s": 0.0}), "wall_s"),
            (json!({"speed": 1}), "speed"),
        ] {
            let error = (ENTRY.build)(options.as_object().unwrap()).err().unwrap().to_string();
            assert!(error.contains(part), "{error}");
        }
    }
}

//! Ranks on this machine without MPI: processes with `torchrun`'s environment variables that communicate through NCCL.

use ferrl_engine::{Error, Result};
use std::net::TcpListener;
use std::path::Path;
use std::process::{Child, Command, ExitStatus, Stdio};
use std::time::Duration;

/// The rank processes. Dropping it ends those that still run.
pub struct LocalRanks(Vec<Child>);

/// Additional environment variables of the ranks: name and value.
pub type RankEnvironment<'a> = &'a [(&'a str, &'a std::ffi::OsStr)];

impl LocalRanks {
    /// Starts `size` ranks. Environment variables that are set already keep their values, except those that number the ranks.
    pub fn start(program: &Path, command: &[String], size: usize, more: RankEnvironment<'_>) -> Result<Self> {
        let port = free_port()?;
        let mut ranks = LocalRanks(Vec::new());
        for rank in 0..size {
            let mut process = Command::new(program);
            process.args(command).stdin(Stdio::null());
            let numbers =
                [("RANK", rank), ("LOCAL_RANK", rank), ("WORLD_SIZE", size), ("LOCAL_WORLD_SIZE", size)];
            process.envs(numbers.map(|(name, number)| (name, number.to_string())));
            process.env("MASTER_ADDR", "127.0.0.1").env("MASTER_PORT", port.to_string());
            process.env_remove("TORCHELASTIC_USE_AGENT_STORE").env_remove("NCCL_COMM_ID");
            process.env("TORCHELASTIC_RUN_ID", "ferrl"); // these variables count, not those of a launcher around it
            crate::commands::launch::connected(&mut process);
            let unset = |name: &str| std::env::var_os(name).is_none();
            if unset("NCCL_SOCKET_IFNAME") {
                process.env("NCCL_SOCKET_IFNAME", "lo"); // all ranks are on this machine
            }
            process.envs(more.iter().copied().filter(|(name, _)| unset(name)));
            #[cfg(unix)]
            std::os::unix::process::CommandExt::process_group(&mut process, 0); // so that the terminal's Ctrl-C does not reach it
            let started =
                process.spawn().map_err(|e| Error::device(format!("rank {rank} cannot be started: {e}")))?;
            ranks.0.push(started);
        }
        Ok(ranks)
    }

    /// Their process ids.
    pub fn ids(&self) -> Vec<u32> {
        self.0.iter().map(Child::id).collect()
    }

    /// Waits for all ranks and returns the first failure, or success. A failed rank ends the others, which NCCL would leave waiting.
    pub fn wait(&mut self) -> std::io::Result<ExitStatus> {
        loop {
            let mut ended = Vec::new();
            for child in &mut self.0 {
                ended.push(child.try_wait()?);
            }
            if let Some(failed) = ended.iter().flatten().find(|status| !status.success()).copied() {
                // Ranks with the same error get time to print it and exit.
                std::thread::sleep(Duration::from_secs(1));
                self.end();
                return Ok(failed);
            }
            if let Some(Some(last)) = ended.last().filter(|_| ended.iter().all(Option::is_some)) {
                return Ok(*last);
            }
            std::thread::sleep(Duration::from_millis(50));
        }
    }

    fn end(&mut self) {
        for child in &mut self.0 {
            let _ = child.kill(); // it may have ended already
            let _ = child.wait();
        }
    }
}

impl Drop for LocalRanks {
    fn drop(&mut self) {
        self.end();
    }
}

fn free_port() -> Result<u16> {
    let port = TcpListener::bind(("127.0.0.1", 0)).and_then(|listener| listener.local_addr());
    Ok(port.map_err(|e| Error::device(format!("this machine has no free port: {e}")))?.port())
}

#[cfg(all(test, unix))]
mod tests {
    use super::*;

    fn shell(text: &str, size: usize) -> ExitStatus {
        let command = ["-c".to_string(), text.to_string()];
        let started = LocalRanks::start(Path::new("/bin/sh"), &command, size, &[]);
        started.expect("a shell").wait().expect("its end")
    }

    #[test]
    fn every_rank_knows_its_number_and_where_rank_0_is() {
        let text = r#"test "$RANK" -lt "$WORLD_SIZE" && test "$LOCAL_RANK" = "$RANK" && test -n "$MASTER_ADDR$MASTER_PORT""#;
        assert!(shell(text, 3).success());
    }

    #[test]
    fn a_rank_that_fails_ends_the_others() {
        let began = std::time::Instant::now();
        assert_eq!(shell(r#"test "$RANK" = 1 && exit 4; sleep 60"#, 3).code(), Some(4));
        assert!(began.elapsed() < Duration::from_secs(30));
    }
}

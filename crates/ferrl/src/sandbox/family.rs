//! A process and all its descendants: found, measured and killed.

/// How the descendants of a program are reached.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum ProcessFamily {
    /// In a pid namespace whose first process is the program: they die with it.
    Namespace,
    /// This process is their subreaper and has no other children, so that orphans are its descendants too.
    #[cfg_attr(not(target_os = "linux"), allow(dead_code))]
    Descendants,
    /// The program's process group, and those of its descendants that can still be found.
    Group,
}

/// Resources that a family uses.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub(super) struct FamilyUsage {
    /// Processes and threads.
    pub(super) tasks: u64,
    /// Resident bytes, pages that are shared counted for each.
    pub(super) resident: u64,
}

#[cfg(unix)]
mod unix {
    use super::{FamilyUsage, ProcessFamily};
    use rustix::process::{Pid, Signal, WaitOptions, kill_process, kill_process_group, wait};
    use std::time::{Duration, Instant};

    impl ProcessFamily {
        /// Kills a program with all its descendants; the program itself is not reaped.
        pub(in super::super) fn kill(self, program: i32) {
            let Some(pid) = Pid::from_raw(program) else { return };
            // A process that forks while it is killed is found in the next round.
            let mut found = if self == ProcessFamily::Namespace { Vec::new() } else { self.members(program) };
            let _ = kill_process_group(pid, Signal::KILL);
            let _ = kill_process(pid, Signal::KILL);
            let patience = Instant::now() + Duration::from_secs(2);
            while Instant::now() < patience {
                found.retain(|other| *other != program);
                if found.is_empty() {
                    return;
                }
                for other in found.iter().filter_map(|other| Pid::from_raw(*other)) {
                    let _ = kill_process(other, Signal::KILL);
                }
                found = self.members(program);
            }
        }

        /// Reaps what was killed, once the program itself was: the dead count against the limit of processes until then.
        pub(in super::super) fn reap(self) {
            let patience = Instant::now() + Duration::from_secs(2);
            while self == ProcessFamily::Descendants && Instant::now() < patience {
                match wait(WaitOptions::NOHANG) {
                    Ok(Some(_)) => {}
                    Ok(None) => std::thread::sleep(Duration::from_micros(200)),
                    Err(_) => return, // no child is left
                }
            }
        }

        /// The program and its descendants, zombies aside.
        fn members(self, program: i32) -> Vec<i32> {
            match self {
                ProcessFamily::Namespace | ProcessFamily::Group => descendants(program, true),
                ProcessFamily::Descendants => descendants(std::process::id() as i32, false),
            }
        }

        /// Its current use.
        pub(in super::super) fn usage(self, program: i32) -> FamilyUsage {
            let page = rustix::param::page_size() as u64;
            let mut sum = FamilyUsage::default();
            for (tasks, pages) in self.members(program).into_iter().filter_map(numbers) {
                sum.tasks += tasks;
                sum.resident += pages * page;
            }
            sum
        }
    }

    /// The descendants of a process, and itself if `with_root`.
    fn descendants(root: i32, with_root: bool) -> Vec<i32> {
        let mut found = vec![root];
        let mut next = 0;
        while next < found.len() {
            let tasks =
                std::fs::read_dir(format!("/proc/{}/task", found[next])).into_iter().flatten().flatten();
            let lists = tasks.filter_map(|task| std::fs::read_to_string(task.path().join("children")).ok());
            let children: Vec<i32> = lists
                .flat_map(|l| l.split_whitespace().filter_map(|p| p.parse().ok()).collect::<Vec<_>>())
                .collect();
            found.extend(children.into_iter().filter(|pid| is_alive(*pid)));
            next += 1;
        }
        if !with_root {
            found.remove(0);
        }
        found
    }

    /// The fields of `/proc/PID/stat` after the name, which may hold anything.
    fn stat(pid: i32) -> Option<String> {
        let text = std::fs::read_to_string(format!("/proc/{pid}/stat")).ok()?;
        text.rfind(") ").map(|at| text[at + 2..].to_string())
    }

    fn is_alive(pid: i32) -> bool {
        stat(pid).is_some_and(|fields| !fields.starts_with(['Z', 'X']))
    }

    /// Threads and resident pages.
    fn numbers(pid: i32) -> Option<(u64, u64)> {
        let fields = stat(pid)?;
        let mut fields = fields.split(' ');
        // Fields 20 and 24 of proc(5), of which the third stands first here.
        Some((fields.nth(17)?.parse().ok()?, fields.nth(3)?.parse().ok()?))
    }
}

#[cfg(all(test, target_os = "linux"))]
mod tests {
    use super::*;

    #[test]
    fn own_threads_and_memory_are_measured() {
        let own = std::process::id() as i32;
        let usage = ProcessFamily::Group.usage(own);
        assert!(usage.tasks >= 2, "the test's thread and the main one: {usage:?}");
        assert!((1 << 20..1 << 36).contains(&usage.resident), "{usage:?}");
    }
}

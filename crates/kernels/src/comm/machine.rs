//! Which ranks share a machine and its cores. Not every launcher says it, so ranks tell each other.

use crate::cores;

/// Ends the name of a machine in a message.
const NAME: char = '\n';

/// This rank among those on its machine.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) struct MachinePlace {
    /// Ranks on the machine.
    pub size: usize,
    /// Its number among them.
    pub rank: usize,
    /// Its part of the cores: launchers may bind ranks to cores of their own, or to the same ones.
    pub threads: usize,
}

/// What a rank tells the others: its machine and its cores.
pub(super) fn own(name: &str) -> String {
    let boot = std::fs::read_to_string("/proc/sys/kernel/random/boot_id").unwrap_or_default();
    let status = std::fs::read_to_string("/proc/thread-self/status").unwrap_or_default();
    let cores = status.lines().find_map(|line| line.strip_prefix("Cpus_allowed_list:")).unwrap_or_default();
    format!("{name} {}{NAME}{}", boot.trim(), cores.trim())
}

/// The place of `rank`, from what all ranks told.
pub(super) fn place(told: &[String], rank: usize) -> MachinePlace {
    let parts: Vec<(&str, &str)> =
        told.iter().map(|text| text.split_once(NAME).unwrap_or((text, ""))).collect();
    let here = |other: &usize| parts[*other].0 == parts[rank].0;
    let (size, before) = ((0..told.len()).filter(here).count(), (0..rank).filter(here).count());
    let lists: Vec<Vec<usize>> = (0..told.len()).filter(here).map(|other| cpus(parts[other].1)).collect();
    let threads = part(cores(), &lists, before);
    MachinePlace { size, rank: before, threads }
}

/// Of `count` cores, the part of the rank with list `own`: a core belongs in equal parts to all ranks that may use it.
fn part(count: usize, lists: &[Vec<usize>], own: usize) -> usize {
    let sharers = |cpu: &usize| lists.iter().filter(|list| list.contains(cpu)).count();
    let parts: f64 = lists[own].iter().map(|cpu| 1.0 / sharers(cpu) as f64).sum();
    let fraction =
        if lists[own].is_empty() { 1.0 / lists.len() as f64 } else { parts / lists[own].len() as f64 };
    ((count as f64 * fraction + 1e-9) as usize).max(1)
}

/// The numbers of a list such as `0-3,8`.
fn cpus(list: &str) -> Vec<usize> {
    let range = |text: &str| {
        let (first, last) = text.split_once('-').unwrap_or((text, text));
        Some(first.trim().parse().ok()?..=last.trim().parse().ok()?)
    };
    list.split(',').filter_map(range).flatten().collect()
}

#[cfg(test)]
mod tests {
    use super::*;

    /// Bug: under `srun` all ranks of a run were taken for ranks of one machine, which then divided its cores among too many; with
    /// PMI-2, ranks of the second machine looked for GPUs with numbers above its last.
    #[test]
    fn ranks_of_a_machine_are_counted_by_its_name() {
        let told = ["a 1", "b 2", "a 1", "b 2", "a 1", "a 3"].map(|name| format!("{name}{NAME}"));
        let places: Vec<_> = (0..6).map(|rank| place(&told, rank)).map(|p| (p.size, p.rank)).collect();
        assert_eq!(places, [(3, 0), (2, 0), (3, 1), (2, 1), (3, 2), (1, 0)]);
        assert_eq!(place(&[own("a"), own("b")], 1).threads, cores());
    }

    /// Bug: ranks that the launcher binds to cores of their own divided these among all ranks once more.
    #[test]
    fn ranks_divide_the_cores_that_they_share() {
        let parts = |lists: &[&str]| -> Vec<usize> {
            let lists: Vec<Vec<usize>> = lists.iter().map(|list| cpus(list)).collect();
            (0..lists.len()).map(|own| part(lists[own].len().max(8), &lists, own)).collect()
        };
        assert_eq!(parts(&["0-7", "0-7"]), [4, 4]);
        assert_eq!(parts(&["0-7", "8-15"]), [8, 8]);
        assert_eq!(parts(&["0-7,16-23", "8-15,24-31"]), [16, 16]);
        assert_eq!(parts(&["0-15", "0-15", "0-15"]), [5, 5, 5]);
        assert_eq!(parts(&["", ""]), [4, 4], "a system that does not say");
        assert_eq!(part(4, &[cpus("0-7"), cpus("0-7")], 0), 2, "a container with four of the cores");
        assert_eq!(part(1, &[cpus("0"), cpus("0")], 0), 1);
    }
}

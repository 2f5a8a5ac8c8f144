//! Detects from the launcher's environment variables that this process is one of several ranks.

use crate::error::{Error, Result};

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Launcher {
    /// `mpirun` of Open MPI.
    OpenMpi,
    /// `mpirun` or `mpiexec` of MPICH and its derivatives (Hydra), or `srun --mpi=pmi2`.
    Pmi,
    /// `srun --mpi=pmix`.
    Pmix,
    /// `torchrun`, or anything that sets RANK and WORLD_SIZE.
    Torchrun,
}

/// This process according to its environment.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub struct Launched {
    pub launcher: Launcher,
    pub rank: usize,
    /// World size; `None` if only MPI knows it.
    pub size: Option<usize>,
    /// Rank among those on this machine, if `srun` or `torchrun` says it; under MPI, ranks tell each other.
    pub local_rank: Option<usize>,
    /// Ranks on this machine, if `torchrun` says it.
    pub local_size: Option<usize>,
    /// Whether `srun` itself started the ranks.
    pub by_slurm: bool,
}

/// A launcher's variables.
struct Names {
    launcher: Launcher,
    rank: &'static str,
    size: &'static str,
}

const NAMES: [Names; 4] = [
    Names { launcher: Launcher::OpenMpi, rank: "OMPI_COMM_WORLD_RANK", size: "OMPI_COMM_WORLD_SIZE" },
    Names { launcher: Launcher::Pmi, rank: "PMI_RANK", size: "PMI_SIZE" },
    Names {
        launcher: Launcher::Pmix,
        rank: "PMIX_RANK",
        size: SLURM_SIZE, // SLURM_NTASKS may be that of the whole allocation
    },
    Names { launcher: Launcher::Torchrun, rank: "RANK", size: "WORLD_SIZE" },
];

/// Number of processes that this `srun` started; not set outside.
const SLURM_SIZE: &str = "SLURM_STEP_NUM_TASKS";

/// Launchers that also start processes that no MPI connects: name, number of this process, number of all.
const STARTERS: [(&str, &str, &str); 3] = [
    ("srun", "SLURM_PROCID", SLURM_SIZE),
    ("flux run", "FLUX_TASK_RANK", "FLUX_JOB_SIZE"),
    ("jsrun", "JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE"),
];

/// Which MPI fits which option of `srun`.
const SLURM_FIX: &str =
    "srun --mpi=pmix for Open MPI, srun --mpi=pmi2 for MPICH (`srun --mpi=list` shows what this Slurm has)";
const ALONE_FIX: &str = "FERRL_MPI=off if each process is a run of its own";

impl Names {
    /// What these variables say; `None` if they are not set.
    fn read(&self, get: &impl Fn(&str) -> Option<String>) -> Result<Option<Launched>> {
        let number = |name: &str| -> Result<Option<usize>> {
            let Some(text) = get(name) else { return Ok(None) };
            text.parse().map(Some).map_err(|_| {
                Error::usage(format!("{name} is {text:?}, expected a number"))
                    .fix("start ranks with mpirun, srun or `ferrl launch`, or unset the variable")
            })
        };
        let is_pmix = self.launcher == Launcher::Pmix;
        // `prterun` in a shell of Slurm has that shell's size.
        let has_size = !is_pmix || get("PMIX_NAMESPACE").is_some_and(|name| name.starts_with("slurm.pmix"));
        let (size_name, size) = (self.size, if has_size { number(self.size)? } else { None });
        let Some(rank) = number(self.rank)? else {
            return match size.filter(|&size| size > 1 && !is_pmix) {
                Some(size) => {
                    Err(Error::usage(format!("{size_name} is {size} and {} is not set", self.rank))
                        .fix(format!("{} on every rank, or unset {size_name} to run alone", self.rank)))
                }
                None => Ok(None),
            };
        };
        if size.is_none() && !is_pmix {
            return Ok(None);
        }
        if let Some(size) = size.filter(|&size| rank >= size) {
            return Err(Error::usage(format!("{} is {rank} of {size_name} = {size}", self.rank))
                .fix("ranks count from 0"));
        }
        let said = |name: &str| get(name)?.parse().ok();
        let is_torchrun = self.launcher == Launcher::Torchrun;
        let is_pmi = is_pmix || self.launcher == Launcher::Pmi;
        let by_slurm = is_pmi && size.is_some() && said(SLURM_SIZE) == size;
        let local_rank = said(if is_torchrun { "LOCAL_RANK" } else { "SLURM_LOCALID" });
        Ok(Some(Launched {
            launcher: self.launcher,
            rank,
            size,
            local_rank: local_rank.filter(|_| is_torchrun || by_slurm),
            local_size: said("LOCAL_WORLD_SIZE").filter(|_| is_torchrun),
            by_slurm,
        }))
    }
}

impl Launched {
    /// Reads the environment; `None` for a process that was started alone. Processes that were started together and that nothing
    /// connects are an error: each would run alone, all of them in one run folder.
    pub fn from_env() -> Result<Option<Self>> {
        Self::from(|name| std::env::var(name).ok())
    }

    fn from(get: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        let get = |name: &str| get(name).filter(|value| !value.is_empty());
        if get("FERRL_MPI").is_some_and(|value| value == "off") {
            return Ok(None);
        }
        // The innermost launcher counts: `srun` may start one torchrun per machine, and `mpirun` may run in a shell of `srun`.
        let elastic = get("TORCHELASTIC_RUN_ID").is_some();
        let first = NAMES.iter().filter(|names| elastic && names.launcher == Launcher::Torchrun);
        let mut is_one = false;
        for names in first.chain(&NAMES) {
            match names.read(&get)? {
                Some(launched) if launched.size != Some(1) => return Ok(Some(launched)),
                Some(_) if elastic || names.launcher != Launcher::Torchrun => is_one = true,
                _ => {}
            }
        }
        let count = |name: &str| get(name)?.parse().ok().filter(|&size: &usize| size > 1);
        let unconnected = STARTERS.iter().find_map(|(name, _, size)| Some((name, count(size)?)));
        match unconnected.filter(|_| !is_one) {
            None => Ok(None),
            Some((name, size)) => {
                let fix = if *name == "srun" { SLURM_FIX } else { "an MPI that it starts" };
                let what =
                    format!("{name} started {size} processes and no MPI connects them: each would run alone");
                Err(Error::usage(what).fix(format!("{fix}; {ALONE_FIX}")))
            }
        }
    }

    /// Number of this process among several that `srun` or the like has started, connected or not.
    pub fn number() -> Option<usize> {
        let number = |name: &str| std::env::var(name).ok()?.parse().ok();
        STARTERS.iter().find(|(_, _, size)| number(size) > Some(1)).and_then(|(_, own, _)| number(own))
    }

    /// Which MPI to use if the one that was found does not know the other ranks.
    pub(super) fn fix(&self) -> String {
        let fix = if self.by_slurm { SLURM_FIX } else { "the mpirun of the same installation" };
        format!("{fix}, or FERRL_MPI=/path/to/libmpi.so of the MPI of this launcher; {ALONE_FIX}")
    }
}

/// Index of the GPU of the rank with this number on its machine: `srun --gpus-per-task=1` shows every rank its own GPU alone, as
/// number 0.
pub fn card_of(local_rank: usize) -> usize {
    visible_card(local_rank, std::env::var("CUDA_VISIBLE_DEVICES").ok().as_deref())
}

fn visible_card(local_rank: usize, visible: Option<&str>) -> usize {
    let one = visible.is_some_and(|list| !list.is_empty() && !list.contains(','));
    if one { 0 } else { local_rank }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pairs: &[(&str, &str)]) -> Result<Option<Launched>> {
        let get = |name: &str| pairs.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string());
        Launched::from(get)
    }

    #[test]
    fn ranks_are_read_from_what_each_launcher_sets() {
        assert_eq!(of(&[]).unwrap(), None);
        let open = of(&[("OMPI_COMM_WORLD_RANK", "3"), ("OMPI_COMM_WORLD_SIZE", "4")]).unwrap().unwrap();
        assert_eq!((open.launcher, open.rank, open.size), (Launcher::OpenMpi, 3, Some(4)));
        let hydra = of(&[("PMI_RANK", "0"), ("PMI_SIZE", "2")]).unwrap().unwrap();
        assert_eq!((hydra.launcher, hydra.by_slurm), (Launcher::Pmi, false));
        let local = [("LOCAL_RANK", "0"), ("LOCAL_WORLD_SIZE", "1")];
        let torch = of(&[&[("RANK", "1"), ("WORLD_SIZE", "2")], &local[..]].concat()).unwrap().unwrap();
        assert_eq!((torch.launcher, torch.local_rank), (Launcher::Torchrun, Some(0)));
        assert_eq!(torch.local_size, Some(1));
        assert!(of(&[("RANK", "2"), ("WORLD_SIZE", "2")]).is_err());
        assert!(of(&[("RANK", "x"), ("WORLD_SIZE", "2")]).is_err());
    }

    /// What Slurm 22.05 sets in tasks of `srun -N 2 -n 4`.
    const TASK: [(&str, &str); 5] = [
        (SLURM_SIZE, "4"),
        ("SLURM_NTASKS", "4"),
        ("SLURM_PROCID", "3"),
        ("SLURM_LOCALID", "1"),
        ("SLURM_STEP_TASKS_PER_NODE", "2(x2)"),
    ];

    /// What it sets with PMIx.
    const SPACE: (&str, &str) = ("PMIX_NAMESPACE", "slurm.pmix.3.0");

    #[test]
    fn tasks_of_slurm_are_ranks_with_either_interface() {
        let pmix = of(&[&TASK[..], &[("PMIX_RANK", "3"), SPACE]].concat()).unwrap().unwrap();
        assert_eq!((pmix.launcher, pmix.rank, pmix.size), (Launcher::Pmix, 3, Some(4)));
        let pmi = of(&[&TASK[..], &[("PMI_RANK", "3"), ("PMI_SIZE", "4")]].concat()).unwrap().unwrap();
        assert_eq!((pmi.launcher, pmi.rank, pmi.size), (Launcher::Pmi, 3, Some(4)));
        for launched in [pmix, pmi] {
            assert!(launched.by_slurm && launched.fix().contains("--mpi=pmix"));
            // Bug: with PMI-2 the rank in the whole run was taken for that on the machine, which selects the GPU.
            assert_eq!(launched.local_rank, Some(1));
        }
    }

    /// Bug: processes that `srun` starts without an MPI interface each trained alone, one of them in the run folder.
    #[test]
    fn processes_that_nothing_connects_are_refused() {
        let said = of(&TASK).unwrap_err().to_string();
        assert!(said.contains("srun started 4 processes") && said.contains("srun --mpi=pmix"), "{said}");
        for (number, size) in
            [("FLUX_TASK_RANK", "FLUX_JOB_SIZE"), ("JSM_NAMESPACE_RANK", "JSM_NAMESPACE_SIZE")]
        {
            assert!(of(&[(number, "0"), (size, "2")]).is_err());
            assert_eq!(of(&[(number, "0"), (size, "1")]).unwrap(), None);
        }
        let said = of(&[("WORLD_SIZE", "2")]).unwrap_err().to_string();
        assert!(said.contains("WORLD_SIZE is 2 and RANK is not set"), "{said}");
        assert_eq!(of(&[("WORLD_SIZE", "1")]).unwrap(), None);
        // A job that tries many seeds says so.
        assert_eq!(of(&[&TASK[..], &[("FERRL_MPI", "off")]].concat()).unwrap(), None);
        // `mpirun -n 1`, whose Open MPI reaches other machines by `srun`.
        let one = [("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1")];
        assert_eq!(of(&[&TASK[..], &one].concat()).unwrap(), None);
    }

    #[test]
    fn a_process_in_an_allocation_is_alone() {
        // A batch script and a shell of `salloc` have the number of tasks of the allocation.
        let script = [("SLURM_NTASKS", "4"), ("SLURM_PROCID", "0")];
        assert_eq!(of(&script).unwrap(), None);
        let shell = [&script[..], &[(SLURM_SIZE, "1"), ("PMIX_RANK", "0"), SPACE]].concat();
        assert_eq!(of(&shell).unwrap(), None);
    }

    /// Bug: in a shell of `srun`, ranks of another launcher were taken for the only task of that shell: each trained alone.
    #[test]
    fn the_innermost_launcher_counts() {
        let shells: [&[(&str, &str)]; 3] = [
            &[("PMIX_RANK", "0"), (SLURM_SIZE, "1"), SPACE],
            &[("PMI_RANK", "0"), ("PMI_SIZE", "1")],
            &[("OMPI_COMM_WORLD_RANK", "0"), ("OMPI_COMM_WORLD_SIZE", "1")],
        ];
        for shell in shells {
            let inner = of(&[shell, &[("RANK", "1"), ("WORLD_SIZE", "2")]].concat()).unwrap().unwrap();
            assert_eq!((inner.launcher, inner.rank), (Launcher::Torchrun, 1));
        }
        // `srun --mpi=pmix -N 2 torchrun --nproc_per_node 8`
        let outer = [("PMIX_RANK", "1"), (SLURM_SIZE, "2"), SPACE, ("TORCHELASTIC_RUN_ID", "none")];
        let inner = of(&[&outer[..], &[("RANK", "11"), ("WORLD_SIZE", "16")]].concat()).unwrap().unwrap();
        assert_eq!((inner.launcher, inner.rank, inner.size), (Launcher::Torchrun, 11, Some(16)));
    }

    /// Bug: where each rank sees its own GPU alone, rank 1 of a machine looked for a second one.
    #[test]
    fn a_rank_that_sees_one_gpu_uses_it() {
        let cards = |visible| [0, 1, 3].map(|local_rank| visible_card(local_rank, visible));
        assert_eq!(cards(Some("2")), [0, 0, 0]);
        assert_eq!(cards(Some("GPU-4f5a")), [0, 0, 0]);
        for visible in [None, Some(""), Some("0,1,2,3")] {
            assert_eq!(cards(visible), [0, 1, 3]);
        }
    }

    /// Bug: ranks of `prterun`, which sets PMIX_RANK alone, each trained alone.
    #[test]
    fn a_rank_without_a_size_asks_mpi() {
        let rank = of(&[("PMIX_RANK", "1")]).unwrap().unwrap();
        assert_eq!((rank.launcher, rank.rank, rank.size), (Launcher::Pmix, 1, None));
        let shell = of(&[("PMIX_RANK", "1"), ("PMIX_NAMESPACE", "prterun-a-1@1"), (SLURM_SIZE, "1")]);
        assert_eq!(shell.unwrap().unwrap().size, None);
    }
}

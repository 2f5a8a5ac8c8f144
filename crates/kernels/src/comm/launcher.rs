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
    /// World size.
    pub size: usize,
    /// Ranks on this machine.
    pub local_size: usize,
    /// Its rank among those.
    pub local_rank: usize,
}

/// A launcher's variables: rank, world size, local rank, local size.
struct Names {
    launcher: Launcher,
    rank: &'static str,
    size: &'static str,
    local_rank: &'static str,
    local_size: &'static str,
}

const NAMES: [Names; 4] = [
    Names {
        launcher: Launcher::OpenMpi,
        rank: "OMPI_COMM_WORLD_RANK",
        size: "OMPI_COMM_WORLD_SIZE",
        local_rank: "OMPI_COMM_WORLD_LOCAL_RANK",
        local_size: "OMPI_COMM_WORLD_LOCAL_SIZE",
    },
    Names {
        launcher: Launcher::Pmi,
        rank: "PMI_RANK",
        size: "PMI_SIZE",
        local_rank: "MPI_LOCALRANKID",
        local_size: "MPI_LOCALNRANKS",
    },
    Names {
        launcher: Launcher::Pmix,
        rank: "PMIX_RANK",
        size: "SLURM_NTASKS",
        local_rank: "SLURM_LOCALID",
        local_size: "SLURM_NTASKS_PER_NODE",
    },
    Names {
        launcher: Launcher::Torchrun,
        rank: "RANK",
        size: "WORLD_SIZE",
        local_rank: "LOCAL_RANK",
        local_size: "LOCAL_WORLD_SIZE",
    },
];

impl Launched {
    /// Reads the environment; `None` for a process that was started alone.
    pub fn from_env() -> Result<Option<Self>> {
        Self::from(|name| std::env::var(name).ok())
    }

    fn from(get: impl Fn(&str) -> Option<String>) -> Result<Option<Self>> {
        for names in &NAMES {
            let (Some(rank), Some(size)) = (get(names.rank), get(names.size)) else { continue };
            let number = |name: &str, text: &str| {
                text.parse::<usize>().map_err(|_| {
                    Error::usage(format!("{name} is {text:?}, expected a number"))
                        .fix("start ranks with mpirun, srun or `ferrl launch`, or unset the variable")
                })
            };
            let (rank, size) = (number(names.rank, &rank)?, number(names.size, &size)?);
            if rank >= size {
                return Err(Error::usage(format!("{} is {rank} of {} = {size}", names.rank, names.size))
                    .fix("ranks count from 0"));
            }
            let or =
                |name: &str, otherwise: usize| get(name).and_then(|v| v.parse().ok()).unwrap_or(otherwise);
            let (local_size, local_rank) = (or(names.local_size, size), or(names.local_rank, rank));
            return Ok(Some(Launched { launcher: names.launcher, rank, size, local_size, local_rank }));
        }
        Ok(None)
    }
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
        let open = of(&[
            ("OMPI_COMM_WORLD_RANK", "3"),
            ("OMPI_COMM_WORLD_SIZE", "4"),
            ("OMPI_COMM_WORLD_LOCAL_RANK", "1"),
        ]);
        let open = open.unwrap().unwrap();
        assert_eq!((open.launcher, open.rank, open.size, open.local_rank), (Launcher::OpenMpi, 3, 4, 1));
        let hydra = of(&[("PMI_RANK", "0"), ("PMI_SIZE", "2")]).unwrap().unwrap();
        assert_eq!((hydra.launcher, hydra.local_size), (Launcher::Pmi, 2));
        let slurm =
            of(&[("PMIX_RANK", "5"), ("SLURM_NTASKS", "8"), ("SLURM_LOCALID", "1")]).unwrap().unwrap();
        assert_eq!((slurm.launcher, slurm.rank, slurm.local_rank), (Launcher::Pmix, 5, 1));
        let torch = of(&[("RANK", "1"), ("WORLD_SIZE", "2")]).unwrap().unwrap();
        assert_eq!(torch.launcher, Launcher::Torchrun);
        assert!(of(&[("RANK", "2"), ("WORLD_SIZE", "2")]).is_err());
        assert!(of(&[("RANK", "x"), ("WORLD_SIZE", "2")]).is_err());
    }
}

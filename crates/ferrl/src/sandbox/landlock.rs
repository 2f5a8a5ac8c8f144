//! Landlock: which files may be touched, and no signal or abstract socket reaches a process outside.

use landlock::CompatLevel::{BestEffort, HardRequirement};
use landlock::{
    ABI, Access, AccessFs, AccessNet, BitFlags, Compatible, LandlockStatus, PathBeneath, PathFd, Ruleset,
    RulesetAttr, RulesetCreatedAttr, RulesetStatus, Scope,
};
use std::path::{Path, PathBuf};

/// Devices that hold nothing.
pub(super) const DEVICES: [&str; 5] = ["/dev/null", "/dev/zero", "/dev/full", "/dev/random", "/dev/urandom"];

/// Restricts this process to reading `reads` and writing below `scratch`.
pub(super) fn files(reads: &[PathBuf], scratch: &Path) -> Result<(), String> {
    // What newer kernels can restrict is restricted there; every kernel with Landlock knows the first version's rights.
    let abi = ABI::V9;
    let ruleset = Ruleset::default()
        .set_compatibility(HardRequirement)
        .handle_access(AccessFs::from_all(ABI::V1))
        .map_err(text)?
        .set_compatibility(BestEffort)
        .handle_access(AccessFs::from_all(abi))
        .map_err(text)?
        .handle_access(AccessNet::from_all(abi))
        .map_err(text)?;
    let mut created = ruleset.create().map_err(text)?;
    let devices: Vec<PathBuf> = DEVICES.iter().map(PathBuf::from).collect();
    let allowed: [(&[PathBuf], BitFlags<AccessFs>); 3] = [
        (reads, AccessFs::from_read(abi)),
        (&devices, AccessFs::ReadFile | AccessFs::WriteFile),
        (&[scratch.to_path_buf()], AccessFs::from_all(abi) & !(AccessFs::MakeChar | AccessFs::MakeBlock)),
    ];
    for (paths, access) in allowed {
        for path in paths {
            let Ok(place) = PathFd::new(path) else { continue }; // a path that does not exist needs no rule
            let access = if path.is_dir() { access } else { access & AccessFs::from_file(abi) };
            created = created.add_rule(PathBeneath::new(place, access)).map_err(text)?;
        }
    }
    let status = created.restrict_self().map_err(text)?;
    match (status.ruleset, status.landlock) {
        (RulesetStatus::NotEnforced, _)
        | (_, LandlockStatus::NotEnabled | LandlockStatus::NotImplemented) => {
            Err("the kernel has no Landlock".into())
        }
        _ => Ok(()),
    }
}

/// Keeps signals and abstract sockets within this process and what it starts.
pub(super) fn scopes() -> Result<(), String> {
    Ruleset::default()
        .set_compatibility(HardRequirement)
        .scope(Scope::from_all(ABI::V6))
        .map_err(text)?
        .create()
        .map_err(text)?
        .restrict_self()
        .map(|_| ())
        .map_err(text)
}

fn text(error: impl std::error::Error) -> String {
    error.to_string()
}

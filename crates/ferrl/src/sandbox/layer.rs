//! The layers of confinement: names, and what each prevents.

use serde::{Deserialize, Serialize};
use std::fmt;

/// One mechanism of the kernel that confines a program.
#[derive(Clone, Copy, Debug, PartialEq, Eq, PartialOrd, Ord, Hash, Serialize, Deserialize)]
#[serde(rename_all = "lowercase")]
pub enum Confinement {
    /// A user id of its own (started as root) or a user namespace (started as anybody else); no capabilities.
    User,
    /// A pid namespace: it sees no other process, and its last descendant dies with it.
    Pid,
    /// A network namespace without interfaces.
    Net,
    /// IPC and UTS namespaces.
    Ipc,
    /// A mount namespace: a root that holds the system's libraries read-only and a scratch folder of limited size.
    Mount,
    /// Landlock: a list of the files that may be read, and of the one folder that may be written.
    Landlock,
    /// Landlock's scopes: no signals and no abstract sockets to the outside.
    Scope,
    /// A seccomp filter that refuses system calls no program of this kind needs.
    Seccomp,
    /// Resource limits per process: memory, CPU time, processes, open files, file size.
    Rlimits,
}

impl Confinement {
    /// All of them, in the order in which they are applied.
    pub const ALL: [Confinement; 9] = [
        Confinement::User,
        Confinement::Pid,
        Confinement::Net,
        Confinement::Ipc,
        Confinement::Mount,
        Confinement::Landlock,
        Confinement::Scope,
        Confinement::Seccomp,
        Confinement::Rlimits,
    ];

    /// Its name in messages.
    pub fn name(self) -> &'static str {
        match self {
            Confinement::User => "user",
            Confinement::Pid => "pid",
            Confinement::Net => "net",
            Confinement::Ipc => "ipc",
            Confinement::Mount => "mount",
            Confinement::Landlock => "landlock",
            Confinement::Scope => "scope",
            Confinement::Seccomp => "seccomp",
            Confinement::Rlimits => "rlimits",
        }
    }

    /// What a host needs for it.
    pub fn needs(self) -> &'static str {
        match self {
            Confinement::User => "root, or user namespaces (sysctl user.max_user_namespaces)",
            Confinement::Pid | Confinement::Net | Confinement::Ipc | Confinement::Mount => {
                "CAP_SYS_ADMIN or user namespaces"
            }
            Confinement::Landlock => "Linux 5.13 with landlock among its security modules",
            Confinement::Scope => "Linux 6.12 with landlock among its security modules",
            Confinement::Seccomp => "a kernel with seccomp filters, on x86-64, aarch64 or riscv64",
            Confinement::Rlimits => "Linux",
        }
    }
}

impl fmt::Display for Confinement {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        f.write_str(self.name())
    }
}

/// Active and missing layers.
#[derive(Clone, Debug, Default, PartialEq, Eq, Serialize, Deserialize)]
pub struct ConfinementReport {
    pub in_force: Vec<Confinement>,
    /// Layers that are missing, each with the reason.
    pub missing: Vec<(Confinement, String)>,
}

impl ConfinementReport {
    /// A report in which every layer is missing for the same reason.
    pub fn nothing(reason: &str) -> Self {
        ConfinementReport {
            in_force: Vec::new(),
            missing: Confinement::ALL.map(|l| (l, reason.to_string())).to_vec(),
        }
    }

    pub fn has(&self, layer: Confinement) -> bool {
        self.in_force.contains(&layer)
    }

    /// The first missing layer that mode `on` requires. Scopes are not required if namespaces hide other processes and
    /// sockets.
    pub fn hole(&self) -> Option<&(Confinement, String)> {
        let covered = |l: Confinement| {
            l == Confinement::Scope && self.has(Confinement::Pid) && self.has(Confinement::Net)
        };
        self.missing.iter().find(|(layer, _)| !covered(*layer))
    }
}

impl fmt::Display for ConfinementReport {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let names = |layers: &mut dyn Iterator<Item = Confinement>| {
            let names: Vec<&str> = layers.map(Confinement::name).collect();
            if names.is_empty() { "none".to_string() } else { names.join(", ") }
        };
        let missing = names(&mut self.missing.iter().map(|(l, _)| *l));
        write!(
            f,
            "sandbox layers in force: {}; missing: {missing}",
            names(&mut self.in_force.iter().copied())
        )?;
        // One reason is the reason for all of them more often than not.
        match self.missing.first() {
            Some((_, why)) => write!(f, " ({why})"),
            None => Ok(()),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn scopes_are_covered_by_namespaces_and_by_nothing_else() {
        let mut report = ConfinementReport { in_force: Confinement::ALL.to_vec(), missing: Vec::new() };
        report.in_force.retain(|l| *l != Confinement::Scope);
        report.missing.push((Confinement::Scope, "old kernel".into()));
        assert_eq!(report.hole(), None);
        report.in_force.retain(|l| *l != Confinement::Net);
        report.missing.push((Confinement::Net, "not allowed".into()));
        assert_eq!(report.hole().map(|(l, _)| *l), Some(Confinement::Scope));
    }
}

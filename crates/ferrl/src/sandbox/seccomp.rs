//! System calls that are refused to confined programs: those that change the machine, inspect other processes, create namespaces
//! or sockets, or allocate memory that no limit counts.
//!
//! A refused call returns EPERM and the program continues; `clone3` returns ENOSYS, so that the C library falls back on `clone`, whose
//! flags a filter can read. Calls of another architecture (`int 0x80`) end the program.

use libc::*;
use seccompiler::{
    SeccompAction, SeccompCmpArgLen as Length, SeccompCmpOp as Is, SeccompCondition, SeccompFilter,
    SeccompRule, TargetArch, apply_filter,
};
use std::collections::BTreeMap;

/// Refused whatever the arguments are.
#[rustfmt::skip]
const REFUSED: &[c_long] = &[
    // Sockets: pairs of them stay, which event loops are made of.
    SYS_socket, SYS_connect, SYS_bind, SYS_listen, SYS_accept, SYS_accept4,
    // Namespaces and mounts.
    SYS_unshare, SYS_setns, SYS_mount, SYS_umount2, SYS_pivot_root, SYS_chroot, SYS_open_tree, SYS_move_mount,
    SYS_fsopen, SYS_fsconfig, SYS_fsmount, SYS_fspick, SYS_mount_setattr, SYS_open_by_handle_at,
    SYS_name_to_handle_at,
    // Other processes.
    SYS_ptrace, SYS_process_vm_readv, SYS_process_vm_writev, SYS_process_madvise, SYS_pidfd_getfd, SYS_kcmp,
    SYS_migrate_pages, SYS_move_pages,
    // Kernel interfaces with a history of holes.
    SYS_bpf, SYS_perf_event_open, SYS_userfaultfd, SYS_io_uring_setup, SYS_io_uring_enter,
    SYS_io_uring_register, SYS_add_key, SYS_request_key, SYS_keyctl, SYS_fanotify_init, SYS_personality,
    // Memory and queues that outlive a process or that no limit counts.
    SYS_memfd_create, SYS_memfd_secret, SYS_shmget, SYS_shmat, SYS_shmctl, SYS_semget, SYS_semctl, SYS_msgget,
    SYS_msgsnd, SYS_msgrcv, SYS_msgctl, SYS_mq_open, SYS_mq_unlink,
    // The machine.
    SYS_reboot, SYS_kexec_load, SYS_init_module, SYS_finit_module, SYS_delete_module, SYS_swapon, SYS_swapoff,
    SYS_syslog, SYS_acct, SYS_quotactl, SYS_settimeofday, SYS_clock_settime, SYS_clock_adjtime, SYS_adjtimex,
    SYS_sethostname, SYS_setdomainname, SYS_vhangup,
];

#[cfg(target_arch = "x86_64")]
const REFUSED_HERE: &[c_long] = &[
    SYS_kexec_file_load, SYS_iopl, SYS_ioperm, SYS_modify_ldt, SYS_uselib, SYS_ustat, SYS_sysfs, SYS__sysctl,
];
#[cfg(not(target_arch = "x86_64"))]
const REFUSED_HERE: &[c_long] = &[];

/// Calls that change a file's mode, owner, times or attributes, which Landlock does not check: refused without a read-only mount.
const METADATA: &[c_long] = &[
    SYS_fchmod, SYS_fchmodat, SYS_fchown, SYS_fchownat, SYS_utimensat, SYS_setxattr, SYS_lsetxattr,
    SYS_fsetxattr, SYS_removexattr, SYS_lremovexattr, SYS_fremovexattr, FCHMODAT2,
];
#[cfg(target_arch = "x86_64")]
const METADATA_HERE: &[c_long] = &[SYS_chmod, SYS_chown, SYS_lchown, SYS_utime, SYS_utimes, SYS_futimesat];
#[cfg(not(target_arch = "x86_64"))]
const METADATA_HERE: &[c_long] = &[];
/// The same number on every architecture.
const FCHMODAT2: c_long = 452;

/// Flags of `clone` that make namespaces.
const NEW_NAMESPACES: [c_int; 8] = [
    CLONE_NEWNS, CLONE_NEWCGROUP, CLONE_NEWUTS, CLONE_NEWIPC, CLONE_NEWUSER, CLONE_NEWPID, CLONE_NEWNET, 0x80,
];

/// Applies the filter to this process and all that it starts.
pub(super) fn apply(read_only_mounts: bool) -> Result<(), String> {
    let arch: TargetArch = std::env::consts::ARCH.try_into().map_err(|e| format!("{e}"))?;
    let mut rules: BTreeMap<i64, Vec<SeccompRule>> = BTreeMap::new();
    let metadata = [METADATA, METADATA_HERE];
    let more: &[&[c_long]] = if read_only_mounts { &[] } else { &metadata };
    for call in [REFUSED, REFUSED_HERE].iter().chain(more).copied().flatten() {
        rules.insert(*call, Vec::new());
    }
    rules.insert(
        SYS_clone,
        NEW_NAMESPACES.map(|flag| has_bit(0, flag as u64)).into_iter().collect::<Result<_, _>>()?,
    );
    rules.insert(SYS_prctl, vec![equals(0, PR_SET_PDEATHSIG as u64)?]);
    rules.insert(SYS_ioctl, vec![equals(1, TIOCSTI)?, equals(1, 0x541C)?]); // TIOCLINUX
    x32(&mut rules);
    install(rules, EPERM, arch)?;
    install(BTreeMap::from([(SYS_clone3, Vec::new())]), ENOSYS, arch)
}

/// x86-64 has a second table of calls, with this bit in their numbers; its own calls begin at 512.
#[cfg(target_arch = "x86_64")]
fn x32(rules: &mut BTreeMap<i64, Vec<SeccompRule>>) {
    const BIT: i64 = 0x4000_0000;
    let all: Vec<i64> = rules.keys().copied().chain(512..548).collect();
    rules.extend(all.into_iter().map(|call| (call | BIT, Vec::new())));
}

#[cfg(not(target_arch = "x86_64"))]
fn x32(_: &mut BTreeMap<i64, Vec<SeccompRule>>) {}

fn has_bit(argument: u8, bit: u64) -> Result<SeccompRule, String> {
    rule(argument, Is::MaskedEq(bit), bit)
}

fn equals(argument: u8, value: u64) -> Result<SeccompRule, String> {
    rule(argument, Is::Eq, value)
}

fn rule(argument: u8, is: Is, value: u64) -> Result<SeccompRule, String> {
    let condition = SeccompCondition::new(argument, Length::Dword, is, value).map_err(|e| e.to_string())?;
    SeccompRule::new(vec![condition]).map_err(|e| e.to_string())
}

fn install(rules: BTreeMap<i64, Vec<SeccompRule>>, errno: c_int, arch: TargetArch) -> Result<(), String> {
    let refuse = SeccompAction::Errno(errno as u32);
    let filter = SeccompFilter::new(rules, SeccompAction::Allow, refuse, arch).map_err(|e| e.to_string())?;
    let program: seccompiler::BpfProgram = filter.try_into().map_err(|e| format!("{e}"))?;
    apply_filter(&program).map_err(|e| e.to_string())
}

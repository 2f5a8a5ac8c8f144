//! Memory of the machine, memory used by this process, and the processor's name.

use ferrl_engine::{Error, Result};
use ferrl_kernels::Backend;
use std::sync::LazyLock;
use std::time::Instant;

/// Start time of the program, set by `main`.
pub static START: LazyLock<Instant> = LazyLock::new(Instant::now);

/// Bytes of memory.
#[derive(Clone, Copy, Debug)]
pub struct MachineMemory {
    /// Total of the machine, or of this container.
    pub total: u64,
    /// Free for a new program without swapping.
    pub available: u64,
}

/// Memory as the system reports it; `None` if it does not.
pub fn memory() -> Option<MachineMemory> {
    let text = std::fs::read_to_string("/proc/meminfo").ok()?;
    let mut found =
        MachineMemory { total: kib(&text, "MemTotal:")?, available: kib(&text, "MemAvailable:")? };
    let read = |name: &str| std::fs::read_to_string(format!("/sys/fs/cgroup/{name}")).ok();
    let number = |name: &str| read(name).and_then(|t| t.trim().parse::<u64>().ok());
    if let Some(limit) = number("memory.max") {
        // Containers count cached files as used, but their memory can be reclaimed.
        let cached = read("memory.stat").and_then(|t| field(&t, "inactive_file")).unwrap_or(0);
        let used = number("memory.current").unwrap_or(0).saturating_sub(cached);
        found.total = found.total.min(limit);
        found.available = found.available.min(limit.saturating_sub(used));
    }
    if let Some(room) = address_room() {
        found.available = found.available.min(room);
    }
    Some(found)
}

/// Address space left under `ulimit -v`; `None` if unlimited.
fn address_room() -> Option<u64> {
    let limits = std::fs::read_to_string("/proc/self/limits").ok()?;
    let line = limits.lines().find_map(|l| l.strip_prefix("Max address space"))?;
    let limit: u64 = line.split_whitespace().next()?.parse().ok()?;
    let status = std::fs::read_to_string("/proc/self/status").ok()?;
    Some(limit.saturating_sub(kib(&status, "VmSize:")?))
}

/// Peak resident memory of this process in MiB; 0 if the system does not report it.
pub fn peak_rss_mib() -> f64 {
    let status = std::fs::read_to_string("/proc/self/status").unwrap_or_default();
    kib(&status, "VmHWM:").map_or(0.0, |b| (b as f64 / 104_857.6).round() / 10.0)
}

/// The memory that a device computes in: its own, or the machine's.
pub fn memory_of(device: &dyn Backend) -> Option<MachineMemory> {
    let own = device.memory_report();
    let own = own.map(|r| MachineMemory { total: r.total as u64, available: (r.total - r.used) as u64 });
    own.or_else(memory)
}

/// Fails if `bytes` do not fit, before the system would kill the process.
pub fn ensure_memory(what: &str, bytes: u64, fix: &str) -> Result<()> {
    ensure(memory(), what, bytes, fix)
}

/// The same for what a device holds.
pub fn ensure_memory_of(device: &dyn Backend, what: &str, bytes: u64, fix: &str) -> Result<()> {
    ensure(memory_of(device), what, bytes, fix)
}

fn ensure(memory: Option<MachineMemory>, what: &str, bytes: u64, fix: &str) -> Result<()> {
    match memory {
        Some(m) if bytes > m.available => Err(Error::resource(format!(
            "{what} needs about {} of memory, {} of {} is free",
            size(bytes),
            size(m.available),
            size(m.total)
        ))
        .fix(fix)),
        _ => Ok(()),
    }
}

/// Bytes for people.
pub fn size(bytes: u64) -> String {
    let mib = bytes as f64 / f64::from(1 << 20);
    if mib < 1024.0 { format!("{mib:.0} MiB") } else { format!("{:.1} GiB", mib / 1024.0) }
}

/// The name of the processor; `None` if the system does not report it.
pub fn processor() -> Option<String> {
    let text = std::fs::read_to_string("/proc/cpuinfo").ok()?;
    let line = text.lines().find(|l| l.starts_with("model name"))?;
    Some(line.split_once(':')?.1.trim().to_owned())
}

fn field(text: &str, key: &str) -> Option<u64> {
    let line = text.lines().find(|l| l.split_whitespace().next() == Some(key))?;
    line.split_whitespace().nth(1)?.parse().ok()
}

fn kib(text: &str, key: &str) -> Option<u64> {
    field(text, key).map(|n| n * 1024)
}

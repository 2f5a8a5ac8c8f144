//! `ferrl doctor`: what Ferrl finds on this machine.

use crate::machine;
use crate::output::print;
use ferrl_engine::model::FAMILIES;
use ferrl_engine::{Result, counted};
use ferrl_kernels::{BACKENDS, cores};
use std::fmt::Write;

/// Show what Ferrl finds on this machine
///
/// Prints processor, memory, devices and model families; measures nothing.
#[derive(clap::Args)]
pub struct Args {
    /// Threads [default: all cores]
    #[arg(long, value_name = "N", value_parser = crate::options::size::<1024>)]
    threads: Option<usize>,
}

pub fn run(args: &Args) -> Result<()> {
    let unknown = || "unknown".to_string();
    let mut out = String::new();
    let mut line = |name: &str, value: String| {
        let _ = writeln!(out, "{name:<12}{value}");
    };
    let cores = cores();
    line(
        "ferrl",
        format!("{} ({} {})", env!("CARGO_PKG_VERSION"), std::env::consts::ARCH, std::env::consts::OS),
    );
    line("processor", machine::processor().unwrap_or_else(unknown));
    line("features", features());
    line("FERRL_SIMD", std::env::var("FERRL_SIMD").unwrap_or_else(|_| "not set: the best there is".into()));
    line("threads", format!("{} of {}", args.threads.unwrap_or(cores), counted(cores, "core")));
    let memory = |m: machine::MachineMemory| {
        format!("{}, {} free", machine::size(m.total), machine::size(m.available))
    };
    line("memory", machine::memory().map_or_else(unknown, memory));
    for device in BACKENDS {
        let found = match (device.open)(0, args.threads) {
            Ok(backend) => backend.describe(),
            Err(e) => format!("not usable: {}", e.to_string().replace("\n  fix: ", "; ")),
        };
        line("device", format!("{}: {found}", device.name));
    }
    #[cfg(unix)]
    line(
        "ranks",
        match ferrl_kernels::comm::find_mpi() {
            Some(found) => format!("{} ({}, {} interface)", found.version, found.file, found.interface),
            None => "no MPI library: apt-get install openmpi-bin or mpich to train on several ranks".into(),
        },
    );
    line(
        "cards",
        match ferrl_kernels::comm::find_nccl() {
            Ok(found) => format!("NCCL {} ({})", found.version, found.file),
            Err(e) if std::env::var_os("FERRL_NCCL").is_some() => e.to_string().replace("\n  fix: ", "; "),
            Err(_) => "no NCCL library: pip install nvidia-nccl-cu13 to exchange from card to card".into(),
        },
    );
    line("families", FAMILIES.iter().map(|f| f.name()).collect::<Vec<_>>().join(", "));
    print(&out)
}

#[cfg(target_arch = "x86_64")]
fn features() -> String {
    let all = [
        ("avx2", is_x86_feature_detected!("avx2")),
        ("fma", is_x86_feature_detected!("fma")),
        ("f16c", is_x86_feature_detected!("f16c")),
        ("avx512f", is_x86_feature_detected!("avx512f")),
        ("avx512bw", is_x86_feature_detected!("avx512bw")),
        ("avx512dq", is_x86_feature_detected!("avx512dq")),
        ("avx512vl", is_x86_feature_detected!("avx512vl")),
        ("avx512bf16", is_x86_feature_detected!("avx512bf16")),
        ("avx512vnni", is_x86_feature_detected!("avx512vnni")),
    ];
    let found: Vec<&str> = all.iter().filter(|(_, there)| *there).map(|(name, _)| *name).collect();
    if found.is_empty() { "none that Ferrl uses".into() } else { found.join(" ") }
}

#[cfg(target_arch = "aarch64")]
fn features() -> String {
    let all = [
        ("neon", std::arch::is_aarch64_feature_detected!("neon")),
        ("bf16", std::arch::is_aarch64_feature_detected!("bf16")),
        ("bf16", std::arch::is_aarch64_feature_detected!("bf16")),
    ];
    all.iter().filter(|(_, there)| *there).map(|(name, _)| *name).collect::<Vec<_>>().join(" ")
}

#[cfg(not(any(target_arch = "x86_64", target_arch = "aarch64")))]
fn features() -> String {
    "not looked for on this architecture".into()
}

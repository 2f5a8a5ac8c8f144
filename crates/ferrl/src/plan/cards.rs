//! Cards and links for plans. Peaks are those of the makers' data sheets, without sparsity; those of CPU ranks are measured on
//! this machine.

use ferrl_engine::{Error, Result, nearest};

/// A card and its links.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct Card {
    /// Its name for `--card`.
    pub name: &'static str,
    /// Its memory in bytes.
    pub memory: u64,
    /// Operations a second in bf16, a multiply-add counted as two.
    pub bf16: f64,
    /// The same in f32.
    pub f32: f64,
    /// Bytes a second to the other cards of its machine, in one direction.
    pub link: f64,
    /// Where the figures are from.
    pub source: &'static str,
}

const GB: u64 = 1_000_000_000;

pub const CARDS: &[Card] = &[
    card("A100-40GB", (40, 312.0, 19.5), 300.0, "NVIDIA A100 Tensor Core GPU data sheet (SXM4)"),
    card("A100-80GB", (80, 312.0, 19.5), 300.0, "NVIDIA A100 Tensor Core GPU data sheet (SXM4)"),
    card("H100-80GB", (80, 989.0, 67.0), 450.0, "NVIDIA H100 Tensor Core GPU data sheet (SXM5)"),
    card("H200-141GB", (141, 989.0, 67.0), 450.0, "NVIDIA H200 Tensor Core GPU data sheet (SXM5)"),
    card("B200-180GB", (180, 2250.0, 75.0), 900.0, "NVIDIA HGX B200 data sheet"),
    card("L40S-48GB", (48, 362.0, 91.6), 32.0, "NVIDIA L40S data sheet; PCIe 4.0 x16"),
    card("RTX4090-24GB", (24, 165.2, 82.6), 32.0, "NVIDIA Ada GPU architecture white paper; PCIe 4.0 x16"),
];

/// Bytes a second between machines for each card: a 400 Gbit/s adapter of its own (InfiniBand NDR, ConnectX-7 data sheet).
pub const NETWORK: f64 = 50e9;

/// Fraction of a link's peak that large exchanges reach: NCCL's all_gather among eight H100 moves about 360 of 450 GB/s.
pub const LINK_SHARE: f64 = 0.8;

/// Gigabytes and TFLOP/s in bf16 and f32; GB/s of the link.
const fn card(
    name: &'static str,
    (memory, bf16, f32): (u64, f64, f64),
    link: f64,
    source: &'static str,
) -> Card {
    Card { name, memory: memory * GB, bf16: bf16 * 1e12, f32: f32 * 1e12, link: link * 1e9, source }
}

/// The name of CPU ranks for `--card`.
pub const CPU: &str = ferrl_kernels::BACKENDS[0].name;

/// Bytes a second between ranks of one machine that each get through MPI: 64 MiB in 12 ms, two ranks under Open MPI 4.1.
const MPI_LINK: f64 = (64 << 20) as f64 / 12e-3 / LINK_SHARE;

impl Card {
    /// The same for messages, which pass through the machine's memory: the speed of ranks without cards, which was measured.
    pub(super) fn through_host(self) -> Card {
        Card { link: self.link.min(MPI_LINK), ..self }
    }
}

/// A rank on the CPU: bytes of memory, and operations per second in bf16 and f32.
pub fn processor(memory: u64, bf16: f64, f32: f64) -> Card {
    let source = "measured on this machine; links as MPI between two ranks of one machine";
    Card { name: CPU, memory, bf16, f32, link: MPI_LINK, source }
}

/// The card of a name, in any case.
pub fn find(name: &str) -> Result<&'static Card> {
    let known = || CARDS.iter().map(|c| c.name).chain([CPU]);
    CARDS.iter().find(|c| c.name.eq_ignore_ascii_case(name)).ok_or_else(|| {
        let near = nearest(&name.to_ascii_uppercase(), known()).unwrap_or(CARDS[2].name);
        Error::usage(format!(
            "unknown card {name:?}, expected one of {}",
            known().collect::<Vec<_>>().join(", ")
        ))
        .fix(format!("--card {near}"))
    })
}

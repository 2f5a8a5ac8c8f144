//! What hardware does: coarse, exact, deterministic operations. Knows nothing of models.

#![cfg_attr(not(test), deny(clippy::print_stdout, clippy::print_stderr))] // both panic when the pipe is closed

pub mod backend;
pub mod buffer;
pub mod check;
pub mod codes;
pub mod comm;
pub mod composed;
pub mod cpu;
pub mod cuda;
pub mod error;
pub mod footprint;
mod heap;
pub mod math;
pub mod mmap;
mod operands;
pub mod philox;
mod plain;
mod shapes;
mod sync;
pub mod truncate;
pub mod usage;
mod words;

pub use backend::Backend;
pub use buffer::{Buffer, DType, Weight};
pub use comm::Ranks;
pub use cpu::{narrow, widen};
pub use error::{Class, Error, Result, nearest};
pub use footprint::Footprint;
pub use sync::{cores, lock};
pub use usage::{Books, Purpose};
pub use words::{counted, plural};

use std::sync::Arc;

/// A card, and what exchanges between ranks need of it.
pub(crate) mod card {
    pub(crate) use crate::cuda::{CardId, CardStaging, ExchangeStream, StreamEvent, element, libraries};
}
pub use cuda::Cuda as Card;

/// A kind of device.
pub struct Device {
    /// The name that users give.
    pub name: &'static str,
    /// Opens the one of that number, with that many threads where threads compute (as many as there are cores).
    pub open: fn(index: usize, threads: Option<usize>) -> Result<Arc<dyn Backend>>,
    /// What work takes there.
    pub footprint: &'static Footprint,
    /// Ends what goes on in the background, before the program exits.
    pub settle: fn(),
}

/// Every kind of device Ferrl knows; `auto` takes the last one that opens.
pub const BACKENDS: &[Device] = &[
    Device {
        name: "cpu",
        open: |index, threads| cpu::open(index, threads),
        footprint: &cpu::FOOTPRINT,
        settle: || (),
    },
    Device {
        name: "cuda",
        open: |index, _| cuda::open(index),
        footprint: &cuda::FOOTPRINT,
        settle: cuda::settle,
    },
];

/// The device is chosen by what there is.
pub const AUTO: &str = "auto";

/// The kind and the number that a name means: `cpu`, `cuda`, `cuda:1`; none for `auto`.
fn parse(name: &str) -> Result<Option<(&'static Device, usize)>> {
    if name == AUTO {
        return Ok(None);
    }
    let (kind, index) = name.split_once(':').unwrap_or((name, "0"));
    if let (Some(device), Ok(index)) = (BACKENDS.iter().find(|d| d.name == kind), index.parse()) {
        return Ok(Some((device, index)));
    }
    let names: Vec<&str> = BACKENDS.iter().map(|d| d.name).chain([AUTO]).collect();
    let hint = nearest(kind, names.iter().copied()).unwrap_or(names[0]);
    Err(Error::usage(format!(
        "unknown device {name:?}, expected one of {}, or a kind with a number such as {}:0",
        names.join(", "),
        names[BACKENDS.len() - 1]
    ))
    .fix(format!("use the device {hint}")))
}

/// Refuses a name that can mean no device, without opening any.
pub fn check_name(name: &str) -> Result<()> {
    parse(name).map(|_| ())
}

/// What work takes on the device of that name; it need not be there.
pub fn footprint(name: &str) -> Result<&'static Footprint> {
    let opens = |d: &&Device| (d.open)(0, None).is_ok();
    let found = || BACKENDS[1..].iter().rev().find(opens).unwrap_or(&BACKENDS[0]);
    Ok(parse(name)?.map_or_else(found, |(device, _)| device).footprint)
}

/// Opens the device of that name for one of several ranks: those of one machine share its cores, and have a card each.
pub fn open_for(name: &str, threads: Option<usize>, ranks: &Ranks) -> Result<Arc<dyn Backend>> {
    let (here, number) = ranks.local();
    if here == 1 {
        return open(name, threads);
    }
    let threads = threads.or(Some((cores() / here).max(1)));
    let numbered = |kind: &Device| open(&format!("{}:{number}", kind.name), threads);
    match BACKENDS[1..]
        .iter()
        .rev()
        .find(|kind| kind.name == name || name == AUTO && (kind.open)(0, threads).is_ok())
    {
        Some(kind) => numbered(kind),
        None => open(name, threads),
    }
}

/// Opens the device of that name.
pub fn open(name: &str, threads: Option<usize>) -> Result<Arc<dyn Backend>> {
    let chosen = parse(name)?;
    if threads == Some(0) {
        return Err(Error::usage("0 threads cannot compute anything").fix("1 thread or more"));
    }
    match chosen {
        Some((device, index)) => (device.open)(index, threads),
        None => {
            let opened = BACKENDS[1..].iter().rev().find_map(|d| (d.open)(0, threads).ok());
            opened.map_or_else(|| (BACKENDS[0].open)(0, threads), Ok)
        }
    }
}

//! Checks that several ranks on a device train to the weights of one process, bit for bit.
//!
//! On a card with NCCL the ranks are processes that communicate through it; elsewhere they are threads of this process. Started by
//! `mpirun` or `ferrl launch`, this process is one of the ranks.

use super::curves::{CurveCase, Curves};
use super::groups::{self, GroupCase, GroupStart};
use super::{CheckTable, outcome};
use crate::local_ranks::LocalRanks;
use crate::output::print;
use ferrl_engine::{Error, Result};
use ferrl_kernels::check::CheckOutcome;
use ferrl_kernels::{BACKENDS, Backend, Ranks, comm};
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// The selected cases on that many ranks.
fn cases(size: usize, table: &CheckTable<'_>) -> Result<Vec<CurveCase>> {
    let mut cases = Curves::cases()?;
    cases.iter_mut().for_each(|c| c.name = format!("{size} ranks {}", c.name));
    cases.retain(|c| table.wants(&c.name));
    Ok(cases)
}

/// Checks ranks that share the device.
pub fn check(
    (cpu, card): (&Arc<dyn Backend>, &Arc<dyn Backend>),
    device: &str,
    size: usize,
    table: &mut CheckTable<'_>,
) -> Result<()> {
    let (cases, groups) = (cases(size, table)?, groups::cases(size, table)?);
    if cases.is_empty() && groups.is_empty() {
        return Ok(());
    }
    let wanted = std::env::var_os("FERRL_NCCL").is_none_or(|v| v != "off");
    if card.as_card().is_some() && wanted && comm::find_nccl().is_ok() {
        return in_processes(device, size, table);
    }
    let curves = Curves::new("ranks")?;
    cases.iter().try_for_each(|case| {
        table.ask_each(&case.name, |out| {
            let start = curves.start_of(cpu, case)?;
            out.extend(in_threads(device, case, &start, size)?);
            Ok(())
        })
    })?;
    groups::in_threads(device, size, &groups, table)
}

/// Runs the checks on processes that NCCL connects and that print the results.
fn in_processes(device: &str, size: usize, table: &mut CheckTable<'_>) -> Result<()> {
    let program = std::env::current_exe()
        .map_err(|e| Error::device(format!("cannot find the path of this program: {e}")))?;
    let mut command: Vec<String> = ["bench", "--check", "--device", device].map(String::from).into();
    command.extend(["--ranks".to_string(), size.to_string(), "--only".to_string(), table.only.to_string()]);
    let share = [("NCCL_MULTI_RANK_GPU_ENABLE", std::ffi::OsStr::new("1"))];
    let ended = LocalRanks::start(&program, &command, size, &share)?.wait();
    let ended = ended.map_err(|e| Error::device(format!("ranks cannot be waited for: {e}")))?;
    table.rows += 1;
    table.failures += usize::from(!ended.success());
    Ok(())
}

/// Checks this rank together with the others; rank 0 prints.
pub fn as_member(ranks: &Ranks, device: &str, only: &str) -> Result<()> {
    let mut table = CheckTable { only, rows: 0, failures: 0 };
    let (cases, groups) = (cases(ranks.size(), &table)?, groups::cases(ranks.size(), &table)?);
    let done = ranks.together(|| {
        // A card for each rank if there are enough.
        let card = ferrl_kernels::open_for(device, Some(1), ranks);
        let card = card.or_else(|_| ferrl_kernels::open(device, Some(1)))?;
        ranks.connect(&card)?;
        let curves = (ranks.rank() == 0).then(|| Curves::new("ranks")).transpose()?;
        if ranks.rank() == 0 {
            print(&format!("{}\n{}\n\n", card.describe(), ranks.describe()))?;
        }
        for case in &cases {
            let start = start(ranks, curves.as_ref(), case)?;
            match ranks.rank() {
                0 => table.ask_each(&case.name, |out| {
                    member_outcomes(ranks, &card, case, &start).map(|o| out.extend(o))
                })?,
                _ => drop(member_outcomes(ranks, &card, case, &start)?),
            }
        }
        members_of_groups(ranks, &card, &groups, &mut table)
    });
    let rank = ranks.rank();
    ranks.finish();
    match (rank, done) {
        (0, Ok(())) if table.failures > 0 => Err(Error::device(format!("{} checks failed", table.failures))
            .fix(
                "report the table above with the card's name; FERRL_NCCL=off exchanges through host memory",
            )),
        (0, done) => done,
        _ => Ok(()), // rank 0 reports the error
    }
}

/// Checks groups of ranks together with the others.
fn members_of_groups(
    ranks: &Ranks,
    card: &Arc<dyn Backend>,
    cases: &[GroupCase],
    table: &mut CheckTable<'_>,
) -> Result<()> {
    let folder = (ranks.rank() == 0).then(GroupStart::new).transpose()?;
    let made = folder.as_ref().filter(|_| !cases.is_empty()).map(GroupStart::path).transpose()?;
    let start = everywhere(ranks, &made.unwrap_or_default())?;
    for case in cases {
        match ranks.rank() {
            0 => table.ask_each(&case.name, |out| {
                group_outcomes(ranks, card, case, &start).map(|o| out.extend(o))
            })?,
            _ => drop(group_outcomes(ranks, card, case, &start)?),
        }
    }
    Ok(())
}

fn group_outcomes(
    ranks: &Ranks,
    card: &Arc<dyn Backend>,
    case: &GroupCase,
    start: &Path,
) -> Result<Vec<CheckOutcome>> {
    let alone = groups::trace(case, start, card, Ranks::ALONE)?;
    let (own, again) = (groups::trace(case, start, card, ranks)?, groups::trace(case, start, card, ranks)?);
    let here = groups::outcomes(case, [&own, &again], &alone);
    let bytes: Vec<u8> = here.iter().flat_map(|o| o.worst.to_le_bytes()).collect();
    let there = ranks.all_gather(&bytes)?;
    let theirs = there.iter().map(|bytes| {
        let worst = bytes.as_chunks::<8>().0.iter().map(|b| f64::from_le_bytes(*b));
        here.iter().zip(worst).map(|(o, worst)| CheckOutcome { worst, ..o.clone() }).collect()
    });
    Ok(groups::worst(theirs))
}

fn everywhere(ranks: &Ranks, made: &Path) -> Result<PathBuf> {
    let path = ranks.broadcast(made.to_string_lossy().as_bytes())?;
    Ok(PathBuf::from(String::from_utf8_lossy(&path).into_owned()))
}

/// The model a case starts from, which rank 0 makes.
fn start(ranks: &Ranks, curves: Option<&Curves>, case: &CurveCase) -> Result<PathBuf> {
    let made = match curves {
        Some(curves) => curves.start_of(&(BACKENDS[0].open)(0, None)?, case)?,
        None => PathBuf::new(),
    };
    everywhere(ranks, &made)
}

const WHOLE: &str = "weights with other bits than one process's";
const SPLIT: &str = "the same with split weights (ZeRO-3)";

fn member_outcomes(
    ranks: &Ranks,
    card: &Arc<dyn Backend>,
    case: &CurveCase,
    start: &Path,
) -> Result<Vec<CheckOutcome>> {
    let alone = Curves::weights_on(case, start, card.clone(), Ranks::ALONE, false)?;
    let mut outcomes = Vec::new();
    for (name, split) in [(WHOLE, false), (SPLIT, true)] {
        let own = Curves::weights_on(case, start, card.clone(), ranks, split)?;
        let mut other = 0;
        for there in ranks.all_gather(&(differing(&own, &alone) as u64).to_le_bytes())? {
            other += there.as_chunks::<8>().0.iter().map(|b| u64::from_le_bytes(*b)).sum::<u64>();
        }
        outcomes.push(outcome(name, other as f64, 0.0));
    }
    Ok(outcomes)
}

fn differing(a: &[u32], b: &[u32]) -> usize {
    a.iter().zip(b).filter(|(a, b)| a != b).count() + a.len().abs_diff(b.len())
}

/// Ranks as threads of this process, each with its own device.
fn in_threads(device: &str, case: &CurveCase, start: &Path, size: usize) -> Result<Vec<CheckOutcome>> {
    let weights = |ranks: &Ranks, split: bool| -> Result<Vec<u32>> {
        Curves::weights_on(case, start, ferrl_kernels::open(device, Some(1))?, ranks, split)
    };
    let alone = weights(Ranks::ALONE, false)?;
    let mut outcomes = Vec::new();
    for (name, split) in [(WHOLE, false), (SPLIT, true)] {
        let mut other = 0;
        std::thread::scope(|scope| -> Result<()> {
            let weights = &weights;
            let run = |ranks: Ranks| scope.spawn(move || ranks.together(|| weights(&ranks, split)));
            let running: Vec<_> = comm::threads(size).into_iter().map(run).collect();
            for rank in running {
                let there = rank.join().unwrap_or_else(|panic| std::panic::resume_unwind(panic))?;
                other += differing(&there, &alone);
            }
            Ok(())
        })?;
        outcomes.push(outcome(name, other as f64, 0.0));
    }
    Ok(outcomes)
}

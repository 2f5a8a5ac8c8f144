//! Ranks without MPI: NCCL as the only transport, with rendezvous by address; host bytes are staged in device memory.
//!
//! Environment variables are those of `torchrun`: RANK, WORLD_SIZE, LOCAL_RANK, MASTER_ADDR and MASTER_PORT. There is no
//! heartbeat: if a rank is lost, the launcher must end the others.

use super::{CardBytes, Communicator, Nccl};
use crate::card::{CardId, CardStaging, StreamEvent};
use crate::comm::launcher::{Launched, card_of};
use crate::comm::{Arrived, Comm, message_buffer};
use crate::{Error, Result, lock};
use std::sync::{Arc, Mutex};
use std::time::Duration;

/// Bytes of device staging memory for host messages, in each direction.
const STAGING: usize = 32 << 20;
/// The same for a subgroup.
const GROUP_STAGING: usize = 4 << 20;
/// Alignment of messages in it.
const ALIGN: usize = 256;
/// Header bit that marks an error.
const FAILED: u64 = 1 << 63;

/// Ranks whose host messages go through their GPUs.
pub struct NcclWorld {
    communicator: Arc<Communicator>,
    staging: Mutex<CardStaging>,
    card: CardId,
    local: (usize, usize),
}

/// Joins the ranks of a `torchrun` environment.
pub(in crate::comm) fn open(launched: &Launched) -> Result<NcclWorld> {
    let without = |e: Error| {
        let (what, _, fix) = e.parts();
        let fix = fix.map_or(String::new(), |fix| format!("; {fix}"));
        Error::usage(format!("ranks that torchrun starts exchange through NCCL, from card to card: {what}"))
            .fix(format!(
                "mpirun -n N ferrl train ..., srun --mpi=pmix, or `ferrl launch -n N -- train ...`{fix}"
            ))
    };
    let nccl = Nccl::get().map_err(without)?;
    let (rank, size) = (launched.rank, launched.size.unwrap_or(1));
    let local = (launched.local_size.unwrap_or(size), launched.local_rank.unwrap_or(rank));
    let staging = CardStaging::new(card_of(local.1), STAGING).map_err(without)?;
    let address = address(|name| std::env::var(name).ok())?;
    staging.bind()?;
    // SAFETY: a process that was just started: no other thread reads or writes the environment yet.
    unsafe { std::env::set_var("NCCL_COMM_ID", &address) };
    let joined = nccl.unique_id().and_then(|id| Communicator::new(nccl, id, rank, size));
    // SAFETY: NCCL's threads have read it; communicators that are made later have identifiers of their own.
    unsafe { std::env::remove_var("NCCL_COMM_ID") };
    let communicator = Arc::new(joined.map_err(|e| e.at(format!("rank {rank} at {address}")))?);
    let card = staging.card;
    Ok(NcclWorld { communicator, staging: Mutex::new(staging), card, local })
}

/// Where rank 0 listens. `torchrun` itself listens at MASTER_PORT; NCCL then uses the next port.
fn address(get: impl Fn(&str) -> Option<String>) -> Result<String> {
    if let Some(address) = get("NCCL_COMM_ID") {
        return Ok(address);
    }
    let missing = |name: &str| {
        Error::usage(format!("RANK and WORLD_SIZE are set and {name} is not"))
            .fix("MASTER_ADDR and MASTER_PORT of rank 0 on all ranks, or unset RANK to run alone")
    };
    let host = get("MASTER_ADDR").ok_or_else(|| missing("MASTER_ADDR"))?;
    let port = get("MASTER_PORT").ok_or_else(|| missing("MASTER_PORT"))?;
    let number: u16 = port.parse().map_err(|_| {
        Error::usage(format!("MASTER_PORT is {port:?}, expected a number"))
            .fix("a free port of rank 0's machine")
    })?;
    let taken = get("TORCHELASTIC_USE_AGENT_STORE").is_some_and(|v| v.eq_ignore_ascii_case("true"));
    let host = if host.contains(':') && !host.starts_with('[') { format!("[{host}]") } else { host };
    Ok(format!("{host}:{}", number.saturating_add(taken.into())))
}

impl NcclWorld {
    /// The communicator and its GPU, for device-to-device transfers.
    pub(in crate::comm) fn shared(&self) -> (Arc<Communicator>, CardId) {
        (self.communicator.clone(), self.card)
    }

    /// Sends and receives one round of messages, which fit into the staging memory.
    fn pass(&self, sends: &[(usize, &[u8])], receives: &mut [(usize, &mut [u8])]) -> Result<()> {
        let mut staging = lock(&self.staging);
        let (stream, (out, into)) = (staging.bind()?, staging.addresses());
        let (mut leaving, mut coming) = (0, 0);
        let place = |end: &mut usize, base: u64, peer: usize, bytes: usize| {
            let at = *end;
            *end = (at + bytes).next_multiple_of(ALIGN);
            CardBytes { peer, at: base + at as u64, bytes }
        };
        let from: Vec<_> = sends.iter().map(|(to, b)| place(&mut leaving, out, *to, b.len())).collect();
        let to: Vec<_> = receives.iter().map(|(from, b)| place(&mut coming, into, *from, b.len())).collect();
        for ((_, bytes), place) in sends.iter().zip(&from) {
            staging.put((place.at - out) as usize, bytes);
        }
        staging.leave(leaving)?;
        self.communicator.begin(&from, &to, stream)?;
        let arrived = staging.arrive(coming)?;
        self.wait(&arrived)?;
        for ((_, bytes), place) in receives.iter_mut().zip(&to) {
            staging.take((place.at - into) as usize, bytes);
        }
        Ok(())
    }

    /// Waits for messages. Sleeps between polls, so that other ranks on the same cores can work.
    fn wait(&self, arrived: &StreamEvent) -> Result<()> {
        for look in 0u64.. {
            if arrived.has_happened()? {
                return Ok(());
            }
            match look {
                0..200 => std::hint::spin_loop(),
                200..2000 => std::thread::yield_now(),
                _ => std::thread::sleep(Duration::from_micros(50)),
            }
            if look % 2000 == 1999 {
                self.communicator.check_async_error()?;
            }
        }
        unreachable!("the loop ends when the bytes arrive")
    }
}

impl Comm for NcclWorld {
    fn rank(&self) -> usize {
        self.communicator.rank
    }

    fn size(&self) -> usize {
        self.communicator.size
    }

    fn local(&self) -> (usize, usize) {
        self.local
    }

    fn exchange(&self, parts: &[&[u8]], failed: bool) -> Result<Vec<Arrived>> {
        let (own, size) = (self.rank(), self.size());
        let flag = if failed { FAILED } else { 0 };
        let headers: Vec<[u8; 8]> = parts.iter().map(|p| (p.len() as u64 | flag).to_le_bytes()).collect();
        let mut heads = headers.clone();
        let peers = |rank: &usize| *rank != own;
        let sends: Vec<_> = (0..size).filter(peers).map(|to| (to, &headers[to][..])).collect();
        let mut receives: Vec<_> = heads
            .iter_mut()
            .enumerate()
            .filter(|(from, _)| *from != own)
            .map(|(from, h)| (from, &mut h[..]))
            .collect();
        self.pass(&sends, &mut receives)?;
        let arrived = |head: &[u8; 8]| {
            let head = u64::from_le_bytes(*head);
            Arrived { failed: head & FAILED != 0, bytes: message_buffer((head & !FAILED) as usize) }
        };
        let mut all: Vec<Arrived> = heads.iter().map(arrived).collect();
        all[own].bytes.copy_from_slice(parts[own]);
        // Messages are split into pieces of the same length on both sides, one piece of each per round.
        let most = staged(lock(&self.staging).bytes, size);
        let longest = (0..size).filter(peers).map(|r| parts[r].len().max(all[r].bytes.len())).max();
        for start in (0..longest.unwrap_or(0)).step_by(most) {
            let end = |len: usize| len.min(start + most);
            let leaves = |to: usize| {
                (to != own && parts[to].len() > start).then(|| (to, &parts[to][start..end(parts[to].len())]))
            };
            let sends: Vec<_> = (0..size).filter_map(leaves).collect();
            let mut receives: Vec<_> = all
                .iter_mut()
                .enumerate()
                .filter(|(from, a)| *from != own && a.bytes.len() > start)
                .map(|(from, a)| {
                    let end = end(a.bytes.len());
                    (from, &mut a.bytes[start..end])
                })
                .collect();
            self.pass(&sends, &mut receives)?;
        }
        Ok(all)
    }

    fn subgroup(&self, members: &[usize]) -> Box<dyn Comm> {
        let rank = members.iter().position(|&m| m == self.rank()).expect("a member");
        let made = || -> Result<NcclWorld> {
            let staging = CardStaging::new(self.local.1, GROUP_STAGING)?;
            staging.bind()?;
            let communicator = Arc::new(self.communicator.split(members[0], rank, members.len())?);
            let card = staging.card;
            Ok(NcclWorld { communicator, staging: Mutex::new(staging), card, local: (members.len(), rank) })
        };
        match made() {
            Ok(group) => Box::new(group),
            Err(error) => Box::new(FailedGroup { error, rank, size: members.len() }),
        }
    }

    fn nccl(&self) -> Option<&NcclWorld> {
        Some(self)
    }

    fn describe(&self) -> String {
        format!("{} ranks under {}, without MPI", self.size(), self.communicator.describe())
    }

    fn finish(&self) {
        self.communicator.finish();
    }
}

/// Maximum bytes per message and round, with one message to and from each of the other ranks.
fn staged(bytes: usize, size: usize) -> usize {
    (bytes / size.max(1) / ALIGN * ALIGN).max(ALIGN)
}

/// A subgroup that could not be created; every exchange in it returns the reason.
struct FailedGroup {
    error: Error,
    rank: usize,
    size: usize,
}

impl Comm for FailedGroup {
    fn rank(&self) -> usize {
        self.rank
    }

    fn size(&self) -> usize {
        self.size
    }

    fn exchange(&self, _parts: &[&[u8]], _failed: bool) -> Result<Vec<Arrived>> {
        Err(self.error.clone())
    }

    fn subgroup(&self, _members: &[usize]) -> Box<dyn Comm> {
        Box::new(FailedGroup { error: self.error.clone(), ..*self })
    }

    fn describe(&self) -> String {
        self.error.to_string()
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(pairs: &[(&str, &str)]) -> Result<String> {
        address(|name| pairs.iter().find(|(n, _)| *n == name).map(|(_, v)| v.to_string()))
    }

    #[test]
    fn rank_0_listens_where_nobody_else_does() {
        let alone = [("MASTER_ADDR", "10.0.0.1"), ("MASTER_PORT", "29500")];
        assert_eq!(of(&alone).unwrap(), "10.0.0.1:29500");
        let agent = [&alone[..], &[("TORCHELASTIC_USE_AGENT_STORE", "True")]].concat();
        assert_eq!(of(&agent).unwrap(), "10.0.0.1:29501");
        assert_eq!(of(&[("MASTER_ADDR", "::1"), ("MASTER_PORT", "7")]).unwrap(), "[::1]:7");
        assert_eq!(of(&[("NCCL_COMM_ID", "a:1"), ("MASTER_PORT", "7")]).unwrap(), "a:1");
        assert!(of(&[("MASTER_ADDR", "a")]).unwrap_err().to_string().contains("MASTER_PORT"));
        assert!(of(&[("MASTER_ADDR", "a"), ("MASTER_PORT", "x")]).is_err());
    }

    #[test]
    fn messages_for_all_ranks_fit_into_the_staging_memory() {
        for size in [1, 2, 3, 8, 100] {
            let one = staged(GROUP_STAGING, size);
            assert!(one > 0 && one.is_multiple_of(ALIGN) && one * size <= GROUP_STAGING);
        }
    }
}

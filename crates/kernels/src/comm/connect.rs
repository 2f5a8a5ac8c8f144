//! Negotiates direct device-to-device transfers: the ranks exchange their capabilities, and all reach the same decision.

use super::device::{Devices, Mover};
use super::nccl::{self, Communicator, Nccl, NcclMover, UniqueId};
use super::{Group, Ranks};
use crate::backend::Backend;
use crate::card::CardId;
use crate::error::{Error, Result};
use std::sync::Arc;

/// NCCL version from which several ranks may share a GPU, if the environment enables it.
const SHARES_CARDS: u32 = 23000;

/// Capabilities of a rank.
#[derive(Clone, Debug, PartialEq)]
struct Offer {
    /// Its GPU.
    card: Option<CardId>,
    /// Its NCCL version, or why it has none.
    nccl: std::result::Result<u32, String>,
    /// Whether its environment lets ranks share a GPU.
    shares: bool,
}

impl Offer {
    fn of(backend: &dyn Backend, one_process: bool) -> Result<Self> {
        let card = backend.as_card().map(|cuda| cuda.card_id()).transpose()?;
        let shares = std::env::var("NCCL_MULTI_RANK_GPU_ENABLE").is_ok_and(|v| v == "1");
        let nccl = match card {
            None => Err("computes on the CPU".to_string()),
            Some(_) if one_process => Err("the ranks are threads of one process".to_string()),
            Some(_) if nccl::is_off() => Err("FERRL_NCCL=off".to_string()),
            Some(_) => {
                Nccl::get().map(|nccl| nccl.version).map_err(|e| e.to_string().replace("\n  fix: ", "; "))
            }
        };
        Ok(Offer { card, nccl, shares })
    }

    /// Serialises flags, GPU, version, and reason.
    fn write(&self) -> Vec<u8> {
        let version = self.nccl.as_ref().map_or(0, |v| *v);
        let mut bytes = vec![self.card.is_some().into(), self.shares.into()];
        bytes.extend(self.card.unwrap_or_default());
        bytes.extend(version.to_le_bytes());
        bytes.extend(self.nccl.as_ref().err().map_or(&[][..], |why| why.as_bytes()));
        bytes
    }

    fn read(bytes: &[u8]) -> Option<Self> {
        let (flags, rest) = bytes.split_first_chunk::<2>()?;
        let (card, rest) = rest.split_first_chunk::<16>()?;
        let (version, why) = rest.split_first_chunk::<4>()?;
        let nccl = match u32::from_le_bytes(*version) {
            0 => Err(String::from_utf8_lossy(why).into_owned()),
            version => Ok(version),
        };
        Some(Offer { card: (flags[0] == 1).then_some(*card), nccl, shares: flags[1] == 1 })
    }
}

/// Why transfers go through host memory: `None` if there is nothing to report.
type WhyNot = Option<String>;

/// The decision that follows from all ranks' capabilities.
fn agree(offers: &[Offer]) -> std::result::Result<(), WhyNot> {
    if offers.iter().all(|o| o.card.is_none()) {
        return Err(None);
    }
    if let Some((rank, why)) =
        offers.iter().enumerate().find_map(|(rank, o)| Some((rank, o.nccl.as_ref().err()?)))
    {
        return Err(Some(format!("rank {rank}: {why}")));
    }
    let versions: Vec<u32> = offers.iter().filter_map(|o| o.nccl.as_ref().ok().copied()).collect();
    if let Some(rank) = versions.iter().position(|v| *v != versions[0]) {
        let (first, other) = (versions[0], versions[rank]);
        return Err(Some(format!(
            "rank {rank} has NCCL {other} where rank 0 has {first}; one version on all ranks"
        )));
    }
    let same = |rank: &usize| offers[..*rank].iter().any(|o| o.card == offers[*rank].card);
    let shared = (0..offers.len()).find(same);
    match shared {
        Some(rank) if versions[0] < SHARES_CARDS || offers.iter().any(|o| !o.shares) => Err(Some(format!(
            "rank {rank} shares a card with another; NCCL 2.30 or later and NCCL_MULTI_RANK_GPU_ENABLE=1 allow that"
        ))),
        _ => Ok(()),
    }
}

impl Ranks {
    /// Enables device-to-device transfers if every rank computes on a GPU and has NCCL; [`Ranks::describe`] says why not.
    /// Collective; each rank passes its device.
    pub fn connect(&self, backend: &Arc<dyn Backend>) -> Result<()> {
        let Some(group) = self.0.as_ref().filter(|group| group.devices.get().is_none()) else {
            return Ok(());
        };
        let own = Offer::of(&**backend, group.comm.is_one_process())?;
        let offers: Option<Vec<Offer>> =
            self.all_gather(&own.write())?.iter().map(|b| Offer::read(b)).collect();
        let offers = offers.ok_or_else(|| Error::rank("the ranks' capabilities cannot be read"))?;
        let (mover, why_not) = match agree(&offers) {
            Ok(()) => self.join_cards(group, backend)?,
            Err(why_not) => (None, why_not),
        };
        let _ = group.devices.set(Devices { mover, why_not }); // already set by another thread of this rank
        Ok(())
    }

    /// A communicator of all ranks' GPUs, or why there is none.
    fn join_cards(
        &self,
        group: &Group,
        backend: &Arc<dyn Backend>,
    ) -> Result<(Option<Arc<dyn Mover>>, WhyNot)> {
        let cuda = backend.as_card().ok_or_else(|| Error::device("these ranks communicate between GPUs"))?;
        let card = cuda.card_id()?;
        // Without MPI, a communicator of the same GPUs exists already.
        let shared = group.comm.nccl().map(|world| world.shared()).filter(|(_, theirs)| *theirs == card);
        let everywhere = self.all_gather(&[shared.is_some().into()])?.iter().all(|there| there == &[1]);
        if let Some((communicator, _)) = shared.filter(|_| everywhere) {
            return Ok((Some(Arc::new(NcclMover::new(communicator, card, false))), None));
        }
        let nccl = Nccl::get()?;
        let id = if self.rank() == 0 { nccl.unique_id()?.0.to_vec() } else { Vec::new() };
        let id = self.broadcast(&id)?;
        let id = UniqueId(id.try_into().map_err(|_| Error::rank("an identifier of NCCL cannot be read"))?);
        cuda.exchange_stream()?.bind()?;
        let joined = Communicator::new(nccl, id, self.rank(), self.size());
        let said = joined.as_ref().err().map_or(String::new(), |e| e.to_string().replace("\n  fix: ", "; "));
        let all = self.all_gather(said.as_bytes())?;
        let failed = all.iter().enumerate().find(|(_, said)| !said.is_empty());
        if let Some((rank, said)) = failed {
            return Ok((None, Some(format!("rank {rank}: {}", String::from_utf8_lossy(said)))));
        }
        Ok((Some(Arc::new(NcclMover::new(Arc::new(joined?), card, true))), None))
    }

    /// How numbers are transferred between the GPUs of these ranks and their subgroups, or why they go through host memory;
    /// `None` before [`Ranks::connect`], and for ranks without GPUs.
    pub fn cards(&self) -> Option<std::result::Result<String, String>> {
        let group = self.0.as_ref()?;
        let Devices { mover, why_not } = group.devices.get()?;
        match mover {
            Some(mover) => {
                let host = group.teams().iter().find_map(|team| team.cards()?.err());
                Some(host.map_or_else(|| Ok(mover.describe()), Err))
            }
            None => why_not.clone().map(Err),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn on_card(card: u8, version: u32) -> Offer {
        Offer { card: Some([card; 16]), nccl: Ok(version), shares: false }
    }

    #[test]
    fn ranks_agree_on_cards_only_where_all_have_one() {
        let cpu = Offer { card: None, nccl: Err("computes on the CPU".into()), shares: false };
        let why = |offers: &[Offer]| agree(offers).unwrap_err();
        assert_eq!(agree(&[on_card(1, 22800), on_card(2, 22800)]), Ok(()));
        assert_eq!(why(&[cpu.clone(), cpu.clone()]), None, "nothing to say of ranks without cards");
        assert_eq!(why(&[on_card(1, 23203), cpu]).unwrap(), "rank 1: computes on the CPU");
        assert!(why(&[on_card(1, 23203), on_card(2, 22800)]).unwrap().contains("one version"));
        let missing = Offer { nccl: Err("found none of libnccl.so.2".into()), ..on_card(2, 0) };
        assert_eq!(why(&[on_card(1, 23203), missing]).unwrap(), "rank 1: found none of libnccl.so.2");
    }

    #[test]
    fn a_card_is_shared_where_the_library_and_every_rank_allow_it() {
        let shares = |version| Offer { shares: true, ..on_card(1, version) };
        assert_eq!(agree(&[shares(23203), shares(23203)]), Ok(()));
        for offers in [[shares(22800), shares(22800)], [shares(23203), on_card(1, 23203)]] {
            assert!(agree(&offers).unwrap_err().unwrap().contains("NCCL_MULTI_RANK_GPU_ENABLE"));
        }
    }

    #[test]
    fn offers_round_trip_between_ranks() {
        for offer in
            [on_card(7, 23203), Offer { nccl: Err("FERRL_NCCL=off".into()), shares: true, ..on_card(7, 0) }]
        {
            assert_eq!(Offer::read(&offer.write()), Some(offer));
        }
        assert_eq!(Offer::read(&[1, 1, 3]), None);
    }
}

//! Work that the ranks of a run share: each computes its part, and every rank gets all of it, in order.

use ferrl_engine::{Error, Result};
use ferrl_kernels::Ranks;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize, Serializer};

/// What every rank has, in the order of ranks.
pub(crate) fn gather<T: Serialize + DeserializeOwned>(ranks: &Ranks, own: T) -> Result<Vec<T>> {
    if ranks.is_alone() {
        return Ok(vec![own]);
    }
    let lost = |e: serde_json::Error| Error::rank(format!("what the ranks exchange cannot be read: {e}"));
    let own = serde_json::to_vec(&own).map_err(lost)?;
    ranks.all_gather(&own)?.iter().map(|bytes| serde_json::from_slice(bytes).map_err(lost)).collect()
}

/// What `work` gives for each item. Item `i` is computed by rank `i mod p`; every rank gets all results, in order.
pub(crate) fn each<I, T: Serialize + DeserializeOwned>(
    ranks: &Ranks,
    items: &[I],
    mut work: impl FnMut(&I) -> Result<T>,
) -> Result<Vec<T>> {
    let own = items.iter().enumerate().filter(|(i, _)| ranks.owns(*i));
    let own = own.map(|(_, item)| work(item)).collect::<Result<Vec<T>>>()?;
    interleave(ranks, own)
}

/// The results of items that went round, in the order of the items.
pub(crate) fn interleave<T: Serialize + DeserializeOwned>(ranks: &Ranks, own: Vec<T>) -> Result<Vec<T>> {
    let mut parts: Vec<_> = gather(ranks, own)?.into_iter().map(Vec::into_iter).collect();
    let mut all = Vec::new();
    for i in 0.. {
        match parts[i % ranks.size()].next() {
            Some(result) => all.push(result),
            None => break,
        }
    }
    Ok(all)
}

/// An error that travels between ranks.
#[derive(Clone)]
pub(crate) struct Travelling(pub Error);

impl Serialize for Travelling {
    fn serialize<S: Serializer>(&self, s: S) -> std::result::Result<S::Ok, S::Error> {
        s.serialize_str(&ferrl_kernels::comm::pack_error(&self.0))
    }
}

impl<'de> Deserialize<'de> for Travelling {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        String::deserialize(d).map(|text| Travelling(ferrl_kernels::comm::unpack_error(&text)))
    }
}

//! Work that the ranks of a run share: each computes its part, and every rank gets all of it, in order.

use ferrl_engine::model::Model;
use ferrl_engine::{Error, Result};
use ferrl_kernels::Ranks;
use ferrl_kernels::comm::part;
use serde::de::DeserializeOwned;
use serde::{Deserialize, Deserializer, Serialize, Serializer};
use std::ops::Range;

/// What every rank has, in the order of ranks.
pub(crate) fn gather<T: Serialize + DeserializeOwned>(ranks: &Ranks, own: T) -> Result<Vec<T>> {
    if ranks.is_alone() {
        return Ok(vec![own]);
    }
    let lost = |e: serde_json::Error| Error::rank(format!("what the ranks exchange cannot be read: {e}"));
    let own = serde_json::to_vec(&own).map_err(lost)?;
    ranks.all_gather(&own)?.iter().map(|bytes| serde_json::from_slice(bytes).map_err(lost)).collect()
}

/// The ranks of a run in the teams that compute with one model together (tensor parallelism): of one rank each, where every
/// rank has the whole model. Work is shared out to teams; in a team all ranks do it, and the first one's result counts.
pub(crate) struct Teams<'a> {
    all: &'a Ranks,
    own: Ranks,
}

impl<'a> Teams<'a> {
    /// Ranks that compute with this model in its present layout.
    pub fn of(all: &'a Ranks, model: &Model) -> Self {
        Teams { all, own: model.team().map_or_else(Ranks::alone, |team| team.ranks().clone()) }
    }

    /// Number of teams.
    pub fn count(&self) -> usize {
        self.all.size() / self.own.size()
    }

    /// This rank's.
    pub fn index(&self) -> usize {
        self.all.rank() / self.own.size()
    }

    /// Whether this rank's results are those of its team.
    pub fn leads(&self) -> bool {
        self.own.rank() == 0
    }

    /// The part of `count` things in a row that is this team's; nothing for a rank that does not lead.
    pub fn share(&self, count: usize) -> Range<usize> {
        let Range { start, end } = part(count, self.index(), self.count());
        if self.leads() { start..end } else { start..start }
    }

    /// Whether thing `i` of a list that goes round is this team's.
    pub fn owns(&self, i: usize) -> bool {
        i % self.count() == self.index()
    }

    /// Whether a round, one thing for each team, ends with thing `i` of a list of `count` that goes round.
    pub fn ends_round(&self, i: usize, count: usize) -> bool {
        i + 1 == count || (i + 1).is_multiple_of(self.count())
    }

    /// Whether this team has nothing in the round that thing `i` of such a list ends.
    pub fn sits_out(&self, i: usize) -> bool {
        self.index() > i % self.count()
    }

    /// Does work that the ranks of a team do in step and other ranks do not wait for.
    pub fn in_step<T>(&self, work: impl FnOnce() -> Result<T>) -> Result<T> {
        if self.own.is_alone() { work() } else { self.own.in_step(work) }
    }
}

/// What `work` gives for each item. Item `i` is computed by team `i mod p`; every rank gets all results, in order.
pub(crate) fn each<I, T: Serialize + DeserializeOwned>(
    teams: &Teams<'_>,
    items: &[I],
    mut work: impl FnMut(&I) -> Result<T>,
) -> Result<Vec<T>> {
    let own = items.iter().enumerate().filter(|(i, _)| teams.owns(*i));
    let own = teams.in_step(|| own.map(|(_, item)| work(item)).collect::<Result<Vec<T>>>())?;
    interleave(teams, own)
}

/// The results of items that went round, in the order of the items.
pub(crate) fn interleave<T: Serialize + DeserializeOwned>(teams: &Teams<'_>, own: Vec<T>) -> Result<Vec<T>> {
    let own = if teams.leads() { own } else { Vec::new() };
    let leaders = gather(teams.all, own)?.into_iter().step_by(teams.own.size());
    let mut parts: Vec<_> = leaders.map(Vec::into_iter).collect();
    let mut all = Vec::new();
    for i in 0.. {
        match parts[i % teams.count()].next() {
            Some(result) => all.push(result),
            None => break,
        }
    }
    Ok(all)
}

/// An error that travels between ranks.
#[derive(Clone)]
pub(crate) struct SentError(pub Error);

impl Serialize for SentError {
    fn serialize<S: Serializer>(&self, s: S) -> std::result::Result<S::Ok, S::Error> {
        s.serialize_str(&ferrl_kernels::comm::pack_error(&self.0))
    }
}

impl<'de> Deserialize<'de> for SentError {
    fn deserialize<D: Deserializer<'de>>(d: D) -> std::result::Result<Self, D::Error> {
        String::deserialize(d).map(|text| SentError(ferrl_kernels::comm::unpack_error(&text)))
    }
}

//! The seam between generation and everything that needs completions.

use super::{Completion, Event, GenerationRequest, Id};
use crate::Result;
use crate::model::Model;
use std::collections::HashMap;

/// Completes requests: the sampler of this process, a group of ranks, an inference server, or a test double.
///
/// A request brings its own sampling parameters and the stream of its random numbers, so its tokens depend neither on
/// the order of submission nor on the requests in flight. Completions return as they end. To continue a completion (the next
/// turn of an episode), submit its tokens as the beginning of a prompt: a generator with a prefix cache computes the
/// new tokens alone. Every token carries the version of the policy that sampled it ([`Completion::versions`]).
pub trait Generator: Send {
    /// Refuses a request that this generator cannot complete: bad parameters, or more tokens than it has room for.
    fn check(&self, request: &GenerationRequest) -> Result<()>;

    /// Queues a request after the same check.
    fn submit(&mut self, request: GenerationRequest) -> Result<Id>;

    /// Advances all requests and returns what happened since the last call. `policy` is the model as it is now: the local
    /// sampler reads these weights; a generator with weights of its own loads them when the version has changed.
    fn step(&mut self, policy: &Model) -> Result<Vec<Event>>;

    /// Ends a request now; `None` where it has ended already.
    fn cancel(&mut self, id: Id) -> Option<Completion>;

    /// Whether [`Completion::logp`] has the bits that the trainer computes at the same policy version.
    fn is_exact(&self) -> bool;

    /// Returns events to the front of the queue that the next [`Generator::step`] reads.
    fn put_back(&mut self, events: Vec<Event>);

    /// Frees the memory that generation needs and nothing else does, such as a KV cache, where no request is in flight; the next
    /// [`Generator::step`] allocates it again.
    fn release(&mut self) {}

    /// Computes with the first rank of the policy's team, which samples; until it says that it has finished
    /// ([`dismiss`](super::dismiss)).
    fn follow(&mut self, _policy: &Model) -> Result<()> {
        Err(crate::Error::usage("this generator cannot sample with several ranks")
            .fix("one rank for each copy of the weights"))
    }

    /// Completes all requests and returns their completions in order. Events of other requests stay unread.
    fn generate(&mut self, policy: &Model, requests: Vec<GenerationRequest>) -> Result<Vec<Completion>> {
        for (i, request) in requests.iter().enumerate() {
            self.check(request).map_err(|e| e.at(format!("request {i}")))?;
        }
        let mut place = HashMap::with_capacity(requests.len());
        for (i, request) in requests.into_iter().enumerate() {
            place.insert(self.submit(request)?, i);
        }
        let mut out: Vec<Option<Completion>> = place.iter().map(|_| None).collect();
        let (mut left, mut others) = (out.len(), Vec::new());
        while left > 0 {
            let events = match self.step(policy) {
                Ok(events) => events,
                Err(e) => {
                    place.keys().for_each(|&id| drop(self.cancel(id)));
                    self.put_back(others);
                    return Err(e);
                }
            };
            for event in events {
                match event {
                    Event::Done { id, completion } if place.contains_key(&id) => {
                        out[place[&id]] = Some(completion);
                        left -= 1;
                    }
                    Event::Token { id, .. } if place.contains_key(&id) => {}
                    other => others.push(other),
                }
            }
        }
        self.put_back(others);
        Ok(out.into_iter().flatten().collect())
    }
}

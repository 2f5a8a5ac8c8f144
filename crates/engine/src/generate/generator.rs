//! The interface between generation and its users.

use super::{Completion, Event, GenerationRequest, Id};
use crate::Result;
use crate::model::Model;
use std::collections::HashMap;

/// Completes requests: the sampler of this process, a group of ranks, an inference server, or a test double.
///
/// A request carries its sampling parameters and random stream, so its tokens depend neither on the order of submission nor on
/// other requests in flight. Completions return as they finish. To continue a completion (the next turn of an episode), submit
/// its tokens as the beginning of a prompt: with a prefix cache only the new tokens are computed. Every token carries the
/// version of the policy that sampled it ([`Completion::versions`]).
pub trait Generator: Send {
    /// Refuses a request with invalid parameters or more tokens than the generator has room for.
    fn check(&self, request: &GenerationRequest) -> Result<()>;

    /// Checks and queues a request.
    fn submit(&mut self, request: GenerationRequest) -> Result<Id>;

    /// Advances all requests and returns the events since the last call. `policy` is the current model: the local sampler reads
    /// its weights directly; a generator with weights of its own reloads them when the version changes.
    fn step(&mut self, policy: &Model) -> Result<Vec<Event>>;

    /// Cancels a request; `None` if it has ended already.
    fn cancel(&mut self, id: Id) -> Option<Completion>;

    /// Whether [`Completion::logp`] is bit-identical to the trainer's at the same policy version.
    fn is_exact(&self) -> bool;

    /// Returns events to the front of the queue.
    fn put_back(&mut self, events: Vec<Event>);

    /// Frees memory that only generation needs, such as a KV cache, if no request is in flight; the next [`Generator::step`]
    /// reallocates it.
    fn release(&mut self) {}

    /// Follows the first rank of the policy's team, which samples, until that rank calls [`dismiss`](super::dismiss).
    fn follow(&mut self, _policy: &Model) -> Result<()> {
        Err(crate::Error::usage("this generator cannot sample with several ranks")
            .fix("one rank for each copy of the weights"))
    }

    /// Completes all requests and returns their completions in order. Events of other requests remain queued.
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

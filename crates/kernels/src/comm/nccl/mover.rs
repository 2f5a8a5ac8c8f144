//! GPU-to-GPU transfers: NCCL on the transfer stream, ordered with the compute stream by events.

use super::{CardBytes, Communicator};
use crate::backend::Backend;
use crate::card::{CardId, ExchangeStream, StreamEvent, element};
use crate::comm::device::{Mover, Section, Transfer};
use crate::{Error, Result, lock};
use std::sync::{Arc, Mutex, MutexGuard};

/// Transfers numbers between the GPUs of a group of ranks.
pub(in crate::comm) struct NcclMover {
    communicator: Arc<Communicator>,
    /// The communicator's GPU.
    card: CardId,
    /// Whether the communicator is destroyed with the mover: host bytes may use the same one.
    owned: bool,
    times: Arc<Times>,
}

/// Start and end events of transfers.
#[derive(Default)]
struct Times(Mutex<Vec<(StreamEvent, StreamEvent)>>);

impl Times {
    fn lock(&self) -> MutexGuard<'_, Vec<(StreamEvent, StreamEvent)>> {
        lock(&self.0)
    }
}

impl NcclMover {
    pub fn new(communicator: Arc<Communicator>, card: CardId, owned: bool) -> Self {
        NcclMover { communicator, card, owned, times: Arc::default() }
    }
}

impl Mover for NcclMover {
    fn describe(&self) -> String {
        self.communicator.describe()
    }

    fn prepare(&self, backend: &Arc<dyn Backend>) -> Result<Box<dyn Transfer>> {
        let cuda = backend.as_card().ok_or_else(|| Error::device("these ranks communicate between GPUs"))?;
        let streams = cuda.exchange_stream()?;
        if streams.card != self.card {
            return Err(Error::device("this is not the card that the ranks are connected by")
                .fix("one card for each rank from the beginning to the end of a run"));
        }
        let (communicator, times) = (self.communicator.clone(), self.times.clone());
        Ok(Box::new(CardTransfer { communicator, computed: streams.computed()?, streams, ends: None, times }))
    }

    fn take_seconds(&self) -> f64 {
        let mut times = self.times.lock();
        let all = std::mem::take(&mut *times);
        let (done, coming): (Vec<_>, Vec<_>) =
            all.into_iter().partition(|(_, end)| end.has_happened().unwrap_or(false));
        *times = coming;
        done.iter().map(|(start, end)| end.seconds_since(start)).sum()
    }

    fn finish(&self) {
        self.times.lock().clear();
        if self.owned {
            self.communicator.finish();
        }
    }
}

/// The transfers of one exchange.
struct CardTransfer {
    communicator: Arc<Communicator>,
    streams: Arc<ExchangeStream>,
    /// After packing, and after the last use of the receive buffers.
    computed: StreamEvent,
    /// Start and end of the transfers.
    ends: Option<(StreamEvent, StreamEvent)>,
    times: Arc<Times>,
}

impl CardTransfer {
    /// Ranges of buffers to send to other ranks, or receive from them.
    fn bytes(&self, sections: &[Section]) -> Vec<CardBytes> {
        let own = self.communicator.rank;
        let of = |section: &Section| -> Vec<CardBytes> {
            let ranges = section.ranges.iter().enumerate().filter(|(peer, r)| *peer != own && !r.is_empty());
            let size = section.buffer.dtype().size();
            let card = |(peer, r): (usize, &std::ops::Range<usize>)| CardBytes {
                peer,
                at: element(&section.buffer, r.start),
                bytes: r.len() * size,
            };
            ranges.map(card).collect()
        };
        sections.iter().flat_map(of).collect()
    }
}

impl Transfer for CardTransfer {
    fn begin(&mut self, out: &[Section], into: &mut [Section]) -> Result<()> {
        let stream = self.streams.bind()?;
        self.streams.exchanges_wait(&self.computed)?;
        let start = self.streams.exchanged()?;
        let (sends, receives) = (self.bytes(out), self.bytes(into));
        if !sends.is_empty() || !receives.is_empty() {
            self.communicator.begin(&sends, &receives, stream)?;
        }
        self.ends = Some((start, self.streams.exchanged()?));
        Ok(())
    }

    fn join(&mut self, _into: &mut [Section]) -> Result<()> {
        match self.ends.take() {
            Some((start, end)) => {
                self.streams.compute_waits(&end)?;
                self.times.lock().push((start, end));
                Ok(())
            }
            // The start failed, but some transfers may have been launched.
            None => self.streams.compute_waits(&self.streams.exchanged()?),
        }
    }
}

//! Training with ZeRO-3: weights, gradients and optimizer state are sharded over ranks.
//!
//! Forward gathers a layer before computing it and frees it afterwards; so does backward, from the last layer to the first, and
//! sends a layer's gradients to the ranks that own them as soon as they are complete. With [`ModelTrainer::overlap`], the next
//! layer's weights are prefetched and the previous layer's gradients sent while a layer is computed. Parameters outside the
//! layers stay gathered from forward to the update. The exchanges are collective: a rank without a micro-batch in a round makes
//! the same ones with empty contributions ([`ModelTrainer::idle_forward`], [`ModelTrainer::idle_backward`]).

use super::ModelTrainer;
use super::accumulate::Accumulated;
use super::moment::StateKind;
use super::ranks::{GradientExchange, PendingReduce, Totals};
use crate::Result;
use crate::model::decoder::Layers;
use crate::model::gradient::{Gradient, Grads};
use crate::model::shard::{PendingGather, Split};
use crate::model::weights::Model;
use ferrl_kernels::{Purpose, Ranks};
use std::ops::Range;

/// A sharded model of which one layer at a time is gathered.
struct Gathered<'a> {
    model: &'a mut Model,
    split: Split,
    /// Whether each parameter is trained.
    trained: &'a [bool],
    totals: &'a mut Totals,
    /// Whether this is the backward pass: layers in reverse order, with gradients.
    backward: bool,
    /// Whether communication overlaps with computation.
    overlap: bool,
    prefetched: Option<(usize, PendingGather)>,
    /// The previous layer's gradients in transfer.
    pending_reduce: Option<PendingReduce>,
}

impl Gathered<'_> {
    /// Gathers the parameters outside the layers, for forward and the backward after it.
    fn gather_outer(&mut self) -> Result<()> {
        self.model.gather(self.model.outer_params(), true)
    }

    /// Whether the layer is gathered for backward: in backward, and in forward the last layer, which stays gathered.
    fn for_backward(&self, layer: usize) -> bool {
        self.backward || layer + 1 == self.model.config.layers
    }

    fn next(&self, layer: usize) -> Option<usize> {
        match self.backward {
            true => layer.checked_sub(1),
            false => Some(layer + 1).filter(|&next| next < self.model.config.layers),
        }
    }

    fn gather_layer(&mut self, layer: usize) -> Result<()> {
        let backward = self.for_backward(layer);
        match self.prefetched.take() {
            Some((number, prefetched)) if number == layer => {
                self.model.finish_gather(prefetched, backward)?
            }
            _ => self.model.gather(self.model.layer_params(layer), backward)?,
        }
        let Some(next) = self.next(layer).filter(|_| self.overlap) else { return Ok(()) };
        let prefetched = self.model.begin_gather(&self.model.layer_params(next), self.for_backward(next))?;
        self.prefetched = prefetched.map(|prefetched| (next, prefetched));
        Ok(())
    }

    /// Calls `f` with the gradient exchange.
    fn exchanged<T>(&mut self, f: impl FnOnce(&GradientExchange<'_>, &mut Totals) -> Result<T>) -> Result<T> {
        let split = &self.split;
        let parts = |param: usize, len: usize, rank: usize| split.part(param, len, rank);
        f(&GradientExchange::new(self.model, split.ranks(), &parts), self.totals)
    }

    fn wait_for_reduce(&mut self) -> Result<()> {
        let Some(pending_reduce) = self.pending_reduce.take() else { return Ok(()) };
        self.exchanged(|exchange, totals| exchange.finish(pending_reduce, totals))
    }

    fn alloc_grads(&self, params: &[usize], grads: Grads<'_>) -> Result<()> {
        let _gradients = Purpose::Gradients.on(&self.model.backend);
        for &i in params.iter().filter(|&&i| self.trained[i]) {
            grads[i] = Some(Gradient::new(&*self.model.backend, self.model.params[i].shape.len())?);
        }
        Ok(())
    }

    /// Sends gradients to the ranks that own the weights, and frees them.
    fn send(&mut self, params: &[usize], grads: Grads<'_>) -> Result<()> {
        self.wait_for_reduce()?;
        self.exchanged(|exchange, totals| exchange.add(params, grads, totals))?;
        params.iter().for_each(|&i| grads[i] = None);
        Ok(())
    }

    /// Starts sending a layer's gradients, once those of the previous layer have arrived.
    fn begin_send(&mut self, params: Vec<usize>, grads: Grads<'_>) -> Result<()> {
        self.wait_for_reduce()?;
        let pending_reduce = self.exchanged(|exchange, _| exchange.begin(params.clone(), grads))?;
        self.pending_reduce = Some(pending_reduce);
        params.iter().for_each(|&i| grads[i] = None);
        Ok(())
    }
}

impl Layers for Gathered<'_> {
    fn model(&self) -> &Model {
        self.model
    }

    fn at(&mut self, layer: usize) -> Result<&Model> {
        for other in [layer.checked_sub(1), Some(layer + 1)].into_iter().flatten() {
            self.model.release(self.model.layer_params(other));
        }
        self.gather_layer(layer)?;
        Ok(self.model)
    }

    fn backward_begins(&mut self, layer: usize, grads: Grads<'_>) -> Result<()> {
        self.backward = true;
        self.alloc_grads(&self.model.layer_params(layer), grads)
    }

    fn backward_ends(&mut self, layer: usize, grads: Grads<'_>) -> Result<()> {
        let params = self.model.layer_params(layer);
        if self.overlap { self.begin_send(params, grads) } else { self.send(&params, grads) }
    }
}

impl ModelTrainer {
    /// Shards weights, moments and EMA over all ranks, in `copies` full replicas. `number` is the model's index within the run.
    pub fn split(&mut self, ranks: &Ranks, copies: usize, number: usize) -> Result<()> {
        self.model.split(Split::new(ranks, copies, number)?)?;
        self.optimizer.split(&self.model)?;
        for (i, values) in &mut self.start {
            *values = values[self.model.params[*i].own.clone()].to_vec();
        }
        self.zero_grads();
        Ok(())
    }

    /// Calls `f` with the model's layers and gradients.
    pub(super) fn with_layers<T>(
        &mut self,
        f: impl FnOnce(&mut dyn Layers, Grads<'_>) -> Result<T>,
    ) -> Result<T> {
        if self.model.split_over().is_none() || self.model.team().is_some() {
            return f(&mut &self.model, &mut self.grads);
        }
        self.with_gathered(|layers, grads| {
            layers.gather_outer()?;
            f(layers, grads)
        })
    }

    fn with_gathered<T>(&mut self, f: impl FnOnce(&mut Gathered<'_>, Grads<'_>) -> Result<T>) -> Result<T> {
        let split = self.model.split_over().expect("the weights are split").clone();
        let trained: Vec<bool> = (0..self.model.params.len()).map(|i| self.optimizer.trains(i)).collect();
        let (mut totals, overlap) = (self.take_totals(), self.overlap);
        let mut layers = Gathered {
            model: &mut self.model,
            split,
            trained: &trained,
            totals: &mut totals,
            backward: false,
            overlap,
            prefetched: None,
            pending_reduce: None,
        };
        let done = f(&mut layers, &mut self.grads);
        self.totals = Some(totals);
        done
    }

    /// As `accumulate`, with gradients sent layer by layer.
    pub(super) fn accumulate_split<T>(
        &mut self,
        f: impl FnOnce(&mut dyn Layers, Grads<'_>) -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        let done = self.with_gathered(|layers, grads| {
            let outer = layers.model.outer_params();
            layers.alloc_grads(&outer, grads)?;
            let done = f(layers, grads)?;
            layers.send(&outer, grads)?;
            Ok(done)
        });
        if done.is_ok() {
            self.sum = Accumulated::Whole;
        }
        done
    }

    /// As `accumulate` in a team: each rank computes part of the gradient, which [`ModelTrainer::add_round`] exchanges.
    pub(super) fn accumulate_in_team<T>(
        &mut self,
        f: impl FnOnce(&mut dyn Layers, Grads<'_>) -> Result<Option<T>>,
    ) -> Result<Option<T>> {
        let _gradients = Purpose::Gradients.on(&self.model.backend);
        for i in 0..self.grads.len() {
            let room = || Gradient::new(&*self.model.backend, self.model.gradient_len(i));
            self.grads[i] = self.optimizer.trains(i).then(room).transpose()?;
        }
        let done = f(&mut &self.model, &mut self.grads);
        if done.is_ok() {
            self.sum = Accumulated::Whole;
        }
        done
    }

    /// Call before the passes of an update: gathers a team's weights. No-op without a team. Collective.
    pub fn prepare(&mut self) -> Result<()> {
        if self.model.team().is_some() { self.model.gather_all() } else { Ok(()) }
    }

    /// Whether this rank must take part in other ranks' passes because they gather layers from it.
    fn takes_part(&self) -> bool {
        self.model.split_over().is_some() && self.model.team().is_none()
    }

    /// Takes part in the other ranks' forward without a micro-batch. No-op without ZeRO-3.
    pub fn idle_forward(&mut self) -> Result<()> {
        if !self.takes_part() {
            return Ok(());
        }
        self.with_layers(|layers, _| {
            (0..layers.model().config.layers).try_for_each(|l| layers.at(l).map(drop))
        })
    }

    /// Takes part in the other ranks' backward without a micro-batch.
    pub fn idle_backward(&mut self) -> Result<()> {
        if !self.takes_part() {
            return Ok(());
        }
        self.with_gathered(|layers, grads| {
            layers.backward = true;
            for l in (0..layers.model.config.layers).rev() {
                layers.at(l)?;
                layers.backward_ends(l, grads)?;
            }
            layers.send(&layers.model.outer_params(), grads)
        })
    }

    /// A full tensor of the state (see [`StateTensor::kind`](crate::model::serve::StateTensor::kind)). If sharded: on rank 0,
    /// while the others [`serve`](crate::model::serve::serve).
    pub fn state_tensor(&self, param: usize, kind: usize) -> Result<Option<Vec<f32>>> {
        let Some(own) = self.own_state(param, kind)? else { return Ok(None) };
        let Some(split) = self.model.split_over() else { return Ok(Some(own)) };
        let kind_of = kind.checked_sub(1).map(|i| StateKind::ALL[i]);
        let ranges = |weights: Range<usize>| kind_of.map_or(weights.clone(), |kind| kind.range(&weights));
        split.collect((param, kind), self.model.params[param].shape.len(), &own, ranges).map(Some)
    }

    /// This rank's shard of it.
    pub fn own_state(&self, param: usize, kind: usize) -> Result<Option<Vec<f32>>> {
        match kind.checked_sub(1) {
            None => self.model.own_values(param).map(Some),
            Some(i) => self.optimizer.buffers(param)[i].map(|b| self.model.read_f32s(b)).transpose(),
        }
    }
}

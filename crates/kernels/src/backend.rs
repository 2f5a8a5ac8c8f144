//! What a device must be able to do: about fifty coarse operations, each backward beside its forward.
//!
//! Rules every backend keeps:
//! - **Row invariance.** A forward result for a token depends on that token's sequence alone: the same bits
//!   alone or in any batch, at any place in it, with any number of threads.
//! - **Fixed-order sums.** Gradients are the same bits under any number of threads.
//! - Sums are kept in f32 whatever the storage type; `f32` and `bf16` name the storage of activations ("compute
//!   type"). The residual stream, statistics, master weights and gradients of weights are always f32.
//! - Operands that do not fit (lengths, types, indices, memory of another device) are errors, found before anything is
//!   computed: `shapes` has what each operation asks for.

pub use crate::operands::*;

use crate::buffer::{Buffer, DType, Weight};
use crate::composed;
use crate::error::{Error, Result};
use crate::usage::{Purpose, Report};

/// A device.
pub trait Backend: Send + Sync {
    /// One line for people: device, instruction set, threads.
    fn describe(&self) -> String;
    /// Bytes allocated now, and the most there have ever been.
    fn memory(&self) -> (usize, usize);
    /// What memory is for from now on; what it was for before comes back. See [`Purpose::on`].
    fn set_purpose(&self, _purpose: Purpose) -> Purpose {
        Purpose::default()
    }
    /// Where its memory went; `None` where the device keeps no books.
    fn memory_report(&self) -> Option<Report> {
        None
    }
    /// Whether rows are invariant to the bit: they are unless [`Backend::set_exact`] said that they need not be.
    fn is_exact(&self) -> bool {
        true
    }
    /// Without exactness a row's bits may depend on the batch it is in, where that is faster; the same work still gives
    /// the same bits every time. An error where nothing would be gained.
    fn set_exact(&self, exact: bool) -> Result<()> {
        if exact {
            return Ok(());
        }
        Err(Error::usage("exact = false changes nothing on this device, where exactness costs nothing")
            .fix("leave it out, or compute on another device"))
    }
    /// Waits until everything that was started is done. Operations give their results in order without it; it is for
    /// clocks and for errors.
    fn wait(&self) -> Result<()> {
        Ok(())
    }
    /// The most multiply-adds the device can do in that type, in GFLOP/s: the yardstick for benches.
    fn peak_gflops(&self, dtype: DType) -> f64;

    /// Tokens of a batch that keep the device busy; larger ones only take memory.
    fn busy_tokens(&self) -> usize {
        2048
    }

    // ---- memory -------------------------------------------------------------------------------------------
    /// Contents are unspecified.
    fn alloc(&self, dtype: DType, len: usize) -> Result<Buffer>;
    /// Sets every element.
    fn fill(&self, dst: &mut Buffer, value: f32) -> Result<()>;
    /// To `dst[at..]`, converted to its type.
    fn write(&self, dst: &mut Buffer, at: usize, src: &[f32]) -> Result<()>;
    /// From `src[at..]`, converted to f32.
    fn read(&self, src: &Buffer, at: usize, dst: &mut [f32]) -> Result<()>;
    /// A buffer of ids, positions or row numbers.
    fn indices(&self, values: &[u32]) -> Result<Buffer>;
    /// Other ids in the place of those of an index buffer; as many. The buffer stays where it is.
    fn set_indices(&self, dst: &mut Buffer, values: &[u32]) -> Result<()> {
        *dst = self.indices(values)?;
        Ok(())
    }
    /// `dst[to..to + len] = src[from..from + len]`, converted where the types differ.
    fn copy(&self, src: &Buffer, from: usize, dst: &mut Buffer, to: usize, len: usize) -> Result<()>;

    // ---- recordings ---------------------------------------------------------------------------------------
    /// Whether the device can record.
    fn records(&self) -> bool {
        false
    }
    /// Records the operations of `body` instead of doing them. They must have been done before with the same shapes;
    /// what they read and write must stay where it is as long as the recording is replayed; none may bring results to
    /// the host or take anything from it.
    fn record(&self, _body: &mut dyn FnMut() -> Result<()>) -> Result<Recording> {
        Err(Error::device("this device cannot record"))
    }
    /// Does what was recorded.
    fn replay(&self, _recording: &Recording) -> Result<()> {
        Err(Error::device("this device cannot record"))
    }
    /// Tells the device the rows of the paged operations that are to be replayed, in a batch of `batch` rows: one new
    /// token for each sequence. The number that comes back changes when older recordings of such a batch are void.
    fn stage_rows(&self, _rows: &PagedRows, _batch: usize) -> Result<u64> {
        Ok(0)
    }

    // ---- vectors ------------------------------------------------------------------------------------------
    /// `y += a * x`
    fn axpy(&self, a: f32, x: &Buffer, y: &mut Buffer) -> Result<()>;
    /// Sum of products, in f64 over fixed chunks.
    fn dot(&self, x: &Buffer, y: &Buffer) -> Result<f64>;
    /// [`Backend::dot`] of several pairs, for devices where one answer costs as much as many.
    fn dots(&self, pairs: &[(&Buffer, &Buffer)]) -> Result<Vec<f64>> {
        pairs.iter().map(|(x, y)| self.dot(x, y)).collect()
    }
    /// Index of the first NaN or infinity.
    fn first_non_finite(&self, x: &Buffer) -> Result<Option<usize>>;
    /// Row `i` of `dst` is row `rows[i]` of `src`.
    fn gather_rows(&self, src: &Buffer, rows: &Buffer, width: usize, dst: &mut Buffer) -> Result<()>;
    /// Row `rows[i]` of `dst` is row `i` of `src`; the other rows become zero. `rows` are distinct.
    fn scatter_rows(&self, src: &Buffer, rows: &Buffer, width: usize, dst: &mut Buffer) -> Result<()>;

    // ---- embedding ----------------------------------------------------------------------------------------
    /// Row `i` of f32 `out` is row `ids[i]` of f32 `table` times `scale`, or that much more with `add`.
    fn embed(&self, ids: &Buffer, table: &Buffer, scale: f32, add: bool, out: &mut Buffer) -> Result<()>;
    /// `dtable[ids[i]] += scale * dout[i]`, in row order for each id.
    fn embed_backward(&self, ids: &Buffer, dout: &Buffer, scale: f32, dtable: &mut Buffer) -> Result<()>;

    // ---- normalisation ------------------------------------------------------------------------------------
    /// `y = norm(x) * weight + bias`
    fn norm(
        &self,
        op: Norm,
        x: &Buffer,
        weight: &Buffer,
        bias: Option<&Buffer>,
        y: &mut Buffer,
    ) -> Result<()>;
    /// `sum = x + delta` (f32), `y = norm(sum) * weight + bias`
    fn add_norm(
        &self,
        op: Norm,
        x: &Buffer,
        delta: &Buffer,
        weight: &Buffer,
        bias: Option<&Buffer>,
        sum: &mut Buffer,
        y: &mut Buffer,
    ) -> Result<()>;
    /// Writes `dx`, or adds to it with `add`.
    fn norm_backward(
        &self,
        op: Norm,
        dy: &Buffer,
        x: &Buffer,
        weight: &Buffer,
        add: bool,
        dx: &mut Buffer,
        grads: NormGrads<'_>,
    ) -> Result<()>;
    /// `norm` or `add_norm` again into `y`, and `norm_backward` with `dx` added to: the same bits, perhaps sooner.
    /// `rounded`, where given, takes a copy of `dx` in the compute type.
    fn norm_again(
        &self,
        op: Norm,
        of: NormInput<'_>,
        dy: &Buffer,
        y: &mut Buffer,
        dx: &mut Buffer,
        rounded: Option<&mut Buffer>,
        grads: NormGrads<'_>,
    ) -> Result<()> {
        let NormInput { x, delta, weight, bias } = of;
        match delta {
            Some(delta) => {
                let mut sum = self.alloc(DType::F32, x.len())?;
                self.add_norm(op, x, delta, weight, bias, &mut sum, y)?;
                self.norm_backward(op, dy, &sum, weight, true, dx, grads)?;
            }
            None => {
                self.norm(op, x, weight, bias, y)?;
                self.norm_backward(op, dy, x, weight, true, dx, grads)?;
            }
        }
        match rounded {
            Some(rounded) => self.copy(dx, 0, rounded, 0, dx.len()),
            None => Ok(()),
        }
    }

    // ---- linear -------------------------------------------------------------------------------------------
    /// Room for the derived form of an `[n, k]` matrix; with `backward` also what `linear_dx` needs.
    fn weight(&self, n: usize, k: usize, dtype: DType, backward: bool) -> Result<Weight>;
    /// Room for the f32 master of a weight, where the device holds both in the memory of one; to change the one is to change
    /// the other then.
    fn master(&self, _weight: &Weight) -> Result<Option<Buffer>> {
        Ok(None)
    }
    /// Derives it from the f32 master.
    fn load_weight(&self, master: &Buffer, weight: &mut Weight) -> Result<()>;
    /// `y = x · wᵀ + bias`
    fn linear(&self, x: &Buffer, w: &Weight, bias: Option<&Buffer>, y: &mut Buffer) -> Result<()>;
    /// `dx = dy · w`
    fn linear_dx(&self, dy: &Buffer, w: &Weight, dx: &mut Buffer) -> Result<()>;
    /// `dw = dyᵀ · x`, `dbias = Σ dy`, or that much more with `add`, each whole sum in one addition.
    fn linear_dw(
        &self,
        dy: &Buffer,
        x: &Buffer,
        tokens: usize,
        add: bool,
        dw: Option<&mut Buffer>,
        dbias: Option<&mut Buffer>,
    ) -> Result<()>;

    // ---- attention ----------------------------------------------------------------------------------------
    /// Normalises each query head with `q_weight` and each key head with `k_weight`; values are copied.
    fn head_norm(
        &self,
        op: Norm,
        heads: Heads,
        qkv: &Buffer,
        q_weight: &Buffer,
        k_weight: &Buffer,
        out: &mut Buffer,
    ) -> Result<()>;
    /// `dqkv` holds the gradient of the output and becomes that of the input.
    fn head_norm_backward(
        &self,
        op: Norm,
        heads: Heads,
        qkv: &Buffer,
        q_weight: &Buffer,
        k_weight: &Buffer,
        dqkv: &mut Buffer,
        dq_weight: Option<&mut Buffer>,
        dk_weight: Option<&mut Buffer>,
    ) -> Result<()>;
    /// Rotates queries and keys in place. `cos` and `sin` are f32 `[positions, rotary_dim / 2]`; dimension `i` of
    /// a head turns with dimension `i + rotary_dim / 2`. `inverse` turns back, which is the backward.
    fn rotary(
        &self,
        heads: Heads,
        rotary_dim: usize,
        cos: &Buffer,
        sin: &Buffer,
        positions: &Buffer,
        inverse: bool,
        qkv: &mut Buffer,
    ) -> Result<()>;
    /// `lse` is f32 `[rows, heads]`, for the backward.
    fn attention(
        &self,
        op: Attention,
        qkv: &Buffer,
        segments: &Segments,
        out: &mut Buffer,
        lse: &mut Buffer,
    ) -> Result<()>;
    /// Writes `dqkv`.
    fn attention_backward(
        &self,
        op: Attention,
        qkv: &Buffer,
        out: &Buffer,
        lse: &Buffer,
        dout: &Buffer,
        segments: &Segments,
        dqkv: &mut Buffer,
    ) -> Result<()>;
    /// Tokens of a cache block.
    fn block_tokens(&self) -> usize;
    /// Elements of one layer's cache of that many blocks, keys and values together.
    fn cache_len(&self, heads: Heads, blocks: usize) -> usize;
    /// Stores the keys and values of the rows.
    fn cache_write(&self, heads: Heads, qkv: &Buffer, rows: &PagedRows, cache: &mut Buffer) -> Result<()>;
    /// In every layer's cache, the second block of each pair becomes a copy of the first. No block that is written is in
    /// another pair.
    fn cache_copies(&self, heads: Heads, pairs: &[(u32, u32)], layers: &mut [Buffer]) -> Result<()>;
    /// The same bits as `attention` gives for these rows; their own keys are in the cache already.
    fn attention_paged(
        &self,
        op: Attention,
        qkv: &Buffer,
        rows: &PagedRows,
        cache: &Buffer,
        out: &mut Buffer,
    ) -> Result<()>;

    /// Queries, keys and values of tokens, from their normed rows `x`: `linear`, `rotary`, and `cache_write` where there
    /// is a cache.
    fn linear_qkv(
        &self,
        x: &Buffer,
        layer: Affine<'_>,
        heads: Heads,
        turns: Option<Turns<'_>>,
        cache: Option<(&PagedRows, &mut Buffer)>,
        qkv: &mut Buffer,
    ) -> Result<()> {
        composed::linear_qkv(self, x, layer, heads, turns, cache, qkv)
    }
    /// The backward of what comes after the product: `dqkv` is turned back in place, and its rows are summed into `dbias`,
    /// or that much more with `add`.
    fn qkv_backward(
        &self,
        heads: Heads,
        turns: Option<Turns<'_>>,
        dqkv: &mut Buffer,
        add: bool,
        dbias: Option<&mut Buffer>,
    ) -> Result<()> {
        composed::qkv_backward(self, heads, turns, dqkv, add, dbias)
    }

    // ---- feed-forward -------------------------------------------------------------------------------------
    /// `x` is `[rows, 2 * width]` for the gated ones (all gates of a row, then all ups), else `[rows, width]`.
    fn activation(&self, op: Activation, width: usize, x: &Buffer, y: &mut Buffer) -> Result<()>;
    /// Writes `dx`.
    fn activation_backward(
        &self,
        op: Activation,
        width: usize,
        x: &Buffer,
        dy: &Buffer,
        dx: &mut Buffer,
    ) -> Result<()>;

    /// `activation` and `activation_backward` in place, the same bits, perhaps sooner: `dy` becomes what `activation` gave
    /// and `x` the gradient by it.
    fn activation_again(&self, op: Activation, width: usize, x: &mut Buffer, dy: &mut Buffer) -> Result<()> {
        let (mut y, mut dx) = (self.alloc(dy.dtype(), dy.len())?, self.alloc(x.dtype(), x.len())?);
        self.activation(op, width, x, &mut y)?;
        self.activation_backward(op, width, x, dy, &mut dx)?;
        (*dy, *x) = (y, dx);
        Ok(())
    }

    // ---- a few rows ---------------------------------------------------------------------------------------
    /// Rows up to which the operations of this part are sooner done than those they are made of, in a model whose longest
    /// input of a linear layer is `widest`. Their results are the same bits.
    fn few_rows(&self, _widest: usize) -> usize {
        0
    }
    /// The beginning of a layer, from the residual stream `x`: `linear_qkv` of its norm.
    fn normed_qkv(
        &self,
        norm: Normed<'_>,
        x: &Buffer,
        layer: Affine<'_>,
        heads: Heads,
        turns: Option<Turns<'_>>,
        rows: &PagedRows,
        cache: &mut Buffer,
        qkv: &mut Buffer,
    ) -> Result<()> {
        composed::normed_qkv(self, norm, x, layer, heads, turns, rows, cache, qkv)
    }
    /// The end of a sublayer: `to += linear(x)`, which is rounded to the storage of `x` before.
    fn linear_add(&self, x: &Buffer, layer: Affine<'_>, to: &mut Buffer) -> Result<()> {
        composed::linear_add(self, x, layer, to)
    }
    /// The beginning of a feed-forward network: `activation` of `linear` of the norm of the residual stream `x`.
    fn normed_activation(
        &self,
        norm: Normed<'_>,
        x: &Buffer,
        layer: Affine<'_>,
        op: Activation,
        y: &mut Buffer,
    ) -> Result<()> {
        composed::normed_activation(self, norm, x, layer, op, y)
    }

    // ---- heads --------------------------------------------------------------------------------------------
    /// `others` names further tokens per row, `[rows, j]`, and takes their log-probabilities.
    fn logp(
        &self,
        op: LogpHead,
        x: &Buffer,
        w: &Weight,
        targets: &Buffer,
        others: Option<(&Buffer, &mut Buffer)>,
        stats: &mut LogpStats,
    ) -> Result<()>;
    /// Writes `dx`, and `dw` or adds to it with `add`.
    fn logp_backward(
        &self,
        op: LogpHead,
        x: &Buffer,
        w: &Weight,
        targets: &Buffer,
        others: Option<&Buffer>,
        stats: &LogpStats,
        grads: &LogpGrads<'_>,
        dx: &mut Buffer,
        add: bool,
        dw: Option<&mut Buffer>,
    ) -> Result<()>;
    /// `logp` and `logp_backward` in one, for gradients known before: the same bits, perhaps sooner.
    fn logp_known(
        &self,
        op: LogpHead,
        x: &Buffer,
        w: &Weight,
        targets: &Buffer,
        dlogp: &Buffer,
        stats: &mut LogpStats,
        dx: &mut Buffer,
        add: bool,
        dw: Option<&mut Buffer>,
    ) -> Result<()> {
        self.logp(op, x, w, targets, None, stats)?;
        let grads = LogpGrads { logp: dlogp, entropy: None, others: None };
        self.logp_backward(op, x, w, targets, None, stats, &grads, dx, add, dw)
    }
    /// For a few rows: the scaled logits themselves, `[rows, vocab]` f32, and their `lse`, the bits `logp` uses.
    fn logits(
        &self,
        op: LogpHead,
        x: &Buffer,
        w: &Weight,
        logits: &mut Buffer,
        lse: &mut Buffer,
    ) -> Result<()>;
    /// For each row of `logits`, the first token whose cumulative probability exceeds `uniform[row]`.
    fn sample(&self, logits: &Buffer, lse: &Buffer, uniform: &[f32]) -> Result<Vec<u32>>;
    /// For each row of `logits`, the first largest.
    fn argmax(&self, logits: &Buffer, rows: usize) -> Result<Vec<u32>>;
    /// Begins to choose a token of each row of `logits`: what `sample` or `argmax` gives, or a draw among the tokens that
    /// truncation leaves. [`Backend::chosen`] has the answers; other work may be begun before they are asked for.
    fn choose(&self, logits: &Buffer, lse: &Buffer, asks: &[Ask]) -> Result<Choices> {
        Ok(Choices::new(Box::new(composed::choose(self, logits, lse, asks)?)))
    }
    /// Waits for choices, not for what was begun after them.
    fn chosen(&self, choices: &Choices) -> Result<Vec<Choice>> {
        let made = choices.data().downcast_ref::<Vec<Choice>>();
        made.cloned().ok_or_else(|| Error::usage("operation chosen: choices of another device"))
    }
    /// Puts chosen tokens into an index buffer, on devices that can without asking which they are: element `i` becomes the
    /// token of row `from[i].1` of `choices[from[i].0]`. Elements past those of `from` hold any token.
    fn feed(&self, choices: &[&Choices], from: &[(usize, u32)], ids: &mut Buffer) -> Result<()> {
        let chosen = choices.iter().map(|c| self.chosen(c)).collect::<Result<Vec<_>>>()?;
        let of = |&(i, row): &(usize, u32)| chosen.get(i).and_then(|rows| rows.get(row as usize));
        let tokens: Option<Vec<u32>> = from.iter().map(|f| of(f).map(|choice| choice.token)).collect();
        let Some(mut tokens) = tokens.filter(|tokens| tokens.len() <= ids.len()) else {
            return Err(Error::usage(
                "operation feed: more tokens than ids, or a row that nothing was chosen for",
            ));
        };
        tokens.resize(ids.len(), 0);
        self.set_indices(ids, &tokens)
    }
    /// KL(p || q) per row over the whole vocabulary; `p` and `q` are (hidden states, head).
    fn kl(&self, op: LogpHead, p: (&Buffer, &Weight), q: (&Buffer, &Weight), kl: &mut Buffer) -> Result<()>;
    /// Gradient of `kl` with respect to `p`: writes `dx`, adds to `dw`.
    fn kl_backward(
        &self,
        op: LogpHead,
        p: (&Buffer, &Weight),
        q: (&Buffer, &Weight),
        dkl: &Buffer,
        dx: &mut Buffer,
        dw: Option<&mut Buffer>,
    ) -> Result<()>;

    // ---- updates ------------------------------------------------------------------------------------------
    /// Updates parameters, their state, and the forms derived from them where there are any.
    fn adamw(&self, params: &mut [AdamWParam<'_>]) -> Result<()>;
    /// Elements `range` of a parameter and of its velocity (absent without momentum).
    fn sgd(
        &self,
        op: Sgd,
        range: std::ops::Range<usize>,
        param: &mut Buffer,
        grad: &Buffer,
        velocity: Option<&mut Buffer>,
    ) -> Result<()>;
}

//! A device with the required methods alone: everything else is composed of them, and is what the CPU computes.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl_kernels::backend::*;
use ferrl_kernels::check::{CASES, Check, Outcome};
use ferrl_kernels::cpu::Cpu;
use ferrl_kernels::{Buffer, DType, Result, Weight};

struct Plain(Cpu);

impl Home for Plain {
    fn as_home(&self) -> &dyn Home {
        self
    }
    fn holds(&self, buffer: &Buffer) -> bool {
        self.0.holds(buffer)
    }
    fn holds_weight(&self, weight: &Weight, backward: bool) -> bool {
        self.0.holds_weight(weight, backward)
    }
    fn ids<'a>(&self, buffer: &'a Buffer) -> &'a [u32] {
        self.0.ids(buffer)
    }
    fn block_tokens(&self) -> usize {
        self.0.block_tokens()
    }
    fn block_len(&self, heads: Heads) -> usize {
        self.0.block_len(heads)
    }
}

impl MemoryOps for Plain {
    fn memory(&self) -> (usize, usize) {
        self.0.memory()
    }
    fn alloc(&self, dtype: DType, len: usize) -> Result<Buffer> {
        self.0.alloc(dtype, len)
    }
    fn write(&self, dst: &mut Buffer, at: usize, src: &[f32]) -> Result<()> {
        self.0.write(dst, at, src)
    }
    fn read(&self, src: &Buffer, at: usize, dst: &mut [f32]) -> Result<()> {
        self.0.read(src, at, dst)
    }
    fn indices(&self, values: &[u32]) -> Result<Buffer> {
        self.0.indices(values)
    }
    fn copy(&self, src: &Buffer, from: usize, dst: &mut Buffer, to: usize, len: usize) -> Result<()> {
        self.0.copy(src, from, dst, to, len)
    }
}
impl VectorOps for Plain {
    fn axpy(&self, a: f32, x: &Buffer, y: &mut Buffer) -> Result<()> {
        self.0.axpy(a, x, y)
    }
}
impl EmbeddingOps for Plain {}
impl NormOps for Plain {
    fn norm(
        &self,
        op: Norm,
        x: &Buffer,
        weight: &Buffer,
        bias: Option<&Buffer>,
        y: &mut Buffer,
    ) -> Result<()> {
        self.0.norm(op, x, weight, bias, y)
    }
    fn norm_backward(
        &self,
        op: Norm,
        dy: &Buffer,
        x: &Buffer,
        weight: &Buffer,
        add: bool,
        dx: &mut Buffer,
        grads: NormGrads<'_>,
    ) -> Result<()> {
        self.0.norm_backward(op, dy, x, weight, add, dx, grads)
    }
}
impl HeadNormOps for Plain {}
impl LinearOps for Plain {
    fn weight(&self, n: usize, k: usize, dtype: DType, backward: bool) -> Result<Weight> {
        self.0.weight(n, k, dtype, backward)
    }
    fn load_weight(&self, master: &Buffer, weight: &mut Weight) -> Result<()> {
        self.0.load_weight(master, weight)
    }
    fn linear(&self, x: &Buffer, w: &Weight, bias: Option<&Buffer>, y: &mut Buffer) -> Result<()> {
        self.0.linear(x, w, bias, y)
    }
    fn linear_dx(&self, dy: &Buffer, w: &Weight, dx: &mut Buffer) -> Result<()> {
        self.0.linear_dx(dy, w, dx)
    }
    fn linear_dw(
        &self,
        dy: &Buffer,
        x: &Buffer,
        tokens: usize,
        add: bool,
        dw: Option<&mut Buffer>,
        dbias: Option<&mut Buffer>,
    ) -> Result<()> {
        self.0.linear_dw(dy, x, tokens, add, dw, dbias)
    }
}
impl ActivationOps for Plain {
    fn activation(&self, op: Activation, width: usize, x: &Buffer, y: &mut Buffer) -> Result<()> {
        self.0.activation(op, width, x, y)
    }
    fn activation_backward(
        &self,
        op: Activation,
        width: usize,
        x: &Buffer,
        dy: &Buffer,
        dx: &mut Buffer,
    ) -> Result<()> {
        self.0.activation_backward(op, width, x, dy, dx)
    }
}
impl AttentionOps for Plain {
    fn attention(
        &self,
        op: Attention,
        qkv: &Buffer,
        segments: &Segments,
        out: &mut Buffer,
        lse: &mut Buffer,
    ) -> Result<()> {
        self.0.attention(op, qkv, segments, out, lse)
    }
    fn attention_backward(
        &self,
        op: Attention,
        qkv: &Buffer,
        out: &Buffer,
        lse: &Buffer,
        dout: &Buffer,
        segments: &Segments,
        dqkv: &mut Buffer,
    ) -> Result<()> {
        self.0.attention_backward(op, qkv, out, lse, dout, segments, dqkv)
    }
}
impl CacheOps for Plain {
    fn cache_write(&self, heads: Heads, qkv: &Buffer, rows: &PagedRows, cache: &mut Buffer) -> Result<()> {
        self.0.cache_write(heads, qkv, rows, cache)
    }
    fn attention_paged(
        &self,
        op: Attention,
        qkv: &Buffer,
        rows: &PagedRows,
        cache: &Buffer,
        out: &mut Buffer,
    ) -> Result<()> {
        self.0.attention_paged(op, qkv, rows, cache, out)
    }
}
impl RopeOps for Plain {
    fn rotary(
        &self,
        heads: Heads,
        rotary_dim: usize,
        cos: &Buffer,
        sin: &Buffer,
        positions: &Buffer,
        inverse: bool,
        qkv: &mut Buffer,
    ) -> Result<()> {
        self.0.rotary(heads, rotary_dim, cos, sin, positions, inverse, qkv)
    }
}
impl DecodeOps for Plain {}
impl HeadOps for Plain {}
impl DivergenceOps for Plain {}
impl SampleOps for Plain {}
impl OptimizerOps for Plain {
    fn adamw(&self, params: &mut [AdamWParam<'_>]) -> Result<()> {
        self.0.adamw(params)
    }
    fn sgd(
        &self,
        op: Sgd,
        range: std::ops::Range<usize>,
        param: &mut Buffer,
        grad: &Buffer,
        velocity: Option<&mut Buffer>,
    ) -> Result<()> {
        self.0.sgd(op, range, param, grad, velocity)
    }
}
impl GraphOps for Plain {}
impl Backend for Plain {
    fn describe(&self) -> String {
        self.0.describe()
    }
    fn peak_gflops(&self, dtype: DType) -> f64 {
        self.0.peak_gflops(dtype)
    }
}

/// The cases of operations that have a default.
const COVERED: &[&str] =
    &["operands", "vectors", "rows", "few rows", "logp head", "logp head: known", "sampling", "divergence"];

#[test]
fn what_is_composed_is_what_the_cpu_computes() {
    let (cpu, plain) = (Cpu::new(Some(2)).unwrap(), Plain(Cpu::new(Some(2)).unwrap()));
    let mut wrong = Vec::new();
    let mut each = |o: &Outcome| {
        if !o.is_right() {
            wrong.push(format!("{}: {} of {}", o.name, o.worst, o.limit));
        }
    };
    let mut check = Check::new(&cpu, &plain, &mut each);
    for (name, case) in CASES.iter().filter(|(name, _)| COVERED.contains(name)) {
        case(&mut check).unwrap_or_else(|e| panic!("{name}: {e}"));
    }
    assert!(wrong.is_empty(), "{wrong:#?}");
}

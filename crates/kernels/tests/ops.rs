//! Element-wise and row-wise operations against plain f64 code.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

mod suite;

use ferrl_kernels::backend::*;
use ferrl_kernels::cpu::Cpu;
use ferrl_kernels::{Buffer, DType, Result};
use suite::*;

/// (width, rows): around a vector's length, and enough rows for several chunks and tasks.
const SIZES: [(usize, usize); 7] = [(1, 70), (2, 3), (15, 3), (16, 130), (17, 5), (33, 130), (100, 170)];
/// Several tasks and a ragged end.
const LONG: usize = 3 * 16 * 1024 + 7;

// ---- normalisation ------------------------------------------------------------------------------------------

fn exact_norm(op: Norm, x: &[f64], weight: &[f64], bias: &[f64]) -> Vec<f64> {
    let n = x.len() as f64;
    let mean = if op.centred { x.iter().sum::<f64>() / n } else { 0.0 };
    let variance = x.iter().map(|x| (x - mean) * (x - mean)).sum::<f64>() / n;
    let scale = 1.0 / (variance + op.eps as f64).sqrt();
    let one = if op.plus_one { 1.0 } else { 0.0 };
    (0..x.len()).map(|i| (x[i] - mean) * scale * (weight[i] + one) + bias.get(i).unwrap_or(&0.0)).collect()
}

struct NormOp {
    op: Norm,
    rows: usize,
    bias: bool,
    add: bool,
}

impl NormOp {
    fn data(&self, seed: u32, dtype: DType) -> Vec<f32> {
        stored(dtype, &random(seed, self.rows * self.op.width))
    }
    fn weight(&self) -> Vec<f32> {
        random(3, self.op.width)
    }
    fn bias(&self) -> Vec<f32> {
        if self.bias { random(4, self.op.width) } else { Vec::new() }
    }
}

impl Op for NormOp {
    fn name(&self) -> String {
        format!("{:?} bias {} add {}", self.op, self.bias, self.add)
    }
    fn rows(&self) -> usize {
        self.rows
    }
    fn by_row(&self, cpu: &Cpu, dtype: DType, picks: &[usize]) -> Vec<Vec<f32>> {
        let op = self.op;
        let input = |seed| upload(cpu, dtype, &pick(&self.data(seed, dtype), op.width, picks));
        let (x, delta, dy, mut dx) = (input(0), input(1), input(2), input(5));
        let (weight, bias) = (upload(cpu, DType::F32, &self.weight()), upload(cpu, DType::F32, &self.bias()));
        let bias = self.bias.then_some(&bias);
        let mut y = unwritten(cpu, dtype, x.len());
        cpu.norm(Normed { op, weight: &weight, bias }, &x, &mut y).unwrap();
        let (mut sum, mut z) = (unwritten(cpu, DType::F32, x.len()), unwritten(cpu, dtype, x.len()));
        cpu.add_norm(Normed { op, weight: &weight, bias }, &x, &delta, &mut sum, &mut z).unwrap();
        if !self.add {
            dx = unwritten(cpu, dtype, x.len());
        }
        cpu.norm_backward(
            Normed { op, weight: &weight, bias: None },
            &dy,
            &x,
            Target { to: &mut dx, add: self.add },
            NormGrads { weight: None, bias: None, add: true },
        )
        .unwrap();
        [y, sum, z, dx].iter().map(|b| download(cpu, b)).collect()
    }
    fn sums(&self, cpu: &Cpu, dtype: DType) -> Vec<Vec<f32>> {
        let op = self.op;
        let (x, dy) = (upload(cpu, dtype, &self.data(0, dtype)), upload(cpu, dtype, &self.data(2, dtype)));
        let weight = upload(cpu, DType::F32, &self.weight());
        let sum = |seed| upload(cpu, DType::F32, &random(seed, op.width));
        let (mut dweight, mut dbias) = (sum(6), sum(7));
        let mut dx = unwritten(cpu, dtype, x.len());
        cpu.norm_backward(
            Normed { op, weight: &weight, bias: None },
            &dy,
            &x,
            Target { to: &mut dx, add: false },
            NormGrads { weight: Some(&mut dweight), bias: Some(&mut dbias), add: true },
        )
        .unwrap();
        // Each alone gives the same, and the gradient of the input does not depend on them.
        let (mut dw, mut db, mut again) = (sum(6), sum(7), unwritten(cpu, dtype, x.len()));
        cpu.norm_backward(
            Normed { op, weight: &weight, bias: None },
            &dy,
            &x,
            Target { to: &mut again, add: false },
            NormGrads { weight: Some(&mut dw), bias: None, add: true },
        )
        .unwrap();
        assert_same_bits("dx", &download(cpu, &again), &download(cpu, &dx));
        cpu.norm_backward(
            Normed { op, weight: &weight, bias: None },
            &dy,
            &x,
            Target { to: &mut again, add: false },
            NormGrads { weight: None, bias: Some(&mut db), add: true },
        )
        .unwrap();
        assert_same_bits("dweight", &download(cpu, &dw), &download(cpu, &dweight));
        assert_same_bits("dbias", &download(cpu, &db), &download(cpu, &dbias));
        vec![download(cpu, &dweight), download(cpu, &dbias)]
    }
    fn exact(&self, dtype: DType) -> Results<f64> {
        let data = |seed| wide(&self.data(seed, dtype));
        let (x, delta, dy, old) = (data(0), data(1), data(2), data(5));
        let (weight, bias) = (wide(&self.weight()), wide(&self.bias()));
        let width = self.op.width;
        let rows = |x: &[f64], w: &[f64], b: &[f64]| -> Vec<f64> {
            x.chunks(width).flat_map(|x| exact_norm(self.op, x, w, b)).collect()
        };
        let sum: Vec<f64> = x.iter().zip(&delta).map(|(x, d)| (*x as f32 + *d as f32) as f64).collect();
        let mut dx: Vec<f64> = x
            .chunks(width)
            .zip(dy.chunks(width))
            .flat_map(|(x, dy)| differences(x, |x| inner(dy, &exact_norm(self.op, x, &weight, &bias))))
            .collect();
        if self.add {
            dx.iter_mut().zip(&old).for_each(|(d, old)| *d += old);
        }
        let mut dweight = differences(&weight, |w| inner(&dy, &rows(&x, w, &bias)));
        let mut dbias = differences(&vec![0.0; width], |b| inner(&dy, &rows(&x, &weight, b)));
        dweight.iter_mut().zip(random(6, width)).for_each(|(d, old)| *d += old as f64);
        dbias.iter_mut().zip(random(7, width)).for_each(|(d, old)| *d += old as f64);
        let (y, z) = (rows(&x, &weight, &bias), rows(&sum, &weight, &bias));
        (vec![y, sum, z, dx], vec![dweight, dbias])
    }
}

#[test]
fn norms() {
    for (width, rows) in SIZES {
        for (centred, plus_one, bias, add) in
            [(false, false, false, false), (false, true, false, true), (true, false, true, false)]
        {
            let op = Norm { centred, plus_one, eps: 1e-3, width };
            check(&NormOp { op, rows, bias, add });
        }
    }
}

struct HeadNormOp {
    whole: bool,
    op: Norm,
    heads: Heads,
    rows: usize,
}

impl HeadNormOp {
    fn data(&self, seed: u32, dtype: DType) -> Vec<f32> {
        stored(dtype, &random(seed, self.rows * self.heads.qkv_width()))
    }
    fn exact_rows(&self, x: &[f64], q: &[f64], k: &[f64]) -> Vec<f64> {
        let Heads { heads, kv_heads, head_dim } = self.heads;
        let (queries, keys) = (heads * head_dim, kv_heads * head_dim);
        let norms = |x: &[f64], weight: &[f64]| -> Vec<f64> {
            let op = Norm { width: weight.len(), ..self.op };
            x.chunks(op.width).flat_map(|x| exact_norm(op, x, weight, &[])).collect()
        };
        let row = |x: &[f64]| {
            let (query, rest) = x.split_at(queries);
            [norms(query, q), norms(&rest[..keys], k), rest[keys..].to_vec()].concat()
        };
        x.chunks(self.heads.qkv_width()).flat_map(row).collect()
    }
    /// Widths of the norms of queries and keys.
    fn widths(&self) -> [usize; 2] {
        let Heads { heads, kv_heads, head_dim } = self.heads;
        if self.whole { [heads * head_dim, kv_heads * head_dim] } else { [head_dim; 2] }
    }
    fn norm<'a>(&self, q_weight: &'a Buffer, k_weight: &'a Buffer) -> HeadNorm<'a> {
        HeadNorm { op: self.op, heads: self.heads, whole: self.whole, q_weight, k_weight }
    }
}

impl Op for HeadNormOp {
    fn name(&self) -> String {
        format!("{:?} {:?} whole: {}", self.op, self.heads, self.whole)
    }
    fn rows(&self) -> usize {
        self.rows
    }
    fn by_row(&self, cpu: &Cpu, dtype: DType, picks: &[usize]) -> Vec<Vec<f32>> {
        let width = self.heads.qkv_width();
        let input = |seed| upload(cpu, dtype, &pick(&self.data(seed, dtype), width, picks));
        let ((x, mut d), [query, key]) = ((input(0), input(1)), self.widths());
        let q = upload(cpu, DType::F32, &random(2, query));
        let k = upload(cpu, DType::F32, &random(3, key));
        let mut y = unwritten(cpu, dtype, x.len());
        cpu.head_norm(self.norm(&q, &k), &x, &mut y).unwrap();
        cpu.head_norm_backward(self.norm(&q, &k), &x, &mut d, [None, None]).unwrap();
        vec![download(cpu, &y), download(cpu, &d)]
    }
    fn sums(&self, cpu: &Cpu, dtype: DType) -> Vec<Vec<f32>> {
        let x = upload(cpu, dtype, &self.data(0, dtype));
        let vector = |seed| upload(cpu, DType::F32, &random(seed, self.widths()[seed as usize % 2]));
        let (q, k, mut dq, mut dk) = (vector(2), vector(3), vector(4), vector(5));
        let mut d = upload(cpu, dtype, &self.data(1, dtype));
        let sums = (Some(&mut dq), Some(&mut dk));
        cpu.head_norm_backward(self.norm(&q, &k), &x, &mut d, [sums.0, sums.1]).unwrap();
        let (mut alone, mut d) = (vector(5), upload(cpu, dtype, &self.data(1, dtype)));
        cpu.head_norm_backward(self.norm(&q, &k), &x, &mut d, [None, Some(&mut alone)]).unwrap();
        assert_same_bits("dk_weight", &download(cpu, &alone), &download(cpu, &dk));
        vec![download(cpu, &dq), download(cpu, &dk)]
    }
    fn exact(&self, dtype: DType) -> Results<f64> {
        let (x, dy) = (wide(&self.data(0, dtype)), wide(&self.data(1, dtype)));
        let vector = |seed| wide(&random(seed, self.widths()[seed as usize % 2]));
        let (q, k, width) = (vector(2), vector(3), self.heads.qkv_width());
        let dx = x
            .chunks(width)
            .zip(dy.chunks(width))
            .flat_map(|(x, dy)| differences(x, |x| inner(dy, &self.exact_rows(x, &q, &k))))
            .collect();
        let mut dq = differences(&q, |q| inner(&dy, &self.exact_rows(&x, q, &k)));
        let mut dk = differences(&k, |k| inner(&dy, &self.exact_rows(&x, &q, k)));
        dq.iter_mut().zip(vector(4)).for_each(|(d, old)| *d += old);
        dk.iter_mut().zip(vector(5)).for_each(|(d, old)| *d += old);
        (vec![self.exact_rows(&x, &q, &k), dx], vec![dq, dk])
    }
}

#[test]
fn head_norms() {
    for (head_dim, rows) in [(1, 70), (15, 3), (16, 130), (33, 67), (64, 5)] {
        for (heads, kv_heads, plus_one) in [(1, 1, false), (4, 2, true)] {
            let op = Norm { centred: false, plus_one, eps: 1e-3, width: head_dim };
            let heads = Heads { heads, kv_heads, head_dim };
            check(&HeadNormOp { op, heads, whole: false, rows });
            check(&HeadNormOp { op, heads, whole: true, rows: rows.min(40) });
        }
    }
}

// ---- feed-forward -------------------------------------------------------------------------------------------

struct ActivationOp {
    op: Activation,
    width: usize,
    rows: usize,
}

impl ActivationOp {
    fn inputs(&self) -> usize {
        if self.op == Activation::Gelu { self.width } else { 2 * self.width }
    }
    fn x(&self, dtype: DType) -> Vec<f32> {
        let x: Vec<f32> = random(0, self.rows * self.inputs()).iter().map(|x| 3.0 * x).collect();
        stored(dtype, &x)
    }
    fn dy(&self, dtype: DType) -> Vec<f32> {
        stored(dtype, &random(1, self.rows * self.width))
    }
    fn exact_row(&self, x: &[f64]) -> Vec<f64> {
        let silu = |x: f64| x / (1.0 + (-x).exp());
        let gelu = |x: f64| {
            0.5 * x * (1.0 + (std::f64::consts::FRAC_2_PI.sqrt() * (x + 0.044715 * x * x * x)).tanh())
        };
        let curve = |x: f64| if self.op == Activation::SiluGated { silu(x) } else { gelu(x) };
        (0..self.width).map(|i| curve(x[i]) * x.get(self.width + i).unwrap_or(&1.0)).collect()
    }
}

impl Op for ActivationOp {
    fn name(&self) -> String {
        format!("{:?} {}", self.op, self.width)
    }
    fn rows(&self) -> usize {
        self.rows
    }
    fn by_row(&self, cpu: &Cpu, dtype: DType, picks: &[usize]) -> Vec<Vec<f32>> {
        let x = upload(cpu, dtype, &pick(&self.x(dtype), self.inputs(), picks));
        let dy = upload(cpu, dtype, &pick(&self.dy(dtype), self.width, picks));
        let (mut y, mut dx) = (unwritten(cpu, dtype, dy.len()), unwritten(cpu, dtype, x.len()));
        cpu.activation(self.op, self.width, &x, &mut y).unwrap();
        cpu.activation_backward(self.op, self.width, &x, &dy, &mut dx).unwrap();
        vec![download(cpu, &y), download(cpu, &dx)]
    }
    fn exact(&self, dtype: DType) -> Results<f64> {
        let (x, dy) = (wide(&self.x(dtype)), wide(&self.dy(dtype)));
        let y = x.chunks(self.inputs()).flat_map(|x| self.exact_row(x)).collect();
        let dx = x
            .chunks(self.inputs())
            .zip(dy.chunks(self.width))
            .flat_map(|(x, dy)| differences(x, |x| inner(dy, &self.exact_row(x))))
            .collect();
        (vec![y, dx], Vec::new())
    }
}

#[test]
fn activations() {
    for (width, rows) in SIZES {
        for op in [Activation::SiluGated, Activation::GeluGated, Activation::Gelu] {
            check(&ActivationOp { op, width, rows: rows.min(200) });
        }
    }
}

#[test]
fn activations_far_from_zero() {
    for_each_cpu(|cpu| {
        let x = [1e30, -1e30, 50.0, -50.0, 1e-30, 0.0, f32::MAX, f32::MIN];
        let x = upload(cpu, DType::F32, &x);
        let (mut y, mut dx) = (unwritten(cpu, DType::F32, 8), unwritten(cpu, DType::F32, 8));
        cpu.activation(Activation::Gelu, 8, &x, &mut y).unwrap();
        let want = [1e30, 0.0, 50.0, 0.0, 5e-31, 0.0, f32::MAX, 0.0];
        assert!(download(cpu, &y).iter().zip(want).all(|(y, w)| *y == w), "{:?}", download(cpu, &y));
        let dy = upload(cpu, DType::F32, &[1.0; 8]);
        cpu.activation_backward(Activation::Gelu, 8, &x, &dy, &mut dx).unwrap();
        let want = [1.0, 0.0, 1.0, 0.0, 0.5, 0.5, 1.0, 0.0];
        assert!(download(cpu, &dx).iter().zip(want).all(|(d, w)| *d == w), "{:?}", download(cpu, &dx));
        // Gates -1e30 and 1e30 with ups 2 and 3.
        let x = upload(cpu, DType::F32, &[-1e30, 1e30, 2.0, 3.0]);
        let (dy, mut dx) = (upload(cpu, DType::F32, &[1.0; 2]), unwritten(cpu, DType::F32, 4));
        cpu.activation_backward(Activation::SiluGated, 2, &x, &dy, &mut dx).unwrap();
        let got = download(cpu, &dx);
        assert!(got[0] == 0.0 && got[1] == 3.0 && got[2] == 0.0 && got[3] == 1e30, "{got:?}");
    });
}

// ---- embedding ----------------------------------------------------------------------------------------------

struct EmbedOp {
    width: usize,
    rows: usize,
    vocab: usize,
}

const EMBED_SCALE: f32 = 1.7;

impl EmbedOp {
    /// The last quarter of the table is never used.
    fn ids(&self) -> Vec<u32> {
        random_ids(0, self.rows, (self.vocab - self.vocab / 4) as u32)
    }
    fn exact_rows(&self, table: &[f64]) -> Vec<f64> {
        let ids: Vec<usize> = self.ids().iter().map(|&id| id as usize).collect();
        pick(table, self.width, &ids).iter().map(|x| x * EMBED_SCALE as f64).collect()
    }
}

impl Op for EmbedOp {
    fn name(&self) -> String {
        format!("embed {} of {}", self.width, self.vocab)
    }
    fn rows(&self) -> usize {
        self.rows
    }
    fn by_row(&self, cpu: &Cpu, _: DType, picks: &[usize]) -> Vec<Vec<f32>> {
        let ids = cpu.indices(&pick(&self.ids(), 1, picks)).unwrap();
        let table = upload(cpu, DType::F32, &random(1, self.vocab * self.width));
        let mut set = unwritten(cpu, DType::F32, picks.len() * self.width);
        let mut added = upload(cpu, DType::F32, &pick(&random(2, self.rows * self.width), self.width, picks));
        cpu.embed(&ids, &table, EMBED_SCALE, false, &mut set).unwrap();
        cpu.embed(&ids, &table, EMBED_SCALE, true, &mut added).unwrap();
        vec![download(cpu, &set), download(cpu, &added)]
    }
    fn sums(&self, cpu: &Cpu, dtype: DType) -> Vec<Vec<f32>> {
        let ids = cpu.indices(&self.ids()).unwrap();
        let dout = upload(cpu, dtype, &random(3, self.rows * self.width));
        let old = random(4, self.vocab * self.width);
        let mut dtable = upload(cpu, DType::F32, &old);
        cpu.embed_backward(&ids, &dout, EMBED_SCALE, &mut dtable).unwrap();
        let dtable = download(cpu, &dtable);
        for id in (0..self.vocab as u32).filter(|id| !self.ids().contains(id)) {
            let row = id as usize * self.width..(id as usize + 1) * self.width;
            assert_same_bits("a row that is not used", &dtable[row.clone()], &old[row]);
        }
        vec![dtable]
    }
    fn exact(&self, dtype: DType) -> Results<f64> {
        let table = wide(&random(1, self.vocab * self.width));
        let set = self.exact_rows(&table);
        let old = wide(&random(2, self.rows * self.width));
        let added = set.iter().zip(&old).map(|(a, b)| a + b).collect();
        let dout = wide(&stored(dtype, &random(3, self.rows * self.width)));
        let mut dtable = differences(&table, |t| inner(&dout, &self.exact_rows(t)));
        dtable.iter_mut().zip(random(4, table.len())).for_each(|(d, old)| *d += old as f64);
        (vec![set, added], vec![dtable])
    }
}

#[test]
fn embeddings() {
    for (width, rows, vocab) in [(1, 70, 5), (15, 3, 40), (17, 150, 30), (33, 40, 4)] {
        check(&EmbedOp { width, rows, vocab });
    }
}

#[test]
fn embedding_sums_of_wide_rows_do_not_depend_on_threads() {
    // Several tasks of columns, and of ids; one id has most of the rows.
    let (width, rows, vocab) = (1100, 150, 40);
    let ids: Vec<u32> = random_ids(8, rows, 80).iter().map(|&id| if id < vocab { id } else { 7 }).collect();
    let (dout, old) = (random(9, rows * width), random(10, vocab as usize * width));
    let mut want = wide(&old);
    for (row, &id) in ids.iter().enumerate() {
        for j in 0..width {
            want[id as usize * width + j] += 0.5 * dout[row * width + j] as f64;
        }
    }
    for level in levels() {
        let results = THREADS.map(|threads| {
            let cpu = &Cpu::with_level(threads, level).unwrap();
            let (ids, dout) = (cpu.indices(&ids).unwrap(), upload(cpu, DType::F32, &dout));
            let mut dtable = upload(cpu, DType::F32, &old);
            cpu.embed_backward(&ids, &dout, 0.5, &mut dtable).unwrap();
            download(cpu, &dtable)
        });
        assert_close("dtable", &results[0], &want, 1e-6, 1e-6);
        assert_same_bits("dtable", &results[1], &results[0]);
        assert_same_bits("dtable", &results[2], &results[0]);
    }
}

#[test]
#[should_panic(expected = "ids holds 5, expected numbers below 5")]
fn an_id_past_the_table_is_refused() {
    let cpu = &Cpu::with_level(1, levels()[0]).unwrap();
    let (ids, table) = (cpu.indices(&[1, 5]).unwrap(), upload(cpu, DType::F32, &[0.0; 10]));
    cpu.embed(&ids, &table, 1.0, false, &mut unwritten(cpu, DType::F32, 4)).unwrap();
}

// ---- storage types ------------------------------------------------------------------------------------------

/// Whatever is stored as bf16 is read exactly and rounded once: with inputs that bf16 can hold, every mix of
/// storage types gives the f32 results, rounded where the output is bf16.
fn check_mixes<const N: usize>(what: &str, inputs: [&[f32]; N], f: impl Fn(&Cpu, [&Buffer; N], &mut Buffer)) {
    for level in levels() {
        let cpu = &Cpu::with_level(2, level).unwrap();
        let run = |dtypes: [DType; N], out: DType| {
            let buffers: [Buffer; N] =
                std::array::from_fn(|i| upload(cpu, dtypes[i], &stored(DType::Bf16, inputs[i])));
            let mut result = upload(cpu, out, &stored(DType::Bf16, &random(99, inputs[0].len())));
            f(cpu, std::array::from_fn(|i| &buffers[i]), &mut result);
            download(cpu, &result)
        };
        let base = run([DType::F32; N], DType::F32);
        for mix in 0..2 << N {
            let dtypes = std::array::from_fn(|i| STORAGE[mix >> i & 1]);
            let out = STORAGE[mix >> N & 1];
            let name = format!("{what} {} {dtypes:?} {out:?}", level.name());
            assert_same_bits(&name, &run(dtypes, out), &stored(out, &base));
        }
    }
}

#[test]
fn any_mix_of_storage_types() {
    let (a, b, weight) = (random(0, 5 * 33), random(1, 5 * 33), random(2, 33));
    let op = Norm { centred: true, plus_one: true, eps: 1e-5, width: 33 };
    let weights = |cpu: &Cpu| upload(cpu, DType::F32, &weight);
    check_mixes("norm", [&a], |cpu, [x], y| {
        cpu.norm(Normed { op, weight: &weights(cpu), bias: None }, x, y).unwrap()
    });
    check_mixes("add_norm", [&a, &b], |cpu, [x, delta], y| {
        let mut sum = unwritten(cpu, DType::F32, x.len());
        cpu.add_norm(Normed { op, weight: &weights(cpu), bias: None }, x, delta, &mut sum, y).unwrap();
    });
    check_mixes("norm_backward", [&a, &b], |cpu, [dy, x], dx| {
        cpu.norm_backward(
            Normed { op, weight: &weights(cpu), bias: None },
            dy,
            x,
            Target { to: dx, add: true },
            NormGrads { weight: None, bias: None, add: true },
        )
        .unwrap();
    });
    let heads = Heads { heads: 3, kv_heads: 1, head_dim: 33 };
    check_mixes("head_norm", [&a], |cpu, [x], y| {
        cpu.head_norm(
            HeadNorm { op, heads, whole: false, q_weight: &weights(cpu), k_weight: &weights(cpu) },
            x,
            y,
        )
        .unwrap();
    });
    check_mixes("head_norm_backward", [&a], |cpu, [x], d| {
        cpu.head_norm_backward(
            HeadNorm { op, heads, whole: false, q_weight: &weights(cpu), k_weight: &weights(cpu) },
            x,
            d,
            [None, None],
        )
        .unwrap();
    });
    check_mixes("activation", [&a], |cpu, [x], y| {
        cpu.activation(Activation::Gelu, 33, x, y).unwrap();
    });
    check_mixes("activation_backward", [&a, &b], |cpu, [x, dy], dx| {
        cpu.activation_backward(Activation::Gelu, 33, x, dy, dx).unwrap();
    });
    check_mixes("gated backward", [&a[..132], &b[..66]], |cpu, [x, dy], dx| {
        cpu.activation_backward(Activation::SiluGated, 33, x, dy, dx).unwrap();
    });
    check_mixes("axpy", [&a], |cpu, [x], y| cpu.axpy(-0.3, x, y).unwrap());
    check_mixes("copy", [&a], |cpu, [x], y| cpu.copy(x, 3, y, 20, 77).unwrap());
    let rows = [4, 0, 3, 1, 2];
    check_mixes("gather", [&a], |cpu, [x], y| {
        cpu.gather_rows(x, &cpu.indices(&rows).unwrap(), 33, y).unwrap();
    });
    check_mixes("scatter", [&a], |cpu, [x], y| {
        cpu.scatter_rows(x, &cpu.indices(&rows).unwrap(), 33, y).unwrap();
    });
}

// ---- vectors ------------------------------------------------------------------------------------------------

#[test]
fn elements_are_set_written_read_and_copied() {
    let values = random(0, LONG);
    for_each_cpu(|cpu| {
        for dtype in STORAGE {
            let mut a = unwritten(cpu, dtype, LONG);
            cpu.fill(&mut a, 1.25).unwrap();
            assert!(download(cpu, &a).iter().all(|&x| x == 1.25));
            cpu.write(&mut a, 5, &values[..LONG - 9]).unwrap();
            let mut want = vec![1.25; LONG];
            want[5..LONG - 4].copy_from_slice(&stored(dtype, &values[..LONG - 9]));
            assert_same_bits("write", &download(cpu, &a), &want);
            let mut part = vec![0.0; 40];
            cpu.read(&a, 7, &mut part).unwrap();
            assert_same_bits("read", &part, &want[7..47]);
            for to in STORAGE {
                let mut b = upload(cpu, to, &vec![-1.0; LONG]);
                cpu.copy(&a, 11, &mut b, 2, LONG - 20).unwrap();
                let mut copied = vec![-1.0; LONG];
                copied[2..LONG - 18].copy_from_slice(&stored(to, &want[11..LONG - 9]));
                assert_same_bits("copy", &download(cpu, &b), &copied);
            }
        }
    });
}

#[test]
fn sums_of_products_are_the_same_bits_everywhere() {
    let (x, y) = (random(0, LONG), random(1, LONG));
    let want: f64 = inner(&wide(&x), &wide(&y));
    let mut first = None;
    for_each_cpu(|cpu| {
        let (a, b) = (upload(cpu, DType::F32, &x), upload(cpu, DType::F32, &y));
        let dot = cpu.dot(&a, &b).unwrap();
        assert!((dot - want).abs() < 1e-9 * LONG as f64, "{dot} {want}");
        assert_eq!(first.get_or_insert(dot.to_bits()), &dot.to_bits());
        let (a, b) = (upload(cpu, DType::Bf16, &x), upload(cpu, DType::F32, &stored(DType::Bf16, &x)));
        let squares = cpu.dot(&a, &a).unwrap();
        assert_eq!(squares.to_bits(), cpu.dot(&b, &a).unwrap().to_bits());
        assert_eq!(squares.to_bits(), cpu.dot(&b, &b).unwrap().to_bits());
        assert_eq!(cpu.dot(&upload(cpu, DType::F32, &[]), &upload(cpu, DType::Bf16, &[])).unwrap(), 0.0);
    });
}

#[test]
fn scaled_additions() {
    let (x, y) = (random(0, LONG), random(1, LONG));
    for_each_cpu(|cpu| {
        for (dtype, relative) in [(DType::F32, 1e-6), (DType::Bf16, BF16)] {
            let (a, mut b) = (upload(cpu, dtype, &x), upload(cpu, dtype, &y));
            cpu.axpy(0.7, &a, &mut b).unwrap();
            let pairs = stored(dtype, &x).into_iter().zip(stored(dtype, &y));
            let want: Vec<f64> = pairs.map(|(x, y)| y as f64 + 0.7f32 as f64 * x as f64).collect();
            assert_close("axpy", &download(cpu, &b), &want, relative, 1e-7);
        }
    });
}

#[test]
fn the_first_number_that_is_not_finite() {
    let values = random(0, LONG);
    for_each_cpu(|cpu| {
        for dtype in STORAGE {
            let mut x = upload(cpu, dtype, &values);
            assert_eq!(cpu.first_non_finite(&x).unwrap(), None);
            for (at, bad) in
                [(LONG - 1, f32::NAN), (40000, f32::INFINITY), (16384, f32::NEG_INFINITY), (1023, f32::NAN)]
            {
                cpu.write(&mut x, at, &[bad]).unwrap();
                assert_eq!(cpu.first_non_finite(&x).unwrap(), Some(at));
            }
        }
        assert_eq!(cpu.first_non_finite(&upload(cpu, DType::F32, &[f32::MAX; 3])).unwrap(), None);
    });
}

#[test]
fn rows_are_gathered_and_scattered() {
    for_each_cpu(|cpu| {
        for (width, count) in [(1, 5), (17, 9), (200, 300)] {
            let src = random(0, count * width);
            let rows: Vec<usize> = (0..count).map(|i| i * 7 % count).step_by(2).collect();
            let ids: Vec<u32> = rows.iter().map(|&r| r as u32).collect();
            let (x, ids) = (upload(cpu, DType::F32, &src), cpu.indices(&ids).unwrap());
            let mut y = unwritten(cpu, DType::F32, rows.len() * width);
            cpu.gather_rows(&x, &ids, width, &mut y).unwrap();
            assert_same_bits("gather", &download(cpu, &y), &pick(&src, width, &rows));
            let mut back = unwritten(cpu, DType::F32, src.len());
            cpu.scatter_rows(&y, &ids, width, &mut back).unwrap();
            let mut want = vec![0.0; src.len()];
            for &r in &rows {
                want[r * width..(r + 1) * width].copy_from_slice(&src[r * width..(r + 1) * width]);
            }
            assert_same_bits("scatter", &download(cpu, &back), &want);
        }
    });
}

// ---- updates ------------------------------------------------------------------------------------------------

#[test]
fn adamw_steps() {
    let n = LONG;
    let range = 3..n - 5;
    let op = |step: u64| AdamW {
        lr: 1e-2 / step as f64,
        beta1: 0.9,
        beta2: 0.99,
        eps: 1e-6,
        weight_decay: 0.1,
        step,
        grad_scale: 0.5,
    };
    let (start, grads) = (random(0, n), [random(1, n), random(2, n), random(3, n)]);
    let mut exact: [Vec<f64>; 3] = [wide(&start), vec![0.0; n], vec![0.0; n]];
    for (t, grad) in grads.iter().enumerate() {
        let AdamW { lr, beta1, beta2, eps, weight_decay, step, grad_scale } = op(t as u64 + 1);
        let [b1, b2, decay, scale] = [beta1, beta2, weight_decay, grad_scale as f64];
        let [w, m, v] = &mut exact;
        for i in range.clone() {
            let g = grad[i] as f64 * scale;
            w[i] -= lr * decay * w[i];
            m[i] = b1 * m[i] + (1.0 - b1) * g;
            v[i] = b2 * v[i] + (1.0 - b2) * g * g;
            let (m, v) = (m[i] / (1.0 - b1.powi(step as i32)), v[i] / (1.0 - b2.powi(step as i32)));
            w[i] -= lr * m / (v.sqrt() + eps);
        }
    }
    for level in levels() {
        let mut first: Option<[Vec<f32>; 3]> = None;
        for threads in THREADS {
            let cpu = &Cpu::with_level(threads, level).unwrap();
            let mut w = upload(cpu, DType::F32, &start);
            let (mut m, mut v) =
                (upload(cpu, DType::F32, &vec![0.0; n]), upload(cpu, DType::F32, &vec![0.0; n]));
            for (t, grad) in grads.iter().enumerate() {
                let grad = upload(cpu, DType::F32, grad);
                // However the range is cut.
                for r in [range.start..threads * 10, threads * 10..range.end] {
                    adamw(cpu, op(t as u64 + 1), r, &mut w, &grad, &mut m, &mut v).unwrap();
                }
            }
            let got = [w, m, v].map(|b| download(cpu, &b));
            for k in 0..3 {
                assert_close(&format!("adamw {k} {}", level.name()), &got[k], &exact[k], 1e-6, 1e-6);
                assert_same_bits("adamw", &got[k], &first.get_or_insert_with(|| got.clone())[k]);
            }
            assert_same_bits("outside", &got[0][..3], &start[..3]);
            assert_same_bits("outside", &got[0][n - 5..], &start[n - 5..]);
        }
    }
}

/// A step of some elements.
#[expect(clippy::too_many_arguments, reason = "the operands of a kernel, one by one")]
fn adamw(
    cpu: &Cpu,
    op: AdamW,
    range: std::ops::Range<usize>,
    param: &mut Buffer,
    grad: &Buffer,
    first: &mut Buffer,
    second: &mut Buffer,
) -> Result<()> {
    cpu.adamw(&mut [AdamWParam {
        op,
        ranges: &[range],
        param,
        grad,
        first,
        second,
        absmax: None,
        derived: None,
    }])
}

#[test]
fn adamw_corrects_the_bias_of_late_steps_and_stands_still_without_gradient() {
    for_each_cpu(|cpu| {
        let op = AdamW {
            lr: 1.0,
            beta1: 0.9,
            beta2: 0.999,
            eps: 0.0,
            weight_decay: 0.0,
            step: 1_000,
            grad_scale: 1.0,
        };
        let (mut w, grad) = (upload(cpu, DType::F32, &[0.0]), upload(cpu, DType::F32, &[2.0]));
        let (mut m, mut v) = (upload(cpu, DType::F32, &[2.0]), upload(cpu, DType::F32, &[4.0]));
        adamw(cpu, op, 0..1, &mut w, &grad, &mut m, &mut v).unwrap();
        let want = -2.0 / (4.0 / (1.0 - 0.999f64.powi(1000))).sqrt();
        assert_close("adamw", &download(cpu, &w), &[want], 1e-6, 0.0);
        let zero = || upload(cpu, DType::F32, &[0.0]);
        let op = AdamW { step: 1, eps: 1e-8, ..op };
        let (mut w, mut m, mut v) = (upload(cpu, DType::F32, &[3.0]), zero(), zero());
        adamw(cpu, op, 0..1, &mut w, &zero(), &mut m, &mut v).unwrap();
        assert_eq!(download(cpu, &w), [3.0]);
    });
}

#[test]
fn sgd_steps() {
    let n = LONG;
    let (start, grads) = (random(0, n), [random(1, n), random(2, n), random(3, n)]);
    for momentum in [0.0, 0.9] {
        let op = Sgd { lr: 0.1, momentum, weight_decay: 0.01, grad_scale: 2.0 };
        let (mut w, mut u) = (wide(&start), vec![0.0; n]);
        for grad in &grads {
            for i in 2..n {
                u[i] = momentum * u[i] + 2.0 * grad[i] as f64 + 0.01 * w[i];
                w[i] -= 0.1 * u[i];
            }
        }
        for level in levels() {
            let mut first = None;
            for threads in THREADS {
                let cpu = &Cpu::with_level(threads, level).unwrap();
                let mut param = upload(cpu, DType::F32, &start);
                let mut velocity = upload(cpu, DType::F32, &vec![0.0; n]);
                for grad in &grads {
                    let grad = upload(cpu, DType::F32, grad);
                    let velocity = (momentum > 0.0).then_some(&mut velocity);
                    cpu.sgd(op, 2..n, &mut param, &grad, velocity).unwrap();
                }
                let got = download(cpu, &param);
                assert_close(&format!("sgd {}", level.name()), &got, &w, 1e-6, 1e-6);
                assert_same_bits("sgd", &got, first.get_or_insert_with(|| got.clone()));
                assert_same_bits("outside", &got[..2], &start[..2]);
            }
        }
    }
}

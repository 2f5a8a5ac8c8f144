//! `ferrl bench shapes`: matrix products of published models against the device's roofline.

use super::HowArgs;
use super::gemm::noise;
use super::report::{median, serve};
use crate::machine::ensure_memory_of;
use crate::options::{DeviceArgs, size};
use crate::output::print;
use crate::progress::ProgressLine;
use ferrl_engine::{Error, Result};
use ferrl_kernels::backend::{Graph, PagedRows, PagedSequence};
use ferrl_kernels::{Backend, DType};
use serde_json::{Value, json};
use std::time::Instant;

/// Matrix products of published models at 1 to 256 rows against the roofline
///
/// For every matrix of llama, qwen2, qwen3, mistral, gemma2 and phi3 models from 0.1B to 32B and every number of rows: the
/// percentage of the roofline, whose bound is memory bandwidth for few rows and arithmetic for many. Both bounds are measured, memory
/// bandwidth by copying a large buffer. Copies of each weight alternate, so that weights are read from memory and not from a cache.
/// Shapes below 70 % (up to 16 rows and bound by memory) or 50 % (all others) are listed.
#[derive(clap::Args)]
pub struct Args {
    /// Only models whose name contains this
    #[arg(long, value_name = "TEXT", default_value = "", hide_default_value = true)]
    model: String,
    /// Rows of a product: the decode batch size
    #[arg(long, value_name = "N", default_value = "1,2,4,8,16,32,64,128,256", value_delimiter = ',', value_parser = size::<65536>)]
    rows: Vec<usize>,
    /// Minimum size of all copies of a weight in MiB: more than the device's caches
    #[arg(long, value_name = "N", default_value_t = 256, value_parser = size::<65536>)]
    spread_mib: usize,
    #[command(flatten)]
    device: DeviceArgs,
    #[command(flatten)]
    how: HowArgs,
}

/// Name; hidden size, features of all query heads, of all key heads, inner width, vocabulary.
const MODELS: [(&str, [usize; 5]); 26] = [
    ("SmolLM2-135M", [576, 576, 192, 1536, 49152]),
    ("SmolLM2-360M", [960, 960, 320, 2560, 49152]),
    ("SmolLM2-1.7B", [2048, 2048, 2048, 8192, 49152]),
    ("Llama-3.2-1B", [2048, 2048, 512, 8192, 128_256]),
    ("Llama-3.2-3B", [3072, 3072, 1024, 8192, 128_256]),
    ("Llama-3.1-8B", [4096, 4096, 1024, 14336, 128_256]),
    ("Qwen2.5-0.5B", [896, 896, 128, 4864, 151_936]),
    ("Qwen2.5-1.5B", [1536, 1536, 256, 8960, 151_936]),
    ("Qwen2.5-3B", [2048, 2048, 256, 11008, 151_936]),
    ("Qwen2.5-7B", [3584, 3584, 512, 18944, 152_064]),
    ("Qwen2.5-14B", [5120, 5120, 1024, 13824, 152_064]),
    ("Qwen2.5-32B", [5120, 5120, 1024, 27648, 152_064]),
    ("Qwen3-0.6B", [1024, 2048, 1024, 3072, 151_936]),
    ("Qwen3-1.7B", [2048, 2048, 1024, 6144, 151_936]),
    ("Qwen3-4B", [2560, 4096, 1024, 9728, 151_936]),
    ("Qwen3-8B", [4096, 4096, 1024, 12288, 151_936]),
    ("Qwen3-14B", [5120, 5120, 1024, 17408, 151_936]),
    ("Qwen3-32B", [5120, 8192, 1024, 25600, 151_936]),
    ("Mistral-7B-v0.3", [4096, 4096, 1024, 14336, 32768]),
    ("Mistral-Nemo-12B", [5120, 4096, 1024, 14336, 131_072]),
    ("Mistral-Small-24B", [5120, 4096, 1024, 32768, 131_072]),
    ("Gemma-2-2B", [2304, 2048, 1024, 9216, 256_000]),
    ("Gemma-2-9B", [3584, 4096, 2048, 14336, 256_000]),
    ("Gemma-2-27B", [4608, 4096, 2048, 36864, 256_000]),
    ("Phi-3-mini", [3072, 3072, 3072, 8192, 32064]),
    ("Phi-3-medium", [5120, 5120, 1280, 17920, 32064]),
];

/// A weight of a model, `n` output features of `k` inputs.
#[derive(Clone, Debug, PartialEq)]
struct PublishedShape {
    model: &'static str,
    part: &'static str,
    n: usize,
    k: usize,
}

/// The distinct weights of the models; queries, keys and values are one product, gate and up too.
fn shapes(of: &str) -> Vec<PublishedShape> {
    let mut out: Vec<PublishedShape> = Vec::new();
    for (model, [hidden, query, key, inner, vocab]) in MODELS.into_iter().filter(|(m, _)| m.contains(of)) {
        let parts = [
            ("qkv", query + 2 * key, hidden),
            ("out", hidden, query),
            ("gate, up", 2 * inner, hidden),
            ("down", hidden, inner),
            ("head", vocab, hidden),
        ];
        for (part, n, k) in parts {
            if !out.iter().any(|s| (s.n, s.k) == (n, k)) {
                out.push(PublishedShape { model, part, n, k });
            }
        }
    }
    out
}

/// Bytes and FLOPs per second of the device.
#[derive(Clone, Copy)]
struct Roofline {
    bytes: f64,
    flops: f64,
}

/// A product's times and the roofline's bound.
struct ProductTimes {
    rows: usize,
    seconds: Vec<f64>,
    bound: f64,
    memory_bound: bool,
}

impl ProductTimes {
    fn share(&self) -> f64 {
        self.bound / median(&self.seconds)
    }

    /// Expected fraction of the roofline.
    fn goal(&self) -> f64 {
        if self.rows <= 16 && self.memory_bound { 0.7 } else { 0.5 }
    }
}

pub fn run(args: &Args) -> Result<()> {
    let (shapes, dtype) = (shapes(&args.model), args.device.dtype.dtype());
    if shapes.is_empty() {
        let names = MODELS.map(|(name, _)| name).join(", ");
        return Err(Error::usage(format!("no model has {:?} in its name", args.model))
            .at("--model")
            .fix(format!("one of {names}")));
    }
    let device = args.device.open()?;
    let (b, spread) = (&*device, args.spread_mib << 20);
    let largest = shapes.iter().map(|s| s.n * s.k).max().unwrap_or(0) as u64;
    ensure_memory_of(b, "the copies of a weight", 8 * largest + 2 * spread as u64, "--model 0.5B")?;
    if args.how.worker {
        return serve(|count| results(args, b, &shapes, count).map(|all| json!({"results": as_json(&all)})));
    }
    let bounds = bounds(b, dtype, spread)?;
    let all = results(args, b, &shapes, args.how.repeats)?;
    if args.how.json {
        let limits = json!({"bytes_per_s": bounds.bytes, "flops": bounds.flops});
        return print(&format!("{}\n", json!({"bounds": limits, "results": as_json(&all)})));
    }
    print(&format!(
        "products of published models: {}, {}; {:.0} GB/s, {:.1} TFLOP/s measured\n{}",
        b.describe(),
        dtype.name(),
        bounds.bytes / 1e9,
        bounds.flops / 1e12,
        table(&args.rows, &all)
    ))
}

type ShapeRow = (PublishedShape, Vec<ProductTimes>);

fn table(rows: &[usize], all: &[ShapeRow]) -> String {
    let mut out = format!("\npercentage of the roofline\n{:<42}", "rows");
    out += &rows.iter().map(|m| format!("{m:>5}")).collect::<String>();
    let mut below = Vec::new();
    for (shape, times) in all {
        let name = format!("{} {} {} x {}", shape.model, shape.part, shape.n, shape.k);
        out += &format!("\n{name:<42}");
        for t in times {
            out += &format!("{:>5.0}", 100.0 * t.share());
            if t.share() < t.goal() {
                below.push(format!("{name}, {} rows: {:.0} %", t.rows, 100.0 * t.share()));
            }
        }
    }
    let count = all.iter().map(|(_, t)| t.len()).sum::<usize>();
    out += &format!("\n\n{} of {count} products are below the expected percentage\n", below.len());
    out + &below.iter().map(|line| format!("  {line}\n")).collect::<String>()
}

fn as_json(all: &[ShapeRow]) -> Vec<Value> {
    let one = |(s, times): &ShapeRow| {
        let of = |t: &ProductTimes| {
            json!({"model": s.model, "part": s.part, "n": s.n, "k": s.k, "rows": t.rows, "seconds": t.seconds,
                "share": t.share(), "goal": t.goal()})
        };
        times.iter().map(of).collect::<Vec<_>>()
    };
    all.iter().flat_map(one).collect()
}

/// Memory bandwidth by copying a buffer larger than any cache, arithmetic by the device's own benchmark.
fn bounds(b: &dyn Backend, dtype: DType, spread: usize) -> Result<Roofline> {
    let len = spread / 4;
    let src = noise(b, DType::F32, len)?;
    let mut dst = b.alloc(DType::F32, len)?;
    let mut seconds = Vec::new();
    for _ in 0..6 {
        let start = Instant::now();
        b.copy(&src, 0, &mut dst, 0, len)?;
        b.wait()?;
        seconds.push(start.elapsed().as_secs_f64());
    }
    seconds.sort_by(f64::total_cmp);
    Ok(Roofline { bytes: 8.0 * len as f64 / seconds[0], flops: 1e9 * b.peak_gflops(dtype) })
}

fn results(args: &Args, b: &dyn Backend, shapes: &[PublishedShape], count: usize) -> Result<Vec<ShapeRow>> {
    let dtype = args.device.dtype.dtype();
    let bounds = bounds(b, dtype, args.spread_mib << 20)?;
    let footprint = ferrl_kernels::footprint(&args.device.device)?;
    let progress = ProgressLine::new("measuring", (shapes.len() * args.rows.len()) as u64, "products");
    let mut out = Vec::new();
    for shape in shapes {
        let size = (footprint.weight)(shape.n, shape.k, dtype.size(), false);
        let copies = (args.spread_mib << 20).div_ceil(size);
        let first = noise(b, DType::F32, shape.n * shape.k)?;
        let weights = (0..copies)
            .map(|_| {
                let mut weight = b.weight(shape.n, shape.k, dtype, false)?;
                b.load_weight(&first, &mut weight)?;
                Ok(weight)
            })
            .collect::<Result<Vec<_>>>()?;
        drop(first);
        let mut times = Vec::new();
        for &rows in &args.rows {
            let x = noise(b, dtype, rows * shape.k)?;
            let mut y = b.alloc(dtype, rows * shape.n)?;
            let mut all = || weights.iter().try_for_each(|w| b.linear(&x, w, None, &mut y));
            let seconds = timed(b, rows, count, &mut all)?;
            let reads = (size + dtype.size() * rows * (shape.n + shape.k)) as f64 / bounds.bytes;
            let arithmetic = 2.0 * (rows * shape.n * shape.k) as f64 / bounds.flops;
            times.push(ProductTimes {
                rows,
                seconds: seconds.into_iter().map(|s| s / copies as f64).collect(),
                bound: reads.max(arithmetic),
                memory_bound: reads >= arithmetic,
            });
            progress.add(1);
        }
        out.push((shape.clone(), times));
    }
    Ok(out)
}

/// Seconds of a pass over all copies, as a captured graph if the device has them, as in decoding.
fn timed(
    b: &dyn Backend,
    rows: usize,
    count: usize,
    pass: &mut dyn FnMut() -> Result<()>,
) -> Result<Vec<f64>> {
    let sequence = |row| PagedSequence { row, count: 1, position: 0, blocks: vec![0] };
    let paged = PagedRows { sequences: (0..rows).map(sequence).collect() };
    let (mut graph, mut seconds) = (Graph::default(), Vec::new());
    for i in 0..count + 2 {
        let start = Instant::now();
        b.repeat(&mut graph, &paged, rows, pass)?;
        b.wait()?;
        if i >= 2 {
            seconds.push(start.elapsed().as_secs_f64());
        }
    }
    Ok(seconds)
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_shape_is_measured_once() {
        let all = shapes("");
        assert_eq!(all.iter().filter(|s| (s.n, s.k) == (4096, 14336)).count(), 1);
        assert!(shapes("Qwen2.5-7B").contains(&PublishedShape {
            model: "Qwen2.5-7B",
            part: "qkv",
            n: 4608,
            k: 3584
        }));
    }

    #[test]
    fn what_falls_short_of_the_nearer_bound_is_listed() {
        let times = |rows, seconds, memory_bound| ProductTimes {
            rows,
            seconds: vec![seconds],
            bound: 0.6,
            memory_bound,
        };
        let shape = PublishedShape { model: "m", part: "out", n: 8, k: 4 };
        let text = table(&[1, 64], &[(shape, vec![times(1, 1.0, true), times(64, 1.0, false)])]);
        assert!(text.contains("1 of 2 products") && text.contains("m out 8 x 4, 1 rows: 60 %"), "{text}");
        assert!(!text.contains("64 rows"), "{text}");
    }
}

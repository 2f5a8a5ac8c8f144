//! `ferrl bench gemm`: matrix products with packed weights, as in training and decoding.

use super::HowArgs;
use super::report::{median, serve, spread};
use crate::machine::{ensure_memory_of, peak_rss_mib};
use crate::options::Compute;
use crate::output::print;
use crate::progress::ProgressLine;
use clap::ValueEnum;
use ferrl_engine::Result;
use ferrl_kernels::backend::LinearGrads;
use ferrl_kernels::{AUTO, Backend, Buffer, DType};
use serde_json::{Value, json};
use std::time::Instant;

/// Matrix products at the shapes of training and of decoding
///
/// Layouts: nt is x[M,K] times W[N,K] transposed (a linear layer), nn is x[M,K] times W[K,N] (its input gradient),
/// tn is x[K,M] transposed times y[K,N] (its weight gradient, into an f32 sum; packing is timed).
#[derive(clap::Args)]
pub struct Args {
    /// Shapes to measure
    #[arg(long, value_enum, default_value = "all")]
    table: GemmTable,
    /// Number format [default: both]
    #[arg(long, value_enum)]
    dtype: Option<Compute>,
    /// Threads [default: all cores]
    #[arg(long, value_name = "N", value_parser = crate::options::size::<1024>)]
    threads: Option<usize>,
    /// Device: cpu, cuda or cuda:N; auto uses a GPU if there is one
    #[arg(long, value_name = "NAME", default_value = AUTO)]
    device: String,
    /// Leave out shapes whose N times K is larger
    #[arg(long, value_name = "N", default_value_t = 1 << 40, hide_default_value = true, value_parser = crate::options::size::<{ 1 << 40 }>)]
    max_elements: usize,
    /// Minimum duration of a measurement in seconds
    #[arg(long, value_name = "S", default_value_t = 0.05, value_parser = crate::options::above_zero)]
    window: f32,
    #[command(flatten)]
    how: HowArgs,
}

#[derive(Clone, Copy, PartialEq, Eq, ValueEnum)]
enum GemmTable {
    /// shapes of a training step
    Training,
    /// a few rows: decoding
    Skinny,
    /// both
    All,
}

#[derive(Clone, Copy, PartialEq, Eq)]
enum GemmLayout {
    Nt,
    Nn,
    Tn,
}

impl GemmLayout {
    fn name(self) -> &'static str {
        match self {
            GemmLayout::Nt => "nt",
            GemmLayout::Nn => "nn",
            GemmLayout::Tn => "tn",
        }
    }
}

#[derive(Clone, Copy)]
struct GemmShape {
    table: &'static str,
    m: usize,
    n: usize,
    k: usize,
    layout: GemmLayout,
}

fn shapes(args: &Args) -> Vec<GemmShape> {
    use GemmLayout::{Nn, Nt, Tn};
    let training = [
        (2048, 256, 256, Nt),
        (2048, 1024, 256, Nt),
        (2048, 256, 1024, Nt),
        (2048, 896, 896, Nt),
        (2048, 4864, 896, Nt),
        (2048, 896, 4864, Nt),
        (2048, 32000, 256, Nt),
        (2048, 896, 4864, Nn),
        (2048, 256, 1024, Nn),
        (4864, 896, 2048, Tn),
        (1024, 256, 2048, Tn),
    ];
    let matrices = [(256, 256), (1024, 256), (896, 896), (4864, 896), (32000, 256), (151_936, 896)];
    let skinny = matrices.into_iter().flat_map(|(n, k)| [1, 8, 32].map(|m| (m, n, k, Nt)));
    let named = |table| move |(m, n, k, layout)| GemmShape { table, m, n, k, layout };
    let all = training.into_iter().map(named("training")).chain(skinny.map(named("skinny")));
    let wanted = |s: &GemmShape| match args.table {
        GemmTable::Training => s.table == "training",
        GemmTable::Skinny => s.table == "skinny",
        GemmTable::All => true,
    };
    all.filter(wanted).filter(|s| s.n * s.k <= args.max_elements).collect()
}

pub fn run(args: &Args) -> Result<()> {
    let dtypes = match args.dtype {
        Some(dtype) => vec![dtype],
        None => vec![Compute::F32, Compute::Bf16],
    };
    let shapes = shapes(args);
    let largest = shapes.iter().map(|s| s.n * s.k).max().unwrap_or(0) as u64;
    let backend = ferrl_kernels::open(&args.device, args.threads)?;
    let fix = "--max-elements 40000000 leaves large ones out";
    ensure_memory_of(&*backend, "the largest matrix", 10 * largest, fix)?;
    if args.how.worker {
        return serve(|count| {
            Ok(json!({"results": results(&*backend, &shapes, &dtypes, count, args.window)?}))
        });
    }
    let peak = |c: &Compute| (c.dtype(), backend.peak_gflops(c.dtype()));
    let peaks: Vec<(DType, f64)> = dtypes.iter().map(peak).collect();
    let mut all = results(&*backend, &shapes, &dtypes, args.how.repeats, args.window)?;
    for row in &mut all {
        let of = peaks.iter().find(|(d, _)| row["dtype"] == d.name()).map_or(f64::NAN, |(_, p)| *p);
        row["of_peak"] = json!(row["gflops"].as_f64().unwrap_or(0.0) / of);
    }
    if args.how.json {
        let peak: serde_json::Map<String, Value> =
            peaks.iter().map(|(d, p)| (d.name().into(), json!(p))).collect();
        return print(&format!(
            "{}\n",
            json!({"results": all, "peak_gflops": peak, "peak_rss_mib": peak_rss_mib()})
        ));
    }
    print(&format!("matrix products: {}\n", backend.describe()))?;
    for (dtype, peak) in peaks {
        for table in ["training", "skinny"] {
            let rows: Vec<&Value> =
                all.iter().filter(|r| r["dtype"] == dtype.name() && r["table"] == table).collect();
            if !rows.is_empty() {
                print(&table_of(table, dtype, peak, &rows))?;
            }
        }
    }
    print(&format!("\npeak RSS {:.0} MiB\n", peak_rss_mib()))
}

fn table_of(table: &str, dtype: DType, peak: f64, rows: &[&Value]) -> String {
    let mut out = format!("\n{table}, {}, measured peak {peak:.0} GFLOP/s\n", dtype.name());
    let mut logs = 0.0;
    for row in rows {
        let flops = 2e-9 * ["m", "n", "k"].iter().map(|d| row[d].as_f64().unwrap_or(0.0)).product::<f64>();
        let seconds: Vec<f64> =
            row["seconds"].as_array().into_iter().flatten().filter_map(Value::as_f64).collect();
        let rates: Vec<f64> = seconds.iter().map(|s| flops / s).collect();
        let share = row["of_peak"].as_f64().unwrap_or(0.0);
        logs += share.ln();
        let shape =
            format!("{}x{}x{} {}", row["m"], row["n"], row["k"], row["layout"].as_str().unwrap_or(""));
        out += &format!("  {shape:<22}{:>26} GFLOP/s {:>5.1} % of peak\n", spread(&rates, 1), 100.0 * share);
    }
    out + &format!("  geometric mean: {:.1} % of peak\n", 100.0 * (logs / rows.len() as f64).exp())
}

fn results(
    backend: &dyn Backend,
    shapes: &[GemmShape],
    dtypes: &[Compute],
    count: usize,
    window: f32,
) -> Result<Vec<Value>> {
    let progress = ProgressLine::new("measuring", (shapes.len() * dtypes.len()) as u64, "shapes");
    let mut out = Vec::new();
    for dtype in dtypes {
        for s in shapes {
            let seconds = measure(backend, *s, dtype.dtype(), count, f64::from(window))?;
            let gflops = 2e-9 * (s.m * s.n * s.k) as f64 / median(&seconds);
            out.push(json!({"table": s.table, "m": s.m, "n": s.n, "k": s.k, "layout": s.layout.name(),
                "dtype": dtype.dtype().name(), "seconds": seconds, "gflops": gflops}));
            progress.add(1);
        }
    }
    Ok(out)
}

fn measure(b: &dyn Backend, s: GemmShape, dtype: DType, count: usize, window: f64) -> Result<Vec<f64>> {
    let x = noise(b, dtype, s.m * s.k)?;
    if s.layout == GemmLayout::Tn {
        let y = noise(b, dtype, s.k * s.n)?;
        let mut dw = b.alloc(DType::F32, s.m * s.n)?;
        b.fill(&mut dw, 0.0)?;
        return timed(b, count, window, &mut || {
            b.linear_dw(&x, &y, s.k, LinearGrads { weight: Some(&mut dw), bias: None, add: true })
        });
    }
    let backward = s.layout == GemmLayout::Nn;
    let (n, k) = if backward { (s.k, s.n) } else { (s.n, s.k) };
    let mut weight = b.weight(n, k, dtype, backward)?;
    b.load_weight(&noise(b, DType::F32, n * k)?, &mut weight)?;
    let mut y = b.alloc(dtype, s.m * s.n)?;
    timed(b, count, window, &mut || match backward {
        true => b.linear_dx(&x, &weight, &mut y),
        false => b.linear(&x, &weight, None, &mut y),
    })
}

/// Seconds of one product, averaged over a window of products.
fn timed(
    b: &dyn Backend,
    count: usize,
    window: f64,
    product: &mut dyn FnMut() -> Result<()>,
) -> Result<Vec<f64>> {
    product()?;
    b.wait()?;
    let start = Instant::now();
    product()?;
    b.wait()?;
    let times = ((window / start.elapsed().as_secs_f64().max(1e-7)) as usize).max(1);
    let mut seconds = Vec::new();
    for _ in 0..count {
        let start = Instant::now();
        for _ in 0..times {
            product()?;
        }
        b.wait()?;
        seconds.push(start.elapsed().as_secs_f64() / times as f64);
    }
    Ok(seconds)
}

/// Pseudo-random numbers between -1 and 1.
pub(super) fn noise(b: &dyn Backend, dtype: DType, len: usize) -> Result<Buffer> {
    let mut buffer = b.alloc(dtype, len)?;
    let mut state = 0x9E37_79B9u32;
    let mut chunk = vec![0.0; len.min(1 << 16)];
    for at in (0..len).step_by(1 << 16) {
        let part = &mut chunk[..(len - at).min(1 << 16)];
        for x in part.iter_mut() {
            state = state.wrapping_mul(1_664_525).wrapping_add(1_013_904_223);
            *x = (state >> 8) as f32 / 8_388_608.0 - 1.0;
        }
        b.write(&mut buffer, at, part)?;
    }
    Ok(buffer)
}

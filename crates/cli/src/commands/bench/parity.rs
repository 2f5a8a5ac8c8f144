//! `ferrl bench --check --fixtures`: small models of every family against results of transformers.

use ferrl_engine::checkpoint::ModelDir;
use ferrl_engine::generate::{CacheOptions, GenerationRequest, Generator, Sampler, SamplingParams};
use ferrl_engine::model::{Model, Options, family};
use ferrl_engine::train::{Batch, ModelTrainer, OptimizerOptions, StatGrads, stats};
use ferrl_engine::{Error, Result};
use ferrl_kernels::check::CheckOutcome;
use ferrl_kernels::{Backend, DType};
use safetensors::SafeTensors;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;

/// Maximum error in f32 of numbers around one.
const CLOSE: f64 = 1e-4;
/// Limits in bf16 of the largest and the root-mean-square error: the larger of an absolute value and a multiple of transformers' own
/// error in bf16. The largest of a few hundred errors varies with the order of rounding, their mean square does not.
const CLOSE_BF16: [f64; 2] = [2e-2, 5e-3];
const TIMES_THEIRS: [f64; 2] = [2.0, 1.5];

/// Folders of reference models, and transformers' errors in bf16 by folder name.
pub struct Fixtures {
    /// Sorted by name.
    pub models: Vec<PathBuf>,
    bf16: Value,
}

fn read(path: &Path) -> Result<Vec<u8>> {
    std::fs::read(path).map_err(|e| {
        Error::data(format!("cannot read: {e}"))
            .at(path.display())
            .fix("--fixtures crates/engine/tests/fixtures, from the source of this version")
    })
}

fn json(path: &Path) -> Result<Value> {
    serde_json::from_slice(&read(path)?)
        .map_err(|e| Error::data(format!("is not valid JSON: {e}")).at(path.display()))
}

impl Fixtures {
    pub fn open(dir: &Path) -> Result<Self> {
        let bf16 = json(&dir.join("bf16_errors.json"))?;
        let entries = std::fs::read_dir(dir.join("models")).into_iter().flatten().flatten();
        let mut models: Vec<PathBuf> =
            entries.map(|e| e.path()).filter(|p| p.join("reference.safetensors").exists()).collect();
        models.sort();
        if models.is_empty() {
            return Err(Error::data("no reference models").at(dir.join("models").display()));
        }
        Ok(Fixtures { models, bf16 })
    }

    /// Checks one reference model.
    pub fn check(&self, card: &Arc<dyn Backend>, dir: &Path, out: &mut Vec<CheckOutcome>) -> Result<()> {
        let reference = PeerOutput::read(dir)?;
        let name = dir.file_name().map_or(String::new(), |n| n.to_string_lossy().into_owned());
        reference.values(&load(card, dir, DType::F32)?, |_| [CLOSE; 2], out)?;
        let limits = |kind: &str| {
            let theirs = ["worst", "rms"].map(|what| self.bf16[&name][kind][what].as_f64().unwrap_or(0.0));
            [0, 1].map(|i| (theirs[i] * TIMES_THEIRS[i]).max(CLOSE_BF16[i]))
        };
        reference.values(&load(card, dir, DType::Bf16)?, limits, out)?;
        reference.gradients(load(card, dir, DType::F32)?, out)?;
        reference.continuations(&load(card, dir, DType::F32)?, out)
    }
}

fn load(card: &Arc<dyn Backend>, dir: &Path, dtype: DType) -> Result<Model> {
    Model::load(card.clone(), &ModelDir::open(dir)?, Options { dtype, training: true, context: 0 })
}

/// Reference results.
struct PeerOutput {
    bytes: Vec<u8>,
    json: Value,
    path: PathBuf,
}

/// Differences relative to the expected number, or to one where it is smaller.
#[derive(Default)]
struct Differences {
    worst: f64,
    squares: f64,
    count: usize,
}

impl Differences {
    fn add(&mut self, got: &[f32], want: &[f32]) {
        for (g, w) in got.iter().zip(want) {
            let far = f64::from((g - w).abs()) / f64::from(w.abs()).max(1.0);
            self.worst = if far.is_nan() { f64::INFINITY } else { self.worst.max(far) };
            self.squares += far * far;
            self.count += 1;
        }
    }

    fn rms(&self) -> f64 {
        (self.squares / self.count.max(1) as f64).sqrt()
    }
}

impl PeerOutput {
    fn read(dir: &Path) -> Result<Self> {
        let path = dir.join("reference.safetensors");
        Ok(PeerOutput { bytes: read(&path)?, json: json(&dir.join("reference.json"))?, path })
    }

    /// Shape and bytes of a tensor, if the file has it.
    fn tensor(&self, name: &str) -> Result<Option<(Vec<usize>, &[u8])>> {
        let file = SafeTensors::deserialize(&self.bytes)
            .map_err(|e| Error::data(format!("is not readable: {e}")).at(self.path.display()))?;
        Ok(file.tensor(name).ok().map(|t| (t.shape().to_vec(), t.data())))
    }

    fn floats(&self, name: &str) -> Result<Option<Vec<f32>>> {
        let number = |b: &[u8]| f32::from_le_bytes([b[0], b[1], b[2], b[3]]);
        Ok(self.tensor(name)?.map(|(_, bytes)| bytes.chunks_exact(4).map(number).collect()))
    }

    fn sequences(&self) -> Result<Vec<Vec<u32>>> {
        let (mut all, number) = (Vec::new(), |b: &[u8]| u32::from_le_bytes([b[0], b[1], b[2], b[3]]));
        while let Some((_, bytes)) = self.tensor(&format!("ids.{}", all.len()))? {
            all.push(bytes.chunks_exact(8).map(number).collect());
        }
        Ok(all)
    }

    fn gives_scores(&self) -> bool {
        self.json["kind"] == "sequence_classification"
    }

    /// Log-probabilities and entropies, or scores; `limits` returns the largest and the root-mean-square error allowed of each.
    fn values(
        &self,
        model: &Model,
        limits: impl Fn(&str) -> [f64; 2],
        out: &mut Vec<CheckOutcome>,
    ) -> Result<()> {
        let sequences = self.sequences()?;
        let got = stats(model, &Batch::of(sequences.clone()), 1.0)?;
        let columns: &[(&str, &[f32])] = match self.gives_scores() {
            true => &[("score", &got.value)],
            false => &[("logp", &got.logp), ("entropy", &got.entropy)],
        };
        for (name, values) in columns {
            let (mut start, mut far) = (0, Differences::default());
            for (k, ids) in sequences.iter().enumerate() {
                let mut want = self.floats(&format!("{name}.{k}"))?.unwrap_or_default();
                // The last token has no target.
                want.truncate(ids.len() - usize::from(!self.gives_scores()));
                far.add(&values[start..start + want.len()], &want);
                start += ids.len();
            }
            let (name, [worst, rms]) = (format!("{name} in {}", model.dtype.name()), limits(name));
            out.push(CheckOutcome {
                name: format!("{name}, root mean square"),
                worst: far.rms(),
                limit: rms,
            });
            out.push(CheckOutcome { name, worst: far.worst, limit: worst });
        }
        Ok(())
    }

    /// The gradient of every tensor, relative to its largest element.
    fn gradients(&self, model: Model, out: &mut Vec<CheckOutcome>) -> Result<()> {
        let mut trainer = ModelTrainer::new(model, OptimizerOptions::default())?;
        let batch = Batch::of(self.sequences()?);
        trainer.forward(&batch)?;
        let mut grads = StatGrads::default();
        for (k, s) in batch.sequences.iter().enumerate() {
            let column = |name: &str, scale: f32| -> Result<Vec<f32>> {
                let mut values = self.floats(&format!("{name}.{k}"))?.unwrap_or_default();
                values.resize(s.ids.len(), 0.0);
                Ok(values.iter().map(|v| v * scale).collect())
            };
            if self.gives_scores() {
                grads.value.extend(column("c", 1.0)?);
            } else {
                grads.logp.extend(column("w", 1.0)?);
                grads.entropy.extend(column("u", 0.1)?);
            }
        }
        trainer.backward(&batch, &grads)?;
        let config = trainer.model.config.clone();
        let mut most = 0.0f64;
        for (i, tensor) in family(config.family)?.tensors(&config).iter().enumerate() {
            let got = trainer.gradient(i)?.unwrap_or_default();
            let mut at = 0;
            for part in &tensor.parts {
                let name = format!("grad.{}", part.name);
                let missing = || Error::data(format!("{name} is missing")).at(self.path.display());
                let want = self.floats(&name)?.ok_or_else(missing)?;
                let scale = want.iter().fold(1e-3f32, |m, x| m.max(x.abs()));
                for (j, w) in want.iter().enumerate() {
                    let g = part.decoder_index(j);
                    let far = f64::from((got[at + g] - w).abs() / scale);
                    most = if far.is_nan() { f64::INFINITY } else { most.max(far) };
                }
                at += want.len();
            }
        }
        out.push(CheckOutcome { name: "gradients in f32".into(), worst: most, limit: CLOSE });
        Ok(())
    }

    /// Greedy continuations, token by token.
    fn continuations(&self, model: &Model, out: &mut Vec<CheckOutcome>) -> Result<()> {
        let Some(greedy) = self.json["greedy"].as_array() else { return Ok(()) };
        let (sequences, mut other) = (self.sequences()?, 0);
        for entry in greedy {
            let want: Vec<u32> = entry["tokens"]
                .as_array()
                .into_iter()
                .flatten()
                .filter_map(|t| Some(t.as_u64()? as u32))
                .collect();
            let prompt = sequences[entry["sequence"].as_u64().unwrap_or(0) as usize].clone();
            let cache = CacheOptions::fit(model, 1, prompt.len() + want.len());
            let params = SamplingParams { max_new_tokens: want.len(), ..SamplingParams::greedy() };
            let request = GenerationRequest { prompt, params, stream: [0; 3] };
            let got = Sampler::new(model, cache)?.generate(model, vec![request])?;
            other += got[0].ids.iter().zip(&want).filter(|(a, b)| a != b).count();
        }
        out.push(CheckOutcome { name: "greedy tokens that differ".into(), worst: other as f64, limit: 0.0 });
        Ok(())
    }
}

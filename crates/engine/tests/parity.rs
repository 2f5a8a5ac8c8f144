//! Every family against numbers from Hugging Face transformers (made by `tools/make_model_fixtures.py`).
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl_engine::checkpoint::ModelDir;
use ferrl_engine::model::{Model, Options, family};
use ferrl_engine::train::{Batch, ModelTrainer, OptimizerOptions, StatGrads, stats};
use ferrl_kernels::cpu::{Cpu, Level};
use ferrl_kernels::{Backend, DType};
use safetensors::SafeTensors;
use serde_json::Value;
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn cases() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models");
    let mut dirs: Vec<PathBuf> = std::fs::read_dir(root).unwrap().map(|e| e.unwrap().path()).collect();
    dirs.sort();
    assert!(dirs.len() >= 23, "the fixtures are committed");
    dirs
}

struct Reference {
    bytes: Vec<u8>,
    json: Value,
}

impl Reference {
    fn read(dir: &Path) -> Self {
        let json = serde_json::from_slice(&std::fs::read(dir.join("reference.json")).unwrap()).unwrap();
        Reference { bytes: std::fs::read(dir.join("reference.safetensors")).unwrap(), json }
    }
    fn floats(&self, name: &str) -> Option<Vec<f32>> {
        let file = SafeTensors::deserialize(&self.bytes).unwrap();
        let tensor = file.tensor(name).ok()?;
        Some(tensor.data().chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect())
    }
    fn sequences(&self) -> Vec<Vec<u32>> {
        let file = SafeTensors::deserialize(&self.bytes).unwrap();
        let ids = |k: usize| {
            let t = file.tensor(&format!("ids.{k}")).ok()?;
            Some(t.data().chunks(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as u32).collect())
        };
        (0..).map_while(ids).collect()
    }
    fn is_score(&self) -> bool {
        self.json["kind"] == "sequence_classification"
    }
}

fn backends() -> Vec<Arc<dyn Backend>> {
    Level::available()
        .into_iter()
        .map(|l| Arc::new(Cpu::with_level(2, l).unwrap()) as Arc<dyn Backend>)
        .collect()
}

fn load(backend: &Arc<dyn Backend>, dir: &Path, dtype: DType) -> Model {
    let options = Options { dtype, training: true, context: 0 };
    Model::load(backend.clone(), &ModelDir::open(dir).unwrap(), options).unwrap()
}

#[track_caller]
fn close(what: &str, got: f32, want: f32, tolerance: f32) {
    let bound = tolerance * want.abs().max(1.0);
    assert!(
        (got - want).abs() <= bound,
        "{what}: got {got}, expected {want}, off by {:e}",
        (got - want).abs()
    );
}

/// Compares each column of the packed statistics with the reference's sequences.
fn compare_stats(name: &str, dir: &Path, backend: &Arc<dyn Backend>, dtype: DType, tolerance: f32) {
    let reference = Reference::read(dir);
    let model = load(backend, dir, dtype);
    let sequences = reference.sequences();
    let got = stats(&model, &Batch::of(sequences.clone()), 1.0).unwrap();
    let mut start = 0;
    for (k, ids) in sequences.iter().enumerate() {
        for i in 0..ids.len() {
            let at = |column: &str| format!("{name} {column} of sequence {k} at {i}");
            if reference.is_score() {
                let want = reference.floats(&format!("score.{k}")).unwrap();
                close(&at("score"), got.value[start + i], want[i], tolerance);
            } else if i + 1 < ids.len() {
                let logp = reference.floats(&format!("logp.{k}")).unwrap();
                let entropy = reference.floats(&format!("entropy.{k}")).unwrap();
                close(&at("logp"), got.logp[start + i], logp[i], tolerance);
                close(&at("entropy"), got.entropy[start + i], entropy[i], tolerance);
            }
        }
        start += ids.len();
    }
}

#[test]
fn log_probabilities_and_entropies_equal_transformers() {
    for backend in backends() {
        for dir in cases() {
            compare_stats(&format!("{} {dir:?}", backend.describe()), &dir, &backend, DType::F32, 1e-4);
        }
    }
}

#[test]
fn bf16_stays_near_transformers_in_f32() {
    // Every value within 2e-2, or within what transformers itself loses in bf16 where that is more
    // (`tools/make_bf16_errors.py`); the mean within 2e-2 in any case.
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/bf16_errors.json");
    let theirs: Value = serde_json::from_slice(&std::fs::read(root).unwrap()).unwrap();
    for backend in backends() {
        for dir in cases() {
            let reference = Reference::read(&dir);
            let model = load(&backend, &dir, DType::Bf16);
            let sequences = reference.sequences();
            let got = stats(&model, &Batch::of(sequences.clone()), 1.0).unwrap();
            let (mut error, mut size, mut count, mut start) = (0.0, 0.0, 0, 0);
            let mut worst = 0f32;
            for (k, ids) in sequences.iter().enumerate() {
                let column = if reference.is_score() { "score" } else { "logp" };
                let want = reference.floats(&format!("{column}.{k}")).unwrap_or_default();
                let values = if reference.is_score() { &got.value } else { &got.logp };
                for (i, w) in want.iter().enumerate() {
                    error += (values[start + i] - w).abs();
                    worst = worst.max((values[start + i] - w).abs() / w.abs().max(1.0));
                    size += w.abs();
                    count += 1;
                }
                start += ids.len();
            }
            let mean = error / count as f32;
            let case = &theirs[dir.file_name().unwrap().to_str().unwrap()];
            let theirs =
                case[if reference.is_score() { "score" } else { "logp" }]["worst"].as_f64().unwrap() as f32;
            let bound = theirs.max(2e-2);
            assert!(worst <= bound, "{dir:?} {}: {worst}, the bound is {bound}", backend.describe());
            assert!(mean / (size / count as f32).max(1.0) < 2e-2, "{dir:?} {}: {mean}", backend.describe());
        }
    }
}

#[test]
fn temperature_divides_the_logits() {
    let backend = backends().pop().unwrap();
    for dir in cases() {
        let reference = Reference::read(&dir);
        let Some(k) = reference.json["temperature_sequence"].as_u64() else { continue };
        let ids = reference.sequences()[k as usize].clone();
        let temperature = reference.json["temperature"].as_f64().unwrap() as f32;
        let got = stats(&load(&backend, &dir, DType::F32), &Batch::of([ids]), temperature).unwrap();
        let want = reference.floats(&format!("logp_temp.{k}")).unwrap();
        let entropy = reference.floats(&format!("entropy_temp.{k}")).unwrap();
        for i in 0..want.len() {
            close("logp", got.logp[i], want[i], 1e-4);
            close("entropy", got.entropy[i], entropy[i], 1e-4);
        }
    }
}

#[test]
fn every_gradient_equals_transformers() {
    for backend in backends() {
        for recompute in [false, true] {
            for dir in cases() {
                compare_gradients(&dir, &backend, recompute);
            }
        }
    }
}

fn compare_gradients(dir: &Path, backend: &Arc<dyn Backend>, recompute: bool) {
    let reference = Reference::read(dir);
    let mut trainer = ModelTrainer::new(load(backend, dir, DType::F32), OptimizerOptions::default()).unwrap();
    trainer.recompute = recompute;
    let batch = Batch::of(reference.sequences());
    trainer.forward(&batch).unwrap();
    let mut grads = StatGrads::default();
    for (k, s) in batch.sequences.iter().enumerate() {
        let mut padded = |name: &str, scale: f32, column: fn(&mut StatGrads) -> &mut Vec<f32>| {
            let mut values = reference.floats(&format!("{name}.{k}")).unwrap_or_default();
            values.resize(s.ids.len(), 0.0);
            column(&mut grads).extend(values.iter().map(|v| v * scale));
        };
        if reference.is_score() {
            padded("c", 1.0, |g| &mut g.value);
        } else {
            padded("w", 1.0, |g| &mut g.logp);
            padded("u", 0.1, |g| &mut g.entropy);
        }
    }
    trainer.backward(&batch, &grads).unwrap();
    let config = trainer.model.config.clone();
    let mut checked = 0;
    for (i, tensor) in family(config.family).unwrap().tensors(&config).iter().enumerate() {
        let got = trainer.gradient(i).unwrap().unwrap();
        let mut at = 0;
        for part in &tensor.parts {
            let name = format!("grad.{}", part.name);
            let want = reference.floats(&name).unwrap_or_else(|| panic!("{dir:?}: {name}"));
            let scale = want.iter().fold(0f32, |m, x| m.max(x.abs())).max(1e-3);
            for (j, w) in want.iter().enumerate() {
                let g = part.decoder_index(j);
                let error = (got[at + g] - w).abs() / scale;
                assert!(
                    error < 1e-4,
                    "{dir:?} {} {name}[{j}]: {} against {w}",
                    backend.describe(),
                    got[at + g]
                );
            }
            at += want.len();
            checked += 1;
        }
    }
    assert_eq!(checked, reference.json["grad_names"].as_array().unwrap().len(), "{dir:?}");
}

#[test]
fn greedy_continuations_equal_transformers() {
    let backend = backends().pop().unwrap();
    for dir in cases() {
        let reference = Reference::read(&dir);
        let Some(greedy) = reference.json["greedy"].as_array() else { continue };
        let model = load(&backend, &dir, DType::F32);
        for entry in greedy {
            let mut ids = reference.sequences()[entry["sequence"].as_u64().unwrap() as usize].clone();
            for want in entry["tokens"].as_array().unwrap() {
                let positions: Vec<u32> = (0..ids.len() as u32).collect();
                let tokens = model.tokens(&ids, &positions).unwrap();
                let segments = ferrl_kernels::backend::Segments::of([ids.len()]);
                let context = ferrl_engine::model::decoder::PastKv::Packed(&segments);
                let (h, _) =
                    model.forward(&tokens, context, ferrl_engine::model::decoder::Keep::Nothing).unwrap();
                let last = model.select_rows(&h, &[ids.len() as u32 - 1]).unwrap();
                let (logits, _) = model.logits(&last, 1.0).unwrap();
                let token = model.backend.argmax(&logits, 1).unwrap()[0];
                assert_eq!(token as u64, want.as_u64().unwrap(), "{dir:?}");
                ids.push(token);
            }
        }
    }
}

/// LongRoPE has divisors for the context of pre-training and others beyond it. A model that was loaded for no particular length
/// computed longer sequences with the former, as no other program does.
#[test]
fn longrope_beyond_the_pre_trained_context_needs_a_model_loaded_for_it() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models/phi3_longrope");
    let (backend, dir) = (backends().pop().unwrap(), ModelDir::open(&dir).unwrap());
    let ids = |n: u32| Batch::of(vec![(0..n).map(|i| 3 + i * 7 % 80).collect::<Vec<u32>>()]);
    let logp = |context: usize, n: u32| {
        let options = Options { dtype: DType::F32, training: true, context };
        let model = Model::load(backend.clone(), &dir, options).unwrap();
        stats(&model, &ids(n), 1.0).map(|s| s.logp)
    };
    assert_eq!(logp(0, 64).unwrap(), logp(64, 64).unwrap());
    let e = logp(0, 65).unwrap_err().to_string();
    assert!(e.contains("65 tokens") && e.contains("LongRoPE") && e.contains("data.max_length"), "{e}");
    let (short, long) = (logp(64, 64).unwrap(), logp(65, 65).unwrap());
    assert!(short.iter().zip(&long).any(|(a, b)| (a - b).abs() > 1e-3), "other divisors");
}

//! Bases as NF4 against bitsandbytes, transformers and PEFT (`tools/make_nf4_fixtures.py`).
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl_engine::checkpoint::{ModelDir, SaveOptions, save_adapter};
use ferrl_engine::model::adapter::{AdapterOptions, BaseHome};
use ferrl_engine::model::{Model, Options, family};
use ferrl_engine::train::{Batch, ModelTrainer, OptimizerOptions, StatGrads, stats};
use ferrl_kernels::{Backend, DType};
use safetensors::SafeTensors;
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn cpu() -> Arc<dyn Backend> {
    ferrl_kernels::open("cpu", Some(2)).unwrap()
}

fn fixture(name: &str) -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/nf4").join(name)
}

struct Reference(Vec<u8>);

impl Reference {
    fn read() -> Self {
        Reference(std::fs::read(fixture("adapter/reference.safetensors")).unwrap())
    }
    fn file(&self) -> SafeTensors<'_> {
        SafeTensors::deserialize(&self.0).unwrap()
    }
    fn floats(&self, name: &str) -> Vec<f32> {
        let file = self.file();
        let tensor = file.tensor(name).unwrap();
        tensor.data().chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect()
    }
    fn batch(&self) -> Batch {
        let file = self.file();
        let ids = |k: usize| {
            let t = file.tensor(&format!("ids.{k}")).ok()?;
            Some(t.data().chunks(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as u32).collect())
        };
        Batch::of((0..).map_while(ids).collect::<Vec<Vec<u32>>>())
    }
    /// Columns of numbers of the sequences, one for each token.
    fn column(&self, name: &str, batch: &Batch) -> Vec<f32> {
        let mut all = Vec::new();
        for (k, s) in batch.sequences.iter().enumerate() {
            let mut own = self.floats(&format!("{name}.{k}"));
            own.resize(s.ids.len(), 0.0);
            all.extend(own);
        }
        all
    }
}

fn bits(values: &[f32]) -> Vec<u32> {
    values.iter().map(|x| x.to_bits()).collect()
}

fn adapted(dir: &str, base: BaseHome, dtype: DType) -> Model {
    let opened = ModelDir::open(&fixture(dir)).unwrap();
    let own = opened.adapter().map(|a| a.options.clone());
    let wanted = AdapterOptions { base, ..own.unwrap_or(AdapterOptions { r: 4, ..Default::default() }) };
    Model::load_adapted(cpu(), &opened, Options { dtype, training: true, context: 0 }, &wanted, 3).unwrap()
}

/// Every linear weight of a layer, as stacked in the decoder, from tensors named `kind.NAME`.
fn stacked(reference: &Reference, kind: &str, layer: usize) -> Vec<(&'static str, Vec<f32>)> {
    let of = |names: &[&str]| -> Vec<f32> {
        let name = |n: &&str| format!("{kind}.model.layers.{layer}.{n}.weight");
        names.iter().flat_map(|n| reference.floats(&name(n))).collect()
    };
    vec![
        ("qkv", of(&["self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"])),
        ("attn_out", of(&["self_attn.o_proj"])),
        ("up", of(&["mlp.gate_proj", "mlp.up_proj"])),
        ("down", of(&["mlp.down_proj"])),
    ]
}

fn weights_of(model: &Model, layer: usize) -> Vec<Vec<f32>> {
    let inside = |i: &usize| {
        let id = model.params[*i].shape.id;
        id.layer == Some(layer) && !id.is_vector() && !id.is_adapter()
    };
    (0..model.params.len()).filter(inside).map(|i| model.read(i).unwrap()).collect()
}

#[test]
fn a_model_of_bitsandbytes_has_its_weights_bit_for_bit() {
    let reference = Reference::read();
    let opened = ModelDir::open(&fixture("base")).unwrap();
    let plain = Model::load(cpu(), &opened, Options::default()).unwrap();
    for base in [BaseHome::Device, BaseHome::Host, BaseHome::Nf4] {
        let model = adapted("base", base, DType::F32);
        for layer in 0..2 {
            let got = weights_of(&model, layer);
            assert_eq!(got.len(), 4);
            for ((name, want), got) in stacked(&reference, "value", layer).iter().zip(&got) {
                assert_eq!(bits(got), bits(want), "{base:?} {name} of layer {layer}");
            }
            assert_eq!(weights_of(&plain, layer), got);
        }
    }
}

/// The dequantised numbers of a model that was in bf16 were not rounded to bf16, and a model whose matrices transformers holds
/// transposed was refused for its shapes.
#[test]
fn dequantised_numbers_have_the_type_that_the_model_had() {
    for (name, homes) in [
        ("bf16", &[BaseHome::Device, BaseHome::Host, BaseHome::Nf4][..]),
        ("gpt2", &[BaseHome::Device, BaseHome::Host, BaseHome::Nf4]),
        ("f16", &[BaseHome::Device, BaseHome::Host]),
    ] {
        let reference = Reference(std::fs::read(fixture(name).join("reference.safetensors")).unwrap());
        let plain = Model::load(cpu(), &ModelDir::open(&fixture(name)).unwrap(), Options::default()).unwrap();
        let homed = homes.iter().map(|&home| adapted(name, home, DType::F32));
        for model in std::iter::once(plain).chain(homed) {
            let mut checked = 0;
            for (i, tensor) in family(model.config.family).unwrap().tensors(&model.config).iter().enumerate()
            {
                let (got, mut start) = (model.read(i).unwrap(), 0);
                for part in &tensor.parts {
                    let name = format!("value.{}", part.name);
                    if reference.file().tensor(&name).is_ok() {
                        let want = reference.floats(&name);
                        assert_eq!(bits(&got[start..start + want.len()]), bits(&want), "{name}");
                        checked += 1;
                    }
                    start += part.len();
                }
            }
            assert_eq!(checked, reference.file().len(), "{name}");
        }
    }
    let opened = ModelDir::open(&fixture("f16")).unwrap();
    let wanted = AdapterOptions { base: BaseHome::Nf4, ..Default::default() };
    let error =
        Model::load_adapted(cpu(), &opened, Options::default(), &wanted, 0).err().unwrap().to_string();
    assert!(error.contains("float16") && error.contains("adapter.base"), "{error}");
}

/// What is quantised while it is loaded is what bitsandbytes would have made of it.
#[test]
fn weights_are_quantised_on_load_as_bitsandbytes_does() {
    let reference = Reference::read();
    let model = adapted("plain", BaseHome::Nf4, DType::F32);
    for layer in 0..2 {
        let parts = stacked(&reference, "absmax", layer).into_iter().zip(weights_of(&model, layer));
        for ((name, absmax), got) in parts {
            for (i, most) in absmax.iter().enumerate() {
                let block = &got[64 * i..64 * (i + 1)];
                let own = block.iter().fold(0.0f32, |m, x| m.max(x.abs()));
                assert_eq!(own.to_bits(), most.to_bits(), "{name}: magnitude of block {i}");
            }
        }
    }
    // Codes of one tensor, by what they stand for.
    let file = reference.file();
    let codes = file.tensor("codes.model.layers.1.mlp.down_proj.weight").unwrap();
    let absmax = reference.floats("absmax.model.layers.1.mlp.down_proj.weight");
    let mut want = vec![0.0; 2 * codes.data().len()];
    ferrl_kernels::codes::decode_nf4(codes.data(), &absmax, 64, 0, &mut want);
    assert_eq!(bits(&weights_of(&model, 1)[3]), bits(&want));
}

#[test]
fn pefts_adapter_on_nf4_gives_its_numbers_gradients_and_steps() {
    let reference = Reference::read();
    let batch = reference.batch();
    // The bounds of crates/engine/tests/adapter.rs: gradients against the largest of their tensor.
    let close = |what: &str, got: &[f32], want: &[f32], (least, bound): (f32, f32)| {
        assert_eq!(got.len(), want.len());
        let size = want.iter().fold(least, |m, x| m.max(x.abs()));
        for (i, (g, w)) in got.iter().zip(want).enumerate() {
            assert!((g - w).abs() <= bound * size, "{what} {i}: {g}, expected {w}");
        }
    };
    for base in [BaseHome::Device, BaseHome::Nf4] {
        let model = adapted("adapter", base, DType::F32);
        let mut t = ModelTrainer::new(model, OptimizerOptions::default()).unwrap();
        let mut out = t.forward(&batch).unwrap().logp;
        let mut end = 0;
        batch.sequences.iter().for_each(|s| {
            end += s.ids.len();
            out[end - 1] = 0.0;
        });
        close("log-probabilities", &out, &reference.column("out", &batch), (1.0, 1e-4));
        let flow = StatGrads { logp: reference.column("w", &batch), ..Default::default() };
        for step in 0..3 {
            t.forward(&batch).unwrap();
            t.backward(&batch, &flow).unwrap();
            if step == 0 {
                let (module, [a, _]) = t.model.adapter().unwrap().places().next().unwrap();
                let name = format!("grad.base_model.model.{}.lora_A.weight", module.name);
                close(
                    "gradient of A",
                    &t.gradient(a).unwrap().unwrap(),
                    &reference.floats(&name),
                    (1e-3, 1e-4),
                );
            }
            t.update(1e-2).unwrap();
        }
        let (module, [a, _]) = t.model.adapter().unwrap().places().last().unwrap();
        let name = format!("after.base_model.model.{}.lora_A.weight", module.name);
        close("A after three steps", &t.model.read(a).unwrap(), &reference.floats(&name), (1.0, 2e-4));
        let after = t.stats(&batch).unwrap().logp;
        let want = reference.column("out_after", &batch);
        let scored = want.iter().zip(&after).filter(|(w, _)| **w != 0.0);
        scored.for_each(|(w, g)| assert!((g - w).abs() <= 1e-3 * w.abs().max(1.0), "{g}, expected {w}"));
    }
}

/// The same weights in any home give the same bits, before and after training; a saved adapter knows that its base was NF4.
#[test]
fn homes_of_a_base_give_the_same_bits() {
    let batch = Reference::read().batch();
    for (dtype, files) in
        [(DType::F32, "base"), (DType::Bf16, "base"), (DType::F32, "bf16"), (DType::Bf16, "bf16")]
    {
        let train = |base: BaseHome| {
            let mut t = ModelTrainer::new(adapted(files, base, dtype), OptimizerOptions::default()).unwrap();
            let column = (0..batch.tokens()).map(|i| (i % 5) as f32 * 0.1 - 0.2).collect();
            let flow = StatGrads { logp: column, ..Default::default() };
            for _ in 0..3 {
                t.forward(&batch).unwrap();
                t.backward(&batch, &flow).unwrap();
                t.update(1e-2).unwrap();
            }
            t
        };
        let own = train(BaseHome::Device);
        let want = bits(&own.stats(&batch).unwrap().logp);
        for base in [BaseHome::Host, BaseHome::Nf4] {
            assert_eq!(bits(&train(base).stats(&batch).unwrap().logp), want, "{base:?} {dtype:?} {files}");
        }
        // Quantised on load: saved and loaded again it is the policy that was trained.
        let mut t =
            ModelTrainer::new(adapted("plain", BaseHome::Nf4, dtype), OptimizerOptions::default()).unwrap();
        t.forward(&batch).unwrap();
        let flow = StatGrads { logp: vec![0.1; batch.tokens()], ..Default::default() };
        t.backward(&batch, &flow).unwrap();
        t.update(1e-2).unwrap();
        let folder = tempfile::tempdir().unwrap();
        let dir = folder.path().join("saved");
        save_adapter(&dir, &t.model, &fixture("plain"), None, &SaveOptions::default()).unwrap();
        let trained = bits(&t.stats(&batch).unwrap().logp);
        let opened = ModelDir::open(&dir).unwrap();
        let loaded = Model::load(cpu(), &opened, Options { dtype, ..Options::default() }).unwrap();
        assert!(loaded.adapter().is_none());
        assert_eq!(bits(&stats(&loaded, &batch, 1.0).unwrap().logp), trained, "{dtype:?}");
        let wanted = AdapterOptions { r: 4, ..Default::default() };
        let options = Options { dtype, training: true, context: 0 };
        let error = Model::load_adapted(cpu(), &opened, options, &wanted, 0).err().unwrap().to_string();
        assert!(error.contains("adapter.base"), "{error}");
    }
}

#[test]
fn other_formats_of_bitsandbytes_are_refused_by_name() {
    for (change, says) in [
        ("\"bnb_4bit_quant_type\": \"fp4\"", "fp4"),
        ("\"load_in_4bit\": false", "8 bits"),
        ("\"quant_method\": \"gptq\"", "quantization_config"),
    ] {
        let folder = tempfile::tempdir().unwrap();
        let text = std::fs::read_to_string(fixture("base/config.json")).unwrap();
        let key = change.split(':').next().unwrap();
        let line = text.lines().find(|l| l.trim_start().starts_with(key)).unwrap();
        let comma = if line.ends_with(',') { "," } else { "" };
        std::fs::write(folder.path().join("config.json"), text.replace(line, &format!("{change}{comma}")))
            .unwrap();
        std::fs::copy(fixture("base/model.safetensors"), folder.path().join("model.safetensors")).unwrap();
        let error = ModelDir::open(folder.path()).unwrap_err().to_string();
        assert!(error.contains(says), "{error}");
    }
}

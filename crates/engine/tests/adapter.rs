//! Low-rank adapters against PEFT and PyTorch (`tools/make_adapter_fixtures.py`), and against finite differences.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl_engine::Result;
use ferrl_engine::checkpoint::{InitOptions, ModelDir, SaveOptions, save_adapter};
use ferrl_engine::generate::{CacheOptions, GenerationRequest, Generator, Sampler, SamplingParams};
use ferrl_engine::model::adapter::{AdapterOptions, Bias, Modules};
use ferrl_engine::model::{FAMILIES, Head, Model, Options};
use ferrl_engine::train::{Batch, ModelTrainer, OptimizerOptions, Rule, StatGrads, Stats, stats};
use ferrl_kernels::cpu::{Cpu, Level};
use ferrl_kernels::{Backend, DType};
use safetensors::SafeTensors;
use std::path::{Path, PathBuf};
use std::sync::Arc;

fn best() -> Arc<dyn Backend> {
    Arc::new(Cpu::with_level(2, Level::available().pop().unwrap()).unwrap())
}

fn cases() -> Vec<PathBuf> {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/adapters");
    let mut dirs: Vec<PathBuf> = std::fs::read_dir(root).unwrap().map(|e| e.unwrap().path()).collect();
    dirs.sort();
    assert!(dirs.len() >= 7, "the fixtures are committed");
    dirs
}

struct Reference(Vec<u8>);

impl Reference {
    fn read(dir: &Path) -> Self {
        Reference(std::fs::read(dir.join("reference.safetensors")).unwrap())
    }
    fn floats(&self, name: &str) -> Option<Vec<f32>> {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let tensor = file.tensor(name).ok()?;
        Some(tensor.data().chunks(4).map(|b| f32::from_le_bytes(b.try_into().unwrap())).collect())
    }
    fn batch(&self) -> Batch {
        let file = SafeTensors::deserialize(&self.0).unwrap();
        let ids = |k: usize| {
            let t = file.tensor(&format!("ids.{k}")).ok()?;
            Some(t.data().chunks(8).map(|b| i64::from_le_bytes(b.try_into().unwrap()) as u32).collect())
        };
        Batch::of((0..).map_while(ids).collect::<Vec<Vec<u32>>>())
    }
    /// Gradients of the fixture's loss with respect to its outputs.
    fn flow(&self, batch: &Batch, score: bool) -> StatGrads {
        let mut column = Vec::new();
        for (k, s) in batch.sequences.iter().enumerate() {
            let mut w = self.floats(&format!("w.{k}")).unwrap();
            w.resize(s.ids.len(), 0.0);
            column.extend(w);
        }
        match score {
            true => StatGrads { value: column, ..Default::default() },
            false => StatGrads { logp: column, ..Default::default() },
        }
    }
    fn compare(&self, what: &str, batch: &Batch, got: &Stats, column: &str, tolerance: f32) {
        let values = if got.value.is_empty() { &got.logp } else { &got.value };
        let mut start = 0;
        for (k, s) in batch.sequences.iter().enumerate() {
            let want = self.floats(&format!("{column}.{k}")).unwrap();
            for (i, w) in want.iter().enumerate() {
                close(&format!("{what} {column} of {k} at {i}"), values[start + i], *w, tolerance);
            }
            start += s.ids.len();
        }
    }
}

#[track_caller]
fn close(what: &str, got: f32, want: f32, tolerance: f32) {
    let bound = tolerance * want.abs().max(1.0);
    assert!((got - want).abs() <= bound, "{what}: got {got}, expected {want}");
}

fn adapted(dir: &Path, dtype: DType) -> Model {
    let opened = ModelDir::open(dir).unwrap();
    let options = Options { dtype, training: true, context: 0 };
    let wanted = opened.adapter().unwrap().options.clone();
    Model::load_adapted(best(), &opened, options, &wanted, 0).unwrap()
}

fn peft_optimizer() -> OptimizerOptions {
    OptimizerOptions {
        rule: Rule::AdamW { beta1: 0.9, beta2: 0.999, eps: 1e-8 },
        weight_decay: 0.01,
        max_grad_norm: Some(1.0),
        ..Default::default()
    }
}

#[test]
fn an_adapter_of_peft_gives_pefts_numbers() {
    for dir in cases() {
        let reference = Reference::read(&dir);
        let batch = reference.batch();
        let model = adapted(&dir, DType::F32);
        let own = stats(&model, &batch, 1.0).unwrap();
        reference.compare(&format!("{dir:?}"), &batch, &own, "out", 1e-4);
        // Without an adapter of its own, as generate and eval load it: the same bits.
        let opened = ModelDir::open(&dir).unwrap();
        let folded = Model::load(best(), &opened, Options::default()).unwrap();
        assert!(folded.adapter().is_none() && folded.params.len() == folded.config.params().len());
        assert_eq!(stats(&folded, &batch, 1.0).unwrap(), own, "{dir:?}");
    }
}

/// Each tensor of the adapter, by its name in PEFT's file, as the file lies.
fn tensors(model: &Model, read: impl Fn(usize) -> Vec<f32>) -> Vec<(String, Vec<f32>)> {
    let adapter = model.adapter().unwrap();
    let mut all = Vec::new();
    for (module, [a, b]) in adapter.places() {
        let name = |kind: &str| format!("base_model.model.{}.{kind}.weight", module.name);
        let (b, r) = (read(b), module.r);
        let turned = (0..module.rows).flat_map(|o| (0..r).map(move |i| (i, o)));
        all.push((name("lora_A"), read(a)));
        all.push((
            name("lora_B"),
            turned.map(|(i, o)| b[i * module.rows + module.order.decoder_row(o)]).collect(),
        ));
    }
    for t in &adapter.saved {
        let name = match t.name.strip_suffix(".bias").filter(|_| t.of_adapted) {
            Some(module) => format!("base_model.model.{module}.base_layer.bias"),
            None => format!("base_model.model.{}", t.name),
        };
        all.push((name, read(t.param)[t.elements.clone()].to_vec()));
    }
    all
}

#[test]
fn gradients_and_three_steps_of_adamw_equal_peft_and_pytorch() {
    for dir in cases() {
        for recompute in [false, true] {
            let reference = Reference::read(&dir);
            let batch = reference.batch();
            let mut t = ModelTrainer::new(adapted(&dir, DType::F32), peft_optimizer()).unwrap();
            t.recompute = recompute;
            let flow = reference.flow(&batch, t.model.config.head == Head::Score);
            let base: Vec<Vec<f32>> = (0..t.model.config.params().len())
                .filter(|&i| t.model.adapter().unwrap().adapts(i))
                .map(|i| t.model.read(i).unwrap())
                .collect();
            for step in 0..3 {
                t.forward(&batch).unwrap();
                t.backward(&batch, &flow).unwrap();
                if step == 0 {
                    let read = |i: usize| t.gradient(i).unwrap().unwrap();
                    for (name, got) in tensors(&t.model, read) {
                        let want = reference
                            .floats(&format!("grad.{name}"))
                            .unwrap_or_else(|| panic!("{dir:?} {name}"));
                        let size = want.iter().fold(1e-3f32, |m, x| m.max(x.abs()));
                        for (g, w) in got.iter().zip(&want) {
                            assert!((g - w).abs() <= 1e-4 * size, "{dir:?} {name}: {g}, expected {w}");
                        }
                    }
                }
                t.update(1e-2).unwrap();
            }
            for (name, got) in tensors(&t.model, |i| t.model.read(i).unwrap()) {
                let want = reference.floats(&format!("after.{name}")).unwrap();
                let grad = reference.floats(&format!("grad.{name}")).unwrap();
                let size = grad.iter().fold(0f32, |m, x| m.max(x.abs()));
                for ((got, want), grad) in got.iter().zip(&want).zip(&grad) {
                    // AdamW's step by a gradient that is zero but for rounding (a bias of keys) has any direction.
                    if grad.abs() > 1e-5 * size {
                        close(&format!("{dir:?} {name} after"), *got, *want, 2e-4);
                    }
                }
            }
            let after = t.stats(&batch).unwrap();
            reference.compare(&format!("{dir:?}"), &batch, &after, "out_after", 1e-3);
            let kept = (0..t.model.config.params().len()).filter(|&i| t.model.adapter().unwrap().adapts(i));
            assert!(kept.map(|i| t.model.read(i).unwrap()).eq(base), "{dir:?}: the base moved");
        }
    }
}

fn tiny(family: &str) -> InitOptions {
    let mut init = InitOptions::new(family);
    (init.vocab, init.hidden, init.layers) = (41, 16, 2);
    (init.heads, init.kv_heads, init.ffn) = (Some(4), Some(2), Some(20));
    (init.max_positions, init.std, init.seed) = (64, 0.3, 5);
    if family == "gpt2" {
        init.kv_heads = Some(4);
    }
    init
}

fn small(r: usize) -> AdapterOptions {
    AdapterOptions { r, alpha: 2.0 * r as f64, ..Default::default() }
}

/// A trainer whose `B` is not zero.
fn trainer(family: &str, dtype: DType, options: &AdapterOptions) -> ModelTrainer {
    let init = tiny(family);
    let mut model = Model::random(best(), &init, Options { dtype, training: true, context: 0 }).unwrap();
    let wave = |n: usize, k: f32| (0..n).map(|i| ((i * 37 % 61) as f32 - 30.0) * k).collect::<Vec<f32>>();
    model.adapt(options, 3, |m| Ok(Some([wave(m.r * m.cols, 4e-3), wave(m.r * m.rows, 3e-3)]))).unwrap();
    ModelTrainer::new(model, peft_optimizer()).unwrap()
}

fn batch() -> Batch {
    Batch::of((0..4u32).map(|s| (0..3 + 4 * s).map(|i| (s * 31 + i * i * 7 + i) % 41).collect::<Vec<u32>>()))
}

#[test]
fn gradients_equal_finite_differences_in_every_family() {
    for family in FAMILIES {
        let mut t = trainer(family.name(), DType::F32, &small(3));
        let batch = batch();
        let n = batch.tokens();
        let c: Vec<f32> = (0..n).map(|i| ((i * 7 % 13) as f32 - 6.0) * 0.1).collect();
        let loss = |t: &ModelTrainer| -> f64 {
            let s = t.stats(&batch).unwrap();
            s.logp.iter().zip(&c).map(|(l, c)| f64::from(*l) * f64::from(*c)).sum()
        };
        t.forward(&batch).unwrap();
        t.backward(&batch, &StatGrads { logp: c.clone(), ..Default::default() }).unwrap();
        for (_, places) in
            t.model.adapter().unwrap().places().map(|(m, p)| (m.clone(), p)).collect::<Vec<_>>()
        {
            for param in places {
                let grad = t.gradient(param).unwrap().unwrap();
                let values = t.model.read(param).unwrap();
                // Along the gradient itself: one number for all elements.
                let size: f64 = grad.iter().map(|g| f64::from(*g).powi(2)).sum::<f64>().sqrt();
                let eps = 2e-3;
                let mut moved = |sign: f64| {
                    let at =
                        |(x, g): (&f32, &f32)| (f64::from(*x) + sign * eps * f64::from(*g) / size) as f32;
                    let new: Vec<f32> = values.iter().zip(&grad).map(at).collect();
                    t.model.backend.write(&mut t.model.params[param].master, 0, &new).unwrap();
                    t.model.refresh().unwrap();
                    loss(&t)
                };
                let slope = (moved(1.0) - moved(-1.0)) / (2.0 * eps);
                moved(0.0);
                let id = t.model.params[param].shape.id;
                let bound = 2e-2 * size.max(1e-2);
                assert!(
                    (slope - size).abs() <= bound,
                    "{} {id}: slope {slope}, gradient {size}",
                    family.name()
                );
            }
        }
    }
}

#[test]
fn what_is_sampled_is_what_is_trained_with_an_adapter() {
    for dtype in [DType::F32, DType::Bf16] {
        let mut t = trainer("qwen2", dtype, &small(4));
        let batch = batch();
        t.forward(&batch).unwrap();
        let flow = StatGrads { logp: vec![0.1; batch.tokens()], ..Default::default() };
        t.backward(&batch, &flow).unwrap();
        t.update(1e-2).unwrap();
        let params = SamplingParams { max_new_tokens: 12, seed: 9, ..Default::default() };
        let request = |i: u32| GenerationRequest {
            prompt: vec![1 + i, 2, 3 + i],
            params: params.clone(),
            stream: [0, i, 0],
        };
        let requests: Vec<GenerationRequest> = (0..3).map(request).collect();
        let mut sampler = Sampler::new(&t.model, CacheOptions::default()).unwrap();
        let done = sampler.generate(&t.model, requests.clone()).unwrap();
        for (request, completion) in requests.iter().zip(done) {
            let ids: Vec<u32> = request.prompt.iter().chain(&completion.ids).copied().collect();
            let (s, from) = (t.stats(&Batch::of([ids])).unwrap(), request.prompt.len() - 1);
            assert_eq!(s.logp[from..from + completion.ids.len()], completion.logp, "{dtype:?}");
        }
    }
}

#[test]
fn at_its_start_an_adapter_equals_its_base() {
    for dtype in [DType::F32, DType::Bf16] {
        let init = tiny("llama");
        let options = Options { dtype, training: true, context: 0 };
        let base = Model::random(best(), &init, options).unwrap();
        let mut model = Model::random(best(), &init, options).unwrap();
        model.adapt(&small(4), 3, |_| Ok(None)).unwrap();
        let mut t = ModelTrainer::new(model, peft_optimizer()).unwrap();
        t.keep_start().unwrap();
        let (batch, want) = (batch(), stats(&base, &batch(), 1.0).unwrap());
        assert_eq!(t.stats(&batch).unwrap(), want, "B is zero");
        for _ in 0..2 {
            t.forward(&batch).unwrap();
            t.backward(&batch, &StatGrads { logp: vec![0.1; batch.tokens()], ..Default::default() }).unwrap();
            t.update(1e-2).unwrap();
        }
        let (now, version) = (t.stats(&batch).unwrap(), t.model.version);
        assert_ne!(now, want);
        assert_eq!(t.at_start(|m| stats(m, &batch, 1.0)).unwrap(), want);
        assert_eq!((t.stats(&batch).unwrap(), t.model.version), (now, version));
        let failed: Result<()> = t.at_start(|_| Err(ferrl_engine::Error::usage("no")));
        assert!(failed.is_err() && t.stats(&batch).unwrap() != want);
        t.restart().unwrap();
        assert_eq!(t.stats(&batch).unwrap(), want);
    }
}

#[test]
fn an_adapter_is_saved_as_peft_has_it_and_loads_with_the_same_bits() {
    let temp = tempfile::tempdir().unwrap();
    let root = temp.path();
    // A score or value head may be the base's, or the adapter's own on a language model.
    for (family, head, base_head) in [
        ("qwen2", Head::Lm, Head::Lm),
        ("gpt2", Head::Score, Head::Score),
        ("phi3", Head::LmAndValue, Head::LmAndValue),
        ("llama", Head::Score, Head::Lm),
        ("qwen3", Head::LmAndValue, Head::Lm),
    ] {
        let mut init = tiny(family);
        init.head = base_head;
        let (base, out) = (root.join(format!("{family}-base")), root.join(family));
        let exact = SaveOptions { dtype: ferrl_engine::checkpoint::StorageFormat::F32, ..Default::default() };
        ferrl_engine::checkpoint::init_model(&base, &init, &exact).unwrap();
        let options = AdapterOptions { bias: Bias::All, modules_to_save: vec![], ..small(4) };
        let load = |dir: &Path| {
            let options_of = Options { dtype: DType::F32, training: true, context: 0 };
            let mut opened = ModelDir::open(dir).unwrap();
            if opened.config.head != head {
                opened = opened.with_head(head, 3).unwrap();
            }
            Model::load_adapted(best(), &opened, options_of, &options, 11).unwrap()
        };
        let mut t = ModelTrainer::new(load(&base), peft_optimizer()).unwrap();
        let batch = batch();
        let s = t.forward(&batch).unwrap();
        let flow = |on: bool| if on { vec![0.1; batch.tokens()] } else { Vec::new() };
        let grads =
            StatGrads { logp: flow(head.has_lm()), value: flow(head.has_value()), ..Default::default() };
        t.backward(&batch, &grads).unwrap();
        t.update(1e-2).unwrap();
        let want = t.stats(&batch).unwrap();
        assert_ne!(s, want);
        save_adapter(&out, &t.model, &base, None, &SaveOptions::default()).unwrap();
        assert_eq!(stats(&load(&out), &batch, 1.0).unwrap(), want, "{family} goes on");
        let folded = Model::load(best(), &ModelDir::open(&out).unwrap(), Options::default()).unwrap();
        assert_eq!(stats(&folded, &batch, 1.0).unwrap(), want, "{family} merged");
        // Another rank, other modules: not this adapter.
        let other = AdapterOptions { r: 2, ..options.clone() };
        let options_of = Options { dtype: DType::F32, training: true, context: 0 };
        let refused = Model::load_adapted(best(), &ModelDir::open(&out).unwrap(), options_of, &other, 0);
        assert!(refused.err().unwrap().to_string().contains("rank 4 in the model, 2 in the recipe"));
    }
}

#[test]
fn choices_of_modules_mean_what_they_mean_in_peft() {
    let config = tiny("llama").build().unwrap().0;
    let names = |options: AdapterOptions| -> Result<Vec<String>> {
        let found = ferrl_engine::model::adapter::lora_modules(&config, &options)?;
        Ok(found
            .iter()
            .map(|m| format!("{}:{}:{}", m.name.trim_start_matches("model.layers."), m.r, m.scale))
            .collect())
    };
    let base = small(4);
    assert_eq!(names(base.clone()).unwrap().len(), 14, "seven linear layers a layer, no head");
    let named = |list: &[&str]| Modules::Named(list.iter().map(|s| s.to_string()).collect());
    let some = AdapterOptions {
        target_modules: named(&["q_proj", "mlp.down_proj"]),
        rank_pattern: vec![("1.self_attn.q_proj".into(), 2)],
        alpha_pattern: vec![("down_.*".into(), 1.0)],
        ..base.clone()
    };
    let got = names(some.clone()).unwrap();
    assert_eq!(
        got,
        [
            "0.self_attn.q_proj:4:2", "0.mlp.down_proj:4:0.25", "1.self_attn.q_proj:2:4",
            "1.mlp.down_proj:4:0.25"
        ]
    );
    let one = AdapterOptions {
        layers_to_transform: Some(vec![1]),
        exclude_modules: Some(named(&["q_proj"])),
        ..some
    };
    assert_eq!(names(one).unwrap(), ["1.mlp.down_proj:4:0.25"]);
    let matching = AdapterOptions {
        target_modules: Modules::Matching(r".*\.[kv]_proj".into()),
        use_rslora: true,
        ..base.clone()
    };
    assert_eq!(names(matching).unwrap()[..2], ["0.self_attn.k_proj:4:4", "0.self_attn.v_proj:4:4"]);
    for (target, said) in [
        (named(&["q_prj"]), "[\"q_proj\"]"),
        (named(&["lm_head"]), "modules_to_save"),
        (Modules::Matching("q_proj".into()), "adapts no module"),
        (Modules::Matching("(?!x)y".into()), "look-ahead"),
    ] {
        let e = names(AdapterOptions { target_modules: target, ..base.clone() }).unwrap_err().to_string();
        assert!(e.contains(said) && e.contains("adapter"), "{e}");
    }
}

/// PEFT's adapters of a multimodal model, of experts, and of a regular expression that looks ahead were refused: also one of
/// attention alone, beside an empty list of parameters.
#[test]
fn adapters_whose_names_are_not_the_decoders_give_pefts_numbers() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/adapters_read");
    let mut dirs: Vec<PathBuf> = std::fs::read_dir(root).unwrap().map(|e| e.unwrap().path()).collect();
    dirs.sort();
    assert!(dirs.len() >= 5, "the fixtures are committed");
    for dir in dirs {
        let (opened, reference) = (ModelDir::open(&dir).unwrap(), Reference::read(&dir));
        let model = Model::load(best(), &opened, Options::default()).unwrap();
        let batch = reference.batch();
        reference.compare(&format!("{dir:?}"), &batch, &stats(&model, &batch, 1.0).unwrap(), "out", 1e-4);
        let own = opened.adapter().unwrap().options.clone();
        let options = Options { training: true, ..Options::default() };
        let trained = Model::load_adapted(best(), &opened, options, &own, 0);
        if dir.ends_with("experts") {
            let error = trained.err().unwrap().to_string();
            assert!(error.contains("routers") && error.contains("--merge"), "{error}");
        } else {
            assert!(trained.is_ok(), "{dir:?}: {:?}", trained.err());
        }
    }
}

/// An adapter of a multimodal model was saved under the names of a text model, so that PEFT loaded nothing of it.
#[test]
fn an_adapter_of_a_multimodal_model_is_saved_under_its_names() {
    let dir = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/adapters_read/multimodal");
    let opened = ModelDir::open(&dir).unwrap();
    let own = opened.adapter().unwrap().options.clone();
    let options = Options { training: true, ..Options::default() };
    let model = Model::load_adapted(best(), &opened, options, &own, 0).unwrap();
    let folder = std::env::temp_dir().join(format!("ferrl-multimodal-{}", std::process::id()));
    let _ = std::fs::remove_dir_all(&folder);
    std::fs::create_dir_all(&folder).unwrap();
    let out = folder.join("saved");
    save_adapter(&out, &model, opened.base(), None, &SaveOptions::default()).unwrap();
    let read = |dir: &Path| std::fs::read(dir.join("adapter_model.safetensors")).unwrap();
    let (ours, pefts) = (read(&out), read(&dir));
    let (ours, pefts) = (SafeTensors::deserialize(&ours).unwrap(), SafeTensors::deserialize(&pefts).unwrap());
    let text = pefts.names().into_iter().filter(|name| name.contains("language_model"));
    let mut want: Vec<&str> = text.collect();
    assert!(want.len() > 8 && want.len() < pefts.names().len(), "it adapts the vision part too");
    let mut got: Vec<&str> = ours.names().into_iter().collect();
    want.sort_unstable();
    got.sort_unstable();
    assert_eq!(got, want);
    for name in got {
        assert_eq!(ours.tensor(name).unwrap().data(), pefts.tensor(name).unwrap().data(), "{name}");
    }
    // Short names would name modules of the vision part too.
    let config = config_of(&out);
    let targets = config["target_modules"].as_array().unwrap();
    assert!(
        targets.iter().all(|t| t.as_str().unwrap().starts_with("model.language_model.layers.")),
        "{config}"
    );
    let again = ModelDir::open(&out).unwrap();
    let batch = Reference::read(&dir).batch();
    let logps = |dir: &ModelDir| {
        stats(&Model::load(best(), dir, Options::default()).unwrap(), &batch, 1.0).unwrap().logp
    };
    assert_eq!(logps(&again), logps(&opened));
    std::fs::remove_dir_all(&folder).unwrap();
}

#[test]
fn names_without_effect_are_refused() {
    let mut init = tiny("llama");
    init.tied = Some(false);
    let plain = init.build().unwrap().0;
    init.tied = Some(true);
    let tied = init.build().unwrap().0;
    let named = |list: &[&str]| list.iter().map(|s| s.to_string()).collect::<Vec<_>>();
    let o = || small(4);
    let cases = [
        (AdapterOptions { rank_pattern: vec![("vproj".into(), 2)], ..o() }, "vproj"),
        (AdapterOptions { alpha_pattern: vec![("vproj".into(), 2.0)], ..o() }, "vproj"),
        (AdapterOptions { exclude_modules: Some(Modules::Named(named(&["zzz"]))), ..o() }, "zzz"),
        (AdapterOptions { layers_to_transform: Some(vec![0, 7]), ..o() }, "no layer 7"),
    ];
    for (options, said) in cases {
        let e = options.check_names(&plain).unwrap_err().to_string();
        assert!(e.contains(said) && e.contains("adapter."), "{e}");
    }
    o().check_names(&plain).unwrap();
    let whole = |name: &str, config| {
        let options = AdapterOptions { modules_to_save: named(&[name]), ..o() };
        ferrl_engine::model::adapter::saved_tensors(config, &options)
    };
    for name in ["embed_tokens", "lm_head"] {
        whole(name, &plain).unwrap();
        let e = whole(name, &tied).unwrap_err().to_string();
        assert!(e.contains("tied") && e.contains("adapter.modules_to_save"), "{e}");
    }
    let norms = whole("norm", &plain).unwrap();
    assert!(norms.len() == 5, "every norm, as PEFT has it: {norms:?}");
    let mut experts = tiny("qwen3_moe");
    experts.experts = Some(4);
    let experts = experts.build().unwrap().0;
    let one = AdapterOptions { rank_pattern: vec![("experts.0.up_proj".into(), 2)], ..o() };
    let e = one.check_names(&experts).unwrap_err().to_string();
    assert!(e.contains("PEFT stacks"), "{e}");
}

/// transformers 5 holds the experts of a layer as two stacked matrices. Adapters of a part of them were trained and saved, and
/// PEFT 0.21 refused them, left weights out with a warning, or scaled them otherwise (log-probabilities off by up to 1.8).
#[test]
fn adapters_of_experts_that_peft_would_not_load_are_refused() {
    let mut init = tiny("qwen3_moe");
    init.experts = Some(4);
    let experts = init.build().unwrap().0;
    let named = |list: &[&str]| Modules::Named(list.iter().map(|s| s.to_string()).collect());
    let (o, rank) = (|| small(4), |text: &str| vec![(text.to_string(), 2)]);
    let alpha = |text: &str| vec![(text.to_string(), 50.0)];
    for (options, key) in [
        (AdapterOptions { target_modules: named(&["gate_proj"]), ..o() }, "target_modules"),
        (AdapterOptions { target_modules: named(&["gate_proj", "up_proj"]), ..o() }, "target_modules"),
        (AdapterOptions { target_modules: named(&["experts.0.down_proj"]), ..o() }, "target_modules"),
        (AdapterOptions { exclude_modules: Some(named(&["up_proj"])), ..o() }, "target_modules"),
        (AdapterOptions { rank_pattern: rank("gate_proj|up_proj"), ..o() }, "rank_pattern"),
        (AdapterOptions { alpha_pattern: alpha("gate_proj|up_proj"), ..o() }, "alpha_pattern"),
        (AdapterOptions { alpha_pattern: alpha("experts.1.down_proj"), ..o() }, "alpha_pattern"),
        (AdapterOptions { use_rslora: true, ..o() }, "use_rslora"),
        (
            AdapterOptions {
                target_modules: named(&["q_proj"]),
                modules_to_save: vec!["down_proj".into()],
                ..o()
            },
            "modules_to_save",
        ),
    ] {
        let e = options.check_names(&experts).unwrap_err().to_string();
        assert!(e.contains(&format!("adapter.{key}")) && e.contains("PEFT"), "{e}");
    }
    for options in [
        o(),
        AdapterOptions { rank_pattern: rank("down_proj"), alpha_pattern: alpha("q_proj"), ..o() },
        AdapterOptions {
            target_modules: named(&["down_proj", "q_proj"]),
            use_rslora: true,
            alpha_pattern: alpha("layers.0.*down_proj"),
            ..o()
        },
        AdapterOptions { layers_to_transform: Some(vec![1]), ..o() },
        AdapterOptions {
            target_modules: named(&["q_proj"]),
            modules_to_save: vec!["mlp.gate".into()],
            ..o()
        },
    ] {
        options.check_names(&experts).unwrap();
    }
}

/// A trained adapter of a small model, saved, with its base beside it.
fn saved(root: &Path, options: &AdapterOptions) -> PathBuf {
    let (base, out) = (root.join("base"), root.join("adapter"));
    let exact = SaveOptions { dtype: ferrl_engine::checkpoint::StorageFormat::F32, ..Default::default() };
    ferrl_engine::checkpoint::init_model(&base, &InitOptions { tied: Some(false), ..tiny("qwen2") }, &exact)
        .unwrap();
    let training = Options { dtype: DType::F32, training: true, context: 0 };
    let model = Model::load_adapted(best(), &ModelDir::open(&base).unwrap(), training, options, 11).unwrap();
    save_adapter(&out, &model, &base, None, &SaveOptions::default()).unwrap();
    out
}

fn config_of(adapter: &Path) -> serde_json::Value {
    serde_json::from_slice(&std::fs::read(adapter.join("adapter_config.json")).unwrap()).unwrap()
}

/// Ranks by pattern had been written in the order of the alphabet, and the first that matches counts: such an adapter could not be
/// loaded again.
#[test]
fn patterns_are_saved_in_their_order() {
    let temp = tempfile::tempdir().unwrap();
    let root = temp.path();
    let options = AdapterOptions {
        rank_pattern: vec![("v_proj".into(), 2), ("layers.1.self_attn.v_proj".into(), 3)],
        alpha_pattern: vec![("v_proj".into(), 5.0), ("layers.1.self_attn.v_proj".into(), 7.0)],
        ..small(4)
    };
    let out = saved(root, &options);
    for key in ["rank_pattern", "alpha_pattern"] {
        let json = config_of(&out);
        let keys: Vec<&String> = json[key].as_object().unwrap().keys().collect();
        assert_eq!(keys, ["v_proj", "layers.1.self_attn.v_proj"]);
    }
    ModelDir::open(&out).unwrap();
}

/// PEFT: "`layers_to_transform` cannot be used when `target_modules` is a str".
#[test]
fn a_regular_expression_beside_layer_numbers_is_saved_as_names() {
    let temp = tempfile::tempdir().unwrap();
    let root = temp.path();
    let options = AdapterOptions {
        target_modules: Modules::Matching(r".*\.[qv]_proj".into()),
        layers_to_transform: Some(vec![1]),
        ..small(4)
    };
    let json = config_of(&saved(root, &options));
    let names = ["q_proj", "v_proj"].map(|name| format!("model.layers.1.self_attn.{name}"));
    assert_eq!(json["target_modules"], serde_json::json!(names));
    assert!(json["layers_to_transform"].is_null());
    ModelDir::open(&root.join("adapter")).unwrap();
}

/// A file without a tensor that `modules_to_save` names had been read as if the base's were meant.
#[test]
fn a_missing_module_to_save_is_refused() {
    let temp = tempfile::tempdir().unwrap();
    let root = temp.path();
    let out = saved(root, &small(4));
    let mut json = config_of(&out);
    let mut refusal = |key: &str, value: serde_json::Value| {
        json[key] = value;
        std::fs::write(out.join("adapter_config.json"), json.to_string()).unwrap();
        json[key] = serde_json::Value::Null;
        ModelDir::open(&out).err().map(|e| e.to_string()).unwrap_or_default()
    };
    let e = refusal("modules_to_save", serde_json::json!(["lm_head"]));
    assert!(e.contains("lm_head.weight") && e.contains("modules_to_save"), "{e}");
    assert_eq!(refusal("modules_to_save", serde_json::json!(["classifier"])), "", "heads of other classes");
    for (key, value) in [("init_lora_weights", "lora_ga"), ("arrow_config", "{}")] {
        let e = refusal(key, serde_json::json!(value));
        assert!(e.contains(key), "{e}");
    }
}

#[test]
fn small_changes_that_rounding_swallows_are_counted() {
    let arrived = |dtype: DType, k: f32| {
        let mut t = trainer("llama", dtype, &small(4));
        let bs: Vec<usize> = t.model.adapter().unwrap().places().map(|(_, [_, b])| b).collect();
        for b in bs {
            let values: Vec<f32> = t.model.read(b).unwrap().iter().map(|x| x * k).collect();
            t.model.backend.write(&mut t.model.params[b].master, 0, &values).unwrap();
        }
        t.model.refresh().unwrap();
        t.model.arrived().unwrap().map(|a| a.fraction().unwrap())
    };
    assert_eq!(arrived(DType::F32, 1.0), None, "nothing is rounded to bf16");
    let (large, tiny) = (arrived(DType::Bf16, 1.0).unwrap(), arrived(DType::Bf16, 1e-4).unwrap());
    assert!((0.9..1.1).contains(&large) && tiny < 0.3, "{large} {tiny}");
}

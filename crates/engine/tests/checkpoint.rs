//! Model directories: what is written is read back bit for bit, what is broken is refused in words.

#![allow(clippy::unwrap_used)]

use std::collections::BTreeMap;
use std::fs;
use std::path::{Path, PathBuf};
use std::sync::atomic::{AtomicBool, Ordering};

use ferrl_engine::Class;
use ferrl_engine::checkpoint::{
    InitOptions, ModelDir, SaveOptions, StorageFormat, init_model, init_param, save_model,
};
use ferrl_engine::model::{FAMILIES, Head, ParamShape};
use serde_json::{Value, json};
use tempfile::TempDir;

fn tiny(family: &str) -> InitOptions {
    InitOptions {
        vocab: 48,
        hidden: 32,
        layers: 2,
        heads: Some(4),
        kv_heads: (family != "gpt2").then_some(2),
        ffn: Some(40),
        max_positions: 64,
        seed: 7,
        ..InitOptions::new(family)
    }
}

const F32: SaveOptions = SaveOptions {
    dtype: StorageFormat::F32,
    max_shard_bytes: u64::MAX,
    source: None,
    overwrite: false,
    stop: None,
};

fn read(dir: &Path) -> BTreeMap<String, Vec<f32>> {
    let mut out = BTreeMap::new();
    ModelDir::open(dir)
        .unwrap()
        .load(|p, data| {
            assert_eq!(data.len(), p.len());
            out.insert(p.name(), data);
            Ok(())
        })
        .unwrap();
    out
}

fn failure(dir: &Path) -> String {
    let e = ModelDir::open(dir).unwrap_err();
    assert_eq!(e.class, Class::Model);
    e.to_string()
}

fn edit(path: &Path, change: impl FnOnce(&mut Value)) {
    let mut json: Value = serde_json::from_slice(&fs::read(path).unwrap()).unwrap();
    change(&mut json);
    fs::write(path, json.to_string()).unwrap();
}

#[test]
fn every_family_and_head_comes_back_bit_for_bit() {
    for family in FAMILIES {
        for head in [Head::Lm, Head::Score, Head::LmAndValue] {
            for (tied, max_shard_bytes) in [(true, u64::MAX), (false, u64::MAX), (false, 4096), (false, 1)] {
                if max_shard_bytes != u64::MAX && head != Head::LmAndValue {
                    continue; // once per family is enough
                }
                let temp = tempfile::tempdir().unwrap();
                let dir = temp.path().join("model");
                let options = InitOptions { tied: Some(tied), head, ..tiny(family.name()) };
                let config = init_model(&dir, &options, &SaveOptions { max_shard_bytes, ..F32 }).unwrap();
                assert_eq!(ModelDir::open(&dir).unwrap().config, config);
                let back = read(&dir);
                assert_eq!(back.len(), config.params().len());
                for param in config.params() {
                    assert_eq!(
                        back[&param.name()],
                        init_param(&config, &options, &param),
                        "{}",
                        param.name()
                    );
                }
                assert_eq!(dir.join("model.safetensors.index.json").exists(), max_shard_bytes != u64::MAX);
                assert_eq!(fs::read_dir(temp.path()).unwrap().count(), 1, "nothing is left beside the model");
            }
        }
    }
}

#[test]
fn half_formats_round_once_and_then_stay() {
    for dtype in [StorageFormat::Bf16, StorageFormat::F16] {
        let temp = tempfile::tempdir().unwrap();
        let options = tiny("gpt2");
        let config = init_model(&temp.path().join("a"), &options, &SaveOptions { dtype, ..F32 }).unwrap();
        let once = read(&temp.path().join("a"));
        for param in config.params() {
            for (x, exact) in once[&param.name()].iter().zip(init_param(&config, &options, &param)) {
                let tolerance = if dtype == StorageFormat::Bf16 { 1.0 / 256.0 } else { 1.0 / 1024.0 };
                assert!((x - exact).abs() <= tolerance * exact.abs() + 1e-7);
            }
        }
        let original = ModelDir::open(&temp.path().join("a")).unwrap();
        let save = SaveOptions { dtype, ..F32 };
        let mut get = |p: &ParamShape| Ok(once[&p.name()].clone());
        save_model(&temp.path().join("b"), &config, Some(&original.config_json), &save, &mut get).unwrap();
        assert_eq!(once, read(&temp.path().join("b")));
        assert_eq!(original.config_json["torch_dtype"], dtype.torch_name());
    }
}

#[test]
fn float16_refuses_what_it_cannot_hold() {
    let temp = tempfile::tempdir().unwrap();
    let (config, _) = tiny("llama").build().unwrap();
    let save = SaveOptions { dtype: StorageFormat::F16, ..F32 };
    let e = save_model(&temp.path().join("m"), &config, None, &save, &mut |p| Ok(vec![70000.0; p.len()]))
        .unwrap_err();
    assert_eq!(e.class, Class::Numerics);
    assert!(e.to_string().contains("model.embed_tokens.weight: 70000 is too large"), "{e}");
    assert_eq!(fs::read_dir(temp.path()).unwrap().count(), 0, "nothing is left behind");
}

#[test]
fn saving_keeps_foreign_fields_and_brings_the_tokenizer() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("a");
    let config = init_model(&dir, &tiny("qwen2"), &F32).unwrap();
    fs::write(dir.join("tokenizer.json"), "{}").unwrap();
    fs::write(dir.join("secret.txt"), "x").unwrap();
    edit(&dir.join("config.json"), |c| {
        c["my_field"] = json!([1, 2]);
        c["dtype"] = json!("float32");
    });
    let opened = ModelDir::open(&dir).unwrap().with_head(Head::Score, 3).unwrap();
    let mut params = BTreeMap::new();
    let keep = |p: &ParamShape, data| {
        params.insert(p.name(), data);
        Ok(())
    };
    opened.load(keep).unwrap();
    assert!(params["value.weight"].iter().any(|x| *x != 0.0));
    let save = SaveOptions { source: Some(&dir), dtype: StorageFormat::Bf16, ..F32 };
    let b = temp.path().join("b");
    let mut get = |p: &ferrl_engine::model::ParamShape| Ok(params[&p.name()].clone());
    save_model(&b, &opened.config, Some(&opened.config_json), &save, &mut get).unwrap();
    let json: Value = serde_json::from_slice(&fs::read(b.join("config.json")).unwrap()).unwrap();
    assert_eq!(json["my_field"], json!([1, 2]));
    assert_eq!((&json["dtype"], &json["torch_dtype"]), (&json!("bfloat16"), &json!("bfloat16")));
    assert_eq!(json["architectures"], json!(["Qwen2ForSequenceClassification"]));
    assert_eq!(json["num_labels"], 1);
    assert!(b.join("tokenizer.json").exists() && !b.join("secret.txt").exists());
    assert_eq!(ModelDir::open(&b).unwrap().config.head, Head::Score);
    assert_eq!(config.head, Head::Lm);
}

#[test]
fn a_directory_is_replaced_only_on_request() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("m");
    init_model(&dir, &tiny("llama"), &F32).unwrap();
    let before = read(&dir);
    let other = InitOptions { seed: 8, ..tiny("llama") };
    let e = init_model(&dir, &other, &F32).unwrap_err();
    assert!(e.to_string().contains("already exists"), "{e}");
    assert_eq!(before, read(&dir));
    init_model(&dir, &other, &SaveOptions { overwrite: true, ..F32 }).unwrap();
    assert_ne!(before, read(&dir));
    assert_eq!(fs::read_dir(temp.path()).unwrap().count(), 1);
}

#[test]
fn what_is_no_part_of_a_model_stays_when_the_model_is_replaced() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("m");
    let shards = SaveOptions { max_shard_bytes: 4000, ..F32 };
    init_model(&dir, &tiny("llama"), &shards).unwrap();
    let names = |dir: &Path| {
        let mut names: Vec<String> =
            fs::read_dir(dir).unwrap().map(|e| e.unwrap().file_name().into_string().unwrap()).collect();
        names.sort();
        names
    };
    assert!(names(&dir).len() > 3, "{:?}", names(&dir));
    fs::write(dir.join("notes.txt"), "mine").unwrap();
    fs::create_dir_all(dir.join("data/rows")).unwrap();
    fs::write(dir.join("data/rows/a.jsonl"), "{}").unwrap();
    init_model(&dir, &tiny("llama"), &SaveOptions { overwrite: true, ..F32 }).unwrap();
    assert_eq!(names(&dir), ["config.json", "data", "model.safetensors", "notes.txt"], "no old shard");
    assert_eq!(fs::read_to_string(dir.join("notes.txt")).unwrap(), "mine");
    assert!(dir.join("data/rows/a.jsonl").is_file());
    fs::write(temp.path().join("file"), "mine").unwrap();
    let e = init_model(&temp.path().join("file"), &tiny("llama"), &SaveOptions { overwrite: true, ..F32 })
        .unwrap_err();
    assert!(e.to_string().contains("is a file"), "{e}");
    assert_eq!(fs::read_to_string(temp.path().join("file")).unwrap(), "mine");
    assert_eq!(names(temp.path()), ["file", "m"]);
}

#[test]
fn a_failed_save_leaves_the_old_model() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("m");
    let config = init_model(&dir, &tiny("llama"), &F32).unwrap();
    let before = read(&dir);
    let save = SaveOptions { overwrite: true, ..F32 };
    let mut count = 0;
    let e = save_model(&dir, &config, None, &save, &mut |p| {
        count += 1;
        Ok(vec![1.0; if count == 5 { 1 } else { p.len() }])
    });
    assert!(e.unwrap_err().to_string().contains("has 1 numbers, expected"));
    assert_eq!(before, read(&dir));
    assert_eq!(fs::read_dir(temp.path()).unwrap().count(), 1);
}

#[test]
fn a_save_that_is_told_to_stop_leaves_the_old_model() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("m");
    let config = init_model(&dir, &tiny("llama"), &F32).unwrap();
    let before = read(&dir);
    let tensors = config.params().len();
    // Told at the last tensor, the save has written the whole new model when it stops.
    for told_at in [1, 5, tensors] {
        let (stop, mut count) = (AtomicBool::new(false), 0);
        let save = SaveOptions { overwrite: true, stop: Some(&stop), ..F32 };
        let e = save_model(&dir, &config, None, &save, &mut |p| {
            count += 1;
            stop.store(count == told_at, Ordering::SeqCst);
            Ok(vec![1.0; p.len()])
        });
        let e = e.unwrap_err();
        assert_eq!((e.class, count), (Class::Interrupted, told_at), "{e}");
        assert!(e.to_string().contains("interrupted; nothing was written"), "{e}");
        assert_eq!(before, read(&dir));
        assert_eq!(fs::read_dir(temp.path()).unwrap().count(), 1);
    }
}

/// Writes a safetensors file by hand: names, shapes, raw f32 data of zeros.
fn raw_file(path: &Path, tensors: &[(String, Vec<usize>)], dtype: &str, size: usize) {
    let (mut header, mut at) = (serde_json::Map::new(), 0);
    for (name, shape) in tensors {
        let end = at + shape.iter().product::<usize>() * size;
        header.insert(name.clone(), json!({"dtype": dtype, "shape": shape, "data_offsets": [at, end]}));
        at = end;
    }
    let text = Value::Object(header).to_string();
    let mut bytes = (text.len() as u64).to_le_bytes().to_vec();
    bytes.extend(text.as_bytes());
    bytes.resize(bytes.len() + at, 0);
    fs::write(path, bytes).unwrap();
}

/// A model whose weights are rewritten with a changed list of tensors.
fn with_tensors(
    temp: &TempDir,
    family: &str,
    change: impl FnOnce(&mut Vec<(String, Vec<usize>)>),
) -> PathBuf {
    let dir = temp.path().join("m");
    let options = InitOptions { tied: Some(false), ..tiny(family) };
    let config = init_model(&dir, &options, &F32).unwrap();
    let map = ferrl_engine::model::family(family).unwrap().tensors(&config);
    let mut list: Vec<_> = map.into_iter().flat_map(|t| t.parts).map(|p| (p.name, p.shape)).collect();
    change(&mut list);
    raw_file(&dir.join("model.safetensors"), &list, "F32", 4);
    dir
}

#[test]
fn tensors_that_do_not_fit_are_named() {
    let temp = tempfile::tempdir().unwrap();
    let dir = with_tensors(&temp, "llama", |list| {
        list.iter_mut().for_each(|t| t.0 = t.0.replace("1.mlp.down_proj", "1.mlp.down_prof"))
    });
    let message = failure(&dir);
    assert!(message.contains("tensor \"model.layers.1.mlp.down_proj.weight\" is missing"), "{message}");
    assert!(message.contains("nearest tensor there is \"model.layers.1.mlp.down_prof.weight\""), "{message}");

    let temp = tempfile::tempdir().unwrap();
    let dir = with_tensors(&temp, "llama", |list| list[0].1[0] = 47);
    let message = failure(&dir);
    assert!(message.contains("has shape [47, 32], expected [48, 32]"), "{message}");
    assert!(message.contains("check vocab_size and hidden_size in config.json"), "{message}");

    let temp = tempfile::tempdir().unwrap();
    let dir = with_tensors(&temp, "llama", |list| {
        list.push(("model.layers.0.self_attn.q_proj.bias".into(), vec![32]));
    });
    assert!(failure(&dir).contains("q_proj.bias\" has no place in this model"));

    let temp = tempfile::tempdir().unwrap();
    let dir = with_tensors(&temp, "llama", |list| list.retain(|t| t.0 != "lm_head.weight"));
    assert!(failure(&dir).contains("set tie_word_embeddings to true"));

    let temp = tempfile::tempdir().unwrap();
    let dir = with_tensors(&temp, "llama", |_| ());
    let map = ferrl_engine::model::family("llama").unwrap().tensors(&ModelDir::open(&dir).unwrap().config);
    let list: Vec<_> = map.into_iter().flat_map(|t| t.parts).map(|p| (p.name, p.shape)).collect();
    raw_file(&dir.join("model.safetensors"), &list, "I8", 1);
    assert!(failure(&dir).contains("is stored as I8"));
}

#[test]
fn names_without_prefix_buffers_and_tied_copies_are_loaded() {
    for (family, prefix, buffer) in [
        ("llama", "model.", "layers.0.self_attn.rotary_emb.inv_freq"),
        ("gpt2", "transformer.", "h.0.attn.masked_bias"),
    ] {
        let temp = tempfile::tempdir().unwrap();
        let dir = with_tensors(&temp, family, |list| {
            list.iter_mut().for_each(|t| t.0 = t.0.replacen(prefix, "", 1));
            list.push((buffer.into(), vec![4]));
        });
        assert_eq!(read(&dir)["layers.1.down.weight"], vec![0.0; 32 * 40]);
        // All zeros, so the copy agrees with the embedding.
        edit(&dir.join("config.json"), |c| c["tie_word_embeddings"] = json!(true));
        assert!(!read(&dir).contains_key("head"));
    }
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("m");
    init_model(&dir, &InitOptions { tied: Some(false), ..tiny("llama") }, &F32).unwrap();
    edit(&dir.join("config.json"), |c| c["tie_word_embeddings"] = json!(true));
    assert!(failure(&dir).contains("lm_head.weight differs from the embedding"));
}

#[test]
fn damaged_files_are_refused() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("m");
    init_model(&dir, &tiny("llama"), &F32).unwrap();
    let file = dir.join("model.safetensors");
    let whole = fs::read(&file).unwrap();
    for length in [whole.len() - 1, whole.len() / 2, 100, 7, 0] {
        fs::write(&file, &whole[..length]).unwrap();
        let message = failure(&dir);
        assert!(message.contains("model.safetensors") && message.contains("download it again"), "{message}");
    }
    let mut huge = whole.clone();
    huge[..8].copy_from_slice(&u64::MAX.to_le_bytes());
    fs::write(&file, &huge).unwrap();
    assert!(failure(&dir).contains("not a readable safetensors file"));
    fs::write(&file, "version https://git-lfs.github.com/spec/v1\n").unwrap();
    assert!(failure(&dir).contains("git lfs pull"));

    fs::remove_file(&file).unwrap();
    assert!(failure(&dir).contains("no model.safetensors"));
    fs::write(dir.join("pytorch_model.bin"), "x").unwrap();
    let message = failure(&dir);
    assert!(message.contains("pickle") && message.contains("save_pretrained"), "{message}");
    fs::write(dir.join("config.json"), "{").unwrap();
    assert!(failure(&dir).contains("config.json: not valid JSON"));
    fs::remove_file(dir.join("config.json")).unwrap();
    assert!(failure(&dir).contains("config.json is missing"));
    assert!(failure(&temp.path().join("nowhere")).contains("no such directory"));
}

#[test]
fn an_index_cannot_lead_out_of_its_directory() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path().join("m");
    init_model(&dir, &tiny("llama"), &SaveOptions { max_shard_bytes: 9000, ..F32 }).unwrap();
    let index = dir.join("model.safetensors.index.json");
    let original = fs::read(&index).unwrap();
    let first = "model.embed_tokens.weight";
    let outside = temp.path().join("x.safetensors");
    fs::copy(dir.join("model-00001-of-00009.safetensors"), &outside).ok();
    for path in
        ["../x.safetensors", "/etc/x.safetensors", "a/../x.safetensors", "./x.safetensors", "..", "", "a.bin"]
    {
        edit(&index, |i| i["weight_map"][first] = json!(path));
        let message = failure(&dir);
        assert!(message.contains("expected the bare name of a .safetensors file"), "{path}: {message}");
    }
    edit(&index, |i| i["weight_map"][first] = json!(outside.to_str().unwrap()));
    assert!(failure(&dir).contains("expected the bare name"));
    edit(&index, |i| i["weight_map"][first] = json!(3));
    assert!(failure(&dir).contains("expected the bare name"));
    edit(&index, |i| i["weight_map"][first] = json!("model-00099.safetensors"));
    assert!(failure(&dir).contains("shard model-00099.safetensors is missing"));

    fs::write(&index, &original).unwrap();
    edit(&index, |i| i["weight_map"]["model.norm.weight"] = i["weight_map"][first].clone());
    assert!(failure(&dir).contains("where the index says it is"));
    fs::write(&index, "{}").unwrap();
    assert!(failure(&dir).contains("weight_map is missing"));
}

#[test]
fn options_that_do_not_fit_are_usage_errors() {
    let cases = [
        (InitOptions { family: "lama".into(), ..tiny("llama") }, "nearest is \"llama\""),
        (InitOptions { heads: Some(5), ..tiny("llama") }, "try heads = 4"),
        (InitOptions { kv_heads: Some(3), ..tiny("llama") }, "must be a multiple of num_key_value_heads"),
        (InitOptions { layers: 0, ..tiny("llama") }, "layers must be at least 1"),
        (InitOptions { std: f32::NAN, ..tiny("llama") }, "std must be above 0"),
        (InitOptions { eos: Some(48), ..tiny("llama") }, "outside the vocabulary"),
        (InitOptions { window: Some(8), ..tiny("gpt2") }, "no sliding window"),
        (InitOptions { hidden: usize::MAX, heads: Some(1), ..tiny("llama") }, "hidden_size must be"),
    ];
    for (options, expected) in cases {
        let e = options.build().unwrap_err();
        assert_eq!(e.class, Class::Usage);
        assert!(e.to_string().contains(expected), "{e}");
    }
}

#[test]
fn weights_depend_on_seed_and_name_alone() {
    let (config, _) = tiny("llama").build().unwrap();
    let params = config.params();
    let get = |seed, i: usize| init_param(&config, &InitOptions { seed, ..tiny("llama") }, &params[i]);
    let up = params.iter().position(|p| p.name() == "layers.0.up.weight").unwrap();
    assert_eq!(get(1, 0), get(1, 0));
    assert_ne!(get(1, 0), get(2, 0));
    assert_ne!(get(1, 0)[..32], get(1, up)[..32]);
    let data = get(1, 0);
    let variance = data.iter().map(|x| f64::from(x * x)).sum::<f64>() / data.len() as f64;
    assert!((variance.sqrt() / 0.02 - 1.0).abs() < 0.1);
}

/// A NaN in the weights a run began with came up as "go back to the last checkpoint".
#[test]
fn weights_that_are_not_finite_are_named_when_they_are_loaded() {
    for (family, tensor, param, at, place) in [
        ("llama", "model.layers.1.mlp.down_proj.weight", "layers.1.down.weight", 43, "[1, 3]"),
        ("llama", "model.layers.0.self_attn.k_proj.weight", "layers.0.qkv.weight", 32 * 32 + 5, "[0, 5]"),
        ("llama", "model.norm.weight", "final_norm.weight", 31, "[31]"),
        // Stored the other way round: row 3 of 40 columns.
        ("gpt2", "transformer.h.1.mlp.c_fc.weight", "layers.1.up.weight", 2 * 32 + 3, "[3, 2]"),
    ] {
        for (dtype, bad) in [
            (StorageFormat::F32, f32::NAN),
            (StorageFormat::Bf16, f32::NEG_INFINITY),
            (StorageFormat::F16, f32::NAN),
            (StorageFormat::F16, f32::INFINITY),
        ] {
            let temp = tempfile::tempdir().unwrap();
            let (dir, options) = (temp.path().join("model"), tiny(family));
            let config = options.build().unwrap().0;
            save_model(&dir, &config, None, &SaveOptions { dtype, ..F32 }, &mut |shape| {
                let mut values = init_param(&config, &options, shape);
                if shape.name() == param {
                    values[at] = bad;
                }
                Ok(values)
            })
            .unwrap();
            let error = ModelDir::open(&dir).unwrap().load(|_, _| Ok(())).unwrap_err();
            let text = error.to_string();
            let file = dir.join("model.safetensors").display().to_string();
            assert!(error.class == Class::Model && text.starts_with(&file), "{text}");
            assert!(text.contains(&format!("{tensor:?} holds a NaN or infinity at {place}")), "{text}");
        }
    }
}

/// Large tensors are read by several threads: the first bad number counts, whoever met it.
#[test]
fn the_first_of_several_bad_numbers_is_named() {
    let temp = tempfile::tempdir().unwrap();
    let options = InitOptions { vocab: 40_000, hidden: 64, heads: Some(4), ..tiny("llama") };
    let config = options.build().unwrap().0;
    for bad in [[2_559_999, 2_100_001], [1_048_577, 2_559_998], [1_048_575, 1_048_576]] {
        let dir = temp.path().join(format!("model-{}", bad[0]));
        save_model(&dir, &config, None, &F32, &mut |shape| {
            let mut values = vec![0.5; shape.len()];
            if shape.name() == "embed" {
                bad.iter().for_each(|&at| values[at] = f32::NAN);
            }
            Ok(values)
        })
        .unwrap();
        let first = bad[0].min(bad[1]);
        let error = ModelDir::open(&dir).unwrap().load(|_, _| Ok(())).unwrap_err().to_string();
        assert!(error.contains(&format!("at [{}, {}]", first / 64, first % 64)), "{error}");
    }
}

/// Wraps a text model as one that sees: its `config.json` inside of another, its tensors under another prefix.
fn wrap(from: &Path, to: &Path, prefix: &str, head: &str) {
    fs::create_dir_all(to).unwrap();
    let mut text: Value = serde_json::from_slice(&fs::read(from.join("config.json")).unwrap()).unwrap();
    text.as_object_mut().unwrap().remove("architectures");
    let tied = text.as_object_mut().unwrap().remove("tie_word_embeddings").unwrap();
    let whole = json!({"model_type": "llava", "architectures": ["LlavaForConditionalGeneration"],
        "text_config": text, "vision_config": {"hidden_size": 8}, "tie_word_embeddings": tied});
    fs::write(to.join("config.json"), whole.to_string()).unwrap();
    let bytes = fs::read(from.join("model.safetensors")).unwrap();
    let file = safetensors::SafeTensors::deserialize(&bytes).unwrap();
    let renamed = |name: &str| match name.strip_prefix("model.") {
        Some(bare) => format!("{prefix}{bare}"),
        None => format!("{head}{name}"),
    };
    let mut tensors: Vec<_> = file.iter().map(|(name, tensor)| (renamed(name), tensor)).collect();
    let vision = safetensors::tensor::TensorView::new(safetensors::Dtype::F32, vec![2], &[0; 8]).unwrap();
    tensors.push(("vision_tower.embeddings.weight".into(), vision));
    safetensors::serialize_to_file(tensors, None, &to.join("model.safetensors")).unwrap();
}

#[test]
fn the_text_part_of_a_model_that_sees_is_read_and_saved_alone() {
    let temp = tempfile::tempdir().unwrap();
    let styles = [
        ("language_model.model.", "language_model."),
        ("model.language_model.", ""),
        ("model.text_model.", ""),
    ];
    for (family, tied) in [("llama", false), ("qwen2", true)] {
        let plain = temp.path().join(format!("{family}-plain"));
        let options = InitOptions { tied: Some(tied), ..tiny(family) };
        let config = init_model(&plain, &options, &F32).unwrap();
        for (i, (prefix, head)) in styles.into_iter().enumerate() {
            let whole = temp.path().join(format!("{family}-{i}"));
            wrap(&plain, &whole, prefix, head);
            let dir = ModelDir::open(&whole).unwrap();
            assert_eq!(dir.config, config);
            assert_eq!(read(&whole), read(&plain));
            let saved = temp.path().join(format!("{family}-{i}-saved"));
            let values = read(&whole);
            save_model(&saved, &dir.config, Some(&dir.config_json), &F32, &mut |p| {
                Ok(values[&p.name()].clone())
            })
            .unwrap();
            assert_eq!(
                fs::read(saved.join("model.safetensors")).unwrap(),
                fs::read(plain.join("model.safetensors")).unwrap()
            );
            assert_eq!(read(&saved), read(&plain));
        }
    }
    let json = json!({"model_type": "llava", "text_config": {"model_type": "lama"}});
    fs::write(temp.path().join("llama-0").join("config.json"), json.to_string()).unwrap();
    let message = ModelDir::open(&temp.path().join("llama-0")).unwrap_err().to_string();
    assert!(message.contains("\"lama\" of the text part") && message.contains("llama"), "{message}");
}

/// The head belongs to the whole model: where that ties it and files hold none, the text part's own field had been believed.
#[test]
fn the_whole_model_says_whether_its_head_is_tied() {
    let temp = tempfile::tempdir().unwrap();
    let (plain, whole) = (temp.path().join("plain"), temp.path().join("whole"));
    let config = init_model(&plain, &InitOptions { tied: Some(true), ..tiny("mistral") }, &F32).unwrap();
    wrap(&plain, &whole, "model.language_model.", "");
    edit(&whole.join("config.json"), |json| json["text_config"]["tie_word_embeddings"] = false.into());
    let dir = ModelDir::open(&whole).unwrap();
    assert_eq!((&dir.config, &dir.config_json["tie_word_embeddings"]), (&config, &json!(true)));
    assert_eq!(read(&whole), read(&plain));
    edit(&whole.join("config.json"), |json| json["tie_word_embeddings"] = false.into());
    assert!(failure(&whole).contains("lm_head.weight"));

    // transformers writes `true` around text models that bring a head of their own.
    let (plain, whole) = (temp.path().join("own"), temp.path().join("own-whole"));
    init_model(&plain, &InitOptions { tied: Some(false), ..tiny("mistral") }, &F32).unwrap();
    wrap(&plain, &whole, "model.language_model.", "");
    edit(&whole.join("config.json"), |json| {
        json["tie_word_embeddings"] = true.into();
        json["text_config"]["tie_word_embeddings"] = false.into();
    });
    assert_eq!(read(&whole), read(&plain));
}

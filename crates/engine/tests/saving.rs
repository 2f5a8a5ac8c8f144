//! A model that was loaded and saved is the same model: for us, and for whoever reads the files.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl_engine::checkpoint::{ModelDir, SaveOptions, StorageFormat};
use ferrl_engine::model::{Model, Options};
use ferrl_kernels::open;
use safetensors::SafeTensors;
use std::collections::BTreeMap;
use std::path::Path;

/// Every tensor of a directory by name: type, shape and bytes.
fn tensors(dir: &Path) -> BTreeMap<String, (String, Vec<usize>, Vec<u8>)> {
    let mut all = BTreeMap::new();
    for file in std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()) {
        let name = file.file_name().unwrap().to_string_lossy().into_owned();
        if name.starts_with("model") && name.ends_with(".safetensors") {
            let bytes = std::fs::read(&file).unwrap();
            for (name, t) in SafeTensors::deserialize(&bytes).unwrap().tensors() {
                all.insert(name, (format!("{:?}", t.dtype()), t.shape().to_vec(), t.data().to_vec()));
            }
        }
    }
    all
}

/// Of a model that sees, the tensors of its text part under the names of a text model.
fn text_part<T>(all: BTreeMap<String, T>) -> BTreeMap<String, T> {
    const PREFIX: &str = "language_model.";
    if !all.keys().any(|name| name.starts_with(PREFIX)) {
        return all;
    }
    let bare = |(name, tensor): (String, T)| Some((name.strip_prefix(PREFIX)?.to_string(), tensor));
    all.into_iter().filter_map(bare).collect()
}

#[test]
fn what_transformers_saved_we_save_byte_for_byte() {
    let root = Path::new(env!("CARGO_MANIFEST_DIR")).join("tests/fixtures/models");
    let backend = open("cpu", Some(2)).unwrap();
    for dir in std::fs::read_dir(root).unwrap().map(|e| e.unwrap().path()) {
        let opened = ModelDir::open(&dir).unwrap();
        let model = Model::load(backend.clone(), &opened, Options::default()).unwrap();
        let reference: serde_json::Value =
            serde_json::from_slice(&std::fs::read(dir.join("reference.json")).unwrap()).unwrap();
        let dtype = match reference["storage"].as_str().unwrap() {
            "bf16" => StorageFormat::Bf16,
            "f16" => StorageFormat::F16,
            _ => StorageFormat::F32,
        };
        let temp = tempfile::tempdir().unwrap();
        let out = temp.path().join("model");
        let options = SaveOptions { dtype, overwrite: true, source: Some(&dir), ..Default::default() };
        model.save(&out, Some(&opened.config_json), &options).unwrap();
        let (before, after) = (text_part(tensors(&dir)), tensors(&out));
        assert!(before == after, "{dir:?}");
        let again = ModelDir::open(&out).unwrap();
        assert_eq!(again.config, opened.config);
    }
}

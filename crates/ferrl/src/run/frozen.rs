//! Detects changes of a run's inputs.
//!
//! A resumed run builds its reference, its initial critic and its tokenizer from model directories again, draws rows from the
//! same files and calls the same functions. If one of them had changed, the run would silently continue with another objective. A
//! checkpoint stores a checksum of each.

use super::files::error;
use super::manifest::hex;
use super::resume::plain_files;
use crate::data::DataSource;
use crate::data::hub::HubCache;
use crate::env::python::PythonEnv;
use crate::recipe::{OPTION_MODELS, Recipe, SAME_BITS};
use ferrl_engine::checkpoint::base_of;
use ferrl_engine::{Error, Result};
use regex::Regex;
use serde_json::{Map, Value, json};
use std::fs::File;
use std::io::Read;
use std::path::{Path, PathBuf};
use std::sync::LazyLock;
use xxhash_rust::xxh3::{Xxh3, xxh3_128};

/// A checksum of all files of a model's directory that determine the model.
pub fn fingerprint(dir: &Path) -> Result<String> {
    let mut files = Vec::new();
    // An adapter and its base.
    for dir in std::iter::once(dir.to_path_buf()).chain(base_of(dir)?) {
        let names = plain_files(&dir)?.into_iter().filter(|name| matters(name));
        files.extend(names.map(|name| dir.join(name)));
    }
    Ok(checksum(&files)?.0)
}

/// Weights, configuration, tokenizer and chat template; not a README or other formats of the same weights.
fn matters(name: &str) -> bool {
    [".safetensors", ".json", ".model", ".txt", ".jinja"].iter().any(|end| name.ends_with(end))
}

/// A checksum over names, lengths and bytes of files, and how many bytes they have.
fn checksum(files: &[PathBuf]) -> Result<(String, u64)> {
    let (mut hash, mut buffer, mut bytes) = (Xxh3::new(), vec![0; 1 << 20], 0);
    for path in files {
        let fail = |e: std::io::Error| error("cannot read", path, &e);
        let mut file = File::open(path).map_err(fail)?;
        let name = path.file_name().unwrap_or_default().to_string_lossy();
        let length = file.metadata().map_err(fail)?.len();
        hash.update(format!("{name}\n{length}\n").as_bytes());
        bytes += length;
        loop {
            match file.read(&mut buffer).map_err(fail)? {
                0 => break,
                n => hash.update(&buffer[..n]),
            }
        }
    }
    Ok((hex(hash.digest128()), bytes))
}

/// The inputs of a stage by their purpose: path, bytes and checksum. The recipe's paths are resolved to directories.
pub fn describe(recipe: &Recipe, start: &Path) -> Result<Value> {
    let mut out = Map::new();
    let critic = recipe.critic.path.as_ref().filter(|_| recipe.algorithm().is_ok_and(|a| a.needs().critic));
    let own = [("critic", critic), ("teacher", recipe.teacher.path.as_ref())];
    let own = own.into_iter().filter_map(|(role, path)| Some((role, Path::new(path?))));
    let judges = recipe.reward.iter().flat_map(|r| r.model_paths()).map(|p| ("reward", Path::new(p)));
    let scorer = recipe.search.model_reward();
    let scorer = scorer.iter().flat_map(|s| s.model_paths()).map(|p| ("search", Path::new(p)));
    for (role, dir) in [("starting", start)].into_iter().chain(own).chain(judges).chain(scorer) {
        let name = unique(&out, &format!("{role} model"));
        out.insert(name, json!({ "path": dir.display().to_string(), "xxh3": fingerprint(dir)? }));
    }
    let cache = HubCache::from_env();
    for (key, list) in [("data.train", &recipe.data.train), ("eval.data", &recipe.eval.data)] {
        for name in list.iter().filter(|name| !name.starts_with("task:")) {
            let source =
                if key == "eval.data" { DataSource::held_out(name) } else { DataSource::parse(name) };
            let files = source?.files(&cache)?;
            out.insert(unique(&out, &format!("{key} {name}")), entry(name, &files)?);
        }
    }
    let rewards = recipe.reward.iter().filter_map(python_file).map(|file| ("reward", file));
    for (role, file) in rewards.chain(environment_file(recipe).map(|file| ("env", file))) {
        let mut files = vec![file.clone()];
        local_imports(&file, &mut files);
        let shown = file.display().to_string();
        out.insert(unique(&out, &format!("{role} {shown}")), entry(&shown, &files)?);
    }
    for (role, options) in [("data.task", &recipe.data.task), ("env.options", &recipe.env.options)] {
        for file in options.values().flat_map(named_files) {
            let shown = file.display().to_string();
            out.insert(unique(&out, &format!("{role} {shown}")), entry(&shown, &[file])?);
        }
    }
    let values = settings(recipe).to_string();
    out.insert(SETTINGS.into(), json!({ "xxh3": hex(xxh3_128(values.as_bytes())) }));
    Ok(Value::Object(out))
}

/// The settings of a stage, where variables of the environment are their values.
const SETTINGS: &str = "settings";

/// The settings that determine training, without those compared in other ways (files by content) and those that may change.
fn settings(recipe: &Recipe) -> Value {
    let mut all = json!(recipe);
    for path in [
        "/threads", "/name", "/checkpoint", "/train/steps", "/train/epochs", "/data/train", "/data/date",
        "/eval/data", "/model/path", "/critic/path", "/teacher/path",
    ] {
        if let Some(value) = all.pointer_mut(path) {
            *value = Value::Null;
        }
    }
    for key in SAME_BITS {
        if let Some(value) = all.pointer_mut(&format!("/{}", key.replace('.', "/"))) {
            *value = Value::Null;
        }
    }
    if let Some(base) = all.pointer_mut("/adapter/base").filter(|base| *base == "host") {
        *base = json!("device");
    }
    for (reward, is) in all["reward"].as_array_mut().into_iter().flatten().zip(&recipe.reward) {
        (reward["model"], reward["python"]) = (Value::Null, Value::Null);
        if is.model_kind().is_some() {
            without_models(&mut reward["options"]);
        }
    }
    if recipe.search.model().is_some() {
        without_models(&mut all["search"]["scorer_options"]);
        all["search"]["scorer"] = Value::Null;
    }
    all
}

/// Options of a model that rewards, without the models that they name.
fn without_models(options: &mut Value) {
    for key in OPTION_MODELS {
        if let Some(path) = options.get_mut(key) {
            *path = Value::Null;
        }
    }
}

fn entry(name: &str, files: &[PathBuf]) -> Result<Value> {
    let (xxh3, bytes) = checksum(files)?;
    Ok(json!({ "path": name, "xxh3": xxh3, "bytes": bytes, "files": files.len() }))
}

/// A name that nothing has yet.
fn unique(taken: &Map<String, Value>, name: &str) -> String {
    let numbered = (2..).map(|n| format!("{name} {n}"));
    let mut names = std::iter::once(name.to_string()).chain(numbered);
    names.find(|n| !taken.contains_key(n)).unwrap_or_default()
}

fn python_file(reward: &crate::recipe::RewardSettings) -> Option<PathBuf> {
    let option = reward.options.get("file").and_then(Value::as_str).map(PathBuf::from);
    reward.python.clone().or(option.filter(|_| reward.verifier.as_deref() == Some("python")))
}

fn environment_file(recipe: &Recipe) -> Option<PathBuf> {
    match PythonEnv::file(recipe.env.path.as_deref()?) {
        PythonEnv::File(path, _) => Some(path),
        _ => None,
    }
}

/// The files that options name: documents to search, prices, questions.
fn named_files(options: &Value) -> Vec<PathBuf> {
    match options {
        Value::String(text) => Some(PathBuf::from(text)).filter(|path| path.is_file()).into_iter().collect(),
        Value::Array(list) => list.iter().flat_map(named_files).collect(),
        Value::Object(fields) => fields.values().flat_map(named_files).collect(),
        _ => Vec::new(),
    }
}

/// Adds the local modules that a Python file imports, recursively.
fn local_imports(file: &Path, found: &mut Vec<PathBuf>) {
    static IMPORT: LazyLock<Option<Regex>> =
        LazyLock::new(|| Regex::new(r"(?m)^\s*(?:from\s+\.*([\w.]+)\s+import|import\s+([\w., ]+))").ok());
    let (Some(import), Ok(text)) = (&*IMPORT, std::fs::read_to_string(file)) else { return };
    let folder = file.parent().unwrap_or(Path::new("."));
    let names = import.captures_iter(&text).filter_map(|c| c.get(1).or(c.get(2)));
    for name in names.flat_map(|names| names.as_str().split(',')) {
        let name = name.split_whitespace().next().unwrap_or_default();
        let base = folder.join(name.replace('.', "/"));
        for path in [base.with_extension("py"), base.join("__init__.py")] {
            if path.is_file() && !found.contains(&path) {
                found.push(path.clone());
                local_imports(&path, found);
            }
        }
    }
}

/// Changes since the checkpoint, as text.
pub fn changed(now: &Value, saved: &Value) -> Vec<String> {
    let mut out = Vec::new();
    for (what, was) in saved.as_object().into_iter().flatten() {
        let is = &now[what];
        if is["xxh3"] == was["xxh3"] {
            continue;
        }
        if what == SETTINGS {
            // If the recipe's text is the same, it is the variable.
            out.push(
                "settings of the stage, or a variable of the environment that they refer to (${NAME})".into(),
            );
            continue;
        }
        out.push(match (was["bytes"].as_u64(), is["bytes"].as_u64()) {
            (Some(a), Some(b)) if a != b => format!("{what} had {a} bytes and has {b}"),
            (Some(a), Some(_)) => format!("{what} has other content ({a} bytes, as before)"),
            (Some(_), None) => format!("{what} is not read any more"),
            _ => format!("the {what} is not the one this run was started with ({})", path_of(is, was)),
        });
    }
    let saved = saved.as_object();
    let new = now
        .as_object()
        .into_iter()
        .flatten()
        .filter(|(what, _)| *what != SETTINGS && saved.is_some_and(|s| !s.contains_key(*what)));
    out.extend(new.map(|(what, _)| format!("{what} is new")));
    out
}

fn path_of<'a>(is: &'a Value, was: &'a Value) -> &'a str {
    is["path"].as_str().or(was["path"].as_str()).unwrap_or_default()
}

/// The error for changed inputs.
pub fn refuse(changes: &[String]) -> Result<()> {
    if changes.is_empty() {
        return Ok(());
    }
    Err(Error::data(format!("inputs of this run have changed: {}", changes.join("; ")))
        .fix("restore them, start a new run with --name, or resume with the changes: --allow-changed"))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_python_file_brings_along_what_it_imports_from_beside_it() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path();
        std::fs::create_dir_all(dir.join("pack")).unwrap();
        let write = |name: &str, text: &str| std::fs::write(dir.join(name), text).unwrap();
        write("reward.py", "import re, helper as h\nfrom pack import thing\nimport os.path\n");
        write("helper.py", "from .deep import x\n");
        write("deep.py", "import reward\n");
        write("pack/__init__.py", "");
        write("other.py", "");
        let mut found = vec![dir.join("reward.py")];
        local_imports(&dir.join("reward.py"), &mut found);
        let mut names: Vec<String> =
            found.iter().map(|p| p.strip_prefix(dir).unwrap().display().to_string()).collect();
        names.sort();
        assert_eq!(names, ["deep.py", "helper.py", "pack/__init__.py", "reward.py"]);
    }

    /// Was: other weights of the model that scores a search were read unnoticed, and a run whose folder had moved could not be resumed
    /// where it scores with the model of an earlier stage, or rewards against one.
    #[test]
    fn models_of_scorers_and_options_are_compared_by_what_they_hold() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path();
        let model = |place: &str, weights: &str| {
            std::fs::create_dir_all(dir.join(place)).unwrap();
            std::fs::write(dir.join(place).join("model.safetensors"), weights).unwrap();
        };
        let described = |scorer: &str, reference: &str| {
            let place = |name: &str| dir.join(name).display().to_string();
            let (scorer, reference) = (place(scorer), place(reference));
            let options = format!("{{ kind = \"implicit\", reference = {reference:?} }}");
            let text = format!(
                "algo = \"grpo\"\nmodel.path = \"m\"\ndata.train = [\"task:countdown\"]\n\
                 reward = [{{ model = {scorer:?}, options = {options} }}]\n\
                 search = {{ strategy = \"mcts\", train = true, scorer = {scorer:?}, scorer_options = {options} }}\n"
            );
            let stages = Recipe::parse(&text, "r.toml", "r", &[]).unwrap().stages;
            describe(&stages[0].recipe, &dir.join("scorer")).unwrap()
        };
        model("scorer", "a");
        model("reference", "b");
        model("moved", "a");
        let saved = described("scorer", "reference");
        assert_eq!(changed(&described("moved", "reference"), &saved), Vec::<String>::new());
        model("moved", "c");
        let told = changed(&described("scorer", "moved"), &saved);
        assert!(told.iter().any(|what| what.contains("search model 2")), "{told:?}");
        assert!(!told.iter().any(|what| what.contains("settings")), "{told:?}");
        let told = changed(&described("moved", "reference"), &saved).join("; ");
        assert!(told.contains("the search model is not the one"), "{told}");
    }

    /// Was: a resumed run went on in another world, without a word.
    #[test]
    fn an_environment_and_the_files_of_a_task_are_frozen_too() {
        let temp = tempfile::tempdir().unwrap();
        let dir = temp.path();
        std::fs::create_dir_all(dir.join("start")).unwrap();
        let write = |name: &str, text: &str| {
            std::fs::write(dir.join(name), text).unwrap();
            dir.join(name).display().to_string()
        };
        let (world, docs) = (write("world.py", "import rules\n"), write("docs.jsonl", "{}\n"));
        write("rules.py", "a = 1\n");
        let mut recipe = Recipe::default();
        recipe.env.path = Some(format!("{world}:World"));
        recipe.data.task.insert("search".into(), json!({ "documents": docs, "topk": 3 }));
        let before = describe(&recipe, &dir.join("start")).unwrap();
        assert!(changed(&describe(&recipe, &dir.join("start")).unwrap(), &before).is_empty());
        write("rules.py", "a = 23\n");
        write("docs.jsonl", "{ }\n");
        let told = changed(&describe(&recipe, &dir.join("start")).unwrap(), &before).join("; ");
        assert!(told.contains("world.py had") && told.contains("docs.jsonl had"), "{told}");
    }

    #[test]
    fn every_change_is_named() {
        let of = |xxh3: &str, bytes: u64| json!({ "path": "p", "xxh3": xxh3, "bytes": bytes });
        let saved = json!({ "data.train a": of("1", 5), "data.train b": of("2", 5), "reward r": of("3", 5) });
        let now = json!({ "data.train a": of("9", 5), "data.train b": of("2", 5), "reward r": of("4", 7), "eval.data c": of("5", 1) });
        let told = changed(&now, &saved).join("; ");
        for part in ["data.train a has other content", "reward r had 5 bytes and has 7", "eval.data c is new"]
        {
            assert!(told.contains(part), "{told}");
        }
        assert!(!told.contains("data.train b"), "{told}");
        assert!(changed(&saved, &saved).is_empty() && refuse(&[]).is_ok());
        assert!(refuse(&changed(&now, &saved)).unwrap_err().to_string().contains("--allow-changed"));
    }
}

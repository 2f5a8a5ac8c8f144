//! `org/name` ids through the Hugging Face cache on disk. Downloading is the feature `hub`.

#[cfg(feature = "hub")]
pub mod download;

use std::ffi::OsString;
use std::path::{Path, PathBuf};

use ferrl_engine::{Error, Result, nearest};

use super::list;

/// What a repository of the hub holds.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Repo {
    /// Weights and a tokenizer.
    Model,
    /// Data files.
    Dataset,
}

impl Repo {
    fn folder(self) -> &'static str {
        match self {
            Repo::Model => "models",
            Repo::Dataset => "datasets",
        }
    }
    fn word(self) -> &'static str {
        match self {
            Repo::Model => "model",
            Repo::Dataset => "dataset",
        }
    }
}

/// The cache that Hugging Face's own tools fill.
#[derive(Clone, Debug)]
pub struct HubCache {
    /// The folder of `models--ORG--NAME` and `datasets--ORG--NAME`.
    pub root: PathBuf,
    /// Nothing may be fetched from the network.
    pub offline: bool,
}

impl HubCache {
    /// Where the environment says: `HF_HUB_CACHE`, else `HF_HOME/hub`, else `~/.cache/huggingface/hub`.
    pub fn from_env() -> Self {
        Self::from_vars(&|name| std::env::var_os(name))
    }

    /// The same from any set of variables.
    pub fn from_vars(var: &dyn Fn(&str) -> Option<OsString>) -> Self {
        let get = |name: &str| var(name).filter(|v| !v.is_empty()).map(PathBuf::from);
        let home = get("HOME").or_else(|| get("USERPROFILE")).unwrap_or_default();
        let expand = |path: PathBuf| path.strip_prefix("~").map(|rest| home.join(rest)).unwrap_or(path);
        let cache = || get("XDG_CACHE_HOME").unwrap_or_else(|| home.join(".cache")).join("huggingface");
        let root = get("HF_HUB_CACHE")
            .or_else(|| get("HUGGINGFACE_HUB_CACHE"))
            .unwrap_or_else(|| get("HF_HOME").unwrap_or_else(cache).join("hub"));
        let on =
            |v: OsString| ["1", "true", "yes", "on"].contains(&v.to_string_lossy().to_lowercase().as_str());
        HubCache { root: expand(root), offline: var("HF_HUB_OFFLINE").is_some_and(on) }
    }

    /// The snapshot folder of a repository; `revision` is a branch, tag or commit and `main` by default.
    pub fn resolve(&self, repo: Repo, id: &str, revision: Option<&str>) -> Result<PathBuf> {
        if !is_id(id) {
            return Err(Error::usage(format!("{id:?} is not a name on the Hugging Face hub"))
                .fix("write it as org/name, with letters, digits, and single - _ . inside"));
        }
        let revision = revision.unwrap_or("main");
        if revision.split('/').any(|part| !is_segment(part)) {
            return Err(Error::usage(format!("{revision:?} is not a revision"))
                .at(id)
                .fix("give a branch, a tag or a commit"));
        }
        self.cached(repo, id, revision)
            .or_else(|error| self.fetched(repo, id, revision).unwrap_or(Err(error)))
    }

    pub(super) fn folder(&self, repo: Repo, id: &str) -> PathBuf {
        self.root.join(format!("{}--{}", repo.folder(), id.replace('/', "--")))
    }

    /// What the hub gives, where this build downloads and the environment lets it.
    #[cfg(feature = "hub")]
    fn fetched(&self, repo: Repo, id: &str, revision: &str) -> Option<Result<PathBuf>> {
        if self.offline {
            return None;
        }
        let hub = download::Hub::from_env();
        Some(hub.snapshot(self, (repo, id, revision), &|name| wanted(repo, name)))
    }

    #[cfg(not(feature = "hub"))]
    fn fetched(&self, _: Repo, _: &str, _: &str) -> Option<Result<PathBuf>> {
        None
    }

    fn cached(&self, repo: Repo, id: &str, revision: &str) -> Result<PathBuf> {
        let folder = self.folder(repo, id);
        if !folder.is_dir() {
            return Err(self.missing(repo, id));
        }
        let reference = folder.join("refs").join(revision);
        let commit = match std::fs::read_to_string(&reference) {
            Ok(text) => text.trim().to_owned(),
            Err(_) => revision.to_owned(),
        };
        if !is_segment(&commit) {
            return Err(Error::data(format!("holds {commit:?}, expected a commit"))
                .at(reference.display())
                .fix("remove the folder from the cache and download it again"));
        }
        let snapshot = folder.join("snapshots").join(&commit);
        if snapshot.is_dir() {
            return Ok(snapshot);
        }
        let have = names(&folder.join("refs")).into_iter().chain(names(&folder.join("snapshots")));
        let have: Vec<String> = have.collect();
        Err(Error::data(format!("revision {revision:?} is not in the cache, which has {}", list(&have)))
            .at(folder.display())
            .fix(format!("{} --revision {revision}", download(repo, id))))
    }

    /// Refuses a file of the cache whose links lead out of it.
    pub fn contains(&self, path: &Path) -> Result<()> {
        let real = |p: &Path| {
            p.canonicalize().map_err(|e| {
                Error::data(format!("is not all there: {e}"))
                    .at(p.display())
                    .fix("the download was not finished: download it again")
            })
        };
        if real(path)?.starts_with(real(&self.root)?) {
            return Ok(());
        }
        Err(Error::data("is a link that leads out of the Hugging Face cache")
            .at(path.display())
            .fix("give the file's own path instead of the name on the hub"))
    }

    fn missing(&self, repo: Repo, id: &str) -> Error {
        let prefix = format!("{}--", repo.folder());
        let have: Vec<String> = names(&self.root)
            .iter()
            .filter_map(|n| n.strip_prefix(&prefix).map(|n| n.replacen("--", "/", 1)))
            .collect();
        let near = nearest(id, have.iter().map(String::as_str));
        let near = near.map(|n| format!("did you mean {n:?}? otherwise ")).unwrap_or_default();
        let build = if cfg!(feature = "hub") { "" } else { " (or build ferrl with --features hub)" };
        let offline = if self.offline { " (HF_HUB_OFFLINE is set)" } else { "" };
        Error::data(format!(
            "the {} {id:?} is neither a path nor in the Hugging Face cache{offline}",
            repo.word()
        ))
        .at(self.root.display())
        .fix(format!(
            "{near}run `{}` where there is a network{build}, or point HF_HUB_CACHE at a cache that has it, or give \
             the path of a local copy",
            download(repo, id)
        ))
    }
}

/// The directory of a model: the path itself where it exists, else the snapshot of `org/name` in the cache.
pub fn model_dir(path: &Path) -> Result<PathBuf> {
    if let Some(error) = ferrl_engine::checkpoint::foreign(path) {
        return Err(error);
    }
    if let Some(model) = of_run(path) {
        return model;
    }
    let text = path.to_string_lossy();
    // One word is a folder that is missing: the hub's models all have an owner now.
    let named = text.contains('/') && is_id(&text) && !path.exists();
    if !named || path.parent().is_some_and(|parent| parent.is_dir()) {
        return Ok(path.to_path_buf());
    }
    let cache = HubCache::from_env();
    cache.resolve(Repo::Model, &text, None)
}

/// The model of a run folder, its newest, or of one of its checkpoints.
fn of_run(path: &Path) -> Option<Result<PathBuf>> {
    if !path.is_dir() || path.join("config.json").exists() {
        return None;
    }
    if path.join("model").join("config.json").is_file() {
        return Some(Ok(path.join("model")));
    }
    let left = ["metrics.jsonl", "stages", "checkpoints"].iter().any(|name| path.join(name).exists());
    let run = path.join("recipe.toml").is_file() && left;
    run.then(|| crate::run::newest_model(path).map(|newest| newest.model))
}

/// Whether a file of a repository is needed: what a model directory holds, or any file of data.
#[cfg(feature = "hub")]
pub fn wanted(repo: Repo, name: &str) -> bool {
    match repo {
        Repo::Model => {
            let part = [".json", ".safetensors", ".jinja", ".txt"].iter().any(|end| name.ends_with(end));
            part && !name.contains('/')
        }
        Repo::Dataset => super::known(Path::new(name)) && !super::is_text(Path::new(name)),
    }
}

/// Whether a text is a name the hub would accept: `name` or `org/name`.
pub fn is_id(text: &str) -> bool {
    let parts: Vec<&str> = text.split('/').collect();
    parts.len() <= 2 && text.len() <= 96 && parts.iter().all(|p| is_segment(p)) && !text.contains("--")
}

/// A name that is one ordinary path component.
fn is_segment(text: &str) -> bool {
    let inside = |c: char| c.is_ascii_alphanumeric() || matches!(c, '-' | '_' | '.');
    !text.is_empty() && text.chars().all(inside) && !text.starts_with(['.', '-']) && !text.contains("..")
}

fn download(repo: Repo, id: &str) -> String {
    match repo {
        Repo::Model => format!("hf download {id}"),
        Repo::Dataset => format!("hf download {id} --repo-type dataset"),
    }
}

fn names(folder: &Path) -> Vec<String> {
    let entries = std::fs::read_dir(folder).into_iter().flatten().flatten();
    let mut names: Vec<String> = entries.map(|e| e.file_name().to_string_lossy().into_owned()).collect();
    names.sort();
    names
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn repository_ids_with_path_tricks_are_refused() {
        for good in ["gpt2", "Qwen/Qwen2.5-0.5B", "a/b_c", "open-r1/x.y"] {
            assert!(is_id(good), "{good}");
        }
        for bad in [
            "", "/", "a/", "/a", "a/b/c", "../x", "a/..", "a/.b", "a/b..c", "a\\b/c", "a--b/c", "a/-b",
            "a b/c",
        ] {
            assert!(!is_id(bad), "{bad}");
        }
    }

    #[test]
    fn the_environment_decides_in_order() {
        let cache = |vars: &[(&str, &str)]| {
            let vars: Vec<(String, String)> =
                vars.iter().map(|(k, v)| (k.to_string(), v.to_string())).collect();
            HubCache::from_vars(&move |name| vars.iter().find(|(k, _)| k == name).map(|(_, v)| v.into()))
        };
        let home = ("HOME", "/home/u");
        assert_eq!(cache(&[home]).root, Path::new("/home/u/.cache/huggingface/hub"));
        assert_eq!(cache(&[home, ("HF_HOME", "/big/hf")]).root, Path::new("/big/hf/hub"));
        let both = cache(&[home, ("HF_HOME", "/big/hf"), ("HF_HUB_CACHE", "~/hub"), ("HF_HUB_OFFLINE", "1")]);
        assert_eq!(both.root, Path::new("/home/u/hub"));
        assert!(both.offline);
        assert!(!cache(&[home, ("HF_HUB_OFFLINE", "0")]).offline);
    }
}

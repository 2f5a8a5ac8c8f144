//! Where data comes from: `path`, `folder`, `*.glob`, `org/name`, `suite:name`, each with an optional `split@` before it.

use std::path::{Component, Path, PathBuf};

use ferrl_engine::{Error, Result, nearest};

use super::hub::{HubCache, Repo, is_id};
use super::{FORMATS, extension, is_text, known, list};
use crate::suite;

/// One set of files, read as one dataset.
#[derive(Clone, Debug, PartialEq)]
pub struct DataSource {
    /// A file, a folder, a glob, or `org/name` (with more path components for a part of it).
    pub path: String,
    /// The part of a folder to read: `train`, `test` or any name its files carry.
    pub split: Option<String>,
    /// Rows to take, as in `train[:1000]@path`.
    pub slice: Option<RowSlice>,
    /// Branch, tag or commit of `org/name`.
    pub revision: Option<String>,
    /// The suite whose published rows these are, by its name.
    pub suite: Option<&'static str>,
}

/// The split that is all files of a folder.
const ALL: &str = "*";

/// A range of rows; each end is a number of rows or a percentage, from the back when negative.
#[derive(Clone, Copy, Debug, PartialEq)]
pub struct RowSlice {
    /// The first row.
    pub start: Option<Bound>,
    /// One past the last row.
    pub end: Option<Bound>,
}

/// One end of a slice.
#[derive(Clone, Copy, Debug, PartialEq)]
pub enum Bound {
    Rows(i64),
    /// A percentage of the rows.
    Percent(f64),
}

/// Words that mean a split in the names of files and folders.
const SPLITS: [(&str, &[&str]); 3] = [
    ("train", &["train", "training"]),
    ("validation", &["validation", "valid", "val", "dev"]),
    ("test", &["test", "testing", "eval", "evaluation"]),
];

/// Files that describe a dataset and hold none of it.
const NOT_DATA: [&str; 5] =
    ["dataset_info.json", "dataset_infos.json", "dataset_dict.json", "state.json", "metadata.json"];

impl DataSource {
    /// Reads `path` or `split@path` or `split[a:b]@path`; a suite without a split is its rows to train on.
    pub fn parse(text: &str) -> Result<Self> {
        Self::suite(text, false).unwrap_or_else(|| Self::plain(text))
    }

    /// The same for what is evaluated on: a suite without a split is its rows to test on.
    pub fn held_out(text: &str) -> Result<Self> {
        Self::suite(text, true).unwrap_or_else(|| Self::plain(text))
    }

    /// `suite:NAME` or `suite:NAME=SOURCE`, with an optional split before it; none where the text is no suite.
    fn suite(text: &str, held_out: bool) -> Option<Result<Self>> {
        let (front, rest) = match text.strip_prefix(suite::PREFIX) {
            Some(rest) => (None, rest),
            None => {
                text.split_once('@').and_then(|(f, p)| Some((Some(f), p.strip_prefix(suite::PREFIX)?)))?
            }
        };
        let (name, given) = rest.split_once('=').map_or((rest, None), |(name, path)| (name, Some(path)));
        Some(suite::find(name).and_then(|entry| Self::of_suite(entry, front, given, held_out)))
    }

    fn of_suite(
        entry: &'static suite::Entry,
        front: Option<&str>,
        given: Option<&str>,
        held_out: bool,
    ) -> Result<Self> {
        let own = given.map(Self::plain).transpose()?;
        let before = front.map(|f| Self::plain(&format!("{f}@{}", entry.name))).transpose()?;
        let asked = before.as_ref().or(own.as_ref()).and_then(|s| s.split.clone());
        let split = match asked.as_deref() {
            Some("train") => entry.train,
            Some("test") => entry.test,
            Some(_) => asked.as_deref(),
            None if held_out => entry.test,
            None => entry.train,
        };
        let mut source =
            own.unwrap_or_else(|| DataSource::whole(&format!("{}{}", suite::PREFIX, entry.name)));
        if let Some(before) = before {
            source.slice = before.slice;
        }
        source.suite = Some(entry.name);
        // One file is what it is; of a folder and of the hub the right rows have to be chosen.
        let chosen = given.is_none() || Path::new(&source.path).is_dir();
        if chosen && split.is_none() {
            let has = if entry.train.is_none() { "test" } else { "train" };
            return Err(Error::usage(format!("{} has rows to {has} on and no others", entry.name))
                .at(format!("{}{}", suite::PREFIX, entry.name))
                .fix(format!("another suite, or {has}@suite:{} to use them all the same", entry.name)));
        }
        source.split = split.filter(|_| chosen).map(String::from);
        Ok(source)
    }

    fn whole(path: &str) -> Self {
        DataSource { path: path.to_owned(), split: None, slice: None, revision: None, suite: None }
    }

    fn plain(text: &str) -> Result<Self> {
        let whole = Self::whole;
        if text.is_empty() {
            return Err(Error::usage("an empty name for data").fix("give a file, a folder or org/name"));
        }
        let Some((split, path)) = text.split_once('@').filter(|(s, _)| !s.contains(['/', '\\'])) else {
            return Ok(whole(text));
        };
        if Path::new(text).exists() {
            return Ok(whole(text));
        }
        let bad = |what: &str| {
            Error::usage(format!("{what} in {text:?}"))
                .fix("write split@path, as in train@data/ or train[:1000]@data/ or test[-5%:]@org/name")
        };
        let (name, slice) = match split.split_once('[') {
            None => (split, None),
            Some((name, range)) => {
                let range = range.strip_suffix(']').and_then(|r| r.split_once(':'));
                let (start, end) = range.ok_or_else(|| bad("a range of rows that is not [start:end]"))?;
                let bound =
                    |text: &str| Bound::parse(text).ok_or_else(|| bad("a range that is not of numbers"));
                (name, Some(RowSlice { start: bound(start)?, end: bound(end)? }))
            }
        };
        if name.is_empty() || path.is_empty() {
            return Err(bad("a split or a path is missing"));
        }
        Ok(DataSource { split: Some(name.to_owned()), slice, ..whole(path) })
    }

    /// The files of the source, in a fixed order.
    pub fn files(&self, cache: &HubCache) -> Result<Vec<PathBuf>> {
        if let Some(entry) = suite::named(&self.path) {
            return self.published(entry, cache);
        }
        let path = Path::new(&self.path);
        if path.is_file() {
            return self.single(path);
        }
        if path.is_dir() {
            return self.folder(path);
        }
        if let Some(error) = not_a_file(path) {
            return Err(error);
        }
        if self.path.contains(['*', '?', '[']) {
            return self.glob();
        }
        let parts: Vec<&str> = self.path.split('/').collect();
        let id = parts[..parts.len().min(2)].join("/");
        if parts.len() < 2 || !is_id(&id) || known(path) {
            return Err(missing(path));
        }
        let inside: PathBuf = parts[2..].iter().collect();
        if inside.components().any(|c| !matches!(c, Component::Normal(_))) {
            return Err(Error::usage(format!("{:?} leads out of {id}", self.path))
                .fix("give a folder or file inside the dataset"));
        }
        let snapshot = cache.resolve(Repo::Dataset, &id, self.revision.as_deref())?;
        let target = snapshot.join(inside);
        let files = if target.is_file() { vec![target] } else { self.folder(&target)? };
        files.iter().try_for_each(|f| cache.contains(f))?;
        Ok(files)
    }

    /// The files of a suite as they are in the hub's cache.
    fn published(&self, entry: &suite::Entry, cache: &HubCache) -> Result<Vec<PathBuf>> {
        let absent = |e: Error| {
            e.at(&self.path).fix(format!(
                "run `{}` where there is a network, or name the file: suite:{}=PATH",
                entry.download(),
                entry.name
            ))
        };
        let snapshot = cache.resolve(Repo::Dataset, entry.repo, self.revision.as_deref()).map_err(absent)?;
        let parts = if entry.parts.is_empty() { &[""] } else { entry.parts };
        let mut files = Vec::new();
        for part in parts {
            let target = snapshot.join(part);
            match target.is_file() {
                true => files.push(target),
                false => files.extend(self.folder(&target).map_err(absent)?),
            }
        }
        files.iter().try_for_each(|f| cache.contains(f))?;
        Ok(files)
    }

    fn single(&self, path: &Path) -> Result<Vec<PathBuf>> {
        let fits = |split: &str| split == "train" || position(&label(path), split, true).is_some();
        match &self.split {
            Some(split) if !fits(split) => {
                Err(Error::usage(format!("one file is one split, and it is not named {split:?}"))
                    .at(path.display())
                    .fix("leave the split out, or give the folder"))
            }
            _ => Ok(vec![path.to_owned()]),
        }
    }

    fn glob(&self) -> Result<Vec<PathBuf>> {
        let bad =
            |what: String| Error::usage(what).at(&self.path).fix("check the pattern: *, ?, [abc] and **");
        let options = glob::MatchOptions { require_literal_leading_dot: true, ..Default::default() };
        let found =
            glob::glob_with(&self.path, options).map_err(|e| bad(format!("is not a pattern: {}", e.msg)))?;
        let mut files: Vec<PathBuf> = found.flatten().filter(|p| p.is_file()).collect();
        files.sort();
        if let Some(split) = &self.split {
            files.retain(|f| position(&label(f), split, false).is_some());
        }
        if files.is_empty() {
            return Err(bad("no file matches".into()));
        }
        Ok(files)
    }

    fn folder(&self, folder: &Path) -> Result<Vec<PathBuf>> {
        let mut files = Vec::new();
        walk(folder, &mut files)?;
        // Beside tables, a text is a licence or a note.
        if files.iter().any(|f| !is_text(f)) {
            files.retain(|f| !is_text(f));
        }
        files.sort();
        let labels: Vec<Vec<String>> =
            files.iter().map(|f| label(f.strip_prefix(folder).unwrap_or(f))).collect();
        let kept = self.choose(&labels).map_err(|e| e.at(folder.display()))?;
        let files: Vec<PathBuf> = kept.into_iter().map(|i| files[i].clone()).collect();
        let format = |f: &PathBuf| {
            FORMATS.iter().find(|x| x.extensions().contains(&extension(f).as_str())).map(|x| x.name())
        };
        let mut formats: Vec<&str> = files.iter().filter_map(format).collect();
        formats.sort();
        formats.dedup();
        if formats.len() > 1 {
            return Err(Error::data(format!("mixes files of {}", list(&formats)))
                .at(folder.display())
                .fix("give a pattern for the ones you mean, as in folder/*.jsonl"));
        }
        Ok(files)
    }

    /// Which files of a folder belong to the split; without one, `train` where files are named so, else all.
    fn choose(&self, labels: &[Vec<String>]) -> Result<Vec<usize>> {
        if labels.is_empty() {
            let names: Vec<&str> = FORMATS.iter().flat_map(|f| f.extensions()).copied().collect();
            return Err(Error::data(format!("no data files here, expected {}", list(&names)))
                .fix("give the folder that holds them"));
        }
        if self.split.as_deref() == Some(ALL) {
            return Ok((0..labels.len()).collect());
        }
        let wanted = self.split.as_deref().unwrap_or("train");
        for exact in [true, false] {
            let place = |l: &Vec<String>| position(l, wanted, exact).map(|p| l[..=p].join("/"));
            let found: Vec<(usize, String)> =
                labels.iter().enumerate().filter_map(|(i, l)| Some((i, place(l)?))).collect();
            let mut names: Vec<&str> = found.iter().map(|(_, n)| n.as_str()).collect();
            names.sort();
            names.dedup();
            if names.len() > 1 {
                return Err(Error::usage(format!("several parts are {wanted:?}: {}", list(&names)))
                    .fix("name one: a subfolder in the path, or the whole name of the split before the @"));
            }
            if !found.is_empty() {
                return Ok(found.into_iter().map(|(i, _)| i).collect());
            }
        }
        let mut have: Vec<&str> = labels.iter().filter_map(|l| l.last()).map(String::as_str).collect();
        have.sort();
        have.dedup();
        let other = |l: &Vec<String>| SPLITS.iter().any(|(s, _)| position(l, s, false).is_some());
        match &self.split {
            None if !labels.iter().any(other) => Ok((0..labels.len()).collect()),
            None => Err(Error::usage(format!("has no split named train; its files are {}", list(&have)))
                .fix("say which one before an @, as in test@folder")),
            Some(split) => {
                let near = nearest(split, have.iter().copied()).map(|n| format!("did you mean {n:?}? "));
                Err(Error::usage(format!("has no split {split:?}; its files are {}", list(&have)))
                    .fix(format!("{}name one of them before the @", near.unwrap_or_default())))
            }
        }
    }
}

impl Bound {
    fn parse(text: &str) -> Option<Option<Bound>> {
        match text.trim().strip_suffix('%') {
            _ if text.trim().is_empty() => Some(None),
            Some(percent) => {
                percent.parse().ok().filter(|p: &f64| p.abs() <= 100.0).map(|p| Some(Bound::Percent(p)))
            }
            None => text.trim().parse().ok().map(|rows| Some(Bound::Rows(rows))),
        }
    }

    fn index(self, count: usize) -> usize {
        let rows = match self {
            Bound::Rows(rows) => rows,
            Bound::Percent(percent) => (percent / 100.0 * count as f64).round() as i64,
        };
        let index = if rows < 0 { count as i64 + rows } else { rows };
        index.clamp(0, count as i64) as usize
    }
}

impl RowSlice {
    /// The rows it takes out of `count`.
    pub fn range(&self, count: usize) -> std::ops::Range<usize> {
        let start = self.start.map_or(0, |b| b.index(count));
        let end = self.end.map_or(count, |b| b.index(count));
        start..end.max(start)
    }
}

/// The folders of a path and its file name without extension and `-00000-of-00004`.
fn label(path: &Path) -> Vec<String> {
    let mut parts: Vec<String> = path.parent().map_or(Vec::new(), |p| {
        p.components().map(|c| c.as_os_str().to_string_lossy().into_owned()).collect()
    });
    let stem = path.file_stem().map(|s| s.to_string_lossy().into_owned()).unwrap_or_default();
    let digits = |s: &str| !s.is_empty() && s.chars().all(|c| c.is_ascii_digit());
    let shard = stem.rsplit_once("-of-").and_then(|(front, count)| {
        let (name, index) = front.rsplit_once('-')?;
        (digits(count) && digits(index)).then(|| name.to_owned())
    });
    parts.push(shard.unwrap_or(stem));
    parts
}

/// Which part of a label names the split: as a whole, or as one of its words.
fn position(label: &[String], split: &str, exact: bool) -> Option<usize> {
    let one = [split];
    let words = SPLITS.iter().find(|(name, _)| *name == split).map_or(&one[..], |(_, words)| words);
    label.iter().position(|part| {
        part == split || (!exact && part.split(['-', '_', '.', ' ']).any(|w| words.contains(&w)))
    })
}

/// Data files below a folder, without hidden files and descriptions of the data.
fn walk(folder: &Path, files: &mut Vec<PathBuf>) -> Result<()> {
    let entries = std::fs::read_dir(folder).map_err(|e| super::unreadable(folder, &e))?;
    for entry in entries {
        let path = entry.map_err(|e| super::unreadable(folder, &e))?.path();
        let name = path.file_name().map(|n| n.to_string_lossy().into_owned()).unwrap_or_default();
        if name.starts_with('.') || NOT_DATA.contains(&name.as_str()) {
            continue;
        }
        if path.is_dir() {
            // A link to a folder could lead round in a circle.
            if !path.is_symlink() {
                walk(&path, files)?;
            }
        } else if known(&path) {
            // A link of the Hugging Face cache that leads nowhere is a download that was not finished; the cache says so.
            let cached = path.is_symlink() && path.components().any(|c| c.as_os_str() == "snapshots");
            if let Some(error) = not_a_file(&path).filter(|_| !cached) {
                return Err(error);
            }
            files.push(path);
        }
    }
    Ok(())
}

/// What there is instead of a file of data.
fn not_a_file(path: &Path) -> Option<Error> {
    let (is, fix) = match (path.metadata(), path.symlink_metadata()) {
        (Ok(m), _) if m.is_file() || m.is_dir() => return None,
        (Ok(m), _) => {
            (special(&m.file_type()).to_string(), "write the rows to a file: they are read more than once")
        }
        (Err(e), Ok(m)) if m.is_symlink() => {
            let target = std::fs::read_link(path).map_or(String::new(), |t| format!(" to {}", t.display()));
            (format!("a link{target} that cannot be followed ({e})"), "name the file itself")
        }
        (Err(e), Ok(_)) => return Some(super::unreadable(path, &e)),
        (Err(_), Err(_)) => return None,
    };
    Some(Error::data(format!("is not a regular file but {is}")).at(path.display()).fix(fix))
}

#[cfg(unix)]
fn special(kind: &std::fs::FileType) -> &'static str {
    use std::os::unix::fs::FileTypeExt;
    match () {
        () if kind.is_fifo() => "a pipe",
        () if kind.is_socket() => "a socket",
        () => "a device",
    }
}

#[cfg(not(unix))]
fn special(_kind: &std::fs::FileType) -> &'static str {
    "a device"
}

/// The accepted entry of the path's folder whose name is nearest to the path's ("did you mean").
pub fn nearest_path(path: &Path, fits: impl Fn(&str) -> bool) -> Option<PathBuf> {
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    let name = path.file_name()?.to_str()?;
    let entries = std::fs::read_dir(parent).ok()?.filter_map(|e| e.ok()?.file_name().into_string().ok());
    // A link that leads nowhere is there, and is not what was meant.
    let mut names: Vec<String> = entries.filter(|n| n != name && !n.starts_with('.') && fits(n)).collect();
    names.sort_unstable();
    Some(path.with_file_name(nearest(name, names.iter().map(String::as_str))?))
}

fn missing(path: &Path) -> Error {
    if let Some(error) = not_a_file(path) {
        return error;
    }
    let parent = path.parent().filter(|p| !p.as_os_str().is_empty()).unwrap_or(Path::new("."));
    Error::data("there is no such file or folder").at(path.display()).fix(
        match nearest_path(path, |_| true) {
            Some(near) => format!("did you mean {:?}?", near.display().to_string()),
            None if parent.is_dir() => format!("look at what {} holds", parent.display()),
            None => format!("the folder {} does not exist either", parent.display()),
        },
    )
}

//! One HTML file that shows a run, or several runs in the same charts. It needs nothing but a browser.
//!
//! The numbers go into the page as JSON and are drawn there; nothing that a model or a recipe wrote becomes markup.

mod collect;
mod figures;
mod groups;
mod page;
mod rollouts;
mod trees;

pub use trees::trees;

use crate::run::files::error;
use crate::run::{MetricsLog, StepRecord, ensure_run, journal};
use ferrl_engine::files::write_whole;
use ferrl_engine::{Error, Result, counted};
use page::{MARK, Page};
use serde_json::{Value, json};
use std::fs;
use std::path::{Path, PathBuf};

/// What a report reads of a run folder.
struct Run {
    name: String,
    /// `recipe.toml` as it is.
    recipe: String,
    history: Vec<StepRecord>,
    log: Vec<Value>,
}

impl Run {
    fn read(dir: &Path) -> Result<Run> {
        let recipe_path = dir.join("recipe.toml");
        ensure_run(dir)?;
        let recipe = fs::read_to_string(&recipe_path).map_err(|e| error("cannot read", &recipe_path, &e))?;
        let metrics = dir.join("metrics.jsonl");
        let mut history = if metrics.exists() { MetricsLog::history(&metrics)? } else { Vec::new() };
        history.iter_mut().for_each(join_evaluations);
        let absolute = fs::canonicalize(dir).unwrap_or_else(|_| dir.into());
        let name = absolute.file_name().unwrap_or_default().to_string_lossy().into_owned();
        Ok(Run { name, recipe, history, log: journal::read(dir)? })
    }
}

/// Writes the report of one run, or of a folder of search trees, `report.html` in its folder unless `out` names another file;
/// returns its path.
pub fn report(run_dir: &Path, out: Option<&Path>) -> Result<PathBuf> {
    if !run_dir.join("recipe.toml").is_file() && crate::search::has_trees(run_dir) {
        return trees(&crate::search::replay(run_dir)?.records, out.unwrap_or(&run_dir.join("report.html")));
    }
    let run = Run::read(run_dir)?;
    let mut data = json!({
        "runs": [collect::run_data(&run)],
        "groups": [run.name],
        "about": collect::descriptions(&[&run]),
    });
    rollouts::add(&mut data, &run_dir.join("rollouts"))?;
    let page = Page {
        title: &run.name,
        warnings: &warnings(&[&run]),
        figures: &figures::figures(&run.history),
        recipe: Some(&run.recipe),
        data: &data,
    };
    write(&page.html(), out.unwrap_or(&run_dir.join("report.html")))
}

/// Writes one page with the curves of several runs, `compare.html` in the current folder unless `out` names another file;
/// returns its path.
pub fn compare(run_dirs: &[PathBuf], out: Option<&Path>) -> Result<PathBuf> {
    let mut runs = run_dirs.iter().map(|dir| Run::read(dir)).collect::<Result<Vec<Run>>>()?;
    groups::name_apart(&mut runs, run_dirs);
    let groups = groups::group(&runs);
    let all: Vec<&Run> = runs.iter().collect();
    let of_run = |(run, &group): (&Run, &usize)| {
        let mut one = collect::run_data(run);
        one["group"] = json!(group);
        one["seed"] = groups::seed(run);
        one
    };
    let mut curves: Vec<Value> = runs.iter().zip(&groups.of_run).map(of_run).collect();
    collect::condense(&mut curves);
    let data = json!({
        "runs": curves,
        "groups": groups.names,
        "differences": groups.differences,
        "about": collect::descriptions(&all),
    });
    let title = counted(runs.len(), "run");
    let page = Page { title: &title, warnings: &warnings(&all), figures: &[], recipe: None, data: &data };
    write(&page.html(), out.unwrap_or(Path::new("compare.html")))
}

/// A page of Ferrl is written over an older one, but over no other file.
fn write(html: &str, path: &Path) -> Result<PathBuf> {
    writable(path)?;
    write_whole(path, html.as_bytes()).map_err(|e| error("cannot write", path, &e))?;
    Ok(path.into())
}

/// Refuses a path where no page can be written: a folder, a file of something else, or one in a folder that is not there.
pub fn writable(path: &Path) -> Result<()> {
    let refuse = |what: &str, fix: String| Err(Error::usage(what).at(path.display()).fix(fix));
    if path.is_dir() {
        return refuse("is a folder, expected a file", path.join("report.html").display().to_string());
    }
    match path.parent().filter(|folder| !folder.as_os_str().is_empty() && !folder.is_dir()) {
        Some(folder) => refuse("its folder does not exist", format!("mkdir -p {}", folder.display())),
        None if fs::read(path).is_ok_and(|old| !String::from_utf8_lossy(&old).contains(MARK)) => {
            refuse("the file exists and is not a report of Ferrl", "another file, or remove this one".into())
        }
        None => Ok(()),
    }
}

/// An evaluation before a stage's first step is the first point of the same curve.
fn join_evaluations(record: &mut StepRecord) {
    for i in 0..record.metrics.len() {
        let joined = record.metrics[i].0.strip_prefix("eval_start/").map(|what| format!("eval/{what}"));
        if let Some(joined) = joined.filter(|name| record.get(name).is_none()) {
            record.metrics[i].0 = joined;
        }
    }
}

/// Maximum number of warnings and errors in a page.
const WARNINGS: usize = 50;

/// Level, message and fix of every warning and error in the runs' logs, each once.
fn warnings(runs: &[&Run]) -> Vec<[String; 3]> {
    let mut out: Vec<[String; 3]> = Vec::new();
    for run in runs {
        for line in run.log.iter().filter(|l| l["level"] == "warning" || l["level"] == "error") {
            let text = |key: &str| line[key].as_str().unwrap_or_default().to_string();
            let of = if runs.len() > 1 { format!("{}: ", run.name) } else { String::new() };
            let item = [text("level"), format!("{of}{}", text("message")), text("fix")];
            if !out.contains(&item) && out.len() < WARNINGS {
                out.push(item);
            }
        }
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The committed comparison is drawn by the scripts of today. Its runs are not in the repository; its numbers are in the
    /// page itself, so `FERRL_REDRAW=1 cargo test --release -p ferrl --lib report` writes it anew.
    #[test]
    fn the_committed_comparison_is_current() {
        let path = Path::new(env!("CARGO_MANIFEST_DIR")).join("../../docs/compare.html");
        let old = fs::read_to_string(&path).unwrap();
        let between = |from: &str, to: &str| {
            let start = old.find(from).unwrap() + from.len();
            old[start..start + old[start..].find(to).unwrap()].to_string()
        };
        let data: Value = serde_json::from_str(&between("type=\"application/json\">", "</script>")).unwrap();
        let title = between("<title>", page::MARK);
        let new = Page { title: &title, warnings: &[], figures: &[], recipe: None, data: &data }.html();
        if std::env::var_os("FERRL_REDRAW").is_some() {
            fs::write(&path, &new).unwrap();
        }
        assert!(new == fs::read_to_string(&path).unwrap(), "docs/compare.html is old: see this test");
    }
}

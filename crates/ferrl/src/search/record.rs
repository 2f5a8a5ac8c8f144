//! Saved searches: tree and figures as `tree-N.json`, and the replay of such files without a model.

use super::{ChoiceRule, Node, Tree, strategy};
use crate::evaluate::estimate::{interval, mean};
use ferrl_engine::{Error, Result, counted};
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::path::{Path, PathBuf};

/// The search for one prompt.
#[derive(Clone, Debug, PartialEq, Serialize, Deserialize)]
pub struct Record {
    /// The prompt's number.
    pub index: u64,
    pub prompt: String,
    pub strategy: String,
    /// Its options, defaults filled in.
    pub options: Map<String, Value>,
    pub scorer: String,
    /// Facts that determined defaults of options.
    pub facts: Facts,
    pub seed: u64,
    /// All nodes, the root first.
    pub nodes: Tree,
    pub answer: String,
    /// The node where that completion ends.
    pub answer_node: Option<usize>,
    pub reward: Option<f64>,
    /// Whether it is right, if known.
    pub correct: Option<bool>,
    /// Tokens sampled, those of rejected and merged draws and of asked answers included.
    pub generated_tokens: u64,
    /// Prefix tokens found in the KV cache.
    pub shared_tokens: u64,
    /// Its time in seconds: that of concurrent searches is divided equally.
    pub seconds: f64,
}

/// Facts that determine defaults.
#[derive(Clone, Copy, Debug, Default, PartialEq, Serialize, Deserialize)]
pub struct Facts {
    /// A budget of tokens ended the search.
    pub budgeted: bool,
    /// The scorer scores prefixes.
    pub judges_steps: bool,
    /// The scorer is not the model's own probability.
    pub informed: bool,
    /// An episode of several turns was searched.
    #[serde(default)]
    pub turns: bool,
}

impl Record {
    /// Writes it as `tree-N.json` into a folder that exists.
    pub fn save(&self, dir: &Path) -> Result<PathBuf> {
        let path = dir.join(format!("tree-{}.json", self.index));
        let failed = |e: std::io::Error| Error::usage(format!("cannot write: {e}")).at(path.display());
        let text = serde_json::to_vec(self).map_err(|e| Error::data(format!("cannot write a tree: {e}")))?;
        let part = path.with_extension("json.part");
        std::fs::write(&part, text).and_then(|()| std::fs::rename(&part, &path)).map_err(failed)?;
        Ok(path)
    }

    pub fn load(path: &Path) -> Result<Self> {
        let failed = |e: std::io::Error| Error::data(format!("cannot read: {e}")).at(path.display());
        let text = std::fs::read(path).map_err(failed)?;
        serde_json::from_slice(&text).map_err(|e| {
            Error::data(format!("is no saved tree: {e}"))
                .at(path.display())
                .fix("a file that `ferrl search --save` wrote")
        })
    }

    /// Recomputes the record from the nodes: visits, values and priors from the evaluations, the result by the strategy's rule. An
    /// error if the file differs.
    pub fn replayed(&self) -> Result<Record> {
        let entry = strategy::find(&self.strategy)?;
        // Defaults that depend on facts are empty among the stored options.
        let given = self.options.iter().filter(|(_, v)| v.as_str() != Some(""));
        let options: Map<String, Value> = given.map(|(k, v)| (k.clone(), v.clone())).collect();
        let built = strategy::build(entry, &options, self.facts)?;
        let (backup, prior) = (built.strategy.backup(), built.strategy.prior());
        self.nodes.check(backup, prior)?;
        let mut again = self.clone();
        again.nodes.recompute(backup, prior);
        let result = built.strategy.answer(&again.nodes);
        again.set_result(result);
        if again.answer_node != self.answer_node {
            let named = |node: Option<usize>| node.map_or("none".into(), |id| format!("node {id}"));
            let what = format!(
                "the saved result is {}, the recomputed one {}",
                named(self.answer_node),
                named(again.answer_node)
            );
            return Err(Error::data(what).fix("save the tree again: this one was changed by hand"));
        }
        Ok(again)
    }

    /// The record with the completion that `rule` selects as its result.
    pub fn rechosen(mut self, rule: ChoiceRule) -> Record {
        self.set_result(rule.of(&self.nodes));
        self
    }

    /// The search with only its first `count` completions, which must be independent.
    pub fn first(mut self, count: usize) -> Result<Record> {
        let nodes = self.nodes.nodes();
        let ends = nodes.len() - 1;
        let independent = nodes[1..].iter().all(|n| n.parent == Some(0) && n.terminal && n.samples == 1);
        if !independent || ends < count {
            let what =
                if independent { counted(ends, "completion") } else { "no independent completions".into() };
            return Err(Error::usage(format!("the tree of prompt {} has {what}", self.index))
                .at("--first")
                .fix("trees of cot, majority or best_of_n with at least this many `samples`"));
        }
        let kept: Vec<Node> = nodes[..=count].to_vec();
        self.generated_tokens = kept.iter().map(|n| n.sampled() as u64).sum();
        self.nodes = Tree::try_from(kept)?;
        Ok(self)
    }

    fn set_result(&mut self, node: Option<usize>) {
        self.answer_node = node;
        let node = node.map(|id| self.nodes.node(id));
        self.reward = node.and_then(|n| n.reward);
        self.correct = node.and_then(|n| n.correct);
        self.answer = node.and_then(|n| n.answer.clone()).unwrap_or_default();
    }
}

/// The trees of a folder.
pub struct Replayed {
    /// In the order of their prompts.
    pub records: Vec<Record>,
}

pub fn has_trees(dir: &Path) -> bool {
    tree_files(dir).is_ok_and(|files| !files.is_empty())
}

pub fn tree_files(dir: &Path) -> Result<Vec<PathBuf>> {
    let failed = |e: std::io::Error| {
        Error::data(format!("cannot read: {e}"))
            .at(dir.display())
            .fix("a folder that `ferrl search --save` wrote")
    };
    let mut files = Vec::new();
    for entry in std::fs::read_dir(dir).map_err(failed)? {
        let file = entry.map_err(failed)?.path();
        let name = file.file_name().unwrap_or_default().to_string_lossy().into_owned();
        let number = name.strip_prefix("tree-").and_then(|n| n.strip_suffix(".json"));
        if number.is_some_and(|n| n.parse::<u64>().is_ok()) {
            files.push(file);
        }
    }
    Ok(files)
}

/// Reads all `tree-N.json` of a folder, or one file, and recomputes their numbers.
pub fn replay(path: &Path) -> Result<Replayed> {
    let files = if path.is_file() { vec![path.to_path_buf()] } else { tree_files(path)? };
    if files.is_empty() {
        return Err(Error::data("has no saved trees (tree-N.json)")
            .at(path.display())
            .fix("a folder that `ferrl search --save` wrote"));
    }
    let one = |file: &PathBuf| Record::load(file)?.replayed().map_err(|e| e.at(file.display()));
    let mut records = files.iter().map(one).collect::<Result<Vec<_>>>()?;
    records.sort_by_key(|r| r.index);
    Ok(Replayed { records })
}

/// Figures over the prompts of a search.
#[derive(Clone, Debug, PartialEq)]
pub struct Figures {
    pub prompts: usize,
    /// Fraction of results that are right, if known, with its standard error.
    pub accuracy: Option<(f64, Option<f64>)>,
    /// 95 % confidence interval of it.
    pub interval: Option<(f64, f64)>,
    /// Fraction of all whole completions that are right: the accuracy of one sample of the search.
    pub mean_completion: Option<f64>,
    /// Fraction of prompts with a right completion anywhere in the tree.
    pub any: Option<f64>,
    /// Nodes of all trees.
    pub nodes: usize,
    pub generated_tokens: u64,
    /// Prefix tokens found in the cache.
    pub shared_tokens: u64,
    /// Episodes whose environment failed.
    pub lost: usize,
}

impl Figures {
    pub fn of(records: &[Record]) -> Self {
        let right: Vec<f64> =
            records.iter().filter_map(|r| r.correct.map(|c| f64::from(u8::from(c)))).collect();
        let (mut means, mut any) = (Vec::new(), Vec::new());
        for r in records {
            let known: Vec<f64> =
                r.nodes.terminals().filter_map(|n| n.correct.map(|c| f64::from(u8::from(c)))).collect();
            if let Some((value, _)) = mean(&known) {
                means.push(value);
                any.push(f64::from(u8::from(known.contains(&1.0))));
            }
        }
        Figures {
            prompts: records.len(),
            accuracy: mean(&right),
            interval: interval(&right),
            mean_completion: mean(&means).map(|m| m.0),
            any: mean(&any).map(|m| m.0),
            nodes: records.iter().map(|r| r.nodes.nodes().len()).sum(),
            generated_tokens: records.iter().map(|r| r.generated_tokens).sum(),
            shared_tokens: records.iter().map(|r| r.shared_tokens).sum(),
            lost: records.iter().flat_map(|r| r.nodes.nodes()).filter(|n| n.lost.is_some()).count(),
        }
    }

    pub fn json(&self) -> Map<String, Value> {
        let fields = json!({
            "prompts": self.prompts,
            "accuracy": self.accuracy.map(|a| a.0),
            "accuracy_stderr": self.accuracy.and_then(|a| a.1),
            "accuracy_ci95": self.interval.map(|(low, high)| [low, high]),
            "mean_completion": self.mean_completion,
            "any_correct": self.any,
            "nodes": self.nodes,
            "generated_tokens": self.generated_tokens,
            "shared_tokens": self.shared_tokens,
            "lost": self.lost,
        });
        fields.as_object().cloned().unwrap_or_default()
    }
}

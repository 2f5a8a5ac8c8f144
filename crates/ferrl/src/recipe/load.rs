//! Loads a recipe: a file with its base recipes, and the overrides of the command line, resolved stage by stage.

use super::schema::RECIPE;
use super::tree::{KeyPath, ValueTree, describe, dotted, path};
use super::{DEFAULT_ALGORITHM, Recipe, algorithm, check, environment, options, overrides, rl2, types};
use crate::algo;
use crate::data::nearest_path;
use crate::warnings::Warnings;
use ferrl_engine::{Error, Result};
use serde_json::{Map, Value};

/// A loaded recipe with all defaults filled in.
#[derive(Clone, Debug)]
pub struct Resolved {
    /// Name of the run folder.
    pub name: String,
    /// The stages in order; a recipe without `[[stage]]` is one stage.
    pub stages: Vec<StageRecipe>,
    /// The resolved recipe as TOML; loading it gives the same recipe.
    pub toml: String,
    tree: ValueTree,
    /// RL2's options that were accepted without effect.
    notes: Vec<rl2::Note>,
}

/// One stage, merged with the settings for all stages.
#[derive(Clone, Debug, PartialEq)]
pub struct StageRecipe {
    /// From 0.
    pub index: usize,
    /// Its own name, or its algorithm's.
    pub name: String,
    /// Its settings; it has no stages.
    pub recipe: Recipe,
    /// Whether it starts from the previous stage's model; `recipe.model` then names none.
    pub continues: bool,
    /// Whether the recipe has `[[stage]]`s.
    pub staged: bool,
}

impl PartialEq for Resolved {
    fn eq(&self, other: &Self) -> bool {
        (&self.name, &self.stages, &self.toml) == (&other.name, &other.stages, &other.toml)
    }
}

impl Recipe {
    /// Reads a recipe and applies overrides from left to right: `key=value`, `+key=value` (adds to a list), `~key`
    /// (deletes), `@overlay.toml` (merges a file).
    pub fn load(path: impl AsRef<std::path::Path>, overrides: &[String]) -> Result<Resolved> {
        let path = path.as_ref();
        let stem = path.file_stem().map_or_else(|| "run".into(), |s| s.to_string_lossy().into_owned());
        Self::parse(&read(path)?, &path.display().to_string(), &stem, overrides)
    }

    /// The same from text; `file` is its name in errors, `name` the run's if the recipe has none.
    pub fn parse(text: &str, file: &str, name: &str, overrides: &[String]) -> Result<Resolved> {
        let mut tree = source(text, file, 0)?;
        for (i, word) in overrides.iter().enumerate() {
            overrides::apply(&mut tree, word, i + 1)?;
        }
        let mut unknown = Vec::new();
        let mut notes = rl2::translate(&mut tree, &mut unknown)?;
        for i in 0..stage_count(&tree) {
            let at = stage_path(i);
            let mut stage = tree.below(&at);
            notes.extend(rl2::translate(&mut stage, &mut unknown)?);
            tree.graft(&at, stage)?;
        }
        environment::expand(&mut tree)?;
        let outside = types::check(&mut tree, unknown)?;
        Ok(Resolved { notes, ..resolve(tree, name, outside)? })
    }
}

impl Resolved {
    /// Refuses settings that cannot work, with reason and fix. `verifiers` are the built-in ones.
    pub fn check(&self, verifiers: &[&str]) -> Result<()> {
        let mut problems = Vec::new();
        for stage in &self.stages {
            for problem in check::problems(stage, &self.stages[..stage.index], verifiers) {
                let (key, place) = self.place(stage, &problem.key);
                problems.push(problem.error(&key, &self.in_stage(stage, &key, place)));
            }
            for (key, error) in options::problems(stage) {
                let (key, place) = self.place(stage, &key);
                let named = error.to_string().starts_with(&key);
                problems
                    .push(if named { error } else { error.at(&key) }.at(self.in_stage(stage, &key, place)));
            }
        }
        all(problems)
    }

    /// Warns of settings without effect; in a recipe with stages only of those set in the stage.
    pub fn warn_unused(&self, stage: &StageRecipe, warnings: &Warnings) {
        let own = |key: &str| {
            !stage.staged || self.tree.get(&[stage_path(stage.index), path(key)].concat()).is_some()
        };
        let unused: Vec<_> =
            super::warn::unused(&stage.recipe).into_iter().filter(|(key, _)| own(key)).collect();
        if let Some((_, fix)) = unused.first() {
            let keys: Vec<&str> = unused.iter().map(|(key, _)| *key).collect();
            let what = format!(
                "{} ha{} no effect for {} as configured here",
                keys.join(", "),
                if keys.len() == 1 { "s" } else { "ve" },
                stage.recipe.algorithm_name()
            );
            warnings.raise("unused-settings", what, *fix);
        }
        if let (Some(first), 0) = (self.notes.first(), stage.index) {
            let said: Vec<String> =
                self.notes.iter().map(|n| format!("{}: {}", n.option, n.instead)).collect();
            let what = format!("options of RL2 that have no effect here: {}", said.join("; "));
            warnings.raise("rl2-options", what, format!("leave out {}", first.option));
        }
    }

    /// The path of a stage's own table, and what is set there: keys of single values and of lists.
    pub(crate) fn own_keys(&self, stage: &StageRecipe) -> Option<(String, Vec<String>)> {
        let at = stage_path(stage.index);
        let table = self.tree.get(&at).filter(|_| stage.staged)?;
        let mut keys = Vec::new();
        leaves(table, &mut KeyPath::new(), &mut keys);
        Some((dotted(&at), keys.iter().map(|key| dotted(key)).collect()))
    }

    /// The place, with the stage's name if the key is set in the stage.
    fn in_stage(&self, stage: &StageRecipe, key: &str, place: String) -> String {
        if key.starts_with("stage.") { format!("{place}: stage {}", stage.name) } else { place }
    }

    /// The full name of a stage's key, and where it was written.
    fn place(&self, stage: &StageRecipe, key: &str) -> (String, String) {
        let own = [stage_path(stage.index), path(key)].concat();
        let base = path(key);
        let exact = |p: &KeyPath| self.tree.get(p).is_some();
        let (key, at) = match stage.staged {
            true if exact(&own) => (own.clone(), own),
            true if exact(&base) => (base.clone(), base),
            true => (own, stage_path(stage.index)),
            false => (base.clone(), base),
        };
        (dotted(&key), self.tree.place(&at).map_or_else(String::new, |p| p.text.clone()))
    }
}

/// The paths of everything in a table that is no table itself.
pub(super) fn leaves(value: &Value, at: &mut KeyPath, keys: &mut Vec<KeyPath>) {
    let Value::Object(map) = value else { return keys.push(at.clone()) };
    for (key, value) in map {
        at.push(key.clone());
        leaves(value, at, keys);
        at.pop();
    }
}

/// All problems as one error; a problem of several stages is reported once.
pub(super) fn all(problems: Vec<Error>) -> Result<()> {
    let mut texts: Vec<String> = Vec::new();
    for text in problems.iter().map(Error::to_string) {
        if !texts.contains(&text) {
            texts.push(text);
        }
    }
    match (texts.len(), problems.into_iter().next()) {
        (1, Some(one)) => Err(one),
        (_, None) => Ok(()),
        (n, _) => Err(Error::usage(format!("{n} problems\n{}", texts.join("\n")))),
    }
}

/// Maximum size of a recipe file.
const LARGEST: u64 = 4 << 20;

fn read(path: &std::path::Path) -> Result<String> {
    use std::io::Read;
    let mut text = String::new();
    // A directory, an endless device or a data file is refused before it is read.
    let file = std::fs::File::open(path).and_then(|f| f.take(LARGEST + 1).read_to_string(&mut text));
    let usual = "give the path of a .toml file; `ferrl recipe list` shows those that come with Ferrl, \
                 and `ferrl recipe new NAME` writes one of them to start from";
    match file {
        Ok(size) if size as u64 <= LARGEST => Ok(text),
        Ok(_) => {
            let what = format!("is larger than {} MiB: not a recipe", LARGEST >> 20);
            Err(Error::usage(what).at(path.display()).fix(usual))
        }
        Err(e) => {
            let error = Error::usage(format!("cannot read the recipe: {e}")).at(path.display());
            let of_run = Some(path.join("recipe.toml")).filter(|inner| inner.is_file());
            let near = || match e.kind() {
                std::io::ErrorKind::NotFound => nearest_path(path, |name| name.ends_with(".toml")),
                _ => None,
            };
            Err(match of_run.or_else(near) {
                Some(near) => error.fix(format!("did you mean {}?", near.display())),
                None => error.fix(usual),
            })
        }
    }
}

/// Maximum length of a `base` chain.
const LONGEST_CHAIN: usize = 100;

/// Precedence of the keys in source `source` itself: above its base recipes, below later sources.
pub(super) fn latest(source: usize) -> usize {
    (source + 1) * LONGEST_CHAIN
}

/// A file's tree with shorthands expanded, merged over its `base`.
fn source(text: &str, file: &str, order: usize) -> Result<ValueTree> {
    let mut tree = written_out(text, file, latest(order))?;
    let mut chain = vec![std::path::PathBuf::from(file)];
    while let Some((base, place)) = tree.take(&path("base")) {
        let Value::String(base) = base else {
            let what = format!("expected text, got {}", describe(&base));
            return Err(Error::usage(what).at("base").at(place.text));
        };
        let base = environment::fill(&base).map_err(|e| e.at("base").at(&place.text))?;
        let next = chain[chain.len() - 1].with_file_name(base);
        if chain.contains(&next) || chain.len() + 1 >= LONGEST_CHAIN {
            let names = chain.iter().chain([&next]).map(|p| p.display().to_string()).collect::<Vec<_>>();
            let what = match names.len() {
                n if n < LONGEST_CHAIN => format!("circular `base` chain: {}", names.join(" -> ")),
                _ => format!("a `base` chain of {LONGEST_CHAIN} recipes"),
            };
            return Err(Error::usage(what).at("base").at(place.text).fix("leave out one `base`"));
        }
        let text = read(&next).map_err(|e| e.at(place.text))?;
        let mut below = written_out(&text, &next.display().to_string(), latest(order) - chain.len())?;
        lay_over(&mut below, &tree)?;
        tree = below;
        chain.push(next);
    }
    Ok(tree)
}

/// How to write what other formats say.
const TOML: &str =
    "`lr: 1e-6` below `optim:` is `lr = 1e-6` below `[optim]`, or optim.lr=1e-6 on the command line";

fn written_out(text: &str, file: &str, order: usize) -> Result<ValueTree> {
    let mut tree = ValueTree::parse(text, order, |line| format!("{file}:{line}")).map_err(|e| {
        let other = [".yaml", ".yml", ".json"].iter().find(|end| file.ends_with(**end));
        match other {
            Some(end) => e.fix(format!("a recipe is TOML, not {}: {TOML}", end[1..].to_uppercase())),
            None => e,
        }
    })?;
    let count = stage_count(&tree);
    let bases = std::iter::once(KeyPath::new()).chain((0..count).map(stage_path)).collect::<Vec<_>>();
    for base in bases {
        for key in ["algo", "reward"] {
            let at: KeyPath = [base.clone(), path(key)].concat();
            let Some(value) = tree.get(&at).cloned() else { continue };
            let written_out = shorthand(&at, value.clone(), false);
            if written_out != value {
                let place = tree.place(&at).cloned().unwrap_or_default();
                tree.set(&at, written_out, place)?;
            }
        }
    }
    Ok(tree)
}

/// `algo = "grpo"` and `reward = "countdown"` (or a list, or one table) in full; `entry` is true for one entry of a
/// list.
pub(super) fn shorthand(at: &[String], value: Value, entry: bool) -> Value {
    let key = if at.len() > 2 && at[0] == "stage" { &at[2..] } else { at };
    let one = |name: &str, value: Value| Value::Object(Map::from_iter([(name.to_string(), value)]));
    let reward = |v: Value| if v.is_string() { one("verifier", v) } else { v };
    match (key, value) {
        ([k], v @ Value::String(_)) if k == "algo" => one("name", v),
        ([k], v) if k == "reward" && entry => reward(v),
        ([k], Value::Array(list)) if k == "reward" => list.into_iter().map(reward).collect(),
        ([k], v @ (Value::String(_) | Value::Object(_))) if k == "reward" => Value::Array(vec![reward(v)]),
        (_, v) => v,
    }
}

pub(super) fn overlay(tree: &mut ValueTree, file: &str, order: usize) -> Result<()> {
    let text = read(std::path::Path::new(file)).map_err(|e| e.at(format!("override @{file}")))?;
    lay_over(tree, &source(&text, file, order)?)
}

/// Merges trees, but a different algorithm inherits no settings, and `model.path` and `model.init` replace each other.
fn lay_over(tree: &mut ValueTree, over: &ValueTree) -> Result<()> {
    let name = |t: &ValueTree| t.get(&path("algo.name")).cloned().unwrap_or_else(|| DEFAULT_ALGORITHM.into());
    if over.get(&path("algo.name")).is_some() && name(tree) != name(over) {
        tree.take(&path("algo"));
    }
    for (given, dropped) in [("model.path", "model.init"), ("model.init", "model.path")] {
        if over.get(&path(given)).is_some() && over.get(&path(dropped)).is_none() {
            tree.take(&path(dropped));
        }
    }
    tree.merge(over)
}

fn stage_count(tree: &ValueTree) -> usize {
    tree.get(&path("stage")).and_then(Value::as_array).map_or(0, Vec::len)
}

fn stage_path(index: usize) -> KeyPath {
    vec!["stage".into(), index.to_string()]
}

/// `outside` are the numbers that are out of range so far.
fn resolve(tree: ValueTree, file_name: &str, mut outside: Vec<Error>) -> Result<Resolved> {
    let name = tree.get(&path("name")).and_then(Value::as_str).unwrap_or(file_name).to_string();
    let base = typed(&tree)?;
    let mut common = tree.clone();
    common.take(&path("stage"));
    common.take(&path("name"));
    let count = stage_count(&tree);
    if count > 0 && common.get(&path("algo")).is_some() {
        algorithm::check(&common, &|p| p.to_vec(), 1, &mut outside)?;
    }
    let mut stages: Vec<StageRecipe> = Vec::new();
    for index in 0..count.max(1) {
        let staged = count > 0;
        let own = if staged { tree.below(&stage_path(index)) } else { ValueTree::default() };
        let mut merged = common.clone();
        lay_over(&mut merged, &own)?;
        let own_model = ["model.path", "model.init"].iter().any(|k| own.get(&path(k)).is_some());
        let continues = index > 0 && !own_model;
        for (named, other) in [("model.path", "model.init"), ("model.init", "model.path")] {
            // `model.path` and `model.init` of a stage override each other's value of the recipe.
            if own.get(&path(named)).is_some() && own.get(&path(other)).is_none() {
                merged.take(&path(other));
            }
        }
        if continues {
            merged.take(&path("model.path"));
            merged.take(&path("model.init"));
        }
        let own_name = merged.take(&path("name")).and_then(|(v, _)| v.as_str().map(String::from));
        let mut recipe = typed(&merged)?;
        recipe.name = Some(name.clone());
        let fill = recipe.rollout.max_new_tokens;
        let prefix = |p: &[String]| match staged && own.get(p).is_some() {
            true => [stage_path(index), p.to_vec()].concat(),
            false => p.to_vec(),
        };
        algorithm::check(&merged, &prefix, fill, &mut outside)?;
        let method = recipe.algorithm_name().to_string();
        recipe.algo.insert("name".into(), method.clone().into());
        let mut settings = algo::find(&method)?.filled(&recipe.algo, fill);
        settings.insert("name".into(), method.clone().into());
        recipe.algo = settings;
        if own_name.is_some() && stages.iter().any(|s| Some(&s.name) == own_name.as_ref()) {
            let what = format!("two stages are called {:?}", own_name.unwrap_or_default());
            let at = stage_path(index);
            let place = tree.place(&at).map_or_else(String::new, |p| p.text.clone());
            return Err(Error::usage(what).at(dotted(&at)).at(place).fix("give each its own name"));
        }
        if recipe.data.train.is_empty() && recipe.env.makes_episodes() {
            recipe.data.train = vec![OWN_EPISODES.into()];
        }
        let stage_name = own_name.unwrap_or_else(|| unique(&method, &stages));
        stages.push(StageRecipe { index, name: stage_name, recipe, continues, staged });
    }
    all(outside)?;
    let toml = write(base, &name, &tree)?;
    Ok(Resolved { name, stages, toml, tree, notes: Vec::new() })
}

/// Data source of a recipe with an environment and without data.
const OWN_EPISODES: &str = "task:env";

/// `name`, or `name_2` and so on.
fn unique(name: &str, stages: &[StageRecipe]) -> String {
    let taken = |n: &str| stages.iter().any(|s| s.name == n);
    let mut candidates = (2..).map(|i| format!("{name}_{i}"));
    if taken(name) { candidates.find(|n| !taken(n)).unwrap_or_default() } else { name.to_string() }
}

fn typed(tree: &ValueTree) -> Result<Recipe> {
    let mut values = tree.root.clone();
    RECIPE.switch_off(&mut values, &RECIPE.root);
    serde_json::from_value(values).map_err(|e| Error::usage(e.to_string()).at("recipe"))
}

/// The recipe with all defaults, and with `${NAME}` for values of variables.
fn write(mut recipe: Recipe, name: &str, tree: &ValueTree) -> Result<String> {
    recipe.name = Some(name.to_string());
    let algorithm = recipe.algorithm_name().to_string();
    recipe.algo.insert("name".into(), algorithm.into());
    let unwritable = |e: toml::ser::Error| Error::usage(format!("cannot write the recipe: {e}"));
    let mut value = toml::Value::try_from(&recipe).map_err(unwritable)?;
    for (path, reference) in tree.references() {
        refer(&mut value, path, reference);
    }
    toml::to_string(&value).map_err(unwritable)
}

/// Replaces the value by its reference; a single value may have become a list of one.
fn refer(value: &mut toml::Value, path: &[String], reference: &str) {
    let inner = path.iter().try_fold(value, |value, key| match value {
        toml::Value::Table(table) => table.get_mut(key),
        toml::Value::Array(list) => list.get_mut(key.parse::<usize>().ok()?),
        _ => None,
    });
    match inner {
        Some(toml::Value::Array(list)) => list.iter_mut().for_each(|v| *v = reference.into()),
        Some(value) => *value = reference.into(),
        None => {}
    }
}

//! Checks every stage of a run before the first starts: models, data row by row, rewards, evaluations, disk.
//!
//! `ferrl train` and `ferrl train --dry-run` run the same checks. A stage that starts from an earlier stage's model is drafted with
//! its tokenizer and configuration, since its weights do not exist yet.

mod look;

use crate::data::hub::model_dir;
use crate::interrupt;
use crate::plan::memory::weights;
use crate::recipe::{Recipe, Resolved, StageRecipe};
use crate::run::Disk;
use crate::setup::{self, Draft};
use crate::source::SourceSummary;
use crate::warnings::Warnings;
use ferrl_engine::checkpoint::ModelDir;
use ferrl_engine::model::adapter::{AdapterOptions, BaseHome, adapter_weights};
use ferrl_engine::model::{Head, ModelConfig, family};
use ferrl_engine::train::trained_weights;
use ferrl_engine::{Error, Result};
use look::Look;
use std::cell::RefCell;
use std::path::{Path, PathBuf};
use std::sync::Arc;
use tempfile::TempDir;

pub struct Checked {
    pub name: String,
    pub algorithm: String,
    /// Its data.
    pub summary: SourceSummary,
    /// Whether its data is endless.
    pub endless: bool,
    pub steps: u64,
    /// Weights of the policy, and how many of them are trained.
    pub weights: usize,
    /// Parameters that are trained.
    pub trained: usize,
    /// Parameters of a separate critic.
    pub critic: usize,
    /// Its space on disk.
    pub disk: Disk,
    /// Warnings; the stage adds to the same list.
    pub warnings: Warnings,
    /// The draft of the first stage, which starts next: its data is not read again.
    pub draft: RefCell<Option<Draft>>,
}

/// Position of a run.
#[derive(Clone, Copy, Debug, Default)]
pub struct Standing<'a> {
    /// Its folder, if it exists.
    pub folder: Option<&'a Path>,
    /// The first stage that is not finished; earlier ones are not checked.
    pub stage: usize,
    /// Whether this stage has started: its rows were checked then.
    pub begun: bool,
}

/// Called with the stage's name, the number of checked rows and of all rows; `false` cancels.
pub type CheckProgress<'a> = &'a mut dyn FnMut(&str, usize, usize) -> bool;

/// Checks every stage that is not finished.
pub fn check(resolved: &Resolved, at: Standing<'_>, progress: CheckProgress<'_>) -> Result<Vec<Checked>> {
    let mut starts: Vec<StartingModel> = Vec::new();
    let mut out = Vec::new();
    for stage in &resolved.stages {
        let place = |e: Error| if stage.staged { e.at(format!("stage {}", stage.name)) } else { e };
        let start = StartingModel::of(stage, &starts, at).map_err(place)?;
        if stage.index >= at.stage {
            let rows = !(at.begun && stage.index == at.stage);
            let checked = one(stage, &start, &starts, rows, progress).map_err(place)?;
            resolved.warn_unused(stage, &checked.warnings);
            if !out.is_empty() {
                checked.draft.take();
            }
            out.push(checked);
        }
        starts.push(start.trained_by(stage)?);
    }
    Ok(out)
}

fn one(
    stage: &StageRecipe,
    start: &StartingModel,
    starts: &[StartingModel],
    rows: bool,
    progress: CheckProgress<'_>,
) -> Result<Checked> {
    let (recipe, warnings) = (&stage.recipe, Warnings::default());
    let named = |path: &str| path.strip_prefix("stage:").and_then(|n| starts.iter().find(|s| s.name == n));
    let (policy, critic) = models(recipe, start, &named)?;
    let mut draft = Draft::new(recipe, &start.dir, &warnings)?;
    setup::fits(&start.config, &draft.tokenizer, &start.dir)?;
    setup::trained::check(&policy, critic.as_ref(), &recipe.model)?;
    let trained = match &recipe.adapter {
        Some(adapter) => {
            let wanted = adapter.options()?;
            let left = start.adapter.as_ref();
            check_adapter(&wanted, left, &policy)?;
            // The base is known only of adapters that a stage of this recipe trains.
            left.filter(|_| !start.name.is_empty()).map_or(Ok(()), |left| check_base(&wanted, left))?;
            adapter_weights(&policy, &wanted)?.1
        }
        None => trained_weights(&policy, &setup::trained::patterns(&policy, &recipe.model)?)?,
    };
    if rows {
        let look = Look::new(&draft, recipe, &named)?;
        let (source, rewards) = (&mut draft.source, &draft.rewards);
        let progress = &mut |done, all| progress(&stage.name, done, all);
        source.check_with(&|seen| look.at(rewards, seen), progress)?;
    }
    if interrupt::requested() {
        return Err(interrupt::interrupted("the data were checked"));
    }
    Ok(Checked {
        name: stage.name.clone(),
        algorithm: recipe.algorithm_name().into(),
        summary: draft.source.summary(),
        endless: draft.source.epoch().is_none(),
        steps: draft.total,
        weights: weights(&policy),
        trained,
        critic: critic.as_ref().map_or(0, weights),
        disk: Disk::of(recipe, &policy, critic.as_ref()),
        warnings,
        draft: RefCell::new(Some(draft)),
    })
}

/// Refuses an adapter with unknown modules, or one that differs from that of the stage's initial model.
pub(crate) fn check_adapter(
    wanted: &AdapterOptions,
    left: Option<&AdapterOptions>,
    config: &ModelConfig,
) -> Result<()> {
    wanted.check_names(config)?;
    left.map_or(Ok(()), |left| left.same(wanted, config).map_err(|e| e.at("adapter")))
}

/// Refuses an NF4 base under an adapter that an earlier stage trains on an unquantised base.
pub(crate) fn check_base(wanted: &AdapterOptions, left: &AdapterOptions) -> Result<()> {
    if wanted.base == BaseHome::Nf4 && left.base != BaseHome::Nf4 {
        return Err(Error::usage(
            "an earlier stage trains the adapter on a base that is not quantised to NF4",
        )
        .at("adapter.base")
        .fix("adapter.base = \"nf4\" in both stages, or in none"));
    }
    Ok(())
}

/// The trained models of a stage: the policy, and a separate critic. Checks all its models.
fn models<'a>(
    recipe: &Recipe,
    start: &StartingModel,
    named: &dyn Fn(&str) -> Option<&'a StartingModel>,
) -> Result<(ModelConfig, Option<ModelConfig>)> {
    let config = |path: &str| -> Result<ModelConfig> {
        match named(path) {
            Some(start) => Ok(start.config.clone()),
            None => Ok(ModelDir::open(&model_dir(Path::new(path))?)?.config),
        }
    };
    let needs = recipe.algorithm()?.needs();
    let mut policy = start.config.clone();
    let own = needs.critic && !recipe.critic.shared;
    let critic = match recipe.critic.path.as_deref().filter(|_| own) {
        Some(path) => Some(config(path).map_err(|e| e.at("critic.path"))?),
        None => own.then(|| policy.clone()),
    };
    policy.head = match (needs.score, needs.critic && recipe.critic.shared, policy.head) {
        (true, _, _) => Head::Score,
        (_, true, _) => Head::LmAndValue,
        (_, _, head) => head,
    };
    if let Some(path) = recipe.teacher.path.as_deref().filter(|_| needs.teacher) {
        let (ours, theirs) = (policy.vocab, config(path).map_err(|e| e.at("teacher.path"))?.vocab);
        if ours != theirs {
            return Err(Error::model(format!("the policy has {ours} tokens, the teacher {theirs}"))
                .at("teacher.path")
                .fix("a teacher with the policy's tokenizer"));
        }
    }
    let judges = recipe.reward.iter().enumerate().filter_map(|(i, r)| Some((i, r, r.model.as_deref()?)));
    for (i, reward, path) in judges {
        let head = config(path).map_err(|e| e.at("reward"))?.head;
        if head != Head::Score && reward.model_kind().is_none() {
            return Err(Error::model(format!("{path} is a language model without a score head"))
                .at("reward")
                .fix(
                    "a sequence classifier with one label, such as a stage that trains a reward model leaves; or \
                     reward.0.options.kind = \"generative\", which makes the model a judge",
                ));
        }
        let option = format!("reward.{i}.options.");
        reward.check_model(head == Head::Score, &option).map_err(|e| e.at(format!("reward.{i}.model")))?;
        for (key, path) in reward.models() {
            config(path).map_err(|e| e.at(format!("{option}{key}")))?;
        }
    }
    if let Some(scorer) = recipe.search.model_reward() {
        let look = || {
            let scores = config(&recipe.search.scorer)?.head == Head::Score;
            scorer.check_model(scores, "search.scorer_options.")?;
            scorer.models().try_for_each(|(_, path)| config(path).map(drop))
        };
        look().map_err(|e| recipe.search.not_opened(e))?;
    }
    Ok((policy, critic.map(|c| ModelConfig { head: Head::Score, ..c })))
}

/// The initial model of a stage, as far as it is known.
#[derive(Clone)]
struct StartingModel {
    /// The stage that trained it last.
    name: String,
    /// Directory with config.json and the tokenizer; the weights may not exist yet.
    dir: PathBuf,
    config: ModelConfig,
    /// An adapter that is not merged.
    adapter: Option<AdapterOptions>,
    /// Keeps temporary files of the check.
    _sketch: Option<Arc<TempDir>>,
}

impl StartingModel {
    fn of(stage: &StageRecipe, before: &[StartingModel], at: Standing<'_>) -> Result<StartingModel> {
        let there =
            |name: String| at.folder.map(|f| f.join(name)).filter(|d| d.join("config.json").is_file());
        let open = |dir: PathBuf| {
            let opened = ModelDir::open(&dir)?;
            let adapter = opened.adapter().map(|own| own.options.clone());
            Ok(StartingModel { name: String::new(), dir, config: opened.config, adapter, _sketch: None })
        };
        let m = &stage.recipe.model;
        if let Some(path) = &m.path {
            let named = path.strip_prefix("stage:").and_then(|n| before.iter().find(|s| s.name == n));
            return named.map_or_else(|| open(model_dir(Path::new(path))?), |start| Ok(start.clone()));
        }
        if m.init.is_some() {
            return there(format!("start_{}", stage.index)).map_or_else(|| sketch(&stage.recipe), open);
        }
        let Some(previous) = before.last() else {
            return Err(Error::usage("no model to train").at("model").fix("model.path = \"directory\""));
        };
        // It starts from the result of a finished stage.
        let left = there(format!("stages/{}", stage.index - 1)).filter(|_| stage.index <= at.stage);
        left.map_or_else(|| Ok(previous.clone()), open)
    }

    /// The same after the stage has trained it.
    fn trained_by(mut self, stage: &StageRecipe) -> Result<StartingModel> {
        if stage.recipe.algorithm()?.needs().score {
            self.config.head = Head::Score;
        }
        self.adapter = stage.recipe.adapter.as_ref().map(|adapter| adapter.options()).transpose()?;
        self.name = stage.name.clone();
        Ok(self)
    }
}

/// A temporary directory with configuration and tokenizer of a model that does not exist yet.
fn sketch(recipe: &Recipe) -> Result<StartingModel> {
    let init = recipe.model.init.clone().unwrap_or_default();
    let (tokenizer, options) = setup::new_model_parts(recipe, &init)?;
    let config = options.build()?.0;
    let fail =
        |e: std::io::Error| Error::data(format!("cannot write: {e}")).at(std::env::temp_dir().display());
    let temp = tempfile::tempdir().map_err(fail)?;
    let dir = temp.path().to_path_buf();
    let json = family(config.family)?.to_json(&config).to_string();
    std::fs::write(dir.join("config.json"), json).map_err(fail)?;
    tokenizer.save(&dir)?;
    Ok(StartingModel { name: String::new(), dir, config, adapter: None, _sketch: Some(Arc::new(temp)) })
}

//! The environments of a recipe.

use super::data::tasks;
use crate::data::Encoder;
use crate::data::prompt::PromptSettings as Encoding;
use crate::env::openenv::Servers;
use crate::env::python::{self, EpisodeStart, OfRows, PythonEnv, WorkerSettings, Workers};
use crate::env::tools::{ToolEpisode, ToolLimits};
use crate::env::{Environment, Numbered};
use crate::episode::{Environments, RowEpisodes};
use crate::recipe::Recipe;
use crate::source::{Prompt, encoding};
use crate::task::Task;
use crate::tool::{self, Tool};
use crate::verify::Hooks;
use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::{Error, Result};
use serde_json::{Map, Value};
use std::path::Path;
use std::sync::Arc;
use std::time::Duration;

/// The name under which `data.train` holds the episodes of the recipe's own environment.
pub(crate) const OWN: &str = "env";

/// The environments of a recipe's prompts with several turns. Starts the environment of `[env]`.
pub fn environments(
    recipe: &Recipe,
    dir: &Path,
    tokenizer: &Tokenizer,
    hooks: &Hooks,
) -> Result<Environments> {
    let (mut all, mut rows) = (tasks(recipe)?, None);
    let mut own = |task: Arc<dyn Task>| {
        // In place of the placeholder, which starts no process.
        all.retain(|(name, _)| name != OWN);
        all.push((OWN.into(), task));
    };
    match Own::of(recipe, hooks)? {
        Some(Own::Python(workers)) => {
            workers.check()?;
            own(python_episodes(&workers, recipe.seed));
            rows = Some(Arc::new(OfRows::new(workers, recipe.seed)) as Arc<dyn RowEpisodes>);
        }
        Some(Own::Servers(servers)) => {
            servers.check()?;
            own(server_episodes(servers, recipe.seed));
        }
        Some(Own::Tools(tools)) => {
            let limits = ToolLimits { max_calls: recipe.env.max_calls, ..Default::default() };
            rows = Some(Arc::new(WithTools { tools, limits }) as Arc<dyn RowEpisodes>);
        }
        None => {}
    }
    let encoder = Encoder::for_model(tokenizer.clone(), dir, encoding_of(recipe)?)?;
    let environments = Environments::new(all, recipe.rollout.max_turns)
        .with_concurrency(recipe.env.concurrency)
        .with_encoder(Arc::new(encoder));
    Ok(match rows {
        Some(rows) => environments.with_rows(rows),
        None => environments,
    })
}

/// Encoding of rows and observations, with the tools in the prompt of a conversation.
pub(super) fn encoding_of(recipe: &Recipe) -> Result<Encoding> {
    let tools = tools(recipe)?;
    let shown = (!tools.is_empty()).then(|| tools.iter().map(|tool| tool::definition(&**tool)).collect());
    Ok(Encoding { promptless: !recipe.env.named().is_empty(), tools: shown, ..encoding(&recipe.data)? })
}

/// Fails if an environment does not load.
pub(crate) fn check(recipe: &Recipe, hooks: &Hooks) -> Result<()> {
    match Own::of(recipe, hooks)? {
        Some(Own::Python(workers)) => workers.check(),
        Some(Own::Servers(servers)) => servers.check(),
        Some(Own::Tools(_)) | None => Ok(()),
    }
}

/// The episodes of the recipe's own environment, as a task that starts nothing yet.
pub(super) fn own_task(recipe: &Recipe) -> Result<Option<Arc<dyn Task>>> {
    Ok(match Own::of(recipe, &Hooks::default())? {
        Some(Own::Python(workers)) => Some(python_episodes(&workers, recipe.seed)),
        Some(Own::Servers(servers)) => Some(server_episodes(servers, recipe.seed)),
        Some(Own::Tools(_)) | None => None,
    })
}

fn python_episodes(workers: &Arc<Workers>, seed: u64) -> Arc<dyn Task> {
    let workers = workers.clone();
    Arc::new(Numbered::new(seed, move |seed, index| {
        let start = EpisodeStart { seed, name: format!("episode {index}"), ..Default::default() };
        Box::new(python::WorkerEpisode::new(workers.clone(), start))
    }))
}

fn server_episodes(servers: Arc<Servers>, seed: u64) -> Arc<dyn Task> {
    Arc::new(Numbered::new(seed, move |seed, _| servers.open(seed)))
}

/// The environment of a recipe, not started.
enum Own {
    Python(Arc<Workers>),
    Servers(Arc<Servers>),
    Tools(Arc<[Arc<dyn Tool>]>),
}

impl Own {
    fn of(recipe: &Recipe, hooks: &Hooks) -> Result<Option<Own>> {
        let env = &recipe.env;
        let timeout = Duration::from_secs_f64(env.timeout);
        let what = match env.named().first() {
            Some(("url", url)) => return Ok(Some(Own::Servers(Servers::new(url, &env.options, timeout)?))),
            Some(("gem", name)) => PythonEnv::Gem(name.to_string()),
            Some(("reasoning_gym", name)) => PythonEnv::ReasoningGym(name.to_string()),
            Some((_, path)) => PythonEnv::file(path),
            None if env.tools.is_empty() => return Ok(None),
            None => return Ok(Some(Own::Tools(tools(recipe)?))),
        };
        Ok(Some(Own::Python(Workers::new(WorkerSettings {
            what,
            options: env.options.clone(),
            workers: env.workers,
            timeout,
            start_timeout: Duration::from_secs_f64(env.start_timeout),
            memory: env.memory_mib << 20,
            python: env.python.clone(),
            hooks: hooks.clone(),
        }))))
    }
}

/// The tools of a recipe, each with its table of `env.options`.
fn tools(recipe: &Recipe) -> Result<Arc<[Arc<dyn Tool>]>> {
    let env = &recipe.env;
    if let Some(name) = env.options.keys().find(|name| !env.tools.is_empty() && !env.tools.contains(name)) {
        return Err(Error::usage(format!("{name:?} is none of the tools: {}", env.tools.join(", ")))
            .at(format!("env.options.{name}"))
            .fix(format!("env.options.{}.KEY = ...", env.tools[0])));
    }
    let none = Map::new();
    let options = |name: &String| env.options.get(name).and_then(Value::as_object).unwrap_or(&none);
    env.tools.iter().map(|name| tool::build(name, options(name))).collect()
}

/// Rows with tools; the recipe's rewards score the answer.
struct WithTools {
    tools: Arc<[Arc<dyn Tool>]>,
    limits: ToolLimits,
}

impl RowEpisodes for WithTools {
    fn open(&self, prompt: &Prompt, state: &str) -> Result<Box<dyn Environment>> {
        let (state, columns) = (state.to_string(), prompt.columns.clone());
        Ok(Box::new(ToolEpisode::new(state, columns, self.tools.clone(), None, self.limits)))
    }
}

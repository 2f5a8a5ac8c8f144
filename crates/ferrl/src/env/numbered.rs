//! Episodes of an environment in another process or on another machine, by number and without end.

use super::{Environment, episode_seed};
use crate::task::{Task, TaskExample};
use ferrl_engine::Result;
use serde_json::json;

/// Opens an episode by its seed and number.
type OpenNumbered = Box<dyn Fn(u64, u64) -> Box<dyn Environment> + Send + Sync>;

/// Episodes by number, each with its own seed.
pub struct Numbered {
    seed: u64,
    open: OpenNumbered,
}

impl Numbered {
    /// Those of a run with this seed.
    pub fn new(seed: u64, open: impl Fn(u64, u64) -> Box<dyn Environment> + Send + Sync + 'static) -> Self {
        Numbered { seed, open: Box::new(open) }
    }
}

impl Task for Numbered {
    /// The environment returns the prompt when the episode starts.
    fn example(&self, index: u64, _held_out: bool) -> Result<TaskExample> {
        let columns = json!({ "episode": index }).as_object().cloned().unwrap_or_default();
        Ok(TaskExample { columns, ..Default::default() })
    }

    fn episode(&self, index: u64, held_out: bool) -> Option<Box<dyn Environment>> {
        Some((self.open)(episode_seed(self.seed, index, held_out), index))
    }
}

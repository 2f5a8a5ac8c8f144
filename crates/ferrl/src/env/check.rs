//! Whether an environment keeps to its contract: it is played, played again, and played twice at once.

use super::{Environment, Fault, Lost, Next, Turn, Why};
use ferrl_engine::Result;
use serde::Serialize;

/// A rule that an environment breaks.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Violation {
    /// Which rule.
    pub rule: &'static str,
    /// What was seen.
    pub problem: String,
    /// What to do about it.
    pub fix: &'static str,
}

/// What an episode showed: its first state, and every turn.
#[derive(Clone, Debug, Default, PartialEq)]
struct Seen {
    start: String,
    turns: Vec<Turn>,
    lost: Option<Lost>,
}

/// An episode and what it has shown so far.
struct Player {
    environment: Box<dyn Environment>,
    seen: Seen,
    over: bool,
}

impl Player {
    fn begin(mut environment: Box<dyn Environment>) -> Result<Self> {
        let mut seen = Seen::default();
        let over = match environment.start() {
            Ok(start) => {
                seen.start = start;
                false
            }
            Err(fault) => {
                seen.lost = Some(lost(fault)?);
                true
            }
        };
        Ok(Player { environment, seen, over })
    }

    fn act(&mut self, action: &str) -> Result<()> {
        if self.over {
            return Ok(());
        }
        match self.environment.step(action) {
            Ok(turn) => {
                self.over = turn.end.is_some();
                self.seen.turns.push(turn);
            }
            Err(fault) => {
                self.seen.lost = Some(lost(fault)?);
                self.over = true;
            }
        }
        Ok(())
    }
}

fn lost(fault: Fault) -> Result<Lost> {
    match fault {
        Fault::Lost(lost) => Ok(*lost),
        busy @ Fault::Busy => Err(busy.into()),
        Fault::Fatal(error) => Err(error),
    }
}

/// Plays episodes that all begin alike with these actions; every rule that is broken.
pub fn check(open: &dyn Fn() -> Result<Box<dyn Environment>>, actions: &[String]) -> Result<Vec<Violation>> {
    let alone = || -> Result<Seen> {
        let mut player = Player::begin(open()?)?;
        actions.iter().try_for_each(|action| player.act(action))?;
        Ok(player.seen)
    };
    let first = alone()?;
    let mut found = broken(&first);
    if first.lost.is_some() {
        return Ok(found);
    }
    if let Some(problem) = difference(&first, &alone()?) {
        found.push(Violation {
            rule: "determinism",
            problem: format!("played again with the same seed, {problem}"),
            fix: "draw every random number from the seed of reset, and keep nothing between episodes",
        });
        return Ok(found);
    }
    let (mut one, mut other) = (Player::begin(open()?)?, Player::begin(open()?)?);
    for action in actions {
        one.act(action)?;
        other.act(action)?;
    }
    let apart = difference(&first, &one.seen).or_else(|| difference(&first, &other.seen));
    if let Some(problem) = apart {
        found.push(Violation {
            rule: "interleaving",
            problem: format!("while another episode was under way, {problem}"),
            fix: "keep an episode's state in its object or in extra_info, not in the module or the class",
        });
    }
    Ok(found)
}

/// What one episode shows to be wrong.
fn broken(seen: &Seen) -> Vec<Violation> {
    let mut found = Vec::new();
    if let Some(lost) = &seen.lost {
        let turn = seen.turns.len() + 1;
        let (rule, fix) = match lost.why {
            Why::Raised => ("raises", "catch what a model may write: an action is any text"),
            Why::Hung => {
                ("time", "answer within the time-out (--timeout), or raise env.timeout in the recipe")
            }
            Why::Exited => ("process", "do not end the process: end the episode with done"),
            Why::Schema => {
                ("schema", "return next_state (or an observation), a finite reward and whether it is over")
            }
            Why::Size => ("size", "keep states and memory small: a state is what the model reads"),
        };
        found.push(Violation { rule, problem: format!("turn {turn}: {}", lost.message), fix });
    }
    if seen.start.trim().is_empty() && seen.lost.is_none() {
        let problem = "the first state is empty".into();
        found.push(Violation { rule: "start", problem, fix: "let reset say what the episode is about" });
    }
    let silent = |turn: &Turn| {
        let (Next::Observation(text) | Next::State(text)) = &turn.next;
        turn.end.is_none() && text.trim().is_empty()
    };
    if let Some(turn) = seen.turns.iter().position(silent) {
        let problem = format!("turn {}: nothing to read, and the episode goes on", turn + 1);
        found.push(Violation {
            rule: "silence",
            problem,
            fix: "say what came of the action, or end the episode",
        });
    }
    found
}

/// The first thing in which two episodes differ.
fn difference(one: &Seen, other: &Seen) -> Option<String> {
    if let Some(lost) = &other.lost {
        return Some(format!("it failed: {}", lost.message));
    }
    if one.start != other.start {
        return Some(format!("it began with {:.60?} instead of {:.60?}", other.start, one.start));
    }
    let mut turns = one.turns.iter().zip(&other.turns).enumerate();
    let differ = turns.find(|(_, (a, b))| (&a.next, a.reward, a.end) != (&b.next, b.reward, b.end));
    match differ {
        Some((i, (a, b))) => Some(match a.next == b.next {
            true => format!("turn {} gave {} instead of {}", i + 1, b.reward, a.reward),
            false => format!("turn {} answered {:.60?} instead of {:.60?}", i + 1, b.next, a.next),
        }),
        None => (one.turns.len() != other.turns.len())
            .then(|| format!("it lasted {} turns instead of {}", other.turns.len(), one.turns.len())),
    }
}

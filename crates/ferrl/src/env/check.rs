//! Checks an environment: plays an episode, repeats it with the same seed, and plays it while another one runs.

use super::{Environment, Fault, Lost, Next, Turn, Why};
use ferrl_engine::Result;
use serde::Serialize;

/// A violated rule.
#[derive(Clone, Debug, PartialEq, Serialize)]
pub struct Violation {
    pub rule: &'static str,
    pub problem: String,
    pub fix: &'static str,
}

/// A recorded episode: its first state, and every turn.
#[derive(Clone, Debug, Default, PartialEq)]
struct Seen {
    start: String,
    turns: Vec<Turn>,
    lost: Option<Lost>,
}

/// An episode and its record so far.
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

/// Plays episodes with the same initial state and these actions; returns all violations.
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
            problem: format!("repeated with the same seed, {problem}"),
            fix: "derive all random numbers from the seed of reset, and keep no state between episodes",
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
            problem: format!("while another episode was running, {problem}"),
            fix: "keep an episode's state in its object or in extra_info, not in the module or the class",
        });
    }
    Ok(found)
}

/// The violations of a single episode.
fn broken(seen: &Seen) -> Vec<Violation> {
    let mut found = Vec::new();
    if let Some(lost) = &seen.lost {
        let turn = seen.turns.len() + 1;
        let (rule, fix) = match lost.why {
            Why::Raised => ("raises", "handle any text: the policy may write anything as an action"),
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
        let problem = format!("turn {}: an empty observation, but the episode continues", turn + 1);
        found.push(Violation {
            rule: "silence",
            problem,
            fix: "return the result of the action, or end the episode",
        });
    }
    found
}

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
            true => format!("turn {} returned the reward {} instead of {}", i + 1, b.reward, a.reward),
            false => format!("turn {} answered {:.60?} instead of {:.60?}", i + 1, b.next, a.next),
        }),
        None => (one.turns.len() != other.turns.len())
            .then(|| format!("it lasted {} turns instead of {}", other.turns.len(), one.turns.len())),
    }
}

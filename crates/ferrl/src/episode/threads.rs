//! Threads on which environments wait for other processes and machines while the policy decodes.

use crate::env::{self, Environment, Turn};
use ferrl_engine::{Error, Result};
use ferrl_kernels::lock;
use std::sync::mpsc::{Receiver, Sender, channel};
use std::sync::{Arc, Mutex};
use std::time::Duration;

pub(super) enum EnvironmentCall {
    Start,
    /// The action.
    Step(String),
}

/// The first observation.
pub(super) enum EnvReply {
    Started(String),
    /// The action and its result.
    Stepped(String, Turn),
}

impl EnvironmentCall {
    pub(super) fn of(self, environment: &mut dyn Environment) -> env::Result<EnvReply> {
        Ok(match self {
            EnvironmentCall::Start => EnvReply::Started(environment.start()?),
            EnvironmentCall::Step(action) => {
                let turn = environment.step(&action)?;
                EnvReply::Stepped(action, turn)
            }
        })
    }
}

/// A call to run on a thread.
struct EnvironmentJob(usize, Box<dyn Environment>, EnvironmentCall);

/// A finished call.
pub(super) struct Back {
    pub episode: usize,
    pub environment: Box<dyn Environment>,
    pub reply: env::Result<EnvReply>,
}

/// Stack size of a waiting thread.
const STACK: usize = 256 << 10;

/// One thread per running environment, up to a limit. They end with their owner, each after its last job.
pub(super) struct Threads {
    limit: usize,
    started: usize,
    /// Running environments.
    pub waiting: usize,
    jobs: Sender<EnvironmentJob>,
    queue: Arc<Mutex<Receiver<EnvironmentJob>>>,
    done: Sender<Back>,
    back: Receiver<Back>,
}

impl Threads {
    pub fn new(limit: usize) -> Self {
        let ((jobs, queue), (done, back)) = (channel(), channel());
        Threads {
            limit: limit.max(1),
            started: 0,
            waiting: 0,
            jobs,
            queue: Arc::new(Mutex::new(queue)),
            done,
            back,
        }
    }

    /// Runs a call on a thread.
    pub fn ask(
        &mut self,
        episode: usize,
        environment: Box<dyn Environment>,
        ask: EnvironmentCall,
    ) -> Result<()> {
        self.waiting += 1;
        if self.started < self.limit.min(self.waiting) {
            self.started += 1;
            let (queue, done) = (self.queue.clone(), self.done.clone());
            let body = move || {
                loop {
                    let job = lock(&queue).recv();
                    let Ok(EnvironmentJob(episode, mut environment, ask)) = job else { return };
                    let reply = ask.of(&mut *environment);
                    if done.send(Back { episode, environment, reply }).is_err() {
                        return;
                    }
                }
            };
            let thread = std::thread::Builder::new().name("environment".into()).stack_size(STACK).spawn(body);
            thread.map_err(|e| {
                Error::resource(format!("no thread for an environment: {e}")).fix("a smaller env.concurrency")
            })?;
        }
        let lost = |_| Error::resource("the threads of environments are gone");
        self.jobs.send(EnvironmentJob(episode, environment, ask)).map_err(lost)
    }

    /// The next finished call; with `wait` within this time.
    pub fn back(&mut self, wait: Option<Duration>) -> Option<Back> {
        let back = match wait {
            None => self.back.try_recv().ok(),
            Some(time) => self.back.recv_timeout(time).ok(),
        };
        self.waiting -= usize::from(back.is_some());
        back
    }
}

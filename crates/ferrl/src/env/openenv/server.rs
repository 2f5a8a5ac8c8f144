//! One OpenEnv server: its protocol and the number of concurrent episodes.

use super::super::{Lost, Why};
use crate::http::{NO_ANSWER, Url};
use crate::recipe::read_settings;
use crate::websocket::Socket;
use ferrl_engine::Error;
use ferrl_kernels::lock;
use schemars::JsonSchema;
use serde::{Deserialize, Serialize};
use serde_json::{Map, Value, json};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError};
use std::time::{Duration, Instant};

/// Default field of the action's text.
const ACTION: &str = "message";
/// Wait before a busy server is tried again.
const WAIT: Duration = Duration::from_millis(20);

/// Settings in `env.options`.
#[derive(Default, Deserialize, Serialize, JsonSchema)]
#[serde(default, deny_unknown_fields)]
struct Options {
    /// Field of the action's text; by default from the server's schema.
    action: Option<String>,
    /// Whether the server supports concurrent episodes over HTTP.
    sessions: bool,
    /// Protocol; by default the one that the server supports.
    transport: Option<Transport>,
}

/// Protocol of a server.
#[derive(Clone, Copy, Debug, PartialEq, Eq, Deserialize, Serialize, JsonSchema)]
#[serde(rename_all = "lowercase")]
pub(super) enum Transport {
    /// `POST /reset` and `POST /step`, with a connection each.
    Http,
    /// A WebSocket to `/ws` per episode.
    WebSocket,
}

/// Number of running episodes of a server, and its limit.
#[derive(Debug)]
struct EpisodeSlots {
    taken: usize,
    most: usize,
}

pub(super) struct Server {
    pub(super) url: String,
    pub(super) timeout: Duration,
    /// The field of an action that holds the policy's text.
    pub(super) action: String,
    pub(super) transport: Transport,
    slots: Mutex<EpisodeSlots>,
    free: Condvar,
}

impl Server {
    pub(super) fn new(
        url: &str,
        options: &Map<String, Value>,
        timeout: Duration,
    ) -> ferrl_engine::Result<Arc<Server>> {
        let bad = |what: String| Error::usage(what).at("env.url").fix("env.url = \"http://127.0.0.1:8000\"");
        let url = match url.strip_prefix("ws://") {
            Some(rest) => format!("http://{rest}"),
            None => url.to_string(),
        };
        Url::parse(&url).map_err(bad)?;
        let options: Options = read_settings("env.options", options)?;
        let url = url.trim_end_matches('/').to_string();
        let transport = options.transport.unwrap_or_else(|| spoken(&url, timeout));
        let action = options.action.or_else(|| text_field(&url, timeout)).unwrap_or_else(|| ACTION.into());
        // The limit of sessions is known once a server refuses one; over HTTP it has one environment.
        let most = if transport == Transport::WebSocket || options.sessions { usize::MAX } else { 1 };
        let slots = Mutex::new(EpisodeSlots { taken: 0, most });
        Ok(Arc::new(Server { url, timeout, action, transport, slots, free: Condvar::new() }))
    }

    /// Fails if the server does not respond.
    pub(super) fn check(&self) -> ferrl_engine::Result<()> {
        let reset = json!({ "seed": 0 });
        let answer = match self.transport {
            Transport::Http => self.post("reset", &reset),
            Transport::WebSocket => {
                self.connect().and_then(|mut socket| self.tell(&mut socket, "reset", &reset))
            }
        };
        match answer {
            // Busy with other clients: it responds.
            Ok(_) | Err(ServerRefusal::Full) => Ok(()),
            Err(ServerRefusal::Lost(lost)) => {
                Err(Error::device(lost.message).at(&self.url).fix("start the server, or correct env.url"))
            }
        }
    }

    /// A request on a new connection.
    pub(super) fn post(&self, path: &str, body: &Value) -> Result<Value, ServerRefusal> {
        let began = Instant::now();
        let url = Url::parse(&format!("{}/{path}", self.url)).map_err(|e| Lost::new(Why::Exited, e))?;
        let answer = url.post(body, self.timeout).map_err(|what| lost(path, &what, began))?;
        observed(path, answer)
    }

    pub(super) fn connect(&self) -> Result<Socket, ServerRefusal> {
        let began = Instant::now();
        let url = Url::parse(&format!("{}/ws", self.url)).map_err(|e| Lost::new(Why::Exited, e))?;
        Ok(Socket::open(&url, self.timeout).map_err(|what| lost("ws", &what, began))?)
    }

    /// Sends a message in a session and returns the reply.
    pub(super) fn tell(&self, socket: &mut Socket, kind: &str, data: &Value) -> Result<Value, ServerRefusal> {
        let began = Instant::now();
        let mut answer = socket
            .ask(&json!({ "type": kind, "data": data }), self.timeout)
            .map_err(|what| lost(kind, &what, began))?;
        if answer["type"] != "error" {
            return observed(kind, answer["data"].take());
        }
        let said = &answer["data"];
        let why = match said["code"].as_str().unwrap_or_default() {
            "CAPACITY_REACHED" => {
                let most = said["max_sessions"].as_u64().unwrap_or(1);
                self.slots().most = usize::try_from(most).unwrap_or(1).max(1);
                return Err(ServerRefusal::Full);
            }
            "VALIDATION_ERROR" | "INVALID_JSON" | "UNKNOWN_TYPE" => Why::Schema,
            _ => Why::Raised,
        };
        let message = format!("{kind}: {}", said["message"].as_str().unwrap_or("the server says no more"));
        Err(Lost { seconds: began.elapsed().as_secs_f64(), ..Lost::new(why, message) }.into())
    }

    fn slots(&self) -> MutexGuard<'_, EpisodeSlots> {
        lock(&self.slots)
    }

    /// Takes a slot of the server; returns whether one was free.
    pub(super) fn take(&self) -> bool {
        let full = |slots: &mut EpisodeSlots| slots.taken >= slots.most;
        let (mut slots, _) =
            self.free.wait_timeout_while(self.slots(), WAIT, full).unwrap_or_else(PoisonError::into_inner);
        let free = slots.taken < slots.most;
        slots.taken += usize::from(free);
        free
    }

    pub(super) fn give_back(&self) {
        self.slots().taken -= 1;
        self.free.notify_one();
    }

    /// Lowers the limit after the server refused a session.
    pub(super) fn turned_away(&self) {
        self.give_back();
        std::thread::sleep(WAIT);
    }
}

/// Why a server returned no observation.
#[derive(Debug)]
pub(super) enum ServerRefusal {
    /// It is busy.
    Full,
    Lost(Box<Lost>),
}

impl From<Lost> for ServerRefusal {
    fn from(lost: Lost) -> Self {
        ServerRefusal::Lost(Box::new(lost))
    }
}

fn lost(path: &str, what: &str, began: Instant) -> Lost {
    let why = match () {
        () if what.starts_with(NO_ANSWER) => Why::Hung,
        () if what.starts_with("status") => Why::Raised,
        () if what.contains("no JSON") => Why::Schema,
        () if what.contains("bytes") => Why::Size,
        () => Why::Exited,
    };
    Lost { seconds: began.elapsed().as_secs_f64(), ..Lost::new(why, format!("{path}: {what}")) }
}

fn observed(path: &str, answer: Value) -> Result<Value, ServerRefusal> {
    match answer["observation"].is_null() {
        false => Ok(answer),
        true => Err(Lost::new(Why::Schema, format!("{path} answered without an observation")).into()),
    }
}

/// The protocol of a server: current servers create a new environment for every HTTP request, and one per WebSocket.
fn spoken(url: &str, timeout: Duration) -> Transport {
    match Url::parse(&format!("{url}/ws")).and_then(|url| Socket::open(&url, timeout)) {
        Err(why) if !why.starts_with(NO_ANSWER) => Transport::Http,
        _ => Transport::WebSocket, // a slow one, too: every message over HTTP would go to a new environment
    }
}

/// The first text among the fields of an action, as the server's schema has them.
fn text_field(url: &str, timeout: Duration) -> Option<String> {
    let schema = Url::parse(&format!("{url}/schema")).ok()?.get(timeout).ok()?;
    let action = &schema["action"];
    let is_text = |name: &&str| action["properties"][*name]["type"] == "string";
    let required = action["required"].as_array().into_iter().flatten().filter_map(Value::as_str);
    let any = action["properties"].as_object().into_iter().flat_map(|p| p.keys().map(String::as_str));
    required.chain(any).find(is_text).map(String::from)
}

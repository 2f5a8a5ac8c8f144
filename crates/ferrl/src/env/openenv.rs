//! Environments behind an address: OpenEnv's `POST /reset` and `POST /step`.
//!
//! A server that does not keep episodes apart plays one at a time: the others wait until it is free.

use super::{Environment, EpisodeEnd, Fault, Lost, Next, Result, Turn, Why};
use crate::http::Url;
use ferrl_engine::Error;
use serde_json::{Map, Value, json};
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Condvar, Mutex, PoisonError};
use std::time::{Duration, Instant};

/// Fields that may hold the text of an observation; the first present one is read.
const TEXTS: &[&str] =
    &["text", "message", "content", "prompt", "observation", "output", "result", "echoed_message"];
/// The field of an action that is text, where the server does not say.
const ACTION: &str = "message";
/// How long a start waits for a server that plays another episode before it is asked again.
const WAIT: Duration = Duration::from_millis(20);

/// A server.
struct Server {
    url: String,
    timeout: Duration,
    /// The field of an action that holds the policy's text.
    action: String,
    /// Whether it keeps episodes apart by `episode_id`.
    sessions: bool,
    busy: Mutex<bool>,
    free: Condvar,
}

impl Server {
    /// One at an address. `options`: `action` (the field that takes the text), `sessions` (whether it keeps episodes apart).
    fn new(url: &str, options: &Map<String, Value>, timeout: Duration) -> ferrl_engine::Result<Arc<Server>> {
        let bad = |what: String| Error::usage(what).at("env.url").fix("env.url = \"http://127.0.0.1:8000\"");
        Url::parse(url).map_err(bad)?;
        let known = ["action", "sessions"];
        if let Some(key) = options.keys().find(|key| !known.contains(&key.as_str())) {
            return Err(Error::usage(format!(
                "unknown option {key:?}, expected one of {}",
                known.join(", ")
            ))
            .at("env.options"));
        }
        let url = url.trim_end_matches('/').to_string();
        let action = match options.get("action").and_then(Value::as_str) {
            Some(action) => action.to_string(),
            None => text_field(&url, timeout).unwrap_or_else(|| ACTION.into()),
        };
        let sessions = options.get("sessions").and_then(Value::as_bool).unwrap_or(false);
        Ok(Arc::new(Server { url, timeout, action, sessions, busy: Mutex::default(), free: Condvar::new() }))
    }

    /// Refuses a server that does not answer.
    fn check(&self) -> ferrl_engine::Result<()> {
        match self.post("reset", &json!({ "seed": 0 })) {
            Ok(_) => Ok(()),
            Err(lost) => {
                Err(Error::data(lost.message).at(&self.url).fix("start the server, or correct env.url"))
            }
        }
    }

    fn post(&self, path: &str, body: &Value) -> std::result::Result<Value, Lost> {
        let began = Instant::now();
        let url = Url::parse(&format!("{}/{path}", self.url)).map_err(|e| Lost::new(Why::Exited, e))?;
        let answer = url.post(body, self.timeout).map_err(|what| {
            let why = match () {
                () if what.starts_with("no answer") => Why::Hung,
                () if what.starts_with("status") => Why::Raised,
                () if what.contains("no JSON") => Why::Schema,
                () if what.contains("bytes") => Why::Size,
                () => Why::Exited,
            };
            Lost { seconds: began.elapsed().as_secs_f64(), ..Lost::new(why, format!("{path}: {what}")) }
        })?;
        match answer["observation"].is_null() {
            false => Ok(answer),
            true => Err(Lost::new(Why::Schema, format!("{path} answered without an observation"))),
        }
    }

    /// Takes the server for an episode, where it can only play one; whether it was free.
    fn take(&self) -> bool {
        let busy = self.busy.lock().unwrap_or_else(PoisonError::into_inner);
        let (mut busy, _) =
            self.free.wait_timeout_while(busy, WAIT, |busy| *busy).unwrap_or_else(PoisonError::into_inner);
        !std::mem::replace(&mut busy, true)
    }

    fn give_back(&self) {
        *self.busy.lock().unwrap_or_else(PoisonError::into_inner) = false;
        self.free.notify_one();
    }
}

/// Servers of one environment, which take episodes in turn: a seed gives the same episode on each.
pub struct Servers {
    servers: Vec<Arc<Server>>,
    /// Episodes opened so far.
    opened: AtomicU64,
}

impl Servers {
    /// Those at addresses that commas part.
    pub fn new(
        urls: &str,
        options: &Map<String, Value>,
        timeout: Duration,
    ) -> ferrl_engine::Result<Arc<Servers>> {
        let one = |url: &str| Server::new(url.trim(), options, timeout);
        let servers = urls.split(',').map(one).collect::<ferrl_engine::Result<_>>()?;
        Ok(Arc::new(Servers { servers, opened: AtomicU64::new(0) }))
    }

    /// Refuses servers of which one does not answer.
    pub fn check(&self) -> ferrl_engine::Result<()> {
        self.servers.iter().try_for_each(|server| server.check())
    }

    /// An episode of the server whose turn it is.
    pub fn open(&self, seed: u64) -> Box<dyn Environment> {
        static IDS: AtomicU64 = AtomicU64::new(0); // no two episodes of the process share one
        let (turn, number) =
            (self.opened.fetch_add(1, Ordering::Relaxed), IDS.fetch_add(1, Ordering::Relaxed));
        let server = self.servers[turn as usize % self.servers.len()].clone();
        Box::new(ServerEpisode { server, seed, id: format!("{seed}-{number}"), holds: false })
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

/// An episode on a server.
struct ServerEpisode {
    server: Arc<Server>,
    seed: u64,
    id: String,
    /// Whether it holds a server that plays one episode at a time.
    holds: bool,
}

impl ServerEpisode {
    fn call(&self, path: &str, mut body: Value) -> Result<Value> {
        body["episode_id"] = self.id.as_str().into();
        // Once more where the server could not be reached at all: nothing has happened then.
        let once = || self.server.post(path, &body);
        let answer = once().or_else(|lost| if lost.message.contains("refused") { once() } else { Err(lost) });
        answer.map_err(|lost| Fault::Lost(Box::new(lost)))
    }

    fn release(&mut self) {
        if std::mem::take(&mut self.holds) {
            self.server.give_back();
        }
    }
}

impl Drop for ServerEpisode {
    fn drop(&mut self) {
        self.release();
    }
}

impl Environment for ServerEpisode {
    fn start(&mut self) -> Result<String> {
        if !self.server.sessions && !self.holds {
            if !self.server.take() {
                return Err(Fault::Busy);
            }
            self.holds = true;
        }
        let answer = self.call("reset", json!({ "seed": self.seed }))?;
        Ok(format!("{}\n", text(&answer["observation"])))
    }

    fn step(&mut self, action: &str) -> Result<Turn> {
        let mut fields = Map::new();
        fields.insert(self.server.action.clone(), action.into());
        let answer = self.call("step", json!({ "action": fields }))?;
        let observation = &answer["observation"];
        let of =
            |name: &str| Some(&answer[name]).filter(|v| !v.is_null()).unwrap_or(&observation[name]).clone();
        let reward = match of("reward") {
            Value::Null => 0.0,
            given => given.as_f64().unwrap_or(f64::NAN),
        };
        let done = of("done") == true;
        if done {
            self.release();
        }
        Ok(Turn {
            next: Next::Observation(format!("\n{}\n", text(observation))),
            reward,
            score: observation["score"].as_f64(),
            end: done.then_some(match of("truncated") == true {
                true => EpisodeEnd::Truncated,
                false => EpisodeEnd::Terminated,
            }),
            extra: observation.as_object().cloned().unwrap_or_default(),
            ..Default::default()
        })
    }

    fn waits(&self) -> bool {
        true
    }

    fn label(&self) -> String {
        format!("{}, episode {}", self.server.url, self.id)
    }
}

/// What the policy reads of an observation: its text, or all of it as JSON.
fn text(observation: &Value) -> String {
    let found = TEXTS.iter().find_map(|name| observation[*name].as_str());
    match observation {
        Value::String(text) => text.clone(),
        other => found.map_or_else(|| other.to_string(), String::from),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::http::tests::{ok, serve};

    fn server(replies: &[Value], options: Value) -> (Arc<Server>, std::thread::JoinHandle<Vec<String>>) {
        let replies = replies.iter().map(|reply| ok(&reply.to_string())).collect();
        let (url, requests) = serve(replies);
        let url = url.trim_end_matches("/retrieve").to_string();
        (Server::new(&url, options.as_object().unwrap(), Duration::from_secs(5)).unwrap(), requests)
    }

    #[test]
    fn an_episode_is_reset_and_stepped_by_the_servers_own_fields() {
        let schema =
            json!({ "action": { "properties": { "guess": { "type": "string" } }, "required": ["guess"] } });
        let begun = json!({ "observation": { "prompt": "Guess." }, "reward": null, "done": false });
        let on = json!({ "observation": { "prompt": "larger" }, "reward": 0.5, "done": false });
        let over = json!({ "observation": { "prompt": "right", "reward": 1.0 }, "done": true });
        let (server, requests) = server(&[schema, begun, on, over], json!({}));
        let mut episode = open(&server, 7);
        assert_eq!(episode.start().unwrap(), "Guess.\n");
        assert!(!server.take(), "it plays one episode at a time");
        let turn = episode.step("3").unwrap();
        assert_eq!((turn.next, turn.reward, turn.end), (Next::Observation("\nlarger\n".into()), 0.5, None));
        let turn = episode.step("4").unwrap();
        assert_eq!((turn.reward, turn.end), (1.0, Some(EpisodeEnd::Terminated)));
        assert!(server.take(), "it is free again");
        let requests = requests.join().unwrap();
        assert!(requests[1].contains("POST /reset") && requests[1].contains("\"seed\":7"), "{}", requests[1]);
        assert!(
            requests[2].contains("POST /step") && requests[2].contains("{\"guess\":\"3\"}"),
            "{}",
            requests[2]
        );
    }

    fn open(server: &Arc<Server>, seed: u64) -> Box<dyn Environment> {
        Servers { servers: vec![server.clone()], opened: AtomicU64::new(0) }.open(seed)
    }

    #[test]
    fn several_servers_take_episodes_in_turn() {
        let begun = |name: &str| json!({ "observation": { "text": name }, "done": false });
        let options = json!({ "action": "text" });
        let ((a, _), (b, _)) = (serve_texts(&begun("a")), serve_texts(&begun("b")));
        let urls = format!("{a}, {b}/");
        let servers = Servers::new(&urls, options.as_object().unwrap(), Duration::from_secs(5)).unwrap();
        let mut episodes = [servers.open(1), servers.open(1)];
        let mut begun: Vec<String> = episodes.iter_mut().map(|e| e.start().unwrap()).collect();
        begun.sort();
        assert_eq!(begun, ["a\n", "b\n"], "both play at once, though each plays one episode at a time");
        let bad = Servers::new("http://127.0.0.1:1,", &Map::new(), Duration::from_secs(1)).err().unwrap();
        assert!(bad.to_string().contains("env.url"), "{bad}");
    }

    fn serve_texts(reply: &Value) -> (String, std::thread::JoinHandle<Vec<String>>) {
        let (url, requests) = serve(vec![ok(&reply.to_string())]);
        (url.trim_end_matches("/retrieve").to_string(), requests)
    }

    #[test]
    fn an_answer_without_an_observation_loses_the_episode() {
        let (server, _) = server(&[json!({ "detail": "no" })], json!({ "action": "text", "sessions": true }));
        let Err(Fault::Lost(lost)) = open(&server, 1).start() else { panic!("it is lost") };
        assert_eq!((lost.why, lost.message.as_str()), (Why::Schema, "reset answered without an observation"));
        let Err(Fault::Lost(lost)) = open(&server, 1).start() else { panic!("the server has gone") };
        assert_eq!(lost.why, Why::Exited, "{lost}");
    }
}

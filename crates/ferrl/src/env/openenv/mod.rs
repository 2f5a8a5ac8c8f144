//! Environments behind an address: OpenEnv's messages `reset` and `step`, over a WebSocket for each episode or over HTTP.
//!
//! If a server limits the number of concurrent episodes, the others wait.

mod server;

use super::{Environment, EpisodeEnd, Fault, Next, Result, Turn};
use crate::websocket::Socket;
use serde_json::{Map, Value, json};
use server::{Server, ServerRefusal, Transport};
use std::sync::Arc;
use std::sync::atomic::{AtomicU64, Ordering};
use std::time::Duration;

/// Fields that may hold the text of an observation; the first present one is read.
const TEXTS: &[&str] =
    &["text", "message", "content", "prompt", "observation", "output", "result", "echoed_message"];

/// Servers of one environment, which share the episodes: a seed gives the same episode on each.
pub struct Servers {
    servers: Vec<Arc<Server>>,
    /// Episodes opened so far.
    opened: AtomicU64,
}

impl Servers {
    /// The servers at addresses separated by commas.
    pub fn new(
        urls: &str,
        options: &Map<String, Value>,
        timeout: Duration,
    ) -> ferrl_engine::Result<Arc<Servers>> {
        let one = |url: &str| Server::new(url.trim(), options, timeout);
        let servers = urls.split(',').map(one).collect::<ferrl_engine::Result<_>>()?;
        Ok(Arc::new(Servers { servers, opened: AtomicU64::new(0) }))
    }

    /// Fails if a server does not respond.
    pub fn check(&self) -> ferrl_engine::Result<()> {
        self.servers.iter().try_for_each(|server| server.check())
    }

    /// An episode on the next server.
    pub fn open(&self, seed: u64) -> Box<dyn Environment> {
        static IDS: AtomicU64 = AtomicU64::new(0); // no two episodes of the process share one
        let (turn, number) =
            (self.opened.fetch_add(1, Ordering::Relaxed), IDS.fetch_add(1, Ordering::Relaxed));
        let server = self.servers[turn as usize % self.servers.len()].clone();
        Box::new(ServerEpisode { server, seed, id: format!("{seed}-{number}"), holds: false, socket: None })
    }
}

struct ServerEpisode {
    server: Arc<Server>,
    seed: u64,
    id: String,
    /// Whether it holds a slot of the server.
    holds: bool,
    /// Its WebSocket session, if any.
    socket: Option<Socket>,
}

impl ServerEpisode {
    /// A request over HTTP, repeated once if the server could not be reached.
    fn post(&self, path: &str, mut body: Value) -> std::result::Result<Value, ServerRefusal> {
        body["episode_id"] = self.id.as_str().into();
        match self.server.post(path, &body) {
            Err(ServerRefusal::Lost(lost)) if lost.message.contains("refused") => {
                self.server.post(path, &body)
            }
            answer => answer,
        }
    }

    fn reset(&mut self) -> std::result::Result<Value, ServerRefusal> {
        if self.server.transport == Transport::Http {
            return self.post("reset", json!({ "seed": self.seed }));
        }
        let socket = self.socket.insert(self.server.connect()?);
        self.server.tell(socket, "reset", &json!({ "seed": self.seed, "episode_id": self.id }))
    }

    fn act(&mut self, action: &str) -> std::result::Result<Value, ServerRefusal> {
        let mut fields = Map::new();
        fields.insert(self.server.action.clone(), action.into());
        match &mut self.socket {
            Some(socket) => self.server.tell(socket, "step", &Value::Object(fields)),
            None => self.post("step", json!({ "action": fields })),
        }
    }

    fn release(&mut self) {
        self.socket = None;
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
        if !self.holds && !self.server.take() {
            return Err(Fault::Busy);
        }
        self.holds = true;
        match self.reset() {
            Ok(answer) => Ok(format!("{}\n", text(&answer["observation"]))),
            Err(ServerRefusal::Full) => {
                (self.socket, self.holds) = (None, false);
                self.server.turned_away();
                Err(Fault::Busy)
            }
            Err(ServerRefusal::Lost(lost)) => Err(Fault::Lost(lost)),
        }
    }

    fn step(&mut self, action: &str) -> Result<Turn> {
        let answer = self.act(action).map_err(|refusal| match refusal {
            ServerRefusal::Full => Fault::Busy,
            ServerRefusal::Lost(lost) => Fault::Lost(lost),
        })?;
        let observation = &answer["observation"];
        let of =
            |name: &str| Some(&answer[name]).filter(|v| !v.is_null()).unwrap_or(&observation[name]).clone();
        let reward = match of("reward") {
            Value::Null => 0.0,
            Value::Bool(right) => f64::from(u8::from(right)),
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

/// The text of an observation, or the whole observation as JSON.
fn text(observation: &Value) -> String {
    let found = TEXTS.iter().find_map(|name| observation[*name].as_str());
    match observation {
        Value::String(text) => text.clone(),
        other => found.map_or_else(|| other.to_string(), String::from),
    }
}

#[cfg(test)]
mod tests {
    use super::super::Why;
    use super::*;
    use crate::http::tests::{ok, serve};
    use crate::websocket::tests as websocket;

    fn server(replies: &[Value], options: Value) -> (Arc<Server>, std::thread::JoinHandle<Vec<String>>) {
        let replies = replies.iter().map(|reply| ok(&reply.to_string())).collect();
        let (url, requests) = serve(replies);
        let url = url.trim_end_matches("/retrieve").to_string();
        (Server::new(&url, options.as_object().unwrap(), Duration::from_secs(60)).unwrap(), requests)
    }

    #[test]
    fn an_episode_is_reset_and_stepped_by_the_servers_own_fields() {
        let schema =
            json!({ "action": { "properties": { "guess": { "type": "string" } }, "required": ["guess"] } });
        let begun = json!({ "observation": { "prompt": "Guess." }, "reward": null, "done": false });
        let on = json!({ "observation": { "prompt": "larger" }, "reward": 0.5, "done": false });
        let over = json!({ "observation": { "prompt": "right", "reward": 1.0 }, "done": true });
        let (server, requests) = server(&[schema, begun, on, over], json!({ "transport": "http" }));
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
        let options = json!({ "action": "text", "transport": "http" });
        let ((a, _), (b, _)) = (serve_texts(&begun("a")), serve_texts(&begun("b")));
        let urls = format!("{a}, {b}/");
        let servers = Servers::new(&urls, options.as_object().unwrap(), Duration::from_secs(60)).unwrap();
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
        let (server, _) = server(
            &[json!({ "detail": "no" })],
            json!({ "action": "text", "sessions": true, "transport": "http" }),
        );
        let Err(Fault::Lost(lost)) = open(&server, 1).start() else { panic!("it is lost") };
        assert_eq!((lost.why, lost.message.as_str()), (Why::Schema, "reset answered without an observation"));
        let Err(Fault::Lost(lost)) = open(&server, 1).start() else { panic!("the server has gone") };
        assert_eq!(lost.why, Why::Exited, "{lost}");
    }

    /// Bug: a server that took long to answer was spoken to over HTTP, where each message goes to a new environment.
    #[test]
    fn a_slow_server_is_not_taken_for_one_without_websocket() {
        let slow = std::net::TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", slow.local_addr().unwrap());
        let server = Server::new(&url, &Map::new(), Duration::from_millis(80)).unwrap();
        assert_eq!(server.transport, Transport::WebSocket);
    }

    /// A server that speaks WebSocket, whose connections are the probe and then those given.
    fn sessions(connections: Vec<Vec<Value>>) -> (Arc<Server>, std::thread::JoinHandle<Vec<Value>>) {
        let texts = |answers: Vec<Value>| answers.iter().map(websocket::text).collect();
        let all = std::iter::once(Vec::new()).chain(connections.into_iter().map(texts)).collect();
        let (url, heard) = websocket::serve(all);
        let options = json!({ "action": "guess" });
        (Server::new(&url, options.as_object().unwrap(), Duration::from_secs(60)).unwrap(), heard)
    }

    fn observation(text: &str, done: bool) -> Value {
        json!({ "type": "observation", "data": { "observation": { "text": text }, "reward": 0.5, "done": done } })
    }

    #[test]
    fn an_episode_has_a_connection_of_its_own_where_the_server_speaks_websocket() {
        let (server, heard) = sessions(vec![vec![
            observation("Guess.", false),
            observation("larger", false),
            observation("right", true),
        ]]);
        assert_eq!(server.transport, Transport::WebSocket);
        let mut episode = open(&server, 7);
        assert_eq!(episode.start().unwrap(), "Guess.\n");
        let turn = episode.step("3").unwrap();
        assert_eq!((turn.next, turn.reward, turn.end), (Next::Observation("\nlarger\n".into()), 0.5, None));
        assert_eq!(episode.step("4").unwrap().end, Some(EpisodeEnd::Terminated));
        let heard = heard.join().unwrap();
        assert_eq!((&heard[0]["type"], &heard[0]["data"]["seed"]), (&json!("reset"), &json!(7)));
        assert_eq!(heard[1], json!({ "type": "step", "data": { "guess": "3" } }));
    }

    #[test]
    fn a_server_that_is_full_keeps_an_episode_waiting_and_one_that_raises_loses_it() {
        let full = json!({ "type": "error", "data": { "code": "CAPACITY_REACHED", "message": "full", "max_sessions": 1 } });
        let raised = json!({ "type": "error", "data": { "code": "EXECUTION_ERROR", "message": "boom" } });
        let (server, _heard) = sessions(vec![vec![full], vec![observation("Guess.", false), raised]]);
        let mut episode = open(&server, 1);
        assert!(matches!(episode.start(), Err(Fault::Busy)));
        episode.start().unwrap();
        assert!(!server.take(), "it said that it plays one at a time");
        let Err(Fault::Lost(lost)) = episode.step("3") else { panic!("it is lost") };
        assert_eq!((lost.why, lost.message.as_str()), (Why::Raised, "step: boom"));
        drop(episode);
        assert!(server.take(), "it is free again");
    }
}

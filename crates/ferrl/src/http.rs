//! JSON over HTTP/1.1 for services on the same machine or network: one request a connection, a deadline for the whole of it.
//! TLS is not spoken.

use serde_json::Value;
use std::io::{Read, Write};
use std::net::{TcpStream, ToSocketAddrs};
use std::time::{Duration, Instant};

/// Longest answer that is read, in bytes.
pub(crate) const MAX_BYTES: usize = 16 << 20;

/// How the message of a server begins that took too long.
pub(crate) const NO_ANSWER: &str = "no answer";

/// When the whole of a request must be over.
#[derive(Clone, Copy, Debug)]
pub(crate) struct Deadline {
    at: Instant,
    timeout: Duration,
}

impl Deadline {
    /// That long from now.
    pub(crate) fn after(timeout: Duration) -> Deadline {
        Deadline { at: Instant::now() + timeout, timeout }
    }

    fn late(&self) -> String {
        format!("{NO_ANSWER} within {} s", self.timeout.as_secs_f64())
    }

    /// The time that is left.
    pub(crate) fn left(&self) -> Result<Duration, String> {
        let left = self.at.checked_duration_since(Instant::now()).filter(|left| !left.is_zero());
        left.ok_or_else(|| self.late())
    }

    /// What a failure of the connection means.
    pub(crate) fn failed(&self, error: std::io::Error) -> String {
        match error.kind() {
            std::io::ErrorKind::TimedOut | std::io::ErrorKind::WouldBlock => self.late(),
            _ => error.to_string(),
        }
    }
}

/// The parts of an `http://` address.
#[derive(Clone, Debug, PartialEq)]
pub(crate) struct Url {
    /// Name and port, as the `Host` header has them.
    host: String,
    address: String,
    path: String,
}

impl Url {
    /// Reads an address; what is wrong with it otherwise.
    pub(crate) fn parse(text: &str) -> Result<Url, String> {
        let Some(rest) = text.strip_prefix("http://") else {
            return Err(format!("{text:?} is no http:// address"));
        };
        let (host, path) = rest.find('/').map_or((rest, "/"), |at| rest.split_at(at));
        let bare = host.rsplit(']').next().unwrap_or_default();
        let address = if bare.contains(':') { host.to_string() } else { format!("{host}:80") };
        if host.is_empty() || text.chars().any(|c| c.is_whitespace() || c.is_control()) {
            return Err(format!("{text:?} names no host"));
        }
        Ok(Url { host: host.into(), address, path: path.into() })
    }

    /// Posts a value and reads one; the error says what went wrong, for people.
    pub(crate) fn post(&self, body: &Value, timeout: Duration) -> Result<Value, String> {
        self.ask("POST", &body.to_string(), timeout)
    }

    /// Reads a value.
    pub(crate) fn get(&self, timeout: Duration) -> Result<Value, String> {
        self.ask("GET", "", timeout)
    }

    /// Name and port, as the `Host` header has them.
    pub(crate) fn host(&self) -> &str {
        &self.host
    }

    /// What is asked for on that host.
    pub(crate) fn path(&self) -> &str {
        &self.path
    }

    /// A connection to the first address that takes one.
    pub(crate) fn connect(&self, deadline: Deadline) -> Result<TcpStream, String> {
        let addresses = self.address.to_socket_addrs().map_err(|e| format!("{}: {e}", self.address))?;
        let mut stream = Err(format!("{} has no address", self.address));
        for address in addresses {
            stream = TcpStream::connect_timeout(&address, deadline.left()?).map_err(|e| deadline.failed(e));
            if stream.is_ok() {
                break;
            }
        }
        stream
    }

    fn ask(&self, method: &str, body: &str, timeout: Duration) -> Result<Value, String> {
        let deadline = Deadline::after(timeout);
        let left = || deadline.left();
        let failed = |e: std::io::Error| deadline.failed(e);
        let mut stream = self.connect(deadline)?;
        let head = format!(
            "{method} {} HTTP/1.1\r\nHost: {}\r\nContent-Type: application/json\r\nAccept: application/json\r\n\
             Content-Length: {}\r\nConnection: close\r\n\r\n",
            self.path,
            self.host,
            body.len()
        );
        stream.set_write_timeout(Some(left()?)).map_err(failed)?;
        stream.write_all(head.as_bytes()).and_then(|()| stream.write_all(body.as_bytes())).map_err(failed)?;
        let mut reply = Vec::new();
        let mut part = vec![0; 1 << 16];
        loop {
            stream.set_read_timeout(Some(left()?)).map_err(failed)?;
            let read = stream.read(&mut part).map_err(failed)?;
            reply.extend_from_slice(&part[..read]);
            if reply.len() > MAX_BYTES {
                return Err(format!("the answer has more than {MAX_BYTES} bytes"));
            }
            if read == 0 || complete(&reply) {
                return value(&reply);
            }
        }
    }
}

/// Head and body of a reply, where the head is there.
pub(crate) fn split(reply: &[u8]) -> Option<(&str, &[u8])> {
    let end = reply.windows(4).position(|w| w == b"\r\n\r\n")?;
    Some((std::str::from_utf8(&reply[..end]).ok()?, &reply[end + 4..]))
}

pub(crate) fn header<'a>(head: &'a str, name: &str) -> Option<&'a str> {
    let named = head.lines().skip(1).filter_map(|line| line.split_once(':'));
    named.into_iter().find(|(n, _)| n.trim().eq_ignore_ascii_case(name)).map(|(_, value)| value.trim())
}

/// Whether nothing more is to come; a reply without a length ends with the connection.
fn complete(reply: &[u8]) -> bool {
    let Some((head, body)) = split(reply) else { return false };
    match header(head, "content-length").and_then(|n| n.parse::<usize>().ok()) {
        Some(length) => body.len() >= length,
        None => chunked(head) && unchunk(body).is_some(),
    }
}

fn chunked(head: &str) -> bool {
    header(head, "transfer-encoding").is_some_and(|how| how.eq_ignore_ascii_case("chunked"))
}

/// The body behind its chunk sizes, where the last one has come.
fn unchunk(mut body: &[u8]) -> Option<Vec<u8>> {
    let mut out = Vec::new();
    loop {
        let end = body.windows(2).position(|w| w == b"\r\n")?;
        let size = std::str::from_utf8(&body[..end]).ok()?.split(';').next()?.trim();
        let size = usize::from_str_radix(size, 16).ok().filter(|size| *size <= MAX_BYTES)?;
        if size == 0 {
            return Some(out);
        }
        out.extend_from_slice(body.get(end + 2..end + 2 + size)?);
        body = body.get(end + 2 + size + 2..)?;
    }
}

fn value(reply: &[u8]) -> Result<Value, String> {
    let (head, body) = split(reply).ok_or("the connection closed before an answer came")?;
    let status = head.split_whitespace().nth(1).unwrap_or_default();
    let body = if chunked(head) { unchunk(body).ok_or("the answer was cut off")? } else { body.to_vec() };
    if !status.starts_with('2') {
        let said: String = String::from_utf8_lossy(&body).chars().take(200).collect();
        return Err(format!("status {status}: {}", said.trim()));
    }
    serde_json::from_slice(&body).map_err(|e| format!("the answer is no JSON: {e}"))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use serde_json::json;
    use std::net::TcpListener;

    /// A service that gives each connection the next of these replies, and the requests it got.
    pub(crate) fn serve(replies: Vec<String>) -> (String, std::thread::JoinHandle<Vec<String>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}/retrieve", listener.local_addr().unwrap());
        let handle = std::thread::spawn(move || {
            let answer = |reply: String| {
                let (mut stream, _) = listener.accept().unwrap();
                let (mut request, mut part) = (Vec::new(), [0; 4096]);
                while !complete(&request) {
                    let read = stream.read(&mut part).unwrap();
                    assert!(read > 0, "the request ended early");
                    request.extend_from_slice(&part[..read]);
                }
                stream.write_all(reply.as_bytes()).unwrap();
                String::from_utf8(request).unwrap()
            };
            replies.into_iter().map(answer).collect()
        });
        (url, handle)
    }

    pub(crate) fn ok(body: &str) -> String {
        format!("HTTP/1.1 200 OK\r\nContent-Length: {}\r\n\r\n{body}", body.len())
    }

    #[test]
    fn addresses_are_read() {
        let url = Url::parse("http://127.0.0.1:8000/retrieve").unwrap();
        assert_eq!((url.address.as_str(), url.path.as_str()), ("127.0.0.1:8000", "/retrieve"));
        let url = Url::parse("http://[::1]").unwrap();
        assert_eq!((url.address.as_str(), url.path.as_str()), ("[::1]:80", "/"));
        for bad in ["https://a/b", "http://", "a:1", "http://a b/"] {
            assert!(Url::parse(bad).is_err(), "{bad}");
        }
    }

    #[test]
    fn replies_with_a_length_in_chunks_or_until_the_end_are_read() {
        let chunked =
            "HTTP/1.1 200 OK\r\ntransfer-encoding: Chunked\r\n\r\n3\r\n{\"a\r\n5;x=y\r\n\":1}\n\r\n0\r\n\r\n";
        let closed = "HTTP/1.0 200 OK\r\n\r\n{\"a\":1}";
        let (url, served) = serve(vec![ok("{\"a\":1}"), chunked.into(), closed.into()]);
        let url = Url::parse(&url).unwrap();
        for _ in 0..3 {
            assert_eq!(url.post(&json!({ "q": "é" }), Duration::from_secs(60)), Ok(json!({ "a": 1 })));
        }
        let requests = served.join().unwrap();
        assert!(
            requests[0].starts_with("POST /retrieve HTTP/1.1\r\n")
                && requests[0].ends_with("\r\n\r\n{\"q\":\"é\"}")
        );
    }

    #[test]
    fn failures_are_said() {
        let (url, served) =
            serve(vec!["HTTP/1.1 500 Oops\r\n\r\nbroken".into(), ok("<html>"), String::new()]);
        let url = Url::parse(&url).unwrap();
        for part in ["status 500: broken", "no JSON", "closed before"] {
            let error = url.post(&json!({}), Duration::from_secs(60)).unwrap_err();
            assert!(error.contains(part), "{error}");
        }
        served.join().unwrap();
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = Url::parse(&format!("http://{}", silent.local_addr().unwrap())).unwrap();
        let error = url.post(&json!({}), Duration::from_millis(80)).unwrap_err();
        assert!(error.contains("no answer within 0.08 s"), "{error}");
    }
}

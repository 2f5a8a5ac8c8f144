//! JSON over a WebSocket (RFC 6455) to services on the same machine or network: one request, one response.
//! TLS, extensions and binary messages are not spoken.

use crate::http::{Deadline, MAX_BYTES, Url, header, split};
use serde_json::Value;
use std::io::{Read, Write};
use std::net::TcpStream;
use std::time::Duration;

/// The key of the handshake and what a server makes of it: the RFC's own example. A key need not be secret; it tells a server
/// that speaks WebSocket from one that repeats what it hears.
const KEY: &str = "dGhlIHNhbXBsZSBub25jZQ==";
const ACCEPT: &str = "s3pPLMBiTxaQ9kYGzzhZRbK+xOo=";
/// What clients must combine their bytes with, so that no proxy takes them for a request; any four bytes will do.
const MASK: [u8; 4] = [0x37, 0xfa, 0x21, 0x3d];

const TEXT: u8 = 1;
const CLOSE: u8 = 8;
const PING: u8 = 9;
const PONG: u8 = 10;

/// A connection, closed when it is dropped.
pub(crate) struct Socket {
    stream: TcpStream,
    /// Bytes that came and were not yet read.
    come: Vec<u8>,
}

impl Socket {
    /// Opens a connection; the error says what went wrong, with the status where the server refused to switch.
    pub(crate) fn open(url: &Url, timeout: Duration) -> Result<Socket, String> {
        let deadline = Deadline::after(timeout);
        let mut socket = Socket { stream: url.connect(deadline)?, come: Vec::new() };
        let head = format!(
            "GET {} HTTP/1.1\r\nHost: {}\r\nUpgrade: websocket\r\nConnection: Upgrade\r\nSec-WebSocket-Key: {KEY}\r\n\
             Sec-WebSocket-Version: 13\r\n\r\n",
            url.path(),
            url.host()
        );
        socket.write(head.as_bytes(), deadline)?;
        loop {
            if let Some((head, rest)) = split(&socket.come) {
                let status = head.split_whitespace().nth(1).unwrap_or_default();
                if status != "101" {
                    return Err(format!("status {status} to a WebSocket"));
                }
                if header(head, "sec-websocket-accept") != Some(ACCEPT) {
                    return Err("the server's handshake is no WebSocket's".into());
                }
                socket.come = rest.to_vec();
                return Ok(socket);
            }
            socket.read(deadline)?;
        }
    }

    /// Sends a value and returns the next one that comes.
    pub(crate) fn ask(&mut self, message: &Value, timeout: Duration) -> Result<Value, String> {
        let deadline = Deadline::after(timeout);
        self.send(TEXT, message.to_string().as_bytes(), deadline)?;
        let text = self.message(deadline)?;
        serde_json::from_slice(&text).map_err(|e| format!("the answer is no JSON: {e}"))
    }

    /// The next message, put together from its frames; pings are answered meanwhile.
    fn message(&mut self, deadline: Deadline) -> Result<Vec<u8>, String> {
        let mut text = Vec::new();
        loop {
            let Some((last, code, body, used)) = frame(&self.come)? else {
                self.read(deadline)?;
                continue;
            };
            let body = self.come[body].to_vec();
            self.come.drain(..used);
            match code {
                CLOSE => return Err("the connection closed before an answer came".into()),
                PING => self.send(PONG, &body, deadline)?,
                PONG => {}
                _ => {
                    text.extend(body);
                    if text.len() > MAX_BYTES {
                        return Err(format!("the answer has more than {MAX_BYTES} bytes"));
                    }
                    if last {
                        return Ok(text);
                    }
                }
            }
        }
    }

    /// Sends one frame.
    fn send(&mut self, code: u8, body: &[u8], deadline: Deadline) -> Result<(), String> {
        let mut bytes = vec![0x80 | code];
        match body.len() {
            len @ 0..126 => bytes.push(0x80 | len as u8),
            len @ 126..65_536 => {
                bytes.push(0x80 | 126);
                bytes.extend((len as u16).to_be_bytes());
            }
            len => {
                bytes.push(0x80 | 127);
                bytes.extend((len as u64).to_be_bytes());
            }
        }
        bytes.extend(MASK);
        bytes.extend(body.iter().zip(MASK.iter().cycle()).map(|(byte, mask)| byte ^ mask));
        self.write(&bytes, deadline)
    }

    fn write(&mut self, bytes: &[u8], deadline: Deadline) -> Result<(), String> {
        self.stream.set_write_timeout(Some(deadline.left()?)).map_err(|e| deadline.failed(e))?;
        self.stream.write_all(bytes).map_err(|e| deadline.failed(e))
    }

    fn read(&mut self, deadline: Deadline) -> Result<(), String> {
        self.stream.set_read_timeout(Some(deadline.left()?)).map_err(|e| deadline.failed(e))?;
        let mut part = vec![0; 1 << 14];
        match self.stream.read(&mut part).map_err(|e| deadline.failed(e))? {
            0 => Err("the connection closed before an answer came".into()),
            read => {
                self.come.extend_from_slice(&part[..read]);
                Ok(())
            }
        }
    }
}

impl Drop for Socket {
    fn drop(&mut self) {
        // Whether or not the server hears it: the connection ends here.
        let _ = self.send(CLOSE, &1000u16.to_be_bytes(), Deadline::after(Duration::from_millis(100)));
    }
}

/// Whether it is the last of its message, its code, where its body stands, and where it ends.
type Frame = (bool, u8, std::ops::Range<usize>, usize);

/// The frame that bytes begin with; none where it has not come whole.
fn frame(bytes: &[u8]) -> Result<Option<Frame>, String> {
    let [first, second, ..] = *bytes else { return Ok(None) };
    let (wide, start) = match second & 0x7f {
        126 => (2, 4),
        127 => (8, 10),
        _ => (0, 2),
    };
    let Some(length) = bytes.get(2..2 + wide) else { return Ok(None) };
    let length = match wide {
        0 => u64::from(second & 0x7f),
        _ => length.iter().fold(0u64, |sum, byte| sum << 8 | u64::from(*byte)),
    };
    if second & 0x80 != 0 || first & 0x70 != 0 {
        return Err("the server sends masked or compressed frames".into());
    }
    if length > MAX_BYTES as u64 {
        return Err(format!("the answer has more than {MAX_BYTES} bytes"));
    }
    let end = start + length as usize;
    Ok((bytes.len() >= end).then_some((first & 0x80 != 0, first & 0x0f, start..end, end)))
}

#[cfg(test)]
pub(crate) mod tests {
    use super::*;
    use serde_json::json;
    use std::net::TcpListener;

    /// A service that switches each connection to a WebSocket and gives each message the next of these answers; and the
    /// messages it got. A connection ends with its answers.
    pub(crate) fn serve(connections: Vec<Vec<Vec<u8>>>) -> (String, std::thread::JoinHandle<Vec<Value>>) {
        let listener = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = format!("http://{}", listener.local_addr().unwrap());
        let handle = std::thread::spawn(move || {
            let mut heard = Vec::new();
            for answers in connections {
                let (stream, _) = listener.accept().unwrap();
                let mut peer = Socket { stream, come: Vec::new() };
                let deadline = Deadline::after(Duration::from_secs(60));
                while split(&peer.come).is_none() {
                    peer.read(deadline).unwrap();
                }
                peer.come.clear();
                let head =
                    "HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: Upgrade\r\n";
                peer.write(format!("{head}Sec-WebSocket-Accept: {ACCEPT}\r\n\r\n").as_bytes(), deadline)
                    .unwrap();
                for answer in answers {
                    heard.extend(unmasked(&mut peer, deadline));
                    peer.write(&answer, deadline).unwrap();
                }
            }
            heard
        });
        (url, handle)
    }

    /// The next message of a client, whose frames are masked and short.
    fn unmasked(peer: &mut Socket, deadline: Deadline) -> Option<Value> {
        loop {
            if let [_, length, rest @ ..] = &peer.come[..] {
                let (length, rest) = match length & 0x7f {
                    126 if rest.len() > 2 => (u16::from_be_bytes([rest[0], rest[1]]) as usize, &rest[2..]),
                    length => (length as usize, rest),
                };
                if rest.len() >= 4 + length {
                    let body: Vec<u8> =
                        rest[4..4 + length].iter().zip(MASK.iter().cycle()).map(|(b, m)| b ^ m).collect();
                    let used = peer.come.len() - rest.len() + 4 + length;
                    peer.come.drain(..used);
                    return serde_json::from_slice(&body).ok();
                }
            }
            peer.read(deadline).ok()?;
        }
    }

    /// A text in one frame.
    pub(crate) fn text(value: &Value) -> Vec<u8> {
        let body = value.to_string().into_bytes();
        let mut out = vec![0x80 | TEXT, 126];
        out.extend((body.len() as u16).to_be_bytes());
        out.extend(body);
        out
    }

    #[test]
    fn messages_are_put_together_from_frames_and_pings_are_answered() {
        let mut broken = vec![TEXT, 4];
        broken.extend(b"{\"a\"");
        broken.extend([0x80 | PING, 2, b'h', b'i', 0x80, 3]);
        broken.extend(b":1}");
        let (url, served) = serve(vec![vec![broken, text(&json!({ "b": "é".repeat(300) }))]]);
        let mut socket =
            Socket::open(&Url::parse(&format!("{url}/ws")).unwrap(), Duration::from_secs(60)).unwrap();
        let long = json!({ "q": "é".repeat(100) });
        assert_eq!(socket.ask(&long, Duration::from_secs(60)), Ok(json!({ "a": 1 })));
        assert_eq!(socket.ask(&json!(2), Duration::from_secs(60)).unwrap()["b"], "é".repeat(300));
        drop(socket);
        assert_eq!(served.join().unwrap()[0], long);
    }

    #[test]
    fn a_server_that_closes_refuses_or_is_silent_is_named() {
        let (url, _served) = serve(vec![vec![vec![0x80 | CLOSE, 0]]]);
        let url = Url::parse(&url).unwrap();
        let mut socket = Socket::open(&url, Duration::from_secs(60)).unwrap();
        let error = socket.ask(&json!(1), Duration::from_secs(60)).unwrap_err();
        assert!(error.contains("closed before"), "{error}");
        let plain = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = Url::parse(&format!("http://{}", plain.local_addr().unwrap())).unwrap();
        std::thread::spawn(move || plain.accept().unwrap().0.write_all(b"HTTP/1.1 404 Not Found\r\n\r\n"));
        let error = Socket::open(&url, Duration::from_secs(60)).err().unwrap();
        assert!(error.contains("status 404"), "{error}");
        let silent = TcpListener::bind("127.0.0.1:0").unwrap();
        let url = Url::parse(&format!("http://{}", silent.local_addr().unwrap())).unwrap();
        let error = Socket::open(&url, Duration::from_millis(80)).err().unwrap();
        assert!(error.contains("no answer within"), "{error}");
    }
}

//! Downloads against a server on this machine: layout, resuming, checksums, tokens. Needs the feature `hub`.
#![cfg(feature = "hub")]
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::data::hub::download::Hub;
use ferrl::data::hub::{HubCache, Repo};
use ring::digest::{SHA1_FOR_LEGACY_USE_ONLY, SHA256, digest};
use std::collections::BTreeMap;
use std::io::{BufRead, BufReader, Write};
use std::net::{TcpListener, TcpStream};
use std::sync::{Arc, Mutex};

const COMMIT: &str = "0123456789abcdef0123456789abcdef01234567";

#[derive(Default)]
struct State {
    files: BTreeMap<String, Vec<u8>>,
    /// Every request: method, path, range, token.
    seen: Vec<(String, String, Option<String>, Option<String>)>,
    /// Connections that end in the middle of the large file's bytes.
    cuts: usize,
    /// Send other bytes than the etag promises.
    corrupt: bool,
    /// Where the large file's bytes are; here where absent.
    elsewhere: Option<String>,
}

fn hex(bytes: &[u8]) -> String {
    bytes.iter().map(|b| format!("{b:02x}")).collect()
}

fn git_hash(content: &[u8]) -> String {
    let whole = [format!("blob {}\0", content.len()).as_bytes(), content].concat();
    hex(digest(&SHA1_FOR_LEGACY_USE_ONLY, &whole).as_ref())
}

fn sha256(content: &[u8]) -> String {
    hex(digest(&SHA256, content).as_ref())
}

/// A hub with one model: a small file kept in git, and a large one kept elsewhere.
fn serve() -> (String, Arc<Mutex<State>>) {
    let state = Arc::new(Mutex::new(State::default()));
    let large: Vec<u8> = (0..300_000u32).flat_map(|i| i.to_le_bytes()).collect();
    let mut files = BTreeMap::new();
    files.insert("config.json".to_string(), b"{\"model_type\": \"test\"}".to_vec());
    files.insert("model.safetensors".to_string(), large);
    files.insert("README.md".to_string(), b"words".to_vec());
    state.lock().unwrap().files = files;
    let listener = TcpListener::bind("127.0.0.1:0").unwrap();
    let address = format!("http://{}", listener.local_addr().unwrap());
    let (shared, own) = (state.clone(), address.clone());
    std::thread::spawn(move || {
        for stream in listener.incoming() {
            let (state, own) = (shared.clone(), own.clone());
            std::thread::spawn(move || answer(stream.unwrap(), &state, &own));
        }
    });
    (address, state)
}

fn answer(mut stream: TcpStream, state: &Mutex<State>, own: &str) {
    let mut lines = BufReader::new(stream.try_clone().unwrap()).lines().map(Result::unwrap);
    let first = lines.next().unwrap_or_default();
    let mut words = first.split(' ').map(String::from);
    let (method, path) = (words.next().unwrap_or_default(), words.next().unwrap_or_default());
    let (mut range, mut token) = (None, None);
    for line in lines.take_while(|l| !l.is_empty()) {
        let (name, value) = line.split_once(':').unwrap_or_default();
        match name.to_lowercase().as_str() {
            "range" => range = Some(value.trim().to_owned()),
            "authorization" => token = Some(value.trim().to_owned()),
            _ => {}
        }
    }
    let mut s = state.lock().unwrap();
    s.seen.push((method.clone(), path.clone(), range.clone(), token.clone()));
    let send = |stream: &mut TcpStream, status: &str, headers: &str, body: &[u8]| {
        let length = if headers.contains("Content-Length") {
            String::new()
        } else {
            format!("Content-Length: {}\r\n", body.len())
        };
        let head = format!("HTTP/1.1 {status}\r\n{headers}{length}Connection: close\r\n\r\n");
        let _ = stream.write_all(head.as_bytes());
        let _ = stream.write_all(body);
    };
    if path.starts_with("/api/models/org/private") {
        let status =
            if token.as_deref() == Some("Bearer secret") { "404 Not Found" } else { "401 Unauthorized" };
        return send(&mut stream, status, "", b"");
    }
    if path == "/api/models/org/name/revision/main" {
        let siblings: Vec<String> = s.files.keys().map(|k| format!("{{\"rfilename\": {k:?}}}")).collect();
        let body = format!("{{\"sha\": \"{COMMIT}\", \"siblings\": [{}]}}", siblings.join(","));
        return send(&mut stream, "200 OK", "", body.as_bytes());
    }
    let small = format!("/org/name/resolve/{COMMIT}/");
    if let Some(name) = path.strip_prefix(&small) {
        let content = s.files[name].clone();
        if name == "model.safetensors" {
            let (etag, size) = (sha256(&content), content.len());
            let own = s.elsewhere.as_deref().unwrap_or(own);
            let headers = format!(
                "X-Linked-Etag: \"{etag}\"\r\nX-Linked-Size: {size}\r\nLocation: {own}/bytes\r\nETag: \"x\"\r\n"
            );
            return send(&mut stream, "302 Found", &headers, b"");
        }
        let headers = format!("ETag: \"{}\"\r\n", git_hash(&content));
        let length = format!("Content-Length: {}\r\n", content.len());
        let body: &[u8] = if method == "HEAD" { b"" } else { &content };
        return send(&mut stream, "200 OK", &(headers + &length), body);
    }
    if path == "/bytes" {
        let mut content = s.files["model.safetensors"].clone();
        if s.corrupt {
            content[1000] ^= 1;
        }
        let from: usize =
            range.and_then(|r| r.strip_prefix("bytes=")?.strip_suffix('-')?.parse().ok()).unwrap_or(0);
        let (status, rest) = (if from > 0 { "206 Partial Content" } else { "200 OK" }, &content[from..]);
        let length = format!("Content-Length: {}\r\n", rest.len());
        if s.cuts > 0 {
            s.cuts -= 1;
            return send(&mut stream, status, &length, &rest[..rest.len() / 2]);
        }
        return send(&mut stream, status, &length, rest);
    }
    send(&mut stream, "404 Not Found", "", b"");
}

fn cache(folder: &tempfile::TempDir) -> HubCache {
    HubCache { root: folder.path().join("hub"), offline: true }
}

fn all(name: &str) -> bool {
    ferrl::data::hub::wanted(Repo::Model, name)
}

const REPO: (Repo, &str, &str) = (Repo::Model, "org/name", "main");

#[test]
fn a_download_is_laid_out_as_the_hub_s_own_tools_do() {
    let (address, state) = serve();
    let folder = tempfile::tempdir().unwrap();
    let cache = cache(&folder);
    let snapshot = Hub::new(&address, None).snapshot(&cache, REPO, &all).unwrap();
    let root = folder.path().join("hub/models--org--name");
    assert_eq!(snapshot, root.join("snapshots").join(COMMIT));
    assert_eq!(std::fs::read_to_string(root.join("refs/main")).unwrap(), COMMIT);
    let files = state.lock().unwrap().files.clone();
    let (config, weights) = (&files["config.json"], &files["model.safetensors"]);
    assert_eq!(&std::fs::read(root.join("blobs").join(git_hash(config))).unwrap(), config);
    assert_eq!(&std::fs::read(root.join("blobs").join(sha256(weights))).unwrap(), weights);
    assert_eq!(&std::fs::read(snapshot.join("model.safetensors")).unwrap(), weights);
    #[cfg(unix)]
    assert_eq!(
        std::fs::read_link(snapshot.join("config.json")).unwrap(),
        std::path::Path::new("../../blobs").join(git_hash(config))
    );
    assert!(!snapshot.join("README.md").exists(), "only what a model needs");
    let blobs = std::fs::read_dir(root.join("blobs")).unwrap().count();
    assert_eq!(blobs, 2, "nothing incomplete is left");
    // It is found without a network from now on, and a second download fetches no bytes.
    assert_eq!(cache.resolve(Repo::Model, "org/name", None).unwrap(), snapshot);
    let before = state.lock().unwrap().seen.len();
    Hub::new(&address, None).snapshot(&cache, REPO, &all).unwrap();
    assert_eq!(state.lock().unwrap().seen.len(), before + 1, "one look at the commit");
}

#[test]
fn a_broken_connection_is_taken_up_where_it_ended() {
    let (address, state) = serve();
    state.lock().unwrap().cuts = 2;
    let folder = tempfile::tempdir().unwrap();
    let snapshot = Hub::new(&address, None).snapshot(&cache(&folder), REPO, &all).unwrap();
    let state = state.lock().unwrap();
    let weights = &state.files["model.safetensors"];
    assert_eq!(&std::fs::read(snapshot.join("model.safetensors")).unwrap(), weights);
    let ranges: Vec<_> = state.seen.iter().filter(|r| r.1 == "/bytes").map(|r| r.2.clone()).collect();
    let (half, three) = (weights.len() / 2, weights.len() / 4 * 3);
    assert_eq!(ranges, [None, Some(format!("bytes={half}-")), Some(format!("bytes={three}-"))]);
}

#[test]
fn wrong_bytes_never_get_a_name() {
    let (address, state) = serve();
    state.lock().unwrap().corrupt = true;
    let folder = tempfile::tempdir().unwrap();
    let cache = cache(&folder);
    let error = Hub::new(&address, None).snapshot(&cache, REPO, &all).unwrap_err().to_string();
    assert!(error.contains("model.safetensors") && error.contains("checksum"), "{error}");
    assert!(cache.resolve(Repo::Model, "org/name", None).is_err(), "half a model is not found");
    state.lock().unwrap().corrupt = false;
    Hub::new(&address, None).snapshot(&cache, REPO, &all).unwrap();
    assert!(cache.resolve(Repo::Model, "org/name", None).is_ok());
}

#[test]
fn a_token_goes_to_the_hub_and_into_no_message() {
    let (address, state) = serve();
    let folder = tempfile::tempdir().unwrap();
    let cache = cache(&folder);
    let private = (Repo::Model, "org/private", "main");
    let error = Hub::new(&address, None).snapshot(&cache, private, &all).unwrap_err().to_string();
    assert!(error.contains("HF_TOKEN") && error.contains("401"), "{error}");
    let hub = Hub::new(&address, Some("secret".into()));
    let error = hub.snapshot(&cache, private, &all).unwrap_err().to_string();
    assert!(error.contains("there is no") && !error.contains("secret"), "{error}");
    let seen = &state.lock().unwrap().seen;
    assert_eq!(seen.last().unwrap().3.as_deref(), Some("Bearer secret"));
}

#[test]
fn a_token_does_not_follow_a_redirect_to_another_host() {
    let ((hub, asked), (other, store)) = (serve(), serve());
    // The second begins like the hub's own address: a prefix must not decide.
    let disguised = format!("{hub}@{}", other.trim_start_matches("http://"));
    for place in [other.clone(), disguised] {
        asked.lock().unwrap().elsewhere = Some(place.clone());
        let folder = tempfile::tempdir().unwrap();
        Hub::new(&hub, Some("secret".into())).snapshot(&cache(&folder), REPO, &all).unwrap();
        let seen = std::mem::take(&mut store.lock().unwrap().seen);
        assert!(seen.iter().any(|r| r.1 == "/bytes"), "{place}: the bytes come from there");
        assert!(seen.iter().all(|r| r.3.as_deref() != Some("Bearer secret")), "{place} was told the token");
    }
    let seen = &asked.lock().unwrap().seen;
    assert!(seen.iter().all(|r| r.3.as_deref() == Some("Bearer secret")), "the hub itself is told it");
}

#[test]
fn a_server_that_is_not_there_is_said_so() {
    let folder = tempfile::tempdir().unwrap();
    let error = Hub::new("http://127.0.0.1:9", None).snapshot(&cache(&folder), REPO, &all);
    let error = error.unwrap_err().to_string();
    assert!(error.contains("cannot be reached") && error.contains("fix: "), "{error}");
}

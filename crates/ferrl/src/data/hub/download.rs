//! Downloads from the Hugging Face hub into its cache, laid out as its own tools lay it out.
//!
//! `models--ORG--NAME/refs/REVISION` holds a commit, `snapshots/COMMIT/FILE` is a link to `blobs/ETAG`. A blob is
//! written as `ETAG.incomplete`, taken up again where a download was cut off, checked by length and checksum (the etag
//! is the file's SHA-256 where the hub keeps it as a large file, else its git hash), and only then gets its name; a
//! snapshot's links and its ref come last. So what can be found is whole.

use super::{HubCache, Repo};
use ferrl_engine::{Error, Result};
use ring::digest::{Context, SHA1_FOR_LEGACY_USE_ONLY, SHA256};
use serde_json::Value;
use std::fs::{self, File, OpenOptions};
use std::io::{IsTerminal, Read, Write};
use std::path::{Component, Path, PathBuf};
use std::time::Duration;
use ureq::http::Response;
use ureq::{Agent, Body};

/// Times a file is taken up again before giving up.
const TRIES: usize = 5;

/// Where to download from.
pub struct Hub {
    endpoint: String,
    /// Sent, never shown.
    token: Option<String>,
    agent: Agent,
    watch: DownloadWatch,
}

/// Called with a file's name, the bytes downloaded so far, and its size.
pub type DownloadWatch = fn(&str, u64, u64);

/// One file of a repository at a commit.
struct Remote {
    etag: String,
    size: u64,
    /// Where its bytes are: the hub sends large files from elsewhere.
    location: String,
}

impl Hub {
    /// As the environment says: `HF_ENDPOINT`, `HF_TOKEN`, which may also stand in `.env`.
    pub fn from_env() -> Self {
        let get = |name: &str| std::env::var(name).ok().filter(|v| !v.trim().is_empty());
        let endpoint = get("HF_ENDPOINT").unwrap_or_else(|| "https://huggingface.co".into());
        Hub { watch: tell, ..Self::new(&endpoint, crate::secrets::get("HF_TOKEN").ok().flatten()) }
    }

    /// From an address and, for private repositories, a token.
    pub fn new(endpoint: &str, token: Option<String>) -> Self {
        let config = Agent::config_builder()
            .max_redirects(0)
            .http_status_as_error(false)
            .timeout_connect(Some(Duration::from_secs(30)))
            .timeout_recv_response(Some(Duration::from_secs(60)))
            .user_agent(concat!("ferrl/", env!("CARGO_PKG_VERSION")))
            .build();
        Hub {
            endpoint: endpoint.trim_end_matches('/').to_owned(),
            token: token.map(|t| t.trim().to_owned()),
            agent: config.into(),
            watch: |_, _, _| {},
        }
    }

    /// Brings a repository into the cache; its snapshot folder. `wanted` says which of its files.
    pub fn snapshot(
        &self,
        cache: &HubCache,
        (repo, id, revision): (Repo, &str, &str),
        wanted: &dyn Fn(&str) -> bool,
    ) -> Result<PathBuf> {
        let kind = if repo == Repo::Dataset { "datasets" } else { "models" };
        let info = self.json(&format!("{}/api/{kind}/{id}/revision/{revision}", self.endpoint), id)?;
        let commit = info["sha"].as_str().unwrap_or_default().to_owned();
        if !(commit.len() == 40 && commit.bytes().all(|b| b.is_ascii_hexdigit())) {
            return Err(strange(id, "names no commit"));
        }
        let listed = info["siblings"].as_array().cloned().unwrap_or_default();
        let names: Vec<String> =
            listed.iter().filter_map(|s| s["rfilename"].as_str().map(String::from)).collect();
        let folder = cache.folder(repo, id);
        let snapshot = folder.join("snapshots").join(&commit);
        let files: Vec<&String> = names.iter().filter(|n| wanted(n)).collect();
        if files.is_empty() {
            return Err(Error::data(format!("{id:?} holds none of the files that are needed"))
                .at(&self.endpoint)
                .fix("check that it is the repository you mean"));
        }
        for name in files {
            let plain = Path::new(name).components().all(|c| matches!(c, Component::Normal(_)));
            if !plain || name.contains('\\') {
                return Err(strange(id, &format!("names a file {name:?}")));
            }
            let link = snapshot.join(name);
            if link.is_file() {
                continue;
            }
            let prefix = if repo == Repo::Dataset { "datasets/" } else { "" };
            let url = format!("{}/{prefix}{id}/resolve/{commit}/{}", self.endpoint, escaped(name));
            let remote = self.head(&url, id)?;
            let blob = folder.join("blobs").join(&remote.etag);
            if !blob.is_file() {
                self.fetch(&remote, &blob, &format!("{id}/{name}"))?;
            }
            place(&blob, &link, name)?;
        }
        if revision != commit {
            write_whole(&folder.join("refs").join(revision), commit.as_bytes())?;
        }
        Ok(snapshot)
    }

    fn json(&self, url: &str, id: &str) -> Result<Value> {
        let mut response = self.get(url, 0).map_err(|e| self.unreachable(&e))?;
        for _ in 0..5 {
            let Some(next) = redirect(&response, url) else { break };
            response = self.get(&next, 0).map_err(|e| self.unreachable(&e))?;
        }
        self.refuse(response.status().as_u16(), id)?;
        let text = response.body_mut().read_to_string().map_err(|e| self.unreachable(&e))?;
        serde_json::from_str(&text).map_err(|_| strange(id, "is not JSON"))
    }

    /// Asks what a file is without taking it.
    fn head(&self, url: &str, id: &str) -> Result<Remote> {
        let mut url = url.to_owned();
        for _ in 0..5 {
            let mut request = self.agent.head(&url).header("Accept-Encoding", "identity");
            if let Some(token) = self.token_for(&url) {
                request = request.header("Authorization", format!("Bearer {token}"));
            }
            let response = request.call().map_err(|e| self.unreachable(&e))?;
            let status = response.status().as_u16();
            let header = |name: &str| response.headers().get(name).and_then(|v| v.to_str().ok());
            let etag = header("x-linked-etag").or(header("etag"));
            let next = redirect(&response, &url);
            // A redirect inside the hub (a renamed repository) is followed; one that carries the etag leads to the bytes.
            if let (Some(next), None) = (&next, header("x-linked-etag"))
                && same_origin(next, &self.endpoint)
            {
                url = next.clone();
                continue;
            }
            if next.is_none() {
                self.refuse(status, id)?;
            }
            let etag = etag.map(|e| e.trim_start_matches("W/").trim_matches('"').to_owned());
            let etag =
                etag.filter(|e| !e.is_empty() && e.bytes().all(|b| b.is_ascii_alphanumeric() || b == b'-'));
            let size = header("x-linked-size").or(header("content-length")).and_then(|s| s.parse().ok());
            let (Some(etag), Some(size)) = (etag, size) else {
                return Err(strange(id, "gives a file without etag or size"));
            };
            return Ok(Remote { etag, size, location: next.unwrap_or(url) });
        }
        Err(strange(id, "sends requests round in a circle"))
    }

    /// The bytes of a blob, from where an earlier download ended.
    fn fetch(&self, remote: &Remote, blob: &Path, name: &str) -> Result<()> {
        let folder = blob.parent().unwrap_or(Path::new("."));
        fs::create_dir_all(folder).map_err(|e| unwritable(folder, &e))?;
        let part = blob.with_file_name(format!("{}.incomplete", remote.etag));
        let mut problem = None;
        for attempt in 0..TRIES {
            let have = fs::metadata(&part).map_or(0, |m| m.len());
            if have > remote.size {
                fs::remove_file(&part).map_err(|e| unwritable(&part, &e))?;
                continue;
            }
            if have < remote.size {
                match self.append(remote, &part, have, name) {
                    Ok(()) => {}
                    Err(e) if e.class == ferrl_engine::Class::Resource => return Err(e),
                    Err(e) => {
                        problem = Some(e);
                        std::thread::sleep(Duration::from_millis(200 << attempt));
                        continue;
                    }
                }
            }
            if remote.size == 0 {
                File::create(&part).map_err(|e| unwritable(&part, &e))?;
            }
            if fs::metadata(&part).map_or(0, |m| m.len()) < remote.size {
                problem = Some(Error::data("the connection ended early"));
                continue;
            }
            if !matches(&part, &remote.etag)? {
                // What was there before may have been another file's: once more from the beginning.
                fs::remove_file(&part).map_err(|e| unwritable(&part, &e))?;
                problem = Some(Error::data("the bytes that came do not have the checksum the hub names"));
                continue;
            }
            let whole = File::open(&part).and_then(|f| f.sync_all()).and_then(|()| fs::rename(&part, blob));
            return whole.map_err(|e| unwritable(blob, &e));
        }
        let problem = problem.unwrap_or_else(|| Error::data("the download did not end"));
        Err(problem.at(name).fix("run the same command again: it goes on where it stopped"))
    }

    fn append(&self, remote: &Remote, part: &Path, have: u64, name: &str) -> Result<()> {
        let mut response = self.get(&remote.location, have).map_err(|e| self.unreachable(&e))?;
        let status = response.status().as_u16();
        let fresh = match status {
            206 if have > 0 => false,
            200 => true,
            other => return Err(Error::data(format!("the hub answers {other} instead of sending the file"))),
        };
        let mut file = OpenOptions::new()
            .create(true)
            .write(true)
            .append(!fresh)
            .truncate(fresh)
            .open(part)
            .map_err(|e| unwritable(part, &e))?;
        let mut reader = response.body_mut().as_reader();
        let mut buffer = vec![0; 1 << 16];
        let mut done = if fresh { 0 } else { have };
        loop {
            (self.watch)(name, done, remote.size);
            let n =
                reader.read(&mut buffer).map_err(|e| Error::data(format!("the connection broke: {e}")))?;
            if n == 0 {
                return Ok(());
            }
            file.write_all(&buffer[..n]).map_err(|e| unwritable(part, &e))?;
            done += n as u64;
        }
    }

    /// The token, for the host it is meant for and for no other, wherever a redirect leads.
    fn token_for(&self, url: &str) -> Option<&str> {
        self.token.as_deref().filter(|_| same_origin(url, &self.endpoint))
    }

    fn get(&self, url: &str, from: u64) -> std::result::Result<Response<Body>, ureq::Error> {
        let mut request = self.agent.get(url).header("Accept-Encoding", "identity");
        if from > 0 {
            request = request.header("Range", format!("bytes={from}-"));
        }
        if let Some(token) = self.token_for(url) {
            request = request.header("Authorization", format!("Bearer {token}"));
        }
        request.call()
    }

    fn refuse(&self, status: u16, id: &str) -> Result<()> {
        let error = |what: String| Err(Error::data(what).at(&self.endpoint));
        match status {
            200..=299 => Ok(()),
            401 | 403 => {
                error(format!("{id:?} is private, gated or not there (status {status})")).map_err(|e| {
                    e.fix("set HF_TOKEN to a token that may read it, and accept its terms on its page")
                })
            }
            404 => error(format!("there is no {id:?} or no such revision"))
                .map_err(|e| e.fix("check the spelling: org/name")),
            429 => error("too many requests".into()).map_err(|e| e.fix("wait a minute, or set HF_TOKEN")),
            other => error(format!("answers {other} to a request for {id:?}"))
                .map_err(|e| e.fix("try again later")),
        }
    }

    fn unreachable(&self, e: &ureq::Error) -> Error {
        Error::data(format!("the hub cannot be reached: {e}"))
            .at(&self.endpoint)
            .fix("check the network and HF_ENDPOINT, or give the path of a local copy")
    }
}

/// A line on standard error that moves on a terminal; elsewhere one for each file.
fn tell(name: &str, done: u64, size: u64) {
    let mib = |bytes: u64| bytes as f64 / f64::from(1 << 20);
    let live = std::io::stderr().is_terminal();
    if live && (done == size || done % (1 << 20) < 1 << 16) {
        let end = if done == size { "\n" } else { "" };
        let _ = write!(
            std::io::stderr(),
            "\r\x1b[Kdownloading {name}: {:.1} of {:.1} MiB{end}",
            mib(done),
            mib(size)
        );
    } else if !live && done == 0 {
        let _ = writeln!(std::io::stderr(), "downloading {name}: {:.1} MiB", mib(size));
    }
}

/// Whether two addresses have the same scheme, host and port.
fn same_origin(a: &str, b: &str) -> bool {
    matches!((origin(a), origin(b)), (Some(a), Some(b)) if a == b)
}

/// Scheme, host and port of an address, without the user that may stand before them.
fn origin(url: &str) -> Option<(String, String, u16)> {
    let (scheme, rest) = url.split_once("://")?;
    let scheme = scheme.to_ascii_lowercase();
    let authority = rest.split(['/', '?', '#', '\\']).next()?;
    let place = authority.rsplit_once('@').map_or(authority, |(_, place)| place);
    let usual = match scheme.as_str() {
        "https" => 443,
        "http" => 80,
        _ => return None,
    };
    let (host, port) = match place.rsplit_once(':') {
        Some((host, port)) if !port.contains(']') => (host, port.parse().ok()?),
        _ => (place, usual),
    };
    (!host.is_empty()).then(|| (scheme, host.trim_end_matches('.').to_ascii_lowercase(), port))
}

/// Where a redirect leads, as a whole address.
fn redirect(response: &Response<Body>, from: &str) -> Option<String> {
    let to = response.headers().get("location")?.to_str().ok()?;
    if !response.status().is_redirection() {
        return None;
    }
    if to.starts_with("http://") || to.starts_with("https://") {
        return Some(to.to_owned());
    }
    let host = from.find("://").map(|i| i + 3)?;
    let end = from[host..].find('/').map_or(from.len(), |i| host + i);
    Some(format!("{}{to}", &from[..end]))
}

/// Whether a file has the checksum that an etag is: SHA-256 (64 digits) or git's (40); others say nothing.
fn matches(path: &Path, etag: &str) -> Result<bool> {
    let fail = |e: std::io::Error| unwritable(path, &e);
    let mut file = File::open(path).map_err(fail)?;
    let mut sum = match etag.len() {
        64 => Context::new(&SHA256),
        40 => {
            let mut sum = Context::new(&SHA1_FOR_LEGACY_USE_ONLY);
            sum.update(format!("blob {}\0", file.metadata().map_err(fail)?.len()).as_bytes());
            sum
        }
        _ => return Ok(true),
    };
    let mut buffer = vec![0; 1 << 16];
    loop {
        match file.read(&mut buffer).map_err(fail)? {
            0 => break,
            n => sum.update(&buffer[..n]),
        }
    }
    let hex: String = sum.finish().as_ref().iter().map(|b| format!("{b:02x}")).collect();
    Ok(hex.eq_ignore_ascii_case(etag))
}

/// A link from the snapshot to the blob, relative as the hub's own tools make it; a copy where links cannot be made.
fn place(blob: &Path, link: &Path, name: &str) -> Result<()> {
    let folder = link.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder).map_err(|e| unwritable(folder, &e))?;
    let _ = fs::remove_file(link); // a link that leads nowhere
    #[cfg(unix)]
    {
        let up = "../".repeat(2 + name.matches('/').count());
        let target = format!("{up}blobs/{}", blob.file_name().unwrap_or_default().to_string_lossy());
        std::os::unix::fs::symlink(target, link).map_err(|e| unwritable(link, &e))
    }
    #[cfg(not(unix))]
    {
        let _ = name;
        fs::copy(blob, link).map(|_| ()).map_err(|e| unwritable(link, &e))
    }
}

/// A small file, there whole or not at all.
fn write_whole(path: &Path, bytes: &[u8]) -> Result<()> {
    let folder = path.parent().unwrap_or(Path::new("."));
    fs::create_dir_all(folder).map_err(|e| unwritable(folder, &e))?;
    let part = path.with_extension("part");
    fs::write(&part, bytes).and_then(|()| fs::rename(&part, path)).map_err(|e| unwritable(path, &e))
}

fn escaped(name: &str) -> String {
    let keep = |b: u8| b.is_ascii_alphanumeric() || b"-_.~/".contains(&b);
    name.bytes().map(|b| if keep(b) { (b as char).to_string() } else { format!("%{b:02X}") }).collect()
}

fn strange(id: &str, what: &str) -> Error {
    Error::data(format!("the hub's answer for {id:?} {what}"))
        .fix("check HF_ENDPOINT, or give the path of a local copy")
}

fn unwritable(path: &Path, e: &std::io::Error) -> Error {
    Error::resource(format!("cannot write: {e}"))
        .at(path.display())
        .fix("free some space, or point HF_HUB_CACHE at a disk that has it")
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn a_host_is_compared_and_not_a_prefix() {
        let hub = "https://huggingface.co";
        for same in
            ["https://huggingface.co/x", "https://HuggingFace.co:443/y?z", "https://u@huggingface.co/"]
        {
            assert!(same_origin(same, hub), "{same}");
        }
        for other in [
            "https://huggingface.co.evil.org/x",
            "https://huggingface.community/x",
            "https://huggingface.co@evil.org/x",
            "https://evil.org/https://huggingface.co",
            "https://evil.org\\@huggingface.co",
            "http://huggingface.co/x",
            "https://huggingface.co:8443/x",
            "ftp://huggingface.co/x",
            "huggingface.co/x",
            "https://",
        ] {
            assert!(!same_origin(other, hub), "{other}");
        }
        assert!(
            same_origin("http://[::1]:80/a", "http://[::1]")
                && !same_origin("http://[::1]:81", "http://[::1]")
        );
    }
}

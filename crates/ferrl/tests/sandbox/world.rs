//! What there is to attack: a folder, a process, sockets.

use std::net::{TcpListener, UdpSocket};
use std::os::linux::net::SocketAddrExt;
use std::os::unix::fs::PermissionsExt;
use std::os::unix::net::{SocketAddr, UnixListener};
use std::process::{Child, Command};
use std::sync::atomic::{AtomicUsize, Ordering};

pub struct World {
    pub folder: tempfile::TempDir,
    victim: Child,
    tcp: TcpListener,
    udp: UdpSocket,
    _sockets: (UnixListener, UnixListener),
    name: String,
}

impl World {
    pub fn new() -> World {
        let folder = tempfile::tempdir().unwrap();
        let open = |mode| std::fs::Permissions::from_mode(mode);
        std::fs::set_permissions(folder.path(), open(0o777)).unwrap();
        for file in ["secret", "victim", "deleted", "renamed"] {
            std::fs::write(folder.path().join(file), "42").unwrap();
            std::fs::set_permissions(folder.path().join(file), open(0o666)).unwrap();
        }
        static COUNT: AtomicUsize = AtomicUsize::new(0);
        let name = format!("ferrl-test-{}-{}", std::process::id(), COUNT.fetch_add(1, Ordering::SeqCst));
        let by_path = UnixListener::bind(folder.path().join("socket")).unwrap();
        let by_name = UnixListener::bind_addr(&SocketAddr::from_abstract_name(&name).unwrap()).unwrap();
        World {
            folder,
            victim: Command::new("/bin/sleep").arg("600").spawn().unwrap(),
            tcp: TcpListener::bind("127.0.0.1:0").unwrap(),
            udp: UdpSocket::bind("127.0.0.1:0").unwrap(),
            _sockets: (by_path, by_name),
            name,
        }
    }

    /// What the attacks are told.
    pub fn arguments(&self) -> Vec<String> {
        vec![
            self.folder.path().display().to_string(),
            self.victim.id().to_string(),
            self.tcp.local_addr().unwrap().port().to_string(),
            self.udp.local_addr().unwrap().port().to_string(),
            self.name.clone(),
        ]
    }

    /// Whether the victim lives and the files hold what they held.
    pub fn is_whole(&mut self) -> Result<(), String> {
        if let Ok(Some(status)) = self.victim.try_wait() {
            return Err(format!("the victim has ended: {status}"));
        }
        let mut names: Vec<String> = std::fs::read_dir(self.folder.path())
            .unwrap()
            .map(|entry| entry.unwrap().file_name().into_string().unwrap())
            .collect();
        names.sort();
        if names != ["deleted", "renamed", "secret", "socket", "victim"] {
            return Err(format!("the folder holds {names:?}"));
        }
        match std::fs::read_to_string(self.folder.path().join("victim")).unwrap().as_str() {
            "42" => Ok(()),
            other => Err(format!("the victim's file holds {other:?}")),
        }
    }
}

impl Drop for World {
    fn drop(&mut self) {
        let _ = self.victim.kill();
        let _ = self.victim.wait();
    }
}

/// Processes whose command line holds a mark.
pub fn marked(mark: &str) -> Vec<i32> {
    let entries = std::fs::read_dir("/proc").unwrap().flatten();
    entries
        .filter_map(|e| e.file_name().to_str()?.parse().ok())
        .filter(|pid: &i32| {
            let line = std::fs::read(format!("/proc/{pid}/cmdline")).unwrap_or_default();
            String::from_utf8_lossy(&line).contains(mark)
        })
        .collect()
}

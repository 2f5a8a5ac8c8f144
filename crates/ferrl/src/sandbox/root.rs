//! A root for confined programs: a small tmpfs with read-only binds of what they may read.

use super::landlock::DEVICES;
use rustix::mount::{
    MountFlags, MountPropagationFlags, UnmountFlags, mount, mount_bind_recursive, mount_change,
    mount_remount, unmount,
};
use std::ffi::CString;
use std::io::Result;
use std::os::unix::fs::DirBuilderExt;
use std::path::{Path, PathBuf};

/// Builds the root at `root`, an empty folder, in this process's own mount namespace; where the scratch folder is in it.
pub(super) fn build(root: &Path, reads: &[PathBuf]) -> Result<PathBuf> {
    // Mounts made here are private to this namespace.
    mount_change("/", MountPropagationFlags::DOWNSTREAM | MountPropagationFlags::REC)?;
    let flags = MountFlags::NOSUID | MountFlags::NODEV;
    mount("ferrl", root, "tmpfs", flags, c"size=1m,nr_inodes=4096,mode=755")?;
    let within = |path: &Path| root.join(path.strip_prefix("/").unwrap_or(path));
    let devices = DEVICES.iter().map(PathBuf::from);
    let mut bound: Vec<PathBuf> = Vec::new();
    let mut paths: Vec<PathBuf> = reads.iter().cloned().chain(devices).collect();
    paths.sort();
    for path in paths {
        let Ok(meta) = path.symlink_metadata() else { continue };
        let target = within(&path);
        if bound.iter().any(|b| path.starts_with(b)) || target.symlink_metadata().is_ok() {
            continue;
        }
        folders(target.parent().unwrap_or(root))?;
        if meta.is_symlink() {
            std::os::unix::fs::symlink(std::fs::read_link(&path)?, &target)?;
            continue;
        }
        if meta.is_dir() {
            folders(&target)?;
        } else {
            std::fs::write(&target, b"")?;
        }
        mount_bind_recursive(&path, &target)?;
        bound.push(path);
    }
    let scratch = if reads.iter().any(|p| p.starts_with("/tmp")) { "/scratch" } else { "/tmp" };
    folders(&within(Path::new(scratch)))?;
    read_only(root)?;
    Ok(scratch.into())
}

/// Makes a folder and those above it, which everybody may walk through.
fn folders(path: &Path) -> Result<()> {
    std::fs::DirBuilder::new().recursive(true).mode(0o755).create(path)
}

/// Makes every mount at and below `root` read-only. A mount keeps the flags it has: a process that is not root outside may add to
/// them only.
fn read_only(root: &Path) -> Result<()> {
    let own = MountFlags::BIND | MountFlags::RDONLY | MountFlags::NOSUID;
    for line in std::fs::read_to_string("/proc/self/mountinfo")?.lines() {
        // ID parent major:minor root MOUNT-POINT OPTIONS ...
        let mut fields = line.split(' ').skip(4);
        let (Some(point), Some(options)) = (fields.next(), fields.next()) else { continue };
        let point = PathBuf::from(unescaped(point));
        if !point.starts_with(root) {
            continue;
        }
        let mut flags = own;
        for option in options.split(',') {
            flags |= match option {
                "nodev" => MountFlags::NODEV,
                "noexec" => MountFlags::NOEXEC,
                "noatime" => MountFlags::NOATIME,
                "nodiratime" => MountFlags::NODIRATIME,
                "relatime" => MountFlags::RELATIME,
                _ => MountFlags::empty(),
            };
        }
        mount_remount(&point, flags, c"")?;
    }
    Ok(())
}

/// A path as mountinfo writes it: blanks and backslashes as three octal digits.
fn unescaped(path: &str) -> String {
    let mut out = String::new();
    let mut parts = path.split('\\');
    out.push_str(parts.next().unwrap_or_default());
    for part in parts {
        let code = part.get(..3).and_then(|digits| u8::from_str_radix(digits, 8).ok());
        match code {
            Some(code) => {
                out.push(code.into());
                out.push_str(&part[3..]);
            }
            None => {
                out.push('\\');
                out.push_str(part);
            }
        }
    }
    out
}

/// Moves this process, in a mount namespace of its own, into the root with a fresh scratch folder.
pub(super) fn enter(root: &Path, scratch: &Path, bytes: u64, owner: Option<u32>) -> Result<()> {
    let owner = owner.map(|id| format!(",uid={id},gid={id}")).unwrap_or_default();
    // Files take memory of the kernel besides their bytes.
    let files = 256 + (bytes >> 20) * 256;
    let options = CString::new(format!("size={bytes},nr_inodes={files},mode=700{owner}"))?;
    let target = root.join(scratch.strip_prefix("/").unwrap_or(scratch));
    mount("ferrl", &target, "tmpfs", MountFlags::NOSUID | MountFlags::NODEV, options.as_c_str())?;
    std::env::set_current_dir(root)?;
    rustix::process::pivot_root(".", ".")?;
    unmount(".", UnmountFlags::DETACH)?;
    std::env::set_current_dir("/")
}

/// Takes the root away again.
pub(super) fn remove(root: &Path) {
    let _ = unmount(root, UnmountFlags::DETACH);
    let _ = std::fs::remove_dir(root);
}

#[cfg(test)]
mod tests {
    #[test]
    fn escaped_mount_points_are_read() {
        assert_eq!(super::unescaped(r"/a\040b\134c"), r"/a b\c");
        assert_eq!(super::unescaped(r"/plain"), "/plain");
        assert_eq!(super::unescaped(r"/odd\x"), r"/odd\x");
    }
}

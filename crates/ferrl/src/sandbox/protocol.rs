//! Protocol between Ferrl and its supervisor process: frames on the supervisor's stdin and stdout.
//!
//! A frame is a header in JSON and bytes: two lengths of 8 bytes, little-endian, then both.

use super::layer::{Confinement, ConfinementReport};
use super::{Limits, ProgramEnd};
use serde::{Deserialize, Serialize, de::DeserializeOwned};
use std::io::{Error, ErrorKind, Read, Result, Write};
use std::path::PathBuf;

/// Version of the protocol: a launcher of another version is refused.
pub(super) const VERSION: u32 = 1;

/// First frame: settings of the supervisor.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct OpenFrame {
    pub(super) version: u32,
    /// Layers to apply.
    pub(super) layers: Vec<Confinement>,
    /// Whether a layer that fails is left out and reported; otherwise it ends the supervisor.
    pub(super) probe: bool,
    /// Files and folders that programs may read and execute.
    pub(super) reads: Vec<PathBuf>,
    /// An empty folder for mount points and scratch folders.
    pub(super) base: PathBuf,
}

/// The supervisor's answer.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct Hello {
    pub(super) version: u32,
    pub(super) report: ConfinementReport,
}

/// A program to run; the frame's bytes are its stdin.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct RunFrame {
    pub(super) argv: Vec<String>,
    pub(super) env: Vec<(String, String)>,
    pub(super) limits: Limits,
}

/// Its result; the frame's bytes are its stdout and then its stderr.
#[derive(Clone, Debug, Serialize, Deserialize)]
pub(super) struct DoneFrame {
    pub(super) end: ProgramEnd,
    pub(super) stdout: usize,
    pub(super) seconds: f64,
}

/// Maximum size of a frame; larger ones are refused.
const LARGEST: u64 = 1 << 30;

pub(super) fn send<T: Serialize>(to: &mut impl Write, header: &T, bytes: &[u8]) -> Result<()> {
    let header = serde_json::to_vec(header)?;
    let mut frame = Vec::with_capacity(16 + header.len() + bytes.len());
    frame.extend((header.len() as u64).to_le_bytes());
    frame.extend((bytes.len() as u64).to_le_bytes());
    frame.extend(header);
    frame.extend(bytes);
    to.write_all(&frame)?;
    to.flush()
}

/// The next frame; none at the end of the stream.
pub(super) fn receive<T: DeserializeOwned>(from: &mut impl Read) -> Result<Option<(T, Vec<u8>)>> {
    let mut lengths = [0u8; 16];
    if from.read(&mut lengths[..1])? == 0 {
        return Ok(None);
    }
    from.read_exact(&mut lengths[1..])?;
    let [header, bytes] = [0, 8].map(|at| {
        let mut word = [0u8; 8];
        word.copy_from_slice(&lengths[at..at + 8]);
        u64::from_le_bytes(word)
    });
    if header > LARGEST || bytes > LARGEST {
        return Err(Error::new(ErrorKind::InvalidData, "not a frame of the sandbox's supervisor"));
    }
    let mut text = vec![0; header as usize];
    from.read_exact(&mut text)?;
    let mut rest = vec![0; bytes as usize];
    from.read_exact(&mut rest)?;
    Ok(Some((serde_json::from_slice(&text)?, rest)))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn frames_come_back_and_nonsense_is_refused() {
        let mut wire = Vec::new();
        send(&mut wire, &("a", 7), b"\0bytes").unwrap();
        let got: (String, i32) = receive(&mut wire.as_slice()).unwrap().unwrap().0;
        assert_eq!(got, ("a".into(), 7));
        assert!(receive::<(String, i32)>(&mut [].as_slice()).unwrap().is_none());
        assert!(receive::<(String, i32)>(&mut b"Usage: ferrl <COMMAND> and so on".as_slice()).is_err());
    }
}

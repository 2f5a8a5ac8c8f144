//! TensorBoard event files, written by hand: records framed with their lengths and masked CRC-32C checksums, each
//! holding one protocol buffer of a wall time, a step and scalars.

use super::files::{Files, OutFile};
use super::folder::unix_seconds;
use super::metrics::StepRecord;
use super::protobuf::{CASTAGNOLI, bytes, crc32, double, float, int};
use ferrl_engine::Result;
use std::path::Path;

/// An event file that grows.
#[derive(Debug)]
pub struct EventWriter {
    file: OutFile,
    /// When the run began, in seconds since 1970.
    start: f64,
}

impl EventWriter {
    /// A new event file with the whole history; event files that Ferrl left in the folder are removed, so that a
    /// resumed run shows each step once.
    pub fn create(dir: &Path, files: &Files, history: &[StepRecord]) -> Result<EventWriter> {
        if let Ok(entries) = std::fs::read_dir(dir) {
            for entry in entries.flatten() {
                let name = entry.file_name().to_string_lossy().into_owned();
                if name.starts_with("events.out.tfevents.") && name.contains(".ferrl.") {
                    files.remove_file(&entry.path())?;
                }
            }
        }
        let now = unix_seconds();
        let start = now - history.last().map_or(0.0, |r| r.seconds);
        let name = format!("events.out.tfevents.{:010}.ferrl.{}", now as u64, std::process::id());
        let mut writer = EventWriter { file: files.create(&dir.join(name))?, start };
        let mut event = Vec::new();
        double(&mut event, 1, start);
        bytes(&mut event, 3, b"brain.Event:2"); // the version of the format
        let mut out = frame(&event);
        for record in history {
            out.extend(frame(&writer.event(record)));
        }
        writer.file.put(&out)?;
        Ok(writer)
    }

    pub fn append(&mut self, record: &StepRecord) -> Result<()> {
        let event = self.event(record);
        self.file.put(&frame(&event))
    }

    /// `Event { wall_time: 1, step: 2, summary: 5 { value: 1 { tag: 1, simple_value: 2 } } }`
    fn event(&self, record: &StepRecord) -> Vec<u8> {
        let mut summary = Vec::new();
        for (name, x) in &record.metrics {
            let mut value = Vec::new();
            bytes(&mut value, 1, name.as_bytes());
            float(&mut value, 2, *x as f32);
            bytes(&mut summary, 1, &value);
        }
        let mut event = Vec::new();
        double(&mut event, 1, self.start + record.seconds);
        int(&mut event, 2, record.step);
        bytes(&mut event, 5, &summary);
        event
    }
}

/// Length, checksum of the length, data, checksum of the data.
fn frame(data: &[u8]) -> Vec<u8> {
    let length = (data.len() as u64).to_le_bytes();
    let mut out = length.to_vec();
    out.extend(masked(&length).to_le_bytes());
    out.extend(data);
    out.extend(masked(data).to_le_bytes());
    out
}

/// Rotated and shifted, since a checksum of data that holds checksums is a weak one.
fn masked(data: &[u8]) -> u32 {
    crc32::<CASTAGNOLI>(data).rotate_right(15).wrapping_add(0xa282_ead8)
}

//! Event files are read back by a reader that shares nothing with the writer.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::run::{EventWriter, Files, StepRecord};
use std::fs;
use std::path::PathBuf;

/// Wall time, step, scalars, version of the format.
type Event = (f64, u64, Vec<(String, f32)>, String);

fn record(step: u64) -> StepRecord {
    let metrics = [
        ("kl", f64::NAN),
        ("loss", -0.0),
        ("reward", 1.0 / (step as f64 + 3.0)),
        ("\u{1f980}/\u{e9}", 1e300),
    ];
    let metrics = metrics.iter().map(|(n, v)| (n.to_string(), *v)).collect();
    StepRecord { step, stage: "rl".into(), epoch: 0.5, seconds: step as f64 * 1.7, metrics }
}

/// Reads an event file as TensorBoard does: a parser of its own, with a checksum computed bit by bit.
fn read_events(bytes: &[u8]) -> Vec<Event> {
    fn masked(data: &[u8]) -> u32 {
        let mut crc = u32::MAX;
        for &byte in data {
            crc ^= u32::from(byte);
            for _ in 0..8 {
                crc = (crc >> 1) ^ (0x82f6_3b78 & (crc & 1).wrapping_neg());
            }
        }
        crc = !crc;
        crc.rotate_right(15).wrapping_add(0xa282_ead8)
    }
    fn fields(mut data: &[u8]) -> Vec<(u64, Vec<u8>)> {
        fn varint(data: &mut &[u8]) -> u64 {
            let (mut x, mut shift) = (0, 0);
            loop {
                let byte = data[0];
                *data = &data[1..];
                x |= u64::from(byte & 127) << shift;
                shift += 7;
                if byte < 128 {
                    return x;
                }
            }
        }
        let mut out = Vec::new();
        while !data.is_empty() {
            let key = varint(&mut data);
            let n = match key & 7 {
                0 => {
                    let x = varint(&mut data);
                    out.push((key >> 3, x.to_le_bytes().to_vec()));
                    continue;
                }
                1 => 8,
                2 => varint(&mut data) as usize,
                5 => 4,
                other => panic!("wire type {other}"),
            };
            out.push((key >> 3, data[..n].to_vec()));
            data = &data[n..];
        }
        out
    }
    let mut out = Vec::new();
    let mut rest = bytes;
    while !rest.is_empty() {
        let n = u64::from_le_bytes(rest[..8].try_into().unwrap()) as usize;
        assert_eq!(masked(&rest[..8]), u32::from_le_bytes(rest[8..12].try_into().unwrap()));
        let data = &rest[12..12 + n];
        assert_eq!(masked(data), u32::from_le_bytes(rest[12 + n..16 + n].try_into().unwrap()));
        rest = &rest[16 + n..];
        let mut event = (0.0, 0, Vec::new(), String::new());
        for (field, data) in fields(data) {
            match field {
                1 => event.0 = f64::from_le_bytes(data.try_into().unwrap()),
                2 => event.1 = u64::from_le_bytes(data.try_into().unwrap()),
                3 => event.3 = String::from_utf8(data).unwrap(),
                5 => {
                    for (_, value) in fields(&data) {
                        let parts = fields(&value);
                        let tag = String::from_utf8(parts[0].1.clone()).unwrap();
                        event.2.push((tag, f32::from_le_bytes(parts[1].1.clone().try_into().unwrap())));
                    }
                }
                other => panic!("field {other}"),
            }
        }
        out.push(event);
    }
    out
}

#[test]
fn event_files_read_back_and_show_each_step_once() {
    let temp = tempfile::tempdir().unwrap();
    let dir = temp.path();
    let files = Files::default();
    let history: Vec<StepRecord> = (1..=300).map(record).collect();
    drop(EventWriter::create(dir, &files, &history).unwrap());
    let mut writer = EventWriter::create(dir, &files, &history[..200]).unwrap();
    for r in &history[200..] {
        writer.append(r).unwrap();
    }
    let paths: Vec<PathBuf> = fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()).collect();
    assert_eq!(paths.len(), 1, "the earlier file made way");
    assert!(paths[0].file_name().unwrap().to_str().unwrap().starts_with("events.out.tfevents."));
    let events = read_events(&fs::read(&paths[0]).unwrap());
    assert_eq!(events[0].3, "brain.Event:2");
    assert_eq!(events.len(), 301);
    for (event, r) in events[1..].iter().zip(&history) {
        assert_eq!(event.1, r.step);
        let expected: Vec<(String, u32)> =
            r.metrics.iter().map(|(n, v)| (n.clone(), (*v as f32).to_bits())).collect();
        let got: Vec<(String, u32)> = event.2.iter().map(|(n, v)| (n.clone(), v.to_bits())).collect();
        assert_eq!(got, expected);
        assert!((event.0 - events[0].0 - r.seconds).abs() < 1e-3);
    }
}

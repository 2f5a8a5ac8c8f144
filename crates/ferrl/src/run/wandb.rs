//! A run as an offline run of Weights & Biases, which `wandb sync` uploads. Written by hand from `metrics.jsonl`.
//!
//! A `.wandb` file is a header of 7 bytes and then LevelDB's log format: blocks of 32 KiB, in which each record, or part of
//! one, has a CRC-32, a length and a type before it. A record is a protocol buffer: the run with its configuration, a history
//! record for each step, the summary (the last value of every metric), and the exit code.

use super::files::{Files, error};
use super::folder::ensure_run;
use super::journal;
use super::metrics::{MetricsLog, StepRecord, number};
use super::protobuf::{IEEE, bytes, crc32, int};
use crate::recipe::Recipe;
use ferrl_engine::Result;
use ferrl_engine::files::undisturbed;
use serde_json::{Map, Value, json};
use std::fs;
use std::path::{Path, PathBuf};
use xxhash_rust::xxh3::xxh3_64;

/// Where `wandb sync` is to put a run.
#[derive(Clone, Debug)]
pub struct Destination {
    pub project: String,
    /// The user or team; the account's own where absent.
    pub entity: Option<String>,
    /// The run's name; its folder's where absent.
    pub name: Option<String>,
}

/// Writes `wandb/offline-run-TIME-ID` into the run folder and returns its path. TIME is when the run began and ID a hash of its
/// start, so that a second call replaces the folder, and a second upload the run.
pub fn write(run: &Path, to: &Destination) -> Result<PathBuf> {
    let recipe_path = run.join("recipe.toml");
    ensure_run(run)?;
    let recipe = fs::read_to_string(&recipe_path).map_err(|e| error("cannot read", &recipe_path, &e))?;
    let metrics = run.join("metrics.jsonl");
    let history = if metrics.exists() { MetricsLog::history(&metrics)? } else { Vec::new() };
    let log = journal::read(run)?;
    let start = log.iter().find_map(|line| line["time"].as_f64()).unwrap_or(0.0);
    let id = format!("{:013x}", xxh3_64(format!("{start} {recipe}").as_bytes()) >> 12);
    let absolute = fs::canonicalize(run).unwrap_or_else(|_| run.into());
    let folder_name = absolute.file_name().unwrap_or_default().to_string_lossy().into_owned();

    let about = RunAbout { id: &id, start, name: to.name.as_deref().unwrap_or(&folder_name), to };
    let mut writer = LogWriter::new();
    let records = [about.header(), about.run(&recipe)]
        .into_iter()
        .chain(history.iter().map(|step| about.step(step)))
        .chain([summary(&history), about.exit(&history, &log)]);
    for (i, (field, record)) in records.enumerate() {
        let mut out = Vec::new();
        int(&mut out, 1, i as u64 + 1); // the record's number
        bytes(&mut out, field, &record);
        writer.put(&out);
    }
    let files = Files::default();
    let _held = undisturbed();
    let dir = run.join("wandb").join(format!("offline-run-{}-{id}", timestamp(start)));
    if dir.exists() {
        files.remove_dir_all(&dir)?; // also the mark that it was uploaded
    }
    files.create_dir_all(&dir.join("files"))?;
    files.write_whole(&dir.join(format!("run-{id}.wandb")), &writer.out)?;
    Ok(dir)
}

/// Fields of `Record`.
const HISTORY: u32 = 2;
const SUMMARY: u32 = 3;
const RUN: u32 = 17;
const EXIT: u32 = 18;
const HEADER: u32 = 21;

struct RunAbout<'a> {
    id: &'a str,
    /// In seconds since 1970.
    start: f64,
    name: &'a str,
    to: &'a Destination,
}

impl RunAbout<'_> {
    /// `HeaderRecord { version_info: 1 { producer: 1, min_consumer: 2 } }`
    fn header(&self) -> (u32, Vec<u8>) {
        let (mut version, mut out) = (Vec::new(), Vec::new());
        bytes(&mut version, 1, concat!("ferrl ", env!("CARGO_PKG_VERSION")).as_bytes());
        bytes(&mut version, 2, b"0.13.0");
        bytes(&mut out, 1, &version);
        (HEADER, out)
    }

    /// `RunRecord { run_id: 1, entity: 2, project: 3, config: 4, display_name: 8, start_time: 17 }`
    fn run(&self, recipe: &str) -> (u32, Vec<u8>) {
        let mut out = Vec::new();
        bytes(&mut out, 1, self.id.as_bytes());
        if let Some(entity) = &self.to.entity {
            bytes(&mut out, 2, entity.as_bytes());
        }
        bytes(&mut out, 3, self.to.project.as_bytes());
        let mut config = Vec::new();
        for (key, value) in configuration(recipe) {
            bytes(&mut config, 1, &item(&key, &value));
        }
        bytes(&mut out, 4, &config);
        bytes(&mut out, 8, self.name.as_bytes());
        let mut time = Vec::new();
        int(&mut time, 1, self.start.max(0.0) as u64);
        int(&mut time, 2, (self.start.fract() * 1e9) as u64);
        bytes(&mut out, 17, &time);
        (RUN, out)
    }

    /// `HistoryRecord { item: 1, step: 2 { num: 1 } }`
    fn step(&self, record: &StepRecord) -> (u32, Vec<u8>) {
        let mut out = Vec::new();
        for (key, value) in values(record) {
            bytes(&mut out, 1, &item(&key, &value));
        }
        let own = [
            ("_step", json!(record.step)),
            ("_runtime", number(record.seconds)),
            ("_timestamp", number(self.start + record.seconds)),
        ];
        for (key, value) in own {
            bytes(&mut out, 1, &item(key, &value));
        }
        let mut step = Vec::new();
        int(&mut step, 1, record.step);
        bytes(&mut out, 2, &step);
        (HISTORY, out)
    }

    /// `RunExitRecord { exit_code: 1, runtime: 2 }`
    fn exit(&self, history: &[StepRecord], log: &[Value]) -> (u32, Vec<u8>) {
        let failed = log.last().is_some_and(|line| line["level"] == "error");
        let mut out = Vec::new();
        int(&mut out, 1, u64::from(failed));
        int(&mut out, 2, history.last().map_or(0, |r| r.seconds.max(0.0) as u64));
        (EXIT, out)
    }
}

/// What a step's line holds, beside its number.
fn values(record: &StepRecord) -> impl Iterator<Item = (String, Value)> + '_ {
    let own = [("stage".to_string(), json!(record.stage)), ("epoch".into(), number(record.epoch))];
    own.into_iter().chain(record.metrics.iter().map(|(name, x)| (name.clone(), number(*x))))
}

/// `SummaryRecord { update: 1 }`: the last value of every metric.
fn summary(history: &[StepRecord]) -> (u32, Vec<u8>) {
    let mut last: Map<String, Value> = Map::new();
    for record in history {
        last.extend(values(record));
        last.insert("_step".into(), json!(record.step));
    }
    let mut out = Vec::new();
    for (key, value) in &last {
        bytes(&mut out, 1, &item(key, value));
    }
    (SUMMARY, out)
}

/// `ConfigItem`, `HistoryItem` and `SummaryItem` alike: `{ key: 1, value_json: 16 }`
fn item(key: &str, value: &Value) -> Vec<u8> {
    let mut out = Vec::new();
    bytes(&mut out, 1, key.as_bytes());
    bytes(&mut out, 16, value.to_string().as_bytes());
    out
}

/// The recipe, resolved; the settings of several stages stand under their names.
fn configuration(recipe: &str) -> Map<String, Value> {
    let Ok(resolved) = Recipe::parse(recipe, "recipe.toml", "", &[]) else {
        return Map::from_iter([("recipe".to_string(), json!(recipe))]);
    };
    let settings = |recipe: &Recipe| set(serde_json::to_value(recipe).unwrap_or_default());
    match resolved.stages.as_slice() {
        [only] if !only.staged => settings(&only.recipe).as_object().cloned().unwrap_or_default(),
        stages => stages.iter().map(|s| (s.name.clone(), settings(&s.recipe))).collect(),
    }
}

/// Without keys that are not set.
fn set(value: Value) -> Value {
    let Value::Object(object) = value else { return value };
    let nothing = |v: &Value| v.is_null() || v.as_object().is_some_and(Map::is_empty);
    object.into_iter().map(|(k, v)| (k, set(v))).filter(|(_, v)| !nothing(v)).collect::<Map<_, _>>().into()
}

const BLOCK: usize = 32768;
const FRAME: usize = 7;

/// LevelDB's log format after the header of a `.wandb` file; the header is part of the first block.
struct LogWriter {
    out: Vec<u8>,
}

impl LogWriter {
    fn new() -> LogWriter {
        // The identification, a magic number, the version.
        let mut out = b":W&B".to_vec();
        out.extend(0xbee1u16.to_le_bytes());
        out.push(0);
        LogWriter { out }
    }

    fn put(&mut self, record: &[u8]) {
        let (mut rest, mut first) = (record, true);
        loop {
            let mut room = BLOCK - self.out.len() % BLOCK;
            if room < FRAME {
                // No frame fits: zeros to the end of the block.
                self.out.resize(self.out.len() + room, 0);
                room = BLOCK;
            }
            let (part, after) = rest.split_at(rest.len().min(room - FRAME));
            let last = after.is_empty();
            let kind: u8 = match (first, last) {
                (true, true) => 1,
                (true, false) => 2,
                (false, false) => 3,
                (false, true) => 4,
            };
            let checked: Vec<u8> = [&[kind], part].concat();
            self.out.extend(crc32::<IEEE>(&checked).to_le_bytes());
            self.out.extend((part.len() as u16).to_le_bytes());
            self.out.extend(checked);
            if last {
                return;
            }
            (rest, first) = (after, false);
        }
    }
}

/// `20260131_235959`, in UTC.
fn timestamp(seconds: f64) -> String {
    let seconds = seconds.max(0.0) as u64;
    // Days to a date of the Gregorian calendar: eras of 400 years that begin in March, so that a leap day is a year's last.
    let days = seconds / 86400 + 719_468;
    let (era, of_era) = (days / 146_097, days % 146_097);
    let year = (of_era - of_era / 1460 + of_era / 36_524 - of_era / 146_096) / 365;
    let of_year = of_era - (365 * year + year / 4 - year / 100);
    let month = (5 * of_year + 2) / 153;
    let day = of_year - (153 * month + 2) / 5 + 1;
    let (month, year) = (if month < 10 { month + 3 } else { month - 9 }, year + era * 400 + month / 10);
    let time = seconds % 86400;
    format!("{year:04}{month:02}{day:02}_{:02}{:02}{:02}", time / 3600, time / 60 % 60, time % 60)
}

#[cfg(test)]
mod tests {
    use super::*;

    /// The records of a log, each frame checked.
    fn read(file: &[u8]) -> Vec<Vec<u8>> {
        assert_eq!(file[..7], [b':', b'W', b'&', b'B', 0xe1, 0xbe, 0]);
        let (mut at, mut out, mut open) = (7, Vec::new(), Vec::new());
        while at < file.len() {
            if BLOCK - at % BLOCK < FRAME {
                at += BLOCK - at % BLOCK;
                continue;
            }
            let length = usize::from(u16::from_le_bytes([file[at + 4], file[at + 5]]));
            let checked = &file[at + 6..at + 7 + length];
            assert_eq!(crc32::<IEEE>(checked).to_le_bytes(), file[at..at + 4], "checksum at {at}");
            assert!(at % BLOCK + FRAME + length <= BLOCK, "a frame stays in its block");
            open.extend(&checked[1..]);
            match checked[0] {
                1 | 4 => out.push(std::mem::take(&mut open)),
                kind => assert!(kind == 2 || kind == 3),
            }
            at += FRAME + length;
        }
        assert!(open.is_empty());
        out
    }

    #[test]
    fn records_of_any_length_come_back() {
        // Up to the last byte of a block, one less than a frame short of it, several blocks, nothing.
        let fits = BLOCK - 7 - FRAME;
        for first in [fits, fits - 1, fits - FRAME, fits - FRAME + 1, fits + 1, 3 * BLOCK, 1, 0] {
            let mut writer = LogWriter::new();
            let records = [vec![7u8; first], vec![9; 5], vec![3; BLOCK]];
            records.iter().for_each(|r| writer.put(r));
            assert_eq!(read(&writer.out), records, "{first}");
        }
    }

    /// Fields of a message: its number, and the bytes or the integer.
    fn fields(mut data: &[u8]) -> Vec<(u64, Vec<u8>)> {
        let mut out = Vec::new();
        let number = |data: &mut &[u8]| {
            let (mut x, mut shift) = (0, 0);
            loop {
                let (byte, rest) = data.split_first().unwrap();
                (x, *data, shift) = (x | u64::from(byte & 0x7f) << shift, rest, shift + 7);
                if byte & 0x80 == 0 {
                    return x;
                }
            }
        };
        while !data.is_empty() {
            let (key, x) = (number(&mut data), number(&mut data));
            let bytes =
                if key & 7 == 2 { data.split_off(..x as usize).unwrap().to_vec() } else { vec![x as u8] };
            assert!(key & 7 == 2 || key & 7 == 0);
            out.push((key >> 3, bytes));
        }
        out
    }

    #[test]
    fn an_offline_run_holds_every_number_of_the_run() {
        let root = tempfile::tempdir().unwrap();
        let folder =
            crate::run::RunFolder::create(root.path(), "mine", "model.path = \"m\"\nalgo = \"grpo\"\n")
                .unwrap();
        let mut log = MetricsLog::open(&folder.metrics(), &Files::default()).unwrap();
        let metrics = |x: f64| vec![("loss".to_string(), f64::NAN), ("reward".into(), x)];
        for step in 1..=3u64 {
            let (stage, seconds) = ("grpo".to_string(), step as f64 * 0.5);
            let metrics = metrics(step as f64 / 3.0);
            log.append(&StepRecord { step, stage, epoch: 0.25, seconds, metrics }).unwrap();
        }
        let to = Destination { project: "p".into(), entity: Some("e".into()), name: None };
        let dir = write(folder.path(), &to).unwrap();
        assert_eq!(write(folder.path(), &to).unwrap(), dir, "the same folder again");
        let file = fs::read_dir(&dir).unwrap().map(|e| e.unwrap().path()).find(|p| p.is_file()).unwrap();
        let records: Vec<_> = read(&fs::read(file).unwrap()).iter().map(|r| fields(r)).collect();
        let kinds: Vec<u64> = records.iter().map(|r| r[1].0).collect();
        assert_eq!(kinds, [HEADER, RUN, HISTORY, HISTORY, HISTORY, SUMMARY, EXIT].map(u64::from));
        let items = |message: &[u8]| -> Vec<(String, String)> {
            let text = |bytes: &[u8]| String::from_utf8(bytes.to_vec()).unwrap();
            let of_item = |(_, item): (u64, Vec<u8>)| {
                let item = fields(&item);
                assert_eq!((item[0].0, item[1].0), (1, 16));
                (text(&item[0].1), text(&item[1].1))
            };
            fields(message).into_iter().filter(|f| f.0 == 1).map(of_item).collect()
        };
        let find =
            |i: usize, key: &str| items(&records[i][1].1).into_iter().find(|item| item.0 == key).unwrap().1;
        assert_eq!(find(3, "reward"), (2.0f64 / 3.0).to_string());
        assert_eq!(
            (find(4, "loss"), find(4, "_step"), find(4, "_runtime")),
            ("\"NaN\"".into(), "3".into(), "1.5".into())
        );
        assert_eq!(find(5, "reward"), "1.0");
        let run = fields(&records[1][1].1);
        let of_run = |field: u64| run.iter().find(|f| f.0 == field).unwrap().1.clone();
        assert_eq!((of_run(2), of_run(3), of_run(8)), (b"e".to_vec(), b"p".to_vec(), b"mine".to_vec()));
        let config = items(&of_run(4));
        assert!(config.iter().any(|(k, v)| k == "algo" && v.contains("\"grpo\"")), "{config:?}");
    }

    #[test]
    fn times_are_calendar_times() {
        assert_eq!(timestamp(1_794_804_281.25), "20261116_044441");
        assert_eq!(timestamp(951_782_400.0), "20000229_000000");
        assert_eq!(timestamp(0.0), "19700101_000000");
    }
}

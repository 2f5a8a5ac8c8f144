//! Files: the same rows from every format, broken files, folders and splits, the Hugging Face cache.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

mod data_help;

use std::io::Write;
use std::path::Path;

use data_help::{no_cache, row, write};
use ferrl::data::hub::{HubCache, Repo};
use ferrl::data::{DataSource, Dataset, FORMATS, Row, format_of};
use ferrl_engine::Result;
use serde_json::{Value, json};

fn rows() -> Vec<Row> {
    let message = |role: &str, content: &str| json!({ "role": role, "content": content });
    vec![
        row(json!({
            "id": 1, "prompt": "a, \"b\"\nc é", "score": 0.5, "label": true, "tags": ["x", "y"],
            "messages": [message("user", "hi, you"), message("assistant", "\"yes\"")], "note": "n",
        })),
        row(json!({
            "id": -20, "prompt": "007", "score": 2.25, "label": false, "tags": ["z"],
            "messages": [message("user", "→")], "note": null,
        })),
        row(json!({
            "id": 9_007_199_254_740_993_i64, "prompt": " x ", "score": -1e-3, "label": true, "tags": [],
            "messages": [message("user", "1")], "note": "3",
        })),
    ]
}

fn read(path: &Path) -> Result<Vec<Row>> {
    let source = DataSource::parse(path.to_str().unwrap()).unwrap();
    let dataset = Dataset::read(&source, &no_cache())?;
    (0..dataset.len()).map(|i| dataset.row(i)).collect()
}

fn error(path: &Path) -> String {
    let message = read(path).unwrap_err().to_string();
    assert!(message.contains(path.file_name().unwrap().to_str().unwrap()), "{message}");
    assert!(message.contains("fix:"), "{message}");
    message
}

fn json_bytes() -> Vec<u8> {
    serde_json::to_vec_pretty(&rows()).unwrap()
}
fn jsonl_bytes() -> Vec<u8> {
    let lines: Vec<String> = rows().into_iter().map(|r| Value::Object(r).to_string()).collect();
    (lines.join("\n\n") + "\n").into_bytes()
}
fn packed(bytes: &[u8]) -> Vec<u8> {
    let mut out = flate2::write::GzEncoder::new(Vec::new(), flate2::Compression::fast());
    out.write_all(bytes).unwrap();
    out.finish().unwrap()
}
fn csv_bytes(delimiter: u8) -> Vec<u8> {
    let mut writer = csv::WriterBuilder::new().delimiter(delimiter).from_writer(Vec::new());
    writer.write_record(rows()[0].keys()).unwrap();
    for row in rows() {
        let cell = |v: &Value| match v {
            Value::Null => String::new(),
            Value::String(s) => s.clone(),
            other => other.to_string(),
        };
        writer.write_record(row.values().map(cell)).unwrap();
    }
    writer.into_inner().unwrap()
}

#[cfg(feature = "parquet")]
mod tables {
    use super::*;
    use arrow_array::builder::*;
    use arrow_array::{ArrayRef, RecordBatch};
    use arrow_schema::{DataType, Field};
    use std::sync::Arc;

    pub fn batch() -> RecordBatch {
        let rows = rows();
        let column = |name: &str| rows.iter().map(|r| r[name].clone()).collect::<Vec<_>>();
        let text = |name: &str| -> ArrayRef {
            Arc::new(column(name).iter().map(Value::as_str).collect::<arrow_array::StringArray>())
        };
        let mut tags = ListBuilder::new(StringBuilder::new());
        for list in column("tags") {
            tags.append_value(list.as_array().unwrap().iter().map(Value::as_str));
        }
        let fields =
            vec![Field::new("role", DataType::Utf8, true), Field::new("content", DataType::Utf8, true)];
        let mut messages = ListBuilder::new(StructBuilder::from_fields(fields, 4));
        for list in column("messages") {
            let item = messages.values();
            for message in list.as_array().unwrap() {
                for (i, key) in ["role", "content"].into_iter().enumerate() {
                    item.field_builder::<StringBuilder>(i).unwrap().append_option(message[key].as_str());
                }
                item.append(true);
            }
            messages.append(true);
        }
        let id: arrow_array::Int64Array = column("id").iter().map(Value::as_i64).collect();
        let score: arrow_array::Float64Array = column("score").iter().map(Value::as_f64).collect();
        let label: arrow_array::BooleanArray = column("label").iter().map(Value::as_bool).collect();
        RecordBatch::try_from_iter_with_nullable([
            ("id", Arc::new(id) as ArrayRef, true),
            ("prompt", text("prompt"), true),
            ("score", Arc::new(score), true),
            ("label", Arc::new(label), true),
            ("tags", Arc::new(tags.finish()), true),
            ("messages", Arc::new(messages.finish()), true),
            ("note", text("note"), true),
        ])
        .unwrap()
    }

    pub fn parquet_bytes(codec: parquet::basic::Compression) -> Vec<u8> {
        let settings = parquet::file::properties::WriterProperties::builder().set_compression(codec).build();
        let mut out = Vec::new();
        let mut writer =
            parquet::arrow::ArrowWriter::try_new(&mut out, batch().schema(), Some(settings)).unwrap();
        writer.write(&batch()).unwrap();
        writer.close().unwrap();
        out
    }
    pub fn file_bytes() -> Vec<u8> {
        let mut writer = arrow_ipc::writer::FileWriter::try_new(Vec::new(), &batch().schema()).unwrap();
        writer.write(&batch()).unwrap();
        writer.into_inner().unwrap()
    }
    pub fn stream_bytes() -> Vec<u8> {
        let mut writer = arrow_ipc::writer::StreamWriter::try_new(Vec::new(), &batch().schema()).unwrap();
        writer.write(&batch()).unwrap();
        writer.into_inner().unwrap()
    }
}

/// A file name, its bytes, and the format it has to be read as.
#[cfg_attr(not(feature = "parquet"), allow(unused_mut))]
fn files() -> Vec<(&'static str, Vec<u8>, &'static str)> {
    let mut files = vec![
        ("a.json", json_bytes(), "JSON"),
        ("b.jsonl", jsonl_bytes(), "JSONL"),
        ("c.ndjson", jsonl_bytes(), "JSONL"),
        // The extension is wrong or missing; the content decides.
        ("d.json", jsonl_bytes(), "JSONL"),
        ("e.jsonl", json_bytes(), "JSON"),
        ("f", jsonl_bytes(), "JSONL"),
        ("g.jsonl", [&[0xef, 0xbb, 0xbf], jsonl_bytes().as_slice()].concat(), "JSONL"),
        ("h.csv", csv_bytes(b','), "CSV"),
        ("i.tsv", csv_bytes(b'\t'), "CSV"),
        ("r.jsonl.gz", packed(&jsonl_bytes()), "gzip"),
        ("s.csv.gz", packed(&csv_bytes(b',')), "gzip"),
    ];
    #[cfg(feature = "parquet")]
    {
        use parquet::basic::Compression;
        for (name, codec) in [
            ("j.parquet", Compression::SNAPPY),
            ("k.parquet", Compression::ZSTD(Default::default())),
            ("l.parquet", Compression::GZIP(Default::default())),
            ("m.parquet", Compression::LZ4_RAW),
            ("n.parquet", Compression::UNCOMPRESSED),
        ] {
            files.push((name, tables::parquet_bytes(codec), "Parquet"));
        }
        files.push(("o.arrow", tables::stream_bytes(), "Arrow stream"));
        files.push(("p.arrow", tables::file_bytes(), "Arrow file"));
        files.push(("q.feather", tables::file_bytes(), "Arrow file"));
    }
    files
}

#[test]
fn every_format_gives_the_same_rows() {
    let folder = tempfile::tempdir().unwrap();
    let mut seen: Vec<&str> = Vec::new();
    for (name, bytes, format) in files() {
        let path = write(folder.path(), name, bytes);
        assert_eq!(format_of(&path).unwrap().name(), format, "{name}");
        assert_eq!(read(&path).unwrap(), rows(), "{name}");
        // And again where nothing fits into memory: in place, or from a temporary file.
        let source = DataSource::parse(path.to_str().unwrap()).unwrap();
        let dataset = Dataset::within(&source, &no_cache(), &mut Err, 0).unwrap();
        let spooled: Vec<Row> = (0..dataset.len()).rev().map(|i| dataset.row(i).unwrap()).collect();
        assert!(spooled.iter().rev().eq(&rows()), "{name}");
        seen.push(format);
    }
    let path = write(folder.path(), "r.txt", "\u{feff}one line\r\n\n  two \"quoted\"\n");
    let text = |t: &str| row(json!({ "text": t }));
    assert_eq!(read(&path).unwrap(), [text("one line"), text("  two \"quoted\"")]);
    seen.push("text");
    assert!(FORMATS.iter().all(|f| seen.contains(&f.name())));
}

#[test]
fn broken_files_are_errors_that_name_the_place() {
    let folder = tempfile::tempdir().unwrap();
    for (name, bytes, _) in files() {
        // Cut short: rows are missing, so it must not pass for whole unless whole rows were left.
        for share in [3, 5, 7] {
            let path = write(folder.path(), name, &bytes[..bytes.len() * share / 8]);
            assert!(read(&path).is_err(), "{name} cut to {share}/8");
            error(&path);
        }
        // Damaged anywhere: an error or other rows, never a panic.
        for i in 0..bytes.len().min(60) {
            let mut damaged = bytes.clone();
            let at = i * bytes.len() / bytes.len().min(60);
            damaged[at] ^= 0x55;
            let _ = read(&write(folder.path(), name, damaged));
        }
        std::fs::remove_file(folder.path().join(name)).unwrap();
    }
    let case = |name: &str, text: &str, parts: &[&str]| {
        let message = error(&write(folder.path(), name, text));
        for part in parts {
            assert!(message.contains(part), "{name}: no {part:?} in {message}");
        }
    };
    case("r.json", "", &["empty"]);
    case("s.json", "{\"a\": 1,\n \"b\": 2}", &["s.json:1", "not valid JSON"]);
    case("t.json", "[{\"a\": 1},\n 2]", &["t.json:2", "a row is a number"]);
    case("u.jsonl", "{\"a\": 1}\n{\"a\": 1,}\n", &["u.jsonl:2", "column 9"]);
    case("v.jsonl", "{\"a\": 1}\n\n\"x\"\n", &["v.jsonl:3", "a row is text"]);
    case("w.csv", "a,b\n1,2\n3\n", &["w.csv:3", "got 1 cell, expected 2"]);
    case("x.csv", "a,b\n1,\"2\n3,4\n", &["never closed"]);
    case("y.csv", "a,a\n1,2\n", &["two columns are named \"a\""]);
    case("z.parquet", "version https://git-lfs.github.com/spec/v1\noid", &["Git LFS"]);
    case("z.jsonl", "\u{1f}not gzip", &["z.jsonl:1"]);
    case("z.yaml", "a: 1", &["unknown kind", "yaml"]);
    case("empty.csv", "a,b\n", &["no rows"]);
    assert!(error(&write(folder.path(), "z.json.gz", [0x1f, 0x8b, 8, 0])).contains("cannot be unpacked"));
    assert!(error(&write(folder.path(), "bad.csv", b"a,b\n\xff,1\n")).contains("UTF-8"));
    assert!(error(&folder.path().join("z.jsnl")).contains("did you mean"));
}

#[test]
fn a_row_of_many_megabytes_is_refused_by_its_number() {
    let folder = tempfile::tempdir().unwrap();
    let long = "y".repeat(ferrl::data::MAX_ROW + 10);
    let row = format!("{{\"a\": \"{long}\"}}");
    for (name, text, place) in [
        ("a.jsonl", format!("{{\"a\": 1}}\n{row}\n{{\"a\": 2}}\n"), "a.jsonl:2"),
        ("b.json", format!("[{{\"a\": 1}}, {row}]"), "b.json:2"),
        ("c.csv", format!("a,b\n1,\"{long}\"\n"), "c.csv:2"),
        ("d.txt", format!("short\n{long}\n"), "d.txt:2"),
        // What is never closed must not fill the memory either.
        ("e.json", format!("[{{\"a\": \"{long}"), "e.json:1"),
        ("f.csv", format!("a,b\n1,\"{long}"), "f.csv:2"),
    ] {
        let message = error(&write(folder.path(), name, text));
        assert!(message.contains(place) && message.contains("MiB"), "{message}");
    }
    // The rows behind it can still be read by whoever passes over it.
    let source = DataSource::parse(folder.path().join("a.jsonl").to_str().unwrap()).unwrap();
    let mut bad = 0;
    let dataset = Dataset::read_with(&source, &no_cache(), &mut |_| {
        bad += 1;
        Ok(())
    })
    .unwrap();
    assert_eq!((bad, dataset.len(), dataset.place(1).ends_with("a.jsonl:3")), (1, 2, true));
}

#[test]
fn csv_cells_keep_what_was_written() {
    let folder = tempfile::tempdir().unwrap();
    let path =
        write(folder.path(), "a.csv", "n,text,size\n1,\"2\",5\" pipe\n1.50,x,6\" pipe\n007,y,7\" pipe\n");
    let rows = read(&path).unwrap();
    assert_eq!(rows[1]["n"], "1.50");
    assert_eq!(rows[0]["text"], "2");
    assert_eq!(rows[2]["size"], "7\" pipe");
}

#[test]
fn folders_globs_splits_and_ranges() {
    let folder = tempfile::tempdir().unwrap();
    let root = folder.path();
    let line = |id: usize| format!("{{\"id\": {id}}}\n");
    for (name, id) in [
        ("plain/a.jsonl", 1),
        ("plain/b.jsonl", 2),
        ("plain/.hidden.jsonl", 9),
        ("named/train-00000-of-00002.jsonl", 3),
        ("named/train-00001-of-00002.jsonl", 4),
        ("named/test-00000-of-00001.jsonl", 5),
        ("saved/train/data-00000-of-00001.jsonl", 6),
        ("saved/val/data-00000-of-00001.jsonl", 7),
        ("only/test.jsonl", 8),
        ("configs/main/train.jsonl", 10),
        ("configs/other/train.jsonl", 11),
        ("sft/train_sft.jsonl", 12),
        ("sft/train_gen.jsonl", 13),
        ("mixed/a.jsonl", 14),
    ] {
        write(root, name, line(id));
    }
    write(root, "saved/dataset_dict.json", "{\"splits\": [\"train\", \"val\"]}");
    write(root, "saved/train/state.json", "{}");
    write(root, "plain/README.md", "words");
    write(root, "plain/LICENSE.txt", "words");
    write(root, "mixed/b.csv", "id\n1\n");
    write(root, "many.jsonl", (0..10).map(line).collect::<String>());
    let read = |text: &str| -> std::result::Result<Vec<i64>, String> {
        let (split, path) = text.split_once('@').unwrap_or(("", text));
        let at = if split.is_empty() { String::new() } else { format!("{split}@") };
        let source = DataSource::parse(&format!("{at}{}/{path}", root.display())).unwrap();
        let data = Dataset::read(&source, &no_cache()).map_err(|e| e.to_string())?;
        Ok((0..data.len()).map(|i| data.row(i).unwrap()["id"].as_i64().unwrap()).collect())
    };
    for (text, ids) in [
        ("plain", vec![1, 2]),
        ("plain/*.jsonl", vec![1, 2]),
        ("*/[ab].jsonl", vec![14, 1, 2]),
        ("named", vec![3, 4]),
        ("train@named", vec![3, 4]),
        ("test@named", vec![5]),
        ("train[1:]@named", vec![4]),
        ("saved", vec![6]),
        ("validation@saved", vec![7]),
        ("val@saved", vec![7]),
        ("test@only", vec![8]),
        ("test@only/test.jsonl", vec![8]),
        ("configs/main", vec![10]),
        ("train_gen@sft", vec![13]),
        ("train[:3]@many.jsonl", vec![0, 1, 2]),
        ("train[-20%:]@many.jsonl", vec![8, 9]),
        ("train[25%:5]@many.jsonl", vec![3, 4]),
    ] {
        assert_eq!(read(text), Ok(ids), "{text}");
    }
    for (text, part) in [
        ("only", "no split named train"),
        ("tset@named", "did you mean \"test\""),
        ("test@many.jsonl", "one file is one split"),
        ("configs", "configs: several parts are \"train\": main/train, other/train"),
        ("sft", "train_gen, train_sft"),
        ("mixed", "mixes files of CSV, JSONL"),
        ("none*.jsonl", "no file matches"),
        ("manny.jsonl", "did you mean"),
        ("train[5:5]@many.jsonl", "no rows"),
    ] {
        let message = read(text).unwrap_err();
        assert!(message.contains(part) && message.contains("fix:"), "{text}: {message}");
    }
    for text in ["", "@x", "train@", "train[1@x", "train[a:b]@x", "train[:120%]@x"] {
        assert!(DataSource::parse(text).is_err(), "{text}");
    }
    let plain = DataSource::parse(root.join("plain").to_str().unwrap()).unwrap();
    let data = Dataset::read(&plain, &no_cache()).unwrap();
    assert!(data.place(1).ends_with("b.jsonl:1"), "{}", data.place(1));
}

#[cfg(unix)]
#[test]
fn the_hugging_face_cache_is_read_as_it_lies_on_disk() {
    let folder = tempfile::tempdir().unwrap();
    let cache = HubCache { root: folder.path().join("hub"), offline: true };
    let repo = cache.root.join("datasets--org--sums");
    let commit = "0123456789abcdef0123456789abcdef01234567";
    write(&repo, "refs/main", commit);
    write(&repo, "refs/refs/pr/1", commit);
    write(&repo, "blobs/aaaa", "{\"prompt\": \"1+1\"}\n");
    write(&repo, "blobs/bbbb", "{\"prompt\": \"2+2\"}\n");
    let snapshot = repo.join("snapshots").join(commit);
    std::fs::create_dir_all(snapshot.join("data")).unwrap();
    let link = |target: &str, name: &str| std::os::unix::fs::symlink(target, snapshot.join(name)).unwrap();
    link("../../../blobs/aaaa", "data/train-00000-of-00001.jsonl");
    link("../../../blobs/bbbb", "data/test-00000-of-00001.jsonl");
    let read = |text: &str| {
        let data = Dataset::read(&DataSource::parse(text).unwrap(), &cache);
        data.map(|d| d.row(0).unwrap()["prompt"].as_str().unwrap().to_owned()).map_err(|e| e.to_string())
    };
    assert_eq!(read("org/sums").unwrap(), "1+1");
    assert_eq!(read("test@org/sums").unwrap(), "2+2");
    assert_eq!(read("org/sums/data").unwrap(), "1+1");
    assert_eq!(cache.resolve(Repo::Dataset, "org/sums", Some("refs/pr/1")).unwrap(), snapshot);
    assert_eq!(cache.resolve(Repo::Dataset, "org/sums", Some(commit)).unwrap(), snapshot);
    std::fs::create_dir_all(cache.root.join("models--org--tiny/snapshots/abc")).unwrap();
    assert!(cache.resolve(Repo::Model, "org/tiny", Some("abc")).is_ok());

    let message = read("org/sum").unwrap_err();
    for part in [
        "did you mean \"org/sums\"",
        "hf download org/sum --repo-type dataset",
        "HF_HUB_OFFLINE",
        "HF_HUB_CACHE",
    ] {
        assert!(message.contains(part), "{message}");
    }
    let message = cache.resolve(Repo::Dataset, "org/sums", Some("v2")).unwrap_err().to_string();
    assert!(message.contains("main") && message.contains("--revision v2"), "{message}");
    for trick in ["org/sums/../../secret", "org/sums/./../x", "../hub/x", "org/.."] {
        assert!(read(trick).is_err(), "{trick}");
    }
    for revision in ["../x", "a/../b", "/etc", ""] {
        assert!(cache.resolve(Repo::Dataset, "org/sums", Some(revision)).is_err(), "{revision}");
    }
    write(folder.path(), "secret.jsonl", "{\"prompt\": \"secret\"}\n");
    link("../../../../../secret.jsonl", "data/dev.jsonl");
    assert!(read("validation@org/sums").unwrap_err().contains("leads out"));
    link("../../../blobs/missing", "data/eval.jsonl");
    std::fs::remove_file(snapshot.join("data/test-00000-of-00001.jsonl")).unwrap();
    assert!(read("test@org/sums").unwrap_err().contains("not finished"));
    write(&repo, "refs/main", "../../..");
    assert!(read("org/sums").unwrap_err().contains("expected a commit"));
}

/// Was: the last of the columns counted.
#[cfg(feature = "parquet")]
#[test]
fn columns_of_the_same_name_are_refused() {
    use arrow_array::{ArrayRef, RecordBatch, StringArray};
    use arrow_schema::{DataType, Field, Schema};
    let fields = ["prompt", "response", "response"].map(|name| Field::new(name, DataType::Utf8, true));
    let column = |text: &str| std::sync::Arc::new(StringArray::from(vec![text])) as ArrayRef;
    let columns = vec![column("a"), column("b"), column("c")];
    let batch = RecordBatch::try_new(std::sync::Arc::new(Schema::new(fields.to_vec())), columns).unwrap();
    let mut writer = arrow_ipc::writer::StreamWriter::try_new(Vec::new(), &batch.schema()).unwrap();
    writer.write(&batch).unwrap();
    let folder = tempfile::tempdir().unwrap();
    let message = error(&write(folder.path(), "twice.arrow", writer.into_inner().unwrap()));
    assert!(message.contains("two columns are named \"response\""), "{message}");
}

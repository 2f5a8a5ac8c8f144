//! Parquet files, as the Hugging Face hub keeps most datasets.

use std::fs::File;
use std::path::Path;

use ::parquet::arrow::arrow_reader::ParquetRecordBatchReaderBuilder;
use ferrl_engine::{Error, Result};

use super::{Each, FileFormat, columns, unreadable};

pub struct Parquet;

impl FileFormat for Parquet {
    fn name(&self) -> &'static str {
        "Parquet"
    }
    fn extensions(&self) -> &'static [&'static str] {
        &["parquet", "pq"]
    }
    fn begins(&self, head: &[u8]) -> bool {
        head.starts_with(b"PAR1")
    }

    fn read(&self, path: &Path, each: Each<'_>) -> Result<()> {
        let file = File::open(path).map_err(|e| unreadable(path, &e))?;
        let broken = |what: String| {
            let fix = match what.contains("Disabled feature") {
                true => "write it again with another compression: zstd, snappy, gzip, lz4 or none",
                false => "the file is truncated or damaged: copy or download it again",
            };
            Error::data(format!("is not a usable Parquet file: {what}")).at(path.display()).fix(fix)
        };
        let open = || ParquetRecordBatchReaderBuilder::try_new(file)?.with_batch_size(256).build();
        let reader = columns::guarded(open).map_err(broken)?;
        columns::batches(path, reader, &broken, each)
    }
}

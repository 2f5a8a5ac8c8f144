//! Columns of Arrow arrays to rows of JSON values.

use std::fmt::Display;
use std::panic::AssertUnwindSafe;
use std::path::Path;

use arrow_array::cast::AsArray;
use arrow_array::types::*;
use arrow_array::{Array, OffsetSizeTrait, RecordBatch, temporal_conversions};
use arrow_schema::{DataType, TimeUnit};
use ferrl_engine::{Error, Result};
use serde_json::Value;

use super::{Each, FileRow, Row, once_each};

/// Runs a step of a reader that may panic on a damaged file, and says what it complained about.
pub fn guarded<T, E: Display>(
    step: impl FnOnce() -> std::result::Result<T, E>,
) -> std::result::Result<T, String> {
    match std::panic::catch_unwind(AssertUnwindSafe(step)) {
        Ok(done) => done.map_err(|e| e.to_string()),
        Err(panic) => {
            let words = panic.downcast_ref::<String>().map(String::as_str);
            let words = words.or_else(|| panic.downcast_ref::<&str>().copied());
            Err(words.unwrap_or("its numbers make no sense").to_owned())
        }
    }
}

/// Gives the rows of all batches of a reader; `broken` makes the error for one that cannot be read.
pub fn batches<E: Display>(
    path: &Path,
    mut reader: impl Iterator<Item = std::result::Result<RecordBatch, E>>,
    broken: &dyn Fn(String) -> Error,
    each: Each<'_>,
) -> Result<()> {
    let mut number = 0;
    loop {
        let next = guarded(|| reader.next().transpose());
        match next.map_err(|e| broken(format!("{e} (after row {number})")))? {
            Some(batch) => rows(&batch, path, &mut number, each)?,
            None => return Ok(()),
        }
    }
}

/// Gives the rows of a batch; `number` counts on from batch to batch.
fn rows(batch: &RecordBatch, path: &Path, number: &mut usize, each: Each<'_>) -> Result<()> {
    let schema = batch.schema();
    let names: Vec<&str> = schema.fields().iter().map(|field| field.name().as_str()).collect();
    once_each(&names).map_err(|e| e.at(path.display()))?;
    for i in 0..batch.num_rows() {
        let mut row = Row::new();
        for (field, column) in schema.fields().iter().zip(batch.columns()) {
            let value = value(column.as_ref(), i)
                .map_err(|e| e.at(format!("column {}", field.name())).at(path.display()))?;
            row.insert(field.name().clone(), value);
        }
        *number += 1;
        each(FileRow::new(*number, Ok(row)))?;
    }
    Ok(())
}

macro_rules! numbers {
    ($array:expr, $i:expr, $($variant:ident => $arrow:ty),+; $other:expr) => {
        match $array.data_type() {
            $(DataType::$variant => Value::from($array.as_primitive::<$arrow>().value($i)),)+
            _ => $other,
        }
    };
}

fn value(array: &dyn Array, i: usize) -> Result<Value> {
    if array.is_null(i) {
        return Ok(Value::Null);
    }
    Ok(numbers!(array, i,
        Int8 => Int8Type, Int16 => Int16Type, Int32 => Int32Type, Int64 => Int64Type,
        UInt8 => UInt8Type, UInt16 => UInt16Type, UInt32 => UInt32Type, UInt64 => UInt64Type,
        Float64 => Float64Type; other(array, i)?))
}

fn other(array: &dyn Array, i: usize) -> Result<Value> {
    Ok(match array.data_type() {
        DataType::Null => Value::Null,
        DataType::Boolean => array.as_boolean().value(i).into(),
        DataType::Float32 => shortest(array.as_primitive::<Float32Type>().value(i)),
        DataType::Float16 => shortest(array.as_primitive::<Float16Type>().value(i).to_f32()),
        DataType::Utf8 => array.as_string::<i32>().value(i).into(),
        DataType::LargeUtf8 => array.as_string::<i64>().value(i).into(),
        DataType::Utf8View => array.as_string_view().value(i).into(),
        DataType::Binary => bytes(array.as_binary::<i32>().value(i)),
        DataType::LargeBinary => bytes(array.as_binary::<i64>().value(i)),
        DataType::BinaryView => bytes(array.as_binary_view().value(i)),
        DataType::FixedSizeBinary(_) => bytes(array.as_fixed_size_binary().value(i)),
        DataType::List(_) => list::<i32>(array, i)?,
        DataType::LargeList(_) => list::<i64>(array, i)?,
        DataType::FixedSizeList(..) => items(array.as_fixed_size_list().value(i).as_ref())?,
        DataType::Struct(_) => structure(array, i)?,
        DataType::Map(..) => map(array, i)?,
        DataType::Dictionary(..) => {
            let dictionary = array.as_any_dictionary();
            let key = dictionary.normalized_keys().get(i).copied().unwrap_or(0);
            value(dictionary.values().as_ref(), key)?
        }
        DataType::Decimal128(..) => array.as_primitive::<Decimal128Type>().value_as_string(i).into(),
        DataType::Decimal256(..) => array.as_primitive::<Decimal256Type>().value_as_string(i).into(),
        DataType::Date32 => date(array.as_primitive::<Date32Type>().value_as_date(i)),
        DataType::Date64 => date(array.as_primitive::<Date64Type>().value_as_date(i)),
        DataType::Timestamp(unit, _) => timestamp(array, i, *unit),
        unsupported => {
            return Err(Error::data(format!("values of type {unsupported} are not read"))
                .fix("drop the column, or store it as text or numbers"));
        }
    })
}

/// The number with the fewest digits that is this `f32`, so that 0.1 stays 0.1.
fn shortest(number: f32) -> Value {
    number.to_string().parse::<f64>().map_or(Value::Null, Value::from)
}

fn list<O: OffsetSizeTrait>(array: &dyn Array, i: usize) -> Result<Value> {
    items(array.as_list::<O>().value(i).as_ref())
}

fn items(array: &dyn Array) -> Result<Value> {
    let values: Result<Vec<Value>> = (0..array.len()).map(|i| value(array, i)).collect();
    Ok(Value::Array(values?))
}

fn structure(array: &dyn Array, i: usize) -> Result<Value> {
    let fields = array.as_struct();
    let mut object = Row::new();
    for (name, column) in fields.column_names().into_iter().zip(fields.columns()) {
        object.insert(name.to_owned(), value(column.as_ref(), i)?);
    }
    Ok(Value::Object(object))
}

fn map(array: &dyn Array, i: usize) -> Result<Value> {
    let entries = array.as_map().value(i);
    let (keys, values) = (entries.column(0), entries.column(1));
    let mut object = Row::new();
    for j in 0..entries.len() {
        let key = match value(keys.as_ref(), j)? {
            Value::String(key) => key,
            key => key.to_string(),
        };
        object.insert(key, value(values.as_ref(), j)?);
    }
    Ok(Value::Object(object))
}

fn date(date: Option<impl std::fmt::Display>) -> Value {
    date.map_or(Value::Null, |d| d.to_string().into())
}

fn timestamp(array: &dyn Array, i: usize, unit: TimeUnit) -> Value {
    use temporal_conversions as time;
    let moment = match unit {
        TimeUnit::Second => {
            time::timestamp_s_to_datetime(array.as_primitive::<TimestampSecondType>().value(i))
        }
        TimeUnit::Millisecond => {
            time::timestamp_ms_to_datetime(array.as_primitive::<TimestampMillisecondType>().value(i))
        }
        TimeUnit::Microsecond => {
            time::timestamp_us_to_datetime(array.as_primitive::<TimestampMicrosecondType>().value(i))
        }
        TimeUnit::Nanosecond => {
            time::timestamp_ns_to_datetime(array.as_primitive::<TimestampNanosecondType>().value(i))
        }
    };
    date(moment)
}

/// Bytes as text where they are text, in base64 otherwise (images and the like).
fn bytes(bytes: &[u8]) -> Value {
    const DIGITS: &[u8; 64] = b"ABCDEFGHIJKLMNOPQRSTUVWXYZabcdefghijklmnopqrstuvwxyz0123456789+/";
    if let Ok(text) = std::str::from_utf8(bytes) {
        return text.into();
    }
    let mut text = String::with_capacity(bytes.len().div_ceil(3) * 4);
    for chunk in bytes.chunks(3) {
        let word = chunk.iter().fold(0, |w, &b| w << 8 | u32::from(b)) << (8 * (3 - chunk.len()));
        for digit in 0..4 {
            let index = word >> (18 - 6 * digit) & 63;
            text.push(if digit <= chunk.len() { DIGITS[index as usize] as char } else { '=' });
        }
    }
    text.into()
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn bytes_become_text_or_base64() {
        assert_eq!(bytes(b"plain"), "plain");
        assert_eq!(bytes(&[0xff, 0x00, 0x10]), "/wAQ");
        assert_eq!(bytes(&[0xff, 0x00]), "/wA=");
        assert_eq!(bytes(&[0xff]), "/w==");
    }

    #[test]
    fn floats_keep_their_decimal_form() {
        assert_eq!(shortest(0.1), Value::from(0.1));
        assert_eq!(shortest(f32::NAN), Value::Null);
    }
}

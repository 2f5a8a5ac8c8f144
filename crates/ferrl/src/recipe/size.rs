//! Memory sizes with units, such as "24 GB".

use super::Recipe;
use ferrl_engine::{Error, Result};
use ferrl_kernels::Backend;

/// Maximum memory of a plan: 1024 TiB.
const MOST_BYTES: f64 = 1125899906842624.0;

/// Minimum of `device_memory`: a smaller number lacks its unit.
const LEAST_DEVICE: u64 = 64 << 10;

/// A number of bytes with a unit: `22GiB`, `900MiB`.
pub fn bytes(text: &str) -> std::result::Result<u64, String> {
    let split = text.find(|c: char| c.is_ascii_alphabetic()).unwrap_or(text.len());
    let (number, unit) = text.split_at(split);
    let factor = match unit.to_ascii_lowercase().as_str() {
        "" | "b" => 1.0,
        "kib" | "k" => 1024.0,
        "mib" | "m" => 1048576.0,
        "gib" | "g" => 1073741824.0,
        "tib" | "t" => 1099511627776.0,
        "kb" => 1e3,
        "mb" => 1e6,
        "gb" => 1e9,
        "tb" => 1e12,
        other => return Err(format!("unknown unit {other:?}; write 22GiB, 900MiB or a number of bytes")),
    };
    match number.trim().parse::<f64>() {
        Ok(n) if n * factor >= 1.0 && n * factor <= MOST_BYTES => Ok((n * factor) as u64),
        Ok(_) => Err("must be from 1B to 1024TiB".into()),
        _ => Err(format!("{text:?} is not a size; write 22GiB, 900MiB or a number of bytes")),
    }
}

/// The same for the memory of a device.
pub fn device_bytes(text: &str) -> std::result::Result<u64, String> {
    match bytes(text)? {
        size if size < LEAST_DEVICE => Err(format!("{text:?} is {size} bytes, expected at least 64KiB")),
        size => Ok(size),
    }
}

impl Recipe {
    /// `device_memory` in bytes.
    pub fn device_bytes(&self) -> Result<Option<u64>> {
        let wrong = |what: String| Error::usage(what).at("device_memory").fix("device_memory = \"24GiB\"");
        self.device_memory.as_deref().map(device_bytes).transpose().map_err(wrong)
    }

    /// Limits the device to `device_memory`.
    pub fn limit(&self, device: &dyn Backend) -> Result<()> {
        device.set_memory_limit(self.device_bytes()?.map(|bytes| bytes as usize));
        Ok(())
    }
}

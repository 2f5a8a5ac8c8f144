//! Kernel launches.

use super::context::Cuda;
use super::tensor_map::TensorMap;
use crate::{Buffer, Result};
use cudarc::driver::sys::{self, CUresult};
use std::ffi::c_void;

/// A kernel argument: a number or an address, in the low bytes of eight.
#[derive(Clone, Copy)]
pub struct Arg {
    bits: u64,
    /// Whether it is a count or size, for error messages.
    counts: bool,
}

impl Arg {
    const fn count(bits: u64) -> Self {
        Arg { bits, counts: true }
    }

    const fn other(bits: u64) -> Self {
        Arg { bits, counts: false }
    }

    /// Its value if it is a count or size.
    pub(super) fn size(&self) -> Option<u64> {
        self.counts.then_some(self.bits)
    }
}

impl From<u64> for Arg {
    fn from(x: u64) -> Self {
        Arg::other(x)
    }
}
impl From<u32> for Arg {
    fn from(x: u32) -> Self {
        Arg::count(u64::from(x))
    }
}
impl From<i32> for Arg {
    fn from(x: i32) -> Self {
        Arg::other(u64::from(x as u32))
    }
}
impl From<bool> for Arg {
    fn from(x: bool) -> Self {
        Arg::other(u64::from(x))
    }
}
impl From<f32> for Arg {
    fn from(x: f32) -> Self {
        Arg::other(u64::from(x.to_bits()))
    }
}
impl From<f64> for Arg {
    fn from(x: f64) -> Self {
        Arg::other(x.to_bits())
    }
}
/// `usize` is passed as `unsigned long long`.
impl From<usize> for Arg {
    fn from(x: usize) -> Self {
        Arg::count(x as u64)
    }
}
impl From<&Buffer> for Arg {
    fn from(b: &Buffer) -> Self {
        Arg::other(super::memory::ptr(b))
    }
}
impl From<&mut Buffer> for Arg {
    fn from(b: &mut Buffer) -> Self {
        Arg::other(super::memory::ptr(b))
    }
}
impl From<&super::memory::CardMemory> for Arg {
    fn from(m: &super::memory::CardMemory) -> Self {
        Arg::other(m.ptr())
    }
}
impl From<&std::sync::Arc<super::memory::CardMemory>> for Arg {
    fn from(m: &std::sync::Arc<super::memory::CardMemory>) -> Self {
        Arg::other(m.ptr())
    }
}
/// `None` is a null pointer.
impl From<Option<&Buffer>> for Arg {
    fn from(b: Option<&Buffer>) -> Self {
        b.map_or(Arg::other(0), Arg::from)
    }
}

/// Kernel arguments in order; each must have the size of its parameter (`usize`: 8 bytes, `bool`: 1).
macro_rules! args {
    ($($x:expr),* $(,)?) => { [$($crate::cuda::launch::Arg::from($x)),*] };
}
pub(super) use args;

/// Launch configuration.
#[derive(Clone, Copy, Debug)]
pub struct Grid {
    /// Grid size in blocks.
    pub blocks: [u32; 3],
    /// Threads per block.
    pub threads: u32,
    /// Bytes of dynamic shared memory.
    pub shared: usize,
    /// Programmatic dependent launch: the kernel may start before the previous one has ended, and must call `wait_for_earlier`
    /// (see prelude.cuh).
    pub early: bool,
}

impl Grid {
    /// One-dimensional.
    pub fn new(blocks: usize, threads: u32) -> Self {
        Grid { blocks: [blocks as u32, 1, 1], threads, shared: 0, early: false }
    }
    /// Two-dimensional.
    pub fn plane(x: usize, y: usize, threads: u32) -> Self {
        Grid { blocks: [x as u32, y as u32, 1], threads, shared: 0, early: false }
    }
    /// With this number of bytes of dynamic shared memory.
    pub fn with_shared(self, shared: usize) -> Self {
        Grid { shared, ..self }
    }
    /// With programmatic dependent launch.
    pub fn early(self) -> Self {
        Grid { early: true, ..self }
    }
}

impl Cuda {
    /// Launches a kernel of a source. No-op for an empty grid.
    pub(super) fn launch(&self, module: &'static str, name: &str, grid: Grid, args: &[Arg]) -> Result<()> {
        self.launch_variant(module, "", name, grid, args)
    }

    /// Launches a kernel of a source compiled with definitions, such as `"HEAD_DIM=64 GROUP=7"`.
    pub(super) fn launch_variant(
        &self,
        module: &'static str,
        defines: &str,
        name: &str,
        grid: Grid,
        args: &[Arg],
    ) -> Result<()> {
        self.launch_mapped((module, defines), name, grid, &[], args)
    }

    /// The same for a kernel whose first parameters are tensor maps.
    pub(super) fn launch_mapped(
        &self,
        (module, defines): (&'static str, &str),
        name: &str,
        grid: Grid,
        maps: &[TensorMap],
        args: &[Arg],
    ) -> Result<()> {
        if grid.blocks.contains(&0) {
            return Ok(());
        }
        self.bind()?;
        let function = self.modules.kernel(module, defines, name, grid.shared)?;
        self.trace.kernel(module, name, grid, args);
        let maps = maps.iter().map(TensorMap::parameter);
        let args = args.iter().map(|a| (&raw const a.bits).cast_mut().cast());
        let mut args: Vec<*mut c_void> = maps.chain(args).collect();
        let [x, y, z] = grid.blocks;
        // GPUs before Hopper do not support the attribute.
        let early = grid.early && self.card.capability >= (9, 0);
        let mut attribute = sys::CUlaunchAttribute {
            id: sys::CUlaunchAttributeID::CU_LAUNCH_ATTRIBUTE_PROGRAMMATIC_STREAM_SERIALIZATION,
            pad: [0; 4],
            value: sys::CUlaunchAttributeValue { programmaticStreamSerializationAllowed: 1 },
        };
        let config = sys::CUlaunchConfig {
            gridDimX: x,
            gridDimY: y,
            gridDimZ: z,
            blockDimX: grid.threads,
            blockDimY: 1,
            blockDimZ: 1,
            sharedMemBytes: grid.shared as u32,
            hStream: self.stream,
            attrs: &raw mut attribute,
            numAttrs: u32::from(early),
        };
        let start = || {
            // SAFETY: each argument points to eight live bytes or a live tensor map; launchers match the kernel's parameter list.
            let done =
                unsafe { sys::cuLaunchKernelEx(&config, function, args.as_mut_ptr(), std::ptr::null_mut()) };
            match done {
                CUresult::CUDA_SUCCESS => Ok(()),
                failed => Err(self.failed(failed, &format!("starting {name}"))),
            }
        };
        self.profile.time(self.stream, || name.to_string(), start)?;
        self.started()
    }

    /// Launches a kernel with one thread per element, for `n` elements.
    pub(super) fn launch_flat(&self, module: &'static str, name: &str, n: usize, args: &[Arg]) -> Result<()> {
        self.launch(module, name, Grid::new(n.div_ceil(256), 256), args)
    }
}

//! Run-time compilation of kernels with NVRTC, cached in the user's cache folder.

use super::ahead::{self, Ahead};
use super::context::check;
use super::gemm::{low_rank, multicast, stream};
use super::handles::CudaContext;
use super::head::{logp, sample};
use super::libraries::{self, Library};
use super::{attention, decode, norm, optim};
use crate::{Error, Result, lock};
use cudarc::driver::sys::{self as driver, CUfunction, CUfunction_attribute, CUmodule, CUresult};
use cudarc::nvrtc::sys::{self as nvrtc, nvrtcProgram, nvrtcResult};
use std::collections::HashMap;
use std::ffi::CString;
use std::path::PathBuf;
use std::sync::atomic::{AtomicU64, Ordering};
use std::sync::{Arc, Mutex};

/// Prepended to every source: storage types, conversions, reductions, mathematics.
const PRELUDE: &str = include_str!("prelude.cuh");

/// A source file of kernels.
pub struct KernelSource {
    /// The name that launchers use.
    pub name: &'static str,
    /// Its text, compiled after the prelude.
    pub text: &'static str,
    /// Sizes shared by launchers and kernels: definitions of every variant.
    pub constants: &'static [(&'static str, usize)],
    /// Variants to compile in tests: definitions such as `"HEAD_DIM=64 GROUP=7"`.
    pub variants: &'static [&'static str],
}

const fn plain(name: &'static str, text: &'static str) -> KernelSource {
    KernelSource { name, text, constants: &[], variants: &[""] }
}

impl KernelSource {
    const fn with(self, constants: &'static [(&'static str, usize)]) -> KernelSource {
        KernelSource { constants, ..self }
    }
    const fn variants(self, variants: &'static [&'static str]) -> KernelSource {
        KernelSource { variants, ..self }
    }
}

/// All source files.
pub const SOURCES: &[KernelSource] = &[
    plain("activation", include_str!("elementwise/activation.cu")),
    plain(
        "attention",
        concat!(
            include_str!("attention/tile.cu"),
            include_str!("attention/forward.cu"),
            include_str!("attention/decode.cu")
        ),
    )
    .with(attention::CONSTANTS)
    .variants(attention::VARIANTS),
    plain(
        "attention_hopper",
        concat!(
            include_str!("attention/tile.cu"),
            include_str!("attention/forward.cu"),
            include_str!("attention/decode.cu"),
            include_str!("attention/wgmma.cu"),
            include_str!("attention/forward_wgmma.cu")
        ),
    )
    .with(attention::CONSTANTS)
    .variants(attention::WGMMA_VARIANTS),
    plain(
        "attention_backward",
        concat!(include_str!("attention/tile.cu"), include_str!("attention/backward.cu")),
    )
    .with(attention::BACKWARD_CONSTANTS)
    .variants(attention::BACKWARD_VARIANTS),
    plain(
        "attention_backward_hopper",
        concat!(
            include_str!("attention/tile.cu"),
            include_str!("attention/backward.cu"),
            include_str!("attention/wgmma.cu"),
            include_str!("attention/backward_keys_wgmma.cu"),
            include_str!("attention/backward_dq_wgmma.cu")
        ),
    )
    .with(attention::BACKWARD_CONSTANTS)
    .variants(attention::BACKWARD_WGMMA_VARIANTS),
    plain("attention_cache", include_str!("attention/cache.cu")).with(attention::CONSTANTS),
    plain("attention_simple", include_str!("attention/simple.cu"))
        .with(attention::SIMPLE_CONSTANTS)
        .variants(attention::SIMPLE_VARIANTS),
    plain("embed", concat!(include_str!("optim/split_master.cuh"), include_str!("elementwise/embed.cu"))),
    plain("experts", include_str!("elementwise/experts.cu")),
    plain(
        "decode_gemm",
        concat!(
            include_str!("decode/products.cu"),
            include_str!("decode/gemm.cu"),
            include_str!("decode/ring.cu"),
            include_str!("decode/kernels.cu")
        ),
    )
    .with(decode::CONSTANTS)
    .variants(decode::VARIANTS),
    plain(
        "split_master",
        concat!(include_str!("optim/split_master.cuh"), include_str!("optim/split_master.cu")),
    ),
    plain("head_norm", include_str!("norm/head_norm.cu")).variants(&["MOST=1", "MOST=4", "MOST=16"]),
    plain("linear", include_str!("gemm/linear.cu")),
    plain("low_rank", include_str!("gemm/low_rank.cu")).with(low_rank::CONSTANTS),
    plain("logp", concat!(include_str!("head/scale.cu"), include_str!("head/logp.cu"))).with(logp::CONSTANTS),
    plain("logp_backward", concat!(include_str!("head/scale.cu"), include_str!("head/logp_backward.cu")))
        .with(logp::CONSTANTS),
    plain("multicast", include_str!("gemm/multicast.cu")).variants(multicast::VARIANTS),
    plain("norm", include_str!("norm/norm.cu")).with(norm::CONSTANTS),
    plain("norm_backward", include_str!("norm/backward.cu")).with(norm::CONSTANTS).variants(&[
        "VECTORS=1 TEAMS=8 CENTRED=1 BIAS=1",
        "VECTORS=2 TEAMS=5 CENTRED=0 BIAS=0",
        "VECTORS=4 TEAMS=3 CENTRED=0 BIAS=0",
    ]),
    plain("optim", concat!(include_str!("optim/split_master.cuh"), include_str!("optim/optim.cu")))
        .with(optim::CONSTANTS),
    plain("rotary", include_str!("attention/rotary.cu")).with(attention::rotary::CONSTANTS),
    plain("rows", include_str!("gemm/rows.cu")),
    plain("sample", concat!(include_str!("head/sample_tile.cu"), include_str!("head/sample.cu")))
        .with(sample::CONSTANTS),
    plain("truncate", concat!(include_str!("head/sample_tile.cu"), include_str!("head/truncate.cu")))
        .with(sample::CONSTANTS),
    plain("stream", include_str!("gemm/stream.cu")).with(stream::CONSTANTS).variants(stream::VARIANTS),
    plain("vector", include_str!("elementwise/vector.cu")),
];

/// The full text of a source with these definitions.
fn whole_text(source: &KernelSource, defines: &str) -> String {
    let constants = source.constants.iter().map(|(name, value)| format!("#define {name} {value}\n"));
    let defines = defines.split_whitespace().map(|d| format!("#define {}\n", d.replacen('=', " ", 1)));
    let defines: String = constants.chain(defines).collect();
    format!("{defines}{PRELUDE}\n#line 1 \"{}.cu\"\n{}", source.name, source.text)
}

/// No contraction by the compiler, only explicit `fmaf`: the same bits in every kernel.
const FLAGS: [&str; 3] = ["--std=c++17", "--fmad=false", "-default-device"];

/// NVRTC's name of the architecture; `sm_90a` enables Hopper-specific instructions.
pub fn architecture(capability: (u32, u32)) -> String {
    let own = if capability == (9, 0) { "a" } else { "" };
    format!("sm_{}{}{own}", capability.0, capability.1)
}

/// NVRTC's version.
pub fn version() -> Result<(u32, u32)> {
    libraries::open(Library::Compiler)?;
    let (mut major, mut minor) = (0, 0);
    // SAFETY: live variables; the library is there.
    nvrtc_check(unsafe { nvrtc::nvrtcVersion(&mut major, &mut minor) }, "asking NVRTC's version")?;
    Ok((major as u32, minor as u32))
}

fn nvrtc_check(result: nvrtcResult, what: &str) -> Result<()> {
    match result {
        nvrtcResult::NVRTC_SUCCESS => Ok(()),
        _ => Err(Error::device(format!("{what} failed: {result:?}"))),
    }
}

/// Compiles a source with definitions for an architecture, without cache. Needs no GPU.
pub fn compile(source: &KernelSource, defines: &str, architecture: &str) -> Result<Vec<u8>> {
    libraries::open(Library::Compiler)?;
    let name = source.name;
    let text = CString::new(whole_text(source, defines))
        .map_err(|_| Error::device(format!("{name}.cu holds a zero byte")))?;
    let mut flags: Vec<CString> = FLAGS.iter().filter_map(|f| CString::new(*f).ok()).collect();
    flags.extend(CString::new(format!("--gpu-architecture={architecture}")).ok());
    let mut program: nvrtcProgram = std::ptr::null_mut();
    // SAFETY: strings and variables live over the calls; the program is destroyed below.
    unsafe {
        let name = CString::new(format!("{name}.cu")).unwrap_or_default();
        let (none, names) = (std::ptr::null(), std::ptr::null());
        let made = nvrtc::nvrtcCreateProgram(&mut program, text.as_ptr(), name.as_ptr(), 0, none, names);
        nvrtc_check(made, "making a program")?;
    }
    // SAFETY: as above.
    let code = unsafe { compile_program(program, name, architecture, &flags) };
    // SAFETY: created above, and not used afterwards.
    unsafe { nvrtc::nvrtcDestroyProgram(&mut program) };
    code
}

/// # Safety
/// The program is live.
unsafe fn compile_program(
    program: nvrtcProgram,
    name: &str,
    architecture: &str,
    flags: &[CString],
) -> Result<Vec<u8>> {
    let flags: Vec<_> = flags.iter().map(|f| f.as_ptr()).collect();
    // SAFETY: passed on to the caller; buffers have the sizes NVRTC asks for.
    unsafe {
        let done = nvrtc::nvrtcCompileProgram(program, flags.len() as i32, flags.as_ptr());
        if done != nvrtcResult::NVRTC_SUCCESS {
            let mut size = 0;
            nvrtc_check(nvrtc::nvrtcGetProgramLogSize(program, &mut size), "reading the compiler's log")?;
            let mut log = vec![0u8; size.max(1)];
            nvrtc_check(
                nvrtc::nvrtcGetProgramLog(program, log.as_mut_ptr().cast()),
                "reading the compiler's log",
            )?;
            let log = String::from_utf8_lossy(&log);
            let what = format!(
                "{name}.cu does not compile for {architecture}: {}",
                log.trim_end_matches(['\0', '\n'])
            );
            return Err(Error::device(what));
        }
        let mut size = 0;
        nvrtc_check(nvrtc::nvrtcGetCUBINSize(program, &mut size), "reading machine code")?;
        let mut code = vec![0u8; size];
        nvrtc_check(nvrtc::nvrtcGetCUBIN(program, code.as_mut_ptr().cast()), "reading machine code")?;
        Ok(code)
    }
}

/// The cache file of a source's machine code; its name hashes source, architecture, compiler and flags.
fn cached_at(source: &KernelSource, defines: &str, architecture: &str) -> Option<PathBuf> {
    let home = std::env::var_os("XDG_CACHE_HOME")
        .map(PathBuf::from)
        .or_else(|| Some(PathBuf::from(std::env::var_os("HOME")?).join(".cache")))?;
    let version = version().ok()?;
    let key = format!("{}\0{architecture}\0{version:?}\0{FLAGS:?}", whole_text(source, defines));
    let name = source.name;
    Some(
        home.join("ferrl")
            .join("kernels")
            .join(format!("{name}-{architecture}-{:032x}.cubin", fnv(key.as_bytes()))),
    )
}

/// FNV-1a with 128 bits.
fn fnv(bytes: &[u8]) -> u128 {
    bytes.iter().fold(0x6c62_272e_07bb_0142_62b8_2175_6295_c58d, |h: u128, &b| {
        (h ^ u128::from(b)).wrapping_mul(0x0000_0000_0100_0000_0000_0000_0000_013b)
    })
}

/// Number for unique temporary file names.
static TEMP_FILES: AtomicU64 = AtomicU64::new(0);

/// Whether a source's machine code is cached.
pub(super) fn is_cached(source: &KernelSource, defines: &str, architecture: &str) -> bool {
    cached_at(source, defines, architecture).is_some_and(|path| path.exists())
}

/// Machine code, from the cache if possible. An unusable cache only costs time.
pub(super) fn machine_code(source: &KernelSource, defines: &str, architecture: &str) -> Result<Vec<u8>> {
    let path = cached_at(source, defines, architecture);
    if let Some(code) =
        path.as_ref().and_then(|p| std::fs::read(p).ok()).filter(|c| c.starts_with(b"\x7fELF"))
    {
        return Ok(code);
    }
    let code = compile(source, defines, architecture)?;
    if let Some(path) = path {
        let number = TEMP_FILES.fetch_add(1, Ordering::Relaxed);
        let part = path.with_extension(format!("part{}-{number}", std::process::id()));
        let folder = path.parent().map_or(Ok(()), std::fs::create_dir_all);
        if folder
            .and_then(|()| std::fs::write(&part, &code))
            .and_then(|()| std::fs::rename(&part, &path))
            .is_err()
        {
            let _ = std::fs::remove_file(&part);
        }
    }
    Ok(code)
}

/// Kernels by name, loaded on first use.
pub(super) struct KernelModules {
    architecture: String,
    loaded: Mutex<Loaded>,
    context: Arc<CudaContext>,
}

#[derive(Default)]
struct Loaded {
    /// By source, then by definitions.
    modules: HashMap<&'static str, HashMap<String, Module>>,
    ahead: Ahead,
}

// SAFETY: the driver's handles may be used from any thread.
unsafe impl Send for Loaded {}

/// A loaded module, and those of its kernels that were used.
struct Module {
    handle: CUmodule,
    kernels: HashMap<String, Kernel>,
}

/// A kernel, and the dynamic shared memory configured for it so far (it may have static shared memory as well).
#[derive(Clone, Copy)]
struct Kernel {
    function: CUfunction,
    shared: usize,
}

impl KernelModules {
    pub(super) fn new(capability: (u32, u32), context: Arc<CudaContext>) -> Self {
        KernelModules { architecture: architecture(capability), loaded: Mutex::default(), context }
    }

    /// The kernel of this name, configured for `shared` bytes of dynamic shared memory. The context must be current.
    pub(super) fn kernel(
        &self,
        module: &'static str,
        defines: &str,
        name: &str,
        shared: usize,
    ) -> Result<CUfunction> {
        // The fast path allocates nothing: this runs hundreds of times per decoded token.
        let mut loaded = lock(&self.loaded);
        let Loaded { modules, ahead } = &mut *loaded;
        let variants = modules.entry(module).or_default();
        if !variants.contains_key(defines) {
            let handle = self.load(module, defines, ahead)?;
            variants.insert(defines.to_string(), Module { handle, kernels: HashMap::new() });
        }
        let Some(variant) = variants.get_mut(defines) else { unreachable!("inserted above") };
        if !variant.kernels.contains_key(name) {
            let mut function = std::ptr::null_mut();
            let text = CString::new(name).unwrap_or_default();
            // SAFETY: a loaded module and a live string.
            let done = unsafe { driver::cuModuleGetFunction(&mut function, variant.handle, text.as_ptr()) };
            check(done, || format!("finding kernel {name} of {module}.cu"))?;
            variant.kernels.insert(name.to_string(), Kernel { function, shared: 16 << 10 });
        }
        let Some(kernel) = variant.kernels.get_mut(name) else { unreachable!("inserted above") };
        if shared > kernel.shared {
            let what = CUfunction_attribute::CU_FUNC_ATTRIBUTE_MAX_DYNAMIC_SHARED_SIZE_BYTES;
            // SAFETY: a loaded kernel.
            let done = unsafe { driver::cuFuncSetAttribute(kernel.function, what, shared as i32) };
            check(done, || format!("giving kernel {name} {shared} bytes of shared memory"))?;
            kernel.shared = shared;
        }
        Ok(kernel.function)
    }

    /// Call before requesting several variants one after the other.
    pub(super) fn compile_together(&self, variants: &[(&'static str, String)]) {
        ahead::compile_together(&self.architecture, variants);
    }

    fn load(&self, name: &'static str, defines: &str, ahead: &mut Ahead) -> Result<CUmodule> {
        let Some(source) = SOURCES.iter().find(|s| s.name == name) else {
            unreachable!("a module that is in SOURCES: {name}")
        };
        if !is_cached(source, defines, &self.architecture) {
            ahead.begin(&self.architecture, name);
        }
        let begun = if defines.is_empty() { ahead.take(name) } else { None };
        let code = begun.unwrap_or_else(|| machine_code(source, defines, &self.architecture))?;
        let mut module = std::ptr::null_mut();
        // SAFETY: a whole image, which the driver copies.
        let mut load = |code: &[u8]| unsafe { driver::cuModuleLoadData(&mut module, code.as_ptr().cast()) };
        if load(&code) != CUresult::CUDA_SUCCESS {
            // The cached file may be damaged.
            let fresh = compile(source, defines, &self.architecture)?;
            check(load(&fresh), || format!("loading {name}.cu"))?;
        }
        Ok(module)
    }
}

impl Drop for KernelModules {
    fn drop(&mut self) {
        let loaded = self.loaded.get_mut().unwrap_or_else(|e| e.into_inner());
        if self.context.bind().is_ok() {
            for module in loaded.modules.values().flat_map(HashMap::values) {
                // SAFETY: loaded by `load`; none of its kernels is running.
                unsafe { driver::cuModuleUnload(module.handle) };
            }
        }
    }
}

//! Configuration of the system's allocator.

/// Allocations from this size on are separate mappings, returned to the system when freed.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const LARGE: std::ffi::c_int = 1 << 20;

/// Fixes glibc's mmap threshold, which it otherwise raises to up to 32 MiB as large blocks are freed. Messages between ranks
/// have a few MiB each; on the heap, each slightly longer one failed to fit the hole left by the last, which wasted 50 to
/// 70 MiB. No-op with other libraries.
pub(crate) fn return_large_blocks() {
    #[cfg(all(target_os = "linux", target_env = "gnu"))]
    {
        use std::ffi::c_int;
        unsafe extern "C" {
            fn mallopt(param: c_int, value: c_int) -> c_int;
        }
        const M_TRIM_THRESHOLD: c_int = -1;
        const M_MMAP_THRESHOLD: c_int = -3;
        for param in [M_MMAP_THRESHOLD, M_TRIM_THRESHOLD] {
            // SAFETY: glibc's own function, which takes its lock; any value is allowed.
            unsafe { mallopt(param, LARGE) };
        }
    }
}

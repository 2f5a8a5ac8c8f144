//! How the system's allocator keeps what is freed.

/// Bytes from which an allocation is a mapping of its own, given back to the system when it is freed.
#[cfg(all(target_os = "linux", target_env = "gnu"))]
const LARGE: std::ffi::c_int = 1 << 20;

/// Fixes what glibc otherwise raises up to 32 MiB with every large block that is freed. Messages between ranks have a few MiB each:
/// from the heap, where the next is a little longer than the hole of the last, they left 50 to 70 MiB unused. Elsewhere
/// it does nothing.
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

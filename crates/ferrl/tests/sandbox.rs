//! The sandbox under attack, and the grader that stands on it: nothing gets out, nothing undeserved is rewarded, and honest
//! programs run.
//!
//! Every attack is shown to work where nothing stops it, then to fail against the whole sandbox, and against each layer that
//! is said to stop it alone. A layer that this host lacks is printed as `not run`. This executable is the launcher too,
//! which is why it has a main of its own.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[path = "sandbox/attacks.rs"]
mod attacks;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[path = "sandbox/checks.rs"]
mod checks;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[path = "sandbox/exploits.rs"]
mod exploits;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[path = "sandbox/honest.rs"]
mod honest;
#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
#[path = "sandbox/world.rs"]
mod world;

#[cfg(all(target_os = "linux", target_arch = "x86_64"))]
fn main() {
    ferrl::sandbox::init();
    match std::env::args().nth(1).as_deref() {
        Some(checks::VICTIM) => checks::sleep_in_a_sandbox(),
        _ => checks::all(),
    }
}

#[cfg(not(all(target_os = "linux", target_arch = "x86_64")))]
fn main() {
    println!("not run: the attacks are system calls of Linux on x86-64");
}

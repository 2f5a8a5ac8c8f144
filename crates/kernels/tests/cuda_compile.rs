//! Every kernel compiles for every architecture that is served, with NVRTC alone and without a card.

use ferrl_kernels::cuda::compile::{SOURCES, compile, version};

/// Ampere, Ada, Hopper with its own instructions, Blackwell.
const ARCHITECTURES: [&str; 4] = ["sm_80", "sm_89", "sm_90a", "sm_100"];

#[test]
fn every_kernel_compiles_for_every_architecture() {
    let version = match version() {
        Ok(version) => version,
        Err(e) => {
            eprintln!("skipped: {e}");
            return;
        }
    };
    let mut failed = Vec::new();
    for architecture in ARCHITECTURES {
        if architecture == "sm_100" && version < (12, 8) {
            eprintln!("skipped: NVRTC {}.{} does not know {architecture}", version.0, version.1);
            continue;
        }
        for source in SOURCES {
            assert!(!source.variants.is_empty());
            for defines in source.variants {
                match compile(source, defines, architecture) {
                    Ok(code) => assert!(code.starts_with(b"\x7fELF"), "{} {defines}", source.name),
                    Err(e) => failed.push(e.to_string()),
                }
            }
        }
    }
    assert!(failed.is_empty(), "{}", failed.join("\n"));
}

//! Puts the recipes of the repository into the program: `ferrl recipe list`, `ferrl recipe new`.

use std::path::Path;

fn main() {
    // Where this build is: two checkouts may share a target folder, and with it this program.
    let here = std::env::var("CARGO_MANIFEST_DIR").expect("cargo sets it");
    let folder = Path::new(&here).join("../../recipes");
    println!("cargo::rerun-if-changed={}", folder.display());
    let mut names: Vec<String> = std::fs::read_dir(&folder)
        .expect("recipes/ is beside crates/")
        .filter_map(|entry| {
            entry.ok()?.file_name().into_string().ok()?.strip_suffix(".toml").map(String::from)
        })
        .collect();
    names.sort();
    let entry = |name: &String| {
        let path = folder.join(format!("{name}.toml"));
        println!("cargo::rerun-if-changed={}", path.display());
        format!("({name:?}, include_str!({:?})),\n", path.display().to_string())
    };
    let list: String = names.iter().map(entry).collect();
    let out = std::env::var("OUT_DIR").expect("cargo sets it");
    std::fs::write(Path::new(&out).join("recipes.rs"), format!("&[\n{list}]\n"))
        .expect("OUT_DIR can be written");
}

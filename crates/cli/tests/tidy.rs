//! House rules that a compiler does not check.
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl::algo::ALGORITHMS;
use ferrl::recipe::keys;
use ferrl_engine::model::FAMILIES;
use ferrl_kernels::BACKENDS;
use std::collections::HashMap;
use std::path::{Path, PathBuf};

fn root() -> PathBuf {
    Path::new(env!("CARGO_MANIFEST_DIR")).ancestors().nth(2).unwrap().to_path_buf()
}

fn files(dir: &Path, out: &mut Vec<PathBuf>) {
    for entry in std::fs::read_dir(dir).unwrap().map(|e| e.unwrap().path()) {
        let name = entry.file_name().unwrap().to_string_lossy().into_owned();
        if entry.is_dir() && name != "target" && !name.starts_with('.') {
            files(&entry, out);
        } else if entry.is_file() {
            out.push(entry);
        }
    }
}

/// Files below the root with one of these endings, as paths relative to it.
fn sources(endings: &[&str]) -> Vec<(String, String)> {
    let mut all = Vec::new();
    files(&root(), &mut all);
    all.into_iter()
        .filter(|p| p.extension().is_some_and(|e| endings.iter().any(|w| e == *w)))
        .map(|p| {
            let text = std::fs::read_to_string(&p).unwrap();
            (p.strip_prefix(root()).unwrap().to_string_lossy().into_owned(), text)
        })
        .collect()
}

#[test]
fn no_source_file_is_longer_than_800_lines() {
    let all = sources(&["rs", "cu", "py"]);
    assert!(all.len() > 50);
    for (path, text) in all {
        assert!(text.lines().count() <= 800, "{path} has {} lines", text.lines().count());
    }
}

#[test]
fn paths_in_the_documents_exist() {
    let mut checked = 0;
    for document in ["README.md", "ARCHITECTURE.md", "CONTRIBUTING.md"] {
        let text = std::fs::read_to_string(root().join(document)).unwrap();
        // Inline code that looks like a path of this repository; patterns in <angle brackets> are not.
        for word in text.split('`').skip(1).step_by(2).filter(|w| !w.contains(['<', ' ', '\n', '*'])) {
            let starts = ["crates/", "bench/", "docs/", "tools/", "recipes/", ".ci/"];
            if starts.iter().any(|s| word.starts_with(s)) {
                assert!(root().join(word).exists(), "{document} names {word}, which does not exist");
                checked += 1;
            }
        }
    }
    assert!(checked >= 20, "only {checked} paths were found");
}

#[test]
fn members_of_open_sets_are_named_at_home_only() {
    for (path, text) in
        sources(&["rs"]).iter().filter(|(p, _)| p.starts_with("crates/") && p.contains("/src/"))
    {
        let code: Vec<&str> = text
            .split("#[cfg(test)]")
            .next()
            .unwrap()
            .lines()
            .filter(|l| !l.trim_start().starts_with("//"))
            .collect();
        let names = |word: &str| {
            let quoted = format!("\"{word}\"");
            let module = format!("{word}::");
            code.iter().any(|l| {
                l.contains(&quoted)
                    || l.split(&module).next().is_some_and(|b| {
                        l.contains(&module) && !b.ends_with(|c: char| c.is_alphanumeric() || c == '_')
                    })
            })
        };
        for family in FAMILIES {
            let own = format!("crates/engine/src/model/{}.rs", family.name());
            let home = path == &own || path == "crates/engine/src/model/mod.rs";
            // A rope scheme shares its name with a family's generation, not with the family.
            assert!(home || !names(family.name()), "{path} names the family {}", family.name());
        }
        for entry in ALGORITHMS {
            // LaTeX has a font by the name of an algorithm.
            let latex = path.starts_with("crates/ferrl/src/verify/math/");
            let home = path.starts_with("crates/ferrl/src/algo/") || latex;
            assert!(home || !names(entry.name), "{path} names the algorithm {}", entry.name);
        }
        for device in BACKENDS {
            let home = path.starts_with(&format!("crates/kernels/src/{}/", device.name))
                || path == "crates/kernels/src/lib.rs";
            assert!(home || !names(device.name), "{path} names the backend {}", device.name);
        }
    }
}

#[test]
fn settings_of_algorithms_are_named_at_home_only() {
    // The keys of other libraries are mapped to them in one table.
    let home = |path: &str| {
        path.starts_with("crates/ferrl/src/algo/") || path.starts_with("crates/ferrl/src/recipe/elsewhere")
    };
    for (path, text) in sources(&["rs"]) {
        if !path.starts_with("crates/") || !path.contains("/src/") || path.contains("tests") || home(&path) {
            continue;
        }
        let code = text.split("#[cfg(test)]").next().unwrap();
        for line in code.lines().filter(|l| !l.trim_start().starts_with("//")) {
            let named = line
                .split("\"algo.")
                .skip(1)
                .find(|rest| rest.starts_with(char::is_alphabetic) && !rest.starts_with("name"));
            assert!(named.is_none(), "{path} names a setting of an algorithm: {}", line.trim());
        }
    }
}

/// Code of the crates outside tests: paths and lines.
fn code_lines() -> Vec<(String, Vec<String>)> {
    let code = |text: &str| -> Vec<String> {
        text.split("#[cfg(test)]\nmod ").next().unwrap().lines().map(str::to_string).collect()
    };
    let own = |path: &str| path.starts_with("crates/") && path.contains("/src/") && !path.contains("tests");
    sources(&["rs"]).into_iter().filter(|(p, _)| own(p)).map(|(p, text)| (p, code(&text))).collect()
}

#[test]
fn a_type_name_has_one_meaning() {
    // By convention: of a command, of a registry, of one of its members, of a module's functions.
    let repeated = ["Args", "Entry", "Options", "Result"];
    let mut seen: HashMap<String, String> = HashMap::new();
    for (path, lines) in code_lines() {
        for line in &lines {
            let item = line.strip_prefix("pub ").or(line.strip_prefix("pub(crate) ")).unwrap_or(line);
            let item = item.strip_prefix("pub(super) ").unwrap_or(item);
            let mut words =
                item.split(|c: char| !c.is_alphanumeric() && c != '_').skip_while(|w| *w == "unsafe");
            let (Some("struct" | "enum" | "trait" | "type"), Some(name)) = (words.next(), words.next())
            else {
                continue;
            };
            if let Some(other) = seen.insert(name.into(), path.clone()) {
                assert!(repeated.contains(&name), "{path} and {other} both define a type `{name}`");
            }
        }
    }
    assert!(seen.len() > 1000, "only {} types were found", seen.len());
}

#[test]
fn functions_fit_a_screen() {
    // Loops of SIMD and CUDA kernels are one function where a call would cost time.
    let kernels = |path: &str| path.starts_with("crates/kernels/src/c");
    for (path, lines) in code_lines().into_iter().filter(|(path, _)| !kernels(path)) {
        for (start, line) in lines.iter().enumerate() {
            let indent = &line[..line.len() - line.trim_start().len()];
            let is_function = format!(" {}", line.trim_start()).contains(" fn ") && !line.contains("//");
            if !is_function || line.ends_with(';') {
                continue;
            }
            let end = format!("{indent}}}");
            let length = lines[start..].iter().position(|l| *l == end).map_or(0, |n| n + 1);
            assert!(length <= 60, "{path}:{}: a function of {length} lines", start + 1);
        }
    }
}

#[test]
fn messages_of_kernels_name_no_recipe_keys() {
    // The pipeline words the fix: kernels do not know what a user wrote.
    let below = |path: &str| path.starts_with("crates/kernels/");
    let keys: Vec<&str> = keys().iter().map(|k| k.path.as_str()).filter(|k| k.contains('.')).collect();
    assert!(keys.len() > 100, "only {} keys", keys.len());
    for (path, lines) in code_lines().into_iter().filter(|(path, _)| below(path)) {
        for line in lines.iter().filter(|l| !l.trim_start().starts_with("//")) {
            for word in
                line.split('"').skip(1).step_by(2).flat_map(|text| text.split([' ', ',', ';', '(', '=']))
            {
                assert!(!keys.contains(&word), "{path} names {word}: {}", line.trim());
            }
        }
    }
}

/// The packages that a program of the default features is built of: name, licences, native library.
fn packages() -> Vec<(String, String, String)> {
    let target = format!("{}-unknown-linux-gnu", std::env::consts::ARCH);
    let words = ["metadata", "--offline", "--locked", "--format-version", "1", "--filter-platform", &target];
    let out = std::process::Command::new(env!("CARGO")).args(words).current_dir(root()).output().unwrap();
    assert!(out.status.success(), "{}", String::from_utf8_lossy(&out.stderr));
    let metadata: serde_json::Value = serde_json::from_slice(&out.stdout).unwrap();
    let text = |value: &serde_json::Value| value.as_str().unwrap_or_default().to_string();
    let package = |p: &serde_json::Value| (text(&p["name"]), text(&p["license"]), text(&p["links"]));
    metadata["packages"].as_array().unwrap().iter().map(package).collect()
}

/// Every alternative of a licence expression that binds us is permissive, and C is compiled for one package alone.
#[test]
#[cfg(target_os = "linux")]
fn dependencies_are_permissive_and_rust() {
    const FINE: &[&str] = &[
        "0BSD", "Apache-2.0", "BSD-2-Clause", "BSD-3-Clause", "BSL-1.0", "CC0-1.0", "ISC", "MIT",
        "Unicode-3.0", "Zlib",
    ];
    let fine = |one: &str| FINE.contains(&one.trim().trim_matches(['(', ')']));
    let allowed = |licence: &str| {
        let licence = licence.replace('/', " OR ");
        licence.split(" AND ").all(|both| both.split(" OR ").any(fine))
    };
    assert!(
        !allowed("GPL-3.0")
            && !allowed("MIT AND GPL-3.0")
            && !allowed("")
            && allowed("(MIT OR GPL-2.0) AND ISC")
    );
    let packages = packages();
    assert!((100..260).contains(&packages.len()), "{} packages", packages.len());
    for (name, licence, native) in packages {
        assert!(allowed(&licence), "{name}: {licence:?}");
        assert!(["", "rayon-core", "zstd"].contains(&native.as_str()), "{name} links {native}");
    }
}

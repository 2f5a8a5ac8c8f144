//! Every number of a recipe through the real program: no panic, no abort, no hang.

use crate::common::*;
use ferrl::recipe::{KeyKind, keys};

const RECIPE: &str = "reward = \"countdown\"\ndata = { train = \"task:countdown\", max_length = 64 }\n\
    rollout.max_new_tokens = 16\ntrain.steps = 3\ndevice = \"cpu\"\n";

const MODEL: &str = "model.init = { hidden = 64, layers = 1, heads = 2, max_positions = 4096 }\n";

/// Bug: `threads=10000` aborted, `samples=1e12` and `epochs=1e300` hung or overflowed.
#[test]
fn numbers_of_any_size_are_planned_or_refused() {
    let folder = Folder::new("numbers");
    let plain = folder.write("plain.toml", format!("{MODEL}{RECIPE}"));
    let init = folder.write("init.toml", format!("model.init.hidden = 64\n{RECIPE}"));
    let mut tried = Vec::new();
    for key in keys().iter().filter(|k| !k.path.starts_with("stage")) {
        let (open, close) = match &key.kind {
            KeyKind::Whole | KeyKind::Number => ("", ""),
            KeyKind::List(of) if **of == KeyKind::Number => ("[", "]"),
            _ => continue,
        };
        let recipe = if key.path.starts_with("model.init") { &init } else { &plain };
        let path = key.path.replace(".N.", ".0.");
        for value in ["0", "-1", "1e300", "nan", "inf", "9223372036854775807", "1000000000000000000", "1e18"]
        {
            tried.push((recipe.clone(), format!("{path}={open}{value}{close}"), path.clone()));
        }
        if let Some(range) = key.range.filter(|r| !r.below) {
            tried.push((recipe.clone(), format!("{path}={open}{}{close}", range.high), path));
        }
    }
    assert!(tried.len() > 300, "{}", tried.len());
    let half = tried.len() / 2;
    std::thread::scope(|scope| {
        for part in [&tried[..half], &tried[half..]] {
            scope.spawn(move || part.iter().for_each(|(recipe, word, key)| try_one(recipe, word, key)));
        }
    });
}

fn try_one(recipe: &str, word: &str, key: &str) {
    let started = std::time::Instant::now();
    let out = ferrl(&["train", recipe, word, "--dry-run"], "");
    let said = String::from_utf8_lossy(&out.stderr);
    assert!(matches!(out.status.code(), Some(0 | 2 | 5)), "{word}: {:?}\n{said}", out.status);
    assert!(out.status.code() != Some(2) || said.contains(key), "{word} does not name its key:\n{said}");
    assert!(started.elapsed().as_secs() < 60, "{word} took {:?}", started.elapsed());
}

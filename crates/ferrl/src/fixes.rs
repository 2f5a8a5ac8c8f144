//! Fixes that name settings: kernels and engine say what failed and what memory ran short for, the pipeline knows the keys.

use ferrl_engine::{Error, nearest};
use ferrl_kernels::Purpose;

/// Which setting makes memory of a purpose less.
fn less(purpose: Purpose) -> &'static str {
    match purpose {
        Purpose::Weights => "a smaller model, or model.dtype = \"bf16\"",
        Purpose::Gradients => "a smaller model, or frozen tensors (model.frozen)",
        Purpose::Optimizer => "optim.name = \"sgd\", or a smaller model",
        Purpose::Cache => "a lower rollout.cache_mib (--cache-mib), or fewer and shorter answers at once",
        Purpose::Activations | Purpose::Workspace => {
            "a lower train.micro_batch_tokens (--micro-batch), or model.recompute = true"
        }
    }
}

/// The error with a fix in terms of recipes and flags, where it lacks one.
pub fn worded(error: Error) -> Error {
    let fixes: Vec<&str> = error.purposes().iter().map(|&p| less(p)).collect();
    if fixes.is_empty() { error } else { error.fix(fixes.join("; or ")) }
}

/// The error for a name that a registry does not have: `kind` says what it names, `fix` writes the nearest name as it is given.
pub(crate) fn unknown<'a>(
    kind: &str,
    name: &str,
    known: impl IntoIterator<Item = &'a str>,
    fix: impl Fn(&str) -> String,
) -> Error {
    let known: Vec<&str> = known.into_iter().collect();
    let near = nearest(name, known.iter().copied()).unwrap_or(known[0]);
    Error::usage(format!("unknown {kind} {name:?}, expected one of {}", known.join(", "))).fix(fix(near))
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn memory_that_ran_short_names_the_settings() {
        let full = Error::resource("out of memory").short_of([Purpose::Optimizer, Purpose::Cache]);
        let said = worded(full).to_string();
        assert!(
            said.contains("optim.name = \"sgd\"") && said.contains("; or a lower rollout.cache_mib"),
            "{said}"
        );
        assert_eq!(worded(Error::data("no rows").fix("add some")), Error::data("no rows").fix("add some"));
    }
}

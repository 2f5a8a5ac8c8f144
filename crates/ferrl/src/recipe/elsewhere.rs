//! Settings of TRL, transformers, PEFT, verl and OpenRLHF: the key of each here, or what to use instead.

mod names;

use names::{ADVICE, KEYS, NameTable};

/// Ferrl's counterpart of a setting of another library.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) enum Elsewhere {
    /// A key here with the same meaning.
    Key(&'static str),
    /// What to use instead.
    Advice(&'static str),
}

impl Elsewhere {
    /// As the fix of an error.
    pub fn fix(self) -> String {
        match self {
            Elsewhere::Key(key) => format!("did you mean {key}?"),
            Elsewhere::Advice(advice) => advice.into(),
        }
    }
}

/// The counterpart of the listed name that matches most parts of the path.
pub(super) fn find(path: &[String]) -> Option<Elsewhere> {
    let path = if path.len() > 2 && path[0] == "stage" { &path[2..] } else { path };
    let keys = named(KEYS, path).map(|(fit, key)| (fit, Elsewhere::Key(key)));
    let advice = named(ADVICE, path).map(|(fit, advice)| (fit, Elsewhere::Advice(advice)));
    keys.chain(advice).max_by_key(|(fit, _)| *fit).map(|(_, counterpart)| counterpart)
}

/// Entries of a table that match a path, each with the number of parts that its name matches.
fn named(table: NameTable, path: &[String]) -> impl Iterator<Item = (usize, &'static str)> {
    let each = |(here, names): &'static (&'static str, &'static str)| {
        names.split(' ').map(move |name| (*here, name))
    };
    table.iter().flat_map(each).filter_map(|(here, name)| Some((parts(name, path)?, here)))
}

/// Twice the parts of a path that a name fits; less for the beginning of a part, least for a table.
fn parts(name: &str, path: &[String]) -> Option<usize> {
    let last = path.last()?;
    if let Some(table) = name.strip_suffix('.') {
        return (path[0] == table).then_some(0);
    }
    let given: Vec<&str> = name.split('.').collect();
    let (end, before) = given.split_last()?;
    let above = path[..path.len() - 1].iter().map(String::as_str);
    let fits = if name.ends_with('_') { last.starts_with(end) } else { last == end };
    let fits =
        fits && before.len() < path.len() && above.rev().zip(before.iter().rev()).all(|(a, b)| a == *b);
    fits.then_some(2 * given.len() - usize::from(name.ends_with('_')))
}

/// The key here with the meaning of a setting.
pub(super) fn key(path: &[String]) -> Option<&'static str> {
    match find(path) {
        Some(Elsewhere::Key(key)) => Some(key),
        _ => None,
    }
}

/// What to use instead of a setting without a single key here.
pub(super) fn advice(path: &[String]) -> Option<&'static str> {
    match find(path) {
        Some(Elsewhere::Advice(advice)) => Some(advice),
        _ => None,
    }
}

/// What to write instead of a setting as a flag, `--learning_rate 1e-6`.
pub fn flag(name: &str, value: &str) -> String {
    let path: Vec<String> = name.replace('-', "_").split('.').map(String::from).collect();
    let known = super::keys::find(&path).map(|key| key.path.as_str());
    let same = || super::keys::named(path.last().filter(|_| path.len() == 1)?);
    match (find(&path), known) {
        (_, Some(key)) | (Some(Elsewhere::Key(key)), _) => {
            format!("a setting is written key=value, without dashes: {key}={value}")
        }
        (Some(Elsewhere::Advice(advice)), _) => advice.to_string(),
        (None, None) => match same() {
            Some(key) => format!("a setting is written key=value, without dashes: {key}={value}"),
            None => {
                "a setting is written key=value, such as optim.lr=1e-6; `ferrl recipe` lists all keys".into()
            }
        },
    }
}

/// The manual's page: every key and every advice with the settings of other libraries that it replaces.
pub fn names_markdown() -> String {
    let whole = |name: &str| match name.ends_with(['_', '.']) {
        true => format!("`{name}*`"),
        false => format!("`{name}`"),
    };
    let row = |here: String, names: &str| {
        format!("| {} | {here} |\n", names.split(' ').map(whole).collect::<Vec<_>>().join(", "))
    };
    let keys: String = KEYS.iter().map(|(key, names)| row(format!("`{key}`"), names)).collect();
    let advice: String =
        ADVICE.iter().map(|(advice, names)| row(advice.replace('|', "\\|"), names)).collect();
    format!(
        "# Settings of TRL, transformers, PEFT, verl and OpenRLHF\n\n\
         TRL's trainers are algorithms in Ferrl (`algo.name`; [all of them](algorithms.md)), and a config is a [recipe](recipes.md). The \
         columns of a data set [keep their names](data.md), and reward functions have TRL's signature ([rewards](rewards.md)). A key of \
         these libraries in a recipe is an error that names Ferrl's key. Dots separate tables; a name stands for every key that ends \
         so, the longest first: `actor_rollout_ref.actor.optim.lr` is `lr`, that of `critic` has a line of its own.\n\n\
         RL2's options are accepted as they are: [Coming from TRL, verl or RL2](coming-from.md).\n\n\
         ## The same setting\n\n| theirs | Ferrl |\n|---|---|\n{keys}\n\
         ## Something else instead\n\n| theirs | Ferrl |\n|---|---|\n{advice}"
    )
}

#[cfg(test)]
mod tests {
    use super::super::keys;
    use super::*;
    use crate::algo::ALGORITHMS;

    fn path(text: &str) -> Vec<String> {
        text.split('.').map(String::from).collect()
    }

    #[test]
    fn every_key_of_the_tables_exists() {
        // Columns have names of their own.
        let exists = |key: &str| keys::find(&path(key)).is_some() || key.starts_with("data.columns.");
        for (key, names) in KEYS {
            assert!(exists(key), "{names:?}: {key}");
        }
        let own: Vec<String> =
            ALGORITHMS.iter().flat_map(|a| keys::algorithm_keys(a)).map(|k| k.path).collect();
        let tables =
            ["algo.", "data.", "rollout.", "optim.", "train.", "eval.", "checkpoint.", "adapter.", "model."];
        let more = ["reference.", "parallel.", "env.", "reward.", "critic."];
        let mut checked = 0;
        for (advice, names) in ADVICE {
            for word in advice.split(|c: char| !(c.is_ascii_alphanumeric() || "._".contains(c))) {
                let word = word.trim_end_matches('.');
                if tables.iter().chain(&more).any(|t| word.starts_with(t)) {
                    let there = exists(word) || word == "algo.name" || own.iter().any(|k| k == word);
                    assert!(there, "{names:?}: {advice}: there is no {word}");
                    checked += 1;
                }
            }
        }
        assert!(checked > 60, "{checked}");
    }

    #[test]
    fn a_name_is_listed_once_and_is_no_key_here() {
        let mut seen = std::collections::BTreeSet::new();
        for name in KEYS.iter().chain(ADVICE).flat_map(|(_, names)| names.split(' ')) {
            assert!(seen.insert(name), "{name} twice");
            assert!(keys::find(&path(name)).is_none(), "{name} is a key here");
        }
    }

    #[test]
    fn the_longest_name_answers() {
        assert_eq!(find(&path("actor_rollout_ref.actor.optim.lr")), Some(Elsewhere::Key("optim.lr")));
        assert_eq!(find(&path("critic.optim.lr")), Some(Elsewhere::Key("critic.lr")));
        assert_eq!(find(&path("actor_rollout_ref.rollout.n")), Some(Elsewhere::Key("rollout.samples")));
        assert_eq!(
            find(&path("actor_rollout_ref.rollout.val_kwargs.n")),
            Some(Elsewhere::Key("eval.samples"))
        );
        assert_eq!(find(&path("stage.0.val_kwargs.n")), Some(Elsewhere::Key("eval.samples")));
        assert_eq!(key(&path("ds.lora.rank")), Some("adapter.r"));
        assert!(advice(&path("lora.task_type")).unwrap().contains("[adapter]"));
        assert!(advice(&path("train.per_device_train_batch_size")).unwrap().contains("rollout.prompts"));
        assert!(advice(&path("load_in_4bit")).unwrap().contains("nf4"));
        assert!(
            advice(&path("actor_rollout_ref.rollout.agent.num_workers")).unwrap().contains("no such setting")
        );
        assert_eq!(find(&path("optim.gamma_ray")), None);
    }
}

//! A small model, and searches with it.

use ferrl::episode::Environments;
use ferrl::reward::Rewards;
use ferrl::rollout::Actor;
use ferrl::search::{self, Driver, LogpScorer, Oracle, Record, Scorer, SearchBudget};
use ferrl::source::Prompt;
use ferrl::verify::Sample;
use ferrl_engine::Result;
use ferrl_engine::checkpoint::{InitOptions, ModelDir, SaveOptions, StorageFormat, init_model};
use ferrl_engine::generate::{CacheOptions, Sampler, SamplingParams, Stops, Usage};
use ferrl_engine::model::{FAMILIES, Model, Options};
use ferrl_engine::tokenizer::{Tokenizer, train_bpe, train_chars};
use ferrl_kernels::Ranks;
use serde_json::{Map, Value};
use std::sync::Arc;

/// A random model over `a`, `b`, a line's end and an end token.
pub struct World {
    _dir: tempfile::TempDir,
    pub model: Model,
    pub tokenizer: Arc<Tokenizer>,
    pub stops: Stops,
}

impl World {
    pub fn new(threads: usize) -> Self {
        World::with_chars(threads, "ab\n")
    }

    /// The same over other characters.
    pub fn with_chars(threads: usize, chars: &str) -> Self {
        World::of_family(threads, chars, FAMILIES[0].name(), 256)
    }

    /// The same over bytes: a character may take several tokens.
    pub fn of_bytes(threads: usize) -> Self {
        let tokenizer = train_bpe(std::iter::empty(), 258, &["<pad>", "<eos>"].map(String::from)).unwrap();
        World::of_tokenizer(threads, tokenizer, FAMILIES[0].name(), 256)
    }

    /// The same of another family, with this many positions.
    pub fn of_family(threads: usize, chars: &str, family: &str, positions: usize) -> Self {
        let specials = ["<pad>", "<eos>"].map(String::from);
        let tokenizer = train_chars([chars.to_string()].into_iter(), &specials).unwrap();
        World::of_tokenizer(threads, tokenizer, family, positions)
    }

    fn of_tokenizer(threads: usize, tokenizer: Tokenizer, family: &str, positions: usize) -> Self {
        let dir = tempfile::tempdir().unwrap();
        let mut options = InitOptions::new(family);
        (options.vocab, options.hidden, options.layers) = (tokenizer.vocab_size(), 32, 2);
        (options.heads, options.ffn) = (Some(2), Some(48));
        options.kv_heads = (family == FAMILIES[0].name()).then_some(1);
        (options.max_positions, options.seed, options.tied) = (positions, 3, Some(true));
        (options.eos, options.pad, options.std) = (tokenizer.eos().first().copied(), tokenizer.pad(), 0.3);
        let path = dir.path().join("model");
        init_model(&path, &options, &SaveOptions { dtype: StorageFormat::F32, ..Default::default() })
            .unwrap();
        tokenizer.save(&path).unwrap();
        let backend = ferrl_kernels::open("cpu", Some(threads)).unwrap();
        let model = Model::load(backend, &ModelDir::open(&path).unwrap(), Options::default()).unwrap();
        let stops = Stops::of_dir(&path, &tokenizer);
        World { _dir: dir, model, tokenizer: Arc::new(tokenizer), stops }
    }

    /// The same, but only lengths end a completion.
    pub fn endless(mut self) -> Self {
        self.stops = Stops::default();
        self
    }

    /// The same, with strings that end a completion.
    pub fn stopping(mut self, strings: &[&str]) -> Self {
        let strings: Vec<String> = strings.iter().map(|s| s.to_string()).collect();
        self.stops = Stops::default().with_strings(&strings, false);
        self
    }

    pub fn prompt(&self, index: u64, text: &str) -> Prompt {
        Prompt {
            index,
            ids: self.tokenizer.encode_text(text).unwrap(),
            text: text.into(),
            ..Default::default()
        }
    }

    pub fn prompts(&self, n: u64) -> Vec<Prompt> {
        (0..n).map(|i| self.prompt(i, &"abba".repeat(4 + i as usize % 3))).collect()
    }
}

/// Right where the completion has more `a` than `b`.
pub fn right(text: &str) -> f64 {
    let count = |c| text.chars().filter(|&x| x == c).count();
    f64::from(u8::from(count('a') > count('b')))
}

/// How to search.
#[derive(Clone)]
pub struct How {
    pub strategy: &'static str,
    pub options: Value,
    pub seed: u64,
    pub max_new_tokens: usize,
    pub budget: Option<u64>,
    pub at_once: usize,
    pub max_sequences: usize,
    pub logp: bool,
}

impl How {
    pub fn new(strategy: &'static str, options: Value) -> Self {
        How {
            strategy,
            options,
            seed: 5,
            max_new_tokens: 12,
            budget: None,
            at_once: 4,
            max_sequences: 256,
            logp: false,
        }
    }
}

/// Searches, and says what the sampler did.
pub fn run(world: &World, prompts: &[Prompt], how: &How) -> Result<(Vec<Record>, Usage)> {
    let rewards = Rewards::of(|s: &Sample<'_>| right(s.completion));
    run_in(world, (&Environments::default(), Some(&rewards)), prompts, how)
}

/// The same in environments, with the rewards that say what is right.
pub fn run_in(
    world: &World,
    (environments, rewards): (&Environments, Option<&Rewards>),
    prompts: &[Prompt],
    how: &How,
) -> Result<(Vec<Record>, Usage)> {
    let cache = CacheOptions { max_sequences: how.max_sequences, ..CacheOptions::default() };
    let mut sampler = Sampler::new(&world.model, cache)?.with_tokenizer(world.tokenizer.clone());
    let mut scorer: Box<dyn Scorer> = if how.logp { Box::new(LogpScorer) } else { Box::new(Oracle) };
    let params = SamplingParams {
        max_new_tokens: how.max_new_tokens,
        stop_ids: world.stops.ids().to_vec(),
        stop_strings: world.stops.strings().to_vec(),
        seed: how.seed,
        ..Default::default()
    };
    let mut driver = Driver {
        actor: Actor {
            generator: &mut sampler,
            policy: &world.model,
            tokenizer: &world.tokenizer,
            stops: &world.stops,
            environments,
            ranks: Ranks::ALONE,
        },
        rewards,
        scorer: &mut *scorer,
        settings: SearchBudget { params, budget: how.budget, at_once: how.at_once },
        entry: search::find(how.strategy)?,
        options: how.options.as_object().cloned().unwrap_or_else(Map::new),
        with_system: Some(&|prompt, system| world.tokenizer.encode_text(&format!("{system}{}", prompt.text))),
    };
    let mut records = Vec::new();
    driver.run(prompts, &mut |r| {
        records.push(r);
        Ok(())
    })?;
    records.sort_by_key(|r| r.index);
    Ok((records, sampler.usage()))
}

pub fn search(world: &World, prompts: &[Prompt], how: &How) -> Vec<Record> {
    run(world, prompts, how).unwrap().0
}

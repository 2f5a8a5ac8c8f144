//! What `ferrl data check` shows: rendered examples, lengths, and every problem.

use std::fmt;

use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::{Error, Result};

use super::hub::Cache;
use super::schema::Wants;
use super::{Counts, Dataset, Encoder, Example, Sample, Source, Tokens};

/// How much is shown.
#[derive(Clone, Copy, Debug)]
pub struct Limits {
    /// Examples shown in full.
    pub examples: usize,
    /// Problems kept; the rest is counted.
    pub problems: usize,
}

impl Default for Limits {
    fn default() -> Self {
        Limits { examples: 3, problems: 20 }
    }
}

/// What was found.
#[derive(Clone, Debug)]
pub struct Report {
    /// Rows read.
    pub rows: usize,
    /// Files read.
    pub files: usize,
    /// The first examples: where they are from and their text, trained tokens between marks.
    pub examples: Vec<(String, String)>,
    /// Length of every sequence, ascending.
    pub lengths: Vec<usize>,
    /// Tokens that are trained.
    pub trained: usize,
    /// Sequences cut and rows dropped.
    pub counts: Counts,
    /// Problems, up to the limit.
    pub problems: Vec<Error>,
    /// Number of problems.
    pub found: usize,
}

/// Marks before and after trained tokens.
pub const MARKS: [char; 2] = ['⟦', '⟧'];

/// Reads and encodes every row of the sources; only a source that cannot be found at all is an error.
pub fn check(
    sources: &[Source],
    cache: &Cache,
    encoder: &Encoder,
    wants: Wants,
    limits: Limits,
) -> Result<Report> {
    let mut report = Report {
        rows: 0,
        files: 0,
        examples: Vec::new(),
        lengths: Vec::new(),
        trained: 0,
        counts: Counts::default(),
        problems: Vec::new(),
        found: 0,
    };
    for source in sources {
        source.files(cache)?;
        let mut bad = Vec::new();
        let read = Dataset::read_with(source, cache, &mut |e| {
            bad.push(e);
            Ok(())
        });
        report.rows += bad.len();
        bad.into_iter().for_each(|e| report.problem(e, limits));
        match read {
            Ok(dataset) => report.encode(&dataset, encoder, wants, limits),
            Err(e) => report.problem(e, limits),
        }
    }
    report.lengths.sort_unstable();
    Ok(report)
}

impl Report {
    fn problem(&mut self, e: Error, limits: Limits) {
        self.found += 1;
        if self.problems.len() < limits.problems {
            self.problems.push(e);
        }
    }

    fn encode(&mut self, dataset: &Dataset, encoder: &Encoder, wants: Wants, limits: Limits) {
        self.files += dataset.files.len();
        self.rows += dataset.len();
        for i in 0..dataset.len() {
            let place = dataset.place(i);
            let row = dataset.row(i);
            match row.and_then(|row| encoder.encode(&row, wants, &place, &mut self.counts)) {
                Ok(Some(sample)) => {
                    for (length, trained) in lengths(&sample.example) {
                        self.lengths.push(length);
                        self.trained += trained;
                    }
                    if self.examples.len() < limits.examples {
                        match show(encoder.tokenizer(), &sample) {
                            Ok(text) => self.examples.push((sample.place, text)),
                            Err(e) => self.problem(e.at(sample.place), limits),
                        }
                    }
                }
                Ok(None) => {}
                Err(e) => self.problem(e, limits),
            }
        }
    }

    /// Whether every row can be used.
    pub fn is_clean(&self) -> bool {
        self.found == 0
    }
}

fn lengths(example: &Example) -> Vec<(usize, usize)> {
    let one = |t: &Tokens| (t.ids.len(), t.mask.iter().filter(|m| **m).count());
    match example {
        Example::Text(t) => vec![one(t)],
        Example::Pair { chosen, rejected } => vec![one(chosen), one(rejected)],
        Example::Labelled { tokens, .. } | Example::Target { tokens, .. } | Example::Steps { tokens, .. } => {
            vec![one(tokens)]
        }
        Example::Prompt { ids } => vec![(ids.len(), 0)],
        Example::Group { completions, .. } => completions.iter().map(one).collect(),
    }
}

/// The text of a sample with trained tokens between marks.
pub fn show(tokenizer: &Tokenizer, sample: &Sample) -> Result<String> {
    let text = |t: &Tokens| marked(tokenizer, t);
    Ok(match &sample.example {
        Example::Text(tokens) => text(tokens)?,
        Example::Pair { chosen, rejected } => {
            format!("chosen:   {}\nrejected: {}", text(chosen)?, text(rejected)?)
        }
        Example::Labelled { tokens, label } => format!("label {label}: {}", text(tokens)?),
        Example::Target { tokens, target } => format!("target {target}: {}", text(tokens)?),
        Example::Prompt { ids } => tokenizer.decode(ids, false)?,
        Example::Group { completions, rewards } => {
            let mut lines = Vec::new();
            for (i, tokens) in completions.iter().enumerate() {
                let named: Vec<String> =
                    rewards.iter().map(|(name, list)| format!("{name} {}", list[i])).collect();
                lines.push(format!("{}: {}", named.join(", "), text(tokens)?));
            }
            lines.join("\n")
        }
        Example::Steps { tokens, labels, .. } => format!("labels {labels:?}: {}", text(tokens)?),
    })
}

fn marked(tokenizer: &Tokenizer, tokens: &Tokens) -> Result<String> {
    let mut text = String::new();
    let mut start = 0;
    for run in tokens.mask.chunk_by(|a, b| a == b) {
        let piece = tokenizer.decode(&tokens.ids[start..start + run.len()], false)?;
        match run[0] {
            true => text.extend([MARKS[0].to_string(), piece, MARKS[1].to_string()]),
            false => text.push_str(&piece),
        }
        start += run.len();
    }
    Ok(text)
}

impl fmt::Display for Report {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        for (place, text) in &self.examples {
            writeln!(f, "{place}\n  {}", text.replace('\n', "\n  "))?;
        }
        if !self.examples.is_empty() {
            writeln!(f, "(trained tokens are between {} and {})\n", MARKS[0], MARKS[1])?;
        }
        let many = |n: usize, one: &str| format!("{n} {one}{}", if n == 1 { "" } else { "s" });
        let (rows, files) = (many(self.rows, "row"), many(self.files, "file"));
        writeln!(f, "{rows} in {files}, {}", many(self.lengths.len(), "sequence"))?;
        let total: usize = self.lengths.iter().sum();
        writeln!(f, "{total} tokens, {} trained", self.trained)?;
        if self.counts.truncated + self.counts.dropped > 0 {
            let Counts { truncated, dropped, .. } = self.counts;
            writeln!(f, "{truncated} sequences cut to max_length, {dropped} rows dropped")?;
        }
        self.histogram(f)?;
        for problem in &self.problems {
            writeln!(f, "problem: {problem}")?;
        }
        match self.found {
            0 => writeln!(f, "no problems"),
            n if n > self.problems.len() => {
                writeln!(f, "{n} problems, the first {} shown", self.problems.len())
            }
            n => writeln!(f, "{n} problem{}", if n == 1 { "" } else { "s" }),
        }
    }
}

impl Report {
    /// Lengths in classes that double.
    fn histogram(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let (Some(&least), Some(&most)) = (self.lengths.first(), self.lengths.last()) else { return Ok(()) };
        let at = |percent: usize| self.lengths[(self.lengths.len() - 1) * percent / 100];
        writeln!(f, "length: least {least}, median {}, 95 % {}, most {most}", at(50), at(95))?;
        let class = |length: usize| length.max(1).ilog2();
        let mut counts = vec![0; class(most) as usize + 1];
        self.lengths.iter().for_each(|&l| counts[class(l) as usize] += 1);
        let tallest = counts.iter().copied().max().unwrap_or(1);
        for (i, &count) in counts.iter().enumerate().skip(class(least) as usize) {
            let bar = "#".repeat((count * 40_usize).div_ceil(tallest));
            writeln!(f, "{:>8}-{:<8} {count:>8} {bar}", 1_usize << i, (2_usize << i) - 1)?;
        }
        Ok(())
    }
}

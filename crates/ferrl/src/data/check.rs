//! The report of `ferrl data check`: rendered examples, lengths, and all problems.

use std::collections::HashMap;
use std::fmt;
use std::ops::Range;

use ferrl_engine::tokenizer::Tokenizer;
use ferrl_engine::{Error, Result};

use super::hub::HubCache;
use super::schema::RowKind;
use super::{DataSource, Dataset, EncodedRow, Encoder, Example, Findings, MaskedTokens, RowCounts, portions};

/// How much is shown.
#[derive(Clone, Copy, Debug)]
pub struct ReportLimits {
    /// Examples shown in full.
    pub examples: usize,
    /// Kinds of problems kept; all are counted.
    pub problems: usize,
}

impl Default for ReportLimits {
    fn default() -> Self {
        ReportLimits { examples: 3, problems: 20 }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub struct RowProblem {
    /// Message and fix, without a place.
    pub text: String,
    pub rows: usize,
    /// Places of the first rows.
    pub places: Vec<String>,
}

/// Maximum number of places of a problem.
const PLACES: usize = 3;

impl fmt::Display for RowProblem {
    fn fmt(&self, f: &mut fmt::Formatter<'_>) -> fmt::Result {
        let more = self.rows.saturating_sub(self.places.len());
        let places = self.places.join(", ");
        match (self.rows, more) {
            (1, _) => write!(f, "{places}: {}", self.text),
            (n, 0) => write!(f, "{n} rows ({places}): {}", self.text),
            (n, more) => write!(f, "{n} rows ({places} and {more} more): {}", self.text),
        }
    }
}

#[derive(Clone, Debug, Default)]
pub struct DataReport {
    pub rows: usize,
    pub files: usize,
    /// The first examples: where they are from and their text, trained tokens between marks.
    pub examples: Vec<(String, String)>,
    /// Length of every sequence, ascending.
    pub lengths: Vec<usize>,
    /// Tokens that are trained.
    pub trained: usize,
    /// Truncated sequences and dropped rows.
    pub counts: RowCounts,
    /// Warnings of a run: name, message and fix.
    pub warnings: Vec<(&'static str, String, String)>,
    /// Problems by kind, up to the limit.
    pub problems: Vec<RowProblem>,
    /// Rows with a problem.
    pub found: usize,
    /// Index of each problem by text.
    kinds: HashMap<String, usize>,
    doubts: Findings,
}

/// Marks before and after trained tokens.
pub const MARKS: [char; 2] = ['⟦', '⟧'];

/// Every dataset of the sources that can be read, and the problems on the way. Only a source that cannot be found at all is
/// an error.
pub fn read(
    sources: &[DataSource],
    cache: &HubCache,
    limits: ReportLimits,
) -> Result<(Vec<Dataset>, DataReport)> {
    let (mut datasets, mut report) = (Vec::new(), DataReport::default());
    for source in sources {
        source.files(cache)?;
        let read = Dataset::read_with(source, cache, &mut |e| {
            report.rows += 1;
            report.problem(&e, limits);
            Ok(())
        });
        match read {
            Ok(dataset) => datasets.push(dataset),
            Err(e) => report.problem(&e, limits),
        }
    }
    Ok((datasets, report))
}

/// Encodes every row of the datasets, with all cores; `more` may refuse a row that is encoded, with its place. Goes on with the report of
/// reading them.
pub fn check(
    datasets: &[Dataset],
    mut report: DataReport,
    encoder: &Encoder,
    kind: RowKind,
    limits: ReportLimits,
    more: &(dyn Fn(&EncodedRow) -> Result<()> + Sync),
) -> Result<DataReport> {
    for dataset in datasets {
        report.files += dataset.files.len();
        let missing = limits.examples.saturating_sub(report.examples.len());
        let work = |range: Range<usize>| {
            let mut part = DataReport::default();
            let shown = missing.saturating_sub(range.start);
            range.for_each(|i| {
                part.row(dataset, i, (encoder, kind), ReportLimits { examples: shown, ..limits }, more)
            });
            Ok(part)
        };
        portions(dataset.len(), &work, &mut |part, _| {
            report.join(part, limits);
            Ok(true)
        })?;
    }
    report.lengths.sort_unstable();
    let rows = format!("{} rows", report.rows);
    let most = encoder.max_length().unwrap_or(usize::MAX);
    let doubts = std::mem::take(&mut report.doubts);
    doubts.say(&rows, most, &mut |name, what, fix| report.warnings.push((name, what, fix)));
    Ok(report)
}

impl DataReport {
    fn row(
        &mut self,
        dataset: &Dataset,
        number: usize,
        (encoder, kind): (&Encoder, RowKind),
        limits: ReportLimits,
        more: &dyn Fn(&EncodedRow) -> Result<()>,
    ) {
        self.rows += 1;
        let (place, mut counts) = (dataset.place(number), RowCounts::default());
        let sample = dataset.row(number).and_then(|row| encoder.encode(&row, kind, &place, &mut counts));
        self.counts.truncated += counts.truncated;
        self.counts.dropped += counts.dropped;
        self.doubts.add(&counts, &place);
        let sample = match sample.and_then(|s| s.map(|s| more(&s).map(|()| s)).transpose()) {
            Ok(Some(sample)) => sample,
            Ok(None) => return,
            Err(e) => return self.problem(&e, limits),
        };
        if let Example::Pair { chosen, rejected } = &sample.example {
            self.doubts.equal.add(chosen.ids == rejected.ids, &place, 0);
        }
        for (length, trained) in lengths(&sample.example) {
            self.lengths.push(length);
            self.trained += trained;
        }
        if self.examples.len() < limits.examples {
            match show(encoder.tokenizer(), &sample) {
                Ok(text) => self.examples.push((sample.place, text)),
                Err(e) => self.problem(&e.at(sample.place), limits),
            }
        }
    }

    /// Counts a problem to those of its kind: the same words but for numbers, wherever it is.
    fn problem(&mut self, e: &Error, limits: ReportLimits) {
        let whole = e.to_string();
        let (place, text) = split_place(&whole);
        self.found += 1;
        let kind: String = text.chars().map(|c| if c.is_ascii_digit() { '#' } else { c }).collect();
        let next = self.problems.len();
        if next >= limits.problems && !self.kinds.contains_key(&kind) {
            return;
        }
        let at = *self.kinds.entry(kind).or_insert(next);
        if at == next {
            self.problems.push(RowProblem { text: text.to_owned(), rows: 0, places: Vec::new() });
        }
        self.problems[at].count(1, vec![place.to_owned()]);
    }

    fn join(&mut self, later: DataReport, limits: ReportLimits) {
        self.rows += later.rows;
        self.trained += later.trained;
        self.found += later.found;
        self.counts.truncated += later.counts.truncated;
        self.counts.dropped += later.counts.dropped;
        self.doubts.join(later.doubts);
        self.lengths.extend(later.lengths);
        let missing = limits.examples.saturating_sub(self.examples.len());
        self.examples.extend(later.examples.into_iter().take(missing));
        let mut kinds: Vec<(String, usize)> = later.kinds.into_iter().collect();
        kinds.sort_by_key(|(_, at)| *at);
        for ((kind, _), problem) in kinds.into_iter().zip(later.problems) {
            match self.kinds.get(&kind) {
                Some(&at) => self.problems[at].count(problem.rows, problem.places),
                None if self.problems.len() < limits.problems => {
                    self.kinds.insert(kind, self.problems.len());
                    self.problems.push(problem);
                }
                None => {}
            }
        }
    }
}

impl RowProblem {
    fn count(&mut self, rows: usize, places: Vec<String>) {
        self.rows += rows;
        let missing = PLACES.saturating_sub(self.places.len());
        self.places.extend(places.into_iter().take(missing));
    }
}

/// A message of ours, `file:row: what`, cut after the row.
fn split_place(whole: &str) -> (&str, &str) {
    let is_row = |i: &usize| {
        whole[..*i]
            .rsplit_once(':')
            .is_some_and(|(_, n)| !n.is_empty() && n.bytes().all(|b| b.is_ascii_digit()))
    };
    let line = whole.lines().next().unwrap_or_default();
    let at = line.match_indices(": ").map(|(i, _)| i).find(is_row).or_else(|| line.find(": "));
    at.map_or(("", whole), |i| (&whole[..i], &whole[i + 2..]))
}

fn lengths(example: &Example) -> Vec<(usize, usize)> {
    let one = |t: &MaskedTokens| (t.ids.len(), t.mask.iter().filter(|m| **m).count());
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
pub fn show(tokenizer: &Tokenizer, sample: &EncodedRow) -> Result<String> {
    let text = |t: &MaskedTokens| marked(tokenizer, t);
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

fn marked(tokenizer: &Tokenizer, tokens: &MaskedTokens) -> Result<String> {
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

impl fmt::Display for DataReport {
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
        self.histogram(f)?;
        for (_, message, fix) in &self.warnings {
            writeln!(f, "warning: {message}\n  fix: {fix}")?;
        }
        for problem in &self.problems {
            writeln!(f, "problem: {problem}")?;
        }
        let shown: usize = self.problems.iter().map(|p| p.rows).sum();
        match self.found {
            0 => writeln!(f, "no problems"),
            n if n > shown => writeln!(f, "{n} problems, {shown} of them shown"),
            n => writeln!(f, "{n} problem{}", if n == 1 { "" } else { "s" }),
        }
    }
}

impl DataReport {
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

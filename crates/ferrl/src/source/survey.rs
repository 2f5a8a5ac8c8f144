//! Check of every row before the first step: unusable rows are errors, suspicious ones are counted for warnings.

use super::item::item;
use super::mixture::{Mixture, MixturePart};
use super::{ExampleCheck, Item, SourceSummary, SurveyProgress, SurveyedExample};
use crate::data::overlap::{self, Meeting, OverlapIndex, RowMarks};
use crate::data::{Finding, Findings, PORTION, RowCounts, portions, strings};
use crate::experience::Sequence;
use ferrl_engine::{Error, Result};
use serde_json::Value;
use std::collections::{HashMap, HashSet};
use std::ops::Range;
use xxhash_rust::xxh3::Xxh3;

/// Limits of a model and its sampler.
#[derive(Clone, Copy, Debug, Default, PartialEq, Eq)]
pub struct ModelRoom {
    /// The model's context length, if it has one.
    pub context: Option<usize>,
    /// Whether positions are learned: longer sequences cannot be computed.
    pub learned: bool,
    /// Tokens that may be sampled after a prompt.
    pub new_tokens: usize,
    /// Completions that a graded prompt needs.
    pub group: usize,
}

/// Totals over all rows.
#[derive(Clone, Debug, Default)]
pub(super) struct Survey {
    rows: usize,
    tokens: usize,
    trained: usize,
    longest: usize,
    doubts: Findings,
    beyond: Finding,
    /// Rows that were left out, as numbers of part and row.
    pub left_out: Vec<(usize, u32)>,
    /// Hashes of rows, to find duplicates, if requested.
    prints: Vec<(u64, String)>,
    /// Those of the known rows that were met.
    met: Vec<u64>,
    /// What of each row is compared with training rows; where they are asked for.
    marks: Vec<RowMarks>,
    /// Training rows that overlap with held-out rows: numbers of part and row, with their places.
    shared: Vec<(usize, u32, Meeting, String)>,
}

/// What happens to training rows that evaluation rows overlap with.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Overlap {
    Warn,
    Drop,
    Error,
    Off,
}

impl Overlap {
    /// As a recipe says.
    pub fn named(name: &str) -> Result<Self> {
        match name {
            "warn" => Ok(Overlap::Warn),
            "drop" => Ok(Overlap::Drop),
            "error" => Ok(Overlap::Error),
            "off" => Ok(Overlap::Off),
            other => Err(Error::usage(format!("{other:?} is not one of warn, drop, error, off"))
                .at("data.overlap")
                .fix("data.overlap = \"warn\"")),
        }
    }
}

/// Rows that are held out, for training rows to be compared with.
#[derive(Default)]
struct HeldOut {
    /// By what they are made of: their order and place.
    prints: HashMap<u64, (usize, String)>,
    marks: Vec<RowMarks>,
    places: Vec<String>,
}

impl HeldOut {
    fn add(&mut self, survey: &Survey) {
        let order = self.places.len();
        let prints = survey.prints.iter().enumerate();
        self.prints.extend(prints.map(|(i, (print, place))| (*print, (order + i, place.clone()))));
        self.places.extend(survey.prints.iter().map(|(_, place)| place.clone()));
        self.marks.extend(survey.marks.iter().cloned());
    }
}

/// What rows are compared with.
#[derive(Clone, Copy)]
enum ComparedRows<'a> {
    /// Nothing: they are what others are compared with.
    Note,
    /// Rows that are held out.
    With(&'a HashMap<u64, (usize, String)>, Option<&'a OverlapIndex>),
}

/// What is done with every row of a survey.
#[derive(Clone, Copy)]
struct SurveyPlan<'a> {
    compare: ComparedRows<'a>,
    look: ExampleCheck<'a>,
    held_out: bool,
}

impl Mixture {
    /// Checks every row, with all cores; returns whether it came to the end.
    fn survey(
        &self,
        plan: SurveyPlan<'_>,
        progress: &mut dyn FnMut(usize) -> bool,
    ) -> Result<(Survey, bool)> {
        let (mut all, mut before) = (Survey::default(), 0);
        for (part, rows) in self.parts.iter().enumerate().filter_map(|(i, p)| Some((i, p.rows()?))) {
            let work = |range: Range<usize>| self.portion(part, &rows.used[range], plan);
            let whole = portions(rows.used.len(), &work, &mut |found, done| {
                all.join(found);
                Ok(progress(before + done))
            })?;
            if !whole {
                return Ok((all, false));
            }
            before += rows.used.len();
        }
        Ok((all, true))
    }

    fn portion(&self, part: usize, numbers: &[u32], plan: SurveyPlan<'_>) -> Result<Survey> {
        let mut found = Survey::default();
        let Some(rows) = self.parts[part].rows() else { return Ok(found) };
        for &number in numbers {
            let (row, place) = rows.read(number)?;
            let mut counts = RowCounts::default();
            let sample = self.encoder.encode(&row, self.row_kind(&row), &place, &mut counts)?;
            found.rows += 1;
            found.doubts.add(&counts, &place);
            match sample {
                Some(sample) => {
                    let prompt = (self.overlap != Overlap::Off).then(|| overlap::said(sample.prompt.clone()));
                    let item = item(sample, self.feed, 0, &self.encoder)?;
                    found.measure(&item, &place, self.room)?;
                    (plan.look)(SurveyedExample { item: &item, place: &place, held_out: plan.held_out })?;
                    let print = print(&item);
                    match plan.compare {
                        ComparedRows::Note => {
                            found.prints.push((print, place));
                            found.marks.extend(prompt.map(|p| RowMarks::of(&asked(p, &row), overlap::WORDS)));
                        }
                        ComparedRows::With(known, index) => {
                            if known.contains_key(&print) {
                                found.met.push(print);
                            }
                            if let Some((index, prompt)) = index.zip(prompt) {
                                let prompts = asked(prompt, &row);
                                let met = index.meets(&prompts, &strings(Value::Object(row)));
                                found.shared.extend(met.map(|m| (part, number, m, place)));
                            }
                        }
                    }
                }
                None => found.left_out.push((part, number)),
            }
        }
        Ok(found)
    }

    fn row_count(&self) -> usize {
        self.parts.iter().filter_map(MixturePart::rows).map(|rows| rows.used.len()).sum()
    }

    /// Rows that `data.overlong = "drop"` leaves out, by part; what is left of each.
    pub(super) fn prune(&mut self) -> Result<()> {
        let known = HashMap::new();
        let plan =
            SurveyPlan { compare: ComparedRows::With(&known, None), look: &|_| Ok(()), held_out: false };
        let (survey, _) = self.survey(plan, &mut |_| true)?;
        for (i, part) in self.parts.iter_mut().enumerate() {
            let out: HashSet<u32> =
                survey.left_out.iter().filter(|(p, _)| *p == i).map(|(_, row)| *row).collect();
            if let (MixturePart::Rows(rows), false) = (part, out.is_empty()) {
                rows.used.retain(|row| !out.contains(row));
                if rows.used.is_empty() {
                    return Err(Error::data(format!(
                        "every row of {} loses all trained tokens by truncation and is dropped",
                        rows.name()
                    ))
                    .at("data.max_length")
                    .fix(format!("data.max_length = {}", survey.doubts.dropped.longest)));
                }
            }
        }
        self.dropped = survey.doubts.dropped;
        Ok(())
    }

    /// [`Mixture::check`] with a check of the caller's for every example. Held-out data comes first.
    pub fn check_with(&mut self, look: ExampleCheck<'_>, progress: SurveyProgress<'_>) -> Result<()> {
        let held: usize = self.held_out.iter().map(Mixture::row_count).sum();
        let (total, mut known, mut before) = (held + self.row_count(), HeldOut::default(), 0);
        for other in &self.held_out {
            let plan = SurveyPlan { compare: ComparedRows::Note, look, held_out: true };
            let (survey, whole) = other.survey(plan, &mut |done| progress(before + done, total))?;
            other.probe_tasks(look, true)?;
            before += other.row_count();
            if !whole {
                return Ok(());
            }
            other.warn(&survey, "evaluation ");
            known.add(&survey);
        }
        self.probe_tasks(look, false)?;
        let index = OverlapIndex::new(&known.marks, overlap::WORDS);
        let plan =
            SurveyPlan { compare: ComparedRows::With(&known.prints, Some(&index)), look, held_out: false };
        let (survey, whole) = self.survey(plan, &mut |done| progress(before + done, total))?;
        if whole && survey.rows > 0 && survey.doubts.equal.rows == survey.rows {
            let what =
                format!("all {} pairs have chosen = rejected: there is no learning signal", survey.rows);
            return Err(Error::data(what)
                .at(&survey.doubts.equal.first)
                .fix("check the columns of the pairs"));
        }
        self.warn(&survey, "");
        self.compare(&survey, &known)?;
        self.summary = match self.summary.rows {
            Some(_) => SourceSummary { dropped: self.dropped.rows, ..survey.summary(whole) },
            None => SourceSummary { exact: whole, ..self.summary },
        };
        Ok(())
    }

    /// Warns of training rows that overlap with evaluation rows, or refuses them.
    fn compare(&self, survey: &Survey, known: &HeldOut) -> Result<()> {
        let mut met = survey.met.clone();
        met.sort_unstable();
        met.dedup();
        let fix = "data.overlap = \"drop\" leaves these training rows out; ferrl data overlap shows them all";
        if let Some((_, first)) = met.iter().filter_map(|print| known.prints.get(print)).min()
            && self.overlap != Overlap::Off
        {
            let (n, all) = (met.len(), known.prints.len());
            let what = format!("{n} of {all} evaluation rows are training rows too (first: {first})");
            if self.overlap == Overlap::Error {
                return Err(Error::data(what).at("data.overlap").fix(fix));
            }
            let fix = "remove the duplicates, since accuracy on them measures memorisation, or set data.overlap = \"drop\"";
            self.warnings.raise("leaked-rows", what, fix);
        }
        let rows: HashSet<usize> = survey.shared.iter().map(|(.., m, _)| m.row).collect();
        let Some((.., meeting, place)) = survey.shared.first().filter(|_| rows.len() > met.len()) else {
            return Ok(());
        };
        let how = if meeting.exact { "the prompt of" } else { "13 consecutive words of" };
        let what = format!(
            "{} of {} evaluation rows share their prompt or {} consecutive words with training rows (first: {place} has {how} {})",
            rows.len(),
            known.places.len(),
            overlap::WORDS,
            known.places[meeting.row]
        );
        match self.overlap {
            Overlap::Error => Err(Error::data(what).at("data.overlap").fix(fix)),
            _ => {
                self.warnings.raise("overlapping-rows", what, fix);
                Ok(())
            }
        }
    }

    /// Leaves out training rows that evaluation rows overlap with.
    pub(super) fn drop_overlap(&mut self) -> Result<()> {
        let mut known = HeldOut::default();
        for other in &self.held_out {
            let plan = SurveyPlan { compare: ComparedRows::Note, look: &|_| Ok(()), held_out: true };
            known.add(&other.survey(plan, &mut |_| true)?.0);
        }
        let index = OverlapIndex::new(&known.marks, overlap::WORDS);
        let compare = ComparedRows::With(&known.prints, Some(&index));
        let plan = SurveyPlan { compare, look: &|_| Ok(()), held_out: false };
        let (survey, _) = self.survey(plan, &mut |_| true)?;
        let Some((.., place)) = survey.shared.first() else { return Ok(()) };
        let what = format!(
            "{} of {} training rows overlap with evaluation rows and are dropped (first: {place})",
            survey.shared.len(),
            survey.rows
        );
        self.warnings.raise("overlap-dropped", what, "nothing; ferrl data overlap shows them all");
        for (i, part) in self.parts.iter_mut().enumerate() {
            let MixturePart::Rows(rows) = part else { continue };
            let out: HashSet<u32> = survey.shared.iter().filter(|s| s.0 == i).map(|s| s.1).collect();
            rows.used.retain(|row| !out.contains(row));
            if rows.used.is_empty() {
                return Err(Error::data(format!(
                    "every row of {} overlaps with evaluation rows",
                    rows.name()
                ))
                .at("data.overlap")
                .fix("other evaluation rows, or data.overlap = \"warn\""));
            }
        }
        self.summary.rows = self.summary.rows.map(|_| self.row_count());
        Ok(())
    }

    /// The first examples of generated tasks: they have no row to name, but they must fit the model too.
    fn probe_tasks(&self, look: ExampleCheck<'_>, held_out: bool) -> Result<()> {
        let mut found = Survey::default();
        for part in &self.parts {
            let MixturePart::Task(task, _) = part else { continue };
            for index in 0..PORTION as u64 {
                let place = format!("task:{} example {index}", task.name);
                let item = task.item(index, index, &self.encoder)?;
                found.measure(&item, &place, self.room)?;
                look(SurveyedExample { item: &item, place: &place, held_out })?;
            }
        }
        found.rows = PORTION;
        self.warn(&found, if held_out { "generated evaluation " } else { "generated " });
        Ok(())
    }

    /// Raises warnings about these rows.
    fn warn(&self, s: &Survey, which: &str) {
        let rows = format!("{} {which}rows", s.rows);
        let mut doubts = s.doubts.clone();
        if which.is_empty() {
            doubts.dropped.join(self.dropped.clone()); // they are gone from the rows that were looked at
        }
        let most = self.encoder.max_length().unwrap_or(usize::MAX);
        doubts.say(&rows, most, &mut |name, what, fix| self.warnings.raise(name, what, fix));
        if let Some(context) = self.room.context.filter(|_| s.beyond.rows > 0) {
            let (with, fix) = match self.room.new_tokens {
                0 => ("", format!("data.max_length = {context}")),
                _ => (
                    " with rollout.max_new_tokens",
                    "shorter prompts, or a smaller rollout.max_new_tokens".into(),
                ),
            };
            let what = format!(
                "{} of {rows} are longer{with} than the model's context of {context} tokens (first: {})",
                s.beyond.rows, s.beyond.first
            );
            self.warnings.raise("beyond-context", what, fix);
        }
    }
}

/// The prompt of a row as the model reads it, and as the row has it.
fn asked(prompt: String, row: &crate::data::Row) -> Vec<String> {
    if prompt.trim().is_empty() {
        return overlap::prompts(row);
    }
    let mut all = overlap::named_prompts(row);
    all.push(prompt);
    all
}

/// The error for a sequence longer than the model's context.
fn too_long(length: usize, new: usize, most: usize, learned: bool) -> Error {
    let positions = if learned { "has learned positions for" } else { "has a context of" };
    let (what, fix) = match new {
        0 => (format!("{length} tokens"), format!("data.max_length = {most}")),
        _ => (
            format!("a prompt of {length} tokens and rollout.max_new_tokens = {new}"),
            format!(
                "rollout.max_new_tokens = {}, shorter prompts, or data.max_length with data.overlong = \"drop\"",
                most.saturating_sub(length).max(1)
            ),
        ),
    };
    Error::data(format!("{what}, but the model {positions} {most}")).fix(fix)
}

/// A 64-bit hash of a row.
fn print(item: &Item) -> u64 {
    let mut hash = Xxh3::new();
    let mut add = |ids: &[u32]| {
        hash.update(&(ids.len() as u64).to_le_bytes());
        ids.iter().for_each(|id| hash.update(&id.to_le_bytes()));
    };
    match item {
        Item::Sequences(sequences) => sequences.iter().for_each(|s| add(&s.ids)),
        Item::Prompt(prompt) => add(&prompt.ids),
        Item::Group(group) => add(&group.prompt.ids),
    }
    hash.digest()
}

impl Survey {
    fn join(&mut self, later: Survey) {
        self.rows += later.rows;
        self.tokens += later.tokens;
        self.trained += later.trained;
        self.longest = self.longest.max(later.longest);
        self.doubts.join(later.doubts);
        self.beyond.join(later.beyond);
        self.left_out.extend(later.left_out);
        self.prints.extend(later.prints);
        self.met.extend(later.met);
        self.marks.extend(later.marks);
        self.shared.extend(later.shared);
    }

    /// Lengths, pairs that do not differ, groups that are too small, what does not fit into the model.
    fn measure(&mut self, item: &Item, place: &str, room: ModelRoom) -> Result<()> {
        let mut longest = 0;
        let mut given = |sequences: &[Sequence]| {
            for s in sequences {
                self.tokens += s.ids.len();
                self.trained += s.trained.iter().filter(|t| **t).count();
                longest = longest.max(s.ids.len());
            }
        };
        match item {
            Item::Sequences(sequences) => {
                given(sequences);
                let equal = matches!(&sequences[..], [a, b] if a.pair.is_some() && a.ids == b.ids);
                self.doubts.equal.add(equal, place, 0);
            }
            Item::Group(group) => {
                given(&group.completions);
                let (n, least) = (group.completions.len(), room.group);
                if n < least {
                    return Err(Error::data(format!(
                        "{n} completions, expected at least {least} to compare"
                    ))
                    .at(place)
                    .fix("give the prompt more completions, or leave the row out"));
                }
            }
            Item::Prompt(prompt) => {
                self.tokens += prompt.ids.len();
                longest = prompt.ids.len();
            }
        }
        self.longest = self.longest.max(longest);
        let new = if let Item::Prompt(_) = item { room.new_tokens } else { 0 };
        let beyond = room.context.is_some_and(|most| longest + new > most);
        self.beyond.add(beyond, place, longest + new);
        match room.context {
            Some(most) if beyond && (room.learned || (new > 0 && longest >= most)) => {
                Err(too_long(longest, new, most, room.learned).at(place))
            }
            _ => Ok(()),
        }
    }

    pub(super) fn summary(&self, exact: bool) -> SourceSummary {
        SourceSummary {
            rows: Some(self.rows),
            tokens: Some(self.tokens),
            trained: self.trained,
            exact,
            truncated: self.doubts.truncated.rows,
            dropped: self.doubts.dropped.rows,
            longest: self.longest,
        }
    }
}

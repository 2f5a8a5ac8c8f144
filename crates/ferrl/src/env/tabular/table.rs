//! A table with a target: from CSV files, or generated from a seed.

use crate::data::each_row;
use crate::verify::countdown::TaskDraw;
use ferrl_engine::{Error, Result};
use serde_json::Value;
use std::path::Path;

/// One column of a table; cells may be missing.
#[derive(Clone, Debug, PartialEq)]
pub(super) enum Column {
    Numbers(Vec<Option<f64>>),
    Words(Vec<Option<String>>),
}

impl Column {
    pub(super) fn len(&self) -> usize {
        match self {
            Column::Numbers(cells) => cells.len(),
            Column::Words(cells) => cells.len(),
        }
    }

    pub(super) fn missing(&self) -> usize {
        match self {
            Column::Numbers(cells) => cells.iter().filter(|c| c.is_none()).count(),
            Column::Words(cells) => cells.iter().filter(|c| c.is_none()).count(),
        }
    }

    fn take(&self, rows: &[usize]) -> Column {
        match self {
            Column::Numbers(cells) => Column::Numbers(rows.iter().map(|&i| cells[i]).collect()),
            Column::Words(cells) => Column::Words(rows.iter().map(|&i| cells[i].clone()).collect()),
        }
    }
}

#[derive(Clone, Debug, PartialEq)]
pub(super) enum PredictionTarget {
    Numbers(Vec<f64>),
    /// Classes in sorted order, and the class of each row.
    Classes(Vec<String>, Vec<usize>),
}

impl PredictionTarget {
    pub(super) fn len(&self) -> usize {
        match self {
            PredictionTarget::Numbers(values) => values.len(),
            PredictionTarget::Classes(_, rows) => rows.len(),
        }
    }

    pub(super) fn take(&self, rows: &[usize]) -> PredictionTarget {
        match self {
            PredictionTarget::Numbers(values) => {
                PredictionTarget::Numbers(rows.iter().map(|&i| values[i]).collect())
            }
            PredictionTarget::Classes(names, all) => {
                PredictionTarget::Classes(names.clone(), rows.iter().map(|&i| all[i]).collect())
            }
        }
    }
}

/// Features and target.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TabularData {
    pub names: Vec<String>,
    pub columns: Vec<Column>,
    pub target: PredictionTarget,
}

impl TabularData {
    pub(super) fn rows(&self) -> usize {
        self.target.len()
    }

    pub(super) fn take(&self, rows: &[usize]) -> TabularData {
        let columns = self.columns.iter().map(|c| c.take(rows)).collect();
        TabularData { names: self.names.clone(), columns, target: self.target.take(rows) }
    }
}

/// Training and test table.
#[derive(Clone, Debug, PartialEq)]
pub(super) struct TabularProblem {
    pub train: TabularData,
    pub test: TabularData,
}

impl TabularProblem {
    /// Splits a table at random; a quarter of the rows is the test.
    pub(super) fn split(table: &TabularData, draw: &mut TaskDraw) -> TabularProblem {
        let mut order: Vec<usize> = (0..table.rows()).collect();
        for i in (1..order.len()).rev() {
            order.swap(i, draw.below(i + 1));
        }
        let (test, train) = order.split_at(order.len() / 4);
        TabularProblem { train: table.take(train), test: table.take(test) }
    }
}

/// Cells of a file by column.
struct Cells {
    names: Vec<String>,
    rows: Vec<Vec<Value>>,
    /// File and line or row of each.
    places: Vec<String>,
}

fn cells(path: &Path) -> Result<Cells> {
    let mut out = Cells { names: Vec::new(), rows: Vec::new(), places: Vec::new() };
    each_row(path, |place, row| {
        out.places.push(place.to_owned());
        if out.rows.is_empty() {
            out.names = row.keys().cloned().collect();
        }
        out.rows.push(out.names.iter().map(|name| row.get(name).cloned().unwrap_or(Value::Null)).collect());
        Ok(())
    })?;
    Ok(out)
}

impl Cells {
    fn column(&self, name: &str, path: &Path) -> Result<Vec<&Value>> {
        let at = self.names.iter().position(|n| n == name).ok_or_else(|| {
            let there = self.names.join(", ");
            Error::data(format!("no column {name:?}; the file has {there}")).at(path.display())
        })?;
        Ok(self.rows.iter().map(|row| &row[at]).collect())
    }
}

fn word(value: &Value) -> Option<String> {
    match value {
        Value::Null => None,
        Value::String(text) => Some(text.clone()),
        other => Some(other.to_string()),
    }
}

/// Whether all non-empty cells of a column are numbers.
fn numeric(cells: &[&Value]) -> bool {
    cells.iter().all(|v| v.is_null() || v.is_number()) && cells.iter().any(|v| v.is_number())
}

/// The tables of `train` and `test` files; without the second a quarter of the first is the test. The target is a number in a
/// `regression`, otherwise a class.
pub(super) fn read(
    train: &Path,
    test: Option<&Path>,
    target: &str,
    regression: bool,
    draw: &mut TaskDraw,
) -> Result<TabularProblem> {
    let first = cells(train)?;
    let second = test.map(cells).transpose()?;
    let goal = first.column(target, train)?;
    let mut classes: Vec<String> = goal.iter().filter_map(|v| word(v)).collect();
    classes.sort();
    classes.dedup();
    let features: Vec<&String> = first.names.iter().filter(|name| *name != target).collect();
    if features.is_empty() || first.rows.len() < 8 {
        let what = format!("{} rows and {} features", first.rows.len(), features.len());
        return Err(
            Error::data(format!("{what}, expected at least 8 rows and a feature")).at(train.display())
        );
    }
    let table = |cells: &Cells, path: &Path| -> Result<TabularData> {
        let columns = features.iter().map(|name| {
            let (kind, own) = (numeric(&first.column(name, train)?), cells.column(name, path)?);
            Ok(match kind {
                true => Column::Numbers(own.iter().map(|v| v.as_f64()).collect()),
                false => Column::Words(own.iter().map(|v| word(v)).collect()),
            })
        });
        let columns = columns.collect::<Result<Vec<_>>>()?;
        let wrong = |i: usize, v: &Value| {
            let want = if regression { "a number" } else { "a class of the training rows" };
            Error::data(format!("the target {target:?} is {v}, expected {want}")).at(&cells.places[i])
        };
        let own = cells.column(target, path)?;
        let own = own.iter().enumerate();
        let goal = match regression {
            true => PredictionTarget::Numbers(
                own.map(|(i, v)| v.as_f64().ok_or_else(|| wrong(i, v))).collect::<Result<_>>()?,
            ),
            false => {
                let class = |(i, v): (usize, &&Value)| {
                    let found = word(v).and_then(|w| classes.binary_search(&w).ok());
                    found.ok_or_else(|| wrong(i, v))
                };
                PredictionTarget::Classes(classes.clone(), own.map(class).collect::<Result<_>>()?)
            }
        };
        Ok(TabularData { names: features.iter().map(|n| n.to_string()).collect(), columns, target: goal })
    };
    let whole = table(&first, train)?;
    Ok(match (second, test) {
        (Some(cells), Some(path)) => TabularProblem { train: whole, test: table(&cells, path)? },
        _ => TabularProblem::split(&whole, draw),
    })
}

/// Parameters of a generated table.
#[derive(Clone, Copy, Debug, PartialEq)]
pub(super) struct MadeUp {
    pub rows: usize,
    pub regression: bool,
}

/// Generates a table: numbers `a` to `d` of different scales, some of them missing, words `e`, and a target that is linear in the
/// features or depends on their signs.
pub(super) fn make_up(how: MadeUp, draw: &mut TaskDraw) -> TabularProblem {
    let unit = |draw: &mut TaskDraw| f64::from(draw.word()) / 2_147_483_648.0 - 1.0;
    let kinds = ["red", "green", "blue"];
    let linear = draw.chance(0.5);
    let weights: Vec<f64> = (0..4).map(|_| unit(draw) + 0.1).collect();
    let shifts: Vec<f64> = (0..3).map(|_| unit(draw)).collect();
    let scales: Vec<f64> = (0..4).map(|_| 10f64.powi(draw.below(4) as i32 - 1)).collect();
    let mut numbers = vec![Vec::new(); 4];
    let (mut words, mut values) = (Vec::new(), Vec::new());
    for _ in 0..how.rows {
        let x: Vec<f64> = (0..4).map(|_| unit(draw)).collect();
        let kind = draw.below(3);
        let shape = match linear {
            true => x.iter().zip(&weights).map(|(x, w)| x * w).sum::<f64>(),
            false => (x[0] * x[1]).signum() * 0.7 + 0.3 * x[2] * weights[2],
        };
        values.push(shape + 0.5 * shifts[kind] + 0.2 * unit(draw));
        for ((column, x), scale) in numbers.iter_mut().zip(&x).zip(&scales) {
            column.push((!draw.chance(0.1)).then_some(x * scale));
        }
        words.push(Some(kinds[kind].to_string()));
    }
    let target = match how.regression {
        true => PredictionTarget::Numbers(values),
        false => {
            let mut sorted = values.clone();
            sorted.sort_by(f64::total_cmp);
            let middle = sorted[sorted.len() * 2 / 5];
            let classes = values.iter().map(|v| usize::from(*v > middle)).collect();
            PredictionTarget::Classes(vec!["no".into(), "yes".into()], classes)
        }
    };
    let columns = numbers.into_iter().map(Column::Numbers).chain([Column::Words(words)]).collect();
    let names = ["a", "b", "c", "d", "e"].map(String::from).to_vec();
    TabularProblem::split(&TabularData { names, columns, target }, draw)
}

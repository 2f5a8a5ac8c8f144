//! Sets of real numbers: unions of intervals and points with constant ends.

use super::{Real, Rel};
use std::cmp::Ordering;

/// One end of an interval; no value is infinity.
#[derive(Clone, Debug)]
pub(super) struct End {
    pub(super) value: Option<Real>,
    pub(super) closed: bool,
}

/// From one end to another.
#[derive(Clone, Debug)]
struct Piece {
    low: End,
    high: End,
}

/// A union of intervals and points, in order, no two touching.
#[derive(Clone, Debug)]
pub struct RealSet(Vec<Piece>);

pub(super) const OPEN: End = End { value: None, closed: false };

/// More pieces than any answer has.
const MOST_PIECES: usize = 64;

impl RealSet {
    /// All real numbers.
    pub(super) fn all() -> RealSet {
        RealSet(vec![Piece { low: OPEN, high: OPEN }])
    }

    pub(super) fn interval(low: End, high: End) -> Option<RealSet> {
        if let (Some(a), Some(b)) = (&low.value, &high.value) {
            match a.compare(b)? {
                Ordering::Greater => return None,
                Ordering::Equal if !(low.closed && high.closed) => return Some(RealSet(Vec::new())),
                _ => {}
            }
        }
        Some(RealSet(vec![Piece { low, high }]))
    }

    pub(super) fn point(value: Real) -> RealSet {
        let end = End { value: Some(value), closed: true };
        RealSet(vec![Piece { low: end.clone(), high: end }])
    }

    pub fn is_empty(&self) -> bool {
        self.0.is_empty()
    }

    pub(super) fn union(mut self, other: RealSet) -> Option<RealSet> {
        self.0.extend(other.0);
        if self.0.len() > MOST_PIECES {
            return None;
        }
        // By insertion, since two ends may turn out not to be comparable.
        let mut sorted: Vec<Piece> = Vec::new();
        for piece in self.0 {
            let mut at = sorted.len();
            while at > 0 && low_order(&piece.low, &sorted[at - 1].low)? == Ordering::Less {
                at -= 1;
            }
            sorted.insert(at, piece);
        }
        let mut out: Vec<Piece> = Vec::new();
        for piece in sorted {
            match out.last_mut() {
                Some(last) if touches(&last.high, &piece.low)? => {
                    if high_order(&piece.high, &last.high)? == Ordering::Greater {
                        last.high = piece.high;
                    }
                }
                _ => out.push(piece),
            }
        }
        Some(RealSet(out))
    }

    pub(super) fn complement(self) -> RealSet {
        let mut out = Vec::new();
        let mut low = Some(OPEN);
        for piece in self.0 {
            if let (Some(low), Some(_)) = (low.take(), &piece.low.value) {
                out.push(Piece { low, high: End { closed: !piece.low.closed, ..piece.low } });
            }
            low = piece.high.value.is_some().then_some(End { closed: !piece.high.closed, ..piece.high });
        }
        out.extend(low.map(|low| Piece { low, high: OPEN }));
        RealSet(out)
    }

    pub(super) fn intersection(self, other: RealSet) -> Option<RealSet> {
        Some(self.complement().union(other.complement())?.complement())
    }

    pub(super) fn empty() -> RealSet {
        RealSet(Vec::new())
    }

    /// The numbers beyond, or up to, a bound.
    pub(super) fn ray(rel: Rel, bound: Real) -> Option<RealSet> {
        let at = |closed| End { value: Some(bound.clone()), closed };
        match rel {
            Rel::Eq => Some(RealSet::point(bound)),
            Rel::Ne => Some(RealSet::point(bound).complement()),
            Rel::Lt | Rel::Le => RealSet::interval(OPEN, at(rel == Rel::Le)),
            Rel::Gt | Rel::Ge => RealSet::interval(at(rel == Rel::Ge), OPEN),
            _ => None,
        }
    }

    /// The ends of the pieces, in order.
    pub fn ends(&self) -> Vec<Real> {
        self.0
            .iter()
            .flat_map(|piece| [&piece.low, &piece.high])
            .filter_map(|end| end.value.clone())
            .collect()
    }

    /// Whether a number is a member; none where that cannot be told.
    pub fn contains(&self, value: &Real) -> Option<bool> {
        for piece in &self.0 {
            let above = match &piece.low.value {
                None => true,
                Some(low) => match low.compare(value)? {
                    Ordering::Less => true,
                    Ordering::Equal => piece.low.closed,
                    Ordering::Greater => false,
                },
            };
            let below = match &piece.high.value {
                None => true,
                Some(high) => match value.compare(high)? {
                    Ordering::Less => true,
                    Ordering::Equal => piece.high.closed,
                    Ordering::Greater => false,
                },
            };
            if above && below {
                return Some(true);
            }
        }
        Some(false)
    }

    /// Whether two have the same members.
    pub fn same(&self, other: &RealSet) -> bool {
        let ends = |a: &End, b: &End| match (&a.value, &b.value) {
            (None, None) => true,
            (Some(x), Some(y)) => a.closed == b.closed && x.compare(y) == Some(Ordering::Equal),
            _ => false,
        };
        self.0.len() == other.0.len()
            && self.0.iter().zip(&other.0).all(|(a, b)| ends(&a.low, &b.low) && ends(&a.high, &b.high))
    }
}

/// Which of two lower ends starts first.
fn low_order(a: &End, b: &End) -> Option<Ordering> {
    Some(match (&a.value, &b.value) {
        (None, None) => Ordering::Equal,
        (None, _) => Ordering::Less,
        (_, None) => Ordering::Greater,
        (Some(x), Some(y)) => x.compare(y)?.then(b.closed.cmp(&a.closed)),
    })
}

/// Which of two upper ends reaches further.
fn high_order(a: &End, b: &End) -> Option<Ordering> {
    Some(match (&a.value, &b.value) {
        (None, None) => Ordering::Equal,
        (None, _) => Ordering::Greater,
        (_, None) => Ordering::Less,
        (Some(x), Some(y)) => x.compare(y)?.then(a.closed.cmp(&b.closed)),
    })
}

/// Whether nothing lies between an upper end and the next lower end.
fn touches(high: &End, low: &End) -> Option<bool> {
    let (Some(a), Some(b)) = (&high.value, &low.value) else { return Some(true) };
    Some(match b.compare(a)? {
        Ordering::Less => true,
        Ordering::Equal => high.closed || low.closed,
        Ordering::Greater => false,
    })
}

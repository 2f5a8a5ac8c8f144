//! Units: what a number counts. Known ones convert; unknown words are compared as they stand.

use super::super::Rational;

/// Powers of length, mass, time, money, current and temperature.
pub type Dims = [i8; 6];

#[derive(Clone, Debug, PartialEq)]
pub struct Unit {
    /// How many base units (metre, kilogram, second, dollar) it is.
    pub factor: Rational,
    /// Which base units.
    pub dims: Dims,
    /// Words that are no known unit, such as `apple`.
    pub words: Vec<String>,
    /// The letter that was read as this unit, which may be a variable after all.
    pub letter: Option<char>,
}

/// Names, numerator and denominator of the factor, dimension.
type UnitRow = (&'static str, i64, i64, Dims);

const LENGTH: Dims = [1, 0, 0, 0, 0, 0];
const MASS: Dims = [0, 1, 0, 0, 0, 0];
const TIME: Dims = [0, 0, 1, 0, 0, 0];
const MONEY: Dims = [0, 0, 0, 1, 0, 0];
const VOLUME: Dims = [3, 0, 0, 0, 0, 0];
const NONE: Dims = [0; 6];

const TABLE: &[UnitRow] = &[
    ("m meter metre", 1, 1, LENGTH),
    ("cm centimeter centimetre", 1, 100, LENGTH),
    ("mm millimeter millimetre", 1, 1_000, LENGTH),
    ("dm decimeter decimetre", 1, 10, LENGTH),
    ("km kilometer kilometre", 1_000, 1, LENGTH),
    ("nm nanometer nanometre", 1, 1_000_000_000, LENGTH),
    ("in inch inches", 254, 10_000, LENGTH),
    ("ft foot feet", 3_048, 10_000, LENGTH),
    ("yd yard", 9_144, 10_000, LENGTH),
    ("mi mile", 1_609_344, 1_000, LENGTH),
    ("kg kilogram", 1, 1, MASS),
    ("g gram gm", 1, 1_000, MASS),
    ("mg milligram", 1, 1_000_000, MASS),
    ("lb lbs pound", 45_359_237, 100_000_000, MASS),
    ("oz ounce", 45_359_237, 1_600_000_000, MASS),
    ("tonne", 1_000, 1, MASS),
    ("s sec second", 1, 1, TIME),
    ("ms millisecond", 1, 1_000, TIME),
    ("min minute", 60, 1, TIME),
    ("h hr hour", 3_600, 1, TIME),
    ("day", 86_400, 1, TIME),
    ("week", 604_800, 1, TIME),
    ("L l liter litre", 1, 1_000, VOLUME),
    ("mL ml milliliter millilitre cc", 1, 1_000_000, VOLUME),
    ("gallon gal", 3_785_411_784, 1_000_000_000_000, VOLUME),
    ("quart qt", 946_352_946, 1_000_000_000_000, VOLUME),
    ("pint pt", 473_176_473, 1_000_000_000_000, VOLUME),
    ("cup", 2_365_882_365, 10_000_000_000_000, VOLUME),
    ("dollar dollars usd buck $", 1, 1, MONEY),
    ("cent ¢", 1, 100, MONEY),
    ("mph", 1_609_344, 3_600_000, [1, 0, -1, 0, 0, 0]),
    ("kph kmh", 1_000, 3_600, [1, 0, -1, 0, 0, 0]),
    ("N newton", 1, 1, [1, 1, -2, 0, 0, 0]),
    ("J joule", 1, 1, [2, 1, -2, 0, 0, 0]),
    ("kJ kilojoule", 1_000, 1, [2, 1, -2, 0, 0, 0]),
    ("W watt", 1, 1, [2, 1, -3, 0, 0, 0]),
    ("kW kilowatt", 1_000, 1, [2, 1, -3, 0, 0, 0]),
    ("Hz hertz", 1, 1, [0, 0, -1, 0, 0, 0]),
    ("Pa pascal", 1, 1, [-1, 1, -2, 0, 0, 0]),
    ("A ampere amp", 1, 1, [0, 0, 0, 0, 1, 0]),
    ("V volt", 1, 1, [2, 1, -3, 0, -1, 0]),
    ("Omega ohm", 1, 1, [2, 1, -3, 0, -2, 0]),
    ("kPa kilopascal", 1_000, 1, [-1, 1, -2, 0, 0, 0]),
    ("kN kilonewton", 1_000, 1, [1, 1, -2, 0, 0, 0]),
    ("MW megawatt", 1_000_000, 1, [2, 1, -3, 0, 0, 0]),
    ("kHz kilohertz", 1_000, 1, [0, 0, -1, 0, 0, 0]),
    ("MHz megahertz", 1_000_000, 1, [0, 0, -1, 0, 0, 0]),
    ("mA milliampere", 1, 1_000, [0, 0, 0, 0, 1, 0]),
    ("K kelvin", 1, 1, [0, 0, 0, 0, 0, 1]),
    ("radian rad", 1, 1, NONE),
    ("unit", 1, 1, NONE),
];

/// Words beside a number that say nothing about what it counts.
const FILLERS: &[&str] = &[
    "units", "way", "ways", "total", "in", "of", "the", "a", "an", "only", "each", "old", "about", "exactly",
    "approximately", "roughly", "is", "are", "be", "to", "for", "times", "answer", "long", "away", "apart",
    "th", "st", "nd", "rd",
];

/// Short words that are counted and would otherwise be products of variables.
const COUNTED: &[&str] =
    &["yen", "won", "mol", "mole", "egg", "pie", "toy", "hat", "key", "bag", "can", "jar", "tin"];

/// Words that end an English plural or abbreviation: `miles` is `mile`.
fn singular(word: &str) -> &str {
    let word = word.strip_suffix('.').unwrap_or(word);
    if word.len() > 3 && word.ends_with('s') && !word.ends_with("ss") {
        &word[..word.len() - 1]
    } else {
        word
    }
}

fn row(word: &str) -> Option<&'static UnitRow> {
    let find = |name: &str| TABLE.iter().find(|row| row.0.split(' ').any(|n| n == name));
    let lower = word.to_lowercase();
    find(word).or_else(|| find(singular(word))).or_else(|| {
        // A long name may be capitalised; `M` for `m` or `S` for `s` is another thing.
        if word.len() > 2 { find(&lower).or_else(|| find(singular(&lower))) } else { None }
    })
}

/// Whether a word names a unit, a currency or says nothing.
pub fn is_unit_word(word: &str) -> bool {
    row(word).is_some()
        || is_filler(word)
        || COUNTED.contains(&word)
        || matches!(word, "square" | "sq" | "cubic" | "squared" | "cubed" | "per")
}

/// Whether a word is one of the known units.
pub fn is_known(word: &str) -> bool {
    row(word).is_some()
}

/// Whether a word says nothing about what a number counts.
pub fn is_filler(word: &str) -> bool {
    FILLERS.contains(&word.to_lowercase().as_str())
}

impl Unit {
    pub fn none() -> Unit {
        Unit { factor: Rational::ONE, dims: NONE, words: Vec::new(), letter: None }
    }

    pub fn named(word: &str) -> Unit {
        let word = match word {
            "€" | "EUR" | "eur" => "euro",
            "¥" => "yen",
            "₹" | "rs" | "Rs" | "RS" | "inr" | "INR" => "rupee",
            other => other,
        };
        match row(word) {
            Some((_, num, den, dims)) => Unit {
                factor: Rational::new((*num).into(), (*den).into()).unwrap_or(Rational::ONE),
                dims: *dims,
                ..Unit::none()
            },
            None if is_filler(word) => Unit::none(),
            None => Unit { words: vec![singular(&word.to_lowercase()).to_string()], ..Unit::none() },
        }
    }

    /// Whether this says nothing.
    pub fn is_none(&self) -> bool {
        self.dims == NONE && self.words.is_empty()
    }

    /// `self * other^power`.
    pub fn times(mut self, other: &Unit, power: i8) -> Unit {
        if let Some(factor) = other.factor.pow(power.into()) {
            self.factor = self.factor.mul(&factor);
        }
        for (mine, theirs) in self.dims.iter_mut().zip(other.dims) {
            *mine = mine.saturating_add(theirs.saturating_mul(power));
        }
        for word in &other.words {
            let word = if power < 0 { format!("/{word}") } else { word.clone() };
            if !self.words.contains(&word) {
                self.words.push(word);
            }
        }
        self
    }

    /// Whether both are pounds, of which one is money: £20 and 20 pounds.
    pub fn pounds(&self, other: &Unit) -> bool {
        let sterling = |u: &Unit| u.dims == NONE && matches!(&u.words[..], [word] if word == "£");
        let pound = |u: &Unit| u.words.is_empty() && *u == Unit::named("pound");
        sterling(self) && pound(other) || sterling(other) && pound(self)
    }

    /// Whether both count the same kind of thing. Where either has no unit, anything goes.
    pub fn compatible(&self, other: &Unit) -> bool {
        let within = |a: &Unit, b: &Unit| a.words.iter().all(|word| b.words.contains(word));
        self.is_none()
            || other.is_none()
            || self.dims == other.dims && (within(self, other) || within(other, self))
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    #[test]
    fn units_convert_or_differ() {
        let (cm, m, feet) = (Unit::named("cm"), Unit::named("meters"), Unit::named("feet"));
        assert!(cm.compatible(&m) && m.compatible(&feet));
        assert!(!cm.compatible(&Unit::named("seconds")));
        assert_eq!(m.factor.div(&cm.factor), Some(100.into()));
        assert!(!Unit::none().times(&cm, 2).compatible(&cm));
        assert!(Unit::named("apples").compatible(&Unit::named("apple")));
        assert!(!Unit::named("apples").compatible(&Unit::named("pears")));
        assert!(Unit::named("units").is_none());
        assert_eq!(Unit::named("Miles").dims, Unit::named("mi").dims);
    }
}

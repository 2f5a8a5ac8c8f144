//! Other numbers of the same kind: whole where they were, round where they were, of like size.

use crate::verify::countdown::TaskDraw;
use crate::verify::math::Rational;

/// Percentages that exercises have.
const PERCENT: [i64; 15] = [5, 10, 15, 20, 25, 30, 35, 40, 45, 50, 60, 70, 75, 80, 90];

/// Another number for this one.
pub(super) fn draw(value: &Rational, percent: bool, random: &mut TaskDraw) -> Rational {
    if percent {
        return Rational::from(PERCENT[random.below(PERCENT.len())]);
    }
    let Some(whole) = value.to_i64() else { return fraction(value, random) };
    if whole <= 12 {
        let most = (2 * whole).clamp(9, 20);
        return Rational::from(2 + random.below(most as usize - 1) as i64);
    }
    // Round numbers stay round, so that divisions come out even as often as before.
    let unit = match whole {
        w if w % 100 == 0 => 100,
        w if w % 10 == 0 => 10,
        w if w % 5 == 0 && random.chance(0.6) => 5,
        _ => 1,
    };
    let (least, most) = (whole * 2 / 5, whole.saturating_mul(11) / 5);
    let drawn = least + random.below((most - least + 1) as usize) as i64;
    Rational::from(((drawn + unit / 2) / unit * unit).max(unit))
}

/// Half to twice a decimal, with as many digits.
fn fraction(value: &Rational, random: &mut TaskDraw) -> Rational {
    let scale = [10, 100, 1000].into_iter().find(|s| value.mul(&Rational::from(*s)).is_integer());
    let units = scale.and_then(|s| Some((s, value.mul(&Rational::from(s)).to_i64()?)));
    let Some((scale, units)) = units else { return value.clone() };
    let (least, most) = ((units / 2).max(1), units.saturating_mul(2).max(1));
    let drawn = least + random.below((most - least + 1) as usize) as i64;
    Rational::new(drawn.into(), scale.into()).unwrap_or_else(|| value.clone())
}

/// Whether a new value can stand where the old one stood: of the same sign, whole if it was, of like size.
pub(super) fn keeps_kind(old: &Rational, new: &Rational) -> bool {
    let cents = |v: &Rational| v.mul(&Rational::from(100)).is_integer();
    let above_one = |v: &Rational| v.compare(&Rational::ONE).is_ge();
    let most = old.mul(&Rational::from(10)).add(&Rational::from(200));
    (old.sign() > 0) == (new.sign() > 0)
        && old.is_integer() == new.is_integer()
        && above_one(old) == above_one(new)
        && (!cents(old) || cents(new))
        && new.compare(&most).is_le()
}

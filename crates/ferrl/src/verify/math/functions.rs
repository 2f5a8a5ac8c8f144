//! Named functions of numbers.

use super::arith::transcend;
use super::{Budget, Func, MathResult, Nat, Num, Rational, Real, Stop};

fn one(args: &[Num]) -> MathResult<&Num> {
    match args {
        [arg] => Ok(arg),
        _ => Err(Stop::Undefined),
    }
}

fn half() -> Num {
    Rational::new(1, 2).unwrap_or(Rational::ONE).into()
}

fn quarter_turn() -> Num {
    transcend::pi().scale(-1).into()
}

/// Steps that a function of real numbers costs.
pub fn steps(func: Func) -> u64 {
    use Func::*;
    match func {
        Sin | Cos | Tan | Cot | Sec | Csc | Cis | Exp | Sinh | Cosh | Tanh | Coth | Sech | Csch => 300,
        Asin | Acos | Atan | Acot | Asec | Acsc | Arg | Ln | Asinh | Acosh | Atanh => 500,
        Log => 1_000,
        _ => 20,
    }
}

/// The value of a function.
pub fn apply(func: Func, args: &[Num]) -> MathResult<Num> {
    use Func::*;
    match func {
        Sin => Ok(one(args)?.sin_cos()?.0),
        Cos => Ok(one(args)?.sin_cos()?.1),
        Tan => {
            let (sin, cos) = one(args)?.sin_cos()?;
            sin.div(&cos)
        }
        Cot => {
            let (sin, cos) = one(args)?.sin_cos()?;
            cos.div(&sin)
        }
        Sec => one(args)?.sin_cos()?.1.recip(),
        Csc => one(args)?.sin_cos()?.0.recip(),
        Asin => asin(one(args)?),
        Acos => quarter_turn().sub(&asin(one(args)?)?),
        Atan => atan(one(args)?),
        Acot => quarter_turn().sub(&atan(one(args)?)?),
        Asec => quarter_turn().sub(&asin(&one(args)?.recip()?)?),
        Acsc => asin(&one(args)?.recip()?),
        Sinh | Cosh | Tanh | Coth | Sech | Csch | Asinh | Acosh | Atanh => hyperbolic(func, one(args)?),
        Ln => one(args)?.ln(),
        Log => match args {
            [base, x] => x.ln()?.div(&base.ln()?),
            _ => Err(Stop::Undefined),
        },
        Exp => one(args)?.exp(),
        Cis => {
            let (sin, cos) = one(args)?.sin_cos()?;
            cos.add(&Num::i().mul(&sin)?)
        }
        Floor => Ok(one(args)?.real()?.floor()?.into()),
        Ceil => Ok(one(args)?.real()?.neg().floor()?.neg().into()),
        Round => Ok(one(args)?.add(&half())?.real()?.floor()?.into()),
        Gcd | Lcm => common(func, args),
        Min | Max => extreme(func, args),
        Sign => Ok(i64::from(one(args)?.real()?.sign()).into()),
        Re => Ok(one(args)?.re.clone().into()),
        Im => Ok(one(args)?.im.clone().into()),
        Arg => Ok(one(args)?.arg()?.into()),
        Conj => {
            let x = one(args)?;
            Ok(Num { re: x.re.clone(), im: x.im.neg() })
        }
        Mod => remainder(args),
        Det => Err(Stop::Undefined),
    }
}

fn atan(x: &Num) -> MathResult<Num> {
    Ok(x.real()?.atan2(&1.into())?.into())
}

fn asin(x: &Num) -> MathResult<Num> {
    let x = x.real()?;
    let rest = Real::from(1).sub(&x.mul(x)?)?;
    match rest.sign() {
        -1 => Err(Stop::Undefined),
        0 => Ok(if x.sign() < 0 { quarter_turn().neg() } else { quarter_turn() }),
        _ => Ok(x.atan2(&rest.root(2)?)?.into()),
    }
}

/// A hyperbolic function or the inverse of one.
fn hyperbolic(func: Func, x: &Num) -> MathResult<Num> {
    let one = Num::from(1);
    match func {
        Func::Asinh => return x.add(&x.mul(x)?.add(&one)?.root(2)?)?.ln(),
        Func::Acosh => return x.add(&x.mul(x)?.sub(&one)?.root(2)?)?.ln(),
        Func::Atanh => return one.add(x)?.div(&one.sub(x)?)?.ln()?.mul(&half()),
        _ => {}
    }
    let (up, down) = (x.exp()?, x.neg().exp()?);
    let (sinh, cosh) = (up.sub(&down)?.mul(&half())?, up.add(&down)?.mul(&half())?);
    match func {
        Func::Sinh => Ok(sinh),
        Func::Cosh => Ok(cosh),
        Func::Tanh => sinh.div(&cosh),
        Func::Coth => cosh.div(&sinh),
        Func::Sech => cosh.recip(),
        Func::Csch => sinh.recip(),
        _ => Err(Stop::Undefined),
    }
}

/// `a - b floor(a / b)`
fn remainder(args: &[Num]) -> MathResult<Num> {
    let [a, b] = args else { return Err(Stop::Undefined) };
    let (a, b) = (a.real()?, b.real()?);
    Ok(a.sub(&a.div(b)?.floor()?.mul(b)?)?.into())
}

fn common(func: Func, args: &[Num]) -> MathResult<Num> {
    let mut out: Option<i64> = None;
    for arg in args {
        let next = arg.integer().and_then(i64::checked_abs).ok_or(Stop::Undefined)?;
        out = Some(match out {
            None => next,
            Some(so_far) => {
                let (mut a, mut b) = (so_far, next);
                while b != 0 {
                    (a, b) = (b, a % b);
                }
                match func {
                    Func::Gcd => a,
                    _ if a == 0 => 0,
                    _ => (so_far / a).checked_mul(next).ok_or(Stop::Undefined)?,
                }
            }
        });
    }
    out.map(Num::from).ok_or(Stop::Undefined)
}

fn extreme(func: Func, args: &[Num]) -> MathResult<Num> {
    let mut best: Option<&Real> = None;
    for arg in args {
        let arg = arg.real()?;
        let better = match best {
            None => true,
            Some(best) => {
                let order = arg.compare(best).ok_or(Stop::Undefined)?;
                if func == Func::Max { order.is_gt() } else { order.is_lt() }
            }
        };
        if better {
            best = Some(arg);
        }
    }
    best.map(|best| best.clone().into()).ok_or(Stop::Undefined)
}

fn bits(value: &Real) -> u64 {
    value.rational().map_or(64, Rational::bits)
}

/// `n (n - step) (n - 2 step) ...`: exact as long as it fits, then to 256 bits.
pub fn factorial(n: &Num, step: i64, budget: &Budget) -> MathResult<Num> {
    let n = n.integer().filter(|n| (0..=20_000).contains(n)).ok_or(Stop::Undefined)?;
    let mut out = Real::from(1);
    let mut k = n;
    while k > 1 {
        // Machine words first: fewer products of big numbers.
        let mut factor = k;
        k -= step;
        while k > 1
            && let Some(more) = factor.checked_mul(k)
        {
            factor = more;
            k -= step;
        }
        budget.spend(5 + bits(&out) / 256)?;
        out = out.mul(&factor.into())?;
    }
    Ok(out.into())
}

pub fn binomial(n: &Num, k: &Num, budget: &Budget) -> MathResult<Num> {
    let (n, k) = (n.integer().ok_or(Stop::Undefined)?, k.integer().ok_or(Stop::Undefined)?);
    if k < 0 || n >= 0 && k > n {
        return Ok(0.into());
    }
    let k = if n >= 0 { k.min(n - k) } else { k };
    if k > 5_000 {
        return Err(Stop::Undefined);
    }
    // C(-n, k) is C(n + k - 1, k) with the sign of (-1)^k.
    let (negative, n) = match n {
        0.. => (false, n),
        _ => (k % 2 == 1, k.checked_sub(n).and_then(|x| x.checked_sub(1)).ok_or(Stop::Undefined)?),
    };
    let mut out = Nat::from(1);
    for j in 1..=k {
        budget.spend(2 + out.bits() / 128)?;
        out = out.mul_add_small((n - k + j).unsigned_abs(), 0);
        (out, _) = out.div_rem(&Nat::from(u128::from(j.unsigned_abs()))).ok_or(Stop::Undefined)?;
    }
    let value = Rational::from_parts(negative, out, Nat::from(1)).ok_or(Stop::Undefined)?;
    Ok(Real::from(value).into())
}

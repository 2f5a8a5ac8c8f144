//! Norms, linear layers, RoPE, activations.

use super::{Dev, Op};
use crate::backend::{
    Activation, Affine, HeadNorm, Heads, LinearGrads, NormGrads, NormInput, NormRecompute, Normed, Rotation,
};
use crate::{Buffer, DType, Result, Weight};

pub(crate) fn norm(dev: Dev<'_>, norm: Normed<'_>, x: &Buffer, y: &Buffer) -> Result<()> {
    let op = Op::new(dev, "norm");
    op.norm(norm)?;
    op.rows("x", x, norm.op.width)?;
    op.floats("y", y, x.len())
}

pub(crate) fn add_norm(
    dev: Dev<'_>,
    norm: Normed<'_>,
    x: &Buffer,
    delta: &Buffer,
    [sum, y]: [&Buffer; 2],
) -> Result<()> {
    let op = Op::new(dev, "add_norm");
    op.norm(norm)?;
    op.rows("x", x, norm.op.width)?;
    op.floats("delta", delta, x.len())?;
    op.f32s("sum", sum, x.len())?;
    op.floats("y", y, x.len())
}

fn norm_grads(op: Op<'_>, width: usize, grads: &NormGrads<'_>) -> Result<()> {
    op.some_f32s("dweight", grads.weight.as_deref(), width)?;
    op.some_f32s("dbias", grads.bias.as_deref(), width)
}

pub(crate) fn norm_backward(
    dev: Dev<'_>,
    norm: Normed<'_>,
    dy: &Buffer,
    x: &Buffer,
    dx: &Buffer,
    grads: &NormGrads<'_>,
) -> Result<()> {
    let op = Op::new(dev, "norm_backward");
    op.norm(norm)?;
    op.rows("x", x, norm.op.width)?;
    op.floats("dy", dy, x.len())?;
    op.floats("dx", dx, x.len())?;
    norm_grads(op, norm.op.width, grads)
}

pub(crate) fn norm_recompute(
    dev: Dev<'_>,
    norm: Normed<'_>,
    of: NormInput<'_>,
    backward: &NormRecompute<'_>,
) -> Result<()> {
    let op = Op::new(dev, "norm_recompute");
    op.norm(norm)?;
    op.rows("x", of.x, norm.op.width)?;
    let n = of.x.len();
    let NormRecompute { dy, y, dx, rounded, grads } = backward;
    op.f32s("x", of.x, n)?;
    op.f32s("dx", dx, n)?;
    op.floats("dy", dy, n)?;
    for (name, b) in [("y", Some(&**y)), ("delta", of.delta), ("rounded", rounded.as_deref())] {
        b.map_or(Ok(()), |b| op.typed(name, b, dy.dtype(), n))?;
    }
    norm_grads(op, norm.op.width, grads)
}

pub(crate) fn weight(dev: Dev<'_>, n: usize, k: usize, dtype: DType) -> Result<()> {
    let op = Op::new(dev, "weight");
    op.expect(n > 0 && k > 0 && dtype.is_float(), || format!("{n} x {k} of {}", dtype.name()))?;
    op.times(n, k).map(|_| ())
}

pub(crate) fn master(dev: Dev<'_>, w: &Weight) -> Result<()> {
    Op::new(dev, "master").weight("the weight", w, false)
}

pub(crate) fn load_weight(dev: Dev<'_>, master: &Buffer, w: &Weight) -> Result<()> {
    let op = Op::new(dev, "load_weight");
    op.weight("the weight", w, false)?;
    op.f32s("master", master, w.n * w.k)
}

pub(crate) fn linear(dev: Dev<'_>, x: &Buffer, w: &Weight, bias: Option<&Buffer>, y: &Buffer) -> Result<()> {
    let op = Op::new(dev, "linear");
    let rows = op.affine(x, Affine { weight: w, bias })?;
    op.floats("y", y, op.times(rows, w.n)?)
}

pub(crate) fn linear_dx(dev: Dev<'_>, dy: &Buffer, w: &Weight, dx: &Buffer) -> Result<()> {
    let op = Op::new(dev, "linear_dx");
    op.weight("the weight", w, true)?;
    let rows = op.factor("dy", dy, w.n, w)?;
    op.floats("dx", dx, op.times(rows, w.k)?)
}

pub(crate) fn linear_dw(
    dev: Dev<'_>,
    dy: &Buffer,
    x: &Buffer,
    tokens: usize,
    grads: &LinearGrads<'_>,
) -> Result<()> {
    let op = Op::new(dev, "linear_dw");
    let (dw, dbias) = (grads.weight.as_deref(), grads.bias.as_deref());
    op.floats("dy", dy, dy.len())?;
    op.typed("x", x, dy.dtype(), x.len())?;
    if tokens == 0 {
        op.floats("dy", dy, 0)?;
        op.floats("x", x, 0)?;
        let either = [("dw", dw), ("dbias", dbias)];
        return either.iter().try_for_each(|(name, b)| op.some_f32s(name, *b, b.map_or(0, Buffer::len)));
    }
    let (n, k) = (dy.len() / tokens, x.len() / tokens);
    op.floats("dy", dy, n * tokens)?;
    op.floats("x", x, k * tokens)?;
    op.some_f32s("dw", dw, op.times(n, k)?)?;
    op.some_f32s("dbias", dbias, n)
}

pub(crate) fn head_norm(dev: Dev<'_>, norm: HeadNorm<'_>, qkv: &Buffer, out: &Buffer) -> Result<()> {
    head_norms(Op::new(dev, "head_norm"), norm, qkv, ("out", out))
}

pub(crate) fn head_norm_backward(
    dev: Dev<'_>,
    norm: HeadNorm<'_>,
    qkv: &Buffer,
    dqkv: &Buffer,
    dweights: [Option<&Buffer>; 2],
) -> Result<()> {
    let op = Op::new(dev, "head_norm_backward");
    head_norms(op, norm, qkv, ("dqkv", dqkv))?;
    let [(_, query), (_, key)] = norm.parts();
    op.some_f32s("dq_weight", dweights[0], query.width)?;
    op.some_f32s("dk_weight", dweights[1], key.width)
}

fn head_norms(op: Op<'_>, norm: HeadNorm<'_>, qkv: &Buffer, (name, out): (&str, &Buffer)) -> Result<()> {
    let HeadNorm { op: kind, heads, q_weight, k_weight, .. } = norm;
    op.heads(heads)?;
    let (width, dim) = (kind.width, heads.head_dim);
    op.expect(width == dim, || format!("a norm of {width} elements, heads have {dim}"))?;
    for (weight, (_, kind)) in [q_weight, k_weight].into_iter().zip(norm.parts()) {
        op.norm(Normed { op: kind, weight, bias: None })?;
    }
    op.rows("qkv", qkv, heads.qkv_width())?;
    op.floats(name, out, qkv.len())
}

/// Checks RoPE tables and positions for `rows` rows.
pub(super) fn angles(op: Op<'_>, heads: Heads, rotation: Rotation<'_>, rows: usize) -> Result<()> {
    let Rotation { dim, cos, sin, positions } = rotation;
    let fits = dim.is_multiple_of(2) && dim <= heads.head_dim;
    op.expect(fits, || format!("{dim} of a head's {} elements are rotated", heads.head_dim))?;
    op.f32s("cos", cos, cos.len())?;
    op.f32s("sin", sin, cos.len())?;
    if dim == 0 {
        return op.below("positions", positions, rows, usize::MAX);
    }
    let known = op.rows("cos", cos, dim / 2)?;
    op.below("positions", positions, rows, known)
}

pub(crate) fn rotary(dev: Dev<'_>, heads: Heads, of: Rotation<'_>, qkv: &Buffer) -> Result<()> {
    let op = Op::new(dev, "rotary");
    op.heads(heads)?;
    let rows = op.rows("qkv", qkv, heads.qkv_width())?;
    angles(op, heads, of, rows)
}

pub(crate) fn qkv_backward(
    dev: Dev<'_>,
    heads: Heads,
    of: Option<Rotation<'_>>,
    dqkv: &Buffer,
    dbias: Option<&Buffer>,
) -> Result<()> {
    let op = Op::new(dev, "qkv_backward");
    op.heads(heads)?;
    let rows = op.rows("dqkv", dqkv, heads.qkv_width())?;
    of.map_or(Ok(()), |of| angles(op, heads, of, rows))?;
    op.some_f32s("dbias", dbias, heads.qkv_width())
}

pub(crate) fn rotated_bias(
    dev: Dev<'_>,
    head_dim: usize,
    dqkv: &Buffer,
    tokens: usize,
    dbias: &Buffer,
) -> Result<()> {
    let op = Op::new(dev, "rotated_bias");
    op.expect(head_dim > 0, || "heads without columns".into())?;
    op.floats("dqkv", dqkv, op.times(tokens, dbias.len())?)?;
    op.f32s("dbias", dbias, dbias.len())
}

/// Elements of a row of `x` if a row of `y` has `width`.
pub(crate) fn input_width(op: Activation, width: usize) -> usize {
    if op == Activation::Gelu { width } else { 2 * width }
}

/// Returns the number of rows.
fn activations(
    op: Op<'_>,
    kind: Activation,
    width: usize,
    (xs, x): (&str, &Buffer),
    (ys, y): (&str, &Buffer),
) -> Result<usize> {
    op.times(width, 2)?;
    let rows = op.rows(ys, y, width)?;
    op.floats(xs, x, op.times(rows, input_width(kind, width))?)?;
    Ok(rows)
}

/// Returns the number of rows.
pub(crate) fn activation(
    dev: Dev<'_>,
    kind: Activation,
    width: usize,
    x: &Buffer,
    y: &Buffer,
) -> Result<usize> {
    activations(Op::new(dev, "activation"), kind, width, ("x", x), ("y", y))
}

/// Returns the number of rows.
pub(crate) fn activation_backward(
    dev: Dev<'_>,
    kind: Activation,
    width: usize,
    x: &Buffer,
    dy: &Buffer,
    dx: &Buffer,
) -> Result<usize> {
    let op = Op::new(dev, "activation_backward");
    let rows = activations(op, kind, width, ("x", x), ("dy", dy))?;
    op.floats("dx", dx, x.len())?;
    Ok(rows)
}

/// Returns the number of rows.
pub(crate) fn activation_recompute(
    dev: Dev<'_>,
    kind: Activation,
    width: usize,
    x: &Buffer,
    dy: &Buffer,
) -> Result<usize> {
    let op = Op::new(dev, "activation_recompute");
    let rows = activations(op, kind, width, ("x", x), ("dy", dy))?;
    op.typed("x", x, dy.dtype(), x.len())?;
    Ok(rows)
}

pub(crate) fn linear_add(dev: Dev<'_>, x: &Buffer, layer: Affine<'_>, to: &Buffer) -> Result<()> {
    let op = Op::new(dev, "linear_add");
    let rows = op.affine(x, layer)?;
    op.f32s("to", to, op.times(rows, layer.weight.n)?)
}

/// Checks a norm followed by a linear layer; returns the number of rows.
pub(super) fn normed(op: Op<'_>, norm: Normed<'_>, x: &Buffer, layer: Affine<'_>) -> Result<usize> {
    op.norm(norm)?;
    op.weight("the weight", layer.weight, false)?;
    op.some_f32s("bias", layer.bias, layer.weight.n)?;
    let (width, k) = (norm.op.width, layer.weight.k);
    op.expect(width == k, || format!("a norm of {width} elements before a weight of {k}"))?;
    op.f32s("x", x, x.len())?;
    op.rows("x", x, width)
}

pub(crate) fn normed_activation(
    dev: Dev<'_>,
    norm: Normed<'_>,
    x: &Buffer,
    layer: Affine<'_>,
    kind: Activation,
    y: &Buffer,
) -> Result<()> {
    let op = Op::new(dev, "normed_activation");
    let rows = normed(op, norm, x, layer)?;
    let n = layer.weight.n;
    let width = if kind == Activation::Gelu { n } else { n / 2 };
    op.expect(n == input_width(kind, width), || format!("{n} features are not gates and ups"))?;
    op.floats("y", y, op.times(rows, width)?)
}

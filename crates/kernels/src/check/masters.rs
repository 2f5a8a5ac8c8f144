//! Masters that share memory with their weights: every operation gives the bits of a plain f32 buffer.

use super::units::adamw;
use super::{Check, download, nan_filled, random, upload, weight};
use crate::backend::{AdamWParam, Backend, Sgd};
use crate::{Buffer, DType, Result, Weight};

const ROWS: usize = 1031;
const WIDTH: usize = 24;

/// Numbers of all sizes: halfway between two bf16 values, next to that, largest, smallest, zeros.
fn numbers() -> Vec<f32> {
    let special =
        [0x3f80_8000, 0x3f81_8000, 0xbf80_8000, 0x3f80_7fff, 0x3f80_8001, 0x7f7f_7fff, 1, 0x8000_0000, 0];
    let mut values = random(1, ROWS * WIDTH);
    values.iter_mut().zip(special).for_each(|(x, bits)| *x = f32::from_bits(bits));
    values
}

/// The bf16 weight of a master whose upper half it is.
fn rounded(x: f32) -> f32 {
    // A sum of products is never -0.
    f32::from_bits((x.to_bits() + 0x8000) & 0xffff_0000) + 0.0
}

/// A weight with its master, on devices that store them together.
fn shared(b: &dyn Backend) -> Result<Option<(Weight, Buffer)>> {
    let weight = b.weight(ROWS, WIDTH, DType::Bf16, true)?;
    Ok(b.master(&weight)?.map(|master| (weight, master)))
}

pub fn all(check: &mut Check<'_>) -> Result<()> {
    let (b, values) = (check.card, numbers());
    let (Some((mut form, mut master)), Some((beside, mut other))) = (shared(b)?, shared(b)?) else {
        return Ok(());
    };
    b.write(&mut master, 0, &values[..101])?;
    b.write(&mut master, 101, &values[101..])?;
    check.same("masters: written and read", &download(b, &master)?, &values);
    let mut part = vec![0.0; 333];
    b.read(&master, 77, &mut part)?;
    check.same("masters: a part", &part, &values[77..77 + 333]);
    let rounded: Vec<f32> = values.iter().map(|&x| rounded(x)).collect();
    check.same("masters: derived", &derived(b, &form)?, &rounded);
    nans_preserved(check, (&beside, &mut other))?;
    b.load_weight(&master, &mut form)?;
    let mut apart = b.weight(ROWS, WIDTH, DType::Bf16, true)?;
    b.load_weight(&master, &mut apart)?;
    let nearest = weight(b, DType::Bf16, ROWS, WIDTH, &values)?;
    check.same("masters: derived elsewhere", &derived(b, &apart)?, &derived(b, &nearest)?);
    let mut plain = upload(b, DType::F32, &values)?;
    copied(check, (&master, &plain, &mut other), &values)?;

    let ids = b.indices(&[7, 0, 1030, 7])?;
    let embedded = |table: &Buffer| -> Result<Vec<f32>> {
        let mut out = nan_filled(b, DType::F32, 4 * WIDTH)?;
        b.embed(&ids, table, 1.5, false, &mut out)?;
        download(b, &out)
    };
    check.same("masters: embedded", &embedded(&master)?, &embedded(&plain)?);

    stored(check, (&mut form, &mut master), &embedded)?;
    alone(check, &embedded)?;
    b.write(&mut master, 0, &values)?;
    changed(check, (&mut form, &mut master), &mut plain)
}

/// NaNs are preserved, in their element and in products with its row.
fn nans_preserved(check: &mut Check<'_>, (form, master): (&Weight, &mut Buffer)) -> Result<()> {
    let b = check.card;
    for bits in [0x7fff_ffff, 0xffff_ffff, 0x7fff_8000, 0x7f80_0001, 0x7fc0_0000] {
        b.write(master, 0, &vec![1.0; ROWS * WIDTH])?;
        b.write(master, 5 * WIDTH, &[f32::from_bits(bits)])?;
        // The product of a NaN with zero is NaN, so the whole row is.
        let (master, products) = (download(b, master)?, derived(b, form)?);
        let none = |values: &[f32]| values.iter().filter(|x| x.is_nan()).count();
        let lost = none(&master[5 * WIDTH..][..1]) != 1 || none(&products[5 * WIDTH..][..WIDTH]) != WIDTH;
        let spread = none(&master) != 1 || none(&products) != WIDTH;
        check.report(format!("masters: not a number, {bits:#x}"), f64::from(u8::from(lost || spread)), 0.0);
    }
    Ok(())
}

/// Copies between masters and plain buffers.
fn copied(
    check: &mut Check<'_>,
    (master, plain, other): (&Buffer, &Buffer, &mut Buffer),
    values: &[f32],
) -> Result<()> {
    let b = check.card;
    b.copy(master, 0, other, 0, values.len())?;
    check.same("masters: copied", &download(b, other)?, values);
    let mut copy = nan_filled(b, DType::F32, values.len())?;
    b.copy(master, 0, &mut copy, 0, values.len())?;
    check.same("masters: copied as a whole", &download(b, &copy)?, values);
    b.copy(plain, 5, other, 2, 500)?;
    check.same("masters: copied in part", &download(b, other)?[2..502], &values[5..505]);
    Ok(())
}

/// Every update of a master against the same update of a plain buffer.
fn changed(
    check: &mut Check<'_>,
    (form, master): (&mut Weight, &mut Buffer),
    plain: &mut Buffer,
) -> Result<()> {
    let b = check.card;
    for (what, change) in CHANGES {
        let (mut state, mut plain_state) = (AdamMoments::new(b)?, AdamMoments::new(b)?);
        change(b, master, &mut state, std::slice::from_mut(form))?;
        change(b, plain, &mut plain_state, &mut [])?;
        let got = download(b, master)?;
        check.same(format!("masters: {what}"), &got, &download(b, plain)?);
        let weights: Vec<f32> = got.iter().map(|&x| rounded(x)).collect();
        check.same(format!("masters: derived after {what}"), &derived(b, form)?, &weights);
    }
    Ok(())
}

/// As sums of products give them: never -0.
fn sums(values: &[f32]) -> Vec<f32> {
    values.iter().map(|x| x + 0.0).collect()
}

/// Embedding lookup of some ids.
type Embedded<'a> = dyn Fn(&Buffer) -> Result<Vec<f32>> + 'a;

/// bf16 values as stored in files, and as f32.
fn halves() -> (Vec<u8>, Vec<f32>) {
    let round = |x: &f32| f32::from_bits((x.to_bits() + 0x8000) & 0xffff_0000);
    let whole: Vec<f32> = numbers().iter().map(round).collect();
    (whole.iter().flat_map(|x| ((x.to_bits() >> 16) as u16).to_le_bytes()).collect(), whole)
}

/// Written from bf16: the same as from f32.
fn stored(
    check: &mut Check<'_>,
    (form, master): (&mut Weight, &mut Buffer),
    embedded: &Embedded<'_>,
) -> Result<()> {
    let (b, (bytes, whole)) = (check.card, halves());
    b.write_bf16(master, 0, &bytes[..202])?;
    b.write_bf16(master, 101, &bytes[202..])?;
    check.same("masters: from bf16", &download(b, master)?, &whole);
    check.same("masters: derived from bf16", &derived(b, form)?, &sums(&whole));
    let mut plain = nan_filled(b, DType::F32, whole.len())?;
    b.write_bf16(&mut plain, 0, &bytes)?;
    check.same("masters: f32 from bf16", &download(b, &plain)?, &whole);
    check.same("masters: embedded from bf16", &embedded(master)?, &embedded(&plain)?);
    Ok(())
}

/// A weight that is its own master: writes are rounded once.
fn alone(check: &mut Check<'_>, embedded: &Embedded<'_>) -> Result<()> {
    let (b, (bytes, whole)) = (check.card, halves());
    let form = b.weight(ROWS, WIDTH, DType::Bf16, false)?;
    let Some(mut own) = b.rounded_master(&form)? else { return Ok(()) };
    for from_bf16 in [false, true] {
        match from_bf16 {
            true => b.write_bf16(&mut own, 0, &bytes)?,
            false => b.write(&mut own, 0, &numbers())?,
        }
        check.same("masters: rounded", &download(b, &own)?, &whole);
        check.same("masters: rounded and derived", &derived(b, &form)?, &sums(&whole));
        check.same(
            "masters: rounded and embedded",
            &embedded(&own)?,
            &embedded(&upload(b, DType::F32, &whole)?)?,
        );
    }
    Ok(())
}

/// Reads a GEMM weight by multiplying it with the identity.
fn derived(b: &dyn Backend, form: &Weight) -> Result<Vec<f32>> {
    let identity: Vec<f32> =
        (0..WIDTH * WIDTH).map(|i| if i % (WIDTH + 1) == 0 { 1.0 } else { 0.0 }).collect();
    let x = upload(b, DType::Bf16, &identity)?;
    let mut y = nan_filled(b, DType::F32, WIDTH * ROWS)?;
    b.linear(&x, form, None, &mut y)?;
    let y = download(b, &y)?;
    Ok((0..ROWS * WIDTH).map(|i| y[i % WIDTH * ROWS + i / WIDTH]).collect())
}

/// Optimizer moments.
struct AdamMoments([Buffer; 2]);

impl AdamMoments {
    fn new(b: &dyn Backend) -> Result<Self> {
        let zeros = || upload(b, DType::F32, &vec![0.0; ROWS * WIDTH]);
        Ok(AdamMoments([zeros()?, zeros()?]))
    }
}

/// An update of a master, and of the weight derived from it if they share memory.
type MasterUpdate = fn(&dyn Backend, &mut Buffer, &mut AdamMoments, &mut [Weight]) -> Result<()>;

const CHANGES: [(&str, MasterUpdate); 3] = [
    ("AdamW", |b, param, AdamMoments([first, second]), derived| {
        for step in 1..=3u64 {
            let grad = upload(b, DType::F32, &random(20 + step as u32, param.len()))?;
            let ranges = &[3..4000, 4000..param.len()];
            b.adamw(&mut [AdamWParam {
                op: adamw(step),
                ranges,
                param,
                grad: &grad,
                first,
                second,
                absmax: None,
                derived: derived.first_mut(),
            }])?;
        }
        Ok(())
    }),
    ("SGD", |b, param, AdamMoments([velocity, _]), _| {
        let grad = upload(b, DType::F32, &random(30, param.len()))?;
        let op = Sgd { lr: 0.1, momentum: 0.9, weight_decay: 0.01, grad_scale: 2.0 };
        b.sgd(op, 5..param.len(), param, &grad, Some(velocity))
    }),
    ("axpy", |b, param, _, _| {
        let mut step = upload(b, DType::F32, &random(31, param.len()))?;
        b.axpy(-0.25, param, &mut step)?;
        b.axpy(1e-3, &step, param)
    }),
];

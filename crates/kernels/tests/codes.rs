//! 8-bit moments against bitsandbytes: tables, codes and steps (`tools/make_code_fixtures.py`).
#![allow(clippy::unwrap_used)] // helpers of tests are tests

use ferrl_kernels::backend::{AdamW, AdamWParam, MemoryOps, OptimizerOps, VectorOps};
use ferrl_kernels::codes::{NF4, SIGNED, UNSIGNED, encode_nf4};
use ferrl_kernels::cpu::Cpu;
use ferrl_kernels::{Buffer, DType};
use std::collections::HashMap;

struct Fixture(HashMap<String, String>);

impl Fixture {
    fn read() -> Fixture {
        let path = concat!(env!("CARGO_MANIFEST_DIR"), "/tests/fixtures/codes.txt");
        let text = std::fs::read_to_string(path).unwrap();
        let line = |l: &str| l.split_once(' ').map(|(name, rest)| (name.to_string(), rest.to_string()));
        Fixture(text.lines().filter_map(line).collect())
    }
    fn floats(&self, name: &str) -> Vec<f32> {
        self.0[name].split(' ').map(|w| f32::from_bits(u32::from_str_radix(w, 16).unwrap())).collect()
    }
    fn codes(&self, name: &str) -> Vec<f32> {
        let digits = self.0[name].as_bytes().chunks(2);
        digits.map(|d| u8::from_str_radix(std::str::from_utf8(d).unwrap(), 16).unwrap() as f32).collect()
    }
}

fn upload(cpu: &Cpu, dtype: DType, values: &[f32]) -> Buffer {
    let mut buffer = cpu.alloc(dtype, values.len()).unwrap();
    cpu.write(&mut buffer, 0, values).unwrap();
    buffer
}

fn download(cpu: &Cpu, b: &Buffer) -> Vec<f32> {
    let mut values = vec![0.0; b.len()];
    cpu.read(b, 0, &mut values).unwrap();
    values
}

#[test]
fn tables_are_those_of_bitsandbytes_bit_for_bit() {
    let fixture = Fixture::read();
    for (name, table) in [("signed", &*SIGNED), ("unsigned", &*UNSIGNED)] {
        let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
        assert_eq!(bits(&table.values), bits(&fixture.floats(name)), "{name}");
    }
}

#[test]
fn nf4_is_that_of_bitsandbytes_bit_for_bit() {
    let (f, cpu) = (Fixture::read(), Cpu::new(Some(2)).unwrap());
    let bits = |v: &[f32]| v.iter().map(|x| x.to_bits()).collect::<Vec<_>>();
    assert_eq!(bits(&NF4.values), bits(&f.floats("nf4")));
    let x = f.floats("nf4_x");
    for block in [64, 128] {
        let (codes, absmax) = encode_nf4(&x, block);
        let numbers: Vec<f32> = codes.iter().map(|&c| c as f32).collect();
        assert_eq!(numbers, f.codes(&format!("nf4_codes{block}")), "codes in blocks of {block}");
        let want = f.floats(&format!("nf4_absmax{block}"));
        assert_eq!(bits(&absmax), bits(&want), "magnitudes in blocks of {block}");
        let mut out = upload(&cpu, DType::F32, &vec![9.0; x.len()]);
        let (codes, absmax) = (upload(&cpu, DType::U8, &numbers), upload(&cpu, DType::F32, &absmax));
        cpu.decode_nf4(&codes, &absmax, block, &mut out).unwrap();
        let back = download(&cpu, &out);
        assert_eq!(bits(&back), bits(&f.floats(&format!("nf4_back{block}"))), "back in blocks of {block}");
        // What was rounded once is not rounded again.
        let again = encode_nf4(&back, block);
        assert_eq!(again.0, encode_nf4(&x, block).0);
        assert_eq!(bits(&again.1), bits(&encode_nf4(&x, block).1));
    }
}

/// Each step from bitsandbytes' state: the same weights and codes, but for second moments that bitsandbytes rounds to zero.
#[test]
fn steps_are_those_of_bitsandbytes() {
    let f = Fixture::read();
    let mut kept = 0;
    for threads in [1, 2] {
        let cpu = Cpu::new(Some(threads)).unwrap();
        for step in 0..3 {
            let floats = |name: &str| upload(&cpu, DType::F32, &f.floats(&format!("{name}{step}")));
            let codes = |name: &str| upload(&cpu, DType::U8, &f.codes(&format!("{name}{step}")));
            let (mut w, g) = (floats("w"), floats("g"));
            let (mut m, mut v, mut m_absmax, mut v_absmax) =
                (codes("m"), codes("v"), floats("m_absmax"), floats("v_absmax"));
            let (lr, beta1, beta2, eps, weight_decay) = (1e-2, 0.9, 0.99, 1e-6, 0.1);
            let op = AdamW { lr, beta1, beta2, eps, weight_decay, step: step as u64 + 1, grad_scale: 0.5 };
            cpu.adamw(&mut [AdamWParam {
                op,
                ranges: &[0..256, 256..g.len()],
                param: &mut w,
                grad: &g,
                first: &mut m,
                second: &mut v,
                absmax: Some([&mut m_absmax, &mut v_absmax]),
                derived: None,
            }])
            .unwrap();
            let after = |name: &str| f.floats(&format!("{name}{}", step + 1));
            for (name, got) in [("w", &w), ("m_absmax", &m_absmax), ("v_absmax", &v_absmax)] {
                let pairs = download(&cpu, got).into_iter().zip(after(name));
                for (i, (got, want)) in pairs.enumerate() {
                    assert!((got - want).abs() <= 2e-6 * want.abs().max(1e-2), "{name} {i}: {got} {want}");
                }
            }
            for (name, got) in [("m", &m), ("v", &v)] {
                let want = f.codes(&format!("{name}{}", step + 1));
                for (i, (got, want)) in download(&cpu, got).into_iter().zip(want).enumerate() {
                    let lifted = name == "v" && (got, want) == (1.0, 0.0);
                    kept += usize::from(lifted);
                    assert!(got == want || lifted, "{name} {i} in step {step}: {got} {want}");
                }
            }
        }
    }
    assert!(kept > 0, "second moments that bitsandbytes rounds to zero");
}

/// A second moment that was rounded to zero, and no gradient in the next step: the first moment was divided by `eps` alone.
#[test]
fn a_small_second_moment_is_not_lost() {
    let cpu = Cpu::new(Some(1)).unwrap();
    let n = 256;
    let mut w = upload(&cpu, DType::F32, &vec![0.0; n]);
    let (mut m, mut v) = (upload(&cpu, DType::U8, &vec![127.0; n]), upload(&cpu, DType::U8, &vec![0.0; n]));
    let (mut m_absmax, mut v_absmax) = (upload(&cpu, DType::F32, &[0.0]), upload(&cpu, DType::F32, &[0.0]));
    for step in 1..=3 {
        let mut grad = vec![0.0; n];
        if step == 1 {
            (grad[0], grad[1]) = (1.0, 1e-4);
        }
        let grad = upload(&cpu, DType::F32, &grad);
        let (lr, beta1, beta2, eps, weight_decay) = (1e-3, 0.9, 0.999, 1e-8, 0.0);
        let op = AdamW { lr, beta1, beta2, eps, weight_decay, step, grad_scale: 1.0 };
        cpu.adamw(&mut [AdamWParam {
            op,
            ranges: std::slice::from_ref(&(0..n)),
            param: &mut w,
            grad: &grad,
            first: &mut m,
            second: &mut v,
            absmax: Some([&mut m_absmax, &mut v_absmax]),
            derived: None,
        }])
        .unwrap();
    }
    let w = download(&cpu, &w);
    assert!(w[1] < 0.0 && w[1] > -3e-3, "three steps of at most the learning rate, not {}", w[1]);
}

#[test]
fn ranges_that_cut_blocks_are_refused() {
    let cpu = Cpu::new(Some(1)).unwrap();
    let n = 700;
    let mut w = upload(&cpu, DType::F32, &vec![0.0; n]);
    let grad = upload(&cpu, DType::F32, &vec![0.0; n]);
    let (mut m, mut v) = (upload(&cpu, DType::U8, &vec![0.0; n]), upload(&cpu, DType::U8, &vec![0.0; n]));
    let (mut m_absmax, mut v_absmax) =
        (upload(&cpu, DType::F32, &[0.0; 3]), upload(&cpu, DType::F32, &[0.0; 3]));
    let (lr, beta1, beta2, eps, weight_decay) = (1e-3, 0.9, 0.999, 1e-8, 0.0);
    let op = AdamW { lr, beta1, beta2, eps, weight_decay, step: 1, grad_scale: 1.0 };
    for (range, fits) in [(0..n, true), (256..512, true), (0..300, false), (10..256, false), (512..n, true)] {
        let done = cpu.adamw(&mut [AdamWParam {
            op,
            ranges: std::slice::from_ref(&range),
            param: &mut w,
            grad: &grad,
            first: &mut m,
            second: &mut v,
            absmax: Some([&mut m_absmax, &mut v_absmax]),
            derived: None,
        }]);
        assert_eq!(done.is_ok(), fits, "{range:?}");
    }
}

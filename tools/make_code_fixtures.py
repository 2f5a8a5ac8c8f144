"""Makes crates/kernels/tests/fixtures/codes.txt: tables, codes and steps of 8-bit AdamW as bitsandbytes computes them.

    python tools/make_code_fixtures.py   # torch, bitsandbytes

A line is a name and numbers in hexadecimal: f32 as their bits, codes as bytes. bitsandbytes' CPU library looks 8-bit codes up
in a coarse index that misses the smallest ones; its CUDA kernels and its PyTorch code take the nearest, and so does this: the
update is bitsandbytes' CPU update with that one function replaced by its own exact operation.
"""

import pathlib

import bitsandbytes.backends.cpu.ops as cpu
import bitsandbytes.functional as F
import torch

OUT = pathlib.Path(__file__).resolve().parent.parent / "crates/kernels/tests/fixtures/codes.txt"
N, BLOCK, STEPS = 600, 256, 3
OPTIONS = dict(beta1=0.9, beta2=0.99, eps=1e-6, lr=1e-2, weight_decay=0.1, gnorm_scale=0.5)


def exact(values, table, absmax, codes, blocksize):
    """Codes of the nearest entries: what an operation on f64 falls back to."""
    q, most = torch.ops.bitsandbytes.quantize_blockwise.default(values.double(), table, blocksize)
    codes.copy_(q)
    absmax.copy_(most)


def main():
    torch.manual_seed(0)
    cpu._quant_blockwise_fp32_direct = exact
    lines = []

    def floats(name, x):
        lines.append(" ".join([name] + [f"{b & 0xFFFFFFFF:08x}" for b in x.view(torch.int32).tolist()]))

    def bytes_(name, x):
        lines.append(f"{name} {bytes(x.tolist()).hex()}")

    signed, unsigned = F.create_dynamic_map(True), F.create_dynamic_map(False)
    floats("signed", signed)
    floats("unsigned", unsigned)
    floats("nf4", F.get_4bit_type("nf4", device="cpu"))
    # NF4 in blocks of 64: normal numbers, a block of zeros, a last block that is not full.
    x = 0.02 * torch.randn(330)
    x[64:128] = 0.0
    for block in (64, 128):
        codes, absmax = torch.ops.bitsandbytes.quantize_4bit.default(x, block, "nf4", torch.uint8)
        back = torch.ops.bitsandbytes.dequantize_4bit.default(codes, absmax, block, "nf4", x.shape, torch.float32)
        bytes_(f"nf4_codes{block}", codes.flatten())
        floats(f"nf4_absmax{block}", absmax)
        floats(f"nf4_back{block}", back.flatten())
    floats("nf4_x", x)
    blocks = -(N // -BLOCK)
    w = torch.randn(N)
    m, v = torch.full((N,), 127, dtype=torch.uint8), torch.zeros(N, dtype=torch.uint8)
    m_absmax, v_absmax = torch.zeros(blocks), torch.zeros(blocks)
    for step in range(STEPS + 1):
        floats(f"w{step}", w)
        bytes_(f"m{step}", m)
        bytes_(f"v{step}", v)
        floats(f"m_absmax{step}", m_absmax)
        floats(f"v_absmax{step}", v_absmax)
        if step == STEPS:
            break
        # Numbers of many sizes; some of the last block have no gradient.
        g = torch.randn(N) ** 5
        g[-30:] = 0.0
        floats(f"g{step}", g)
        torch.ops.bitsandbytes.optimizer_update_8bit_blockwise(
            "adam", g, w, m, v, OPTIONS["beta1"], OPTIONS["beta2"], 0.0, 0.0, OPTIONS["eps"], step + 1, OPTIONS["lr"],
            signed, unsigned, m_absmax, v_absmax, OPTIONS["weight_decay"], OPTIONS["gnorm_scale"], False,
        )
    OUT.parent.mkdir(exist_ok=True)
    OUT.write_text("\n".join(lines) + "\n")


if __name__ == "__main__":
    main()

#!/usr/bin/env python3
"""transformers worker: greedy batched generation with a key/value cache from a small random Qwen2.

Protocol in common.py; the tokens counted are the new ones (batch x new). --dtype f32: all in float32; bf16: weights
and compute in bfloat16; amp: float32 weights with bfloat16 autocast. --cache static uses a preallocated cache, and
--compile (which implies it) compiles the forward pass.
"""
import argparse

import common


def main():
    parser = argparse.ArgumentParser(description="decoding worker")
    common.model_options(parser)
    parser.add_argument("--dtype", choices=["f32", "bf16", "amp"], default="f32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--cache", choices=["dynamic", "static"], default="dynamic")
    parser.add_argument("--batch", type=int, default=32)
    parser.add_argument("--prompt", type=int, default=16)
    parser.add_argument("--new", type=int, default=128)
    options = parser.parse_args()
    if options.dtype == "amp" and (options.compile or options.cache == "static"):
        parser.error("the static cache takes the type of the weights, autocast another: use f32 or bf16")
    answers = common.claim_stdout()
    common.limit_threads(options.threads)
    torch, transformers = common.need("torch", "transformers")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)

    model = common.small_qwen2(transformers, options, options.prompt + options.new).eval()
    if options.dtype == "bf16":
        model = model.to(torch.bfloat16)
    if options.compile:
        model.forward = torch.compile(model.forward)
    ids = (torch.arange(options.batch * options.prompt) * 7 % options.vocab).reshape(options.batch, options.prompt)
    mask = torch.ones_like(ids)
    settings = {"do_sample": False, "use_cache": True, "max_new_tokens": options.new, "min_new_tokens": options.new}
    if options.compile or options.cache == "static":
        settings["cache_implementation"] = "static"

    def generate():
        with torch.no_grad(), torch.autocast("cpu", dtype=torch.bfloat16, enabled=options.dtype == "amp"):
            out = model.generate(ids, attention_mask=mask, **settings)
        if tuple(out.shape) != (options.batch, options.prompt + options.new):
            raise ValueError(f"generate returned the shape {tuple(out.shape)}")

    common.serve_work(answers, generate, options.batch * options.new)


if __name__ == "__main__":
    main()

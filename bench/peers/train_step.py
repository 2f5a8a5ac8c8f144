#!/usr/bin/env python3
"""PyTorch + transformers worker: one training step (forward, cross-entropy, backward, AdamW) of a small random Qwen2.

Protocol in common.py. --dtype f32: all in float32; bf16: weights and compute in bfloat16; amp: float32 weights with
bfloat16 autocast. --compile wraps the model in torch.compile (the first step takes tens of seconds).
"""
import argparse

import common


def main():
    parser = argparse.ArgumentParser(description="training-step worker")
    common.model_options(parser)
    parser.add_argument("--dtype", choices=["f32", "bf16", "amp"], default="f32")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--fused", action="store_true", help="torch's fused AdamW")
    parser.add_argument("--batch", type=int, default=16)
    parser.add_argument("--seq", type=int, default=128)
    options = parser.parse_args()
    answers = common.claim_stdout()
    common.limit_threads(options.threads)
    torch, transformers = common.need("torch", "transformers")
    torch.set_num_threads(options.threads)
    torch.manual_seed(0)

    model = common.small_qwen2(transformers, options, options.seq).train()
    if options.dtype == "bf16":
        model = model.to(torch.bfloat16)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.01, fused=options.fused or None)
    forward = torch.compile(model) if options.compile else model
    tokens = torch.randint(0, options.vocab, (options.batch, options.seq + 1))
    inputs, targets = tokens[:, :-1].contiguous(), tokens[:, 1:].reshape(-1).contiguous()

    def step():
        with torch.autocast("cpu", dtype=torch.bfloat16, enabled=options.dtype == "amp"):
            logits = forward(input_ids=inputs, use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.reshape(-1, options.vocab).float(), targets)
        optimizer.zero_grad(set_to_none=True)
        loss.backward()
        optimizer.step()
        value = loss.item()
        if not value < float("inf"):
            raise ArithmeticError(f"the loss is {value}")

    common.serve_work(answers, step, options.batch * options.seq)


if __name__ == "__main__":
    main()

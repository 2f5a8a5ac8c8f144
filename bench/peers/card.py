#!/usr/bin/env python3
"""transformers on a graphics card: training steps or generation of a random model; one line of JSON.

    card.py train SIZE BATCH LENGTH eager|compiled
    card.py decode SEQUENCES PROMPT NEW

Weights, gradients and moments are bf16, AdamW is fused, attention is PyTorch's scaled dot product. Generation samples with a
static cache, which transformers compiles.
"""
import json
import sys
import time

SIZES = {
    "0.5B": ("Qwen2", dict(hidden_size=896, intermediate_size=4864, num_hidden_layers=24, num_attention_heads=14,
                           num_key_value_heads=2, rope_theta=1e6)),
    "1.5B": ("Qwen2", dict(hidden_size=1536, intermediate_size=8960, num_hidden_layers=28, num_attention_heads=12,
                           num_key_value_heads=2, rope_theta=1e6)),
    "0.6B": ("Qwen3", dict(hidden_size=1024, intermediate_size=3072, num_hidden_layers=28, num_attention_heads=16,
                           num_key_value_heads=8, head_dim=128)),
}
VOCABULARY = 151936


def model(torch, transformers, size):
    family, shape = SIZES[size]
    config = getattr(transformers, f"{family}Config")(vocab_size=VOCABULARY, max_position_embeddings=32768,
                                                      tie_word_embeddings=True, **shape)
    config._attn_implementation = "sdpa"
    torch.manual_seed(0)
    with torch.device("cuda"):
        return getattr(transformers, f"{family}ForCausalLM")(config).to(torch.bfloat16)


def timed(torch, work, warm, count):
    seconds = []
    for i in range(warm + count):
        torch.cuda.synchronize()
        start = time.perf_counter()
        work()
        torch.cuda.synchronize()
        if i >= warm:
            seconds.append(time.perf_counter() - start)
    return seconds


def main():
    what, *rest = sys.argv[1:]
    import torch
    import transformers
    transformers.logging.set_verbosity_error()
    if what == "train":
        size, batch, length, mode = rest[0], int(rest[1]), int(rest[2]), rest[3]
        net = model(torch, transformers, size)
        optimizer = torch.optim.AdamW(net.parameters(), lr=1e-6, fused=True)
        run = torch.compile(net) if mode == "compiled" else net

        def step():
            ids = torch.randint(0, VOCABULARY, (batch, length), device="cuda")
            run(input_ids=ids, labels=ids).loss.backward()
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        seconds = timed(torch, step, 3, 5)
    else:
        sequences, prompt, new = map(int, rest)
        net = model(torch, transformers, "0.5B").eval()
        ids = torch.randint(0, 150000, (sequences, prompt), device="cuda")
        with torch.inference_mode():
            seconds = timed(torch, lambda: net.generate(ids, max_new_tokens=new, min_new_tokens=new, do_sample=True,
                                                        pad_token_id=0, cache_implementation="static"), 1, 3)
    print(json.dumps({"seconds": seconds, "torch": torch.__version__, "transformers": transformers.__version__,
                      "peak_allocated_gib": torch.cuda.max_memory_allocated() / 2**30}))


if __name__ == "__main__":
    main()

"""Shapes that are measured on a graphics card: the rows of docs/performance.md."""
HALF = "--hidden 896 --layers 24 --heads 14 --kv-heads 2 --inter 4864 --vocab 151936"
LARGE = "--hidden 1536 --layers 28 --heads 12 --kv-heads 2 --inter 8960 --vocab 151936"
LONG = "--family qwen3 --hidden 1024 --layers 28 --heads 16 --kv-heads 8 --head-dim 128 --inter 3072 --vocab 151936"
# Name, options of `ferrl bench train`, and where the peer is asked too the same for its script, and its faster mode.
TRAIN = [
    ("0.5B, 16 x 1024", f"{HALF} --batch 16 --seq 1024", "0.5B 16 1024", "compiled"),
    ("1.5B, 16 x 1024", f"{LARGE} --batch 16 --seq 1024", "1.5B 16 1024", "compiled"),
    ("1.5B, two micro-batches", f"{LARGE} --batch 16 --seq 1024 --micro-batch 8192", None, None),
    ("Qwen3 0.6B, 2 x 8192", f"{LONG} --batch 2 --seq 8192", "0.6B 2 8192", "eager"),
]
TRAIN_TOKENS = 16384
# Sequences, new tokens, whether the peer is asked too.
DECODE = [(64, 256, False), (1, 256, False), (256, 1024, False), (256, 256, True)]
GRPO = f"{HALF} --prompts 32 --samples 8 --words 124 --new 512 --micro-batch 16384 --cache-mib 4096"

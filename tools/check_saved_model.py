#!/usr/bin/env python3
"""Loads a saved model folder with transformers and compares it with stored reference numbers.

    python tools/check_saved_model.py DIR REF [--tolerance 1e-5]

REF is one of
    - a .safetensors file with `ids.K` and `logits.K` (or `score.K`) for K = 0, 1, ... ;
    - a folder that holds such a file as reference.safetensors;
    - a .json file: {"sequences": [[ids], ...], "logits": [[[...]], ...]} (or "scores": [[...], ...]).
Prints the largest absolute difference and exits 1 when it is above the tolerance, when a weight is missing or left
over, or when a number is not finite; exits 2 when a package or a file is missing.
Needs torch, transformers and safetensors (pip install torch transformers safetensors).
"""
import argparse
import json
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")


def fail(message, code):
    print(message, file=sys.stderr)
    sys.exit(code)


try:
    import torch
    import transformers
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification
except ImportError as error:
    fail(f"{error}\nneeded: pip install torch transformers safetensors", 2)


def read_reference(path):
    """The token lists and what is expected of each, and whether these are scores."""
    if os.path.isdir(path):
        path = os.path.join(path, "reference.safetensors")
    if not os.path.isfile(path):
        fail(f"no such reference: {path}", 2)
    if path.endswith(".json"):
        with open(path) as file:
            data = json.load(file)
        scores = "scores" in data
        wanted = [torch.tensor(rows, dtype=torch.float32) for rows in data["scores" if scores else "logits"]]
        return data["sequences"], wanted, scores
    tensors = load_file(path)
    scores = "score.0" in tensors
    key = "score" if scores else "logits"
    count = sum(name.startswith("ids.") for name in tensors)
    return ([tensors[f"ids.{k}"].tolist() for k in range(count)],
            [tensors[f"{key}.{k}"].float() for k in range(count)], scores)


def main():
    parser = argparse.ArgumentParser(description="compare a saved model folder with reference numbers")
    parser.add_argument("dir")
    parser.add_argument("ref")
    parser.add_argument("--tolerance", type=float, default=1e-5)
    options = parser.parse_args()
    if not os.path.isfile(os.path.join(options.dir, "config.json")):
        fail(f"no config.json in {options.dir}", 2)
    torch.set_num_threads(1)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    sequences, wanted, scores = read_reference(options.ref)
    if not sequences or len(sequences) != len(wanted):
        fail(f"{options.ref}: {len(sequences)} sequences, {len(wanted)} results", 2)
    auto = AutoModelForSequenceClassification if scores else AutoModelForCausalLM
    model, info = auto.from_pretrained(options.dir, dtype=torch.float32, attn_implementation="eager",
                                       output_loading_info=True, local_files_only=True)
    model.eval()
    bad = {kind: sorted(map(str, info[kind])) for kind in ("missing_keys", "unexpected_keys", "mismatched_keys")
           if info.get(kind)}
    if bad:
        fail(f"weights do not fit: {bad}", 1)
    worst, where = 0.0, 0
    for k, (ids, want) in enumerate(zip(sequences, wanted)):
        with torch.no_grad():
            inputs = torch.tensor([ids])
            if scores:
                hidden = model.model(input_ids=inputs, use_cache=False).last_hidden_state[0]
                got = torch.nn.functional.linear(hidden, model.score.weight)[:, 0]
            else:
                got = model(input_ids=inputs, use_cache=False).logits[0]
        if got.shape != want.shape:
            fail(f"sequence {k}: shape {tuple(got.shape)}, the reference has {tuple(want.shape)}", 1)
        difference = float((got - want).abs().max())
        if not difference <= worst:  # also true for NaN
            worst, where = difference, k
        if difference != difference:
            break
    print(f"max abs difference {worst:.3e} (sequence {where} of {len(sequences)}, tolerance {options.tolerance:.0e})")
    sys.exit(0 if worst <= options.tolerance else 1)


if __name__ == "__main__":
    main()

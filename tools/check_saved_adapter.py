#!/usr/bin/env python3
"""Loads an adapter that Ferrl saved with PEFT and compares log-probabilities with `ferrl score`.

    ferrl score --model ADAPTER --input rows.jsonl --output scored.jsonl
    python tools/check_saved_adapter.py ADAPTER scored.jsonl [--tolerance 1e-4]

Prints the largest absolute difference; exits 1 when it is above the tolerance, or when PEFT finds a weight missing or left over.
Needs torch, transformers and peft.
"""
import argparse
import json
import os
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")

import torch
from peft import PeftConfig, PeftModel
from transformers import AutoModelForCausalLM


def main():
    parser = argparse.ArgumentParser(description="compare a saved adapter under PEFT with ferrl score")
    parser.add_argument("adapter")
    parser.add_argument("scored")
    parser.add_argument("--tolerance", type=float, default=1e-4)
    args = parser.parse_args()
    config = PeftConfig.from_pretrained(args.adapter)
    base = AutoModelForCausalLM.from_pretrained(config.base_model_name_or_path, dtype=torch.float32)
    model = PeftModel.from_pretrained(base, args.adapter)
    with open(os.path.join(args.adapter, "adapter_model.safetensors"), "rb") as file:
        names = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    # Weights, not modules: PEFT holds the A of all experts of a layer as one.
    sizes = (names[name]["shape"] for name in names if name.endswith("lora_A.weight"))
    stored = sum(rows * columns for rows, columns in sizes)
    there = sum(value.numel() for name, value in model.named_parameters() if ".lora_A." in name)
    worst, moved = 0.0, 0.0
    with open(args.scored) as file:
        for row in map(json.loads, file):
            ids = torch.tensor([row["ids"]])

            def logps():
                with torch.no_grad():
                    logs = torch.log_softmax(model(input_ids=ids).logits[0].double(), dim=-1)
                return logs[:-1].gather(1, ids[0, 1:, None])[:, 0]

            want = torch.tensor(row["logprobs"], dtype=torch.float64)
            worst = max(worst, float((logps() - want).abs().max()))
            with model.disable_adapter():
                moved = max(moved, float((logps() - want).abs().max()))
    print(f"largest difference {worst:.2e}; without the adapter {moved:.2e}; {stored} weights of A stored, {there} in PEFT's model")
    sys.exit(int(worst > args.tolerance or stored != there))


if __name__ == "__main__":
    main()

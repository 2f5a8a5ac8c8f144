"""How far transformers in bf16 is from transformers in f32, on the fixture models: the yardstick for ours.

    python tools/make_bf16_errors.py

Writes crates/engine/tests/fixtures/bf16_errors.json: for each case and kind of number (log-probability and entropy, or score) the worst
error and the root of the mean square error, relative to the larger of 1 and the number's size.
"""
import json
import pathlib

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

ROOT = pathlib.Path(__file__).resolve().parent.parent / "crates/engine/tests/fixtures"


def errors(case):
    reference = load_file(case / "reference.safetensors")
    score = "score.0" in reference
    kind = AutoModelForSequenceClassification if score else AutoModelForCausalLM
    model = kind.from_pretrained(case, dtype=torch.bfloat16, attn_implementation="eager",
                                 experts_implementation="eager").eval()
    far = {}
    for k in range(len([name for name in reference if name.startswith("ids.")])):
        ids = reference[f"ids.{k}"][None]
        if score:
            got = {"score": model.score(model.model(ids).last_hidden_state)[0, :, 0].float()}
        else:
            logp = model(ids).logits[0, :-1].float().log_softmax(-1)
            got = {"logp": logp.gather(1, ids[0, 1:, None])[:, 0], "entropy": -(logp.exp() * logp).sum(-1)}
        for name, values in got.items():
            want = reference.get(f"{name}.{k}")
            if want is not None:
                want = want[:len(values)]
                far.setdefault(name, []).append((values - want).abs() / want.abs().clamp(min=1))
    far = {name: torch.cat(all) for name, all in far.items()}
    return {name: {"worst": x.max().item(), "rms": x.square().mean().sqrt().item()} for name, x in far.items()}


def main():
    torch.set_num_threads(1)
    with torch.no_grad():
        all = {case.name: errors(case) for case in sorted((ROOT / "models").iterdir())}
    (ROOT / "bf16_errors.json").write_text(json.dumps(all, indent=1, sort_keys=True) + "\n")


if __name__ == "__main__":
    main()

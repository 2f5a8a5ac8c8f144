"""How far transformers in bf16 is from transformers in f32, on the fixture models: the yardstick for ours.

    python tools/make_bf16_errors.py

Writes crates/engine/tests/fixtures/bf16_errors.json: for each case the worst error of a log-probability (or score),
relative to the larger of 1 and its size.
"""
import json
import pathlib

import torch
from safetensors.torch import load_file
from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification

ROOT = pathlib.Path(__file__).resolve().parent.parent / "crates/engine/tests/fixtures"


def worst_error(case):
    reference = load_file(case / "reference.safetensors")
    score = "score.0" in reference
    kind = AutoModelForSequenceClassification if score else AutoModelForCausalLM
    model = kind.from_pretrained(case, dtype=torch.bfloat16, attn_implementation="eager",
                                 experts_implementation="eager").eval()
    worst = 0.0
    for k in range(len([name for name in reference if name.startswith("ids.")])):
        ids, want = reference[f"ids.{k}"][None], reference.get(f"{'score' if score else 'logp'}.{k}")
        if want is None:
            continue
        if score:
            got = model.score(model.model(ids).last_hidden_state)[0, :, 0].float()
        else:
            logp = model(ids).logits[0, :-1].float().log_softmax(-1)
            got = logp.gather(1, ids[0, 1:, None])[:, 0]
        worst = max(worst, ((got - want).abs() / want.abs().clamp(min=1)).max().item())
    return worst


def main():
    torch.set_num_threads(1)
    with torch.no_grad():
        errors = {case.name: worst_error(case) for case in sorted((ROOT / "models").iterdir())}
    (ROOT / "bf16_errors.json").write_text(json.dumps(errors, indent=1) + "\n")


if __name__ == "__main__":
    main()

"""Twelve AdamW steps of a tiny model in PyTorch: losses, gradient norms and final weights.

    python tools/make_optimizer_fixtures.py

Writes crates/engine/tests/fixtures/adamw.json from the fixture model `qwen2`, with clipping, weight decay on
matrices only and a cosine schedule with warm-up, on three fixed sequences a step.
"""
import json
import pathlib

import torch
from transformers import AutoModelForCausalLM, get_cosine_schedule_with_warmup

ROOT = pathlib.Path(__file__).resolve().parent.parent / "crates/engine/tests/fixtures"
STEPS, LR = 12, 1e-2


def sequences(step, vocab):
    return [[(step * 31 + s * 17 + i * i * 7 + i) % vocab for i in range(5 + 4 * s)] for s in range(3)]


def main():
    torch.manual_seed(0)
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(ROOT / "models/qwen2", attn_implementation="eager", dtype=torch.float32)
    model.train()
    matrices = [p for p in model.parameters() if p.dim() > 1]
    vectors = [p for p in model.parameters() if p.dim() <= 1]
    groups = [{"params": matrices, "weight_decay": 0.1}, {"params": vectors, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=LR, betas=(0.9, 0.99), eps=1e-8)
    schedule = get_cosine_schedule_with_warmup(optimizer, 3, STEPS)
    losses, norms = [], []
    for step in range(STEPS):
        batch = sequences(step, model.config.vocab_size)
        tokens = sum(len(s) - 1 for s in batch)
        loss = 0.0
        for ids in batch:
            ids = torch.tensor([ids])
            logp = model(ids).logits[0, :-1].log_softmax(-1)
            loss = loss - logp.gather(1, ids[0, 1:, None]).sum() / tokens
        optimizer.zero_grad()
        loss.backward()
        norms.append(torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0).item())
        optimizer.step()
        schedule.step()
        losses.append(loss.item())
    final = model.model.layers[0].mlp.down_proj.weight.detach().flatten()[:32].tolist()
    out = dict(steps=STEPS, lr=LR, losses=losses, grad_norms=norms, down_proj_0=final, torch=torch.__version__)
    (ROOT / "adamw.json").write_text(json.dumps(out, indent=1) + "\n")


if __name__ == "__main__":
    main()

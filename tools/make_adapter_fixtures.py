"""Makes crates/engine/tests/fixtures/adapters: LoRA adapters as PEFT writes them, with what PEFT and PyTorch compute.

    python tools/make_adapter_fixtures.py [NAME ...]   # torch, transformers, peft, safetensors

Every adapter sits on a model of crates/engine/tests/fixtures/models. Beside adapter_config.json and
adapter_model.safetensors each directory has reference.safetensors: the sequences, their log-probabilities (or scores), weights
of a loss, the gradients of A and B, and A, B and the log-probabilities after three steps of AdamW.

Those of crates/engine/tests/fixtures/adapters_read have sequences and log-probabilities alone: PEFT's modules are not the
decoder's there.
"""

import json
import os
import shutil
import sys

import torch
from peft import LoraConfig, PeftModel, TaskType, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, AutoModelForImageTextToText, AutoModelForSequenceClassification

ROOT = os.path.join(os.path.dirname(__file__), "..", "crates", "engine", "tests", "fixtures")
OPTIMIZER = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
STEPS = 3

CASES = {
    # every linear layer of a model whose biases stay as they are
    "qwen2": ("qwen2", {"r": 4, "lora_alpha": 6, "target_modules": "all-linear"}),
    # q_proj and v_proj alone: a part of the decoder's fused matrix has no adapter
    "llama3": ("llama3", {"r": 3, "lora_alpha": 8, "target_modules": ["q_proj", "v_proj", "down_proj"],
                          "rank_pattern": {"v_proj": 2}, "alpha_pattern": {"layers.0.self_attn.q_proj": 1}}),
    # a regular expression, rank-stabilised, heads with norms of their own
    "qwen3": ("qwen3", {"r": 4, "lora_alpha": 4, "use_rslora": True, "target_modules": r".*\.(k_proj|o_proj|up_proj)"}),
    # post norms, one layer
    "gemma2": ("gemma2", {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "o_proj", "gate_proj", "down_proj"],
                          "layers_to_transform": [1]}),
    # modules that are fused in the files too
    "phi3": ("phi3", {"r": 4, "lora_alpha": 8, "target_modules": "all-linear", "exclude_modules": ["o_proj"]}),
    # matrices stored the other way round, biases trained
    "gpt2": ("gpt2", {"r": 4, "lora_alpha": 8, "target_modules": ["c_attn", "c_proj", "c_fc"], "bias": "all",
                      "fan_in_fan_out": True}),
    # rows of queries and keys stored in another order than they are computed in
    "glm4": ("glm4", {"r": 4, "lora_alpha": 8, "target_modules": ["q_proj", "k_proj", "gate_up_proj"]}),
    # a head that is trained whole
    "llama_score": ("llama_score", {"r": 4, "lora_alpha": 8, "target_modules": "all-linear"}),
}

# Names that are not the decoder's: experts in stacks (and routers), a multimodal base, a block of layers, a regular expression that
# looks ahead.
READ = {
    "experts": ("qwen3_moe", {"r": 3, "lora_alpha": 5, "target_modules": "all-linear"}),
    "experts_by_parameter": ("qwen3_moe_mixed", {
        "r": 2, "lora_alpha": 5, "target_modules": ["q_proj"], "use_rslora": True,
        "target_parameters": ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"],
        "rank_pattern": {r".*\.2\.mlp\.experts\.down_proj": 4}, "alpha_pattern": {"gate_up_proj": 3}}),
    "experts_attention": ("qwen3_moe", {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj"]}),
    "multimodal": ("gemma3_vision", {
        "r": 3, "lora_alpha": 4, "target_modules": ["q_proj", "v_proj", "down_proj"], "rank_pattern": {"layers.1.mlp.down_proj": 2},
        "alpha_pattern": {"model.language_model.layers.0.self_attn.v_proj": 7}, "modules_to_save": ["language_model.norm"]}),
    "whole_block": ("llama3", {"r": 2, "lora_alpha": 4, "target_modules": ["q_proj"], "modules_to_save": ["0.mlp", "lm_head"]}),
    "look_ahead": ("llama3", {"r": 2, "lora_alpha": 4, "target_modules": r"(?!.*mlp).*_proj"}),
}

# Of those that were there first: their order then.
SEEDS = {name: 7000 + i for i, name in enumerate(["qwen2", "llama3", "qwen3", "gemma2", "phi3", "gpt2", "llama_score", "glm4"])}


def numbers(model, ids, score):
    """A number for each position: the log-probability of the next token, or the score."""
    inputs = torch.tensor([ids])
    if score:
        inner = model.base_model.model
        hidden = inner.model(input_ids=inputs, use_cache=False).last_hidden_state[0]
        return inner.score(hidden)[:, 0]
    logs = torch.log_softmax(model(input_ids=inputs, use_cache=False).logits[0], dim=-1)
    return logs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def name_of(parameter):
    """The name in adapter_model.safetensors."""
    return parameter.replace(".default", "").replace(".modules_to_save", "")


def save(model, folder, base):
    shutil.rmtree(folder, ignore_errors=True)
    model.save_pretrained(folder)
    os.remove(os.path.join(folder, "README.md"))
    path = os.path.join(folder, "adapter_config.json")
    with open(path) as file:
        config = json.load(file)
    config["base_model_name_or_path"] = f"../../models/{base}"
    for key in ("target_modules", "exclude_modules", "modules_to_save", "target_parameters"):
        if isinstance(config.get(key), list):
            config[key].sort()
    with open(path, "w") as file:
        json.dump(config, file, indent=1)
        file.write("\n")


def make_read(name):
    base, settings = READ[name]
    source = os.path.join(ROOT, "models", base)
    eager = {"attn_implementation": "eager", **({"experts_implementation": "eager"} if "moe" in base else {})}
    kind = AutoModelForImageTextToText if base.endswith("_vision") else AutoModelForCausalLM
    model = kind.from_pretrained(source, dtype=torch.float32, **eager)
    model = get_peft_model(model, LoraConfig(task_type=TaskType.CAUSAL_LM, lora_dropout=0.0, **settings))
    generator = torch.Generator().manual_seed(7100 + sorted(READ).index(name))
    for parameter, value in model.named_parameters():
        if value.requires_grad:
            value.data = value.data * ("lora_" not in parameter) + 0.2 * torch.randn(value.shape, generator=generator)
    folder = os.path.join(ROOT, "adapters_read", name)
    save(model, folder, base)
    model = PeftModel.from_pretrained(kind.from_pretrained(source, dtype=torch.float32, **eager), folder).eval()
    tensors, vocab = {}, 60
    for k, length in enumerate((9, 2, 17)):
        ids = torch.randint(3, vocab, (length,), generator=generator).tolist()
        tensors[f"ids.{k}"] = torch.tensor(ids, dtype=torch.int64)
        with torch.no_grad():
            tensors[f"out.{k}"] = numbers(model, ids, False).contiguous().clone()
    save_file(tensors, os.path.join(folder, "reference.safetensors"), metadata={"format": "pt"})
    print(name, sum(os.path.getsize(os.path.join(folder, f)) for f in os.listdir(folder)), "bytes")


def make(name):
    base, settings = CASES[name]
    source = os.path.join(ROOT, "models", base)
    score = base.endswith("_score")
    kind = AutoModelForSequenceClassification if score else AutoModelForCausalLM
    model = kind.from_pretrained(source, dtype=torch.float32, attn_implementation="eager")
    task = TaskType.SEQ_CLS if score else TaskType.CAUSAL_LM
    model = get_peft_model(model, LoraConfig(task_type=task, lora_dropout=0.0, **settings))
    model.eval()
    generator = torch.Generator().manual_seed(SEEDS[name])
    for parameter, value in model.named_parameters():
        if "lora_" in parameter:
            value.data = 0.3 * torch.randn(value.shape, generator=generator)
    vocab = model.config.vocab_size
    sequences = [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in (9, 2, 17)]
    tensors, trained = {}, {n: p for n, p in model.named_parameters() if p.requires_grad}
    for k, ids in enumerate(sequences):
        tensors[f"ids.{k}"] = torch.tensor(ids, dtype=torch.int64)
        with torch.no_grad():
            tensors[f"out.{k}"] = numbers(model, ids, score)
        tensors[f"w.{k}"] = torch.randn(len(ids) - (not score), generator=generator)

    def loss():
        pairs = enumerate(sequences)
        return sum((tensors[f"w.{k}"] * numbers(model, ids, score)).sum() for k, ids in pairs)

    folder = os.path.join(ROOT, "adapters", name)
    save(model, folder, base)

    groups = [{"params": [p for p in trained.values() if p.dim() > 1]},
              {"params": [p for p in trained.values() if p.dim() == 1], "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, **OPTIMIZER)
    for step in range(STEPS):
        optimizer.zero_grad()
        loss().backward()
        if step == 0:
            for parameter, value in trained.items():
                tensors[f"grad.{name_of(parameter)}"] = value.grad.clone()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
    for parameter, value in trained.items():
        tensors[f"after.{name_of(parameter)}"] = value.data
    with torch.no_grad():
        for k, ids in enumerate(sequences):
            tensors[f"out_after.{k}"] = numbers(model, ids, score)
    tensors = {key: value.detach().contiguous().clone() for key, value in tensors.items()}
    assert all(bool(torch.isfinite(value).all()) for value in tensors.values())
    save_file(tensors, os.path.join(folder, "reference.safetensors"), metadata={"format": "pt"})
    print(name, sum(os.path.getsize(os.path.join(folder, f)) for f in os.listdir(folder)), "bytes")


if __name__ == "__main__":
    for case in sys.argv[1:] or [*CASES, *READ]:
        make(case) if case in CASES else make_read(case)

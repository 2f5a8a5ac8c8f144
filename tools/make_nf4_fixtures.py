"""Makes crates/engine/tests/fixtures/nf4: a model that bitsandbytes quantised to NF4, and PEFT's LoRA on it.

    python tools/make_nf4_fixtures.py [NAME ...]   # torch, transformers, peft, bitsandbytes, safetensors

`plain` is a small Llama in f32, `base` the same as transformers saves it with a BitsAndBytesConfig (NF4, double quantisation),
`adapter` an adapter of PEFT on `base`. reference.safetensors has what bitsandbytes makes of every quantised weight (in f32, and
codes without double quantisation), and of the adapter sequences, log-probabilities, weights of a loss, gradients of A and B, and A, B
and log-probabilities after three steps of AdamW. (NAME: f32)

`bf16` and `f16` are models that were in these types before they were quantised, `gpt2` one whose matrices transformers holds
transposed; reference.safetensors there has what bitsandbytes makes of every quantised weight, in f32.
"""

import json
import os
import shutil
import sys
import tempfile

import bitsandbytes.functional as F
import torch
from peft import LoraConfig, TaskType, get_peft_model
from safetensors.torch import save_file
from transformers import AutoModelForCausalLM, BitsAndBytesConfig, GPT2Config, LlamaConfig, LlamaForCausalLM

ROOT = os.path.join(os.path.dirname(__file__), "..", "crates", "engine", "tests", "fixtures", "nf4")
OPTIMIZER = {"lr": 1e-2, "betas": (0.9, 0.999), "eps": 1e-8, "weight_decay": 0.01}
STEPS = 3


def logps(model, ids):
    logs = torch.log_softmax(model(input_ids=torch.tensor([ids]), use_cache=False).logits[0], dim=-1)
    return logs[:-1].gather(1, torch.tensor(ids[1:])[:, None])[:, 0]


def name_of(parameter):
    return parameter.replace(".default", "")


# Rows are whole blocks of 64: on a CPU bitsandbytes 0.50 dequantises other rows of bf16 and f16 with the scale of another block
# (the blocks of a file follow each other through the whole matrix).
OTHERS = {
    "bf16": (torch.bfloat16, lambda: LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, initializer_range=0.2, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2)),
    "f16": (torch.float16, lambda: LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=128, num_hidden_layers=1, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, initializer_range=0.2, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2)),
    "gpt2": (torch.bfloat16, lambda: GPT2Config(
        vocab_size=64, n_positions=64, n_embd=64, n_layer=1, n_head=2, initializer_range=0.2, bos_token_id=1, eos_token_id=2)),
}


def make_other(name):
    torch.manual_seed(1)
    dtype, config = OTHERS[name]
    folder = os.path.join(ROOT, name)
    shutil.rmtree(folder, ignore_errors=True)
    with tempfile.TemporaryDirectory() as plain:
        AutoModelForCausalLM.from_config(config()).to(dtype).save_pretrained(plain)
        quantised = BitsAndBytesConfig(
            load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=dtype)
        model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=quantised, dtype=dtype, device_map="cpu")
    model.save_pretrained(folder)
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype, device_map="cpu")
    weights = [(n, p) for n, p in model.named_parameters() if type(p).__name__ == "Params4bit"]
    values = {f"value.{n}": F.dequantize_4bit(p.data, p.quant_state) for n, p in weights}
    assert all(value.dtype == dtype for value in values.values())
    save_file({n: v.float().contiguous() for n, v in values.items()}, os.path.join(folder, "reference.safetensors"),
              metadata={"format": "pt"})


def make_f32():
    torch.manual_seed(0)
    plain, base, folder = (os.path.join(ROOT, name) for name in ("plain", "base", "adapter"))
    for made in (plain, base, folder):
        shutil.rmtree(made, ignore_errors=True)
    config = LlamaConfig(
        vocab_size=64, hidden_size=64, intermediate_size=96, num_hidden_layers=2, num_attention_heads=4, num_key_value_heads=2,
        max_position_embeddings=64, initializer_range=0.2, tie_word_embeddings=True, bos_token_id=1, eos_token_id=2,
    )
    LlamaForCausalLM(config).save_pretrained(plain)
    quantised = BitsAndBytesConfig(
        load_in_4bit=True, bnb_4bit_quant_type="nf4", bnb_4bit_use_double_quant=True, bnb_4bit_compute_dtype=torch.float32
    )
    model = AutoModelForCausalLM.from_pretrained(plain, quantization_config=quantised, dtype=torch.float32, device_map="cpu",
                                                 attn_implementation="eager")
    model.save_pretrained(base)
    tensors = {}
    original = LlamaForCausalLM.from_pretrained(plain, dtype=torch.float32).state_dict()
    for name, parameter in model.named_parameters():
        if type(parameter).__name__ == "Params4bit":
            tensors[f"value.{name}"] = F.dequantize_4bit(parameter.data, parameter.quant_state)
            codes, state = F.quantize_4bit(original[name], blocksize=64, quant_type="nf4")
            tensors[f"codes.{name}"], tensors[f"absmax.{name}"] = codes.flatten(), state.absmax

    settings = LoraConfig(task_type=TaskType.CAUSAL_LM, lora_dropout=0.0, r=4, lora_alpha=8, target_modules="all-linear")
    model = get_peft_model(model, settings)
    model.eval()
    generator = torch.Generator().manual_seed(7)
    for parameter, value in model.named_parameters():
        if "lora_" in parameter:
            value.data = 0.3 * torch.randn(value.shape, generator=generator)
    trained = {n: p for n, p in model.named_parameters() if p.requires_grad}
    sequences = [torch.randint(3, 64, (n,), generator=generator).tolist() for n in (9, 2, 17)]
    for k, ids in enumerate(sequences):
        tensors[f"ids.{k}"] = torch.tensor(ids, dtype=torch.int64)
        with torch.no_grad():
            tensors[f"out.{k}"] = logps(model, ids)
        tensors[f"w.{k}"] = torch.randn(len(ids) - 1, generator=generator)
    model.save_pretrained(folder)
    os.remove(os.path.join(folder, "README.md"))
    path = os.path.join(folder, "adapter_config.json")
    with open(path) as file:
        config = json.load(file)
    config["base_model_name_or_path"] = "../base"
    config["target_modules"].sort()
    with open(path, "w") as file:
        json.dump(config, file, indent=1)
        file.write("\n")

    optimizer = torch.optim.AdamW(trained.values(), **OPTIMIZER)
    for step in range(STEPS):
        optimizer.zero_grad()
        sum((tensors[f"w.{k}"] * logps(model, ids)).sum() for k, ids in enumerate(sequences)).backward()
        if step == 0:
            for parameter, value in trained.items():
                tensors[f"grad.{name_of(parameter)}"] = value.grad.clone()
        torch.nn.utils.clip_grad_norm_(trained.values(), 1.0)
        optimizer.step()
    for parameter, value in trained.items():
        tensors[f"after.{name_of(parameter)}"] = value.data
    with torch.no_grad():
        for k, ids in enumerate(sequences):
            tensors[f"out_after.{k}"] = logps(model, ids)
    tensors = {key: value.detach().contiguous().clone() for key, value in tensors.items()}
    save_file(tensors, os.path.join(folder, "reference.safetensors"), metadata={"format": "pt"})


if __name__ == "__main__":
    torch.set_num_threads(1)
    for case in sys.argv[1:] or ["f32", *OTHERS]:
        make_f32() if case == "f32" else make_other(case)

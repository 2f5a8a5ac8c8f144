#!/usr/bin/env python3
"""Makes the tiny random models and reference numbers the engine's parity tests read.

    python tools/make_model_fixtures.py                 # every case
    python tools/make_model_fixtures.py qwen3 gemma2    # some cases
    python tools/make_model_fixtures.py --out DIR       # somewhere else (to compare with the committed files)

Needs torch, transformers and safetensors (pip install torch transformers safetensors). Nothing is downloaded: each
model comes from a config and a fixed seed. What is computed: float32, eager attention, one sequence at a time, no
padding, no cache. Weights of the cases stored in bf16 or f16 are rounded to that type before anything is computed.

A case is a folder in the Hugging Face layout (config.json, generation_config.json, *.safetensors) plus

reference.safetensors (K = index of the sequence, from 0; V = vocabulary size)
    ids.K           i64 [len]       the tokens
    logits.K        f32 [len, V]    language models only
    logp.K          f32 [len-1]     log p(token i+1 | tokens up to i), absent where len is 1
    entropy.K       f32 [len]       entropy of the next-token distribution, in nats
    logp_temp.K     f32 [len-1]     logp after division of the logits by `temperature`, one sequence only
    entropy_temp.K  f32 [len]       likewise
    w.K, u.K        f32 [len-1]     the factors of the loss, absent where len is 1
    score.K         f32 [len]       score models only: score.weight times the final hidden state, at every position
    c.K             f32 [len]       score models only: the factors of the loss
    grad.NAME       f32             gradient of the loss by parameter NAME; a tied head is counted in the embedding
loss, language models:  sum over K and i < len-1 of  w[i] * logp[i] + 0.1 * u[i] * entropy[i]
loss, score models:     sum over K and i of  c[i] * score[i]

reference.json
    case, architecture, kind ("causal_lm" or "sequence_classification"), model_type, vocab_size, parameters, seed,
    storage ("f32", "bf16" or "f16"), tied (bool), sequences (list of token lists), loss, grad_names, versions;
    language models: temperature, temperature_sequence (K), greedy (list of {sequence, tokens, min_gap}: 12 tokens by
    argmax over full forward passes, min_gap being the smallest lead of the best logit over the second);
    score models: pooled (one number per sequence: the score at the last token, as transformers returns it)
"""
import argparse
import json
import os
import shutil
import sys

os.environ.setdefault("OMP_NUM_THREADS", "1")
try:
    import torch
    import transformers
    from safetensors.torch import save_file
    from transformers import (
        AutoModelForCausalLM, AutoModelForSequenceClassification, Gemma2Config, Gemma3Config,
        Gemma3ForConditionalGeneration, Gemma3TextConfig, Glm4Config, GPT2Config, GraniteConfig, LlamaConfig,
        MistralConfig, Olmo2Config, Phi3Config, Qwen2Config, Qwen3Config, Qwen3MoeConfig, SiglipVisionConfig,
        SmolLM3Config)
except ImportError as error:
    sys.exit(f"{error}\nneeded: pip install torch transformers safetensors")

ROOT = os.path.join(os.path.dirname(os.path.abspath(__file__)), "..")
DEFAULT_OUT = os.path.normpath(os.path.join(ROOT, "crates/engine/tests/fixtures/models"))
NEW_TOKENS = 12
TEMPERATURE = 0.7
MIN_GAP = 4e-3
MIN_ROUTE_GAP = 0.03
ENTROPY_FACTOR = 0.1
EAGER = {"attn_implementation": "eager", "experts_implementation": "eager"}
STORAGE = {"f32": torch.float32, "bf16": torch.bfloat16, "f16": torch.float16}


class Case:
    """One model: a config, how it is stored, and the lengths of its sequences."""

    def __init__(self, config, lengths, storage="f32", shard=None, legacy=False, score=False, wrap=None):
        self.config, self.lengths, self.storage = config, lengths, storage
        self.shard, self.legacy, self.score, self.wrap = shard, legacy, score, wrap


def rope(theta=10000.0, kind="default", **more):
    return {"rope_type": kind, "rope_theta": theta, **more}


def common(**more):
    return {"bos_token_id": 1, "eos_token_id": 2, "tie_word_embeddings": False, "max_position_embeddings": 64, **more}


def with_vision(text):
    """A Gemma 3 that sees, around a text model: its weights, and a tiny vision tower."""
    vision = SiglipVisionConfig(hidden_size=8, intermediate_size=12, num_hidden_layers=1, num_attention_heads=2,
                                image_size=8, patch_size=4)
    config = Gemma3Config(text_config=text.config.to_dict(), vision_config=vision.to_dict(), mm_tokens_per_image=4,
                          boi_token_index=80, eoi_token_index=81, image_token_index=82, tie_word_embeddings=True)
    torch.manual_seed(0)
    whole = Gemma3ForConditionalGeneration(config)
    whole.model.language_model.load_state_dict(text.model.state_dict())
    return whole


# `legacy` writes the config the way checkpoints made before transformers 5 have it: rope_theta and rope_scaling
# beside each other, torch_dtype, no layer_types. Both forms are common, so both are here.
CASES = {
    "llama2": lambda: Case(LlamaConfig(**common(
        vocab_size=83, hidden_size=30, intermediate_size=53, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=3, rms_norm_eps=1e-5, rope_parameters=rope())), [1, 5, 14, 23], legacy=True),
    "llama3": lambda: Case(LlamaConfig(**common(
        vocab_size=97, hidden_size=36, intermediate_size=61, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=16, rms_norm_eps=1e-5, max_position_embeddings=2048,
        # head_dim 16 has wavelengths on both sides of, and between, the two bounds 256/4 and 256/1
        rope_parameters=rope(10000.0, "llama3", factor=8.0, low_freq_factor=1.0, high_freq_factor=4.0,
                             original_max_position_embeddings=256))), [2, 9, 24], legacy=True),
    "llama_linear": lambda: Case(LlamaConfig(**common(
        vocab_size=71, hidden_size=27, intermediate_size=41, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, head_dim=10, attention_bias=True, mlp_bias=True, tie_word_embeddings=True,
        rope_parameters=rope(5000.0, "linear", factor=2.5))), [1, 7, 21]),
    "llama_yarn": lambda: Case(LlamaConfig(**common(
        vocab_size=79, hidden_size=33, intermediate_size=47, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, head_dim=14, max_position_embeddings=256,
        # with these the ramp runs from frequency 2 to frequency 5 of the 7
        rope_parameters=rope(100.0, "yarn", factor=4.0, original_max_position_embeddings=64, beta_fast=2.0,
                             beta_slow=0.5))), [2, 11, 24], legacy=True),
    "llama_sharded": lambda: Case(LlamaConfig(**common(
        vocab_size=101, hidden_size=32, intermediate_size=59, num_hidden_layers=3, num_attention_heads=4,
        num_key_value_heads=2, rope_parameters=rope(500000.0))), [2, 6, 19], storage="bf16", shard="16KB"),
    "qwen2": lambda: Case(Qwen2Config(**common(
        vocab_size=113, hidden_size=40, intermediate_size=67, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, rope_parameters=rope(1000000.0))), [1, 8, 24], legacy=True),
    "qwen2_sliding": lambda: Case(Qwen2Config(**common(
        vocab_size=67, hidden_size=36, intermediate_size=43, num_hidden_layers=3, num_attention_heads=6,
        num_key_value_heads=2, use_sliding_window=True, sliding_window=5, max_window_layers=1,
        rope_parameters=rope(10000.0))), [2, 5, 6, 24], legacy=True),
    "qwen3": lambda: Case(Qwen3Config(**common(
        vocab_size=89, hidden_size=35, intermediate_size=57, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=14, tie_word_embeddings=True, rms_norm_eps=1e-6,
        rope_parameters=rope(1000000.0))), [1, 3, 12, 24]),
    "mistral": lambda: Case(MistralConfig(**common(
        vocab_size=73, hidden_size=31, intermediate_size=51, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=10, sliding_window=7, rope_parameters=rope(10000.0))),
        [2, 7, 8, 24], storage="f16", legacy=True),
    "gemma2": lambda: Case(Gemma2Config(**common(
        vocab_size=91, hidden_size=39, intermediate_size=55, num_hidden_layers=3, num_attention_heads=3,
        num_key_value_heads=1, head_dim=14, query_pre_attn_scalar=11, attn_logit_softcapping=3.0,
        final_logit_softcapping=5.0, sliding_window=4, tie_word_embeddings=True, pad_token_id=0,
        rope_parameters=rope(10000.0))), [1, 4, 5, 24], legacy=True),
    "phi3": lambda: Case(Phi3Config(**common(
        vocab_size=103, hidden_size=36, intermediate_size=49, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, pad_token_id=0, max_position_embeddings=64, original_max_position_embeddings=64,
        rope_parameters=rope(10000.0, partial_rotary_factor=0.5))), [2, 10, 22]),
    "phi3_longrope": lambda: Case(Phi3Config(**common(
        vocab_size=87, hidden_size=30, intermediate_size=45, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=3, pad_token_id=0, max_position_embeddings=256, original_max_position_embeddings=64,
        rope_parameters=rope(10000.0, "longrope", short_factor=[1.0, 1.1, 1.25, 1.6, 2.3],
                             long_factor=[1.3, 2.1, 3.7, 5.9, 8.3], original_max_position_embeddings=64))),
        [1, 9, 24], legacy=True),
    "gpt2": lambda: Case(GPT2Config(
        vocab_size=97, n_positions=48, n_embd=36, n_layer=2, n_head=3, n_inner=71, bos_token_id=1, eos_token_id=2,
        resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0), [1, 6, 24]),
    "qwen2_score": lambda: Case(Qwen2Config(**common(
        vocab_size=61, hidden_size=32, intermediate_size=45, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, num_labels=1, rope_parameters=rope(1000000.0))),
        [1, 6, 20], legacy=True, score=True),
    "llama_score": lambda: Case(LlamaConfig(**common(
        vocab_size=61, hidden_size=30, intermediate_size=47, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=1, pad_token_id=0, num_labels=1, rope_parameters=rope(10000.0))),
        [2, 9, 21], storage="bf16", score=True),
    "olmo2": lambda: Case(Olmo2Config(**common(
        vocab_size=85, hidden_size=36, intermediate_size=53, num_hidden_layers=2, num_attention_heads=3,
        num_key_value_heads=3, pad_token_id=0, rope_parameters=rope(500000.0))), [1, 6, 23], legacy=True),
    # grouped heads: the norm of the keys is narrower than that of the queries (OLMo 2 32B)
    "olmo2_grouped": lambda: Case(Olmo2Config(**common(
        vocab_size=77, hidden_size=40, intermediate_size=47, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, attention_bias=True, tie_word_embeddings=True,
        rope_parameters=rope(10000.0))), [2, 9, 24], storage="bf16"),
    "smollm3": lambda: Case(SmolLM3Config(**common(
        vocab_size=93, hidden_size=32, intermediate_size=55, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, pad_token_id=0, tie_word_embeddings=True, no_rope_layer_interval=2,
        rope_parameters=rope(2000000.0))), [1, 5, 24]),
    "smollm3_sliding": lambda: Case(SmolLM3Config(**common(
        vocab_size=69, hidden_size=30, intermediate_size=43, num_hidden_layers=3, num_attention_heads=3,
        num_key_value_heads=1, pad_token_id=0, use_sliding_window=True, sliding_window=6, no_rope_layers=[1, 0, 1],
        # no attention_bias: without rotation a bias on keys has a gradient of zero, and all of it is rounding
        mlp_bias=True, rope_parameters=rope(5000.0))), [2, 7, 22], legacy=True),
    "granite": lambda: Case(GraniteConfig(**common(
        vocab_size=95, hidden_size=40, intermediate_size=51, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, tie_word_embeddings=True, embedding_multiplier=3.0, attention_multiplier=0.17,
        residual_multiplier=0.22, logits_scaling=1.7, rope_parameters=rope(10000.0))), [1, 8, 24], legacy=True),
    "glm4": lambda: Case(Glm4Config(**common(
        vocab_size=81, hidden_size=34, intermediate_size=45, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, pad_token_id=0, attention_bias=True,
        rope_parameters=rope(10000.0, partial_rotary_factor=0.5))), [2, 11, 24]),
    # tied, partly rotated, LongRoPE: as Phi-4-mini has it
    "phi4_mini": lambda: Case(Phi3Config(**common(
        vocab_size=99, hidden_size=32, intermediate_size=47, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, pad_token_id=0, max_position_embeddings=256, original_max_position_embeddings=64,
        tie_word_embeddings=True, rope_parameters=rope(
            10000.0, "longrope", short_factor=[1.0, 1.1, 1.2, 1.4, 1.7, 1.9], long_factor=[1.2, 1.9, 2.5, 4.1, 6.0, 7.7],
            partial_rotary_factor=0.75, original_max_position_embeddings=64))), [1, 9, 24]),
    "gemma3": lambda: Case(Gemma3TextConfig(**common(
        vocab_size=92, hidden_size=36, intermediate_size=55, num_hidden_layers=4, num_attention_heads=4,
        num_key_value_heads=2, head_dim=14, query_pre_attn_scalar=11, sliding_window=5, pad_token_id=0,
        tie_word_embeddings=True,
        layer_types=["sliding_attention", "full_attention", "sliding_attention", "full_attention"],
        rope_parameters={"full_attention": rope(1000000.0, "linear", factor=8.0),
                         "sliding_attention": rope(10000.0)})), [1, 5, 6, 24]),
    # the text part of a model that sees, stored with it
    "gemma3_vision": lambda: Case(Gemma3TextConfig(**common(
        vocab_size=88, hidden_size=32, intermediate_size=43, num_hidden_layers=2, num_attention_heads=2,
        num_key_value_heads=1, head_dim=12, query_pre_attn_scalar=12, sliding_window=4, pad_token_id=0,
        tie_word_embeddings=True, layer_types=["sliding_attention", "full_attention"])),
        [1, 6, 21], wrap=with_vision),
    "qwen3_moe": lambda: Case(Qwen3MoeConfig(**common(
        vocab_size=78, hidden_size=32, intermediate_size=45, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, head_dim=12, num_experts=6, num_experts_per_tok=2, moe_intermediate_size=14,
        norm_topk_prob=True, rope_parameters=rope(1000000.0))), [1, 6, 17], legacy=True),
    # a dense layer between two with experts, and weights that are not divided by their sum
    "qwen3_moe_mixed": lambda: Case(Qwen3MoeConfig(**common(
        vocab_size=66, hidden_size=36, intermediate_size=41, num_hidden_layers=3, num_attention_heads=3,
        num_key_value_heads=1, head_dim=12, num_experts=4, num_experts_per_tok=3, moe_intermediate_size=10,
        norm_topk_prob=False, mlp_only_layers=[1], attention_bias=True, tie_word_embeddings=True,
        use_sliding_window=True, sliding_window=5, rope_parameters=rope(10000.0))), [2, 5, 18], storage="bf16"),
}


def is_norm(name):
    return any(part.endswith("norm") or part in ("ln_1", "ln_2", "ln_f") for part in name.split("."))


def fill(model, case, generator):
    """Weights far from what training would start from, so that a wrong formula shows."""
    zero_centred = case.config.model_type in ("gemma2", "gemma3_text")
    with torch.no_grad():
        for name, value in model.named_parameters():
            noise = torch.randn(value.shape, generator=generator)
            if is_norm(name) and name.endswith("weight"):
                new = 0.2 * noise + (0.0 if zero_centred else 1.0)
            elif name.endswith("bias"):
                new = 0.15 * noise
            elif "embed" in name or "wte" in name or "wpe" in name:
                new = 0.35 * noise
            else:
                new = 0.22 * noise
            value.copy_(new.to(STORAGE[case.storage]).float())


def build(case, generator):
    auto = AutoModelForSequenceClassification if case.score else AutoModelForCausalLM
    model = auto.from_config(case.config, dtype=torch.float32, **EAGER).eval()
    fill(model, case, generator)
    return model


def logits_of(model, ids):
    return model(input_ids=torch.tensor([ids]), use_cache=False).logits[0]


def scores_of(model, ids):
    hidden = model.model(input_ids=torch.tensor([ids]), use_cache=False).last_hidden_state[0]
    return torch.nn.functional.linear(hidden, model.score.weight)[:, 0]


def measures(logits, ids):
    """Log-probabilities of the tokens that follow, and the entropy at every position."""
    logs = torch.log_softmax(logits, dim=-1)
    entropy = -(logs.exp() * logs).sum(-1)
    targets = torch.tensor(ids[1:], dtype=torch.long)
    return logs[:-1].gather(1, targets[:, None])[:, 0], entropy


def route_gap(model, sequences):
    """The smallest lead of an expert that is chosen over one that is not: what bf16 must not turn round."""
    top, gap = getattr(model.config, "num_experts_per_tok", None), float("inf")
    if top is None:
        return gap

    def see(_module, _inputs, output):
        nonlocal gap
        best = output[0].topk(top + 1, dim=-1).values
        gap = min(gap, float((best[:, top - 1] - best[:, top]).min()))

    hooks = [layer.mlp.gate.register_forward_hook(see) for layer in model.model.layers if hasattr(layer.mlp, "gate")]
    with torch.no_grad():
        for ids in sequences:
            logits_of(model, ids)
    for hook in hooks:
        hook.remove()
    return gap


def by_expert(name, value):
    """A parameter under the names it has in files: those of all experts are one tensor in memory."""
    if not name.endswith(("experts.gate_up_proj", "experts.down_proj")):
        return [(name, value)]
    module, kind = name.rsplit(".", 1)
    parts = []
    for expert, matrix in enumerate(value):
        if kind == "gate_up_proj":
            gate, up = matrix.chunk(2)
            parts += [(f"{module}.{expert}.gate_proj.weight", gate), (f"{module}.{expert}.up_proj.weight", up)]
        else:
            parts.append((f"{module}.{expert}.down_proj.weight", matrix))
    return parts


def greedy(model, ids):
    tokens, gap = list(ids), float("inf")
    with torch.no_grad():
        for _ in range(NEW_TOKENS):
            best = logits_of(model, tokens)[-1].topk(2)
            gap = min(gap, float(best.values[0] - best.values[1]))
            tokens.append(int(best.indices[0]))
    return tokens[len(ids):], gap


def legacy_config(path):
    with open(path) as file:
        config = json.load(file)
    parameters = dict(config.pop("rope_parameters", None) or {})
    if parameters:
        config["rope_theta"] = parameters.pop("rope_theta")
        partial = parameters.pop("partial_rotary_factor", None)
        if partial is not None and config["model_type"] == "phi3":
            config["partial_rotary_factor"] = partial
        kind = parameters.pop("rope_type")
        if kind == "default":
            config["rope_scaling"] = None
        elif kind == "longrope":
            parameters.pop("original_max_position_embeddings", None)  # kept beside it, as Phi-3 has it
            parameters.pop("factor", None)
            config["rope_scaling"] = {"type": kind, **parameters}
        else:
            config["rope_scaling"] = {"rope_type": kind, **parameters}
    config.pop("layer_types", None)
    if "dtype" in config:
        config["torch_dtype"] = config.pop("dtype")
    with open(path, "w") as file:
        json.dump(dict(sorted(config.items())), file, indent=2)
        file.write("\n")


def make(name, out):
    seed_base = 1000 * (1 + list(CASES).index(name))
    for seed in range(seed_base, seed_base + 500):
        case = CASES[name]()
        generator = torch.Generator().manual_seed(seed)
        model = build(case, generator)
        vocab = case.config.vocab_size
        sequences = [torch.randint(3, vocab, (n,), generator=generator).tolist() for n in case.lengths]
        if case.score:
            continuations = []
            break
        if route_gap(model, sequences) < MIN_ROUTE_GAP:
            continue
        continuations = []
        for index, ids in enumerate(sequences):
            if len(ids) >= 2:
                tokens, gap = greedy(model, ids)
                continuations.append({"sequence": index, "tokens": tokens, "min_gap": gap})
        if all(c["min_gap"] > MIN_GAP for c in continuations):
            break
    else:
        raise RuntimeError(f"{name}: no seed keeps the greedy choice clear of ties")

    tensors, pooled = {}, []
    loss = torch.zeros(())
    longest = max(range(len(sequences)), key=lambda k: len(sequences[k]))
    for k, ids in enumerate(sequences):
        tensors[f"ids.{k}"] = torch.tensor(ids, dtype=torch.int64)
        if case.score:
            score = scores_of(model, ids)
            factor = torch.randn(len(ids), generator=generator)
            loss = loss + (factor * score).sum()
            tensors[f"score.{k}"], tensors[f"c.{k}"] = score, factor
            with torch.no_grad():
                pooled.append(float(model(input_ids=torch.tensor([ids])).logits[0, 0]))
            assert abs(pooled[-1] - float(score[-1].detach())) < 1e-6
            continue
        logits = logits_of(model, ids)
        logp, entropy = measures(logits, ids)
        tensors[f"logits.{k}"], tensors[f"entropy.{k}"] = logits, entropy
        if len(ids) > 1:
            w = torch.randn(len(ids) - 1, generator=generator)
            u = torch.randn(len(ids) - 1, generator=generator)
            loss = loss + (w * logp).sum() + ENTROPY_FACTOR * (u * entropy[:-1]).sum()
            tensors[f"logp.{k}"], tensors[f"w.{k}"], tensors[f"u.{k}"] = logp, w, u
        if k == longest:
            tensors[f"logp_temp.{k}"], tensors[f"entropy_temp.{k}"] = measures(logits / TEMPERATURE, ids)
    loss.backward()
    names = []
    for parameter, value in model.named_parameters():
        assert value.grad is not None, parameter
        for stored_name, grad in by_expert(parameter, value.grad):
            names.append(stored_name)
            tensors[f"grad.{stored_name}"] = grad
    tensors = {key: value.detach().contiguous().clone() for key, value in tensors.items()}
    assert all(bool(torch.isfinite(value).all()) for value in tensors.values())

    folder = os.path.join(out, name)
    shutil.rmtree(folder, ignore_errors=True)
    os.makedirs(folder)
    stored = build(case, torch.Generator().manual_seed(seed)).to(STORAGE[case.storage])
    stored = case.wrap(stored).to(STORAGE[case.storage]) if case.wrap else stored
    stored.config.dtype = STORAGE[case.storage]
    stored.save_pretrained(folder, **({"max_shard_size": case.shard} if case.shard else {}))
    if case.legacy:
        legacy_config(os.path.join(folder, "config.json"))
    save_file(tensors, os.path.join(folder, "reference.safetensors"), metadata={"format": "pt"})
    reference = {
        "case": name, "architecture": type(model).__name__, "model_type": case.config.model_type,
        "kind": "sequence_classification" if case.score else "causal_lm", "vocab_size": vocab,
        "parameters": sum(value.numel() for value in model.parameters()), "seed": seed, "storage": case.storage,
        "tied": bool(case.config.tie_word_embeddings) and not case.score, "sequences": sequences,
        "loss": float(loss.detach()), "grad_names": names,
        "versions": {"torch": torch.__version__.split("+")[0], "transformers": transformers.__version__}}
    if case.score:
        reference["pooled"] = pooled
    else:
        reference |= {"temperature": TEMPERATURE, "temperature_sequence": longest, "greedy": continuations}
    with open(os.path.join(folder, "reference.json"), "w") as file:
        json.dump(reference, file, indent=1)
        file.write("\n")
    for file in os.listdir(folder):
        os.chmod(os.path.join(folder, file), 0o644)
    reload_check(folder, case, tensors)
    size = sum(os.path.getsize(os.path.join(folder, f)) for f in os.listdir(folder))
    gap = min((c["min_gap"] for c in continuations), default=float("nan"))
    smallest = min(((float(v.abs().max()), key) for key, v in tensors.items() if key.startswith("grad.")))
    print(f"{name:15} {reference['parameters']:6} parameters {size / 1024:6.0f} KiB seed {seed} gap {gap:.4f} "
          f"loss {reference['loss']:.4f} smallest gradient {smallest[0]:.1e} {smallest[1]}", flush=True)


def reload_check(folder, case, tensors):
    """What was written must load without a missing weight and give the same numbers."""
    auto = AutoModelForSequenceClassification if case.score else AutoModelForCausalLM
    model, info = auto.from_pretrained(folder, dtype=torch.float32, output_loading_info=True, local_files_only=True,
                                       **EAGER)
    assert not info["missing_keys"] and not info["unexpected_keys"] and not info["mismatched_keys"], info
    model.eval()
    with torch.no_grad():
        for k in range(len(case.lengths)):
            ids = tensors[f"ids.{k}"].tolist()
            got = scores_of(model, ids) if case.score else logits_of(model, ids)
            want = tensors[f"score.{k}" if case.score else f"logits.{k}"]
            difference = float((got - want).abs().max())  # not always 0: alignment picks the matmul's code path
            assert difference < 1e-5, (folder, k, difference)


def main():
    parser = argparse.ArgumentParser(description="make the tiny model fixtures")
    parser.add_argument("cases", nargs="*", help="cases to make (all when none is named)")
    parser.add_argument("--out", default=DEFAULT_OUT)
    options = parser.parse_args()
    unknown = set(options.cases) - set(CASES)
    if unknown:
        sys.exit(f"unknown case: {', '.join(sorted(unknown))}; there are: {', '.join(CASES)}")
    torch.set_num_threads(1)
    torch.use_deterministic_algorithms(True)
    transformers.logging.set_verbosity_error()
    transformers.utils.logging.disable_progress_bar()
    os.makedirs(options.out, exist_ok=True)
    for name in options.cases or CASES:
        make(name, options.out)


if __name__ == "__main__":
    main()

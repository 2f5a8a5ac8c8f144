#!/usr/bin/env python3
"""Makes the loss and gradient-norm trajectories of TRL that `crates/ferrl/tests/against_trl.rs` reproduces.

    python tools/make_trl_fixtures.py              # every case
    python tools/make_trl_fixtures.py kto orpo     # some cases
    python tools/make_trl_fixtures.py --out DIR    # somewhere else (to compare with the committed files)

Needs torch, transformers, trl and datasets. Nothing is downloaded: the models are the tiny random ones of
`tools/make_model_fixtures.py`, the tokenizer has one token for each letter and is made here, the rows are random letters.

Both sides train the same way: float32, eager attention, rows in order, four to a step, constant learning rate but in
`sft_cosine`, AdamW, no dropout, no accumulation. A case is NAME.json with `settings` (of the recipe), `rows`, and `loss` and `grad_norm` (before
clipping) of each step. ORPO's prompts have one letter: TRL's likelihood term also imitates the prompt, ours does not, and
for one letter there is nothing to imitate.
"""
import argparse
import json
import os
import random
import sys
import tempfile

os.environ.setdefault("OMP_NUM_THREADS", "1")
os.environ.setdefault("HF_HUB_OFFLINE", "1")
try:
    import torch
    import transformers
    import trl
    from datasets import Dataset
    from tokenizers import Regex, Tokenizer, models, pre_tokenizers
    from transformers import AutoModelForCausalLM, AutoModelForSequenceClassification, PreTrainedTokenizerFast
    from trl import DPOConfig, DPOTrainer, KTOConfig, KTOTrainer, RewardConfig, RewardTrainer, SFTConfig, SFTTrainer
    from trl.experimental.cpo import CPOConfig, CPOTrainer
    from trl.experimental.orpo import ORPOConfig, ORPOTrainer
except ImportError as error:
    sys.exit(f"{error}\nneeded: pip install torch transformers trl datasets")

ROOT = os.path.normpath(os.path.join(os.path.dirname(os.path.abspath(__file__)), ".."))
DEFAULT_OUT = os.path.join(ROOT, "crates/ferrl/tests/fixtures/trl")
MODELS = os.path.join(ROOT, "crates/engine/tests/fixtures/models")
LETTERS = "abcdefghijklmnopqrstuvwxyz"
BATCH, STEPS = 4, 14
OPTIM = {"lr": 1e-3, "beta1": 0.9, "beta2": 0.99, "eps": 1e-8, "weight_decay": 0.05, "max_grad_norm": 1.0}


def tokenizer():
    specials = ["<pad>", "<bos>", "<eos>", "<unk>"]
    vocab = {token: i for i, token in enumerate(specials + list(LETTERS))}
    inner = Tokenizer(models.WordLevel(vocab, unk_token="<unk>"))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex("."), "isolated")
    return PreTrainedTokenizerFast(
        tokenizer_object=inner, pad_token="<pad>", eos_token="<eos>", unk_token="<unk>", model_max_length=64)


def words(rng, low, high):
    return "".join(rng.choice(LETTERS) for _ in range(rng.randint(low, high)))


def rows(kind, seed):
    """Random letters; the better answer of a pair repeats its question's first letter, so there is something to learn."""
    rng, out = random.Random(seed), []
    for _ in range(BATCH * STEPS):
        prompt = words(rng, 1, 1) if kind == "orpo" else words(rng, 2, 6)
        good = prompt[0] * rng.randint(1, 4) + words(rng, 1, 4)
        bad = words(rng, 2, 8)
        label = rng.random() < 0.5
        if kind == "sft":
            out.append({"prompt": prompt, "completion": good})
        elif kind == "kto":
            out.append({"prompt": prompt, "completion": good if label else bad, "label": label})
        elif kind == "rm_margin":
            out.append({"prompt": prompt, "chosen": good, "rejected": bad, "margin": rng.randint(0, 4) / 4})
        else:
            out.append({"prompt": prompt, "chosen": good, "rejected": bad})
    return out


def causal():
    return AutoModelForCausalLM.from_pretrained(
        os.path.join(MODELS, "qwen2"), dtype=torch.float32, attn_implementation="eager")


def score():
    return AutoModelForSequenceClassification.from_pretrained(
        os.path.join(MODELS, "qwen2_score"), dtype=torch.float32, attn_implementation="eager")


# name: (rows, model directory, what the recipe says, trainer, configuration, model, further arguments)
CASES = {
    "sft": ("sft", "qwen2", {"name": "sft"}, SFTTrainer, SFTConfig, causal, {}),
    "sft_cosine": ("sft", "qwen2", {"name": "sft"}, SFTTrainer, SFTConfig, causal, {"lr_scheduler_type": "cosine", "warmup_steps": 3}),
    "dpo": ("pairs", "qwen2", {"name": "dpo", "beta": 0.5}, DPOTrainer, DPOConfig, causal, {"beta": 0.5}),
    "dpo_sft": ("pairs", "qwen2", {"name": "dpo", "beta": 0.5, "sft_coef": 0.3}, DPOTrainer, DPOConfig, causal,
                {"beta": 0.5, "loss_type": ["sigmoid", "sft"], "loss_weights": [1.0, 0.3]}),
    "ipo": ("pairs", "qwen2", {"name": "ipo", "tau": 0.5}, DPOTrainer, DPOConfig, causal,
            {"beta": 0.5, "loss_type": ["ipo"]}),
    "kto": ("kto", "qwen2", {"name": "kto", "beta": 0.5, "desirable_weight": 1.25, "undesirable_weight": 0.75},
            KTOTrainer, KTOConfig, causal, {"beta": 0.5, "desirable_weight": 1.25, "undesirable_weight": 0.75}),
    "orpo": ("orpo", "qwen2", {"name": "orpo", "beta": 0.5}, ORPOTrainer, ORPOConfig, causal, {"beta": 0.5}),
    "simpo": ("pairs", "qwen2", {"name": "simpo", "beta": 1.5, "gamma": 0.5, "sft_coef": 0.4}, CPOTrainer, CPOConfig, causal,
              {"loss_type": "simpo", "beta": 1.5, "simpo_gamma": 0.5, "cpo_alpha": 0.4}),
    "rm": ("pairs", "qwen2_score", {"name": "rm"}, RewardTrainer, RewardConfig, score, {}),
    "rm_margin": ("rm_margin", "qwen2_score", {"name": "rm", "centre": 0.05}, RewardTrainer, RewardConfig, score,
                  {"center_rewards_coefficient": 0.05}),
}


def recorded(base):
    """The trainer, keeping each step's loss and gradient norm unrounded."""
    class Recorded(base):
        history = {"loss": [], "grad_norm": []}

        def training_step(self, *args, **kwargs):
            loss = super().training_step(*args, **kwargs)
            self.history["loss"].append(float(loss))
            return loss

        def log(self, logs, *args, **kwargs):
            if "grad_norm" in logs:
                self.history["grad_norm"].append(float(logs["grad_norm"]))
            return super().log(logs, *args, **kwargs)

    Recorded.history = {"loss": [], "grad_norm": []}
    return Recorded


def trajectory(name):
    kind, directory, algo, base, config, model, more = CASES[name]
    more, schedule = dict(more), more.get("lr_scheduler_type")
    torch.manual_seed(0)
    data = rows(kind, sum(map(ord, name)))
    with tempfile.TemporaryDirectory() as folder:
        args = config(
            output_dir=folder, per_device_train_batch_size=BATCH, max_steps=STEPS, logging_steps=1, report_to="none",
            learning_rate=OPTIM["lr"], lr_scheduler_type=more.pop("lr_scheduler_type", "constant"), adam_beta1=OPTIM["beta1"],
            adam_beta2=OPTIM["beta2"], adam_epsilon=OPTIM["eps"], weight_decay=OPTIM["weight_decay"],
            max_grad_norm=OPTIM["max_grad_norm"], use_cpu=True, bf16=False, save_strategy="no", max_length=64,
            gradient_checkpointing=False, train_sampling_strategy="sequential", disable_tqdm=True,
            optim="adamw_torch", **more)
        trained = recorded(base)(
            model=model(), args=args, train_dataset=Dataset.from_list(data), processing_class=tokenizer())
        trained.train()
    history = trained.history
    assert len(history["loss"]) == len(history["grad_norm"]) == STEPS, history
    versions = {m.__name__: m.__version__ for m in (torch, transformers, trl)}
    optim = {**OPTIM, "schedule": schedule, "warmup": more["warmup_steps"] / STEPS} if schedule else OPTIM
    settings = {"algo": algo, "optim": optim, "batch": BATCH, "model": directory}
    return {"settings": settings, "versions": versions, "rows": data, **history}


def main():
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("cases", nargs="*", choices=[[], *CASES])
    parser.add_argument("--out", default=DEFAULT_OUT)
    args = parser.parse_args()
    torch.set_num_threads(1)
    os.makedirs(args.out, exist_ok=True)
    made = os.path.join(args.out, "tokenizer")
    tokenizer().save_pretrained(made)
    for name in args.cases or CASES:
        case = trajectory(name)
        with open(os.path.join(args.out, f"{name}.json"), "w") as file:
            # One row to a line: diffs stay readable.
            head = {key: value for key, value in case.items() if key != "rows"}
            text = json.dumps(head, indent=1)[:-2] + ',\n "rows": [\n'
            file.write(text + ",\n".join("  " + json.dumps(row) for row in case["rows"]) + "\n ]\n}\n")
        print(name, "loss", case["loss"][0], "->", case["loss"][-1])


if __name__ == "__main__":
    main()

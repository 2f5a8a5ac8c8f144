"""Losses, gradients and advantages of TRL's GRPO and RLOO trainers on fixed numbers.

    python tools/make_trl_policy_fixtures.py

Writes crates/ferrl/tests/fixtures/trl/policy.json. The numbers are TRL's own: a trainer that was never set up is given
the few attributes that its methods read, a generator that returns fixed completions and a model that returns fixed
log-probabilities; then TRL's `_generate_and_score_completions` makes advantages of the rewards and TRL's `_compute_loss` the
loss, whose gradient by the log-probabilities PyTorch computes.
"""
import collections
import itertools
import json
import pathlib
import types

import torch
import trl
from trl.trainer.grpo_trainer import GRPOTrainer
from trl.trainer.rloo_trainer import RLOOTrainer

OUT = pathlib.Path(__file__).resolve().parent.parent / "crates/ferrl/tests/fixtures/trl/policy.json"
GROUP, LENGTHS, LIMIT = 4, [3, 5, 2, 6, 4, 1, 6, 3], 8
REWARDS = [[1.0, 0.2], [0.0, 0.1], [0.5, 0.0], [0.0, 0.4], [0.25, 0.3], [1.0, 0.3], [0.0, 0.0], [0.75, 0.1]]
WEIGHTS = [1.0, 0.5]


def numbers(seed, centre, spread):
    """One number per token of each completion, padded with zeros."""
    generator = torch.Generator().manual_seed(seed)
    full = centre + spread * (2 * torch.rand(len(LENGTHS), max(LENGTHS), generator=generator) - 1)
    mask = torch.tensor([[i < n for i in range(max(LENGTHS))] for n in LENGTHS])
    return as_stored(full * mask)


def as_stored(numbers):
    """Computed in double precision from what single precision can hold."""
    return numbers.float().double()


torch.set_default_dtype(torch.float64)
OLD, REF = numbers(1, -1.5, 0.8), numbers(2, -1.6, 0.8)
# Moved far enough that every clip bound of the cases is passed on both sides, by whole answers too.
NEW = as_stored(OLD + numbers(3, 0.0, 0.5) + (OLD != 0) * torch.linspace(-0.4, 0.4, len(LENGTHS))[:, None])


class Alone:
    """An accelerator of one process."""

    device, num_processes, process_index, sync_gradients = torch.device("cpu"), 1, 0, True

    def gather(self, value):
        return value

    gather_for_metrics = gather

    def reduce(self, value, reduction=None):
        return value

    def unwrap_model(self, model):
        return model


def make(kind, **settings):
    trainer = object.__new__(kind)
    trainer.model = types.SimpleNamespace(training=True, is_gradient_checkpointing=False, name="policy")
    trainer.ref_model = types.SimpleNamespace(name="reference")
    defaults = dict(
        accelerator=Alone(), environment_factories=None, environments=None, tools=None, pad_to_multiple_of=None,
        mask_truncated_completions=False, use_vllm=False, vllm_importance_sampling_correction=False,
        multi_objective_aggregation="sum_then_normalize", scale_rewards="group", num_generations=GROUP,
        reward_weights=torch.tensor(WEIGHTS), reward_funcs=[None, None], reward_func_names=["a", "b"],
        _tokenizer=types.SimpleNamespace(pad_token_id=0), eos_token_ids=[0], log_multimodal=False,
        _metrics=collections.defaultdict(lambda: collections.defaultdict(list)),
        _logs=collections.defaultdict(list, rewards=collections.defaultdict(list)),
        _pending_extra_logs={}, _pending_metrics={}, aux_loss_enabled=False, top_entropy_quantile=1.0,
        off_policy_mask_threshold=None, _entropy_bonus_enabled=False, current_gradient_accumulation_steps=1,
        importance_sampling_level="token", loss_type="grpo", beta=0.0, epsilon_low=0.2, epsilon_high=0.2,
        max_completion_length=LIMIT, num_iterations=2, normalize_advantages=False, reward_clip_range=None,
        args=types.SimpleNamespace(
            per_device_train_batch_size=len(LENGTHS), gradient_checkpointing_kwargs=None, steps_per_generation=1,
            gradient_accumulation_steps=1, use_bias_correction_kl=settings.pop("use_bias_correction_kl", False),
            delta=settings.pop("delta", None),
        ),
    )
    for name, value in {**defaults, **settings}.items():
        setattr(trainer, name, value)
    ids = [[5] * n for n in LENGTHS]
    if kind is GRPOTrainer:
        trainer._generate = lambda prompts: ([[1, 2]] * len(ids), ids, None, ids, None, {}, None, None)
    else:
        trainer._generate = lambda prompts: ([[1, 2]] * len(ids), ids, ids)
    trainer._calculate_rewards = lambda *a: torch.tensor(REWARDS)
    return trainer


def case(kind, ours, **settings):
    trainer = make(kind, **settings)
    logps = {"policy": OLD, "reference": REF}
    trainer._get_per_token_logps_and_entropies = lambda model, *a, **k: (logps[model.name], torch.ones_like(OLD), None)
    inputs = [{"prompt": "x"} for _ in LENGTHS]
    batch = type(trainer)._generate_and_score_completions(trainer, inputs)
    new = NEW.clone().requires_grad_()
    logps["policy"] = new
    loss = trainer._compute_loss(trainer.model, batch)
    loss.backward()
    cut = lambda t: [row[:n].tolist() for row, n in zip(t, LENGTHS)]
    shown = {k: v for k, v in settings.items() if isinstance(v, (int, float, str))}
    theirs = {"trainer": kind.__name__, **shown}
    metrics = {name: values[-1] for name, values in trainer._metrics["train"].items() if name.endswith("_mean")
               and name.startswith("clip_ratio/")}
    return {"theirs": theirs, "ours": ours, "metrics": metrics, "advantages": batch["advantages"].tolist(), "loss": loss.item(),
            "grads": cut(new.grad)}


def cases():
    aggregates = {"grpo": {"aggregate": "sequence"}, "bnpo": {"aggregate": "token"}, "dapo": {"aggregate": "token"},
                  "dr_grpo": {"aggregate": "constant", "length": LIMIT},
                  "luspo": {"aggregate": "constant", "length": 1}}
    levels = {"token": {"ratio": "token"}, "sequence": {"ratio": "mean"}}
    for (loss, how), (level, ratio), scale, beta in itertools.product(
            aggregates.items(), levels.items(), ("group", "none"), (0.0, 0.04)):
        ours = {"name": "grpo", **how, **ratio, "clip_high": 0.28, "kl": {"coef": beta},
                "advantage": {"divide_by_std": scale == "group"}}
        yield case(GRPOTrainer, ours, loss_type=loss, importance_sampling_level=level, scale_rewards=scale, beta=beta,
                   epsilon_high=0.28)
    # The named methods as they come, and the second bound of the clip.
    yield case(GRPOTrainer, {"name": "grpo"}, beta=0.04)
    yield case(GRPOTrainer, {"name": "dr_grpo", "aggregate": "constant", "length": LIMIT}, loss_type="dr_grpo",
               scale_rewards="none")
    yield case(GRPOTrainer, {"name": "dapo", "overlong": 0.0, "filter_equal": False, "refills": 0}, loss_type="dapo",
               epsilon_high=0.28)
    yield case(GRPOTrainer, {"name": "gspo"}, importance_sampling_level="sequence", epsilon_low=3e-4, epsilon_high=4e-4)
    yield case(GRPOTrainer, {"name": "grpo", "kl": {"coef": 0.0}, "dual_clip": 1.4}, delta=1.4)
    for beta, cap in itertools.product((0.0, 0.04), (1.3, 5.0)):
        ours = {"name": "cispo", "clip_high": cap - 1.0, "kl": {"coef": beta}}
        yield case(GRPOTrainer, ours, loss_type="cispo", epsilon_high=cap, beta=beta)
    # TRL's default: the KL estimate times the ratio, which has a gradient of its own.
    for (loss, how), (level, ratio) in itertools.product(list(aggregates.items())[:2], levels.items()):
        ours = {"name": "grpo", **how, **ratio, "kl": {"coef": 0.3, "unbiased": True}}
        yield case(GRPOTrainer, ours, loss_type=loss, importance_sampling_level=level, beta=0.3, use_bias_correction_kl=True)
    yield case(GRPOTrainer, {"name": "gdpo"}, multi_objective_aggregation="normalize_then_sum")
    for beta in (0.0, 0.05):
        yield case(RLOOTrainer, {"name": "rloo", "kl": {"coef": beta}}, beta=beta)


def main():
    torch.set_num_threads(1)
    cut = lambda t: [row[:n].tolist() for row, n in zip(t, LENGTHS)]
    out = {"trl": trl.__version__, "group": GROUP, "rewards": REWARDS, "weights": WEIGHTS, "old": cut(OLD), "ref": cut(REF),
           "new": cut(NEW), "cases": list(cases())}
    OUT.parent.mkdir(parents=True, exist_ok=True)
    OUT.write_text(json.dumps(out) + "\n")
    print(f"{len(out['cases'])} cases in {OUT}")


if __name__ == "__main__":
    main()

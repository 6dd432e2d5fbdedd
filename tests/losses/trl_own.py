"""The losses of TRL's own trainers, called without their constructors.

A trainer's method runs on a stand-in for `self` that holds only what the method reads, and on a
stand-in for the model that returns given log-probabilities.
"""

from __future__ import annotations

import math
from collections import defaultdict
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.losses.batches import Tokens


class _Accelerator:
    device = torch.device("cpu")
    num_processes = process_index = 1
    sync_gradients = True

    def gather(self, x: Tensor) -> Tensor:
        return x.reshape(1) if x.dim() == 0 else x

    gather_for_metrics = gather

    def reduce(self, x: Tensor, reduction: str) -> Tensor:
        return x

    def pad_across_processes(self, x: Tensor, **_: Any) -> Tensor:
        return x


def _stand_in(trainer: type, **given: Any) -> Any:
    fake = SimpleNamespace(
        accelerator=_Accelerator(),
        model=torch.nn.Module(),
        _metrics={"train": defaultdict(list)},
        aux_loss_enabled=False,
        _total_train_tokens=0,
        _tp_size=1,
        **given,
    )
    for name in ("get_gamma_weights", "get_off_policy_mask", "odds_ratio_loss", "cpo_loss"):
        if hasattr(trainer, name):
            method = vars(trainer)[name]
            bound = isinstance(method, staticmethod)
            setattr(fake, name, method.__func__ if bound else method.__get__(fake))
    return fake


def _metrics(fake: Any) -> dict[str, float]:
    return {name: values[-1] for name, values in fake._metrics["train"].items()}


def _completion_mask(mask: Tensor) -> Tensor:
    """Return the mask with the first token, which nothing predicts."""
    return torch.cat([torch.zeros(len(mask), 1, dtype=torch.long), mask.long()], 1)


def _head(tokens: Tokens) -> Any:
    def forward(**_: Any) -> Any:
        return SimpleNamespace(
            log_probs=tokens.log_probs * tokens.mask,  # 0 without a gradient, as a head does
            entropy=tokens.entropy,
            log_sum_sq_probs=tokens.sum_sq,
            mean_logits=tokens.sum_sq,
            is_top1=tokens.mask,
            label_mask=tokens.mask,
        )

    return forward


def dpo(tokens: Tokens, **options: Any) -> tuple[Tensor, dict[str, float]]:
    from trl.trainer.dpo_trainer import DPOTrainer

    types = options.pop("loss_type", "sigmoid")
    types = [types] if isinstance(types, str) else types
    ref = _head(tokens._replace(log_probs=tokens.ref))
    fake = _stand_in(
        DPOTrainer,
        precompute_ref_logps=False,
        ref_model=ref,
        args=SimpleNamespace(
            gradient_checkpointing_kwargs=None, discopop_tau=options.pop("discopop_tau", 0.05)
        ),
        loss_types=types,
        loss_weights=options.pop("loss_weights", [1.0] * len(types)),
        **{
            "beta": 0.1,
            "label_smoothing": 0.0,
            "f_divergence_type": "reverse_kl",
            "f_alpha_divergence_coef": 0.5,
            "ld_alpha": None,
            "use_weighting": False,
        }
        | options,
    )
    fake.model.is_gradient_checkpointing = False
    completion = _completion_mask(tokens.mask)
    inputs = {
        "input_ids": torch.zeros_like(completion),
        "attention_mask": torch.ones_like(completion),
        "completion_mask": completion,
    }
    return DPOTrainer._compute_loss(fake, _head(tokens), inputs, False), _metrics(fake)


def kto(
    tokens: Tokens, kl_tokens: Tokens, label: Tensor, **options: Any
) -> tuple[Tensor, dict[str, float]]:
    from trl.trainer.kto_trainer import KTOTrainer

    loss_type = options.get("loss_type", "kto")
    fake = _stand_in(
        KTOTrainer,
        precompute_ref_logps=False,
        ref_model=None,
        args=SimpleNamespace(gradient_checkpointing_kwargs=None),
        calculate_KL=loss_type == "kto",
        **{"loss_type": "kto", "beta": 0.1, "desirable_weight": 1.0, "undesirable_weight": 1.0}
        | options,
    )
    fake.model.is_gradient_checkpointing = False
    fake._compute_kl_logps = KTOTrainer._compute_kl_logps.__get__(fake)

    def forward(of_reference: bool) -> Any:
        def call(input_ids: Tensor, **_: Any) -> Any:
            rows = kl_tokens if int(input_ids[0, 0]) == 1 else tokens
            rows = rows._replace(log_probs=rows.ref) if of_reference else rows
            return _head(rows)()

        return call

    fake.ref_model = forward(True)
    completion, other = _completion_mask(tokens.mask), _completion_mask(kl_tokens.mask)
    inputs = {
        "input_ids": torch.zeros_like(completion),
        "attention_mask": torch.ones_like(completion),
        "completion_mask": completion,
        "KL_input_ids": torch.ones_like(other),
        "KL_attention_mask": torch.ones_like(other),
        "KL_completion_mask": other,
        "label": label,
    }
    return KTOTrainer._compute_loss(fake, forward(False), inputs, False), _metrics(fake)


def reference_free(
    name: str, logits: Tensor, ids: Tensor, mask: Tensor, **options: Any
) -> tuple[Tensor, dict[str, float]]:
    """Call ORPO's or CPO's trainer with logits (2 * pairs, seq + 1, vocab), ids and a mask."""
    if name == "orpo":
        from trl.experimental.orpo.orpo_trainer import ORPOTrainer as trainer

        defaults: dict[str, Any] = {"beta": 0.1}
    else:
        from trl.experimental.cpo.cpo_trainer import CPOTrainer as trainer

        defaults = {
            "beta": 0.1,
            "loss_type": "sigmoid",
            "label_smoothing": 0.0,
            "simpo_gamma": 0.5,
            "cpo_alpha": 1.0,
            "alpha": 0.0,
        }
    fake = _stand_in(
        trainer, is_encoder_decoder=False, padding_value=0, pad_token_id=0, **defaults | options
    )
    labels = torch.where(_completion_mask(mask).bool(), ids, -100)
    batch = {
        "concatenated_input_ids": ids,
        "concatenated_attention_mask": torch.ones_like(ids),
        "concatenated_labels": labels,
    }
    fake.concatenated_inputs = lambda *_, **__: batch
    fake.get_batch_logps = trainer.get_batch_logps
    fake.concatenated_forward = trainer.concatenated_forward.__get__(fake)

    def model(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(logits=logits)

    pairs = {"chosen_labels": labels[: len(labels) // 2]}
    loss, metrics = trainer.get_batch_loss_metrics(fake, model, pairs)
    return loss, {name: float(value) for name, value in metrics.items()}


def grpo(tokens: Tokens, advantages: Tensor, **options: Any) -> tuple[Tensor, dict[str, float]]:
    from trl.trainer.grpo_trainer import GRPOTrainer

    defaults: dict[str, Any] = {
        "loss_type": "dapo",
        "beta": 0.0,
        "importance_sampling_level": "token",
        "top_entropy_quantile": 1.0,
        "off_policy_mask_threshold": None,
        "entropy_coef": 0.0,
        "max_completion_length": 11,
        "epsilon": 0.2,
        "epsilon_high": None,
        "importance_sampling_ratio": None,
        "old_log_probs": tokens.old,
        "delta": None,
        "use_bias_correction_kl": True,
        "sapo_temperature_pos": 1.0,
        "sapo_temperature_neg": 1.05,
        "vespo_k_pos": 2.0,
        "vespo_lambda_pos": 3.0,
        "vespo_k_neg": 3.0,
        "vespo_lambda_neg": 2.0,
    }
    unknown = options.keys() - defaults.keys()
    assert not unknown, unknown
    given = SimpleNamespace(**defaults | options)
    ratio = given.importance_sampling_ratio
    fake = _stand_in(
        GRPOTrainer,
        args=SimpleNamespace(**vars(given), steps_per_generation=1),
        epsilon_low=given.epsilon,
        use_vllm=ratio is not None,
        vllm_importance_sampling_correction=ratio is not None,
        current_gradient_accumulation_steps=1,
        _entropy_bonus_enabled=bool(given.entropy_coef),
        use_adaptive_entropy=False,
        **{k: v for k, v in vars(given).items() if k not in ("epsilon", "epsilon_high")},
    )
    fake.epsilon_high = given.epsilon if given.epsilon_high is None else given.epsilon_high
    fake.accelerator.num_processes = 1
    fake.get_high_entropy_mask = GRPOTrainer.get_high_entropy_mask.__get__(fake)
    found = tokens.log_probs, tokens.entropy, None
    fake._get_per_token_logps_and_entropies = lambda *_, **__: found
    ids = torch.zeros(tokens.mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": tokens.mask.long(),
        "advantages": advantages,
        "old_per_token_logps": given.old_log_probs,
        "ref_per_token_logps": tokens.ref,
        "sampling_per_token_logps": tokens.sampling,
        "num_items_in_batch": tokens.mask.sum(),
    }
    if ratio is not None:
        inputs["importance_sampling_ratio"] = ratio
    return GRPOTrainer._compute_loss(fake, None, inputs), _metrics(fake)


def rloo(tokens: Tokens, advantages: Tensor, **options: Any) -> tuple[Tensor, dict[str, float]]:
    from trl.trainer.rloo_trainer import RLOOTrainer

    epsilon = options.get("epsilon", 0.2)
    high = options.get("epsilon_high")
    fake = _stand_in(
        RLOOTrainer, epsilon_low=epsilon, epsilon_high=epsilon if high is None else high
    )
    found = tokens.log_probs, tokens.entropy, None
    fake._get_per_token_logps_and_entropies = lambda *_, **__: found
    ids = torch.zeros(tokens.mask.shape, dtype=torch.long)
    inputs = {
        "prompt_ids": ids[:, :1],
        "prompt_mask": ids[:, :1],
        "completion_ids": ids,
        "completion_mask": tokens.mask.long(),
        "advantages": advantages,
        "old_logps": (tokens.old * tokens.mask).sum(1),
    }
    return RLOOTrainer._compute_loss(fake, None, inputs), _metrics(fake)


def reward(
    rewards: Tensor, margin: Tensor | None, coefficient: float | None
) -> tuple[Tensor, dict[str, float]]:
    from trl.trainer.reward_trainer import RewardTrainer

    fake = _stand_in(RewardTrainer, args=SimpleNamespace(center_rewards_coefficient=coefficient))
    inputs = {"attention_mask": torch.ones(len(rewards), 1)}
    inputs |= {} if margin is None else {"margin": margin}

    def model(**_: Any) -> Any:
        return SimpleNamespace(logits=rewards[:, None])

    return RewardTrainer.compute_loss(fake, model, inputs), _metrics(fake)


def sft(tokens: Tokens, loss_type: str) -> Tensor:
    from trl.trainer.sft_trainer import SFTTrainer

    fake = _stand_in(
        SFTTrainer,
        args=SimpleNamespace(loss_type=loss_type, average_tokens_across_devices=False),
        compute_loss_func=None,
        label_smoother=None,
    )
    fake.accelerator.parallelism_config = None
    inputs = {"attention_mask": tokens.mask, "labels": tokens.mask}
    return SFTTrainer.compute_loss(fake, _head(tokens), inputs)


def advantages(name: str, rewards: Tensor, num_generations: int, **options: Any) -> Tensor:
    """Run the lines of TRL's trainer that turn rewards into advantages.

    They stand in the middle of `_generate_and_score_completions`, so they are cut out of its source
    between the rewards and the slice of this process.
    """
    import inspect
    import textwrap

    from trl.trainer import grpo_trainer, rloo_trainer
    from trl.trainer.utils import nanstd

    trainer = grpo_trainer.GRPOTrainer if name == "grpo" else rloo_trainer.RLOOTrainer
    source = inspect.getsource(trainer._generate_and_score_completions)
    begin = source.index("        unscorable_mask = ")
    end = source.index("        # Slice to keep only the local part of the data")
    table = rewards[:, None] if rewards.dim() == 1 else rewards
    weights = options.pop("reward_weights", torch.ones(table.shape[1], dtype=table.dtype))
    kl = options.pop("kl", None)
    fake = SimpleNamespace(
        reward_funcs=range(table.shape[1]), num_generations=num_generations, **options
    )
    fake.reward_weights = weights
    names = {
        "self": fake,
        "rewards_per_func": table,
        "num_generations": num_generations,
        "torch": torch,
        "math": math,
        "nanstd": nanstd,
        "device": torch.device("cpu"),
        "gather": lambda x: x,
        "old_per_token_logps": None if kl is None else kl[:, None],
        "ref_per_token_logps": 0.0,
        "completion_mask": 1.0,
    }
    exec(textwrap.dedent(source[begin:end]), names)
    return names["advantages"]

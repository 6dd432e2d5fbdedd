"""The losses of TRL's own trainers, called without their constructors.

A trainer is made without `__init__`, with the defaults of its config and with what the method
reads. A stand-in for the model returns given log-probabilities.
"""

from __future__ import annotations

import inspect
import math
import textwrap
from collections import defaultdict
from dataclasses import fields
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from tests.losses.batches import Tokens

pytest.importorskip("trl", exc_type=ImportError)


class _Accelerator:
    device = torch.device("cpu")
    num_processes, process_index = 1, 0
    sync_gradients = True
    parallelism_config = None

    def gather(self, x: Tensor) -> Tensor:
        return x.reshape(1) if x.dim() == 0 else x

    gather_for_metrics = gather

    def reduce(self, x: Tensor, reduction: str) -> Tensor:
        return x

    def pad_across_processes(self, x: Tensor, **_: Any) -> Tensor:
        return x


def _trainer(trainer: type, config: type, **given: Any) -> Any:
    """Return a trainer that holds its config's defaults, or what is given, as its attributes."""
    values = {x.name: x.default for x in fields(config)} | given
    made = trainer.__new__(trainer)
    vars(made).update(
        values,
        args=SimpleNamespace(**values | {"gradient_checkpointing_kwargs": None}),
        accelerator=_Accelerator(),
        model=torch.nn.Module(),
        _metrics={"train": defaultdict(list)},
        aux_loss_enabled=False,
        precompute_ref_logps=False,
        current_gradient_accumulation_steps=1,
        _total_train_tokens=0,
        _tp_size=1,
    )
    made.model.is_gradient_checkpointing = False
    return made


def _metrics(trainer: Any) -> dict[str, float]:
    return {name: values[-1] for name, values in trainer._metrics["train"].items()}


def _inputs(mask: Tensor, fill: int = 0) -> dict[str, Tensor]:
    """Return inputs whose completion mask has the first token, too, which nothing predicts."""
    completion = torch.cat([torch.zeros(len(mask), 1, dtype=torch.long), mask.long()], 1)
    return {
        "input_ids": torch.full_like(completion, fill),
        "attention_mask": torch.ones_like(completion),
        "completion_mask": completion,
    }


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


def dpo(
    tokens: Tokens, loss_type: str | list[str] = "sigmoid", **options: Any
) -> tuple[Tensor, dict[str, float]]:
    from trl.trainer.dpo_trainer import DPOConfig, DPOTrainer

    types = [loss_type] if isinstance(loss_type, str) else loss_type
    options = {"loss_types": types, "loss_weights": [1.0] * len(types), **options}
    trainer = _trainer(DPOTrainer, DPOConfig, **options)
    trainer.ref_model = _head(tokens._replace(log_probs=tokens.ref))
    return trainer._compute_loss(_head(tokens), _inputs(tokens.mask), False), _metrics(trainer)


def kto(
    tokens: Tokens, kl_tokens: Tokens, label: Tensor, **options: Any
) -> tuple[Tensor, dict[str, float]]:
    from trl.trainer.kto_trainer import KTOConfig, KTOTrainer

    trainer = _trainer(KTOTrainer, KTOConfig, **options)
    trainer.calculate_KL = trainer.loss_type == "kto"

    def forward(of_reference: bool) -> Any:
        def call(input_ids: Tensor, **_: Any) -> Any:
            rows = kl_tokens if int(input_ids[0, 0]) == 1 else tokens
            return _head(rows._replace(log_probs=rows.ref) if of_reference else rows)()

        return call

    trainer.ref_model = forward(True)
    inputs = {f"KL_{name}": x for name, x in _inputs(kl_tokens.mask, fill=1).items()}
    inputs |= _inputs(tokens.mask) | {"label": label}
    return trainer._compute_loss(forward(False), inputs, False), _metrics(trainer)


def reference_free(
    name: str, logits: Tensor, ids: Tensor, mask: Tensor, **options: Any
) -> tuple[Tensor, dict[str, float]]:
    """Call ORPO's or CPO's trainer with logits (2 * pairs, seq + 1, vocab), ids and a mask."""
    if name == "orpo":
        from trl.experimental.orpo.orpo_trainer import ORPOConfig as Config
        from trl.experimental.orpo.orpo_trainer import ORPOTrainer as Trainer
    else:
        from trl.experimental.cpo.cpo_trainer import CPOConfig as Config
        from trl.experimental.cpo.cpo_trainer import CPOTrainer as Trainer

    trainer = _trainer(Trainer, Config, **options)
    vars(trainer).update(is_encoder_decoder=False, padding_value=0, pad_token_id=0)
    labels = torch.where(_inputs(mask)["completion_mask"].bool(), ids, -100)
    batch = {
        "concatenated_input_ids": ids,
        "concatenated_attention_mask": torch.ones_like(ids),
        "concatenated_labels": labels,
    }
    trainer.concatenated_inputs = lambda *_, **__: batch

    def model(*_: Any, **__: Any) -> Any:
        return SimpleNamespace(logits=logits)

    pairs = {"chosen_labels": labels[: len(labels) // 2]}
    loss, metrics = trainer.get_batch_loss_metrics(model, pairs)
    return loss, {name: float(value) for name, value in metrics.items()}


def _policy(trainer: Any, tokens: Tokens, **inputs: Any) -> tuple[Tensor, dict[str, float]]:
    """Call the loss of a trainer of completions."""
    given = vars(trainer)
    if trainer.epsilon_high is None:
        trainer.epsilon_high = trainer.epsilon
    trainer.epsilon_low = trainer.epsilon
    found = tokens.log_probs, tokens.entropy, None
    given["_get_per_token_logps_and_entropies"] = lambda *_, **__: found
    ids = torch.zeros(tokens.mask.shape, dtype=torch.long)
    inputs |= {"prompt_ids": ids[:, :1], "prompt_mask": ids[:, :1], "completion_ids": ids}
    inputs |= {"completion_mask": tokens.mask.long()}
    return trainer._compute_loss(None, inputs), _metrics(trainer)


def grpo(tokens: Tokens, advantages: Tensor, **options: Any) -> tuple[Tensor, dict[str, float]]:
    from trl.trainer.grpo_trainer import GRPOConfig, GRPOTrainer

    ratio = options.pop("importance_sampling_ratio", None)
    old = options.pop("old_log_probs", tokens.old)
    trainer = _trainer(
        GRPOTrainer,
        GRPOConfig,
        **{"max_completion_length": 11, "steps_per_generation": 1} | options,
        use_vllm=ratio is not None,
        _entropy_bonus_enabled="entropy_coef" in options,
    )
    return _policy(
        trainer,
        tokens,
        advantages=advantages,
        old_per_token_logps=old,
        ref_per_token_logps=tokens.ref,
        sampling_per_token_logps=tokens.sampling,
        num_items_in_batch=tokens.mask.sum(),
        **{} if ratio is None else {"importance_sampling_ratio": ratio},
    )


def rloo(tokens: Tokens, advantages: Tensor, **options: Any) -> tuple[Tensor, dict[str, float]]:
    from trl.trainer.rloo_trainer import RLOOConfig, RLOOTrainer

    trainer = _trainer(RLOOTrainer, RLOOConfig, **options)
    old = (tokens.old * tokens.mask).sum(1)
    return _policy(trainer, tokens, advantages=advantages, old_logps=old)


def reward(
    rewards: Tensor, margin: Tensor | None, coefficient: float | None
) -> tuple[Tensor, dict[str, float]]:
    from trl.trainer.reward_trainer import RewardConfig, RewardTrainer

    trainer = _trainer(RewardTrainer, RewardConfig, center_rewards_coefficient=coefficient)
    inputs = {"attention_mask": torch.ones(len(rewards), 1)}
    inputs |= {} if margin is None else {"margin": margin}

    def model(**_: Any) -> Any:
        return SimpleNamespace(logits=rewards[:, None])

    return trainer.compute_loss(model, inputs), _metrics(trainer)


def sft(tokens: Tokens, loss_type: str) -> Tensor:
    from trl.trainer.sft_trainer import SFTConfig, SFTTrainer

    trainer = _trainer(SFTTrainer, SFTConfig, loss_type=loss_type)
    vars(trainer).update(compute_loss_func=None, label_smoother=None)
    trainer.args.average_tokens_across_devices = False
    return trainer.compute_loss(
        _head(tokens), {"attention_mask": tokens.mask, "labels": tokens.mask}
    )


def advantages(name: str, rewards: Tensor, num_generations: int, **options: Any) -> Tensor:
    """Run the lines of TRL's trainer that turn rewards into advantages.

    They stand in the middle of `_generate_and_score_completions`, so they are cut out of its source
    between the rewards and the slice of this process.
    """
    from trl.trainer import grpo_trainer, rloo_trainer
    from trl.trainer.utils import nanstd

    trainer = grpo_trainer.GRPOTrainer if name == "grpo" else rloo_trainer.RLOOTrainer
    source = inspect.getsource(trainer._generate_and_score_completions)
    begin = source.index("        unscorable_mask = ")
    end = source.index("        # Slice to keep only the local part of the data")
    table = rewards.view(len(rewards), -1)
    kl = options.pop("kl", None)
    options = {"reward_weights": torch.ones(table.shape[1], dtype=table.dtype), **options}
    names = {
        "self": SimpleNamespace(
            reward_funcs=range(table.shape[1]), num_generations=num_generations, **options
        ),
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

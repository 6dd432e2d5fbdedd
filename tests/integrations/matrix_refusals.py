"""What native models refuse in the tools, and with which words: rows of docs/trainers_matrix.md."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from transformers import Trainer

from ligermodels.integrations.peft_adapters import get_peft_model
from tests.integrations import test_trl_trainers
from tests.integrations.matrix_cells import NATIVE, SHELL, adapter, cut, tokens
from tests.integrations.test_hf_trainer import examples, quiet, train
from tests.integrations.test_trl_trainers import ANSWERS
from tests.integrations.tiny import theirs


@dataclass(frozen=True)
class Refusal:
    """A row of the page: a tool, what is refused, and words of the error.

    Attributes:
        what: docs/trainers.md has the reason under the same name.
        attempt: a function of a checkpoint's folder and an empty folder, which has to raise a
            ValueError or, where a file is written, an OSError.
    """

    tool: str
    what: str
    words: str
    attempt: Callable[[Path, Path], Any]


def argument(name: str, value: Any = True) -> Callable[[Path, Path], Any]:
    return lambda folder, place: SHELL(folder)(tokens(), **{name: value})


def trained(load: Any, rows: list[Any], **options: Any) -> Callable[[Path, Path], Any]:
    return lambda folder, place: train(load(folder), place, rows, **options)


def predicted_without_labels(folder: Path, place: Path) -> Any:
    without = [{"input_ids": row["input_ids"]} for row in rows()]
    return Trainer(NATIVE(folder), quiet(place)).predict(without)


def rows() -> list[Any]:
    return [{name: cut(values) for name, values in row.items()} for row in examples([12, 3])]


def adapted(folder: Path, **options: Any) -> Any:
    return peft.get_peft_model(SHELL(folder), adapter(**options))


def native_adapted(folder: Path, place: Path) -> Any:
    """PEFT takes a native model if an adapter has no task_type."""
    config = peft.LoraConfig(target_modules=["q_proj", "o_proj"])
    peft.get_peft_model(theirs(folder), config).save_pretrained(place)
    return peft.PeftModel.from_pretrained(NATIVE(folder), str(place))


def quantised_and(then: Callable[..., Any]) -> Callable[[Path, Path], Any]:
    """torchao quantises a wrapper that is loaded already."""

    def attempt(folder: Path, place: Path) -> Any:
        ao, wrapper = pytest.importorskip("torchao.quantization"), SHELL(folder)
        ao.quantize_(wrapper.model, ao.Int8WeightOnlyConfig())
        return then(wrapper, place / "saved")

    return attempt


def saved(wrapper: Any, place: Path) -> None:
    wrapper.save_pretrained(place)


def given_an_adapter(wrapper: Any, place: Path) -> Any:
    return get_peft_model(wrapper, adapter())


CANNOT = "the model cannot honour this argument"
SAVED, SPLIT = "cannot be saved under HF's names", "whose rows cannot be taken out"
REFUSALS = [
    Refusal(
        "transformers",
        '`cache_implementation="static"`',
        "only dynamic caches work",
        lambda folder, place: SHELL(folder).generate(
            tokens(), max_new_tokens=2, cache_implementation="static"
        ),
    ),
    Refusal(
        "transformers",
        "`generate_batch`",
        "generate_batch and continuous batching: they need transformers' own attention",
        lambda folder, place: SHELL(folder).generate_batch(
            inputs=[[5, 6, 7]], generation_config=SHELL(folder).generation_config
        ),
    ),
    *(
        Refusal("transformers", what, words, argument(name, value))
        for what, words, name, value in (
            ("`output_attentions`", CANNOT, "output_attentions", True),
            (
                "a mask that is added to scores",
                "to be added to scores is not supported",
                "attention_mask",
                torch.ones(2, 1, 9, 9),
            ),
            ("`head_mask`", CANNOT, "head_mask", torch.ones(2, 4)),
            ("`output_router_logits`, without experts", CANNOT, "output_router_logits", True),
            ("`token_type_ids`", CANNOT, "token_type_ids", torch.zeros(2, 9, dtype=torch.long)),
        )
    ),
    Refusal(
        "transformers",
        "`use_reentrant=True`",
        "only use_reentrant=False is implemented",
        lambda folder, place: SHELL(folder).gradient_checkpointing_enable({"use_reentrant": True}),
    ),
    Refusal(
        "transformers",
        "tensors under HF's names, native model",
        "is a name of HF's model",
        lambda folder, place: NATIVE(folder).load_state_dict(theirs(folder).state_dict()),
    ),
    Refusal(
        "Trainer",
        "`label_smoothing_factor`, native model",
        "loss options need labels",
        trained(NATIVE, rows(), label_smoothing_factor=0.1),
    ),
    Refusal(
        "Trainer",
        "`predict` without labels, native model",
        "a native model returns hidden states, which are no predictions",
        predicted_without_labels,
    ),
    Refusal(
        "PEFT",
        "`qkv_proj` and other names of packed projections",
        "which HF's model does not have",
        lambda folder, place: adapted(folder, target_modules=["qkv_proj", "o_proj"]),
    ),
    Refusal(
        "PEFT",
        "`PeftModel.from_pretrained`, native model",
        "is a name of HF's model",
        native_adapted,
    ),
    Refusal(
        "PEFT",
        "`hf_named_parameters` before `merge_adapter`",
        "has an adapter that is not merged",
        lambda folder, place: dict(
            get_peft_model(SHELL(folder), adapter()).get_base_model().hf_named_parameters()
        ),
    ),
    Refusal(
        "torchao", "`save_pretrained` of packed, quantised weights", SAVED, quantised_and(saved)
    ),
    Refusal(
        "torchao, PEFT",
        "adapters on packed, quantised weights",
        SPLIT,
        quantised_and(given_an_adapter),
    ),
    Refusal(
        "TRL",
        "`use_liger_kernel=True`",
        "use_liger_kernel=True would put Liger's modules in the place of this model's own",
        lambda folder, place: test_trl_trainers.run(
            "LigerSFTTrainer", SHELL(folder), place, {"text": ANSWERS}, {"use_liger_kernel": True}
        ),
    ),
]

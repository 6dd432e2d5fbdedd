"""Options as fields of a dataclass: a field holds an option's choices and limits.

The docstring of the class says what each option is for, under "Attributes:". The command line, a
run's run.yaml and the checks of the values all follow from the class.
"""

from __future__ import annotations

import contextlib
import math
import operator
import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import Field, dataclass, field, fields
from functools import partial
from inspect import cleandoc
from types import UnionType
from typing import Any, get_args, get_origin, get_type_hints

from typing_extensions import Self

from ligermodels.converters.files import dtype_name
from ligermodels.errors import ConfigError, short_repr
from ligermodels.memory.byte_sizes import parse_bytes

# The names that other programs give to these options. An error suggests ours for them.
_OTHER_NAMES = {
    "model": "model_name_or_path base_model model_id",
    "train_files": "data dataset datasets dataset_name data_path train_file train_data "
    "train_dataset training_data",
    "eval_files": "eval_data eval_dataset val_data validation_file test_file",
    "eval_fraction": "val_set_size val_size test_size",
    "learning_rate": "lr",
    "seq_len": "max_length max_len max_seq_length max_seq_len model_max_length cutoff_len "
    "block_size",
    "num_train_epochs": "max_epochs",
    "max_steps": "steps",
    "batch_size": "bs per_device_train_batch_size micro_batch_size",
    "activation_checkpointing": "gradient_checkpointing",
    "eval_steps": "eval_strategy eval_every",
    "save_steps": "save_strategy",
    "warmup_steps": "warmup_ratio",
    "output_dir": "out out_dir save_dir",
    "target": "output output_dir",  # of `convert`
    "files": "eval_files train_files",  # of `evaluate`
    "resume": "resume_from_checkpoint auto_resume_from_checkpoints",
    "lora_r": "lora lora_rank use_lora use_peft adapter peft",
    "lora_dora": "dora use_dora peft_use_dora",
    "lora_rslora": "rslora use_rslora peft_use_rslora",
    "modules_to_save": "lora_modules_to_save additional_target",
    "add_tokens": "tokens new_tokens added_tokens",
    "special_tokens": "additional_special_tokens new_special_tokens",
    "chat_template": "chat_template_jinja template",
    "columns": "column_mapping field_map",
    "eval_tasks": "lm_eval_tasks tasks",
    "from_scratch": "random_init pretrain train_from_scratch",
    "lora_targets": "lora_target lora_target_modules target_modules",
    "load_in": "load_in_4bit load_in_8bit quantization quantize quantization_bit",
    "precision": "bf16 fp16 dtype torch_dtype mixed_precision",
    "loss": "stage method rl dpo kto orpo grpo trainer",
    "report_to": "wandb tensorboard logger",
}
OTHER_NAMES = {other: name for name, others in _OTHER_NAMES.items() for other in others.split()}


@dataclass(frozen=True, kw_only=True)
class Facts:
    """What is known of an option beside its type and its default.

    Attributes:
        choices: of the option, or of each item of a list.
        free_on_resume: whether a resumed run may change the option: either it does not affect the
            trained weights, or (the data files, the model) a hash of the content is compared.
        flag: its name among all options, if that is another one than the field's.
        metavar: what stands for its value in the help of the command line.
        is_size: whether it is a number of bytes, which may be written as 5GB.
        positional: whether the command line takes its value without its name.
        repeats: whether the command line takes each item of a list with its name before it.
        only_for: another option, and its values for which this one has a meaning.
        needs: another option, without which this one has no meaning.
        at_least, more_than, at_most, less_than: the limits of a number.
    """

    choices: tuple[str, ...] | None = None
    free_on_resume: bool = False
    flag: str | None = None
    metavar: str | None = None
    is_size: bool = False
    positional: bool = False
    repeats: bool = False
    only_for: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    needs: str | None = None
    at_least: float | None = None
    more_than: float | None = None
    at_most: float | None = None
    less_than: float | None = None


def option(default: Any, **facts: Any) -> Any:
    """Return a dataclass field that is an option, with these `Facts`."""
    return field(default=default, metadata=vars(Facts(**facts)))


free_option = partial(option, free_on_resume=True)


def flat_name(each: Field[Any]) -> str:
    """Return the name of an option among those of all subjects."""
    return each.metadata["flag"] or each.name


def flat_names(kind: type[Options]) -> list[str]:
    """Return the names of the options of a class among those of all subjects."""
    return [flat_name(each) for each in fields(kind)]


def helps(kind: type[Options]) -> dict[str, str]:
    """Return the help of each option by its name, from the docstrings of a class and its bases."""
    found: dict[str, str] = {}
    for each in reversed(kind.__mro__):
        _, _, listed = cleandoc(each.__doc__ or "").partition("Attributes:\n")
        for name, text in re.findall(r"^    (\w+): (.+(?:\n {5}.+)*)", listed, re.MULTILINE):
            found[name] = " ".join(text.removesuffix(".").split())
    return {flat_name(each): found.get(each.name, "") for each in fields(kind)}


def types_of(kind: type) -> dict[str, Any]:
    """Return the type of each option's value by the option's name, without None.

    It is str, int, float, bool, list[str] or list[float].
    """
    hints = get_type_hints(kind)
    return {flat_name(each): _required(hints[each.name]) for each in fields(kind)}


def _required(hint: Any) -> Any:
    """Return a type without None; an optional value is annotated as `type | None`."""
    return get_args(hint)[0] if isinstance(hint, UnionType) else hint


def typed(kind: Any, words: Any) -> Any:
    """Return the value that a text stands for, or the texts of a list.

    A wrong text stays as it is, and the option refuses it.
    """
    if get_origin(kind) is list and words is not None:
        several = words if isinstance(words, list) else [words]
        return [typed(get_args(kind)[0], word) for word in several]
    if kind is bool:
        return {"true": True, "false": False}.get(words, words)
    if kind in (int, float) and words is not None:
        with contextlib.suppress(ValueError):
            return kind(words)
    return words


@dataclass(kw_only=True)
class Options:
    """A base class for dataclasses whose fields are options: it checks their values.

    A path becomes a text, and a single value of a list becomes a list.

    Raises:
        ConfigError: a value has the wrong type, is not one of the choices or breaks a limit.
    """

    @classmethod
    def taken(cls, values: dict[str, Any]) -> Self:
        """Return the options with what a dict has for their names, and remove it there."""
        names = {flat_name(each): each.name for each in fields(cls)}
        return cls(**{names[name]: values.pop(name) for name in names if name in values})

    def __post_init__(self) -> None:
        hints = get_type_hints(type(self))
        for each in fields(self):
            value, kind = getattr(self, each.name), _required(hints[each.name])
            if value is None and kind is not hints[each.name]:
                continue
            if get_origin(kind) is list:
                several = isinstance(value, Iterable) and not isinstance(value, (str, Mapping))
                item = get_args(kind)[0]
                value = [_checked(each, item, one) for one in (value if several else [value])]
            else:
                value = _checked(each, kind, value)
            setattr(self, each.name, value)
        for each in fields(self):
            if getattr(self, each.name) in (each.default, []):
                continue
            for other, values in each.metadata["only_for"].items():
                if getattr(self, other) not in values:
                    known = ", ".join(values)
                    raise ConfigError(f"{flat_name(each)}: this is only for the {other} {known}")
            needed = each.metadata["needs"]
            if needed is not None and getattr(self, needed) in (None, False, []):
                raise ConfigError(f"{flat_name(each)}: this needs {needed}")


def _checked(each: Field[Any], kind: Any, value: Any) -> Any:
    """Return a value of an option, or an item of its list, with the type of the option."""
    name, choices = flat_name(each), each.metadata["choices"]
    if isinstance(value, os.PathLike):
        value = os.fspath(value)
    if each.metadata["is_size"] and isinstance(value, str):
        value = parse_bytes(value, name)
    if each.name.endswith("dtype") and isinstance(value, str):
        value = dtype_name(value)
    accepted = (int, float) if kind is float else kind
    complaint = None
    if choices is not None:
        if value not in choices:
            complaint = f"must be one of {', '.join(choices)}, not {short_repr(value)}"
    elif not isinstance(value, accepted) or (isinstance(value, bool) and kind is not bool):
        complaint = f"must be {_KINDS[kind]}, not {short_repr(value)}"
    elif kind in (int, float):
        complaint = _limit_complaint(value, each.metadata)
    if complaint is not None:
        raise ConfigError(f"{name}: {complaint}")
    return value


_LIMITS = {
    "at_least": operator.ge,
    "more_than": operator.gt,
    "at_most": operator.le,
    "less_than": operator.lt,
}


def _limit_complaint(value: float, facts: Mapping[str, Any]) -> str | None:
    """Return a text such as "must be at least 2, not 1" if a number breaks a limit, else None.

    A number that is not finite breaks every limit, and so does a whole number beyond 64 bits.
    """
    if isinstance(value, int) and abs(value) >= 2**63:
        return "must fit into 64 bits"
    if not math.isfinite(value):
        return f"must be a finite number, not {value}"
    for name, holds in _LIMITS.items():
        limit = facts[name]
        if limit is not None and not holds(value, limit):
            return f"must be {name.replace('_', ' ')} {limit}, not {value!r}"
    return None


_KINDS = {str: "a text", bool: "True or False", int: "a whole number", float: "a number"}

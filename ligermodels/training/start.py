"""The checkpoint that a run starts from, where it is not the one that the user names.

A run that trains from scratch, with new tokens or towards a reward model first writes such a
checkpoint to its folder. From then on it is like any other: it is sharded, hashed for a resumed
run, merged with adapters, and an exported adapter belongs to it.
"""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ligermodels.converters.files import GENERATION_CONFIG_NAME, open_regular, read_json_if_present
from ligermodels.converters.hub import resolve
from ligermodels.errors import CheckpointError, ConfigError
from ligermodels.heads.classifier import LigerClassifier, SequenceClassifier, classifier_class
from ligermodels.models.auto import AutoLiger, families, family_of
from ligermodels.models.base import DecoderModel
from ligermodels.models.config import ModelConfig
from ligermodels.text.tokenizer import Tokenizer
from ligermodels.text.tokenizer_config import SPECIAL_TOKENS
from ligermodels.training.config import FinetuneConfig


def has_own_start(config: FinetuneConfig) -> bool:
    """Return whether a run with this config writes the checkpoint that it starts from."""
    tokens = config.tokenizer.add_tokens or config.tokenizer.special_tokens
    return bool(config.model.from_scratch or tokens or config.loss.classifies)


def write_start(config: FinetuneConfig, folder: Path) -> None:
    """Write the checkpoint that a run starts from.

    Raises:
        ConfigError, CheckpointError: the model or the tokenizer cannot be loaded, or an option does
            not fit them.
        SaveError: the folder cannot be written.
    """
    options, seed = config.model, config.schedule.seed
    draw = torch.Generator().manual_seed(seed)
    if options.from_scratch:
        source = Path(resolve(_tokenizer_source(config), revision=options.revision, weights=False))
        tokenizer = tokenizer_of(source, config)
        model: DecoderModel = _from_scratch(config, tokenizer, seed)
    else:
        source = Path(resolve(str(options.path), revision=options.revision))
        tokenizer = tokenizer_of(source, config)
        raw = read_json_if_present(source / "config.json", CheckpointError) or {}
        kinds = raw.get("architectures") or ()
        of_rewards = config.loss.classifies and any("ForSequenceClassification" in x for x in kinds)
        loader: Any = LigerClassifier if of_rewards else AutoLiger
        model = loader.from_hf(source)
        if len(tokenizer) > model.config.vocab_size:
            model.resize_token_embeddings(len(tokenizer))
    if config.loss.classifies and not isinstance(model, SequenceClassifier):
        family: Any = type(model)
        model = classifier_class(family).from_model(model, num_labels=1)
        std = model.config.initializer_range
        nn.init.normal_(model.head.score.weight, std=std, generator=draw)
    if config.loss.classifies and model.config.pad_token_id is None:
        pad, end = tokenizer.pad_token_id, tokenizer.eos_token_id
        model.config.pad_token_id = end if pad is None else pad  # before it is the last token
    generation = model.source.files.get(GENERATION_CONFIG_NAME)
    model.source.files = tokenizer.files()
    for name in ("bos", "eos", "pad"):
        index = getattr(tokenizer, f"{name}_token_id")
        if index is not None and (options.from_scratch or f"{name}_token" in _roles(config)):
            setattr(model.config, f"{name}_token_id", index)
            generation = _with_stop(generation, f"{name}_token_id", index)
    if generation is not None:
        model.source.files[GENERATION_CONFIG_NAME] = generation
    model.save_hf(folder, max_shard_size=config.output.max_shard_size)


def tokenizer_of(source: Path, config: FinetuneConfig) -> Tokenizer:
    """Return the tokenizer of a folder with the tokens and the chat template of a config."""
    tokenizer, options = Tokenizer.from_hf(source), config.tokenizer
    roles = _roles(config)
    special = [roles.get(x.partition("=")[0], x) for x in options.special_tokens or ()]
    tokenizer.add_tokens(special, special=True)
    tokenizer.add_tokens(options.add_tokens or ())
    tokenizer.special_tokens |= roles
    if options.chat_template is not None:
        with open_regular(Path(options.chat_template), ConfigError) as file:
            tokenizer.chat_template = file.readall().decode()
    return tokenizer


def _roles(config: FinetuneConfig) -> dict[str, str]:
    """Return the special tokens that have a role, such as eos_token, by it."""
    pairs = [each.partition("=") for each in config.tokenizer.special_tokens or ()]
    return {name: token for name, _, token in pairs if name in SPECIAL_TOKENS and token}


def _with_stop(generation: bytes | None, name: str, index: int) -> bytes | None:
    """Return a generation_config.json with another token; several that end a text stay."""
    if generation is None:
        return None
    found = json.loads(generation)
    old = found.get(name)
    found[name] = [index, *(x for x in old if x != index)] if isinstance(old, list) else index
    return (json.dumps(found, indent=2) + "\n").encode()


def _tokenizer_source(config: FinetuneConfig) -> str:
    path, model = config.tokenizer.path, str(config.model.path)
    if path is None and preset_named(model) is not None:
        raise ConfigError(
            f"tokenizer: missing; {model} is a preset, which has sizes alone: give the hub id or "
            "folder of a tokenizer (--tokenizer)"
        )
    return path or model


def preset_named(name: str) -> type[DecoderModel] | None:
    """Return the family that has a preset of this name."""
    return next((each for each in families().values() if name in each.config_class.presets), None)


def _from_scratch(config: FinetuneConfig, tokenizer: Tokenizer, seed: int) -> DecoderModel:
    """Return a model with random weights, of the sizes of a preset or of a checkpoint."""
    name = str(config.model.path)
    family = preset_named(name)
    if family is not None:
        made: ModelConfig = family.config_class.preset(name)
    else:
        source = resolve(name, revision=config.model.revision, weights=False)
        family = family_of(source)
        made = family.config_class.from_hf(source)
    known = {field.name for field in dataclasses.fields(made)} - {"extra"}
    changes: dict[str, Any] = {"dtype": "float32"}
    for each in config.model.config_overrides or ():
        key, _, text = each.partition("=")
        if key not in known or not text:
            raise ConfigError(
                f"config_overrides: {each!r}; expected FIELD=VALUE, where FIELD is one of "
                f"{', '.join(sorted(known))}"
            )
        try:
            changes[key] = json.loads(text)
        except ValueError:
            changes[key] = text
    changes.setdefault("vocab_size", max(made.vocab_size, len(tokenizer)))
    if {"hidden_size", "num_attention_heads"} & changes.keys():
        for key in ("head_dim", "num_key_value_heads"):
            changes.setdefault(key, None)
    for key in ("bos_token_id", "eos_token_id", "pad_token_id"):
        changes.setdefault(key, None)
    with torch.random.fork_rng([]):
        torch.manual_seed(seed)
        return family(dataclasses.replace(made, **changes))

"""The families, and the features in which each is compared with transformers.

A feature is a config, an edit of its config.json, the size of its shards, and its inputs.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch
import transformers
from torch import Tensor

from ligermodels.models import auto
from tests import families
from tests.families import Json

FAMILIES = tuple(families.FAMILIES)
EOS, PAD = 1, 2
KINDS = ("maths", "numbers", "file", "input")


@dataclass(frozen=True)
class Scale:
    """Sizes for one kind of machine; windows and lengths of the features follow from them."""

    vocab: int | None  # None means the family's own vocabulary size
    hidden: int
    inner: int
    heads: int
    kv_heads: int
    head_dim: int
    seq: int
    window: int
    trained: int  # scaled rope goes beyond this length
    prompt: int
    new: int


TINY = Scale(131, 48, 56, 4, 2, 16, 24, 5, 16, 9, 12)
WIDE = Scale(1009, 256, 384, 8, 4, 64, 48, 20, 32, 24, 12)
REAL = Scale(None, 256, 384, 8, 4, 64, 200, 70, 128, 130, 24)


@dataclass(frozen=True)
class Feature:
    """One row of the parity table.

    Attributes:
        kind: "maths" changes what is computed, "numbers" only sizes and scales, "file" only how
            the checkpoint is written, "input" only the model's inputs. Numbers and files compile
            to nothing new, and another feature has the round trip of an "input"'s checkpoint.
        config: fields that override the family's sizes.
        inputs: "plain", "packed", "left padding" or "right padding".
        rewrite: a function that edits config.json (a wrapper's text_config) before a load.
    """

    kind: str = "maths"
    config: Json = field(default_factory=dict)
    inputs: str = "plain"
    rewrite: Callable[[Json], None] | None = None
    max_shard_size: int | str = "50GB"
    dtype: torch.dtype = torch.float32


class Inputs(NamedTuple):
    """A model's inputs; `ours` and `theirs` are keywords that mean the same."""

    ids: Tensor
    labels: Tensor
    ours: dict[str, Tensor]
    theirs: dict[str, Any]
    real: Tensor  # True for tokens that are not padding
    exact_labels: Tensor  # labels for transformers, without those that ours ignores by itself


def has(family: str, name: str) -> bool:
    """Return whether the family's config has a field of this name."""
    return name in {each.name for each in dataclasses.fields(_config_class(family))}


def _config_class(family: str) -> Any:
    return auto.families()[family].config_class


def _always_slides(family: str) -> bool:
    """Return whether some layers have a window by default, as in Gemma 2, 4 and gpt-oss."""
    names = "query_pre_attn_scalar", "swiglu_limit", "global_head_dim", "rope_local_base_freq"
    return any(has(family, name) for name in names)


def sizes(family: str, scale: Scale = TINY) -> Json:
    """Return the config that every feature of the family starts from."""
    config: Json = {
        "vocab_size": scale.vocab or families.FAMILIES[family].vocabulary,
        "hidden_size": scale.hidden,
        "intermediate_size": scale.inner,
        "num_hidden_layers": 2,
        "num_attention_heads": scale.heads,
        "num_key_value_heads": scale.kv_heads,
        "head_dim": scale.head_dim,
        "max_position_embeddings": 4 * scale.seq,
        "bos_token_id": 0,
        "eos_token_id": EOS,
        "pad_token_id": PAD,
    }
    if not families.FAMILIES[family].takes_head_dim:
        del config["head_dim"]
    if _always_slides(family):
        config["sliding_window"] = scale.window
    if has(family, "query_pre_attn_scalar"):
        config["query_pre_attn_scalar"] = scale.head_dim
    if has(family, "swiglu_limit"):
        # At a limit the gradient jumps. Of many values, some are so near that rounding decides.
        config |= {"swiglu_alpha": 1.3, "swiglu_limit": 6.0 if scale is REAL else 0.7}
    if has(family, "attn_logit_softcapping"):
        config |= {"attn_logit_softcapping": 2.0, "final_logit_softcapping": 3.0}
    if has(family, "sliding_window_pattern"):
        config["sliding_window_pattern"] = 2
    if has(family, "global_head_dim"):
        config |= {"global_head_dim": 2 * scale.head_dim, "num_global_key_value_heads": 1}
        config |= {"attention_k_eq_v": True, "hidden_size_per_layer_input": 0}
    if has(family, "linear_key_head_dim"):
        key, value = scale.head_dim, scale.head_dim * 3 // 2
        config |= families.DELTA | {"linear_key_head_dim": key, "linear_value_head_dim": value}
        config["head_dim"] = scale.head_dim
    if has(family, "shared_expert_intermediate_size"):
        config["shared_expert_intermediate_size"] = scale.inner // 4
        config["moe_intermediate_size"] = scale.inner // 2
    if experts := experts_field(family):
        config |= {experts: 5, "num_experts_per_tok": 2}
        config |= {"output_router_logits": True, "router_aux_loss_coef": 0.5}
    if has(family, "norm_topk_prob"):
        config |= {"moe_intermediate_size": scale.inner // 2, "norm_topk_prob": True}
    tested = families.FAMILIES[family]
    return config | families.FAMILIES[tested.text_model or family].base


def experts_field(family: str) -> str | None:
    """Return the field with the number of experts, or None for a family without them."""
    return getattr(_config_class(family), "experts_field", None)


def rope_types(family: str, scale: Scale) -> dict[str, Json]:
    """Return `rope_parameters` of every type; in most, sequences exceed the trained length."""
    beyond = {"original_max_position_embeddings": scale.trained}
    takes_head_dim = families.FAMILIES[family].takes_head_dim
    pairs = (scale.head_dim if takes_head_dim else scale.hidden // scale.heads) // 2
    part = 0.25 if has(family, "linear_key_head_dim") else 1
    pairs = int(pairs * families.FAMILIES[family].base.get("partial_rotary_factor", part))
    yarn = {"rope_type": "yarn", "factor": 4.0, **beyond}
    options = {"beta_fast": 4.0, "beta_slow": 0.5, "mscale": 0.7, "mscale_all_dim": 1.1}
    if not has(family, "rope_local_base_freq"):
        # transformers does not read this if rope is nested by layer type
        options["truncate"] = False
    longrope = {
        "rope_type": "longrope",
        "short_factor": [1.0 + 0.1 * i for i in range(pairs)],
        "long_factor": [1.5 + 0.4 * i for i in range(pairs)],
    }
    return {
        "linear rope": {"rope_type": "linear", "factor": 3.0},
        "dynamic rope": {"rope_type": "dynamic", "factor": 2.0},
        "yarn rope": yarn,
        "yarn rope, all options": yarn | options,
        "yarn rope, attention_factor": yarn | {"attention_factor": 1.3},
        "longrope": longrope | {"factor": 4 * scale.seq / scale.trained, **beyond},
        "longrope, short": longrope | {"original_max_position_embeddings": 2 * scale.seq},
        "llama3 rope": {
            "rope_type": "llama3",
            "factor": 8.0,
            **beyond,
            "low_freq_factor": 1.0,
            "high_freq_factor": 4.0,
        },
    }


def features(family: str, scale: Scale = TINY) -> dict[str, Feature]:
    """Return all features of the family, by name."""
    cls, tested = _config_class(family), families.FAMILIES[family]
    activation = cls.activation_field
    two_ropes, tied = has(family, "rope_local_base_freq"), cls.tie_word_embeddings
    rope = _rope_by_layer_type if two_ropes else _rope
    window, half = scale.window, scale.window // 2
    yarn = rope_types(family, scale)["yarn rope"]
    found = {
        "basic": Feature(),
        "bfloat16 file": Feature("file", dtype=torch.bfloat16),
        "shards": Feature("file", max_shard_size=20000 if scale is TINY else "20MB"),
        "untied" if tied else "tied": Feature(config={"tie_word_embeddings": not tied}),
        "old spelling": Feature("file", rope(5e5, {}), rewrite=old_spelling),
        "old spelling, scaled rope": Feature("file", rope(1e4, yarn), rewrite=old_spelling),
        "defaults left out": Feature(
            "file",
            families.FAMILIES[tested.text_model or family].defaults,
            rewrite=_leave_out(family),
        ),
        "no padding token": Feature("numbers", {"pad_token_id": None}),
        "one kv head": Feature("numbers", {"num_key_value_heads": 1}),
        "ungrouped heads": Feature("numbers", {"num_key_value_heads": scale.heads}),
        "odd sizes": Feature(
            config={
                "hidden_size": 576,
                "num_attention_heads": 9,
                "num_key_value_heads": 3,
                # transformers' products of experts need rows of whole 16 bytes.
                "intermediate_size": 204 if experts_field(family) else 203,
                **({"vocab_size": 1013} if scale is TINY else {}),
                **({"head_dim": 64} if tested.takes_head_dim else {}),
            }
        ),
        "packed": Feature("input", inputs="packed"),
        "left padding": Feature("input", inputs="left padding"),
        "right padding": Feature("input", inputs="right padding"),
        "erf gelu": Feature(config={activation: "gelu"}),
        "rope theta": Feature("numbers", rope(300.0, {})),
    }
    for name, parameters in rope_types(family, scale).items():
        longest = 2 * scale.seq if name == "longrope, short" else scale.trained
        extra = {} if "yarn" in name or name == "longrope" else {"max_position_embeddings": longest}
        # The angles of these types depend on the length of the call, so other code computes them.
        kind = "maths" if name in ("longrope", "dynamic rope") else "numbers"
        found[name] = Feature(kind, {**rope(1e4, parameters), **extra})
    if tested.sliding is not None and not _always_slides(family):
        given = families.windows(family, window)
        found |= {
            "window": Feature(config=given),
            "window of 1": Feature("numbers", {**given, "sliding_window": 1}),
            "window, packed": Feature("input", given, "packed"),
            "window, left padding": Feature("input", given, "left padding"),
            "window, right padding": Feature("input", given, "right padding"),
        }
    if has(family, "sliding_window") and tested.sliding == {} and not _always_slides(family):
        found["window null"] = Feature("file", {"sliding_window": None})
    if has(family, "max_window_layers"):
        given = {**families.windows(family, window), "num_hidden_layers": 3}
        layers = ["full_attention", "sliding_attention", "full_attention"]
        found |= {
            "windows in all layers": Feature("numbers", {**given, "max_window_layers": 0}),
            "max_window_layers 2": Feature("numbers", {**given, "max_window_layers": 2}),
            "window unused": Feature("file", {"sliding_window": window}),
            "layer_types": Feature(config={**given, "layer_types": layers}),
            "kv heads null": Feature(
                "file",
                {"num_key_value_heads": scale.heads},
                rewrite=lambda raw: raw.update(num_key_value_heads=None),
            ),
        }
    if _always_slides(family):
        layers = ["full_attention", "sliding_attention", "sliding_attention"]
        found |= {
            "window beyond the sequence": Feature("numbers", {"sliding_window": 2 * scale.seq}),
            "window of 1": Feature("numbers", {"sliding_window": 1}),
            "layer_types": Feature(config={"num_hidden_layers": 3, "layer_types": layers}),
        }
    if has(family, "query_pre_attn_scalar"):
        scalar = {"query_pre_attn_scalar": 3 * scale.head_dim}
        found["query_pre_attn_scalar"] = Feature("numbers", scalar)
    if has(family, "swiglu_limit"):
        limit = {"swiglu_limit": 3.0, "swiglu_alpha": 0.5}
        found["swiglu_limit"] = Feature("numbers", limit)
        del found["erf gelu"]  # its activation is not configured
        del found["packed"]  # in transformers' gpt-oss, documents of a row see each other
    if has(family, "linear_key_head_dim"):
        found |= {
            "layer_types": Feature(config={"layer_types": ["full_attention", "linear_attention"]}),
            "as many key heads": Feature("numbers", {"linear_num_key_heads": 4}),
        }
        del found["erf gelu"]  # its convolution has the same activation
        del found["packed"]  # in transformers, documents of a row see each other
    if has(family, "attn_logit_softcapping"):
        found |= {
            "no caps": Feature(
                config={"attn_logit_softcapping": None, "final_logit_softcapping": None}
            ),
            "score cap alone": Feature(config={"final_logit_softcapping": None}),
            "logit cap alone": Feature(config={"attn_logit_softcapping": None}),
            "no caps, packed": Feature("input", {"attn_logit_softcapping": None}, "packed"),
        }
    if has(family, "sliding_window_pattern"):
        seven = {"num_hidden_layers": 7, "sliding_window_pattern": 6, "sliding_window": half + 1}
        found |= {
            "final soft cap": Feature(config={"final_logit_softcapping": 2.0}),
            "five windows, one full": Feature("numbers", seven),
            "local theta": Feature("numbers", _rope_by_layer_type(1e6, {}, 50.0)),
            "sliding_window_pattern 3": Feature(
                "file",
                {"num_hidden_layers": 3, "sliding_window_pattern": 3},
                rewrite=lambda raw: raw.pop("layer_types"),
            ),
        }
    if experts := experts_field(family):
        found |= {
            "one expert per token": Feature("numbers", {"num_experts_per_tok": 1}),
            "all experts": Feature("numbers", {"num_experts_per_tok": 5}),
            # With more experts than tokens, some have none.
            "unused experts": Feature(
                "numbers", {experts: 64, "num_experts_per_tok": 1, "num_hidden_layers": 2}
            ),
            "balance not in the loss": Feature(config={"output_router_logits": False}),
        }
    if has(family, "mlp_only_layers"):
        four = {"num_hidden_layers": 4}
        found |= {
            "weights of any sum": Feature("numbers", {"norm_topk_prob": False}),
            "every second layer": Feature(config={**four, "decoder_sparse_step": 2}),
            "mlp_only_layers": Feature(config={**four, "mlp_only_layers": [0, 2]}),
            "num_experts": Feature("file", rewrite=_rename("num_local_experts", "num_experts")),
        }
    if cls.head_dim is None:  # the default follows from hidden_size
        if tested.takes_head_dim:
            found["head_dim from hidden"] = Feature("numbers", {"head_dim": None})
        else:
            found["head_dim given"] = Feature("numbers", {"head_dim": 2 * scale.head_dim})
    if has(family, "mlp_bias"):
        found["mlp_bias"] = Feature(config={"mlp_bias": True})
        found["all biases"] = Feature(config={"attention_bias": True, "mlp_bias": True})
    if "erf gelu" in found and cls(**{activation: "gelu"}).activation == "gelu_tanh":
        # For Gemma 1, transformers reads "gelu" as the tanh form.
        found["legacy gelu"] = Feature("file", {activation: "gelu"})
        del found["erf gelu"]
    if has(family, "attention_bias"):
        changed = {"attention_bias": not cls.attention_bias}
        found["attention_bias" if changed["attention_bias"] else "no attention_bias"] = Feature(
            config=changed
        )
    if has(family, "global_head_dim"):
        found = {name: x for name, x in found.items() if name in _OF_GEMMA4} | _gemma4(scale)
    if families.FAMILIES[family].composed:
        return _composed(family, found, scale)
    if tested.text_model:  # these are the text model's features that the wrapper may change
        kept = (
            *("basic", "bfloat16 file", "shards", "defaults left out", "tied", "untied"),
            *("old spelling", "packed", "left padding", "no padding token"),
            *("odd sizes", "yarn rope", "linear rope", "layer_types", "five windows, one full"),
            *("sliding_window_pattern 3", "local theta"),
        )
        found = {name: found[name] for name in kept if name in found}
        if family == "gemma4":  # transformers' wrapper fails without one
            del found["no padding token"]
    return found


# The features of all families that Gemma 4 has; transformers reads no old spelling of it.
_OF_GEMMA4 = (
    *("basic", "bfloat16 file", "shards", "untied", "defaults left out", "no padding token"),
    *("odd sizes", "packed", "left padding", "right padding", "erf gelu", "linear rope"),
    *("yarn rope", "window of 1", "window beyond the sequence", "layer_types", "attention_bias"),
)


def _gemma4(scale: Scale) -> dict[str, Feature]:
    """Return the features of Gemma 4 alone."""
    vocab = scale.vocab or families.FAMILIES["gemma4_text"].vocabulary
    embeddings = {"hidden_size_per_layer_input": 12, "vocab_size_per_layer_input": vocab}
    two = ["sliding_attention", "full_attention"]
    shared = {"num_hidden_layers": 6, "layer_types": 3 * two, "num_kv_shared_layers": 3}
    small = embeddings | shared | {"attention_k_eq_v": False, "use_double_wide_mlp": True}
    experts = {"enable_moe_block": True, "num_experts": 5, "moe_intermediate_size": 24}
    experts["top_k_experts"] = 2
    return {
        "final soft cap": Feature(config={"final_logit_softcapping": 2.0}),
        "five windows, one full": Feature("numbers", {"num_hidden_layers": 7}),
        "local theta": Feature("numbers", _rope_by_layer_type(1e6, {}, 50.0)),
        "values of their own": Feature(config={"attention_k_eq_v": False}),
        "experts": Feature(config=experts),
        "experts, packed": Feature("input", experts, "packed"),
        "embeddings of each layer": Feature(config=embeddings),
        "small models": Feature(config=small),
        "small models, packed": Feature("input", small, "packed"),
        "small models, left padding": Feature("input", small, "left padding"),
        "global_head_dim": Feature("file", rewrite=_as_published),
    }


def _as_published(raw: Json) -> None:
    """Write the sizes of full layers as published files do; transformers joins them in one key."""
    sizes = next(iter(raw.pop("per_layer_config").values()))
    raw["global_head_dim"] = sizes["head_dim"]
    raw["num_global_key_value_heads"] = sizes["num_key_value_heads"]


# The features of a composed family, besides those of its own. "old spelling" keeps its rope.
COMPOSED = (
    *("basic", "bfloat16 file", "tied", "untied", "old spelling", "defaults left out"),
    *("packed", "left padding", "right padding", "odd sizes", "attention_bias", "all biases"),
    *("window", "window, packed", "layer_types"),
)


LONGROPE = ("rope_type", "short_factor", "long_factor")


def _composed(family: str, found: dict[str, Feature], scale: Scale) -> dict[str, Feature]:
    """Return the features of a composed family, out of those of any family."""
    tested = families.FAMILIES[family]
    found = found | {"old spelling": Feature("file", rewrite=old_spelling)}
    left_out = {"packed", "defaults left out"} if family == "granitemoehybrid" else set()
    names = COMPOSED[:9] if tested.text_model else COMPOSED
    kept = {name: found[name] for name in names if name in found.keys() - left_out}
    if family == "phi3":
        factors = {name: found["longrope"].config["rope_parameters"][name] for name in LONGROPE}
        # A generation crosses the second length, so that all keys are computed again.
        lengths = {"longrope": 22, "longrope, crossed": 14, "longrope, short": 2 * scale.seq}
        for name, length in lengths.items():
            fields = {"rope_parameters": factors, "original_max_position_embeddings": length}
            kept[name] = Feature(config=fields)
    return kept | {name: Feature(config=fields) for name, fields in tested.features.items()}


def _rope(theta: float, parameters: Json) -> Json:
    return {"rope_parameters": {"rope_type": "default", **parameters, "rope_theta": theta}}


def _rope_by_layer_type(theta: float, parameters: Json, local: float = 1e4) -> Json:
    full = _rope(theta, parameters)["rope_parameters"]
    return {
        "rope_parameters": {
            "full_attention": full,
            "sliding_attention": _rope(local, {})["rope_parameters"],
        }
    }


def old_spelling(raw: Json) -> None:
    """Rewrite a config as transformers 4 wrote it, with some keys that no reader uses."""
    rope = raw.pop("rope_parameters")
    if "full_attention" in rope:
        raw["rope_local_base_freq"] = rope["sliding_attention"]["rope_theta"]
        rope = rope["full_attention"]
    raw["rope_theta"] = rope.pop("rope_theta")
    if "partial_rotary_factor" in rope:
        raw["partial_rotary_factor"] = rope.pop("partial_rotary_factor")
    # Gemma 3 came after the rename of "type", and does not read that key.
    key = "rope_type" if "rope_local_base_freq" in raw else "type"
    scaling = {key: rope.pop("rope_type"), **rope}
    raw["rope_scaling"] = None if scaling == {key: "default"} else scaling
    if "dtype" in raw:  # A wrapper's text_config has no dtype.
        raw["torch_dtype"] = raw.pop("dtype")
    raw |= {"transformers_version": "4.40.0", "rope_interleaved": False}


def _rename(old: str, new: str) -> Callable[[Json], None]:
    """Write a key of config.json as `new`, whichever of the two transformers has written."""
    return lambda raw: raw.update({new: raw.pop(old, raw.get(new))})


def config_class(family: str) -> Any:
    """Return transformers' config class of the family."""
    return getattr(transformers, families.FAMILIES[family].hf[0])


def _leave_out(family: str) -> Callable[[Json], None]:
    """Drop every key that holds transformers' default, as files on the hub do."""

    def rewrite(raw: Json) -> None:
        default = config_class(family)().to_dict()
        if families.FAMILIES[family].text_model:
            default = default["text_config"]
        derives_kv_heads = _config_class(family).num_key_value_heads is None
        for key in list(raw):
            derived = key.endswith(("layer_types", "sliding_window_pattern"))
            follows = key == "num_key_value_heads" and derives_kv_heads
            same = key in default and raw[key] == default[key]
            if derived or follows or (same and key != "model_type"):
                del raw[key]

    return rewrite


def make_inputs(kind: str, vocab: int, scale: Scale = TINY, seed: int = 0) -> Inputs:
    """Make two rows of tokens with the padding token among them and some labels ignored."""
    generator = torch.Generator().manual_seed(seed)
    rows, seq = 2, scale.seq
    # A wrapper uses its last three token ids for images.
    ids = torch.randint(3, vocab - 3, (rows, seq), generator=generator)
    ids[:, 3] = ids[-1, seq // 2] = PAD
    labels = ids.clone()
    labels[0, seq // 2 : seq // 2 + seq // 8] = -100
    real = torch.ones_like(ids, dtype=torch.bool)
    ours: dict[str, Tensor] = {}
    theirs: dict[str, Any] = {}
    exact = labels
    if kind == "packed":
        lengths = (seq // 3, 1, seq // 6, seq - seq // 3 - 1 - seq // 6)
        positions = torch.cat([torch.arange(length) for length in lengths]).expand(rows, -1)
        ours = {"position_ids": positions}
        theirs = {"position_ids": positions, "use_cache": False}
        # No token is predicted across a boundary between documents.
        exact = labels.masked_fill(positions == 0, -100)
    elif kind != "plain":
        padding = seq // 3
        mask = torch.ones_like(ids)
        mask[0, slice(0, padding) if kind == "left padding" else slice(seq - padding, seq)] = 0
        ours = theirs = {"attention_mask": mask}
        real = mask.bool()
        labels = labels.masked_fill(~real, -100)
        if kind == "left padding":
            # Padding attends to no token, and transformers' backends differ in what follows it.
            labels[0, padding] = -100
        exact = labels
    return Inputs(ids, labels, ours, theirs, real, exact)

"""A strict reading of a checkpoint, to judge a load by.

It shares no code with ligermodels, and takes its knowledge of a family from transformers.
"""

from __future__ import annotations

import copy
import dataclasses
import json
import struct
from typing import Any

import torch
import transformers

CONFIG, SINGLE, INDEX = "config.json", "model.safetensors", "model.safetensors.index.json"
# bytes, or a mark for what is not a regular file: ("link", target), "pipe", "folder" or "loop"
Content = Any
State = dict[str, Content]  # the files of a checkpoint: names and contents


class Broken(Exception):
    """The checkpoint must not load, for the reason in the message."""


def _unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    if len(dict(pairs)) != len(pairs):
        raise Broken("a JSON key appears twice")
    return dict(pairs)


def parse_json(text: Content) -> Any:
    try:
        return json.loads(text.decode(), object_pairs_hook=_unique)
    except (ValueError, RecursionError, AttributeError, Broken):
        return None


def read_config(state: State) -> dict[str, Any]:
    """Return config.json, if it is a valid one."""
    parsed = parse_json(state.get(CONFIG))
    if not isinstance(parsed, dict):
        raise Broken("config.json is missing")
    return parsed


_TORCH = {"F64": torch.float64, "F32": torch.float32, "F16": torch.float16, "BF16": torch.bfloat16}


def _read_tensors(content: Content) -> dict[str, torch.Tensor]:
    """Read a safetensors file by its specification, with the dtypes that a model can have."""
    if not isinstance(content, bytes) or len(content) < 8:
        raise Broken("the shard is not a safetensors file")
    length = struct.unpack_from("<Q", content)[0]
    if length > len(content) - 8:
        raise Broken("the header is longer than the file")
    header = parse_json(content[8 : 8 + length])
    if not isinstance(header, dict):
        raise Broken("header")
    metadata = header.pop("__metadata__", {})
    if not isinstance(metadata, dict) or any(type(v) is not str for v in metadata.values()):
        raise Broken("metadata")
    data = content[8 + length :]
    taken = bytearray(len(data))
    tensors = {}
    for name, record in header.items():
        if not isinstance(record, dict) or sorted(record) != ["data_offsets", "dtype", "shape"]:
            raise Broken("record")
        shape, offsets = record["shape"], record["data_offsets"]
        for numbers in (shape, offsets):
            if not isinstance(numbers, list) or any(type(n) is not int or n < 0 for n in numbers):
                raise Broken("numbers")
        if record["dtype"] not in _TORCH or len(offsets) != 2:
            raise Broken("dtype")
        begin, end = offsets
        if not begin <= end <= len(data) or any(taken[begin:end]):
            raise Broken("offsets")
        taken[begin:end] = b"\1" * (end - begin)
        count = 1
        for n in shape:
            count *= n
        dtype = _TORCH[record["dtype"]]
        if count * torch.empty(0, dtype=dtype).element_size() != end - begin:
            raise Broken("size")
        piece = torch.frombuffer(bytearray(data[begin:end]) or bytearray(8), dtype=torch.uint8)
        tensors[name] = piece[: end - begin].view(dtype).view(shape)
    if not all(taken):
        raise Broken("holes")
    return tensors


def read_weights(state: State) -> dict[str, torch.Tensor]:
    """Return all tensors of the checkpoint, by HF name."""
    if INDEX not in state:
        return _read_tensors(state.get(SINGLE))
    index = parse_json(state[INDEX])
    weight_map = index.get("weight_map") if isinstance(index, dict) else None
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise Broken("index")
    if SINGLE in state and SINGLE not in weight_map.values():
        raise Broken("the index does not name the single file")
    found: dict[str, torch.Tensor] = {}
    for file in set(weight_map.values()):
        tensors = _read_tensors(state.get(file))
        if sorted(tensors) != sorted(n for n, f in weight_map.items() if f == file):
            raise Broken("index and shard list different tensors")
        found |= tensors
    return found


def native(tensors: dict[str, torch.Tensor], tied: bool) -> dict[str, torch.Tensor]:
    """Make a state dict of HF tensors: stack q, k, v and gate, up, and rename the head."""
    tensors = {n: t for n, t in tensors.items() if not n.endswith("rotary_emb.inv_freq")}
    head = tensors.pop("lm_head.weight", None)
    if tied and head is not None and not _same(head, tensors["model.embed_tokens.weight"]):
        raise Broken("a tied head differs from the embedding")
    if not tied:
        if head is None:
            raise Broken("the head is missing")
        tensors["model.head.proj.weight"] = head
    out = {}
    for name, tensor in tensors.items():
        if not name.startswith("model."):
            raise Broken(f"tensor {name} is unexpected")
        name = name.removeprefix("model.")
        for packed, parts in (("qkv_proj", "qkv"), ("gate_up_proj", ("gate", "up"))):
            for part in parts:
                if f".{part}_proj." in name:
                    others = [
                        tensors[f"model.{name.replace(f'.{part}_', f'.{p}_')}"] for p in parts
                    ]
                    name = name.replace(f"{part}_proj", packed)
                    tensor = torch.cat(others)
        out[name] = tensor
    return out


def _same(a: torch.Tensor, b: torch.Tensor) -> bool:
    if a.dtype != b.dtype or a.shape != b.shape:
        return False
    a, b = a.contiguous().view(-1).view(torch.uint8), b.contiguous().view(-1).view(torch.uint8)
    return torch.equal(a, b)


_TOWERS = ("vision_tower.", "multi_modal_projector.")


def without_towers(tensors: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Return the text model's tensors of a wrapper, whose names have two spellings."""
    text: dict[str, torch.Tensor] = {}
    for name, tensor in tensors.items():
        if name.removeprefix("model.").startswith(_TOWERS):
            continue
        for old in ("language_model.model.", "model.language_model."):
            if name.startswith(old):
                name = "model." + name.removeprefix(old)
        name = name.removeprefix("language_model.")
        if name in text:
            raise Broken(f"{name} occurs in two spellings")
        text[name] = tensor
    return text


def text_of(raw: dict[str, Any]) -> dict[str, Any]:
    """Return the text model's config: a wrapper's own keys override those of its text_config."""
    if raw.get("model_type") != "gemma3":
        return raw
    text = dict(raw.get("text_config") or {})
    if text.setdefault("model_type", "gemma3_text") != "gemma3_text":
        raise Broken("the text model is of another family")
    for keys in (
        ["dtype", "torch_dtype"],
        ["tie_word_embeddings"],
        ["bos_token_id"],
        ["eos_token_id"],
    ):
        if any(raw.get(key) is not None for key in keys):
            for key in keys:
                text.pop(key, None)
                if raw.get(key) is not None:
                    text[key] = raw[key]
    if "pad_token_id" in raw:
        text.setdefault("pad_token_id", raw["pad_token_id"])
    return text


def default(family: str, key: str) -> Any:
    """Return the value that transformers takes for an absent key."""
    if key == "sliding_window_pattern":
        return 6  # transformers turns this into layer_types
    return getattr(transformers.CONFIG_MAPPING[family](), key)


def differences(
    model: Any, state: State, dtype: torch.dtype | None, allow_nonfinite: bool
) -> list[str]:
    """List where a loaded model contradicts the files; raise `Broken` if they must not load."""
    wrapper = read_config(state)
    raw = text_of(wrapper)
    found = [f"config: {line}" for line in config_differences(model.config, raw)]
    said = [raw.get(key) for key in ("dtype", "torch_dtype") if raw.get(key) not in (None, "auto")]
    said = [str(dtype)] if dtype is not None else [*map(str, said), "None"]
    if str(model.config.dtype) != said[0].removeprefix("torch."):
        found.append(f"dtype is {model.config.dtype}, not {said[0]}")
    tied = raw.get("tie_word_embeddings")
    tied = default(raw["model_type"], "tie_word_embeddings") if tied is None else tied
    try:
        tensors = read_weights(state)
        expected = native(without_towers(tensors) if raw is not wrapper else tensors, tied)
    except (KeyError, RuntimeError) as fault:
        raise Broken(f"tensors do not fit together: {fault}") from None
    got = model.state_dict()
    found += [f"weights: {name}" for name in expected.keys() ^ got.keys()]
    for name in expected.keys() & got.keys():
        want = expected[name] if dtype is None else expected[name].to(dtype)
        if not _same(want, got[name]):
            found.append(f"weights: {name} differs")
        if not allow_nonfinite and not want.isfinite().all():
            raise Broken(f"{name} is not finite")
    return found


def config_differences(config: Any, raw: dict[str, Any]) -> list[str]:
    """List fields that equal neither config.json's value nor, for an absent key, HF's default."""
    family = raw.get("model_type")
    if family != config.model_type:
        return [f"model_type {family!r}"]
    found = []
    derived = {"num_key_value_heads", "head_dim"}
    elsewhere = {"rope_theta", "rope_scaling", "dtype", "torch_dtype", "rope_local_base_freq"}
    for key in (field.name for field in dataclasses.fields(config)):
        value = getattr(config, key)
        if key in elsewhere or key == "extra":
            continue
        if raw.get(key) is not None:
            wanted = raw[key]
        elif key in derived:
            continue
        elif key in raw and key.endswith(("_token_id", "window", "softcapping")):
            wanted = None
        else:
            wanted = default(family, key)
            if key == "layer_types" or (key == "sliding_window" and wanted != value):
                continue  # transformers derives these from other fields
        if type(value) is not type(wanted) and not {type(value), type(wanted)} <= {int, float}:
            found.append(f"{key} is {value!r}, not {wanted!r}")
        elif value != wanted:
            found.append(f"{key} is {value!r}, not {wanted!r}")
    heads = raw.get("num_attention_heads")
    if raw.get("num_key_value_heads") is None and family == "llama":
        if config.num_key_value_heads != (heads or default(family, "num_attention_heads")):
            found.append("num_key_value_heads")
    if family == "gemma3_text":
        return found + _rope_differences_per_layer_type(config, raw)
    if json.dumps(config.extra) != json.dumps(raw):
        found.append("extra")
    return found + _rope_differences(config, raw)


def _rope_differences(config: Any, raw: dict[str, Any]) -> list[str]:
    rope = raw.get("rope_scaling") or raw.get("rope_parameters") or {}
    theta = next((t for t in (rope.get("rope_theta"), raw.get("rope_theta")) if t is not None), 1e4)
    found = [] if config.rope_theta == theta else [f"theta {config.rope_theta!r}, not {theta!r}"]
    kind = rope.get("rope_type") or rope.get("type") or "default"
    scaling = config.rope_scaling or {"rope_type": "default"}
    if scaling["rope_type"] != kind:
        found.append(f"rope type {scaling['rope_type']!r}, not {kind!r}")
    elif kind != "default":
        length = raw.get("original_max_position_embeddings")
        rope = dict(rope)
        if length is not None and kind in ("llama3", "yarn", "longrope"):
            rope["original_max_position_embeddings"] = length
        for key in set(rope) - {"rope_theta", "type", "rope_type"}:
            if rope[key] is not None and repr(scaling.get(key)) != repr(rope[key]):
                found.append(f"rope {key} is {scaling.get(key)!r}, not {rope[key]!r}")
    return found


def _rope_differences_per_layer_type(config: Any, raw: dict[str, Any]) -> list[str]:
    """Return transformers' reading, if it accepts the config; it also accepts wrong types."""
    keys = ("rope_theta", "rope_local_base_freq", "rope_scaling", "rope_parameters")
    given = {key: copy.deepcopy(raw[key]) for key in keys if raw.get(key) is not None}
    try:
        rope = transformers.Gemma3TextConfig(max_position_embeddings=64, **given).rope_parameters
        full, sliding = rope["full_attention"], rope["sliding_attention"]
    except Exception:
        return []
    kind = (config.rope_scaling or {}).get("rope_type", "default")
    pairs = {
        "theta": (config.rope_theta, full["rope_theta"]),
        "local theta": (config.rope_local_base_freq, sliding["rope_theta"]),
        "rope type": (kind, full.get("rope_type", "default")),
    }
    return [f"{name} is {a!r}, not {b!r}" for name, (a, b) in pairs.items() if a != b]

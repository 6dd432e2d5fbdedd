"""Checkpoints broken at random.

A checkpoint is a dict of file names and contents. A mutation changes the dict, and `write` makes a
folder of it. second_opinion decides what a load of that folder may give.
"""

from __future__ import annotations

import json
import os
import pickle
import random
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

from .second_opinion import CONFIG, INDEX, SINGLE, State, parse_json
from .seeds import LLAMA3, LONG, SIZES, YARN, Seed

_HUGE = [2**31, 2**32 + 1, 2**53 + 1, 2**62, 2**63, 2**64 - 1, 10**30, 10**400, -1, -(2**63)]
_AWKWARD: list[Any] = [
    *(None, True, False, 0, 1, 2, 3, 4, 5, 7, 8, 64, -1, 1.0, 0.5, -0.0, 1e-300, 1e300, 1e308),
    *(
        float("inf"),
        float("-inf"),
        float("nan"),
        "",
        "x",
        "1",
        "16",
        "null",
        "\ud800",
        "\0",
        "a" * 999,
    ),
    *([], {}, [1], [[1]], {"a": 1}, [None], [2, 2], {"rope_type": "linear", "factor": 2.0}),
    *({"type": "dynamic", "factor": 3}, YARN, LLAMA3, LONG, {"rope_type": "warp"}),
    *(["full_attention"] * 2, ["sliding_attention"] * 2, ["sliding_attention"], "BF16", "F32"),
    *("bfloat16", "float16", "torch.float32", "float8", "gelu", "silu", "gelu_pytorch_tanh"),
    *("llama", "mistral", "gemma2", "qwen2", "../x", "/etc/passwd", "F8_E4M3", "I8", "F16"),
    *_HUGE,
]
_CONFIG_KEYS = (
    *("model_type", "hidden_act", "hidden_activation", "rms_norm_eps", "rope_theta", "head_dim"),
    *("rope_scaling", "rope_parameters", "attention_bias", "mlp_bias", "sliding_window", "dtype"),
    *("layer_types", "sliding_window_pattern", "use_sliding_window", "max_window_layers"),
    *("attn_logit_softcapping", "final_logit_softcapping", "query_pre_attn_scalar"),
    *("rope_local_base_freq", "original_max_position_embeddings", "attention_dropout"),
    *("partial_rotary_factor", "quantization_config", "initializer_range", "use_cache"),
    *("num_experts", "text_config", "is_causal", "use_bidirectional_attention", "pretraining_tp"),
)
_ROPE_KEYS = (
    *("rope_type", "type", "factor", "low_freq_factor", "high_freq_factor", "rope_theta"),
    *("original_max_position_embeddings", "attention_factor", "beta_fast", "beta_slow", "mscale"),
    *("mscale_all_dim", "truncate", "short_factor", "long_factor", "partial_rotary_factor"),
    *("full_attention", "sliding_attention", "unknown"),
)
_NAMES = (
    *(
        CONFIG,
        SINGLE,
        INDEX,
        "model-00001-of-00003.safetensors",
        "model-00004-of-00003.safetensors",
    ),
    *("MODEL.safetensors", "pytorch_model.bin", "consolidated.safetensors", "Config.json"),
    *("generation_config.json", "adapter_config.json", "tokenizer.json", "a\nb.safetensors"),
)


def _is_span(span: Any) -> bool:
    return isinstance(span, list) and len(span) == 2 and all(type(n) is int for n in span)


class Payload:
    """An object that makes a folder when it is unpickled."""

    def __init__(self, trace: Path) -> None:
        self.trace = trace

    def __reduce__(self) -> Any:
        return os.mkdir, (str(self.trace),)


class Mutator:
    """A function that breaks a checkpoint; the same `rng` breaks it in the same way."""

    def __init__(self, rng: random.Random, others: list[Seed], trace: Path) -> None:
        self.rng = rng
        self.others = others
        self.trace = trace

    def __call__(self, state: State) -> str:
        """Change `state` and return the kind of the mutation."""
        kinds: dict[str, tuple[int, Callable[[State], None]]] = {
            "bytes": (4, self.bytes_),
            "header": (5, self.header),
            "data": (3, self.data),
            "index": (2, self.index),
            "config": (7, self.config),
            "files": (2, self.files),
        }
        (kind,) = self.rng.choices(list(kinds), [weight for weight, _ in kinds.values()])
        kinds[kind][1](state)
        return kind

    def _file(self, state: State, wanted: Callable[[str], bool] = lambda name: True) -> str | None:
        names = sorted(
            n for n, content in state.items() if isinstance(content, bytes) and wanted(n)
        )
        return self.rng.choice(names) if names else None

    # Bytes anywhere in a file, or in a header and its length.

    def bytes_(self, state: State) -> None:
        name = self._file(state)
        if name is None or not state[name]:
            return
        content = bytearray(state[name])
        end = len(content)
        if name.endswith(".safetensors") and self.rng.random() < 0.7:
            header = 8 + int.from_bytes(content[:8], "little")
            end = min(end, self.rng.choice([8, header]))
        for _ in range(self.rng.choice([1, 1, 1, 2, 8])):
            at = self.rng.randrange(end)
            self.rng.choice(
                [self._flip, self._set, self._insert, self._remove, self._cut, self._copy]
            )(content, at)
            end = min(end, len(content))
            if not end:
                break
        state[name] = bytes(content)

    def _flip(self, content: bytearray, at: int) -> None:
        content[at] ^= 1 << self.rng.randrange(8)

    def _set(self, content: bytearray, at: int) -> None:
        content[at] = self.rng.choice([0, 9, 32, 34, 44, 48, 57, 91, 93, 123, 125, 127, 128, 255])

    def _insert(self, content: bytearray, at: int) -> None:
        content[at:at] = self.rng.randbytes(self.rng.choice([1, 1, 2, 8, 100]))

    def _remove(self, content: bytearray, at: int) -> None:
        del content[at : at + self.rng.choice([1, 1, 2, 8, 100])]

    def _cut(self, content: bytearray, at: int) -> None:
        del content[at:]

    def _copy(self, content: bytearray, at: int) -> None:
        start = self.rng.randrange(len(content))
        piece = content[start : start + self.rng.choice([2, 8, 64])]
        content[at : at + len(piece) * self.rng.randrange(2)] = piece

    # JSON: usually the tree, sometimes the text.

    def header(self, state: State) -> None:
        name = self._file(state, lambda n: n.endswith(".safetensors"))
        if name is None:
            return
        content = state[name]
        length = int.from_bytes(content[:8], "little")
        parsed = parse_json(content[8 : 8 + length])
        if not isinstance(parsed, dict):
            return
        data = content[8 + length :]
        records = [n for n, r in parsed.items() if isinstance(r, dict) and n != "__metadata__"]
        way = self.rng.randrange(8)
        if way < 3 and len(records) > 1:
            a, b = self.rng.sample(records, 2)
            field = self.rng.choice(["shape", "data_offsets", "dtype", None])
            if field is None:  # two names change places, which is legal if their shapes agree
                parsed[a], parsed[b] = parsed[b], parsed[a]
            elif field in parsed[a] and field in parsed[b]:
                parsed[a][field], parsed[b][field] = parsed[b][field], parsed[a][field]
        elif way < 5 and records:
            record = parsed[self.rng.choice(records)]
            if isinstance(record.get("shape"), list) and _is_span(record.get("data_offsets")):
                self._bend(record)
        elif way == 5:
            items = list(parsed.items())  # another order is not a fault
            self.rng.shuffle(items)
            parsed = dict(items)
        else:
            self._tree(parsed)
        text = self._dump(parsed)
        if self.rng.random() < 0.2:
            data = data[: self.rng.randrange(len(data) + 1)] + bytes(self.rng.choice([0, 1, 64]))
        state[name] = struct.pack("<Q", len(text)) + text + data

    def _bend(self, record: dict[str, Any]) -> None:
        shape, offsets = record["shape"], record["data_offsets"]
        way = self.rng.randrange(5)
        if way == 0:
            shape.reverse()
        elif way == 1 and shape:
            shape[self.rng.randrange(len(shape))] = self.rng.choice([0, 1, -1, *_HUGE, 1.0, None])
        elif way == 2 and offsets:
            offsets[self.rng.randrange(len(offsets))] += self.rng.choice(
                [-2, -1, 1, 2, 2**62, 10**400]
            )
        elif way == 3:
            shape.append(self.rng.choice([1, 1, 0, 2]))
        else:
            record["dtype"] = self.rng.choice(
                ["F16", "BF16", "F32", "I16", "I8", "F8_E5M2", "Q4", None]
            )

    # Whole tensors and their values, with a header that agrees.

    def data(self, state: State) -> None:
        name = self._file(state, lambda n: n.endswith(".safetensors"))
        content = b"" if name is None else state[name]
        length = int.from_bytes(content[:8], "little")
        header = parse_json(content[8 : 8 + length])
        data = bytearray(content[8 + length :])
        if not isinstance(header, dict) or not data:
            return
        records = {n: r for n, r in header.items() if n != "__metadata__"}
        spans = [r.get("data_offsets") for r in records.values() if isinstance(r, dict)]
        if not spans or len(spans) < len(records) or not all(map(_is_span, spans)):
            return
        begin, end = self.rng.choice(spans)
        way = self.rng.randrange(4)
        if way == 0:  # one infinite value or NaN, if the dtype is bfloat16
            at = begin + 2 * self.rng.randrange(max(1, (end - begin) // 2))
            data[at : at + 2] = self.rng.choice(
                [b"\x80\x7f", b"\x80\xff", b"\xc0\x7f", b"\xff\xff"]
            )
        elif way == 1:  # a gap behind a tensor, or an overlap
            gap = self.rng.choice([1, 2, 8, -2, -8])
            data[end : end - min(gap, 0)] = bytes(max(gap, 0))
            for span in spans:
                if span[0] >= end:
                    span[:] = [span[0] + gap, span[1] + gap]
        elif way == 2:  # two names for the same bytes, and no name for the other bytes
            span = self.rng.choice(spans)
            mine = next(s for s in spans if s == [begin, end])
            if span[1] - span[0] == end - begin:
                gone = list(mine)
                mine[:] = span
                if self.rng.random() < 0.5:  # and remove those other bytes
                    del data[begin:end]
                    for other in spans:
                        if other[0] > gone[0]:
                            other[:] = [n - (end - begin) for n in other]
        else:
            extra = self.rng.choice(
                [
                    "x",
                    "lm_head.weight",
                    "model.layers.2.x",
                    "model.rotary_emb.inv_freq",
                    "model.n.bias",
                ]
            )
            if extra not in header:
                header[extra] = {
                    "dtype": "BF16",
                    "shape": [1],
                    "data_offsets": [len(data), len(data) + 2],
                }
                data += b"\0\1"
                index = parse_json(state.get(INDEX))
                if isinstance(index, dict) and isinstance(index.get("weight_map"), dict):
                    index["weight_map"][extra] = name
                    state[INDEX] = json.dumps(index).encode()
        text = json.dumps(header).encode()
        state[name] = struct.pack("<Q", len(text)) + text + bytes(data)

    def index(self, state: State) -> None:
        def change(parsed: dict[str, Any]) -> None:
            weight_map = parsed.get("weight_map")
            if self.rng.random() < 0.3 and isinstance(weight_map, dict) and weight_map:
                file = self.rng.choice(list(weight_map.values()))
                other = f"{self.rng.choice(['./', '../case/', '../good/', 'x/'])}{file}"
                parsed["weight_map"] = {n: other if f == file else f for n, f in weight_map.items()}
            else:
                self._tree(parsed)

        self._json(state, INDEX, change)

    def config(self, state: State) -> None:
        def change(parsed: dict[str, Any]) -> None:
            if isinstance(parsed.get("text_config"), dict) and self.rng.random() < 0.7:
                parsed = parsed["text_config"]
            way = self.rng.randrange(6)
            if way < 2:
                parsed[self.rng.choice(_CONFIG_KEYS)] = self._awkward()
            elif way == 2:
                parsed[self.rng.choice(list(SIZES))] = self._awkward()
            elif way == 3:
                key = self.rng.choice(["rope_scaling", "rope_parameters"])
                rope = dict(
                    self.rng.choice([LLAMA3, YARN, LONG, {"rope_type": "dynamic", "factor": 2}])
                )
                if self.rng.random() < 0.7:
                    rope[self.rng.choice(_ROPE_KEYS)] = self._awkward()
                parsed[key] = rope
            elif way == 4:
                self._tree(parsed)
            else:  # both spellings, which may contradict each other
                parsed["rope_parameters"] = {
                    "rope_type": "linear",
                    "factor": 3.0,
                    "rope_theta": 7e3,
                }
                parsed["rope_scaling"] = self.rng.choice(
                    [None, {}, {"type": "linear", "factor": 2.0}]
                )
                parsed["dtype"] = self.rng.choice([None, "auto", "float32", "torch.float16"])

        self._json(state, CONFIG, change)

    def _json(self, state: State, name: str, change: Callable[[dict[str, Any]], None]) -> None:
        parsed = parse_json(state.get(name))
        if isinstance(parsed, dict):
            change(parsed)
            state[name] = self._dump(parsed)

    def _awkward(self) -> Any:
        return json.loads(json.dumps(self.rng.choice(_AWKWARD)))

    def _tree(self, parsed: Any) -> None:
        """Make one change somewhere in a tree of lists and objects."""
        places: list[tuple[Any, Any]] = []

        def walk(node: Any) -> None:
            items = node.items() if isinstance(node, dict) else enumerate(node)
            for key, value in list(items):
                places.append((node, key))
                if isinstance(value, (dict, list)):
                    walk(value)

        walk(parsed)
        if not places:
            return
        node, key = self.rng.choice(places)
        other, other_key = self.rng.choice(places)
        way = self.rng.randrange(7)
        if way == 0:
            del node[key]
        elif way == 1 and isinstance(node, dict):
            node[f"{key}{self.rng.choice(['x', ' ', '.', '_', chr(0), chr(0xD800)])}"] = node.pop(
                key
            )
        elif way == 2:
            node[key] = [node[key]]
        elif way == 3:
            value = json.loads(json.dumps(other[other_key]))
            node[key] = value
        elif way == 4 and type(node[key]) in (int, float):
            node[key] = self.rng.choice([-node[key], node[key] + 1, node[key] * 2, node[key] // 2])
        else:
            node[key] = self._awkward()

    def _dump(self, parsed: Any) -> bytes:
        text = json.dumps(parsed)
        way = self.rng.randrange(30)
        if way == 0:  # one key occurs twice, with the same value or another
            key = self.rng.choice(list(parsed) or ["a"])
            value = json.dumps(self.rng.choice([parsed.get(key), *parsed.values()]))
            text = text[:-1] + f", {json.dumps(key)}: {value}}}"
        elif way == 1:
            text = text.replace("1", "9" * 5000, 1)
        elif way == 2:
            depth = self.rng.choice([50, 99, 101, 400, 5000])
            text = text[:-1] + f', "deep": {"[" * depth}{"]" * depth}}}'
        elif way == 3:
            return b"\xef\xbb\xbf" + text.encode()
        elif way == 4:
            return text.encode("utf-16")
        elif way == 5:
            text = json.dumps(parsed, indent=3) + "\n \t"
        elif way == 6:
            text = f"[{text}]"
        return text.encode()

    # Files that are missing, exchanged, or not regular files.

    def files(self, state: State) -> None:
        name = self._file(state)
        if name is None:
            return
        way = self.rng.randrange(10)
        if way == 9:  # add another checkpoint's files
            state |= {n: c for n, c in self.rng.choice(self.others).files.items() if n not in state}
        elif way == 0:
            del state[name]
        elif way == 1:
            other = self._file(state)
            state[name], state[other] = state[other], state[name]
        elif way == 2:
            state[self.rng.choice(_NAMES)] = state.pop(name)
        elif way == 3:
            state[self.rng.choice(_NAMES)] = state[name]
        elif way == 4:
            state[name] = self.rng.choice(["pipe", "folder", "loop", ("link", "/dev/zero")])
        elif way == 5:
            state[name] = self.rng.choice([b"", b"\0", b"{}", b"null", bytes(8), bytes(4096)])
        elif way == 6:
            state[name] = pickle.dumps({"weights": Payload(self.trace)})
        elif way == 7:
            state["pytorch_model.bin"] = pickle.dumps({"weights": Payload(self.trace)})
        else:
            other = self.rng.choice(self.others).files
            state[name] = other.get(name, state[name])


def write(folder: Path, state: State) -> None:
    """Write a checkpoint to a folder."""
    folder.mkdir()
    for name, content in state.items():
        path = folder / name
        if isinstance(content, bytes):
            path.write_bytes(content)
        elif content == "pipe":
            os.mkfifo(path)
        elif content == "folder":
            path.mkdir()
        else:
            path.symlink_to(path if content == "loop" else content[1])

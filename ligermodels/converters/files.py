"""Files of a checkpoint folder: JSON, safetensors headers, and which files hold the weights."""

import json
import math
import os
import re
from collections.abc import Callable, Collection
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ligermodels.errors import CheckpointError, LigerError, listing

CONFIG = "config.json"
SINGLE = "model.safetensors"
INDEX = "model.safetensors.index.json"
SHARD = re.compile(r"model-\d+-of-\d+\.safetensors")
# Copied bit for bit from the checkpoint that was loaded to the one that is exported.
COPIED = (
    "generation_config.json",
    "tokenizer.json",
    "tokenizer.model",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "added_tokens.json",
    "vocab.json",
    "merges.txt",
    "chat_template.jinja",
    "chat_template.json",
)

DTYPES = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
}
# Known to the format but not as weights of a model here, with bits per value: integers and floats
# of 8 bits and fewer are how quantised checkpoints look.
_OTHER_BITS = {"BOOL": 8, "U8": 8, "I8": 8, "U16": 16, "I16": 16, "U32": 32, "I32": 32}
_OTHER_BITS |= {"U64": 64, "I64": 64, "C64": 64, "F4": 4, "F6_E2M3": 6, "F6_E3M2": 6}
_OTHER_BITS |= {f"F8_{kind}": 8 for kind in ("E4M3", "E5M2", "E8M0", "E4M3FNUZ", "E5M2FNUZ")}
_MAX_HEADER = 100_000_000  # the format's own limit
_LFS_POINTER = b"version https://git-lfs"


@dataclass(frozen=True)
class TensorInfo:
    """What a header says of one tensor: its file, its dtype as the format spells it, its shape."""

    path: Path
    dtype: str
    shape: tuple[int, ...]
    nbytes: int


def parse_json(text: bytes, where: str, error: type[LigerError]) -> dict[str, Any]:
    """A JSON object without duplicate keys.

    Raises:
        error: `where` holds something else; says what, and on which line.
    """

    def unique(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for key, value in pairs:
            if key in found:
                raise error(f"{where}: key {key!r} appears twice")
            found[key] = value
        return found

    try:
        parsed = json.loads(text.decode("utf-8"), object_pairs_hook=unique)
    except UnicodeDecodeError:
        raise error(f"{where}: is not UTF-8 text") from None
    except json.JSONDecodeError as fault:
        raise error(
            f"{where}: is not JSON: {fault.msg} in line {fault.lineno}, column {fault.colno}"
        ) from None
    except RecursionError:
        raise error(f"{where}: is nested too deep to be read") from None
    if not isinstance(parsed, dict):
        raise error(f"{where}: holds a {type(parsed).__name__}, expected an object")
    return parsed


def read_json(path: Path, error: type[LigerError]) -> dict[str, Any]:
    """`parse_json` of a file; not being able to read the file is an `error` too."""
    try:
        text = path.read_bytes()
    except OSError as fault:
        raise error(f"{path}: cannot be read: {fault.strerror}") from None
    return parse_json(text, str(path), error)


def read_header(path: Path) -> dict[str, TensorInfo]:
    """The tensors a safetensors file declares, after checking that the file can hold them.

    Raises:
        CheckpointError: the file is absent, truncated or damaged; names the file, and the tensor
            where there is one.
    """
    try:
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            if file.read(len(_LFS_POINTER)) == _LFS_POINTER:
                raise CheckpointError(
                    f"{path}: is a git-lfs pointer, not the weights; fetch them with `git lfs pull`"
                )
            file.seek(0)
            length = int.from_bytes(file.read(8), "little")
            if size < 8 or length > min(size - 8, _MAX_HEADER):
                raise CheckpointError(
                    f"{path}: is truncated or no safetensors file: a header of {length} bytes "
                    f"does not fit a file of {size}"
                )
            text = file.read(length)
    except OSError as fault:
        raise CheckpointError(f"{path}: cannot be read: {fault.strerror}") from None
    header = parse_json(text, f"{path} (header)", CheckpointError)
    header.pop("__metadata__", None)

    tensors, ranges = {}, []
    for name, value in header.items():
        info, begin, end = _tensor_info(path, name, value)
        tensors[name] = info
        ranges.append((begin, end, name))
    expected = 0
    for begin, end, name in sorted(ranges):
        if begin != expected:
            raise CheckpointError(
                f"{path}: {name!r} begins at byte {begin} of the data, expected {expected}: "
                "tensors overlap or leave a hole"
            )
        expected = end
    held = size - 8 - length
    if held < expected:
        raise CheckpointError(
            f"{path}: is truncated: the header declares {expected} bytes of tensors, "
            f"the file holds {held}"
        )
    if held > expected:
        raise CheckpointError(f"{path}: {held - expected} bytes follow the last tensor")
    return tensors


def _tensor_info(path: Path, name: str, value: Any) -> tuple[TensorInfo, int, int]:
    """One header record, checked."""

    def fault(what: str) -> CheckpointError:
        return CheckpointError(f"{path}: {name!r} {what}")

    if not isinstance(value, dict) or set(value) != {"dtype", "shape", "data_offsets"}:
        raise fault("needs exactly dtype, shape and data_offsets in the header")
    dtype, shape, offsets = value["dtype"], value["shape"], value["data_offsets"]
    if not isinstance(dtype, str) or (dtype not in DTYPES and dtype not in _OTHER_BITS):
        raise fault(f"has dtype {dtype!r}, which the format does not know")
    if not _sizes(shape):
        raise fault(f"has shape {shape!r}, expected a list of sizes")
    if not _sizes(offsets) or len(offsets) != 2 or offsets[0] > offsets[1]:
        raise fault(f"has data_offsets {offsets!r}, expected [begin, end]")
    begin, end = offsets
    bits = DTYPES[dtype].itemsize * 8 if dtype in DTYPES else _OTHER_BITS[dtype]
    if (end - begin) * 8 != math.prod(shape) * bits:
        raise fault(f"has {end - begin} bytes, but {dtype} of shape {shape} takes another number")
    return TensorInfo(path, dtype, tuple(shape), end - begin), begin, end


def _sizes(value: Any) -> bool:
    return isinstance(value, list) and all(type(n) is int and n >= 0 for n in value)


def weight_files(
    where: str, names: Collection[str], read_index: Callable[[], dict[str, Any]]
) -> tuple[list[str], dict[str, str] | None]:
    """Which of the file `names` hold the weights, in a folder or a hub repository alike.

    Args: where names the folder or repository in messages; read_index gets the index's JSON.
    Returns: the file names, and the index's tensor -> file map where there is an index.
    Raises:
        CheckpointError: there are none that can be read, or it is unclear which; says the way out.
    """
    if INDEX not in names:
        if SINGLE in names:
            return [SINGLE], None
        raise CheckpointError(_why_no_weights(where, names))
    index = f"{where}/{INDEX}"
    weight_map = read_index().get("weight_map")
    if not isinstance(weight_map, dict) or not weight_map:
        raise CheckpointError(f"{index}: 'weight_map' is missing or empty")
    for key, name in weight_map.items():
        if not isinstance(name, str) or not _is_plain_name(name):
            raise CheckpointError(
                f"{index}: 'weight_map' puts {key!r} into {name!r}, which is no plain file name"
            )
    files = sorted(set(weight_map.values()))
    if SINGLE in names and SINGLE not in files:
        raise CheckpointError(
            f"{index}: does not name {SINGLE}, which stands beside it: one of the two is stale; "
            "remove it"
        )
    absent = [name for name in files if name not in names]
    if absent:
        raise CheckpointError(
            f"{where}/{absent[0]}: is missing, but {INDEX} names it "
            f"({len(absent)} of {len(files)} shards missing)\n{listing(absent)}"
        )
    return files, weight_map


def _is_plain_name(name: str) -> bool:
    return (
        name.endswith(".safetensors")
        and not name.startswith(".")
        and not any(c in name for c in "/\\:\0")
    )


def _why_no_weights(where: str, names: Collection[str]) -> str:
    pickled = sorted(n for n in names if n.endswith((".bin", ".pt", ".pth", ".ckpt")))
    pickled = [n for n in pickled if "training_args" not in n]
    if "adapter_config.json" in names:
        return (
            f"{where}/adapter_config.json: this is an adapter, not a model; merge it into its base "
            "with peft (merge_and_unload, then save_pretrained)"
        )
    if any(SHARD.fullmatch(n) for n in names):
        return f"{where}/{INDEX}: is missing, but there are shards"
    if "consolidated.safetensors" in names:
        return (
            f"{where}/consolidated.safetensors: is not in the HF layout; {SINGLE} or {INDEX} "
            "with its shards is needed"
        )
    if pickled:
        return (
            f"{where}/{pickled[0]}: holds pickled weights, which are never unpickled here, and "
            f"there is no {SINGLE}; convert once, where you trust the file: "
            "transformers.AutoModelForCausalLM.from_pretrained(<this>, dtype='auto')"
            ".save_pretrained(<new folder>)"
        )
    gguf = sorted(n for n in names if n.endswith(".gguf"))
    if gguf:
        return f"{where}/{gguf[0]}: GGUF is not read here; get the model's safetensors checkpoint"
    return f"{where}: holds no weights: neither {SINGLE} nor {INDEX}"

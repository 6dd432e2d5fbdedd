"""Write an HF checkpoint: the parameters as shards of HF tensors, the config and the tokenizer."""

import contextlib
import json
import os
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from itertools import islice
from math import prod
from pathlib import Path
from typing import Any, NamedTuple

import torch
from safetensors import SafetensorError
from safetensors.torch import save_file
from torch import Tensor

from ligermodels.converters.checkpoint import Checkpoint, bitwise_equal, is_finite
from ligermodels.converters.files import (
    ADAPTER_CONFIG_NAME,
    ADAPTER_WEIGHTS_NAME,
    ADDED_WEIGHTS,
    CHAT_TEMPLATE_DIR,
    CONFIG_NAME,
    COPIED_FILES,
    GENERATION_CONFIG_NAME,
    SAFE_WEIGHTS_INDEX_NAME,
    SAFE_WEIGHTS_NAME,
    SHARD_NAME,
    read_json,
)
from ligermodels.converters.safetensors_file import DTYPES, StoredTensor
from ligermodels.converters.save_dir import (
    check_replaceable,
    replace_dir,
    sync_file,
    sync_folder,
    write_json,
)
from ligermodels.converters.weight_map import (
    MXFP4_BLOCKS,
    Entry,
    Span,
    WeightMap,
    blocks_of,
    joined_block,
    scales_of,
)
from ligermodels.errors import CheckpointError, SaveError, short_repr

_DTYPE_NAMES = {dtype: name for name, dtype in DTYPES.items()}


class _HFTensor(NamedTuple):
    """A tensor of an export, with the native rows that fill it, or what `stored` returns.

    The rows have the dtype `held`, and `cast` makes of them what is written, if it is given. With
    `original`, the rows must have the values of this checkpoint, and `stored` is written.
    """

    dtype: str
    shape: tuple[int, ...]
    nbytes: int
    parts: list[tuple[Entry, Span]]
    stored: Callable[[], StoredTensor] | None = None
    held: torch.dtype | None = None
    cast: Callable[[Tensor], Tensor] | None = None
    original: Checkpoint | None = None

    @property
    def itemsize(self) -> int:
        return self.nbytes // max(1, prod(self.shape))


def save(
    folder: str | os.PathLike[str],
    config_dict: Mapping[str, Any],
    weight_map: WeightMap,
    get_tensor: Callable[[str], Tensor],
    dtypes: Mapping[str, torch.dtype],
    *,
    constants: Mapping[str, StoredTensor] | None = None,
    source_files: Mapping[str, bytes] | None = None,
    max_shard_size: int = 5 * 10**9,
    allow_nonfinite: bool = False,
    write_added: Callable[[Path], None] | None = None,
    float8: Collection[str] = (),
    mxfp4: Checkpoint | None = None,
) -> None:
    """Write an HF checkpoint. It replaces the one in `folder` in one step.

    This takes memory for one native parameter on the CPU. Files in `folder` that do not belong to
    a checkpoint stay. Its tokenizer files also stay if `source_files` has none. Any number of
    threads and processes may save to one folder; the last of them replaces what the others wrote.

    Args:
        config_dict: the content of config.json; see `hf_config.to_hf`.
        get_tensor: native name -> parameter, of any float dtype on any device.
        dtypes: native name -> dtype of the parameter.
        constants: HF name -> a further tensor, which is written as it is.
        source_files: name -> content of the tokenizer and generation files to write.
        max_shard_size: bytes of tensors per file. A larger tensor gets a separate file.
        allow_nonfinite: whether to write NaN and infinite values.
        write_added: writes files of ADDED_WEIGHTS into the new folder, if there are any. With it,
            those in `folder` do not stay.
        float8: native names of weights that are written in e4m3, with a scale for each row.
        mxfp4: the checkpoint whose tensors in MXFP4 are written as they are, for a `weight_map`
            that has such tensors.
    Raises:
        SaveError: the disk is full, there is no permission, `folder` is a file or has a volume
            mounted in it, a value is not finite, or one is not that of its tensor in MXFP4. The old
            content of `folder` is unchanged.
    """
    if max_shard_size < 1:
        raise SaveError(f"{folder}: max_shard_size is {max_shard_size}, expected at least 1 byte")
    target = _resolve(folder)
    source_files = source_files or {}
    shapes, tensors = weight_map.source_shapes(), {}
    for name, parts in weight_map.parts().items():
        dtype, shape = dtypes[parts[0][0].name], shapes[name]
        if dtype not in _DTYPE_NAMES:
            raise SaveError(
                f"{folder}: {name!r} is {dtype}, "
                "but an export holds only float64, float32, float16 and bfloat16"
            )
        nbytes = prod(shape) * dtype.itemsize
        tensors[name] = _HFTensor(_DTYPE_NAMES[dtype], shape, nbytes, parts, held=dtype)
        if name.endswith(MXFP4_BLOCKS):
            assert mxfp4 is not None, "a weight map with MXFP4 needs the checkpoint"
            groups, scales = (*shape[:-1], shape[-1] // 32), scales_of(name)
            for each, kept, size in ((name, parts, (*groups, 16)), (scales, [], groups)):
                stored = partial(mxfp4.stored, each)
                tensors[each] = _HFTensor("U8", size, prod(size), kept, stored)
            tensors[name] = tensors[name]._replace(held=dtype, original=mxfp4)
    constants = constants or {}
    for name, x in constants.items():
        stored = partial(constants.__getitem__, name)
        tensors[name] = _HFTensor(x.dtype, x.shape, x.nbytes, [], stored)
    if float8:
        config_dict = {**config_dict, "quantization_config": _cast_weights(tensors, float8)}
    owned = _owned(target, bool(source_files), write_added is not None)
    with _replacing(folder, "checkpoint", target, owned) as fresh:
        write_json(fresh / CONFIG_NAME, config_dict)
        _write_weights(fresh, tensors, get_tensor, max_shard_size, allow_nonfinite)
        _write_files(fresh, source_files)
        if write_added is not None:
            write_added(fresh)


def _cast_weights(tensors: dict[str, _HFTensor], names: Collection[str]) -> dict[str, Any]:
    """Let weights be written in float8, and return the config of their format.

    https://github.com/vllm-project/compressed-tensors, format "float-quantized"
    """
    plain = {"lm_head"}  # a tied one has no tensor
    for name, tensor in [*tensors.items()]:
        if len(tensor.shape) != 2 or not name.endswith(".weight"):
            continue
        if len(tensor.parts) != 1 or tensor.parts[0][0].name not in names:
            one = name.removesuffix(".weight")
            plain.add(r"re:.*\.experts\..*" if ".experts." in one else one)
            continue
        tensors[name] = tensor._replace(dtype="F8_E4M3", nbytes=prod(tensor.shape), cast=_float8)
        tensors[f"{name}_scale"] = tensor._replace(
            shape=(tensor.shape[0], 1), nbytes=tensor.nbytes // tensor.shape[1], cast=_row_scales
        )
    kind = {"num_bits": 8, "type": "float", "symmetric": True}
    group = {
        "targets": ["Linear"],
        "weights": kind | {"strategy": "channel", "dynamic": False},
        "input_activations": kind | {"strategy": "token", "dynamic": True},
    }
    return {
        "quant_method": "compressed-tensors",
        "format": "float-quantized",
        "quantization_status": "compressed",
        "config_groups": {"group_0": group},
        "ignore": sorted(plain),
    }


def _row_scales(weight: Tensor) -> Tensor:
    """Return the scale of each row of a weight in e4m3, in the weight's dtype."""
    amax = weight.float().abs().amax(1, keepdim=True)
    scale = (amax / torch.finfo(torch.float8_e4m3fn).max).to(weight.dtype)
    return scale.clamp(min=torch.finfo(weight.dtype).tiny)  # a row of zeros needs one, too


def _float8(weight: Tensor) -> Tensor:
    """Return a weight in e4m3, with each row divided by its scale."""
    return (weight.float() / _row_scales(weight)).to(torch.float8_e4m3fn)


def save_adapter(
    folder: str | os.PathLike[str],
    weights: Mapping[str, Tensor],
    config_dict: Mapping[str, Any],
    *,
    source_files: Mapping[str, bytes] | None = None,
) -> None:
    """Write an adapter in PEFT's format. It replaces what `folder` holds in one step, as `save`.

    Args:
        weights: the tensors, on the CPU.
        config_dict: the content of adapter_config.json.
        source_files: name -> content of the tokenizer files to write.
    Raises:
        SaveError: the files cannot be written, or a value is not finite. The old content of
            `folder` is unchanged.
    """
    target = _resolve(folder)
    source_files = source_files or {}
    owned = _owned(target, bool(source_files), True)
    with _replacing(folder, "adapter", target, owned) as fresh:
        for name, tensor in weights.items():
            if not is_finite(tensor):
                raise SaveError(f"{name} holds NaN or infinite values in {tensor.dtype}")
        write_json(fresh / ADAPTER_CONFIG_NAME, config_dict)
        save_file(dict(weights), fresh / ADAPTER_WEIGHTS_NAME, {"format": "pt"})
        sync_file(fresh / ADAPTER_WEIGHTS_NAME)
        _write_files(fresh, source_files)


def save_tokenizer(folder: str | os.PathLike[str], files: Mapping[str, bytes]) -> None:
    """Write tokenizer files. They replace those that `folder` holds in one step, as `save`.

    Raises:
        SaveError: the files cannot be written. The old content of `folder` is unchanged.
    """
    owned = {*COPIED_FILES, CHAT_TEMPLATE_DIR} - {GENERATION_CONFIG_NAME}
    with _replacing(folder, "tokenizer", _resolve(folder), owned.__contains__) as fresh:
        _write_files(fresh, files)


@contextlib.contextmanager
def _replacing(
    folder: str | os.PathLike[str], what: str, target: Path, owned: Callable[[str], bool]
) -> Iterator[Path]:
    """Call `replace_dir`; errors of the system and of the block become one SaveError."""
    try:
        with replace_dir(target, owned) as fresh:
            yield fresh
    except (OSError, SafetensorError) as fault:  # This includes SaveError.
        reason = getattr(fault, "strerror", None) or fault
        raise SaveError(
            f"{folder}: the {what} could not be saved: {reason}; the old content of the folder is "
            "unchanged"
        ) from fault


def _write_files(folder: Path, files: Mapping[str, bytes]) -> None:
    """Write the tokenizer and generation files."""
    for name, content in files.items():
        path = folder / name
        path.parent.mkdir(exist_ok=True)
        path.write_bytes(content)
        sync_file(path)
    if any("/" in name for name in files):
        sync_folder(folder / CHAT_TEMPLATE_DIR)


def replaced_names(folder: str | os.PathLike[str]) -> list[str]:
    """Return the names in a folder that a save may replace or remove, without changing anything.

    Raises:
        SaveError: a save to this folder would be refused.
    """
    target = _resolve(folder)
    try:
        check_replaceable(target)
        return sorted(filter(_owned(target, True, True), os.listdir(target)))
    except FileNotFoundError:
        return []
    except OSError as fault:
        raise SaveError(
            f"{folder}: a checkpoint cannot be saved here: {fault.strerror or fault}"
        ) from fault


def _resolve(folder: str | os.PathLike[str]) -> Path:
    try:
        return Path(folder).expanduser().resolve()
    except (OSError, RuntimeError, ValueError) as fault:  # A loop of links, or a null byte.
        raise SaveError(
            f"{short_repr(os.fspath(folder))}: this cannot be a folder: {fault}"
        ) from None


def _owned(target: Path, brings_tokenizer: bool, brings_added: bool) -> Callable[[str], bool]:
    """Return a function that says whether a name in the old folder belongs to its checkpoint.

    These files do not stay after the export.
    """
    stale = {CONFIG_NAME, SAFE_WEIGHTS_NAME, SAFE_WEIGHTS_INDEX_NAME}
    # transformers would add an old adapter to the new weights.
    stale |= {ADAPTER_CONFIG_NAME, ADAPTER_WEIGHTS_NAME}
    if brings_tokenizer:
        # A file of the old tokenizer would be read with those of the new one.
        stale.update(COPIED_FILES, [CHAT_TEMPLATE_DIR])
    if brings_added:
        stale.update(ADDED_WEIGHTS)
    with contextlib.suppress(CheckpointError):  # The index may be damaged; it is replaced anyway.
        shard_of = read_json(target / SAFE_WEIGHTS_INDEX_NAME, CheckpointError).get("weight_map")
        named = shard_of.values() if isinstance(shard_of, dict) else ()
        # A hostile index may name any file, so only names of weight files count.
        stale.update(n for n in named if isinstance(n, str) and n.endswith(".safetensors"))
    return lambda name: name in stale or SHARD_NAME.fullmatch(name) is not None


def _write_weights(
    folder: Path,
    tensors: Mapping[str, _HFTensor],
    get_tensor: Callable[[str], Tensor],
    max_shard_size: int,
    allow_nonfinite: bool,
) -> None:
    """Write the tensors in this order. One too large for the current file begins a new one."""
    shards: list[dict[str, _HFTensor]] = [{}]
    size = 0
    for name, tensor in tensors.items():
        if shards[-1] and size + tensor.nbytes > max_shard_size:
            shards.append({})
            size = 0
        shards[-1][name] = tensor
        size += tensor.nbytes
    if len(shards) == 1:
        path = folder / SAFE_WEIGHTS_NAME
        return _write_shard(path, shards[0], get_tensor, allow_nonfinite)
    shard_of = {}
    for number, shard in enumerate(shards, 1):
        file = f"model-{number:05}-of-{len(shards):05}.safetensors"
        _write_shard(folder / file, shard, get_tensor, allow_nonfinite)
        shard_of.update(dict.fromkeys(shard, file))
    total = sum(tensor.nbytes for tensor in tensors.values())
    write_json(
        folder / SAFE_WEIGHTS_INDEX_NAME,
        {"metadata": {"total_size": total}, "weight_map": dict(sorted(shard_of.items()))},
    )


def _write_shard(
    path: Path,
    tensors: Mapping[str, _HFTensor],
    get_tensor: Callable[[str], Tensor],
    allow_nonfinite: bool,
) -> None:
    """Write a safetensors file piece by piece; `safetensors.torch.save_file` needs the whole shard.

    The format: https://github.com/huggingface/safetensors#format
    """
    # The widest dtype comes first. This aligns every tensor to its item size.
    tensors = dict(sorted(tensors.items(), key=lambda item: -item[1].itemsize))
    header: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, tensor in tensors.items():
        begin, end = end, end + tensor.nbytes
        offsets = [begin, end]
        header[name] = {"dtype": tensor.dtype, "shape": tensor.shape, "data_offsets": offsets}
    text = json.dumps(header, separators=(",", ":")).encode()
    text += b" " * (-len(text) % 8)
    pieces = _rows([(*part, x.held) for x in tensors.values() for part in x.parts], get_tensor)
    with path.open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        for tensor in tensors.values():
            if tensor.stored is not None:
                file.write(tensor.stored().data)
            for block in blocks_of(tensor.parts):
                held = []
                for rows, entry, span in islice(pieces, len(block)):
                    if not allow_nonfinite and not is_finite(rows):
                        raise SaveError(
                            f"parameter {entry.name!r} (in the file {span.source!r}) holds NaN or "
                            "infinite values; pass allow_nonfinite=True to save them"
                        )
                    if tensor.original is not None:
                        _check_unchanged(rows, entry, span, tensor.original)
                    held.append(rows)
                if tensor.original is not None:
                    continue
                joined = joined_block([span for _, span in block], held)
                made = joined if tensor.cast is None else tensor.cast(joined)
                file.write(made.reshape(-1).view(torch.uint8).numpy().data)
    sync_file(path)


def _check_unchanged(rows: Tensor, entry: Entry, span: Span, original: Checkpoint) -> None:
    """Raise unless native rows have the values that the checkpoint's tensor in MXFP4 has."""
    before = torch.empty_like(rows)
    original.read(entry, before, span.row)
    if not bitwise_equal(rows, before):
        raise SaveError(
            f"parameter {entry.name!r} (in the file {span.source!r}) is not what was loaded, and "
            "only weights that did not change can be written in MXFP4; save without mxfp4=True"
        )


def _rows(
    parts: list[tuple[Entry, Span, torch.dtype | None]], get_tensor: Callable[[str], Tensor]
) -> Iterator[tuple[Tensor, Entry, Span]]:
    """Yield the rows of each part on the CPU; get a parameter once for its consecutive parts."""
    held, tensor = None, torch.empty(0)
    for entry, span, dtype in parts:
        if entry.name != held:
            held, tensor = entry.name, get_tensor(entry.name).detach().to("cpu").contiguous()
            if tuple(tensor.shape) != entry.shape or tensor.dtype != dtype:
                raise SaveError(
                    f"parameter {held!r} is {tensor.dtype} of shape {list(tensor.shape)}, "
                    f"expected {dtype} of shape {list(entry.shape)}"
                )
        yield tensor[span.row : span.row + span.rows], entry, span

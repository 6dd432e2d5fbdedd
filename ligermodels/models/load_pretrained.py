"""Load the matching parameters of a checkpoint into any module, and report the others."""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from typing_extensions import Unpack

from ligermodels.converters import hub
from ligermodels.converters.checkpoint import Checkpoint
from ligermodels.converters.hub import HubOptions
from ligermodels.converters.safetensors_file import empty_in_huge_pages
from ligermodels.converters.save_dir import read_one_version
from ligermodels.converters.weight_map import Entry
from ligermodels.errors import CheckpointError, listing
from ligermodels.layers import Attention
from ligermodels.layers.fusion import pre_norm_names
from ligermodels.models.auto import family_of
from ligermodels.models.base import DecoderModel
from ligermodels.models.config import ModelConfig
from ligermodels.progress import track


@dataclass(frozen=True)
class LoadReport:
    """The result of `load_pretrained`. `str` lists it; layers of the same kind share one line.

    Every parameter of the module is in `loaded`, `new` or `mismatched`. Every parameter of the
    checkpoint is a value of `loaded` or an item of `unused`, under its name in ligermodels.

    Attributes:
        source: the checkpoint's folder.
        loaded: name in the module -> name in the checkpoint.
        new: names in the module that the checkpoint does not have. These parameters are unchanged.
        mismatched: name in the module -> the reason why the checkpoint's values do not fit, with
            both shapes. These parameters are unchanged. It is empty unless
            `ignore_mismatched_sizes` is set.
        unused: names in the checkpoint that were not loaded.
        left_out: prefix of tensor names -> the number of such tensors, for tensors that do not
            belong to the text model (vision towers).
    """

    source: Path
    loaded: dict[str, str]
    new: list[str]
    mismatched: dict[str, str]
    unused: list[str]
    left_out: dict[str, int] = field(default_factory=dict)

    def __str__(self) -> str:
        loaded = [
            name if name == theirs else f"{name} <- {theirs}"
            for name, theirs in self.loaded.items()
        ]
        mismatched = [f"{name}: {why}" for name, why in self.mismatched.items()]
        parts = {
            "loaded": loaded,
            "new, left as they were": self.new,
            "mismatched, left as they were": mismatched,
            "unused of the checkpoint": self.unused,
        }
        lines = [str(self.source)]
        for title, names in parts.items():
            lines.append(f"{title}: {len(names)}")
            lines += [listing(_by_layer(names))] if names else []
        lines += [f"left out: {count} of {start}*" for start, count in self.left_out.items()]
        return "\n".join(lines)


def load_pretrained(
    module: nn.Module,
    path: str | os.PathLike[str],
    *,
    rename: Callable[[str], str | None] | None = None,
    ignore_mismatched_sizes: bool = False,
    allow_nonfinite: bool = False,
    revision: str | None = None,
    **hub_options: Unpack[HubOptions],
) -> LoadReport:
    """Copy the parameters of a checkpoint into any module that has them, by name and shape.

    The names are those of ligermodels' own models, with packed q, k, v and packed gate, up:
    `AutoLiger.from_hf(path).named_parameters()` lists them. The module keeps its dtypes and
    devices. All values are read and checked before the module is changed, so an error leaves it
    unchanged. Until then the values are in host memory, in the module's dtypes.

    Values are copied without arithmetic. Two parameters with the same name and shape do not match
    if they mean different things: weights of norms with different `offset` (Gemma's is 1), of
    embeddings with different `scale`, of `Attention` layers with different heads, and of norms in
    different places. For example, Llama's post_attention_layernorm comes before the MLP. In a block
    with norms around its sub-layers (Gemma 2) the norm before the MLP is pre_feedforward_layernorm,
    so rename it. Activations, rope and windows are not compared with the checkpoint's.

    If the checkpoint ties the head to its embedding, it stores no head, so an untied head of the
    module is new. A parameter that the module has under two names is loaded under both.

    Args:
        module: a module with parameters. They must not be sharded or on the meta device.
        path: a local folder, or a hub id, of any supported family.
        rename: a function from a name in the checkpoint to the name in the module. If it returns
            None, that parameter is not loaded.
        ignore_mismatched_sizes: whether to leave parameters that do not match unchanged and report
            them. By default they raise CheckpointError.
        allow_nonfinite: whether to accept NaN and infinite weights.
        revision: branch, tag or commit of a hub id.
        hub_options: token, cache_dir and local_files_only: see `HubOptions`.
    Returns: a report of the parameters that were loaded, are new, do not match or are not used.
    Raises:
        ConfigError: config.json is damaged, belongs to no supported family, or needs a feature that
            is not implemented.
        CheckpointError: `from_hf` would raise it; a parameter does not match (the message has the
            file, the key and both shapes); the module and the checkpoint have no name in common;
            two parameters have the same target; or a target cannot be written to.
    """
    folder = hub.resolve(path, revision=revision, **hub_options)

    def read(real: Path) -> tuple[type[DecoderModel], ModelConfig, Checkpoint]:
        family = family_of(real)
        checkpoint = Checkpoint(real, allow_nonfinite=allow_nonfinite)
        return family, family.config_class.from_hf(real), checkpoint

    family, config, checkpoint = read_one_version(folder, read)
    model, weight_map = family.on_meta(config)
    checkpoint.plan(weight_map)
    checkpoint.check_aliases(weight_map)
    parameters = dict(module.named_parameters(remove_duplicate=False))
    entries, unused = _match(parameters, weight_map.entries, rename, folder)
    mismatched = {}
    for name, entry in entries.items():
        if why := _difference(module, name, parameters[name], model, entry):
            mismatched[name] = why
    if mismatched and not ignore_mismatched_sizes:
        raise CheckpointError(_describe(mismatched, entries, checkpoint))
    unused += [entries.pop(name).name for name in mismatched]
    targets = {name: parameters[name] for name in entries}
    _check_writable(targets, entries, folder)

    staged: dict[str, Tensor] = {
        name: empty_in_huge_pages(entry.shape, targets[name].dtype, "cpu")
        for name, entry in entries.items()
    }
    reads = checkpoint.read_all([(entry, staged[name]) for name, entry in entries.items()])
    for _ in track(reads, "loading weights", len(staged)):
        pass
    with torch.no_grad():
        for name, values in staged.items():
            targets[name].copy_(values)

    source_of = {id(parameters[name]): entry.name for name, entry in entries.items()}
    loaded = {n: source_of[id(p)] for n, p in parameters.items() if id(p) in source_of}
    new = [name for name in parameters if name not in loaded and name not in mismatched]
    order = {entry.name: index for index, entry in enumerate(weight_map)}
    unused.sort(key=order.__getitem__)
    return LoadReport(folder, loaded, new, mismatched, unused, checkpoint.left_out)


def _match(
    parameters: Mapping[str, nn.Parameter],
    entries: Iterable[Entry],
    rename: Callable[[str], str | None] | None,
    folder: Path,
) -> tuple[dict[str, Entry], list[str]]:
    """Return the checkpoint's entry for each name in the module, and the names of other entries."""
    found: dict[str, Entry] = {}
    unused = []
    for entry in entries:
        name = entry.name if rename is None else rename(entry.name)
        if name is None or name not in parameters:
            unused.append(entry.name)
        elif name in found:
            raise CheckpointError(
                f"{folder}: rename puts both {found[name].name!r} and {entry.name!r} into "
                f"{name!r}; return a different name, or None, for one of them"
            )
        else:
            found[name] = entry
    if not found:
        raise CheckpointError(
            f"{folder}: the module has no parameter of the checkpoint's names; pass as rename a "
            "function from a name in the checkpoint to a name in the module. The checkpoint has:\n"
            f"{listing(_by_layer(unused))}\nThe module has:\n{listing(_by_layer(parameters))}"
        )
    return found, unused


def _difference(
    module: nn.Module, name: str, parameter: nn.Parameter, model: nn.Module, entry: Entry
) -> str | None:
    """Return why the parameter cannot take the entry's values, or None if it can."""
    if tuple(parameter.shape) != entry.shape:
        return (
            f"has shape {list(entry.shape)} in the checkpoint, {list(parameter.shape)} in the "
            "module"
        )
    here, there = _meaning(module, name), _meaning(model, entry.name)
    for what in here:
        if here[what] != there.get(what, here[what]):
            return (
                f"{list(entry.shape)} has {what} {there[what]} in the checkpoint's family, "
                f"{here[what]} in the module"
            )
    return None


def _meaning(module: nn.Module, name: str) -> dict[str, str]:
    """Return the properties of a parameter's module that decide what its values mean."""
    path, _, child = name.rpartition(".")[0].rpartition(".")
    parent = module.get_submodule(path)
    owner = parent.get_submodule(child)
    meaning = {}
    if isinstance(offset := getattr(owner, "offset", 0.0), (int, float)):
        meaning["offset"] = f"{offset:g}"
    if isinstance(owner, nn.Embedding):
        meaning["scale"] = f"{getattr(owner, 'scale', 1.0):g}"
    if isinstance(parent, Attention) and child in ("qkv_proj", "o_proj"):
        heads = f"{parent.num_heads} and {parent.num_kv_heads} of size {parent.head_dim}"
        meaning["heads (of queries, of keys)"] = heads
    if child in ("post_attention_layernorm", "pre_feedforward_layernorm"):
        before_mlp = child in pre_norm_names(parent)
        meaning["its place"] = "before the MLP" if before_mlp else "after attention"
    return meaning


def _check_writable(
    targets: Mapping[str, nn.Parameter], entries: Mapping[str, Entry], folder: Path
) -> None:
    names: dict[int, str] = {}
    for name, parameter in targets.items():
        what = f"{folder}: {entries[name].name!r} cannot be loaded: the module's {name!r}"
        if parameter.is_meta:
            raise CheckpointError(
                f"{what} is on the meta device; allocate it first (module.to_empty), or build the "
                "module on another device"
            )
        if not parameter.is_floating_point():
            raise CheckpointError(f"{what} has {parameter.dtype}; give it a floating point dtype")
        if hasattr(parameter, "full_tensor"):  # a DTensor
            raise CheckpointError(f"{what} is sharded; load before sharding the module")
        if id(parameter) in names:
            raise CheckpointError(
                f"{what} is the same parameter as {names[id(parameter)]!r}, but the checkpoint has "
                "values for both; pass as rename a function that returns None for one of them, or "
                "untie them"
            )
        names[id(parameter)] = name


def _describe(
    mismatched: Mapping[str, str], entries: Mapping[str, Entry], checkpoint: Checkpoint
) -> str:
    name, why = next(iter(mismatched.items()))
    sources = [span.source for span in entries[name].spans]
    lines = [f"{name} {reason}" for name, reason in mismatched.items()]
    count = "" if len(lines) == 1 else f" (the first of {len(lines)} that do not match)"
    made_of = f" (here {name!r})" if len(sources) == 1 else f" and others (here {name!r})"
    return (
        f"{checkpoint.tensors[sources[0]].path}: {sources[0]!r}{made_of} {why}{count}; "
        "pass ignore_mismatched_sizes=True to leave such parameters unchanged"
        + ("" if len(lines) == 1 else f"\n{listing(_by_layer(lines))}")
    )


def _by_layer(names: Iterable[str]) -> list[str]:
    """Merge names that differ only in the layer's number into one, such as a.*.b (32 layers)."""
    kinds: dict[str, list[str]] = {}
    for name in names:
        kinds.setdefault(re.sub(r"(?<=\.)\d+(?=\.)", "*", name, count=1), []).append(name)
    return [
        f"{kind} ({len(found)} layers)" if len(found) > 1 else found[0]
        for kind, found in kinds.items()
    ]

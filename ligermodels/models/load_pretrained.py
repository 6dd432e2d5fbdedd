"""Starting an architecture of your own from a checkpoint: what fits is loaded, the rest told."""

import os
import re
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import Path

import torch
from torch import Tensor, nn
from tqdm import tqdm

from ligermodels.converters import hub
from ligermodels.converters.checkpoint import Checkpoint
from ligermodels.converters.weight_map import Entry
from ligermodels.errors import CheckpointError, listing
from ligermodels.layers import Attention
from ligermodels.layers.fusion import is_sharded, pre_norm_names
from ligermodels.models.auto import family_of


@dataclass(frozen=True)
class LoadReport:
    """What `load_pretrained` did; `str` lists it, layers of one kind in one line.

    Every parameter of the module is in one of `loaded`, `new` and `mismatched`; every one of the
    checkpoint, under its name in ligermodels, is a value of `loaded` or in `unused`.

    Attributes:
        source: the checkpoint's folder.
        loaded: name in the module -> name in the checkpoint.
        new: names in the module that the checkpoint does not have; left as they were.
        mismatched: name in the module -> why the checkpoint's values were not taken, with both
            shapes; left as they were. Empty unless `ignore_mismatched_sizes`.
        unused: names in the checkpoint whose values went nowhere.
        left_out: how many tensors there are beside those of the text model, by what their names
            begin with.
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
) -> LoadReport:
    """Copy into any module those parameters of a checkpoint that it has, by name and shape.

    Names are those of ligermodels' own models, with q, k, v and gate, up packed: what
    `AutoLiger.from_hf(path).named_parameters()` gives. The module keeps its dtypes and devices. It
    is changed after everything has been read and checked: an error leaves it as it was. Until
    then the values wait in host memory, in the module's dtypes.

    Values are moved, never computed with. Parameters that mean different things do not match,
    whatever their names and shapes: the weights of norms that differ in `offset` (Gemma's is 1),
    of embeddings that differ in `scale`, of an `Attention` with other heads, and of norms in
    different places: Llama's post_attention_layernorm stands before the MLP, where a block with
    norms around its sub-layers (Gemma 2) has its pre_feedforward_layernorm, so rename it. Whether
    activations, rope or windows are those of the checkpoint is not checked.

    A head that the checkpoint ties to its embedding is not stored, so that a head of the module's
    own is new; one parameter that the module has under two names is loaded under both.

    Args:
        module: whatever has parameters; not on the meta device, not sharded.
        path: a local folder, or a hub id, of any supported family.
        rename: from a name in the checkpoint to the name in the module; None leaves that one out.
        ignore_mismatched_sizes: leave what does not match as it is, and report it; default is to
            raise.
        allow_nonfinite: let NaN and infinite weights in.
        revision: branch, tag or commit of a hub id.
    Returns: which parameters were loaded, are new, did not match, were not used.
    Raises:
        ConfigError: config.json is damaged, of no supported family, or asks for what is not
            implemented.
        CheckpointError: what `from_hf` raises; a parameter that does not match, naming file, key
            and both shapes; no parameter in common; two for one place; a module that cannot be
            written to.
    """
    folder = hub.resolve(path, revision=revision)
    family = family_of(folder)
    config = family.config_class.from_hf(folder)
    weight_map = family.weight_map(config)
    checkpoint = Checkpoint(folder, allow_nonfinite=allow_nonfinite)
    checkpoint.plan(weight_map)
    checkpoint.check_aliases(weight_map)

    parameters = dict(module.named_parameters(remove_duplicate=False))
    entries, unused = _match(parameters, weight_map.entries, rename, folder)
    with torch.device("meta"):
        model = family(config)
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
        name: torch.empty(entry.shape, dtype=targets[name].dtype, device="cpu")
        for name, entry in entries.items()
    }
    reads = checkpoint.read_all([(entry, staged[name]) for name, entry in entries.items()])
    for _ in tqdm(reads, "Loading weights", len(staged), unit="tensor", disable=None):
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
    """The checkpoint's entry for each name in the module, and the entries that have none."""
    found: dict[str, Entry] = {}
    unused = []
    for entry in entries:
        name = entry.name if rename is None else rename(entry.name)
        if name is None or name not in parameters:
            unused.append(entry.name)
        elif name in found:
            raise CheckpointError(
                f"{folder}: rename puts both {found[name].name!r} and {entry.name!r} into {name!r}"
            )
        else:
            found[name] = entry
    if not found:
        raise CheckpointError(
            f"{folder}: the module has no parameter of the checkpoint's names; give rename a "
            "function from a name in the checkpoint to the module's. In the checkpoint:\n"
            f"{listing(_by_layer(unused))}\nIn the module:\n{listing(_by_layer(parameters))}"
        )
    return found, unused


def _difference(
    module: nn.Module, name: str, parameter: nn.Parameter, model: nn.Module, entry: Entry
) -> str | None:
    """Why the entry's values, made for `model`, cannot be the parameter's; None if they can."""
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
    """What the values of a parameter depend on beside its shape, as far as modules say so."""
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
        meaning["its place"] = "before the MLP" if before_mlp else "behind attention"
    return meaning


def _check_writable(
    targets: Mapping[str, nn.Parameter], entries: Mapping[str, Entry], folder: Path
) -> None:
    names: dict[int, str] = {}
    for name, parameter in targets.items():
        what = f"{folder}: {entries[name].name!r} cannot be loaded: the module's {name!r}"
        if parameter.is_meta:
            raise CheckpointError(
                f"{what} is on the meta device; give it memory first (to_empty) or build the "
                "module elsewhere"
            )
        if is_sharded(parameter):
            raise CheckpointError(f"{what} is sharded; load before sharding")
        if not parameter.is_floating_point():
            raise CheckpointError(f"{what} is of {parameter.dtype}, not of floats")
        if id(parameter) in names:
            raise CheckpointError(
                f"{what} is one with {names[id(parameter)]!r}, and the checkpoint has both; give "
                "rename a function that returns None for one of them, or untie them"
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
        "ignore_mismatched_sizes=True leaves such parameters as they are"
        + ("" if len(lines) == 1 else f"\n{listing(_by_layer(lines))}")
    )


def _by_layer(names: Iterable[str]) -> list[str]:
    """The names with those that differ in a layer's number alone in one: a.{0-2,5}.b."""
    numbers: dict[str, list[int]] = {}
    for name in names:
        found = re.search(r"(?<=\.)\d+(?=\.)", name)
        layer = found[0] if found else ""
        kind = re.sub(rf"(?<=\.){layer}(?=\.)", "{}", name) if found else name
        numbers.setdefault(kind, []).extend([int(layer)] if found else [])
    return [
        kind.replace("{}", _ranges(layers)) if layers else kind for kind, layers in numbers.items()
    ]


def _ranges(numbers: list[int]) -> str:
    """[0, 1, 2, 5] as "{0-2,5}", one number as itself."""
    if len(numbers) == 1:
        return str(numbers[0])
    runs: list[list[int]] = []
    for number in sorted(numbers):
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return "{" + ",".join(str(r[0]) if len(r) == 1 else f"{r[0]}-{r[-1]}" for r in runs) + "}"

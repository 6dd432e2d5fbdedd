"""Projections of a shell under HF's names: q_proj, k_proj and v_proj in place of qkv_proj.

Adapters belong to the projections of HF's models. So that they can be trained, loaded and saved
under HF's names, a packed projection can be split into separate modules, and packed again.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.converters.weight_map import Entry, WeightMap
from ligermodels.errors import ConfigError
from ligermodels.integrations.hf_weights import shell_name
from ligermodels.layers.fusion import is_plain


class Concatenated:
    """Stands where a packed projection was: the outputs of its parts, side by side.

    It is no module, so that no tool looks for weights in it or gives it an adapter.

    Args: owner: the module whose children the parts are; names: the parts in their order.
    """

    def __init__(self, owner: nn.Module, names: list[str]) -> None:
        self.owner = owner
        self.names = names

    def __call__(self, x: Tensor) -> Tensor:
        """Return the parts' outputs (..., rows of all) for x (..., inputs)."""
        return torch.cat([getattr(self.owner, name)(x) for name in self.names], -1)


def split_projections(model: Any) -> None:
    """Replace each packed projection of a shell by modules of HF's names, with copies of its rows.

    Raises:
        ConfigError: a packed projection is not a plain linear: it is quantised or has an adapter.
    """
    for owner, name, parts in _packed(model):
        packed = getattr(owner, name)
        if isinstance(packed, Concatenated):
            continue
        if not is_plain(packed, nn.Linear):
            raise ConfigError(
                f"{name} is a {type(packed).__name__}, whose rows cannot be taken out; split the "
                "projections before: from_pretrained(..., split_projections=True)"
            )
        row, made = 0, {}
        for part, rows in parts:
            taken = slice(row, row + rows)
            made[part] = _linear(packed.weight[taken], _rows(packed.bias, taken))
            row += rows
        _put(owner, made, [name])
        setattr(owner, name, Concatenated(owner, [part for part, _ in parts]))


def pack_projections(model: Any) -> None:
    """Pack the projections of a shell again, where all parts are plain linears."""
    for owner, name, parts in _packed(model):
        if not isinstance(getattr(owner, name), Concatenated):
            continue
        linears = [getattr(owner, part) for part, _ in parts]
        if not all(is_plain(linear, nn.Linear) for linear in linears):
            continue
        biases = [linear.bias for linear in linears]
        bias = None if biases[0] is None else torch.cat(biases)
        packed = _linear(torch.cat([linear.weight for linear in linears]), bias)
        packed.requires_grad_(any(linear.weight.requires_grad for linear in linears))
        delattr(owner, name)
        _put(owner, {name: packed}, [part for part, _ in parts])


@contextmanager
def split_for_adapters(model: Any) -> Iterator[None]:
    """Split the projections of a shell for a block that adds adapters, and then pack the others.

    If the block fails, all projections are packed again. A model that was loaded with
    split_projections=True stays as it is.

    Raises:
        ConfigError: the projections cannot be split: see `split_projections`.
    """
    modules = [getattr(owner, name) for owner, name, _ in _packed(model)]
    was_split = all(isinstance(module, Concatenated) for module in modules)
    try:
        split_projections(model)
        yield
    finally:
        if not was_split:
            pack_projections(model)


def separate(weight_map: WeightMap) -> WeightMap:
    """Return the weight map without the projections that can be split."""
    return WeightMap(tuple(e for e in weight_map if _parts(e, _home(e.name)) is None))


def first_quantised(model: Any) -> str | None:
    """Return the name and the kind of a packed projection that is quantised, or None."""
    for owner, name, _ in _packed(model):
        weight = getattr(getattr(owner, name), "weight", None)
        if isinstance(weight, Tensor) and (
            not weight.is_floating_point() or type(weight).__module__.startswith("torchao.")
        ):
            return f"{name} has a weight of the type {type(weight).__name__}"
    return None


def refuse_unadapted(model: Any) -> None:
    """Raise unless PEFT found every projection that the adapters of a shell are for.

    PEFT looks for modules of HF's names, and goes on without those that it does not find.

    Raises:
        ConfigError: an adapter is for a projection that is packed.
    """
    from peft.tuners.tuners_utils import check_target_module_exists

    prefixes = {module: name for name, module in model.named_modules()}
    for adapter, config in model.peft_config.items():
        if getattr(config, "target_modules", None) is None:
            continue
        for owner, packed, parts in _packed(model):
            for part, _ in parts:
                name = f"{prefixes[owner]}.{part}"
                if not hasattr(owner, part) and check_target_module_exists(config, name):
                    raise ConfigError(
                        f"adapter {adapter!r} is for {name}, which is packed into {packed}, so "
                        "that PEFT did not find it; add adapters by get_peft_model of ligermodels."
                        "integrations.peft_adapters, or load the model with "
                        "from_pretrained(..., split_projections=True)"
                    )


def refuse_in_part(path: Any, loaded: Any) -> None:
    """Raise ConfigError if tools have loaded an adapter in part.

    Args: loaded: what they say, with the attributes unexpected_keys and missing_keys.
    """
    for keys, what in (
        (loaded.unexpected_keys, "the model has no place for {} tensors of this adapter"),
        (loaded.missing_keys, "{} tensors that the config names are missing from this adapter"),
    ):
        if keys:
            raise ConfigError(
                f"{path}: {what.format(len(keys))}, such as {min(keys)}; it was made for another "
                "model, its config is not its own, or it was not saved whole"
            )


def _packed(model: Any) -> Iterator[tuple[nn.Module, str, list[tuple[str, int]]]]:
    """Yield the packed projections that HF has beside each other in a module of the same name.

    Yields: the module, the projection's name in it, and HF's names and rows of its parts.
    """
    for entry in model.weight_map:
        path = _home(entry.name)
        parts = _parts(entry, path)
        if parts is not None and entry.name.endswith(".weight"):
            name = shell_name(entry.name).removesuffix(".weight").rpartition(".")[2]
            yield model.get_submodule(path), name, parts


def _parts(entry: Entry, path: str) -> list[tuple[str, int]] | None:
    """Return HF's names and rows of the parts of a packed weight or bias; None without parts."""
    parts = []
    for span in entry.spans:
        module = span.source.rpartition(".")[0]
        home, _, part = module.rpartition(".")
        if home != path or span.source_row != 0:
            return None
        parts.append((part, span.rows))
    return parts if len(parts) > 1 else None


def _home(native: str) -> str:
    """Return the path in a shell of the module whose child has a native parameter."""
    return shell_name(native).rpartition(".")[0].rpartition(".")[0]


def _put(owner: nn.Module, made: dict[str, nn.Linear], old: list[str]) -> None:
    """Put new children of a module in the place of old ones, which it loses.

    So the order of the modules is that of HF's model. Tools draw the first values of adapters in
    this order.

    Args: made, the new children by name; old, the names of the others, which are neighbours.
    """
    children = [*owner._modules.items()]
    place = next(i for i, (name, _) in enumerate(children) if name in old)
    kept: list[tuple[str, nn.Module | None]] = [c for c in children if c[0] not in old]
    kept[place:place] = made.items()
    owner._modules.clear()
    owner._modules.update(kept)


def _rows(bias: Tensor | None, taken: slice) -> Tensor | None:
    return None if bias is None else bias[taken]


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a linear with copies of a weight and a bias."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)
    if not weight.is_meta:  # or transformers would draw the weight again
        setattr(made, "_is_hf_initialized", True)  # noqa: B010
    return made

"""Projections of a wrapper under HF's names: q_proj, k_proj and v_proj in place of qkv_proj.

Adapters belong to the projections of HF's models. So that they can be trained, loaded and saved
under HF's names, a packed projection can be split into separate modules, and packed again. An HF
wrapper splits all of them as soon as PEFT asks for its modules.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from itertools import chain
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.adapters.peft_format import row_orders
from ligermodels.converters.weight_map import Entry, WeightMap
from ligermodels.errors import ConfigError
from ligermodels.integrations.hf_weights import wrapper_name
from ligermodels.kernels.frozen_experts import Adapter, ExpertWeight
from ligermodels.layers.experts import STACKS, Experts
from ligermodels.layers.fusion import is_plain
from ligermodels.layers.gated_delta import GatedDeltaNet


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


class ExpertParameters(nn.Module):
    """The weights of a layer of experts in the shapes of HF's parameters, for PEFT; views of them.

    Args: layer: the experts, whose weights are packed.
    """

    def __init__(self, layer: Experts) -> None:
        super().__init__()
        for name in STACKS:
            weight = getattr(layer, name)
            whole = weight.detach().unflatten(0, (layer.num_experts, -1))
            setattr(self, name, nn.Parameter(whole, requires_grad=weight.requires_grad))


class AdaptedExperts:
    """Stands where a weight of experts was, which is in `ExpertParameters` now, or PEFT's wrapper.

    Args: owner: the experts; name: that of the weight.
    """

    def __init__(self, owner: Experts, name: str) -> None:
        self.owner, self.name = owner, name

    def expert_weight(self) -> ExpertWeight:
        """Return the weight and its adapter, whose products are two thin ones here.

        Raises: ConfigError: two adapters of PEFT are active at once.
        """
        module: Any = self.owner.experts
        adapters: list[tuple[Tensor, Tensor, float]] = []
        while hasattr(module, "parameter_name"):  # each wraps one parameter, or a wrapper
            if module.parameter_name == self.name:
                if module.disable_adapters and module.merged:
                    module.unmerge()
                names = () if module.disable_adapters or module.merged else module.active_adapters
                each = (x for x in names if x in module.lora_A)
                adapters += [
                    (module.lora_A[x].weight, module.lora_B[x].weight, module.scaling[x])
                    for x in each
                ]
            module = module.base_layer
        weight = getattr(module, self.name)
        count, rows, _ = weight.shape
        found = ExpertWeight(weight.flatten(0, 1))
        if len(adapters) > 1:
            raise ConfigError(
                f"{self.name} of experts has {len(adapters)} active adapters; activate one of them "
                "with set_adapter"
            )
        for a, b, scaling in adapters:
            b_each = b.unflatten(1, (-1, count)).permute(2, 0, 1).flatten(0, 1)
            found = found._replace(a=a, b=b_each, adapter=Adapter(((0, rows),), scaling))
        return found


def split_experts(model: Any) -> None:
    """Give a wrapper's layers HF's parameters of all experts, where they hold the same numbers."""
    alternating = {name.rpartition(".")[0] for name in row_orders(model.weight_map)}
    for name, layer in [*model.base_model.layers.named_modules(prefix="layers")]:
        if not isinstance(layer, Experts) or name in alternating:
            continue
        if all(isinstance(getattr(layer, each), nn.Parameter) for each in STACKS):
            layer.experts = ExpertParameters(layer)
            for each in STACKS:
                delattr(layer, each)
                setattr(layer, each, AdaptedExperts(layer, each))


def pack_experts(model: Any) -> None:
    """Give layers of experts their own parameters again, where no adapter is on them."""
    for layer in [*model.base_model.layers.modules()]:
        held = getattr(layer, "experts", None)
        if isinstance(layer, Experts) and isinstance(held, ExpertParameters):
            for each in STACKS:
                weight = getattr(held, each)
                delattr(layer, each)
                packed = nn.Parameter(weight.detach().flatten(0, 1), weight.requires_grad)
                setattr(layer, each, packed)
            del layer.experts


def split_projections(model: Any) -> None:
    """Replace a wrapper's packed projections by modules of HF's names, with copies of their rows.

    The parameters are in the order of HF's model then, so that optimizer states fit.

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
            bias = None if packed.bias is None else packed.bias[taken]
            made[part] = _linear(packed.weight[taken], bias)
            row += rows
        _put(owner, made, [name])
        setattr(owner, name, Concatenated(owner, [part for part, _ in parts]))
    for module in model.base_model.layers.modules():  # HF's modules have their norms last
        if type(module).__module__.startswith("peft.") or isinstance(module, GatedDeltaNet):
            continue
        children = sorted(module._modules.items(), key=lambda child: _is_norm(child[1]))
        module._modules.clear()
        module._modules.update(children)


def pack_projections(model: Any, *, only_frozen: bool = False) -> None:
    """Pack the projections of a wrapper again, where all parts are plain linears that train alike.

    So are the weights of experts that have no adapter.

    Args: only_frozen: whether projections that are trained stay split.
    """
    pack_experts(model)
    for owner, name, parts in _packed(model):
        if not isinstance(getattr(owner, name), Concatenated):
            continue
        linears = [getattr(owner, part) for part, _ in parts]
        if not all(is_plain(linear, nn.Linear) for linear in linears):
            continue
        trained = [[x.requires_grad for x in linear.parameters()] for linear in linears]
        if any(t != trained[0] for t in trained) or (only_frozen and any(trained[0])):
            continue
        biases = [linear.bias for linear in linears]
        bias = None if biases[0] is None else torch.cat(biases)
        packed = _linear(torch.cat([linear.weight for linear in linears]), bias)
        for weight, trains in zip(packed.parameters(), trained[0], strict=True):
            weight.requires_grad_(trains)
        delattr(owner, name)
        _put(owner, {name: packed}, [part for part, _ in parts])


@contextmanager
def packed_afterwards(model: Any) -> Iterator[None]:
    """Pack the projections of a wrapper again after a block in which PEFT adds adapters.

    Those that have an adapter or are trained stay split. If the block fails, all projections are
    packed again. A model that was loaded with split_projections=True stays as it is.
    """
    was_split, only_frozen = _is_split(model), False
    try:
        yield
        only_frozen = True
    finally:
        if not was_split:
            pack_projections(model, only_frozen=only_frozen)


def separate(weight_map: WeightMap) -> WeightMap:
    """Return the weight map without the projections that can be split."""
    return WeightMap(tuple(e for e in weight_map if _parts(e) is None))


def first_quantised(model: Any) -> str | None:
    """Return the name and the kind of a packed projection that is quantised, or None."""
    for owner, name, _ in _packed(model):
        weight = getattr(getattr(owner, name), "weight", None)
        if isinstance(weight, Tensor) and (
            not weight.is_floating_point() or type(weight).__module__.startswith("torchao.")
        ):
            return f"{name} has a weight of the type {type(weight).__name__}"
    return None


def split_for_peft(model: Any) -> None:
    """Split the projections of a wrapper whose modules PEFT asks for, in order to adapt them.

    Raises:
        ConfigError: PEFT has repeated blocks with packed projections, or what `split_projections`
            and `refuse_adapters` raise.
    """
    if model.base_model.layers is not model._native[0].layers and not _is_split(model):
        raise ConfigError(
            "layer_replication of PEFT has repeated blocks whose projections are packed; load the "
            "model with from_pretrained(..., split_projections=True)"
        )
    split_projections(model)
    split_experts(model)
    refuse_adapters(model, model.__dict__.get("peft_config", {}))


def refuse_adapters(model: Any, configs: dict[str, Any]) -> None:
    """Raise if an adapter of PEFT does not work on a wrapper.

    PEFT finds HF's projections only. It says nothing if a config also names packed ones.

    Args: configs: PEFT's configs by the names of the adapters.
    Raises:
        ConfigError: a config names a packed projection, or packed experts.
    """
    paths = {module: path for path, module in model.named_modules()}
    for adapter, config in configs.items():
        listed = [x for x in vars(config).values() if isinstance(x, list | set | tuple | dict)]
        named = tuple(f".{x.removesuffix('.weight')}" for x in chain(*listed) if isinstance(x, str))
        for owner, packed, parts in _packed(model):
            path = f"{paths[owner]}.{packed}"
            if f".{path}".endswith(named):
                hf_paths = ", ".join(f"{paths[owner]}.{part}" for part, _ in parts)
                raise ConfigError(
                    f"adapter {adapter!r} names {path}, which HF's model does not have, so that "
                    f"no other program would find it; name {hf_paths} instead"
                )
        # PEFT also puts parameters of experts here, where target_modules names their projections.
        targets = tuple(f".{x}" for x in getattr(config, "target_parameters", None) or ())
        for entry in separate(model.weight_map):
            name, (place, _, own) = wrapper_name(entry.name), entry.name.rpartition(".")
            is_split = hasattr(model._native[0].get_submodule(place), "experts")
            paths_of_it = f".{name}", f".{place}.experts.{own}"
            if (
                len(entry.spans) > 1
                and not is_split
                and any(x.endswith(targets) for x in paths_of_it)
            ):
                raise ConfigError(
                    f"adapter {adapter!r} adapts {name}, which holds "
                    f"{len(entry.spans)} tensors of HF's model that cannot be split here, so that "
                    "no other program would find it; adapt the projections of attention only, or "
                    "experts with ligermodels.adapters.add_adapters or finetune --lora-targets"
                )


def _is_norm(module: nn.Module | None) -> bool:
    return module is not None and all(weight.ndim == 1 for weight in module.parameters())


def _is_split(model: Any) -> bool:
    return all(isinstance(getattr(x, name), Concatenated) for x, name, _ in _packed(model))


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
        parts = _parts(entry)
        if parts is not None and entry.name.endswith(".weight"):
            path, _, name = entry.name.removesuffix(".weight").rpartition(".")
            yield model.base_model.get_submodule(path), name, parts


def _parts(entry: Entry) -> list[tuple[str, int]] | None:
    """Return HF's names and rows of the parts of a packed weight or bias; None without parts.

    They are parts if HF has them in the module of this name whose child has the parameter.
    """
    own_home = wrapper_name(entry.name).rpartition(".")[0].rpartition(".")[0]
    parts = []
    for span in entry.spans:
        home, _, part = span.source.rpartition(".")[0].rpartition(".")
        if home != own_home or span.source_row != 0:
            return None
        parts.append((part, span.rows))
    return parts if len(parts) > 1 else None


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


def _linear(weight: Tensor, bias: Tensor | None) -> nn.Linear:
    """Return a linear with copies of a weight and a bias."""
    made = nn.Linear(weight.shape[1], weight.shape[0], bias=bias is not None, device="meta")
    made.weight = nn.Parameter(weight.detach().clone(), requires_grad=weight.requires_grad)
    if bias is not None:
        made.bias = nn.Parameter(bias.detach().clone(), requires_grad=bias.requires_grad)
    if not weight.is_meta:  # or transformers would draw the weight again
        setattr(made, "_is_hf_initialized", True)  # noqa: B010
    return made

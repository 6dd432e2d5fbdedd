"""What loads and saves ask of a model: what a checkpoint can hold, how ranks divide the model."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import Tensor, nn

from ligermodels.converters.weight_map import WeightMap
from ligermodels.errors import ConfigError, SaveError, listing
from ligermodels.layers import LossHead
from ligermodels.layers.fusion import is_sharded
from ligermodels.layers.row_shard import RowShard
from ligermodels.models.config import ModelConfig

# These config fields may change after the modules are made, because no module computes with them.
_FREE = {
    *("vocab_size", "initializer_range", "dtype", "extra"),
    *("pad_token_id", "bos_token_id", "eos_token_id"),
}
# Other rope types compute, or may compute, with max_position_embeddings.
_ROPES_OF_ANY_LENGTH = ("default", "linear", "proportional")


class Layout(Protocol):
    """The division of a model over ranks; `ligermodels.parallel.layout` makes it.

    Attributes: rows: the part of each row that this rank computes, or None if it computes all.
    """

    rows: RowShard | None

    @property
    def shapes(self) -> Mapping[str, tuple[int, ...]]:
        """The whole shapes of the parameters whose own shapes are those of this rank."""
        ...

    def reshard(self, model: nn.Module) -> None:
        """Let the model have this rank's parameters again, if a forward has left whole ones."""

    def whole(self, name: str, tensor: Tensor) -> Tensor:
        """Return a whole parameter on this rank. Every rank must call it."""
        ...

    def save(
        self,
        weights: Mapping[str, Tensor],
        write: Callable[[Callable[[str], Tensor]], None],
    ) -> None:
        """Call `write(get)` on one rank, where `get(name)` returns a whole parameter.

        Every rank must call it, and it raises on all ranks or on none.
        """


def layout_of(model: Any) -> Layout | None:
    """Return how a model is divided over ranks, or None if this rank has all of it.

    PyTorch's own `fully_shard` leaves no layout, only sharded parameters.
    """
    found: Layout | None = model.layout
    if found is None and (
        any(map(is_sharded, model.parameters()))
        or any(hasattr(module, "reshard") for module in model.modules())
    ):
        from ligermodels.parallel.layout import ModelLayout

        found = ModelLayout()
    return found


def checked_for_save(
    model: Any, layout: Layout | None, folder: str | os.PathLike[str]
) -> tuple[ModelConfig, WeightMap, dict[str, nn.Parameter]]:
    """Return the config to export, the weight map and the parameters by name.

    With an untied config, a weight that the user has tied by hand is saved under both names.

    Raises:
        SaveError, ConfigError: a checkpoint cannot hold the model: see `HFModel.save_hf`.
    """
    _check_config(model, folder)
    config, dtype = model.config, model.dtype
    if dtype != model.source.dtype:
        config = dataclasses.replace(config, dtype=name_of(dtype))
    weight_map = model.weight_map(config)
    weights = named_weights(model)
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    if layout is not None:
        shapes |= {n: shape for n, shape in layout.shapes.items() if n in shapes}
    _check_weights(weights, shapes, {entry.name: entry.shape for entry in weight_map}, folder)
    weight_map.check(type(model).__name__, shapes)  # The class need not be registered.
    check_buffers(model, f"{Path(folder)}: ", SaveError)
    _check_tied(model, folder)
    return config, weight_map, weights


def named_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of each module by name.

    A parameter that belongs to several modules has several names. A module that the model uses in
    several places, such as a block of a decoder that runs it again, counts once.
    """
    return {
        f"{path}.{key}" if path else key: weight
        for path, module in model.named_modules()
        for key, weight in module.named_parameters(recurse=False, remove_duplicate=False)
    }


def _check_weights(
    weights: dict[str, torch.nn.Parameter],
    shapes: Mapping[str, tuple[int, ...]],
    expected: dict[str, tuple[int, ...]],
    folder: str | os.PathLike[str],
) -> None:
    """Raise SaveError unless the weights have the names and shapes of a checkpoint, and values."""
    where = Path(folder)
    if odd := sorted(weights.keys() ^ expected.keys()):
        raise SaveError(
            f"{where}: parameter {odd[0]!r} does not belong to this architecture or is missing "
            f"(this is so for {len(odd)} parameters); merge adapters first (peft: "
            "merge_and_unload), remove wrappers around projections, and pack those that were split "
            f"(ligermodels.integrations.projections.pack_projections)\n{listing(odd)}"
        )
    for name, shape in expected.items():
        if fault := _fault(weights[name], shapes[name], shape):
            raise SaveError(f"{where}: parameter {name!r} {fault}")


def _fault(weight: nn.Parameter, shape: tuple[int, ...], expected: tuple[int, ...]) -> str | None:
    """Return why a checkpoint cannot hold a parameter, or None."""
    # DeepSpeed marks its parameters so. Outside of GatheredParameters they are empty.
    status = getattr(getattr(weight, "ds_status", None), "name", "AVAILABLE")
    if hasattr(weight, "ds_id") and status != "AVAILABLE":
        return (
            "is divided among the ranks by DeepSpeed's ZeRO-3; save inside of `with "
            "deepspeed.zero.GatheredParameters([*model.parameters()]):` on every rank"
        )
    plain = type(weight) is nn.Parameter and weight.layout is torch.strided
    if not plain and not is_sharded(weight):
        return (
            f"is a {type(weight).__name__} of {weight.layout}, not a plain tensor, such as one "
            "that was quantised; replace it by its values in a float dtype, as an nn.Parameter"
        )
    if shape != expected:
        return (
            f"has shape {shape}, but the config needs {expected}; change model.config so that it "
            "matches the model"
        )
    if weight.is_meta:
        return "is on the meta device, so it has no values; load or initialise the weights first"
    return None


def _check_tied(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Raise if a tied head computes with a weight that the checkpoint would not hold."""
    weights = {id(weight) for weight in model.parameters()}
    for name, module in model.named_modules():
        if isinstance(module, LossHead) and module.is_tied and id(module.weight) not in weights:
            raise SaveError(
                f"{Path(folder)}: {name!r} is tied to an embedding that is no longer in the model, "
                "because another one has replaced it (peft: modules_to_save), and a checkpoint "
                f"holds one weight for both; call model.{name}.tie(embedding) with the new one, if "
                "the head shall compute with it"
            )


def check_buffers(
    model: nn.Module, where: str = "", error: type[ConfigError | SaveError] = ConfigError
) -> None:
    """Raise if the model has tensors whose values neither a checkpoint nor a new model gives.

    Args: where: how the message begins; error: the class to raise.
    """
    name = f"{where}{type(model).__name__}"
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if buffers := sorted(model.state_dict().keys() - parameters.keys()):
        raise error(
            f"{name}: a checkpoint holds parameters only, and {buffers[0]!r} is a buffer; register "
            "it with persistent=False, or make it a parameter without gradient\n"
            f"{listing(buffers)}"
        )
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise error(
                    f"{name}: {f'{path}.{key}'.lstrip('.')!r} is a tensor, but no buffer, so that "
                    "a load would leave it without values; use self.register_buffer("
                    f"{key!r}, ..., persistent=False)"
                )


def _check_config(model: Any, folder: str | os.PathLike[str]) -> None:
    """Raise if the config to export is not the one that the model computes with."""
    config, built_from = model.config, model.built_from
    if getattr(model, "config_class", None) is not type(config):
        raise SaveError(
            f"{Path(folder)}: {type(model).__name__} does not declare {type(config).__name__} as "
            f"its config_class, so other programs might load it as {config.model_type!r} and "
            "compute something else; save its state_dict() instead"
        )
    rope = (built_from.rope_scaling or {}).get("rope_type", "default")
    free = _FREE | ({"max_position_embeddings"} if rope in _ROPES_OF_ANY_LENGTH else set())
    for name in (field.name for field in dataclasses.fields(config)):
        now, then = getattr(config, name), getattr(built_from, name)
        if name not in free and now != then:
            raise SaveError(
                f"{Path(folder)}: config.{name} is {now!r}, but the model was built with {then!r} "
                "and still computes with that; set it back, or build a model from the new config"
            )


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype in a config.json, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")

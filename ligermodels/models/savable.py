"""Checks of a model before a load and a save: a checkpoint cannot hold everything."""

import os
from collections.abc import Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ligermodels.errors import ConfigError, SaveError, listing
from ligermodels.layers import LossHead
from ligermodels.layers.fusion import is_sharded


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


def check_savable(
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


def check_tied(model: nn.Module, folder: str | os.PathLike[str]) -> None:
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

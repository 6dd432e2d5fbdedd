"""Turn the projections of a model's blocks into float8 linears."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import nn
from torch.optim.optimizer import register_optimizer_step_post_hook

from ligermodels.errors import ConfigError
from ligermodels.float8.linear import Float8Linear, obstacle
from ligermodels.kernels.float8_linear import RECIPES, Recipe
from ligermodels.layers.fusion import is_plain

SMALL = 1024  # features; the casts of a smaller linear take as long as its products save
CAPABILITY = (8, 9)  # the first GPUs of NVIDIA that multiply float8


def convert(
    model: nn.Module,
    recipe: str = "tensorwise",
    filter: Callable[[str, nn.Linear], bool] | None = None,
) -> list[str]:
    """Let the projections of a model's blocks run in float8, in place.

    Parameters stay the same objects, in the same dtype and under the same names. Linears outside of
    the blocks (the embedding, the head) stay as they are, and so do those that have been replaced,
    that have fewer than 1024 features on one side, or that have features that are not a multiple
    of 16.

    Args:
        model: a model with blocks in `layers`, a module that holds such models, or one block.
        recipe: "tensorwise" (one scale for each tensor), "delayed" (the same from the step before;
            see `scales`), "rowwise" (one for each row of each operand) or "blocks" (one for each
            128 elements of a row, and 128 x 128 of the weight). All but "delayed" find the scale
            of a tensor from this tensor.
        filter: takes the name of a linear and the linear, and says whether to convert it. It is
            asked instead of the limit of 1024 features.
    Returns: the names of the linears that run in float8 now.
    Raises:
        ConfigError: the recipe is unknown, the model is in float16 or on a GPU without float8
            products, or no linear can be converted, for example because all are already.
    """
    if recipe not in (known := [*RECIPES]):
        raise ConfigError(f"float8: recipe={recipe!r}; expected one of {str(known)[1:-1]}")
    converted: dict[str, nn.Linear] = {}
    left: dict[str, str] = {}
    for name, linear in _linears(model):
        check_device(linear.weight.device, recipe)
        if linear.weight.dtype == torch.float16:
            raise ConfigError(
                f"float8: {name} is in float16, in which small gradients vanish before they are "
                "scaled; load the model with dtype=torch.bfloat16"
            )
        reason = _reason(name, linear, RECIPES[recipe], filter)
        if reason is None:
            converted[name] = linear
        else:
            left[name] = reason
    if not converted:
        reasons = [f"{name}: {reason}" for name, reason in [*left.items()][:4]]
        raise ConfigError(
            "float8: no plain linear of the model's layers can run in float8 "
            f"({'; '.join(reasons) or 'all are converted, quantised or of another class'})"
        )
    for name, linear in converted.items():  # nothing can fail from here on
        linear.__class__ = Float8Linear  # it keeps its parameters, hooks and names
        assert isinstance(linear, Float8Linear)
        linear.use(RECIPES[recipe])
        linear.input_is_kept = name.endswith("o_proj")  # attention saves its output
    return [*converted]


def report(model: nn.Module) -> str | None:
    """Return which linears run in float8, and why others do not; None if none does."""
    linears = {
        name: getattr(m, "recipe", RECIPES["tensorwise"])
        for name, m in model.named_modules()
        if isinstance(m, Float8Linear) or getattr(m, "bits", None) == "float8"  # frozen in float8
    }
    if not linears:
        return None
    # A name may be that of the linear in an adapter.
    kinds = sorted({name.removesuffix(".base_layer").rpartition(".")[2] for name in linears})
    recipe = next(iter(linears.values()))
    text = f"float8 ({', '.join(kinds)}: {len(linears)} linears)"
    left: dict[str, list[str]] = {}
    for name, linear in _linears(model):
        left.setdefault(_reason(name, linear, recipe) or "not converted", []).append(name)
    return text + "".join(
        f"; not {', '.join(found[:3])}{f' and {len(found) - 3} more' * (len(found) > 3)} ({reason})"
        for reason, found in left.items()
    )


@contextmanager
def weights_cast_once(model: nn.Module) -> Iterator[None]:
    """Let each float8 linear cast its weight only once within the block.

    It is for several micro-batches of one step. The casts take two bytes for each weight. A weight
    is cast again after the step of an optimizer of `torch.optim`, and after a change that PyTorch
    counts (`load_state_dict`, `copy_`). It does not count a write to weight.data, so make none
    within the block. The casts of frozen weights, as under LoRA, stay for the next steps and
    blocks, until a weight is moved or trained; never write to the data of these.
    """
    linears = [module for module in model.modules() if isinstance(module, Float8Linear)]

    def cast_once(*_: Any) -> None:
        for linear in linears:
            linear.cast_once(True)

    # A fused optimizer changes weights without counting it.
    handle = register_optimizer_step_post_hook(cast_once)
    cast_once()
    try:
        yield
    finally:
        handle.remove()
        for linear in linears:
            linear.cast_once(False)


def casts_bytes(model: nn.Module) -> int:
    """Return the bytes of the casts that `weights_cast_once` keeps."""
    return 2 * sum(m.weight.numel() for m in model.modules() if isinstance(m, Float8Linear))


def _linears(model: nn.Module) -> Iterator[tuple[str, nn.Linear]]:
    """Yield the names and the plain linears of all `layers` in the model, or of a block."""
    layers = [(n, m) for n, m in model.named_modules() if n.rpartition(".")[2] == "layers"]
    for prefix, blocks in layers or [("", model)]:
        for name, module in blocks.named_modules(prefix=prefix):
            if type(module) is nn.Linear:
                yield name, module


def _reason(
    name: str,
    linear: nn.Linear,
    recipe: Recipe,
    filter: Callable[[str, nn.Linear], bool] | None = None,
) -> str | None:
    """Return why a linear is not converted, or None."""
    if (reason := obstacle(linear, recipe)) is not None:
        return reason
    if not is_plain(linear, nn.Linear):
        return "it has hooks or another forward"
    if filter is not None:
        return None if filter(name, linear) else "the filter leaves it out"
    if min(linear.in_features, linear.out_features) < SMALL:
        return f"it has fewer than {SMALL} features"
    return None


def check_device(device: torch.device, recipe: str = "tensorwise") -> None:
    """Raise ConfigError if a GPU does not multiply float8 by this recipe.

    Weights on the meta device are for the present GPU.
    """
    blocks = RECIPES[recipe].scales == "blocks"
    if device.type == "meta" and torch.cuda.is_available():
        device = torch.device("cuda")
    if device.type != "cuda" or (torch.version.hip and not blocks):
        return
    capability = torch.cuda.get_device_capability(device)
    if capability < CAPABILITY or (blocks and (torch.version.hip or capability[0] != 9)):
        raise ConfigError(
            f"float8: {torch.cuda.get_device_name(device)} has compute capability "
            f"{capability[0]}.{capability[1]}; products in float8 need 8.9 (Ada) or more, and "
            "those of recipe='blocks' 9.0 (Hopper)"
        )

"""Multiply in float8: how far each recipe moves the gradients, beside bfloat16.

    python -m examples.float8_error build/smollm2 --output-dir runs/float8_error

One step of a model on a novel runs in float32, in bfloat16 and with the linears of its layers in
float8, by each recipe. The error is the distance of all gradients of the layers from those in
float32, relative to their length. On a CPU the products are emulated, so only errors are measured.

The weights are fresh ones of the model's sizes. `--published 1` takes those of the model instead,
whose activations have outliers after training: the errors are then larger.
"""

from collections.abc import Callable
from functools import partial
from pathlib import Path

import torch
from torch import Tensor

from examples.command import TRAIN, call, draw_bars, report
from ligermodels import AutoLiger, DecoderModel, Tokenizer, float8
from ligermodels.converters.hub import resolve
from ligermodels.models.auto import family_of

Make = Callable[[], DecoderModel]


def gradients(make: Make, ids: Tensor, recipe: str | None, dtype: torch.dtype) -> Tensor:
    """Return the gradients of the layers in one vector, in float32."""
    torch.manual_seed(0)
    network = make().to(ids.device)
    for parameter in network.parameters():
        parameter.data = parameter.data.to(dtype)
    if recipe is not None:
        # By default, linears with less than 1024 features stay: they would not become faster.
        float8.convert(network, recipe, filter=lambda name, linear: True)
    for _ in range(2 if recipe == "delayed" else 1):  # its scales are those of the step before
        network.zero_grad()
        network(ids, labels=ids).loss.backward()
    return torch.cat([p.grad.float().flatten() for p in network.layers.parameters()])


def main(
    model: str,
    output_dir: Path,
    *,
    tokens: int = 128,
    recipes: str = "delayed rowwise",
    published: int = 0,
) -> dict[str, float]:
    """Measure one row of so many tokens."""
    device = "cuda" if torch.cuda.is_available() else "cpu"
    text = TRAIN.read_text(encoding="utf-8")[: 8 * tokens]
    ids = torch.tensor([Tokenizer.from_hf(model).encode(text)[:tokens]], device=device)
    folder = resolve(model)
    family = family_of(folder)
    config = family.config_class.from_hf(folder)
    make: Make = partial(AutoLiger.from_hf, folder) if published else partial(family, config)
    exact = gradients(make, ids, None, torch.float32)
    errors = {}
    for name in ("bfloat16", *recipes.split()):
        recipe = None if name == "bfloat16" else name
        found = gradients(make, ids, recipe, torch.bfloat16)
        errors[name] = float((found - exact).norm() / exact.norm())
    draw_bars(output_dir, "relative error of the gradients of one step", errors, "{:.1%}")
    return report(output_dir, **errors)


if __name__ == "__main__":
    call(main, __doc__)

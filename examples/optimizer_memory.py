"""Less memory for gradients and optimizer states, beside a memory plan for activations.

    python examples/optimizer_memory.py                               a small model on the CPU
    python examples/optimizer_memory.py --preset llama-3-8b --batch 8 --seq 2048 --out FILE.json

Each recipe trains the same model for a few steps. The table has the bytes of the parameters, of
the optimizer's states, of all gradients that exist at once, and on a GPU the peak and the time.

- AdamW: all gradients exist when backward ends, and then the optimizer steps.
- AdamW in backward: each parameter is updated as soon as its gradient is complete, and the gradient
  is freed. Gradients cannot be accumulated over several backwards, nor clipped by their norm.
- 8-bit AdamW: torchao keeps the states in 8 bits. It needs `pip install torchao`.
- frozen: the embedding and the lower half of the blocks are not trained. They have no gradients and
  no states, and no activations are kept for them.
"""

import argparse
import gc
import importlib.util
import json
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels import LigerLlama, LlamaConfig

MakeOptimizer = Callable[[list[nn.Parameter]], torch.optim.Optimizer]


class OptimizerInBackward:
    """One optimizer for each parameter, which steps when the parameter's gradient is complete.

    Args:
        model: the model whose trainable parameters are updated.
        make: makes an optimizer from a list of parameters.
    """

    def __init__(self, model: nn.Module, make: MakeOptimizer) -> None:
        trained = [p for p in model.parameters() if p.requires_grad]
        self.optimizers = {p: make([p]) for p in trained}
        self._hooks = [p.register_post_accumulate_grad_hook(self._update) for p in trained]

    def _update(self, parameter: Tensor) -> None:
        optimizer = self.optimizers[parameter]  # type: ignore[index]
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)

    def state_bytes(self) -> int:
        return sum(state_bytes(optimizer) for optimizer in self.optimizers.values())

    def remove(self) -> None:
        """Let backward leave the parameters as they are again."""
        for hook in self._hooks:
            hook.remove()


def freeze_lower_half(model: LigerLlama) -> None:
    """Train only the upper half of the blocks, the final norm and the head."""
    model.embed_tokens.requires_grad_(False)
    model.layers[: len(model.layers) // 2].requires_grad_(False)


def tensor_bytes(tensor: Tensor) -> int:
    """Return the bytes of a tensor, also of torchao's tensors, which hold several."""
    if hasattr(tensor, "__tensor_flatten__"):
        names, _ = tensor.__tensor_flatten__()
        return sum(tensor_bytes(getattr(tensor, name)) for name in names)
    return tensor.nbytes


def state_bytes(optimizer: torch.optim.Optimizer) -> int:
    values = [value for state in optimizer.state.values() for value in state.values()]
    return sum(tensor_bytes(value) for value in values if isinstance(value, Tensor))


class GradientBytes:
    """The most bytes of gradients that exist at once, counted whenever one is complete."""

    def __init__(self, model: nn.Module) -> None:
        self.parameters = [p for p in model.parameters() if p.requires_grad]
        self.most = 0
        self._hooks = [p.register_post_accumulate_grad_hook(self._count) for p in self.parameters]

    def _count(self, _: Tensor) -> None:
        held = sum(p.grad.nbytes for p in self.parameters if p.grad is not None)
        self.most = max(self.most, held)

    def remove(self) -> None:
        """Stop counting."""
        for hook in self._hooks:
            hook.remove()


def adamw(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    return torch.optim.AdamW(parameters, lr=1e-5, fused=True)


def adamw_8bit(parameters: list[nn.Parameter]) -> torch.optim.Optimizer:
    from torchao.optim import AdamW8bit

    return AdamW8bit(parameters, lr=1e-5)


# Recipe -> what makes its optimizer, whether it steps in backward, whether parts are frozen.
RECIPES: dict[str, tuple[MakeOptimizer, bool, bool]] = {
    "AdamW": (adamw, False, False),
    "AdamW in backward": (adamw, True, False),
    "8-bit AdamW": (adamw_8bit, False, False),
    "8-bit AdamW in backward": (adamw_8bit, True, False),
    "AdamW, lower half frozen": (adamw, False, True),
}


def available() -> list[str]:
    """Return the recipes whose packages are installed."""
    has_torchao = importlib.util.find_spec("torchao") is not None
    return [name for name, (make, *_) in RECIPES.items() if make is adamw or has_torchao]


def run(recipe: str, config: LlamaConfig, batch: int, seq: int, steps: int = 3) -> dict[str, Any]:
    """Train a new model for a few steps with a recipe; return its bytes, and on a GPU its peak."""
    make, in_backward, frozen = RECIPES[recipe]
    on_gpu = torch.cuda.is_available()
    device = "cuda" if on_gpu else "cpu"
    torch.manual_seed(0)
    torch.set_default_dtype(torch.bfloat16)
    try:
        with torch.device(device):
            model = LigerLlama(config).train()
    finally:
        torch.set_default_dtype(torch.float32)
    model.activation_checkpointing_enable()
    if frozen:
        freeze_lower_half(model)
    gradients = GradientBytes(model)  # its hooks run before those that free the gradients
    optimizer: Any
    if in_backward:
        optimizer = OptimizerInBackward(model, make)
    else:
        optimizer = make([p for p in model.parameters() if p.requires_grad])
    ids = torch.randint(config.vocab_size, (batch, seq), device=device)
    seconds = []
    for step in range(steps):
        if on_gpu:
            torch.cuda.synchronize()
            if step == 1:  # the first step makes the states
                torch.cuda.reset_peak_memory_stats()
        start = time.perf_counter()
        loss = model(ids, labels=ids).loss
        loss.backward()
        if not in_backward:
            optimizer.step()
            optimizer.zero_grad(set_to_none=True)
        last_loss = loss.item()  # waits for the GPU
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - start)
    row = {
        "recipe": recipe,
        "parameter bytes": sum(p.nbytes for p in model.parameters()),
        "state bytes": optimizer.state_bytes() if in_backward else state_bytes(optimizer),
        "gradient bytes": gradients.most,
        "loss": last_loss,
    }
    # A hook and its parameter refer to each other, and the garbage collector does not see it.
    gradients.remove()
    if in_backward:
        optimizer.remove()
    if on_gpu:
        row["peak bytes"] = torch.cuda.max_memory_allocated()
        row["ms"] = min(seconds[1:]) * 1e3
    return row


def main(arguments: list[str] | None = None) -> list[dict[str, Any]]:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--preset", help="a size of Llama; the default is a small model")
    parser.add_argument("--batch", type=int, default=2)
    parser.add_argument("--seq", type=int, default=128)
    parser.add_argument("--recipes", nargs="+", choices=RECIPES, help="default: all that can run")
    parser.add_argument("--out", type=Path, help="a JSON file for the table")
    given = parser.parse_args(arguments)
    if given.preset:
        config = LlamaConfig.preset(given.preset)
    else:
        config = LlamaConfig(
            vocab_size=512,
            hidden_size=128,
            intermediate_size=256,
            num_hidden_layers=4,
            num_attention_heads=4,
            num_key_value_heads=2,
        )
    rows = []
    for recipe in given.recipes or available():
        rows.append(run(recipe, config, given.batch, given.seq))
        gc.collect()
        if torch.cuda.is_available():
            torch.cuda.empty_cache()
        print(
            f"{recipe:24}",
            *(f"{rows[-1][name] / 2**20:10.2f} MiB of {name.partition(' ')[0]}s" for name in BYTES),
            *(f"{name} {rows[-1][name]:.4g}" for name in ("peak bytes", "ms") if name in rows[-1]),
            flush=True,
        )
        if given.out:
            gpu = torch.cuda.get_device_name() if torch.cuda.is_available() else "none"
            shape = {"gpu": gpu, "preset": given.preset, "batch": given.batch, "seq": given.seq}
            given.out.write_text(json.dumps(shape | {"rows": rows}, indent=1) + "\n")
    return rows


BYTES = ("parameter bytes", "state bytes", "gradient bytes")

if __name__ == "__main__":
    main()

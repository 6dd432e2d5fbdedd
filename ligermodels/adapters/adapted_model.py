"""LoRA in a run: adapters on the linears of a frozen model, and their export.

An adapter belongs to a projection of HF's model, such as q_proj, also where the native model has it
packed with others. It therefore trains the same numbers, and has the same names, as one of PEFT.
"""

from __future__ import annotations

from pathlib import Path

import torch
from torch import Tensor, nn

from ligermodels.adapters.adapter_config import has_end
from ligermodels.adapters.lora import LoraLinear
from ligermodels.adapters.peft_format import adapter_of_hf, linears
from ligermodels.adapters.quantized import Bits, QuantizedLinear
from ligermodels.converters.checkpoint import is_finite
from ligermodels.converters.export import save_adapter
from ligermodels.errors import CheckpointError, ConfigError, short_repr
from ligermodels.models.auto import AutoLiger
from ligermodels.models.base import DecoderModel


def add_adapters(
    model: DecoderModel,
    rank: int,
    alpha: float,
    dropout: float = 0.0,
    *,
    targets: list[str] | None = None,
    dtype: torch.dtype = torch.float32,
    seed: int = 0,
) -> None:
    """Freeze a model, and put new adapters on linears of its layers.

    Args:
        rank, alpha, dropout: as `LoraLinear` takes them.
        targets: HF's names of projections, such as q_proj, or of single modules, such as
            layers.0.mlp.up_proj. By default, all linears of the layers.
        dtype: of the adapters.
        seed: determines their values, on every device.
    Raises:
        ConfigError: a target names no linear of the layers.
    """
    model.requires_grad_(False)
    draw = torch.Generator().manual_seed(seed)
    unused, known = {*(targets or ())}, set()
    for name, parts in linears(model.weight_map(model.built_from)).items():
        base = model.get_submodule(name)
        if not name.startswith("layers.") or not hasattr(base, "in_features"):
            continue  # such as a router, which is no linear
        known |= {part.hf.rpartition(".")[2] for part in parts}
        chosen = [part for part in parts if targets is None or has_end(part.hf, targets)]
        unused -= {target for target in unused if any(has_end(p.hf, [target]) for p in parts)}
        if chosen:
            rows = [part.rows for part in chosen]
            adapted = LoraLinear(base, rows, rank=rank, alpha=alpha, dropout=dropout)
            adapted.reset_parameters(draw)
            device = next(iter((*base.parameters(), *base.buffers()))).device
            for end in ("lora_a", "lora_b"):
                drawn = getattr(adapted, end).detach()
                setattr(adapted, end, nn.Parameter(drawn.to(device, dtype)))
            model.set_submodule(name, adapted)
    if unused:
        raise ConfigError(
            f"lora_targets: {short_repr(min(unused))} is no linear of the layers of this model; "
            f"its linears are {', '.join(sorted(known))}"
        )


def quantize(model: DecoderModel, bits: Bits, device: torch.device) -> None:
    """Move a model to a device, with weights of 4 bits, 8 bits or in float8 in the layers' linears.

    The device never holds more than one of them unconverted.

    Raises:
        ConfigError: a linear has an odd number of inputs, which 4 bits do not allow, or sizes that
            are no multiples of 16 for float8; or the GPU does not multiply float8.
    """
    linears = [name for name, each in model.layers.named_modules() if type(each) is nn.Linear]
    for name in linears:
        linear = model.layers.get_submodule(name)
        assert isinstance(linear, nn.Linear)
        try:
            converted = QuantizedLinear(linear, bits, device=device)
        except ConfigError as error:
            raise ConfigError(f"load_in: layers.{name}: {error}") from None
        model.layers.set_submodule(name, converted)
    model.to(device)


def merged(model: DecoderModel) -> DecoderModel:
    """Return the model of the checkpoint with the adapters added to its weights, on the CPU.

    The weights are those of the checkpoint, even if training used them quantised.

    Raises:
        CheckpointError: the checkpoint's weights cannot be read, or are no longer those that the
            model was loaded from, or a sum is not finite.
    """
    assert model.source.folder is not None
    dtype = model.embed_tokens.weight.dtype
    whole: DecoderModel = AutoLiger.from_hf(model.source.folder, dtype=dtype)
    _check_same_weights(model, whole)
    for name, each in model.named_modules():
        if isinstance(each, LoraLinear):
            weight = whole.get_submodule(name).weight
            assert isinstance(weight, Tensor)
            each.add_to(weight)
            if not is_finite(weight.detach()):
                raise CheckpointError(
                    f"{name}.weight holds NaN or infinite values in {dtype} after the adapter was "
                    "added; its values or lora's alpha are too large"
                )
    return whole


def _check_same_weights(model: DecoderModel, whole: DecoderModel) -> None:
    """Raise unless the frozen weights of a model with adapters are those of its checkpoint."""
    for name, stored in whole.named_parameters():
        place, _, last = name.rpartition(".")
        module = model.get_submodule(place)
        base = module.base_layer if isinstance(module, LoraLinear) else module
        if isinstance(base, QuantizedLinear) and last == "weight":
            linear = whole.get_submodule(place)
            assert isinstance(linear, nn.Linear)
            again = QuantizedLinear(linear, base.bits, device=base.codes.device)
            same = torch.equal(again.codes, base.codes) and torch.equal(again.scales, base.scales)
        else:
            same = torch.equal(getattr(base, last).detach().cpu(), stored.detach())
        if not same:
            raise CheckpointError(
                f"{model.source.folder}: {name} was changed while the run was using it; restore "
                "the model and resume the run"
            )


def export_adapter(model: DecoderModel, folder: Path, base: str, dtype: torch.dtype | None) -> None:
    """Write the adapters in PEFT's format, under the names of HF's model.

    Args: base: the hub id or folder of the model of the adapters; dtype: None keeps their dtype.
    Raises:
        SaveError: the files cannot be written, or a value is not finite in this dtype.
    """
    first = next(each for each in model.modules() if isinstance(each, LoraLinear))
    settings = {"r": first.rank, "lora_alpha": first.alpha, "lora_dropout": first.dropout.p}
    weights, config = adapter_of_hf(factors_of(model), model.weight_map(model.built_from), settings)
    if dtype is not None:
        weights = {name: tensor.to(dtype) for name, tensor in weights.items()}
    config["base_model_name_or_path"] = base
    save_adapter(folder, weights, config, source_files=model.source.files)


def factors_of(model: DecoderModel) -> dict[str, tuple[Tensor, Tensor]]:
    """Return A and B of the adapter of each linear of HF's model, by its name."""
    found: dict[str, tuple[Tensor, Tensor]] = {}
    for name, parts in linears(model.weight_map(model.built_from)).items():
        each = model.get_submodule(name)
        if isinstance(each, LoraLinear):
            hf = {part.rows: part.hf for part in parts}
            found |= {hf[rows]: (a, b) for rows, a, b in each.factors()}
    return found

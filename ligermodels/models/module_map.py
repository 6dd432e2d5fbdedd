"""The weight map of a family, made from the modules of a model.

Each parameter has HF's name: "model." and the name that it has here. `DecoderModel.hf_names` lists
where a family differs. In the place of a packed linear HF has several ones, which the layer lists
in `hf_linears`, and the weights of experts have one of the layouts below.
"""

import re
from collections.abc import Iterator, Mapping

from torch import nn

from ligermodels.converters.weight_map import (
    MXFP4_BLOCKS,
    Entry,
    Towers,
    WeightMap,
    expert_entry,
    packed_entry,
)
from ligermodels.layers import Experts

# The layouts of experts' weights: a tensor for each expert; one for all, (experts, rows, inputs);
# one for all, (experts, inputs, rows), where the rows of gate and up alternate; the same in MXFP4.
ONE_BY_ONE, FUSED, ALTERNATING, MXFP4 = "one by one", "fused", "alternating", "mxfp4"
# The names of the text model in multimodal checkpoints of Gemma 3 and Mistral 3, published ones and
# those of transformers 5, and of what else is in them.
TEXT_NAMES = (
    ("language_model.model.", "model."),
    ("language_model.lm_head.", "lm_head."),
    ("model.language_model.", "model."),
)
VISION_NAMES = (
    *("vision_tower.", "multi_modal_projector."),
    *("model.vision_tower.", "model.multi_modal_projector."),
)
_LAYER = re.compile(r"layers\.\d+\.?")


def map_of(
    model: nn.Module,
    names: Mapping[str, str],
    *,
    layouts: Mapping[str, Mapping[str, str]],
    projections: tuple[str, ...],
    tied: bool = False,
    towers: Towers | None = None,
) -> WeightMap:
    """Return the map from a decoder's parameters to HF's tensors.

    Args:
        model: the decoder, on any device.
        names, layouts, projections, towers: see `DecoderModel`.
        tied: whether the head has the embedding's weight.
    """
    if not any(isinstance(module, Experts) for module in model.modules()):
        layouts = {ONE_BY_ONE: {}}
    made = {
        layout: tuple(_entries(model, {**names, **others}, layout, projections))
        for layout, others in layouts.items()
    }
    main, *rest = made
    differing = {
        layout: tuple(entry for entry, usual in zip(made[layout], made[main]) if entry != usual)
        for layout in rest
    }
    aliases = {"lm_head.weight": "model.embed_tokens.weight"} if tied else {}
    return WeightMap(made[main], aliases, ("rotary_emb.inv_freq",), {}, towers, differing)


def _entries(
    model: nn.Module, names: Mapping[str, str], layout: str, projections: tuple[str, ...]
) -> Iterator[Entry]:
    """Yield the entry of each parameter, with the experts in a layout."""
    packed: dict[str, tuple[str, Mapping[str, int]]] = {}  # name of a linear -> HF's linears
    experts: dict[str, tuple[str, Experts]] = {}  # name of a weight of experts -> their module
    for path, module in model.named_modules():
        here = hf_name(path, names)
        for child, linears in getattr(module, "hf_linears", {}).items():
            if _LAYER.sub("", f"{path}.{child}") not in names:  # or HF has one linear, too
                packed[f"{path}.{child}"] = here, linears
        if isinstance(module, Experts):
            own = [name for name, _ in module.named_parameters(recurse=False)]
            experts |= {f"{path}.{name}": (here, module) for name in own}
    for name, weight in model.named_parameters():
        rows, *width = weight.shape or (1,)
        parent, _, kind = name.rpartition(".")
        if name in experts:
            yield _expert_entry(name, *experts[name], layout, projections)
        elif parent in packed:
            there, linears = packed[parent]
            pieces = ((f"{there}.{linear}.{kind}", count) for linear, count in linears.items())
            yield packed_entry(name, tuple(width), *pieces)
        else:
            yield packed_entry(name, tuple(width), (hf_name(name, names), rows))


def names_in(model: nn.Module) -> set[str]:
    """Return the names that `hf_names` may have for a model."""
    named = (*model.named_modules(), *model.named_parameters())
    return {_LAYER.sub("", name) for name, _ in named}


def hf_name(name: str, names: Mapping[str, str]) -> str:
    """Return HF's name of a module or a parameter, whose name in the model is `name`."""
    names = {"head.proj": "lm_head", **names}
    found = _LAYER.match(name)
    layer = "" if found is None else found[0]
    inner = name.removeprefix(layer)
    if known := [each for each in names if f"{inner}.".startswith(f"{each}.")]:
        inner = names[longest := max(known, key=len)] + inner.removeprefix(longest)
    whole = f"{layer}{inner.lstrip('.')}".rstrip(".")
    return whole if whole.startswith("lm_head") else f"model.{whole}"


def _expert_entry(
    name: str, hf: str, experts: Experts, layout: str, projections: tuple[str, ...]
) -> Entry:
    """Return the entry of a weight or a bias of experts, whose module is called `hf` there."""
    kind = name.rpartition(".")[2]
    count, is_first = experts.num_experts, kind.startswith("gate_up")
    inputs, outputs = experts.hidden_size, experts.intermediate_size
    width, rows = (inputs, 2 * outputs) if is_first else (outputs, inputs)
    source = f"{hf}.experts.{kind}"
    if layout == ONE_BY_ONE:
        *first, last = projections
        parts = [(each, outputs) for each in first] if is_first else [(last, rows)]
        each = [
            (f"{hf}.experts.{expert}.{part}.weight", size)
            for expert in range(count)
            for part, size in parts
        ]
        return packed_entry(name, (width,), *each)
    if layout == FUSED:
        return expert_entry(name, (width,), source, count, rows)
    alternating = 2 if is_first else 1
    if kind.endswith("_bias"):
        bias = f"{hf}.experts.{kind.removesuffix('bias')}proj_bias"
        return expert_entry(name, (), bias, count, rows, parts=alternating)
    blocks = MXFP4_BLOCKS if layout == MXFP4 else ""
    return expert_entry(
        *(name, (width,), source + blocks, count, rows), parts=alternating, transposed=not blocks
    )

"""Loading and saving of a wrapper's weights: HF's tensors, packed by the weight map.

In a wrapper, the parameters of the decoder are under `model.`, and the projection to the vocabulary
is `lm_head`. All other names are native.
"""

import re
from collections.abc import Mapping
from itertools import chain
from typing import Any

from ligermodels.integrations import require

require("transformers")

from torch import Tensor, nn
from transformers.core_model_loading import ConversionOps, WeightConverter

from ligermodels.converters.weight_map import Entry, WeightMap, hf_tensors, native_tensor

_HEAD = "head.proj."


def wrapper_name(native: str) -> str:
    """Return the name in a wrapper of a native parameter."""
    if native.startswith(_HEAD):
        return "lm_head." + native.removeprefix(_HEAD)
    return f"model.{native}"


def conversions(*weight_maps: WeightMap) -> list[WeightConverter]:
    """Return transformers' description of weight maps, one entry for each kind of parameter."""
    kinds: dict[tuple[str, ...], WeightConverter] = {}
    for entries in chain.from_iterable(map(_groups, weight_maps)):
        targets = [wrapper_name(entry.name) for entry in entries]
        sources = list(dict.fromkeys(span.source for e in entries for span in e.spans))
        start = _common_start([*targets, *sources])
        tails = [name.removeprefix(start) for name in (*targets, *sources)]
        joined = any(span.expert is not None for entry in entries for span in entry.spans)
        if (targets != sources or joined) and tuple(tails) not in kinds:
            patterns = [re.escape(tail) for tail in tails]
            kinds[tuple(tails)] = WeightConverter(
                patterns[len(targets) :], patterns[: len(targets)], [Repack(to_hf=False)]
            )
    return list(kinds.values())


def _groups(weight_map: WeightMap) -> list[list[Entry]]:
    """Return the parameters in groups, so that no two groups take rows of the same tensor."""
    group_of: dict[str, list[Entry]] = {}
    for entry in weight_map:
        found = {id(g): g for s in entry.spans if (g := group_of.get(s.source)) is not None}
        group = [*chain.from_iterable(found.values()), entry]
        group_of |= {span.source: group for e in group for span in e.spans}
    return list({id(group): group for group in group_of.values()}.values())


def _common_start(names: list[str]) -> str:
    """Return what all names begin with, up to the last number in that: "model.layers.0"."""
    parts = [name.split(".") for name in names]
    same = 0
    while all(len(p) > same + 1 and p[same] == parts[0][same] for p in parts):
        same += 1
    while same and not parts[0][same - 1].isdigit():
        same -= 1
    return "".join(part + "." for part in parts[0][:same]).removesuffix(".")


class Repack(ConversionOps):
    """Pack HF's tensors into native parameters, or take them out of them again."""

    supports_many_to_many = True

    def __init__(self, to_hf: bool) -> None:
        self.to_hf = to_hf

    def convert(
        self,
        input_dict: dict[str, Any],
        source_patterns: list[str],
        target_patterns: list[str],
        *,
        full_layer_name: str,
        model: Any,
        **_: Any,
    ) -> dict[str, Any]:
        """Return the tensors of one layer by target pattern, from those by source pattern."""
        start = full_layer_name.removesuffix(_plain(target_patterns[0]))
        given = {
            start + _plain(pattern): tensors[0] if isinstance(tensors, list) else tensors
            for pattern, tensors in input_dict.items()
        }
        made: Mapping[str, Tensor]
        if self.to_hf:
            entries = {wrapper_name(entry.name): entry for entry in model.weight_map}
            mine = WeightMap(tuple(entries[name] for name in given))
            made = dict(hf_tensors(mine, {entries[name].name: x for name, x in given.items()}))
        else:
            names = [start + _plain(pattern) for pattern in target_patterns]
            made = {
                name: native_tensor(entry, given)
                for entry in chain.from_iterable(model.maps_to_load)
                if (name := wrapper_name(entry.name)) in names
                and all(span.source in given for span in entry.spans)
            }
        return {name.removeprefix(start): tensor for name, tensor in made.items()}

    @property
    def reverse_op(self) -> ConversionOps:
        """The same op in the other direction."""
        return Repack(not self.to_hf)


def _plain(pattern: str) -> str:
    return pattern.replace("\\", "")


def pack_hf_names(module: nn.Module, state_dict: dict[str, Any], prefix: str, *_: Any) -> None:
    """Replace HF's tensors in a state dict by the parameters that the module has.

    It is a pre-hook of load_state_dict. HF's Trainer resumes with the names that save_pretrained
    wrote, and with strict=False, which would leave out every packed parameter without an error.
    """
    own = {name for name, _ in module.named_parameters(remove_duplicate=False)}
    used: set[str] = set()
    for entry in module.weight_map:  # type: ignore[union-attr]
        name = wrapper_name(entry.name)
        sources = {prefix + span.source for span in entry.spans}
        if name in own and prefix + name not in state_dict and sources <= state_dict.keys():
            here = {name.removeprefix(prefix): state_dict[name] for name in sources}
            state_dict[prefix + name] = native_tensor(entry, here)
            used |= sources
    for name in used - {prefix + wrapper_name(entry.name) for entry in module.weight_map}:  # type: ignore[union-attr]
        del state_dict[name]

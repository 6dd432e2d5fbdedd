"""Tensors under HF's names without a folder: out of a model's parameters, and back into them."""

from collections.abc import Iterator, Mapping

import torch
from torch import Tensor

from ligermodels.converters.weight_map import Entry, Span, WeightMap


def hf_tensors(
    weight_map: WeightMap, weights: Mapping[str, Tensor]
) -> Iterator[tuple[str, Tensor]]:
    """Yield each HF name and tensor of a model, in export order.

    A tensor that lies in one native parameter is a view of it.

    Args: weights: the native parameters by name.
    """
    for name, parts in weight_map.parts().items():
        yield name, joined_rows(parts, weights)


def joined_rows(parts: list[tuple[Entry, Span]], weights: Mapping[str, Tensor]) -> Tensor:
    """Return one HF tensor.

    Args: parts: its pieces as in `WeightMap.parts`; weights: the native parameters by name.
    """
    entry = parts[0][0]
    if len(parts) == len(entry.spans) == 1:  # all rows, also those that a resize has added
        return weights[entry.name]
    return _joined([weights[e.name][s.row : s.row + s.rows] for e, s in parts])


def native_tensor(entry: Entry, tensors: Mapping[str, Tensor]) -> Tensor:
    """Return a native parameter's value, joined from HF tensors.

    Args: entry: the parameter; tensors: at least the HF tensors of its spans, by name.
    """
    return _joined([tensors[s.source][s.source_row : s.source_row + s.rows] for s in entry.spans])


def _joined(pieces: list[Tensor]) -> Tensor:
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces)

"""The time and the memory of plans that keep tensors in host memory, and better such plans.

The last dimension of all arrays is the layers. Earlier dimensions hold plans that are compared.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from ligermodels.memory.offload import HOLD
from ligermodels.memory.plan import LayerPlan

Array = np.ndarray[Any, Any]

# A change must make the score smaller by this factor.
_LESS = 1 - 1e-4


def layer_seconds(forward: Array, backward: Array, copies: Array) -> Array:
    """Return the seconds of the layers, (...), if each direction has one copy at a time.

    Forward waits when a layer ends whose copies hold memory too long, and backward for the tensors
    that it needs; both are those of `Offloader`.

    Args: forward, backward: seconds of the passes; copies: seconds of the copies to host memory,
        which take as long on the way back. All are (..., layers).
    """
    count = copies.shape[-1]
    moves = copies > 0
    now = np.zeros(copies.shape[:-1])
    link = np.zeros_like(now)
    done = np.zeros_like(copies)
    for index in range(count):
        now = now + forward[..., index]
        end = np.maximum(now, link) + copies[..., index]
        link = np.where(moves[..., index], end, link)
        done[..., index] = np.where(moves[..., index], end, 0.0)
        if index >= HOLD:
            now = np.maximum(now, done[..., index - HOLD])
    link, ready = now, np.zeros_like(copies)
    for index in reversed(range(count)):
        # When backward begins a layer, the tensors of the layer below start to return.
        for layer in (index, index - 1) if index == count - 1 else (index - 1,):
            if layer >= 0:
                end = np.maximum(now, link) + copies[..., layer]
                link = np.where(moves[..., layer], end, link)
                ready[..., layer] = np.where(moves[..., layer], end, 0.0)
        now = np.maximum(now, ready[..., index]) + backward[..., index]
    return now


@dataclass(frozen=True)
class Choices:
    """The costs of the choices for all layers, from which a search chooses.

    Attributes:
        plans: the choices. Their kept tensors may be in host memory.
        kept: bytes from a layer's forward to its backward, (choices, layers).
        beside: the most bytes that exist, while a layer runs forward or backward, besides what it
            and the layers before it keep, (choices, layers).
        forward, backward: seconds of the passes, (choices, layers).
        at_head: the most bytes that exist between the layers' forward and their backward, besides
            what the layers keep.
        host_bytes: bytes/s to or from host memory.
        outside: seconds of the step outside the layers.
        unit: all kept bytes are multiples of it.
    """

    plans: Sequence[LayerPlan]
    kept: Array
    beside: Array
    forward: Array
    backward: Array
    at_head: int
    host_bytes: float = 1.0
    outside: float = 0.0
    unit: int = 1

    def only(self, plans: Sequence[LayerPlan]) -> "Choices":
        """Return some choices, which may now be in host memory."""
        at = [self.plans.index(replace(plan, host=False)) for plan in plans]
        costs = {
            name: getattr(self, name)[at] for name in ("kept", "beside", "forward", "backward")
        }
        return replace(self, plans=plans, **costs)

    def step(self, layers: Sequence[LayerPlan]) -> tuple[float, int]:
        """Return the seconds of a step and its peak in bytes, as a search counts them."""
        choices = self.only(list(dict.fromkeys(layers)))
        seconds, peak, _ = choices.costs(np.array([*map(choices.plans.index, layers)]))
        return self.outside + float(seconds), int(peak)

    def costs(self, plans: Array) -> tuple[Array, Array, Array]:
        """Return the seconds of the layers, the peak and the bytes in host memory, all (...).

        Args: plans: the numbers of the choices, (..., layers).
        """
        layers = np.arange(plans.shape[-1])
        kept, host = self.kept[plans, layers], np.array([x.host for x in self.plans])[plans]
        moved = np.where(host, kept, 0)
        here = (kept - moved).cumsum(-1)
        # In backward the tensors of a layer and of the one below are on the GPU.
        returned = moved.copy()
        returned[..., 1:] += moved[..., :-1]
        running = (here + returned + self.beside[plans, layers]).max(-1)
        # The tensors of the last layers do not leave it before backward.
        at_head = here[..., -1] + moved[..., -HOLD:].sum(-1) + self.at_head
        seconds = layer_seconds(
            self.forward[plans, layers], self.backward[plans, layers], moved / self.host_bytes
        )
        return seconds, np.maximum(running, at_head), moved.sum(-1)

    def scores(self, plans: Array, budget: int, host_budget: int) -> Array:
        """Return the seconds, to which each byte that exceeds a budget adds a second."""
        seconds, peak, host = self.costs(plans)
        return seconds + np.maximum(peak - budget, 0) + np.maximum(host - host_budget, 0)

    def improved(self, plan: Array, budget: int, host_budget: int, *, pairs: bool = True) -> Array:
        """Change one layer at a time, or with `pairs` two, as long as the plan becomes faster.

        The plan that is given may exceed the budgets, and is then first made smaller.

        Args: plan: the numbers of the choices, (layers,); budget, host_budget: bytes.
        """
        count, layers = self.kept.shape
        what, where = (x.ravel() for x in np.indices((count, layers)))
        first, second = np.triu_indices(len(where), 1)
        apart = where[first] != where[second]
        # Pairs take much longer, so they are tried where no single change helps.
        kinds: list[tuple[Array, ...]] = [(np.arange(len(where)),)]
        kinds += [(first[apart], second[apart])] * pairs

        def changed(moves: tuple[Array, ...]) -> tuple[float, Array]:
            plans = np.repeat(plan[None], len(moves[0]), 0)
            for move in moves:
                plans[np.arange(len(plans)), where[move]] = what[move]
            found = self.scores(plans, budget, host_budget)
            return float(found.min()), plans[found.argmin()]

        score = float(self.scores(plan, budget, host_budget))
        while True:
            better = (found for found in map(changed, kinds) if found[0] < score * _LESS)
            found = next(better, None)
            if found is None:
                return plan
            score, plan = found

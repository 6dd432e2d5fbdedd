"""Rates of a device's products and copies, measured or taken from its data sheet."""

from collections.abc import Callable
from dataclasses import dataclass, replace
from functools import cache

import torch
from torch import Tensor

from ligermodels.errors import ConfigError
from ligermodels.memory.attention_rates import AttentionKind, measured_rates
from ligermodels.memory.byte_sizes import GIB
from ligermodels.memory.tracker import Work


@dataclass(frozen=True)
class Rates:
    """The rates that turn work into seconds.

    Attributes:
        products: FLOP/s of matrix products, one after the other.
        attention: FLOP/s of attention, or a function that returns them for a kind and a pass.
        memory: bytes/s that other ops read and write.
        host_bytes: bytes/s to or from host memory, each way.
        source: where the rates come from.
        mixed_products: FLOP/s of matrix products where other work takes half of the time. By
            default it equals `products`.
    """

    products: float
    attention: float | Callable[[AttentionKind, str], float]
    memory: float
    host_bytes: float
    source: str
    mixed_products: float | None = None

    def in_step(self, work: Work) -> "Rates":
        """Return the rates in a step with this work.

        Products one after the other bring a GPU to its power limit, and it lowers its clock. Other
        work needs less power, so products between it are faster.
        """
        share = work.product_flops / self.products / (self.seconds(work) or 1.0)
        mixed = self.products if self.mixed_products is None else self.mixed_products
        other = min(2 * (1 - share), 1.0)
        return replace(self, products=self.products + other * (mixed - self.products))

    def seconds(self, work: Work) -> float:
        """Return the seconds that the work takes, without copies to or from the host."""
        rate = self.attention
        attention = sum(
            flops / (rate(*made) if callable(rate) else rate)
            for made, flops in work.attention.items()
        )
        return work.product_flops / self.products + attention + work.moved_bytes / self.memory


# From the data sheets: dense 16-bit FLOP/s, bytes/s of the GPU's memory, bytes/s of its PCIe link
# each way, and the GiB that torch can allocate on an empty GPU. Matrix products reach about 0.7 of
# the first, attention about 0.55, other ops 0.85 of the second, and copies 0.85 of the third.
_SHEETS = {
    "H200": (989e12, 4.8e12, 64e9, 139),
    "H100": (989e12, 3.35e12, 64e9, 78.5),
    "A100": (312e12, 2.0e12, 32e9, 78.5),
    "L40S": (362e12, 0.864e12, 32e9, 44),
    "B200": (2250e12, 8.0e12, 64e9, 177),
}
_RUNS = 10
_ROUNDS = 3
# A GPU that has computed for some tenths of a second reaches its power limit, and lowers its clock.
# A training step runs at that clock.
_WARM_UP_SECONDS = 0.6


def data_sheet(name: str, dtype: torch.dtype) -> Rates:
    """Return the rates for a GPU's name, such as "NVIDIA H200". Unknown GPUs count as an H100.

    32-bit products are taken to run at a tenth of the 16-bit rate.
    """
    known = _known(name) or "H100"
    flops, memory, link, _ = _SHEETS[known]
    scale = 1.0 if dtype.itemsize == 2 else 0.1
    return Rates(
        0.7 * flops * scale,
        0.55 * flops * scale,
        0.85 * memory,
        0.85 * link,
        f"data sheet of {known}",
    )


def peak_flops(name: str) -> float | None:
    """Return a GPU's dense 16-bit FLOP/s by its data sheet, or None if it has none here."""
    known = _known(name)
    return None if known is None else _SHEETS[known][0]


def gpu_bytes(name: str) -> int:
    """Return the bytes that torch can allocate on a GPU that has a data sheet here.

    Raises:
        ConfigError: the GPU has none.
    """
    known = _known(name)
    if known is None:
        raise ConfigError(f"gpu: {name!r} is not known; expected one of {', '.join(_SHEETS)}")
    return int(_SHEETS[known][3] * GIB)


def _known(name: str) -> str | None:
    return next((key for key in _SHEETS if key in name.upper()), None)


@cache
def measure(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measure the rates on a GPU, once: in about four seconds, with 0.4 GiB of memory.

    Each kind of attention is measured when its rate is first asked for. This takes about a second,
    and longer for FlexAttention, which is compiled. Rows of 16384 tokens and more take about
    1.5 GiB.
    """
    with torch.cuda.device(device):
        # A separate generator leaves that of the caller unchanged.
        generator = torch.Generator(device).manual_seed(0)

        def random(*shape: int) -> Tensor:
            return torch.randn(shape, generator=generator, device=device, dtype=dtype)

        x, weight = random(8192, 4096), random(8192, 4096)
        flops = 2 * x.numel() * weight.shape[0]
        products = flops / _seconds(lambda: x @ weight.t())
        mixed = flops / _seconds(lambda: x @ weight.t(), between=x.clone)
        memory = 2 * x.nbytes / _seconds(x.clone)
        host = torch.empty(x.shape, dtype=dtype, pin_memory=True)
        link = x.nbytes / _seconds(lambda: host.copy_(x, non_blocking=True))
        name = torch.cuda.get_device_name(device)

    def attention(kind: AttentionKind, direction: str) -> float:
        with torch.cuda.device(device):
            forward, backward = measured_rates(kind, device, dtype, _seconds)
        return forward if direction == "forward" else backward

    return Rates(products, attention, memory, link, f"measured on {name}", mixed)


def _seconds(run: Callable[[], object], between: Callable[[], object] | None = None) -> float:
    """Return the seconds of a run on the current GPU, the median of the last rounds.

    Args: between: other work, which runs as long between the rounds.
    """
    times: list[float] = []
    others: list[Callable[[], object]] = []
    if between is not None:
        others = [between] * round(_RUNS * _seconds(run) / _seconds(between))
    while sum(times) * _RUNS < _WARM_UP_SECONDS or len(times) < 2 * _ROUNDS:
        for other in others:
            other()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        for _ in range(_RUNS):
            run()
        end.record()
        end.synchronize()
        times.append(start.elapsed_time(end) / 1e3 / _RUNS)
    return sorted(times[-_ROUNDS:])[_ROUNDS // 2]


def rates_of(device: torch.device, dtype: torch.dtype) -> Rates:
    """Measure the device, or use a data sheet if it is not a GPU of this machine."""
    if device.type == "cuda" and torch.cuda.is_available():
        return measure(device, dtype)
    return data_sheet("H100", dtype)

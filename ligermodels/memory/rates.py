"""The work of a step, and the rates of a device that turn it into seconds.

Rates are measured, or taken from a data sheet. Those of attention are measured with the function
that the layers call: FlexAttention with capped scores, or heads of 256, reach a fraction of the
rate of cuDNN's attention, and each of them is slower in backward.
"""

import warnings
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, fields, replace
from functools import cache
from typing import Literal, NamedTuple

import torch
from torch import Tensor

from ligermodels.errors import ConfigError
from ligermodels.layers.attention_backend import attend
from ligermodels.layers.attention_mask import AttentionMask
from ligermodels.memory.byte_sizes import GIB

# Backward computes five products where forward computes two.
BACKWARD = 2.5
# Attention is measured with rows or documents of these lengths, and with at least so many tokens.
# It takes a few percent less time for a pair of tokens if rows are longer.
_LENGTHS = 128, 16384
_TOKENS = 4096


class AttentionKind(NamedTuple):
    """The properties of an attention call that decide its rate.

    Attributes:
        backend: the one that `attend` chooses.
        heads, kv_heads, head_dim: the shape of q, k and v.
        length: queries of a row or of a document, rounded up to a power of two, from 128 to 16384.
        window: None where it hides no key in `length` queries.
        softcap, causal: those of the layer.
    """

    backend: str
    heads: int
    kv_heads: int
    head_dim: int
    length: int
    window: int | None = None
    softcap: float | None = None
    causal: bool = True

    @property
    def tokens(self) -> int:
        """The number of tokens with which the rate is measured."""
        return max(self.length, _TOKENS)

    @property
    def forward_flops(self) -> int:
        """The FLOP of the two products of the measured forward, over the pairs of the mask."""
        pairs = self.tokens // self.length * attention_pairs(self.length, self.window, self.causal)
        return 4 * self.heads * self.head_dim * pairs


def attention_kind(
    backend: str,
    q: Tensor,
    k: Tensor,
    length: int,
    window: int | None,
    softcap: float | None,
    causal: bool,
) -> AttentionKind:
    """Return the kind of an attention over rows or documents of `length` queries.

    Args: q: (batch, heads, queries, head_dim); k: (batch, kv heads, keys, head_dim).
    """
    measured = min(max(1 << (length - 1).bit_length(), _LENGTHS[0]), _LENGTHS[1])
    window = None if window is None or window >= measured else window
    heads, kv_heads, head_dim = q.shape[1], k.shape[1], q.shape[-1]
    return AttentionKind(backend, heads, kv_heads, head_dim, measured, window, softcap, causal)


def attention_pairs(queries: int, window: int | None, causal: bool = True) -> int:
    """Return how many keys the queries of a row see together."""
    window = queries if window is None else min(window, queries)
    before = window * (window + 1) // 2 + (queries - window) * window  # with its own
    return before if causal else 2 * before - queries


AttentionPass = tuple[AttentionKind, Literal["forward", "backward"]]


@dataclass
class Work:
    """The operations and the transferred bytes of one pass."""

    # Of matrix products, two for each multiplication and addition; one if they are in float8.
    product_flops: int = 0
    # FLOP of attention over the query-key pairs that the mask leaves, by its kind and the pass.
    attention: Counter[AttentionPass] = field(default_factory=Counter)
    moved_bytes: int = 0  # read and written by all other ops
    to_host_bytes: int = 0
    from_host_bytes: int = 0

    def __add__(self, other: "Work") -> "Work":
        names = (each.name for each in fields(self))
        return Work(**{name: getattr(self, name) + getattr(other, name) for name in names})


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
            forward, backward = measured_rates(kind, device, dtype)
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


@cache
def measured_rates(
    kind: AttentionKind, device: torch.device, dtype: torch.dtype
) -> tuple[float, float]:
    """Return the FLOP/s of forward and of backward on a GPU."""
    rows = 1 if kind.backend == "varlen" else kind.tokens // kind.length
    shape = rows, kind.tokens // rows, kind.heads + 2 * kind.kv_heads, kind.head_dim
    # A separate generator leaves that of the caller unchanged.
    generator = torch.Generator(device).manual_seed(0)
    packed = torch.randn(shape, generator=generator, device=device, dtype=dtype)
    parts = packed.split((kind.heads, kind.kv_heads, kind.kv_heads), 2)
    q, k, v = (x.transpose(1, 2).detach().requires_grad_() for x in parts)
    mask = _mask(kind, rows, device)
    options = {"scale": kind.head_dim**-0.5, "window": kind.window, "softcap": kind.softcap}

    def attention(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(q, k, v, mask, causal=kind.causal, **options)

    if kind.backend == "flex":
        mask.block_mask(kind.window, rows, device, causal=kind.causal)  # the mask keeps it
        # A compiled function of its own: if that of the layers saw shapes here which training does
        # not have, torch would compile it again for all shapes, to slower code.
        attention = torch.compile(attention, fullgraph=True, dynamic=False)

    def run() -> Tensor:
        return attention(q, k, v)

    with (
        torch.enable_grad(),
        torch._dynamo.config.patch(recompile_limit=256),
        warnings.catch_warnings(),
    ):
        # Dynamo says that it looks into a cached function, whose result is always the same.
        warnings.filterwarnings("ignore", message="Dynamo detected a call to a `functools.lru_cac")
        gradient = torch.empty_like(run()).normal_(generator=generator)
        forward = _seconds(run)
        both = _seconds(lambda: torch.autograd.grad(run(), (q, k, v), gradient))
    backward = max(both - forward, forward)  # it computes more; noise must not say otherwise
    return kind.forward_flops / forward, BACKWARD * kind.forward_flops / backward


def _mask(kind: AttentionKind, rows: int, device: torch.device) -> AttentionMask:
    """Return a mask with which `attend` chooses the backend of the kind."""
    if kind.backend == "varlen":
        starts = torch.arange(0, kind.tokens + 1, kind.length, device=device, dtype=torch.int32)
        ids = torch.arange(kind.tokens, device=device)[None] // kind.length
        return AttentionMask(
            kind.tokens, document_ids=ids, cu_seqlens=starts, max_seqlen=kind.length
        )
    queries = kind.tokens // rows
    ids = torch.zeros(1, queries, device=device, dtype=torch.int64)
    return AttentionMask(queries, document_ids=ids if kind.backend == "flex" else None)

"""The ops under measurement: for each, inputs of a size, implementations, and what it must move.

Bytes are the fewest that the op can move, each input read and each output written once a pass;
what is saved between the passes counts, statistics and weights of a row's width do not.
"""

import dataclasses
import importlib
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from ligermodels import kernels
from ligermodels.kernels.backend import select

Function = Callable[..., Any]


class Absent(Exception):
    """A peer that is not installed here, or that this PyTorch does not have."""


class _AbsentModule:
    def __init__(self, reason: str) -> None:
        self.reason = reason

    def __getattr__(self, name: str) -> Any:
        raise Absent(self.reason)


def _peer(name: str) -> Any:
    """The module, or a stand-in whose every attribute raises Absent."""
    try:
        return importlib.import_module(name)
    except ImportError as error:
        return _AbsentModule(str(error))


liger = _peer("liger_kernel.transformers.functional")
liger_ops = _peer("liger_kernel.ops")
cce = _peer("cut_cross_entropy")


@dataclasses.dataclass
class Implementation:
    """A function, and what differs from the case where it takes other inputs."""

    function: Function
    inputs: Callable[[], list[Tensor]] | None = None
    bytes: tuple[int, int] | None = None


@dataclasses.dataclass
class Case:
    """One op at one size.

    inputs: makes the leaves that every implementation without inputs of its own takes.
    bytes: the fewest, forward and forward + backward; None where matrix products are the floor.
    products: rows, hidden, vocabulary of a head's matrix products.
    logits_products: how often forward + backward must make the logits, never holding them all.
    """

    inputs: Callable[[], list[Tensor]]
    implementations: dict[str, Function | Implementation]
    bytes: tuple[int, int] | None = None
    products: tuple[int, int, int] | None = None
    logits_products: int = 1

    def implementation(self, name: str) -> Implementation:
        """The implementation of that name, its inputs and bytes filled in."""
        entry = self.implementations[name]
        if not isinstance(entry, Implementation):
            entry = Implementation(entry)
        return Implementation(
            entry.function, entry.inputs or self.inputs, entry.bytes or self.bytes
        )


class Random:
    """Inputs from a generator of its own: a capture that fails leaves the default one unusable."""

    def __init__(self, device: str = "cuda", dtype: torch.dtype = torch.bfloat16) -> None:
        self.device, self.dtype = device, dtype
        self.generator = torch.Generator(device).manual_seed(0)

    def normal(self, *shape: int, scale: float = 1.0, dtype: torch.dtype | None = None) -> Tensor:
        """A leaf that requires a gradient."""
        tensor = torch.empty(shape, dtype=dtype or self.dtype, device=self.device)
        return tensor.normal_(0, scale, generator=self.generator).requires_grad_()

    def targets(self, rows: int, vocab: int, ignored: float = 0.0) -> Tensor:
        """Token ids, the given share of them -100 at random places."""
        targets = torch.randint(
            vocab, (rows,), device=self.device, generator=self.generator, dtype=torch.int64
        )
        order = torch.randperm(rows, device=self.device, generator=self.generator)
        targets[order[: round(rows * ignored)]] = -100
        return targets

    def angles(self, seq: int, half: int) -> tuple[Tensor, Tensor]:
        """cos and sin (1, seq, half), float32."""
        angles = 6 * torch.rand(1, seq, half, device=self.device, generator=self.generator)
        return angles.cos(), angles.sin()


def _compiled(function: Function) -> Function:
    return torch.compile(function, dynamic=False)


def _eager_norm(x: Tensor, weight: Tensor) -> Tensor:
    wide = x.float()
    return weight * (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-6)).to(x.dtype)


def rms_norm(random: Random, rows: int, width: int) -> Case:
    one_pass = rows * width * random.dtype.itemsize
    return Case(
        lambda: [random.normal(rows, width), random.normal(width)],
        {
            "eager": _eager_norm,
            "F.rms_norm": lambda x, w: F.rms_norm(x, (width,), w, 1e-6),
            "torch.compile": _compiled(_eager_norm),
            "liger": lambda x, w: liger.liger_rms_norm(x, w, 1e-6, in_place=False),
            "liger (in place)": lambda x, w: liger.liger_rms_norm(x, w, 1e-6),
            "ligermodels": lambda x, w: kernels.rms_norm(x, w, 1e-6),
        },
        # Forward reads x and writes y; backward reads x and dy and writes dx.
        (2 * one_pass, 5 * one_pass),
    )


def add_rms_norm(random: Random, rows: int, width: int) -> Case:
    def eager(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return _eager_norm(total, weight), total

    def add_then_norm(x: Tensor, residual: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return F.rms_norm(total, (width,), weight, 1e-6), total

    one_pass = rows * width * random.dtype.itemsize
    return Case(
        lambda: [random.normal(rows, width), random.normal(rows, width), random.normal(width)],
        {
            "eager": eager,
            "F.rms_norm": add_then_norm,
            "torch.compile": _compiled(eager),
            "liger": lambda x, r, w: liger.liger_fused_add_rms_norm(x, r, w, 1e-6, in_place=False),
            "liger (in place)": lambda x, r, w: liger.liger_fused_add_rms_norm(x, r, w, 1e-6),
            "ligermodels": lambda x, r, w: kernels.add_rms_norm(x, r, w, 1e-6),
        },
        # Forward reads x, residual and writes y, sum; backward reads sum, dy, dsum and writes one
        # gradient, which is that of both.
        (4 * one_pass, 8 * one_pass),
    )


def layer_norm(random: Random, rows: int, width: int) -> Case:
    def eager(x: Tensor, weight: Tensor, bias: Tensor) -> Tensor:
        return F.layer_norm(x, (width,), weight, bias, 1e-5)

    one_pass = rows * width * random.dtype.itemsize
    return Case(
        lambda: [random.normal(rows, width), random.normal(width), random.normal(width)],
        {
            "eager": eager,
            "torch.compile": _compiled(eager),
            "liger": lambda x, w, b: liger.liger_layer_norm(x, w, b, 1e-5),
            "ligermodels": lambda x, w, b: kernels.layer_norm(x, w, b, 1e-5),
        },
        (2 * one_pass, 5 * one_pass),
    )


def add_layer_norm(random: Random, rows: int, width: int) -> Case:
    def eager(x: Tensor, residual: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
        total = x + residual
        return F.layer_norm(total, (width,), w, b, 1e-5), total

    one_pass = rows * width * random.dtype.itemsize
    return Case(
        lambda: [
            random.normal(rows, width),
            random.normal(rows, width),
            random.normal(width),
            random.normal(width),
        ],
        {
            "eager": eager,
            "torch.compile": _compiled(eager),
            "ligermodels": lambda x, r, w, b: kernels.add_layer_norm(x, r, w, b, 1e-5),
        },
        (4 * one_pass, 8 * one_pass),
    )


def _glu(random: Random, rows: int, width: int, activation: Function, name: str) -> Case:
    def eager(gate_up: Tensor) -> Tensor:
        gate, up = gate_up.chunk(2, -1)
        return activation(gate) * up

    def liger_glu(gate: Tensor, up: Tensor) -> Tensor:
        return getattr(liger, f"liger_{name}")(gate, up)

    one_pass = rows * width * random.dtype.itemsize
    return Case(
        lambda: [random.normal(rows, 2 * width)],
        {
            "eager": eager,
            "torch.compile": _compiled(eager),
            # Halves of packed rows are not contiguous: Liger copies them.
            "liger": lambda gate_up: liger_glu(*gate_up.chunk(2, -1)),
            # Halves apart, as the linears of transformers make them; gradients overwrite them.
            "liger (in place)": Implementation(
                liger_glu, lambda: [random.normal(rows, width) for _ in range(2)]
            ),
            "ligermodels": getattr(kernels, name),
        },
        # Forward reads gate, up and writes y; backward reads gate, up, dy and writes two gradients.
        (3 * one_pass, 8 * one_pass),
    )


def swiglu(random: Random, rows: int, width: int) -> Case:
    return _glu(random, rows, width, F.silu, "swiglu")


def geglu(random: Random, rows: int, width: int) -> Case:
    return _glu(random, rows, width, lambda gate: F.gelu(gate, approximate="tanh"), "geglu")


class _Rotation:
    """RoPE's angles; how eager PyTorch and Liger turn (batch, seq, heads, head_dim) by them."""

    def __init__(self, random: Random, seq: int, head_dim: int) -> None:
        self.cos, self.sin = random.angles(seq, head_dim // 2)
        self.wide_cos, self.wide_sin = (
            torch.cat((t, t), -1).to(random.dtype) for t in (self.cos, self.sin)
        )

    def eager(self, x: Tensor) -> Tensor:
        a, b = x.chunk(2, -1)
        return x * self.wide_cos[:, :, None] + torch.cat((-b, a), -1) * self.wide_sin[:, :, None]

    def liger(self, q: Tensor, k: Tensor) -> tuple[Tensor, Tensor]:
        """In place where q and k are contiguous, on copies where they are not."""
        q, k = liger.liger_rope(q.transpose(1, 2), k.transpose(1, 2), self.wide_cos, self.wide_sin)
        return q.transpose(1, 2), k.transpose(1, 2)


class _RopeInPlace(torch.autograd.Function):
    """As `kernels.norm_qkv_rope` rotates what its linear has just made; v stays where it is."""

    @staticmethod
    def forward(ctx, qkv, cos, sin, heads, kv_heads):
        ctx.save_for_backward(cos, sin)
        qkv = qkv.detach()
        select(qkv).rope_forward(qkv, cos, sin, heads, kv_heads, True)
        return kernels.split_qkv(qkv, heads, kv_heads)

    @staticmethod
    def backward(ctx, grad_q, grad_k, grad_v):
        cos, sin = ctx.saved_tensors
        grad = select(grad_q).rope_backward(grad_q, grad_k, grad_v, cos, sin)
        return grad, *[None] * 4


def rope(random: Random, batch: int, seq: int, heads: int, kv_heads: int, head_dim: int) -> Case:
    rotation = _Rotation(random, seq, head_dim)

    def eager(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = kernels.split_qkv(qkv, heads, kv_heads)
        return rotation.eager(q), rotation.eager(k), v

    def liger_packed(qkv: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = kernels.split_qkv(qkv, heads, kv_heads)
        return *rotation.liger(q, k), v

    head_pass = batch * seq * head_dim * random.dtype.itemsize
    rotated = heads + kv_heads
    return Case(
        lambda: [random.normal(batch, seq, (rotated + kv_heads) * head_dim)],
        {
            "eager": eager,
            "torch.compile": _compiled(eager),
            "liger": liger_packed,
            # q and k apart, without v: fewer bytes.
            "liger (in place)": Implementation(
                rotation.liger,
                lambda: [random.normal(batch, seq, n, head_dim) for n in (heads, kv_heads)],
                (2 * rotated * head_pass, 4 * rotated * head_pass),
            ),
            "ligermodels": lambda qkv: kernels.rope(
                qkv, rotation.cos, rotation.sin, heads, kv_heads
            ),
            "ligermodels (in place)": lambda qkv: _RopeInPlace.apply(
                qkv, rotation.cos, rotation.sin, heads, kv_heads
            ),
        },
        # Forward reads q, k and writes them, v can stay where it is; backward reads dq, dk, dv and
        # writes them packed.
        (2 * rotated * head_pass, (4 * rotated + 2 * kv_heads) * head_pass),
    )


def qk_norm_rope(
    random: Random, batch: int, seq: int, heads: int, kv_heads: int, head_dim: int
) -> Case:
    rotation = _Rotation(random, seq, head_dim)

    def eager(qkv: Tensor, q_weight: Tensor, k_weight: Tensor) -> tuple[Tensor, ...]:
        q, k, v = kernels.split_qkv(qkv, heads, kv_heads)
        return (
            rotation.eager(_eager_norm(q, q_weight)),
            rotation.eager(_eager_norm(k, k_weight)),
            v,
        )

    def liger_two(qkv: Tensor, q_weight: Tensor, k_weight: Tensor) -> tuple[Tensor, ...]:
        q, k, v = kernels.split_qkv(qkv, heads, kv_heads)
        norm = liger.liger_rms_norm
        return *rotation.liger(norm(q, q_weight, 1e-6), norm(k, k_weight, 1e-6)), v

    head_pass = batch * seq * head_dim * random.dtype.itemsize
    return Case(
        lambda: [
            random.normal(batch, seq, (heads + 2 * kv_heads) * head_dim),
            random.normal(head_dim),
            random.normal(head_dim),
        ],
        {
            "eager": eager,
            "torch.compile": _compiled(eager),
            "liger (norm, then rope)": liger_two,
            "ligermodels": lambda qkv, q_weight, k_weight: kernels.qk_norm_rope(
                qkv, q_weight, k_weight, rotation.cos, rotation.sin, heads, kv_heads
            ),
        },
        # Forward reads q, k and writes them; backward reads q, k, dq, dk, dv and writes all three.
        (
            2 * (heads + kv_heads) * head_pass,
            (5 * (heads + kv_heads) + 2 * kv_heads) * head_pass,
        ),
    )


def cross_entropy(random: Random, rows: int, vocab: int, softcap: float | None = None) -> Case:
    targets = random.targets(rows, vocab)

    def eager(logits: Tensor) -> Tensor:
        wide = logits.float()
        if softcap is not None:
            wide = softcap * torch.tanh(wide / softcap)
        return F.cross_entropy(wide, targets)

    def liger_cross_entropy(logits: Tensor) -> Tensor:
        return liger.liger_cross_entropy(logits, targets, softcap=softcap)

    one_pass = rows * vocab * random.dtype.itemsize
    return Case(
        lambda: [random.normal(rows, vocab)],
        {
            "eager": eager,
            "torch.compile": _compiled(eager),
            "liger (copying)": lambda logits: liger_cross_entropy(logits.clone()),
            # Gradients overwrite the logits: leaves of its own.
            "liger (in place)": Implementation(
                liger_cross_entropy, lambda: [random.normal(rows, vocab)]
            ),
            "ligermodels": lambda logits: kernels.cross_entropy(logits, targets, softcap=softcap)[
                0
            ],
        },
        # Forward reads the logits; backward reads them again and writes their gradient.
        (one_pass, 3 * one_pass),
    )


def cross_entropy_softcap(random: Random, rows: int, vocab: int) -> Case:
    """With Gemma 2's cap."""
    return cross_entropy(random, rows, vocab, softcap=30.0)


def _torch_linear_cross_entropy(
    hidden: Tensor, weight: Tensor, targets: Tensor, reduction: str = "mean"
) -> Tensor:
    if not hasattr(F, "linear_cross_entropy"):
        raise Absent(f"torch {torch.__version__} has no F.linear_cross_entropy")
    options = torch.nn.LinearCrossEntropyOptions()
    return F.linear_cross_entropy(hidden, weight, targets, reduction=reduction, options=options)


def _head_inputs(random: Random, rows: int, width: int, vocab: int) -> list[Tensor]:
    # Logits of a standard deviation near 1, as at the start of training.
    return [random.normal(rows, width), random.normal(vocab, width, scale=width**-0.5)]


def _linear_cross_entropy(random: Random, targets: Tensor, width: int, vocab: int) -> Case:
    rows = targets.numel()

    def eager(hidden: Tensor, weight: Tensor) -> Tensor:
        return F.cross_entropy(F.linear(hidden, weight).float(), targets)

    def liger_head(hidden: Tensor, weight: Tensor, **options: Any) -> Tensor:
        return liger.liger_fused_linear_cross_entropy(hidden, weight, targets, **options)

    def cce_head(hidden: Tensor, weight: Tensor, **options: Any) -> Tensor:
        return cce.linear_cross_entropy(hidden, weight, targets, impl="cce", **options)

    return Case(
        lambda: _head_inputs(random, rows, width, vocab),
        {
            "eager": eager,
            "torch.compile": _compiled(eager),
            "torch linear_cross_entropy": lambda h, w: _torch_linear_cross_entropy(h, w, targets),
            "liger (bf16 sum)": liger_head,
            "liger (float32 sum)": lambda h, w: liger_head(h, w, accum_dtype=torch.float32),
            # By default it leaves out gradients below bf16's precision, tile by tile.
            "cce (filtered)": cce_head,
            "cce (exact)": lambda h, w: cce_head(h, w, filter_eps=None),
            "ligermodels": lambda h, w: kernels.linear_cross_entropy(h, w, targets)[0],
        },
        products=(rows, width, vocab),
    )


def linear_cross_entropy(random: Random, rows: int, width: int, vocab: int) -> Case:
    return _linear_cross_entropy(random, random.targets(rows, vocab), width, vocab)


def linear_cross_entropy_ignored(
    random: Random, rows: int, width: int, vocab: int, ignored: float
) -> Case:
    """Some targets ignored, and their rows left out where that is asked for."""
    targets = random.targets(rows, vocab, ignored)
    valid = int((targets != -100).sum())
    case = _linear_cross_entropy(random, targets, width, vocab)
    names = ("eager", "torch.compile", "liger (float32 sum)", "cce (filtered)", "ligermodels")
    case.implementations = {name: case.implementations[name] for name in names} | {
        "ligermodels (skip_ignored)": lambda h, w: kernels.linear_cross_entropy(
            h, w, targets, skip_ignored=True, num_valid=valid
        )[0]
    }
    case.products = (valid, width, vocab)
    return case


def linear_cross_entropy_budget(
    random: Random, rows: int, width: int, vocab: int, max_scratch_bytes: int | None
) -> Case:
    """Ours with a budget for scratch; None is the default."""
    targets = random.targets(rows, vocab)
    case = _linear_cross_entropy(random, targets, width, vocab)
    case.implementations = {
        "ligermodels": lambda h, w: kernels.linear_cross_entropy(
            h, w, targets, max_scratch_bytes=max_scratch_bytes
        )[0]
    }
    return case


def linear_log_probs(random: Random, rows: int, width: int, vocab: int, entropy: bool) -> Case:
    targets = random.targets(rows, vocab)

    def eager(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        logp = F.linear(hidden, weight).float().log_softmax(-1)
        chosen = logp.gather(-1, targets[:, None]).squeeze(-1)
        return (chosen, -(logp.exp() * logp).sum(-1)) if entropy else (chosen,)

    def ours(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        outputs = kernels.linear_log_probs(hidden, weight, targets, entropy=entropy)
        return tuple(output for output in outputs if output is not None)

    # The loss of a token is its log-probability, negated.
    def liger_scaled(hidden: Tensor, weight: Tensor) -> tuple[Tensor, ...]:
        function = liger_ops.LigerFusedLinearScaledCrossEntropyFunction
        # Positional: temperature, ignore_index, m_tiles_per_cluster, return_entropy.
        outputs = function.apply(hidden, weight, targets, 1.0, -100, 1, entropy)
        return (-outputs[0], outputs[1]) if entropy else (-outputs,)

    def torch_head(hidden: Tensor, weight: Tensor) -> Tensor:
        return -_torch_linear_cross_entropy(hidden, weight, targets, "none")

    def cce_head(hidden: Tensor, weight: Tensor, **options: Any) -> Tensor:
        return -cce.linear_cross_entropy(
            hidden, weight, targets, impl="cce", reduction="none", **options
        )

    case = Case(
        lambda: _head_inputs(random, rows, width, vocab),
        {
            "eager": eager,
            "torch.compile": _compiled(eager),
            "liger": liger_scaled,
            "ligermodels": ours,
        },
        products=(rows, width, vocab),
        logits_products=2,
    )
    if not entropy:  # these give the loss alone
        case.implementations |= {
            "torch linear_cross_entropy": torch_head,
            "cce (filtered)": cce_head,
            "cce (exact)": lambda h, w: cce_head(h, w, filter_eps=None),
        }
    return case


@dataclasses.dataclass
class Op:
    """How to build an op, and at which sizes to measure it.

    host: one small size, where the device is never what is waited for; None to leave it out.
    table: the sizes of the table. sweep: those of the plots, on top.
    """

    build: Callable[..., Case]
    host: dict[str, Any] | None
    table: list[dict[str, Any]]
    sweep: list[dict[str, Any]]


def _sizes(names: str, *values: tuple[Any, ...]) -> list[dict[str, Any]]:
    return [dict(zip(names.split(), value, strict=True)) for value in values]


def _norm(build: Callable[..., Case], table: list[int], rows: list[int]) -> Op:
    widths = [width for width in (576, 2048, 4096, 8192, 16384) if width not in table]
    return Op(
        build,
        {"rows": 16, "width": 1024},
        _sizes("rows width", *((16384, width) for width in table)),
        _sizes("rows width", *((16384, w) for w in widths), *((n, 4096) for n in rows)),
    )


_HEADS = "batch seq heads kv_heads head_dim"
_HEAD = "rows width vocab"
MIB = 2**20

OPS = {
    "rms_norm": _norm(rms_norm, [2048, 4096, 8192], [1, 256, 131072]),
    "add_rms_norm": _norm(add_rms_norm, [4096], []),
    "layer_norm": _norm(layer_norm, [4096], []),
    "add_layer_norm": Op(
        add_layer_norm, {"rows": 16, "width": 1024}, _sizes("rows width", (16384, 4096)), []
    ),
    "swiglu": Op(
        swiglu,
        {"rows": 16, "width": 1024},
        _sizes("rows width", (8192, 14336)),
        _sizes("rows width", (512, 14336), (2048, 14336), (32768, 14336)),
    ),
    "geglu": Op(
        geglu,
        {"rows": 16, "width": 1024},
        _sizes("rows width", (8192, 9216)),
        _sizes("rows width", (512, 9216), (2048, 9216), (32768, 9216)),
    ),
    "rope": Op(
        rope,
        dict(zip(_HEADS.split(), (1, 16, 8, 2, 64))),
        _sizes(_HEADS, (2, 8192, 32, 8, 128)),
        _sizes(_HEADS, *((2, seq, 32, 8, 128) for seq in (512, 2048, 32768))),
    ),
    "qk_norm_rope": Op(
        qk_norm_rope,
        dict(zip(_HEADS.split(), (1, 16, 8, 2, 64))),
        _sizes(_HEADS, (2, 8192, 32, 8, 128), (1, 8192, 8, 4, 256)),
        _sizes(_HEADS, *((2, seq, 32, 8, 128) for seq in (512, 2048, 32768))),
    ),
    "cross_entropy": Op(
        cross_entropy,
        {"rows": 16, "vocab": 1024},
        _sizes("rows vocab", (8192, 128256)),
        _sizes(
            "rows vocab",
            *((8192, vocab) for vocab in (32000, 151936, 262208)),
            *((rows, 128256) for rows in (1024, 4096, 32768)),
        ),
    ),
    "cross_entropy_softcap": Op(
        cross_entropy_softcap, None, _sizes("rows vocab", (8192, 128256)), []
    ),
    "linear_cross_entropy": Op(
        linear_cross_entropy,
        {"rows": 16, "width": 256, "vocab": 1024},
        _sizes(
            _HEAD,
            (8192, 4096, 128256),
            (32768, 4096, 128256),
            (8192, 2304, 256000),
            (16384, 2048, 128256),
        ),
        _sizes(
            _HEAD,
            *((8192, 2048, vocab) for vocab in (32000, 128256, 262208)),
            *((rows, 2048, 128256) for rows in (1024, 4096)),
        ),
    ),
    "linear_cross_entropy_ignored": Op(
        linear_cross_entropy_ignored,
        None,
        [],
        _sizes(
            _HEAD + " ignored", *((8192, 4096, 128256, share) for share in (0.0, 0.5, 0.8, 0.9))
        ),
    ),
    "linear_cross_entropy_budget": Op(
        linear_cross_entropy_budget,
        None,
        [],
        _sizes(
            _HEAD + " max_scratch_bytes",
            *(
                (8192, 4096, 128256, budget)
                for budget in (32 * MIB, 128 * MIB, 512 * MIB, 2048 * MIB, None)
            ),
        ),
    ),
    "linear_log_probs": Op(
        linear_log_probs,
        {"rows": 16, "width": 256, "vocab": 1024, "entropy": False},
        _sizes(_HEAD + " entropy", (8192, 4096, 128256, False), (8192, 4096, 128256, True)),
        [],
    ),
}

"""The device that meta tensors stand for in a simulation: its attention, autocast and kernels."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor
from torch.nn.attention import SDPBackend
from torch.overrides import TorchFunctionMode

from ligermodels.layers import attention_backend
from ligermodels.layers.attention_backend import causal_suffix
from ligermodels.layers.attention_mask import AttentionMask
from ligermodels.memory.rates import (
    BACKWARD,
    AttentionKind,
    attention_kind,
    attention_pairs,
)
from ligermodels.memory.torch_private import Flex, sdpa_backend
from ligermodels.memory.tracker import Tracker

_aten = torch.ops.aten
# The kernels of scaled_dot_product_attention, and their arguments after q, k and v.
_KERNELS: dict[SDPBackend, tuple[Any, tuple[Any, ...]]] = {
    SDPBackend.CUDNN_ATTENTION: (_aten._scaled_dot_product_cudnn_attention, (None, True)),
    SDPBackend.FLASH_ATTENTION: (_aten._scaled_dot_product_flash_attention, ()),
    SDPBackend.EFFICIENT_ATTENTION: (_aten._scaled_dot_product_efficient_attention, (None, True)),
}
_CAST = torch.float32, torch.float16, torch.bfloat16  # what autocast casts
_H100_SMS = 132  # multiprocessors of an H100 and an H200


class SimulatedDevice:
    """The device that meta tensors stand for; see `kernels.dispatch.Simulator`."""

    def __init__(
        self, device: torch.device, autocast: torch.dtype | None, tracker: Tracker
    ) -> None:
        self.device, self.autocast, self.tracker = device, autocast, tracker
        here = device.type == "cuda" and torch.cuda.is_available()
        properties = torch.cuda.get_device_properties(device) if here else None
        self.num_sms = _H100_SMS if properties is None else properties.multi_processor_count

    @contextmanager
    def without_autocast(self) -> Iterator[None]:
        before, self.autocast = self.autocast, None
        try:
            yield
        finally:
            self.autocast = before

    def copied(self, to_host: bool, size: int) -> None:
        if to_host:
            self.tracker.work.to_host_bytes += size
        else:
            self.tracker.work.from_host_bytes += size

    def attend(
        self,
        backend: str,
        q: Tensor,
        k: Tensor,
        v: Tensor,
        *,
        mask: AttentionMask,
        scale: float,
        window: int | None,
        softcap: float | None,
        causal: bool,
    ) -> Tensor:
        batch, heads, queries, head_dim = q.shape
        length = mask.max_seqlen if backend == "varlen" and mask.max_seqlen else queries
        pairs = batch * heads * (queries / length) * attention_pairs(length, window, causal)
        if mask.is_part and causal:
            pairs = batch * heads * queries * min(window or mask.keys, mask.past + queries / 2)
        elif k.shape[2] != queries:  # keys of another sequence, which all queries see
            pairs = batch * heads * queries * k.shape[2]
        kind = attention_kind(backend, q, k, length, window, softcap, causal)
        q = _Count.apply(q, self.tracker, kind, int(4 * pairs * head_dim))
        if backend == "suffix":
            return causal_suffix(q, k, v, scale)
        if backend == "varlen":
            return attention_backend._varlen(q, k, v, mask, scale, window, causal)
        if backend == "flex":
            if not mask.hides_nothing(window, causal=causal):
                self.block_mask(mask, window, batch, causal)
            return Flex.apply(q, k, v)
        visible = None
        if backend == "dense" and not mask.hides_nothing(window, causal=causal):
            visible = mask.dense(window, q.device, causal=causal)
        if softcap is not None:
            with self.without_autocast():
                return attention_backend._capped(q, k, v, visible, scale, softcap)
        if self.autocast is not None:
            q, k, v = (x.to(self.autocast) for x in (q, k, v))
        return self._sdpa(q, k, v, visible, scale, causal)

    def _sdpa(
        self, q: Tensor, k: Tensor, v: Tensor, visible: Tensor | None, scale: float, causal: bool
    ) -> Tensor:
        heads, queries, head_dim = q.shape[1:]
        causal = causal and visible is None and queries > 1
        if self.device.type == "cpu":
            if visible is not None:
                # As PyTorch turns a bool mask into numbers to add.
                hidden = torch.scalar_tensor(-torch.inf, dtype=q.dtype, device=q.device)
                shown = torch.scalar_tensor(0.0, dtype=q.dtype, device=q.device)
                visible = torch.where(visible, shown, hidden)
            return _aten._scaled_dot_product_flash_attention_for_cpu(
                q, k, v, 0.0, causal, attn_mask=visible, scale=scale
            )[0]
        if visible is None:
            k, v = attention_backend.heads_for_sdpa(q, k, v)
            backend = sdpa_backend(heads, k.shape[1], head_dim, q.dtype)
            if backend in _KERNELS:
                kernel, options = _KERNELS[backend]
                return kernel(q, k, v, *options, 0.0, causal, scale=scale)[0]
        return F.scaled_dot_product_attention(
            q, k, v, visible, is_causal=causal, scale=scale, enable_gqa=True
        )

    def block_mask(self, mask: AttentionMask, window: int | None, batch: int, causal: bool) -> None:
        """Hold the index tensors of FlexAttention's block mask as long as the mask lives.

        FlexAttention keeps, for partial and for full blocks, from queries to keys and back, the
        number of blocks of each row and their order, in int32. To sort them takes int64 numbers.
        """
        if (window, causal) in mask._block_masks:
            return
        given = (mask.document_ids, mask.padding_mask, mask.prefix_lengths)
        rows = 1 if all(x is None for x in given) else batch
        shape = rows, 1, -(-mask.queries // 128), -(-mask.keys // 128)
        index = [torch.empty(shape, dtype=torch.int32, device="meta") for _ in range(4)]
        counts = [torch.empty(shape[:3], dtype=torch.int32, device="meta") for _ in range(4)]
        dense = torch.empty(shape, dtype=torch.int32, device="meta")
        torch.empty((2, *shape), dtype=torch.int64, device="meta")
        del dense
        mask._block_masks[window, causal] = None, (index, counts)  # type: ignore[assignment]


class _Count(torch.autograd.Function):
    """Return q, and count attention's work in each pass."""

    @staticmethod
    def forward(ctx: Any, q: Tensor, tracker: Tracker, kind: AttentionKind, flops: int) -> Tensor:
        tracker.work.attention[kind, "forward"] += flops
        ctx.tracker, ctx.kind, ctx.flops = tracker, kind, int(BACKWARD * flops)
        return q.view_as(q)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        ctx.tracker.work.attention[ctx.kind, "backward"] += ctx.flops
        return grad, None, None, None


class Autocast(TorchFunctionMode):
    """Casts the operands of plain PyTorch's products as autocast does on the simulated device."""

    def __init__(self, simulator: SimulatedDevice) -> None:
        super().__init__()
        self.simulator = simulator
        self.casts: dict[int, Tensor] = {}  # of leaves, as long as forward lasts
        self.keeps = True
        self.products = {F.linear, torch.matmul, torch.mm, torch.bmm, torch.addmm}
        self.products |= {Tensor.matmul, Tensor.mm, Tensor.bmm, Tensor.__matmul__}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if self.simulator.autocast is not None and func in self.products:
            args = tuple(map(self._cast, args))
            kwargs = {key: self._cast(x) for key, x in (kwargs or {}).items()}
        return func(*args, **(kwargs or {}))

    def end_forward(self) -> None:
        self.keeps = False
        self.casts.clear()

    def _cast(self, x: Any) -> Any:
        dtype = self.simulator.autocast
        if not isinstance(x, Tensor) or x.dtype not in _CAST:
            return x
        if not (self.keeps and x.is_leaf and x.requires_grad and x.dtype == torch.float32):
            return x.to(dtype)
        if id(x) not in self.casts:
            self.casts[id(x)] = x.to(dtype)
        return self.casts[id(x)]


@contextmanager
def no_launches(tracker: Tracker) -> Iterator[None]:
    """Count a launch of a Triton kernel with meta tensors instead of launching it."""
    from ligermodels.kernels.triton import glu

    kernel_class: Any = type(glu.glu_forward_kernel)  # another one in Triton's interpreter
    run = kernel_class.run

    def counted(kernel: Any, *args: Any, **options: Any) -> Any:
        if any(isinstance(x, Tensor) and x.is_meta for x in args):
            return tracker.launched(args)
        return run(kernel, *args, **options)

    kernel_class.run = counted
    try:
        yield
    finally:
        kernel_class.run = run

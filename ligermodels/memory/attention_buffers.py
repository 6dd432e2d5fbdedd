"""Which attention kernel PyTorch takes on a GPU, and the buffers that it allocates by itself.

A kernel's outputs and gradients are tensors that a simulation sees. Its scratch is not: the table
`SCRATCH` gives its bytes, for the arguments of the operator.
"""

from collections.abc import Callable
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention import SDPBackend

FLOAT = 4  # bytes of a float32
LONG = 8  # bytes of an int64
_aten = torch.ops.aten


def _up(length: int, block: int) -> int:
    return -(-length // block) * block


def _flash_backward(grad: Tensor, q: Tensor, k: Tensor, *_: Any) -> int:
    """FlashAttention 2, mha_bwd: float32 sums of dq, one number per row, dk and dv of all heads."""
    batch, heads, queries, head_dim = q.shape
    rows = batch * heads * _up(queries, 128)
    scratch = rows * (_up(head_dim, 32) + 1) * FLOAT
    return scratch + _expanded(batch * k.shape[2], heads, k.shape[1], head_dim, k.itemsize)


def _varlen_backward(grad: Tensor, q: Tensor, k: Tensor, *arguments: Any) -> int:
    """FlashAttention 2, mha_varlen_bwd: as above, with up to 128 rows more per document."""
    total, heads, head_dim = q.shape
    documents = next(x for x in arguments if isinstance(x, Tensor) and x.dtype == torch.int32)
    rows = heads * (total + 128 * (len(documents) - 1))
    scratch = rows * (_up(head_dim, 32) + 1) * FLOAT
    return scratch + _expanded(len(k), heads, k.shape[1], head_dim, k.itemsize)


def _expanded(keys: int, heads: int, kv_heads: int, head_dim: int, size: int) -> int:
    """Return the bytes of the gradients of k and v for each query head, before they are summed."""
    return 0 if heads == kv_heads else 2 * keys * heads * head_dim * size


def _cudnn_backward(grad: Tensor, q: Tensor, k: Tensor, *_: Any) -> int:
    """cudnn-frontend, the backward node of SDPA: float32 sums of dq, one number per row, and the
    gradients of k and v for each query head."""
    batch, heads, queries, head_dim = q.shape
    scratch = batch * heads * queries * (head_dim + 1) * FLOAT
    return scratch + _expanded(batch * k.shape[2], heads, k.shape[1], head_dim, k.itemsize)


def _efficient_backward(grad: Tensor, q: Tensor, *_: Any) -> int:
    """attention_backward.cu: the product of the output and its gradient, and its sums."""
    return q.numel() * FLOAT + q.numel() // q.shape[-1] * 2 * FLOAT


def _embedding_backward(grad: Tensor, ids: Tensor, *_: Any) -> int:
    """Embedding.cu and EmbeddingBackwardKernel.cu: the ids are sorted, which takes nine arrays, and
    each row of the gradient is copied to float32. Few ids are added without a sort."""
    tokens = ids.numel()
    if tokens <= 3072:
        return 0
    wide = max(grad.itemsize, FLOAT)
    return 9 * tokens * LONG + grad.numel() * wide


# The bytes that an operator allocates and frees by itself.
SCRATCH: dict[Any, Callable[..., int]] = {
    _aten._scaled_dot_product_flash_attention_backward.default: _flash_backward,
    _aten._scaled_dot_product_cudnn_attention_backward.default: _cudnn_backward,
    _aten._scaled_dot_product_efficient_attention_backward.default: _efficient_backward,
    _aten.embedding_dense_backward.default: _embedding_backward,
}


def scratch(operator: Any, arguments: tuple[Any, ...]) -> int:
    """Return the bytes that an operator allocates and frees by itself on a GPU."""
    if operator in SCRATCH:
        return SCRATCH[operator](*arguments)
    # PyTorch registers this one when its module is first imported.
    if operator.name() == "torch_attn::_varlen_attn_backward":
        return _varlen_backward(*arguments)
    return 0


def cublas_workspaces() -> tuple[int, int]:
    """Return the bytes that cuBLAS keeps for the threads of forward and of backward.

    Source: CublasHandlePool.cpp; Hopper takes 32 MiB and other GPUs 8.125 MiB.
    """
    hopper = not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] == 9
    size = 32 * 2**20 if hopper else 8519680
    return size, size


@cache
def sdpa_backend(heads: int, kv_heads: int, head_dim: int, dtype: torch.dtype) -> SDPBackend:
    """Return the kernel of scaled_dot_product_attention for a causal mask.

    This asks PyTorch with small tensors. Without a GPU, it returns what PyTorch takes on an H100.
    """
    if torch.cuda.is_available():
        packed = torch.empty(1, 128, heads + 2 * kv_heads, head_dim, dtype=dtype, device="cuda")
        parts = packed.requires_grad_().split((heads, kv_heads, kv_heads), 2)
        q, k, v = (x.transpose(1, 2) for x in parts)
        return SDPBackend(torch._fused_sdp_choice(q, k, v, is_causal=True, enable_gqa=True))
    if dtype in (torch.float16, torch.bfloat16) and head_dim <= 256:
        small = head_dim <= 128 and head_dim % 8 == 0
        return SDPBackend.CUDNN_ATTENTION if small else SDPBackend.FLASH_ATTENTION
    if heads == kv_heads and head_dim % 4 == 0:
        return SDPBackend.EFFICIENT_ATTENTION
    return SDPBackend.MATH

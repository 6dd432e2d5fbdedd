"""Draw the pictures of docs/concepts.md from the code: `python docs/site/drawings.py`.

`block.svg` shows the fused ops of a Llama block, and what each keeps for backward: both are read
from the graph that autograd records for a small block with the proportions of Llama-3-8B.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from ligermodels import LigerLlama, LlamaConfig
from ligermodels.layers import AttentionContext
from ligermodels.pictures import INK, ORDER, OURS

HERE = Path(__file__).parent
HIDDEN, TOKENS = 512, 16
BOX, KEPT = "none", ORDER[1]
# A node of the graph, and whether it has rope's angles -> what it computes.
OPS = {
    ("_NormLinearBackward", True): (
        "add + RMSNorm + q, k, v + RoPE",
        "a fused op",
    ),
    ("ScaledDotProduct", False): ("attention", "PyTorch's kernel"),
    ("MmBackward0", False): ("output projection", "a product"),
    ("_NormLinearBackward", False): ("add + RMSNorm + gate, up", "a fused op"),
    ("_GLULinearBackward", False): ("SwiGLU + down projection", "a fused op"),
}


def block_ops() -> Iterator[tuple[str, str, float]]:
    """Yield the name, the kernels and the kept values per token, in hidden sizes, of each op."""
    config = LlamaConfig(
        vocab_size=100,
        hidden_size=HIDDEN,
        intermediate_size=7 * HIDDEN // 2,
        num_hidden_layers=1,
        num_attention_heads=8,
        num_key_value_heads=2,
    )
    model = LigerLlama(config)
    context = AttentionContext(*model.rotary_emb(torch.arange(TOKENS)[None]))
    inputs = [torch.randn(1, TOKENS, HIDDEN, requires_grad=True) for _ in range(2)]
    out, _ = model.layers[0](*inputs, context)
    parameters = {parameter.data_ptr() for parameter in model.parameters()}
    counted: set[int] = set()
    found = []
    for node in in_order(out.grad_fn, set()):
        saved = [t for t in saved_tensors(node) if t.data_ptr() not in parameters]
        rope = any(t.shape[-1] == config.head_dim // 2 for t in saved)
        for (name, with_rope), (title, kernels) in OPS.items():
            if node.name().startswith(name) and rope == with_rope:
                found.append((title, kernels, node))
    for title, kernels, node in found:
        kept = 0
        for tensor in saved_tensors(node):
            if tensor.data_ptr() in parameters | counted or tensor.dim() < 3:
                continue
            if tensor.shape[-1] == config.head_dim // 2:  # angles, which all layers share
                continue
            counted.add(tensor.data_ptr())
            kept += tensor.numel()
        yield title, kernels, kept / TOKENS / HIDDEN


def in_order(node: Any, seen: set[Any]) -> Iterator[Any]:
    """Yield the nodes of a graph, the first op of forward first."""
    if node is not None and node not in seen:
        seen.add(node)
        for earlier, _ in node.next_functions:
            yield from in_order(earlier, seen)
        yield node


def saved_tensors(node: Any) -> list[torch.Tensor]:
    """Return what a node of the graph keeps."""
    if hasattr(node, "saved_tensors"):
        return [tensor for tensor in node.saved_tensors if tensor is not None]
    names = [name for name in dir(node) if name.startswith("_saved_")]
    kept = [getattr(node, name) for name in names]
    return [value for value in kept if isinstance(value, torch.Tensor)]


def text(x: float, y: float, words: str, size: int = 13, anchor: str = "start") -> str:
    """Return a line of text."""
    place = f'x="{x:.0f}" y="{y}" font-size="{size}" text-anchor="{anchor}"'
    return f'<text {place} fill="{INK}">{words}</text>'


def box(x: float, y: float, width: float, height: float, fill: str = BOX) -> str:
    """Return a rectangle: a frame, or a filled one."""
    place = f'x="{x:.0f}" y="{y}" width="{width:.0f}" height="{height}"'
    frame = f'rx="6" stroke="{OURS}" stroke-width="2"' if fill == BOX else 'rx="0"'
    return f'<rect {place} {frame} fill="{fill}"/>'


def line(path: str) -> str:
    """Return a thin line along a path."""
    return f'<path d="{path}" stroke="{INK}" stroke-width="1.5" fill="none"/>'


def picture(width: int, height: int, parts: list[str]) -> str:
    """Return an SVG file without paper, in colours for light and for dark pages."""
    head = f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {width} {height}"'
    return f'{head} font-family="sans-serif">{"".join(parts)}</svg>\n'


def draw_block() -> str:
    """Draw the ops of a block from top to bottom, each with a bar of what it keeps."""
    ops = list(block_ops())
    unit = 240 / max(kept for _, _, kept in ops)
    caption = "kept for backward, in hidden sizes per token"
    parts, y = [text(20, 28, "x, residual"), text(360, 28, caption)], 44
    for title, kernels, kept in ops:
        parts += [box(20, y, 310, 46), text(32, y + 20, title, 14), text(32, y + 38, kernels, 11)]
        parts.append(box(360, y + 12, kept * unit, 22, KEPT))
        parts.append(text(366 + kept * unit, y + 28, f"{kept:.3g}" if kept else "nothing"))
        parts.append(line(f"M175 {y + 46} v14"))
        y += 60
    total = sum(kept for _, _, kept in ops)
    parts.append(text(20, y + 16, "x, residual: the next block adds them"))
    parts.append(text(360, y + 16, f"together {total:.3g}", 14))
    return picture(680, y + 34, parts)


def draw_head() -> str:
    """Draw how hidden states become a loss, part by part."""
    parts = []
    for x, words, small in (
        (20, "model", "hidden states (batch, seq, hidden)"),
        (250, "loss head", "a chunk of tokens at a time"),
        (480, "loss", "one number, and token statistics"),
    ):
        parts += [box(x, 30, 190, 54), text(x + 95, 54, words, 15, "middle")]
        parts.append(text(x + 95, 74, small, 11, "middle"))
    parts += [line(f"M{x} 57 h38 m-6 -5 l6 5 l-6 5") for x in (211, 441)]
    parts += [box(262 + 44 * i, 100, 34, 20, KEPT if i == 1 else BOX) for i in range(4)]
    words = "the logits of one chunk exist at a time, in forward and in backward"
    parts.append(text(345, 138, words, 11, "middle"))
    return picture(690, 150, parts)


if __name__ == "__main__":
    (HERE / "block.svg").write_text(draw_block(), encoding="utf-8")
    (HERE / "head.svg").write_text(draw_head(), encoding="utf-8")

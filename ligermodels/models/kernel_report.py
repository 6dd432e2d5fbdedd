"""The report of `model.kernels()`: which implementation each op will use, and why."""

import shutil
import textwrap
from collections.abc import Iterator

import torch
from torch import Tensor, nn

from ligermodels import float8
from ligermodels.kernels import dispatch
from ligermodels.kernels.dispatch import autocast_dtype
from ligermodels.layers import (
    Attention,
    AttentionMask,
    Experts,
    GatedDeltaNet,
    GatedMLP,
    LayerNorm,
    LossHead,
    RMSNorm,
)
from ligermodels.layers.attention_backend import choose_backend
from ligermodels.layers.fusion import (
    has_plain_call,
    is_plain,
    is_sharded,
    pre_norm_names,
    products_of,
)

_OPS = {
    RMSNorm: ("rms_norm", "add_rms_norm"),
    LayerNorm: ("layer_norm", "add_layer_norm"),
    Attention: ("rope",),
    GatedMLP: ("glu",),
    Experts: ("routing", "expert_mlp"),
    GatedDeltaNet: ("gated_delta_inputs", "gated_delta"),
}
_ATTENTION = {
    "sdpa": "scaled_dot_product_attention",
    "raw": "the kernel of scaled_dot_product_attention with its log-sum-exp",
    "varlen": "varlen_attn",
    "wide": "wide_attention",
    "flex": "flex_attention",
    "dense": "scaled_dot_product_attention with a dense mask",
}

_FORMULA = "the formula with a dense mask"


class KernelReport(dict[str, str]):
    """{op: "implementation (reason)"}, which `print` shows as a table."""

    def __str__(self) -> str:
        """Return a line for each op, and more where the text is longer than the terminal."""
        width = max(map(len, self), default=0) + 2
        columns = max(shutil.get_terminal_size().columns, width + 34)
        lines = []
        for op, text in self.items():
            lines += textwrap.wrap(
                text, columns, initial_indent=f"{op:<{width}}", subsequent_indent=" " * width
            )
        return "\n".join(lines)


def kernels_of(model: nn.Module, weight: Tensor, head: nn.Module) -> KernelReport:
    """Return {op: "implementation (reason)"} for the model in its present state.

    Args: weight: a parameter whose device and dtype are those of the ops' inputs; head: the head.
    """
    name, reason = dispatch.choose(weight.device, weight.dtype)
    here = f"{name} ({reason})"
    report = KernelReport(dict.fromkeys(_ops(model), here))
    report.update(_attention(model, weight))
    replaced, unknown = list(_replaced_modules(model)), ", ".join(_unknown_types(model))
    fused = "fused"
    if replaced:
        fused += f", except that these replaced modules are called: {', '.join(replaced[:10])}"
        fused += f" and {len(replaced) - 10} more" if len(replaced) > 10 else ""
    if unknown:
        fused += f"; unknown in {unknown}"
        report["modules from outside"] = f"unknown (the code of {unknown} decides)"
    report["norm + linear, linear + rope, glu + linear"] = fused
    if (linears := float8.report(model)) is not None:
        report["linear"] = linears
    if isinstance(head, LossHead):
        report["linear_cross_entropy"] = report["linear_log_probs"] = (
            f"chunked {here}"
            if head.is_linear
            else "the replaced head.proj is called chunk by chunk"
        )
        obstacle = decoding_obstacle(model)
        report["decoding"] = (
            "CUDA graph of a step with its sampling; a logits_processor runs outside of it"
            if obstacle is None
            else f"eager ({obstacle})"
        )
    return report


def decoding_obstacle(model: nn.Module, captures: bool = True) -> str | None:
    """Return why a CUDA graph cannot hold a step of decoding, or None if it can.

    A graph launches kernels alone, so what else a step would run must be known.

    Args: captures: False asks only whether a step may leave out the model's forward.
    """
    weights = [*model.parameters(), *model.buffers()]
    devices = {weight.device for weight in weights}
    if len(devices) != 1:
        return f"the weights are on {len(devices)} devices"
    if captures and dispatch.choose(weights[0].device, weights[0].dtype)[0] != "triton":
        return dispatch.choose(weights[0].device, weights[0].dtype)[1]
    if any(map(is_sharded, weights)) or getattr(model, "layout", None) is not None:
        return "the weights are spread over ranks"
    for name, module in model.named_modules():
        if not has_plain_call(module, type(module)):
            return f"{name or 'the model'} has hooks or another forward"
        if module._compiled_call_impl is not None:
            return f"{name or 'the model'} is compiled"
        if captures and isinstance(module, float8.Float8Linear) and module.keeps_casts:
            return "float8.weights_cast_once keeps casts that a graph would outlive"
    if unknown := _unknown_types(model):
        return f"the code of {', '.join(unknown)} is unknown"
    return None


def _ops(model: nn.Module) -> Iterator[str]:
    """Yield the names of the ops that the model's layers and head use."""
    modules = [*model.modules()]
    for cls, ops in _OPS.items():
        if any(isinstance(m, cls) for m in modules):
            yield from ops
    if any(isinstance(m, Attention) and m.fuses_head_norms for m in modules):
        yield "qk_norm_rope"
    yield "cross_entropy"


def _attention(model: nn.Module, weight: Tensor) -> dict[str, str]:
    """Return, for each kind of attention layer, the backends used to train on long rows.

    There is one backend for each of: plain rows, packed rows (by position_ids or by cu_seqlens),
    and rows with padding.
    """
    device, dtype = weight.device, autocast_dtype(weight) or weight.dtype
    report = {}
    for module in model.modules():
        if not isinstance(module, Attention):
            continue
        length = 1024 + 2 * (module.sliding_window or 0)
        documents = torch.zeros(1, length, dtype=torch.int64, device="meta")
        masks = {
            "": AttentionMask(length),
            "documents inferred from position_ids: ": AttentionMask(length, document_ids=documents),
            "documents given by cu_seqlens and max_seqlen: ": AttentionMask(
                length, document_ids=documents, max_seqlen=length
            ),
            "padding: ": AttentionMask(length, padding_mask=documents, padding_at_ends=True),
        }
        key = "attention" if module.causal else "attention in both directions"
        key += "" if module.sliding_window is None else f", window {module.sliding_window}"
        key += "" if module.softcap is None else f", soft cap {module.softcap:g}"
        key += "" if module.sinks is None else ", sinks"
        with torch.enable_grad():
            taken = {
                how: choose_backend(
                    mask,
                    module.sliding_window,
                    module.softcap,
                    device,
                    dtype,
                    module.head_dim,
                    1,
                    module.causal,
                    module.sinks is not None,
                )
                for how, mask in masks.items()
            }
        names = dict(_ATTENTION)
        if module.sinks is not None:
            names["dense"] = _FORMULA
        if module.softcap is not None and "dense" in taken.values():
            report[key] = _FORMULA
        else:
            report[key] = "; ".join(how + names[name] for how, name in taken.items())
    return report


def _unknown_types(model: nn.Module) -> list[str]:
    """Return the classes of the model's modules that are neither PyTorch's nor this package's."""
    types = {type(module): None for module in model.modules() if module is not model}
    return [cls.__name__ for cls in types if not _is_known(cls)]


def _is_known(cls: type) -> bool:
    return cls.__module__.partition(".")[0] in ("torch", "ligermodels")


def _replaced_modules(model: nn.Module) -> Iterator[str]:
    for name, module in model.named_modules():
        norms: tuple[str, ...] = ()
        linears = [*getattr(module, "hf_linears", ())]
        if isinstance(module, Attention):
            norms = ("q_norm", "k_norm")
        elif isinstance(module, GatedMLP):
            linears.append("down_proj")
        elif _is_known(type(module)) and hasattr(module, "input_layernorm"):
            norms = pre_norm_names(module)
        for child in (*linears, *norms):
            found, expected = getattr(module, child, None), RMSNorm if child in norms else nn.Linear
            if found is not None and not is_plain(found, expected) and products_of(found) is None:
                yield f"{name}.{child}"

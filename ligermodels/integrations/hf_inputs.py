"""The arguments, KV cache and hidden states of transformers' models, for native models."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.errors import short_repr
from ligermodels.layers.kv_cache import KVCache
from ligermodels.models.base import DecoderModel
from ligermodels.models.inputs import flattened_documents

# What tools pass to every model, and what needs no answer here.
_WITHOUT_EFFECT = {"cache_position", "return_dict", "logits_to_keep"}


@contextmanager
def layer_outputs(native: DecoderModel) -> Iterator[list[Tensor]]:
    """Collect the hidden states between the layers of one forward pass, as transformers does."""
    outputs: list[Tensor] = []

    def first(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        outputs.append(inputs[0])

    def following(layer: nn.Module, inputs: Any, output: tuple[Tensor, ...]) -> None:
        x, residual = output[:2]
        outputs.append(x if residual is None else x + residual)

    handles = [layer.register_forward_hook(following) for layer in native.layers]
    handles.append(native.layers[0].register_forward_pre_hook(first))
    try:
        yield outputs
    finally:
        for handle in handles:
            handle.remove()


@contextmanager
def first_layers(native: DecoderModel, count: int) -> Iterator[None]:
    """Leave out the layers after the first `count`."""
    skipped = [*native.layers][count:]
    before = [vars(layer).get("forward") for layer in skipped]
    for layer in skipped:
        layer.forward = _skip
    try:
        yield
    finally:
        for layer, forward in zip(skipped, before):
            if forward is None:
                del layer.forward
            else:
                layer.forward = forward


def _skip(x: Tensor, residual: Tensor | None, context: Any) -> tuple[Tensor, Tensor | None]:
    return x, residual


def _is_seen_to_hide_nothing(mask: Tensor) -> bool:
    """Return whether a mask (batch, keys) on a GPU is all ones, where its values can be looked at.

    Tools pass such masks with every batch, and causal attention is faster without one. The look
    waits for the GPU, as that of transformers' models does.
    """
    looks = mask.is_cuda and type(mask) is Tensor and not torch.compiler.is_compiling()
    return looks and not torch.cuda.is_current_stream_capturing() and bool(mask.all())


def native_inputs(
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    past_key_values: Any,
    others: dict[str, Any],
) -> dict[str, Any]:
    """Return the arguments of `DecoderModel.forward` for those of transformers' models.

    Raises:
        ValueError: an argument asks for something that the model does not compute.
    """
    cache = None if past_key_values is None else HFCache(past_key_values)
    if attention_mask is not None and attention_mask.dim() == 2:
        attention_mask = attention_mask.bool()  # PEFT's masks of virtual tokens are float
        if _is_seen_to_hide_nothing(attention_mask):
            attention_mask = None
    inputs: dict[str, Any] = {
        "input_ids": input_ids,
        "inputs_embeds": inputs_embeds,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "cache": cache,
    }
    others = {**others, "position_ids": position_ids}
    inputs |= flattened_documents(others)
    del others["position_ids"]
    unknown = {
        name: value
        for name, value in others.items()
        if name not in _WITHOUT_EFFECT and value is not None and value is not False
    }
    if unknown:
        name, value = next(iter(unknown.items()))
        raise ValueError(
            f"{name}={short_repr(value)}: the model cannot honour this argument; leave it out"
        )
    return inputs


class HFCache(KVCache):
    """A view of one of transformers' dynamic caches for one forward pass.

    Raises:
        ValueError: the cache has a fixed length.
    """

    def __init__(self, cache: Any) -> None:
        if getattr(cache, "is_compileable", False) or not hasattr(cache, "get_seq_length"):
            raise ValueError(
                f"past_key_values is a {type(cache).__name__}; only dynamic caches work: leave out "
                "cache_implementation, or use 'dynamic', 'offloaded' or 'quantized'"
            )
        self.cache = cache
        self.length, self.uses = cache.get_seq_length(), 1
        self._found: dict[int, tuple[int, torch.device]] = {}

    def update(self, layer_index: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k, v (batch, kv heads, new, head_dim); return all that the cache has kept.

        Raises:
            ValueError: a layer is updated twice in the pass.
        """
        if layer_index in self._found:
            raise ValueError(
                f"past_key_values: layer {layer_index} was updated twice in one pass, and "
                "transformers' caches have one place for it; generate with the model of this "
                "library, or with use_cache=False"
            )
        keys, values = self.cache.update(k, v, layer_index)
        self._found[layer_index] = keys.shape[2], keys.device
        return keys, values

    def key_positions(self, layer_index: int, new: int) -> Tensor | None:
        """Return the positions of the keys, or None if they are all tokens so far."""
        count, device = self._found[layer_index]
        end = self.length + new
        return None if count == end else torch.arange(end - count, end, device=device)

    def advance(self, tokens: int) -> None:
        """Do nothing: the cache counts its tokens itself."""

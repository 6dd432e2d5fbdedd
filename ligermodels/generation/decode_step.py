"""A step of decoding: one new token of each row, in a CUDA graph if possible.

Only the device knows where the tokens stand in the cache, so all steps are the same launches.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.generation.sampling import Sampler
from ligermodels.kernels.dispatch import autocast_is_on
from ligermodels.layers.kv_cache import KVCache
from ligermodels.models.base import DecoderModel, kept_for_generation
from ligermodels.models.kernel_report import decoding_obstacle


def can_decode(
    model: object, cache: KVCache | None, given: set[str], captures: bool = True
) -> bool:
    """Return whether a StepDecoder can compute the tokens after the prompts.

    Args:
        cache: it holds the prompts; None for a new one.
        given: the names of the model's inputs.
        captures: whether a CUDA graph is to hold the step.
    """
    return (
        isinstance(model, DecoderModel)
        and type(model).forward is DecoderModel.forward
        and (cache is None or type(cache) is KVCache)
        and not given - {"input_ids", "inputs_embeds", "prefix_lengths"}
        and decoding_obstacle(model, captures) is None
        and not autocast_is_on(model.embed_tokens.weight)
        and not (captures and torch.cuda.is_current_stream_capturing())
    )


class HostCopy:
    """Copies of tensors on their way to the host, so that later work may overwrite the tensors."""

    def __init__(self, *tensors: Tensor) -> None:
        # From a GPU they go to pinned memory, so the host does not wait here.
        self.copies = [x.to("cpu", non_blocking=True, copy=True) for x in tensors]
        self.event: torch.cuda.Event | None = None
        if tensors[0].is_cuda:
            self.event = torch.cuda.current_stream(tensors[0].device).record_event()

    def wait(self) -> list[Tensor]:
        """Return the copies as soon as they are there."""
        if self.event is not None:
            self.event.synchronize()
        return self.copies


# The types of attributes that change what a module launches.
_SETTINGS = (bool, int, float, str, type(None))


class Replayed:
    """Work on the device that is the same launches each time: a CUDA graph after the first time.

    The second call captures a graph, which the later ones launch. A change of the weights' values
    in place is seen.

    Args:
        device: where the work is.
        generator: the random generator that the work draws from, if it is not the default one.
        captures: whether to capture a graph on a GPU; otherwise each call launches the kernels.
    """

    def __init__(
        self, device: torch.device, generator: torch.Generator | None, captures: bool
    ) -> None:
        self.device, self.generator = device, generator
        self.captures = captures and device.type == "cuda"
        self.is_warm = False
        self.graph: torch.cuda.CUDAGraph | None = None
        self.made: Any

    def run(self) -> Any:
        """Launch the work, and return its result."""
        raise NotImplementedError

    def replay(self) -> Any:
        """Do the work, and return its result, which the next call may overwrite."""
        if self.captures and self.is_warm and self.graph is None:
            self.graph = self._captured()
        if self.graph is None:
            self.made = self.run()
        else:
            self.graph.replay()
        self.is_warm = True
        return self.made

    def _captured(self) -> torch.cuda.CUDAGraph:
        # torch.cuda.graph would also collect garbage and empty the allocator's cache, which takes
        # longer than many steps.
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.device)
        if self.generator is not None:
            graph.register_generator_state(self.generator)
        stream.wait_stream(torch.cuda.current_stream(self.device))
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self.made = self.run()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self.device).wait_stream(stream)
        return graph


class StepDecoder(Replayed):
    """Computes one new token of each row, from a cache that holds the others.

    Args:
        model: the model.
        cache: it holds the prompts, and has room for the new tokens.
        sampler: chooses the tokens. Without one, the caller does.
        mask_BS: (batch, tokens in the cache), 0 for padding on the left, or None.
        captures: as in `Replayed`.
    """

    def __init__(
        self,
        model: DecoderModel,
        cache: KVCache,
        sampler: Sampler | None = None,
        mask_BS: Tensor | None = None,
        captures: bool = True,
    ) -> None:
        device = model.rotary_emb.inv_freq.device
        super().__init__(device, None if sampler is None else sampler.generator, captures)
        self.model, self.cache, self.sampler = model, cache, sampler
        self.ids_B1 = torch.zeros(cache.batch, 1, dtype=torch.int64, device=device)
        self.ends_B = torch.full((cache.batch,), cache.length, device=device)
        self.firsts_B = None if mask_BS is None else (mask_BS == 0).sum(-1)
        self.state = _state_of(model) if self.captures and not model.training else None

    def __call__(self, ids_B1: Tensor | None = None) -> Tensor:
        """Return the next tokens (batch,), or without a sampler the float32 logits (batch, vocab).

        The next call may overwrite them.

        Args: ids_B1: the last token of each row, (batch, 1). By default they are the tokens that
            the sampler chose in the last call.
        Raises:
            ValueError: the cache has no room for the tokens.
        """
        self.cache.end_of(1)  # The kernel would write over the first tokens.
        if ids_B1 is not None:
            self.ids_B1.copy_(ids_B1)
        made: Tensor = self.replay()
        self.cache.advance_decoded()
        return made

    def run(self) -> Tensor:
        self.ends_B.add_(1)
        with self.cache.step_at(self.ends_B, self.firsts_B):
            context = self.model.prepare_context(self.ids_B1, cache=self.cache)
            hidden, _ = self.model.run_layers(self.model.embed_tokens(self.ids_B1), context)
        logits_BV = self.model.head.logits(hidden)[:, -1].float()
        if self.sampler is None:
            return logits_BV
        tokens_B = self.sampler(logits_BV)
        self.ids_B1.copy_(tokens_B.unsqueeze(1))
        return tokens_B


def kept_decoder(model: DecoderModel, sampler: Sampler, length: int) -> StepDecoder | None:
    """Return the decoder of the model's last generation, if this one can go on with it.

    Its graph reads the tensors and the settings of that time, so the model must still have them.

    Args: sampler: what it remembers is taken over; length: the number of tokens that the cache must
        have room for.
    """
    decoder: StepDecoder | None = kept_for_generation.pop(model, None)
    if decoder is None or decoder.sampler is None or decoder.cache.max_length < length:
        return None
    if not decoder.sampler.chooses_like(sampler) or decoder.state != _state_of(model):
        return None
    decoder.cache.reset()
    decoder.sampler.take(sampler)
    decoder.model = model
    return decoder


def keep(decoder: StepDecoder) -> None:
    """Keep the decoder for the next generation, if the model is in evaluation mode."""
    model = decoder.model
    if decoder.graph is not None and decoder.state is not None and decoder.firsts_B is None:
        del decoder.model  # so that the model can end
        kept_for_generation[model] = decoder


def _state_of(model: nn.Module) -> list[Any] | None:
    """Return what a graph holds of a model beside the values of tensors.

    It is None if there are weights whose storage is not known, such as those of torchao.
    """
    state: list[Any] = []
    for module in model.modules():
        state.append(type(module))
        state += [x for x in vars(module).items() if isinstance(x[1], _SETTINGS)]
        for x in (*module._parameters.values(), *module._buffers.values()):
            if x is not None and type(x) not in (Tensor, nn.Parameter, nn.Buffer):
                return None
            state.append(x if x is None else (id(x), x.data_ptr(), x.shape, x.dtype))
    return state

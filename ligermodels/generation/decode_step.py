"""A step of decoding: one new token of each row, in a CUDA graph if possible.

Only the device knows where the tokens stand in the cache, so all steps are the same launches.
"""

from __future__ import annotations

import torch
from torch import Tensor

from ligermodels.generation.sampling import Sampler
from ligermodels.kernels.autocast import autocast_is_on
from ligermodels.layers import AttentionContext, AttentionMask
from ligermodels.layers.kv_cache import DecodeStep, KVCache
from ligermodels.models.base import DecoderContext, DecoderModel
from ligermodels.models.kernel_report import decoding_obstacle


def can_decode(model: object, cache: KVCache, given: set[str]) -> bool:
    """Return whether a StepDecoder can compute the tokens after the prompts.

    Args:
        cache: it holds the prompts.
        given: the names of the model's inputs.
    """
    return (
        isinstance(model, DecoderModel)
        and type(model).forward is DecoderModel.forward
        and type(cache) is KVCache
        and not given - {"input_ids", "inputs_embeds", "prefix_lengths"}
        and decoding_obstacle(model) is None
        and not autocast_is_on(model.embed_tokens.weight)
        and not torch.cuda.is_current_stream_capturing()
    )


class StepDecoder:
    """Computes one new token of each row, from a cache that holds the others.

    The second call captures a step in a CUDA graph, which the later ones launch. The graph belongs
    to this object, so it never outlives the weights that it reads: a change of their values in
    place is seen, and the next generation captures a graph of its own.

    Args:
        model: the model.
        cache: it holds the prompts, and has room for the new tokens.
        sampler: chooses the tokens. Without one, the caller does.
        mask_BS: (batch, tokens in the cache), 0 for padding on the left, or None.
        captures: whether to capture a graph on a GPU; otherwise each call launches the kernels.
    """

    def __init__(
        self,
        model: DecoderModel,
        cache: KVCache,
        sampler: Sampler | None = None,
        mask_BS: Tensor | None = None,
        captures: bool = True,
    ) -> None:
        self.model, self.cache, self.sampler = model, cache, sampler
        device = model.rotary_emb.inv_freq.device
        self.captures = captures and device.type == "cuda"
        self.ids_B1 = torch.zeros(cache.batch, 1, dtype=torch.int64, device=device)
        self.ends_B = torch.full((cache.batch,), cache.length, device=device)
        self.firsts_B = None if mask_BS is None else (mask_BS == 0).sum(-1)
        self.is_warm = False
        self.graph: torch.cuda.CUDAGraph | None = None
        self.made: Tensor

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
        if self.captures and self.is_warm and self.graph is None:
            self.graph = self._captured()
        if self.graph is None:
            self.made = self._run()
        else:
            self.graph.replay()
        self.is_warm = True
        self.cache.advance_decoded()
        return self.made

    def _run(self) -> Tensor:
        logits_BV = self._logits()
        if self.sampler is None:
            return logits_BV
        tokens_B = self.sampler(logits_BV)
        self.ids_B1.copy_(tokens_B.unsqueeze(1))
        return tokens_B

    def _logits(self) -> Tensor:
        model, firsts_B = self.model, self.firsts_B
        self.ends_B.add_(1)
        if firsts_B is None:
            positions = self.ends_B[:1, None] - 1  # all rows are equally long
        else:
            positions = (self.ends_B - firsts_B)[:, None] - 1
        mask, contexts = AttentionMask(1), {}
        for name in sorted(set(model.ropes)):
            cos, sin = getattr(model, name)(positions)
            contexts[name] = AttentionContext(cos, sin, mask, self.cache)
        context = DecoderContext([contexts[name] for name in model.ropes], None)
        self.cache.step = DecodeStep(self.ends_B, firsts_B)
        try:
            hidden, _ = model.run_layers(model.embed_tokens(self.ids_B1), context)
        finally:
            self.cache.step = None
        return model.head.logits(hidden)[:, -1].float()

    def _captured(self) -> torch.cuda.CUDAGraph:
        # torch.cuda.graph would also collect garbage and empty the allocator's cache, which takes
        # longer than many steps.
        graph, stream = torch.cuda.CUDAGraph(), torch.cuda.Stream(self.ids_B1.device)
        if self.sampler is not None and self.sampler.generator is not None:
            graph.register_generator_state(self.sampler.generator)
        stream.wait_stream(torch.cuda.current_stream(self.ids_B1.device))
        with torch.cuda.stream(stream):
            graph.capture_begin(capture_error_mode="thread_local")
            try:
                self.made = self._run()
            finally:
                graph.capture_end()
        torch.cuda.current_stream(self.ids_B1.device).wait_stream(stream)
        return graph

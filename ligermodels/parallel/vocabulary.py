"""The vocabulary over the ranks of a tensor-parallel group: the embedding's rows and the head's.

The loss of the head is that of `ligermodels.kernels.linear_cross_entropy.vocab_shard`.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh

from ligermodels.kernels.linear_cross_entropy.vocab_shard import VocabShard
from ligermodels.models.base import DecoderModel
from ligermodels.parallel.layout import IndexRange, Ranges
from ligermodels.parallel.modules import VocabularyEmbedding


def split_vocabulary(
    model: DecoderModel, split: Callable[[Tensor, Ranges, int], nn.Parameter], mesh: DeviceMesh
) -> None:
    """Split the embedding and the head.

    Args: split: returns this rank's ranges of a parameter in a dimension.
    """
    head, group, ranks = model.head, mesh.get_group(), mesh.size()
    vocab = head.vocab_size
    part = -(-vocab // ranks)
    ranges = tuple(
        (IndexRange(rank * part, 0, min(part, vocab - rank * part)),) for rank in range(ranks)
    )
    first = mesh.get_local_rank() * part
    weight = split(model.embed_tokens.weight, ranges, 0)
    model.embed_tokens = VocabularyEmbedding(model.embed_tokens, weight, first, group)
    if head.is_tied:
        head.tie(model.embed_tokens)
    else:
        head.proj.weight = split(head.proj.weight, ranges, 0)
        head.proj.out_features = len(head.proj.weight)
        if head.proj.bias is not None:
            head.proj.bias = split(head.proj.bias, ranges, 0)
    head.vocab_shard = VocabShard(group, first, vocab)

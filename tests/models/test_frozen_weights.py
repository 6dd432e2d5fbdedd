"""Nothing is kept or computed for the gradient of a frozen weight, in families without experts."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
from torch import Tensor, arange
from torch.utils._python_dispatch import TorchDispatchMode

from ligermodels.models.base import DecoderModel
from tests.families import DECODERS
from tests.layers.saved import SavedBytes
from tests.tiny_models import VOCAB, random_model

BATCH, SEQ, HIDDEN, INNER = 2, 24, 32, 48
ROWS = BATCH * SEQ * HIDDEN * 4  # the bytes of the hidden states
LINEARS = 4  # of each layer
DENSE = [name for name, it in DECODERS.items() if not (it.experts or it.composed)]


class Counted(TorchDispatchMode):
    """Counts the operators that run."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: Counter[str] = Counter()

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        self.calls[function.overloadpacket.__name__] += 1
        return function(*args, **(kwargs or {}))


def model_with(family: str, frozen: Callable[[str], bool], **changes) -> DecoderModel:
    model = random_model(family, tie_word_embeddings=False, **changes)
    for name, parameter in model.named_parameters():
        parameter.requires_grad_(not frozen(name))
    return model


def loss(model: DecoderModel) -> Tensor:
    ids = arange(BATCH * SEQ).view(BATCH, SEQ) % VOCAB
    return model(ids, labels=ids).loss


def kept(model: DecoderModel) -> int:
    with SavedBytes(model) as saved:
        held = loss(model)
    del held
    return saved.total


@pytest.mark.parametrize("family", DENSE)
def test_frozen_weights_keep_nothing_for_backward(family: str) -> None:
    """Two frozen layers below a trained one keep as little as one, and a frozen model nothing.

    The projections of the last layer keep their input, not the tensors that it was made of.
    """
    alike = {"qwen3_moe": {"mlp_only_layers": []}, "qwen3_5_text": {"full_attention_interval": 9}}
    alike = alike.get(family, {})
    frozen = ("embed", "layers.0", "layers.1")
    deep = kept(model_with(family, lambda name: name.startswith(frozen), **alike))
    shallow = model_with(
        family, lambda name: name.startswith(frozen[:2]), num_hidden_layers=2, **alike
    )
    masks = 2 * BATCH * SEQ * SEQ  # those of Gemma 3 differ between the layers
    assert ROWS < deep <= kept(shallow) + masks
    assert kept(model_with(family, lambda name: True)) == 0
    after = kept(model_with(family, lambda name: name != "norm.weight"))
    norm_follows = 2 * ROWS if family.startswith(("gemma2", "gemma3")) else 0
    sizes = {
        "mlp.down_proj": ROWS * INNER // HIDDEN,
        "mlp.gate_up_proj": ROWS + 2 * ROWS * INNER // HIDDEN,
    }
    for projection, size in sizes.items() if family in DENSE else ():
        only = kept(model_with(family, lambda name, p=projection: f"layers.2.{p}" not in name))
        assert only <= after + size + norm_follows, projection


@pytest.mark.parametrize("family", DENSE)
def test_products_of_backward(family: str) -> None:
    """A trained linear takes two products in backward, a frozen one takes one."""
    for frozen, each in ((False, 2), (True, 1)):
        model = model_with(family, lambda name, f=frozen: f and "proj" in name)
        value = loss(model)
        with Counted() as counted:
            value.backward()
        # The products of the head run in forward; a single chunk leaves one or two for backward.
        assert 0 <= counted.calls["mm"] - each * LINEARS * len(model.layers) <= 2 - frozen

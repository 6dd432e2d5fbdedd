"""Nothing is kept or computed for the gradient of a frozen weight, in every family."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import pytest
import torch
from torch import nn
from torch.utils._python_dispatch import TorchDispatchMode

from ligermodels.models.auto import families
from ligermodels.models.base import DecoderModel
from tests.layers.saved import SavedBytes
from tests.tiny_models import VOCAB, random_model

BATCH, SEQ, HIDDEN, INNER = 2, 24, 32, 48
ROWS = BATCH * SEQ * HIDDEN * 4  # the bytes of the hidden states
LINEARS = 4  # of each layer


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


def loss(model: nn.Module) -> torch.Tensor:
    ids = torch.arange(BATCH * SEQ).view(BATCH, SEQ) % VOCAB
    return model(ids, labels=ids).loss


def kept(model: DecoderModel) -> int:
    with SavedBytes(model) as saved:
        held = loss(model)
    del held
    return saved.total


@pytest.mark.parametrize("family", families())
def test_frozen_layers_below_keep_nothing(family) -> None:
    """Two frozen layers below a trained one keep as little as one, and a frozen model nothing."""
    deep = kept(model_with(family, lambda name: name.startswith(("embed", "layers.0", "layers.1"))))
    shallow = model_with(
        family, lambda name: name.startswith(("embed", "layers.0")), num_hidden_layers=2
    )
    masks = 2 * BATCH * SEQ * SEQ  # those of Gemma 3 differ between the layers
    assert ROWS < deep <= kept(shallow) + masks
    assert kept(model_with(family, lambda name: True)) == 0


@pytest.mark.parametrize("family", families())
def test_one_trained_projection(family) -> None:
    """The last layer's projections keep their input, not the tensors that it was made of."""
    after = kept(model_with(family, lambda name: name != "norm.weight"))
    for projection, size in (("mlp.down_proj", ROWS * INNER // HIDDEN), ("mlp.gate_up_proj", None)):
        only = kept(model_with(family, lambda name, p=projection: f"layers.2.{p}" not in name))
        sandwich = family.startswith(("gemma2", "gemma3"))  # a norm follows the MLP
        if size is None:
            size = ROWS + 2 * ROWS * INNER // HIDDEN
        assert only <= after + size + (2 * ROWS if sandwich else 0), projection


@pytest.mark.parametrize("family", families())
def test_products_of_backward(family) -> None:
    """A trained linear takes two products in backward, a frozen one takes one."""
    products = []
    for frozen in (False, True):
        model = model_with(family, lambda name, f=frozen: f and "proj" in name)
        value = loss(model)
        with Counted() as counted:
            value.backward()
        products.append(counted.calls["mm"])
    trained, frozen_products = products
    layers = len(model.layers)
    # The products of the head run in forward; a single chunk leaves one or two for backward.
    assert frozen_products - LINEARS * layers in (0, 1)
    assert trained - 2 * LINEARS * layers in (0, 1, 2)

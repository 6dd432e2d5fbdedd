"""Compare SmolLM2 on real text in float32 with transformers and an exact cross entropy.

On a CPU, PyTorch's float32 log_softmax over 49152 columns has an error of 1e-5. It makes some of
transformers' own gradients wrong by more than 1e-4. The tests therefore take the loss of
transformers' logits in float64.
"""

from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from ligermodels import LigerLlama, Tokenizer
from ligermodels.kernels import cross_entropy
from tests.models.pairs import gradients, native_gradients, relative

TEXT = (
    "Gravity is the force by which a planet draws objects toward its center.",
    "The quick brown fox.",
)


def ids_of(folder: Path) -> torch.Tensor:
    tokenizer = Tokenizer.from_hf(folder)
    pad = tokenizer.pad_token_id
    return torch.tensor([[*tokenizer.encode(TEXT[0]), pad, pad, *tokenizer.encode(TEXT[1])]])


@pytest.mark.slow
def test_parity_on_text(smollm2: Path) -> None:
    from transformers import LlamaForCausalLM

    hf = LlamaForCausalLM.from_pretrained(smollm2, dtype=torch.float32)
    ours = LigerLlama.from_hf(smollm2, dtype=torch.float32)
    ids = ids_of(smollm2)
    labels = ids.clone()
    labels[0, :4] = -100
    logits = hf(ids).logits
    expected = F.cross_entropy(logits[0, :-1].double(), labels[0, 1:])
    expected.backward()
    loss = ours.loss(ids, labels)
    loss.backward()
    assert loss.item() == pytest.approx(expected.item(), rel=1e-6)
    with torch.no_grad():
        assert relative(ours.head.logits(ours(ids)), logits) <= 1e-5
    ours_grads, reference = gradients(ours), native_gradients(hf)
    assert ours_grads.keys() == reference.keys()
    errors = {name: relative(ours_grads[name], reference[name]) for name in reference}
    worst = max(errors, key=errors.__getitem__)
    print(f"largest gradient error: {worst} {errors[worst]:.1e}")
    assert errors[worst] <= 1e-4, worst


@pytest.mark.slow
def test_the_loss_is_closer_to_float64_than_pytorchs(smollm2: Path) -> None:
    ours = LigerLlama.from_hf(smollm2, dtype=torch.float32)
    ids = ids_of(smollm2)
    with torch.no_grad():
        logits = ours.head.logits(ours(ids))[0, :-1]

    def gradient(x: torch.Tensor, loss) -> torch.Tensor:
        x = x.detach().requires_grad_()
        return torch.autograd.grad(loss(x, ids[0, 1:]), x)[0]

    exact = gradient(logits.double(), F.cross_entropy)
    error = relative(gradient(logits, lambda x, t: cross_entropy(x, t)[0]), exact)
    pytorchs = relative(gradient(logits, F.cross_entropy), exact)
    print(f"gradient of the logits against float64: ours {error:.1e}, PyTorch's {pytorchs:.1e}")
    assert error <= pytorchs

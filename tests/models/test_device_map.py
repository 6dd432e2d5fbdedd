"""A model that accelerate spreads over devices, host memory and disk computes the same."""

from __future__ import annotations

from typing import Any

import accelerate
import pytest
import torch

from tests.tiny_models import random_model


def map_of(model: Any, first: Any, last: Any) -> dict[str, Any]:
    """Put the first layer and the head's neighbours on one place, the later layers on another."""
    ropes = [name for name in ("rotary_emb", "rotary_emb_local") if hasattr(model, name)]
    found = dict.fromkeys(["embed_tokens", *ropes, "layers.0", "head"], first)
    return found | dict.fromkeys(["layers.1", "layers.2", "norm"], last)


# accelerate's hooks do not ask for the family; these have the kinds of blocks and heads.
@pytest.mark.parametrize(("family", "tied"), [("llama", True), ("gemma3_text", False)])
def test_offloaded_weights(family: str, tied: bool, tmp_path) -> None:
    """A layer's weights stay on the meta device until accelerate's hook loads them."""
    model = random_model(family, tie_word_embeddings=tied)
    ids = torch.randint(3, model.config.vocab_size, (2, 12))
    with torch.no_grad():
        hidden, loss = model(ids), model.loss(ids, ids)
        logits = model.head.logits(hidden[:, -1])
    tokens = model.generate(ids, max_new_tokens=5)
    device_map = map_of(model, "cpu", "disk")
    model = accelerate.dispatch_model(
        model, device_map, main_device="cpu", offload_dir=tmp_path, force_hooks=True
    )
    assert model.layers[1].self_attn.qkv_proj.weight.is_meta
    with torch.no_grad():
        torch.testing.assert_close(model(ids), hidden)
        torch.testing.assert_close(model.loss(ids, ids), loss)
        torch.testing.assert_close(model.head.logits(hidden[:, -1]), logits)
    assert torch.equal(model.generate(ids, max_new_tokens=5), tokens)


def test_an_offloaded_embedding(tmp_path) -> None:
    """The model calls the embedding through its hook; a tied head's error says what to do."""
    ids = torch.tensor([[1, 2, 3, 4]])
    own = random_model("llama", tie_word_embeddings=False)
    tokens = own.generate(ids, max_new_tokens=3)
    hooked = accelerate.disk_offload(own, tmp_path / "own", execution_device="cpu")
    assert hooked.embed_tokens.weight.is_meta
    assert torch.equal(hooked.generate(ids, max_new_tokens=3), tokens)
    tied = random_model("llama", tie_word_embeddings=True)
    tied = accelerate.disk_offload(tied, tmp_path / "tied", execution_device="cpu")
    with pytest.raises(RuntimeError, match="keep embed_tokens in memory"):
        tied.loss(ids, ids)


@pytest.mark.gpu
@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
@pytest.mark.parametrize("family", ["llama", "gemma2", "gemma3_text", "qwen3"])
def test_two_gpus(family: str) -> None:
    """Angles and masks move to the layers' devices; losses and gradients equal one GPU's."""
    # FlexAttention needs a head_dim of at least 16.
    model = random_model(family, head_dim=16, tie_word_embeddings=False).to("cuda:0")
    ids = torch.randint(3, model.config.vocab_size, (2, 12), device="cuda:0")
    positions = (torch.arange(12, device="cuda:0") % 7)[None].expand(2, -1)
    loss = model(ids, labels=ids, position_ids=positions).loss
    loss.backward()
    wanted = {name: p.grad.clone() for name, p in model.named_parameters()}
    model.zero_grad()
    model = accelerate.dispatch_model(model, map_of(model, 0, 1))
    assert model.layers[1].self_attn.qkv_proj.weight.device == torch.device("cuda:1")
    spread = model(ids, labels=ids, position_ids=positions).loss
    torch.testing.assert_close(spread, loss)
    spread.backward()
    for name, parameter in model.named_parameters():
        torch.testing.assert_close(parameter.grad.to("cuda:0"), wanted[name], rtol=1e-4, atol=1e-5)

"""Packed projections, split into HF's and packed again."""

from __future__ import annotations

import copy
from pathlib import Path

import pytest
import torch
from torch import nn

from ligermodels.errors import ConfigError, SaveError
from ligermodels.integrations.hf_model import LigerForCausalLM
from ligermodels.integrations.projections import pack_projections, split_projections
from ligermodels.models.auto import families
from tests.families import DECODERS, sampled
from tests.models import hf_models, zoo
from tests.tiny_models import VOCAB, random_model

# transformers' Phi-3 and Granite 4 have packed projections, too.
SPLIT = [name for name in families() if name not in ("phi3", "granitemoehybrid")]
IDS = torch.randint(0, VOCAB, (2, 7), generator=torch.Generator().manual_seed(0))


@pytest.mark.parametrize("family", sampled(SPLIT))
def test_splitting_changes_nothing(family: str) -> None:
    wrapper = LigerForCausalLM.from_native(random_model(family))
    before, logits = copy.deepcopy(wrapper.state_dict()), wrapper(IDS).logits
    walked = {name: x.clone() for name, x in wrapper.hf_named_parameters()}
    split_projections(wrapper)
    torch.testing.assert_close(wrapper(IDS).logits, logits, rtol=1e-4, atol=3e-5)
    again = dict(wrapper.hf_named_parameters())
    assert walked.keys() == again.keys()
    assert all(torch.equal(walked[name], again[name]) for name in walked)
    assert any(name.endswith("self_attn.k_proj.weight") for name in wrapper.state_dict())
    twin = copy.deepcopy(wrapper)
    with torch.no_grad():
        for weight in wrapper.parameters():
            weight.zero_()
    torch.testing.assert_close(twin(IDS).logits, logits, rtol=1e-4, atol=3e-5)
    pack_projections(twin)
    after = twin.state_dict()
    assert after.keys() == before.keys()
    assert all(torch.equal(after[name], before[name]) for name in before)
    assert twin.native.state_dict().keys() == random_model(family).state_dict().keys()


# The experts of transformers' model have other names than those of its files.
@pytest.mark.parametrize(
    "family", sampled(name for name in SPLIT if name in DECODERS and not DECODERS[name].experts)
)
def test_a_checkpoint_is_loaded_into_split_projections(family: str, tmp_path: Path) -> None:
    hf = hf_models.build(family, zoo.Feature())
    hf.save_pretrained(tmp_path)
    wrapper = LigerForCausalLM.from_pretrained(tmp_path, split_projections=True)
    want, got = hf.state_dict(), wrapper.state_dict()
    assert want.keys() == got.keys() and all(torch.equal(want[name], got[name]) for name in want)
    # In this order, tools draw the values of new adapters, and optimizers save their states.
    orders = [[name for name, _ in model.named_parameters()] for model in (hf, wrapper)]
    assert orders[0] == orders[1]
    wrapper.save_pretrained(tmp_path / "again")
    again = type(hf).from_pretrained(tmp_path / "again").state_dict()
    assert all(torch.equal(want[name], again[name]) for name in want)
    wrapper.load_state_dict(want)


def test_what_is_not_plain_is_neither_split_nor_packed(tmp_path: Path) -> None:
    wrapper = LigerForCausalLM.from_native(random_model("llama"))
    split_projections(wrapper)
    first, second = (layer.self_attn for layer in wrapper.model.layers[:2])
    whole, first.q_proj = first.q_proj, nn.Sequential(first.q_proj)
    pack_projections(wrapper)
    assert hasattr(first, "q_proj") and not hasattr(second, "q_proj")
    with pytest.raises(SaveError, match=r"pack those that were split .*pack_projections"):
        wrapper.native.save_hf(tmp_path)
    first.q_proj = whole
    pack_projections(wrapper)
    wrapper.native.save_hf(tmp_path)
    second.qkv_proj = nn.Sequential(second.qkv_proj)
    with pytest.raises(ConfigError, match="qkv_proj is a Sequential"):
        split_projections(wrapper)

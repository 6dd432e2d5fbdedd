"""Which class of wrappers a checkpoint needs."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from ligermodels.errors import ConfigError
from ligermodels.integrations.hf_base import class_of
from ligermodels.integrations.hf_model import LigerForCausalLM
from ligermodels.models import auto
from ligermodels.models.auto import AutoLiger
from tests.models import hf_models, zoo


def test_a_family_that_is_unknown_is_refused(tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text('{"model_type": "bert"}')
    with pytest.raises(ConfigError, match="'bert' is not supported"):
        LigerForCausalLM.from_pretrained(tmp_path)


def test_a_checkpoint_with_other_towers_is_refused(tmp_path: Path) -> None:
    """transformers would find none of its tensors; the native model finds those of the text."""
    hf = hf_models.build("gemma3", zoo.Feature())
    hf.save_pretrained(tmp_path)
    with pytest.raises(ConfigError, match=r"use LigerForCausalLM.from_native\(AutoLiger.from_hf"):
        LigerForCausalLM.from_pretrained(tmp_path)
    wrapper = LigerForCausalLM.from_native(AutoLiger.from_hf(tmp_path))
    ids = torch.randint(3, 131, (2, 9), generator=torch.Generator().manual_seed(0))
    torch.testing.assert_close(wrapper(ids).logits, hf(ids).logits, rtol=1e-5, atol=1e-5)


def test_a_class_of_another_family_is_refused() -> None:
    llama, mistral = (auto.families()[name] for name in ("llama", "mistral"))
    made = class_of(llama, LigerForCausalLM)
    assert class_of(llama, made) is made
    with pytest.raises(ConfigError, match="is the class of another family than LigerMistral"):
        class_of(mistral, made)

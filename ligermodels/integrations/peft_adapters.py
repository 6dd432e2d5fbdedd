"""PEFT on the models of `hf_model`: adapters on HF's projections, under HF's names."""

from typing import Any

from ligermodels.integrations import require

require("peft", "transformers")

import peft

from ligermodels.errors import ConfigError
from ligermodels.integrations.hf_base import LigerPreTrainedModel
from ligermodels.integrations.projections import (
    packed_afterwards,
    refuse_adapters,
    refuse_in_part,
    split_experts,
)
from ligermodels.models.base import DecoderModel


def _refuse_without_wrapper(model: Any) -> None:
    """Raise ConfigError for a native model, whose packed projections PEFT would not find."""
    if isinstance(model, DecoderModel):
        raise ConfigError(
            f"{type(model).__name__} is a native model, and PEFT's adapters belong to a wrapper "
            "with HF's projections; give LigerForCausalLM.from_native(model) instead"
        )


def get_peft_model(model: Any, peft_config: peft.PeftConfig, **options: Any) -> Any:
    """Return `peft.get_peft_model(model, peft_config, **options)`, also for a native wrapper.

    Every function of PEFT splits the packed projections of a wrapper into HF's. This one packs
    those again that have no adapter and are not trained.

    Raises:
        ConfigError: the method or a name in the config does not work on a wrapper (see
            `projections.refuse_adapters`), the model is a native one without its wrapper, or the
            projections cannot be split (see `split_projections`).
    """
    _refuse_without_wrapper(model)
    if not isinstance(model, LigerPreTrainedModel):
        return peft.get_peft_model(model, peft_config, **options)
    with packed_afterwards(model):
        split_experts(model)
        refuse_adapters(model, {"default": peft_config})
        adapted = peft.get_peft_model(model, peft_config, **options)
    if peft_config.peft_type == peft.PeftType.CPT:  # it has its own loss
        model.trains_with_logits = True
    return adapted


def load_peft_model(model: Any, path: str, **options: Any) -> Any:
    """Return `peft.PeftModel.from_pretrained(model, path, **options)`, also for a native wrapper.

    Raises:
        ConfigError: what `get_peft_model` raises, the model has no place for a tensor of the
            adapter, or the adapter lacks one that its config names. PEFT would go on without a
            word.
    """
    _refuse_without_wrapper(model)
    if not isinstance(model, LigerPreTrainedModel):
        return peft.PeftModel.from_pretrained(model, path, **options)
    with packed_afterwards(model):
        adapted = peft.PeftModel.from_pretrained(model, path, **options)
        if adapted.active_peft_config.is_prompt_learning:  # its tensors have a place of their own
            return adapted
        # PEFT tells which tensors it left out only if an adapter is loaded once more.
        again = {"adapter_name": "default"} | options
        again.pop("config", None)
        try:
            refuse_in_part(path, adapted.load_adapter(path, **again))
        except ConfigError:
            adapted.unload()
            raise
    return adapted

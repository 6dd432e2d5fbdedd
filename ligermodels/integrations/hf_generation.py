"""Which of transformers' requests to generate this library's own `generate` can answer."""

from typing import Any

from ligermodels.integrations import require

require("transformers")

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    MaxLengthCriteria,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

# The attribute and our name of what each processor does, in the order of `Sampling`.
_RULE = {
    RepetitionPenaltyLogitsProcessor: ("penalty", "repetition_penalty"),
    TemperatureLogitsWarper: ("temperature", "temperature"),
    TopKLogitsWarper: ("top_k", "top_k"),
    TopPLogitsWarper: ("top_p", "top_p"),
    MinPLogitsWarper: ("min_p", "min_p"),
}
# They ask for outputs of steps, or change how steps are computed.
_OTHER_LOOPS = ("return_dict_in_generate", "prefill_chunk_size", "is_assistant")
_KNOWN = {"attention_mask", "position_ids", "past_key_values", "cache_position"}
_KNOWN |= {"use_cache", "logits_to_keep"}


def native_options(
    input_ids: Tensor,
    processors: list[Any],
    criteria: list[Any],
    config: GenerationConfig,
    inputs: dict[str, Any],
) -> dict[str, Any] | None:
    """Return the arguments of `generate` that mean the same, or None if there are none.

    Args:
        input_ids: (batch, seq), the prompts.
        processors, criteria, config: as transformers' loop gets them.
        inputs: the further ones of the model, whose cache is empty and goes to nobody.
    """
    kinds = [type(each) for each in processors]
    if (
        kinds != [kind for kind in _RULE if kind in kinds]
        or {type(each) for each in criteria} - {MaxLengthCriteria, EosTokenCriteria}
        or any(getattr(config, name, None) for name in _OTHER_LOOPS)
        or not config.use_cache
        or config.cache_implementation is not None
        or any(x is not None for name, x in inputs.items() if name not in _KNOWN)
    ):
        return None
    rule = {_RULE[type(x)][1]: getattr(x, _RULE[type(x)][0]) for x in processors}
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    # transformers' penalty also counts padding, or leaves out what an attribute says.
    ignores = [getattr(each, "prompt_ignore_length", None) for each in processors]
    penalises = "repetition_penalty" in rule and (mask is not None or ignores[0] is not None)
    if penalises or not all(rule.values()) or not _are_plain(input_ids, mask, positions):
        return None
    ends = [each.eos_token_id for each in criteria if isinstance(each, EosTokenCriteria)]
    pad = config._pad_token_tensor
    if pad is not None and pad < 0:
        return None
    return {
        "max_new_tokens": config.max_length - input_ids.shape[1],
        "attention_mask": mask,
        "do_sample": bool(config.do_sample),
        "eos_token_id": [token for several in ends for token in several.tolist()],
        "pad_token_id": None if pad is None else int(pad),
        "repetition_penalty": 1.0,
        **rule,
    }


def _are_plain(ids: Tensor, mask: Tensor | None, positions: Tensor | None) -> bool:
    """Return whether rows have only padding on the left, and the usual positions after it."""
    if ids.dim() != 2 or not ids.numel():
        return False
    mask = torch.ones_like(ids) if mask is None else mask.to(ids)
    if mask.shape != ids.shape or not bool(((mask == 0) | (mask == 1)).all()):
        return False
    if not bool((mask[:, 1:] >= mask[:, :-1]).all() and mask[:, -1].all()):
        return False
    usual = mask.cumsum(-1) - 1
    return positions is None or bool((((positions.to(ids) - usual) * mask) == 0).all())

"""Which of transformers' requests to generate this library's own `generate` can answer."""

from typing import Any

from ligermodels.integrations import require

require("transformers")

import torch
from torch import Tensor
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

# The attribute and our name of what each processor does, in the order of `Sampling`. Other
# processors, or in another order, run between the steps.
_RULE = {
    RepetitionPenaltyLogitsProcessor: ("penalty", "repetition_penalty"),
    TemperatureLogitsWarper: ("temperature", "temperature"),
    TopKLogitsWarper: ("top_k", "top_k"),
    TopPLogitsWarper: ("top_p", "top_p"),
    MinPLogitsWarper: ("min_p", "min_p"),
}
# The inputs that are looked at, or that say what is done anyway.
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
        inputs: its other arguments. Their cache is empty and goes to nobody.
    """
    kinds, pad = [type(each) for each in processors], config._pad_token_tensor
    if (
        {type(each) for each in criteria} - {MaxLengthCriteria, EosTokenCriteria}
        or config.return_dict_in_generate
        or config.prefill_chunk_size is not None
        or config.is_assistant
        or not config.use_cache
        or config.cache_implementation is not None
        or any(x is not None and x is not False for k, x in inputs.items() if k not in _KNOWN)
        or (pad is not None and pad < 0)
    ):
        return None
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    # transformers' penalty also counts padding, or leaves out what an attribute says.
    ignores = any(getattr(x, "prompt_ignore_length", None) is not None for x in processors)
    counts = RepetitionPenaltyLogitsProcessor in kinds and mask is not None
    rule: dict[str, Any] = {"logits_processor": LogitsProcessorList(processors)}
    if kinds == [kind for kind in _RULE if kind in kinds] and not (ignores or counts):
        found = {_RULE[type(x)][1]: getattr(x, _RULE[type(x)][0]) for x in processors}
        if all(found.values()) and (config.do_sample or found.keys() <= {"repetition_penalty"}):
            rule = found
    if not _are_usual(torch.ones_like(input_ids) if mask is None else mask.long(), positions):
        return None
    ends = [each.eos_token_id for each in criteria if isinstance(each, EosTokenCriteria)]
    return {
        "max_new_tokens": config.max_length - input_ids.shape[1],
        "attention_mask": mask,
        "do_sample": bool(config.do_sample),
        "eos_token_id": [token for several in ends for token in several.tolist()],
        "pad_token_id": None if pad is None else int(pad),
        "repetition_penalty": 1.0,
        **rule,
    }


def _are_usual(mask: Tensor, positions: Tensor | None) -> bool:
    """Return whether rows have only padding on the left, and the usual positions after it."""
    counts = mask.cumsum(-1)
    if not torch.equal(mask, (counts > 0).long()) or not bool(mask[:, -1].all()):
        return False
    return positions is None or bool(((positions - counts + 1) * mask == 0).all())

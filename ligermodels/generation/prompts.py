"""Turn prompts of any form into one batch that is padded on the left.

Shape legend: B batch, S prompt length.
"""

from collections.abc import Sequence
from numbers import Integral
from typing import Any

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ligermodels.errors import short_repr

Prompts = Tensor | Sequence[int] | Sequence[Sequence[int]] | Sequence[Tensor]


def batch_prompts(
    input_ids: Prompts, attention_mask: Tensor | None, pad_token_id: int, vocab_size: int
) -> tuple[Tensor, Tensor | None]:
    """Check prompts and put them into one tensor.

    Returns: ids (B, S), int64, and the attention mask (B, S), or None if there is no padding.
    Raises:
        ValueError: a prompt is empty, an id is outside the vocabulary, padding is on the right, or
            the mask does not fit.
    """
    ids_BS, mask_BS = _batch(input_ids, attention_mask, pad_token_id)
    # Padding tokens are also checked: they are masked, but the model embeds them.
    outside = ids_BS[(ids_BS < 0) | (ids_BS >= vocab_size)]
    if outside.numel():
        raise ValueError(
            f"input_ids: token {int(outside[0])} is outside the vocabulary of {vocab_size}"
        )
    return ids_BS, mask_BS


def _batch(
    input_ids: Prompts, attention_mask: Tensor | None, pad_token_id: int
) -> tuple[Tensor, Tensor | None]:
    if _is_list_of_prompts(input_ids):
        if attention_mask is not None:
            raise ValueError(
                "attention_mask: a list of prompts has no padding and needs no mask; leave it out"
            )
        return _pad_left([_tensor("input_ids", row) for row in input_ids], pad_token_id)
    input_ids = _tensor("input_ids", input_ids)
    if input_ids.dim() == 1:
        input_ids = input_ids.unsqueeze(0)
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids {tuple(input_ids.shape)}: expected (batch, seq) or a list")
    _check_rows(list(input_ids))
    if attention_mask is None:
        return input_ids.long(), None
    attention_mask = _tensor("attention_mask", attention_mask)
    if attention_mask.dim() == 1:
        attention_mask = attention_mask.unsqueeze(0)
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask {tuple(attention_mask.shape)} and input_ids "
            f"{tuple(input_ids.shape)} differ in shape, but must have the same"
        )
    mask = attention_mask.bool()
    padding = (~mask).sum(1, keepdim=True)
    on_the_left = torch.arange(mask.shape[1], device=mask.device) >= padding
    wrong = (attention_mask != on_the_left).any(1) | ~mask.any(1)
    if bool(wrong.any()):
        raise ValueError(
            f"attention_mask: row {int(wrong.int().argmax())}; expected 0 for padding, and on its "
            "right 1 for each token; pad on the left, or pass the prompts as a list without padding"
        )
    return input_ids.long(), None if bool(mask.all()) else mask.long()


def _is_list_of_prompts(value: Any) -> bool:
    """Return whether a value is a sequence of rows and not one row of ids."""
    if not isinstance(value, Sequence) or isinstance(value, (str, bytes)):
        return False
    return not (len(value) and isinstance(value[0], Integral))


def _tensor(name: str, value: Any) -> Tensor:
    """Return a value that a caller passed as a tensor; an array and a list of numbers are fine."""
    if isinstance(value, str):
        raise ValueError(f"{name}: a prompt is a string; encode it with Tokenizer.encode")
    try:
        return torch.as_tensor(value)
    except (TypeError, ValueError, RuntimeError, OverflowError):
        raise ValueError(f"{name}: got {short_repr(value)}; expected integers of 64 bits") from None


def _pad_left(rows: list[Tensor], pad_token_id: int) -> tuple[Tensor, Tensor | None]:
    _check_rows(rows)
    rows = [row.long().cpu() for row in rows]
    ones = [torch.ones_like(row) for row in rows]
    ids = pad_sequence(rows, batch_first=True, padding_value=pad_token_id, padding_side="left")
    mask = pad_sequence(ones, batch_first=True, padding_side="left")
    return ids, None if bool(mask.all()) else mask


def _check_rows(rows: list[Tensor]) -> None:
    if not rows:
        raise ValueError("input_ids: there are no tokens; begin with a token, such as bos_token_id")
    for i, row in enumerate(rows):
        # torch turns an empty list into a float tensor.
        has_floats = row.is_floating_point() and row.numel() > 0
        if row.dim() != 1 or has_floats or row.is_complex() or row.dtype == torch.bool:
            raise ValueError(
                f"input_ids: prompt {i} is {row.dtype} of shape {tuple(row.shape)}; expected token "
                "ids in one dimension"
            )
        if not row.numel():
            raise ValueError(
                f"input_ids: prompt {i} is empty; begin with a token, such as bos_token_id"
            )

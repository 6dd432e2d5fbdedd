"""Turn prompts of any form into one batch that is padded on the left.

Shape legend: B batch, S prompt length.
"""

from collections.abc import Sequence

import torch
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

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
    if not isinstance(input_ids, Tensor):
        prompts = input_ids if isinstance(input_ids, (list, tuple)) else [input_ids]
        if any(isinstance(prompt, str) for prompt in prompts):
            raise ValueError("input_ids: a prompt is a string; encode it with Tokenizer.encode")
        if len(input_ids) and isinstance(input_ids[0], int):
            input_ids = torch.tensor(input_ids)
        else:
            if attention_mask is not None:
                raise ValueError(
                    "attention_mask: a list of prompts has no padding and needs no mask; leave it "
                    "out"
                )
            return _pad_left([torch.as_tensor(row) for row in input_ids], pad_token_id)
    if input_ids.dim() == 1:
        input_ids = input_ids.unsqueeze(0)
    if input_ids.dim() != 2:
        raise ValueError(f"input_ids {tuple(input_ids.shape)}: expected (batch, seq) or a list")
    _check_rows(list(input_ids))
    if attention_mask is None:
        return input_ids.long(), None
    if attention_mask.dim() == 1:
        attention_mask = attention_mask.unsqueeze(0)
    if attention_mask.shape != input_ids.shape:
        raise ValueError(
            f"attention_mask {tuple(attention_mask.shape)} and input_ids "
            f"{tuple(input_ids.shape)} differ in shape, but must have the same"
        )
    mask = attention_mask.bool()
    if not bool(mask.any(1).all()):
        raise ValueError(
            f"attention_mask: row {int(mask.any(1).int().argmin())} is all padding; a prompt needs "
            "at least one token"
        )
    if bool((mask[:, :-1] & ~mask[:, 1:]).any()):
        raise ValueError(
            "attention_mask: there is padding to the right of tokens; pad on the left, or pass the "
            "prompts as a list without padding"
        )
    return input_ids.long(), None if bool(mask.all()) else mask.long()


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
        if row.dim() != 1 or has_floats or row.dtype == torch.bool:
            raise ValueError(
                f"input_ids: prompt {i} is {row.dtype} of shape {tuple(row.shape)}; expected token "
                "ids in one dimension"
            )
        if not row.numel():
            raise ValueError(
                f"input_ids: prompt {i} is empty; begin with a token, such as bos_token_id"
            )

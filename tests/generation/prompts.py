"""Prompts of unequal lengths, and transformers' greedy tokens for them."""

import torch

PROMPTS = [[5, 9, 3], [11, 2, 40, 41, 42, 7, 60], [33]]


def left_padded(prompts, pad=0):
    longest = max(map(len, prompts))
    ids = torch.tensor([[pad] * (longest - len(p)) + p for p in prompts])
    mask = torch.tensor([[0] * (longest - len(p)) + [1] * len(p) for p in prompts])
    return ids, mask


def greedy_of(theirs, ids, mask, new, eos=None, pad=0):
    stops = {"eos_token_id": eos, "pad_token_id": pad}
    return theirs.generate(ids, attention_mask=mask, max_new_tokens=new, do_sample=False, **stops)

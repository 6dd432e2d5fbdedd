"""A layer of experts for families of mixtures of experts, and the loss that balances them."""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from ligermodels import kernels
from ligermodels.layers import PreNormed


class Experts(nn.Module):
    """Each token's sum of the gated MLPs that its router chooses, weighted by its probabilities.

    The rows of `gate_up_proj` and of `down_proj` are those of the experts, one after the other.
    """

    def __init__(
        self, hidden: int, inner: int, count: int, top: int, *, normalize: bool, activation: str
    ) -> None:
        super().__init__()
        self.count, self.top = count, top
        self.normalize, self.activation = normalize, activation
        self.gate = nn.Linear(hidden, count, bias=False)
        self.gate_up_proj = nn.Parameter(torch.empty(count * 2 * inner, hidden))
        self.down_proj = nn.Parameter(torch.empty(count * hidden, inner))

    def forward(self, x: PreNormed) -> tuple[Tensor, Tensor, Tensor]:
        """Return the output and the sum before the norm, like a `GatedMLP`, and router logits."""
        normed, total = x.apply()
        tokens = normed.flatten(0, -2)
        logits = self.gate(tokens)
        weights, chosen = logits.softmax(-1, torch.float32).topk(self.top)
        if self.normalize:
            weights = weights / weights.sum(-1, keepdim=True)
        # Sort the pairs of a token and an expert by expert: one product computes all experts.
        order = chosen.flatten().argsort(stable=True)
        token, expert = order // self.top, chosen.flatten()[order]
        x = tokens[token].to(logits.dtype)
        y = kernels.glu(self.product(x, self.gate_up_proj, expert), self.activation)
        y = self.product(y, self.down_proj, expert)
        y = y * weights.flatten()[order, None].to(y.dtype)
        out = torch.zeros_like(tokens).index_add(0, token, y.to(tokens.dtype))
        return out.view_as(normed), total, logits

    def product(self, x: Tensor, weight: Tensor, expert: Tensor) -> Tensor:
        """Multiply each row of x (rows, in) by the matrix of its expert; the rows are sorted."""
        each = weight.to(x.dtype).unflatten(0, (self.count, -1))
        own = expert[:, None] == torch.arange(self.count, device=x.device)
        if x.dtype == torch.bfloat16:
            return F.grouped_mm(x, each.mT, offs=own.sum(0).cumsum(0).to(torch.int32))
        # PyTorch compiles grouped products of bfloat16 only. This computes all pairs.
        return sum((x @ w.mT) * mine[:, None] for w, mine in zip(each, own.mT))


def balance_loss(logits: list[Tensor], top: int, attention_mask: Tensor | None) -> Tensor:
    """Return the loss of unbalanced experts over all layers, arXiv:2101.03961: 1 * top at best.

    Args: logits, of each layer's router, (tokens, experts); attention_mask (batch, seq) or None.
    """
    probs = torch.stack(logits).softmax(-1, torch.float32)  # (layers, tokens, experts)
    count = probs.shape[-1]
    chosen = F.one_hot(probs.topk(top).indices, count).sum(-2)
    real = torch.ones_like(probs[0, :, 0])
    if attention_mask is not None:
        real = attention_mask.flatten().to(probs.dtype)
    real = real / real.sum() / len(logits)
    share, prob = (torch.einsum("t,lte->e", real, x.to(probs.dtype)) for x in (chosen, probs))
    return count * (share * prob).sum()

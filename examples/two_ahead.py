"""An architecture that no model family has, built from the layers of ligermodels.

A block has one norm, and its attention and MLP run in parallel. A second head predicts the token
after the next one. The tokens are bytes.
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

import ligermodels.layers as ll

TEXT = Path(__file__).parent / "data" / "persuasion-train.txt"


class ParallelBlock(nn.Module):
    """x + attention(norm(x)) + mlp(norm(x))."""

    def __init__(self, hidden: int, heads: int, kv_heads: int) -> None:
        super().__init__()
        self.norm = ll.RMSNorm(hidden)
        self.attention = ll.Attention(hidden, heads, kv_heads)
        self.mlp = ll.GatedMLP(hidden, 3 * hidden)

    def forward(self, x: Tensor, context: ll.AttentionContext) -> Tensor:
        normed = self.norm(x)
        return x + self.attention(normed, context) + self.mlp(normed)


class TwoAhead(nn.Module):
    """Both heads read the same hidden states; each is a `LossHead` with its own targets."""

    def __init__(
        self, vocab: int = 256, hidden: int = 96, layers: int = 3, heads: int = 6, kv_heads: int = 2
    ) -> None:
        super().__init__()
        self.embed = nn.Embedding(vocab, hidden)
        self.rotary_emb = ll.RotaryEmbedding(hidden // heads)
        self.blocks = nn.ModuleList(ParallelBlock(hidden, heads, kv_heads) for _ in range(layers))
        self.norm = ll.RMSNorm(hidden)
        self.next = ll.LossHead(hidden, vocab, tied_to=self.embed)
        self.next_but_one = ll.LossHead(hidden, vocab)
        for matrix in (p for p in self.parameters() if p.ndim == 2):
            nn.init.normal_(matrix, std=0.02)

    def forward(self, ids: Tensor) -> Tensor:
        """Return the hidden states (batch, seq, hidden) of ids (batch, seq)."""
        context = ll.AttentionContext(
            *self.rotary_emb(torch.arange(ids.shape[1], device=ids.device)[None])
        )
        x = self.embed(ids)
        for block in self.blocks:
            x = block(x, context)
        return self.norm(x)

    def losses(self, ids: Tensor) -> tuple[Tensor, Tensor]:
        """Return the mean loss of the next token, and of the token after it."""
        hidden = self(ids)
        one, two = (F.pad(ids[:, ahead:], (0, ahead), value=-100) for ahead in (1, 2))
        return self.next(hidden, one).loss, self.next_but_one(hidden, two).loss


def train(model: TwoAhead, data: Tensor, steps: int, batch: int = 8, seq: int = 128) -> list[float]:
    """Train on random windows of `data` (n,) int64, and return each step's next-token loss."""
    optimizer = torch.optim.AdamW(model.parameters(), lr=3e-3, betas=(0.9, 0.95))
    generator, history = torch.Generator().manual_seed(0), []
    for step in range(steps):
        starts = torch.randint(len(data) - seq, (batch, 1), generator=generator)
        one, two = model.losses(data[starts + torch.arange(seq)])
        (one + 0.5 * two).backward()
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        optimizer.step()
        optimizer.zero_grad()
        history.append(one.item())
        if step % 25 == 0 or step == steps - 1:
            print(f"step {step:4d}  next {one.item():.3f}  the one after it {two.item():.3f}")
    return history


def main(folder: Path = Path("runs/two_ahead")) -> None:
    torch.manual_seed(0)
    data = torch.tensor(list(TEXT.read_bytes()))
    model, again = TwoAhead(), TwoAhead()
    train(model, data, steps=200)
    folder.mkdir(parents=True, exist_ok=True)
    save_model(model, str(folder / "model.safetensors"))
    load_model(again, folder / "model.safetensors")
    same = torch.equal(model(data[None, :128]), again(data[None, :128]))
    print(f"saved to {folder} and loaded again; the hidden states are the same: {same}")


if __name__ == "__main__":
    main()

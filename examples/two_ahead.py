"""An architecture that no model family has, built from the layers of ligermodels.

A block has one norm, and its attention and MLP run in parallel. A second head predicts the token
after the next one. The tokens are bytes.

    python -m examples.two_ahead --output-dir runs/two_ahead
"""

from pathlib import Path

import torch
import torch.nn.functional as F
from safetensors.torch import load_model, save_model
from torch import Tensor, nn

import ligermodels.layers as ll
from examples.command import TRAIN, call, learn, windows


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
    """Train on random windows of `data` (n,) int64, and return the loss of each step."""

    def loss_of(generator: torch.Generator) -> Tensor:
        one, two = model.losses(windows(data, batch, seq, generator))
        return one + 0.5 * two

    return learn(model, loss_of, steps, every=25)


def main(output_dir: Path, *, max_steps: int = 200) -> None:
    """Train, save, load and compare."""
    torch.manual_seed(0)
    data = torch.tensor(list(TRAIN.read_bytes()))
    model, again = TwoAhead(), TwoAhead()
    train(model, data, max_steps)
    output_dir.mkdir(parents=True, exist_ok=True)
    save_model(model, str(output_dir / "model.safetensors"))
    load_model(again, output_dir / "model.safetensors")
    same = torch.equal(model(data[None, :128]), again(data[None, :128]))
    print(f"saved to {output_dir} and loaded again; the hidden states are the same: {same}")


if __name__ == "__main__":
    call(main, __doc__, model=False)

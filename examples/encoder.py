"""An encoder: every token sees the tokens on both of its sides. It learns to fill in hidden bytes.

In every second layer a token sees only the 16 tokens before it and the 16 after it. Shorter rows
are padded on the right, and the mask hides the padding.

    python -m examples.encoder
"""

import torch
from torch import Tensor, nn

import ligermodels.layers as ll
from examples.command import TRAIN, learn

HIDDEN_BYTE, PADDING = 256, 257


class Encoder(nn.Module):
    """Blocks of the library whose attention is not causal."""

    def __init__(
        self, vocab: int = 258, hidden: int = 96, layers: int = 4, heads: int = 6, window: int = 17
    ) -> None:
        super().__init__()

        def block(index: int) -> ll.DecoderBlock:
            near = None if index % 2 else window
            attention = ll.Attention(hidden, heads, causal=False, sliding_window=near)
            mlp = ll.GatedMLP(hidden, 3 * hidden)
            return ll.DecoderBlock(attention, mlp, ll.RMSNorm(hidden), ll.RMSNorm(hidden))

        self.embed = nn.Embedding(vocab, hidden)
        self.rotary_emb = ll.RotaryEmbedding(hidden // heads)
        self.layers = nn.ModuleList(block(index) for index in range(layers))
        self.norm = ll.RMSNorm(hidden)
        self.head = ll.LossHead(hidden, vocab, tied_to=self.embed)
        for matrix in (p for p in self.parameters() if p.ndim == 2):
            nn.init.normal_(matrix, std=0.02)

    def forward(
        self, ids: Tensor, attention_mask: Tensor | None = None, targets: Tensor | None = None
    ) -> Tensor:
        """Return hidden states (batch, seq, hidden), or with targets the mean loss.

        Args: ids (batch, seq); attention_mask (batch, seq), 0 for padding; targets (batch, seq),
            the byte at each hidden place and -100 at all others.
        """
        seq = ids.shape[1]
        angles = self.rotary_emb(torch.arange(seq, device=ids.device)[None])
        context = ll.AttentionContext(*angles, ll.AttentionMask(seq, padding_mask=attention_mask))
        x, residual = self.embed(ids), None
        for layer in self.layers:
            x, residual = layer(x, residual, context)
        hidden, _ = self.norm(x, residual)
        return hidden if targets is None else self.head(hidden, targets).loss


def batch_of(data: Tensor, generator: torch.Generator, seq: int = 64) -> dict[str, Tensor]:
    """Return random rows of `data` (n,), of which a seventh of the bytes is hidden."""
    starts = torch.randint(len(data) - seq, (16, 1), generator=generator)
    lengths = torch.randint(seq // 2, seq + 1, (16, 1), generator=generator)
    ids, tokens = data[starts + torch.arange(seq)], torch.arange(seq) < lengths
    hide = tokens & (torch.rand(ids.shape, generator=generator) < 1 / 7)
    seen = ids.masked_fill(hide, HIDDEN_BYTE).masked_fill(~tokens, PADDING)
    return {"ids": seen, "attention_mask": tokens, "targets": ids.masked_fill(~hide, -100)}


def train(model: Encoder, data: Tensor, steps: int, seq: int = 64) -> list[float]:
    """Train on `data` (n,) int64, and return the loss of each step."""
    return learn(model, lambda generator: model(**batch_of(data, generator, seq=seq)), steps)


def fill_in(model: Encoder, text: str) -> str:
    """Return the text with the likeliest byte in the place of each "_"."""
    ids = torch.tensor([[HIDDEN_BYTE if c == "_" else ord(c) for c in text]])
    found = model.head.logits(model(ids))[..., :256].argmax(-1)
    return "".join(chr(i) for i in torch.where(ids == HIDDEN_BYTE, found, ids)[0].tolist())


def main(steps: int = 400) -> None:
    torch.manual_seed(0)
    model = Encoder()
    train(model, torch.tensor(list(TRAIN.read_bytes())), steps)
    print(fill_in(model, "She w_s very fond o_ walking, and th_ weather was fine."))


if __name__ == "__main__":
    main()

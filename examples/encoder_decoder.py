"""An encoder-decoder, saved and loaded: it reads letters in any order, and writes them sorted.

    python -m examples.encoder_decoder --output-dir runs/encoder_decoder

The decoder's blocks have attention to the letters so far, and cross-attention to what the encoder
makes of the input. `DecoderModel` gives it losses, generation, saving and loading.
"""

from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

import ligermodels.layers as ll
from examples.command import HERE, call, draw_losses, learn, report
from ligermodels import DecoderModel, LlamaConfig

LETTERS, BEGIN, COUNT = 26, 26, 6


class SorterConfig(LlamaConfig):
    """The fields of Llama. Its model_type tells programs that it is none."""

    model_type: ClassVar[str] = "sorter"


class Block(nn.Module):
    """Attention to earlier tokens, attention to the encoder's output, and an MLP."""

    def __init__(self, hidden: int, heads: int, index: int) -> None:
        super().__init__()
        self.norms = nn.ModuleList(ll.RMSNorm(hidden) for _ in range(3))
        self.self_attn = ll.Attention(hidden, heads, layer_index=index)
        self.cross_attn = ll.CrossAttention(hidden, heads)
        self.mlp = ll.GatedMLP(hidden, 2 * hidden)

    def forward(
        self, x: Tensor, residual: Tensor | None, context: ll.AttentionContext
    ) -> tuple[Tensor, Tensor]:
        x, residual = self.self_attn(ll.pre_norm(self.norms[0], x, residual), context)
        normed = ll.pre_norm(self.norms[1], x, residual)
        x, residual = self.cross_attn(normed, context.memory, context.memory_mask)
        return self.mlp(ll.pre_norm(self.norms[2], x, residual))


class Sorter(DecoderModel):
    """A decoder over an encoder with one layer. Both have the same embedding."""

    config_class = SorterConfig

    def __init__(self, config: SorterConfig) -> None:
        super().__init__(config)
        hidden, heads = config.hidden_size, config.num_attention_heads
        both_ways, mlp = ll.Attention(hidden, heads, causal=False), ll.GatedMLP(hidden, 2 * hidden)
        self.encoder = ll.DecoderBlock(both_ways, mlp, ll.RMSNorm(hidden), ll.RMSNorm(hidden))
        self.build(norm=ll.RMSNorm(hidden))

    def make_block(self, index: int) -> nn.Module:
        """Return a block of the decoder."""
        return Block(self.config.hidden_size, self.config.num_attention_heads, index)

    def encode(self, source: Tensor) -> Tensor:
        """Return what the decoder attends to (batch, letters, hidden)."""
        angles = self.rotary_emb(torch.arange(source.shape[1], device=source.device)[None])
        x, residual = self.encoder(self.embed_tokens(source), None, ll.AttentionContext(*angles))
        return x + residual


def make_model(**sizes: int) -> Sorter:
    """Return a model with random weights. Sizes are fields of the config."""
    sizes = {"hidden_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4} | sizes
    return Sorter(SorterConfig(vocab_size=LETTERS + 1, **sizes, eos_token_id=None))


def examples(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return different letters (count, 6) in random order, and BEGIN with the sorted ones."""
    source = torch.rand(count, LETTERS, generator=generator).argsort(1)[:, :COUNT]
    begin = torch.full((count, 1), BEGIN)
    return source, torch.cat([begin, source.sort(1).values], 1)


def loss_of(model: Sorter, generator: torch.Generator) -> Tensor:
    """Return the loss of 64 random examples."""
    source, target = examples(64, generator)
    return model(target, labels=target, memory=model.encode(source)).loss


@torch.no_grad()
def sort(model: Sorter, source: Tensor) -> Tensor:
    """Return the letters that the model writes for source (batch, 6)."""
    begin = torch.full((len(source), 1), BEGIN, device=source.device)
    return model.generate(begin, memory=model.encode(source), max_new_tokens=COUNT)[:, 1:]


def main(
    output_dir: Path, *, max_steps: int = 400, lr: float = 3e-3, **sizes: int
) -> dict[str, float]:
    """Train, save, load, and return the share of unseen letters that come out sorted."""
    torch.manual_seed(0)
    with HERE:
        model = make_model(**sizes)
    history = learn(model, lambda generator: loss_of(model, generator), max_steps, lr)
    model.save_hf(output_dir / "model")
    again = Sorter.from_hf(output_dir / "model", device=HERE).eval()
    source, target = (each.to(HERE) for each in examples(200, torch.Generator().manual_seed(1)))
    made = sort(again, source)
    same = torch.equal(made, sort(model.eval(), source))
    print(f"saved and loaded again; it writes the same: {same}")
    for row, letters in zip(source[:3].tolist(), made.tolist()):
        print(*("".join(chr(97 + i) for i in word) for word in (row, letters)), sep=" -> ")
    right = float((made == target[:, 1:]).all(1).float().mean())
    draw_losses(output_dir, "an encoder-decoder that sorts letters", {"": history}, "loss")
    return report(output_dir, right=right, same=float(same), loss=history[-1])


if __name__ == "__main__":
    call(main, __doc__, model=False)

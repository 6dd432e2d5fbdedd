"""A vision-language toy: it tells where the bright patch of an image is.

The vision layers see the patches in both directions. Their output is a prefix of a text in a Llama,
also a pretrained one: patches see each other, the text sees them all. Only the text is learned.

    python -m examples.look_and_tell --output-dir runs/look_and_tell
"""

from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn.functional import one_hot, pad, unfold

import ligermodels.layers as ll
from examples.command import HERE, call, draw_images, learn, report
from ligermodels import AutoLiger, LigerLlama, LlamaConfig

SIDE, PATCHES, PATCH = 3, 9, 4  # an image has 3 x 3 patches, and each patch 4 x 4 pixels


def tiny_llama() -> LigerLlama:
    """Return a Llama with random weights, whose tokens are bytes."""
    sizes = {"vocab_size": 128, "hidden_size": 64, "intermediate_size": 128}
    counts = {"num_hidden_layers": 2, "num_attention_heads": 4}
    return LigerLlama(LlamaConfig(**sizes, **counts, initializer_range=0.2, eos_token_id=None))


class LookAndTell(nn.Module):
    """Two vision layers, and a language model that sees what they return."""

    def __init__(self, language: LigerLlama) -> None:
        super().__init__()
        hidden, heads = language.config.hidden_size, 4

        def block() -> ll.DecoderBlock:
            attention = ll.Attention(hidden, heads, causal=False)
            mlp = ll.GatedMLP(hidden, 2 * hidden)
            return ll.DecoderBlock(attention, mlp, ll.RMSNorm(hidden), ll.RMSNorm(hidden))

        self.patch_proj = nn.Linear(PATCH * PATCH, hidden)
        self.embed_places = nn.Embedding(PATCHES, hidden)
        self.rotary_emb = ll.RotaryEmbedding(hidden // heads)
        self.layers = nn.ModuleList(block() for _ in range(2))
        self.norm = ll.RMSNorm(hidden)
        self.language = language

    def look(self, images: Tensor, text: Tensor) -> dict[str, Tensor]:
        """Return the inputs of `language` for images (batch, 12, 12) and text (batch, seq)."""
        patches = unfold(images[:, None], PATCH, stride=PATCH).transpose(1, 2)
        places = torch.arange(PATCHES, device=images.device)
        context = ll.AttentionContext(*self.rotary_emb(places[None]))
        x, residual = self.patch_proj(patches) + self.embed_places(places), None
        for layer in self.layers:
            x, residual = layer(x, residual, context)
        embeds = torch.cat([self.norm(x, residual)[0], self.language.embed_tokens(text)], 1)
        return {"inputs_embeds": embeds, "prefix_lengths": places[-1:] + 1}

    def forward(self, images: Tensor, text: Tensor) -> Tensor:
        """Return the mean loss of the text (batch, seq) for its images (batch, 12, 12)."""
        labels = pad(text, (PATCHES, 0), value=-100)
        return self.language(labels=labels, **self.look(images, text)).loss

    def tell(self, images: Tensor, begin: str = "row ", count: int = 10) -> list[str]:
        """Return for each image the text that begins so, and `count` bytes more."""
        text = torch.tensor([list(begin.encode())] * len(images), device=images.device)
        ids = self.language.generate(max_new_tokens=count, **self.look(images, text))
        return [begin + bytes(row).decode() for row in ids.tolist()]


def make_examples(count: int, generator: torch.Generator) -> tuple[Tensor, Tensor]:
    """Return noisy images (count, 12, 12), and bytes (count, 14) such as "row 2 column 0"."""
    place = torch.randint(PATCHES, (count,), generator=generator)
    bright = 4.0 * one_hot(place, PATCHES).view(-1, SIDE, SIDE)
    images = bright.repeat_interleave(PATCH, 1).repeat_interleave(PATCH, 2)
    texts = [list(f"row {at // SIDE} column {at % SIDE}".encode()) for at in place.tolist()]
    return images + 0.3 * torch.randn(images.shape, generator=generator), torch.tensor(texts)


def train(model: LookAndTell, steps: int, batch: int = 16, lr: float = 3e-3) -> list[float]:
    """Train on random images, and return the loss of each step."""
    return learn(model, lambda generator: model(*make_examples(batch, generator)), steps, lr)


def main(output_dir: Path, *, language: str = "", max_steps: int = 300) -> dict[str, float]:
    """Train, with a tiny language model or a given one; return the share of images told right."""
    torch.manual_seed(0)
    llama = AutoLiger.from_hf(language, dtype=torch.float32) if language else tiny_llama()
    model = LookAndTell(llama).to(HERE)
    history = train(model, max_steps, *((64, 2e-5) if language else ()))
    images, texts = make_examples(100, torch.Generator().manual_seed(1))
    said = model.tell(images.to(HERE))
    right = sum(bytes(text).decode() == each for text, each in zip(texts.tolist(), said))
    draw_images(output_dir, images[:4], said[:4])
    return report(output_dir, right=right / len(said), loss=history[-1], steps=max_steps)


if __name__ == "__main__":
    call(main, __doc__, model=False)

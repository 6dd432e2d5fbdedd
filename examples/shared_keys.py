"""A decoder with windows whose layers share keys and values, saved and loaded with its config.

Every second layer takes the keys and values of the layer before it, so that the cache of generation
is half as large. All layers but the last pair see only the last tokens. The tokens are bytes.

    python -m examples.shared_keys --output-dir runs/shared_keys
"""

from dataclasses import dataclass
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

import ligermodels.layers as ll
from examples.command import HERE, TRAIN, call, draw_losses, learn, report, windows
from ligermodels import DecoderModel, LlamaConfig, MemoryPlan


@dataclass(kw_only=True)
class SharedKeysConfig(LlamaConfig):
    """The fields of Llama, and the window. Its model_type tells programs that it is no Llama."""

    model_type: ClassVar[str] = "shared_keys"

    vocab_size: int = 256
    hidden_size: int = 96
    intermediate_size: int = 256
    num_hidden_layers: int = 6
    num_attention_heads: int = 6
    num_key_value_heads: int = 2
    tie_word_embeddings: bool = True
    eos_token_id: int | None = None
    sliding_window: int = 32


class SharedKeys(DecoderModel):
    """`DecoderModel` provides losses, packing, generation, memory plans, saving and loading."""

    config_class = SharedKeysConfig
    config: SharedKeysConfig

    def __init__(self, config: SharedKeysConfig) -> None:
        super().__init__(config)
        hidden, eps, count = config.hidden_size, config.rms_norm_eps, config.num_hidden_layers
        heads = (config.num_attention_heads, config.num_key_value_heads, config.head_dim)

        def block(index: int) -> nn.Module:
            attention = ll.Attention(
                *(hidden, *heads),
                sliding_window=config.sliding_window if index < count - 2 else None,
                layer_index=index,
                shares_kv=index % 2 == 0,
                kv_from=index - 1 if index % 2 else None,
            )
            mlp = ll.GatedMLP(hidden, config.intermediate_size)
            return ll.DecoderBlock(attention, mlp, ll.RMSNorm(hidden, eps), ll.RMSNorm(hidden, eps))

        self.embed_tokens = nn.Embedding(config.vocab_size, hidden)
        self.rotary_emb = ll.RotaryEmbedding(config.head_dim, config.rope_theta)
        self.layers = nn.ModuleList(block(index) for index in range(count))
        self.norm = ll.RMSNorm(hidden, eps)
        tied_to = self.embed_tokens if config.tie_word_embeddings else None
        self.head = ll.LossHead(hidden, config.vocab_size, tied_to=tied_to)
        self.initialize_weights()


def train(
    model: SharedKeys, data: Tensor, steps: int, seq: int = 128, lr: float = 3e-3
) -> list[float]:
    """Train on random windows of `data` (n,) int64, and return the loss of each step."""

    def loss_of(generator: torch.Generator) -> Tensor:
        ids = windows(data, 8, seq, generator)
        return model(ids, labels=ids).loss

    return learn(model, loss_of, steps, lr)


def main(
    output_dir: Path, *, max_steps: int = 200, seq: int = 128, lr: float = 3e-3, **sizes: int
) -> dict[str, float]:
    """Train, save, load, and let the loaded model write. Sizes are fields of the config."""
    torch.manual_seed(0)
    with HERE:
        model = SharedKeys(SharedKeysConfig(**sizes))
    model.set_memory_plan(MemoryPlan.uniform(len(model.layers), "attention"))
    history = train(model, torch.tensor([*TRAIN.read_bytes()], device=HERE), max_steps, seq, lr)
    model.save_hf(output_dir / "model")
    again = SharedKeys.from_hf(output_dir / "model", device=HERE)
    prompt = torch.tensor([list(b"Captain Wentworth ")], device=HERE)
    print(bytes(again.generate(prompt, max_new_tokens=100)[0].tolist()).decode("latin-1"))
    draw_losses(output_dir, "a decoder of one's own", {"": history}, "loss (nats per byte)")
    return report(output_dir, first=history[0], last=history[-1], steps=max_steps)


if __name__ == "__main__":
    call(main, __doc__, model=False)

"""A Llama with layers of other families, initialised from a pretrained Llama checkpoint.

    python -m examples.mixed build/smollm2 --output-dir runs/mixed

Every second layer has the attention of Gemma 2, with a window and a soft cap on the scores. Some
of the other layers norm their queries and keys, as Qwen3 does. Some have Gemma's sandwich norms.
The head caps its logits. The script loads all parameters that the checkpoint has, and lists those
that it does not have. A short fine-tune on a novel then adapts the old and the new parameters to
each other.
"""

from dataclasses import dataclass, fields
from pathlib import Path
from typing import ClassVar

import torch
from torch import Tensor, nn

import ligermodels.layers as ll
from examples.command import DATA, call, learn, windows
from ligermodels import DecoderModel, LlamaConfig, LoadReport, Tokenizer, load_pretrained

PROMPT = "Anne was silent for a moment. Captain Wentworth"


@dataclass(kw_only=True)
class MixedConfig(LlamaConfig):
    """The fields of Llama, and the fields of the parts that Llama does not have."""

    model_type: ClassVar[str] = (
        "mixed"  # not "llama", because other programs would compute another model
    )

    sliding_window: int = 128
    attn_logit_softcapping: float = 50.0
    final_logit_softcapping: float = 30.0

    @property
    def sliding_windows(self) -> list[int | None]:
        """Every second layer has a window; generation keeps only that many of its keys."""
        return [None if i % 2 else self.sliding_window for i in range(self.num_hidden_layers)]

    def has_head_norms(self, layer: int) -> bool:
        return layer % 6 == 3

    def has_sandwich_norms(self, layer: int) -> bool:
        return layer % 6 == 5


def mixed_block(config: MixedConfig, index: int) -> nn.Module:
    def norm(size: int = config.hidden_size) -> ll.RMSNorm:
        return ll.RMSNorm(size, config.rms_norm_eps)

    window = config.sliding_windows[index]
    head_norms = config.has_head_norms(index)
    attention = ll.Attention(
        config.hidden_size,
        config.num_attention_heads,
        config.num_key_value_heads,
        config.head_dim,
        bias=config.attention_bias,
        sliding_window=window,
        softcap=None if window is None else config.attn_logit_softcapping,
        q_norm=norm(config.head_dim) if head_norms else None,
        k_norm=norm(config.head_dim) if head_norms else None,
        layer_index=index,
    )
    mlp = ll.GatedMLP(config.hidden_size, config.intermediate_size, bias=config.mlp_bias)
    if config.has_sandwich_norms(index):
        return ll.SandwichBlock(attention, mlp, norm(), norm(), norm(), norm())
    return ll.DecoderBlock(attention, mlp, norm(), norm())


class Mixed(DecoderModel):
    """`DecoderModel` provides losses, packing, generation and activation checkpointing."""

    config_class = MixedConfig
    config: MixedConfig

    def __init__(self, config: MixedConfig) -> None:
        super().__init__(config)
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)
        self.rotary_emb = ll.RotaryEmbedding(
            config.head_dim, config.rope_theta, config.max_position_embeddings, config.rope_scaling
        )
        self.layers = nn.ModuleList(mixed_block(config, i) for i in range(config.num_hidden_layers))
        self.norm = ll.RMSNorm(config.hidden_size, config.rms_norm_eps)
        self.head = ll.LossHead(
            config.hidden_size,
            config.vocab_size,
            tied_to=self.embed_tokens if config.tie_word_embeddings else None,
            softcap=config.final_logit_softcapping,
        )
        self.initialize_weights()


def start(source: str | Path, **changes: int | float) -> tuple[Mixed, LoadReport]:
    """Return the model with the parameters of a Llama checkpoint, and the report of the load."""
    llama = LlamaConfig.from_hf(source)
    config = MixedConfig(**{f.name: getattr(llama, f.name) for f in fields(llama)}, **changes)
    model = Mixed(config)

    def rename(name: str) -> str:
        """Llama's post_attention_layernorm is before the MLP: rename it in a sandwich block."""
        if name.endswith(".post_attention_layernorm.weight"):
            if config.has_sandwich_norms(int(name.split(".")[1])):
                return name.replace("post_attention", "pre_feedforward")
        return name

    return model, load_pretrained(model, source, rename=rename)


@torch.no_grad()
def fit_new_norms(model: Mixed, report: LoadReport, ids: Tensor) -> None:
    """Set the weights of the new norms after the sub-layers to the scale of their inputs.

    With a weight of 1, these norms would add much larger values to the residual stream than the
    pretrained layers expect.
    """

    def fit(norm: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        norm.weight.fill_(inputs[0].square().mean(-1).sqrt().median())

    new = [name.removesuffix(".weight") for name in report.new if "layernorm" in name]
    hooks = [model.get_submodule(name).register_forward_pre_hook(fit) for name in new]
    model(ids)
    for hook in hooks:
        hook.remove()


@torch.no_grad()
def held_out_loss(model: Mixed, data: Tensor, rows: int = 8, seq: int = 256) -> float:
    """Return the mean next-token loss over the first `rows` rows of `data` (n,)."""
    losses = [model.loss(row[None], row[None]).item() for row in data[: rows * seq].split(seq)]
    return sum(losses) / len(losses)


def train(
    model: Mixed,
    data: Tensor,
    steps: int,
    batch: int = 2,
    seq: int = 256,
    learning_rate: float = 1e-4,
) -> list[float]:
    """Train on random windows of `data` (n,), and return the loss of each step."""

    def loss_of(generator: torch.Generator) -> Tensor:
        ids = windows(data, batch, seq, generator)
        return model(ids, labels=ids).loss

    return learn(model, loss_of, steps, learning_rate, every=10)


def main(model: str | Path, output_dir: Path, *, steps: int = 40) -> None:
    """Start from the checkpoint, train, save, load and compare."""
    source, folder = model, output_dir
    torch.manual_seed(0)
    tokenizer = Tokenizer.from_hf(source)
    text, heldout = (
        torch.tensor(tokenizer.encode((DATA / f"persuasion-{part}.txt").read_text("utf-8")))
        for part in ("train", "heldout")
    )
    mixed, report = start(source)
    print(report)
    print(f"held-out loss {held_out_loss(mixed, heldout):.3f}, the new norms have weight 1")
    fit_new_norms(mixed, report, text[None, :1024])
    print(f"held-out loss {held_out_loss(mixed, heldout):.3f}, the new norms are fitted")
    for op, choice in mixed.kernels().items():
        print(f"  {op}: {choice}")

    mixed.activation_checkpointing_enable()
    train(mixed, text, steps)
    print(f"held-out loss {held_out_loss(mixed, heldout):.3f} after {steps} steps")
    prompt = torch.tensor([tokenizer.encode(PROMPT)])
    print(tokenizer.decode(mixed.generate(prompt, max_new_tokens=80)[0]))

    mixed.save_hf(folder)
    again = Mixed.from_hf(folder)
    same = torch.equal(mixed(prompt), again(prompt))
    print(f"saved to {folder} and loaded again; the hidden states are the same: {same}")


if __name__ == "__main__":
    call(main, __doc__)

"""Train heads that draft the tokens after the next one, and generate with them.

    python -m examples.medusa build/smollm2 --output-dir runs/medusa

The heads are Medusa's (Cai et al. 2024). What trains them is a loss of one's own, which the command
line has with --import examples.medusa. The heads learn from what the model itself writes after the
beginnings of sentences of a novel. The run prints how many tokens a forward pass gives, for
sentences that the heads have not seen, and checks that they are the tokens of greedy generation.
"""

import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from examples.command import DATA, call, tune, write_lines
from ligermodels import AutoLiger, DecoderModel, Tokenizer
from ligermodels.heads.medusa import DraftOutput, MedusaHeads
from ligermodels.heads.medusa_file import load_heads, save_heads
from ligermodels.layers.attention_mask import document_ids_from_positions
from ligermodels.losses import LossOutput, Mean
from ligermodels.training.config import FinetuneConfig
from ligermodels.training.losses import Loss
from ligermodels.training.objectives import Call, Objective
from ligermodels.training.options import option
from ligermodels.training.packing import Batch


class MedusaModel(nn.Module):
    """A body with `MedusaHeads`, whose forward returns the loss, also through DDP and FSDP2.

    Args:
        model: the body.
        heads: on its head.
        freeze_body: Medusa's first stage: the layers of the body keep nothing and get no gradient.
            Freeze the parameters too, `model.requires_grad_(False)`, before DDP or an optimizer
            gets them: a projection that the heads share would learn, and DDP would wait for the
            others. Without it, the second stage: the loss is that of the body, with what its layers
            add to it, and heads_weight times the heads'.
        heads_weight: of the heads' loss in the second stage (0.2 in the paper's code).
    """

    def __init__(
        self,
        model: DecoderModel,
        heads: MedusaHeads,
        *,
        freeze_body: bool = True,
        heads_weight: float = 0.2,
    ) -> None:
        super().__init__()
        self.model, self.heads = model, heads
        self.freeze_body, self.heads_weight = freeze_body, heads_weight

    def forward(
        self,
        input_ids: Tensor,
        labels: Tensor,
        *,
        position_ids: Tensor | None = None,
        **options: Any,
    ) -> DraftOutput:
        """Return the loss of the stage, and of each head, for (batch, seq) ids and labels.

        Args: position_ids: as in `DecoderModel.forward`: no head predicts a token of another
            document; options: as in `MedusaHeads.forward`.
        """
        documents = None if position_ids is None else document_ids_from_positions(position_ids)
        if self.freeze_body:
            with torch.no_grad():
                hidden = self.model(input_ids, position_ids=position_ids)
            return self.heads(hidden, labels, documents, **options)
        own = self.model(
            input_ids, labels, position_ids=position_ids, return_hidden=True, **options
        )
        out = self.heads(own.hidden, labels, documents, **options)
        return out._replace(loss=own.loss + self.heads_weight * out.loss)


@dataclass(kw_only=True)
class Medusa(Loss, name="medusa"):
    """Heads for the tokens after the next one: data as for sft, in one process.

    Attributes:
        medusa_heads: train so many heads, which are exported with the model
        medusa_stage: 1: the model is frozen, and only its heads learn; 2: both learn, from the
            heads that the folder of the model holds, if there are any
        medusa_tied: the heads share the model's projection instead of each having its own
    """

    packed = True

    medusa_heads: int = option(3, at_least=1)
    medusa_stage: int = option(1, at_least=1, at_most=2)
    medusa_tied: bool = option(False)

    def objective(self, config: FinetuneConfig) -> Objective:
        return MedusaObjective(config)


class MedusaObjective(Objective):
    """The losses of the heads, and in the second stage that of the next token."""

    shown = ("eval_head_1_loss", "loss of the first head")
    heads: MedusaHeads

    def module(self, model: DecoderModel) -> nn.Module:
        """Return the model with its heads, of which only the heads learn in the first stage."""
        options, folder = self.options, model.source.folder
        freezes = options.medusa_stage == 1
        heads = None if freezes or folder is None else load_heads(model, folder)
        if heads is None:
            heads = MedusaHeads(model.head, options.medusa_heads, tied=options.medusa_tied)
        self.heads = heads
        model.requires_grad_(not freezes)
        return MedusaModel(model, heads, freeze_body=freezes)

    def loss(self, call: Call, batch: Batch, normalizer: Tensor, **_: Tensor) -> LossOutput:
        """Return the loss of the stage, and as metrics that of each head."""
        out: Any = call(batch, normalizer=normalizer)  # a DraftOutput
        # A head's loss was divided by the normalizer of the step, and counts few targets less.
        metrics = {
            f"head_{i}_loss": Mean(loss * normalizer, count)
            for i, (loss, count) in enumerate(zip(out.losses, out.num_valid), 1)
        }
        return LossOutput(out.loss, metrics)

    def export(self, folder: Path) -> None:
        """Write the heads beside the model, where `generate` finds them."""
        save_heads(self.heads, folder)


def beginnings(text: Path, count: int, seed: int = 0) -> list[str]:
    """Return the first eight words of some sentences."""
    sentences = text.read_text(encoding="utf-8").replace("\n", " ").split(". ")
    starts = [" ".join(each.split()[:8]) for each in sentences if len(each.split()) >= 12]
    return random.Random(seed).sample(starts, count)


def continued(
    model: DecoderModel, tokenizer: Tokenizer, prompts: list[str], new: int, batch_size: int = 64
) -> Iterator[dict[str, str]]:
    """Yield each prompt with the text that the model writes after it."""
    for start in range(0, len(prompts), batch_size):
        ids = [tokenizer.encode(prompt) for prompt in prompts[start : start + batch_size]]
        rows = model.generate(ids, max_new_tokens=new, repetition_penalty=1.0)
        for prompt, row in zip(prompts[start:], rows[:, -new:].tolist()):
            yield {"prompt": prompt, "completion": tokenizer.decode(row)}


def tokens_per_forward(
    model: DecoderModel, heads: MedusaHeads, tokenizer: Tokenizer, prompts: list[str], new: int
) -> tuple[float, float]:
    """Return how many tokens a pass gives, and the share of the tokens that are the greedy ones."""
    passes: list[torch.Tensor] = []
    same, total = 0, 0
    options = {"max_new_tokens": new, "repetition_penalty": 1.0}
    for prompt in prompts:
        ids = tokenizer.encode(prompt)
        made = model.generate([ids], heads=heads, callback=passes.append, **options)
        greedy = model.generate([ids], **options)
        length = min(made.shape[1], greedy.shape[1])
        same += int((made[:, len(ids) : length] == greedy[:, len(ids) : length]).sum())
        total += length - len(ids)
    return len(torch.cat(passes)) / len(passes), same / total


def main(
    model: str,
    output_dir: Path,
    *,
    heads: int = 3,
    prompts: int = 1024,
    held_out: int = 16,
    new: int = 96,
    **options: object,
) -> float:
    device = "cuda" if torch.cuda.is_available() else "cpu"
    dtype = torch.bfloat16 if device == "cuda" else torch.float32
    tokenizer = Tokenizer.from_hf(model)
    body = AutoLiger.from_hf(model, dtype=dtype, device=device).eval()
    files = {name: output_dir / f"{name}.jsonl" for name in ("train", "heldout")}
    for name, count in (("train", prompts), ("heldout", held_out)):
        starts = beginnings(DATA / f"persuasion-{name}.txt", count)
        write_lines(files[name], continued(body, tokenizer, starts, new))
    settings: dict = {"batch_size": 16, "learning_rate": 1e-3, "seq_len": 512, "max_steps": 200}
    # A frozen model keeps nothing for backward that a memory plan could save.
    settings |= {"loss": "medusa", "medusa_heads": heads, "memory": "off"} | options
    result = tune(model, output_dir / "run", *files.values(), **settings)
    # In float32, because a pass over several tokens rounds in another way than one over a token.
    exact = AutoLiger.from_hf(result.model_dir, dtype=torch.float32, device=device).eval()
    trained = load_heads(exact, result.model_dir)
    assert trained is not None
    unseen = beginnings(DATA / "persuasion-heldout.txt", held_out)
    rate, same = tokens_per_forward(exact, trained, tokenizer, unseen, new)
    for i in range(1, heads + 1):
        key = f"eval_head_{i}_loss"
        print(f"{key}: {result.eval_before[key]:.3f} -> {result.eval_after[key]:.3f}")
    print(f"tokens per forward: {rate:.2f}; {same:.1%} of them are those of greedy generation")
    return rate


if __name__ == "__main__":
    call(main, __doc__)

"""Distillation: the model learns the next-token distribution of another one, its teacher."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from ligermodels.adapters.published import base_of
from ligermodels.converters.files import ADAPTER_CONFIG_NAME, is_adapter, read_json
from ligermodels.converters.hub import resolve
from ligermodels.errors import CheckpointError, ConfigError, short_repr
from ligermodels.layers.loss_head import Teacher
from ligermodels.losses import LossOutput, Mean
from ligermodels.models.auto import AutoLiger, tokenizer_folder
from ligermodels.models.base import DecoderModel
from ligermodels.text.tokenizer import Tokenizer
from ligermodels.training.losses import Distillation
from ligermodels.training.model import file_hashes
from ligermodels.training.objectives import Call, Objective
from ligermodels.training.packing import Batch
from ligermodels.training.run_dir import fingerprint


class TeacherModel(nn.Module):
    """A frozen model that is called like a model with labels, and returns a `Teacher`."""

    def __init__(self, model: DecoderModel, *, beta: float, temperature: float, share: float):
        super().__init__()
        self.model = model.requires_grad_(False).eval()
        self.settings = {"beta": beta, "temperature": temperature, "share": share}

    @torch.no_grad()
    def forward(
        self,
        input_ids: Tensor,
        *,
        position_ids: Tensor | None = None,
        cu_seqlens: Tensor | None = None,
        max_seqlen: int | None = None,
        **_: Any,
    ) -> Teacher:
        """Return the hidden states of (batch, seq) tokens with the head; labels are not read."""
        documents = {"cu_seqlens": cu_seqlens, "max_seqlen": max_seqlen}
        hidden = self.model(input_ids, position_ids=position_ids, **documents)
        weight, bias, softcap, logit_scale = self.model.head.plain_parameters(hidden, "the teacher")
        return Teacher(hidden, weight, bias, softcap, logit_scale, **self.settings)


class TaughtModel(nn.Module):
    """A model and its teacher: what a step runs, for the memory plan."""

    def __init__(self, model: nn.Module, teacher: TeacherModel) -> None:
        super().__init__()
        self.model, self.teacher = model, teacher

    def forward(self, input_ids: Tensor, **inputs: Any) -> Any:
        """Return the head's output."""
        return self.model(input_ids, teacher=self.teacher(input_ids, **inputs), **inputs)


class DistillationObjective(Objective):
    """The divergence from a teacher at every target, and if asked for, the loss of the target."""

    options: Distillation
    shown = ("eval_loss", "loss")
    source: Path
    teacher: TeacherModel

    def open(self, tokenizer: Tokenizer) -> None:
        """Find the teacher, and check that it has the same tokens."""
        self.source = Path(resolve(str(self.options.teacher)))
        _check_tokens(self.source, Tokenizer.from_hf(tokenizer_folder(self.source)), tokenizer)

    def load(self, model: DecoderModel) -> int:
        """Load the teacher: in bfloat16 on a GPU, in float32 on a CPU.

        Raises:
            CheckpointError, ConfigError: it cannot be loaded, or has a smaller vocabulary.
        """
        options, device = self.options, next(model.parameters()).device
        dtype = torch.bfloat16 if device.type == "cuda" else torch.float32
        teacher = AutoLiger.from_hf(self.source, dtype=dtype, device=device)
        if teacher.head.vocab_size < model.head.vocab_size:
            raise ConfigError(
                f"teacher: {self.source} has a vocabulary of {teacher.head.vocab_size} classes and "
                f"{self.config.model.path} one of {model.head.vocab_size}; the teacher must have "
                "as many"
            )
        self.teacher = TeacherModel(
            teacher,
            beta=options.beta,
            temperature=options.temperature,
            share=options.distill_weight,
        )
        return 0  # `planned_step` has it

    def planned_step(self, trained: nn.Module) -> nn.Module:
        """Return the model with its teacher."""
        return TaughtModel(trained, self.teacher)

    def hashes(self) -> dict[str, str]:
        """Return a hash of the teacher's files, and of its base's where it is an adapter."""
        found = file_hashes(self.source)
        if is_adapter(self.source):
            where = self.source / ADAPTER_CONFIG_NAME
            base = file_hashes(base_of(where, read_json(where, CheckpointError)))
            found |= {f"base/{name}": value for name, value in base.items()}
        return {"teacher": fingerprint(found)}

    def loss(self, call: Call, batch: Batch, normalizer: Tensor, **_: Tensor) -> LossOutput:
        """Return the loss of a batch; an evaluation also measures that of the next token."""
        teacher: Any = call(batch, model=self.teacher)  # a Teacher
        loss = call(batch, teacher=teacher, normalizer=normalizer).loss
        if torch.is_grad_enabled():
            return LossOutput(loss, {})
        own = call(batch, reduction="sum")
        return LossOutput(loss, {"nll": Mean(own.loss.detach(), own.num_valid)})


def _check_tokens(source: Path, theirs: Tokenizer, ours: Tokenizer) -> None:
    """Raise ConfigError unless the teacher's tokenizer gives our tokens the same ids.

    It may have more tokens. Those are left out of its distributions.
    """
    for index in range(len(ours)):
        token, found = ours.id_to_token(index), theirs.id_to_token(index)
        if token is not None and token != found:
            raise ConfigError(
                f"teacher: {source} has another vocabulary: its token {index} is "
                f"{short_repr(found)}, and the model's is {short_repr(token)}; take a teacher with "
                "the model's tokenizer"
            )

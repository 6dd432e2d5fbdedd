"""Classification, regression and reward models: a family's body with a head on the last token.

`classifier_class(LigerLlama)` is the counterpart of transformers' LlamaForSequenceClassification.
It is a subclass of the family: memory plans, adapters, loading and saving work as for the family.
"""

from __future__ import annotations

import copy
import dataclasses
import os
from functools import cache
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from typing_extensions import Self

from ligermodels.converters import hub
from ligermodels.converters.hf_config import text_config, to_hf
from ligermodels.converters.save_dir import read_one_version
from ligermodels.converters.weight_map import WeightMap, packed_entry
from ligermodels.errors import ConfigError, short_repr
from ligermodels.models.auto import family_of
from ligermodels.models.base import DecoderModel
from ligermodels.models.config import ModelConfig

PROBLEM_TYPES = ("regression", "single_label_classification", "multi_label_classification")


class ClassifierOutput(NamedTuple):
    """The output of a `SequenceClassifier`."""

    loss: Tensor | None  # scalar, None without labels
    logits: Tensor  # (batch, num_labels)


class ClassifierHead(nn.Module):
    """A linear that gives a number for each label, `score`, and the loss of these numbers.

    Args: config: of the body; `num_labels` and `classification_loss` say what its extra keys mean.
    """

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        self.problem_type = config.extra.get("problem_type")
        self.score = nn.Linear(config.hidden_size, num_labels(config), bias=False)
        nn.init.normal_(self.score.weight, std=config.initializer_range)

    def forward(self, hidden: Tensor, labels: Tensor | None = None) -> ClassifierOutput:
        """Return the logits (..., num_labels) of hidden (..., hidden), and with labels the loss."""
        logits = self.score(hidden)
        if labels is None:
            return ClassifierOutput(None, logits)
        return ClassifierOutput(classification_loss(logits, labels, self.problem_type), logits)


class SequenceClassifier(DecoderModel):
    """The body of a decoder with a `ClassifierHead` on the last token of each row.

    The class of a family comes from `classifier_class`; `LigerClassifier.from_hf` finds it. The
    number of labels is that of `config.extra["id2label"]`, 2 by default. A reward model has one.
    """

    # What HF's Trainer asks for: labels belong to rows, and the loss is the mean of a batch, which
    # Trainer then averages over the micro-batches of a step.
    loss_type = "ForSequenceClassification"
    accepts_loss_kwargs = False

    head: ClassifierHead  # type: ignore[assignment]

    def __init__(self, config: ModelConfig) -> None:
        super().__init__(config)
        self.head = ClassifierHead(config)

    @classmethod
    def from_model(
        cls,
        model: DecoderModel,
        num_labels: int = 2,
        *,
        id2label: dict[int, str] | None = None,
        problem_type: str | None = None,
    ) -> Self:
        """Return a classifier with the body of a language model, and a random head.

        The body's modules are those of the model, not copies.

        Args:
            num_labels: how many numbers the head gives for a row; 1 for rewards.
            id2label: the name of each label, which an export holds.
            problem_type: one of `PROBLEM_TYPES`. By default it is chosen as in transformers: see
                `classification_loss`.
        Raises:
            ConfigError: an argument is wrong, or the class is not that of the model's family.
        """
        if not issubclass(cls, type(model)):
            raise ConfigError(
                f"{cls.__name__} is no classifier of {type(model).__name__}; make it with "
                f"classifier_class({type(model).__name__})"
            )
        names = id2label or {i: f"LABEL_{i}" for i in range(num_labels)}
        if sorted(names) != list(range(len(names))) or len(names) != (num_labels or 0):
            raise ConfigError(f"id2label: expected names of the labels 0 to {num_labels - 1}")
        _check_problem(problem_type)
        config = copy.deepcopy(model.config)
        config.extra = text_config(to_hf(config), type(config)) | {
            "architectures": [_architecture(config)],
            "id2label": {str(i): name for i, name in names.items()},
            "label2id": {name: i for i, name in names.items()},
            **({} if problem_type is None else {"problem_type": problem_type}),
        }
        with torch.device("meta"):
            classifier = cls(config)
        for name, module in model.named_children():
            if name != "head":
                setattr(classifier, name, module)
        classifier.head = ClassifierHead(config).to(model.embed_tokens.weight)
        classifier.source = model.source.of_text_model()
        return classifier.train(model.training)

    def forward(  # type: ignore[override]
        self,
        input_ids: Tensor | None = None,
        labels: Tensor | None = None,
        *,
        attention_mask: Tensor | None = None,
        **inputs: Any,
    ) -> ClassifierOutput:
        """Return the logits of each row, and with labels the loss.

        Args:
            input_ids: (batch, seq) int64, padded on either side.
            labels: (batch) int64 for one label of each row, (batch, num_labels) float for several,
                (batch) or (batch, num_labels) float for a regression.
            attention_mask: (batch, seq), 0 for padding.
            inputs: position_ids and other arguments of `DecoderModel.forward`.
        Raises: what `DecoderModel.forward` raises.
        """
        hidden = super().forward(input_ids, attention_mask=attention_mask, **inputs)
        assert isinstance(hidden, Tensor)
        last = last_tokens(hidden, input_ids, self.config.pad_token_id, attention_mask)
        found: ClassifierOutput = self.head(
            hidden[torch.arange(len(hidden), device=hidden.device), last], labels
        )
        return found

    def meta_labels(self, batch: int, seq: int) -> Tensor:
        """Return labels of rows without data, for the simulation of a step."""
        count, kind = num_labels(self.config), self.head.problem_type
        if kind is None:
            kind = PROBLEM_TYPES[1 if count > 1 else 0]
        if kind == "single_label_classification":
            return torch.empty(batch, dtype=torch.int64, device="meta")
        return torch.empty(batch, count, device="meta")

    def token_scores(self, input_ids: Tensor, **inputs: Any) -> Tensor:
        """Return the head's numbers at every token, (batch, seq, num_labels): process rewards."""
        scores: Tensor = self.head(super().forward(input_ids, **inputs)).logits
        return scores

    def generate(self, *_: Any, **__: Any) -> Tensor:
        """Raise ConfigError: there is no head that could choose a token."""
        raise ConfigError(f"{type(self).__name__} generates no text; load the language model")


@cache
def classifier_class(family: type[DecoderModel]) -> type[SequenceClassifier]:
    """Return the classifier of a family, such as that of `LigerLlama`."""

    def weight_map(config: ModelConfig) -> WeightMap:
        decoder = family.weight_map(config)
        body = tuple(entry for entry in decoder if not entry.name.startswith("head."))
        source = "score.weight", num_labels(config)
        score = packed_entry("head.score.weight", (config.hidden_size,), source)
        return dataclasses.replace(decoder, entries=(*body, score), aliases={})

    name = f"{family.__name__}ForSequenceClassification"
    members = {"weight_map": staticmethod(weight_map), "__module__": __name__}
    return type(name, (SequenceClassifier, family), members)


class LigerClassifier:
    """Load a ...ForSequenceClassification checkpoint with the class of its family."""

    @staticmethod
    def from_hf(
        path: str | os.PathLike[str], *, revision: str | None = None, **options: Any
    ) -> SequenceClassifier:
        """Load a local folder or hub id. See `DecoderModel.from_hf` for arguments and errors."""
        folder = hub.resolve(path, revision=revision, **hub.split_hub_options(options))
        family = read_one_version(folder, family_of)
        return classifier_class(family).from_hf(folder, **options)  # type: ignore[arg-type]


def num_labels(config: ModelConfig) -> int:
    """Return the number of labels that a config has, 2 by default, as in transformers.

    Raises:
        ConfigError: id2label is no object with a name for each label, or the problem is unknown.
    """
    names = config.extra.get("id2label")
    _check_problem(config.extra.get("problem_type"))
    if names is None:
        return 2
    if not isinstance(names, dict) or not names:
        raise ConfigError(
            f"id2label: expected an object with a name for each label: {short_repr(names)}"
        )
    return len(names)


def last_tokens(
    hidden: Tensor,
    input_ids: Tensor | None,
    pad_token_id: int | None,
    attention_mask: Tensor | None = None,
) -> Tensor:
    """Return the index of the last token of each row that is no padding: (batch) int64.

    As in transformers, padding is what equals pad_token_id. Without one, or without ids, it is what
    the attention_mask (batch, seq) hides. A row of padding alone gives 0.
    """
    if input_ids is not None and pad_token_id is not None:
        return last_valid(input_ids != pad_token_id)
    if attention_mask is not None:
        return last_valid(attention_mask)
    return torch.full(hidden.shape[:1], hidden.shape[1] - 1, device=hidden.device)


def last_valid(mask: Tensor) -> Tensor:
    """Return the index of the last true value of each row, or 0: (batch, seq) -> (batch) int64."""
    position = torch.arange(mask.shape[1], device=mask.device)
    return (position * mask.bool()).amax(1)


def classification_loss(logits: Tensor, labels: Tensor, problem_type: str | None = None) -> Tensor:
    """Return the mean squared error or the cross entropy of logits (batch, num_labels).

    Without a problem_type, as in transformers: one number is a regression, integer labels are one
    label of each row, other labels are a probability of each label.
    """
    if problem_type is None:
        whole = not (labels.is_floating_point() or labels.dtype == torch.bool)
        problem_type = PROBLEM_TYPES[1 if whole else 2] if logits.shape[1] > 1 else "regression"
    logits = logits.float()
    if problem_type == "regression":
        return F.mse_loss(logits, labels.float().view_as(logits))
    if problem_type == "single_label_classification":
        return F.cross_entropy(logits, labels)
    return F.binary_cross_entropy_with_logits(logits, labels.float())


def _check_problem(problem_type: Any) -> None:
    if problem_type not in (None, *PROBLEM_TYPES):
        raise ConfigError(
            f"problem_type: {short_repr(problem_type)} is not one of {', '.join(PROBLEM_TYPES)}"
        )


def _architecture(config: ModelConfig) -> str:
    """Return the name of transformers' class, such as LlamaForSequenceClassification."""
    words = config.model_type.split("_")
    return "".join(word.capitalize() for word in words) + "ForSequenceClassification"

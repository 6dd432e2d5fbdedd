"""Native models behind the interface of transformers: `LigerForCausalLM` and its relatives.

A wrapper is a `PreTrainedModel`. Its modules are those of a native model, so that both share the
parameters, and its losses come from the loss head. There is one class per family, such as
`LigerLlamaForCausalLM`; it is made when it is first asked for. Nothing is registered in
transformers under HF's model types, and its Auto classes stay as they are.

`FusedHead` is the loss head behind TRL's contract, `model(..., fused_lm_head=True)`: TRL's trainers
take what they need of each token from such a call, and logits are never made. `native_options` says
which of transformers' requests to generate this library's own `generate` can answer.
"""

import copy
import dataclasses
import os
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

from ligermodels.integrations import require

require("transformers")

import torch
from torch import Tensor, nn
from transformers import (
    EosTokenCriteria,
    GenerationConfig,
    GenerationMixin,
    LogitsProcessorList,
    MaxLengthCriteria,
    MinPLogitsWarper,
    PreTrainedConfig,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import MoeCausalLMOutputWithPast
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)
from transformers.utils import ModelOutput
from typing_extensions import Self

from ligermodels.converters import hf_config
from ligermodels.converters.weight_map import joined_rows
from ligermodels.errors import ConfigError, SaveError
from ligermodels.integrations import projections
from ligermodels.integrations.hf_base import LigerModel, LigerPreTrainedModel, class_of
from ligermodels.integrations.hf_weights import wrapper_name
from ligermodels.layers import LossHead, Routes, load_balancing_loss
from ligermodels.layers.fusion import has_plain_call, is_plain
from ligermodels.models.auto import families
from ligermodels.models.base import DecoderModel
from ligermodels.models.inputs import next_token_targets
from ligermodels.models.kernel_report import decoding_obstacle

# TRL's names of what it asks of each token -> the head's.
_STATS = {
    "log_probs": "log_probs",
    "entropy": "entropy",
    "log_sum_sq_probs": "sum_sq_probs",
    "mean_logits": "mean_logits",
    "is_top1": "correct",
}


@dataclasses.dataclass
class FusedHeadOutput(ModelOutput):
    """The fields that TRL reads, under TRL's names.

    The fields of tokens are (batch, seq - 1), or (batch, seq) with shift_labels. They are 0 where
    the label is -100, and None if they were not asked for.
    """

    loss: Tensor | None = None  # sum of -log_probs / num_items_in_batch, or / number of labels
    log_probs: Tensor | None = None  # of each label
    entropy: Tensor | None = None
    log_sum_sq_probs: Tensor | None = None  # log of the sum of squared probabilities
    mean_logits: Tensor | None = None  # of the logits divided by the temperature
    is_top1: Tensor | None = None  # whether the label has the highest logit
    label_mask: Tensor | None = None  # whether the label is not -100
    aux_loss: Tensor | None = None


class FusedHead:
    """Answers a call with `fused_lm_head=True`.

    Attributes:
        temperature: the logits are divided by it.
        cast_to_fp32: whether the head computes in float32, outside autocast.
        outputs: the fields that are asked for; log_probs always is.
    """

    def __init__(self) -> None:
        self.temperature = 1.0
        self.cast_to_fp32 = False
        self.outputs: tuple[str, ...] = ("log_probs",)

    @staticmethod
    def targets(labels: Tensor | None, shift_labels: Tensor | None) -> Tensor:
        """Return labels aligned with the hidden states. Those of shift_labels already are.

        As in transformers, the first token of a packed document is predicted from the document
        before it unless its label is -100; the collators set it to that.
        """
        if shift_labels is not None:
            return shift_labels
        assert labels is not None
        return next_token_targets(labels)

    def __call__(
        self,
        head: LossHead,
        hidden: Tensor,
        labels: Tensor | None,
        shift_labels: Tensor | None,
        num_items_in_batch: float | Tensor | None,
    ) -> FusedHeadOutput:
        """Return what TRL asks for. The hidden states are (batch, seq, hidden)."""
        targets = self.targets(labels, shift_labels)
        if self.cast_to_fp32:
            hidden = hidden.float()
        context = (
            torch.autocast(hidden.device.type, enabled=False)
            if self.cast_to_fp32
            else nullcontext()
        )
        with context:
            tokens = self._tokens(head, hidden, targets)
        mask = targets != -100
        if shift_labels is None:  # The last position of a row has no next token.
            mask = mask[:, :-1]
            tokens = {name: values[:, :-1] for name, values in tokens.items()}
        count = mask.sum().clamp(min=1) if num_items_in_batch is None else num_items_in_batch
        loss = -tokens["log_probs"].sum() / count
        return FusedHeadOutput(loss=loss, label_mask=mask, **tokens)

    def _tokens(self, head: LossHead, hidden: Tensor, targets: Tensor) -> dict[str, Tensor]:
        asked = {_STATS[name]: name for name in {"log_probs", *self.outputs}}
        made = head(
            hidden,
            targets,
            reduction="none",
            temperature=self.temperature,
            # One look at the labels, as in TRL's head. A prompt then takes no time.
            skip_ignored=not torch.compiler.is_compiling(),
            return_token_stats=tuple(asked),
        )
        tokens = {name: getattr(made, f"token_{stat}") for stat, name in asked.items()}
        if "log_sum_sq_probs" in tokens:
            squares = tokens["log_sum_sq_probs"].detach()
            ignored = targets == -100
            tokens["log_sum_sq_probs"] = squares.masked_fill(ignored, 1).log()
        if "mean_logits" in tokens:
            tokens["mean_logits"] = tokens["mean_logits"].detach()
        return tokens


class LigerForCausalLM(LigerPreTrainedModel, GenerationMixin):
    """A language model of any family, to be used like transformers' own.

    `LigerForCausalLM.from_pretrained(path)` and `from_native(model)` choose the family's class.
    With split_projections=True, the packed projections are split into HF's: see `projections`.

    With labels, the loss comes from the loss head. In training no logits are made then; in
    evaluation they are, unless `skip_logits=True` is passed. Without labels, logits are returned.

    Attributes:
        trains_with_logits: whether logits are also made in training with labels, for a tool that
            computes its own loss from them.
    """

    trains_with_logits = False
    lm_head: nn.Module
    _tied_weights_keys: ClassVar[dict[str, str]] = {"lm_head.weight": "model.embed_tokens.weight"}

    def __init__(
        self,
        config: PreTrainedConfig,
        native: DecoderModel | None = None,
        *,
        split_projections: bool = False,
    ) -> None:
        super().__init__(config, native)
        native = self._native[0]
        self.fused_head = FusedHead()
        self.model = class_of(type(native), LigerModel)(config, native)
        if native.config.tie_word_embeddings:
            weight = native.embed_tokens.weight
            vocab, hidden = weight.shape
            self.lm_head = nn.Linear(hidden, vocab, bias=False, device="meta")
            self.lm_head.weight = weight
            setattr(self.lm_head, "_is_hf_initialized", True)  # noqa: B010
        else:
            self.lm_head = native.head.proj
        if native.source.generation_config:
            self.generation_config = GenerationConfig(**native.source.generation_config)
        self._take_hf_names(split_projections)
        self.post_init()

    @classmethod
    def register_for_auto_class(cls, auto_class: Any = "AutoModelForCausalLM") -> None:
        """Do nothing; transformers would copy this file into each folder that is saved."""

    @classmethod
    def from_native(cls, model: DecoderModel) -> Self:
        """Return a wrapper that shares the modules and parameters of a native model."""
        wrapper = class_of(type(model), cls)
        config_class = type(model.config)
        raw = copy.deepcopy(hf_config.text_config(hf_config.to_hf(model.config), config_class))
        config = wrapper.config_class.from_dict(raw)
        if model.source.folder is not None:
            config._name_or_path = str(model.source.folder)
        return wrapper(config, model).train(model.training)

    def _up_to_date(self) -> DecoderModel:
        native = super()._up_to_date()
        head, embedding = native.head, native.embed_tokens
        lm_head = self.lm_head
        if native.config.vocab_size != self.config.vocab_size:
            head.vocab_size = native.config.vocab_size = self.config.vocab_size
        weight = getattr(embedding, "weight", None)
        if is_plain(lm_head, nn.Linear) and lm_head.weight is weight:
            if not head.is_tied or head._tied[0] is not embedding:
                head._modules.pop("proj", None)
                head.tie(embedding)
        elif head._modules.get("proj") is not lm_head:
            head._tied = ()
            head.add_module("proj", lm_head)
        return native

    def hf_named_parameters(self) -> Iterator[tuple[str, Tensor]]:
        """Yield each HF name and tensor, for example for the weight update of a serving engine.

        Adapters of PEFT must be merged, by `merge_adapter()` or `merge_and_unload()`.

        Raises:
            SaveError: an adapter is not merged, or another module stands where a parameter was.
        """
        for name, module in self.named_modules():
            if hasattr(module, "base_layer") and not getattr(module, "merged", False):
                raise SaveError(
                    f"{name} has an adapter that is not merged, and would be left out; call "
                    "merge_adapter() before, and unmerge_adapter() afterwards"
                )
        weights = {wrapper_name(e.name): e.name for e in self.weight_map}
        own = {name.replace(".base_layer.", "."): x for name, x in self.named_parameters()}
        packed = {native: own[name] for name, native in weights.items() if name in own}
        for name, parts in self.weight_map.parts().items():
            if all(entry.name in packed for entry, _ in parts):
                yield name, joined_rows(parts, packed)
            elif name in own:  # a split projection
                yield name, own[name]
            else:
                raise SaveError(
                    f"{name} is not among the model's parameters, because a tool has put another "
                    "module in its place; for one of PEFT call merge_and_unload() before"
                )
        if "lm_head.weight" not in weights and "lm_head.weight" in own:  # no longer tied
            yield "lm_head.weight", own["lm_head.weight"]

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        labels: Tensor | None = None,
        use_cache: bool | None = None,
        logits_to_keep: int | Tensor = 0,
        output_hidden_states: bool | None = None,
        num_items_in_batch: float | Tensor | None = None,
        skip_logits: bool | None = None,
        **others: Any,
    ) -> Any:
        """Return the loss, the logits or both, as transformers' models do.

        Args:
            labels: (batch, seq), shifted inside. The loss is their mean, or their sum divided by
                num_items_in_batch.
            use_cache: whether to return a cache if none is given. It is never returned with labels.
                The default is config.use_cache in evaluation without position_ids; with them, the
                rows may be packed documents, which a cache would join. A model with recurrent
                layers takes none.
            skip_logits: whether to leave out the logits. By default they are left out in training
                with labels, unless `trains_with_logits` is set.
            others: the other arguments are those of transformers' models.
        Returns: a `MoeCausalLMOutputWithPast`; with `fused_lm_head=True`, what `FusedHead`
            describes. With `output_router_logits`, an argument or a key of the config, both have
            the balance of experts as aux_loss, and the loss contains it, in each micro-batch whole.
        Raises:
            ValueError: the model cannot honour an argument.
        """
        # As separate arguments, they would be labels to transformers' Trainer.
        shift_labels = others.pop("shift_labels", None)
        fused = others.pop("fused_lm_head", False)
        as_tuple = others.get("return_dict") is False
        scores = fused or labels is not None or shift_labels is not None
        balances = others.pop("output_router_logits", None)
        if balances is None:
            balances = scores and getattr(self.config, "output_router_logits", False)
        if use_cache is None:
            packed = position_ids is not None or others.get("cu_seq_lens_q") is not None
            use_cache = not (self.training or packed or self.native.is_recurrent)
            use_cache = use_cache and getattr(self.config, "use_cache", True)
        made = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache and not scores,
            output_hidden_states=output_hidden_states,
            output_router_logits=balances,
            **others,
        )
        hidden, head = made.last_hidden_state, self.native.head
        balance = added = None
        if made.router_logits is not None:
            top_k = self.config.num_experts_per_tok
            routes = [Routes(x, x.topk(top_k).indices) for x in made.router_logits]
            balance = load_balancing_loss(routes, attention_mask)
            added = getattr(self.config, "router_aux_loss_coef", 0.0) * balance
        if fused:
            found = self.fused_head(head, hidden, labels, shift_labels, num_items_in_batch)
            if added is not None and found.loss is not None:
                found.loss, found.aux_loss = found.loss + added, balance
            return found
        loss = None
        if labels is not None or shift_labels is not None:
            targets = self.fused_head.targets(labels, shift_labels)
            loss = head(hidden, targets, num_items_in_batch=num_items_in_batch).loss
            loss = loss if added is None else loss + added
        if skip_logits is None:
            skip_logits = loss is not None and self.training and not self.trains_with_logits
        logits = None
        if not skip_logits:
            kept = (
                slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            )
            logits = head.logits(hidden[:, kept])
        output = MoeCausalLMOutputWithPast(
            loss=loss,
            aux_loss=balance,
            logits=logits,
            past_key_values=made.past_key_values,
            hidden_states=made.hidden_states,
            router_logits=made.router_logits,
        )
        return output.to_tuple() if as_tuple else output

    def _prepare_cache_for_generation(
        self, generation_config: GenerationConfig, model_kwargs: dict[str, Any], *others: Any
    ) -> None:
        # A cache that was passed in is to hold the tokens afterwards.
        generation_config._fills_cache = model_kwargs.get("past_key_values") is not None
        super()._prepare_cache_for_generation(generation_config, model_kwargs, *others)

    def _sample(
        self,
        input_ids: Tensor,
        logits_processor: list[Any],
        stopping_criteria: list[Any],
        generation_config: GenerationConfig,
        **others: Any,
    ) -> Any:
        """Generate with or without draws, by the native `generate` if it can do what is asked."""
        asked = (logits_processor, stopping_criteria, generation_config)
        if (
            type(self).forward is LigerForCausalLM.forward
            and "prepare_inputs_for_generation" not in vars(self)  # PEFT's prefixes replace it
            and all(has_plain_call(each, type(each)) for each in (self, self.model))
            and decoding_obstacle(self.native, captures=False) is None
            and not generation_config._fills_cache
            and (options := native_options(input_ids, *asked, others)) is not None
        ):
            return self.native.generate(input_ids, **options)
        return super()._sample(input_ids, *asked, **others)

    def init_continuous_batching(self, *args: Any, **options: Any) -> Any:
        """Raise ConfigError: `generate_batch` would start a thread, in which each request fails."""
        raise ConfigError(
            "generate_batch and continuous batching: they need transformers' own attention and "
            "caches; call generate, or serve the folder that save_pretrained writes with an "
            "engine such as vLLM"
        )

    def _get_name(self) -> str:
        """Return the name of a causal language model of HF, or Trainer would not shift labels.

        It looks at the name when it smooths them.
        """
        name = self._architecture()
        return name if name in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES.values() else "LlamaForCausalLM"

    def __repr__(self) -> str:
        return super().__repr__().replace(self._get_name(), type(self).__name__, 1)

    def save_pretrained(self, save_directory: str | os.PathLike[str], **options: Any) -> None:
        """Write HF's checkpoint; the arguments are those of transformers' `save_pretrained`.

        The config names HF's model class, so that every tool opens the folder.

        Raises:
            SaveError: the config says that the head is tied, but its weight is not the embedding's;
                or a packed projection is quantised, so that HF's tensors cannot be taken out of it.
        """
        lm_head, embedding = self.lm_head, self.get_input_embeddings()
        weight = getattr(embedding, "weight", None)
        unties = isinstance(lm_head, nn.Linear) and lm_head.weight is not weight
        if self.config.tie_word_embeddings and unties:
            raise SaveError(
                f"{Path(save_directory)}: tie_word_embeddings is True, but the embedding was "
                "replaced and lm_head still has the old weight, so other programs would compute "
                "something else; set config.tie_word_embeddings = False to save both, or call "
                "tie_weights()"
            )
        if odd := projections.first_quantised(self):
            raise SaveError(
                f"{Path(save_directory)}: {odd}, whose rows cannot be saved under HF's names; "
                "give from_pretrained the quantization_config, or split_projections=True"
            )
        super().save_pretrained(save_directory, **options)


class LigerForSequenceClassification(GenericForSequenceClassification, LigerPreTrainedModel):
    """A decoder of any family with a linear score of the last token, as in transformers.

    `LigerForSequenceClassification.from_pretrained(path, num_labels=1)` is a reward model for
    TRL's RewardTrainer. With split_projections=True, it has HF's projections.

    Over the micro-batches of a step, Trainer averages its losses. On transformers' models it adds
    them: there, the loss and the gradients grow with gradient_accumulation_steps.
    """

    accepts_loss_kwargs = False  # Trainer reads it

    def __init__(
        self,
        config: PreTrainedConfig,
        native: DecoderModel | None = None,
        *,
        split_projections: bool = False,
    ) -> None:
        LigerPreTrainedModel.__init__(self, config, native)
        native = self._native[0]
        native.head.to("meta")  # it is not used
        self.num_labels = config.num_labels
        self.model = class_of(type(native), LigerModel)(config, native)
        self.score = nn.Linear(native.config.hidden_size, self.num_labels, bias=False)
        entries = (e for e in self.weight_map if not e.name.startswith("head."))
        self.weight_map = dataclasses.replace(self.weight_map, entries=tuple(entries))
        self._keys_to_ignore_on_load_unexpected.append(r"^lm_head\.")
        self._take_hf_names(split_projections)
        self.post_init()

    def _architecture(self) -> str:
        names = MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES
        stem = super()._architecture().removesuffix("ForCausalLM")
        return names.get(self.config.model_type, f"{stem}ForSequenceClassification")


def __getattr__(name: str) -> Any:
    """Return the class of a family by its name, such as LigerLlamaForCausalLM (for pickle)."""
    for base in (LigerForCausalLM, LigerForSequenceClassification, LigerModel):
        end = base.__name__.removeprefix("Liger")
        for family in families().values():
            if name == family.__name__ + end:
                return class_of(family, base)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


# The attribute and our name of what each processor does, in the order of `Sampling`. Other
# processors, or in another order, run between the steps.
_RULE = {
    RepetitionPenaltyLogitsProcessor: ("penalty", "repetition_penalty"),
    TemperatureLogitsWarper: ("temperature", "temperature"),
    TopKLogitsWarper: ("top_k", "top_k"),
    TopPLogitsWarper: ("top_p", "top_p"),
    MinPLogitsWarper: ("min_p", "min_p"),
}
# The inputs that are looked at, or that say what is done anyway.
_KNOWN = {"attention_mask", "position_ids", "past_key_values", "cache_position"}
_KNOWN |= {"use_cache", "logits_to_keep"}


def native_options(
    input_ids: Tensor,
    processors: list[Any],
    criteria: list[Any],
    config: GenerationConfig,
    inputs: dict[str, Any],
) -> dict[str, Any] | None:
    """Return the arguments of `generate` that mean the same, or None if there are none.

    Args:
        input_ids: (batch, seq), the prompts.
        processors, criteria, config: as transformers' loop gets them.
        inputs: its other arguments. Their cache is empty and goes to nobody.
    """
    kinds, pad = [type(each) for each in processors], config._pad_token_tensor
    if (
        {type(each) for each in criteria} - {MaxLengthCriteria, EosTokenCriteria}
        or config.return_dict_in_generate
        or config.prefill_chunk_size is not None
        or config.is_assistant
        or not config.use_cache
        or config.cache_implementation is not None
        or any(x is not None and x is not False for k, x in inputs.items() if k not in _KNOWN)
        or (pad is not None and pad < 0)
    ):
        return None
    mask, positions = inputs.get("attention_mask"), inputs.get("position_ids")
    # transformers' penalty also counts padding, or leaves out what an attribute says.
    ignores = any(getattr(x, "prompt_ignore_length", None) is not None for x in processors)
    counts = RepetitionPenaltyLogitsProcessor in kinds and mask is not None
    rule: dict[str, Any] = {"logits_processor": LogitsProcessorList(processors)}
    if kinds == [kind for kind in _RULE if kind in kinds] and not (ignores or counts):
        found = {_RULE[type(x)][1]: getattr(x, _RULE[type(x)][0]) for x in processors}
        if all(found.values()) and (config.do_sample or found.keys() <= {"repetition_penalty"}):
            rule = found
    if not _are_usual(torch.ones_like(input_ids) if mask is None else mask.long(), positions):
        return None
    ends = [each.eos_token_id for each in criteria if isinstance(each, EosTokenCriteria)]
    return {
        "max_new_tokens": config.max_length - input_ids.shape[1],
        "attention_mask": mask,
        "do_sample": bool(config.do_sample),
        "eos_token_id": [token for several in ends for token in several.tolist()],
        "pad_token_id": None if pad is None else int(pad),
        "repetition_penalty": 1.0,
        **rule,
    }


def _are_usual(mask: Tensor, positions: Tensor | None) -> bool:
    """Return whether rows have only padding on the left, and the usual positions after it."""
    counts = mask.cumsum(-1)
    if not torch.equal(mask, (counts > 0).long()) or not bool(mask[:, -1].all()):
        return False
    return positions is None or bool(((positions - counts + 1) * mask == 0).all())

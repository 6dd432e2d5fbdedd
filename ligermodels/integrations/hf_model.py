"""Native models behind the interface of transformers: `LigerForCausalLM` and its relatives.

A wrapper is a `PreTrainedModel`. Its modules are those of a native model, so that both share the
parameters, and its losses come from the loss head. There is one class per family, such as
`LigerLlamaForCausalLM`; it is made when it is first asked for. Nothing is registered in
transformers under HF's model types, and its Auto classes stay as they are.
"""

import copy
import dataclasses
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

from ligermodels.integrations import require

require("transformers")

from torch import Tensor, nn
from transformers import GenerationConfig, GenerationMixin, PreTrainedConfig
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)
from typing_extensions import Self

from ligermodels.converters import hf_config
from ligermodels.converters.weight_map import joined_rows
from ligermodels.errors import ConfigError, SaveError
from ligermodels.integrations import projections
from ligermodels.integrations.fused_head import FusedHead
from ligermodels.integrations.hf_base import LigerModel, LigerPreTrainedModel, class_of
from ligermodels.integrations.hf_generation import native_options
from ligermodels.integrations.hf_weights import wrapper_name
from ligermodels.layers.fusion import has_plain_call, is_plain
from ligermodels.models.auto import families
from ligermodels.models.base import DecoderModel
from ligermodels.models.kernel_report import decoding_obstacle


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
        raw = copy.deepcopy(hf_config.to_hf(model.config))
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
                rows may be packed documents, which a cache would join.
            skip_logits: whether to leave out the logits. By default they are left out in training
                with labels, unless `trains_with_logits` is set.
            others: the other arguments are those of transformers' models.
        Returns: a `CausalLMOutputWithPast`; with `fused_lm_head=True`, what `FusedHead` describes.
        Raises:
            ValueError: the model cannot honour an argument.
        """
        # As separate arguments, they would be labels to transformers' Trainer.
        shift_labels = others.pop("shift_labels", None)
        fused = others.pop("fused_lm_head", False)
        as_tuple = others.get("return_dict") is False
        scores = fused or labels is not None or shift_labels is not None
        if scores and getattr(self.config, "output_router_logits", False):
            raise ValueError(
                "config.output_router_logits is True, but the balance of experts is not part of "
                "this model's loss; set it to False, or train model.native, whose loss has it"
            )
        if use_cache is None:
            packed = position_ids is not None or others.get("cu_seq_lens_q") is not None
            use_cache = not (self.training or packed) and getattr(self.config, "use_cache", True)
        made = self.model(
            input_ids,
            attention_mask=attention_mask,
            position_ids=position_ids,
            past_key_values=past_key_values,
            inputs_embeds=inputs_embeds,
            use_cache=use_cache and not scores,
            output_hidden_states=output_hidden_states,
            **others,
        )
        hidden, head = made.last_hidden_state, self.native.head
        if fused:
            return self.fused_head(head, hidden, labels, shift_labels, num_items_in_batch)
        loss = None
        if labels is not None or shift_labels is not None:
            targets = self.fused_head.targets(labels, shift_labels)
            loss = head(hidden, targets, num_items_in_batch=num_items_in_batch).loss
        if skip_logits is None:
            skip_logits = loss is not None and self.training and not self.trains_with_logits
        logits = None
        if not skip_logits:
            kept = (
                slice(-logits_to_keep, None) if isinstance(logits_to_keep, int) else logits_to_keep
            )
            logits = head.logits(hidden[:, kept])
        output = CausalLMOutputWithPast(
            loss=loss,
            logits=logits,
            past_key_values=made.past_key_values,
            hidden_states=made.hidden_states,
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

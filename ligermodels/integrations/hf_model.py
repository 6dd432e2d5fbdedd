"""Native models behind the interface of transformers: `LigerForCausalLM` and its relatives.

A wrapper is a `PreTrainedModel`. Its modules are those of a native model, so that both share the
parameters, and its losses come from the loss head. There is one class per family, such as
`LigerLlamaForCausalLM`; it is made when it is first asked for. Nothing is registered in
transformers under HF's model types, and its Auto classes stay as they are.
"""

import copy
import dataclasses
import os
import re
import sys
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from typing import Any, ClassVar

from ligermodels.integrations import require

require("transformers")

import torch
import transformers
from torch import Tensor, nn
from transformers import (
    DynamicCache,
    GenerationConfig,
    GenerationMixin,
    PreTrainedConfig,
    PreTrainedModel,
)
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.modeling_layers import GenericForSequenceClassification
from transformers.modeling_outputs import BaseModelOutputWithPast, CausalLMOutputWithPast
from transformers.models.auto.modeling_auto import (
    MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
    MODEL_FOR_SEQUENCE_CLASSIFICATION_MAPPING_NAMES,
)
from typing_extensions import Self

from ligermodels.converters import hf_config
from ligermodels.converters.in_memory import joined_rows
from ligermodels.errors import ConfigError, SaveError
from ligermodels.integrations import projections
from ligermodels.integrations.fused_head import FusedHead
from ligermodels.integrations.hf_families import (
    architecture,
    class_at,
    class_of,
    native_config,
    raw_config,
)
from ligermodels.integrations.hf_inputs import LayerOutputs, first_layers, native_inputs
from ligermodels.integrations.hf_weights import conversions, pack_hf_names, wrapper_name
from ligermodels.layers import RotaryEmbedding
from ligermodels.layers.fusion import is_plain
from ligermodels.models.auto import families
from ligermodels.models.base import DecoderModel

MINIMUM = (5, 16)


def check_version(version: str) -> None:
    """Raise ConfigError if a version of transformers is too old for the wrappers."""
    if tuple(map(int, version.split(".")[:2])) < MINIMUM:
        raise ConfigError(
            f"transformers {version}: it would leave packed projections unread, without an error; "
            f"install transformers {MINIMUM[0]}.{MINIMUM[1]} or newer"
        )


check_version(transformers.__version__)


class LigerPreTrainedModel(PreTrainedModel):
    """The base class of all wrappers.

    Attributes:
        family: the class of the native model.
        weight_map: the map from the native model's parameters to HF's tensors.
    """

    family: ClassVar[type[DecoderModel]]
    base_model_prefix = "model"
    supports_gradient_checkpointing = True
    _is_checkpointing = False  # activation checkpointing
    _supports_sdpa = True
    _supports_flash_attn = True
    _supports_flex_attn = True
    _skip_keys_device_placement = ("past_key_values",)

    def __init__(self, config: PreTrainedConfig, native: DecoderModel | None = None) -> None:
        if not hasattr(self, "family"):
            raise ConfigError(
                f"{type(self).__name__} belongs to no family; make a native model and pass it to "
                "from_native, or use from_pretrained or the class of a family, such as "
                "LigerLlamaForCausalLM"
            )
        super().__init__(config)
        if native is None:
            native = self.family(native_config(config, self.family))
        # The tuple keeps nn.Module from registering the native model as a child.
        self._native = (native,)
        with torch.device("cpu"):  # its constants have values, also in a load
            self.weight_map = self.family.weight_map(native.built_from)
        # A checkpoint also holds these, and the model has no place for them.
        self._keys_to_ignore_on_load_unexpected = [
            f"^{re.escape(name)}$" for name in self.weight_map.constants
        ]
        self._no_split_modules = sorted({type(layer).__name__ for layer in native.layers})
        if not native.embed_tokens.weight.is_meta:
            for module in native.modules():  # or transformers would draw the weights again
                setattr(module, "_is_hf_initialized", True)  # noqa: B010

    @classmethod
    def from_pretrained(cls, path: str | os.PathLike[str], *args: Any, **options: Any) -> Self:
        """Load a checkpoint; the arguments are those of transformers' `from_pretrained`.

        A model that is quantised, in its checkpoint or by a quantization_config, has split
        projections. Some kinds of quantisation choose their scales for a whole weight, so that
        those of a packed one would be others than HF's.

        Raises:
            ConfigError: no family is registered for the checkpoint's model_type.
        """
        if not hasattr(cls, "family"):
            return class_at(path, cls, options).from_pretrained(path, *args, **options)
        if any(each.get("quantization_config") for each in (options, raw_config(path, options))):
            options["split_projections"] = True
        return super().from_pretrained(path, *args, **options)

    @torch.no_grad()
    def _init_weights(self, module: nn.Module) -> None:
        if isinstance(module, RotaryEmbedding):
            module.to(module.inv_freq.device)  # computes its buffer again
        else:
            super()._init_weights(module)

    @property
    def native(self) -> DecoderModel:
        """The native model, which has this model's modules and parameters."""
        return self._up_to_date()

    def _up_to_date(self) -> DecoderModel:
        """Return the native model, after it has got the modules that tools have put in here.

        It writes only what differs: torch.compile does not trace some of these writes.
        """
        native = self._native[0]
        for name, child in self.base_model.named_children():
            if getattr(native, name) is not child:  # a tool has replaced it, such as PEFT
                setattr(native, name, child)
        return native

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *, push_to_hub: bool = False, **options: Any
    ) -> None:
        """Write HF's checkpoint as transformers does, with the constants of the weight map.

        The config names HF's model class, so that every tool opens the folder.
        """
        if self.weight_map.constants:
            weights = options.get("state_dict") or self.state_dict()
            options["state_dict"] = weights | self.weight_map.constants
        super().save_pretrained(save_directory, **options)
        if not options.get("is_main_process", True):
            return
        self.config.architectures = [self._architecture()]
        self.config.__dict__.pop("auto_map", None)  # it names a file of another folder
        if (Path(save_directory) / "config.json").is_file():
            self.config.save_pretrained(save_directory)
        if push_to_hub:
            known = ("commit_message", "private", "token", "revision", "create_pr")
            given = {name: options[name] for name in known if name in options}
            self.push_to_hub(options.get("repo_id", Path(save_directory).name), **given)

    def _architecture(self) -> str:
        """Return the name of transformers' class for this model."""
        return architecture(self.family)

    def get_parameter_or_buffer(self, target: str) -> Any:
        """Return a tensor by its name; transformers asks for each one that it saves."""
        if target in self.weight_map.constants:
            return self.weight_map.constants[target]
        return super().get_parameter_or_buffer(target)

    def named_modules(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Module]]:
        """Yield all modules and their names; PEFT, and only PEFT, splits the projections with it.

        Every method of PEFT looks up here what it adapts. A packed projection would get an adapter
        that no other program has a place for, or none.

        Raises:
            ConfigError: PEFT is at work, and what `split_for_peft` raises.
        """
        frame = sys._getframe(1)
        while frame.f_code.co_name == "named_modules" and frame.f_back is not None:
            frame = frame.f_back  # a module around this one looks through its children
        caller = frame.f_globals.get("__name__", "")
        if caller.startswith("peft."):
            projections.split_for_peft(self, caller)
        return super().named_modules(*args, **options)

    def __setattr__(self, name: str, value: Any) -> None:
        if name == "peft_config":  # PEFT sets it when it has added the first adapter
            projections.refuse_adapters(self, value)
        super().__setattr__(name, value)

    def load_adapter(self, *args: Any, **options: Any) -> Any:
        """Load an adapter of PEFT, as in transformers.

        Raises:
            ConfigError: tensors of the adapter have no place, or are missing. It is removed again.
        """
        before = {*getattr(self, "peft_config", ())}
        loaded = super().load_adapter(*args, **options)
        try:
            name = options.get("peft_model_id") or next(iter(args), "load_adapter")
            projections.refuse_in_part(name, loaded)
        except ConfigError:
            for new in self.peft_config.keys() - before:
                self.delete_adapter(new)
            raise
        return loaded

    def activation_checkpointing_enable(
        self,
        activation_checkpointing_kwargs: dict[str, Any] | None = None,
        every_n_layers: int = 1,
        offload: bool = False,
    ) -> None:
        """Let backward compute blocks again; see `DecoderModel.activation_checkpointing_enable`."""
        self.native.activation_checkpointing_enable(
            activation_checkpointing_kwargs, every_n_layers, offload
        )
        self._is_checkpointing = True

    def activation_checkpointing_disable(self) -> None:
        """Keep the activations of every block for backward."""
        self.native.activation_checkpointing_disable()
        self._is_checkpointing = False

    @property
    def is_activation_checkpointing(self) -> bool:
        """Whether `activation_checkpointing_enable` was called.

        A memory plan of the native model does not count. TRL would switch it off for a reference
        model, and then recompute every block.
        """
        return self._is_checkpointing

    def gradient_checkpointing_enable(
        self, gradient_checkpointing_kwargs: dict[str, Any] | None = None, **options: Any
    ) -> None:
        """Call `activation_checkpointing_enable`; this is its older name in transformers."""
        self.activation_checkpointing_enable(gradient_checkpointing_kwargs, **options)

    gradient_checkpointing_disable = activation_checkpointing_disable
    is_gradient_checkpointing = is_activation_checkpointing

    def _set_gradient_checkpointing(self, enable: bool = True, **_: Any) -> None:
        """Do what LLaMA-Factory calls; its function that computes a block again is not needed."""
        if enable:
            self.activation_checkpointing_enable()
        else:
            self.activation_checkpointing_disable()


class LigerModel(LigerPreTrainedModel):
    """The decoder of a wrapper, without the projection to the vocabulary: its attribute `model`.

    It has no checkpoints of its own.
    """

    def __init__(self, config: PreTrainedConfig, native: DecoderModel | None = None) -> None:
        super().__init__(config, native)
        for name, child in self._native[0].named_children():
            if name != "head":
                self.add_module(name, child)
        self.post_init()

    @classmethod
    def from_pretrained(cls, path: Any, *args: Any, **options: Any) -> Self:
        """Raise ConfigError: its packed projections would stay random."""
        raise ConfigError(
            f"{cls.__name__} does not load checkpoints; use "
            f"LigerForCausalLM.from_pretrained({str(path)!r}).model"
        )

    def save_pretrained(self, save_directory: Any, **options: Any) -> None:
        """Raise SaveError: no program would find the packed projections."""
        raise SaveError(
            f"{save_directory}: {type(self).__name__} does not save checkpoints; save the "
            "LigerForCausalLM that it belongs to"
        )

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding."""
        return self.embed_tokens

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding."""
        self.embed_tokens = value

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        **others: Any,
    ) -> BaseModelOutputWithPast:
        """Return the hidden states after the final norm, and the cache if there is one.

        The arguments are those of transformers' models.

        Raises:
            ValueError: the model cannot honour an argument, or what `DecoderModel.forward` raises.
        """
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        inputs = native_inputs(
            input_ids, inputs_embeds, attention_mask, position_ids, past_key_values, others
        )
        if output_hidden_states is None:
            output_hidden_states = getattr(self.config, "output_hidden_states", False)
        native = self.native
        seen = LayerOutputs(native) if output_hidden_states else None
        # An assistant that exits early (assistant_early_exit) lowers this number for its calls.
        count = self.config.num_hidden_layers
        early = count < native.built_from.num_hidden_layers
        try:
            with first_layers(native, count) if early else nullcontext():
                hidden = native(**inputs)
        finally:
            if seen is not None:
                seen.remove()
        states = None
        if seen is not None:  # The last layer's output is normed.
            states = (*seen.outputs[: count if early else -1], hidden)
        return BaseModelOutputWithPast(
            last_hidden_state=hidden, past_key_values=past_key_values, hidden_states=states
        )


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
        self.register_load_state_dict_pre_hook(pack_hf_names)
        # transformers looks up the first when it loads and uses the second when it saves.
        repacked = projections.separate(self.weight_map) if split_projections else self.weight_map
        found = conversions(repacked)
        register_checkpoint_conversion_mapping(type(self).__name__, found, overwrite=True)
        self._weight_conversions = found
        if native.source_generation_config:
            self.generation_config = GenerationConfig(**native.source_generation_config)
        if split_projections:
            projections.split_projections(self)
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
        if model.source_folder is not None:
            config._name_or_path = str(model.source_folder)
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

    def get_input_embeddings(self) -> nn.Module:
        """Return the embedding."""
        return self.model.get_input_embeddings()

    def set_input_embeddings(self, value: nn.Module) -> None:
        """Replace the embedding."""
        self.model.set_input_embeddings(value)

    def get_output_embeddings(self) -> nn.Module:
        """Return the projection to the vocabulary."""
        return self.lm_head

    def set_output_embeddings(self, value: nn.Module) -> None:
        """Replace the projection to the vocabulary."""
        self.lm_head = value

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
        name = architecture(self.family)
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
        self._check_tie(save_directory)
        if odd := projections.first_quantised(self):
            raise SaveError(
                f"{Path(save_directory)}: {odd}, whose rows cannot be saved under HF's names; "
                "give from_pretrained the quantization_config, or split_projections=True"
            )
        super().save_pretrained(save_directory, **options)

    def _check_tie(self, folder: str | os.PathLike[str]) -> None:
        embedding, lm_head = self.get_input_embeddings(), self.lm_head
        if self.config.tie_word_embeddings and isinstance(lm_head, nn.Linear):
            weight = getattr(embedding, "weight", None)
            if weight is not lm_head.weight:
                raise SaveError(
                    f"{Path(folder)}: tie_word_embeddings is True, but the embedding was replaced "
                    "and lm_head still has the old weight, so other programs would compute "
                    "something else; set config.tie_word_embeddings = False to save both, or "
                    "call tie_weights()"
                )


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
        self.register_load_state_dict_pre_hook(pack_hf_names)
        entries = (e for e in self.weight_map if not e.name.startswith("head."))
        self.weight_map = dataclasses.replace(self.weight_map, entries=tuple(entries))
        repacked = projections.separate(self.weight_map) if split_projections else self.weight_map
        found = conversions(repacked)
        register_checkpoint_conversion_mapping(type(self).__name__, found, overwrite=True)
        self._weight_conversions = found
        self._keys_to_ignore_on_load_unexpected.append(r"^lm_head\.")
        if split_projections:
            projections.split_projections(self)
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

"""The base class of all wrappers, the decoder in each of them, and their class for each family."""

import os
import re
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, ClassVar

from ligermodels.integrations import require

require("transformers")

import torch
import transformers
from torch import Tensor, nn
from transformers import DynamicCache, PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import register_checkpoint_conversion_mapping
from transformers.modeling_outputs import MoeModelOutputWithPast
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.utils import find_adapter_config_file
from typing_extensions import Self

from ligermodels.converters import hf_config
from ligermodels.converters.files import read_json
from ligermodels.errors import ConfigError, SaveError, short_repr
from ligermodels.integrations import projections
from ligermodels.integrations.hf_weights import conversions, pack_hf_names
from ligermodels.layers import RotaryEmbedding, Routes
from ligermodels.layers.kv_cache import KVCache
from ligermodels.models.auto import family_named
from ligermodels.models.base import DecoderModel
from ligermodels.models.inputs import flattened_documents
from ligermodels.models.module_map import ONE_BY_ONE

# What tools pass to every model, and what needs no answer here.
_WITHOUT_EFFECT = {"cache_position", "return_dict", "logits_to_keep"}


@contextmanager
def watched_layers(native: DecoderModel) -> Iterator[tuple[list[Tensor], list[Tensor]]]:
    """Collect the hidden states around the layers of one forward pass, and the routers' logits."""
    states: list[Tensor] = []
    logits: list[Tensor] = []

    def first(layer: nn.Module, inputs: tuple[Any, ...]) -> None:
        states.append(inputs[0])

    def following(layer: nn.Module, inputs: Any, output: tuple[Any, ...]) -> None:
        x, residual, *others = output
        states.append(x if residual is None else x + residual)
        logits.extend(each.logits for each in others if isinstance(each, Routes))

    handles = [layer.register_forward_hook(following) for layer in native.layers]
    handles.append(native.layers[0].register_forward_pre_hook(first))
    try:
        yield states, logits
    finally:
        for handle in handles:
            handle.remove()


def _is_seen_to_hide_nothing(mask: Tensor) -> bool:
    """Return whether a mask (batch, keys) on a GPU is all ones, where its values can be looked at.

    Tools pass such masks with every batch, and causal attention is faster without one. The look
    waits for the GPU, as that of transformers' models does.
    """
    looks = mask.is_cuda and type(mask) is Tensor and not torch.compiler.is_compiling()
    return looks and not torch.cuda.is_current_stream_capturing() and bool(mask.all())


def native_inputs(
    input_ids: Tensor | None,
    inputs_embeds: Tensor | None,
    attention_mask: Tensor | None,
    position_ids: Tensor | None,
    past_key_values: Any,
    others: dict[str, Any],
) -> dict[str, Any]:
    """Return the arguments of `DecoderModel.forward` for those of transformers' models.

    Raises:
        ValueError: an argument asks for something that the model does not compute.
    """
    cache = None if past_key_values is None else HFCache(past_key_values)
    if attention_mask is not None and attention_mask.dim() == 2:
        attention_mask = attention_mask.bool()  # PEFT's masks of virtual tokens are float
        if _is_seen_to_hide_nothing(attention_mask):
            attention_mask = None
    inputs: dict[str, Any] = {
        "input_ids": input_ids,
        "inputs_embeds": inputs_embeds,
        "attention_mask": attention_mask,
        "position_ids": position_ids,
        "cache": cache,
    }
    others = {**others, "position_ids": position_ids}
    inputs |= flattened_documents(others)
    del others["position_ids"]
    unknown = {
        name: value
        for name, value in others.items()
        if name not in _WITHOUT_EFFECT and value is not None and value is not False
    }
    if unknown:
        name, value = next(iter(unknown.items()))
        raise ValueError(
            f"{name}={short_repr(value)}: the model cannot honour this argument; leave it out"
        )
    return inputs


class HFCache(KVCache):
    """A view of one of transformers' dynamic caches for one forward pass.

    Raises:
        ValueError: the cache has a fixed length.
    """

    def __init__(self, cache: Any) -> None:
        if getattr(cache, "is_compileable", False) or not hasattr(cache, "get_seq_length"):
            raise ValueError(
                f"past_key_values is a {type(cache).__name__}; only dynamic caches work: leave out "
                "cache_implementation, or use 'dynamic', 'offloaded' or 'quantized'"
            )
        self.cache = cache
        self.length, self.uses = cache.get_seq_length(), 1
        self._found: dict[int, tuple[int, torch.device]] = {}

    def update(self, layer_index: int, k: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
        """Append k, v (batch, kv heads, new, head_dim); return all that the cache has kept.

        Raises:
            ValueError: a layer is updated twice in the pass.
        """
        if layer_index in self._found:
            raise ValueError(
                f"past_key_values: layer {layer_index} was updated twice in one pass, and "
                "transformers' caches have one place for it; generate with the model of this "
                "library, or with use_cache=False"
            )
        keys, values = self.cache.update(k, v, layer_index)
        self._found[layer_index] = keys.shape[2], keys.device
        return keys, values

    def state(self, layer_index: int) -> tuple[Tensor, ...] | None:
        """Raise ValueError: a recurrent layer has no place in transformers' caches."""
        raise ValueError(
            f"past_key_values: layer {layer_index} is recurrent, and its state has no place in "
            "transformers' caches; generate without beams, assistants or a cache of your own, "
            "which takes the native model, or with use_cache=False"
        )

    def key_positions(self, layer_index: int, new: int) -> Tensor | None:
        """Return the positions of the keys, or None if they are all tokens so far."""
        count, device = self._found[layer_index]
        end = self.length + new
        return None if count == end else torch.arange(end - count, end, device=device)

    def advance(self, tokens: int) -> None:
        """Do nothing: the cache counts its tokens itself."""


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
        maps_to_load: that, and the maps of other layouts that a checkpoint may have.
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
            found = self.family.weight_map(native.built_from)
        # transformers writes the weights of each expert alone, also if the hub has them in one.
        one_by_one = ONE_BY_ONE if ONE_BY_ONE in found.layouts else None
        self.weight_map = found.in_layout(one_by_one)
        others = (found.in_layout(name) for name in (None, *found.layouts) if name != one_by_one)
        self.maps_to_load = [self.weight_map, *(x for x in others if not x.is_mxfp4)]
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

    def _take_hf_names(self, split_projections: bool) -> None:
        """Let transformers load and save HF's tensors, and split the projections if it is asked."""
        self.register_load_state_dict_pre_hook(pack_hf_names)
        # transformers looks up the first when it loads, and then keeps those that it has used.
        found = [projections.separate(x) if split_projections else x for x in self.maps_to_load]
        to_load = conversions(*found)
        register_checkpoint_conversion_mapping(type(self).__name__, to_load, overwrite=True)
        self._weight_conversions = self._to_save = conversions(found[0])
        if split_projections:
            projections.split_projections(self)

    @property
    def native(self) -> DecoderModel:
        """The native model, which has this model's modules and parameters."""
        return self._up_to_date()  # torch.compile does not trace a property of a superclass

    def _up_to_date(self) -> DecoderModel:
        """Return the native model, after it has got the modules that tools have put in here.

        It writes only what differs: torch.compile does not trace some of these writes.
        """
        native = self._native[0]
        for name, child in self.base_model.named_children():
            if getattr(native, name) is not child:  # a tool has replaced it, such as PEFT
                setattr(native, name, child)
        return native

    def train(self, mode: bool = True) -> Self:
        """Set training or evaluation mode, of the native model itself, too."""
        self._native[0].train(mode)  # Training frees what generation keeps.
        return super().train(mode)

    def save_pretrained(
        self, save_directory: str | os.PathLike[str], *, push_to_hub: bool = False, **options: Any
    ) -> None:
        """Write HF's checkpoint as transformers does, with the constants of the weight map.

        The config names HF's model class, so that every tool opens the folder.
        """
        projections.pack_experts(self)  # PEFT's parameters are none of the files
        self._weight_conversions = self._to_save
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
        return hf_config.architecture(self.family.config_class)

    def get_parameter_or_buffer(self, target: str) -> Any:
        """Return a tensor by its name; transformers asks for each one that it saves."""
        if target in self.weight_map.constants:
            return self.weight_map.constants[target]
        return super().get_parameter_or_buffer(target)

    def named_modules(self, *args: Any, **options: Any) -> Iterator[tuple[str, nn.Module]]:
        """Yield all modules and their names; PEFT, and only PEFT, splits the projections with it.

        Every method of PEFT looks up here what it adapts. A packed projection would get an adapter
        that no other program has a place for, or none. `peft.peft_model` only looks at what is
        adapted already, also between a forward and its backward.

        Raises:
            ConfigError: PEFT is at work, and what `split_for_peft` raises.
        """
        frame = sys._getframe(1)
        while frame.f_code.co_name == "named_modules" and frame.f_back is not None:
            frame = frame.f_back  # a module around this one looks through its children
        caller = frame.f_globals.get("__name__", "")
        if caller.startswith("peft.") and caller != "peft.peft_model":
            projections.split_for_peft(self)
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

    def forward(
        self,
        input_ids: Tensor | None = None,
        attention_mask: Tensor | None = None,
        position_ids: Tensor | None = None,
        past_key_values: Any = None,
        inputs_embeds: Tensor | None = None,
        use_cache: bool | None = None,
        output_hidden_states: bool | None = None,
        output_router_logits: bool | None = None,
        **others: Any,
    ) -> MoeModelOutputWithPast:
        """Return the hidden states after the final norm, and the cache if there is one.

        The arguments are those of transformers' models.

        Raises:
            ConfigError: the config has fewer layers than the model, as for `assistant_early_exit`.
            ValueError: the model cannot honour an argument, or what `DecoderModel.forward` raises.
        """
        if (count := self.config.num_hidden_layers) < len(self.native.layers):
            raise ConfigError(
                f"config.num_hidden_layers is {count}, but the model has {len(self.native.layers)} "
                "layers, and always takes all of them; for generate, leave out "
                "assistant_early_exit, and give a smaller model as assistant_model"
            )
        if use_cache and past_key_values is None:
            past_key_values = DynamicCache()
        inputs = native_inputs(
            input_ids, inputs_embeds, attention_mask, position_ids, past_key_values, others
        )
        if output_hidden_states is None:
            output_hidden_states = getattr(self.config, "output_hidden_states", False)
        states: list[Tensor] = []
        logits: list[Tensor] = []
        if output_hidden_states or output_router_logits:
            with watched_layers(self.native) as (states, logits):
                hidden = self.native(**inputs)
        else:
            hidden = self.native(**inputs)
        if output_router_logits and not logits:
            raise ValueError(
                "output_router_logits=True: the model cannot honour this argument, because it has "
                "no experts; leave it out"
            )
        # The last layer's output is normed.
        return MoeModelOutputWithPast(
            last_hidden_state=hidden,
            past_key_values=past_key_values,
            hidden_states=(*states[:-1], hidden) if output_hidden_states else None,
            router_logits=tuple(logits) if output_router_logits else None,
        )


def native_config(config: PreTrainedConfig, family: type[DecoderModel]) -> Any:
    """Return the native config for one of transformers.

    Raises:
        ConfigError: a key is not implemented or has a wrong value.
    """
    raw = config.to_dict()
    raw.pop("quantization_config", None)  # transformers replaces the linears itself
    return family.config_class(**hf_config.fields_from_hf(raw, family.config_class))


def raw_config(path: Any, options: dict[str, Any]) -> dict[str, Any]:
    """Return the content of the config.json at a path or hub id, or of an adapter's model."""
    known = ("revision", "token", "cache_dir", "subfolder", "local_files_only", "force_download")
    given = {name: options[name] for name in known if name in options}
    raw, _ = PreTrainedConfig.get_config_dict(path, **given)
    if not raw.get("model_type") and (adapter := find_adapter_config_file(path, **given)):
        # transformers loads the model that an adapter belongs to, and then the adapter.
        model = read_json(Path(adapter), ConfigError)["base_model_name_or_path"]
        for name in ("revision", "subfolder"):  # They are the adapter's own.
            given.pop(name, None)
        raw, _ = PreTrainedConfig.get_config_dict(model, **given)
    return raw


def class_at(path: Any, base: type, options: dict[str, Any]) -> Any:
    """Return the class of wrappers for the config.json at a path or hub id."""
    raw = raw_config(path, options)
    if "text_config" in raw:
        raise ConfigError(
            f"{path}: it is a checkpoint of a text model and other towers, which this class "
            "cannot load here; for the text model alone use "
            "LigerForCausalLM.from_native(AutoLiger.from_hf(...))"
        )
    return class_of(family_named(raw.get("model_type"), path), base)


def class_of(family: type[DecoderModel], base: type) -> Any:
    """Return the subclass of a wrapper class for one family."""
    if getattr(base, "family", family) is not family:
        raise ConfigError(f"{base.__name__} is the class of another family than {family.__name__}")
    if hasattr(base, "family"):
        return base
    if (family, base) not in _made:
        _made[family, base] = _make_class(family, base)
    return _made[family, base]


_made: dict[tuple[type, type], Any] = {}
_MODULE = f"{__package__}.hf_model"  # where pickle looks for the classes


def _make_class(family: type[DecoderModel], base: type) -> Any:
    model_type = family.config_class.model_type
    config_class: Any = CONFIG_MAPPING[model_type] if model_type in CONFIG_MAPPING else None
    if config_class is None:
        own = {"model_type": model_type, "__module__": _MODULE}
        config_class = type(f"{family.__name__}Config", (PreTrainedConfig,), own)
    members: dict[str, Any] = {
        "family": family,
        "config_class": config_class,
        "__module__": _MODULE,
        "__doc__": f"`{base.__name__}` of the family {family.__name__}.",
    }
    return type(family.__name__ + base.__name__.removeprefix("Liger"), (base,), members)

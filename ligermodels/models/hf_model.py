"""A module whose parameters are the tensors of an HF checkpoint: `from_hf` and `save_hf`."""

import copy
import dataclasses
import math
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import Self, Unpack

from ligermodels.converters import export, hf_config, hub
from ligermodels.converters.checkpoint import Checkpoint, Source
from ligermodels.converters.files import (
    ADAPTER_CONFIG_NAME,
    CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    copied_files,
    dtype_name,
    read_json_if_present,
)
from ligermodels.converters.hub import HubOptions
from ligermodels.converters.safetensors_file import DTYPES, StoredTensor, empty_in_huge_pages
from ligermodels.converters.save_dir import read_one_version
from ligermodels.converters.weight_map import Entry, WeightMap, packed_entry
from ligermodels.errors import CheckpointError, ConfigError, SaveError, first_line, listing
from ligermodels.float8 import Float8Linear, convert
from ligermodels.layers import LossHead, RotaryEmbedding
from ligermodels.layers.fusion import is_sharded
from ligermodels.memory.byte_sizes import parse_bytes
from ligermodels.models.config import ModelConfig
from ligermodels.models.layout import ModelLayout, layout_of, reshard
from ligermodels.progress import track


class HFModel(nn.Module):
    """A module whose parameters are the tensors of an HF checkpoint, and where they came from.

    Attributes:
        config: the family's config.
        built_from: a copy of the config from the time when the modules were made.
        source: the checkpoint that the model was loaded from.
        layout: how the model is divided over ranks, or None if this rank has all of it.
    """

    config_class: ClassVar[type[ModelConfig]]
    # Ends of the names of parameters without gradient that `from_hf(dtype=...)` casts all the same.
    cast_without_gradient: ClassVar[tuple[str, ...]] = ()
    embed_tokens: nn.Embedding

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        config.validate()
        self.config = config
        self.built_from = copy.deepcopy(config)
        self.source = Source()
        self.layout: ModelLayout | None = None

    def _load_from_state_dict(
        self, state_dict: dict[str, Any], prefix: str, *args: Any, **kwargs: Any
    ) -> None:
        """Load as `nn.Module` does, but let no tensor under HF's names be left out.

        Tools load with strict=False: PEFT an adapter, and HF's Trainer a checkpoint to resume.
        """
        theirs = next((key for key in state_dict if key.startswith(f"{prefix}model.")), None)
        if theirs is not None and not hasattr(self, "model"):
            raise CheckpointError(
                f"state dict: {theirs!r} is a name of HF's model, and this model's names differ; "
                "load a checkpoint or an adapter with from_hf, or wrap the model for PEFT "
                "(LigerForCausalLM.from_native)"
            )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    @classmethod
    def weight_map(cls, config: Any) -> WeightMap:
        """Return the map from this config's parameters to the tensors of an HF checkpoint.

        A family has one. An architecture of one's own need not: its checkpoint holds the
        parameters as they are, under their own names.

        Raises:
            ConfigError: the class has no own weight map, and its checkpoints would look like
                those of a family, or could not hold all of its tensors.
        """
        with torch.device("meta"), WithoutInitialValues():
            model = cls(config)
        _check_own_architecture(model)
        return WeightMap(
            tuple(
                packed_entry(name, tuple(weight.shape[1:]), (name, len(weight)))
                for name, weight in model.named_parameters()
            )
        )

    @classmethod
    def on_meta(cls, config: Any) -> tuple[Self, WeightMap]:
        """Return the model on the meta device, without values, and its checked weight map.

        Raises:
            ConfigError: the class has no config_class, or its weight map does not fit its
                parameters: see `WeightMap.check`.
        """
        check_class(cls)
        weight_map = cls.weight_map(config)
        with torch.device("meta"), WithoutInitialValues():
            model = cls(config)
        check_buffers(model)
        parameters = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
        weight_map.check(cls.__name__, parameters)
        return model, weight_map

    @classmethod
    def from_hf(
        cls,
        path: str | os.PathLike[str],
        *,
        dtype: torch.dtype | str | None = None,
        device: torch.device | str = "cpu",
        revision: str | None = None,
        allow_nonfinite: bool = False,
        float8: str | None = None,
        **hub_options: Unpack[HubOptions],
    ) -> Self:
        """Load an HF checkpoint.

        Args:
            path: a local folder, or a hub id such as "meta-llama/Llama-3.2-1B".
            dtype: dtype of the parameters, or its name, such as "bfloat16" or "bf16". By default,
                and with "auto", each keeps the dtype of the checkpoint, and always one that a
                family makes without gradient and does not name in `cast_without_gradient`.
            device: device of the parameters. They are loaded onto it tensor by tensor. On "meta"
                names and shapes are checked, and no values are read: `ligermodels.shard` then gives
                each rank its part of the parameters and reads only that.
            revision: branch, tag or commit of a hub id.
            allow_nonfinite: whether to accept NaN and infinite weights.
            float8: a recipe of `ligermodels.float8.convert`, by which the linears of the layers
                compute. The parameters are the same as without it.
            hub_options: token, cache_dir and local_files_only: see `HubOptions`.
        Raises:
            ValueError: dtype is not a dtype that parameters can have, or there is no such device.
            ConfigError: config.json is damaged, belongs to another family, or needs a feature that
                is not implemented; or no linear can run in float8.
            CheckpointError: weights are missing, unexpected, mis-shaped, damaged or quantised,
                a tokenizer or generation file is damaged, or the repository does not exist or
                denies access. Names and shapes are checked before anything large is allocated.
        """
        dtype = _parameter_dtype(dtype)
        device = check_device(device)
        check_class(cls)
        folder = hub.resolve(path, revision=revision, **hub_options)

        def read(real: Path) -> tuple[ModelConfig, Checkpoint, dict[str, bytes], dict[str, Any]]:
            config = cls.config_class.from_hf(real)
            checkpoint = Checkpoint(real, allow_nonfinite=allow_nonfinite)
            generation = read_json_if_present(real / GENERATION_CONFIG_NAME, CheckpointError)
            return config, checkpoint, copied_files(real), generation or {}

        config, checkpoint, source_files, generation_config = read_one_version(folder, read)
        model, weight_map = cls.on_meta(config)
        try:
            stored = checkpoint.plan(weight_map)
        except CheckpointError as error:
            if not (absent := hf_config.absent_sizes(config.extra, type(config))):
                raise
            said = f"{folder / CONFIG_NAME}: {absent}, which does not fit; add it"
            raise CheckpointError(f"{said}\n{error}") from None
        reads_now = device.type != "meta"
        if reads_now:
            checkpoint.check_aliases(weight_map)
        if left_out := checkpoint.left_out:
            counts = ", ".join(f"{count} of {start}*" for start, count in left_out.items())
            warnings.warn(
                f"{folder}: loading the text model alone; tensors left out: {counts}", stacklevel=2
            )
        if os.path.lexists(folder / ADAPTER_CONFIG_NAME):
            warnings.warn(
                f"{folder / ADAPTER_CONFIG_NAME}: this adapter beside the model is not added to it",
                stacklevel=2,
            )
        own_dtype = model.with_own_dtype()
        if dtype is None:
            _check_one_dtype(stored, checkpoint, [x for x in weight_map if x.name not in own_dtype])
        constants = checkpoint.constants()
        for name, value in weight_map.constants.items():
            if name in constants and not constants[name].is_close(value):
                raise CheckpointError(
                    f"{checkpoint.tensors[name].path}: {name!r} does not hold the constant of "
                    f"{cls.__name__}'s weight map, {value.tolist()}; the model would compute "
                    "something else than the checkpoint's"
                )
        weights: dict[str, Tensor] = {
            entry.name: empty_in_huge_pages(
                entry.shape,
                stored[entry.name] if dtype is None or entry.name in own_dtype else dtype,
                device,
            )
            for entry in weight_map
        }
        if reads_now:
            reads = checkpoint.read_all([(entry, weights[entry.name]) for entry in weight_map])
            for _ in track(reads, "loading weights", len(weights)):
                pass
        _set_parameters(model, weights)
        for module in model.modules():
            if isinstance(module, RotaryEmbedding):
                module.to_empty(device=device)  # recomputes its buffers from the config
        if reads_now:
            model.compute_buffers(device)
        if dtype is not None:
            config.dtype = name_of(dtype)
        model.source = Source(
            folder=folder,
            dtype=model.embed_tokens.weight.dtype,
            layout=checkpoint.layout,
            spelling=checkpoint.spelling,
            constants=constants,
            files=source_files,
            generation_config=generation_config,
            unread=None if reads_now else checkpoint,
        )
        if float8 is not None:
            convert(model, float8)
        return model

    def with_own_dtype(self) -> set[str]:
        """Return the names of the parameters that keep their dtype in `from_hf(dtype=...)`."""
        found = {name for name, weight in self.named_parameters() if not weight.requires_grad}
        return {name for name in found if not name.endswith(self.cast_without_gradient)}

    def compute_buffers(self, device: torch.device | str | None = None) -> None:
        """Give the buffers the values of a new model: one made on the meta device has none.

        Args: device: the device for the buffers; None keeps each on its device.
        """
        own = [
            (f"{path}.{name}" if path else name, module, name, buffer)
            for path, module in self.named_modules()
            if not isinstance(module, RotaryEmbedding)  # it computes its buffers itself
            for name, buffer in module.named_buffers(recurse=False)
        ]
        if not own:
            return
        with torch.device("cpu"), WithoutInitialValues():  # the weights take no memory yet
            values = dict(type(self)(self.built_from).named_buffers())
        for path, module, name, buffer in own:
            if path in values:
                setattr(module, name, values[path].to(device or buffer.device))

    def save_hf(
        self,
        folder: str | os.PathLike[str],
        *,
        max_shard_size: int | str = 5 * 10**9,
        allow_nonfinite: bool = False,
        write_heads: Callable[[Path], None] | None = None,
        float8: bool = False,
        mxfp4: bool = False,
    ) -> None:
        """Write an HF checkpoint, in the format that transformers writes and reads.

        The save replaces the old checkpoint in one step: if it is killed, the old one remains. It
        also writes the tokenizer and generation files (`source.files`) as they were when the model
        was loaded. Other files in the folder stay. Several threads and processes may save to one
        folder and load from it: each load gets one whole checkpoint.

        Every rank of a model that `fully_shard` or `ligermodels.shard` has sharded must call it.
        Rank 0 writes the same files as for a whole model. It takes memory for one whole parameter,
        and the other ranks take none. (Under tensor parallelism, those of its group take as much,
        and with FSDP2 a part of a parameter more.)

        Args:
            max_shard_size: largest size of a weight file, in bytes, or as a text such as "5GB".
            allow_nonfinite: whether to write NaN and infinite weights.
            write_heads: called with the new folder before it gets its name, to write Medusa's heads
                into it (`medusa_file.save_heads`). With it, heads in the old folder do not stay.
            float8: whether to write the weights of the linears that compute in float8 in e4m3, with
                a scale for each row, in the format of compressed-tensors. `from_hf` gives them the
                dtype of the scales again, or another one.
            mxfp4: whether the weights of experts that were loaded in MXFP4 are written as the
                source has them, byte for byte, which must still be where it was. They must not
                have changed, as after training with frozen experts. By default they are written in
                the dtype of the model.
        Raises:
            ConfigError: max_shard_size is not a number of bytes, the weight map is wrong, float8 is
                asked for and no linear computes in it, or mxfp4 and the source has no such weights.
            SaveError: the disk is full or not writable, the config was changed after the model was
                built, a weight is NaN or infinite, a head is tied to an embedding that is no
                longer in the model, or a parameter cannot be saved: it belongs to a wrapper, is
                sparse, quantised or on the meta device, or does not have the config's shape. The
                old content of the folder is unchanged.
        """
        shard_bytes = parse_bytes(max_shard_size, "max_shard_size")
        names = {f"{n}.weight" for n, m in self.named_modules() if isinstance(m, Float8Linear)}
        if float8 and not names:
            raise ConfigError(
                "save_hf: float8=True, but no linear computes in float8; call "
                "ligermodels.float8.convert(model) first"
            )
        layout = layout_of(self)
        if layout is not None:
            reshard(self)
        config, weight_map, weights = checked_for_save(self, layout, folder)
        constants = {name: StoredTensor.of(x) for name, x in weight_map.constants.items()}
        constants |= self.source.constants
        config_dict, original = hf_config.to_hf(config), None
        if not self.source.spelling:  # The names are those of the text model alone.
            config_dict = hf_config.text_config(config_dict, type(config))
            config_dict.setdefault("architectures", [hf_config.architecture(type(config))])
        if mxfp4:
            original = self._mxfp4_source(weight_map)
            weight_map = original.weight_map
            if hf_config.QUANTIZER in config.extra:
                config_dict[hf_config.QUANTIZER] = config.extra[hf_config.QUANTIZER]
        else:
            weight_map = weight_map.written_as(self.source.layout)
        weight_map = weight_map.spelled(self.source.spelling)

        def write(get_tensor: Callable[[str], Tensor]) -> None:
            export.save(
                folder,
                config_dict,
                weight_map,
                get_tensor,
                {name: weight.dtype for name, weight in weights.items()},
                constants=constants,
                source_files=self.source.files,
                max_shard_size=shard_bytes,
                allow_nonfinite=allow_nonfinite,
                write_added=write_heads,
                float8=names if float8 else (),
                mxfp4=original,
            )

        if layout is None:
            return write(lambda name: weights[name].detach())
        return layout.save(weights, write)

    def _mxfp4_source(self, weight_map: WeightMap) -> Checkpoint:
        """Return the checkpoint whose weights in MXFP4 a save writes again."""
        name, folder = self.source.layout, self.source.folder
        if name is None or folder is None or not weight_map.in_layout(name).is_mxfp4:
            raise ConfigError(
                "save_hf: mxfp4=True, but the model was not loaded from weights in MXFP4; save it "
                "without this option"
            )
        original = Checkpoint(folder, allow_nonfinite=True)
        original.plan(weight_map)
        if original.layout != name:
            raise SaveError(
                f"{folder}: the weights in MXFP4 that the model was loaded from are no longer "
                "there; save it without mxfp4=True"
            )
        return original

    def hf_map(self) -> WeightMap:
        """Return the weight map with HF's names as they were in the checkpoint of the model."""
        return self.weight_map(self.built_from).spelled(self.source.spelling)

    @property
    def device(self) -> torch.device:
        """The device of the embedding. Other parameters may be elsewhere, as in a `device_map`."""
        return self.embed_tokens.weight.device

    @property
    def dtype(self) -> torch.dtype:
        """The dtype of the embedding. Other parameters may have another one."""
        return self.embed_tokens.weight.dtype

    def num_parameters(self, only_trainable: bool = False, exclude_embeddings: bool = False) -> int:
        """Return how many numbers the parameters have, over all ranks of a sharded model.

        A tied head has no parameter of its own, so its weight counts once.

        Args:
            only_trainable: whether to leave out frozen parameters.
            exclude_embeddings: whether to leave out the embedding, and with it a tied head.
        """
        embedding = self.embed_tokens.weight if exclude_embeddings else None
        whole = {} if self.layout is None else self.layout.shapes
        return sum(
            math.prod(whole.get(name, weight.shape))
            for name, weight in self.named_parameters()
            if weight is not embedding and (weight.requires_grad or not only_trainable)
        )

    def whole_parameter(self, name: str) -> Tensor:
        """Return a parameter whole on this rank. Every rank of a sharded model must call it."""
        layout = layout_of(self)
        if layout is None:
            return self.get_parameter(name).detach()
        reshard(self)
        return layout.whole(name, self.get_parameter(name))


def check_class(cls: type[HFModel]) -> None:
    """Raise ConfigError unless the class says what its config is and how weights are mapped."""
    config_class = getattr(cls, "config_class", None)
    if not isinstance(config_class, type) or not issubclass(config_class, ModelConfig):
        raise ConfigError(
            f"{cls.__name__}: config_class is {config_class!r}; set it to the family's subclass of "
            "ModelConfig"
        )


class WithoutInitialValues(TorchFunctionMode):
    """Skip the functions of `torch.nn.init` for parameters, and for tensors on the meta device.

    There, drawing weights computes nothing but takes longer than the rest of building a model.
    Parameters on another device stay as they were allocated.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if getattr(func, "__module__", None) == "torch.nn.init":
            tensor = kwargs["tensor"] if "tensor" in kwargs else args[0]
            if tensor.is_meta or isinstance(tensor, nn.Parameter):
                return tensor
        return func(*args, **kwargs)


def _check_own_architecture(model: HFModel) -> None:
    """Raise unless the parameters of a model without weight map are a checkpoint of their own."""
    name, model_type = type(model).__name__, model.config.model_type
    others = [HFModel]
    for other in others:
        others += other.__subclasses__()
        defines_map = "weight_map" in vars(other) or getattr(other, "hf_names", None) is not None
        if defines_map and getattr(other, "config_class", None) is not None:
            if other.config_class.model_type == model_type:
                raise ConfigError(
                    f"{name} has no weight map, and model_type {model_type!r} belongs to "
                    f"{other.__name__}, so that other programs would read its checkpoints as that; "
                    "give it a config class with its own model_type"
                )
    weights: dict[int, str] = {}
    for key, weight in named_weights(model).items():
        if weights.setdefault(id(weight), key) != key:
            raise ConfigError(
                f"{name}: {weights[id(weight)]!r} and {key!r} are one parameter, which a "
                "checkpoint cannot say; tie a head with LossHead(tied_to=...), or save the "
                "state_dict()"
            )
        if weight.dim() == 0:
            raise ConfigError(f"{name}: {key!r} has no dimension; give it the shape (1,)")


def _set_parameters(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Replace each parameter, in all modules that have it, by one with the values in `weights`."""
    parameters = dict(model.named_parameters())
    new = {id(x): nn.Parameter(weights[name], x.requires_grad) for name, x in parameters.items()}
    for module in model.modules():
        for key, x in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            setattr(module, key, new[id(x)])


def _check_one_dtype(
    stored: dict[str, torch.dtype], checkpoint: Checkpoint, entries: list[Entry]
) -> None:
    """Raise if embeddings and projections are stored in several dtypes; others may differ."""
    kinds = (".weight", ".bias", "_proj")
    entries = [x for x in entries if "norm" not in x.name and x.name.endswith(kinds)]
    first = entries[0]
    for entry in entries:
        if stored[entry.name] != stored[first.name]:
            info = checkpoint.tensors[entry.spans[0].source]
            raise CheckpointError(
                f"{info.path}: {entry.spans[0].source!r} is stored in "
                f"{name_of(stored[entry.name])}, but {first.spans[0].source!r} in "
                f"{name_of(stored[first.name])}; choose one dtype for all: from_hf(..., dtype=...)"
            )


def check_device(device: torch.device | str) -> torch.device:
    """Return the device, or raise ValueError if this machine or PyTorch has none of this name."""
    try:
        found = torch.device(device)
        torch.empty(1, device=found)
    except (RuntimeError, AssertionError, TypeError) as error:
        gpus = [f"'cuda:{index}'" for index in range(torch.cuda.device_count())]
        known = ", ".join(["'cpu'", "'meta'", *(["'cuda'"] if gpus else []), *gpus])
        raise ValueError(
            f"device is {device!r}, which cannot be used ({first_line(error).rstrip('.')}); "
            f"expected one of {known}, or another device of this PyTorch. A model is loaded onto "
            "one device; `ligermodels.shard` divides one loaded onto 'meta' among several"
        ) from None
    return found


def _parameter_dtype(dtype: torch.dtype | str | None) -> torch.dtype | None:
    """Return the dtype that parameters shall have, or None if they keep theirs."""
    if dtype is None or dtype == "auto":
        return None
    names = {name_of(known): known for known in DTYPES.values()}
    found = names.get(dtype_name(dtype)) if isinstance(dtype, str) else dtype
    if found not in names.values():
        raise ValueError(f"dtype is {dtype!r}; expected one of {[*names.values()]}, or its name")
    return found


# These config fields may change after the modules are made, because no module computes with them.
_FREE = {
    *("vocab_size", "initializer_range", "dtype", "extra"),
    *("pad_token_id", "bos_token_id", "eos_token_id"),
}
# Other rope types compute, or may compute, with max_position_embeddings.
_ROPES_OF_ANY_LENGTH = ("default", "linear", "proportional")


def checked_for_save(
    model: Any, layout: ModelLayout | None, folder: str | os.PathLike[str]
) -> tuple[ModelConfig, WeightMap, dict[str, nn.Parameter]]:
    """Return the config to export, the weight map and the parameters by name.

    With an untied config, a weight that the user has tied by hand is saved under both names.

    Raises:
        SaveError, ConfigError: a checkpoint cannot hold the model: see `HFModel.save_hf`.
    """
    _check_config(model, folder)
    config, dtype = model.config, model.dtype
    if dtype != model.source.dtype:
        config = dataclasses.replace(config, dtype=name_of(dtype))
    weight_map = model.weight_map(config)
    weights = named_weights(model)
    shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
    if layout is not None:
        shapes |= {n: shape for n, shape in layout.shapes.items() if n in shapes}
    _check_weights(weights, shapes, {entry.name: entry.shape for entry in weight_map}, folder)
    weight_map.check(type(model).__name__, shapes)  # The class need not be registered.
    check_buffers(model, f"{Path(folder)}: ", SaveError)
    _check_tied(model, folder)
    return config, weight_map, weights


def named_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of each module by name.

    A parameter that belongs to several modules has several names. A module that the model uses in
    several places, such as a block of a decoder that runs it again, counts once.
    """
    return {
        f"{path}.{key}" if path else key: weight
        for path, module in model.named_modules()
        for key, weight in module.named_parameters(recurse=False, remove_duplicate=False)
    }


def _check_weights(
    weights: dict[str, torch.nn.Parameter],
    shapes: Mapping[str, tuple[int, ...]],
    expected: dict[str, tuple[int, ...]],
    folder: str | os.PathLike[str],
) -> None:
    """Raise SaveError unless the weights have the names and shapes of a checkpoint, and values."""
    where = Path(folder)
    if odd := sorted(weights.keys() ^ expected.keys()):
        raise SaveError(
            f"{where}: parameter {odd[0]!r} does not belong to this architecture or is missing "
            f"(this is so for {len(odd)} parameters); merge adapters first (peft: "
            "merge_and_unload), remove wrappers around projections, and pack those that were split "
            f"(ligermodels.integrations.projections.pack_projections)\n{listing(odd)}"
        )
    for name, shape in expected.items():
        if fault := _fault(weights[name], shapes[name], shape):
            raise SaveError(f"{where}: parameter {name!r} {fault}")


def _fault(weight: nn.Parameter, shape: tuple[int, ...], expected: tuple[int, ...]) -> str | None:
    """Return why a checkpoint cannot hold a parameter, or None."""
    # DeepSpeed marks its parameters so. Outside of GatheredParameters they are empty.
    status = getattr(getattr(weight, "ds_status", None), "name", "AVAILABLE")
    if hasattr(weight, "ds_id") and status != "AVAILABLE":
        return (
            "is divided among the ranks by DeepSpeed's ZeRO-3; save inside of `with "
            "deepspeed.zero.GatheredParameters([*model.parameters()]):` on every rank"
        )
    plain = type(weight) is nn.Parameter and weight.layout is torch.strided
    if not plain and not is_sharded(weight):
        return (
            f"is a {type(weight).__name__} of {weight.layout}, not a plain tensor, such as one "
            "that was quantised; replace it by its values in a float dtype, as an nn.Parameter"
        )
    if shape != expected:
        return (
            f"has shape {shape}, but the config needs {expected}; change model.config so that it "
            "matches the model"
        )
    if weight.is_meta:
        return "is on the meta device, so it has no values; load or initialise the weights first"
    return None


def _check_tied(model: nn.Module, folder: str | os.PathLike[str]) -> None:
    """Raise if a tied head computes with a weight that the checkpoint would not hold."""
    weights = {id(weight) for weight in model.parameters()}
    for name, module in model.named_modules():
        if isinstance(module, LossHead) and module.is_tied and id(module.weight) not in weights:
            raise SaveError(
                f"{Path(folder)}: {name!r} is tied to an embedding that is no longer in the model, "
                "because another one has replaced it (peft: modules_to_save), and a checkpoint "
                f"holds one weight for both; call model.{name}.tie(embedding) with the new one, if "
                "the head shall compute with it"
            )


def check_buffers(
    model: nn.Module, where: str = "", error: type[ConfigError | SaveError] = ConfigError
) -> None:
    """Raise if the model has tensors whose values neither a checkpoint nor a new model gives.

    Args: where: how the message begins; error: the class to raise.
    """
    name = f"{where}{type(model).__name__}"
    parameters = dict(model.named_parameters(remove_duplicate=False))
    if buffers := sorted(model.state_dict().keys() - parameters.keys()):
        raise error(
            f"{name}: a checkpoint holds parameters only, and {buffers[0]!r} is a buffer; register "
            "it with persistent=False, or make it a parameter without gradient\n"
            f"{listing(buffers)}"
        )
    for path, module in model.named_modules():
        for key, value in vars(module).items():
            if isinstance(value, Tensor) and value.is_meta:
                raise error(
                    f"{name}: {f'{path}.{key}'.lstrip('.')!r} is a tensor, but no buffer, so that "
                    "a load would leave it without values; use self.register_buffer("
                    f"{key!r}, ..., persistent=False)"
                )


def _check_config(model: Any, folder: str | os.PathLike[str]) -> None:
    """Raise if the config to export is not the one that the model computes with."""
    config, built_from = model.config, model.built_from
    if getattr(model, "config_class", None) is not type(config):
        raise SaveError(
            f"{Path(folder)}: {type(model).__name__} does not declare {type(config).__name__} as "
            f"its config_class, so other programs might load it as {config.model_type!r} and "
            "compute something else; save its state_dict() instead"
        )
    rope = (built_from.rope_scaling or {}).get("rope_type", "default")
    free = _FREE | ({"max_position_embeddings"} if rope in _ROPES_OF_ANY_LENGTH else set())
    for name in (field.name for field in dataclasses.fields(config)):
        now, then = getattr(config, name), getattr(built_from, name)
        if name not in free and now != then:
            raise SaveError(
                f"{Path(folder)}: config.{name} is {now!r}, but the model was built with {then!r} "
                "and still computes with that; set it back, or build a model from the new config"
            )


def name_of(dtype: torch.dtype) -> str:
    """Return the name of a dtype in a config.json, such as "bfloat16"."""
    return str(dtype).removeprefix("torch.")

"""Load a model from an HF folder (`from_hf`) and save it to one (`save_hf`)."""

import copy
import dataclasses
import inspect
import math
import os
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from tqdm import tqdm
from typing_extensions import Self, Unpack

from ligermodels.converters import export, hf_config, hub, huge_pages
from ligermodels.converters.checkpoint import Checkpoint
from ligermodels.converters.checkpoint_files import (
    ADAPTER_CONFIG_NAME,
    GENERATION_CONFIG_NAME,
    copied_files,
)
from ligermodels.converters.dtypes import dtype_name
from ligermodels.converters.files import read_json_if_present
from ligermodels.converters.hub import HubOptions
from ligermodels.converters.safetensors_file import DTYPES, StoredTensor
from ligermodels.converters.save_dir import read_one_version
from ligermodels.converters.weight_map import WeightMap, packed_entry
from ligermodels.errors import CheckpointError, ConfigError, SaveError, first_line, listing
from ligermodels.layers import LossHead, RotaryEmbedding
from ligermodels.layers.fusion import is_sharded
from ligermodels.memory.byte_sizes import parse_bytes
from ligermodels.models.config import ModelConfig
from ligermodels.models.parts import (
    TensorShard,
    gathers_to_rank_0,
    local_parts,
    reshard,
    whole_on_rank_0,
    whole_tensor,
)
from ligermodels.models.ranks import (
    error_on_all_ranks,
    gathered,
    led_by_rank_0,
    num_ranks,
    rank,
)


class HFModel(nn.Module):
    """A module that loads and saves HF checkpoints.

    Attributes:
        config: the family's config.
        built_from: a copy of the config from the time when the modules were made.
        source_folder: the local checkpoint folder that the weights were loaded from, or None.
        source_dtype: the dtype of the weights when they were loaded, or None.
        source_constants: HF name -> a tensor of the checkpoint that the model does not need.
            `save_hf` writes it as it was.
        source_files: name -> content of the tokenizer and generation files that were in
            source_folder when the weights were loaded. `save_hf` writes them.
        source_generation_config: the content of generation_config.json when the weights were
            loaded; {} without such a file.
        tensor_shards: how tensor parallelism has cut parameters, by name; {} without it.
    """

    config_class: ClassVar[type[ModelConfig]]
    embed_tokens: nn.Embedding

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        config.validate()
        self.config = config
        self.built_from = copy.deepcopy(config)
        self.source_folder: Path | None = None
        self.source_dtype: torch.dtype | None = None
        self.source_constants: dict[str, StoredTensor] = {}
        self.source_files: dict[str, bytes] = {}
        self.source_generation_config: dict[str, Any] = {}
        self.tensor_shards: dict[str, TensorShard] = {}
        self._unread: Checkpoint | None = None  # the checkpoint of a model on the meta device

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
                "load a checkpoint with from_hf, and convert an adapter with "
                "ligermodels.adapters.peft_format.pack_adapter"
            )
        super()._load_from_state_dict(state_dict, prefix, *args, **kwargs)

    @classmethod
    def weight_map(cls, config: Any) -> WeightMap:
        """Return the map from this config's parameters to the tensors of an HF checkpoint.

        A family defines it. An architecture of one's own need not: its checkpoint holds the
        parameters as they are, under their own names.

        Raises:
            ConfigError: the class has no own weight map, and its checkpoints would look like
                those of a family, or could not hold all of its tensors.
        """
        with torch.device("meta"), _WithoutInitialValues():
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
        if not isinstance(weight_map, WeightMap):
            raise ConfigError(
                f"{cls.__name__}: weight_map returns {type(weight_map).__name__}; return a "
                "WeightMap(tuple of entries)"
            )
        with torch.device("meta"), _WithoutInitialValues():
            model = cls(config)
        _check_buffers(model)
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
        **hub_options: Unpack[HubOptions],
    ) -> Self:
        """Load an HF checkpoint.

        Args:
            path: a local folder, or a hub id such as "meta-llama/Llama-3.2-1B".
            dtype: dtype of the parameters, or its name, such as "bfloat16" or "bf16". By default,
                and with "auto", each keeps the dtype of the checkpoint.
            device: device of the parameters. They are loaded onto it tensor by tensor. On "meta"
                names and shapes are checked, and no values are read: `ligermodels.shard` then gives
                each rank its part of the parameters and reads only that.
            revision: branch, tag or commit of a hub id.
            allow_nonfinite: whether to accept NaN and infinite weights.
            hub_options: token, cache_dir and local_files_only: see `HubOptions`.
        Raises:
            ValueError: dtype is not a dtype that parameters can have, or there is no such device.
            ConfigError: config.json is damaged, belongs to another family, or needs a feature that
                is not implemented.
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
        stored = checkpoint.plan(weight_map)
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
        if dtype is None:
            _check_one_dtype(stored, checkpoint, weight_map)
        constants = checkpoint.constants()
        for name, value in weight_map.constants.items():
            if name in constants and not constants[name].is_close(value):
                raise CheckpointError(
                    f"{checkpoint.tensors[name].path}: {name!r} does not hold the constant of "
                    f"{cls.__name__}'s weight map, {value.tolist()}; the model would compute "
                    "something else than the checkpoint's"
                )
        weights: dict[str, Tensor] = {
            entry.name: huge_pages.empty(entry.shape, dtype or stored[entry.name], device)
            for entry in weight_map
        }
        if reads_now:
            reads = checkpoint.read_all([(entry, weights[entry.name]) for entry in weight_map])
            for _ in tqdm(reads, "Loading weights", len(weights), unit="tensor", disable=None):
                pass
        else:
            model._unread = checkpoint
        _set_parameters(model, weights)
        for module in model.modules():
            if isinstance(module, RotaryEmbedding):
                module.to_empty(device=device)  # recomputes its buffers from the config
        if reads_now:
            model._compute_buffers(device)
        if dtype is not None:
            config.dtype = _name(dtype)
        model.source_folder = folder
        model.source_constants = constants
        model.source_files = source_files
        model.source_generation_config = generation_config
        model.source_dtype = model.embed_tokens.weight.dtype
        return model

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
        shards = self.tensor_shards
        return sum(
            math.prod(shards[name].shape if name in shards else weight.shape)
            for name, weight in self.named_parameters()
            if weight is not embedding and (weight.requires_grad or not only_trainable)
        )

    @property
    def is_unread(self) -> bool:
        """Whether `from_hf(device="meta")` has made the model, and its values are not read yet."""
        return self._unread is not None

    def read_parts(self) -> None:
        """Read this rank's parts of the parameters of a model that `from_hf(device="meta")` made.

        Every rank must call it, after it has allocated the parameters.

        Raises:
            CheckpointError: on any rank, a value is NaN or infinite, a file was changed after its
                header was read, or a tied head differs from the embedding. All ranks raise.
        """
        checkpoint, self._unread = self._unread, None
        assert checkpoint is not None, "from_hf was not called with device='meta'"
        weight_map, weights = self.weight_map(self.built_from), dict(self.named_parameters())
        silent = True if rank() else None
        with error_on_all_ranks(CheckpointError):
            checkpoint.check_aliases(weight_map, share=(rank(), num_ranks()))
            for entry in tqdm(weight_map.entries, "Loading weights", disable=silent):
                shard = self.tensor_shards.get(entry.name)
                for part in local_parts(weights[entry.name], shard):
                    checkpoint.read(entry, part.values, part.row, part.column)
        self._compute_buffers()

    def _compute_buffers(self, device: torch.device | str | None = None) -> None:
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
        with torch.device("cpu"), _WithoutInitialValues():  # the weights take no memory yet
            values = dict(type(self)(self.built_from).named_buffers())
        for path, module, name, buffer in own:
            if path in values:
                setattr(module, name, values[path].to(device or buffer.device))

    def whole_parameter(self, name: str) -> Tensor:
        """Return a parameter whole on this rank. Every rank of a sharded model must call it."""
        reshard(self)
        return whole_tensor(self.get_parameter(name), self.tensor_shards.get(name))

    def save_hf(
        self,
        folder: str | os.PathLike[str],
        *,
        max_shard_size: int | str = 5 * 10**9,
        allow_nonfinite: bool = False,
        overwrite: bool = True,
        write_heads: Callable[[Path], None] | None = None,
    ) -> None:
        """Write an HF checkpoint, in the format that transformers writes and reads.

        The save replaces the old checkpoint in one step: if it is killed, the old one remains. It
        also writes the tokenizer and generation files (`source_files`) as they were when the model
        was loaded. Other files in the folder stay. Several threads and processes may save to one
        folder and load from it: each load gets one whole checkpoint.

        Every rank of a model that `fully_shard` or `ligermodels.shard` has sharded must call it.
        Rank 0 writes the same files as for a whole model. It takes memory for one whole parameter,
        and the other ranks take none. (Under tensor parallelism, those of its group take as much,
        and with FSDP2 a part of a parameter more.)

        Args:
            max_shard_size: largest size of a weight file, in bytes, or as a text such as "5GB".
            allow_nonfinite: whether to write NaN and infinite weights.
            overwrite: whether to replace files of a checkpoint that are in the folder.
            write_heads: called with the new folder before it gets its name, to write Medusa's heads
                into it (`heads_file.save_heads`). With it, heads in the old folder do not stay.
        Raises:
            ConfigError: max_shard_size is not a number of bytes, or the weight map is wrong.
            SaveError: the disk is full or not writable, the config was changed after the model was
                built, a weight is NaN or infinite, a head is tied to an embedding that is no
                longer in the model, or a parameter cannot be saved: it belongs to a wrapper, is
                sparse, quantised or on the meta device, or does not have the config's shape. The
                old content of the folder is unchanged.
        """
        config = self.config
        shard_bytes = parse_bytes(max_shard_size, "max_shard_size")
        _check_config(self, folder)
        reshard(self)
        dtype = self.embed_tokens.weight.dtype
        if dtype != self.source_dtype:
            config = dataclasses.replace(config, dtype=_name(dtype))
        weight_map = self.weight_map(config)
        # With an untied config, a weight that the user has tied by hand is saved under both names.
        weights = _named_weights(self)
        shards = self.tensor_shards
        shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        shapes |= {name: shards[name].shape for name in shapes.keys() & shards.keys()}
        _check_savable(weights, shapes, {entry.name: entry.shape for entry in weight_map}, folder)
        weight_map.check(type(self).__name__, shapes)  # The class need not be registered.
        _check_buffers(self, f"{Path(folder)}: ", SaveError)
        _check_tied(self, folder)

        constants = {name: StoredTensor.of(x) for name, x in weight_map.constants.items()}
        constants |= self.source_constants

        def save(get_tensor: Callable[[str], Tensor]) -> None:
            export.save(
                folder,
                hf_config.to_hf(config),
                weight_map,
                get_tensor,
                constants=constants,
                source_files=self.source_files,
                max_shard_size=shard_bytes,
                dtypes={name: weight.dtype for name, weight in weights.items()},
                allow_nonfinite=allow_nonfinite,
                overwrite=overwrite,
                write_heads=write_heads,
            )

        if not shards and not any(map(is_sharded, weights.values())):
            return save(lambda name: weights[name].detach())
        simple = all(gathers_to_rank_0(weights[name], shards.get(name)) for name in weights)
        whole = whole_on_rank_0 if all(gathered(simple)) else whole_tensor
        led_by_rank_0(save, lambda name: whole(weights[name], shards.get(name)), SaveError)
        return None


def check_class(cls: type[HFModel]) -> None:
    """Raise ConfigError unless the class says what its config is and how weights are mapped."""
    config_class = getattr(cls, "config_class", None)
    if not isinstance(config_class, type) or not issubclass(config_class, ModelConfig):
        raise ConfigError(
            f"{cls.__name__}: config_class is {config_class!r}; set it to the family's subclass of "
            "ModelConfig"
        )
    if isinstance(inspect.getattr_static(cls, "weight_map"), FunctionType):
        raise ConfigError(
            f"{cls.__name__}: weight_map is called with the config alone, without self; declare it "
            "as `weight_map = staticmethod(weight_map)`"
        )


class _WithoutInitialValues(TorchFunctionMode):
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


def _named_weights(model: nn.Module) -> dict[str, nn.Parameter]:
    """Return the parameters of each module by name.

    A parameter that belongs to several modules has several names. A module that the model uses in
    several places, such as a block of a decoder that runs it again, counts once.
    """
    return {
        f"{path}.{key}" if path else key: weight
        for path, module in model.named_modules()
        for key, weight in module.named_parameters(recurse=False, remove_duplicate=False)
    }


def _set_parameters(model: nn.Module, weights: dict[str, Tensor]) -> None:
    """Replace each parameter, in all modules that have it, by one with the values in `weights`."""
    parameters = dict(model.named_parameters())
    new = {id(x): nn.Parameter(weights[name], x.requires_grad) for name, x in parameters.items()}
    for module in model.modules():
        for key, x in [*module.named_parameters(recurse=False, remove_duplicate=False)]:
            setattr(module, key, new[id(x)])


def _check_own_architecture(model: HFModel) -> None:
    """Raise unless the parameters of a model without weight map are a checkpoint of their own."""
    name, model_type = type(model).__name__, model.config.model_type
    others = [HFModel]
    for other in others:
        others += other.__subclasses__()
        defines_map = "weight_map" in vars(other) and other is not HFModel
        if defines_map and getattr(other, "config_class", None) is not None:
            if other.config_class.model_type == model_type:
                raise ConfigError(
                    f"{name} has no weight map, and model_type {model_type!r} belongs to "
                    f"{other.__name__}, so that other programs would read its checkpoints as that; "
                    "give it a config class with its own model_type"
                )
    weights: dict[int, str] = {}
    for key, weight in _named_weights(model).items():
        if weights.setdefault(id(weight), key) != key:
            raise ConfigError(
                f"{name}: {weights[id(weight)]!r} and {key!r} are one parameter, which a "
                "checkpoint cannot say; tie a head with LossHead(tied_to=...), or save the "
                "state_dict()"
            )
        if weight.dim() == 0:
            raise ConfigError(f"{name}: {key!r} has no dimension; give it the shape (1,)")
    _check_buffers(model)


def _check_buffers(
    model: HFModel, where: str = "", error: type[ConfigError | SaveError] = ConfigError
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


def _check_one_dtype(
    stored: dict[str, torch.dtype], checkpoint: Checkpoint, weight_map: WeightMap
) -> None:
    """Raise if embeddings and projections are stored in several dtypes; norms may differ."""
    entries = [entry for entry in weight_map if "norm" not in entry.name]
    first = entries[0]
    for entry in entries:
        if stored[entry.name] != stored[first.name]:
            info = checkpoint.tensors[entry.spans[0].source]
            raise CheckpointError(
                f"{info.path}: {entry.spans[0].source!r} is stored in "
                f"{_name(stored[entry.name])}, but {first.spans[0].source!r} in "
                f"{_name(stored[first.name])}; choose one dtype for all: from_hf(..., dtype=...)"
            )


# These config fields may change after the modules are made, because no module computes with them.
_FREE = {
    *("vocab_size", "initializer_range", "dtype", "extra"),
    *("pad_token_id", "bos_token_id", "eos_token_id"),
}
# Other rope types compute, or may compute, with max_position_embeddings.
_ROPES_OF_ANY_LENGTH = ("default", "linear", "proportional")


def _check_config(model: HFModel, folder: str | os.PathLike[str]) -> None:
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


def _check_savable(
    weights: dict[str, torch.nn.Parameter],
    shapes: Mapping[str, tuple[int, ...]],
    expected: dict[str, tuple[int, ...]],
    folder: str | os.PathLike[str],
) -> None:
    where = Path(folder)
    if odd := sorted(weights.keys() ^ expected.keys()):
        raise SaveError(
            f"{where}: parameter {odd[0]!r} does not belong to this architecture or is missing "
            f"(this is so for {len(odd)} parameters); merge adapters first (peft: "
            "merge_and_unload), remove wrappers around projections, and pack those that were split "
            f"(ligermodels.integrations.projections.pack_projections)\n{listing(odd)}"
        )
    for name, shape in expected.items():
        weight = weights[name]
        # DeepSpeed marks its parameters so. Outside of GatheredParameters they are empty.
        status = getattr(getattr(weight, "ds_status", None), "name", "AVAILABLE")
        if hasattr(weight, "ds_id") and status != "AVAILABLE":
            raise SaveError(
                f"{where}: parameter {name!r} is divided among the ranks by DeepSpeed's ZeRO-3; "
                "save inside of `with deepspeed.zero.GatheredParameters([*model.parameters()]):` "
                "on every rank"
            )
        if type(weight) is not nn.Parameter and not is_sharded(weight):
            raise SaveError(
                f"{where}: parameter {name!r} is a {type(weight).__name__}, not a plain tensor, "
                "such as one that was quantised; replace it by its values in a float dtype, as an "
                "nn.Parameter"
            )
        if shapes[name] != shape:
            raise SaveError(
                f"{where}: parameter {name!r} has shape {shapes[name]}, but the config needs"
                f" {shape}; change model.config so that it matches the model"
            )
        if weight.layout is not torch.strided:
            raise SaveError(
                f"{where}: parameter {name!r} is sparse ({weight.layout}), which a checkpoint "
                "cannot hold; make it dense first (Tensor.to_dense)"
            )
        if weight.is_meta:
            raise SaveError(
                f"{where}: parameter {name!r} is on the meta device, so it has no values; load or "
                "initialise the weights first"
            )


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
    names = {_name(known): known for known in DTYPES.values()}
    found = names.get(dtype_name(dtype)) if isinstance(dtype, str) else dtype
    if found not in names.values():
        raise ValueError(f"dtype is {dtype!r}; expected one of {[*names.values()]}, or its name")
    return found


def _name(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")

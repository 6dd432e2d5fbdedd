"""A module whose parameters are the tensors of an HF checkpoint, and what it came from."""

import copy
import inspect
import math
from types import FunctionType
from typing import Any, ClassVar

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode
from typing_extensions import Self

from ligermodels.converters.source import Source
from ligermodels.converters.weight_map import WeightMap, packed_entry
from ligermodels.errors import CheckpointError, ConfigError, SaveError, listing
from ligermodels.models.config import ModelConfig
from ligermodels.models.layout import Layout, layout_of


class HFModel(nn.Module):
    """A module whose parameters are the tensors of an HF checkpoint, and where they came from.

    Attributes:
        config: the family's config.
        built_from: a copy of the config from the time when the modules were made.
        source: the checkpoint that the model was loaded from.
        layout: how the model is divided over ranks, or None if this rank has all of it.
    """

    config_class: ClassVar[type[ModelConfig]]
    embed_tokens: nn.Embedding

    def __init__(self, config: ModelConfig) -> None:
        super().__init__()
        config.validate()
        self.config = config
        self.built_from = copy.deepcopy(config)
        self.source = Source()
        self.layout: Layout | None = None

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
        if not isinstance(weight_map, WeightMap):
            raise ConfigError(
                f"{cls.__name__}: weight_map returns {type(weight_map).__name__}; return a "
                "WeightMap(tuple of entries)"
            )
        with torch.device("meta"), WithoutInitialValues():
            model = cls(config)
        check_buffers(model)
        parameters = {name: tuple(weight.shape) for name, weight in model.named_parameters()}
        weight_map.check(cls.__name__, parameters)
        return model, weight_map

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
        layout.reshard(self)
        return layout.whole(name, self.get_parameter(name))


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
    for key, weight in named_weights(model).items():
        if weights.setdefault(id(weight), key) != key:
            raise ConfigError(
                f"{name}: {weights[id(weight)]!r} and {key!r} are one parameter, which a "
                "checkpoint cannot say; tie a head with LossHead(tied_to=...), or save the "
                "state_dict()"
            )
        if weight.dim() == 0:
            raise ConfigError(f"{name}: {key!r} has no dimension; give it the shape (1,)")


def check_buffers(
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

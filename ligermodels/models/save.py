"""Save a model as an HF checkpoint: `save_hf`, and what it refuses."""

import dataclasses
import os
from collections.abc import Callable, Mapping
from pathlib import Path

import torch
from torch import Tensor, nn

from ligermodels.converters import export, hf_config
from ligermodels.converters.safetensors_file import StoredTensor
from ligermodels.errors import SaveError, listing
from ligermodels.layers import LossHead
from ligermodels.layers.fusion import is_sharded
from ligermodels.memory.byte_sizes import parse_bytes
from ligermodels.models.hf_model import HFModel, check_buffers, named_weights
from ligermodels.models.layout import layout_of
from ligermodels.models.load import name_of


class SavableModel(HFModel):
    """A model that saves itself as an HF checkpoint."""

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
                into it (`medusa_file.save_heads`). With it, heads in the old folder do not stay.
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
        layout = layout_of(self)
        if layout is not None:
            layout.reshard(self)
        dtype = self.embed_tokens.weight.dtype
        if dtype != self.source.dtype:
            config = dataclasses.replace(config, dtype=name_of(dtype))
        weight_map = self.weight_map(config)
        # With an untied config, a weight that the user has tied by hand is saved under both names.
        weights = named_weights(self)
        shapes = {name: tuple(weight.shape) for name, weight in weights.items()}
        if layout is not None:
            shapes |= {n: shape for n, shape in layout.shapes.items() if n in shapes}
        _check_savable(weights, shapes, {entry.name: entry.shape for entry in weight_map}, folder)
        weight_map.check(type(self).__name__, shapes)  # The class need not be registered.
        check_buffers(self, f"{Path(folder)}: ", SaveError)
        _check_tied(self, folder)

        constants = {name: StoredTensor.of(x) for name, x in weight_map.constants.items()}
        constants |= self.source.constants

        def write(get_tensor: Callable[[str], Tensor]) -> None:
            export.save(
                folder,
                hf_config.to_hf(config),
                weight_map,
                get_tensor,
                constants=constants,
                source_files=self.source.files,
                max_shard_size=shard_bytes,
                dtypes={name: weight.dtype for name, weight in weights.items()},
                allow_nonfinite=allow_nonfinite,
                overwrite=overwrite,
                write_added=write_heads,
            )

        if layout is None:
            return write(lambda name: weights[name].detach())
        return layout.save(weights, write)


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

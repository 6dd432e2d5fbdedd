"""Change a checkpoint's dtype or shards, or verify its conversion.

Load the checkpoint SOURCE and write it to the folder TARGET. --dtype and --max-shard-size change
what is written. --verify compares every tensor of TARGET with SOURCE (cast to --dtype, if it is
given), bit for bit; weights that only SOURCE has in MXFP4 or float8 are decoded. Without TARGET,
--verify converts SOURCE to the native layout and back in a temporary folder, and compares the
result with SOURCE. If anything differs, the exit code is 1. SOURCE may also be a checkpoint of a
run: RUN/checkpoint-STEP, or its file in RUN/checkpoints.
Medusa's heads beside a model are converted with it.
"""

from __future__ import annotations

import sys
from dataclasses import MISSING, dataclass
from typing import TYPE_CHECKING

from ligermodels.cli.interrupts import raise_on_interrupt
from ligermodels.cli.options import LoadingOptions
from ligermodels.errors import LigerError, printable
from ligermodels.training.options import option

if TYPE_CHECKING:
    from pathlib import Path

    from torch import Tensor

    from ligermodels.models.base import DecoderModel


@dataclass(kw_only=True)
class Arguments(LoadingOptions):
    """The options of `convert`.

    Attributes:
        source: hub id or local folder of a checkpoint, or RUN/checkpoint-STEP
        target: the folder to write
        verify: compare tensors, config keys and tokenizer files
        max_shard_size: largest size of one weight file, such as 5GB
        overwrite: replace the checkpoint that TARGET holds
        float8: write the weights of the layers' linears in float8, as compressed-tensors reads them
        mxfp4: write the experts that SOURCE holds in MXFP4 as they are, and not decoded
    """

    source: str = option(MISSING, positional=True)
    target: str | None = option(None, positional=True)
    verify: bool = option(False)
    max_shard_size: int = option(5 * 10**9, is_size=True, at_least=1)
    overwrite: bool = option(False)
    float8: bool = option(False)
    mxfp4: bool = option(False)


def run(given: Arguments) -> None:
    """Load, write and compare, as the options ask."""
    from pathlib import Path

    from ligermodels.converters.files import CONFIG_NAME, files_left_out, is_adapter
    from ligermodels.converters.hub import checkpoint_step, resolve
    from ligermodels.converters.save_dir import read_one_version
    from ligermodels.converters.verify import compare, verify
    from ligermodels.float8 import convert
    from ligermodels.heads.medusa_file import read_heads
    from ligermodels.models.auto import AutoLiger, family_of
    from ligermodels.training.model import load_checkpoint

    target = None if given.target is None else Path(given.target)
    if target is None and (given.dtype or not given.verify):
        raise LigerError("convert: give TARGET, or --verify without --dtype, or both")
    if given.float8 and (target is None or given.verify):
        raise LigerError("convert: --float8 rounds the weights; give TARGET, without --verify")
    if target is not None:
        _check_target(target, given.overwrite)
    place = checkpoint_step(given.source)
    is_step = place is not None and not Path(given.source).joinpath(CONFIG_NAME).exists()
    source = Path(given.source) if is_step else resolve(given.source, revision=given.revision)
    is_whole = not is_step and not is_adapter(source)
    if not is_whole and (target is None or given.verify):
        raise LigerError(
            "convert: a checkpoint of a run, or an adapter, cannot be verified; give TARGET, "
            "without --verify"
        )
    if left_out := [] if is_step else files_left_out(source):
        print(f"ligermodels: not converted: {', '.join(map(printable, left_out))}", file=sys.stderr)

    def load(folder: Path) -> tuple[DecoderModel, dict[str, Tensor] | None]:
        if is_step and place is not None:
            return load_checkpoint(*place).to(given.loading()["dtype"]), None
        model = AutoLiger.from_hf(folder, **given.loading())
        return model, read_heads(model, folder) if is_whole else None

    if target is None:
        read_heads(AutoLiger.from_hf(source, device="meta"), source)  # It checks them.
        with raise_on_interrupt():  # It removes its temporary folder.
            report = verify(
                *(source, family_of(source)),
                max_shard_size=given.max_shard_size,
                allow_nonfinite=given.allow_nonfinite,
            )
    elif given.verify and target.exists() and target.samefile(source):
        raise LigerError("convert: --verify compares two folders; choose another TARGET")
    else:
        model, heads = load(source) if is_step else read_one_version(source, load)
        if given.float8:
            convert(model)  # it marks the linears
        _write(given, model, heads, target)
        if not given.verify:
            return
        kept = model.with_own_dtype()
        dtype = given.loading()["dtype"]
        report = compare(source, target, family_of(source), dtype=dtype, kept=kept)
    print(f"compared: {source} with {'its own export' if target is None else target}")
    print(report)
    if not report.ok:
        raise SystemExit(1)


def _check_target(target: Path, overwrite: bool) -> None:
    """Raise LigerError if the folder must not be written to."""
    from ligermodels.converters.export import replaced_names

    if target.suffix.lower() in (".gguf", ".safetensors", ".bin", ".pt") and not target.is_dir():
        raise LigerError(
            f"{target}: this is the name of a file, but convert writes a folder of safetensors and "
            f"JSON files; choose a name without {target.suffix!r} (llama.cpp's "
            "convert_hf_to_gguf.py makes a GGUF file of such a folder)"
        )
    if (present := replaced_names(target)) and not overwrite:
        raise LigerError(
            f"{target}: the folder holds {present[0]} of a checkpoint; replace it with "
            "--overwrite, or choose another folder"
        )


def _write(
    given: Arguments, model: DecoderModel, heads: dict[str, Tensor] | None, target: Path
) -> None:
    """Save a model, and the tensors of its heads."""
    from ligermodels.heads.medusa_file import write_heads

    dtype = given.loading()["dtype"]

    def write(folder: Path) -> None:
        if heads is not None:
            write_heads({name: x.to(dtype or x.dtype) for name, x in heads.items()}, folder)

    with raise_on_interrupt():  # A save removes what it has not completed.
        model.save_hf(
            target,
            max_shard_size=given.max_shard_size,
            allow_nonfinite=given.allow_nonfinite,
            write_heads=write,
            float8=given.float8,
            mxfp4=given.mxfp4,
        )
    print(f"wrote the checkpoint to {target}")

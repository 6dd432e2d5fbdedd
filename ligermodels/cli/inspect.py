"""Describe a checkpoint without loading its tensors.

Show a checkpoint's family, config, parameter count and memory needs. The command reads only the
config and the headers of the weight files, and checks them as a load does. It downloads a hub
checkpoint first. With --batch and --seq it also shows what each layer would keep for backward in
training, the predicted peak, and what else would fit.
"""

from __future__ import annotations

import json
import math
import sys
import textwrap
from collections.abc import Callable
from dataclasses import MISSING, dataclass
from functools import partial
from typing import TYPE_CHECKING, Any

from ligermodels.cli import console
from ligermodels.cli.options import CommonOptions
from ligermodels.errors import printable
from ligermodels.memory.byte_sizes import GIB
from ligermodels.training.config import PRECISIONS
from ligermodels.training.options import option

if TYPE_CHECKING:
    from ligermodels.training.model import Outlook

UNUSED = "config keys that the model does not use (an export keeps them)"
OTHER_TOWERS = "tensors that are not loaded (they belong to other towers)"
KEPT_TOWERS = "tensors that are not loaded, but that exports write again (of other towers)"


@dataclass(kw_only=True)
class Arguments(CommonOptions):
    """The options of `inspect`; the last five ask for a memory plan of training with AdamW.

    Attributes:
        model: hub id or local folder of a checkpoint
        revision: branch, tag or commit of a hub checkpoint
        json: print JSON
        batch: rows of a batch to plan for
        seq: tokens of a row to plan for
        budget: memory to plan for, such as 80GiB (default: the GPU's)
        gpu: GPU to plan for, such as H200 (default: this machine's, or H100)
        precision: precision to plan for
    """

    model: str = option(MISSING, positional=True)
    revision: str | None = option(None)
    json: bool = option(False)
    batch: int | None = option(None, at_least=1, needs="seq")
    seq: int | None = option(None, at_least=1, needs="batch")
    budget: str | None = option(None, metavar="SIZE", needs="batch")
    gpu: str | None = option(None, metavar="NAME", needs="batch")
    precision: str = option("bf16-mixed", choices=PRECISIONS, needs="batch")


def run(given: Arguments) -> None:
    """Print a checkpoint's description."""
    from dataclasses import asdict

    from rich.filesize import decimal

    from ligermodels.converters.hub import resolve
    from ligermodels.converters.inspect import describe
    from ligermodels.models.auto import family_of
    from ligermodels.training import model

    folder = resolve(given.model, revision=given.revision)
    family = family_of(folder)
    found = asdict(describe(folder, family))
    outlook: Outlook | None = None
    if given.batch is not None:
        sizes = {x: getattr(given, x) for x in ("batch", "seq", "budget", "gpu", "precision")}
        outlook = model.outlook(family, family.config_class.from_hf(folder), **sizes)
    if given.json:
        if outlook is not None:
            values = None if outlook.plan is None else outlook.plan.to_dict()
            found["memory_plan"] = {**vars(outlook), "plan": values}
        print(json.dumps(found, indent=2, default=str))
        return
    print(f"{found['folder']}: {found['family']}, {found['parameters']:,} parameters")
    size = partial(decimal, precision=2)
    stored = "stored bytes by dtype"
    if found["left_out"] or found["kept"]:
        stored += " (of the tensors that are loaded)"
    sections: dict[str, tuple[dict[str, Any], Callable[[Any], str]]] = {
        "config": (found["config"], json.dumps),
        UNUSED: (found["unknown_keys"], json.dumps),
        OTHER_TOWERS: (found["left_out"], str),
        KEPT_TOWERS: (found["kept"], str),
        stored: (found["dtype_bytes"], size),
        "files": (found["files"], size),
        "estimated memory": (found["memory"], size),
    }
    for title, (entries, text) in sections.items():
        rows = {f"  {printable(name)}": text(value) for name, value in entries.items()}
        if rows:
            print()
            cut = {k: x[:500] + " ..." * (len(x) > 500) for k, x in rows.items()}
            console.show(title, cut, sys.stdout)
    if outlook is not None:
        print(f"\ntraining with AdamW, {given.batch} x {given.seq} tokens ({outlook.rates})")
        plan = outlook.plan
        fits = f"no plan fits {outlook.budget / GIB:.2f} GiB" if plan is None else str(plan)
        print(textwrap.indent(fits, "  "))
        print(f"  least memory: {math.ceil(outlook.least_bytes / GIB * 100) / 100:.2f} GiB")
        print(f"  largest batch with rows of {given.seq} tokens: {outlook.largest_batch}")
        limit = found["config"]["max_position_embeddings"]
        beyond = f" (max_position_embeddings is {limit})" if outlook.largest_seq > limit else ""
        print(f"  longest rows with batch {given.batch}: {outlook.largest_seq} tokens{beyond}")

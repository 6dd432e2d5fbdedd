"""`ligermodels finetune`."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from ligermodels.cli.options import byte_size
from ligermodels.errors import LigerError

HELP = "fine-tune a checkpoint on text or JSONL files"
OUT_OF_MEMORY = (
    " (try a smaller --batch-size with more --gradient-accumulation-steps, "
    "--activation-checkpointing, or a "
    "shorter --seq-len)"
)

GROUPS = {
    "data": "train eval eval_fraction max_eval_rows separator seq_len",
    "schedule": "epochs steps batch_size gradient_accumulation_steps eval_every",
    "optimizer": "learning_rate min_lr_ratio warmup_steps weight_decay beta1 beta2 adam_eps "
    "max_grad_norm seed",
    "machine": "device precision activation_checkpointing compile",
    "run": "output resume overwrite save_every save_total_limit log_every export_dtype "
    "max_shard_size",
    "hub": "revision",
}

METAVARS = {
    "output": "OUTPUT",
    "separator": "LINE",
    "device": "DEVICE",
    "revision": "REVISION",
    "max_shard_size": "SIZE",
}


def arguments(command: argparse.ArgumentParser) -> None:
    """Every option of FinetuneConfig, with its help and default."""
    from dataclasses import MISSING, fields

    from ligermodels.training.finetune import FinetuneConfig

    command.description = (
        "Fine-tune MODEL on text and export it. Files are plain text, or .jsonl with an object per "
        'line: {"text"}, {"prompt", "completion"} (only the completion is learnt) or {"messages"} '
        "(only the assistant's turns). Documents are packed into rows; neither attention nor loss "
        "crosses from one to the next. Perplexity on held-out documents is measured before, during "
        "and after."
    )
    command.epilog = (
        "OUTPUT holds model/ (the export), metrics.jsonl, loss.png and checkpoints/. After an "
        "interruption, 'ligermodels finetune --resume --output OUTPUT' goes on where it stopped, "
        "with the options of the run."
    )
    command.usage = (
        "%(prog)s MODEL --train FILE... --output OUTPUT [OPTION...]\n"
        "       %(prog)s --resume --output OUTPUT"
    )
    known = {each.name: each for each in fields(FinetuneConfig)}
    command.add_argument("model", nargs="?", metavar="MODEL", help=known["model"].metadata["help"])
    groups = {title: command.add_argument_group(title) for title in GROUPS}
    for title, names in GROUPS.items():
        for name in names.split():
            each = known[name]
            help = each.metadata["help"]
            kind = str(each.type)
            options: dict[str, Any] = {"dest": name, "default": argparse.SUPPRESS}
            default = None if each.default is MISSING else each.default
            # Each option is left out of the result unless given: what a resumed run was started
            # with, and else the config's own default, fills the gaps.
            if kind == "bool":
                options["action"] = "store_true"
            else:
                if default is not None:
                    shown = "5GB" if name == "max_shard_size" else default
                    help = f"{help} (default: {shown})"
                if "choices" in each.metadata:
                    options["choices"] = each.metadata["choices"]
                elif name == "max_shard_size":
                    options["type"] = byte_size
                elif "int" in kind or "float" in kind:
                    options["type"] = float if "float" in kind else int
                if "list" in kind:
                    options["nargs"] = "+"
                    options["metavar"] = "FILE"
                elif "choices" not in options:
                    options["metavar"] = METAVARS.get(name, "X" if "float" in kind else "N")
            options["help"] = help
            groups[title].add_argument("--" + name.replace("_", "-"), **options)
    command.add_argument("--quiet", action="store_true", help="no progress bar and no notes")


def run(given: argparse.Namespace) -> None:
    """Fine-tune, and say what came of it."""
    from ligermodels.training.finetune import FinetuneConfig, finetune, resumed_settings

    options = {k: v for k, v in vars(given).items() if k not in ("module", "quiet")}
    if options["model"] is None:
        del options["model"]
    if "output" not in options:
        raise LigerError("finetune: --output is missing")
    if options.get("resume"):
        settings = resumed_settings(options["output"])
        if not settings and "model" not in options:
            raise LigerError(f"{options['output']}: holds no run to resume")
        options = {**settings, **options}
    for name, shown in (("model", "MODEL"), ("train", "--train")):
        if name not in options:
            raise LigerError(f"finetune: {shown} is missing")
    config = FinetuneConfig(**options)
    try:
        result = finetune(config, progress=not given.quiet)
    except KeyboardInterrupt:
        print(
            "ligermodels: interrupted; 'ligermodels finetune --resume --output "
            f"{options['output']}' goes on from the last checkpoint",
            file=sys.stderr,
        )
        raise SystemExit(130) from None
    if result.perplexity_before is not None and result.perplexity_after is not None:
        print(
            f"held-out perplexity {result.perplexity_before:.3f} -> {result.perplexity_after:.3f} "
            f"in {result.steps} steps"
        )
    else:
        print(f"training loss {result.loss:.4f} after {result.steps} steps")
    print(f"exported to {result.model_folder}")

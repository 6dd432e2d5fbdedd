"""The command `ligermodels finetune`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import MISSING, Field, fields
from typing import Any

from ligermodels.cli import launch
from ligermodels.cli.interrupts import raise_on_interrupt
from ligermodels.cli.options import byte_size, number
from ligermodels.errors import LigerError
from ligermodels.training.config import FinetuneConfig, option_types

HELP = "fine-tune a checkpoint on text or JSONL files"
OUT_OF_MEMORY = (
    " (try a smaller --batch-size with more --gradient-accumulation-steps, "
    "a smaller --memory, or a shorter --seq-len)"
)

# --help shows the options of FinetuneConfig in these groups.
GROUPS = {
    "data": "train_files eval_files eval_fraction max_eval_rows separator seq_len",
    "loss": "loss loss_type beta label_smoothing simpo_gamma desirable_weight undesirable_weight "
    "f_divergence_type ld_alpha use_weighting reference reward_function num_generations "
    "max_completion_length temperature epsilon_high",
    "other models": "teacher teacher_share medusa_heads medusa_stage medusa_tied",
    "schedule": "num_train_epochs max_steps batch_size gradient_accumulation_steps eval_steps",
    "optimizer": "learning_rate min_lr_rate warmup_steps weight_decay adam_beta1 adam_beta2 "
    "adam_epsilon max_grad_norm seed",
    "machine": "device precision memory activation_checkpointing compile rank_timeout",
    "run": "output_dir resume overwrite_output_dir save_steps save_total_limit logging_steps "
    "export_dtype max_shard_size",
    "hub": "revision",
}
METAVARS = {"output_dir": "DIR", "separator": "LINE", "memory": "auto|SIZE|off"}
REQUIRED = {"model": "MODEL", "train_files": "--train-files", "output_dir": "--output-dir"}


def add_arguments(command: argparse.ArgumentParser) -> None:
    """Add every option of FinetuneConfig, with its help and default."""
    command.description = (
        "Fine-tune MODEL on text and export it. A file is plain text, or .jsonl with one object "
        'per line: {"text"}, {"prompt", "completion"} (the loss covers only the completion) or '
        '{"messages"} (the loss covers only the turns of the assistant). Documents are packed into '
        "rows. Neither attention nor the loss crosses from one document to the next. Perplexity "
        "on held-out documents is measured before, during and after training. With another --loss "
        'the files are .jsonl with {"prompt", "chosen", "rejected"} (dpo, orpo, cpo, simpo), the '
        'same or {"prompt", "completion", "label"} (kto), or {"prompt"} (grpo). A prompt or a '
        "completion is a string or a list of messages."
    )
    command.epilog = (
        "DIR holds model/ (the export), metrics.jsonl, loss.png and checkpoints/. After an "
        "interruption, 'ligermodels finetune --resume --output-dir DIR' continues from the last "
        "checkpoint, with the same options."
    )
    command.usage = (
        "%(prog)s MODEL --train-files FILE... --output-dir DIR [...]\n"
        "       %(prog)s --resume --output-dir DIR"
    )
    options = {option.name: option for option in fields(FinetuneConfig)}
    types = option_types()
    command.add_argument(
        "model", nargs="?", metavar="MODEL", help=options["model"].metadata["help"]
    )
    for title, names in GROUPS.items():
        group = command.add_argument_group(title)
        for name in names.split():
            # SUPPRESS leaves out an option that the user does not give. Its value then comes from
            # the run that is resumed, or from the default in FinetuneConfig.
            group.add_argument(
                "--" + name.replace("_", "-"),
                default=argparse.SUPPRESS,
                **_argument(options[name], types[name]),
            )
    launch.add_arguments(command)
    command.add_argument("--quiet", action="store_true", help="print no progress bar and no notes")


def _argument(option: Field[Any], kind: type) -> dict[str, Any]:
    """Return the arguments of `add_argument` for one option of FinetuneConfig."""
    help = option.metadata["help"].replace("%", "%%")
    if option.name == "max_shard_size":
        return {"help": f"{help} (default: 5GB)", "type": byte_size, "metavar": "SIZE"}
    if kind is bool:
        return {"help": help, "action": "store_true"}
    if kind == list[str]:
        return {"help": help, "nargs": "+", "metavar": "FILE"}
    if option.default not in (None, MISSING):
        help = f"{help} (default: {option.default})"
    if kind is str:
        metavar = METAVARS.get(option.name)
        return {"help": help, "choices": option.metadata["choices"], "metavar": metavar}
    letter = "N" if kind is int else "X"
    return {"help": help, "type": number(kind, **option.metadata["limits"]), "metavar": letter}


def run(given: argparse.Namespace) -> None:
    """Fine-tune, then print the perplexity (or the loss) and the folder of the export.

    With --gpus, do so in several processes, of which one prints.
    """
    if given.gpus is not None and not launch.is_worker():
        launch.run(given)
        return
    from ligermodels.training.finetune import finetune, resumed_settings
    from ligermodels.training.interrupts import Interrupted

    left_out = ("module", "modules", "quiet", *launch.OPTIONS)
    options = {k: v for k, v in vars(given).items() if k not in left_out}
    if options["model"] is None:
        del options["model"]
    if options.get("resume"):
        _require(options, "output_dir")
        output_dir = options["output_dir"]
        settings = resumed_settings(output_dir)
        if not settings and "model" not in options:
            raise LigerError(
                f"{output_dir}: the folder holds no run to resume; to start one, give MODEL "
                "and --train-files"
            )
        options = {**settings, **options}
    _require(options, *REQUIRED)
    try:
        with raise_on_interrupt():  # The run saves its state.
            result = finetune(FinetuneConfig(**options), progress=not given.quiet)
    except Interrupted as stop:
        if launch.speaks():
            print(f"ligermodels: {stop}", file=sys.stderr)
        raise SystemExit(128 + stop.signum) from None
    if not launch.speaks():
        return
    key, name = result.shown
    before, after = (
        None if key not in found else _shown(name, found[key])
        for found in (result.eval_before, result.eval_after)
    )
    if after is not None:
        change = after if before is None else f"{before} -> {after}"
        print(f"held-out {name} {change} in {result.steps} steps")
    elif result.loss is not None:
        print(f"training loss {result.loss:.4f} after {result.steps} steps")
    print(f"exported to {result.model_dir}")


def _shown(name: str, value: float) -> str:
    from ligermodels.training.trainer import shown_perplexity

    return shown_perplexity(value) if name == "perplexity" else f"{value:.4f}"


def _require(options: dict[str, Any], *names: str) -> None:
    """Raise LigerError if an option with one of these names is not given."""
    missing = [REQUIRED[name] for name in names if name not in options]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise LigerError(
            f"finetune: {', '.join(missing)} {verb} missing; see 'ligermodels finetune --help'"
        )

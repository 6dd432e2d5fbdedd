"""The command `ligermodels finetune`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from typing import Any

from ligermodels.cli import launch
from ligermodels.cli.interrupts import raise_on_interrupt
from ligermodels.cli.options import CommonOptions, data_library, import_modules, parse
from ligermodels.errors import LigerError
from ligermodels.training.config import FinetuneConfig, option_names, subjects, unknown_option
from ligermodels.training.losses import LOSSES, SFT
from ligermodels.training.options import option

HELP = "fine-tune a checkpoint on text or JSONL files"
OUT_OF_MEMORY = (
    " (try a smaller --batch-size with more --gradient-accumulation-steps, "
    "a smaller --memory, or a shorter --seq-len)"
)
DESCRIPTION = (
    "Fine-tune MODEL on text and export it. A file is plain text, or .jsonl with one object per "
    'line: {"text"}, {"prompt", "completion"} (the loss covers only the completion) or '
    '{"messages"} (the loss covers only the turns of the assistant). Documents are packed into '
    "rows. Neither attention nor the loss crosses from one document to the next. Perplexity on "
    "held-out documents is measured before, during and after training. DIR holds model/ (the "
    "export), metrics.jsonl, loss.png and checkpoints/. After an interruption, 'ligermodels "
    "finetune --resume --output-dir DIR' continues from the last checkpoint, with the same "
    "options. The options of a loss are shown by --loss NAME --help; the losses are "
)
REQUIRED = {"model": "MODEL", "train_files": "--train-files", "output_dir": "--output-dir"}


@dataclass(kw_only=True)
class CommandOptions(CommonOptions):
    """The options of the command itself."""

    config: str | None = option(
        None,
        "YAML file of options, named as here with _ for -, at the top or under their subjects; "
        "options on the command line win. A run writes its own to DIR/run.yaml",
        metavar="FILE",
    )
    loss: str = option(SFT.name, "what to minimise; each loss has its own options", metavar="NAME")
    quiet: bool = option(False, "print no progress bar and no notes")


@dataclass
class Arguments:
    """What the command line asks for: the options of the run, and those of the command."""

    options: dict[str, Any]
    modules: list[str]
    processes: launch.LaunchOptions
    quiet: bool
    argv: list[str]


def parse_arguments(argv: list[str]) -> Arguments:
    """Return the options of a run: those given, then those of --config, then a resumed run's.

    Raises:
        ConfigError, CheckpointError: the file or the run cannot be read.
        SystemExit: after --help, or after a mistake that was printed as one line.
    """
    words = argv[1:]
    early = _early(words)
    loss, modules = early.loss, early.modules
    import_modules(modules)  # They may register losses.
    found: dict[str, Any] = {}
    if early.config is not None:
        from ligermodels.training.config import read_config

        also = ("gpus", "max_restarts", "quiet", "import")
        found = read_config(early.config, loss=loss, also=also)
        more = CommandOptions(modules=found.pop("import", None)).modules or []
        import_modules(more)
        modules = modules + more
    resumes = found.get("resume") if early.resume is None else early.resume
    if resumes and not {"-h", "--help"} & {*words}:
        found = _resumed(early.output_dir or found.get("output_dir")) | found
    loss = loss or found.get("loss") or SFT.name
    given = parse(
        "finetune",
        {"run": CommandOptions, "processes": launch.LaunchOptions, **subjects(loss)},
        words,
        description=DESCRIPTION + "; ".join(f"{k}: {v.help}" for k, v in LOSSES.items()) + ".",
        defaults=found,
        owners={
            name: f"--{unknown_option(name, loss).replace('_', '-')}"
            for other in LOSSES
            for name in option_names(other)
            if name not in option_names(loss)
        },
    )
    processes = launch.LaunchOptions(gpus=given.pop("gpus"), max_restarts=given.pop("max_restarts"))
    quiet, _, _ = (given.pop(name) for name in ("quiet", "import", "config"))
    return Arguments(
        options=given | {"loss": loss},
        modules=modules,
        processes=processes,
        quiet=quiet,
        argv=argv,
    )


def run(given: Arguments) -> None:
    """Fine-tune, then print the perplexity (or the loss) and the folder of the export.

    With --gpus, do so in several processes, of which one prints.
    """
    if given.options["resume"] and not given.options["model"]:
        raise LigerError(
            f"{given.options['output_dir']}: the folder holds no run to resume; to start one, give "
            "MODEL and --train-files"
        )
    missing = [shown for name, shown in REQUIRED.items() if not given.options[name]]
    if missing:
        verb = "is" if len(missing) == 1 else "are"
        raise LigerError(
            f"finetune: {', '.join(missing)} {verb} missing; see 'ligermodels finetune --help'"
        )
    config = FinetuneConfig.from_options(**given.options)
    if given.processes.gpus is not None and not launch.is_worker():
        launch.run(given.processes.gpus, given.processes.max_restarts, given.argv)
        return
    from ligermodels.training.finetune import finetune
    from ligermodels.training.processes import Interrupted

    try:
        with raise_on_interrupt():  # The run saves its state.
            result = finetune(
                config,
                progress=not given.quiet,
                modules=given.modules,
                data_library=data_library,
            )
    except Interrupted as stop:
        if launch.is_rank0():
            print(f"ligermodels: {stop}", file=sys.stderr)
        raise SystemExit(128 + stop.signum) from None
    if not launch.is_rank0():
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


def _early(words: list[str]) -> argparse.Namespace:
    """Return what decides which options there are and where their defaults come from."""
    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    for name in ("--loss", "--config", "--output-dir"):
        parser.add_argument(name, nargs="?")
    parser.add_argument("--import", dest="modules", nargs="*", action="extend", default=[])
    parser.add_argument("--resume", action=argparse.BooleanOptionalAction)
    return parser.parse_known_args(words)[0]


def _resumed(output_dir: str | None) -> dict[str, Any]:
    """Return the options of the run in a folder."""
    from ligermodels.training.finetune import resumed_settings

    if output_dir is None:
        raise LigerError("finetune: --output-dir is missing; see 'ligermodels finetune --help'")
    return resumed_settings(output_dir)


def _shown(name: str, value: float) -> str:
    from ligermodels.training.trainer import shown_perplexity

    return shown_perplexity(value) if name == "perplexity" else f"{value:.4f}"

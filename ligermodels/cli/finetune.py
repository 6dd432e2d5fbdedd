"""Fine-tune a checkpoint on text or JSONL files.

Fine-tune MODEL on text and export it. A file is plain text, or .jsonl with one object per line:
{"text"}, {"prompt", "completion"} (the loss covers only the completion) or {"messages"} (the loss
covers only the turns of the assistant). Documents are packed into rows. Neither attention nor the
loss crosses from one document to the next. Perplexity on held-out documents is measured before,
during and after training. DIR holds model/ (the export), metrics.jsonl, loss.png and checkpoints/.
After an interruption, 'ligermodels finetune --resume --output-dir DIR' continues from the last
checkpoint, with the same options. The options of a loss are shown by --loss NAME --help; the losses
are:
"""

from __future__ import annotations

import sys
from dataclasses import dataclass
from functools import partial
from typing import Any

from ligermodels.cli import console, launch
from ligermodels.cli.interrupts import raise_on_interrupt
from ligermodels.cli.options import CommonOptions, import_modules, parse
from ligermodels.errors import LigerError
from ligermodels.training.config import (
    FinetuneConfig,
    OutputOptions,
    option_names,
    read_config,
    subjects,
    unknown_option,
)
from ligermodels.training.losses import LOSSES, SFT
from ligermodels.training.options import Options, flat_names, option

OUT_OF_MEMORY = (
    " (try a smaller --batch-size with more --gradient-accumulation-steps, "
    "a smaller --memory, or a shorter --seq-len)"
)


@dataclass(kw_only=True)
class CommandOptions(CommonOptions):
    """The options of the command itself.

    Attributes:
        config: YAML file of options, named as here with _ for -, at the top or under their
            subjects; options on the command line win. A run writes its own to DIR/run.yaml
        loss: what to minimise; each loss has its own options
        quiet: print no progress bar and no notes
    """

    config: str | None = option(None, metavar="FILE")
    loss: str = option(SFT.name, metavar="NAME")
    quiet: bool = option(False)


@dataclass(kw_only=True)
class ProcessOptions(Options):
    """How many processes run: options of the command that no run keeps.

    Attributes:
        gpus: run on N GPUs of this machine, each with its own rows (with --device cpu, in N
            processes); the model is spread over them (FSDP2)
        max_restarts: with --gpus, how often the run goes on from its last checkpoint by itself
            after a process was killed
    """

    gpus: int | None = option(None, at_least=1, at_most=1024)
    max_restarts: int = option(0, at_least=0)


@dataclass
class Arguments:
    """What the command line asks for: the options of the run, and those of the command."""

    options: dict[str, Any]
    command: CommandOptions
    processes: ProcessOptions
    argv: list[str]


def parse_arguments(words: list[str]) -> Arguments:
    """Return the options of a run: those given, then those of --config, then a resumed run's.

    Raises:
        ConfigError, CheckpointError: the file or the run cannot be read.
        SystemExit: after --help, or after a mistake that was printed as one line.
    """
    own = {"run": CommandOptions, "processes": ProcessOptions}
    # These decide which options there are, and where their values come from.
    early = parse("finetune", {**own, "output": OutputOptions}, words, is_whole=False)
    modules = [*early.get("import", ())]
    import_modules(modules)  # They may register losses.
    found: dict[str, Any] = {}
    if "config" in early:
        found = read_config(early["config"], loss=early.get("loss"), also=own.values())
        more = CommandOptions.taken({"import": found.pop("import", None)}).modules or []
        import_modules(more)
        modules += more
    asked = found | early
    if asked.get("resume") and not {"-h", "--help"} & {*words}:
        found = _resumed(asked.get("output_dir")) | found
    loss = (found | early).get("loss") or SFT.name
    mine = option_names(loss)
    given = parse(
        "finetune",
        {**own, **subjects(loss)},
        words,
        description=f"{__doc__} {'; '.join(map(_described, LOSSES))}.",
        owners={
            name: f"--{unknown_option(name, loss).replace('_', '-')}"
            for each in LOSSES.values()
            for name in flat_names(each)
            if name not in mine
        },
    )
    options = found | given | {"import": modules}
    if options.get("resume") and not options.get("model"):
        raise LigerError(
            f"{options['output_dir']}: the folder holds no run to resume; to start one, give "
            "MODEL and --train-files"
        )
    command, processes = CommandOptions.taken(options), ProcessOptions.taken(options)
    return Arguments(options | {"loss": loss}, command, processes, ["finetune", *words])


def _described(loss: str) -> str:
    return f"{loss}: {str(LOSSES[loss].__doc__).splitlines()[0].rstrip('.')}"


def run(given: Arguments) -> None:
    """Fine-tune, then print what the run has reached and the next command.

    With --gpus, do so in several processes, of which one prints.
    """
    config = FinetuneConfig.from_options(**given.options)
    processes = given.processes
    if processes.gpus is not None and not launch.is_worker():
        launch.run(processes.gpus, processes.max_restarts, given.argv)
        return
    from ligermodels.training.finetune import finetune
    from ligermodels.training.processes import Interrupted
    from ligermodels.training.reports import end

    try:
        with raise_on_interrupt():  # The run saves its state.
            result = finetune(
                config,
                progress=not given.command.quiet,
                modules=given.command.modules or (),
                show=None if given.command.quiet else partial(console.show, "fine-tuning"),
            )
    except Interrupted as stop:
        if launch.is_rank0():
            print(f"ligermodels: {stop}", file=sys.stderr)
        raise SystemExit(128 + stop.signum) from None
    if launch.is_rank0():
        console.show("finished", end(result, given.command.modules or ()), sys.stdout)


def _resumed(output_dir: str | None) -> dict[str, Any]:
    """Return the options of the run in a folder."""
    from ligermodels.training.finetune import resumed_settings

    if output_dir is None:
        raise LigerError("finetune: --output-dir is missing; see 'ligermodels finetune --help'")
    found = resumed_settings(output_dir)
    if found and found["loss"] not in LOSSES:
        raise LigerError(
            f"{output_dir}: the run has a loss {found['loss']!r}, which is not known here; import "
            "the file that defines it (--import FILE.py)"
        )
    return found

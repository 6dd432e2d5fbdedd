"""The command `ligermodels finetune`."""

from __future__ import annotations

import argparse
import sys
from dataclasses import MISSING, Field, fields
from typing import Any, get_args, get_origin

from ligermodels.cli import launch
from ligermodels.cli.interrupts import raise_on_interrupt
from ligermodels.cli.options import byte_size, import_modules, number
from ligermodels.converters.dtypes import dtype_name
from ligermodels.errors import ConfigError, LigerError, short_repr
from ligermodels.training.config import FinetuneConfig
from ligermodels.training.options import OTHER_NAMES as OTHER_NAMES  # for a mistake's hint
from ligermodels.training.options import types_of

HELP = "fine-tune a checkpoint on text or JSONL files"
OUT_OF_MEMORY = (
    " (try a smaller --batch-size with more --gradient-accumulation-steps, "
    "a smaller --memory, or a shorter --seq-len)"
)

# --help shows the options of FinetuneConfig in these groups.
GROUPS = {
    "data": "train_files eval_files eval_fraction max_eval_rows separator seq_len "
    "stream data_weights",
    "loss": "loss loss_type beta label_smoothing simpo_gamma desirable_weight undesirable_weight "
    "f_divergence_type f_alpha_divergence_coef discopop_tau ld_alpha use_weighting reference "
    "reward_function num_generations max_completion_length temperature epsilon_high",
    "other models": "teacher distill_weight medusa_heads medusa_stage medusa_tied",
    "adapters": "lora lora_targets load_in export",
    "schedule": "num_train_epochs max_steps batch_size gradient_accumulation_steps eval_steps",
    "optimizer": "optimizer learning_rate schedule min_lr_rate warmup_steps weight_decay "
    "adam_beta1 adam_beta2 adam_epsilon max_grad_norm freeze train_only seed",
    "machine": "device precision memory activation_checkpointing compile context_parallel "
    "rank_timeout",
    "run": "output_dir resume overwrite_output_dir save_steps save_total_limit logging_steps "
    "report_to sample_prompts sample_tokens sample_chat profile "
    "export_dtype max_shard_size quiet",
    "hub": "revision push_to_hub hub_private_repo",
    "several GPUs": "gpus max_restarts",
}
OPTIONS = (FinetuneConfig, launch.LaunchOptions)
METAVARS = {
    "freeze": "NAME",
    "sample_prompts": "TEXT",
    "push_to_hub": "OWNER/NAME",
    "train_only": "NAME",
    "lora": "r=N[,...]",
    "lora_targets": "NAME",
    "output_dir": "DIR",
    "separator": "LINE",
    "memory": "auto|SIZE|off",
}
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
        "       %(prog)s --config FILE [...]\n"
        "       %(prog)s --resume --output-dir DIR"
    )
    command.add_argument(
        "--config",
        metavar="FILE",
        help="YAML file of options, named as here with _ for -; options on the command line win. A "
        "run writes its own to DIR/run.yaml",
    )
    options = {each.name: each for cls in OPTIONS for each in fields(cls)}
    types = {name: kind for cls in OPTIONS for name, kind in types_of(cls).items()}
    # SUPPRESS leaves out an option that the user does not give. Its value then comes from --config,
    # from the run that is resumed, or from its default.
    command.add_argument(
        "model",
        nargs="?",
        metavar="MODEL",
        default=argparse.SUPPRESS,
        help=options["model"].metadata["help"],
    )
    for title, names in GROUPS.items():
        group = command.add_argument_group(title)
        for name in names.split():
            group.add_argument(
                "--" + name.replace("_", "-"),
                default=argparse.SUPPRESS,
                **_argument(options[name], types[name]),
            )


def _argument(option: Field[Any], kind: type) -> dict[str, Any]:
    """Return the arguments of `add_argument` for one option of FinetuneConfig."""
    help = option.metadata["help"].replace("%", "%%")
    if option.name == "max_shard_size":
        return {"help": f"{help} (default: 5GB)", "type": byte_size, "metavar": "SIZE"}
    if kind is bool:
        return {"help": help, "action": argparse.BooleanOptionalAction}
    if get_origin(kind) is list:
        item = get_args(kind)[0]
        several = {"help": help, "nargs": "+", "metavar": _metavar(option, item)}
        return several | _type(option, item)
    if option.default not in (None, MISSING):
        help = f"{help} (default: {option.default})"
    return {"help": help, **_type(option, kind), "metavar": _metavar(option, kind)}


def _type(option: Field[Any], kind: type) -> dict[str, Any]:
    if option.name == "export_dtype":
        return {"type": dtype_name, "choices": option.metadata["choices"]}
    if kind is str:
        return {"choices": option.metadata["choices"]}
    return {"type": number(kind, **option.metadata["limits"])}


def _metavar(option: Field[Any], kind: type) -> str | None:
    if option.name.endswith("_files"):
        return "FILE"
    if option.metadata["choices"] is not None:
        return None  # argparse shows the choices
    return METAVARS.get(option.name, {int: "N", float: "X"}.get(kind))


def run(given: argparse.Namespace) -> None:
    """Fine-tune, then print the perplexity (or the loss) and the folder of the export.

    With --gpus, do so in several processes, of which one prints.
    """
    options, launched = _options(given)
    if launched.gpus is not None and not launch.is_worker():
        launch.run(launched.gpus, launched.max_restarts, given.argv)
        return
    from ligermodels.training.finetune import finetune, resumed_settings
    from ligermodels.training.interrupts import Interrupted

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
            result = finetune(
                FinetuneConfig(**options), progress=not launched.quiet, modules=given.modules or ()
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


def _options(given: argparse.Namespace) -> tuple[dict[str, Any], launch.LaunchOptions]:
    """Return the options of the run and those of the command, from --config and the arguments."""
    names = [each.name for cls in OPTIONS for each in fields(cls)]
    own = [each.name for each in fields(launch.LaunchOptions)]
    found: dict[str, Any] = {}
    if given.config is not None:
        from ligermodels.training.config_file import read_config

        found = read_config(given.config, also=(*own, "import"))
        modules = found.pop("import", None) or []
        modules = [modules] if isinstance(modules, str) else modules
        if not isinstance(modules, list) or not all(isinstance(name, str) for name in modules):
            raise ConfigError(f"import: must be a list of texts, not {short_repr(modules)}")
        import_modules(modules)
        given.modules = [*(given.modules or ()), *modules]
    found |= {k: v for k, v in vars(given).items() if k in names}
    launched = launch.LaunchOptions(**{k: found.pop(k) for k in own if k in found})
    return found, launched


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

"""The options of a fine-tuning run, by subject: each is declared once, with its type and limits.

`FinetuneConfig` holds one dataclass for each subject. Every option also has a name that no option
of another subject has, such as `learning_rate`: that of the command line, of
`FinetuneConfig.from_options` and of the errors. A loss is a class of its own in `losses`.

`read_config` reads options from a YAML file, and `config_text` writes them. The keys are subjects
and the names of their options, with `_` or `-`. A value has the type of its option: `2e-5` is a
number for one, and a text for another.

This module does not import torch, so that the command line shows its help quickly.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import dataclass, field, fields, replace
from pathlib import Path
from typing import Any, get_type_hints

import yaml

from ligermodels.converters.files import read_if_present
from ligermodels.errors import ConfigError, did_you_mean, first_line
from ligermodels.memory.byte_sizes import parse_bytes
from ligermodels.training.losses import LOSSES, SFT, Loss
from ligermodels.training.options import (
    OTHER_NAMES,
    Options,
    flat_name,
    flat_names,
    free_option,
    helps,
    option,
    typed,
    types_of,
)

PRECISIONS = ("float32", "bf16-mixed", "bf16")
OPTIMIZERS = ("adamw", "adamw_8bit", "adafactor", "muon")
FLOAT8_RECIPES = ("tensorwise", "delayed", "rowwise", "blocks")
SCHEDULES = ("cosine", "linear", "constant", "wsd", "inverse_sqrt")
LOGGERS = ("tensorboard", "wandb", "mlflow", "csv")
EXPORT_DTYPES = ("float32", "bfloat16", "float16")
NOT_KEPT = {"resume", "overwrite_output_dir"}  # what a resumed run does not take over


@dataclass(kw_only=True)
class ModelOptions(Options):
    """The model to start from, what of it is trained, and where.

    Attributes:
        path: hub id or local folder of the checkpoint to start from
        revision: branch, tag or commit of a hub checkpoint
        freeze: parameters or modules that are not trained, by name, as in embed_tokens layers.*.mlp
        train_only: the only parameters or modules that are trained, as for freeze
        precision: bf16-mixed keeps float32 weights and computes in bfloat16; bf16 also keeps the
            weights in bfloat16 (default: bf16-mixed on a GPU, float32 on a CPU)
        float8: let the linears of the layers multiply in float8, by this recipe (docs/float8.md);
            needs a GPU of the generation Ada, Hopper or a later one
        router_aux_loss_coef: factor of the balance of experts in the loss (default: that of
            config.json if its output_router_logits is true, or the model's own `router_losses`,
            else 0)
        router_z_loss_coef: factor of the routers' z-loss (default: that of config.json, or 0)
        from_scratch: begin with random weights; MODEL is then a preset ('ligermodels families' has
            their names; give a tokenizer, too), or a checkpoint of which only config.json and the
            tokenizer are read
        config_overrides: with from_scratch, other sizes, as in num_hidden_layers=8 hidden_size=512
        device: cpu or cuda (default: cuda if there is a GPU)
        compile: run the model through torch.compile
    """

    path: str | None = free_option(None, flag="model", positional=True)
    revision: str | None = free_option(None)
    freeze: list[str] | None = option(None, metavar="NAME")
    train_only: list[str] | None = option(None, metavar="NAME")
    precision: str | None = option(None, choices=PRECISIONS)
    float8: str | None = option(None, choices=FLOAT8_RECIPES)
    router_aux_loss_coef: float | None = option(None, at_least=0)
    router_z_loss_coef: float | None = option(None, at_least=0)
    from_scratch: bool = option(False)
    config_overrides: list[str] | None = option(None, metavar="FIELD=VALUE", needs="from_scratch")
    device: str | None = free_option(None)
    compile: bool = option(False)


@dataclass(kw_only=True)
class TokenizerOptions(Options):
    """The tokens, and how a conversation becomes a text. The export has the same.

    Attributes:
        path: with from_scratch, hub id or folder of the tokenizer (default: that of the model)
        chat_template: file with another chat template, in Jinja
        add_tokens: words to add to the vocabulary as tokens of their own
        special_tokens: special tokens to add, which are left out of a decoded text; NAME=TOKEN also
            gives it a role, as in eos_token=<|im_end|>
    """

    path: str | None = free_option(None, flag="tokenizer")
    chat_template: str | None = free_option(None, metavar="FILE")
    add_tokens: list[str] | None = option(None, metavar="TOKEN")
    special_tokens: list[str] | None = option(None, metavar="TOKEN")


@dataclass(kw_only=True)
class DataOptions(Options):
    """What is learned, and how it becomes rows.

    Attributes:
        train_files: plain text, or .jsonl objects with text, prompt and completion, or messages;
            also records of ShareGPT (conversations) and of Alpaca (instruction, input, output).
            With the library datasets also .parquet, .csv, and data sets of the hub: OWNER/NAME,
            OWNER/NAME:SPLIT or OWNER/NAME:CONFIG:SPLIT
        eval_files: files to measure perplexity on, in the same formats
        columns: the names that the data have for keys, as in prompt=question completion=answer
        eval_fraction: share of the data to hold out without evaluation files
        max_eval_rows: largest number of rows to evaluate on
        eval_tasks: tasks of lm-eval that each evaluation runs, too
        eval_tasks_limit: the most questions of a task
        eval_tasks_folder: folder with YAML files of more tasks
        separator: line that separates the documents of a text file; '' splits at blank lines
            (default: each file is one document)
        seq_len: tokens per row; documents are packed into rows
        stream: keep the tokens on the disk (in HF_HOME); needs the library datasets
        data_weights: the share of each training file in the rows, in any unit, as in 3 1
    """

    train_files: list[str] = free_option((), metavar="FILE")
    eval_files: list[str] | None = free_option(None, metavar="FILE")
    eval_fraction: float = free_option(0.05, at_least=0, less_than=1)
    columns: list[str] | None = option(None, metavar="KEY=NAME")
    max_eval_rows: int | None = free_option(None, at_least=1)
    eval_tasks: list[str] | None = free_option(None, metavar="TASK")
    eval_tasks_limit: int | None = free_option(None, at_least=1, needs="eval_tasks")
    eval_tasks_folder: str | None = free_option(None, metavar="DIR", needs="eval_tasks")
    separator: str | None = option(None, metavar="LINE")
    seq_len: int = option(1024, at_least=2)
    stream: bool = option(False)
    data_weights: list[float] | None = option(None, more_than=0)

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.data_weights and len(self.data_weights) != len(self.train_files):
            raise ConfigError(
                f"data_weights: there are {len(self.data_weights)}, but train_files has "
                f"{len(self.train_files)}; give one weight for each file"
            )
        for each in self.columns or ():
            if not all(each.partition("=")):
                raise ConfigError(f"columns: {each!r}; expected KEY=NAME, as in prompt=question")

    @property
    def names(self) -> dict[str, str]:
        """The name that the data have for each key of a record that `columns` gives another."""
        return {key: name for key, _, name in (x.partition("=") for x in self.columns or ())}


@dataclass(kw_only=True)
class AdapterOptions(Options):
    """Adapters on a frozen model (LoRA), if any.

    Attributes:
        lora_r: freeze the model and train adapters of this rank on its linears
        lora_alpha: scale of the adapters, times their rank (default: twice the rank)
        lora_dropout: rate at which inputs of the adapters are dropped
        lora_targets: the linears that get an adapter, such as q_proj v_proj (default: all of the
            layers)
        lora_dora: also train the length of each row of the adapted weights (DoRA, arXiv:2402.09353)
        lora_rslora: scale by alpha / sqrt(rank) instead of alpha / rank (rsLoRA, arXiv:2312.03732)
        modules_to_save: modules that are trained whole beside the adapters, by HF's names or the
            ends of them, such as embed_tokens lm_head
        load_in: with adapters, keep the frozen weights of the layers in so few bits: 4bit (NF4),
            8bit, or float8, in which they are also multiplied
        export: with adapters, export the model with the adapters added, or the adapters alone for
            PEFT
    """

    lora_r: int | None = option(None, at_least=1)
    lora_alpha: float | None = option(None, more_than=0, needs="lora_r")
    lora_dropout: float = option(0.0, at_least=0, less_than=1, needs="lora_r")
    lora_targets: list[str] | None = option(None, metavar="NAME", needs="lora_r")
    lora_dora: bool = option(False, needs="lora_r")
    lora_rslora: bool = option(False, needs="lora_r")
    modules_to_save: list[str] | None = option(None, metavar="NAME", needs="lora_r")
    load_in: str | None = option(None, choices=("4bit", "8bit", "float8"), needs="lora_r")
    export: str = free_option("merged", choices=("merged", "adapter"), needs="lora_r")


@dataclass(kw_only=True)
class ScheduleOptions(Options):
    """How many steps a run makes, of which size, and the learning rate of each.

    Attributes:
        batch_size: rows (or pairs) per forward pass
        gradient_accumulation_steps: forward passes per optimizer step
        group_by_length: put groups of about the same length into a batch, to save padding; for
            losses of whole completions
        num_train_epochs: passes over the training rows
        max_steps: number of optimizer steps, instead of the number of epochs
        name: how the learning rate falls after the warm-up; wsd keeps the peak for 80% of the steps
        learning_rate: peak learning rate (default, as in TRL: 1e-6, but 1e-4 for reward, and
            2e-5 for sft, distillation and losses of your own)
        min_lr_rate: final learning rate, as a share of the peak
        warmup_steps: steps of linear warm-up (default: 3% of the steps)
        eval_steps: steps between evaluations (default: five evaluations in the run)
        early_stopping_patience: end the run after so many evaluations that are no better than the
            best one before them
        max_hours: save a checkpoint and stop after so many hours, as Ctrl-C does; --resume goes on
        seed: seed for the held-out documents and the order of the rows
    """

    batch_size: int = option(4, at_least=1)
    gradient_accumulation_steps: int = option(1, at_least=1)
    group_by_length: bool = option(False)
    num_train_epochs: float = option(1.0, more_than=0, at_most=1e9)
    max_steps: int | None = option(None, at_least=1)
    name: str = option("cosine", choices=SCHEDULES, flag="schedule")
    learning_rate: float | None = option(None, more_than=0)
    min_lr_rate: float = option(0.1, at_least=0, at_most=1)
    warmup_steps: int | None = option(None, at_least=0)
    eval_steps: int | None = free_option(None, at_least=1)
    early_stopping_patience: int | None = free_option(None, at_least=1)
    max_hours: float | None = free_option(None, more_than=0)
    seed: int = option(0, at_least=0)


@dataclass(kw_only=True)
class OptimizerOptions(Options):
    """How the gradients change the weights.

    Attributes:
        name: adamw_8bit keeps its moments in 8 bits and needs torchao; muon trains the matrices of
            the layers, and AdamW the rest; adafactor needs a larger learning rate, such as 1e-3
        lr_factors: what the learning rate of some parameters is multiplied by, as in
            embed_tokens=0.1; with adapters, *.lora_b=16 is LoRA+ (arXiv:2402.12354)
        weight_decay: AdamW's weight decay, for matrices only
        adam_beta1: decay rate of AdamW's first moment
        adam_beta2: decay rate of AdamW's second moment
        adam_epsilon: AdamW's epsilon
        max_grad_norm: clip gradients to this norm; 0 turns clipping off
    """

    name: str = option("adamw", choices=OPTIMIZERS, flag="optimizer")
    lr_factors: list[str] | None = option(None, metavar="NAME=FACTOR")
    weight_decay: float = option(0.01, at_least=0)
    adam_beta1: float = option(0.9, at_least=0, less_than=1)
    adam_beta2: float = option(0.95, at_least=0, less_than=1)
    adam_epsilon: float = option(1e-8, more_than=0)
    max_grad_norm: float = option(1.0, at_least=0)


@dataclass(kw_only=True)
class MemoryOptions(Options):
    """What stays in memory for backward.

    Attributes:
        budget: GPU memory for the run, such as 40GiB, or auto for all that is free: choose what
            each layer keeps for backward; off keeps all (default: auto on a GPU, off on a CPU)
        activation_checkpointing: recompute each block in backward to save memory
    """

    budget: str | None = free_option(None, flag="memory", metavar="auto|SIZE|off")
    activation_checkpointing: bool = option(False)

    def __post_init__(self) -> None:
        if type(self.budget) is int:
            self.budget = str(self.budget)
        super().__post_init__()
        if self.budget in (None, "off"):
            return
        if self.budget != "auto":
            parse_bytes(self.budget, "memory")
        if self.activation_checkpointing:
            raise ConfigError(
                "activation_checkpointing and memory: choose one of the two; memory recomputes "
                "only as much as is needed"
            )


@dataclass(kw_only=True)
class ParallelOptions(Options):
    """How several GPUs share the work.

    Attributes:
        context_parallel: how many GPUs compute each row together, for rows too long for one
        expert_parallel: how many GPUs share out the experts of each layer among them
        rank_timeout: seconds after which a process that does not answer ends the run
    """

    context_parallel: int = option(1, at_least=1)
    expert_parallel: int = free_option(1, at_least=1)
    rank_timeout: int = free_option(600, at_least=1, at_most=10**7)


@dataclass(kw_only=True)
class OutputOptions(Options):
    """The folder of the run, and what is written where.

    Attributes:
        output_dir: folder of the run; the exported model goes to its subfolder model/
        resume: continue from the last checkpoint in the output folder, if there is one
        overwrite_output_dir: remove the run that the output folder holds
        save_steps: steps between checkpoints; 0 writes one only if the run is interrupted
        save_total_limit: number of newest checkpoints to keep
        keep_best: write a checkpoint after each evaluation that is the best so far, keep it, and
            export the best one
        logging_steps: steps between two reports of the loss
        report_to: loggers that get the metrics: tensorboard (in DIR/tensorboard), wandb, mlflow, or
            csv (DIR/metrics.csv)
        sample_prompts: texts that the model continues at evaluations, in DIR/samples.jsonl
        sample_tokens: most tokens of such a continuation
        sample_chat: take each of these texts as the message of a user, for the chat template
        sample_system: the system message before that of the user
        push_to_hub: repository on the hub that gets the export; made if needed
        hub_strategy: push the export at the end, or also one of each checkpoint that is written
        hub_private_repo: create that repository as a private one
        export_dtype: dtype of the export (default: that of the trained weights)
        max_shard_size: largest size of one weight file of the export, such as 5GB
    """

    output_dir: str | None = free_option(None, metavar="DIR")
    resume: bool = free_option(False)
    overwrite_output_dir: bool = free_option(False)
    save_steps: int = free_option(500, at_least=0)
    save_total_limit: int = free_option(2, at_least=1)
    keep_best: bool = option(False)
    logging_steps: int = free_option(1, at_least=1)
    report_to: list[str] | None = free_option(None, choices=LOGGERS)
    sample_prompts: list[str] | None = free_option(None, metavar="TEXT")
    sample_tokens: int = free_option(64, at_least=1, needs="sample_prompts")
    sample_chat: bool = free_option(False, needs="sample_prompts")
    sample_system: str | None = free_option(None, metavar="TEXT", needs="sample_chat")
    push_to_hub: str | None = free_option(None, metavar="OWNER/NAME")
    hub_strategy: str = free_option("end", choices=("end", "every_save"), needs="push_to_hub")
    hub_private_repo: bool = free_option(False, needs="push_to_hub")
    export_dtype: str | None = free_option(None, choices=EXPORT_DTYPES)
    max_shard_size: int = free_option(5 * 10**9, is_size=True, at_least=1)


# Pairs of options that exclude each other, and why.
_EXCLUSIVE = (
    ("lora_r", "freeze", "adapters freeze the model"),
    ("lora_r", "train_only", "adapters freeze the model"),
    ("freeze", "train_only", "one is the reverse of the other"),
    ("lora_r", "context_parallel", "adapters take whole rows on each GPU"),
    ("float8", "load_in", "weights of few bits have no recipe, and load_in float8 needs none"),
    ("resume", "overwrite_output_dir", "one goes on with what the other removes"),
)


@dataclass(kw_only=True)
class FinetuneConfig:
    """The options of a fine-tuning run. Many are named as in transformers' TrainingArguments.

    `ligermodels finetune --help` explains each option. `resume=True` continues from the last
    checkpoint in `output_dir`, or starts from the beginning if there is none.

    Raises:
        ConfigError: a value has the wrong type or breaks a limit, two options exclude each other,
            or the model, the training files or the output folder are missing.
    """

    model: ModelOptions
    tokenizer: TokenizerOptions = field(default_factory=TokenizerOptions)
    data: DataOptions
    loss: Loss = field(default_factory=SFT)
    adapter: AdapterOptions = field(default_factory=AdapterOptions)
    schedule: ScheduleOptions = field(default_factory=ScheduleOptions)
    optimizer: OptimizerOptions = field(default_factory=OptimizerOptions)
    memory: MemoryOptions = field(default_factory=MemoryOptions)
    parallel: ParallelOptions = field(default_factory=ParallelOptions)
    output: OutputOptions

    def __post_init__(self) -> None:
        needed = {
            "model": self.model.path,
            "train_files": self.data.train_files,
            "output_dir": self.output.output_dir,
        }
        if missing := [name for name, value in needed.items() if not value]:
            raise ConfigError(
                f"{', '.join(missing)}: missing; a run needs ligermodels finetune MODEL "
                "--train-files FILE --output-dir DIR"
            )
        parts = [getattr(self, subject.name) for subject in fields(self)]
        given = {
            flat_name(each)
            for part in parts
            for each in fields(part)
            if getattr(part, each.name) not in (each.default, [])
        }
        for one, other, why in _EXCLUSIVE:
            if {one, other} <= given:
                raise ConfigError(f"{one} and {other}: {why}; leave one out")
        if self.tokenizer.path is not None and not self.model.from_scratch:
            raise ConfigError("tokenizer: a checkpoint has its own; this is for from_scratch")
        frozen = self.adapter.lora_r is not None and not self.adapter.modules_to_save
        for name in ("add_tokens", "special_tokens"):
            if getattr(self.tokenizer, name) and frozen:
                raise ConfigError(
                    f"{name}: adapters leave the embeddings frozen, and new ones would learn "
                    "nothing; name them in modules_to_save, as in embed_tokens lm_head"
                )
        measures = self.data.eval_files or self.data.eval_fraction
        for name, value in (
            ("early_stopping_patience", self.schedule.early_stopping_patience),
            ("keep_best", self.output.keep_best),
        ):
            if value and not measures:
                raise ConfigError(f"{name}: this needs eval_files or an eval_fraction above 0")
        if self.schedule.learning_rate is None:
            self.schedule = replace(self.schedule, learning_rate=self.loss.learning_rate)
        self.loss.check(self)

    @classmethod
    def from_options(cls, **options: Any) -> FinetuneConfig:
        """Return the config with these options, each by its own name, and `loss` by its name.

        Raises:
            ConfigError: as the class; also if the run has no such option.
        """
        kinds = subjects(loss := options.pop("loss", None) or SFT.name)
        known = option_names(loss)
        for name in options:
            if name not in known:
                raise ConfigError(unknown_option(name, loss))
        made: dict[str, Any] = {subject: kind.taken(options) for subject, kind in kinds.items()}
        return cls(**made)

    def options(self) -> dict[str, Any]:
        """Return all options, each by its own name; `loss` is the name of the loss."""
        found: dict[str, Any] = {"loss": self.loss.name}
        for subject in fields(self):
            part = getattr(self, subject.name)
            found |= {flat_name(each): getattr(part, each.name) for each in fields(part)}
        return found


def subjects(loss: str) -> dict[str, type[Options]]:
    """Return the class of each subject's options, for the loss of this name.

    Raises:
        ConfigError: there is no such loss.
    """
    if loss not in LOSSES:
        hint = did_you_mean(str(loss), LOSSES)
        raise ConfigError(f"loss: must be one of {', '.join(LOSSES)}, not {loss!r}{hint}")
    return {**get_type_hints(FinetuneConfig), "loss": LOSSES[loss]}


def option_names(loss: str) -> list[str]:
    """Return the names of all options of a run with this loss, without `loss` itself."""
    return [name for kind in subjects(loss).values() for name in flat_names(kind)]


def unknown_option(name: str, loss: str) -> str:
    """Say why a run with this loss has no option of this name, with a suggestion."""
    owners = [each for each in LOSSES if name in flat_names(LOSSES[each])]
    if owners:
        return f"{name}: this is only for the loss {', '.join(owners)}, not for {loss}"
    hint = did_you_mean(name, ["loss", *option_names(loss)], OTHER_NAMES)
    return f"{name} is no option{hint}"


FREE_ON_RESUME = frozenset(
    flat_name(each)
    for kind in subjects(SFT.name).values()
    for each in fields(kind)
    if each.metadata["free_on_resume"]
)


class _Loader(yaml.BaseLoader):
    """A loader that returns texts, as they are on a command line, and None for null."""

    def construct_scalar(self, node: yaml.ScalarNode) -> Any:
        """Return the text of a value."""
        text = super().construct_scalar(node)
        return None if node.style is None and text in ("", "~", "null") else text


def read_config(
    path: str | Path, *, loss: str | None = None, also: Collection[type[Options]] = ()
) -> dict[str, Any]:
    """Return the options that a YAML file sets, for `FinetuneConfig.from_options`.

    An option stands under its subject, such as `data` or `loss`, or by its own name at the top.

    Args: loss: the loss of the run, if it is not the one that the file names; also: further options
        that the file may hold.
    Raises:
        ConfigError: the file cannot be read, is not YAML, or has an unknown key; the message names
            the line.
    """
    content = read_if_present(Path(path), ConfigError)
    if content is None:
        raise ConfigError(f"{path}: the file is missing")
    try:
        loader = _Loader(content.decode("utf-8-sig"))
        root = loader.get_single_node() or yaml.MappingNode("", [])
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(f"{path}: the file must hold options, one on a line, as KEY: VALUE")
        entries = [(*each, loader.construct_object(node, True)) for *each, node in _entries(root)]
    except (yaml.YAMLError, UnicodeDecodeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f":{mark.line + 1}"
        problem = getattr(error, "problem", None) or first_line(error)
        raise ConfigError(f"{path}{line}: the file is not YAML: {problem}") from None
    named = [value for _, _, name, value in entries if name == "loss"]
    loss = str(loss or next(iter(named), None) or SFT.name)
    names: dict[tuple[str, str], str] = {}
    types: dict[str, Any] = {"loss": str}
    for subject, kind in (*subjects(loss).items(), *(("", each) for each in also)):
        names |= {(subject, each.name): flat_name(each) for each in fields(kind)}
        types |= types_of(kind)
    found: dict[str, Any] = {}
    for number, subject, key, value in entries:
        name, where = names.get((subject, key), key), f"{path}:{number}"
        if name not in types:
            raise ConfigError(f"{where}: {unknown_option(name, loss)}")
        if name in found:
            raise ConfigError(f"{where}: {name}: the key is there twice; remove one")
        found[name] = typed(types[name], value)
    return found


def _entries(root: yaml.MappingNode) -> Iterator[tuple[int, str, str, yaml.Node]]:
    """Yield the line, the subject or "", the key and the value of each option."""
    for key, value in root.value:
        name = str(key.value).replace("-", "_")
        if name in subjects(SFT.name) and isinstance(value, yaml.MappingNode):
            for inner, option in value.value:
                own = str(inner.value).replace("-", "_")
                own = "loss" if (name, own) == ("loss", "name") else own
                yield inner.start_mark.line + 1, name, own, option
        else:
            yield key.start_mark.line + 1, "", name, value


def config_text(settings: Mapping[str, Any], command: Mapping[str, Any]) -> str:
    """Return options as a YAML file, by subject, each under a line that explains it.

    Args: settings: as `FinetuneConfig.options` returns them; command: further ones, for the top.
    """
    lines = ["# The options of this run. 'ligermodels finetune --config FILE' takes them again."]
    lines += [_line(name, value) for name, value in command.items()]
    for subject, kind in subjects(settings["loss"]).items():
        lines.append(f"\n{subject}:")
        texts = helps(kind)
        if subject == "loss":
            lines.append(f"  {_line('name', settings['loss'])}")
        for each in fields(kind):
            if (name := flat_name(each)) in settings:
                lines.append(f"  # {texts[name]}")
                lines.append(f"  {_line(each.name, settings[name])}")
    return "\n".join(lines) + "\n"


def _line(name: str, value: Any) -> str:
    """Return an option as YAML, of which JSON is a part."""
    text = json.dumps(value, ensure_ascii=False)
    # Bytes of a path that are not UTF-8 are halves of surrogate pairs.
    return f"{name}: {text.encode(errors='backslashreplace').decode()}"

"""The options of a fine-tuning run: their limits, and which of them may change on resume.

This module does not import torch, so that the command line shows its help quickly.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import MISSING, dataclass, fields
from typing import Any, get_args, get_origin

from ligermodels.converters.dtypes import dtype_name
from ligermodels.errors import ConfigError
from ligermodels.memory.byte_sizes import parse_bytes
from ligermodels.training.lora_options import parse_lora
from ligermodels.training.options import check_options, types_of
from ligermodels.training.options import free_option as _free_option
from ligermodels.training.options import option as _option

# The losses, and the choices of loss_type for each; the first one is the default.
LOSS_TYPES: dict[str, tuple[str, ...]] = {
    "sft": ("nll", "dft", "focal"),
    "dpo": (
        *("sigmoid", "hinge", "ipo", "exo_pair", "nca_pair", "robust", "bco_pair", "sppo_hard"),
        *("aot", "aot_unpaired", "apo_zero", "apo_down", "discopop", "sigmoid_norm", "sft"),
    ),
    "kto": ("kto", "apo_zero_unpaired"),
    "orpo": (),
    "cpo": ("sigmoid", "hinge", "ipo"),
    "simpo": (),
    "grpo": ("dapo", "grpo", "bnpo", "dr_grpo", "cispo", "sapo", "luspo", "vespo"),
}
# Options that only some losses have.
_ONLY_FOR: dict[str, tuple[str, ...]] = {
    "beta": ("dpo", "kto", "orpo", "cpo", "simpo", "grpo"),
    "label_smoothing": ("dpo", "cpo", "simpo"),
    "simpo_gamma": ("simpo",),
    "desirable_weight": ("kto",),
    "undesirable_weight": ("kto",),
    "reference": ("dpo", "kto", "grpo"),
    "reward_function": ("grpo",),
    "epsilon_high": ("grpo",),
    "f_divergence_type": ("dpo",),
    "f_alpha_divergence_coef": ("dpo",),
    "discopop_tau": ("dpo",),
    "ld_alpha": ("dpo",),
    "use_weighting": ("dpo",),
    "teacher": ("sft",),
    "medusa_heads": ("sft",),
    "num_generations": ("grpo",),
    "max_completion_length": ("grpo",),
    "temperature": ("grpo",),
}
# Options that a teacher has as well.
_ALSO_OF_TEACHERS = ("beta", "temperature")
# The variants that label_smoothing changes; None is the default one.
_SMOOTHED: dict[str, tuple[str | None, ...]] = {
    "dpo": ("robust", "exo_pair", "aot", "aot_unpaired"),
    "cpo": (None, "sigmoid"),
    "simpo": (None,),
}
DIVERGENCES = ("reverse_kl", "forward_kl", "js_divergence", "alpha_divergence")
REFERENCES = ("file", "float32", "bfloat16", "int8", "adapters-off")
PRECISIONS = ("float32", "bf16-mixed", "bf16")
MEMORY = ("auto", "off")  # or a number of bytes
LOAD_IN = ("4bit", "8bit")
EXPORTS = ("merged", "adapter")
LOGGERS = ("tensorboard", "wandb")
OPTIMIZERS = ("adamw", "adamw_8bit", "adafactor", "muon")
SCHEDULES = ("cosine", "linear", "constant", "wsd", "inverse_sqrt")
EXPORT_DTYPES = ("float32", "bfloat16", "float16")
# Runs beyond these never end, or take more memory than there is.
MAX_STEPS = 10**9
MAX_ROWS = 2**20  # of one optimizer step


@dataclass(kw_only=True)
class FinetuneConfig:
    """The options of a fine-tuning run. Many are named as in transformers' TrainingArguments.

    `ligermodels finetune --help` explains each option. `resume=True` continues from the last
    checkpoint in `output_dir`, or starts from the beginning if there is none.

    Raises:
        ConfigError: a value has the wrong type or breaks a limit, or two options exclude each
            other.
    """

    model: str = _free_option(MISSING, "hub id or local folder of the checkpoint to start from")
    train_files: list[str] = _free_option(  # noqa: RUF009 (the default is not a list)
        MISSING,
        "plain text, or .jsonl objects with text, prompt and completion, or messages; also records "
        "of ShareGPT (conversations) and of Alpaca (instruction, input, output). With the library "
        "datasets also .parquet, .csv, and data sets of the hub: OWNER/NAME, OWNER/NAME:SPLIT or "
        "OWNER/NAME:CONFIG:SPLIT",
    )
    output_dir: str = _free_option(
        MISSING, "folder of the run; the exported model goes to its subfolder model/"
    )
    eval_files: list[str] | None = _free_option(  # noqa: RUF009
        None, "files to measure perplexity on, in the same formats"
    )
    eval_fraction: float = _free_option(
        0.05,
        "share of the training data to hold out if no evaluation files are given",
        at_least=0,
        less_than=1,
    )
    max_eval_rows: int | None = _free_option(
        None, "largest number of rows to evaluate on", at_least=1
    )
    eval_steps: int | None = _free_option(
        None, "steps between evaluations (default: five evaluations in the run)", at_least=1
    )
    separator: str | None = _option(
        None,
        "line that separates the documents of a text file; '' splits at blank lines "
        "(default: each file is one document)",
    )
    stream: bool = _option(
        False,
        "keep the tokens on the disk (in HF_HOME), for data that is larger than memory; .jsonl "
        "files are read line by line, and texts document by document",
    )
    data_weights: list[float] | None = _option(  # noqa: RUF009
        None,
        "the share of each training file in the rows, in any unit, as in 3 1; sets stream",
        more_than=0,
    )
    revision: str | None = _free_option(None, "branch, tag or commit of a hub checkpoint")

    loss: str = _option(
        "sft",
        "what to minimise: the loss of the next token, or of preferences (dpo, orpo, cpo, simpo, "
        "kto), or the rewards of generated text (grpo)",
        choices=tuple(LOSS_TYPES),
    )
    loss_type: str | None = _option(
        None, "variant of the loss, named as in TRL, such as dft, ipo, apo_zero or dr_grpo"
    )
    beta: float | None = _option(
        None,
        "how strongly the model is held to the one it starts from; the scale of the margin of "
        "orpo, cpo and simpo (default: 0.1; 0 for grpo)",
        at_least=0,
    )
    f_divergence_type: str | None = _option(
        None,
        "dpo's divergence from the reference model (default: reverse_kl)",
        choices=DIVERGENCES,
    )
    f_alpha_divergence_coef: float | None = _option(
        None, "the coefficient of dpo's alpha_divergence (default: 0.5)"
    )
    discopop_tau: float | None = _option(
        None, "the temperature of dpo's discopop (default: 0.05)", more_than=0
    )
    ld_alpha: float | None = _option(
        None,
        "weight, in dpo, of the tokens beyond the length of the shorter completion of a pair",
        at_least=0,
        at_most=1,
    )
    use_weighting: bool | None = _option(
        None, "weight each of dpo's pairs by its probability under the model (WPO)"
    )
    label_smoothing: float | None = _option(
        None,
        "rate of wrong preferences, for simpo, cpo's sigmoid, and dpo's robust, exo_pair, aot and "
        "aot_unpaired",
        at_least=0,
        less_than=0.5,
    )
    simpo_gamma: float | None = _option(None, "margin of simpo (default: 0.5)", at_least=0)
    desirable_weight: float | None = _option(
        None, "factor of kto's desirable examples (default: 1.0)", at_least=0
    )
    undesirable_weight: float | None = _option(
        None, "factor of kto's other examples (default: 1.0)", at_least=0
    )
    reference: str | None = _option(
        None,
        "the reference model of dpo and kto: its log-probabilities, computed once into a file; a "
        "frozen copy of the model in a dtype; or, with lora, the model with its adapters off "
        "(default: file; for grpo, a copy in bfloat16, or with lora adapters-off)",
        choices=REFERENCES,
    )
    reward_function: str | None = _option(
        None,
        "grpo's reward, as FILE.py:NAME or MODULE:NAME; it is called with prompts, completions "
        "and the other keys of the data, each a list, and returns a list of numbers",
    )
    teacher: str | None = _option(
        None,
        "hub id or local folder of a model with the same tokenizer, whose next-token distribution "
        "the model learns (distillation): with beta 0 by KL(teacher || model), with beta 1 by "
        "KL(model || teacher), and between them by the generalized Jensen-Shannon divergence "
        "(default: beta 0.5)",
    )
    distill_weight: float = _option(
        1.0,
        "share of the divergence from the teacher in the loss; the rest is the loss of the next "
        "token",
        more_than=0,
        at_most=1,
    )
    medusa_heads: int | None = _option(
        None,
        "train so many heads for the tokens after the next one, which are exported with the model "
        "and make generation faster",
        at_least=1,
        at_most=64,
    )
    medusa_stage: int = _option(
        1,
        "1: the model is frozen, and only its heads learn; 2: both learn, from the heads that the "
        "folder of the model holds, if there are any",
        at_least=1,
        at_most=2,
    )
    medusa_tied: bool = _option(
        False, "the heads share the model's projection instead of each having its own"
    )
    num_generations: int = _option(8, "completions that grpo samples for a prompt", at_least=2)
    max_completion_length: int = _option(
        256, "most tokens of a completion that grpo samples", at_least=1
    )
    temperature: float = _option(
        1.0,
        "temperature of grpo's samples, or of the distributions of a teacher and its student",
        more_than=0,
    )
    epsilon_high: float | None = _option(
        None, "how far above 1 grpo clips ratios; for cispo the largest ratio", more_than=0
    )

    seq_len: int = _option(1024, "tokens per row; documents are packed into rows", at_least=2)
    batch_size: int = _option(4, "rows (or pairs) per forward pass", at_least=1, at_most=MAX_ROWS)
    gradient_accumulation_steps: int = _option(
        1, "forward passes per optimizer step", at_least=1, at_most=MAX_ROWS
    )
    num_train_epochs: float = _option(1.0, "passes over the training rows", more_than=0)
    max_steps: int | None = _option(
        None,
        "number of optimizer steps; overrides the number of epochs",
        at_least=1,
        at_most=MAX_STEPS,
    )

    lora: str | None = _option(
        None,
        "freeze the model and train adapters on its linears: the rank r, and if wanted the scale "
        "alpha and a dropout, as in r=16,alpha=32,dropout=0.05 (default of alpha: twice r)",
    )
    lora_targets: list[str] | None = _option(  # noqa: RUF009
        None,
        "the linears that get an adapter, by HF's names, such as q_proj v_proj (default: all "
        "linears of the layers)",
    )
    load_in: str | None = _option(
        None,
        "with lora, keep the frozen weights of the layers in so few bits: 4bit (NF4) or 8bit",
        choices=LOAD_IN,
    )
    export: str = _free_option(
        "merged",
        "with lora, what to export: the model with the adapters added to the checkpoint's "
        "weights, or the adapters alone in PEFT's format",
        choices=EXPORTS,
    )

    freeze: list[str] | None = _option(  # noqa: RUF009
        None,
        "parameters or modules that are not trained, by name; * stands for anything, as in "
        "embed_tokens layers.*.mlp",
    )
    train_only: list[str] | None = _option(  # noqa: RUF009
        None, "the only parameters or modules that are trained, by name, as for freeze"
    )

    optimizer: str = _option(
        "adamw",
        "adamw_8bit keeps its moments in 8 bits and needs torchao; muon trains the matrices of the "
        "layers, and AdamW the rest; adafactor's rate is relative to the size of the weights, so "
        "that it needs a larger one, such as 1e-3",
        choices=OPTIMIZERS,
    )
    learning_rate: float = _option(2e-5, "peak learning rate", more_than=0)
    schedule: str = _option(
        "cosine",
        "how the learning rate falls after the warm-up; wsd keeps the peak for 80% of the steps",
        choices=SCHEDULES,
    )
    min_lr_rate: float = _option(
        0.1, "final learning rate, as a share of the peak", at_least=0, at_most=1
    )
    warmup_steps: int | None = _option(
        None, "steps of linear warm-up (default: 3% of the steps)", at_least=0
    )
    weight_decay: float = _option(0.01, "AdamW's weight decay, for matrices only", at_least=0)
    adam_beta1: float = _option(0.9, "decay rate of AdamW's first moment", at_least=0, less_than=1)
    adam_beta2: float = _option(
        0.95, "decay rate of AdamW's second moment", at_least=0, less_than=1
    )
    adam_epsilon: float = _option(1e-8, "AdamW's epsilon", more_than=0)
    max_grad_norm: float = _option(
        1.0, "clip gradients to this norm; 0 turns clipping off", at_least=0
    )
    seed: int = _option(0, "seed for the held-out documents and the order of the rows", at_least=0)

    precision: str | None = _option(
        None,
        "bf16-mixed keeps float32 weights and computes in bfloat16; bf16 also keeps the weights in "
        "bfloat16 (default: bf16-mixed on a GPU, float32 on a CPU)",
        choices=PRECISIONS,
    )
    device: str | None = _free_option(None, "cpu or cuda (default: cuda if there is a GPU)")
    activation_checkpointing: bool = _option(
        False, "recompute each block in backward to save memory"
    )
    memory: str | None = _free_option(
        None,
        "memory of the GPU for the run, such as 40GiB, or auto for all that is free: choose what "
        "each layer keeps for backward, so that the run fits and is fast; off keeps all "
        "(default: auto on a GPU, off on a CPU)",
    )
    compile: bool = _option(False, "run the model through torch.compile")

    context_parallel: int = _option(
        1,
        "on several GPUs, how many of them compute each row together, for rows that are too long "
        "for one",
        at_least=1,
        at_most=2**16,
    )
    rank_timeout: int = _free_option(
        600,
        "on several GPUs, seconds after which a process that does not answer ends the run",
        at_least=1,
        at_most=10**6,
    )

    save_steps: int = _free_option(
        500, "steps between checkpoints; 0 writes one only if the run is interrupted", at_least=0
    )
    save_total_limit: int = _free_option(2, "number of newest checkpoints to keep", at_least=1)
    logging_steps: int = _free_option(1, "steps between two reports of the loss", at_least=1)
    report_to: list[str] | None = _free_option(  # noqa: RUF009
        None,
        "loggers that get the metrics: tensorboard (in DIR/tensorboard), wandb (its environment "
        "variables say where)",
        choices=LOGGERS,
    )
    sample_prompts: list[str] | None = _free_option(  # noqa: RUF009
        None, "texts that the model continues at each evaluation, greedily, into DIR/samples.jsonl"
    )
    sample_tokens: int = _free_option(
        64, "most tokens of such a continuation", at_least=1, at_most=2**16
    )
    sample_chat: bool = _free_option(
        False, "take each of these texts as the message of a user, for the chat template"
    )
    profile: bool = _free_option(
        False, "profile three steps, into DIR/profile: a trace and a table of the slowest ops"
    )
    push_to_hub: str | None = _free_option(
        None, "id of a repository on the hub that gets the export; it is created if needed"
    )
    hub_private_repo: bool = _free_option(False, "create that repository as a private one")
    export_dtype: str | None = _free_option(
        None,
        "dtype of the export (default: the dtype of the trained weights)",
        choices=EXPORT_DTYPES,
    )
    max_shard_size: int = _free_option(
        5 * 10**9, "largest size of one weight file of the export, in bytes", at_least=1
    )
    resume: bool = _free_option(
        False, "continue from the last checkpoint in the output folder, if there is one"
    )
    overwrite_output_dir: bool = _free_option(False, "remove the run that the output folder holds")

    def __post_init__(self) -> None:
        for name in ("model", "output_dir"):
            if isinstance(path := getattr(self, name), os.PathLike):
                setattr(self, name, os.fspath(path))
        for name, kind in types_of(type(self)).items():
            if get_origin(kind) is list:
                setattr(self, name, _as_list(getattr(self, name), *get_args(kind)))
        if type(self.memory) is int:
            self.memory = str(self.memory)
        if isinstance(self.export_dtype, str):
            self.export_dtype = dtype_name(self.export_dtype)
        if isinstance(self.max_shard_size, str):
            self.max_shard_size = parse_bytes(self.max_shard_size, "max_shard_size")
        check_options(self)
        if not self.train_files:
            raise ConfigError("train_files: at least one file is needed")
        if self.batch_size * self.gradient_accumulation_steps > MAX_ROWS:
            raise ConfigError(
                "batch_size and gradient_accumulation_steps: their product must be at most "
                f"{MAX_ROWS}, not {self.batch_size * self.gradient_accumulation_steps}"
            )
        self._check_loss()
        self._check_lora()
        if self.data_weights and len(self.data_weights) != len(self.train_files):
            raise ConfigError(
                f"data_weights: there are {len(self.data_weights)}, but train_files has "
                f"{len(self.train_files)}; give one weight for each file"
            )
        if (self.stream or self.data_weights) and self.loss != "sft":
            raise ConfigError(
                f"stream and data_weights: these are only for the loss sft, not {self.loss}"
            )
        chosen = [
            name for name in ("lora", "freeze", "train_only", "medusa_heads") if getattr(self, name)
        ]
        if len(chosen) > 1:
            raise ConfigError(f"{' and '.join(chosen)}: set only one of them")
        if self.context_parallel > 1 and self.loss != "sft":
            raise ConfigError(
                f"context_parallel: this is only for the loss sft, not for {self.loss}"
            )
        if self.context_parallel > 1 and self.lora is not None:
            raise ConfigError(
                "context_parallel: this cannot be combined with lora, which holds a whole model "
                "and whole rows on each GPU; leave one out"
            )
        if self.context_parallel > 1 and self.medusa_heads is not None:
            raise ConfigError(
                "context_parallel: this cannot be combined with medusa_heads, which read whole "
                "rows; leave one out"
            )
        if self.resume and self.overwrite_output_dir:
            raise ConfigError("resume and overwrite_output_dir: set only one of the two")
        if self.memory is not None:
            if self.memory not in MEMORY:
                parse_bytes(self.memory, "memory")
            if self.activation_checkpointing and self.memory != "off":
                raise ConfigError(
                    "activation_checkpointing and memory: choose one of the two; memory recomputes "
                    "only as much as is needed"
                )

    def _check_lora(self) -> None:
        if self.lora is not None:
            parse_lora(self.lora)
            return
        given = {"lora_targets": self.lora_targets, "load_in": self.load_in}
        given["export"] = "adapter" if self.export == "adapter" else None
        given["reference"] = "off" if self.reference == "adapters-off" else None
        for name, value in given.items():
            if value is not None:
                raise ConfigError(f"{name}: this needs adapters; set lora, for example to r=16")

    def _check_loss(self) -> None:
        types = LOSS_TYPES[self.loss]
        if self.loss_type is not None and self.loss_type not in types:
            known = f"expected one of {', '.join(types)}" if types else "it has no variants"
            raise ConfigError(f"loss_type: {self.loss} has no variant {self.loss_type!r}; {known}")
        for name, losses in _ONLY_FOR.items():
            taught = name in _ALSO_OF_TEACHERS and self.teacher is not None
            is_set = getattr(self, name) != _DEFAULTS[name]
            if is_set and self.loss not in losses and not taught:
                raise ConfigError(f"{name}: this is only for --loss {', '.join(losses)}")
        if self.label_smoothing and self.loss_type not in _SMOOTHED[self.loss]:
            known = ", ".join(each for each in _SMOOTHED[self.loss] if each is not None)
            raise ConfigError(f"label_smoothing: this is only for the loss types {known}")
        other_divergence = self.f_divergence_type != "alpha_divergence"
        if self.f_alpha_divergence_coef is not None and other_divergence:
            raise ConfigError(
                "f_alpha_divergence_coef: this is only for the f_divergence_type alpha_divergence"
            )
        if self.discopop_tau is not None and self.loss_type != "discopop":
            raise ConfigError("discopop_tau: this is only for the loss_type discopop")
        if self.beta == 0 and self.loss not in ("sft", "grpo", "orpo"):
            raise ConfigError(f"beta: must be more than 0 for {self.loss}")
        if self.loss == "sft":
            self._check_extra_models()
        if self.loss_type == "exo_pair" and not self.label_smoothing:
            raise ConfigError("label_smoothing: exo_pair needs more than 0; its paper takes 1e-3")
        if self.loss != "grpo":
            return
        if self.reward_function is None:
            raise ConfigError("reward_function: grpo needs one (--reward-function FILE.py:NAME)")
        if self.reference == "file":
            raise ConfigError("reference: 'file' needs fixed data, but grpo samples its data")
        if self.loss_type == "cispo" and self.epsilon_high is None:
            raise ConfigError("epsilon_high: cispo needs it, the largest ratio, for example 5.0")
        completions = self.batch_size * self.gradient_accumulation_steps
        if completions % self.num_generations:
            raise ConfigError(
                "num_generations: must divide the completions of a step, batch_size * "
                f"gradient_accumulation_steps = {completions}, but is {self.num_generations}"
            )
        if self.max_completion_length >= self.seq_len:
            raise ConfigError(
                f"max_completion_length: {self.max_completion_length} tokens leave no room for a "
                f"prompt in rows of {self.seq_len}; use longer rows (seq_len)"
            )

    def _check_extra_models(self) -> None:
        """Check the options of a teacher and of Medusa's heads."""
        both = [n for n in ("teacher", "medusa_heads", "loss_type") if getattr(self, n) is not None]
        if len(both) > 1:
            raise ConfigError(f"{' and '.join(both)}: choose one of them")
        if self.teacher is not None and self.beta is not None and self.beta > 1:
            raise ConfigError(f"beta: must be at most 1 for a teacher, not {self.beta}")
        if self.teacher is not None and self.context_parallel > 1:
            raise ConfigError(
                "context_parallel: this cannot be combined with a teacher, which reads whole rows; "
                "leave one out"
            )
        if self.teacher is None and self.distill_weight != 1:
            raise ConfigError("distill_weight: this needs a teacher")
        if self.medusa_heads is None:
            if self.medusa_stage != 1 or self.medusa_tied:
                raise ConfigError("medusa_stage and medusa_tied: these need medusa_heads")
        elif self.memory not in (None, "off") and self.medusa_stage == 1:
            raise ConfigError(
                "memory: in medusa_stage 1 the model is frozen, and its layers keep nothing that a "
                "plan could save; leave it out"
            )


_DEFAULTS = {option.name: option.default for option in fields(FinetuneConfig)}
FREE_ON_RESUME = frozenset(
    option.name for option in fields(FinetuneConfig) if option.metadata["free_on_resume"]
)


def _as_list(value: Any, item: type) -> Any:
    """Return a list whose paths are strings; a single text, path or number gives a list of one."""
    if isinstance(value, (str, os.PathLike) if item is str else (int, float)):
        value = [value]
    if not isinstance(value, Iterable) or isinstance(value, (str, Mapping)):
        return value
    return [os.fspath(each) if isinstance(each, os.PathLike) else each for each in value]

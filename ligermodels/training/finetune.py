"""Fine-tune a checkpoint: `finetune(FinetuneConfig(model=..., train=[...], output=...))`.

What a run is, from its options to its result; the steps themselves are in `training`, the rows in
`data`, the folder in `runs`. This module imports torch only when it runs, so that the command line
can show its options at once.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, field, fields
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ligermodels.errors import ConfigError, LigerError

if TYPE_CHECKING:
    import torch

    from ligermodels.models.base import DecoderModel
    from ligermodels.training.data import Document
    from ligermodels.training.packing import PackedRows
    from ligermodels.training.run_dir import RunFolder
    from ligermodels.training.trainer import Trainer

PRECISIONS = ("float32", "bf16-mixed", "bf16")
EXPORT_DTYPES = ("float32", "bfloat16", "float16")

# Options that may differ when a run is resumed: none of them changes a weight that is trained, or
# (the files) what they may not change is told by the hash of the rows.
FREE_ON_RESUME = frozenset(
    "train eval output device eval_every max_eval_rows eval_fraction save_every save_total_limit "
    "log_every export_dtype max_shard_size resume overwrite".split()
)


def _option(default: Any, help: str, **limits: Any) -> Any:
    """A field with what the command line shows and what `FinetuneConfig` checks."""
    return field(default=default, metadata={"help": help, **limits})


@dataclass(kw_only=True)
class FinetuneConfig:
    """Everything a fine-tuning run is told; raises ConfigError for a value that makes no sense.

    `ligermodels finetune --help` shows each option with its meaning.
    """

    model: str = field(metadata={"help": "hub id or folder of the checkpoint to start from"})
    train: list[str] = field(
        metadata={
            "help": "plain text, or .jsonl with text, with prompt and completion, or with messages"
        }
    )
    output: str = field(
        metadata={"help": "folder for the run; the export goes to its folder model/"}
    )
    eval: list[str] | None = field(
        default=None, metadata={"help": "files of the same kinds to measure perplexity on"}
    )
    eval_fraction: float = _option(
        0.05, "share of the training data held out where no --eval is given", least=0, below=1
    )
    max_eval_rows: int | None = _option(None, "measure on at most so many rows", least=1)
    eval_every: int | None = _option(
        None, "steps between evaluations (default: five evaluations in the run)", least=1
    )
    separator: str | None = _option(
        None,
        "line between the documents of a text file; '' separates paragraphs "
        "(default: a file is one document)",
    )
    revision: str | None = _option(None, "branch, tag or commit of a hub checkpoint")

    seq_len: int = _option(1024, "tokens in a row; documents are packed into rows", least=2)
    batch_size: int = _option(4, "rows in a forward pass", least=1)
    gradient_accumulation_steps: int = _option(1, "forward passes in a step", least=1)
    epochs: float = _option(1.0, "times to go through the training rows", above=0)
    steps: int | None = _option(None, "number of steps; replaces --epochs", least=1)

    learning_rate: float = _option(2e-5, "peak learning rate", above=0)
    min_lr_ratio: float = _option(
        0.1, "last learning rate, as a share of the peak", least=0, most=1
    )
    warmup_steps: int | None = _option(
        None, "steps of linear warm-up (default: 3%% of the steps)", least=0
    )
    weight_decay: float = _option(0.01, "AdamW's decay of matrices", least=0)
    beta1: float = _option(0.9, "AdamW's first decay rate", least=0, below=1)
    beta2: float = _option(0.95, "AdamW's second decay rate", least=0, below=1)
    adam_eps: float = _option(1e-8, "AdamW's epsilon", above=0)
    max_grad_norm: float = _option(1.0, "clip gradients to this norm; 0 does not clip", least=0)
    seed: int = _option(0, "decides the held-out part and the order of the rows", least=0)

    precision: str | None = _option(
        None,
        "bf16-mixed keeps float32 weights and computes in bfloat16; bf16 keeps bfloat16 weights, "
        "too (default: bf16-mixed on a GPU, float32 on a CPU)",
        choices=PRECISIONS,
    )
    device: str | None = _option(None, "cpu or cuda (default: cuda where there is one)")
    activation_checkpointing: bool = _option(False, "recompute each block in backward: less memory")
    compile: bool = _option(False, "run the model through torch.compile")

    save_every: int = _option(500, "steps between checkpoints; 0 writes none", least=0)
    save_total_limit: int = _option(2, "checkpoints to keep", least=1)
    log_every: int = _option(1, "steps between looks at the loss", least=1)
    export_dtype: str | None = _option(
        None,
        "dtype of the export (default: the weights as they were trained)",
        choices=EXPORT_DTYPES,
    )
    max_shard_size: int = _option(5 * 10**9, "bytes in one file of the export", least=1)
    resume: bool = _option(False, "go on from the last checkpoint in --output, if there is one")
    overwrite: bool = _option(False, "remove the run that --output holds")

    def __post_init__(self) -> None:
        self.train = [self.train] if isinstance(self.train, str) else [str(x) for x in self.train]
        if self.eval is not None:
            self.eval = [self.eval] if isinstance(self.eval, str) else [str(x) for x in self.eval]
        self.model, self.output = str(self.model), str(self.output)
        if not self.train:
            raise ConfigError("train: at least one file is needed")
        if self.resume and self.overwrite:
            raise ConfigError("resume and overwrite: choose one of the two")
        for each in fields(self):
            value = getattr(self, each.name)
            if value is not None:
                if str(each.type).startswith("int") and type(value) is not int:
                    raise ConfigError(f"{each.name}: must be a whole number, not {value!r}")
                _check_limits(each.name, value, each.metadata)


def _check_limits(name: str, value: Any, limits: Any) -> None:
    if "choices" in limits and value not in limits["choices"]:
        raise ConfigError(f"{name}: one of {', '.join(limits['choices'])} is needed, not {value!r}")
    for rule, holds, words in (
        ("least", lambda x, y: x >= y, "at least"),
        ("most", lambda x, y: x <= y, "at most"),
        ("above", lambda x, y: x > y, "more than"),
        ("below", lambda x, y: x < y, "less than"),
    ):
        if rule in limits:
            try:
                fine = math.isfinite(value) and holds(value, limits[rule])
            except TypeError:
                fine = False
            if not fine:
                raise ConfigError(f"{name}: must be {words} {limits[rule]}, not {value!r}")


@dataclass(kw_only=True)
class FinetuneResult:
    """What came of a run. Losses are per token, in nats; perplexity is their exponential.

    `model_folder` is the export, `model` the trained model itself, in the export's dtype. The
    evaluations are None where nothing was held out.
    """

    output: Path
    model_folder: Path
    steps: int
    loss: float
    eval_loss_before: float | None
    eval_loss_after: float | None
    metrics: list[dict[str, Any]] = field(repr=False)
    model: DecoderModel = field(repr=False)
    notes: list[str] = field(default_factory=list, repr=False)

    @property
    def perplexity_before(self) -> float | None:
        """Held-out perplexity of the checkpoint that was given."""
        return _perplexity(self.eval_loss_before)

    @property
    def perplexity_after(self) -> float | None:
        """Held-out perplexity of the trained weights."""
        return _perplexity(self.eval_loss_after)


def _perplexity(loss: float | None) -> float | None:
    return None if loss is None else math.exp(min(loss, 700.0))


def finetune(config: FinetuneConfig, *, progress: bool = True) -> FinetuneResult:
    """Run `config` to its end: train, evaluate, export.

    With `progress`, a bar and notes go to stderr. The run can be killed at any moment and gone on
    with by `resume=True`; on a CPU in float32 the weights are then the same, bit for bit.

    Raises:
        DataError: a file is missing, unreadable or empty; file and line are named.
        CheckpointError, ConfigError: the model cannot be loaded, or cannot be what is asked for.
        SaveError: the output cannot be written.
        LigerError: the output folder holds another run, or the loss is no longer finite.
    """
    import torch

    from ligermodels.training.data import check_files
    from ligermodels.training.run_dir import RunFolder

    folder = RunFolder(config.output)
    inputs = [("model", Path(config.model))]
    inputs += [("training data", file) for file in check_files(config.train)]
    inputs += [("evaluation data", file) for file in check_files(config.eval or [])]
    folder.check(config.resume, config.overwrite, inputs)
    device = pick_device(config.device)
    gpus = [device] if device.type == "cuda" else []
    # The generators of whoever calls this stay as they are.
    with folder.held(), torch.random.fork_rng(devices=gpus):
        return _Run(config, folder, device, progress).run()


def resumed_settings(output: str | Path) -> dict[str, Any]:
    """The options with which the run in `output` was started, {} when there is none."""
    from ligermodels.training.run_dir import RunFolder

    saved = RunFolder(output).read_settings()
    known = {each.name for each in fields(FinetuneConfig)} - {"resume", "overwrite"}
    return {k: v for k, v in saved["settings"].items() if k in known} if saved else {}


def pick_device(name: str | None) -> torch.device:
    """The device of that name, by default a GPU where there is one.

    Raises ConfigError for a device that is not there, or not one that the kernels know.
    """
    import torch

    if name is None:
        return torch.device("cuda" if torch.cuda.is_available() else "cpu")
    try:
        device = torch.device(name)
        if device.type not in ("cpu", "cuda"):
            raise ConfigError(f"device: cpu or cuda is needed, not {name!r}")
        torch.empty(1, device=device)
    except (RuntimeError, AssertionError) as error:
        reason = str(error).splitlines()[0].rstrip(".")
        raise ConfigError(f"device: {name!r} cannot be used: {reason}") from None
    return device


class _Run:
    """One call of `finetune`: load, train, export."""

    def __init__(
        self, config: FinetuneConfig, folder: RunFolder, device: torch.device, progress: bool
    ):
        self.config = config
        self.folder = folder
        self.device = device
        self.precision = config.precision or ("bf16-mixed" if device.type == "cuda" else "float32")
        self.progress = progress
        self.notes: list[str] = []

    def note(self, text: str) -> None:
        self.notes.append(text)
        if self.progress:
            from tqdm import tqdm

            tqdm.write(text, file=_stderr())

    def run(self) -> FinetuneResult:
        from ligermodels.training.trainer import Trainer

        config = self.config
        saved = self.folder.read_settings() if config.resume else None
        if saved is not None:
            self._check_settings(saved["settings"])
        source = self._resolve()
        rows, eval_rows = self._rows(source)
        model = self._model(source, rows, eval_rows)
        trainer = Trainer(model, config, rows, eval_rows, self.device, self.precision)
        self._start(rows, trainer, saved)
        trainer.train(self.folder, progress=self.progress)
        return self._finish(model, trainer)

    def _resolve(self) -> Path:
        from ligermodels.converters.hub import resolve

        return Path(resolve(self.config.model, revision=self.config.revision))

    def _rows(self, source: Path) -> tuple[PackedRows, PackedRows | None]:
        from ligermodels.text.tokenizer import Tokenizer
        from ligermodels.training.data import read_documents
        from ligermodels.training.packing import PackedRows, hold_out

        config = self.config
        tokenizer = Tokenizer.from_hf(source)
        train = read_documents(config.train, tokenizer, separator=config.separator)
        if config.eval:
            held = read_documents(config.eval, tokenizer, separator=config.separator)
        else:
            train, held = hold_out(train, config.eval_fraction, config.seed)
        pad = tokenizer.pad_token_id
        pad = tokenizer.eos_token_id if pad is None else pad

        def pack(what: str, documents: list[Document]) -> PackedRows:
            rows = PackedRows(documents, config.seq_len, pad or 0)
            self.note(
                f"{what} data: {len(documents):,} documents, {rows.num_tokens:,} tokens, "
                f"{len(rows):,} rows of {rows.width:,}"
            )
            if rows.num_truncated:
                self.note(
                    f"{what} data: {rows.num_truncated:,} examples are longer than "
                    f"{config.seq_len} tokens and lose their end; {rows.num_dropped:,} have "
                    "nothing left to learn"
                )
            return rows

        return pack("training", train), pack("held-out", held) if held else None

    def _model(self, source: Path, rows: PackedRows, eval_rows: PackedRows | None) -> DecoderModel:
        import torch

        from ligermodels.models.auto import AutoLiger

        dtype = torch.bfloat16 if self.precision == "bf16" else torch.float32
        model = AutoLiger.from_hf(source, dtype=dtype, device=self.device)
        highest = max(packed.max_id for packed in (rows, eval_rows) if packed is not None)
        if highest >= model.config.vocab_size:
            raise ConfigError(
                f"{source}: vocab_size: the tokenizer makes token {highest}, the model has only "
                f"{model.config.vocab_size}"
            )
        limit = model.config.max_position_embeddings
        if rows.width > limit:
            self.note(
                f"rows of {rows.width} tokens are longer than the {limit} the model was made for"
            )
        if self.config.activation_checkpointing:
            model.activation_checkpointing_enable()
        return model

    def _check_settings(self, saved: dict[str, Any]) -> None:
        for name, value in self._settings().items():
            old = saved.get(name, value)
            if name not in FREE_ON_RESUME and old != value:
                raise LigerError(
                    f"{self.folder.path}: {name}: the run was started with {old!r} and cannot be "
                    f"resumed with {value!r}"
                )

    def _settings(self) -> dict[str, Any]:
        """The options with what they stand for here: a run may be resumed from another folder."""
        settings = {**asdict(self.config), "precision": self.precision}
        for name in ("train", "eval"):
            if settings[name] is not None:
                settings[name] = [str(Path(file).resolve()) for file in settings[name]]
        if Path(self.config.model).is_dir():
            settings["model"] = str(Path(self.config.model).resolve())
        return settings

    def _start(self, rows: PackedRows, trainer: Trainer, saved: dict[str, Any] | None) -> None:
        """Make the folder this run's: nothing of an older run is touched before all has loaded."""
        from ligermodels import __version__
        from ligermodels.training.data import file_hashes

        where = self.folder.path
        facts = {"rows": rows.fingerprint(), "steps": trainer.total_steps}
        if saved is None:
            files = file_hashes(self.config.train)
            self.folder.clear()
            settings = {"settings": self._settings(), **facts, "files": files}
            self.folder.write_settings({**settings, "ligermodels": __version__})
        elif saved.get("rows") != facts["rows"]:
            raise LigerError(
                f"{where}: the training data is not what the run was started with: "
                + _difference(saved.get("files"), file_hashes(self.config.train))
            )
        elif saved.get("steps") != facts["steps"]:
            raise LigerError(
                f"{where}: the run has {saved.get('steps')} steps, not {facts['steps']}"
            )

    def _finish(self, model: DecoderModel, trainer: Trainer) -> FinetuneResult:
        import torch

        from ligermodels.training.run_dir import plot_losses

        if self.config.export_dtype is not None:
            model.to(getattr(torch, self.config.export_dtype))
        model.save_hf(self.folder.model, max_shard_size=self.config.max_shard_size)
        metrics = self.folder.read_metrics()
        if not plot_losses(metrics, self.folder.curve):
            self.note("no loss.png: matplotlib is missing (pip install 'ligermodels[plot]')")
        losses = [entry["loss"] for entry in metrics if "loss" in entry]
        evals = [entry["eval_loss"] for entry in metrics if "eval_loss" in entry]
        return FinetuneResult(
            output=self.folder.path,
            model_folder=self.folder.model,
            steps=trainer.total_steps,
            loss=losses[-1],
            eval_loss_before=evals[0] if evals else None,
            eval_loss_after=evals[-1] if evals else None,
            metrics=metrics,
            model=model,
            notes=self.notes,
        )


def _difference(then: Any, now: dict[str, str]) -> str:
    """What became of the training files, by their hashes; the names may have changed, too."""
    then = then if isinstance(then, dict) else {}
    if changed := [file for file, digest in now.items() if digest not in then.values()]:
        return f"{', '.join(changed)} changed or came new"
    if gone := [file for file, digest in then.items() if digest not in now.values()]:
        return f"{', '.join(gone)} is left out"
    return "the files are the same, but their order, eval, eval_fraction or the tokenizer is not"


def _stderr() -> Any:
    import sys

    return sys.stderr

"""Check a family, from its config alone: compare tiny random models with transformers.

Each check returns one error. Without transformers, or for a model that it does not know, the checks
that need it are left out, and the others start from a random model of this library.
"""

import contextlib
import copy
import dataclasses
import json
import math
import tempfile
import textwrap
import warnings
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from ligermodels.converters import hf_config, hf_rope
from ligermodels.converters.files import CONFIG_NAME
from ligermodels.converters.verify import compare
from ligermodels.errors import ConfigError, LigerError, counted, first_line
from ligermodels.layers.recompute import POLICIES
from ligermodels.memory.plan import MemoryPlan
from ligermodels.models.auto import check_weight_map, small_variants
from ligermodels.models.base import DecoderModel
from ligermodels.models.config import ModelConfig

# Each check: the largest error that passes, and what is compared. Errors are relative, in float32:
# the norm of the difference over the norm. "generation" counts tokens, and "export" tensors, keys
# and files.
CHECKS = {
    "logits": (1e-5, "beside those of transformers"),
    "loss": (1e-6, "beside that of transformers"),
    "gradients": (1e-4, "the worst parameter beside transformers"),
    "padding": (1e-5, "logits of rows with padding on the left, beside transformers"),
    "generation": (0.0, "greedy tokens that differ from transformers, both with a cache"),
    "export": (0.0, "what save_hf changes: tensors, config keys, files, their logits"),
    "packing": (1e-5, "logits of documents in one row, beside each document alone"),
    "recompute": (1e-6, "gradients if backward computes each layer again, beside plain ones"),
    "compile": (1e-5, "loss, gradients of torch.compile(fullgraph=True), beside eager"),
}
# If two logits are nearer than this fraction of the largest one, either token may be chosen.
_NEAR_TIE = 1e-4
# Scaled rope goes beyond its original length, which is 16 in `shrunk`, from the prompt on.
_SEQ, _PROMPT, _NEW = 24, 17, 12
_MOST_LAYERS = 8


@dataclass(frozen=True)
class Cell:
    """The result of a check: its error, or the reason why there is none.

    Attributes:
        error: the error, or None if the check did not run or failed with an exception.
        note: the reason, or the name of the parameter whose error is too large.
        ok: whether the error is within the bound. A check that was left out is ok.
    """

    error: float | None
    note: str
    ok: bool

    def __str__(self) -> str:
        if self.error is None:
            return "left out" if self.ok else "FAILED"
        return ("" if self.ok else "FAILED ") + ("0" if self.error == 0 else f"{self.error:.0e}")


@dataclass
class FamilyReport:
    """The result of `check_family`. `str` makes a table of the worst errors.

    `ok` is True if every check passed.

    Attributes:
        family: the model_type.
        rows: a config's name -> the check's name -> the result.
    """

    family: str
    rows: dict[str, dict[str, Cell]] = field(default_factory=dict)

    @property
    def ok(self) -> bool:
        return all(cell.ok for row in self.rows.values() for cell in row.values())

    def __str__(self) -> str:
        table, worst = [[self.family, "worst", "bound", "config"]], self.worst()
        for check, cell in worst.items():
            where = next(name for name, row in self.rows.items() if row.get(check) is cell)
            table.append([check, str(cell), f"{CHECKS[check][0]:.0e}", where])
        notes: dict[str, str] = {}  # One cause may fail many checks.
        for name, row in self.rows.items():
            for check, cell in row.items():
                if cell.note:
                    notes.setdefault(cell.note, "" if cell.ok else f"{name}, {check}: ")
        widths = [max(map(len, column)) for column in zip(*table)]
        lines = ["  ".join(map(str.ljust, line, widths)).rstrip() for line in table]
        for note, start in notes.items():
            text = start + note
            lines += textwrap.wrap(text, 80, break_long_words=False, break_on_hyphens=False)
        count, logits = counted(len(self.rows), "config"), worst.get("logits")
        verdict = f"passed: {count} within each bound; nothing was compared with transformers"
        if logits is not None and logits.error is not None:
            near = f"logits {logits} of {CHECKS['logits'][0]:.0e}"
            verdict = f"passed: {count} as in transformers within each bound ({near})"
        if failed := [check for check, cell in worst.items() if not cell.ok]:
            verdict = f"FAILED: {len(failed)} of {len(worst)} checks are not within their bounds"
        return "\n".join([*lines, verdict])

    def worst(self) -> dict[str, Cell]:
        """Return the worst result of each check over all configs."""

        def badness(cell: Cell) -> tuple[bool, float]:
            return not cell.ok, -1.0 if cell.error is None else cell.error

        found: dict[str, list[Cell]] = {}
        for row in self.rows.values():
            for check, cell in row.items():
                found.setdefault(check, []).append(cell)
        return {check: max(cells, key=badness) for check, cells in found.items()}


def check_family(
    family: type[DecoderModel],
    config: ModelConfig | None = None,
    *,
    compile: bool = True,
    device: torch.device | str = "cpu",
) -> FamilyReport:
    """Check a model class: its weight map, and tiny random models beside transformers.

    Args:
        family: the model class.
        config: a config, such as that of a published checkpoint. The checks use it with small
            sizes. The default is `family.config_class.small()`. Each boolean field is also checked
            with its other value.
        compile: whether to compile a model, which takes a few seconds.
        device: where both models compute. The export is compared on the CPU.
    Raises:
        ConfigError: the weight map is wrong, or there is no small model.
    """
    check_weight_map(family)
    small = family.config_class.small() if config is None else shrunk(config)
    report = FamilyReport(family.config_class.model_type)
    for name, variant in small_variants(small).items():
        with (
            warnings.catch_warnings(),
            tempfile.TemporaryDirectory() as folder,
            torch.random.fork_rng([]),
        ):
            warnings.simplefilter("ignore")
            torch.manual_seed(0)
            checks = _Checks(family, variant, Path(folder), torch.device(device))
            compiles = compile and variant is small
            names = [check for check in CHECKS if compiles or check != "compile"]
            report.rows[name] = {check: checks.run(check) for check in names}
    return report


def shrunk(config: ModelConfig) -> ModelConfig:
    """Return a config with the sizes of `small`, and with the other values of `config`.

    Lists with an entry for each layer are cut after the first layer of the last kind.
    """
    cls, small = type(config), type(config).small()
    values = {each.name: getattr(config, each.name) for each in dataclasses.fields(config)}
    extra, before = values.pop("extra"), config.num_hidden_layers
    sizes = {
        name: getattr(small, name)
        for name, value in values.items()
        if value is not None
        and type(getattr(small, name)) is int
        and (name in cls.largest or name in cls.small_fields or name.endswith("_token_id"))
    }
    for_layers = {k: v for k, v in values.items() if isinstance(v, list) and len(v) == before}
    kinds = [1 + kind.index(each) for kind in for_layers.values() for each in kind]
    layers = min(max([small.num_hidden_layers, *kinds]), before, _MOST_LAYERS)
    for_layers = {name: value[:layers] for name, value in for_layers.items()}
    scaling = copy.deepcopy(config.rope_scaling)
    if scaling is not None:
        if "original_max_position_embeddings" in scaling:
            scaling["original_max_position_embeddings"] = small.max_position_embeddings // 4
        rotary = int(small.head_dim * config.rotary_dim / config.head_dim)
        for name in ("short_factor", "long_factor"):
            if name in scaling:
                scaling[name] = scaling[name][: rotary // 2]
    values |= sizes | for_layers | {"num_hidden_layers": layers, "rope_scaling": scaling}
    # Keys that the family does not read stay, because transformers may compute with them.
    extra = {
        key: value[:layers] if isinstance(value, list) and len(value) == before else value
        for key, value in extra.items()
        if key not in ("original_max_position_embeddings", "dtype", "torch_dtype")
    }
    # An export compares the fields with `extra`, which must not hold those of the large model.
    rope = (*hf_rope.FIELDS, "rope_parameters")
    extra = {key: value for key, value in extra.items() if key not in rope}
    for key in extra:
        name = cls.key_aliases.get(key, key)
        if name in values and values[name] != getattr(config, name):
            extra[key] = copy.deepcopy(values[name])
    return cls(**{**values, "dtype": None}, extra=extra)


class _Worst(NamedTuple):
    """The largest error of a check, and the parameter or module that has it."""

    error: float
    name: str


class _Checks:
    """The models of one config, and a method for each check."""

    def __init__(
        self, family: type[DecoderModel], config: ModelConfig, folder: Path, device: torch.device
    ) -> None:
        self.family, self.config, self.device = family, config, device
        self.folder, self.scratch = folder / "checkpoint", folder
        self.folder.mkdir()
        self.without = ""  # why transformers is left out
        self.fault = ""  # why there is no model at all
        try:
            self.theirs: Any = self._save_with_transformers()
        except _LeftOut as reason:
            self.without, self.theirs = str(reason), None
            model = family(config)
            _randomize(model)
            model.save_hf(self.folder)
        except Exception as error:
            self.fault = f"transformers: {type(error).__name__}: {first_line(error)}"
        self.ids, self.labels = self._inputs()

    def run(self, check: str) -> Cell:
        """Run a check. An exception fails it."""
        if self.fault:
            return Cell(None, self.fault, False)
        try:
            found: float | _Worst = getattr(self, f"_{check}")()
        except _LeftOut as reason:
            return Cell(None, f"left out: {reason}", True)
        except Exception as fault:
            kind = "" if isinstance(fault, LigerError) else f"{type(fault).__name__}: "
            return Cell(None, f"{kind}{first_line(fault)}", False)
        error, name = found if isinstance(found, _Worst) else (found, "")
        ok = error <= CHECKS[check][0]
        which = "the first that differs is" if check == "logits" else "the worst is"
        return Cell(float(error), "" if ok or not name else f"{which} {name}", ok)

    def _save_with_transformers(self) -> Any:
        """Let transformers make a random model from our config.json, and save it."""
        try:
            from ligermodels.integrations.hf_reference import new_model
        except ImportError as error:
            raise _LeftOut(first_line(error)) from None
        raw = hf_config.to_hf(self.config)
        (self.folder / CONFIG_NAME).write_text(json.dumps(raw, indent=2), encoding="utf-8")
        model = new_model(self.folder, self.config.model_type)
        if model is None:
            raise _LeftOut(f"transformers does not know {self.config.model_type!r}")
        _randomize(model)
        model.save_pretrained(self.folder)
        return model.eval()

    def _inputs(self) -> tuple[Tensor, Tensor]:
        """Return ids (2, seq) with the padding token among them, and labels, some ignored."""
        generator = torch.Generator().manual_seed(0)
        ids = torch.randint(0, self.config.vocab_size, (2, _SEQ), generator=generator)
        if (pad := self.config.pad_token_id) is not None:
            ids[:, 3] = ids[-1, _SEQ // 2] = pad
        labels = ids.clone()
        labels[0, _SEQ // 2 : _SEQ // 2 + 3] = -100
        return ids.to(self.device), labels.to(self.device)

    def _ours(self) -> DecoderModel:
        return self._load(self.folder).eval()

    def _load(self, folder: Path) -> DecoderModel:
        return self.family.from_hf(folder, dtype=torch.float32, device=self.device)

    def _reference(self) -> Any:
        """Return a copy of transformers' model: some types of rope remember a longer call."""
        if self.theirs is None:
            raise _LeftOut(self.without)
        return copy.deepcopy(self.theirs).to(self.device)

    def _logits(self) -> _Worst:
        """Compare the outputs of modules with the same name, too, in the order of computation."""
        theirs, ours = self._reference(), self._ours()
        with _outputs(theirs, f"{theirs.base_model_prefix}.") as expected:
            logits = theirs(self.ids).logits
        error = _relative(_logits(ours, self.ids), logits)
        with _outputs(ours) as found:
            _logits(ours, self.ids)
        far = (
            name
            for name, values in found.items()
            if name in expected
            and values.shape == expected[name].shape
            and not _relative(values, expected[name]) <= CHECKS["logits"][0]
        )
        if not (name := next(far, "")):
            return _Worst(error, "")
        ours_of, theirs_of = found[name].double(), expected[name].double()
        factor = ((ours_of * theirs_of).sum() / ours_of.square().sum()).item()
        is_scaled = _relative(factor * ours_of, theirs_of) <= CHECKS["logits"][0]
        return _Worst(
            error, f"{name}: transformers' output is {factor:.5g} times it" if is_scaled else name
        )

    def _loss(self) -> float:
        expected = self._reference()(self.ids, labels=self.labels).loss
        loss = self._ours()(self.ids, labels=self.labels).loss
        return (abs(loss - expected) / abs(expected)).item()

    def _gradients(self) -> _Worst:
        """Save transformers' gradients as a checkpoint: our load then gives them our names."""
        theirs = self._reference()
        theirs(self.ids, labels=self.labels).loss.backward()
        constants = self.family.weight_map(self.config).constants  # a load compares them
        buffers = (x for name, x in theirs.named_buffers() if name not in constants)
        with torch.no_grad():
            for weight in (*theirs.parameters(), *buffers):
                weight.copy_(torch.zeros_like(weight) if weight.grad is None else weight.grad)
        folder = self.scratch / "gradients"
        theirs.save_pretrained(folder)
        expected = dict(self._load(folder).named_parameters())
        ours = self._ours()
        return _worst(_gradients(ours, self.ids, self.labels), expected)

    def _padding(self) -> float:
        mask = torch.ones_like(self.ids)
        mask[0, : _SEQ // 3] = 0
        expected = self._reference()(self.ids, attention_mask=mask).logits
        found = _logits(self._ours(), self.ids, attention_mask=mask)
        return _relative(found[mask.bool()], expected[mask.bool()])

    def _generation(self) -> float:
        """Compare greedy tokens with those of transformers, or with those without our cache."""
        ours, text = self._ours(), self.ids[:, :_PROMPT]
        never = self.config.vocab_size  # no row stops early
        found = ours.generate(text, max_new_tokens=_NEW, eos_token_id=never, pad_token_id=0)
        if self.theirs is None:
            if self.config.rope_scaling is not None:
                raise _LeftOut("rope may depend on the length, so the cache matters")
            logits = _logits(ours, found)[:, _PROMPT - 1 : -1]
            expected = logits.argmax(-1)
        else:
            theirs = self._reference()
            theirs.generation_config.eos_token_id = None
            if hasattr(theirs.config, "output_router_logits"):
                # transformers 5.17 would compute the balance of experts here, too, and fail.
                theirs.config.output_router_logits = False
            made = theirs.generate(
                text,
                attention_mask=torch.ones_like(text),
                max_new_tokens=_NEW,
                do_sample=False,
                return_dict_in_generate=True,
                output_logits=True,
            )
            logits, expected = torch.stack(made.logits, 1), made.sequences[:, _PROMPT:]
        return sum(map(_differing, found[:, _PROMPT:], expected, logits))

    def _export(self) -> float:
        out = self.scratch / "export"
        self.family.from_hf(self.folder).save_hf(out)
        report = compare(self.folder, out, self.family)
        if not report.ok:
            raise ConfigError(str(report.differences[0]))
        if self.theirs is None:
            return 0
        theirs = type(self.theirs)
        (name,) = hf_config.to_hf(type(self.config).small())["architectures"]
        if name != theirs.__name__:
            raise ConfigError(
                f"a new model is exported as {name!r}, but transformers' class is "
                f"{theirs.__name__!r}; set architecture of the config class to that"
            )
        opened = theirs.from_pretrained(out, attn_implementation="eager", dtype=torch.float32)
        ids = self.ids.cpu()
        new = self.scratch / "new"
        self.family(self.config).save_hf(new)
        _, info = theirs.from_pretrained(new, output_loading_info=True)
        if missing := sorted(info["missing_keys"]):
            raise ConfigError(
                f"a new model is exported without {missing[0]!r}, which transformers needs; give "
                "its value in the constants of the weight map"
            )
        same = torch.equal(opened.eval()(ids).logits, copy.deepcopy(self.theirs)(ids).logits)
        return 0 if same else math.inf

    def _packing(self) -> float:
        """Compare two documents in one row with each alone, for position_ids and for cu_seqlens."""
        ours, cut = self._ours(), _SEQ // 3
        row, parts = self.ids[:1], (self.ids[:1, :cut], self.ids[:1, cut:])
        expected = torch.cat([_logits(ours, part) for part in parts], 1)
        positions = torch.cat([torch.arange(part.shape[1]) for part in parts])[None]
        positions = positions.to(self.device)
        starts = torch.tensor([0, cut, _SEQ], dtype=torch.int32, device=self.device)
        return max(
            _relative(_logits(ours, row, position_ids=positions), expected),
            _relative(_logits(ours, row, cu_seqlens=starts), expected),
        )

    def _recompute(self) -> _Worst:
        ours = self._ours()
        expected = _gradients(ours, self.ids, self.labels)
        worst = _Worst(0.0, "")
        for policy in POLICIES:
            ours.set_memory_plan(MemoryPlan.uniform(len(ours.layers), policy))
            worst = max(worst, _worst(_gradients(ours, self.ids, self.labels), expected))
        return worst

    def _compile(self) -> _Worst:
        ours = self._ours()
        loss = ours(self.ids, labels=self.labels).loss
        expected = _gradients(ours, self.ids, self.labels)
        torch._dynamo.reset()
        compiled = torch.compile(ours, fullgraph=True, backend="aot_eager")
        found = compiled(self.ids, labels=self.labels).loss
        gradients = _gradients(ours, self.ids, self.labels, compiled)
        of_loss = _Worst((abs(found - loss) / abs(loss)).item(), "the loss")
        return max(of_loss, _worst(gradients, expected))


class _LeftOut(Exception):
    """The reason why a check is left out."""


def _randomize(model: nn.Module) -> None:
    """Draw weights that keep activations of order one, and norms and biases all different."""
    generator = torch.Generator().manual_seed(0)
    embeddings = {id(m.weight) for m in model.modules() if isinstance(m, nn.Embedding)}
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            if id(weight) in embeddings:
                weight.copy_(0.3 * noise)
            elif weight.dim() < 2 or (weight == weight.flatten()[0]).all():  # a norm or a bias
                weight.add_(0.2 * noise)
            else:
                weight.copy_(1.5 * weight.shape[-1] ** -0.5 * noise)


def _logits(model: DecoderModel, ids: Tensor, **inputs: Any) -> Tensor:
    with torch.no_grad():
        return model.head.logits(model(ids, **inputs))


@contextlib.contextmanager
def _outputs(model: nn.Module, prefix: str = "") -> Iterator[dict[str, Tensor]]:
    """Record the first output of each module within the context, by its name without a prefix.

    A layer of this library returns two tensors, whose sum is its output.
    """
    found: dict[str, Tensor] = {}
    layers = {*model.layers} if isinstance(model, DecoderModel) else ()

    def record(module: nn.Module, inputs: Any, output: Any) -> None:
        parts = [x for x in output if isinstance(x, Tensor)] if type(output) is tuple else [output]
        value = sum(parts) if module in layers else parts[0]
        if isinstance(value, Tensor):
            found.setdefault(names[module], value.detach().clone())

    names = {module: name.removeprefix(prefix) for name, module in model.named_modules()}
    handles = [module.register_forward_hook(record) for module in names]
    try:
        yield found
    finally:
        for handle in handles:
            handle.remove()


def _gradients(
    model: DecoderModel, ids: Tensor, labels: Tensor, compiled: Callable[..., Any] | None = None
) -> dict[str, Tensor]:
    """Return the gradient of every parameter; one that the loss does not reach has zeros."""
    model.zero_grad(set_to_none=True)
    forward = model if compiled is None else compiled
    forward(ids, labels=labels).loss.backward()
    return {
        name: torch.zeros_like(weight) if weight.grad is None else weight.grad
        for name, weight in model.named_parameters()
    }


def _relative(found: Tensor, expected: Tensor) -> float:
    found, expected = found.detach().double(), expected.detach().double()
    return ((found - expected).norm() / expected.norm()).item()


def _worst(found: Mapping[str, Tensor], expected: Mapping[str, Tensor]) -> _Worst:
    """Return the parameter with the largest relative error.

    Some gradients are zero except for rounding, so the error is relative to at least a thousandth
    of the norm of all gradients.
    """
    whole = torch.stack([grad.detach().double().norm() for grad in expected.values()]).norm()
    return max(
        _Worst(
            ((found[name] - grad).double().norm() / grad.double().norm().clamp(min=1e-3 * whole))
            .nan_to_num(nan=math.inf)
            .item(),
            name,
        )
        for name, grad in expected.items()
    )


def _differing(found: Tensor, expected: Tensor, logits: Tensor) -> int:
    """Count the tokens (new) that differ. After two tokens that tie, the rest may differ.

    Args: logits (new, vocab), which `expected` was chosen from.
    """
    unequal = found != expected
    if not unequal.any():
        return 0
    first = int(unequal.int().argmax())
    best = logits[first].topk(2).values
    tie = best[0] - best[1] <= _NEAR_TIE * logits[first].abs().max()
    return 0 if tie else int(unequal.sum())

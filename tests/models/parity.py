"""The checks that compare a feature of the zoo with transformers, on any device.

Each check returns its errors by column of the parity table. `hold` records them and compares them
with `BOUNDS`.
"""

from __future__ import annotations

import copy
import json
import statistics
import tempfile
import warnings
from collections.abc import Callable, Collection
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from torch import Tensor

from ligermodels import AutoLiger
from tests.families import FAMILIES
from tests.models import hf_models, zoo
from tests.models.pairs import native_gradients, relative

RecordProperty = Callable[[str, Any], None]

COLUMNS = ("logits", "loss", "gradients", "generation", "round trip", "compile")
# These bound relative errors in float32. "generation" counts the tokens that differ, and "round
# trip" counts all differences.
BOUNDS = {
    "logits": 1e-5,
    "loss": 1e-6,
    "gradients": 1e-4,
    "generation": 0.0,
    "round trip": 0.0,
    "compile": 1e-5,
}
# Bounds on our bf16 error divided by that of transformers: for the geometric mean over the inputs,
# and for every input.
BFLOAT16_MEAN, BFLOAT16_WORST = 1.05, 1.3
# Rounding the embeddings moves a gradient whose terms nearly cancel, such as that of a gated delta
# net's A_log, by more than the bound of "compile". Where compiled gradients are further from eager
# ones, the distances of both from float64, over so many inputs, have this ratio at most.
COMPILED_RATIO, COMPILED_DRAWS = 1.3, 8
# If two logits are nearer than this fraction of the largest, they tie and either token is right.
NEAR_TIE = 1e-4


def applies(column: str, feature: zoo.Feature) -> bool:
    """Return whether the feature can change what the column shows; see `zoo.Feature.kind`."""
    if column == "generation":
        return feature.inputs in ("plain", "left padding")
    if column == "round trip":
        return feature.kind != "input"
    # Padding on the right compiles to the same graph as padding on the left.
    return column != "compile" or (
        feature.kind in ("maths", "input") and feature.inputs != "right padding"
    )


# Features of shared code: converters, rotary angles and the embedding, which treat all families in
# the same way. Family and feature do not interact there, so the default run takes one family of
# each feature, in turn one with one rope and an own head, and one with two ropes and a tied head.
SHARED = (
    "bfloat16 file",
    "shards",
    "tied",
    "untied",
    "old spelling",
    "old spelling, scaled rope",
    "no padding token",
    "one kv head",
    "ungrouped heads",
    "rope theta",
    *zoo.rope_types("llama", zoo.TINY),
    "odd sizes",
    "right padding",
)
SHARED_IN = ("llama", "gemma3_text")
# What these families have in common with others, whose comparisons are enough: windows and their
# masks with Mistral, Qwen2 and each other, experts with Qwen3-MoE, and wrappers with their text
# models.
_WINDOWS = ("window", "window of 1", "window, packed", "window, left padding")
_QWEN = (
    *("erf gelu", "attention_bias", "head_dim from hidden", "head_dim given", "defaults left out"),
    *(*_WINDOWS, "window null", "window, right padding"),
)
OF_OTHERS = {
    "mistral": ("erf gelu", "packed", "head_dim from hidden"),
    "gemma2": ("erf gelu",),
    "gemma3_text": ("erf gelu",),
    "gemma3": ("packed", "left padding", "sliding_window_pattern 3", "local theta"),
    "gemma4_text": ("erf gelu", "window of 1", "window beyond the sequence"),
    "gemma4": ("packed", "left padding", "five windows, one full", "local theta"),
    "qwen2": ("erf gelu", "packed", *_WINDOWS, "window, right padding"),
    "qwen3": (
        *("erf gelu", "kv heads null", *_WINDOWS),
        *("windows in all layers", "max_window_layers 2", "window unused"),
    ),
    "qwen3_moe": _QWEN,
    "qwen3_5_text": _QWEN,
    "mixtral": (*_QWEN, "packed", "one expert per token", "all experts", "unused experts"),
    "gpt_oss": ("window of 1", "window beyond the sequence"),
}

# The features that take other branches of a model's forward, each with a family that is compiled
# with it. These families have all the kinds of blocks. test_families.py compiles left padding.
COMPILED = {
    "packed": "gemma2",
    "dynamic rope": "gemma3_text",
}


def sampled(column: str, family: str, name: str) -> bool:
    """Return whether the default run compares this pair; `make test-long` compares the others.

    Every feature of a family's own code is compared, and a feature of shared code in one
    family or a few. A compilation takes seconds, so the pairs of `COMPILED` are compiled.
    """
    if column == "compile":
        return COMPILED.get(name) == family
    if FAMILIES[family].composed:
        return name in ("basic", "longrope", *FAMILIES[family].features)
    if zoo.has(family, "linear_key_head_dim") and family != "qwen3_5_text":
        return name in ("basic", "balance not in the loss")
    if name in OF_OTHERS.get(family, ()):
        return False
    return name not in SHARED or family == SHARED_IN[SHARED.index(name) % 2]


def cases_of(
    column: str,
    scale: zoo.Scale = zoo.TINY,
    kinds: Collection[str] = zoo.KINDS,
    first: Collection[str] = (),
) -> pytest.MarkDecorator:
    """Parametrize a test by the (family, name) pairs that the column is measured on.

    Args: first: the features whose tests take longest, which several processes had better begin.
    """
    chosen = [
        pytest.param(
            family,
            name,
            id=f"{family}-{name.replace(' ', '_')}",
            marks=[] if sampled(column, family, name) else [pytest.mark.long],
        )
        for family in zoo.FAMILIES
        for name, feature in zoo.features(family, scale).items()
        if applies(column, feature) and feature.kind in kinds
    ]
    chosen.sort(key=lambda case: case.values[1] not in first)
    return pytest.mark.parametrize(("family", "name"), chosen)


def hold(case: Case, errors: dict[str, float], record: RecordProperty) -> None:
    """Record the errors for the table, and assert the bound of each."""
    record("parity", [case.family, case.name, errors])
    ratio = errors.pop("ratio", float("inf"))
    for column, error in errors.items():
        near = column == "compile" and ratio <= COMPILED_RATIO
        assert error <= BOUNDS[column] or near, f"{column}: {error}, beside float64: {ratio}"


def hold_ratios(family: str, ratios: list[float], record: RecordProperty) -> None:
    """Record the bf16 errors over those of transformers, and assert their bounds."""
    mean = statistics.geometric_mean(ratios)
    record("bfloat16", [family, mean, max(ratios)])
    assert mean <= BFLOAT16_MEAN and max(ratios) <= BFLOAT16_WORST, ratios


class Case:
    """A feature's checkpoint, its inputs, and the models that both libraries make from it."""

    def __init__(
        self, family: str, name: str, scale: zoo.Scale = zoo.TINY, device: str = "cpu"
    ) -> None:
        self.family, self.name, self.scale, self.device = family, name, scale, device
        self.feature = zoo.features(family, scale)[name]
        self._kept = tempfile.TemporaryDirectory()
        self.folder = Path(self._kept.name) / "checkpoint"
        hf_models.save(self.folder, family, self.feature, scale)
        self.ours = AutoLiger.from_hf(self.folder, dtype=torch.float32, device=device)
        inputs = zoo.make_inputs(self.feature.inputs, self.ours.config.vocab_size, scale)
        self.inputs = zoo.Inputs(*(_to(part, device) for part in inputs))
        self._theirs: Any = None

    def theirs(self, folder: Path | None = None) -> Any:
        """Return transformers' model, a new one if its dynamic rope may remember longer calls."""
        if folder is not None:
            return self._load(folder)
        if self._theirs is None:
            self._theirs = self._load(self.folder)
        return copy.deepcopy(self._theirs) if "rope" in self.name else self._theirs

    def _load(self, folder: Path) -> Any:
        return hf_models.load(folder, self.family, device=self.device)


def _to(part: Any, device: str) -> Any:
    if isinstance(part, dict):
        return {name: _to(value, device) for name, value in part.items()}
    return part.to(device) if isinstance(part, Tensor) else part


def backward(model: Any, *args: Any, forward: Callable[..., Any] | None = None, **kwargs: Any):
    """Return the loss and the gradient of every parameter."""
    model.zero_grad(set_to_none=True)
    loss = (model if forward is None else forward)(*args, **kwargs).loss
    loss.backward()
    trained = {n: weight for n, weight in model.named_parameters() if weight.requires_grad}
    return loss.item(), {name: weight.grad for name, weight in trained.items()}


def worst(found: dict[str, Tensor], expected: dict[str, Tensor]) -> float:
    """Return the largest relative error; a missing gradient counts as infinite.

    Some gradients are zero except for rounding, such as that of a single key. The error of a
    small gradient is therefore relative to at least a thousandth of the norm of all gradients.
    """
    if found.keys() != expected.keys() or any(grad is None for grad in found.values()):
        return float("inf")
    sizes = {name: grad.norm(dtype=torch.float64) for name, grad in expected.items()}
    floor = 1e-3 * torch.stack([*sizes.values()]).norm()
    return max(
        ((found[name] - grad).norm(dtype=torch.float64) / sizes[name].clamp(min=floor)).item()
        for name, grad in expected.items()
    )


def check_numbers(case: Case) -> dict[str, float]:
    """Compare logits at real tokens, the loss with ignored labels, and every gradient."""
    inputs, theirs = case.inputs, case.theirs()
    expected = theirs(inputs.ids, labels=inputs.exact_labels, **inputs.theirs)
    expected.loss.backward()
    with torch.no_grad():
        logits = case.ours.head.logits(case.ours(inputs.ids, **inputs.ours))
    error = relative(logits[inputs.real], expected.logits[inputs.real])
    expected_loss = expected.loss.item()
    del logits, expected  # at a real vocabulary they take much memory
    loss, gradients = backward(case.ours, inputs.ids, labels=inputs.labels, **inputs.ours)
    return {
        "logits": error,
        "loss": abs(loss - expected_loss) / expected_loss,
        "gradients": worst(gradients, native_gradients(theirs, case.ours)),
    }


def check_generation(case: Case) -> dict[str, float]:
    """Count greedy tokens that differ without a near tie; both models use a cache."""
    ids = case.inputs.ids[:, : case.scale.prompt]
    mask = torch.ones_like(ids)
    if "attention_mask" in case.inputs.ours:
        mask = case.inputs.ours["attention_mask"][:, : case.scale.prompt]
    theirs, new = case.theirs(), case.scale.new
    config = theirs.config.get_text_config()
    if hasattr(config, "output_router_logits"):
        # transformers would compute the balance of experts here, too, and fail with padding.
        config.output_router_logits = False
    expected = theirs.generate(
        ids,
        attention_mask=mask,
        max_new_tokens=new,
        do_sample=False,
        # With a window of 1, transformers' cache slices [-0:] and keeps all tokens.
        use_cache=case.name != "window of 1",
        return_dict_in_generate=True,
        output_logits=True,
    )
    pad = {} if case.ours.config.pad_token_id is not None else {"pad_token_id": zoo.EOS}
    with warnings.catch_warnings():  # going beyond the trained length is intended
        warnings.simplefilter("ignore", UserWarning)
        found = case.ours.generate(ids, attention_mask=mask, max_new_tokens=new, **pad)
    differing = 0
    for row in range(len(ids)):
        length = min(found.shape[1], expected.sequences.shape[1])
        unequal = found[row, :length] != expected.sequences[row, :length]
        if found.shape != expected.sequences.shape and not unequal.any():
            differing += abs(found.shape[1] - expected.sequences.shape[1])
        elif unequal.any():
            at = int(unequal.int().argmax())
            logits = expected.logits[at - ids.shape[1]][row].float()
            best = logits.topk(2).values
            if best[0] - best[1] > NEAR_TIE * logits.abs().max():
                differing += int(unequal.sum())
    return {"generation": float(differing)}


def tensors(folder: Path, text_model: bool = False) -> dict[str, Tensor]:
    """Return the tensors of a checkpoint, or those of its text model under their names there."""
    result = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "pt") as file:
            for name in file.keys():
                if not text_model:
                    result[name] = file.get_tensor(name)
                elif not name.startswith(("vision_tower.", "multi_modal_projector.")):
                    result[name.removeprefix("language_model.")] = file.get_tensor(name)
    return result


def check_round_trip(case: Case) -> dict[str, float]:
    """Count tensors, config keys and files that an export changes, and changed logits.

    Beside the basic feature, transformers computes logits where it reads another config.
    """
    out = case.folder.with_name("export")
    shard = 20000 if case.feature.max_shard_size == "50GB" else 5 * 10**9
    AutoLiger.from_hf(case.folder).save_hf(out, max_shard_size=shard)
    before, after = tensors(case.folder, case.family == "gemma3"), tensors(out)
    changed = sorted(before.keys() ^ after.keys())
    for name in before.keys() & after.keys():
        same = before[name].dtype == after[name].dtype and torch.equal(
            *(x[name].reshape(-1).view(torch.uint8) for x in (before, after))
        )
        changed += [] if same else [name]

    config = json.loads((case.folder / "config.json").read_text())
    exported = json.loads((out / "config.json").read_text())
    if case.family == "gemma3":
        changed += [] if exported["model_type"] == "gemma3_text" else ["model_type"]
        config = config["text_config"]
    nothing = object()
    changed += [key for key in config if config[key] != exported.get(key, nothing)]
    for name in ("tokenizer_config.json", "chat_template.jinja", "generation_config.json"):
        source, copy = case.folder / name, out / name
        if not copy.exists() or copy.read_bytes() != source.read_bytes():
            changed.append(name)

    inputs = case.inputs
    if case.name == "basic" or hf_models.read_config(case.folder) != hf_models.read_config(out):
        with torch.no_grad():
            expected = case.theirs()(inputs.ids, **inputs.theirs).logits
            logits = case.theirs(out)(inputs.ids, **inputs.theirs).logits
        if not torch.equal(logits, expected):
            changed.append("logits in transformers")
    if changed:
        print("changed by the export:", changed)
    return {"round trip": float(len(changed))}


def check_compiled(case: Case, backend: str = "aot_eager") -> dict[str, float]:
    """Compare loss and gradients of the compiled model with eager ones; see `COMPILED_RATIO`."""
    ours, inputs = case.ours, case.inputs
    keywords = {"labels": inputs.labels, **inputs.ours}
    eager_loss, eager = backward(ours, inputs.ids, **keywords)
    torch._dynamo.reset()
    compiled = torch.compile(ours, fullgraph=True, backend=backend)
    loss, gradients = backward(ours, inputs.ids, forward=compiled, **keywords)
    loss_error, error = abs(loss - eager_loss) / eager_loss, worst(gradients, eager)
    errors = {"compile": max(loss_error, error)}
    if loss_error <= BOUNDS["compile"] < error:
        errors["ratio"] = rounding_ratio(case, compiled)
    return errors


def rounding_ratio(case: Case, compiled: Callable[..., Any]) -> float:
    """Return the distance of compiled gradients from float64 over that of eager ones.

    It is that of the worst parameter, relative to its gradient, both in norm over all inputs.
    """
    exact = copy.deepcopy(case.ours).double()
    # For each parameter the squares of both distances and of the exact gradient.
    squares = {name: torch.zeros(3, dtype=torch.float64) for name, _ in exact.named_parameters()}
    for seed in range(COMPILED_DRAWS):
        drawn = zoo.make_inputs(case.feature.inputs, case.ours.config.vocab_size, case.scale, seed)
        ids, labels, ours = (_to(part, case.device) for part in drawn[:3])
        keywords = {"labels": labels, **ours}
        expected = backward(exact, ids, **keywords)[1]
        for index, forward in enumerate((compiled, case.ours)):
            found = backward(case.ours, ids, forward=forward, **keywords)[1]
            for name, grad in expected.items():
                squares[name][index] += ((found[name] - grad).norm() ** 2).item()
        for name, grad in expected.items():
            squares[name][2] += (grad.norm() ** 2).item()
    rows = torch.stack([*squares.values()])
    distances = rows[:, :2] / rows[:, 2:].clamp(min=1e-6 * rows[:, 2].sum().item())
    ours_compiled, ours_eager = distances.amax(0).sqrt().tolist()
    return ours_compiled / ours_eager


def check_bfloat16(
    family: str, scale: zoo.Scale = zoo.WIDE, device: str = "cpu", draws: int = 8
) -> list[float]:
    """For each input, return our bf16 logits' error over that of transformers' bf16 logits."""
    features = zoo.features(family, scale)
    config = {**features.get("window", features["basic"]).config, "num_hidden_layers": 3}
    config |= FAMILIES[family].rounded
    feature = zoo.Feature("file", config, dtype=torch.bfloat16)
    ratios = []
    with tempfile.TemporaryDirectory() as kept, torch.no_grad():
        folder = Path(kept) / "checkpoint"
        hf_models.save(folder, family, feature, scale)
        exact = hf_models.load(folder, family, device=device)
        theirs = hf_models.load(folder, family, torch.bfloat16, device)
        ours = AutoLiger.from_hf(folder, device=device)
        for seed in range(draws):
            ids = zoo.make_inputs("plain", ours.config.vocab_size, scale, seed).ids.to(device)
            reference = exact(ids).logits
            error = relative(ours.head.logits(ours(ids)), reference)
            ratios.append(error / relative(theirs(ids).logits, reference))
    return ratios

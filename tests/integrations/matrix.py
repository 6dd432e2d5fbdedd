"""Compare native models with transformers' in each tool, for each family, and write a page of it.

    python -m tests.integrations.matrix        writes docs/trainers_matrix.md

A cell is a function of a checkpoint's folder and an empty folder. It returns an error relative to
transformers' model in the same tool. Nothing is written unless all cells are within their bounds.
"""

from __future__ import annotations

import sys
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from importlib.metadata import version
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from peft import LoraConfig
from transformers import Trainer, TrainingArguments

from ligermodels.integrations.hf_model import LigerForCausalLM, LigerForSequenceClassification
from ligermodels.models.auto import AutoLiger
from tests import markdown
from tests.examples import trainer_cases
from tests.examples.trainer_cases import FAMILIES, RATE, difference, make_rows
from tests.integrations import test_peft_adapters, test_trl_trainers
from tests.integrations.test_hf_model import examples, ids, theirs, train
from tests.integrations.test_trl_trainers import ANSWERS, PAIRS, PROMPTS, length_reward
from tests.integrations.tiny_text import tokenizer
from tests.models import hf_models, zoo
from tests.parallel.ranks import run_ranks

PAGE = markdown.ROOT / "docs" / "trainers_matrix.md"
TOOLS = ("transformers", "trl", "peft", "accelerate", "lightning", "deepspeed", "torch")


@dataclass(frozen=True)
class Cell:
    """A row of the page: a tool, a feature, what is compared, and the largest error allowed."""

    tool: str
    feature: str
    compared: str
    bound: float
    error: Callable[[Path, Path], float]
    needs: str = "transformers"


def checkpoint(family: str, folder: Path) -> Path:
    """Save a model of transformers with the tokenizer of the tests."""
    config = {"vocab_size": 128, "max_position_embeddings": 128, "eos_token_id": 1}
    hf_models.build(family, zoo.Feature(config=config)).save_pretrained(folder)
    tokenizer().save_pretrained(folder)
    return folder


def relative(found: Any, expected: Any) -> float:
    a, b = (torch.as_tensor(x).detach().double() for x in (found, expected))
    assert a.shape == b.shape
    return ((a - b).norm() / b.norm()).item()


def tokens() -> torch.Tensor:
    return ids() % 125 + 3


def forward(folder: Path, place: Path) -> float:
    ours, hf = LigerForCausalLM.from_pretrained(folder).eval(), theirs(folder)
    out, expected = ours(tokens(), labels=tokens()), hf(tokens(), labels=tokens())
    return max(relative(out.logits, expected.logits), relative(out.loss, expected.loss))


def generate(folder: Path, place: Path) -> float:
    models = LigerForCausalLM.from_pretrained(folder).eval(), theirs(folder)
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": 2}
    ours, expected = (model.generate(tokens(), **options) for model in models)
    return float(not torch.equal(ours, expected))


def save(folder: Path, place: Path) -> float:
    LigerForCausalLM.from_pretrained(folder).save_pretrained(place)
    want, got = theirs(folder).state_dict(), theirs(place).state_dict()
    return float(want.keys() != got.keys() or not all(torch.equal(want[k], got[k]) for k in want))


def losses_of_trainer(load: Callable[[Path], Any], **options: Any) -> Callable[[Path, Path], float]:
    def error(folder: Path, place: Path) -> float:
        rows = examples([12, 3, 7, 1, 9, 12, 2, 5])
        rows = [{name: cut(values) for name, values in row.items()} for row in rows]
        found, expected = (train(x, place, rows, **options) for x in (load(folder), theirs(folder)))
        return relative(found, expected)

    return error


def cut(values: list[int]) -> list[int]:
    """Return ids of the vocabulary of 128; labels of -100 stay."""
    return [value if value < 0 else value % 125 + 3 for value in values]


def predictions(folder: Path, place: Path) -> float:
    arguments = TrainingArguments(str(place), report_to=[], use_cpu=True, disable_tqdm=True)
    rows = [{name: cut(values) for name, values in row.items()} for row in examples([12, 3])]
    found, expected = (
        Trainer(model, arguments).predict(rows).predictions
        for model in (LigerForCausalLM.from_pretrained(folder), theirs(folder))
    )
    return relative(found, expected)


def on_disk(folder: Path, place: Path) -> float:
    places: dict[str, Any] = dict.fromkeys(["model.embed_tokens", "model.norm", "lm_head"], "cpu")
    layers = len(theirs(folder).model.layers)
    places |= {f"model.layers.{i}": "disk" if i == 1 else "cpu" for i in range(layers)}
    places |= dict.fromkeys(("model.rotary_emb", "model.rotary_emb_local"), "cpu")
    ours = LigerForCausalLM.from_pretrained(folder, device_map=places, offload_folder=place)
    with torch.no_grad():
        expected = LigerForCausalLM.from_pretrained(folder)(tokens()).logits
        return relative(ours(tokens()).logits, expected)


def lora(folder: Path, place: Path) -> float:
    config = LoraConfig(task_type="CAUSAL_LM", r=4, target_modules="all-linear")
    ours, expected = test_peft_adapters.pair(folder, config)
    first = relative(ours(tokens()).logits, expected(tokens()).logits)
    merged = ours.merge_and_unload()(tokens()).logits
    return max(first, relative(merged, expected(tokens()).logits))


def trl(
    name: str,
    data: Any,
    options: dict[str, Any] | None = None,
    keys: tuple[str, ...] = ("loss",),
    **more: Any,
) -> Any:
    def logs(*args: Any) -> dict[str, list[float]]:
        return test_trl_trainers.logged(test_trl_trainers.run(*args, data, options or {}, **more))

    def error(folder: Path, place: Path) -> float:
        found, expected = (
            logs(cls, model, place)
            for cls, model in (
                (f"Liger{name}", LigerForCausalLM.from_pretrained(folder)),
                (name, theirs(folder)),
            )
        )
        return max(relative(found[key], expected[key]) for key in keys)

    return error


def reward(folder: Path, place: Path) -> float:
    from transformers import AutoModelForSequenceClassification

    run, logged = test_trl_trainers.run, test_trl_trainers.logged
    options = {"num_labels": 1, "attn_implementation": "eager"}
    hf = AutoModelForSequenceClassification.from_pretrained(folder, **options)
    hf.save_pretrained(place / "reward")
    ours = LigerForSequenceClassification.from_pretrained(place / "reward")
    found = logged(run("LigerRewardTrainer", ours, place, PAIRS, {}))["loss"]
    return relative(found, logged(run("RewardTrainer", hf, place, PAIRS, {}))["loss"])


def with_accelerate(folder: Path, place: Path) -> float:
    models = AutoLiger.from_hf(folder), theirs(folder)
    found, expected = (in_accelerate(model) for model in models)
    return difference(found, expected)


def in_accelerate(model: Any) -> list[float]:
    from examples.trainers import accelerate_loop

    options = {"batch_size": 2, "accumulation": 2, "learning_rate": RATE}
    return accelerate_loop.train(model, rows(), **options)


def with_lightning(folder: Path, place: Path) -> float:
    from examples.trainers import lightning_module

    found, expected = (
        lightning_module.train(
            lightning_module.NextToken(model, RATE), rows(), batch_size=4, **trainer_cases.QUIET
        )
        for model in (AutoLiger.from_hf(folder), theirs(folder))
    )
    return difference(found, expected)


def rows() -> Any:
    return [
        {name: torch.tensor(cut(values.tolist())) for name, values in row.items()}
        for row in make_rows()
    ]


# The first loss on completions that were just sampled is 0 but for rounding, and the second is not.
ONLINE = {"max_completion_length": 6, "num_generations": 2, "beta": 0.1, "num_iterations": 2}
GRPO_KEYS = ("loss", "entropy", "reward")
LABELS = [i % 3 > 0 for i in range(len(PROMPTS))]
SHELL, NATIVE = LigerForCausalLM.from_pretrained, AutoLiger.from_hf
CELLS = [
    Cell("transformers", "forward with labels", "logits, loss", 1e-5, forward),
    Cell("transformers", "generate with beams", "tokens", 0, generate),
    Cell("transformers", "save_pretrained", "tensors", 0, save),
    Cell("transformers", "device_map, a layer on disk", "logits", 1e-6, on_disk),
    Cell("Trainer", "steps", "losses", 1e-5, losses_of_trainer(SHELL)),
    Cell(
        "Trainer",
        "smoothed labels, accumulation",
        "losses",
        1e-5,
        losses_of_trainer(SHELL, label_smoothing_factor=0.1, gradient_accumulation_steps=2),
    ),
    Cell("Trainer", "predict", "logits", 1e-5, predictions),
    Cell(
        "Trainer",
        "native model, accumulation, checkpointing",
        "losses",
        1e-5,
        losses_of_trainer(NATIVE, gradient_checkpointing=True, gradient_accumulation_steps=2),
    ),
    Cell("PEFT", "LoRA on all linears, merged", "logits", 1e-5, lora, "peft"),
    Cell("TRL", "SFT", "losses", 1e-5, trl("SFTTrainer", {"text": ANSWERS}), "trl"),
    Cell("TRL", "DPO", "losses", 1e-5, trl("DPOTrainer", PAIRS), "trl"),
    Cell(
        "TRL",
        "KTO",
        "losses",
        1e-5,
        trl("KTOTrainer", {"prompt": PROMPTS, "completion": ANSWERS, "label": LABELS}),
        "trl",
    ),
    Cell(
        "TRL",
        "GRPO",
        "losses, entropies, rewards",
        1e-5,
        trl("GRPOTrainer", {"prompt": PROMPTS}, ONLINE, GRPO_KEYS, reward_funcs=length_reward),
        "trl",
    ),
    Cell("TRL", "reward", "losses", 1e-5, reward, "trl"),
    Cell("accelerate", "native model, accumulation", "losses", 1e-5, with_accelerate),
    Cell("Lightning", "native model", "losses", 1e-5, with_lightning, "lightning"),
]
# The cases of trainer_cases with two processes are rows, too: their names, and the bound.
RANKED = ("accelerate, FSDP2", "Lightning, FSDP2", "DeepSpeed, ZeRO-3")
RANKED_BOUND = 1e-5
HEADINGS = ["tool", "feature", "compared", "bound", *FAMILIES]

INTRODUCTION = """\
# Tools and families

`python -m tests.integrations.matrix` writes this page; do not edit it. Each cell is the largest
error of a native model relative to transformers' model in the same tool, with the same weights,
data and arguments in float32, on a random model of the family. Losses are those of some steps. The
rows of the native model do without `LigerForCausalLM`. The rows with FSDP2 and ZeRO-3 have two
processes, and are also compared with one process, losses and weights.

What is refused does not depend on the family: see [trainers.md](trainers.md). Checkpoints of
Gemma 3 with images are refused by `LigerForCausalLM.from_pretrained` ("and other towers"). Their
text model is one of the family gemma3_text, and
`LigerForCausalLM.from_native(AutoLiger.from_hf(path))` takes it.

The page was written with {versions}.
"""


def shown(error: float) -> str:
    return "exact" if error == 0 else f"{error:.0e}"


def headed() -> list[list[str]]:
    """Return the first cells of each row of the page."""
    first = [[c.tool, c.feature, c.compared, shown(c.bound)] for c in CELLS]
    for name in RANKED:
        tool, feature = name.split(", ")
        first.append([tool, f"native model, {feature}", "losses, weights", shown(RANKED_BOUND)])
    return first


def measure() -> list[list[float]]:
    """Run all cells, and return the errors of each row."""
    found = []
    with tempfile.TemporaryDirectory() as made:
        folders = {family: checkpoint(family, Path(made) / family) for family in FAMILIES}
        for number, cell in enumerate(CELLS):
            errors = []
            for family, folder in folders.items():
                place = Path(made) / f"{number}-{family}"
                place.mkdir()
                errors.append(cell.error(folder, place))
                assert errors[-1] <= cell.bound, (cell, family, errors[-1])
            found.append(errors)
        report = run_ranks("tests.examples.trainer_cases", trainer_cases.RANKS, Path(made), True)
    for name in RANKED:
        errors = []
        for family in FAMILIES:
            outcomes = [o for n, o in report.items() if n.startswith(f"{name}, {family},")]
            assert outcomes and all(isinstance(o, dict) for o in outcomes), outcomes
            errors.append(max(e for o in outcomes if isinstance(o, dict) for e in o.values()))
        assert max(errors) <= RANKED_BOUND, (name, errors)
        found.append(errors)
    return found


def main() -> None:
    if missing := [name for name in TOOLS if find_spec(name) is None]:
        sys.exit(f"{', '.join(missing)}: {trainer_cases.INSTALL}")
    table = [HEADINGS, ["---"] * len(HEADINGS)]
    table += [first + [*map(shown, errors)] for first, errors in zip(headed(), measure())]
    versions = ", ".join(f"{name} {version(name)}" for name in TOOLS)
    lines = [f"| {' | '.join(cells)} |" for cells in table]
    PAGE.write_text(INTRODUCTION.format(versions=versions) + "\n" + "\n".join(lines) + "\n")


if __name__ == "__main__":
    torch.set_num_threads(1)
    main()

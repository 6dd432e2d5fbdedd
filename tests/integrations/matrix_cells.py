"""The cells of docs/trainers_matrix.md: native models beside transformers' in each tool."""

from __future__ import annotations

import shutil
import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest.mock import patch

import peft
import pytest
import torch
from peft import LoraConfig
from transformers import AutoConfig, AutoModelForCausalLM, Trainer

from ligermodels.integrations.auto_map import write_auto_map
from ligermodels.integrations.hf_model import LigerForCausalLM, LigerForSequenceClassification
from ligermodels.integrations.peft_adapters import get_peft_model
from ligermodels.models.auto import AutoLiger
from tests.examples import trainer_cases
from tests.examples.trainer_cases import RATE, difference, make_rows
from tests.integrations import test_peft_adapters, test_trl_trainers
from tests.integrations.test_hf_trainer import examples, quiet, train
from tests.integrations.test_quantised_checkpoints import quantization_config
from tests.integrations.test_trl_trainers import ANSWERS, LABELLED, PAIRS, PROMPTS, length_reward
from tests.integrations.tiny import checkpoint, ids, texts, theirs, tokenizer
from tests.models.pairs import hf_tensors
from tests.rounding import steady_adamw


@dataclass(frozen=True)
class Cell:
    """A row of the page: a tool, a feature, what is compared, and the largest error allowed.

    Attributes:
        error: a function of a checkpoint's folder and an empty folder. It returns an error relative
            to transformers' model in the same tool, or skips the test without the tool.
    """

    tool: str
    feature: str
    compared: str
    error: Callable[[Path, Path], float]
    bound: float = 1e-5


def relative(found: Any, expected: Any) -> float:
    a, b = (torch.as_tensor(x).detach().double() for x in (found, expected))
    assert a.shape == b.shape and a.isfinite().all()  # `max` would lose a NaN
    return ((a - b).norm() / b.norm()).item()


def equal(found: dict[str, torch.Tensor], expected: dict[str, torch.Tensor]) -> bool:
    return all(torch.equal(found[name], tensor) for name, tensor in expected.items())


def tokens() -> torch.Tensor:
    return ids() % 125 + 3


def forward(folder: Path, place: Path) -> float:
    ours, hf = LigerForCausalLM.from_pretrained(folder).eval(), theirs(folder)
    call = {"labels": tokens(), "output_hidden_states": True}
    out, expected = ours(tokens(), **call), hf(tokens(), **call)
    for mine, other in zip(out.hidden_states, expected.hidden_states, strict=True):
        assert relative(mine, other) <= 1e-5
    return max(relative(out.logits, expected.logits), relative(out.loss, expected.loss))


def generate(folder: Path, place: Path) -> float:
    models = LigerForCausalLM.from_pretrained(folder).eval(), theirs(folder)
    options = {"max_new_tokens": 8, "do_sample": False, "num_beams": 2}
    ours, expected = (model.generate(tokens(), **options) for model in models)
    return float(not torch.equal(ours, expected))


def save(folder: Path, place: Path) -> float:
    """In shards; the weights also come out of the model without a folder."""
    ours, hf = LigerForCausalLM.from_pretrained(folder), theirs(folder)
    ours.save_pretrained(place, max_shard_size="20KB")
    again, walked = theirs(place), dict(ours.hf_named_parameters())
    assert type(again) is type(hf) and again.config.architectures == [type(hf).__name__]
    want, got = hf.state_dict(), again.state_dict()
    files = hf_tensors(hf, want)
    assert files.keys() - walked.keys() <= {"lm_head.weight"} and equal(files, walked)
    return float(want.keys() != got.keys() or not equal(got, want))


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
    rows = [{name: cut(values) for name, values in row.items()} for row in examples([12, 3])]
    found, expected = (
        Trainer(model, quiet(place)).predict(rows).predictions
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
        error = relative(ours(tokens()).logits, expected)
    ours.save_pretrained(place / "saved")
    want, got = theirs(folder).state_dict(), theirs(place / "saved").state_dict()
    assert equal(got, want)
    return error


def adapter(**options: Any) -> LoraConfig:
    return LoraConfig(task_type="CAUSAL_LM", r=4, **options)


def lora(wrap: Any = get_peft_model, **options: Any) -> Callable[[Path, Path], float]:
    def error(folder: Path, place: Path) -> float:
        ours, expected = test_peft_adapters.pair(folder, adapter(**options), wrap)
        first = relative(ours(tokens()).logits, expected(tokens()).logits)
        merged = ours.merge_and_unload()(tokens()).logits
        return max(first, relative(merged, expected(tokens()).logits))

    return error


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


def distillation(folder: Path, place: Path) -> float:
    """A student learns from a teacher with another head."""
    found = []
    for name, load in (("LigerDistillationTrainer", SHELL), ("DistillationTrainer", theirs)):
        student, teacher = load(folder), load(folder)
        with torch.no_grad():
            teacher.get_output_embeddings().weight.mul_(1.3)
        data, options = {"prompt": PROMPTS}, {"max_completion_length": 6, "max_steps": 2}
        made = test_trl_trainers.run(name, student, place, data, options, teacher_model=teacher)
        found.append(test_trl_trainers.logged(made)["loss"])
    return relative(*found)


def opened_by_auto_map(folder: Path, place: Path) -> float:
    """Only the config is changed; transformers copies the code of checkpoints into a cache."""
    shutil.copytree(folder, place / "named")
    write_auto_map(place / "named")
    cache = str(place / "modules")
    modules = "transformers.dynamic_module_utils.HF_MODULES_CACHE"
    with patch(modules, cache), patch.object(sys, "path", [cache, *sys.path]):
        ours = AutoModelForCausalLM.from_pretrained(place / "named", trust_remote_code=True)
    assert isinstance(ours, LigerForCausalLM)
    with torch.no_grad():
        return relative(ours.eval()(tokens()).logits, theirs(folder)(tokens()).logits)


def wider(folder: Path, place: Path) -> Path:
    """Save a model of the same family; on a CPU, 4 bits need rows of a multiple of 64."""
    family = AutoConfig.from_pretrained(folder).model_type
    return checkpoint(family, place / "wide", hidden_size=128, intermediate_size=192)


def quantised(kind: str) -> Callable[[Path, Path], float]:
    def error(folder: Path, place: Path) -> float:
        wide = wider(folder, place)
        options = {"quantization_config": quantization_config(kind)}
        models = (
            cls.from_pretrained(wide, **options).eval()
            for cls in (LigerForCausalLM, AutoModelForCausalLM)
        )
        with torch.no_grad():
            found, expected = (model(tokens(), labels=tokens()) for model in models)
        return max(relative(found.logits, expected.logits), relative(found.loss, expected.loss))

    return error


def log_probabilities(native: bool) -> Callable[[Path, Path], float]:
    """lm-eval asks for them in tasks with choices, and for texts and perplexities in others."""

    def answers(lm: Any) -> tuple[list[Any], list[float], list[str]]:
        from lm_eval.api.instance import Instance

        stop = {"until": ["w5"], "max_gen_toks": 8, "do_sample": False}
        asked = {
            "loglikelihood": [*zip(texts(12), texts(12, 1))],
            "loglikelihood_rolling": [(f"{a} {b}",) for a, b in zip(texts(4, 2), texts(4, 3))],
            "generate_until": [(text, stop) for text in texts(4)],
        }
        return tuple(
            getattr(lm, kind)([Instance(kind, {}, x, i) for i, x in enumerate(given)], True)
            for kind, given in asked.items()
        )

    def error(folder: Path, place: Path) -> float:
        HFLM = pytest.importorskip("lm_eval.models.huggingface").HFLM
        from examples.trainers.lm_eval_model import NativeLM

        options: dict[str, Any] = {"tokenizer": tokenizer(), "batch_size": 4, "max_length": 16}
        ours = NativeLM(NATIVE(folder), **options) if native else HFLM(SHELL(folder), **options)
        found, expected = answers(ours), answers(HFLM(theirs(folder), **options))
        assert relative(found[1], expected[1]) <= 1e-5 and found[2] == expected[2]
        assert [greedy for _, greedy in found[0]] == [greedy for _, greedy in expected[0]]
        return relative([total for total, _ in found[0]], [total for total, _ in expected[0]])

    return error


@steady_adamw()
def with_accelerate(folder: Path, place: Path) -> float:
    models = AutoLiger.from_hf(folder), theirs(folder)
    found, expected = (in_accelerate(model) for model in models)
    return difference(found, expected)


def in_accelerate(model: Any) -> list[float]:
    from examples.trainers import accelerate_loop

    options = {"batch_size": 2, "accumulation": 2, "learning_rate": RATE}
    return accelerate_loop.train(model, rows(), **options)


@steady_adamw()
def with_lightning(folder: Path, place: Path) -> float:
    pytest.importorskip("lightning")
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
REWARDED = {"reward_funcs": length_reward}
ONLINE_KEYS = ("loss", "entropy", "reward")
ALL = "all-linear"
SHELL, NATIVE = LigerForCausalLM.from_pretrained, AutoLiger.from_hf
# With TRL's rates, the first losses of DPO and KTO hardly move from those of no training.
LARGE_STEPS = {"learning_rate": 0.1}
CELLS = [
    Cell("transformers", "forward with labels", "logits, loss", forward),
    Cell("transformers", "generate with beams", "tokens", generate, 0),
    Cell("transformers", "save_pretrained", "tensors", save, 0),
    Cell("transformers", "device_map, a layer on disk", "logits", on_disk, 1e-6),
    Cell("Trainer", "steps", "losses", losses_of_trainer(SHELL)),
    Cell(
        "Trainer",
        "smoothed labels, accumulation",
        "losses",
        losses_of_trainer(SHELL, label_smoothing_factor=0.1, gradient_accumulation_steps=2),
    ),
    Cell("Trainer", "predict", "logits", predictions),
    Cell(
        "Trainer",
        "native model, accumulation, checkpointing",
        "losses",
        losses_of_trainer(NATIVE, gradient_checkpointing=True, gradient_accumulation_steps=2),
    ),
    Cell("AutoModelForCausalLM", "a folder with an auto_map", "logits", opened_by_auto_map),
    *(
        Cell(kind.partition("-")[0], feature, "logits, loss", quantised(kind))
        for kind, feature in {
            "torchao-int8": "8 bits",
            "torchao-float8": "float8, one scale for a weight",
            "bitsandbytes-4bit": "4 bits",
            "bitsandbytes-4bit-double": "4 bits, scales quantised, too",
            "bitsandbytes-8bit": "8 bits",
        }.items()
    ),
    *(
        Cell("PEFT", f"{feature}, merged", "logits", error)
        for feature, error in {
            "LoRA, default targets": lora(),
            "LoRA on all linears": lora(target_modules=ALL),
            "`peft.get_peft_model`, LoRA on all linears": lora(
                peft.get_peft_model, target_modules=ALL
            ),
            "DoRA on all linears": lora(target_modules=ALL, use_dora=True),
        }.items()
    ),
    Cell("TRL", "SFT", "losses", trl("SFTTrainer", {"text": ANSWERS})),
    Cell(
        "TRL",
        "SFT with LoRA",
        "losses",
        trl("SFTTrainer", {"text": ANSWERS}, {"learning_rate": 0.1}, peft_config=adapter()),
    ),
    Cell("TRL", "DPO", "losses", trl("DPOTrainer", PAIRS, LARGE_STEPS)),
    Cell("TRL", "KTO", "losses", trl("KTOTrainer", LABELLED, LARGE_STEPS)),
    *(
        Cell(
            "TRL",
            name,
            "losses, entropies, rewards",
            trl(f"{name}Trainer", {"prompt": PROMPTS}, ONLINE, ONLINE_KEYS, **REWARDED),
            bound,
        )
        # RLOO's loss is -0.055 with gemma2, a sum of terms of size 1. In float32, ours and that of
        # transformers are off the loss in float64 by 9e-6 of it, to either side.
        for name, bound in {"GRPO": 1e-5, "RLOO": 5e-5}.items()
    ),
    Cell("TRL", "distillation", "losses", distillation),
    Cell("TRL", "reward", "losses", reward),
    Cell("accelerate", "native model, accumulation", "losses", with_accelerate),
    Cell("Lightning", "native model", "losses", with_lightning),
    *(
        Cell("lm-eval", name, "log-probabilities", log_probabilities(native))
        for name, native in {"HFLM": False, "NativeLM of examples/trainers": True}.items()
    ),
]
# test_peft_adapters.py has PEFT's adapters on experts.
EXPERT_CELLS = [
    *(cell for cell in CELLS if cell.tool != "PEFT" and "LoRA" not in cell.feature),
    Cell("PEFT", "LoRA on q and v, merged", "logits", lora(target_modules=["q_proj", "v_proj"])),
]

"""TRL's trainers on native models give the numbers that they give on transformers' models."""

from __future__ import annotations

from pathlib import Path
from typing import Any
from unittest.mock import Mock

import datasets
import pytest
import torch
import transformers
import trl
from peft import LoraConfig

from ligermodels.errors import ConfigError
from ligermodels.integrations import trl_trainers
from ligermodels.integrations.hf_model import LigerForCausalLM, LigerForSequenceClassification
from ligermodels.memory.plan import MemoryPlan
from ligermodels.models.auto import AutoLiger
from tests.integrations.tiny import checkpoint, texts, tokenizer

LONG = pytest.mark.long
COMMON: dict[str, Any] = {
    "per_device_train_batch_size": 2,
    "max_steps": 3,
    "learning_rate": 1e-2,
    "optim": "sgd",
    "logging_steps": 1,
    "save_strategy": "no",
    "report_to": [],
    "use_cpu": True,
    "bf16": False,
    "seed": 1,
    "disable_tqdm": True,
}
PROMPTS, ANSWERS, OTHERS = texts(40, 1, 5), texts(40, 2), texts(40, 3)
PAIRS = {"prompt": PROMPTS, "chosen": ANSWERS, "rejected": OTHERS}
LABELLED = {
    "prompt": PROMPTS,
    "completion": ANSWERS,
    "label": [i % 3 > 0 for i in range(len(PROMPTS))],
}
MESSAGES = [
    [{"role": "user", "content": p}, {"role": "assistant", "content": a}]
    for p, a in zip(PROMPTS, ANSWERS)
]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return checkpoint("llama", tmp_path_factory.mktemp("llama"))


def run(
    name: str, model: Any, folder: Path, data: Any, options: dict[str, Any], **more: Any
) -> Any:
    """Train with a trainer of TRL, or with ours; return it."""
    cls = getattr(trl_trainers if name.startswith("Liger") else trl, name)
    config = getattr(trl, name.removeprefix("Liger").replace("Trainer", "Config"))
    trainer = cls(
        model=model,
        args=config(output_dir=str(folder / "run"), **(COMMON | options)),
        train_dataset=datasets.Dataset.from_dict(data),
        processing_class=tokenizer(),
        **more,
    )
    trainer.train()
    return trainer


def logged(trainer: Any) -> dict[str, list[float]]:
    found: dict[str, list[float]] = {}
    for log in trainer.state.log_history:
        for key, value in log.items():
            if "time" not in key and "runtime" not in key and "per_second" not in key:
                found.setdefault(key, []).append(value)
    return found


def compare(name: str, folder: Path, data: Any, options: dict[str, Any], **more: Any) -> Any:
    """Run both trainers, and compare everything that they log."""
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder)
    expected = logged(run(name, hf, folder, data, options, **more))
    ours = run(
        f"Liger{name}", LigerForCausalLM.from_pretrained(folder), folder, data, options, **more
    )
    wrapper = ours.model.get_base_model() if "peft_config" in more else ours.model
    assert "forward" not in wrapper.__dict__  # which would be TRL's
    found = logged(ours)
    if name in ("GRPOTrainer", "RLOOTrainer") and "peft_config" not in more:
        for kind in ("mean", "max"):  # TRL has these for vLLM
            assert max(found.pop(f"sampling/sampling_logp_difference/{kind}")) < 1e-5
    assert found.keys() == expected.keys()
    for key, values in expected.items():
        if key == "rewards/accuracies" and "precompute_ref_log_probs" in options:
            continue  # the first rewards are 0, and their order is a matter of rounding
        # Small gradients are differences of large ones.
        close, error = (1e-4, 1e-5 * max(values)) if key == "grad_norm" else (1e-5, 2e-6)
        assert found[key] == pytest.approx(values, rel=close, abs=error), key
    return ours


def length_reward(completion_ids: list[list[int]], **_: Any) -> list[float]:
    return [sum(ids) % 7 / 7 for ids in completion_ids]


TEXT, REWARDED = {"text": ANSWERS}, {"reward_funcs": length_reward}
ONLINE = {"max_completion_length": 6, "num_generations": 2, "beta": 0.1}
SYNCHRONISED = ONLINE | {"sync_ref_model": True, "ref_model_sync_steps": 1}
# The second step on the same completions has ratios other than 1, and a loss other than 0.
GIVEN = ONLINE | {"num_iterations": 2, "learning_rate": 0.05, "max_steps": 6}
LORA = {"learning_rate": 0.1, "peft_config": True}
DIVERGENCE = {"f_divergence_type": "js_divergence", "ld_alpha": 0.5}


@pytest.mark.parametrize(
    ("name", "data", "options"),
    [
        ("SFT", TEXT, {"max_steps": 6}),
        ("SFT", TEXT, {"packing": True, "max_length": 16}),
        ("SFT", {"prompt": PROMPTS, "completion": ANSWERS}, {"gradient_accumulation_steps": 2}),
        pytest.param("SFT", TEXT, {"padding_free": True, "max_length": None}, marks=LONG),
        pytest.param("SFT", {"messages": MESSAGES}, {"assistant_only_loss": True}, marks=LONG),
        pytest.param("SFT", TEXT, {"loss_type": "dft"}, marks=LONG),
        pytest.param("SFT", TEXT, {"label_smoothing_factor": 0.1}, marks=LONG),
        ("DPO", PAIRS, {"use_weighting": True, "max_steps": 6}),
        pytest.param("DPO", PAIRS, {"loss_type": ["sigmoid", "sft"]}, marks=LONG),
        pytest.param("DPO", PAIRS, DIVERGENCE, marks=LONG),
        pytest.param("DPO", PAIRS, {"precompute_ref_log_probs": True}, marks=LONG),
        # Both sample the same completions, because their logits are equal.
        ("GRPO", {"prompt": PROMPTS}, ONLINE | {"temperature": 0.7}),
        ("GRPO", {"prompt": PROMPTS}, GIVEN),
        pytest.param("GRPO", {"prompt": PROMPTS}, ONLINE | {"beta": 0.0}, marks=LONG),
        pytest.param("GRPO", {"prompt": PROMPTS}, SYNCHRONISED, marks=LONG),
        pytest.param("RLOO", {"prompt": PROMPTS}, SYNCHRONISED, marks=LONG),
        # With an adapter; the reference of DPO is the model without it.
        ("DPO", PAIRS, LORA),
        pytest.param("SFT", TEXT, LORA, marks=LONG),
        pytest.param("KTO", LABELLED, LORA, marks=LONG),
        pytest.param("GRPO", {"prompt": PROMPTS}, ONLINE | LORA, marks=LONG),
        pytest.param("RLOO", {"prompt": PROMPTS}, ONLINE | LORA, marks=LONG),
    ],
    ids=lambda value: value if isinstance(value, str) else ", ".join(value),
)
def test_losses(name: str, data: Any, options: dict[str, Any], folder: Path) -> None:
    more = REWARDED if "beta" in options else {}
    if "peft_config" in options:
        more, options = more | {"peft_config": LoraConfig(task_type="CAUSAL_LM", r=4)}, {**options}
        del options["peft_config"]
    ours = compare(f"{name}Trainer", folder, data, options, **more)
    if "peft_config" in more:
        assert "gate_up_proj" in str(ours.model) and "q_proj" in str(ours.model)


def test_a_memory_plan_changes_no_loss(folder: Path) -> None:
    """Without gradient_checkpointing, TRL leaves the plan of the native model alone."""
    found = []
    for policy in ("all", "attention"):
        model = LigerForCausalLM.from_pretrained(folder)
        plan = MemoryPlan.uniform(len(model.native.layers), policy)
        model.native.set_memory_plan(plan)
        options = {"gradient_checkpointing": False}
        trainer = run("LigerDPOTrainer", model, folder, PAIRS, options)
        assert trainer.model.native.memory_plan == plan
        found.append(logged(trainer))
    assert found[0] == found[1]


@LONG
def test_the_reference_of_dpo_computes_under_autocast(folder: Path) -> None:
    """Before the first step it is the policy, so the rewards are exactly 0."""
    model = LigerForCausalLM.from_pretrained(folder)
    trainer = run("LigerDPOTrainer", model, folder, PAIRS, {"bf16": True, "max_steps": 1})
    assert logged(trainer)["rewards/chosen"] == [0.0]


def test_arguments_stay_as_they_are_if_the_constructor_fails(folder: Path) -> None:
    """Or the next trainer that gets them would train without a reference model."""
    args = trl.GRPOConfig(str(folder / "run"), **(COMMON | {"beta": 0.1, "num_generations": 2}))
    with pytest.raises(TypeError):
        trl_trainers.LigerGRPOTrainer(
            LigerForCausalLM.from_pretrained(folder), length_reward, args, train_dataset=3
        )
    assert args.beta == 0.1


def test_what_trl_cannot_train_is_refused(folder: Path) -> None:
    words = r"LigerSFTTrainer: TRL needs .* pass LigerForCausalLM\.from_native\(model\)"
    with pytest.raises(ConfigError, match=words):
        run("LigerSFTTrainer", AutoLiger.from_hf(folder), folder, TEXT, {})
    config = LoraConfig(task_type="CAUSAL_LM", target_modules=["qkv_proj", "o_proj"])
    with pytest.raises(ConfigError, match="which HF's model does not have"):
        run("LigerSFTTrainer", str(folder), folder, TEXT, {}, peft_config=config)


def test_on_a_model_of_transformers_it_is_the_trainer_of_trl(folder: Path) -> None:
    hf = transformers.AutoModelForCausalLM.from_pretrained(folder)
    trainer = run("LigerSFTTrainer", hf, folder, {"text": ANSWERS}, {"max_steps": 1})
    assert trainer.model.__dict__["forward"].__func__.__code__.co_name == "_fused_forward"


def test_what_a_model_is_loaded_with(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """TRL's option for a quantised model, and projections that adapters can be added to."""
    loaded = Mock()
    monkeypatch.setattr(LigerForCausalLM, "from_pretrained", loaded)
    args = Mock(model_init_kwargs={"dtype": "auto"}, seed=1)
    given = {"args": args, "quantization_config": "4 bits", "peft_config": LoraConfig()}
    sft = trl_trainers.LigerSFTTrainer
    sft._load(object.__new__(sft), "path", given)
    options = {"dtype": "auto", "quantization_config": "4 bits", "device_map": None}
    loaded.assert_called_once_with("path", **options, split_projections=True)
    assert "quantization_config" not in given  # TRL takes it for a model that is loaded already


def test_a_reward_model_by_its_path(folder: Path, tmp_path: Path) -> None:
    """It is in float32, as TRL trains it, with a new head of one label that the seed decides."""
    LigerForCausalLM.from_pretrained(folder, dtype=torch.bfloat16).save_pretrained(tmp_path)
    reward, heads = trl_trainers.LigerRewardTrainer, []
    for _ in range(2):
        args = Mock(model_init_kwargs=None, seed=3)
        made = reward._load(object.__new__(reward), str(tmp_path), {"args": args})
        assert isinstance(made, LigerForSequenceClassification) and made.config.num_labels == 1
        assert {p.dtype for p in made.parameters()} == {torch.float32}
        heads.append(made.score.weight)
    assert torch.equal(*heads)

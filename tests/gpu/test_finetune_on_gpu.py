"""What options of `finetune` do together on a GPU, a run for each kind of training.

LIGERMODELS_TEST_DEVICE=cpu runs this file on a CPU.
"""

from __future__ import annotations

import csv
import json
import os
from itertools import count
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import load_file

from ligermodels import AutoLiger, Tokenizer, cli
from ligermodels.heads.classifier import LigerClassifier
from ligermodels.training.model import load_checkpoint
from ligermodels.training.processes import Interrupted
from tests.families import DECODERS
from tests.training.tiny_run import make_checkpoint, make_text, run, same

DEVICE = os.environ.get("LIGERMODELS_TEST_DEVICE", "cuda")
pytestmark = [] if DEVICE == "cpu" else pytest.mark.gpu
COMMON = {"device": DEVICE, "precision": "bf16", "report_to": ["csv"], "save_steps": 0}
TEMPLATE = "{% for m in messages %}<|turn|>{{ m['content'] }}<|stop|>{% endfor %}"
IDS = torch.randint(0, 256, (2, 33), generator=torch.Generator().manual_seed(0))


@pytest.fixture(scope="module")
def inputs(tmp_path_factory):
    folder = tmp_path_factory.mktemp("inputs")
    return make_checkpoint(folder / "base"), make_text(folder / "text.txt")


def lines(file: Path, records: list[dict]) -> Path:
    file.write_text("\n".join(map(json.dumps, records)))
    return file


def logged(folder: Path, key: str) -> dict[int, float]:
    """Return a metric by step, which metrics.csv has as metrics.jsonl has it, each step once."""
    found = [json.loads(line) for line in (folder / "metrics.jsonl").read_text().splitlines()]
    found = [(each["step"], each[key]) for each in found if key in each]
    with open(folder / "metrics.csv") as file:
        rows = [row for row in csv.DictReader(file) if row["metric"] == key]
    assert found == [(int(row["step"]), float(row["value"])) for row in rows]
    assert len(found) == len(dict(found))
    return dict(found)


def logits(folder: Path) -> torch.Tensor:
    model = AutoLiger.from_hf(folder, device=DEVICE).eval()
    with torch.no_grad():
        return model.head.logits(model(IDS.to(DEVICE))).float()


def test_pretraining_from_random_weights(inputs, tmp_path) -> None:
    base, text = inputs
    sizes = ["hidden_size=64", "intermediate_size=96", "num_hidden_layers=2", "vocab_size=258"]
    sizes += ["num_attention_heads=4", "num_key_value_heads=2"]
    given = {"from_scratch": True, "tokenizer": base, "config_overrides": sizes, "max_steps": 30}
    done = run("llama-3.2-1b", text, tmp_path / "run", schedule="wsd", **given, **COMMON)
    assert done.eval_after["eval_perplexity"] < 0.5 * done.eval_before["eval_perplexity"]
    assert [*logged(done.output_dir, "loss")] == [*range(1, 31)]
    exported = AutoLiger.from_hf(done.model_dir, dtype=None, device=DEVICE)
    assert exported.config.num_hidden_layers == 2
    assert {weight.dtype for weight in exported.state_dict().values()} == {torch.bfloat16}
    if DEVICE == "cuda":
        assert "triton" in exported.kernels()["linear_cross_entropy"]


def test_new_tokens_and_the_best_weights_of_a_run_that_ends_early(inputs, tmp_path) -> None:
    """The held-out text has other words, so that it becomes less likely."""
    base, text = inputs
    (template := tmp_path / "own.jinja").write_text(TEMPLATE)
    turns = [{"role": "user", "content": "dear reader"}, {"role": "assistant", "content": "NO 42"}]
    chats = lines(tmp_path / "chats.jsonl", [{"talk": turns}] * 24)
    tokens = {"special_tokens": ["<|turn|>", "eos_token=<|stop|>"], "add_tokens": ["dear reader"]}
    ends = {"eval_steps": 2, "early_stopping_patience": 2, "keep_best": True, "max_steps": 60}
    noise = {"neftune_noise_alpha": 5.0, "label_smoothing": 0.1, "learning_rate": 1e-2}
    rates = {"lr_factors": ["embed_tokens=0.5", "layers.0=0.1"], "schedule": "constant"}
    shows = {"sample_prompts": ["dear reader"], "sample_chat": True, "sample_tokens": 4}
    data = {"columns": ["messages=talk"], "chat_template": template, "eval_files": text}
    given = COMMON | {"save_steps": 500} | tokens | ends | noise | rates | shows | data
    done = run(base, chats, tmp_path / "run", warmup_steps=0, **given)
    perplexities = logged(done.output_dir, "eval_perplexity")
    best = min(sorted(perplexities)[1:], key=perplexities.__getitem__)
    assert done.exported_step == best and done.steps == best + 4 < 60, perplexities
    exported = AutoLiger.from_hf(done.model_dir, dtype=None)
    assert same(exported.state_dict(), load_checkpoint(done.output_dir, best).state_dict())
    start = AutoLiger.from_hf(done.output_dir / "start", dtype=None)
    ours, theirs = (model.embed_tokens.weight[258:].float() for model in (exported, start))
    assert len(ours) == 3 and (ours != theirs).any(1).all()
    tokenizer = Tokenizer.from_hf(done.model_dir)
    ids = tokenizer.encode("dear reader<|turn|><|stop|>", add_special_tokens=False)
    assert sorted(ids) == [258, 259, 260] and exported.config.eos_token_id == ids[2]
    assert tokenizer.chat_template == TEMPLATE
    samples = (done.output_dir / "samples.jsonl").read_text().splitlines()
    assert len(samples) == len(perplexities)
    words = ["generate", str(done.model_dir), "dear reader", "--chat", "--max-new-tokens", "4"]
    assert not cli.main([*words, "--device", DEVICE])


def test_adapters_stop_when_their_time_is_up_and_go_on(inputs, tmp_path, monkeypatch) -> None:
    """The clock moves on by a second at each question."""
    clock = SimpleNamespace(monotonic=count().__next__)
    monkeypatch.setattr("ligermodels.training.finetune.time", clock)
    lora = {"lora_r": 8, "lora_dora": True, "lora_rslora": True, "export": "adapter"}
    lora |= {"modules_to_save": ["embed_tokens", "norm"], "lr_factors": ["*.lora_b=16"]}
    given = COMMON | lora | {"eval_fraction": 0.1, "max_steps": 12, "learning_rate": 1e-3}
    given |= {"save_steps": 12}
    with pytest.raises(Interrupted, match=r"max_hours: .*the state after step"):
        run(*inputs, tmp_path / "run", **given, max_hours=8 / 3600)
    done = run(*inputs, tmp_path / "run", **given, max_hours=1.0, resume=True)
    assert [*logged(done.output_dir, "loss")] == [*range(1, 13)]
    assert done.eval_after["eval_perplexity"] < 0.97 * done.eval_before["eval_perplexity"]
    kept = load_file(done.model_dir / "adapter_model.safetensors")
    for part in ("lora_A", "lora_B", "lora_magnitude_vector"):
        found = [value for name, value in kept.items() if part in name]
        assert len(found) == 14 and all(x.isfinite().all() and x.any() for x in found), part
    assert sum("embed_tokens" in name or name.endswith("model.norm.weight") for name in kept) == 2
    adapted = logits(done.model_dir)
    assert (adapted - logits(inputs[0])).norm() > 0.02 * adapted.norm()
    again = run(*inputs, tmp_path / "run", **given | {"export": "merged"}, resume=True)
    assert (logits(again.model_dir) - adapted).norm() < 0.01 * adapted.norm()


def test_a_reward_model_opens_in_transformers(inputs, tmp_path) -> None:
    transformers = pytest.importorskip("transformers")
    texts = inputs[1].read_text().split("\n\n")
    pair = {"good": " cat cat", "rejected": " dog", "margin": 0.1}
    pairs = lines(tmp_path / "pairs.jsonl", [{"question": text, **pair} for text in texts])
    given = {"loss": "reward", "group_by_length": True, "max_steps": 20, "batch_size": 4}
    given |= {"columns": ["prompt=question", "chosen=good"], "lr_factors": ["head.score=2"]}
    done = run(inputs[0], pairs, tmp_path / "run", eval_fraction=0.1, **given, **COMMON)
    assert logged(done.output_dir, "eval_accuracy")[20] > 0.9
    ours = LigerClassifier.from_hf(done.model_dir, device=DEVICE)
    theirs = transformers.AutoModelForSequenceClassification.from_pretrained(done.model_dir)
    assert theirs.config.num_labels == 1
    ids, found = IDS.to(DEVICE), []
    for model in (ours, theirs.to(DEVICE)):
        with torch.no_grad():
            found.append(model.float().eval()(ids, attention_mask=torch.ones_like(ids)).logits)
    torch.testing.assert_close(*found, rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("family", ["qwen3_5_text", "qwen3_moe", "gpt_oss"])
def test_packed_rows_train_as_rows_of_one_document_do(family, tmp_path) -> None:
    """Each step sees all documents; every token gets all experts, as rounding could choose others.

    Two documents make no row of 130 tokens.
    """
    fields = DECODERS[family].gpu | {"num_hidden_layers": 2, "initializer_range": 0.1}
    experts = {"num_experts": 4, "num_local_experts": 4, "num_experts_per_tok": 4}
    fields |= {name: experts[name] for name in experts.keys() & fields.keys()}
    base = make_checkpoint(tmp_path / "base", family, **fields)
    words = "the cat saw a dog and the dog saw a cat run " * 4
    documents = [words[i : i + 75 + 9 * i] for i in range(6)]
    (text := tmp_path / "text.txt").write_text("\n\n".join(documents))
    given = {"learning_rate": 1e-3, "schedule": "constant", "warmup_steps": 0, "max_steps": 4}
    given |= {"memory": "off", **COMMON}
    found = []
    for seq_len, rows in ((130, 6), (390, 2)):
        rows_of = {"seq_len": seq_len, "batch_size": rows}
        done = run(base, text, tmp_path / str(seq_len), **rows_of, **given)
        found.append([logged(done.output_dir, key) for key in ("loss", "grad_norm")])
    (losses, norms), (packed_losses, packed_norms) = found
    # Attention across documents changes the first loss by 8e-4 to 2e-3, and the norm by 5e-2.
    assert packed_losses[1] == pytest.approx(losses[1], rel=3e-4)
    assert packed_norms[1] == pytest.approx(norms[1], rel=2e-2)
    assert packed_losses == pytest.approx(losses, rel=1e-2)

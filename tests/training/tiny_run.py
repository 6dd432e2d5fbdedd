"""Make a checkpoint, a tokenizer and texts that are small enough to fine-tune in a test."""

from __future__ import annotations

import json
import random
import shutil
from pathlib import Path

import torch
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from ligermodels import AutoLiger, families

TEMPLATE = (
    "{% for message in messages %}<|{{ message['role'] }}|>{{ message['content'] }}</s>{% endfor %}"
    "{% if add_generation_prompt %}<|assistant|>{% endif %}"
)


def make_tokenizer(folder: Path) -> None:
    """Save a byte-level tokenizer without merges: ids of 256 bytes, then of <s> and </s>."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    vocab = {letter: i for i, letter in enumerate(alphabet)} | {"<s>": 256, "</s>": 257}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=[]))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<s>", "</s>"])
    tokenizer.save(str(folder / "tokenizer.json"))
    config = {"bos_token": "<s>", "eos_token": "</s>", "chat_template": TEMPLATE}
    (folder / "tokenizer_config.json").write_text(json.dumps(config))


def tiny_config(family="llama", **changes):
    settings = {
        "vocab_size": 258,
        "hidden_size": 64,  # FlexAttention on a GPU needs a head_dim of at least 16
        "intermediate_size": 96,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "bos_token_id": 256,
        "eos_token_id": 257,
        "tie_word_embeddings": True,
    }
    return families()[family].config_class(**(settings | changes))


def make_checkpoint(folder: Path, family="llama", **changes) -> Path:
    torch.manual_seed(0)
    families()[family](tiny_config(family, **changes)).save_hf(folder)
    make_tokenizer(folder)
    return folder


def make_text(file: Path, paragraphs: int = 60, seed: int = 0) -> Path:
    """Write paragraphs that repeat a few words, so that a model has something to learn."""
    draw = random.Random(seed)
    words = "the cat saw a dog and the dog saw a cat run".split()
    lines = [" ".join(draw.choices(words, k=draw.randint(3, 14))) for _ in range(paragraphs)]
    file.write_text("\n\n".join(lines))
    return file


def draw_nothing(metrics, file: Path, title: str) -> bool:
    """Write a picture without content where a run draws its losses: drawing takes longer than a
    tiny run's steps."""
    from ligermodels.training.run_dir import atomic_write

    atomic_write(file, lambda part: part.write_bytes(b"\x89PNG\r\n\x1a\n"))
    return True


def options(checkpoint, text, output_dir, **changes):
    from ligermodels.training.config import FinetuneConfig

    given = {
        "model": checkpoint,
        "train_files": text,
        "output_dir": output_dir,
        "separator": "",
        "seq_len": 64,
        "batch_size": 2,
        "learning_rate": 3e-3,
        "max_steps": 6,
        "device": "cpu",
    }
    return FinetuneConfig.from_options(**(given | changes))


def run(*args, **changes):
    from ligermodels.training.finetune import finetune

    return finetune(options(*args, **changes), progress=False)


def forget(folder, *steps):
    """Remove checkpoints of a run, as if it had been killed before them."""
    for step in steps:
        shutil.rmtree(Path(folder) / "checkpoints" / f"step-{step:08d}")


def tensors(folder):
    return AutoLiger.from_hf(folder).state_dict()


def same(one, other):
    return one.keys() == other.keys() and all(torch.equal(one[k], other[k]) for k in one)


def everything(folder):
    return sorted(str(path.relative_to(folder)) for path in folder.rglob("*"))


def timeless(folder):
    """Return the metrics without their times."""
    times = {"seconds", "tokens_per_second"}
    lines = (folder / "metrics.jsonl").read_text().splitlines()
    return [{k: v for k, v in json.loads(line).items() if k not in times} for line in lines]

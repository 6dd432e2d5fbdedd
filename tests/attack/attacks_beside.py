"""Attacks on what lies beside a model: heads, adapters, and other files of its folder."""

from __future__ import annotations

import contextlib
import copy
import json
import os
import shutil
from pathlib import Path
from random import Random
from typing import Any

import torch
from safetensors.torch import load_file, save_file

import ligermodels
from tests.attack.attacks_files import KINDS, READABLE, put
from tests.attack.attacks_saves import as_a_user
from tests.attack.attacks_training import LIMIT, ODD, Tiny, damage_header
from tests.attack.harness import Case, Fault, Result, attack

HEADS = "medusa_lm_head.safetensors"
WEIGHTS = "model.safetensors"
ADAPTER = ("adapter_config.json", "adapter_model.safetensors")
# The linears of the tiny model: rows and columns.
LINEARS = {
    "self_attn.q_proj": (16, 16),
    "self_attn.k_proj": (8, 16),
    "self_attn.o_proj": (16, 16),
    "mlp.up_proj": (24, 16),
    "mlp.down_proj": (16, 24),
}


def make_heads(folder: Path, seed: int = 0, count: int = 2, vocab: int = 258) -> Path:
    """Put heads beside a tiny model."""
    draw = torch.Generator().manual_seed(seed)
    shapes: dict[str, tuple[int, ...]] = {}
    for i in range(count):
        shapes |= {f"{i}.0.linear.weight": (16, 16), f"{i}.0.linear.bias": (16,)}
        shapes[f"{i}.1.weight"] = (vocab, 16)
    tensors = {name: 0.1 * torch.randn(shape, generator=draw) for name, shape in shapes.items()}
    save_file(tensors, folder / HEADS, {"format": "pt"})
    return folder / HEADS


def make_adapter(case: Case, base: Path, rank: int = 2) -> Path:
    """Write an adapter as PEFT does, on some of a tiny model's linears."""
    folder = case.folder / "adapter"
    folder.mkdir()
    names = case.draw.sample(sorted(LINEARS), 2)
    draw = torch.Generator().manual_seed(case.seed)
    tensors = {}
    for name in names:
        rows, columns = LINEARS[name]
        start = f"base_model.model.model.layers.0.{name}"
        tensors[f"{start}.lora_A.weight"] = torch.randn(rank, columns, generator=draw)
        tensors[f"{start}.lora_B.weight"] = torch.randn(rows, rank, generator=draw)
    save_file(tensors, folder / ADAPTER[1], {"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": str(base),
        "r": rank,
        "lora_alpha": 4,
        "target_modules": [name.rpartition(".")[2] for name in names],
        "bias": "none",
        "rank_pattern": {},
        "alpha_pattern": {},
        "revision": None,
    }
    (folder / ADAPTER[0]).write_text(json.dumps(config))
    return folder


def merged(base: Path, adapter: Path) -> dict[str, torch.Tensor]:
    """Return HF's tensors of a model with an adapter of alpha 4."""
    tensors = load_file(base / WEIGHTS)
    lora = load_file(adapter / ADAPTER[1])
    for name, a in lora.items():
        if name.endswith(".lora_A.weight"):
            start = name.removesuffix(".lora_A.weight")
            place = start.removeprefix("base_model.model.") + ".weight"
            tensors[place] = tensors[place] + 4 / len(a) * (lora[f"{start}.lora_B.weight"] @ a)
    return tensors


def generate(case: Case, folder: Path) -> Result:
    return case.cli("generate", folder, "hi", "--max-new-tokens", 2, "--device", "cpu")


def equal(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> bool:
    return one.keys() == other.keys() and all(
        x.shape == other[name].shape and torch.allclose(x, other[name], atol=1e-5)
        for name, x in one.items()
    )


# Names in a folder, and whether a conversion may leave such a file out if it says so.
BESIDE = {
    **dict.fromkeys(("README.md", "optimizer.pt", "pytorch_model.bin", "trainer_state.json"), True),
    **dict.fromkeys(("training_args.bin", "consolidated.safetensors", "merges.bak"), True),
    **dict.fromkeys(("value_head.safetensors", "v_head.bin", "mtp.safetensors"), False),
    **dict.fromkeys(("medusa_lm_head.pt", "score.pth", *ADAPTER), False),
}


@attack("A", 5, weight=2, seconds=LIMIT)
def nothing_beside_a_model_is_lost_without_a_word(case: Case) -> None:
    """Heads are converted; of other files, weights are refused, and the rest is named."""
    tiny, draw = Tiny(case), case.draw
    heads = case.turn(["heads", "no heads"]) == "heads"
    if heads:
        make_heads(tiny.model, case.seed)
    names = draw.sample(sorted(BESIDE), draw.randint(0, 3))
    for name in names:
        (tiny.model / name).write_bytes(draw.randbytes(20))
    target = case.folder / "new"
    options = draw.choice([[], ["--verify"], ["--dtype", "bfloat16"], ["--max-shard-size", "9KB"]])
    only_verify = draw.random() < 0.2
    result = case.cli("convert", tiny.model, *(["--verify"] if only_verify else [target, *options]))
    weights = [name for name in names if not BESIDE[name]]
    if weights:
        result.one_line()
        if not any(name in result.err for name in weights) or target.exists():
            raise Fault(f"none of {weights} is named, or something was written: {result.err}")
        return
    if result.code != 0:
        raise Fault(f"a folder with {names} cannot be converted: {result.err}")
    if silent := [name for name in names if name not in result.err]:
        raise Fault(f"{silent} were left out without a word")
    if heads and not only_verify:
        stored, found = load_file(tiny.model / HEADS), load_file(target / HEADS)
        dtype = torch.bfloat16 if "bfloat16" in options else torch.float32
        if found.keys() != stored.keys() or any(
            not torch.equal(x, stored[name].to(dtype)) for name, x in found.items()
        ):
            raise Fault("the heads have other values")


@attack("A", 5, seconds=LIMIT)
def heads_of_another_model_do_not_stay(case: Case) -> None:
    """The target of a conversion holds heads; the source has others, or none."""
    tiny, target = Tiny(case), case.folder / "new"
    mine = case.turn(["the source has none", "the source has others"]) == "the source has others"
    shutil.copytree(tiny.model, target)
    old = make_heads(target, 7).read_bytes()
    if mine:
        make_heads(tiny.model, 8)
    if case.draw.random() < 0.5:  # The heads alone are worth a refusal, too.
        for path in target.iterdir():
            if path.name != HEADS:
                path.unlink()
    case.cli("convert", tiny.model, target).one_line("--overwrite")
    if (target / HEADS).read_bytes() != old:
        raise Fault("heads were replaced without --overwrite")
    result = case.cli("convert", tiny.model, target, "--overwrite")
    if result.code != 0 or (target / HEADS).exists() != mine:
        raise Fault(f"heads of another model stay, or those of the source are gone: {result.err}")


@attack("A", 7, weight=3, seconds=LIMIT)
def any_kind_of_file_beside_a_model(case: Case) -> None:
    """Heads and adapters that are links, pipes, folders and the like, in each use."""
    draw = case.draw
    kind = KINDS[case.seed % len(KINDS)]
    name = (HEADS, *ADAPTER)[case.seed // len(KINDS) % 3]
    case.label(f"{name}: {kind}")
    tiny = Tiny(case)
    folder = tiny.model
    if name == HEADS:
        make_heads(folder)
        uses = ["generate", "convert", "verify", "finetune"]
    else:
        folder = make_adapter(case, tiny.model)
        shutil.copy(tiny.model / "tokenizer.json", folder)
        uses = ["generate", "convert"]
    use = draw.choice(uses)
    put(kind, folder / name, case.folder / "aside")
    work = case.folder / "work"
    work.mkdir()
    work.chmod(0o777)
    tiny.out = work / "out"
    with as_a_user(case) if kind == "another user's" else contextlib.nullcontext():
        if use == "generate":
            result = generate(case, folder)
        elif use == "finetune":
            more = {"medusa_heads": 2, "medusa_stage": 2, "max_steps": 1}
            result = tiny.start(**more)
        else:
            result = case.cli("convert", folder, work / "new" if use == "convert" else "--verify")
    if kind in READABLE:
        if result.code != 0:
            raise Fault(f"{name} is a file ({kind}), but {use} fails: {result.err[-300:]}")
        return
    if result.code == 0:
        raise Fault(f"{name} ({kind}) counts as absent for {use}")
    result.one_line(name)
    if written := os.listdir(work):
        raise Fault(f"{name} ({kind}) is refused, but this was written: {written}")


@attack("A", 5, weight=2, seconds=LIMIT)
def heads_that_do_not_fit_are_refused(case: Case) -> None:
    """Heads with other shapes, dtypes, names, or values that are not finite."""
    tiny, draw = Tiny(case), case.draw
    file = make_heads(tiny.model)
    tensors = load_file(file)
    name = draw.choice(sorted(tensors))
    kinds = ["nan", "shape", "dtype", "lost", "more", "vocabulary", "overflow"]
    kind = case.turn(kinds)
    options: list[object] = []
    if kind == "nan":
        tensors[name].view(-1)[draw.randrange(tensors[name].numel())] = draw.choice(
            [float("nan"), float("inf"), -float("inf")]
        )
    elif kind == "shape":
        tensors[name] = torch.cat([tensors[name], tensors[name]])
    elif kind == "dtype":
        tensors[name] = tensors[name].to(draw.choice([torch.int64, torch.bool, torch.uint8]))
    elif kind == "lost":
        del tensors[draw.choice([n for n in tensors if "linear" in n])]
    elif kind == "more":
        tensors[draw.choice(["x", "0.1.bias", "0.0.linear.scale", "99999.0.linear.bias"])] = (
            torch.zeros(1)
        )
    elif kind == "overflow":
        tensors[name].view(-1)[0] = 1e6
        options = ["--dtype", "float16"]
    save_file(tensors, file)
    if kind == "vocabulary":
        make_heads(tiny.model, vocab=draw.choice([1, 257, 259]))
    target = case.folder / "new"
    case.cli("convert", tiny.model, target, *options).one_line(HEADS)
    if target.exists():
        raise Fault("the conversion is refused, but something was written")
    if kind != "overflow":
        generate(case, tiny.model).one_line(HEADS)


@attack("A", 5, weight=3, seconds=LIMIT)
def an_adapter_is_added_right_or_refused(case: Case) -> None:
    """Adapters of other shapes, ranks and models, and values that are not finite."""
    tiny, draw = Tiny(case), case.draw
    folder = make_adapter(case, tiny.model, rank=draw.choice([1, 2, 5]))
    file, settings = folder / ADAPTER[1], json.loads((folder / ADAPTER[0]).read_text())
    tensors = load_file(file)
    name = draw.choice(sorted(tensors))
    kinds = ["right", "nan", "shape", "dtype", "lost", "more", "rank", "another base", "dora"]
    kind = case.turn([*kinds, "beside a model", "itself", "tokenizer", "large"])
    if kind == "nan":
        tensors[name].view(-1)[0] = draw.choice([float("nan"), float("inf")])
    elif kind == "shape":
        tensors[name] = draw.choice(
            [tensors[name].T.contiguous()[1:], tensors[name][:, 1:].contiguous(), tensors[name][0]]
        )
    elif kind == "dtype":
        tensors[name] = tensors[name].to(draw.choice([torch.int64, torch.bool]))
    elif kind == "lost":
        del tensors[name]
    elif kind == "more":
        end = draw.choice(["x", "base_model.model.model.layers.7.mlp.up_proj.lora_A.weight"])
        tensors[end] = torch.zeros(2, 16)
    elif kind == "rank":
        settings[draw.choice(["r", "rank_pattern"])] = 7
        if isinstance(settings["rank_pattern"], int):
            settings["rank_pattern"] = {".*": 7}
    elif kind == "another base":
        other = Tiny(case, hidden_size=32)  # in the same folder
        settings["base_model_name_or_path"] = str(other.model)
    elif kind == "dora":
        tensors[name.rpartition(".lora_")[0] + ".lora_magnitude_vector"] = torch.ones(16)
    elif kind == "itself":
        settings["base_model_name_or_path"] = draw.choice([str(folder), "", "/nowhere", None, 7])
    elif kind == "large":
        tensors[name] = tensors[name] * 1e38
    save_file(tensors, file)
    (folder / ADAPTER[0]).write_text(json.dumps(settings))
    target = case.folder / "new"
    if kind == "tokenizer":
        found = json.loads((tiny.model / "tokenizer_config.json").read_text())
        found["chat_template"] = "another"
        (folder / "tokenizer_config.json").write_text(json.dumps(found))
        if draw.random() < 0.5:
            shutil.copy(tiny.model / "tokenizer.json", folder)
    elif kind == "beside a model":
        for name in ADAPTER:
            shutil.copy(folder / name, tiny.model)
        case.cli("convert", tiny.model, target).one_line("adapter_")
        result = case.cli("inspect", tiny.model)
        result.fine_or_one_line()
        return
    result = case.cli("convert", folder, target)
    if kind not in ("right", "tokenizer"):
        result.one_line()
        if target.exists():
            raise Fault("the adapter is refused, but something was written")
        return
    if result.code != 0 or not equal(load_file(target / WEIGHTS), merged(tiny.model, folder)):
        raise Fault(f"the adapter is not added as it says: {result.err[-300:]}")
    if kind == "tokenizer":
        name = "tokenizer_config.json"
        if (target / name).read_bytes() != (folder / name).read_bytes():
            raise Fault("the adapter's tokenizer is lost")


@attack("B", 13, weight=3, seconds=LIMIT)
def heads_and_adapters_of_any_content(case: Case) -> None:
    """Bytes that are changed, cut or added in heads and adapters, and values of other types."""
    tiny, draw = Tiny(case), case.draw
    adapter = make_adapter(case, tiny.model)
    heads = make_heads(tiny.model)
    kind = case.turn(["bytes of heads", "bytes of an adapter", "header", "config", "bytes of it"])
    if kind == "config":
        change_config(draw, adapter / ADAPTER[0])
        file = adapter
    elif kind == "header":
        file = draw.choice([heads, adapter / ADAPTER[1]])
        damage_header(draw, file, lambda header: change_header(draw, header))
    else:
        names = {"bytes of heads": heads, "bytes of an adapter": adapter / ADAPTER[1]}
        file = names.get(kind, adapter / ADAPTER[0])
        whole = bytearray(file.read_bytes())
        for _ in range(draw.randint(1, 4)):
            at = draw.randrange(min(len(whole), draw.choice([8, 600, len(whole)])))
            whole[at : at + draw.randint(0, 2)] = draw.randbytes(draw.randint(0, 2))
        file.write_bytes(whole[: draw.choice([len(whole), draw.randrange(len(whole))])])
    folder = tiny.model if file == heads else adapter
    target = case.folder / "new"
    result = case.cli("convert", folder, target)
    result.fine_or_one_line()
    if result.code == 0:
        ligermodels.AutoLiger.from_hf(target)
        if file == heads and load_file(target / HEADS).keys() != load_file(heads).keys():
            raise Fault("heads are lost")
    elif target.exists():
        raise Fault("the conversion is refused, but something was written")


def change_config(draw: Random, file: Path) -> None:
    """Change the config of an adapter."""
    found = json.loads(file.read_text())
    more = ["use_rslora", "use_dora", "lora_bias", "init_lora_weights", "fan_in_fan_out", "x",
            "modules_to_save", "layers_to_transform", "peft_type", "inference_mode"]  # fmt: skip
    for _ in range(draw.randint(1, 3)):
        key = draw.choice([*found, *more])
        value = draw.choice([*ODD, {"q_proj": draw.choice(ODD)}, {draw.choice(PATTERNS): 3}])
        found[key] = copy.deepcopy(value)
    if draw.random() < 0.2:
        del found[draw.choice(sorted(found))]
    file.write_text(json.dumps(found))


# Expressions that are none, or that could be matched for ever.
PATTERNS = [
    *("(", "[", "*", "(a+)+$", "(.*)*x", "(.|.)*!", "(a|aa)+$", "a{99999999999}", "\\", "(?P<"),
    *(".*.*.*.*.*.*.*.*.*.*x", "(((((.*)*)*)*)*)*x", "x" * 100_000, "(" * 5000, "\ud800"),
    *("(?=.*)*", "(?:.*.*)+x", "(\\w+\\.?)+$", "(?:(?:.)?)*y", ".*?.*?.*?.*?.*?q"),
]


def change_header(draw: Random, header: dict[str, Any]) -> None:
    """Change an entry of a safetensors header."""
    name = draw.choice(sorted(header))
    kind = draw.randrange(4)
    if kind == 0:
        header[name] = draw.choice(ODD)
    elif kind == 1:
        header[draw.choice(["x", "0.0.linear.weight", "\ud800"])] = header.pop(name)
    elif name != "__metadata__":
        header[name][draw.choice(sorted(header[name]))] = draw.choice(
            [*ODD, [0, 0], [0, 10**18], "BF16", "F8_E4M3", "I64"]
        )


@attack("C", 16, seconds=10)
def expressions_in_adapters_that_never_end(case: Case) -> None:
    """Patterns for names in adapter_config.json that take for ever, or are none."""
    tiny = Tiny(case)
    folder = make_adapter(case, tiny.model)
    found = json.loads((folder / ADAPTER[0]).read_text())
    key = case.turn(["alpha_pattern", "rank_pattern", "target_modules", "layers_pattern"])
    pattern = case.draw.choice(PATTERNS)
    found[key] = {pattern: 2} if key.endswith("k_pattern") or key[0] == "a" else pattern
    (folder / ADAPTER[0]).write_text(json.dumps(found))
    case.cli("convert", folder, case.folder / "new").fine_or_one_line()

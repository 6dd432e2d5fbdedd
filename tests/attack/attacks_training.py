"""Attacks on runs of fine-tuning: their folders, their checkpoints, their data and signals."""

from __future__ import annotations

import codecs
import contextlib
import importlib
import io
import json
import os
import re
import resource
import shutil
import signal
import socket
import struct
import threading
import time
from collections.abc import Callable
from pathlib import Path
from random import Random
from typing import Any

import torch

import ligermodels
from tests.attack.attacks_saves import as_a_user
from tests.attack.harness import Case, Fault, Result, attack
from tests.training.tiny_run import make_checkpoint, make_text

# What a run imports is imported here, so that each fork has it already, also as another user.
codecs.lookup("utf-8-sig")
_weight = torch.nn.Parameter(torch.zeros(1))
_weight.grad = torch.zeros(1)
torch.optim.AdamW([_weight], fused=True).step()
with contextlib.suppress(ImportError):
    import matplotlib.backends.backend_agg
    import matplotlib.figure

    matplotlib.figure.Figure().savefig(io.BytesIO(), format="png")
# An older version has other modules and other flags.
OLD_FLAGS: dict[str, str] = {}
try:
    importlib.import_module("ligermodels.training.finetune")
except ImportError:
    importlib.import_module("ligermodels.finetune")
    OLD_FLAGS = {
        "train-files": "train",
        "eval-files": "eval",
        "output-dir": "output",
        "overwrite-output-dir": "overwrite",
        "num-train-epochs": "epochs",
        "max-steps": "steps",
        "gradient-accumulation-steps": "grad-accumulation",
        "eval-steps": "eval-every",
        "save-steps": "save-every",
        "save-total-limit": "keep-checkpoints",
        "logging-steps": "log-every",
        "min-lr-rate": "min-lr-ratio",
        "adam-beta1": "beta1",
        "adam-epsilon": "adam-eps",
    }


def flag(name: str) -> str:
    """Return the flag of an option in the version that is attacked."""
    name = name.replace("_", "-")
    return "--" + OLD_FLAGS.get(name, name)


LIMIT = 90.0  # seconds; a run takes a fraction of one where nothing else runs
SMALLEST = {
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
}


class Tiny:
    """A run of six steps with checkpoints after 2, 4 and 6; it takes a fifth of a second."""

    def __init__(self, case: Case, **config: Any) -> None:
        self.case = case
        self.model = make_checkpoint(case.folder / "base", **{**SMALLEST, **config})
        self.text = make_text(case.folder / "text.txt", 12)
        self.out = case.folder / "out"

    def arguments(self, **changes: object) -> list[object]:
        options: dict[str, object] = {
            "train_files": self.text,
            "output_dir": self.out,
            "separator": "",
            "seq_len": 32,
            "batch_size": 1,
            "max_steps": 6,
            "save_steps": 2,
            "eval_steps": 3,
            "learning_rate": 1e-2,
            "device": "cpu",
            **changes,
        }
        pairs = [(flag(name), value) for name, value in options.items() if value is not None]
        return ["finetune", self.model, "--quiet", *(part for pair in pairs for part in pair)]

    def start(self, *flags: str, **changes: object) -> Result:
        return self.case.cli(*self.arguments(**changes), *flags)

    def resume(self, *flags: object) -> Result:
        return self.case.cli(
            "finetune",
            "--resume",
            flag("output-dir"),
            self.out,
            "--quiet",
            "--device",
            "cpu",
            *flags,
        )

    def started(self, *flags: str) -> bytes:
        """Run to the end, and return the file of weights."""
        done = self.start(*flags)
        if done.code != 0:
            raise Fault(f"the run does not work at all: {done.err[-400:]}")
        return self.weights()

    def checkpoints(self) -> list[Path]:
        return sorted((self.out / "checkpoints").glob("step-*.safetensors"))

    def weights(self) -> bytes:
        return (self.out / "model" / "model.safetensors").read_bytes()

    def right_or_one_line(self, result: Result, weights: bytes) -> None:
        """Require a refusal in one line, or the weights that an undisturbed run has."""
        result.fine_or_one_line()
        if result.code == 0 and self.weights() != weights:
            raise Fault("the run ends with other weights and without a word")


def back_to(tiny: Tiny, step: int) -> None:
    """Make a finished run one that has been killed after a checkpoint."""
    for file in tiny.checkpoints():
        if int(file.stem.removeprefix("step-")) > step:
            file.unlink()
    shutil.rmtree(tiny.out / "model")


def tree(folder: Path) -> dict[str, bytes | str | None]:
    """Return what each path below a folder holds: bytes, the target of a link, or None."""
    found: dict[str, bytes | str | None] = {}
    for path in sorted(folder.rglob("*")):
        name = str(path.relative_to(folder))
        if path.is_symlink():
            found[name] = os.readlink(path)
        else:
            found[name] = path.read_bytes() if path.is_file() else None
    return found


def require_kept(folder: Path, before: dict[str, bytes | str | None]) -> None:
    after = tree(folder)
    lost = [name for name, content in before.items() if after.get(name, b"\0") != content]
    if lost:
        raise Fault(f"files of the user are lost or changed: {lost}")


def scribble(draw: Random, folder: Path, names: list[str]) -> None:
    """Put files of a user into a folder."""
    for name in names:
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if not path.exists():
            path.write_bytes(draw.randbytes(draw.randrange(1, 200)))


MINE = """
    model/config.json model/model.safetensors model/notes.txt model/tokenizer.json
    model/model-00001-of-00002.safetensors checkpoints/best.safetensors
    checkpoints/step-00000001.safetensors checkpoints/step-mine.safetensors
    checkpoints/mine.part metrics.jsonl loss.png thesis.tex data/a.txt
""".split()


@attack("A", 4, seconds=LIMIT)
def overwriting_removes_only_what_a_run_made(case: Case) -> None:
    """A folder with a user's files and no run, or with such files beside a run's own."""
    tiny = Tiny(case)
    kind = case.turn(["model/ that no run made", "no run", "a run"])
    if kind == "a run":
        tiny.started()
        names = [n for n in MINE if not (tiny.out / n).exists() and "step-0" not in n]
        names = [n for n in names if "model-00" not in n and n != "model/tokenizer.json"]
    elif kind == "no run":
        names = MINE
    else:
        names = [name for name in MINE if name.startswith("model/")]
    names = case.draw.sample(names, case.draw.randint(1, min(4, len(names))))
    scribble(case.draw, tiny.out, names)
    mine = {name: content for name, content in tree(tiny.out).items() if name in names}
    tiny.start(flag("overwrite-output-dir")).fine_or_one_line()
    require_kept(tiny.out, mine)


@attack("A", 4, seconds=LIMIT)
def a_model_that_was_put_into_a_run_is_kept(case: Case) -> None:
    """A run that was stopped before its export, then a checkpoint of the user at model/."""
    tiny = Tiny(case)
    tiny.start(learning_rate=1e30, max_grad_norm=0).one_line()
    names = case.draw.sample([name for name in MINE if name.startswith("model/")], 2)
    scribble(case.draw, tiny.out, [*names, "model/model.safetensors"])
    before = {name: content for name, content in tree(tiny.out).items() if name[:6] == "model/"}
    if case.draw.random() < 0.5:
        tiny.start(flag("overwrite-output-dir")).fine_or_one_line()
    else:
        tiny.resume("--learning-rate", "1e30").fine_or_one_line()
    require_kept(tiny.out, before)


@attack("A", 4, seconds=LIMIT)
def no_file_is_written_through_a_link(case: Case) -> None:
    """The names that a run writes are links to a user's file, or the lock has a content."""
    tiny = Tiny(case)
    tiny.out.mkdir()
    mine = case.folder / "mine"
    mine.write_text("mine")
    names = [".lock", "run.json.part", "metrics.jsonl.part", "loss.png.part", "loss.png"]
    for name in {case.turn(names), case.draw.choice(names)}:
        (tiny.out / name).symlink_to(mine)
    if case.draw.random() < 0.3 and not os.path.lexists(tiny.out / ".lock"):
        os.link(mine, tiny.out / ".lock")
    tiny.start(*case.draw.choice([[], [flag("overwrite-output-dir")]])).fine_or_one_line()
    if mine.read_bytes() != b"mine":
        raise Fault("the user's file is changed")


@attack("A", 4, seconds=LIMIT)
def a_run_is_not_scattered_among_other_files(case: Case) -> None:
    """The output folder is the current one, or one above it, and other files are there."""
    tiny = Tiny(case)
    work = case.folder / "work"
    scribble(case.draw, work, ["thesis.tex", "sub/a.txt"])
    os.chdir(case.draw.choice([work, work / "sub"]))
    before = tree(work)
    for path in (".", os.curdir + "/", os.getcwd(), work):
        tiny.out = Path(path)
        tiny.start().one_line()
        if tree(work) != before:
            raise Fault(f"the files of a run lie among others: {sorted(tree(work))}")


@attack("A", 5, seconds=LIMIT)
def an_export_can_be_loaded(case: Case) -> None:
    """The last update, or the cast of the export, goes beyond what the dtype can hold."""
    kind = case.turn(["update", "float16", "both"])
    tiny = Tiny(case)
    changes: dict[str, object] = {"max_steps": case.draw.randint(1, 2), "weight_decay": 0}
    if kind != "float16":
        changes |= {"learning_rate": 10.0 ** case.draw.randint(36, 60), "max_grad_norm": 0}
        changes["eval_fraction"] = case.draw.choice([0, 0.1])
        changes["warmup_steps"] = 0
    if kind != "update":
        model = ligermodels.AutoLiger.from_hf(tiny.model)
        name = case.draw.choice([name for name, p in model.named_parameters() if p.ndim == 2])
        with torch.no_grad():
            model.get_parameter(name).view(-1)[case.draw.randrange(99)] = 7e4
        model.save_hf(tiny.model)
        changes["export_dtype"] = "float16"
    changes["save_steps"] = case.draw.choice([0, 1, 500])
    result = tiny.start(**changes)
    result.fine_or_one_line()
    if re.search(r"\d{30}", result.out + result.err):
        raise Fault(f"a number of many digits: {result.out[:200]}")
    if result.code == 0:
        try:
            ligermodels.AutoLiger.from_hf(tiny.out / "model")
        except ligermodels.CheckpointError as error:
            raise Fault(f"the exit code is 0, but the export cannot be loaded: {error}") from None
    elif (tiny.out / "model").exists():
        raise Fault("a run that failed has left an export")
    elif kind == "float16":
        again = tiny.resume("--export-dtype", "bfloat16")
        if again.code != 0:
            raise Fault(f"another dtype does not help: {again.err[-300:]}")


@attack("A", 5, seconds=LIMIT)
def a_perplexity_has_few_digits(case: Case) -> None:
    """A model whose loss is in the hundreds."""
    tiny = Tiny(case)
    model = ligermodels.AutoLiger.from_hf(tiny.model)
    with torch.no_grad():
        model.embed_tokens.weight.mul_(10.0 ** case.draw.uniform(3, 6))
    model.save_hf(tiny.model)
    result = tiny.start(learning_rate=1e-12, max_steps=1)
    result.fine_or_one_line()
    if re.search(r"\d{30}", result.out + result.err):
        raise Fault(f"a number of many digits: {result.out[:200]}")


@attack("A", 6, weight=2, seconds=LIMIT)
def a_replaced_model_is_noticed(case: Case) -> None:
    """Between two lives of a run, the config, a weight or a tokenizer file of the base changes."""
    tiny = Tiny(case)
    tiny.started()
    back_to(tiny, case.draw.choice([0, 4]))
    kind = case.turn(["config", "weights", "tokenizer"])
    if kind == "config":
        file = tiny.model / "config.json"
        config = json.loads(file.read_text())
        key, value = case.draw.choice(
            [("rms_norm_eps", 1e-3), ("rope_theta", 123.0), ("max_position_embeddings", 64)]
        )
        config[key] = value
        if key == "rope_theta" and isinstance(config.get("rope_parameters"), dict):
            config["rope_parameters"][key] = value
        file.write_text(json.dumps(config))
    elif kind == "weights":
        model = ligermodels.AutoLiger.from_hf(tiny.model)
        name = case.draw.choice([name for name, _ in model.named_parameters()])
        with torch.no_grad():
            weight = model.get_parameter(name).view(-1)
            weight[case.draw.randrange(len(weight))] += 0.5
        model.save_hf(tiny.model)
    else:
        file = tiny.model / "tokenizer_config.json"
        found = json.loads(file.read_text())
        file.write_text(json.dumps({**found, "chat_template": "{{ messages }}"}))
    result = tiny.resume()
    if result.code == 0:
        raise Fault(f"the {kind} of the base model changed, and the resumed run did not notice")
    result.one_line()


def damage_header(draw: Random, file: Path, change: Callable[[dict[str, Any]], None]) -> None:
    """Change the header of a safetensors file."""
    whole = file.read_bytes()
    (size,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + size])
    change(header)
    text = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(text)) + text + whole[8 + size :])


def _another_step(draw: Random, metadata: dict[str, str]) -> None:
    step = draw.choice([-1, 0, 1, 3, 6, 7, 10**9, 10**30])
    for key, value in metadata.items():
        found = json.loads(value)
        metadata[key] = (
            json.dumps({**found, "step": step}) if isinstance(found, dict) else str(step)
        )


@attack("A", 6, weight=3, seconds=LIMIT)
def a_damaged_checkpoint_of_a_run_is_noticed(case: Case) -> None:
    """Flipped bits, another dtype, another step, a cut file, the checkpoint of another run."""
    tiny, draw = Tiny(case), case.draw
    weights = tiny.started()
    back_to(tiny, 4)
    file = tiny.checkpoints()[-1]
    kind = case.turn(["bits", "dtype", "step", "name", "cut", "run", "count", "half as whole"])
    if kind == "bits":
        whole = bytearray(file.read_bytes())
        place = draw.randrange(len(whole))
        whole[place] ^= 1 << draw.randrange(8)
        file.write_bytes(whole)
    elif kind == "dtype":
        from safetensors import safe_open
        from safetensors.torch import save_file

        with safe_open(file, "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}
            metadata = opened.metadata()
        names = draw.sample(sorted(tensors), draw.choice([1, len(tensors)]))
        save_file(
            {k: v.bfloat16() if k in names else v for k, v in tensors.items()}, file, metadata
        )
    elif kind == "step":
        damage_header(draw, file, lambda header: _another_step(draw, header["__metadata__"]))
    elif kind == "name":
        file.rename(file.with_name(f"step-{draw.choice([5, 6, 7, 10**7]):08d}.safetensors"))
    elif kind == "cut":
        os.truncate(file, draw.randrange(file.stat().st_size))
    elif kind == "count":
        from safetensors import safe_open
        from safetensors.torch import save_file

        with safe_open(file, "pt") as opened:
            tensors = {name: opened.get_tensor(name) for name in opened.keys()}
            metadata = opened.metadata()
        for name in tensors:
            if name.startswith("optimizer.step"):
                tensors[name] = tensors[name] * 0 + draw.choice([0.0, 7.0, -1.0, float("nan")])
        save_file(tensors, file, metadata)
    elif kind == "half as whole":
        # A checkpoint of half the training under the last step's name and number.
        shutil.copy(file, file.with_name("step-00000006.safetensors"))
        file = file.with_name("step-00000006.safetensors")

        def finished(metadata: dict[str, str]) -> None:
            for key, value in metadata.items():
                found = json.loads(value)
                metadata[key] = json.dumps({**found, "step": 6}) if isinstance(found, dict) else "6"

        damage_header(draw, file, lambda header: finished(header["__metadata__"]))
    else:
        other = Tiny(case)
        other.out = case.folder / "other"
        if other.start(seed=1).code != 0:
            raise Fault("another run does not work")
        shutil.copy(other.out / "checkpoints" / file.name, file)
    tiny.right_or_one_line(tiny.resume(), weights)


@attack("A", 6, seconds=LIMIT)
def a_checkpoint_that_is_cut_while_it_is_read(case: Case) -> None:
    """Another process truncates the checkpoint at some moment of a resumed run."""
    tiny, draw = Tiny(case), case.draw
    weights = tiny.started()
    back_to(tiny, 4)
    file = tiny.checkpoints()[-1]
    whole = file.read_bytes()

    def cut() -> None:
        time.sleep(draw.uniform(0, 0.08))
        os.truncate(file, draw.randrange(len(whole)))
        time.sleep(0.01)
        file.write_bytes(whole)

    thread = threading.Thread(target=cut)
    thread.start()
    result = tiny.resume()
    thread.join()
    tiny.right_or_one_line(result, weights)


def in_a_process(
    case: Case,
    arguments: list[object],
    act: Callable[[int], None],
    prepare: Callable[[], None] = lambda: None,
) -> Result:
    """Run a command in a process of its own, and let `act` do something to that process.

    Args: prepare is called in the process before the command.
    """
    files = [case.folder / "out.txt", case.folder / "err.txt"]
    child = os.fork()
    if child == 0:
        code = 1
        try:
            for signum, handler in (
                (signal.SIGINT, signal.default_int_handler),
                (signal.SIGTERM, signal.SIG_DFL),
            ):
                signal.signal(signum, handler)
            for number, file in enumerate(files, 1):
                os.dup2(os.open(file, os.O_CREAT | os.O_TRUNC | os.O_WRONLY), number)
            prepare()
            result = case.cli(*arguments)
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY,) * 2)
            os.write(1, result.out.encode())
            os.write(2, result.err.encode())
            code = 1 if result.code is None else result.code
        finally:
            os._exit(code)
    act(child)
    _, status = os.waitpid(child, 0)
    out, err = (file.read_text() if file.exists() else "" for file in files)
    return Result(os.waitstatus_to_exitcode(status), out, err)


def lines(file: Path) -> int:
    return file.read_bytes().count(b"\n") if file.exists() else 0


@attack("A", 10, weight=4, seconds=LIMIT)
def a_signal_saves_the_run(case: Case) -> None:
    """SIGINT or SIGTERM at any phase: what is said is true, and a resumed run is bitwise right."""
    tiny, draw = Tiny(case), case.draw
    weights = tiny.started()
    shutil.rmtree(tiny.out)
    looks_at, signum = [
        (what, signum)
        for what in ("what is saved", "what is said")
        for signum in (signal.SIGINT, signal.SIGTERM)
    ][case.seed % 4]
    case.label(f"{signum.name}: {looks_at}")
    until = draw.choice(["time", "line", "line", "export"])
    number = draw.randint(1, 8)
    seen = 0

    def interrupt(child: int) -> None:
        nonlocal seen
        end = time.monotonic() + (draw.uniform(0, 0.2) if until == "time" else 10)
        while (
            time.monotonic() < end
            and os.waitid(os.P_PID, child, os.WEXITED | os.WNOHANG | os.WNOWAIT) is None
        ):
            time.sleep(0.0005)
            if until == "line" and lines(tiny.out / "metrics.jsonl") >= number:
                break
            if until == "export" and list(tiny.out.glob(".model.*")):
                break
        with contextlib.suppress(FileNotFoundError):
            text = (tiny.out / "metrics.jsonl").read_text()
            seen = max(map(int, re.findall(r'"step": (\d+), "loss"', text)), default=0)
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signum)

    save_steps = draw.choice([0, 2, 500])
    ended = in_a_process(case, tiny.arguments(save_steps=save_steps), interrupt)
    steps = [int(file.stem.removeprefix("step-")) for file in tiny.checkpoints()]
    if "Traceback" in ended.err:
        raise Fault(f"a traceback: {ended.err[-600:]}")
    if ended.code == 0:
        return
    if ended.code not in (130, 143, -signal.SIGTERM, -signal.SIGINT):
        raise Fault(f"exit code {ended.code}: {ended.err[-300:]}")
    lost = seen and max(steps, default=0) < seen and not (tiny.out / "model").exists()
    if lost and looks_at == "what is saved":
        raise Fault(f"step {seen} was done, but the checkpoints are of the steps {steps}")
    claim = re.search(r"after step (\d+) is saved", ended.err)
    if ("from the last checkpoint" in ended.err and not steps) or (
        claim and int(claim[1]) not in steps
    ):
        raise Fault(f"{ended.err!r} is not true: the checkpoints are of the steps {steps}")
    if looks_at == "what is said" and "--resume" not in ended.err:
        return
    if "--resume" in ended.err or (tiny.out / "run.json").exists():
        again = tiny.resume()
    else:
        if tiny.out.exists():
            raise Fault(f"before the run began, there is {os.listdir(tiny.out)}")
        again = tiny.start(save_steps=save_steps)
    if again.code != 0 or tiny.weights() != weights:
        raise Fault(f"the resumed run has other weights, or fails: {again.err[-300:]}")


@attack("A", 10, seconds=LIMIT)
def a_signal_that_comes_twice_loses_nothing(case: Case) -> None:
    """A wrapper passes on the signal that the process has got already."""
    tiny, draw = Tiny(case), case.draw
    weights = tiny.started()
    shutil.rmtree(tiny.out)
    signum = draw.choice([signal.SIGINT, signal.SIGTERM])

    def interrupt(child: int) -> None:
        while lines(tiny.out / "metrics.jsonl") < 2:
            time.sleep(0.001)
        for _ in range(2):
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signum)
            time.sleep(draw.uniform(0, 0.02))

    ended = in_a_process(case, tiny.arguments(save_steps=500, max_steps=6), interrupt)
    if ended.code != 0 and not tiny.checkpoints():
        raise Fault(f"nothing is saved: {ended.err[-300:]}")
    again = tiny.resume()
    if again.code != 0 or tiny.weights() != weights:
        raise Fault(f"the resumed run has other weights, or fails: {again.err[-300:]}")


@attack("B", 11, seconds=LIMIT)
def ids_beyond_the_embedding_are_found_in_time(case: Case) -> None:
    """A pad token that was added and never resized works; other such ids are one line."""
    tiny, draw = Tiny(case), case.draw
    file = tiny.model / "tokenizer.json"
    found = json.loads(file.read_text())
    beyond = draw.choice([258, 300, 2**20, 2**31 - 1, 2**31, 2**31 + 5, 2**32 - 1])
    settings = json.loads((tiny.model / "tokenizer_config.json").read_text())
    kind = case.turn(["pad", "used", "end"])
    name = {"pad": "<pad>", "used": "cat", "end": "<end>"}[kind]
    found["added_tokens"].append(
        {
            "id": beyond,
            "content": name,
            "special": kind != "used",
            "single_word": False,
            "lstrip": False,
            "rstrip": False,
            "normalized": False,
        }
    )
    found["model"]["vocab"][name] = beyond
    file.write_text(json.dumps(found))
    if kind != "used":
        settings[{"pad": "pad_token", "end": "eos_token"}[kind]] = name
        (tiny.model / "tokenizer_config.json").write_text(json.dumps(settings))
    result = tiny.start()
    if kind == "pad" and beyond < 2**31:
        if result.code != 0:
            raise Fault(f"a pad token that is never used stops the run: {result.err[-300:]}")
        return
    result.fine_or_one_line()
    if result.code != 0 and tiny.out.exists():
        raise Fault(f"the folder was made before the ids were checked: {os.listdir(tiny.out)}")


ODD: list[Any] = [None, True, False, 0, -1, 3, 10**30, 2.5, 1e999, float("nan"), "", "x", "\ud800",
                  [], [1], ["x"], [None], {}, {"a": 1}, {"a": {"b": [1]}}, "9" * 5000]  # fmt: skip


def deep(levels: int) -> str:
    return "[" * levels + "]" * levels


@attack("B", 13, weight=3, seconds=LIMIT)
def metrics_of_any_content(case: Case) -> None:
    """metrics.jsonl missing, empty, of wrong types, deeply nested, not text, or cut."""
    tiny, draw = Tiny(case), case.draw
    weights = tiny.started()
    if draw.random() < 0.5:
        back_to(tiny, 4)
    file = tiny.out / "metrics.jsonl"
    kept = file.read_bytes().splitlines(keepends=True)
    kind = case.turn(["missing", "empty", "types", "deep", "bytes", "cut", "drop", "keys", "file"])
    if kind == "missing":
        file.unlink()
    elif kind == "empty":
        file.write_bytes(draw.choice([b"", b"\n", b"\n\n\n", b"{}\n", b"\0" * 20]))
    elif kind == "types":
        place = draw.randrange(len(kept))
        entry = json.loads(kept[place])
        entry[draw.choice(["step", *sorted(entry)])] = draw.choice(ODD)
        kept[place] = json.dumps(entry).encode() + b"\n"
    elif kind == "deep":
        levels = draw.choice([50, 200, 1000, 100_000])
        kept.insert(draw.randrange(len(kept)), b'{"step": %s}\n' % deep(levels).encode())
    elif kind == "bytes":
        kept.insert(draw.randrange(len(kept)), draw.randbytes(40) + b"\n")
    elif kind == "keys":
        kept = [draw.choice([b'{"step": 1}\n', b'{"loss": 1}\n', b"[]\n", b"3\n"]) for _ in kept]
    elif kind == "drop":
        kept = draw.sample(kept, draw.randrange(len(kept)))
    elif kind == "cut":
        whole = b"".join(kept)
        kept = [whole[: draw.randrange(len(whole))]]
    if kind == "file":
        put(draw, file)
    elif kind not in ("missing", "empty"):
        file.write_bytes(b"".join(kept))
    tiny.right_or_one_line(tiny.resume(), weights)


@attack("B", 13, seconds=LIMIT)
def samples_of_any_content(case: Case) -> None:
    """samples.jsonl of wrong types, deeply nested, not text, or cut."""
    tiny, draw = Tiny(case), case.draw
    weights = tiny.started("--sample-prompts", "the cat", "--sample-tokens", "2")
    back_to(tiny, draw.choice([0, 4]))
    file = tiny.out / "samples.jsonl"
    kind = case.turn(["types", "deep", "bytes", "cut", "keys"])
    kept = file.read_bytes().splitlines(keepends=True)
    if kind == "types":
        kept[0] = json.dumps(json.loads(kept[0]) | {"step": draw.choice(ODD)}).encode() + b"\n"
    elif kind == "deep":
        kept.insert(0, b'{"step": %s}\n' % deep(draw.choice([50, 1000, 100_000])).encode())
    elif kind == "bytes":
        kept.insert(draw.randrange(len(kept)), draw.randbytes(40) + b"\n")
    elif kind == "keys":
        kept = [draw.choice([b'{"text": "x"}\n', b"[]\n", b"3\n", b"{}\n", b"\n"]) for _ in kept]
    whole = b"".join(kept)
    file.write_bytes(whole[: draw.randrange(len(whole))] if kind == "cut" else whole)
    tiny.right_or_one_line(tiny.resume(), weights)


def put(draw: Random, path: Path) -> str:
    """Put something that is not a readable file in the place of a file or folder."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    kind = draw.choice(["folder", "pipe", "socket", "dead link", "loop", "device", "none"])
    if kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        here = os.getcwd()
        os.chdir(path.parent)  # the name of a socket must be short
        socket.socket(socket.AF_UNIX).bind(path.name)
        os.chdir(here)
    elif kind != "none":
        path.symlink_to({"dead link": "nowhere", "loop": path.name, "device": "/dev/zero"}[kind])
    return kind


@attack("B", 13, weight=6, seconds=LIMIT)
def settings_of_any_content(case: Case) -> None:
    """run.json with keys of wrong types, without keys, deeply nested, cut or not a file."""
    tiny, draw = Tiny(case), case.draw
    tiny.started()
    if draw.random() < 0.5:
        back_to(tiny, draw.choice([0, 4]))
    file = tiny.out / "run.json"
    found = json.loads(file.read_text())
    kinds = ["key", "setting", "a text or a list", "inner", "lost", "deep", "cut", "bytes"]
    kind = case.turn(kinds)
    if kind == "key":
        found[draw.choice(sorted(found))] = draw.choice(ODD)
    elif kind == "setting":
        found["settings"][draw.choice(sorted(found["settings"]))] = draw.choice(ODD)
    elif kind == "a text or a list":
        texts = [key for key, value in found["settings"].items() if isinstance(value, str | list)]
        found["settings"][draw.choice(texts)] = draw.choice(ODD)
    elif kind == "inner":
        inner = [key for key in found if isinstance(found[key], dict) and key != "settings"]
        key = draw.choice(inner)
        found[key] = {draw.choice([*found[key], "x"]): draw.choice(ODD)}
    elif kind == "lost":
        place = draw.choice([found, found["settings"]])
        del place[draw.choice(sorted(place))]
    elif kind == "deep":
        found["settings"]["memory"] = json.loads(deep(draw.choice([90, 200])))
    if kind == "cut":
        os.truncate(file, draw.randrange(file.stat().st_size))
    elif kind == "bytes":
        whole = bytearray(file.read_bytes())
        whole[draw.randrange(len(whole))] = draw.randrange(256)
        file.write_bytes(whole)
    else:
        file.write_text(json.dumps(found))
    changed = file.read_bytes()
    result = tiny.start(flag("overwrite-output-dir")) if draw.random() < 0.2 else tiny.resume()
    result.fine_or_one_line()
    if result.code != 0 and not (tiny.out / "run.json").exists() and changed:
        raise Fault("run.json is lost")


# Files that a run writes if it is asked for them.
REPORTS: dict[str, list[str]] = {
    "run.yaml": [],
    "samples.jsonl": ["--sample-prompts", "the cat", "--sample-tokens", "2"],
    "profile": ["--profile"],
    "profile/trace.json.gz": ["--profile"],
    "profile/table.txt": ["--profile"],
}


@attack("B", 13, weight=2, seconds=LIMIT)
def files_of_any_kind_in_a_run(case: Case) -> None:
    """What the run made is of another kind now, is not there, or belongs to another user."""
    tiny, draw = Tiny(case), case.draw
    names = ["run.json", "metrics.jsonl", "checkpoints", "model", "loss.png", ".lock"]
    name = case.turn([*names, "checkpoints/step-00000006.safetensors", *REPORTS])
    weights = tiny.started(*REPORTS.get(name, ()))
    if name in REPORTS and draw.random() < 0.5:
        back_to(tiny, 0)
    path, kind, user = tiny.out / name, draw.choice(["link", "another user's", "", "", ""]), None
    if kind == "link":
        path.rename(case.folder / "aside")
        path.symlink_to(case.folder / "aside")
    elif kind == "another user's":
        for each in (tiny.out, tiny.out / "checkpoints", tiny.out / "model"):
            if each.exists():  # an unfinished run has no export
                each.chmod(0o777)
        path.chmod(0o700)
        user = as_a_user(case)
    else:
        kind = put(draw, path)
    with user or contextlib.nullcontext():
        result = tiny.resume()
    try:
        tiny.right_or_one_line(result, weights)
    except (OSError, Fault) as fault:
        raise Fault(f"{name} is {kind}: {fault}") from None


@attack("B", 13, seconds=LIMIT)
def optimizer_states_of_wrong_shapes(case: Case) -> None:
    """A checkpoint whose optimizer states have other shapes or dtypes, or are too many or few."""
    from safetensors import safe_open
    from safetensors.torch import save_file

    tiny, draw = Tiny(case), case.draw
    weights = tiny.started()
    back_to(tiny, 4)
    file = tiny.checkpoints()[-1]
    with safe_open(file, "pt") as opened:
        tensors = {name: opened.get_tensor(name) for name in opened.keys()}
        metadata = opened.metadata()
    start = draw.choice(["optimizer.exp", "optimizer.step"])
    name = draw.choice([name for name in tensors if name.startswith(start)])
    kind = case.turn(["shape", "scalar", "empty", "dtype", "lost", "more"])
    if kind == "shape":
        tensors[name] = tensors[name].repeat(2, *[1] * (tensors[name].ndim - 1))
    elif kind == "scalar":
        tensors[name] = tensors[name].flatten()[0].clone().reshape([1] * draw.randint(0, 3))
    elif kind == "empty":
        tensors[name] = torch.empty(0)
    elif kind == "dtype":
        tensors[name] = tensors[name].to(
            draw.choice([torch.int64, torch.float64, torch.bool, torch.float16, torch.uint8])
        )
    elif kind == "lost":
        del tensors[name]
    else:
        tensors[name + "x"] = tensors[name].clone()
    save_file(tensors, file, metadata)
    tiny.right_or_one_line(tiny.resume(), weights)


@attack("B", 14, weight=2, seconds=30)
def numbers_without_measure(case: Case) -> None:
    """Options so large, small or long that a run would never end, or that no type can hold."""
    tiny, draw = Tiny(case), case.draw
    whole = ["seed", "max_steps", "batch_size", "gradient_accumulation_steps", "seq_len",
             "warmup_steps", "eval_steps", "save_steps", "save_total_limit", "logging_steps",
             "max_eval_rows"]  # fmt: skip
    real = ["learning_rate", "num_train_epochs", "weight_decay", "max_grad_norm", "adam_epsilon",
            "eval_fraction", "adam_beta1", "min_lr_rate"]  # fmt: skip
    changes: dict[str, object] = {"max_steps": 1}
    kind = case.turn(["10**30 steps", "a batch of 10**12", "a whole number", "a real number"])
    if kind == "10**30 steps":
        changes["max_steps"] = 10**30
    elif kind == "a batch of 10**12":
        changes[draw.choice(["batch_size", "gradient_accumulation_steps"])] = 10**12
    elif kind == "a whole number":
        huge = [10**12, 2**63, 2**64, 2**64 - 1, 10**30, 10**400, -1, -(10**30), "9" * 5000]
        changes[draw.choice(whole)] = str(draw.choice(huge))[:6000] if draw.random() < 0.9 else "x"
    else:
        name = draw.choice(real)
        changes[name] = draw.choice(["1e300", "1e-300", "nan", "inf", "-1", "1e400", "9" * 400])
        if name == "num_train_epochs":
            changes["max_steps"] = None
    if changes.get("max_steps") == 1 and draw.random() < 0.1:
        changes |= {"batch_size": 2**18, "gradient_accumulation_steps": 2**18}
    result = tiny.start(**changes)
    result.fine_or_one_line()
    if len(result.err) > 1500:
        raise Fault(f"a message of {len(result.err)} characters")


@attack("E", 18, seconds=LIMIT)
def messages_name_the_way_out(case: Case) -> None:
    """Mistakes in the data and in the output folder, and the words that their messages need."""
    tiny, draw = Tiny(case), case.draw
    kind = case.turn(["small", "again", "human and gpt", "roles", "hub", "sharegpt", "eval"])
    if kind == "small":
        tiny.text.write_text("a")
        tiny.start().one_line("--eval-fraction")
    elif kind == "again":
        tiny.started()
        tiny.start().one_line(flag("overwrite-output-dir"), "--resume", flag("output-dir"))
    elif kind == "eval":
        tiny.started()
        tiny.resume("--eval-fraction", "0.5").one_line("--eval-fraction")
    elif kind == "hub":
        name = draw.choice(["tatsu-lab/alpaca", "HuggingFaceH4/ultrachat_200k", "a/b"])
        result = tiny.start(train_files=name)
        result.one_line(name)
        if not re.search("data ?set", result.err):
            raise Fault(f"a data set is called a file: {result.err}")
    else:
        file = case.folder / "a.jsonl"
        turns = [
            {"role": r, "content": "hi"}
            for r in (("user", "model") if kind == "roles" else ("human", "gpt"))
        ]
        record: dict[str, object] = {"messages": turns}
        if kind == "sharegpt":
            record = {"conversations": [{"from": "human", "value": "hi"}]}
        file.write_text(json.dumps(record))
        words = ["messages", "role"] if kind == "sharegpt" else [turns[1]["role"], "name the turns"]
        tiny.start(train_files=file).one_line(*words)


@attack("E", 18, seconds=LIMIT)
def data_that_is_no_file_is_called_what_it_is(case: Case) -> None:
    """Pipes, /dev/fd/N, devices, sockets, dead links and loops as training data."""
    tiny, draw = Tiny(case), case.draw
    kind = case.turn(["fd", "pipe", "device", "socket", "dead link", "loop"])
    path = case.folder / "data"
    ends = []
    if kind == "fd":
        ends = list(os.pipe())
        os.write(ends[1], b"hello hello hello")
        path = Path(f"/dev/fd/{ends[0]}")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        socket.socket(socket.AF_UNIX).bind("data")
    else:
        path.symlink_to({"device": "/dev/zero", "dead link": "nowhere", "loop": "data"}[kind])
    option = draw.choice(["train_files", "eval_files"])
    result = tiny.start(**{option: path})
    result.one_line(str(path))
    if re.search("the file does not exist|no such file", result.err):
        raise Fault(f"a {kind} is called missing: {result.err}")
    if tiny.out.exists():
        raise Fault("the folder of the run was made")

"""Attacks on saves and loads of checkpoints: several writers, odd files, mounts, limits."""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import shutil
import signal
import stat
import threading
import time
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path

import torch
from torch import nn

import ligermodels
from ligermodels import AutoLiger, LigerError, LigerLlama, LigerQwen2, SaveError
from tests import sandbox
from tests.attack.harness import Case, Fault, Skip, address_space, attack, renew_threads

WEIGHTS, INDEX = "model.safetensors", "model.safetensors.index.json"
TOKENIZER_FILES = (
    *("generation_config.json", "tokenizer.json", "tokenizer.model", "tokenizer_config.json"),
    *("special_tokens_map.json", "added_tokens.json", "vocab.json", "merges.txt"),
    *("chat_template.jinja", "chat_template.json", "additional_chat_templates/rag.jinja"),
)
_SIZES = {
    "hidden_size": 16,
    "intermediate_size": 16,
    "num_hidden_layers": 1,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "tie_word_embeddings": False,
}
_EPS = 1e-6  # rms_norm_eps is this times one more than the number


def new_model(number: int, family: type = LigerLlama) -> ligermodels.DecoderModel:
    """Return a model whose config and weights all tell its number; the shapes are the same."""
    model = family(family.config_class(vocab_size=40, rms_norm_eps=_EPS * (number + 1), **_SIZES))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.fill_(number)
    return model


def make_source(folder: Path, number: int, family: type = LigerLlama) -> Path:
    """Save a checkpoint whose tokenizer tells its number, too."""
    new_model(number, family).save_hf(folder)
    (folder / "tokenizer.json").write_text(f"the tokenizer {number}")
    (folder / "generation_config.json").write_text(json.dumps({"pad_token_id": number}))
    return folder


def number_of(model: nn.Module) -> int:
    """Return the number of a model; raise if its parts are of several."""
    number = round(model.config.rms_norm_eps / _EPS) - 1
    for name, parameter in model.named_parameters():
        if not (parameter == number).all():
            raise Fault(f"the config is of model {number}, {name} of model {parameter.max()}")
    return number


def check_whole(folder: Path, tokenizer: bool = True) -> int:
    """Return the number of the checkpoint in a folder; raise unless all its files are of one."""
    number = number_of(AutoLiger.from_hf(folder))
    if tokenizer:
        text = (folder / "tokenizer.json").read_text()
        if text != f"the tokenizer {number}":
            raise Fault(f"beside model {number} lies {text!r}")
    return number


def snapshot(folder: Path) -> dict[str, object]:
    """Return what a folder holds: path -> content of a file, else what the entry is."""
    found: dict[str, object] = {}
    for where, folders, files in os.walk(folder):
        for name in (*folders, *files):
            path = Path(where, name)
            mode = os.lstat(path).st_mode
            key = str(path.relative_to(folder))
            if stat.S_ISREG(mode):
                found[key] = path.read_bytes()
            else:
                found[key] = os.readlink(path) if path.is_symlink() else stat.S_IFMT(mode)
    return found


USERS = {"notes.txt": "mine", "runs/deep/log": "mine, too", "lora.safetensors": "an adapter"}


def add_users_files(folder: Path) -> None:
    for name, text in USERS.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text)


def check_users_files(folder: Path) -> None:
    for name, text in USERS.items():
        if not (folder / name).is_file() or (folder / name).read_text() != text:
            raise Fault(f"the user's {name} is lost")


def check_beside(parent: Path, *expected: str) -> None:
    if left := sorted(set(os.listdir(parent)) - set(expected)):
        raise Fault(f"left beside the target: {left}")


def together(*works: Callable[[], None]) -> list[str]:
    """Run functions in threads; return the errors that escaped."""
    errors: list[str] = []

    def watched(work: Callable[[], None]) -> None:
        try:
            work()
        except BaseException:
            errors.append(traceback.format_exc())

    threads = [threading.Thread(target=watched, args=(work,)) for work in works]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return errors


@contextlib.contextmanager
def process(work: Callable[[], None]) -> Iterator[int]:
    """Run a function in a process, and yield its id; raise if the function raised."""
    reading, writing = os.pipe()
    child = os.fork()
    if child == 0:
        os.close(reading)
        renew_threads()
        try:
            work()
        except BaseException:
            os.write(writing, traceback.format_exc().encode()[-3000:])
        finally:
            os._exit(0)
    os.close(writing)
    try:
        yield child
        with open(reading, "rb", closefd=False) as said:
            if text := said.read().decode():
                raise Fault(f"a process failed: {text}")
    finally:
        os.close(reading)
        os.waitpid(child, 0)


def repeat(draw: random.Random, times: int, work: Callable[[], object]) -> Callable[[], None]:
    pauses = [draw.uniform(0, 0.004) * draw.randint(0, 1) for _ in range(times)]

    def run() -> None:
        for pause in pauses:
            time.sleep(pause)
            work()

    return run


class Shared:
    """A folder that several writers save to, each its own models."""

    def __init__(self, case: Case, writers: int, families: tuple[type, ...] = (LigerLlama,)):
        draw = case.draw
        self.parent = case.folder / "parent"
        self.target = self.parent / "out"
        self.models = []
        for number in range(writers + 1):
            family = draw.choice(families)
            source = make_source(case.folder / f"source-{number}", number, family)
            self.models.append(AutoLiger.from_hf(source))
        self.shard_sizes = [draw.choice((1, 2000, 10**9)) for _ in self.models]
        self.existing = draw.random() < 0.8
        if self.existing:
            self.save(writers)
            add_users_files(self.target)
        self.exchange = draw.random() < 0.5 or not sandbox.without_exchange()

    def save(self, number: int) -> None:
        self.models[number].save_hf(self.target, max_shard_size=self.shard_sizes[number])

    def check(self) -> None:
        check_whole(self.target)
        if self.existing:
            check_users_files(self.target)
        check_beside(self.parent, "out")


@attack("A", 1, weight=4)
def threads_save_to_one_folder(case: Case) -> None:
    """Of threads that save to one folder, each succeeds, and one version is there at the end."""
    looks_at = case.turn(("each save succeeds", "a save without an error is whole"))
    shared = Shared(case, writers := case.draw.randint(2, 4))
    if looks_at == "each save succeeds":
        times = [case.draw.randint(2, 5) for _ in range(writers)]
    else:
        times = [1] * writers
    errors = together(
        *(
            repeat(case.draw, times[number], lambda n=number: shared.save(n))
            for number in range(writers)
        )
    )
    if errors and looks_at == "each save succeeds":
        raise Fault(f"a save failed: {errors[0]}")
    if len(errors) < writers:
        shared.check()


@attack("A", 1, weight=4)
def processes_save_to_one_folder(case: Case) -> None:
    """The same with processes."""
    looks_at = case.turn(("the checkpoint", "the user's files"))
    shared = Shared(case, writers := case.draw.randint(2, 3))

    def save(number: int) -> None:
        """Save; what becomes of the user's files counts also if a save fails."""
        try:
            shared.save(number)
        except Exception:
            if looks_at == "the checkpoint":
                raise

    with contextlib.ExitStack() as running:
        for number in range(writers):
            work = repeat(case.draw, case.draw.randint(2, 6), lambda n=number: save(n))
            running.enter_context(process(work))
    if shared.existing and looks_at == "the user's files":
        check_users_files(shared.target)
    shared.check()


@attack("A", 1, weight=2)
def killed_savers_leave_nothing_that_stays(case: Case) -> None:
    """Some of several processes are killed; the next save removes what they left, nothing else."""
    shared = Shared(case, 3)
    reading, writing = os.pipe()
    children = []
    for number in range(3):
        child = os.fork()
        if child == 0:
            while True:
                shared.save(number)
        children.append(child)
    os.close(writing), os.close(reading)
    for child in children:
        time.sleep(case.draw.uniform(0, 0.02))
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
    if shared.existing:
        check_whole(shared.target)
    strangers = [".out.saving-by-hand", "out.saving", ".out.replaced.zip", ".outer.saving-1"]
    for name in strangers:
        (shared.parent / name).mkdir()
        (shared.parent / name / "mine").touch()
    shared.save(0)
    for name in strangers:
        if not (shared.parent / name / "mine").exists():
            raise Fault(f"the user's folder {name} is lost")
        shutil.rmtree(shared.parent / name)
    if check_whole(shared.target) != 0:
        raise Fault("a save that succeeded did not replace the checkpoint")
    shared.check()


@attack("A", 1, weight=2)
def saves_to_a_folder_and_to_one_inside_it(case: Case) -> None:
    """Each of the two checkpoints stays whole; a save may be refused."""
    outer = case.folder / "out"
    inner = outer / case.draw.choice(("best", "runs/best"))
    models = [new_model(number) for number in range(4)]
    models[0].save_hf(outer, max_shard_size=1)
    models[1].save_hf(inner, max_shard_size=1)
    sizes = [case.draw.choice((1, 10**9)) for _ in models]

    def save(number: int) -> None:
        with contextlib.suppress(SaveError):
            models[number].save_hf((outer, inner)[number % 2], max_shard_size=sizes[number])

    with contextlib.ExitStack() as running:
        for number in range(4):
            running.enter_context(process(repeat(case.draw, 4, lambda n=number: save(n))))
    if check_whole(outer, False) % 2 or not check_whole(inner, False) % 2:
        raise Fault("a folder holds the other's checkpoint")
    check_beside(
        outer,
        *os.listdir(outer / "none") if (outer / "none").exists() else (),
        *(n for n in os.listdir(outer) if ".saving-" not in n),
    )


def load_anyhow(draw: random.Random, folder: Path) -> Callable[[], int]:
    """Return a function that loads a checkpoint, in one of the ways, and returns its number."""
    link = folder.parent.parent / f"link-{draw.random()}"
    link.symlink_to(folder)
    path = draw.choice((folder, link))
    if draw.random() < 0.7 or not hasattr(ligermodels, "load_pretrained"):
        return lambda: number_of(AutoLiger.from_hf(path))

    def into_a_module() -> int:
        class Parts(nn.Module):
            def __init__(self) -> None:
                super().__init__()
                self.norm = nn.RMSNorm(16)
                self.layers = nn.ModuleList([nn.Module()])
                self.layers[0].mlp = nn.Module()
                self.layers[0].mlp.down_proj = nn.Linear(16, 16, bias=False)

        parts = Parts()
        ligermodels.load_pretrained(parts, path)
        found = {float(value) for p in parts.parameters() for value in p.view(-1)}
        if len(found) != 1:
            raise Fault(f"the weights are of several models: {found}")
        return int(found.pop())

    return into_a_module


def or_refused(load: Callable[[], int]) -> Callable[[], None]:
    def run() -> None:
        with contextlib.suppress(LigerError):
            load()

    return run


@attack("A", 2, weight=4)
def loads_while_others_save(case: Case) -> None:
    """A load gets one whole version, or is refused, however the folder is replaced meanwhile."""
    case.label("another error", mixed := "config and weights of several versions")
    families = (LigerLlama, LigerQwen2) if case.draw.random() < 0.4 else (LigerLlama,)
    shared = Shared(case, 2, families)
    if not shared.existing:
        shared.save(0)
    loads = [load_anyhow(case.draw, shared.target) for _ in range(2)]
    with contextlib.ExitStack() as running:
        for number in range(2):
            work = repeat(case.draw, 12, lambda n=number: shared.save(n))
            running.enter_context(process(work))
        if errors := together(*(repeat(case.draw, 8, or_refused(load)) for load in loads)):
            kind = mixed if any("Fault" in error for error in errors) else "another error"
            raise Fault(f"a load failed: {errors[0]}", kind)
    shared.check()


@attack("A", 2)
def loads_while_a_link_changes(case: Case) -> None:
    """A link that leads to one checkpoint and then to another gives one of them."""
    sources = [make_source(case.folder / f"version-{number}", number) for number in range(2)]
    current = case.folder / "current"
    current.symlink_to(sources[0])

    def flip() -> None:
        for number in range(150):
            aside = case.folder / "aside"
            aside.symlink_to(sources[number % 2])
            os.replace(aside, current)
            time.sleep(0.0005)

    with process(flip):
        for _ in range(15):
            or_refused(lambda: number_of(AutoLiger.from_hf(current)))()


@attack("A", 2)
def a_save_writes_the_tokenizer_that_was_loaded(case: Case) -> None:
    """What is saved with a model is of its version, although its source was replaced since."""
    source, out = case.folder / "source", case.folder / "out"
    make_source(source, 1)
    model = AutoLiger.from_hf(source)
    AutoLiger.from_hf(make_source(case.folder / "other", 2)).save_hf(source)
    where = case.draw.choice((source, out))
    with contextlib.suppress(SaveError):
        model.save_hf(where)
    if where.exists():
        check_whole(where)


@attack("A", 3)
def killed_between_two_renames(case: Case) -> None:
    """A save that is killed at any moment leaves a checkpoint that the next load finds."""
    if not sandbox.without_exchange():
        raise Skip("no seccomp")
    target = case.folder / "parent" / "out"
    models = [new_model(number) for number in range(2)]
    models[0].save_hf(target)
    add_users_files(target)
    calls = case.draw.randint(1, 5)

    def rename(*args: object, count: list[int] = [0], original: Callable = os.rename) -> None:  # noqa: B006
        count[0] += 1
        if count[0] == calls:
            os.kill(os.getpid(), signal.SIGKILL)
        original(*args)

    child = os.fork()
    if child == 0:
        os.rename = rename
        for number in (1, 0, 1):
            models[number].save_hf(target)
        os._exit(0)
    os.waitpid(child, 0)
    check_whole(target, False)
    models[1].save_hf(target)
    if check_whole(target, False) != 1:
        raise Fault("the save after a killed one is not there")
    check_users_files(target)
    check_beside(target.parent, "out")


@attack("A", 4, weight=2)
def a_volume_inside_the_target_keeps_its_files(case: Case) -> None:
    """Whatever is mounted at or in the folder keeps its files and its place."""
    if not sandbox.own_mounts():
        raise Skip("no mounts")
    target, volume = case.folder / "out", case.folder / "volume"
    source = make_source(case.folder / "source", 1)
    if case.draw.random() < 0.5:
        new_model(0).save_hf(target)
    place = target / case.draw.choice((".", "data", "runs/a b/data", "additional_chat_templates"))
    place.mkdir(parents=True, exist_ok=True)
    volume.mkdir()
    (volume / "deep").mkdir()
    mounted = case.draw.random() < 0.5 and sandbox.mount_tmpfs(place)
    if not mounted and not sandbox.mount_folder(volume, place):
        raise Skip("no mounts")
    for name in ("mine", "deep/mine"):
        (place / name).parent.mkdir(exist_ok=True)
        (place / name).write_text("mine")
    before = snapshot(place)
    if case.draw.random() < 0.5:
        case.cli("convert", source, target, "--overwrite").fine_or_one_line()
    else:
        with contextlib.suppress(SaveError):
            AutoLiger.from_hf(source).save_hf(target)
    after = snapshot(place)
    if {name: after.get(name) for name in before} != before:
        raise Fault("files of the mounted volume are lost")


@attack("A", 4, weight=2)
def convert_keeps_a_users_files(case: Case) -> None:
    """Without --overwrite, convert removes and changes no file that is in TARGET."""
    draw = case.draw
    source = make_source(case.folder / "source", 1)
    target = case.folder / "out"
    target.mkdir()
    weights = (WEIGHTS, INDEX, "model-00001-of-00007.safetensors")
    vocabulary = ("vocab.json", "merges.txt")
    kinds = {
        "weights, no config.json": weights,
        "tokenizer, no config.json": [x for x in TOKENIZER_FILES if x not in vocabulary],
        "vocabulary, no config.json": vocabulary,
        "any": (*TOKENIZER_FILES, *weights, "config.json"),
    }
    kind = case.turn(list(kinds))
    for name in draw.sample(kinds[kind], draw.randint(kind != "any", min(3, len(kinds[kind])))):
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text(draw.choice(("mine", '{"weight_map": {"a": "my.safetensors"}}')))
    for name in draw.sample(("my.safetensors", "a.gguf", "notes", "sub/vocab.json"), 2):
        (target / name).parent.mkdir(exist_ok=True)
        (target / name).write_text("mine")
    before = snapshot(target)
    if kind == "any" and draw.random() < 0.5:
        os.chdir(target)
        result = case.cli("convert", source, ".", *["--overwrite"] * draw.randint(0, 1))
    else:
        result = case.cli("convert", source, target)
    result.fine_or_one_line()
    after = snapshot(target)
    if lost := [name for name in before if after.get(name) != before[name]]:
        raise Fault(f"exit code {result.code}, and lost or changed: {lost}")


@attack("A", 5, weight=2)
def nothing_that_is_not_finite_is_saved(case: Case) -> None:
    """One value that is not finite is refused, and the message names its parameter."""
    model = new_model(1).to(case.draw.choice((torch.float32, torch.bfloat16, torch.float16)))
    target = case.folder / "out"
    if case.draw.random() < 0.5:
        make_source(target, 0)
    before = snapshot(case.folder)
    name = case.draw.choice([name for name, _ in model.named_parameters()])
    with torch.no_grad():
        weight = model.get_parameter(name).view(-1)
        kind = case.turn(("nan", "inf", "-inf"))
        weight[case.draw.randrange(len(weight))] = float(kind)
    try:
        model.save_hf(target, max_shard_size=case.draw.choice((1, 10**9)))
    except SaveError as error:
        if name not in str(error) or "allow_nonfinite" not in str(error):
            raise Fault(f"the message does not say where, or no way out: {error}") from None
    else:
        raise Fault(f"save_hf wrote {kind} without a word")
    if snapshot(case.folder) != before:
        raise Fault("a refused save changed something")


@attack("A", 5)
def a_cast_that_overflows_is_not_saved(case: Case) -> None:
    """A value that the dtype of the export cannot hold is refused, by both ways to convert."""
    source = case.folder / "source"
    model = new_model(1)
    name = case.draw.choice([name for name, _ in model.named_parameters()])
    with torch.no_grad():
        weight = model.get_parameter(name).view(-1)
        weight[case.draw.randrange(len(weight))] = case.draw.choice((7e4, -1e5, 3e38))
    model.save_hf(source)
    target = case.folder / "out"
    if case.turn(("convert", "save_hf")) == "convert":
        case.cli("convert", source, target, "--dtype", "float16").one_line()
    else:
        with contextlib.suppress(SaveError):
            model.half().save_hf(target)
            raise Fault("save_hf wrote an infinity without a word")
    if target.exists():
        raise Fault("a refused save left a folder")


@attack("A", 5)
def a_save_without_its_source_drops_nothing(case: Case) -> None:
    """Tokenizer files that are gone since the load are saved, or their absence is an error."""
    gone = case.turn(("the folder is gone", "files are gone"))
    source = make_source(case.folder / "source", 1)
    for name in case.draw.sample(TOKENIZER_FILES, 4):
        (source / name).parent.mkdir(exist_ok=True)
        (source / name).write_text("{}")
    names = [name for name in TOKENIZER_FILES if (source / name).exists()]
    before = {name: (source / name).read_bytes() for name in names}
    model = AutoLiger.from_hf(source)
    if gone == "the folder is gone":
        shutil.rmtree(source)
    else:
        for name in case.draw.sample(names, case.draw.randint(1, len(names))):
            (source / name).unlink()
    target = case.folder / "out"
    try:
        model.save_hf(target)
    except SaveError:
        return
    for name in names:
        if not (target / name).exists() or (target / name).read_bytes() != before[name]:
            raise Fault(f"the save dropped {name} without a word")


@attack("A", 6)
def a_checkpoint_is_cut_while_it_is_read(case: Case) -> None:
    """A load of weights that are cut meanwhile ends with an error, not with a signal."""
    source = case.folder / "source"
    new_model(1).save_hf(source)
    file = source / WEIGHTS
    whole = file.read_bytes()

    def cut() -> None:
        for _ in range(60):
            os.truncate(file, case.draw.randrange(len(whole)))
            time.sleep(0.0003)
            file.write_bytes(whole)
            time.sleep(0.0003)

    with process(cut):
        for _ in range(10):
            with contextlib.suppress(LigerError):
                number_of(AutoLiger.from_hf(source))


ODD = ("dead link", "loop", "folder", "pipe", "socket", "device", "link to a device", "no access")


def make_odd(kind: str, path: Path) -> None:
    """Put something that is no readable file at a path."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with contextlib.suppress(FileNotFoundError):
        path.unlink()
    if kind == "dead link":
        path.symlink_to("nowhere")
    elif kind == "loop":
        path.symlink_to(path.name)
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o600)
    elif kind == "device" and os.geteuid() == 0:
        os.mknod(path, stat.S_IFCHR | 0o666, os.makedev(1, 5))  # /dev/zero
    elif kind == "no access":
        path.write_text("{}")
        path.chmod(0)
    else:
        path.symlink_to("/dev/zero")


@contextlib.contextmanager
def as_a_user(case: Case) -> Iterator[None]:
    """Give up the rights of root, to which no file is unreadable."""
    root = os.geteuid() == 0
    if root:
        case.folder.chmod(0o755)
        os.seteuid(65534)
    try:
        yield
    finally:
        if root:
            os.seteuid(0)


@attack("A", 7, weight=4)
def an_odd_file_of_a_checkpoint_is_not_absent(case: Case) -> None:
    """A file that is there but cannot be read stops a load and names itself, and nothing hangs."""
    source = make_source(case.folder / "source", 1)
    kind = case.turn(ODD)
    if case.seed // len(ODD) % 2:
        name = "generation_config.json"
    else:
        name = case.draw.choice((*TOKENIZER_FILES, "config.json", WEIGHTS, INDEX))
    case.label(kind, f"{name}: {kind}")
    make_odd(kind, source / name)
    target = case.folder / "out"
    target.mkdir(mode=0o777)
    target.chmod(0o777)
    way = case.draw.choice(("load", "convert", "inspect", "verify"))
    with as_a_user(case):
        if way == "load":
            try:
                AutoLiger.from_hf(source)
            except LigerError as error:
                said = str(error)
            else:
                raise Fault(f"{name} is a {kind} and counts as absent")
        else:
            arguments = {
                "convert": ("convert", source, target / "new"),
                "inspect": ("inspect", source),
                "verify": ("convert", source, "--verify"),
            }[way]
            result = case.cli(*arguments)
            result.one_line()
            said = result.err
    if name not in said:
        raise Fault(f"the message does not name {name}, a {kind}: {said}")


@attack("A", 7, weight=2)
def odd_files_in_the_target_are_kept(case: Case) -> None:
    """A save keeps whatever lies in the folder, or is refused and changes nothing."""
    target = case.folder / "parent" / "out"
    existing = case.draw.random() < 0.7
    if existing:
        make_source(target, 0)
    target.mkdir(parents=True, exist_ok=True)
    odd = {f"{where}{kind}" for where in ("", "sub/") for kind in ODD if case.draw.random() < 0.5}
    for name in odd:
        make_odd(name.rpartition("/")[2], target / name)
    before = snapshot(target)
    model = new_model(1)
    user = case.draw.random() < 0.4
    if user:
        target.parent.chmod(0o777)
        if case.draw.random() < 0.5:
            os.chown(target, 65534, 65534)
    refused = False
    with as_a_user(case) if user else contextlib.nullcontext():
        try:
            model.save_hf(target)
        except SaveError:
            refused = True
    after = snapshot(target)
    kept = before if refused else {name: before[name] for name in odd}
    if lost := [name for name in kept if after.get(name, "") != before[name]]:
        raise Fault(f"{'refused, but ' * refused}lost: {lost}")
    if not refused and check_whole(target, False) != 1:
        raise Fault("the save is not there")
    check_beside(target.parent, "out")


@attack("A", 7)
def an_odd_file_where_a_save_writes(case: Case) -> None:
    """What stands where the checkpoint's own files go is replaced, or the save is refused."""
    target = case.folder / "parent" / "out"
    make_source(target, 0)
    name = case.draw.choice((*TOKENIZER_FILES, "config.json", WEIGHTS, INDEX))
    kind = case.draw.choice(ODD)
    make_odd(kind, target / name)
    outside = case.folder / "nowhere"
    model = AutoLiger.from_hf(make_source(case.folder / "source", 1))
    model.save_hf(target)
    if check_whole(target) != 1:
        raise Fault("the save is not there")
    if outside.exists() or (target / "nowhere").exists():
        raise Fault("the save wrote through a link")
    check_beside(target.parent, "out")


@attack("A", 7)
def an_odd_target_is_refused(case: Case) -> None:
    """A target that is no folder is one line, and stays as it is."""
    source = make_source(case.folder / "source", 1)
    kind = case.draw.choice((*ODD, "file", "below a file", "null byte", "long name"))
    target = case.folder / "out"
    if kind in ODD:
        make_odd(kind, target)
    elif kind in ("file", "below a file"):
        target.write_text("mine")
        target /= "" if kind == "file" else "sub/out"
    elif kind == "null byte":
        target = case.folder / "a\0b"
    else:
        target = case.folder / ("x" * 300)
    before = snapshot(case.folder)
    if case.draw.random() < 0.5 and kind != "null byte":
        case.cli("convert", source, target, *["--overwrite"] * case.draw.randint(0, 1))
    else:
        with contextlib.suppress(SaveError):
            AutoLiger.from_hf(source).save_hf(target)
    after = snapshot(case.folder)
    if any(after.get(name) != value for name, value in before.items()):
        raise Fault(f"what lay in the way, a {kind}, was changed")


@attack("A", 3, weight=2)
def a_limit_of_the_system_leaves_the_old_checkpoint(case: Case) -> None:
    """Whatever runs out (disk, file size, open files, memory), the old or the new one is whole."""
    draw = case.draw
    target = case.folder / "disk" / "out"
    target.parent.mkdir()
    models = [new_model(number) for number in range(2)]
    kind = case.turn(("disk", "file size", "open files", "memory"))
    if kind == "disk" and not (
        sandbox.own_mounts()
        and sandbox.mount_tmpfs(target.parent, size=4096 * draw.randint(14, 40))
    ):
        raise Skip("no mounts")
    add_users_files(target)
    try:
        models[0].save_hf(target, max_shard_size=draw.choice((1, 10**9)))
    except SaveError:
        return  # The disk is too small for one checkpoint.
    before = snapshot(target)

    def save_and_load() -> None:
        limits = {
            "file size": (resource.RLIMIT_FSIZE, draw.randint(1, 30_000)),
            "open files": (resource.RLIMIT_NOFILE, draw.randint(3, 30)),
            "memory": (resource.RLIMIT_AS, address_space() + draw.randint(0, 3_000_000)),
        }
        if kind in limits:
            number, limit = limits[kind]
            resource.setrlimit(number, (limit, resource.getrlimit(number)[1]))
        with contextlib.suppress(SaveError, MemoryError):
            models[1].save_hf(target, max_shard_size=draw.choice((1, 10**9)))
        with contextlib.suppress(LigerError, MemoryError, RuntimeError, FileNotFoundError):
            AutoLiger.from_hf(target)

    with process(save_and_load):
        pass
    if snapshot(target) != before and check_whole(target, False) != 1:
        raise Fault("neither the old nor the new checkpoint is whole")
    check_users_files(target)
    if kind in ("open files", "memory"):
        # To remove a folder takes some, too. The next save does it.
        models[1].save_hf(target)
    check_beside(target.parent, "out")


@attack("E", 18)
def convert_to_the_name_of_a_file(case: Case) -> None:
    """A target with the ending of a file is pointed out; no folder of that name is made."""
    source = make_source(case.folder / "source", 1)
    name = case.draw.choice(("x.gguf", "model.safetensors", "w.bin", "A.GGUF", "a.b.pt", "c.json"))
    case.cli("convert", source, case.folder / name).one_line(name)
    if (case.folder / name).exists():
        raise Fault(f"convert made a folder {name}")

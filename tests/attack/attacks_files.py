"""Attacks with every kind of file, in the place of every file of a checkpoint, in every use."""

from __future__ import annotations

import contextlib
import json
import os
import stat
from pathlib import Path

import ligermodels
from ligermodels import AutoLiger, LigerError, SaveError
from tests import sandbox
from tests.attack.attacks_saves import as_a_user
from tests.attack.attacks_training import LIMIT, Tiny
from tests.attack.harness import Case, Fault, Skip, attack
from tests.training.tiny_run import TEMPLATE

READABLE = ("link", "mounted")
KINDS = (*READABLE, "dead link", "loop", "folder", "pipe", "socket", "device", "another user's")
USES = ("load", "save", "convert", "finetune", "generate")
NAMES = (
    *("config.json", "generation_config.json", "model.safetensors", "tokenizer.json"),
    *("tokenizer_config.json", "special_tokens_map.json", "chat_template.jinja"),
)


def put(kind: str, path: Path, aside: Path) -> None:
    """Put something of a kind in the place of a file; `aside` is a free path for the file."""
    if kind == "another user's":
        path.chmod(0o600)
        return
    path.rename(aside)
    if kind == "mounted":
        path.touch()
        if not (sandbox.own_mounts() and sandbox.mount_folder(aside, path)):
            raise Skip("no mounts")
    elif kind == "folder":
        path.mkdir()
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        os.mknod(path, stat.S_IFSOCK | 0o666)
    else:
        places = {"link": aside, "dead link": "nowhere", "loop": path.name, "device": "/dev/zero"}
        path.symlink_to(places[kind])


@attack("A", 7, weight=6, seconds=LIMIT)
def any_kind_of_file_in_any_use(case: Case) -> None:
    """What can be read is read; anything else is refused by name, and a save harms nothing."""
    kind, use = KINDS[case.seed % len(KINDS)], USES[case.seed // len(KINDS) % len(USES)]
    case.label(f"{kind}, {use}")
    tiny, work = Tiny(case), case.folder / "work"
    work.mkdir()
    work.chmod(0o777)  # somebody else may write there, too
    tiny.out = work / "out"
    source, name = tiny.model, case.draw.choice(NAMES)
    (source / "generation_config.json").write_text('{"eos_token_id": 257}')
    (source / "special_tokens_map.json").write_text('{"eos_token": "</s>"}')
    settings = json.loads((source / "tokenizer_config.json").read_text())
    (source / "tokenizer_config.json").write_text(
        json.dumps({key: value for key, value in settings.items() if key != "chat_template"})
    )
    (source / "chat_template.jinja").write_text(TEMPLATE)
    model = AutoLiger.from_hf(source) if use == "save" else None
    put(kind, source / name, case.folder / "aside")
    if use == "save":
        assert model is not None
        save(case, model, source, name, kind)
        return
    said = None
    with as_a_user(case) if kind == "another user's" else contextlib.nullcontext():
        if use == "load":
            try:
                ligermodels.Tokenizer.from_hf(source)
                loaded = AutoLiger.from_hf(source)
                loaded.generate([[5, 6]], max_new_tokens=1)
            except LigerError as error:
                said = str(error)
        else:
            result = {
                "convert": lambda: case.cli("convert", source, work / "new"),
                "finetune": lambda: tiny.start(max_steps=1),
                "generate": lambda: case.cli(
                    "generate", source, "hi", "--chat", "--max-new-tokens", 1, "--device", "cpu"
                ),
            }[use]()
            result.fine_or_one_line()
            said = result.err if result.code else None
    if kind in READABLE:
        if said is not None:
            raise Fault(f"{name} is a file ({kind}), but: {said}")
    elif said is None:
        raise Fault(f"{name} ({kind}) counts as absent")
    elif name not in said:
        raise Fault(f"the message does not name {name} ({kind}): {said}")
    if said is not None and (written := os.listdir(work)):
        raise Fault(f"{name} ({kind}) is refused, but this was written: {written}")


def save(case: Case, model: ligermodels.DecoderModel, target: Path, name: str, kind: str) -> None:
    """Save to the folder that the model came from, which has changed since."""
    (target / "mine").write_text("mine")
    aside = case.folder / "aside"
    before = aside.read_bytes() if aside.exists() else None
    names = set(os.listdir(target))
    if kind == "another user's" and case.draw.random() < 0.5 and os.geteuid() == 0:
        os.chown(target, 65534, 65534)
    user = as_a_user(case) if kind == "another user's" else contextlib.nullcontext()
    refused = False
    with user:
        try:
            model.save_hf(target)
        except SaveError:
            refused = True
    if before is not None and aside.read_bytes() != before:
        raise Fault(f"the save of {name} wrote through a {kind}")
    if (target / "mine").read_text() != "mine" or names - set(os.listdir(target)):
        raise Fault(f"{name} is a {kind}, and a save lost files: {sorted(os.listdir(target))}")
    if not refused:
        AutoLiger.from_hf(target)
    if left := [entry for entry in os.listdir(case.folder) if entry.startswith(".base.")]:
        raise Fault(f"left beside the target: {left}")

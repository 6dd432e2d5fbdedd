"""Attacks by hubs that lie, hubs that break, and damaged caches."""

from __future__ import annotations

import json
import os
import random
import re
import shutil
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from unittest import mock

import torch
from huggingface_hub import constants
from safetensors.torch import save

import ligermodels
from tests.attack.harness import Case, Fault, attack
from tests.attack.loopback_hub import COMMIT, REPO, Hub, loopback_hub
from tests.training.tiny_run import make_checkpoint

OTHER = COMMIT[::-1]
HEADS = save({"0.0.linear.weight": torch.ones(64, 64), "0.0.linear.bias": torch.ones(64)})


def make_repository(case: Case) -> Path:
    """Make a checkpoint of one file or of several shards."""
    folder = make_checkpoint(case.folder / "checkpoint")
    if case.draw.random() < 0.5:
        model = ligermodels.AutoLiger.from_hf(folder)
        model.save_hf(folder, max_shard_size=100_000)
    if case.draw.random() < 0.3:
        (folder / "medusa_lm_head.safetensors").write_bytes(HEADS)
    return folder


def load(case: Case, truth: dict[str, bytes], revision: str | None = None) -> str | None:
    """Load from the hub; return the message of the refusal, or None if what came is the truth."""
    before = listing_of(case.folder, "cache")
    try:
        model = ligermodels.AutoLiger.from_hf(REPO, revision=revision)
    except ligermodels.LigerError as error:
        return str(error)
    finally:
        if listing_of(case.folder, "cache") != before:
            raise Fault("the load wrote outside the cache")
    folder = Path(model.source_folder)
    if not folder.is_relative_to(case.folder / "cache"):
        raise Fault(f"the model came from {folder}")
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and path.read_bytes() != truth.get(name):
            raise Fault(f"a model was loaded whose {name} is not what its hub says it is")
    names = {path.relative_to(folder).as_posix() for path in folder.rglob("*")}
    if lacking := needed(truth) - names:
        raise Fault(f"a model was loaded without its files {sorted(lacking)}")
    return None


def needed(truth: dict[str, bytes]) -> set[str]:
    return {"config.json", "tokenizer.json", "tokenizer_config.json"} | {
        name for name in truth if name.endswith(".safetensors")
    }


def listing_of(folder: Path, without: str) -> list[str]:
    return sorted(
        str(path.relative_to(folder))
        for path in folder.rglob("*")
        if path.relative_to(folder).parts[0] != without
    )


def truth_of(hub: Hub) -> dict[str, bytes]:
    return {name: file.content for name, file in hub.files.items()}


def flipped(draw: random.Random, content: bytes) -> bytes:
    at = draw.randrange(len(content))
    return content[:at] + bytes([content[at] ^ 1 << draw.randrange(8)]) + content[at + 1 :]


# Each lie changes a hub, and returns words of which the message must have one.
def lie_about_the_commit(case: Case, hub: Hub) -> list[str]:
    outside = case.folder / "outside"
    hub.api["sha"] = case.draw.choice(
        [str(outside), f"../../../{outside.name}", "..", ".", "", "main", None, 7, COMMIT[:39]]
        + [COMMIT.upper(), COMMIT + "0", COMMIT + "/x", {"a": 1}, [COMMIT], "a" * 5000, "\n"]
    )
    return ["commit"]


def lie_about_bytes(case: Case, hub: Hub) -> list[str]:
    name = case.draw.choice(sorted(needed(truth_of(hub))))
    hub.files[name].content = flipped(case.draw, hub.files[name].content)
    return [name]


def lie_about_a_checksum(case: Case, hub: Hub) -> list[str]:
    name = case.draw.choice(sorted(needed(truth_of(hub))))
    file = hub.files[name]
    wrong = "".join(case.draw.choices("0123456789abcdef", k=64))
    kinds = ["blobId"]
    if name.endswith(".safetensors"):
        kinds = ["etag", "sha256"]
    kind = case.draw.choice(kinds)
    if kind == "etag":
        file.etag = wrong
    elif kind == "sha256":
        file.said["lfs"]["sha256"] = wrong
    else:
        file.said["blobId"] = wrong[:40]
    return [name]


def lie_about_a_size(case: Case, hub: Hub) -> list[str]:
    name = case.draw.choice(sorted(needed(truth_of(hub))))
    said = hub.files[name].said
    wrong = case.draw.choice([0, 1, said["size"] - 1, said["size"] + 1, 10**15])
    if "lfs" in said and case.draw.random() < 0.5:
        said["lfs"]["size"] = wrong
    else:
        said["size"] = wrong
    return [name]


def list_a_file_without_sending_it(case: Case, hub: Hub) -> list[str]:
    name = case.draw.choice(sorted(needed(truth_of(hub))))
    if case.draw.random() < 0.5:
        hub.absent.add(name)  # The tree leaves it out, but the file can be had.
        return []
    hub.files[name].commit = case.draw.choice([OTHER, "../../x", str(case.folder / "outside")])
    return [name]


def cut_a_file(case: Case, hub: Hub) -> list[str]:
    name = case.draw.choice(sorted(needed(truth_of(hub))))
    file = hub.files[name]
    if case.draw.random() < 0.5:
        file.cut = case.draw.randrange(len(file.content))
    else:
        file.content = file.content[: case.draw.randrange(len(file.content))]
    return [name, "download"]


def list_wild_names(case: Case, hub: Hub) -> list[str]:
    outside = str(case.folder / "outside")
    for name in case.draw.sample(
        [outside, "../../../outside", "additional_chat_templates/../../x", "", ".", "/", "a\0b"]
        + ["CONFIG.JSON", "model.safetensors/x", "*", "[!a]*", "\ud800", "x" * 5000, "~", "-rf"],
        k=4,
    ):
        hub.files[name] = replace(hub.files["config.json"])
    return []


def lie_about_bytes_of_weights(case: Case, hub: Hub) -> list[str]:
    """Send other bytes than the hub's own SHA-256 says."""
    name = case.draw.choice([x for x in sorted(hub.files) if x.endswith(".safetensors")])
    hub.files[name].content = flipped(case.draw, hub.files[name].content)
    return [name]


def call_a_path_the_commit(case: Case, hub: Hub) -> list[str]:
    hub.api["sha"] = str(case.folder / "outside")
    return ["commit"]


LIES: list[Callable[[Case, Hub], list[str]]] = [
    call_a_path_the_commit,
    lie_about_the_commit,
    lie_about_bytes,
    lie_about_bytes_of_weights,
    lie_about_a_checksum,
    lie_about_a_size,
    list_a_file_without_sending_it,
    cut_a_file,
    list_wild_names,
]


@attack("D", 17, weight=6)
def a_lie_is_found_out_and_leaves_no_trace(case: Case) -> None:
    """A lie is refused with the file's name, and the truth loads afterwards."""
    checkpoint = make_repository(case)
    with loopback_hub(checkpoint, case.folder / "cache") as hub:
        truth = truth_of(hub)
        cached = case.draw.random() < 0.2
        if cached and load(case, truth) is not None:
            raise Fault("the truth was refused")
        lie = LIES[case.seed % len(LIES)]
        case.label(lie.__name__)
        words = lie(case, hub)
        said = load(case, truth)
        if words and not cached:
            if said is None:
                raise Fault(f"a lie about {words} was not found out")
            if not any(word in said for word in words):
                raise Fault(f"the message names none of {words}: {said}")
            if "no connection" in said:
                raise Fault(f"there was a connection: {said}")
        hub = swapped(case, hub, checkpoint)
        if (said := load(case, truth)) is not None:
            raise Fault(f"the truth is refused after a lie: {said}")


def swapped(case: Case, hub: Hub, checkpoint: Path) -> Hub:
    """Let the hub tell the truth from now on."""
    honest = Hub(checkpoint)
    honest.server.server_close()
    hub.files, hub.api, hub.absent, hub.errors = honest.files, honest.api, set(), {}
    return hub


@attack("D", 17, weight=2)
def a_commit_that_was_asked_for_is_the_one_that_comes(case: Case) -> None:
    """A hub that answers with another commit than the one that was asked for is refused."""
    with loopback_hub(make_repository(case), case.folder / "cache") as hub:
        hub.api["sha"] = "".join(case.draw.choices("0123456789abcdef", k=40))
        for file in hub.files.values():
            file.commit = hub.api["sha"]
        said = load(case, truth_of(hub), revision=COMMIT)
        if said is None or "commit" not in said:
            raise Fault(f"another commit came without a word: {said}")


# What a broken hub answers, and the words of which the message must have one.
HTML = b"<html><body>Welcome to our network! Please log in.</body></html>"
BROKEN: dict[str, tuple[tuple[int, dict[str, str], bytes], list[str]]] = {
    "401": (
        (401, {"X-Error-Message": "Invalid credentials in Authorization header"}, b""),
        ["401"],
    ),
    "403": ((403, {"X-Error-Message": "Forbidden"}, b""), ["403"]),
    "404": ((404, {}, b""), ["404", "no such"]),
    "418": ((418, {}, b""), ["418"]),
    "429": ((429, {}, b""), ["429"]),
    "500": ((500, {}, b""), ["500"]),
    "502": ((502, {}, HTML), ["502"]),
    "503": ((503, {}, b""), ["503"]),
    "504": ((504, {}, b""), ["504"]),
    "html": ((200, {"Content-Type": "text/html"}, HTML), ["cannot be understood", "download"]),
    "empty": ((200, {}, b""), ["cannot be understood", "download"]),
    "list": ((200, {}, b"[1, 2]"), ["cannot be understood", "download"]),
    "deep": ((200, {}, b"[" * 100000), ["cannot be understood", "download"]),
    "types": (
        (200, {}, json.dumps({"id": 3, "sha": COMMIT, "siblings": "none"}).encode()),
        ["cannot be understood", "download"],
    ),
    "no id": (
        (200, {}, json.dumps({"sha": COMMIT, "siblings": []}).encode()),
        ["cannot be understood", "download", "missing on the hub"],
    ),
    "no names": (
        (200, {}, json.dumps({"id": REPO, "sha": COMMIT, "siblings": [{}]}).encode()),
        ["cannot be understood", "download"],
    ),
    "number": (
        (200, {}, json.dumps({"id": REPO, "sha": COMMIT, "siblings": [{"rfilename": 3}]}).encode()),
        ["cannot be understood", "download", "missing on the hub"],
    ),
}


@attack("D", 17, weight=3)
def a_broken_hub_is_told_from_a_missing_connection(case: Case) -> None:
    """The message says what the hub answered; a cached copy is used if the API does not answer."""
    with loopback_hub(make_repository(case), case.folder / "cache") as hub:
        truth = truth_of(hub)
        cached = case.draw.random() < 0.3
        if cached and load(case, truth) is not None:
            raise Fault("the truth was refused")
        answer, words = BROKEN[case.turn(sorted(BROKEN))]
        where = "api" if cached else case.draw.choice(["api", "api", "tree", "file"])
        if (where == "tree" and answer[0] == 200) or (where == "file" and answer[0] in (200, 404)):
            where = "api"
        hub.errors[where] = answer
        result = case.cli("inspect", REPO)
        if "Traceback" in result.err or "no connection" in result.err:
            raise Fault(f"the hub did answer: {result.err[-400:]}")
        if result.code == 2:
            result.one_line()
            if where == "api" and not any(word in result.err for word in words):
                raise Fault(f"the message has none of {words}: {result.err}")
        elif where == "api" and not cached:
            raise Fault(f"exit code {result.code} although the hub answered nonsense")
        hub.errors.clear()
        if (said := load(case, truth)) is not None:
            raise Fault(f"the truth is refused after an error: {said}")


@attack("D", 17, weight=3)
def a_damaged_cache_is_healed(case: Case) -> None:
    """With a connection it is downloaded again. Without, the message says which file to delete."""
    with loopback_hub(make_repository(case), case.folder / "cache") as hub:
        truth = truth_of(hub)
        if load(case, truth) is not None:
            raise Fault("the truth was refused")
        snapshot = next((case.folder / "cache").rglob("snapshots")) / COMMIT
        blob = (snapshot / case.draw.choice(sorted(needed(truth)))).resolve()
        content = blob.read_bytes()
        kind = case.turn(["cut", "empty", "gone", "longer"])
        if kind == "gone":
            blob.unlink()
        else:
            cut = case.draw.randrange(len(content))
            blob.write_bytes({"cut": content[:cut], "empty": b"", "longer": content + b" "}[kind])
        if case.draw.random() < 0.5:
            with mock.patch.object(constants, "HF_HUB_OFFLINE", True):
                said = load(case, truth)
            if said is None:
                raise Fault(f"a cached file that is {kind} was loaded without a word")
            if kind != "gone":
                named = re.search(r"delete (\S+)", said)
                if named is None or Path(named[1]) != blob:
                    raise Fault(f"the message does not say which file to delete: {said}")
                blob.unlink()
            elif "unset HF_HUB_OFFLINE" not in said:
                raise Fault(f"the message shows no way out: {said}")
        if (said := load(case, truth)) is not None:
            raise Fault(f"a damaged cache is refused for ever: {said}")


@attack("D", 17, weight=2)
def an_incomplete_cache_does_not_count_as_the_whole(case: Case) -> None:
    """A file that nobody downloaded is not taken for a file that the repository lacks."""
    checkpoint = make_repository(case)
    (checkpoint / "generation_config.json").write_text('{"eos_token_id": [3, 5]}')
    with loopback_hub(checkpoint, case.folder / "cache") as hub:
        import huggingface_hub

        left_out = case.turn(["generation_config.json", "tokenizer.json", "tokenizer_config.json"])
        names = [name for name in hub.files if name != left_out]
        for name in names:
            huggingface_hub.hf_hub_download(REPO, name)
        with mock.patch.object(constants, "HF_HUB_OFFLINE", True):
            try:
                ligermodels.AutoLiger.from_hf(REPO)
            except ligermodels.LigerError as error:
                if left_out not in str(error):
                    raise Fault(f"the message does not name {left_out}: {error}") from None
            else:
                raise Fault(f"a model was loaded although {left_out} was never downloaded")


@attack("D", 17, weight=2)
def file_names_are_no_patterns(case: Case) -> None:
    """A shard's name means that file, whatever characters it has."""
    checkpoint = make_checkpoint(case.folder / "checkpoint")
    name = case.turn(
        ["*.safetensors", "model[1].safetensors", "model?.safetensors", "[!x]*.safetensors"]
        + ["model[].safetensors", "m*l.safetensors", "[a-z]odel.safetensors"]
    )
    (checkpoint / "model.safetensors").rename(checkpoint / name)
    keys = list(json.loads((checkpoint / name).read_bytes()[8:].split(b"}}")[0] + b"}}"))
    weight_map = {key: name for key in keys if key != "__metadata__"}
    index = {"metadata": {}, "weight_map": weight_map}
    (checkpoint / "model.safetensors.index.json").write_text(json.dumps(index))
    decoys = {"model1.safetensors", "modelx.safetensors", "modal.safetensors", "model]"}
    for decoy in decoys:
        (checkpoint / decoy).write_bytes(b"a decoy")
    with loopback_hub(checkpoint, case.folder / "cache") as hub:
        truth = {key: value for key, value in truth_of(hub).items() if key not in decoys}
        said = load(case, truth)
        if said is not None and "plain" not in said:
            raise Fault(f"a file with the name {name} is refused with: {said}")
        if decoys & set(hub.sent):
            raise Fault(f"{name} was a pattern: {decoys & set(hub.sent)} came, too")


@attack("A", 4)
def a_revision_stays_in_the_cache(case: Case) -> None:
    """No name of a revision leads to a file outside the repository's part of the cache."""
    checkpoint = make_checkpoint(case.folder / "checkpoint")
    with loopback_hub(checkpoint, case.folder / "cache") as hub:
        (case.folder / "precious").write_text("mine")
        parts = ["..", "..", "..", "x", "precious", "refs", ".", "snapshots", "cache"]
        depth = case.draw.randint(1, 6)
        name = "/".join(case.draw.choice(parts) for _ in range(depth))
        name = case.draw.choice([name, "../" * depth + "precious", str(case.folder / "x")])
        before = listing_of(case.folder, "cache")
        for revision in (name, name.replace("/", "%2F"), name.replace("/", "\\")):
            case.cli("inspect", REPO, f"--revision={revision}").fine_or_one_line()
        if listing_of(case.folder, "cache") != before:
            raise Fault(f"--revision {name} wrote outside the cache")
        for entry in (case.folder / "cache").glob("*"):
            if entry.name not in ("models--some--model", ".locks", "CACHEDIR.TAG"):
                raise Fault(f"--revision {name} wrote {entry.name} beside the repository")
        if (case.folder / "precious").read_text() != "mine":
            raise Fault(f"--revision {name} wrote over a file")
        for kind in ("blobs", "snapshots"):
            for path in (case.folder / "cache" / "models--some--model").glob(f"{kind}/*"):
                if not re.fullmatch(r"[0-9a-f]+", path.name):
                    raise Fault(f"--revision {name} wrote {path}")
        shutil.rmtree(case.folder / "cache", ignore_errors=True)
        assert os.path.isdir(checkpoint), hub

"""Files of a hub are checked against what the hub says of them; damaged ones come again."""

import hashlib
from types import SimpleNamespace

import huggingface_hub
import pytest
from huggingface_hub import constants

from ligermodels.converters import hub_snapshot
from ligermodels.converters.hub import resolve
from ligermodels.converters.hub_snapshot import contradiction, is_damaged
from ligermodels.errors import CheckpointError
from tests.converters.loopback_hub import COMMIT, REPO, loopback_hub


@pytest.fixture
def hub(tmp_path, make):
    folder, _ = make("remote", shards=2)
    with loopback_hub(folder, tmp_path / "cache") as found:
        yield found


def said(size=None, blob_id=None, sha256=None):
    lfs = None if sha256 is None else SimpleNamespace(size=size, sha256=sha256)
    return SimpleNamespace(size=size, blob_id=blob_id, lfs=lfs)


def test_each_claim_of_the_hub_is_compared(tmp_path, subtests):
    content = b"some bytes"
    git_id = hashlib.sha1(b"blob 10\0" + content).hexdigest()
    sha256 = hashlib.sha256(content).hexdigest()
    path = tmp_path / "file.json"
    path.write_bytes(content)
    for claims in (said(), said(10), said(10, git_id), said(10, "0" * 40, sha256), said(None, "x")):
        with subtests.test(str(claims)):
            assert contradiction(path, claims, whole=True) is None
    for claims, words in (
        (said(11), "it has 10 bytes, and the hub says 11"),
        (said("10"), "the hub says '10'"),
        (said(10, "1" * 40), "its git id is"),
        (said(10, git_id, "2" * 64), "its SHA-256 is"),
        (said(10, git_id, 5), "its SHA-256 is"),
    ):
        with subtests.test(words):
            assert words in contradiction(path, claims, whole=True)
    assert contradiction(path, said(10, "1" * 40), whole=False) is None
    assert "was not sent" in contradiction(tmp_path / "absent", said(), whole=False)


@pytest.mark.parametrize("algorithm", ["git", "sha1", "sha256"])
def test_a_cached_file_is_compared_with_the_name_of_its_blob(tmp_path, algorithm):
    content = b"some bytes"
    if algorithm == "git":
        name = hashlib.sha1(b"blob 10\0" + content).hexdigest()
    else:
        name = hashlib.new(algorithm, content).hexdigest()
    blob, link = tmp_path / name, tmp_path / "config.json"
    blob.write_bytes(content)
    link.symlink_to(name)
    assert not is_damaged(link)
    blob.write_bytes(content[:-1])
    assert is_damaged(link)
    blob.rename(tmp_path / "opaque")  # Another server's ETag says nothing of the content.
    link.unlink()
    link.symlink_to("opaque")
    assert not is_damaged(link)
    assert is_damaged(link, said(10))


def test_content_that_contradicts_the_checksum_is_refused_and_removed(hub, tmp_path):
    shard = hub.files["model-00002-of-00002.safetensors"]
    shard.content = shard.content[:-1] + bytes([shard.content[-1] ^ 1])
    with pytest.raises(
        CheckpointError, match=r"model-00002-of-00002.safetensors: the file is not what .*SHA-256"
    ):
        resolve(REPO)
    assert not list((tmp_path / "cache").rglob("model-00002-of-00002.safetensors"))
    assert shard.etag not in {path.name for path in (tmp_path / "cache").rglob("*")}
    shard.content = shard.content[:-1] + bytes([shard.content[-1] ^ 1])
    assert (resolve(REPO) / "model-00002-of-00002.safetensors").read_bytes() == shard.content


def test_an_honest_copy_survives_a_hub_that_lies_later(hub):
    folder = resolve(REPO)
    for name in ("config.json", "model-00001-of-00002.safetensors"):
        file = hub.files[name]
        right, file.said = file.said, {"size": 1, "blobId": "0" * 40}
        with pytest.raises(CheckpointError, match=f"{name}: the file is not what the hub says"):
            resolve(REPO)
        assert (folder / name).read_bytes() == file.content
        file.said = right
    assert resolve(REPO) == folder


def test_weights_are_read_whole_once(hub, monkeypatch):
    read = []
    digest = hub_snapshot._digest

    def watched(path, *rest):
        read.append(path.name)
        return digest(path, *rest)

    monkeypatch.setattr(hub_snapshot, "_digest", watched)
    resolve(REPO)
    assert {"model-00001-of-00002.safetensors", "config.json"} <= set(read)
    read.clear()
    resolve(REPO)
    assert "config.json" in read and not any("safetensors" in n for n in read if "index" not in n)


def test_files_of_a_killed_download_are_checked_by_the_next(hub, monkeypatch):
    """The process dies after the download and before the check."""

    class Killed(BaseException):
        pass

    def die(*_):
        raise Killed

    shard = hub.files["model-00001-of-00002.safetensors"]
    right = shard.content
    shard.content = right[:-1] + bytes([right[-1] ^ 1])
    with monkeypatch.context() as patch:
        patch.setattr(hub_snapshot, "contradiction", die)
        with pytest.raises(Killed):
            resolve(REPO)
    with pytest.raises(CheckpointError, match="SHA-256"):
        resolve(REPO)
    shard.content = right
    folder = resolve(REPO)
    records = folder.parents[1] / ".ligermodels"
    assert not list(records.iterdir())
    assert resolve(REPO) == folder


def test_a_damaged_file_is_downloaded_again(hub, subtests):
    folder = resolve(REPO)
    for name in ("config.json", "tokenizer.json", "model-00001-of-00002.safetensors"):
        with subtests.test(name):
            content = (folder / name).read_bytes()
            (folder / name).resolve().write_bytes(content[:-7])
            hub.sent.clear()
            assert resolve(REPO) == folder
            assert (folder / name).read_bytes() == content
            assert hub.sent == [name]


def test_without_a_connection_the_message_says_which_file_to_delete(hub, monkeypatch):
    folder = resolve(REPO)
    for name in ("tokenizer.json", "model-00001-of-00002.safetensors"):
        blob = (folder / name).resolve()
        blob.write_bytes(blob.read_bytes()[:-7])
        with monkeypatch.context() as patch:
            patch.setattr(constants, "HF_HUB_OFFLINE", True)
            with pytest.raises(CheckpointError, match=f"{name}.*damaged.*delete {blob}"):
                resolve(REPO)
        blob.unlink()
        resolve(REPO)


def test_absent_files_are_known_without_a_connection(hub, monkeypatch):
    for name in hub.files:
        if name != "tokenizer_config.json":
            huggingface_hub.hf_hub_download(REPO, name)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(
        CheckpointError, match=r"tokenizer_config.json was never downloaded.*folder "
    ):
        resolve(REPO)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
    folder = resolve(REPO)
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    assert resolve(REPO) == folder
    assert folder.name == COMMIT


def test_names_are_no_patterns(hub):
    """The weight map may name a file with brackets; it stands for no other file."""
    index = hub.files["model.safetensors.index.json"]
    old, new = "model-00001-of-00002.safetensors", "model[1].safetensors"
    hub.files[new], hub.files["model1.safetensors"] = hub.files.pop(old), hub.files["config.json"]
    fresh = type(index).honest("x.json", index.content.replace(old.encode(), new.encode()))
    hub.files["model.safetensors.index.json"] = fresh
    try:
        assert (resolve(REPO) / new).is_file()
    except CheckpointError as error:
        assert "plain" in str(error)
    assert "model1.safetensors" not in hub.sent

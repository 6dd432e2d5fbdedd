"""A save that is killed, or finds the disk full, at one of the system calls that change the disk.

The default run tries every third call, and `make test-long` tries each.
"""

import os
import shutil

import pytest
import torch

from ligermodels.converters import save_dir
from ligermodels.converters.files import copied_files
from ligermodels.errors import SaveError
from tests import system_calls

from .conftest import contents, load_weights, save_weights, write_checkpoint, write_files

pytestmark = pytest.mark.skipif(not system_calls.AVAILABLE, reason="needs ptrace on x86-64 Linux")


every = pytest.mark.parametrize(
    "every",
    [pytest.param(6, id="sample"), pytest.param(1, id="long", marks=pytest.mark.long)],
)


def own(files):
    """Leave out the user's subfolder, which is moved after the checkpoint, or by the next save."""
    return files and {name: files[name] for name in files if not name.startswith("runs/")}


class Place:
    """A folder with a checkpoint in three shards and the user's files, and its new content."""

    def __init__(self, make, parent, existing=True):
        self.source, self.config = make("source", shards=1)
        self.weights = load_weights(self.source, self.config)
        self.parent = parent
        self.target = parent / "out"
        self.existing = existing
        self.reset()
        self.old = contents(self.target)
        self.save()
        self.new = contents(self.target)
        assert self.new != self.old
        if existing:
            assert "notes.txt" in self.new and "model-00003-of-00003.safetensors" not in self.new

    def reset(self):
        shutil.rmtree(self.parent, ignore_errors=True)
        self.parent.mkdir()
        if self.existing:
            tensors = {f"t{i}": torch.full((3,), float(i)) for i in range(6)}
            write_checkpoint(self.target, tensors, {"old": True}, shards=3)
            write_files(self.target, {"notes.txt": b"mine", "runs/deep/log": b"mine, too"})
            (self.target / "link").symlink_to("notes.txt")

    def save(self):
        source_files = copied_files(self.source)
        options = {"source_files": source_files, "max_shard_size": 6000}
        save_weights(self.target, self.config, self.weights, **options)


def each_call(place, every, **options):
    """Stop the save at every n-th of its changes to the disk; the last run completes."""
    for call in range(0, 1000, every):
        place.reset()
        try:
            status, name = system_calls.run(place.save, call, **options)
        except PermissionError as fault:
            pytest.skip(str(fault))
        yield call, status, name
        if name is None:
            return


@every
@pytest.mark.parametrize("existing", [True, False])
def test_after_a_kill_before_any_call_the_folder_is_old_or_new(
    make, tmp_path, way, existing, every
):
    place = Place(make, tmp_path / "place", existing)
    both, outcomes = (own(place.old), own(place.new)), []
    for call, status, name in each_call(place, every):
        assert status == (0 if name is None else None)
        save_dir.recover_dir(place.target)  # as each load does
        now = own(contents(place.target))
        assert now in both, f"mixed after a kill before call {call}, {name}"
        outcomes.append(now == both[1])
        place.save()
        assert contents(place.target) == place.new, f"saving again after a kill before {name}"
        assert os.listdir(place.parent) == ["out"], "files of the killed save are left"
    # The folder is old up to one moment and new from there on.
    assert outcomes == sorted(outcomes) and {True, False} <= set(outcomes)
    assert len(outcomes) > 25 / every


@every
@pytest.mark.parametrize(
    "way, full", [("exchange", "once"), ("two renames", "from then on")], indirect=["way"]
)
def test_a_disk_full_at_any_call_leaves_the_old(make, tmp_path, way, full, every):
    place = Place(make, tmp_path / "place")

    def save_and_say():
        try:
            place_save()
        except SaveError as fault:
            if "could not be saved: No space left" not in str(fault):
                raise
            system_calls.leave(3)

    place_save, place.save = place.save, save_and_say
    refused = 0
    for call, status, name in each_call(place, every, full=full):
        assert status in (0, 3), f"{name} failed at call {call}"
        wanted = place.old if status == 3 else place.new
        if status == 3:
            save_dir.recover_dir(place.target)  # as each load does, when renames work again
            assert contents(place.target) == wanted, f"{name} failed at call {call}"
            assert os.listdir(place.parent) == ["out"], f"{name} failed at call {call}"
        assert own(contents(place.target)) == own(wanted), f"{name} failed at call {call}"
        place_save()
        assert contents(place.target) == place.new, f"{name} failed at call {call}"
        refused += status == 3
    assert refused > (20 if every == 1 else 2)

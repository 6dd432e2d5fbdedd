"""A folder that tests replace, and helpers for them."""

import os
import traceback

import pytest

from ligermodels.converters.files import sync_file
from ligermodels.converters.save_dir import replace_dir

OLD = {"config.json": "old config", "weights": "old weights", "notes": "mine"}
NEW = {"config.json": "new config", "weights": "new weights", "notes": "mine"}


def fill(folder, content):
    folder.mkdir(exist_ok=True)
    for name, text in content.items():
        (folder / name).write_text(text)


def content(folder):
    return {path.name: path.read_text() for path in folder.iterdir()}


def owned(name):
    return name in ("config.json", "weights")


def replace(target):
    with replace_dir(target, owned) as fresh:
        for name in ("config.json", "weights"):
            (fresh / name).write_text(NEW[name])
            sync_file(fresh / name)


def in_a_fork(test):
    """Run a function in a fork of this process; skip if it returns False."""
    child = os.fork()
    if child == 0:
        code = 1
        try:
            code = 3 if test() is False else 0
        except BaseException:
            traceback.print_exc()
        finally:
            os.seteuid(os.getuid())  # else coverage may not write its data
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    if code == 3:
        pytest.skip("the machine does not allow this")
    assert code == 0


def content_of(folder):
    return {path.name: path.read_text() for path in folder.iterdir() if path.is_file()}

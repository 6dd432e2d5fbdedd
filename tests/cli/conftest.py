"""Fixtures: a small checkpoint, a text, and a function that calls the command line."""

from __future__ import annotations

import pytest

from ligermodels import cli
from tests.training.tiny_run import make_checkpoint, make_text


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return str(make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny"))


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    return str(make_text(tmp_path_factory.mktemp("text") / "words.txt"))


@pytest.fixture
def call(capfd):
    """A function that runs the command line: it returns exit code, stdout and stderr."""

    def run(*arguments):
        code = cli.main([str(argument) for argument in arguments])
        return code, *capfd.readouterr()

    return run

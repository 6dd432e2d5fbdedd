"""A tiny checkpoint and a text, for the runs of these tests."""

from __future__ import annotations

import pytest

from tests.training.tiny_run import make_checkpoint, make_text


@pytest.fixture(scope="session")
def checkpoint(tmp_path_factory):
    return make_checkpoint(tmp_path_factory.mktemp("checkpoint") / "tiny")


@pytest.fixture(scope="session")
def text(tmp_path_factory):
    return make_text(tmp_path_factory.mktemp("text") / "words.txt")

import os

import pytest

from ligermodels.converters.files import (
    names_if_present,
    open_if_present,
    open_regular,
    parse_json,
    read_if_present,
    read_json,
    read_json_if_present,
)
from ligermodels.errors import ConfigError


def test_damaged_json_names_the_file(tmp_path, subtests):
    for content, message in (
        (b"", "is not JSON"),
        (b'{"a": 1', "is not JSON"),
        (b"\xef\xbb\xbf{}", "is not JSON: Unexpected UTF-8 BOM"),
        (b"\xff\xfe{\x00}\x00", "is not JSON: 'utf-8' codec"),
        (b"null", "holds a NoneType"),
        (b'{"a": {"b": 1, "b": 2}}', "key 'b' appears twice"),
        (b'{"a": ' + b"[" * 99_999 + b"]" * 99_999 + b"}", "is not JSON"),
        (b'{"%s": 1, "%s": 2}' % (b"k" * 9999, b"k" * 9999), "key 'kk.{150,170} appears twice"),
    ):
        with subtests.test(f"{content!r:.60}"):
            path = tmp_path / "config.json"
            path.write_bytes(content)
            with pytest.raises(ConfigError, match=message) as caught:
                read_json(path, ConfigError)
            assert str(caught.value).startswith(f"{path}: ")


def test_json_keeps_what_python_can_hold():
    text = b'{"a": 1e999, "b": NaN, "c": "\\ud800", "d": 12345678901234567890123}'
    value = parse_json(text, "here", ConfigError)
    assert value["a"] == float("inf") and value["b"] != value["b"]
    assert value["c"] == "\ud800" and value["d"] == 12345678901234567890123


KINDS = {
    "folder": (os.mkdir, "cannot be read: Is a directory$"),
    "dead link": (lambda path: path.symlink_to("nowhere"), "is a link to .*/nowhere, which does"),
    "loop": (lambda path: path.symlink_to(path), "cannot be read: Too many levels"),
    "no access": (lambda path: path.touch(mode=0), "cannot be read: Permission denied"),
}


def test_what_is_there_but_is_no_readable_file_is_an_error_that_names_its_kind(tmp_path, subtests):
    for kind, (make, message) in KINDS.items():
        if kind == "no access" and os.geteuid() == 0:
            continue  # root may read every file
        make(path := tmp_path / kind)
        for read in (open_regular, open_if_present, read_if_present, read_json_if_present):
            with subtests.test(f"{kind}, {read.__name__}"):
                with pytest.raises(ConfigError, match=message):
                    read(path, ConfigError)


def test_an_absent_file_is_none_or_an_error(tmp_path):
    for read in (open_if_present, read_if_present, read_json_if_present, names_if_present):
        assert read(tmp_path / "absent", ConfigError) is None
    for read in (open_regular, read_json):
        with pytest.raises(ConfigError, match="absent: the file is missing"):
            read(tmp_path / "absent", ConfigError)


def test_a_name_that_no_path_can_have_is_an_error(tmp_path):
    for read in (open_regular, read_if_present, read_json, names_if_present):
        for name in ("x" * 5000, "a\0b", "\ud800"):
            with pytest.raises(ConfigError, match="cannot be read: "):
                read(tmp_path / name, ConfigError)


def test_a_folder_is_listed_or_an_error(tmp_path, subtests):
    for name in "ba":
        (tmp_path / name).touch()
    assert names_if_present(tmp_path, ConfigError) == ["a", "b"]
    for kind, message in (
        ("dead link", "folder cannot be read: it is a link to .*/nowhere, which does not exist"),
        ("loop", "Too many levels"),
    ):
        with subtests.test(kind), pytest.raises(ConfigError, match=message):
            KINDS[kind][0](tmp_path / kind)
            names_if_present(tmp_path / kind, ConfigError)

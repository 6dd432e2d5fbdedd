import os

import pytest

from ligermodels.converters.files import is_int, is_number, parse_json, read_json
from ligermodels.errors import CheckpointError, ConfigError


def test_an_unreadable_file_is_an_error_of_the_kind_asked_for(tmp_path):
    with pytest.raises(CheckpointError, match="absent: the file cannot be read: No such file"):
        read_json(tmp_path / "absent", CheckpointError)
    with pytest.raises(ConfigError, match="No such file"):
        read_json(tmp_path / "absent", ConfigError)


@pytest.mark.parametrize(
    "content, message",
    [
        (b"", "is not JSON"),
        (b'{"a": 1', "is not JSON"),
        (b"\xef\xbb\xbf{}", "is not JSON: Unexpected UTF-8 BOM"),
        (b"\xff\xfe{\x00}\x00", "is not UTF-8"),
        (b"null", "holds a NoneType"),
        (b'{"a": {"b": 1, "b": 2}}', "key 'b' appears twice"),
        (b'{"a": %s}' % (b"9" * 5000), "too many digits"),
        (b'{"a": ' + b"[" * 101 + b"]" * 101 + b"}", "nested too deep: more than 100"),
        (b'{"a": ' + b"[" * 99_999 + b"]" * 99_999 + b"}", "nested too deep"),
        (b'{"%s": 1, "%s": 2}' % (b"k" * 9999, b"k" * 9999), "key 'kk.{150,170} appears twice"),
    ],
)
def test_damaged_json_names_the_file(tmp_path, content, message):
    path = tmp_path / "config.json"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message) as caught:
        read_json(path, ConfigError)
    assert str(caught.value).startswith(f"{path}: ")


def test_json_of_a_terabyte_is_not_read(tmp_path):
    path = tmp_path / "config.json"
    path.touch()
    os.truncate(path, 10**12)
    with pytest.raises(
        ConfigError, match=r"config\.json: the file has 1000000000000 bytes, expected at most"
    ):
        read_json(path, ConfigError)


def test_json_keeps_what_python_can_hold():
    text = b'{"a": 1e999, "b": NaN, "c": "\\ud800", "d": 12345678901234567890123}'
    value = parse_json(text, "here", ConfigError)
    assert value["a"] == float("inf") and value["b"] != value["b"]
    assert value["c"] == "\ud800" and value["d"] == 12345678901234567890123


@pytest.mark.parametrize("kind", ["pipe", "folder", "device", "loop", "null byte"])
def test_what_is_no_file_is_refused_and_not_waited_for(tmp_path, kind):
    path, message = tmp_path / "config.json", "is not a regular file"
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "loop":
        path.symlink_to(path)
        message = "cannot be read: Too many levels"
    else:
        path, message = tmp_path / "a\0b", "cannot be read: embedded null"
    with pytest.raises(ConfigError, match=message):
        read_json(path, ConfigError)


@pytest.mark.parametrize("value", [True, None, "1", [1], float("nan"), 10**400])
def test_what_is_no_number(value):
    assert not is_number(value)
    assert is_number(1) and is_number(-0.5) and not is_int(1.0)

"""What the tests of several commands say."""

from __future__ import annotations

# A run that takes a moment.
SMALL = ["--seq-len", "64", "--batch-size", "2", "--max-steps", "2", "--device", "cpu"]


def assert_one_line(result, *words):
    """Exit code 2, nothing on stdout, one line on stderr with these words."""
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and err.endswith("\n"), err
    for word in words:
        assert word in err

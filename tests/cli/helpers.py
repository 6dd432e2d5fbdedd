"""Options and assertions that the tests of several commands share."""

from __future__ import annotations

# These options make a run of a second.
SMALL = ["--seq-len", "64", "--batch-size", "2", "--max-steps", "2", "--device", "cpu"]


def assert_one_line(result, *words):
    """Assert exit code 2, an empty stdout, and one line on stderr with these words."""
    code, out, err = result
    assert (code, out) == (2, "")
    assert err.count("\n") == 1 and err.endswith("\n"), err
    for word in words:
        assert word in err

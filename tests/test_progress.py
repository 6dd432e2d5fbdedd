"""One bar at a time on a terminal, and lines elsewhere."""

from __future__ import annotations

import io
import re
import sys
import time

import pytest

from ligermodels import progress
from ligermodels.progress import say, stage, track


class Terminal(io.StringIO):
    """A stream that says that it is a terminal."""

    def isatty(self) -> bool:
        return True


def plain(text: str) -> list[str]:
    return re.split(r"[\r\n]+", re.sub(r"\x1b\[[\d;?]*[a-zA-Z]", "", text))


def test_a_stage_inside_of_another_takes_its_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.delenv("NO_COLOR", raising=False)
    terminal = Terminal()
    monkeypatch.setattr(sys, "stderr", terminal)
    with stage("training", 3) as advance:
        for number in track(iter("ab"), "evaluating", 2):
            progress._display.refresh()
            say(f"said {number}")
        advance(2, "loss 1.5")
        progress._display.refresh()
    assert progress._display is None
    text, lines = terminal.getvalue(), plain(terminal.getvalue())
    assert "\x1b[?25h" in text and "\x1b[3" in text  # the cursor is back; there was colour
    assert all(len(line) <= 80 for line in lines)
    bars = [re.sub("[━╸╺ ]+", " ", line) for line in lines if "━" in line]
    assert not any("training" in bar and "evaluating" in bar for bar in bars)
    seen = [
        next(i for i, bar in enumerate(bars) if bar.startswith(start))
        for start in ("training 0/3", "evaluating 0/2", "evaluating 1/2", "training 2/3 loss 1.5")
    ]
    assert seen == sorted(seen)
    assert {"said a", "said b"} <= {line.strip() for line in lines}


def test_elsewhere_a_line_comes_every_ten_seconds(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 0.0
    monkeypatch.setattr(time, "monotonic", lambda: now)
    with stage("training", 2_000, done=1_000, shows=True) as advance:
        for now in (4.0, 11.0, 12.0, 30.0):
            advance(1, f"loss {now}")
        say("a note")
    expected = ["training 1,002/2,000  loss 11.0", "training 1,004/2,000  loss 30.0", "a note"]
    assert capsys.readouterr().err.splitlines() == expected


def test_iterators_that_take_turns_leave_no_display(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    first, second = (track("ab", "generating", shows=True) for _ in range(2))
    assert [next(first), next(second), *first, *second] == ["a", "a", "b", "b"]
    assert progress._display is None
    monkeypatch.setattr(progress, "_INTERVAL", -1.0)
    for shows in (False, True):
        list(track("a", f"shown {shows}", shows=shows))
    assert capsys.readouterr().err.splitlines() == ["shown True 1"]


@pytest.mark.parametrize("shows", [None, False])
def test_nothing_is_shown_in_a_pipe_unless_it_is_asked_for(
    shows: bool | None, capsys: pytest.CaptureFixture[str]
) -> None:
    with stage("loading", shows=shows):
        assert list(track("ab", "reading", shows=True)) == ["a", "b"]
        say("a note")
    say("outside of all stages")
    assert capsys.readouterr().err == ""

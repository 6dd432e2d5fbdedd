"""The command line that examples share."""

from __future__ import annotations

from pathlib import Path

import pytest

from examples.command import call


def test_options_have_the_types_of_their_defaults(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def main(model: str, output_dir: Path, **options: float) -> None:
        print(model, output_dir.name, options)

    monkeypatch.setattr("sys.argv", "x folder --output-dir out --max-steps 3".split())
    call(main, "A title.\n\nMore.", max_steps=60, learning_rate=1e-5)
    assert capsys.readouterr().out == "folder out {'max_steps': 3, 'learning_rate': 1e-05}\n"
    monkeypatch.setattr("sys.argv", ["x", "folder"])
    with pytest.raises(SystemExit):
        call(main, None)

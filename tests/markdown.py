"""Find the blocks of a Markdown page, and run them as a reader who pastes them would."""

from __future__ import annotations

import builtins
import code
import importlib.util
import io
import itertools
import json
import os
import re
import runpy
import signal
import subprocess
import tempfile
import textwrap
import time
from collections.abc import Callable
from contextlib import redirect_stdout, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ligermodels import LigerLlama, LlamaConfig
from ligermodels.cli import main
from tests import limits

ROOT = Path(__file__).parent.parent
PYTHON, SHELL = ("python",), ("bash", "sh")
SHOWN = ("text",)  # blocks that a reader looks at and does not run
# The pages use a small checkpoint that needs no account, so that everybody can run them.
CHECKPOINT = "HuggingFaceTB/SmolLM2-135M-Instruct"


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, the number of its first line, its language and its text."""

    page: Path
    line: int
    language: str
    text: str

    @property
    def id(self) -> str:
        return f"{self.page.stem}:{self.line}"


def blocks(page: Path) -> list[Block]:
    """Return every block of a page.

    It is an error if a block is indented instead of fenced, if a fence is not closed, or if the
    language is neither run nor shown. So no block can be left out.
    """
    found, opened, lines = [], None, page.read_text(encoding="utf-8").split("\n")
    in_list = False
    for number, line in enumerate(lines, 1):
        fence = re.fullmatch(r"( *)```(.*)", line)
        if opened is None and fence:
            opened = (number, fence[2])
        elif opened is not None and fence:
            language, body = opened[1], lines[opened[0] : number - 1]
            assert not fence[2], f"{page.name}:{number}: a fence opens inside a block"
            assert language in PYTHON + SHELL + SHOWN, (
                f"{page.name}:{opened[0]}: the tests cannot run {language!r} blocks; use python or "
                "bash, or text for a block that is only shown"
            )
            text = textwrap.dedent("\n".join(body) + "\n")
            found.append(Block(page, opened[0], language, text))
            opened = None
        elif opened is None:
            if line and not line.startswith(" "):
                in_list = bool(re.match(r"([-*+]|\d+\.) ", line))
            indented = line.startswith("    ") and not lines[number - 2].strip()
            assert in_list or not indented, f"{page.name}:{number}: indented block; fence it"
    assert opened is None, f"{page.name}:{opened}: the fence is not closed"
    return found


def runnable(page: Path, languages: tuple[str, ...]) -> list[Block]:
    return [block for block in blocks(page) if block.language in languages]


class _Session(code.InteractiveConsole):
    """Python's prompt, except that it raises errors instead of printing them."""

    def showtraceback(self) -> None:
        raise

    def showsyntaxerror(self, *args: Any, **kwargs: Any) -> None:
        raise


def paste_python(text: str) -> dict[str, Any]:
    """Type a block at Python's prompt, line by line, and return the names that it defines."""
    session = _Session({"__name__": "__console__"})
    more = False
    try:
        for line in text.split("\n"):
            more = session.push(line)
    finally:
        # The prompt keeps the last value in builtins, where other tests would find it.
        vars(builtins).pop("_", None)
    assert not more, "the block ends in the middle of a statement"
    return session.locals


def run_python(text: str, name: str = "block", **names: Any) -> dict[str, Any]:
    """Execute a block as a script, and return the names that it defines."""
    names |= {"__name__": "__main__"}
    exec(compile(text, name, "exec"), names)
    return names


def small_checkpoint(smollm2: Path, folder: Path) -> Path:
    """Make a folder with SmolLM2's tokenizer and a random model with 1/100 of its parameters."""
    folder.mkdir()
    for path in smollm2.iterdir():
        if path.name not in ("config.json", "model.safetensors"):
            (folder / path.name).symlink_to(path)
    config = json.loads((smollm2 / "config.json").read_text(encoding="utf-8"))
    config |= {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2}
    config |= {"num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 8}
    (folder / "config.json").write_text(json.dumps(config), encoding="utf-8")
    torch.manual_seed(0)
    model = LigerLlama(LlamaConfig.from_hf(folder)).to(torch.bfloat16)
    (folder / "config.json").unlink()
    model.save_hf(folder / "saved")
    for path in (folder / "saved").iterdir():
        path.rename(folder / path.name)
    (folder / "saved").rmdir()
    return folder


# A command of a shell block writes its process, its name, its folder and its arguments into a file,
# and then waits for a file with the exit code and the output. The test runs or checks the command:
# starting Python and torch anew for each would take seconds. Neither side blocks at the other's
# death, as it would at a pipe.
STUB = """#!/bin/sh
printf '%s\\0' "$$" "${0##*/}" "$PWD" "$@" > "$STUBS/$$.part"
mv "$STUBS/$$.part" "$STUBS/$$.request"
until [ -e "$STUBS/$$.reply" ]; do kill -0 "$TEST" && sleep 0.02 || exit 1; done
{ read -r code; cat; } < "$STUBS/$$.reply"
rm "$STUBS/$$.reply"
exit "$code"
"""


def run_shell(text: str, folder: Path, home: Path) -> str:
    """Run a shell block in a folder, with `COMMANDS` instead of the programs.

    Return its output. A command that fails stops the block with an error, and so does the limit.
    """
    stubs = home / "stubs"
    if not stubs.is_dir():
        stubs.mkdir(parents=True)
        for name in COMMANDS:
            (stubs / name).write_text(STUB)
            (stubs / name).chmod(0o755)
    environment = {
        "PATH": f"{stubs}:/usr/bin:/bin",
        "HOME": str(home),
        "STUBS": str(stubs),
        "TEST": str(os.getpid()),
    }
    subprocess.run(["bash", "-n", "-c", text], check=True)
    end = time.monotonic() + limits.SECONDS
    with tempfile.TemporaryFile("w+", encoding="utf-8") as printed:
        process = subprocess.Popen(
            ["bash", "-eu", "-c", text],
            cwd=folder,
            env=environment,
            stdout=printed,
            stderr=subprocess.STDOUT,
            start_new_session=True,
        )
        try:
            while process.poll() is None and time.monotonic() < end:
                for request in stubs.glob("*.request"):
                    _answer(request)
                time.sleep(0.01)
        finally:
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)  # stand-ins, too
            process.wait()
        printed.seek(0)
        output = printed.read()
    assert process.returncode == 0, f"exit code {process.returncode}\n{output}"
    return output


def _answer(request: Path) -> None:
    """Run the command of a stand-in, and write its exit code and its output."""
    number, name, place, *arguments = request.read_text(encoding="utf-8").split("\0")[:-1]
    request.unlink()
    before, output = Path.cwd(), io.StringIO()
    os.chdir(place)
    try:
        with redirect_stdout(output):
            exit_code = COMMANDS[name](arguments) or 0
    finally:
        os.chdir(before)
    part = request.with_name(f"{number}.part")
    part.write_text(f"{exit_code}\n{output.getvalue()}", encoding="utf-8")
    part.rename(request.with_name(f"{number}.reply"))


def _git(arguments: list[str]) -> None:
    """Run `git clone URL FOLDER`: link the files of this checkout into the folder."""
    command, url, folder = arguments
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    assert command == "clone" and f'Homepage = "{url}"' in project
    make_checkout(Path(folder))


def make_checkout(folder: Path) -> Path:
    """Make a folder with links to this checkout's files, into which blocks may write."""
    (folder / ".git").mkdir(parents=True)
    for path in ROOT.iterdir():
        if not path.name.startswith(".") and path.name not in ("build", "runs"):
            (folder / path.name).symlink_to(path)
    return folder


def _python(arguments: list[str]) -> int | None:
    """Check that the module or file exists, and that its source has the options."""
    if arguments[:2] == ["-m", "venv"]:
        activate = Path(arguments[2], "bin", "activate")
        activate.parent.mkdir(parents=True, exist_ok=True)
        activate.touch()
        return None
    if arguments[:2] == ["-m", "pytest"]:
        return _pytest(arguments[2:])
    source = arguments[0]
    if source == "-m":
        source = importlib.util.find_spec(arguments[1]).origin
    text = Path(source).read_text(encoding="utf-8")
    for option in arguments[1:]:
        assert not option.startswith("--") or f'"{option}"' in text, (source, option)
    return None


def _pip(arguments: list[str]) -> None:
    """Check that constraint files exist and that the project names the packages and extras."""
    project = (ROOT / "pyproject.toml").read_text(encoding="utf-8")
    constraints = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    assert arguments[0] == "install"
    for before, argument in itertools.pairwise(arguments):
        if before == "-c":
            assert Path(argument).samefile(ROOT / "constraints.txt")
        elif before == "-e":
            for extra in re.findall(r"[\w-]+", argument.partition("[")[2]):
                assert re.search(rf"^{extra} = \[", project, re.MULTILINE), extra
        elif not argument.startswith("-"):
            assert re.search(rf"^{argument}==", constraints, re.MULTILINE), argument


def _make(arguments: list[str]) -> None:
    """Check that the Makefile has the targets."""
    for target in (each for each in arguments if "=" not in each):
        assert target in make_targets(), target


def make_targets() -> set[str]:
    makefile = (ROOT / "Makefile").read_text(encoding="utf-8")
    return set(re.search(r"^\.PHONY: (.*)$", makefile, re.MULTILINE)[1].split())


def _pytest(arguments: list[str]) -> None:
    """Check that the test files exist, except those of the example op."""
    for path in (each.partition("::")[0] for each in arguments if each.startswith("tests/")):
        assert Path(path).exists() or "softcap" in path, path


def _torchrun(arguments: list[str]) -> None:
    """Run the script in this process, as the only rank of its group."""
    flag, processes, script = arguments
    assert (flag, processes) == ("--nproc-per-node", "1")
    group = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0", "WORLD_SIZE": "1"}
    group |= {"RANK": "0", "LOCAL_RANK": "0"}
    before = dict(os.environ)
    os.environ.update(group)
    try:
        runpy.run_path(script, run_name="__main__")
    finally:
        os.environ.clear()
        os.environ.update(before)


def _anything(arguments: list[str]) -> None:
    """Accept any call of a program that the tests do not run."""


COMMANDS: dict[str, Callable[[list[str]], int | None]] = {
    "git": _git,
    "ligermodels": main,
    "make": _make,
    "mypy": _anything,
    "pip": _pip,
    "pytest": _pytest,
    "python": _python,
    "python3": _python,
    "ruff": _anything,
    "torchrun": _torchrun,
}

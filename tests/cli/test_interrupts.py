"""Ctrl-C while the program starts and works: one line and exit code 130, wherever it comes."""

import os
import signal
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from ligermodels import cli
from ligermodels.cli.interrupts import quit_on_interrupt, raise_on_interrupt
from ligermodels.converters import export
from ligermodels.converters.checkpoint import Checkpoint
from tests.limits import SECONDS

# Send SIGINT at the import of a number, counted from that of argparse.
PROGRAM = """
import os, runpy, signal, sys
at, sys.argv = int(sys.argv[1]), ["ligermodels", "families"]
count = 0

def hook(event, arguments):
    global count
    if event == "import" and (count or arguments[0] == "argparse"):
        count += 1
        if count == at:
            os.kill(os.getpid(), signal.SIGINT)

sys.addaudithook(hook)
runpy.run_module("ligermodels", run_name="__main__")
"""


@pytest.mark.parametrize("number", [1, 30, 200])
def test_an_interrupted_start_is_one_line(number):
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(number)],
        capture_output=True,
        text=True,
        cwd=Path(__file__).parents[2],
        # coverage imports modules of its own, and its messages would be in stderr.
        env={name: value for name, value in os.environ.items() if "COVERAGE" not in name},
        timeout=SECONDS,
    )
    assert (done.returncode, done.stderr) == (130, "ligermodels: interrupted\n")
    assert done.stdout == ""


def interrupted(arguments, holder, name, folder):
    """Run a command in a fork; press Ctrl-C within a function. Return exit code and stderr."""
    said = folder / "stderr"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
            sys.stderr = open(2, "w", closefd=False)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            torch.set_num_threads(2)
            original = getattr(holder, name)

            def press(*args, **options):
                os.kill(os.getpid(), signal.SIGINT)
                return original(*args, **options)

            setattr(holder, name, press)
            code = cli.main([str(argument) for argument in arguments])
            sys.stderr.flush()
        finally:
            os._exit(code)
    return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]), said.read_text()


@pytest.mark.parametrize(
    ("holder", "name", "command"),
    [
        (cli, "_module", "families"),  # the first line of a command
        (cli, "_say", "inspect /nowhere/model"),  # the last one
        (Checkpoint, "_read_slice", "generate MODEL a --device cpu"),  # a thread
        (export, "_write_shard", "convert MODEL FOLDER/new/out"),
    ],
)
def test_an_interrupted_command_is_one_line(checkpoint, holder, name, command, tmp_path):
    """A save is cleaned up, too."""
    words = command.replace("MODEL", checkpoint).replace("FOLDER", str(tmp_path)).split()
    said = interrupted(words, holder, name, tmp_path)
    assert said == (130, "ligermodels: interrupted\n")
    assert not (tmp_path / "new").exists() or os.listdir(tmp_path / "new") == []


def test_only_pythons_own_handler_is_replaced():
    """Within the other block the signal raises; other threads touch no handler."""

    def installed():
        with quit_on_interrupt():
            return signal.getsignal(signal.SIGINT)

    before = signal.getsignal(signal.SIGINT)
    try:
        for handler in (signal.SIG_IGN, lambda *_: None):
            signal.signal(signal.SIGINT, handler)
            assert installed() == handler
        python = signal.default_int_handler
        signal.signal(signal.SIGINT, python)
        assert installed() != python == signal.getsignal(signal.SIGINT)
        with ThreadPoolExecutor() as pool:
            assert pool.submit(installed).result() == python
        with quit_on_interrupt():
            quits = signal.getsignal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt), raise_on_interrupt():
                os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) == quits
        with raise_on_interrupt():
            assert signal.getsignal(signal.SIGINT) == python
    finally:
        signal.signal(signal.SIGINT, before)

"""Ctrl-C while the program starts and works: one line and exit code 130, wherever it comes."""

import os
import signal
import subprocess
import sys
import threading
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


def test_a_block_exits_at_once():
    child = os.fork()
    if child == 0:
        os.dup2(os.open(os.devnull, os.O_WRONLY), 2)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        try:
            with quit_on_interrupt():
                os.kill(os.getpid(), signal.SIGINT)
        finally:
            os._exit(1)
    assert os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 130


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


def test_a_second_signal_adds_no_line(tmp_path, monkeypatch):
    write = os.write

    def press_again(*args):
        count = write(*args)
        os.kill(os.getpid(), signal.SIGINT)
        return count

    monkeypatch.setattr(os, "write", press_again)
    said = interrupted(["families"], cli, "_module", tmp_path)
    assert said == (130, "ligermodels: interrupted\n")


def test_the_threads_of_a_load_do_not_matter(checkpoint, tmp_path):
    command = ["generate", checkpoint, "a", "--device", "cpu"]
    assert interrupted(command, Checkpoint, "_read_slice", tmp_path) == (
        130,
        "ligermodels: interrupted\n",
    )


@pytest.mark.parametrize(
    ("holder", "name", "arguments"),
    [(cli, "_module", ["families"]), (cli, "_say", ["inspect", "/nowhere/model"])],
)
def test_the_first_and_the_last_lines_of_a_command_are_covered(holder, name, arguments, tmp_path):
    said = interrupted(arguments, holder, name, tmp_path)
    assert said == (130, "ligermodels: interrupted\n")


def test_a_save_is_cleaned_up(checkpoint, tmp_path):
    command = ["convert", checkpoint, tmp_path / "new" / "out"]
    said = interrupted(command, export, "_write_shard", tmp_path)
    assert said == (130, "ligermodels: interrupted\n")
    assert os.listdir(tmp_path / "new") == []


def test_within_the_other_block_the_signal_raises():
    before = signal.signal(signal.SIGINT, signal.default_int_handler)
    try:
        with quit_on_interrupt():
            quits = signal.getsignal(signal.SIGINT)
            with pytest.raises(KeyboardInterrupt), raise_on_interrupt():
                os.kill(os.getpid(), signal.SIGINT)
            assert signal.getsignal(signal.SIGINT) == quits
        with raise_on_interrupt():
            pass
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_handlers_of_others_stay(monkeypatch):
    before = signal.getsignal(signal.SIGINT)
    try:
        for handler in (signal.SIG_IGN, lambda *_: None):
            signal.signal(signal.SIGINT, handler)
            with quit_on_interrupt():
                assert signal.getsignal(signal.SIGINT) == handler
        signal.signal(signal.SIGINT, signal.default_int_handler)
        with quit_on_interrupt():
            assert signal.getsignal(signal.SIGINT) != signal.default_int_handler
        assert signal.getsignal(signal.SIGINT) == signal.default_int_handler
    finally:
        signal.signal(signal.SIGINT, before)


def test_other_threads_do_not_touch_signals():
    def run():
        with quit_on_interrupt():
            found.append(signal.getsignal(signal.SIGINT))

    found = []
    thread = threading.Thread(target=run)
    thread.start()
    thread.join()
    assert found == [signal.getsignal(signal.SIGINT)]

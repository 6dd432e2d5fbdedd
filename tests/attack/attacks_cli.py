"""Attacks by the user of the command line: odd words, odd numbers, odd paths, and Ctrl-C."""

from __future__ import annotations

import contextlib
import io
import json
import os
import signal
import subprocess
import sys
import tempfile
import traceback
from pathlib import Path
from typing import Any
from unittest import mock

import ligermodels
from ligermodels import cli
from tests.attack.harness import Case, Fault, attack, renew_threads
from tests.training.tiny_run import make_checkpoint, make_text

# SIGINT comes at an import of ours or of a library, counted from that of argparse, which is the
# first one that takes time. The file says that it came.
PROGRAM = """
import os, runpy, signal, sys
at, sent = int(sys.argv[1]), sys.argv[2]
sys.path.insert(0, sys.argv[3])
sys.argv = ["ligermodels", *sys.argv[4:]]
count = 0

def hook(event, arguments):
    global count
    if event == "import" and (count or arguments[0] == "argparse"):
        count += 1
        if count == at:
            open(sent, "w").close()
            os.kill(os.getpid(), signal.SIGINT)

sys.addaudithook(hook)
from ligermodels.cli import main
sys.exit(main())
"""


@attack("B", 14, weight=2, seconds=60.0)
def a_start_can_be_interrupted(case: Case) -> None:
    """Ctrl-C during the imports ends the process at once, with one line."""
    case.label(swallowed := "it is swallowed", "a traceback")
    # Most draws are early imports, because all of them take seconds.
    at = int(10 ** case.draw.uniform(0.3, case.draw.choice([1.7, 2.3, 3.3])))
    command = case.draw.choice([["families"], ["inspect", "x/y"], ["finetune", "--help"]])
    if case.seed % 2:  # while torch imports numpy, and ignores that it fails
        at, command = case.draw.randint(100, 200), ["inspect", "x/y"]
    sent = case.folder / "sent"
    package = Path(ligermodels.__file__).parents[1]
    # coverage imports modules of its own, and its messages would be in stderr.
    environment = {name: value for name, value in os.environ.items() if "COVERAGE" not in name}
    done = subprocess.run(
        [sys.executable, "-c", PROGRAM, str(at), str(sent), str(package), *command],
        capture_output=True,
        text=True,
        env={**environment, "HF_HUB_OFFLINE": "1"},
    )
    if not sent.exists():
        return
    if done.returncode in (0, 2):
        raise Fault(f"import {at}: it was swallowed: exit code {done.returncode}", swallowed)
    if "Traceback" in done.stderr or done.returncode not in (130, -signal.SIGINT):
        raise Fault(f"import {at}: {done.stderr[-400:]}", "a traceback")
    if len(done.stderr.splitlines()) > 1:
        raise Fault(f"import {at}: {done.stderr[-400:]}", "a traceback")


def has_plans(case: Case) -> bool:
    """Say whether `inspect` has the options for memory; an old version has none."""
    return "--budget" in case.cli("inspect", "--help").out


@attack("B", 14, weight=2, seconds=60.0)
def numbers_of_the_command_line_are_checked(case: Case) -> None:
    """A number of any size gives an answer or one line, before anything is written."""
    model = make_checkpoint(case.folder / "model")
    draw = case.draw
    named = {
        "--seed 2**64": ("--seed", str(2**64)),
        "--temperature 1e-40": ("--temperature", "1e-40"),
        "--max-new-tokens 10**18": ("--max-new-tokens", str(10**18)),
        "any": None,
    }
    kind = case.turn(list(named))
    huge = draw.choice([*map(str, (10**10, 10**12, 10**18, 2**63, 2**64)), *("9" * 30, "9" * 400)])
    huge = draw.choice([huge, "9" * 5000])
    number = draw.choice([huge, f"-{huge}", "1e-40", "1e-310", "1e400", "nan", "inf", "0x3"])
    number = draw.choice([number, huge])
    count, share = ["--max-new-tokens", "--top-k", "--seed"], ["--temperature", "--top-p"]
    command: list[Any] = ["generate", model, "a", "--device", "cpu"]
    if words := named[kind]:
        option, number = words
        if option != "--max-new-tokens":
            command += ["--max-new-tokens", "2"]
        command.append(f"{option}={number}")
    elif draw.random() < 0.7 or not has_plans(case):
        option = draw.choice([*count, *count, *share, "--repetition-penalty"])
        if option != "--max-new-tokens":
            command += ["--max-new-tokens", "2"]
        command.append(f"{option}={number}")
    else:
        option = draw.choice(["--batch", "--seq", "--budget"])
        rest = {"--batch": "2", "--seq": "8", "--budget": "1GiB"} | {option: number}
        command = ["inspect", model, *(f"{name}={value}" for name, value in rest.items())]
    result = case.cli(*command)
    result.fine_or_one_line()
    if len(result.err) > 1000:
        raise Fault(f"{option}: the message has {len(result.err)} characters")
    if result.code == 2 and (option.strip("-") not in result.err.replace("_", "-")):
        raise Fault(f"{option}={number[:40]}: the message does not name it: {result.err}")
    if result.code == 0 and option == "--temperature" and "e-" in number:
        if result.out != case.cli(*command[:-1]).out:
            raise Fault(f"{number}: a draw at this temperature is not the likeliest text")


@attack("B", 14)
def links_that_lead_nowhere_are_no_traceback(case: Case) -> None:
    """A loop of links, or a link to nothing, as source or target of a command is one line."""
    model = make_checkpoint(case.folder / "model")
    loop, other = case.folder / "loop", case.folder / "other"
    kind = case.turn(["a loop as target", "loop", "two", "self inside", "nothing"])
    if kind in ("loop", "a loop as target"):
        loop.symlink_to(loop)
    elif kind == "two":
        loop.symlink_to(other)
        other.symlink_to(loop)
    elif kind == "self inside":
        loop.mkdir()
        (loop / "x").symlink_to(loop / "x")
        loop = loop / "x"
    else:
        loop.symlink_to(case.folder / "nothing" / "there")
    if case.draw.random() < 0.5:
        loop = loop / "deeper"
    places = ["target", "save_hf", "source", "verify"]
    place = case.draw.choice(places[:2] if kind == "a loop as target" else places)
    if place == "save_hf":
        try:
            ligermodels.AutoLiger.from_hf(model).save_hf(loop)
        except ligermodels.LigerError:
            return
        return
    command = {
        "target": ["convert", model, loop, "--verify"],
        "source": ["inspect", loop],
        "verify": ["convert", loop, "--verify"],
    }[place]
    case.cli(*command).fine_or_one_line()


@attack("B", 14, weight=2, seconds=60.0)
def a_command_can_be_interrupted(case: Case) -> None:
    """Ctrl-C at any moment is one line and exit code 130, and the next save leaves nothing else."""
    model, parent = make_checkpoint(case.folder / "model"), case.folder / "new"
    parent.mkdir()
    commands: list[list[Any]] = [
        ["convert", model, parent / "out"],
        ["convert", model, parent / "out", "--verify"],
        ["convert", model, "--verify"],
        ["generate", model, "the cat", "--device", "cpu", "--max-new-tokens", "30"],
        ["inspect", model, *(["--batch", "2", "--seq", "8", "--budget", "1GiB"] * has_plans(case))],
    ]
    command = case.draw.choice(commands)
    seconds = case.draw.uniform(0, 0.15)
    said = case.folder / "stderr"
    child = os.fork()
    if child == 0:
        code = 1
        try:
            os.dup2(os.open(said, os.O_WRONLY | os.O_CREAT), 2)
            sys.stderr = open(2, "w", closefd=False)
            renew_threads(2)
            tempfile.tempdir = str(case.folder)
            signal.signal(signal.SIGINT, signal.default_int_handler)
            signal.signal(signal.SIGALRM, lambda *_: os.kill(os.getpid(), signal.SIGINT))
            signal.setitimer(signal.ITIMER_REAL, seconds)
            code = cli.main([os.fspath(word) for word in command])
        except BaseException as fault:
            # Before the first line of the command and after its last one, Ctrl-C is Python's.
            frames = traceback.extract_tb(fault.__traceback__)
            if isinstance(fault, KeyboardInterrupt) and cli.__file__ not in {
                frame.filename for frame in frames
            }:
                code = 0
            else:
                traceback.print_exc()
        finally:
            signal.setitimer(signal.ITIMER_REAL, 0)
            sys.stderr.flush()
            os._exit(code)
    code = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    text = said.read_text() if said.exists() else ""
    # With exit code 0 it was done already, or it had not begun.
    if code not in (0, 130) or (code == 130 and text != "ligermodels: interrupted\n"):
        raise Fault(f"{command[0]} after {seconds:.3f} s: exit code {code}: {text[-800:]}")
    again = case.cli("convert", model, parent / "out", "--verify", "--overwrite")
    if again.code != 0 or os.listdir(parent) != ["out"]:
        raise Fault(f"after that, {os.listdir(parent)} is there: {again.err}")


# What users write, and what they mean.
MEANT = {
    "--lr": "--learning-rate",
    "--epochs": "--num-train-epochs",
    "--learning_rate": "--learning-rate",
    "--batchsize": "--batch-size",
    "--outputdir": "--output-dir",
    "--wd": "--weight-decay",
    "--seqlen": "--seq-len",
    "--train-file": "--train-files",
    "--max-step": "--max-steps",
    "--grad-accumulation-steps": "--gradient-accumulation-steps",
}


def finetune_flags(case: Case) -> tuple[str, str]:
    """Return the options for the files and the output; an old version has shorter ones."""
    new = "--train-files" in case.cli("finetune", "--help").out
    return ("--train-files", "--output-dir") if new else ("--train", "--output")


COMMANDS = ["finetune", "generate", "inspect", "convert", "families"]


@attack("E", 18, weight=2)
def misspelt_words_are_suggested(case: Case) -> None:
    """A misspelt command, option or value is one line that names what was meant."""
    draw = case.draw
    kind = case.turn(["fintune", "--lr", "--device gpu", "command", "option", "known", "dtype"])
    if kind == "fintune":
        wrong, meant = kind, "finetune"
        arguments: list[Any] = [wrong, "m"]
    elif kind == "command":
        meant = draw.choice(COMMANDS)
        at = draw.randrange(1, len(meant))
        wrong = draw.choice([meant[:at] + meant[at + 1 :], meant[:at] + "x" + meant[at:]])
        arguments = [wrong, "m"]
    elif kind == "option":
        meant = draw.choice(["--learning-rate", "--output-dir", "--export-dtype", "--save-steps"])
        at = draw.randrange(4, len(meant) - 1)
        wrong = meant[:at] + draw.choice("qxz") + meant[at + 1 :]
        arguments = ["finetune", "m", "--train-files", "t", wrong, "1"]
    elif kind in ("known", "--lr"):
        wrong = draw.choice(sorted(MEANT)) if kind == "known" else kind
        meant = MEANT[wrong]
        if meant.startswith(wrong):
            return  # argparse takes the beginning of an option for the option.
        arguments = ["finetune", "m", wrong, "1"]
    elif kind == "--device gpu":
        wrong, meant = draw.choice(["gpu", "gpu", "nvidia"]), "cuda"
        model = make_checkpoint(case.folder / "m")
        text = make_text(case.folder / "t.txt")
        files, output = finetune_flags(case)
        train = ["finetune", model, files, text, output, case.folder / "o"]
        arguments = [*draw.choice([["generate", model, "a"], train]), "--device", wrong]
    else:
        wrong, meant = draw.choice([("bfloat", "bfloat16"), ("float-32", "float32")])
        arguments = ["generate", "m", "a", "--dtype", wrong]
    if wrong == meant:
        return
    result = case.cli(*arguments)
    result.one_line("did you mean", f"'{meant}'")
    if (case.folder / "o").exists():
        raise Fault("the output folder was made")


@attack("E", 18)
def missing_arguments_are_named_at_once(case: Case) -> None:
    """All that a command lacks is in the first message."""
    model, text = make_checkpoint(case.folder / "m"), make_text(case.folder / "t.txt")
    files, output = finetune_flags(case)
    parts: dict[str, list[Any]] = {
        "MODEL": [model],
        files: [files, text],
        output: [output, case.folder / "o"],
    }
    if case.turn(["convert", "finetune"]) == "convert":
        case.cli("convert").one_line("SOURCE", "TARGET")
        return
    missing = case.draw.sample(sorted(parts), k=case.draw.randint(1, 3))
    given = [x for name, words in parts.items() if name not in missing for x in words]
    case.cli("finetune", *given).one_line(*missing)


@attack("E", 18)
def temperature_0_is_greedy(case: Case) -> None:
    """--temperature 0 is the greedy text, whatever else is said of sampling."""
    model = make_checkpoint(case.folder / "m")
    command = ["generate", model, "the cat", "--device", "cpu", "--max-new-tokens", "5"]
    greedy = case.cli(*command)
    zero = case.draw.choice(["0", "0.0", "0e5"])
    more: list[str] = case.draw.choice([[], ["--seed", "3"], ["--top-k", "5"], ["--top-p", "0.5"]])
    found = case.cli(*command, "--temperature", zero, *more)
    if found.code != 0 or found.out != greedy.out:
        raise Fault(f"--temperature {zero}: exit code {found.code}: {found.err[-300:]}")


@attack("E", 18)
def running_out_of_memory_has_no_empty_reason(case: Case) -> None:
    """The line ends neither in a colon nor in the name of a Python class."""
    error = case.draw.choice([MemoryError(), MemoryError(""), MemoryError("\n")])
    module = case.draw.choice([cli.generate, cli.inspect, cli.convert])
    with mock.patch.object(module, "run", side_effect=error):
        arguments = ["m", "t"] if module is not cli.inspect else ["m"]
        result = case.cli(module.__name__.rpartition(".")[2], *arguments)
    if result.code != 1 or len(result.err.splitlines()) != 1:
        raise Fault(f"exit code {result.code}: {result.err}")
    if "MemoryError" in result.err or result.err.split(" (")[0].strip().endswith(":"):
        raise Fault(f"the reason is empty: {result.err}")


@attack("E", 18)
def paths_need_not_be_unicode(case: Case) -> None:
    """A path of any bytes works in every command, or is one line."""
    odd = bytes(case.draw.choices([0xFF, 0x80, 0xC3, 0x20, 0x41, 0xED, 0xA0], k=5)) + b"\xff"
    folder = case.folder / os.fsdecode(odd)
    folder.mkdir()
    made = make_checkpoint(case.folder / "made")
    made.rename(folder / "m")
    model = folder / "m"
    kind = case.turn(["inspect", "json", "convert", "generate", "prompt", "absent", "word"])
    if kind == "json":
        result = case.cli("inspect", model, "--json")
        if result.code == 0:
            json.loads(result.out)
    elif kind == "convert":
        result = case.cli("convert", model, folder / "o", "--verify")
        if result.code == 0 and not (folder / "o" / "config.json").exists():
            raise Fault("the export went to another place")
    elif kind == "prompt":
        result = case.cli("generate", model, os.fsdecode(odd), "--max-new-tokens=2")
    elif kind == "generate":
        result = case.cli("generate", model, "a", "--max-new-tokens=2", "--device=cpu")
    elif kind == "absent":
        result = case.cli("inspect", folder / "none")
        result.one_line("no such")
    elif kind == "word":
        result = case.cli("families", os.fsdecode(odd))
        result.one_line()
    else:
        result = case.cli("inspect", model)
    result.fine_or_one_line()
    if kind in ("inspect", "json", "convert", "generate") and result.code != 0:
        raise Fault(f"{kind} does not work in {odd!r}: {result.err}")


@attack("E", 18)
def the_module_is_a_program(case: Case) -> None:
    """`python -m ligermodels` is the command line."""
    package = Path(ligermodels.__file__).parents[1]
    if not (package / "ligermodels" / "__main__.py").exists():  # An editable install may have one.
        raise Fault("there is no __main__.py")
    done = subprocess.run(
        [sys.executable, "-m", "ligermodels", case.draw.choice(COMMANDS), "--help"],
        capture_output=True,
        text=True,
        env={**os.environ, "PYTHONPATH": str(package)},
    )
    if done.returncode != 0 or "usage:" not in done.stdout:
        raise Fault(f"exit code {done.returncode}: {done.stderr[-300:]}")


class Terminal(io.StringIO):
    """Lines that somebody types."""

    def isatty(self) -> bool:
        return True


class Screen(io.StringIO):
    """Output that presses Ctrl-C when something was written so many times."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.at = at

    def write(self, text: str) -> int:
        self.at -= text not in ("> ", "\n")
        if self.at == 0:
            self.at = -1
            os.kill(os.getpid(), signal.SIGINT)
        return super().write(text)


@attack("E", 18, weight=2)
def a_chat_is_left_only_by_its_way_out(case: Case) -> None:
    """It tells the way out, sends no empty lines, and Ctrl-C in an answer ends only the answer."""
    model = make_checkpoint(case.folder / "m")
    kind = case.turn([way_out := "it shows the way out", "it sends no empty lines", "Ctrl-C"])
    words = ["hello", "and you?", "the cat"] if kind == "Ctrl-C" else ["", "   ", "the cat"]
    lines = case.draw.choices(words, k=4)
    terminal, screen = (
        Terminal("\n".join([*lines, "last"]) + "\n"),
        Screen(case.draw.randint(0, 12) if kind == "Ctrl-C" else -1),
    )
    errors = io.StringIO()
    command = ["generate", str(model), "--chat", "--device", "cpu", "--max-new-tokens", "4"]
    asked = []
    render = ligermodels.Tokenizer.apply_chat_template

    def watched(self: Any, messages: Any, **options: Any) -> Any:
        asked.append(messages[-1]["content"])
        return render(self, messages, **options)

    signal.signal(signal.SIGINT, signal.default_int_handler)
    with (
        mock.patch.object(ligermodels.Tokenizer, "apply_chat_template", watched),
        mock.patch.object(sys, "stdin", terminal),
        contextlib.redirect_stdout(screen),
        contextlib.redirect_stderr(errors),
    ):
        code = cli.main(command)
    shown = screen.getvalue() + errors.getvalue()
    if code != 0:
        raise Fault(f"exit code {code}: {shown[-400:]}")
    if "Traceback" in shown or (kind == way_out and "Ctrl-D" not in shown):
        raise Fault(f"the way out is not shown: {shown[-400:]}")
    if asked != [line for line in [*lines, "last"] if line.strip()]:
        raise Fault(f"of {lines} these were sent: {asked}")

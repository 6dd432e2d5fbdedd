"""Check every family in examples/families, and write the tables of its README.md.

python -m tests.examples.family_table [NAME ...] [--gpu] [--out FILE]

With names it checks only these, and prints their rows for --rows. With --gpu it writes the table of
a GPU, which has two more columns: the error of our bf16 logits divided by that of transformers'
bf16 logits. Both errors are distances from transformers' float32 logits. The families are checked
at the same time, each in a process of its own.
"""

from __future__ import annotations

import argparse
import multiprocessing
import re
import statistics
import tempfile
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import Any

import torch

from ligermodels.checks.check_family import BOUNDS, FamilyReport, _randomize, check_family
from tests import outside
from tests.models.pairs import relative
from tests.models.parity import BFLOAT16_MEAN, BFLOAT16_WORST

PAGE = outside.FOLDER / "README.md"
START = "<!-- written by tests/examples/family_table.py{} -->\n"
END = "<!-- end of the table -->\n"
# What the page says before the table of a GPU.
GPU_TEXT = """\
On a GPU the same checks run in float32, without the compilation. The last two columns are about
bf16: they have the error of our logits divided by that of transformers' logits, as the geometric
mean over eight inputs and as the largest. Both errors are distances from transformers' float32
logits, so ours is closer below 1. In these models each token takes every expert, because a choice
that rounding changes would hide all other errors.

"""
ON_GPU = [check for check in BOUNDS if check != "compile"]
# The sizes of the models in bf16. Where each token takes every expert, rounding cannot choose
# others: such a change would hide the other errors.
WIDE = {
    "vocab_size": 1000,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 3,
    "num_attention_heads": 8,
    "head_dim": 64,
    "max_position_embeddings": 256,
}
WIDE_EXPERTS = {"num_experts_per_tok": 4, "moe_intermediate_size": 256}


def lines_of(name: str) -> int:
    """Return the number of lines of a family's file."""
    return len((outside.FOLDER / f"{name}.py").read_text().splitlines())


def bfloat16_ratios(name: str, device: str, draws: int = 8) -> list[float]:
    """For each input, return our bf16 logits' error over that of transformers' bf16 logits."""
    import transformers

    auto, cls = transformers.AutoModelForCausalLM, outside.family(name)
    config = cls.config_class.small(**WIDE, **(WIDE_EXPERTS if "moe" in name else {}))
    with tempfile.TemporaryDirectory() as folder, torch.no_grad():
        ours = cls(config)
        ours.save_hf(folder)  # for its config.json
        random = auto.from_pretrained(folder, dtype=torch.float32)
        _randomize(random, 0)
        random.to(torch.bfloat16).save_pretrained(folder)
        exact, theirs = (
            auto.from_pretrained(folder, dtype=dtype).to(device).eval()
            for dtype in (torch.float32, torch.bfloat16)
        )
        ours = cls.from_hf(folder, dtype=torch.bfloat16, device=device)
        ratios = []
        for seed in range(draws):
            generator = torch.Generator().manual_seed(seed)
            ids = torch.randint(3, config.vocab_size, (2, 200), generator=generator).to(device)
            expected = exact(ids).logits
            error = relative(ours.head.logits(ours(ids)), expected)
            ratios.append(error / relative(theirs(ids).logits, expected))
    return ratios


def check(name: str, device: str) -> tuple[FamilyReport, list[float]]:
    """Return the report of a family, and on a GPU the ratios of its errors in bf16."""
    on_gpu = device != "cpu"
    report = check_family(outside.family(name), device=device, compile=not on_gpu)
    return report, bfloat16_ratios(name, device) if on_gpu else []


def row(name: str, report: FamilyReport, ratios: list[float]) -> tuple[str, bool]:
    """Return a row of the table, and whether everything is within its bounds."""
    worst = report.worst()
    cells = [str(worst[check]) for check in BOUNDS if check in worst]
    ok = report.ok
    if ratios:
        mean, largest = statistics.geometric_mean(ratios), max(ratios)
        cells += [f"{mean:.3f}", f"{largest:.3f}"]
        ok = ok and mean <= BFLOAT16_MEAN and largest <= BFLOAT16_WORST
    return f"| `{name}.py` | {lines_of(name)} | {' | '.join(cells)} |", ok


def write(table: list[str], mark: str, out: Path) -> None:
    """Put a table between its marks in the page."""
    before, start, rest = PAGE.read_text().partition(START.format(mark))
    after = rest.partition(END)[2]
    text = GPU_TEXT if mark else ""
    if left_out := [n for n in outside.NAMES if not any(f"`{n}.py`" in line for line in table)]:
        text += f"These have no row yet: {', '.join(left_out)}.\n\n"
    out.write_text(before + start + text + "\n".join(table) + "\n" + END + after)


def main() -> None:
    """Print the reports and write a table, whose failures are marked. Exit with 1 if there are."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("names", nargs="*", help="families, such as olmo2; the default is all")
    parser.add_argument("--gpu", action="store_true", help="check on a GPU")
    parser.add_argument("--out", type=Path, default=PAGE, help="write the page here")
    parser.add_argument("--rows", type=Path, help="take the rows that an earlier run printed here")
    parser.add_argument("--workers", type=int, default=1, help="processes; the default is one")
    given = parser.parse_args()
    columns: list[Any] = [*(ON_GPU if given.gpu else BOUNDS)]
    columns += ["bf16 mean", "bf16 largest"] if given.gpu else []
    table = [f"| file | lines | {' | '.join(columns)} |", "|---" * (2 + len(columns)) + "|"]
    device, passed = "cuda" if given.gpu else "cpu", True
    names, lines = given.names or outside.NAMES, list[str]()
    if given.rows:
        lines = re.findall(r"^\| `\w+\.py` \|.*\|$", given.rows.read_text(), re.M)
    else:
        with ProcessPoolExecutor(given.workers, multiprocessing.get_context("spawn")) as pool:
            runs = {pool.submit(check, name, device): name for name in names}
            for run in as_completed(runs):
                if run.exception():
                    print(f"FAILED {runs[run]}: {run.exception()!r}", flush=True)
                    passed = False
                    continue
                line, ok = row(runs[run], *run.result())
                print(run.result()[0], line, sep="\n", flush=True)
                lines.append(line)
                passed = passed and ok
    table += sorted(set(lines))
    print("\n".join(table))
    if passed and not given.names and not any("FAILED" in line for line in table):
        write(table, " --gpu" * given.gpu, given.out)
    raise SystemExit(0 if passed else 1)


if __name__ == "__main__":
    main()

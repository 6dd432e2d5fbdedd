"""Show that the tests of mended faults fail on the code before: python -m tests.faults

Every fault is listed with the commit that mended it and with its tests. Each test runs twice, in a
process of its own: with the package as it is, where it must pass, and with the package of BEFORE,
where it must fail. The results go to faults.json in benchmarks/results, and faults.md beside it
shows them.

    python -m tests.faults                      # the tests that need no GPU
    python -m tests.faults --gpu --out FOLDER   # those that need one; FOLDER gets faults.json
    python -m tests.faults --add FILE           # add the results that another machine has printed
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import tempfile
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).parent.parent
RESULTS = ROOT / "benchmarks" / "results" / "faults.json"
PAGE = RESULTS.with_suffix(".md")
START, END = "<!-- written by tests/faults.py -->\n", "<!-- end of the table -->\n"
BEFORE = "01d9e7d"


class Fault(NamedTuple):
    """A fault, the commit that mended it, and its tests."""

    what: str
    commit: str
    tests: tuple[str, ...] = ()
    gpu_tests: tuple[str, ...] = ()


CONFIG, IO, BASE = (
    "tests/models/test_config.py",
    "tests/models/test_hf_io.py",
    "tests/models/test_base.py",
)
ROTARY, HEAD = "tests/layers/test_rotary.py", "tests/layers/test_loss_head.py"
MODELS, MASK = "tests/gpu/test_models_on_gpu.py", "tests/layers/test_attention_mask.py"
FAULTS = (
    Fault(
        "A preset is handed out by reference: an edit of its rope_scaling changes later ones",
        "be15d32",
        (f"{CONFIG}::test_presets_are_not_shared",),
    ),
    Fault(
        "A rotary embedding keeps the config's dict, and derives from it again at `.to()`",
        "9340b5d",
        (f"{ROTARY}::test_the_callers_dict_is_copied",),
    ),
    Fault(
        "An assignment to a config field leaves derived fields as they were",
        "be15d32",
        (f"{CONFIG}::test_derived_fields_follow_the_fields_they_are_derived_from",),
    ),
    Fault(
        "`save_hf` writes a wrong model when a tied embedding was replaced",
        "17cf97c",
        (f"{IO}::test_a_head_that_is_tied_to_a_replaced_embedding_is_not_saved",),
    ),
    Fault(
        "`save_hf` of a tensor subclass raises an error of torch",
        "17cf97c",
        (f"{IO}::test_a_tensor_subclass_is_not_saved",),
    ),
    Fault(
        "`save_hf` of parameters that ZeRO-3 divides raises an error of torch",
        "17cf97c",
        (f"{IO}::test_parameters_that_zero3_divides_are_not_saved",),
    ),
    Fault(
        "Global module hooks see 2 of 9 linears",
        "110b7fd",
        (
            f"{BASE}::test_a_hook_of_all_modules_sees_each_module",
            "tests/layers/test_fusion.py::test_no_module_is_while_a_hook_of_all_modules_is_registered",
        ),
    ),
    Fault(
        "A mask of ones on the CPU is computed with, although it hides nothing",
        "110b7fd",
        (f"{BASE}::test_a_mask_of_ones_on_the_cpu_hides_nothing",),
    ),
    Fault(
        "A mask of ones on a GPU takes FlexAttention",
        "66858f7",
        (f"{MASK}::test_padding_at_the_ends_of_rows_divides_them_into_documents",),
        (f"{MODELS}::test_a_mask_of_ones_takes_no_flex_attention",),
    ),
    Fault(
        "The ropes dynamic and longrope make tensors from host data, which a CUDA graph refuses",
        "9340b5d",
        (f"{ROTARY}::test_a_forward_makes_no_tensor_from_host_data",),
        (
            f"{ROTARY}::test_a_cuda_graph_captures_every_type",
            f"{MODELS}::test_ropes_that_depend_on_the_length_in_a_cuda_graph",
        ),
    ),
    Fault(
        "Each forward walks through all modules",
        "110b7fd",
        (f"{BASE}::test_a_forward_does_not_walk_through_all_modules",),
    ),
    Fault(
        "Each call of FlexAttention makes a class to set the options of its compiler",
        "110b7fd",
        (f"{MASK}::test_the_options_of_the_compiler_hold_during_a_call",),
        (f"{MODELS}::test_flex_attention_makes_no_class_at_a_call",),
    ),
    Fault(
        "The head counts the targets twice",
        "992de1f",
        (f"{HEAD}::test_the_targets_are_counted_once",),
        (f"{MODELS}::test_the_targets_are_counted_once",),
    ),
    Fault(
        '`save_hf(max_shard_size="5GB")` raises',
        "17cf97c",
        (f"{IO}::test_the_size_of_shards_may_have_a_unit",),
    ),
    Fault('`from_hf(dtype="bfloat16")` raises', "17cf97c", (f"{IO}::test_a_dtype_may_be_named",)),
    Fault(
        "`LlamaConfig.from_hf(hub id)` raises",
        "be15d32",
        (f"{CONFIG}::test_a_config_is_read_from_a_hub_id",),
    ),
    Fault(
        "A config refuses numpy's numbers",
        "be15d32",
        (f"{CONFIG}::test_numbers_of_numpy_become_those_of_python",),
    ),
    Fault(
        "The loss options refuse numpy's numbers",
        "992de1f",
        (f"{HEAD}::test_numbers_of_numpy_are_numbers",),
    ),
)


class Outcome(NamedTuple):
    """How a test ended: whether it passed or failed, and what its first error says."""

    passed: bool
    failed: bool
    error: str


def run(test: str, folder: Path, marker: str) -> Outcome:
    """Run a test in a folder that has `tests` and a package."""
    command = [sys.executable, "-m", "pytest", "-q", "--tb=short", "-p", "no:cacheprovider"]
    path = os.pathsep.join([str(folder), *filter(None, [os.environ.get("PYTHONPATH")])])
    done = subprocess.run(
        [*command, "-m", marker, test],
        cwd=folder,
        env={**os.environ, "PYTHONPATH": path},
        capture_output=True,
        text=True,
    )
    said = re.findall(r"^E   +(\S.*)$", re.sub(r" at 0x\w+", "", done.stdout), re.M)
    summary = done.stdout.strip().rpartition("\n")[2]
    passed = done.returncode == 0 and " passed" in f" {summary}"
    return Outcome(passed, " failed" in f" {summary}", (said or [summary])[0][:160])


def unpack(before: Path) -> None:
    """Write the package of BEFORE into a folder."""
    archive = subprocess.run(
        ["git", "archive", BEFORE, "ligermodels"], cwd=ROOT, check=True, capture_output=True
    )
    subprocess.run(["tar", "-x", "-C", str(before)], input=archive.stdout, check=True)


def compare(gpu: bool, before: Path, workers: int) -> dict[str, Any]:
    """Run each test with both packages. `before` has the old one."""
    shutil.copytree(ROOT / "tests", before / "tests", dirs_exist_ok=True)
    shutil.copy(ROOT / "pyproject.toml", before)
    tests = [test for each in FAULTS for test in (each.gpu_tests if gpu else each.tests)]
    marker = "gpu" if gpu else "not gpu and not interpreter"
    with ThreadPoolExecutor(workers) as pool:
        old = pool.map(lambda test: run(test, before, marker), tests)
        new = pool.map(lambda test: run(test, ROOT, marker), tests)
    return {
        test: {
            "fails before": then.failed,
            "with": then.error,
            "passes now": now.passed,
            "on": "a GPU" if gpu else "a CPU",
        }
        | ({} if now.passed else {"now": now.error})
        for test, then, now in zip(tests, old, new)
    }


def page(results: dict[str, Any]) -> str:
    """Return the table of the page."""
    lines = ["| fault | mended in | test | before | its error there | now |", "|---" * 6 + "|"]
    for each in FAULTS:
        for test in (*each.tests, *each.gpu_tests):
            found = results.get(test)
            on_gpu = " (GPU)" if test in each.gpu_tests else ""
            cells = ["not run", "", "not run"]
            if found is not None:
                error = found["with"].replace("|", "\\|").replace("`", "'")
                cells = [
                    "fails" if found["fails before"] else "DOES NOT FAIL",
                    f"`{error}`",
                    "passes" if found["passes now"] else "FAILS",
                ]
            name = test.partition("::")[2]
            link = f"[{name}](../../{test.partition('::')[0]}){on_gpu}"
            lines.append(f"| {each.what} | {each.commit} | {link} | {' | '.join(cells)} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    """Run the tests, or add results, and write the page. Exit with 1 if a test disagrees."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--gpu", action="store_true", help="run the tests that need a GPU")
    parser.add_argument("--before", type=Path, help="a folder that has the old package already")
    parser.add_argument("--out", type=Path, help="folder for faults.json, instead of the page")
    parser.add_argument("--add", type=Path, help="results to add, instead of running tests")
    parser.add_argument("--workers", type=int, default=1, help="tests that run at the same time")
    given = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        before = given.before or Path(folder)
        if given.add:
            (line,) = re.findall(r"^results: (.*)$", given.add.read_text(), re.M)
            results = json.loads(line)
        else:
            if given.before is None:
                unpack(before)
            results = compare(given.gpu, before.resolve(), given.workers)
    wrong = [name for name, x in results.items() if not (x["fails before"] and x["passes now"])]
    for name, found in results.items():
        print("WRONG" if name in wrong else "ok", name, "|", found["with"], found.get("now", ""))
    print("results:", json.dumps(results))
    if given.out:
        given.out.mkdir(parents=True, exist_ok=True)
        (given.out / RESULTS.name).write_text(json.dumps(results, indent=1) + "\n")
    else:
        known = json.loads(RESULTS.read_text()) if RESULTS.exists() else {}
        RESULTS.write_text(json.dumps({**known, **results}, indent=1) + "\n")
        before_table, _, rest = PAGE.read_text().partition(START)
        table = START + page({**known, **results}) + END
        PAGE.write_text(before_table + table + rest.partition(END)[2])
    raise SystemExit(1 if wrong else 0)


if __name__ == "__main__":
    main()

"""Every block of the documentation runs, and the files, names and figures it gives are true."""

from __future__ import annotations

import ast
import importlib
import importlib.util
import inspect
import json
import re
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ligermodels.models import auto
from ligermodels.training.losses import LOSSES
from tests import markdown, outside
from tests.test_readme import RESULTS, step_line, steps

ROOT = markdown.ROOT
PACKAGE = ROOT / "ligermodels"
DOCS = ROOT / "docs"
PAGES = [*sorted(DOCS.glob("*.md")), ROOT / "CONTRIBUTING.md"]
LINKING = [*PAGES, ROOT / "README.md", ROOT / "CHANGELOG.md", ROOT / "benchmarks" / "README.md"]
BENCHMARKS = (DOCS / "benchmarks.md").read_text(encoding="utf-8")
# Names that a reader replaces or creates: the op of the example, and placeholders in capitals.
EXAMPLES = re.compile(r"softcap|[A-Z]{2}|^runs/")
# Pages whose Python blocks are parts of one example; tests below run them together.
OP_PAGE, FAMILY_PAGE = DOCS / "adding_an_op.md", DOCS / "adding_a_family.md"
TOGETHER = OP_PAGE, FAMILY_PAGE
# Pages from which newcomers paste. At zsh's prompt, comments and unmatched patterns are errors.
PASTED = ["README", "benchmarks", "composing", "generation", "loss_head", "support", "training"]

SHELL_BLOCKS = [block for page in PAGES for block in markdown.runnable(page, markdown.SHELL)]
PYTHON_BLOCKS = [
    block
    for page in PAGES
    if page not in TOGETHER
    for block in markdown.runnable(page, markdown.PYTHON)
]


@pytest.fixture(scope="module")
def small_smollm2(smollm2: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return markdown.small_checkpoint(smollm2, tmp_path_factory.mktemp("docs") / "smollm2")


def files_before(block: markdown.Block) -> list[str]:
    """Return the earlier blocks of a page that only write a file into runs/."""
    blocks = markdown.runnable(block.page, markdown.SHELL)
    texts = [one.text for one in blocks if one.line < block.line]
    start = "mkdir -p runs\ncat > runs/"
    return [text for text in texts if text.startswith(start) and text.endswith("EOF\n")]


@pytest.mark.usefixtures("registry")
@pytest.mark.parametrize("block", SHELL_BLOCKS, ids=lambda block: block.id)
def test_shell_block(block: markdown.Block, small_smollm2: Path, tmp_path: Path) -> None:
    """The block runs unchanged, on a small checkpoint. The options on the pages are quick."""
    checkout = markdown.make_checkout(tmp_path / "ligermodels")
    text = "\n".join([*files_before(block), block.text])
    text = text.replace(markdown.CHECKPOINT, str(small_smollm2))
    text = text.replace("<hub id or folder>", str(small_smollm2))
    text = text.replace(" check-family ", " check-family --no-compile ")  # it would take minutes
    markdown.run_shell(text, checkout, tmp_path)


@pytest.fixture
def losses() -> Iterator[None]:
    """Remove the losses that a block defines after it."""
    before = dict(LOSSES)
    yield
    LOSSES.clear()
    LOSSES.update(before)


@pytest.mark.usefixtures("losses")
@pytest.mark.parametrize("block", PYTHON_BLOCKS, ids=lambda block: block.id)
def test_python_block(
    block: markdown.Block, small_smollm2: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(markdown.make_checkout(tmp_path / "ligermodels"))
    monkeypatch.setattr(auto, "_registered", dict(auto._registered))  # a block registers a class
    monkeypatch.setattr(sys, "path", [*sys.path])
    for text in files_before(block):
        markdown.run_shell(text, Path.cwd(), tmp_path)
    torch.manual_seed(0)
    text = block.text.replace(markdown.CHECKPOINT, str(small_smollm2))
    if block.page.stem == "float8":
        text = text.replace("4096", "256")  # the vocabulary, in the slow bfloat16 of a CPU
    if "class " in text:  # Python's prompt ends a class at the first empty line
        names = markdown.run_python(text)
    else:
        names = markdown.paste_python(text)
    if "same_loss" in names:
        torch.testing.assert_close(names["loss"], names["same_loss"])
    if "policy_loss" in names:
        assert names["model"].embed_tokens.weight.grad.count_nonzero() > 0
    if "labels" in names:
        valid = names["labels"][:, 1:] != -100
        assert names["out"].token_log_probs[:, :-1][valid].isfinite().all()


@pytest.mark.parametrize("name", PASTED)
def test_shell_blocks_can_be_pasted_into_zsh(name: str) -> None:
    page = ROOT / "README.md" if name == "README" else DOCS / f"{name}.md"
    for block in markdown.runnable(page, markdown.SHELL):
        bare = re.sub(r"<<'EOF'.*?\nEOF\n", "\n", block.text, flags=re.DOTALL)
        bare = re.sub(r"'[^']*'|\"[^\"]*\"", "''", bare)
        assert not re.search(r"[#*?!\[\]]", bare), block.id


def load(name: str, file: Path, text: str, monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    """Import a block as a module from a file, because Triton reads a kernel's source from it."""
    file.parent.mkdir(exist_ok=True)
    file.write_text(text, encoding="utf-8")
    spec = importlib.util.spec_from_file_location(name, file)
    module = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, name, module)
    parent, _, child = name.rpartition(".")
    monkeypatch.setattr(importlib.import_module(parent), child, module, raising=False)
    spec.loader.exec_module(module)
    return module


def example_op(folder: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ModuleType, ModuleType]:
    """Return the reference and the kernels of the page's example op."""
    from ligermodels import kernels

    reference, triton, function, public, _, _ = (
        block.text for block in markdown.runnable(OP_PAGE, markdown.PYTHON)
    )
    base = "ligermodels.kernels"
    made = [
        load(f"{base}.{room}.softcap", folder / room / "softcap.py", text, monkeypatch)
        for room, text in (("reference", reference), ("triton", triton))
    ]
    load(f"{base}.softcap", folder / "softcap.py", function, monkeypatch)
    names = markdown.run_python(public)
    monkeypatch.setattr(kernels, "softcap", names["softcap"])
    return made[0], made[1]


def test_the_example_op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Check its files, its entry in the tests' table, and its entry in the benchmarks' table."""
    pytest.importorskip("triton")
    reference, triton = example_op(tmp_path, monkeypatch)
    for name in ("softcap_forward", "softcap_backward"):
        twins = [inspect.signature(getattr(module, name)) for module in (reference, triton)]
        assert twins[0] == twins[1]

    from benchmarks.cases import glu
    from tests.kernels import ops_table

    *_, entry, case = (block.text for block in markdown.runnable(OP_PAGE, markdown.PYTHON))
    names = markdown.run_python(f"CASES = {{\n{entry}}}", **vars(ops_table))
    softcap = names["CASES"]["softcap"]
    inputs = softcap.inputs((3,), 5)
    made = ops_table.leaves(softcap, inputs, (torch.device("cpu"), torch.float64))
    ours = ops_table.outputs_and_gradients(softcap.function, made)
    exact = ops_table.outputs_and_gradients(softcap.formula, made)
    torch.testing.assert_close(ours, exact)
    with pytest.raises(ValueError, match="softcap: cap=0; expected a positive number"):
        softcap.function(made["x"], 0)

    case = case.partition("    ...")[0] + "}"  # the table has more entries
    names = markdown.run_python(case, **vars(glu), torch=torch)
    measured = names["OPS"]["softcap"].build(glu.Random("cpu"), 4, 8)
    assert measured.implementations.keys() == {"eager", "torch.compile", "ligermodels"}
    (x,) = measured.inputs()
    implementations = [measured.implementations[name] for name in ("eager", "ligermodels")]
    torch.testing.assert_close(*(each(x.float()) for each in implementations))


@pytest.mark.interpreter
def test_the_kernels_of_the_example_op(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    reference, triton = example_op(tmp_path, monkeypatch)
    x, grad = 30 * torch.randn(3, 700), torch.randn(3, 700)
    torch.testing.assert_close(triton.softcap_forward(x, 20.0), reference.softcap_forward(x, 20.0))
    torch.testing.assert_close(
        triton.softcap_backward(x, grad, 20.0), reference.softcap_backward(x, grad, 20.0)
    )


def is_excerpt(text: str, file: Path) -> bool:
    """Whether the file has the lines of the text in their order, with "..." for lines left out.

    A function may be shown without its annotations.
    """
    tree = ast.parse(file.read_text(encoding="utf-8"))
    if text.startswith("def forward"):
        for node in ast.walk(tree):
            if isinstance(node, ast.arg):
                node.annotation = None
            elif isinstance(node, ast.FunctionDef):
                node.returns = None
        source = ast.unparse(tree)
    else:
        source = file.read_text(encoding="utf-8")
    lines = iter(line.strip() for line in source.splitlines())
    wanted = [line.strip() for line in text.splitlines()]
    return all(line in lines for line in wanted if line and line != "...")


@pytest.mark.usefixtures("registry")
def test_the_example_family(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The excerpts occur in the files, and the block that uses the family runs."""
    *excerpts, use, entry = (b.text for b in markdown.runnable(FAMILY_PAGE, markdown.PYTHON))
    file = ROOT / "examples" / "families" / "glm4.py"
    assert [is_excerpt(each, file) for each in excerpts] == [True] * 5
    assert is_excerpt(entry, ROOT / "tests" / "families.py")
    outside.family("glm4")
    monkeypatch.chdir(tmp_path)
    assert type(markdown.run_python(use)["model"]).__name__ == "LigerGlm4"


def anchors(page: Path) -> set[str]:
    """Return the anchors that GitHub gives to the headings of a page."""
    headings = re.findall(r"^#+ (.+)$", page.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", each.lower()).replace(" ", "-") for each in headings}


@pytest.mark.parametrize("page", LINKING, ids=lambda page: f"{page.parent.name}/{page.stem}")
def test_links_lead_somewhere(page: Path) -> None:
    for target in re.findall(r"\]\(([^)\s]+)\)", page.read_text(encoding="utf-8")):
        if target.startswith(("https://", "families/", "reference/", "examples/")):
            continue  # the build of the site checks the pages that it makes
        path, _, anchor = target.partition("#")
        linked = page.parent / path if path else page
        assert linked.exists(), target
        assert not anchor or anchor in anchors(linked), target


@pytest.mark.parametrize("page", [*PAGES, ROOT / "README.md"], ids=lambda page: page.stem)
def test_make_targets_exist(page: Path) -> None:
    targets = re.findall(r"`make ([a-z-]+)", page.read_text(encoding="utf-8"))
    assert set(targets) <= markdown.make_targets()


def test_the_table_of_the_steps_is_that_of_the_committed_runs() -> None:
    lines = BENCHMARKS.splitlines()
    for workload, rows in steps().items():
        errors = [row.get("gradient error") for row in rows]
        if None in errors:
            shown = "not measured"
        else:
            cells = (f"{each:.4f}" for each in errors)
            shown = ", ".join(
                f"**{cell}**" if each == min(errors) else cell for cell, each in zip(cells, errors)
            )
        assert f"{step_line(workload, rows)} {shown} |" in lines


def test_the_tables_of_the_cpu_are_those_of_the_committed_runs() -> None:
    """The step beside transformers, and the load beside safetensors."""
    lines = BENCHMARKS.splitlines()
    for row in json.loads((RESULTS / "cpu.json").read_text())["rows"]:
        name, seconds, peak = row["implementation"], row["seconds"], row["peak GiB"]
        assert f"| {name} | {seconds:.2f} | {peak:.2f} |" in lines
    for row in json.loads((RESULTS / "load.json").read_text())["rows"]:
        ours, theirs = (row["times"][x] for x in ("ligermodels", "safetensors, new memory"))
        ratio, least = (ours[key] / theirs[key] for key in ("ms", "least ms"))
        gigabytes = f"{row['bytes'] / 1e9:.2f} GB"
        assert (
            f"| {row['checkpoint']}, {gigabytes} | {row['threads']} | {theirs['ms']:.0f} "
            f"| {ours['ms']:.0f} | {ratio:.2f} | {least:.2f} |"
        ) in lines


def test_the_tables_of_the_ops_are_those_of_the_committed_run() -> None:
    """Each row is one of the committed run, except for a note on a peer that is always absent."""
    shown = BENCHMARKS[BENCHMARKS.index("## Ops") : BENCHMARKS.index("## Accuracy")].splitlines()
    rows = [line for line in shown if line.startswith("|")]
    measured = (RESULTS / "ops.md").read_text(encoding="utf-8")
    measured = measured.replace("absent (torch linear_cross_entropy), ", "")
    assert len(rows) > 20
    assert not set(rows) - set(measured.splitlines())


def result(name: str) -> dict[str, Any]:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def test_the_budgets_of_the_loss_head_are_those_of_the_committed_run() -> None:
    page = (DOCS / "loss_head.md").read_text(encoding="utf-8")
    shown = re.findall(r"^\| (default|\d+ \wiB).* \| ([\d.]+) ms \|$", page, re.MULTILINE)
    units, measured = {"default": None, "MiB": 2**20, "GiB": 2**30}, {}
    for row in result("ops.json")["rows"]:
        if (row["op"], row["implementation"]) == ("linear_cross_entropy_budget", "ligermodels"):
            measured[row["sizes"]["max_scratch_bytes"]] = row["forward + backward"]["ms"]
    assert len(shown) == len(measured)
    for name, ms in shown:
        number, _, unit = name.rpartition(" ")
        budget = int(number) * units[unit] if number else None
        assert f"{measured[budget]:.{1 if budget is None else 0}f}" == ms


def test_the_figures_of_accuracy_are_those_of_the_committed_runs() -> None:
    lines, found = BENCHMARKS.splitlines(), result("convergence.json")
    kinds = ("curve", "tokens", "evaluation", "parameters")
    for family in found["families"]:
        ratios = " | ".join(f"{family['ratios'][kind]:.2f}" for kind in kinds)
        assert f"| {family['family']} | {ratios} |" in lines
    means = [found["means"][kind] for kind in kinds]
    shown = [f"{mean:.2f} ± {error:.2f}" for mean, error in means[:3]]
    shown.append("{:.3f} ± {:.3f}".format(*means[3]))
    assert f"| geometric mean, standard error | {' | '.join(shown)} |" in lines


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.stem)
def test_files_exist(page: Path) -> None:
    """Each path in prose and commands exists, from the root of the repository or of the package."""
    paths = re.findall(r"(?<![\w/.>*-])(?:[\w.]+/)+\w+\.py\b", page.read_text(encoding="utf-8"))
    missing = [
        path
        for path in dict.fromkeys(paths)
        if not EXAMPLES.search(path) and not any((top / path).is_file() for top in (ROOT, PACKAGE))
    ]
    assert not missing

"""What is published: the files, on each Python that is here, and the extras."""

from __future__ import annotations

import re
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent
EXTRAS = re.findall(
    r"^(\w+) = \[",
    ROOT.joinpath("pyproject.toml")
    .read_text()
    .partition("[project.optional-dependencies]")[2]
    .partition("\n[")[0],
    re.M,
)
# What `ligermodels --help` imports; torch and the rest are the same as in the tests.
FOR_HELP = ["tyro", "rich", "pyyaml", "typing_extensions"]

pytestmark = pytest.mark.long


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the wheel and the source distribution, made from a copy of the tree."""
    folder = tmp_path_factory.mktemp("dist")
    copy = folder / "tree"
    names = subprocess.check_output(["git", "ls-files"], cwd=ROOT, text=True).splitlines()
    for name in names:
        if (ROOT / name).is_file():
            (copy / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(ROOT / name, copy / name)
    code = "from setuptools import build_meta as b; b.build_sdist('..'); b.build_wheel('..')"
    subprocess.run([sys.executable, "-c", code], cwd=copy, check=True, capture_output=True)
    return folder


def test_the_files_hold_the_package_alone(built: Path) -> None:
    (wheel,), (source,) = built.glob("*.whl"), built.glob("*.tar.gz")
    assert wheel.stat().st_size < 2**20
    files = set(zipfile.ZipFile(wheel).namelist())
    expected = {str(x.relative_to(ROOT)) for x in ROOT.glob("ligermodels/**/*.py")}
    expected |= {"ligermodels/py.typed", "ligermodels/checks/family.py.jinja"}
    assert {name for name in files if ".dist-info/" not in name} == expected
    with tarfile.open(source) as archive:
        names = {name.partition("/")[2] for name in archive.getnames()}
    assert {*expected, "pyproject.toml", "README.md", "LICENSE"} <= names


def test_a_clone_does_not_hide_its_package(built: Path) -> None:
    """Beside a clone, the import finds the package and not the clone's folder."""
    code = "from setuptools import build_meta as b; b.build_editable('../editable')"
    subprocess.run(
        [sys.executable, "-c", code], cwd=built / "tree", check=True, capture_output=True
    )
    (wheel,) = (built / "editable").glob("*.whl")
    assert not any("finder" in name for name in zipfile.ZipFile(wheel).namelist())


def runs(python: str | Path) -> bool:
    return subprocess.run([python, "-V"], capture_output=True, check=False).returncode == 0


@pytest.mark.parametrize("version", ["3.10", "3.11", "3.12", "3.13"])
def test_the_package_works_on_each_python(version: str, built: Path, tmp_path: Path) -> None:
    """The wheel, and on one of them the source distribution."""
    found = [shutil.which(f"python{version}")]
    found += Path.home().glob(f".pyenv/versions/{version}.*/bin/python")
    python = next((each for each in found if each and runs(each)), None)
    if python is None:
        pytest.skip(f"there is no python{version}")
    subprocess.run([python, "-m", "venv", tmp_path / "env"], check=True)
    own = tmp_path / "env/bin/python"
    (package,) = built.glob("*.tar.gz" if version == "3.12" else "*.whl")
    for what in (["--no-deps", package], FOR_HELP):
        subprocess.run([own, "-m", "pip", "install", "-q", *what], check=True)
    subprocess.run([own, "-m", "compileall", "-q", tmp_path / "env/lib"], check=True)
    said = subprocess.check_output([tmp_path / "env/bin/ligermodels", "--help"], text=True)
    assert "finetune" in said


@pytest.mark.parametrize("resolution, version", [("lowest-direct", "3.10"), ("highest", "3.13")])
@pytest.mark.parametrize("extra", EXTRAS)
def test_each_extra_resolves(extra: str, resolution: str, version: str) -> None:
    if version == "3.10" and extra in ("trainers", "test", "dev"):
        pytest.skip("transformers 5.23 and TRL 1.16 need Python 3.11")
    uv = pytest.importorskip("uv").find_uv_bin()
    command = [uv, "pip", "compile", "-q", "pyproject.toml", "--extra", extra, "-o", "/dev/null"]
    command += ["--python-version", version, "--resolution", resolution]
    subprocess.run(command, cwd=ROOT, check=True)

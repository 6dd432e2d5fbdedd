"""The names of modules and tensors in vLLM's model code, read from a wheel without running it.

`pip download --no-deps vllm` and `python -m tests.converters.vllm_names vllm-*.whl` print, for each
family, the table of `test_vllm_names`, and what of our exports vLLM's code does not name.
"""

from __future__ import annotations

import ast
import re
import sys
import zipfile
from importlib import import_module

from tests.tiny_models import random_model

FOLDER = "vllm/model_executor/models/"


class Wheel:
    """The Python files of vLLM's models."""

    def __init__(self, path: str) -> None:
        self.files = zipfile.ZipFile(path)

    def tree(self, module: str) -> ast.Module:
        return ast.parse(self.files.read(f"{FOLDER}{module}.py"))

    def module_of(self, architecture: str) -> str:
        """Return the file of an architecture, which the registry names."""
        text = self.files.read(f"{FOLDER}registry.py").decode()
        found = re.search(rf'"{architecture}": \(\s*"(\w+)"', text)
        return found[1] if found else ""

    def words(self, module: str, depth: int = 3) -> frozenset[str]:
        """Return the attributes that the classes of a file set, and the parts of its texts.

        The texts are the names in a checkpoint, of tensors that vLLM joins or renames. Those of the
        model files that it imports count, too.
        """
        found: set[str] = set()
        for node in ast.walk(self.tree(module)):
            if isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store):
                found.add(node.attr)
            elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                if not re.search(r"\s", node.value):
                    found.update(re.findall(r"\w+", node.value))
            elif isinstance(node, ast.ImportFrom) and depth:
                name = (node.module or "").removeprefix("vllm.model_executor.models.")
                if f"{FOLDER}{name}.py" in self.files.namelist():
                    found |= self.words(name, depth - 1)
        return frozenset(found)


def words_of_export(family: str) -> tuple[str, set[str]]:
    """Return the architecture of a family's export, and the parts of the names of its tensors."""
    model = random_model(family)
    to_hf = import_module("ligermodels.converters.hf_config").to_hf
    parts = {part for name in model.hf_map().source_shapes() for part in name.split(".")}
    return to_hf(model.config)["architectures"][0], {x for x in parts if not x.isdigit()}


if __name__ == "__main__":
    from tests.converters.test_gguf_names import ARCHITECTURES

    wheel = Wheel(sys.argv[1])
    for family in ARCHITECTURES:
        architecture, parts = words_of_export(family)
        module = wheel.module_of(architecture)
        if module == "transformers":
            print(family, architecture, "runs with transformers' own modules")
            continue
        known = wheel.words(module) if module else frozenset()
        print(family, architecture, module or "MISSING", sorted(parts & known))
        print("    not named:", sorted(parts - known))

"""Convert an export of every family with llama.cpp's own script, and read the file with its reader.

`python -m tests.converters.llama_cpp FOLDER` needs a copy of llama.cpp (the source distribution of
llama-cpp-python has one, in vendor/llama.cpp) and sentencepiece. The models are tiny and random,
in float32, and have no tokenizer, so the script writes no vocabulary. config.json has the keys that
a published one has: the defaults of transformers. All matrices together must have as many elements
in the new file as in the export, and the same sum of absolute values.
"""

from __future__ import annotations

import json
import runpy
import sys
import tempfile
from pathlib import Path
from typing import Any

import numpy as np
from safetensors.numpy import load_file
from transformers import CONFIG_MAPPING

from tests.converters.test_gguf_names import ARCHITECTURES
from tests.tiny_models import random_model

# Options of the script. Qwen3.5's layer for a second token is not in a tiny model.
OPTIONS = {"qwen3_5_text": ["--no-nextn"], "qwen3_5_moe_text": ["--no-nextn"]}


def export(family: str, folder: Path) -> dict[str, np.ndarray]:
    """Save a tiny model, and return its tensors."""
    dense = {"mlp_only_layers": []} if family == "qwen3_moe" else {}
    model = random_model(family, **dense).float()
    model.save_hf(folder)
    file = folder / "config.json"
    vocabulary = {str(i): i for i in range(json.loads(file.read_text())["vocab_size"])}
    tokens = {"model": {"vocab": vocabulary}, "added_tokens": []}  # Gemma 3's code counts them
    (folder / "tokenizer.json").write_text(json.dumps(tokens))
    published = CONFIG_MAPPING[family]().to_dict() | json.loads(file.read_text())
    if family == "gemma4_text":
        published["layer_types"] = model.config.types
    if family == "granitemoehybrid":
        published["num_experts_per_tok"] = 0  # as in the dense ones
    file.write_text(json.dumps(published))
    return load_file(folder / "model.safetensors")


def matrices(tensors: dict[str, Any]) -> tuple[int, float]:
    """Return the count and the sum of absolute values of what has more than one dimension."""
    found = [x for x in tensors.values() if max(x.shape) < x.size]
    return sum(x.size for x in found), float(sum(np.abs(x, dtype=np.float64).sum() for x in found))


def main(llama: str) -> None:
    """Convert each family, and print what its file holds."""
    sys.path[:0] = [llama, f"{llama}/gguf-py"]
    for name in [name for name in sys.modules if name.partition(".")[0] == "gguf"]:
        del sys.modules[name]  # the script needs that of its copy
    from conversion import base
    from gguf import GGUFReader

    before = base.ModelBase.__init__

    def without_vocabulary(self: Any, *args: Any, **options: Any) -> None:
        before(self, *args, **options)
        self.set_vocab = lambda: None

    base.ModelBase.__init__ = without_vocabulary
    for family in ARCHITECTURES:
        with tempfile.TemporaryDirectory() as place:
            folder, file = Path(place, "model"), Path(place, "model.gguf")
            expected = matrices(export(family, folder))
            sys.argv = ["convert_hf_to_gguf.py", str(folder), "--outtype", "f32"]
            sys.argv += ["--outfile", str(file), *OPTIONS.get(family, [])]
            try:
                runpy.run_path(f"{llama}/convert_hf_to_gguf.py", run_name="__main__")
            except Exception as error:
                print(f"{family}: {error!r}")
                continue
            tensors = {x.name: x.data for x in GGUFReader(file).tensors}
            count, total = matrices(tensors)
            equal = count == expected[0] and abs(total - expected[1]) <= 1e-9 * total
            said = "equal" if equal else f"{count}, {total} instead of {expected}"
            print(f"{family}: {len(tensors)} tensors, {said}")


if __name__ == "__main__":
    main(*sys.argv[1:])

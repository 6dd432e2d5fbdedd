"""An export that llama.cpp can take: each tensor has a name in its table, and values it can store.

    python -m examples.gguf_names build/smollm2 --output-dir runs/gguf_names

The script writes a copy in bfloat16 and asks the table of the package gguf for the name of every
tensor, as llama.cpp's `convert_hf_to_gguf.py` does. That script is in a clone of llama.cpp:
`python convert_hf_to_gguf.py runs/gguf_names/model --outtype bf16` then writes the file.
"""

from collections import Counter
from pathlib import Path

import torch
from gguf import MODEL_ARCH, get_tensor_name_map
from safetensors import safe_open

from examples.command import call, draw_bars, report
from ligermodels import AutoLiger


def main(model: str, output_dir: Path, *, architecture: str = "llama") -> dict[str, float]:
    """Export the model, and return how many of its tensors have a name there."""
    network = AutoLiger.from_hf(model, dtype=torch.bfloat16)
    network.save_hf(output_dir / "model")
    table = get_tensor_name_map(MODEL_ARCH[architecture.upper()], network.config.num_hidden_layers)
    sizes: Counter[str] = Counter()
    unknown, count = [], 0
    for file in sorted((output_dir / "model").glob("*.safetensors")):
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():
                tensor, count = tensors.get_tensor(name), count + 1
                known = table.get_name(name, try_suffixes=(".weight", ".bias"))
                if known is None or tensor.dtype != torch.bfloat16:
                    unknown.append(name)
                else:
                    sizes[known.split(".")[-2]] += tensor.nbytes
    print(f"without a name in the table: {unknown or 'none'}")
    largest = {name: size / 2**20 for name, size in sizes.most_common(6)}
    draw_bars(output_dir, "MiB of the export, by llama.cpp's names", largest, "{:.0f}")
    return report(output_dir, tensors=count, named=count - len(unknown))


if __name__ == "__main__":
    call(main, __doc__)

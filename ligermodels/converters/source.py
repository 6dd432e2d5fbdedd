"""The checkpoint that a model was loaded from."""

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch

from ligermodels.converters.checkpoint import Checkpoint
from ligermodels.converters.safetensors_file import StoredTensor


@dataclass
class Source:
    """The checkpoint that a model was loaded from; all fields are empty for a new model.

    Attributes:
        folder: the local folder that the weights were loaded from, or None.
        dtype: the dtype of the embedding when it was loaded, or None.
        constants: HF name -> a tensor of the checkpoint that the model does not need. `save_hf`
            writes it as it was.
        files: name -> content of the tokenizer and generation files that were in the folder.
            `save_hf` writes them.
        generation_config: the content of generation_config.json; {} without such a file.
        unread: the checkpoint of a model that `from_hf(device="meta")` has made, until its values
            are read.
    """

    folder: Path | None = None
    dtype: torch.dtype | None = None
    constants: dict[str, StoredTensor] = field(default_factory=dict)
    files: dict[str, bytes] = field(default_factory=dict)
    generation_config: dict[str, Any] = field(default_factory=dict)
    unread: Checkpoint | None = None

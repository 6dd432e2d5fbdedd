"""Native models in tools that load a checkpoint with transformers' `AutoModelForCausalLM`."""

import json
import os
from pathlib import Path

from ligermodels.converters.hf_config import AUTO_CLASS, SHELL_FILE
from ligermodels.errors import CheckpointError, shown
from ligermodels.models.auto import families

_CODE = """\
from ligermodels.integrations.hf_model import {name} as Shell


class {name}(Shell):
    def __init__(self, config):
        super().__init__(config, split_projections={split})
"""


def write_auto_map(folder: str | os.PathLike[str], *, split_projections: bool = False) -> None:
    """Let `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)` load a shell.

    It names the shell in config.json and adds a file of some lines that imports it, as checkpoints
    with their own code do. `auto_map` is for the Auto classes. `architectures` is for tools that
    would otherwise take the class of that name from transformers, such as TRL. Without
    trust_remote_code, `AutoModelForCausalLM` loads the folder as before.

    Args:
        folder: a local checkpoint of a family of this package.
        split_projections: whether the shell has HF's projections, for tools that add adapters.
    Raises:
        CheckpointError: the folder has no config.json that can be read, or no family is registered
            for its model_type.
    """
    file = Path(folder) / "config.json"
    try:
        config = dict(json.loads(file.read_text(encoding="utf-8")))
    except (OSError, ValueError, TypeError) as error:
        raise CheckpointError(f"{file}: it is no config that can be read: {error}") from error
    found = families()
    if config.get("model_type") not in found:
        raise CheckpointError(
            f"{file}: model_type {shown(config.get('model_type'))} is not supported; these are "
            f"supported: {', '.join(found)}"
        )
    name = f"{found[config['model_type']].__name__}ForCausalLM"
    code = _CODE.format(name=name, split=split_projections)
    file.with_name(f"{SHELL_FILE}.py").write_text(code, encoding="utf-8")
    auto_map = {**config.get("auto_map", {}), AUTO_CLASS: f"{SHELL_FILE}.{name}"}
    new = file.with_name("config.json.new")
    config |= {"architectures": [name], "auto_map": auto_map}
    new.write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")
    new.replace(file)

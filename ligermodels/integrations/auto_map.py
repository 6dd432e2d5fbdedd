"""Native models in tools that load a checkpoint with transformers' `AutoModelForCausalLM`."""

import os
from pathlib import Path

from ligermodels.converters.files import CONFIG_NAME, read_json
from ligermodels.converters.hf_config import AUTO_CLASS, SHELL_FILE
from ligermodels.converters.save_dir import write_json
from ligermodels.errors import CheckpointError
from ligermodels.models.auto import family_named

_CODE = """\
from ligermodels.integrations.hf_model import {name} as Wrapper


class {name}(Wrapper):
    def __init__(self, config, native=None, *, split_projections={split}):
        super().__init__(config, native, split_projections=split_projections)
"""


def write_auto_map(folder: str | os.PathLike[str], *, split_projections: bool = False) -> None:
    """Let `AutoModelForCausalLM.from_pretrained(folder, trust_remote_code=True)` load a wrapper.

    It names the wrapper in config.json and adds a file of some lines that imports it, as
    checkpoints with their own code do. `auto_map` is for the Auto classes. `architectures` is for
    tools that would otherwise take the class of that name from transformers, such as TRL. Without
    trust_remote_code, `AutoModelForCausalLM` loads the folder as before.

    Args:
        folder: a local checkpoint of a family of this package.
        split_projections: whether the wrapper has HF's projections, for optimizers that look at
            whole matrices. Adapters of PEFT do not need it.
    Raises:
        CheckpointError: the folder has no config.json that can be read, or it has other towers
            than a text model.
        ConfigError: no family is registered for its model_type.
        OSError: a file cannot be written.
    """
    file = Path(folder) / CONFIG_NAME
    config = read_json(file, CheckpointError)
    family, known = family_named(config.get("model_type"), str(file)), config.get("auto_map") or {}
    if "text_config" in config:
        raise CheckpointError(
            f"{file}: it is a checkpoint of a text model and other towers; save the text model "
            "alone with LigerForCausalLM.from_native(AutoLiger.from_hf(...)).save_pretrained(...)"
        )
    name = f"{family.__name__}ForCausalLM"
    code = _CODE.format(name=name, split=split_projections)
    file.with_name(f"{SHELL_FILE}.py").write_text(code, encoding="utf-8")
    auto_map = {**known, AUTO_CLASS: f"{SHELL_FILE}.{name}"}
    new = file.with_name(f"{CONFIG_NAME}.new")
    write_json(new, config | {"architectures": [name], "auto_map": auto_map})
    new.replace(file)

"""The options of a run as a YAML file: what `finetune --config` reads, and what a run writes.

The keys are subjects and the names of their options, with `_` or `-`. The values are read as YAML
1.2 defines them: `2e-5` is a number, and `off` is a text.
"""

from __future__ import annotations

import contextlib
import json
from collections.abc import Collection, Iterator, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from ligermodels.converters.files import read_if_present
from ligermodels.errors import ConfigError, first_line
from ligermodels.training.config import subjects, unknown_option
from ligermodels.training.losses import SFT
from ligermodels.training.options import flat_name

_LIMIT = 10**6  # bytes; PyYAML takes a second for some 100,000
_WORDS = {"": None, "~": None, "null": None, "true": True, "false": False}


class _Loader(yaml.SafeLoader):
    """A loader with the types of YAML 1.2. PyYAML's own are those of YAML 1.1."""

    yaml_implicit_resolvers: Mapping[Any, Any] = {}  # so that all values are texts

    def construct_text(self, node: yaml.ScalarNode) -> Any:
        """Return what a text stands for, unless it is quoted."""
        if node.style is None:
            if node.value.lower() in _WORDS:
                return _WORDS[node.value.lower()]
            for kind in (int, float):
                with contextlib.suppress(ValueError):
                    return kind(node.value)
        return node.value


_Loader.add_constructor("tag:yaml.org,2002:str", _Loader.construct_text)


def read_config(
    path: str | Path, *, loss: str | None = None, also: Collection[str] = ()
) -> dict[str, Any]:
    """Return the options that a YAML file sets, for `FinetuneConfig.from_options`.

    An option stands under its subject, such as `data` or `loss`, or by its own name at the top.

    Args: loss: the loss of the run, if it is not the one that the file names; also: the names of
        further options that the file may hold.
    Raises:
        ConfigError: the file cannot be read, is not YAML, or has an unknown key; the message names
            the line.
    """
    content = read_if_present(Path(path), ConfigError, limit=_LIMIT)
    if content is None:
        raise ConfigError(f"{path}: the file is missing")
    found: dict[str, Any] = {}
    try:
        loader = _Loader(content.decode("utf-8-sig"))
        root = loader.get_single_node()
        if root is None:
            return {}
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(
                f"{path}: the file must hold options, one on each line, as KEY: VALUE"
            )
        entries = list(_entries(root))
        named = [loader.construct_object(value) for _, _, name, value in entries if name == "loss"]
        loss = str(loss or next(iter(named), SFT.name))
        names = {
            (subject, each.name): flat_name(each)
            for subject, kind in subjects(loss).items()
            for each in fields(kind)
        }
        known = {*names.values(), *also, "loss"}
        for number, subject, key, value in entries:
            name, where = names.get((subject, key), key), f"{path}:{number}"
            if name not in known:
                raise ConfigError(f"{where}: {unknown_option(name, loss)}")
            if name in found:
                raise ConfigError(f"{where}: {name}: the key is there twice; remove one")
            found[name] = loader.construct_object(value, deep=True)
    except ConfigError:
        raise
    # PyYAML raises its own errors. For a value that its tag does not allow, it raises Python's.
    except (yaml.YAMLError, RecursionError, ValueError, LookupError, AttributeError) as error:
        mark = getattr(error, "problem_mark", None)
        line = "" if mark is None else f":{mark.line + 1}"
        problem = getattr(error, "problem", None) or first_line(error)
        raise ConfigError(f"{path}{line}: the file is not YAML: {problem}") from None
    return found


def _entries(root: yaml.MappingNode) -> Iterator[tuple[int, str, str, yaml.Node]]:
    """Yield the line, the subject or "", the key and the value of each option."""
    for key, value in root.value:
        name = str(key.value).replace("-", "_")
        if name in subjects(SFT.name) and isinstance(value, yaml.MappingNode):
            for inner, option in value.value:
                own = str(inner.value).replace("-", "_")
                own = "loss" if (name, own) == ("loss", "name") else own
                yield inner.start_mark.line + 1, name, own, option
        else:
            yield key.start_mark.line + 1, "", name, value


def config_text(settings: Mapping[str, Any], command: Mapping[str, Any]) -> str:
    """Return options as a YAML file, by subject, each under a line that explains it.

    Args: settings: as `FinetuneConfig.options` returns them; command: further ones, for the top.
    """
    lines = ["# The options of this run. 'ligermodels finetune --config FILE' takes them again."]
    lines += [_line(name, value) for name, value in command.items()]
    for subject, kind in subjects(settings["loss"]).items():
        lines.append(f"\n{subject}:")
        if subject == "loss":
            lines.append(f"  {_line('name', settings['loss'])}")
        for each in fields(kind):
            if (name := flat_name(each)) in settings:
                lines.append(f"  # {each.metadata['help']}")
                lines.append(f"  {_line(each.name, settings[name])}")
    return "\n".join(lines) + "\n"


def _line(name: str, value: Any) -> str:
    """Return an option as YAML, of which JSON is a part."""
    text = json.dumps(value, ensure_ascii=False)
    # Bytes of a path that are not UTF-8 are halves of surrogate pairs.
    return f"{name}: {text.encode(errors='backslashreplace').decode()}"

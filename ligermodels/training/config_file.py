"""The options of a run as a YAML file: what `finetune --config` reads, and what a run writes.

The keys are the names of the options, with `_` or `-`. The values are read as YAML 1.2 defines
them: `2e-5` is a number, and `off` is a text.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Mapping
from dataclasses import fields
from pathlib import Path
from typing import Any

import yaml

from ligermodels.converters.files import read_if_present
from ligermodels.errors import ConfigError, did_you_mean, first_line, short_repr
from ligermodels.training.config import FinetuneConfig
from ligermodels.training.options import OTHER_NAMES

_LIMIT = 10**6  # bytes; PyYAML takes a second for some 100,000
_TAG = "tag:yaml.org,2002:"
_FLOAT = re.compile(
    r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?$|[-+]?\.(inf|Inf|INF)$|\.(nan|NaN|NAN)$"
)


class _Loader(yaml.SafeLoader):
    """A loader with the types of YAML 1.2. PyYAML's own are those of YAML 1.1."""

    yaml_implicit_resolvers: Mapping[Any, Any] = {}

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """Refuse a key that is there twice, of which PyYAML takes the last."""
        found = super().construct_mapping(node, deep=deep)
        if len(found) < len(node.value):
            raise yaml.constructor.ConstructorError(
                None, None, "a key is there twice; remove one", node.start_mark
            )
        return found


class _Dumper(yaml.SafeDumper):
    """A dumper that also quotes a text which YAML 1.2 would take for a number."""


_Loader.add_implicit_resolver(f"{_TAG}null", re.compile("(~|null|Null|NULL|)$"), [*"~nN", ""])
_Loader.add_implicit_resolver(
    f"{_TAG}bool", re.compile("(true|True|TRUE|false|False|FALSE)$"), [*"tTfF"]
)
_Loader.add_implicit_resolver(f"{_TAG}int", re.compile("[-+]?[0-9]+$"), [*"-+0123456789"])
_Loader.add_constructor(f"{_TAG}int", lambda loader, node: int(loader.construct_scalar(node)))
for _class in (_Loader, _Dumper):
    _class.add_implicit_resolver(f"{_TAG}float", _FLOAT, [*"-+.0123456789"])


def read_config(path: str | Path, *, also: Collection[str] = ()) -> dict[str, Any]:
    """Return the options that a YAML file sets. `FinetuneConfig` checks their values.

    Args: also: the names of further options that the file may hold.
    Raises:
        ConfigError: the file cannot be read, is not YAML, or has an unknown key; the message names
            the line.
    """
    content = read_if_present(Path(path), ConfigError, limit=_LIMIT)
    if content is None:
        raise ConfigError(f"{path}: the file is missing")
    try:
        text = content.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise ConfigError(f"{path}: the file cannot be read: {first_line(error)}") from None
    known = [*(each.name for each in fields(FinetuneConfig)), *also]
    try:
        loader = _Loader(text)
        root = loader.get_single_node()
        if root is None:
            return {}
        if not isinstance(root, yaml.MappingNode):
            raise ConfigError(
                f"{path}: the file must hold options, one on each line, as KEY: VALUE"
            )
        found: dict[str, Any] = {}
        for key, value in root.value:
            where = f"{path}:{key.start_mark.line + 1}"
            name = str(key.value).replace("-", "_")
            if name not in known:
                hint = did_you_mean(name, known, OTHER_NAMES)
                raise ConfigError(f"{where}: {short_repr(key.value)} is no option{hint}")
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


def config_text(settings: Mapping[str, Any]) -> str:
    """Return options as a YAML file, each under a line that explains it."""
    helps = {each.name: each.metadata["help"] for each in fields(FinetuneConfig)}
    lines = ["# The options of this run. 'ligermodels finetune --config FILE' takes them again."]
    for name, value in settings.items():
        if name in helps:
            lines.append(f"\n# {helps[name]}")
        lines.append(
            yaml.dump({name: value}, Dumper=_Dumper, allow_unicode=True, width=10**9).rstrip("\n")
        )
    return "\n".join(lines) + "\n"

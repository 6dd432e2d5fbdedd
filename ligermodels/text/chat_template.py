"""Chat templates: where a checkpoint keeps them, which one is meant, and rendering one safely."""

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any

from ligermodels.errors import CheckpointError

Template = str | dict[str, str]


def read_templates(folder: Path, config: Mapping[str, Any]) -> Template | None:
    """A folder's chat template: chat_template.jinja and its named siblings, else the config's."""
    templates: dict[str, str] = {}
    main = folder / "chat_template.jinja"
    if main.is_file():
        templates["default"] = _read(main)
    for path in sorted((folder / "additional_chat_templates").glob("*.jinja")):
        templates[path.stem] = _read(path)
    if not templates:
        written = config.get("chat_template")
        if isinstance(written, list):
            templates = {entry["name"]: entry["template"] for entry in written}
        elif written is not None:
            templates["default"] = written
    return templates["default"] if list(templates) == ["default"] else templates or None


def _read(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def pick(own: Template | None, asked: str | None, tools: bool, source: str) -> str:
    """The template text: `asked` (a template or a name in `own`), else the checkpoint's `own`.

    Raises:
        CheckpointError: there is none, or several and none is called "default".
    """
    if isinstance(own, dict):
        if asked is None:
            asked = "tool_use" if tools and "tool_use" in own else "default"
            if asked not in own:
                raise CheckpointError(
                    f"{source}: several chat templates and none named 'default'; "
                    f"pass chat_template= one of {sorted(own)}"
                )
        return own.get(asked, asked)
    template = asked if asked is not None else own
    if template is None:
        raise CheckpointError(f"{source}: no chat template; pass chat_template= a jinja2 one")
    return template


def render(template: str, source: str, **variables: Any) -> str:
    """The text a template makes of its variables.

    Raises:
        CheckpointError: the template is broken, or it refused its input (roles out of order, say).
    """
    try:
        return _compiled(template).render(**variables)
    except Exception as error:  # a template is a program: besides its own errors it has Python's
        raise CheckpointError(f"{source}: chat template: {error}") from error


@lru_cache(maxsize=16)
def _compiled(template: str) -> Any:
    return environment().from_string(template)


def environment() -> Any:
    """The jinja2 environment chat templates are written for; they are untrusted code from a hub."""
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks what the assistant says; rendering passes it through."""

        tags = {"generation"}  # noqa: RUF012, the base declares it so

        def parse(self, parser: Any) -> Any:
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def refuse(message: str) -> None:
        raise jinja2.TemplateError(message)

    def tojson(
        value: Any, ensure_ascii=False, indent=None, separators=None, sort_keys=False
    ) -> str:
        # jinja2's own filter escapes HTML, which a prompt must not have
        return json.dumps(
            value,
            ensure_ascii=ensure_ascii,
            indent=indent,
            separators=separators,
            sort_keys=sort_keys,
        )

    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, Generation]
    )
    sandbox.filters["tojson"] = tojson
    sandbox.globals["raise_exception"] = refuse
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return sandbox

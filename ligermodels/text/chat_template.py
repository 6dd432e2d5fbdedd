"""Chat templates: reading a checkpoint's, choosing one of them, and rendering it in a sandbox."""

import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ligermodels.converters.checkpoint_files import CHAT_TEMPLATE_DIR, CHAT_TEMPLATE_FILE
from ligermodels.errors import CheckpointError

if TYPE_CHECKING:
    import jinja2
    import jinja2.nodes
    import jinja2.parser

ChatTemplate = str | dict[str, str]


def read_chat_template(folder: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
    """A checkpoint's chat template, or several under their names.

    The template files are read, and where there are none, the tokenizer config.

    Raises:
        CheckpointError: a file cannot be read.
    """
    templates: dict[str, str] = {}
    main = folder / CHAT_TEMPLATE_FILE
    if main.is_file():
        templates["default"] = _read_text(main)
    for path in sorted((folder / CHAT_TEMPLATE_DIR).glob("*.jinja")):
        templates[path.stem] = _read_text(path)
    if not templates:
        written = config.get("chat_template")
        if isinstance(written, list):
            templates = {entry["name"]: entry["template"] for entry in written}
        elif written is not None:
            templates["default"] = written
    return templates["default"] if list(templates) == ["default"] else templates or None


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise CheckpointError(f"{path}: cannot be read: {error}") from error


def choose_template(own: ChatTemplate | None, asked: str | None, tools: bool, source: str) -> str:
    """The template to render: the one that is asked for, else the checkpoint's own.

    Args:
        own: the checkpoint's template or templates.
        asked: a template, or the name of one in `own`.
        tools: whether the conversation has tools, for which there may be a template "tool_use".
        source: the checkpoint, for messages.
    Raises:
        CheckpointError: there is no template, or there are several and none is named "default".
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


def render_template(template: str, source: str, **variables: Any) -> str:
    """The text that a template makes of its variables.

    Raises:
        CheckpointError: the template is broken, or refuses its input, such as roles out of order.
    """
    try:
        return _compiled(template).render(**variables)
    except Exception as error:  # A template is a program and may raise Python's errors, too.
        raise CheckpointError(f"{source}: chat template: {error}") from error


@lru_cache(maxsize=16)
def _compiled(template: str) -> "jinja2.Template":
    return _environment().from_string(template)


def _environment() -> "jinja2.Environment":
    """The jinja2 environment that chat templates are written for.

    It is a sandbox, since templates are untrusted code from a hub.
    """
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """`{% generation %}` marks what the assistant says; rendering leaves it as it is."""

        tags = {"generation"}  # noqa: RUF012, the base class declares it so

        def parse(self, parser: "jinja2.parser.Parser") -> "jinja2.nodes.Node":
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        # jinja2's own filter escapes HTML, which does not belong in a prompt.
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, Generation]
    )
    sandbox.filters["tojson"] = tojson
    sandbox.globals["raise_exception"] = refuse
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return sandbox

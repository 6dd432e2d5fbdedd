"""Read the chat templates of a checkpoint, choose one, and render it in a sandbox."""

import io
import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ligermodels.converters.checkpoint_files import CHAT_TEMPLATE_DIR, CHAT_TEMPLATE_FILE
from ligermodels.converters.files import names_if_present, read_if_present
from ligermodels.errors import CheckpointError

if TYPE_CHECKING:
    import jinja2
    import jinja2.nodes
    import jinja2.parser

ChatTemplate = str | dict[str, str]
_MAX_BYTES = 1_000_000  # The largest templates in use have less than a tenth of this.


def read_chat_template(folder: Path, config: Mapping[str, Any]) -> ChatTemplate | None:
    """Return a checkpoint's chat template, or a dict of several named templates.

    The template files take precedence. Without them, the tokenizer config may have templates.

    Raises:
        CheckpointError: a file cannot be read.
    """
    templates: dict[str, str] = {}
    main, more = folder / CHAT_TEMPLATE_FILE, folder / CHAT_TEMPLATE_DIR
    names = names_if_present(more, CheckpointError) or []
    files = {name.removesuffix(".jinja"): more / name for name in names if name.endswith(".jinja")}
    for name, path in {"default": main, **files}.items():
        if (text := _read_text(path)) is not None:
            templates[name] = text
    if not templates:
        written = config.get("chat_template")
        if isinstance(written, list):
            templates = {entry["name"]: entry["template"] for entry in written}
        elif written is not None:
            templates["default"] = written
    return templates["default"] if list(templates) == ["default"] else templates or None


def _read_text(path: Path) -> str | None:
    raw = read_if_present(path, CheckpointError, _MAX_BYTES)
    if raw is None:
        return None
    try:
        return io.StringIO(raw.decode("utf-8"), newline=None).read()  # Each line ends with \n.
    except UnicodeDecodeError as error:
        raise CheckpointError(f"{path}: the file cannot be read: {error}") from error


def choose_template(own: ChatTemplate | None, asked: str | None, tools: bool, source: str) -> str:
    """Return the template to render: the requested one, otherwise the checkpoint's own.

    Args:
        own: the checkpoint's template or templates.
        asked: a template, or the name of one in `own`.
        tools: whether the conversation has tools. If so, a template named "tool_use" is preferred.
        source: the checkpoint, for messages.
    Raises:
        CheckpointError: there is no template, or there are several and none is named "default".
    """
    if isinstance(own, dict):
        if asked is None:
            asked = "tool_use" if tools and "tool_use" in own else "default"
            if asked not in own:
                raise CheckpointError(
                    f"{source}: the checkpoint has several chat templates, but none named "
                    f"'default'; pass one of these names as chat_template: {sorted(own)}"
                )
        return own.get(asked, asked)
    template = asked if asked is not None else own
    if template is None:
        raise CheckpointError(
            f"{source}: the checkpoint has no chat template; pass a jinja2 template as "
            "chat_template"
        )
    return template


def render_template(template: str, source: str, **variables: Any) -> str:
    """Render a template with its variables, and return the text.

    Raises:
        CheckpointError: the template is faulty, or it refuses its input, such as a wrong order of
            roles.
    """
    try:
        return _compiled(template).render(**variables)
    except Exception as error:  # A template is a program, so it may raise any error of Python.
        raise CheckpointError(f"{source}: the chat template raised an error: {error}") from error


@lru_cache(maxsize=16)
def _compiled(template: str) -> "jinja2.Template":
    return _environment().from_string(template)


def _environment() -> "jinja2.Environment":
    """Return the jinja2 environment that chat templates expect.

    It is a sandbox, because a template is untrusted code from a hub.
    """
    import jinja2
    import jinja2.ext
    import jinja2.sandbox

    class Generation(jinja2.ext.Extension):
        """The tag `{% generation %}` marks the assistant's text, which is rendered unchanged."""

        tags = {"generation"}  # noqa: RUF012, the base class declares a mutable attribute

        def parse(self, parser: "jinja2.parser.Parser") -> "jinja2.nodes.Node":
            line = next(parser.stream).lineno
            body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
            return jinja2.nodes.Scope(body, lineno=line)

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        # jinja2's own filter escapes HTML. A prompt must not have these escapes.
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    sandbox = jinja2.sandbox.ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, Generation]
    )
    sandbox.filters["tojson"] = tojson
    sandbox.globals["raise_exception"] = refuse
    sandbox.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return sandbox

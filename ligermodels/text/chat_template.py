"""Read the chat templates of a checkpoint, choose one, and render it in jinja2's sandbox.

The immutable sandbox keeps a template, which is a program from the checkpoint, from Python's
internals.
"""

import io
import json
from datetime import datetime
from functools import lru_cache
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, nodes
from jinja2.parser import Parser
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ligermodels.converters.files import CHAT_TEMPLATE_FILE
from ligermodels.errors import CheckpointError
from ligermodels.text.tokenizer_config import TokenizerFiles


class _Generation(ext.Extension):
    """The tag `{% generation %}` marks the assistant's text, which is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012, the base class declares a mutable attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


@lru_cache(maxsize=1)
def _environment() -> ImmutableSandboxedEnvironment:
    """Return the jinja2 environment that chat templates expect."""

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        # jinja2's own filter escapes HTML. A prompt must not have these escapes.
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    found = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, _Generation]
    )
    found.filters["tojson"] = tojson
    found.globals["raise_exception"] = refuse
    found.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    return found


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    return _environment().from_string(template)


ChatTemplate = str | dict[str, str]


def read_chat_template(files: TokenizerFiles) -> ChatTemplate | None:
    """Return a checkpoint's chat template, or a dict of several named templates.

    The template files take precedence. Without them, the tokenizer config may have templates.

    Raises:
        CheckpointError: a file is not UTF-8 text.
    """
    templates: dict[str, str] = {}
    for name in (name for name in files.contents if name.endswith(".jinja")):
        try:
            text = files.contents[name].decode("utf-8")
        except UnicodeDecodeError as error:
            raise files.error(name, f"the file cannot be read: {error}") from error
        key = "default" if name == CHAT_TEMPLATE_FILE else Path(name).stem
        templates[key] = io.StringIO(text, newline=None).read()  # Each line ends with \n.
    written = None if templates else files.config.get("chat_template")
    if isinstance(written, list):
        templates = {entry["name"]: entry["template"] for entry in written}
    elif written is not None:
        templates["default"] = written
    return templates["default"] if list(templates) == ["default"] else templates or None


def written_template(template: ChatTemplate | None) -> Any:
    """Return a chat template as tokenizer_config.json holds it."""
    if isinstance(template, dict):
        return [{"name": name, "template": text} for name, text in template.items()]
    return template


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
    named = own if isinstance(own, dict) else {} if own is None else {"default": own}
    if asked is not None:
        return named.get(asked, asked)
    for name in ("tool_use", "default") if tools else ("default",):
        if name in named:
            return named[name]
    known = f" named 'default', only {sorted(named)}" if named else ""
    raise CheckpointError(
        f"{source}: the checkpoint has no chat template{known}; write one into chat_template.jinja "
        "in its folder, or pass a name or a jinja2 template as chat_template"
    )


def render_template(template: str, source: str, **variables: Any) -> str:
    """Render a template with its variables, and return the text.

    Raises:
        CheckpointError: the template is faulty, or it refuses its input, such as a wrong order of
            roles.
    """
    try:
        return _compiled(template).render(variables)
    except Exception as error:  # A template is a program, so it may raise any error of Python.
        raise CheckpointError(
            f"{source}: the chat template raised an error: {str(error) or type(error).__name__}"
        ) from error

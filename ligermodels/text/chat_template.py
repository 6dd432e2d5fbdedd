"""Read the chat templates of a checkpoint, choose one, and render it in a sandbox."""

import io
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ligermodels.converters.checkpoint_files import CHAT_TEMPLATE_DIR, CHAT_TEMPLATE_FILE
from ligermodels.converters.files import names_if_present, read_if_present
from ligermodels.errors import CheckpointError

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


def template_files(template: ChatTemplate | None) -> dict[str, bytes]:
    """Return the files that `read_chat_template` reads as this template: name -> content."""
    named = {"default": template} if isinstance(template, str) else template or {}
    files = {f"{CHAT_TEMPLATE_DIR}/{name}.jinja": text.encode() for name, text in named.items()}
    if "default" in named:
        files[CHAT_TEMPLATE_FILE] = files.pop(f"{CHAT_TEMPLATE_DIR}/default.jinja")
    return files


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
            f"{source}: the checkpoint has no chat template; write one into chat_template.jinja in "
            "its folder, or in Python, pass a jinja2 template as chat_template"
        )
    return template


def render_template(template: str, source: str, **variables: Any) -> str:
    """Render a template with its variables, and return the text.

    Raises:
        CheckpointError: the template is faulty, or it refuses its input, such as a wrong order of
            roles.
    """
    # The import is slow, and not every program renders templates.
    from ligermodels.text.sandbox import render

    try:
        return render(template, variables)
    except Exception as error:  # A template is a program, so it may raise any error of Python.
        raise CheckpointError(
            f"{source}: the chat template raised an error: {str(error) or type(error).__name__}"
        ) from error

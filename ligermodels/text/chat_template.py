"""Read the chat templates of a checkpoint, choose one, and render it in a sandbox.

The sandbox is jinja2's immutable one. It keeps a template from Python's internals, but it does not
keep it from looping 10**10 times, from doubling a text forty times, or from computing 9**9**9. So a
rendering may take a number of turns through loops and macros, and the source, the output and what
the operators `*`, `**`, `+` and `~` make are bounded.
"""

import io
import json
from collections.abc import Mapping
from datetime import datetime
from functools import lru_cache
from itertools import count
from pathlib import Path
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, nodes, runtime, sandbox, visitor
from jinja2.parser import Parser

from ligermodels.converters.files import CHAT_TEMPLATE_FILE
from ligermodels.errors import CheckpointError
from ligermodels.text.tokenizer_config import TokenizerFiles

MAX_SOURCE = 100_000  # characters; the largest templates in use have a third of this
_MAX_TURNS = 2_000_000  # about a second
_MAX_SIZE = 20_000_000  # characters of the output or of a text, elements of a list
_MAX_DIGITS = 100_000  # of a product or a power
# The names of a variable and of two filters, which no template can spell.
_TURNS, _TURN, _JOIN = " turns", " turn", " join"


def render(template: str, variables: Mapping[str, Any]) -> str:
    """Render a template with its variables, and return the text.

    Raises:
        jinja2.sandbox.SecurityError: the template exceeds a bound.
        Exception: whatever the template raises; it is a program.
    """
    _check_size(len(template), MAX_SOURCE)
    parts, total = [], 0
    for part in _compiled(template).generate({**variables, _TURNS: count(1)}):
        total += len(part)
        _check_size(total)
        parts.append(part)
    return "".join(parts)


def _check_size(size: int, limit: int = _MAX_SIZE) -> None:
    if size > limit:
        raise sandbox.SecurityError(
            f"it has or makes something of more than {limit} characters, elements or digits"
        )


def _length(value: Any) -> int:
    return len(value) if isinstance(value, (str, bytes, list, tuple)) else 0


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = _environment()
    tree = _Counting().visit(environment.parse(template))
    tree.set_environment(environment)
    return environment.from_string(tree)


class _Environment(sandbox.ImmutableSandboxedEnvironment):
    """The sandbox of jinja2, where what an operator makes is bounded."""

    intercepted_binops = frozenset({"+", "*", "**"})

    def call_binop(self, context: runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            _check_size(_length(left) + _length(right))
        elif isinstance(left, int) and isinstance(right, int):
            bits = left.bit_length(), right.bit_length()
            size = sum(bits) if operator == "*" else bits[0] * abs(right)
            _check_size(size // 3, _MAX_DIGITS)
        elif isinstance(left, int) or isinstance(right, int):  # This repeats a text or a list.
            times = right if isinstance(right, int) else left
            _check_size(times * (_length(left) + _length(right)))
        return super().call_binop(context, operator, left, right)


class _Generation(ext.Extension):
    """The tag `{% generation %}` marks the assistant's text, which is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012, the base class declares a mutable attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Counting(visitor.NodeTransformer):
    """Count each turn through a loop, a macro or a block, and bound the operator `~`."""

    def _counted(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        node.body.insert(0, nodes.ExprStmt(_turn(node), lineno=node.lineno))
        return node

    visit_Macro = visit_CallBlock = visit_Block = _counted

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.test is not None:  # Elements that fail the test do not reach the body.
            node.test = nodes.And(_turn(node), node.test, lineno=node.lineno)
        return self._counted(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        values = nodes.Tuple(node.nodes, "load", lineno=node.lineno)
        return nodes.Filter(values, _JOIN, [], [], None, None, lineno=node.lineno)


def _turn(node: nodes.Node) -> nodes.Expr:
    """Return an expression that counts one turn and is true."""
    one = nodes.Const(True, lineno=node.lineno)
    return nodes.Filter(one, _TURN, [], [], None, None, lineno=node.lineno)


# jinja2 calls no filter that asks for the context while it compiles a template.
@jinja2.pass_context
def _count_turn(context: runtime.Context, value: bool) -> bool:
    if next(context[_TURNS]) > _MAX_TURNS:
        raise sandbox.SecurityError("it does too much work: it may loop without end")
    return value


def _join(values: tuple[Any, ...]) -> str:
    """Return what jinja2's operator `~` returns."""
    _check_size(sum(map(_length, values)))
    return runtime.str_join(values)


@lru_cache(maxsize=1)
def _environment() -> _Environment:
    """Return the jinja2 environment that chat templates expect."""

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        # jinja2's own filter escapes HTML. A prompt must not have these escapes.
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    found = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, _Generation]
    )
    found.filters |= {"tojson": tojson, _TURN: _count_turn, _JOIN: _join}
    found.globals["raise_exception"] = refuse
    found.globals["strftime_now"] = lambda form: datetime.now().strftime(form)
    del found.globals["lipsum"]  # It writes as long a text as it is asked for.
    return found


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
    # The import is slow, and not every program renders templates.
    from ligermodels.text.chat_template import render

    try:
        return render(template, variables)
    except Exception as error:  # A template is a program, so it may raise any error of Python.
        raise CheckpointError(
            f"{source}: the chat template raised an error: {str(error) or type(error).__name__}"
        ) from error

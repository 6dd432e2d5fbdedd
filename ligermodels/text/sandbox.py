"""Render chat templates of strangers in jinja2's immutable sandbox, with bounds on their work.

The sandbox keeps a template from Python's internals, but it does not keep it from looping 10**10
times, from doubling a text forty times, or from computing 9**9**9. So a rendering may take a number
of turns through loops and macros, and the source, the output, the operands of `*`, `**`, `+` and
`~`, the numbers in calls and the texts that are repeated are bounded.
"""

import json
import re
from collections.abc import Callable, Iterable, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from itertools import count
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, nodes, runtime, sandbox, utils, visitor
from jinja2.parser import Parser

MAX_SOURCE = 100_000  # characters; the largest templates in use have a third of this
_MAX_TURNS = 2_000_000  # about a second
_MAX_SIZE = 20_000_000  # characters of the output, and of a text or elements of a list that is made
_MAX_NUMBER = 100_000  # in the arguments of a call, where it may be a width
_WIDE = re.compile(r"\d{6}|\*|\{[^{}]*\{")  # a width of six digits, or one that is an argument
# These have no place in a prompt, and some take quadratic time.
_NO_FILTERS = ("pprint", "striptags", "urlencode", "urlize", "wordwrap", "xmlattr")
# Filters with names that no template can spell.
_TURN, _JOIN = " turn", " join"

_turns: ContextVar[count] = ContextVar("turns")


class TooCostly(Exception):
    """A template that needs more work or more memory than a rendering may take."""


def render(template: str, variables: Mapping[str, Any]) -> str:
    """Render a template with its variables, and return the text.

    Raises:
        TooCostly: the template exceeds a bound.
        Exception: whatever the template raises; it is a program.
    """
    _check_size(len(template), MAX_SOURCE, "source")
    compiled = _compiled(template)
    token = _turns.set(count(1))
    try:
        parts, total = [], 0
        for part in compiled.generate(**variables):
            total += len(part)
            _check_size(total, _MAX_SIZE, "output")
            parts.append(part)
        return "".join(parts)
    finally:
        _turns.reset(token)


def _check_size(size: int, limit: int = _MAX_SIZE, what: str = "text or list") -> None:
    if size > limit:
        raise TooCostly(f"it makes or has a {what} of {size:.3g} characters, at most {limit}")


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = _environment()
    tree = _Counting().visit(environment.parse(template))
    tree.set_environment(environment)
    code = environment.compile(tree)
    return jinja2.Template.from_code(environment, code, environment.make_globals(None))


class _Environment(sandbox.ImmutableSandboxedEnvironment):
    """The sandbox of jinja2, where the operands of operators and calls are bounded."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: runtime.Context, operator: str, left: Any, right: Any) -> Any:
        if operator == "+":
            _check_size(_length(left) + _length(right))
        elif operator == "*":
            # A number times a text or a list repeats it; numbers count by their digits.
            for value, times in ((left, right), (right, left)):
                if isinstance(times, int) and not isinstance(value, (int, float)):
                    _check_size(_length(value) * abs(times))
            _check_size(_length(left) + _length(right), _MAX_NUMBER)
        elif operator == "**" and isinstance(right, int):
            _check_size(_length(left) * abs(right), _MAX_NUMBER, "number")
        elif operator == "%" and isinstance(left, str):
            _check_call(left, "format", [right])
        return super().call_binop(context, operator, left, right)

    def call(__self, __context: runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        subject, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(subject, (str, bytes, int)):
            _check_call(subject, name, [*args, *kwargs.values()])
        return super().call(__context, __obj, *args, **kwargs)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapper = super().wrap_str_format(value)
        if wrapper is not None:
            wrapper.__self__ = value.__self__  # type: ignore[attr-defined]
        return wrapper


def _length(value: Any) -> int:
    if isinstance(value, int):
        return value.bit_length() // 3
    return len(value) if isinstance(value, (str, bytes, list, tuple)) else 0


def _check_call(subject: Any, name: str, arguments: list[Any]) -> None:
    """Refuse a method or a filter that would make a text out of proportion to what it is given."""
    if any(isinstance(each, int) and abs(each) > _MAX_NUMBER for each in arguments):
        raise TooCostly(f"it calls {name} with a number of more than {_MAX_NUMBER}")
    if name in ("format", "format_map") and _WIDE.search(str(subject)):
        raise TooCostly("it formats with a width that is too large, or an argument")
    if name in ("replace", "join", "expandtabs"):
        longest = max(map(_length, arguments), default=0)
        _check_size((1 + _length(subject)) * longest, 10 * _MAX_SIZE)


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
    if next(_turns.get()) > _MAX_TURNS:
        raise TooCostly("it does too much work: it may loop without end")
    return value


@jinja2.pass_context
def _join(context: runtime.Context, values: Iterable[Any]) -> str:
    """Return what jinja2's operator `~` returns."""
    _check_size(sum(map(_length, values)))
    return runtime.str_join(values)


def _bounded(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter whose arguments are bounded."""
    wanted = utils._PassArg.from_obj(function)

    @jinja2.pass_context
    def bounded(context: runtime.Context, value: Any = None, /, *args: Any, **kwargs: Any) -> Any:
        _check_call(value, name, [*args, *kwargs.values()])
        if wanted is None:
            return function(value, *args, **kwargs)
        if wanted is utils._PassArg.context:
            return function(context, value, *args, **kwargs)
        first = context.eval_ctx if wanted is utils._PassArg.eval_context else context.environment
        return function(first, value, *args, **kwargs)

    return bounded


def _environment() -> _Environment:
    """Return the jinja2 environment that chat templates expect."""

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        # jinja2's own filter escapes HTML. A prompt must not have these escapes.
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def strftime_now(form: str) -> str:
        _check_size(len(form), 1000, "date format")
        return datetime.now().strftime(form)

    found = _Environment(
        trim_blocks=True, lstrip_blocks=True, extensions=[ext.loopcontrols, _Generation]
    )
    found.filters["tojson"] = tojson
    for name in _NO_FILTERS:
        del found.filters[name]
    found.filters = {name: _bounded(name, each) for name, each in found.filters.items()}
    found.filters[_TURN] = _count_turn
    found.filters[_JOIN] = _join
    del found.globals["lipsum"]
    found.globals["raise_exception"] = refuse
    found.globals["strftime_now"] = strftime_now
    return found

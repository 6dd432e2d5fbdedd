"""Render templates of strangers: they reach nothing of Python, and their work is bounded.

jinja2's sandbox keeps a template from Python's internals, but not from running without end: it may
loop 10**10 times, double a string forty times, or compute 9**9**9, and nothing from outside can
stop that without a thread or a signal. So each rendering has a budget. What a template does is
charged before it is done, and a template that has nothing left is refused. The unit of the budget
is about ten nanoseconds, or one character that is copied.
"""

import json
import re
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from contextvars import ContextVar
from datetime import datetime
from functools import lru_cache
from string import Formatter
from typing import Any, NoReturn

import jinja2
from jinja2 import ext, nodes, runtime, sandbox, utils, visitor
from jinja2.parser import Parser

MAX_SOURCE = 100_000  # characters; the largest templates in use have a third of this
_BUDGET = 100_000_000
_PER_INPUT = 300  # what each character of the conversation adds to the budget
_LONGEST = 20_000_000  # the size of any one value, and of the whole text
_STEP = 50
_ELEMENT = 32  # how much more each element of a list counts than its own size

# Methods and filters whose result may be longer than what they are given, or that take longer. For
# them the sizes are multiplied, and a number counts as a width.
_AMPLIFYING_METHODS = frozenset(
    {"center", "expandtabs", "format", "format_map", "join", "ljust", "lstrip", "rjust", "rstrip"}
    | {"strip", "to_bytes", "translate", "zfill"}
)
_AMPLIFYING_FILTERS = frozenset(
    {"batch", "center", "format", "indent", "join", "round", "slice", "tojson", "trim", "truncate"}
)
# Filters that read no element, and filters that pass elements on without reading what is in them.
_CONSTANT_FILTERS = frozenset(
    {"attr", "count", "d", "default", "first", "last", "length", "random"}
)
_SHALLOW_FILTERS = frozenset(
    {"items", "list", "map", "reject", "rejectattr", "reverse", "select", "selectattr"}
)
# What filters cost for each character or element, in relation to a copy of it.
_WEIGHTS = {"title": 40, "groupby": 40, "wordcount": 12}
_WEIGHT = 4
# These have no place in a prompt, and some take quadratic time.
_NO_FILTERS = ("pprint", "striptags", "urlencode", "urlize", "wordwrap", "xmlattr")
_COMPARING_TESTS = (
    *("in", "eq", "==", "equalto", "ne", "!=", "lt", "<", "lessthan", "le", "<="),
    *("gt", ">", "greaterthan", "ge", ">="),
)
# Filters with names that no template can spell.
_SPEND, _MADE, _USED, _SLICED, _JOINED = " spend", " made", " used", " sliced", " joined"


def _has_elements(value: Any) -> bool:
    return isinstance(value, Collection) and not isinstance(value, runtime.Undefined)


class TooCostly(Exception):
    """A template that needs more work or more memory than a rendering may take."""


class Meter:
    """What is left to one rendering.

    Args: variables are those of the template; a longer conversation may cost more.
    """

    def __init__(self, variables: Mapping[str, Any]) -> None:
        self._sizes: dict[int, tuple[Any, int]] = {}
        self.longest = _LONGEST
        given = self.size(variables)
        self.longest += 10 * given
        self.left = _BUDGET + _PER_INPUT * given

    def spend(self, amount: int) -> bool:
        self.left -= abs(amount)
        if self.left < 0:
            raise TooCostly("it does too much work: it may loop without end")
        return True

    def size(self, value: Any) -> int:
        """Return about how many characters a value has when it is written.

        An object that occurs several times counts as often, because it is written as often.
        """
        if isinstance(value, (str, bytes)):
            return len(value)
        if isinstance(value, int):
            return value.bit_length() // 3 + 1
        if isinstance(value, range):
            return len(value) * (_ELEMENT + 8)
        if not _has_elements(value):
            return 1
        known = self._sizes.get(id(value))
        if known is None:
            # The entry keeps the value alive, so that no other value gets its id.
            known = self._sizes[id(value)] = value, self._size_inside(value)
        return known[1]

    def _size_inside(self, value: Collection[Any]) -> int:
        if isinstance(value, Mapping):
            return sum(2 * _ELEMENT + self.size(k) + self.size(v) for k, v in value.items())
        return sum(_ELEMENT + self.size(item) for item in value)

    def check(self, size: int) -> None:
        if size > self.longest:
            raise TooCostly("it makes a text or a list that is too long")

    def made(self, value: Any) -> Any:
        """Charge for a new value, whose elements were there before, and return it."""
        self.check(self.size(value))
        return self.sliced(value)

    def sliced(self, value: Any) -> Any:
        """Charge for copying a text or the places of a list's elements, and return the value."""
        if isinstance(value, (str, bytes)):
            self.spend(_STEP + len(value) // 8)
        else:
            self.spend(_STEP + _ELEMENT * (len(value) if _has_elements(value) else 0))
        return value

    def used(self, value: Any) -> Any:
        """Charge for comparing a value with all that is in it, and return it."""
        self.spend(_STEP + self.size(value) // 8)
        return value

    def each(self, items: Iterable[Any]) -> Iterator[Any]:
        """Charge for each item as it passes, and for all together."""
        total = 0
        for item in items:
            size = self.size(item)
            total += _ELEMENT + size
            self.check(total)
            self.spend(_STEP + size)
            yield item

    def check_product(self, subject: Any, arguments: Iterable[Any], width: int = 0) -> None:
        """Refuse a call whose result may have the product of all sizes."""
        others = width
        for argument in arguments:
            others += self.size(argument)
            if isinstance(argument, int):
                others += abs(argument)
        self.check((1 + self.size(subject)) * (1 + others) // 10)


_METER: ContextVar[Meter] = ContextVar("meter")


def render(template: str, variables: Mapping[str, Any]) -> str:
    """Render a template with its variables, and return the text.

    Raises:
        TooCostly: the template needs too much work or memory, or its source is too long.
        Exception: whatever the template raises; it is a program.
    """
    if len(template) > MAX_SOURCE:
        raise TooCostly(f"it has {len(template)} characters, expected at most {MAX_SOURCE}")
    compiled = _compiled(template)
    meter = Meter(variables)
    token = _METER.set(meter)
    try:
        parts, total = [], 0
        for part in compiled.generate(**variables):
            total += len(part)
            meter.check(total)
            parts.append(part)
        return "".join(parts)
    finally:
        _METER.reset(token)


@lru_cache(maxsize=16)
def _compiled(template: str) -> jinja2.Template:
    environment = _environment()
    tree = _Pricing().visit(environment.parse(template))
    tree.set_environment(environment)
    code = environment.compile(tree)
    return jinja2.Template.from_code(environment, code, environment.make_globals(None))


class _Environment(sandbox.ImmutableSandboxedEnvironment):
    """The sandbox of jinja2, where each call and each operator that makes a value is charged."""

    intercepted_binops = frozenset({"+", "*", "**", "%"})

    def call_binop(self, context: runtime.Context, operator: str, left: Any, right: Any) -> Any:
        meter = _METER.get()
        if operator == "+" and type(left) is type(right) is str:  # This is by far the most usual.
            meter.check(size := len(left) + len(right))
            meter.spend(_STEP + size // 8)
            return left + right
        a, b = meter.size(left), meter.size(right)
        if operator == "+":
            meter.check(a + b)
        elif operator == "%" and isinstance(left, (str, bytes)):
            given = right if isinstance(right, tuple) else [right]
            meter.check_product(left, given, _widest(left))
        elif operator == "*":
            # A number times a text or a list repeats it.
            for repeated, times in ((a, right), (b, left)):
                meter.check(repeated * abs(times) if isinstance(times, int) else 0)
        elif operator == "**" and isinstance(right, int):
            meter.check(a * abs(right) * 1000)
        return meter.made(super().call_binop(context, operator, left, right))

    def call(__self, __context: runtime.Context, __obj: Any, *args: Any, **kwargs: Any) -> Any:
        meter = _METER.get()
        meter.spend(4 * _STEP)
        subject, name = getattr(__obj, "__self__", None), getattr(__obj, "__name__", "")
        if isinstance(subject, (str, bytes, int)):
            given = [*args, *kwargs.values()]
            if name == "replace":
                _check_replace(meter, subject, *given)
            elif name in _AMPLIFYING_METHODS:
                width = _widest(subject) if name.startswith("format") else 0
                meter.check_product(subject, given, width)
            for value in (subject, *given):
                meter.used(value)
        for key in args:
            if isinstance(key, tuple):  # Its hash is computed anew each time.
                meter.used(key)
        return meter.made(super().call(__context, __obj, *args, **kwargs))

    def getitem(self, obj: Any, argument: Any) -> Any:
        if isinstance(argument, tuple):
            _METER.get().used(argument)
        return super().getitem(obj, argument)

    def wrap_str_format(self, value: Any) -> Callable[..., str] | None:
        wrapper = super().wrap_str_format(value)
        if wrapper is not None:
            wrapper.__self__ = value.__self__  # type: ignore[attr-defined]
        return wrapper

    def is_safe_attribute(self, obj: Any, attr: str, value: Any) -> bool:
        return attr not in _NO_FILTERS and super().is_safe_attribute(obj, attr, value)


class _Namespace(utils.Namespace):
    """A namespace that does not write what it holds: it may hold namespaces of namespaces."""

    def __repr__(self) -> str:
        return "<Namespace>"


class _Generation(ext.Extension):
    """The tag `{% generation %}` marks the assistant's text, which is rendered unchanged."""

    tags = {"generation"}  # noqa: RUF012, the base class declares a mutable attribute

    def parse(self, parser: Parser) -> nodes.Node:
        line = next(parser.stream).lineno
        body = parser.parse_statements(("name:endgeneration",), drop_needle=True)
        return nodes.Scope(body, lineno=line)


class _Pricing(visitor.NodeTransformer):
    """Put the charges into a template for what does not go through the environment's methods."""

    def _with_charge(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        charge = nodes.ExprStmt(_charge(node.body, node.lineno), lineno=node.lineno)
        node.body.insert(0, charge)
        return node

    visit_Macro = visit_CallBlock = visit_Block = _with_charge

    def visit_For(self, node: nodes.For) -> nodes.Node:
        if node.test is not None:
            # Elements that fail the test do not reach the body.
            node.test = nodes.And(_charge([node.test], node.lineno), node.test, lineno=node.lineno)
        return self._with_charge(node)

    def visit_Concat(self, node: nodes.Concat) -> nodes.Node:
        self.generic_visit(node)
        return _filter(nodes.Tuple(node.nodes, "load", lineno=node.lineno), _JOINED)

    def visit_Compare(self, node: nodes.Compare) -> nodes.Node:
        self.generic_visit(node)
        sides = [node.expr, *(operand.expr for operand in node.ops)]
        contains = any(operand.op in ("in", "notin") for operand in node.ops)
        # With `==` and `<`, the shorter side says how long it takes.
        if contains or not any(isinstance(side, nodes.Const) for side in sides):
            node.expr = _filter(node.expr, _USED)
            for operand in node.ops:
                operand.expr = _filter(operand.expr, _USED)
        return node

    def visit_Getitem(self, node: nodes.Getitem) -> nodes.Node:
        self.generic_visit(node)
        if isinstance(node.arg, nodes.Slice):
            node.node = _filter(node.node, _SLICED)
        return node

    def visit_Pair(self, node: nodes.Pair) -> nodes.Node:
        self.generic_visit(node)
        node.key = _filter(node.key, _USED)
        return node

    def _literal(self, node: Any) -> nodes.Node:
        self.generic_visit(node)
        simple = all(isinstance(each, nodes.Const) for each in node.items)
        return node if simple or getattr(node, "ctx", "load") != "load" else _filter(node, _MADE)

    visit_List = visit_Tuple = visit_Dict = _literal


def _filter(node: nodes.Expr, name: str) -> nodes.Expr:
    if name == _USED and isinstance(node, (nodes.Const, nodes.Compare, nodes.Test, nodes.Not)):
        return node  # The value is true or false, or stands in the template.
    return nodes.Filter(node, name, [], [], None, None, lineno=node.lineno)


def _charge(body: list[nodes.Node], line: int) -> nodes.Expr:
    """Return an expression that charges for one pass through these nodes and is true."""
    inside = [each for node in body for each in (node, *node.find_all(nodes.Node))]
    data = sum(len(each.data) for each in inside if isinstance(each, nodes.TemplateData))
    return _filter(nodes.Const(_STEP + 8 * len(inside) + data, lineno=line), _SPEND)


def _joined(meter: Meter, values: Iterable[Any]) -> str:
    """Return what jinja2's operator `~` returns."""
    meter.check(sum(map(meter.size, values)))
    for value in values:
        if not isinstance(value, str):
            meter.spend(meter.size(value))
    text: str = meter.made(runtime.str_join(values))
    return text


@jinja2.pass_context
def _output(context: runtime.Context, value: Any) -> Any:
    """Charge for a value that is written."""
    meter = _METER.get()
    meter.spend(_STEP + meter.size(value))
    return value


def _charging(charge: Callable[[Meter, Any], Any]) -> Callable[..., Any]:
    """Return a filter that only charges."""
    # jinja2 calls no filter that asks for the context while it compiles a template.
    return jinja2.pass_context(lambda context, value: charge(_METER.get(), value))


def _metered(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """Return a filter or a test that is charged for its input and for its result."""
    wanted = utils._PassArg.from_obj(function)
    weight = _WEIGHTS.get(name, _WEIGHT)

    @jinja2.pass_context
    def charged(context: runtime.Context, value: Any = None, /, *args: Any, **kwargs: Any) -> Any:
        meter = _METER.get()
        given = [*args, *kwargs.values()]
        if name == "replace":
            _check_replace(meter, value, *given)
        elif name == "sum" and not all(isinstance(each, (str, int, float)) for each in given):
            raise TooCostly("it adds lists with sum, which takes quadratic time")
        elif name in _AMPLIFYING_FILTERS:
            meter.check_product(value, given, _widest(value) if name == "format" else 0)
        if name in _CONSTANT_FILTERS:
            meter.spend(_STEP)
        elif name in _SHALLOW_FILTERS:
            meter.spend(_STEP + 4 * _ELEMENT * (len(value) if _has_elements(value) else 1))
        else:
            meter.spend(_STEP + weight * meter.size(value))
        for each in given:
            meter.used(each)
        if isinstance(value, Iterator):
            value = meter.each(value)
        if wanted is not None:
            args = (value, *args)
            value = context
            if wanted is not utils._PassArg.context:
                value = getattr(context, "eval_ctx" if "eval" in wanted.name else "environment")
        return meter.made(function(value, *args, **kwargs))

    return charged


def _check_replace(meter: Meter, value: Any, old: Any = "", new: Any = "", *count: Any) -> None:
    """Refuse a replacement whose result is too long, which one can compute."""
    value, old, new = str(value), str(old), str(new)
    meter.check(len(value) + value.count(old) * len(new))


def _widest(form: Any) -> int:
    """Return the largest number in a format, which may be a width.

    Raises:
        TooCostly: a width of the format is another argument.
    """
    form = str(form)
    if "{" in form and any(spec and "{" in spec for _, _, spec, _ in Formatter().parse(form)):
        raise TooCostly("it formats with a width that is an argument")
    return max((int(digits[:9]) for digits in re.findall(r"\d+", form)), default=0)


def _environment() -> _Environment:
    """Return the jinja2 environment that chat templates expect."""

    def refuse(message: str) -> NoReturn:
        raise jinja2.TemplateError(message)

    def tojson(value: Any, ensure_ascii: bool = False, **options: Any) -> str:
        # jinja2's own filter escapes HTML. A prompt must not have these escapes.
        return json.dumps(value, ensure_ascii=ensure_ascii, **options)

    def strftime_now(form: str) -> str:
        if len(form) > 1000:
            raise TooCostly("it formats a date with more than 1000 characters")
        return datetime.now().strftime(form)

    found = _Environment(
        trim_blocks=True,
        lstrip_blocks=True,
        extensions=[ext.loopcontrols, _Generation],
        finalize=_output,
    )
    found.filters["tojson"] = tojson
    for name in _NO_FILTERS:
        del found.filters[name]
    found.filters = {name: _metered(name, each) for name, each in found.filters.items()}
    tests: dict[str, Any] = found.tests
    tests.update((name, _metered(name, tests[name])) for name in _COMPARING_TESTS)
    found.filters[_SPEND] = _charging(Meter.spend)
    found.filters[_MADE] = _charging(Meter.made)
    found.filters[_USED] = _charging(Meter.used)
    found.filters[_SLICED] = _charging(Meter.sliced)
    found.filters[_JOINED] = _charging(_joined)
    del found.globals["lipsum"]
    found.globals["namespace"] = _Namespace
    found.globals["raise_exception"] = refuse
    found.globals["strftime_now"] = strftime_now
    return found

"""Templates render as jinja2 renders them, and none works without end or takes all memory."""

import jinja2
import jinja2.ext
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment, SecurityError

from ligermodels.text import chat_template
from ligermodels.text.chat_template import MAX_SOURCE, render

TALK = [
    {"role": "system", "content": "be kind"},
    {"role": "user", "content": " hi & <you> é\n"},
    {"role": "assistant", "content": "hello " * 20},
]
START = "{% set ns = namespace(s='x' * 999, l=[0], n=7) %}"
EVER = "{% for _ in range(99999) %}"
END = "{% endfor %}"


@pytest.mark.parametrize(
    "template",
    [
        "{% for m in messages %}{{ loop.index0 }}{{ loop.last }}{{ m.role + '|' ~ m['content'] }}"
        "{% if not loop.first and loop.previtem.role != m.role %}{{ loop.length }}{% endif %}"
        "{% else %}nothing{% endfor %}",
        "{% for m in messages if m.role == 'user' %}{{ m.content | trim | upper }}{% endfor %}",
        "{% for m in messages[::-1] recursive %}{{ m if m is string else loop(m.role) }}"
        "{% endfor %}",
        "{% macro show(m, sep=': ') %}{{ m.role ~ sep }}{{ caller() if caller }}{% endmacro %}"
        "{% for m in messages %}{{ show(m) }}{% call show(m) %}body{% endcall %}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 2 ** 3 %}"
        "{% endfor %}{{ ns.n * 2 }}{{ ns.n % 5 }}{{ [1, 2] * 2 }}{{ 'ab' * 3 }}{{ 7 // 2 }}",
        "{% block one %}in {{ messages | length }}{% endblock %}{{ self.one() }}",
        "{{ 'a' ~ 1 ~ none ~ [2] }}{{ [1] + [2] }}{{ 2.5 * 2 }}{{ '%5d' % 3 }}{{ -2 ** 2 }}",
    ],
)
def test_rendering_equals_jinja2(template):
    plain = ImmutableSandboxedEnvironment(
        trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols]
    )
    variables = {"messages": TALK, "none": None}
    assert render(template, variables) == plain.from_string(template).render(variables)


@pytest.mark.parametrize(
    "template",
    [
        # loops without end
        EVER * 2 + END * 2,
        EVER + "{% for b in range(99999) if b > 10 ** 6 %}{% endfor %}{% endfor %}",
        "{% macro m(n) %}{% if n %}{{ m(n - 1) }}{{ m(n - 1) }}{% endif %}{% endmacro %}"
        "{{ m(99) }}",
        "{% macro m() %}" + EVER + "{{ caller() }}{% endfor %}{% endmacro %}"
        "{% call m() %}" + EVER + "x{% endfor %}{% endcall %}",
        "{% block b %}" + EVER + "{% endfor %}{% endblock %}" + EVER + "{{ self.b() }}{% endfor %}",
        # too long a number, text or list
        "{{ 9 ** (9 ** 9) }}",
        "{{ 'x' * 10 ** 10 }}",
        START + "{% for _ in range(60) %}{% set ns.s = ns.s ~ ns.s %}{% endfor %}",
        START + "{% for _ in range(60) %}{% set ns.s = ns.s + ns.s %}{% endfor %}",
        EVER + "y" * 999 + END,
        "x" * (MAX_SOURCE + 1),
    ],
)
def test_bombs_are_refused(template, monkeypatch):
    monkeypatch.setattr(chat_template, "_MAX_TURNS", 100_000)  # to take less time
    with pytest.raises(SecurityError):
        render(template, {"messages": TALK})


def test_other_ways_out_are_closed():
    endless = "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}"
    for template in (endless, "{{ lipsum(10 ** 9) }}", "{% include 'x' %}"):
        with pytest.raises(Exception):  # noqa: B017, any error of jinja2 or Python
            render(template, {"messages": TALK})

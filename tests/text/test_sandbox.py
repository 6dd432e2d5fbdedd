"""Templates render as jinja2 renders them, and none works without end or takes all memory."""

import threading

import jinja2
import jinja2.ext
import pytest
from jinja2.sandbox import ImmutableSandboxedEnvironment

from ligermodels.text import sandbox
from ligermodels.text.sandbox import MAX_SOURCE, TooCostly, render

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
        "{{ messages | selectattr('role', 'equalto', 'user') | map(attribute='content') | list }}",
        "{{ messages | map(attribute='role') | join('-') }}{{ messages[1:] | length }}",
        "{{ messages | rejectattr('role', 'in', ['user', 'tool']) | list | length }}",
        "{% macro show(m, sep=': ') %}{{ m.role ~ sep }}{{ caller() if caller }}{% endmacro %}"
        "{% for m in messages %}{{ show(m) }}{% call show(m) %}body{% endcall %}{% endfor %}",
        "{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 2 ** 3 %}"
        "{% endfor %}{{ ns.n * 2 }}{{ ns.n % 5 }}{{ [1, 2] * 2 }}{{ 'ab' * 3 }}{{ 7 // 2 }}",
        "{{ '%s-%5d' % ('a', 3) }}{{ '{:>6}{x}'.format('b', x=1) }}{{ '%s' | format(2) }}",
        "{{ {'a': [1, (2, 3)], 'b': None}.items() | list }}{{ 'kind' in messages[0].content }}",
        "{{ 'role' in messages[0] }}{{ messages[0].get('none', 'x') }}{{ missing | default('d') }}",
        "{{ [{'a': 1}, {'a': 2}] | sum('a') }}{{ 1.234 | round(1) }}{{ 'x' | center(5) }}",
        "{{ dict(a=1, **{'b': 2}) | dictsort }}{{ range(3) | list }}{{ 'a\nb' | indent(2) }}",
        "{% for k, v in messages[0].items() %}{{ loop.cycle('x', 'y') }}{{ k }}={{ v }}"
        "{% endfor %}",
        "{% block one %}in {{ messages | length }}{% endblock %}{{ self.one() }}",
        "{{ ['b', 'a', 'b'] | unique | list }}{{ (1, 2) in [(1, 2)] }}{{ {(1, 2): 3}[(1, 2)] }}",
        "{{ {(1, 2): 3}.get((1, 2)) }}{{ 'a' ~ 1 ~ none ~ [2] }}",
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
        EVER * 2 + "x" + END * 2,
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
        "{{ 'x' | center(10000000000) }}",
        "{{ '%9999999999d' % 1 }}",
        "{{ '{:9999999999}'.format(1) }}",
        "{{ '{:{w}}'.format(1, w='9999999999') }}",
        "{{ 'a\nb' | indent(10 ** 10) }}",
        "{{ ('a' * 999999) | replace('a', 'b' * 999999) }}",
        "{{ (5).to_bytes(10 ** 10, 'big') }}",
        EVER + "y" * 999 + END,
        "{{ strftime_now('%c' * 999999) }}",
        "x" * (MAX_SOURCE + 1),
    ],
)
def test_bombs_are_refused(template, monkeypatch):
    monkeypatch.setattr(sandbox, "_MAX_TURNS", 100_000)  # to take less time
    with pytest.raises(TooCostly):
        render(template, {"messages": TALK})


@pytest.mark.parametrize(
    "template",
    [
        "{% macro m() %}{{ m() }}{% endmacro %}{{ m() }}",
        "{{ " + "(" * 30_000 + "1" + ")" * 30_000 + " }}",
        "{{ " + "1+" * 30_000 + "1 }}",
        "{% for a in [1] recursive %}{{ loop([1, 1]) }}{% endfor %}",
        "{{ lipsum(10 ** 9) }}",
        "{{ ('<!--' * 999999) | striptags }}",
        "{% include 'x' %}",
        "{{ messages.append(1) }}",
        "{{ ''.__class__.__mro__ }}",
    ],
)
def test_other_ways_out_are_closed(template):
    with pytest.raises(Exception):  # noqa: B017, any error of jinja2 or Python
        render(template, {"messages": TALK})


def test_threads_count_their_own_turns(monkeypatch):
    errors = []
    monkeypatch.setattr(sandbox, "_MAX_TURNS", 150_000)

    def work():
        try:
            assert render(EVER + "x" + END, {}) == "x" * 99999
        except BaseException as error:
            errors.append(error)

    threads = [threading.Thread(target=work) for _ in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert not errors

"""A chat template is a program out of a file: whatever it says, it ends soon and takes little memory."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from millpond.errors import InvalidRequestError, ModelFileError
from millpond.text.chat import ChatTemplate
from millpond.text.template_budget import Budget, Refusal
from millpond.text.template_sandbox import Sandbox

HI = [{"role": "user", "content": "hi"}]
FAMILIES = Path(__file__).parent.parent / "templates"


def render(template: str, **bounds: int) -> str:
    return ChatTemplate(template, {}, **bounds).render(HI)


def carried(start: str, turn: str, end: str = "x") -> str:
    """A template that carries `a` through sixty turns of a loop."""
    return f"{{% set ns = namespace(a={start}) %}}{{% for i in range(60) %}}{turn}{{% endfor %}}{end}"


def test_nothing_is_calculated_when_a_template_is_compiled():
    source = "{{ 2 ** 3 }}{{ 'ab' * 3 }}{{ 'ab' | center(99) }}{{ 'a' ~ 'b' }}{% if false %}{{ 7 ** 2 }}{% endif %}"
    code = Sandbox().compile(Sandbox().charged(source), raw=True)
    assert "'**', 2, 3" in code
    assert "'*', 'ab', 3" in code
    assert "'**', 7, 2" in code
    assert " " * 40 + "ab" not in code


@pytest.mark.parametrize(
    "template",
    [
        "{{ 9 ** (9 ** 9) }}",
        "{% set n = messages | length %}{{ (n + 8) ** ((n + 8) ** (n + 8)) }}",
        carried("3", "{% set ns.a = ns.a * ns.a %}"),
        "{% set n = ('f' * 9999) | int(base=16) %}{{ n % 7 }}",
    ],
)
def test_numbers_stay_small_enough_to_calculate_with(template):
    with pytest.raises(InvalidRequestError, match="more than 16384 bits"):
        render(template)
    assert render("{{ 2 ** 100 }} {{ 2 ** -1 }} {{ 0.5 ** 9999 }} {{ 7 % 4 }} {{ (-7) // 2 }}") == (
        "1267650600228229401496703205376 0.5 0.0 3 -4"
    )


def test_a_value_nested_deeper_than_it_can_be_looked_through_is_refused():
    template = "{% set ns = namespace(a=[]) %}{% for i in range(3000) %}{% set ns.a = [ns.a] %}{% endfor %}{{ ns.a }}"
    with pytest.raises(InvalidRequestError, match="nests a value too deeply"):
        render(template, max_steps=10**9)


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages[0].content | center(20000) }}",
        "{{ 'x'.center(20000) }}",
        "{{ 'x'.ljust(20000) }}",
        "{{ ('x' | safe).center(20000) }}",
        "{{ 'x'.zfill(20000) }}",
        "{{ 'x\t'.expandtabs(20000) }}",
        "{{ 'x\t'.expandtabs(tabsize=20000) }}",
        "{{ (5).to_bytes(20000, 'big') }}",
        "{{ '%20000d' % 1 }}",
        "{{ '%20000d' | format(1) }}",
        "{{ '{:>20000}'.format(1) }}",
        "{{ '{:>{}}'.format(1, 20000) }}",
        "{{ '{a:>{b}}'.format_map({'a': 1, 'b': 20000}) }}",
        "{{ 'a\nb' | indent(20000) }}",
        "{{ [1] | tojson(indent=20000) }}",
        "{{ 1.5 | round(20000, 'ceil') }}",
        "{{ [1] | batch(20000, 1) | list }}",
        "{{ [1] | slice(20000) | list }}",
        "{% filter center(20000) %}x{% endfilter %}",
        "{% set x | center(20000) %}x{% endset %}",
    ],
)
def test_widths_are_bounded(template):
    with pytest.raises(InvalidRequestError, match="width of"):
        render(template)
    assert render(template.replace("20000", "3")) is not None


def test_a_width_that_is_not_in_the_format_is_refused():
    with pytest.raises(InvalidRequestError, match=r"width of \*"):
        render("{{ '%*d' % (20000, 1) }}")


@pytest.mark.parametrize(
    ("start", "turn"),
    [
        ("'ab'", "{% set ns.a = ns.a + ns.a %}"),
        ("'ab'", "{% set ns.a = ns.a ~ ns.a %}"),
        ("'ab'", "{% set ns.a = ns.a * 2 %}"),
        ("'ab'", "{% set ns.a = 2 * ns.a %}"),
        ("'ab'", "{% set ns.a = '%s%s' % (ns.a, ns.a) %}"),
        ("'ab'", "{% set ns.a = '%s%s' | format(ns.a, ns.a) %}"),
        ("'ab'", "{% set ns.a = '{0}{0}'.format(ns.a) %}"),
        ("'ab'", "{% set ns.a = ns.a.replace('a', 'aa') %}"),
        ("'ab'", "{% set ns.a = ns.a | replace('a', 'aa') %}"),
        ("'ab'", "{% set ns.a = ns.a.join(ns.a) %}"),
        ("'ab'", "{% set ns.a = ns.a | join(ns.a) %}"),
        ("'ab'", "{% set ns.a %}{{ ns.a }}{{ ns.a }}{% endset %}"),
        ("'\\\\\\\\'", "{% set ns.a = ns.a | tojson %}"),
        ("['ab']", "{% set ns.a = ns.a + ns.a %}"),
        ("['ab']", "{% set ns.a = [ns.a, ns.a] | string %}"),
    ],
)
def test_a_value_that_a_loop_doubles_is_stopped_before_it_is_large(start, turn):
    with pytest.raises(InvalidRequestError, match=r"more than \d+( steps|$)"):
        render(carried(start, turn), max_steps=1000, max_characters=100_000)
    assert render(carried(start, "")) == "x"


def test_a_macro_that_doubles_what_it_is_given_is_stopped():
    macro = "{% macro f(x) %}{{ x }}{{ x }}{% endmacro %}"
    with pytest.raises(InvalidRequestError, match="more than"):
        render(macro + carried("'ab'", "{% set ns.a = f(ns.a) %}"), max_steps=1000, max_characters=100_000)


@pytest.mark.parametrize(
    "use",
    [
        "{{ ns.a }}", "{{ ns }}", "{{ ns.a ~ '' }}", "{{ ns.a | tojson }}", "{{ ns.a | string }}", "{{ '%s' % ns.a }}",
        "{{ '%s' | format(ns.a) }}", "{{ '{}'.format(ns.a) }}", "{{ '{0[0]}'.format([ns.a]) }}", "{{ ns.a == ns.b }}",
        "{{ ns.a is eq(ns.b) }}", "{{ [ns.a] is eq([ns.b]) }}", "{{ ns.a in [ns.b] }}", "{{ {ns.a: 1} }}",
        "{{ {}.get(ns.a) }}", "{{ {}[ns.a] }}", "{{ dict([(ns.a, 1)]) }}", "{{ raise_exception(ns.a) }}",
        "{{ [ns.a, ns.b] | sort }}", "{{ [ns.a, ns.a] | unique | list }}", "{{ [ns.b].index(ns.a) }}",
    ],
)  # fmt: skip
def test_a_value_that_holds_itself_many_times_over_is_never_walked_to_its_end(use):
    template = carried("('x',), b=('x',)", "{% set ns.a = (ns.a, ns.a) %}{% set ns.b = (ns.b, ns.b) %}", use)
    with pytest.raises(InvalidRequestError, match=r"more than 1000 steps|tuple of tuples"):
        render(template, max_steps=1000)


class Looked(list):
    """A list that counts how often one of its kind is looked through."""

    times = 0

    def __iter__(self):
        Looked.times += 1
        return super().__iter__()


def test_what_a_value_holds_twice_is_counted_twice_and_looked_into_once(monkeypatch):
    monkeypatch.setattr(Looked, "times", 0)
    value, budget = Looked(["x" * 100]), Budget(10**6, 10**6)
    sizes = []
    for _ in range(8):
        value = Looked([value, value])
        sizes.append(budget.measured(value))
    assert all(size > 2 * before for before, size in pairwise(sizes))
    assert Looked.times == sum(range(2, 10))
    for _ in range(200):
        value = Looked([value, value])
    with pytest.raises(Refusal, match="too large"):
        budget.measured(value)
    assert Looked.times < 300


def test_a_rendering_that_nobody_waits_for_ends_at_its_next_step():
    turns = iter([False] * 5)
    template = ChatTemplate("{% for i in range(9) %}{{ raise_exception('too late') if i > 5 }}{% endfor %}", {})
    with pytest.raises(InvalidRequestError, match="nobody waits"):
        template.render(HI, lambda: next(turns, True))
    with pytest.raises(InvalidRequestError, match="too late"):
        template.render(HI, lambda: False)


def test_a_namespace_that_holds_itself_is_stopped():
    with pytest.raises(InvalidRequestError, match="too large"):
        render("{% set ns = namespace() %}{% set ns.a = ns %}{{ ns }}", max_steps=1000)


@pytest.mark.parametrize(
    "work",
    [
        "range(999) | sum", "range(999) | list", "m | sum", "m | map('string') | join", "m | select('even') | list",
        "m | reverse | sum", "m.count('x')", "m[1:]", "m == [2] * 999", "2 in m", "t.find('y')", "t.split('y')",
        "t | upper", "t | tojson", "'y' in t", "t == t[:-1] ~ 'x'", "t | length if t | trim", "{}.fromkeys(range(999))",
        "m + m", "m | batch(1) | list", "t ~ ''", "m | join", "m | max", "t is in([t ~ 'x'])",
    ],
)  # fmt: skip
def test_work_inside_filters_calls_and_operators_takes_steps(work):
    setup = "{% set m = [1] * 999 %}{% set t = 'x' * 9999 %}"
    template = f"{setup}{{% for i in range(500) %}}{{% set a = {work} %}}{{% endfor %}}x"
    with pytest.raises(InvalidRequestError, match="more than 1500 steps"):
        render(template, max_steps=1500)
    assert render(template.replace("range(500)", "range(2)"), max_steps=100_000) == "x"


def test_what_a_buffer_collects_takes_steps_too():
    block = "{% set a %}{% for i in range(500) %}{{ t }}{% endfor %}{% endset %}x"
    late = "{{ raise_exception('too late') }}{% endset %}"
    literal = block.replace("{{ t }}", "x" * 9999).replace("{% endset %}", late)
    with pytest.raises(InvalidRequestError, match="more than 1500 steps"):
        render("{% set t = 'x' * 9999 %}" + block, max_steps=1500)
    with pytest.raises(InvalidRequestError, match="more than 1500 steps"):
        render(literal, max_steps=1500)


def test_adding_up_lists_is_charged_for_every_copy():
    with pytest.raises(InvalidRequestError, match="more than 9999 steps"):
        render("{{ ([[1]] * 999) | sum(start=[]) | length }}", max_steps=9999)


def test_what_is_as_quick_with_a_long_chat_as_with_a_short_one_takes_no_steps():
    each = "{{ messages | length }}{{ (messages | last).role }}{{ messages | first is defined }}"
    template = ChatTemplate("{% for m in messages %}" + each + "{% endfor %}", {}, max_steps=2100)
    assert template.render(HI * 2000).startswith("2000userTrue")


@pytest.mark.parametrize("name", ["lipsum(n=20)", "cycler(1)", "joiner(', ')"])
def test_functions_that_no_prompt_needs_are_not_there(name):
    with pytest.raises(InvalidRequestError, match="is undefined"):
        render("{{ " + name + " }}")


def test_tags_are_not_stripped_from_marked_texts_either():
    with pytest.raises(InvalidRequestError, match="unsafe"):
        render("{{ (messages[0].content | safe).striptags() }}")


@pytest.mark.parametrize("name", ["pprint", "striptags", "urlize", "wordwrap", "xmlattr"])
def test_filters_that_no_prompt_needs_are_refused_when_the_template_is_loaded(name):
    with pytest.raises(ModelFileError, match=name):
        ChatTemplate("{{ 'x' | " + name + " }}", {})


def test_numbers_that_python_does_not_read_are_errors_of_the_template():
    with pytest.raises(ModelFileError, match="4300 digits"):
        ChatTemplate("{{ " + "9" * 5000 + " }}", {})
    with pytest.raises(InvalidRequestError, match="inf"):
        render("{{ 1e999 }}")


def test_filters_and_operators_do_what_they_do_without_bounds():
    template = (
        "{{ 'a' | center(5) }}|{{ 'b\nc' | indent(2) }}|{{ ['x', 'y'] | join('-') }}|{{ 'aXa' | replace('a', 'bb') }}|"
        "{{ [3, 1, 2] | sort | list }}|{{ [1, 2] | sum }}|{{ '%s-%3d' % ('a', 5) }}|{{ '{:>3}{x}'.format(1, x=2) }}|"
        "{{ [1, 2, 3] | map('string') | join(',') }}|{{ [1, 2, 3] | batch(2) | list }}|{{ 'ab' ~ 1 ~ none }}|"
        "{{ [{'a': 1}, {'a': 2}] | selectattr('a', 'eq', 2) | list }}|{{ (nothing | select | list) }}|"
        "{{ 'b' in 'abc' }}{{ 1 is in([1]) }}{{ {'a': 1} | dictsort }}|{{ 'a,b'.split(',')[::-1] }}|{{ 2 * [1] }}|"
        "{{ [[1], [2]] | sum(start=[]) }}|{{ ','.join(['a', 'b'] | map('upper')) }}"
    )
    assert render(template) == (
        "  a  |b\n  c|x-y|bbXbb|[1, 2, 3]|3|a-  5|  12|1,2,3|[[1, 2], [3]]|ab1None|[{'a': 2}]|[]|"
        "TrueTrue[('a', 1)]|['b', 'a']|[1, 1]|[1, 2]|A,B"
    )


def test_a_budget_tells_what_was_too_much():
    budget = Budget(10, 1000)
    budget.charge(512)
    with pytest.raises(Refusal, match="more than 10 steps"):
        budget.take(9)
    with pytest.raises(Refusal, match="makes a value of 1001 characters, more than 1000"):
        Budget(10, 1000).charge(1001)


@pytest.mark.parametrize(
    ("template", "is_cheap"),
    [
        ("{% for m in messages %}{{ '<' + m.role + '>' + m.content | trim }}{% endfor %}", True),
        ("{% set ns = namespace(n=0) %}{% for m in messages %}{% set ns.n = ns.n + 1 %}{% endfor %}", True),
        ("{{ messages[0].content.split('x')[-1] }}{{ messages | map(attribute='role') | list | tojson }}", True),
        ("{% if loop.index0 % 2 %}{{ raise_exception('no') }}{% endif %}", True),
        ("{{ messages | map('tojson') | list }}", True),
        ("{{ messages | map('center', 99) | list }}", False),
        ("{{ messages | map(messages[0].content) | list }}", False),
        ("{{ messages | sort(attribute='content') }}", False),
        ("{{ messages | tojson(indent=messages | length) }}", False),
        ("{{ range(9) | sum }}", False),
        ("{{ messages[0].content.replace('a', messages[0].content) }}", False),
        ("{{ '%999d' % messages }}", False),
        ("{% for m in messages %}{% set ns.a = ns.a + ns.a %}{% endfor %}", False),
        ("{% for m in messages %}{% set ns.a = ns.a ~ ns.a %}{% endfor %}", False),
        ("{% for m in messages %}{% set ns.a = [ns.a, ns.a] %}{% endfor %}", False),
        ("{% for m in messages %}{% set ns.a = namespace(a=ns.a, b=ns.a) %}{% endfor %}", False),
        ("{% for m in messages %}{% set ns.a = ns.a | tojson %}{% endfor %}", False),
        ("{% for m in messages %}{% set ns.a %}{{ ns.a }}{{ ns.a }}{% endset %}{% endfor %}", False),
        ("{% block a %}{{ self.a() }}{% endblock %}", False),
        ("{% for a in messages %}{% for b in messages %}{% endfor %}{% endfor %}", False),
    ],
)
def test_only_what_is_known_to_be_cheap_is_rendered_on_the_event_loop(template, is_cheap):
    assert ChatTemplate(template, {}).is_cheap is is_cheap


@pytest.mark.parametrize("family", ["llama_3", "olmo_2", "phi_3", "phi_4_mini", "qwen_3"])
def test_the_formats_of_families_without_nested_loops_are_cheap(family):
    assert ChatTemplate((FAMILIES / f"{family}.jinja").read_text(), {}).is_cheap

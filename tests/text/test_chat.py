from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from datetime import datetime

import pytest

from millpond.errors import InvalidRequestError, ModelFileError
from millpond.text.chat import ChatTemplate

HI = [{"role": "user", "content": "hi"}]


def render(template: str, messages: list[dict] = HI, **kwargs: object) -> str:
    return ChatTemplate(template, {}).render(messages, **kwargs)


def test_chats_with_the_demo_model_are_those_of_transformers(smollm2, golden):
    template = ChatTemplate(smollm2.chat_template, smollm2.special_tokens)
    for chat in golden["chats"]:
        text = template.render(chat["messages"], add_generation_prompt=chat["add_generation_prompt"])
        assert text == chat["text"]
        assert smollm2.encode(text, add_special_tokens=False) == chat["ids"]


def test_a_chat_whose_template_writes_bos_has_one_bos(tiny):
    template = ChatTemplate("{{ bos_token }}{{ messages[0].content }}", tiny.special_tokens)
    token_ids = tiny.encode(template.render(HI), add_special_tokens=False)
    assert token_ids.count(tiny.bos_token_id) == 1


def test_the_templates_own_message_reaches_the_caller():
    template = "{% if messages[0].role == 'system' %}{{ raise_exception('System role not supported') }}{% endif %}"
    with pytest.raises(InvalidRequestError, match=r"^System role not supported$") as caught:
        render(template, [{"role": "system", "content": "x"}])
    assert caught.value.param == "messages"
    assert render(template) == ""


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("ok\n{% if %}", "line 2"),
        ("{{ messages", "line 1"),
        ("{{ 'x' | no_such_filter }}", "no_such_filter"),
        ("{% for a in b %}" * 30 + "{% endfor %}" * 30, "nested too deep"),
    ],
)
def test_a_template_with_an_error_is_refused_when_it_is_loaded(template, message):
    with pytest.raises(ModelFileError, match=message):
        ChatTemplate(template, {})


@pytest.mark.parametrize(
    ("template", "message"),
    [
        ("{{ tools.name.first }}", "has no attribute 'name'"),
        ("{{ nothing.first }}", "'nothing' is undefined"),
        ("{{ messages[0].content + 1 }}", "can only concatenate str"),
        ("{{ 1 // 0 }}", "zero"),
        ("{{ nothing | tojson }}", "not JSON serializable"),
        ("{% include 'other' %}", "no loader"),
    ],
)
def test_a_template_that_fails_on_the_messages_is_a_refusal_that_says_why(template, message):
    with pytest.raises(InvalidRequestError, match=message):
        render(template)


def test_a_model_without_a_template_cannot_chat():
    with pytest.raises(InvalidRequestError, match="no chat template"):
        ChatTemplate(None, {}).render(HI)


def test_an_undefined_variable_is_empty_as_in_transformers():
    assert render("[{{ nothing }}{% if tools %}tools{% endif %}]") == "[]"


def test_messages_are_normalized_first():
    parts = [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]
    assert render("{{ messages[0].content }}", [{"role": "user", "content": parts}]) == "a\nb"
    with pytest.raises(InvalidRequestError, match="at least one message"):
        render("x", [])


def test_a_developer_is_the_system_to_a_template_that_knows_no_developers():
    messages = [{"role": "developer", "content": "x"}]
    assert render("{{ messages[0].role }}", messages) == "system"
    assert render("{{ messages[0].role }}{# developer #}", messages) == "developer"


def test_the_generation_prompt_is_added_unless_it_is_not_wanted():
    template = "x{% if add_generation_prompt %}>{% endif %}"
    assert (render(template), render(template, add_generation_prompt=False)) == ("x>", "x")


def test_further_arguments_are_variables_of_the_template():
    assert render("{{ enable_thinking }} {{ tools | length }}", enable_thinking=False, tools=[1, 2]) == "False 2"


def test_special_tokens_are_variables_and_the_missing_ones_are_empty():
    template = ChatTemplate("{{ bos_token }}|{{ eos_token }}", {"eos_token": "</s>"})
    assert template.render(HI) == "|</s>"


def test_blocks_leave_no_whitespace_of_their_own():
    assert render("a\n    {% if true %}\nb\n    {% endif %}\nc") == "a\nb\nc"


def test_json_is_not_escaped_for_html():
    template = '{{ {"b": "<é>&\'", "a": 1} | tojson }} {{ [1] | tojson(indent=1) }}'
    assert render(template) == '{"b": "<é>&\'", "a": 1} [\n 1\n]'


def test_the_date_comes_from_the_given_clock():
    template = ChatTemplate("{{ strftime_now('%d %b %Y') }}", {}, now=lambda: datetime(2001, 2, 3))
    assert template.render(HI) == "03 Feb 2001"


def test_loops_can_be_left_and_know_where_they_are():
    template = (
        "{% for x in [1, 2, 3, 4] %}"
        "{% if x == 2 %}{% continue %}{% endif %}{% if loop.index == 4 %}{% break %}{% endif %}"
        "{{ x }}{{ loop.first }}{{ loop.last }}{{ loop.length }}{{ loop.revindex }} {% else %}none{% endfor %}"
        "{% for k, v in {'a': 1}.items() if v %}{{ k }}{% endfor %}{% for x in nothing %}x{% else %}none{% endfor %}"
    )
    assert render(template) == "1TrueFalse44 3FalseFalse42 anone"


def test_the_generation_tag_is_transparent():
    assert render("a{% generation %}{{ messages[0].content }}{% endgeneration %}b") == "ahib"


@pytest.mark.parametrize(
    "template",
    [
        "{% for a in range(40) %}{% for b in messages * 40 %}{% endfor %}{% endfor %}",
        "{% macro f(n) %}{{ f(n + 1) }}{{ f(n + 1) }}{% endmacro %}{{ f(0) }}",
        "{% macro f(n) %}{% if n %}{% set a = f(n - 1) %}{% set b = f(n - 1) %}{% endif %}{% endmacro %}{{ f(60) }}",
        "{% for a in [[]] recursive %}{% set x = loop([a, a]) %}{% endfor %}",
    ],
)
def test_a_template_that_would_run_for_ever_is_stopped(template):
    with pytest.raises(InvalidRequestError, match=r"more than 1000 steps|recursion"):
        ChatTemplate(template, {}, max_steps=1000).render(HI)


def test_a_range_too_long_for_the_sandbox_is_refused():
    with pytest.raises(InvalidRequestError, match="Range too big"):
        render("{% for x in range(10 ** 9) %}{% endfor %}")


def test_a_text_that_grows_without_end_is_stopped():
    template = ChatTemplate("{% for x in range(50) %}{{ messages[0].content }}{% endfor %}", {}, max_characters=99)
    with pytest.raises(InvalidRequestError, match="more than 99 characters"):
        template.render(HI)


def test_an_ordinary_long_chat_stays_inside_the_bounds(smollm2):
    messages = [{"role": role, "content": "word " * 100} for _ in range(2000) for role in ("user", "assistant")]
    text = ChatTemplate(smollm2.chat_template, smollm2.special_tokens).render(messages)
    assert text.count("<|im_start|>") == 4002


@pytest.mark.parametrize(
    "template",
    [
        "{{ messages.append(1) }}",
        "{{ messages[0].update(role='x') }}",
        "{{ ''.__class__.__mro__ }}",
        "{{ raise_exception.__globals__.x }}",
    ],
)
def test_the_sandbox_lets_a_template_change_nothing_and_reach_nothing(template):
    with pytest.raises(InvalidRequestError, match=r"not safely callable|unsafe"):
        render(template)


def test_threads_that_render_at_once_get_what_they_get_alone():
    template = ChatTemplate("{% for m in messages %}{{ m.content }},{% endfor %}", {}, max_steps=50)
    chats = [[{"role": "user", "content": str(i)}] * 50 for i in range(64)]
    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(template.render, chats)) == [f"{i}," * 50 for i in range(64)]


def test_the_template_for_tools_is_taken_where_there_are_tools():
    template = ChatTemplate("plain", {}, tool_template="{{ tools | length }} tools")
    assert [template.render(HI), template.render(HI, tools=[]), template.render(HI, tools=[{}])] == [
        "plain", "plain", "1 tools",
    ]  # fmt: skip
    with pytest.raises(InvalidRequestError, match="no chat template"):
        ChatTemplate(None, {}, tool_template="x").render(HI)

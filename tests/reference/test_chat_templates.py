"""Chats by the templates of every family, held to what transformers renders, with tools and without."""

from __future__ import annotations

import json
import re
from importlib import import_module
from pathlib import Path

import pytest

from family_templates import CHATS, TEMPLATES, TOOLS
from millpond.errors import InvalidRequestError
from millpond.text.tokenizer import Tokenizer
from tiny_tokenizers import byte_level

pytestmark = pytest.mark.reference

VARIABLES = {
    "": {},
    "tools": {"tools": TOOLS},
    "no generation prompt": {"add_generation_prompt": False},
    "variables": {"enable_thinking": False, "date_string": "1 May", "documents": [{"title": "a", "text": "b"}]},
}


@pytest.fixture(params=TEMPLATES)
def folder(request, tmp_path) -> Path:
    byte_level("qwen 2, qwen 3").save(str(tmp_path / "tokenizer.json"))
    settings = {"bos_token": "<s>", "eos_token": "</s>", "unk_token": "<unk>"}
    (tmp_path / "tokenizer_config.json").write_text(json.dumps(settings))
    (tmp_path / "chat_template.jinja").write_text(TEMPLATES[request.param], encoding="utf-8")
    return tmp_path


def with_text_arguments(chat):
    """As clients send it: the arguments of calls are JSON in a string."""
    for message in chat:
        calls = message.get("tool_calls")
        if calls:
            written = [json.dumps(each["function"]["arguments"]) for each in calls]
            calls = [
                {**each, "function": {**each["function"], "arguments": text}}
                for each, text in zip(calls, written, strict=True)
            ]
            message = {**message, "tool_calls": calls}
        yield message


def rendered(theirs, chat, settings) -> str | Exception:
    try:
        return theirs.apply_chat_template(chat, tokenize=False, **settings)
    except import_module("jinja2").TemplateError as error:
        return error


def test_chats_are_those_of_transformers(folder):
    ours, theirs = Tokenizer.from_folder(folder), import_module("transformers").AutoTokenizer.from_pretrained(folder)
    template, count = ours.make_chat_template(), 0
    for name, chat in CHATS.items():
        for what, variables in VARIABLES.items():
            settings = {"add_generation_prompt": True, **variables}
            expected = rendered(theirs, chat, settings)
            if isinstance(expected, Exception):
                with pytest.raises(InvalidRequestError, match=re.escape(str(expected))):
                    template.render(chat, **settings)
                continue
            count += 1
            for form in (chat, list(with_text_arguments(chat))):
                text = template.render(form, **settings)
                assert text == expected, (name, what)
                assert ours.encode_chat(text) == theirs.encode(expected, add_special_tokens=False), (name, what)
    assert count > 15


def test_templates_by_name_are_chosen_as_in_transformers(tmp_path):
    byte_level("llama 3").save(str(tmp_path / "tokenizer.json"))
    named = [{"name": "default", "template": "plain"}, {"name": "tool_use", "template": "{{ tools | length }} tools"}]
    (tmp_path / "tokenizer_config.json").write_text(json.dumps({"chat_template": named}))
    ours = Tokenizer.from_folder(tmp_path).make_chat_template()
    theirs = import_module("transformers").PreTrainedTokenizerFast.from_pretrained(tmp_path)
    for variables in ({}, {"tools": TOOLS}):
        expected = theirs.apply_chat_template(CHATS["one"], tokenize=False, **variables)
        assert ours.render(CHATS["one"], **variables) == expected

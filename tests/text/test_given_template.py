from __future__ import annotations

import pytest

from millpond.errors import ConfigError
from millpond.text.given_template import MAX_BYTES, read_template

TEMPLATE = "{% for m in messages %}{{ m.content }}{% endfor %}"


def test_a_template_is_taken_as_it_is(tmp_path):
    for template in (TEMPLATE, "{{ messages[0].content }}", f"{tmp_path}{{{{ x }}}}"):
        assert read_template(template) == template


def test_a_file_is_read(tmp_path):
    path = tmp_path / "é.jinja"
    path.write_text(f"{TEMPLATE}é\n", encoding="utf-8")
    assert read_template(str(path)) == f"{TEMPLATE}é\n"


@pytest.mark.parametrize("given", ["no/such.jinja", "", "a\0b", "x" * 5000, "plain words"])
def test_what_is_neither_is_refused_with_the_reason(given):
    with pytest.raises(ConfigError, match=r"has neither \{\{ nor \{%, and is no file that can be read") as caught:
        read_template(given)
    assert len(str(caught.value)) < 250


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"\xff{{", "is no file that can be read: it is not text in UTF-8"),
        (b"hello", r"the file a\.jinja is no chat template"),
        (b"{{" + b" " * MAX_BYTES, rf"longer than the {MAX_BYTES} bytes"),
    ],
)
def test_a_file_that_is_no_template_is_refused(content, message, tmp_path):
    path = tmp_path / "a.jinja"
    path.write_bytes(content)
    with pytest.raises(ConfigError, match=message):
        read_template(str(path))


def test_a_folder_is_no_file(tmp_path):
    with pytest.raises(ConfigError, match="Is a directory"):
        read_template(str(tmp_path))

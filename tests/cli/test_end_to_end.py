"""The command as a user runs it, in processes of its own, on the demo model (`make test` fetches it first)."""

from __future__ import annotations

import json
import re
import signal
import subprocess
import sys

import pytest
from openai import OpenAI

pytestmark = pytest.mark.slow

MILLPOND = [sys.executable, "-m", "millpond.cli"]
QUESTION = "Name the capital of France."


def millpond(*arguments: str, stdin: str = "") -> str:
    """Standard output of one call that must succeed."""
    done = subprocess.run([*MILLPOND, *arguments], input=stdin, capture_output=True, text=True, timeout=120)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def client():
    """An OpenAI client of a server that was started by the command; it must stop cleanly when told to."""
    server = subprocess.Popen([*MILLPOND, "serve", "smollm2", "--port", "0"], stderr=subprocess.PIPE, text=True)
    lines = []
    for line in server.stderr:
        lines.append(line)
        if found := re.search(r"serves smollm2 at (http://\S+)", line):
            break
    else:
        pytest.fail(f"the server ended: {''.join(lines)}")
    with OpenAI(base_url=f"{found[1]}/v1", api_key="none", max_retries=0) as openai:
        yield openai
    server.send_signal(signal.SIGTERM)
    _, error = server.communicate(timeout=60)
    assert (server.returncode, "Traceback" in error) == (0, False), error


def test_generate_continues_a_prompt_and_json_tells_the_same_story():
    text = millpond("generate", "The capital of France is", "--max-tokens", "8")
    told = json.loads(millpond("generate", "--max-tokens", "8", "--json", stdin="The capital of France is"))
    assert "Paris" in text
    assert told["text"] + "\n" == text
    assert len(told["token_ids"]) == 8
    assert told["finish_reason"] == "length"
    assert told["prompt_token_ids"]


def test_chat_answers_lines_from_a_pipe():
    assert "Paris" in millpond("chat", "--temperature", "0", "--max-tokens", "32", stdin=f"{QUESTION}\n")


def test_the_server_answers_the_openai_client_streamed_and_not_with_the_same_text(client):
    request = {
        "model": "smollm2",
        "messages": [{"role": "user", "content": QUESTION}],
        "temperature": 0,
        "max_tokens": 32,
    }
    whole = client.chat.completions.create(**request).choices[0].message.content
    with client.chat.completions.create(**request, stream=True) as stream:
        pieces = [chunk.choices[0].delta.content or "" for chunk in stream]
    assert "Paris" in whole
    assert "".join(pieces) == whole
    assert len([piece for piece in pieces if piece]) > 3


def test_the_server_lists_the_model_by_the_name_it_was_asked_for(client):
    assert [model.id for model in client.models.list()] == ["smollm2"]

from __future__ import annotations

import io
import json

import pytest

from millpond.cli.app import run
from millpond.config import EngineConfig
from millpond.core.request import FinishReason


def test_the_text_goes_to_standard_output_and_nothing_else_does(engine, capsys):
    assert run(["generate", "The capital of France is"], {}) == 0
    assert capsys.readouterr() == ("Paris.\n", "")
    assert engine.prompts == ["The capital of France is"]


@pytest.mark.parametrize(
    ("arguments", "prompt"), [(["generate"], "from\na pipe"), (["generate", "-"], "from\na pipe\n")]
)
def test_without_a_prompt_the_last_newline_of_a_pipe_is_dropped_and_a_dash_keeps_it(
    engine, monkeypatch, arguments, prompt
):
    monkeypatch.setattr("sys.stdin", io.StringIO("from\na pipe\n"))
    assert run(arguments, {}) == 0
    assert engine.prompts == [prompt]


def test_json_is_one_object_with_the_four_fields(engine, capsys):
    engine.reason = FinishReason.LENGTH
    assert run(["generate", "ab", "--json"], {}) == 0
    assert json.loads(capsys.readouterr().out) == {
        "text": "Paris.",
        "prompt_token_ids": [97, 98],
        "token_ids": [ord("P"), ord("i"), ord(".")],
        "finish_reason": "length",
    }


def test_it_is_greedy_unless_told_otherwise(engine):
    run(["generate", "x"], {})
    assert engine.samplings[0].temperature == 0.0


def test_every_sampling_flag_reaches_the_engine(engine):
    flags = "--max-tokens 5 --temperature 0.5 --top-k 4 --top-p 0.9 --min-p 0.1 --seed 7 --stop a --stop b --ignore-eos"
    assert run(["generate", "x", *flags.split()], {}) == 0
    sampling = engine.samplings[0]
    assert (sampling.max_tokens, sampling.temperature, sampling.top_k, sampling.top_p) == (5, 0.5, 4, 0.9)
    assert (sampling.min_p, sampling.seed, sampling.stop, sampling.ignore_eos) == (0.1, 7, ("a", "b"), True)


def test_every_engine_flag_reaches_the_engine(engine):
    flags = "--model m.gguf --dtype float32 --threads 1 --isa portable --speculative ngram --speculative-tokens 3"
    assert run(["generate", "x", *flags.split()], {}) == 0
    config = EngineConfig(dtype="float32", threads=1, isa="portable", speculative="ngram", speculative_tokens=3)
    assert engine.opened == [("m.gguf", config)]


def test_chat_sends_the_prompt_as_one_user_message(engine):
    assert run(["generate", "--chat", "hi"], {}) == 0
    assert engine.prompts == ["user:hi|"]


def test_an_answer_with_no_text_is_an_empty_line(engine, capsys):
    engine.pieces = ("\u200b",)
    assert run(["generate", "x"], {}) == 0
    assert capsys.readouterr().out == "\u200b\n"


def test_json_is_json_whatever_the_encoding_of_the_terminal(engine, capsys):
    engine.pieces = ("\U0001f600",)
    assert run(["generate", "x", "--json"], {}) == 0
    out = capsys.readouterr().out
    assert out.isascii()
    assert json.loads(out)["text"] == "\U0001f600"


def test_a_chat_template_reaches_the_engine_and_is_for_a_message_alone(engine, capsys):
    assert run(["generate", "hi", "--chat", "--chat-template", "{{ messages }}"], {}) == 0
    assert engine.given_template == "{{ messages }}"
    assert run(["generate", "hi", "--chat-template", "{{ messages }}"], {}) == 1
    assert "add --chat" in capsys.readouterr().err
    assert len(engine.opened) == 1


@pytest.mark.parametrize("flags", [(), ("--chat",)], ids=str)
def test_a_model_that_makes_embeddings_alone_is_refused(engine, capsys, flags):
    engine.generates = False
    assert run(["generate", "hi", *flags], {}) == 1
    assert capsys.readouterr() == ("", "error: this model makes embeddings\n")
    assert engine.prompts == []

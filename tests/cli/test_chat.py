from __future__ import annotations

import io
import signal

import pytest

from millpond.cli.app import run
from millpond.core.request import FinishReason


@pytest.fixture
def say(monkeypatch):
    """Run a conversation whose lines come from a pipe."""

    def converse(*lines: str, arguments: tuple[str, ...] = ()) -> int:
        monkeypatch.setattr("sys.stdin", io.StringIO("".join(f"{line}\n" for line in lines)))
        return run(["chat", *arguments], {})

    return converse


def test_each_line_is_answered_and_the_conversation_is_kept(engine, say, capsys):
    assert say("hi", "", "and?") == 0
    assert engine.prompts == ["user:hi|", "user:hi|assistant:Paris.|user:and?|"]
    assert capsys.readouterr() == ("Paris.\nParis.\n", "")


def test_the_system_message_stays_in_front(engine, say):
    say("a", "/clear", "b", arguments=("--system", "S"))
    assert engine.prompts == ["system:S|user:a|", "system:S|user:b|"]


def test_clear_forgets_the_conversation(engine, say, capsys):
    say("a", "/clear", "b")
    assert engine.prompts == ["user:a|", "user:b|"]
    assert "(forgotten)" in capsys.readouterr().err


def test_exit_leaves_before_the_next_line(engine, say):
    assert say("/exit", "a") == 0
    assert engine.prompts == []


def test_help_and_an_unknown_command_are_answered_without_the_model(engine, say, capsys):
    say("/help", "/quti")
    assert engine.prompts == []
    error = capsys.readouterr().err
    assert "/clear  forget" in error
    assert "/quti is not a command; /help lists them" in error


def test_the_oldest_turns_are_forgotten_with_a_notice_when_the_length_is_reached(engine, say, capsys):
    engine.limits.max_total_tokens = 80  # letters; half of it is kept for the answer
    say("a" * 10, "b" * 10, "c" * 10)
    assert engine.prompts[1] == f"user:{'b' * 10}|"
    assert engine.prompts[2] == f"user:{'c' * 10}|"
    notice = "(the conversation is longer than 80 tokens: its 1 oldest turns are forgotten)"
    assert capsys.readouterr().err.count(notice) == 2


def test_a_conversation_that_just_fits_is_kept_whole(engine, say):
    first, second = "user:aa|", "user:aa|assistant:Paris.|user:bb|"
    engine.limits.max_total_tokens = 2 * len(second)
    say("aa", "bb")
    assert engine.prompts == [first, second]


def test_a_message_that_cannot_be_served_is_dropped_and_the_conversation_goes_on(engine, say, capsys):
    engine.max_total_tokens = 20
    assert say("a" * 50, "b") == 0
    assert engine.prompts == ["user:b|"]
    assert "error: the prompt is too long" in capsys.readouterr().err


def test_a_message_that_cannot_be_served_does_not_cost_the_turns_before_it(engine, say, capsys):
    engine.max_total_tokens = engine.limits.max_total_tokens = 100
    assert say("a", "b" * 200, "c") == 0
    assert engine.prompts == ["user:a|", "user:a|assistant:Paris.|user:c|"]
    assert "forgotten" not in capsys.readouterr().err


def test_ctrl_c_stops_the_answer_and_keeps_the_conversation(engine, say, capsys):
    engine.pieces = ("Par", "is", " and more")
    steps = []

    def interrupt_the_first_answer():
        steps.append(1)
        if len(steps) == 2:
            signal.raise_signal(signal.SIGINT)

    engine.on_step = interrupt_the_first_answer
    assert say("hi", "again") == 0
    assert engine.aborted == ["chat-1"]
    assert engine.prompts[1] == "user:hi|assistant:Paris|user:again|"
    assert "(stopped)" in capsys.readouterr().err


def test_an_answer_that_was_cut_off_says_so(engine, say, capsys):
    engine.reason = FinishReason.LENGTH
    say("hi")
    assert "(cut off after 3 tokens)" in capsys.readouterr().err


def test_a_chat_template_reaches_the_engine(engine, say):
    say("/exit", arguments=("--chat-template", "own.jinja"))
    assert engine.given_template == "own.jinja"


def test_a_model_that_makes_embeddings_alone_is_refused_before_the_first_line(engine, say, capsys):
    engine.generates = False
    assert say("hi") == 1
    assert "error: this model makes embeddings" in capsys.readouterr().err
    assert engine.prompts == []


def test_a_model_without_a_template_is_refused_before_the_first_line(engine, say, capsys, monkeypatch):
    monkeypatch.setattr(engine.chat_template, "is_missing", True, raising=False)
    assert say("hi") == 1
    assert "has no chat template, so it cannot chat" in capsys.readouterr().err
    assert engine.prompts == []

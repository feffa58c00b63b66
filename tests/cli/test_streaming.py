from __future__ import annotations

import os
import signal

import pytest

from millpond.cli.streaming import answer, chat_prompt, interrupt_flag
from millpond.core.request import FinishReason, SamplingParams
from millpond.errors import EngineError, InvalidRequestError
from millpond.text.chat import ChatTemplate


def run(engine, write=lambda text: None, **kwargs):
    return answer(engine, "r", [1], SamplingParams(), write, **kwargs)


def test_pieces_are_written_as_they_come_and_join_to_the_text(engine):
    written = []
    engine.on_step = lambda: written.append("step")
    result = run(engine, written.append)
    assert written == ["step", "Par", "step", "is", "step", "."]
    assert result.text == "Paris."
    assert result.token_ids == (ord("P"), ord("i"), ord("."))
    assert result.finish_reason is FinishReason.STOP


def test_a_stop_between_steps_aborts_and_keeps_what_exists(engine):
    written = []
    result = run(engine, written.append, stopped=lambda: len(written) == 2)
    assert engine.aborted == ["r"]
    assert (result.text, result.finish_reason) == ("Paris", FinishReason.ABORT)


def test_a_fault_of_the_request_is_raised_with_its_text(engine):
    engine.reason, engine.error = FinishReason.ERROR, "the logits are not finite"
    with pytest.raises(EngineError, match="the logits are not finite"):
        run(engine)


def test_a_model_without_a_chat_template_is_refused_with_the_way_out(engine):
    engine.chat_template = ChatTemplate(None, {})
    with pytest.raises(InvalidRequestError, match="no chat template, so it cannot chat; give it a plain prompt"):
        chat_prompt(engine, [{"role": "user", "content": "Hi"}])


def test_ctrl_c_is_a_flag_inside_and_an_exception_again_outside():
    with interrupt_flag() as stopped:
        assert not stopped()
        os.kill(os.getpid(), signal.SIGINT)
        assert stopped()
    with pytest.raises(KeyboardInterrupt):
        signal.raise_signal(signal.SIGINT)

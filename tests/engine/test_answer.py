from __future__ import annotations

from engine_helpers import answer, drive, text_of
from millpond.core.request import FinishReason, SamplingParams
from tiny_engine import IM_END, ids, make_engine, tokenizer_with


def test_the_end_token_counts_and_its_text_is_not_shown():
    outputs = answer([*ids("ok"), IM_END])
    assert text_of(outputs) == "ok"
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert outputs[-1].num_output_tokens == 3
    assert outputs[-1].new_token_ids == (IM_END,)


def test_the_end_token_is_hidden_even_where_special_tokens_are_shown():
    assert text_of(answer([1, *ids("ok"), IM_END], skip_special_tokens=False)) == "<|im_start|>ok"


def test_ignored_end_tokens_do_not_end_the_answer_but_stop_tokens_still_do():
    outputs = answer([*ids("o"), IM_END, *ids("k!")], ignore_eos=True, stop_token_ids=tuple(ids("!")))
    assert text_of(outputs) == "ok"
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert outputs[-1].num_output_tokens == 4


def test_a_stop_token_is_shown_where_stops_are_to_be_included():
    outputs = answer(ids("ok!"), stop_token_ids=tuple(ids("!")), include_stop_str_in_output=True)
    assert text_of(outputs) == "ok!"


def test_several_end_tokens_all_end_an_answer():
    tokenizer = tokenizer_with(ggml__eos_token_id=2, ggml__eot_token_id=0)
    for end in (0, 2):
        engine = make_engine(script={"a": [*ids("ok"), end]}, tokenizer=tokenizer)
        engine.add_request("a", ids("hi"), SamplingParams())
        assert drive(engine)["a"][-1].finish_reason is FinishReason.STOP


def test_a_stop_string_across_tokens_cuts_the_text_and_ends_the_answer():
    outputs = answer(ids("Hello world, and more"), stop=("lo wor",))
    assert text_of(outputs) == "Hel"
    assert outputs[-1].finish_reason is FinishReason.STOP
    assert outputs[-1].num_output_tokens == len("Hello wor")


def test_a_stop_string_can_be_kept():
    assert text_of(answer(ids("Hello world"), stop=("lo",), include_stop_str_in_output=True)) == "Hello"


def test_a_stop_string_at_the_start_leaves_no_text():
    assert text_of(answer(ids("Hello"), stop=("H",))) == ""


def test_a_stop_string_completed_by_the_last_allowed_token_wins_over_length():
    outputs = answer(ids("abc"), stop=("bc",), max_tokens=3)
    assert text_of(outputs) == "a"
    assert outputs[-1].finish_reason is FinishReason.STOP


def test_half_a_stop_string_is_given_out_when_the_answer_ends():
    outputs = answer(ids("ab"), stop=("bc",), max_tokens=2)
    assert text_of(outputs) == "ab"
    assert outputs[-1].finish_reason is FinishReason.LENGTH


def test_a_stop_string_before_an_end_token_in_one_step_is_one_end():
    outputs = answer([*ids("a"), 3 + 0xC3, IM_END], stop=("\ufffd",))
    assert text_of(outputs) == "a"
    assert outputs[-1].finish_reason is FinishReason.STOP


def test_a_stopped_request_gives_its_blocks_back_and_runs_no_further():
    engine = make_engine(script={"a": ids("a.b.c.d")})
    engine.add_request("a", ids("hi"), SamplingParams(max_tokens=50, stop=(".",)))
    drive(engine)
    assert engine.scheduler.pool.num_free == 64
    assert len(engine.runner.outputs) == 2


def test_half_a_character_is_never_shown():
    outputs = answer([3 + byte for byte in "añ€😀z".encode()], max_tokens=11)
    assert [output.text for output in outputs] == ["a", "", "ñ", "", "", "€", "", "", "", "😀", "z"]

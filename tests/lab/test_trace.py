from __future__ import annotations

import pytest

from millpond.errors import ConfigError
from millpond.lab.trace import read_trace
from millpond.lab.workload import WorkloadRequest

LINE = '{"arrival": 0.5, "prompt_tokens": 3, "output_tokens": 2}\n'


def trace(tmp_path, text):
    path = tmp_path / "trace.jsonl"
    path.write_text(text)
    return path


def test_each_line_is_a_request_in_order_of_arrival(tmp_path):
    text = LINE + "\n" + '{"arrival": 0, "prompt_tokens": 1, "output_tokens": 9, "user": "x"}\n'
    assert read_trace(trace(tmp_path, text)) == (
        WorkloadRequest(0.0, (2,), 9),
        WorkloadRequest(0.5, (1, 1, 1), 2),
    )


def test_a_priority_and_a_tenant_are_taken_and_null_is_none_of_either(tmp_path):
    given = ['"priority": 3, "tenant": "a"', '"priority": null, "tenant": null', '"tenant": 7', '"tenant": "None"']
    text = "".join(LINE.replace("}", f", {each}}}") for each in given)
    found = [(request.priority, request.tenant) for request in read_trace(trace(tmp_path, text))]
    assert found == [(3, "a"), (0, ""), (0, "7"), (0, "None")]


def test_requests_that_come_together_keep_the_order_of_their_lines(tmp_path):
    requests = read_trace(trace(tmp_path, LINE * 3))
    assert [request.prompt_token_ids for request in requests] == [(1,) * 3, (2,) * 3, (3,) * 3]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", "line 2 is not a JSON object: 'not json'"),
        ("[0, 6, 10]", "line 2 is not a JSON object"),
        ('{"arrival": 0, "prompt_tokens": 1}', "line 2: output_tokens must be a whole number .*got nothing"),
        (
            '{"arrival": -1, "prompt_tokens": 1, "output_tokens": 1}',
            "arrival must be a number of at least 0, got -1",
        ),
        ('{"arrival": NaN, "prompt_tokens": 1, "output_tokens": 1}', "got nan"),
        ('{"arrival": true, "prompt_tokens": 1, "output_tokens": 1}', "got True"),
        (
            '{"arrival": 0, "prompt_tokens": 0, "output_tokens": 1}',
            "must be a whole number from 1 to 1048576, got 0",
        ),
        ('{"arrival": 0, "prompt_tokens": 1, "output_tokens": 1.5}', "output_tokens must be a whole number .*got 1.5"),
        ('{"arrival": 0, "prompt_tokens": 1' + "0" * 300 + ', "output_tokens": 1}', "got a number of 997 bits"),
        ('{"arrival": 1e999, "prompt_tokens": 1, "output_tokens": 1}', "got inf"),
        (LINE.replace("}", ', "priority": 1001}'), "priority must be a whole number from -1000 to 1000, got 1001"),
        (LINE.replace("}", ', "tenant": ["a"]}'), r"line 2: tenant must be a text or a whole number, got \['a'\]"),
        (LINE.replace("}", ', "tenant": true}'), "tenant must be a text or a whole number, got True"),
        ("[" * 100_000, "line 2 is not a JSON object"),
    ],
)
def test_a_line_that_is_no_request_is_refused_by_its_number(tmp_path, line, message):
    with pytest.raises(ConfigError, match=message):
        read_trace(trace(tmp_path, LINE + line))


def test_an_empty_trace_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"trace.jsonl is empty"):
        read_trace(trace(tmp_path, "\n \n"))


def test_arrivals_count_from_the_first_so_that_they_may_be_the_time_of_day(tmp_path):
    text = "".join(LINE.replace("0.5", str(1.7e9 + seconds)) for seconds in (3, 0, 2))
    assert [request.arrival for request in read_trace(trace(tmp_path, text))] == [0.0, 2.0, 3.0]


def test_milliseconds_that_last_for_months_are_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"comes 2e\+07 seconds after the first, more than 1e\+07; .* in seconds"):
        read_trace(trace(tmp_path, LINE + LINE.replace("0.5", "2e7")))


def test_more_tokens_than_memory_is_meant_for_are_refused_while_reading(tmp_path):
    text = LINE.replace('"prompt_tokens": 3', '"prompt_tokens": 1000000') * 80
    with pytest.raises(ConfigError, match="at most 67108864 tokens, got 68000136 in 68 requests"):
        read_trace(trace(tmp_path, text))

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
        WorkloadRequest(0.0, (3,), 9),
        WorkloadRequest(0.5, (1, 1, 1), 2),
    )


def test_requests_that_come_together_keep_the_order_of_their_lines(tmp_path):
    requests = read_trace(trace(tmp_path, LINE * 3))
    assert [request.prompt_token_ids for request in requests] == [(1,) * 3, (2,) * 3, (3,) * 3]


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("not json", "line 2 is not an object with arrival, prompt_tokens, output_tokens: 'not json'"),
        ("[0, 6, 10]", "line 2 is not an object"),
        ('{"arrival": 0, "prompt_tokens": 1}', "line 2 is not an object"),
        ('{"arrival": -1, "prompt_tokens": 1, "output_tokens": 1}', "line 2: arrival must be seconds of at least 0"),
        ('{"arrival": NaN, "prompt_tokens": 1, "output_tokens": 1}', "got nan"),
        ('{"arrival": true, "prompt_tokens": 1, "output_tokens": 1}', "got True"),
        ('{"arrival": 0, "prompt_tokens": 0, "output_tokens": 1}', "prompt_tokens must be an integer of at least 1"),
        ('{"arrival": 0, "prompt_tokens": 1, "output_tokens": 1.5}', "output_tokens must be an integer of .*got 1.5"),
    ],
)
def test_a_line_that_is_no_request_is_refused_by_its_number(tmp_path, line, message):
    with pytest.raises(ConfigError, match=message):
        read_trace(trace(tmp_path, LINE + line))


def test_an_empty_trace_is_refused(tmp_path):
    with pytest.raises(ConfigError, match=r"trace.jsonl holds no request"):
        read_trace(trace(tmp_path, "\n \n"))

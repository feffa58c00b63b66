import io

import pytest
from rich.console import Console

from bench.peers import report


def record(contender, tokens=640, seconds=1.0, round_=1, key="decode/16", **more):
    sample = {"seconds": seconds, "tokens": tokens}
    return {"key": key, "contender": contender, "round": round_, "sample": sample, **more}


def only_row(records):
    (row,) = report.rows(records)
    return row


def printed(records):
    console = Console(file=io.StringIO(), width=200)
    console.print(report.table(report.rows(records), report.names_of(records)))
    return console.file.getvalue()


def test_a_row_has_the_median_of_the_rounds_of_each_contender():
    row = only_row([record("millpond", seconds=seconds, round_=n) for n, seconds in enumerate((1.0, 2.0, 4.0), 1)])
    assert row.cells["millpond"].median == 320.0
    assert (row.cells["millpond"].least, row.cells["millpond"].most) == (160.0, 640.0)


def test_the_round_that_warms_up_does_not_count():
    row = only_row([record("millpond", seconds=9.0, round_=0), record("millpond", seconds=1.0)])
    assert row.cells["millpond"].rounds == 1
    assert row.cells["millpond"].median == 640.0


def test_a_job_that_was_run_again_counts_once_with_its_last_sample():
    row = only_row([record("millpond", seconds=9.0), record("millpond", seconds=1.0)])
    assert (row.cells["millpond"].rounds, row.cells["millpond"].median) == (1, 640.0)


def test_the_ratio_is_to_the_best_peer():
    row = only_row([record("millpond", 1000), record("vllm", 800), record("openvino", 500)])
    assert row.ratio == 1.25


def test_another_variant_of_millpond_is_no_peer():
    row = only_row([record("millpond", 1000), record("millpond:other", 4000), record("vllm", 500)])
    assert row.ratio == 2.0


def test_a_contender_variant_of_a_peer_is_a_peer():
    row = only_row([record("millpond", 1000), record("vllm", 500), record("vllm:w8a8", 800)])
    assert row.ratio == 1.25


def test_for_seconds_less_is_better():
    samples = [record(name, 0, seconds, key="startup/warm") for name, seconds in (("millpond", 2.0), ("vllm", 60.0))]
    assert only_row(samples).ratio == 30.0


def test_prefill_counts_prompt_tokens():
    line = record("millpond", key="prefill/512")
    line["sample"] = {"seconds": 0.5, "tokens": 1, "prompt_tokens": 512}
    assert only_row([line]).cells["millpond"].median == 1024.0


def test_streaming_gives_percentiles_of_ttft_and_itl_in_milliseconds():
    line = record("millpond", key="poisson/2")
    line["sample"] |= {
        "tpot": [0.3, 0.1, 0.2],
        "ttft": [n / 1000 for n in range(1, 101)],
        "itl": [n / 100 for n in range(1, 101)],
    }
    found = {row.title: row.cells["millpond"].median for row in report.rows([line])}
    assert found == {
        "Poisson, 2 a second, TTFT p50": pytest.approx(50),
        "Poisson, 2 a second, TTFT p99": pytest.approx(99),
        "Poisson, 2 a second, TPOT p50": pytest.approx(200),
        "Poisson, 2 a second, ITL p50": pytest.approx(500),
        "Poisson, 2 a second, ITL p99": pytest.approx(990),
    }


def test_rows_come_in_the_order_of_their_groups_and_sizes_as_they_were_measured():
    keys = ("memory/server", "decode/4", "http/w1", "decode/16")
    records = [record("millpond", key=key) for key in keys]
    records[0]["sample"] = {"bytes": 1}
    records[2]["sample"] |= {"tpot": [1.0], "ttft": [1.0], "itl": [1.0]}
    found = list(dict.fromkeys(row.key for row in report.rows(records)))
    assert found == ["decode/4", "decode/16", "http/w1", "memory/server"]


def test_a_contender_that_failed_is_shown_as_failed_and_its_error_is_kept():
    failed = {"key": "decode/16", "contender": "vllm", "round": 1, "error": "vllm: the worker ended"}
    records = [record("millpond"), failed]
    assert "failed" in printed(records)
    assert report.failures(records) == {("decode/16", "vllm"): "vllm: the worker ended"}


def test_a_failure_that_was_made_good_is_no_failure():
    failed = {"key": "decode/16", "contender": "vllm", "round": 1, "error": "it died"}
    assert report.failures([failed, record("vllm")]) == {}


def test_the_reason_for_an_absence_is_told_once():
    absent = [{"key": "http/w1", "contender": "openvino", "round": n, "absent": "no server"} for n in (1, 2)]
    assert report.absences(absent) == ["no server"]


def test_a_row_with_noise_is_marked():
    assert " *" in printed([record("millpond", others=0.2)])
    assert " *" not in printed([record("millpond", others=0.01)])


def test_the_table_names_contenders_medians_and_the_ratio():
    text = printed([record("millpond", 1000), record("vllm", 500)])
    assert all(word in text for word in ("millpond", "vllm", "1,000", "500", "2.00x", "decode, 16 sequences"))

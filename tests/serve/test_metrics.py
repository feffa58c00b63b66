from __future__ import annotations

import asyncio
import json
import re
from pathlib import Path

import pytest
from prometheus_client.parser import text_string_to_metric_families

from disk_stand_in import disk_in
from millpond import __version__
from tiny_engine import GatedRunner, make_engine, run
from tiny_server import ask, started

BODY = {"prompt": "hi", "max_tokens": 4, "ignore_eos": True}
DASHBOARD = Path(__file__).parents[2] / "docs" / "grafana" / "millpond.json"
# As they are in vLLM's dashboards, with the buckets of its histograms.
TTFT = "0.001 0.005 0.01 0.02 0.04 0.06 0.08 0.1 0.25 0.5 0.75 1 2.5 5 7.5 10 20 40 80 160 640 2560"
TOKEN = "0.01 0.025 0.05 0.075 0.1 0.15 0.2 0.3 0.4 0.5 0.75 1 2.5 5 7.5 10 20 40 80"
REQUEST = "0.3 0.5 0.8 1 1.5 2 2.5 5 10 15 20 30 40 50 60 120 240 480 960 1920 7680"
VLLM_HISTOGRAMS = {
    "vllm:time_to_first_token_seconds": TTFT,
    "vllm:inter_token_latency_seconds": TOKEN,
    "vllm:time_per_output_token_seconds": TOKEN,
    "vllm:request_time_per_output_token_seconds": TOKEN,
    "vllm:e2e_request_latency_seconds": REQUEST,
    "vllm:request_queue_time_seconds": REQUEST,
    "vllm:request_prefill_time_seconds": REQUEST,
    "vllm:request_decode_time_seconds": REQUEST,
    "vllm:request_prompt_tokens": "1 2 5 10 20 50 100",
    "vllm:request_generation_tokens": "1 2 5 10 20 50 100",
    "vllm:iteration_tokens_total": "1 8 16 32 64 128 256 512 1024 2048 4096 8192 16384",
}
VLLM_SAMPLES = {
    "vllm:num_requests_running",
    "vllm:num_requests_waiting",
    "vllm:kv_cache_usage_perc",
    "vllm:num_preemptions_total",
    "vllm:prompt_tokens_total",
    "vllm:generation_tokens_total",
    "vllm:request_success_total",
}


def samples_of(response):
    """{(name, model, other label values...): value} of a scrape."""
    assert response.status_code == 200
    assert response.headers["content-type"].startswith("text/plain; version=0.0.4")
    families = text_string_to_metric_families(response.text)
    samples = [each for family in families for each in family.samples]
    return {(each.name, *_model_first(each.labels)): each.value for each in samples}


def _model_first(labels):
    rest = [value for name, value in labels.items() if name != "model_name"]
    return [labels["model_name"], *rest] if "model_name" in labels else rest


def scraped(*requests, engine=None, **settings):
    """The answer of /metrics after these (method, path, body)."""

    async def test():
        async with started(engine or make_engine(), **settings) as (_, client):
            for method, path, body in requests:
                await client.request(method, path, json=body)
            return await client.get("/metrics")

    return run(test())


def scrape(*requests, **settings):
    return samples_of(scraped(*requests, **settings))


def post(**fields):
    return "POST", "/v1/completions", {**BODY, **fields}


def test_requests_and_their_tokens_are_counted():
    samples = scrape(post(), post(prompt=["a", "bc"], max_tokens=1), post(stream=True), post(prompt=[]))
    assert samples["vllm:request_success_total", "tiny", "length"] == 4
    assert samples["vllm:generation_tokens_total", "tiny"] == 4 + 2 + 4
    assert samples["vllm:time_to_first_token_seconds_count", "tiny"] == 4
    assert samples["vllm:inter_token_latency_seconds_count", "tiny"] == 6
    assert samples["vllm:request_generation_tokens_sum", "tiny"] == 10
    assert samples["vllm:request_generation_tokens_bucket", "tiny", "1.0"] == 2
    assert samples["vllm:request_generation_tokens_bucket", "tiny", "5.0"] == 4
    assert samples["vllm:request_generation_tokens_bucket", "tiny", "+Inf"] == 4
    assert samples["millpond_info", __version__] == 1


@pytest.mark.parametrize("name", VLLM_HISTOGRAMS)
def test_a_histogram_with_a_name_of_vllm_has_its_buckets(name):
    samples = scrape(post())
    bounds = [key[2] for key in samples if key[0] == f"{name}_bucket"]
    assert [float(bound) for bound in bounds[:-1]] == [float(bound) for bound in VLLM_HISTOGRAMS[name].split()]
    assert bounds[-1] == "+Inf"
    counts = [samples[f"{name}_bucket", "tiny", bound] for bound in bounds]
    assert counts == sorted(counts)
    assert counts[-1] == samples[f"{name}_count", "tiny"] > 0


def test_the_other_names_of_vllm_are_there_with_its_labels():
    samples = scrape()
    assert {key[0] for key in samples} >= VLLM_SAMPLES
    reasons = {key[2] for key in samples if key[0] == "vllm:request_success_total"}
    assert reasons == {"stop", "length", "abort", "error"}
    assert {key[1] for key in samples if key[0] in VLLM_SAMPLES} == {"tiny"}


def test_who_runs_who_waits_and_what_the_pool_holds_is_what_is_so_now():
    engine = make_engine(wrap=GatedRunner, max_num_seqs=2, num_blocks=16, watermark_blocks=1)

    async def watched():
        async with started(engine) as (async_engine, client):
            body = {**BODY, "prompt": [5] * 5}
            tasks = [asyncio.create_task(client.post("/v1/completions", json=body)) for _ in range(5)]
            while async_engine.num_unfinished < 5:
                await asyncio.sleep(0)
            engine.runner.let_through(1)
            await engine.runner.wait_until_entered(2)
            tasks.append(asyncio.create_task(client.post("/v1/completions", json=body)))
            while async_engine.num_unfinished < 6:
                await asyncio.sleep(0)
            during = await client.get("/metrics")
            engine.runner.open_for_good()
            await asyncio.gather(*tasks)
            return during, await client.get("/metrics")

    during, after = [samples_of(response) for response in run(watched())]
    assert during["vllm:num_requests_running", "tiny"] == 2
    # Three in the engine, and one that it will see when the step is over.
    assert during["vllm:num_requests_waiting", "tiny"] == 4
    # Five tokens of the prompt and the one just sampled: two blocks of four for each, the first of which they share.
    assert during["vllm:kv_cache_usage_perc", "tiny"] == pytest.approx(3 / 16)
    assert during["millpond_kv_blocks", "tiny"] == 16
    assert during["millpond_watermark_blocks", "tiny"] == 1
    assert after["vllm:num_requests_running", "tiny"] == after["vllm:num_requests_waiting", "tiny"] == 0


def test_our_own_numbers_are_the_schedulers():
    engine = make_engine(num_blocks=8, max_num_seqs=3, watermark_blocks=1, audit=True, prefix_cache=False)
    samples = scrape(post(prompt=["123456"] * 8, max_tokens=10), engine=engine)
    counters = engine.scheduler.counters
    assert counters.preemptions > 0
    assert counters.watermark_delays > 0
    expected = {
        "vllm:num_preemptions_total": counters.preemptions,
        "millpond_recomputed_tokens_total": counters.recomputed_tokens,
        "millpond_forward_tokens_total": counters.forward_tokens,
        "millpond_thrashed_admissions_total": counters.thrashed_admissions,
        "millpond_watermark_delays_total": counters.watermark_delays,
        "millpond_steps_total": counters.iterations,
        "millpond_audits_total": counters.iterations,
    }
    # The last requests are released in a step of their own, which may come after the scrape.
    slack = {"millpond_steps_total": 1, "millpond_audits_total": 1}
    for name, value in expected.items():
        assert value - slack.get(name, 0) <= samples[name, "tiny"] <= value, name
    phases = {key[2]: value for key, value in samples.items() if key[0] == "millpond_step_phase_seconds_total"}
    assert phases.keys() == {"schedule", "arrays", "forward", "sample", "update"}
    assert phases["schedule"] > 0
    assert samples["millpond_step_seconds_sum", "tiny"] >= sum(phases.values())


def test_what_the_prefix_cache_was_asked_and_what_it_found_are_the_schedulers_counts():
    engine = make_engine(num_blocks=8, max_num_seqs=3)
    samples = scrape(post(prompt=["123456"] * 8, max_tokens=4), engine=engine)
    counters = engine.scheduler.counters
    # Seven of eight find the first block of four tokens, each asked for all six.
    assert (counters.queried_tokens, counters.hit_tokens) == (8 * 6, 7 * 4)
    assert samples["vllm:prefix_cache_queries_total", "tiny"] == 48
    assert samples["vllm:prefix_cache_hits_total", "tiny"] == 28
    assert samples["millpond_resumed_hit_tokens_total", "tiny"] == counters.resumed_hit_tokens


def test_what_the_disk_had_wrote_and_refused_is_counted(tmp_path):
    scrape(post(prompt="123456789", max_tokens=2), engine=make_engine(disk=disk_in(tmp_path)))
    paths = sorted(tmp_path.rglob("*.kv"))
    num_bytes = paths[0].stat().st_size
    engine = make_engine(disk=disk_in(tmp_path))
    samples = scrape(post(prompt="123456789", max_tokens=2), engine=engine)
    assert samples["millpond_disk_bytes", "tiny"] == len(paths) * num_bytes > 0
    assert samples["millpond_disk_hit_tokens_total", "tiny"] == 8
    assert samples["millpond_disk_read_bytes_total", "tiny"] == 2 * num_bytes
    for name in ("written_bytes", "damaged_blocks", "failed_writes", "evicted_blocks"):
        assert samples[f"millpond_disk_{name}_total", "tiny"] == getattr(engine.scheduler.disk.counters, name)
    without = scrape(post(), engine=make_engine())
    assert without["millpond_disk_bytes", "tiny"] == without["millpond_disk_hit_tokens_total", "tiny"] == 0


def test_aborts_and_faults_are_counted_as_such(caplog):
    samples = scrape(post(), engine=make_engine(raises={1: RuntimeError("boom")}))
    assert samples["vllm:request_success_total", "tiny", "error"] == 1
    assert samples["vllm:e2e_request_latency_seconds_count", "tiny"] == 0


def test_nothing_that_a_client_sends_makes_a_new_series():
    few, many = [], []
    for sent, number in ((few, 1), (many, 40)):
        for each in range(number):
            sent += [
                ("GET", f"/scan/{each}", None),
                ("GET", f"/v1/models/model-{each}", None),
                ("POST", f"/%22{each}%0a", {"a": each}),
                ("PATCH", "/v1/models", None),
                ("BREW", f"/pot/{each}", None),
                post(model=f"model-{each}"),
                post(user=f"user-{each}"),
            ]
    assert scrape(*few).keys() == scrape(*many).keys()


def test_answers_are_counted_by_route_and_status():
    samples = scrape(post(), post(prompt=[]), ("GET", "/v1/models/tiny", None), ("GET", "/nothing", None))
    assert {key[1:]: value for key, value in samples.items() if key[0] == "millpond_http_responses_total"} == {
        ("/v1/completions", "200"): 1,
        ("/v1/completions", "400"): 1,
        ("/v1/models/{model_id:path}", "200"): 1,
        ("other", "404"): 1,
    }


def test_the_name_of_a_model_may_hold_anything():
    name = 'a"b\\c\nd'
    samples = scrape(post(model=name), model_names=(name,))
    assert samples["vllm:generation_tokens_total", name] == 4


def test_one_scrape_does_not_see_another_server():
    assert scrape(post())["vllm:generation_tokens_total", "tiny"] == 4
    assert scrape()["vllm:generation_tokens_total", "tiny"] == 0


def queries():
    """Every query of the dashboard, by the panel it is in."""
    for panel in json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]:
        for target in panel["targets"]:
            yield panel["title"], target["expr"]


@pytest.mark.parametrize(("panel", "query"), list(queries()))
def test_the_dashboard_asks_for_what_there_is(panel, query):
    response = scraped(post())
    names = set(re.findall(r"\b(?:vllm:|millpond_|process_)\w+", query))
    assert names
    assert names <= {key[0] for key in samples_of(response)}
    for label in re.findall(r"by \((\w+)\)", query):
        assert re.search(rf'^{min(names)}{{.*\b{label}="', response.text, re.MULTILINE)


def test_the_dashboard_chooses_among_the_models_that_are_served():
    variables = json.loads(DASHBOARD.read_text(encoding="utf-8"))["templating"]["list"]
    [model] = [each for each in variables if each["name"] == "model_name"]
    name, label = re.fullmatch(r"label_values\(([\w:]+), (\w+)\)", model["query"]).groups()
    assert f'{name}{{{label}="tiny"}}' in ask(make_engine(), "/metrics").text


def test_every_panel_of_the_dashboard_has_its_own_place_and_number():
    panels = json.loads(DASHBOARD.read_text(encoding="utf-8"))["panels"]
    assert len({panel["id"] for panel in panels}) == len(panels)
    assert len({(panel["gridPos"]["x"], panel["gridPos"]["y"]) for panel in panels}) == len(panels)

import pytest

from bench.peers.plan import Job, Measurement, Plan
from bench.peers.store import RunStore, record_of

PLAN = Plan(contenders=("a",), groups=("decode",), rounds=2)


def job(contender="a", round_=1):
    return Job(Measurement("decode/1", "offline", 1, 2, True), contender, round_)


@pytest.fixture
def store(tmp_path):
    store = RunStore(tmp_path / "run")
    store.create(PLAN, {"commit": "abc"})
    return store


def test_a_run_is_taken_up_with_its_own_plan_and_facts(store):
    again = RunStore(store.folder)
    assert again.plan() == PLAN
    assert again.header()["facts"] == {"commit": "abc"}


def test_what_was_measured_need_not_be_measured_again(store):
    store.add(record_of(job(), sample={"seconds": 1.0}))
    assert store.done() == {("decode/1", "a", 1)}


def test_what_an_engine_cannot_do_is_not_tried_again(store):
    store.add(record_of(job(), absent="no server"))
    assert store.done() == {("decode/1", "a", 1)}


def test_what_failed_is_tried_again(store):
    store.add(record_of(job(), error="it died"))
    assert store.done() == set()


def test_what_was_made_good_by_a_later_try_is_done_and_what_failed_since_is_not(store):
    for content in ({"error": "it died"}, {"sample": {"seconds": 1.0}}):
        store.add(record_of(job(), **content))
    assert len(store.done()) == 1
    store.add(record_of(job(), error="it died again"))
    assert store.done() == set()


def test_what_others_disturbed_is_measured_again_on_request_until_it_is_quiet(store):
    store.add(record_of(job(), sample={"seconds": 1.0}, others=0.3))
    assert store.done() == {("decode/1", "a", 1)}
    assert store.done(most_noise=0.05) == set()
    store.add(record_of(job(), sample={"seconds": 1.0}, others=0.01))
    assert store.done(most_noise=0.05) == {("decode/1", "a", 1)}


def test_a_line_that_a_crash_cut_off_is_left_out(store):
    store.add(record_of(job(), sample={"seconds": 1.0}))
    with (store.folder / "measurements.jsonl").open("a") as lines:
        lines.write('{"key": "decode/1", "contend')
    assert [each["round"] for each in store.records()] == [1]


def test_a_second_run_of_the_same_name_is_refused(store):
    with pytest.raises(FileExistsError):
        store.create(PLAN, {})


def test_a_run_that_does_not_exist_is_named(tmp_path):
    with pytest.raises(FileNotFoundError, match="nowhere"):
        RunStore(tmp_path / "nowhere").plan()

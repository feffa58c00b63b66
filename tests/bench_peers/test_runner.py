from dataclasses import dataclass, field

import pytest

from bench.peers import report
from bench.peers.engines import Contender
from bench.peers.engines.base import Engine
from bench.peers.plan import Plan
from bench.peers.processes import EngineFailure
from bench.peers.runner import Runner
from bench.peers.sessions import NotMeasurableError
from bench.peers.site import Site
from bench.peers.store import RunStore


@dataclass
class FakeSession:
    """An engine that writes into a shared list what happens to it."""

    name: str
    happened: list
    settings: dict = field(default_factory=dict)

    def decode(self, prompts, num_steps):
        self.happened.append((self.name, "decode", len(prompts)))
        return {"seconds": 1.0, "tokens": len(prompts) * num_steps}

    def batch(self, requests):
        self.happened.append((self.name, "batch", len(requests)))
        return {"seconds": 1.0, "tokens": 1}

    def pause(self):
        self.happened.append((self.name, "pause", 0))

    def resume(self):
        self.happened.append((self.name, "resume", 0))

    def peak_bytes(self):
        return 1000

    def close(self):
        self.happened.append((self.name, "close", 0))


class House:
    """A run of fake engines in a folder of its own."""

    def __init__(self, folder, names=("a", "b"), **plan):
        self.happened, self.told, self.session = [], [], FakeSession
        self.store = RunStore(folder / "runs" / "x")
        self.plan = Plan(**{"contenders": names, "groups": ("decode",), "decode": (2,), "rounds": 2, **plan})
        if not self.store.folder.exists():
            self.store.create(self.plan, {})
        contenders = {name: Contender(name, self.engine(name), "v") for name in names}
        site = Site(folder, folder / "model.gguf", (0,), 100, 1000)
        self.runner = Runner(site, self.plan, self.store, contenders, self.told.append, lambda: None)

    def engine(self, name):
        def open_offline(site, name, settings, prefix_caching):
            self.happened.append((name, "open", prefix_caching))
            return self.session(name, self.happened)

        return Engine(
            name=name,
            title=name,
            distribution=name,
            variants={"v": {}},
            open_offline=open_offline,
            plan_server=None,
            install_environment={},
        )

    def run(self):
        self.runner.run()
        return [name for name, what, _ in self.happened if what == "decode"]


def test_engines_take_turns_and_each_round_begins_with_the_next(tmp_path):
    assert House(tmp_path).run() == ["a", "b", "b", "a", "a", "b"]


def test_only_one_engine_runs_at_a_time(tmp_path):
    house = House(tmp_path, names=("a", "b", "c"))
    house.run()
    running = set()
    for name, what, _ in house.happened:
        if what == "resume":
            running.add(name)
        elif what == "pause":
            running.discard(name)
        elif what == "decode":
            assert running == {name}


def test_every_sample_is_written_down_with_what_others_took(tmp_path):
    house = House(tmp_path)
    house.run()
    samples = [each for each in house.store.records() if each["key"] == "decode/2"]
    assert len(samples) == 6
    assert all(each["sample"] == {"seconds": 1.0, "tokens": 128} and 0 <= each["others"] <= 1 for each in samples)


def test_how_each_engine_was_started_is_on_record_and_makes_no_row(tmp_path):
    house = House(tmp_path, groups=("decode",))
    house.run()
    records = list(house.store.records())
    sessions = [(each["key"], each["contender"]) for each in records if "settings" in each]
    assert sessions == [("session/offline", "a"), ("session/offline", "b")]
    assert {row.key for row in report.rows(records)} == {"decode/2", "memory/offline"}


def test_an_engine_is_opened_once_for_a_phase_and_closed_after_it(tmp_path):
    house = House(tmp_path, groups=("decode", "w1", "shared"))
    house.run()
    assert [(name, what, arg) for name, what, arg in house.happened if what == "open"] == [
        ("a", "open", False),
        ("b", "open", False),
        ("a", "open", True),
        ("b", "open", True),
    ]
    assert [name for name, what, _ in house.happened if what == "close"] == ["a", "b", "a", "b"]


def test_an_engine_that_fails_is_recorded_and_closed_and_the_others_go_on(tmp_path):
    house = House(tmp_path)
    original = FakeSession.decode

    class Failing(FakeSession):
        def decode(self, prompts, num_steps):
            if self.name == "b":
                raise EngineFailure("b: it fell over")
            return original(self, prompts, num_steps)

    house.session = Failing
    assert house.run() == ["a", "a", "a"]
    errors = [each for each in house.store.records() if "error" in each]
    assert {each["contender"] for each in errors} == {"b"}
    assert len(errors) == 3
    assert house.told.count("[red]b: it fell over") == 1
    # at once, so that it takes no memory from the others
    assert house.happened.index(("b", "close", 0)) < house.happened.index(("a", "decode", 2), 6)


def test_a_run_that_is_taken_up_again_warms_up_and_measures_only_what_is_missing(tmp_path):
    first = House(tmp_path)
    interrupted = FakeSession.decode

    class Interrupted(FakeSession):
        def decode(self, prompts, num_steps):
            if sum(what == "decode" for _, what, _ in self.happened) == 4:
                raise KeyboardInterrupt
            return interrupted(self, prompts, num_steps)

    first.session = Interrupted
    with pytest.raises(KeyboardInterrupt):
        first.run()
    assert [name for name, what, _ in first.happened if what == "close"] == ["a", "b"]
    assert House(tmp_path).run() == ["a", "b", "a", "b"]
    rounds = [each["round"] for each in first.store.records() if each["key"] == "decode/2"]
    assert rounds == [0, 0, 1, 1, 0, 0, 2, 2]
    assert House(tmp_path).run() == []


def test_what_an_engine_cannot_be_measured_by_is_absent_and_no_failure(tmp_path):
    house = House(tmp_path, groups=("http",))

    class Unable(FakeSession):
        def decode(self, prompts, num_steps):
            raise NotMeasurableError("no way in")

    house.session = Unable
    house.run()
    lines = list(house.store.records())
    assert {each["absent"] for each in lines} == {
        "a: its package has no HTTP server",
        "b: its package has no HTTP server",
    }
    assert not any("error" in each for each in lines)


def test_the_peak_memory_of_the_offline_phase_is_recorded_for_each_engine(tmp_path):
    house = House(tmp_path)
    house.run()
    memory = {each["contender"]: each["sample"] for each in house.store.records() if each["key"] == "memory/offline"}
    assert memory == {"a": {"bytes": 1000}, "b": {"bytes": 1000}}


def test_servers_are_started_for_the_figures_before_anything_is_asked_of_them(tmp_path, monkeypatch):
    told = []
    monkeypatch.setattr(Runner, "_job", lambda self, phase, job: told.append(job.measurement.group))
    house = House(tmp_path, groups=("http", "startup"))
    house.runner.run()
    assert told == ["startup"] * 6 + ["http"] * 6

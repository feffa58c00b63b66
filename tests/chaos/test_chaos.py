"""Everything at once, and nothing left: the short run. `make chaos` is the long one."""

from __future__ import annotations

import pytest

from chaos.clients import Client
from chaos.storm import run_storm

pytestmark = pytest.mark.slow

NUM_REQUESTS = 1500
# What a process gains by itself after a start: allocator arenas, caches of templates and regular expressions.
MOST_GROWTH = 8 << 20


@pytest.fixture(scope="module")
def report(tmp_path_factory):
    return run_storm(tmp_path_factory.mktemp("chaos"), 7, requests=NUM_REQUESTS)


def test_every_kind_of_client_and_of_trouble_came_up(report):
    kinds = {name for name, each in vars(Client).items() if name[0] != "_" and name != "run" and callable(each)}
    assert report.kinds.keys() == kinds
    assert report.book.told.keys() >= {"200", "200, then 500", "400", "404", "405", "413", "429", "500", "504"}
    assert all(report.figures["planted"].values())
    assert report.figures["preemptions"] > 20
    assert report.figures["hit_tokens"] > 1000
    assert report.figures["audits"] == report.figures["steps"] > 1000


def test_every_answer_that_came_whole_is_the_one_that_its_asker_gets_alone(report):
    assert report.book.wrong == []
    assert report.book.num_equal > 100


def test_no_request_was_lost_or_answered_twice_and_both_sides_count_the_same(report):
    assert report.disagreements() == []
    assert report.figures["errors"] == []


def test_nothing_is_held_and_no_table_knows_a_request_any_more(report):
    assert report.leftovers == {}
    assert report.is_stopped


def test_memory_is_flat(report):
    assert report.growth < MOST_GROWTH

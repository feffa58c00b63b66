"""A whole engine over a folder: restarts, damage, and what its caller sees of it."""

from __future__ import annotations

from disk_stand_in import MemoryDisk, disk_in
from helpers import expected_output
from millpond.core.disk_prefixes import DiskPrefixes
from millpond.core.sampling import SamplingParams
from millpond.engine.async_engine import AsyncEngine
from tiny_engine import LETTERS, ids, make_engine, run

PROMPT = ids("Once upon a time, in")  # five blocks of four
OTHER_IDENTITY = b"o" * 32


def answer(engine, prompt, name="a", **sampling):
    """The tokens and scores of one request, how many positions it forwarded, and its cached tokens."""
    before = engine.scheduler.counters.forward_tokens
    engine.add_request(name, prompt, SamplingParams(max_tokens=6, temperature=0, logprobs=2, **sampling))
    token_ids, scores, cached = [], [], None
    while engine.has_unfinished:
        for output in engine.step():
            token_ids += output.new_token_ids
            scores += output.scores
            cached = output.num_cached_tokens
    return token_ids, scores, engine.scheduler.counters.forward_tokens - before, cached


def test_a_restarted_engine_gives_the_same_answer_and_computes_what_is_not_on_disk(tmp_path):
    first = make_engine(disk=disk_in(tmp_path))
    cold = answer(first, PROMPT)
    first.close()
    second = make_engine(disk=disk_in(tmp_path))
    warm = answer(second, PROMPT)
    assert warm[:2] == cold[:2]
    assert warm[0] == expected_output(PROMPT, 6, LETTERS)
    # Of the prompt all but the block of its last token, then five tokens of the answer.
    assert (cold[2:], warm[2:]) == ((20 + 5, 0), (4 + 5, 16))
    counters = second.scheduler.counters
    assert (counters.iterations, counters.disk_hit_tokens) == (6 + 1, 16)
    # The answer was kept too, as far as it was computed: the next turn begins behind it.
    third = answer(second, [*PROMPT, *warm[0], *ids("!!")], name="b")
    assert third[2:] == (28 - 24 + 5, 24)
    second.close()


def test_an_engine_of_another_model_computes_everything(tmp_path):
    first = make_engine(disk=disk_in(tmp_path))
    answer(first, PROMPT)
    first.close()
    second = make_engine(disk=disk_in(tmp_path, identity=OTHER_IDENTITY))
    assert answer(second, PROMPT)[2:] == (25, 0)
    second.close()


def test_damage_costs_the_computing_and_nothing_else(tmp_path):
    first = make_engine(disk=disk_in(tmp_path))
    cold = answer(first, PROMPT)
    first.close()
    for path in tmp_path.rglob("*.kv"):
        contents = bytearray(path.read_bytes())
        contents[-9] ^= 4
        path.write_bytes(contents)
    second = make_engine(disk=disk_in(tmp_path))
    warm = answer(second, PROMPT)
    assert warm == cold
    assert second.scheduler.disk.counters.damaged_blocks == 1
    # Computed, it is written again.
    second.close()
    third = make_engine(disk=disk_in(tmp_path))
    assert answer(third, PROMPT[:5])[2:] == (1 + 5, 4)
    third.close()


def test_logprobs_of_a_prompt_are_computed_at_all_positions(tmp_path):
    first = make_engine(disk=disk_in(tmp_path))
    cold = answer(first, PROMPT, prompt_logprobs=1)
    first.close()
    second = make_engine(disk=disk_in(tmp_path))
    assert answer(second, PROMPT, prompt_logprobs=1) == cold
    assert second.scheduler.counters.queried_tokens == 0
    second.close()


def test_a_salt_is_nowhere_on_disk(tmp_path):
    salt = "tenant-secret-77"
    engine = make_engine(disk=disk_in(tmp_path))
    answer(engine, PROMPT, cache_salt=salt)
    engine.close()
    everything = b"".join(path.read_bytes() + path.name.encode() for path in tmp_path.rglob("*.kv"))
    assert everything
    assert salt.encode() not in everything
    second = make_engine(disk=disk_in(tmp_path))
    assert answer(second, PROMPT)[3] == 0
    assert answer(second, PROMPT, name="b", cache_salt=salt)[3] == 16
    second.close()


def test_a_server_that_stops_lets_the_disk_end():
    engine = make_engine(disk=lambda runner: DiskPrefixes(MemoryDisk(runner), 4, lambda: 0.0))

    async def start_and_stop():
        async_engine = AsyncEngine(engine)
        async_engine.start()
        assert not engine.scheduler.disk.store.is_closed
        await async_engine.shutdown()

    run(start_and_stop())
    assert engine.scheduler.disk.store.is_closed

from __future__ import annotations

from millpond.lab.faults import WithoutWaiver
from millpond.lab.stepping import ChecksumRunner, StepLoop
from millpond.lab.wall import NUM_BLOCKS, RESERVE, wall_moments


def held(moments):
    return [{name: moment.holders.count(name) for name in ("a", "b", None)} for moment in moments]


def test_with_the_waiver_b_is_admitted_grows_is_preempted_and_runs():
    moments = wall_moments()
    assert [moment.step for moment in moments] == [0, 8, 9, 16]
    assert held(moments) == [
        {"a": 1, "b": 1, None: 4},
        {"a": 3, "b": 3, None: 0},
        {"a": 4, "b": 0, None: 2},
        {"a": 0, "b": 4, None: 2},
    ]
    assert "keeps its 13 tokens" in moments[2].event
    assert "the reserve is waived" in moments[3].event
    assert not any(moment.stuck for moment in moments)


def test_without_it_the_pool_is_empty_and_b_waits():
    moments = wall_moments(WithoutWaiver)
    assert moments[:3] == wall_moments()[:3]
    assert held(moments)[3] == {"a": 0, "b": 0, None: NUM_BLOCKS}
    assert moments[3].stuck
    assert "b needs 4" in moments[3].event
    assert f"leaves {NUM_BLOCKS - RESERVE}" in moments[3].event


def test_without_it_nothing_ever_changes_again(monkeypatch):
    loops = []
    step = StepLoop.step
    monkeypatch.setattr(StepLoop, "step", lambda self: loops.append(self) or step(self))
    wall_moments(WithoutWaiver)
    loop = loops[0]
    assert isinstance(loop.runner, ChecksumRunner)
    for _ in range(50):
        output, _ = step(loop)
        assert (output.scheduled, output.admitted, output.released) == ((), (), ())
    assert list(loop.scheduler.waiting) == ["b"]

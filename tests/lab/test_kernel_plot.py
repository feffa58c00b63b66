from __future__ import annotations

import pytest

from millpond.lab.kernel_plot import draw


def row(phase, us, floor_us, operations=1e9):
    return {
        "phase": phase,
        "us": us,
        "floor_us": floor_us,
        "share": us / 10_000,
        "operations": operations,
        "num_bytes": 1e7,
    }


REPORT = {
    "machine": {
        "isa": "avx512",
        "threads": 2,
        "read_bytes_s": {"524288": 2e11, "536870912": 3e10},
        "dot_operations_s": {"u8 x s8": 7e11, "bf16": 3e11},
    },
    "steps": [
        {"name": f"decode of {n}", "us": 10_000.0, "phases": [row("arrays", 500, 0, 0), row("gate up", 9500, 4000)]}
        for n in (1, 64)
    ],
}


@pytest.mark.parametrize(("name", "start"), [("a.png", b"\x89PNG"), ("a.svg", b"<?xml"), ("a.PDF", b"%PDF")])
def test_a_picture_is_written_in_the_format_of_its_name(tmp_path, name, start):
    draw(REPORT, tmp_path / name)
    assert (tmp_path / name).read_bytes().startswith(start)


def test_the_picture_names_every_step_every_large_phase_and_every_kind_of_product(tmp_path):
    draw(REPORT, tmp_path / "a.svg")
    text = (tmp_path / "a.svg").read_text()
    for name in ("decode of 1", "decode of 64", "gate up", "u8 x s8", "bf16"):
        assert f"<!-- {name}" in text
    assert "<!-- arrays" in text  # 5 % of the step

from __future__ import annotations

import numpy as np
import pytest

from millpond.errors import ModelFileError
from millpond.runner.divergence import log_softmax
from millpond.runner.logits_file import (
    DEPTH,
    counted,
    create_logits_file,
    decode_row,
    encode_row,
    file_bytes,
    open_logits_file,
)

VOCAB = 51
WINDOWS = [[0, 1, 2, 3, 4, 5], [6, 7, 8, 9, 10, 50]]


def logits(*shape, seed=0):
    return np.random.default_rng(seed).normal(0, 3, (*shape, VOCAB)).astype(np.float32)


def test_a_row_gives_back_its_log_probabilities():
    row = encode_row(logits(1)[0])
    exact = log_softmax(logits(1)[0])
    assert len(row) == 4 + VOCAB + 1
    np.testing.assert_allclose(decode_row(row, VOCAB), np.maximum(exact, exact.max() - DEPTH), atol=2e-4)


def test_logits_far_below_the_largest_are_cut_off_at_the_depth():
    back = decode_row(encode_row(np.float32([0, -5, -100])), 3)
    assert back[0] - back[2] == pytest.approx(DEPTH, abs=1e-3)


def test_logits_that_are_all_the_same_are_kept():
    np.testing.assert_allclose(decode_row(encode_row(np.float32([7, 7, 7, 7])), 4), np.log(0.25), rtol=1e-6)


def test_what_counts_is_the_second_half_of_a_window_but_its_last_position():
    assert list(counted(10)) == [5, 6, 7, 8]
    assert list(counted(7)) == [3, 4, 5]


def test_the_file_lies_as_llama_cpps_tool_reads_it(tmp_path):
    file, rows = create_logits_file(tmp_path / "base.bin", WINDOWS, VOCAB), logits(2, 2)
    for window, of_window in enumerate(rows):
        file.put(window, 3, of_window)
    file.flush()
    content = (tmp_path / "base.bin").read_bytes()
    assert content[:8] == b"_logits_"
    np.testing.assert_array_equal(np.frombuffer(content[8:20], np.int32), [6, VOCAB, 2])
    np.testing.assert_array_equal(np.frombuffer(content[20:68], np.int32), np.ravel(WINDOWS))
    assert content[68:] == b"".join(encode_row(row).tobytes() for row in rows.reshape(4, VOCAB))


def test_a_file_is_read_as_it_was_written_whatever_the_pieces_were(tmp_path):
    rows = logits(5)
    whole, pieces = (create_logits_file(tmp_path / name, WINDOWS, VOCAB) for name in ("whole", "pieces"))
    whole.put(1, 3, rows[3:])
    pieces.put(1, 4, rows[4:])  # positions that do not count are passed over
    pieces.put(1, 0, rows[:4])
    for file in (whole, pieces):
        file.flush()
    assert (tmp_path / "whole").read_bytes() == (tmp_path / "pieces").read_bytes()
    back = open_logits_file(tmp_path / "pieces")
    assert (back.windows, back.vocab, back.context) == (WINDOWS, VOCAB, 6)
    np.testing.assert_allclose(decode_row(back.rows[1, 0], VOCAB), log_softmax(rows[3]), atol=2e-4)


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda content: b"GGUF" + content[4:], "does not begin with _logits_"),
        (lambda content: content[:10], "does not begin with _logits_"),
        (
            lambda content: content[:-1],
            f"has {file_bytes(6, VOCAB, 2) - 1} bytes, but .* take {file_bytes(6, VOCAB, 2)}",
        ),
        (lambda content: content + b"x", "take"),
        (lambda content: content[:8] + np.int32([6, 51, -2]).tobytes() + content[20:], "-2 windows"),
        (lambda content: content[:8] + np.int32([1, 51, 2]).tobytes() + content[20:], "windows of 1 tokens"),
        (lambda content: content[:8] + np.int32([6, 2**31 - 1, 2**31 - 1]).tobytes() + content[20:], "take"),
    ],
)
def test_what_is_no_such_file_is_refused_by_its_name(tmp_path, change, said):
    path = tmp_path / "base.bin"
    create_logits_file(path, WINDOWS, VOCAB).flush()
    path.write_bytes(change(path.read_bytes()))
    with pytest.raises(ModelFileError, match=rf"base\.bin .*{said}"):
        open_logits_file(path)


def test_rows_that_a_model_has_written_are_no_damage(tmp_path):
    file = create_logits_file(tmp_path / "base.bin", WINDOWS, VOCAB)
    file.put(0, 3, logits(2) * np.float32(40))
    file.put(1, 3, np.zeros((2, VOCAB), np.float32))
    file.check(0)
    file.check(1)


def test_a_peak_over_a_large_vocabulary_is_no_damage(tmp_path):
    peak = np.full((2, 300_000), -40, np.float32)
    peak[:, 7] = 20
    file = create_logits_file(tmp_path / "base.bin", WINDOWS[:1], 300_000)
    file.put(0, 3, peak)
    file.check(0)


@pytest.mark.parametrize("figures", [[0, 1e30], [1e30, -16], [np.nan, -16], [-1e-5, -16], [0, -np.inf], [0, -3]])
def test_a_row_that_is_no_distribution_is_named(tmp_path, figures):
    file = create_logits_file(tmp_path / "base.bin", WINDOWS, VOCAB)
    file.put(1, 3, logits(2))
    file.rows[1, 1, :4] = np.float32(figures).view(np.uint16)
    with pytest.raises(ModelFileError, match=r"base\.bin: row 1 of window 1 is damaged"):
        file.check(1)

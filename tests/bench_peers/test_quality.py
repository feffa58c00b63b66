import numpy as np
import pytest

from bench.peers import klbase
from bench.peers.quality import compare, parse_perplexity

PRINTED = """====== KL divergence statistics ======
Mean    KLD:   0.012345 ±   0.000321
Maximum KLD:   0.500000
99.9%   KLD:   0.300000
99.0%   KLD:   0.100000
Same top p: 95.312 ± 0.400 %
"""


def rows(seed, count=6, vocab=51):
    return np.random.default_rng(seed).normal(0, 3, (count, vocab)).astype(np.float32)


def test_the_same_logits_have_no_divergence_and_agree_everywhere():
    same = compare(rows(0), rows(0))
    assert same["kl_mean"] == pytest.approx(0, abs=1e-12)
    assert same["top1"] == 1.0


def test_the_divergence_of_two_known_distributions():
    reference, ours = np.log(np.float32([[0.5, 0.5]])), np.log(np.float32([[0.25, 0.75]]))
    assert compare(reference, ours)["kl_mean"] == pytest.approx(0.5 * np.log(2) + 0.5 * np.log(2 / 3), rel=1e-6)


def test_logits_that_are_shifted_as_a_whole_are_the_same_distribution():
    assert compare(rows(0), rows(0) + 7)["kl_mean"] == pytest.approx(0, abs=1e-9)


def test_the_agreement_counts_positions_with_the_same_top_token():
    reference = np.float32([[0, 1], [0, 1], [1, 0], [1, 0]])
    assert compare(reference, np.float32([[0, 2], [3, 1], [1, 0], [5, 0]]))["top1"] == 0.75


def test_other_positions_than_the_reference_are_refused():
    with pytest.raises(ValueError, match="6, 51"):
        compare(rows(0), rows(0, count=5))


def test_the_figures_of_the_perplexity_tool_are_read():
    assert parse_perplexity(PRINTED) == {"kl_mean": 0.012345, "kl_p99": 0.1, "top1": pytest.approx(0.95312)}


def test_a_figure_that_the_tool_did_not_print_is_named():
    with pytest.raises(ValueError, match="no top1"):
        parse_perplexity(PRINTED.replace("Same top", "Other"))


def test_a_row_of_the_base_file_gives_back_its_log_probabilities():
    logits = rows(1)[0]
    row = klbase.encode_row(logits)
    exact = logits - logits.max() - np.log(np.exp(logits - logits.max()).sum())
    assert len(row) == 4 + 52
    np.testing.assert_allclose(klbase.decode_row(row, 51), np.maximum(exact, exact.max() - 16), atol=2e-4)


def test_logits_far_below_the_largest_are_cut_off_at_the_depth():
    row = klbase.encode_row(np.float32([0, -5, -100]))
    back = klbase.decode_row(row, 3)
    assert back[0] - back[2] == pytest.approx(klbase.DEPTH, abs=1e-3)


def test_the_base_file_lies_as_the_tool_reads_it(tmp_path):
    tokens, logits = np.arange(12).reshape(2, 6), rows(2, 4).reshape(2, 2, 51)
    klbase.write_base(tmp_path / "base.bin", tokens, logits)
    content = (tmp_path / "base.bin").read_bytes()
    assert content[:8] == b"_logits_"
    np.testing.assert_array_equal(np.frombuffer(content[8:20], np.int32), [6, 51, 2])
    np.testing.assert_array_equal(np.frombuffer(content[20:68], np.int32), np.arange(12))
    assert len(content) == 68 + 4 * 2 * (4 + 52)


def test_what_counts_is_the_second_half_of_a_chunk_but_its_last_position():
    assert list(range(10)[klbase.counted(10)]) == [5, 6, 7, 8]

from __future__ import annotations

import numpy as np
import pytest

from millpond.runner.divergence import Divergence
from millpond.runner.logits_file import create_logits_file

WINDOWS = [[0, 1, 2, 3, 1, 0], [3, 2, 1, 0, 2, 3]]


def against(tmp_path, reference):
    """A reference of one distribution at every position."""
    file = create_logits_file(tmp_path / "base.bin", WINDOWS, 4)
    for window in range(2):
        file.put(window, 3, np.tile(np.float32(reference), (2, 1)))
    return Divergence(file)


def test_the_divergence_of_two_known_distributions(tmp_path):
    reference, ours = np.array([0.5, 0.25, 0.125, 0.125]), np.array([0.25, 0.5, 0.125, 0.125])
    divergence = against(tmp_path, np.log(reference))
    divergence.put(0, 3, np.tile(np.log(ours).astype(np.float32) + 7, (2, 1)))  # a distribution all the same
    np.testing.assert_allclose(divergence.kl[0], 0.25 * np.log(2), atol=1e-5)
    assert np.isnan(divergence.kl[1]).all()


def test_a_model_is_not_far_from_itself(tmp_path):
    logits = np.random.default_rng(0).normal(0, 4, 4).astype(np.float32)
    divergence = against(tmp_path, logits)
    divergence.put(0, 3, np.tile(logits, (2, 1)))
    np.testing.assert_allclose(divergence.kl[0], 0, atol=1e-5)  # the steps of the file
    assert divergence.same_top[0].all()


def test_the_log_probabilities_are_those_of_the_tokens_that_came_next(tmp_path):
    shares = np.array([0.4, 0.3, 0.2, 0.1])
    divergence = against(tmp_path, np.log(shares))
    divergence.put(0, 0, np.tile(np.log(shares[::-1]).astype(np.float32), (5, 1)))  # all but the last position
    np.testing.assert_allclose(divergence.reference_logprobs[0], np.log(shares[[1, 0]]), atol=2e-4)
    np.testing.assert_allclose(divergence.logprobs[0], np.log(shares[::-1][[1, 0]]), atol=1e-6)


def test_positions_agree_where_the_same_token_is_likeliest(tmp_path):
    divergence = against(tmp_path, [0, 3, 0, 0])
    divergence.put(1, 3, np.float32([[0, 9, 1, 2], [0, 1, 0, 2]]))
    assert divergence.same_top.tolist() == [[False, False], [True, False]]


def test_what_the_reference_finds_all_but_impossible_does_not_count(tmp_path):
    divergence = against(tmp_path, [0, 0, 0, -50])
    divergence.put(0, 3, np.float32([[0, 0, 0, -90], [0, 0, 0, -20]]))
    assert divergence.kl[0] == pytest.approx([0, 0], abs=1e-6)

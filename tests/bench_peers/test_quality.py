import pytest

from bench.peers.quality import parse_perplexity, sample_of

PRINTED = """====== KL divergence statistics ======
Mean    KLD:   0.012345 ±   0.000321
Maximum KLD:   0.500000
99.9%   KLD:   0.300000
99.0%   KLD:   0.100000
Same top p: 95.312 ± 0.400 %
"""


def test_the_figures_of_the_command_are_taken():
    measured = {"tokens": 996, "kl": {"mean": 0.5, "p99": 0.75}, "same_top": {"mean": 0.25}}
    assert sample_of(measured) == {"kl_mean": 0.5, "kl_p99": 0.75, "top1": 0.25, "positions": 996}


def test_the_figures_of_the_perplexity_tool_are_read():
    assert parse_perplexity(PRINTED) == {"kl_mean": 0.012345, "kl_p99": 0.1, "top1": pytest.approx(0.95312)}


def test_a_figure_that_the_tool_did_not_print_is_named():
    with pytest.raises(ValueError, match="no top1"):
        parse_perplexity(PRINTED.replace("Same top", "Other"))

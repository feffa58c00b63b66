import pytest

from bench.peers.stats import percentile, ratio, summarize


def test_a_summary_is_the_median_with_the_least_and_the_most():
    summary = summarize([300.0, 100.0, 200.0, 400.0])
    assert (summary.median, summary.least, summary.most, summary.rounds) == (250.0, 100.0, 400.0, 4)


def test_the_spread_is_a_share_of_the_median():
    assert summarize([90.0, 100.0, 110.0]).spread == pytest.approx(0.2)


def test_nothing_cannot_be_summarized():
    with pytest.raises(ValueError, match="no values"):
        summarize([])


@pytest.mark.parametrize(("percent", "value"), [(1, 1), (50, 50), (99, 99), (99.5, 100), (100, 100)])
def test_a_percentile_of_a_hundred_values_is_the_value_of_its_rank(percent, value):
    assert percentile(list(range(100, 0, -1)), percent) == value


def test_the_99th_percentile_of_few_values_is_the_largest():
    assert percentile([3.0, 9.0, 1.0], 99) == 9.0


@pytest.mark.parametrize("percent", [0, -1, 101])
def test_a_percentile_outside_0_to_100_is_refused(percent):
    with pytest.raises(ValueError, match=str(percent)):
        percentile([1.0], percent)


def test_the_ratio_is_to_the_best_of_the_others_where_more_is_better():
    assert ratio(1000.0, [500.0, 800.0], more_is_better=True) == 1.25


def test_the_ratio_is_to_the_best_of_the_others_where_less_is_better():
    assert ratio(2.0, [3.0, 60.0], more_is_better=False) == 1.5


def test_without_others_there_is_no_ratio():
    assert ratio(1.0, [], more_is_better=True) is None

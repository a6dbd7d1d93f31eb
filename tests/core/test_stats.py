import pytest

from kvbus.core.stats import Histogram, OutputStats, ProcessStats


def test_counters_are_not_shared():
    first, second = OutputStats(), OutputStats()
    first.dropped_batches["x"] += 1
    assert second.dropped_batches["x"] == 0


@pytest.mark.parametrize(
    ("value", "bucket"), [(0.0, 0), (0.1, 0), (0.100001, 1), (1.0, 1), (1.5, 2), (float("inf"), 2)]
)
def test_a_bucket_holds_values_up_to_and_including_its_bound(value, bucket):
    histogram = Histogram((0.1, 1.0))
    histogram.observe(value)
    assert histogram.counts == [int(i == bucket) for i in range(3)]


def test_a_copy_of_a_histogram_stays_as_it_is():
    histogram = Histogram((0.1, 1.0))
    histogram.observe(0.5, 3)
    copied = histogram.copy()
    histogram.observe(2.0)
    assert (copied.bounds, copied.counts, copied.total) == ((0.1, 1.0), [0, 3, 0], 1.5)


def test_a_histogram_adds_up():
    histogram = Histogram((0.1, 1.0))
    for value in (0.25, 0.5, 2.0):
        histogram.observe(value)
    assert histogram.total == 2.75
    assert sum(histogram.counts) == 3


def test_the_bounds_of_the_process_rise():
    for histogram in (ProcessStats().relay_latency, ProcessStats().loop_lag):
        assert list(histogram.bounds) == sorted(set(histogram.bounds))
        assert len(histogram.counts) == len(histogram.bounds) + 1

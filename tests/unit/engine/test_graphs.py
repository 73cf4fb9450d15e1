"""The sizes that graphs are captured for: enough for what runs, few in number, never past the limit."""

import pytest

from hf_sparsekv.engine.graphs import batch_bucket, length_bucket


@pytest.mark.parametrize(
    ("count", "bucket"), [(1, 1), (2, 2), (3, 4), (4, 4), (5, 8), (8, 8), (9, 16), (16, 16), (17, 24), (250, 256)]
)
def test_batches_round_up_to_powers_of_two_and_then_to_eights(count, bucket):
    assert batch_bucket(count, 256) == bucket


def test_every_batch_has_a_graph_that_holds_it():
    for limit in (1, 3, 8, 10, 64, 257):
        buckets = [batch_bucket(count, limit) for count in range(1, limit + 1)]
        assert all(count <= bucket <= limit for count, bucket in enumerate(buckets, start=1))
        assert buckets == sorted(buckets)
        assert len(set(buckets)) <= 4 + limit // 8 + 1


@pytest.mark.parametrize(
    ("length", "bucket"), [(1, 1024), (1024, 1024), (1025, 2048), (2048, 2048), (4097, 8192), (9000, 10_000)]
)
def test_lengths_round_up_to_powers_of_two_from_the_shortest_on(length, bucket):
    assert length_bucket(length, 10_000) == bucket


def test_every_length_has_a_bound_that_holds_it():
    for limit in (1, 100, 1024, 5000):
        for length in range(1, limit + 1):
            assert length <= length_bucket(length, limit) <= limit

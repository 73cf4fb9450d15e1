"""The sizes that graphs are captured for: enough for what runs, few in number, never past the limit; whose they are."""

import gc
import weakref
from types import SimpleNamespace

import pytest
import torch

from hf_sparsekv.cache.pages import PagePool
from hf_sparsekv.engine.graphs import DecodeGraphs, _Captured, batch_bucket, length_bucket
from hf_sparsekv.engine.group import Group


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


# --- whose graphs they are ----------------------------------------------------------------------------------------


class Graph:
    """Stands for a captured graph, which needs a GPU."""

    def replay(self):
        pass


@pytest.fixture
def graphs(monkeypatch):
    monkeypatch.setattr(torch.cuda, "Stream", lambda device: None)
    monkeypatch.setattr(torch.cuda, "graph_pool_handle", lambda: None)
    monkeypatch.setattr(torch.cuda, "synchronize", lambda device: None)
    captured = []

    def capture(self, parts, groups):
        captured.append(groups)
        return _Captured(Graph(), [], groups, None)

    monkeypatch.setattr(DecodeGraphs, "_capture", capture)
    graphs = DecodeGraphs(PagePool(2, 1, 4, 8, torch.float32, torch.device("cpu")), 1, lambda step, groups: [])
    graphs.captured = captured
    return graphs


def group_of():
    return Group(SimpleNamespace(num_rows=4, max_length=100), None)


def run(graphs, *groups):
    decode = [SimpleNamespace(rows=group.rows, count=1, max_length=9) for group in groups]
    parts = [SimpleNamespace(group=group) for group in groups]
    graphs.run(SimpleNamespace(step=SimpleNamespace(decode=decode), groups=parts))


def test_a_graph_is_captured_once_for_the_same_groups(graphs):
    one, other = group_of(), group_of()
    for groups in ([one], [other], [one, other], [one], [other], [one, other]):
        run(graphs, *groups)
    assert graphs.captured == [[one], [other], [one, other]]


def test_the_graphs_of_a_group_that_is_dropped_go_and_the_others_stay(graphs):
    one, other = group_of(), group_of()
    for groups in ([one], [other], [one, other]):
        run(graphs, *groups)
    graphs.forget(other)
    graphs.captured.clear()
    for groups in ([one], [other], [one, other]):
        run(graphs, *groups)
    assert graphs.captured == [[other], [one, other]]


def test_no_group_gets_the_graph_of_one_that_was_dropped_though_it_may_get_its_address(graphs):
    for _ in range(50):
        group = group_of()
        graphs.captured.clear()
        run(graphs, group)
        assert graphs.captured == [[group]]
        graphs.captured.clear()
        gone = weakref.ref(group)
        graphs.forget(group)
        del group
        gc.collect()
        assert gone() is None


def test_a_graph_keeps_its_group_until_it_is_forgotten(graphs):
    group = group_of()
    run(graphs, group)
    graphs.captured.clear()
    kept = weakref.ref(group)
    del group
    gc.collect()
    assert kept() is not None

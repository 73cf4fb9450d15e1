"""Fixtures of tests that run a model with the attention registered."""

from collections.abc import Iterator

import pytest

import hf_sparsekv as skv


@pytest.fixture
def registered() -> Iterator[None]:
    """`skv.register()` for the time of a test."""
    skv.register()
    yield
    skv.unregister()


@pytest.fixture
def model(tiny_llama):
    """A tiny Llama of three layers that uses it."""
    return tiny_llama(num_layers=3, attn_implementation="sparsekv")

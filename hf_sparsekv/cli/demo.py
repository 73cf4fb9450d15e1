"""`hf-sparsekv demo`: a long document that every Python has, one question, both caches side by side."""

from rich.console import Console


def demo() -> None:
    """Answer a question about a long document with the dense and the sparse cache, side by side."""
    Console().print("x")

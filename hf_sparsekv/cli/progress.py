"""What a waiting user sees: a bar while a prompt is read, then the text as it comes, and the times of both."""

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn
from torch import Tensor
from transformers import Cache, DynamicCache, PreTrainedTokenizerBase, TextStreamer

from hf_sparsekv import SparseKVCache

LayerDone = Callable[[int], None]


class WatchedCache(Cache):
    """Tells how far the forward pass is; to be mixed with a cache."""

    on_layer: LayerDone | None = None

    def update(self, key_states: Tensor, value_states: Tensor, layer_idx: int, *args: Any, **kwargs: Any) -> Any:
        """As the cache that it is mixed with, and tell which layer was reached."""
        if self.on_layer is not None:
            self.on_layer(layer_idx)
        return super().update(key_states, value_states, layer_idx, *args, **kwargs)


class WatchedSparseKVCache(WatchedCache, SparseKVCache):
    """The sparse cache."""


class WatchedDynamicCache(WatchedCache, DynamicCache):
    """The dense cache."""

    @property
    def nbytes(self) -> int:
        """Bytes of all keys and values."""
        tensors = [getattr(layer, name) for layer in self.layers for name in ("keys", "values")]
        return sum(t.nbytes for t in tensors if t is not None)


class TimedStreamer(TextStreamer):
    """Prints tokens as they come and notes when: the first call brings the prompt, the second the first token."""

    def __init__(self, tokenizer: PreTrainedTokenizerBase, *, on_first: Callable[[], None], is_silent: bool) -> None:
        """Print to stdout unless silent; `on_first` is called before the first token is shown."""
        super().__init__(tokenizer, skip_prompt=True, skip_special_tokens=True)
        self.times: list[float] = []
        self._on_first = on_first
        self._is_silent = is_silent

    def put(self, value: Tensor) -> None:
        """Take the prompt or the next token."""
        self.times.append(time.perf_counter())
        if len(self.times) == 2:
            self._on_first()
        super().put(value)

    def on_finalized_text(self, text: str, stream_end: bool = False) -> None:
        """Show a piece of text."""
        if not self._is_silent:
            print(text, end="\n" if stream_end else "", flush=True)

    @property
    def prefill_seconds(self) -> float:
        """From the prompt to the first token."""
        return self.times[1] - self.times[0] if len(self.times) > 1 else 0.0

    @property
    def decode_tokens_per_second(self) -> float | None:
        """Tokens after the first, per second; None when there are none."""
        count = len(self.times) - 2
        return count / (self.times[-1] - self.times[1]) if count > 0 else None


@contextmanager
def status(console: Console, text: str) -> Iterator[Callable[[str], None]]:
    """A line that tells what is waited for; yields what changes it. Without a terminal nothing is shown."""
    if not console.is_terminal:
        yield lambda _: None
        return
    with console.status(text) as shown:
        yield lambda stage: shown.update(escape(stage))


@contextmanager
def prefill_bar(cache: WatchedCache, label: str, num_layers: int, console: Console) -> Iterator[Callable[[], None]]:
    """A progress bar over the layers of the prefill; yields what takes it away at the first token."""
    columns = (TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn(), TimeRemainingColumn())
    # Without a terminal, rich would leave an empty line where the bar was.
    bar = Progress(*columns, console=console, transient=True, disable=not console.is_terminal)
    task = bar.add_task(label, total=num_layers)

    def finish() -> None:
        cache.on_layer = None
        bar.stop()

    cache.on_layer = lambda layer_idx: bar.update(task, completed=layer_idx)
    bar.start()
    try:
        yield finish
    finally:
        finish()

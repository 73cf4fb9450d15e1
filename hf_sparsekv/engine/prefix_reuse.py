"""PrefixReuse: what requests take from the prefix cache, and what they leave there.

A request that begins with a known prefix has that part of its prompt computed already. Its full layers share the
blocks for as long as it lives; its window layers read them until the prompt's end, select, and let go. A prompt enters
the cache when it has been computed as a whole, in the step after: requests that begin in one step share nothing.

Only keys and values of dense attention enter: those of prompts, and of outputs where every layer is full. What a
window layer computed of its selection would be an approximation in every request that found it. So a request whose
prefill is bounded, and selects while its prompt is read, neither leaves nor takes anything.

Nor is a prompt left that is computed in chunks while a window layer keeps all of it: decoding will write over the only
place that its keys have there. A second one from the first chunk on would be held for several steps, so that what
might be shared later would keep out, or preempt, requests that share nothing.
"""

from collections.abc import Iterable, Iterator, Sequence

from hf_sparsekv.engine.block_pool import BlockPool
from hf_sparsekv.engine.prefix_cache import NO_PREFIX, Prefix, PrefixCache
from hf_sparsekv.engine.request import Request
from hf_sparsekv.engine.tables import RequestTables


class PrefixReuse:
    """One scheduler's dealings with its pool's prefix cache; with a plain `BlockPool` there is none."""

    def __init__(self, pool: BlockPool) -> None:
        self._cache = pool if isinstance(pool, PrefixCache) else None
        # Of the request that asked last: the queue's head asks again in every step until there is room.
        self._head: Request | None = None
        self._found = NO_PREFIX
        self._shared: tuple[int, tuple[int, int]] | None = None
        """What `num_shared` said of `_found`, after the count of holder changes."""

    def offers(self, request: Request) -> Iterator[Prefix]:
        """Prefixes that a request may begin with, the best first; the last one is `NO_PREFIX`."""
        if self._cache is not None and _is_exact(request) and request.num_query_rows is not None:
            most = request.prompt_length - max(1, request.num_query_rows)
            if request is not self._head:
                self._head, self._found = request, NO_PREFIX
            found = self._cache.find(request.prompt_ids, most, self._found)
            if found is not self._found:
                self._found, self._shared = found, None
            if found:
                yield found
        yield NO_PREFIX

    def num_shared(self, tables: RequestTables, prefix: Prefix) -> tuple[int, int]:
        """Blocks of a prefix that others hold, so that they take none of what is free: of all layers, of full ones."""
        if self._cache is None or not prefix:
            return 0, 0
        changes = self._cache.num_holder_changes
        if prefix is self._found and self._shared is not None and self._shared[0] == changes:
            return self._shared[1]
        in_windows = self._cache.num_held(prefix.blocks[:, tables.window_layers])
        in_full = self._cache.num_held(prefix.blocks[:, tables.full_layers])
        shared = in_windows + in_full, in_full
        if prefix is self._found:
            self._shared = changes, shared
        return shared

    def begin(self, request: Request, tables: RequestTables, prefix: Prefix) -> None:
        """Give a request that is being admitted its prefix; its tables are to be filled up after."""
        self.forget(request)
        if self._cache is None or not prefix:
            return
        tables.begin_with(self._cache, prefix)
        request.num_computed = len(prefix) * self._cache.block_size
        if request.num_preemptions == 0:  # later it finds its own
            request.num_cached = request.num_computed

    def forget(self, request: Request) -> None:
        """Let go of what is remembered of a request that asks no more."""
        if request is self._head:
            self._head, self._found, self._shared = None, NO_PREFIX, None

    def stage_to_store(self, whole: Iterable[Request]) -> None:
        """Give prompts that are computed in one piece room for all their keys, as long as there is room to spare.

        It is theirs for this step alone: what is admitted next finds it free again, as part of the cache.
        """
        if self._cache is None:
            return
        for request in filter(_is_exact, whole):
            tables = request.tables
            assert tables is not None
            count = request.prompt_length // self._cache.block_size
            if count == 0 or not 0 < tables.missing_to_store() <= self._cache.num_free:
                continue
            if len(self._cache.find(request.prompt_ids, request.prompt_length)) < count:
                tables.stage_to_store(self._cache)

    def store_prompt(self, request: Request) -> None:
        """Remember a prompt whose last chunk was launched; it still has its staging."""
        self._store(request, request.prompt_ids)

    def store_conversation(self, request: Request) -> None:
        """Remember prompt and output of a request that has ended well, if all its layers are full.

        The last output was sampled; whether it was fed is not known.
        """
        if self._cache is not None and request.tables is not None and not request.tables.window_layers:
            self._store(request, request.prompt_ids + request.output_ids[:-1])

    def clear(self) -> None:
        """Forget every prefix."""
        if self._cache is not None:
            self._cache.clear()

    def _store(self, request: Request, tokens: Sequence[int]) -> None:
        if self._cache is None or request.tables is None or not _is_exact(request):
            return
        in_order = request.tables.in_order()
        if in_order is not None:
            request.tables.prefix = self._cache.insert(tokens, in_order, request.tables.prefix)


def _is_exact(request: Request) -> bool:
    """Whether the keys and values of a prompt are the dense model's, in every layer."""
    return request.plan.chunk_tokens is None

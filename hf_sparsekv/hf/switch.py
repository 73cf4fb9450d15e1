"""The attention that a model has, given to it for as long as somebody generates, from any number of threads."""

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from transformers import PreTrainedModel

from hf_sparsekv.hf.models import text_config
from hf_sparsekv.hf.register import ATTENTION_NAME, is_registered, register, unregister


@dataclass
class _Lent:
    """What one model is to get back when its last user leaves."""

    before: str
    num_users: int = 0


class _Switch:
    """Counts the users of each model: the first one switches its attention, the last one switches it back."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._lent: dict[int, _Lent] = {}
        """By the identity of the model's configuration, which says what attention is in force."""
        self._was_registered = False

    def take(self, model: PreTrainedModel) -> int:
        """Returns what `give_back` needs to know."""
        config = text_config(model.config)
        with self._lock:
            if not self._lent:
                self._was_registered = is_registered()
            register()
            lent = self._lent.get(id(config), _Lent(config._attn_implementation))
            if config._attn_implementation != ATTENTION_NAME:
                model.set_attn_implementation(ATTENTION_NAME)
            lent.num_users += 1
            self._lent[id(config)] = lent
        return id(config)

    def give_back(self, model: PreTrainedModel, key: int) -> None:
        with self._lock:
            lent = self._lent[key]
            lent.num_users -= 1
            if lent.num_users:
                return
            del self._lent[key]
            if lent.before != ATTENTION_NAME:
                model.set_attn_implementation(lent.before)
            if not self._lent and not self._was_registered:
                unregister()


_switch = _Switch()


@contextmanager
def sparse_attention(model: PreTrainedModel) -> Iterator[None]:
    """Give a model the attention implementation "sparsekv", and its own back when its last user is done.

    Several threads may use one model: the attention of a model is one setting for all of them.
    """
    key = _switch.take(model)
    try:
        yield
    finally:
        _switch.give_back(model, key)

"""What tests of streams share: outputs made by hand, and waiting that ends."""

import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from hf_sparsekv.engine.output import RequestOutput
from hf_sparsekv.engine.request import FinishReason

WAIT_S = 30.0


def output_of(
    name: str, tokens: tuple[int, ...], new: tuple[int, ...], reason: FinishReason | None = None
) -> RequestOutput:
    """An output with the given tokens, whose text is their digits."""
    return RequestOutput(
        request_id=name,
        prompt_ids=(),
        token_ids=tokens,
        new_token_ids=new,
        text="".join(map(str, tokens)),
        new_text="".join(map(str, new)),
        finish_reason=reason,
        error=None,
        logprobs=None,
        report=None,
    )


def tokens_of(outputs: Iterable[RequestOutput]) -> tuple[int, ...]:
    """All new tokens in order, after checking that they are what the outputs as a whole say."""
    outputs = list(outputs)
    tokens = tuple(token for output in outputs for token in output.new_token_ids)
    assert tokens == outputs[-1].token_ids
    assert [output.is_finished for output in outputs] == [False] * (len(outputs) - 1) + [True]
    return tokens


def eventually(is_true: Callable[[], bool]) -> None:
    """Return once it is; fail after `WAIT_S` seconds."""
    deadline = time.monotonic() + WAIT_S
    while not is_true():
        assert time.monotonic() < deadline, "it never happened"
        time.sleep(0.002)


def in_threads(*functions: Callable[[], Any]) -> list[Any]:
    """Run them at once; their results."""
    with ThreadPoolExecutor(len(functions)) as pool:
        futures = [pool.submit(function) for function in functions]
        return [future.result(WAIT_S) for future in futures]

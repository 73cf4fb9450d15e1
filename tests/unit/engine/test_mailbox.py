"""A mailbox holds at most one output, loses no token, and wakes its consumer whenever there is something to take."""

import pytest

from hf_sparsekv.engine.mailbox import Mailbox, merged
from hf_sparsekv.engine.request import FinishReason
from hf_sparsekv.testing.streams import output_of


def test_a_mailbox_wakes_once_until_it_is_emptied():
    woken = []
    box = Mailbox(lambda: woken.append(1))
    assert box.take() is None
    box.put(output_of("a", (1,), (1,)))
    box.put(output_of("a", (1, 2), (2,)))
    assert len(woken) == 1
    assert box.take().new_token_ids == (1, 2)
    box.put(output_of("a", (1, 2, 3), (3,)))
    box.fail(ValueError("late"))
    woken.clear()  # as a consumer does that was woken for both
    assert box.take().new_token_ids == (3,)
    assert len(woken) == 1  # for the error, which comes after everything else
    with pytest.raises(ValueError, match="late"):
        box.take()


def test_merged_outputs_keep_the_text_and_the_end():
    both = merged(output_of("a", (1,), (1,)), output_of("a", (1, 2), (2,), FinishReason.STOP))
    assert (both.new_text, both.text, both.finish_reason) == ("12", "12", FinishReason.STOP)

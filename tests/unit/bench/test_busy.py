"""Before decode steps are profiled, as many requests decode as can."""

from types import SimpleNamespace

import pytest

from hf_sparsekv.bench.busy import SETTLE_STEPS, _ramp_up


def stepper(starts, places, output_len=1000):
    """A `step` whose requests begin at these steps, at most `places` of them; the number of its calls."""
    calls, tokens = [0], {}

    def step():
        calls[0] += 1
        for name, start in enumerate(starts[:places]):
            if calls[0] > start:
                tokens[name] = tokens.get(name, 0) + 1
        return [SimpleNamespace(request_id=name, is_finished=count == output_len) for name, count in tokens.items()]

    return step, calls


def test_it_waits_for_every_request_and_a_few_steps_more():
    step, calls = stepper(starts=[1, 2, 5], places=3)
    assert _ramp_up(step, 3, max_idle=8) == (3, False)
    assert calls[0] == 6 + SETTLE_STEPS


def test_it_goes_on_without_those_that_the_memory_keeps_out():
    step, calls = stepper(starts=[1, 2, 3, 4], places=2)
    assert _ramp_up(step, 4, max_idle=8) == (2, False)
    assert calls[0] == 3 + 8 + SETTLE_STEPS


@pytest.mark.parametrize("output_len", [2, 4])
def test_it_says_so_when_a_request_has_ended_already(output_len):
    step, _ = stepper(starts=[1, 2], places=2, output_len=output_len)
    assert _ramp_up(step, 2, max_idle=8)[1]

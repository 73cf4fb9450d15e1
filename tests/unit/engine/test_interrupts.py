"""Ctrl-C waits for the end of what must not be cut short; whoever else handles the signal is left alone."""

import signal
import threading

import pytest

from hf_sparsekv.engine.interrupts import HeldInterrupts, holding_interrupts, one_step
from hf_sparsekv.errors import RequestError


def interrupt():
    signal.raise_signal(signal.SIGINT)


def test_a_first_interrupt_is_raised_at_the_end_and_a_second_one_at_once():
    done = []

    @holding_interrupts
    def work(times):
        for i in range(times):
            interrupt()
            done.append(i)

    for times, expected in ((1, [0]), (2, [0])):
        done.clear()
        with pytest.raises(KeyboardInterrupt):
            work(times)
        assert done == expected
        assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_inside_another_one_the_outer_one_waits():
    done = []

    @holding_interrupts
    def outer():
        holding_interrupts(interrupt)()
        done.append("inner")

    with pytest.raises(KeyboardInterrupt):
        outer()
    assert done == ["inner"]


def test_it_can_be_asked_for_earlier_and_then_comes_once():
    with HeldInterrupts() as held:
        held.raise_noted()
        interrupt()
        with pytest.raises(KeyboardInterrupt):
            held.raise_noted()


def test_an_interrupt_is_not_lost_behind_an_error():
    @holding_interrupts
    def fail():
        interrupt()
        raise ValueError("that")

    with pytest.raises(KeyboardInterrupt) as caught:
        fail()
    assert isinstance(caught.value.__context__, ValueError)


def test_a_handler_of_the_callers_and_other_threads_are_left_alone():
    noted = []
    before = signal.signal(signal.SIGINT, lambda number, frame: noted.append(number))
    try:
        holding_interrupts(interrupt)()
    finally:
        signal.signal(signal.SIGINT, before)
    assert noted == [signal.SIGINT]
    thread = threading.Thread(target=holding_interrupts(lambda: noted.append("thread")))
    thread.start()
    thread.join()
    assert noted == [signal.SIGINT, "thread"]


def test_a_step_that_is_refused_or_fails_leaves_the_lock_as_it_was():
    lock = threading.Lock()
    with one_step(lock), pytest.raises(RequestError, match="another thread"), one_step(lock):
        pass
    with pytest.raises(ValueError, match="that"), one_step(lock):
        raise ValueError("that")
    assert not lock.locked()
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler

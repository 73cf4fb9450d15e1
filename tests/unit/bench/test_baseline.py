"""The closed loop of `generate_batch`: who waited, and since when."""

from types import SimpleNamespace

from hf_sparsekv.bench.baseline import closed_loop_times


def output(left_queue, *timestamps, created=1.0):
    return SimpleNamespace(
        prompt_ids=[1, 2], created_time=created, lifespan=(left_queue, -1), timestamps=list(timestamps), error=None
    )


def test_a_request_is_handed_in_when_an_earlier_end_makes_room():
    # Two at a time; the third to leave the queue takes the place freed at 4, the fourth that freed at 5.
    outputs = [output(5.5, 7.0, 8.0), output(1.0, 2.0, 4.0), output(4.5, 6.0, 9.0), output(1.0, 3.0, 5.0)]
    times = closed_loop_times(outputs, concurrency=2)
    assert [(t.handed_in_s, t.token_s) for t in times] == [
        (1.0, [2.0, 4.0]),
        (1.0, [3.0, 5.0]),
        (4.0, [6.0, 9.0]),
        (5.0, [7.0, 8.0]),
    ]


def test_nobody_is_handed_in_after_leaving_the_queue():
    failed = output(1.0, created=1.0)
    failed.error = "out of memory"
    times = closed_loop_times([failed, output(1.5, 2.0, 6.0), output(2.0, 3.0, 4.0)], concurrency=1)
    assert all(t.handed_in_s <= left for t, left in zip(times, (1.0, 1.5, 2.0), strict=True))
    assert times[0].error == "out of memory"
    assert times[0].token_s == []

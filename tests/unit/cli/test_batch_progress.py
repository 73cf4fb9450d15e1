"""Sizes that are given to a batch run, and what is shown of its progress."""

import pytest

from hf_sparsekv.cli.batch_progress import clock_time, describe, watch
from hf_sparsekv.cli.engine_options import parse_size
from hf_sparsekv.engine.batch_run import BatchProgress
from hf_sparsekv.errors import ConfigError


def test_sizes():
    sizes = {"5GB": 5 * 10**9, "5GiB": 5 * 2**30, "1.5g": 15 * 10**8, "4096": 4096, "8 MB": 8 * 10**6, "2Ki": 2048}
    assert {text: parse_size("--kv-memory", text) for text in sizes} == sizes
    for text in ("", "GB", "-1", "5 XB", "5i", "0", "1e9"):
        with pytest.raises(ConfigError, match="--kv-memory"):
            parse_size("--kv-memory", text)


class Terminal:
    """A console that is no terminal and remembers."""

    is_terminal = False

    def __init__(self):
        self.lines = []

    def print(self, text, **_):
        self.lines.append(text)


def test_without_a_terminal_there_is_a_line_every_ten_seconds(monkeypatch):
    now = [0.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    console = Terminal()
    with watch(console, 100) as on_progress:
        for second in range(35):
            now[0] = float(second)
            on_progress(BatchProgress(100, num_done=second))
    assert [line.split(", ")[1] for line in console.lines] == ["10 done", "20 done", "30 done"]


def test_progress_tells_rate_and_time_left():
    progress = BatchProgress(
        1000, num_done=3, num_skipped=5, num_output_tokens=600, bytes_done=500, bytes_skipped=300, num_live=2
    )
    progress.start_s -= 40.0  # 200 bytes took 40 s, 500 are left
    assert progress.eta_s == pytest.approx(100, rel=0.01)
    assert describe(progress) == "50%, 3 done, 2 in the engine, 5 skipped, 15 tokens/s, ETA 0:01:40"
    assert BatchProgress(0).fraction == 1.0
    assert BatchProgress(10).eta_s is None
    assert clock_time(3725.4) == "1:02:05"

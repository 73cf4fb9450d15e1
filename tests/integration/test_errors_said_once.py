"""What ends all processes of a launch is said by one of them, what ends one of them by that one."""

import os
import signal
import subprocess
import sys
from datetime import timedelta

import pytest
import torch.distributed as dist

from hf_sparsekv.cli import app
from hf_sparsekv.parallel.once import may_say


@pytest.fixture
def launched(monkeypatch):
    """The environment of one of two processes that torchrun has started, and the store that its agent holds."""
    store = dist.TCPStore("127.0.0.1", 0, is_master=True, timeout=timedelta(seconds=20), wait_for_workers=False)
    values = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": store.port, "WORLD_SIZE": 2, "RANK": 1, "LOCAL_RANK": 1}
    for name, value in (values | {"TORCHELASTIC_USE_AGENT_STORE": True}).items():
        monkeypatch.setenv(name, str(value))
    return store


def test_each_error_is_said_once_and_what_follows_from_one_is_not_said(launched, monkeypatch):
    assert may_say("lost", is_consequence=True)  # nobody has said why
    assert [may_say(message) for message in ("a", "a", "b", "a")] == [True, False, True, False]
    assert not may_say("lost otherwise", is_consequence=True)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")  # the processes are others
    assert may_say("a")


@pytest.mark.parametrize("name", ["TORCHELASTIC_USE_AGENT_STORE", "WORLD_SIZE"])
def test_without_anybody_to_ask_everything_is_said(launched, monkeypatch, name):
    monkeypatch.delenv(name)
    assert may_say("a")
    assert may_say("a")


def test_a_store_that_is_gone_keeps_nobody_from_saying(monkeypatch, launched):
    monkeypatch.setattr("hf_sparsekv.parallel.once._CONNECT_S", 0.2)
    monkeypatch.setenv("MASTER_PORT", "1")
    assert may_say("a")


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_to_all_processes_is_said_by_the_first(monkeypatch, capsys, rank):
    monkeypatch.setenv("RANK", str(rank))
    with pytest.raises(SystemExit) as ended:
        app._end_by(signal.SIGTERM)
    assert ended.value.code == 128 + signal.SIGTERM
    assert capsys.readouterr().err == ("" if rank else "terminated\n")


def test_a_wrong_option_is_one_line_of_all_processes(launched, tmp_path):
    command = [sys.executable, "-m", "hf_sparsekv", "run", str(tmp_path / "absent.jsonl"), "-o", "out.jsonl"]
    environments = [os.environ | {"RANK": str(rank), "LOCAL_RANK": str(rank)} for rank in range(2)]
    started = [
        subprocess.Popen(command, cwd=tmp_path, env=environment, stderr=subprocess.PIPE, text=True)
        for environment in environments
    ]
    said = [process.communicate(timeout=100)[1] for process in started]
    assert [process.returncode for process in started] == [2, 2]
    assert sum(text.count("error: no such file") for text in said) == 1

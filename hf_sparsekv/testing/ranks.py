"""Several processes on one machine, as torchrun starts them, for tests on the CPU: a function of a file on every rank.

They come from a fork server that has imported everything, so each starts in a moment; none outlives the call.
"""

import multiprocessing
import os
import runpy
import socket
import time
import traceback
from collections.abc import Callable, Sequence
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

import torch

PRELOADED = ("hf_sparsekv.cli.run", "hf_sparsekv.parallel.group", "hf_sparsekv.hf.sharding", "torch.distributed.tensor")


def free_port() -> int:
    """A port that nobody listened on a moment ago."""
    with socket.socket() as listener:
        listener.bind(("127.0.0.1", 0))
        port: int = listener.getsockname()[1]
    return port


def rank_environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    """What torchrun tells a process."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
    }


def start_rank(environment: dict[str, str], work: Callable[..., object], *arguments: Any) -> Any:
    """A process that runs `work(*arguments)`, which is importable there; it is started already."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(list(PRELOADED))
    process = context.Process(target=_with_environment, args=(environment, work, arguments))
    process.start()
    return process


def run_ranks(program: Path, name: str, world_size: int, *arguments: Any, timeout_s: float = 120.0) -> list[Any]:
    """What a function returns on every rank.

    Args:
        program: the Python file that defines it.
        name: of the function.
        world_size: processes.
        arguments: for it, picklable, as is what it returns.
        timeout_s: of the whole; then, or when one rank fails, all are killed.
    Raises:
        AssertionError: a rank failed, with its traceback, or did not end in time.
    """
    port, deadline = free_port(), time.monotonic() + timeout_s
    pipes = [multiprocessing.Pipe(duplex=False) for _ in range(world_size)]
    processes = [
        start_rank(rank_environment(rank, world_size, port), _report, program, name, arguments, pipe[1])
        for rank, pipe in enumerate(pipes)
    ]
    try:
        return _results([pipe[0] for pipe in pipes], processes, deadline)
    finally:
        for process in processes:
            process.kill()
            process.join()


def _results(connections: list[Connection], processes: list[Any], deadline: float) -> list[Any]:
    results: dict[int, Any] = {}
    while len(results) < len(processes):
        for rank, (connection, process) in enumerate(zip(connections, processes, strict=True)):
            if rank in results:
                continue
            is_dead = not process.is_alive()  # first: what it sent before its end is then in the pipe
            if connection.poll(0.05):
                has_failed, result = connection.recv()
                assert not has_failed, f"rank {rank}:\n{result}"
                results[rank] = result
            else:
                assert not is_dead, f"rank {rank} died with exit code {process.exitcode}"
        assert time.monotonic() < deadline, f"ranks {sorted(set(range(len(processes))) - set(results))} do not end"
    return [results[rank] for rank in range(len(processes))]


def _with_environment(environment: dict[str, str], work: Callable[..., object], arguments: tuple[Any, ...]) -> None:
    os.environ.update(environment)
    torch.set_num_threads(1)
    work(*arguments)


def _report(program: Path, name: str, arguments: tuple[Any, ...], connection: Connection) -> None:
    try:
        result = (False, runpy.run_path(str(program))[name](*arguments))
    except BaseException:  # noqa: BLE001 (told to the test)
        result = (True, traceback.format_exc())
    connection.send(result)


def exit_codes(processes: Sequence[BaseProcess], wait_s: float = 120.0) -> list[int | None]:
    """Of all, when they have ended; None for what still runs after so many seconds."""
    deadline = time.monotonic() + wait_s
    for process in processes:
        process.join(max(0.0, deadline - time.monotonic()))
    return [process.exitcode for process in processes]

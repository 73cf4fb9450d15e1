"""The machine a figure was taken on: versions, device, commit, and what the GPU's memory held."""

import os
import platform
import shlex
import subprocess
import sys
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
import transformers

import hf_sparsekv
from hf_sparsekv.version import __version__


def provenance(device: torch.device) -> dict[str, Any]:
    """Where a figure comes from: date, command, commit, versions and device."""
    return {
        "date": datetime.now(UTC).isoformat(timespec="seconds"),
        "command": shlex.join([Path(sys.argv[0]).name, *sys.argv[1:]]),
        "commit": commit(),
        "versions": {
            "hf_sparsekv": __version__,
            "torch": torch.__version__,
            "cuda": torch.version.cuda,
            "transformers": transformers.__version__,
            "python": platform.python_version(),
        },
        "device": device_facts(device),
    }


def commit() -> str | None:
    """The commit of the sources, -dirty where files differ; of an archive, what it was made of.

    None for an installed copy.
    """
    folder = Path(hf_sparsekv.__file__).parent
    # An installed copy may lie in a virtual environment inside some other repository: only tracked sources count.
    if _git(folder, "ls-files", "--error-unmatch", "version.py") is None:
        return _archived_commit(folder.parent / ".git_archival.txt")
    return _git(folder, "describe", "--always", "--dirty", "--tags")


def device_facts(device: torch.device) -> dict[str, Any]:
    """Name and size of a device."""
    if device.type == "cuda":
        properties = torch.cuda.get_device_properties(device)
        return {"type": "cuda", "name": properties.name, "memory_bytes": properties.total_memory}
    return {
        "type": device.type,
        "name": platform.processor() or platform.machine(),
        "cores": os.cpu_count(),
        "threads": torch.get_num_threads(),
    }


class MemoryWatch:
    """GPU memory of one engine: what its cache took, and the peak while it ran. On a CPU every figure is None."""

    def __init__(self, device: torch.device) -> None:
        """Before the engine is made."""
        self._device = device
        self._before = self._allocated()
        self._cache: int | None = None

    def engine_made(self) -> None:
        """Take what the engine reserved, pool and bookkeeping, as its cache."""
        after = self._allocated()
        self._cache = None if after is None or self._before is None else after - self._before

    def begin(self) -> None:
        """Forget the peaks so far."""
        if self._device.type == "cuda":
            torch.cuda.reset_peak_memory_stats(self._device)

    def figures(self, *, kv_memory_bytes: int | None, memory_fraction: float, planned: int | None) -> dict[str, Any]:
        """Bytes since `begin`, against the budget that was stated.

        Args:
            kv_memory_bytes: the budget of the cache alone, or None.
            memory_fraction: the budget of everything on the GPU, when there is no other.
            planned: bytes of the cache by the engine's own plan.
        """
        figures: dict[str, Any] = {
            "cache_planned_bytes": planned,
            "cache_measured_bytes": self._cache,
            "peak_allocated_bytes": None,
            "peak_reserved_bytes": None,
            "device_used_bytes": None,
        }
        budget, used = kv_memory_bytes, planned if self._cache is None else self._cache
        if self._device.type == "cuda":
            free, total = torch.cuda.mem_get_info(self._device)
            figures["peak_allocated_bytes"] = torch.cuda.max_memory_allocated(self._device)
            figures["peak_reserved_bytes"] = torch.cuda.max_memory_reserved(self._device)
            figures["device_used_bytes"] = total - free
            if kv_memory_bytes is None:
                # The allocator gives nothing back while an engine lives, so what is used now is the peak.
                budget, used = int(memory_fraction * total), total - free
        share = None if budget is None or used is None else used / budget
        return {**figures, "budget_bytes": budget, "budget_used_bytes": used, "budget_share": share}

    def _allocated(self) -> int | None:
        if self._device.type != "cuda":
            return None
        torch.cuda.synchronize(self._device)
        return torch.cuda.memory_allocated(self._device)


def _archived_commit(note: Path) -> str | None:
    """What `git archive` wrote into this file; None where it is not there, or was not written."""
    try:
        found = note.read_text(encoding="utf-8").strip()
    except OSError:
        return None
    return None if not found or found.startswith("$") else found


def _git(folder: Path, *arguments: str) -> str | None:
    try:
        done = subprocess.run(
            ["git", "-C", str(folder), *arguments], capture_output=True, text=True, check=True, timeout=10
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()

"""An output that several replicas write: a part for each while it runs, then one file in order.

Replicas share nothing but the folder. Each holds the lock of its own part; whoever comes or goes takes the output's
lock and moves what nobody writes to any more into the output: the parts of an earlier run, of a replica that has died,
and at the end its own. So the last one to end leaves a whole output, and after a kill the next run, of however many
replicas, does. A crash in the middle of that loses nothing: parts go when the output is on disk, and an id that is in
both is taken once.
"""

import os
import re
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack
from pathlib import Path

from filelock import Timeout

from hf_sparsekv.engine.batch_results import RESULT_FIELDS, ResultFile, lock_of, remove_with_lock, result_id, unwritable
from hf_sparsekv.errors import InputError

WAIT_S = 120.0
"""For another replica that is merging."""
POLL_S = 0.2


class PartFiles:
    """The parts of one output.

    Args:
        output: results of all, in the end.
        order: the place of each id in the output, asked for when there is something to merge; others come last.
        replica, num_replicas: which of how many this is.
        fields, first_field: of a result, see `ResultFile`.
        on_merged: told of each part that has moved into the output.
    """

    def __init__(
        self,
        output: Path,
        order: Callable[[], Mapping[str, int]],
        *,
        replica: int = 0,
        num_replicas: int = 1,
        fields: frozenset[str] = RESULT_FIELDS,
        first_field: str | None = "text",
        on_merged: Callable[[Path], object] = lambda part: None,
    ) -> None:
        self.output, self._order, self._on_merged = output, order, on_merged
        self._replica, self._num_replicas = replica, num_replicas
        self._fields, self._first_field = fields, first_field

    @property
    def own(self) -> Path:
        """This replica's part."""
        return self.own_of(self.output)

    def own_of(self, path: Path) -> Path:
        """This replica's part of another file."""
        return path.with_name(f"{path.name}.part-{self._replica}-of-{self._num_replicas}")

    def whole(self) -> ResultFile:
        """The output itself, to be opened: where there are other replicas, waits for one that has it."""
        return self._file(self.output, WAIT_S if self._num_replicas > 1 else 0.0)

    def part(self) -> ResultFile:
        """This replica's part, to be opened under the output's lock: nobody is turned away by one that merges."""
        return self._file(self.own)

    def merge_leftovers(self) -> None:
        """Take the output's lock, if there is anything to move, and do what `merge_into` does."""
        if parts_of(self.output):
            with self._file(self.output, WAIT_S) as merged:
                self.merge_into(merged)

    def wait_for_others(self) -> None:
        """Return when no other process writes to a part or merges."""
        while self._is_anyone_busy():
            time.sleep(POLL_S)

    def _is_anyone_busy(self) -> bool:
        try:
            with lock_of(self.output).acquire(timeout=0):
                return self.is_anyone_at_work()
        except Timeout:
            return True

    def merge_into(self, merged: ResultFile) -> None:
        """Move the parts that nobody writes to into the output, whose lock is held.

        Raises:
            InputError: a replica of a run with another number of them is at work, or a file cannot be read or written.
        """
        with ExitStack() as held:
            parts = []
            for path, num_replicas in parts_of(self.output).items():
                try:
                    held.enter_context(lock_of(path).acquire(timeout=0))
                except Timeout:
                    if num_replicas != self._num_replicas:
                        raise InputError(
                            f"{path} is being written by one of {num_replicas} replicas: wait for that run, or give "
                            "another -o"
                        ) from None
                    continue
                parts.append(path)
            if parts:
                try:
                    merged.done |= self._rewrite(merged, parts)
                except OSError as error:  # a folder of that name, a full disk
                    raise unwritable(Path(error.filename or self.output), error) from error
            for path in parts:
                remove_with_lock(path)
                self._on_merged(path)

    def is_anyone_at_work(self) -> bool:
        """Whether another process writes to a part; to be asked under the output's lock."""
        for path in parts_of(self.output):
            try:
                with lock_of(path).acquire(timeout=0):
                    pass
            except Timeout:
                return True
        return False

    def _file(self, path: Path, wait_s: float = 0.0) -> ResultFile:
        return ResultFile(path, fields=self._fields, first_field=self._first_field, wait_s=wait_s)

    def _rewrite(self, merged: ResultFile, parts: list[Path]) -> set[str]:
        """Write the output anew with the results of the parts, in order; the ids that it has then.

        Raises:
            InputError: a part holds something else, or the output cannot be written.
        """
        order = self._order()
        places: dict[str, tuple[int, int, Path, int, int]] = {}
        for path in (self.output, *parts):
            offset = 0
            with path.open("rb") as file:
                for line in file:
                    if line.endswith(b"\n"):  # else torn by a kill
                        name = result_id(line, self._fields)
                        if name is None:
                            raise InputError(f"{path} holds something else than results of a run: move it away")
                        key = (order.get(name, len(order) + 1), len(places))
                        places.setdefault(name, (*key, path, offset, len(line)))
                    offset += len(line)
        with ExitStack() as files:
            readers = {path: files.enter_context(path.open("rb")) for path in (self.output, *parts)}
            real = self.output.resolve()  # a link stays one
            target = real.with_name(f".{real.name}.merging")
            with target.open("wb") as file:
                for _, _, path, offset, length in sorted(places.values(), key=lambda place: place[:2]):
                    readers[path].seek(offset)
                    file.write(readers[path].read(length))
                file.flush()
                os.fsync(file.fileno())
        merged.give_way(target)
        return set(places)


def parts_of(output: Path) -> dict[Path, int]:
    """The part files of an output, and of how many replicas each is one."""
    pattern = re.compile(re.escape(output.name) + r"\.part-\d+-of-(\d+)")
    try:
        names = sorted(os.listdir(output.parent))
    except OSError:
        return {}  # opening the output will say it better
    found = {name: pattern.fullmatch(name) for name in names}
    return {output.with_name(name): int(match[1]) for name, match in found.items() if match}

"""Who does what among processes that share a folder: whoever is free takes the next piece of work, told by a file."""

from collections.abc import Sequence
from pathlib import Path

from hf_sparsekv.engine.batch_results import lock_of, remove_with_lock, unwritable


class Claims:
    """The pieces that are taken, by name; to be forgotten when nobody is at work.

    Args:
        output: what the work is for; the file lies beside it.
    """

    def __init__(self, output: Path) -> None:
        real = output.resolve()
        self._path = real.with_name(f"{real.name}.claims")
        self._lock = lock_of(self._path)
        self.taken: set[str] = set()
        """By anyone, when `take` was last called."""

    def forget(self) -> None:
        """Let everything be taken again, and leave no file behind.

        Raises:
            InputError: the file cannot be removed.
        """
        try:
            remove_with_lock(self._path)
        except OSError as error:
            raise unwritable(self._path, error) from error

    def take(self, names: Sequence[str]) -> str | None:
        """The first of these that nobody has taken, which now is the caller's; None = nothing is left.

        Raises:
            InputError: the file cannot be read or written.
        """
        try:
            return self._take(names)
        except OSError as error:
            raise unwritable(self._path, error) from error

    def _take(self, names: Sequence[str]) -> str | None:
        with self._lock, self._path.open("a+b") as file:
            file.seek(0)
            # What a kill tore off is no name: at worst its piece is done twice.
            self.taken = set(file.read().decode("utf-8", "replace").splitlines())
            name = next((name for name in names if name not in self.taken), None)
            if name is not None:
                file.write(f"{name}\n".encode())
                self.taken.add(name)
            return name

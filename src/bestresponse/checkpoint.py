"""Files of a run: written whole or not at all, and readable without trusting them.

A run directory holds ``run.json`` (what the run is), ``history.jsonl`` (a row a step) and
``checkpoint.pt`` (its state).
"""

from __future__ import annotations

import io
import json
import os
import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO, Final, final

import torch

from bestresponse.history import History, Number

#: Version of the run directory's format; older ones keep loading.
FORMAT: Final = 1
CHECKPOINT_SECONDS: Final = 60.0


def write_atomically(path: Path, write: Callable[[BinaryIO], object]) -> None:
    """Write a file under a temporary name, flush it to disk, then rename: readers see the old file or the new one."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.tmp")
    try:
        with temporary.open("wb") as file:
            write(file)
            file.flush()
            os.fsync(file.fileno())
        temporary.replace(path)
    except BaseException as error:
        temporary.unlink(missing_ok=True)
        if isinstance(error, RuntimeError) and isinstance(error.__context__, OSError):
            raise error.__context__ from None  # torch.save wraps a write that failed
        raise


@final
class RunDirectory:
    """The files of one run."""

    def __init__(self, path: Path | str) -> None:
        self.path = Path(path)
        self.run = self.path / "run.json"
        self.history = self.path / "history.jsonl"
        self.checkpoint = self.path / "checkpoint.pt"

    def __repr__(self) -> str:
        return f"RunDirectory({str(self.path)!r})"

    @property
    def used(self) -> bool:
        """Does it hold a run already?"""
        return self.run.exists() or self.checkpoint.exists()

    def write_run(self, description: Mapping[str, Any]) -> None:
        """Begin: make the directory and say what the run is."""
        if self.path.exists() and not self.path.is_dir():
            raise NotADirectoryError(f"run_dir must be a directory, and {self.path} is a file. Give another one")
        self.path.mkdir(parents=True, exist_ok=True)
        text = json.dumps({"format": FORMAT, **description}, indent=2)
        write_atomically(self.run, lambda file: file.write(text.encode()))

    def read_run(self) -> dict[str, Any]:
        """What the run is."""
        try:
            description: dict[str, Any] = json.loads(self.run.read_text(encoding="utf-8"))
        except (OSError, ValueError) as error:
            raise ValueError(
                f"{self.run} cannot be read, so what run this is cannot be known: {error}. Give another run_dir"
            ) from error
        _require_format(self.run, description)
        return description

    def require_same(self, description: Mapping[str, Any]) -> None:
        """Raise unless the run here is the one described."""
        there = self.read_run()
        for key, value in description.items():
            if there.get(key) != value:
                raise ValueError(
                    f"{self.path} holds another run. Its {key}:\n  {there.get(key)}\nThe {key} here:\n  {value}\n"
                    "Resume with what it was started with, or give another run_dir"
                )

    def append_history(self, rows: Iterable[Mapping[str, Number]], after: int) -> int:
        """Add rows behind the first ``after`` bytes, cutting what a failed write may have left; the new length."""
        text = _lines(rows)
        with self.history.open("r+b" if self.history.exists() else "w+b") as file:
            after = min(after, file.seek(0, os.SEEK_END))  # somebody may have taken the file away
            file.truncate(after)
            file.seek(after)
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        return after + len(text)

    def read_history(self, step: int) -> History:
        """The history up to ``step``, which the file is cut back to."""
        history = History.read(self.history, up_to_step=step) if self.history.exists() else History()
        text = _lines(history.rows())
        write_atomically(self.history, lambda file: file.write(text))
        return history

    def write_checkpoint(self, saved: Mapping[str, Any]) -> None:
        """Replace the checkpoint."""
        write_atomically(self.checkpoint, lambda file: torch.save({"format": FORMAT, **saved}, file))

    def read_checkpoint(self, device: torch.device) -> dict[str, Any]:
        """The checkpoint, with its tensors on ``device``."""
        try:
            saved: dict[str, Any] = torch.load(self.checkpoint, map_location=device, weights_only=True)
        except Exception as error:
            raise ValueError(f"{self.checkpoint} is not a checkpoint that can be read: {error}") from error
        _require_format(self.checkpoint, saved)
        return saved


@final
class Keeper:
    """Keeps the last good state of a run, in its directory or else in memory, and the history's rows until written.

    A write that fails (a full disk, a directory gone) is a warning, not the end of the run: what was saved before
    stays whole, and the next save tries again.
    """

    def __init__(self, directory: RunDirectory | None, every: int | None, device: torch.device) -> None:
        if every is not None and every < 1:
            raise ValueError(f"checkpoint_every must be at least 1 step; got {every}")
        self.directory = directory
        self.saved_step: int | None = None
        self._every = every
        self._device = device
        self._last_time = time.monotonic()
        self._rows: list[Mapping[str, Number]] = []
        self._written = 0  # bytes of the history that are known to be whole
        self._memory = b""

    def due(self, step: int) -> bool:
        """Is it time to save?"""
        if self._every is not None:
            return step % self._every == 0
        return time.monotonic() - self._last_time > CHECKPOINT_SECONDS

    def add(self, rows: Iterable[Mapping[str, Number]]) -> None:
        """Rows of the history to write with the next save."""
        if self.directory is not None:
            self._rows.extend(rows)

    def save(self, step: int, state: Mapping[str, Any]) -> None:
        """Save the state as the last good one; the history first, so that it is never behind."""
        self._last_time = time.monotonic()
        if self.directory is None:
            file = io.BytesIO()
            torch.save(state, file)
            self._memory, self.saved_step = file.getvalue(), step
            return
        with self.forgiving(f"step {step}"):
            self._written = self.directory.append_history(self._rows, self._written)
            self._rows.clear()
            self.directory.write_checkpoint(state)
            self.saved_step = step

    def resume(self, step: int) -> History:
        """The history up to ``step`` in the directory; what was written beyond it is cut off."""
        if self.directory is None:
            return History()
        history = self.directory.read_history(step)
        self._written, self.saved_step = self.directory.history.stat().st_size, step
        return history

    def load(self) -> dict[str, Any] | None:
        """The last good state; ``None`` if there is none."""
        if self.directory is None:
            state: dict[str, Any] = torch.load(io.BytesIO(self._memory), map_location=self._device, weights_only=True)
            return state
        return self.directory.read_checkpoint(self._device) if self.directory.checkpoint.exists() else None

    @contextmanager
    def forgiving(self, what: str) -> Iterator[None]:
        """Turn a failed write into a warning that says what is safe."""
        try:
            yield
        except OSError as error:
            safe = (
                "nothing is saved yet" if self.saved_step is None else f"step {self.saved_step} is the last one saved"
            )
            path = self.directory.path if self.directory else None
            warnings.warn(
                f"could not write {what} to {path}: {error}. The run goes on; {safe}", RuntimeWarning, stacklevel=4
            )


def _require_format(path: Path, content: Mapping[str, Any]) -> None:
    if content.get("format", 0) > FORMAT:
        raise ValueError(
            f"{path} was written in format {content['format']}, and this version reads up to {FORMAT}: "
            "use a newer bestresponse"
        )


def _lines(rows: Iterable[Mapping[str, Number]]) -> bytes:
    return "".join(json.dumps(row) + "\n" for row in rows).encode()

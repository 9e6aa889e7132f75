"""The run's face to a person: progress, Ctrl-C, seconds."""

from __future__ import annotations

import signal
import sys
import threading
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from types import FrameType, TracebackType
from typing import Final, final

from tqdm.auto import tqdm

from bestresponse.history import Number

#: Rows are read off the device, checked and shown at least this often.
SETTLE_STEPS: Final = 200
SETTLE_SECONDS: Final = 0.25
NOT_SHOWN: Final = {"step", "train_batches", "valid_batches", "gradients", "seconds"}


@final
class Progress:
    """A progress bar with the losses and hypers; quiet where nobody looks.

    Args:
        steps: Steps in all.
        done: Steps done already.
        show: ``None`` shows it in terminals and notebooks only.
    """

    def __init__(self, steps: int, done: int, show: bool | None) -> None:
        if show is None:
            show = sys.stderr.isatty() or "ipykernel" in sys.modules
        self._bar = tqdm(total=steps, initial=done, disable=not show, unit="step", dynamic_ncols=True)
        self._last_time = time.monotonic()
        self._steps = 0
        self._newest: dict[str, str] = {}  # an evaluation stays until the next one

    def __enter__(self) -> Progress:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._bar.close()

    def due(self) -> bool:
        """Called once a step: is it time to show something?"""
        self._steps += 1
        return self._steps >= SETTLE_STEPS or time.monotonic() - self._last_time > SETTLE_SECONDS

    def show(self, rows: Sequence[Mapping[str, Number]]) -> None:
        """Advance by these rows, and show the newest numbers among them."""
        self._last_time, self._steps = time.monotonic(), 0
        if self._bar.disable:
            return
        for row in rows:
            self._newest |= {
                name: f"{value:.4g}" for name, value in row.items() if name not in NOT_SHOWN and value is not None
            }
        self._bar.set_postfix(self._newest, refresh=False)
        self._bar.update(len(rows))


@final
class Clock:
    """Seconds spent in the run, over all its sittings, without pauses."""

    def __init__(self) -> None:
        self._before = 0.0
        self._since = time.perf_counter()

    def start(self) -> None:
        """Count from here, on top of earlier sittings."""
        self._since = time.perf_counter()

    @property
    def seconds(self) -> float:
        """Seconds so far."""
        return self._before + time.perf_counter() - self._since

    @seconds.setter
    def seconds(self, seconds: float) -> None:
        self._before, self._since = seconds, time.perf_counter()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """Leave out what is done meanwhile."""
        began = time.perf_counter()
        try:
            yield
        finally:
            self._since += time.perf_counter() - began


@contextmanager
def interrupts() -> Iterator[list[int]]:
    """Collects the first Ctrl-C in the list it gives; the second one interrupts at once."""
    caught: list[int] = []
    if threading.current_thread() is not threading.main_thread():
        yield caught  # signals reach the main thread alone
        return

    def note(number: int, frame: FrameType | None) -> None:
        caught.append(number)
        signal.signal(signal.SIGINT, before)
        print("\nStopping after this step; press Ctrl-C again to stop at once.", file=sys.stderr)

    before = signal.signal(signal.SIGINT, note)
    try:
        yield caught
    finally:
        signal.signal(signal.SIGINT, before)

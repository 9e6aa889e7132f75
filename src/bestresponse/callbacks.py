"""Functions for ``tune(callbacks=[...])``. An own one is any function that takes an :class:`~bestresponse.Event`."""

from __future__ import annotations

import csv
import io
import warnings
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, final

from bestresponse.checkpoint import write_atomically
from bestresponse.extras import require
from bestresponse.result import Snapshot
from bestresponse.tune import Event


@final
class early_stop:  # noqa: N801 - used like the functions beside it; a class only to be saved with the run
    """Stop when a number of the history has not improved for a while.

    Args:
        on: A column that should fall, such as ``"valid/loss"`` from ``evaluate={"valid": valid_loader}`` with
            ``evaluate_every``.
        patience: So many values in a row without a new best stop the run.
        min_delta: A new best must be better by at least this much.
    """

    def __init__(self, on: str = "valid/loss", patience: int = 5, min_delta: float = 0.0) -> None:
        if patience < 1:
            raise ValueError(f"patience must be at least 1; got {patience}")
        self.on = on
        self.patience = patience
        self.min_delta = min_delta
        self.best = float("inf")
        self.since = 0

    def __call__(self, event: Event) -> None:
        """Look at the newest value, if this step has one."""
        if event.kind == "start":
            _require(self.on, event.columns, "early_stop")
        if event.kind != "step" or ("/" in self.on and self.on not in event.metrics):
            return
        value = event.current_row().get(self.on)
        if value is None:
            return
        if value < self.best - self.min_delta:
            self.best, self.since = value, 0
        else:
            self.since += 1
        if self.since >= self.patience:
            event.stop(f"{self.on} has not fallen below {self.best:.6g} for {self.since} values (early_stop).")

    def state_dict(self) -> dict[str, Any]:
        """The best so far, and since when."""
        return {"best": self.best, "since": self.since}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take up where a run left off."""
        self.best, self.since = saved["best"], saved["since"]


@final
class keep_best:  # noqa: N801 - used like the functions beside it; a class only to be saved with the run
    """Make the result of the step that was best in a full evaluation, rather than of the last one.

    Args:
        on: An evaluated number that should be low, such as ``"valid/loss"`` from ``evaluate={"valid": valid_loader}``
            with ``evaluate_every``.
    """

    def __init__(self, on: str = "valid/loss") -> None:
        self.on = on
        self.best = float("inf")
        self.snapshot: Snapshot | None = None

    def __call__(self, event: Event) -> None:
        """Keep a copy at each new best; deploy it at the end."""
        if event.kind == "start":
            _require(self.on, event.evaluated, "keep_best")
        if event.kind == "step" and event.metrics.get(self.on, float("inf")) < self.best:
            self.best, self.snapshot = event.metrics[self.on], event.snapshot()
        if event.kind == "end" and self.snapshot is not None:
            event.deploy(self.snapshot)

    def state_dict(self) -> dict[str, Any]:
        """The best so far."""
        kept = self.snapshot
        return {"best": self.best, "snapshot": None if kept is None else vars(kept)}

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Take up where a run left off."""
        self.best = saved["best"]
        self.snapshot = None if saved["snapshot"] is None else Snapshot(**saved["snapshot"])


def csv_writer(path: Path | str) -> Callable[[Event], None]:
    """Write the whole history as a CSV file at the end of the run. A place that takes no file is an error before it."""
    file_path = Path(path)

    def write(event: Event) -> None:
        text = io.StringIO(newline="")
        writer = csv.DictWriter(text, event.history.columns)
        writer.writeheader()
        writer.writerows(event.history.rows())
        write_atomically(file_path, lambda file: file.write(text.getvalue().encode()))

    def callback(event: Event) -> None:
        if event.kind == "start":
            file_path.parent.mkdir(parents=True, exist_ok=True)
            file_path.open("a").close()
        if event.kind == "end":
            try:
                write(event)
            except OSError as error:  # the result of the run is worth more
                warnings.warn(f"could not write {file_path}: {error}", RuntimeWarning, stacklevel=2)

    return callback


def tensorboard_writer(directory: Path | str, every: int = 10) -> Callable[[Event], None]:
    """Write every number of the history for TensorBoard. Needs the extra ``tensorboard``.

    Args:
        directory: Where TensorBoard looks.
        every: Steps between two writes; evaluations are always written.
    """
    require("tensorboard", "tensorboard")
    writer = require("torch.utils.tensorboard", "tensorboard").SummaryWriter(str(directory))

    def callback(event: Event) -> None:
        if event.kind == "step" and (event.step % every == 0 or event.metrics):
            for name, value in event.current_row().items():
                if name != "step":
                    writer.add_scalar(name, value, event.step)
        if event.kind == "end":
            writer.close()

    return callback


def _require(on: str, there: Sequence[str], who: str) -> None:
    if on not in there:
        raise ValueError(
            f"{who}(on={on!r}) needs a number that this run makes now and then; it makes {', '.join(there) or 'none'}. "
            'Give tune evaluate={"valid": loader} and evaluate_every, which makes "valid/loss"'
        )

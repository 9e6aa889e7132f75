"""What happened in a run: one row a step, kept in columns."""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Final, final

import torch
from torch import Tensor

from bestresponse.extras import require

if TYPE_CHECKING:
    import pandas

Number = float | int | None
#: The columns every run has; hypers and evaluations come beside them.
COLUMNS: Final = ("step", "train_loss", "valid_loss", "train_batches", "valid_batches", "gradients", "seconds")


@final
class History:
    """One row a step: losses, costs, seconds and scalar hypers.

    Rows may hold tensors that are still on a device; they are read together, now and then, when somebody looks.

    Example:
        >>> history = History()
        >>> history.append({"step": 1, "train_loss": torch.tensor(0.5)})
        >>> history["train_loss"]
        [0.5]
    """

    def __init__(self) -> None:
        self._columns: dict[str, list[Number]] = {}
        self._length = 0
        self._waiting: list[Mapping[str, Number | Tensor]] = []
        self._fresh: list[dict[str, Number]] = []  # read, and not yet taken

    def append(self, row: Mapping[str, Number | Tensor]) -> None:
        """Add a row. Its tensors must hold one number each."""
        self._waiting.append(row)

    def take(self) -> list[dict[str, Number]]:
        """The rows since the last call, read in one transfer from the device."""
        self._settle()
        fresh, self._fresh = self._fresh, []
        return fresh

    def _settle(self) -> None:
        if not self._waiting:
            return
        waiting, self._waiting = self._waiting, []
        # A tensor may stand in many rows: a hyper that did not move. Each is read once.
        tensors = {id(value): value for row in waiting for value in row.values() if isinstance(value, Tensor)}
        numbers = dict(zip(tensors, _read(list(tensors.values())), strict=True))
        for row in waiting:
            settled = {name: numbers[id(v)] if isinstance(v, Tensor) else v for name, v in row.items()}
            self._add(settled)
            self._fresh.append(settled)

    def __len__(self) -> int:
        self._settle()
        return self._length

    def __getitem__(self, column: str) -> list[Number]:
        """A whole column; ``None`` where a row has no such number."""
        self._settle()
        if column not in self._columns:
            raise KeyError(f"the history has no column {column!r}; it has {', '.join(self._columns)}")
        return self._columns[column]

    def __contains__(self, column: str) -> bool:
        self._settle()
        return column in self._columns

    def __repr__(self) -> str:
        return f"History({len(self)} rows: {', '.join(self._columns)})"

    @property
    def columns(self) -> list[str]:
        """The names of the columns."""
        self._settle()
        return list(self._columns)

    def rows(self) -> Iterator[dict[str, float | int]]:
        """All rows, each without the numbers it has not."""
        return (self.row(i) for i in range(len(self)))

    def row(self, index: int = -1) -> dict[str, float | int]:
        """One row, by default the last."""
        self._settle()
        return {name: value for name, column in self._columns.items() if (value := column[index]) is not None}

    def to_pandas(self) -> pandas.DataFrame:
        """The history as a data frame indexed by step."""
        self._settle()
        frame: pandas.DataFrame = require("pandas", "pandas").DataFrame(self._columns)
        return frame.set_index("step") if "step" in frame else frame

    @staticmethod
    def read(path: Path | str, up_to_step: int | None = None) -> History:
        """The history in a ``history.jsonl``. A last line that was cut off by a crash is left out."""
        history = History()
        for line in Path(path).read_text(encoding="utf-8").splitlines():
            try:
                row = json.loads(line)
            except json.JSONDecodeError:
                break
            if up_to_step is not None and row["step"] > up_to_step:
                break
            history._add(row)
        return history

    def _add(self, row: Mapping[str, Number]) -> None:
        for name in row:
            if name not in self._columns:
                self._columns[name] = [None] * self._length
        for name, column in self._columns.items():
            column.append(row.get(name))
        self._length += 1


def _read(tensors: list[Tensor]) -> list[float]:
    """The numbers in these tensors, in one transfer; with one operation where all are alike, as losses are."""
    if not tensors:
        return []
    if any(t.ndim or t.dtype is not tensors[0].dtype for t in tensors):
        tensors = [t.detach().reshape(()).double() for t in tensors]
    numbers: list[float] = torch.stack(tensors).detach().double().tolist()
    return numbers

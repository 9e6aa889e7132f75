"""Notices the first loss or hyper that is not finite, and says which."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import final

import torch
from torch import Tensor

from bestresponse.history import Number
from bestresponse.problem import Params
from bestresponse.space import Raw


@final
class Watch:
    """Gathers what must stay finite without reading it from the device, and checks it now and then.

    Args:
        idle: Check nothing, for methods to which a diverged training is one outcome among others.
    """

    def __init__(self, *, idle: bool) -> None:
        self._idle = idle
        self._sums: list[tuple[int, list[str], Tensor]] = []
        self._last: Mapping[str, Number] = {}

    def note(self, step: int, raw: Raw) -> None:
        """Raw after a change: one sum a leaf tells whether any of its numbers is not finite."""
        if not self._idle:
            self._sums.append((step, list(raw), torch.stack([leaf.sum() for leaf in raw.values()])))

    def find(self, rows: Sequence[Mapping[str, Number]]) -> str | None:
        """A sentence about the first number since the last call that is not finite; ``None`` if all are."""
        sums, self._sums = self._sums, []
        if self._idle:
            return None
        found: list[tuple[float, int, str]] = []
        for row in rows:
            step = row["step"] or 0
            for name in ("train_loss", "valid_loss"):
                value = row.get(name)
                if value is not None and not math.isfinite(value):
                    count = f"{name[:5]}_batches"
                    batches = _numbers((self._last.get(count) or 0) + 1, row[count])
                    found.append((step, 0, f"{name} became {value} at step {step} ({name[:5]} {batches})."))
            self._last = row
        if sums:
            finite = torch.isfinite(torch.stack([of_leaves for _, _, of_leaves in sums])).tolist()
            for (step, names, _), fine in zip(sums, finite, strict=True):
                wrong = [name for name, ok in zip(names, fine, strict=True) if not ok]
                if wrong:
                    found.append((step, 1, f"Hyper {wrong[0]!r} became NaN or infinite at step {step}."))
        return min(found)[2] if found else None


def find_in_weights(step: int, params: Params) -> str | None:
    """A sentence about the first weight that is not finite; ``None`` if all are. Waits for the device."""
    finite = torch.stack([torch.isfinite(part).all() for part in params.values()]).tolist()
    wrong = [name for name, fine in zip(params, finite, strict=True) if not fine]
    return f"Weights in {wrong[0]!r} became NaN or infinite by step {step}." if wrong else None


def _numbers(first: Number, last: Number) -> str:
    first, last = int(first or 0), int(last or 0)
    return f"batch number {last}" if first >= last else f"batch numbers {first} to {last}"

"""Batches without end, with a place that can be saved and found again."""

from __future__ import annotations

import multiprocessing
import numbers
import random
import signal
import sys
import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import resource_tracker
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.utils.data import Dataset

from bestresponse.problem import Batch

#: Gives a batch, the same one whenever it is called.
Draw = Callable[[], Batch]
_EMPTY: Final = "{name} is empty: it gave no batch. Is drop_last set with too few examples?"
_SPENT: Final = (
    "{name} gave no batch when it was iterated again: it can be read only once. Give a DataLoader, br.Batches or a "
    "list of batches"
)


@final
class Batches:
    """Minibatches of tensors that already sit where they are used: a loader without workers or copies.

    Each pass is in a new random order, drawn from torch's generator.

    Args:
        tensors: Tensors of equal first dimension; a batch is a tuple of their rows.
        size: Examples in a batch.
        shuffle: New order every pass.
        drop_last: Leave out a last batch that is smaller.
        index: Add the rows' numbers as the last item of each batch, for hypers with one value per example.

    Example:
        >>> batches = Batches(torch.arange(10.0), size=4, shuffle=False)
        >>> [batch[0].tolist() for batch in batches]
        [[0.0, 1.0, 2.0, 3.0], [4.0, 5.0, 6.0, 7.0], [8.0, 9.0]]
    """

    def __init__(
        self, *tensors: Tensor, size: int, shuffle: bool = True, drop_last: bool = False, index: bool = False
    ) -> None:
        if not tensors:
            raise ValueError("Batches needs at least one tensor: br.Batches(x, y, size=128)")
        for tensor in tensors:
            if not isinstance(tensor, Tensor) or tensor.ndim == 0:
                raise TypeError(
                    "Batches needs tensors whose first dimension counts the examples; got "
                    f"{'a number' if isinstance(tensor, Tensor) else _kind(tensor)}. torch.as_tensor makes them from "
                    "lists and arrays; data sets need a DataLoader"
                )
        if len({tensor.device for tensor in tensors}) > 1:
            raise ValueError(f"tensors must be on one device; got {[str(tensor.device) for tensor in tensors]}")
        if len({len(tensor) for tensor in tensors}) > 1:
            raise ValueError(f"tensors must have equal first dimensions; got {[len(tensor) for tensor in tensors]}")
        _require_whole(size)
        if size < 1:
            raise ValueError(f"size must be at least 1; got {size}")
        self.tensors = tensors
        self.size = size
        self.shuffle = shuffle
        self.drop_last = drop_last
        self.index = index

    def __len__(self) -> int:
        count = len(self.tensors[0])
        return count // self.size if self.drop_last else -(-count // self.size)

    def __iter__(self) -> Iterator[tuple[Tensor, ...]]:
        return map(self.take, self.rows())

    def rows(self) -> Iterator[Tensor | slice]:
        """Which rows each batch of one pass has; in a new order, if shuffled."""
        count = len(self.tensors[0])
        starts = range(0, len(self) * self.size, self.size)
        if not self.shuffle:
            return (slice(start, min(start + self.size, count)) for start in starts)
        # The order is drawn here, when a pass begins: drawing the batches takes no random numbers.
        order = torch.randperm(count, device="cpu").to(self.tensors[0].device)
        return (order[start : start + self.size] for start in starts)

    def take(self, rows: Tensor | slice) -> tuple[Tensor, ...]:
        """The batch of these rows."""
        if isinstance(rows, Tensor):
            batch = tuple(tensor.index_select(0, rows) for tensor in self.tensors)
            return (*batch, rows) if self.index else batch
        batch = tuple(tensor[rows] for tensor in self.tensors)
        device = self.tensors[0].device
        return (*batch, torch.arange(rows.start, rows.stop, device=device)) if self.index else batch


@final
class Stream:
    """Endless batches from a loader, on one device, in an order fixed by one seed.

    Torch's, Python's and NumPy's global random numbers are swapped for the stream's own while a batch is drawn, so
    shuffling and random transforms depend on the seed and the place alone, and a resumed run draws the same batches.
    So is a generator that was handed to the ``DataLoader`` or its sampler.

    Args:
        data: A ``DataLoader``, :class:`Batches`, or any re-iterable of batches.
        name: What errors call it; also makes two streams with one seed differ.
        seed: The seed of the order.
        device: Where batches are moved; ``None`` leaves them.
    """

    def __init__(
        self, data: Iterable[Batch], *, name: str = "data", seed: int = 0, device: torch.device | None = None
    ) -> None:
        if isinstance(data, Stream):
            raise TypeError(f"{name} is a br.Stream already; give the loader itself")
        if not hasattr(data, "__iter__"):
            advice = ". Put it in a DataLoader" if isinstance(data, Dataset) else ""
            raise TypeError(
                f"{name} must be iterable: a DataLoader, br.Batches or a list of batches; got {_kind(data)}{advice}"
            )
        if isinstance(data, Tensor):
            raise TypeError(f"{name} must give batches, and a tensor gives rows: br.Batches(x, y, size=128)")
        if isinstance(data, Iterator):
            raise TypeError(
                f"{name} must start anew each time it is iterated, and a {_kind(data)} can be read only once. "
                "Give a DataLoader, br.Batches or a list of batches"
            )
        self.data = data
        self.name = name
        self.seed = seed
        self.device = device
        self.pass_number = 0
        self.handed_out = 0  # batches of this pass already given
        self._drawn = False
        self._iterator: Iterator[Any] | None = None
        self._waiting: list[Draw] = []  # drawn by peek, not yet given
        self._random = _RandomState(_generators(data))
        # Drawing the next item of these takes no random numbers, so nothing needs to be swapped.
        self._quiet = isinstance(data, Batches | list | tuple)

    def __iter__(self) -> Stream:
        return self

    def __next__(self) -> Batch:
        return self.draw()()

    def draw(self) -> Draw:
        """Take the next batch, as a function that gives it, the same one whenever it is called.

        Of :class:`Batches` the function holds the rows' numbers rather than the rows: many batches may be held so.
        """
        draw = self._waiting.pop() if self._waiting else self._draw()
        self.handed_out += 1
        return draw

    def peek(self) -> Batch:
        """The batch that comes next, without taking it."""
        if not self._waiting:
            self._waiting.append(self._draw())
        return self._waiting[0]()

    def epoch(self) -> Iterator[Batch]:
        """One whole pass from the start, which leaves the stream's own place alone."""
        other = Stream(self.data, name=self.name, seed=self.seed, device=self.device)
        iterator = other._start(0)
        empty = True
        while (draw := other._from(iterator)) is not None:
            empty = False
            yield draw()
        if empty:
            raise ValueError(_EMPTY.format(name=self.name))

    def state_dict(self) -> dict[str, int]:
        """The place in the stream."""
        return {"pass_number": self.pass_number, "handed_out": self.handed_out}

    def load_state_dict(self, saved: Mapping[str, int]) -> None:
        """Go to a saved place. Batches of the present pass that were already used are drawn again and skipped."""
        self.pass_number, self.handed_out = saved["pass_number"], 0
        self._waiting.clear()
        self._iterator = self._start(self.pass_number)
        for _ in range(saved["handed_out"]):
            self._draw()
            self.handed_out += 1

    def _draw(self) -> Draw:
        if self._iterator is None:
            self._iterator = self._start(self.pass_number)
        draw = self._from(self._iterator)
        if draw is None:
            self.pass_number, self.handed_out = self.pass_number + 1, 0
            self._iterator = self._start(self.pass_number)
            draw = self._from(self._iterator)
        if draw is None:
            raise ValueError((_SPENT if self._drawn else _EMPTY).format(name=self.name))
        self._drawn = True
        return draw

    def _start(self, pass_number: int) -> Iterator[Any]:
        seed = zlib.crc32(f"{self.seed} {self.name} {pass_number}".encode())
        self._random.seed(seed)
        for owner in _owners(self.data):
            if callable(set_epoch := getattr(owner, "set_epoch", None)):
                set_epoch(pass_number)
        with self._random.swapped_in(), _deaf_workers(self.data):
            return self.data.rows() if isinstance(self.data, Batches) else iter(self.data)

    def _from(self, iterator: Iterator[Any]) -> Draw | None:
        """The next batch, as a function that gives it; ``None`` at the end of the pass."""
        try:
            if self._quiet:
                item = next(iterator)
            else:
                with self._random.swapped_in():
                    item = next(iterator)
        except StopIteration:
            return None
        if isinstance(self.data, Batches):
            return partial(self._take, self.data, item)
        batch = self._moved(item)
        return lambda: batch

    def _take(self, data: Batches, rows: Tensor | slice) -> Batch:
        return self._moved(data.take(rows))

    def _moved(self, batch: Batch) -> Batch:
        return batch if self.device is None else to_device(batch, self.device)


def to_device(batch: Batch, device: torch.device) -> Batch:
    """The batch with every tensor in it on ``device``: tuples, lists, dicts and named tuples keep their type."""
    if isinstance(batch, Tensor):
        return batch.to(device, non_blocking=True)
    if callable(move := getattr(batch, "to", None)):
        return move(device)
    if isinstance(batch, tuple) and hasattr(batch, "_fields"):
        return type(batch)(*[to_device(part, device) for part in batch])
    if isinstance(batch, tuple | list):
        return type(batch)([to_device(part, device) for part in batch])
    if isinstance(batch, Mapping):
        return {key: to_device(part, device) for key, part in batch.items()}
    return batch


def _owners(data: Any) -> list[Any]:
    """A loader and the samplers in it: whatever may hold a generator or count passes."""
    batch_sampler = getattr(data, "batch_sampler", None)
    return [data, getattr(data, "sampler", None), batch_sampler, getattr(batch_sampler, "sampler", None)]


def _generators(data: Any) -> list[torch.Generator]:
    found = {id(g): g for owner in _owners(data) if isinstance(g := getattr(owner, "generator", None), torch.Generator)}
    return list(found.values())


class _RandomState:
    """One state of torch's CPU generator, Python's, NumPy's and a loader's own, to stand in for the present ones."""

    def __init__(self, generators: Sequence[torch.Generator]) -> None:
        self._generators = generators
        self._state = self._get()

    def seed(self, seed: int) -> None:
        numpy = sys.modules.get("numpy")
        self._state = (
            torch.Generator().manual_seed(seed).get_state(),
            random.Random(seed).getstate(),
            numpy.random.RandomState(seed).get_state() if numpy else None,
            [torch.Generator(generator.device).manual_seed(seed).get_state() for generator in self._generators],
        )

    @contextmanager
    def swapped_in(self) -> Iterator[None]:
        outside = self._get()
        try:
            self._set(self._state)
            yield
            self._state = self._get()
        finally:
            self._set(outside)

    def _get(self) -> tuple[Tensor, Any, Any, list[Tensor]]:
        numpy = sys.modules.get("numpy")
        return (
            torch.get_rng_state(),
            random.getstate(),
            numpy.random.get_state() if numpy else None,
            [generator.get_state() for generator in self._generators],
        )

    def _set(self, state: tuple[Tensor, Any, Any, list[Tensor]]) -> None:
        of_torch, of_python, of_numpy, of_generators = state
        torch.set_rng_state(of_torch)
        random.setstate(of_python)
        if of_numpy is not None:
            sys.modules["numpy"].random.set_state(of_numpy)
        for generator, of_generator in zip(self._generators, of_generators, strict=True):
            generator.set_state(of_generator)


def _require_whole(size: object) -> None:
    if not isinstance(size, numbers.Integral):
        raise TypeError(f"size must be a whole number; got {size!r}")


@contextmanager
def _deaf_workers(data: Any) -> Iterator[None]:
    """Ctrl-C reaches every process of a terminal: workers born here do not hear it, and the step can be finished."""
    if not getattr(data, "num_workers", 0) or not hasattr(signal, "pthread_sigmask"):
        yield
        return
    context = getattr(data, "multiprocessing_context", None) or multiprocessing
    if context.get_start_method(allow_none=True) != "fork":
        resource_tracker.ensure_running()  # starting it later would let the signal through again
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})  # held back here, and for good where inherited
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _kind(data: object) -> str:
    return type(data).__name__

"""The frame of the comparisons on one problem: contestants take turns in one process, each on its own CPU clock.

A contestant is a function of a :class:`Watch` that trains, and asks ``watch.look(...)`` after each piece of work
whether to go on. All of them run side by side in slices of half a second, so that whatever else the machine does falls
on all alike. What counts is the CPU time of the contestant's own thread; looking at its weights is left out.
"""

from __future__ import annotations

import copy
import math
import multiprocessing
import resource
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import NamedTuple

import torch
from tasks import Task, decays
from torch import Tensor

import bestresponse as br
from bestresponse.papers.data import Images

START = -5.0  # of every λ: the logarithm of a decay
STEPS = 3000  # of the plain run that is the unit of cost
SLICE = 0.5  # CPU seconds of a turn
LOOKS = 200  # in a budget


class Seen(NamedTuple):
    """What a contestant would deploy now: weights by name, and its decays, by name or one for all."""

    weights: Mapping[str, Tensor]
    decay: Tensor | Mapping[str, Tensor]


class Point(NamedTuple):
    """One look."""

    seconds: float
    updates: int
    gradients: int
    valid: float
    test: float


@dataclass
class Watch:
    """A contestant's own clock, its turns, and what it had reached when.

    Args:
        task: Problem and batches.
        budget: CPU seconds.
        seed: For data order and whatever else is random.
        updates: Training updates to stop at, if the budget is not spent earlier.
    """

    task: Task
    budget: float
    seed: int = 0
    updates: float = math.inf
    points: list[Point] = field(default_factory=list)
    mark: Point | None = None  # the first look at STEPS updates or more
    decay: Tensor | Mapping[str, Tensor] | None = None  # at the end
    error: str = ""
    wait: Callable[[], None] = lambda: None  # gives the word to others, until it comes back
    _spent: float = 0.0
    _next: float = 0.0  # when to evaluate
    _turn: float = 0.0  # when this turn began
    _since: float = 0.0

    def stream(self, name: str) -> br.Stream:
        """Batches without end, ``"train"`` or ``"valid"``."""
        return br.Stream(getattr(self.task, name), name=name, seed=self.seed)

    @property
    def part(self) -> float:
        """The part of the budget that is spent, from 0 to 1."""
        return min(1.0, (self._spent + time.thread_time() - self._since) / self.budget)

    def start(self) -> None:
        """Count from here."""
        torch.set_num_threads(1)  # of this very thread
        self._since = time.thread_time()

    def look(self, seen: Callable[[], Seen], *, updates: int, gradients: int) -> bool:
        """Evaluate if that is due, wait if it is another's turn; may the contestant go on?"""
        self._spent += time.thread_time() - self._since
        over = self._spent >= self.budget or updates >= self.updates
        marked = self.mark is None and updates >= STEPS
        if self._spent >= self._next or over or marked:
            point = Point(self._spent, updates, gradients, *evaluate(self.task, seen().weights))
            self.points.append(point)
            self.mark = point if marked else self.mark
            self._next = self._spent + self.budget / LOOKS
            if not math.isfinite(point.valid):
                raise FloatingPointError(f"the validation loss became {point.valid}")
        if over:
            self.decay = seen().decay
        elif self._spent - self._turn >= SLICE:
            self.wait()
            self._turn = self._spent
        self._since = time.thread_time()
        return not over


class Contestant(NamedTuple):
    """Who takes part: what it does, its settings in words, and whether it has one decay for all weights."""

    run: Callable[[Watch], None]
    settings: str = ""
    shared: bool = False


def evaluate(task: Task, weights: Mapping[str, Tensor]) -> tuple[float, float]:
    """Mean squared error on all of the validation and all of the test data."""
    problem = task.problem
    with torch.no_grad():
        losses = [
            torch.stack([br.evaluate(problem, "valid", dict(weights), {}, batch) for batch in task.evaluate[name]])
            for name in ("valid", "test")
        ]
    valid, test = (float(loss.mean()) for loss in losses)
    return valid, test


def plain(watch: Watch) -> None:
    """An ordinary PyTorch loop that leaves the decays where they start."""
    problem = watch.task.problem
    model = copy.deepcopy(problem.model)
    hyper = problem.space.values(problem.space.raw())
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-3)
    weights, batches = dict(model.named_parameters()), watch.stream("train")
    updates = 0
    while watch.look(lambda: Seen(weights, hyper["decay"]), updates=updates, gradients=updates):
        optimizer.zero_grad()
        problem.train_loss(model, next(batches), hyper).backward()
        optimizer.step()
        updates += 1


PLAIN = Contestant(plain, "Adam 1e-3, λ = −5")


def task(seed: int, images: Images, shared: bool = False) -> Task:
    """Figure 3 top's problem: a linear model on MNIST with one decay per weight, or one for all."""
    shape = (lambda model: ()) if shared else br.per_weight
    return decays((784, 10), start=math.exp(START), batch=1000, seed=seed, images=images, shape=shape)


def unit(images: Images) -> float:
    """CPU seconds of a plain run of ``STEPS`` updates, judged by the quickest tenth of two tries."""
    seconds = []
    for _ in range(20):
        watch = Watch(task(0, images), math.inf, updates=STEPS // 10)
        run(PLAIN, watch)
        seconds.append(watch.points[-1].seconds)
    return 10 * min(seconds)


def race(contestants: Mapping[str, Contestant], seed: int, budget: float, images: Images) -> dict[str, Watch]:
    """Let all run, slice by slice, until each has spent ``budget`` CPU seconds."""
    watches = {
        name: Watch(task(seed, images, contestant.shared), budget, seed) for name, contestant in contestants.items()
    }
    turns = [_Turns(contestant, watches[name]) for name, contestant in contestants.items()]
    while turns:
        turns = [turn for turn in turns if turn.take()]
    return watches


class _Turns:
    """A contestant in a thread that moves only when it is given the word."""

    def __init__(self, contestant: Contestant, watch: Watch) -> None:
        self._go, self._back = threading.Semaphore(0), threading.Semaphore(0)
        self._over = False
        watch.wait = self._wait
        threading.Thread(target=self._run, args=(contestant, watch), daemon=True).start()

    def take(self) -> bool:
        """One slice; is there more to come?"""
        self._go.release()
        self._back.acquire()
        return not self._over

    def _wait(self) -> None:
        self._back.release()
        self._go.acquire()

    def _run(self, contestant: Contestant, watch: Watch) -> None:
        self._go.acquire()
        run(contestant, watch)
        self._over = True
        self._back.release()


def run(contestant: Contestant, watch: Watch) -> None:
    """One contestant to its end; what it raises is its own."""
    watch.start()
    try:
        contestant.run(watch)
    except Exception as error:
        watch.error = f"{type(error).__name__}: {error}"


def extra_memory(contestant: Contestant, seconds: float, images: Images) -> float:
    """MB that a process needs at its peak beyond what a plain run needs, in a child process that is gone thereafter."""
    watch = Watch(task(0, images, contestant.shared), seconds)
    fork = multiprocessing.get_context("fork")
    answer = fork.SimpleQueue()

    def child() -> None:
        run(PLAIN, Watch(watch.task, math.inf, updates=100))
        before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        run(contestant, watch)
        answer.put(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before)

    process = fork.Process(target=child)
    process.start()
    process.join()
    if process.exitcode:
        return math.nan
    return answer.get() * (1 if sys.platform == "darwin" else 1024) / 1e6

"""The one loop: every method runs in it, and it alone keeps history, saves, resumes, stops and reports."""

from __future__ import annotations

import copy
import dataclasses
import platform
import re
import warnings
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from datetime import UTC, datetime
from importlib.metadata import version
from pathlib import Path
from typing import Any, Literal, final

import torch
from torch import Tensor

from bestresponse import preflight, vectors
from bestresponse.checkpoint import Keeper, RunDirectory
from bestresponse.console import Clock, Progress, interrupts
from bestresponse.evaluation import evaluate_fully
from bestresponse.history import COLUMNS, History, Number
from bestresponse.method import Method, Metrics
from bestresponse.problem import Batch, Loss, Problem
from bestresponse.result import Result, Snapshot, Status
from bestresponse.stream import Stream
from bestresponse.watch import Watch, find_in_weights

Callback = Callable[["Event"], object]


def tune(
    problem: Problem,
    method: Method,
    train: Iterable[Batch],
    valid: Iterable[Batch],
    *,
    steps: int,
    seed: int = 0,
    device: torch.device | str | None = None,
    callbacks: Sequence[Callback] = (),
    evaluate: Mapping[str, Iterable[Batch]] | None = None,
    metrics: Mapping[str, Loss] | None = None,
    evaluate_every: int | None = None,
    run_dir: Path | str | None = None,
    resume: bool = False,
    checkpoint_every: int | None = None,
    progress: bool | None = None,
) -> Result:
    """Train a model and tune its hypers in one run.

    Args:
        problem: The model, the space and the two losses. The model itself is left as it is.
        method: How to tune.
        train: Batches for the training loss: a ``DataLoader``, :class:`~bestresponse.Batches` or any re-iterable.
        valid: Batches for the validation loss.
        steps: How many steps in all. On resuming, the steps already done count.
        seed: Of everything random: data order, dropout, the method's draws.
        device: Where to run; by default where the model is.
        callbacks: Functions that get an :class:`Event` at the start, after each step and at the end. One with
            ``state_dict`` and ``load_state_dict`` is saved and resumed with the run.
        evaluate: Loaders by name, such as ``{"test": test_loader}``. The validation loss over all of each is put into
            ``result.metrics``, and every ``evaluate_every`` steps into the history.
        metrics: Further functions with the form of a loss, such as an error rate, to evaluate beside it.
        evaluate_every: Steps between evaluations; by default only at the end.
        run_dir: Where to keep the run: ``run.json``, ``history.jsonl``, ``checkpoint.pt`` and ``result/``.
        resume: Go on with the run in ``run_dir``, if there is one. The outcome is that of a run never interrupted.
        checkpoint_every: Steps between checkpoints; by default a minute.
        progress: Show a progress bar; by default in terminals and notebooks.

    Returns:
        The result. After a loss or hyper became NaN or infinite it holds the last good state, and its ``status`` says
        so. Ctrl-C ends the run after the present step and returns what there is; a second Ctrl-C stops at once.
    """
    preflight.check_arguments(problem, method, steps, seed, callbacks, evaluate, metrics)
    if resume and run_dir is None:
        raise ValueError("resume=True needs the run_dir to resume from")
    if evaluate_every is not None and not evaluate:
        raise ValueError('evaluate_every needs loaders to evaluate: evaluate={"test": test_loader}')
    if evaluate_every is not None and evaluate_every < 1:
        raise ValueError(f"evaluate_every must be at least 1 step; got {evaluate_every}")
    preflight.check_devices(problem.model)
    place = problem.device if device is None else torch.device(device)
    work = dataclasses.replace(problem, model=copy.deepcopy(problem.model).to(place))
    streams = {
        "train": Stream(train, name="train", seed=seed, device=place),
        "valid": Stream(valid, name="valid", seed=seed, device=place),
    }
    watched = {name: Stream(data, name=name, seed=seed, device=place) for name, data in (evaluate or {}).items()}
    with ExitStack() as stack:
        stack.enter_context(torch.random.fork_rng(devices=[place] if place.type == "cuda" else []))
        preflight.check(
            work, method, streams["train"], streams["valid"], list(watched.values()), metrics or {}, problem.model
        )
        _seed(seed, place)
        run = _Run(work, method, streams, watched, metrics or {}, callbacks, evaluate_every, seed)
        directory = RunDirectory(run_dir) if run_dir is not None else None
        run.keeper = _open(run, directory, seed, resume, checkpoint_every)
        run.loop(
            steps, stack.enter_context(Progress(steps, run.state.step, progress)), stack.enter_context(interrupts())
        )
        return run.finish()


def _open(run: _Run, directory: RunDirectory | None, seed: int, resume: bool, every: int | None) -> Keeper:
    """Take up the run in the directory, or begin one there."""
    keeper = Keeper(directory, every, run.problem.device)
    description = _describe(run.problem, run.method, seed)
    if directory is not None and directory.used:
        if not resume:
            raise FileExistsError(
                f"{directory.path} holds a run already. Give resume=True to go on with it, or another run_dir"
            )
        description["method"] = _as_known_to(directory.read_run().get("method", ""), run.method)
        directory.require_same(description)
        if (saved := keeper.load()) is not None:
            run.load_state_dict(saved)
            run.history = keeper.resume(run.state.step)
            return keeper
    if directory is not None:
        directory.write_run({**description, **_circumstances(run.problem.device)})
    keeper.save(run.state.step, run.state_dict())
    return keeper


@final
class Event:
    """What a callback sees.

    Attributes:
        kind: ``"start"`` before the first step, ``"step"`` after each, ``"end"`` when the run is over.
        step: Steps done so far.
        problem: The problem, with the run's own copy of the model.
        method: The method.
        state: The method's state.
        history: All rows so far, this step's included.
        metrics: The evaluation made at this step; empty when none was due.
        columns: The names of all numbers that the history of this run can have.
        evaluated: What is evaluated every ``evaluate_every`` steps, such as ``"valid/loss"``.
        run_dir: The run directory, if there is one.
    """

    def __init__(self, run: _Run, kind: Literal["start", "step", "end"]) -> None:
        self.kind = kind
        self._run = run
        self.step: int = run.state.step
        self.problem = run.problem
        self.method = run.method
        self.state = run.state
        self.history = run.history
        self.metrics = run.metrics
        measures = ("loss", *run.measures) if run.evaluate_every is not None else ()
        self.evaluated = tuple(f"{loader}/{measure}" for loader in run.watched for measure in measures)
        self.columns = (*COLUMNS, *run.method.extras, *run.shown, *self.evaluated)
        self.run_dir = run.keeper.directory.path if run.keeper.directory else None

    def current_row(self) -> dict[str, float | int]:
        """The history's newest row. Reading it waits for the device."""
        return self.history.row() if len(self.history) else {}

    def stop(self, reason: str) -> None:
        """End the run after this step. ``reason`` becomes the result's message."""
        self._run.stopped = reason

    def snapshot(self) -> Snapshot:
        """A copy of the present weights, buffers and hypers."""
        return self._run.snapshot()

    def deploy(self, snapshot: Snapshot) -> None:
        """Make the result of this snapshot rather than of the last step. For the ``"end"`` event."""
        self._run.chosen = snapshot


@final
class _Run:
    """One run while it lasts."""

    keeper: Keeper

    def __init__(
        self,
        problem: Problem,
        method: Method,
        streams: dict[str, Stream],
        watched: dict[str, Stream],
        measures: Mapping[str, Loss],
        callbacks: Sequence[Callback],
        evaluate_every: int | None,
        seed: int,
    ) -> None:
        self.problem = problem
        self.method = method
        self.streams = streams
        self.watched = watched
        self.measures = measures
        self.callbacks = callbacks
        self.evaluate_every = evaluate_every
        self.state = method.init(problem, seed=seed)
        self.history = History()
        self.metrics: dict[str, float] = {}
        self.clock = Clock()
        self.watch = Watch(idle=method.survives_non_finite)
        self.status = Status.FINISHED
        self.message = ""
        self.stopped: str | None = None
        self.chosen: Snapshot | None = None
        self.shown: dict[str, Tensor] = {}

    def loop(self, steps: int, progress: Progress, interrupted: list[int]) -> None:
        """Step until the steps are done, something stops the run, or a number is not finite."""
        self._show_hypers()
        self._call("start")
        self.clock.start()
        finished = cut = False
        done = self.state.step >= steps or self.stopped is not None
        while not done:
            before = self.state.step
            metrics = self.method.step(self.problem, self.state, self.streams["train"], self.streams["valid"])
            finished = metrics.finished
            if self.state.step > before:  # a method that had finished earlier does nothing more
                self._note(metrics)
                self._call("step")
            cut = bool(interrupted)
            done = finished or cut or self.state.step >= steps or self.stopped is not None
            save = self.state.step > before and (done or self.keeper.due(self.state.step))
            if (done or save or progress.due()) and not self._settle(progress, check_weights=save):
                return
            if save:
                with self.clock.paused():
                    self.keeper.save(self.state.step, self.state_dict())
        if self.stopped is not None:
            self.status, self.message = Status.STOPPED, self.stopped
        elif cut and self.state.step < steps and not finished:
            self.status, self.message = Status.INTERRUPTED, f"Interrupted after step {self.state.step}."
            if self.keeper.directory is not None:
                self.message += f" Go on with run_dir={str(self.keeper.directory.path)!r}, resume=True."

    def finish(self) -> Result:
        """Let callbacks have the last word, evaluate, write the result."""
        self.metrics = {}
        self._call("end")
        chosen = self.chosen or self.snapshot()
        if self.status is not Status.NON_FINITE and (wrong := find_in_weights(chosen.step, chosen.params)):
            self.status, self.message = Status.NON_FINITE, f"{wrong} There is no better result: no trial stayed finite."
        result = Result.of(
            self.problem,
            self.method,
            chosen,
            self.state,
            self.status,
            self.message,
            self.history,
            self._evaluate(chosen),
        )
        if self.status is Status.NON_FINITE:
            warnings.warn(self.message, RuntimeWarning, stacklevel=3)
        if self.keeper.directory is not None:
            with self.keeper.forgiving("the result"):
                result.save(self.keeper.directory.path / "result")
        return result

    def snapshot(self) -> Snapshot:
        """A copy of what would be deployed now."""
        return Snapshot(
            self.state.step,
            vectors.clone(self.method.params(self.problem, self.state)),
            vectors.clone(self.state.buffers),
            vectors.clone(self.state.raw),
        )

    def state_dict(self) -> dict[str, Any]:
        """All that a resumed run needs to go on as if it had never stopped."""
        device = self.problem.device
        return {
            "state": self.state.state_dict(),
            "streams": {name: stream.state_dict() for name, stream in self.streams.items()},
            "random": torch.get_rng_state(),
            "random_cuda": torch.cuda.get_rng_state(device) if device.type == "cuda" else None,
            "callbacks": [
                callback.state_dict() if hasattr(callback, "state_dict") else None for callback in self.callbacks
            ],
            "seconds": self.clock.seconds,
        }

    def load_state_dict(self, saved: Mapping[str, Any]) -> None:
        """Go back to a saved place."""
        self.state.load_state_dict(saved["state"])
        for name, stream in self.streams.items():
            stream.load_state_dict(saved["streams"][name])
        torch.set_rng_state(saved["random"].cpu())
        if saved["random_cuda"] is not None and self.problem.device.type == "cuda":
            torch.cuda.set_rng_state(saved["random_cuda"].cpu(), self.problem.device)
        if len(saved["callbacks"]) != len(self.callbacks):
            raise ValueError(
                f"the saved run had {len(saved['callbacks'])} callbacks, and this one has {len(self.callbacks)}: give "
                "the same ones to resume"
            )
        for callback, of_callback in zip(self.callbacks, saved["callbacks"], strict=True):
            if of_callback is not None and hasattr(callback, "load_state_dict"):
                callback.load_state_dict(of_callback)
        self.clock.seconds = saved["seconds"]

    def _note(self, metrics: Metrics) -> None:
        """Put what a step did into the history, evaluating if that is due."""
        step, cost = self.state.step, self.state.cost
        if metrics.moved:
            self._show_hypers()
            self.watch.note(step, self.state.raw)
        row: dict[str, Number | Tensor] = {"step": step}
        if metrics.train_loss is not None:
            row["train_loss"] = metrics.train_loss
        if metrics.valid_loss is not None:
            row["valid_loss"] = metrics.valid_loss
        row["train_batches"] = cost.train_batches
        row["valid_batches"] = cost.valid_batches
        row["gradients"] = cost.gradients
        row["seconds"] = self.clock.seconds
        row.update(metrics.extra)
        row.update(self.shown)
        self.metrics = {}
        if self.evaluate_every is not None and step % self.evaluate_every == 0:
            with self.clock.paused():
                self.metrics = self._evaluate(self.snapshot())
        row.update(self.metrics)
        self.history.append(row)

    def _settle(self, progress: Progress, *, check_weights: bool) -> bool:
        """Read the waiting numbers, check and show them; at one that is not finite, go back to the last good state."""
        rows = self.history.take()
        wrong = self.watch.find(rows)
        if wrong is None and check_weights and not self.method.survives_non_finite:
            wrong = find_in_weights(self.state.step, self.method.params(self.problem, self.state))
        if wrong is None:
            self.keeper.add(rows)
            progress.show(rows)
            return True
        self.status = Status.NON_FINITE
        saved = self.keeper.load()
        if saved is None:
            self.message = f"{wrong} No earlier state could be saved: the result is the present one."
        else:
            self.load_state_dict(saved)
            self.message = f"{wrong} The result is the last good state, after step {self.state.step}."
        return False

    def _show_hypers(self) -> None:
        """One number a hyper for history and progress: its value, or the mean of its values."""
        self.shown = {}
        for name, value in self.problem.space.values(self.state.raw).items():
            if isinstance(value, Tensor) and value.ndim == 0:
                self.shown[name] = value.clone()  # a free hyper's value is raw itself, which moves
            else:
                parts = {name: value} if isinstance(value, Tensor) else value
                self.shown[f"{name}.mean"] = torch.stack([p.sum() for p in parts.values()]).sum() / vectors.numel(parts)

    def _evaluate(self, snapshot: Snapshot) -> dict[str, float]:
        return evaluate_fully(
            self.problem, snapshot.params, snapshot.buffers, snapshot.raw, self.watched, self.measures
        )

    def _call(self, kind: Literal["start", "step", "end"]) -> None:
        if self.callbacks:
            event = Event(self, kind)
            with self.clock.paused():
                for callback in self.callbacks:
                    callback(event)


def _seed(seed: int, device: torch.device) -> None:
    torch.default_generator.manual_seed(seed)
    if device.type == "cuda":
        with torch.cuda.device(device):
            torch.cuda.manual_seed(seed)


def _describe(problem: Problem, method: Method, seed: int) -> dict[str, Any]:
    """What makes two runs the same run."""
    return {
        "method": _without_addresses(method),
        "space": problem.space.describe(),
        "seed": seed,
        "weights": {name: list(p.shape) for name, p in problem.params().items()},
    }


def _without_addresses(value: object) -> str:
    return re.sub(r" at 0x[0-9a-f]+", "", repr(value))


def _as_known_to(saved: str, method: Any) -> str:
    """The method as it is written, without arguments that a run of an earlier version did not have yet.

    Such an argument is left out if it is not named there, and stands at its default here.
    """
    if not dataclasses.is_dataclass(method):
        return _without_addresses(method)
    known = []
    for f in dataclasses.fields(method):
        value = getattr(method, f.name)
        default = f.default if f.default_factory is dataclasses.MISSING else f.default_factory()
        if f.repr and (f"{f.name}=" in saved or value != default):
            known.append(f"{f.name}={_without_addresses(value)}")
    return f"{type(method).__qualname__}({', '.join(known)})"


def _circumstances(device: torch.device) -> dict[str, Any]:
    return {
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
        "device": str(device) if device.type == "cpu" else f"{device} ({torch.cuda.get_device_name(device)})",
        "versions": {
            "bestresponse": version("bestresponse"),
            "torch": torch.__version__,
            "python": platform.python_version(),
        },
    }

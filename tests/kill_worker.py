"""Runs that are killed, interrupted or starved of disk, each in a process of its own.

``python kill_worker.py DTYPE DEVICE`` loads torch once, and then forks a process for each request: a line of JSON with
the name of a function below and its arguments. Answers are lines of JSON too: what the process says of itself, and at
last ``{"ended": exit code}``.
"""

from __future__ import annotations

import itertools
import json
import os
import resource
import signal
import sys
import time
import traceback
import warnings
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from types import FrameType
from typing import Any

import torch

import bestresponse as br
from bestresponse.testing import Case, net_problem

sys.path.append(str(Path(__file__).parent / "methods"))
from cases import CASES  # the list that the contract goes through

PATIENCE = 20  # seconds that are waited for what should come at once


def run(case: Case, directory: Path | str | None, *callbacks: Callable[[br.Event], object], **arguments: Any) -> Any:
    """The run that all tests of killing share: the same from every process, whatever its random numbers."""
    with torch.random.fork_rng():
        torch.manual_seed(0)
        problem, train, valid = net_problem(batch_norm=case.batch_norm)
    arguments = {"steps": case.short_steps, "checkpoint_every": 3, "run_dir": directory, **arguments}
    return br.tune(
        problem, case.short or case.method, train, valid, callbacks=callbacks or [lambda event: None], **arguments
    )


def assert_same_run(first: br.Result, second: br.Result) -> None:
    """Bit for bit: hypers, weights, buffers, and all of the history but its seconds."""
    assert first.step == second.step
    assert first.raw.keys() == second.raw.keys()
    for name, leaf in first.raw.items():
        assert torch.equal(leaf, second.raw[name]), name
    ours, theirs = first.model.state_dict(), second.model.state_dict()
    assert ours.keys() == theirs.keys()
    for name, tensor in ours.items():
        assert torch.equal(tensor, theirs[name]), name
    assert without_seconds(first.history) == without_seconds(second.history)
    assert first.metrics == second.metrics


def without_seconds(history: br.History) -> list[dict[str, float | int]]:
    return [{name: number for name, number in row.items() if name != "seconds"} for row in history.rows()]


def say(**what: Any) -> None:
    os.write(1, (json.dumps(what) + "\n").encode())


def killed(case: int, directory: str, at: int) -> None:
    """A run that dies in the middle of step ``at``: after the step, before anything of it is saved."""

    def die(event: br.Event) -> None:
        if event.kind == "step" and event.step == at:
            os.kill(os.getpid(), signal.SIGKILL)

    run(CASES[case], directory, die, resume=True)


def sitting(case: int, directory: str, steps: int) -> None:
    """One of many sittings of a run that saves every step, to be killed from outside."""
    run(
        CASES[case],
        directory,
        lambda event: say(began=event.step) if event.kind == "start" else None,
        resume=True,
        steps=steps,
        checkpoint_every=1,
    )


def crash(case: int, directory: str, steps: int, at: int) -> None:
    """A run that saves every step and dies just before its ``at``-th dealing with a file.

    What was written and not yet flushed to disk may be lost; of the file it is about to flush, the last bytes are.
    """
    dealings: list[str] = []

    def deal(event: str, *paths: object, file: int | None = None) -> None:
        if event in {"open", "os.rename", "os.mkdir", "fsync"} and any(directory in str(path) for path in paths):
            dealings.append(event)
            if len(dealings) == at:
                if file is not None:
                    os.ftruncate(file, max(0, os.fstat(file).st_size - 5))
                os.kill(os.getpid(), signal.SIGKILL)

    def flush(file: int) -> None:
        deal("fsync", directory, file=file)
        fsync(file)

    fsync, os.fsync = os.fsync, flush
    sys.addaudithook(lambda event, arguments: deal(event, *arguments))
    run(CASES[case], directory, steps=steps, checkpoint_every=1)
    say(dealings=dealings)


def interrupted(case: int, directory: str, at: int, presses: int) -> None:
    """A run that waits in step ``at`` for Ctrl-C to be pressed, as often as it says."""
    before = signal.getsignal(signal.SIGINT)

    def wait(event: br.Event) -> None:
        if event.kind == "step" and event.step == at:
            say(waiting=1)
            until = time.monotonic() + PATIENCE
            while signal.getsignal(signal.SIGINT) is not before and time.monotonic() < until:
                time.sleep(0.002)
            if presses > 1:
                say(waiting=2)
                time.sleep(PATIENCE)

    ended: dict[str, Any]
    try:
        result = run(CASES[case], directory, wait, checkpoint_every=None)
        ended = {"status": result.status.name, "message": result.message, "step": result.step}
    except KeyboardInterrupt:
        ended = {"status": "KeyboardInterrupt"}
    say(**ended, restored=signal.getsignal(signal.SIGINT) is before)


def pressed_at_line(case: int, directory: str, line: int) -> None:
    """A run in which Ctrl-C is pressed as its loop comes to its ``line``-th line."""
    lines = itertools.count(1)

    def trace(frame: FrameType, event: str, argument: object) -> Any:
        if frame.f_code.co_name != "loop" or not frame.f_code.co_filename.endswith("tune.py"):
            return None
        if event == "line" and next(lines) == line:
            os.kill(os.getpid(), signal.SIGINT)
        return trace

    sys.settrace(trace)
    result = run(CASES[case], directory, checkpoint_every=None)
    sys.settrace(None)
    say(status=result.status.name, step=result.step, lines=next(lines) - 1)


def starved(case: int, directory: str, steps: int, limit: int, begin: int, end: int) -> None:
    """A run that saves every step, in which files longer than ``limit`` cannot be written between two steps.

    A ``limit`` below zero is counted from the size of the last checkpoint. ``begin`` beyond ``steps`` spares the steps,
    and starves the end of the run.
    """

    def starve(event: br.Event) -> None:
        if (event.kind == "step" and event.step == begin) or (event.kind == "end" and begin > steps):
            size = limit if limit >= 0 else (Path(directory) / "checkpoint.pt").stat().st_size + limit
            resource.setrlimit(resource.RLIMIT_FSIZE, (size, resource.RLIM_INFINITY))
        if event.kind == "step" and event.step == end:
            resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))

    try:
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always")
            result = run(CASES[case], directory, starve, steps=steps, checkpoint_every=1)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    say(status=result.status.name, step=result.step, warnings=[str(warning.message) for warning in caught])


RUNS = {run.__name__: run for run in (killed, sitting, crash, interrupted, pressed_at_line, starved)}


@contextmanager
def _answered() -> Iterator[None]:
    """Whatever happens in a forked process, it ends here."""
    code = 1
    try:
        yield
        code = 0
    except BaseException:
        traceback.print_exc()
    finally:
        sys.stderr.flush()
        os._exit(code)


def serve(dtype: str, device: str) -> None:
    torch.set_num_threads(1)
    torch.set_default_dtype(getattr(torch, dtype))
    signal.signal(signal.SIGINT, signal.default_int_handler)  # a process in the background may have begun without
    weight = torch.ones(1, requires_grad=True)
    weight.grad = torch.ones(1)
    torch.optim.Adam([weight]).step()  # what torch imports late is imported once, here
    for line in sys.stdin:
        request = json.loads(line)
        if not (pid := os.fork()):
            with _answered():
                say(pid=os.getpid())
                torch.set_default_device(device)
                RUNS[request.pop("run")](**request)
        say(ended=os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]))


if __name__ == "__main__":
    serve(*sys.argv[1:])

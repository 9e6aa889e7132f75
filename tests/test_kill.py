"""Killed, interrupted or out of disk: a resumed run equals one that was left alone, bit for bit."""

from __future__ import annotations

import itertools
import json
import os
import random
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from kill_worker import CASES, PATIENCE, assert_same_run, run

import bestresponse as br

pytestmark = pytest.mark.skipif(not hasattr(os, "fork"), reason="needs fork and its signals")

each_case = pytest.mark.parametrize("number", range(len(CASES)), ids=[str(case) for case in CASES])
NET = next(i for i, case in enumerate(CASES) if case.name == "luketina2016")


class Worker:
    """The process that forks the runs."""

    def __init__(self, dtype: str, device: str) -> None:
        script = Path(__file__).with_name("kill_worker.py")
        self.process = subprocess.Popen(
            [sys.executable, str(script), dtype, device], stdin=subprocess.PIPE, stdout=subprocess.PIPE, bufsize=0
        )
        self.pid = 0
        self.running = False

    def begin(self, run: str, **request: Any) -> None:
        assert self.process.stdin is not None
        self.process.stdin.write((json.dumps({"run": run, **request}, default=str) + "\n").encode())
        self.pid = self.hear("pid")["pid"]
        self.running = True

    def hear(self, *keys: str) -> dict[str, Any]:
        """Everything said until one of these has been."""
        said: dict[str, Any] = {}
        while not said.keys() & set(keys):
            ready, _, _ = select.select([self.process.stdout], [], [], 3 * PATIENCE)
            assert ready, f"the worker is silent; it said {said}"
            assert self.process.stdout is not None
            line = self.process.stdout.readline()
            assert line, "the worker is gone"
            said |= json.loads(line)
            self.running = "ended" not in said
            assert keys == ("ended",) or "ended" not in said, f"the run ended: {said}"
        return said

    def do(self, run: str, **request: Any) -> dict[str, Any]:
        self.begin(run, **request)
        return self.hear("ended")

    def signal(self, number: signal.Signals) -> None:
        with suppress(ProcessLookupError):  # it may have finished a moment ago
            os.kill(self.pid, number)


@pytest.fixture(scope="module")
def worker(pytestconfig: pytest.Config) -> Iterator[Worker]:
    worker = Worker(pytestconfig.getoption("--dtype"), pytestconfig.getoption("--device"))
    with worker.process as process:
        yield worker
        if worker.running:  # a test has failed in the middle of a run
            os.kill(worker.pid, signal.SIGKILL)
        process.communicate(timeout=PATIENCE)


def saved_step(directory: Path) -> int:
    step: int = torch.load(directory / "checkpoint.pt", weights_only=True)["state"]["step"]
    return step


def history_steps(directory: Path) -> list[int]:
    """The steps in the file; every line of it must be whole."""
    data = (directory / "history.jsonl").read_bytes()
    assert data == b"" or data.endswith(b"\n")
    return [json.loads(line)["step"] for line in data.splitlines()]


@each_case
def test_killed_twice_at_random_steps(number: int, worker: Worker, tmp_path: Path) -> None:
    case = CASES[number]
    kills = sorted(random.SystemRandom().sample(range(1, case.short_steps + 1), 2))
    print(f"killed at steps {kills}")  # noqa: T201 - shown when the test fails
    for at in kills:
        assert worker.do("killed", case=number, directory=tmp_path / "run", at=at)["ended"] == -signal.SIGKILL
        assert saved_step(tmp_path / "run") == (at - 1) // 3 * 3
    resumed = run(case, tmp_path / "run", resume=True)
    assert_same_run(run(case, None), resumed)
    assert history_steps(tmp_path / "run") == list(range(1, resumed.step + 1))


def test_killed_again_and_again_from_outside(worker: Worker, tmp_path: Path) -> None:
    """The kills come at any moment: while loading, in a step, within the writing of a file."""
    steps, kills = 250, 0
    moments = random.SystemRandom()
    while True:
        worker.begin("sitting", case=NET, directory=tmp_path, steps=steps)
        if kills < 12:
            if kills % 2:
                worker.hear("began")
            time.sleep(moments.uniform(0.0, 0.05))
            worker.signal(signal.SIGKILL)
        ended = worker.hear("ended")["ended"]
        if ended == 0:
            break
        assert ended == -signal.SIGKILL
        kills += 1
    assert kills, "the run was too short to be killed"
    assert_same_run(run(CASES[NET], None, steps=steps), run(CASES[NET], tmp_path, steps=steps, resume=True))


def test_killed_before_each_dealing_with_a_file(worker: Worker, tmp_path: Path) -> None:
    """Every state that the files pass through can be resumed: whatever is there, the run comes out the same."""
    steps = 2
    uninterrupted = run(CASES[NET], None, steps=steps)
    for at in itertools.count(1):
        directory = tmp_path / str(at)
        said = worker.do("crash", case=NET, directory=directory, steps=steps, at=at)
        assert_same_run(uninterrupted, run(CASES[NET], directory, steps=steps, resume=True))
        assert history_steps(directory) == [1, 2]
        if said["ended"] == 0:
            break
        assert said["ended"] == -signal.SIGKILL
    # Opened, flushed and renamed: run.json and three checkpoints. Opened and flushed: the history, three times.
    assert len(said["dealings"]) == at - 1
    assert said["dealings"].count("fsync") >= 4 + 3
    assert said["dealings"].count("os.rename") >= 4


def test_ctrl_c_ends_the_run_after_the_step(worker: Worker, tmp_path: Path) -> None:
    worker.begin("interrupted", case=NET, directory=tmp_path, at=5, presses=1)
    worker.hear("waiting")
    worker.signal(signal.SIGINT)
    said = worker.hear("ended")
    assert said["ended"] == 0
    assert (said["status"], said["step"], said["restored"]) == ("INTERRUPTED", 5, True)
    assert f"run_dir={str(tmp_path)!r}, resume=True" in said["message"]
    assert saved_step(tmp_path) == 5
    assert history_steps(tmp_path) == [1, 2, 3, 4, 5]
    assert (tmp_path / "result" / "model.safetensors").exists()
    assert_same_run(run(CASES[NET], None), run(CASES[NET], tmp_path, resume=True))


def test_second_ctrl_c_stops_at_once(worker: Worker, tmp_path: Path) -> None:
    worker.begin("interrupted", case=NET, directory=tmp_path, at=5, presses=2)
    for _ in range(2):
        worker.hear("waiting")
        worker.signal(signal.SIGINT)
    said = worker.hear("ended")
    assert (said["ended"], said["status"], said["restored"]) == (0, "KeyboardInterrupt", True)
    assert saved_step(tmp_path) == 0
    assert_same_run(run(CASES[NET], None), run(CASES[NET], tmp_path, resume=True))


def test_ctrl_c_at_any_line_of_the_loop_saves_the_last_step(worker: Worker, tmp_path: Path) -> None:
    """Between two lines of the loop there is no moment at which a Ctrl-C loses a step that was done."""
    at: dict[int, int] = {}
    while 4 not in at.values():
        line = len(at) + 1
        directory = tmp_path / str(line)
        said = worker.do("pressed_at_line", case=NET, directory=directory, line=line)
        assert (said["ended"], said.get("status")) == (0, "INTERRUPTED"), f"pressed at line event {line}: {said}"
        at[line] = said["step"]
        steps = list(range(1, said["step"] + 1))
        assert (saved_step(directory), history_steps(directory)) == (said["step"], steps), f"line event {line}"
    assert set(at.values()) >= {1, 2, 3, 4}
    assert_same_run(run(CASES[NET], None), run(CASES[NET], tmp_path / str(line), resume=True))


@pytest.mark.parametrize("limit", [10, 1_000, 2_500, 10_000, -1], ids=lambda limit: f"{limit} bytes")
def test_full_disk_for_a_while(limit: int, worker: Worker, tmp_path: Path) -> None:
    """From step 3 on files cannot grow beyond the limit; from step 7 on they can."""
    said = worker.do("starved", case=NET, directory=tmp_path, steps=10, limit=limit, begin=3, end=7)
    assert (said["ended"], said.get("status"), said.get("step")) == (0, "FINISHED", 10), said
    assert said["warnings"]
    for warning in said["warnings"]:
        assert str(tmp_path) in warning
        assert "is the last one saved" in warning
    assert saved_step(tmp_path) == 10
    assert history_steps(tmp_path) == list(range(1, 11))
    assert not list(tmp_path.glob(".*")), "a failed write left its temporary file"
    assert_same_run(run(CASES[NET], None, steps=10), run(CASES[NET], tmp_path, steps=10, resume=True))


def test_full_disk_until_the_end_keeps_what_was_saved(worker: Worker, tmp_path: Path) -> None:
    said = worker.do("starved", case=NET, directory=tmp_path, steps=10, limit=10, begin=6, end=100)
    assert (said["ended"], said.get("status"), said.get("step")) == (0, "FINISHED", 10), said
    assert all("step 5 is the last one saved" in warning for warning in said["warnings"])
    assert saved_step(tmp_path) == 5
    assert_same_run(run(CASES[NET], None, steps=10), run(CASES[NET], tmp_path, steps=10, resume=True))


def test_full_disk_at_the_very_end_does_not_cost_the_result(worker: Worker, tmp_path: Path) -> None:
    said = worker.do("starved", case=NET, directory=tmp_path, steps=4, limit=10, begin=5, end=5)
    assert (said["ended"], said.get("status"), said.get("step")) == (0, "FINISHED", 4), said
    assert ["could not write the result" in warning for warning in said["warnings"]] == [True]
    assert saved_step(tmp_path) == 4
    again = run(CASES[NET], tmp_path, steps=4, resume=True)  # there is space again: now it is written
    assert (tmp_path / "result" / "model.safetensors").exists()
    assert_same_run(run(CASES[NET], None, steps=4), again)


def test_worker_sees_the_problem_this_process_sees(worker: Worker, tmp_path: Path) -> None:
    """What all of the above stands on: a run in a forked process is a run in this one."""
    assert worker.do("sitting", case=NET, directory=tmp_path, steps=6)["ended"] == 0
    resumed = run(CASES[NET], tmp_path, steps=6, resume=True)
    assert isinstance(resumed, br.Result)
    assert_same_run(run(CASES[NET], None, steps=6), resumed)

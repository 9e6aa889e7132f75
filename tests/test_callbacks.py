"""Callbacks: what they see, what they may do, and that they are resumed with the run."""

from __future__ import annotations

import csv
import errno
import os
import sys
from collections.abc import Mapping
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kill_worker import assert_same_run
from torch import Tensor, nn
from torch.optim import SGD

import bestresponse as br
from bestresponse.callbacks import csv_writer, early_stop, keep_best, tensorboard_writer
from bestresponse.history import COLUMNS
from bestresponse.testing import net_problem

T1T2 = br.methods.luketina2016()


def run(steps: int, *callbacks: Any, **arguments: Any) -> br.Result:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        problem, train, valid = net_problem()
    return br.tune(problem, T1T2, train, valid, steps=steps, callbacks=callbacks, **arguments)


def scripted(losses: Mapping[int, float], *callbacks: Any, steps: int = 20, **arguments: Any) -> br.Result:
    """A run whose only weight is the number of steps done, and whose full validation loss is written down here."""

    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.count = nn.Parameter(torch.zeros(()))

    def valid_loss(model: Any, batch: Any, hyper: Any) -> Tensor:
        return losses.get(round(model.count.item()), 9.0) + 0 * model.count

    problem = br.Problem(
        Counter(),
        br.Space(unused=br.Hyper(0.0)),
        lambda model, batch, hyper: -model.count + 1e-300 * hyper["unused"],
        valid_loss,
    )
    method = br.Implicit(br.Identity(), schedule=br.Alternate(warmup=10**9), optimizer=partial(SGD, lr=1.0))
    data = [torch.zeros(1)]
    arguments = {"evaluate": {"valid": data}, "evaluate_every": 1, **arguments}
    return br.tune(problem, method, data, data, steps=steps, callbacks=callbacks, **arguments)


def test_script_is_what_the_run_does() -> None:
    """What the tests below stand on."""
    result = scripted({1: 0.5, 2: 0.25, 3: 0.75}, steps=3)
    assert result.history["valid/loss"] == [0.5, 0.25, 0.75]
    assert result.model.count == 3
    assert result.metrics == {"valid/loss": 0.75}


# ---------------------------------------------------------------------------------------------------- a plain function


def test_callback_sees_the_start_every_step_and_the_end(tmp_path: Path) -> None:
    events: list[tuple[str, int]] = []

    def note(event: br.Event) -> None:
        events.append((event.kind, event.step))

    run(4, note, run_dir=tmp_path)
    assert events == [("start", 0), ("step", 1), ("step", 2), ("step", 3), ("step", 4), ("end", 4)]
    events.clear()
    run(6, note, run_dir=tmp_path, resume=True)
    assert events == [("start", 4), ("step", 5), ("step", 6), ("end", 6)]


def test_callback_sees_the_run(tmp_path: Path) -> None:
    seen = []

    def look(event: br.Event) -> None:
        assert event.method is T1T2
        assert event.problem.model.training
        assert event.run_dir == tmp_path
        assert event.state.step == event.step == len(event.history)
        assert event.evaluated == ("test/loss",)
        assert event.columns == (*COLUMNS, "residual", "decay.mean", "layer.mean", "smooth", "test/loss")
        if event.kind != "step":
            assert event.metrics == {}
            return
        row = event.current_row()
        assert row["step"] == event.step
        assert row["smooth"] == event.problem.space.values(event.state.raw)["smooth"].item()
        assert event.metrics == ({"test/loss": row["test/loss"]} if event.step % 2 == 0 else {})
        seen.append(row)

    valid = net_problem()[2]
    result = run(5, look, run_dir=tmp_path, evaluate={"test": valid}, evaluate_every=2)
    assert seen == list(result.history.rows())


def test_callback_of_a_bare_run_sees_that_there_is_nothing() -> None:
    def look(event: br.Event) -> None:
        assert event.run_dir is None
        assert event.evaluated == ()
        assert event.metrics == {}
        assert bool(event.current_row()) == (event.kind != "start")

    run(1, look, evaluate={"test": net_problem()[2]})


def test_callback_leaves_the_run_as_it_is() -> None:
    def look(event: br.Event) -> None:
        event.snapshot()
        event.current_row()

    assert_same_run(run(6), run(6, look))


def test_stop_ends_the_run_with_its_reason(tmp_path: Path) -> None:
    def stop(event: br.Event) -> None:
        if event.kind == "step" and event.step == 3:
            event.stop("Enough is enough.")

    result = run(8, stop, run_dir=tmp_path)
    assert result.status is br.Status.STOPPED
    assert result.message == "Enough is enough."
    assert (result.step, len(result.history)) == (3, 3)
    assert_same_run(run(3), result)
    # It was saved, and can go on.
    assert_same_run(run(8), run(8, lambda event: None, run_dir=tmp_path, resume=True))


def test_stop_before_the_first_step() -> None:
    result = run(8, lambda event: event.stop("Not today."))
    assert (result.status, result.step, result.message) == (br.Status.STOPPED, 0, "Not today.")


def test_deploy_makes_the_result_of_another_step() -> None:
    taken: list[Any] = []

    def choose(event: br.Event) -> None:
        if event.kind == "step" and event.step == 3:
            taken.append(event.snapshot())
        if event.kind == "end":
            event.deploy(taken[0])

    valid = net_problem()[2]
    result = run(8, choose, evaluate={"test": valid})
    third = run(3, evaluate={"test": valid})
    assert result.step == 3
    assert len(result.history) == 8
    assert result.metrics == third.metrics
    for name, leaf in third.raw.items():
        assert torch.equal(leaf, result.raw[name]), name
    assert torch.equal(third.values["smooth"], result.values["smooth"])
    for name, tensor in third.model.state_dict().items():
        assert torch.equal(tensor, result.model.state_dict()[name]), name


@pytest.mark.parametrize("kind", ["start", "step", "end"])
def test_callback_that_raises_leaves_a_run_to_resume(kind: str, tmp_path: Path) -> None:
    def fail(event: br.Event) -> None:
        if event.kind == kind and event.step in {0, 5, 8}:
            raise ZeroDivisionError

    random = torch.get_rng_state()
    with pytest.raises(ZeroDivisionError):
        run(8, fail, run_dir=tmp_path, checkpoint_every=2)
    assert torch.equal(torch.get_rng_state(), random)
    assert_same_run(run(8), run(8, lambda event: None, run_dir=tmp_path, resume=True))


@pytest.mark.parametrize("callbacks", [[], [print, early_stop("train_loss")]], ids=["fewer", "more"])
def test_other_number_of_callbacks_is_refused_on_resuming(callbacks: list[Any], tmp_path: Path) -> None:
    run(3, early_stop("train_loss"), run_dir=tmp_path)
    before = {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()}
    with pytest.raises(ValueError, match=rf"had 1 callbacks, and this one has {len(callbacks)}: give the same"):
        run(5, *callbacks, run_dir=tmp_path, resume=True)
    assert {path: path.read_bytes() for path in tmp_path.rglob("*") if path.is_file()} == before


def test_several_callbacks_keep_their_own_states(tmp_path: Path) -> None:
    class Count:
        def __init__(self) -> None:
            self.count = 0

        def __call__(self, event: br.Event) -> None:
            self.count += event.kind == "step"

        def state_dict(self) -> dict[str, int]:
            return {"count": self.count}

        def load_state_dict(self, saved: Mapping[str, int]) -> None:
            self.count = saved["count"]

    first = Count()
    run(4, first, lambda event: None, run_dir=tmp_path)
    second = Count()
    run(6, second, lambda event: None, run_dir=tmp_path, resume=True)
    assert (first.count, second.count) == (4, 6)


# --------------------------------------------------------------------------------------------------------- early_stop


@pytest.mark.parametrize(
    ("losses", "patience", "min_delta", "stops_at"),
    [
        ([5, 4, 3, 3, 3, 3, 3], 3, 0.0, 6),  # as good as the best is not better
        ([5, 4, 6, 6, 3, 6, 6, 6, 6], 3, 0.0, 8),  # a new best begins anew
        ([5, 6], 1, 0.0, 2),
        ([5, 4.5, 4.2, 3.9, 3.5], 2, 1.0, 3),  # slow progress is none
        ([5, 4.5, 3.9, 3.5, 2.5, 2.4, 2.3], 2, 1.0, 7),  # each compared with the last one that counted
        ([5, 4, 3, 2, 1], 1, 0.0, None),
    ],
)
def test_early_stop(losses: list[float], patience: int, min_delta: float, stops_at: int | None) -> None:
    script = dict(enumerate(losses, 1))
    result = scripted(script, early_stop(patience=patience, min_delta=min_delta), steps=len(losses))
    if stops_at is None:
        assert (result.status, result.step) == (br.Status.FINISHED, len(losses))
        return
    assert (result.status, result.step) == (br.Status.STOPPED, stops_at)
    assert f"for {patience} values (early_stop)" in result.message
    assert "valid/loss" in result.message


def test_early_stop_counts_evaluations_not_steps() -> None:
    result = scripted({2: 1.0}, early_stop(patience=3), evaluate_every=2)
    assert (result.status, result.step) == (br.Status.STOPPED, 8)


def test_early_stop_on_a_column_of_every_step() -> None:
    result = scripted({}, early_stop("train_loss", patience=2), steps=5, evaluate_every=None)
    assert result.status is br.Status.FINISHED  # the training loss of the counter falls for ever
    result = scripted({}, early_stop("gradients", patience=2), steps=5, evaluate_every=None)
    assert (result.status, result.step) == (br.Status.STOPPED, 3)  # and this column rises


@pytest.mark.parametrize("stop_at", range(1, 6))
def test_early_stop_resumed_in_mid_patience(stop_at: int, tmp_path: Path) -> None:
    script = {1: 5.0, 2: 1.0}  # and 9 from then on: patience runs out at step 6
    assert scripted(script, early_stop(patience=4)).step == 6
    assert scripted(script, early_stop(patience=4), steps=stop_at, run_dir=tmp_path).step == stop_at
    resumed = scripted(script, early_stop(patience=4), run_dir=tmp_path, resume=True)
    assert (resumed.status, resumed.step) == (br.Status.STOPPED, 6)


def test_early_stop_needs_what_it_looks_at() -> None:
    with pytest.raises(ValueError, match="patience must be at least 1; got 0"):
        early_stop(patience=0)
    for arguments in ({"evaluate_every": None}, {"evaluate": {"test": [torch.zeros(1)]}}):
        with pytest.raises(ValueError, match=r'early_stop\(on=.valid/loss.\).*evaluate=\{"valid": loader\}'):
            scripted({}, early_stop(), **arguments)


# ---------------------------------------------------------------------------------------------------------- keep_best


@pytest.mark.parametrize(
    ("script", "every", "best"),
    [
        ({1: 5.0, 2: 3.0, 3: 4.0}, 1, 2),
        ({1: 5.0, 2: 3.0, 3: 3.0, 4: 2.0, 5: 2.0}, 1, 4),  # of equals the first
        ({1: 0.0, 2: 3.0, 3: 0.0, 4: 2.0}, 2, 4),  # only what was evaluated counts
        ({20: 1.0}, 1, 20),
        ({1: 1.0}, 1, 1),
    ],
)
def test_keep_best(script: dict[int, float], every: int, best: int) -> None:
    result = scripted(script, keep_best(), evaluate_every=every)
    assert result.step == best
    assert result.model.count == best
    assert result.metrics == {"valid/loss": script[best]}
    assert (result.status, len(result.history)) == (br.Status.FINISHED, 20)


def test_keep_best_is_the_best_of_the_history_and_true() -> None:
    """Weights, buffers and hypers that belong together: they give the loss the history has for that step."""
    problem, train, valid = net_problem()
    method = br.methods.luketina2016(optimizer=partial(SGD, lr=2.0))  # jumps about
    result = br.tune(
        problem, method, train, valid, steps=20, callbacks=[keep_best()], evaluate={"valid": valid}, evaluate_every=1
    )
    losses = result.history["valid/loss"]
    best = min(range(20), key=losses.__getitem__)
    assert 0 < best < 19, "the last or first step shows nothing"
    assert result.step == best + 1
    assert result.metrics["valid/loss"] == losses[best]
    x, y = valid.tensors
    with torch.no_grad():
        own = nn.functional.cross_entropy(result.model.eval()(x), y).item()
    assert own == pytest.approx(losses[best])
    assert result.values["smooth"].item() == result.history["smooth"][best]


@pytest.mark.parametrize("stop_at", [1, 4, 5, 9])
def test_keep_best_survives_resuming(stop_at: int, tmp_path: Path) -> None:
    script = {1: 5.0, 4: 1.0, 8: 3.0}
    scripted(script, keep_best(), steps=stop_at, run_dir=tmp_path)
    resumed = scripted(script, keep_best(), steps=12, run_dir=tmp_path, resume=True)
    assert (resumed.step, resumed.model.count.item(), resumed.metrics) == (4, 4.0, {"valid/loss": 1.0})
    assert len(resumed.history) == 12


def test_keep_best_without_any_evaluation_deploys_the_last_step() -> None:
    result = scripted({}, keep_best(), steps=3, evaluate_every=5)
    assert result.step == 3


@pytest.mark.parametrize("arguments", [{"evaluate_every": None}, {"evaluate": {"test": [torch.zeros(1)]}}])
def test_keep_best_needs_an_evaluation(arguments: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=r'keep_best\(on=.valid/loss.\).*evaluate=\{"valid": loader\}'):
        scripted({}, keep_best(), **arguments)


@pytest.mark.parametrize(
    "callback",
    [keep_best("valid_loss"), keep_best("loss"), keep_best("valid/los"), early_stop("valid/los")],
    ids=lambda callback: f"{type(callback).__name__} {callback.on}",
)
def test_misspelt_number_is_not_waited_for_in_silence(callback: Any) -> None:
    with pytest.raises((KeyError, ValueError), match=callback.on):
        scripted({}, callback, steps=3)


def test_early_stop_and_keep_best_go_together() -> None:
    result = scripted({3: 1.0}, early_stop(patience=4), keep_best())
    assert (result.status, result.step, result.state.step) == (br.Status.STOPPED, 3, 7)


# ----------------------------------------------------------------------------------------------------------- writers


def test_csv_writer(tmp_path: Path) -> None:
    valid = net_problem()[2]
    result = run(5, csv_writer(tmp_path / "history.csv"), evaluate={"test": valid}, evaluate_every=2)
    with (tmp_path / "history.csv").open(newline="") as file:
        rows = list(csv.DictReader(file))
    assert list(rows[0]) == result.history.columns
    read = [{name: float(text) for name, text in row.items() if text} for row in rows]
    assert read == list(result.history.rows())
    assert [row["test/loss"] == "" for row in rows] == [True, False, True, False, True]


def test_csv_writer_into_a_folder_that_is_not_there_yet(tmp_path: Path) -> None:
    """Found out at the end only, it would cost the result."""
    run(2, csv_writer(tmp_path / "out" / "history.csv"))
    assert (tmp_path / "out" / "history.csv").exists()


def test_csv_writer_that_cannot_write_is_an_error_before_the_run(tmp_path: Path) -> None:
    steps: list[int] = []
    with pytest.raises(IsADirectoryError, match=str(tmp_path)):
        run(2, csv_writer(tmp_path), lambda event: steps.append(event.step))
    assert steps == []


def test_csv_writer_on_a_full_disk_costs_a_warning_and_not_the_result(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fill_the_disk(event: br.Event) -> None:
        def full(file: int) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        if event.kind == "end":
            monkeypatch.setattr(os, "fsync", full)

    with pytest.warns(RuntimeWarning, match=r"could not write .*history\.csv: .*" + os.strerror(errno.ENOSPC)):
        result = run(3, fill_the_disk, csv_writer(tmp_path / "history.csv"))
    assert result.step == 3
    assert [path.name for path in tmp_path.iterdir()] == ["history.csv"]  # and no temporary file


def test_csv_writer_has_all_of_a_resumed_run(tmp_path: Path) -> None:
    run(3, csv_writer(tmp_path / "history.csv"), run_dir=tmp_path / "run")
    run(5, csv_writer(tmp_path / "history.csv"), run_dir=tmp_path / "run", resume=True)
    with (tmp_path / "history.csv").open(newline="") as file:
        assert [row["step"] for row in csv.DictReader(file)] == ["1", "2", "3", "4", "5"]


@pytest.mark.filterwarnings("ignore::DeprecationWarning:tensorboard")
@pytest.mark.filterwarnings("ignore::DeprecationWarning:google")
def test_tensorboard_writer(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    valid = net_problem()[2]
    result = run(7, tensorboard_writer(tmp_path, every=3), evaluate={"test": valid}, evaluate_every=2)
    read = EventAccumulator(str(tmp_path))
    read.Reload()
    assert set(read.Tags()["scalars"]) == set(result.history.columns) - {"step"}
    for name in read.Tags()["scalars"]:
        expected = [row for row in result.history.rows() if row["step"] in {2, 3, 4, 6} and name in row]
        events = read.Scalars(name)
        assert [event.step for event in events] == [row["step"] for row in expected], name
        assert [event.value for event in events] == pytest.approx([row[name] for row in expected], rel=1e-6), name


@pytest.mark.parametrize("missing", ["tensorboard", "torch.utils.tensorboard"])
def test_tensorboard_that_is_missing(missing: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "tensorboard", None)
    monkeypatch.delitem(sys.modules, "torch.utils.tensorboard", raising=False)
    with pytest.raises(ModuleNotFoundError, match=r"needs tensorboard.*pip install 'bestresponse\[tensorboard\]'"):
        tensorboard_writer(tmp_path / "board")
    assert not (tmp_path / "board").exists()

"""What a run keeps on disk: whole at any time, true, refused where it does not fit, and readable for ever."""

from __future__ import annotations

import errno
import json
import os
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from kill_worker import assert_same_run, without_seconds
from torch import Tensor, nn
from torch.optim import Adam
from torch.optim.lr_scheduler import CosineAnnealingLR

import bestresponse as br
from bestresponse.testing import net_problem

T1T2 = br.methods.luketina2016(
    optimizer=partial(Adam, lr=1e-2),
    lr_schedule=partial(CosineAnnealingLR, T_max=20),
    hyper_lr_schedule=partial(CosineAnnealingLR, T_max=20),
)
FORMAT_1 = Path(__file__).parent / "assets" / "format1"


def run(directory: Path | str | None, steps: int, *callbacks: Any, method: br.Method = T1T2, **arguments: Any) -> Any:
    with torch.random.fork_rng():
        torch.manual_seed(0)
        problem, train, valid = net_problem()
    arguments = {"checkpoint_every": 1, "run_dir": directory, **arguments}
    return br.tune(problem, method, train, valid, steps=steps, callbacks=callbacks, **arguments)


def saved_step(directory: Path) -> int:
    step: int = torch.load(directory / "checkpoint.pt", weights_only=True)["state"]["step"]
    return step


def rows_on_disk(directory: Path) -> list[dict[str, Any]]:
    """Every line of the history, read without the library; each must be whole."""
    data = (directory / "history.jsonl").read_bytes()
    assert data == b"" or data.endswith(b"\n")
    return [json.loads(line) for line in data.splitlines()]


def bytes_in(directory: Path) -> dict[str, bytes]:
    return {str(path.relative_to(directory)): path.read_bytes() for path in directory.rglob("*") if path.is_file()}


# ------------------------------------------------------------------------------------------------------- what is kept


def test_run_directory_holds_the_run(tmp_path: Path) -> None:
    result = run(tmp_path / "a" / "b", 5, seed=7)
    directory = tmp_path / "a" / "b"
    files = {"run.json", "history.jsonl", "checkpoint.pt"}
    saved = {"model.safetensors", "hyperparameters.safetensors", "hyperparameters.json"}
    assert set(bytes_in(directory)) == files | {f"result/{name}" for name in saved}
    described = json.loads((directory / "run.json").read_text())
    assert described["format"] == 1
    assert described["seed"] == 7
    assert described["method"] == repr(T1T2)
    assert described["space"]["smooth"] == "bounded in (0, 0.5), scalar"
    assert described["weights"]["head.weight"] == [3, 4]
    assert described["versions"]["torch"] == torch.__version__
    assert rows_on_disk(directory) == list(result.history.rows())
    assert saved_step(directory) == 5


def test_checkpoints_come_when_asked_for_and_at_the_end(tmp_path: Path) -> None:
    seen: list[tuple[int, int, int]] = []

    def look(event: br.Event) -> None:
        seen.append((event.step, saved_step(tmp_path), len(rows_on_disk(tmp_path))))

    run(tmp_path, 8, look, checkpoint_every=3)
    assert seen == [(s, (s - 1) // 3 * 3 if s else 0, (s - 1) // 3 * 3 if s else 0) for s in range(9)] + [(8, 8, 8)]


# ----------------------------------------------------------------------------------------------------------- resuming


@pytest.mark.parametrize("stops", [(1,), (4,), (5,), (3, 4, 9)], ids=str)
def test_more_steps_go_on_where_the_run_was(stops: tuple[int, ...], tmp_path: Path) -> None:
    """The data has five batches a pass, so these stops lie within, at and across the ends of passes."""
    for steps in stops:
        assert run(tmp_path, steps, resume=True).step == steps
    resumed = run(tmp_path, 12, resume=True)
    assert_same_run(run(None, 12), resumed)
    assert resumed.history["step"] == list(range(1, 13))
    assert resumed.history["seconds"] == sorted(resumed.history["seconds"])
    assert rows_on_disk(tmp_path) == list(resumed.history.rows())


@pytest.mark.parametrize(
    ("method", "steps"),
    [
        (T1T2, 6),
        (br.methods.lorraine2018_joint(), 6),
        (br.methods.cross_validation(br.Random(2), 3), 6),
        (br.methods.cross_validation(br.Random(2), 3), 50),  # more than it has: it finishes by itself
    ],
    ids=["Implicit", "BestResponse", "BlackBox", "BlackBox with steps to spare"],
)
def test_resuming_a_finished_run_changes_nothing(method: br.Method, steps: int, tmp_path: Path) -> None:
    events: list[tuple[str, int]] = []

    def note(event: br.Event) -> None:
        events.append((event.kind, event.step))

    given: dict[str, Any] = {"method": method, "evaluate": {"test": net_problem()[2]}}
    finished = run(tmp_path, steps, note, **given)
    assert len(finished.history) == 6
    before, rows, events[:] = bytes_in(tmp_path), rows_on_disk(tmp_path), []
    again = run(tmp_path, steps, note, resume=True, **given)
    assert again.status is finished.status is br.Status.FINISHED
    assert_same_run(finished, again)
    assert events == [("start", 6), ("end", 6)]
    assert rows_on_disk(tmp_path) == rows
    after = bytes_in(tmp_path)
    assert {name: data for name, data in after.items() if name != "history.jsonl"} == {
        name: data for name, data in before.items() if name != "history.jsonl"
    }


def test_resume_begins_where_there_is_nothing(tmp_path: Path) -> None:
    (tmp_path / "run").mkdir()
    (tmp_path / "run" / "notes.txt").write_text("the user's own")
    assert_same_run(run(None, 3), run(tmp_path / "run", 3, resume=True))
    assert (tmp_path / "run" / "notes.txt").read_text() == "the user's own"


def test_resume_begins_anew_where_a_run_died_before_its_first_checkpoint(tmp_path: Path) -> None:
    run(tmp_path, 3)
    (tmp_path / "checkpoint.pt").unlink()
    assert_same_run(run(None, 4), run(tmp_path, 4, resume=True))
    assert [row["step"] for row in rows_on_disk(tmp_path)] == [1, 2, 3, 4]


@pytest.mark.parametrize("cut", range(1, 60, 7))
def test_history_that_ends_with_a_cut_line(cut: int, tmp_path: Path) -> None:
    """As a killed process leaves it: whole rows beyond the checkpoint, and a part of one more."""
    run(tmp_path, 5)
    row = json.dumps(rows_on_disk(tmp_path)[-1]).replace('"step": 5', '"step": 6').encode()
    with (tmp_path / "history.jsonl").open("ab") as file:
        file.write(row + b"\n" + row.replace(b'"step": 6', b'"step": 7')[:cut])
    assert_same_run(run(None, 9), run(tmp_path, 9, resume=True))
    assert [row["step"] for row in rows_on_disk(tmp_path)] == list(range(1, 10))


def test_files_that_a_killed_process_left_do_not_matter(tmp_path: Path) -> None:
    run(tmp_path, 5)
    for name in ("checkpoint.pt", "run.json", "history.jsonl"):
        (tmp_path / f".{name}.{os.getpid()}.tmp").write_bytes(b"cut off")
        (tmp_path / f".{name}.1.tmp").write_bytes(b"cut off")
    assert_same_run(run(None, 9), run(tmp_path, 9, resume=True))


# ------------------------------------------------------------------------------------------------------------ refusing


@pytest.mark.parametrize("part", [0.0, 0.01, 0.5, 0.9, 1.0], ids=lambda part: f"{part:.0%}")
def test_truncated_checkpoint(part: float, tmp_path: Path) -> None:
    run(tmp_path, 3)
    checkpoint = tmp_path / "checkpoint.pt"
    whole = checkpoint.read_bytes()
    checkpoint.write_bytes(whole[: int(part * (len(whole) - 1))])
    before = bytes_in(tmp_path)
    with pytest.raises(ValueError, match=r"checkpoint\.pt is not a checkpoint that can be read"):
        run(tmp_path, 5, resume=True)
    assert bytes_in(tmp_path) == before


def test_checkpoint_that_would_run_code_is_refused(tmp_path: Path) -> None:
    run(tmp_path, 3)

    class Trap:
        def __reduce__(self) -> Any:
            return os.mkdir, (str(tmp_path / "sprung"),)

    torch.save({"state": Trap()}, tmp_path / "checkpoint.pt")
    with pytest.raises(ValueError, match="not a checkpoint that can be read"):
        run(tmp_path, 5, resume=True)
    assert not (tmp_path / "sprung").exists()


@pytest.mark.parametrize("file", ["run.json", "checkpoint.pt"])
def test_newer_format(file: str, tmp_path: Path) -> None:
    run(tmp_path, 3)
    if file == "run.json":
        described = json.loads((tmp_path / file).read_text())
        (tmp_path / file).write_text(json.dumps({**described, "format": 2}))
    else:  # a run that a newer version has gone on with, and whose run.json is as old as the run
        saved = torch.load(tmp_path / file, weights_only=True)
        torch.save({**saved, "format": 2}, tmp_path / file)
    before = bytes_in(tmp_path)
    with pytest.raises(
        ValueError, match=r"was written in format 2, and this version reads up to 1.* newer bestresponse"
    ):
        run(tmp_path, 5, resume=True)
    assert bytes_in(tmp_path) == before


@pytest.mark.parametrize("other", ["seed", "method", "space", "weights"])
def test_directory_of_another_run(other: str, tmp_path: Path) -> None:
    run(tmp_path, 3)
    problem, train, valid = net_problem()
    space, method, seed = problem.space, T1T2, 0
    if other == "seed":
        seed, shown = 1, ("0", "1")
    if other == "method":
        method, shown = br.methods.luketina2016(), (repr(T1T2), repr(br.methods.luketina2016()))
    if other == "space":
        space = br.Space(**{**dict(space.items()), "smooth": br.Hyper(0.1, low=0.0, high=0.4)})
        shown = ("bounded in (0, 0.5), scalar", "bounded in (0, 0.4), scalar")
    if other == "weights":
        problem.model.extra = nn.Parameter(torch.zeros(2))
        shown = ("'head.weight': [3, 4]", "'extra': [2]")
    problem = br.Problem(problem.model, space, problem.train_loss, problem.valid_loss)
    before = bytes_in(tmp_path)
    with pytest.raises(ValueError, match=f"holds another run. Its {other}:") as caught:
        br.tune(problem, method, train, valid, steps=5, seed=seed, run_dir=tmp_path, resume=True)
    there, here = str(caught.value).split(f"\nThe {other} here:\n")
    assert shown[0] in there
    assert shown[1] in here
    assert shown[1] not in there.splitlines()[-1]
    assert bytes_in(tmp_path) == before


@pytest.mark.parametrize("content", [None, "", "{"], ids=["gone", "empty", "cut off"])
def test_run_that_does_not_say_what_it_is(content: str | None, tmp_path: Path) -> None:
    run(tmp_path, 3)
    (tmp_path / "run.json").unlink()
    if content is not None:
        (tmp_path / "run.json").write_text(content)
    before = bytes_in(tmp_path)
    with pytest.raises(
        ValueError, match=r"run\.json cannot be read, so what run this is cannot be known.*another run_dir"
    ):
        run(tmp_path, 5, resume=True)
    assert bytes_in(tmp_path) == before


# ------------------------------------------------------------------------------------------------------ trouble on disk


class Trouble:
    """While ``on``, one way of touching a file fails as it does on a full disk."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, how: str) -> None:
        self.on = False
        owner, name = {"fsync": (os, "fsync"), "rename": (Path, "replace"), "open": (Path, "open")}[how]
        real = getattr(owner, name)

        def touch(*arguments: Any, **named: Any) -> Any:
            if self.on and (how != "open" or "r" not in str(arguments[1:]) or "+" in str(arguments[1:])):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            return real(*arguments, **named)

        monkeypatch.setattr(owner, name, touch)


@pytest.mark.parametrize("how", ["fsync", "rename", "open"])
def test_disk_that_is_full_for_a_while(how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It costs warnings, and the checkpoints of the while."""
    trouble = Trouble(monkeypatch, how)
    directory, copy_of_the_worst = tmp_path / "run", tmp_path / "worst"

    def make_trouble(event: br.Event) -> None:
        trouble.on = event.kind == "step" and 3 <= event.step <= 6
        if event.kind == "step" and event.step == 7:
            shutil.copytree(directory, copy_of_the_worst)

    with pytest.warns(RuntimeWarning, match=os.strerror(errno.ENOSPC)) as caught:
        result = run(directory, 10, make_trouble)
    assert [str(warning.message).split(": ")[0] for warning in caught] == [
        f"could not write step {step} to {directory}" for step in (3, 4, 5, 6)
    ]
    assert all("The run goes on; step 2 is the last one saved" in str(warning.message) for warning in caught)
    uninterrupted = run(None, 10, print_nothing)
    assert_same_run(uninterrupted, result)
    assert saved_step(directory) == 10
    assert rows_on_disk(directory) == list(result.history.rows())
    # Had the process died in the worst moment, nothing that was saved would be lost.
    assert saved_step(copy_of_the_worst) == 2
    assert_same_run(uninterrupted, run(copy_of_the_worst, 10, print_nothing, resume=True))
    assert_same_run(uninterrupted, run(directory, 10, print_nothing, resume=True))


def print_nothing(event: br.Event) -> None:
    pass


@pytest.mark.parametrize("how", ["fsync", "rename"])
def test_result_that_cannot_be_written_is_returned_all_the_same(
    how: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    trouble = Trouble(monkeypatch, how)

    def make_trouble(event: br.Event) -> None:
        trouble.on = event.kind == "end"

    with pytest.warns(RuntimeWarning, match="could not write the result .*; step 4 is the last one saved"):
        result = run(tmp_path, 4, make_trouble)
    assert_same_run(run(None, 4), result)


def test_first_write_that_fails_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A directory in which nothing can be kept is known before the first step, and worth stopping for."""
    Trouble(monkeypatch, "fsync").on = True
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        run(tmp_path, 4)


def test_directory_that_vanishes_does_not_end_the_run(tmp_path: Path) -> None:
    def vanish(event: br.Event) -> None:
        if event.kind == "step" and event.step == 3:
            shutil.rmtree(tmp_path / "run")

    with pytest.warns(RuntimeWarning, match="could not write step") as caught:
        result = run(tmp_path / "run", 6, vanish)
    assert len(caught) == 4
    assert_same_run(run(None, 6), result)


@pytest.mark.filterwarnings("ignore:could not write")
def test_history_that_vanishes_is_not_made_up_of_zeros(tmp_path: Path) -> None:
    def vanish(event: br.Event) -> None:
        if event.kind == "step" and event.step == 3:
            (tmp_path / "history.jsonl").unlink()

    run(tmp_path, 6, vanish)
    assert [row["step"] for row in rows_on_disk(tmp_path)][-4:] == [3, 4, 5, 6]


@pytest.mark.filterwarnings("ignore:could not write")
def test_without_a_checkpoint_nothing_is_called_the_last_good_state(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """There was never space for a checkpoint, only for the small files; then a loss is NaN."""
    real = Path.open

    def no_space(path: Path, *arguments: Any, **named: Any) -> Any:
        if "checkpoint.pt" in path.name and "w" in str(arguments):
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        return real(path, *arguments, **named)

    monkeypatch.setattr(Path, "open", no_space)
    problem, train, valid = net_problem()
    calls = iter(range(100))

    def train_loss(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
        return problem.train_loss(model, batch, hyper) * (torch.nan if next(calls) > 6 else 1.0)

    poisoned = br.Problem(problem.model, problem.space, train_loss, problem.valid_loss)
    with pytest.warns(RuntimeWarning, match="(?i)became nan"):
        result = br.tune(poisoned, T1T2, train, valid, steps=6, run_dir=tmp_path / "run")
    assert result.status is br.Status.NON_FINITE
    finite = all(bool(torch.isfinite(leaf).all()) for leaf in result.raw.values())
    assert finite or "last good state" not in result.message


# ---------------------------------------------------------------------------------------------------- formats of old


def format_1_run(directory: Path | None, steps: int, **arguments: Any) -> br.Result:
    """The run of which ``tests/assets/format1`` holds the first five steps, as version 0.1.0 wrote them."""

    def train_loss(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
        loss = (model(batch[0])[:, 0] - batch[1]).square()
        return loss * hyper["scale"] + br.functional.l2(model, hyper["decay"])

    def valid_loss(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
        return (model(batch[0])[:, 0] - batch[1]).square()

    with torch.device("cpu"):
        model = nn.Sequential(nn.Linear(2, 2), nn.BatchNorm1d(2), nn.Dropout(0.5), nn.Linear(2, 1)).double()
        with torch.no_grad():
            for parameter in model.parameters():
                parameter.copy_(torch.linspace(-1, 1, parameter.numel() + 1)[1:].view_as(parameter))
        space = br.Space(
            decay=br.Hyper(1e-2, log=True, shape=br.per_layer(model)), scale=br.Hyper(0.5, low=0.0, high=1.0)
        )
        x = torch.linspace(-2, 2, 24, dtype=torch.float64).view(12, 2).sin()
        data = br.Batches(x, x.sum(1), size=4)
        return br.tune(
            br.Problem(model, space, train_loss, valid_loss),
            br.Implicit(br.Identity(), lr_schedule=partial(CosineAnnealingLR, T_max=20)),
            data,
            data,
            steps=steps,
            seed=11,
            run_dir=directory,
            callbacks=[br.callbacks.early_stop("train_loss", patience=100)],
            **arguments,
        )


def write_format_1() -> None:
    """How ``tests/assets/format1`` was made. A new format gets a directory of its own, and this one stays."""
    format_1_run(FORMAT_1, 5)
    shutil.rmtree(FORMAT_1 / "result")


def test_format_1_still_loads_and_goes_on(tmp_path: Path) -> None:
    shutil.copytree(FORMAT_1, tmp_path / "run")
    old_rows = rows_on_disk(tmp_path / "run")
    assert [row["step"] for row in old_rows] == [1, 2, 3, 4, 5]
    resumed = format_1_run(tmp_path / "run", 9, resume=True)
    assert list(resumed.history.rows())[:5] == old_rows
    # Another processor rounds otherwise than the one that wrote it; what follows must be the same but for that.
    whole = format_1_run(None, 9)
    for name, leaf in whole.raw.items():
        torch.testing.assert_close(resumed.raw[name], leaf, rtol=1e-6, atol=1e-9)
    for name, tensor in whole.model.state_dict().items():
        torch.testing.assert_close(resumed.model.state_dict()[name], tensor, rtol=1e-6, atol=1e-9)
    for ours, theirs in zip(without_seconds(resumed.history), without_seconds(whole.history), strict=True):
        assert ours == pytest.approx(theirs, rel=1e-6)
    assert not torch.equal(whole.raw["scale"], format_1_run(None, 5).raw["scale"])  # the last steps do something


def test_format_1_is_small_and_holds_nothing_of_the_machine() -> None:
    assert sum(path.stat().st_size for path in FORMAT_1.iterdir()) < 60_000
    assert {path.name for path in FORMAT_1.iterdir()} == {"run.json", "history.jsonl", "checkpoint.pt"}
    text = (FORMAT_1 / "run.json").read_text()
    assert "/" not in text.replace("https://", "")

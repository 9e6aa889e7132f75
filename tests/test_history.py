"""History: rows with missing numbers, tensors that are read late, and files."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

import bestresponse as br

ROWS = [
    {"step": 1, "train_loss": 0.5},
    {"step": 2, "train_loss": 0.25, "valid_loss": 0.75},
    {"step": 3, "train_loss": 0.125, "test/loss": 2.0},
]


def filled(rows: list[dict] = ROWS) -> br.History:
    history = br.History()
    for row in rows:
        history.append(row)
    return history


def written(path: Path, rows: list[dict] = ROWS, cut: str = "") -> Path:
    path.write_text("".join(json.dumps(row) + "\n" for row in rows) + cut, encoding="utf-8")
    return path


# Rows and columns


def test_a_column_has_none_where_a_row_has_no_number():
    history = filled()
    assert history["train_loss"] == [0.5, 0.25, 0.125]
    assert history["valid_loss"] == [None, 0.75, None]
    assert history["test/loss"] == [None, None, 2.0]
    assert history.columns == ["step", "train_loss", "valid_loss", "test/loss"]
    assert len(history) == 3


def test_rows_are_what_was_appended():
    history = filled()
    assert list(history.rows()) == ROWS
    assert [history.row(), history.row(0), history.row(-2)] == [ROWS[2], ROWS[0], ROWS[1]]


def test_a_number_that_is_none_is_left_out_of_its_row():
    history = filled([{"step": 1, "valid_loss": None}])
    assert history["valid_loss"] == [None]
    assert history.row() == {"step": 1}


def test_numbers_that_are_not_finite_are_kept():
    history = filled([{"a": math.inf, "b": torch.tensor(math.nan)}])
    assert history["a"] == [math.inf]
    assert math.isnan(history["b"][0])


def test_contains_and_unknown_columns():
    history = filled()
    assert "valid_loss" in history
    assert "loss" not in history
    with pytest.raises(
        KeyError, match="the history has no column 'loss'; it has step, train_loss, valid_loss, test/loss"
    ):
        history["loss"]


def test_an_empty_history_has_no_rows():
    history = br.History()
    assert (len(history), list(history.rows()), history.columns, history.take()) == (0, [], [], [])


def test_a_history_prints_its_columns():
    assert repr(filled()) == "History(3 rows: step, train_loss, valid_loss, test/loss)"


# Tensors


def test_tensors_become_numbers_in_full_precision():
    third = torch.tensor(1 / 3, dtype=torch.float64)
    single = torch.tensor(0.1, dtype=torch.float32)
    history = filled(
        [{"a": third, "b": single, "c": torch.tensor(7)}, {"b": torch.tensor(2.0, requires_grad=True) * 2}]
    )
    assert history["a"] == [1 / 3, None]
    assert history["b"] == [float(single), 4.0]
    assert history["c"] == [7, None]
    assert type(history["b"][0]) is float


class Reads(TorchFunctionMode):
    """Counts how often numbers are read out of tensors, which makes a device wait."""

    count = 0

    def __torch_function__(self, func, types, args=(), kwargs=None):
        self.count += func in (Tensor.tolist, Tensor.item, Tensor.__float__, Tensor.cpu)
        return func(*args, **kwargs or {})


def test_tensors_are_read_when_somebody_looks_and_all_at_once():
    rows = [{"step": i, "loss": torch.tensor(float(i)), "rate": torch.tensor(0.5)} for i in range(4)]
    with Reads() as reads:
        history = filled(rows)
        assert reads.count == 0
        assert history["loss"] == [0.0, 1.0, 2.0, 3.0]
        assert (len(history), history["rate"], list(history.rows())[2]["loss"]) == (4, [0.5] * 4, 2.0)
        assert reads.count == 1


def test_a_tensor_may_stand_in_many_rows():
    same = torch.tensor(0.5)
    history = filled([{"a": same, "b": same}, {"a": same}])
    assert history["a"] == [0.5, 0.5]
    assert history["b"] == [0.5, None]


def test_a_run_keeps_the_number_each_hyper_had_at_each_step():
    """Also of a free hyper, whose value is raw itself, which moves in place."""
    model = nn.Linear(1, 1)
    space = br.Space(free=br.Hyper(1.0), log=br.Hyper(1.0, log=True))
    problem = br.Problem(
        model,
        space,
        lambda model, batch, hyper: (model(batch) - hyper["free"] * hyper["log"]).square().mean(),
        lambda model, batch, hyper: (model(batch) - 3).square().mean(),
    )
    seen: dict[str, list[float]] = {name: [] for name in space}

    def look(event: br.Event) -> None:
        if event.kind == "step":
            for name in space:
                seen[name].append(float(space.values(event.state.raw)[name]))

    data = [torch.ones(2, 1)]
    history = br.tune(problem, br.methods.luketina2016(), data, data, steps=5, callbacks=[look]).history
    assert len(set(seen["free"])) == 5
    for name in space:
        assert history[name] == seen[name], name


def test_a_tensor_with_one_number_is_that_number_whatever_its_shape():
    history = filled([{"a": torch.ones(1), "b": torch.tensor(2.0)}, {"a": torch.ones(1, 1)}])
    assert history["a"] == [1.0, 1.0]
    assert history["b"] == [2.0, None]


@pytest.mark.parametrize(
    ("look", "seen"),
    [
        (len, 1),
        (repr, "History(1 rows: step)"),
        (lambda history: history["step"], [1]),
        (lambda history: history.row(), {"step": 1}),
        (lambda history: list(history.rows()), [{"step": 1}]),
        (lambda history: history.columns, ["step"]),
        (lambda history: "step" in history, True),
    ],
)
def test_whoever_looks_sees_the_rows_that_wait(look, seen):
    history = filled([{"step": torch.tensor(1)}])
    assert look(history) == seen
    assert history.take() == [{"step": 1}]


def test_take_gives_each_row_once():
    history = filled(ROWS[:2])
    assert history["train_loss"] == [0.5, 0.25]  # looking does not take
    assert history.take() == ROWS[:2]
    assert history.take() == []
    history.append({"step": torch.tensor(3)})
    assert history.take() == [{"step": 3}]
    assert len(history) == 3


# Files


def test_a_file_is_read_back(tmp_path):
    history = br.History.read(written(tmp_path / "history.jsonl"))
    assert list(history.rows()) == ROWS
    assert history["valid_loss"] == [None, 0.75, None]
    assert history.take() == []  # what is in the file already must not be written again


@pytest.mark.parametrize("cut", ['{"step": 4, "train_l', '{"step": 4', "{", '{"step": 4, "train_loss": 0.0625'])
def test_a_last_line_that_was_cut_off_is_left_out(tmp_path, cut):
    assert list(br.History.read(written(tmp_path / "history.jsonl", cut=cut)).rows()) == ROWS


@pytest.mark.parametrize("up_to_step", [0, 1, 2, 3, 99])
def test_a_file_is_read_up_to_a_step(tmp_path, up_to_step):
    history = br.History.read(written(tmp_path / "history.jsonl"), up_to_step)
    assert list(history.rows()) == [row for row in ROWS if row["step"] <= up_to_step]


def test_a_history_that_was_read_goes_on(tmp_path):
    history = br.History.read(written(tmp_path / "history.jsonl"), up_to_step=1)
    history.append({"step": 2, "new": torch.tensor(1.0)})
    assert list(history.rows()) == [ROWS[0], {"step": 2, "new": 1.0}]
    assert history["new"] == [None, 1.0]
    assert history.take() == [{"step": 2, "new": 1.0}]


def test_numbers_that_are_not_finite_come_back_from_a_file(tmp_path):
    history = br.History.read(written(tmp_path / "history.jsonl", [{"step": 1, "a": math.inf, "b": math.nan}]))
    assert history["a"] == [math.inf]
    assert math.isnan(history["b"][0])


# Pandas


def test_a_data_frame_is_indexed_by_step():
    pytest.importorskip("pandas")
    frame = filled([{**row, "rate": torch.tensor(0.5)} for row in ROWS]).to_pandas()
    assert frame.index.name == "step"
    assert frame.index.tolist() == [1, 2, 3]
    assert frame.columns.tolist() == ["train_loss", "rate", "valid_loss", "test/loss"]
    assert frame["train_loss"].tolist() == [0.5, 0.25, 0.125]
    assert frame["valid_loss"].isna().tolist() == [True, False, True]
    assert frame.loc[2, "valid_loss"] == 0.75


def test_a_data_frame_without_steps_counts_rows():
    pytest.importorskip("pandas")
    assert filled([{"a": 1.0}, {"a": 2.0}]).to_pandas().index.tolist() == [0, 1]

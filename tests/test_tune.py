"""The loop: what it does to a model is what a plain PyTorch loop does, and what it says of it is true."""

from __future__ import annotations

import copy
import itertools
import math
import signal
import sys
import threading
from collections.abc import Callable
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from kill_worker import assert_same_run, without_seconds
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adam
from torch.utils.data import DataLoader, Dataset, RandomSampler, TensorDataset

import bestresponse as br
from bestresponse.console import Clock
from bestresponse.testing import TinyNet, net_problem
from bestresponse.watch import find_in_weights

T1T2 = br.methods.luketina2016()
JOINT = br.methods.lorraine2018_joint()
PLAIN = br.methods.luketina2016(schedule=br.Alternate(warmup=math.inf))


def error_rate(model: nn.Module, batch: Any, hyper: br.space.Values) -> Tensor:
    return (model(batch[0]).argmax(-1) != batch[1]).double()


# ---------------------------------------------------------------------------------------------------- plain training


@pytest.mark.parametrize(
    "optimizer",
    [partial(Adam, lr=1e-2), partial(SGD, lr=0.1, momentum=0.9, weight_decay=1e-2)],
    ids=["Adam", "SGD"],
)
def test_plain_training_is_a_bare_pytorch_loop(optimizer: Any) -> None:
    """Weights, BatchNorm statistics and losses, bit for bit; the net has dropout, tied and frozen weights."""
    problem, train, valid = net_problem()
    method = br.Implicit(br.Identity(), schedule=br.Alternate(warmup=math.inf), optimizer=optimizer)
    steps, seed = 17, 3  # a pass has five batches
    result = br.tune(problem, method, train, valid, steps=steps, seed=seed)

    model = copy.deepcopy(problem.model)
    own = optimizer([parameter for parameter in model.parameters() if parameter.requires_grad])
    values = problem.space.values(problem.space.raw())
    batches = br.Stream(train, name="train", seed=seed)
    losses = []
    torch.manual_seed(seed)
    for _ in range(steps):
        own.zero_grad()
        loss = problem.train_loss(model, next(batches), values).mean()
        loss.backward()
        own.step()
        losses.append(loss.item())

    for (name, tensor), ours in zip(model.state_dict().items(), result.model.state_dict().values(), strict=True):
        assert torch.equal(tensor, ours), name
    assert not torch.equal(result.model.norm.running_mean, torch.zeros(4))
    assert result.history["train_loss"] == losses
    assert "valid_loss" not in result.history
    assert result.history["train_batches"] == list(range(1, steps + 1))


@pytest.mark.parametrize("method", [T1T2, JOINT], ids=["Implicit", "BestResponse"])
def test_tune_is_an_own_loop_over_the_same_streams(method: Any) -> None:
    problem, train, valid = net_problem()
    result = br.tune(problem, method, train, valid, steps=8, seed=2)
    state = method.init(problem, seed=2)
    streams = [br.Stream(data, name=name, seed=2) for name, data in (("train", train), ("valid", valid))]
    torch.manual_seed(2)
    for _ in range(8):
        method.step(problem, state, *streams)
    for name, leaf in state.raw.items():
        assert torch.equal(leaf, result.raw[name]), name
    own = dict(result.model.named_parameters())
    for name, tensor in method.params(problem, state).items():
        assert torch.equal(tensor, own[name]), name


@pytest.mark.parametrize(("method", "batches_a_step"), [(T1T2, 2), (JOINT, 1)], ids=["Implicit", "BestResponse"])
def test_batch_norm_statistics_come_from_training_batches_alone(method: br.Method, batches_a_step: int) -> None:
    """In front of all weights they depend on the batches alone. Hypergradients and evaluations must not move them."""
    problem, train, valid = net_problem()
    model = nn.Sequential(nn.BatchNorm1d(4, affine=False), nn.Linear(4, 3))
    space = br.Space(decay=br.Hyper(1e-3, log=True))

    def train_loss(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]), batch[1]) + br.functional.l2(model, hyper["decay"])

    problem = br.Problem(model, space, train_loss, problem.valid_loss)
    result = br.tune(problem, method, train, valid, steps=7, seed=5, evaluate={"valid": valid}, evaluate_every=1)

    norm = nn.BatchNorm1d(4, affine=False)
    stream = br.Stream(train, name="train", seed=5)
    for number in range(7 * batches_a_step):
        batch = next(stream)
        if number % batches_a_step == 0:
            norm(batch[0])
    ours = result.model[0]
    assert torch.equal(ours.running_mean, norm.running_mean)
    assert torch.equal(ours.running_var, norm.running_var)
    assert ours.num_batches_tracked == 7


# ----------------------------------------------------------------------------------------------------------- history


def test_history_has_one_row_a_step_and_these_columns() -> None:
    problem, train, valid = net_problem()
    steps = 6
    result = br.tune(problem, T1T2, train, valid, steps=steps)
    history = result.history
    assert history.columns == [
        *("step", "train_loss", "valid_loss", "train_batches", "valid_batches", "gradients", "seconds"),
        *("decay.mean", "layer.mean", "smooth"),
    ]
    assert history["step"] == list(range(1, steps + 1))
    # A step trains on one batch and takes the mixed product on another; the product costs two gradients.
    assert history["train_batches"] == [2 * step for step in history["step"]]
    assert history["valid_batches"] == history["step"]
    assert history["gradients"] == [4 * step for step in history["step"]]
    assert history["seconds"] == sorted(history["seconds"])
    assert history["seconds"][0] > 0
    # Hypers stand in it in natural units, as they are after the step.
    assert history["smooth"][-1] == result.values["smooth"].item()
    decays = torch.cat([part.flatten() for part in result.values["decay"].values()])
    assert history["decay.mean"][-1] == pytest.approx(decays.mean().item())
    assert history["layer.mean"][-1] == pytest.approx(sum(map(float, result.values["layer"].values())) / 4)


def test_valid_loss_in_the_history_is_that_of_its_batch() -> None:
    problem, train, valid = net_problem()
    rows = br.tune(problem, T1T2, train, valid, steps=4, seed=1).history["valid_loss"]
    batches = br.Stream(valid, name="valid", seed=1)
    for step, row in enumerate(rows, 1):
        x, y = next(batches)
        # What was judged are the weights after this step's training, which its change of raw leaves alone.
        model = br.tune(problem, T1T2, train, valid, steps=step, seed=1).model.eval()
        assert row == F.cross_entropy(model(x), y).item()


@pytest.mark.parametrize(
    "hyper",
    [
        br.Hyper(0.1),
        br.Hyper(0.1, low=0.0),
        br.Hyper(0.1, low=-1.0, high=1.0),
        br.Hyper(0.1, log=True),
        br.Hyper(0.1, shape=(2,)),
        br.Hyper(0.1, shape={"one": ()}),
    ],
    ids=["free", "positive", "bounded", "log", "vector", "named"],
)
@pytest.mark.parametrize("method", [T1T2, br.methods.cross_validation(br.Random(3), 2)], ids=["T1-T2", "BlackBox"])
def test_history_has_each_hyper_as_it_was_after_each_step(method: br.Method, hyper: br.Hyper) -> None:
    clean, train, valid = net_problem()
    problem = br.Problem(
        clean.model,
        br.Space(**dict(clean.space.items()), own=hyper),
        lambda model, batch, hypers: clean.train_loss(model, batch, hypers) * (1 + _mean(hypers["own"])),
        clean.valid_loss,
    )
    seen = []

    def look(event: br.Event) -> None:
        if event.kind == "step":
            seen.append(_mean(problem.space.values(event.state.raw)["own"]).item())

    history = br.tune(problem, method, train, valid, steps=6, callbacks=[look]).history
    assert history["own" if hyper.shapes == {"": ()} else "own.mean"] == pytest.approx(seen)
    assert len(set(seen)) > 1 or isinstance(method, br.BlackBox)


def _mean(value: Any) -> Tensor:
    return value.mean() if isinstance(value, Tensor) else torch.stack(list(value.values())).mean()


def test_values_are_in_natural_units() -> None:
    problem, train, valid = net_problem()
    result = br.tune(problem, T1T2, train, valid, steps=3)
    assert list(result.values) == ["decay", "layer", "smooth"]
    assert result.values["smooth"].item() == pytest.approx(0.5 / (1 + math.exp(-result.raw["smooth"].item())))
    assert list(result.values["layer"]) == ["first", "norm", "second", "head"]
    for name, value in result.values["layer"].items():
        assert value.item() == pytest.approx(math.log1p(math.exp(result.raw[f"layer.{name}"].item())))
    for name, value in result.values["decay"].items():
        assert value.shape == problem.params()[name].shape
        assert bool(((value > 1e-8) & (value < 10)).all())
        assert not value.requires_grad


def test_hypers_move_and_different_seeds_differ() -> None:
    problem, train, valid = net_problem()
    first, second = (br.tune(problem, T1T2, train, valid, steps=3, seed=seed) for seed in (0, 1))
    assert not torch.equal(first.raw["smooth"], problem.space.raw()["smooth"])
    assert not torch.equal(first.raw["smooth"], second.raw["smooth"])


# -------------------------------------------------------------------------------------------------------- evaluation


@pytest.mark.parametrize("kind", ["Batches", "DataLoader", "list"])
@pytest.mark.parametrize("reduction", ["mean", "none"])
def test_evaluation_is_the_mean_over_all_examples(kind: str, reduction: str) -> None:
    """The last batch is smaller: 20 examples in batches of 8."""
    with torch.device("cpu"):
        problem, train, valid = net_problem()
        x, y = valid.tensors
        loader: Any = br.Batches(x, y, size=8)
        if kind == "DataLoader":
            loader = DataLoader(TensorDataset(x, y), batch_size=8)
        if kind == "list":
            loader = [(x[:8], y[:8]), (x[8:16], y[8:16]), (x[16:], y[16:])]

        def valid_loss(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
            return F.cross_entropy(model(batch[0]), batch[1], reduction=reduction) * (1 + hyper["smooth"])

        problem = br.Problem(problem.model, problem.space, problem.train_loss, valid_loss)
        given = {"evaluate": {"test": loader, "train": train}, "metrics": {"error": error_rate}}
        result = br.tune(problem, T1T2, train, valid, steps=4, **given)
        assert list(result.metrics) == ["test/loss", "test/error", "train/loss", "train/error"]
        model = result.model.eval()
        smooth = result.values["smooth"].item()
        for name, (inputs, labels) in {"test": (x, y), "train": train.tensors}.items():
            scores = model(inputs)
            loss = F.cross_entropy(scores, labels).item() * (1 + smooth)
            assert result.metrics[f"{name}/loss"] == pytest.approx(loss, rel=1e-6)
            wrong = sum(int(scores[i].argmax()) != int(labels[i]) for i in range(len(labels)))
            assert result.metrics[f"{name}/error"] == pytest.approx(wrong / len(labels))


def test_evaluations_in_the_history_are_those_of_their_steps() -> None:
    problem, train, valid = net_problem()
    given: dict[str, Any] = {"evaluate": {"valid": valid}, "metrics": {"error": error_rate}}
    history = br.tune(problem, T1T2, train, valid, steps=7, evaluate_every=3, **given).history
    assert [step for step, loss in zip(history["step"], history["valid/loss"], strict=True) if loss] == [3, 6]
    for step in (3, 6):
        ends = br.tune(problem, T1T2, train, valid, steps=step, **given)
        row = history.row(step - 1)
        assert {name: row[name] for name in ("valid/loss", "valid/error")} == ends.metrics


class Noisy(Dataset[tuple[Tensor, Tensor]]):
    """Draws random numbers for every example."""

    def __init__(self, tensors: tuple[Tensor, ...]) -> None:
        self.tensors = tensors

    def __len__(self) -> int:
        return len(self.tensors[0])

    def __getitem__(self, i: int) -> tuple[Tensor, Tensor]:
        return self.tensors[0][i] + 0.1 * torch.randn(4), self.tensors[1][i]


def shuffled(data: Dataset[Any], **how: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=8, shuffle=True, **how)


def generated(data: Dataset[Any], **how: Any) -> DataLoader[Any]:
    return DataLoader(data, batch_size=8, shuffle=True, generator=torch.Generator(), **how)


def replaced(data: Dataset[Any], **how: Any) -> DataLoader[Any]:
    sampler = RandomSampler(data, replacement=True, num_samples=100, generator=torch.Generator())  # type: ignore[arg-type]
    return DataLoader(data, batch_size=8, sampler=sampler, **how)


each_loader = pytest.mark.parametrize("make", [shuffled, generated, replaced])


@each_loader
def test_evaluation_does_not_change_the_run(make: Callable[..., Any]) -> None:
    """Not even of the very loaders that the run draws from."""
    with torch.device("cpu"):
        problem, train, valid = net_problem()
        loader, valid_loader = make(Noisy(train.tensors)), make(Noisy(valid.tensors))
        alone = br.tune(problem, T1T2, loader, valid_loader, steps=14)
        watched = br.tune(
            problem,
            T1T2,
            loader,
            valid_loader,
            steps=14,
            evaluate={"train": loader, "valid": valid_loader, "test": valid_loader},
            evaluate_every=2,
            metrics={"error": error_rate},
        )
    for name, leaf in alone.raw.items():
        assert torch.equal(leaf, watched.raw[name]), name
    for name, tensor in alone.model.state_dict().items():
        assert torch.equal(tensor, watched.model.state_dict()[name]), name


def test_metric_that_draws_random_numbers_does_not_change_the_run() -> None:
    problem, train, valid = net_problem()

    def noisy(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
        return torch.rand(len(batch[1])) + model(batch[0]).sum() * 0

    alone = br.tune(problem, T1T2, train, valid, steps=6)
    watched = br.tune(
        problem, T1T2, train, valid, steps=6, evaluate={"valid": valid}, evaluate_every=2, metrics={"noise": noisy}
    )
    assert torch.equal(alone.raw["smooth"], watched.raw["smooth"])


# -------------------------------------------------------------------------------------------------------------- data


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_workers_of_a_loader_make_no_difference() -> None:
    with torch.device("cpu"):
        problem, train, valid = net_problem()
        runs = [
            br.tune(
                problem,
                T1T2,
                DataLoader(TensorDataset(*train.tensors), batch_size=8, shuffle=True, num_workers=workers),
                valid,
                steps=8,
            )
            for workers in (0, 2)
        ]
    assert_same_run(*runs)


@pytest.mark.filterwarnings("ignore:no hyper will be changed")
@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
@pytest.mark.parametrize("workers", [0, 2])
@each_loader
def test_resumed_run_draws_the_same_noisy_batches(make: Callable[..., Any], workers: int, tmp_path: Path) -> None:
    """The pass goes on in its middle: same order, same noise. The validation loader waits, and is evaluated, too."""
    method = br.methods.luketina2016(schedule=br.Alternate(warmup=5))
    with torch.device("cpu"):
        problem, train, valid = net_problem()

        def run(steps: int, directory: Path, resume: bool = False) -> br.Result:
            loader = make(Noisy(train.tensors), num_workers=workers)
            valid_loader = make(Noisy(valid.tensors))
            return br.tune(
                problem,
                method,
                loader,
                valid_loader,
                steps=steps,
                run_dir=directory,
                resume=resume,
                evaluate={"valid": valid_loader},
                evaluate_every=1,
            )

        whole = run(9, tmp_path / "whole")
        run(3, tmp_path / "broken")
        assert_same_run(whole, run(9, tmp_path / "broken", resume=True))


# -------------------------------------------------------------------------------------------------------- the result


def test_result_is_of_the_users_class_and_the_users_model_is_untouched() -> None:
    problem, train, valid = net_problem()
    before = copy.deepcopy(problem.model.state_dict())
    result = br.tune(problem, T1T2, train, valid, steps=3, device="cpu")
    assert type(result.model) is TinyNet
    assert result.model is not problem.model
    assert result.model.training == problem.model.training
    assert {parameter.device.type for parameter in result.model.parameters()} == {"cpu"}
    for name, tensor in problem.model.state_dict().items():
        assert torch.equal(tensor, before[name]), name


def test_device_may_be_said() -> None:
    with torch.device("cpu"):
        problem, train, valid = net_problem()
        said, unsaid = (br.tune(problem, T1T2, train, valid, steps=3, device=device) for device in ("cpu", None))
    assert_same_run(said, unsaid)


def test_works_in_another_thread() -> None:
    problem, train, valid = net_problem()
    handler = signal.getsignal(signal.SIGINT)
    results: list[br.Result] = []
    thread = threading.Thread(target=lambda: results.append(br.tune(problem, T1T2, train, valid, steps=4)))
    thread.start()
    thread.join()
    assert_same_run(results[0], br.tune(problem, T1T2, train, valid, steps=4))
    assert signal.getsignal(signal.SIGINT) is handler


@pytest.mark.parametrize("fails", [False, True], ids=["finishes", "fails"])
def test_ctrl_c_is_taken_for_the_run_only(fails: bool) -> None:
    """What is done at a first and a second press is in test_kill.py."""
    problem, train, valid = net_problem()
    handlers = [signal.getsignal(signal.SIGINT)]

    def look(event: br.Event) -> None:
        handlers.append(signal.getsignal(signal.SIGINT))
        if fails and event.step == 2:
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError) if fails else nullcontext():
        br.tune(problem, T1T2, train, valid, steps=3, callbacks=[look])
    assert signal.getsignal(signal.SIGINT) is handlers[0]
    assert all(handler is not handlers[0] for handler in handlers[1:])


# ---------------------------------------------------------------------------------------------------------- progress


def test_seconds_are_those_of_all_sittings_without_pauses(monkeypatch: pytest.MonkeyPatch) -> None:
    now = [100.0]
    monkeypatch.setattr("bestresponse.console.time.perf_counter", lambda: now[0])
    clock = Clock()
    now[0] += 1000.0  # preparations
    clock.seconds = 7.0  # of an earlier sitting
    clock.start()
    now[0] += 3.0
    with clock.paused():
        now[0] += 50.0
    now[0] += 2.0
    assert clock.seconds == 12.0


def test_nothing_is_said_where_nobody_looks(capfd: pytest.CaptureFixture[str]) -> None:
    problem, train, valid = net_problem()
    br.tune(problem, T1T2, train, valid, steps=3)
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize("seconds", [0.0, 1e9], ids=["every step", "at the end"])
@pytest.mark.parametrize("show", [True, None, "notebook"], ids=["asked for", "in a terminal", "in a notebook"])
def test_progress_shows_losses_and_hypers(
    show: bool | str | None, seconds: float, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("bestresponse.console.SETTLE_SECONDS", seconds)
    monkeypatch.setenv("COLUMNS", "400")
    monkeypatch.setenv("LINES", "20")
    if show is None:
        monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    if show == "notebook":
        monkeypatch.setitem(sys.modules, "ipykernel", ModuleType("ipykernel"))
    asked = True if show is True else None
    problem, train, valid = net_problem()
    result = br.tune(problem, T1T2, train, valid, steps=5, progress=asked, evaluate={"test": valid}, evaluate_every=2)
    out, err = capsys.readouterr()
    assert out == ""
    last = err.rstrip().rsplit("\r", 1)[-1]
    assert "5/5" in last
    for name in ("train_loss", "valid_loss", "smooth", "decay.mean", "layer.mean"):
        assert f"{name}={result.history[name][-1]:.4g}" in last
    assert f"test/loss={result.history['test/loss'][3]:.4g}" in last  # the newest there is, of step 4
    assert "gradients" not in last


# -------------------------------------------------------------------------------------------------------- not finite


class Poison:
    """A net problem whose batches know their numbers, 1, 2, ..., and one of them hurts as long as ``on``."""

    def __init__(self, which: str, number: int, hurt: Callable[[nn.Module, Tensor], Tensor]) -> None:
        clean, train, valid = net_problem()
        self.on = True
        self.train, self.valid = (
            [(*batch, torch.tensor(n)) for n, batch in enumerate(itertools.islice(br.Stream(data), 300), 1)]
            for data in (train, valid)
        )

        def loss(own: Callable[..., Tensor], here: bool, model: nn.Module, batch: Any, hyper: Any) -> Tensor:
            result = own(model, batch[:2], hyper)
            return hurt(model, result) if here and self.on and int(batch[2]) == number else result

        self.problem = br.Problem(
            clean.model,
            clean.space,
            partial(loss, clean.train_loss, which == "train"),
            partial(loss, clean.valid_loss, which == "valid"),
        )

    def run(self, method: br.Method, **arguments: Any) -> br.Result:
        return br.tune(self.problem, method, self.train, self.valid, **arguments)


def nan(model: nn.Module, loss: Tensor) -> Tensor:
    return loss * torch.nan


def infinite(model: nn.Module, loss: Tensor) -> Tensor:
    return loss * torch.inf


def nan_gradient(model: nn.Module, loss: Tensor) -> Tensor:
    """The slope of a square root at zero, times zero; the loss itself is as it was."""
    return loss + sum(parameter.sum() * 0 for parameter in model.parameters()).sqrt()


BAD: dict[str, tuple[br.Method, str, int, Any, str]] = {
    "training loss": (JOINT, "train", 8, nan, r"train_loss became nan at step 8 \(train batch number 8\)"),
    "infinite loss": (JOINT, "train", 8, infinite, r"train_loss became inf at step 8 \(train batch number 8\)"),
    # T1-T2 takes two training batches a step: one to train on, and one for the mixed product.
    "training loss of T1-T2": (T1T2, "train", 15, nan, r"train_loss became nan at step 8 \(train batch.*\b15\b"),
    "validation loss": (T1T2, "valid", 8, nan, r"valid_loss became nan at step 8 \(valid batch number 8\)"),
    "hyper": (T1T2, "train", 16, nan, r"Hyper 'decay\.first\.weight' became NaN or infinite at step 8\."),
    # The loss of the batch is finite, and so what is noticed first is what comes of the weights.
    "gradient": (JOINT, "train", 8, nan_gradient, r"valid_loss became nan at step 8 \(valid batch number 8\)"),
    "gradient without hypers": (PLAIN, "train", 7, nan_gradient, r"train_loss became nan at step 8 "),
}


def assert_finite(result: br.Result) -> None:
    for name, tensor in (*result.raw.items(), *result.model.state_dict().items()):
        assert bool(torch.isfinite(tensor).all()), name
    assert all(math.isfinite(number) for number in result.metrics.values())


@pytest.mark.parametrize("with_run_dir", [False, True], ids=["in memory", "in a run_dir"])
@pytest.mark.parametrize("what", BAD)
def test_run_ends_at_a_number_that_is_not_finite(what: str, with_run_dir: bool, tmp_path: Path) -> None:
    method, which, number, hurt, message = BAD[what]
    poison = Poison(which, number, hurt)
    directory = tmp_path / "run" if with_run_dir else None
    arguments: dict[str, Any] = {"run_dir": directory, "checkpoint_every": 3, "evaluate": {"valid": poison.valid[:2]}}
    with pytest.warns(RuntimeWarning, match=message) as caught:
        result = poison.run(method, steps=30, **arguments)
    assert len(caught) == 1
    assert result.status is br.Status.NON_FINITE
    assert result.message == str(caught[0].message)
    assert "last good state, after step 6." in result.message
    assert result.step == 6
    assert_finite(result)

    poison.on = False
    last_good = poison.run(method, steps=6, evaluate=arguments["evaluate"])
    for name, leaf in last_good.raw.items():
        assert torch.equal(leaf, result.raw[name]), name
    for name, tensor in last_good.model.state_dict().items():
        assert torch.equal(tensor, result.model.state_dict()[name]), name
    assert result.metrics == last_good.metrics
    if directory is not None:  # mended, the run goes on as if nothing had been
        saved = br.History.read(directory / "history.jsonl")
        assert without_seconds(saved) == without_seconds(last_good.history)
        resumed = poison.run(method, steps=30, resume=True, **arguments)
        assert_same_run(poison.run(method, steps=30, evaluate=arguments["evaluate"]), resumed)


@pytest.mark.parametrize("at", ["last step", "checkpoint"])
def test_weights_that_are_not_finite_are_never_saved(at: str, tmp_path: Path) -> None:
    """The loss of that step is still finite, and nothing looks at the weights after it but the saving."""
    poison = Poison("train", 9, nan_gradient)
    arguments: dict[str, Any] = {"run_dir": tmp_path, "checkpoint_every": 8 if at == "last step" else 1}
    with pytest.warns(RuntimeWarning, match=r"Weights in 'first\.weight' became NaN or infinite by step 9\."):
        result = poison.run(PLAIN, steps=9 if at == "last step" else 30, **arguments)
    assert result.step == 8
    assert_finite(result)
    poison.on = False
    assert_same_run(poison.run(PLAIN, steps=12), poison.run(PLAIN, steps=12, resume=True, **arguments))


def test_one_weight_that_is_not_finite_is_enough() -> None:
    params = {"a": torch.zeros(3), "b": torch.tensor([[0.0, math.inf], [0.0, 0.0]])}
    assert find_in_weights(4, params) == "Weights in 'b' became NaN or infinite by step 4."
    assert find_in_weights(4, {"a": torch.zeros(3)}) is None


def test_hyper_that_overflows_is_named() -> None:
    problem, train, valid = net_problem()
    method = br.methods.luketina2016(hyper_lr={"smooth": math.inf})
    with pytest.warns(RuntimeWarning, match=r"Hyper 'smooth' became NaN or infinite at step 1\."):
        result = br.tune(problem, method, train, valid, steps=30)
    assert (result.status, result.step) == (br.Status.NON_FINITE, 0)
    assert_finite(result)
    assert torch.equal(result.raw["smooth"], problem.space.raw()["smooth"])


def test_run_that_is_lost_is_not_run_to_its_end() -> None:
    poison = Poison("train", 5, nan)
    seen: list[int] = []
    with pytest.warns(RuntimeWarning, match="train_loss became nan at step 5"):
        poison.run(PLAIN, steps=100_000, callbacks=[lambda event: seen.append(event.step)])
    assert len(seen) < 500


def test_black_box_survives_a_trial_that_diverges() -> None:
    poison = Poison("train", 7, nan)  # in the second of three trials
    method = br.methods.cross_validation(br.Random(3), 5)
    result = poison.run(method, steps=method.steps)
    assert result.status is br.Status.FINISHED
    assert_finite(result)
    assert math.isnan(result.history["train_loss"][6])
    first, second, third = result.state.scores
    assert math.isnan(second)
    best = result.state.tried[0 if first <= third else 2]
    for name, leaf in best.items():
        assert torch.equal(leaf, result.raw[name]), name


def test_black_box_survives_a_first_trial_that_diverges() -> None:
    poison = Poison("train", 2, nan)
    method = br.methods.cross_validation(br.Random(2), 5)
    result = poison.run(method, steps=method.steps)
    assert [math.isnan(score) for score in result.state.scores] == [True, False]
    assert_finite(result)


def test_black_box_of_which_every_trial_diverges_says_so() -> None:
    """There is nothing to deploy; a result full of NaN must not be called finished."""
    problem, train, valid = net_problem()
    method = br.methods.cross_validation(br.Random(2), 3, optimizer=partial(SGD, lr=1e300))
    with pytest.warns(RuntimeWarning):
        result = br.tune(problem, method, train, valid, steps=method.steps)
    assert result.status is br.Status.NON_FINITE

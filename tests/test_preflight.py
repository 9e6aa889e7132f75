"""What cannot work is refused before anything is written, in the user's own names."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, TensorDataset

import bestresponse as br

IMPLICIT = br.methods.luketina2016()  # needs the training loss's derivative in every hyper
JOINT = br.methods.lorraine2018_joint()  # does not


def decayed(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1]) + br.functional.l2(model, hyper["decay"])


def plain(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
    return F.cross_entropy(model(batch[0]), batch[1])


def problem(
    train_loss: Any = decayed, valid_loss: Any = plain, norm: Any = nn.BatchNorm1d, **hypers: Any
) -> br.Problem:
    model = nn.Sequential(nn.Linear(3, 6), norm(6), nn.Dropout(0.5), nn.Linear(6, 10))
    return br.Problem(model, br.Space(decay=br.Hyper(1e-3, log=True), **hypers), train_loss, valid_loss)


def batches(examples: int = 12, **arguments: Any) -> br.Batches:
    return br.Batches(torch.randn(examples, 3), torch.randint(10, (examples,)), size=4, **arguments)


def everything_below(directory: Path) -> dict[str, bytes | None]:
    return {
        str(path.relative_to(directory)): path.read_bytes() if path.is_file() else None for path in directory.rglob("*")
    }


@pytest.fixture
def refuse(tmp_path: Path) -> Callable[..., BaseException]:
    """Does ``tune`` refuse this, with nothing written, the user's model and all random numbers as they were?"""

    def refuse(
        kind: type[BaseException],
        match: str,
        problem: br.Problem,
        method: br.Method = IMPLICIT,
        *,
        train: Any = None,
        valid: Any = None,
        **arguments: Any,
    ) -> BaseException:
        train = batches() if train is None else train
        valid = batches() if valid is None else valid
        arguments = {"steps": 3, "run_dir": tmp_path / "run", **arguments}
        model = problem.model if isinstance(problem, br.Problem) else nn.Module()
        files, flags = everything_below(tmp_path), [module.training for module in model.modules()]
        state = copy.deepcopy(model.state_dict())
        torch_before, python_before, numpy_before = torch.get_rng_state(), random.getstate(), np.random.get_state()
        with pytest.raises(kind, match=match) as caught:
            br.tune(problem, method, train, valid, **arguments)
        assert everything_below(tmp_path) == files
        assert torch.equal(torch.get_rng_state(), torch_before)
        assert random.getstate() == python_before
        assert all(np.array_equal(a, b) for a, b in zip(np.random.get_state(), numpy_before, strict=True))
        assert [module.training for module in model.modules()] == flags
        assert all(parameter.grad is None for parameter in model.parameters())
        for name, tensor in model.state_dict().items():
            assert tensor.is_meta or torch.equal(tensor, state[name]), name
        return caught.value

    return refuse


# ---------------------------------------------------------------------------------------------------------- hypers


def test_hyper_that_the_training_loss_never_reads(refuse: Callable[..., Any]) -> None:
    refuse(ValueError, "train_loss never reads hyper 'smooth'", problem(smooth=br.Hyper(0.1)))
    refuse(ValueError, "train_loss never reads hyper 'smooth'", problem(smooth=br.Hyper(0.1)), JOINT)


def test_hyper_that_only_the_validation_loss_reads(refuse: Callable[..., Any]) -> None:
    def valid_loss(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
        return plain(model, batch, hyper) * hyper["scale"]

    refuse(ValueError, "train_loss never reads hyper 'scale'", problem(decayed, valid_loss, scale=br.Hyper(0.1)))


@pytest.mark.parametrize(
    "read",
    [
        lambda hyper: (hyper["decay"], hyper["scale"]),
        lambda hyper: (hyper.get("decay"), hyper.get("scale")),
        lambda hyper: tuple(hyper.values()),
        lambda hyper: tuple(dict(hyper.items()).values()),
        lambda hyper: tuple(hyper[name] for name in hyper),
        lambda hyper: tuple(dict(hyper).values()),
        lambda hyper: tuple({**hyper}.values()),
        lambda hyper: tuple((hyper | {}).values()),
        lambda hyper: (lambda decay, scale: (decay, scale))(**hyper),
    ],
    ids=["[]", "get", "values", "items", "iteration", "dict", "{**}", "|", "**"],
)
def test_hypers_may_be_read_in_every_way_a_dict_is(read: Callable[[Any], tuple[Tensor, Tensor]]) -> None:
    def train_loss(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
        decay, scale = read(hyper)
        return decayed(model, batch, {"decay": decay}) * scale

    result = br.tune(problem(train_loss, scale=br.Hyper(0.5)), IMPLICIT, batches(), batches(), steps=2)
    assert result.status is br.Status.FINISHED


@pytest.mark.parametrize(
    "cut",
    [Tensor.item, Tensor.detach, lambda value: round(value.item()), lambda value: value > 0.3],
    ids=["item", "detach", "round to a number", "comparison"],
)
def test_hyper_whose_derivative_is_cut_off(cut: Callable[[Tensor], Any], refuse: Callable[..., Any]) -> None:
    def train_loss(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
        return decayed(model, batch, hyper) * (1 + cut(hyper["power"]))

    cut_off = problem(train_loss, power=br.Hyper(0.4, low=0.0, high=9.0))
    message = str(refuse(ValueError, "train_loss reads hyper 'power'", cut_off))
    assert "Implicit needs that derivative" in message
    # A method that only samples has no need of it.
    assert br.tune(cut_off, JOINT, batches(), batches(), steps=2).status is br.Status.FINISHED


def test_hyper_whose_derivative_is_zero_is_warned_of() -> None:
    """Rounding keeps a hyper in the graph, and its derivative is zero everywhere: it would silently stay."""

    def train_loss(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
        return decayed(model, batch, hyper) * (1 + hyper["power"].round())

    rounded = problem(train_loss, power=br.Hyper(0.4, low=0.0, high=9.0))
    with pytest.warns(UserWarning, match="derivative of train_loss in hyper 'power' is zero .* Implicit needs"):
        br.tune(rounded, IMPLICIT, batches(), batches(), steps=2)
    assert br.tune(rounded, JOINT, batches(), batches(), steps=2).status is br.Status.FINISHED


def test_sampled_hyper_with_a_method_that_differentiates(refuse: Callable[..., Any]) -> None:
    def train_loss(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
        x, y = batch
        loss = F.cross_entropy(model(x), y, reduction="none") * hyper["rate"]  # one value per example
        return loss + br.functional.l2(model, hyper["decay"])

    sampled = problem(train_loss, rate=br.Hyper(0.2, low=0.0, high=0.9, sampled=True))
    refuse(ValueError, "Implicit differentiates .* 'rate' is declared sampled", sampled)
    # Also for a loss that does not know yet that it gets one value per example.
    wrong = problem(decayed, rate=br.Hyper(0.2, low=0.0, high=0.9, sampled=True))
    refuse(ValueError, "Implicit differentiates .* 'rate' is declared sampled", wrong)


def test_loss_that_does_not_know_what_sampled_means(refuse: Callable[..., Any]) -> None:
    def train_loss(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]) * hyper["rate"], batch[1])  # (4, 10) · (4,)

    error = refuse(RuntimeError, "size of tensor", problem(train_loss, rate=br.Hyper(0.2, sampled=True)), JOINT)
    assert error.__notes__[-1] == "one value per example is given of the sampled rate"


@pytest.mark.parametrize("which", ["train", "valid"])
def test_misspelt_hyper(which: str, refuse: Callable[..., Any]) -> None:
    def misspelt(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
        return plain(model, batch, hyper) * hyper["dcay"]

    losses = {"train_loss": decayed, "valid_loss": plain, f"{which}_loss": misspelt}
    error = refuse(KeyError, "dcay", problem(**losses))
    where, there = error.__notes__
    assert where.startswith(f"in {which}_loss, on the first batch of {which}: tuple of float")
    assert where.endswith("(4, 3), int64 (4,)")
    assert there == "the space has the hypers decay"


def test_misspelt_hyper_in_the_method(refuse: Callable[..., Any]) -> None:
    refuse(KeyError, "'dcay', which no hyper is named", problem(), br.methods.luketina2016(hyper_lr={"dcay": 0.1}))
    grid = br.methods.cross_validation(br.Grid({"dcay": [0.1]}), 3)
    refuse(KeyError, "no hyper is named 'dcay'; the space has decay", problem(), grid)


def test_hyper_outside_its_bounds(refuse: Callable[..., Any]) -> None:
    with pytest.raises(ValueError, match=r"start must lie strictly between 0.0 and 0.5; got 0.7"):
        br.Hyper(0.7, low=0.0, high=0.5)
    bounded = problem(_scaled, scale=br.Hyper(0.1, low=0.0, high=0.5))
    for values in ([0.7], [0.1, 0.7]):  # the second trial's values too are known before the first one is trained
        grid = br.methods.cross_validation(br.Grid({"scale": values}), 1)
        refuse(ValueError, "(?s)'scale'.*strictly between 0.0 and 0.5; got 0.7", bounded, grid)


def _scaled(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
    return decayed(model, batch, hyper) * hyper["scale"]


@pytest.mark.parametrize("name", ["step", "seconds", "train_loss", "valid_batches"])
def test_hyper_that_would_hide_a_column_of_the_history(name: str, refuse: Callable[..., Any]) -> None:
    def train_loss(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
        return decayed(model, batch, hyper) * hyper[name]

    space = br.Space(decay=br.Hyper(1e-3, log=True), **{name: br.Hyper(0.5)})
    refuse(ValueError, f"hyper '{name}'", br.Problem(problem().model, space, train_loss, plain))


# ---------------------------------------------------------------------------------------------------------- losses

WRONG_LOSSES: dict[str, tuple[Any, type[Exception], str]] = {
    "one number per class": (
        lambda model, batch, hyper: hyper["decay"] * model(batch[0]),
        ValueError,
        r"must return one number, or one per example; got shape \(4, 10\)",
    ),
    "whole numbers": (
        lambda model, batch, hyper: (hyper["decay"] * model(batch[0])).argmax(-1),
        TypeError,
        "must return floating-point numbers; got torch.int64",
    ),
    "nothing": (
        lambda model, batch, hyper: hyper.get("nothing", hyper["decay"] and None),
        TypeError,
        "must return a tensor; got NoneType. Is a return missing?",
    ),
    "a float": (
        lambda model, batch, hyper: (hyper["decay"] * model(batch[0])).mean().item(),
        TypeError,
        "must return a tensor; got float",
    ),
    "detached": (
        lambda model, batch, hyper: (hyper["decay"] * model(batch[0])).mean().detach(),
        ValueError,
        "does not depend on the weights",
    ),
    "on another device": (
        lambda model, batch, hyper: (hyper["decay"] * model(batch[0])).mean().to("meta"),
        ValueError,
        "returned a tensor on meta, and the model is on",
    ),
}


@pytest.mark.parametrize("which", ["train", "valid"])
@pytest.mark.parametrize("wrong", WRONG_LOSSES)
def test_loss_that_is_no_loss(which: str, wrong: str, refuse: Callable[..., Any]) -> None:
    loss, kind, message = WRONG_LOSSES[wrong]
    refuse(kind, f"{which}_loss {message}", problem(**{"train_loss": decayed, f"{which}_loss": loss}))


@pytest.mark.parametrize("which", ["train", "valid"])
@pytest.mark.parametrize("copied", [False, True], ids=["the problem's own model", "a copy of it"])
def test_loss_of_an_outside_model(which: str, copied: bool, refuse: Callable[..., Any]) -> None:
    outside: list[nn.Module] = []

    def loss(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
        return decayed(outside[0], batch, hyper)

    wrong = problem(**{"train_loss": decayed, f"{which}_loss": loss}, norm=nn.LayerNorm)
    outside.append(copy.deepcopy(wrong.model) if copied else wrong.model)
    message = str(refuse(ValueError, f"{which}_loss does not depend on the weights", wrong))
    assert "Use the model it is given" in message


@pytest.mark.parametrize("which", ["train", "valid"])
def test_loss_that_takes_some_weights_from_outside(which: str, refuse: Callable[..., Any]) -> None:
    """They are not the ones in training: a penalty on them, for instance, would silently do nothing."""
    outside: list[nn.Module] = []

    def loss(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
        return plain(model, batch, hyper) + br.functional.l2(outside[0], hyper["decay"])

    def distance(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
        pairs = zip(model.parameters(), outside[0].parameters(), strict=True)
        return plain(model, batch, hyper) + hyper["decay"] * sum((p - q.detach()).square().sum() for p, q in pairs)

    for method in (IMPLICIT, JOINT):
        wrong = problem(**{"train_loss": decayed, f"{which}_loss": loss})
        outside[:] = [wrong.model]
        refuse(ValueError, f"{which}_loss uses weights of your model from outside", wrong, method)
    right = problem(**{"train_loss": decayed, f"{which}_loss": distance})
    outside[:] = [right.model]
    assert br.tune(right, IMPLICIT, batches(), batches(), steps=1).status is br.Status.FINISHED


def test_loss_of_nothing(refuse: Callable[..., Any]) -> None:
    """The mean of no numbers is NaN."""
    empty = problem(lambda model, batch, hyper: decayed(model, batch, hyper).expand(0))
    refuse(ValueError, r"train_loss must return one number, or one per example; got shape \(0,\)", empty)


def test_hyper_read_as_an_attribute(refuse: Callable[..., Any]) -> None:
    attribute = problem(lambda model, batch, hyper: plain(model, batch, hyper) * hyper.decay)
    refuse(AttributeError, r"hypers are read by name from a dict: hyper\['decay'\]", attribute)


def test_loss_that_raises_is_not_dressed_up(refuse: Callable[..., Any]) -> None:
    def broken(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
        raise ZeroDivisionError("the user's own")

    refuse(ZeroDivisionError, "the user's own", problem(broken))
    refuse(ZeroDivisionError, "the user's own", problem(decayed, broken))


def test_metric_that_is_no_metric_is_found_before_the_run(refuse: Callable[..., Any]) -> None:
    """Found at the end only, it would cost the whole run's result."""

    def errors(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
        return model(batch[0]).argmax(-1) != batch[1]

    error = refuse(TypeError, "floating-point", problem(), evaluate={"test": batches()}, metrics={"error": errors})
    assert "'error'" in " ".join([str(error), *getattr(error, "__notes__", [])])


def test_nan_on_the_very_first_batch_leaves_the_model_as_it_was(tmp_path: Path) -> None:
    def nan_loss(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
        return decayed(model, batch, hyper) * torch.nan

    wrong = problem(nan_loss)
    method = br.methods.luketina2016(schedule=br.Alternate(warmup=100))
    with pytest.warns(RuntimeWarning, match=r"train_loss became nan at step 1 \(train batch number 1\)"):
        result = br.tune(wrong, method, batches(), batches(), steps=3, run_dir=tmp_path / "run")
    assert (result.status, result.step) == (br.Status.NON_FINITE, 0)
    for name, tensor in wrong.model.state_dict().items():
        assert torch.equal(result.model.state_dict()[name], tensor), name


# ----------------------------------------------------------------------------------------------------------- data


def _data(which: str, data: Any) -> dict[str, Any]:
    return {"evaluate": {"test": data}} if which == "test" else {which: data}


@pytest.mark.parametrize("which", ["train", "valid", "test"])
@pytest.mark.parametrize("kind", ["list", "Batches", "DataLoader"])
def test_empty_loader(which: str, kind: str, refuse: Callable[..., Any]) -> None:
    empty: Any = []
    if kind == "Batches":
        empty = batches(3, drop_last=True)
    if kind == "DataLoader":
        empty = DataLoader(TensorDataset(torch.zeros(3, 3), torch.zeros(3)), batch_size=4, drop_last=True)
    refuse(ValueError, f"{which} is empty: it gave no batch", problem(), **_data(which, empty))


@pytest.mark.parametrize("which", ["train", "valid", "test"])
@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: iter([1]), "must start anew each time it is iterated, and a list_iterator can be read only once"),
        (lambda: (batch for batch in batches()), "a generator can be read only once"),
        (lambda: 5, "must be iterable: a DataLoader, br.Batches or a list of batches; got int"),
        (lambda: TensorDataset(torch.zeros(4, 3)), "got TensorDataset. Put it in a DataLoader"),
        (lambda: torch.zeros(4, 3), "a tensor gives rows: br.Batches"),
        (lambda: br.Stream(batches()), "is a br.Stream already; give the loader itself"),
    ],
    ids=["iterator", "generator", "number", "data set", "tensor", "stream"],
)
def test_what_is_no_loader(which: str, make: Callable[[], Any], message: str, refuse: Callable[..., Any]) -> None:
    refuse(TypeError, f"^{which} .*{message}", problem(), **_data(which, make()))


def test_workers_that_outlive_a_pass_are_warned_about() -> None:
    with torch.device("cpu"):
        loader = DataLoader(
            TensorDataset(torch.randn(8, 3), torch.randint(10, (8,))),
            batch_size=4,
            num_workers=1,
            persistent_workers=True,
        )
        with pytest.warns(UserWarning, match=r"train keeps its workers .*persistent_workers=True.* Set it to False"):
            br.tune(problem(), IMPLICIT, loader, batches(), steps=1)


# ------------------------------------------------------------------------------------------------ model and memory


def test_model_on_two_devices(refuse: Callable[..., Any]) -> None:
    wrong = problem()
    wrong.model.register_buffer("far", torch.zeros(2, device="meta"))
    refuse(ValueError, "the model must be on one device; got '0.weight' on .*, 'far' on meta", wrong)
    wrong = problem()
    wrong.model[3] = nn.Linear(6, 10, device="meta")  # type: ignore[index]
    refuse(ValueError, "the model must be on one device; got '0.weight' on .*, '3.weight' on meta", wrong)


def test_hypernetwork_too_large(refuse: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    weights = 3 * 6 + 6 + 6 + 6 + 6 * 10 + 10
    needed = 4 * 2 * weights * torch.finfo(torch.get_default_dtype()).bits // 8
    monkeypatch.setattr("bestresponse.memory.total_memory", lambda device: needed)
    br.tune(problem(), JOINT, batches(), batches(), steps=1)
    monkeypatch.setattr("bestresponse.memory.total_memory", lambda device: needed - 1)
    message = str(refuse(MemoryError, rf"Linear\(.*\) for 1 hypers and {weights} weights", problem(), JOINT))
    assert f"holds {2 * weights} numbers" in message
    assert "br.LowRank" in message


# ------------------------------------------------------------------------------------------------------- arguments


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"steps": 0}, "steps must be at least 1; got 0"),
        ({"resume": True, "run_dir": None}, "resume=True needs the run_dir"),
        ({"metrics": {"loss": plain}}, "metrics needs loaders to be evaluated on"),
        ({"evaluate_every": 2}, "evaluate_every needs loaders to evaluate"),
        ({"evaluate_every": 2, "evaluate": {}}, "evaluate_every needs loaders to evaluate"),
        ({"evaluate_every": 0, "evaluate": {"test": [(torch.zeros(2, 3), torch.zeros(2).long())]}}, "evaluate_every"),
        ({"checkpoint_every": 0}, "checkpoint_every must be at least 1 step; got 0"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_arguments_that_cannot_be(arguments: dict[str, Any], message: str, refuse: Callable[..., Any]) -> None:
    refuse(ValueError, message, problem(), **arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"problem": nn.Linear(1, 1)}, r"problem must be a br.Problem\(model, .*got Linear\("),
        ({"method": "luketina2016"}, "method must be a Method, such as .*; got 'luketina2016'$"),
        ({"method": br.methods.luketina2016}, r"method must be .*Call it: luketina2016\(\.\.\.\)"),
        ({"method": br.Implicit}, r"method must be .*Call it: Implicit\(\.\.\.\)"),
        ({"steps": 2.5}, "steps must be a whole number; got 2.5"),
        ({"seed": None}, "seed must be a whole number; got None"),
        ({"callbacks": print}, "callbacks must be a list of functions; .* Put it in a list"),
        ({"callbacks": [3]}, "a callback must be a function of an event; got 3$"),
        ({"callbacks": [br.callbacks.keep_best]}, r"a callback must be .*Call it: keep_best\(\.\.\.\)"),
        ({"evaluate": [1]}, r"evaluate must be a dict of loaders by name; got \[1\]"),
        ({"metrics": plain}, "metrics must be a dict of functions by name; got"),
        ({"metrics": {"loss": 3}}, "the metric 'loss' must be a function .*; got 3"),
    ],
)
def test_arguments_of_another_type(arguments: dict[str, Any], message: str, refuse: Callable[..., Any]) -> None:
    refuse(TypeError, message, **{"problem": problem(), **arguments})


def test_run_dir_that_holds_a_run(tmp_path: Path, refuse: Callable[..., Any]) -> None:
    br.tune(problem(), IMPLICIT, batches(), batches(), steps=1, run_dir=tmp_path / "run")
    message = str(refuse(FileExistsError, "holds a run already", problem()))
    assert str(tmp_path / "run") in message
    assert "resume=True" in message


def test_run_dir_that_is_a_file(tmp_path: Path, refuse: Callable[..., Any]) -> None:
    (tmp_path / "file").write_text("in the way")
    refuse(
        NotADirectoryError, "run_dir must be a directory, and .*file is a file", problem(), run_dir=tmp_path / "file"
    )


@pytest.mark.parametrize("below", ["", "run", "a/b"])
def test_run_dir_at_or_below_a_file(below: str, tmp_path: Path, refuse: Callable[..., Any]) -> None:
    (tmp_path / "file").write_text("in the way")
    with_file = tmp_path / "file" / below
    refuse(OSError, str(with_file if below != "a/b" else with_file.parent.parent), problem(), run_dir=with_file)

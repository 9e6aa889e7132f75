"""What comes out of a run, and what is left of it in files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import safetensors.torch
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bestresponse as br
from bestresponse.testing import TinyNet, net_problem

T1T2 = br.methods.luketina2016()
FILES = {"model.safetensors", "hyperparameters.safetensors", "hyperparameters.json"}


@pytest.fixture
def result() -> br.Result:
    problem, train, valid = net_problem()
    return br.tune(problem, T1T2, train, valid, steps=5, evaluate={"test": valid})


def flat(values: br.space.Values) -> dict[str, Tensor]:
    return {
        f"{name}.{part}" if part else name: tensor
        for name, value in values.items()
        for part, tensor in (value.items() if isinstance(value, dict) else [("", value)])
    }


def test_saved_and_loaded_is_the_same_bit_for_bit(result: br.Result, tmp_path: Path) -> None:
    result.save(tmp_path / "a" / "b")
    assert {path.name for path in (tmp_path / "a" / "b").iterdir()} == FILES
    fresh = TinyNet()
    values = br.load(tmp_path / "a" / "b", fresh)
    for name, tensor in result.model.state_dict().items():
        assert torch.equal(fresh.state_dict()[name], tensor), name
    assert fresh.second.weight is fresh.first.weight
    assert list(values) == sorted(result.values)
    read, own = flat(values), flat(result.values)
    assert read.keys() == own.keys()
    for name, tensor in own.items():
        assert torch.equal(read[name].to(tensor.device), tensor), name
        assert read[name].dtype == tensor.dtype


def test_weights_load_without_this_library(result: br.Result, tmp_path: Path) -> None:
    result.save(tmp_path)
    fresh = TinyNet()
    safetensors.torch.load_model(fresh, str(tmp_path / "model.safetensors"), strict=True)
    x = torch.randn(7, 4)
    assert torch.equal(fresh.eval()(x), result.model.eval()(x))
    assert set(safetensors.torch.load_file(tmp_path / "hyperparameters.safetensors")) == set(flat(result.values))


def test_another_class_is_refused(result: br.Result, tmp_path: Path) -> None:
    result.save(tmp_path)
    for wrong in (TinyNet(batch_norm=False), TinyNet(classes=4), nn.Linear(4, 3)):
        with pytest.raises(RuntimeError, match=r"running_mean|size mismatch|first"):
            br.load(tmp_path, wrong)


def test_readable_file_says_what_was_found(result: br.Result, tmp_path: Path) -> None:
    result.save(tmp_path)
    text = (tmp_path / "hyperparameters.json").read_text()
    said = json.loads(text)
    assert said["status"] == "FINISHED"
    assert said["step"] == 5
    assert said["metrics"] == result.metrics == {"test/loss": result.metrics["test/loss"]}
    assert said["hyperparameters"]["smooth"] == result.values["smooth"].item()
    layers = said["hyperparameters"]["layer"]
    assert layers == {name: value.item() for name, value in result.values["layer"].items()}
    assert said["hyperparameters"]["decay"]["head.weight"] == result.values["decay"]["head.weight"].tolist()


@pytest.mark.parametrize("count", [100, 101, 100_000])
def test_readable_file_stays_small(count: int, tmp_path: Path) -> None:
    """Up to a hundred numbers are written out; of more it says how many there are, and between what they lie."""
    model = nn.Linear(1, 1, bias=False)
    space = br.Space(weight=br.Hyper(torch.linspace(1.0, 3.0, count), low=0.0, shape=(count,)))
    data = br.Batches(torch.ones(4, 1), torch.arange(4), size=4, shuffle=False)

    def train_loss(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
        return hyper["weight"][batch[1]] * model(batch[0])[:, 0].square()

    problem = br.Problem(model, space, train_loss, lambda model, batch, hyper: model(batch[0]).square().mean())
    result = br.tune(problem, T1T2, data, data, steps=1)
    result.save(tmp_path)
    said = json.loads((tmp_path / "hyperparameters.json").read_text())["hyperparameters"]["weight"]
    assert (tmp_path / "hyperparameters.json").stat().st_size < 5_000
    value = result.values["weight"]
    if count == 100:
        assert said == value.tolist()
    else:
        assert said["shape"] == [count]
        assert said["min"] == min(value.tolist())
        assert said["max"] == max(value.tolist())
        assert said["mean"] == pytest.approx(sum(value.tolist()) / count)
    assert torch.equal(br.load(tmp_path, nn.Linear(1, 1, bias=False))["weight"].to(value.device), value)


def test_hyper_that_is_a_network_is_saved(tmp_path: Path) -> None:
    problem, train, valid = net_problem()
    scorer = nn.Linear(4, 1)

    def train_loss(model: nn.Module, batch: Any, hyper: Any) -> Tensor:
        x, y = batch
        weight = torch.func.functional_call(scorer, hyper["scorer"], (x,))[:, 0].sigmoid()
        return weight * F.cross_entropy(model(x), y, reduction="none")

    problem = br.Problem(problem.model, br.Space(scorer=br.Net(scorer)), train_loss, problem.valid_loss)
    result = br.tune(problem, T1T2, train, valid, steps=4)
    result.save(tmp_path)
    values = br.load(tmp_path, TinyNet())
    scorer.load_state_dict(values["scorer"], strict=True)
    assert torch.equal(scorer.weight, result.values["scorer"]["weight"])
    assert result.values["scorer"]["weight"].shape == (1, 4)


def test_saving_again_replaces_and_failing_to_spares(
    result: br.Result, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    result.save(tmp_path)
    before = {path.name: path.read_bytes() for path in tmp_path.iterdir()}
    problem, train, valid = net_problem()
    other = br.tune(problem, T1T2, train, valid, steps=6)

    def fail(*arguments: Any) -> None:
        raise OSError("no space")

    with monkeypatch.context() as broken:
        broken.setattr(Path, "replace", fail)
        with pytest.raises(OSError, match="no space"):
            other.save(tmp_path)
    assert {path.name: path.read_bytes() for path in tmp_path.iterdir()} == before
    other.save(tmp_path)
    assert {path.name for path in tmp_path.iterdir()} == FILES
    assert json.loads((tmp_path / "hyperparameters.json").read_text())["step"] == 6
    assert (tmp_path / "model.safetensors").read_bytes() != before["model.safetensors"]


def test_run_directory_holds_the_result(tmp_path: Path) -> None:
    problem, train, valid = net_problem()
    result = br.tune(problem, T1T2, train, valid, steps=5, run_dir=tmp_path / "run")
    result.save(tmp_path / "by hand")
    for name in FILES:
        assert (tmp_path / "run" / "result" / name).read_bytes() == (tmp_path / "by hand" / name).read_bytes(), name


def test_result_is_apart_from_everything_else() -> None:
    """Going on with the state, or training the result, changes neither the other nor the user's model."""
    problem, train, valid = net_problem()
    result = br.tune(problem, T1T2, train, valid, steps=5)
    weights = {name: tensor.clone() for name, tensor in result.model.state_dict().items()}
    smooth, raw = result.values["smooth"].clone(), result.raw["smooth"].clone()
    T1T2.step(problem, result.state, br.Stream(train), br.Stream(valid))
    assert not torch.equal(result.state.raw["smooth"], raw)
    assert torch.equal(result.raw["smooth"], raw)
    assert torch.equal(result.values["smooth"], smooth)
    for name, tensor in result.model.state_dict().items():
        assert torch.equal(tensor, weights[name]), name
    users = {name: tensor.clone() for name, tensor in problem.model.state_dict().items()}
    with torch.no_grad():
        for parameter in result.model.parameters():
            parameter.zero_()
    for name, tensor in problem.model.state_dict().items():
        assert torch.equal(tensor, users[name]), name


def test_result_can_be_trained_on(result: br.Result) -> None:
    """Weights that were tuned ask for gradients, frozen ones do not."""
    wanted = {name for name, parameter in result.model.named_parameters() if parameter.requires_grad}
    assert wanted == {name for name, _ in result.model.named_parameters()} - {"embed.weight"}
    result.model(torch.randn(5, 4)).sum().backward()
    assert result.model.head.weight.grad is not None


def test_repr_says_how_it_ended(result: br.Result) -> None:
    loss, smooth = result.metrics["test/loss"], result.values["smooth"].item()
    assert repr(result) == f"Result(FINISHED, step=5, smooth={smooth:.4g}, test/loss={loss:.4g})"


def test_statuses_are_sentences() -> None:
    assert {status.name for status in br.Status} == {"FINISHED", "STOPPED", "INTERRUPTED", "NON_FINITE"}
    assert all(status.value[0].isupper() and status.value.endswith(".") for status in br.Status)


def test_history_as_a_data_frame() -> None:
    pytest.importorskip("pandas")
    problem, train, valid = net_problem()
    result = br.tune(problem, T1T2, train, valid, steps=5, evaluate={"test": valid}, evaluate_every=2)
    frame = result.history.to_pandas()
    assert list(frame.index) == [1, 2, 3, 4, 5]
    assert frame.index.name == "step"
    assert list(frame["smooth"]) == result.history["smooth"]
    assert list(frame["test/loss"].notna()) == [False, True, False, True, False]

"""Figures 1 and 2 in the released configuration, against the published numbers (50 · MSE − 1.3836, 10 images)."""

import pytest
import torch

import bestresponse as br
from bestresponse.papers import data
from bestresponse.papers.lorraine2018 import (
    OFFSET,
    Squares,
    released_cross_validation,
    released_draws,
    released_global,
    released_local,
    released_slope,
    ten_images,
)

# λ, training objective and validation loss of the crosses in figures 1 and 2, read from the published vector figures.
CROSSES = [
    (-1.0000, -1.18836, 2.75590),
    (-0.5556, -1.09853, 2.72325),
    (-0.1111, -0.96608, 2.69208),
    (0.3333, -0.76747, 2.66412),
    (0.7778, -0.46704, 2.63841),
    (1.2222, -0.02069, 2.61410),
    (1.6667, 0.61313, 2.60045),
    (2.1111, 1.45008, 2.62466),
    (2.5556, 2.41842, 2.74375),
    (3.0000, 3.26281, 3.03956),
]


@pytest.fixture(scope="module")
def images() -> data.Images:
    try:
        return data.mnist()
    except ConnectionError as error:
        pytest.skip(f"MNIST cannot be had here: {error}")


@pytest.fixture(autouse=True)
def _float64() -> None:
    torch.set_default_dtype(torch.float64)


def test_offset_is_the_gaussians() -> None:
    x = torch.randn(5)
    likelihood = torch.distributions.Normal(0.0, 0.1).log_prob(x)
    torch.testing.assert_close(50 * x.square() + OFFSET, -likelihood)


def test_squares_are_the_mean_squared_error() -> None:
    model, x, y = torch.nn.Linear(5, 3), torch.randn(20, 5), torch.randn(20, 3)
    torch.testing.assert_close(Squares.of(x, y).error(model), (model(x) - y).square().mean())


def test_hypernetworks_have_the_papers_sizes() -> None:
    assert released_global().response.size(hypers=1, weights=7850) == 400_450
    assert released_local().response.size(hypers=1, weights=7850) == 15_700
    assert br.Linear().size(hypers=10, weights=7850) == 86_350
    assert br.LowRank(10).size(hypers=7850, weights=7850) == 164_860


def test_cross_validation_crosses(images: data.Images) -> None:
    for log_decay, train_objective, valid_loss in CROSSES:
        ten = ten_images(images, start=0.0)
        method = released_cross_validation(log_decay)
        result = br.tune(ten.problem, method, ten.train, ten.valid, steps=method.steps)
        with torch.no_grad():
            objective = ten.problem.train_loss(result.model, ten.train[0], result.values)
        assert float(objective) == pytest.approx(train_objective, abs=0.002)
        assert result.history.row()["valid_loss"] == pytest.approx(valid_loss, abs=0.002)


def curve(ten: object, method: br.BestResponse, state: br.State, at: torch.Tensor) -> list[float]:
    """The validation loss of the hypernetwork's weights at each λ."""
    losses = []
    for log_decay in at:
        raw = {"log_decay": log_decay}
        with torch.no_grad():
            params = method.respond(state, raw)
            losses.append(float(br.evaluate(ten.problem, "valid", params, raw, ten.valid[0])))
    return losses


@pytest.mark.slow
def test_local_hypernetwork(images: data.Images) -> None:
    slope, bias = released_draws(784, count=2)
    ten = ten_images(images, start=-3.5, weights=bias)
    method = released_local()
    result = br.tune(ten.problem, method, ten.train, ten.valid, steps=10_000, callbacks=[released_slope(slope)])
    assert float(result.raw["log_decay"]) == pytest.approx(1.8357, abs=0.01)
    assert result.history.row()["valid_loss"] == pytest.approx(2.602, abs=0.002)
    low, high = curve(ten, method, result.state, torch.tensor([-1.0, 3.0]))
    assert low == pytest.approx(6.084, abs=0.02)
    assert high == pytest.approx(3.189, abs=0.02)


@pytest.mark.slow
def test_global_hypernetwork(images: data.Images) -> None:
    ten = ten_images(images, start=1.0)
    method = released_global(steps=30_000)
    result = br.tune(ten.problem, method, ten.train, ten.valid, steps=30_000)
    at = torch.linspace(-2, 4, 200)
    losses = torch.tensor(curve(ten, method, result.state, at))
    # Published: the minimum at 1.648, validation loss 2.602, after 100,000 steps with other random numbers.
    assert float(at[losses.argmin()]) == pytest.approx(1.648, abs=0.1)
    assert float(losses.min()) == pytest.approx(2.602, abs=0.01)

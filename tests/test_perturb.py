"""p(λ): moments of many draws, ends, pairs, and what is refused."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

import bestresponse as br

MANY = 40_000
SIGMAS = 5.0


def draw(perturb: br.Perturbation, raw: dict[str, Tensor], count: int = MANY, seed: int = 0) -> dict[str, Tensor]:
    device = next(iter(raw.values())).device
    return perturb.sample(raw, count, torch.Generator(device=device).manual_seed(seed))


def some_raw() -> dict[str, Tensor]:
    return {"rate": torch.tensor(2.0), "decay.weight": torch.tensor([[-1.0, 0.5, 3.0]])}


def assert_moments(sample: Tensor, mean: Tensor | float, deviation: float, kurtosis: float) -> None:
    """Mean and variance within five standard errors, for draws of this kurtosis (fourth moment / σ⁴)."""
    count = len(sample)
    error = SIGMAS * deviation / count**0.5
    assert bool(((sample.mean(dim=0) - mean).abs() <= error).all())
    variance = (sample - mean).square().mean(dim=0)
    error = SIGMAS * deviation**2 * ((kurtosis - 1) / count) ** 0.5
    assert bool(((variance - deviation**2).abs() <= error).all())


def share_below(sample: Tensor, point: float) -> float:
    return float((sample < point).double().mean())


# Gaussian


def test_a_gaussian_follows_the_current_hypers():
    raw = some_raw()
    for name, sample in draw(br.Gaussian(0.3), raw).items():
        assert sample.shape == (MANY, *raw[name].shape)
        assert sample.dtype == raw[name].dtype
        assert_moments(sample, raw[name], 0.3, kurtosis=3.0)


def test_a_gaussian_is_normal():
    sample = draw(br.Gaussian(1.0, mean=0.0), {"a": torch.zeros(())})["a"]
    for point, share in ((-2.0, 0.0227501), (-1.0, 0.1586553), (0.0, 0.5), (1.0, 0.8413447), (2.0, 0.9772499)):
        error = SIGMAS * (share * (1 - share) / MANY) ** 0.5
        assert share_below(sample, point) == pytest.approx(share, abs=error)


def test_numbers_and_leaves_are_independent():
    sample = draw(br.Gaussian(1.0), {"a": torch.zeros(2), "b": torch.zeros(())})
    rows = torch.cat([sample["a"], sample["b"][:, None]], dim=1)  # (samples, 3)
    correlation = rows.T @ rows / MANY - torch.eye(3)
    off = correlation - torch.diag(correlation.diag())
    assert float(off.abs().max()) < SIGMAS / MANY**0.5
    successive = (rows[1:] * rows[:-1]).mean(dim=0)
    assert float(successive.abs().max()) < SIGMAS / MANY**0.5


def test_a_fixed_mean_does_not_follow():
    for sample in draw(br.Gaussian(0.5, mean=-4.0), some_raw()).values():
        assert_moments(sample, -4.0, 0.5, kurtosis=3.0)


def test_scale_and_mean_may_differ_by_leaf():
    perturb = br.Gaussian({"rate": 0.1, "decay.weight": 2.0}, mean={"decay.weight": 7.0, "rate": 1.0})
    sample = draw(perturb, some_raw())
    assert_moments(sample["rate"], 1.0, 0.1, kurtosis=3.0)
    assert_moments(sample["decay.weight"], 7.0, 2.0, kurtosis=3.0)


@pytest.mark.parametrize("perturb", [br.Gaussian({"rate": 0.1}), br.Gaussian(1.0, mean={"rate": 0.0})])
def test_a_leaf_without_a_number_is_refused_by_name(perturb):
    with pytest.raises(KeyError, match=r"numbers are given for \['rate'\], and the space has a leaf 'decay\.weight'"):
        draw(perturb, some_raw(), 1)


def test_clip_moves_draws_to_the_nearer_end_and_no_others():
    raw = {"a": torch.zeros(())}
    free, clipped = (draw(br.Gaussian(1.0, clip=clip), raw)["a"] for clip in (None, (-0.5, 1.0)))
    assert torch.equal(clipped, torch.where(free < -0.5, -0.5, torch.where(free > 1.0, 1.0, free)))
    assert float(clipped.min()) == -0.5
    assert float(clipped.max()) == 1.0


# Box


def test_a_box_is_uniform_between_its_ends_wherever_raw_is():
    for sample in draw(br.Box(-1.0, 3.0), some_raw()).values():
        assert bool((sample >= -1.0).all())
        assert bool((sample <= 3.0).all())
        assert_moments(sample, 1.0, 4 / 12**0.5, kurtosis=1.8)
        for point in (-0.5, 0.0, 2.0, 2.9):
            share = (point + 1) / 4
            error = SIGMAS * (share * (1 - share) / sample.numel()) ** 0.5
            assert share_below(sample, point) == pytest.approx(share, abs=error)


# Pairs, and randomness


@pytest.mark.parametrize(
    ("perturb", "centre"),
    [
        (br.Gaussian(0.3, antithetic=True), None),
        (br.Gaussian(0.3, mean=0.0, antithetic=True), 0.0),
        (br.Box(-1.0, 3.0, antithetic=True), 1.0),
    ],
    ids=str,
)
def test_pairs_mirror_one_another_in_the_centre(perturb, centre):
    raw = some_raw()
    for name, sample in draw(perturb, raw, 10).items():
        middle = raw[name] if centre is None else torch.full_like(raw[name], centre)
        first, second = sample[:5], sample[5:]
        if not middle.any():
            assert torch.equal(first, -second)
        torch.testing.assert_close(first + second, 2 * middle.expand_as(first))
        assert len({tuple(row) for row in first.reshape(5, -1).tolist()}) == 5


@pytest.mark.parametrize("perturb", [br.Gaussian(0.3, antithetic=True), br.Box(-1.0, 3.0, antithetic=True)], ids=str)
def test_pairs_have_the_same_moments(perturb):
    raw = {"a": torch.tensor(1.0)}
    sample = draw(perturb, raw)["a"][: MANY // 2]  # one of each pair
    deviation, kurtosis = (0.3, 3.0) if isinstance(perturb, br.Gaussian) else (4 / 12**0.5, 1.8)
    assert_moments(sample, 1.0, deviation, kurtosis)


@pytest.mark.parametrize("perturb", [br.Gaussian(0.3, antithetic=True), br.Box(-1.0, 3.0, antithetic=True)], ids=str)
def test_an_odd_number_of_pairs_is_refused(perturb):
    with pytest.raises(ValueError, match="come in pairs, so their number must be even; got 3"):
        draw(perturb, some_raw(), 3)


@pytest.mark.parametrize("perturb", [br.Gaussian(0.3), br.Box(-1.0, 3.0)], ids=str)
def test_the_generator_decides_the_draws(perturb):
    raw = some_raw()
    torch.manual_seed(1)
    expected = torch.rand(3)
    torch.manual_seed(1)
    first, second, other = (draw(perturb, raw, 4, seed)["rate"] for seed in (5, 5, 6))
    assert torch.equal(first, second)
    assert not torch.equal(first, other)
    assert torch.equal(torch.rand(3), expected)  # torch's own random numbers are left alone
    assert float(raw["rate"]) == 2.0


# What is refused


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: br.Gaussian(0.0), "scale must be above 0; got 0.0. For no perturbation at all use perturb=None"),
        (lambda: br.Gaussian(-1.0), "scale must be above 0; got -1.0"),
        (lambda: br.Gaussian(float("nan")), "scale must be above 0; got nan"),
        (lambda: br.Gaussian({"a": 1.0, "b": 0.0}), "scale must be above 0; got {'a': 1.0, 'b': 0.0}"),
        (lambda: br.Gaussian(clip=(1.0, -1.0)), r"clip needs \(low, high\) with low < high; got \(1.0, -1.0\)"),
        (lambda: br.Gaussian(clip=(1.0, 1.0)), "clip needs"),
        (lambda: br.Box(1.0, 1.0), "Box needs low < high; got low=1.0, high=1.0"),
        (lambda: br.Box(2.0, 1.0), "got low=2.0, high=1.0"),
    ],
)
def test_a_perturbation_refuses(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize("scale", ["0.1", {"a": None}])
def test_a_scale_is_a_number(scale):
    with pytest.raises(TypeError, match="scale must be a number, or a dict of numbers by the name of a leaf; got"):
        br.Gaussian(scale)

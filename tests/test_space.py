"""Hypers and spaces: the maps between raw and values, names, shapes, starts, priors, and what is refused."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

import bestresponse as br

DOUBLE = torch.float64

HYPERS = {
    "free": br.Hyper(0.3),
    "low": br.Hyper(1.5, low=-2.0),
    "high": br.Hyper(-1.0, high=3.0),
    "bounded": br.Hyper(0.2, low=-1.0, high=4.0),
    "log": br.Hyper(1e-4, log=True),
    "log low": br.Hyper(1e-4, low=1e-8, log=True),
    "log high": br.Hyper(1e-4, high=1e2, log=True),
    "log bounds": br.Hyper(1e-4, low=1e-10, high=1e2, log=True),
}
every_kind = pytest.mark.parametrize("kind", HYPERS)


def softplus(x: float) -> float:
    return max(x, 0.0) + math.log1p(math.exp(-abs(x)))


def bent(raw: float, low: float, high: float) -> float:
    middle, half = (low + high) / 2, (high - low) / 2
    return middle + half * math.tanh((raw - middle) / half)


# The documented maps once more, on Python's floats.
FORMULAS = {
    "free": lambda r: r,
    "low": lambda r: -2.0 + softplus(r),
    "high": lambda r: 3.0 - softplus(-r),
    "bounded": lambda r: -1.0 + 5.0 / (1.0 + math.exp(-r)),
    "log": math.exp,
    "log low": lambda r: math.exp(math.log(1e-8) + softplus(r - math.log(1e-8))),
    "log high": lambda r: math.exp(math.log(1e2) - softplus(math.log(1e2) - r)),
    "log bounds": lambda r: math.exp(bent(r, math.log(1e-10), math.log(1e2))),
}

# Values all over the range of a kind, made from a number between 0 and 1.
VALUES = {
    "free": lambda u: 2e6 * u - 1e6,
    "low": lambda u: -2.0 + 10 ** (12 * u - 6),
    "high": lambda u: 3.0 - 10 ** (12 * u - 6),
    "bounded": lambda u: -1.0 + 5.0 * (1e-6 + (1 - 2e-6) * u),
    "log": lambda u: 10 ** (18 * u - 12),
    "log low": lambda u: 1e-8 * 10 ** (1e-4 + 12 * u),
    "log high": lambda u: 1e2 / 10 ** (1e-4 + 12 * u),
    "log bounds": lambda u: 1e-10 * 1e12 ** (1e-4 + (1 - 2e-4) * u),
}

wide = settings(deadline=None, max_examples=100, derandomize=True)
unit = st.floats(0.0, 1.0)


def double(number: float | list[float]) -> torch.Tensor:
    return torch.tensor(number, dtype=DOUBLE)


def middle_of(kind: str) -> float:
    """A raw where the kind's map is well bent, or in the middle of its range."""
    hyper = HYPERS[kind]
    bounds = [math.log(bound) for bound in (hyper.low, hyper.high) if bound is not None] if hyper.log else [0.0]
    return sum(bounds) / len(bounds) if bounds else -9.0


class Tied(nn.Module):
    """Frozen and tied weights, a layer two levels down, and a parameter that belongs to no layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(3))
        self.block = nn.Sequential(nn.Linear(3, 3), nn.Linear(3, 3, bias=False))
        self.block[1].weight = self.block[0].weight
        self.frozen = nn.Linear(3, 2)
        self.frozen.requires_grad_(False)
        self.head = nn.Linear(3, 2)


# The maps


@every_kind
@given(u=unit)
@wide
def test_raw_leads_back_to_the_value(kind, u):
    value = VALUES[kind](u)
    hyper = HYPERS[kind]
    assert float(hyper.value(hyper.raw(value))) == pytest.approx(value, rel=1e-9, abs=1e-15)


@every_kind
@given(distance=st.floats(-6.0, 6.0))
@wide
def test_value_is_the_documented_formula(kind, distance):
    raw = middle_of(kind) + distance
    assert float(HYPERS[kind].value(double(raw))) == pytest.approx(FORMULAS[kind](raw), rel=1e-12)


@every_kind
@given(distance=st.floats(-6.0, 6.0))
@wide
def test_slope_agrees_with_finite_differences(kind, distance):
    raw, step = double(middle_of(kind) + distance).requires_grad_(), 1e-5
    value = HYPERS[kind].value
    (slope,) = torch.autograd.grad(value(raw), raw)
    difference = float((value(raw + step) - value(raw - step)).detach()) / (2 * step)
    assert float(slope) == pytest.approx(difference, rel=1e-6, abs=1e-9)
    assert float(slope) > 0


@every_kind
def test_a_larger_raw_never_gives_a_smaller_value(kind):
    top = 700.0 if kind in ("log", "log low") else 1e4
    raw = torch.cat([torch.linspace(-30, 30, 60_001, dtype=DOUBLE), torch.linspace(-1e4, top, 1001, dtype=DOUBLE)])
    values = HYPERS[kind].value(raw.sort().values)
    assert bool((values.diff() >= 0).all())


@pytest.mark.parametrize("kind", ["low", "high", "log low", "log high"])
@given(distance=st.floats(15.0, 25.0))
@example(distance=20.0 + 1e-9)
@wide
def test_far_from_its_bound_a_hyper_is_still_exact_and_rising(kind, distance):
    """A softplus that is cut off to a straight line at 20 jumps down by 2e-9 there."""
    hyper = HYPERS[kind]
    sign = 1.0 if kind.endswith("low") else -1.0
    bound = hyper.low if sign > 0 else hyper.high
    raw = (math.log(bound) if hyper.log else 0.0) + sign * distance
    assert float(hyper.value(double(raw))) == pytest.approx(FORMULAS[kind](raw), rel=1e-12)
    step = double(raw - 1e-9), double(raw + 1e-9)
    assert float(hyper.value(step[0])) < float(hyper.value(step[1]))


@every_kind
@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_extreme_raw_stays_in_bounds_and_finite(kind, dtype):
    hyper = HYPERS[kind]
    top = math.log(torch.finfo(dtype).max) - 1 if kind in ("log", "log low") else 1e4  # exp has an end
    raw = torch.tensor([-1e4, -200.0, -50.0, 0.0, 50.0, min(200.0, top), top], dtype=dtype, requires_grad=True)
    value = hyper.value(raw)
    (slope,) = torch.autograd.grad(value.sum(), raw)
    assert bool(torch.isfinite(value).all())
    assert bool(torch.isfinite(slope).all())
    low = 0.0 if hyper.log and hyper.low is None else hyper.low
    assert low is None or bool((value >= low).all())
    assert hyper.high is None or bool((value <= hyper.high).all())


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_rounding_does_not_pass_a_bound(dtype):
    """0.3 + (0.9 - 0.3) is a little more than 0.9."""
    value = br.Hyper(0.5, low=0.3, high=0.9).value(torch.tensor(1e4, dtype=dtype))
    assert 0.3 + (0.9 - 0.3) > 0.9
    assert bool(value <= torch.tensor(0.9, dtype=dtype))


@pytest.mark.parametrize("kind", ["log", "log low", "log high", "log bounds"])
def test_a_log_hyper_moves_in_nats(kind):
    """One number of raw is a factor of e, far from the bounds, whatever the bounds are."""
    far = {"log": -9.0, "log low": 10.0, "log high": -30.0, "log bounds": middle_of("log bounds")}[kind]
    raw = double(far).requires_grad_()
    (slope,) = torch.autograd.grad(HYPERS[kind].value(raw).log(), raw)
    assert float(slope) == pytest.approx(1.0, rel=1e-9)


@pytest.mark.parametrize("kind", ["low", "high"])
def test_a_positive_hyper_moves_in_its_own_units_far_from_the_bound(kind):
    raw = double(30.0 if kind == "low" else -30.0).requires_grad_()
    (slope,) = torch.autograd.grad(HYPERS[kind].value(raw), raw)
    assert float(slope) == pytest.approx(1.0, rel=1e-9)


def test_a_bounded_hyper_moves_in_logits():
    hyper = HYPERS["bounded"]
    share = (hyper.value(hyper.raw(0.2) + 1.0) + 1.0) / 5.0
    assert float(share / (1 - share)) == pytest.approx(math.e * (1.2 / 5.0) / (1 - 1.2 / 5.0), rel=1e-12)


@pytest.mark.parametrize(
    ("hyper", "kind"),
    [
        (br.Hyper(0.0), "free"),
        (br.Hyper(1.0, low=0.0), "positive"),
        (br.Hyper(-1.0, high=0.0), "positive"),
        (br.Hyper(0.5, low=0.0, high=1.0), "bounded"),
        (br.Hyper(0.5, low=0.1, high=1.0, log=True), "log"),
        (br.Hyper(0.5, log=True), "log"),
        (br.Net(nn.Linear(1, 1)), "net"),
    ],
)
def test_kind_follows_from_the_arguments(hyper, kind):
    assert hyper.kind == kind


def test_raw_of_a_number_is_float64_and_of_a_tensor_keeps_its_precision():
    hyper = HYPERS["log bounds"]
    assert hyper.raw(1e-4).dtype == torch.float64
    assert hyper.raw(torch.tensor(1e-4, dtype=torch.float32)).dtype == torch.float32


# Shapes

SHAPES = {
    "scalar": (),
    "vector": (3,),
    "matrix": (2, 3),
    "per_weight": br.per_weight(Tied()),
    "per_tensor": br.per_tensor(Tied()),
    "per_layer": br.per_layer(Tied()),
}


@pytest.mark.parametrize("shape", SHAPES.values(), ids=SHAPES)
@every_kind
def test_a_space_gives_back_values_of_any_shape(kind, shape):
    base = HYPERS[kind]
    hyper = br.Hyper(base.start, base.low, base.high, base.log, shape)
    space = br.Space(a=hyper)
    generator = torch.Generator("cpu").manual_seed(0)

    def some(form: tuple[int, ...]) -> torch.Tensor:
        u = torch.rand(form, generator=generator, dtype=DOUBLE, device="cpu")
        return u.clone().apply_(lambda one: VALUES[kind](0.25 + one / 4)).to(torch.get_default_device())

    parts = {part: some(form) for part, form in hyper.shapes.items()}
    values = parts.get("", parts)
    got = space.values(space.raw({"a": values}, dtype=DOUBLE))["a"]
    torch.testing.assert_close(got, values, rtol=1e-9, atol=1e-12)


def test_every_start_is_where_raw_begins():
    model = Tied()
    tensor = torch.tensor([0.1, 0.2, 0.3], dtype=DOUBLE)
    space = br.Space(
        one=br.Hyper(0.7),
        filled=br.Hyper(0.5, low=0.0, shape=(2, 2)),
        tensor=br.Hyper(tensor, low=0.0, high=1.0, shape=(3,)),
        layers=br.Hyper({"(root)": 1e-3, "block.0": 1e-2, "head": 1e-1}, log=True, shape=br.per_layer(model)),
        net=br.Net(nn.Linear(1, 2)),
    )
    values = space.values(space.raw(dtype=DOUBLE))
    expected = {
        "one": double(0.7),
        "filled": torch.full((2, 2), 0.5, dtype=DOUBLE),
        "tensor": tensor,
        "layers": {"(root)": double(1e-3), "block.0": double(1e-2), "head": double(1e-1)},
        "net": {name: p.detach().to(DOUBLE) for name, p in space["net"].module.named_parameters()},
    }
    torch.testing.assert_close(values, expected, rtol=1e-12, atol=0)


def test_leaves_have_dotted_names_in_order():
    space = br.Space(lr=br.Hyper(0.1, log=True), decay=br.Hyper(1e-3, log=True, shape=br.per_tensor(Tied())))
    assert list(space.raw()) == ["lr", "decay.scale", "decay.block.0.weight", *(f"decay.{n}" for n in LATER)]
    assert space.leaves["decay.block.0.weight"] == ("decay", "block.0.weight", ())


LATER = ["block.0.bias", "head.weight", "head.bias"]


def test_per_weight_leaves_out_frozen_and_counts_tied_once():
    assert br.per_weight(Tied()) == {
        "scale": (3,),
        "block.0.weight": (3, 3),
        "block.0.bias": (3,),
        "head.weight": (2, 3),
        "head.bias": (2,),
    }


def test_per_tensor_has_one_number_a_tensor():
    assert br.per_tensor(Tied()) == dict.fromkeys(["scale", "block.0.weight", *LATER], ())


def test_per_layer_has_one_number_a_layer_and_the_root():
    assert br.per_layer(Tied()) == {"(root)": (), "block.0": (), "head": ()}


@pytest.mark.parametrize("shape_of", [br.per_weight, br.per_tensor])
def test_where_keeps_some_parameters(shape_of):
    assert list(shape_of(Tied(), where=lambda name, p: p.ndim > 1)) == ["block.0.weight", "head.weight"]


def test_where_by_name_keeps_some_layers():
    assert list(br.per_layer(Tied(), where=lambda name, p: name.startswith("head"))) == ["head"]


def test_numel_counts_every_number():
    model = Tied()
    space = br.Space(
        a=br.Hyper(0.0), b=br.Hyper(0.0, shape=(2, 3)), w=br.Hyper(0.0, shape=br.per_weight(model)), n=br.Net(model)
    )
    trainable = sum(p.numel() for p in model.parameters() if p.requires_grad)
    assert trainable == 3 + 9 + 3 + 6 + 2
    assert space.numel == 1 + 6 + 2 * trainable


def test_leading_dimensions_of_raw_are_kept():
    space = br.Space(a=br.Hyper(0.5, low=0.0, high=1.0), b=br.Hyper(1.0, log=True, shape={"x": (2,), "y": ()}))
    raw = {name: torch.randn(4, *leaf.shape) for name, leaf in space.raw().items()}
    values = space.values(raw)
    assert [values["a"].shape, values["b"]["x"].shape, values["b"]["y"].shape] == [(4,), (4, 2), (4,)]
    for i in range(4):
        row = space.values({name: leaf[i] for name, leaf in raw.items()})
        torch.testing.assert_close(row["b"]["x"], values["b"]["x"][i])


# Raw of a space


def test_hypers_that_are_not_given_stand_at_their_start():
    space = br.Space(a=br.Hyper(2.0), b=br.Hyper(3.0, shape=(2,)))
    raw = space.raw({"b": 5.0})
    assert raw["a"].tolist() == 2.0
    assert raw["b"].tolist() == [5.0, 5.0]


def test_an_unknown_name_is_refused_by_name():
    with pytest.raises(KeyError, match="no hyper is named 'decy'; the space has decay, lr"):
        br.Space(decay=br.Hyper(1.0), lr=br.Hyper(1.0)).raw({"decy": 1.0})


@pytest.mark.parametrize("parts", [{"x": 1.0}, {"x": 1.0, "y": 1.0, "z": 1.0}], ids=["lacking", "extra"])
def test_parts_that_do_not_fit_are_refused_by_the_hypers_name(parts):
    space = br.Space(decay=br.Hyper(1.0, shape={"x": (), "y": ()}))
    with pytest.raises((KeyError, ValueError), match="decay"):
        space.raw({"decay": parts})


def test_parts_for_a_hyper_without_parts_are_refused_by_its_name():
    with pytest.raises((KeyError, ValueError, TypeError), match="decay"):
        br.Space(decay=br.Hyper(1.0)).raw({"decay": {"x": 1.0}})


def test_a_value_out_of_bounds_is_refused_by_the_leafs_name():
    space = br.Space(decay=br.Hyper(0.5, low=0.0, high=1.0, shape={"x": (2,)}))
    with pytest.raises(
        ValueError, match=r"hyper 'decay\.x', shape \(2,\): value must lie strictly between 0.0 and 1.0"
    ):
        space.raw({"decay": {"x": torch.tensor([0.5, 2.0])}})


def test_a_start_or_value_of_the_wrong_shape_is_refused():
    with pytest.raises(ValueError, match=r"have the shape of the hyper, \(3,\); got shape \(2,\)"):
        br.Hyper(torch.ones(2), shape=(3,))
    with pytest.raises(ValueError, match=r"have the shape of the hyper, \(2,\); got shape \(3,\)"):
        br.Hyper({"a": 1.0, "b": torch.ones(3)}, shape={"a": (), "b": (2,)})
    with pytest.raises(ValueError, match=r"hyper 'rate', shape \(3,\)"):
        br.Space(rate=br.Hyper(1.0, shape=(3,))).raw({"rate": torch.ones(2)})


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_raw_is_computed_in_float64_then_rounded(dtype):
    raw = br.Space(a=br.Hyper(1e-9, low=1e-10, high=1e2, log=True)).raw(dtype=dtype)["a"]
    exact = br.Hyper(1e-9, low=1e-10, high=1e2, log=True).raw(1e-9)
    assert raw.dtype == dtype
    assert torch.equal(raw, exact.to(dtype))


def test_raw_has_the_default_precision_and_the_device_asked_for():
    raw = br.Space(a=br.Hyper(1.0)).raw(device="meta")["a"]
    assert raw.dtype == torch.get_default_dtype()
    assert raw.device.type == "meta"


def test_raw_shares_nothing_with_the_start():
    start = torch.zeros(3, dtype=DOUBLE, requires_grad=True)
    raw = br.Space(a=br.Hyper(start, shape=(3,))).raw(dtype=DOUBLE)["a"]
    assert not raw.requires_grad
    raw += 1
    assert start.tolist() == [0, 0, 0]


def test_a_filled_raw_has_a_number_of_its_own_for_every_entry():
    raw = br.Space(a=br.Hyper(0.0, shape=(3,))).raw()["a"]
    raw[0] += 1
    assert raw.tolist() == [1, 0, 0]


# Nets


def test_a_net_starts_at_the_modules_weights_and_leaves_the_module_alone():
    module = Tied()
    before = {name: p.detach().clone() for name, p in module.named_parameters()}
    space = br.Space(net=br.Net(module))
    raw = space.raw()
    assert "net.frozen.weight" not in raw
    for tensor in (*raw.values(), *space["net"].start.values()):
        tensor.add_(1.0)
    values = space.values(raw)["net"]
    torch.testing.assert_close(values["head.bias"], before["head.bias"] + 1)
    for name, p in module.named_parameters():
        assert torch.equal(p, before[name]), name


def test_a_net_is_called_with_its_values():
    module = nn.Linear(2, 1)
    space = br.Space(net=br.Net(module))
    weights = {"net": {"weight": torch.tensor([[2.0, -1.0]]), "bias": torch.tensor([0.5])}}
    values = space.values(space.raw(weights))["net"]
    assert torch.func.functional_call(module, values, (torch.tensor([3.0, 4.0]),)).tolist() == [2.5]


# Priors


def test_priors_are_summed_over_hypers_and_leaves():
    space = br.Space(
        a=br.Hyper(2.0, prior=lambda raw: raw.square()),
        b=br.Hyper(3.0, shape={"x": (2,), "y": ()}, prior=lambda raw: 10 * raw),  # its sum counts
        c=br.Hyper(7.0),
        n=br.Net(nn.Linear(1, 1, bias=False), prior=lambda raw: 0 * raw + 100),
    )
    raw = {name: leaf.requires_grad_() for name, leaf in space.raw().items()}
    penalty = space.penalty(raw)
    assert penalty.shape == ()
    assert float(penalty.detach()) == pytest.approx(4 + 10 * (3 + 3) + 10 * 3 + 100)
    by_raw = torch.autograd.grad(penalty, [raw["a"], raw["b.x"], raw["b.y"]])
    assert [grad.tolist() for grad in by_raw] == [4.0, [10.0, 10.0], 10.0]


def test_without_priors_there_is_no_penalty():
    space = br.Space(a=br.Hyper(2.0))
    assert space.penalty(space.raw()) is None


# Descriptions


def test_equal_spaces_have_equal_descriptions_and_others_not():
    def space(**changes):
        return br.Space(a=br.Hyper(**{"start": 0.5, "low": 0.1, "high": 1.0, "shape": (3,)} | changes))

    same = space().describe()
    assert same == space(start=0.6).describe()
    assert same == {"a": "bounded in (0.1, 1), 3 numbers in 1 parts"}
    others = [
        space(low=0.2),
        space(high=None),
        space(log=True),
        space(shape=(4,)),
        space(sampled=True),
        space(prior=torch.square),
        br.Space(b=br.Hyper(0.5, low=0.1, high=1.0, shape=(3,))),
    ]
    descriptions = [str(other.describe()) for other in others]
    assert str(same) not in descriptions
    assert len(set(descriptions)) == len(others)


def test_a_space_prints_its_hypers():
    printed = repr(br.Space(decay=br.Hyper(1e-3, log=True), net=br.Net(nn.Linear(1, 1))))
    assert printed == "Space(decay=log in (-inf, inf), scalar, net=net, 2 numbers in 2 parts)"


def test_a_space_is_a_mapping_of_its_hypers():
    hyper = br.Hyper(1.0)
    space = br.Space(a=hyper, b=br.Hyper(2.0))
    assert (list(space), len(space), space["a"] is hyper, [name for name, _ in space.items()]) == (
        ["a", "b"],
        2,
        True,
        ["a", "b"],
    )


# What is refused


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start": 1.0, "low": 2.0, "high": 1.0}, "low < high; got low=2.0, high=1.0"),
        ({"start": 1.0, "low": 1.0, "high": 1.0}, "low < high; got low=1.0, high=1.0"),
        ({"start": 1.0, "low": 0.0, "log": True}, "low must be above 0; got low=0.0"),
        ({"start": 1.0, "low": -1.0, "log": True}, "low must be above 0; got low=-1.0"),
        ({"start": 1.0, "high": 0.0, "log": True}, "high must be above 0; got high=0.0"),
        ({"start": 0.0, "low": 0.0}, "start must lie strictly between 0.0 and inf; got 0.0"),
        ({"start": 1.0, "high": 1.0}, "start must lie strictly between -inf and 1.0; got 1.0"),
        ({"start": 3.0, "low": 1.0, "high": 2.0}, "start must lie strictly between 1.0 and 2.0; got 3.0"),
        ({"start": 0.0, "log": True}, "start must lie strictly between 0.0 and inf; got 0.0"),
        ({"start": -1.0, "high": 2.0, "log": True}, "start must lie strictly between 0.0 and 2.0; got -1.0"),
        ({"start": math.nan}, "start must lie strictly between -inf and inf; got nan"),
        ({"start": math.inf, "low": 0.0}, "start must lie strictly between 0.0 and inf; got inf"),
        ({"start": {"a": 1.0}, "shape": {"a": (), "b": ()}}, r"lacks \['b'\] and has \[\]"),
        ({"start": {"a": 1.0, "c": 1.0}, "shape": {"a": ()}}, r"lacks \[\] and has \['c'\]"),
        ({"start": {"a": 1.0, "b": 0.0}, "low": 0.0, "shape": {"a": (), "b": ()}}, "got 0.0"),
        ({"start": 1.0, "low": -math.inf}, "low must be a finite number; got -inf. Leave low out"),
        ({"start": 1.0, "low": 0.0, "high": math.inf}, "high must be a finite number; got inf. Leave high out"),
        ({"start": 1.0, "low": math.nan, "high": 2.0}, "low < high; got low=nan"),
        ({"start": 1.0, "shape": (3, 0)}, r"shape must hold at least one number; got \(3, 0\)"),
        ({"start": 1.0, "shape": {"a": (-1,)}}, r"shape must hold at least one number; got \(-1,\)"),
        ({"start": 1.0, "shape": {}}, "shape has no parts.*`where` keeps none"),
    ],
)
def test_a_hyper_refuses(arguments, message):
    with pytest.raises(ValueError, match=message):
        br.Hyper(**arguments)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"start": "0.1"}, "start must be a number, a tensor, or a dict of them by name; got '0.1'"),
        ({"start": None}, "start must be a number.*got None"),
        ({"start": 1.0, "low": "0"}, "low must be a number, or None for no bound; got '0'"),
        ({"start": 1.0, "shape": 3}, r"a tuple of whole numbers, such as \(3,\).*got 3"),
        ({"start": 1.0, "shape": (2.5,)}, "a tuple of whole numbers.*got"),
        ({"start": 1.0, "shape": "per_weight"}, "got 'per_weight'"),
        ({"start": 1.0, "shape": br.per_weight}, "got <function per_weight"),
        ({"start": 1.0, "shape": {"a": 3}}, "or a dict of such tuples by name.*got 3"),
        ({"start": 1.0, "prior": 0.1}, "prior must be a function of a raw tensor, or None; got 0.1"),
    ],
)
def test_a_hyper_refuses_what_is_of_another_type(arguments, message):
    with pytest.raises(TypeError, match=message):
        br.Hyper(**arguments)


def test_shapes_are_made_from_models():
    with pytest.raises(TypeError, match=r"from a model, a torch.nn.Module; got <class .*Linear"):
        br.per_layer(nn.Linear)


def test_a_start_tensor_is_refused_for_the_entry_that_is_out():
    with pytest.raises(ValueError, match=r"between 0\.0 and 1\.0; got 1\.5"):
        br.Hyper(torch.tensor([0.5, 1.5, 0.2]), low=0.0, high=1.0, shape=(3,))


@pytest.mark.parametrize("value", [1.0, 0.0, -3.0, math.nan])
def test_raw_refuses_a_value_on_or_beyond_a_bound(value):
    with pytest.raises(ValueError, match=r"value must lie strictly between 0\.0 and 1\.0"):
        br.Hyper(0.5, low=0.0, high=1.0).raw(value)


def test_a_net_needs_weights_to_tune():
    with pytest.raises(ValueError, match="a Net needs a module with weights to tune; ReLU has none"):
        br.Net(nn.ReLU())
    with pytest.raises(ValueError, match="Linear has none"):
        br.Net(nn.Linear(1, 1).requires_grad_(False))
    with pytest.raises(TypeError, match=r"a Net needs a torch.nn.Module; got 3"):
        br.Net(3)
    with pytest.raises(TypeError, match="prior must be a function of a raw tensor, or None; got 1"):
        br.Net(nn.Linear(1, 1), prior=1)


@pytest.mark.parametrize(
    ("hypers", "error", "message"),
    [
        ({}, ValueError, "at least one hyper"),
        ({"a.b": br.Hyper(1.0)}, ValueError, "must be a Python name, without dots or spaces; got 'a.b'"),
        ({"a b": br.Hyper(1.0)}, ValueError, "got 'a b'"),
        ({"decay": 1e-4}, TypeError, "'decay' must be a br.Hyper or a br.Net; got float"),
    ],
)
def test_a_space_refuses(hypers, error, message):
    with pytest.raises(error, match=message):
        br.Space(**hypers)

"""Update rules against torch's optimizers, and their derivatives against finite differences."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch
from torch import Tensor, nn

import bestresponse as br
from bestresponse.updates import SGD, Adam, Update

STEPS = 6


def rand(seed: int, *shape: int) -> Tensor:
    generator = torch.Generator("cpu").manual_seed(seed)
    draw = torch.randn(*shape, generator=generator, dtype=torch.float64, device="cpu")
    return draw.to(dtype=torch.get_default_dtype(), device=torch.get_default_device())


def params() -> dict[str, Tensor]:
    return {"0.weight": rand(0, 3, 2), "0.bias": rand(1, 3), "2.weight": rand(2, 1, 3)}


def gradients() -> list[dict[str, Tensor]]:
    """Those of six updates; some of them are zero, and one weight's always."""
    each = [{name: rand(10 * t + i, *p.shape) for i, (name, p) in enumerate(params().items())} for t in range(STEPS)]
    each[0]["0.bias"].zero_()
    for gradient in each:
        gradient["0.weight"][0, 0] = 0.0
    return each


def ours(update: Update, values: dict) -> list[dict[str, Tensor]]:
    """The weights after each update."""
    w = params()
    slots, way = update.slots(w), []
    for t, gradient in enumerate(gradients()):
        w, slots = update.step(w, slots, gradient, values, index=t, count=t)
        way.append(w)
    return way


def torchs(make, change=lambda groups, t: None) -> list[dict[str, Tensor]]:
    """The same by an optimizer, with one group a parameter, whose settings ``change`` sets before update t."""
    w = {name: nn.Parameter(p) for name, p in params().items()}
    optimizer = make([{"params": [p]} for p in w.values()])
    way = []
    for t, gradient in enumerate(gradients()):
        change(dict(zip(w, optimizer.param_groups, strict=True)), t)
        for name, p in w.items():
            p.grad = gradient[name]
        optimizer.step()
        way.append({name: p.detach().clone() for name, p in w.items()})
    return way


def same(ours: list[dict[str, Tensor]], theirs: list[dict[str, Tensor]]) -> None:
    exact = torch.get_default_dtype() == torch.float64
    for a, b in zip(ours, theirs, strict=True):
        for name in b:
            torch.testing.assert_close(a[name], b[name], rtol=1e-10 if exact else 1e-5, atol=1e-12 if exact else 1e-6)


@pytest.mark.parametrize(
    ("update", "make"),
    [
        (SGD(0.1), lambda p: torch.optim.SGD(p, 0.1)),
        (SGD(0.1, momentum=0.9), lambda p: torch.optim.SGD(p, 0.1, momentum=0.9)),
        (
            SGD(0.1, momentum=0.9, weight_decay=0.2, nesterov=True),
            lambda p: torch.optim.SGD(p, 0.1, momentum=0.9, weight_decay=0.2, nesterov=True),
        ),
        (Adam(0.1), lambda p: torch.optim.Adam(p, 0.1)),
        (
            Adam(0.1, betas=(0.5, 0.7), eps=0.01, weight_decay=0.3),
            lambda p: torch.optim.Adam(p, 0.1, betas=(0.5, 0.7), eps=0.01, weight_decay=0.3),
        ),
        (
            Adam(0.1, weight_decay=0.3, decoupled=True),
            lambda p: torch.optim.AdamW(p, 0.1, weight_decay=0.3),
        ),
    ],
    ids=lambda part: "" if callable(part) else repr(part),
)
def test_rules_are_torchs_update_for_update(update, make):
    same(ours(update, {}), torchs(make))


def test_a_schedule_gives_each_update_its_own_setting():
    rates, momenta, decays = torch.rand(STEPS), torch.rand(STEPS), torch.rand(STEPS)

    def change(groups, t):
        for group in groups.values():
            group.update(lr=float(rates[t]), momentum=float(momenta[t]), weight_decay=float(decays[t]))

    update = SGD("lr", momentum="momentum", weight_decay="decay")
    theirs = torchs(lambda p: torch.optim.SGD(p, 0.1, momentum=0.1), change)
    same(ours(update, {"lr": rates, "momentum": momenta, "decay": decays}), theirs)


@pytest.mark.parametrize("scheduled", [False, True])
def test_layers_and_tensors_have_their_own_settings(scheduled):
    shape = (STEPS,) if scheduled else ()
    rates = {"0": torch.rand(shape), "2": torch.rand(shape)}
    beta2 = {name: torch.rand(shape) for name in params()}

    def change(groups, t):
        for name, group in groups.items():
            rate, beta = rates[name[0]], beta2[name]
            group.update(lr=float(rate[t] if scheduled else rate), betas=(0.9, float(beta[t] if scheduled else beta)))

    update = Adam("lr", betas=(0.9, "beta2"))
    same(ours(update, {"lr": rates, "beta2": beta2}), torchs(lambda p: torch.optim.Adam(p), change))


def test_weights_may_have_their_own_rates():
    rates = {name: torch.rand(p.shape) for name, p in params().items()}
    w = params()
    for gradient in gradients():
        w = {name: p - rates[name] * gradient[name] for name, p in w.items()}
    same(ours(SGD("lr"), {"lr": rates})[-1:], [w])


RULES = [
    SGD("lr", momentum="momentum", weight_decay="decay"),
    SGD("lr", momentum="momentum", weight_decay="decay", nesterov=True),
    Adam("lr", betas=("momentum", "beta2"), eps="eps", weight_decay="decay"),
    Adam("lr", betas=("momentum", "beta2"), eps="eps", weight_decay="decay", decoupled=True),
]


@pytest.mark.parametrize("update", RULES, ids=repr)
def test_derivatives_are_finite_differences(update):
    """In weights, slots, gradient and every setting."""
    torch.set_default_dtype(torch.float64)
    w, g = {"w": rand(1, 3)}, {"w": rand(2, 3)}
    slots = {slot: {"w": 0.1 + rand(3, 3).square()} for slot in update.slot_names}
    names = ["lr", "momentum", "decay", "beta2", "eps"]

    def step(w, g, *rest):
        state = {slot: {"w": part} for slot, part in zip(update.slot_names, rest, strict=False)}
        values = dict(zip(names, rest[len(state) :], strict=True))
        moved, after = update.step({"w": w}, state, {"w": g}, values, index=0, count=2)
        return moved["w"], *(after[slot]["w"] for slot in update.slot_names)

    settings = [torch.tensor(x) for x in (0.3, 0.6, 0.2, 0.7, 0.1)]
    inputs = [w["w"], g["w"], *(part["w"] for part in slots.values()), *settings]
    assert torch.autograd.gradcheck(step, [x.requires_grad_() for x in inputs])


@pytest.mark.parametrize("eps", [1e-8, 1e-2])
def test_adam_at_zero_second_moments_has_the_derivative_that_is_there(eps):
    """The first step is η g / (|g| + ε), whose derivative at g = 0 is η/ε: large, and not NaN."""
    g = torch.zeros(2, requires_grad=True)
    update = Adam(0.1, eps=eps)
    w = {"w": torch.ones(2)}
    moved, after = update.step(w, update.slots(w), {"w": g}, {}, index=0, count=0)
    (by_g,) = torch.autograd.grad(moved["w"].sum(), g, retain_graph=True)
    torch.testing.assert_close(by_g, torch.full((2,), -0.1 / eps))
    (by_g,) = torch.autograd.grad(after["second"]["w"].sum(), g)
    assert not by_g.any()


def test_adam_differentiated_through_many_updates_with_dead_weights_stays_finite():
    """A pixel that is always zero: its weight never has a gradient."""
    x, y = rand(1, 8, 3), rand(2, 8)
    x[:, 1] = 0.0
    rate = torch.tensor(0.1, requires_grad=True)
    update = Adam("lr")
    w = {"w": rand(3, 3)}
    slots = update.slots(w)
    for t in range(5):
        w = {"w": w["w"].requires_grad_() if t == 0 else w["w"]}
        (g,) = torch.autograd.grad((x @ w["w"] - y).square().mean(), w["w"], create_graph=True)
        w, slots = update.step(w, slots, {"w": g}, {"lr": rate}, index=t, count=t)
    (by_rate,) = torch.autograd.grad((x @ w["w"] - y).square().mean(), rate)
    assert torch.isfinite(by_rate)
    assert by_rate != 0


def test_slots_are_zeros_like_the_weights_and_their_type_is_kept():
    w = {name: p.bfloat16() for name, p in params().items()}
    for update in RULES:
        slots = update.slots(w)
        assert tuple(slots) == update.slot_names
        values = {name: torch.tensor(0.5) for name in ("lr", "momentum", "decay", "beta2", "eps")}
        values["lr"] = {name: torch.full(p.shape, 0.1) for name, p in w.items()}
        moved, after = update.step(w, slots, w, values, index=0, count=0)
        for vector in (*slots.values(), moved, *after.values()):
            assert {name: (p.shape, p.dtype) for name, p in vector.items()} == {
                name: (p.shape, torch.bfloat16) for name, p in w.items()
            }


def test_reads_names_each_hyper_once_and_in_order():
    assert SGD("a", momentum="b", weight_decay="a").reads == ("a", "b")
    assert Adam(0.1, betas=("c", 0.9), eps="d").reads == ("c", "d")
    assert SGD(0.1).reads == ()


# What cannot be


@pytest.mark.parametrize(
    ("make", "error", "message"),
    [
        (lambda: SGD(-0.1), ValueError, "lr must be finite and at least 0; got -0.1"),
        (lambda: SGD(float("inf")), ValueError, "lr must be finite and at least 0; got inf"),
        (lambda: SGD(float("nan")), ValueError, "lr must be finite and at least 0; got nan"),
        (lambda: SGD(torch.tensor(0.1)), TypeError, "lr must be a number or the name of a hyper; got tensor"),
        (lambda: SGD(0.1, momentum=1.5), ValueError, "momentum must be between 0 and 1; got 1.5"),
        (lambda: SGD(0.1, weight_decay=-1.0), ValueError, "weight_decay must be finite and at least 0"),
        (lambda: SGD(0.1, nesterov=True), ValueError, "nesterov=True needs a momentum above 0"),
        (lambda: Adam(0.1, betas=(0.9, -0.1)), ValueError, "beta2 must be between 0 and 1; got -0.1"),
        (lambda: Adam(0.1, betas=(1.0, 0.9)), ValueError, "betas below 1"),
        (lambda: Adam(0.1, betas=0.9), TypeError, r"betas must be two settings, such as \(0.9, 0.999\); got 0.9"),
        (lambda: Adam(0.1, betas="b"), TypeError, "betas must be two settings"),
        (lambda: Adam(0.1, eps=0.0), ValueError, "eps above 0"),
    ],
)
def test_settings_that_cannot_be(make, error, message):
    with pytest.raises(error, match=message):
        make()


SHAPES = {name: tuple(p.shape) for name, p in params().items()}
model = nn.Sequential(nn.Linear(2, 3), nn.Tanh(), nn.Linear(3, 1, bias=False))


@pytest.mark.parametrize(
    ("update", "hyper", "error", "message"),
    [
        (SGD("rate"), br.Hyper(0.1, log=True), KeyError, r"SGD\(lr='rate'\) names a hyper .* does not have: it has h"),
        (SGD("h"), br.Hyper(0.1), ValueError, r"SGD\(lr='h'\) must not fall below 0, .* -inf and inf.* log=True"),
        (SGD("h"), br.Hyper(0.1, low=-1.0), ValueError, "must not fall below 0"),
        (SGD(0.1, momentum="h"), br.Hyper(0.1, low=0.0), ValueError, "must stay between 0 and 1.*low=0.0, high=1.0"),
        (SGD(0.1, momentum="h"), br.Hyper(0.1, low=0.0, high=1.5), ValueError, "must stay between 0 and 1"),
        (Adam(0.1, betas=(0.9, "h")), br.Hyper(0.1, log=True), ValueError, r"Adam\(beta2='h'\) must stay between 0"),
        (
            Adam(0.1, betas=(0.9, "h")),
            br.Hyper(0.1, low=0.0, high=1.0),
            ValueError,
            "stay below 1.*low=0.0, high=0.9999",
        ),
        (
            Adam(0.1, betas=("h", 0.9)),
            br.Hyper(0.1, low=0.0, high=1.0),
            ValueError,
            r"Adam\(beta1='h'\) must stay below",
        ),
        (Adam(0.1, eps="h"), br.Hyper(0.1, high=1.0), ValueError, r"Adam\(eps='h'\) must not fall below 0"),
        (SGD("h"), br.Net(nn.Linear(1, 1)), TypeError, "not sampled, and 'h' is a br.Net"),
        (SGD("h"), br.Hyper(0.1, log=True, sampled=True), TypeError, "not sampled, and 'h' is sampled"),
        (SGD("h"), br.Hyper(0.1, log=True, shape=(5,)), ValueError, r"one for each of 6 updates.*; got shape \(5,\)"),
        (SGD("h"), br.Hyper(0.1, log=True, shape=(6, 1)), ValueError, r"got shape \(6, 1\)"),
        (SGD("h"), br.Hyper(0.1, log=True, shape={"0": ()}), ValueError, "it has 0, and none is for '2.weight'"),
        (
            SGD("h"),
            br.Hyper(0.1, log=True, shape={"0": (), "2": (5,)}),
            ValueError,
            r"part '2' must be one number, one for each of 6 updates.*; got shape \(5,\)",
        ),
    ],
    ids=lambda value: "" if isinstance(value, br.Hyper | br.Net | type) else str(value),
)
def test_hypers_that_cannot_be_a_setting(update, hyper, error, message):
    with pytest.raises(error, match=message):
        update.check(br.Space(h=hyper), SHAPES, STEPS)


def test_one_number_a_weight_and_one_an_update_are_never_mistaken_for_each_other():
    """A bias of three weights, through three updates."""
    space = br.Space(h=br.Hyper(0.1, log=True, shape=br.per_weight(model)))
    with pytest.raises(
        ValueError, match=r"'0.bias' has 3 numbers, which may be one for each update or one for each we"
    ):
        SGD("h").check(space, SHAPES, 3)
    SGD("h").check(space, SHAPES, 4)


@pytest.mark.parametrize(
    "shape",
    [(), (6,), br.per_layer(model), br.per_tensor(model), br.per_weight(model), {"0": (6,), "2": ()}],
    ids=str,
)
def test_hypers_that_can(shape):
    for hyper in (br.Hyper(0.1, log=True, shape=shape), br.Hyper(0.1, low=0.0, high=1.0, shape=shape)):
        SGD("h", weight_decay="h").check(br.Space(h=hyper), SHAPES, STEPS)
    SGD(0.1, momentum="h").check(br.Space(h=br.Hyper(0.1, low=0.0, high=1.0, shape=shape)), SHAPES, STEPS)


def test_every_update_of_this_file_moves_every_weight_that_has_a_gradient():
    """What the comparisons above stand on."""
    for before, after in pairwise(ours(Adam(0.1), {})):
        assert (before["2.weight"] != after["2.weight"]).all()


def test_a_beta_as_near_to_one_as_its_bound_lets_it_gives_numbers():
    """At 1 itself, where a hyper with that bound is rounded to, 1 − βᵗ is zero, and all is NaN."""
    space = br.Space(beta=br.Hyper(0.9, low=0.0, high=0.9999))
    rule = Adam(0.1, betas=(0.9, "beta"))
    rule.check(space, SHAPES, STEPS)
    values = space.values({"beta": torch.tensor(1e3, dtype=torch.float32)})
    after, _ = rule.step(params(), rule.slots(params()), gradients()[0], values, index=0, count=0)
    assert all(part.isfinite().all() for part in after.values())

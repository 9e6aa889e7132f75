"""``evaluate``: a loss at given weights and hypers equals the user's own module holding those weights."""

from __future__ import annotations

import copy

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import bestresponse as br
from bestresponse.evaluation import mean_losses
from bestresponse.problem import examples


def same(actual: Tensor, expected: Tensor) -> None:
    exact = torch.get_default_dtype() == torch.float64
    torch.testing.assert_close(actual, expected, rtol=1e-10 if exact else 1e-5, atol=1e-12 if exact else 1e-6)


def square_loss(model, batch, hyper):
    return model(batch).square().mean()


def problem_of(model, train=square_loss, valid=square_loss, **hypers):
    return br.Problem(model, br.Space(**hypers or {"a": br.Hyper(1.0)}), train, valid)


def values_of(problem):
    return problem.space.values(problem.space.raw(dtype=problem.raw_dtype, device=problem.device))


def moved(problem) -> dict[str, Tensor]:
    """Other weights than the model's."""
    return {name: p + 0.1 * torch.randn_like(p) for name, p in problem.params().items()}


def holding(model: nn.Module, tensors: dict[str, Tensor]) -> nn.Module:
    """The second route: a copy of the user's module that simply holds these weights."""
    other = copy.deepcopy(model)
    assert not other.load_state_dict(tensors, strict=False).unexpected_keys
    return other


def snapshot(model: nn.Module) -> dict[str, Tensor]:
    return copy.deepcopy({**dict(model.named_parameters()), **dict(model.named_buffers())})


def assert_untouched(model: nn.Module, before: dict[str, Tensor]) -> None:
    now = {**dict(model.named_parameters()), **dict(model.named_buffers())}
    assert list(now) == list(before)
    for name, tensor in now.items():
        assert torch.equal(tensor, before[name]), name


# Any module, unchanged


class Tied(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.second, self.head = nn.Linear(4, 4), nn.Linear(4, 4), nn.Linear(4, 3)
        self.second.weight = self.first.weight

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.second(torch.tanh(self.first(x)))))


class Frozen(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embed, self.head = nn.Linear(4, 4), nn.Linear(4, 3)
        self.embed.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(torch.tanh(self.embed(x)))


class Words(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(7, 4, padding_idx=0), nn.Linear(4, 3)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.embedding(x.abs().long() % 7).mean(dim=1))


class Recurrent(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(1, 3, num_layers=2, batch_first=True, bidirectional=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.lstm(x[..., None])[0][:, -1]


class Attention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        tokens = torch.stack([x, x.flip(1), x.sin()], dim=1)
        return self.attention(tokens, tokens, tokens, need_weights=False)[0].mean(dim=1)


class Root(nn.Module):
    """A parameter and a buffer of its own, outside any layer."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(4))
        self.register_buffer("shift", torch.arange(4.0), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.scale * x + self.shift


def normed() -> nn.Module:
    return nn.Sequential(nn.Linear(4, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 3))


MODULES = {
    "tied": Tied,
    "frozen": Frozen,
    "embedding": Words,
    "lstm": Recurrent,
    "attention": Attention,
    "root": Root,
    "batch norm": normed,
    "convolution": lambda: nn.Sequential(nn.Unflatten(1, (1, 4)), nn.Conv1d(1, 2, 3), nn.GroupNorm(1, 2), nn.Flatten()),
}


@pytest.mark.filterwarnings("ignore:RNN module weights are not part of single contiguous chunk")  # cuDNN's, of copies
@pytest.mark.parametrize("which", ["train", "valid"])
@pytest.mark.parametrize("build", MODULES.values(), ids=MODULES)
def test_a_module_at_given_weights_is_the_module_holding_them(build, which):
    model = build()
    problem = problem_of(model)
    before, params, x = snapshot(model), moved(problem), 3 * torch.randn(6, 4)
    own = {name: p.clone().requires_grad_() for name, p in params.items()}
    loss = br.evaluate(problem, which, own, values_of(problem), x)
    other = holding(model, params).train(which == "train")
    expected = other(x).square().mean()
    same(loss, expected)
    by_name = {name: p for name, p in other.named_parameters() if p.requires_grad}
    assert list(by_name) == list(own)
    expected_grads = torch.autograd.grad(expected, list(by_name.values()))
    for name, grad, by_hand in zip(own, torch.autograd.grad(loss, list(own.values())), expected_grads, strict=True):
        torch.testing.assert_close(grad, by_hand, msg=name)
    assert_untouched(model, before)
    assert all(p.grad is None for p in model.parameters())


def test_weights_that_are_not_given_stay_as_in_the_model():
    model = nn.Linear(2, 1)
    problem = problem_of(model, valid=lambda model, batch, hyper: model(batch).sum())
    bias = torch.tensor([5.0])
    loss = br.evaluate(problem, "valid", {"bias": bias}, values_of(problem), torch.ones(1, 2))
    same(loss, model.weight.detach().sum() + 5.0)


def test_params_and_buffers_are_copies_of_what_is_trained():
    model = Frozen()
    problem = problem_of(model)
    params = problem.params()
    assert list(params) == ["head.weight", "head.bias"]
    for tensor in (*params.values(), *(buffers := problem_of(normed()).buffers()).values()):
        tensor.zero_()
    assert list(buffers) == ["1.running_mean", "1.running_var", "1.num_batches_tracked"]
    assert bool(model.head.weight.any())
    assert not any(tensor.requires_grad for tensor in params.values())


def test_named_parameters_inside_the_loss_are_the_weights_being_tried():
    seen = {}

    def loss(model, batch, hyper):
        seen.update(model.named_parameters())
        return sum(p.pow(3).sum() for _, p in model.named_parameters()) + 0 * model(batch).sum()

    model = Tied()
    problem = problem_of(model, loss, loss)
    params = {name: p.requires_grad_() for name, p in moved(problem).items()}
    total = br.evaluate(problem, "train", params, values_of(problem), torch.randn(2, 4))
    assert {name: p is params[name] for name, p in seen.items()} == dict.fromkeys(params, True)
    for p, grad in zip(params.values(), torch.autograd.grad(total, list(params.values())), strict=True):
        same(grad, 3 * p.detach().square())


def test_attributes_of_layers_inside_the_loss_are_the_weights_being_tried():
    def loss(model, batch, hyper):
        return model.head.bias.sum() + model.get_submodule("head").weight.sum()

    problem = problem_of(Tied(), loss, loss)
    params = moved(problem)
    got = br.evaluate(problem, "valid", params, values_of(problem), torch.zeros(1))
    same(got, params["head.bias"].sum() + params["head.weight"].sum())


def test_gradients_flow_to_hypers():
    def loss(model, batch, hyper):
        return hyper["a"] * batch.sum() + hyper["b"]["x"].square().sum()

    problem = problem_of(nn.Linear(1, 1), loss, loss, a=br.Hyper(1.0), b=br.Hyper(2.0, shape={"x": (2,)}))
    raw = {name: leaf.requires_grad_() for name, leaf in problem.space.raw().items()}
    total = br.evaluate(problem, "train", problem.params(), problem.space.values(raw), torch.ones(3))
    by_a, by_b = torch.autograd.grad(total, list(raw.values()))
    assert (by_a.tolist(), by_b.tolist()) == (3.0, [4.0, 4.0])


# Buffers


def test_batch_norm_writes_its_statistics_into_the_given_dict_and_nowhere_else():
    model = normed()
    problem = problem_of(model)
    before, buffers, params = snapshot(model), problem.buffers(), moved(problem)
    twin = holding(model, params)
    for _ in range(3):
        x = torch.randn(8, 4) + 2
        br.evaluate(problem, "train", params, values_of(problem), x, buffers)
        twin(x)
    for name, tensor in twin.named_buffers():
        same(buffers[name], tensor)
    assert int(buffers["1.num_batches_tracked"]) == 3
    assert_untouched(model, before)


def test_validation_uses_the_given_buffers_and_leaves_them():
    model = normed()
    problem = problem_of(model)
    buffers = problem.buffers()
    buffers["1.running_mean"] += 1.0
    buffers["1.running_var"] *= 4.0
    before = copy.deepcopy(buffers)
    x = torch.randn(8, 4)
    loss = br.evaluate(problem, "valid", problem.params(), values_of(problem), x, buffers)
    assert all(torch.equal(buffers[name], before[name]) for name in before)
    same(loss, holding(model, before).eval()(x).square().mean())


def test_without_buffers_changes_are_thrown_away():
    model = normed()
    problem, before = problem_of(model), snapshot(model)
    br.evaluate(problem, "train", problem.params(), values_of(problem), torch.randn(8, 4))
    assert_untouched(model, before)


def test_buffers_that_are_not_given_are_not_changed_in_the_model_either():
    model = normed()
    problem, before = problem_of(model), snapshot(model)
    br.evaluate(problem, "train", problem.params(), values_of(problem), torch.randn(8, 4), {})
    assert_untouched(model, before)


class Counter(nn.Module):
    """Replaces its buffer by a new tensor, with a graph on it, at each call."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.register_buffer("average", torch.zeros(2))

    def forward(self, x: Tensor) -> Tensor:
        self.average = 0.5 * self.average + self.weight * x.mean(dim=0)
        return x * self.weight + self.average


def test_a_replaced_buffer_lands_in_the_dict_without_its_graph():
    model = Counter()
    problem, before = problem_of(model), snapshot(model)
    buffers, params = problem.buffers(), {"weight": torch.tensor([2.0, 3.0], requires_grad=True)}
    for expected in ([2.0, 3.0], [3.0, 4.5], [3.5, 5.25]):
        br.evaluate(problem, "train", params, values_of(problem), torch.ones(4, 2), buffers)
        assert buffers["average"].tolist() == expected
        assert not buffers["average"].requires_grad
    assert_untouched(model, before)


def test_every_batch_of_an_evaluation_finds_the_same_buffers():
    """Also where a layer moves them in evaluation mode; none of it stays."""
    problem = problem_of(Counter())
    buffers, raw = problem.buffers(), problem.space.raw()
    batches = [torch.full((4, 2), 1.0), torch.full((2, 2), 2.0)]  # w = 1: the average becomes x, the output 2x
    losses, taken = mean_losses({"loss": problem}, problem.params(), buffers, raw, batches)
    assert float(losses["loss"]) == pytest.approx((4 * 2.0**2 + 2 * 4.0**2) / 6)
    assert taken == 2
    assert not buffers["average"].any()


class Shared(nn.Module):
    """Two layers that hold one buffer, which the first moves and the second reads."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.second = nn.BatchNorm1d(2), nn.Module()
        self.second.register_buffer("mean", self.first.running_mean)

    def forward(self, x: Tensor) -> Tensor:
        return self.first(x) + self.second.mean


def test_tied_buffers_stay_tied():
    model = Shared()
    problem, before, x = problem_of(model), snapshot(model), torch.randn(6, 2) + 3
    twin, buffers = copy.deepcopy(model), problem.buffers()
    assert twin.second.mean is twin.first.running_mean
    for _ in range(3):
        loss = br.evaluate(problem, "train", problem.params(), values_of(problem), x, buffers)
        same(loss, twin(x).square().mean().detach())
    same(buffers["first.running_mean"], twin.second.mean)
    assert_untouched(model, before)


# Modes


def flags(model: nn.Module) -> list[bool]:
    return [module.training for module in model.modules()]


@pytest.mark.parametrize("which", ["train", "valid"])
@pytest.mark.parametrize("raises", [False, True])
def test_training_flags_are_as_before(which, raises):
    def loss(model, batch, hyper):
        seen.append(flags(model))
        if raises:
            raise ArithmeticError("from the loss")
        return model(batch).mean()

    seen: list[list[bool]] = []
    model = normed()
    model[1].eval()  # the user froze these statistics
    problem, before = problem_of(model, loss, loss), flags(model)
    assert before == [True, True, False, True, True]
    if raises:
        with pytest.raises(ArithmeticError, match="from the loss"):
            br.evaluate(problem, which, problem.params(), values_of(problem), torch.randn(4, 4))
    else:
        br.evaluate(problem, which, problem.params(), values_of(problem), torch.randn(4, 4))
    assert flags(model) == before
    assert seen == [before if which == "train" else [False] * 5]


@pytest.mark.parametrize("which", ["train", "valid"])
def test_after_an_error_the_model_holds_its_own_weights(which):
    def loss(model, batch, hyper):
        model(batch)
        raise ArithmeticError("from the loss")

    model = normed()
    problem, before = problem_of(model, loss, loss), snapshot(model)
    with pytest.raises(ArithmeticError):
        br.evaluate(problem, which, moved(problem), values_of(problem), torch.randn(4, 4))
    assert_untouched(model, before)


def test_dropout_is_on_in_training_and_off_in_validation():
    def dropped(model, batch, hyper):
        return (model(batch) == 0).to(batch).mean()

    problem = problem_of(nn.Sequential(nn.Linear(1, 1), nn.Dropout(0.5)), dropped, dropped)
    x = torch.rand(4000, 1) + 1
    share = {w: float(br.evaluate(problem, w, problem.params(), values_of(problem), x)) for w in ("train", "valid")}
    assert share["valid"] == 0
    assert share["train"] == pytest.approx(0.5, abs=5 * 0.5 / 4000**0.5)


def test_dropout_within_recurrent_layers_is_off_in_validation_and_put_back():
    """They stay in training mode, which alone gives them a gradient on a GPU."""
    model = Recurrent()
    model.lstm.dropout = 0.5
    problem, x = problem_of(model), torch.randn(6, 4)
    loss = br.evaluate(problem, "valid", problem.params(), values_of(problem), x)
    same(loss, copy.deepcopy(model).eval()(x).square().mean())
    assert (model.training, model.lstm.training, model.lstm.dropout) == (True, True, 0.5)


# What a loss may return


@pytest.mark.parametrize("which", ["train", "valid"])
def test_one_loss_per_example_counts_as_their_mean(which):
    x, y = torch.randn(7, 4), torch.randint(0, 3, (7,))

    def each(model, batch, hyper):
        return F.cross_entropy(model(batch[0]), batch[1], reduction="none")

    def mean(model, batch, hyper):
        return F.cross_entropy(model(batch[0]), batch[1])

    model = nn.Linear(4, 3)
    per_example, whole = problem_of(model, each, each), problem_of(model, mean, mean)
    params = moved(whole)
    losses = [br.evaluate(p, which, params, values_of(p), (x, y)) for p in (per_example, whole)]
    assert losses[0].shape == ()
    same(losses[0], losses[1])


@pytest.mark.parametrize("which", ["train", "valid"])
@pytest.mark.parametrize(
    ("returned", "error", "message"),
    [
        (lambda: None, TypeError, "_loss must return a tensor; got NoneType. Is a return missing?"),
        (lambda: 0.5, TypeError, "_loss must return a tensor; got float"),
        (lambda: torch.tensor(1), TypeError, "_loss must return floating-point numbers; got torch.int64"),
        (
            lambda: torch.zeros(3, 2),
            ValueError,
            r"_loss must return one number, or one per example; got shape \(3, 2\).*mean\(dim=1\)",
        ),
    ],
    ids=["none", "float", "integer", "matrix"],
)
def test_a_loss_of_the_wrong_kind_is_refused_by_its_name(which, returned, error, message):
    problem = problem_of(nn.Linear(1, 1), lambda *_: returned(), lambda *_: returned())
    with pytest.raises(error, match=which + message):
        br.evaluate(problem, which, problem.params(), values_of(problem), torch.zeros(3, 1))


# Sampled hypers: one value per example


def seen_by(which, values=None, batch=None):
    """What the loss sees of a scalar, a shaped, a named and an ordinary hyper."""
    seen = {}

    def loss(model, batch, hyper):
        seen.update(hyper)
        return model(torch.ones(1, 1)).mean()

    problem = problem_of(
        nn.Linear(1, 1),
        loss,
        loss,
        rate=br.Hyper(0.25, sampled=True),
        holes=br.Hyper(torch.tensor([1.0, 2.0]), shape=(2,), sampled=True),
        layers=br.Hyper({"x": 3.0, "y": 4.0}, shape={"x": (), "y": ()}, sampled=True),
        plain=br.Hyper(5.0),
    )
    batch = torch.zeros(3, 1) if batch is None else batch
    br.evaluate(problem, which, problem.params(), {**values_of(problem), **(values or {})}, batch)
    return seen


def test_the_training_loss_sees_one_value_of_a_sampled_hyper_per_example():
    seen = seen_by("train")
    assert seen["rate"].tolist() == [0.25] * 3
    assert seen["holes"].tolist() == [[1.0, 2.0]] * 3
    assert {name: part.tolist() for name, part in seen["layers"].items()} == {"x": [3.0] * 3, "y": [4.0] * 3}
    assert seen["plain"].tolist() == 5.0


def test_the_validation_loss_sees_the_plain_value():
    seen = seen_by("valid")
    assert (seen["rate"].tolist(), seen["holes"].tolist(), seen["layers"]["x"].tolist()) == (0.25, [1.0, 2.0], 3.0)


def test_values_that_are_per_example_already_are_left_alone():
    rate, holes = torch.tensor([0.1, 0.2, 0.3]), torch.randn(3, 2)
    seen = seen_by("train", {"rate": rate, "holes": holes})
    assert seen["rate"] is rate
    assert seen["holes"] is holes
    assert seen["layers"]["y"].tolist() == [4.0] * 3


@pytest.mark.parametrize(
    ("values", "leaf"),
    [
        ({"rate": torch.zeros(2, device="cpu")}, "rate"),
        ({"holes": torch.zeros(2, 2, device="cpu")}, "holes"),
        ({"layers": {"x": torch.zeros(2, device="cpu"), "y": torch.zeros(3, device="cpu")}}, r"layers\.x"),
    ],
)
def test_a_wrong_number_of_values_is_refused_by_the_leafs_name(values, leaf):
    with pytest.raises(ValueError, match=f"hyper '{leaf}' must have one value per example, 3; got 2"):
        seen_by("train", values)


def test_spreading_adds_up_the_gradients_of_all_examples():
    def loss(model, batch, hyper):
        return batch * hyper["rate"] + 0 * model(batch[:, None]).sum()

    problem = problem_of(nn.Linear(1, 1), loss, loss, rate=br.Hyper(0.5, sampled=True))
    raw = {"rate": torch.tensor(0.5, requires_grad=True)}
    total = br.evaluate(problem, "train", problem.params(), problem.space.values(raw), torch.tensor([1.0, 2.0, 6.0]))
    assert torch.autograd.grad(total, raw["rate"])[0].tolist() == 3.0


def test_a_sampled_hyper_needs_a_batch_that_tells_its_size():
    with pytest.raises(ValueError, match=r"hyper 'rate' is sampled.*a batch must hold a tensor.*got str"):
        seen_by("train", batch="words")


@pytest.mark.parametrize(
    ("batch", "count"),
    [
        (lambda: torch.zeros(5, 2), 5),
        (lambda: (torch.zeros(5), torch.zeros(3)), 5),
        (lambda: ["a", torch.zeros(4)], 4),
        (lambda: {"scale": torch.zeros(()), "x": [torch.zeros(6, 2)]}, 6),
        (lambda: {"deep": ({"x": torch.zeros(2)},)}, 2),
        (lambda: torch.zeros(()), None),
        (lambda: "words", None),
        (lambda: None, None),
    ],
)
def test_examples_counts_rows_of_the_first_tensor(batch, count):
    assert examples(batch()) == count


# What is refused when a problem is declared


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({"model": "net"}, TypeError, "model must be a torch.nn.Module; got str"),
        ({"space": {}}, TypeError, "space must be a br.Space; got dict"),
        ({"train_loss": None}, TypeError, "train_loss must be a function .*; got None"),
        ({"valid_loss": 3}, TypeError, "valid_loss must be a function .*; got 3"),
        ({"model": nn.Linear(1, 1).requires_grad_(False)}, ValueError, "the model has no trainable weights"),
    ],
)
def test_a_problem_refuses(change, error, message):
    arguments = {
        "model": nn.Linear(1, 1),
        "space": br.Space(a=br.Hyper(1.0)),
        "train_loss": square_loss,
        "valid_loss": square_loss,
    }
    with pytest.raises(error, match=message):
        br.Problem(**arguments | change)


@pytest.mark.parametrize(
    ("weights", "raw"),
    [(torch.float16, torch.float32), (torch.bfloat16, torch.float32), (torch.float64, torch.float64)],
)
def test_raw_is_at_least_single_precision(weights, raw):
    assert problem_of(nn.Linear(1, 1).to(weights)).raw_dtype == raw


def test_the_device_is_that_of_the_trainable_weights(device):
    assert problem_of(nn.Linear(1, 1)).device.type == device.type
    assert problem_of(nn.Linear(1, 1, device="meta")).device.type == "meta"

"""How good was the hypergradient? A run's own one against a much better one, and its weights against trained ones."""

from __future__ import annotations

import copy
import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import Any, Final, final

import torch
from torch import Tensor
from torch.optim.lr_scheduler import CosineAnnealingLR

from bestresponse import vectors
from bestresponse.evaluation import mean_losses
from bestresponse.gradients import Products, seeded, train_gradient
from bestresponse.hypergradient import Linearization, implicit_hypergradient
from bestresponse.method import Method, ReadsHypers, Retrains
from bestresponse.optimizers import OptimizerFactory, Updater
from bestresponse.problem import Batch, Params, Problem, evaluate, examples
from bestresponse.result import Result
from bestresponse.solvers import CG, Solver, Turn
from bestresponse.space import Raw
from bestresponse.stream import Stream

#: A method that leaves raw alone for so many steps takes no hypergradient.
PATIENCE: Final = 100
ADAM: Final[OptimizerFactory] = partial(torch.optim.Adam, lr=1e-3)
READING: Final = """\
A cosine of 1 is the right direction, 0 has nothing to do with it, and below 0 leads away. "of one" is the mean cosine
of single hypergradients: far below the first, they are noisy; where both are low, the method is biased here. "size" is
the length beside the reference's; a hyper optimizer such as Adam does not feel it. Near an optimum all hypergradients
are close to zero, and cosines say little. A residual that is not far below 1 makes the reference itself doubtful: try
another solver, with more steps or a damping."""
RETRAINING: Final = """\
Weights far away with equal losses are another minimum; with a higher training loss they are not trained yet. A valid
loss that retraining makes worse was owed to the path of the run, and not to its hypers."""


@final
@dataclass(frozen=True)
class Agreement:
    """A run's hypergradient beside the reference.

    Attributes:
        cosine: Between the mean of the run's own hypergradients and the reference.
        of_one: The mean of the cosines of single ones.
        size: ‖mean of its own‖ / ‖reference‖.
    """

    cosine: float
    of_one: float
    size: float


@final
@dataclass(frozen=True)
class Retraining:
    """The final weights beside ones that were trained anew with the final hypers.

    Attributes:
        updates: Training updates from the model's start.
        distance: ‖w − w_retrained‖ / ‖w_retrained‖: the error of the best response.
        train_loss: Of the final weights.
        retrained_train_loss: Of the retrained ones.
        valid_loss: Of the final weights.
        retrained_valid_loss: Of the retrained ones.
    """

    updates: int
    distance: float
    train_loss: float
    retrained_train_loss: float
    valid_loss: float
    retrained_valid_loss: float


@final
@dataclass(frozen=True)
class Audit:
    """What :func:`audit` found; printing it gives a table, and how to read it.

    Attributes:
        step: Steps of the run.
        draws: How many hypergradients of its own were taken.
        overall: All of ``hypers`` together; ``None`` if there are none.
        hypers: Each hyper by itself.
        left_out: Why others are not judged, by name.
        length: ‖reference‖, in raw units.
        residual: ‖b − Hx‖ / ‖b‖ of the reference's solve.
        trouble: What its solver had to say.
        retraining: ``None`` if it was not asked for.
    """

    step: int
    draws: int
    overall: Agreement | None
    hypers: Mapping[str, Agreement]
    left_out: Mapping[str, str]
    length: float
    residual: float | None
    trouble: str
    retraining: Retraining | None

    def __str__(self) -> str:
        lines = []
        if self.overall is not None:
            residual = "unknown" if self.residual is None else f"{self.residual:.2g}"
            lines += [
                f"The hypergradient after step {self.step}: {self.draws} of the run's own beside one reference",
                f"(length {self.length:.3g}, residual {residual})",
                "",
                f"{'':20}{'cosine':>10}{'of one':>10}{'size':>10}",
                *(
                    f"{name:20}{row.cosine:10.3f}{row.of_one:10.3f}{row.size:10.3g}"
                    for name, row in {"all hypers": self.overall, **self.hypers}.items()
                ),
                "",
                *([f"The reference's solver says: {self.trouble}."] if self.trouble else []),
                READING,
                "",
            ]
        if self.left_out:
            lines += [*(f"Not judged: {name}, as {why}." for name, why in self.left_out.items()), ""]
        if (again := self.retraining) is not None:
            lines += [
                f"The best response: the weights beside ones trained anew for {again.updates:,} updates",
                "",
                f"{'':20}{'train loss':>12}{'valid loss':>12}",
                f"{'of the run':20}{again.train_loss:12.5g}{again.valid_loss:12.5g}",
                f"{'retrained':20}{again.retrained_train_loss:12.5g}{again.retrained_valid_loss:12.5g}",
                f"{'distance':20}{again.distance:12.3g}",
                "",
                RETRAINING,
            ]
        return "\n".join(lines).rstrip()


def audit(
    result: Result,
    train: Iterable[Batch],
    valid: Iterable[Batch],
    *,
    draws: int = 10,
    batches: int = 32,
    solver: Solver | None = None,
    products: Products = "exact",
    updates: int | None = None,
    optimizer: OptimizerFactory | None = None,
    seed: int = 0,
) -> Audit:
    """Judge the hypergradient of a run at its end, and its weights. The result is not changed.

    The run's own hypergradients are those of its next step, taken ``draws`` times from the final state on other
    batches. The reference is that of the implicit function theorem at the same weights, averaged over ``batches``
    batches and solved for much longer. Works for every method that moves raw along a hypergradient.

    Args:
        result: From :func:`~bestresponse.tune`, in the same process: it is not there in what was saved.
        train: Training batches, as in the run.
        valid: Validation batches.
        draws: Hypergradients of the run's own.
        batches: At most so many batches of each kind for the reference and the losses.
        solver: Of the reference; by default ``CG(200, tolerance=1e-4)``. Each product costs 2 · ``batches`` gradients.
        products: ``"central"`` for models without second derivatives.
        updates: Training updates of the retraining; by default as many as the run has seen training batches, and 0
            for none. The learning rate goes to zero along a cosine. A method that tunes for a training of its own
            (``Unrolled``) is retrained just so, and takes neither ``updates``, but for 0, nor ``optimizer``.
        optimizer: Of the retraining; by default the method's own for the weights.
        seed: Of everything random.
    """
    if draws < 1 or batches < 1 or (updates is not None and updates < 0):
        raise ValueError(
            f"audit needs draws >= 1, batches >= 1 and updates >= 0; got draws={draws}, batches={batches}, "
            f"updates={updates}"
        )
    problem, device = result.problem, result.problem.device
    if not hasattr(result.state, "raw_updater"):
        raise ValueError(
            f"{type(result.method).__name__} takes no hypergradient: there is nothing to audit. The methods that move "
            "the hypers along one keep its optimizer in state.raw_updater"
        )
    if isinstance(result.method, Retrains) and (updates or optimizer):
        raise ValueError(
            f"{type(result.method).__name__} is retrained by its own rule for as many updates as it tunes for: give "
            "neither updates nor optimizer, or updates=0 for no retraining"
        )
    left_out = _left_out(problem, result.method)
    judged = [name for name in problem.space if name not in left_out]
    train_stream = Stream(train, name="train", seed=seed, device=device)
    valid_stream = Stream(valid, name="valid", seed=seed, device=device)
    with seeded(seed, device):
        train_batches = list(islice(train_stream.epoch(), batches))
        valid_batches = list(islice(valid_stream.epoch(), batches))
        at = Linearization(
            problem,
            result.method.params(problem, result.state),
            result.state.raw,
            train_batches,
            buffers=result.state.buffers,
            products=products,
        )
        turn = Turn(generator=torch.Generator(device=device).manual_seed(seed))
        reference = implicit_hypergradient(at, solver or CG(200, tolerance=1e-4), valid_batches, turn)
        own = _own_hypergradients(result, train_stream, valid_stream, draws)
        hypers = {name: _compare(problem, own, reference.gradient, [name]) for name in judged}
        retraining = None
        if updates != 0:
            retrained = _retrained(result, train_stream, updates, optimizer)
            retraining = _retraining(result, retrained, train_batches, valid_batches)
    return Audit(
        result.state.step,
        draws,
        _compare(problem, own, reference.gradient, judged) if judged else None,
        hypers,
        left_out,
        float(_part(problem, reference.gradient, judged).norm()) if judged else 0.0,
        reference.solution.residual,
        reference.solution.trouble,
        retraining,
    )


@final
class _Recorder:
    """Stands where raw's optimizer does: keeps what it is given, and moves nothing."""

    def __init__(self) -> None:
        self.seen: Raw | None = None

    def update(self, vector: Mapping[str, Tensor], gradient: Mapping[str, Tensor]) -> None:
        self.seen = vectors.clone(gradient)


def _own_hypergradients(result: Result, train: Stream, valid: Stream, draws: int) -> list[Raw]:
    """What the method's own step gives to the optimizer of raw, each time from the final state."""
    saved = result.state.state_dict()
    state: Any = result.method.init(result.problem)
    own = []
    for _ in range(draws):
        state.load_state_dict(copy.deepcopy(saved))  # an optimizer would share the tensors it loads
        state.raw_updater = recorder = _Recorder()
        for _ in range(PATIENCE):
            result.method.step(result.problem, state, train, valid)
            if recorder.seen is not None:
                break
        else:
            raise ValueError(
                f"the run's next {PATIENCE} steps do not move the hypers: it ended within its warm-up, and there is no "
                "hypergradient to audit"
            )
        own.append(recorder.seen)
    return own


def _compare(problem: Problem, own: Sequence[Raw], reference: Raw, names: Sequence[str]) -> Agreement:
    truth = _part(problem, reference, names)
    flat = [_part(problem, one, names) for one in own]
    mean = torch.stack(flat).mean(0)
    of_one = sum(_cosine(one, truth) for one in flat) / len(flat)
    return Agreement(_cosine(mean, truth), of_one, float(mean.norm() / truth.norm()))


def _part(problem: Problem, raw: Raw, names: Sequence[str]) -> Tensor:
    """What belongs to these hypers, flat."""
    leaves = [leaf for leaf, (name, _, _) in problem.space.leaves.items() if name in names]
    return vectors.flatten({leaf: raw[leaf] for leaf in leaves}).double()


def _cosine(a: Tensor, b: Tensor) -> float:
    """NaN where one of them is zero."""
    sizes = float(a.norm() * b.norm())
    return float(a @ b) / sizes if sizes else math.nan


def _left_out(problem: Problem, method: Method) -> dict[str, str]:
    """The hypers that the reference knows no derivative in, and why."""
    reads = method.reads(problem) if isinstance(method, ReadsHypers) else frozenset()
    why = dict.fromkeys(problem.space.sampled, "it is sampled, and no derivative in it exists")
    read = f"{type(method).__name__} reads it itself, and the reference sees the losses alone"
    return {**why, **{name: read for name in problem.space if name in reads}}


def _retrained(
    result: Result, train: Stream, updates: int | None, optimizer: OptimizerFactory | None
) -> tuple[int, Params, Params]:
    """Train from the model's start with the final hypers: updates, weights and buffers."""
    problem = result.problem
    if isinstance(result.method, Retrains):
        return result.method.retrain(problem, result.state, train)
    count = result.state.cost.train_batches if updates is None else updates
    factory: OptimizerFactory = optimizer or getattr(result.method, "optimizer", None) or ADAM
    params, buffers = problem.params(), problem.buffers()
    updater = Updater.of(params, factory, partial(CosineAnnealingLR, T_max=count))
    for _ in range(count):
        updater.update(params, train_gradient(problem, params, result.raw, next(train), buffers=buffers).params)
    return count, params, buffers


def _retraining(
    result: Result,
    retrained: tuple[int, Params, Params],
    train_batches: Sequence[Batch],
    valid_batches: Sequence[Batch],
) -> Retraining:
    """The final weights beside others."""
    problem, (updates, params, buffers) = result.problem, retrained
    own = {name: p.detach() for name, p in result.model.named_parameters() if name in params}
    own_buffers = dict(result.model.named_buffers())
    distance = vectors.norm(vectors.axpy(-1.0, params, own)) / vectors.norm(params)
    losses: list[float] = []
    for w, b in ((own, own_buffers), (params, buffers)):
        valid_loss, _ = mean_losses({"": problem}, w, b, result.raw, valid_batches)
        losses += [_train_loss(problem, w, b, result.raw, train_batches), float(valid_loss[""])]
    return Retraining(updates, float(distance), losses[0], losses[2], losses[1], losses[3])


def _train_loss(problem: Problem, params: Params, buffers: Params, raw: Raw, batches: Sequence[Batch]) -> float:
    """The mean training loss, with the same random numbers for whatever weights."""
    values, total, weight = problem.space.values(raw), 0.0, 0
    with seeded(0, problem.device), torch.no_grad():
        for batch in batches:
            size = examples(batch) or 1
            total += size * float(evaluate(problem, "train", params, values, batch, vectors.clone(buffers)))
            weight += size
    return total / weight

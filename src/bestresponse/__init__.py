"""Tune every continuous hyperparameter of a PyTorch model inside one training run."""

from bestresponse import callbacks, functional, methods, updates
from bestresponse.gradients import curvature_product, mixed_product, train_gradient, valid_gradient
from bestresponse.history import History
from bestresponse.method import Alternate, Method, Metrics, Schedule, ThenTune
from bestresponse.methods import Adjoint, BestResponse, BlackBox, Grid, Implicit, Random, Unrolled
from bestresponse.perturb import Box, Gaussian, Perturbation
from bestresponse.problem import Problem, evaluate
from bestresponse.responses import MLP, Linear, LowRank, Response
from bestresponse.result import Result, Status, load
from bestresponse.solvers import Identity, Solver
from bestresponse.space import Hyper, Net, Space, per_layer, per_tensor, per_weight
from bestresponse.state import State
from bestresponse.stream import Batches, Stream
from bestresponse.tune import Event, tune
from bestresponse.unrolling import Checkpointed, DrMAD, FineTune, Forward, Reverse, Reversible

__all__ = [
    "MLP",
    "Adjoint",
    "Alternate",
    "Batches",
    "BestResponse",
    "BlackBox",
    "Box",
    "Checkpointed",
    "DrMAD",
    "Event",
    "FineTune",
    "Forward",
    "Gaussian",
    "Grid",
    "History",
    "Hyper",
    "Identity",
    "Implicit",
    "Linear",
    "LowRank",
    "Method",
    "Metrics",
    "Net",
    "Perturbation",
    "Problem",
    "Random",
    "Response",
    "Result",
    "Reverse",
    "Reversible",
    "Schedule",
    "Solver",
    "Space",
    "State",
    "Status",
    "Stream",
    "ThenTune",
    "Unrolled",
    "callbacks",
    "curvature_product",
    "evaluate",
    "functional",
    "load",
    "methods",
    "mixed_product",
    "per_layer",
    "per_tensor",
    "per_weight",
    "train_gradient",
    "tune",
    "updates",
    "valid_gradient",
]

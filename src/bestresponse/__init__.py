"""Tune every continuous hyperparameter of a PyTorch model inside one training run."""

from bestresponse import callbacks, functional, methods, updates
from bestresponse.audit import Audit, audit
from bestresponse.gradients import curvature_product, mixed_product, train_gradient, valid_gradient
from bestresponse.history import History
from bestresponse.hypergradient import hypergradient
from bestresponse.method import Alternate, Method, Metrics, Schedule, ThenTune
from bestresponse.methods import Adjoint, BestResponse, BlackBox, Grid, Implicit, Random, Unrolled
from bestresponse.perturb import Box, Gaussian, Perturbation
from bestresponse.problem import Problem, evaluate
from bestresponse.responses import MLP, Linear, LowRank, Response
from bestresponse.result import Result, Status, load
from bestresponse.solvers import CG, Dense, Identity, Neumann, Nystrom, Solution, Solver, Turn
from bestresponse.space import Hyper, Net, Space, per_layer, per_tensor, per_weight
from bestresponse.state import State
from bestresponse.stream import Batches, Stream
from bestresponse.tolerances import GeometricTolerance, PowerTolerance, Tolerance
from bestresponse.tune import Event, tune
from bestresponse.unrolling import Checkpointed, DrMAD, FineTune, Forward, Reverse, Reversible

__all__ = [
    "CG",
    "MLP",
    "Adjoint",
    "Alternate",
    "Audit",
    "Batches",
    "BestResponse",
    "BlackBox",
    "Box",
    "Checkpointed",
    "Dense",
    "DrMAD",
    "Event",
    "FineTune",
    "Forward",
    "Gaussian",
    "GeometricTolerance",
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
    "Neumann",
    "Nystrom",
    "Perturbation",
    "PowerTolerance",
    "Problem",
    "Random",
    "Response",
    "Result",
    "Reverse",
    "Reversible",
    "Schedule",
    "Solution",
    "Solver",
    "Space",
    "State",
    "Status",
    "Stream",
    "ThenTune",
    "Tolerance",
    "Turn",
    "Unrolled",
    "audit",
    "callbacks",
    "curvature_product",
    "evaluate",
    "functional",
    "hypergradient",
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

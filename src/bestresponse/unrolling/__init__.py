"""Modes of differentiating through training: what :class:`bestresponse.Unrolled` is given."""

from bestresponse.unrolling.course import Course, Mode, Outcome, Place
from bestresponse.unrolling.fine_tune import FineTune
from bestresponse.unrolling.forward import Forward
from bestresponse.unrolling.reverse import Checkpointed, DrMAD, Reverse
from bestresponse.unrolling.reversible import Reversible

__all__ = [
    "Checkpointed",
    "Course",
    "DrMAD",
    "FineTune",
    "Forward",
    "Mode",
    "Outcome",
    "Place",
    "Reverse",
    "Reversible",
]

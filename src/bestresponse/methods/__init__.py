"""The method families, and the papers' names for what they are made of."""

from bestresponse.methods.adjoint import Adjoint
from bestresponse.methods.best_response import BestResponse
from bestresponse.methods.black_box import BlackBox, Grid, Random, Sampler, Trial
from bestresponse.methods.catalog import (
    adjoint,
    cross_validation,
    domke2012,
    drmad2016,
    franceschi2017_forward,
    franceschi2017_reverse,
    hataya2023,
    hoag2016,
    lorraine2018_fine_tuned,
    lorraine2018_global,
    lorraine2018_joint,
    lorraine2018_simplified,
    lorraine2020,
    luketina2016,
    maclaurin2015,
    shaban2019,
)
from bestresponse.methods.implicit import Implicit
from bestresponse.methods.unrolled import Unrolled

__all__ = [
    "Adjoint",
    "BestResponse",
    "BlackBox",
    "Grid",
    "Implicit",
    "Random",
    "Sampler",
    "Trial",
    "Unrolled",
    "adjoint",
    "cross_validation",
    "domke2012",
    "drmad2016",
    "franceschi2017_forward",
    "franceschi2017_reverse",
    "hataya2023",
    "hoag2016",
    "lorraine2018_fine_tuned",
    "lorraine2018_global",
    "lorraine2018_joint",
    "lorraine2018_simplified",
    "lorraine2020",
    "luketina2016",
    "maclaurin2015",
    "shaban2019",
]

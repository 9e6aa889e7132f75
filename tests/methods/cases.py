"""The shared list: every method, its steps, and where it ends on the known problems. A new method adds an entry."""

from functools import partial

from torch.optim import SGD, Adam
from torch.optim.lr_scheduler import CosineAnnealingLR

import bestresponse as br
from bestresponse.testing import Case, Ends
from bestresponse.updates import SGD as Descent
from bestresponse.updates import Adam as Rule

adam = partial(Adam, lr=1e-2)
fast = partial(Adam, lr=5e-2)
cosine = partial(CosineAnnealingLR, T_max=1500)
to_zero = {"lr_schedule": cosine, "hyper_lr_schedule": cosine}
pairs = br.Gaussian(0.3, antithetic=True)
exactly = {
    "schedule": br.Alternate(train=3),
    "optimizer": partial(SGD, lr=0.2),
    "hyper_optimizer": partial(Adam, lr=0.1),
    "hyper_lr_schedule": partial(CosineAnnealingLR, T_max=200),
}
falling = {"hyper_optimizer": partial(Adam, lr=0.3), "hyper_lr_schedule": partial(CosineAnnealingLR, T_max=60)}
heavy = Descent(0.1, momentum=0.5)

CASES = [
    Case(
        "random search",
        br.methods.cross_validation(br.Random(80, scale=0.7), 15, optimizer=partial(SGD, lr=0.25)),
        steps=1200,
        ridge=Ends(excess=0.2, distance=1e-5),
        quadratic=Ends(excess=0.1, distance=0.02),
        short=br.methods.cross_validation(br.Random(3), 5),
    ),
    Case(
        "lorraine2018_global",
        br.methods.lorraine2018_global(
            2000,
            perturb=br.Gaussian(1.0, mean=0.0),
            samples=16,
            vectorize=True,
            optimizer=partial(Adam, lr=3e-3),
            hyper_optimizer=partial(Adam, lr=2e-2),
        ),
        steps=2500,
        ridge=Ends(excess=0.05, distance=0.05),
        quadratic=Ends(excess=1e-3, distance=0.03),
        batch_norm=False,
        short=br.methods.lorraine2018_global(8, response=br.MLP(5), samples=3, vectorize=True),
    ),
    Case(
        "lorraine2018_global linear in a box",
        br.methods.lorraine2018_global(
            1000, response=br.Linear(), perturb=br.Box(-2.0, 2.0), samples=2, optimizer=adam, hyper_optimizer=fast
        ),
        steps=1300,
        ridge=Ends(excess=0.1, distance=0.1),
        quadratic=Ends(excess=1e-6, distance=1e-3),
        short=br.methods.lorraine2018_global(8, response=br.Linear(), perturb=br.Box(-2.0, 2.0)),
    ),
    Case(
        "lorraine2018_joint",
        br.methods.lorraine2018_joint(
            perturb=br.Gaussian(0.3), optimizer=partial(Adam, lr=3e-2), hyper_optimizer=adam, **to_zero
        ),
        steps=1500,
        ridge=Ends(excess=0.03, distance=0.02),
        quadratic=Ends(excess=1e-4, distance=0.01),
    ),
    Case(
        "lorraine2018_joint centered pairs",
        br.methods.lorraine2018_joint(
            perturb=pairs,
            samples=2,
            centered=True,
            optimizer=partial(Adam, lr=3e-2),
            hyper_optimizer=adam,
            **to_zero,
        ),
        steps=1500,
        ridge=Ends(excess=0.02, distance=0.03),
        quadratic=Ends(excess=1e-3, distance=0.01),
    ),
    Case(
        "lorraine2018_joint low rank",
        br.methods.lorraine2018_joint(
            response=br.LowRank(5, init=0.3),
            perturb=pairs,
            samples=2,
            optimizer=adam,
            hyper_optimizer=adam,
            **to_zero,
        ),
        steps=1500,
        ridge=Ends(excess=0.05, distance=0.02),
        quadratic=Ends(excess=1e-4, distance=0.02),
    ),
    # Without sampling, what the slope learns depends on how the hypers happen to move: another seed ends elsewhere, on
    # the curve of best responses but not at its lowest point.
    Case(
        "lorraine2018_simplified",
        br.methods.lorraine2018_simplified(optimizer=partial(SGD, lr=0.1), hyper_optimizer=adam),
        steps=1500,
        ridge=Ends(excess=None, distance=0.01),
        quadratic=Ends(excess=None, distance=0.01),
    ),
    Case(
        "luketina2016",
        br.methods.luketina2016(optimizer=partial(Adam, lr=3e-2), hyper_optimizer=adam),
        steps=1500,
        ridge=Ends(excess=1e-6, distance=1e-6),
        quadratic=None,  # the identity for a Hessian: see test_implicit.py
    ),
    Case(
        "luketina2016 central",
        br.methods.luketina2016(
            products="central",
            schedule=br.Alternate(train=2, warmup=4),
            optimizer=partial(Adam, lr=3e-2),
            hyper_optimizer=adam,
        ),
        steps=1000,
        ridge=Ends(excess=1e-3, distance=1e-3),
        quadratic=None,
    ),
    Case(
        "adjoint",
        br.methods.adjoint(
            horizon=1e4,
            schedule=br.Alternate(train=2, warmup=10),
            optimizer=partial(Adam, lr=3e-2),
            hyper_optimizer=partial(Adam, lr=3e-2),
        ),
        steps=700,
        ridge=Ends(excess=1e-3, distance=0.01),
        quadratic=Ends(excess=1e-5, distance=1e-3),
        short=br.methods.adjoint(schedule=br.Alternate(train=2, warmup=4), average=5),
    ),
    Case(
        "adjoint sparse, SGD",
        br.methods.adjoint(
            horizon=1e4,
            pair_every=2,
            valid_every=1,
            average=10,
            schedule=br.Alternate(train=4, warmup=10),
            optimizer=partial(SGD, lr=0.1, momentum=0.5),
            hyper_optimizer=partial(Adam, lr=3e-2),
        ),
        steps=400,
        ridge=Ends(excess=0.01, distance=0.02),
        quadratic=Ends(excess=1e-5, distance=2e-3),
    ),
    Case(
        "hoag2016",
        br.methods.hoag2016(train_tolerance=br.PowerTolerance(1e-3, 3.0), **exactly),
        steps=200,
        ridge=Ends(excess=1e-6, distance=1e-6),
        quadratic=Ends(excess=1e-6, distance=1e-6),
        short=br.methods.hoag2016(steps=3, damping=5.0),  # the net is not trained, and its curvature negative
    ),
    Case(
        "conjugate gradients, central, two batches",
        br.Implicit(br.CG(10), products="central", batches=2, **exactly),
        steps=200,
        ridge=Ends(excess=1e-6, distance=1e-6),
        quadratic=Ends(excess=1e-6, distance=1e-6),
        short=br.Implicit(br.CG(2, 5.0), products="central", batches=2),
    ),
    Case(
        "lorraine2020",
        br.methods.lorraine2020(20, lr=0.2, **exactly),
        steps=200,
        ridge=Ends(excess=1e-6, distance=1e-6),
        quadratic=Ends(excess=1e-6, distance=1e-6),
        short=br.methods.lorraine2020(2, lr=0.01, warm_start=True),
    ),
    Case(
        "hataya2023",
        br.methods.hataya2023(20, damping=1e-4, **exactly),
        steps=200,
        ridge=Ends(excess=1e-6, distance=1e-6),
        quadratic=Ends(excess=1e-6, distance=1e-6),
        short=br.methods.hataya2023(3, damping=5.0),
    ),
    # Through twelve updates from zero. What is exact is the hypergradient of those; they end that near w*.
    Case(
        "domke2012",
        br.methods.domke2012(Descent(0.3), 12, **falling),
        steps=60,
        ridge=Ends(excess=2e-3, distance=2e-3),
        quadratic=Ends(excess=2e-3, distance=0.01),
        short=br.methods.domke2012(heavy, 2),
    ),
    Case(
        "maclaurin2015",
        br.methods.maclaurin2015(Descent(0.15, momentum=0.3), 12, **falling),
        steps=60,
        ridge=Ends(excess=2e-3, distance=2e-3),
        quadratic=Ends(excess=2e-3, distance=0.03),
        short=br.methods.maclaurin2015(heavy, 2),
    ),
    Case(
        "drmad2016",
        br.methods.drmad2016(Descent(0.3), 12, **falling),
        steps=60,
        ridge=Ends(excess=2e-3, distance=2e-3),
        quadratic=Ends(excess=2e-3, distance=0.01),
        short=br.methods.drmad2016(heavy, 2),
    ),
    Case(
        "shaban2019",
        br.methods.shaban2019(Descent(0.3), 12, 4, **falling),
        steps=60,
        ridge=Ends(excess=2e-3, distance=2e-3),
        quadratic=Ends(excess=0.01, distance=0.01),
        short=br.methods.shaban2019(heavy, 3, 1),
    ),
    Case(
        "franceschi2017_forward",
        br.methods.franceschi2017_forward(
            Descent(0.25),
            2,
            hyper_optimizer=partial(Adam, lr=0.15),
            hyper_lr_schedule=partial(CosineAnnealingLR, T_max=80),
        ),
        steps=80,
        ridge=Ends(excess=2e-3, distance=1e-4),
        quadratic=Ends(excess=2e-3, distance=1e-3),
        short=br.methods.franceschi2017_forward(heavy, 1),
    ),
    Case(
        "unrolled checkpointed, going on",
        br.Unrolled(br.Checkpointed(), Descent(0.2, momentum=0.3), 10, restart=False, **falling),
        steps=60,
        ridge=Ends(excess=2e-3, distance=1e-4),
        quadratic=Ends(excess=2e-3, distance=1e-3),
        short=br.Unrolled(br.Checkpointed(), Rule(0.05), 3, restart=False),
    ),
    Case(
        "lorraine2018_fine_tuned",
        br.methods.lorraine2018_fine_tuned(
            Descent(0.25),
            3,
            perturb=br.Gaussian(0.3),
            optimizer=partial(Adam, lr=3e-2),
            hyper_optimizer=partial(Adam, lr=3e-2),
            lr_schedule=partial(CosineAnnealingLR, T_max=250),
            hyper_lr_schedule=partial(CosineAnnealingLR, T_max=250),
        ),
        steps=250,
        ridge=Ends(excess=5e-3, distance=0.02),
        quadratic=Ends(excess=5e-3, distance=0.02),
        short=br.methods.lorraine2018_fine_tuned(heavy, 2),
    ),
]

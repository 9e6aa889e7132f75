"""Losses and metrics over whole loaders."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Mapping

import torch
from torch import Tensor

from bestresponse import vectors
from bestresponse.problem import Batch, Loss, Params, Problem, evaluate, examples
from bestresponse.space import Raw
from bestresponse.stream import Stream


def mean_losses(
    problems: Mapping[str, Problem], params: Params, buffers: Params, raw: Raw, batches: Iterable[Batch]
) -> tuple[dict[str, Tensor], int]:
    """The mean over all examples of several problems' validation losses, in one pass; and how many batches it took.

    Batches count by their examples, or equally where a batch holds no tensor that would tell.
    """
    device = next(iter(params.values())).device
    totals = dict.fromkeys(problems, torch.zeros((), device=device))
    weight = taken = 0
    with torch.no_grad():
        for batch in batches:
            taken += 1
            weight += (size := examples(batch) or 1)
            for name, problem in problems.items():
                values = problem.space.values(raw)
                loss = evaluate(problem, "valid", params, values, batch, vectors.clone(buffers))
                totals[name] = totals[name] + loss.double() * size
    return {name: total / weight for name, total in totals.items()}, taken


def evaluate_fully(
    problem: Problem,
    params: Params,
    buffers: Params,
    raw: Raw,
    streams: Mapping[str, Stream],
    metrics: Mapping[str, Loss],
) -> dict[str, float]:
    """The validation loss and each metric, on all of each stream: ``"test/loss"``."""
    measures = {"loss": problem}
    measures |= {name: dataclasses.replace(problem, valid_loss=metric) for name, metric in metrics.items()}
    results: dict[str, float] = {}
    device = problem.device
    with torch.random.fork_rng(devices=[device] if device.type == "cuda" else []):  # a metric may draw
        for stream_name, stream in streams.items():
            means, _ = mean_losses(measures, params, buffers, raw, stream.epoch())
            results |= {f"{stream_name}/{name}": float(mean) for name, mean in means.items()}
    return results

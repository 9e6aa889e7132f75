"""Losses and metrics over whole loaders."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping

import torch

from bestresponse import vectors
from bestresponse.problem import Loss, Params, Problem, evaluate, examples
from bestresponse.space import Raw
from bestresponse.stream import Stream


def evaluate_fully(
    problem: Problem,
    params: Params,
    buffers: Params,
    raw: Raw,
    streams: Mapping[str, Stream],
    metrics: Mapping[str, Loss],
) -> dict[str, float]:
    """The mean of the validation loss, and of each metric, over every example of each stream: ``"test/loss"``."""
    values = problem.space.values(raw)
    measures = {"loss": problem}
    measures |= {name: dataclasses.replace(problem, valid_loss=metric) for name, metric in metrics.items()}
    results: dict[str, float] = {}
    with torch.no_grad():
        for stream_name, stream in streams.items():
            totals, count = dict.fromkeys(measures, torch.zeros((), device=problem.device)), 0
            for batch in stream.epoch():
                size = examples(batch)
                count += size
                for name, measured in measures.items():
                    loss = evaluate(measured, "valid", params, values, batch, vectors.clone(buffers))
                    totals[name] = totals[name] + loss.double() * size
            if count == 0:
                raise ValueError(f"{stream_name} is empty: it gave no batch")
            results |= {f"{stream_name}/{name}": float(total) / count for name, total in totals.items()}
    return results

"""``Adjoint`` where second derivatives are missing or unwelcome: fused attention, cuDNN's LSTM, compiled, bfloat16.

Each model is trained and tuned for a while; then the hypergradient and the curvature product of the pair are compared
with those of double differentiation at the same weights and adjoint, on the same batch, of the plain model in float32
(or in float64, with --dtype float64, and a smaller difference).

    python benchmarks/first_order.py [--device cuda] [--out benchmarks/results/first_order-cpu.json]
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import json
import platform
import time
from collections.abc import Callable
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.attention import SDPBackend, sdpa_kernel

import bestresponse as br
from bestresponse import vectors
from bestresponse.gradients import antithetic_pair, curvature_product, mixed_product

VOCABULARY, LENGTH = 64, 32


class LSTM(nn.Module):
    def __init__(self, width: int = 128) -> None:
        super().__init__()
        self.embed, self.lstm = nn.Embedding(VOCABULARY, width), nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, VOCABULARY)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.lstm(self.embed(x))[0])


class Transformer(nn.Module):
    """Two layers, each with ``scaled_dot_product_attention``, which takes a fused kernel where there is one."""

    def __init__(self, width: int = 128, heads: int = 4) -> None:
        super().__init__()
        self.embed, self.place = nn.Embedding(VOCABULARY, width), nn.Embedding(LENGTH, width)
        self.mix = nn.ModuleList([nn.Linear(width, 3 * width) for _ in range(2)])
        self.feed = nn.ModuleList(
            [nn.Sequential(nn.Linear(width, 4 * width), nn.GELU(), nn.Linear(4 * width, width)) for _ in range(2)]
        )
        self.norms = nn.ModuleList([nn.LayerNorm(width) for _ in range(4)])
        self.head, self.heads = nn.Linear(width, VOCABULARY), heads

    def forward(self, x: Tensor) -> Tensor:
        h = self.embed(x) + self.place.weight[: x.shape[1]]
        for i, (mix, feed) in enumerate(zip(self.mix, self.feed, strict=True)):
            parts = mix(self.norms[2 * i](h)).unflatten(-1, (3, self.heads, -1)).permute(2, 0, 3, 1, 4)
            seen = F.scaled_dot_product_attention(*parts, is_causal=True)
            h = h + seen.transpose(1, 2).flatten(2)
            h = h + feed(self.norms[2 * i + 1](h))
        return self.head(h)


def text(count: int, device: str) -> Tensor:
    """Sequences with something to learn: each next letter is a noisy function of the last two."""
    generator = torch.Generator().manual_seed(0)
    table = torch.randint(0, VOCABULARY, (VOCABULARY, VOCABULARY), generator=generator)
    rows = torch.randint(0, VOCABULARY, (count, LENGTH + 1), generator=generator)
    for t in range(2, LENGTH + 1):
        known = torch.rand(count, generator=generator) < 0.8
        rows[:, t] = torch.where(known, table[rows[:, t - 1], rows[:, t - 2]], rows[:, t])
    return rows.to(device)


def problem(model: nn.Module, device: str, autocast: bool) -> br.Problem:
    space = br.Space(
        decay=br.Hyper(1e-4, low=1e-8, high=1.0, log=True, shape=br.per_tensor(model)),
        smooth=br.Hyper(0.1, low=0.0, high=0.5),
    )

    def scores(model: nn.Module, batch: Tensor) -> Tensor:
        with torch.autocast(device, torch.bfloat16, enabled=autocast):
            out = model(batch[:, :-1])
        return out.to(torch.promote_types(out.dtype, torch.float32)).flatten(0, 1)

    def train_loss(model: nn.Module, batch: Tensor, hyper: Any) -> Tensor:
        out, target = scores(model, batch).log_softmax(-1), batch[:, 1:].flatten()
        loss = (hyper["smooth"] - 1) * out.gather(1, target[:, None]).mean() - hyper["smooth"] * out.mean()
        return loss + br.functional.l2(model, hyper["decay"])

    def valid_loss(model: nn.Module, batch: Tensor, hyper: Any) -> Tensor:
        return F.cross_entropy(scores(model, batch), batch[:, 1:].flatten())

    return br.Problem(model, space, train_loss, valid_loss)


@contextlib.contextmanager
def plainly() -> Any:
    """Kernels that can be differentiated twice."""
    with torch.backends.cudnn.flags(enabled=False), sdpa_kernel(SDPBackend.MATH):
        yield


def relative(ours: Any, exact: Any) -> tuple[float, float]:
    a, b = vectors.flatten(ours).double(), vectors.flatten(exact).double()
    return float(F.cosine_similarity(a, b, dim=0)), float((a - b).norm() / b.norm())


def measure(
    make: Callable[[], nn.Module], *, autocast: bool, compiled: bool, device: str, steps: int
) -> dict[str, Any]:
    torch.manual_seed(0)
    plain = make().to(device)
    model: Any = torch.compile(plain) if compiled else plain
    prefix = "_orig_mod." if compiled else ""
    task, reference = problem(model, device, autocast), problem(plain, device, autocast=False)
    rows = text(2048, device)
    data = br.Batches(rows, size=64)
    train, valid = [br.Stream([b[0] for b in data], name=name) for name in ("train", "valid")]
    double = next(plain.parameters()).dtype == torch.float64
    method = br.methods.adjoint(schedule=br.Alternate(10, warmup=50), difference=1e-6 if double else 1e-2)
    state = method.init(task, seed=0)
    began = time.perf_counter()
    metrics = [method.step(task, state, train, valid) for _ in range(steps)]
    row: dict[str, Any] = {
        "seconds": time.perf_counter() - began,
        "train_loss": [float(m.train_loss) for m in (metrics[0], metrics[-1])],
    }
    batch = next(train)
    delta, none = method._difference(state), state.live_buffers
    pair = antithetic_pair(task, state.params, state.raw, batch, state.adjoint, delta, buffers=none)
    params, p = ({n.removeprefix(prefix): w for n, w in v.items()} for v in (state.params, state.adjoint))
    raw = {n.replace(f"decay.{prefix}", "decay."): r for n, r in state.raw.items()}
    with plainly():
        mixed = mixed_product(reference, params, raw, batch, p, buffers={})
        curvature = curvature_product(reference, params, raw, batch, p, buffers={})
    row["mixed cosine"], row["mixed error"] = relative(pair.mixed, mixed)
    row["curvature cosine"], row["curvature error"] = relative(pair.curvature, curvature)
    once = dataclasses.replace(reference)
    try:
        mixed_product(once, params, raw, batch, p, buffers={})
        row["twice"] = True
    except (RuntimeError, NotImplementedError) as error:
        row["twice"] = str(error).splitlines()[0][:100]
    return row


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--dtype", default="float32", choices=["float32", "float64"])
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--out", type=Path)
    options = parser.parse_args()
    torch.set_num_threads(options.threads)
    torch.set_default_dtype(getattr(torch, options.dtype))
    rows = []
    print(f"{'model':36s} {'loss':>15s} {'mixed cos':>10s} {'error':>8s} {'Hp cos':>8s} {'error':>8s}  twice?")
    for name, make in (("LSTM", LSTM), ("transformer", Transformer)):
        for kind, flags in (
            ("", {"autocast": False, "compiled": False}),
            (", compiled", {"autocast": False, "compiled": True}),
            (", bfloat16", {"autocast": True, "compiled": False}),
            (", bfloat16, compiled", {"autocast": True, "compiled": True}),
        ):
            try:
                row = measure(make, **flags, device=options.device, steps=options.steps)
            except Exception as error:  # one model that fails must not hide the others
                row = {"failed": f"{type(error).__name__}: {str(error).splitlines()[0][:200]}"}
            rows.append({"model": name + kind, **row})
            if "failed" in row:
                print(f"{name + kind:36s} {row['failed']}", flush=True)
                continue
            first, last = row["train_loss"]
            print(
                f"{name + kind:36s} {first:7.3f} {last:7.3f} {row['mixed cosine']:10.5f} {row['mixed error']:8.1e}"
                f" {row['curvature cosine']:8.5f} {row['curvature error']:8.1e}  {row['twice']}",
                flush=True,
            )
    if options.out:
        report = {
            "date": datetime.now(UTC).date().isoformat(),
            "torch": torch.__version__,
            "python": platform.python_version(),
            "device": options.device if options.device == "cpu" else torch.cuda.get_device_name(),
            "dtype": options.dtype,
            "rows": rows,
        }
        options.out.parent.mkdir(parents=True, exist_ok=True)
        options.out.write_text(json.dumps(report, indent=1) + "\n")


if __name__ == "__main__":
    main()

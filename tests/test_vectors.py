"""Algebra on dicts of tensors agrees with the same algebra on one flat tensor."""

from __future__ import annotations

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from bestresponse import vectors

wide = settings(deadline=None, max_examples=50, derandomize=True)
shapes = st.dictionaries(
    st.text("abc.", min_size=1, max_size=3),
    st.lists(st.integers(0, 3), max_size=3).map(tuple),
    min_size=1,
    max_size=4,
)
seeds = st.integers(0, 2**31)


def draw(forms: dict[str, tuple[int, ...]], seed: int, *batch: int) -> dict[str, torch.Tensor]:
    generator = torch.Generator("cpu").manual_seed(seed)
    return {
        name: torch.randn((*batch, *form), generator=generator, dtype=torch.float64, device="cpu")
        for name, form in forms.items()
    }


def flat(vector: dict[str, torch.Tensor]) -> list[float]:
    return [number for part in vector.values() for number in part.reshape(-1).tolist()]


@given(forms=shapes, seed=seeds)
@wide
def test_dot_and_norm_are_sums_over_all_numbers(forms, seed):
    a, b = draw(forms, seed), draw(forms, seed + 1)
    assert float(vectors.dot(a, b)) == pytest.approx(
        sum(x * y for x, y in zip(flat(a), flat(b), strict=True)), abs=1e-12
    )
    assert float(vectors.norm(a)) == pytest.approx(math.hypot(*flat(a)), rel=1e-12)


@given(forms=shapes, seed=seeds, alpha=st.floats(-10, 10))
@wide
def test_scale_and_axpy_work_number_by_number(forms, seed, alpha):
    a, b = draw(forms, seed), draw(forms, seed + 1)
    assert flat(vectors.scale(alpha, a)) == [alpha * x for x in flat(a)]
    expected = [alpha * x + y for x, y in zip(flat(a), flat(b), strict=True)]
    assert flat(vectors.axpy(alpha, a, b)) == pytest.approx(expected, rel=1e-14, abs=1e-14)


def test_axpy_matches_parts_by_name_and_changes_neither():
    x = {"b": torch.tensor(1.0), "a": torch.tensor(2.0)}
    y = {"a": torch.tensor(10.0), "b": torch.tensor(20.0)}
    got = vectors.axpy(3.0, x, y)
    assert {name: float(part) for name, part in got.items()} == {"a": 16.0, "b": 23.0}
    assert [float(x["a"]), float(y["a"])] == [2.0, 10.0]


def test_dot_matches_parts_by_name():
    a = {"u": torch.tensor([1.0, 2.0]), "v": torch.tensor(3.0)}
    b = {"v": torch.tensor(10.0), "u": torch.tensor([4.0, 5.0])}
    assert float(vectors.dot(a, b)) == 4 + 10 + 30


@given(forms=shapes, seed=seeds, batch=st.lists(st.integers(1, 3), max_size=2))
@wide
def test_flatten_puts_parts_behind_one_another_and_unflatten_undoes_it(forms, seed, batch):
    vector = draw(forms, seed, *batch)
    row = vectors.flatten(vector, batch_dims=len(batch))
    assert row.shape == (*batch, sum(math.prod(form) for form in forms.values()))
    first = {name: part[(0,) * len(batch)] for name, part in vector.items()}
    assert row[(0,) * len(batch)].tolist() == flat(first)
    for like in (forms, first):  # shapes, or tensors
        back = vectors.unflatten(row, like)
        assert list(back) == list(vector)
        for name, part in vector.items():
            assert torch.equal(back[name], part), name


@given(forms=shapes)
@wide
def test_numel_counts_numbers(forms):
    assert vectors.numel(draw(forms, 0)) == sum(math.prod(form) for form in forms.values())


def test_unflatten_passes_gradients_back():
    row = torch.arange(5.0, requires_grad=True)
    parts = vectors.unflatten(row, {"a": (2, 2), "b": ()})
    (grad,) = torch.autograd.grad(2 * parts["a"][1, 0] + 7 * parts["b"], row)
    assert grad.tolist() == [0, 0, 2, 0, 7]


def test_clone_shares_nothing_and_has_no_graph():
    a = {"x": torch.ones(2, requires_grad=True) * 3}
    b = vectors.clone(a)
    assert not b["x"].requires_grad
    b["x"].zero_()
    assert a["x"].tolist() == [3, 3]


def test_leaves_start_a_graph_of_their_own():
    outer = torch.ones(2, requires_grad=True)
    leaf = vectors.leaves({"x": outer * 3})["x"]
    assert leaf.is_leaf
    assert leaf.requires_grad
    assert leaf.tolist() == [3, 3]
    assert torch.autograd.grad((leaf * outer).sum(), outer)[0].tolist() == [3, 3]


def test_zeros_like_has_shape_and_precision():
    zero = vectors.zeros_like({"x": torch.ones(2, 3, dtype=torch.float32)})["x"]
    assert zero.dtype == torch.float32
    assert torch.equal(zero, torch.zeros(2, 3, dtype=torch.float32))

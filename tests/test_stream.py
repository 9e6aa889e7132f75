"""Endless batches: each example once a pass, an order fixed by seed and place, global random numbers left alone."""

from __future__ import annotations

import random
import signal
from collections import OrderedDict, UserDict, namedtuple
from collections.abc import Callable, Iterable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import pack_sequence
from torch.utils.data import BatchSampler, DataLoader, Dataset, RandomSampler, Sampler, TensorDataset

import bestresponse as br
from bestresponse.stream import to_device

COUNT, SIZE, A_PASS = 10, 3, 4  # examples, examples in a batch, batches in a pass


@pytest.fixture(autouse=True)
def _on_the_cpu():
    """Where loaders make their tensors, whatever the suite's device is."""
    with torch.device("cpu"):
        yield


class Noisy(Dataset):
    """Items with random transforms, by three kinds of global random numbers."""

    def __len__(self) -> int:
        return COUNT

    def __getitem__(self, i: int) -> tuple[Tensor]:
        return (torch.tensor([i, torch.rand(()).item(), np.random.rand(), random.random()], dtype=torch.float64),)


def numbers() -> Tensor:
    return torch.arange(COUNT, dtype=torch.float64)


def with_generator() -> DataLoader:
    return DataLoader(TensorDataset(numbers()), SIZE, shuffle=True, generator=torch.Generator())


def with_replacement() -> DataLoader:
    """A sampler that draws from its generator now and then during a pass: 32 examples at a time."""
    data = TensorDataset(torch.arange(100, dtype=torch.float64))
    return DataLoader(data, 25, sampler=RandomSampler(data, replacement=True, generator=torch.Generator()))


def with_batch_sampler() -> DataLoader:
    data = TensorDataset(numbers())
    sampler = RandomSampler(data, generator=torch.Generator())
    return DataLoader(data, batch_sampler=BatchSampler(sampler, SIZE, drop_last=False))


#: Each has four batches a pass.
LOADERS: dict[str, Callable[[], Iterable[Any]]] = {
    "batches": lambda: br.Batches(numbers(), size=SIZE),
    "loader": lambda: DataLoader(TensorDataset(numbers()), SIZE, shuffle=True),
    "loader with a generator": with_generator,
    "loader with replacement": with_replacement,
    "loader with a batch sampler": with_batch_sampler,
    "random transforms": lambda: DataLoader(Noisy(), SIZE, shuffle=True),
    "list": lambda: [(part,) for part in numbers().split(SIZE)],
}
every_loader = pytest.mark.parametrize("make", LOADERS.values(), ids=LOADERS)
shuffled = pytest.mark.parametrize(
    "make", [LOADERS[name] for name in LOADERS if name != "list"], ids=[name for name in LOADERS if name != "list"]
)


def rows(batch: Any) -> list:
    """A batch as plain numbers."""
    return batch.tolist() if isinstance(batch, Tensor) else [rows(part) for part in batch]


def take(stream: Iterable[Any], count: int) -> list:
    iterator = iter(stream)
    return [rows(next(iterator)) for _ in range(count)]


def examples_of(batches: list) -> list[float]:
    """The first number of every example."""
    examples = [example for batch in batches for example in batch[0]]
    return [example[0] if isinstance(example, list) else example for example in examples]


def global_states() -> tuple:
    kind, keys, *rest = np.random.get_state()
    return torch.get_rng_state().tolist(), random.getstate(), kind, keys.tolist(), rest


# Passes


@pytest.mark.parametrize("name", [name for name in LOADERS if name != "loader with replacement"])
def test_every_example_comes_once_a_pass(name):
    stream = br.Stream(LOADERS[name]())
    for _ in range(3):
        assert sorted(examples_of(take(stream, A_PASS))) == numbers().tolist()


@shuffled
def test_every_pass_has_a_new_order(make):
    stream = br.Stream(make())
    orders = [tuple(examples_of(take(stream, A_PASS))) for _ in range(5)]
    assert len(set(orders)) == 5


@every_loader
def test_the_seed_and_the_name_decide_the_order_and_nothing_else_does(make):
    def order(seed: int, name: str = "train", outside: int = 0) -> list:
        torch.manual_seed(outside)
        random.seed(outside)
        np.random.seed(outside)
        return take(br.Stream(make(), name=name, seed=seed), 2 * A_PASS + 1)

    assert order(1) == order(1, outside=5)
    if make is not LOADERS["list"]:
        assert order(1) != order(2)
        assert order(1) != order(1, name="valid")


def test_random_transforms_differ_between_examples_and_passes():
    stream = br.Stream(LOADERS["random transforms"]())
    drawn = torch.tensor([example for batch in take(stream, 3 * A_PASS) for example in batch[0]])
    for column in (1, 2, 3):  # torch, numpy, python
        assert len(set(drawn[:, column].tolist())) == 3 * COUNT


# Global random numbers


@every_loader
def test_drawing_leaves_global_random_numbers_alone(make):
    stream = br.Stream(make())
    before = global_states()
    take(stream, A_PASS + 1)
    stream.peek()
    take(stream.epoch(), A_PASS)
    stream.load_state_dict({"pass_number": 1, "handed_out": 2})
    assert global_states() == before


def test_an_error_in_a_data_set_leaves_global_random_numbers_alone():
    class Broken(Noisy):
        def __getitem__(self, i: int) -> tuple[Tensor]:
            super().__getitem__(i)
            raise ArithmeticError("in the data set")

    stream = br.Stream(DataLoader(Broken(), SIZE, shuffle=True))
    before = global_states()
    with pytest.raises(ArithmeticError, match="in the data set"):
        next(stream)
    assert global_states() == before


def test_random_numbers_drawn_outside_do_not_move_the_stream():
    quiet, disturbed = br.Stream(LOADERS["random transforms"]()), br.Stream(LOADERS["random transforms"]())
    expected = take(quiet, 6)
    got = []
    for _ in range(6):
        got += take(disturbed, 1)
        torch.rand(3)
        random.random()
        np.random.rand()
    assert got == expected


@pytest.mark.parametrize("name", ["loader with a generator", "loader with replacement", "loader with a batch sampler"])
def test_a_loaders_own_generator_is_left_alone_too(name):
    loader = LOADERS[name]()
    owners = (loader, loader.sampler, getattr(loader.batch_sampler, "sampler", None))
    (generator, *_) = (g for owner in owners if (g := getattr(owner, "generator", None)) is not None)
    before = generator.get_state()
    stream = br.Stream(loader)
    take(stream, A_PASS + 1)
    take(stream.epoch(), 2)
    assert torch.equal(generator.get_state(), before)


@every_loader
def test_streams_of_one_loader_do_not_disturb_one_another(make):
    expected = [take(br.Stream(make(), name=name), 2 * A_PASS) for name in ("train", "valid")]
    loader = make()
    streams = [br.Stream(loader, name=name) for name in ("train", "valid")]
    got = [[], []]
    for _ in range(2 * A_PASS):
        for batches, stream in zip(got, streams, strict=True):
            batches += take(stream, 1)
    assert got == expected


# The place


@every_loader
@pytest.mark.parametrize("place", [0, 1, 3, A_PASS, A_PASS + 2, 2 * A_PASS])
@pytest.mark.parametrize("peeked", [False, True], ids=["", "peeked"])
def test_a_saved_place_is_found_again(make, place, peeked):
    stream = br.Stream(make(), seed=3)
    take(stream, place)
    if peeked:
        stream.peek()
    saved = stream.state_dict()
    expected = take(stream, 2 * A_PASS)
    fresh = br.Stream(make(), seed=3)
    fresh.load_state_dict(saved)
    assert take(fresh, 2 * A_PASS) == expected
    stream.load_state_dict(saved)  # back in the same stream
    assert take(stream, 2 * A_PASS) == expected


@every_loader
@pytest.mark.parametrize("place", [0, 2, A_PASS])
def test_an_epoch_is_one_whole_pass_and_leaves_the_place_alone(make, place):
    undisturbed = br.Stream(make())
    take(undisturbed, place)
    expected = take(undisturbed, 2 * A_PASS)
    stream = br.Stream(make())
    take(stream, place)
    saved = stream.state_dict()
    got = []
    for _ in range(2 * A_PASS):
        epoch = [rows(batch) for batch in stream.epoch()]
        assert epoch == take(br.Stream(make()), A_PASS)
        assert len(epoch) == A_PASS
        if not got:
            assert stream.state_dict() == saved
        got += take(stream, 1)
    assert got == expected


@every_loader
@pytest.mark.parametrize("place", [0, 2, A_PASS])
def test_an_epoch_leaves_a_place_alone_that_was_just_loaded(make, place):
    stream = br.Stream(make())
    take(stream, place)
    saved = stream.state_dict()
    expected = take(stream, A_PASS)
    stream.load_state_dict(saved)
    take(stream.epoch(), 2)
    assert take(stream, A_PASS) == expected


@every_loader
@pytest.mark.parametrize("place", [0, 2, A_PASS])
def test_peek_shows_the_next_batch_without_taking_it(make, place):
    stream = br.Stream(make())
    expected = take(br.Stream(make()), place + 2)[place:]
    take(stream, place)
    assert rows(stream.peek()) == rows(stream.peek()) == expected[0]
    assert take(stream, 2) == expected


def test_a_batch_that_was_peeked_at_is_not_left_over_after_loading():
    stream = br.Stream([torch.tensor(float(i)) for i in range(4)])
    stream.peek()
    stream.load_state_dict({"pass_number": 0, "handed_out": 2})
    assert take(stream, 2) == [2.0, 3.0]


def test_the_place_is_plain_numbers():
    stream = br.Stream(LOADERS["loader"]())
    take(stream, A_PASS + 2)
    assert stream.state_dict() == {"pass_number": 1, "handed_out": 2}


def test_samplers_are_told_the_pass():
    """As distributed samplers have to be."""

    class Told(Sampler):
        def __init__(self) -> None:
            self.number = -1
            self.started: list[int] = []

        def set_epoch(self, number: int) -> None:
            self.number = number

        def __len__(self) -> int:
            return 4

        def __iter__(self):
            self.started.append(self.number)
            return iter(range(4))

    sampler = Told()
    stream = br.Stream(DataLoader(TensorDataset(torch.arange(4)), 2, sampler=sampler))
    take(stream, 5)
    assert sampler.started == [0, 1, 2]
    stream.load_state_dict({"pass_number": 1, "handed_out": 1})
    assert sampler.started == [0, 1, 2, 1]


@pytest.mark.filterwarnings("ignore:.*fork.*:DeprecationWarning")
def test_a_loader_with_a_worker_is_repeated_too():
    def loader() -> DataLoader:
        return DataLoader(Noisy(), SIZE, shuffle=True, num_workers=1)

    stream = br.Stream(loader())
    take(stream, 2)
    saved = stream.state_dict()
    expected = take(stream, 3)
    stream.load_state_dict(saved)
    assert take(stream, 3) == expected


# What may be streamed


def once():
    yield torch.zeros(1)


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (once, "calibration must start anew each time it is iterated, and a generator can be read only once"),
        (
            lambda: iter([1]),
            "a list_iterator can be read only once. Give a DataLoader, br.Batches or a list of batches",
        ),
        (lambda: None, "calibration must be iterable: a DataLoader, br.Batches or a list of batches; got NoneType"),
        (lambda: 3, "calibration must be iterable: .*; got int"),
        (lambda: br.Stream([1]), "calibration is a br.Stream already; give the loader itself"),
    ],
    ids=["generator", "iterator", "none", "number", "stream"],
)
def test_what_cannot_be_streamed_is_refused_by_its_name(data, message):
    with pytest.raises(TypeError, match=message):
        br.Stream(data(), name="calibration")


@pytest.mark.parametrize(
    "data",
    [
        list,
        lambda: DataLoader(TensorDataset(numbers()), 2 * COUNT, drop_last=True),
        lambda: br.Batches(numbers(), size=2 * COUNT, drop_last=True),
        lambda: br.Batches(torch.zeros(0, 2), size=1),
    ],
    ids=["list", "loader", "batches", "no rows"],
)
@pytest.mark.parametrize(
    "use", [next, br.Stream.peek, lambda stream: next(stream.epoch())], ids=["next", "peek", "epoch"]
)
def test_an_empty_loader_is_refused_by_its_name(data, use):
    with pytest.raises(
        ValueError, match=r"calibration is empty: it gave no batch. Is drop_last set with too few examples"
    ):
        use(br.Stream(data(), name="calibration"))


def test_what_can_be_read_only_once_is_found_out_at_its_end():
    class Once:
        def __init__(self):
            self.batches = iter([1, 2])

        def __iter__(self):
            return self.batches

    stream = br.Stream(Once(), name="calibration")
    assert [next(stream), stream.peek(), next(stream)] == [1, 2, 2]
    with pytest.raises(ValueError, match=r"calibration gave no batch when it was iterated again: .* read only once"):
        next(stream)


def test_a_batch_may_be_none():
    data = ["first", None, "last"]
    stream = br.Stream(data)
    assert [next(stream) for _ in range(6)] == data * 2
    assert list(stream.epoch()) == data


# Batches


def test_batches_without_shuffling_are_slices_in_order():
    assert take(br.Batches(numbers(), 10 * numbers(), size=4, shuffle=False), 3) == [
        [[0, 1, 2, 3], [0, 10, 20, 30]],
        [[4, 5, 6, 7], [40, 50, 60, 70]],
        [[8, 9], [80, 90]],
    ]


@pytest.mark.parametrize("shuffle", [False, True])
def test_rows_of_all_tensors_stay_together_and_index_is_their_number(shuffle):
    x = torch.randn(COUNT, 2)
    seen = []
    for batch, same, index in br.Batches(x, -x, size=SIZE, shuffle=shuffle, index=True):
        assert torch.equal(batch, x[index])
        assert torch.equal(same, -batch)
        seen += index.tolist()
    assert sorted(seen) == list(range(COUNT))
    assert (seen == sorted(seen)) is not shuffle


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize(("size", "sizes"), [(3, [3, 3, 3, 1]), (5, [5, 5]), (10, [10]), (99, [10])])
def test_drop_last_leaves_out_a_smaller_batch(shuffle, size, sizes):
    for drop_last in (False, True):
        batches = br.Batches(numbers(), size=size, shuffle=shuffle, drop_last=drop_last)
        got = [len(batch[0]) for batch in batches]
        assert got == ([n for n in sizes if n == size] if drop_last else sizes)
        assert len(batches) == len(got)


def test_batches_alone_are_shuffled_by_torchs_generator():
    batches = br.Batches(numbers(), size=SIZE)
    torch.manual_seed(4)
    expected = torch.randperm(COUNT).tolist()
    torch.manual_seed(4)
    assert examples_of(take(batches, A_PASS)) == expected


@pytest.mark.parametrize("shuffle", [False, True])
def test_batches_stay_on_their_device(device, shuffle):
    tensors = numbers().to(device)
    for batch, index in br.Batches(tensors, size=SIZE, shuffle=shuffle, index=True):
        assert batch.device == index.device == tensors.device


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("default", ["meta", None])
def test_the_order_does_not_depend_on_the_default_device(device, shuffle, default):
    """Else it would come from random numbers that the stream does not know of."""
    batches = br.Batches(numbers(), size=SIZE, shuffle=shuffle)
    expected = take(br.Stream(batches), 2 * A_PASS)
    with torch.device(default or device):
        assert take(br.Stream(batches), 2 * A_PASS) == expected


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: br.Batches(size=3), "Batches needs at least one tensor"),
        (lambda: br.Batches(torch.zeros(3), torch.zeros(4), size=3), r"equal first dimensions; got \[3, 4\]"),
        (lambda: br.Batches(torch.zeros(3), size=0), "size must be at least 1; got 0"),
        (
            lambda: br.Batches(torch.zeros(3), torch.zeros(3, device="meta"), size=1),
            "must be on one device; got .*meta",
        ),
    ],
)
def test_batches_refuse(make, message):
    with pytest.raises(ValueError, match=message):
        make()


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: br.Batches([1, 2], size=1), "Batches needs tensors .*; got list"),
        (lambda: br.Batches(torch.zeros(3), np.zeros(3), size=1), "Batches needs tensors .*; got ndarray"),
        (lambda: br.Batches(TensorDataset(torch.zeros(3)), size=1), "got TensorDataset.*need a DataLoader"),
        (lambda: br.Batches(torch.zeros(()), size=1), "first dimension counts the examples; got a number"),
        (lambda: br.Batches(torch.zeros(3), size=1.5), "size must be a whole number; got 1.5"),
    ],
)
def test_batches_refuse_what_is_of_another_type(make, message):
    with pytest.raises(TypeError, match=message):
        make()


# Ctrl-C


class Deafness(Dataset):
    """Does the process that loads an example hear a Ctrl-C?"""

    def __len__(self):
        return 4

    def __getitem__(self, index):
        return signal.SIGINT in signal.pthread_sigmask(signal.SIG_BLOCK, ())


@pytest.mark.skipif(not hasattr(signal, "pthread_sigmask"), reason="needs the masks of signals")
@pytest.mark.parametrize("start", ["fork", "spawn"])
def test_workers_do_not_hear_a_ctrl_c_that_the_loop_waits_with(start):
    loader = DataLoader(Deafness(), batch_size=2, num_workers=1, multiprocessing_context=start)
    with torch.device("cpu"):
        assert next(br.Stream(loader)).tolist() == [True, True]
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, ())


# Devices

Pair = namedtuple("Pair", ["x", "y"])


class Typed(NamedTuple):
    x: Tensor
    name: str


def test_every_tensor_of_a_nested_batch_is_moved_and_types_are_kept():
    one = torch.ones(2)
    batch = {
        "pair": Pair(one, [one, (one, "text")]),
        "typed": Typed(one, "name"),
        "none": None,
        "deep": {"x": {"y": one}},
    }
    got = next(br.Stream([batch], device=torch.device("meta")))
    assert got["pair"]._fields == ("x", "y")
    assert isinstance(got["pair"], Pair)
    assert isinstance(got["typed"], Typed)
    assert isinstance(got["pair"].y, list)
    assert isinstance(got["pair"].y[1], tuple)
    assert (got["typed"].name, got["pair"].y[1][1], got["none"]) == ("name", "text", None)
    moved = [got["pair"].x, got["pair"].y[0], got["pair"].y[1][0], got["typed"].x, got["deep"]["x"]["y"]]
    assert {tensor.device.type for tensor in moved} == {"meta"}
    assert one.device.type == "cpu"
    assert list(to_device(OrderedDict(b=one, a=one), torch.device("meta"))) == ["b", "a"]


class Encoding(UserDict):
    """A mapping that can move itself, as tokenizers return."""

    @property
    def x(self) -> Tensor:
        return self.data["x"]

    def to(self, device: torch.device) -> Encoding:
        return Encoding({name: tensor.to(device) for name, tensor in self.data.items()})


class Graph:
    """Not a container at all."""

    def __init__(self, x: Tensor) -> None:
        self.x = x

    def to(self, device: torch.device) -> Graph:
        return Graph(self.x.to(device))


@pytest.mark.parametrize("make", [Graph, lambda x: Encoding({"x": x})], ids=["object", "mapping"])
def test_what_can_move_itself_does_so(make):
    batch = make(torch.ones(2))
    got = to_device([batch], torch.device("meta"))[0]
    assert type(got) is type(batch)
    assert got.x.device.type == "meta"


def test_a_packed_sequence_is_moved_by_its_own_rule():
    """Its sizes stay on the CPU."""
    packed = pack_sequence([torch.ones(3, 2), torch.ones(1, 2)])
    got = to_device(packed, torch.device("meta"))
    assert got.data.device.type == "meta"
    assert got.batch_sizes.device.type == "cpu"


def test_without_a_device_batches_are_left_as_they_are():
    batch = Pair(torch.ones(2), "label")
    assert next(br.Stream([batch])) is batch
    assert next(br.Stream([batch]).epoch()) is batch


def test_an_epoch_is_moved_too():
    assert next(br.Stream([torch.ones(1)], device=torch.device("meta")).epoch()).device.type == "meta"


@pytest.mark.parametrize("shuffle", [False, True])
@pytest.mark.parametrize("kind", ["list", "Batches", "DataLoader"])
def test_a_batch_that_is_drawn_can_be_had_again(kind, shuffle):
    """Three passes drawn at once are the batches of another stream, whenever and however often they are asked for."""
    batches = br.Batches(torch.arange(10.0), torch.arange(10.0) ** 2, size=4, shuffle=shuffle, index=True)
    with torch.device("cpu"):
        loader = DataLoader(TensorDataset(torch.arange(10.0), torch.arange(10.0)), batch_size=4, shuffle=shuffle)
    data = {"list": list(batches), "Batches": batches, "DataLoader": loader}[kind]
    drawing, plain = br.Stream(data, seed=1), br.Stream(data, seed=1)
    draws = [drawing.draw() for _ in range(9)]
    expected = [next(plain) for _ in range(9)]
    for draw, batch in [*zip(draws, expected, strict=True)][::-1] * 2:
        for ours, theirs in zip(draw(), batch, strict=True):
            assert torch.equal(ours, theirs)
    assert drawing.state_dict() == plain.state_dict()


def test_a_drawn_batch_of_batches_holds_no_rows():
    """Only their numbers: many may be kept."""
    batches = br.Batches(torch.zeros(1000, 1000), size=500)
    rows = next(batches.rows())
    assert isinstance(rows, Tensor)
    assert rows.shape == (500,)
    assert batches.take(rows)[0].shape == (500, 1000)

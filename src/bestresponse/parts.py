"""Checks of what things are made of: a part of the wrong kind is refused where it is given."""

from __future__ import annotations

import numbers


def require_part(name: str, part: object, kind: type, example: str) -> None:
    """Raise unless what is given as ``name`` is of its kind. A class or function that was not called is told so."""
    if not isinstance(part, kind):
        called = getattr(part, "__name__", None) if callable(part) else None
        own = isinstance(part, type) and issubclass(part, kind)
        call = f". Call it: {called}(...)" if called and (own or not isinstance(part, type)) else ""
        article = "an" if kind.__name__[0] in "AEIOU" else "a"
        raise TypeError(f"{name} must be {article} {kind.__name__}, such as {example}; got {part!r}{call}")


def require_whole(name: str, number: object) -> None:
    """Raise unless this is a whole number."""
    if isinstance(number, bool) or not isinstance(number, numbers.Integral):
        raise TypeError(f"{name} must be a whole number; got {number!r}")

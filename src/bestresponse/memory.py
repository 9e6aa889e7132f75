"""Refuse what cannot fit before it is allocated."""

from __future__ import annotations

import os

import torch


def require_memory(needed: int, device: torch.device, what: str, remedy: str) -> None:
    """Raise ``MemoryError`` when ``needed`` bytes are more than the device has in all."""
    there = total_memory(device)
    if there is not None and needed > there:
        raise MemoryError(f"{what}: {_gigabytes(needed)}, and {device} has {_gigabytes(there)} in all. {remedy}")


def total_memory(device: torch.device) -> int | None:
    """The device's memory in bytes; ``None`` where it cannot be found out."""
    if device.type == "cuda":
        return torch.cuda.mem_get_info(device)[1]
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    except (AttributeError, OSError, ValueError):  # not known on this system
        return None


def _gigabytes(count: int) -> str:
    return f"{count / 1e9:,.1f} GB"

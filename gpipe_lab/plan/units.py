"""Bytes as people write and read them."""

from __future__ import annotations

import re

from .errors import InputError

_UNITS = {"B": 1, "KB": 10**3, "MB": 10**6, "GB": 10**9, "KIB": 2**10, "MIB": 2**20, "GIB": 2**30}


def parse_bytes(size: str | int | None) -> int | None:
    """Bytes of "64MiB", "1.5 GB" or a number; None stays None. Raises `InputError` for anything else."""
    if size is None or (isinstance(size, int) and not isinstance(size, bool) and size > 0):
        return size
    match = (
        re.fullmatch(r"\s*(\d+(?:\.\d+)?)\s*([KMG]?i?B)\s*", size, re.IGNORECASE)
        if isinstance(size, str)
        else None
    )
    if match is None or float(match.group(1)) <= 0:
        raise InputError(
            "a size is a positive number of bytes or a text such as '64MiB'",
            got=repr(size),
            where="memory_limit",
            remedy="memory_limit='64MiB'",
        )
    return int(float(match.group(1)) * _UNITS[match.group(2).upper()])


def format_bytes(size: float) -> str:
    """A size with three significant digits and a binary unit: "1.50 MiB"."""
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if abs(size) >= factor:
            return f"{size / factor:.3g} {unit}"
    return f"{size:.0f} B"

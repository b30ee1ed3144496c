"""Pickling that takes along what a notebook cell defined, with its place in the cell for tracebacks."""

from __future__ import annotations

import io
from collections import ChainMap
from types import CodeType
from typing import Any, ClassVar

from cloudpickle import CloudPickler


def _reduce_code(code: CodeType) -> tuple:
    """As cloudpickle reduces it, but with the file name, which cloudpickle drops."""
    make, args = CloudPickler.dispatch_table[CodeType](code)
    return make, tuple(code.co_filename if arg == "<dynamic-code>" else arg for arg in args)


class _Pickler(CloudPickler):
    dispatch_table: ClassVar = ChainMap({CodeType: _reduce_code}, CloudPickler.dispatch_table)


def dumps(value: Any) -> bytes:
    """`value` as bytes that `pickle.loads` reads in any worker."""
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()

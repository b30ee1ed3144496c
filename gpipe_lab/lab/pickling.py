"""Pickling that takes along what a notebook cell defined, with its place in the cell for tracebacks.

Functions and classes of modules travel by name, and a worker imports the module once. One that was reloaded
since (`importlib.reload`, `%autoreload`) travels by value from then on, so that workers run the code that the
notebook runs. An edited file that was not reloaded changes nothing here; workers started later import it new.
"""

from __future__ import annotations

import io
import os
import pickle
import sys
from collections import ChainMap
from collections.abc import Callable, Sequence
from types import CodeType, FunctionType, ModuleType
from typing import Any, ClassVar

from cloudpickle import CloudPickler, list_registry_pickle_by_value, register_pickle_by_value

from ..plan.errors import InputError


def _reduce_code(code: CodeType) -> tuple:
    """As cloudpickle reduces it, but with the file name, which cloudpickle drops."""
    make, args = CloudPickler.dispatch_table[CodeType](code)
    return make, tuple(code.co_filename if arg == "<dynamic-code>" else arg for arg in args)


class _Pickler(CloudPickler):
    dispatch_table: ClassVar = ChainMap({CodeType: _reduce_code}, CloudPickler.dispatch_table)

    def reducer_override(self, obj: Any) -> Any:
        if isinstance(obj, FunctionType | type | ModuleType):
            _by_value_if_reloaded(obj)
        return super().reducer_override(obj)


_imported: dict[str, Any] = {}  # modules by name, each with the spec of its import: a reload makes another


def _by_value_if_reloaded(obj: FunctionType | type | ModuleType) -> None:
    name = obj.__name__ if isinstance(obj, ModuleType) else obj.__module__
    module = sys.modules.get(name)
    if module is None or name == "__main__" or name in list_registry_pickle_by_value():
        return
    spec = getattr(module, "__spec__", None)
    if _imported.setdefault(name, spec) is not spec:
        register_pickle_by_value(module)


def dumps(value: Any) -> bytes:
    """`value` as bytes that `pickle.loads` reads in any worker."""
    if len(_imported) != len(sys.modules):  # workers may import from now on what has been imported so far
        for name, module in list(sys.modules.items()):
            _imported.setdefault(name, getattr(module, "__spec__", None))
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()


def pack_jobs(function: Callable[..., Any], args_by_rank: Sequence[tuple]) -> list[bytes]:
    """A job for every rank; ranks with the very same arguments share one."""
    torch = sys.modules.get("torch")  # where the driver has not imported it, its default dtype is torch's own
    dtype = torch.get_default_dtype() if torch else None
    packed: dict[tuple[int, ...], bytes] = {}
    jobs = []
    for rank, args in enumerate(args_by_rank):
        key = tuple(map(id, args))
        if key not in packed:
            packed[key] = pickle.dumps((_cwd(), sys.path, dtype, _pickle_job(rank, function, args)))
        jobs.append(packed[key])
    return jobs


def _cwd() -> str | None:
    try:
        return os.getcwd()
    except OSError:  # a folder that has been removed
        return None


def unpickle_result(rank: int, data: bytes) -> Any:
    try:
        return pickle.loads(data)
    except Exception as error:
        raise RuntimeError(f"the result of rank {rank} cannot be unpickled here: {error}") from error


def _pickle_job(rank: int, function: Callable[..., Any], args: tuple) -> bytes:
    try:
        return dumps((function, args))
    except Exception as error:
        raise InputError(
            "a function and its arguments travel to the workers by pickling",
            got=f"{type(error).__name__}: {error}",
            where=f"the job of rank {rank}, {getattr(function, '__name__', function)}",
            remedy="make what cannot be pickled (files, locks) inside the function; "
            "for a model give functions that build its layers: [lambda: Layer(4), ...]",
        ) from error

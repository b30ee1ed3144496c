"""Pickling that takes along what a notebook cell defined, with its place in the cell for tracebacks.

Functions and classes of modules travel by name, and a worker imports the module once. One that was reloaded
since (`importlib.reload`, `%autoreload`) travels by value from then on, so that workers run the code that the
notebook runs. An edited file that was not reloaded changes nothing here; workers started later import it new.
"""

from __future__ import annotations

import io
import sys
from collections import ChainMap
from types import CodeType, FunctionType, ModuleType
from typing import Any, ClassVar

from cloudpickle import CloudPickler, list_registry_pickle_by_value, register_pickle_by_value


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


def note_imports() -> None:
    """Remember what has been imported so far, as workers may import it from now on."""
    if len(_imported) != len(sys.modules):
        for name, module in list(sys.modules.items()):
            _imported.setdefault(name, getattr(module, "__spec__", None))


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
    note_imports()
    buffer = io.BytesIO()
    _Pickler(buffer).dump(value)
    return buffer.getvalue()

"""A shared array in which every rank says which operation it is in, readable after its death."""

from __future__ import annotations

from multiprocessing.context import BaseContext
from typing import Any

from ..plan.ops import Kind, Op

_KINDS = tuple(Kind)
_CODES = {kind: code for code, kind in enumerate(_KINDS, start=1)}  # 0 is "in no operation"


_WAITS = 1 << 63


def _pack(op: Op) -> int:
    """An operation as one 64-bit integer, so that the driver never reads half of one."""
    return _CODES[op.kind] | op.stage << 8 | op.microbatch << 24 | op.segment << 48


def _unpack(cell: int) -> Op | None:
    cell &= _WAITS - 1
    if not cell:
        return None
    return Op(_KINDS[(cell & 0xFF) - 1], cell >> 8 & 0xFFFF, cell >> 24 & 0xFFFFFF, cell >> 48)


class Board:
    """The current operation of every rank, in shared memory that has no name and leaves no file."""

    def __init__(self, num_ranks: int, context: BaseContext) -> None:
        self._cells: Any = context.RawArray("Q", num_ranks)

    def of_rank(self, rank: int) -> RankBoard:
        """The part that one rank writes."""
        return RankBoard(self._cells, rank)

    def read(self, rank: int) -> Op | None:
        """The operation that `rank` was last seen in; None between operations."""
        return _unpack(self._cells[rank])

    def waits(self, rank: int) -> bool:
        """Whether `rank` was last seen waiting for another."""
        return bool(self._cells[rank] & _WAITS)


class RankBoard:
    """One rank's place on the board. Stages up to 65535, micro-batches up to 16 million."""

    __slots__ = ("_cells", "_rank")

    def __init__(self, cells: Any, rank: int) -> None:
        self._cells = cells
        self._rank = rank

    def mark(self, op: Op, *, waits: bool = False) -> None:
        """Say that this rank is in `op` from now on (about 1 µs), and whether it waits for another."""
        self._cells[self._rank] = _pack(op) | (_WAITS if waits else 0)

    def clear(self) -> None:
        """Say that this rank is in no operation."""
        self._cells[self._rank] = 0

"""Whether this process is a rank: it may start processes, and makes no labs."""

from __future__ import annotations

import multiprocessing

_is_rank = False


def mark_as_rank() -> None:
    """Called in a worker: it makes no labs, and other processes it may."""
    global _is_rank
    _is_rank = True
    vars(multiprocessing.current_process())["_config"]["daemon"] = False


def may_have_labs() -> bool:
    """Whether labs can be made in this process: not in a rank, nor in what ends without notice."""
    return not (_is_rank or multiprocessing.current_process().daemon)

"""What ends a call early, and how it is told: which rank, in which operation, and why."""

from __future__ import annotations

import linecache
import pickle
import re
import signal
import time
import traceback
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import Any

from ..engine.messages import PeerLost
from ..engine.rank_pipeline import StepRefused
from ..plan.errors import InputError
from ..plan.ops import WORDS, Kind, Op
from .board import Board
from .pickling import dumps, unpickle_result

CAUSE_WAIT_S = 1.0  # a rank that lost its peer waits this long to be explained by the peer's own failure
HEADLINE_CHARS = 500
TRACEBACK_CHARS = 20_000  # of an error that is told; the middle of a longer one is left out
CAUSE_BYTES = 1 << 20  # of an exception that travels itself
SOCKETS_CLOSED = (
    "sockets that its process needs were closed there: what runs in a rank, such as a layer, closes only "
    "file descriptors that it has opened itself"
)
SOCKETS_CLOSED_CODE = 77  # exit code of a worker whose own pipe is among them

_WITHOUT_MICROBATCH = (Kind.REDUCE, Kind.STEP)

# What gloo and NCCL say on a healthy rank when the rank at the other end is gone.
_PEER_LOSS = re.compile(
    r"connection (closed|reset|refused)|broken pipe|socket closed|remote process exited|timed? ?out",
    re.IGNORECASE,
)
_WORKER = str(Path(__file__).with_name("worker.py"))
_FRAME = re.compile(r'^  File "(?P<file>.+)", line (?P<line>\d+), in ')


class RankFailed(RuntimeError):
    """A rank raised or died, and all ranks were stopped.

    `rank`; `op`, the `Op` it was in or None; `reason`, one line; `traceback`, the rank's own as text
    ("" for a death). `__cause__` is the exception that the rank raised, where it can be pickled.
    """

    def __init__(
        self, rank: int, op: Op | None, reason: str, traceback: str = "", died: bool = False
    ) -> None:
        self.rank = rank
        self.op = op
        self.reason = reason
        self.traceback = traceback
        self.died = died
        super().__init__(rank, op, reason, traceback, died)

    def __str__(self) -> str:
        where = f" in {describe(self.op)}" if self.op else ""
        if self.died:
            return f"rank {self.rank} died ({self.reason}){where}"
        headline = f"rank {self.rank} failed{where}: {self.reason}"
        return f"{headline}\n\n{self.traceback}" if self.traceback else headline


class RunStopped(RuntimeError):
    """The call was ended by `stop()` from another thread."""


class PipelineLost(RuntimeError):
    """The workers that held a pipeline's weights were replaced; load its state before going on."""


@contextmanager
def as_input_errors() -> Iterator[None]:
    """Raise as itself the `InputError` of a rank that has begun no operation: what it was given is wrong."""
    try:
        yield
    except RankFailed as failed:
        if failed.op is None and isinstance(failed.__cause__, InputError):
            raise failed.__cause__ from None
        raise


@dataclass(frozen=True)
class Failure:
    """What a failed rank leaves behind for the driver."""

    rank: int
    reason: str
    traceback: str = ""
    cause: bytes | None = None  # the pickled exception
    died: bool = False
    is_consequence: bool = False  # of another rank's death

    @classmethod
    def of_exception(cls, rank: int, error: BaseException) -> Failure:
        """Describe what `rank` raised, from the first frame that is not the worker's own."""
        frames = error.__traceback__
        while frames and frames.tb_frame.f_code.co_filename == _WORKER:
            frames = frames.tb_next
        return cls(
            rank,
            reason=_headline(error),
            traceback=shortened("".join(traceback.format_exception(type(error), error, frames)).rstrip()),
            cause=_pickled(error),
            is_consequence=_is_peer_loss(error),
        )

    @classmethod
    def of_death(cls, rank: int, exit_code: int | None) -> Failure:
        """Describe a process that ended without a word; a negative `exit_code` is a signal."""
        if exit_code is None:
            return cls(rank, "it closed its pipe", died=True)
        if exit_code == SOCKETS_CLOSED_CODE:
            return cls(rank, SOCKETS_CLOSED)
        reason = f"killed by {signal.Signals(-exit_code).name}" if exit_code < 0 else f"exit code {exit_code}"
        return cls(rank, reason, died=True)

    def error(self, op: Op | None) -> RankFailed:
        """The exception to raise in the driver, for a rank that was in `op`."""
        error = RankFailed(self.rank, op, self.reason, _with_source(self.traceback), self.died)
        error.__cause__ = _unpickled(self.cause)
        return error


@dataclass(frozen=True)
class Refused:
    """In place of a rank's result: a rule was broken, by this rank where it says how, and all ranks go on."""

    failure: Failure | None
    op: Op | None

    @classmethod
    def of(cls, rank: int, refused: StepRefused) -> Refused:
        failure = None if refused.error is None else Failure.of_exception(rank, refused.error)
        return cls(failure, refused.op)


def raise_refusals(results: Sequence[Any]) -> None:
    """Raise `RankFailed` for the first rank that broke a rule; the workers, and what they hold, stay."""
    for result in results:
        if isinstance(result, Refused) and result.failure is not None:
            raise result.failure.error(result.op)


def describe(op: Op) -> str:
    """An operation for a sentence: `2B1 (stage 2, full backward of micro-batch 1)`."""
    segment = f", segment {op.segment}" if op.segment else ""
    microbatch = "" if op.kind in _WITHOUT_MICROBATCH else f" of micro-batch {op.microbatch}{segment}"
    return f"{op} (stage {op.stage}, {WORDS[op.kind]}{microbatch})"


def shortened(text: str, limit: int = TRACEBACK_CHARS) -> str:
    """A text of at most about `limit` characters: the beginning and the end of a longer one."""
    if len(text) <= limit:
        return text
    half = limit // 2
    return f"{text[:half]}\n... {len(text) - 2 * half:,} characters are left out ...\n{text[-half:]}"


def _headline(error: BaseException) -> str:
    name = type(error).__name__
    text = _words(error).strip()
    first = text.partition("\n")[0]
    return f"{name}: {first[:HEADLINE_CHARS]}" if text else name


def _words(error: BaseException) -> str:
    """What an error says; nothing where that raises in its turn, which a class of the user's may."""
    try:
        return str(error)
    except BaseException:
        return ""


def _is_peer_loss(error: BaseException) -> bool:
    if isinstance(error, PeerLost):
        return True
    return isinstance(error, RuntimeError) and bool(_PEER_LOSS.search(_words(error)))


def _pickled(error: BaseException) -> bytes | None:
    """The exception as bytes, or None where it is large or does not survive pickling (many do not)."""
    try:
        data = dumps(error)
        survives = isinstance(pickle.loads(data), BaseException)
    except BaseException:  # it runs code of the user's, which may raise anything
        return None
    return data if survives and len(data) <= CAUSE_BYTES else None


def _unpickled(cause: bytes | None) -> BaseException | None:
    try:
        found = pickle.loads(cause) if cause else None
    except Exception:  # a class that only the worker can import; its traceback is in the message
        return None
    return found if isinstance(found, BaseException) else None


def _with_source(text: str) -> str:
    """Add the source lines of notebook cells, which only the driver has."""
    lines = text.splitlines()
    told = []
    for line, following in zip_longest(lines, lines[1:], fillvalue=""):
        told.append(line)
        frame = _FRAME.match(line)
        if frame and not following.startswith("    "):
            source = linecache.getline(frame["file"], int(frame["line"])).strip()
            told += [f"    {source}"] if source else []
    return "\n".join(told)


class Replies:
    """The replies to one call, and which rank to blame where one fails."""

    def __init__(self, num_ranks: int, board: Board, timeout: float | None) -> None:
        self._board = board
        self.missing = set(range(num_ranks))
        self._results: dict[int, bytes] = {}
        self._deadline = None if timeout is None else time.monotonic() + timeout
        self._consequence: Failure | None = None  # the first one
        self._blame_by: float | None = None

    def add_result(self, rank: int, result: bytes) -> None:
        self.missing.discard(rank)
        self._results[rank] = result

    def add_failure(self, failure: Failure) -> None:
        """Raises `RankFailed` unless the failure may be the consequence of another, which is waited for."""
        self.missing.discard(failure.rank)
        if not failure.is_consequence:
            raise self._error(failure)
        if self._consequence is None:
            self._consequence = failure
            self._blame_by = time.monotonic() + CAUSE_WAIT_S

    def complete(self) -> bool:
        """Whether every rank has its result; raises once there is no more to wait for."""
        now = time.monotonic()
        if self._consequence and (not self.missing or now > (self._blame_by or now)):
            raise self._error(self._consequence)
        if self.missing and self._deadline is not None and now > self._deadline:
            late = ", ".join(map(self._whereabouts, sorted(self.missing)))
            raise TimeoutError(f"not finished in time: {late}; the next call starts on fresh workers")
        return not self.missing

    def patience(self) -> float | None:
        """Seconds until `complete` must be asked again; None for as long as it takes."""
        ends = [end for end in (self._deadline, self._blame_by) if end is not None]
        return max(0.0, min(ends) - time.monotonic()) if ends else None

    def by_rank(self) -> list[Any]:
        return [unpickle_result(rank, self._results[rank]) for rank in sorted(self._results)]

    def _error(self, failure: Failure) -> RankFailed:
        return failure.error(self._board.read(failure.rank))

    def _whereabouts(self, rank: int) -> str:
        op = self._board.read(rank)
        return f"rank {rank} in {describe(op)}" if op else f"rank {rank}"

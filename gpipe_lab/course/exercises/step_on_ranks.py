"""Running a learner's GPipe step on real ranks, and the one process that it must agree with."""

from __future__ import annotations

import inspect
import linecache
import re
import sys
import threading
from collections.abc import Callable
from functools import lru_cache, partial
from typing import Any, NamedTuple

from ..exercise import Answer, Mismatch, NotDone

LIMIT_S = 10.0  # a step takes milliseconds; one that hangs is stopped after this
WIDTH = 8


Job = Callable[..., tuple[float | None, dict[str, Any]]]


class Outcome(NamedTuple):
    """What every rank came to: the loss it returned and its parameters' gradients; or why there is none."""

    losses: list[float | None]
    gradients: list[dict[str, Any]]
    failure: Mismatch | None = None


@lru_cache(maxsize=16)  # a check wraps the answer anew, so nothing is remembered from check to check
def outcome(
    answer: Answer, P: int, rows: int, M: int, *, job: Job | None = None, limit_s: float | None = None
) -> Outcome:
    """One step of the answer on P ranks, stopped where it hangs.

    job: what runs the answer on a rank; limit_s: after how many seconds it hangs.
    """
    from ...lab.failures import RankFailed
    from ...lab.lab import Lab

    own = inspect.unwrap(answer)
    plain = own.func if isinstance(own, partial) else own
    file = getattr(getattr(plain, "__code__", None), "co_filename", "")
    limit_s = LIMIT_S if limit_s is None else limit_s
    places: dict[int, int] = {}  # rank -> the line of the answer at which it hangs
    with Lab(P, device="cpu") as lab:
        try:
            replies = lab.call(
                job or run_on_a_rank,
                [(own, file, rows, M, limit_s)] * P,
                on_message=places.__setitem__,
                timeout=limit_s,
            )
        except RankFailed as error:
            if isinstance(error.__cause__, NotImplementedError):
                raise NotDone from error
            got = f"rank {error.rank} {'died' if error.died else 'failed'}: {error.reason}"
            numbers = re.findall(rf'File "{re.escape(file)}", line (\d+)', error.traceback)
            detail = _place(error.rank, "fails", file, int(numbers[-1])) if numbers else ""
            return Outcome([], [], Mismatch("an end on every rank", got, detail))
        except TimeoutError:
            detail = "\n".join(_place(rank, "waits", file, places[rank]) for rank in sorted(places))
            got = f"none after {limit_s:g} s"
            return Outcome([], [], Mismatch("an end on every rank", got, detail))
    return Outcome([loss for loss, _ in replies], [gradients for _, gradients in replies])


def run_on_a_rank(
    context: Any, answer: Answer, file: str, rows: int, M: int, limit_s: float
) -> tuple[float | None, dict[str, Any]]:
    """A job: the answer's step on this rank; reports the line at which it is shortly before the limit."""
    import torch

    torch.set_default_dtype(torch.float64)
    stage = build_stage(context.rank)
    inputs, targets = build_batch(rows, M)
    main = threading.get_ident()

    def report() -> None:
        frame = sys._current_frames().get(main)
        while frame is not None and frame.f_code.co_filename != file:
            frame = frame.f_back
        if frame is not None:
            context.report(frame.f_lineno)

    watch = threading.Timer(0.8 * limit_s, report)
    watch.daemon = True
    watch.start()
    try:
        loss = answer(
            context,
            stage,
            inputs if context.rank == 0 else None,
            targets if context.rank == context.num_ranks - 1 else None,
            [tuple(part.shape) for part in inputs],
            torch.nn.functional.mse_loss,
        )
    finally:
        watch.cancel()
    return None if loss is None else float(loss), {name: p.grad for name, p in stage.named_parameters()}


def build_stage(index: int) -> Any:
    """Stage `index`: the same weights in whichever process builds it."""
    import torch
    from torch import nn

    torch.manual_seed(index)
    return nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh())


def build_batch(rows: int, M: int) -> tuple[list[Any], list[Any]]:
    """The micro-batches' inputs and targets."""
    import torch

    from ...engine.batch import split

    torch.manual_seed(1000 + rows)
    inputs, targets = torch.randn(rows, WIDTH), torch.randn(rows, WIDTH)
    return split(inputs, M), split(targets, M)


def reference(P: int, rows: int) -> tuple[float, list[dict[str, Any]]]:
    """Loss and gradients, stage by stage, of the whole batch in one process."""
    import torch

    before = torch.get_default_dtype()
    torch.set_default_dtype(torch.float64)
    try:
        with torch.random.fork_rng(devices=[]):
            stages = [build_stage(index) for index in range(P)]
            (x,), (target,) = build_batch(rows, 1)
        for stage in stages:
            x = stage(x)
        loss = torch.nn.functional.mse_loss(x, target)
        loss.backward()
    finally:
        torch.set_default_dtype(before)
    return loss.item(), [{name: p.grad for name, p in stage.named_parameters()} for stage in stages]


def _place(rank: int, what: str, file: str, line: int) -> str:
    return f"rank {rank} {what} at line {line}: {linecache.getline(file, line).strip()}"

"""What the panel's Run button runs: a small model through real workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from ..plan.memory import MemoryReport
from ..plan.trace import Trace
from .settings import (
    NUM_LAYERS,
    ROWS,
    WIDTH,
    Settings,
    authored,
    backward_ms,
    forward_ms,
    layers_of,
)

if TYPE_CHECKING:
    from ..lab.lab import Lab


MEASURING = "measuring"  # the phase that takes as long as the simulation says


class Measured(Protocol):
    """What a run leaves."""

    @property
    def trace(self) -> Trace: ...

    @property
    def memory(self) -> MemoryReport | None: ...


class Runner(Protocol):
    """Runs settings for real. `stop` may come from another thread and makes `run` raise."""

    def run(self, settings: Settings, progress: Callable[[str], None]) -> Measured: ...

    def stop(self) -> None: ...

    def close(self) -> None: ...


class SharedLab:
    """The one lab that all panels of a notebook use, in turns; it ends with the notebook at the latest."""

    def __init__(self) -> None:
        self.lab: Lab | None = None
        self._turn = threading.Lock()
        self._holder: object = None
        self._made_for: object = None

    @contextmanager
    def held(
        self,
        holder: object,
        num_ranks: int,
        device: str,
        memory_limit: int | None,
        progress: Callable[[str], None],
    ) -> Iterator[Lab]:
        """Wait until it is free and lend it, with `num_ranks` workers. `progress` may raise to give up."""
        import gpipe_lab as gl

        while not self._turn.acquire(timeout=0.2):
            progress("waiting for another panel's run")
        try:
            self._holder = holder
            if self._made_for != device:
                self._end()
            if self.lab is None:
                progress(f"starting {num_ranks} workers")
                self.lab = gl.Lab(num_ranks=num_ranks, device=device)
                self._made_for = device
            elif self.lab.num_ranks != num_ranks:
                progress(f"changing to {num_ranks} workers")
                self.lab.resize(num_ranks)
            self.lab.memory_limit = memory_limit
            yield self.lab
        finally:
            self._holder = None
            self._turn.release()

    def stop(self, holder: object) -> None:
        """End the run of `holder`, and nobody else's."""
        lab = self.lab
        if lab is not None and self._holder is holder:
            lab.stop()

    def close(self) -> None:
        """End the workers, unless a panel is using them; the next run starts others."""
        if self._turn.acquire(blocking=False):
            try:
                self._end()
            finally:
                self._turn.release()

    def _end(self) -> None:
        lab, self.lab = self.lab, None
        if lab is not None:
            lab.close()


shared_lab = SharedLab()


class LabRunner:
    """Runs in the lab that all panels share, started at the first run and resized with P."""

    def __init__(self, *, device: str = "auto") -> None:
        self.device = device

    def run(self, settings: Settings, progress: Callable[[str], None]) -> Measured:
        import torch

        import gpipe_lab as gl

        random = torch.Generator().manual_seed(0)  # the learner's own random numbers are left alone
        model = _model(torch, random)
        rows = settings.num_microbatches * ROWS
        inputs = torch.randn(rows, WIDTH, dtype=torch.float32, generator=random)
        schedule = authored(settings)
        num_stages = schedule.num_stages
        pace = gl.Pace(
            forward_ms=forward_ms(settings, num_stages),
            backward_ms=backward_ms(settings, num_stages),
            link_ms=settings.send_ms,
        )
        with shared_lab.held(self, settings.num_stages, self.device, settings.memory_limit, progress) as lab:
            progress(MEASURING)
            return lab.run(
                schedule,
                model,
                inputs,
                torch.zeros_like(inputs) if schedule.trains else None,
                loss_fn=torch.nn.functional.mse_loss if schedule.trains else None,
                checkpoint=settings.checkpoint,
                partition=[len(part) for part in layers_of(settings, num_stages)],
                pace=pace,
            )

    def stop(self) -> None:
        shared_lab.stop(self)

    def close(self) -> None:
        shared_lab.close()


def _model(torch: Any, random: Any) -> Any:
    nn = torch.nn

    def layer() -> Any:
        linear = nn.utils.skip_init(nn.Linear, WIDTH, WIDTH, dtype=torch.float32)
        for parameter in linear.parameters():
            nn.init.uniform_(parameter, -(WIDTH**-0.5), WIDTH**-0.5, generator=random)
        return nn.Sequential(linear, nn.Tanh())

    return nn.Sequential(*(layer() for _ in range(NUM_LAYERS)))


def does_not_fit(error: BaseException | None) -> bool:
    """Whether a run ended because a rank passed its memory limit."""
    if error is None or error.__cause__ is None:
        return False
    from ..engine.ledger import OutOfMemory  # imports torch, as a run that had a cause has done

    return isinstance(error.__cause__, OutOfMemory)

"""What the panel's Run button runs: a small model through real workers."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Protocol

from ..plan.memory import MemoryReport
from ..plan.trace import Trace
from .settings import NUM_LAYERS, Settings, authored

if TYPE_CHECKING:
    from ..lab.lab import Lab


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
        memory_limit: str | int | None,
        progress: Callable[[str], None],
    ) -> Iterator[Lab]:
        """Wait until it is free and lend it, with `num_ranks` workers. `progress` may raise to give up."""
        import gpipe_lab as gl

        while not self._turn.acquire(timeout=0.2):
            progress("waiting for another panel's run")
        try:
            self._holder = holder
            if self._made_for != (device, memory_limit):
                self._end()
            if self.lab is None:
                progress(f"starting {num_ranks} workers")
                self.lab = gl.Lab(num_ranks=num_ranks, device=device, memory_limit=memory_limit)
                self._made_for = device, memory_limit
            elif self.lab.num_ranks != num_ranks:
                progress(f"changing to {num_ranks} workers")
                self.lab.resize(num_ranks)
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

    def __init__(
        self,
        *,
        device: str = "auto",
        memory_limit: str | int | None = None,
        width: int = 64,
        rows: int = 64,
    ) -> None:
        """`width`: features of each of the 16 layers; `rows`: of one micro-batch."""
        self.device, self.memory_limit = device, memory_limit
        self.width, self.rows = width, rows

    def run(self, settings: Settings, progress: Callable[[str], None]) -> Measured:
        import torch

        import gpipe_lab as gl

        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self._model(torch.nn)
            inputs = torch.randn(settings.num_microbatches * self.rows, self.width, dtype=torch.float32)
        schedule = authored(settings)
        with shared_lab.held(self, settings.num_stages, self.device, self.memory_limit, progress) as lab:
            progress("measuring")
            return lab.run(
                schedule,
                model,
                inputs,
                torch.zeros_like(inputs) if schedule.trains else None,
                loss_fn=torch.nn.functional.mse_loss if schedule.trains else None,
                checkpoint=settings.checkpoint,
                pace=gl.Pace(forward_ms=settings.forward_ms, backward_ms=settings.backward_ms),
            )

    def _model(self, nn: Any) -> Any:
        import torch

        def layer() -> Any:
            return nn.Sequential(nn.Linear(self.width, self.width, dtype=torch.float32), nn.Tanh())

        return nn.Sequential(*(layer() for _ in range(NUM_LAYERS)))

    def stop(self) -> None:
        shared_lab.stop(self)

    def close(self) -> None:
        shared_lab.close()

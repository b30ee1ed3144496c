"""What the panel's Run button runs: a small model through real workers."""

from __future__ import annotations

from collections.abc import Callable
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


class LabRunner:
    """A lab of its own, started at the first run and resized with P."""

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
        self._lab: Lab | None = None

    def run(self, settings: Settings, progress: Callable[[str], None]) -> Measured:
        import torch

        import gpipe_lab as gl

        if self._lab is None:
            progress(f"starting {settings.num_stages} workers")
            self._lab = gl.Lab(
                num_ranks=settings.num_stages, device=self.device, memory_limit=self.memory_limit
            )
        elif self._lab.num_ranks != settings.num_stages:
            progress(f"changing to {settings.num_stages} workers")
            self._lab.resize(settings.num_stages)
        progress("measuring")
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(0)
            model = self._model(torch.nn)
            inputs = torch.randn(settings.num_microbatches * self.rows, self.width, dtype=torch.float32)
        schedule = authored(settings)
        return self._lab.run(
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
        if self._lab is not None:
            self._lab.stop()

    def close(self) -> None:
        lab, self._lab = self._lab, None
        if lab is not None:
            lab.close()

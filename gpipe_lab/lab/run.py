"""What a run brings back, put together from all ranks onto one clock."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from statistics import median
from typing import Any

import torch

from ..engine.batch import Tree, merge
from ..engine.executor import RankResult
from ..plan.errors import require
from ..plan.memory import MemoryReport
from ..plan.schedule import Schedule
from ..plan.trace import MEASURED, PACED, Trace


class Profiles:
    """torch profiler traces by rank, as `run(..., profile=True)` brings them back.

    Every operation of the schedule is named in them, as "F stage 2 micro-batch 0". The files open in Perfetto
    (ui.perfetto.dev) or chrome://tracing.
    """

    def __init__(self, contents: Sequence[bytes]) -> None:
        self._contents = tuple(contents)

    @property
    def num_ranks(self) -> int:
        return len(self._contents)

    @cached_property
    def paths(self) -> tuple[Path, ...]:
        """One file a rank, in a temporary folder that lasts as long as this object; `save` keeps them."""
        self._folder = tempfile.TemporaryDirectory(prefix="gpipe_lab-profiles-")
        return self.save(self._folder.name)

    def save(self, folder: str | Path) -> tuple[Path, ...]:
        """Write the files into `folder`, which is made if need be: rank_0.json, rank_1.json, ..."""
        folder = Path(folder)
        folder.mkdir(parents=True, exist_ok=True)
        paths = tuple(folder / f"rank_{rank}.json" for rank in range(self.num_ranks))
        for path, content in zip(paths, self._contents, strict=True):
            path.write_bytes(content)
        return paths

    def load(self, rank: int) -> dict[str, Any]:
        """A rank's profile as a dict; `["traceEvents"]` has what happened."""
        require(
            0 <= rank < self.num_ranks,
            f"a rank is one of 0 to {self.num_ranks - 1}",
            got=f"rank={rank!r}",
            where="profiles.load",
        )
        return json.loads(self._contents[rank])

    def __repr__(self) -> str:
        size = sum(map(len, self._contents)) / 1e6
        return f"Profiles of {self.num_ranks} ranks ({size:.1f} MB): .paths, .load(rank), .save(folder)"


@dataclass(frozen=True)
class Run:
    """One step that really ran.

    `loss` is that of the whole batch. `bytes_sent` maps (from rank, to rank) to the bytes of tensors that
    went that way; `bytes_reduced` maps the ranks of a group (replicas, or holders of tied weights) to the
    bytes of gradients that each of them put into its sum. Where the step was repeated, `trace` and `memory`
    are those of the run with the median makespan, and `makespans_ms` has all of them. `profiles` are those of
    torch's profiler, where they were asked for. On GPUs `allocator_peaks` has the most bytes that torch's
    allocator held on each rank: what `memory` counts, and temporaries and workspaces besides.
    """

    loss: float
    trace: Trace
    memory: MemoryReport
    bytes_sent: dict[tuple[int, int], int]
    makespans_ms: tuple[float, ...]
    bytes_reduced: dict[tuple[int, ...], int] = field(default_factory=dict)
    grad_norm: float | None = None
    profiles: Profiles | None = None
    allocator_peaks: dict[int, int] = field(default_factory=dict)
    _gradients: dict[str, torch.Tensor] | None = field(default=None, repr=False)
    _outputs: dict[int, Tree] = field(default_factory=dict, repr=False)

    def plot(self, **options: Any) -> Any:
        """The Gantt chart of the run, its memory on the same time axis; options are `gl.plot_trace`'s."""
        return self.trace.plot(self.memory, **options)

    def gradients(self) -> dict[str, torch.Tensor]:
        """Whole-model parameter names to gradients, on the CPU."""
        require(
            self._gradients is not None,
            "a pipeline's step leaves its gradients on the workers",
            got="the run of a step",
            where="run.gradients",
            remedy="pipe.gradients()",
        )
        return dict(self._gradients or {})

    def outputs(self) -> Tree:
        """The model's output for the whole batch, after a forward-only run or a step with `outputs=True`.

        A number that each micro-batch has one of becomes a tensor with an entry for each.
        """
        require(
            bool(self._outputs),
            "a training step leaves the model's outputs on the workers unless it is asked for them",
            got="a step without outputs=True",
            where="run.outputs",
            remedy="outputs=True in lab.run or pipe.step",
        )
        return merge([self._outputs[m] for m in sorted(self._outputs)])


def assemble(
    results: Sequence[RankResult],
    schedule: Schedule,
    *,
    loss: float,
    device: str,
    paced: bool,
    limit_bytes: int | None = None,
) -> Run:
    """One `Run` from what every rank measured; time starts with the first computation."""
    source = PACED if paced else MEASURED
    overran = sum(result.overran for result in results)
    events = [event for result in results for event in result.events]
    start = Trace(tuple(events), source, schedule).start_ms
    shifted = [e._replace(start_ms=e.start_ms - start, end_ms=e.end_ms - start) for e in events]
    unsplit = {
        (stage, name) for result in results for stage, names in result.unsplit.items() for name in names
    }
    trace = Trace(
        tuple(sorted(shifted, key=lambda e: (e.start_ms, e.rank))),
        source,
        schedule,
        device,
        overran,
        tuple(sorted(unsplit)),
    )
    rows = tuple(row._replace(time_ms=row.time_ms - start) for result in results for row in result.memory)
    return Run(
        loss=loss,
        trace=trace,
        memory=MemoryReport(rows, MEASURED, limit_bytes, schedule),
        bytes_sent={link: n for result in results for link, n in result.bytes_sent.items()},
        makespans_ms=(trace.makespan_ms,),
        allocator_peaks={
            result.rank: result.allocator_peak_bytes
            for result in results
            if result.allocator_peak_bytes is not None
        },
        bytes_reduced={ranks: n for result in results for ranks, n in result.bytes_reduced.items()},
        profiles=Profiles([result.profile for result in results]) if results[0].profile else None,
        _outputs={m: tree for result in results for m, tree in result.outputs.items()},
    )


def middle(runs: Sequence[Run]) -> Run:
    """The run with the median makespan (the lower one of an even number), with all makespans noted."""
    makespans = tuple(run.trace.makespan_ms for run in runs)
    chosen = min(runs, key=lambda run: abs(run.trace.makespan_ms - median(makespans)))
    return replace(chosen, makespans_ms=makespans)

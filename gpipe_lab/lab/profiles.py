"""The profiles of a run, one of torch's profiler for each rank."""

from __future__ import annotations

import json
import tempfile
from collections.abc import Sequence
from functools import cached_property
from pathlib import Path
from typing import Any

from ..plan.errors import require


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

"""torch's own schedules, to be read beside this lab's."""

from __future__ import annotations

import csv
import io
from functools import lru_cache
from typing import Any

from ..plan.errors import require


@lru_cache(maxsize=64)
def torch_listing(name: str, num_ranks: int, num_microbatches: int, num_chunks: int = 1) -> str:
    """torch's own listing of one of its schedules, as the CSV that torch would write; no process is needed.

    name: as `get_schedule_class` takes it, such as "GPipe", "1F1B" or "Interleaved1F1B". The listing of
    GPipe and 1F1B is what torch draws; its loop for these two is written apart.
    """
    from torch.distributed.pipelining.schedules import PipelineScheduleMulti, get_schedule_class

    make = get_schedule_class(name)
    several = issubclass(make, PipelineScheduleMulti)
    require(
        several or num_chunks == 1,
        "this schedule has one stage a rank",
        got=f"num_chunks={num_chunks}",
        where=f"torch_listing({name!r})",
        remedy="num_chunks=1",
    )
    stages = [_stage(index, num_ranks * num_chunks, num_ranks) for index in range(num_chunks)]
    if several:
        order = make(stages, num_microbatches).pipeline_order
    else:
        order = make(stages[0], num_microbatches)._get_pipeline_order()
    text = io.StringIO()
    csv.writer(text).writerows(order[rank] for rank in sorted(order))
    return text.getvalue()


def _stage(index: int, num_stages: int, num_ranks: int) -> Any:
    """What torch's schedules ask of a stage before they run: numbers."""
    import torch
    from torch.distributed.pipelining.stage import _PipelineStageBase

    class Stage(_PipelineStageBase):
        def __init__(self) -> None:
            self.stage_index, self.num_stages = index, num_stages
            self.group_size, self.group_rank, self.group = num_ranks, 0, None
            self.submod = torch.nn.Identity()

        def _not_run(self, *args: Any) -> Any:
            raise NotImplementedError("this stage is for listing a schedule")

        _create_grad_recv_info = _not_run  # type: ignore[assignment]
        _prepare_forward_infra = _not_run  # type: ignore[assignment]
        _prepare_backward_infra = _not_run  # type: ignore[assignment]

    return Stage()

"""What every measured trace and ledger must satisfy, whatever the schedule."""

from itertools import pairwise

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpipe_lab as gl
from gpipe_lab.plan.ops import COMPUTE, RECEIVES, SENDS, peer

SCHEDULES = {
    "naive": gl.naive,
    "gpipe": gl.gpipe,
    "1f1b": gl.one_f_one_b,
    "interleaved": gl.interleaved,
    "zb-h1": gl.zero_bubble_h1,
    "zb-v": gl.zero_bubble_v,
}
ROWS, WIDTH = 14, 6


def run(lab, schedule, **options):
    model = nn.Sequential(*[nn.Linear(WIDTH, WIDTH) for _ in range(6)])
    x, y = torch.randn(ROWS, WIDTH), torch.randn(ROWS, WIDTH)
    return lab.run(schedule, model, x, y, loss_fn=F.mse_loss, **options)


def lane(events, rank, name):
    return sorted((e for e in events if e.rank == rank and e.lane == name), key=lambda e: e.start_ms)


@pytest.mark.parametrize(
    "pace", [None, gl.Pace(forward_ms=2, backward_ms=3, link_ms=1)], ids=["full", "paced"]
)
@pytest.mark.parametrize("name", SCHEDULES)
def test_a_measured_trace_is_one_that_could_have_happened(lab_of, name, pace):
    done = run(lab_of(3), SCHEDULES[name](3, 6), pace=pace)
    events, schedule = done.trace.events, done.trace.schedule
    transfers = {e.op: e for e in events if e.lane == "comm"}
    for rank in range(3):
        computed = lane(events, rank, "compute")
        assert [e.op for e in computed] == [op for op in schedule.ops[rank] if op.kind in COMPUTE]
        waited = lane(events, rank, "wait")
        for earlier, later in pairwise(sorted(computed + waited, key=lambda e: e.start_ms)):
            assert later.start_ms >= earlier.end_ms - 1e-6, "a rank does one thing at a time"
        received = {e.op for e in lane(events, rank, "comm") if e.op.kind in RECEIVES}
        assert {e.op for e in waited} == received, "each message is waited for once"
        times = [row.time_ms for row in done.memory.rows if row.rank == rank]
        assert times == sorted(times)
    assert all(e.end_ms >= e.start_ms for e in events)
    sends = [op for op in transfers if op.kind in SENDS]
    assert sends and len(transfers) == 2 * len(sends)
    for op in sends:
        assert transfers[op].start_ms <= transfers[peer(op)].end_ms


def test_messages_count_at_both_ends(lab_of):
    """A linear layer saves its input alone, so an output that is under way is held for its message."""
    done = run(lab_of(2), gl.gpipe(2, 7))
    message = ROWS // 7 * WIDTH * 4
    for rank, category in [(0, "outputs"), (1, "communication"), (0, "communication")]:
        held = done.memory.peak_bytes(rank, category)
        assert held >= message and held % message == 0, (rank, category)

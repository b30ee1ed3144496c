"""torch's own ways to share a model: right gradients, bytes as the formulas say, and what a rank holds."""

import csv
import math
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

import gpipe_lab as gl
from gpipe_lab.course.bytes_by_method import FORMULAS, boundary_bytes, measure, parameter_bytes
from gpipe_lab.course.collectives import Collective, CountCollectives, ring_bytes, wire_bytes_sent
from gpipe_lab.course.methods import step_of_method

RECORD = Path(__file__).parents[2] / "data/runs/bytes_by_method.csv"


@pytest.fixture(scope="module")
def steps(lab_of):
    """method -> the four ranks' reports, in float64."""
    torch.set_default_dtype(torch.float64)
    try:
        batch = gl.tiny_batch(8)
        return {
            method: lab_of(4).launch(step_of_method, method, gl.tiny_gpt(), *batch, gl.next_token_loss)
            for method in ("one device", *FORMULAS)
        }
    finally:
        torch.set_default_dtype(torch.float32)


@pytest.mark.parametrize("method", FORMULAS)
def test_equal_to_one_device(steps, method):
    (alone, *_), (shared, *_) = steps["one device"], steps[method]
    assert shared.loss == pytest.approx(alone.loss, rel=1e-12)
    assert shared.gradients.keys() == alone.gradients.keys()
    square = sum(((shared.gradients[n] - g) ** 2).sum().item() for n, g in alone.gradients.items())
    whole = sum((g**2).sum().item() for g in alone.gradients.values())
    assert math.sqrt(square / whole) <= 1e-12


def test_what_a_rank_holds(steps):
    one, data, sharded, tensor = (steps[m][1].held for m in ("one device", *FORMULAS))
    assert one["parameters"] == data["parameters"] == 2 * parameter_bytes()
    for category in ("parameters", "gradients"):
        assert 4 * sharded[category] == one[category]
        assert one[category] / 4 < tensor[category] < one[category] / 2  # embedding, head and norms are whole
    assert sharded["saved"] == data["saved"]  # sharding leaves activations whole
    assert one["saved"] / 4 < tensor["saved"] < one["saved"]


def test_activations_of_a_share_of_the_rows_are_those_of_one_device(lab_of):
    batch = gl.tiny_batch(8)
    two_rows = [t[:2] for t in batch]
    lab = lab_of(4)
    alone = lab.launch(step_of_method, "one device", gl.tiny_gpt(), *two_rows, gl.next_token_loss)
    shared = lab.launch(step_of_method, "fully sharded", gl.tiny_gpt(), *batch, gl.next_token_loss)
    assert {step.held["saved"] for step in alone} == {step.held["saved"] for step in shared}


def test_bytes_of_a_step(lab_of):
    found = {row.method: row for row in measure(lab_of(4))}
    assert found["data parallel"].calls == "1 all_reduce"
    assert found["fully sharded"].calls == "16 all_gather, 8 reduce_scatter"
    assert found["tensor parallel"].calls == "24 all_reduce"
    for row in found.values():
        assert row.counted == row.predicted
    assert found["pipeline"].predicted == 2 * boundary_bytes(8)
    recorded = csv.DictReader(RECORD.read_text(encoding="utf-8").splitlines()[1:])
    counts = {line["method"]: (line["calls"], float(line["counted"])) for line in recorded}
    assert counts == {name: (row.calls, row.counted) for name, row in found.items()}, "measure it anew"
    # On the wire there are headers as well, and gloo's reduce-scatter is an all-reduce.
    gloo = dict.fromkeys(found, 1.0) | {"fully sharded": 4 / 3}
    for name, row in found.items():
        if row.wire is not None:
            assert 1 < row.wire / (gloo[name] * row.counted) < 1.06


def test_rows_that_ranks_cannot_share_are_refused(lab_of):
    with pytest.raises(gl.RankFailed, match="ranks that share the rows get equally many"):
        lab_of(4).launch(
            step_of_method, "data parallel", gl.tiny_gpt(), *gl.tiny_batch(7), gl.next_token_loss
        )


def every_collective(context):
    import torch.distributed._functional_collectives as functional

    n = context.num_ranks
    whole, part = torch.ones(8 * n), torch.ones(8)
    with CountCollectives() as counted:
        dist.all_reduce(whole.clone())
        dist.all_gather([torch.empty(8) for _ in range(n)], part)
        dist.reduce_scatter(part.clone(), list(whole.chunk(n)))
        dist.broadcast(whole.clone(), 0)
        functional.all_reduce(whole, "sum", dist.group.WORLD).sum().item()
        functional.all_gather_tensor(part, 0, dist.group.WORLD).sum().item()
        functional.reduce_scatter_tensor(whole, "sum", 0, dist.group.WORLD).sum().item()
    return counted.calls


def test_calls_are_counted_by_the_bytes_of_the_whole(lab_of):
    kinds = ["all_reduce", "all_gather", "reduce_scatter", "broadcast", *["all_reduce", "all_gather"]]
    expected = [Collective(kind, 4 * 8 * 4) for kind in [*kinds, "reduce_scatter"]]
    assert lab_of(4).launch(every_collective) == [expected] * 4
    with pytest.raises(gl.InputError, match="broadcast"):
        ring_bytes(expected, 4)


def uncounted(context):
    with CountCollectives():
        dist.all_to_all_single(torch.empty(4), torch.ones(4))


def test_an_unknown_collective_is_not_passed_over(lab_of):
    with pytest.raises(gl.RankFailed, match="not counted yet"):
        lab_of(4).launch(uncounted)


def wire_of_an_all_reduce(context):
    tensor = torch.ones(250_000)
    dist.all_reduce(tensor[:1])  # connects
    dist.barrier()
    before = wire_bytes_sent()
    dist.all_reduce(tensor)
    dist.barrier()
    after = wire_bytes_sent()
    return None if before is None or after is None else after - before


def test_the_kernel_counts_what_a_ring_sends(lab_of):
    found = lab_of(4).launch(wire_of_an_all_reduce)
    if None in found:
        pytest.skip("this kernel does not tell the bytes of a connection")
    assert all(1 <= num_bytes / (2 * 3 / 4 * 1_000_000) < 1.01 for num_bytes in found)

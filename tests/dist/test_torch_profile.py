"""run(..., profile=True): torch's own profile of every rank, every operation named, nothing left behind."""

from __future__ import annotations

import functools
import gc
import json
import tempfile
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn

import gpipe_lab as gl
from gpipe_lab.engine.profile import label
from gpipe_lab.plan.errors import InputError

SGD = functools.partial(torch.optim.SGD, lr=0.1)


def model():
    torch.manual_seed(0)
    return nn.Sequential(*[nn.Linear(6, 6) for _ in range(4)])


def batch():
    generator = torch.Generator().manual_seed(1)
    return [torch.randn(6, 6, generator=generator) for _ in range(2)]


def leftovers() -> set[Path]:
    return set(Path(tempfile.gettempdir()).glob("gpipe_lab-profiles-*"))


def labels_in(profile: dict) -> list[str]:
    names = [(e["ts"], e["name"]) for e in profile["traceEvents"] if e.get("cat") == "user_annotation"]
    return [name for _, name in sorted(names) if " stage " in name]


@pytest.mark.parametrize("pace", [None, gl.Pace(forward_ms=5, backward_ms=10)], ids=["as it is", "paced"])
@pytest.mark.parametrize(("make", "checkpoint"), [(gl.gpipe, "always"), (gl.one_f_one_b, "never")])
def test_every_rank_has_its_operations_by_name(lab_of, make, checkpoint, pace):
    options = {"checkpoint": checkpoint, "pace": pace, "repeats": 2, "profile": True}
    run = lab_of(2).run(make(2, 3), model(), *batch(), loss_fn=F.mse_loss, **options)
    assert run.profiles.num_ranks == 2
    computed = {rank: [] for rank in range(2)}
    for event in run.trace.computations:
        computed[event.rank].append(label(event.op))
    for rank in range(2):
        profile = run.profiles.load(rank)
        found = labels_in(profile)
        assert [name for name in found if name[:4] not in ("SEND", "RECV")] == computed[rank]
        assert sum(name.startswith(("SEND", "RECV")) for name in found) == 6
        assert any(e["name"] == "aten::addmm" for e in profile["traceEvents"])


def test_operators_lie_within_the_operation_that_runs_them(lab_of):
    events = lab_of(2).run(gl.gpipe(2, 2), model(), *batch(), loss_fn=F.mse_loss, profile=True)
    for rank in range(2):
        found = events.profiles.load(rank)["traceEvents"]
        forwards = [e for e in found if e["name"].startswith("F stage") and e["cat"] == "user_annotation"]
        products = [e for e in found if e["name"] == "aten::addmm"]
        assert len(products) == 2 * len(forwards) == 4  # two layers a stage, two micro-batches
        for product in products:
            assert any(f["ts"] <= product["ts"] <= f["ts"] + f["dur"] for f in forwards)


def test_a_step_of_a_pipeline_is_profiled_and_unchanged(lab_of):
    profiled, plain = (lab_of(2).pipeline(model(), loss_fn=F.mse_loss, optimizer=SGD) for _ in range(2))
    run = profiled.step(gl.gpipe(2, 2), *batch(), profile=True)
    assert plain.step(gl.gpipe(2, 2), *batch()).profiles is None
    assert any("Optimizer.step" in e["name"] for e in run.profiles.load(1)["traceEvents"])
    states = profiled.state_dict(), plain.state_dict()
    assert all(torch.equal(states[0][name], states[1][name]) for name in states[0])


def test_files_last_as_long_as_the_profiles_and_can_be_kept(lab_of, tmp_path):
    before = leftovers()
    run = lab_of(2).run(gl.gpipe(2, 2), model(), *batch(), loss_fn=F.mse_loss, profile=True)
    assert leftovers() == before  # nothing is written until it is asked for
    paths = run.profiles.paths
    assert paths == run.profiles.paths
    assert [json.loads(path.read_text()) for path in paths] == [run.profiles.load(rank) for rank in range(2)]
    kept = run.profiles.save(tmp_path / "kept")
    assert [path.name for path in kept] == ["rank_0.json", "rank_1.json"]
    del run
    gc.collect()
    assert leftovers() == before
    assert all(path.exists() for path in kept)


def test_workers_leave_no_file(lab_of):
    lab = lab_of(2)

    def scratch(context):
        return sorted(path.name for path in Path(context.scratch).iterdir())

    before = lab.launch(scratch)
    lab.run(gl.gpipe(2, 2), model(), *batch(), loss_fn=F.mse_loss, profile=True)
    assert [[n for n in names if "profile" in n or n.startswith("tmp")] for names in lab.launch(scratch)] == [
        [n for n in names if "profile" in n or n.startswith("tmp")] for names in before
    ]


def test_a_run_without_a_profile_names_nothing(lab_of):
    run = lab_of(2).run(gl.gpipe(2, 2), model(), *batch(), loss_fn=F.mse_loss)
    assert run.profiles is None


def test_a_rank_that_is_not_there_is_refused(lab_of):
    run = lab_of(2).run(gl.gpipe(2, 2), model(), *batch(), loss_fn=F.mse_loss, profile=True)
    with pytest.raises(InputError, match="0 to 1"):
        run.profiles.load(2)
    assert "2 ranks" in repr(run.profiles)

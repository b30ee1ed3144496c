"""Exercise 03-gpipe-step on real ranks: what is right passes, each fault is named, a hang is stopped."""

import linecache
import re
import time
from functools import partial

import pytest
import torch

from gpipe_lab import check
from gpipe_lab.course.exercise import source_of
from gpipe_lab.course.exercises import all_exercises, step_on_ranks
from gpipe_lab.course.exercises.ch03_step import GPIPE_STEP, variant
from gpipe_lab.course.exercises.step_on_ranks import WIDTH, build_batch, build_stage, reference
from gpipe_lab.lab.lab import Lab
from tests.mutants import MUTANTS

pytestmark = pytest.mark.dist

ENDS = "the step comes to its end on every rank"
ALL_PARAMETERS = "every parameter of every stage gets a gradient"
OWN_INPUT = "what goes back for a micro-batch is its own input's gradient"
RIGHT_SIZE = "the gradients are as large as those of one whole batch"
ONE_PROCESS = "each row counts alike"

# Mutant -> the property it must fail, and where.
NAMED = {
    "inputs not kept": (OWN_INPUT, "P=2, rows=8, M=4"),
    "no requires_grad on what was received": (ENDS, "P=2, rows=2, M=1"),
    "no parameter gradients on the last stage": (ALL_PARAMETERS, "P=2, rows=2, M=1"),
    "loss unscaled": (RIGHT_SIZE, "P=2, rows=8, M=4"),
    "loss/M, whatever the sizes": (ONE_PROCESS, "P=2, rows=10, M=4"),
    "both ends of a link receive": (ENDS, "P=2, rows=2, M=1"),
}
HANGS = "both ends of a link receive"

# The starter's faults in the order in which the check finds them: property, place, and the learner's remedy.
REMEDIES = [
    (ENDS, "M=1", [("dist.recv(x, rank - 1)", "dist.recv(x, rank - 1)\n            x.requires_grad_()")]),
    (
        ENDS,
        "M=4",
        [
            ("outputs, total = [], 0.0", "kept, outputs, total = [], [], 0.0"),
            ("outputs.append(stage(x))", "kept.append(x)\n        outputs.append(stage(x))"),
            ("torch.autograd.grad(loss, x)", "torch.autograd.grad(loss, kept[m])"),
            ("gradient = x.grad", "gradient = kept[m].grad"),
        ],
    ),
    (
        ALL_PARAMETERS,
        "M=1",
        [
            (
                "(gradient,) = torch.autograd.grad(loss, kept[m])",
                "loss.backward()\n            gradient = kept[m].grad",
            )
        ],
    ),
    (RIGHT_SIZE, "M=4", [("targets[m])", "targets[m]) * shapes[m][0] / sum(shape[0] for shape in shapes)")]),
]


@pytest.fixture(autouse=True)
def shorter_limit(monkeypatch):
    monkeypatch.setattr(step_on_ranks, "LIMIT_S", 3.0)


def pasted(source, name="gpipe_step"):
    """The function as a cell defines it: its source is known, but it cannot be imported."""
    file = f"<cell {hash(source)}>"
    linecache.cache[file] = (len(source), None, source.splitlines(keepends=True), file)
    namespace = {"__name__": "__main__"}
    exec(compile(source, file, "exec"), namespace)
    return namespace[name]


def test_it_is_registered():
    assert all_exercises()["03-gpipe-step"] is GPIPE_STEP
    assert list(NAMED) == list(MUTANTS["03-gpipe-step"])


@pytest.mark.parametrize(
    "answer",
    [
        GPIPE_STEP.solution,
        pasted(GPIPE_STEP.solution_source),
        variant,
        partial(variant, order=iter),  # first in, first out
    ],
    ids=["solution", "pasted", "variant", "fifo"],
)
def test_what_is_right_passes(answer):
    result = check("03-gpipe-step", answer)
    assert result, repr(result)


def test_messages_that_are_not_waited_for_pass():
    source = GPIPE_STEP.solution_source
    for sent in ("outputs[m].detach(), rank + 1", "kept[m].grad, rank - 1"):
        source = source.replace(f"dist.send({sent})", f"held.append(dist.isend({sent}))")
    source = source.replace("kept, outputs,", "held = []\n    kept, outputs,")
    source = source.replace("    return total", "    [work.wait() for work in held]\n    return total")
    assert source.count("isend") == 2
    assert check("03-gpipe-step", pasted(source))


@pytest.mark.parametrize("mutant", [m for m in NAMED if m != HANGS])
def test_a_fault_fails_at_its_property(mutant):
    result = check("03-gpipe-step", MUTANTS["03-gpipe-step"][mutant])
    assert result.status == "failed"
    claim, place = NAMED[mutant]
    assert result.counterexample.claim.startswith(claim), repr(result)
    assert result.counterexample.given == place


def test_a_hang_is_stopped_and_its_place_named():
    began = time.monotonic()
    result = check("03-gpipe-step", MUTANTS["03-gpipe-step"][HANGS])
    assert time.monotonic() - began < 15
    assert result.counterexample.claim.startswith(NAMED[HANGS][0])
    assert result.counterexample.given == NAMED[HANGS][1]
    assert "none after 3 s" in repr(result)
    for rank in (0, 1):
        assert re.search(rf"rank {rank} waits at line \d+: dist.recv\(torch.empty\(1\)", repr(result))
    assert check("03-gpipe-step", GPIPE_STEP.solution)  # and nothing is left behind


def test_the_starter_is_not_done_and_is_mended_fault_by_fault():
    source = source_of(GPIPE_STEP.starter)
    for number, (claim, place, edits) in enumerate(REMEDIES):
        result = check("03-gpipe-step", pasted(source))
        assert result.status == ("not done yet" if number == 0 else "failed")
        assert result.counterexample.claim.startswith(claim), repr(result)
        assert place in result.counterexample.given
        for wrong, right in edits:
            assert source.count(wrong) == 1
            source = source.replace(wrong, right)
    assert check("03-gpipe-step", pasted(source))


def test_an_unwritten_answer_is_not_done():
    def unwritten(*args):
        raise NotImplementedError

    assert check("03-gpipe-step", unwritten).status == "not done yet"


def test_a_loss_that_is_not_returned_is_said():
    source = GPIPE_STEP.solution_source.replace("    return total", "    return None")
    result = check("03-gpipe-step", pasted(source))
    assert result.status == "failed"
    assert "returned on the last rank, the batch's loss" in repr(result)


@pytest.mark.parametrize("num_stages", [2, 3])
def test_the_reference_is_plain_torch(num_stages):
    loss, gradients = reference(num_stages, rows=10)
    assert torch.get_default_dtype() is torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        model = torch.nn.Sequential(*map(build_stage, range(num_stages)))
        (x,), (target,) = build_batch(10, 1)
        expected = torch.nn.functional.mse_loss(model(x), target)
        expected.backward()
    finally:
        torch.set_default_dtype(torch.float32)
    assert x.shape == (10, WIDTH)
    assert loss == expected.item()
    for stage, layer in enumerate(model):
        for name, parameter in layer.named_parameters():
            assert torch.equal(gradients[stage][name], parameter.grad)


def test_a_program_that_hangs_is_stopped_by_its_time_limit():
    def wait_for_each_other(context):
        import torch.distributed as dist

        dist.recv(torch.empty(1), 1 - context.rank)

    with Lab(2, device="cpu") as lab:
        with pytest.raises(TimeoutError, match="rank 0, rank 1; the next call starts on fresh workers"):
            lab.launch(wait_for_each_other, timeout=0.5)
        assert lab.launch(lambda context: context.rank, timeout=30) == [0, 1]

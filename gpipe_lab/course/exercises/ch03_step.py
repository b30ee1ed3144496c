"""Chapter 03, by hand: one GPipe step with plain torch.distributed, graded on real ranks.

torch is imported only by what runs, so that the list of exercises stays light.
"""

from __future__ import annotations

from typing import Any

from ..exercise import Answer, Case, Exercise, Mismatch, over_cases
from .step_on_ranks import outcome, reference

TOLERANCE = 1e-12


def gpipe_step(context, stage, inputs, targets, shapes, loss_fn):
    """One batch through all ranks; then every parameter's .grad is that of the whole batch's loss.

    inputs[m] is micro-batch m, on rank 0 (None elsewhere); targets[m] its targets, on the last rank.
    shapes[m] is its shape between any two stages, rows first. loss_fn(output, target) is a mean over rows.
    Returns the loss of the whole batch, on the last rank.
    """
    import torch
    import torch.distributed as dist

    rank = context.rank
    is_first, is_last = rank == 0, rank == context.num_ranks - 1
    outputs, total = [], 0.0
    for m, shape in enumerate(shapes):
        if is_first:
            x = inputs[m]
        else:
            x = torch.empty(shape)
            dist.recv(x, rank - 1)
        outputs.append(stage(x))
        if not is_last:
            dist.send(outputs[m].detach(), rank + 1)
    for m in reversed(range(len(shapes))):
        if is_last:
            loss = loss_fn(outputs[m], targets[m])
            total += loss.item()
            (gradient,) = torch.autograd.grad(loss, x)
        else:
            arrived = torch.empty(shapes[m])
            dist.recv(arrived, rank + 1)
            outputs[m].backward(arrived)
            gradient = x.grad
        if not is_first:
            dist.send(gradient, rank - 1)
    return total


def solution(context, stage, inputs, targets, shapes, loss_fn):
    import torch
    import torch.distributed as dist

    rank = context.rank
    is_first, is_last = rank == 0, rank == context.num_ranks - 1
    num_rows = sum(shape[0] for shape in shapes)
    kept, outputs, total = [], [], 0.0
    for m, shape in enumerate(shapes):
        if is_first:
            x = inputs[m]
        else:
            x = torch.empty(shape)
            dist.recv(x, rank - 1)
            x.requires_grad_()  # what arrives starts a graph of its own, and its gradient must go back
        kept.append(x)  # every micro-batch's input, until its own backward
        outputs.append(stage(x))
        if not is_last:
            dist.send(outputs[m].detach(), rank + 1)
    for m in reversed(range(len(shapes))):
        if is_last:
            loss = loss_fn(outputs[m], targets[m]) * (shapes[m][0] / num_rows)  # loss/M where sizes are equal
            total += loss.item()
            loss.backward()  # parameters and input both get their gradient
        else:
            arrived = torch.empty(shapes[m])
            dist.recv(arrived, rank + 1)
            outputs[m].backward(arrived)
        if not is_first:
            dist.send(kept[m].grad, rank - 1)
        kept[m] = outputs[m] = None  # nothing of this micro-batch is needed any more
    return total


def variant(
    context,
    stage,
    inputs,
    targets,
    shapes,
    loss_fn,
    *,
    keep=True,
    grad=True,
    weights=True,
    scale="rows",
    order=reversed,
    hang=False,
):
    """The solution with one thing done differently: the faults, and what is right in another way."""
    import torch
    import torch.distributed as dist

    rank, last = context.rank, context.num_ranks - 1
    num_rows = sum(shape[0] for shape in shapes)
    kept, outputs, total = [], [], 0.0
    if hang:
        dist.recv(torch.empty(1), 1 if rank == 0 else rank - 1)
    for m, shape in enumerate(shapes):
        x = inputs[m] if rank == 0 else torch.empty(shape)
        if rank > 0:
            dist.recv(x, rank - 1)
            x.requires_grad_(grad)
        kept.append(x)
        outputs.append(stage(x))
        if rank < last:
            dist.send(outputs[m].detach(), rank + 1)
    for m in order(range(len(shapes))):
        x = kept[m] if keep else kept[-1]
        if rank == last:
            share = {"rows": shapes[m][0] / num_rows, "mean": 1 / len(shapes), None: 1.0}[scale]
            loss = loss_fn(outputs[m], targets[m]) * share
            total += loss.item()
            if weights:
                loss.backward()
            else:
                x.grad = torch.autograd.grad(loss, x)[0]
        else:
            arrived = torch.empty(shapes[m])
            dist.recv(arrived, rank + 1)
            outputs[m].backward(arrived)
        if rank > 0:
            dist.send(x.grad, rank - 1)
    return total


def _flat(gradients: dict[str, Any]) -> Any:
    import torch

    return torch.cat([g.flatten() for g in gradients.values()])


def _cases(*batches: tuple[int, int]) -> tuple[Case, ...]:
    return tuple({"P": P, "rows": rows, "M": M} for rows, M in batches for P in (2, 3))


ONE, EVEN, UNEVEN = (2, 1), (8, 4), (10, 4)  # (rows, M)


@over_cases(*_cases(ONE, EVEN, UNEVEN))
def it_ends(answer: Answer, P: int, rows: int, M: int) -> Mismatch | None:
    """the step comes to its end on every rank"""
    return outcome(answer, P, rows, M).failure


@over_cases(*_cases(ONE, EVEN, UNEVEN))
def every_parameter(answer: Answer, P: int, rows: int, M: int) -> Mismatch | None:
    """every parameter of every stage gets a gradient"""
    found = outcome(answer, P, rows, M)
    if found.failure is not None:
        return found.failure
    for rank, gradients in enumerate(found.gradients):
        missing = [name for name, g in gradients.items() if g is None]
        if missing:
            where = f"{' and '.join(missing)} of stage {rank}" + (", the last" if rank == P - 1 else "")
            return Mismatch("a gradient in each parameter's .grad", f"None in {where}")
    return None


@over_cases(*_cases(ONE, EVEN))
def own_input(answer: Answer, P: int, rows: int, M: int) -> Mismatch | None:
    """what goes back for a micro-batch is its own input's gradient: all gradients point the right way"""
    found = outcome(answer, P, rows, M)
    if found.failure is not None:
        return found.failure
    _, expected = reference(P, rows)
    for rank in reversed(range(P)):
        got, right = _flat(found.gradients[rank]), _flat(expected[rank])
        cosine = (got @ right / (got.norm() * right.norm())).item()
        if not abs(cosine - 1) < 1e-9:
            return Mismatch(
                f"stage {rank}: the direction that one process finds (cosine 1)", f"cosine {cosine:.4f}"
            )
    return None


@over_cases(*_cases(EVEN))
def right_size(answer: Answer, P: int, rows: int, M: int) -> Mismatch | None:
    """the gradients are as large as those of one whole batch, however many micro-batches there are"""
    found = outcome(answer, P, rows, M)
    if found.failure is not None:
        return found.failure
    _, expected = reference(P, rows)
    for rank in range(P):
        ratio = (_flat(found.gradients[rank]).norm() / _flat(expected[rank]).norm()).item()
        if not abs(ratio - 1) < 1e-9:
            return Mismatch(f"stage {rank}: 1 × one process's", f"{ratio:.4g} × one process's")
    return None


@over_cases(*_cases(EVEN, UNEVEN))
def equal_to_one_process(answer: Answer, P: int, rows: int, M: int) -> Mismatch | None:
    """each row counts alike, also where M does not divide the batch: loss and gradients are one process's"""
    from ...engine.batch import microbatch_sizes

    found = outcome(answer, P, rows, M)
    if found.failure is not None:
        return found.failure
    loss, expected = reference(P, rows)
    sizes = ", ".join(map(str, microbatch_sizes(rows, M)))
    for rank in range(P):
        got, right = _flat(found.gradients[rank]), _flat(expected[rank])
        error = ((got - right).norm() / right.norm()).item()
        if not error <= TOLERANCE:
            return Mismatch(
                f"stage {rank}: ‖g − g₁‖ ≤ {TOLERANCE:g}·‖g₁‖, g₁ from one process",
                f"{error:.3g}·‖g₁‖",
                f"micro-batches of {sizes} rows",
            )
    returned = found.losses[-1]
    if returned is None or not abs(returned - loss) <= TOLERANCE * loss:
        got = "None; is a `return` missing?" if returned is None else returned
        return Mismatch(f"{loss:.6f} returned on the last rank, the batch's loss", got)
    return None


GPIPE_STEP = Exercise(
    name="03-gpipe-step",
    statement=(
        "Mend gpipe_step: one GPipe step with plain send and receive. As given it is plausible and has four "
        "faults. It is run on 2 and 3 real ranks and compared with one process."
    ),
    starter=gpipe_step,
    solution=solution,
    properties=(it_ends, every_parameter, own_input, right_size, equal_to_one_process),
    hints=(
        "Begin with what the check says. On a receiving rank, where does autograd's graph start, and does "
        "it know that you want a gradient there?",
        "x is one name for M inputs: after the forwards only the last is left. Keep all of them. And "
        "torch.autograd.grad hands back what you ask for, and leaves every .grad as it was.",
        "kept.append(x.requires_grad_()) on every rank but the first; loss.backward() on the last one, then "
        "kept[m].grad goes back; the loss of micro-batch m times its rows / all rows, before its backward.",
    ),
    on_ranks=True,
)

EXERCISES = (GPIPE_STEP,)

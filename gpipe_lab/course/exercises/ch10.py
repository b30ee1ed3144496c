"""Chapter 10, pipeline × data: who talks with whom, and what the replicas cost the pipeline."""

from __future__ import annotations

import math

from ...plan.schedules import gpipe
from ...plan.simulate import simulate
from ...planner import mesh
from ..exercise import Answer, Exercise, Mismatch, over, over_cases

KINDS = ("data", "pipeline", "tensor")


def groups(D, P, T):
    """The groups of D·P·T ranks: {"data": [...], "pipeline": [...], "tensor": [...]}, each a list of lists.

    D replicas of P stages, each stage shared by T ranks. Tensor groups are neighbours; then come the stages.
    """
    raise NotImplementedError("which ranks differ in one coordinate only?")
    return {"data": [], "pipeline": [], "tensor": []}


def solution(D, P, T):
    def rank(d, p, t):
        return (d * P + p) * T + t

    return {
        "data": [[rank(d, p, t) for d in range(D)] for p in range(P) for t in range(T)],
        "pipeline": [[rank(d, p, t) for p in range(P)] for d in range(D) for t in range(T)],
        "tensor": [[rank(d, p, t) for t in range(T)] for d in range(D) for p in range(P)],
    }


def _sizes(D: int, P: int, T: int) -> dict[str, int]:
    return {"data": D, "pipeline": P, "tensor": T}


@over(D=(2, 1, 3), P=(2, 1, 4), T=(2, 1, 3))
def once_in_each_kind(answer: Answer, D: int, P: int, T: int) -> Mismatch | None:
    """every rank is in exactly one group of each kind, and all groups of a kind have its size"""
    got = answer(D, P, T)
    for kind, size in _sizes(D, P, T).items():
        members = sorted(rank for group in got[kind] for rank in group)
        if members != list(range(D * P * T)):
            return Mismatch(f"{kind}: every rank of 0 … {D * P * T - 1} once", f"{kind}: {got[kind]}")
        if {len(group) for group in got[kind]} != {size}:
            return Mismatch(f"{kind}: groups of {size}", f"{kind}: {got[kind]}")
    return None


@over(D=(2, 1, 3), P=(2, 1, 4), T=(2, 1, 3))
def meet_once(answer: Answer, D: int, P: int, T: int) -> Mismatch | None:
    """two groups of different kinds share at most one rank"""
    got = answer(D, P, T)
    for first, second in (("data", "pipeline"), ("data", "tensor"), ("pipeline", "tensor")):
        for one in got[first]:
            for other in got[second]:
                if len(set(one) & set(other)) > 1:
                    return Mismatch("one common rank or none", f"{first} {one} and {second} {other}")
    return None


@over(D=(2, 1, 3), P=(2, 1, 4), T=(2, 1, 3))
def copies_are_added(answer: Answer, D: int, P: int, T: int) -> Mismatch | None:
    """a data group's ranks hold copies of the same part of the same stage, one of each replica"""
    got = {tuple(sorted(group)) for group in answer(D, P, T)["data"]}
    expected = set(mesh.groups(D, P, T)["data"])
    return None if got == expected else Mismatch(sorted(expected), sorted(got))


@over_cases({"D": 2, "P": 2, "T": 2}, {"D": 2, "P": 4, "T": 8}, {"D": 3, "P": 2, "T": 4})
def tensor_within_a_node(answer: Answer, D: int, P: int, T: int) -> Mismatch | None:
    """a tensor group's ranks are neighbours, so that no group crosses a node of T ranks"""
    for group in answer(D, P, T)["tensor"]:
        if sorted(group) != list(range(min(group), min(group) + T)) or min(group) % T:
            return Mismatch("ranks kT … kT+T−1", f"{group}")
    return None


@over(D=(2, 1, 3), P=(2, 1, 4), T=(2, 1))
def pipelines_in_order(answer: Answer, D: int, P: int, T: int) -> Mismatch | None:
    """a pipeline group lists its stages in order, and a replica's ranks follow one another"""
    got = {tuple(group) for group in answer(D, P, T)["pipeline"]}
    expected = set(mesh.groups(D, P, T)["pipeline"])
    return None if got == expected else Mismatch(sorted(expected), sorted(got))


GROUPS = Exercise(
    name="10-groups",
    statement=(
        "D replicas of a pipeline of P stages, each stage shared by T ranks. Write groups(D, P, T): "
        'a dict with the keys "data", "pipeline" and "tensor", each a list of groups, each a list of ranks. '
        "Every rank is in one group of each kind. Tensor groups are neighbours, since they talk most; the "
        "stages of a replica come next, in order; the replicas are farthest apart."
    ),
    starter=groups,
    solution=solution,
    properties=(once_in_each_kind, meet_once, tensor_within_a_node, pipelines_in_order, copies_are_added),
    hints=(
        "Give every rank three coordinates first: replica d, stage p, part t. Which of them changes fastest?",
        "rank = (d·P + p)·T + t. A group of one kind is what you get when one coordinate runs and two stand.",
        '"tensor": for each d and each p the list over t. The other kinds alike, with another letter.',
    ),
)


def overhead(N, B, m, D):
    """Idle over ideal time of GPipe: N ranks in D replicas, B rows a step in all, m rows a micro-batch."""
    P, M = None, None  # the stages, and the micro-batches, of one replica
    if None in (P, M):
        raise NotImplementedError("fill the first line")
    return (P - 1) / M


def overhead_solution(N, B, m, D):
    P = N // D
    M = B // (m * D)
    return (P - 1) / M


@over(N=(8, 16, 32), B=(64, 128), m=(1, 2, 4), D=(1, 2, 4, 8))
def equals_the_simulation(answer: Answer, N: int, B: int, m: int, D: int) -> Mismatch | None:
    """idle over ideal time is that of one replica's simulated step"""
    trace = simulate(gpipe(N // D, B // (m * D)))
    expected = trace.bubble_fraction / (1 - trace.bubble_fraction)
    got = float(answer(N, B, m, D))
    return None if math.isclose(got, expected, rel_tol=1e-9, abs_tol=1e-12) else Mismatch(expected, got)


OVERHEAD = Exercise(
    name="10-overhead",
    statement=(
        "N ranks make D replicas. A batch of B rows is shared by the replicas and cut into micro-batches of "
        "m rows. Fill one line: the stages P and the micro-batches M of one replica."
    ),
    starter=overhead,
    solution=overhead_solution,
    properties=(equals_the_simulation,),
    hints=(
        "All ranks are used: P stages in each of D replicas.",
        "A replica gets B/D of the rows. How many micro-batches of m rows is that?",
        "P = N // D and M = B // (m * D). Put together, (P − 1)/M is (N − D)·m/B.",
    ),
)

EXERCISES = (GROUPS, OVERHEAD)

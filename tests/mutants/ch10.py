"""Wrong answers to the exercises of chapter 10, which each of them must refuse."""

from __future__ import annotations

from gpipe_lab.course.exercises.ch10 import solution

Groups = dict[str, list[list[int]]]


def replicas_innermost(D: int, P: int, T: int) -> Groups:
    """A right set of groups for another order, in which tensor groups reach across nodes."""
    swapped = solution(T, P, D)
    return {"data": swapped["tensor"], "pipeline": swapped["pipeline"], "tensor": swapped["data"]}


def data_and_pipeline_swapped(D: int, P: int, T: int) -> Groups:
    swapped = solution(P, D, T)
    return {"data": swapped["pipeline"], "pipeline": swapped["data"], "tensor": swapped["tensor"]}


def one_data_group_for_all_stages(D: int, P: int, T: int) -> Groups:
    """Gradients of different stages would be added up."""
    right: Groups = solution(D, P, T)
    return right | {"data": [[rank for group in right["data"] for rank in group]]}


def only_the_first_of_each_stage(D: int, P: int, T: int) -> Groups:
    """Half the ranks are in no group of a pipeline."""
    right: Groups = solution(D, P, T)
    return right | {"pipeline": right["pipeline"][::T]}


def diagonals(D: int, P: int, T: int) -> Groups:
    """Data groups that meet every pipeline once, but at another stage in each replica."""
    right: Groups = solution(D, P, T)
    slanted = [[(d * P + (p + d) % P) * T + t for d in range(D)] for p in range(P) for t in range(T)]
    return right | {"data": slanted}


def stages_upside_down(D: int, P: int, T: int) -> Groups:
    right: Groups = solution(D, P, T)
    return right | {"pipeline": [group[::-1] for group in right["pipeline"]]}


def tensor_parts_in_one_data_group(D: int, P: int, T: int) -> Groups:
    """The ranks of a stage together, whatever part of it they hold."""
    right: Groups = solution(D, P, T)
    by_stage = [[rank for group in right["data"][p * T : (p + 1) * T] for rank in group] for p in range(P)]
    return right | {"data": by_stage}


def whole_batch_in_every_replica(N: int, B: int, m: int, D: int) -> float:
    return (N // D - 1) / (B // m)


def all_ranks_in_one_pipeline(N: int, B: int, m: int, D: int) -> float:
    return (N - 1) / (B // (m * D))


def bubble_fraction(N: int, B: int, m: int, D: int) -> float:
    P, M = N // D, B // (m * D)
    return (P - 1) / (M + P - 1)


def microbatches_of_all_replicas(N: int, B: int, m: int, D: int) -> float:
    return (N // D - 1) / (B * D // m)


MUTANTS = {
    "10-groups": {
        "replicas as neighbours, tensor groups across nodes": replicas_innermost,
        "data and pipeline swapped": data_and_pipeline_swapped,
        "all stages in one data group": one_data_group_for_all_stages,
        "pipelines for the first part of each stage only": only_the_first_of_each_stage,
        "data groups along the diagonal, of different stages": diagonals,
        "stages in reverse": stages_upside_down,
        "all parts of a stage in one data group": tensor_parts_in_one_data_group,
    },
    "10-overhead": {
        "every replica has the whole batch": whole_batch_in_every_replica,
        "one pipeline of all ranks": all_ranks_in_one_pipeline,
        "idle over total, not over ideal": bubble_fraction,
        "M multiplied by the replicas": microbatches_of_all_replicas,
    },
}

"""Wrong answers to the exercises of chapter 01, which each of them must refuse."""

from __future__ import annotations

from gpipe_lab.course.exercise import Answer
from gpipe_lab.course.exercises.ch01 import solution, state_solution


def _wrong(*, data: float = 1, tensor: float = 1, pipeline: float = 1) -> Answer:
    factors = {"data": data, "tensor": tensor, "pipeline": pipeline}

    def answer(method: str, L: int, h: int, T: int, N: int) -> float:
        return factors[method] * solution(method, L, h, T, N)

    return answer


def no_ring(method: str, L: int, h: int, T: int, N: int) -> float:
    """As if every rank sent the whole of what is summed, once."""
    return solution(method, L, h, T, N) / (1 if method == "pipeline" else 2 * (N - 1) / N)


def pipeline_pays_for_every_layer(method: str, L: int, h: int, T: int, N: int) -> float:
    return (L if method == "pipeline" else 1) * solution(method, L, h, T, N)


def replicas_see_all_tokens(method: str, L: int, h: int, T: int, N: int) -> float:
    """As if the sums of gradients grew with the batch."""
    return solution(method, L, h, T, N) * (T / 1024 if method == "data" else 1)


def everything_cut_at_once(num_parameters: int, N: int, stage: int) -> float:
    return num_parameters * 16 / (N if stage else 1)


def parameters_first(num_parameters: int, N: int, stage: int) -> float:
    parameters, gradients, optimizer = (
        (size / N if stage >= k else size) for k, size in ((1, 2), (2, 2), (3, 12))
    )
    return num_parameters * (parameters + gradients + optimizer)


def without_the_optimizer(num_parameters: int, N: int, stage: int) -> float:
    return float(state_solution(num_parameters, N, stage)) - num_parameters * 12 / (N if stage else 1)


def divided_by_the_stage(num_parameters: int, N: int, stage: int) -> float:
    return num_parameters * 16 / (stage + 1)


MUTANTS = {
    "01-bytes-sent": {
        "gradients forgotten on the way up": _wrong(pipeline=0.5),
        "tensor parallel: forward only": _wrong(tensor=0.5),
        "one ring in each block's forward and backward": _wrong(tensor=0.25),
        "four bytes for gradients": _wrong(data=2),
        "an all-reduce sends its size once": no_ring,
        "the pipeline pays for every layer": pipeline_pays_for_every_layer,
        "data parallel grows with the batch": replicas_see_all_tokens,
    },
    "01-state-bytes": {
        "all three cut from stage 1 on": everything_cut_at_once,
        "parameters cut first": parameters_first,
        "the optimizer's state forgotten": without_the_optimizer,
        "divided by the stage": divided_by_the_stage,
    },
}

"""Chapter 00, the laundry: when is the last load done if the machines are not equally fast?"""

from __future__ import annotations

import math

from ...plan.schedules import forward_only
from ...plan.simulate import Costs, simulate
from ..exercise import Answer, Exercise, Mismatch, over


def finish_time(minutes, num_loads):
    """Minutes until the last load leaves the last machine.

    minutes: how long each machine takes for a load, in the order in which a load visits them.
    """
    raise NotImplementedError("your formula here")


def solution(minutes, num_loads):
    # The first load visits every machine. Each later load leaves one slowest machine's time after it.
    return sum(minutes) + (num_loads - 1) * max(minutes)


def every_machine_as_slow_as_the_slowest(minutes: list[float], num_loads: int) -> float:
    return max(minutes) * (num_loads + len(minutes) - 1)


def one_load_too_many(minutes: list[float], num_loads: int) -> float:
    return sum(minutes) + num_loads * max(minutes)


def one_by_one(minutes: list[float], num_loads: int) -> float:
    return num_loads * sum(minutes)


def the_first_machine_sets_the_beat(minutes: list[float], num_loads: int) -> float:
    return sum(minutes) + (num_loads - 1) * minutes[0]


def the_last_machine_sets_the_beat(minutes: list[float], num_loads: int) -> float:
    return sum(minutes) + (num_loads - 1) * minutes[-1]


def the_average_sets_the_beat(minutes: list[float], num_loads: int) -> float:
    return sum(minutes) + (num_loads - 1) * sum(minutes) / len(minutes)


@over(
    minutes=([30, 30, 30], [30], [30, 45, 20], [20, 30, 45], [45, 30, 20], [10, 60, 10, 60], [7.5, 12.5]),
    num_loads=(1, 2, 4, 10),
)
def equals_the_simulation(answer: Answer, minutes: list[float], num_loads: int) -> Mismatch | None:
    """the last load is done when the simulated laundry says so"""
    laundry = simulate(forward_only(len(minutes), num_loads), Costs(forward=list(minutes)))
    got = answer(list(minutes), num_loads)
    if math.isclose(float(got), laundry.makespan_ms, rel_tol=1e-9):
        return None
    return Mismatch(f"{laundry.makespan_ms:g} minutes", f"{got} minutes")


FINISH_TIME = Exercise(
    name="00-finish-time",
    statement=(
        "Machines that are not equally fast: give the time at which the last of `num_loads` loads is done, "
        "from the minutes that each machine takes."
    ),
    starter=finish_time,
    solution=solution,
    properties=(equals_the_simulation,),
    hints=(
        "Follow the first load alone. When is it done?",
        "From then on loads come out at a steady beat. Which machine sets it, wherever it stands?",
        "The first load takes the sum of all minutes; each of the others follows one beat later.",
    ),
    mutants={
        "every machine as slow as the slowest": every_machine_as_slow_as_the_slowest,
        "one load too many": one_load_too_many,
        "one load at a time": one_by_one,
        "the first machine sets the beat": the_first_machine_sets_the_beat,
        "the last machine sets the beat": the_last_machine_sets_the_beat,
        "the average sets the beat": the_average_sets_the_beat,
    },
)

EXERCISES = (FINISH_TIME,)

"""Chapter 00, the laundry: who holds which load, and when is the last done on machines of unequal speed?"""

from __future__ import annotations

import math

from ...plan.schedules import forward_only
from ...plan.simulate import Costs, simulate
from ..exercise import Answer, Exercise, Mismatch, over

# Which machine holds which load.


def load_in(machine, slot, num_loads):
    """The load that a machine holds in a slot, or -1 where it stands idle. All are counted from 0.

    Every machine takes one slot for a load.
    """
    return -1  # change this line


def load_in_solution(machine, slot, num_loads):
    # Load n is in machine k in slot n + k. Before load 0 is the fill, after the last load the drain.
    return slot - machine if 0 <= slot - machine < num_loads else -1


@over(P=range(1, 5), M=range(1, 6))
def fills_the_grid(answer: Answer, P: int, M: int) -> Mismatch | None:
    """asked for every machine and slot, it gives the grid of P machines and M loads"""
    schedule = forward_only(P, M)
    for machine, row in enumerate(schedule.cells()):
        for slot, cell in enumerate(row):
            right = -1 if cell == "." else int(cell[1:])
            got = answer(machine, slot, M)
            if got != right:
                return Mismatch(f"{right} in machine {machine}, slot {slot}", got, schedule.grid())
    return None


LOAD_IN = Exercise(
    name="00-load-in",
    statement=(
        "Change one line: the load that a machine holds in a slot, or -1 where it stands idle. Machines, "
        "slots and loads are counted from 0, and every machine takes one slot for a load."
    ),
    starter=load_in,
    solution=load_in_solution,
    properties=(fills_the_grid,),
    hints=(
        "Print gl.forward_only(3, 4).grid() and follow load 0. In which slot is it in machine 0, 1 and 2?",
        "Load n enters the washer in slot n, and needs one slot for each machine before machine k.",
        "Load n is in machine k in slot n + k. Solve for n. It is a load only if 0 ≤ n < num_loads.",
    ),
)


# The last load on machines that are not equally fast.


def finish_time(minutes, num_loads):
    """Minutes until the last load leaves the last machine.

    minutes: how long each machine takes for a load, in the order in which a load visits them.
    """
    raise NotImplementedError("your formula here")


def solution(minutes, num_loads):
    # The first load visits every machine. Each later load leaves one slowest machine's time after it.
    return sum(minutes) + (num_loads - 1) * max(minutes)


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
)

EXERCISES = (LOAD_IN, FINISH_TIME)

"""Wrong answers to the exercises of chapter 00, which each of them must refuse."""

from __future__ import annotations

from gpipe_lab.course.exercises.ch00 import load_in_solution


def never_idle(machine: int, slot: int, num_loads: int) -> int:
    return slot - machine


def forgets_the_drain(machine: int, slot: int, num_loads: int) -> int:
    return max(-1, slot - machine)


def all_start_at_once(machine: int, slot: int, num_loads: int) -> int:
    return slot if slot < num_loads else -1


def one_slot_late(machine: int, slot: int, num_loads: int) -> int:
    return load_in_solution(machine, slot - 1, num_loads)


def one_load_too_many(machine: int, slot: int, num_loads: int) -> int:
    return load_in_solution(machine, slot, num_loads + 1)


def only_the_first_load(machine: int, slot: int, num_loads: int) -> int:
    return 0 if slot == machine else -1


def every_machine_as_slow_as_the_slowest(minutes: list[float], num_loads: int) -> float:
    return max(minutes) * (num_loads + len(minutes) - 1)


def counts_a_load_twice(minutes: list[float], num_loads: int) -> float:
    return sum(minutes) + num_loads * max(minutes)


def one_by_one(minutes: list[float], num_loads: int) -> float:
    return num_loads * sum(minutes)


def the_first_machine_sets_the_beat(minutes: list[float], num_loads: int) -> float:
    return sum(minutes) + (num_loads - 1) * minutes[0]


def the_last_machine_sets_the_beat(minutes: list[float], num_loads: int) -> float:
    return sum(minutes) + (num_loads - 1) * minutes[-1]


def the_average_sets_the_beat(minutes: list[float], num_loads: int) -> float:
    return sum(minutes) + (num_loads - 1) * sum(minutes) / len(minutes)


MUTANTS = {
    "00-load-in": {
        "never idle": never_idle,
        "the drain forgotten": forgets_the_drain,
        "all machines start at once": all_start_at_once,
        "one slot late": one_slot_late,
        "one load too many": one_load_too_many,
        "only the first load": only_the_first_load,
    },
    "00-finish-time": {
        "every machine as slow as the slowest": every_machine_as_slow_as_the_slowest,
        "a load counted twice": counts_a_load_twice,
        "one load at a time": one_by_one,
        "the first machine sets the beat": the_first_machine_sets_the_beat,
        "the last machine sets the beat": the_last_machine_sets_the_beat,
        "the average sets the beat": the_average_sets_the_beat,
    },
}

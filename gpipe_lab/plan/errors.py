"""One shape for every complaint: the rule, what was given, where, and a remedy to paste."""

from numbers import Integral


class InputError(ValueError):
    """Something the user gave breaks a rule.

    The message has one line each for the rule, what was got, where, and the remedy, so that it
    can be acted on without reading a traceback.
    """

    def __init__(self, rule: str, *, got: object, where: str = "", remedy: str = "") -> None:
        self.rule = rule
        self.got = got
        self.where = where
        self.remedy = remedy
        super().__init__(rule, got, where, remedy)

    def __str__(self) -> str:
        parts = [("rule", self.rule), ("got", self.got), ("where", self.where), ("remedy", self.remedy)]
        return "\n".join(f"{name + ':':<8}{text}" for name, text in parts if text != "")

    def __reduce__(self) -> tuple:
        return _rebuild, (type(self), self.args, {})


class ScheduleError(InputError):
    """A schedule that cannot run; `grid` is its text with the offending operations marked `>>like this<<`."""

    def __init__(self, rule: str, *, got: object, where: str = "", remedy: str = "", grid: str = "") -> None:
        super().__init__(rule, got=got, where=where, remedy=remedy)
        self.grid = grid

    def __str__(self) -> str:
        return super().__str__() + (f"\n{self.grid}" if self.grid else "")

    def __reduce__(self) -> tuple:
        return _rebuild, (type(self), self.args, {"grid": self.grid})


def _rebuild(cls: type, args: tuple, extra: dict) -> InputError:
    rule, got, where, remedy = args
    return cls(rule, got=got, where=where, remedy=remedy, **extra)


def require(condition: bool, rule: str, *, got: object, where: str = "", remedy: str = "") -> None:
    """Raise `InputError` unless `condition` holds."""
    if not condition:
        raise InputError(rule, got=got, where=where, remedy=remedy)


def is_count(value: object, least: int = 1) -> bool:
    """Whether `value` is an integer, numpy's included, of at least `least`; a bool is not a count."""
    return isinstance(value, Integral) and not isinstance(value, bool) and int(value) >= least


def require_count(value: object, name: str, *, where: str = "") -> None:
    """Raise `InputError` unless `value` is an integer of at least 1 (a bool is not a count)."""
    require(
        is_count(value),
        f"{name} is a whole number of at least 1",
        got=f"{name}={value!r}",
        where=where,
        remedy=f"{name}=1 or more",
    )

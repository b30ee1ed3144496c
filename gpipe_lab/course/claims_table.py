"""The table of claims, which cuts nothing off. Apart, since it imports pandas."""

from __future__ import annotations

import pandas


class ClaimsTable(pandas.DataFrame):
    """A DataFrame that shows every row, column and word; what is made from it is a plain one."""

    def _repr_html_(self) -> str:
        with _in_full():
            return super()._repr_html_()

    def __repr__(self) -> str:
        with _in_full():
            return super().__repr__()


def _in_full() -> pandas.option_context:
    options = ("display.max_colwidth", "display.max_rows", "display.max_columns", "display.width")
    return pandas.option_context(*(item for option in options for item in (option, None)))

"""Grids of test cases, of which `make test` takes a part; all of them are run before a release (`pytest -m slow`)."""

import pytest


def half_of(first, second):
    """Every value of one axis with every one of the other; the fast run takes each with every other one."""
    return [
        pytest.param(a, b, marks=pytest.mark.slow if (i + j) % 2 else ())
        for i, a in enumerate(first)
        for j, b in enumerate(second)
    ]

"""Which cases of a test CI runs; the others repeat its claim under `-m long`."""

from itertools import product

import pytest


def long_but(cases, *quick):
    """The cases, all but the quick ones marked as long; a case of several values is a tuple."""
    cases = list(cases)
    assert all(case in cases for case in quick), "a quick case that is not there"
    return [
        pytest.param(
            *(case if type(case) is tuple else (case,)),
            marks=[] if any(case is each or case == each for each in quick) else [pytest.mark.long],
        )
        for case in cases
    ]


def each_once(*lists):
    """All combinations of the lists' values, as long, but for a few in which each value comes."""
    lists = [list(values) for values in lists]
    count = max(map(len, lists))
    quick = [tuple(values[i % len(values)] for values in lists) for i in range(count)]
    return long_but(product(*lists), *quick)

from __future__ import annotations

import math

from hypothesis import given
from hypothesis import strategies as st

from vescale_tools.report.treemap import Area, squarify

WITHIN = Area(10, 20, 300, 200)
ROUNDING = 1e-3
"""In pixels: the last of many areas gets what subtractions of much larger ones have left."""


@given(st.lists(st.floats(0.001, 1e6), min_size=1, max_size=40))
def test_areas_are_in_proportion_inside_and_disjoint(weights):
    weights = sorted(weights, reverse=True)
    areas = squarify(weights, WITHIN)
    scale = WITHIN.width * WITHIN.height / sum(weights)
    for weight, area in zip(weights, areas, strict=True):
        assert math.isclose(area.width * area.height, weight * scale, rel_tol=1e-6, abs_tol=1e-6)
        assert area.x >= WITHIN.x - ROUNDING
        assert area.y >= WITHIN.y - ROUNDING
        assert area.x + area.width <= WITHIN.x + WITHIN.width + ROUNDING
        assert area.y + area.height <= WITHIN.y + WITHIN.height + ROUNDING
    for i, a in enumerate(areas):
        for b in areas[:i]:
            wide = min(a.x + a.width, b.x + b.width) - max(a.x, b.x)
            high = min(a.y + a.height, b.y + b.height) - max(a.y, b.y)
            assert wide < ROUNDING or high < ROUNDING


def test_shapes_are_about_square():
    areas = squarify([1.0] * 24, WITHIN)
    assert max(max(a.width / a.height, a.height / a.width) for a in areas) < 2


def test_nothing():
    assert squarify([], WITHIN) == []
    assert squarify([0.0], WITHIN) == []
    assert squarify([5.0], WITHIN) == [WITHIN]

from __future__ import annotations

import itertools
import math
import xml.etree.ElementTree as ET

import pytest
from hypothesis import given
from hypothesis import strategies as st

from vescale_tools.report.charts import HEIGHT, WIDTH, Series, curves, stacked_bars, ticks

SVG = "{http://www.w3.org/2000/svg}"


def shapes(picture, tag):
    root = ET.fromstring(picture)  # noqa: S314
    return [{key: each.attrib[key] for key in each.attrib} for each in root.iter(f"{SVG}{tag}")]


def bars(picture):
    found = [{key: float(each[key]) for key in ("x", "y", "width", "height")} for each in shapes(picture, "rect")]
    return [each for each in found if (each["width"], each["height"]) != (10, 10)]


@given(st.floats(-1e9, 1e9), st.floats(1e-6, 1e9))
def test_ticks_are_round_and_inside(low, span):
    high = low + span
    if high <= low:
        return
    found = ticks(low, high)
    assert len(found) <= 7
    slack = 1e-6 * max(abs(low), abs(high), span)
    assert all(low - slack <= tick <= high + slack for tick in found)


def test_ticks_of_a_simple_span():
    assert ticks(0, 10) == [0, 2, 4, 6, 8, 10]
    assert ticks(0, 1.0) == pytest.approx([0, 0.2, 0.4, 0.6, 0.8, 1.0])


def test_bars_stand_on_one_another_in_proportion():
    picture = stacked_bars(["1", "2"], [Series("a", [10, 20]), Series("b", [30, 0])], str, "chart")
    a1, b1, a2, b2 = bars(picture)
    assert math.isclose(b1["height"], 3 * a1["height"], abs_tol=0.05)
    assert math.isclose(a2["height"], 2 * a1["height"], abs_tol=0.05)
    assert math.isclose(b1["y"] + b1["height"], a1["y"], abs_tol=0.05)
    assert b2["height"] == 0
    assert a1["x"] + a1["width"] <= a2["x"]


@pytest.mark.parametrize("number", [0, 1, 3, 400])
def test_everything_stays_inside_the_picture(number):
    places = [str(10**6 + i) for i in range(number)]
    picture = stacked_bars(places, [Series("a", [float(i) for i in range(number)])], str, "chart")
    for bar in bars(picture):
        assert bar["x"] >= 0
        assert bar["x"] + bar["width"] <= WIDTH
        assert bar["y"] >= 0
        assert bar["y"] + bar["height"] <= HEIGHT
    labels = [float(text["x"]) for text in shapes(picture, "text") if float(text["y"]) > HEIGHT - 20]
    assert all(b - a >= 7 * 6.6 for a, b in itertools.pairwise(labels)), "labels do not overlap"


def test_curves_leave_gaps_where_there_is_no_number():
    values = [1.0, 2.0, math.nan, 3.0, 4.0, math.inf]
    picture = curves([0, 1, 2, 3, 4, 5], [Series("loss", values)], str, "loss")
    assert len(shapes(picture, "path")) == 2
    assert len(shapes(picture, "circle")) == 4
    assert "nan" not in picture
    assert "inf" not in picture


@pytest.mark.parametrize("values", [[], [5.0], [3.0, 3.0], [0.0, 0.0]])
def test_few_and_flat_values(values):
    picture = curves([float(i) for i in range(len(values))], [Series("x", values)], str, "flat")
    ET.fromstring(picture)  # noqa: S314
    assert "nan" not in picture


def test_the_area_between_two_curves():
    picture = curves([1, 2, 3], [Series("a", [1, 2, 3]), Series("b", [1, 1, 1])], str, "sum", fill=True)
    assert sum(each["fill"] == "var(--tint)" for each in shapes(picture, "path")) == 1

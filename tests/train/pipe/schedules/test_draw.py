from __future__ import annotations

import itertools
from xml.etree import ElementTree as ET

import pytest

from vescale_train.pipe.schedules import PipelineScheduleType, draw_html, draw_svg, named_schedule, simulate

SVG = "{http://www.w3.org/2000/svg}"


@pytest.mark.parametrize("kind", PipelineScheduleType)
def test_a_drawing_has_a_box_for_every_computation_and_none_over_another(kind):
    per_rank = 1 if kind.value in {"gpipe", "1f1b"} else 2
    schedule = named_schedule(kind, num_ranks=2, num_microbatches=4, stages_per_rank=per_rank)
    root = ET.fromstring(draw_svg(schedule, width=900))  # noqa: S314 - made a line above
    boxes = root.findall(f"{SVG}g/{SVG}rect")
    assert len(boxes) == len(simulate(schedule).spans)
    for y in {box.get("y") for box in boxes}:
        own = sorted((float(b.get("x")), float(b.get("width"))) for b in boxes if b.get("y") == y)
        assert all(x + wide <= after + 0.11 for (x, wide), (after, _) in itertools.pairwise(own))
        assert own[-1][0] + own[-1][1] <= 900
    titles = [title.text for title in root.findall(f"{SVG}g/{SVG}title")]
    assert any(text.startswith("0F0: forward") for text in titles)
    assert "bubble" in root.find(f"{SVG}text").text


def test_a_page_tells_idle_time_and_the_text_of_the_schedule():
    schedule = named_schedule("1f1b", num_ranks=2, num_microbatches=2)
    page = draw_html(schedule)
    assert page.startswith("<!doctype html>")
    assert "<td>33.3%</td>" in page
    assert "0F0,0F1,0B0,0B1" in page

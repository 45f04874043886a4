from __future__ import annotations

import xml.etree.ElementTree as ET

import pytest

from vescale_ckpt.geometry.box import Box
from vescale_ckpt.usage import NameUsage
from vescale_tools.report.pictures import MAP_HEIGHT, WIDTH, group_of, ranks_text, shard_map, tensor_treemap
from vescale_tools.report.svg import COLORS, fitted, ink_on, num, text_of

SVG = "{http://www.w3.org/2000/svg}"


def tiles(picture):
    root = ET.fromstring(picture)  # noqa: S314
    return [each for each in root.iter(f"{SVG}rect") if each.get("class") == "tile"]


def area(tile):
    return float(tile.get("width")) * float(tile.get("height"))


def test_tensors_by_size():
    usages = [NameUsage("model.a", 1, 300, 300), NameUsage("model.b<&>\x1b", 1, 100, 100), NameUsage("o", 1, 0, 0)]
    picture = tensor_treemap(usages)
    first, second = tiles(picture)
    assert area(first) == pytest.approx(3 * area(second), rel=1e-3)
    assert area(first) + area(second) == pytest.approx(WIDTH * (MAP_HEIGHT - 24), rel=1e-3)
    assert first.find(f"{SVG}title").text == "model.a: 300 B"
    assert second.find(f"{SVG}title").text == r"model.b<&>\x1b: 100 B"


def test_very_many_tensors_are_summed_up():
    picture = tensor_treemap([NameUsage(f"t.{i}", 1, 1000 - i % 7, 0) for i in range(900)])
    assert len(tiles(picture)) == 251
    assert "650 smaller tensors" in picture


def test_groups():
    assert group_of("model.layers.0.w") == "model"
    assert group_of("optimizer.state.w.exp_avg") == "optimizer exp_avg"
    assert group_of("w") == "w"


def test_shards_fill_their_tensor():
    held = tuple((Box((2 * rank, 0), (2, 6)),) for rank in (0, 1)) * 2
    one = tiles(shard_map([("w", (4, 6), held)]))
    assert len(one) == 2
    assert [tile.find(f"{SVG}title").text for tile in one] == ["[0:2, 0:6]: ranks 0, 2", "[2:4, 0:6]: ranks 1, 3"]
    assert area(one[0]) == area(one[1])
    assert float(one[0].get("y")) + float(one[0].get("height")) == pytest.approx(float(one[1].get("y")))


@pytest.mark.parametrize(
    ("shape", "box"), [((), Box((), ())), ((8,), Box((0,), (8,))), ((2, 3, 4), Box((0, 0, 0), (2, 3, 4)))]
)
def test_any_number_of_dims(shape, box):
    assert len(tiles(shard_map([("t", shape, ((box,),))]))) == 1


def test_nothing_to_map():
    ET.fromstring(shard_map([]))  # noqa: S314


def test_ranks():
    assert ranks_text([0, 1, 2, 3, 8, 10, 11]) == "0-3, 8, 10-11"
    assert ranks_text([5]) == "5"


def test_texts():
    assert text_of('<b>"x"\x00') == "&lt;b&gt;&quot;x&quot;\\x00"
    assert fitted("model.layers.0.weight", 1000) == "model.layers.0.weight"
    assert fitted("model.layers.0.weight", 60) == "…0.weight"
    assert fitted("model.layers.0.weight", 20) == ""
    assert [num(x) for x in (0, 1.0, 2.5, 10.0, 1 / 3)] == ["0", "1", "2.5", "10", "0.33"]


def test_text_can_be_read_on_every_colour():
    assert {fill: ink_on(fill) for fill in ("#000000", "#ffffff")} == {"#000000": "light", "#ffffff": "dark"}
    assert {ink_on(fill) for fill in COLORS} == {"light", "dark"}

from __future__ import annotations

import re
import xml.etree.ElementTree as ET
from html.parser import HTMLParser

import pytest
import torch

import vescale_ckpt as vc
from tests.tools.report.conftest import HOSTILE

VOID = {"meta", "link", "br", "img", "hr", "input"}


class Page(HTMLParser):
    """Parses a page, and refuses tags that are not closed in their order."""

    def __init__(self, text):
        super().__init__()
        self.open, self.tags, self.links = [], [], []
        self.feed(text)
        self.close()
        assert self.open == []

    def handle_starttag(self, tag, attrs):
        self.tags.append(tag)
        self.links += [value for name, value in attrs if name in {"src", "href", "action", "xlink:href"}]
        assert not [name for name, _ in attrs if name.startswith("on")], "no handlers"
        if tag not in VOID:
            self.open.append(tag)

    def handle_startendtag(self, tag, attrs):
        self.handle_starttag(tag, attrs)
        self.handle_endtag(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag


def page_of(command, url, run, tmp_path, *options):
    result = command("report", url, run, "-o", tmp_path / "page.html", *options)
    assert (result.code, result.err) == (0, "")
    return (tmp_path / "page.html").read_text(encoding="utf-8")


def test_the_page_is_well_formed_and_needs_nothing_else(command, logged, tmp_path):
    text = page_of(command, logged, "run", tmp_path, "--mesh", "dp=2,tp=2")
    page = Page(text)
    assert "script" not in page.tags
    assert page.links == []
    assert "url(" not in text
    assert "@import" not in text
    pictures = re.findall(r"<svg.*?</svg>", text, re.DOTALL)
    assert len(pictures) == 7
    for picture in pictures:
        box = [float(x) for x in ET.fromstring(picture).get("viewBox").split()]  # noqa: S314
        for each in ET.fromstring(picture).iter("{http://www.w3.org/2000/svg}rect"):  # noqa: S314
            x, y, width, height = (float(each.get(key)) for key in ("x", "y", "width", "height"))
            assert box[0] <= x
            assert x + width <= box[2] + 0.1
            assert box[1] <= y
            assert y + height <= box[3] + 0.1
    assert re.findall(r'<section id="(\w+)"', text) == ["bytes", "tensors", "shards", "seconds", "loss"]


def test_what_it_says(command, logged, tmp_path):
    text = page_of(command, logged, "run", tmp_path, "--mesh", "dp=2,tp=2")
    assert "<dt>snapshots</dt><dd>5</dd>" in text
    assert "30 (best)" in text
    assert "&lt;frozen&gt;.weight" in text
    assert "4 ranks (dp 2, tp 2)" in text
    assert "'extra.loss', as logged" in text.replace("&#x27;", "'")
    assert "total" not in re.findall(r"<th>([^<]*)</th>", text), "the sum of phases is no phase"
    assert "[0:150, 0:200]: ranks 0, 2" in text


def test_names_that_are_markup_stay_text(command, logged, tmp_path):
    text = page_of(command, logged, HOSTILE, tmp_path)
    assert "script" not in Page(text).tags
    assert "&lt;script&gt;alert(1)" in text
    assert 'id="loss"' not in text
    assert 'id="seconds"' not in text


def test_as_json_and_dry(command, logged, tmp_path):
    result = command("report", logged, "run", "-o", tmp_path / "p.html", "--dry-run", "--json").json
    assert not (tmp_path / "p.html").exists()
    assert (result["loss"], result["phases"], result["mesh"]) == ("extra.loss", ["stage", "write"], {"fsdp": 4})
    assert result["snapshots"] == 5


def test_the_loss_by_name_or_as_a_history(command, tmp_path):
    with vc.open_store(tmp_path / "s") as store, vc.Checkpointer(store, "run") as checkpointer:
        for step in (1, 2):
            state = {"w": torch.ones(3), "log": {"losses": [5.0, 4.0, 3.0], "other": 1.5 * step}}
            checkpointer.save(step, state, metadata={"val_loss": 2.0})
    dry = ("report", tmp_path / "s", "run", "-o", tmp_path / "p.html", "--dry-run", "--json")
    assert command(*dry).json["loss"] == "log.losses"
    assert command(*dry, "--loss", "log.other").json["loss"] == "log.other"
    assert command(*dry, "--loss", "nope").json["loss"] is None


def test_a_file_that_is_there(command, logged, tmp_path):
    (tmp_path / "page.html").write_text("mine")
    assert command("report", logged, "run", "-o", tmp_path / "page.html").code == 11
    assert (tmp_path / "page.html").read_text() == "mine"
    assert command("report", logged, "run", "-o", tmp_path / "page.html", "--overwrite").code == 0


@pytest.mark.parametrize(
    ("arguments", "code"), [(["nope", "-o", "p"], 10), (["run"], 2), (["run", "-o", "p", "--mesh", "pp=2"], 2)]
)
def test_bad_input(command, logged, tmp_path, monkeypatch, arguments, code):
    monkeypatch.chdir(tmp_path)
    assert command("report", logged, *arguments).code == code
    assert not (tmp_path / "p").exists()

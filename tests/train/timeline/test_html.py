import json
import re
from html.parser import HTMLParser

import pytest

from vescale_ckpt.errors import InvalidInputError
from vescale_train.timeline.html import write_page


class Page(HTMLParser):
    def __init__(self, text):
        super().__init__()
        self.open, self.addresses, self.cells, self.scripts = [], [], [], []
        self.feed(text)

    def handle_starttag(self, tag, attrs):
        self.open.append(tag)
        self.addresses += [value for name, value in attrs if name in {"src", "href"}]

    def handle_data(self, data):
        if self.open and self.open[-1] in {"td", "th"}:
            self.cells.append(data)
        if self.open and self.open[-1] == "script":
            self.scripts.append(data)


def test_the_page_has_all_spans_and_the_report_and_needs_nothing_else(tmp_path, span):
    spans = [span("forward", 0, 10, 12), span("</script><b>&", 1, 10, 18, track="<cuda>")]
    report = write_page(tmp_path / "page.html", spans, title="A <title> @DATA@")
    text = (tmp_path / "page.html").read_text()
    page = Page(text)
    assert page.addresses == []
    assert not re.search(r"https?:", text)
    assert "b" not in page.open, "a name is no markup"
    data = json.loads(page.scripts[0])
    assert data["rows"] == ["rank 0 · cpu", "rank 1 · <cuda>"]
    assert [0, 0.0, 2000.0, "forward", "compute", 0] in data["spans"]
    assert {row[3] for row in data["spans"]} == {"forward", "</script><b>&"}
    assert "A &lt;title&gt; @DATA@" in text
    assert f"{report.ranks[0].bubble:.1%}" in page.cells


def test_stragglers_are_listed(tmp_path, span):
    write_page(tmp_path / "page.html", [span("forward", rank, 0, 1 + rank) for rank in range(3)])
    cells = Page((tmp_path / "page.html").read_text()).cells
    assert "rank 2" in cells
    assert "2.00" in cells


def test_no_spans_make_no_page(tmp_path):
    with pytest.raises(InvalidInputError, match="no span"):
        write_page(tmp_path / "page.html", [])
    assert not (tmp_path / "page.html").exists()

"""The report looked at in a real browser: what is drawn, where, and that nothing is fetched or complained about."""

from __future__ import annotations

import html
import json
import re
import shutil
import subprocess

import pytest

pytestmark = pytest.mark.browser

# Runs in the page, measures what the browser has laid out, and leaves it in the title.
LOOK = """
const round = (x) => Math.round(x * 10) / 10;
const found = [...document.querySelectorAll("svg")].map((svg) => {
  const box = svg.getBoundingClientRect();
  const outside = [...svg.querySelectorAll("rect, text, path, circle")].filter((each) => {
    const b = each.getBoundingClientRect();
    return b.left < box.left - 2 || b.right > box.right + 2 || b.top < box.top - 2 || b.bottom > box.bottom + 2;
  });
  const tiles = [...svg.querySelectorAll("rect.tile")].map((each) => each.getBoundingClientRect());
  return {
    name: svg.getAttribute("aria-label"), width: round(box.width), height: round(box.height),
    shapes: svg.querySelectorAll("rect, path, circle").length, outside: outside.length,
    tiles: tiles.length, area: tiles.reduce((sum, t) => sum + t.width * t.height, 0) / (box.width * box.height),
  };
});
document.title = JSON.stringify({
  pictures: found, wide: document.documentElement.scrollWidth > window.innerWidth,
  requests: performance.getEntriesByType("resource").length,
  headings: [...document.querySelectorAll("h1, h2")].map((each) => each.textContent),
});
"""


def look(page, tmp_path, width):
    """Open a page in headless Chromium and return what it has drawn."""
    chromium = shutil.which("chromium")
    assert chromium, "this test needs Chromium: apt-get install chromium"
    text = page.read_text(encoding="utf-8")
    open_page = re.sub(r"<meta http-equiv.*?>", "", text).replace("</body>", f"<script>{LOOK}</script></body>")
    (tmp_path / "look.html").write_text(open_page, encoding="utf-8")
    done = subprocess.run(
        [
            *(
                chromium,
                "--headless=new",
                "--no-sandbox",
                "--disable-gpu",
                "--hide-scrollbars",
                "--disable-dev-shm-usage",
            ),
            *(f"--user-data-dir={tmp_path / 'profile'}", f"--window-size={width},1000", "--virtual-time-budget=3000"),
            *("--dump-dom", (tmp_path / "look.html").as_uri()),
        ],
        capture_output=True,
        text=True,
        timeout=120,
        check=True,
    )
    return json.loads(html.unescape(re.search(r"<title>(.*?)</title>", done.stdout, re.DOTALL)[1]))


@pytest.mark.parametrize("width", [1200, 600])
def test_a_browser_draws_all_of_it(command, logged, tmp_path, width):
    assert command("report", logged, "run", "-o", tmp_path / "page.html", "--mesh", "dp=2,tp=2").code == 0
    seen = look(tmp_path / "page.html", tmp_path, width)
    assert seen["headings"] == ["run", "Bytes over steps", "Tensors", "Shards", "Seconds by phase", "Loss"]
    assert seen["requests"] == 0
    assert seen["wide"] is False, "nothing has to be scrolled sideways"
    pictures = {picture["name"]: picture for picture in seen["pictures"]}
    assert len(pictures) == 7
    for picture in pictures.values():
        assert picture["outside"] == 0, picture
        assert picture["width"] > 400
        assert picture["height"] > 50
        assert picture["shapes"] > 1
    assert pictures["tensors by size"]["tiles"] == 3
    assert 0.9 < pictures["tensors by size"]["area"] <= 1.01
    assert pictures["which rank holds which part"]["tiles"] == 4

"""SVG as text: the few shapes that the report's pictures are made of. Pure."""

from __future__ import annotations

import html
from typing import Final

from vescale_tools.output import printable

COLORS: Final = ("#0072b2", "#e69f00", "#009e73", "#cc79a7", "#56b4e9", "#d55e00", "#8c8c00", "#7a6bd1")
"""Told apart also by those who see few colours (Okabe and Ito, the last two added); taken in this order."""
CHAR_WIDTH: Final = 6.6
"""Of a letter of the small text, about, in the units of the pictures."""


def text_of(text: str) -> str:
    """Return a text as it may stand in HTML: control characters spelled out, markup escaped."""
    return html.escape(printable(text))


def color(number: int) -> str:
    """Return one of the colours; they come again after the last."""
    return COLORS[number % len(COLORS)]


def ink_on(fill: str) -> str:
    """Return the style of text that can be read on a colour: ``light`` or ``dark``, whichever differs more from it."""
    channels = [int(fill[i : i + 2], 16) / 255 for i in (1, 3, 5)]
    linear = [c / 12.92 if c <= 0.04045 else ((c + 0.055) / 1.055) ** 2.4 for c in channels]
    luminance = 0.2126 * linear[0] + 0.7152 * linear[1] + 0.0722 * linear[2]
    return "light" if 1.05 / (luminance + 0.05) > (luminance + 0.05) / 0.056 else "dark"


def num(value: float) -> str:
    """Return a coordinate with two digits, without trailing zeros."""
    return f"{value:.2f}".rstrip("0").rstrip(".") if value else "0"


def rect(x: float, y: float, width: float, height: float, fill: str, *, about: str = "", style: str = "") -> str:
    """Return a rectangle; ``about`` is shown when the pointer rests on it."""
    size = f'x="{num(x)}" y="{num(y)}" width="{num(max(width, 0))}" height="{num(max(height, 0))}"'
    inside = f"<title>{text_of(about)}</title>" if about else ""
    kind = f' class="{style}"' if style else ""
    return f'<rect {size} fill="{fill}"{kind}>{inside}</rect>'


def label(x: float, y: float, text: str, *, anchor: str = "start", style: str = "") -> str:
    """Return a line of text; ``anchor`` is ``start``, ``middle`` or ``end``."""
    kind = f' class="{style}"' if style else ""
    return f'<text x="{num(x)}" y="{num(y)}" text-anchor="{anchor}"{kind}>{text_of(text)}</text>'


def line(x1: float, y1: float, x2: float, y2: float, style: str = "grid") -> str:
    """Return a straight line."""
    return f'<line x1="{num(x1)}" y1="{num(y1)}" x2="{num(x2)}" y2="{num(y2)}" class="{style}"/>'


def path(points: list[tuple[float, float]], stroke: str, *, fill: str = "none") -> str:
    """Return a line through points, or the area that it bounds where there is a ``fill``."""
    steps = " L".join(f"{num(x)} {num(y)}" for x, y in points)
    end = "Z" if fill != "none" else ""
    return f'<path d="M{steps}{end}" fill="{fill}" stroke="{stroke}" class="curve"/>'


def dot(x: float, y: float, fill: str, about: str) -> str:
    """Return a small round mark."""
    return f'<circle cx="{num(x)}" cy="{num(y)}" r="3" fill="{fill}"><title>{text_of(about)}</title></circle>'


def svg(width: float, height: float, parts: list[str], name: str) -> str:
    """Return the picture; ``name`` says what it shows to who cannot see it."""
    body = "\n".join(parts)
    return (
        f'<svg viewBox="0 0 {num(width)} {num(height)}" role="img" aria-label="{text_of(name)}" '
        f'xmlns="http://www.w3.org/2000/svg">\n{body}\n</svg>'
    )


def fitted(text: str, width: float) -> str:
    """Return as much of a text's end as fits into a width, or nothing: names differ at their ends."""
    room = int(width / CHAR_WIDTH)
    if len(text) <= room:
        return text
    return f"…{text[len(text) - room + 1 :]}" if room >= 5 else ""

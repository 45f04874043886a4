"""A trace as one HTML page without anything from elsewhere: rows of spans to zoom into, and the report as tables."""

from __future__ import annotations

import html
import json
import re
from typing import TYPE_CHECKING

from vescale_train.timeline.report import Report, analyse

if TYPE_CHECKING:
    from collections.abc import Sequence
    from pathlib import Path

    from vescale_train.timeline.span import Span

_MOST_SEGMENTS = 40


def write_page(path: Path, spans: Sequence[Span], *, title: str = "Timeline") -> Report:
    """Write the page of all ranks' spans to ``path`` and return the report that is on it.

    Raises:
        InvalidInputError: there is no span.
    """
    report = analyse(spans)
    path.write_text(page(spans, report, title=title), encoding="utf-8")
    return report


def page(spans: Sequence[Span], report: Report, *, title: str) -> str:
    """Return the page: a pure function of its input."""
    begin = min(span.start_ns for span in spans)
    rows = sorted({(span.rank, span.track) for span in spans})
    index = {row: number for number, row in enumerate(rows)}
    data = {
        "rows": [f"rank {rank} · {track}" for rank, track in rows],
        "spans": [
            [
                index[span.rank, span.track],
                (span.start_ns - begin) / 1e3,
                span.duration_ns / 1e3,
                span.name,
                span.kind.value,
                span.step,
            ]
            for span in sorted(spans, key=lambda span: (span.start_ns, -span.stop_ns))
        ],
    }
    # A name may hold "</script>": inside of a script element no character reference works, only JSON's own escapes.
    text = json.dumps(data).replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")
    parts = {"TITLE": html.escape(title), "DATA": text, "REPORT": _tables(report, begin)}
    return re.sub("@(TITLE|DATA|REPORT)@", lambda found: parts[found[1]], _PAGE)


def _tables(report: Report, begin: int) -> str:
    ranks = [
        (
            f"rank {rank.rank}",
            f"{rank.bubble:.1%}",
            _ms(rank.computing_ns),
            _ms(rank.exposed_ns),
            _ms(rank.hidden_ns),
            _ms(rank.other_ns),
            _ms(rank.idle_ns),
            _ms(rank.caused_wait_ns),
        )
        for rank in report.ranks
    ]
    stragglers = [
        (lag.name, f"rank {lag.rank}", _ms(lag.median_ns), _ms(lag.others_median_ns), f"{lag.ratio:.2f}")
        for lag in report.stragglers
    ]
    longest = sorted(report.critical, key=lambda segment: -segment.duration_ns)[:_MOST_SEGMENTS]
    critical = [
        (
            _ms(segment.start_ns - begin),
            f"rank {segment.rank}",
            segment.span.name if segment.span else "(nothing timed)",
            _ms(segment.duration_ns),
        )
        for segment in longest
    ]
    heads = ("", "bubble", "computing", "communication, exposed", "hidden", "other", "idle", "made others wait")
    return (
        f"<p>{_ms(report.window_ns)} ms, mean bubble {report.bubble:.1%}; all times in ms.</p>"
        + _table("Ranks", heads, ranks)
        + _table("Stragglers", ("span", "who", "median", "median of the others", "ratio"), stragglers)
        + _table("Critical path, its longest pieces", ("at", "who", "what", "length"), critical)
    )


def _table(title: str, heads: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    if not rows:
        return f"<h2>{html.escape(title)}</h2><p>none</p>"
    head = "".join(f"<th>{html.escape(name)}</th>" for name in heads)
    body = "".join("<tr>" + "".join(f"<td>{html.escape(cell)}</td>" for cell in row) + "</tr>" for row in rows)
    return f"<h2>{html.escape(title)}</h2><table><tr>{head}</tr>{body}</table>"


def _ms(nanoseconds: int) -> str:
    return f"{nanoseconds / 1e6:.3f}"


_PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>@TITLE@</title><style>
body{font:14px system-ui,sans-serif;margin:1.5em;color:#222;background:#fff}
canvas{width:100%;border:1px solid #ccc;cursor:grab;display:block}
table{border-collapse:collapse;margin-bottom:1em}td,th{padding:.15em .8em;text-align:right;border-bottom:1px solid #eee}
td:first-child,th:first-child{text-align:left}h2{font-size:1.1em}#tip{min-height:1.4em;font-family:monospace}
@media(prefers-color-scheme:dark){body{color:#ddd;background:#161616}td,th{border-color:#333}canvas{border-color:#444}}
</style></head><body><h1>@TITLE@</h1>
<p>Wheel: zoom. Drag: move. Double click: all of it. Arrow keys and + - work too.</p>
<canvas id="trace" tabindex="0" aria-label="spans of every rank over time"></canvas><p id="tip"></p>
@REPORT@
<script type="application/json" id="data">@DATA@</script>
<script>
"use strict";
const data=JSON.parse(document.getElementById("data").textContent),canvas=document.getElementById("trace"),
tip=document.getElementById("tip"),pen=canvas.getContext("2d"),LEFT=170,LANE=16,HEAD=20,
COLORS={compute:"#4c9f70",communication:"#d9822b",optimizer:"#7a6fc0",checkpoint:"#3d7ebf",data:"#b0a030",other:"#999"};
const depths=data.rows.map(()=>1),open=data.rows.map(()=>[]);
for(const s of data.spans){const o=open[s[0]];let d=0;while(o[d]!==undefined&&o[d]>s[1])d++;o[d]=s[1]+s[2];s.push(d);
depths[s[0]]=Math.max(depths[s[0]],d+1);}
const tops=[];let height=HEAD;for(const d of depths){tops.push(height);height+=d*LANE+6;}
const end=Math.max(1,...data.rows.map((_,r)=>Math.max(0,...open[r].filter(x=>x!==undefined))));
let from=0,to=end,drag=null;
function time(us){return us>=1e6?(us/1e6).toFixed(3)+" s":us>=1e3?(us/1e3).toFixed(3)+" ms":us.toFixed(1)+" us";}
function scale(){return (canvas.clientWidth-LEFT)/(to-from);}
function draw(){const ratio=window.devicePixelRatio||1,width=canvas.clientWidth;canvas.style.height=height+"px";
canvas.width=width*ratio;canvas.height=height*ratio;pen.setTransform(ratio,0,0,ratio,0,0);
const ink=getComputedStyle(document.body).color;pen.font="11px system-ui";pen.clearRect(0,0,width,height);
pen.fillStyle=ink;data.rows.forEach((name,r)=>pen.fillText(name,4,tops[r]+12));
for(let i=0;i<=6;i++){const t=from+(to-from)*i/6;pen.fillText(time(t),Math.min(LEFT+(t-from)*scale(),width-70),12);}
pen.save();pen.beginPath();pen.rect(LEFT,HEAD,width-LEFT,height);pen.clip();
for(const s of data.spans){const x=LEFT+(s[1]-from)*scale(),w=Math.max(.7,s[2]*scale());
if(x+w<LEFT||x>width)continue;const y=tops[s[0]]+s[6]*LANE;pen.fillStyle=COLORS[s[4]];pen.fillRect(x,y,w,LANE-2);
if(w>40){pen.save();pen.beginPath();pen.rect(x,y,w-3,LANE);pen.clip();pen.fillStyle="#fff";
pen.fillText(s[3],Math.max(x,LEFT)+3,y+11);pen.restore();}}pen.restore();}
function zoom(by,at){const span=Math.max(.01,Math.min(end,(to-from)*by)),part=(at-from)/(to-from);
from=at-part*span;to=from+span;move(0);}
function move(by){const span=to-from;from=Math.max(0,Math.min(end-span,from+by));to=from+span;draw();}
canvas.addEventListener("wheel",e=>{e.preventDefault();zoom(e.deltaY>0?1.25:.8,from+(e.offsetX-LEFT)/scale());},{passive:false});
canvas.addEventListener("mousedown",e=>{drag=e.offsetX;});window.addEventListener("mouseup",()=>{drag=null;});
canvas.addEventListener("dblclick",()=>{from=0;to=end;draw();});
canvas.addEventListener("mousemove",e=>{if(drag!==null){move((drag-e.offsetX)/scale());drag=e.offsetX;return;}
const t=from+(e.offsetX-LEFT)/scale();tip.textContent="";for(const s of data.spans){const y=tops[s[0]]+s[6]*LANE;
if(s[1]<=t&&t<=s[1]+s[2]&&e.offsetY>=y&&e.offsetY<y+LANE)
tip.textContent=data.rows[s[0]]+": "+s[3]+", "+time(s[2])+" from "+time(s[1])+", step "+s[5]+" ("+s[4]+")";}});
canvas.addEventListener("keydown",e=>{const span=to-from,key=e.key;if(key==="ArrowLeft")move(-span/8);
else if(key==="ArrowRight")move(span/8);
else if(key==="+")zoom(.7,(from+to)/2);else if(key==="-")zoom(1.4,(from+to)/2);});
window.addEventListener("resize",draw);draw();
</script></body></html>
"""

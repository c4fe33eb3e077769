"""A schedule as one HTML page: drawn to scale on a canvas, zoom with the wheel, scroll, hover for details. No network, no
libraries.
"""

from __future__ import annotations

import html
import json
import os

from parallel.schedule.boxes import WORDS, Picture, colour
from parallel.schedule.draw import heading


def save_html(picture: Picture, path: str | os.PathLike, title: str = "", unit: str = "") -> str:
    """Write the page; returns the path. unit: of time. `page.html#RANK,TIME` opens with the details of what runs there then."""
    with open(path, "w", encoding="utf-8") as file:
        file.write(page(picture, title, unit))
    return os.fspath(path)


def page(picture: Picture, title: str = "", unit: str = "") -> str:
    """The text of the page."""
    table = picture.table
    kinds = [k for k in WORDS if k == "F" or not table.forward_only]
    rows: list[list[list[float]]] = [[] for _ in range(table.stages)]
    for b in sorted(picture.boxes):
        rows[b.rank].append([round(b.start, 5), round(b.end, 5), "FBW".index(b.kind), b.chunk, b.microbatch, b.stage])
    data = {
        "rows": rows,
        "end": picture.end,
        "lines": [round(t, 5) for t in picture.lines],
        "colours": [[colour(k, c, table.chunks) for c in range(table.chunks)] for k in "FBW"],
        "words": [WORDS[k] for k in "FBW"],
        "unit": unit,
        "box": picture.unit,
    }
    legend = "".join(f'<span><i style="background:{colour(k, 0, table.chunks)}"></i>{k} {WORDS[k]}</span>' for k in kinds) + (
        "<span>darker: later chunk</span>" if table.chunks > 1 else ""
    )
    text = html.escape(title or heading(picture))
    return PAGE.replace("@TITLE@", text).replace("@LEGEND@", legend).replace("@DATA@", json.dumps(data, separators=(",", ":")))


PAGE = """<!DOCTYPE html>
<html lang="en"><head><meta charset="utf-8"><title>@TITLE@</title><style>
body{font:14px system-ui,sans-serif;margin:14px;color:#111;background:#fff}
h1{font-size:16px;font-weight:600;margin:0 0 8px}
.bar{display:flex;flex-wrap:wrap;gap:6px 18px;align-items:center;margin-bottom:8px}
.bar i{display:inline-block;width:14px;height:12px;border:1px solid #444;margin-right:5px;vertical-align:-1px}
.bar button{font:inherit;padding:1px 10px}
#view{overflow-x:auto;overflow-y:hidden;position:relative;border-top:1px solid #ccc}
#view canvas{position:sticky;left:0;display:block}
#tip{position:fixed;display:none;pointer-events:none;background:#222;color:#fff;padding:5px 8px;border-radius:4px;
white-space:pre;font-size:13px;z-index:2}
</style></head><body>
<h1>@TITLE@</h1>
<div class="bar">@LEGEND@<span><button id="out">&minus;</button> <button id="fit">all</button> <button id="in">+</button>
wheel: zoom</span></div>
<div id="view"><canvas id="c"></canvas><div id="wide"></div></div><div id="tip"></div>
<script>
const D=@DATA@;
const view=document.getElementById("view"),canvas=document.getElementById("c"),wide=document.getElementById("wide");
const tip=document.getElementById("tip"),g=canvas.getContext("2d"),LEFT=34,AXIS=24;
const H=D.rows.length>16?20:28;
let scale=1,hover=null;
const room=()=>view.clientWidth-LEFT-8;
const least=()=>room()/D.end;
const most=()=>Math.max(least(),60/D.box);
function setScale(s,x){  // keeps the time under x where it is
  const t=(view.scrollLeft+x-LEFT)/scale;
  scale=Math.min(Math.max(s,least()),most());
  wide.style.width=Math.ceil(LEFT+D.end*scale+8)+"px";wide.style.height="1px";
  view.scrollLeft=t*scale-x+LEFT;draw();
}
function step(){const rough=70/scale,p=10**Math.floor(Math.log10(rough));return [1,2,5,10].map(k=>k*p).find(k=>k>=rough)}
function first(row,t){let a=0,b=row.length;while(a<b){const m=(a+b)>>1;if(row[m][1]<t)a=m+1;else b=m}return a}
function draw(){
  const w=view.clientWidth,h=D.rows.length*H+AXIS,d=window.devicePixelRatio||1;
  canvas.width=w*d;canvas.height=h*d;canvas.style.width=w+"px";canvas.style.height=h+"px";
  g.setTransform(d,0,0,d,0,0);g.fillStyle="#fff";g.fillRect(0,0,w,h);
  const off=view.scrollLeft,from=(off-LEFT)/scale,to=(off+w)/scale,X=t=>LEFT+t*scale-off;
  if(D.lines.length&&D.end/D.lines.length*scale>6){g.fillStyle="#bbb";
    for(const t of D.lines)if(t>=from&&t<=to)g.fillRect(X(t),0,1,D.rows.length*H)}
  g.textAlign="center";g.textBaseline="middle";
  D.rows.forEach((row,r)=>{
    for(let i=first(row,from);i<row.length&&row[i][0]<=to;i++){
      const b=row[i],x=X(b[0]),y=r*H+1,k=(b[1]-b[0])*scale;
      g.fillStyle=D.colours[b[2]][b[3]];g.fillRect(x,y,Math.max(k,.3),H-2);
      if(k>4){g.strokeStyle=b===hover?"#d00":"#555";g.lineWidth=b===hover?2:.5;g.strokeRect(x+.25,y+.25,k-.5,H-2.5)}
      const text=String(b[4]),size=Math.min(13,(k-2)/text.length*1.6);
      if(size>=7){g.font=size+"px system-ui,sans-serif";g.fillStyle=b[2]?"#000":"#fff";g.fillText(text,x+k/2,y+H/2-.5)}
    }});
  g.fillStyle="#fff";g.fillRect(0,0,LEFT-2,h);
  g.font="12px system-ui,sans-serif";g.fillStyle="#111";g.textAlign="right";
  D.rows.forEach((_,r)=>g.fillText(r,LEFT-8,r*H+H/2));
  g.textAlign="center";g.fillStyle="#444";
  const s=step(),y=D.rows.length*H;
  for(let t=Math.max(0,Math.ceil(from/s)*s);t<=Math.min(to,D.end);t+=s){
    const x=X(t);if(x<LEFT)continue;g.fillRect(x,y,1,4);g.fillText(+t.toPrecision(6)+(t?"":" "+D.unit),x,y+14)}
}
function at(r,t){const row=D.rows[r];if(!row)return null;const b=row[first(row,t)];return b&&b[0]<=t?b:null}
function words(r,b){return D.words[b[2]]+"  "+"FBW"[b[2]]+"\\nmicrobatch "+b[4]+"\\nrank "+r+", chunk "+b[3]+", stage "+b[5]+
  "\\n"+b[0].toPrecision(6)+" to "+b[1].toPrecision(6)+" "+D.unit}
function show(r,t,x,y){
  const b=at(r,t);if(b!==hover){hover=b;draw()}
  if(!b){tip.style.display="none";return}
  tip.textContent=words(r,b);tip.style.display="block";
  tip.style.left=Math.min(x+14,window.innerWidth-230)+"px";tip.style.top=y+14+"px";
}
canvas.addEventListener("mousemove",e=>{
  const box=canvas.getBoundingClientRect();
  show(Math.floor((e.clientY-box.top)/H),(e.clientX-box.left-LEFT+view.scrollLeft)/scale,e.clientX,e.clientY)});
canvas.addEventListener("mouseleave",()=>show(-1,0,0,0));
view.addEventListener("scroll",draw);
view.addEventListener("wheel",e=>{if(Math.abs(e.deltaX)>Math.abs(e.deltaY)||e.shiftKey)return;e.preventDefault();
  setScale(scale*Math.exp(-e.deltaY/400),e.clientX-canvas.getBoundingClientRect().left)},{passive:false});
document.getElementById("in").onclick=()=>setScale(scale*1.6,view.clientWidth/2);
document.getElementById("out").onclick=()=>setScale(scale/1.6,view.clientWidth/2);
document.getElementById("fit").onclick=()=>setScale(0,0);
window.addEventListener("resize",()=>setScale(scale,0));
// start with all in view, or with numbers readable when all of it would be too fine
setScale(Math.max(least(),Math.min(most(),17/D.box)),0);
document.body.dataset.boxes=D.rows.reduce((n,r)=>n+r.length,0);
const place=location.hash.slice(1).split(",").map(Number);
if(place.length===2&&D.rows[place[0]]){
  view.scrollLeft=place[1]*scale-room()/2;draw();
  const box=canvas.getBoundingClientRect();
  show(place[0],place[1],box.left+LEFT+place[1]*scale-view.scrollLeft,box.top+place[0]*H+H/2)}
</script></body></html>
"""

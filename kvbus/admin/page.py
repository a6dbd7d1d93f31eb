"""The status page: one HTML document that reads ``/sources`` and ``/routers`` every two seconds."""

import html
from typing import Final

_NOTE: Final = "<!-- note -->"
_PAGE: Final = """<!doctype html>
<html lang="en"><head><meta charset="utf-8"><title>kvbus</title>
<meta name="viewport" content="width=device-width,initial-scale=1">
<style>
:root{color-scheme:light dark;--ok:#1a7f37;--warn:#9a6700;--bad:#cf222e;--line:#8884}
body{font:15px/1.5 system-ui,sans-serif;margin:2rem auto;max-width:72rem;padding:0 1rem}
h1{font-size:1.3rem;margin:0 0 .2rem}h2{font-size:1rem;margin:1.6rem 0 .2rem}p{margin:.2rem 0 1.2rem;opacity:.75}
table{border-collapse:collapse;width:100%;font-variant-numeric:tabular-nums}
th,td{text-align:right;padding:.35rem .6rem;border-bottom:1px solid var(--line);white-space:nowrap}
th:first-child,td:first-child,th:nth-child(2),td:nth-child(2){text-align:left}
.live{color:var(--ok)}.syncing,.gap,.waiting,.receiving{color:var(--warn)}.lost,.connecting,.stalled{color:var(--bad)}
.gone{opacity:.6}
</style></head><body>
<h1>kvbus</h1>
<p>KV-cache events, exact and rebuildable. Data: <a href="/sources">/sources</a>, <a href="/routers">/routers</a>,
<a href="/blocks">/blocks</a>, <a href="/metrics">/metrics</a>;
probes: <a href="/livez">/livez</a>, <a href="/readyz">/readyz</a>.</p>
<!-- note -->
<table id="sources"><thead><tr><th>source</th><th>state</th><th>epoch</th><th>last seq</th><th>blocks</th>
<th>batches</th><th>recovered</th><th>lost</th><th>rejected</th><th>block size</th><th>dialect</th></tr></thead>
<tbody></tbody></table>
<ul id="reasons"></ul>
<h2>routers</h2>
<table id="outputs"><thead><tr><th>output</th><th>routers</th><th>longest queue</th><th>furthest behind</th>
<th>stalled</th></tr></thead><tbody></tbody></table>
<p></p>
<table id="routers"><thead><tr><th>router</th><th>state</th><th>output</th><th>stream</th><th>topics</th><th>queued</th>
<th>behind</th><th>dropped</th><th>states sent</th></tr></thead><tbody></tbody></table>
<p id="note"></p>
<script>
const sum=o=>Object.values(o).reduce((a,b)=>a+b,0);
const table=id=>{const body=document.querySelector("#"+id+" tbody");body.replaceChildren();return body};
const seconds=s=>s?s.toFixed(1)+" s":"0";
const cell=(row,text,cls)=>{const td=row.insertCell();td.textContent=text;if(cls)td.className=cls};
async function show(){
  const note=document.getElementById("note");
  try{
    const sources=await (await fetch("/sources")).json(),routers=await (await fetch("/routers")).json();
    const body=table("sources"),why=document.getElementById("reasons");
    why.replaceChildren();
    for(const s of sources){
      for(const r of s.reasons){
        const li=document.createElement("li");li.textContent=s.name+": "+r.text+" ["+r.key+"]: "+r.do;why.append(li);
      }
      const row=body.insertRow(),c=s.counts;
      cell(row,s.name);cell(row,s.partial?s.state+" (partial)":s.state,s.state);cell(row,s.epoch);cell(row,s.last_seq);
      cell(row,Object.entries(s.blocks).map(([m,n])=>m+" "+n).join(", ")||"0");cell(row,c.batches);
      cell(row,c.recovered);cell(row,c.lost);cell(row,sum(c.rejected));cell(row,s.block_size??"");cell(row,s.dialect??"");
    }
    const outputs=new Map(),each=table("routers"),all=table("outputs");
    for(const r of routers){
      const row=each.insertRow(),o=outputs.get(r.output)??{routers:0,queued:0,behind:0,stalled:0};
      outputs.set(r.output,o);
      cell(row,r.peer);cell(row,r.left===null?r.state:"left: "+r.left,r.left===null?r.state:"gone");cell(row,r.output);
      cell(row,r.stream);cell(row,r.topics.map(t=>t||"(all)").join(", "));cell(row,r.queued);
      cell(row,seconds(r.behind_seconds));cell(row,r.dropped.batches);cell(row,r.state_sent.count);
      if(r.left!==null){row.className="gone";continue}
      o.routers++;o.queued=Math.max(o.queued,r.queued);o.behind=Math.max(o.behind,r.behind_seconds);
      if(r.state==="stalled")o.stalled++;
    }
    for(const [name,o] of outputs){
      const row=all.insertRow();
      cell(row,name);cell(row,o.routers);cell(row,o.queued);cell(row,seconds(o.behind));cell(row,o.stalled);
    }
    note.textContent=routers.length?"":"No router is connected.";
  }catch(e){note.textContent="kvbus does not answer: "+e}
}
show();setInterval(show,2000);
</script></body></html>
"""


def status_page(note: str) -> str:
    """Return the page as HTML. ``note`` says what this client may not read; empty for nothing."""
    return _PAGE.replace(_NOTE, f"<p>{html.escape(note)}</p>" if note else "")

"""A collective as a page that plays its rounds: one HTML file that needs nothing else, also without a network."""

from __future__ import annotations

import html
import json

from stretto.draw.collective import COLOURS, check_drawable, headline, snapshots, svg
from stretto.schedule.collective import Program

STYLE = """
:root { --paper:#fbfaf7; --card:#fff; --ink:#22252b; --soft:#6b7078; --line:#dcd8cd; --empty:#d5d1c6; --main:#2456a6 }
@media (prefers-color-scheme: dark) {
  :root { --paper:#15171b; --card:#1d2026; --ink:#e6e6e3; --soft:#9aa0a8; --line:#3a3f47; --empty:#4a4f57; --main:#6f9ff0 }
}
* { box-sizing:border-box } body { margin:0; background:var(--paper); color:var(--ink); font:15px/1.5 system-ui,sans-serif }
main { max-width:1180px; margin:0 auto; padding:26px 20px 60px }
h1 { font-size:24px; margin:0 } h2 { font-size:14px; margin:0 0 6px } .sub { color:var(--soft); margin:2px 0 16px }
.play { display:grid; grid-template-columns:minmax(0,1fr) 270px; gap:16px; align-items:start }
@media (max-width:860px) { .play { grid-template-columns:1fr } }
.panel { background:var(--card); border:1px solid var(--line); border-radius:12px; padding:14px }
.bar { display:flex; gap:8px; align-items:center; flex-wrap:wrap; margin-top:12px }
button { font:inherit; min-width:42px; padding:5px 10px; border-radius:8px; cursor:pointer }
button { border:1px solid var(--line); background:var(--card); color:var(--ink) }
button:hover,button:focus-visible { border-color:var(--main) }
button.go { background:var(--main); border-color:var(--main); color:#fff; min-width:86px }
input[type=range] { accent-color:var(--main) } #seek { flex:1; min-width:140px } #speed { width:80px; vertical-align:middle }
.at { font-weight:600; min-width:170px }
#stage { width:100%; height:auto; max-height:64vh; display:block } #stage text { fill:var(--ink); font-size:13px; font-weight:600 }
#stage .tray { fill:var(--card); stroke:var(--line) } #stage .cell { fill:#fff; stroke:#8d929a; stroke-width:.8 }
#stage .empty { fill:none; stroke:var(--empty); stroke-dasharray:2 2 } #stage .done { fill:none; stroke:var(--ink); stroke-width:2 }
#stage .way { fill:none; stroke-width:2; opacity:.75 } #stage .new { fill:none; stroke:var(--main); stroke-width:2.5 }
ul { list-style:none; margin:0 0 14px; padding:0; font-size:13px; max-height:250px; overflow:auto } li { padding:1px 0 }
.none { color:var(--soft) }
.sent { display:grid; grid-template-columns:52px 1fr 52px; gap:3px 8px; font-size:12px; align-items:center }
.sent i { height:9px; border-radius:4px; display:block } .sent b { font-weight:400; text-align:right; font-variant-numeric:tabular-nums }
details { margin-top:22px } summary { cursor:pointer; color:var(--soft) } details svg { max-width:100%; height:auto; border-radius:10px }
"""

SCRIPT = """
const P = JSON.parse(document.getElementById('program').textContent), NS = 'http://www.w3.org/2000/svg';
const by = id => document.getElementById(id), stage = by('stage'), last = P.shots.length - 1;
const make = (name, values, parent) => {
  const made = document.createElementNS(NS, name);
  for (const key in values) made.setAttribute(key, values[key]);
  return parent.appendChild(made);
};

// where everything is: ranks on an oval, rank 0 at the top, then clockwise
const square = P.rows > 1, cell = square ? Math.max(9, Math.min(18, 130 / P.columns)) : Math.max(8, Math.min(30, 170 / P.columns));
const tall = square ? cell : 28, wide = P.columns * cell + 10, high = P.rows * tall + 10;
const rx = Math.max(150, P.ranks * (wide + 26) / 6.2), ry = Math.max(110, Math.min(P.ranks * (high + 64) / 5, rx * 0.8));
const W = 2 * rx + wide + 40, H = 2 * ry + high + 70;
stage.setAttribute('viewBox', `0 0 ${W} ${H}`);
const spot = rank => {
  const turn = 2 * Math.PI * rank / P.ranks - Math.PI / 2, far = P.ranks > 1 ? 1 : 0;
  return [W / 2 + far * rx * Math.cos(turn), H / 2 + 12 + far * ry * Math.sin(turn)];
};
const corner = (rank, chunk) => {
  const [x, y] = spot(rank);
  return [x - wide / 2 + 6 + chunk % P.columns * cell, y - high / 2 + 6 + Math.floor(chunk / P.columns) * tall];
};
const edge = (from, to) => {  // where the line between two trays leaves the first
  const [x, y] = spot(from), [u, v] = spot(to), dx = u - x, dy = v - y;
  const t = Math.min((wide / 2 + 4) / Math.abs(dx || 1e-9), (high / 2 + 4) / Math.abs(dy || 1e-9));
  return [x + dx * t, y + dy * t];
};

const paint = (parent, x, y, starts, found, width, height) => {  // a stripe for each contribution
  make('rect', {class: 'cell', x, y, width, height, rx: 2}, parent);
  const each = width / starts.length;
  starts.forEach((source, i) => {
    if (found.includes(source)) make('rect', {x: x + i * each, y, width: each, height, fill: P.colours[source]}, parent);
  });
};
const draw = (at, fresh = new Set()) => {  // fresh: the 'rank chunk' that have just arrived
  stage.replaceChildren();
  for (let rank = 0; rank < P.ranks; rank++) {
    const [x, y] = spot(rank);
    make('circle', {cx: x - wide / 2 + 5, cy: y - high / 2 - 12, r: 5, fill: P.colours[rank]}, stage);
    make('text', {x: x - wide / 2 + 15, y: y - high / 2 - 7}, stage).textContent = P.names[rank];
    make('rect', {class: 'tray', x: x - wide / 2, y: y - high / 2, width: wide, height: high, rx: 6}, stage);
    P.starts.forEach((starts, chunk) => {
      const [x, y] = corner(rank, chunk), found = P.shots[at].held[rank + ' ' + chunk];
      const box = {x, y, width: cell - 2, height: tall - 2, rx: 2};
      if (!found) { make('rect', {class: 'empty', ...box}, stage); return; }
      paint(stage, x, y, starts, found, cell - 2, tall - 2);
      if (found.length === starts.length && P.ends[chunk].includes(rank)) make('rect', {class: 'done', ...box}, stage);
      if (fresh.has(rank + ' ' + chunk)) {
        make('rect', {class: 'new', x: x - 1.5, y: y - 1.5, width: cell + 1, height: tall + 1, rx: 2}, stage);
      }
    });
  }
};

let at = 0, moving = 0, playing = false;
const duration = () => 1500 / by('speed').value;
const fly = (round, done) => {
  const flights = P.shots[round + 1].messages.map(([src, dst, chunks, reduce]) => {
    const [x, y] = edge(src, dst), [u, v] = edge(dst, src), bend = 0.16;  // messages that cross do not lie on one line
    const d = `M${x},${y} Q${(x + u) / 2 - (v - y) * bend},${(y + v) / 2 + (u - x) * bend} ${u},${v}`;
    const way = make('path', {class: 'way', stroke: P.colours[src], d}, stage), load = make('g', {}, stage);
    const few = chunks.slice(0, 6), width = Math.min(cell - 2, 20), held = P.shots[round].held;
    few.forEach((chunk, i) => paint(load, (i - few.length / 2) * (width + 1), -9, P.starts[chunk], held[src + ' ' + chunk], width, 18));
    if (reduce) make('text', {x: few.length * (width + 1) / 2 + 3, y: 5}, load).textContent = '+';
    return [way, load, way.getTotalLength()];
  });
  const start = performance.now(), mine = ++moving;
  const step = now => {
    if (mine !== moving) return;
    const part = Math.min(1, (now - start) / duration()), eased = part < .5 ? 2 * part * part : 1 - (2 - 2 * part) ** 2 / 2;
    for (const [way, load, length] of flights) {
      const point = way.getPointAtLength(length * eased);
      load.setAttribute('transform', `translate(${point.x},${point.y})`);
    }
    part < 1 ? requestAnimationFrame(step) : done();
  };
  requestAnimationFrame(step);
};

const sentence = ([src, dst, chunks, reduce]) => {
  const what = chunks.length > 8 ? `${chunks.length} chunks` : `chunk${chunks.length > 1 ? 's' : ''} ${chunks.join(', ')}`;
  return `rank ${src} to rank ${dst}: ${what}${reduce ? ', added' : ''}`;
};
const element = (kind, text = '') => Object.assign(document.createElement(kind), {textContent: text});
const words = (at, flying) => {
  by('at').textContent = at ? `${flying ? 'round' : 'after round'} ${at} of ${last}` : 'at the start';
  by('seek').value = at;
  const said = at ? P.shots[at].messages.map(sentence) : ['press play, or the right arrow'];
  by('said').replaceChildren(...said.map(text => element('li', text)));
  const most = Math.max(...P.shots[last].sent, 1e-9);
  by('sent').replaceChildren(...P.shots[at].sent.flatMap((amount, rank) => {
    const track = element('span'), fill = track.appendChild(element('i'));
    fill.style.cssText = `background:${P.colours[rank]};width:${100 * amount / most}%`;
    return [element('span', 'rank ' + rank), track, element('b', amount.toFixed(2) + ' S')];
  }));
};

const show = (to, fresh) => { moving++; at = Math.max(0, Math.min(last, to)); draw(at, fresh); words(at); };
const stop = () => { playing = false; by('go').textContent = 'play'; };
const forward = then => {
  if (at >= last) { stop(); return; }
  draw(at);
  words(at + 1, true);
  fly(at, () => {
    show(at + 1, new Set(P.shots[at + 1].messages.flatMap(([, dst, chunks]) => chunks.map(chunk => dst + ' ' + chunk))));
    if (then) then();
  });
};
const run = () => { if (playing) forward(() => setTimeout(run, duration() / 3)); };
by('go').onclick = () => {
  if (playing) { stop(); show(at); return; }
  if (at === last) show(0);
  playing = true;
  by('go').textContent = 'pause';
  run();
};
by('first').onclick = () => { stop(); show(0); };
by('last').onclick = () => { stop(); show(last); };
by('back').onclick = () => { stop(); show(at - 1); };
by('next').onclick = () => { stop(); forward(); };
by('seek').max = last;
by('seek').oninput = event => { stop(); show(+event.target.value); };
addEventListener('keydown', event => {
  if (event.target.tagName === 'INPUT' || (event.target.tagName === 'BUTTON' && event.key === ' ')) return;
  const id = {ArrowRight: 'next', ArrowLeft: 'back', Home: 'first', End: 'last', ' ': 'go'}[event.key];
  if (id) { event.preventDefault(); by(id).click(); }
});
show(0);
"""

BUTTONS = (  # id, what it shows, what it does
    ("first", "|&#x25C0;", "to the start (Home)"),
    ("back", "&#x25C0;", "one round back (left arrow)"),
    ("go", "play", "play or pause (space)"),
    ("next", "&#x25B6;", "one round on (right arrow)"),
    ("last", "&#x25B6;|", "to the end (End)"),
)


def page(program: Program) -> str:
    """The page as one text. Raises JobError if the program is too large to be shown."""
    check_drawable(program)
    title, told = (html.escape(text) for text in headline(program))
    data = json.dumps(_facts(program), separators=(",", ":"))
    buttons = "".join(f'<button id="{id_}" class="{id_}" title="{does}">{shows}</button>' for id_, shows, does in BUTTONS)
    return (
        f'<!doctype html><html lang="en"><head><meta charset="utf-8"><meta name="viewport" content="width=device-width,initial-scale=1">'
        f"<title>{title} - stretto</title><style>{STYLE}</style></head><body><main><h1>{title}</h1>"
        f'<p class="sub">{told}</p><div class="play"><div class="panel"><svg id="stage" role="img" aria-label="{title}"></svg>'
        f'<div class="bar">{buttons}<span id="at" class="at"></span><input id="seek" type="range" min="0" value="0" aria-label="round">'
        f'<label>speed <input id="speed" type="range" min="0.3" max="4" step="0.1" value="1"></label></div></div>'
        f'<div class="panel"><h2>In this round</h2><ul id="said"></ul><h2>Sent so far (S is the whole buffer)</h2>'
        f'<div id="sent" class="sent"></div></div></div>'
        f"<details><summary>All rounds in one picture</summary>{svg(program)}</details></main>"
        f'<script type="application/json" id="program">{data}</script><script>{SCRIPT}</script></body></html>\n'
    )


def _facts(program: Program) -> dict[str, object]:
    """What the script needs: of every moment what each rank holds, what was sent just before it, and how much in all."""
    sent = [0.0] * program.ranks
    shots: list[dict[str, object]] = []
    for shot in snapshots(program):
        messages: list[tuple[int, int, tuple[int, ...], bool]] = []
        if shot.number >= 0:
            for src, turns in enumerate(program.turns):
                messages += [(src, message.peer, message.chunks, message.reduce) for message in turns[shot.number].sends]
        for src, _, chunks, _ in messages:
            sent[src] += program.share() * len(chunks)
        held = {f"{rank} {chunk}": found for (rank, chunk), found in shot.held.items()}
        shots.append({"held": held, "messages": messages, "sent": list(sent)})
    columns = program.ranks * program.pieces if program.promise.parts == "pairs" else program.chunks
    size = program.ranks // program.nodes
    return {
        "ranks": program.ranks,
        "names": [f"rank {rank}" + (f", node {rank // size}" if program.nodes > 1 else "") for rank in range(program.ranks)],
        "columns": columns,
        "rows": program.chunks // columns,
        "colours": COLOURS[: program.ranks],
        "starts": [program.starts(chunk) for chunk in range(program.chunks)],
        "ends": [program.ends(chunk) for chunk in range(program.chunks)],
        "shots": shots,
    }

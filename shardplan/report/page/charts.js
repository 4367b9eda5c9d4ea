// The charts: a treemap of seconds, memory over the step, the timeline. Each is drawn anew where its width changes.

const charts = []; // {box, draw: width -> svg, width}

/** A box for a chart; `draw` makes its SVG for a width in pixels. */
function chart(draw) {
  const box = el("div", { class: "chart" });
  charts.push({ box, draw, width: 0 });
  return box;
}

function drawAll() {
  const draw = () => {
    const due = charts.filter((one) => Math.round(one.box.clientWidth) !== one.width);
    for (const one of due) redraw(one);
    if (due.length) search(document.getElementById("search").value);
  };
  draw();
  new ResizeObserver(draw).observe(document.getElementById("main"));
}

function redraw(one) {
  one.width = Math.round(one.box.clientWidth);
  const old = new Set(one.box.querySelectorAll("*"));
  for (let i = searched.length - 1; i >= 0; i--) if (old.has(searched[i].element)) searched.splice(i, 1);
  one.box.replaceChildren(one.draw(Math.max(one.width, 200)));
}

/** Patterns over the colours of kinds, for readers who cannot tell colours apart. */
function patterns(prefix) {
  const lines = {
    rising: "M-1 1 L1 -1 M0 8 L8 0 M7 9 L9 7", falling: "M-1 7 L1 9 M0 0 L8 8 M7 -1 L9 1", crossed: "M0 8 L8 0 M0 0 L8 8",
    level: "M0 4 H8", upright: "M4 0 V8", dots: "M2 2 h1.5 M6 6 h1.5",
  };
  return svg("defs", {}, Object.entries(lines).map(([name, d]) =>
    svg("pattern", { id: `${prefix}-${name}`, width: 8, height: 8, patternUnits: "userSpaceOnUse" },
      svg("path", { d, stroke: "var(--hatch)", "stroke-width": 1.5, fill: "none" }))));
}

function kindLegend(kinds, prefix) {
  const swatch = (kind) => {
    const [colour, pattern] = kindLook(kind);
    return svg("svg", { width: 22, height: 14, "aria-hidden": "true" }, patterns(`${prefix}-${kind.replace(/\W/g, "")}`),
      svg("rect", { width: 22, height: 14, fill: `var(${colour})` }),
      pattern ? svg("rect", { width: 22, height: 14, fill: `url(#${prefix}-${kind.replace(/\W/g, "")}-${pattern})` }) : null);
  };
  return el("ul", { class: "legend" }, kinds.map((kind) => el("li", {}, swatch(kind), kind)));
}

/** Says in `line` what the part of a chart under the pointer or the focus is. */
function reads(drawn, line) {
  const show = (event) => {
    const tip = event.target.closest?.("[data-tip]")?.dataset.tip;
    if (tip) line.textContent = tip;
  };
  drawn.addEventListener("pointerover", show);
  drawn.addEventListener("focusin", show);
  return drawn;
}

/** Makes parts one stop of the tab order: arrow keys go from one to the next. */
function walkable(drawn, parts) {
  parts.forEach((part, i) => part.setAttribute("tabindex", i ? "-1" : "0"));
  drawn.addEventListener("keydown", (event) => {
    const at = parts.indexOf(document.activeElement);
    const to = { ArrowRight: at + 1, ArrowDown: at + 1, ArrowLeft: at - 1, ArrowUp: at - 1, Home: 0, End: parts.length - 1 }[event.key];
    if (at < 0 || to === undefined || !parts[to]) return;
    event.preventDefault();
    parts[at].setAttribute("tabindex", "-1");
    parts[to].setAttribute("tabindex", "0");
    parts[to].focus();
  });
  return drawn;
}

// -- the treemap -----------------------------------------------------------------------------------------------------------

/** Rectangles for values (largest first) that fill a box, as square as they can be (Bruls, Huizing, van Wijk 2000). */
function squarified(values, x, y, w, h) {
  const total = values.reduce((a, b) => a + b, 0);
  const scale = total > 0 ? (w * h) / total : 0;
  const made = [];
  let row = [];
  const worst = (areas, side) => {
    const sum = areas.reduce((a, b) => a + b, 0);
    return Math.max(...areas.map((area) => Math.max((side * side * area) / (sum * sum), (sum * sum) / (side * side * area))));
  };
  const lay = () => {
    const sum = row.reduce((a, b) => a + b, 0);
    const along = w >= h ? h : w;
    const thick = along > 0 ? sum / along : 0;
    let at = 0;
    for (const area of row) {
      const length = thick > 0 ? area / thick : 0;
      made.push(w >= h ? [x, y + at, thick, length] : [x + at, y, length, thick]);
      at += length;
    }
    if (w >= h) [x, w] = [x + thick, w - thick];
    else [y, h] = [y + thick, h - thick];
    row = [];
  };
  for (const value of values) {
    const area = value * scale;
    const side = Math.min(w, h);
    if (row.length && worst([...row, area], side) > worst(row, side)) lay();
    row.push(area);
  }
  if (row.length) lay();
  return made;
}

/** The parts of a step by layer: [{layer, layers, seconds, parts}], the largest first. */
function byLayer(parts) {
  const found = new Map();
  for (const part of parts) {
    const one = found.get(part.layer) ?? { layer: part.layer, layers: 0, seconds: 0, parts: [] };
    one.seconds += part.seconds;
    one.layers = Math.max(one.layers, part.layers);
    one.parts.push(part);
    found.set(part.layer, one);
  }
  return [...found.values()].sort((a, b) => b.seconds - a.seconds);
}

function treemap(data) {
  const total = data.parts.reduce((sum, part) => sum + part.seconds, 0);
  const readout = el("p", { class: "readout" }, "Point at a part, or go to it with Tab and the arrow keys.");
  const box = chart((width) => reads(drawTreemap(data, total, width), readout));
  const kinds = Object.keys(KINDS).filter((kind) => data.parts.some((part) => part.kind === kind));
  const columns = [
    { name: "layer", by: (p) => p.layer, cell: (p) => layerName(p.layer, p.layers) },
    { name: "kind", by: (p) => p.kind, cell: (p) => kindChip(p.kind) },
    { name: "source line", by: (p) => p.source, cell: (p) => sourceLine(p.source) },
    { name: "seconds", number: true, by: (p) => p.seconds, cell: (p) => seconds(p.seconds) },
    { name: "share", number: true, by: (p) => p.seconds, cell: (p) => percent(p.seconds, total) },
  ];
  const asTable = el("details", {}, el("summary", {}, "The same as a table"), table("Seconds", columns, data.parts, partText, "parts of the step"));
  const f = data.figures;
  const about = `Where the step's seconds go, by layer (named scope, else function), kind and source line. The parts add up to ${seconds(total)}: ` +
    `communication that hides behind compute is counted too, so the step itself takes ${seconds(f.step_time_s)}.`;
  return section("seconds", "Seconds", about, kindLegend(kinds, "legend"), box, readout, asTable);
}

function layerName(layer, layers) {
  return layers > 1 ? `${layer} (${layers} layers)` : layer;
}

function partText(part) {
  return [part.layer, part.kind, part.source].join(" ");
}

const HEAD = 17; // pixels for the name of a layer

function drawTreemap(data, total, width) {
  const height = Math.max(320, Math.min(560, width * 0.5));
  const label = `Treemap of ${seconds(total)}`;
  const drawn = svg("svg", { viewBox: `0 0 ${width} ${height}`, height, role: "group", "aria-label": label }, patterns("map"));
  const layers = byLayer(data.parts);
  const tiles = [];
  squarified(layers.map((one) => one.seconds), 0, 0, width, height).forEach(([x, y, w, h], i) => {
    const layer = layers[i];
    const head = h > 2.2 * HEAD && w > 34 ? HEAD : 0;
    if (head) drawn.append(fitted(`${layerName(layer.layer, layer.layers)} ${seconds(layer.seconds)}`, x + 3, y + 13, w - 6, 7, { "font-weight": 600 }));
    const inside = squarified(layer.parts.map((part) => part.seconds), x + 1, y + head + 1, Math.max(0, w - 3), Math.max(0, h - head - 3));
    inside.forEach((place, j) => tiles.push(tile(layer.parts[j], total, place)));
  });
  drawn.append(...tiles);
  return walkable(drawn, tiles);
}

function tile(part, total, [x, y, w, h]) {
  const [colour, pattern] = kindLook(part.kind);
  const tip = `${layerName(part.layer, part.layers)}: ${part.kind}, ${seconds(part.seconds)} (${percent(part.seconds, total)}) at ${part.source || "many lines"}`;
  const box = { x, y, width: Math.max(0, w - 1), height: Math.max(0, h - 1) };
  const ink = part.kind === "forward compute" ? "#ffffff" : "#000000";
  const look = { style: `fill: ${ink}; stroke: var(${colour})` };
  const lines = h > 15 && w > 44 ? [fitted(seconds(part.seconds), x + 4, y + 13, w - 8, 6.4, look)] : [];
  if (h > 29 && w > 60) lines.push(fitted(shortSource(part.source).replace(/ \(.*/, ""), x + 4, y + 26, w - 8, 6.4, look));
  if (h > 42 && w > 80) lines.push(fitted(part.kind, x + 4, y + 39, w - 8, 6.4, look));
  const made = svg("g", { class: "tile", role: "img", "aria-label": tip, "data-tip": tip },
    svg("rect", { ...box, fill: `var(${colour})` }), pattern ? svg("rect", { ...box, fill: `url(#map-${pattern})` }) : null, lines);
  return searchable(made, "tiles", partText(part), false);
}

/** Text that is cut to a width, given the width of a letter; nothing where hardly a word would be left. */
function fitted(words, x, y, width, letter, attributes = {}) {
  const room = Math.floor(width / letter);
  const text = words.length <= room ? words : room >= 4 ? `${words.slice(0, room - 1)}\u2026` : "";
  return svg("text", { x, y, ...attributes }, text);
}

// -- memory ----------------------------------------------------------------------------------------------------------------

function memory(data) {
  const curve = data.memory;
  const peak = data.figures.peak_bytes;
  const readout = el("p", { class: "readout" }, "Point into the curve, or go to it with Tab and move with the arrow keys.");
  const box = chart((width) => drawMemory(data, width, readout));
  const [first, ...rest] = curve.peak;
  const held = el("ul", {}, rest.map((line) => el("li", {}, withoutFolders(line.trim()))));
  const about = `What a device holds at each op of the step, in the order of the program. The peak is ${size(peak)} of ${size(data.figures.memory_limit)}.`;
  return section("memory", "Memory", about, box, readout, el("p", {}, `${withoutFolders(first)}:`), held);
}

const PAD = { left: 62, right: 12, top: 26, bottom: 26 };

function drawMemory(data, width, readout) {
  const curve = data.memory;
  const { peak_bytes: peak, memory_limit: limit } = data.figures;
  const height = 250;
  const top = Math.max(peak, limit <= 2.5 * peak ? limit : 0, 1) * 1.08;
  const [w, h] = [width - PAD.left - PAD.right, height - PAD.top - PAD.bottom];
  const x = (op) => PAD.left + (w * op) / Math.max(curve.length, 1);
  const y = (bytes) => PAD.top + h * (1 - bytes / top);
  const ends = [...curve.ops.slice(1), curve.length];
  const path = curve.ops.map((op, i) => `L${x(op).toFixed(1)} ${y(curve.held[i]).toFixed(1)} H${x(ends[i]).toFixed(1)}`).join(" ");
  const at = curve.ops.findLastIndex((op) => op <= curve.peak_op);
  const [px, py] = [x(curve.peak_op), y(curve.held[at] ?? 0)];
  const cursor = svg("line", { class: "axis", y1: PAD.top, y2: PAD.top + h, x1: px, x2: px, "stroke-dasharray": "2 2" });
  const drawn = svg("svg", {
    viewBox: `0 0 ${width} ${height}`, height, tabindex: 0, role: "slider", "aria-label": "Memory over the ops of the step",
    "aria-valuemin": 0, "aria-valuemax": Math.max(0, curve.ops.length - 1), "aria-valuenow": at,
  },
  svg("path", { d: `M${x(0)} ${y(0)} ${path} V${y(0)} Z`, fill: "var(--sky)", stroke: "var(--blue)", "stroke-width": 1 }),
  memoryAxis(width, h, top, y), memoryMarks(curve, limit, top, width, h, x, y), cursor,
  svg("circle", { cx: px, cy: py, r: 4, fill: "var(--red)", stroke: "var(--ink)" }),
  peakName(`peak ${size(peak)}`, px, py, width));
  const move = (i) => {
    const to = Math.max(0, Math.min(curve.ops.length - 1, i));
    const words = `${size(curve.held[to])} at op ${curve.ops[to]}: ${curve.lines[to]}`;
    cursor.setAttribute("x1", x(curve.ops[to]));
    cursor.setAttribute("x2", x(curve.ops[to]));
    drawn.setAttribute("aria-valuenow", to);
    drawn.setAttribute("aria-valuetext", words);
    readout.textContent = words;
  };
  drawn.addEventListener("pointermove", (event) => {
    const op = ((event.clientX - drawn.getBoundingClientRect().left - PAD.left) / w) * curve.length;
    move(curve.ops.findLastIndex((start) => start <= op));
  });
  drawn.addEventListener("keydown", (event) => {
    const now = Number(drawn.getAttribute("aria-valuenow"));
    const to = { ArrowRight: now + 1, ArrowUp: now + 1, ArrowLeft: now - 1, ArrowDown: now - 1, PageUp: now + 20, PageDown: now - 20, Home: 0, End: Infinity }[event.key];
    if (to === undefined) return;
    event.preventDefault();
    move(to);
  });
  return drawn;
}

function peakName(words, px, py, width) {
  const left = px > width / 2;
  return svg("text", { x: px + (left ? -8 : 8), y: py - 7, "text-anchor": left ? "end" : "start", "font-weight": 600 }, words);
}

function memoryAxis(width, h, top, y) {
  const step = 2 ** Math.floor(Math.log2(top / 3));
  const bytes = Array.from({ length: Math.floor(top / step) + 1 }, (_, i) => i * step);
  return bytes.map((b) => svg("g", {},
    svg("line", { class: "axis", x1: PAD.left, x2: width - PAD.right, y1: y(b), y2: y(b), opacity: b ? 0.35 : 1 }),
    svg("text", { class: "faint", x: PAD.left - 6, y: y(b) + 4, "text-anchor": "end" }, size(b))));
}

/** The limit, and where the backward pass begins. */
function memoryMarks(curve, limit, top, width, h, x, y) {
  const made = [];
  if (limit <= top) {
    made.push(svg("line", { x1: PAD.left, x2: width - PAD.right, y1: y(limit), y2: y(limit), stroke: "var(--red)", "stroke-width": 1.5, "stroke-dasharray": "7 3" }),
      svg("text", { x: PAD.left + 4, y: y(limit) - 4 }, `limit ${size(limit)}`));
  }
  if (curve.backward !== null) {
    const at = x(curve.backward);
    made.push(svg("line", { class: "axis", x1: at, x2: at, y1: PAD.top, y2: PAD.top + h }),
      svg("text", { class: "faint", x: at + (at > width - 110 ? -4 : 4), y: PAD.top + h + 16, "text-anchor": at > width - 110 ? "end" : "start" }, "backward pass"));
  }
  return [...made, svg("text", { class: "faint", x: PAD.left, y: PAD.top + h + 16 }, "ops")];
}

// -- the timeline ----------------------------------------------------------------------------------------------------------

function timeline(data) {
  const shown = data.timeline;
  const how = shown.whole ? "Each bar is a task." : "Each bar is a column of time, as high as the stream is busy in it, named by the task that takes most of it.";
  const about = `One step as simulated: ${seconds(shown.step_time_s)}, ${count(shown.tasks, "task")}; ${seconds(shown.exposed_s)} of communication without compute beside it. All devices run alike. ${how}`;
  const legend = kindLegend(["forward compute", "reduce-scatter", "all-reduce"], "streams");
  ["computes", "sends beside compute", "sends alone (exposed)"].forEach((words, i) => legend.children[i].lastChild.replaceWith(words));
  return section("timeline", "Timeline", about, legend, timelineChart(data), exposedTable(shown));
}

/** The chart of a timeline, with buttons and keys that zoom and move. */
function timelineChart(data) {
  const shown = data.timeline;
  const readout = el("p", { class: "readout" }, "Point at a bar. Go to the chart with Tab: + and - zoom, the arrow keys move.");
  const view = { from: 0, to: shown.step_time_s };
  const box = chart((width) => reads(drawTimeline(data, view, width), readout));
  const act = (name) => {
    zoom(view, shown.step_time_s, name);
    redraw(charts.find((one) => one.box === box));
    search(document.getElementById("search").value);
  };
  box.addEventListener("keydown", (event) => {
    const name = { "+": "in", "=": "in", "-": "out", ArrowLeft: "left", ArrowRight: "right", Home: "all" }[event.key];
    if (!name || event.ctrlKey || event.metaKey) return;
    event.preventDefault();
    act(name);
    box.firstElementChild.focus();
  });
  const button = (name, sign, words) => {
    const made = el("button", { type: "button", class: "more", "aria-label": words, title: words }, sign);
    made.addEventListener("click", () => act(name));
    return made;
  };
  const tools = el("div", { class: "tools" }, button("in", "+", "Zoom in"), button("out", "\u2212", "Zoom out"), button("left", "\u25C0", "Earlier"),
    button("right", "\u25B6", "Later"), button("all", "whole step", "Show the whole step"));
  return [tools, box, readout];
}

function exposedTable(shown) {
  if (!shown.exposed.length) return el("p", {}, "No collective is exposed.");
  const columns = [
    { name: "collective", by: (e) => e.name, cell: (e) => kindChip(e.name) },
    { name: "over", by: (e) => e.axes.join(), cell: (e) => e.axes.join(", ") },
    { name: "times", number: true, by: (e) => e.times, cell: (e) => String(e.times) },
    { name: "exposed", number: true, by: (e) => e.exposed_s, cell: (e) => seconds(e.exposed_s) },
    { name: "source line", by: (e) => e.source, cell: (e) => sourceLine(e.source) },
  ];
  const text = (e) => [e.name, e.axes.join(" "), e.source].join(" ");
  return [el("h3", {}, "Exposed longest"), table("Exposed longest", columns, shown.exposed, text, "exposed collectives")];
}

function zoom(view, whole, how) {
  const span = view.to - view.from;
  const middle = (view.from + view.to) / 2;
  const next = { in: span / 2, out: Math.min(whole, span * 2), all: whole }[how] ?? span;
  const centre = how === "left" ? middle - span / 3 : how === "right" ? middle + span / 3 : middle;
  view.from = Math.max(0, Math.min(whole - next, centre - next / 2));
  view.to = view.from + next;
}

const LANE = 44; // pixels for a stream

function drawTimeline(data, view, width) {
  const shown = data.timeline;
  const height = shown.streams.length * LANE + 24;
  const x = (at) => (width * (at - view.from)) / Math.max(view.to - view.from, 1e-15);
  const drawn = svg("svg", {
    viewBox: `0 0 ${width} ${height}`, height, tabindex: 0, role: "img",
    "aria-label": `Timeline of ${shown.streams.map((s) => `${s.name}, busy ${percent(s.busy_s, shown.step_time_s)}`).join("; ")}`,
  }, patterns("time"));
  shown.streams.forEach((stream, row) => drawn.append(...lane(shown, stream, row, view, x)));
  for (const part of [0, 0.25, 0.5, 0.75]) {
    const at = view.from + part * (view.to - view.from);
    drawn.append(svg("line", { class: "axis", x1: x(at), x2: x(at), y1: 0, y2: height - 16, opacity: 0.4 }),
      svg("text", { class: "faint", x: x(at) + 3, y: height - 4 }, seconds(at)));
  }
  return drawn;
}

/** The bars of a stream: exposed communication below, what hides above it. */
function lane(shown, stream, row, view, x) {
  const made = [svg("text", { x: 2, y: row * LANE + 12, "font-weight": 600 }, `${stream.name}: busy ${percent(stream.busy_s, shown.step_time_s)}`)];
  const bottom = (row + 1) * LANE - 3;
  const tall = LANE - 20;
  stream.start_s.forEach((start, i) => {
    const end = start + stream.seconds[i];
    if (end < view.from || start > view.to) return;
    const [left, right] = [x(Math.max(start, view.from)), x(Math.min(end, view.to))];
    const words = shown.labels[stream.label[i]];
    const alone = stream.exposed?.[i] > 0 ? `, exposed in ${percent(stream.exposed[i], stream.busy[i])} of it` : "";
    const tip = `${words}: from ${seconds(start)}, ${seconds(stream.seconds[i])}${alone}`;
    const bar = (from, to, kind) => {
      if (to <= from) return;
      const [colour, pattern] = kindLook(kind);
      const place = { x: left, width: Math.max(0.5, right - left), y: bottom - tall * to, height: tall * (to - from), "data-tip": tip };
      made.push(searchable(svg("rect", { ...place, class: "bar", fill: `var(${colour})` }), "bars", words, false));
      if (pattern && right - left > 3) made.push(svg("rect", { ...place, fill: `url(#time-${pattern})` }));
    };
    if (stream.kinds) bar(0, 1, stream.kinds[i]); // a program or a transfer of a plan with groups
    else if (!stream.communicates) bar(0, stream.busy[i], "forward compute");
    else {
      bar(0, stream.exposed[i], "all-reduce");
      bar(stream.exposed[i], stream.busy[i], "reduce-scatter");
    }
  });
  return made;
}

// Tables whose columns sort, by click or with Enter on their headings: arrays, collectives, baselines.

const ROWS = 60; // rows that are shown at first; the button below shows all

/**
 * A table in a box that scrolls by itself. Columns are {name, cell: row -> child or children, by: row -> number or text, number}.
 * `text` makes the text that the search looks through.
 */
function table(label, columns, rows, text, group) {
  const body = el("tbody");
  const heads = columns.map((column) => el("th", { scope: "col", class: column.number ? "number" : null },
    column.by ? el("button", { type: "button" }, column.name) : column.name));
  const made = rows.map((row) => {
    const cells = columns.map((column) => el("td", { class: [column.number && "number", column.kind].filter(Boolean).join(" ") || null }, column.cell(row)));
    return { row, line: searchable(el("tr", {}, cells), group, text(row)) };
  });
  heads.forEach((head, i) => head.firstElementChild?.addEventListener("click", () => sortBy(heads, head, columns[i], made, body)));
  body.append(...made.map((one) => one.line));
  const whole = el("table", { "aria-label": label, class: columns.some((column) => column.kind === "words") ? "many" : null }, el("thead", {}, el("tr", {}, heads)), body);
  const box = el("div", { class: "wide", tabindex: "0", role: "region", "aria-label": `${label}, scrolls sideways` }, whole);
  return rows.length > ROWS ? [box, foldRows(body, rows.length)] : [box];
}

/** Sorts by a column: numbers from large to small at first, words from A to Z; the other way when pressed again. */
function sortBy(heads, head, column, made, body) {
  const before = head.getAttribute("aria-sort");
  heads.forEach((one) => one.removeAttribute("aria-sort"));
  const falling = before ? before === "ascending" : Boolean(column.number);
  head.setAttribute("aria-sort", falling ? "descending" : "ascending");
  const order = (a, b) => (a < b ? -1 : a > b ? 1 : 0);
  made.sort((a, b) => (falling ? -1 : 1) * order(column.by(a.row), column.by(b.row)));
  body.append(...made.map((one) => one.line));
}

/** Shows the first rows of a long table until its button is pressed; a search looks through all of them. */
function foldRows(body, rows) {
  body.classList.add("folded");
  const button = el("button", { type: "button", class: "more" }, `Show all ${rows} rows`);
  button.addEventListener("click", () => {
    body.classList.remove("folded");
    button.remove();
  });
  return button;
}

// -- arrays ----------------------------------------------------------------------------------------------------------------

function arrays(data) {
  const { axes, own } = data;
  const columns = arrayColumns(axes);
  if (own) columns.push({ name: "yours", by: (a) => own.specs[a.first] ?? "", cell: (a) => path(own.specs[a.first] ?? "whole") });
  const about = "Equal arrays share a row, so equal layers are folded; open a row for the reasons. The cost of another layout is that of " +
    "the same plan with this one layout changed and all others held: seconds more in a step.";
  return section("arrays", "Arrays", about, axisLegend(axes), table("Arrays", columns, data.arrays, (a) => arrayText(a, axes), "arrays"));
}

function axisLegend(axes) {
  return el("ul", { class: "legend" }, axes.map((axis, i) =>
    el("li", {}, svg("svg", { width: 22, height: 12, "aria-hidden": "true" }, cutLine(i, 0, 6, 22, 6)), `cut over ${axis.name} (${axis.size}), for ${axis.purpose}`)));
}

/** What the search looks through of an array. */
function arrayText(a, axes) {
  const cutBy = a.cuts.flat().map((i) => axes[i].name).join(" ");
  return [a.pattern, a.first, a.spec, a.dtype, a.shape.join("x"), cutBy, a.why].join(" ");
}

function arrayColumns(axes) {
  return [
    { name: "array", kind: "words", by: (a) => a.pattern, cell: (a) => arrayName(a) },
    { name: "how it is cut", kind: "cut", cell: (a) => [glyph(a), " ", shapeOf(a, axes)] },
    { name: "spec", by: (a) => a.spec, cell: (a) => path(a.spec) },
    { name: "in all", number: true, by: (a) => a.nbytes, cell: (a) => size(a.nbytes) },
    { name: "on a device", number: true, by: (a) => a.device_bytes, cell: (a) => size(a.device_bytes) },
    { name: "next-best layout", cell: (a) => (a.others.length ? path(a.others[0].spec) : "no other") },
    { name: "would cost", number: true, by: (a) => a.others[0]?.more_s ?? Infinity, cell: (a) => costOf(a.others[0]) },
  ];
}

function arrayName(a) {
  const others = a.others.map((o) => el("li", {}, path(o.spec), `: ${costOf(o)} a step`));
  const inside = [el("pre", {}, a.why), others.length ? el("h3", {}, "Other layouts, all else held") : null, others.length ? el("ul", {}, others) : null];
  const times = a.count > 1 ? ` (${count(a.count, "array")})` : "";
  return el("details", {}, el("summary", {}, path(a.pattern), times), inside);
}

function costOf(other) {
  if (!other) return "-";
  if (Math.abs(other.more_s) < 1e-9) return "as fast";
  return (other.more_s > 0 ? "+" : "") + seconds(other.more_s);
}

/** The dims of an array, each with the axes that cut it: "8192 / gpu 8". */
function shapeOf(a, axes) {
  const dims = a.shape.map((n, d) => el("span", {}, d ? el("span", { class: "by" }, "x") : null, String(n),
    a.cuts[d]?.length ? [el("span", { class: "by" }, "/"), a.cuts[d].map((i) => axisChip(axes[i], i))] : null));
  return el("span", { class: "shape" }, `${a.dtype} `, dims.length ? dims : "scalar");
}

function cutLine(axis, x1, y1, x2, y2) {
  return svg("line", { x1, y1, x2, y2, stroke: axisColour(axis), "stroke-width": 2, "stroke-dasharray": AXIS_DASHES[axis % AXIS_DASHES.length] || null });
}

/** A small picture of an array: its two most telling dims, with a line for each cut. */
function glyph(a) {
  const order = a.shape.map((_, d) => d).sort((x, y) => (a.cuts[y].length > 0) - (a.cuts[x].length > 0) || a.shape[y] - a.shape[x] || x - y);
  const [down, across] = order.length > 1 ? order.slice(0, 2).sort((x, y) => x - y) : [null, order[0]];
  const [w, h] = [46, 26];
  const lines = [];
  const add = (d, vertical) => (a.cuts[d] ?? []).forEach((axis, i) => {
    for (let k = 1; k <= 3; k += 2 - (i % 2)) { // a few lines stand for the cuts of an axis
      const at = (k / 4 + i / 24) * (vertical ? w : h);
      lines.push(vertical ? cutLine(axis, at, 0, at, h) : cutLine(axis, 0, at, w, at));
    }
  });
  if (across !== undefined) add(across, true);
  if (down !== null) add(down, false);
  return svg("svg", { width: w + 2, height: h + 2, viewBox: `-1 -1 ${w + 2} ${h + 2}`, "aria-hidden": "true", style: "vertical-align: middle" },
    svg("rect", { width: w, height: h, fill: "var(--panel)", stroke: "var(--grey)" }), lines);
}

// -- collectives -----------------------------------------------------------------------------------------------------------

function collectives(data) {
  const f = data.figures;
  const about = data.collectives.length
    ? `A device sends ${size(f.communication_bytes)} in a step, in ${seconds(f.communication_s)}, of which ${seconds(f.exposed_s)} cannot hide behind compute. Equal collectives of equal layers share a row.`
    : "Nothing is communicated: every device works on its own.";
  return section("collectives", "Collectives", about, collectiveTable("Collectives", data.collectives, data.axes, f.communication_s));
}

function collectiveTable(label, rows, axes, total) {
  if (!rows.length) return null;
  const columns = [
    { name: "collective", by: (c) => c.kind, cell: (c) => [kindChip(c.kind), c.program ? el("div", { class: "about" }, c.program) : null] },
    { name: "over", kind: "over", by: (c) => c.axes.join(), cell: (c) => c.axes.map((name) => axisNamed(axes, name)) },
    { name: "times", number: true, by: (c) => c.times, cell: (c) => String(Number(c.times.toPrecision(6))) },
    { name: "bytes of one", number: true, by: (c) => c.nbytes, cell: (c) => size(c.nbytes) },
    { name: "sent in a step", number: true, by: (c) => c.wire_bytes, cell: (c) => size(c.wire_bytes) },
    { name: "seconds", number: true, by: (c) => c.seconds, cell: (c) => `${seconds(c.seconds)} (${percent(c.seconds, total)})` },
    { name: "exposed", number: true, by: (c) => c.exposed_s, cell: (c) => seconds(c.exposed_s) },
    { name: "source line", by: (c) => c.source, cell: (c) => sourceLine(c.source) },
    { name: "moves", kind: "words", by: (c) => c.arrays[0] ?? "", cell: (c) => namesOf(c.arrays) },
  ];
  const text = (c) => [c.kind, c.axes.join(" "), c.program, c.source, ...c.arrays].join(" ");
  return table(label, columns, rows, text, "collectives");
}

function namesOf(names) {
  if (!names.length) return "a value between ops";
  const first = path(names[0]);
  if (names.length === 1) return first;
  return el("details", {}, el("summary", {}, first, ` and ${names.length - 1} more`), el("pre", {}, names.slice(1).join("\n")));
}

function axisNamed(axes, name) {
  const number = axes.findIndex((axis) => axis.name === name);
  return number < 0 ? name : axisChip(axes[number], number);
}

function kindChip(kind) {
  return el("span", { class: "chip", style: `--mark: var(${kindLook(kind)[0]})` }, kind);
}

// -- baselines -------------------------------------------------------------------------------------------------------------

function baselines(data) {
  const own = data.own;
  const rows = data.baselines.map((row, i) => ({ ...row, look: i ? "other" : "" }));
  if (own) rows.splice(1, 0, { ...own, name: "your sharding", look: "own" });
  const plan = rows[0].step_time_s;
  const most = Math.min(Math.max(...rows.map((row) => row.step_time_s)), 6 * plan) || 1; // one very slow row would flatten all others
  const bar = (row) => el("i", { class: row.fits ? row.look || null : "unfit", style: `width: ${Math.min(100, (100 * row.step_time_s) / most)}%` });
  const columns = [
    { name: "plan", by: (b) => b.name, cell: (b) => b.name },
    { name: "step time", number: true, by: (b) => b.step_time_s, cell: (b) => seconds(b.step_time_s) },
    { name: "ratio", number: true, by: (b) => b.step_time_s, cell: (b) => (plan ? `${(b.step_time_s / plan).toFixed(2)}x` : "-") },
    { name: "", kind: "barcell", cell: bar },
    { name: "sent", number: true, by: (b) => b.communication_bytes, cell: (b) => size(b.communication_bytes) },
    { name: "peak memory", number: true, by: (b) => b.peak_bytes, cell: (b) => size(b.peak_bytes) },
    { name: "fits", by: (b) => Number(b.fits), cell: (b) => (b.fits ? "yes" : "no") },
  ];
  const reasons = new Map();
  data.left_out.forEach(([name, reason]) => reasons.set(reason, [...(reasons.get(reason) ?? []), name]));
  const missing = [...reasons].map(([reason, names]) => el("p", { class: "about" }, `Not possible: ${names.join(", ")} (${reason}).`));
  const about = "Shardings that people use today, each at its best, in the same cost model. Hatched bars do not fit into memory; " +
    "bars end at six times the plan's step.";
  return section("baselines", "Baselines", about, table("Baselines", columns, rows, (b) => b.name, "plans"), missing, own ? losses(own) : null);
}

/** Where the user's own sharding loses against the plan. */
function losses(own) {
  const columns = [
    { name: "arrays", kind: "words", by: (l) => l.pattern, cell: (l) => [path(l.pattern), l.together > l.count ? ` with ${l.together - l.count} other${l.together > l.count + 1 ? "s" : ""}` : null] },
    { name: "yours", cell: (l) => path(l.given) },
    { name: "instead", cell: (l) => path(l.instead) },
    { name: "gains", number: true, by: (l) => l.seconds, cell: (l) => seconds(l.seconds) },
    { name: "sends less", number: true, by: (l) => l.bytes, cell: (l) => size(l.bytes) },
    { name: "most of it at", by: (l) => l.source, cell: (l) => sourceLine(l.source) },
  ];
  const unasked = [
    { name: "collective", by: (u) => u.kind, cell: (u) => kindChip(u.kind) },
    { name: "bytes", number: true, by: (u) => u.bytes, cell: (u) => size(u.bytes) },
    { name: "seconds", number: true, by: (u) => u.seconds, cell: (u) => seconds(u.seconds) },
    { name: "moves", kind: "words", by: (u) => u.tensor, cell: (u) => path(u.tensor) },
    { name: "source line", by: (u) => u.source, cell: (u) => sourceLine(u.source) },
  ];
  const said = (l) => [l.pattern, l.given, l.instead, l.source].join(" ");
  return [
    el("h3", {}, "Your sharding: what a step gains if only these arrays lie otherwise (gains do not add up)"),
    own.losses.length ? table("Losses of your sharding", columns, own.losses, said, "losses") : el("p", {}, "No array would gain."),
    el("h3", {}, "Your sharding: collectives that the plan does not have"),
    own.unasked.length ? table("Collectives of your sharding", unasked, own.unasked, (u) => [u.kind, u.tensor, u.source].join(" "), "collectives of yours") : el("p", {}, "None."),
  ];
}

// The page: helpers that make elements and words, the search, and the order of the sections. Names of the user are only ever set
// as text, never as markup.

const SVG = "http://www.w3.org/2000/svg";

/** An element with attributes and children; a child that is no element is text. */
function el(tag, attributes = {}, ...children) {
  return filled(document.createElement(tag), attributes, children);
}

/** An SVG element with attributes and children. */
function svg(tag, attributes = {}, ...children) {
  return filled(document.createElementNS(SVG, tag), attributes, children);
}

function filled(element, attributes, children) {
  for (const [name, value] of Object.entries(attributes)) {
    if (value !== null && value !== undefined && value !== false) element.setAttribute(name, value === true ? "" : value);
  }
  element.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined));
  return element;
}

// -- numbers as words: the same rules as in the command line ---------------------------------------------------------------

/** A number rounded to three digits; of two that are equally near, the even one, as Python does. */
function rounded(value) {
  const digits = Math.abs(value).toPrecision(60).replace(/e.*$/, "").replace(/\D/g, "").replace(/^0+/, "");
  if (!/^..[02468]50*$/.test(digits)) return Number(value.toPrecision(3));
  const exponent = Number(value.toExponential().split("e")[1]);
  return Math.sign(value) * Number(`${digits.slice(0, 3)}e${exponent - 2}`);
}

function threeDigits(value) {
  if (value === 0) return "0";
  const shown = rounded(value);
  return shown.toFixed(Math.max(0, 2 - Math.floor(Math.log10(Math.abs(shown)))));
}

function scaled(value, units, base) {
  for (let at = 0; at < units.length; at++) {
    const text = threeDigits(value / units[at][0]);
    if (Number(text) >= 1 || at === units.length - 1) {
      if (at > 0 && Number(text) >= base) return `${threeDigits(value / units[at - 1][0])} ${units[at - 1][1]}`;
      return `${text} ${units[at][1]}`;
    }
  }
}

/** A duration, like "12.3 ms". */
function seconds(value) {
  if (value < 0) return "-" + seconds(-value);
  if (value === 0) return "0 s";
  if (value >= 59.95) {
    const whole = Math.round(value);
    if (whole < 3600) return `${Math.floor(whole / 60)} min ${whole % 60} s`;
    const minutes = Math.round(value / 60);
    return `${Math.floor(minutes / 60)} h ${minutes % 60} min`;
  }
  return scaled(value, [[1, "s"], [1e-3, "ms"], [1e-6, "us"], [1e-9, "ns"]], 1000);
}

/** A number of bytes, like "1.50 GiB". */
function size(value) {
  if (value < 0) return "-" + size(-value);
  if (value < 1024) return `${Number(value.toPrecision(4))} B`;
  return scaled(value, ["PiB", "TiB", "GiB", "MiB", "KiB", "B"].map((unit, i) => [1024 ** (5 - i), unit]), 1024);
}

/** Words in which no source line has the folders of its file. */
function withoutFolders(words) {
  return words.replace(/\S*[\\/](?=[^\\/\s]+:\d)/g, "");
}

/** A path that breaks behind its slashes and braces where it is too long for a line. */
function path(words, title) {
  const parts = words.split(/(?<=[/,.])/);
  return el("span", { class: "path", title }, parts.map((part, i) => (i ? [el("wbr"), part] : part)));
}

/** A source line without its folders, which its title has. */
function sourceLine(source) {
  return path(shortSource(source), source);
}

function percent(part, whole) {
  return whole > 0 ? `${((100 * part) / whole).toFixed(part / whole < 0.1 ? 1 : 0)}%` : "-";
}

/** A source line without the folders of its file. */
function shortSource(source) {
  return source.replace(/^.*[\\/](?=[^\\/]*:\d)/, "");
}

function count(n, one, many) {
  return `${Number(n.toPrecision(6)).toLocaleString("en")} ${n === 1 ? one : many ?? one + "s"}`;
}

// -- colours ---------------------------------------------------------------------------------------------------------------

const AXIS_COLOURS = ["--blue", "--orange", "--green", "--red", "--purple", "--sky", "--yellow", "--grey"];
const AXIS_DASHES = ["", "6 2", "2 2", "7 2 2 2", "1 3", "10 3", "4 4", "1 1"];
const PURPOSE_COLOURS = {
  data: "--blue", fsdp: "--green", tensor: "--orange", sequence: "--purple", expert: "--red", replica: "--grey",
};
const KINDS = {
  "forward compute": ["--blue", ""], "backward compute": ["--sky", "dots"], "all-gather": ["--orange", "rising"],
  "reduce-scatter": ["--green", "falling"], "all-reduce": ["--red", "crossed"], "all-to-all": ["--purple", "level"],
  "collective-permute": ["--yellow", "upright"], update: ["--green", "falling"], transfer: ["--orange", "rising"], bubble: ["--panel", "dots"],
};

function axisColour(number) {
  return `var(${AXIS_COLOURS[number % AXIS_COLOURS.length]})`;
}

function purposeColour(purpose) {
  return `var(${PURPOSE_COLOURS[purpose] ?? "--grey"})`;
}

function kindLook(kind) {
  return KINDS[kind] ?? ["--grey", "upright"];
}

/** A small label for an axis of the mesh. */
function axisChip(axis, number) {
  return el("span", { class: "chip", style: `--mark: ${axisColour(number)}` }, `${axis.name} ${axis.size}`);
}

// -- the search ------------------------------------------------------------------------------------------------------------

const searched = []; // {element, text, group, row}

/** Lets the search find an element: rows that do not match disappear, parts of charts fade. */
function searchable(element, group, text, row = true) {
  searched.push({ element, group, row, text: text.toLowerCase() });
  return element;
}

function search(query) {
  const words = query.toLowerCase().split(/\s+/).filter(Boolean);
  const found = new Map();
  for (const one of searched) {
    const hit = words.every((word) => one.text.includes(word));
    one.element.classList.toggle(one.row ? "hidden" : "dim", !hit);
    const [hits, all] = found.get(one.group) ?? [0, 0];
    found.set(one.group, [hits + hit, all + 1]);
  }
  document.body.classList.toggle("searching-now", words.length > 0);
  const parts = [...found].map(([group, [hits, all]]) => `${hits} of ${all} ${group}`);
  document.getElementById("found").textContent = words.length ? parts.join(", ") : "";
}

function listenToSearch() {
  const box = document.getElementById("search");
  box.addEventListener("input", () => search(box.value));
  document.addEventListener("keydown", (event) => {
    const typing = /^(INPUT|TEXTAREA|SELECT)$/.test(document.activeElement?.tagName ?? "");
    if (event.key === "/" && !typing && !event.ctrlKey && !event.metaKey && !event.altKey) {
      event.preventDefault();
      box.focus();
      box.select();
    } else if (event.key === "Escape" && document.activeElement === box) {
      box.value = "";
      search("");
    }
  });
}

// -- the sections ----------------------------------------------------------------------------------------------------------

/** A section with a heading and a sentence on what it shows; it joins the list of contents. */
function section(id, heading, about, ...children) {
  document.getElementById("contents").append(el("a", { href: `#${id}` }, heading));
  const title = el("h2", { id: `${id}-heading` }, heading);
  return el("section", { id, "aria-labelledby": `${id}-heading` }, title, about ? el("p", { class: "about" }, about) : null, children);
}

function card(name, value, note, extra) {
  return el("div", { class: "card" }, el("span", {}, name), el("b", {}, value), extra ?? null, el("span", {}, note));
}

function summary(data) {
  const f = data.figures;
  const best = f.best_baseline;
  const cards = [
    card("Step time", seconds(f.step_time_s), `compute ${seconds(f.compute_s)}, exposed communication ${seconds(f.exposed_s)}`),
    card("Sent by a device", size(f.communication_bytes), `in ${seconds(f.communication_s)} of a step`),
    card("Peak memory of a device", size(f.peak_bytes), `${percent(f.peak_bytes, f.memory_limit)} of ${size(f.memory_limit)}`,
      meter((100 * f.peak_bytes) / f.memory_limit)),
    card("Cluster", data.cluster.name, `${count(data.cluster.devices, "device")}, ${data.cluster.device}`),
    best
      ? card("Best baseline", f.step_time_s ? `${(best.step_time_s / f.step_time_s).toFixed(2)}x` : "-", `${best.name}: ${seconds(best.step_time_s)}`)
      : card("Best baseline", "-", "no baseline fits"),
  ];
  return section("summary", "Summary", "", el("div", { class: "cards" }, cards), factList(data));
}

function factList(data) {
  return el("dl", {}, data.facts.map(([name, text]) => [el("dt", {}, name), el("dd", {}, text)]).flat());
}

function meter(share) {
  return el("div", { class: "meter", "aria-hidden": "true" }, el("i", { style: `width: ${Math.min(100, share)}%` }));
}

function main() {
  const data = JSON.parse(document.getElementById("data").textContent);
  document.getElementById("title").textContent = `${data.title} on ${data.cluster.name}`;
  const sections = data.groups
    ? [groupSummary, groups, groupTimeline, lines, groupArrays, groupCollectives, placements]
    : [summary, cluster, arrays, treemap, memory, collectives, baselines, timeline];
  document.getElementById("main").append(...sections.flatMap((make) => make(data) ?? []));
  listenToSearch();
  drawAll();
  if (/^#\w+$/.test(location.hash)) document.querySelector(location.hash)?.scrollIntoView(); // it was not there when the page was loaded
  document.body.dataset.ready = "yes";
}

document.addEventListener("DOMContentLoaded", main);

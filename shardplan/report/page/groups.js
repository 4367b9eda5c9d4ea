// The sections of a plan with groups of devices: who runs which lines, when, and how each group's arrays lie.

const SHOWN_DEVICES = 16; // devices that are drawn of a group; the others are named

function groupColour(number) {
  return `var(${AXIS_COLOURS[number % AXIS_COLOURS.length]})`;
}

function groupChip(number) {
  return el("span", { class: "chip", style: `--mark: ${groupColour(number)}` }, `group ${number}`);
}

function meshOf(group) {
  return group.axes.map((axis) => `${axis.name}=${axis.size}`).join(" x ") || "one device";
}

function groupSummary(data) {
  const f = data.figures;
  const cards = [
    card("Step time", seconds(f.step_time_s), `the busiest group computes ${seconds(f.compute_s)}`),
    card("Bubble", percent(f.bubble_s, f.step_time_s), `devices compute nothing for ${seconds(f.bubble_s)} on average`),
    card("Peak memory of a device", size(f.peak_bytes), `${percent(f.peak_bytes, f.memory_limit)} of ${size(f.memory_limit)}`, meter((100 * f.peak_bytes) / f.memory_limit)),
    card("Between groups", size(f.transfer_bytes), "in a step"),
    card("Cluster", data.cluster.name, `${count(data.cluster.devices, "device")}, ${data.cluster.device}`),
  ];
  return section("summary", "Summary", "", el("div", { class: "cards" }, cards), factList(data));
}

function groups(data) {
  const boxes = data.groups.map((group) => {
    const rest = group.devices.length - SHOWN_DEVICES;
    const devices = group.devices.slice(0, SHOWN_DEVICES).map((n) =>
      el("div", { class: "device", style: `--mark: ${groupColour(group.number)}`, title: `device ${n}` }, String(n)));
    return el("div", { class: "box", style: `--mark: ${groupColour(group.number)}` },
      el("div", { class: "name" }, `group ${group.number}: ${meshOf(group)}`),
      el("div", { class: "boxes" }, devices, rest > 0 ? el("div", { class: "rest" }, `and ${rest} more`) : null));
  });
  const step = data.figures.step_time_s;
  const columns = [
    { name: "group", by: (g) => g.number, cell: (g) => groupChip(g.number) },
    { name: "devices", by: (g) => g.devices[0], cell: (g) => g.ranges },
    { name: "mesh", by: (g) => meshOf(g), cell: (g) => meshOf(g) },
    { name: "used for", by: (g) => g.purposes, cell: (g) => g.purposes },
    { name: "computes", number: true, by: (g) => g.busy_s, cell: (g) => seconds(g.busy_s) },
    { name: "waits", number: true, by: (g) => g.wait_s, cell: (g) => `${seconds(g.wait_s)} (${percent(g.wait_s, step)})` },
    { name: "held at most", number: true, by: (g) => g.held_bytes, cell: (g) => size(g.held_bytes) },
    { name: "in words", kind: "words", cell: (g) => el("details", {}, el("summary", {}, `group ${g.number}`), el("pre", {}, withoutFolders(g.why))) },
  ];
  const about = "Each group of devices runs its own programs. What a device holds counts what its programs need while they run.";
  return section("groups", "Groups", about, el("div", { class: "boxes" }, boxes),
    table("Groups", columns, data.groups, (g) => `group ${g.number} ${g.ranges} ${meshOf(g)} ${g.why}`, "groups"));
}

function groupTimeline(data) {
  const shown = data.timeline;
  const used = new Set(shown.streams.flatMap((stream) => stream.kinds));
  const kinds = ["forward compute", "backward compute", "update", "transfer", "bubble"].filter((kind) => used.has(kind));
  const about = `The planned order of one step: ${seconds(shown.step_time_s)}. Each bar is a run of a program, or a transfer between two groups. ` +
    "A bubble is time in which a group waits.";
  return section("timeline", "Timeline", about, kindLegend(kinds, "rows"), timelineChart(data));
}

function lines(data) {
  const columns = [
    { name: "source line", kind: "words", by: (l) => l.source, cell: (l) => sourceLine(l.source) },
    { name: "group", by: (l) => l.group, cell: (l) => groupChip(l.group) },
    { name: "forward ops", number: true, by: (l) => l.forward, cell: (l) => String(l.forward) },
    { name: "backward ops", number: true, by: (l) => l.backward, cell: (l) => String(l.backward) },
  ];
  const about = "The lines of the step, in the order of the groups and of the step, with the ops that a group runs of each.";
  return section("lines", "Where lines run", about, table("Lines", columns, data.lines, (l) => `${l.source} group ${l.group}`, "lines"));
}

/** A part of a section for each group, below a heading that names it. */
function byGroup(data, make) {
  return data.groups.map((group) => [el("h3", {}, groupChip(group.number), ` on devices ${group.ranges}`), make(group) ?? el("p", { class: "about" }, "None.")]);
}

function groupArrays(data) {
  const columns = (axes) => arrayColumns(axes).filter((column) => !["next-best layout", "would cost"].includes(column.name));
  const made = (group) => group.arrays.length && [axisLegend(group.axes),
    table(`Arrays of group ${group.number}`, columns(group.axes), group.arrays, (a) => `group ${group.number} ${arrayText(a, group.axes)}`, "arrays")];
  const about = "The arguments that each group holds. Equal arrays share a row; open a row for the reasons and the next-best layout.";
  return section("arrays", "Arrays", about, byGroup(data, (group) => made(group) || null));
}

function groupCollectives(data) {
  const total = (group) => group.collectives.reduce((sum, c) => sum + c.seconds, 0);
  const about = "What the devices of a group send to each other, as if the group's program ran in one piece. Transfers between groups are in the timeline.";
  return section("collectives", "Collectives", about,
    byGroup(data, (group) => collectiveTable(`Collectives of group ${group.number}`, group.collectives, group.axes, total(group))));
}

function placements(data) {
  if (!data.tried.length) return null;
  const columns = [
    { name: "placement", by: (p) => p.what, cell: (p) => p.what },
    { name: "step", number: true, by: (p) => p.step_time_s ?? Infinity, cell: (p) => (p.step_time_s === null ? "-" : seconds(p.step_time_s)) },
    { name: "memory", number: true, by: (p) => p.peak_bytes ?? Infinity, cell: (p) => (p.peak_bytes === null ? "-" : size(p.peak_bytes)) },
    { name: "why not", cell: (p) => p.why_not || "this plan" },
  ];
  return section("placements", "Placements", "What the plan was chosen among.", table("Placements", columns, data.tried, (p) => `${p.what} ${p.why_not}`, "placements"));
}

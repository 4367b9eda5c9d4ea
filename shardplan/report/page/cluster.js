// The cluster as nested boxes, one level of boxes for each mesh axis, with the parallelism matrix beside it.

const CHILDREN = 2; // boxes that are drawn of an outer axis; the others are alike
const DEVICES = 8; // devices that are drawn of the innermost axis

function cluster(data) {
  const { axes, matrix } = data;
  const levels = data.cluster.levels;
  const purposes = [...new Set(axes.map((axis) => axis.purpose))];
  const legend = el("ul", { class: "legend" }, purposes.map((purpose) => el("li", {}, purposeChip(purpose))));
  const links = levels.map((level) => `${level.name}: ${level.size} by ${level.link}`).join("; ");
  const about = "Each box is a part of the cluster that one mesh axis numbers. The stripe and the word say what the axis is for.";
  return section("cluster", "Cluster and matrix", about, legend,
    el("div", { class: "sides" },
      el("div", {}, el("div", { class: "boxes" }, boxes(axes, levels, 0, 0)), el("p", { class: "about" }, links)),
      el("div", {}, el("h3", {}, "Parallelism matrix"), matrixTable(matrix), el("p", {}, matrix.words), mixed(axes))));
}

function purposeChip(purpose) {
  return el("span", { class: "chip", style: `--mark: ${purposeColour(purpose)}` }, purpose);
}

/** The boxes of axis `at`, inside those of the axes before it; `first` is the number of their first device. */
function boxes(axes, levels, at, first) {
  if (!axes.length) return [device(0, null)];
  const axis = axes[at];
  const inside = axes.slice(at + 1).reduce((product, inner) => product * inner.size, 1);
  const innermost = at === axes.length - 1;
  const shown = Math.min(axis.size, innermost ? DEVICES : CHILDREN);
  const made = [];
  for (let i = 0; i < shown; i++) {
    const start = first + i * inside;
    made.push(innermost ? device(start, axis) : boxOf(axes, levels, at, i, start));
  }
  if (shown < axis.size) made.push(el("div", { class: "rest" }, `and ${axis.size - shown} more alike`));
  if (!innermost) return made;
  const name = `${axis.name} ${axis.size} (${levels[axis.level].name}): ${axis.purpose}`;
  return [boxAround(name, axis, made)];
}

function boxOf(axes, levels, at, i, start) {
  const axis = axes[at];
  const name = `${axis.name} ${i} of ${axis.size} (${levels[axis.level].name}): ${axis.purpose}`;
  return boxAround(name, axis, boxes(axes, levels, at + 1, start));
}

function boxAround(name, axis, inside) {
  return el("div", { class: "box", style: `--mark: ${purposeColour(axis.purpose)}` },
    el("div", { class: "name" }, name), el("div", { class: "boxes" }, inside));
}

function device(number, axis) {
  const style = axis ? `--mark: ${purposeColour(axis.purpose)}` : null;
  return el("div", { class: "device", style, title: `device ${number}` }, String(number));
}

function matrixTable(matrix) {
  const head = ["purpose", ...matrix.levels, "all"].map((name, i) => el("th", { scope: "col", class: i ? "number" : null }, name));
  const rows = matrix.axes.map((purpose, i) => {
    const factors = matrix.factors[i];
    const product = factors.reduce((a, b) => a * b, 1);
    const cells = [...factors, product].map((n) => el("td", { class: n === 1 ? "number one" : "number" }, String(n)));
    return el("tr", {}, el("th", { scope: "row" }, purposeChip(purpose)), cells);
  });
  return el("div", { class: "wide" },
    el("table", { class: "matrix" }, el("thead", {}, el("tr", {}, head)), el("tbody", {}, rows)));
}

/** A line for each axis that ops use for several purposes. */
function mixed(axes) {
  const lines = axes.map((axis) => [axis, axis.shares.filter(([, part]) => part >= 0.005)]).filter(([, some]) => some.length > 1);
  const words = (axis, some) => `${axis.name} is for ${some.map(([p, part]) => `${p} in ${percent(part, 1)}`).join(", ")} of its products' seconds.`;
  return lines.map(([axis, some]) => el("p", { class: "about" }, words(axis, some)));
}

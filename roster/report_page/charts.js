// Intervals and matrices as SVG. Positions along an interval are in percent, so that every width is right.
function scaleOf(values, { trim = 1 } = {}) {
  const sorted = values.filter(isNumber).sort((one, other) => one - other);
  if (!sorted.length) return null;
  const low = Math.min(0, sorted[Math.floor((1 - trim) * (sorted.length - 1))]);
  const high = Math.max(0, sorted[Math.ceil(trim * (sorted.length - 1))]);
  const pad = (high - low || 1) * 0.04;
  return { low: low - pad, high: high + pad };
}

const place = (scale, value) => Math.max(0, Math.min(100, ((value - scale.low) / (scale.high - scale.low)) * 100));
const percent = (value) => value.toFixed(2) + "%";

function ticksOf(scale) {
  const rough = (scale.high - scale.low) / 4;
  const power = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map((factor) => factor * power).find((size) => size >= rough);
  const ticks = [];
  for (let at = Math.ceil(scale.low / step); at * step <= scale.high; at += 1) ticks.push(at * step);
  const digits = Math.max(0, -Math.floor(Math.log10(step)));
  return ticks.map((value) => [value, value === 0 ? "0" : signed(value, digits)]);
}

function interval(scale, middle, lower, upper, said) {
  const parts = [svg("line", { class: "zero", x1: percent(place(scale, 0)), x2: percent(place(scale, 0)), y1: "0", y2: "100%" })];
  if (isNumber(lower) && isNumber(upper)) {
    const [from, to] = [place(scale, lower), place(scale, upper)];
    parts.push(svg("line", { class: "whisker", x1: percent(from), x2: percent(to), y1: "50%", y2: "50%" }));
    for (const end of [from, to]) {
      parts.push(svg("line", { class: "whisker", x1: percent(end), x2: percent(end), y1: "28%", y2: "72%" }));
    }
  }
  if (isNumber(middle)) {
    const tone = middle <= 0 || (isNumber(lower) && lower <= 0) ? "dot doubt" : "dot";
    parts.push(svg("circle", { class: tone, cx: percent(place(scale, middle)), cy: "50%", r: "4" }));
  }
  return svg("svg", { class: "interval", role: "img", "aria-label": said }, parts);
}

// rows: [label, middle, lower, upper, note]
function forestOf(rows, unit) {
  const scale = scaleOf(rows.flatMap(([, ...figures]) => figures.slice(0, 3)));
  if (scale === null) return null;
  const axis = svg("svg", { class: "axis", "aria-hidden": "true" }, ticksOf(scale).map(([value, label]) => [
    svg("line", { class: "tick", x1: percent(place(scale, value)), x2: percent(place(scale, value)), y1: "0", y2: "5" }),
    svg("text", { x: percent(place(scale, value)), y: "18" }, label),
  ]));
  return el("div", { class: "forest" },
    rows.map(([label, middle, lower, upper, note]) => el("div", { class: "forest-row" },
      el("span", { class: "forest-label" }, label),
      interval(scale, middle, lower, upper, `${signed(middle)} ${range(lower, upper)}`),
      el("span", { class: "forest-value" }, signed(middle), el("small", {}, range(lower, upper)), note ? el("small", {}, note) : null))),
    el("div", { class: "forest-row axis-row" }, el("span", { class: "forest-label" }, unit), axis, el("span", {})));
}

const LEVELS = 7;
const MOST_DRAWN = 160;

// The texts that are hardest to attribute, and the adapters on them, where all would be too many to look at.
function cutMatrix(matrix) {
  const of = (text) => {
    const own = ownOf(text);
    const others = [...text.bpb].filter(([author]) => !text.owners.includes(author)).map(([, bpb]) => bpb);
    return others.length && own !== null ? Math.min(...others) - own : Infinity;
  };
  if (matrix.adapters.length <= MOST_DRAWN && matrix.texts.length <= MOST_DRAWN) return matrix;
  const texts = [...matrix.texts].sort((one, other) => of(one) - of(other)).slice(0, MOST_DRAWN / 2);
  const near = new Set();
  for (const text of texts) {
    for (const owner of text.owners) near.add(owner);
    const others = [...text.bpb].filter(([author]) => !text.owners.includes(author)).sort((a, b) => a[1] - b[1]);
    if (others.length) near.add(others[0][0]);
  }
  return { ...matrix, texts, adapters: matrix.adapters.filter((author) => near.has(author)), cut: true };
}

function ownOf(text) {
  const own = text.owners.map((owner) => text.bpb.get(owner)).filter(isNumber);
  return own.length ? Math.min(...own) : null;
}

function readMatrix(packed) {
  const [base, measuredAt, engineId, adapters, texts, said] = packed;
  return {
    base, measuredAt, engineId, adapters, said,
    texts: texts.map(([ref, owners, base_bpb, bpb]) => ({
      ref, owners, base_bpb,
      bpb: new Map(bpb.map((value, at) => [adapters[at], value]).filter(([, value]) => isNumber(value))),
    })),
  };
}

function cellsOf(matrix) {
  const lines = [...matrix.adapters, null];
  return lines.map((author) => matrix.texts.map((text) => {
    const bpb = author === null ? text.base_bpb : text.bpb.get(author);
    const own = ownOf(text);
    const more = isNumber(bpb) && own !== null ? bpb - own : null;
    return { author, text, bpb, more, isOwn: author !== null && text.owners.includes(author) };
  }));
}

function heatmapOf(whole) {
  const matrix = cutMatrix(whole);
  const cells = cellsOf(matrix);
  const positive = cells.flat().map((cell) => cell.more).filter((more) => isNumber(more) && more > 0).sort((a, b) => a - b);
  const far = positive.length ? positive[Math.floor(0.9 * (positive.length - 1))] : 1;
  const named = Math.max(matrix.adapters.length, matrix.texts.length) <= 60;
  const small = matrix.adapters.length <= 12 && matrix.texts.length <= 12;
  const narrow = window.innerWidth < 600;
  const size = small ? (narrow ? 34 : 44) : named ? 20 : 9;
  const most = narrow ? 13 : 22;
  const letters = named ? Math.min(most, Math.max(...matrix.adapters.map((name) => name.length), 6)) : 4;
  const up = named ? Math.min(most, Math.max(...matrix.texts.map((text) => text.ref.length), 1)) : 0;
  const left = 12 + letters * 7;
  const top = 10 + up * 6.4;
  const gap = 6;
  const yOf = (row) => top + row * size + (row === matrix.adapters.length ? gap : 0);
  const paths = {};
  const marks = [];
  const numbers = [];
  cells.forEach((line, row) => line.forEach((cell, column) => {
    const [x, y] = [left + column * size, yOf(row)];
    const square = `M${x} ${y}h${size}v${size}h-${size}z`;
    let level = "none";
    if (isNumber(cell.more)) {
      level = cell.more < 0 || (cell.more === 0 && !cell.isOwn) ? "better"
        : Math.min(LEVELS - 1, Math.floor((cell.more / far) * (LEVELS - 1)));
    }
    cell.level = level;
    (paths[level] = paths[level] || []).push(square);
    if (level === "better") marks.push(`M${x + 3} ${y + 3}l${size - 6} ${size - 6}m0 ${6 - size}l${6 - size} ${size - 6}`);
    if (cell.isOwn) (paths.own = paths.own || []).push(`M${x + 1} ${y + 1}h${size - 2}v${size - 2}h${2 - size}z`);
    if (small && isNumber(cell.bpb) && level !== "better") {
      numbers.push(svg("text", { class: `number l${level}`, x: x + size / 2, y: y + size / 2 + 4 }, cell.bpb.toFixed(2)));
    }
  }));
  const { own = [], ...rest } = paths;
  const width = left + matrix.texts.length * size + 10;
  const height = yOf(matrix.adapters.length) + size + 6;
  const short = (name) => (name.length > most ? name.slice(0, most - 1) + "…" : name);
  const picture = svg("svg", { class: "heatmap", width, height, viewBox: `0 0 ${width} ${height}`, role: "img",
    "aria-label": `matrix of ${matrix.adapters.length} adapters on ${matrix.texts.length} texts` },
  Object.entries(rest).map(([level, squares]) => svg("path", { class: `cell l${level}`, d: squares.join("") })),
  svg("path", { class: "better-mark", d: marks.join("") }), svg("path", { class: "own-frame", d: own.join("") }), numbers,
  named ? matrix.adapters.map((name, row) => svg("text", { class: "row-name", x: left - 6, y: yOf(row) + size / 2 + 4 }, short(name))) : [],
  svg("text", { class: "row-name base-name", x: left - 6, y: yOf(matrix.adapters.length) + size / 2 + 4 }, "base"),
  named ? matrix.texts.map((text, column) => svg("text", { class: "column-name",
    transform: `translate(${left + column * size + size / 2 + 4} ${top - 6}) rotate(-90)` }, short(text.ref))) : []);
  const reading = el("p", { class: "told", role: "status" }, "Tap or point at a cell to read it.");
  const tell = (event) => {
    const box = picture.getBoundingClientRect();
    const column = Math.floor((event.clientX - box.left - left) / size);
    const y = event.clientY - box.top;
    const row = y >= yOf(matrix.adapters.length) ? matrix.adapters.length : Math.floor((y - top) / size);
    const cell = (cells[row] || [])[column];
    if (!cell) return;
    const who = cell.author === null ? "The bare base" : cell.author;
    const how = !isNumber(cell.bpb) ? "was not scored"
      : `${cell.bpb.toFixed(4)} bits per byte` + (cell.isOwn ? ", own text" : isNumber(cell.more) ? `, ${signed(cell.more)} against own` : "");
    put(reading, el("b", {}, who), " on ", el("b", {}, cell.text.ref), `: ${how}.`);
  };
  picture.addEventListener("pointermove", tell);
  picture.addEventListener("pointerdown", tell);
  return { picture, reading, legend: legendOf(far), matrix };
}

function legendOf(far) {
  const swatch = (level, label, extra) => el("span", { class: "swatch" },
    svg("svg", { width: 18, height: 18, "aria-hidden": "true" }, svg("rect", { class: `cell l${level}`, x: 1, y: 1, width: 16, height: 16 }), extra), label);
  return el("p", { class: "legend" },
    swatch(0, "as good as own", svg("rect", { class: "own-frame", x: 2, y: 2, width: 14, height: 14 })), swatch(2, ""), swatch(4, ""),
    swatch(LEVELS - 1, `≥ ${signed(far, 3)} bits per byte worse`),
    swatch("better", "better than own", svg("path", { class: "better-mark", d: "M4 4l10 10m0 -10l-10 10" })),
    swatch("none", "not scored"));
}

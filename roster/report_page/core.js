// The data of the page, and the few means by which everything is built. Text only ever becomes text nodes.
const data = JSON.parse(document.getElementById("data").textContent);

const SVG = "http://www.w3.org/2000/svg";

function fill(node, attributes, children) {
  for (const [name, value] of Object.entries(attributes || {})) {
    if (typeof value === "function") node.addEventListener(name, value);
    else if (value === true) node.setAttribute(name, "");
    else if (value !== null && value !== undefined && value !== false) node.setAttribute(name, value);
  }
  node.append(...children.flat(Infinity).filter((child) => child !== null && child !== undefined && child !== ""));
  return node;
}

const el = (tag, attributes, ...children) => fill(document.createElement(tag), attributes, children);
const svg = (tag, attributes, ...children) => fill(document.createElementNS(SVG, tag), attributes, children);
const find = (id) => document.getElementById(id);

const put = (node, ...children) => {
  node.replaceChildren();
  return fill(node, {}, children);
};

// Commands in sentences of ours are in backticks.
const told = (text) => text.split("`").map((part, at, parts) => (at % 2 && parts.length % 2 ? el("code", {}, part) : part));

function rowsOf(kind, list) {
  const columns = data.columns[kind];
  return list.map((values) => Object.fromEntries(columns.map((column, place) => [column, values[place]])));
}

async function unpack(id) {
  const bytes = Uint8Array.from(atob(find(id).textContent), (letter) => letter.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("deflate"));
  return JSON.parse(await new Response(stream).text());
}

const isNumber = (value) => typeof value === "number";
const figure = (value, digits = 4) => (isNumber(value) ? value.toFixed(digits) : "–");
function signed(value, digits = 4) {
  if (!isNumber(value)) return "–";
  return (value < 0 ? "−" : "+") + Math.abs(value).toFixed(digits);
}
const range = (lower, upper) => (isNumber(lower) && isNumber(upper) ? `[${signed(lower)}, ${signed(upper)}]` : "");
const time = (text) => (text ? text.slice(0, 16).replace("T", " ") : "–");
const count = (number, one, many = one + "s") => `${number.toLocaleString("en")} ${number === 1 ? one : many}`;

function seconds(value) {
  if (!isNumber(value)) return "–";
  if (value < 90) return `${value} s`;
  if (value < 5400) return `${Math.round(value / 60)} min`;
  return value < 172800 ? `${(value / 3600).toFixed(1)} h` : `${(value / 86400).toFixed(1)} days`;
}

// Each state has a sign of its own besides its colour: paper may have none.
const STATES = {
  served: ["●", "served", "good"],
  ready: ["●", "ready", "good"],
  done: ["✓", "done", "good"],
  stopped: ["■", "stopped", "bad"],
  unservable: ["!", "cannot be served", "bad"],
  unreadable: ["!", "unreadable", "bad"],
  quarantined: ["✕", "quarantined", "bad"],
  pin_not_ready: ["!", "pinned, not ready", "bad"],
  inconclusive: ["?", "inconclusive", "warn"],
  waiting: ["…", "waiting", "wait"],
  in_progress: ["▸", "in progress", "wait"],
  held: ["‖", "held", "wait"],
  pinned: ["◆", "pinned", "wait"],
  retired: ["–", "retired", "rest"],
  purged: ["–", "purged", "rest"],
};
const stateOf = (state) => STATES[state] || ["!", String(state).replaceAll("_", " "), "warn"];

function badge(state, before = "") {
  const [sign, label, tone] = stateOf(state);
  return el("span", { class: `badge ${tone}` }, el("b", { "aria-hidden": "true" }, sign), before + label);
}

const addressOf = (author) => "#a/" + encodeURIComponent(author);
const authorLink = (author) => el("a", { class: "name", href: addressOf(author) }, author);
const adviceFor = (code) => data.advice[code] || null;

function plainTable(heads, rows) {
  const cells = rows.map((row) => el("tr", {}, row.map((cell, place) => el("td", { "data-label": heads[place] }, cell))));
  return el("table", { class: "plain" }, el("thead", {}, el("tr", {}, heads.map((head) => el("th", { scope: "col" }, head)))),
    el("tbody", {}, cells));
}

const authors = rowsOf("authors", data.authors);
for (const row of authors) {
  row.gain = isNumber(row.own) && isNumber(row.base_bpb) ? row.base_bpb - row.own : null;
  row.words = [row.author, row.base, row.standing, row.newer, row.code, row.stale ? "stale" : "", row.pinned ? "pinned" : ""]
    .join(" ").toLowerCase();
}
const bases = [...new Set(authors.map((row) => row.base))].sort();
const hasCompression = typeof DecompressionStream === "function";

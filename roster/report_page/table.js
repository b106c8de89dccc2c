// The roster table: searched, filtered and sorted in memory, drawn a hundred rows at a time.
const CHUNK = 100;
const view = { order: "author", down: false, shown: [], drawn: 0 };

const COLUMNS = [
  ["author", "Author"],
  ["base", "Base", "text"],
  ["standing", "State", "text"],
  ["own", "Own", "figure", "Bits per byte of the author's own adapter on held-out text; lower is better"],
  ["base_bpb", "Bare base", "figure", "Bits per byte of the base without an adapter"],
  ["gain", "Gain", "figure", "Bare base minus own"],
  ["margin", "Margin", "chart", "The nearest other author's adapter minus own, with its interval; above zero is better"],
  ["newest_at", "Newest upload", "time", "UTC"],
].filter(([key]) => key !== "base" || bases.length > 1);

const ORDERS = [
  ["author", false, "Author, A to Z"],
  ["margin", false, "Smallest margin first"],
  ["gain", false, "Smallest gain first"],
  ["standing", false, "State"],
  ["newest_at", true, "Newest upload first"],
  ["own", false, "Lowest bits per byte first"],
];

const FILTERS = {
  all: ["All", () => true],
  served: ["Served", (row) => row.standing === "served"],
  not_served: ["Not served", (row) => row.standing !== "served"],
  newer: ["Served, newer upload in trouble", (row) => isTroubled(row.newer)],
  stale: ["Stale verdict", (row) => row.stale],
  pinned: ["Pinned", (row) => row.pinned],
};
const isTroubled = (state) => ["quarantined", "inconclusive", "stopped", "waiting"].includes(state);
for (const state of new Set(authors.map((row) => row.standing))) {
  if (state !== "served") FILTERS[state] = [stateOf(state)[1][0].toUpperCase() + stateOf(state)[1].slice(1), (row) => row.standing === state];
}
for (const base of bases.length > 1 ? bases : []) FILTERS["base " + base] = ["On " + base, (row) => row.base === base];

const marginScale = scaleOf(authors.flatMap((row) => [row.lower, row.margin, row.upper]), { trim: 0.98 });
const collator = new Intl.Collator("en", { numeric: true });

function compare(one, other) {
  const [a, b] = [one[view.order], other[view.order]];
  if (a === null || b === null) return (a === null) - (b === null); // nothing comes last, whichever way
  const found = typeof a === "string" ? collator.compare(a, b) : a - b;
  return view.down ? -found : found;
}

function choose() {
  const words = find("search").value.toLowerCase().split(/\s+/).filter(Boolean);
  const keeps = FILTERS[find("filter").value][1];
  view.shown = authors.filter((row) => keeps(row) && words.every((word) => row.words.includes(word)));
  view.shown.sort((one, other) => compare(one, other) || collator.compare(one.author, other.author));
  view.drawn = 0;
  find("table").tBodies[0].replaceChildren();
  draw(CHUNK);
  for (const head of find("table").tHead.querySelectorAll("th")) {
    const isSorted = head.dataset.key === view.order;
    head.setAttribute("aria-sort", !isSorted ? "none" : view.down ? "descending" : "ascending");
  }
  const order = ORDERS.findIndex(([key, down]) => key === view.order && down === view.down);
  find("sort").value = order < 0 ? "" : String(order);
  for (const tile of document.querySelectorAll("#tiles button")) {
    tile.setAttribute("aria-pressed", String(tile.dataset.filter === find("filter").value));
  }
}

function draw(more) {
  const rows = view.shown.slice(view.drawn, view.drawn + more);
  find("table").tBodies[0].append(...rows.map(lineOf));
  view.drawn += rows.length;
  const left = view.shown.length - view.drawn;
  find("more").hidden = left === 0;
  find("more").textContent = `Show ${count(Math.min(left, CHUNK), "more row")} (${left.toLocaleString("en")} left)`;
  find("shown").textContent = view.shown.length === authors.length ? count(authors.length, "row")
    : `${view.shown.length.toLocaleString("en")} of ${count(authors.length, "row")}`;
}

function lineOf(row) {
  const cells = {
    author: () => authorLink(row.author),
    base: () => row.base,
    standing: () => el("span", { class: "states" }, badge(row.standing), row.newer && row.newer !== "ready" ? badge(row.newer, "newer: ") : null,
      row.code && row.standing !== "served" ? el("code", {}, row.code) : null,
      row.stale ? el("span", { class: "flag", title: "Judged by an earlier version of the code or engine" }, "stale") : null,
      row.pinned ? el("span", { class: "flag" }, "pinned") : null),
    own: () => figure(row.own),
    base_bpb: () => figure(row.base_bpb),
    gain: () => signed(row.gain),
    margin: () => (isNumber(row.margin) ? el("div", { class: "span" },
      interval(marginScale, row.margin, row.lower, row.upper, `${signed(row.margin)} ${range(row.lower, row.upper)}`),
      el("span", { class: "margin-value" }, signed(row.margin), el("small", {}, range(row.lower, row.upper))),
    ) : "–"),
    newest_at: () => el("span", { title: time(row.newest_at) + " UTC" }, time(row.newest_at).slice(0, 10)),
  };
  return el("tr", { class: row.standing }, COLUMNS.map(([key, label, kind]) => (key === "author"
    ? el("th", { scope: "row" }, cells[key]())
    : el("td", { class: `${kind} ${key}`, "data-label": label }, cells[key]()))));
}

function orderBy(key, down) {
  view.order = key;
  view.down = down;
  choose();
}

function startTable() {
  find("table").tHead.append(el("tr", {}, COLUMNS.map(([key, label, kind, title]) => el("th", { scope: "col", class: kind || "", "data-key": key, title },
    el("button", { type: "button", click: () => orderBy(key, view.order === key ? !view.down : key === "newest_at") }, label,
      el("span", { class: "arrow", "aria-hidden": "true" }))))));
  find("filter").append(...Object.entries(FILTERS).map(([key, [label, keeps]]) => {
    const number = authors.filter(keeps).length;
    return number || key === "all" ? el("option", { value: key }, `${label} (${number.toLocaleString("en")})`) : "";
  }).filter(Boolean));
  find("sort").append(el("option", { value: "", hidden: true }, "By column"),
    ...ORDERS.map(([, , label], at) => el("option", { value: String(at) }, label)));
  find("search").addEventListener("input", choose);
  find("filter").addEventListener("change", choose);
  find("sort").addEventListener("change", () => {
    const chosen = ORDERS[Number(find("sort").value)];
    orderBy(chosen[0], chosen[1]);
  });
  find("tools").addEventListener("submit", (event) => event.preventDefault());
  find("more").addEventListener("click", () => draw(CHUNK));
  new IntersectionObserver((seen) => seen.some((one) => one.isIntersecting) && !find("more").hidden && draw(CHUNK), { rootMargin: "600px" })
    .observe(find("more"));
  choose();
}

// The overview, and which of the two is seen: the overview, or the author that the address names.
const KINDS = ["stopped", "unservable", "unreadable", "pin_not_ready", "quarantined", "inconclusive", "waiting"];
const LISTED = 50;

function tile(filter, number, label, tone) {
  return el("li", {}, el("button", { type: "button", class: tone, "data-filter": filter, click: () => {
    find("filter").value = find("filter").value === filter ? "all" : filter;
    choose();
    find("roster").scrollIntoView();
  } }, el("b", {}, number.toLocaleString("en")), el("span", {}, label)));
}

function startTiles() {
  const having = (keeps) => authors.filter(keeps).length;
  const served = having(FILTERS.served[1]);
  find("tiles").append(tile("served", served, `served of ${authors.length.toLocaleString("en")}`, "good"));
  for (const state of Object.keys(STATES)) {
    const number = state === "served" ? 0 : having((row) => row.standing === state);
    if (number) find("tiles").append(tile(state, number, stateOf(state)[1], stateOf(state)[2]));
  }
  const extra = [["newer", "served, newer one in trouble", "warn"], ["stale", "stale verdicts", "rest"], ["pinned", "pinned", "rest"]];
  for (const [filter, label, tone] of extra) {
    const number = having(FILTERS[filter][1]);
    if (number) find("tiles").append(tile(filter, number, label, tone));
  }
}

function startConcerns() {
  const groups = new Map();
  for (const row of rowsOf("concerns", data.concerns)) {
    const key = `${row.kind} ${row.code}`;
    if (!groups.has(key)) groups.set(key, []);
    groups.get(key).push(row);
  }
  const rank = (kind) => (KINDS.indexOf(kind) < 0 ? 2 : KINDS.indexOf(kind));
  const sorted = [...groups.values()].sort((a, b) => rank(a[0].kind) - rank(b[0].kind) || b.length - a.length);
  const few = data.concerns.length <= 8;
  find("concerns").append(...sorted.map((rows) => concernGroup(rows, few)));
  if (!sorted.length) find("concerns").append(el("p", { class: "calm" }, "Nothing: no adapter is refused, stopped or waiting."));
}

function concernGroup(rows, open) {
  const [first] = rows;
  const without = rows.filter((row) => !row.served_instead).length;
  const sorted = [...rows].sort((a, b) => a.served_instead - b.served_instead || String(b.since).localeCompare(String(a.since)));
  const meanwhile = without === 0 ? "all served by an older adapter" : without === rows.length ? "" : `${rows.length - without} served by an older adapter`;
  const list = el("ul", { class: "concern-list" });
  const add = (upTo) => {
    list.append(...sorted.slice(list.children.length, upTo).map(concernLine));
    const left = sorted.length - list.children.length;
    rest.hidden = left === 0;
    paper.hidden = left === 0;
    rest.textContent = `Show the other ${left.toLocaleString("en")}`;
    paper.textContent = `and ${left.toLocaleString("en")} more`;
  };
  const paper = el("p", { class: "paper" });
  const rest = el("button", { type: "button", class: "rest-button", click: () => add(sorted.length) });
  add(LISTED);
  return el("details", { class: "concern", open },
    el("summary", {}, el("span", { class: "states" }, badge(first.kind), first.code && first.code !== first.kind ? el("code", {}, first.code) : null), el("b", {}, first.kind === "unreadable" ? count(rows.length, "object") : count(rows.length, "adapter")),
      meanwhile ? el("small", {}, meanwhile) : null),
    adviceLine(first.code), list, rest, paper);
}

function concernLine(row) {
  return el("li", {}, el("span", { class: "concern-who" }, row.author === null ? null : authorLink(row.author), row.run ? ` ${row.run}` : "",
    bases.length > 1 && row.base ? ` on ${row.base}` : ""), el("time", {}, time(row.since)),
  row.reason ? el("p", { class: "reason" }, told(row.reason)) : null);
}

function startActs() {
  const acts = rowsOf("acts", data.acts);
  if (!acts.length) return;
  find("acts").hidden = false;
  find("act-list").append(plainTable(["author", "base", "", "since", "who", "why"],
    acts.map((act) => [authorLink(act.author), act.base || "every base", badge(act.act), time(act.since), act.who || "", act.why || ""])));
}

function startForest() {
  const rows = authors.filter((row) => row.standing === "served" && isNumber(row.margin)).sort((a, b) => (isNumber(a.lower) ? a.lower : a.margin) - (isNumber(b.lower) ? b.lower : b.margin));
  if (!rows.length) {
    find("forest").append(el("p", {}, "No served adapter was compared with another author's."));
    return;
  }
  const most = 40;
  const cut = rows.length > most ? `The ${most} of ${rows.length.toLocaleString("en")} served adapters that are hardest to tell from another author's. ` : "The hardest to tell apart first. ";
  find("forest").append(el("p", { class: "hint" }, cut + "The nearest wrong adapter minus own, in bits per byte, with the interval. At or left of zero, another author's adapter does as well."),
    forestOf(rows.slice(0, most).map((row) => [authorLink(row.author), row.margin, row.lower, row.upper]), "bits per byte"));
}

async function startMatrices() {
  const into = find("heatmaps");
  for (const gap of data.left_out) into.append(el("p", { class: "notice" }, gap));
  if (!data.matrices && !data.left_out.length) into.append(el("p", {}, "No matrix was measured yet: ", el("code", {}, "roster matrix --base NAME")));
  for (let at = 0; at < data.matrices && hasCompression; at += 1) {
    const whole = readMatrix(await unpack("m" + at));
    const { picture, reading, legend, matrix } = heatmapOf(whole);
    const cut = matrix.cut ? `Shown are the ${matrix.texts.length} texts that are hardest to attribute, and the ${matrix.adapters.length} adapters nearest to them. ` : "";
    into.append(el("figure", {}, el("figcaption", {}, el("h3", {}, `${whole.base}: ${count(whole.adapters.length, "adapter")} on ${count(whole.texts.length, "text")}`),
      el("ul", { class: "said" }, whole.said.map((line) => el("li", {}, line))),
      el("p", { class: "hint" }, `${cut}Rows are adapters, columns texts, measured ${time(whole.measuredAt)} UTC. A dark diagonal on light ground is what one wants.`), legend),
    el("div", { class: "scroll", tabindex: "0" }, picture), reading));
  }
}

function startSections() {
  const links = [["attention", "Needs a look"], ["acts", "Held"], ["roster", "Roster"], ["margins", "Margins"], ["matrices", "Matrix"]];
  find("sections").append(...links.filter(([id]) => !find(id).hidden).map(([id, label]) => el("li", {}, el("button", { type: "button", click: () => find(id).scrollIntoView({ behavior: "smooth" }) }, label))));
}

function sayAge() {
  const hours = (Date.now() - Date.parse(data.synced_at)) / 3600000;
  if (hours < 24) return;
  find("age").textContent = `This page is ${count(Math.floor(hours / 24), "day")} old: who is served may have changed since.`;
  find("age").hidden = false;
}

let scrolled = 0;
async function route() {
  const isAuthor = location.hash.startsWith("#a/");
  if (!find("overview").hidden) scrolled = window.scrollY;
  find("overview").hidden = isAuthor;
  find("author").hidden = !isAuthor;
  document.body.classList.toggle("one", isAuthor);
  if (isAuthor) {
    await openAuthor(decodeURIComponent(location.hash.slice(3)));
    window.scrollTo(0, 0);
  } else {
    window.scrollTo(0, scrolled);
  }
}

// Paper has no buttons: everything that matches is drawn, and what is folded is opened, until it is printed.
const opened = [];
window.addEventListener("beforeprint", () => {
  if (!find("overview").hidden) draw(view.shown.length);
  for (const fold of document.querySelectorAll("details:not([open])")) {
    opened.push(fold);
    fold.open = true;
  }
});
window.addEventListener("afterprint", () => {
  for (const fold of opened.splice(0)) fold.open = false;
});

find("overview").hidden = false;
startTable();
startTiles();
startConcerns();
startActs();
startForest();
startSections();
sayAge();
startMatrices();
window.addEventListener("hashchange", route);
if (location.hash.startsWith("#a/")) route();
choose();

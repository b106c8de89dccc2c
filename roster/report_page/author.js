// One author's page, made when it is opened: what is served, each adapter's scores, evidence, checks and history.
const blocks = new Map();

async function detailsOf(author) {
  const line = authors.find((row) => row.author === author);
  const id = "b" + line.block;
  if (!blocks.has(id)) blocks.set(id, unpack(id));
  const found = (await blocks.get(id)).find(([name]) => name === author);
  const adapters = found[1].map((packed) => {
    const own = data.columns.adapters.length;
    const adapter = rowsOf("adapters", [packed])[0];
    data.parts.forEach((part, at) => { adapter[part] = rowsOf(part, packed[own + at]); });
    return adapter;
  });
  return { adapters, events: rowsOf("events", found[2]), times: rowsOf("times", found[3]) };
}

function timesOf(row) {
  const engine = row.engine_seconds >= 1 ? `, ${seconds(Math.round(row.engine_seconds))} of them on the engine` : "";
  const ready = isNumber(row.seconds_to_ready) ? `; first ready ${seconds(row.seconds_to_ready)} after the first submission` : "";
  return el("p", { class: "hint" }, `${bases.length > 1 ? row.base + ": " : ""}${count(row.runs, "run")}, ${count(row.steps, "step")}, ${seconds(row.seconds)} of work${engine}${ready}.`);
}

function eventsOf(events) {
  if (!events.length) return null;
  return [el("h3", { class: "events" }, "What people did"), plainTable(["when (UTC)", "what", "base", "who", "why"],
    events.map((event) => [time(event.at), event.act, event.base || "every base", event.who || "", event.why || ""]))];
}

function sentenceOf(row) {
  if (row.standing !== "served") {
    return [badge(row.standing), `Nothing of this author is served on ${row.base}. `, row.code ? el("code", {}, row.code) : null];
  }
  const margin = isNumber(row.margin) ? ` It is ${signed(row.margin)} ${range(row.lower, row.upper)} bits per byte ahead of the nearest of ${count(row.wrongs, "other author's adapter", "other authors' adapters")}.` : "";
  return [badge("served"), `On ${row.base}. Own needs ${figure(row.own)} bits per byte, the bare base ${figure(row.base_bpb)}.${margin}`];
}

function adviceLine(code) {
  const advice = code ? adviceFor(code) : null;
  return advice ? el("p", { class: "advice" }, el("b", {}, "What to do: "), told(advice)) : null;
}

const SUBJECTS = { own: "own", base: "bare base", base_again: "bare base, again", control: "control" };
const subjectOf = (subject) => SUBJECTS[subject] || subject.replace("wrong:", "");

function scoresOf(adapter) {
  if (!adapter.scores.length) return null;
  const rank = (subject) => ["own", "base", "control"].indexOf(subject) + 1 || 9;
  const rows = [...adapter.scores].sort((a, b) => rank(a.subject) - rank(b.subject) || (a.bpb || 0) - (b.bpb || 0));
  const isCompared = (row) => isNumber(row.difference);
  const compared = rows.filter(isCompared).map((row) => [subjectOf(row.subject), row.difference, row.difference_lower, row.difference_upper, figure(row.bpb)]);
  const others = rows.filter((row) => !isCompared(row)).map((row) => `${subjectOf(row.subject)} ${row.problem || figure(row.bpb)}`);
  return [
    el("h4", {}, "Scores, bits per byte"),
    el("p", {}, others.join(" · ")),
    compared.length ? [el("p", { class: "hint" }, "How much more than own the base, the control and other authors' adapters need, with the interval, and what they need in all. Left of zero is better than own."),
      forestOf(compared, "more than own")] : null,
  ];
}

function evidenceOf(adapter) {
  if (!adapter.evidence.length) return null;
  const parameters = [...new Set(adapter.evidence.map((row) => row.parameter))];
  return [el("h4", {}, "How its packing was read"), parameters.map((parameter) => {
    const rows = adapter.evidence.filter((row) => row.parameter === parameter);
    const verb = (row) => (row.agrees === true ? "✓ agrees" : row.agrees === false ? "✕ disagrees" : "");
    return el("div", { class: "parameter" },
      el("p", {}, el("code", {}, parameter), ` read as ${rows[0].value}, decided by ${rows[0].decided_by}`),
      plainTable(["evidence", "says", "", "detail"], rows.map((row) => [
        [row.source, row.strength ? el("small", {}, ` ${row.strength}`) : null], row.says || "nothing",
        el("span", { class: row.agrees === false ? "bad" : "" }, verb(row)), row.detail || ""])));
  })];
}

function checksOf(adapter) {
  if (!adapter.checks.length) return null;
  const failed = adapter.checks.filter((row) => row.passed === false);
  const head = failed.length ? `${failed.length} of ${count(adapter.checks.length, "check")} failed` : `All ${adapter.checks.length} checks passed`;
  return el("details", { open: failed.length > 0 }, el("summary", {}, el("h4", {}, head)),
    plainTable(["check", "result", "detail"], [...failed, ...adapter.checks.filter((row) => row.passed !== false)].map((row) => [
      row.name, row.passed ? "✓ passed" : el("b", { class: "bad" }, "✕ failed"), row.detail || ""])));
}

function historyOf(adapter) {
  if (!adapter.steps.length) return null;
  const total = adapter.steps[0].position + 1;
  const head = total > adapter.steps.length ? `History: the last ${adapter.steps.length} of ${total} steps` : `History: ${count(total, "step")}`;
  return el("details", {}, el("summary", {}, el("h4", {}, head)),
    plainTable(["when (UTC)", "step", "ended", "took", "why"], adapter.steps.map((step) => [
      time(step.finished_at), step.kind + (step.attempt > 1 ? `, attempt ${step.attempt}` : ""), [badge(step.outcome), step.code ? el("code", {}, step.code) : null],
      seconds(step.seconds), step.reason || ""])));
}

function verdictOf(adapter) {
  const last = adapter.verdicts.find((row) => row.latest);
  if (!last) return adapter.state === "quarantined" ? null : el("p", {}, "There is no verdict yet.");
  const also = (last.messages || []).slice(1);
  const others = (last.codes || []).filter((code) => code !== last.code);
  return [
    el("p", {}, el("b", {}, "Verdict: "), badge(last.outcome), last.code ? [" ", el("code", {}, last.code)] : null, ` ${time(last.measured_at)} `, last.reason ? el("span", { class: "reason" }, told(last.reason)) : null),
    also.length ? el("ul", {}, also.map((message) => el("li", {}, message))) : others.length ? el("p", {}, "Also: ", others.map((code) => el("code", {}, code))) : null,
    adapter.verdicts.length > 1 ? el("details", {}, el("summary", {}, `${adapter.verdicts.length - 1} earlier`), plainTable(["when", "verdict", "own", "bare base", "margin"],
      adapter.verdicts.filter((row) => row !== last).map((row) => [time(row.measured_at), [badge(row.outcome), row.code ? el("code", {}, row.code) : null], figure(row.own), figure(row.base_bpb), signed(row.margin)]))) : null,
  ];
}

function adapterCard(adapter, number, total) {
  const title = adapter.run ? `Run ${adapter.run}` : `Adapter ${total - number} of ${total}`;
  const facts = [
    bases.length > 1 ? ["base", adapter.base] : null,
    ["submitted", time(adapter.submitted) + (adapter.submissions > 1 ? `, ${adapter.submissions} times` : "")],
    adapter.adapter_digest ? ["adapter", el("code", {}, adapter.adapter_digest)] : null,
    adapter.output_digest ? ["converted", el("code", {}, adapter.output_digest)] : null,
    adapter.uri ? ["lies at", el("code", {}, adapter.uri)] : null,
    adapter.format ? ["format", `${adapter.format}, rank ${adapter.rank}`] : null,
  ].filter(Boolean);
  const isOver = adapter.state !== "ready" && adapter.last_step && !(adapter.last_step === "verdict" && adapter.verdicts.length);
  return el("details", { class: "adapter", open: number === 0 || adapter.served },
    el("summary", {}, el("h3", {}, title), badge(adapter.served ? "served" : adapter.state), adapter.stale ? el("span", { class: "flag" }, "stale") : null, adapter.state === "ready" && !adapter.served ? el("span", { class: "flag" }, "not served") : null, el("span", { class: "when" }, time(adapter.submitted))),
    isOver ? el("p", {}, el("b", {}, `Last step: ${adapter.last_step} `), badge(adapter.state), adapter.code ? [" ", el("code", {}, adapter.code)] : null, ` ${time(adapter.last_at)} `, adapter.reason ? el("span", { class: "reason" }, told(adapter.reason)) : null) : null,
    adapter.faults.map((fault) => el("p", { class: "bad" }, `Cannot be served all the same: ${fault.reason || fault.code}`)),
    adapter.state === "ready" ? null : adviceLine(adapter.code),
    verdictOf(adapter), scoresOf(adapter), evidenceOf(adapter), checksOf(adapter), historyOf(adapter),
    el("dl", {}, facts.map(([name, value]) => [el("dt", {}, name), el("dd", {}, value)])));
}

async function openAuthor(author) {
  const page = find("author");
  const lines = authors.filter((row) => row.author === author);
  const acts = rowsOf("acts", data.acts).filter((row) => row.author === author);
  const back = el("p", { class: "back" }, el("a", { href: "#" }, "← All authors"));
  if (!lines.length) {
    put(page, back, el("h2", {}, author), el("p", {}, "There is no such author on this page."));
    return;
  }
  const body = el("div", {}, "…");
  put(page, back, el("h2", {}, author), lines.map((row) => el("p", { class: "sentence" }, sentenceOf(row))),
    acts.map((act) => el("p", { class: "notice" }, badge(act.act), ` on ${act.base || "every base"} since ${time(act.since)}`, act.who ? ` by ${act.who}` : "", act.why ? `: ${act.why}` : "")), body);
  if (!hasCompression) {
    put(body, "The details need a browser of 2023 or later.");
    return;
  }
  const { adapters, events, times } = await detailsOf(author);
  put(body, [times.map(timesOf), adapters.map((adapter, number) => adapterCard(adapter, number, adapters.length)), eventsOf(events)]);
}

"use strict";
// Whatever comes from the log enters the page as text or as a number, never as markup.
(() => {
const setup = JSON.parse(document.getElementById("setup").textContent);
const byId = (id) => document.getElementById(id);
const STALLED = 60; // seconds without a new line
const SHOWN = 4; // findings that are seen at once; the others unfold
const CAUSES = { // the shape of each cause, so that colour is not all that tells them apart; in a box of 12
  "catapult": "M6 0.5a5.5 5.5 0 1 1-.01 0z", "learning-rate jump": "M1 1h10v10H1z", "bad batch": "M6 0.5L11.8 11H.2z",
  "data shift": "M6 0L12 6 6 12 0 6z", "second-moment collapse": "M6 11.5L11.8 1H.2z",
  "non-finite": "M2.5 0L6 3.5 9.5 0 12 2.5 8.5 6 12 9.5 9.5 12 6 8.5 2.5 12 0 9.5 3.5 6 0 2.5z", "unexplained": "M6 1.5a4.5 4.5 0 1 1-.01 0z",
};
const RANKS = {critical: 0, warning: 1, note: 2, good: 3};
const CHARTS = [
  {id: "loss", place: "first", title: "Loss", about: "Rises of the loss are marked by their cause.", scale: "log", height: 300, spikes: true,
    lines: [["steps", "loss", "of the batch"], ["probe", "loss", "of the probe"]]},
  {id: "ratio", place: "charts", title: "Learning rate ÷ critical rate", about: "Above 1 a step is expected to raise the loss.", scale: "log", decades: 2.5, edge: 1, over: true,
    lines: [["batch", "ratio", "of the batch"], ["probe", "ratio", "of the probe"]]},
  {id: "rates", place: "charts", title: "Learning rate and critical rates", about: "The schedule against the edge it meets.", scale: "log", decades: 3,
    lines: [["steps", "rate", "learning rate"], ["batch", "critical_rate", "critical, batch"], ["probe", "critical_rate", "critical, probe"]]},
  {id: "sharpness", place: "charts", title: "Sharpness and kernel norm", about: "The largest curvature; it falls in a catapult.", scale: "log",
    lines: [["batch", "sharpness", "sharpness, batch"], ["probe", "sharpness", "sharpness, probe"], ["probe", "kernel_norm", "kernel norm"]]},
  {id: "share", place: "charts", title: "Share of the loss in the top eigenspace", about: "A catapult rises and falls there, and leaves the rest alone.", limits: [0, 1],
    lines: [["probe", "top_share", "share"]]},
  {id: "norms", place: "charts", title: "Gradient and update", about: "Their norms, step by step.", scale: "log", decades: 5,
    lines: [["steps", "gradient_norm", "gradient"], ["steps", "update_norm", "update"]]},
  {id: "agop", place: "charts", title: "AGOP alignment", about: "How far the features agree with their reference: the target’s, or those at the first look.", limits: [0, 1],
    lines: [["probe", "agop_alignment", "alignment"]]},
];

// What is known of the run

class Table { // columns sorted by step; a later row about the same step replaces the earlier one
  constructor() { this.step = []; this.columns = {}; }
  take(part) {
    const names = Object.keys(part).filter((name) => name !== "step");
    for (const name of names) this.columns[name] ??= new Array(this.step.length).fill(null);
    part.step.forEach((step, i) => {
      const at = this.place(step), gone = this.step[at] === step ? 1 : 0;
      if (at === this.step.length) { this.step.push(step); for (const name of names) this.columns[name].push(part[name][i]); }
      else { this.step.splice(at, gone, step); for (const name of names) this.columns[name].splice(at, gone, part[name][i]); }
    });
  }
  place(step) { // the first row that is not before the step
    let low = 0, high = this.step.length;
    if (!high || this.step[high - 1] < step) return high;
    while (low < high) { const middle = (low + high) >> 1; if (this.step[middle] < step) low = middle + 1; else high = middle; }
    return low;
  }
  before(step) { const at = this.place(step); return this.step[at] === step ? at : at - 1; } // the last row not after it
  values(name) { return this.columns[name] || []; }
  last(name) { const values = this.values(name); for (let i = values.length - 1; i >= 0; i--) if (values[i] !== null) return values[i]; return null; }
}

let log, offset = 0, token = "", lost = false, age = null, asked = Date.now(), cursor = null, stale = true, said = "";
function clear() {
  log = {tables: {steps: new Table(), batch: new Table(), probe: new Table()}, spikes: new Map(), nonfinite: {loss: new Set(), gradient_norm: new Set()}, runs: [], end: null, bad: 0, counts: null};
  stale = true;
}
function take(message) {
  for (const [name, part] of Object.entries(message.tables)) if (part.step.length) { log.tables[name].take(part); stale = true; }
  for (const spike of message.spikes) { log.spikes.set(spike.start, spike); stale = true; }
  for (const [name, places] of Object.entries(log.nonfinite)) {
    if (places.size) for (const step of message.tables.steps.step) places.delete(step);
    for (const step of message.nonfinite[name]) places.add(step);
  }
  if (message.runs.length) { log.runs.push(...message.runs); log.end = null; stale = true; }
  if (message.end) { log.end = message.end; stale = true; }
  log.bad += message.bad_lines;
}

// Words and elements

function show(value) {
  if (typeof value !== "number" || !Number.isFinite(value)) return "–";
  const size = Math.abs(value);
  if (Number.isInteger(value) && size < 1e9) return value.toLocaleString("en");
  return size < 1e-3 || size >= 1e6 ? value.toExponential(2).replace("e+", "e") : Number(value.toPrecision(4)).toLocaleString("en", {maximumFractionDigits: 8});
}
function duration(seconds) {
  if (typeof seconds !== "number") return "–";
  if (seconds < 100) return `${Math.round(seconds)} s`;
  if (seconds < 6000) return `${Math.round(seconds / 60)} min`;
  return seconds < 172800 ? `${Math.round(seconds / 3600)} h` : `${Math.round(seconds / 86400)} days`;
}
const percent = (share) => typeof share === "number" ? `${Number((100 * share).toPrecision(3))} %` : "–";
const plural = (count, one, many) => `${count.toLocaleString("en")} ${count === 1 ? one : many}`;
function html(name, text, kind) {
  const node = document.createElement(name);
  if (text !== undefined) node.textContent = text;
  if (kind) node.className = kind;
  return node;
}
function svg(name, attributes = {}, children = []) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  node.append(...children);
  return node;
}
const causeOf = (spike) => Object.hasOwn(CAUSES, spike.cause) ? spike.cause : "unexplained";
const causeClass = (cause) => cause.replaceAll(" ", "-") + (cause === "unexplained" ? " hollow" : "");
function glyph(cause) { return svg("svg", {class: "glyph", viewBox: "0 0 12 12", "aria-hidden": "true"}, [svg("path", {class: `mark ${causeClass(cause)}`, d: CAUSES[cause]})]); }
function pairs(node, items) {
  node.replaceChildren(...items.filter((item) => item[1] !== null && item[1] !== undefined && item[1] !== "–").map(([name, value]) => {
    const part = html("div"); part.append(html("dt", name), html("dd", String(value))); return part;
  }));
}

// Figures

const charts = CHARTS.map((spec) => {
  const box = html("section", undefined, spec.place === "first" ? "whole" : ""), title = html("h2", spec.title), figure = html("figure");
  title.id = `title-${spec.id}`; box.id = `chart-${spec.id}`; box.setAttribute("aria-labelledby", title.id);
  const legend = html("ul", undefined, "legend"), readout = html("p", "", "readout");
  const picture = svg("svg", {class: "chart", role: "img", tabindex: "0"});
  figure.append(picture); box.append(title, html("p", spec.about, "question"), legend, figure, readout);
  byId(spec.place).append(box);
  const chart = {spec, box, legend, figure, picture, readout, x: null};
  picture.addEventListener("pointermove", (event) => point(chart, event.clientX - picture.getBoundingClientRect().left));
  picture.addEventListener("pointerleave", () => moveTo(null));
  picture.addEventListener("focus", () => { if (picture.matches(":focus-visible")) { readout.setAttribute("aria-live", "polite"); moveTo(ends()[1]); } });
  picture.addEventListener("blur", () => { readout.removeAttribute("aria-live"); moveTo(null); });
  picture.addEventListener("keydown", (event) => press(chart, event));
  return chart;
});

const broken = (column, step) => log.nonfinite[column]?.has(step) ?? false;
function ends() { // the first and last step of all tables, of which the chosen part is shown
  const all = Object.values(log.tables).filter((table) => table.step.length);
  const first = Math.min(...all.map((table) => table.step[0])), last = Math.max(...all.map((table) => table.step[table.step.length - 1]));
  return all.length ? [last - (last - first) * Number(byId("range").value), last] : [0, 1];
}
function thin(table, column, [first, last], x, breaks) { // per pixel the smallest and the largest value, in their order; null where the line breaks
  const values = table.values(column), points = [];
  let pixel = null, low = -1, high = -1;
  const flush = () => {
    if (low < 0) return;
    for (const i of low === high ? [low] : low < high ? [low, high] : [high, low]) points.push([table.step[i], values[i]]);
    low = high = -1;
  };
  for (let i = table.place(first); i < table.step.length && table.step[i] <= last; i++) {
    const at = Math.floor(x(table.step[i]));
    if (at !== pixel) { flush(); pixel = at; }
    if (values[i] === null || values[i] === undefined) { if (breaks) { flush(); points.push(null); } continue; }
    if (low < 0 || values[i] < values[low]) low = i;
    if (high < 0 || values[i] > values[high]) high = i;
  }
  flush();
  return points;
}
function scaleOf(spec, series) { // linear, or logarithmic where nearly all values are positive
  const values = series.flatMap((line) => line.filter(Boolean).map((point) => point[1]));
  const positive = values.filter((value) => value > 0);
  const log10 = spec.scale === "log" && positive.length >= 0.9 * values.length;
  const shown = log10 ? positive : values, turn = log10 ? Math.log10 : (value) => value;
  if (spec.edge) shown.push(spec.edge);
  let low = turn(shown.reduce((a, b) => Math.min(a, b), Infinity)), high = turn(shown.reduce((a, b) => Math.max(a, b), -Infinity));
  if (spec.limits) { low = Math.min(low, spec.limits[0]); high = Math.max(high, spec.limits[1]); }
  if (log10 && spec.decades) low = Math.max(low, high - spec.decades); // a schedule that ends at zero would flatten the rest
  const below = shown.filter((value) => turn(value) < low).length;
  const room = (high - low || Math.abs(high) || 1) * (spec.limits ? 0.02 : 0.06);
  return {log: log10, turn, low: low - room, high: high + room * (spec.spikes ? 1.8 : 1), below, hidden: values.length - shown.length + (spec.edge ? 1 : 0)};
}
const POWERS = "⁰¹²³⁴⁵⁶⁷⁸⁹";
function power(exponent) { return "10" + (exponent < 0 ? "⁻" : "") + [...String(Math.abs(exponent))].map((digit) => POWERS[digit]).join(""); }
function ticks(low, high, count) { // round numbers from low to high
  if (!(low < high)) return [low];
  const raw = (high - low) / Math.max(1, count), base = 10 ** Math.floor(Math.log10(raw));
  const step = base * ([1, 2, 5, 10].find((nice) => nice * base >= 0.75 * raw) || 10), found = [];
  for (let i = Math.ceil(low / step); i * step <= high + step * 1e-9; i++) found.push(Number((i * step).toPrecision(12)));
  return found;
}
function levels(scale, room) { // [place on the axis, label]
  if (!scale.log) return ticks(scale.low, scale.high, 5).map((value) => [value, show(value)]);
  const decades = scale.high - scale.low, found = [];
  if (decades < 0.5) return ticks(10 ** scale.low, 10 ** scale.high, 4).filter((value) => value > 0).map((value) => [Math.log10(value), show(value)]);
  const every = Math.max(1, Math.ceil(decades / 7)), digits = room / (3 * decades) > 22 ? [1, 2, 5] : [1];
  const plain = scale.low >= -3.5 && scale.high < 5;
  for (let e = Math.floor(scale.low); e <= scale.high; e++) {
    if (e % every) continue;
    for (const digit of digits) {
      const place = e + Math.log10(digit);
      if (place >= scale.low && place <= scale.high) found.push([place, plain ? show(Number((digit * 10 ** e).toPrecision(3))) : digit === 1 ? power(e) : `${digit}·${power(e)}`]);
    }
  }
  return found;
}

function draw(chart) {
  const {spec, picture} = chart, [first, last] = ends();
  const width = Math.max(240, Math.floor(chart.figure.clientWidth)), height = spec.height || 220;
  const rough = (step) => (step - first) / (last - first || 1) * width; // before the margins are known
  const series = spec.lines.map(([table, column]) => thin(log.tables[table], column, [first, last], rough, table === "steps"));
  const full = series.some((line) => line.some(Boolean));
  chart.legend.replaceChildren(); chart.x = null;
  picture.setAttribute("viewBox", `0 0 ${width} ${height}`); picture.setAttribute("height", height);
  if (!full) {
    picture.setAttribute("aria-label", `${spec.title}: nothing measured yet.`);
    picture.replaceChildren(svg("text", {x: width / 2, y: height / 2, "text-anchor": "middle"}, [log.end ? "Not measured in this run." : "Nothing measured yet."]));
    return;
  }
  const scale = scaleOf(spec, series), marks = levels(scale, height - 32);
  const area = {left: 16 + 7 * Math.max(2, ...marks.map(([, label]) => [...label].length)), right: width - 10, top: 8, bottom: height - 24};
  const x = (step) => area.left + (step - first) / (last - first || 1) * (area.right - area.left);
  const y = (value) => area.bottom - (scale.turn(value) - scale.low) / (scale.high - scale.low) * (area.bottom - area.top);
  const inside = svg("g", {"clip-path": `url(#clip-${spec.id})`});
  const clip = svg("clipPath", {id: `clip-${spec.id}`}, [svg("rect", {x: area.left - 4, y: 0, width: area.right - area.left + 12, height: area.bottom + 1})]);
  picture.replaceChildren(clip, ...axes(area, x, marks, scale, first, last), inside);
  if (spec.spikes) inside.append(...spans(area, x, first, last));
  if (spec.edge) inside.append(svg("path", {class: "edge", d: `M${area.left} ${y(spec.edge)}H${area.right}`}), svg("text", {class: "edge-name", x: area.right - 4, y: y(spec.edge) - 5, "text-anchor": "end"}, ["edge of stability"]));
  series.forEach((line, i) => trace(inside, line, i + 1, x, y, scale));
  if (spec.over) inside.append(...exceeded(x, y, first, last));
  if (spec.spikes) { inside.append(...missing(area, x, first, last)); picture.append(...peaks(area, x, y, scale, first, last)); }
  chart.x = x; chart.area = area; chart.cursor = svg("path", {class: "cursor", d: "", visibility: "hidden"}); picture.append(chart.cursor);
  name(chart, series, scale);
}
function axes(area, x, marks, scale, first, last) {
  const found = [];
  for (const [place, label] of marks) {
    const at = area.bottom - (place - scale.low) / (scale.high - scale.low) * (area.bottom - area.top);
    found.push(svg("path", {class: "grid", d: `M${area.left} ${at}H${area.right}`}), svg("text", {x: area.left - 7, y: at + 4, "text-anchor": "end"}, [label]));
  }
  found.push(svg("path", {class: "axis", d: `M${area.left} ${area.bottom}H${area.right}`}));
  for (const step of ticks(first, last, Math.max(2, (area.right - area.left) / 110)).filter((value) => Number.isInteger(value))) {
    const at = x(step), anchor = at > area.right - 18 ? "end" : "middle";
    found.push(svg("path", {class: "axis", d: `M${at} ${area.bottom}v4`}), svg("text", {x: at, y: area.bottom + 17, "text-anchor": anchor}, [show(step)]));
  }
  return found;
}
function trace(parent, line, number, x, y, scale) {
  let d = "", pen = false;
  for (const point of line) {
    if (!point || (scale.log && point[1] <= 0)) { pen = false; continue; }
    d += `${pen ? "L" : "M"}${x(point[0]).toFixed(1)} ${y(point[1]).toFixed(1)}`; pen = true;
  }
  parent.append(svg("path", {class: `trace t${number}`, d}));
  const points = line.filter((point) => point && !(scale.log && point[1] <= 0));
  if (points.length <= 60) for (const [step, value] of points) parent.append(svg("circle", {class: `dot t${number}`, cx: x(step).toFixed(1), cy: y(value).toFixed(1), r: 2.3}));
}
function exceeded(x, y, first, last) { // looks above the edge, the highest one of each few pixels
  const table = log.tables.batch, flags = table.values("exceeded"), ratios = table.values("ratio"), best = new Map();
  for (let i = table.place(first); i < table.step.length && table.step[i] <= last; i++) {
    if (!flags[i] || !(ratios[i] > 0)) continue;
    const at = Math.floor(x(table.step[i]) / 4);
    if (!best.has(at) || ratios[best.get(at)] < ratios[i]) best.set(at, i);
  }
  return [...best.values()].map((i) => svg("circle", {class: "over", cx: x(table.step[i]).toFixed(1), cy: y(ratios[i]).toFixed(1), r: 4.5}));
}
function missing(area, x, first, last) { // steps whose loss or gradient is not finite
  const steps = [...log.nonfinite.loss, ...log.nonfinite.gradient_norm];
  const places = new Set(steps.filter((step) => step >= first && step <= last).map((step) => Math.round(x(step) / 5) * 5));
  return [...places].map((at) => svg("path", {class: "missing", d: `M${at} ${area.top}l4 7h-8z`}));
}
const visible = (first, last) => [...log.spikes.values()].filter((spike) => spike.start <= last && (spike.end ?? spike.peak ?? spike.start) >= first);
function spans(area, x, first, last) {
  return visible(first, last).map((spike) => {
    const left = x(Math.max(first, spike.start)), right = x(Math.min(last, spike.end ?? last));
    return svg("rect", {class: `span ${causeClass(causeOf(spike))}${(spike.end ?? null) === null ? " open" : ""}`, x: left, y: area.top, width: Math.max(2, right - left), height: area.bottom - area.top});
  });
}
function peaks(area, x, y, scale, first, last) {
  const table = log.tables.steps;
  return visible(first, last).map((spike) => {
    const step = Math.min(Math.max(spike.peak ?? spike.start, first), last), loss = table.values("loss")[table.before(step)];
    const high = typeof loss === "number" && (!scale.log || loss > 0) ? y(loss) - 12 : area.top + 6, cause = causeOf(spike);
    const mark = svg("path", {class: `mark ${causeClass(cause)}`, d: CAUSES[cause], transform: `translate(${(x(step) - 6).toFixed(1)} ${(Math.max(area.top + 6, high) - 6).toFixed(1)})`});
    mark.append(svg("title", {}, [`Step ${show(spike.peak ?? spike.start)}: ${spike.cause}. ${spike.sentence ?? ""}`]));
    return mark;
  });
}
function name(chart, series, scale) { // the legend, and what a screen reader says
  const {spec, legend, picture} = chart, words = [];
  spec.lines.forEach(([table, column, label], i) => {
    if (!series[i].some(Boolean)) return;
    const item = html("li"), swatch = svg("svg", {class: "swatch", viewBox: "0 0 26 12", "aria-hidden": "true"}, [svg("path", {class: `trace t${i + 1}`, d: "M1 6H25"})]);
    item.append(swatch, label); legend.append(item);
    words.push(`${label} now ${show(log.tables[table].last(column))}`);
  });
  const note = (child, text) => { const item = html("li"); item.append(child, text); legend.append(item); };
  if (spec.spikes) {
    const [first, last] = ends(), seen = visible(first, last);
    for (const cause of new Set(seen.map(causeOf))) note(glyph(cause), `${cause} (${seen.filter((spike) => causeOf(spike) === cause).length})`);
    if (log.nonfinite.loss.size + log.nonfinite.gradient_norm.size) note(svg("svg", {class: "glyph", viewBox: "0 0 12 12", "aria-hidden": "true"}, [svg("path", {class: "missing", d: "M6 1l5 9H1z"})]), "loss or gradient not finite");
    words.push(plural(seen.length, "spike", "spikes"));
  }
  if (spec.over && log.tables.batch.values("exceeded").some(Boolean)) note(svg("svg", {class: "glyph", viewBox: "0 0 12 12", "aria-hidden": "true"}, [svg("circle", {class: "over", cx: 6, cy: 6, r: 4.5})]), "batch above the edge");
  if (scale.below) legend.append(html("li", "the lowest values lie below the axis"));
  if (scale.hidden) legend.append(html("li", `${scale.hidden} values are not positive and not on this log axis`));
  picture.setAttribute("aria-label", `${spec.title}, steps ${show(Math.round(ends()[0]))} to ${show(ends()[1])}, ${scale.log ? "logarithmic" : "linear"} axis: ${words.join("; ")}.`);
}

// Reading numbers off the figures

function point(chart, place) {
  if (!chart.x) return;
  const [first, last] = ends(), share = (place - chart.area.left) / (chart.area.right - chart.area.left);
  moveTo(share < -0.02 || share > 1.02 ? null : Math.round(first + Math.min(1, Math.max(0, share)) * (last - first)));
}
function press(chart, event) {
  const [first, last] = ends(), pixel = (last - first) / 200, table = log.tables[chart.spec.lines[0][0]];
  const far = (sign) => { // one row of the figure's own table, or half a hundredth of the run where that is more
    const here = cursor ?? last, at = table.before(here), near = table.step[sign > 0 ? at + 1 : (table.step[at] === here ? at - 1 : at)] ?? here + sign;
    return Math.abs(near - here) > pixel ? near : Math.round(here + sign * Math.max(1, pixel * (event.shiftKey ? 10 : 1)));
  };
  const to = {ArrowLeft: () => far(-1), ArrowRight: () => far(1), Home: () => first, End: () => last, Escape: () => null}[event.key];
  if (!to) return;
  event.preventDefault();
  const step = to();
  moveTo(step === null ? null : Math.min(last, Math.max(Math.ceil(first), step)));
}
function moveTo(step) { cursor = step; for (const chart of charts) readOff(chart); }
function readOff(chart) {
  if (!chart.x) { chart.readout.textContent = ""; return; }
  const step = cursor ?? ends()[1], area = chart.area;
  chart.cursor.setAttribute("visibility", cursor === null ? "hidden" : "visible");
  chart.cursor.setAttribute("d", `M${chart.x(step)} ${area.top}V${area.bottom}`);
  const parts = chart.spec.lines.map(([table, column, label]) => {
    const rows = log.tables[table], values = rows.values(column);
    let at = rows.before(step);
    while (table !== "steps" && at >= 0 && (values[at] === null || values[at] === undefined)) at--; // the last look that measured it
    if (at < 0 || values[at] === undefined || !values.some((value) => value !== null)) return "";
    return `${label} ${table === "steps" && broken(column, rows.step[at]) ? "not finite" : show(values[at])}` + (rows.step[at] === step || table === "steps" ? "" : ` (step ${show(rows.step[at])})`);
  });
  chart.readout.textContent = `Step ${show(step)}: ${parts.filter(Boolean).join(" · ")}`;
}

// Findings, counters, state

function finding(spike) {
  const level = Object.hasOwn(RANKS, spike.severity) ? spike.severity : "note", card = html("article", undefined, `card ${level}`);
  const head = html("p", undefined, "head"), cause = html("span", undefined, "badge cause");
  cause.append(glyph(causeOf(spike)), String(spike.cause ?? "unexplained"));
  const until = spike.end === null || spike.end === undefined ? ", not over" : ` to ${show(spike.end)}`;
  head.append(html("span", level, `badge ${level}`), cause, html("span", `step ${show(spike.start)}${until}, peak at ${show(spike.peak)}`, "when"));
  card.append(head, html("p", String(spike.sentence ?? ""), "sentence"));
  if (typeof spike.height === "number") { const value = html("p", undefined, "value"); value.append(html("b", `${show(spike.height)} ×`), html("span", "the loss before")); card.append(value); }
  if (spike.advice) { const advice = html("p"); advice.append(html("strong", "What to do: "), String(spike.advice)); card.append(advice); }
  const facts = [];
  if (typeof spike.sharpness_before === "number") facts.push(`sharpness ${show(spike.sharpness_before)} before, ${show(spike.sharpness_after)} after`);
  if (typeof spike.top_share === "number") facts.push(`${percent(spike.top_share)} of the rise in the top eigenspace`);
  if (typeof spike.batch === "number") facts.push(`look at the batch of step ${show(spike.batch)}`);
  if (facts.length) card.append(html("p", facts.join(" · "), "soft small"));
  return card;
}
function findings() {
  const rank = (spike) => RANKS[spike.severity] ?? RANKS.note;
  const all = [...log.spikes.values()].sort((a, b) => rank(a) - rank(b) || b.start - a.start), text = JSON.stringify([all, !!log.end, log.tables.steps.step.length > 0]);
  if (text === said) return;
  const news = said !== "" && all.length ? all.reduce((a, b) => b.start > a.start ? b : a) : null;
  said = text;
  byId("tally").replaceChildren(...Object.keys(RANKS).flatMap((level) => {
    const count = all.filter((spike) => rank(spike) === RANKS[level]).length;
    return count ? [html("span", `${count} ${level === "critical" || level === "good" ? level : count === 1 ? level : level + "s"}`, `badge ${level}`)] : [];
  }));
  const cards = all.map(finding), list = byId("list"), open = list.querySelector("details")?.open;
  if (!cards.length) { list.replaceChildren(html("p", log.tables.steps.step.length ? `No spike of the loss ${log.end ? "was" : "has been"} found.` : "Nothing has been logged yet.", "lead")); return; }
  list.replaceChildren(...cards.slice(0, SHOWN));
  if (cards.length > SHOWN) {
    const rest = html("details"); rest.open = Boolean(open);
    rest.append(html("summary", plural(cards.length - SHOWN, "more finding", "more findings")), ...cards.slice(SHOWN));
    list.append(rest);
  }
  if (news) byId("news").textContent = `Finding: ${news.sentence ?? news.cause}`;
}
function counters() {
  const {steps, batch, probe} = log.tables, run = log.runs[log.runs.length - 1] || {}, end = log.end || {}, spikes = [...log.spikes.values()];
  const total = (table, name) => table.values(name).reduce((sum, value) => sum + (value || 0), 0);
  const counts = log.counts || {steps: steps.step.length, batch: batch.step.length, probe: probe.step.length, exceeded: total(batch, "exceeded"), seconds: total(batch, "seconds") + total(probe, "seconds")};
  const now = steps.step[steps.step.length - 1], loss = broken("loss", now) ? "not finite" : show(steps.last("loss"));
  byId("title").textContent = run.model ? String(run.model) : "Training";
  document.title = `${steps.step.length ? `step ${show(now)} · ` : ""}${run.model ?? "Training"} · Theodolite watch`;
  pairs(byId("now"), [["step", steps.step.length ? show(now) : null], ["loss", loss], ["learning rate", show(steps.last("rate"))],
    ["critical rate, batch", show(batch.last("critical_rate"))], ["rate ÷ critical rate", show(batch.last("ratio") ?? probe.last("ratio"))], ["sharpness", show(probe.last("sharpness") ?? batch.last("sharpness"))],
    ["spikes", steps.step.length ? show(spikes.length) : null], ["catapults", steps.step.length ? show(end.catapults ?? spikes.filter((spike) => spike.cause === "catapult").length) : null]]);
  pairs(byId("facts"), [["parameters", show(run.parameters)], ["loss function", run.loss], ["optimizer", run.optimizer], ["curvature", run.curvature && String(run.curvature).replaceAll("_", "-")], ["probe samples", show(run.probe_samples)],
    ["budget", percent(run.budget)], ["started", typeof run.started === "string" ? run.started.replace("T", " ").slice(0, 16) : null], ["resumed", log.runs.length > 1 ? plural(log.runs.length - 1, "time", "times") : null]]);
  const table = html("dl", undefined, "facts"); table.setAttribute("aria-label", "Counters");
  pairs(table, [["steps", show(counts.steps)], ["looks at a batch", show(counts.batch)], ["looks at the probe", show(counts.probe)], ["batches above the edge", counts.batch ? `${show(counts.exceeded)} (${percent(counts.exceeded / counts.batch)})` : null],
    ["time of the monitor", typeof end.monitor_seconds === "number" ? `${duration(end.monitor_seconds)} of ${duration(end.seconds)} (${percent(end.monitor_seconds / end.seconds)})` : counts.seconds ? duration(counts.seconds) : null],
    ["above the edge when the loss rose", percent(end.match_rate)], ["above the edge at any step", percent(end.base_rate)], ["loss rose when above the edge", percent(end.up_given_exceeded)], ["lines that could not be read", log.bad ? show(log.bad) : null]]);
  byId("counters").replaceChildren(table);
}
function state() {
  const idle = age === null ? null : age + (setup.live ? (Date.now() - asked) / 1000 : 0), ago = idle === null ? "" : `last line ${duration(idle)} ago`;
  const any = log.runs.length || log.tables.steps.step.length;
  let [level, word, more] = ["good", "running", ago];
  if (log.end) [level, word, more] = ["note", "finished", `after ${show(log.end.step)} steps` + (typeof log.end.seconds === "number" ? ` and ${duration(log.end.seconds)}` : "")];
  else if (lost) [level, word, more] = ["failed", "no connection", "theodolite watch has ended; what is drawn is what was known then"];
  else if (!any && !setup.live) [level, word, more] = ["skipped", "empty", "nothing had been logged when this page was made"];
  else if (!any) [level, word, more] = ["skipped", "waiting", `for ${setup.path}`];
  else if (idle !== null && idle >= STALLED) [level, word, more] = ["warning", "stalled", `no new line for ${duration(idle)}`];
  else if (!setup.live) [level, word, more] = ["skipped", "not finished", `${ago ? ago.replace(" ago", " before") : ""} this page was made`];
  if (!setup.live && word === "stalled") [word, more] = ["not finished", `no new line for ${duration(idle)} when this page was made`];
  const badge = byId("state");
  if (badge.textContent !== word) { badge.textContent = word; badge.className = `badge ${level}`; }
  byId("age").textContent = more;
}
function redraw() {
  stale = false;
  counters(); findings();
  for (const chart of charts) { draw(chart); readOff(chart); }
}
async function poll() {
  let pause = 1000;
  try {
    const answer = await fetch(`data?offset=${offset}&token=${token}`, {cache: "no-store"});
    if (!answer.ok) throw new Error(answer.status);
    const message = await answer.json();
    if ((token && message.token !== token) || message.offset < offset) clear(); // another log took its place
    ({offset, token, age} = message); asked = Date.now(); lost = false;
    take(message);
    if (message.more) pause = 0;
  } catch { lost = true; pause = 2000; }
  if (stale && !document.hidden) redraw();
  state();
  setTimeout(poll, pause);
}

clear();
byId("foot").textContent = `${setup.path} · theodolite ${setup.version}${setup.live ? "" : `, ${setup.made}`}`;
byId("range").addEventListener("change", redraw);
document.addEventListener("visibilitychange", () => { if (!document.hidden) redraw(); });
new ResizeObserver(() => requestAnimationFrame(() => { for (const chart of charts) { draw(chart); readOff(chart); } })).observe(byId("charts"));
if (setup.live) poll();
else { age = setup.age; take(setup.data); log.counts = setup.data.counts; }
redraw(); state();
})();

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
const PAIR = setup.runs.length > 1; // two runs: colours tell the runs apart, dashes the lines
const STATES = {learning: "good", flat: "good", starting: "note", lost: "warning", "not learning": "critical", diverged: "critical", "not finite": "critical"};
const CHARTS = [ // lines as [table, column, label, drawn where two runs are compared]
  {id: "loss", place: "first", title: "Loss", about: "Rises of the loss are marked by their cause.", scale: "log", height: 300, spikes: true,
    lines: [["steps", "loss", "of the batch", true], ["probe", "loss", "of the probe"], ["validation", "loss", "validation", true], ["progress", "trivial", "best constant prediction"]]},
  {id: "ratio", place: "charts", title: "Learning rate ÷ critical rate", about: "Above 1 a step is expected to raise the loss.", scale: "log", decades: 2.5, edge: 1, over: true,
    lines: [["batch", "ratio", "of the batch", true], ["probe", "ratio", "of the probe"]]},
  {id: "rates", place: "charts", title: "Learning rate and critical rates", about: "The schedule against the edge it meets.", scale: "log", decades: 3,
    lines: [["steps", "rate", "learning rate", true], ["batch", "critical_rate", "critical, batch"], ["probe", "critical_rate", "critical, probe"]]},
  {id: "alive", place: "charts", title: "Hidden units that get gradients", about: "The share that had a gradient lately; units that lose it are dead.", limits: [0, 1],
    lines: [["progress", "alive", "share", true]]},
  {id: "moves", place: "charts", title: "Length of a step ÷ length of the weights", about: "Of the middle layer. About a thousandth is usual; nothing moves far below.", scale: "log", always: true, decades: 4,
    lines: [["progress", "update_ratio", "median of the layers", true]]},
  {id: "layers", place: "charts", title: "Gradients by layer", about: "Per weight, of the layers with the smallest and the largest: far apart, they vanish or explode.", scale: "log", always: true, decades: 12,
    lines: [["progress", "high_gradient", "largest", true], ["progress", "low_gradient", "smallest", true]]},
  {id: "sharpness", place: "charts", title: "Sharpness and kernel norm", about: "The largest curvature; it falls in a catapult.", scale: "log",
    lines: [["batch", "sharpness", "sharpness, batch", true], ["probe", "sharpness", "sharpness, probe"], ["probe", "kernel_norm", "kernel norm"]]},
  {id: "share", place: "charts", title: "Share of the loss in the top eigenspace", about: "A catapult rises and falls there, and leaves the rest alone.", limits: [0, 1],
    lines: [["probe", "top_share", "share", true]]},
  {id: "norms", place: "charts", title: "Gradient and update", about: "Their norms, step by step.", scale: "log", decades: 5,
    lines: [["steps", "gradient_norm", "gradient", true], ["steps", "update_norm", "update"]]},
  {id: "agop", place: "charts", title: "AGOP alignment", about: "How far the features agree with their reference: the target’s, or those at the first look.", limits: [0, 1],
    lines: [["probe", "agop_alignment", "alignment", true]]},
].map((spec) => ({...spec, lines: spec.lines.filter((line) => !PAIR || line[3])}));

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

class Log { // what is known of one run, and how far its file was read
  constructor(run, number) { Object.assign(this, {name: run.name, path: run.path, number, offset: 0, token: "", lost: false, age: run.age, asked: Date.now()}); this.clear(); }
  clear() {
    const tables = {steps: new Table(), batch: new Table(), probe: new Table(), progress: new Table(), validation: new Table()};
    Object.assign(this, {tables, spikes: new Map(), alerts: new Map(), standing: null, nonfinite: {loss: new Set(), gradient_norm: new Set()}, runs: [], end: null, bad: 0, counts: null});
    stale = true;
  }
  take(message) {
    for (const [name, part] of Object.entries(message.tables)) if (part.step.length) { this.tables[name].take(part); stale = true; }
    for (const spike of message.spikes) { this.spikes.set(spike.start, spike); stale = true; }
    for (const alert of message.alerts) { this.alerts.set(`${alert.step} ${alert.alert}`, alert); stale = true; }
    if (message.standing) this.standing = message.standing;
    for (const [name, places] of Object.entries(this.nonfinite)) {
      if (places.size) for (const step of message.tables.steps.step) places.delete(step);
      for (const step of message.nonfinite[name]) places.add(step);
    }
    if (message.runs.length) { this.runs.push(...message.runs); this.end = null; stale = true; }
    if (message.end) { this.end = message.end; stale = true; }
    this.bad += message.bad_lines;
  }
  broken(column, step) { return this.nonfinite[column]?.has(step) ?? false; }
  get steps() { return this.tables.steps.step; }
  get header() { return this.runs[this.runs.length - 1] || {}; }
}
let cursor = null, stale = true, said = "", verdict = setup.verdict;
const logs = setup.runs.map((run, i) => new Log(run, i + 1));

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
  const chart = {spec, box, legend, figure, picture, readout, x: null};
  picture.addEventListener("pointermove", (event) => point(chart, event.clientX - picture.getBoundingClientRect().left));
  picture.addEventListener("pointerleave", () => moveTo(null));
  picture.addEventListener("focus", () => { if (picture.matches(":focus-visible")) { readout.setAttribute("aria-live", "polite"); moveTo(ends()[1]); } });
  picture.addEventListener("blur", () => { readout.removeAttribute("aria-live"); moveTo(null); });
  picture.addEventListener("keydown", (event) => press(chart, event));
  return chart;
});

function ends() { // the first and last step of all tables, of which the chosen part is shown
  const all = logs.flatMap((log) => Object.values(log.tables)).filter((table) => table.step.length);
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
  const log10 = spec.scale === "log" && positive.length >= (spec.always ? 1e-9 : 0.9) * values.length && positive.length > 0;
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

function drawn(spec) { // every line of every run: where it is, and how it looks
  return logs.flatMap((log) => spec.lines.map(([table, column, label], i) => ({log, table, column, label, line: i + 1, rows: log.tables[table], look: PAIR ? `r${log.number} d${i + 1}` : `t${i + 1} d${i + 1}`})));
}
function draw(chart) {
  const {spec, picture, box} = chart, [first, last] = ends(), lines = drawn(spec);
  chart.legend.replaceChildren(); chart.x = null;
  const full = lines.some(({rows, column}) => rows.values(column).some((value) => value !== null && value !== undefined));
  if (!full) { box.remove(); return; } // what was not measured is not drawn
  if (!box.isConnected) {
    const next = charts.slice(charts.indexOf(chart) + 1).find((other) => other.spec.place === spec.place && other.box.isConnected);
    byId(spec.place).insertBefore(box, next ? next.box : null);
  }
  const width = Math.max(240, Math.floor(chart.figure.clientWidth)), height = spec.height || 220;
  const rough = (step) => (step - first) / (last - first || 1) * width; // before the margins are known
  for (const line of lines) line.points = thin(line.rows, line.column, [first, last], rough, line.table === "steps");
  picture.setAttribute("viewBox", `0 0 ${width} ${height}`); picture.setAttribute("height", height);
  const scale = scaleOf(spec, lines.map((line) => line.points)), marks = levels(scale, height - 32);
  const area = {left: 16 + 7 * Math.max(2, ...marks.map(([, label]) => [...label].length)), right: width - 10, top: 8, bottom: height - 24};
  const x = (step) => area.left + (step - first) / (last - first || 1) * (area.right - area.left);
  const y = (value) => area.bottom - (scale.turn(value) - scale.low) / (scale.high - scale.low) * (area.bottom - area.top);
  const inside = svg("g", {"clip-path": `url(#clip-${spec.id})`});
  const clip = svg("clipPath", {id: `clip-${spec.id}`}, [svg("rect", {x: area.left - 4, y: 0, width: area.right - area.left + 12, height: area.bottom + 1})]);
  picture.replaceChildren(clip, ...axes(area, x, marks, scale, first, last), inside);
  if (spec.spikes && !PAIR) inside.append(...logs.flatMap((log) => spans(log, area, x, first, last)));
  if (spec.edge) inside.append(svg("path", {class: "edge", d: `M${area.left} ${y(spec.edge)}H${area.right}`}), svg("text", {class: "edge-name", x: area.right - 4, y: y(spec.edge) - 5, "text-anchor": "end"}, ["edge of stability"]));
  for (const line of lines) {
    const noisy = PAIR && line.points.length > 200; // two bands over each other cannot be read: their means stand above them
    trace(inside, line.points, `${line.look}${noisy ? " noisy" : ""}`, x, y, scale);
    if (noisy) trace(inside, means(line.rows, line.column, [first, last], x), `${line.look} mean`, x, y, scale);
  }
  if (spec.over) inside.append(...logs.flatMap((log) => exceeded(log, x, y, first, last)));
  if (spec.spikes) for (const log of logs) { inside.append(...missing(log, area, x, first, last)); picture.append(...peaks(log, area, x, y, scale, first, last)); }
  chart.x = x; chart.area = area; chart.cursor = svg("path", {class: "cursor", d: "", visibility: "hidden"}); picture.append(chart.cursor);
  name(chart, lines, scale);
}
function means(table, column, [first, last], x) { // mean values over a few pixels each
  const values = table.values(column), points = [];
  let place = null, sum = 0, steps = 0, count = 0;
  const flush = () => { if (count) points.push([steps / count, sum / count]); sum = steps = count = 0; };
  for (let i = table.place(first); i < table.step.length && table.step[i] <= last; i++) {
    const at = Math.floor(x(table.step[i]) / 9);
    if (at !== place) { flush(); place = at; }
    if (values[i] !== null && values[i] !== undefined) { sum += values[i]; steps += table.step[i]; count++; }
  }
  flush();
  return points;
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
function trace(parent, line, look, x, y, scale) {
  let d = "", pen = false;
  for (const point of line) {
    if (!point || (scale.log && point[1] <= 0)) { pen = false; continue; }
    d += `${pen ? "L" : "M"}${x(point[0]).toFixed(1)} ${y(point[1]).toFixed(1)}`; pen = true;
  }
  parent.append(svg("path", {class: `trace ${look}`, d}));
  const points = line.filter((point) => point && !(scale.log && point[1] <= 0));
  if (points.length <= 60 && !look.endsWith("mean")) for (const [step, value] of points) parent.append(svg("circle", {class: `dot ${look}`, cx: x(step).toFixed(1), cy: y(value).toFixed(1), r: 2.3}));
}
function exceeded(log, x, y, first, last) { // looks above the edge, the highest one of each few pixels
  const table = log.tables.batch, flags = table.values("exceeded"), ratios = table.values("ratio"), best = new Map();
  for (let i = table.place(first); i < table.step.length && table.step[i] <= last; i++) {
    if (!flags[i] || !(ratios[i] > 0)) continue;
    const at = Math.floor(x(table.step[i]) / 4);
    if (!best.has(at) || ratios[best.get(at)] < ratios[i]) best.set(at, i);
  }
  return [...best.values()].map((i) => svg("circle", {class: "over", cx: x(table.step[i]).toFixed(1), cy: y(ratios[i]).toFixed(1), r: 4.5}));
}
function missing(log, area, x, first, last) { // steps whose loss or gradient is not finite
  const steps = [...log.nonfinite.loss, ...log.nonfinite.gradient_norm];
  const places = new Set(steps.filter((step) => step >= first && step <= last).map((step) => Math.round(x(step) / 5) * 5));
  return [...places].map((at) => svg("path", {class: "missing", d: `M${at} ${area.top}l4 7h-8z`}));
}
const visible = (log, first, last) => [...log.spikes.values()].filter((spike) => spike.start <= last && (spike.end ?? spike.peak ?? spike.start) >= first);
function spans(log, area, x, first, last) {
  return visible(log, first, last).map((spike) => {
    const left = x(Math.max(first, spike.start)), right = x(Math.min(last, spike.end ?? last));
    return svg("rect", {class: `span ${causeClass(causeOf(spike))}${(spike.end ?? null) === null ? " open" : ""}`, x: left, y: area.top, width: Math.max(2, right - left), height: area.bottom - area.top});
  });
}
function peaks(log, area, x, y, scale, first, last) {
  const table = log.tables.steps;
  return visible(log, first, last).map((spike) => {
    const step = Math.min(Math.max(spike.peak ?? spike.start, first), last), loss = table.values("loss")[table.before(step)];
    const high = typeof loss === "number" && (!scale.log || loss > 0) ? y(loss) - 12 : area.top + 6, cause = causeOf(spike);
    const mark = svg("path", {class: `mark ${causeClass(cause)}`, d: CAUSES[cause], transform: `translate(${(x(step) - 6).toFixed(1)} ${(Math.max(area.top + 6, high) - 6).toFixed(1)})`});
    mark.append(svg("title", {}, [`${PAIR ? `${log.name}, step` : "Step"} ${show(spike.peak ?? spike.start)}: ${spike.cause}. ${spike.sentence ?? ""}`]));
    return mark;
  });
}
function swatch(look) { return svg("svg", {class: "swatch", viewBox: "0 0 26 12", "aria-hidden": "true"}, [svg("path", {class: `trace ${look}`, d: "M1 6H25"})]); }
function name(chart, lines, scale) { // the legend, and what a screen reader says
  const {spec, legend, picture} = chart, there = lines.filter(({points}) => points.some(Boolean)), words = [];
  const add = (look, label) => { const item = html("li"); item.append(swatch(look), label); legend.append(item); };
  if (PAIR) for (const log of logs) if (there.some((line) => line.log === log)) add(`r${log.number} d1`, log.name);
  const kinds = new Map(there.map((line) => [line.line, line]));
  if (!PAIR || kinds.size > 1) for (const line of [...kinds.values()].sort((a, b) => a.line - b.line)) add(PAIR ? `d${line.line} plain` : line.look, line.label);
  for (const {log, label, rows, column} of there) words.push(`${PAIR ? `${log.name}, ` : ""}${label} now ${show(rows.last(column))}`);
  const note = (child, text) => { const item = html("li"); item.append(child, text); legend.append(item); };
  if (spec.spikes) {
    const [first, last] = ends(), seen = logs.flatMap((log) => visible(log, first, last));
    for (const cause of new Set(seen.map(causeOf))) note(glyph(cause), `${cause} (${seen.filter((spike) => causeOf(spike) === cause).length})`);
    if (logs.some((log) => log.nonfinite.loss.size + log.nonfinite.gradient_norm.size)) note(svg("svg", {class: "glyph", viewBox: "0 0 12 12", "aria-hidden": "true"}, [svg("path", {class: "missing", d: "M6 1l5 9H1z"})]), "loss or gradient not finite");
    words.push(plural(seen.length, "spike", "spikes"));
  }
  if (spec.over && logs.some((log) => log.tables.batch.values("exceeded").some(Boolean))) note(svg("svg", {class: "glyph", viewBox: "0 0 12 12", "aria-hidden": "true"}, [svg("circle", {class: "over", cx: 6, cy: 6, r: 4.5})]), "batch above the edge");
  if (scale.below) legend.append(html("li", "the lowest values lie below the axis"));
  if (scale.hidden) legend.append(html("li", `${plural(scale.hidden, "value is", "values are")} zero or below, and not on this axis`));
  picture.setAttribute("aria-label", `${spec.title}, steps ${show(Math.round(ends()[0]))} to ${show(ends()[1])}, ${scale.log ? "logarithmic" : "linear"} axis: ${words.join("; ")}.`);
}

// Reading numbers off the figures

function point(chart, place) {
  if (!chart.x) return;
  const [first, last] = ends(), share = (place - chart.area.left) / (chart.area.right - chart.area.left);
  moveTo(share < -0.02 || share > 1.02 ? null : Math.round(first + Math.min(1, Math.max(0, share)) * (last - first)));
}
function press(chart, event) {
  const [first, last] = ends(), pixel = (last - first) / 200, table = logs[0].tables[chart.spec.lines[0][0]];
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
  const parts = drawn(chart.spec).map(({log, table, column, label, rows}) => {
    const values = rows.values(column), who = !PAIR ? label : chart.spec.lines.length > 1 ? `${log.name}, ${label}` : log.name;
    let at = rows.before(step);
    while (table !== "steps" && at >= 0 && (values[at] === null || values[at] === undefined)) at--; // the last look that measured it
    if (at < 0 || values[at] === undefined || !values.some((value) => value !== null)) return "";
    return `${who} ${table === "steps" && log.broken(column, rows.step[at]) ? "not finite" : show(values[at])}` + (rows.step[at] === step || table === "steps" ? "" : ` (step ${show(rows.step[at])})`);
  });
  chart.readout.textContent = `Step ${show(step)}: ${parts.filter(Boolean).join(" · ")}`;
}

// The answer, findings, counters, state

function versusAnswer() { // which of two runs is ahead
  if (!verdict.length) return null;
  const box = html("div", undefined, "answer note whole"); box.id = "verdict";
  box.append(...verdict.map((sentence) => html("p", sentence)));
  return box;
}
function answer(log) { // what the monitor said at the end, or how the run stands while it goes on
  const verdict = log.end?.verdict, state = (verdict && log.end.state) || log.standing?.state, known = Object.hasOwn(STATES, state);
  if (typeof verdict !== "string" && !known) return null;
  const box = html("div", undefined, `answer ${known ? STATES[state] : "note"}`);
  if (PAIR) box.append(html("p", log.name, "who"));
  if (typeof verdict === "string") {
    for (const sentence of verdict.split(/(?<=\.) (?=[A-Z])/)) box.append(html("p", sentence));
    if (typeof log.end.lr === "number") { const set = html("p", undefined, "setting"); set.append(html("code", `lr = ${show(log.end.lr)}`)); box.append(set); }
    return box;
  }
  const {level, trivial} = log.standing, guess = typeof trivial === "number" ? `, where the best constant prediction has ${show(trivial)}` : "";
  box.append(html("p", `${state[0].toUpperCase()}${state.slice(1)}: the loss is about ${show(level)}${guess}.`));
  const alert = [...log.alerts.values()].at(-1);
  if (alert && STATES[state] !== "good") box.append(html("p", `Alert at step ${show(alert.step)}, ${alert.alert}: ${alert.sentence ?? ""} ${alert.advice ?? ""}`));
  return box;
}
function card(found, log) { // of a spike or of an alert
  const level = Object.hasOwn(RANKS, found.severity) ? found.severity : "note", box = html("article", undefined, `card ${level}`);
  const head = html("p", undefined, "head"), cause = html("span", undefined, "badge cause");
  if (found.alert === undefined) cause.append(glyph(causeOf(found)));
  cause.append(String(found.alert ?? found.cause ?? "unexplained"));
  head.append(html("span", found.alert === undefined ? level : "alert", `badge ${level}`), cause);
  if (PAIR) { const who = html("span", undefined, "run"); who.append(swatch(`r${log.number} d1`), log.name); head.append(who); }
  if (found.alert !== undefined) head.append(html("span", `step ${show(found.step)}`, "when"));
  else {
    const until = found.end === null || found.end === undefined ? ", not over" : ` to ${show(found.end)}`;
    head.append(html("span", `step ${show(found.start)}${until}, peak at ${show(found.peak)}`, "when"));
  }
  box.append(head, html("p", String(found.sentence ?? ""), "sentence"));
  if (typeof found.height === "number") { const value = html("p", undefined, "value"); value.append(html("b", `${show(found.height)} ×`), html("span", "the loss before")); box.append(value); }
  if (found.advice) { const advice = html("p"); advice.append(html("strong", "What to do: "), String(found.advice)); box.append(advice); }
  const facts = [];
  if (typeof found.sharpness_before === "number") facts.push(`sharpness ${show(found.sharpness_before)} before, ${show(found.sharpness_after)} after`);
  if (typeof found.top_share === "number") facts.push(`${percent(found.top_share)} of the rise in the top eigenspace`);
  if (typeof found.batch === "number") facts.push(`look at the batch of step ${show(found.batch)}`);
  if (facts.length) box.append(html("p", facts.join(" · "), "soft small"));
  return box;
}
function findings() {
  const rank = (found) => RANKS[found.severity] ?? RANKS.note, step = (found) => found.start ?? found.step;
  const all = logs.flatMap((log) => [...log.alerts.values(), ...log.spikes.values()].map((found) => [found, log]));
  all.sort(([a], [b]) => rank(a) - rank(b) || (b.alert !== undefined) - (a.alert !== undefined) || step(b) - step(a));
  const text = JSON.stringify([verdict, all.map(([found, log]) => [found, log.number]), logs.map((log) => [!!log.end, log.steps.length > 0, log.standing])]);
  if (text === said) return;
  const news = said !== "" && all.length ? all.reduce((a, b) => step(b[0]) > step(a[0]) ? b : a)[0] : null;
  said = text;
  byId("answers").replaceChildren(...[versusAnswer(), ...logs.map(answer)].filter(Boolean));
  byId("tally").replaceChildren(...Object.keys(RANKS).flatMap((level) => {
    const count = all.filter(([found]) => rank(found) === RANKS[level]).length;
    return count ? [html("span", `${count} ${level === "critical" || level === "good" ? level : count === 1 ? level : level + "s"}`, `badge ${level}`)] : [];
  }));
  const cards = all.map(([found, log]) => card(found, log)), list = byId("list"), open = list.querySelector("details")?.open;
  const any = logs.some((log) => log.steps.length), over = logs.every((log) => log.end);
  if (!cards.length) { list.replaceChildren(html("p", any ? `No spike of the loss ${over ? "was" : "has been"} found, and no alert raised.` : "Nothing has been logged yet.", "lead")); return; }
  list.replaceChildren(...cards.slice(0, SHOWN));
  if (cards.length > SHOWN) {
    const rest = html("details"); rest.open = Boolean(open);
    rest.append(html("summary", plural(cards.length - SHOWN, "more finding", "more findings")), ...cards.slice(SHOWN));
    list.append(rest);
  }
  if (news) byId("news").textContent = `${news.alert === undefined ? "Finding" : "Alert"}: ${news.sentence ?? news.cause}`;
}
const total = (table, name) => table.values(name).reduce((sum, value) => sum + (value || 0), 0);
function numbers(log) { // what is said of a run in numbers: [now, what is trained, counters]
  const {steps, batch, probe} = log.tables, run = log.header, end = log.end || {}, spikes = [...log.spikes.values()], any = log.steps.length;
  const counts = log.counts || {steps: any, batch: batch.step.length, probe: probe.step.length, exceeded: total(batch, "exceeded"), seconds: total(batch, "seconds") + total(probe, "seconds")};
  const now = log.steps[any - 1], loss = log.broken("loss", now) ? "not finite" : show(steps.last("loss"));
  return [
    [["step", any ? show(now) : null], ["loss", loss], ["best", show(log.tables.progress.last("best"))], ["validation loss", show(log.tables.validation.last("loss"))], ["learning rate", show(steps.last("rate"))],
      ["critical rate, batch", show(batch.last("critical_rate"))], ["rate ÷ critical rate", show(batch.last("ratio") ?? probe.last("ratio"))], ["sharpness", show(probe.last("sharpness") ?? batch.last("sharpness"))],
      ["units alive", percent(log.tables.progress.last("alive"))], ["spikes", any ? show(spikes.length) : null], ["catapults", any ? show(end.catapults ?? spikes.filter((spike) => spike.cause === "catapult").length) : null], ["alerts", any ? show(log.alerts.size) : null]],
    [["parameters", show(run.parameters)], ["loss function", run.loss], ["optimizer", run.optimizer], ["curvature", run.curvature && String(run.curvature).replaceAll("_", "-")], ["probe samples", show(run.probe_samples)],
      ["budget", percent(run.budget)], ["started", typeof run.started === "string" ? run.started.replace("T", " ").slice(0, 16) : null], ["resumed", log.runs.length > 1 ? plural(log.runs.length - 1, "time", "times") : null]],
    [["steps", show(counts.steps)], ["looks at a batch", show(counts.batch)], ["looks at the probe", show(counts.probe)], ["batches above the edge", counts.batch ? `${show(counts.exceeded)} (${percent(counts.exceeded / counts.batch)})` : null],
      ["time of the monitor", typeof end.monitor_seconds === "number" ? `${duration(end.monitor_seconds)} of ${duration(end.seconds)} (${percent(end.monitor_seconds / end.seconds)})` : counts.seconds ? duration(counts.seconds) : null],
      ["above the edge when the loss rose", percent(end.match_rate)], ["above the edge at any step", percent(end.base_rate)], ["loss rose when above the edge", percent(end.up_given_exceeded)], ["lines that could not be read", log.bad ? show(log.bad) : null]],
  ];
}
const said_of = (value) => value === null || value === undefined || value === "–" ? "" : String(value);
function versus(lists) { // two runs in one table, a row for each number that one of them has
  const table = html("table"), head = html("tr"), [first, second] = lists;
  head.append(html("th", ""), ...logs.map((log) => { const cell = html("th", undefined, "number"); cell.append(swatch(`r${log.number} d1`), " ", log.name); return cell; }));
  table.append(head);
  first.forEach(([label, value], i) => {
    const other = second[i][1];
    if (!said_of(value) && !said_of(other)) return;
    const row = html("tr"); row.append(html("td", label), html("td", said_of(value) || "–", "number"), html("td", said_of(other) || "–", "number")); table.append(row);
  });
  const box = html("div", undefined, "wide"); box.append(table);
  return box;
}
function counters() {
  const all = logs.map(numbers), names = logs.map((log) => PAIR ? log.name : log.header.model ? String(log.header.model) : "Training"), last = logs[0].steps[logs[0].steps.length - 1];
  byId("title").textContent = names.join(" and ");
  document.title = `${logs[0].steps.length ? `step ${show(last)} · ` : ""}${names.join(" and ")} · Theodolite watch`;
  if (PAIR) { byId("versus").replaceChildren(versus(all.map(([now]) => now)), versus(all.map(([, about]) => about))); byId("counters").replaceChildren(versus(all.map((one) => one[2]))); return; }
  pairs(byId("now"), all[0][0]);
  pairs(byId("facts"), all[0][1]);
  const table = html("dl", undefined, "facts"); table.setAttribute("aria-label", "Counters");
  pairs(table, all[0][2]);
  byId("counters").replaceChildren(table);
}
function stateOf(log) {
  const idle = log.age === null ? null : log.age + (setup.live ? (Date.now() - log.asked) / 1000 : 0), ago = idle === null ? "" : `last line ${duration(idle)} ago`;
  const any = log.runs.length || log.steps.length;
  if (log.end) return ["note", "finished", `after ${show(log.end.step)} steps` + (typeof log.end.seconds === "number" ? ` and ${duration(log.end.seconds)}` : "")];
  if (log.lost) return ["failed", "no connection", "theodolite watch has ended; what is drawn is what was known then"];
  if (!any) return setup.live ? ["skipped", "waiting", `for ${log.path}`] : ["skipped", "empty", "nothing had been logged when this page was made"];
  if (idle !== null && idle >= STALLED) return setup.live ? ["warning", "stalled", `no new line for ${duration(idle)}`] : ["warning", "not finished", `no new line for ${duration(idle)} when this page was made`];
  return setup.live ? ["good", "running", ago] : ["skipped", "not finished", `${ago ? ago.replace(" ago", " before") : ""} this page was made`];
}
function state() {
  const found = logs.map((log) => [log, ...stateOf(log)]), text = JSON.stringify(found.map(([, level, word]) => [level, word]));
  if (byId("states").dataset.said !== text) {
    byId("states").dataset.said = text;
    byId("states").replaceChildren(...found.map(([log, level, word], i) => {
      const line = html("p", undefined, "state-line"), badge = html("span", word, `badge ${level}`), more = html("span", "", "soft");
      badge.id = i ? `state-${i + 1}` : "state"; more.id = i ? `age-${i + 1}` : "age";
      line.append(...(PAIR ? [swatch(`r${log.number} d1`), html("strong", log.name)] : []), badge, more);
      return line;
    }));
  }
  found.forEach(([, , , more], i) => { byId(i ? `age-${i + 1}` : "age").textContent = more; });
}
function redraw() {
  stale = false;
  counters(); findings();
  for (const chart of charts) { draw(chart); readOff(chart); }
  for (const [heading, place] of [["measured", "charts"], ["figures", "first"]]) byId(heading).parentElement.hidden = !byId(place).childElementCount;
}
async function poll(log) {
  let pause = 1000;
  try {
    const answer = await fetch(`data?run=${log.number - 1}&offset=${log.offset}&token=${log.token}`, {cache: "no-store"});
    if (!answer.ok) throw new Error(answer.status);
    const message = await answer.json();
    if ((log.token && message.token !== log.token) || message.offset < log.offset) log.clear(); // another log took its place
    Object.assign(log, {offset: message.offset, token: message.token, age: message.age, asked: Date.now(), lost: false});
    log.take(message);
    if (message.more) pause = 0;
  } catch { log.lost = true; pause = 2000; }
  if (stale && !document.hidden) redraw();
  state();
  setTimeout(() => poll(log), pause);
}
async function compare() { // long logs take their server a while: it is asked the less often for that
  const asked = Date.now();
  try { const answer = await fetch("comparison", {cache: "no-store"}); if (answer.ok) verdict = await answer.json(); } catch { /* `poll` says that the server is gone */ }
  findings();
  setTimeout(compare, Math.max(3000, 10 * (Date.now() - asked)));
}

byId("foot").textContent = `${logs.map((log) => log.path).join(" and ")} · theodolite ${setup.version}${setup.live ? "" : `, ${setup.made}`}`;
byId("range").addEventListener("change", redraw);
document.addEventListener("visibilitychange", () => { if (!document.hidden) redraw(); });
new ResizeObserver(() => requestAnimationFrame(() => { for (const chart of charts) { draw(chart); readOff(chart); } })).observe(byId("charts"));
if (setup.live) { logs.forEach(poll); if (PAIR) compare(); }
else logs.forEach((log, i) => { const data = setup.runs[i].data; log.take(data); log.counts = data.counts; });
redraw(); state();
})();

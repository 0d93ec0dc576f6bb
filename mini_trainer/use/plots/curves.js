const AXES = ["step", "samples", "tokens", "hours"];
const MIN_POINTS = 300, MAX_POINTS = 1000;  // of a curve, drawn at a time
const WINDOWS = [1, 2, 3, 5, 10, 20, 30, 50, 100, 200, 300, 500, 1000, 2000, 5000];  // steps
const STAR_IN_KEY = "13,0 14.6,4 19,4.2 15.6,6.9 16.8,11 13,8.6 9.2,11 10.4,6.9 7,4.2 11.4,4";
const MAX_WHOLE = 20;  // a word in a table that is no longer is not broken
const LEVEL = 1e-3;  // a curve is level if it changes by no more than this share of itself
const SECONDS_BETWEEN_QUESTIONS = 3;

let data = JSON.parse(byId("data").textContent);
if (!WINDOWS.includes(data.smoothing)) WINDOWS.push(data.smoothing);
WINDOWS.sort((a, b) => a - b);
// What is looked at: x and y hold ranges where somebody has zoomed, y by the chart's id.
const view = {axis: "step", window: data.smoothing, hidden: new Set(), x: null, y: {}, log: new Set()};

const isDark = () => {
  const chosen = document.documentElement.dataset.theme;
  return chosen ? chosen === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
};
const idOf = chart => (chart.is_of_validations ? "v " : "s ") + chart.key;
const visibleRuns = () => data.runs.filter(run => !view.hidden.has(run.path));
const widthOf = run => run.is_best ? 3.4 : 1.8;
const colourOf = run => run.colours[isDark() ? 1 : 0];
const group = number => number.toLocaleString("en", {maximumFractionDigits: 3});

function shorten(text, limit) {
  const chars = [...text];
  return chars.length <= limit ? text : chars.slice(0, limit - 1).join("") + "…";
}

// A run's name, of a long one its beginning and what follows where it parts from the name that is most like it.
function shortName(run, limit) {
  const name = [...run.name];
  if (name.length <= limit) return run.name;
  const countShared = other => { let i = 0; while (i < name.length && name[i] === other[i]) i++; return i; };
  const parting = Math.max(0, ...data.runs.filter(other => other !== run).map(other => countShared([...other.name])));
  let start = Math.min(parting, name.length - 1);
  while (start > 0 && /[\p{L}\p{N}.]/u.test(name[start - 1])) start -= 1;
  start = Math.min(start, name.length - limit + 9);
  return start <= 9 ? shorten(run.name, limit) : name.slice(0, 8).join("") + "…" + shorten(name.slice(start).join(""), limit - 9);
}

function format(value) {
  if (value === null || value === undefined) return "–";
  const size = Math.abs(value);
  if (size === 0) return "0";
  if (size < 1e-3 || size >= 1e9) return value.toExponential(3).replace("e+", "e");
  return size < 100 ? String(+value.toPrecision(4)) : group(Math.round(value * 10) / 10);
}

function swatch(run) {
  const node = svg("svg", {class: "swatch", viewBox: "0 0 22 10", "aria-hidden": "true"});
  const dashes = {solid: "none", dash: "6 3", dot: "2 3", dashdot: "6 2 2 2"};
  node.append(svg("line", {x1: 0, x2: 22, y1: 5, y2: 5, stroke: colourOf(run), "stroke-width": 4,
    "stroke-dasharray": dashes[run.dash]}));
  return node;
}

// ---- curves ----

// An average of the points around each, whose weights fall with their distance: of `window` steps, if all counted alike.
// It looks both ways, so that a curve is not late.
function smoothed(run, key) {
  run.cache ??= {};
  const name = key + " " + view.window;
  if (run.cache[name]) return run.cache[name];
  const decay = (view.window - 1) / (view.window + 1), means = run.curves[key].mean;
  const sums = new Float64Array(means.length), totals = new Float64Array(means.length);
  for (const isForward of [true, false]) {
    let sum = 0, total = 0;
    for (let j = 0; j < means.length; j++) {
      const i = isForward ? j : means.length - 1 - j, size = run.sizes ? run.sizes[i] : 1;
      if (means[i] === null) continue;
      const kept = decay ** size, own = (1 - kept) / (1 - decay);
      sum = sum * kept + means[i] * own;
      total = total * kept + own;
      sums[i] += sum - (isForward ? 0 : means[i] * own);  // Both ways have the point itself.
      totals[i] += total - (isForward ? 0 : own);
    }
  }
  return run.cache[name] = means.map((value, i) => value === null ? null : sums[i] / totals[i]);
}

// The points [first, last) that the view shows, and one on each side, for the lines that lead out of it.
function findVisible(xs) {
  if (view.x === null) return [0, xs.length];
  const search = (x, isPast) => {
    let low = 0, high = xs.length;
    while (low < high) {
      const middle = (low + high) >> 1;
      if (isPast(xs[middle], x)) high = middle; else low = middle + 1;
    }
    return low;
  };
  const first = search(view.x[0], (a, b) => a >= b), last = search(view.x[1], (a, b) => a > b);
  return [Math.max(0, first - 1), Math.min(xs.length, last + 1)];
}

// What is drawn of a curve: its points in groups, no more of them than there is room for.
function makeGroups(run, key, width) {
  const curve = run.curves[key], xs = run.x[view.axis], [first, last] = findVisible(xs);
  const size = Math.ceil((last - first) / Math.min(MAX_POINTS, Math.max(MIN_POINTS, width)));
  const line = view.window > 1 ? smoothed(run, key) : curve.mean, groups = [];
  for (let start = first; start < last; start += size) {
    const end = Math.min(start + size, last), middle = (start + end - 1) >> 1;
    const group = {x: xs[middle], step: run.x.step[middle], low: Infinity, high: -Infinity, line: 0, count: 0};
    for (let i = start; i < end; i++) {
      if (curve.mean[i] === null) continue;
      group.low = Math.min(group.low, curve.low ? curve.low[i] : curve.mean[i]);
      group.high = Math.max(group.high, curve.high ? curve.high[i] : curve.mean[i]);
      group.line += line[i];
      group.count += 1;
    }
    group.line /= group.count;
    if (group.count) groups.push(group);
  }
  return groups;
}

// Every group's lowest and highest value, in the order that makes the shorter way to the next.
function drawExtremes(groups) {
  const x = [], y = [], text = [];
  groups.forEach((group, i) => {
    const falls = i + 1 < groups.length ? groups[i + 1].low < group.low : i > 0 && group.low < groups[i - 1].low;
    const values = group.low === group.high ? [group.low] : falls ? [group.high, group.low] : [group.low, group.high];
    for (const value of values) { x.push(group.x); y.push(value); text.push(group); }
  });
  return {x, y, groups: text};
}

// What a point says: its number, and the rest.
function describeGroup(run, group, value) {
  const range = group.low === group.high ? format(group.low) : `${format(group.low)} to ${format(group.high)}`;
  const step = view.axis === "step" ? "" : ` · step ${group.step}`;
  const [strong, others] = value === null ? [range, ""] : [format(value), ` (${range})`];
  return [strong, `${others}  ${shortName(run, 28)}${step}`];
}

function drawSteps(run, chart, width) {
  if (!run.curves[chart.key]) return [];
  const groups = makeGroups(run, chart.key, width), isSmoothed = chart.is_noisy && view.window > 1;
  const extremes = drawExtremes(groups), isLine = groups.length > 1;
  const common = {colour: colourOf(run), hasLine: isLine, markers: isLine ? null : "full"};
  const whole = {...common, dash: run.dash, width: widthOf(run)}, points = {x: extremes.x, y: extremes.y};
  if (!isSmoothed) return [{...whole, ...points, texts: extremes.groups.map(group => describeGroup(run, group, null))}];
  return [
    {...common, ...points, width: 1, opacity: isDark() ? 0.42 : 0.3, isBehind: true},
    {...whole, x: groups.map(group => group.x), y: groups.map(group => group.line),
      texts: groups.map(group => describeGroup(run, group, group.line))},
  ];
}

function drawValidations(run, chart) {
  const found = run.validations, xs = found.x[view.axis], [first, last] = findVisible(xs);
  const values = (found.curves[chart.key] || []).slice(first, last), steps = found.x.step.slice(first, last);
  if (!values.some(value => value !== null)) return [];
  const onTop = !chart.is_of_validations, best = onTop || found.best === null ? -1 : found.best - first;
  const name = shortName(run, 28), what = onTop ? " validation" : "";
  return [{
    x: xs.slice(first, last), y: values, colour: colourOf(run), hasLine: true, dash: onTop ? "dot" : run.dash,
    width: onTop ? 1.2 : widthOf(run), markers: onTop ? "open" : "full", size: values.length > 60 ? 1.5 : onTop ? 3.5 : 3,
    stars: new Set([best]),
    texts: values.map((value, i) => [format(value), `${what}  ${name} · step ${steps[i]}${i === best ? " · best" : ""}`]),
  }];
}

// A line from bottom to top wherever the run was resumed.
function drawResumes(run) {
  const xs = run.resumes.x[view.axis];
  if (!xs.length) return [];
  return [{
    x: xs, y: [], isFull: true, hasLine: true, colour: colourOf(run), width: 1.2, dash: "dot", opacity: 0.75,
    texts: run.resumes.texts.map(text => [text, `  ${shortName(run, 28)}`]),
  }];
}

function makeTraces(chart, width) {
  const runs = visibleRuns();
  const steps = chart.is_of_validations ? [] : runs.flatMap(run => drawSteps(run, chart, width));
  const withValidations = chart.is_of_validations || chart.key === "loss";
  return [
    ...runs.flatMap(drawResumes),
    ...steps.filter(trace => trace.isBehind),
    ...steps.filter(trace => !trace.isBehind),
    ...(withValidations ? runs.flatMap(run => drawValidations(run, chart)) : []),
  ];
}

// ---- charts ----

function findWidestRange() {
  const xs = visibleRuns().flatMap(run => [run.x[view.axis], run.validations.x[view.axis]]).filter(x => x.length);
  if (!xs.length) return [0, 1];
  const low = Math.min(...xs.map(x => x[0])), high = Math.max(...xs.map(x => x[x.length - 1]));
  const start = low < 0.1 * high ? 0 : low, room = (high - start) * 0.012 || 1;
  return [start - room * (start > 0 || xs.some(x => x[0] === 0)), high + room];
}

// Charts of one source or set have its name as their title.
const nameAxis = chart =>
  chart.section ? chart.section.replace(/ by .*/, "") : chart.unit ? `${chart.title} (${chart.unit})` : chart.title;

// The learning rate from zero, and so any curve that is level: on a scale of its own, rounding would look like steps.
function chooseScale(chart, traces, isLog) {
  const ys = traces.flatMap(trace => trace.isFull ? [] : trace.y).filter(y => y !== null);
  if (isLog || !ys.length) return null;
  const low = ys.reduce((a, b) => Math.min(a, b)), high = ys.reduce((a, b) => Math.max(a, b));
  const size = Math.max(Math.abs(low), Math.abs(high)), isLevel = high - low < LEVEL * size;
  if (size === 0 || (chart.key !== "lr" && !isLevel)) return null;
  return [Math.min(0, low) * 1.15, Math.max(0, high) * 1.15];
}

// Charts are drawn when they come near the window, one a frame, so that the page answers meanwhile.
const stale = new Set(), near = new Set();
const observer = new IntersectionObserver(entries => {
  for (const entry of entries) near[entry.isIntersecting ? "add" : "delete"](entry.target.id);
  drawSoon();
}, {rootMargin: "300px"});
const sizes = new ResizeObserver(entries => {
  for (const {target} of entries) stale.add(target.id);
  drawSoon();
});
const findNext = () => data.charts.find(chart => stale.has(idOf(chart)) && near.has(idOf(chart)));
const isDrawn = () => near.size > 0 && !findNext();

function drawAll() {
  for (const chart of data.charts) stale.add(idOf(chart));
  byId("reset").disabled = view.x === null && !Object.keys(view.y).length;
  drawSoon();
}

function draw(chart) {
  const id = idOf(chart), div = byId(id), isLog = view.log.has(id);
  stale.delete(id);
  const traces = makeTraces(chart, div.clientWidth);
  drawChart(div, {
    traces, isLog,
    x: {title: view.axis, range: view.x || findWidestRange()},
    y: {title: shorten(nameAxis(chart), 40), range: view.y[id] || chooseScale(chart, traces, isLog)},
    readX: x => `${view.axis} ${view.axis === "hours" ? x.toFixed(3) : group(x)}`,
    onZoom: zoomed => zoom(id, zoomed),
    onReset: resetZoom,
  });
}

let isWaiting = false;
function drawSoon() {
  if (isWaiting || !findNext()) return;
  isWaiting = true;
  requestAnimationFrame(() => {
    isWaiting = false;
    const chart = findNext();
    if (chart) draw(chart);
    drawSoon();
  });
}

// On paper the charts are light, as wide as the paper, and all there.
function redraw(isPrinting) {
  document.body.classList.toggle("printing", isPrinting);
  for (const chart of data.charts) {
    draw(chart);
  }
}
let themeBefore = "";
addEventListener("beforeprint", () => {
  themeBefore = document.documentElement.dataset.theme ?? "";
  document.documentElement.dataset.theme = "light";
  makeRuns();
  makeTables();
  redraw(true);
});
addEventListener("afterprint", () => {
  if (themeBefore) document.documentElement.dataset.theme = themeBefore;
  else delete document.documentElement.dataset.theme;
  makeRuns();
  makeTables();
  redraw(false);
});

// Zooming a chart sideways zooms all of them.
function zoom(id, {x, y}) {
  if (x) view.x = x;
  if (y) view.y[id] = y;
  drawAll();
}

function resetZoom() {
  view.x = null;
  view.y = {};
  drawAll();
}

function makeChart(chart, isFirst) {
  const box = make("section", isFirst ? "chart first" : "chart", ""), head = make("header", "", "");
  const log = make("button", "log", "log"), plot = make("div", "plot", "");
  log.type = "button";
  log.setAttribute("aria-label", `log scale of ${chart.title}`);
  const show = () => log.setAttribute("aria-pressed", view.log.has(idOf(chart)));
  show();
  log.addEventListener("click", () => {
    if (!view.log.delete(idOf(chart))) view.log.add(idOf(chart));
    delete view.y[idOf(chart)];
    show();
    drawAll();
  });
  plot.id = idOf(chart);
  plot.setAttribute("role", "img");
  plot.setAttribute("aria-label", chart.title);
  head.append(make("h2", "", chart.title), make("small", "", chart.unit), log);
  box.append(head);
  if (isFirst) box.append(makeKey());
  box.append(plot);
  return box;
}

// What the lines of the first chart are.
function makeKey() {
  const key = make("p", "key", "");
  const add = (text, ...shapes) => {
    const picture = svg("svg", {viewBox: "0 0 26 12", "aria-hidden": "true"}), entry = make("span", "", "");
    shapes.forEach(([kind, attributes]) => picture.append(svg(kind, {stroke: "currentColor", fill: "none", ...attributes})));
    entry.append(picture, text);
    key.append(entry);
  };
  const across = {x1: 0, x2: 26, y1: 6, y2: 6};
  add("each step", ["line", {...across, "stroke-width": 1.2, opacity: .4}]);
  add("smoothed", ["line", {...across, "stroke-width": 2.2}]);
  if (data.runs.some(run => run.validations.x.step.length))
    add("validation", ["line", {...across, "stroke-dasharray": "2 2"}], ["circle", {cx: 13, cy: 6, r: 3.4}]);
  if (data.runs.some(run => run.validations.best !== null))
    add("best validation, below", ["polygon", {points: STAR_IN_KEY, fill: "currentColor"}]);
  if (data.runs.some(run => run.resumes.texts.length))
    add("resumed", ["line", {x1: 13, x2: 13, y1: 0, y2: 12, "stroke-dasharray": "2 2", "stroke-width": 1.5}]);
  return key;
}

function makeCharts() {
  observer.disconnect();
  sizes.disconnect();
  near.clear();
  const boxes = [make("div", "grid", "")];
  let section = "";
  data.charts.forEach((chart, i) => {
    if (chart.section !== section) boxes.push(make("h2", "row", chart.section), make("div", "grid small", ""));
    section = chart.section;
    boxes[boxes.length - 1].append(makeChart(chart, i === 0));
  });
  byId("charts").replaceChildren(...boxes);
  for (const div of document.querySelectorAll(".plot")) {
    observer.observe(div);
    sizes.observe(div);
  }
}

// ---- the rest of the page ----

function makeRuns() {
  byId("runs").replaceChildren(...(data.runs.length < 2 ? [] : data.runs.map(run => {
    const button = make("button", "run", "");
    button.type = "button";
    button.title = `${run.name}: click to hide or show, double-click to see it alone`;
    button.append(swatch(run), make("span", "", shortName(run, 48)));
    button.setAttribute("aria-pressed", !view.hidden.has(run.path));
    button.addEventListener("click", () => {
      if (!view.hidden.delete(run.path)) view.hidden.add(run.path);
      showHidden();
    });
    button.addEventListener("dblclick", () => {
      const isAlone = view.hidden.size === data.runs.length - 1 && !view.hidden.has(run.path);
      view.hidden = new Set(isAlone ? [] : data.runs.map(other => other.path).filter(path => path !== run.path));
      showHidden();
    });
    return button;
  })));
}

// Each prompt with the answers at the validations, from the first on.
const opened = new Map();  // by prompt: whether somebody has opened or closed it
function makeSamples() {
  byId("samples").hidden = !data.samples.length;
  byId("samples").lastElementChild.replaceChildren(...data.samples.map(({prompt, answers}, i) => {
    const details = make("details", "", ""), summary = make("summary", "", ""), table = make("table", "", "");
    details.open = opened.get(prompt) ?? i < 3;
    details.addEventListener("toggle", () => opened.set(prompt, details.open));
    summary.append(make("span", "", prompt.replace(/\s+/g, " ")));
    details.append(summary, ...(prompt.length > 80 || prompt.includes("\n") ? [make("p", "prompt", prompt)] : []), table);
    for (const {run, step, text, is_cut} of answers) {
      if (view.hidden.has(data.runs[run].path)) continue;
      const row = make("tr", "", ""), head = make("th", "", ""), cell = make("td", "", text);
      head.scope = "row";
      head.append(...(data.runs.length > 1 ? [swatch(data.runs[run])] : []), `step ${group(step)}`);
      if (data.runs.length > 1) head.title = data.runs[run].name;
      if (is_cut) cell.append(make("small", "", " …"));
      row.append(head, cell);
      table.append(row);
    }
    return details;
  }));
}

function showHidden() {
  makeSamples();
  [...byId("runs").children].forEach((button, i) =>
    button.setAttribute("aria-pressed", !view.hidden.has(data.runs[i].path)));
  drawAll();
}

function makeAxes() {
  const hasNumbers = axis => data.runs.some(run => run.x[axis].some(x => x !== null));
  byId("axes").replaceChildren(...AXES.map(axis => {
    const button = make("button", "", axis);
    button.type = "button";
    button.disabled = axis !== "step" && !hasNumbers(axis);
    button.setAttribute("aria-pressed", axis === view.axis);
    button.addEventListener("click", () => {
      view.axis = axis;
      view.x = null;
      makeAxes();
      drawAll();
    });
    return button;
  }));
}

function showWindow() {
  byId("smoothing").max = WINDOWS.length - 1;
  byId("smoothing").value = WINDOWS.indexOf(view.window);
  byId("window").textContent = view.window === 1 ? "none" : `${group(view.window)} steps`;
}

const isNumber = text => /^[\d.,]+( ?[a-zA-Z]{1,2})?$/.test(text) || text === "–";

// A table whose rows, or whose columns, are runs.
function makeTable(table, {runInRow = false, runInColumn = false, numbers = false} = {}) {
  const node = make("table", "", ""), head = make("tr", "", "");
  const align = cell => {
    const text = cell.textContent;
    cell.className = numbers && isNumber(text) ? "number" : text.length <= MAX_WHOLE && /^(\S+|[\d\s.,:+-]+)$/.test(text) ? "whole" : "";
    return cell;
  };
  const label = (cell, run) => { cell.replaceChildren(...(data.runs.length > 1 ? [swatch(run)] : []), run.name); return cell; };
  table.head.forEach((text, i) => {
    const cell = make("th", "", text);
    if (runInColumn && i > 0) label(cell, data.runs[i - 1]);
    if (numbers && i > 1) cell.className = "number";
    head.append(cell);
  });
  node.append(head);
  node.style.minWidth = `${Math.min(8, table.head.length) * 104}px`;
  for (const texts of table.rows) {
    const row = make("tr", "", "");
    texts.forEach((text, i) => row.append(
      runInRow && i === 0 ? label(make("td", "", ""), data.runs[+text]) : align(make("td", "", text))));
    node.append(row);
  }
  return node;
}

function fill(id, table, options) {
  byId(id).hidden = !table.rows.length;
  byId(id).querySelector(".wide").replaceChildren(makeTable(table, options));
}

function makeTables() {
  const {summary, differing, shared, starts} = data.tables, isAlone = data.runs.length === 1;
  byId("figures").hidden = !isAlone;
  byId("figures").replaceChildren(...(isAlone ? summary.head.map((name, i) => {
    const entry = make("div", "", "");
    entry.append(make("dt", "", name), make("dd", "", summary.rows[0][i]));
    return entry;
  }).filter(entry => entry.lastChild.textContent !== "–") : []));
  const rows = summary.rows.map((row, i) => [String(i), ...row]);
  fill("summary", {head: ["run", ...summary.head], rows: isAlone ? [] : rows}, {runInRow: true, numbers: true});
  fill("differing", isAlone ? {head: [], rows: []} : differing, {runInColumn: true});
  byId("shared").querySelector("h2").textContent =
    isAlone ? "Options that are not at their defaults" : "Options that are the same in all runs, and not at their defaults";
  fill("shared", shared, {});
  const ofOne = {head: starts.head.slice(1), rows: starts.rows.map(row => row.slice(1))};
  fill("starts", isAlone ? ofOne : starts, {runInRow: !isAlone});
  byId("notes").replaceChildren(...data.notes.map(note => make("p", "", note)));
  makeSamples();
}

// With `isOld` the runs and charts are those that are there already, and only their numbers are others.
function showAll({isOld = false} = {}) {
  document.title = `${data.title} · training curves`;
  byId("title").textContent = data.title;
  byId("empty").hidden = data.runs.some(run => run.x.step.length || run.validations.x.step.length);
  if (!isOld) {
    makeCharts();
    makeRuns();
    makeAxes();
  }
  makeTables();
  drawAll();
}

byId("smoothing").addEventListener("input", event => {
  view.window = WINDOWS[+event.target.value];
  showWindow();
  drawAll();
});
byId("reset").addEventListener("click", resetZoom);
const showTheme = () => { makeRuns(); makeTables(); drawAll(); };
byId("theme").addEventListener("click", showTheme);
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", showTheme);

// ---- following runs ----

const describeCharts = () => JSON.stringify([data.charts, data.runs.map(run => [run.path, run.x.step.length > 0,
  run.validations.x.step.length > 0, run.validations.best !== null, run.resumes.texts.length > 0])]);

// Asks for what is new, and draws it where the reader is: zoom, hidden runs and smoothing stay.
async function follow() {
  const started = performance.now();
  try {
    const query = new URLSearchParams(location.search);  // which runs
    query.set("version", data.version);
    const answer = document.hidden ? {status: 204} : await fetch(`data?${query}`);
    if (answer.status === 200) {
      const before = describeCharts();
      data = await answer.json();
      showAll({isOld: describeCharts() === before});
    }
    byId("live").className = answer.status < 300 ? "" : "lost";
    byId("live").textContent = answer.status >= 300 ? shorten(await answer.text(), 200)
      : data.is_behind ? "reading" : `following, ${new Date().toLocaleTimeString("en-GB")}`;
  } catch {
    byId("live").className = "lost";
    byId("live").textContent = "no longer followed: the program that serves this page has ended";
  }
  // Reading long runs takes time: most of it is left to others.
  const wait = Math.max(1000 * SECONDS_BETWEEN_QUESTIONS, 5 * (performance.now() - started));
  setTimeout(follow, data.is_behind && !document.hidden ? 0 : wait);
}

if (data.is_live) {
  const link = make("a", "", "All runs");
  link.href = "./";
  document.querySelector(".kicker").prepend(link);
}
showWindow();
showAll();
if (data.is_live) follow();

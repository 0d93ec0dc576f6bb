const data = JSON.parse(byId("data").textContent);
const SVG = "http://www.w3.org/2000/svg";
// viridis (van der Walt and Smith 2015), whose lightness rises evenly.
const VIRIDIS = [[68, 1, 84], [71, 45, 123], [59, 82, 139], [44, 114, 142], [33, 145, 140], [40, 174, 128],
  [94, 201, 98], [173, 220, 48], [253, 231, 37]];
const BLACK_FROM = 0.179; // luminance on which black and white text have the same contrast, 4.6
const PROBE_DASHES = ["6 4", "2 4", "10 4 2 4"];
let kind = data.kinds[0], at = 0, view = 0, hidden = new Set();

const experiment = () => data.experiments[at];
const known = () => experiment().kinds[kind.name];
const isSeveral = data.experiments.length > 1;

const digits = value => Math.abs(value) >= 100 ? 1 : Math.abs(value) >= 10 ? 2 : 3;
const withMinus = text => text.replace(/^-(?=.*[1-9])/, "−").replace("-", "");
const format = value => value === null ? "–" : withMinus(value.toFixed(digits(value)));
const interval = one => `[${format(one.low)}, ${format(one.high)}]`;
const capital = text => text.charAt(0).toUpperCase() + text.slice(1);
const count = (number, word) => `${number.toLocaleString("en")} ${word}${number === 1 ? "" : "s"}`;
const scaleOf = metric => kind.scales.find(scale => scale.metrics.includes(metric));
const nameMetric = name => name.replaceAll("_", " ");
const nameScale = scale =>
  `${scale.metrics.map(nameMetric).join(", ")}, ${scale.higher_is_better ? "higher" : "lower"} is better`;

function draw(parent, name, attributes, text) {
  const node = document.createElementNS(SVG, name);
  for (const [key, value] of Object.entries(attributes)) node.setAttribute(key, value);
  if (text !== undefined) node.textContent = text;
  parent.append(node);
  return node;
}

function fillRow(cells, kinds = "td") {
  const row = make("tr", "", "");
  row.append(...cells.map(cell => cell instanceof Node ? cell : make(kinds, "", cell)));
  return row;
}

function press(nav, chosen) {
  [...nav.children].forEach((button, i) => button.setAttribute("aria-pressed", i === chosen));
}

function makeButton(text, act) {
  const button = make("button", "", text);
  button.type = "button";
  button.addEventListener("click", act);
  return button;
}

// ---- derived numbers

function fillDerived() {
  const shown = data.experiments.filter(one => one.kinds[kind.name]), table = byId("derived");
  table.className = isSeveral ? "wide" : "";
  table.replaceChildren(...isSeveral ? listExperiments(shown) : listMeasures(shown[0]));
  byId("about").textContent = [
    kind.name === "loss" ? "Losses are negated here, so that more is better." : "",
    isSeveral ? data.measures.map(one => `${capital(one.title)}: ${one.about}`).join(" ") : "",
    "In brackets: 95 % intervals (bootstrap over questions, and over sequences if there are several).",
    shown.some(one => one.sequences.length > 1) ? "±: standard deviation over sequences; where it is large and there are"
      + " few, the interval is too narrow." : "",
  ].filter(Boolean).join(" ");
  fillSequences(shown);
}

function listMeasures(one) {
  const derived = one.kinds[kind.name].derived, isDeviating = one.sequences.length > 1;
  const head = ["measure", "mean", "95 % interval", ...isDeviating ? ["±"] : []].map(text => make("th", "", text));
  return [fillRow([...head, make("th", "about", "meaning")]), ...data.measures.map(measure => {
    const own = derived[measure.name], value = make("td", "", "");
    value.append(make("b", "", own ? format(own.mean) : "–"));
    const cells = [capital(measure.title), value, make("td", "range", own ? interval(own) : "")];
    if (isDeviating) cells.push(make("td", "range", writeDeviation(own)));
    const better = `${measure.higher_is_better ? "Higher" : "Lower"} is better.`;
    return fillRow([...cells, make("td", "about", `${measure.about} ${better}`)]);
  })];
}

const writeDeviation = own => own && own.deviation !== null ? `± ${format(own.deviation)}` : "";

function listExperiments(shown) {
  return [fillRow(["experiment", ...data.measures.map(one => one.title)], "th"), ...shown.map(one => {
    const name = make("td", "", one.name);
    name.append(make("small", "", one.method), make("small", "", one.facts));
    return fillRow([name, ...data.measures.map(measure => makeValue(one.kinds[kind.name].derived[measure.name]))]);
  })];
}

function makeValue(own) {
  const cell = make("td", "", "");
  cell.append(make("b", "", own ? format(own.mean) : "–"));
  if (own) cell.append(make("small", "", interval(own)));
  cell.append(make("small", "", writeDeviation(own)));
  return cell;
}

function fillSequences(shown) {
  byId("each").hidden = shown.every(one => one.sequences.length < 2);
  const head = fillRow(["sequence", ...data.measures.map(one => one.title)], "th");
  byId("sequences").replaceChildren(head, ...shown.flatMap(one => one.sequences.map((label, s) => fillRow([
    isSeveral ? `${one.name}, ${label}` : label,
    ...data.measures.map(measure => format(one.kinds[kind.name].derived[measure.name]?.by_sequence[s] ?? null)),
  ]))));
}

// ---- every set after every task

function mix(share) {
  const last = VIRIDIS.length - 1, place = Math.min(Math.max(share, 0), 1) * last;
  const low = Math.min(Math.floor(place), last - 1);
  return VIRIDIS[low].map((value, i) => Math.round(value + (place - low) * (VIRIDIS[low + 1][i] - value)));
}

function luminance(colour) {
  const [red, green, blue] = colour.map(value => value / 255)
    .map(value => value <= 0.04045 ? value / 12.92 : ((value + 0.055) / 1.055) ** 2.4);
  return 0.2126 * red + 0.7152 * green + 0.0722 * blue;
}

function colourCell(node, value, scale) {
  const share = scale.high === scale.low ? 0.5 : (value - scale.low) / (scale.high - scale.low);
  const colour = mix(scale.higher_is_better ? share : 1 - share);
  node.style.background = `rgb(${colour})`;
  node.style.color = luminance(colour) > BLACK_FROM ? "#000" : "#fff";
}

// A name that may be broken after its signs.
function makeName(kind, text) {
  const node = make(kind, "", "");
  text.split(/(?<=[_/.-])/).forEach((part, i) => node.append(...i ? [document.createElement("wbr"), part] : [part]));
  return node;
}

function fillMap() {
  const one = known().views[view], names = [...one.tasks, ...experiment().probes], head = make("thead", "", "");
  const metrics = new Set(Object.values(known().metrics));
  const titles = names.map((name, k) => {
    const title = makeName("th", name), metric = known().metrics[name];
    title.scope = "col";
    if (k === one.tasks.length) title.className = "first-probe";
    if (metric && metrics.size > 1) title.append(make("small", "", nameMetric(metric)));
    return title;
  });
  head.append(fillRow([make("td", "", ""), ...titles]));
  const body = make("tbody", "", "");
  body.append(...one.mean.map((_, t) => {
    const title = makeName("th", t ? `${t} ${one.tasks[t - 1]}` : "before training");
    title.scope = "row";
    return fillRow([title, ...names.map((name, k) => makeCell(one, t, k, name))]);
  }));
  byId("map").replaceChildren(make("caption", "", ""), head, body);
  byId("map").caption.hidden = true;
  byId("scales").replaceChildren(...kind.scales.map(makeScale));
  byId("map-note").textContent = [
    "Rows: the model before training and after each task.",
    `Columns: the tasks${experiment().probes.length ? ", then probes, which are never trained" : ""}.`,
    "Outlined: the task that was just trained.",
    known().views.length > 1 ? `Shown: ${one.label}${one.deviation ? ", ± standard deviation" : ""}.` : "",
    one.mean.flat().includes(null) ? "–: not measured." : "",
  ].filter(Boolean).join(" ");
}

function makeCell(one, t, k, name) {
  const value = one.mean[t][k], metric = known().metrics[name];
  const cell = make("td", "", format(value));
  cell.classList.toggle("none", value === null);
  cell.classList.toggle("own", value !== null && k === t - 1);
  cell.classList.toggle("first-probe", k === one.tasks.length);
  if (value === null) return cell;
  colourCell(cell, value, scaleOf(metric));
  cell.title = `${nameMetric(metric)} of ${count(known().counts[name], "question")}`;
  if (one.deviation) cell.append(make("small", "", `± ${format(one.deviation[t][k])}`));
  return cell;
}

function makeScale(scale) {
  const node = make("div", "scale", ""), bar = make("i", "", "");
  const colours = VIRIDIS.map((_, i) => `rgb(${VIRIDIS[scale.higher_is_better ? i : VIRIDIS.length - 1 - i]})`);
  bar.style.background = `linear-gradient(to right, ${colours})`;
  const told = `${nameScale(scale)}${isSeveral ? "; one scale for all experiments" : ""}`;
  node.append(make("span", "", format(scale.low)), bar, make("span", "", format(scale.high)), make("span", "", told));
  return node;
}

// ---- charts

function widen([low, high], share) {
  const margin = (high - low || Math.abs(high) || 1) * share;
  return [low - margin, high + margin];
}

// Axes with their titles; returns the drawing, and where values lie in it.
function makeFrame(box, { xs, ys, xTitle, yTitle, label, height, xTicks }) {
  const width = Math.max(box.clientWidth, 260), left = 54, right = 16, top = 30, bottom = 46;
  const svg = draw(box, "svg", { viewBox: `0 0 ${width} ${height}`, role: "img", "aria-label": label });
  const x = value => left + (value - xs[0]) / (xs[1] - xs[0]) * (width - left - right);
  const y = value => height - bottom - (value - ys[0]) / (ys[1] - ys[0]) * (height - bottom - top);
  draw(svg, "text", { x: 0, y: 12, class: "title" }, yTitle);
  draw(svg, "text", { x: (left + width - right) / 2, y: height - 6, "text-anchor": "middle", class: "title" }, xTitle);
  for (const value of choosePlaces(...ys, 6)) {
    draw(svg, "line", { x1: left, x2: width - right, y1: y(value), y2: y(value), class: "rule" });
    draw(svg, "text", { x: left - 8, y: y(value) + 4, "text-anchor": "end" }, writeTick(value));
  }
  for (const [value, text] of xTicks(width - left - right)) {
    draw(svg, "line", { x1: x(value), x2: x(value), y1: height - bottom, y2: height - bottom + 4, class: "rule" });
    draw(svg, "text", { x: x(value), y: height - bottom + 18, "text-anchor": "middle" }, text);
  }
  return { svg, x, y, width, height, left, right, top, bottom };
}

const writeTick = value => withMinus(String(value));

// The runs of neighbours that were measured.
function splitRuns(values) {
  const runs = [];
  values.forEach((value, i) => {
    if (value === null) return;
    if (i && values[i - 1] !== null) runs.at(-1).push(i);
    else runs.push([i]);
  });
  return runs;
}

function listLines() {
  const own = known(), one = own.views[view], names = [...one.tasks, ...experiment().probes];
  const column = (grid, k) => grid ? grid.map(row => row[k]) : null;
  return names.map((name, k) => {
    const place = experiment().tasks.indexOf(name), isProbe = place < 0;
    return {
      name, isProbe, metric: own.metrics[name],
      number: isProbe ? experiment().probes.indexOf(name) : place,
      values: column(one.mean, k), low: column(one.low, k), high: column(one.high, k), trained: isProbe ? null : k + 1,
    };
  }).filter(line => line.metric);
}

function styleLine(node, line) {
  const [light, dark] = line.isProbe ? ["#716c62", "#a09b90"] : data.colours[line.number % data.colours.length];
  node.style.setProperty("--c", `light-dark(${light}, ${dark})`);
  return line.isProbe ? { "stroke-dasharray": PROBE_DASHES[line.number % PROBE_DASHES.length] } : {};
}

function drawLine({ svg, x, y }, line) {
  const group = draw(svg, "g", { class: "line" }), dashes = styleLine(group, line);
  const to = (values, i) => `${x(i)} ${y(values[i])}`;
  for (const run of splitRuns(line.values)) {
    if (line.low && run.length > 1) {
      const around = [...run.map(i => to(line.high, i)), ...run.toReversed().map(i => to(line.low, i))];
      draw(group, "path", { class: "band", d: `M${around.join("L")}Z` });
    }
    draw(group, "path", { ...dashes, d: `M${run.map(i => to(line.values, i)).join("L")}` });
  }
  line.values.forEach((value, i) => {
    if (value !== null) drawMark(group, line, i, x(i), y(value));
  });
}

// Tasks beyond the colours have square marks.
function drawMark(group, line, i, x, y) {
  const isOwn = i === line.trained, size = isOwn ? 5 : 2.5, style = { class: isOwn ? "own" : "dot" };
  const isSquare = !line.isProbe && line.number >= data.colours.length;
  const mark = isSquare
    ? draw(group, "rect", { x: x - size, y: y - size, width: 2 * size, height: 2 * size, ...style })
    : draw(group, "circle", { cx: x, cy: y, r: size, ...style });
  const range = line.low ? `, ${format(line.low[i])} to ${format(line.high[i])}` : "";
  draw(mark, "title", {}, `${line.name}${isOwn ? ", just trained" : ""}: ${format(line.values[i])}${range}`);
}

function drawCurves() {
  const lines = listLines();
  byId("curves").replaceChildren();
  for (const scale of kind.scales) drawChart(scale, lines.filter(line => scale.metrics.includes(line.metric)));
  fillLines(lines);
  const one = known().views[view];
  byId("curves-note").textContent = [
    "Ring: the task right after its training.",
    lines.some(line => line.isProbe) ? "Dashed: probes." : "",
    one.low ? "Mean over sequences, band from the lowest to the highest." : "",
    `Order: ${one.tasks.join(" → ")}.`,
  ].filter(Boolean).join(" ");
}

// One chart, of the sets whose metrics have the same scale.
function drawChart(scale, lines) {
  const shown = lines.filter(line => !hidden.has(line.name));
  const values = (shown.length ? shown : lines)
    .flatMap(line => [...line.values, ...line.low ?? [], ...line.high ?? []]).filter(value => value !== null);
  if (!values.length) return;
  const last = lines[0].values.length - 1;
  const frame = makeFrame(byId("curves"), {
    xs: widen([0, last], 0.03), ys: widen([Math.min(...values), Math.max(...values)], 0.06),
    xTitle: "tasks trained", yTitle: nameScale(scale), height: 340,
    label: `${scale.metrics.join(", ")} of each set after each task`,
    xTicks: width => listTicks(last, known().views[view].tasks, width),
  });
  for (const line of shown) drawLine(frame, line);
}

// Names of tasks where all of them fit, else numbers.
function listTicks(last, tasks, width) {
  const names = Array.from({ length: last + 1 }, (_, i) => i ? `${i} ${tasks[i - 1]}` : "start");
  const room = width / (last + 1) / 6.6;
  if (names.every(name => name.length < room)) return names.map((name, i) => [i, name]);
  const step = Math.ceil(2.5 / room);
  return names.flatMap((_, i) => i % step ? [] : [[i, writeTick(i)]]);
}

function fillLines(lines) {
  byId("lines").replaceChildren(...lines.map(line => {
    const button = makeButton("", () => {
      if (!hidden.delete(line.name)) hidden.add(line.name);
      drawCurves();
      [...byId("lines").children].find(one => one.title === line.name)?.focus();
    });
    button.title = line.name;
    button.setAttribute("aria-pressed", !hidden.has(line.name));
    const svg = draw(button, "svg", { viewBox: "0 0 30 12", "aria-hidden": true });
    const group = draw(svg, "g", { class: "line" });
    draw(group, "path", { ...styleLine(group, line), d: "M0 6H30" });
    if (!line.isProbe) drawMark(group, { ...line, low: null, trained: 0 }, 0, 15, 6);
    button.append(make("span", "", line.name));
    return button;
  }));
}

// ---- learnt against forgotten

function drawFront() {
  byId("front").hidden = !kind.fronts.length;
  if (!kind.fronts.length) return;
  const front = kind.fronts[byId("forgotten").selectedIndex];
  const measure = data.measures.find(one => one.name === front.name), points = listPoints(front);
  const span = key => points.flatMap(one => [one[key].low, one[key].high, one[key].mean]);
  const [xs, ys] = ["x", "y"].map(key => widen([Math.min(...span(key)), Math.max(...span(key))], 0.12));
  byId("points").replaceChildren();
  const frame = makeFrame(byId("points"), {
    xs, ys, height: 380, xTitle: `${measure.title}, lower is better`, yTitle: "learnt, higher is better",
    label: "what each experiment learnt against what it forgot",
    xTicks: width => choosePlaces(...xs, Math.max(4, width / 80)).map(value => [value, writeTick(value)]),
  });
  drawEdge(frame, points.filter(point => point.isOn).sort((a, b) => a.x.mean - b.x.mean));
  drawPoints(frame, points);
  byId("points-table").replaceChildren(fillRow(["point", "experiment", "learnt", measure.title, "place"], "th"),
    ...points.map(point => fillRow([String(point.number), point.name, format(point.y.mean), format(point.x.mean),
      make("td", "on", point.isOn ? "front" : "")])));
  byId("front-note").textContent = [
    "One point per experiment; the lines are 95 % intervals.",
    kind.name === "loss" ? "Losses are negated here, so that more is better." : "",
    isSeveral ? "Green: the Pareto front, where no other experiment learnt as much and forgot less, or learnt more and"
      + " forgot as little." : "With mini-trainer continual --compare, several experiments appear here.",
  ].filter(Boolean).join(" ");
}

function listPoints(front) {
  return data.experiments.flatMap((one, i) => {
    const own = one.kinds[kind.name]?.derived, isOn = isSeveral && front.on_front[i];
    return front.is_measured[i] ? [{ name: one.name, x: own[front.name], y: own.learnt, isOn, number: i + 1 }] : [];
  });
}

function drawEdge({ svg, x, y }, points) {
  if (points.length < 2) return;
  const [start, ...rest] = points.map(point => [x(point.x.mean), y(point.y.mean)]);
  draw(svg, "path", { class: "edge", d: `M${start}${rest.map(([x, y]) => `H${x}V${y}`).join("")}` });
}

function drawPoints(frame, points) {
  const { svg, x, y } = frame;
  for (const point of points) {
    const bars = draw(svg, "g", { class: point.isOn ? "bars on" : "bars" });
    draw(bars, "line", { x1: x(point.x.low), x2: x(point.x.high), y1: y(point.y.mean), y2: y(point.y.mean) });
    draw(bars, "line", { x1: x(point.x.mean), x2: x(point.x.mean), y1: y(point.y.low), y2: y(point.y.high) });
  }
  const groups = points.map(point => draw(svg, "g", { class: point.isOn ? "point on" : "point" }));
  const taken = points.map(point => ({ x: x(point.x.mean) - 10, y: y(point.y.mean) - 10, width: 20, height: 20 }));
  points.forEach((point, i) => {
    const [cx, cy] = [x(point.x.mean), y(point.y.mean)], circle = draw(groups[i], "circle", { cx, cy, r: 9 });
    const write = value => `${format(value.mean)} ${interval(value)}`;
    draw(circle, "title", {}, `${point.name}: learnt ${write(point.y)}, forgotten ${write(point.x)}`);
    draw(groups[i], "text", { x: cx, y: cy + 4, class: "number" }, point.number);
    placeName(frame, groups[i], point.name, cx, cy, taken);
  });
}

// The name beside its point, where it covers nothing; else the number has to do.
function placeName({ width, top, height, bottom, left }, group, name, cx, cy, taken) {
  const text = draw(group, "text", {}, name), size = text.getBBox();
  const places = [cy - 12, cy + 20, cy - 28, cy + 36].flatMap(y => [[cx + 8, y], [cx - 8 - size.width, y]]);
  for (const [x, y] of places) {
    const box = { x, y: y - 12, width: size.width, height: 16 };
    const isInside = x >= left && x + size.width <= width && box.y >= top && y <= height - bottom;
    if (isInside && !taken.some(other => overlaps(box, other))) {
      taken.push(box);
      text.setAttribute("x", x);
      text.setAttribute("y", y);
      return;
    }
  }
  text.remove();
}

const overlaps = (a, b) => a.x < b.x + b.width && b.x < a.x + a.width && a.y < b.y + b.height && b.y < a.y + a.height;

// ---- what is chosen

function chooseKind(i) {
  kind = data.kinds[i];
  press(byId("kinds"), i);
  const titles = { forgetting: "tasks forgotten", forgotten: "probes forgotten" };
  byId("forgotten").replaceChildren(...kind.fronts.map(front => makeOption(front.name, titles[front.name])));
  byId("forgotten").hidden = kind.fronts.length < 2;
  fillDerived();
  drawFront();
  [...byId("experiments").children].forEach((button, k) => {
    button.disabled = !data.experiments[k].kinds[kind.name];
  });
  chooseExperiment(known() ? at : data.experiments.findIndex(one => one.kinds[kind.name]));
}

function chooseExperiment(i) {
  at = i;
  press(byId("experiments"), i);
  for (const node of document.querySelectorAll(".whose")) node.textContent = isSeveral ? experiment().name : "";
  const views = known().views;
  byId("view").replaceChildren(...views.map((one, k) => makeOption(k, one.label)));
  byId("view").hidden = views.length < 2;
  chooseView(0);
}

function chooseView(i) {
  view = i;
  fillMap();
  drawCurves();
}

const first = data.experiments[0];
byId("facts").textContent = isSeveral ? "" : `${first.method} · ${first.facts}`;
byId("kinds").append(...data.kinds.map((one, i) => makeButton(one.title, () => chooseKind(i))));
byId("kinds").hidden = data.kinds.length < 2;
byId("experiments").append(...data.experiments.map((one, i) => makeButton(one.name, () => chooseExperiment(i))));
byId("experiments").hidden = !isSeveral;
byId("view").addEventListener("change", event => chooseView(event.target.selectedIndex));
byId("forgotten").addEventListener("change", drawFront);
chooseKind(0);
let width = innerWidth;
addEventListener("resize", () => {
  if (innerWidth === width) return;
  width = innerWidth;
  drawCurves();
  drawFront();
});

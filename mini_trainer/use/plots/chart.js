// Draws a chart of lines as SVG: axes, a reading under the pointer, zoom by dragging.
"use strict";
const MARGIN = {left: 62, right: 10, top: 8, bottom: 44};  // pixels around the lines
const DASHES = {solid: "", dash: "9 5", dot: "2 4", dashdot: "9 4 2 4"};
const STAR = [0, -1, .24, -.33, 1, -.31, .41, .13, .59, .85, 0, .44, -.59, .85, -.41, .13, -1, -.31, -.24, -.33];
const REACH = 30;  // pixels from the pointer to the points that it reads
const LEAST_DRAG = 8;  // pixels
const FAR = 1e6;  // no browser draws further away

function svg(kind, attributes) {
  const node = document.createElementNS("http://www.w3.org/2000/svg", kind);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  return node;
}

const isDrawable = (value, isLog) => value !== null && Number.isFinite(value) && !(isLog && value <= 0);
const log10 = Math.log10;

// The lowest and highest value that the lines have, with room around.
function findRange(traces, isLog) {
  let low = Infinity, high = -Infinity;
  for (const {y, isFull} of traces) {
    if (isFull) continue;
    for (const value of y) {
      if (!isDrawable(value, isLog)) continue;
      low = Math.min(low, value);
      high = Math.max(high, value);
    }
  }
  if (low > high) return isLog ? [0.1, 10] : [0, 1];
  if (isLog) {
    const room = (log10(high) - log10(low)) * 0.06 || 0.3;
    return [10 ** (log10(low) - room), 10 ** (log10(high) + room)];
  }
  const room = (high - low) * 0.06 || Math.abs(high) * 0.1 || 1;
  return [low - room, high + room];
}

function chooseLogPlaces(low, high, most) {
  const first = Math.floor(log10(low)), last = Math.ceil(log10(high)), step = Math.ceil((last - first) / most);
  const factors = last - first <= 2 ? [1, 2, 5] : [1], places = [];
  for (let power = first; power <= last; power += step) for (const factor of factors) places.push(factor * 10 ** power);
  const inside = places.filter(place => place >= low && place <= high);
  return inside.length > 1 ? inside : choosePlaces(low, high, most);
}

// A tick's number: 0.25, 1e-5, and from ten thousand on 20k or 1.5M.
function writeTick(value, largest) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (largest < 5e-3) return String(value.toExponential(3)).replace(/\.?0+e/, "e");
  const [unit, by] = [["G", 1e9], ["M", 1e6], ["k", 1e3]].find(([, by]) => largest >= 10 * by || size >= 10 * by) ?? ["", 1];
  return String(Number((value / by).toPrecision(6))) + unit;
}

// `chart`: traces, `x` and `y` with title and range (of `y` null: that of the lines), `isLog`, `readX`, a function that
// writes the place that is read, `onZoom` and `onReset`.
function drawChart(div, chart) {
  const width = div.clientWidth, height = div.clientHeight;
  const inner = {width: Math.max(1, width - MARGIN.left - MARGIN.right), height: Math.max(1, height - MARGIN.top - MARGIN.bottom)};
  const ranges = {x: chart.x.range, y: chart.y.range ?? findRange(chart.traces, chart.isLog)};
  const along = (value, [low, high], isLog) => isLog ? (log10(value) - log10(low)) / (log10(high) - log10(low))
    : (value - low) / (high - low);
  const clamp = value => Math.max(-FAR, Math.min(FAR, value));
  const place = {
    x: value => clamp(MARGIN.left + inner.width * along(value, ranges.x)),
    y: value => clamp(MARGIN.top + inner.height * (1 - along(value, ranges.y, chart.isLog))),
  };
  div.drawn = {...chart, ranges, place, inner};
  const image = svg("svg", {width, height, viewBox: `0 0 ${width} ${height}`, "aria-hidden": "true"});
  const clip = `clip ${div.id}`.replace(/[^\w-]/g, "_"), lines = svg("g", {"clip-path": `url(#${clip})`});
  const path = svg("clipPath", {id: clip});
  path.append(svg("rect", {x: MARGIN.left, y: MARGIN.top, ...inner}));
  lines.append(...chart.traces.map(trace => drawTrace(trace, div.drawn)));
  image.append(path, drawAxes(div.drawn, width, height), lines, svg("g", {class: "read"}),
    svg("rect", {class: "over", x: MARGIN.left, y: MARGIN.top, ...inner}));
  const tip = make("div", "tip", "");
  tip.hidden = true;
  div.replaceChildren(image, tip);
  listen(div);
}

function drawAxes({x, y, isLog, ranges, place, inner}, width, height) {
  const group = svg("g", {class: "axes"}), right = MARGIN.left + inner.width, bottom = MARGIN.top + inner.height;
  const write = (text, attributes) => {
    const node = svg("text", attributes);
    node.textContent = text;
    group.append(node);
  };
  const xs = choosePlaces(...ranges.x, Math.max(3, Math.min(7, width / 80)));
  const ys = (isLog ? chooseLogPlaces : choosePlaces)(...ranges.y, 6);
  for (const value of xs) {
    group.append(svg("path", {d: `M${place.x(value)} ${MARGIN.top}V${bottom}`}));
    write(writeTick(value, Math.abs(ranges.x[1])), {x: place.x(value), y: bottom + 16, "text-anchor": "middle"});
  }
  for (const value of ys) {
    group.append(svg("path", {d: `M${MARGIN.left} ${place.y(value)}H${right}`}));
    write(writeTick(value, isLog ? value : Math.max(...ranges.y.map(Math.abs))),
      {x: MARGIN.left - 7, y: place.y(value) + 4, "text-anchor": "end"});
  }
  write(x.title, {class: "xtitle", x: MARGIN.left + inner.width / 2, y: height - 6, "text-anchor": "middle"});
  const middle = MARGIN.top + inner.height / 2;
  write(y.title, {class: "ytitle", x: 13, y: middle, "text-anchor": "middle", transform: `rotate(-90 13 ${middle})`});
  return group;
}

// A line that passes over missing points, and circles or stars at its points.
function drawTrace(trace, {isLog, place, inner}) {
  const group = svg("g", {class: "trace", fill: "none", stroke: trace.colour, "stroke-width": trace.width});
  if (trace.opacity) group.setAttribute("opacity", trace.opacity);
  const points = [];
  trace.x.forEach((x, i) => {
    if (x === null) return;
    if (trace.isFull) points.push([place.x(x), 0, i]);
    else if (isDrawable(trace.y[i], isLog)) points.push([place.x(x), place.y(trace.y[i]), i]);
  });
  const write = (x, y) => `${x.toFixed(1)} ${y.toFixed(1)}`;
  if (trace.hasLine) {
    const d = trace.isFull ? points.map(([x]) => `M${x.toFixed(1)} ${MARGIN.top}v${inner.height}`).join("")
      : points.length ? "M" + points.map(([x, y]) => write(x, y)).join("L") : "";
    group.append(svg("path", {d, "stroke-dasharray": DASHES[trace.dash], "stroke-linejoin": "round"}));
  }
  const size = trace.size ?? 3, isStar = i => trace.stars?.has(i);
  const draw = (className, found, shape) => found.length && group.append(svg("path", {class: className, d: found.map(shape).join("")}));
  if (trace.markers) {
    const circle = ([x, y]) => `M${write(x - size, y)}a${size} ${size} 0 1 0 ${2 * size} 0a${size} ${size} 0 1 0 ${-2 * size} 0Z`;
    const star = ([x, y]) => "M" + Array.from({length: 10}, (_, k) => write(x + 8 * STAR[2 * k], y + 8 * STAR[2 * k + 1])).join("L") + "Z";
    draw(`marker ${trace.markers}`, points.filter(([, , i]) => !isStar(i)), circle);
    draw("marker full star", points.filter(([, , i]) => isStar(i)), star);
    for (const marker of group.querySelectorAll(".full")) marker.setAttribute("fill", trace.colour);
  }
  return group;
}

// ---- the pointer

const positionOf = (div, event) => {
  const box = div.getBoundingClientRect();
  return [event.clientX - box.left, event.clientY - box.top];
};

// The index of the point of a line that is nearest to a place, sideways; xs rise.
function findNearest(trace, x) {
  let best = -1, least = Infinity;
  trace.x.forEach((value, i) => {
    if (value === null || (!trace.isFull && trace.y[i] === null)) return;
    if (Math.abs(value - x) < least) [best, least] = [i, Math.abs(value - x)];
  });
  return best;
}

function read(div, [x, y]) {
  const {traces, place, ranges, inner, readX, isLog} = div.drawn;
  const value = ranges.x[0] + (x - MARGIN.left) / inner.width * (ranges.x[1] - ranges.x[0]);
  const found = traces.filter(trace => trace.texts).map(trace => [trace, findNearest(trace, value)])
    .filter(([trace, i]) => i >= 0 && Math.abs(place.x(trace.x[i]) - x) <= REACH);
  const tip = div.querySelector(".tip"), group = div.querySelector(".read");
  tip.hidden = !found.length;
  group.replaceChildren();
  if (!found.length) return;
  const [nearest, k] = found.reduce((a, b) => Math.abs(b[0].x[b[1]] - value) < Math.abs(a[0].x[a[1]] - value) ? b : a);
  const at = place.x(nearest.x[k]);
  group.append(svg("path", {d: `M${at} ${MARGIN.top}v${inner.height}`}));
  tip.replaceChildren(make("p", "", readX(nearest.x[k])), ...found.map(([trace, i]) => {
    if (!trace.isFull && isDrawable(trace.y[i], isLog))
      group.append(svg("circle", {cx: place.x(trace.x[i]), cy: place.y(trace.y[i]), r: 3, fill: trace.colour}));
    const line = make("p", "", ""), mark = make("i", "", ""), [strong, rest] = trace.texts[i];
    mark.style.background = trace.colour;
    line.append(mark, make("b", "", strong), rest);
    return line;
  }));
  const isLeft = at > div.clientWidth / 2;
  tip.style.left = isLeft ? "auto" : `${at + 14}px`;
  tip.style.right = isLeft ? `${div.clientWidth - at + 14}px` : "auto";
  tip.style.top = `${Math.max(0, Math.min(y - tip.offsetHeight / 2, div.clientHeight - tip.offsetHeight))}px`;
}

// The ranges that were dragged over: of one axis, where the other one hardly moved.
function findDragged({ranges, inner, isLog}, [x0, y0], [x1, y1]) {
  const share = (value, start, size) => Math.max(0, Math.min(1, (value - start) / size));
  const sort = (a, b) => [Math.min(a, b), Math.max(a, b)];
  const [left, right] = sort(share(x0, MARGIN.left, inner.width), share(x1, MARGIN.left, inner.width));
  const [low, high] = sort(1 - share(y0, MARGIN.top, inner.height), 1 - share(y1, MARGIN.top, inner.height));
  const across = Math.abs(x1 - x0), down = Math.abs(y1 - y0), zoomed = {};
  const within = ([a, b], share) => isLog ? 10 ** (log10(a) + share * (log10(b) - log10(a))) : a + share * (b - a);
  if (across >= LEAST_DRAG && across > down / 3) zoomed.x = [left, right].map(at => ranges.x[0] + at * (ranges.x[1] - ranges.x[0]));
  if (down >= LEAST_DRAG && down > across / 3) zoomed.y = [low, high].map(at => within(ranges.y, at));
  return zoomed;
}

function showDragged(div, start, end) {
  const {x, y} = findDragged(div.drawn, start, end), {place, inner} = div.drawn, group = div.querySelector(".read");
  const [left, right] = x ? x.map(place.x) : [MARGIN.left, MARGIN.left + inner.width];
  const [bottom, top] = y ? y.map(place.y) : [MARGIN.top + inner.height, MARGIN.top];
  group.replaceChildren(...(x || y ? [svg("rect", {class: "dragged", x: left, y: top, width: right - left, height: bottom - top})] : []));
  div.querySelector(".tip").hidden = true;
}

// Once for a chart, whatever is drawn in it later.
function listen(div) {
  if (div.dataset.listens) return;
  div.dataset.listens = "yes";
  let start = null;
  const isOver = event => event.target.classList.contains("over");
  div.addEventListener("pointerdown", event => {
    if (!isOver(event) || event.button !== 0 || event.pointerType === "touch") return;
    start = positionOf(div, event);
    div.setPointerCapture(event.pointerId);
    event.preventDefault();
  });
  div.addEventListener("pointermove", event => {
    if (start) showDragged(div, start, positionOf(div, event));
    else if (isOver(event)) read(div, positionOf(div, event));
  });
  div.addEventListener("pointerup", event => {
    if (!start) return;
    const zoomed = findDragged(div.drawn, start, positionOf(div, event));
    start = null;
    div.querySelector(".read").replaceChildren();
    if (zoomed.x || zoomed.y) div.drawn.onZoom(zoomed);
  });
  div.addEventListener("pointercancel", () => { start = null; });
  div.addEventListener("pointerleave", () => {
    if (start) return;
    div.querySelector(".tip").hidden = true;
    div.querySelector(".read").replaceChildren();
  });
  div.addEventListener("dblclick", () => div.drawn.onReset());
}

const SECONDS_BETWEEN_QUESTIONS = 3;
const STATES = ["running", "finished", "stopped", "crashed", "unknown"];
const MAX_NAME = 120;

let data = JSON.parse(byId("data").textContent);
const view = {key: "written", isRising: false, state: null, chosen: new Set()};
const rows = new Map();  // by a run's id: its row, which keeps focus and checkbox while numbers change

const formatLoss = value => Math.abs(value) < 1e-3 && value !== 0 ? value.toExponential(3) : value.toFixed(4);
const group = value => Math.round(value).toLocaleString("en");
const pad = value => String(value).padStart(2, "0");

function formatDuration(seconds) {
  const rest = Math.round(seconds), hours = Math.floor(rest / 3600);
  return `${hours}:${pad(Math.floor(rest / 60) % 60)}:${pad(rest % 60)}`;
}

function formatTime(seconds) {
  const when = new Date(1000 * seconds), clock = `${pad(when.getHours())}:${pad(when.getMinutes())}`;
  if (when.toDateString() === new Date().toDateString()) return `${clock}:${pad(when.getSeconds())}`;
  const day = when.toLocaleDateString("en-GB", {day: "numeric", month: "short"});
  return when.getFullYear() === new Date().getFullYear() ? `${day} ${clock}` : `${day} ${when.getFullYear()}`;
}

const formatRate = value => value < 1e-3 ? value.toExponential(3).replace(/\.?0+e/, "e") : String(value);
const formatBatch = (value, run) => run.is_batch_of_tokens ? `${group(value)} tokens` : group(value);

// title, key, how it is written
const COLUMNS = [
  ["run", "name"], ["state", "state"], ["step", "step", group], ["loss", "loss", formatLoss],
  ["best validation", "best", formatLoss], ["method", "method"], ["learning rate", "lr", formatRate],
  ["batch", "batch", formatBatch], ["tokens/s", "speed", group], ["time left", "left", formatDuration],
  ["last step", "written", formatTime], ["notes", "notes"], ["last error", "error"],
];
const isNumber = ([, , write]) => write !== undefined;

// ---- the table

function makeHead() {
  const row = make("tr", "", ""), first = make("th", "", "");
  first.append(make("span", "hidden", "selected"));
  row.append(first, ...COLUMNS.map(column => {
    const [title, key] = column, cell = make("th", isNumber(column) ? "number" : "", "");
    const button = make("button", "", title);
    button.type = "button";
    button.addEventListener("click", () => {
      const isSame = view.key === key;
      view.isRising = isSame ? !view.isRising : !isNumber(column) || ["loss", "best", "left", "lr", "batch"].includes(key);
      view.key = key;
      show();
    });
    cell.scope = "col";
    cell.dataset.key = key;
    cell.append(button);
    return cell;
  }));
  byId("runs").tHead.replaceChildren(row);
}

function makeRow(run) {
  const row = make("tr", "", ""), first = make("td", "", ""), box = make("input", "", "");
  box.type = "checkbox";
  box.setAttribute("aria-label", `select ${run.name}`);
  box.addEventListener("change", () => {
    view.chosen[box.checked ? "add" : "delete"](run.id);
    showChosen();
  });
  first.append(box);
  row.append(first, ...COLUMNS.map(column => make("td", isNumber(column) ? "number" : column[1], "")));
  const link = make("a", "", [...run.name].length > MAX_NAME ? [...run.name].slice(0, MAX_NAME).join("") + "…" : run.name);
  link.href = curvesOf([run.id]);
  link.title = run.name;
  row.querySelector(".name").append(link);
  return {row, box, cells: Object.fromEntries(COLUMNS.map(([, key], i) => [key, row.cells[i + 1]])), shown: ""};
}

function fillRow(entry, run) {
  const text = JSON.stringify(run), {cells, row} = entry;
  if (entry.shown === text) return;
  entry.shown = text;
  row.className = run.state;
  cells.state.replaceChildren(make("b", "", run.state), ...run.how ? [make("small", "", run.how)] : []);
  for (const [, key, write] of COLUMNS.filter(isNumber)) cells[key].textContent = run[key] === null ? "–" : write(run[key], run);
  if (run.share !== null) {
    const bar = make("div", "done", ""), part = make("i", "", "");
    part.style.width = `${100 * run.share}%`;
    bar.title = `${(100 * run.share).toFixed(1)} % done`;
    bar.append(part);
    cells.step.append(bar);
  }
  cells.method.textContent = run.method;
  const [first, ...others] = run.notes.split("\n");
  cells.notes.textContent = others.length ? `${first.trimEnd()} …` : first;
  cells.notes.title = others.length ? run.notes : "";
  cells.name.querySelector("small")?.remove();
  if (run.has_samples) {
    const samples = make("small", "", ""), link = make("a", "", "answers");
    link.href = `${curvesOf([run.id])}#samples`;
    link.title = "answers to the sample prompts";
    samples.append(link);
    cells.name.append(samples);
  }
  cells.error.replaceChildren(...run.error ? [make("div", "", run.error)] : []);
}

function compare(a, b) {
  const [x, y] = [a[view.key], b[view.key]], isGone = value => value === null || value === "";
  if (isGone(x) !== isGone(y)) return isGone(x) ? 1 : -1;  // runs without a value come last, either way
  const [p, q] = view.key === "state" ? [STATES.indexOf(x), STATES.indexOf(y)] : [x, y];
  const order = typeof p === "string" ? p.localeCompare(q, "en", {numeric: true}) : p - q;
  return (view.isRising ? order : -order) || a.name.localeCompare(b.name, "en", {numeric: true});
}

function listShown() {
  const wanted = byId("search").value.toLowerCase();
  return data.runs.filter(run => (view.state === null || run.state === view.state)
    && (!wanted || `${run.name}\n${run.how}\n${run.method}\n${run.notes}\n${run.error}`.toLowerCase().includes(wanted))).sort(compare);
}

function show() {
  const shown = listShown(), body = byId("runs").tBodies[0];
  for (const id of rows.keys()) if (!data.runs.some(run => run.id === id)) rows.delete(id);
  view.chosen = new Set([...view.chosen].filter(id => data.runs.some(run => run.id === id)));
  const nodes = shown.map(run => {
    if (!rows.has(run.id)) rows.set(run.id, makeRow(run));
    fillRow(rows.get(run.id), run);
    return rows.get(run.id).row;
  });
  if (nodes.length !== body.rows.length || nodes.some((node, i) => node !== body.rows[i])) body.replaceChildren(...nodes);
  for (const cell of byId("runs").tHead.rows[0].cells) {
    if (cell.dataset.key === view.key) cell.setAttribute("aria-sort", view.isRising ? "ascending" : "descending");
    else cell.removeAttribute("aria-sort");
  }
  byId("none").hidden = shown.length > 0;
  byId("none").textContent = data.runs.length ? "No run matches." : `No runs in ${data.folder} yet.`;
  byId("notes").replaceChildren(...[data.folder, ...data.notes].map(note => make("p", "", note)));
  showStates();
  showChosen();
}

function showStates() {
  const counts = STATES.map(state => [state, data.runs.filter(run => run.state === state).length]);
  const entries = [[null, data.runs.length], ...counts.filter(([state, count]) => count || state === view.state)];
  const texts = entries.map(([state, count]) => `${state ?? "all"} ${count}`), group = byId("states");
  if (group.dataset.shown !== texts.join()) {
    group.dataset.shown = texts.join();
    group.replaceChildren(...entries.map(([state], i) => {
      const button = make("button", "", texts[i]);
      button.type = "button";
      button.addEventListener("click", () => {
        view.state = state;
        show();
      });
      return button;
    }));
  }
  entries.forEach(([state], i) => group.children[i].setAttribute("aria-pressed", state === view.state));
}

// ---- comparing

const curvesOf = ids => `curves?${new URLSearchParams(ids.map(id => ["run", id]))}`;

function showChosen() {
  const count = view.chosen.size, isTooMany = count > data.most_compared;
  for (const [id, {box}] of rows) box.checked = view.chosen.has(id);
  byId("compare").disabled = count === 0 || isTooMany;
  byId("compare").textContent = isTooMany ? `${count} selected, at most ${data.most_compared} can be compared`
    : count ? `show curves of ${count}` : "select runs to compare";
  byId("clear").hidden = count === 0;
}

byId("compare").addEventListener("click", () => { location.href = curvesOf([...view.chosen]); });
byId("clear").addEventListener("click", () => {
  view.chosen.clear();
  showChosen();
});
byId("search").addEventListener("input", show);

// ---- following

async function follow() {
  const started = performance.now();
  try {
    const answer = document.hidden ? {status: 204} : await fetch(`runs?version=${data.version}`);
    if (answer.status === 200) {
      data = await answer.json();
      show();
    }
    byId("live").className = answer.status < 300 ? "" : "lost";
    byId("live").textContent = answer.status < 300
      ? `following, ${new Date().toLocaleTimeString("en-GB")}` : (await answer.text()).slice(0, 200);
  } catch {
    byId("live").className = "lost";
    byId("live").textContent = "no longer followed: the program that serves this page has ended";
  }
  // Looking through many directories takes time: most of it is left to others.
  setTimeout(follow, Math.max(1000 * SECONDS_BETWEEN_QUESTIONS, 5 * (performance.now() - started)));
}

makeHead();
show();
follow();

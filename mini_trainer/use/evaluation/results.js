const data = JSON.parse(byId("data").textContent);
const PER_PAGE = 20;
let chosen = data.sets[0], metric = 0, found = [], at = 0;

const digits = value => Math.abs(value) >= 100 ? 1 : value && Math.abs(value) < 0.001 ? 6 : 4;
const format = value => value.toFixed(digits(value)).replace("-", "−");
const signed = value => (value < 0 ? "−" : "+") + format(Math.abs(value));
const interval = value => `[${format(value.low)}, ${format(value.high)}]`;
const known = chosen => chosen.metrics[metric];

function choose(set) {
  chosen = set;
  metric = 0;
  byId("set").textContent = set.name;
  byId("metric").replaceChildren(...set.metrics.map((one, i) => makeOption(i, one.name.replaceAll("_", " "))));
  byId("filter").replaceChildren(
    makeOption("all", "all samples"),
    ...(data.models.length > 1 ? [makeOption("differ", "where models differ")] : []),
    ...data.models.map((label, i) => makeOption(`low ${i}`, `where ${label} is wrong, or behind`)),
  );
  for (const button of byId("sets").children) button.setAttribute("aria-pressed", button.textContent === set.name);
  draw();
}

function draw() {
  drawMeans();
  drawPairs();
  drawClasses();
  find();
}

// Shares are drawn from 0 to 1. Others have a scale of their own, where what matters is whether intervals overlap.
function chooseScale(one) {
  const least = Math.min(...one.values.map(v => v.low)), most = Math.max(...one.values.map(v => v.high));
  if (one.higher_is_better && least >= 0 && most <= 1) return {isShare: true, low: 0, high: 1, ticks: [0, 0.25, 0.5, 0.75, 1]};
  const margin = (most - least || Math.abs(most) || 1) * 0.08;
  const [low, high] = [least - margin, most + margin];
  return {isShare: false, low, high, ticks: choosePlaces(low, high, 4)};
}

function drawAxis(scale, place) {
  const row = make("div", "mean axis", ""), ticks = make("div", "ticks", "");
  ticks.append(...scale.ticks.map(value => {
    const tick = make("span", "", String(value).replace("-", "−"));
    tick.style.left = place(value);
    return tick;
  }));
  row.setAttribute("aria-hidden", "true");
  row.append(make("span", "", ""), ticks, make("span", "", ""));
  return row;
}

function drawMeans() {
  const one = known(chosen), scale = chooseScale(one);
  const place = value => `${100 * (value - scale.low) / (scale.high - scale.low)}%`;
  const means = one.values.map(v => v.mean), best = one.higher_is_better ? Math.max(...means) : Math.min(...means);
  byId("means").replaceChildren(...one.values.map((value, i) => {
    const row = make("div", value.mean === best && data.models.length > 1 ? "mean best" : "mean", "");
    const name = make("span", "", data.models[i]), track = make("div", "track", "");
    name.title = data.names[i];
    const bar = make("i", "", ""), dot = make("b", "", ""), told = make("span", "told", `${format(value.mean)} `);
    track.append(...scale.ticks.map(tick => {
      const line = make("u", "", "");
      line.style.left = place(tick);
      return line;
    }));
    if (scale.isShare) {
      const share = make("s", "", "");
      share.style.width = place(value.mean);
      track.append(share);
    }
    bar.style.left = place(value.low);
    bar.style.width = `calc(${place(value.high)} - ${place(value.low)})`;
    dot.style.left = place(value.mean);
    track.append(bar, dot);
    told.append(make("small", "", interval(value)));
    row.append(name, track, told);
    return row;
  }), drawAxis(scale, place));
  const direction = one.higher_is_better ? "higher is better" : "lower is better";
  const extras = chosen.extras.map((extra, i) => [
    extra.perplexity && `${data.models[i]}: perplexity ${format(extra.perplexity)}`,
    extra.corpus_bleu !== undefined && `${data.models[i]}: BLEU of all ${extra.corpus_bleu.toFixed(2)}`,
    extra.label && `${data.models[i]}: macro F1 ${format(extra.label.macro_f1)}`,
    extra.classification?.f1 !== undefined && `${data.models[i]}: macro F1 ${format(extra.classification.f1)}`,
    extra.classification?.matthews !== undefined && `${data.models[i]}: Matthews ${format(extra.classification.matthews)}`,
    extra.classification?.pearson && `${data.models[i]}: Pearson ${format(extra.classification.pearson)}`,
    extra.num_cut && `${data.models[i]}: ${extra.num_cut} answers cut at their longest`,
    extra.num_refused && `${data.models[i]}: ${extra.num_refused} prompts too long, which count as wrong`,
  ].filter(Boolean).join(", ")).filter(Boolean).join("; ");
  byId("about").textContent = `${one.num_samples.toLocaleString("en")} samples, ${direction}; the thin lines are 95 %`
    + ` intervals (${one.is_right_or_wrong ? "Wilson" : "bootstrap over samples"}). ${extras}`;
}

function drawPairs() {
  const one = known(chosen);
  byId("pairs").hidden = one.pairs.length === 0;
  const head = make("tr", "", "");
  head.append(...["first", "second", "difference", "95 %", "second better", "worse", "p"].map(t => make("th", "", t)));
  byId("pairs-table").replaceChildren(head, ...one.pairs.map(pair => {
    const row = make("tr", "", ""), isBetter = (pair.difference > 0) === one.higher_is_better;
    const kind = pair.p_holm >= 0.05 ? "same" : isBetter ? "up" : "down";
    const p = pair.p_holm < 0.0001 ? "< 0.0001" : pair.p_holm.toFixed(4);
    const last = make("td", "", p);
    last.title = `${pair.test}; alone ${pair.p.toPrecision(3)}`;
    row.append(
      make("td", "", data.models[pair.a]), make("td", "", data.models[pair.b]),
      make("td", kind, signed(pair.difference)), make("td", "", interval(pair)),
      make("td", "", pair.num_better), make("td", "", pair.num_worse), last,
    );
    return row;
  }));
}

// scikit-learn's report, of classifiers and of labels that are read out of answers.
function drawClasses() {
  const reports = chosen.extras.map(extra => extra.classification?.classes ?? extra.label?.labels);
  byId("classes").hidden = !reports[0];
  if (!reports[0]) return;
  const classes = Object.entries(reports[0]).map(([name, first]) => {
    const scores = reports.map(report => report[name].f1 ?? report[name]["f1-score"]);
    return { name, scores, count: first.num_targets ?? first.support, spread: Math.max(...scores) - Math.min(...scores) };
  }).sort((a, b) => b.spread - a.spread);
  const head = make("tr", "", "");
  head.append(...["class", "targets", ...data.models].map(text => make("th", "", text)));
  byId("classes-table").replaceChildren(head, ...classes.map(one => {
    const row = make("tr", "", "");
    row.append(make("td", "", one.name), make("td", "", one.count.toLocaleString("en")),
      ...one.scores.map(score => make("td", "", score.toFixed(4))));
    return row;
  }));
}

function spread(sample) {
  const scores = sample.answers.map(answer => answer.scores[metric]);
  const differ = new Set(sample.answers.map(answer => answer.text)).size > 1;
  return Math.max(...scores) - Math.min(...scores) + (differ ? 1e-9 : 0);
}

// Right, of answers that are right or wrong; else as good as any other model's.
function isGood(sample, model) {
  const scores = sample.answers.map(answer => answer.scores[metric]), one = known(chosen);
  if (one.is_right_or_wrong) return scores[model] === 1;
  return scores[model] === (one.higher_is_better ? Math.max(...scores) : Math.min(...scores));
}

function find() {
  const wanted = byId("search").value.toLowerCase(), [kind, model] = byId("filter").value.split(" ");
  found = chosen.samples.filter(sample => {
    if (kind === "differ" && spread(sample) === 0) return false;
    if (kind === "low" && isGood(sample, Number(model))) return false;
    const texts = [sample.place, sample.prompt, ...sample.references, ...sample.answers.map(answer => answer.text)];
    return !wanted || texts.some(text => text.toLowerCase().includes(wanted));
  });
  if (byId("order").value === "differences") found.sort((a, b) => spread(b) - spread(a) || a.at - b.at);
  at = 0;
  drawSamples();
}

function drawSamples() {
  const last = Math.min(at + PER_PAGE, found.length);
  byId("position").textContent = found.length ? `${at + 1}–${last} of ${found.length}` : "none";
  byId("previous").disabled = at === 0;
  byId("next").disabled = last >= found.length;
  byId("samples").replaceChildren(...found.slice(at, last).map(drawSample));
}

function drawSample(sample) {
  const node = make("article", "sample", ""), answers = make("div", "answers", "");
  node.append(makeSearched("p", "place", sample.place));
  if (sample.prompt) node.append(makeSearched("p", "prompt", sample.prompt));
  for (const reference of sample.references) node.append(makeSearched("p", "reference", reference));
  const tells = known(chosen).is_right_or_wrong || spread(sample) > 1e-6;
  sample.answers.forEach((answer, i) => {
    const box = make("div", "answer" + (tells ? isGood(sample, i) ? " right" : " wrong" : ""), "");
    box.append(make("h3", "", data.models[i]));
    if (!["losses", "pairs"].includes(chosen.kind)) box.append(makeSearched("p", "", answer.text || "(nothing)"));
    const scores = chosen.metrics.map((one, k) =>
      `${one.name.replaceAll("_", " ")} ${Number(answer.scores[k].toFixed(4))}`);
    const note = answer.is_cut ? " · cut at its longest" : answer.is_refused ? " · the prompt is too long" : "";
    box.append(make("small", "", scores.join(" · ") + note));
    answers.append(box);
  });
  node.append(answers);
  return node;
}

function turn(step) {
  const next = at + step * PER_PAGE;
  if (next < 0 || next >= found.length) return;
  at = next;
  drawSamples();
}

byId("sets").append(...data.sets.map(set => {
  const button = make("button", "", set.name);
  button.type = "button";
  button.addEventListener("click", () => choose(set));
  return button;
}));
byId("sets").hidden = data.sets.length < 2;
byId("metric").addEventListener("change", event => {
  metric = Number(event.target.value);
  draw();
});
for (const id of ["filter", "order"]) byId(id).addEventListener("change", find);
byId("search").addEventListener("input", find);
byId("previous").addEventListener("click", () => turn(-1));
byId("next").addEventListener("click", () => turn(1));
addEventListener("keydown", event => {
  if (["INPUT", "SELECT"].includes(event.target.tagName)) return;
  if (event.key === "ArrowLeft") turn(-1);
  else if (event.key === "ArrowRight") turn(1);
  else if (event.key === "/") {
    event.preventDefault();
    byId("search").focus();
  }
});
choose(chosen);

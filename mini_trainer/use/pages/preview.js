const samples = JSON.parse(byId("samples").textContent);
const texts = samples.map(sample => sample.sides.flatMap(side => side.parts.map(part => part[0])).join("").toLowerCase());
let found = samples.map((_, i) => i), at = 0;

// Text is only ever put in as text. Line breaks are made visible, and so is what was searched for.
function fill(node, text, wanted) {
  const lower = text.toLowerCase(), same = lower.length === text.length;
  for (let from = 0; from < text.length;) {
    const hit = wanted && same ? lower.indexOf(wanted, from) : -1;
    const end = hit < 0 ? text.length : hit;
    text.slice(from, end).split("\n").forEach((line, i) => {
      if (i) node.append(make("span", "nl", "↵"), "\n");
      node.append(line);
    });
    if (hit >= 0) node.append(make("mark", "", text.slice(hit, hit + wanted.length)));
    from = hit < 0 ? end : hit + wanted.length;
  }
}

// An image in the place of its tokens: how it looks, what it became, and where it is from.
function makeFigure(text, name, thumbnail, wanted) {
  const figure = make("span", "image", ""), caption = make("span", "caption", "");
  if (thumbnail !== null) {
    const picture = make("img", "", "");
    picture.src = thumbnail;
    picture.alt = text;
    figure.append(picture);
  }
  fill(caption, text, wanted);
  caption.append("\n" + name);
  figure.append(caption);
  return figure;
}

// One sequence of a sample: its parts, or with a title a column of them.
function fillSide(sample, { title, parts }, wanted) {
  const nodes = [];
  let weightBefore = null;
  for (const [text, trained, special, weight, image] of parts) {
    if (image !== null) { nodes.push(makeFigure(text, ...sample.images[image], wanted)); continue; }
    if (trained && weight !== null && weight !== weightBefore) nodes.push(make("span", "w", "×" + weight));
    weightBefore = trained ? weight : null;
    const node = make("span", (trained ? "t" : "") + (special ? " s" : ""), "");
    fill(node, text, wanted);
    nodes.push(node);
  }
  if (!title) return nodes;
  const column = make("section", "", "");
  column.append(make("h3", "", title), ...nodes);
  return [column];
}

function show() {
  const sample = samples[found[at]], box = byId("text"), wanted = byId("search").value.toLowerCase();
  byId("position").textContent = found.length ? `${at + 1} of ${found.length}` : "none";
  byId("previous").disabled = byId("next").disabled = found.length < 2;
  box.replaceChildren();
  byId("place").textContent = sample ? sample.place : "";
  byId("counts").textContent = sample ? sample.summary : "";
  if (!sample) { box.textContent = "Nothing found."; return; }
  box.classList.toggle("sides", sample.sides.length > 1);
  for (const side of sample.sides) box.append(...fillSide(sample, side, wanted));
  const first = box.querySelector("mark");
  box.scrollTop = first ? first.offsetTop - box.offsetTop - 60 : 0;
}

function turn(by) {
  if (!found.length) return;
  at = (at + by + found.length) % found.length;
  show();
}

byId("search").addEventListener("input", event => {
  const wanted = event.target.value.toLowerCase();
  found = samples.map((_, i) => i).filter(i => texts[i].includes(wanted));
  at = 0;
  show();
});
byId("previous").addEventListener("click", () => turn(-1));
byId("next").addEventListener("click", () => turn(1));
addEventListener("keydown", event => {
  if (event.target === byId("search")) { if (event.key === "Enter") turn(1); return; }
  if (event.ctrlKey || event.metaKey || event.altKey) return;
  if (event.key === "ArrowLeft") turn(-1);
  if (event.key === "ArrowRight") turn(1);
  if (event.key === "/") { event.preventDefault(); byId("search").focus(); }
});
show();

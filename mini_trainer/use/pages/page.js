"use strict";
const byId = id => document.getElementById(id);

function make(kind, className, text) {
  const node = document.createElement(kind);
  node.className = className;
  node.textContent = text;
  return node;
}

function makeOption(value, text) {
  const node = make("option", "", text);
  node.value = value;
  return node;
}

// Round numbers from `low` to `high`, about `most` of them, for an axis.
function choosePlaces(low, high, most) {
  const rough = (high - low) / most, size = 10 ** Math.floor(Math.log10(rough));
  const step = [1, 2, 5, 10].map(one => one * size).find(one => one >= rough);
  const first = Math.ceil(low / step - 1e-9), last = Math.floor(high / step + 1e-9);
  return Array.from({ length: last - first + 1 }, (_, i) => Number(((first + i) * step).toPrecision(10)));
}

// Text is only ever put in as text; matches of the search field are marked.
function makeSearched(kind, className, text) {
  const node = make(kind, className, ""), wanted = byId("search").value.toLowerCase(), lower = text.toLowerCase();
  if (!wanted || lower.length !== text.length) {
    node.textContent = text;
    return node;
  }
  for (let from = 0; from < text.length;) {
    const hit = lower.indexOf(wanted, from);
    node.append(text.slice(from, hit < 0 ? text.length : hit));
    if (hit < 0) break;
    node.append(make("mark", "", text.slice(hit, hit + wanted.length)));
    from = hit + wanted.length;
  }
  return node;
}

byId("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = root.dataset.theme || (dark ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
});

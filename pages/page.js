"use strict";
const byId = id => document.getElementById(id);

function make(kind, className, text) {
  const node = document.createElement(kind);
  node.className = className;
  node.textContent = text;
  return node;
}

byId("theme").addEventListener("click", () => {
  const root = document.documentElement, dark = matchMedia("(prefers-color-scheme: dark)").matches;
  const now = root.dataset.theme || (dark ? "dark" : "light");
  root.dataset.theme = now === "dark" ? "light" : "dark";
});

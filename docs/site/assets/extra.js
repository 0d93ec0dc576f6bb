// Code and tables that are wider than the page scroll: this makes them reachable by the keyboard.
function makeFocusable() {
  for (const region of document.querySelectorAll("pre > code, .md-typeset__scrollwrap")) region.tabIndex = 0;
}
makeFocusable();
addEventListener("load", makeFocusable);

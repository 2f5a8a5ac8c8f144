"use strict";
const data = JSON.parse(document.getElementById("data").textContent);
const $ = (id) => document.getElementById(id);
const tip = $("tip");
/** An element with classes and text; text never becomes markup. */
const make = (tag, cls, text) => {
  const e = document.createElement(tag);
  if (cls) e.className = cls;
  if (text !== undefined) e.textContent = text;
  return e;
};
const draw = (parent, tag, attributes, text) => {
  const e = document.createElementNS("http://www.w3.org/2000/svg", tag);
  for (const [k, v] of Object.entries(attributes)) e.setAttribute(k, v);
  if (text !== undefined) e.textContent = text;
  parent.append(e);
  return e;
};
const show = (x) => {
  if (typeof x !== "number") return x === null || x === undefined ? "–" : String(x);
  const a = Math.abs(x);
  if (a !== 0 && (a < 1e-3 || a >= 1e6)) return x.toExponential(2);
  if (Number.isInteger(x)) return x.toLocaleString("en");
  return x.toFixed(a >= 100 ? 1 : a >= 1 ? 3 : 4);
};
/** Round numbers between two ends. */
const ticks = (lo, hi, n) => {
  const raw = (hi - lo) / n, power = 10 ** Math.floor(Math.log10(raw));
  const unit = [1, 2, 5, 10].map((m) => m * power).find((u) => u >= raw);
  const out = [];
  for (let k = Math.ceil(lo / unit - 1e-9); k * unit <= hi + unit * 1e-9; k++) out.push(+(k * unit).toPrecision(12));
  return out;
};
/** A label at an edge stays inside. */
const anchor = (x, w) => x > w - 20 ? "end" : "middle";
const brief = (x, digits = 0) => {
  const a = Math.abs(x);
  if (a >= 1e4) return (x / (a >= 1e6 ? 1e6 : 1e3)).toLocaleString("en", { maximumFractionDigits: 1 }) + (a >= 1e6 ? "M" : "k");
  return a !== 0 && a < 1e-3 ? x.toExponential(digits) : String(x);
};
const duration = (s) => s < 60 ? s.toFixed(1) + " s" : s < 3600 ? `${Math.floor(s / 60)} min ${Math.floor(s % 60)} s` : `${Math.floor(s / 3600)} h ${Math.floor(s % 3600 / 60)} min`;

function float(event, lines) {
  tip.replaceChildren(...lines.map((l) => l instanceof Node ? l : make("div", "", l)));
  tip.hidden = false;
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = Math.max(4, Math.min(event.clientY - 34, innerHeight - tip.offsetHeight - 8)) + "px";
}
/** Names of both axes and the grid of a plot; x and y map values to pixels. */
function axes(svg, plot, xs, ys, names, yText = brief) {
  const apart = (texts) => new Set(texts).size === texts.length && texts;
  const labels = apart(ys.map((t) => yText(t))) || apart(ys.map((t) => brief(t, 1))) || apart(ys.map((t) => brief(t, 2))) ||
    ys.map((t) => String(+t.toPrecision(4)));
  ys.forEach((t, k) => {
    draw(svg, "line", { class: "grid", x1: plot.l, x2: plot.r, y1: plot.y(t), y2: plot.y(t) });
    draw(svg, "text", { x: plot.l - 6, y: plot.y(t) + 3.5, "text-anchor": "end" }, labels[k]);
  });
  for (const t of xs) draw(svg, "text", { x: plot.x(t), y: plot.b + 13, "text-anchor": anchor(plot.x(t), plot.r + 8) }, brief(t));
  draw(svg, "text", { class: "axis x", x: (plot.l + plot.r) / 2, y: plot.b + 27, "text-anchor": "middle" }, names[0]);
  const middle = (plot.t + plot.b) / 2;
  draw(svg, "text", { class: "axis y", x: 10, y: middle, "text-anchor": "middle", transform: `rotate(-90 10 ${middle})` }, names[1]);
}

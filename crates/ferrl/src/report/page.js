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
/** A label at the right edge stays inside. */
const anchor = (x, w) => x > w - 20 ? "end" : "middle";
const brief = (x) => {
  const a = Math.abs(x);
  if (a >= 1e4) return (x / (a >= 1e6 ? 1e6 : 1e3)).toLocaleString("en", { maximumFractionDigits: 1 }) + (a >= 1e6 ? "M" : "k");
  return a !== 0 && a < 1e-3 ? x.toExponential(0) : String(x);
};

/* Curves */
const titles = {
  "reward": "Reward", "loss": "Loss", "entropy": "Entropy", "completions/mean_length": "Completion length",
  "kl": "KL to the reference", "grad_norm": "Gradient norm", "learning_rate": "Learning rate", "reward_std": "Reward spread in a group",
  "rewards/accuracies": "Pairs ranked right", "rewards/margins": "Reward margin",
};
/** Of evaluations, what is judged; the rest is under "more". */
const judged = (n) => n.startsWith("eval/") && !["mean_length", "clipped_ratio", "reward", "lost"].includes(n.slice(5));
const first = (n) => judged(n) ? 1 : ["reward", "loss"].indexOf(n) === 0 ? 0 : Object.keys(titles).indexOf(n) >= 0 ? 2 + Object.keys(titles).indexOf(n) : 99;
const charts = [];
const smoothing = () => Number($("smooth").value);

function chart(parent, name) {
  const values = data.series[name];
  const at = data.steps.map((_, i) => i).filter((i) => values[i] !== null);
  const card = make("div", "chart"), head = make("h3");
  const title = make("span", "", titles[name] || name), now = make("span");
  title.title = name;
  head.append(title, now);
  card.append(head);
  parent.append(card);
  const svg = draw(card, "svg", { role: "img", "aria-label": name });
  const c = { svg, now, name, at, values, pad: { l: 46, r: 8, t: 10, b: 20 } };
  charts.push(c);
  const move = (event) => {
    const box = svg.getBoundingClientRect();
    const step = c.x0 + (event.clientX - box.left - c.pad.l) / (box.width - c.pad.l - c.pad.r) * (c.x1 - c.x0);
    for (const other of charts) point(other, step, other === c ? event : null);
  };
  svg.addEventListener("pointermove", move);
  svg.addEventListener("pointerleave", () => { tip.hidden = true; for (const o of charts) unpoint(o); });
  return c;
}

function smooth(c) {
  const keep = smoothing();
  let mean = 0, weight = 0;
  return c.at.map((i, k) => {
    // Each stage is smoothed by itself.
    if (k && data.stages.some(([s]) => data.steps[c.at[k - 1]] < s && s <= data.steps[i])) mean = weight = 0;
    mean = keep * mean + (1 - keep) * c.values[i];
    weight = keep * weight + (1 - keep);
    return mean / weight;
  });
}

function paint(c) {
  const { svg, pad, at, values } = c, w = svg.clientWidth, h = svg.clientHeight;
  if (!w) return;
  svg.setAttribute("viewBox", `0 0 ${w} ${h}`);
  svg.replaceChildren();
  if (!at.length) { draw(svg, "text", { x: w / 2 - 30, y: h / 2 }, "no numbers"); return; }
  const few = at.length <= 40;
  c.line = few ? at.map((i) => values[i]) : smooth(c);
  c.x0 = data.steps[0];
  c.x1 = Math.max(data.steps[data.steps.length - 1], c.x0 + 1);
  // A few wild steps do not flatten the rest.
  const sorted = at.map((i) => values[i]).sort((a, b) => a - b), q = (p) => sorted[Math.round(p * (sorted.length - 1))];
  let lo = few ? q(0) : Math.min(q(0.01), ...c.line), hi = few ? q(1) : Math.max(q(0.99), ...c.line);
  if (hi - lo < 1e-12 * Math.max(Math.abs(hi), 1e-30)) { const d = Math.abs(hi) * 0.1 || 1; lo -= d; hi += d; }
  const room = (hi - lo) * 0.06;
  lo = lo >= 0 && lo - room < 0 ? 0 : lo - room;
  hi += room;
  const x = (s) => pad.l + (s - c.x0) / (c.x1 - c.x0) * (w - pad.l - pad.r);
  const y = (v) => Math.min(h - pad.b, Math.max(2, h - pad.b - (v - lo) / (hi - lo) * (h - pad.b - pad.t)));
  c.x = x; c.y = y;
  for (const t of ticks(lo, hi, 5)) {
    draw(svg, "line", { class: "grid", x1: pad.l, x2: w - pad.r, y1: y(t), y2: y(t) });
    draw(svg, "text", { x: pad.l - 6, y: y(t) + 3.5, "text-anchor": "end" }, brief(t));
  }
  for (const t of ticks(c.x0, c.x1, 5)) draw(svg, "text", { x: x(t), y: h - 5, "text-anchor": anchor(x(t), w) }, brief(t));
  data.stages.forEach(([step, stage], i) => {
    if (i) draw(svg, "line", { class: "stage", x1: x(step), x2: x(step), y1: pad.t, y2: h - pad.b });
    if (data.stages.length > 1) draw(svg, "text", { x: x(step) + 4, y: pad.t + 2 }, stage);
  });
  const every = Math.max(1, Math.floor(at.length / (2 * w)));
  const path = (list) => list.map((v, k) => [k, v]).filter(([k]) => k % every === 0 || k === list.length - 1)
    .map(([k, v], n) => `${n ? "L" : "M"}${x(data.steps[at[k]]).toFixed(1)} ${y(v).toFixed(1)}`).join("");
  if (!few && smoothing() > 0) draw(svg, "path", { class: "raw", d: path(at.map((i) => values[i])) });
  draw(svg, "path", { class: "curve", d: path(c.line) });
  if (few) at.forEach((i) => draw(svg, "circle", { class: "dot", r: 2.6, cx: x(data.steps[i]), cy: y(values[i]) }));
  unpoint(c);
}

function unpoint(c) {
  if (c.mark) c.mark.remove();
  c.mark = null;
  c.now.textContent = c.line ? show(c.line[c.line.length - 1]) : "";
}

function point(c, step, event) {
  if (!c.line || !c.at.length || !c.svg.clientWidth) return;
  unpoint(c);
  let lo = 0, hi = c.at.length - 1;
  while (lo < hi) { const m = (lo + hi) >> 1; if (data.steps[c.at[m]] < step) lo = m + 1; else hi = m; }
  if (lo > 0 && step - data.steps[c.at[lo - 1]] < data.steps[c.at[lo]] - step) lo--;
  const i = c.at[lo], px = c.x(data.steps[i]);
  c.mark = draw(c.svg, "g", {});
  draw(c.mark, "line", { class: "cursor", x1: px, x2: px, y1: c.pad.t, y2: c.svg.clientHeight - c.pad.b });
  draw(c.mark, "circle", { class: "dot", r: 3.5, cx: px, cy: c.y(c.line[lo]) });
  c.now.textContent = show(c.values[i]);
  if (!event) return;
  const raw = c.values[i], soft = c.line[lo];
  float(event, `step ${data.steps[i]}   ${show(raw)}` + (raw === soft ? "" : `   smoothed ${show(soft)}`) + `   ${(data.seconds[i] / 60).toFixed(1)} min`);
}

function float(event, text) {
  tip.textContent = text;
  tip.hidden = false;
  tip.style.left = Math.max(4, Math.min(event.clientX + 14, innerWidth - tip.offsetWidth - 8)) + "px";
  tip.style.top = event.clientY - 34 + "px";
}

/* Rewards */
function histogram(parent) {
  const n = data.rewards.length, part = Math.max(1, Math.floor(n / 4));
  const groups = [["early", data.rewards.slice(0, part)], ["late", data.rewards.slice(n - part)]].slice(n > 1 ? 0 : 1);
  const all = groups.flatMap(([, g]) => g.flatMap(([, list]) => list));
  if (!all.length) { parent.append(make("p", "empty", "This run has no rollouts.")); return; }
  let lo = Infinity, hi = -Infinity;
  for (const r of all) { lo = Math.min(lo, r); hi = Math.max(hi, r); }
  if (lo === hi) { lo -= 0.5; hi += 0.5; }
  const bins = 24, card = make("div", "chart"), head = make("h3");
  card.style.gridColumn = "1 / -1";
  head.append(make("span", "", "How rewards are spread"), make("span"));
  const key = make("div", "key");
  const counts = groups.map(([cls, g]) => {
    const list = g.flatMap(([, l]) => l), count = Array(bins).fill(0);
    for (const r of list) count[Math.min(bins - 1, Math.floor((r - lo) / (hi - lo) * bins))] += 1 / list.length;
    const span = make("span"), dot = make("i");
    dot.style.background = cls === "early" ? "var(--second)" : "var(--main)";
    span.append(dot, `steps ${g[0][0]} to ${g[g.length - 1][0]} (${list.length.toLocaleString("en")} samples)`);
    key.append(span);
    return [cls, count];
  });
  card.append(head, key);
  parent.append(card);
  const svg = draw(card, "svg", { role: "img", "aria-label": "histogram of rewards" });
  const top = Math.max(...counts.flatMap(([, c]) => c)) * 1.05;
  const c = { paint() {
    const w = svg.clientWidth, h = svg.clientHeight, l = 46, b = 20, x = (v) => l + (v - lo) / (hi - lo) * (w - l - 8);
    svg.setAttribute("viewBox", `0 0 ${w} ${h}`);
    svg.replaceChildren();
    for (const t of ticks(0, top, 5)) {
      const y = h - b - t / top * (h - b - 8);
      draw(svg, "line", { class: "grid", x1: l, x2: w - 8, y1: y, y2: y });
      draw(svg, "text", { x: l - 6, y: y + 3.5, "text-anchor": "end" }, +(t * 100).toFixed(1) + "%");
    }
    for (const t of ticks(lo, hi, 8)) draw(svg, "text", { x: x(t), y: h - 5, "text-anchor": anchor(x(t), w) }, brief(t));
    const width = (w - l - 8) / bins, each = (width - 3) / counts.length;
    counts.forEach(([cls, count], g) => count.forEach((share, i) => {
      const size = share / top * (h - b - 8);
      if (!share) return;
      const bar = draw(svg, "rect", { class: cls, x: l + i * width + 1.5 + g * each, y: h - b - size, width: Math.max(1, each), height: size, rx: 1.5 });
      const from = lo + i / bins * (hi - lo), to = lo + (i + 1) / bins * (hi - lo);
      bar.addEventListener("pointermove", (e) => float(e, `${show(from)} to ${show(to)}   ${(share * 100).toFixed(1)}%`));
      bar.addEventListener("pointerleave", () => { tip.hidden = true; });
    }));
  } };
  return c;
}

/* Curves: one line a group of runs, which is one run or the same recipe with several seeds. */
/** Title and unit of the metrics that are shown first, in this order. */
const known = {
  "reward": ["Reward", "reward"], "rewards/accuracies": ["Pairs ranked right", "fraction"],
  "rewards/margins": ["Reward margin", "margin"], "loss": ["Loss", "loss"], "entropy": ["Entropy", "nats per token"],
  "completions/mean_length": ["Completion length", "tokens"], "completions/clipped_ratio": ["Completions cut at the length limit", "fraction"],
  "reward_std": ["Reward std within a group", "reward"], "frac_reward_zero_std": ["Prompts without learning signal", "fraction"],
  "kl": ["KL to the reference", "nats per token"], "grad_norm": ["Gradient norm", "L2 norm"], "learning_rate": ["Learning rate", "learning rate"],
};
const order = Object.keys(known);
const units = [[/tokens_per_second$/, "tokens/s"], [/^timing\/|_time$/, "seconds"], [/length$|tokens$/, "tokens"], [/ratio|^frac_|pass@|majority@|greedy|accurac|balance/, "fraction"], [/logp|^objective\/kl|kl$|entropy/, "nats"], [/loss$/, "loss"], [/^rewards?\//, "reward"]];
const unit = (n) => known[n] ? known[n][1] : (units.find(([pattern]) => pattern.test(n)) || [0, n.split("/").pop()])[1];
/** Evaluations that judge a run; the others are under "More metrics". */
const judged = (n) => n.startsWith("eval/") && !["mean_length", "clipped_ratio", "reward", "lost"].includes(n.slice(5));
const rank = (n) => n === "reward" ? 0 : judged(n) ? 1 : order.includes(n) ? 2 + order.indexOf(n) : 99;
/** A loss means something else for every algorithm: one chart each. */
const perAlgorithm = (n) => n === "loss" || n === "eval/loss";
/** Of a policy gradient the loss says little: it stands under "More metrics". */
const policyLoss = (name, algorithm) => name === "loss" && data.runs.some((r) => points(r, "reward", algorithm).length);

const colours = ["--main", "--second", "--c3", "--c4", "--c5", "--c6", "--c7", "--c8", "--c9", "--c10"];
const colour = (g) => `var(${colours[g % colours.length]})`;
const hidden = new Set();
const charts = [];
const smoothing = () => Number($("smooth").value);

const axisNames = { step: "step", seconds: "training time (minutes)", tokens: "sampled tokens" };
const axis = () => $("axis").value || "step";
const xs = (run) => axis() === "step" ? run.steps : axis() === "tokens" ? run.tokens : run.seconds.map((s) => s / 60);
const stageAt = (run, step) => run.stages.reduce((found, s) => s[0] <= step ? s : found, run.stages[0]);

/** The points of a metric in a run; `algorithm` leaves the steps of others out. */
function points(run, name, algorithm) {
  const values = run.series[name] || [], x = xs(run), out = [];
  values.forEach((v, i) => {
    if (v === null) return;
    const stage = stageAt(run, run.steps[i]);
    if (algorithm === undefined || (stage[2] || stage[1]) === algorithm) out.push({ x: x[i], v, i, stage: stage[0] });
  });
  return out;
}

/** Exponential moving average without the bias of its start; begins anew with each stage. */
function smooth(list) {
  const keep = smoothing();
  let mean = 0, weight = 0;
  return list.map((p, k) => {
    if (k && p.stage !== list[k - 1].stage) mean = weight = 0;
    mean = keep * mean + (1 - keep) * p.v;
    weight = keep * weight + (1 - keep);
    return { ...p, s: mean / weight };
  });
}

/** Value of a line at a position between its ends. */
function at(list, x) {
  let lo = 0, hi = list.length - 1;
  while (lo < hi) { const m = (lo + hi) >> 1; if (list[m].x < x) lo = m + 1; else hi = m; }
  if (!lo || list[lo].x === x) return list[lo].s;
  const a = list[lo - 1], b = list[lo];
  return a.s + (b.s - a.s) * (x - a.x) / (b.x - a.x);
}

/** The mean over a group's runs at 160 positions that all of them reach, with the lowest and the highest. */
function band(lines) {
  const from = Math.max(...lines.map((l) => l[0].x)), to = Math.min(...lines.map((l) => l[l.length - 1].x));
  const n = Math.min(160, Math.max(...lines.map((l) => l.length)));
  return Array.from({ length: n }, (_, k) => {
    const x = n > 1 ? from + (to - from) * k / (n - 1) : to, all = lines.map((l) => at(l, x));
    const mean = all.reduce((a, b) => a + b, 0) / all.length;
    return { x, v: mean, s: mean, lo: Math.min(...all), hi: Math.max(...all) };
  });
}

const titleOf = (name, algorithm) => policyLoss(name, algorithm) ? "Policy loss" : known[name] ? known[name][0] : name;

function chart(parent, name, algorithm) {
  const card = make("div", "chart"), head = make("h3"), about = data.about[name];
  const title = make("span", "", titleOf(name, algorithm) + (algorithm ? " · " + algorithm : "")), now = make("span");
  title.title = name + (about ? ": " + about : "");
  head.append(title, now);
  card.append(head);
  card.dataset.metric = name + (algorithm ? " " + algorithm : "");
  parent.append(card);
  const svg = draw(card, "svg", { role: "img", "aria-label": `${name}: ${about || ""}` });
  const c = { svg, now, name, algorithm, lines: [] };
  charts.push(c);
  svg.addEventListener("pointermove", (event) => {
    if (!c.plot) return;
    const x = c.x0 + (event.clientX - svg.getBoundingClientRect().left - c.plot.l) / (c.plot.r - c.plot.l) * (c.x1 - c.x0);
    for (const other of charts) point(other, x, other === c ? event : null);
  });
  svg.addEventListener("pointerleave", () => { tip.hidden = true; for (const o of charts) unpoint(o); });
}

/** Lines of a chart: { group, list, raw }, with the values that are drawn in `s`. */
function collect(c) {
  const few = Math.max(0, ...data.runs.map((r) => points(r, c.name, c.algorithm).length)) <= 40;
  c.few = few;
  return data.groups.map((_, group) => {
    if (hidden.has(group)) return null;
    const lines = data.runs.filter((r) => r.group === group).map((r) => points(r, c.name, c.algorithm)).filter((l) => l.length)
      .map((l) => few ? l.map((p) => ({ ...p, s: p.v })) : smooth(l));
    if (!lines.length) return null;
    return { group, list: lines.length > 1 ? band(lines) : lines[0], several: lines.length > 1 };
  }).filter((l) => l && l.list.length);
}

function bounds(c) {
  const raw = c.lines.flatMap((l) => l.list.map((p) => p.v)).sort((a, b) => a - b);
  const q = (p) => raw[Math.round(p * (raw.length - 1))];
  let lo = q(c.few ? 0 : 0.01), hi = q(c.few ? 1 : 0.99); // a few wild steps do not flatten the rest
  for (const p of c.lines.flatMap((l) => l.list)) { lo = Math.min(lo, p.lo ?? p.s); hi = Math.max(hi, p.hi ?? p.s); }
  if (hi - lo < 1e-12 * Math.max(Math.abs(hi), 1e-30)) { const d = Math.abs(hi) * 0.1 || 1; lo = lo === 0 ? 0 : lo - d; hi += d; }
  const room = (hi - lo) * 0.06;
  return [lo >= 0 && lo - room < 0 ? 0 : lo - room, hi + room];
}

function paint(c) {
  const { svg } = c, w = svg.clientWidth, h = svg.clientHeight;
  if (!w) return;
  svg.setAttribute("viewBox", `0 0 ${w} ${h}`);
  svg.replaceChildren();
  c.lines = collect(c);
  c.plot = null;
  if (!c.lines.length) { draw(svg, "text", { x: w / 2, y: h / 2, "text-anchor": "middle" }, "nothing to draw"); unpoint(c); return; }
  const all = c.lines.flatMap((l) => l.list), [lo, hi] = bounds(c);
  c.x0 = Math.min(...all.map((p) => p.x));
  c.x1 = Math.max(...all.map((p) => p.x));
  if (c.x1 <= c.x0) c.x1 = c.x0 + 1;
  const stages = stagesOf(c), plot = { l: 66, r: w - 8, t: stages.length > 1 ? 24 : 8, b: h - 32 };
  plot.x = (v) => plot.l + (v - c.x0) / (c.x1 - c.x0) * (plot.r - plot.l);
  plot.y = (v) => Math.min(plot.b, Math.max(plot.t, plot.b - (v - lo) / (hi - lo) * (plot.b - plot.t)));
  c.plot = plot;
  axes(svg, plot, ticks(c.x0, c.x1, Math.max(2, Math.min(6, w / 65))), ticks(lo, hi, 5), [axisNames[axis()], unit(c.name)]);
  strip(svg, plot, stages);
  c.lines.forEach((l) => line(c, l));
  unpoint(c);
}

/** [from, to, name] of each stage in a chart's range; only of a single run. */
function stagesOf(c) {
  if (data.runs.length > 1) return [];
  const run = data.runs[0], x = xs(run), start = (step) => x[run.steps.findIndex((s) => s >= step)];
  return run.stages.map(([step, name], k) => [start(step), k + 1 < run.stages.length ? start(run.stages[k + 1][0]) : c.x1, name])
    .filter(([from, to]) => to > c.x0 && from < c.x1);
}

/** Stage names in a strip above the plot, so that they never cover data. */
function strip(svg, plot, stages) {
  if (stages.length < 2) return;
  stages.forEach(([from, to, name], k) => {
    const left = Math.max(plot.l, plot.x(from)), right = Math.min(plot.r, plot.x(to)), room = right - left;
    const bar = draw(svg, "rect", { class: k % 2 ? "stage odd" : "stage", x: left, y: 2, width: Math.max(0, room), height: 16 });
    draw(bar, "title", {}, name);
    const most = Math.floor((room - 8) / 6), text = name.length <= most ? name : most > 3 ? name.slice(0, most - 1) + "…" : "";
    if (text) draw(svg, "text", { class: "stage-name", x: left + 4, y: 14 }, text);
    if (k) draw(svg, "line", { class: "border", x1: left, x2: left, y1: 2, y2: plot.b });
  });
}

function line(c, l) {
  const { plot, svg } = c, every = Math.max(1, Math.floor(l.list.length / (2 * (plot.r - plot.l))));
  const part = l.list.filter((_, k) => k % every === 0 || k === l.list.length - 1);
  const path = (value) => part.map((p, n) => `${n ? "L" : "M"}${plot.x(p.x).toFixed(1)} ${plot.y(value(p)).toFixed(1)}`).join("");
  const paint = `stroke:${colour(l.group)}`;
  if (l.several) {
    const edge = (list, value) => list.map((p) => `${plot.x(p.x).toFixed(1)},${plot.y(value(p)).toFixed(1)}`).join(" ");
    draw(svg, "polygon", { class: "band", style: `fill:${colour(l.group)}`, points: edge(part, (p) => p.hi) + " " + edge([...part].reverse(), (p) => p.lo) });
  } else if (!c.few && smoothing() > 0 && c.lines.length <= 3) draw(svg, "path", { class: "raw", style: paint, d: path((p) => p.v) });
  draw(svg, "path", { class: "curve", style: paint, d: path((p) => p.s), "data-group": data.groups[l.group], "data-last": l.list[l.list.length - 1].v });
  if (c.few && l.list.length <= 40 && !l.several) for (const p of l.list) draw(svg, "circle", { class: "dot", style: `fill:${colour(l.group)}`, r: 2.6, cx: plot.x(p.x), cy: plot.y(p.s) });
}

function unpoint(c) {
  if (c.mark) c.mark.remove();
  c.mark = null;
  c.now.textContent = c.lines.length === 1 ? show(c.lines[0].list[c.lines[0].list.length - 1].v) : "";
}

function nearest(list, x) {
  let best = 0;
  list.forEach((p, k) => { if (Math.abs(p.x - x) < Math.abs(list[best].x - x)) best = k; });
  return list[best];
}

function point(c, x, event) {
  unpoint(c);
  if (!c.plot || !c.svg.clientWidth || x < c.x0 - (c.x1 - c.x0) * 0.02 || x > c.x1 * 1.02) return;
  c.mark = draw(c.svg, "g", {});
  const found = c.lines.map((l) => [l, nearest(l.list, x)]), px = c.plot.x(found[0][1].x);
  draw(c.mark, "line", { class: "cursor", x1: px, x2: px, y1: c.plot.t, y2: c.plot.b });
  for (const [l, p] of found) draw(c.mark, "circle", { class: "dot", style: `fill:${colour(l.group)}`, r: 3.5, cx: c.plot.x(p.x), cy: c.plot.y(p.s) });
  const [l, p] = found[0];
  if (c.lines.length === 1) c.now.textContent = show(p.v);
  if (!event) return;
  const where = axis() === "step" ? `step ${show(Math.round(p.x))}` : axis() === "tokens" ? `${brief(Math.round(p.x))} tokens` : `${p.x.toFixed(1)} min`;
  if (data.groups.length === 1) {
    const run = data.runs[0], step = p.i === undefined ? "" : `   ${(run.seconds[p.i] / 60).toFixed(1)} min`;
    float(event, [`${where}   ${show(p.v)}` + (p.v === p.s ? "" : `   smoothed ${show(p.s)}`) + (axis() === "step" ? step : "")]);
    return;
  }
  const rows = found.sort((a, b) => b[1].s - a[1].s).map(([one, q]) => {
    const row = make("div", "tip-row"), dot = make("i");
    dot.style.background = colour(one.group);
    row.append(dot, make("span", "", data.groups[one.group]), make("b", "", show(q.s) + (one.several ? ` (${show(q.lo)}–${show(q.hi)})` : "")));
    return row;
  });
  float(event, [where, ...rows]);
}

/** A switch for each group; with one group there is nothing to tell apart. */
function legend() {
  if (data.groups.length < 2) return;
  data.groups.forEach((name, group) => {
    const count = data.runs.filter((r) => r.group === group).length;
    const button = make("button", "", name + (count > 1 ? ` (${count} seeds)` : "")), dot = make("i");
    button.type = "button";
    dot.style.background = colour(group);
    button.prepend(dot);
    button.setAttribute("aria-pressed", "true");
    button.onclick = () => {
      if (hidden.has(group)) hidden.delete(group); else hidden.add(group);
      button.setAttribute("aria-pressed", String(!hidden.has(group)));
      repaint();
    };
    $("legend").append(button);
  });
  if (data.runs.length > data.groups.length) $("legend").append(make("span", "", "line: mean over seeds; band: lowest to highest seed"));
}

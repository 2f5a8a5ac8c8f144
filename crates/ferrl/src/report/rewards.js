/* Histogram of rewards: first and last quarter of the run. */
function histogram(parent) {
  const n = data.rewards.length, part = Math.max(1, Math.floor(n / 4));
  const groups = [["early", data.rewards.slice(0, part)], ["late", data.rewards.slice(n - part)]].slice(n > 1 ? 0 : 1);
  const all = groups.flatMap(([, g]) => g.flatMap(([, list]) => list));
  if (!all.length) { parent.append(make("p", "empty", "This run has no rewards.")); return null; }
  let lo = Infinity, hi = -Infinity;
  for (const r of all) { lo = Math.min(lo, r); hi = Math.max(hi, r); }
  if (lo === hi) { lo -= 0.5; hi += 0.5; }
  const bins = 24, card = make("div", "chart wide"), head = make("h3");
  head.append(make("span", "", "Distribution of rewards"), make("span"));
  const key = make("div", "key");
  const counts = groups.map(([cls, g]) => {
    const list = g.flatMap(([, l]) => l), count = Array(bins).fill(0);
    for (const r of list) count[Math.min(bins - 1, Math.floor((r - lo) / (hi - lo) * bins))] += 1 / list.length;
    const span = make("span"), dot = make("i");
    dot.style.background = cls === "early" ? "var(--second)" : "var(--main)";
    span.append(dot, `steps ${g[0][0]} to ${g[g.length - 1][0]} (${list.length.toLocaleString("en")} completions)`);
    key.append(span);
    return [cls, count];
  });
  card.append(head, key);
  parent.append(card);
  const svg = draw(card, "svg", { role: "img", "aria-label": "histogram of rewards" });
  const top = Math.max(...counts.flatMap(([, c]) => c)) * 1.05;
  return () => {
    const w = svg.clientWidth, h = svg.clientHeight, plot = { l: 66, r: w - 8, t: 8, b: h - 32 };
    if (!w) return;
    plot.x = (v) => plot.l + (v - lo) / (hi - lo) * (plot.r - plot.l);
    plot.y = (v) => plot.b - v / top * (plot.b - plot.t);
    svg.setAttribute("viewBox", `0 0 ${w} ${h}`);
    svg.replaceChildren();
    axes(svg, plot, ticks(lo, hi, Math.max(2, Math.min(8, w / 80))), ticks(0, top, 5), ["reward", "fraction of completions"], (t) => +(t * 100).toFixed(1) + "%");
    const width = (plot.r - plot.l) / bins, each = (width - 3) / counts.length;
    counts.forEach(([cls, count], g) => count.forEach((fraction, i) => {
      if (!fraction) return;
      const bar = draw(svg, "rect", { class: cls, x: plot.l + i * width + 1.5 + g * each, y: plot.y(fraction), width: Math.max(1, each), height: plot.b - plot.y(fraction), rx: 1.5 });
      const from = lo + i / bins * (hi - lo), to = lo + (i + 1) / bins * (hi - lo);
      bar.addEventListener("pointermove", (e) => float(e, [`${show(from)} to ${show(to)}   ${(fraction * 100).toFixed(1)}%`]));
      bar.addEventListener("pointerleave", () => { tip.hidden = true; });
    }));
  };
}

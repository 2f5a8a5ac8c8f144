/* Rollouts */
const columns = [["step", "Step", "n"], ["reward", "Reward", "n"], ["advantage", "Advantage", "n"], ["tokens", "Tokens", "n"], ["prompt", "Prompt", "text"], ["completion", "Completion", "text"]];
const view = { step: "", sort: "step", down: true, text: "", rows: 40 };
const strongest = Math.max(1e-9, ...data.rollouts.map((r) => Math.abs(r.advantage) || 0));
const tint = (a) => `rgba(var(--${a >= 0 ? "good" : "bad"}), ${(Math.min(1, Math.abs(a) / strongest) * 0.55).toFixed(2)})`;

function controls() {
  const steps = make("select"), sort = make("select"), search = make("input");
  steps.append(new Option("all steps", ""));
  for (const s of new Set(data.rollouts.map((r) => r.step))) steps.append(new Option(`step ${s}`, s));
  for (const [name, text] of [["step:down", "latest first"], ["step:up", "earliest first"], ["reward:down", "highest reward"], ["reward:up", "lowest reward"], ["advantage:down", "highest advantage"], ["advantage:up", "lowest advantage"], ["tokens:down", "longest"], ["tokens:up", "shortest"]])
    sort.append(new Option(text, name));
  search.type = "search";
  search.placeholder = "find in prompt or completion";
  steps.onchange = () => { view.step = steps.value; view.rows = 40; rows(); };
  sort.onchange = () => { const [name, way] = sort.value.split(":"); view.sort = name; view.down = way === "down"; view.rows = 40; rows(); };
  search.oninput = () => { view.text = search.value.toLowerCase(); view.rows = 40; rows(); };
  view.select = sort;
  const note = data.rollout_steps > data.shown_steps ? `${data.shown_steps} of ${data.rollout_steps} steps, evenly chosen` : "";
  $("controls").append(steps, sort, search, make("span", "", note));
}

function rows() {
  const table = $("table");
  const list = data.rollouts.filter((r) => (view.step === "" || r.step === Number(view.step)) &&
    (!view.text || (r.prompt + "\n" + r.completion).toLowerCase().includes(view.text)));
  const key = (r) => typeof r[view.sort] === "string" && !["prompt", "completion"].includes(view.sort) ? -Infinity : r[view.sort];
  list.sort((a, b) => { const x = key(a), y = key(b); return (x < y ? -1 : x > y ? 1 : 0) * (view.down ? -1 : 1); });
  const head = make("tr"), thead = make("thead"), body = make("tbody");
  for (const [name, title, cls] of columns) {
    const th = make("th", cls, title + (view.sort === name ? (view.down ? " ↓" : " ↑") : ""));
    th.onclick = () => { view.down = view.sort === name ? !view.down : true; view.sort = name; view.select.value = `${name}:${view.down ? "down" : "up"}`; rows(); };
    head.append(th);
  }
  thead.append(head);
  for (const r of list.slice(0, view.rows)) {
    const tr = make("tr", "row");
    for (const [name, , cls] of columns) {
      const text = cls === "n" ? (name === "step" ? String(r.step) : name === "reward" ? reward(r) : show(r[name])) : r[name].slice(0, 400).replace(/\s+/g, " ");
      const td = make("td", cls, text + (name === "tokens" && r.truncated ? " ✂" : ""));
      if (name === "tokens" && r.truncated) td.title = "cut off by the length limit";
      if (name === "advantage" && typeof r.advantage === "number") td.style.background = tint(r.advantage);
      if (name === "step" && typeof r.advantage === "number") td.style.borderLeftColor = tint(r.advantage);
      tr.append(td);
    }
    tr.onclick = () => { if (tr.nextSibling && tr.nextSibling.className === "full") tr.nextSibling.remove(); else tr.after(full(r)); };
    body.append(tr);
  }
  table.replaceChildren(thead, body);
  const more = $("more-rows");
  more.className = "empty";
  more.replaceChildren(list.length ? `${Math.min(view.rows, list.length)} of ${list.length} rollouts ` : data.rollouts.length ? "Nothing fits." : "This run has no rollouts.");
  if (list.length > view.rows) {
    const button = make("button", "", "show more");
    button.onclick = () => { view.rows += 80; rows(); };
    more.append(button);
  }
}

const reward = (r) => r.lost ? "lost" : show(r.reward);

function full(r) {
  const tr = make("tr", "full"), td = make("td");
  td.colSpan = columns.length;
  const parts = Object.entries(r.components || {}).map(([n, v]) => `${n} ${show(v)}`).join("   ");
  for (const [title, text] of [["Prompt", r.prompt], ["Completion", r.completion], ["Reward", reward(r) + (parts ? "   =   " + parts : "")]])
    td.append(make("h4", "", title), make("div", "", text));
  tr.append(td);
  return tr;
}

/* All of it */
const names = Object.keys(data.series).sort((a, b) => first(a) - first(b) || (a < b ? -1 : 1));
for (const name of names) chart($(first(name) < 99 ? "main-charts" : "more-charts"), name);
if (!names.length) $("main-charts").append(make("p", "empty", "Nothing has been measured yet."));
if (!$("more-charts").children.length) $("more").hidden = true;
const bars = histogram($("histograms"));
function repaint() {
  $("smooth-value").textContent = smoothing() ? smoothing().toFixed(2) : "off";
  for (const c of charts) paint(c);
  if (bars) bars.paint();
}
$("smooth").oninput = repaint;
$("more").ontoggle = repaint;
addEventListener("resize", repaint);
const root = document.documentElement;
root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
$("theme").onclick = () => { root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark"; };
controls();
rows();
repaint();

/* Tables that sort by their columns: completions of a run, or runs of a comparison. */
const view = { sort: "step", down: true, text: "", step: "", rows: 40 };

/** A table: rows to show, columns [key, title, class], and what a cell or a click on a row does. */
function table(list, columns, cell, click, again) {
  const key = (r) => { const v = r[view.sort]; return v === null || v === undefined ? -Infinity : v; };
  list.sort((a, b) => { const x = key(a), y = key(b); return (x < y ? -1 : x > y ? 1 : 0) * (view.down ? -1 : 1); });
  const head = make("tr"), thead = make("thead"), body = make("tbody");
  for (const [name, title, cls] of columns) {
    const th = make("th", cls, title + (view.sort === name ? (view.down ? " ↓" : " ↑") : ""));
    th.dataset.key = name;
    th.onclick = () => { view.down = view.sort === name ? !view.down : true; view.sort = name; again(); };
    head.append(th);
  }
  thead.append(head);
  for (const r of list.slice(0, view.rows)) {
    const tr = make("tr", "row");
    for (const [name, , cls] of columns) { const td = make("td", cls); cell(td, name, r); tr.append(td); }
    if (click) tr.onclick = () => click(tr, r);
    body.append(tr);
  }
  $("table").replaceChildren(thead, body);
}

function search(placeholder, again) {
  const input = make("input");
  input.type = "search";
  input.placeholder = placeholder;
  input.oninput = () => { view.text = input.value.toLowerCase(); view.rows = 40; again(); };
  return input;
}

/* Completions */
const columns = [["step", "Step", "n"], ["reward", "Reward", "n"], ["advantage", "Advantage", "n"], ["tokens", "Tokens", "n"], ["count", "Count", "n"], ["prompt", "Prompt", "text"], ["completion", "Completion", "text"]];
const tint = (a) => `rgba(var(--${a >= 0 ? "good" : "bad"}), ${(Math.min(1, Math.abs(a) / data.strongest) * 0.55).toFixed(2)})`;
const rewardText = (r) => r.failed ? "failed" : show(r.reward);

function completionControls() {
  data.strongest = data.rollouts.reduce((most, r) => Math.max(most, Math.abs(r.advantage) || 0), 1e-9);
  const steps = make("select"), sort = make("select");
  steps.append(new Option("all steps", ""));
  for (const s of new Set(data.rollouts.map((r) => r.step))) steps.append(new Option(`step ${s}`, s));
  for (const [name, text] of [["step:down", "latest first"], ["step:up", "earliest first"], ["reward:down", "highest reward"], ["reward:up", "lowest reward"], ["advantage:down", "highest advantage"], ["advantage:up", "lowest advantage"], ["tokens:down", "longest"], ["tokens:up", "shortest"], ["count:down", "most frequent"]])
    sort.append(new Option(text, name));
  steps.onchange = () => { view.step = steps.value; view.rows = 40; completions(); };
  sort.onchange = () => { const [name, way] = sort.value.split(":"); view.sort = name; view.down = way === "down"; view.rows = 40; completions(); };
  view.select = sort;
  const note = data.rollout_steps > data.shown_steps ? `${data.shown_steps} of ${data.rollout_steps} steps, evenly chosen` : "";
  $("controls").append(steps, sort, search("find in prompt or completion", completions), make("span", "", note));
}

function completions() {
  view.select.value = `${view.sort}:${view.down ? "down" : "up"}`;
  const list = data.rollouts.filter((r) => (view.step === "" || r.step === Number(view.step)) &&
    (!view.text || (r.prompt + "\n" + r.completion).toLowerCase().includes(view.text)));
  const cell = (td, name, r) => {
    const long = (text) => text.slice(0, 400).replace(/\s+/g, " ");
    td.textContent = name === "step" ? String(r.step) : name === "reward" ? rewardText(r) : name === "count" ? (r.count > 1 ? "×" + r.count : "1")
      : name === "prompt" ? long(r.turns ? r.turns[r.turns.length - 1][1] : r.prompt) : name === "completion" ? long(r.completion) : show(r[name]);
    if (name === "tokens" && r.truncated) { td.append(" ✂"); td.title = "cut off at rollout.max_new_tokens"; }
    if (name === "advantage" && typeof r.advantage === "number") td.style.background = tint(r.advantage);
    if (name === "step" && typeof r.advantage === "number") td.style.borderLeftColor = tint(r.advantage);
  };
  const click = (tr, r) => { if (tr.nextSibling && tr.nextSibling.className === "full") tr.nextSibling.remove(); else tr.after(full(r)); };
  table(list, columns, cell, click, completions);
  const more = $("more-rows");
  more.className = "empty";
  const all = list.reduce((n, r) => n + r.count, 0);
  more.replaceChildren(list.length ? `${Math.min(view.rows, list.length)} of ${list.length} rows (${all.toLocaleString("en")} completions; identical ones of a step share a row) ` : data.rollouts.length ? "No completion matches." : "This run has no completions.");
  if (list.length > view.rows) {
    const button = make("button", "", "show more");
    button.onclick = () => { view.rows += 80; completions(); };
    more.append(button);
  }
}

function full(r) {
  const tr = make("tr", "full"), td = make("td");
  td.colSpan = columns.length;
  const parts = Object.entries(r.components || {}).map(([n, v]) => `${n} ${show(v)}`).join("   ");
  if (r.turns) for (const [role, text] of r.turns) {
    const turn = make("div", "turn " + (role === "user" || role === "assistant" || role === "system" ? role : "other"));
    turn.append(make("h4", "", role), make("div", "", text));
    td.append(turn);
  } else td.append(make("h4", "", "Prompt"), make("div", "", r.prompt));
  for (const [i, [action, observation, reward, advantage]] of (r.episode || []).entries()) {
    const act = make("div", "turn assistant"), seen = make("div", "turn user");
    act.append(make("h4", "", `Turn ${i + 1}: reward ${show(reward)}, advantage ${show(advantage)}`), make("div", "", action));
    seen.append(make("h4", "", "Environment"), make("div", "", observation));
    td.append(act, ...(observation ? [seen] : []));
  }
  const answer = make("div", r.turns ? "turn assistant" : "");
  answer.append(make("h4", "", r.count > 1 ? `Completion, ${r.count} times` : "Completion"), make("div", "", r.completion));
  if (r.lost) td.append(make("h4", "", "Lost"), make("div", "", r.lost));
  td.append(...(r.episode ? [] : [answer]), make("h4", "", "Reward"), make("div", "", rewardText(r) + (parts ? "   =   " + parts : "")));
  tr.append(td);
  return tr;
}

/* Runs of a comparison */
const lastOf = (run, name) => (run.series[name] || []).filter((v) => v !== null).pop();
const tail = (run, name) => {
  const list = (run.series[name] || []).filter((v) => v !== null), n = Math.max(1, Math.floor(list.length / 10));
  return list.length ? list.slice(-n).reduce((a, b) => a + b, 0) / n : undefined;
};
function runTable() {
  const has = (name) => data.runs.some((r) => r.series[name]);
  const evals = [...new Set(data.runs.flatMap((r) => Object.keys(r.series).filter(judged)))].sort().slice(0, 4);
  const main = ["reward", "loss"].filter(has).slice(0, 1);
  const cols = [["name", "Run", "text"], ["algorithm", "Algorithm", "text"], ["seed", "Seed", "n"], ["steps", "Steps", "n"], ["seconds", "Time", "n"], ...(has("completions/total_tokens") ? [["tokens", "Sampled tokens", "n"]] : []),
    ...main.map((n) => [n, known[n][0] + ", last tenth", "n"]), ...evals.map((n) => [n, n, "n"])];
  const rows = data.runs.map((r) => ({
    name: r.name, group: r.group, seed: r.seed, algorithm: [...new Set(r.stages.map((s) => s[2] || s[1]))].join(" → "), steps: r.steps[r.steps.length - 1], seconds: r.seconds[r.seconds.length - 1],
    tokens: r.tokens ? r.tokens[r.tokens.length - 1] : undefined, ...Object.fromEntries(main.map((n) => [n, tail(r, n)])), ...Object.fromEntries(evals.map((n) => [n, lastOf(r, n)])),
  }));
  const cell = (td, name, r) => {
    if (name === "name") { const dot = make("i", "mark"); dot.style.background = colour(r.group); td.append(dot); }
    td.append(name === "seconds" ? (r.seconds === undefined ? "–" : duration(r.seconds)) : name === "tokens" ? (r.tokens === undefined ? "–" : brief(r.tokens)) : show(r[name]));
  };
  view.sort = "";
  view.down = false;
  const again = () => {
    const list = rows.filter((r) => !view.text || (r.name + " " + r.algorithm).toLowerCase().includes(view.text));
    view.rows = list.length;
    table(list, cols, cell, null, again);
    $("more-rows").className = "empty";
    $("more-rows").textContent = `${list.length} of ${rows.length} runs`;
  };
  $("controls").append(search("find a run or an algorithm", again));
  again();
}

function differences() {
  const head = make("tr"), body = make("tbody"), thead = make("thead");
  head.append(make("th", "text", "Key"), ...data.groups.map((g) => make("th", "text", g)));
  thead.append(head);
  for (const [key, values] of data.differences) {
    const tr = make("tr");
    tr.append(make("td", "text", key), ...values.map((v) => make("td", "text", v === null ? "–" : typeof v === "string" ? v : JSON.stringify(v))));
    body.append(tr);
  }
  if (!data.differences.length) { const tr = make("tr"); tr.append(make("td", "empty", "None: these runs are the same recipe, but for the seed.")); body.append(tr); }
  $("keys").append(thead, body);
}

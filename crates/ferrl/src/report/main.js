/* All of it */
const names = [...new Set(data.runs.flatMap((r) => Object.keys(r.series)))].sort((a, b) => rank(a) - rank(b) || (a < b ? -1 : 1));
for (const name of names) {
  const home = (algorithm) => $(rank(name) < 99 && !policyLoss(name, algorithm) ? "main-charts" : "more-charts");
  const algorithms = new Set(data.runs.flatMap((r) => points(r, name).map((p) => stageAt(r, r.steps[p.i])).map((s) => s[2] || s[1])));
  if (perAlgorithm(name) && algorithms.size > 1 && data.runs.every((r) => r.stages.length > 1)) for (const a of algorithms) chart(home(a), name, a);
  else chart(home(), name);
}
if (!names.length) $("main-charts").append(make("p", "empty", "Nothing has been measured yet."));
if (!$("more-charts").children.length) $("more").hidden = true;
for (const [name, title] of [["step", "steps"], ["seconds", "training time"], ["tokens", "sampled tokens"]])
  if (name !== "tokens" || data.runs.every((r) => r.tokens)) $("axis").append(new Option(title, name));
legend();
const bars = data.rewards ? histogram($("histograms")) : null;
function repaint() {
  for (const c of charts) paint(c);
  const few = charts.every((c) => c.few);
  $("smooth").disabled = few;
  $("smooth").title = few ? "charts of up to 40 points are not smoothed" : "";
  $("smooth-value").textContent = !few && smoothing() ? smoothing().toFixed(2) : "off";
  if (bars) bars();
}
$("smooth").oninput = repaint;
$("axis").onchange = repaint;
$("more").ontoggle = repaint;
addEventListener("resize", repaint);
const root = document.documentElement;
root.dataset.theme = matchMedia("(prefers-color-scheme: dark)").matches ? "dark" : "light";
$("theme").onclick = () => { root.dataset.theme = root.dataset.theme === "dark" ? "light" : "dark"; };
/* A run that samples nothing has neither rewards nor completions to show. */
if (data.rollouts && !data.rollouts.length) for (const id of ["rewards", "rollouts"]) {
  $(id).hidden = true;
  document.querySelector(`nav a[href="#${id}"]`).hidden = true;
}
if (data.rollouts) { completionControls(); completions(); }
else { runTable(); differences(); }
repaint();

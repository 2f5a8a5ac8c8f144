// Runs inside a page that the test writes: loads each report into frames of several widths, uses it as a reader would, and
// leaves a JSON list of what went wrong in the element "result".
"use strict";
const wrong = [], seen = [];
let place = "";
const check = (ok, what) => { seen.push(what); if (!ok) wrong.push(`${place}: ${what}`); };
const near = (a, b, tolerance) => Math.abs(a - b) <= tolerance;
/** Goes before all scripts of a page: notes what fails, and says which theme the system prefers. */
const watch = (dark) => `<script>
window.matchMedia = (query) => ({ matches: query === "(prefers-color-scheme: dark)" && ${dark} });
window.faults = [];
addEventListener("error", (e) => faults.push("error: " + e.message));
addEventListener("unhandledrejection", (e) => faults.push("rejected: " + e.reason));
document.addEventListener("securitypolicyviolation", (e) => faults.push("outside request: " + e.blockedURI + " " + e.violatedDirective));
for (const level of ["error", "warn"]) { const old = console[level]; console[level] = (...a) => { faults.push("console: " + a.join(" ")); old(...a); }; }
<\/script>`;

function load(html, width, dark) {
  return new Promise((done) => {
    const frame = document.createElement("iframe");
    frame.style.cssText = `width:${width}px;height:900px;border:0`;
    frame.onload = () => done(frame);
    frame.srcdoc = html.replace("<head>", "<head>" + watch(dark));
    document.body.append(frame);
  });
}

const texts = (doc, selector) => [...doc.querySelectorAll(selector)].map((e) => e.textContent);
const fire = (element, value, kind) => { element.value = value; element.dispatchEvent(new Event(kind)); };

/** Nothing sticks out: neither of the page nor of a chart. */
function layout(doc, width) {
  const root = doc.documentElement;
  check(doc.defaultView.innerWidth === width, `the frame is ${width} wide`);
  check(root.scrollWidth <= root.clientWidth, `no horizontal scrolling, ${root.scrollWidth} > ${root.clientWidth}`);
  for (const svg of doc.querySelectorAll(".chart svg")) {
    const box = svg.getBoundingClientRect();
    if (!box.width) continue;
    const name = svg.getAttribute("aria-label").slice(0, 40);
    for (const text of svg.querySelectorAll("text")) {
      const t = text.getBoundingClientRect();
      check(t.left >= box.left - 2 && t.right <= box.right + 2 && t.top >= box.top - 2 && t.bottom <= box.bottom + 2, `${name}: "${text.textContent}" is inside its chart`);
    }
    const names = [...svg.querySelectorAll(".stage-name")], curves = [...svg.querySelectorAll(".curve")];
    const top = Math.min(...curves.map((c) => c.getBoundingClientRect().top));
    for (const stage of names) check(stage.getBoundingClientRect().bottom <= top + 3, `${name}: the stage name lies over data`);
    if (curves.length) check(texts(svg, ".axis.x").join("") !== "" && texts(svg, ".axis.y").join("") !== "", `${name}: both axes are named`);
  }
}

/** Text can be read: WCAG contrast of at least 4.5 on what is behind it. */
function contrast(doc) {
  const channels = (c) => c.match(/[\d.]+/g).slice(0, 3).map(Number).map((v) => v / 255).map((v) => v <= 0.03928 ? v / 12.92 : ((v + 0.055) / 1.055) ** 2.4);
  const light = (c) => { const [r, g, b] = channels(c); return 0.2126 * r + 0.7152 * g + 0.0722 * b; };
  const style = (e) => doc.defaultView.getComputedStyle(e);
  const ground = light(style(doc.querySelector(".chart")).backgroundColor);
  for (const [what, property] of [["body", "color"], [".chart svg text", "fill"], [".control", "color"], ["nav a", "color"]]) {
    const ink = light(style(doc.querySelector(what))[property]), ratio = (Math.max(ink, ground) + 0.05) / (Math.min(ink, ground) + 0.05);
    check(ratio >= 4.5, `${what} has contrast ${ratio.toFixed(2)}`);
  }
  return ground;
}

/** The value at the end of a curve, read off the picture: pixels against the labels of the grid. */
function drawn(svg, curve) {
  const [x, y] = curve.getAttribute("d").match(/([\d.]+) ([\d.]+)$/).slice(1).map(Number);
  const lines = [...svg.querySelectorAll("line.grid")], labels = [...svg.querySelectorAll("text")].slice(0, lines.length);
  const at = lines.map((l, i) => [Number(l.getAttribute("y1")), Number(labels[i].textContent)]);
  const [[y0, v0], [y1, v1]] = [at[0], at[at.length - 1]];
  return { value: v0 + (y - y0) / (y1 - y0) * (v1 - v0), pixel: Math.abs((v1 - v0) / (y1 - y0)), x };
}

function lastValues(doc, expected) {
  fire(doc.getElementById("smooth"), "0", "input");
  for (const [metric, value] of Object.entries(expected)) {
    const card = doc.querySelector(`.chart[data-metric="${metric}"]`);
    check(card, `a chart of ${metric}`);
    if (!card) continue;
    const curve = card.querySelector(".curve"), end = drawn(card.querySelector("svg"), curve);
    check(Number(curve.dataset.last) === value, `${metric} ends at ${value}, not at ${curve.dataset.last}`);
    check(near(end.value, value, 1.5 * end.pixel), `${metric} is drawn to end at ${end.value}, not at ${value}`);
    const label = card.querySelector("h3 span:last-child").textContent.replace(/,/g, "");
    check(near(Number(label), value, Math.abs(value) * 1e-3 + 1e-4), `${metric} is labelled ${label}, not ${value}`);
  }
}

const cells = (doc, n) => texts(doc, `#table tr.row td:nth-child(${n})`);
function ordered(doc, key, column, read) {
  const numbers = () => cells(doc, column).map(read);
  const click = () => doc.querySelector(`#table th[data-key="${key}"]`).click();
  click();
  check(numbers().every((v, i, all) => !i || all[i - 1] >= v), `${key} sorts downwards`);
  click();
  check(numbers().every((v, i, all) => !i || all[i - 1] <= v) && numbers().length > 1, `${key} sorts upwards`);
}

/** An episode opens as its turns, each with its reward and advantage and what the environment said to it. */
function showEpisode(doc, search, expected) {
  fire(search, expected.find, "input");
  const row = doc.querySelector("#table tr.row");
  row.click();
  const turns = [...doc.querySelectorAll("tr.full .turn")].map((t) => [t.querySelector("h4").textContent, t.querySelector("div").textContent]);
  check(JSON.stringify(turns) === JSON.stringify(expected.turns), `the turns of an episode: ${JSON.stringify(turns)}`);
  const headings = texts(doc, "tr.full h4"), reward = doc.querySelector("tr.full td").lastElementChild.textContent;
  check(headings.includes("Prompt") && !headings.includes("Completion"), `an episode is not shown twice: ${headings}`);
  check(reward === expected.total, `an episode earned ${expected.total}, not ${reward}`);
  row.click();
}

function useReport(doc, expected) {
  lastValues(doc, expected.last);
  check(doc.querySelector(".warnings li").compareDocumentPosition(doc.getElementById("curves")) & Node.DOCUMENT_POSITION_FOLLOWING, "warnings stand above the curves");
  check(!doc.querySelector('.chart[data-metric="loss"]') && doc.querySelector('#main-charts .chart[data-metric="loss sft"]') && doc.querySelector('#more-charts .chart[data-metric="loss grpo"]'), "the losses of SFT and of RL are two charts");
  check(texts(doc, ".stage-name").includes("imitate"), "a stage is named");
  ordered(doc, "reward", 2, (t) => t === "failed" ? -Infinity : Number(t));
  ordered(doc, "tokens", 4, (t) => Number(t.replace(" ✂", "")));
  const search = doc.querySelector('#controls input[type="search"]');
  fire(search, "no such text", "input");
  check(cells(doc, 1).length === 0 && doc.getElementById("more-rows").textContent === "No completion matches.", "a search without a match");
  fire(search, expected.find, "input");
  check(cells(doc, 7).length > 0 && cells(doc, 7).every((t) => t.includes(expected.find)), "a search shows what matches");
  showEpisode(doc, search, expected.episode);
  fire(search, "", "input");
  check(cells(doc, 5).includes("×" + expected.identical), `identical completions are folded: ${cells(doc, 5).slice(0, 9)}`);
  const row = doc.querySelector("#table tr.row");
  row.click();
  check(texts(doc, "tr.full .turn h4").slice(0, 2).join() === "system,user", "a chat prompt is shown as turns");
  check(doc.querySelector("tr.full").getBoundingClientRect().height > 60, "a row opens");
  row.click();
  check(!doc.querySelector("tr.full"), "a row closes");
  doc.getElementById("more").open = true;
}

function useComparison(doc, expected) {
  const groups = expected.groups, curves = () => doc.querySelectorAll('.chart[data-metric="reward"] .curve');
  check(texts(doc, "#legend button").join() === groups.join(), `the legend names ${texts(doc, "#legend button")}`);
  check(curves().length === groups.length && doc.querySelector('.chart[data-metric="reward"] .band'), "one line a group, and a band over seeds");
  for (const [group, value] of Object.entries(expected.last)) {
    fire(doc.getElementById("smooth"), "0", "input");
    const curve = [...curves()].find((c) => c.dataset.group === group);
    check(near(Number(curve.dataset.last), value, 1e-4), `${group} ends at ${curve.dataset.last}, not at ${value}`);
  }
  doc.querySelector("#legend button").click();
  check(curves().length === groups.length - 1, "a group can be hidden");
  doc.querySelector("#legend button").click();
  fire(doc.getElementById("axis"), "tokens", "change");
  check(texts(doc, '.chart[data-metric="reward"] .axis.x').join() === "sampled tokens", "the x axis can be sampled tokens");
  fire(doc.getElementById("axis"), "seconds", "change");
  check(texts(doc, '.chart[data-metric="reward"] .axis.x').join() === "training time (minutes)", "the x axis can be time");
  ordered(doc, "reward", cells(doc, 1).length && [...doc.querySelectorAll("#table th")].findIndex((t) => t.dataset.key === "reward") + 1, Number);
  fire(doc.querySelector('#controls input[type="search"]'), expected.find, "input");
  check(cells(doc, 1).length === expected.found, `a search finds ${expected.found} runs, not ${cells(doc, 1).length}`);
  check(texts(doc, "#keys td:first-child").includes(expected.key), `${expected.key} is listed as different`);
}

async function main(pages, dark) {
  for (const page of pages) {
    for (const width of [360, 480, 768, 1024, 1280, 1600]) {
      place = `${page.name} at ${width} px`;
      const frame = await load(page.html, width, dark), doc = frame.contentDocument, inside = frame.contentWindow;
      layout(doc, width);
      check(inside.document.documentElement.dataset.theme === (dark ? "dark" : "light"), "the theme follows the system");
      const ground = contrast(doc);
      check(dark ? ground < 0.2 : ground > 0.8, `the ground is ${dark ? "dark" : "light"}`);
      if (page.use && (width === 360 || width === 1280)) {
        (page.use === "report" ? useReport : useComparison)(doc, page.expected);
        layout(doc, width);
        doc.getElementById("theme").click();
        check(inside.document.documentElement.dataset.theme === (dark ? "light" : "dark"), "the theme can be changed");
        contrast(doc);
      }
      const requests = inside.performance.getEntriesByType("resource").map((r) => r.name);
      check(requests.length === 0, `requests: ${requests}`);
      check(inside.faults.length === 0, inside.faults.join("; "));
      frame.remove();
    }
  }
}
const input = JSON.parse(document.getElementById("input").textContent);
main(input.pages, input.dark).catch((e) => wrong.push(`${place}: ${e.stack}`)).then(() => {
  document.getElementById("input").remove();
  document.getElementById("result").textContent = JSON.stringify({ wrong: [...new Set(wrong)], checks: seen.length });
});

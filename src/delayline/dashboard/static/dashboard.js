"use strict";
document.documentElement.classList.add("js");

// A select that chooses what to show does so at once.
for (const form of document.querySelectorAll("form[data-autosubmit]")) {
  form.addEventListener("change", () => form.requestSubmit());
}

// The box in a table's head ticks all of its rows.
for (const box of document.querySelectorAll("input[data-checks]")) {
  box.addEventListener("change", () => {
    for (const one of document.querySelectorAll(`input[type=checkbox][name="${box.dataset.checks}"]`)) one.checked = box.checked;
  });
}

// Live parts: a button pauses them; a lost connection shows.
let paused = false;
const pause = document.getElementById("pause");
const state = document.getElementById("live-state");
if (pause) {
  pause.addEventListener("click", () => {
    paused = !paused;
    pause.setAttribute("aria-pressed", String(paused));
    if (state) state.textContent = paused ? "paused" : "live";
  });
}
document.addEventListener("htmx:sse:before:message", (event) => { if (paused) event.detail.cancelled = true; });
document.addEventListener("htmx:sse:after:connection", () => { if (state && !paused) state.textContent = "live"; });
for (const name of ["htmx:sse:error", "htmx:sse:close"]) {
  document.addEventListener(name, () => { if (state) state.textContent = "not connected; trying again"; });
}

// Rates as lines, since the page was opened. The figures come with each update of the live part.
const MOST_POINTS = 600;
const charts = new Map();
function color(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
function size(place) { return { width: place.clientWidth, height: 150 }; }
function chart(place, points) {
  const soft = color("--soft"), grid = { stroke: color("--line"), width: 1 };
  const axis = { stroke: soft, grid, ticks: grid, font: "11px system-ui" };
  return new uPlot({
    ...size(place), cursor: { y: false },
    scales: { y: { range: (_, low, high) => [0, Math.max(high * 1.1, 1)] } },
    tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "UTC"),
    axes: [{ ...axis, space: 90, values: (_, ticks) => ticks.map((one) => new Date(one * 1000).toISOString().slice(11, 19)) }, { ...axis, size: 46 }],
    series: [{ label: "UTC", value: (_, one) => one == null ? "–" : new Date(one * 1000).toISOString().slice(11, 19) },
      { label: "dispatched/s", stroke: color("--s1"), width: 2, points: { show: false } },
      { label: "handled/s", stroke: color("--s0"), width: 2, fill: color("--s0") + "22", points: { show: false } },
      { label: "failed/s", stroke: color("--bad"), width: 2, dash: [5, 3], points: { show: false } }],
  }, points, place);
}
function draw() {
  for (const source of document.querySelectorAll("data[data-chart]")) {
    const place = document.getElementById(source.dataset.chart);
    if (!place || !window.uPlot) continue;
    const known = charts.get(place.id) || { points: [[], [], [], []], chart: null };
    charts.set(place.id, known);
    const values = source.value.split(" ").map(Number), times = known.points[0];
    if (times.at(-1) === values[0]) continue;
    known.points.forEach((column, place) => { column.push(values[place]); if (column.length > MOST_POINTS) column.shift(); });
    if (times.length < 2) continue;
    place.hidden = false;
    if (known.chart) known.chart.setData(known.points); else known.chart = chart(place, known.points);
  }
}
draw();
document.addEventListener("htmx:sse:after:message", draw);
addEventListener("resize", () => {
  for (const [id, one] of charts) if (one.chart) one.chart.setSize(size(document.getElementById(id)));
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const [id, one] of charts) if (one.chart) { one.chart.destroy(); one.chart = chart(document.getElementById(id), one.points); }
});

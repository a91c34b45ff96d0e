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

// What was opened or closed stays so, when the page is updated and when it is loaded again.
const remembered = new WeakSet();
function kept(key, value) {
  try { return value ? localStorage.setItem(key, value) : localStorage.getItem(key); } catch { return null; } // a browser may refuse it
}
function remember() {
  for (const details of document.querySelectorAll("details[data-kept]")) {
    if (remembered.has(details)) continue;
    remembered.add(details);
    const was = kept(details.dataset.kept);
    if (was) details.open = was === "open";
    details.addEventListener("toggle", () => { kept(details.dataset.kept, details.open ? "open" : "closed"); draw(); });
  }
}

// The rows of a list are one stop of the Tab key: arrow keys go from row to row. An update keeps the row.
const reached = new WeakMap();
function rowsOf(table) {
  const controls = "a, button, summary, input:not([type=hidden])";
  return [...table.tBodies[0].rows].map((row) => [...row.querySelectorAll(controls)]).filter((row) => row.length);
}
function reach(table, rows, place) {
  const at = Math.min(Math.max(place, 0), rows.length - 1);
  reached.set(table, at);
  rows.forEach((controls, row) => controls.forEach((control) => { control.tabIndex = row === at ? 0 : -1; }));
}
function rove() {
  for (const table of document.querySelectorAll("table[data-rows]")) {
    const known = reached.has(table), rows = rowsOf(table);
    reach(table, rows, reached.get(table) || 0);
    if (known) continue;
    table.addEventListener("focusin", (event) => {
      const rows = rowsOf(table), at = rows.findIndex((controls) => controls.includes(event.target));
      if (at >= 0) reach(table, rows, at);
    });
    table.addEventListener("keydown", (event) => {
      const rows = rowsOf(table), at = rows.findIndex((controls) => controls.includes(event.target));
      const to = { ArrowDown: at + 1, ArrowUp: at - 1, Home: 0, End: rows.length - 1 }[event.key];
      if (at < 0 || to === undefined || !rows[to]) return;
      event.preventDefault();
      rows[to][Math.min(rows[at].indexOf(event.target), rows[to].length - 1)].focus();
    });
  }
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

// Rates as lines: the minutes of a day are there from the start, and each update of the live part brings the last ones.
const MINUTES = 1440;
const charts = new Map();
function color(name) { return getComputedStyle(document.documentElement).getPropertyValue(name).trim(); }
function size(place) { return { width: place.clientWidth, height: 150 }; }
function clock(seconds) { return new Date(seconds * 1000).toISOString().slice(11, 16); }
function chart(place, values) {
  const soft = color("--soft"), grid = { stroke: color("--line"), width: 1 };
  const axis = { stroke: soft, grid, ticks: grid, font: "11px system-ui" };
  const points = { show: (drawn) => drawn.data[0].length < 60 };
  const rate = (_, value) => value == null ? "–" : String(Number(value.toPrecision(3)));
  return new uPlot({
    ...size(place), cursor: { y: false },
    scales: { y: { range: (_, low, high) => [0, Math.max(high * 1.1, 1)] } },
    tzDate: (seconds) => uPlot.tzDate(new Date(seconds * 1000), "UTC"),
    axes: [{ ...axis, space: 60, values: (_, ticks) => ticks.map(clock) }, { ...axis, size: 46 }],
    series: [{ label: "UTC", value: (_, seconds) => seconds == null ? "–" : clock(seconds) },
      { label: "dispatched/s", value: rate, stroke: color("--s1"), width: 2, points },
      { label: "handled/s", value: rate, stroke: color("--s0"), width: 2, fill: color("--s0") + "22", points },
      { label: "failed/s", value: rate, stroke: color("--bad"), width: 2, dash: [5, 3], points }],
  }, values, place);
}
function draw() {
  for (const source of document.querySelectorAll("data[data-chart]")) {
    const place = document.getElementById(source.dataset.chart);
    if (!place || !window.uPlot) continue;
    const known = charts.get(place.id) || { minutes: new Map(), chart: null };
    charts.set(place.id, known);
    const [first, ...lines] = JSON.parse(source.value);
    lines[0].forEach((_, offset) => known.minutes.set(first + offset, lines.map((line) => line[offset])));
    if (!source.closest("[hx-sse\\:connect]")) source.remove();
  }
  for (const [id, known] of charts) show(document.getElementById(id), known);
}
function show(place, known) {
  const latest = Math.max(...known.minutes.keys()), times = [], columns = [[], [], []];
  for (const minute of known.minutes.keys()) if (minute <= latest - MINUTES) known.minutes.delete(minute);
  for (let minute = Math.min(...known.minutes.keys()); minute <= latest; minute++) {
    const counts = known.minutes.get(minute) || [null, null, null];
    if (counts[0] == null && !times.length) continue; // it begins with the first minute that is known
    times.push(minute * 60);
    columns.forEach((column, line) => column.push(counts[line] == null ? null : counts[line] / 60));
  }
  known.points = [times, ...columns];
  place.hidden = !times.length;
  if (place.hidden || !place.clientWidth) return;
  if (known.chart) known.chart.setData(known.points); else known.chart = chart(place, known.points);
}
function renew() { remember(); rove(); draw(); }
renew();
document.addEventListener("htmx:sse:after:message", renew);
addEventListener("resize", () => {
  for (const [id, one] of charts) if (one.chart) one.chart.setSize(size(document.getElementById(id)));
});
matchMedia("(prefers-color-scheme: dark)").addEventListener("change", () => {
  for (const [id, one] of charts) if (one.chart) { one.chart.destroy(); one.chart = chart(document.getElementById(id), one.points); }
});

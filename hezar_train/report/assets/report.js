// Draws the curves and answers to mouse, touch and keys. Everything it shows comes from the JSON beside it, as text.
"use strict";
(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const view = { axis: "step", smoothing: 0, log: false, range: null, cursor: null, hidden: new Set(), paper: null };
  const PAPER = { width: 330, height: 190 };  // what half a printed page holds
  const charts = [...document.querySelectorAll(".plot")].map((plot) => makeChart(plot, data.panels[plot.dataset.panel]));
  if (!charts.length) return;
  document.documentElement.classList.add("js");  // without it the plots take no room

  function makeChart(plot, panel) {
    const figure = plot.closest("figure");
    const entries = [...figure.querySelectorAll(".legend li")];
    panel.lines.forEach((line, number) => {
      line.isSmoothable = panel.smooth && line.y.length >= 20;
      line.look = entries[number].querySelector(".key").className.replace("key", "").trim();
    });
    return { plot, panel, figure, entries, at: figure.querySelector(".at"), outputs: entries.map((e) => e.querySelector("output")) };
  }

  // --- numbers and words

  const positions = (line) => {
    if (view.axis === "time") return line.t;
    if (view.axis === "step") return line.x;
    const length = data.runs[line.run].stepsInEpoch || 1;
    return line.epochs || (line.epochs = line.x.map((step) => step / length));
  };

  function shown(value) {
    if (value === null || value === undefined) return "–";
    const size = Math.abs(value);
    if (size !== 0 && (size < 1e-3 || size >= 1e6)) return value.toExponential(2).replace(/\.?0+e\+?/, "e").replace("e+", "e");
    return String(Number(value.toPrecision(4)));
  }

  function place(value, step) {
    if (view.axis === "time") return clock(value, step);
    return Number(value.toPrecision(6)).toLocaleString("en-US", { maximumFractionDigits: 2 });
  }

  function clock(seconds, step = 1) {
    const two = (number) => String(Math.floor(number)).padStart(2, "0");
    if (step < 1) return `${Number(seconds.toFixed(2))} s`;
    if (seconds < 3600) return `${Math.floor(seconds / 60)}:${two(seconds % 60)}`;
    return `${Math.floor(seconds / 3600)}:${two((seconds % 3600) / 60)}:${two(seconds % 60)}`;
  }

  function whereabouts(position) {
    if (view.axis === "time") return `after ${clock(position, 1)}`;
    return `${view.axis} ${place(position)}`;
  }

  const roundSteps = (rough, factors) => {
    const power = 10 ** Math.floor(Math.log10(rough));
    return factors.find((factor) => factor * power >= rough * (1 - 1e-9)) * power;
  };

  function stepOfAxis(rough) {
    if (view.axis !== "time" || rough < 1) return Math.max(roundSteps(rough, [1, 2, 5, 10]), view.axis === "step" ? 1 : 0);
    const nice = [1, 2, 5, 10, 15, 30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
    return nice.find((one) => one >= rough) || Math.ceil(rough / 86400) * 86400;
  }

  function multiples(low, high, step) {
    const found = [];
    for (let n = Math.ceil(low / step - 1e-9); n <= Math.floor(high / step + 1e-9); n++) found.push(Number((n * step).toPrecision(12)));
    return found;
  }

  // The numbers of an axis, all in one notation: plain ones, unless those are long and powers of ten are not.
  function tickWords(ticks) {
    const longest = (words) => Math.max(0, ...words.map((one) => one.replace("-", "").length));
    const exact = ticks.map((tick) => Number(tick.toPrecision(12)));
    const plain = exact.map(String);
    const powers = exact.map((tick) => (tick ? tick.toExponential().replace("e+", "e") : "0"));
    const isPlain = !plain.some((one) => one.includes("e")) && longest(plain) <= Math.max(7, longest(powers));
    return isPlain ? plain : powers;
  }

  // A mean that forgets; uneven distances between points count for what they are.
  function smoothed(line) {
    if (!view.smoothing || !line.isSmoothable) return line.y;
    if (line.smoothedBy === view.smoothing) return line.smooth;
    const typical = (line.x[line.x.length - 1] - line.x[0]) / (line.x.length - 1) || 1;
    let sum = 0, weight = 0, before = line.x[0];
    line.smooth = line.y.map((value, number) => {
      if (value === null) return null;
      const kept = view.smoothing ** Math.min(50, (line.x[number] - before) / typical);
      before = line.x[number];
      sum = sum * kept + value;
      weight = weight * kept + 1;
      return sum / weight;
    });
    line.smoothedBy = view.smoothing;
    return line.smooth;
  }

  function nearest(xs, position) {
    let low = 0, high = xs.length - 1;
    while (high - low > 1) {
      const middle = (low + high) >> 1;
      if (xs[middle] < position) low = middle; else high = middle;
    }
    return Math.abs(xs[low] - position) <= Math.abs(xs[high] - position) ? low : high;
  }

  // --- ranges

  const linesOf = (chart) => chart.panel.lines.filter((line) => !view.hidden.has(line.run) && line.x.length);

  function wholeRange() {
    let low = Infinity, high = -Infinity;
    for (const chart of charts) for (const line of linesOf(chart)) {
      const xs = positions(line);
      low = Math.min(low, xs[0]);
      high = Math.max(high, xs[xs.length - 1]);
    }
    if (!(low < high)) return [Number.isFinite(low) ? low - 1 : 0, Number.isFinite(low) ? low + 1 : 1];
    return [Math.min(0, low), high];
  }

  const rangeNow = () => view.range || wholeRange();

  function valueRange(lines, [first, last], fromZero) {
    let low = Infinity, high = -Infinity;
    const take = (value) => {
      if (value === null || value === undefined || (view.log && value <= 0)) return;
      low = Math.min(low, value);
      high = Math.max(high, value);
    };
    for (const line of lines) {
      const xs = positions(line), ys = smoothed(line);
      for (let n = 0; n < xs.length; n++) {
        if (xs[n] < first || xs[n] > last) continue;
        take(ys[n]);
        if (line.lo) { take(line.lo[n]); take(line.hi[n]); }
      }
    }
    if (low > high) return view.log ? [0.1, 1] : [0, 1];
    if (fromZero && !view.log) low = Math.min(0, low);
    if (high - low <= Math.max(Math.abs(low), Math.abs(high)) * 1e-12) return view.log ? [low / 2, low * 2] : [low - (Math.abs(low) || 1) / 2, high + (Math.abs(high) || 1) / 2];
    return [low, high];
  }

  function valueAxis(lines, range, most, fromZero) {
    let [low, high] = valueRange(lines, range, fromZero);
    if (view.log) {
      const [from, to] = [Math.log10(low), Math.log10(high)];
      const pad = (to - from) * 0.05;
      const ticks = [];
      const factors = to - from < 1.5 ? [1, 2, 3, 5, 7] : to - from < 3 ? [1, 3] : [1];
      const leap = Math.max(1, Math.ceil((to - from) / most));
      for (let power = Math.floor(from - pad); power <= to + pad; power++) {
        if (power % leap) continue;
        for (const factor of factors) ticks.push(factor * 10 ** power);
      }
      const ends = [from - pad, to + pad];
      const inside = ticks.filter((one) => Math.log10(one) >= ends[0] && Math.log10(one) <= ends[1]);
      const even = multiples(low, high, roundSteps((high - low) / Math.max(1, most - 2), [1, 2, 2.5, 5, 10]));
      return { ends, of: Math.log10, ticks: inside.length < 3 ? even : inside };  // less than a decade looks even
    }
    const step = roundSteps((high - low) / Math.max(1, most - 2), [1, 2, 2.5, 5, 10]);
    low = Math.floor(low / step + 1e-9) * step;
    high = Math.ceil(high / step - 1e-9) * step;
    return { ends: [low, high], of: (value) => value, ticks: multiples(low, high, step) };
  }

  // --- drawing

  const SVG = "http://www.w3.org/2000/svg";

  function add(parent, name, attributes, text) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) made.setAttribute(key, value);
    if (text !== undefined) made.textContent = text;
    parent.append(made);
    return made;
  }

  const sizeOf = (plot) => (view.paper && plot.clientWidth ? view.paper : { width: plot.clientWidth, height: plot.clientHeight });

  function draw(chart, left) {
    const { plot, axis } = chart, lines = linesOf(chart), range = rangeNow();
    const { width, height } = sizeOf(plot);
    if (!width) return;  // folded away
    const box = { left, right: width - 10, top: 8, bottom: height - 24 };
    const toX = (position) => box.left + (position - range[0]) / (range[1] - range[0]) * (box.right - box.left);
    const toY = (value) => box.bottom - (axis.of(value) - axis.ends[0]) / (axis.ends[1] - axis.ends[0]) * (box.bottom - box.top);
    Object.assign(chart, { box, toX, toY, range });
    const svg = document.createElementNS(SVG, "svg");
    svg.setAttribute("viewBox", `0 0 ${width} ${height}`);
    svg.setAttribute("aria-hidden", "true");
    drawGrid(svg, chart);
    const clip = `clip-${plot.dataset.panel}`;
    add(add(svg, "clipPath", { id: clip }), "rect", { x: box.left, y: box.top - 1, width: box.right - box.left, height: box.bottom - box.top + 2 });
    const ink = add(svg, "g", { "clip-path": `url(#${clip})` });
    drawResumes(ink, chart);
    for (const line of lines) drawLine(ink, line, chart);
    for (const line of lines) drawPoints(add(svg, "g", { class: line.look }), line, chart);
    for (const line of lines) if (line.ring) drawRing(add(svg, "g", { class: line.look }), line, chart);  // over all else
    chart.overlay = add(svg, "g", {});
    plot.replaceChildren(svg);
    chart.entries.forEach((entry, number) => entry.classList.toggle("off", view.hidden.has(chart.panel.lines[number].run)));
  }

  function drawGrid(svg, { box, toX, toY, range, axis }) {
    axis.ticks.forEach((tick, number) => {
      const y = toY(tick);
      add(svg, "line", { class: "grid", x1: box.left, x2: box.right, y1: y, y2: y });
      add(svg, "text", { x: box.left - 7, y: y + 4, "text-anchor": "end" }, axis.words[number]);
    });
    const step = stepOfAxis((range[1] - range[0]) / Math.max(2, Math.floor((box.right - box.left) / 80)));
    for (const tick of multiples(range[0], range[1], step)) {
      const x = toX(tick), anchor = x > box.right - 16 ? "end" : "middle";
      add(svg, "line", { class: "grid", x1: x, x2: x, y1: box.bottom, y2: box.bottom + 4 });
      add(svg, "text", { x, y: box.bottom + 17, "text-anchor": anchor }, place(tick, step));
    }
  }

  function drawResumes(ink, { box, toX }) {
    if (data.runs.length > 1 || view.axis === "time") return;
    const length = view.axis === "epoch" ? data.runs[0].stepsInEpoch || 1 : 1;
    for (const step of data.runs[0].resumes) {
      const mark = add(ink, "line", { class: "resume", x1: toX(step / length), x2: toX(step / length), y1: box.top, y2: box.bottom });
      add(mark, "title", {}, `resumed at step ${step}`);
    }
  }

  function pathOf(xs, ys, { toX, toY, range }) {
    let path = "", isDown = false;
    for (let n = 0; n < xs.length; n++) {
      const isOut = (xs[n + 1] < range[0]) || (xs[n - 1] > range[1]);
      if (ys[n] === null || (view.log && ys[n] <= 0) || isOut) { isDown = false; continue; }
      path += `${isDown ? "L" : "M"}${toX(xs[n]).toFixed(1)} ${toY(ys[n]).toFixed(1)}`;
      isDown = true;
    }
    return path;
  }

  function drawLine(ink, line, chart) {
    const xs = positions(line), ys = smoothed(line);
    const group = add(ink, "g", { class: line.look });
    if (line.lo && ys === line.y) drawBand(group, xs, line, chart);
    if (ys !== line.y) add(group, "path", { class: "curve raw", d: pathOf(xs, line.y, chart) });
    add(group, "path", { class: "curve", d: pathOf(xs, ys, chart) });
  }

  const bestOf = (line) => (line.ring ? line.x.indexOf(data.runs[line.run].best) : -1);
  const canBeDrawn = (value) => value !== null && !(view.log && value <= 0);

  // Points are whole at the edges of the plot, so nothing clips them: those outside are left out.
  function drawPoints(group, line, { toX, toY, box, range }) {
    const xs = positions(line), ys = smoothed(line), best = bestOf(line);
    const seen = xs.map((_, n) => n).filter((n) => xs[n] >= range[0] && xs[n] <= range[1]);
    for (const n of seen) {
      if (line.y[n] === null) drawBroken(group, toX(xs[n]), box.bottom, line.x[n]);
      else if (seen.length <= 40 && n !== best && canBeDrawn(ys[n])) add(group, "circle", { class: "point", cx: toX(xs[n]), cy: toY(ys[n]), r: 2.4 });
    }
  }

  function drawRing(group, line, { toX, toY, range }) {
    const best = bestOf(line), x = positions(line)[best], value = smoothed(line)[best];
    if (best < 0 || x < range[0] || x > range[1] || !canBeDrawn(value)) return;
    add(add(group, "circle", { class: "best", cx: toX(x), cy: toY(value), r: 4.2 }), "title", {}, "best checkpoint");
  }

  function drawBand(group, xs, line, chart) {
    const known = xs.map((_, n) => n).filter((n) => line.lo[n] !== null && line.hi[n] !== null && !(view.log && line.lo[n] <= 0));
    if (known.length < 2) return;
    const edge = (ys) => (n) => `${chart.toX(xs[n]).toFixed(1)} ${chart.toY(ys[n]).toFixed(1)}`;
    const upper = known.map(edge(line.hi)), lower = known.reverse().map(edge(line.lo));
    add(group, "path", { class: "band", d: `M${[...upper, ...lower].join("L")}Z` });
  }

  function drawBroken(group, x, bottom, step) {
    const d = `M${x - 3.5} ${bottom - 9}l7 7m0 -7l-7 7`;
    add(add(group, "path", { class: "broken", d }), "title", {}, `not finite at step ${step}`);
  }

  // All charts leave the same room for numbers, so that steps are above each other.
  function drawAll() {
    const range = rangeNow();
    for (const chart of charts) {
      chart.axis = valueAxis(linesOf(chart), range, Math.max(3, Math.round(sizeOf(chart.plot).height / 42)), chart.panel.zero);
      chart.axis.words = tickWords(chart.axis.ticks);
    }
    const longest = Math.max(3, ...charts.flatMap((chart) => (chart.plot.clientWidth ? chart.axis.words.map((one) => one.length) : [])));
    for (const chart of charts) draw(chart, 12 + 6.6 * longest);
    showCursor();
  }

  // --- the cursor: one for all charts

  function showCursor() {
    for (const chart of charts) {
      if (!chart.overlay) continue;
      chart.overlay.replaceChildren();
      const { box, toX, toY, range } = chart;
      const isSeen = view.cursor !== null && view.cursor >= range[0] && view.cursor <= range[1];
      chart.at.textContent = isSeen ? whereabouts(view.cursor) : "last value";
      if (isSeen) add(chart.overlay, "line", { class: "hair", x1: toX(view.cursor), x2: toX(view.cursor), y1: box.top, y2: box.bottom });
      chart.panel.lines.forEach((line, number) => {
        const ys = smoothed(line), xs = positions(line);
        let n = ys.length - 1;
        if (isSeen) n = nearest(xs, view.cursor);
        else while (n > 0 && ys[n] === null) n--;
        chart.outputs[number].textContent = shown(ys[n]);
        if (!isSeen || view.hidden.has(line.run) || ys[n] === null || (view.log && ys[n] <= 0)) return;
        add(add(chart.overlay, "g", { class: line.look }), "circle", { class: "point", cx: toX(xs[n]), cy: toY(ys[n]), r: 4 });
      });
      if (chart.drag) {
        const [from, to] = [toX(chart.drag.from), toX(chart.drag.to)].sort((a, b) => a - b);
        add(chart.overlay, "rect", { class: "selection", x: from, width: to - from, y: box.top, height: box.bottom - box.top });
      }
    }
  }

  let isAsked = false;
  function askForCursor() {
    if (isAsked) return;
    isAsked = true;
    requestAnimationFrame(() => { isAsked = false; showCursor(); });
  }

  // The hair snaps to the point of this chart that is nearest to the pointer.
  function snapped(chart, position) {
    let best = null;
    for (const line of linesOf(chart)) {
      const xs = positions(line), found = xs[nearest(xs, position)];
      if (best === null || Math.abs(found - position) < Math.abs(best - position)) best = found;
    }
    return best;
  }

  function positionOf(chart, event) {
    const { box, range, plot } = chart;
    const x = event.clientX - plot.getBoundingClientRect().left;
    const share = (x - box.left) / (box.right - box.left);
    return range[0] + Math.min(1, Math.max(0, share)) * (range[1] - range[0]);
  }

  function zoomTo(range) {
    const [first, last] = wholeRange();
    if (range) {
      const low = Math.max(first, range[0]), high = Math.min(last, range[1]);
      view.range = high - low > (last - first) * 1e-4 && (low > first || high < last) ? [low, high] : null;
    } else view.range = null;
    drawAll();
  }

  function zoomBy(factor) {
    const [low, high] = rangeNow(), middle = view.cursor !== null && view.cursor >= low && view.cursor <= high ? view.cursor : (low + high) / 2;
    zoomTo([middle - (middle - low) * factor, middle + (high - middle) * factor]);
  }

  function moveBy(chart, points) {
    const all = [...new Set(linesOf(chart).flatMap((line) => positions(line)))].sort((a, b) => a - b);
    const seen = all.filter((one) => one >= chart.range[0] && one <= chart.range[1]);
    if (!seen.length) return;
    const now = view.cursor === null ? (points > 0 ? -1 : seen.length) : nearest(seen, view.cursor);
    view.cursor = seen[Math.min(seen.length - 1, Math.max(0, now + points))];
    showCursor();
    speak(chart);
  }

  const voice = document.createElement("p");
  voice.className = "skip";
  voice.setAttribute("aria-live", "polite");
  document.body.append(voice);
  function speak(chart) {
    const values = chart.entries.map((entry, number) => `${entry.querySelector("span").textContent} ${chart.outputs[number].textContent}`);
    voice.textContent = `${chart.at.textContent}: ${values.join(", ")}`;
  }

  const keys = {
    ArrowLeft: (chart, event) => moveBy(chart, event.shiftKey ? -10 : -1),
    ArrowRight: (chart, event) => moveBy(chart, event.shiftKey ? 10 : 1),
    Home: (chart) => moveBy(chart, -Infinity),
    End: (chart) => moveBy(chart, Infinity),
    "+": () => zoomBy(0.5),
    "=": () => zoomBy(0.5),
    "-": () => zoomBy(2),
    Escape: () => { view.cursor = null; zoomTo(null); },
  };

  for (const chart of charts) {
    const { plot } = chart;
    plot.addEventListener("pointerdown", (event) => {
      if (event.button !== 0 || !chart.range) return;
      const position = positionOf(chart, event);
      if (event.pointerType === "touch") { // a finger looks; what it drags is the page, or the hair
        view.cursor = snapped(chart, position);
        askForCursor();
        return;
      }
      chart.drag = { from: position, to: position, x: event.clientX };
      plot.setPointerCapture(event.pointerId);
    });
    plot.addEventListener("pointermove", (event) => {
      if (!chart.range) return;
      const position = positionOf(chart, event);
      if (chart.drag) chart.drag.to = position;
      view.cursor = snapped(chart, position);
      askForCursor();
    });
    plot.addEventListener("pointerup", (event) => {
      const drag = chart.drag;
      chart.drag = null;
      if (drag && Math.abs(event.clientX - drag.x) > 5) zoomTo([drag.from, drag.to].sort((a, b) => a - b));
      else askForCursor();
    });
    plot.addEventListener("pointercancel", () => { chart.drag = null; askForCursor(); });
    plot.addEventListener("pointerleave", (event) => {
      if (event.pointerType !== "touch") { view.cursor = null; askForCursor(); }
    });
    plot.addEventListener("dblclick", () => zoomTo(null));
    plot.addEventListener("keydown", (event) => {
      if (!keys[event.key] || !chart.range || event.ctrlKey || event.metaKey || event.altKey) return;
      event.preventDefault();
      keys[event.key](chart, event);
    });
  }

  // --- the controls

  const control = (id) => document.getElementById(id);
  control("axis").addEventListener("change", (event) => { view.axis = event.target.value; view.cursor = null; zoomTo(null); });
  control("smoothing").addEventListener("input", (event) => {
    view.smoothing = Number(event.target.value);
    event.target.parentElement.querySelector("output").textContent = view.smoothing ? view.smoothing.toFixed(2) : "off";
    drawAll();
  });
  control("log-scale").addEventListener("change", (event) => { view.log = event.target.checked; drawAll(); });
  control("zoom-in").addEventListener("click", () => zoomBy(0.5));
  control("zoom-out").addEventListener("click", () => zoomBy(2));
  control("zoom-reset").addEventListener("click", () => zoomTo(null));
  for (const box of document.querySelectorAll("[data-run]")) {
    box.addEventListener("change", () => {
      view.hidden[box.checked ? "delete" : "add"](Number(box.dataset.run));
      zoomTo(null);
    });
  }
  // A form keeps its state over a reload, the drawing does not.
  control("axis").value = "step";
  control("smoothing").value = "0";
  control("log-scale").checked = false;
  document.querySelectorAll("[data-run]").forEach((box) => { box.checked = true; });

  for (const folded of document.querySelectorAll("details")) folded.addEventListener("toggle", drawAll);
  let lastWidth = 0;
  new ResizeObserver(() => {
    const width = charts[0].plot.clientWidth;
    if (width !== lastWidth) { lastWidth = width; drawAll(); }
  }).observe(charts[0].plot);
  let opened = [];  // for the paper alone
  window.addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("article > details:not([open])")];
    opened.forEach((one) => { one.open = true; });
    view.paper = PAPER;
    drawAll();
  });
  window.addEventListener("afterprint", () => {
    opened.forEach((one) => { one.open = false; });
    view.paper = null;
    drawAll();
  });
  drawAll();
})();

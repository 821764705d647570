// Line charts in SVG. All charts of the page share `state`: axis, zoom, crosshair, hidden runs.

const SVG_NAMESPACE = document.getElementById("svg").namespaceURI;
const DASHES = ["", "7 4", "2 3", "11 3 2 3", "5 2", "1 2"];
const NUM_COLORS = 6;
const MARGIN = { top: 10, right: 14, bottom: 24 };
const MAX_TABLE_ROWS = 200;

const state = { axis: "step", window: 0, domain: null, hover: null, hidden: new Set() };
const charts = [];

function svgElement(tag, attributes, ...children) {
  const node = document.createElementNS(SVG_NAMESPACE, tag);
  for (const [name, value] of Object.entries(attributes)) node.setAttribute(name, value);
  node.append(...children);
  return node;
}

function element(tag, attributes, ...children) {
  const node = document.createElement(tag);
  for (const [name, value] of Object.entries(attributes)) {
    if (name in node && name !== "list") node[name] = value;
    else node.setAttribute(name, value);
  }
  node.append(...children);
  return node;
}

function strokeOf(index) {
  return { stroke: `var(--run${index % NUM_COLORS})`, "stroke-dasharray": DASHES[(index + Math.floor(index / NUM_COLORS)) % DASHES.length] };
}

function lineSample(index) {
  const line = svgElement("line", { x1: 0, y1: 5, x2: 22, y2: 5, "stroke-width": 2.5, ...strokeOf(index) });
  return svgElement("svg", { width: 22, height: 10, "aria-hidden": "true" }, line);
}

// A chart: title, note, format, lines, and options
//   lines: [{name, run, color, x, mean, min, max, hasPoints}]; run and color are indices
//   wide, canSmooth, isLog (undefined: no choice), fromZero, canClip, markers: [{x, kind, run, text}]
class LineChart {
  constructor(parent, options) {
    Object.assign(this, { markers: [], ...options });
    this.isFull = false;
    this.width = 0;
    this.buttons = element("span", { className: "buttons" });
    this.noteNode = element("p", { className: "note" });
    this.svg = svgElement("svg", { tabindex: 0, role: "group", "aria-roledescription": "chart" });
    this.tooltip = element("div", { className: "tooltip", hidden: true, role: "status" });
    const caption = element("figcaption", {}, element("h3", { textContent: this.title }), this.buttons);
    this.figure = element("figure", { className: this.wide ? "wide" : "" }, caption, this.noteNode);
    if (this.legend) this.figure.append(this.makeLegend());
    this.figure.append(this.svg, this.tooltip, this.makeTable());
    parent.append(this.figure);
    this.addButtons();
    this.addEvents();
    new ResizeObserver(() => {
      const width = this.innerWidth();
      if (width !== this.width) this.draw();
    }).observe(this.figure);
  }

  innerWidth() {
    const style = getComputedStyle(this.figure);
    return Math.max(200, Math.floor(this.figure.clientWidth - parseFloat(style.paddingLeft) - parseFloat(style.paddingRight)));
  }

  makeLegend() {
    const items = this.lines.map((line) => element("li", {}, lineSample(line.color), line.name));
    return element("ul", { className: "legend" }, ...items);
  }

  addButtons() {
    if (this.isLog !== undefined) {
      const button = element("button", { type: "button", textContent: "log", title: "Logarithmic scale" });
      button.setAttribute("aria-pressed", this.isLog);
      button.addEventListener("click", () => {
        this.isLog = !this.isLog;
        button.setAttribute("aria-pressed", this.isLog);
        this.draw();
      });
      this.buttons.append(button);
    }
    this.fullButton = element("button", { type: "button", textContent: "all values", hidden: true });
    this.fullButton.setAttribute("aria-pressed", "false");
    this.fullButton.addEventListener("click", () => {
      this.isFull = !this.isFull;
      this.fullButton.setAttribute("aria-pressed", this.isFull);
      this.draw();
    });
    this.buttons.append(this.fullButton);
  }

  visibleLines() {
    return this.lines.filter((line) => !state.hidden.has(line.run));
  }

  // Values to draw: [{line, xs, raw, main}], in which main is the average if there is one
  collect() {
    return this.visibleLines().map((line) => {
      const isSmooth = this.canSmooth && state.window > 1 && !line.hasPoints;
      const main = isSmooth ? average(line.x.step, line.mean, state.window) : line.mean;
      return { line, xs: line.x[state.axis], raw: line.mean, main, isSmooth };
    });
  }

  xDomain() {
    if (state.domain) return state.domain;
    let low = Infinity;
    let high = -Infinity;
    for (const chart of charts) {
      for (const line of chart.visibleLines()) {
        for (const x of [line.x[state.axis][0], line.x[state.axis].at(-1)]) {
          if (x !== null && x !== undefined) { low = Math.min(low, x); high = Math.max(high, x); }
        }
      }
    }
    if (low > high) return [0, 1];
    return low === high ? [Math.max(0, low - 1), high + 1] : [low, high];
  }

  yDomain(drawn, [left, right]) {
    const values = [];
    for (const { line, xs, raw, main } of drawn) {
      for (let i = 0; i < xs.length; i++) {
        if (xs[i] === null || xs[i] < left || xs[i] > right) continue;
        for (const value of [raw[i], main[i], line.min && line.min[i], line.max && line.max[i]]) {
          if (value !== null && value !== undefined && (!this.isLog || value > 0)) values.push(value);
        }
      }
    }
    values.sort((a, b) => a - b);
    this.numOutside = 0;
    if (!values.length) return this.isLog ? [0.1, 1] : [0, 1];
    let low = values[0];
    let high = values.at(-1);
    if (this.canClip && values.length > 20) {
      const typical = values[Math.floor(0.98 * (values.length - 1))];
      const least = values[Math.floor(0.02 * (values.length - 1))];
      const limit = this.isLog ? typical * 30 : typical + this.canClip * (typical - (this.fromZero ? Math.min(0, least) : least));
      if (high > limit && limit > low) {
        this.numOutside = values.filter((value) => value > limit).length;
        if (!this.isFull) high = values.filter((value) => value <= limit).at(-1);
      }
    }
    if (this.isLog) return low === high ? [low / 2, high * 2] : [low / (high / low) ** 0.03, high * (high / low) ** 0.03];
    if (this.fromZero) low = Math.min(0, low);
    if (low === high) {
      const margin = Math.abs(low) * 0.1 || this.leastRange || 1;
      return this.fromZero && low === 0 ? [0, margin] : [low - margin, high + margin];
    }
    const margin = (high - low) * 0.04;
    return [this.fromZero && low === 0 ? 0 : low - margin, high + margin];
  }

  draw() {
    const drawn = this.collect();
    this.width = this.innerWidth();
    this.height = this.wide ? Math.max(240, Math.min(340, this.width * 0.5)) : 220;
    const [left, right] = this.xDomain();
    const [low, high] = this.yDomain(drawn, [left, right]);
    const numTicks = this.wide ? 6 : 4;
    const { ticks, step } = this.isLog ? logTicks(low, high, numTicks) : niceTicks(low, high, numTicks);
    const format = this.isLog && this.format === FORMATS.number ? FORMATS.small : this.format;
    const labels = ticks.map((tick) => format.tick(tick, step));
    this.left = Math.max(48, Math.ceil(Math.max(0, ...labels.map(textWidth))) + 10);
    const bottom = this.height - MARGIN.bottom;
    const innerWidth = this.width - this.left - MARGIN.right;
    this.toX = (x) => this.left + ((x - left) / (right - left)) * innerWidth;
    this.fromX = (pixel) => left + ((pixel - this.left) / innerWidth) * (right - left);
    const scale = this.isLog ? (y) => Math.log(Math.max(y, low)) : (y) => y;
    const [bottomValue, topValue] = [scale(low), scale(high)];
    this.toY = (y) => bottom - ((scale(y) - bottomValue) / (topValue - bottomValue)) * (bottom - MARGIN.top);
    this.drawn = drawn;

    this.svg.replaceChildren();
    this.svg.setAttribute("viewBox", `0 0 ${this.width} ${this.height}`);
    const clipId = `clip-${this.id}`;
    const clip = svgElement("rect", { x: this.left, y: MARGIN.top - 6, width: innerWidth + 6, height: bottom - MARGIN.top + 8 });
    this.svg.append(svgElement("defs", {}, svgElement("clipPath", { id: clipId }, clip)));
    ticks.forEach((tick, i) => {
      const y = this.toY(tick);
      this.svg.append(svgElement("line", { class: "gridline", x1: this.left, x2: this.width - MARGIN.right, y1: y, y2: y }));
      this.svg.append(svgElement("text", { x: this.left - 8, y: y + 4, "text-anchor": "end" }, labels[i]));
    });
    this.drawXAxis(left, right, bottom);
    const plot = svgElement("g", { "clip-path": `url(#${clipId})` });
    this.svg.append(plot);
    for (const { line, xs } of drawn) if (line.min) plot.append(this.band(line, xs));
    for (const item of drawn) if (item.isSmooth && !item.line.min) plot.append(this.path(item, item.raw, { opacity: Math.max(0.1, 0.45 / Math.sqrt(drawn.length)), "stroke-width": 1.1 }));
    drawn.forEach((item, i) => {
      const isDense = !item.isSmooth && item.xs.length > innerWidth / 3 && !this.isSteady;
      const width = isDense ? 1.2 : i === 0 && drawn.length > 1 ? 2.8 : 1.9;
      plot.append(this.path(item, item.main, { "stroke-width": width }));
    });
    this.drawMarkers(plot, bottom, [left, right]);
    this.cursor = svgElement("g", {});
    this.svg.append(this.cursor);
    this.updateText(drawn, low, high);
    this.drawHover();
  }

  drawXAxis(left, right, bottom) {
    const axis = AXES[state.axis];
    const count = Math.max(3, Math.floor((this.width - this.left) / 80));
    let { ticks, step } = (state.axis === "time" ? niceSeconds : niceTicks)(left, right, count);
    if (state.axis === "step") ticks = ticks.filter(Number.isInteger);
    this.svg.append(svgElement("line", { class: "axis", x1: this.left, x2: this.width - MARGIN.right, y1: bottom, y2: bottom }));
    this.svg.append(svgElement("text", { x: 0, y: bottom + 18 }, axis.title));
    let end = textWidth(axis.title);
    for (const tick of ticks) {
      const x = this.toX(tick);
      const label = state.axis === "step" && Math.abs(tick) < 1e5 ? FORMATS.count.full(tick) : axis.format.tick(tick, step);
      const halfWidth = textWidth(label) / 2;
      const place = Math.min(x, this.width - halfWidth);
      this.svg.append(svgElement("line", { class: "axis", x1: x, x2: x, y1: bottom, y2: bottom + 4 }));
      if (place - halfWidth < end + 6) continue;
      end = place + halfWidth;
      this.svg.append(svgElement("text", { x: place, y: bottom + 18, "text-anchor": "middle" }, label));
    }
  }

  path({ line, xs }, values, attributes) {
    const stroke = { fill: "none", "stroke-linejoin": "round", ...strokeOf(line.color), ...attributes };
    const group = svgElement("g", {});
    let text = "";
    let isOpen = false;
    for (let i = 0; i < xs.length; i++) {
      if (values[i] === null || xs[i] === null) { isOpen = false; continue; }
      const point = `${this.toX(xs[i]).toFixed(1)} ${this.toY(values[i]).toFixed(1)}`;
      const hasNext = i + 1 < xs.length && values[i + 1] !== null;
      if (line.hasPoints || (!isOpen && !hasNext)) {
        const [x, y] = point.split(" ");
        group.append(svgElement("circle", { cx: x, cy: y, r: line.hasPoints ? 3.2 : 2.6, fill: stroke.stroke }));
      }
      text += `${isOpen ? "L" : "M"}${point}`;
      isOpen = true;
    }
    group.append(svgElement("path", { ...stroke, d: text }));
    return group;
  }

  band(line, xs) {
    const top = [];
    const bottom = [];
    for (let i = 0; i < xs.length; i++) {
      if (line.min[i] === null || xs[i] === null) continue;
      const x = this.toX(xs[i]).toFixed(1);
      top.push(`${x} ${this.toY(line.max[i]).toFixed(1)}`);
      bottom.push(`${x} ${this.toY(line.min[i]).toFixed(1)}`);
    }
    const fill = `var(--run${line.color % NUM_COLORS})`;
    if (!top.length) return svgElement("g", {});
    return svgElement("path", { d: `M${top.join("L")}L${bottom.reverse().join("L")}Z`, fill, opacity: 0.22 });
  }

  drawMarkers(plot, bottom, [left, right]) {
    for (const { x, kind, run, text } of this.markers) {
      const place = x[state.axis];
      if (state.hidden.has(run) || place === null || place < left || place > right) continue;
      const px = this.toX(place);
      const node = kind === "restart"
        ? svgElement("line", { class: "restart", x1: px, x2: px, y1: MARGIN.top - 4, y2: bottom })
        : svgElement("path", { class: "nonfinite", d: `M${px - 4} ${bottom - 12}l8 8m0 -8l-8 8` });
      node.append(svgElement("title", {}, text));
      plot.append(node);
    }
  }

  updateText(drawn, low, high) {
    this.fullButton.hidden = !this.numOutside;
    const parts = [this.note];
    if (this.numOutside && !this.isFull) {
      parts.push(`${this.numOutside} ${this.numOutside === 1 ? "value" : "values"} above the range.`);
    }
    for (const [kind, text] of [["restart", "Dashed vertical lines are restarts."], ["nonfinite", "Crosses are steps that were not finite."]]) {
      if (this.markers.some((marker) => marker.kind === kind && !state.hidden.has(marker.run))) parts.push(text);
    }
    const hasZero = drawn.some(({ raw }) => raw.some((value) => value === 0));
    if (this.isLog && hasZero) parts.push("Zeros are drawn at the bottom.");
    this.noteNode.textContent = parts.filter(Boolean).join(" ");
    const names = drawn.map(({ line }) => line.name).join(", ");
    const format = this.format.full;
    this.svg.setAttribute("aria-label", `${this.title} of ${names}, from ${format(low)} to ${format(high)}. The arrow keys read values.`);
  }

  // Pointer, keyboard

  addEvents() {
    this.svg.addEventListener("pointermove", (event) => {
      if (this.dragStart !== undefined) this.drawSelection(this.localX(event));
      this.setHover(this.fromX(this.localX(event)));
    });
    this.svg.addEventListener("pointerleave", () => { if (this.dragStart === undefined) setHover(null, null); });
    this.svg.addEventListener("blur", () => setHover(null, null));
    this.svg.addEventListener("pointerdown", (event) => {
      this.setHover(this.fromX(this.localX(event)));
      if (event.pointerType !== "mouse" || event.button !== 0) return;
      this.dragStart = this.localX(event);
      this.svg.setPointerCapture(event.pointerId);
      event.preventDefault();
    });
    this.svg.addEventListener("pointerup", (event) => {
      const start = this.dragStart;
      this.dragStart = undefined;
      const end = this.localX(event);
      if (start === undefined || Math.abs(end - start) < 8) { this.drawHover(); return; }
      const clamp = (pixel) => Math.min(Math.max(pixel, this.left), this.width - MARGIN.right);
      const range = [start, end].map(clamp).map(this.fromX).sort((a, b) => a - b);
      if (range[1] > range[0]) setDomain(range);
    });
    this.svg.addEventListener("dblclick", () => setDomain(null));
    this.svg.addEventListener("keydown", (event) => this.onKey(event));
  }

  localX(event) {
    const box = this.svg.getBoundingClientRect();
    return ((event.clientX - box.left) / box.width) * this.width;
  }

  onKey(event) {
    if (event.key === "Escape") { setDomain(null); setHover(null, null); return; }
    const xs = this.hoverPlaces();
    if (!xs.length || !["ArrowLeft", "ArrowRight", "Home", "End"].includes(event.key)) return;
    event.preventDefault();
    const stride = event.shiftKey ? 10 : 1;
    let index = state.hover === null ? -1 : nearest(xs, state.hover);
    if (event.key === "Home") index = 0;
    if (event.key === "End") index = xs.length - 1;
    if (event.key === "ArrowRight") index = Math.min(xs.length - 1, index + stride);
    if (event.key === "ArrowLeft") index = index < 0 ? xs.length - 1 : Math.max(0, index - stride);
    setHover(xs[index], this);
  }

  // Sorted x of all points in the visible range
  hoverPlaces() {
    const [left, right] = this.xDomain();
    const places = new Set();
    for (const { xs, main } of this.drawn) {
      xs.forEach((x, i) => { if (x !== null && main[i] !== null && x >= left && x <= right) places.add(x); });
    }
    return [...places].sort((a, b) => a - b);
  }

  setHover(x) {
    const xs = this.hoverPlaces();
    setHover(xs.length ? xs[nearest(xs, x)] : null, this);
  }

  drawSelection(pixel) {
    this.cursor.replaceChildren(svgElement("rect", {
      class: "selection", x: Math.min(pixel, this.dragStart), width: Math.abs(pixel - this.dragStart),
      y: MARGIN.top, height: this.height - MARGIN.top - MARGIN.bottom,
    }));
  }

  drawHover() {
    this.tooltip.hidden = true;
    if (this.dragStart !== undefined) return;
    this.cursor.replaceChildren();
    const [left, right] = this.xDomain();
    if (state.hover === null || state.hover < left || state.hover > right) return;
    const px = this.toX(state.hover);
    this.cursor.append(svgElement("line", { class: "crosshair", x1: px, x2: px, y1: MARGIN.top, y2: this.height - MARGIN.bottom }));
    const rows = [];
    for (const item of this.drawn) {
      const row = this.readValue(item);
      if (row) rows.push(row);
    }
    if (this !== state.hoverChart || !rows.length) return;
    const places = element("p", { textContent: rows[0].place });
    this.tooltip.replaceChildren(places, ...rows.map((row) => row.node));
    this.placeTooltip(px);
  }

  // Value of a line near the crosshair, and a dot there; nothing if the next point is far away
  readValue({ line, xs, raw, main, isSmooth }) {
    const known = [];
    xs.forEach((x, i) => { if (x !== null && main[i] !== null) known.push(i); });
    if (!known.length) return null;
    const i = known[nearest(known.map((index) => xs[index]), state.hover)];
    const x = this.toX(xs[i]);
    if (Math.abs(x - this.toX(state.hover)) > (line.hasPoints ? 2 : 12)) return null;
    const y = this.toY(main[i]);
    if (y >= MARGIN.top - 6) {
      this.cursor.append(svgElement("circle", { cx: x, cy: y, r: 3.5, fill: strokeOf(line.color).stroke }));
    }
    const full = this.format.full;
    let text = full(raw[i]);
    if (line.min && line.min[i] !== line.max[i]) text += ` (${full(line.min[i])} to ${full(line.max[i])})`;
    const node = element("div", {}, lineSample(line.color), ...(this.lines.length > 1 ? [element("span", { textContent: line.name })] : []), element("strong", { textContent: text }));
    if (isSmooth) node.append(element("em", { textContent: `average ${full(main[i])}` }));
    return { node, place: describePlace(line, i) };
  }

  placeTooltip(px) {
    this.tooltip.hidden = false;
    const box = this.svg.getBoundingClientRect();
    const figure = this.figure.getBoundingClientRect();
    const x = box.left - figure.left + (px / this.width) * box.width;
    const width = this.tooltip.offsetWidth;
    const isRight = x + 14 + width < figure.width - 6;
    const left = isRight ? x + 14 : Math.max(6, x - 14 - width);
    this.tooltip.style.left = `${left}px`;
    this.tooltip.style.top = `${box.top - figure.top + 8}px`;
  }

  // Table of the values, made when it is opened

  makeTable() {
    const details = element("details", {}, element("summary", { textContent: "Values" }));
    details.addEventListener("toggle", () => {
      if (details.open && details.children.length === 1) details.append(this.buildTable());
    });
    return details;
  }

  buildTable() {
    const steps = [...new Set(this.lines.flatMap((line) => line.x.step))].sort((a, b) => a - b);
    const stride = Math.ceil(steps.length / MAX_TABLE_ROWS);
    const shown = steps.filter((_, i) => i % stride === 0 || i === steps.length - 1);
    const indices = this.lines.map((line) => new Map(line.x.step.map((step, i) => [step, i])));
    const head = element("tr", {}, cell("th", "Step"), ...this.lines.map((line) => cell("th", this.lines.length > 1 ? line.name : this.title)));
    const rows = shown.map((step) => {
      const values = this.lines.map((line, number) => {
        const value = line.mean[indices[number].get(step)];
        return cell("td", value === undefined || value === null ? "-" : this.format.full(value));
      });
      return element("tr", {}, cell("th", FORMATS.count.full(step)), ...values);
    });
    const table = element("table", {}, element("thead", {}, head), element("tbody", {}, ...rows));
    const box = element("div", { className: "scroll", tabIndex: 0 }, table);
    if (stride === 1) return box;
    const note = element("p", { className: "note", textContent: `${shown.length} of ${steps.length} points.` });
    return element("div", {}, note, box);
  }
}

const measure = document.createElement("canvas").getContext("2d");
measure.font = `12px ${getComputedStyle(document.body).fontFamily}`;

// Width of a label of an axis, in pixels
function textWidth(text) {
  return measure.measureText(text).width;
}

function cell(tag, text) {
  return element(tag, { className: "number", textContent: text });
}

function describePlace(line, i) {
  const first = line.first ? line.first[i] : line.x.step[i];
  const last = line.x.step[i];
  const number = FORMATS.count.full;
  const parts = [first === last ? `Step ${number(last)}` : `Steps ${number(first)} to ${number(last)}`];
  if (state.axis === "tokens") parts.push(`${number(line.x.tokens[i])} tokens`);
  if (state.axis === "time") parts.push(duration(line.x.time[i]));
  return parts.join(", ");
}

function drawAll() {
  for (const chart of charts) chart.draw();
}

let isHoverDue = false;

function setHover(x, chart) {
  if (x === state.hover && chart === state.hoverChart) return;
  state.hover = x;
  state.hoverChart = chart;
  if (isHoverDue) return;
  isHoverDue = true;
  requestAnimationFrame(() => {
    isHoverDue = false;
    for (const each of charts) each.drawHover();
  });
}

function setDomain(domain) {
  if (domain === null && state.domain === null) return;
  state.domain = domain;
  const button = document.getElementById("reset");
  if (button) button.disabled = domain === null;
  drawAll();
}

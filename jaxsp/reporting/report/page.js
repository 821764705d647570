"use strict";
const root = document.documentElement;
const scheme = matchMedia("(prefers-color-scheme: dark)");
const charts = JSON.parse(document.getElementById("charts").textContent);
const nodes = [...document.querySelectorAll(".chart")];
const axis = document.getElementById("axis");
const css = (name) => getComputedStyle(root).getPropertyValue(name).trim();
// Charts over steps share their x axis; the others have their own
const linked = nodes.filter((node, index) => !charts[index].x_axis);
let isLinking = false;

// Draws all charts in the colors of the theme. Args: width: of the first chart, on paper
function draw(width) {
  const hidden = [...document.querySelectorAll("[name=run]:not(:checked)")].map((box) => box.value);
  const places = charts.filter((chart) => !chart.x_axis).flatMap((chart) => chart.traces).flatMap((trace) => [trace.x[axis.value][0], trace.x[axis.value].at(-1)]);
  const common = { gridcolor: css("--grid"), zeroline: false, automargin: true };
  nodes.forEach((node, index) => Plotly.react(node, charts[index].traces.map((trace) => {
    const color = css(trace.meta.color);
    const x = charts[index].x_axis ? trace.x : trace.x[axis.value];
    return { showlegend: false, ...trace, visible: !hidden.includes(trace.meta.run), x, line: { ...trace.line, color }, marker: { ...trace.marker, color } };
  }), {
    width: width && (index ? width / 2 - 20 : width), autosize: !width, height: charts[index].height ?? (index ? 220 : 300), margin: { l: 44, r: 12, t: 6, b: 34 },
    paper_bgcolor: "#0000", plot_bgcolor: "#0000", font: { color: css("--muted"), family: "inherit" },
    hovermode: charts[index].traces[0].z ? "closest" : "x unified", hoverlabel: { bgcolor: css("--card"), bordercolor: css("--line"), namelength: 60 },
    dragmode: matchMedia("(pointer: coarse)").matches ? false : "zoom", uirevision: charts[index].x_axis ? "own" : axis.value, legend: { orientation: "h", y: 1.02, yanchor: "bottom" },
    xaxis: { ...common, ...(charts[index].x_axis ?? { range: [Math.min(...places), Math.max(...places)], title: { text: axis.selectedOptions[0].text, standoff: 4 }, hoverformat: ",.6~g" }) },
    yaxis: { ...common, ...charts[index].y_axis }, yaxis2: { overlaying: "y", range: [0, 1], visible: false, fixedrange: true },
  }, { displayModeBar: false, responsive: true }));
}

// Zooms the linked charts along x, as the reader did with one of them
function link(event) {
  const change = Object.fromEntries(Object.entries(event).filter(([name]) => name.startsWith("xaxis.")));
  if (isLinking || !Object.keys(change).length) return;
  isLinking = true;
  Promise.all(linked.map((node) => Plotly.relayout(node, change))).finally(() => { isLinking = false; });
}

function setTheme(theme) {
  root.dataset.theme = theme;
  if (window.Plotly) draw();
}

async function start() {
  const bytes = Uint8Array.from(atob(document.getElementById("plotly").textContent), (char) => char.charCodeAt(0));
  const stream = new Blob([bytes]).stream().pipeThrough(new DecompressionStream("gzip"));
  document.head.append(Object.assign(document.createElement("script"), { textContent: await new Response(stream).text() }));
  draw();
  linked.forEach((node) => node.on("plotly_relayout", link));
  document.querySelector(".toolbar").addEventListener("change", () => draw());
  document.querySelectorAll(".log").forEach((button, index) => button.addEventListener("click", () => {
    charts[index].y_axis.type = charts[index].y_axis.type === "log" ? "linear" : "log";
    draw();
  }));
  addEventListener("beforeprint", () => { root.classList.add("print"); draw(650); });
  addEventListener("afterprint", () => { root.classList.remove("print"); draw(); });
}

document.getElementById("theme").addEventListener("click", () => setTheme(root.dataset.theme === "dark" ? "light" : "dark"));
scheme.addEventListener("change", () => setTheme(scheme.matches ? "dark" : "light"));
setTheme(scheme.matches ? "dark" : "light");
if (nodes.length) start();

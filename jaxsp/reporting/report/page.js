// The page: which charts there are, and the toolbar that they share.

const data = JSON.parse(document.getElementById("data").textContent);
const isSingle = data.runs.length === 1;

// Options of a line chart for each series; a series that no run has is left out
const CHARTS = [
  { series: "loss", title: "Loss", note: "Mean over the loss tokens of each step.", format: FORMATS.number, isLog: false, wide: true, canClip: 8, hasMarkers: true },
  { series: "loss_difference", title: "Difference of the losses", note: isSingle ? "" : `Absolute difference from ${data.runs[0].name} at the same step.`, format: FORMATS.small, isLog: false, fromZero: true, canSmooth: false },
  { evals: "loss", title: "Evaluation loss", note: "Mean over the loss tokens of each eval set.", format: FORMATS.number, isLog: false },
  { series: "token_accuracy", title: "Token accuracy", note: "Fraction of loss tokens whose top-1 prediction is correct.", format: FORMATS.percent },
  { series: "grad_norm", title: "Gradient norm", note: "Before clipping.", format: FORMATS.number, isLog: true, canClip: 5, hasMarkers: true },
  { series: "learning_rate", title: "Learning rate", format: FORMATS.small, isLog: false, fromZero: true, canSmooth: false, isSteady: true },
  { series: "tokens_per_s", title: "Tokens per second", note: "All devices together.", format: FORMATS.count, fromZero: true },
  { series: "mfu", title: "Model FLOPs utilization (MFU)", note: "Required arithmetic relative to the GPU's bfloat16 peak.", format: FORMATS.percent, fromZero: true },
  { series: "tflops_per_device", title: "TFLOP/s per device", note: "Required arithmetic, without recomputation.", format: FORMATS.small, fromZero: true, unless: "mfu" },
  { series: "step_s", title: "Time per step", note: "Without evaluations and checkpoints.", format: FORMATS.seconds, isLog: false, fromZero: true, canClip: 1.5 },
  { series: "data_wait_s", title: "Data wait", note: "Part of each step's time in which devices waited for rows.", format: FORMATS.seconds, fromZero: true, canClip: 3, canSmooth: false, leastRange: 0.01 },
  { series: "checkpoint_wait_s", title: "Checkpoint wait", note: "Time for which checkpoints delayed steps.", format: FORMATS.seconds, fromZero: true, hasPoints: true, leastRange: 0.01 },
  { series: "padding_fraction", title: "Padding", note: "Fraction of the step's token slots that no document fills.", format: FORMATS.percent, fromZero: true, leastRange: 0.01 },
  { series: "attention_imbalance", title: "Attention imbalance", note: "Work of the busiest group relative to the mean. 1 is balanced.", format: FORMATS.number, leastRange: 0.1 },
  { series: "device_peak_gib", title: "Peak memory", note: "Highest use of any device of process 0 so far.", format: FORMATS.gib, fromZero: true, canSmooth: false, isSteady: true },
];

function makeLines(options) {
  if (options.evals) {
    const hasOneSet = data.runs.every((run) => run.evals.length <= 1) && new Set(data.runs.flatMap((run) => run.evals.map((set) => set.name))).size === 1;
    let color = 0;
    return data.runs.flatMap((run, index) => run.evals.map((set) => ({
      name: isSingle ? set.name : hasOneSet ? run.name : `${run.name}: ${set.name}`,
      run: index, color: hasOneSet ? index : color++, isRunColor: hasOneSet,
      x: set.x, mean: set.series[options.evals], hasPoints: true,
    }))).filter((line) => line.mean.some((value) => value !== null));
  }
  return data.runs.flatMap((run, index) => {
    const series = run.series[options.series];
    if (!series) return [];
    return [{ name: run.name, run: index, color: index, x: run.x, first: run.first_steps, hasPoints: Boolean(options.hasPoints), ...series }];
  });
}

function makeMarkers() {
  const make = (run, index, kind, text) => run[kind === "restart" ? "restarts" : kind].step.map((step, i) => ({
    kind, run: index, text: `${isSingle ? "" : `${run.name}: `}${text} ${FORMATS.count.full(step)}`,
    x: Object.fromEntries(Object.keys(AXES).map((axis) => [axis, run[kind === "restart" ? "restarts" : kind][axis][i]])),
  }));
  return data.runs.flatMap((run, index) => [
    ...make(run, index, "restart", "restarted after step"), ...make(run, index, "nonfinite", "not finite: step"),
  ]);
}

function makeCharts() {
  const grid = document.getElementById("grid");
  const markers = makeMarkers();
  CHARTS.forEach((options, id) => {
    const hasOther = options.unless && data.runs.some((run) => run.series[options.unless]);
    const lines = hasOther ? [] : makeLines(options);
    if (!lines.length) return;
    const legend = Boolean(options.evals) && lines.length > 1 && !lines[0].isRunColor;
    charts.push(new LineChart(grid, { canSmooth: true, ...options, id, lines, legend, markers: options.hasMarkers ? markers : [] }));
  });
}

function makeChoice(label, choices, current, choose) {
  const buttons = choices.map(([value, text]) => {
    const button = element("button", { type: "button", textContent: text });
    button.setAttribute("aria-pressed", value === current);
    button.addEventListener("click", () => {
      for (const each of buttons) each.setAttribute("aria-pressed", each === button);
      choose(value);
    });
    return button;
  });
  return element("fieldset", {}, element("legend", { textContent: label }), element("span", { className: "choice" }, ...buttons));
}

function makeToolbar() {
  const toolbar = document.getElementById("toolbar");
  const axes = Object.entries({ step: "Step", tokens: "Tokens", time: "Time" });
  toolbar.append(makeChoice("X axis", axes, state.axis, (axis) => {
    state.axis = axis;
    state.hover = null;
    state.domain = null;
    setDomain(null);
    drawAll();
  }));
  const longest = Math.max(...data.runs.map((run) => (run.x.step.length ? run.x.step.at(-1) - run.x.step[0] : 0)));
  const windows = [5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000].filter((window) => window <= longest / 2);
  state.window = windows.filter((window) => window <= longest / 10).at(-1) || 0;
  if (windows.length) {
    const select = element("select", { id: "average" }, new Option("off", 0), ...windows.map((window) => new Option(`${FORMATS.count.full(window)} steps`, window)));
    select.value = state.window;
    select.addEventListener("change", () => { state.window = Number(select.value); drawAll(); });
    toolbar.append(element("fieldset", {}, element("label", { htmlFor: "average", textContent: "Running average" }), select));
  }
  const reset = element("button", { type: "button", id: "reset", textContent: "Reset zoom", disabled: true, title: "Drag in a chart to zoom" });
  reset.addEventListener("click", () => setDomain(null));
  toolbar.append(reset);
  if (!isSingle) toolbar.append(makeRunButtons());
  document.getElementById("overlap").hidden = isSingle;
}

function makeRunButtons() {
  const buttons = data.runs.map((run, index) => {
    const button = element("button", { type: "button", title: run.name }, lineSample(index), element("span", { textContent: run.name }));
    button.setAttribute("aria-pressed", "true");
    button.addEventListener("click", () => {
      if (!state.hidden.delete(index)) state.hidden.add(index);
      button.setAttribute("aria-pressed", !state.hidden.has(index));
      drawAll();
    });
    return button;
  });
  return element("div", { className: "runs", role: "group", ariaLabel: "Runs" }, ...buttons);
}

function makeThemeButton() {
  const button = document.getElementById("theme");
  const isDark = () => {
    const theme = document.documentElement.dataset.theme;
    return theme ? theme === "dark" : matchMedia("(prefers-color-scheme: dark)").matches;
  };
  const update = () => { button.textContent = isDark() ? "Light" : "Dark"; };
  button.addEventListener("click", () => {
    document.documentElement.dataset.theme = isDark() ? "light" : "dark";
    update();
  });
  matchMedia("(prefers-color-scheme: dark)").addEventListener("change", update);
  button.hidden = false;
  update();
}

makeThemeButton();
if (data.runs.some((run) => run.x.step.length || run.evals.length)) {
  document.getElementById("charts").hidden = false;
  makeToolbar();
  makeCharts();
  drawAll();
}

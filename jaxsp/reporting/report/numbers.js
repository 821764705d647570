"use strict";
// Numbers: how they are written, ticks of axes, running averages, search.

function decimalsOf(step) {
  return Math.max(0, Math.min(12, -Math.floor(Math.log10(step) + 1e-9)));
}

function withUnit(value, digits) {
  for (const [size, unit] of [[1e12, "T"], [1e9, "B"], [1e6, "M"], [1e3, "k"]]) {
    if (Math.abs(value) >= size * 0.9995) return `${Number((value / size).toPrecision(digits))}${unit}`;
  }
  return String(Number(value.toPrecision(digits)));
}

function significant(value, digits) {
  if (value === 0) return "0";
  const size = Math.abs(value);
  if (size < 1e-3 || size >= 1e6) {
    return value.toExponential(digits - 1).replace(/\.?0+e/, "e").replace("e+", "e");
  }
  const decimals = Math.max(0, digits - 1 - Math.floor(Math.log10(size)));
  return value.toFixed(Math.min(12, decimals));
}

function trimmed(text) {
  return text.includes(".") && !text.includes("e") ? text.replace(/\.?0+$/, "") : text;
}

function duration(seconds) {
  if (seconds < 1 && seconds > 0) return `${Number((1000 * seconds).toPrecision(3))} ms`;
  if (seconds < 60) return `${Number(seconds.toPrecision(3))} s`;
  const minutes = Math.round(seconds / 60);
  const rest = Math.floor(seconds % 60);
  if (seconds < 600) return `${Math.floor(seconds / 60)} min${rest ? ` ${rest} s` : ""}`;
  if (minutes < 60) return `${minutes} min`;
  if (minutes < 48 * 60) return `${Math.floor(minutes / 60)} h${minutes % 60 ? ` ${minutes % 60} min` : ""}`;
  return `${Number((minutes / 1440).toPrecision(3))} d`;
}

function tickOfCount(value, step) {
  const digits = value === 0 ? 1 : Math.ceil(Math.log10(Math.abs(value) / step)) + 1;
  return digits > 4 ? Math.round(value).toLocaleString("en-US") : withUnit(value, Math.max(3, digits));
}

// How each kind of number is written: at ticks, which are `step` apart, and in full
const FORMATS = {
  number: {
    tick: (value, step) => (Math.abs(value) < 1e5 && (value === 0 || Math.abs(value) >= 1e-3) ? value.toFixed(decimalsOf(step)) : significant(value, 2)),
    full: (value) => significant(value, 6),
  },
  small: { tick: (value) => trimmed(significant(value, 2)), full: (value) => significant(value, 4) },
  percent: {
    tick: (value, step) => `${(100 * value).toFixed(decimalsOf(100 * step))} %`,
    full: (value) => `${significant(100 * value, 4)} %`,
  },
  count: { tick: tickOfCount, full: (value) => Math.round(value).toLocaleString("en-US") },
  seconds: { tick: (value, step) => duration(Number(value.toFixed(decimalsOf(step)))), full: duration },
  gib: {
    tick: (value, step) => `${value.toFixed(decimalsOf(step))} GiB`,
    full: (value) => `${significant(value, 4)} GiB`,
  },
};
const AXES = {
  step: { title: "Step", format: FORMATS.count },
  tokens: { title: "Tokens", format: FORMATS.count },
  time: { title: "Time", format: FORMATS.seconds },
};

// Scales

function niceTicks(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  const power = 10 ** Math.floor(Math.log10(raw));
  const step = power * [1, 2, 5, 10].find((factor) => factor * power >= raw * 0.999);
  const ticks = [];
  for (let i = Math.ceil(low / step - 1e-9); i * step <= high + step * 1e-9; i++) ticks.push(i * step || 0);
  return { ticks, step };
}

function niceSeconds(low, high, count) {
  const raw = (high - low) / Math.max(1, count);
  if (raw < 20) return niceTicks(low, high, count);
  const units = [30, 60, 120, 300, 600, 900, 1800, 3600, 7200, 10800, 21600, 43200, 86400];
  const step = units.find((unit) => unit >= raw) || 86400 * Math.ceil(raw / 86400);
  const ticks = [];
  for (let i = Math.ceil(low / step); i * step <= high; i++) ticks.push(i * step);
  return { ticks, step };
}

function logTicks(low, high, count) {
  const first = Math.floor(Math.log10(low));
  const last = Math.ceil(Math.log10(high));
  const spacing = Math.max(1, Math.ceil((last - first) / (count + 1)));
  for (const factors of [[1, 1.5, 2, 3, 4, 5, 6, 7, 8], [1, 2, 3, 5], [1, 2, 5], [1, 3], [1]]) {
    const ticks = [];
    for (let power = first; power <= last; power += spacing) {
      for (const factor of factors) {
        const tick = factor * 10 ** power;
        if (tick >= low * 0.999 && tick <= high * 1.001) ticks.push(tick);
      }
    }
    if (ticks.length >= 3 && ticks.length <= count + 2) return { ticks, step: low };
  }
  return niceTicks(low, high, count);
}

// Running average of the steps in a window that ends at each point; missing values are left out
function average(steps, values, window) {
  const result = [];
  let begin = 0;
  let sum = 0;
  let count = 0;
  for (let i = 0; i < values.length; i++) {
    if (values[i] !== null) { sum += values[i]; count += 1; }
    for (; steps[begin] <= steps[i] - window; begin++) {
      if (values[begin] !== null) { sum -= values[begin]; count -= 1; }
    }
    result.push(count && values[i] !== null ? sum / count : null);
  }
  return result;
}

function nearest(sorted, value) {
  let low = 0;
  let high = sorted.length - 1;
  while (high - low > 1) {
    const middle = (low + high) >> 1;
    if (sorted[middle] <= value) low = middle; else high = middle;
  }
  return value - sorted[low] <= sorted[high] - value ? low : high;
}

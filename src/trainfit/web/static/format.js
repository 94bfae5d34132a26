// Numbers as the command line prints them: GiB is 2**30 bytes.

const SIZES = [["TiB", 2 ** 40], ["GiB", 2 ** 30], ["MiB", 2 ** 20], ["KiB", 2 ** 10]];
const COUNTS = [["T", 1e12], ["B", 1e9], ["M", 1e6], ["K", 1e3]];

export function bytes(value) {
  const found = SIZES.find(([, size]) => Math.abs(value) >= size);
  return found ? `${(value / found[1]).toFixed(2)} ${found[0]}` : `${Math.round(value)} B`;
}

export const gib = (value, digits = 1) => (value / 2 ** 30).toFixed(digits);

export function count(value) {
  const found = COUNTS.find(([, least]) => Math.abs(value) >= least);
  return found ? `${Number((value / found[1]).toPrecision(3))}${found[0]}` : String(value);
}

export function seconds(value) {
  if (value === null || value === undefined) return "–";
  if (value < 1e-3) return `${(value * 1e6).toFixed(0)} µs`;
  if (value < 1) return `${Number((value * 1e3).toPrecision(3))} ms`;
  if (value < 120) return `${Number(value.toPrecision(3))} s`;
  if (value < 7200) return `${Number((value / 60).toPrecision(3))} min`;
  if (value < 2 * 86400) return `${Number((value / 3600).toPrecision(3))} h`;
  return `${Number((value / 86400).toPrecision(3))} days`;
}

export const whole = value => (value === null || value === undefined ? "–" : Math.round(value).toLocaleString("en-US"));
export const percent = (value, digits = 1) => (value === null || value === undefined ? "–" : `${(value * 100).toFixed(digits)}%`);
export const digits = (value, n = 3) => (value === null || value === undefined ? "–" : String(Number(Number(value).toPrecision(n))));

export function dollars(value) {
  if (value === null || value === undefined) return "–";
  if (value >= 100) return `$${Math.round(value).toLocaleString("en-US")}`;
  return value >= 1 ? `$${value.toFixed(2)}` : `$${Number(value.toPrecision(3))}`;
}

// "2B", "1.5e9" or "15T" as a number; NaN where it is none.
export function readCount(text) {
  const match = /^\s*([\d.,]+(?:e[+-]?\d+)?)\s*([kmbt]?)\s*$/i.exec(text);
  if (!match) return NaN;
  const unit = { "": 1, k: 1e3, m: 1e6, b: 1e9, t: 1e12 }[match[2].toLowerCase()];
  return Number(match[1].replaceAll(",", "")) * unit;
}

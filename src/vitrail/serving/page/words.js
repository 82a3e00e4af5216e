// Numbers and answers as words.

const CLEAR_LEAD = 20; // percentage points by which the best answer must lead not to be called unsure

const MOST_NAMED = 8; // labels of a set, in a sentence

const ONE_OF_SEVERAL = ["labels", "levels"]; // tasks whose first line is the answer, and the others its rivals

/** Whether an answer is its first line, with rivals; otherwise each of its lines stands for itself. */
export function hasRivals(task) {
  return ONE_OF_SEVERAL.includes(task);
}

/** Whether the two best answers are close: the lead of the best, to a tenth of a point, is under CLEAR_LEAD. */
export function isUnsure(lines) {
  if (lines.length < 2) return false;
  const lead = Math.round((lines[0].share - lines[1].share) * 1000) / 10;
  return lead < CLEAR_LEAD;
}

export function percent(share) {
  return `${(share * 100).toFixed(share >= 0.9995 ? 0 : share >= 0.001 || share === 0 ? 1 : 2)}%`;
}

export function count(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : noun.endsWith("s") ? "es" : "s"}`;
}

export function megabytes(bytes) {
  return `${(bytes / 1e6).toFixed(bytes < 1e7 ? 1 : 0)} MB`;
}

/** The server's messages are made to follow a colon as well; here each stands alone. */
export function sentence(words) {
  return words.charAt(0).toUpperCase() + words.slice(1) + (/[.!?…]$/.test(words) ? "" : ".");
}

/** An answer as a screen reader says it: rivals with how sure it is, otherwise what was chosen. */
export function linesInWords(task, lines) {
  const doubt = task === "labels" && isUnsure(lines) ? "unsure: " : "";
  const said = hasRivals(task) ? lines : chosen(lines);
  return said.length > 0 ? doubt + said.map(({ name, text }) => `${name}, ${text}`).join("; ") : "none is likely enough";
}

/** A set of labels, and how often such a set holds the right one. */
export function setInWords(labels, coverage) {
  const names = labels.slice(0, MOST_NAMED).map(({ label }) => label);
  if (labels.length > MOST_NAMED) names.push(`${labels.length - MOST_NAMED} more`);
  const share = Math.round(coverage * 100);
  return `${names.join(", ")}: for ${share} of 100 images like those known, such a set holds the right label.`;
}

/** What two answers must share to be the same: the names of what was chosen, and values that are not how sure it is. */
export function essence(lines) {
  return chosen(lines).map(({ name, text, share }) => (share === null ? `${name} ${text}` : name)).sort().join(", ");
}

function chosen(lines) {
  return lines.filter((line) => line.is_chosen);
}

export function timingInWords({ decode_ms: decode, queue_ms: queue, compute_ms: compute, total_ms: total }) {
  return `Decoded in ${duration(decode)}, waited ${duration(queue)}, computed in ${duration(compute)}; ` +
    `${duration(total)} in all.`;
}

export function factsInWords({ image_size: [height, width], answers, attention, layers }) {
  const facts = [`${width} × ${height} pixels`, answers ?? "no classes",
                 attention ? layers && count(layers, "layer") : "no attention to show"];
  return facts.filter(Boolean).join(" · ");
}

function duration(milliseconds) {
  if (milliseconds >= 9950) return `${(milliseconds / 1000).toFixed(1)}\u00a0s`;
  return `${milliseconds.toFixed(milliseconds > 0 && milliseconds < 0.95 ? 1 : 0)}\u00a0ms`;
}

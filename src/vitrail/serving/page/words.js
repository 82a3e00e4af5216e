// Numbers and answers as words.

const CLEAR_LEAD = 20; // percentage points by which the best answer must lead not to be called unsure

/** Whether the two best answers are close: the lead of the best, to a tenth of a point, is under CLEAR_LEAD. */
export function isUnsure(labels) {
  if (labels.length < 2) return false;
  const lead = Math.round((labels[0].probability - labels[1].probability) * 1000) / 10;
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

/** Labels as a screen reader says them. */
export function labelsInWords(labels) {
  const doubt = isUnsure(labels) ? "unsure: " : "";
  return doubt + labels.map(({ label, probability }) => `${label}, ${percent(probability)}`).join("; ");
}

export function timingInWords({ decode_ms: decode, queue_ms: queue, compute_ms: compute, total_ms: total }) {
  return `Decoded in ${duration(decode)}, waited ${duration(queue)}, computed in ${duration(compute)}; ` +
    `${duration(total)} in all.`;
}

export function factsInWords({ image_size: [height, width], classes, attention, layers }) {
  const facts = [`${width} × ${height} pixels`, classes ? count(classes, "class") : "no classes",
                 attention ? layers && count(layers, "layer") : "no attention to show"];
  return facts.filter(Boolean).join(" · ");
}

function duration(milliseconds) {
  if (milliseconds >= 9950) return `${(milliseconds / 1000).toFixed(1)}\u00a0s`;
  return `${milliseconds.toFixed(milliseconds > 0 && milliseconds < 0.95 ? 1 : 0)}\u00a0ms`;
}

// The page of the server: photos in, ranked labels and what the model attended to out. A module, so strict by itself.

const TOP = 5; // labels on a card
const AT_ONCE = 3; // requests in the air; the others wait here rather than in the server's queue
const MOST_REFUSALS = 20; // "too busy" answers to one request before the person is asked whether to go on
const LONGEST_WAIT = 30; // seconds until a refused request is sent again, whatever the server asks for
const SMALL = 128; // pixels of a photo that is enlarged as it is, without smoothing
const FINEST = 256; // points of a painted map's longer side: milliseconds on a phone; the browser smooths from there
const SHEER = 0.7; // how opaque the full overlay is where there is no attention: the photo is not lost under it
const LARGE = 5_000_000; // bytes of a file that may have been too large when a connection breaks
const KEPT_TOKEN = "vitrail-token";
// From almost black to almost white, so that more is lighter, also on a photograph and in grey.
const COLOURS = colours([
  [9, 8, 32], [58, 18, 104], [128, 32, 122], [199, 54, 92], [243, 112, 50], [252, 184, 66], [254, 248, 205],
]);

const one = (selector, root = document) => root.querySelector(selector);
const [picker, chooser] = [one(".drop input"), one(".choice select")];
const [gone, tokenForm, tokenField] = [one(".notice.gone"), one(".notice.token"), one("#token")];

const cards = []; // the newest first, as they are shown
const turn = turns(AT_ONCE);
let models = [];
let chosen = null; // one of the models, once they are known
let strength = 60; // per cent; new cards take over what was set last
let adding = Promise.resolve();
let token = rememberedToken();

// Talking to the server

/** Why a request has no result. Kinds: gone, token, busy (all worth another try), refused. */
class Trouble extends Error {
  constructor(kind, message) {
    super(message);
    this.kind = kind;
  }
}

/** The answer to a request, after as many tries as a busy server asks for. `waiting` is told the seconds until each. */
async function ask(path, { body, signal, waiting = () => {} } = {}) {
  for (let refusals = 0; ; refusals++) {
    const sentWith = token;
    const response = await send(path, body, signal);
    if (response.ok) return response;
    const trouble = Object.assign(await troubleOf(response), { sentWith });
    if (response.status !== 429 || refusals === MOST_REFUSALS) throw trouble;
    const asked = Number(response.headers.get("Retry-After"));
    const seconds = Math.min(asked > 0 ? asked : 1, LONGEST_WAIT);
    waiting(seconds);
    await pause(seconds, signal);
    waiting(0);
  }
}

async function send(path, body, signal) {
  const headers = {};
  if (token) headers.Authorization = `Bearer ${token}`;
  if (body) headers["Content-Type"] = body.type.startsWith("image/") ? body.type : "application/octet-stream";
  try {
    const response = await fetch(path, { method: body ? "POST" : "GET", headers, body, signal, cache: "no-store" });
    gone.hidden = true; // whatever it says, it is there
    return response;
  } catch (error) {
    if (error.name === "AbortError") throw error;
    const size = body?.size > LARGE ? ` Or this file, of ${megabytes(body.size)}, is larger than it accepts.` : "";
    throw new Trouble("gone", `The server does not answer. It may have been stopped, or the network is down.${size}`);
  }
}

async function troubleOf(response) {
  const said = await response.json().catch(() => null);
  const message = said?.error?.message ?? `The server answered ${response.status} ${response.statusText}`.trimEnd();
  const kind = { 401: "token", 429: "busy", 503: "busy" }[response.status] ?? "refused";
  return new Trouble(kind, sentence(message));
}

/** JSON or whatever else `read` makes of an answer; one that breaks off or is something else is told in words. */
async function understood(response, read) {
  try {
    return await read(response);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Trouble("gone", "The answer of the server broke off, or is not what this page understands.");
  }
}

/** For this tab only, and where the browser forbids even that, for as long as the page is open. */
function rememberedToken() {
  try {
    return sessionStorage.getItem(KEPT_TOKEN) ?? "";
  } catch {
    return "";
  }
}

function rememberToken(entered) {
  token = entered;
  try {
    sessionStorage.setItem(KEPT_TOKEN, entered);
  } catch {
    // It is forbidden: the variable has to do.
  }
}

function pause(seconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, seconds * 1000);
    signal?.addEventListener("abort", () => { clearTimeout(timer); reject(signal.reason); }, { once: true });
  });
}

/** A function that runs tasks, at most so many at once; urgent ones before those that wait. */
function turns(most) {
  const waiting = [];
  let running = 0;
  function next() {
    while (running < most && waiting.length > 0) {
      running++;
      waiting.shift()().finally(() => { running--; next(); });
    }
  }
  return (task, urgent = false) => new Promise((resolve, reject) => {
    const run = () => task().then(resolve, reject);
    if (urgent) waiting.unshift(run);
    else waiting.push(run);
    next();
  });
}

// One photo

class Card {
  static made = 0;

  /** `photo` is an image that has loaded, or null where the browser cannot show the file. */
  constructor(file, photo) {
    Object.assign(this, { file, photo, results: new Map(), drawn: null, stopped: new AbortController() });
    this.name = file.name || "pasted image";
    this.root = one("#card").content.firstElementChild.cloneNode(true);
    this.canvas = this.one(".stage canvas");
    this.strength = strength;
    const heading = this.one("h2");
    heading.id = `name-${++Card.made}`;
    heading.textContent = heading.title = this.name;
    this.root.setAttribute("aria-labelledby", heading.id);
    this.one(".remove").setAttribute("aria-label", `Remove ${this.name}`);
    this.setStage();
    this.one(".remove").addEventListener("click", () => this.remove());
    this.one(".again").addEventListener("click", () => this.again());
    this.one(".strength").addEventListener("input", (event) => {
      strength = this.strength = Number(event.target.value);
      this.paint();
    });
    this.one(".layer").addEventListener("input", (event) => {
      Object.assign(this.found, { layer: Number(event.target.value), mapTrouble: null });
      this.paint();
      this.attend(true);
    });
    const ramp = this.one(".ramp");
    const values = Float32Array.from({ length: ramp.width }, (_, place) => place / (ramp.width - 1));
    paintMap(ramp, { values, rows: 1, columns: ramp.width }, 1, 1);
  }

  one(selector) {
    return one(selector, this.root);
  }

  setStage() {
    const stage = this.one(".stage");
    if (this.photo) {
      const { naturalWidth: width, naturalHeight: height } = this.photo;
      stage.style.setProperty("--ratio", width / height);
      this.photo.classList.toggle("small", Math.max(width, height) < SMALL);
      this.photo.alt = this.name;
      stage.prepend(this.photo);
    } else {
      stage.classList.add("blank");
      stage.prepend("No preview");
    }
  }

  /** What is known of this photo from the chosen model. */
  get found() {
    if (!this.results.has(chosen)) {
      const maps = new Map(); // by layer: each is fetched once
      this.results.set(chosen, { state: "new", labels: null, timing: null, trouble: null, wait: 0,
                                 layer: chosen?.layers ?? null, maps, mapTrouble: null, attending: false });
    }
    return this.results.get(chosen);
  }

  /** Asks for what is not known yet, and shows what is. */
  async look() {
    const { found } = this;
    const model = chosen;
    this.paint();
    if (!model || found.state !== "new") {
      this.attend();
      return;
    }
    found.state = "queued";
    this.paint();
    try {
      await turn(async () => {
        await this.readable();
        found.state = "asked";
        this.paint();
        // A model without classes is asked for its embedding: whether the file is an image, and how long it takes.
        const verb = model.classes ? `classify?top=${TOP}&` : "embed?";
        const response = await ask(`/v1/${verb}model=${encodeURIComponent(model.name)}`, this.request(found));
        const { labels, timing } = await understood(response, (answer) => answer.json());
        Object.assign(found, { state: "done", labels: labels ?? [], timing });
      });
    } catch (error) {
      if (this.stopped.signal.aborted) return;
      Object.assign(found, { state: "failed", trouble: error });
      if (!(error instanceof Trouble)) throw error;
      tellOf(error);
    }
    this.paint();
    if (model === chosen) announce(`${this.name}: ${this.inWords(found)}`);
    if (found.state === "done") this.attend();
  }

  /** A folder, or a file that has changed on the disk, must not look like a server that is gone. */
  async readable() {
    this.stopped.signal.throwIfAborted();
    try {
      await this.file.slice(0, 1).arrayBuffer();
    } catch {
      throw new Trouble("refused", "The browser cannot read this file. Is it a folder, or has it been moved?");
    }
  }

  request(found) {
    const waiting = (seconds) => { found.wait = seconds; this.paint(); };
    return { body: this.file, signal: this.stopped.signal, waiting };
  }

  /** Fetches the map of the layer that is wanted when its turn has come; and again should another be wanted by then. */
  async attend(urgent = false) {
    const { found } = this;
    const model = chosen;
    if (!model?.attention || !this.photo || found.state !== "done" || found.attending || found.mapTrouble) return;
    found.attending = true;
    try {
      while (!found.maps.has(found.layer)) {
        await turn(async () => {
          this.stopped.signal.throwIfAborted();
          const { layer } = found;
          const which = layer === null ? "" : `&layer=${layer}`;
          const path = `/v1/attention?model=${encodeURIComponent(model.name)}${which}`;
          const response = await ask(path, this.request(found));
          found.maps.set(layer, await understood(response, mapOf));
        }, urgent);
        this.paint();
      }
    } catch (error) {
      if (this.stopped.signal.aborted) return;
      found.mapTrouble = error;
      if (!(error instanceof Trouble)) throw error;
      tellOf(error);
    } finally {
      found.attending = false;
    }
    this.paint();
  }

  again() {
    const { found } = this;
    if (found.state === "failed") Object.assign(found, { state: "new", trouble: null });
    found.mapTrouble = null;
    this.look();
  }

  remove() {
    const place = cards.indexOf(this);
    cards.splice(place, 1);
    this.stopped.abort();
    if (this.photo) URL.revokeObjectURL(this.photo.src);
    this.root.remove();
    document.body.classList.toggle("some", cards.length > 0);
    announce(`${this.name} removed`);
    const next = cards[Math.min(place, cards.length - 1)];
    (next?.one(".remove") ?? picker).focus(); // who works by keyboard is not sent back to the top
  }

  /** Everything on the card, from what is known. */
  paint() {
    const { found } = this;
    this.root.classList.toggle("failed", found.state === "failed");
    this.root.setAttribute("aria-busy", String(["queued", "asked"].includes(found.state)));
    this.one(".guesses").hidden = chosen !== null && !chosen.classes;
    if (this.listed !== found.labels || !found.labels) {
      showGuesses(this.one(".guesses"), found.labels ?? Array(Math.min(TOP, chosen?.classes ?? TOP)).fill(null));
      this.listed = found.labels;
    }
    this.one(".without").hidden = chosen === null || chosen.classes > 0;
    const numbers = count(chosen?.embedding ?? 0, "number");
    this.one(".without").textContent = `This model has no classes: it gives ${numbers}.`;
    this.one(".trouble").hidden = found.state !== "failed";
    this.one(".trouble p").textContent = found.trouble?.message ?? "";
    this.one(".again").hidden = !["gone", "token", "busy"].includes(found.trouble?.kind);
    this.one(".status").textContent = this.status(found);
    this.paintControls(found);
    this.paintOverlay(found.maps.get(found.layer));
  }

  status({ state, wait, timing }) {
    if (wait > 0) return `The server is busy. Trying again in ${wait} s…`;
    if (state === "new") return "Waiting for the server…";
    if (state === "queued") return "Waiting for its turn…";
    if (state === "asked") return "Looking…";
    if (state === "failed") return "";
    return timingInWords(timing);
  }

  paintControls(found) {
    const offered = chosen === null || chosen.attention; // before the models are known, room is kept for the usual
    const map = found.maps.get(found.layer);
    this.one(".looked").hidden = !this.photo && offered;
    this.one(".controls").hidden = !offered;
    this.one(".layers").hidden = chosen !== null && !(chosen.layers > 1);
    this.one(".layer").max = chosen?.layers ?? 1;
    const layer = found.layer === null ? "" : `${found.layer} of ${chosen.layers}`;
    setRange(this.one(".layer"), found.layer ?? 1, layer);
    setRange(this.one(".strength"), this.strength, `${this.strength}%`);
    this.one(".legend").classList.toggle("unknown", !map);
    this.one(".high").textContent = map?.peak > 0 ? `${percent(map.peak)} on a patch` : "most";
    this.one(".told").textContent = offered ? this.told(found, map) : "This model shows no attention: labels only.";
  }

  told({ layer, mapTrouble }, map) {
    if (mapTrouble) return `No map: ${mapTrouble.message}`;
    const upTo = layer === null ? "" : ` up to layer ${layer}`;
    const part = map && !isWhole(map.box) ? ", within the frame" : ""; // one line, whether or not
    return `Attention rollout${upTo}${part}.`;
  }

  paintOverlay(map) {
    const { canvas } = this;
    canvas.style.opacity = this.strength / 100;
    // While another layer of the same model is on its way, the last one stays.
    if (!map && this.drawn?.model === chosen) return;
    canvas.hidden = !map;
    if (!map || this.drawn?.map === map) {
      if (!map) this.drawn = null;
      return;
    }
    this.drawn = { model: chosen, map };
    ["left", "top", "width", "height"].forEach((side, i) => { canvas.style[side] = `${map.box[i] * 100}%`; });
    canvas.classList.toggle("part", !isWhole(map.box));
    canvas.setAttribute("aria-label", `${this.name}: where the model looked, lighter is more`);
    paintMap(canvas, map, Math.max(Math.round(FINEST / Math.max(map.rows, map.columns)), 2), SHEER);
  }

  inWords({ state, labels, trouble }) {
    if (state === "failed") return trouble.message;
    if (labels.length === 0) return "looked at";
    return labels.map(({ label, probability }) => `${label}, ${percent(probability)}`).join("; ");
  }
}

/** A grey PNG with its headers → values from 0 to 1, where they lie on the photo, and the largest share. */
async function mapOf(response) {
  const picture = await createImageBitmap(await response.blob(), { colorSpaceConversion: "none" });
  const { width: columns, height: rows } = picture;
  const context = Object.assign(document.createElement("canvas"), { width: columns, height: rows }).getContext("2d");
  context.drawImage(picture, 0, 0);
  picture.close();
  const { data } = context.getImageData(0, 0, columns, rows);
  const values = Float32Array.from({ length: rows * columns }, (_, place) => data[place * 4] / 255);
  const box = (response.headers.get("X-Vitrail-Box") ?? "").split(",").map(Number);
  const sound = box.length === 4 && box.every(Number.isFinite);
  const peak = Number(response.headers.get("X-Vitrail-Peak"));
  return { values, rows, columns, box: sound ? box : [0, 0, 1, 1], peak };
}

function isWhole([left, top, width, height]) {
  return left < 0.001 && top < 0.001 && width > 0.998 && height > 0.998;
}

/** A map in colours, `finer` points for each patch and in each direction; `sheer` is how opaque nothing is. */
function paintMap(canvas, { values, rows, columns }, finer, sheer) {
  [canvas.width, canvas.height] = [columns * finer, rows * finer];
  const context = canvas.getContext("2d");
  const pixels = context.createImageData(canvas.width, canvas.height);
  const across = Array.from({ length: canvas.width }, (_, x) => weights(x, finer, columns));
  const line = new Float32Array(columns);
  for (let y = 0, point = 0; y < canvas.height; y++) {
    const around = weights(y, finer, rows);
    for (let x = 0; x < columns; x++) {
      line[x] = around.reduce((sum, [row, weight]) => sum + weight * values[row * columns + x], 0);
    }
    for (const column of across) {
      const value = column.reduce((sum, [x, weight]) => sum + weight * line[x], 0);
      const within = Math.min(Math.max(value, 0), 1);
      const colour = Math.round(within * 255) * 3;
      for (let channel = 0; channel < 3; channel++) pixels.data[point++] = COLOURS[colour + channel];
      pixels.data[point++] = 255 * (sheer + (1 - sheer) * within);
    }
  }
  context.putImageData(pixels, 0, 0);
}

/** The patches around a point with their weights: cubic, through the values themselves in the middles of patches. */
function weights(point, finer, count) {
  const place = (point + 0.5) / finer - 0.5;
  const first = Math.floor(place);
  const t = place - first;
  const cubic = [((2 - t) * t - 1) * t, (3 * t - 5) * t * t + 2, ((4 - 3 * t) * t + 1) * t, (t - 1) * t * t];
  return cubic.map((weight, step) => [Math.min(Math.max(first + step - 1, 0), count - 1), weight / 2]);
}

/** Stops → 256 colours of three bytes. */
function colours(stops) {
  const table = new Uint8ClampedArray(768);
  for (let value = 0; value < 256; value++) {
    const place = (value / 255) * (stops.length - 1);
    const first = Math.min(Math.floor(place), stops.length - 2);
    const mixed = stops[first].map((channel, i) => channel + (stops[first + 1][i] - channel) * (place - first));
    table.set(mixed, value * 3);
  }
  return table;
}

/** Labels with bars; null is the room for one that is not known yet. */
function showGuesses(list, guesses) {
  list.setAttribute("aria-hidden", String(guesses.includes(null)));
  list.replaceChildren(...guesses.map((guess) => {
    const item = document.createElement("li");
    const [words, number, bar] = ["span", "b", "i"].map((tag) => document.createElement(tag));
    Object.assign(words, { textContent: guess?.label ?? "\u00a0", dir: "auto" });
    number.textContent = guess ? percent(guess.probability) : "";
    bar.style.setProperty("--share", guess?.probability ?? 0);
    item.append(words, number, bar);
    return item;
  }));
}

function setRange(control, value, words) {
  control.value = value;
  control.setAttribute("aria-valuetext", words);
  one("output", control.parentElement).textContent = words;
}

// In words

function timingInWords({ decode_ms: decode, queue_ms: queue, compute_ms: compute, total_ms: total }) {
  return `Decoded in ${duration(decode)}, waited ${duration(queue)}, computed in ${duration(compute)}; ` +
    `${duration(total)} in all.`;
}

function duration(milliseconds) {
  if (milliseconds >= 9950) return `${(milliseconds / 1000).toFixed(1)}\u00a0s`;
  return `${milliseconds.toFixed(milliseconds > 0 && milliseconds < 0.95 ? 1 : 0)}\u00a0ms`;
}

function percent(share) {
  return `${(share * 100).toFixed(share >= 0.9995 ? 0 : share >= 0.001 || share === 0 ? 1 : 2)}%`;
}

function count(number, noun) {
  return `${number.toLocaleString("en")} ${noun}${number === 1 ? "" : noun.endsWith("s") ? "es" : "s"}`;
}

function megabytes(bytes) {
  return `${(bytes / 1e6).toFixed(bytes < 1e7 ? 1 : 0)} MB`;
}

/** The server's messages are made to follow a colon as well; here each stands alone. */
function sentence(words) {
  return words.charAt(0).toUpperCase() + words.slice(1) + (/[.!?…]$/.test(words) ? "" : ".");
}

function announce(words) {
  const region = one("#announced");
  region.append(Object.assign(document.createElement("p"), { textContent: words }));
  while (region.childElementCount > 20) region.firstElementChild.remove();
}

// The page around the cards

/** What a trouble means for the whole page. */
function tellOf({ kind, message, sentWith }) {
  if (kind === "token") {
    if (sentWith !== token) return; // another has been entered since
    if (token) one("#token-said").textContent = "The server did not accept this token.";
    tokenForm.hidden = false;
    showCommand();
  } else if (kind === "gone" || models.length === 0) {
    one(".said", gone).textContent = message;
    gone.hidden = false;
  }
}

/** Once more whatever failed for a reason that may have passed. */
async function tryAgain() {
  gone.hidden = true;
  if (models.length === 0) await start();
  for (const card of cards) {
    const { trouble, mapTrouble } = card.found;
    if ([trouble, mapTrouble].some((it) => ["gone", "token", "busy"].includes(it?.kind))) card.again();
  }
}

/** Which models there are. Cards made before that is known wait for it. */
async function start() {
  try {
    const answer = await understood(await ask("/v1/models"), (response) => response.json());
    if (models.length > 0) return; // someone was faster
    models = answer.models;
    chooser.replaceChildren(...models.map(({ name }) => new Option(name, name)));
    one(".choice").hidden = models.length < 2;
    choose(answer.default);
  } catch (error) {
    if (!(error instanceof Trouble)) throw error;
    tellOf(error);
  }
}

/** What a program would send, with a token where the server wants one. */
function showCommand() {
  const shown = token || !tokenForm.hidden ? '-H "Authorization: Bearer TOKEN" ' : "";
  one("#command").textContent = `curl ${shown}-F files=@photo.jpg ${location.origin}/v1/classify`;
}

function choose(name) {
  chosen = models.find((model) => model.name === name) ?? models[0];
  chooser.value = chosen.name;
  const [height, width] = chosen.image_size;
  const facts = [`${width} × ${height} pixels`, chosen.classes ? count(chosen.classes, "class") : "no classes",
                 chosen.attention ? chosen.layers && count(chosen.layers, "layer") : "no attention to show"];
  const called = models.length < 2 ? [chosen.name] : [];
  one(".facts").textContent = [...called, ...facts.filter(Boolean)].join(" · ");
  for (const card of cards) card.look();
}

/**
 * Files become cards one after the other, so that order holds; each is made once its photo's shape is known. Those that
 * come together stand above all that came before, in their own order.
 */
function add(files) {
  let previous = null;
  for (const file of files) {
    adding = adding.then(async () => {
      const card = new Card(file, await photoOf(file));
      cards.splice(cards.indexOf(previous) + 1, 0, card);
      document.body.classList.add("some");
      if (previous?.root.isConnected) previous.root.after(card.root);
      else one(".cards").prepend(card.root);
      previous = card;
      card.look();
    });
  }
}

/** The image of a file, loaded; null where the browser cannot. */
function photoOf(file) {
  const photo = new Image();
  photo.src = URL.createObjectURL(file);
  return new Promise((resolve) => {
    photo.addEventListener("load", () => resolve(photo.naturalWidth > 0 ? photo : null), { once: true });
    photo.addEventListener("error", () => { URL.revokeObjectURL(photo.src); resolve(null); }, { once: true });
  });
}

picker.addEventListener("change", () => {
  add(picker.files);
  picker.value = ""; // the same file can be picked again
});

document.addEventListener("paste", ({ clipboardData }) => add(clipboardData.files));

// The whole page takes what is dropped: who misses the window must not have the browser open the photo instead.
let depth = 0; // how many nested elements the pointer has entered with files
const carriesFiles = (event) => event.dataTransfer?.types.includes("Files");
const over = (change) => {
  depth = Math.max(change === 0 ? 0 : depth + change, 0);
  document.body.classList.toggle("over", depth > 0);
};
document.addEventListener("dragenter", (event) => { if (carriesFiles(event)) over(1); });
document.addEventListener("dragleave", (event) => { if (carriesFiles(event)) over(-1); });
document.addEventListener("dragover", (event) => {
  if (!carriesFiles(event)) return;
  event.preventDefault();
  event.dataTransfer.dropEffect = "copy";
});
document.addEventListener("drop", (event) => {
  over(0);
  if (!carriesFiles(event)) return;
  event.preventDefault();
  add(event.dataTransfer.files);
});

chooser.addEventListener("change", () => choose(chooser.value));
one("button", gone).addEventListener("click", tryAgain);
tokenForm.addEventListener("submit", (event) => {
  event.preventDefault();
  const entered = tokenField.value.trim();
  if (!/^[\x21-\x7e]+$/.test(entered)) {
    one("#token-said").textContent = "A token has plain letters, digits and signs only, without spaces.";
    return;
  }
  rememberToken(entered);
  tokenField.value = "";
  tokenForm.hidden = true;
  tryAgain();
  picker.focus();
});

showCommand();
start();

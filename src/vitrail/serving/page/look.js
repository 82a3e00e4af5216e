// One model's look at one photo: its answer, and where it looked.

import { isWhole, paintOverlay, paintRamp, readMap } from "./attention_map.js";
import { Trouble, ask, takeTurn, understood } from "./server.js";
import { count, hasRivals, isUnsure, linesInWords, percent, setInWords, timingInWords } from "./words.js";

const TOP = 5; // lines of an answer, where a task has many
const COVERAGE = 0.95; // of the set of labels, where the model gives one
const SMALL = 128; // pixels of a photo that is enlarged as it is, without smoothing

export class Look {
  /** `model` is null until the models are known. `card` holds the photo, and what all its looks share. */
  constructor(card, model) {
    Object.assign(this, { card, model, state: "new", lines: null, labels: [], strange: false, timing: null, trouble: null, wait: 0 });
    const maps = new Map(); // by layer: each is fetched once
    Object.assign(this, { layer: model?.layers ?? null, maps, mapTrouble: null, isFetching: false, drawn: null });
    this.root = document.querySelector("#look").content.firstElementChild.cloneNode(true);
    this.canvas = this.one(".stage canvas");
    this.setStage();
    if (model) {
      this.root.setAttribute("aria-label", model.name);
      this.one("h3").textContent = model.name;
    }
    for (const button of this.root.querySelectorAll(".again")) button.addEventListener("click", () => this.again());
    this.one("summary").addEventListener("click", (event) => {
      event.preventDefault(); // all looks of a card are folded and unfolded together
      card.unfold(!card.isUnfolded);
    });
    this.one(".strength").addEventListener("input", (event) => card.setStrength(Number(event.target.value)));
    this.one(".layer").addEventListener("input", (event) => {
      Object.assign(this, { layer: Number(event.target.value), mapTrouble: null });
      this.paint();
      this.fetchMaps(true);
    });
    paintRamp(this.one(".ramp"));
  }

  one(selector) {
    return this.root.querySelector(selector);
  }

  setStage() {
    const stage = this.one(".stage");
    const { photo, name } = this.card;
    if (photo) {
      const { naturalWidth: width, naturalHeight: height } = photo;
      const image = Object.assign(new Image(), { src: photo.src, alt: name });
      stage.style.setProperty("--ratio", width / height);
      image.classList.toggle("small", Math.max(width, height) < SMALL);
      stage.prepend(image);
    } else {
      stage.classList.add("blank");
      stage.prepend("No preview");
    }
  }

  /** Asks for what is not known yet, and shows what is. */
  async start() {
    const { signal } = this.card.stopped;
    this.paint();
    if (!this.model || this.state !== "new") {
      this.fetchMaps();
      return;
    }
    this.state = "queued";
    this.paint();
    try {
      await takeTurn(async () => {
        signal.throwIfAborted();
        await this.card.checkReadable();
        this.state = "asked";
        this.paint();
        // A model without a task is asked for its embedding: whether the file is an image, and how long it takes.
        const set = this.model.coverage ? `coverage=${COVERAGE}&` : "";
        const verb = this.model.task ? `predict?top=${TOP}&${set}` : "embed?";
        const response = await ask(`/v1/${verb}model=${encodeURIComponent(this.model.name)}`, this.request(signal));
        const { lines, set: labels, unknown, timing } = await understood(response, (answer) => answer.json());
        const strange = unknown === true;
        Object.assign(this, { state: "done", lines: lines ?? [], labels: labels ?? [], strange, timing });
      });
    } catch (error) {
      if (signal.aborted) return; // the card was closed, and may be open again by now
      Object.assign(this, { state: "failed", trouble: error, wait: 0 });
      if (!(error instanceof Trouble)) throw error;
      this.card.hooks.tell(error);
    }
    this.paint();
    this.card.compare();
    if (this.root.isConnected) this.card.announce(this, this.inWords());
    if (this.state === "done") this.fetchMaps();
  }

  request(signal) {
    const waiting = (seconds) => { this.wait = seconds; this.paint(); };
    return { body: this.card.file, signal, waiting };
  }

  /** Fetches the map of the wanted layer, once the answer is there and the card is unfolded; then any wanted since. */
  async fetchMaps(urgent = false) {
    const { signal } = this.card.stopped;
    const isWanted = this.model?.attention && this.card.photo && this.card.isUnfolded && this.state === "done";
    if (!isWanted || this.isFetching || this.mapTrouble || this.maps.has(this.layer)) return;
    this.isFetching = true;
    this.paint();
    try {
      while (!this.maps.has(this.layer)) {
        await takeTurn(async () => {
          signal.throwIfAborted();
          const { layer } = this;
          const which = layer === null ? "" : `&layer=${layer}`;
          const path = `/v1/attention?model=${encodeURIComponent(this.model.name)}${which}`;
          const response = await ask(path, this.request(signal));
          this.maps.set(layer, await understood(response, readMap));
        }, urgent);
        this.paint();
      }
      if (this.root.isConnected && this.card.isUnfolded) this.card.announce(this, "where it looked is shown");
    } catch (error) {
      if (signal.aborted) return;
      Object.assign(this, { mapTrouble: error, wait: 0 });
      if (!(error instanceof Trouble)) throw error;
      this.card.hooks.tell(error);
      if (this.root.isConnected) this.card.announce(this, `no map: ${error.message}`);
    } finally {
      if (!signal.aborted) this.isFetching = false;
    }
    this.paint();
  }

  /** Forgets what is under way, so that it is asked for again should the card come back. */
  stop() {
    if (["queued", "asked"].includes(this.state)) this.state = "new";
    Object.assign(this, { isFetching: false, wait: 0 });
  }

  again() {
    if (!this.model) {
      this.card.hooks.tryAgain();
      return;
    }
    if (this.state === "failed") Object.assign(this, { state: "new", trouble: null });
    this.mapTrouble = null;
    this.start();
  }

  get mayBeTriedAgain() {
    return Boolean(this.trouble?.mayPass || this.mapTrouble?.mayPass);
  }

  /** Everything on it, from what is known. */
  paint() {
    const { model, state, lines } = this;
    const isPending = ["new", "queued", "asked"].includes(state);
    this.root.classList.toggle("failed", state === "failed");
    this.root.setAttribute("aria-busy", String(isPending));
    this.one(".found").hidden = model !== null && !model.task;
    if (this.listed !== lines || !lines) {
      const isRanked = model === null || hasRivals(model.task);
      const room = Array(model?.lines ?? TOP).fill(null); // null is room for a line
      this.one(".found").setAttribute("aria-hidden", String(lines === null));
      this.one(".ranked").hidden = !isRanked;
      this.one(".parts").hidden = isRanked;
      if (isRanked) this.paintRanked(lines ?? room);
      else this.paintParts(lines ?? room);
      this.listed = lines;
    }
    this.one(".strange").hidden = !this.strange;
    this.one(".set").hidden = !model?.coverage; // its room is kept until it is there
    this.one(".set").textContent = this.labels.length > 0 ? setInWords(this.labels, COVERAGE) : "";
    this.one(".without").hidden = model === null || Boolean(model.task) || isPending;
    const numbers = count(model?.embedding ?? 0, "number");
    this.one(".without").textContent = `This model has no classes: it gives ${numbers}.`;
    this.one(".trouble").hidden = state !== "failed";
    this.one(".trouble p").textContent = this.trouble?.message ?? "";
    this.one(".trouble .again").hidden = !["gone", "busy"].includes(this.trouble?.kind); // a token has its own form
    this.one(".status").hidden = !isPending;
    this.one(".status").textContent = this.status();
    this.paintLooked();
  }

  status() {
    if (this.wait > 0) return `The server is busy. Trying again in ${this.wait} s…`;
    return { new: "Waiting for the server…", queued: "Waiting for its turn…", asked: "Looking…" }[this.state] ?? "";
  }

  /** The best line large, with "unsure" where another label is close; the others with bars. */
  paintRanked([best = null, ...others]) {
    this.one(".best .label").textContent = best?.name ?? "\u00a0";
    this.one(".best b").textContent = best?.text ?? "";
    this.one(".best + .bar").style.setProperty("--share", best?.share ?? 0);
    const unsure = best !== null && this.model.task === "labels" && isUnsure([best, ...others]);
    this.one(".unsure").hidden = !unsure;
    this.one(".unsure .unseen").textContent = unsure ? `: ${others[0].name} is almost as likely` : "";
    this.one(".guesses").hidden = others.length === 0;
    this.one(".guesses").replaceChildren(...others.map((line) => listItem(line)));
  }

  /** All lines alike: a bar where there is a share, and a mark for what was chosen where not all is. */
  paintParts(lines) {
    const isChoice = this.model.task === "tags" || lines.some((line) => line && !line.is_chosen);
    const isNothing = isChoice && lines.length > 0 && lines.every((line) => line && !line.is_chosen);
    this.one(".nothing").hidden = !isNothing;
    this.one(".parts ul").replaceChildren(...lines.map((line) => {
      const item = listItem(line);
      item.classList.toggle("plain", line !== null && line.share === null);
      item.classList.toggle("chosen", line?.is_chosen ?? false);
      if (isChoice) item.prepend(mark(line?.is_chosen ?? false));
      return item;
    }));
  }

  /** The part that is folded at first. */
  paintLooked() {
    const { model, card } = this;
    const map = this.maps.get(this.layer);
    const isOffered = this.offersMaps;
    const isPending = isOffered && card.isUnfolded && !map && !this.mapTrouble && this.state !== "failed";
    const details = this.one(".looked");
    details.open = card.isUnfolded;
    details.setAttribute("aria-busy", String(isPending));
    this.one(".told").textContent = this.told(map, isPending);
    this.one(".told").classList.toggle("pending", isPending);
    this.one(".looked .again").hidden = !["gone", "busy"].includes(this.mapTrouble?.kind);
    // Sliders for an overlay that is not there would be a lie: their room is kept until the first map has come.
    const controls = this.one(".controls");
    controls.hidden = !isOffered;
    controls.classList.toggle("unknown", this.maps.size === 0);
    controls.inert = this.maps.size === 0;
    this.one(".layers").hidden = model !== null && !(model.layers > 1);
    this.one(".layer").max = model?.layers ?? 1;
    setRange(this.one(".layer"), this.layer ?? 1, this.layer === null ? "" : `${this.layer} of ${model.layers}`);
    setRange(this.one(".strength"), card.strength, `${card.strength}%`);
    this.one(".high").textContent = map?.peak > 0 ? `${percent(map.peak)} on a patch` : "most";
    this.one(".timing").textContent = this.timing ? timingInWords(this.timing) : "\u00a0";
    this.one(".badge").hidden = !isPending || this.drawn !== null || this.state !== "done";
    this.paintMap(map);
  }

  get offersMaps() {
    return Boolean(this.card.photo) && (this.model === null || this.model.attention);
  }

  told(map, isPending) {
    if (this.model && !this.model.attention) return "This model shows no attention: answers only.";
    if (!this.card.photo) return "There is no preview to show it on.";
    if (this.mapTrouble) return `No map: ${this.mapTrouble.message}`;
    if (isPending && this.wait > 0 && this.state === "done") return this.status();
    if (isPending && this.state !== "done") return "The answer comes first…";
    if (isPending) return this.drawn ? `Working out layer ${this.layer}…` : "Working out where it looked…";
    const layer = this.layer === null ? "" : ` up to layer ${this.layer}`;
    const part = map && !isWhole(map.box) ? ", within the frame" : ""; // one line, whether or not
    return `Attention rollout${layer}${part}.`;
  }

  paintMap(map) {
    const { canvas, card } = this;
    canvas.style.opacity = card.strength / 100;
    canvas.hidden = !card.isUnfolded || (!map && !this.drawn); // while another layer is on its way, the last one stays
    if (!map || this.drawn === map) return;
    this.drawn = map;
    canvas.setAttribute("aria-label", `${card.name}: where ${this.model.name} looked, lighter is more`);
    paintOverlay(canvas, map);
  }

  inWords() {
    if (this.state === "failed") return this.trouble.message;
    const doubt = this.strange ? "does not look like anything the model was trained on; " : "";
    return doubt + (this.lines.length === 0 ? "looked at" : linesInWords(this.model.task, this.lines));
  }
}

/** A line of an answer as an item: its name, a bar where it has a share, its value. */
function listItem(line) {
  const item = document.createElement("li");
  const [words, bar, value] = ["span", "i", "b"].map((tag) => document.createElement(tag));
  Object.assign(words, { textContent: line?.name ?? "\u00a0", dir: "auto" });
  Object.assign(value, { textContent: line?.text ?? "", dir: "auto" });
  bar.className = "bar";
  bar.style.setProperty("--share", line?.share ?? 0);
  item.append(words, bar, value);
  return item;
}

/** A tick for what was chosen, which the eye finds, and a word for ears before what was not. */
function mark(isChosen) {
  const tick = Object.assign(document.createElement("i"), { className: "tick", textContent: isChosen ? "\u2713" : "" });
  tick.setAttribute("aria-hidden", "true");
  const words = Object.assign(document.createElement("span"), { className: "unseen", textContent: "not chosen: " });
  const both = document.createDocumentFragment();
  both.append(tick, ...(isChosen ? [] : [words]));
  return both;
}

function setRange(control, value, words) {
  control.value = value;
  control.setAttribute("aria-valuetext", words);
  control.parentElement.querySelector("output").textContent = words;
}

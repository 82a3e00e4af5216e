// One photo on the page, with the looks of one model or of two side by side.

import { Look } from "./look.js";
import { Trouble } from "./server.js";
import { essence } from "./words.js";

let made = 0;
let lastStrength = 35; // per cent; new cards take over what was set last

export class Card {
  /**
   * `photo` is an image that has loaded, or null where the browser cannot show the file. `hooks` are functions of the
   * page: announce(words), tell(trouble), tryAgain() and closed(card).
   */
  constructor(file, photo, hooks) {
    Object.assign(this, { file, photo, hooks, looks: new Map(), shown: [], stopped: new AbortController() });
    this.name = file.name || "pasted image";
    this.strength = lastStrength;
    this.isUnfolded = false;
    this.isOpen = false;
    this.root = document.querySelector("#card").content.firstElementChild.cloneNode(true);
    this.heading = this.root.querySelector("h2");
    this.closer = this.root.querySelector(".close");
    this.heading.id = `name-${++made}`;
    this.heading.textContent = this.heading.title = this.name;
    this.root.setAttribute("aria-labelledby", this.heading.id);
    this.closer.setAttribute("aria-label", `Close ${this.name}`);
    this.closer.addEventListener("click", () => this.hooks.closed(this));
  }

  /** Shows the looks of these models, and asks for what they have not answered yet. Without models: why there are none. */
  show(models, trouble = null) {
    this.shown = (models.length > 0 ? models : [null]).map((model) => {
      if (!this.looks.has(model)) this.looks.set(model, new Look(this, model));
      return this.looks.get(model);
    });
    if (models.length === 0) Object.assign(this.shown[0], { state: trouble ? "failed" : "new", trouble });
    const place = this.root.querySelector(".looks");
    place.replaceChildren(...this.shown.map((look) => look.root));
    place.classList.toggle("two", this.shown.length > 1);
    for (const look of this.shown) {
      look.root.querySelector("h3").hidden = this.shown.length < 2;
      if (this.isOpen) look.start();
      else look.paint();
    }
    this.compare();
  }

  /** Says of two answers to the same question whether they are the same. */
  compare() {
    const [first, second] = this.shown.map((look) => (look.lines?.length > 0 ? essence(look.lines) : null));
    const isKnown = typeof first === "string" && typeof second === "string";
    const verdict = this.root.querySelector(".verdict");
    const isFair = this.shown.length > 1 && this.shown[0].model.task === this.shown[1].model.task;
    verdict.hidden = !isFair;
    verdict.textContent = !isKnown ? "\u00a0" : first === second ? `Both say ${first || "none"}.` : "They differ.";
  }

  /** A folder, or a file that has changed on the disk, must not look like a server that is gone. */
  async checkReadable() {
    try {
      await this.file.slice(0, 1).arrayBuffer();
    } catch {
      throw new Trouble("refused", "The browser cannot read this file. Is it a folder, or has it been moved?");
    }
  }

  announce(look, words) {
    const who = this.shown.length > 1 ? `${this.name}, ${look.model.name}` : this.name;
    this.hooks.announce(`${who}: ${words}`);
  }

  unfold(isUnfolded) {
    this.isUnfolded = isUnfolded;
    for (const look of this.shown) {
      look.paint();
      look.fetchMaps(true);
    }
  }

  setStrength(strength) {
    lastStrength = this.strength = strength;
    for (const look of this.shown) look.paint();
  }

  /** Once more whatever failed for a reason that may have passed. */
  tryAgain() {
    for (const look of this.shown) {
      if (look.mayBeTriedAgain) look.again();
    }
  }

  open() {
    this.isOpen = true;
    if (this.stopped.signal.aborted) this.stopped = new AbortController();
    for (const look of this.shown) look.start();
  }

  /** Leaves the page. What is under way ends; what is known is kept. */
  close() {
    this.isOpen = false;
    this.stopped.abort();
    for (const look of this.looks.values()) look.stop();
    this.root.remove();
  }

  /** Closes it, and lets go of the photo. */
  discard() {
    this.close();
    if (this.photo) URL.revokeObjectURL(this.photo.src);
  }
}

// The strip of recent photos: a toolbar of thumbnails, one stop for the Tab key, arrows within it.

const SIDE = 112; // pixels of a thumbnail, for screens that show two for one

export class Strip {
  /** `onShow` and `onRemove` are called with a card. */
  constructor(root, { onShow, onRemove }) {
    Object.assign(this, { root, onShow, onRemove, items: new Map() });
    root.addEventListener("keydown", (event) => this.move(event));
    root.addEventListener("focusin", (event) => this.setStop(event.target));
  }

  /** Adds a card after another one, or at the front. */
  add(card, previous) {
    const item = document.querySelector("#thumbnail").content.firstElementChild.cloneNode(true);
    const [show, remove] = item.querySelectorAll("button");
    if (card.photo) paintThumbnail(show.querySelector("canvas"), card.photo);
    else show.classList.add("blank");
    show.title = card.name;
    remove.setAttribute("aria-label", `Remove ${card.name}`);
    show.addEventListener("click", () => this.onShow(card));
    remove.addEventListener("click", () => this.onRemove(card));
    this.items.set(card, item);
    const before = this.items.get(previous);
    if (before) before.after(item);
    else this.root.prepend(item);
    this.refresh();
  }

  /** Takes a card out; the focus, if it was there, goes to the next, and where there is none, false is returned. */
  remove(card) {
    const item = this.items.get(card);
    const hadFocus = item.contains(document.activeElement);
    const next = item.nextElementSibling ?? item.previousElementSibling;
    item.remove();
    this.items.delete(card);
    this.refresh();
    if (hadFocus && next && !this.root.hidden) next.querySelector("button").focus();
    return !hadFocus || (Boolean(next) && !this.root.hidden);
  }

  focus(card) {
    this.items.get(card).querySelector("button").focus();
  }

  /** Says which cards are closed. A single open photo needs no strip. */
  refresh() {
    for (const [card, item] of this.items) {
      item.classList.toggle("closed", !card.isOpen);
      const words = card.isOpen ? `Go to ${card.name}` : `Open ${card.name} again`;
      item.querySelector("button").setAttribute("aria-label", words);
    }
    this.root.hidden = this.items.size < 2 && [...this.items.keys()].every((card) => card.isOpen);
    if (!this.root.querySelector("[tabindex='0']")) this.setStop(this.root.querySelector("button"));
  }

  setStop(button) {
    for (const other of this.root.querySelectorAll("button")) other.tabIndex = other === button ? 0 : -1;
  }

  move(event) {
    const buttons = [...this.root.querySelectorAll("button")];
    const place = buttons.indexOf(event.target);
    const steps = { ArrowRight: place + 1, ArrowLeft: place - 1, Home: 0, End: buttons.length - 1 };
    if (event.key in steps) {
      event.preventDefault();
      buttons[Math.min(Math.max(steps[event.key], 0), buttons.length - 1)].focus();
    } else if (event.key === "Delete") {
      const item = event.target.closest(".thumbnail");
      for (const [card, its] of [...this.items]) if (its === item) this.onRemove(card);
    }
  }
}

/** The middle of the photo, so that the full one need not be decoded for each thumbnail. */
function paintThumbnail(canvas, photo) {
  const { naturalWidth: width, naturalHeight: height } = photo;
  const side = Math.min(width, height);
  canvas.width = canvas.height = SIDE;
  const context = canvas.getContext("2d");
  context.imageSmoothingQuality = "high";
  context.drawImage(photo, (width - side) / 2, (height - side) / 2, side, side, 0, 0, SIDE, SIDE);
}

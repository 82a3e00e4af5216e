// The page of the server: photos in, answers and what the models attended to out. Modules, so strict by themselves.

import { Card } from "./card.js";
import { Trouble, ask, door, hasToken, isLocked, understood, useToken } from "./server.js";
import { Strip } from "./strip.js";
import { factsInWords } from "./words.js";

const one = (selector, root = document) => root.querySelector(selector);
const [picker, chooser, versus] = [one(".drop input"), one("#model"), one("#versus")];
const [gone, tokenForm, tokenField, tokenSaid] = [one(".gone"), one(".token"), one("#token"), one("#token-said")];

const cards = []; // the newest first, as they are shown; closed ones too
const strip = new Strip(one(".strip"), { onShow: goTo, onRemove: remove });
let models = [];
let modelsAsTold = ""; // whether a server that was gone has come back as another
let chosen = []; // one of the models, or two to compare
let startTrouble = null; // why the models are not known
let adding = Promise.resolve();

// What is said

const hooks = { announce, tell, tryAgain, closed: close };

function announce(words) {
  const region = one("#announced");
  region.append(Object.assign(document.createElement("p"), { textContent: words }));
  while (region.childElementCount > 20) region.firstElementChild.remove();
}

/** What a trouble of one request means for the whole page. A locked door has its own event. */
function tell({ kind, message }) {
  if (kind === "gone" || (kind !== "token" && models.length === 0)) {
    one(".said", gone).textContent = message;
    gone.hidden = false;
  }
}

door.addEventListener("answered", () => { gone.hidden = true; }); // whatever it says, it is there
door.addEventListener("locked", () => {
  tokenSaid.textContent = hasToken() ? "The server did not accept this token." : "It is kept for this tab only.";
  tokenForm.hidden = false;
  tokenField.focus();
  tokenField.select();
  showCommand();
});

/** What a program would send, with a token where the server wants one. */
function showCommand() {
  const shown = hasToken() || !tokenForm.hidden ? '-H "Authorization: Bearer TOKEN" ' : "";
  const verb = chosen.length > 0 && chosen[0].task !== "labels" ? (chosen[0].task ? "predict" : "embed") : "classify";
  one("#command").textContent = `curl ${shown}-F files=@photo.jpg ${location.origin}/v1/${verb}`;
}

// Models

/** Asks which models there are. Cards made before that is known show why. */
async function start() {
  startTrouble = null;
  try {
    const told = await understood(await ask("/v1/models"), (response) => response.text());
    if (told === modelsAsTold) return;
    const { models: found, default: first } = await understood(told, JSON.parse);
    [models, modelsAsTold] = [found, told];
    chooser.replaceChildren(...models.map(({ name }) => new Option(name, name)));
    one(".choices").hidden = models.length < 2;
    choose(first, "");
  } catch (error) {
    if (!(error instanceof Trouble)) throw error;
    startTrouble = error;
    tell(error);
    if (models.length === 0) for (const card of cards) card.show([], error);
  }
}

/** Takes a model for all cards, and a second one to compare it with, or "". */
function choose(name, other) {
  const first = models.find((model) => model.name === name) ?? models[0];
  const second = models.find((model) => model.name === other && model !== first);
  chosen = second ? [first, second] : [first];
  const others = models.filter((model) => model !== first);
  versus.replaceChildren(new Option("nothing", ""), ...others.map((model) => new Option(model.name, model.name)));
  [chooser.value, versus.value] = [first.name, second?.name ?? ""];
  const facts = chosen.map((model) => {
    const isNamed = models.length < 2 || second;
    return (isNamed ? `${model.name} · ` : "") + factsInWords(model);
  });
  one(".facts").textContent = facts.join("\n");
  showCommand();
  for (const card of cards) card.show(chosen);
}

/** Once more whatever failed for a reason that may have passed. */
async function tryAgain() {
  gone.hidden = true;
  await start();
  if (startTrouble) return;
  for (const card of cards) if (card.isOpen) card.tryAgain();
}

chooser.addEventListener("change", () => {
  // Choosing the model that stands on the other side makes the two change places.
  choose(chooser.value, chooser.value === versus.value ? chosen[0].name : versus.value);
});
versus.addEventListener("change", () => choose(chooser.value, versus.value));

// Photos

/**
 * Files become cards one after the other, so that order holds; each is made once its photo's shape is known. Those that
 * come together stand above all that came before, in their own order.
 */
function add(files) {
  let previous = null;
  for (const file of files) {
    adding = adding.then(async () => {
      const card = new Card(file, await photoOf(file), hooks);
      cards.splice(cards.indexOf(previous) + 1, 0, card);
      card.show(chosen, startTrouble);
      open(card);
      strip.add(card, previous);
      document.body.classList.add("some");
      previous = cards.includes(card) ? card : null;
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

/** Puts a card on the page, in the order of all. */
function open(card) {
  const next = cards.slice(cards.indexOf(card) + 1).find((other) => other.isOpen);
  one(".cards").insertBefore(card.root, next?.root ?? null);
  card.open();
}

/** Shows the card of a thumbnail, where it is or once more. */
function goTo(card) {
  if (!card.isOpen) open(card);
  strip.refresh();
  const isCalm = matchMedia("(prefers-reduced-motion: reduce)").matches;
  card.root.scrollIntoView({ behavior: isCalm ? "auto" : "smooth", block: "start" });
  card.heading.focus({ preventScroll: true });
}

function close(card) {
  const next = cards.slice(cards.indexOf(card) + 1).find((other) => other.isOpen);
  const previous = cards.findLast((other) => other.isOpen && other !== card);
  card.close();
  strip.refresh();
  announce(`${card.name} closed`);
  const neighbour = next ?? previous;
  if (neighbour) neighbour.closer.focus(); // who works by keyboard is not sent back to the top
  else strip.focus(card);
}

function remove(card) {
  cards.splice(cards.indexOf(card), 1);
  card.discard();
  document.body.classList.toggle("some", cards.length > 0);
  announce(`${card.name} removed`);
  if (!strip.remove(card)) picker.focus();
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

// The server's door

one("button", gone).addEventListener("click", tryAgain);
tokenForm.addEventListener("submit", async (event) => {
  event.preventDefault();
  const entered = tokenField.value.trim();
  if (!/^[\x21-\x7e]+$/.test(entered)) {
    tokenSaid.textContent = "A token has plain letters, digits and signs only, without spaces.";
    return;
  }
  useToken(entered);
  tokenSaid.textContent = "Asking the server…";
  await tryAgain();
  if (isLocked()) return;
  tokenSaid.textContent = "It is kept for this tab only.";
  if (startTrouble) return;
  tokenField.value = "";
  tokenForm.hidden = true;
  picker.focus();
});

showCommand();
start();

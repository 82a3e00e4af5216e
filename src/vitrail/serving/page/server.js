// Talking to the server: requests, their tries, their troubles, the token.

import { megabytes, sentence } from "./words.js";

const AT_ONCE = 3; // requests in the air; the others wait here rather than in the server's queue
const MOST_REFUSALS = 20; // "too busy" answers to one request before the person is asked whether to go on
const LONGEST_WAIT = 30; // seconds until a refused request is sent again, whatever the server asks for
const LARGE = 5_000_000; // bytes of a file that may have been too large when a connection breaks
const KEPT_TOKEN = "vitrail-token";

/** Tells "answered" when the server has said anything, and "locked" when it has refused the token in use. */
export const door = new EventTarget();

let token = rememberedToken();
let refusedToken = null; // what the server did not let in; with it nothing more is asked

/** Why a request has no result. Kinds: gone, token, busy (all worth another try), refused. */
export class Trouble extends Error {
  constructor(kind, message) {
    super(message);
    this.kind = kind;
  }

  get mayPass() {
    return ["gone", "token", "busy"].includes(this.kind);
  }
}

/** Whether the server waits for a token, or for another one. */
export const isLocked = () => refusedToken === token;
export const hasToken = () => token !== "";

/** Takes a token for all further requests: for this tab, or where the browser forbids that, for the open page. */
export function useToken(entered) {
  [token, refusedToken] = [entered, null];
  try {
    sessionStorage.setItem(KEPT_TOKEN, entered);
  } catch {
    // It is forbidden: the variable has to do.
  }
}

/** The answer to a request, after as many tries as a busy server asks for. `waiting` is told the seconds until each. */
export async function ask(path, { body, signal, waiting = () => {} } = {}) {
  for (let refusals = 0; ; refusals++) {
    if (isLocked()) throw lockedOut();
    const sentWith = token;
    const response = await send(path, body, signal);
    if (response.ok) return response;
    if (response.status === 401) {
      if (sentWith === token && !isLocked()) {
        refusedToken = token;
        door.dispatchEvent(new Event("locked"));
      }
      continue; // with the token that has been entered since; otherwise it ends above
    }
    if (response.status !== 429 || refusals === MOST_REFUSALS) throw await troubleOf(response);
    const asked = Number(response.headers.get("Retry-After"));
    const seconds = Math.min(asked > 0 ? asked : 1, LONGEST_WAIT);
    waiting(seconds);
    await pause(seconds, signal);
    waiting(0);
  }
}

/** JSON or whatever else `read` makes of an answer; one that breaks off or is something else is told in words. */
export async function understood(response, read) {
  try {
    return await read(response);
  } catch (error) {
    if (error.name === "AbortError") throw error;
    throw new Trouble("gone", "The answer of the server broke off, or is not what this page understands.");
  }
}

/** Runs a task when fewer than AT_ONCE run; urgent ones go before those that wait. */
export const takeTurn = turns(AT_ONCE);

function lockedOut() {
  return new Trouble("token", "This server asks for a token. Enter it above to go on.");
}

async function send(path, body, signal) {
  const headers = {};
  if (token) headers.Authorization = `Bearer ${token}`;
  if (body) headers["Content-Type"] = body.type.startsWith("image/") ? body.type : "application/octet-stream";
  try {
    const response = await fetch(path, { method: body ? "POST" : "GET", headers, body, signal, cache: "no-store" });
    door.dispatchEvent(new Event("answered"));
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
  const kind = { 429: "busy", 503: "busy" }[response.status] ?? "refused";
  return new Trouble(kind, sentence(message));
}

function rememberedToken() {
  try {
    return sessionStorage.getItem(KEPT_TOKEN) ?? "";
  } catch {
    return "";
  }
}

/** Resolves after so many seconds, or at once when the server locks its door: then there is nothing to wait for. */
function pause(seconds, signal) {
  return new Promise((resolve, reject) => {
    const timer = setTimeout(resolve, seconds * 1000);
    const end = (finish, value) => { clearTimeout(timer); finish(value); };
    signal?.addEventListener("abort", () => end(reject, signal.reason), { once: true });
    door.addEventListener("locked", () => end(resolve), { once: true });
  });
}

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

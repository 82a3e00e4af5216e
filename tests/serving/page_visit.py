"""The server's page in a real browser, for tests: how to open it, give it photos, and read what it shows."""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from itertools import combinations
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any

import numpy as np
import pytest
from PIL import Image
from stand_in import StandIn

if TYPE_CHECKING:
    from playwright.sync_api import Browser, Locator, Page

WIDE, PHONE = {"width": 1280, "height": 860}, {"width": 380, "height": 800}
HOSTILE = "<img src=x onerror=alert(1)><svg onload=alert(2)>"

# Violations of the policy and the life of object URLs, told or counted where tests see them.
WATCHED = """
    addEventListener("securitypolicyviolation", (event) => console.error("policy", event.violatedDirective));
    window.living = 0;
    const [make, revoke] = [URL.createObjectURL, URL.revokeObjectURL];
    URL.createObjectURL = (it) => { window.living++; return make.call(URL, it); };
    URL.revokeObjectURL = (it) => { window.living--; revoke.call(URL, it); };
"""
GIVEN = """([how, files]) => {
    const carried = new DataTransfer();
    for (const [name, type, bytes] of files) {
        carried.items.add(new File([Uint8Array.from(atob(bytes), (it) => it.charCodeAt(0))], name, { type }));
    }
    const place = document.querySelector(how === "beside" ? "h1" : ".drop");
    if (how === "paste") {
        document.dispatchEvent(new ClipboardEvent("paste", { clipboardData: carried, bubbles: true }));
        return [];
    }
    return ["dragenter", "dragover", "drop"].map((kind) => {
        const event = new DragEvent(kind, { dataTransfer: carried, bubbles: true, cancelable: true });
        place.dispatchEvent(event);
        return [event.defaultPrevented, document.body.classList.contains("over")];
    });
}"""
PLACES = """() => [...document.querySelectorAll(
    ".card, .frame, .stage img, .heading, .best, .guesses, .guesses li, summary, .line *, .legend, .told, footer")]
    .map((it) => it.getBoundingClientRect()).map((it) => [it.x, it.y, it.width, it.height])"""

# Boxes of all visible texts, bars and sliders on the cards: a name and, for each line of a text, its corners.
DRAWN = """() => {
    const all = document.createTreeWalker(document.querySelector(".cards"));
    const found = [];
    while (all.nextNode()) {
        const node = all.currentNode;
        const isText = node.nodeType === Node.TEXT_NODE && node.data.trim() !== "";
        if (!isText && !node.matches?.(".bar, input")) continue;
        const element = isText ? node.parentElement : node;
        if (!element.checkVisibility({ visibilityProperty: true }) || element.closest(".unseen")) continue;
        const range = document.createRange();
        if (isText) range.selectNodeContents(node);
        const boxes = [...(isText ? range : element).getClientRects()];
        found.push([isText ? node.data : element.className, boxes.map((it) => [it.left, it.top, it.right, it.bottom])]);
    }
    return found;
}"""


@contextmanager
def opened(window: Browser, stand: StandIn | SimpleNamespace, **options: Any) -> Iterator[Page]:
    """The page, in a window of its own. It asked this server alone, and had nothing to complain of but answers."""
    context = window.new_context(**{"viewport": WIDE, "reduced_motion": "reduce", **options})
    context.set_default_timeout(8000)
    context.add_init_script(WATCHED)
    page = context.new_page()
    requests: list[str] = []
    complaints: list[str] = []
    page.on("request", lambda request: requests.append(request.url))
    page.on("console", lambda said: complaints.append(said.text) if said.type in ("error", "warning") else None)
    page.on("pageerror", lambda error: complaints.append(str(error)))
    page.on("dialog", lambda dialog: (complaints.append(dialog.message), dialog.dismiss()))
    # File choosers are caught from the start: told of it only then, the browser may open one before it has heard.
    page.on("filechooser", lambda chooser: None)
    page.goto(stand.address)
    try:
        yield page
    finally:
        stand.open.set()
        context.close()
    assert [url for url in requests if not url.startswith((f"{stand.address}/", "blob:", "data:"))] == []
    assert [said for said in complaints if not said.startswith("Failed to load resource")] == []


def photo(width: int = 90, height: int = 60, seed: int = 0, kind: str = "PNG", **how: Any) -> bytes:
    """Middling colours, so that an overlay can make them lighter as well as darker."""
    pixels = np.random.default_rng(seed).integers(90, 160, (height, width, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, kind, **how)
    return file.getvalue()


def give(page: Page, *files: tuple[str, bytes], how: str = "drop") -> Any:
    made = [(name, "image/png", base64.b64encode(data).decode()) for name, data in files]
    return page.evaluate(GIVEN, [how, made])


def wait(page: Page, condition: Callable[[], bool]) -> None:
    """Until what this process can see is so."""
    for _ in range(400):
        if condition():
            return
        page.wait_for_timeout(20)
    pytest.fail("waited in vain")


def card(page: Page, name: str) -> Locator:
    return page.get_by_role("article", name=name, exact=True)


def find_overlaps(page: Page) -> list[tuple[str, str]]:
    """Return the pairs of texts, bars and sliders on the cards that are drawn over each other."""
    drawn = page.evaluate(DRAWN)
    assert drawn
    return [
        (name, other_name)
        for (name, boxes), (other_name, other_boxes) in combinations(drawn, 2)
        if any(overlap(box, other) for box in boxes for other in other_boxes)
    ]


def overlap(box: list[float], other: list[float]) -> bool:
    """Return whether two boxes (left, top, right, bottom) share more than a pixel each way."""
    width, height = (min(box[side + 2], other[side + 2]) - max(box[side], other[side]) for side in (0, 1))
    return width > 1 and height > 1


def answered(place: Locator) -> None:
    place.locator(".best b", has_text="62.0%").wait_for()


def unfold(place: Locator) -> None:
    """Opens "Where it looked", if it is not open."""
    if place.locator("details[open]").count() == 0:
        place.get_by_text("Where it looked", exact=True).first.click()


def overlaid(place: Locator) -> None:
    """Waits until the card shows where the model looked."""
    answered(place)
    unfold(place)
    place.locator(".stage canvas").first.wait_for()


def canvas(place: Locator) -> np.ndarray:
    """(height, width, 4): what is painted on it."""
    uri = place.locator(".stage canvas").evaluate("canvas => canvas.toDataURL()")
    return np.asarray(Image.open(io.BytesIO(base64.b64decode(uri.partition(",")[2]))))


def seen(place: Locator) -> np.ndarray:
    """(height, width, 3): the photo on the screen, with what lies over it."""
    return np.asarray(Image.open(io.BytesIO(place.locator(".stage").screenshot())).convert("RGB")).astype(int)


def guesses(place: Locator) -> list[list[str]]:
    """Labels and shares, the best first."""
    best = [place.locator(f".best {it}").inner_text() for it in (".label", "b")]
    others = place.locator(".guesses li").all_inner_texts()
    return [best, *([word for word in item.split("\n") if word] for item in others)]

"""The pictures of pages in the docs: python benchmarks/screenshot.py PAGE OUT.png [--height 1500] [--dark] [--image 2]

PAGE is a report or an address; it is opened in Chromium, and OUT.png is what a person sees at the top of it. For the
server's page: vitrail serve --model MODEL, then
python benchmarks/screenshot.py http://127.0.0.1:8000 docs/images/page.png --photos china.jpg flower.jpg --unfold 1 \
    --height 1250
with the two photographs inside scikit-learn.
"""

from __future__ import annotations

import argparse
import io
import shutil
from pathlib import Path

from PIL import Image
from playwright.sync_api import sync_playwright

if __name__ == "__main__":
    parser = argparse.ArgumentParser()
    parser.add_argument("page")
    parser.add_argument("out", type=Path)
    parser.add_argument("--width", type=int, default=1200)
    parser.add_argument("--height", type=int, default=1500)
    parser.add_argument("--image", type=int, default=1, help="which of the images of a report to choose")
    parser.add_argument("--from", dest="top", default=None, help="id of the section that stands at the top")
    parser.add_argument("--dark", action="store_true")
    parser.add_argument("--photos", type=Path, nargs="+", default=[], help="to give to the server's page")
    parser.add_argument("--unfold", type=int, nargs="+", default=[], help="photos, from 1, that show the attention")
    given = parser.parse_args()
    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=shutil.which("chromium"), args=["--no-sandbox"])
        page = browser.new_page(
            viewport={"width": given.width, "height": given.height}, color_scheme="dark" if given.dark else "light"
        )
        address = given.page if "://" in given.page else Path(given.page).resolve().as_uri()
        page.goto(address)
        if given.image > 1:
            for thumbnails in page.locator(".thumbnails").all():
                thumbnails.locator("button").nth(given.image - 1).click()
        if given.photos:
            page.locator("input[type=file]").first.set_input_files(given.photos)
            page.locator(".card").nth(len(given.photos) - 1).wait_for()
            for place in given.unfold:
                card = page.locator(".card").nth(place - 1)
                card.locator("summary").click()
                card.locator(".stage canvas").wait_for()
            page.wait_for_function("() => !document.querySelector('[aria-busy=true]')")
            page.mouse.move(0, 0)
            page.evaluate("document.activeElement.blur(); scrollTo(0, 0)")
        if given.top:
            page.evaluate("id => document.getElementById(id).scrollIntoView()", given.top)
            page.mouse.wheel(0, -40)
        page.wait_for_timeout(500)
        picture = Image.open(io.BytesIO(page.screenshot()))
        browser.close()
    given.out.parent.mkdir(parents=True, exist_ok=True)
    # What is drawn has few colours, and dots between them would show; a photograph has many, and steps would.
    dither = Image.Dither.FLOYDSTEINBERG if given.photos else Image.Dither.NONE
    palette = picture.convert("RGB").quantize(256)
    picture.convert("RGB").quantize(palette=palette, dither=dither).save(given.out, optimize=True)

"""Draw the map of rooms on the architecture page from the code itself: every room, what it is for, what it imports.

python tools/architecture_map.py            write the map into docs/architecture.md
python tools/architecture_map.py --check    fail where the page shows another map than the code has
"""

from __future__ import annotations

import ast
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
SOURCE, PAGE = ROOT / "src/vitrail", ROOT / "docs/architecture.md"
BEGIN, END = "<!-- map: written by tools/architecture_map.py -->", "<!-- end of map -->"
WIDTH = 20


def list_rooms() -> list[Path]:
    """Return the modules and packages directly inside the package, with code in them."""
    packages = [folder for folder in SOURCE.iterdir() if (folder / "__init__.py").is_file()]
    modules = [file for file in SOURCE.glob("*.py") if not file.name.startswith("__")]
    return packages + modules


def first_sentence(path: Path) -> str:
    """Return the first sentence of the docstring of a module or package."""
    file = path / "__init__.py" if path.is_dir() else path
    text = " ".join((ast.get_docstring(ast.parse(file.read_text())) or "").split("\n\n")[0].split())
    return re.split(r"(?<=\.)\s", text)[0].removesuffix(".")


def imported_rooms(room: Path) -> set[str]:
    """Return the names of the other rooms that a room imports from."""
    names: set[str] = set()
    for file in room.rglob("*.py") if room.is_dir() else [room]:
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ImportFrom) and node.module == "vitrail":
                names |= {alias.name for alias in node.names}
            elif isinstance(node, ast.ImportFrom) and (node.module or "").startswith("vitrail."):
                names.add(str(node.module).split(".")[1])
    return names - {room.stem, "__version__"}


def order_rooms(imports: dict[str, set[str]]) -> list[list[str]]:
    """Return the rooms in layers: each imports only from layers before its own."""
    layers: list[list[str]] = []
    done: set[str] = set()
    while len(done) < len(imports):
        layer = sorted(name for name, needs in imports.items() if name not in done and needs <= done)
        if not layer:
            raise SystemExit(f"rooms import each other in a circle: {', '.join(sorted(imports.keys() - done))}")
        layers.append(layer)
        done |= set(layer)
    return layers


def draw_map() -> str:
    """Return the map as Markdown: the layers, then each room with its purpose, its parts and what it imports."""
    rooms = {path.stem: path for path in list_rooms()}
    imports = {name: imported_rooms(path) & rooms.keys() for name, path in rooms.items()}
    layers = order_rooms(imports)
    shown = " ← ".join(layer[0] if len(layer) == 1 else "{" + ", ".join(layer) + "}" for layer in layers)
    lines = ["```", "src/vitrail/", f"  {'__init__.py':<{WIDTH}}{first_sentence(SOURCE)}"]
    for name in [name for layer in layers for name in layer]:
        path = rooms[name]
        lines.append(f"  {path.name + ('/' if path.is_dir() else ''):<{WIDTH}}{first_sentence(path)}")
        folders = sorted(folder for folder in path.glob("*/") if (folder / "__init__.py").is_file())
        lines += [f"    {folder.name + '/':<{WIDTH - 2}}{first_sentence(folder)}" for folder in folders]
    lines += ["```", "", f"Imports point one way: `{shown}`.", ""]
    lines += ["| room | imports from |", "|---|---|"]
    order = {name: number for number, name in enumerate(name for layer in layers for name in layer)}
    lines += [
        f"| `{name}` | {', '.join(sorted(imports[name], key=order.__getitem__)) or 'nothing'} |" for name in order
    ]
    return "\n".join(lines)


def main() -> None:
    """Write the map into the page, or compare it with the page."""
    text = PAGE.read_text()
    before, _, rest = text.partition(BEGIN)
    _, _, after = rest.partition(END)
    new = f"{before}{BEGIN}\n{draw_map()}\n{END}{after}"
    if "--check" in sys.argv[1:]:
        if new != text:
            raise SystemExit("docs/architecture.md shows another map: run python tools/architecture_map.py")
    else:
        PAGE.write_text(new)


if __name__ == "__main__":
    main()

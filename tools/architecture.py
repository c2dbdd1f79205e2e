"""The map in docs/architecture.md: which room imports which, as a picture, and what every file is for.

    python tools/architecture.py           write both
    python tools/architecture.py --check   exit with 1 if the text is not what the sources say

The graph is grimp's, the one that the layer contract is checked on; the words are the sources' own docstrings.
"""

import argparse
import ast
import sys
import tomllib
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "contextready"
PAGE, PICTURE = ROOT / "docs" / "architecture.md", ROOT / "docs" / "pictures" / "rooms.svg"
BEGIN, END = "<!-- written by tools/architecture.py: begin -->", "<!-- written by tools/architecture.py: end -->"

Edges = dict[str, set[str]]


def layers() -> list[list[str]]:
    """The rooms of the layer contract, highest first; modules beside the folders are left out."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = (c for c in settings["contracts"] if c["type"] == "layers")
    rows = [[name.strip() for name in layer.split("|")] for layer in contract["layers"]]
    rooms = [[name for name in row if (PACKAGE / name).is_dir()] for row in rows]
    return [row for row in rooms if row]


def imports() -> Edges:
    """For each room, the rooms that it imports directly."""
    graph = grimp.build_graph("contextready")
    rooms = {name for row in layers() for name in row}
    edges: Edges = {room: set() for room in rooms}
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            parts = [name.split(".")[1] for name in (module, imported) if name.count(".")]
            if len(parts) == 2 and parts[0] != parts[1] and set(parts) <= rooms:
                edges[parts[0]].add(parts[1])
    return edges


def reduced(edges: Edges) -> Edges:
    """Without the imports that a chain of others implies, for a picture that can be read."""

    def reach(room: str) -> set[str]:
        return edges[room].union(*(reach(below) for below in edges[room]))

    return {
        room: {below for below in all_below if not any(below in reach(other) for other in all_below - {below})}
        for room, all_below in edges.items()
    }


def draw(edges: Edges) -> None:
    """The rooms by layer, highest first, and the imports that no chain of others implies."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "contextready", "svg.fonttype": "none"}
    from matplotlib import pyplot

    rows = layers()
    place = {
        room: (2.6 * (i - (len(row) - 1) / 2), -1.15 * depth)
        for depth, row in enumerate(rows)
        for i, room in enumerate(row)
    }
    figure, axes = pyplot.subplots(figsize=(7.2, 0.95 * len(rows)), layout="constrained")
    box = {"boxstyle": "round,pad=0.45", "facecolor": "#eef3fb", "edgecolor": "#4a6fa5"}
    boxes = {
        room: axes.text(x, y, room, ha="center", va="center", fontsize=11, bbox=box).get_bbox_patch()
        for room, (x, y) in place.items()
    }
    for room, below in edges.items():
        for other in sorted(below):
            arrow = {"arrowstyle": "-|>", "color": "0.45", "linewidth": 1.0, "shrinkA": 2, "shrinkB": 3}
            arrow |= {"patchA": boxes[room], "patchB": boxes[other]}
            axes.annotate("", place[other], place[room], arrowprops=arrow)
    axes.set_xlim(-4.2, 4.2)
    axes.set_ylim(-1.15 * (len(rows) - 1) - 0.6, 0.6)
    axes.axis("off")
    figure.savefig(PICTURE, metadata={"Date": None})


def first_line(path: Path) -> str:
    """The first sentence of a module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]


def described(room: Path) -> str:
    """All of a room's docstring, on one line."""
    return " ".join((ast.get_docstring(ast.parse((room / "__init__.py").read_text())) or "").split())


def as_text(edges: Edges) -> str:
    """The table of imports and the list of files."""
    lines = ["| room | imports |", "|---|---|"]
    order = [room for row in layers() for room in row]
    lines += [f"| `{room}/` | {', '.join(sorted(edges[room], key=order.index)) or '—'} |" for room in order]
    for room in order:
        for folder in [PACKAGE / room, *sorted(p.parent for p in (PACKAGE / room).glob("*/__init__.py"))]:
            lines += ["", f"### `{folder.relative_to(PACKAGE)}/`", "", described(folder), ""]
            files = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
            lines += [f"- `{path.name}`: {first_line(path)}" for path in files]
    lines += ["", "### Beside the folders", ""]
    lines += [f"- `{path.name}`: {first_line(path)}" for path in sorted(PACKAGE.glob("*.py"))]
    return "\n".join(lines)


def main() -> int:
    """Write the page and the picture, or check the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is out of date")
    check = parser.parse_args().check
    edges, page = imports(), PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    new = f"{before}{BEGIN}\n\n{as_text(edges)}\n\n{END}{after}"
    if check:
        if new != page:
            print(f"{PAGE.relative_to(ROOT)} is out of date; run python tools/architecture.py", file=sys.stderr)
        return int(new != page)
    PAGE.write_text(new)
    draw(reduced(edges))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Write the generated parts of docs/architecture.md: a diagram of the packages, their imports, and a list of all files.

    python tools/architecture.py           write the page and the diagram
    python tools/architecture.py --check   exit with code 1 if the page does not match the sources

The imports come from grimp, which also checks the layer contract. The descriptions are the docstrings of the sources.
"""

import argparse
import ast
import sys
import tomllib
from pathlib import Path

import grimp

ROOT = Path(__file__).parent.parent
PACKAGE = ROOT / "src" / "contextready"
PAGE, PICTURE = ROOT / "docs" / "architecture.md", ROOT / "docs" / "pictures" / "packages.svg"
BEGIN, END = "<!-- written by tools/architecture.py: begin -->", "<!-- written by tools/architecture.py: end -->"

Edges = dict[str, set[str]]


def layers() -> list[list[str]]:
    """The packages of the layer contract, highest layer first; top-level modules are left out."""
    settings = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]
    (contract,) = (c for c in settings["contracts"] if c["type"] == "layers")
    rows = [[name.strip() for name in layer.split("|")] for layer in contract["layers"]]
    packages = [[name for name in row if (PACKAGE / name).is_dir()] for row in rows]
    return [row for row in packages if row]


def imports() -> Edges:
    """For each package, the packages that it imports directly."""
    graph = grimp.build_graph("contextready")
    packages = {name for row in layers() for name in row}
    edges: Edges = {package: set() for package in packages}
    for module in graph.modules:
        for imported in graph.find_modules_directly_imported_by(module):
            parts = [name.split(".")[1] for name in (module, imported) if name.count(".")]
            if len(parts) == 2 and parts[0] != parts[1] and set(parts) <= packages:
                edges[parts[0]].add(parts[1])
    return edges


def reduced(edges: Edges) -> Edges:
    """Remove the imports that a chain of other imports implies, so that the diagram is readable."""

    def reach(package: str) -> set[str]:
        return edges[package].union(*(reach(below) for below in edges[package]))

    return {
        package: {below for below in all_below if not any(below in reach(other) for other in all_below - {below})}
        for package, all_below in edges.items()
    }


def draw(edges: Edges) -> None:
    """Draw the packages by layer, highest layer first, with arrows for these imports."""
    import matplotlib

    matplotlib.use("Agg")
    matplotlib.rcParams |= {"svg.hashsalt": "contextready", "svg.fonttype": "none"}
    from matplotlib import pyplot

    rows = layers()
    place = {
        package: (2.6 * (i - (len(row) - 1) / 2), -1.15 * depth)
        for depth, row in enumerate(rows)
        for i, package in enumerate(row)
    }
    figure, axes = pyplot.subplots(figsize=(7.2, 0.95 * len(rows)), layout="constrained")
    box = {"boxstyle": "round,pad=0.45", "facecolor": "#eef3fb", "edgecolor": "#4a6fa5"}
    boxes = {
        package: axes.text(x, y, package, ha="center", va="center", fontsize=11, bbox=box).get_bbox_patch()
        for package, (x, y) in place.items()
    }
    for package, below in edges.items():
        for other in sorted(below):
            arrow = {"arrowstyle": "-|>", "color": "0.45", "linewidth": 1.0, "shrinkA": 2, "shrinkB": 3}
            arrow |= {"patchA": boxes[package], "patchB": boxes[other]}
            axes.annotate("", place[other], place[package], arrowprops=arrow)
    axes.set_xlim(-4.2, 4.2)
    axes.set_ylim(-1.15 * (len(rows) - 1) - 0.6, 0.6)
    axes.axis("off")
    figure.savefig(PICTURE, metadata={"Date": None})


def first_line(path: Path) -> str:
    """The first line of a module's docstring."""
    return (ast.get_docstring(ast.parse(path.read_text())) or "").splitlines()[0]


def described(package: Path) -> str:
    """The whole docstring of a package, on one line."""
    return " ".join((ast.get_docstring(ast.parse((package / "__init__.py").read_text())) or "").split())


def as_text(edges: Edges) -> str:
    """Write the table of imports and the list of files."""
    lines = ["| package | imports |", "|---|---|"]
    order = [package for row in layers() for package in row]
    lines += [f"| `{name}/` | {', '.join(sorted(edges[name], key=order.index)) or '—'} |" for name in order]
    for name in order:
        for folder in [PACKAGE / name, *sorted(p.parent for p in (PACKAGE / name).glob("*/__init__.py"))]:
            lines += ["", f"### `{folder.relative_to(PACKAGE)}/`", "", described(folder), ""]
            files = sorted(path for path in folder.glob("*.py") if path.name != "__init__.py")
            lines += [f"- `{path.name}`: {first_line(path)}" for path in files]
    lines += ["", "### Top-level modules", ""]
    lines += [f"- `{path.name}`: {first_line(path)}" for path in sorted(PACKAGE.glob("*.py"))]
    return "\n".join(lines)


def main() -> int:
    """Write the page and the diagram, or check the page."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true", help="write nothing; exit with 1 if the page is out of date")
    check = parser.parse_args().check
    edges, page = imports(), PAGE.read_text()
    before, _, rest = page.partition(BEGIN)
    _, _, after = rest.partition(END)
    new = f"{before}{BEGIN}\n\n{as_text(edges)}\n\n{END}{after}"
    if check:
        if new != page:
            print(f"{PAGE.relative_to(ROOT)} is out of date; run: python tools/architecture.py", file=sys.stderr)
        return int(new != page)
    PAGE.write_text(new)
    draw(reduced(edges))
    return 0


if __name__ == "__main__":
    sys.exit(main())

"""Build the notebooks from the manuscript: `python tools/build_notebooks.py [--check] [NAME …]`, NAME as in 01_ranks_and_messages.

A text of the reference becomes a notebook in notebooks/; a lesson becomes two, in solutions/ with its answers and in lessons/ without them
(how: see manuscript.py). Each is run, and brought into a form in which two builds are equal: counts from 1, streams of one kind merged, no
times. `--check` writes nothing and names what is stale in source, metadata or ids; whether the stored outputs still hold is nbval's to say.
"""

import argparse
import os
import sys
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

from manuscript import ROOT, ManuscriptError, read, without_answers

_CELL_TIMEOUT_SECONDS = 120


def as_it_is(notebook: NotebookNode) -> NotebookNode:
    """What the text says."""
    return notebook


BUILDS: list[tuple[str, str, Callable[[NotebookNode], NotebookNode]]] = [
    ("lesson", "solutions", as_it_is),
    ("lesson", "lessons", without_answers),
    ("reference", "notebooks", as_it_is),
]
"""From which folder of the manuscript to which of the course, what is done on the way. The start page lists lessons: they come first."""


def execute(notebook: NotebookNode, folder: Path) -> None:
    """Run all cells in a new kernel, and tidy what they put out."""
    metadata = notebook.metadata.copy()
    client = NotebookClient(
        notebook,
        timeout=_CELL_TIMEOUT_SECONDS,
        resources={"metadata": {"path": str(folder)}},
    )
    client.execute()
    notebook.metadata = metadata  # The kernel has added its version.
    cells = [cell for cell in notebook.cells if cell.cell_type == "code"]
    for count, cell in enumerate(cells, start=1):
        cell.metadata.pop("execution", None)
        cell.execution_count = count
        cell.outputs = _merged(cell.outputs)
        for output in cell.outputs:
            if output.output_type == "execute_result":
                output.execution_count = count
            # A stored view has no widget behind it: JupyterLab would show an error instead of the figure beside it.
            output.get("data", {}).pop("application/vnd.jupyter.widget-view+json", None)


def _merged(outputs: list[NotebookNode]) -> list[NotebookNode]:
    """Streams that follow each other under one name as one: how they are cut depends on the moment."""
    merged: list[NotebookNode] = []
    for output in outputs:
        if merged and output.output_type == merged[-1].output_type == "stream" and output.name == merged[-1].name:
            merged[-1].text += output.text
        else:
            merged.append(output)
    return merged


def without_outputs(notebook: NotebookNode) -> NotebookNode:
    """What the manuscript decides: sources, metadata, ids."""
    bare = nbformat.from_dict(notebook)
    for cell in bare.cells:
        if cell.cell_type == "code":
            cell.outputs, cell.execution_count = [], None
    return bare


def wanted() -> Iterator[tuple[Path, NotebookNode]]:
    """All notebooks of the course, as the manuscript says them."""
    for source, target, change in BUILDS:
        for text in sorted((ROOT / "manuscript" / source).glob("*.md")):
            yield ROOT / target / f"{text.stem}.ipynb", change(read(text))


def without_text(notebooks: dict[Path, NotebookNode]) -> list[Path]:
    """Notebooks whose text is gone."""
    return [path for _, target, _ in BUILDS for path in sorted((ROOT / target).glob("*.ipynb")) if path not in notebooks]


def stale(notebooks: dict[Path, NotebookNode]) -> list[Path]:
    """What is not as the manuscript says, is not there, or is there without a text."""
    changed = [
        path
        for path, notebook in notebooks.items()
        if not path.exists() or without_outputs(nbformat.read(path, as_version=4)) != nbformat.from_dict(notebook)
    ]
    return changed + without_text(notebooks)


def main() -> None:
    """Build all, or those that are named, or check all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME")
    parser.add_argument("--check", action="store_true")
    options = parser.parse_args()
    try:
        notebooks = dict(wanted())
    except ManuscriptError as error:
        sys.exit(str(error))
    if options.check:
        if paths := stale(notebooks):
            sys.exit("\n".join(f"{path.relative_to(ROOT)} is not what the manuscript says: run make notebooks" for path in paths))
        return
    unknown = set(options.names) - {path.stem for path in notebooks}
    if unknown:
        sys.exit(f"there is no text {', '.join(sorted(unknown))}. There are {', '.join(sorted({path.stem for path in notebooks}))}")
    with tempfile.TemporaryDirectory() as folder:
        # The course without anybody's work/: what its builder has done is not the reader's progress.
        os.symlink(ROOT / "lessons", f"{folder}/lessons")
        os.environ["ALLHANDS_COURSE"] = folder
        for path, notebook in notebooks.items():
            if not options.names or path.stem in options.names:
                execute(notebook, path.parent)
                nbformat.validate(notebook)
                nbformat.write(notebook, path)
                print("built", path.relative_to(ROOT), flush=True)
    if not options.names:
        for path in without_text(notebooks):
            path.unlink()
            print("removed", path.relative_to(ROOT))


if __name__ == "__main__":
    main()

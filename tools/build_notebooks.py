"""Build the notebooks from the manuscript: `python tools/build_notebooks.py [--check]`.

Each text becomes a notebook, is run, and is brought into a form in which two builds are equal: counts from 1, streams of one
kind merged, no times, ids that only depend on the section and the place in it. `--check` writes nothing and names what is stale in source,
metadata or ids; whether the stored outputs still hold is nbval's to say.
"""

import argparse
import hashlib
import sys
from pathlib import Path

import jupytext
import nbformat
from nbclient import NotebookClient
from nbformat import NotebookNode

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = {ROOT / "manuscript" / "reference": ROOT / "notebooks"}
_CELL_TIMEOUT_SECONDS = 120


def read(text: Path) -> NotebookNode:
    """The notebook that a text says, not yet run."""
    notebook = jupytext.read(text, fmt="md:myst")
    kernel = notebook.metadata["kernelspec"]
    notebook.metadata = NotebookNode(kernelspec=kernel, language_info=NotebookNode(name="python"))
    notebook.nbformat, notebook.nbformat_minor = 4, 5
    section, place = text.stem, 0
    for cell in notebook.cells:
        if cell.cell_type == "markdown" and cell.source.startswith("#"):
            section, place = cell.source.partition("\n")[0], 0
        cell.id = hashlib.sha256(f"{text.stem}/{section}/{place}".encode()).hexdigest()[:12]
        cell.metadata = NotebookNode({"tags": cell.metadata["tags"]} if "tags" in cell.metadata else {})
        place += 1
    return notebook


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


def main() -> None:
    """Build all, or check all."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--check", action="store_true")
    check = parser.parse_args().check
    stale = []
    for source, target in FOLDERS.items():
        wanted = {target / f"{text.stem}.ipynb": text for text in sorted(source.glob("*.md"))}
        stale += [path for path in target.glob("*.ipynb") if path not in wanted]
        for path, text in wanted.items():
            notebook = read(text)
            if not check:
                execute(notebook, target)
                nbformat.validate(notebook)
                nbformat.write(notebook, path)
                print("built", path.relative_to(ROOT))
            elif not path.exists() or without_outputs(nbformat.read(path, as_version=4)) != notebook:
                stale.append(path)
    if stale:
        sys.exit("\n".join(f"{path.relative_to(ROOT)} is not what the manuscript says: run make notebooks" for path in stale))


if __name__ == "__main__":
    main()

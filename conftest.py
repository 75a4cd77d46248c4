"""For all tests and checked notebooks: cells are named by topic and section, and in CI nothing is skipped."""

import os

import pytest


def _sections(cells):
    """The heading that stands last before each code cell."""
    section, sections = "", []
    for cell in cells:
        if cell.cell_type == "markdown":
            headings = [line for line in cell.source.splitlines() if line.startswith("#")]
            section = headings[-1].lstrip("# ") if headings else section
        elif cell.cell_type == "code":
            sections.append(section)
    return sections


def pytest_collection_modifyitems(items):
    import nbformat

    sections = {}
    for index, item in enumerate(items):
        if type(item).__name__ == "IPyNbCell":
            path = item.path
            if path not in sections:
                sections[path] = _sections(nbformat.read(path, as_version=4).cells)
            name = f"{path.stem}: {sections[path][item.cell_num]}, code cell {item.cell_num + 1}"
            items[index] = type(item).from_parent(item.parent, name=name, cell_num=item.cell_num, cell=item.cell, options=item.options)


@pytest.hookimpl(wrapper=True)
def pytest_runtest_makereport(item, call):
    report = yield
    if report.skipped and os.environ.get("CI") and not hasattr(report, "wasxfail"):
        report.outcome = "failed"
        report.longrepr = f"skipped, but in CI nothing is: {report.longrepr[-1]}"
    return report

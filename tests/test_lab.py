"""`make lab` as a new user meets it: a server, the start page, and a notebook that runs, in a real browser."""

import json
import os
import shutil
import signal
import socket
import subprocess
from pathlib import Path

import nbformat
import psutil
import pytest

from leftovers import descendants, is_alive, wait_until

ROOT = Path(__file__).resolve().parent.parent
CHROMIUM = next(filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None)
FLAGS = [
    "--no-sandbox",
    "--disable-gpu",
    "--disable-quic",
    "--disable-background-networking",
    "--disable-component-update",
    "--disable-sync",
]

pytestmark = pytest.mark.skipif(CHROMIUM is None, reason="there is no Chromium here")


def free_port():
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """JupyterLab, as `make lab` starts it, for a user without a history, on a copy of the notebooks."""
    folder = tmp_path_factory.mktemp("lab")
    shutil.copytree(ROOT / "notebooks", folder / "course" / "notebooks")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JUPYTER", "PYTEST"))}
    environment |= {"HOME": str(folder / "home"), "JUPYTER_RUNTIME_DIR": str(folder / "runtime")}
    arguments = f"--no-browser --port {free_port()} --ServerApp.root_dir={folder / 'course'}"
    with open(folder / "log", "w") as log:
        make = subprocess.Popen(
            ["make", "lab", f"ARGS={arguments}"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=log,
            cwd=ROOT,
            env=environment,
            start_new_session=True,
        )
    try:
        assert wait_until(lambda: list((folder / "runtime").glob("jpserver-*.json")), 60), (folder / "log").read_text()
        (info,) = (folder / "runtime").glob("jpserver-*.json")
        server = json.loads(info.read_text())
        yield server | {"folder": folder / "course", "log": folder / "log"}
        below = descendants(make.pid)
    finally:
        os.killpg(make.pid, signal.SIGTERM)  # The group that was started above.
        make.wait(20)
    assert wait_until(lambda: not any(map(is_alive, below))), [psutil.Process(pid).cmdline() for pid in below if is_alive(pid)]


@pytest.fixture(scope="module")
def page(lab):
    from playwright.sync_api import sync_playwright

    with sync_playwright() as playwright:
        browser = playwright.chromium.launch(executable_path=CHROMIUM, args=FLAGS)
        # So tall that all cells are there: JupyterLab leaves out what cannot be seen.
        page = browser.new_page(viewport={"width": 1200, "height": 4000})
        page.set_default_timeout(30_000)
        page.goto(f"{lab['url']}?token={lab['token']}")
        yield page
        browser.close()


def menu(page, name, item):
    page.get_by_role("menuitem", name=name, exact=True).click()
    page.get_by_role("menuitem", name=item, exact=True).click()


def outputs(page):
    """The text of all outputs on the page."""
    return page.locator(".jp-OutputArea-output").all_inner_texts()


def run_new_cell(page, source):
    """Type a cell at the end of the notebook, as a reader would, and run it."""
    page.locator(".jp-Notebook .jp-Cell").last.click()
    page.keyboard.press("Escape")
    page.keyboard.press("b")
    page.keyboard.press("Enter")
    page.keyboard.insert_text(source)
    page.keyboard.press("Control+Enter")


def test_the_server_listens_on_loopback_only(lab):
    assert lab["hostname"] == "localhost"
    listening = [c.laddr.ip for c in psutil.Process(lab["pid"]).net_connections("tcp") if c.status == psutil.CONN_LISTEN]
    assert listening and set(listening) <= {"127.0.0.1", "::1"}


def test_the_start_page_opens_with_its_outputs(page):
    page.get_by_role("heading", name="Start here").wait_for()
    cells = nbformat.read(ROOT / "notebooks" / "start_here.ipynb", as_version=4).cells
    stored = sum(len(cell.get("outputs", [])) for cell in cells)
    assert wait_until(lambda: len(outputs(page)) == stored)
    assert "[0-3] tensor([6., 6.])" in outputs(page)
    assert any(text.startswith("RankError: Rank 2 of 4 raised ZeroDivisionError") for text in outputs(page))


def test_the_start_page_runs(page):
    before = outputs(page)
    menu(page, "Edit", "Clear Outputs of All Cells")
    page.locator(".jp-OutputArea-output").first.wait_for(state="detached")
    assert outputs(page) == []
    menu(page, "Run", "Run All Cells")
    assert wait_until(lambda: len(outputs(page)) == len(before), 60)
    assert outputs(page) == before


def test_the_stop_button(page):
    page.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").first.wait_for()
    run_new_cell(page, "%%ranks 2\nimport time\nprint('waiting')\ntime.sleep(60)")
    page.locator(".jp-Notebook-ExecutionIndicator[data-status=busy]").first.wait_for()
    page.wait_for_timeout(1000)
    page.locator("[data-command='notebook:interrupt-kernel'], [title*='Interrupt the kernel']").first.click()
    assert wait_until(lambda: outputs(page)[-1].startswith("RunInterrupted: The run was stopped."))
    assert "time.sleep(60)" in outputs(page)[-1]
    run_new_cell(page, "%%ranks 2\nrank + 40")
    assert wait_until(lambda: outputs(page)[-1] == "[0] 40\n[1] 41")

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


def listening(pid):
    """The addresses that a process listens at."""
    return [c.laddr.ip for c in psutil.Process(pid).net_connections("tcp") if c.status == psutil.CONN_LISTEN]


@pytest.fixture(scope="module")
def lab(tmp_path_factory):
    """JupyterLab, as `make lab` starts it, for a user without a history, on a copy of the course with one lesson more."""
    folder = tmp_path_factory.mktemp("lab")
    for name in ("notebooks", "lessons"):
        shutil.copytree(ROOT / name, folder / "course" / name)
    picture = nbformat.v4.new_output("display_data", {"text/html": '<svg role="img" width="300" height="9"><title>stored</title></svg>'})
    cells = [nbformat.v4.new_markdown_cell("# For the hands", id="a"), nbformat.v4.new_code_cell("1", id="b", outputs=[picture])]
    kernel = {"kernelspec": {"name": "python3", "display_name": "Python 3", "language": "python"}}
    nbformat.write(nbformat.v4.new_notebook(cells=cells, metadata=kernel), folder / "course" / "lessons" / "99_for_the_hands.ipynb")
    environment = {name: value for name, value in os.environ.items() if not name.startswith(("JUPYTER", "PYTEST"))}
    environment |= {"HOME": str(folder / "home"), "JUPYTER_RUNTIME_DIR": str(folder / "runtime")}
    environment |= {"ALLHANDS_COURSE": str(folder / "course")}  # Whoever runs the tests may have lessons of their own in work/.
    arguments = f"--no-browser --port {free_port()} --ServerApp.root_dir={folder / 'course'} --LabApp.expose_app_in_browser=True"
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
        assert wait_until(lambda: listening(server["pid"]), 60)  # The file is there a moment before the server is.
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
        page = browser.new_page(viewport={"width": 1200, "height": 7000})
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
    page.locator(".jp-NotebookPanel:visible .jp-Cell").last.click()
    page.keyboard.press("Escape")
    page.keyboard.press("b")
    page.keyboard.press("Enter")
    page.keyboard.insert_text(source)
    page.keyboard.press("Control+Enter")


def test_the_server_listens_on_loopback_only(lab):
    assert lab["hostname"] == "localhost"
    assert {*listening(lab["pid"])} <= {"127.0.0.1", "::1"}


def pictures(page):
    """The titles of the pictures on the page, and how wide each is."""
    return page.locator(".jp-OutputArea-output svg[role=img]").evaluate_all(
        "all => all.map(svg => [svg.querySelector('title').textContent, svg.getBoundingClientRect().width])"
    )


def ink(page):
    """The colours of the text in the pictures, and of the page below them."""
    return page.evaluate(
        "() => [getComputedStyle(document.querySelector('.jp-OutputArea-output svg[role=img] text')).fill,"
        " getComputedStyle(document.querySelector('.jp-Notebook')).backgroundColor].map(c => c.match(/\\d+/g).slice(0, 3).map(Number))"
    )


def contrast(page):
    """How far text and paper are apart: 0 to 255."""
    text, paper = (sum(colour) / 3 for colour in ink(page))
    return abs(text - paper)


STORED = [
    "Space-time picture: 3 ranks: 0 messages in 0 rounds; deadlock",
    "Space-time picture: 4 ranks: 12 messages in 3 rounds",
    "Space-time picture: 5 ranks: 20 messages in 4 rounds",
]


def test_the_start_page_opens_with_its_outputs(page):
    """Nothing has been run: what is seen is what is stored."""
    page.get_by_role("heading", name="Start here").wait_for()
    cells = nbformat.read(ROOT / "notebooks" / "start_here.ipynb", as_version=4).cells
    stored = sum(len(cell.get("outputs", [])) for cell in cells)
    assert wait_until(lambda: len(outputs(page)) == stored)
    assert "[0-3] tensor([6., 6.])" in outputs(page)
    assert any(text.startswith("RankError: Rank 2 of 4 raised ZeroDivisionError") for text in outputs(page))
    assert any(text.startswith("RankDeadlock: Deadlock: all 3 ranks wait") for text in outputs(page))
    assert [title for title, _ in pictures(page)] == STORED and all(width > 200 for _, width in pictures(page))
    assert "model not found" not in page.content()


def test_pictures_are_readable_on_light_and_on_dark(page):
    assert contrast(page) > 120
    (ROOT / "build").mkdir(exist_ok=True)
    page.screenshot(path=ROOT / "build" / "start_here_light.png")
    use_theme(page, "JupyterLab Dark")
    page.wait_for_function("document.body.dataset.jpThemeLight === 'false'")
    assert contrast(page) > 120
    page.screenshot(path=ROOT / "build" / "start_here_dark.png")
    use_theme(page, "JupyterLab Light")
    page.wait_for_function("document.body.dataset.jpThemeLight === 'true'")


def use_theme(page, name):
    page.evaluate("theme => jupyterapp.commands.execute('apputils:change-theme', {theme})", name)
    page.locator("#jupyterlab-splash").wait_for(state="detached")


def test_the_start_page_runs(page):
    before = outputs(page)
    menu(page, "Edit", "Clear Outputs of All Cells")
    page.locator(".jp-OutputArea-output").first.wait_for(state="detached")
    assert outputs(page) == []
    menu(page, "Run", "Run All Cells")
    assert wait_until(lambda: len(outputs(page)) == len(before), 60)
    assert wait_until(lambda: [title for title, _ in pictures(page)] == STORED)
    # The last but one has now a slider above it, and the last says that the lessons are there.
    assert outputs(page)[:-2] == before[:-2]
    assert "Not begun yet: make lab copies the lessons to work/." in before[-1] and "0 of 6" in outputs(page)[-1]


def test_the_slider_redraws(page):
    slider = page.locator(".jp-OutputArea-output .widget-slider .noUi-handle")
    slider.wait_for()
    slider.focus()
    for _ in range(3):
        page.keyboard.press("ArrowRight")
    assert wait_until(lambda: pictures(page)[-1][0] == "Space-time picture: 8 ranks: 56 messages in 7 rounds")
    assert "each of 0-7" in outputs(page)[-2]
    for _ in range(6):
        page.keyboard.press("ArrowLeft")
    assert wait_until(lambda: pictures(page)[-1][0] == "Space-time picture: 2 ranks: 2 messages in 1 round")
    assert "each of 0-1" in outputs(page)[-2]
    page.keyboard.press("ArrowRight")
    assert wait_until(lambda: "each of 0-2" in outputs(page)[-2])
    page.screenshot(path=ROOT / "build" / "start_here_slider.png")


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


def test_a_deadlock_of_ones_own(page):
    run_new_cell(page, "%%ranks 2\ndist.send(torch.ones(1), 1 - rank)")
    assert wait_until(lambda: outputs(page)[-1].startswith("RankDeadlock: Deadlock: both ranks wait for what can never come."))
    assert pictures(page)[-1][0] == "Space-time picture: 2 ranks: 0 messages in 0 rounds; deadlock"
    run_new_cell(page, "%%ranks 2\nrank + 50")
    assert wait_until(lambda: outputs(page)[-1] == "[0] 50\n[1] 51")


def open_document(page, path):
    page.evaluate("async path => { await jupyterapp.commands.execute('docmanager:open', {path}) }", path)


def test_the_start_page_leads_to_the_learners_copy_of_a_lesson(page, lab):
    """And the command is there, for a cell too."""
    run_new_cell(page, "!allhands reset 99")
    assert wait_until(lambda: outputs(page)[-1].strip() == "99_for_the_hands begins again in work/."), outputs(page)[-2:]
    run_new_cell(page, "from allhands import progress\nprogress()")
    page.get_by_role("link", name="99 For the hands").click()
    page.get_by_role("heading", name="For the hands").wait_for()
    assert wait_until(lambda: pictures(page)[-1][0] == "stored")  # It is trusted.
    page.screenshot(path=ROOT / "build" / "lesson.png")
    assert (lab["folder"] / "work" / "99_for_the_hands.ipynb").exists()


def test_the_first_task_of_a_lesson_and_the_progress_that_it_makes(page):
    """A lesson that has not been run: its first task is done by typing, the check passes, and the start page knows."""
    open_document(page, "work/01_ranks_and_messages.ipynb")
    lesson = page.locator(".jp-NotebookPanel:visible")
    lesson.get_by_role("heading", name="01 Ranks and messages: lesson").wait_for()
    cells = lesson.locator(".jp-CodeCell")
    assert "CheckFailed: predict is not started" in cells.nth(3).inner_text()
    cells.nth(2).locator(".cm-content").click()
    page.keyboard.press("Control+End")
    page.keyboard.press("Shift+Home")
    page.keyboard.type("return 3.0, 12, 3")
    lesson.locator(".jp-Notebook-ExecutionIndicator[data-status=idle]").first.wait_for()
    cells.nth(0).locator(".cm-content").click()
    for _ in range(6):  # Text is a cell too.
        page.keyboard.press("Shift+Enter")
    right = "✓ predict: right. 1 of 6 in this lesson. This is what happens:"
    assert wait_until(lambda: right in cells.nth(3).inner_text(), 60), cells.nth(3).inner_text()
    assert cells.nth(3).locator("svg[role=img] title").first.text_content() == "Space-time picture: 4 ranks: 3 messages in 3 rounds"
    page.screenshot(path=ROOT / "build" / "lesson_first_task.png")
    open_document(page, "notebooks/start_here.ipynb")
    run_new_cell(page, "progress()")
    shown = page.locator(".jp-NotebookPanel:visible .jp-OutputArea-output").last
    assert wait_until(lambda: "1 of 6" in shown.inner_text()), shown.inner_text()
    page.screenshot(path=ROOT / "build" / "progress.png")

"""Pictures: five programs, drawn by hand on paper first; what is said in each comes out of the picture again. And odd ones."""

import re
import xml.etree.ElementTree as ElementTree

import pytest
import torch
import torch.distributed as dist

from allhands import RankDeadlock, RankError, draw, palette, run

pytestmark = pytest.mark.usefixtures("fork_server")

SVG = "{http://www.w3.org/2000/svg}"


class Drawing:
    """What a picture shows, read off its coordinates: lanes by rank, moments in rounds."""

    def __init__(self, picture):
        self.root = ElementTree.fromstring(picture.svg)
        texts = list(self.root.iter(f"{SVG}text"))
        self.lanes = {float(text.get("y")): int(text.text[5:]) for text in texts if re.fullmatch(r"rank \d+", text.text)}
        self.words = [text.text for text in texts]
        rounds = {int(text.text): float(text.get("x")) for text in texts if (text.text or "").isdigit()}
        ruler = sorted({float(line.get("x1")) for line in self.root.iter(f"{SVG}line") if line.get("x1") == line.get("x2")})
        self.zero = ruler[0]
        self.step = 2 * (rounds[1] - self.zero) if 1 in rounds else 1

    def time(self, x):
        return round((float(x) - self.zero) / self.step, 2)

    def lane(self, y):
        nearest = min(self.lanes, key=lambda lane: abs(lane - float(y)))
        return self.lanes[nearest]

    @property
    def arrows(self):
        """Each message: when it started on which lane, when it arrived on which."""
        found = []
        for group in self.root.iter(f"{SVG}g"):
            line, head = group.find(f"{SVG}line"), group.find(f"{SVG}polygon")
            if line is not None:
                tip = head.get("points").split()[0].split(",")
                found.append((self.time(line.get("x1")), self.lane(line.get("y1")), round(self.time(tip[0])), self.lane(tip[1])))
        return sorted(found)

    @property
    def waits(self):
        """Each bar: which lane, from when to when; None for one that never ends."""
        found = []
        for bar in self.root.iter(f"{SVG}rect"):
            if bar.get("height") == "8":
                x, width = float(bar.get("x")), float(bar.get("width"))
                end = None if bar.get("fill") == palette.ALARM else self.time(x + width)
                found.append((self.lane(float(bar.get("y")) + 4), self.time(x), end))
        return sorted(found)

    @property
    def bands(self):
        """Each part of a collective: the round, the lanes from which to which."""
        found = []
        for band in self.root.iter(f"{SVG}rect"):
            if band.get("height") != "8":
                top, height = float(band.get("y")), float(band.get("height"))
                inside = [rank for y, rank in self.lanes.items() if top < y < top + height]
                found.append((round(self.time(band.get("x"))) + 1, min(inside), max(inside)))
        return sorted(found)

    @property
    def pointers(self):
        """Who points at whom."""
        titles = [title.text for title in self.root.iter(f"{SVG}title")]
        return sorted(tuple(map(int, match.groups())) for title in titles if (match := re.match(r"rank (\d+) needs rank (\d+)", title)))


def x(number=1):
    return torch.zeros(number)


# 1. A chain: each rank hands on what it got. On paper: stairs going down; rank r stands for r - 1 rounds before its message comes.


def chain():
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank > 0:
        dist.recv(x(), rank - 1)
    if rank < size - 1:
        dist.send(x(), rank + 1)


def test_a_chain():
    drawing = Drawing(draw(run(chain)))
    assert drawing.arrows == [(0, 0, 1, 1), (1, 1, 2, 2), (2, 2, 3, 3)]
    assert drawing.waits == [(2, 0, 1), (3, 0, 2)]
    assert drawing.words[0] == "4 ranks: 3 messages in 3 rounds"


# 2. A ring of three with isend and irecv, two rounds. On paper: two columns, in each three arrows at once; nobody stands.


def ring():
    rank, size = dist.get_rank(), dist.get_world_size()
    for _ in range(size - 1):
        for work in [dist.isend(x(), (rank + 1) % size), dist.irecv(x(), (rank - 1) % size)]:
            work.wait()


def test_a_ring():
    drawing = Drawing(draw(run(ring, world_size=3)))
    assert drawing.arrows == [(0, 0, 1, 1), (0, 1, 1, 2), (0, 2, 1, 0), (1, 0, 2, 1), (1, 1, 2, 2), (1, 2, 2, 0)]
    assert drawing.waits == [] and drawing.bands == []


# 3. Everybody sends to rank 0, which receives in rank order, then one all_reduce. On paper: arrows up, one a round, the lower ones
#    stand until it is their turn; then a band over all four, at which those who were early stand.


def to_the_root():
    rank, size = dist.get_rank(), dist.get_world_size()
    if rank == 0:
        for other in range(1, size):
            dist.recv(x(), other)
    else:
        dist.send(x(), 0)
    dist.all_reduce(x())


def test_everybody_to_the_root():
    drawing = Drawing(draw(run(to_the_root)))
    assert drawing.arrows == [(0, 1, 1, 0), (1, 2, 2, 0), (2, 3, 3, 0)]
    assert drawing.waits == [(1, 1, 3), (2, 0, 1), (2, 2, 3), (3, 0, 2)]
    assert drawing.bands == [(4, 0, 3)] and "all_reduce" in drawing.words


# 4. The even ranks and the odd ones each in a group of their own, then a barrier. On paper: in round 1 two boxes for the
#    evens with a thread between them and two for the odds; in round 2 one box over all.


def two_groups():
    groups = [dist.new_group([0, 2]), dist.new_group([1, 3])]
    dist.broadcast(x(), dist.get_rank() % 2, group=groups[dist.get_rank() % 2])
    dist.barrier()


def test_two_groups():
    drawing = Drawing(draw(run(two_groups)))
    assert drawing.bands == [(1, 0, 0), (1, 1, 1), (1, 2, 2), (1, 3, 3), (2, 0, 3)]
    assert drawing.words.count("broadcast") == 2 and drawing.words.count("barrier") == 1
    assert drawing.waits == []


# 5. One message, then ranks 0 and 1 receive from each other, and rank 2 has finished. On paper: one arrow; two red bars from
#    round 1 on without end; two dashed bows, from 0 to 1 and from 1 to 0.


def deadlock():
    rank = dist.get_rank()
    if rank == 0:
        dist.send(x(), 1)
    if rank < 2:
        if rank == 1:
            dist.recv(x(), 0)
        dist.recv(x(), 1 - rank)


def test_a_deadlock():
    with pytest.raises(RankDeadlock) as caught:
        run(deadlock, world_size=3)
    drawing = Drawing(draw(caught.value))
    assert drawing.arrows == [(0, 0, 1, 1)]
    assert drawing.waits == [(0, 1, None), (1, 1, None)]
    assert drawing.pointers == [(0, 1), (1, 0)]
    assert "receives from 1" in drawing.words and "receives from 0" in drawing.words
    assert drawing.words[0].endswith("deadlock")


# --- odd ones -----------------------------------------------------------------------------------------------------


def test_who_points_at_one_that_has_finished():
    def leave():
        if dist.get_rank() < 2:
            dist.barrier()

    with pytest.raises(RankDeadlock) as caught:
        run(leave, world_size=3)
    drawing = Drawing(draw(caught.value))
    assert drawing.pointers == [(0, 2), (1, 2)] and "has finished" in drawing.words


def test_who_waits_for_one_that_is_stuck_says_what_for():
    def chain_to_one_that_left():
        rank = dist.get_rank()
        if rank < 2:
            dist.recv(x(), rank + 1)

    with pytest.raises(RankDeadlock) as caught:
        run(chain_to_one_that_left, world_size=3)
    drawing = Drawing(draw(caught.value))
    assert drawing.pointers == [(1, 2)] and {"receives from 1", "receives from 2", "has finished"} <= set(drawing.words)
    assert len(caught.value.trace) == 2


def test_the_lines_of_code_are_under_the_mouse():
    svg = draw(run(chain)).svg
    assert re.search(
        r"<title>round 1: rank 0 sends float32\[1\] \(4 bytes\) to rank 1\n  tests/test_pictures.py, line \d+, in chain\n"
        r"      dist.send\(x\(\), rank \+ 1\)</title>",
        svg,
    )
    assert "<title>rank 3 waits: it receives float32[1] (4 bytes) from rank 2\n" in svg


def test_a_send_that_nobody_received():
    def leave():
        dist.barrier()
        if dist.get_rank() == 0:
            dist.isend(x(), 1)

    svg = draw(run(leave, world_size=2)).svg
    assert "✕" in svg and "<title>nobody received it: rank 0 sends" in svg


def test_a_run_that_failed_is_drawn_as_far_as_it_came():
    def fail():
        dist.barrier()
        if dist.get_rank() == 0:
            raise ValueError
        dist.recv(x(), 0)

    with pytest.raises(RankError) as caught:
        run(fail, world_size=2)
    drawing = Drawing(draw(caught.value))
    assert drawing.bands == [(1, 0, 1)] and drawing.waits == [(1, 1, None)] and drawing.words[0].endswith("stopped")


@pytest.mark.parametrize("world_size", [1, 2, 5, 16])
def test_all_sizes_that_are_drawn_in_full(world_size):
    picture = draw(run(ring, world_size=world_size))
    drawing = Drawing(picture)
    assert sorted(drawing.lanes.values()) == list(range(world_size))
    assert len(drawing.arrows) == world_size * (world_size - 1)
    assert len(picture.svg) < 200_000
    assert "Condensed" not in picture.svg


@pytest.mark.parametrize("world_size", [17, 40])
def test_what_is_too_large_is_condensed_and_says_so(world_size):
    picture = draw(run(ring, world_size=world_size, timeout=60))
    words = "".join(ElementTree.fromstring(picture.svg).itertext())
    assert "Condensed: a column is 1 round. " in words
    assert len(picture.svg) < 100_000


def test_a_long_run_is_condensed():
    def long():
        for _ in range(500):
            dist.barrier()
        if dist.get_rank() == 0:
            dist.recv(x(), 1)
        else:
            dist.send(x(), 0)

    picture = draw(run(long, world_size=2))
    assert "Condensed: a column is 9 rounds. " in picture.svg
    assert "<title>rank 1 sends or receives</title>" in picture.svg


def test_a_picture_is_the_same_every_time_and_says_itself_to_a_screen_reader():
    pictures = {draw(run(to_the_root)).svg for _ in range(5)}
    (svg,) = pictures
    root = ElementTree.fromstring(svg)
    assert root.get("role") == "img"
    assert root.find(f"{SVG}title").text == "Space-time picture: 4 ranks: 3 messages and 1 collective in 4 rounds"
    assert root.find(f"{SVG}desc").text
    assert "id=" not in svg  # Several pictures share one page.
    assert repr(draw(run(chain))) == "[picture: 4 ranks: 3 messages in 3 rounds]"


def test_code_that_xml_has_no_room_for(tmp_path, monkeypatch):
    (tmp_path / "odd_code_of_a_learner.py").write_text(
        "import torch.distributed as dist\ndef f():\n    x = '\x1b < & \x0b'; dist.barrier()\n"
    )
    monkeypatch.syspath_prepend(tmp_path)
    import odd_code_of_a_learner

    titles = [title.text for title in ElementTree.fromstring(draw(run(odd_code_of_a_learner.f, world_size=2)).svg).iter(f"{SVG}title")]
    assert any("x = '\ufffd < & \ufffd'; dist.barrier()" in title for title in titles)


def test_the_largest_picture_in_full_is_not_too_large():
    def everybody_to_everybody_with_a_rather_long_name_of_the_function_that_sends():
        rank, size = dist.get_rank(), dist.get_world_size()
        others = [other for other in range(size) if other != rank]
        works = [*[dist.isend(x(), other) for other in others], *[dist.irecv(x(), other) for other in others if other is not None]]
        for work in works:
            work.wait()

    picture = draw(run(everybody_to_everybody_with_a_rather_long_name_of_the_function_that_sends, world_size=16))
    assert "Condensed" not in picture.svg and len(picture.svg) < 150_000


def test_what_cannot_be_drawn():
    with pytest.raises(TypeError, match="a trace, a RankError, or a figure, but got int"):
        draw(3)
    with pytest.raises(ValueError, match="was not recorded"):
        draw(run(chain, record=False))


# --- charts and colours -------------------------------------------------------------------------------------------


def chart():
    from allhands.charts import axes

    plot = axes("Seconds against bytes", x="bytes", y="seconds")
    plot.plot([1, 2, 4], [1, 2, 3], label="ring")
    plot.legend()
    return draw(plot.figure)


def test_a_chart_is_the_same_every_time_and_takes_the_pages_colours():
    first, second = chart(), chart()
    assert first.svg == second.svg and repr(first) == "[chart: Seconds against bytes]"
    root = ElementTree.fromstring(first.svg)
    assert root.get("role") == "img" and root.get("aria-label") == "Seconds against bytes"
    assert "currentColor" in first.svg and palette.RANKS[0].lower() in first.svg.lower()
    assert "010203" not in first.svg and "<text" in first.svg and "dc:date" not in first.svg


def luminance(colour):
    parts = [int(colour[place : place + 2], 16) / 255 for place in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.03928 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


@pytest.mark.parametrize("colour", [*palette.RANKS, palette.ALARM, palette.NEUTRAL])
@pytest.mark.parametrize("paper", ["#FFFFFF", "#111111"])
def test_every_colour_shows_on_light_and_on_dark(colour, paper):
    """At least 2 : 1 (WCAG asks 3 : 1 of what carries meaning by colour alone; here each also has a lane, an arrow or a word)."""
    light, dark = sorted((luminance(colour), luminance(paper)), reverse=True)
    assert (light + 0.05) / (dark + 0.05) > 2

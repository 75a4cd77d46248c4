"""The ledger of a run: what each rank sent and received, counted from what was recorded. Text, HTML, and a dict."""

from dataclasses import asdict, dataclass, fields
from html import escape

import numpy as np

from allhands.events import P2P, Columns, Kind
from allhands.printed import group_equal, rank_label
from allhands.replay import Timeline


@dataclass(frozen=True)
class Account:
    """One rank's numbers, or those of all ranks. Bytes are those of tensors: what was handed over (out) and what was got (in)."""

    messages_out: int = 0
    messages_in: int = 0
    collectives: int = 0
    bytes_out: int = 0
    bytes_in: int = 0
    rounds: int = 0
    flops: int = 0
    bytes_read: int = 0
    bytes_written: int = 0


@dataclass(frozen=True)
class Tally:
    """The calls of one kind, in all ranks."""

    calls: int
    bytes_out: int
    bytes_in: int


_TITLES = {
    "messages_out": "messages out",
    "messages_in": "messages in",
    "collectives": "collectives",
    "bytes_out": "bytes out",
    "bytes_in": "bytes in",
    "rounds": "last round",
    "flops": "FLOPs",
    "bytes_read": "bytes read",
    "bytes_written": "bytes written",
}
_ALWAYS = ("bytes_out", "bytes_in", "rounds")


class Ledger:
    """Messages, bytes out and in, and rounds: by rank, in all (`total`), and by kind of operation (`kinds`).

    A message is one send with its receive. A collective of the library is one call: its bytes are those of the tensors that the rank
    hands to it and gets from it; which messages it is made of inside is the library's affair. Rounds: steps in which a rank sends one
    message at most and receives one at most; a collective is one step. A rank's last round is the one in which it was through. With
    `record="compute"` also the FLOPs of operators, and the bytes that they read and wrote.
    """

    def __init__(self, columns: Columns, timeline: Timeline) -> None:
        rounds = [*timeline.rounds_of_ranks, *[0] * columns.world_size]
        self.ranks = [_account(columns, columns.rank == rank, rounds[rank]) for rank in range(columns.world_size)]
        self.total = _account(columns, np.full(len(columns), True), timeline.rounds)
        self.kinds = {kind.label: _tally(columns, columns.kind == kind) for kind in Kind if (columns.kind == kind).any()}

    def to_dict(self) -> dict[str, object]:
        """All of it as plain numbers: `ranks` (a list), `total`, `kinds` (by name)."""
        return {
            "ranks": [asdict(account) for account in self.ranks],
            "total": asdict(self.total),
            "kinds": {name: asdict(tally) for name, tally in self.kinds.items()},
        }

    # The table: ranks with equal numbers are one row, and what nobody did is no column.

    def _columns(self) -> list[str]:
        return [field.name for field in fields(Account) if field.name in _ALWAYS or getattr(self.total, field.name)]

    def _rows(self) -> list[tuple[str, Account]]:
        rows = [
            (f"each of {rank_label(ranks)}" if len(ranks) > 1 else rank_label(ranks), account) for ranks, account in group_equal(self.ranks)
        ]
        return [*rows, ("total", self.total)]

    def _kind_rows(self) -> list[tuple[str, Tally]]:
        return list(self.kinds.items()) if set(self.kinds) - {"send", "recv"} else []

    def __repr__(self) -> str:
        names = self._columns()
        parts = [
            _text_table(["rank", *(_TITLES[name] for name in names)], [_cells(label, account, names) for label, account in self._rows()])
        ]
        if self._kind_rows():
            by_kind = [_cells(label, tally, ["calls", "bytes_out", "bytes_in"]) for label, tally in self._kind_rows()]
            parts.append(_text_table(["operation", "calls", "bytes out", "bytes in"], by_kind))
        return "\n\n".join(parts)

    def _repr_html_(self) -> str:
        names = self._columns()
        rows = [_cells(label, account, names) for label, account in self._rows()]
        tables = [_html_table(["rank", *(_TITLES[name] for name in names)], rows, has_total=True)]
        if self._kind_rows():
            by_kind = [_cells(label, tally, ["calls", "bytes_out", "bytes_in"]) for label, tally in self._kind_rows()]
            tables.append(_html_table(["operation", "calls", "bytes out", "bytes in"], by_kind, has_total=False))
        return f'<div style="display:flex;flex-wrap:wrap;gap:2.5em;align-items:flex-start">{"".join(tables)}</div>'


def _account(columns: Columns, which: np.ndarray, rounds: int) -> Account:
    def total(name: str, of: np.ndarray) -> int:
        return int(_of_sites(columns, name)[which & of].sum())

    def count(of: np.ndarray) -> int:
        return int((which & of).sum())

    is_compute = columns.kind == Kind.COMPUTE
    return Account(
        messages_out=count(columns.kind == Kind.SEND),
        messages_in=count(columns.kind == Kind.RECV),
        collectives=count(~np.isin(columns.kind, [*P2P, Kind.COMPUTE, Kind.NEW_GROUP])),
        bytes_out=total("bytes_out", ~is_compute),
        bytes_in=total("bytes_in", ~is_compute),
        rounds=rounds,
        flops=total("flops", is_compute),
        bytes_read=total("bytes_in", is_compute),
        bytes_written=total("bytes_out", is_compute),
    )


def _tally(columns: Columns, which: np.ndarray) -> Tally:
    out, into = (_of_sites(columns, name)[which].sum() for name in ("bytes_out", "bytes_in"))
    return Tally(int(which.sum()), int(out), int(into))


def _of_sites(columns: Columns, name: str) -> np.ndarray:
    return columns.of_sites(getattr(site, name) for site in columns.sites)


def _cells(label: str, numbers: Account | Tally, names: list[str]) -> list[str]:
    return [label, *(f"{getattr(numbers, name):,}" for name in names)]


def _text_table(head: list[str], rows: list[list[str]]) -> str:
    widths = [max(map(len, column)) for column in zip(head, *rows, strict=True)]
    lines = [
        "  ".join([cells[0].ljust(widths[0]), *(cell.rjust(width) for cell, width in zip(cells[1:], widths[1:], strict=True))]).rstrip()
        for cells in (head, *rows)
    ]
    return "\n".join([lines[0], "─" * (sum(widths) + 2 * len(widths) - 2), *lines[1:]])


_CELL = "padding:.25em .9em;font-variant-numeric:tabular-nums;white-space:nowrap;border:0;"
_LINE = "1px solid currentColor"


def _html_table(head: list[str], rows: list[list[str]], has_total: bool) -> str:
    def row(cells: list[str], tag: str, style: str) -> str:
        aligned = [("left" if place == 0 else "right", cell) for place, cell in enumerate(cells)]
        inside = "".join(f'<{tag} style="{_CELL}{style}text-align:{side}">{escape(cell)}</{tag}>' for side, cell in aligned)
        return f'<tr style="background:none">{inside}</tr>'

    body = [row(cells, "td", "") for cells in rows]
    if has_total:
        body[-1] = row(rows[-1], "td", f"border-top:{_LINE};font-weight:600;")
    header = row(head, "th", f"border-bottom:{_LINE};font-weight:600;")
    return f'<table style="border-collapse:collapse;margin:.3em 0"><thead>{header}</thead><tbody>{"".join(body)}</tbody></table>'

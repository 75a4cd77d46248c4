"""What can be said of a run when all have finished: ends that do not fit, collectives that some left out, messages left over."""

import numpy as np

from allhands.events import P2P, Kind
from allhands.matching import NOBODY
from allhands.trace import Trace
from allhands.wording import does, have, on_group, paragraph, plural

_SHOWN_WARNINGS = 4


def finding(trace: Trace) -> str:
    """Why a run that seems to have gone well has not; empty, if it has."""
    return trace.mismatch.text if trace.mismatch else _left_out(trace)


def _left_out(trace: Trace) -> str:
    """A collective that was begun and that not all ranks of its group have called."""
    matching, columns = trace.matching, trace.columns
    for calls in matching.kinds_of_meetings():
        meeting = int(matching.meeting[calls[0]])
        there = [int(columns.rank[call]) for call in calls]
        missing = [rank for rank in matching.members(meeting) if rank not in there]
        is_known = (columns.has_failed | columns.has_limit)[calls].any()  # Its own rank knows, and went on.
        if missing and not is_known and columns.kind[calls[0]] != Kind.NEW_GROUP:
            site = matching.site(calls[0])
            called = paragraph(there, trace.world_size, plural(does(site, columns.groups), there), site)
            which = f"collective number {matching.number_in_group(meeting)}{on_group(site, columns.groups)}"
            return "\n\n".join(
                [
                    "Not all ranks of a group called a collective.",
                    called,
                    f"{have(missing)} finished and never called it: it is {which}.",
                    "It was not waited for, so nobody noticed; but it has not happened.",
                ]
            )
    return ""


def warnings_of(trace: Trace) -> tuple[str, ...]:
    """Messages that nobody received, or that were not waited for: no rank hangs, but hardly anybody means it so."""
    columns, matching = trace.columns, trace.matching
    is_alone = (matching.partner == NOBODY) & np.isin(columns.kind, P2P) & matching.is_sure & ~columns.has_failed
    is_unwaited = (columns.waited == 0) & np.isin(columns.kind, P2P) & ~is_alone
    odd: dict[tuple[str, object], list[int]] = {}
    for index in np.flatnonzero(is_alone | is_unwaited).tolist():
        site = matching.site(index)
        if not is_alone[index] and site.kind is Kind.SEND:
            why = "It was not waited for. A send that is let go of before it is through is lost: keep what isend returns, and call wait()."
        elif not is_alone[index]:
            why = "It was not waited for: its tensor may not hold yet what was sent. Call wait() on what irecv returned."
        elif site.kind is Kind.SEND:
            why = "Nobody received it."
        else:
            why = "Nothing was sent, so its tensor holds what it held before."
        odd.setdefault((why, site), []).append(index)
    told = []
    for (why, site), indices in odd.items():
        times = f" ({len(indices)} times)" if len(indices) > 1 else ""
        told.append(f"{paragraph([site.rank], trace.world_size, does(site, columns.groups) + times, site)}\n{why}")
    if len(told) > _SHOWN_WARNINGS:
        told[_SHOWN_WARNINGS:] = [f"and {len(told) - _SHOWN_WARNINGS} more like these."]
    return tuple(told)

"""The colours and type of the course: the same in every picture and chart, for colour-blind readers too, on light and on dark."""

# After Okabe and Ito, "Color Universal Design" (2008), and Paul Tol's muted scheme. Yellow is lost on white, and red is kept for alarm.
RANKS = ("#0072B2", "#E69F00", "#009E73", "#CC79A7", "#56B4E9", "#999933", "#8B6FC0", "#A65628")
ALARM = "#D7263D"
NEUTRAL = "#808080"
INK = "currentColor"
"""Text and axes take the colour of the page's text."""

FONT = "system-ui, -apple-system, 'Segoe UI', 'DejaVu Sans', sans-serif"


def of_rank(rank: int) -> str:
    """A rank keeps its colour in the whole course; from the ninth on colours come again."""
    return RANKS[rank % len(RANKS)]

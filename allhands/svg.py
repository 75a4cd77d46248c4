"""SVG, written by hand: a few shapes, numbers to a tenth of a pixel, so that the same picture is the same text everywhere."""

import re
from html import escape as escape_html

from allhands.palette import FONT, INK


def escape(text: str, quote: bool = True) -> str:
    """Text to stand in XML, which has no room for most control characters."""
    return escape_html(re.sub(r"[^\t\n\r\x20-\ud7ff\ue000-\ufffd\U00010000-\U0010ffff]", "\ufffd", text), quote)


def number(value: float) -> str:
    """To a tenth, without a needless zero."""
    return f"{value:.1f}".removesuffix(".0").replace("-0", "-0" if abs(value) >= 0.05 else "0")


def attributes(**values: object) -> str:
    """`stroke_width=2` as `stroke-width="2"`."""
    told = {name.rstrip("_").replace("_", "-"): number(value) if isinstance(value, float) else str(value) for name, value in values.items()}
    return "".join(f' {name}="{escape(value)}"' for name, value in told.items())


def element(tag: str, title: str = "", inside: str = "", **values: object) -> str:
    """One element; what `title` says is shown where the mouse rests."""
    content = (f"<title>{escape(title, quote=False)}</title>" if title else "") + inside
    return f"<{tag}{attributes(**values)}>{content}</{tag}>" if content else f"<{tag}{attributes(**values)}/>"


def text(x: float, y: float, words: str, size: float = 12, anchor: str = "start", **values: object) -> str:
    """A line of text; `y` is its middle."""
    return element(
        "text",
        inside=escape(words, quote=False),
        **{"x": float(x), "y": float(y), "font_size": float(size), "text_anchor": anchor, "dominant_baseline": "central"}
        | ({"fill": INK} | values),
    )


def line(x1: float, y1: float, x2: float, y2: float, stroke: str, width: float, title: str = "", **values: object) -> str:
    """A straight line."""
    ends = {"x1": float(x1), "y1": float(y1), "x2": float(x2), "y2": float(y2)}
    return element("line", title, **ends | {"stroke": stroke, "stroke_width": float(width)} | values)


def rect(x: float, y: float, width: float, height: float, fill: str, title: str = "", **values: object) -> str:
    """A rectangle."""
    place = {"x": float(x), "y": float(y), "width": float(width), "height": float(height)}
    return element("rect", title, **place | {"fill": fill} | values)


def picture(width: float, height: float, title: str, description: str, inside: list[str]) -> str:
    """A whole picture, for the page it stands in: it takes the page's text colour, and shrinks with a narrow one."""
    size = {"viewBox": f"0 0 {number(width)} {number(height)}", "width": float(width), "role": "img", "font_family": FONT}
    told = f"<title>{escape(title, quote=False)}</title><desc>{escape(description, quote=False)}</desc>"
    style = "max-width:100%;height:auto;display:block"
    return f'<svg xmlns="http://www.w3.org/2000/svg"{attributes(**size)} style="{style}">{told}{"".join(inside)}</svg>'

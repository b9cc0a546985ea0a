"""A canvas for the drawings of docs/: boxes, texts and arrows as SVG, light or dark."""

import html

# Fill and outline of each kind of box, on a light and on a dark background.
KINDS = {
    "copy": ("#cdebd3", "#3f8f57", "#1f4a2d", "#58b374"),
    "look": ("#d8efe9", "#2f8a83", "#18433f", "#4fb3ab"),
    "score": ("#cfe1fb", "#3b73c4", "#1c3a66", "#6aa0ea"),
    "weigh": ("#fbe0c4", "#c77b28", "#5a3914", "#e59a49"),
    "weigh2": ("#fff1de", "#c77b28", "#432c12", "#e59a49"),
    "meet": ("#e6d8f5", "#8456bd", "#3e2a5c", "#a983dd"),
    "plain": ("#eceff2", "#7b848d", "#2b3138", "#8b949e"),
    "wait": ("#f7f8f9", "#b9c0c7", "#171b21", "#4c555f"),
}
FONT = "system-ui, -apple-system, 'Segoe UI', Helvetica, Arial, sans-serif"


def style():
    """The style sheet of a picture: light colours, and dark ones where the reader asks for them."""
    light = [
        ".back{fill:#fff}",
        ".ink{fill:#1f2328}",
        ".dim{fill:#59636e}",
        ".rule{stroke:#59636e;fill:none}",
        ".grid{stroke:#d5dae0;fill:none}",
        ".tip{fill:#59636e}",
    ]
    dark = [
        ".back{fill:#0d1117}",
        ".ink{fill:#e6edf3}",
        ".dim{fill:#9aa4af}",
        ".rule{stroke:#9aa4af}",
        ".grid{stroke:#30363d}",
        ".tip{fill:#9aa4af}",
    ]
    for name, (fill, edge, dark_fill, dark_edge) in KINDS.items():
        light.append(f".{name}{{fill:{fill};stroke:{edge}}}")
        dark.append(f".{name}{{fill:{dark_fill};stroke:{dark_edge}}}")
    return (
        f"text{{font-family:{FONT}}}"
        + "".join(light)
        + "@media (prefers-color-scheme: dark){"
        + "".join(dark)
        + "}"
    )


def width_of(text, size):
    """About how wide a text is: a little more than most fonts need."""
    return 0.56 * size * len(text)


class Picture:
    """Boxes, texts and arrows; refuses text that does not fit its box."""

    def __init__(self, width, height, title):
        self.width, self.height, self.title = width, height, title
        self.parts = []

    def add(self, part):
        self.parts.append(part)

    def text(self, x, y, text, size=13, kind="ink", anchor="start", bold=False):
        weight = ' font-weight="600"' if bold else ""
        self.add(
            f'<text class="{kind}" x="{x:g}" y="{y:g}" font-size="{size}" '
            f'text-anchor="{anchor}"{weight}>{html.escape(text)}</text>'
        )

    def box(self, x, y, w, h, kind, *lines, size=12, dashed=False):
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        self.add(
            f'<rect class="{kind}" x="{x:g}" y="{y:g}" width="{w:g}" height="{h:g}" rx="3"{dash}/>'
        )
        for line in lines:
            if width_of(line, size) > w + 2:
                raise ValueError(f"{self.title}: '{line}' is wider than its box of {w:g}")
        step = size * 1.25
        top = y + h / 2 - step * (len(lines) - 1) / 2 + size * 0.36
        for i, line in enumerate(lines):
            self.text(x + w / 2, top + i * step, line, size, anchor="middle")

    def line(self, points, kind="rule", dashed=False):
        dash = ' stroke-dasharray="4 3"' if dashed else ""
        path = " ".join(f"{x:g},{y:g}" for x, y in points)
        self.add(f'<polyline class="{kind}" points="{path}"{dash}/>')

    def arrow(self, *points):
        """A line with a tip at its last point, which it reaches along an axis."""
        self.line(points)
        (x0, y0), (x, y) = points[-2:]
        if abs(x - x0) > abs(y - y0):
            d = 6 if x > x0 else -6
            tip = [(x, y), (x - d, y - 3.5), (x - d, y + 3.5)]
        else:
            d = 6 if y > y0 else -6
            tip = [(x, y), (x - 3.5, y - d), (x + 3.5, y - d)]
        self.add('<polygon class="tip" points="' + " ".join(f"{a:g},{b:g}" for a, b in tip) + '"/>')

    def svg(self):
        head = (
            f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {self.width} {self.height}" '
            f'width="{self.width}" height="{self.height}" role="img">\n'
            f"<title>{html.escape(self.title)}</title>\n<style>{style()}</style>\n"
            f'<rect class="back" width="{self.width}" height="{self.height}"/>\n'
        )
        return head + "\n".join(self.parts) + "\n</svg>\n"


def lanes(picture, names, top, height, left, right):
    """Names a row of boxes each, with a rule between; returns where each begins."""
    tops = []
    for i, (name, note) in enumerate(names):
        y = top + i * height
        tops.append(y)
        picture.text(12, y + height / 2 - 2, name, 13, bold=True)
        picture.text(12, y + height / 2 + 13, note, 11, "dim")
        picture.line([(12, y + height - 2), (right, y + height - 2)], "grid")
    return tops

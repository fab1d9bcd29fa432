"""pe_svg.py - the pictures of pe-bench as SVG text: axes, lines, bands, dots, heat maps.

A picture is WIDTH units wide with text of 12, so it is legible on a phone, where a unit is about
a pixel, and beside others on a wide screen. Colours are classes (css below): the report carries
them once, a file of its own (standalone) carries them too, and both follow the reader's light or
dark theme. Colours are written out, without variables, which programs for slides do not know.
"""
import base64
import collections
import math
import struct
import zlib
from html import escape

WIDTH, TEXT = 380, 12
LINE = 15    # from one line of text to the next

# Colour on light and on dark, dash, marker. The hues are those of Okabe and Ito (2008), which the
# colour-blind tell apart, without the yellow, which white swallows; lightened for dark pages.
STYLES = (("#6b6b6b", "#b5b5b5", "", "circle"), ("#2a9bd6", "#9adcff", "7 3", "square"),
          ("#c98500", "#f0b43c", "2 3", "diamond"), ("#00805c", "#2fce9f", "9 3 2 3", "up"),
          ("#b4508c", "#f0a5d2", "5 2", "down"), ("#d04a00", "#ff8650", "3 2", "cross"),
          ("#0055a8", "#5aa5ff", "", "plus"), ("#7a5c28", "#cdb07a", "1 2", "circle"),
          ("#5e4fa2", "#b9abff", "11 4", "square"), ("#8a8a00", "#d8d84a", "6 2 1 2", "diamond"))

# Markers as paths around 0, of size 4: from the centre to the edge.
MARKERS = {"circle": "M-4 0a4 4 0 1 0 8 0a4 4 0 1 0 -8 0z", "square": "M-4 -4h8v8h-8z",
           "diamond": "M0 -5L5 0L0 5L-5 0z", "up": "M0 -4L4 4H-4z", "down": "M0 4L4 -4H-4z",
           "plus": "M-1.5 -4h3v2.5h2.5v3h-2.5v2.5h-3v-2.5h-2.5v-3h2.5z",
           "cross": "M-4 -3l1 -1L0 -1L3 -4l1 1L1 0L4 3l-1 1L0 1L-3 4l-1 -1L-1 0z"}


def css():
    """The classes of all pictures: light, then what a dark theme changes; paper is always light."""
    def theme(ink, soft, grid, paper, k):
        rules = [f".ink{{fill:{ink}}}.soft{{fill:{soft}}}.axis{{stroke:{soft}}}"
                 f".grid{{stroke:{grid}}}.mark{{stroke:{ink}}}.paper{{fill:{paper}}}"]
        for i, style in enumerate(STYLES):
            rules.append(f".s{i}{{fill:{style[k]};stroke:{style[k]}}}")
        return "\n".join(rules)
    fixed = (f"svg text{{font:{TEXT}px system-ui,sans-serif;stroke:none}}"
             ".line{fill:none;stroke-width:2}.band{stroke:none;fill-opacity:.16}"
             ".grid,.axis{stroke-width:1;fill:none}.pixels{image-rendering:pixelated}"
             ".mark{stroke-width:1;stroke-dasharray:4 3;fill:none}"
             ".hollow{fill-opacity:0;stroke-width:2}svg .title{font-size:14px;font-weight:600}")
    light = theme("#1a1a1a", "#5c5c5c", "#e2e2e2", "#ffffff", 0)
    dark = theme("#ececec", "#a8a8a8", "#3a3a3a", "#161616", 1)
    return f"{light}\n@media screen and (prefers-color-scheme:dark){{\n{dark}\n}}\n{fixed}"


def standalone(svg):
    """A picture as a file of its own, with its colours and a background."""
    start, body = svg.split(">", 1)
    wide, high = start.split('"')[1].split()[2:]
    return (f'<?xml version="1.0" encoding="UTF-8"?>\n{start} xmlns="http://www.w3.org/2000/svg" '
            f'width="{2 * int(wide)}" height="{2 * int(high)}"><style>{css()}</style>'
            f'<rect class="paper" width="{wide}" height="{high}"/>{body}\n')


def short(value):
    """A number as an axis shows it: 1234567 -> 1.23M, 0.25 -> 0.25, 12000 -> 12k."""
    for factor, unit in ((1e6, "M"), (1e3, "k")):
        if abs(value) >= 10 * factor or (unit == "M" and abs(value) >= factor):
            return f"{value / factor:.3g}{unit}"
    return f"{value + 0.0:.4g}".replace("-", "−")    # + 0.0: no minus before a zero


def shortened(name, most):
    """In at most so many characters, for which its middle gives way."""
    head = most // 3
    return name if len(name) <= most else f"{name[:head]}…{name[head + 1 - most:]}"


def nice_ticks(low, high, most=6):
    """Round numbers (1, 2 or 5 times a power of ten apart) from low to high, at most `most`."""
    step = 10 ** math.floor(math.log10(max(high - low, 1e-12) / most))
    while (high - low) / step > most:
        step *= 2.5 if f"{step:e}"[0] == "2" else 2
    first = math.ceil(low / step - 1e-9)
    return [round(i * step, 12) for i in range(first, math.floor(high / step + 1e-9) + 1)]


def log_ticks(low, high):
    """The powers of ten from low to high, also 2 and 5 times them if there are but few."""
    powers = range(math.floor(math.log10(low)), math.ceil(math.log10(high)) + 1)
    return [k * 10.0 ** p for p in powers for k in ((1, 2, 5) if high < 200 * low else (1,))
            if low <= k * 10.0 ** p <= high]


def marker(style, x, y, size=4, hollow=False):
    """The marker of a style around a point."""
    return (f'<path class="s{style}{" hollow" if hollow else ""}" '
            f'transform="translate({x:.1f} {y:.1f}) scale({size / 4})" '
            f'd="{MARKERS[STYLES[style][3]]}"/>')


def text(x, y, content, anchor="start", kind="ink"):
    return (f'<text class="{kind}" x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}">'
            f'{escape(str(content))}</text>')


class Chart:
    """One pair of axes. Points are in the units of the data, and what lies outside is cut off.

    x and y are (low, high); an axis in `log` ("x", "y" or "xy") is logarithmic. Ticks are numbers
    or (number, text); without any they are chosen.
    """

    def __init__(self, title, x, y, xlabel, ylabel="", log="", xticks=None, yticks=None,
                 height=200, left=52, right=14):
        self.title, self.left, self.top, self.right = title, left, 42, WIDTH - right
        self.bottom = self.top + height
        self.log, self.x, self.y = log, x, y
        self.parts, self.below = [], self.bottom + 36
        room = -math.inf
        for value, label in self.ticks(xticks, *x, "x" in log):
            at, half = self.at_x(value), 3.4 * len(label)
            self.parts.append(f'<path class="grid" d="M{at:.1f} {self.top}V{self.bottom}"/>')
            if at - half >= room and at + half <= WIDTH:    # labels that would touch are left out
                self.parts.append(text(at, self.bottom + 15, label, "middle", "soft"))
                room = at + half + 5
        for value, label in self.ticks(yticks, *y, "y" in log):
            at = self.at_y(value)
            self.parts.append(f'<path class="grid" d="M{self.left} {at:.1f}H{self.right}"/>')
            self.parts.append(text(self.left - 6, at + 4, label, "end", "soft"))
        self.parts.append(f'<path class="axis" d="M{self.left} {self.top}V{self.bottom}'
                          f'H{self.right}"/>')
        self.parts.append(text((self.left + self.right) / 2, self.bottom + 31, xlabel, "middle"))
        self.parts.append(text(2, self.top - 9, ylabel))

    @staticmethod
    def ticks(given, low, high, log):
        """(number, text) of an axis."""
        if given is None:
            given = log_ticks(low, high) if log else nice_ticks(low, high)
        return [t if isinstance(t, tuple) else (t, short(t)) for t in given]

    @staticmethod
    def place(value, low, high, log):
        if log:
            value, low, high = math.log(value), math.log(low), math.log(high)
        return (value - low) / ((high - low) or 1)

    def at_x(self, value):
        return self.left + (self.right - self.left) * self.place(value, *self.x, "x" in self.log)

    def at_y(self, value):
        return self.bottom - (self.bottom - self.top) * self.place(value, *self.y, "y" in self.log)

    def path(self, points):
        return "M" + "L".join(f"{self.at_x(x):.1f} {self.at_y(y):.1f}" for x, y in points)

    def line(self, points, style):
        self.parts.append(f'<path class="s{style} line" stroke-dasharray="{STYLES[style][2]}" '
                          f'd="{self.path(points)}"/>')
        for x, y in points:
            self.dot(x, y, style, 3.5)

    def band(self, points, style):
        """Between the (x, low, high) of points."""
        edge = [(x, low) for x, low, _ in points] + [(x, high) for x, _, high in reversed(points)]
        self.parts.append(f'<path class="s{style} band" d="{self.path(edge)}z"/>')

    def dot(self, x, y, style, size=4, hollow=False):
        self.parts.append(marker(style, self.at_x(x), self.at_y(y), size, hollow))

    def bar(self, low, high, y, style):
        """A horizontal line from low to high."""
        self.parts.append(f'<path class="s{style}" stroke-width="2" '
                          f'd="{self.path([(low, y), (high, y)])}"/>')

    def mark(self, x, label=""):
        """A dashed vertical line with a word at its top."""
        at = self.at_x(x)
        anchor = "end" if at > (self.left + self.right) / 2 else "start"
        self.parts.append(f'<path class="mark" d="M{at:.1f} {self.top - 4}V{self.bottom}"/>')
        self.parts.append(text(at + (4 if anchor == "start" else -4), self.top + 8, label, anchor,
                               "soft"))

    def names(self, lines):
        """Names lines to the right of the axes, in the order of their ends, each beside its own
        as far as the others leave room; (name, style, points) of each."""
        ends = sorted((self.at_y(points[-1][1]), self.at_x(points[-1][0]), style, name)
                      for name, style, points in lines)
        places, lowest = [], self.top
        for end, *_ in ends:
            places.append(max(end, lowest))
            lowest = places[-1] + LINE
        highest = self.bottom - 4
        for i in reversed(range(len(places))):
            places[i] = min(places[i], highest)
            highest = places[i] - LINE
        for (y, x, style, name), place in zip(ends, places):
            if x > self.right - 1:    # what ends earlier has no way to its name
                self.parts.append(f'<path class="s{style}" fill="none" '
                                  f'd="M{x + 4:.1f} {y:.1f}L{self.right + 15} {place:.1f}"/>')
            self.parts.append(marker(style, self.right + 19, place))
            self.parts.append(text(self.right + 27, place + 4, name))

    def note(self, line):
        self.parts.append(text(4, self.below + 12, line, kind="soft"))
        self.below += 18

    def svg(self):
        height = self.below + 4
        return (f'<svg viewBox="0 0 {WIDTH} {height:.0f}" role="img">'
                f'<title>{escape(self.title)}</title>{text(2, 14, self.title, kind="ink title")}'
                f'{"".join(self.parts)}</svg>')


# What `dots` shows in a row: small values, a large mean, a bar from low to high.
Mark = collections.namedtuple("Mark", "style values mean low high hollow",
                              defaults=(None, None, False))


def dots(title, rows, xlabel, dashed=None, start=None):
    """A row for each (label, list of Mark). `dashed` is where a dashed line stands, `start` where
    the axis begins."""
    shown = [v for _, marks in rows for m in marks for v in (*m.values, m.mean, m.low, m.high)]
    shown = [v for v in (*shown, dashed) if v is not None]
    low, high = min(shown), max(shown)
    pad = (high - low) * 0.06 or abs(high) * 0.06 or 1
    low = low - pad if start is None else start
    rows = [(shortened(label, 19), marks) for label, marks in rows]
    chart = Chart(title, (low, high + pad), (len(rows), 0), xlabel, yticks=[],
                  height=24 * len(rows) + 4, left=16 + 7 * max(len(label) for label, _ in rows))
    if dashed is not None:
        chart.mark(dashed)
    for y, (label, marks) in enumerate(rows):
        chart.parts.append(text(chart.left - 8, chart.at_y(y + 0.5) + 4, label, "end"))
        for m in marks:
            if m.low is not None:
                chart.bar(m.low, m.high, y + 0.5, m.style)
            for v in m.values:
                chart.dot(v, y + 0.75, m.style, 2, m.hollow)
            if m.mean is not None:
                chart.dot(m.mean, y + 0.5, m.style, 5, m.hollow)
    return chart.svg()


def colour(value, low, high):
    """Two-sided (blue, white, orange) when 0 lies inside, else white to blue away from 0."""
    def mix(a, b, t):
        return tuple(round(p + (q - p) * t) for p, q in zip(a, b))
    white, blue, orange = (247, 247, 247), (0, 70, 150), (190, 75, 0)
    if low < 0 < high:
        t = value / max(-low, high)
        return mix(white, orange if t > 0 else blue, min(abs(t), 1) ** 0.8)
    t = (value - low) / ((high - low) or 1)
    return mix(white, blue, 1 - t if high <= 0 else t)


def image(rows, low, high):
    """A PNG as data: URI, a pixel per value; None is transparent."""
    def pixel(v):
        return bytes((0, 0, 0, 0) if v is None else (*colour(v, low, high), 255))
    raw = b"".join(b"\0" + b"".join(map(pixel, row)) for row in rows)

    def chunk(name, data):
        body = name + data
        return struct.pack(">I", len(data)) + body + struct.pack(">I", zlib.crc32(body))
    png = (b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", struct.pack(">IIBBBBB", len(rows[0]), len(rows),
           8, 6, 0, 0, 0)) + chunk(b"IDAT", zlib.compress(raw, 9)) + chunk(b"IEND", b""))
    return "data:image/png;base64," + base64.b64encode(png).decode()


def heatmap(title, rows, xlabel, ylabel, limits=None, height=None):
    """A matrix (rows from the top) with its colour scale; limits are those of the scale. A square
    one is drawn as such."""
    values = [v for row in rows for v in row if v is not None]
    low, high = limits or (min(values), max(values))
    if low < 0 < high:
        low, high = -max(-low, high), max(-low, high)
    n, m = len(rows), len(rows[0])
    height = height or (WIDTH - 60 if n == m else 200)
    ticks = [(v + 0.5, short(v)) for v in nice_ticks(0, m - 1) if v == int(v)]
    chart = Chart(title, (0, m), (n, 0), xlabel, ylabel, height=height, xticks=ticks,
                  yticks=[(v + 0.5, short(v)) for v in nice_ticks(0, n - 1) if v == int(v)])

    def draw(data, x, y, w, h):
        chart.parts.append(f'<image class="pixels" preserveAspectRatio="none" x="{x}" y="{y}" '
                           f'width="{w}" height="{h}" href="{image(data, low, high)}"/>')
    draw(rows, chart.left, chart.top, chart.right - chart.left, chart.bottom - chart.top)
    scale, steps = [low + (high - low) * i / 63 for i in range(64)], (low, (low + high) / 2, high)
    draw([scale], chart.left, chart.below + 6, chart.right - chart.left, 10)
    for value, anchor, share in zip(steps, ("start", "middle", "end"), (0, 0.5, 1)):
        chart.parts.append(text(chart.left + share * (chart.right - chart.left),
                                chart.below + 30, short(value), anchor, "soft"))
    chart.below += 34
    return chart.svg()

"""A heat map of experts by domain: one map per layer, with one row per domain and one column per expert.

The picture is SVG and shows the shares that `minisgl.chapters.tutor.experts` measures, as colours and as numbers. Its
colours follow the web page that contains it, or the reader's system.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

from minisgl.trace.draw.svg import theme

__all__ = ["draw"]

CELL, GAP, LEFT, TOP, LINE = 30, 24, 74, 22, 18
MIN_WIDTH = 520
"""Smallest width in pixels at which the text is readable. On a narrower screen, the picture scrolls."""

STYLE = (
    theme("svg.heat")
    + "svg.heat{font:12px/1.3 ui-sans-serif,system-ui,sans-serif}svg.heat text{fill:var(--mg-ink)}"
    + "svg.heat .cell{fill:var(--mg-heat);stroke:var(--mg-line)}svg.heat .title{font-weight:600}"
    + "svg.heat .small{font-size:11px}svg.heat .value{font-size:11px;text-anchor:middle;pointer-events:none}"
)


def draw(shares: Mapping[str, Sequence[Sequence[float]]], layers: Sequence[int] | None = None, columns: int = 2) -> str:
    """Return the heat map as SVG. ``shares[domain][layer][expert]`` sums to 1 over the experts of each layer.

    ``layers`` selects the layers to draw; None draws all layers. ``columns`` is the number of maps side by side. The
    opacity of a cell is its share, divided by the largest share in the picture.
    """
    domains = list(shares)
    shown = list(range(len(shares[domains[0]]))) if layers is None else list(layers)
    experts = len(shares[domains[0]][0])
    most = max(shares[domain][layer][e] for domain in domains for layer in shown for e in range(experts))
    columns = min(columns, len(shown))
    wide, high = experts * CELL + GAP, len(domains) * CELL + TOP + LINE + GAP
    width, height = LEFT + columns * wide - GAP + 2, -(-len(shown) // columns) * high + LINE
    description = escape(_describe(shares, shown), quote=True)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" class="heat picture" viewBox="0 0 {width} {height}" role="img" '
        f'width="{width}" height="{height}" aria-label="{description}" style="min-width: {min(width, MIN_WIDTH)}px">',
        f"<style>{STYLE}</style>",
    ]
    for i, layer in enumerate(shown):
        x, y = LEFT + i % columns * wide, i // columns * high
        parts.append(f'<text class="title" x="{x}" y="{y + 14}">layer {layer}</text>')
        if i % columns == 0:
            parts += [
                f'<text x="{LEFT - 6}" y="{y + TOP + row * CELL + 19}" text-anchor="end">{escape(domain)}</text>'
                for row, domain in enumerate(domains)
            ]
        parts += [
            f'<text class="small" x="{x + e * CELL + CELL / 2}" y="{y + TOP + len(domains) * CELL + 13}" '
            f'text-anchor="middle">{e}</text>'
            for e in range(experts)
        ]
        for row, domain in enumerate(domains):
            for e, share in enumerate(shares[domain][layer]):
                title = f"layer {layer}, expert {e}: {100 * share:.1f} % of the router's choices for {domain}"
                parts.append(
                    f'<rect class="cell" data-layer="{layer}" data-domain="{escape(domain, quote=True)}" '
                    f'data-expert="{e}" data-share="{share:.4f}" x="{x + e * CELL}" y="{y + TOP + row * CELL}" '
                    f'width="{CELL}" height="{CELL}" fill-opacity="{share / most:.3f}">'
                    f"<title>{escape(title)}</title></rect>"
                    f'<text class="value" x="{x + e * CELL + CELL / 2}" y="{y + TOP + row * CELL + 19}">'
                    f"{100 * share:.0f}</text>"
                )
    notes = ["Numbers: per cent of a domain's choices in this layer.", f"An even share is {100 / experts:.1f} %."]
    for i, note in enumerate(notes):  # below each other if there is one column
        x, y = (2, height - 5 + LINE * (i - 1)) if columns == 1 else (2 + 300 * i, height - 5)
        parts.append(f'<text class="small" x="{x}" y="{y}">{note}</text>')
    parts.append("</svg>")
    return "\n".join(parts) + "\n"


def _describe(shares: Mapping[str, Sequence[Sequence[float]]], layers: Sequence[int]) -> str:
    """Return a text alternative of the picture: for each layer, the most chosen expert of each domain."""
    lines = []
    for layer in layers:
        busiest = []
        for domain, rows in shares.items():
            row = rows[layer]
            e = max(range(len(row)), key=row.__getitem__)
            busiest.append(f"{domain} {e} ({100 * row[e]:.0f} %)")
        lines.append(f"layer {layer}: {', '.join(busiest)}")
    return f"Heat map of experts by domain. The most chosen expert of each domain: {'; '.join(lines)}."

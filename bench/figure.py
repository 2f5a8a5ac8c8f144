"""Line figures for the manual, as SVG."""
import math

COLOURS = ["#555555", "#1b6ca8", "#c8553d", "#e0a030", "#3a7d44", "#7b4ea3"]


def accuracies(lines, label, ticks, log=False, thin=()):
    """Accuracies from 0 to 1 by x: `lines` are (name, [(x, accuracy)]), `thin` as many lists of lines without points beside each.

    `label` and `ticks` are the x axis's; with `log` it is logarithmic."""
    place = math.log2 if log else float
    every = [point for _, points in lines for point in points] + [point for group in thin for points in group for point in points]
    low, high = (bound([place(x) for x, _ in every]) for bound in (min, max))
    top = 5 * max(math.ceil(100 * max(rate for _, rate in every) / 5), 1)
    left = lambda x: 60 + 480 * (place(x) - low) / max(high - low, 1e-9)  # noqa: E731
    down = lambda rate: 320 - 290 * 100 * rate / top  # noqa: E731
    out = ['<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 800 370" font-family="sans-serif" font-size="13">',
           '<rect width="800" height="370" fill="#ffffff"/>', f'<text x="300" y="360" text-anchor="middle">{label}</text>',
           '<text x="16" y="175" text-anchor="middle" transform="rotate(-90 16 175)">accuracy, %</text>']
    for rate in range(0, top + 1, 5):
        at = down(rate / 100)
        out.append(f'<path d="M60 {at:.1f}H540" stroke="#dddddd"/><text x="52" y="{at + 4:.1f}" text-anchor="end">{rate}</text>')
    for x in ticks:
        out.append(f'<text x="{left(x):.1f}" y="340" text-anchor="middle">{x:.0f}</text>')

    def drawn(points, colour, width):
        path = " ".join(f"{left(x):.1f},{down(rate):.1f}" for x, rate in points)
        out.append(f'<polyline points="{path}" fill="none" stroke="{colour}" stroke-width="{width}"/>')

    for group, colour in zip(thin, COLOURS):
        for points in group:
            drawn(points, colour, 0.7)
    for i, ((name, points), colour) in enumerate(zip(lines, COLOURS)):
        drawn(points, colour, 2)
        out += [f'<circle cx="{left(x):.1f}" cy="{down(rate):.1f}" r="4" fill="{colour}"/>' for x, rate in points]
        out.append(f'<rect x="560" y="{40 + 24 * i}" width="14" height="4" fill="{colour}"/><text x="582" y="{46 + 24 * i}">{name}</text>')
    return "\n".join([*out, "</svg>", ""])

"""Shared by all pictures: axes, text and background for light and dark pages, and the name of their records."""

import hashlib
import json
from pathlib import Path

import numpy as np

# Curves are smoothed over this number of steps.
WINDOW = 5
# Readable on a white page and on a black page.
GRAY = "#7f7f7f"


def digest(records: list) -> str:
    """A name for these numbers. The picture drawn from the numbers contains the name, and the tests check it."""
    text = json.dumps(records, sort_keys=True)
    return "records " + hashlib.sha256(text.encode()).hexdigest()[:16]


def panels(rows: int, columns: int, **shape):
    """An empty figure and its axes (rows, columns)."""
    import matplotlib.pyplot as plt

    style = {"svg.fonttype": "none", "svg.hashsalt": "plainrl", "savefig.transparent": True}
    style |= {"legend.framealpha": 0, "font.size": 12, "axes.grid": True, "grid.alpha": 0.25}
    for name in ("text.color", "xtick.color", "ytick.color", "axes.labelcolor", "axes.edgecolor"):
        style[name] = GRAY
    plt.rcParams.update(style)
    return plt.subplots(rows, columns, layout="constrained", squeeze=False, **shape)


def save(figure, path: Path, name: str) -> None:
    """Save the figure as an SVG without a date. The SVG contains the name of its records."""
    import matplotlib.pyplot as plt

    path.parent.mkdir(parents=True, exist_ok=True)
    figure.savefig(path, metadata={"Date": None, "Description": name})
    plt.close(figure)


def smooth(values: list) -> np.ndarray:
    """The mean of the last five steps, without missing values."""
    values = np.array([np.nan if value is None else value for value in values], dtype=float)
    return np.array([np.nanmean(values[max(0, k - WINDOW + 1) : k + 1]) for k in range(len(values))])


def draw_band(ax, across, curves: np.ndarray, color: str, label: str | None = None) -> None:
    """Draw curves (seeds, steps): a line for their mean, and a band from the lowest to the highest."""
    ax.fill_between(across, curves.min(0), curves.max(0), alpha=0.2, linewidth=0, color=color)
    ax.plot(across, curves.mean(0), color=color, label=label)

"""Draw the recorded runs: python benchmark/plot.py

Reads benchmark/records/bundled.jsonl, writes benchmark/records/bundled.png: for every script, the share of sampled
responses with the right answer against the number of responses sampled so far; the mean of the seeds, smoothed over
five steps, and in a band the lowest and the highest seed.
"""

import json
from pathlib import Path

import matplotlib.pyplot as plt
import numpy as np

RECORDS = Path(__file__).resolve().parent / "records"
WINDOW = 5  # steps


def main() -> None:
    runs = [json.loads(line) for line in (RECORDS / "bundled.jsonl").read_text(encoding="utf-8").splitlines()]
    names = list(dict.fromkeys(run["script"] for run in runs))
    figure, axes = plt.subplots(3, 4, figsize=(11, 7), sharex=True, sharey=True, layout="constrained")
    for ax in axes.flat[len(names) :]:
        ax.set_axis_off()
    for name, ax in zip(names, axes.flat, strict=False):
        mine = [run for run in runs if run["script"] == name]
        curves = np.array([run["sampled_accuracy"] for run in mine])  # (seeds, steps)
        smooth = np.stack([np.convolve(curve, np.full(WINDOW, 1 / WINDOW), mode="valid") for curve in curves])
        # Where a script samples more than is asked for (dapo.py), its steps are taken to be equally long.
        episodes = np.linspace(0, np.mean([run["episodes"] for run in mine]), curves.shape[1] + 1)[WINDOW:]
        ax.fill_between(episodes, smooth.min(0), smooth.max(0), alpha=0.25, linewidth=0)
        ax.plot(episodes, smooth.mean(0))
        after, before = np.mean([run["after"] for run in mine]), mine[0]["before"]
        ax.set_title(f"{name}.py", fontsize=10)
        ax.text(0.97, 0.05, f"held-out: {before:.3f} to {after:.3f}", transform=ax.transAxes, ha="right", fontsize=9)
        ax.grid(alpha=0.3)
        ax.set_ylim(0.5, 1)
    figure.supxlabel("responses sampled", fontsize=9)
    figure.supylabel("accuracy of the sampled responses", fontsize=9)
    figure.savefig(RECORDS / "bundled.png", dpi=120)


if __name__ == "__main__":
    main()

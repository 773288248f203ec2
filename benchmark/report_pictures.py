"""docs/report/samples.png, which README.md shows: python benchmark/report_pictures.py runs/NAME

It is a part of report.py's page on a run of python grpo.py. A headless Chromium takes it: apt-get install chromium, and
pip install playwright==1.65.2.
"""

import shutil
import sys
import tempfile
from contextlib import contextmanager
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDER = ROOT / "docs" / "report"
CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
OPTIONS = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
OPTIONS += ["--disable-component-update", "--disable-sync"]


@contextmanager
def browser():
    """Start a headless Chromium without a profile."""
    from playwright.sync_api import sync_playwright

    with sync_playwright() as driver:
        chromium = driver.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield chromium
        chromium.close()


def main(folders: list[Path]) -> None:
    sys.path.insert(0, str(ROOT))
    import report

    FOLDER.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory() as temporary, browser() as chromium:
        path = report.main(report.Args(folders, Path(temporary, "report.html")))
        page = chromium.new_page(viewport={"width": 1280, "height": 1600})
        page.goto(path.as_uri())

        page.select_option("#kind", "mixed")
        # From the heading of the samples to the end of the third group.
        top, bottom = (page.locator(x).bounding_box() for x in ("#samples", ".group >> nth=2"))
        height = bottom["y"] + bottom["height"] - top["y"] + 8
        clip = {"x": 0, "y": top["y"] - 5, "width": 1280, "height": height}
        page.screenshot(path=FOLDER / "samples.png", clip=clip, full_page=True)


if __name__ == "__main__":
    main([Path(folder) for folder in sys.argv[1:]])

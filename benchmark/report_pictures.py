"""docs/report/curves.png and samples.png, which the pages show: python benchmark/report_pictures.py runs/*/

They are parts of report.py's page. A headless Chromium takes them: apt-get install chromium, and pip
install playwright==1.65.2. The README shows these runs:

    for seed in 1 2 3; do
        python grpo.py --eval-every 5 --seed $seed
        python rloo.py --eval-every 5 --seed $seed
    done
    python grpo.py --learning-rate 2e-3 --num-steps 40
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

        def take(name: str, last: str) -> None:
            """From the heading of this name to the end of the last element."""
            top, bottom = (page.locator(x).bounding_box() for x in (f"#{name}", last))
            height = bottom["y"] + bottom["height"] - top["y"] + 8
            clip = {"x": 0, "y": top["y"] - 5, "width": 1280, "height": height}
            page.screenshot(path=FOLDER / f"{name}.png", clip=clip, full_page=True)

        page.locator("#curves").scroll_into_view_if_needed()
        page.wait_for_function("document.querySelectorAll('#first .main-svg').length >= 6")
        take("curves", "#first")
        page.select_option("#kind", "mixed")
        take("samples", ".group >> nth=2")


if __name__ == "__main__":
    main([Path(folder) for folder in sys.argv[1:]])

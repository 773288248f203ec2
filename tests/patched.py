"""A module of a patch of variants/, for the tests of patches whose parent isn't in test_variants.py."""

import importlib.util
import subprocess
import tempfile
from pathlib import Path

from conftest import ROOT


def load_patched(name: str):
    patch = ROOT / "variants" / f"{name}.diff"
    parent = patch.read_text(encoding="utf-8").split()[1]
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, f"{name}.py")
        subprocess.run(["patch", "-s", "--fuzz=0", "-o", path, ROOT / parent, patch], check=True)
        spec = importlib.util.spec_from_file_location(name, path)
        module = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(module)
    return module

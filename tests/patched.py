"""The module of a patch of variants/."""

import importlib.util
import subprocess
import tempfile
from pathlib import Path

from conftest import ROOT

FOLDERS = []  # removed when the tests end


def load_patched(name: str):
    patch = ROOT / "variants" / f"{name}.diff"
    parent = patch.read_text(encoding="utf-8").split()[1]
    FOLDERS.append(tempfile.TemporaryDirectory())
    folder = Path(FOLDERS[-1].name)
    (folder / "assets").symlink_to(ROOT / "assets")
    path = folder / f"{name}.py"
    command = ["patch", "-s", "--fuzz=0", "-o", path, ROOT / parent, patch]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    assert done.returncode == 0, f"{done.stdout}run tools/siblings.py --write"
    spec = importlib.util.spec_from_file_location(name, path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module

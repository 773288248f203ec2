"""Carry a change from a script to those that are made from it: used by tools/siblings.py."""

import ast
import difflib
import re
import subprocess
import tempfile
from pathlib import Path

from scripts import ROOT, SCRIPTS


def last_commit(name: str) -> str:
    """The text of a file at the top of the repository, in the last commit."""
    command = ["git", "show", f"HEAD:./{name}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


def parts(text: str) -> dict[str, str]:
    """The text of each function, class and constant of a script, with the comments above it, by its name."""
    lines, found, last = text.splitlines(keepends=True), {}, 0
    for node in ast.parse(text).body:
        if isinstance(node, ast.Expr) and last == 0:
            name = "docstring"
        elif isinstance(node, ast.FunctionDef | ast.ClassDef):
            name = node.name
        elif isinstance(node, ast.Assign | ast.AugAssign):
            name = ast.unparse(node.targets[0] if isinstance(node, ast.Assign) else node.target)
        else:
            name = "__main__" if isinstance(node, ast.If) else "header"
        found[name] = found.get(name, "") + "".join(lines[last : node.end_lineno])
        last = node.end_lineno
    return found


def merge(child: str, base: str, parent: str) -> tuple[str, list[str]]:
    """The child with the changes from base to parent, and the lines of base that it couldn't find in the child.

    A line that the child has word for word is replaced, also beside lines of the child's own.
    """
    if base in (child, parent) or child == parent:
        return parent if child == base else child, []
    own, old, new = (text.splitlines(keepends=True) for text in (child, base, parent))
    place = {}  # line of base -> line of the child
    for block in difflib.SequenceMatcher(None, old, own, autojunk=False).get_matching_blocks():
        place |= {block.a + k: block.b + k for k in range(block.size)}
    edits, missing = [], []  # edits: first line of the child, the line after the last, and the new lines
    for tag, a1, a2, b1, b2 in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        places, lines = [place.get(i) for i in range(a1, a2)], new[b1:b2]
        if tag == "equal" or lines and "".join(lines) in child and None in places:
            continue  # the child has this change already
        if tag == "insert":
            before, after = place.get(a1 - 1, -1 if a1 == 0 else None), place.get(a1)
            if before is not None and own[before + 1 : before + 1 + len(lines)] != lines:
                edits.append((before + 1, before + 1, lines))
            elif before is None and after is not None and own[after - len(lines) : after] != lines:
                edits.append((after, after, lines))
            elif before is after is None:
                missing.append("".join(lines))
        elif None not in places and places[-1] - places[0] == a2 - a1 - 1:
            edits.append((places[0], places[-1] + 1, lines))
        elif a2 - a1 == b2 - b1:  # line by line
            for i, line in zip(range(a1, a2), lines, strict=True):
                if place.get(i) is not None:
                    edits.append((place[i], place[i] + 1, [line]))
                elif line not in own:
                    missing.append(old[i])
        elif lines or place.get(a1 - 1, -1) + 1 != place.get(a2):  # else the child has deleted them, too
            missing.append("".join(old[a1:a2]))
    for first, end, lines in reversed(edits):
        own[first:end] = lines
    return "".join(own), missing


def carry(child: str, base: str, parent: str) -> tuple[str, dict[str, list[str]]]:
    """The child with the changes from base to parent. Also the lines that it lacks, by the name of their part."""
    old, new, own = parts(base), parts(parent), parts(child)
    order = list(new)
    carried = {name: text for name, text in new.items() if name not in old}
    places = {name: order.index(name) for name in carried}
    missing, place = {}, 0
    for name, text in own.items():
        if name in old and name not in new and text == old[name]:
            continue  # the parent no longer has it
        if name in new:
            place = order.index(name)  # else the part stays behind the one before it
        carried[name], places[name] = text, place
        if name in old and name in new:
            carried[name], lines = merge(text, old[name], new[name])
            if lines and name != "docstring":  # which is each script's own
                missing[name] = lines
        elif name in old or name in new:  # one of them has another part of this name, or none
            missing[name] = f"{text.strip()}\n".splitlines(keepends=True)[:3]
    names = sorted([*own, *new], key=lambda name: places.get(name, 0))
    return "".join(carried[name] for name in dict.fromkeys(names) if name in carried), missing


def tell(name: str, missing: dict[str, list[str]]) -> None:
    """Print where a person has to look, with the lines that changed in the parent."""
    for part, lines in missing.items():
        print(f"{name} has other text, so look whether it needs the change in: {part}")
        print("".join(f"    {line}" for lines in lines for line in lines.splitlines(keepends=True)), end="")


def carry_scripts() -> None:
    """Carry the changes of grpo.py since the last commit into all other scripts."""
    base, parent = last_commit("grpo.py"), (ROOT / "grpo.py").read_text(encoding="utf-8")
    if base == parent:
        raise SystemExit("grpo.py has no change since the last commit, so there is nothing to carry")
    for path in [ROOT / f"{name}.py" for name in SCRIPTS if name != "grpo"]:
        child, missing = carry(path.read_text(encoding="utf-8"), base, parent)
        path.write_text(child, encoding="utf-8")
        tell(path.name, missing)


def write_patch(name: str, child: str) -> None:
    """Write variants/NAME.diff: this text against the parent that its docstring names."""
    parent = re.search(r"Parent: (\w+\.py)", child).group(1)
    before = (ROOT / parent).read_text(encoding="utf-8").splitlines(keepends=True)
    after = child.splitlines(keepends=True)
    patch = difflib.unified_diff(before, after, parent, f"{name}.py")
    (ROOT / "variants" / f"{name}.diff").write_text("".join(patch), encoding="utf-8")


def carry_patches() -> None:
    """Carry the changes of the parents since the last commit into the patches."""
    for path in sorted((ROOT / "variants").glob("*.diff")):
        parent = path.read_text(encoding="utf-8").split()[1]
        base, now = last_commit(parent), (ROOT / parent).read_text(encoding="utf-8")
        if (child := patched(path, base)) is not None:
            child, missing = carry(child, base, now)
            write_patch(path.stem, child)
            tell(path.name, missing)
        elif patched(path, now) is None:  # else --patch has just made it
            print(f"variants/{path.name} doesn't fit {parent}: make it again with --patch")


def patched(path: Path, parent: str) -> str | None:
    """The parent's text with this patch. None if it doesn't fit exactly."""
    with tempfile.TemporaryDirectory() as folder:
        before, after = Path(folder, "before"), Path(folder, "after")
        before.write_text(parent, encoding="utf-8")
        done = subprocess.run(["patch", "--fuzz=0", "-o", after, before, path], capture_output=True)
        return after.read_text(encoding="utf-8") if done.returncode == 0 else None

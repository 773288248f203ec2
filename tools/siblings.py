"""The sibling rule: what each script and patch changes of its parent, and the same text everywhere else.

    python tools/siblings.py --carry             take over what changed in grpo.py since the last commit into all
                                                 scripts, and then --write
    python tools/siblings.py --write             write the patches in variants/, docs/diffs/ and the diff in README.md
    python tools/siblings.py --patch cispo.py    write variants/cispo.diff from the whole script

Read the git diff of docs/diffs/ before you commit it: it shows a difference that you didn't intend. Of data, model,
runs, log, arguments and constants it shows only the name and a new digest.
"""

import argparse
import ast
import difflib
import re
import subprocess
import tempfile
from hashlib import sha256
from pathlib import Path

from scripts import ROOT, SCRIPTS, parent_of, read_script

CHILDREN = [name for name in SCRIPTS if parent_of(name) is not None]


def body(name: str) -> str:
    """The text of the script without its docstring."""
    text = read_script(name)
    end_of_docstring = text.index('"""\n\nimport') + len('"""\n')
    return text[end_of_docstring:]


def split_parts(text: str) -> dict[str, str]:
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


def parts(name: str) -> dict[str, str]:
    """split_parts of the script, without its docstring, and with Args in parts: "Args.NAME" for each of its fields.

    "Args" is the first line of that class with its headings.
    """
    found = {}
    for part, text in split_parts(body(name)).items():
        found |= fields_of_args(text) if part == "Args" else {part: text}
    return found


def fields_of_args(text: str) -> dict[str, str]:
    """The text of each field of Args under the key "Args.NAME", and the rest under "Args".

    The text of a field includes the comments above it and the docstring under it.
    """
    lines = text.splitlines(keepends=True)
    node = ast.parse(text).body[0]
    found = {"Args": "".join(lines[: node.lineno])}
    last = node.lineno
    for statement in node.body:
        if isinstance(statement, ast.AnnAssign):
            key = f"Args.{statement.target.id}"
            found[key] = ""
        for line in lines[last : statement.end_lineno]:
            if line.startswith("    # ----"):
                found["Args"] += line
            else:
                found[key] += line
        last = statement.end_lineno
    return found


def diff_lines(before: str, after: str, n: int) -> list[str]:
    """The lines of a diff with n lines of context. "..." stands before each hunk."""
    # The first two lines are the names of the files.
    diff = difflib.unified_diff(before.splitlines(), after.splitlines(), n=n, lineterm="")
    return ["..." if line.startswith("@@") else line.rstrip() for line in list(diff)[2:]]


def algorithm(name: str) -> str:
    """The script's equations, without their docstrings."""
    text = read_script(name).partition("# ==== algorithm ====\n")[2].partition("# ====")[0]
    return re.sub(r' *"""[^"]*"""\n', "", text)


def lesson() -> str:
    """The diff that README.md shows: from GRPO's equations to Dr. GRPO's, with blank lines between the hunks."""
    diff = diff_lines(algorithm("grpo"), algorithm("dr_grpo"), n=0)
    return "\n".join("" if line == "..." else line for line in diff[1:])


def blocks(name: str) -> dict[str, str]:
    """The parts of a script, but with main in pieces: "main: set-up", "main: part 1", ..."""
    found = {}
    for part, text in parts(name).items():
        if part != "main":
            found[part] = text
            continue
        pieces = re.split(r"^        # ---- (\d)\.", text, flags=re.MULTILINE)
        found["main: set-up"] = pieces[0]
        for number, piece in zip(pieces[1::2], pieces[2::2], strict=True):
            found[f"main: part {number}"] = f"        # ---- {number}.{piece}"
    return found


def sections(name: str) -> dict[str, str]:
    """The heading under which each function and class of the script stands, by its name."""
    found = {}
    heading = ""
    for line in body(name).splitlines():
        if line.startswith("# ===="):
            heading = line.strip("# =")
        if match := re.match(r"(?:def|class) (\w+)", line):
            found[match[1]] = heading
    return found


def rank(block: str, section: str | None) -> int | None:
    """The place of a block on a page: equations, main, other functions. None: the page only names it."""
    if section == "algorithm":
        return 0
    if block == "main: part 5":  # the log
        return None
    if block.startswith("main"):
        return 1
    # Args, constants and imports have no section.
    return None if section in (None, "data and model", "runs") else 2


def without_comments(text: str) -> str:
    return re.sub(r"\s*# .*", "", text).strip()


def diff_of(block: str, before: dict[str, str], after: dict[str, str], n: int) -> list[str]:
    """The lines of the diff of a block, with n lines of context."""
    return diff_lines(before.get(block, "").strip("\n"), after.get(block, "").strip("\n"), n)


def diff_page(child: str) -> str:
    """docs/diffs/CHILD.md: the docstring down to the differences, and the diff of each block.

    The blocks are in the order of the child. It leaves out data, model, runs, log, arguments and
    constants, functions that only the parent has, and what differs in comments only. Of these it has the
    name, and a digest of the diff: so a test that compares the page notices every change.
    """
    parent = parent_of(child)
    docstring = read_script(child).split('"""')[1]
    says = re.search(r"\A.*?^Parent: .*?(?=\n\n|\Z)", docstring, re.MULTILINE | re.DOTALL).group()
    mine, theirs = blocks(child), blocks(parent)
    section_of = sections(parent) | sections(child)
    shown, named, digests = [], [], []
    for name in [*mine, *(name for name in theirs if name not in mine)]:
        if mine.get(name) == theirs.get(name):
            continue
        place = rank(name, section_of.get(name.partition(":")[0]))
        if name not in mine:
            differs = place == 0
        else:
            differs = without_comments(mine[name]) != without_comments(theirs.get(name, ""))
        if place is None or not differs:
            diff = "\n".join(diff_of(name, theirs, mine, n=0))
            named.append(name)
            digests.append(f"{name.replace(' ', '_')}={sha256(diff.encode()).hexdigest()[:8]}")
        else:
            shown.append((place, name))
    shown.sort(key=lambda pair: pair[0])
    made_by = "<!-- made by python tools/siblings.py --write -->"
    lines = [f"# {child}.py, compared with {parent}.py", "", made_by, ""]
    lines += ["```", says, "```", ""]
    for place, name in shown:
        diff = diff_of(name, theirs, mine, n=2 if place == 0 else 1)
        lines += [f"## {name}", "", "```diff", *diff[1:], "```", ""]
    names = ", ".join("imports" if name == "header" else f"`{name}`" for name in named)
    lines += [f"`diff -u {parent}.py {child}.py` shows the rest: {names}.", ""]
    lines += [f"<!-- {' '.join(digests)} -->", ""]
    return "\n".join(lines)


def write_pages() -> None:
    folder = ROOT / "docs" / "diffs"
    folder.mkdir(exist_ok=True)
    readme = ROOT / "README.md"
    before, rest = readme.read_text(encoding="utf-8").split("```diff\n", 1)
    _, after = rest.split("\n```\n", 1)
    readme.write_text(f"{before}```diff\n{lesson()}\n```\n{after}", encoding="utf-8")
    for child in CHILDREN:
        (folder / f"{child}.md").write_text(diff_page(child), encoding="utf-8")


# ---- carrying a change from a script to those that are made from it


def last_commit(name: str) -> str:
    """The text of a file at the top of the repository, in the last commit."""
    command = ["git", "show", f"HEAD:./{name}"]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout


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
    old, new, own = split_parts(base), split_parts(parent), split_parts(child)
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
            if name == "docstring":  # each script has its own, so a person reads what it has become
                lines = [] if carried[name] == text else [carried[name]]
            if lines:
                missing[name] = lines
        elif name in old or name in new:  # one of them has another part of this name, or none
            missing[name] = f"{text.strip()}\n".splitlines(keepends=True)[:3]
    names = sorted([*own, *new], key=lambda name: places.get(name, 0))
    return "".join(carried[name] for name in dict.fromkeys(names) if name in carried), missing


def tell(name: str, missing: dict[str, list[str]]) -> None:
    """Print where a person has to look, with the lines that changed in the parent."""
    for part, lines in missing.items():
        if part == "docstring":
            print(f"{name}: its docstring has changed, too. Read it.")
            continue
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


def write_patch(name: str, child: str) -> Path:
    """Write variants/NAME.diff: this text against the parent that its docstring names. Returns its path."""
    parent = re.search(r"Parent: (\w+\.py)", child).group(1)
    before = (ROOT / parent).read_text(encoding="utf-8").splitlines(keepends=True)
    after = child.splitlines(keepends=True)
    patch = difflib.unified_diff(before, after, parent, f"{name}.py")
    path = ROOT / "variants" / f"{name}.diff"
    path.write_text("".join(patch), encoding="utf-8")
    return path


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


def main() -> None:
    as_written = argparse.RawDescriptionHelpFormatter
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=as_written)
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--carry", action="store_true")
    what.add_argument("--write", action="store_true")
    what.add_argument("--patch", type=Path, metavar="NAME.py")
    options = parser.parse_args()
    if options.patch:
        path = write_patch(options.patch.stem, options.patch.read_text(encoding="utf-8"))
        print(f"wrote {path.relative_to(ROOT)}")
        return
    if options.carry:
        carry_scripts()
    carry_patches()
    write_pages()


if __name__ == "__main__":
    main()

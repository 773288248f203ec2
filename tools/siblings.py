"""The sibling rule: what each script and patch changes of its parent, and the same text everywhere else.

    python tools/siblings.py                     print the number of changed lines, and the names of what differs
    python tools/siblings.py vapo                only for these scripts
    python tools/siblings.py --carry             merge what changed in grpo.py since the last commit into all scripts,
                                                 and then --write
    python tools/siblings.py --write             write the patches in variants/, docs/diffs/ and the diff in README.md
    python tools/siblings.py --patch cispo.py    write variants/cispo.diff from the whole script

Read the git diff of docs/diffs/ before you commit it: it shows a difference that you didn't intend. Of set-up, log,
arguments and constants it shows only the name and a new digest.

A changed line is one that only the child has, or one that only the parent has. The docstring of the file isn't counted.
"""

import argparse
import ast
import difflib
import re
from hashlib import sha256
from pathlib import Path

from carry import carry_patches, carry_scripts, write_patch
from scripts import ROOT, SCRIPTS, parent_of, read_script

CHILDREN = [name for name in SCRIPTS if parent_of(name) is not None]


def body(name: str) -> str:
    """The text of the script without its docstring."""
    text = read_script(name)
    end_of_docstring = text.index('"""\n\nimport') + len('"""\n')
    return text[end_of_docstring:]


def parts(name: str) -> dict[str, str]:
    """The text of each function, class, field of Args and constant of the script, by its name.

    The text includes the decorators and the comments above it. "header" is the import lines, and
    "Args" is the first line of that class with its headings. If several statements build a
    constant, they are one text.
    """
    source = body(name)
    lines = source.splitlines(keepends=True)
    found = {}
    last = 0
    for node in ast.parse(source, f"{name}.py").body:
        if isinstance(node, ast.ClassDef) and node.name == "Args":
            above = "".join(lines[last : node.lineno - 1])
            found |= fields_of_args(node, lines)
            found["Args"] = above + found["Args"]
            last = node.end_lineno
            continue
        # The comments before the node are included.
        text = "".join(lines[last : node.end_lineno])
        last = node.end_lineno
        if isinstance(node, ast.FunctionDef | ast.ClassDef):
            key = node.name
        elif isinstance(node, ast.Assign):
            key = node.targets[0].id
        elif isinstance(node, ast.AugAssign):
            key = node.target.id
        else:
            key = "header"
        found[key] = found.get(key, "") + text
    return found


def fields_of_args(node: ast.ClassDef, lines: list[str]) -> dict[str, str]:
    """The text of each field of Args under the key "Args.NAME", and of the headings under "Args".

    The text of a field includes the comments above it and the docstring under it.
    """
    found = {"Args": lines[node.lineno - 1]}
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


def differing_names(child: str) -> set[str]:
    """The names whose text differs between child and parent, and the names that only one of them has."""
    mine = parts(child)
    theirs = parts(parent_of(child))
    return {name for name in mine.keys() | theirs.keys() if mine.get(name) != theirs.get(name)}


def changed_lines(child: str) -> tuple[int, int]:
    """The number of lines that only the parent has, and of lines that only the child has."""
    before = body(parent_of(child)).splitlines()
    after = body(child).splitlines()
    # The first two lines are the names of the files.
    diff = list(difflib.unified_diff(before, after, n=0, lineterm=""))[2:]
    removed = sum(line.startswith("-") for line in diff)
    added = sum(line.startswith("+") for line in diff)
    return removed, added


def algorithm(name: str) -> list[str]:
    """The lines of the script's equations, without their docstrings."""
    text = read_script(name).partition("# ==== algorithm ====\n")[2].partition("# ====")[0]
    return re.sub(r' *"""[^"]*"""\n', "", text).splitlines()


def lesson() -> str:
    """The diff that README.md shows: from GRPO's equations to Dr. GRPO's, with blank lines between the hunks."""
    lines = []
    diff = difflib.unified_diff(algorithm("grpo"), algorithm("dr_grpo"), n=0, lineterm="")
    for line in list(diff)[2:]:
        lines.append("" if line.startswith("@@") else line)
    return "\n".join(lines[1:])


def table() -> str:
    """docs/diffs/README.md: the size of each script and the changed lines."""
    rows = [
        "# What each script changes",
        "",
        "<!-- made by python tools/siblings.py --write -->",
        "",
        "A removed line is one that only the parent has, and an added line is one that only the child has, without the",
        "docstring. The links show those of the equations, the loop and the sampling.",
        "",
        "| script | diff to its parent | kB | lines removed | lines added |",
        "| --- | --- | --- | --- | --- |",
    ]
    for name in SCRIPTS:
        size = f"{len(read_script(name).encode()) / 1000:.0f}"
        if name in CHILDREN:
            removed, added = changed_lines(name)
            diff = f"[{parent_of(name)}.py]({name}.md)"
            rows.append(f"| {name}.py | {diff} | {size} | {removed} | {added} |")
        else:
            rows.append(f"| {name}.py | - | {size} | - | - |")
    return "\n".join(rows) + "\n"


def replace_between(page: str, start: str, text: str, end: str) -> None:
    """Replace the text between the lines `start` and `end` of the page."""
    path = ROOT / page
    before, rest = path.read_text(encoding="utf-8").split(f"{start}\n", 1)
    _, after = rest.split(f"\n{end}\n", 1)
    path.write_text(f"{before}{start}\n{text}\n{end}\n{after}", encoding="utf-8")


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
    old = before.get(block, "").strip("\n").splitlines()
    new = after.get(block, "").strip("\n").splitlines()
    # The first two lines are the names of the files.
    diff = list(difflib.unified_diff(old, new, n=n, lineterm=""))[2:]
    return ["..." if line.startswith("@@") else line.rstrip() for line in diff]


def diff_page(child: str) -> str:
    """docs/diffs/CHILD.md: what the docstring says of the differences, and the diff of each block.

    It leaves out set-up, log, arguments and constants, functions that only the parent has, and what
    differs in comments only. Of these it has the name, and a digest of the diff: so a test that
    compares the page notices every change.
    """
    parent = parent_of(child)
    docstring = read_script(child).split('"""')[1]
    says = re.search(r"^Parent: .*?(?=\n\n|\Z)", docstring, re.MULTILINE | re.DOTALL).group()
    mine, theirs = blocks(child), blocks(parent)
    section_of = sections(parent) | sections(child)
    shown, named, digests = [], [], []
    for name in [*theirs, *(name for name in mine if name not in theirs)]:
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
    lines = [
        f"# {child}.py, compared with {parent}.py",
        "",
        "<!-- made by python tools/siblings.py --write -->",
        "",
        says,
        "",
    ]
    for place, name in shown:
        diff = diff_of(name, theirs, mine, n=2 if place == 0 else 1)
        lines += [f"## {name}", "", "```diff", *diff[1:], "```", ""]
    names = ", ".join("imports" if name == "header" else f"`{name}`" for name in named)
    lines += [
        f"`diff -u {parent}.py {child}.py` shows the rest: {names}.",
        "",
        f"<!-- {' '.join(digests)} -->",
        "",
    ]
    return "\n".join(lines)


def write_pages() -> None:
    folder = ROOT / "docs" / "diffs"
    folder.mkdir(exist_ok=True)
    (folder / "README.md").write_text(table(), encoding="utf-8")
    replace_between("README.md", "```diff", lesson(), "```")
    for child in CHILDREN:
        (folder / f"{child}.md").write_text(diff_page(child), encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("names", nargs="*", metavar="script", default=CHILDREN)
    parser.add_argument("--carry", action="store_true")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--patch", type=Path, metavar="NAME.py")
    options = parser.parse_args()
    children = [re.sub(r"\.py$", "", name) for name in options.names]
    for child in children:
        if child not in CHILDREN:
            parser.error(f"{child} isn't one of {', '.join(CHILDREN)}")

    if options.patch:
        write_patch(options.patch.stem, options.patch.read_text(encoding="utf-8"))
        return
    if options.carry and not carry_scripts():
        return
    if options.carry or options.write:
        carry_patches()
        write_pages()
    for child in children:
        removed, added = changed_lines(child)
        print(f"{child}.py against {parent_of(child)}.py: {removed} lines removed, {added} added")
        print("    " + ", ".join(sorted(differing_names(child))))


if __name__ == "__main__":
    main()

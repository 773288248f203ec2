"""Exercises that grade themselves: README.md in this folder describes them.

python exercises/make.py                    writes my_grpo.py: today's grpo.py with holes
python exercises/make.py --check            grades it, with a sentence for each exercise
python exercises/make.py --check FILE ...   grades these files, with a line for each file
"""

import argparse
import ast
import json
import os
import re
import select
import signal
import subprocess
import sys
import tempfile
import textwrap
from contextlib import suppress
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
STUDENT = ROOT / "my_grpo.py"  # beside utils and assets, so that it runs as grpo.py does
GRADER = ROOT / "exercises" / "grade.py"
EXERCISES = [
    "1 advantages",
    "2 loss",
    "3 KL",
    "4 states",
    "5 draw",
    "6 leave one out",
    "7 DAPO and Dr. GRPO",
    "8 GSPO",
    "9 CISPO",
]
# What a hole says, and how its first and its last line begin.
HOLES = [
    ("1: return the advantages (B, G)", "# Equal rewards must get", "return (rewards - "),
    ("2: set logratio, ratio, surrogate (n, R)", "logratio = logprobs", "surrogate = torch.min"),
    ("2: set loss, a scalar", "seq_loss = masked_mean(", "loss = seq_loss.sum()"),
    ("3: set kl (n, R)", "ref_logratio = ref_logprobs", "kl = torch.expm1("),
    ("4: set flags, a list of bools", "# The state at a token predicts", "flags = [False]"),
    ("5: return tokens, logprobs (rows,)", "scale = temperature if", "return token, logprobs"),
    ("6: return the advantages (B, G)", "# Equal returns must get", "return returns - others"),
]
# The functions of exercises 7 to 9, each of which is a hole.
LOSSES = '''
def dapo_loss(logprobs, old_logprobs, advantages, mask, num_tokens, eps_low=0.2, eps_high=0.28):
    """The loss -J of DAPO, a scalar. Yu et al. 2025, arXiv:2503.14476v1, Eq. 8."""
    raise NotImplementedError("exercise 7: return the loss of DAPO, a scalar")


def dr_grpo_loss(logprobs, old_logprobs, advantages, mask, num_seqs, max_tokens, clip_eps=0.2):
    """The loss -J of Dr. GRPO, a scalar. Liu et al. 2025, arXiv:2503.20783."""
    raise NotImplementedError("exercise 7: return the loss of Dr. GRPO, a scalar")


def gspo_loss(logprobs, old_logprobs, advantages, mask, num_seqs, eps_low=3e-4, eps_high=4e-4):
    """The loss -J of GSPO, a scalar. Zheng et al. 2025, arXiv:2507.18071v2, Eq. 5 and 7."""
    raise NotImplementedError("exercise 8: return the loss of GSPO, a scalar")


def cispo_loss(logprobs, old_logprobs, advantages, mask, num_tokens, eps_high=4.0):
    """The loss -J of CISPO, a scalar. MiniMax 2025, arXiv:2506.13585, Eq. 4 and 5."""
    raise NotImplementedError("exercise 9: return the loss of CISPO, a scalar")
'''


# ==== the file with holes ====
def find(text, first, last):
    """The lines of text from the one that begins with first to the one that begins with last."""
    pattern = rf"^ *{re.escape(first)}.*?^ *{re.escape(last)}.*?\n"
    found = re.findall(pattern, text, re.MULTILINE | re.DOTALL)
    if len(found) != 1:
        raise ValueError(f"{len(found)} places from {first!r} to {last!r}: correct HOLES")
    return found[0]


def original():
    """The text of grpo.py, with leave_one_out, which is compute_advantages of rloo.py."""
    text = (ROOT / "grpo.py").read_text(encoding="utf-8")
    rloo = (ROOT / "rloo.py").read_text(encoding="utf-8")
    function = find(rloo, "def compute_advantages(", "return returns - others")
    function = function.replace("compute_advantages", "leave_one_out")
    return text.replace("\ndef minibatches(", f"\n{function}\n\ndef minibatches(")


def student_file():
    """The text of grpo.py with holes, and with leave_one_out and the four LOSSES."""
    text = original()
    for sentence, first, last in HOLES:
        lines = find(text, first, last)
        indent = " " * (len(lines) - len(lines.lstrip()))
        hole = f'{indent}raise NotImplementedError("exercise {sentence}")\n'
        text = text.replace(lines, hole)
    return text.replace("\ndef minibatches(", f"{LOSSES}\n\ndef minibatches(")


# ==== grading ====
def run(command, timeout, folder, output):
    """Run the command, kill what is left of its process group, and return how it ended and what
    it wrote.

    The command writes into a pipe, whose number is its last argument.
    """
    pipe, end = os.pipe()
    streams = dict(stdin=subprocess.DEVNULL, stdout=output, stderr=output, pass_fds=[end])
    process = subprocess.Popen([*command, str(end)], cwd=folder, start_new_session=True, **streams)
    os.close(end)
    try:
        select.select([pipe], [], [])  # until it writes or ends: grade.py's imports don't count
        how = f"its process ended with status {process.wait(timeout)}"
    except subprocess.TimeoutExpired:
        how = f"no answer within {timeout:g} s"
    finally:
        with suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
    os.set_blocking(pipe, False)  # what has escaped from the group may hold the other end
    with open(pipe, "rb") as file:
        return how, file.read() or b""


def grade(path, names, timeout, output=None):
    """Grade the exercises with these names: name -> "right", or a sentence.

    grade.py grades in a process of its own. If this process ends or is killed inside an exercise,
    that exercise is "stopped", and a new process grades those after it. If the file doesn't load,
    there is one sentence for "all".
    """
    verdicts = {}
    while missing := [name for name in names if name not in verdicts]:
        with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
            command = [sys.executable, GRADER, path.resolve(), ",".join(missing)]
            how, written = run(command, timeout, folder, output)
        found = {}
        for line in written.splitlines():
            with suppress(ValueError, TypeError):  # a submission can write anything there
                name, text = json.loads(line)
                found[name] = " ".join(str(text).split())[:500]
        if "started" not in found:
            sys.exit(f"grade.py doesn't start: {how}. Try `python exercises/grade.py`.")
        if "loaded" not in found:
            text = f"stopped: the file doesn't load: {found.get('error', how)}"
            if not verdicts:
                return {"all": text}
            return verdicts | dict.fromkeys(missing, text)  # it has loaded before
        for name in missing:
            verdicts[name] = found.get(name, f"stopped: {how}")
            if name not in found:  # here it ended, so a new process begins with the next one
                break
    return verdicts


def code(source):
    """Its lines of code, without comments and indents, and with a line end on both sides."""
    lines = ast.unparse(ast.parse(source)).splitlines()
    return "\n".join(["", *(line.strip() for line in lines), ""])


def copied(path):
    """The numbers of the exercises 1 to 6 for which this file has the lines of grpo.py or rloo.py."""
    try:
        submitted = code(path.read_bytes())
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return []
    numbers = {int(sentence[0]) for sentence, *_ in HOLES}
    for sentence, *ends in HOLES:
        if code(textwrap.dedent(find(original(), *ends))) not in submitted:
            numbers.discard(int(sentence[0]))
    return sorted(numbers)


def line_of(record):
    """A file's grades in a line."""
    parts = [" ".join(map(str, record["right"]))]
    for name, text in record["verdicts"].items():
        if text.startswith("stopped: "):
            parts.append(f"{name.split()[0]} {text}")  # its number, or all
    if record["copied"]:
        parts.append("as in the repository: " + " ".join(map(str, record["copied"])))
    text = "; ".join(part for part in parts if part) or "none"
    return f"{record['file']} {record['points']}/{record['of']}: {text}"


def main():
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    number = dict(type=int, choices=range(1, len(EXERCISES) + 1), metavar="N")
    parser.add_argument("--check", nargs="*", type=Path, metavar="FILE", help="grade, don't write")
    parser.add_argument("--only", nargs="+", **number, help="grade only exercises N ...")
    parser.add_argument(
        "--timeout", type=float, default=60, help="seconds until a process is stopped (60)"
    )
    parser.add_argument("--json", action="store_true", help="print a JSON object for each file")
    args = parser.parse_args()
    if args.check is None:
        if STUDENT.exists():
            sys.exit(f"{STUDENT} exists, and may hold your work. To begin again, move it away.")
        STUDENT.write_text(student_file(), encoding="utf-8")
        print(f"wrote {STUDENT}. To grade it: python exercises/make.py --check")
        return
    names = [name for name in EXERCISES if not args.only or int(name[0]) in args.only]
    paths = args.check or [STUDENT]
    for path in paths:
        if not path.is_file():
            parser.error(f"no file {path}")

    all_right = True
    for path in paths:
        # Students see what their file prints.
        output = subprocess.DEVNULL if args.check or args.json else None
        verdicts = grade(path, names, args.timeout, output)
        right = [int(name[0]) for name in names if verdicts.get(name) == "right"]
        all_right &= len(right) == len(names)
        record = {"file": str(path), "points": len(right), "of": len(names), "right": right}
        same = [number for number in copied(path) if EXERCISES[number - 1] in names]
        record |= {"copied": same, "verdicts": verdicts}
        if args.json:
            print(json.dumps(record), flush=True)
        elif args.check:
            print(line_of(record), flush=True)
        else:
            for name, text in verdicts.items():
                print(f"{name}: {text}")
    sys.exit(0 if all_right else 1)


if __name__ == "__main__":
    main()

"""The losses of one or two lines in variants/README.md: each row is followed, and the changed script trains."""

import re
import sys
import types
from pathlib import Path

import pytest
import torch
from conftest import ROOT, load_patched, small_recipe
from scripts import SCRIPTS

SECTION = (ROOT / "variants" / "README.md").read_text(encoding="utf-8")
SECTION = SECTION.split("## Losses of one or two lines")[1].split("\n## ")[0]
# Loss -> script, function, the line, and what it becomes.
ROWS = {}
for row in re.findall(r"^\| (.*) \|$", SECTION, re.MULTILINE)[1:]:
    loss, _, script, line, becomes, _ = row.split(" | ")
    function, line = re.fullmatch(r"in (\w+), `([^`]+)`.*", line).groups()
    ROWS[loss] = (script.split(".py")[0], function, line, becomes)
LOOP = "            for indices, micro_batch in micro_batches("


def replace_once(text, old, new):
    assert text.count(old) == 1, (text.count(old), old)
    return text.replace(old, new)


def followed(loss, text):
    """The text of the script of a row, changed as the row says."""
    _, function, line, becomes = ROWS[loss]
    before, body = text.split(f"\ndef {function}(", 1)
    if loss == "CoPG":
        following = re.search(re.escape(line) + r"\n( +.*\n)", body)[1]
        body = replace_once(body, f"        {line}\n{following}", "")
        (call,) = re.findall(r"`(rollout_logprobs\(.*?\))`", becomes)
        moved = f"        {line.replace('old_logprobs', call)}\n{following}"
        body = replace_once(
            body, LOOP, re.sub("^", "    ", moved.rstrip(), flags=re.M) + "\n" + LOOP
        )
    else:
        new, *others = re.findall(r"`([^`]+)`", becomes)
        body = replace_once(body, line, new)
        if loss == "OPO":
            argument, name = others
            body = replace_once(body, "rewards):\n", f"rewards, {name}):\n")
            call = "compute_advantages(rewards)"
            body = replace_once(body, call, f"compute_advantages(rewards, {argument})")
        if loss == "a reward and a teacher":
            computed, argument, name, imported = [x for x in others if x != "rewards = ..."]
            body = body.replace("kappa", "0.1")
            body = body.replace("teacher_logprobs):\n", f"teacher_logprobs, {name}):\n", 1)
            line = re.search(r"\n( +)rewards = .*\n", body)
            body = replace_once(body, line[0], f"{line[0]}{line[1]}{computed}\n")
            call = "old_logprobs[indices], teacher_logprobs[indices]\n"
            body = replace_once(body, call, call.replace("\n", f", {argument}\n"))
            before = f"{before}\n{imported}\n"
        if loss == "MaxRL":
            before = re.sub("^REWARDS = .*", others[0], before, flags=re.M)
    return f"{before}\ndef {function}({body}"


@pytest.mark.parametrize("loss", ROWS)
def test_a_row_of_the_table_trains(loss, tmp_path, monkeypatch):
    """With two minibatches and a KL it trains something else than the script that it changes."""
    name = ROWS[loss][0]
    plain = __import__(name) if name in SCRIPTS else load_patched(name)
    module = types.ModuleType(f"{name}_of_a_row")
    module.__file__ = plain.__file__
    monkeypatch.setitem(sys.modules, module.__name__, module)
    text = Path(plain.__file__).read_text(encoding="utf-8")
    exec(compile(followed(loss, text), module.__name__, "exec"), module.__dict__)
    metrics = []
    for script in (plain, module):
        fields = small_recipe(script) | dict(num_steps=2, num_minibatches=2, num_prompts=8)
        fields |= dict(beta=0.1) if hasattr(script.Args, "beta") else {}
        fields |= dict(delta=1e-4) if loss == "IPO" else {}  # so that some tokens are left out
        folder = str(tmp_path / script.__name__)
        args = script.Args(**fields, eval_size=2, device="cpu", runs_dir=folder)
        metrics.append(script.main(args))
    before, changed = metrics
    assert torch.tensor(changed["optim/grad_norm"]).isfinite() and changed["optim/skipped"] == 0
    assert changed["optim/grad_norm"] != before["optim/grad_norm"]

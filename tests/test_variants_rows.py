"""The losses of one or two lines in variants/README.md: each row is followed, and the changed script trains."""

import re
import sys
import types

import pytest
import torch
from conftest import ROOT, small_recipe

SECTION = (ROOT / "variants" / "README.md").read_text(encoding="utf-8")
SECTION = SECTION.split("## Losses of one or two lines")[1].split("\n## ")[0]
# Loss -> script, function, the line, and what it becomes.
ROWS = {}
for row in re.findall(r"^\| (.*) \|$", SECTION, re.MULTILINE)[1:]:
    loss, _, script, line, becomes, _ = row.split(" | ")
    function, line = re.fullmatch(r"in (\w+), `([^`]+)`.*", line).groups()
    ROWS[loss] = (script.removesuffix(".py"), function, line, becomes)
LOOP = "            for indices, micro_batch in micro_batches("


def replace_once(text, old, new):
    assert text.count(old) == 1, (text.count(old), old)
    return text.replace(old, new)


def followed(loss):
    """The script of a row, changed as the row says."""
    name, function, line, becomes = ROWS[loss]
    text = (ROOT / f"{name}.py").read_text(encoding="utf-8")
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
        if loss == "MaxRL":
            before = re.sub("^REWARDS = .*", others[0], before, flags=re.M)
    return f"{before}\ndef {function}({body}"


@pytest.mark.parametrize("loss", ROWS)
def test_a_row_of_the_table_trains(loss, tmp_path, monkeypatch):
    """With two minibatches and a KL it trains something else than the script that it changes."""
    name = ROWS[loss][0]
    module = types.ModuleType(f"{name}_of_a_row")
    module.__file__ = str(ROOT / f"{name}.py")
    monkeypatch.setitem(sys.modules, module.__name__, module)
    exec(compile(followed(loss), module.__name__, "exec"), module.__dict__)
    metrics = []
    for script in (__import__(name), module):
        fields = small_recipe(script) | dict(
            num_steps=2, num_minibatches=2, beta=0.1, num_prompts=8
        )
        folder = str(tmp_path / script.__name__)
        args = script.Args(**fields, eval_size=2, device="cpu", runs_dir=folder)
        metrics.append(script.main(args))
    plain, changed = metrics
    assert torch.tensor(changed["optim/grad_norm"]).isfinite() and changed["optim/skipped"] == 0
    assert changed["optim/grad_norm"] != plain["optim/grad_norm"]

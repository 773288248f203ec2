"""The pages: links, formulas, quoted lines, exercises, tables and numbers are those of scripts and records.

Also: records come from clean trees, and three examples of docs/extend.md work (data, entropy bonus, HTTP judge).
"""

import dataclasses
import http.server
import inspect
import json
import math
import re
import subprocess
import sys
import threading
import types
from collections import Counter
from pathlib import Path

import pytest
import torch
from conftest import ROOT, small_recipe
from scripts import MULTI_PROCESS, NEEDS_VLLM, SCRIPTS, parent_of

import grpo

PAGES = sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").glob("*.md"))
PAGES += [ROOT / "variants" / "README.md"]


@pytest.mark.parametrize("page", PAGES, ids=[str(page.relative_to(ROOT)) for page in PAGES])
def test_every_link_leads_somewhere(page):
    """Links lead to existing files, and anchors to headings, with GitHub's names for them."""
    text = page.read_text(encoding="utf-8")
    for target in re.findall(
        r"\]\((?!https?:)([^)]+)\)", re.sub(r"```.*?```", "", text, flags=re.DOTALL)
    ):
        name, _, anchor = target.partition("#")
        linked = (page.parent / name).resolve() if name else page
        assert linked.exists(), f"{page.name}: {target}"
        if anchor:
            headings = re.findall(r"^#+ (.*)$", linked.read_text(encoding="utf-8"), re.MULTILINE)
            assert anchor in {
                re.sub(r"[^\w\- ]", "", h.lower()).replace(" ", "-") for h in headings
            }, target


def test_the_lines_beside_the_formulas_are_the_scripts():
    """The code in docs/algorithms.md is in the script that the block names, with "..." for what is left out."""
    text, seen = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8"), set()
    for block in re.findall(r"```python\n(.*?)```", text, re.DOTALL):
        first, code = block.split("\n", 1)
        name = first.removeprefix("# ")
        script = [x.strip() for x in (ROOT / name).read_text(encoding="utf-8").splitlines()]
        script = "\n".join(["", *script, ""])
        for part in re.split(r"^ *\.\.\.\n", code, flags=re.MULTILINE):
            lines = "\n".join(["", *(x.strip() for x in part.splitlines()), ""])
            assert lines in script, lines
        seen.add(Path(name).stem)
    assert seen >= set(SCRIPTS) - set(MULTI_PROCESS)


def test_the_skeleton_of_main_is_main():
    """The lines of main in docs/algorithms.md are in grpo.main, in this order. A line may end early, in `...`."""
    text = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```py\n(model, .*?)```", text, re.DOTALL)
    main = "".join(inspect.getsource(grpo.main).split())
    end = 0
    for line in block.splitlines():
        line = re.sub(r"  # .*$", "", line) if "# ----" not in line else line
        line = "".join(line.removesuffix("...)").split())
        assert line in main[end:], line
        end = main.index(line, end) + len(line)


def test_the_formulas_survive_markdown():
    """No formula inside a line has what Markdown would take for its own: escapes, emphasis, HTML."""
    text = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    text = re.sub(r"^ *```.*?^ *```", "", text, flags=re.DOTALL | re.MULTILINE)
    text = re.sub(r"`[^`\n]*`", "", text)
    formulas = re.findall(r"\$([^$\n]+)\$", text)
    assert len(formulas) > 100 and not any(line.count("$") % 2 for line in text.splitlines())
    for formula in formulas:
        assert not re.search(r"\\[^a-zA-Z]|[^\w]_|[*<>|]", formula), formula


def test_the_family_tree_is_the_one_of_the_docstrings():
    text = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    shown = re.findall(r"^  (\w+) --> (\w+)$", text, re.MULTILINE)
    pairs = [(parent_of(name), name) for name in SCRIPTS]
    assert sorted(shown) == sorted(pair for pair in pairs if pair[0] is not None)


def differences(page: str) -> dict[str, str]:
    """Apply each diff on a page to grpo.py. Return the script's name -> its source."""
    text, sources = (ROOT / "docs" / f"{page}.md").read_text(encoding="utf-8"), {}
    blocks = re.findall(r"```diff\n--- grpo.py\n\+\+\+ (\w+).py\n(.*?)```", text, re.DOTALL)
    for name, block in blocks:
        source = (ROOT / "grpo.py").read_text(encoding="utf-8")
        _, *hunks = re.split(r"^@@ @@\n", block, flags=re.MULTILINE)
        for hunk in hunks:
            lines = hunk.splitlines(keepends=True)
            old = "".join(line[1:] for line in lines if line[:1] != "+")
            new = "".join(line[1:] for line in lines if line[:1] != "-")
            assert source.count(old) == 1, (name, old)
            source = source.replace(old, new)
        sources[name] = source
    return sources


def load(monkeypatch, name: str, source: str):
    """A module with this source and with a path beside grpo.py."""
    module = types.ModuleType(name)
    module.__file__ = str(ROOT / f"{name}.py")
    # A dataclass looks up its module here.
    monkeypatch.setitem(sys.modules, name, module)
    exec(compile(source, module.__file__, "exec"), module.__dict__)
    module.SCRIPT = ROOT / "grpo.py"  # a run copies its script
    return module


def test_the_differences_shown_are_real():
    """In docs/extend.md, two diffs apply to grpo.py and give valid Python. The diff between them quotes a patch."""
    found = differences("extend")
    assert list(found) == ["grpo_math", "entropy"]
    for name, source in found.items():
        compile(source, name, "exec")
    text = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    excerpt = re.findall(r"```diff\n(.*?)```", text, re.DOTALL)[1]
    assert excerpt in (ROOT / "variants" / "cispo.diff").read_text(encoding="utf-8")


def test_the_problems_of_the_example(tmp_path, monkeypatch):
    """The command of docs/extend.md writes 80 problems, and grpo.py reads them. The last tenth is held out."""
    text = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    (command,) = re.findall(r"^python -c .*$", text, re.MULTILINE)
    command = command.replace("python", sys.executable, 1)
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    flags = dict(dataset="sums.jsonl", question_column="task", answer_column="result")
    args = dataclasses.replace(grpo.BUNDLED, **flags)
    _, tokenizer, _ = grpo.load_model(args)
    train, test = grpo.load_data(args, tokenizer)
    assert [len(train), len(test)] == [72, 8]
    for example in train + test:
        assert eval(example["prompt"].removesuffix("=")) == int(example["answer"])


def test_the_entropy_bonus(monkeypatch):
    """Over all tokens of a vocabulary, the mean gradient of docs/extend.md's bonus is that of the negative entropy."""
    script = load(monkeypatch, "entropy", differences("extend")["entropy"])
    args = script.Args(beta=0.0, entropy_coef=0.7)
    logits = torch.tensor([0.3, -1.2, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    zero, mask = torch.zeros(1, 1, dtype=torch.float64), torch.tensor([[True, False]])
    total = 0.0
    for logprob in logits.log_softmax(0):
        # The second slot is masked, and contains garbage.
        logprobs = torch.cat([logprob.view(1, 1), torch.full_like(zero, math.nan)], 1)
        old = logprobs.detach()
        loss, _ = script.policy_loss(args, logprobs, old, old, zero, mask, num_seqs=1)
        total = total + logprob.detach().exp() * loss
    (gradient,) = torch.autograd.grad(total, logits)
    negative_entropy = (logits.softmax(0) * logits.log_softmax(0)).sum()
    (expected,) = torch.autograd.grad(0.7 * negative_entropy, logits)
    assert torch.allclose(gradient, expected, atol=1e-12) and expected.abs().max() > 0.1


def test_the_worked_examples_are_the_scripts():
    """The scripts' functions reproduce the tables of docs/algorithms.md and the picture of the clip."""
    import explain

    text = explain.PAGE.read_text(encoding="utf-8")
    for name, make in explain.TABLES.items():
        assert f"<!-- {name} -->\n{make()}<!-- end {name} -->\n" in text, name
    assert explain.drawn_from() in (explain.PICTURES / "clip.svg").read_text(encoding="utf-8")


def test_the_variances_are_what_is_recorded():
    import variance

    table = variance.make_table(variance.read(variance.OUT))
    assert f"<!-- variance -->\n{table}<!-- end variance -->\n" in variance.PAGE.read_text("utf-8")


def first_step(script, folder) -> dict:
    args = small_recipe(script) | dict(num_steps=1, num_prompts=4, eval_size=4, device="cpu")
    return script.main(script.Args(**args, runs_dir=str(folder), run_name=script.__name__))


def test_the_answer_to_the_second_exercise(tmp_path, monkeypatch):
    """Without EOS in the mask, a finished response is one token shorter. The other metrics don't change."""
    no_eos = load(monkeypatch, "no_eos", differences("algorithms")["no_eos"])
    whole, broken = first_step(grpo, tmp_path), first_step(no_eos, tmp_path)
    for name in ("reward_mean", "accuracy", "eos_frac"):
        assert broken[f"rollout/{name}"] == whole[f"rollout/{name}"]
    lost = whole["rollout/response_len"] - broken["rollout/response_len"]
    assert lost == pytest.approx(whole["rollout/eos_frac"]) and lost > 0
    assert whole["tokens"] - broken["tokens"] == 32 * whole["rollout/eos_frac"]


def test_the_answer_to_the_third_exercise(tmp_path, monkeypatch):
    """The reward matches numbers worked by hand, and a run logs the reward under its name."""
    digits = load(monkeypatch, "digits", differences("algorithms")["digits"])
    texts = ["<answer>185</answer>", "<answer>85</answer>", "<answer>175</answer>", "85"]
    texts += ["<answer>1858</answer>", "<answer></answer>", "<answer>9185</answer>"]
    rewards = digits.digits_reward(texts, ["185"] * 7)
    assert rewards == pytest.approx([1 / 2, 1 / 3, 1 / 3, 0, 0, 0, 1 / 2])
    metrics = first_step(digits, tmp_path)
    assert 0 < metrics["rollout/digits_reward"] <= 0.5
    parts = [metrics[f"rollout/{f.__name__}"] for f in digits.REWARDS]
    assert metrics["rollout/reward_mean"] == pytest.approx(sum(parts))


def test_the_judge_behind_http(monkeypatch):
    """docs/extend.md's HTTP reward sends each completion with its prompt, retries after an error, and then gives up."""
    text = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
    (block,) = re.findall(r"```python\n(import urllib.*?)```", text, re.DOTALL)
    calls, source = Counter(), (ROOT / "grpo.py").read_text(encoding="utf-8")

    class Judge(http.server.BaseHTTPRequestHandler):
        def do_POST(self):
            asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            calls[asked["response"]] += 1
            self.send_response(200 if calls["b"] > 1 or asked["response"] == "a" else 503)
            self.end_headers()
            grade = {"p a": 0.25, "q b": 0.5}[f"{asked['prompt']} {asked['response']}"]
            self.wfile.write(json.dumps({"grade": grade}).encode())

        def log_message(self, *arguments):
            pass

    server = http.server.ThreadingHTTPServer(("localhost", 0), Judge)
    threading.Thread(target=server.serve_forever, daemon=True).start()
    changed = re.sub(r"^REWARDS = .*$", lambda match: block, source, count=1, flags=re.MULTILINE)
    judged = load(monkeypatch, "judged", changed)
    judged.JUDGE = f"http://localhost:{server.server_port}/grade"
    judged.time = types.SimpleNamespace(sleep=lambda seconds: None)
    columns = [{"question": name, "answer": "1"} for name in "pq"]
    batch = [{"prompt": "", "answer": "1", "columns": row} for row in columns]
    assert judged.apply_rewards(["a", "b"], batch) == {"judge_reward": [0.25, 0.5]}
    assert calls == {"a": 1, "b": 2}
    server.shutdown()
    server.server_close()
    with pytest.raises(OSError, match="did not answer"):
        judged.apply_rewards(["a", "b"], batch)


def test_the_page_on_the_real_model_states_what_is_recorded():
    """Tables, samples and pictures of docs/real-model.md are those of the records."""
    import real_model

    page = real_model.PAGE.read_text(encoding="utf-8")
    for name, text in real_model.blocks().items():
        assert f"<!-- {name} -->\n{text}<!-- end {name} -->\n" in page, name
    for name, records in real_model.drawn().items():
        picture = (real_model.PICTURES / f"{name}.svg").read_text(encoding="utf-8")
        assert real_model.digest(records) in picture, f"{name}: the picture shows other records"


def test_the_lessons_state_what_is_recorded():
    """Pictures and tables of docs/lessons.md and docs/metrics.md are those of the records, from a clean tree."""
    import lessons

    pages = {
        name: (ROOT / "docs" / f"{name}.md").read_text("utf-8") for name in ("lessons", "metrics")
    }
    for name in lessons.LESSONS:
        page = pages[lessons.page_of(name).stem]
        block = f"<!-- lesson {name} -->\n{lessons.block(name)}<!-- end lesson {name} -->\n"
        assert block in page, name
        picture = (ROOT / "docs" / "lessons" / f"{name}.svg").read_text(encoding="utf-8")
        assert lessons.drawn_from(name) in picture, f"{name}: the picture shows other records"
    assert f"<!-- cost -->\n{lessons.total_cost()}<!-- end cost -->\n" in pages["lessons"]
    pictures = {path.stem for path in (ROOT / "docs" / "lessons").glob("*.svg")}
    assert pictures == {*lessons.LESSONS, "passk"}  # benchmark/passk.py draws the last one
    records = lessons.read_records()
    commands = {command for lesson in lessons.LESSONS.values() for command in lesson.arms.values()}
    assert {command for command, _ in records} == commands
    assert not any(record["dirty"] for record in records.values())
    # Two runs go at a time.
    assert sum(record["seconds"] for record in records.values()) / 2 < 5 * 3600


def test_no_record_tells_where_the_project_was_on_a_disk():
    for path in (ROOT / "benchmark" / "records").glob("*.jsonl"):
        found = re.findall(r'"/[^"]*/[^"]*"', path.read_text(encoding="utf-8"))
        assert not found, (path.name, found[0])


def test_the_variants_have_three_recorded_seeds():
    """Each variant has three seeds that learn the bundled task."""
    import readme

    records = readme.records_of("variants")
    names = {path.stem for path in (ROOT / "variants").glob("*.diff")}
    names -= {"full_vocabulary", "sdpo_context"}  # docs/lessons.md has their runs
    assert {(r["script"], r["seed"]) for r in records} == {(n, k) for n in names for k in (1, 2, 3)}
    assert min(r["accuracy"][1] for r in records) >= 0.95 and not any(r["dirty"] for r in records)


def test_the_tables_show_the_records():
    """The tables, the picture and the sample output of README.md and of other pages are those of the records."""
    import pictures
    import readme

    for name, (page, make) in readme.BLOCKS.items():
        text = (ROOT / page).read_text(encoding="utf-8")
        assert f"<!-- {name} -->\n{make()}<!-- end {name} -->\n" in text, name
    drawn_from = pictures.digest(readme.records_of("trl-learn"))
    assert drawn_from in readme.PICTURE.read_text(encoding="utf-8")


def test_the_bundled_task_is_recorded_for_every_script():
    """Five seeds of each script from a clean tree, and one seed of each on the emulated GPU."""
    import readme

    records = readme.records_of("bundled")
    assert {(record["script"], record["seed"]) for record in records} == {
        (script, seed) for script in SCRIPTS for seed in range(1, 6)
    }
    emulated = readme.records_of("bundled-emulated")
    assert {record["script"] for record in emulated} == set(SCRIPTS) - set(NEEDS_VLLM)
    assert len(emulated) == len(SCRIPTS) - len(NEEDS_VLLM)
    assert not any(record["dirty"] for record in records + emulated)
    assert max(record["logprob_gap"] for record in emulated) < 0.002

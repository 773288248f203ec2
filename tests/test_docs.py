"""The pages under docs/ agree with the code and the records."""

import dataclasses
import http.server
import inspect
import json
import math
import re
import shlex
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
from torch.autograd import DeviceType

import grpo

PAGES = sorted(ROOT.glob("*.md")) + sorted((ROOT / "docs").glob("*.md"))
PAGES += [
    ROOT / "variants" / "README.md",
    ROOT / "benchmark" / "records" / "external" / "README.md",
]


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


def test_the_contents_name_every_section():
    """The contents of docs/algorithms.md are a numbered list of its sections, in their order."""
    text = (ROOT / "docs" / "algorithms.md").read_text(encoding="utf-8")
    contents, sections = text.split("\n## ", 1)
    entries = [
        " ".join(x.split()) for x in re.findall(r"^ *(?:\d+\.|-) \[([^]]+)\]", contents, re.M)
    ]
    assert entries == re.findall(r"^##+ (.*)$", "## " + sections, re.MULTILINE)
    numbers = re.findall(r"^(\d+)\. ", contents, re.MULTILINE)
    assert numbers == [str(k + 1) for k in range(len(numbers))]


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
    count = len(list((ROOT / "variants").glob("*.diff")))
    assert count == 23 and "has twenty-three such patches" in text


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


def test_the_answer_to_the_first_exercise(monkeypatch):
    """At a ratio of 1.5 and A = 1, d loss / d logprob is 0 in GRPO and -1.2 in CISPO."""
    command = ["patch", "-s", "-o", "-", "grpo.py", "variants/cispo.diff"]
    patched = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True)
    cispo = load(monkeypatch, "cispo", patched.stdout)
    old = torch.tensor([[-math.log(1.5)]])
    one = torch.ones(1, 1)

    def gradient(script, args, **count):
        logprobs = torch.zeros(1, 1, requires_grad=True)
        loss, _ = script.policy_loss(args, logprobs, old, old, one, one.bool(), **count)
        loss.backward()
        return logprobs.grad.item()

    assert gradient(grpo, grpo.Args(beta=0.0), num_seqs=1) == pytest.approx(0.0)
    args = cispo.Args(beta=0.0, clip_eps_high=0.2)
    assert gradient(cispo, args, num_tokens=1) == pytest.approx(-1.2)


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


def measured(text: str) -> set[str]:
    """The numbers of a text that may be measurements: decimals and percentages. A list may have a single % sign."""
    text = re.sub(r"```.*?```|`[^`]*`|\$[^$]*\$|\([^()]*\d{4}[^()]*\)", "", text, flags=re.DOTALL)
    percent = re.findall(r"((?:\d[\d.]*(?:, | and | to | or | against )?\s?)+)%", text)
    return set(re.findall(r"\d+\.\d+", text)) | set(re.findall(r"\d[\d.]*", " ".join(percent)))


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


def test_the_lessons_state_what_is_recorded():
    """Pictures and tables of docs/lessons.md and docs/metrics.md agree with the records.

    Every record comes from a clean tree. Every measured number in the text is also in a table of the same section.
    """
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
    for page in pages.values():
        for section in re.split(r"^## ", page, flags=re.MULTILINE):
            tables = generated(section)
            if tables:
                text = re.sub(r"<!-- ([\w -]+) -->.*?<!-- end \1 -->", "", section, flags=re.DOTALL)
                found = measured(text) - numbers(tables)
                assert not found, (section.partition("\n")[0], found)
    records = lessons.read_records()
    commands = {command for lesson in lessons.LESSONS.values() for command in lesson.arms.values()}
    assert {command for command, _ in records} == commands
    assert not any(record["dirty"] for record in records.values())
    # Two runs go at a time.
    assert sum(record["seconds"] for record in records.values()) / 2 < 5 * 3600


def generated(text: str) -> str:
    """The tables of the lessons in a text."""
    tables = re.findall(r"<!-- (lesson [\w-]+|variance|passk) -->(.*?)<!-- end \1", text, re.DOTALL)
    return " ".join(content for _, content in tables)


def numbers(text: str) -> set[str]:
    return set(re.findall(r"\d+(?:\.\d+)?", text))


def test_no_record_tells_where_the_project_was_on_a_disk():
    for path in (ROOT / "benchmark" / "records").glob("*.jsonl"):
        found = re.findall(r'"/[^"]*/[^"]*"', path.read_text(encoding="utf-8"))
        assert not found, (path.name, found[0])


def test_the_contents_have_a_line_for_each_lesson():
    """The first table of docs/lessons.md: the page's sections in order, whether the effect is seen, and its numbers."""
    import lessons

    page = (ROOT / "docs" / "lessons.md").read_text(encoding="utf-8")
    contents, *sections = re.split(r"^## ", page, flags=re.MULTILINE)
    sections = {section.partition("\n")[0]: section for section in sections}
    rows = re.findall(r"^\| .* \| \[(.*)\]\((.*?)\)(.*) \| (.*) \|$", contents, re.MULTILINE)
    titles = [title for title, target, _, _ in rows if target.startswith("#")]
    assert titles == [title for title in sections if title != "How to read them"]
    assert {mark for *_, mark in rows} == {"seen", "partly seen", "not seen"}
    for title, target, finding, _ in rows:
        if target.startswith("#"):
            assert measured(finding) <= numbers(generated(sections[title])), title
    # Five lessons share a section with others.
    shared = {"rate": lessons.LESSONS["adapters"].title}
    shared |= dict.fromkeys(("leash", "credit", "clip-higher", "vapo"), "Looked for, not seen")
    for name, lesson in lessons.LESSONS.items():
        text = lessons.page_of(name).read_text(encoding="utf-8")
        heading = re.findall(r"^## (.*)$", text.split(f"<!-- lesson {name} -->")[0], re.MULTILINE)[
            -1
        ]
        assert heading == shared.get(name, lesson.title), name


def test_the_commands_of_a_lesson_are_printed(monkeypatch, capsys):
    """--print runs nothing. It also prints what makes the student and the scripts of the patches."""
    import lessons

    monkeypatch.setattr(lessons, "run_missing", None)
    monkeypatch.setattr(sys, "argv", ["lessons.py", "length", "teacher", "--print"])
    lessons.main()
    _, length, teacher = capsys.readouterr().out.split("# ")
    assert length.splitlines()[:3] == [
        "length: the commands, each with --seed 1, 2 and 3: 9 runs, 10 minutes of one core",
        "python tools/build_hesitant.py runs/hesitant",
        f"python {lessons.LESSONS['length'].arms['1/length (GRPO)']}",
    ]
    patch, *commands = teacher.split("\n", 1)[1].strip().splitlines()
    assert patch == "patch -o full_vocabulary.py distill.py variants/full_vocabulary.diff"
    assert commands == [f"python {command}" for command in lessons.LESSONS["teacher"].arms.values()]


def test_the_columns_of_the_lessons_by_hand(monkeypatch):
    """What the tables say of a record of ten steps with eight responses each, worked out by hand."""
    import lessons
    import records

    curves = {
        "episodes": [8 * k for k in range(1, 11)],
        "rollout/accuracy": [k / 10 for k in range(10)],
        "kl/ref": [None, 2.0, 4.0, *[1.0] * 7],
        "length/right": [None, *[10.0] * 9],
        "length/wrong": [20.0] * 10,
    }
    record = {"curves": curves, "args": {"value_warmup_steps": 3}, "eval": {"0": 0.1, "10": 0.55}}
    assert lessons.over("rollout/accuracy", 2, 4)(record) == pytest.approx(20)
    assert lessons.over("rollout/accuracy", -5, -1)(record) == pytest.approx(70)
    assert lessons.over("kl/ref", 1, 3)(record) == 3
    assert math.isnan(lessons.over("kl/ref", 11, 20)(record))
    assert math.isnan(lessons.over("value/explained_var", 1, 5)(record))
    assert lessons.highest("kl/ref")(record) == 4
    assert lessons.held_out(record) == pytest.approx(55)
    # Responses 17 to 40: steps 3, 4 and 5.
    assert lessons.between(16, 40)(record) == pytest.approx(30)
    # Response 56 is in step 7: steps 3 to 7.
    assert lessons.accuracy_at(record, 56) == pytest.approx(40)
    assert lessons.after_pretraining(1, 3)(record) == pytest.approx(40)
    # Step 6: half are right.
    assert lessons.curve(record, "length/all")[5] == pytest.approx(15)

    def run(values):
        return {"curves": {"x": values}}

    others = {("plain", 1): run([0.0] * 13), ("plain", 2): run([1.0] * 13)}
    others[("plain", 3)] = run([2.0] * 13)
    monkeypatch.setattr(lessons, "read_records", lambda: others)
    parts_at = lessons.parts_at("x", "plain")
    assert parts_at(run([1, 3, 1, *[3] * 5, *[-1] * 5])) == 4
    assert math.isnan(parts_at(run([1, *[3] * 9, 2, 3, 3])))
    assert records.spread([math.nan, 1, 3], 1) == "2.0 (1.0 to 3.0) in 2 of 3 runs"
    assert records.spread([math.nan] * 3) == "-" and records.spread([1, 2, 6]) == "3 (1 to 6)"


def test_the_gamed_reward_counts_characters(monkeypatch):
    """benchmark/gamed.py adds its weight for each character to grpo.py's rewards, and passes on all other flags."""
    import gamed

    runs, rewards = [], grpo.REWARDS
    monkeypatch.setattr(grpo, "main", runs.append)
    monkeypatch.setattr(grpo, "REWARDS", rewards)
    monkeypatch.setattr(grpo, "SCRIPT", grpo.SCRIPT)
    monkeypatch.setattr(sys, "argv", ["gamed.py", "--num-steps", "3", "--weight", "0.5"])
    gamed.main()
    assert runs == [grpo.Args(num_steps=3)] and grpo.REWARDS[:-1] == rewards
    assert grpo.REWARDS[-1](["", "abc"]) == [0, 1.5] and grpo.SCRIPT.name == "gamed.py"


def test_a_record_has_the_state_of_the_machine():
    import records

    machine = records.provenance()["machine"]
    assert machine["cpu"] and machine["cores"] >= 1 and machine["load"] >= 0


@pytest.mark.parametrize("missing", ["git", "repository"])
def test_a_record_without_a_commit_counts_as_changed(monkeypatch, tmp_path, missing):
    import records

    if missing == "git":
        monkeypatch.setenv("PATH", str(tmp_path))
    else:
        monkeypatch.setattr(records, "ROOT", tmp_path)
    found = records.provenance()
    assert found["commit"] is None and found["dirty"] is True and found["machine"]["cpu"]


def test_the_longest_kernel_is_no_operator():
    """An operator has the time of its kernels. A GPU's profile may have no kernel at all."""
    import gpu

    def event(key, device_type, on_cpu, on_device):
        times = dict(self_cpu_time_total=on_cpu, self_device_time_total=on_device)
        return types.SimpleNamespace(key=key, device_type=device_type, **times)

    operators = [event("slow", DeviceType.CPU, 9, 0), event("attend", DeviceType.CPU, 1, 5)]
    kernels = [event("copy", DeviceType.CUDA, 0, 1), event("attention", DeviceType.CUDA, 0, 4)]
    assert gpu.longest_kernel(operators + kernels, on_gpu=True) == "attention"
    assert gpu.longest_kernel(operators, on_gpu=True) == "the profiler recorded no kernel"
    assert gpu.longest_kernel(operators, on_gpu=False) == "slow"


def test_rollouts_are_compared_with_those_of_vllm(monkeypatch, capsys):
    """gpu.py --vllm samples with grpo.py's sampler, too. This test leaves vLLM out."""
    import gpu

    core = types.SimpleNamespace(shutdown=lambda: None)
    engine = types.SimpleNamespace(llm_engine=types.SimpleNamespace(engine_core=core))
    monkeypatch.setattr(gpu.grpo_vllm, "load_engine", lambda args, model: engine)
    monkeypatch.setattr(gpu.grpo_vllm, "refresh_engine", lambda engine, model: None)
    time_rollout = gpu.time_rollout

    def without_vllm(script, *rest):
        if script is grpo:
            time_rollout(script, *rest)

    monkeypatch.setattr(gpu, "time_rollout", without_vllm)
    shape = dict(num_hidden_layers=1, hidden_size=8, num_attention_heads=1, intermediate_size=8)
    model = gpu.random_model(shape | dict(vocab_size=60), torch.device("cpu"))
    gpu.compare_rollouts(model, model.config, tiny=True)
    printed = capsys.readouterr().out
    assert "grpo.py, at most 12 tokens" in printed and "grpo.py, at most 40 tokens" in printed


@pytest.mark.parametrize("name, kills", [("grpo", 1), ("rloo", 0)])
def test_only_grpo_is_killed_and_resumed_on_a_gpu(monkeypatch, name, kills):
    import gpu_scripts

    commands, interrupted = [], []

    def run(command, **options):
        commands.append(shlex.split(command[-1]))
        return types.SimpleNamespace(stdout="", stderr="")

    monkeypatch.setattr(sys, "argv", ["gpu_scripts.py", "--tiny", "--scripts", name])
    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    monkeypatch.setattr(gpu_scripts, "make_models", lambda *arguments: None)
    monkeypatch.setattr(gpu_scripts, "interrupted", lambda *call: interrupted.append(call))
    monkeypatch.setattr(gpu_scripts.subprocess, "run", run)
    gpu_scripts.main()
    (command,) = commands
    assert command[0] == f"{name}.py" and len(interrupted) == kills


def test_the_variants_have_three_recorded_seeds():
    """Each variant has three seeds with at least 97.6 % greedy accuracy, as variants/README.md says."""
    import readme

    records = readme.records_of("variants")
    names = {path.stem for path in (ROOT / "variants").glob("*.diff")}
    names -= {"full_vocabulary", "sdpo_context"}  # docs/lessons.md has their runs
    assert {(r["script"], r["seed"]) for r in records} == {(n, k) for n in names for k in (1, 2, 3)}
    assert min(r["accuracy"][1] for r in records) == 0.976 and not any(r["dirty"] for r in records)


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

    text = (ROOT / "docs" / "speed.md").read_text(encoding="utf-8")
    low, high = [100 * bound(record["accuracy"][1] for record in emulated) for bound in (min, max)]
    reached = f"all scripts except grpo_vllm.py reach {low:.1f} to {high:.0f} % on this task"
    assert reached in " ".join(text.split())
    assert max(record["logprob_gap"] for record in emulated) < 0.002 and "stays below 0.002" in text

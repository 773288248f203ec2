"""docs/extend.md: data, rewards, entropy bonus, run on mathematics, combinations of scripts, sweep, copies.

Its other code is in test_multigpu.py (TRL, verl) and test_grpo_tools.py (search). Two examples need trl or math-verify.
"""

import dataclasses
import http.server
import importlib
import json
import math
import re
import shutil
import subprocess
import sys
import threading
import types
from collections import Counter
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from conftest import ROOT, small_recipe
from test_docs import differences, load
from test_runs import FORK, ended
from transformers import AutoTokenizer

import grpo

PAGE = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
BLOCKS = {}
for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
    names = re.findall(r"^def (\w+)", block, re.MULTILINE)
    is_reward = names and names[0] not in ("ask", "judge_reward")
    if is_reward and re.search(r"^REWARDS = ", block, re.MULTILINE):
        BLOCKS[names[0]] = block
SUM = {"question": "47+38=", "answer": "85"}
# The rows of each example, and its flags.
ROWS = {
    "word_reward": ([{"question": "12+34=", "answer": "answer"}], {}),
    "keywords_reward": (
        [{"question": "1+2=", "keywords": ["<", "zebra"], "limit": 1000}],
        {"answer_column": "limit"},
    ),
    "as_chats": ([SUM], {}),
}


def run_copy(monkeypatch, tmp_path, source, rows, **given):
    """A run of two steps of a copy of grpo.py on these rows: its module, its metrics, its samples."""
    script = load(monkeypatch, "mine", source)
    data = tmp_path / "data"
    data.mkdir()
    for split, times in (("train", 18), ("test", 2)):
        lines = [json.dumps(row) + "\n" for row in rows * times]
        (data / f"{split}.jsonl").write_text("".join(lines))
    fields = small_recipe(script) | dict(dataset=str(data), num_steps=2, num_prompts=2)
    fields |= dict(device="cpu", runs_dir=str(tmp_path), run_name="run")
    script.main(script.Args(**fields | given))
    read = lambda name: [json.loads(line) for line in open(tmp_path / "run" / name)]  # noqa: E731
    return script, read("metrics.jsonl"), read("samples.jsonl")


def grpo_with(block):
    source = (ROOT / "grpo.py").read_text(encoding="utf-8")
    source, count = re.subn(r"^REWARDS = .*\n", lambda _: block, source, flags=re.MULTILINE)
    assert count == 1
    return source


def test_the_differences_shown_are_real():
    """In docs/extend.md, two diffs apply to grpo.py and give valid Python. The diff between them quotes a patch."""
    found = differences("extend")
    assert list(found) == ["grpo_math", "entropy"]
    for name, source in found.items():
        compile(source, name, "exec")
    excerpt = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)[1]
    assert excerpt in (ROOT / "variants" / "cispo.diff").read_text(encoding="utf-8")


def test_the_problems_of_the_example(tmp_path, monkeypatch):
    """The command of docs/extend.md writes 80 problems, and grpo.py reads them. The last tenth is held out."""
    (command,) = re.findall(r"^python -c .*$", PAGE, re.MULTILINE)
    command = command.replace("python", sys.executable, 1)
    subprocess.run(["bash", "-c", command], cwd=tmp_path, check=True)
    monkeypatch.chdir(tmp_path)
    flags = dict(dataset="sums.jsonl", question_column="task", answer_column="result")
    args = dataclasses.replace(grpo.BUNDLED, **flags)
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    train, test = grpo.load_data(args, tokenizer)
    assert [len(train), len(test)] == [72, 8]
    for problem in train + test:
        assert eval(problem["prompt"].removesuffix("=")) == int(problem["columns"]["answer"])


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


def test_the_judge_behind_http(monkeypatch):
    """docs/extend.md's HTTP reward sends each completion with its prompt, retries after an error, and then gives up."""
    (block,) = re.findall(r"```python\n(import urllib.*?)```", PAGE, re.DOTALL)
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
    batch = [{"prompt": "", "columns": row} for row in columns]
    assert judged.apply_rewards(["a", "b"], batch, "cpu")["judge_reward"].tolist() == [0.25, 0.5]
    assert calls == {"a": 1, "b": 2}
    server.shutdown()
    server.server_close()
    with pytest.raises(OSError, match="did not answer"):
        judged.apply_rewards(["a", "b"], batch, "cpu")


@pytest.mark.parametrize("place", [0, 1])
def test_two_differences_in_one_script(place, monkeypatch, tmp_path):
    """The commands of the page make a script that trains for a step. patch may reject hunks of the docstring."""
    section = PAGE.split("## Two differences in one script")[1]
    commands = re.findall(r"```\n(.*?)```", section, re.DOTALL)[place]
    (last,) = [line for line in commands.splitlines() if "patch" in line]
    (cispo,) = re.findall(r"^(patch -o cispo\.py .*) && python", PAGE, re.MULTILINE)
    name = re.search(r"-o (\w+)\.py \w+\.py$", last).group(1)
    for path in (*ROOT.glob("*.py"), ROOT / "variants" / "cispo.diff"):
        (tmp_path / path.relative_to(ROOT)).parent.mkdir(exist_ok=True)
        shutil.copy(path, tmp_path / path.relative_to(ROOT))
    for line in (cispo, last):
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode < 2, done.stderr
    rejected = re.findall(r"FAILED at (\d+)", done.stdout)
    assert all(int(line) < 50 for line in rejected), done.stdout
    script = load(monkeypatch, name, (tmp_path / f"{name}.py").read_text(encoding="utf-8"))
    given = dict(num_steps=1, num_prompts=2, eval_size=2, device="cpu")
    script.main(script.Args(**small_recipe(script) | given, runs_dir=str(tmp_path / "runs")))


@pytest.mark.parametrize("name", BLOCKS)
def test_an_example_runs_as_it_stands(name, monkeypatch, tmp_path, capsys):
    rows, given = ROWS[name]
    script, metrics, samples = run_copy(
        monkeypatch, tmp_path, grpo_with(BLOCKS[name]), rows, **given
    )
    out = capsys.readouterr().out
    assert "train data: 18 problems\n" in out
    for record in (metrics[0], metrics[-1]):
        means = [record[f"eval/{reward.__name__}"] for reward in script.REWARDS]
        assert record["eval/reward_mean"] == pytest.approx(sum(means))
        assert record["eval/accuracy"] == record[f"eval/{script.REWARDS[0].__name__}"]
        assert ("eval/accuracy_lenient" in record) == (script.accuracy_reward in script.REWARDS)
    assert f"after: accuracy {metrics[-1]['eval/accuracy']:.3f}" in out
    if name == "word_reward":
        for record in metrics[1:]:
            mine = [sample["right"] for sample in samples if sample["step"] == record["step"]]
            right = sum(mine, [])
            assert record["rollout/accuracy"] == pytest.approx(sum(right) / len(right))


@pytest.mark.skipif(find_spec("trl") is None, reason="needs trl")
def test_a_reward_of_trl_itself(monkeypatch, tmp_path):
    """The wrapper of the page gives TRL's function chats. Without the wrapper, the function ends in a TypeError."""
    from trl.rewards import think_format_reward

    (own,) = re.findall(r"```python\n(from trl.*?)```", PAGE, re.DOTALL)
    wrapped = BLOCKS["as_chats"] + own
    script, metrics, samples = run_copy(monkeypatch, tmp_path, grpo_with(wrapped), [SUM])
    assert [reward.__name__ for reward in script.REWARDS][1] == "think_format_reward"
    texts = [text for sample in samples if sample["step"] == 1 for text in sample["completions"]]
    expected = think_format_reward([[{"role": "assistant", "content": text}] for text in texts])
    assert 0 < sum(expected)
    mean = sum(expected) / len(expected)
    assert metrics[1]["rollout/think_format_reward"] == pytest.approx(mean)
    (tmp_path / "bare").mkdir()
    bare = wrapped.replace("as_chats(think_format_reward)", "think_format_reward")
    with pytest.raises(TypeError):
        run_copy(monkeypatch, tmp_path / "bare", grpo_with(bare), [SUM])


@pytest.mark.skipif(find_spec("math_verify") is None, reason="needs math-verify")
def test_the_run_on_math(monkeypatch, tmp_path, capsys):
    """The lines of the page. A solution ends in a box, and one gold answer can't be read."""
    block = "from utils.math_reward import math_reward\nREWARDS = [math_reward]\n"
    rows = [
        {"problem": "12+34=", "solution": r"It is $\boxed{\frac{\sqrt{2}}{2}}$."},
        {"problem": "1+2=", "solution": r"So $\boxed{0.\overline{3}}$."},
    ]
    given = dict(question_column="problem", answer_column="solution")
    run_copy(monkeypatch, tmp_path, grpo_with(block), rows, **given)
    out = capsys.readouterr().out
    assert "train data: 18 problems, 18 skipped: without a readable solution\n" in out
    assert r"\\frac{\\sqrt{2}}{2}" in out


def test_the_sweep(monkeypatch, tmp_path, capsys):
    """It trains three runs, resumes what is there, and goes on after a value that is refused."""
    (block,) = re.findall(r"```python\n([^`]*?for rate in .*?)```", PAGE, re.DOTALL)
    small = small_recipe(grpo) | dict(num_steps=1, num_prompts=2, eval_size=2, device="cpu")
    monkeypatch.setattr(grpo, "BUNDLED", grpo.Args(**small))
    monkeypatch.chdir(tmp_path)
    exec(block, {})
    first = capsys.readouterr().out
    exec(block, {})
    assert len(list((tmp_path / "runs").iterdir())) == 3
    results = [line for line in first.splitlines() if re.match(r"\S+ \d\.\d", line)]
    assert len(results) == 3
    assert [line for line in capsys.readouterr().out.splitlines() if line in results] == results
    monkeypatch.setattr(grpo, "BUNDLED", grpo.Args(**small | {"temperature": -1.0}))
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path / "other")
    exec(block, {})
    assert capsys.readouterr().out.count("--temperature must be positive") == 3


@pytest.mark.parametrize("task", ["gcd", "prime_factorization"])
def test_a_task_of_reasoning_gym(tmp_path, task):
    """The data set's answers get 1 from their judge, and other texts less, also those that it can't read."""
    pytest.importorskip("reasoning_gym")
    section = PAGE.partition("## A task of reasoning-gym\n")[2].partition("\n## ")[0]
    write, judge = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    write = write.replace("size=603", "size=8").replace('"gcd"', f'"{task}"')
    subprocess.run([sys.executable, "-c", write], cwd=tmp_path, check=True)
    rows = [json.loads(line) for line in (tmp_path / "task.jsonl").open()]
    assert len(rows) == 5 and all(len(row["question"]) == 7 for row in rows)
    names = {"json": json}
    exec(judge, names)
    (reward,) = names["REWARDS"]
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    assert reward(completions=columns["answer"], **columns) == [1.0] * 5
    assert max(reward(completions=["I think that x = 3"] * 5, **columns)) < 1


def import_copy(name, folder, home):
    """The body of a forked process: the copy takes masked_mean from the folder `home`."""
    for loaded in [x for x in sys.modules if x.split(".")[0] in ("grpo", "utils")]:
        del sys.modules[loaded]
    sys.path.insert(0, str(folder))
    copied = importlib.import_module(name)
    assert Path(sys.modules[copied.masked_mean.__module__].__file__).parent == home


@pytest.mark.parametrize("in_package", [True, False])
def test_a_script_in_another_repository(tmp_path, in_package):
    """Beside a utils/ of its own, or inside a package, as the page says."""
    home = tmp_path / ("package" if in_package else "utils")
    home.mkdir()
    for name in ("masking.py", "rewards.py"):
        shutil.copy(ROOT / "utils" / name, home)
    (home / "__init__.py").write_text("MINE = 1\n")
    source = (ROOT / "grpo.py").read_text(encoding="utf-8")
    if in_package:
        (home / "grpo.py").write_text(source.replace("from utils.", "from ."), encoding="utf-8")
    else:
        (tmp_path / "grpo.py").write_text(source, encoding="utf-8")
    name = "package.grpo" if in_package else "grpo"
    process = FORK.Process(target=import_copy, args=(name, tmp_path, home), daemon=True)
    process.start()
    assert ended(process) == 0

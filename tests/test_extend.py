"""docs/extend.md: data, rewards, entropy bonus, run on mathematics, combinations of scripts, sweep, copies.

Its other code is in test_multigpu.py (TRL, verl) and test_grpo_tools.py (search). Two examples need trl or math-verify.
"""

import dataclasses
import http.server
import importlib
import json
import math
import os
import re
import shutil
import subprocess
import sys
import threading
import types
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from conftest import ROOT, default_task, small_recipe
from test_docs import differences, load
from test_runs import FORK, ended
from transformers import AutoModelForCausalLM, AutoTokenizer

import grpo
import grpo_tools

PAGE = (ROOT / "docs" / "extend.md").read_text(encoding="utf-8")
BLOCKS = {}
for block in re.findall(r"```python\n(.*?)```", PAGE, re.DOTALL):
    names = re.findall(r"^def (\w+)", block, re.MULTILINE)
    is_reward = names and names[0] not in ("ask", "judge_reward", "search")
    if is_reward and re.search(r"^REWARDS = ", block, re.MULTILINE):
        BLOCKS[names[0]] = block
# A program that needs no hub.
OFFLINE = os.environ | {"HF_HUB_OFFLINE": "1"}
SUM = {"question": "47+38=", "answer": "85"}
# The rows of each example, and its flags.
ROWS = {
    "word_reward": ([{"question": "12+34=", "answer": "answer"}], {}),
    "keywords_reward": (
        [{"question": "1+2=", "keywords": ["<", "zebra"], "limit": 1000}],
        {"answer_column": "limit", "examples": True, "max_prompt_tokens": 160},
    ),
    "as_chats": ([SUM], {}),
}


def page_task(tmp_path, block):
    """A task of the page, loaded from a file."""
    (tmp_path / "my_task.py").write_text(block, encoding="utf-8")
    return grpo.load_task(grpo.Args(task=str(tmp_path / "my_task.py")))


def run_task(tmp_path, block, rows, **given):
    """A run of grpo.py of two steps with this task on these rows: the task, the metrics, the samples."""
    task = page_task(tmp_path, block)
    data = tmp_path / "data"
    data.mkdir()
    for split, times in (("train", 18), ("test", 2)):
        lines = [json.dumps(row) + "\n" for row in rows * times]
        (data / f"{split}.jsonl").write_text("".join(lines))
    fields = small_recipe(grpo) | dict(dataset=str(data), num_steps=2, num_prompts=2)
    fields |= dict(device="cpu", runs_dir=str(tmp_path), run_name="run", task=task.__file__)
    grpo.main(grpo.Args(**fields | given))
    run = tmp_path / "run"
    return task, read_lines(run / "metrics.jsonl"), read_lines(run / "samples.jsonl")


def test_the_differences_shown_are_real():
    """In docs/extend.md, six diffs apply to grpo.py and give valid Python. The first diff quotes a patch."""
    found = differences("extend")
    small = ["metric", "schedule", "best", "second", "samples"]
    assert list(found) == ["entropy", *small]
    for name, source in found.items():
        compile(source, name, "exec")
    excerpt = re.findall(r"```diff\n(.*?)```", PAGE, re.DOTALL)[0]
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
    train, test = grpo.load_data(args, default_task(grpo), tokenizer)
    assert [len(train), len(test)] == [72, 8]
    for problem in train + test:
        assert eval(problem["prompt"].removesuffix("=")) == int(problem["columns"]["answer"])


def test_the_entropy_bonus(monkeypatch):
    """Over all tokens of a vocabulary, the mean gradient of docs/extend.md's bonus is that of the negative entropy."""
    script = load(monkeypatch, "entropy", differences("extend")["entropy"])
    flags = dict(clip_eps=0.2, beta=0.0, entropy_coef=0.7)
    logits = torch.tensor([0.3, -1.2, 2.0, 0.0], dtype=torch.float64, requires_grad=True)
    zero, mask = torch.zeros(1, 1, dtype=torch.float64), torch.tensor([[True, False]])
    total = 0.0
    for logprob in logits.log_softmax(0):
        # The second slot is masked, and contains garbage.
        logprobs = torch.cat([logprob.view(1, 1), torch.full_like(zero, math.nan)], 1)
        old = logprobs.detach()
        loss, _ = script.policy_loss(logprobs, old, old, zero, mask, num_seqs=1, **flags)
        total = total + logprob.detach().exp() * loss
    (gradient,) = torch.autograd.grad(total, logits)
    negative_entropy = (logits.softmax(0) * logits.log_softmax(0)).sum()
    (expected,) = torch.autograd.grad(0.7 * negative_entropy, logits)
    assert torch.allclose(gradient, expected, atol=1e-12) and expected.abs().max() > 0.1


class Judge(http.server.BaseHTTPRequestHandler):
    """A server with OpenAI's API that gives each response its next reply, as (status, text)."""

    def do_POST(self):
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        self.server.asked.append((self.path, self.headers["Authorization"], asked))
        (message,) = asked["messages"]
        response = re.search(r"<response>\n(.*)\n</response>", message["content"])[1]
        status, text = self.server.replies[response].pop(0)
        self.send_response(status)
        self.end_headers()
        reply = {"choices": [{"message": {"role": "assistant", "content": text}}]}
        reply = {"error": text} if status != 200 else reply
        self.wfile.write((text if text == "<html>" else json.dumps(reply)).encode())

    def log_message(self, *arguments):
        pass


@pytest.fixture
def judge(tmp_path):
    """The page's task with a judge, and a server that it asks. Nothing waits."""
    (block,) = re.findall(r"```python\n(import http.client.*?)```", PAGE, re.DOTALL)
    server = http.server.ThreadingHTTPServer(("localhost", 0), Judge)
    server.asked, server.replies = [], {}
    threading.Thread(target=server.serve_forever, daemon=True).start()
    task = page_task(tmp_path, block)
    task.JUDGE = task.JUDGE.replace("8000", str(server.server_port))
    server.waited = []
    task.time = types.SimpleNamespace(sleep=server.waited.append)
    yield task, server
    server.shutdown()
    server.server_close()


BAD_REPLIES = [
    (429, "too many requests"),
    (500, "out of memory"),
    (200, ""),
    (200, None),
    (200, "<html>"),
    (200, "The response is good.\nGrade: 7"),
    (200, "Grade: 7 of 10"),
    (200, "Grade: 11"),
    (200, "grade: 7"),
    (200, "Grade: -3"),
]


def problem_of(question):
    return {"prompt": "", "columns": {"question": question, "answer": "1"}}


def test_the_judge(judge):
    """Grades and the threshold reward, of texts and of chats. Equal responses are graded once."""
    task, server = judge
    server.replies = {
        "a": [(200, "Grade: 10")],
        "b": [(200, " Grade: 6\n")],
        "c": [(200, "Grade: 7")],
    }
    chat = [{"role": "system", "content": "Be {short}."}, {"role": "user", "content": "q"}]
    problems = [problem_of("p"), problem_of(chat)]
    scores = grpo.apply_rewards(task, ["a", "b", "c", "c"], problems, "cpu")
    assert list(scores) == ["judge_good", "judge_grade"]
    assert scores["judge_good"].tolist() == [1, 0, 1, 1]
    assert scores["judge_grade"].tolist() == pytest.approx([1, 0.6, 0.7, 0.7])
    assert set(server.waited) == {0} and len(server.asked) == 3
    texts = {asked["messages"][0]["content"] for _, _, asked in server.asked}
    assert sum("<question>\np\n</question>" in text for text in texts) == 2
    (text,) = [text for text in texts if "system: Be {short}.\nuser: q" in text]
    for path, key, asked in server.asked:
        assert path == "/v1/chat/completions" and key == "Bearer none"
        assert (asked["model"], asked["temperature"]) == (task.JUDGE_MODEL, 0)


@pytest.mark.parametrize("bad", BAD_REPLIES)
def test_the_judge_is_asked_again(judge, bad):
    """After an error, and after a reply without the grade alone. The sixth try is the last, and its reply is told."""
    task, server = judge
    server.replies = {"a": [bad, bad, (200, "Grade: 0")], "b": [bad] * 6}
    assert task.judge_grade(["a"], ["p"]) == [0]
    assert server.waited == [0, 1, 2]
    assert [asked["temperature"] for _, _, asked in server.asked] == [0, 1, 1]
    with pytest.raises(ValueError, match="gave no grade in six tries, and last: ") as error:
        task.judge_grade(["b"], ["p"])
    status, text = bad
    assert repr(str(text))[1:-1] in str(error.value) and server.waited[3:] == [0, 1, 2, 4, 8, 16]
    assert status == 200 or str(status) in str(error.value)


def test_a_judge_that_is_not_there(judge):
    task, server = judge
    server.shutdown()
    server.server_close()
    with pytest.raises(ValueError, match="refused"):
        grpo.apply_rewards(task, ["a", "b"], [problem_of("p")], "cpu")


@pytest.mark.parametrize("place", [0, 1, 2])
def test_two_differences_in_one_script(place, monkeypatch, tmp_path):
    """The commands of the page make a script that trains for a step. patch may reject hunks of the docstring."""
    section = PAGE.split("## Two differences in one script")[1]
    commands = re.findall(r"```\n(.*?)```", section, re.DOTALL)[place]
    (last,) = [line for line in commands.splitlines() if "patch" in line]
    (cispo,) = re.findall(r"^(patch -o cispo\.py .*) && python", PAGE, re.MULTILINE)
    name = re.search(r"-o (\w+)\.py \w+\.py$", last).group(1)
    shutil.copytree(ROOT / "utils", tmp_path / "utils")
    for path in (*ROOT.glob("*.py"), ROOT / "variants" / "cispo.diff"):
        (tmp_path / path.relative_to(ROOT)).parent.mkdir(exist_ok=True)
        shutil.copy(path, tmp_path / path.relative_to(ROOT))
    for line in (cispo, last):
        done = subprocess.run(["bash", "-c", line], cwd=tmp_path, capture_output=True, text=True)
        assert done.returncode < 2, done.stderr
    # The rejected hunks are those of the docstring.
    end = next(k for k, line in enumerate((ROOT / "grpo.py").open(), 1) if line == '"""\n')
    rejected = re.findall(r"FAILED at (\d+)", done.stdout)
    assert all(int(line) < end for line in rejected), done.stdout
    script = load(monkeypatch, name, (tmp_path / f"{name}.py").read_text(encoding="utf-8"))
    given = dict(num_steps=1, num_prompts=2, eval_size=2, device="cpu")
    script.main(script.Args(**small_recipe(script) | given, runs_dir=str(tmp_path / "runs")))


def small_run(monkeypatch, tmp_path, name, **given):
    """A run of three steps of one of the page's small changes, with its metrics. It evaluates after each step."""
    script = load(monkeypatch, name, differences("extend")[name])
    fields = small_recipe(script) | dict(num_steps=3, num_prompts=2, eval_size=4, eval_every=1)
    fields |= dict(device="cpu", runs_dir=str(tmp_path), run_name="run")
    args = script.Args(**fields | given)
    script.main(args)
    return args, read_lines(tmp_path / "run" / "metrics.jsonl")


def read_lines(path):
    return [json.loads(line) for line in path.open()]


def test_a_metric_of_ones_own(monkeypatch, tmp_path):
    _, metrics = small_run(monkeypatch, tmp_path, "metric")
    samples = read_lines(tmp_path / "run" / "samples.jsonl")
    for record in metrics[1:]:
        texts = [x["completions"] for x in samples if x["step"] == record["step"]]
        texts = sum(texts, [])
        assert record["rollout/distinct"] == pytest.approx(len(set(texts)) / len(texts))


def test_a_coefficient_with_a_schedule(monkeypatch, tmp_path):
    """beta falls by a third in each step. args.json keeps the first one, and so does the caller."""
    args, metrics = small_run(monkeypatch, tmp_path, "schedule", beta=0.3)
    assert [x["kl/beta"] for x in metrics[1:]] == pytest.approx([0.3, 0.2, 0.1])
    assert args.beta == json.loads((tmp_path / "run" / "args.json").read_text())["beta"] == 0.3
    # In the first step there is no KL, so the second step has the same samples with another beta.
    _, other = small_run(monkeypatch, tmp_path / "other", "schedule", beta=3.0)
    more = other[2]["policy/loss"] - metrics[2]["policy/loss"]
    assert more == pytest.approx((2.0 - 0.2) * metrics[2]["kl/ref"], rel=0.3) and more > 1e-4


def test_the_best_checkpoint(monkeypatch, tmp_path):
    """The model is that of the evaluation with the highest accuracy. A checkpoint knows this accuracy."""
    accuracies, saved = iter([0.25, 0.2, 0.75, 0.5]), []
    script = load(monkeypatch, "best", differences("extend")["best"])
    fields = small_recipe(script) | dict(num_steps=3, num_prompts=2, eval_size=4, eval_every=1)
    fields |= dict(device="cpu", runs_dir=str(tmp_path), run_name="run", save_every=1)
    evaluate = script.evaluate

    def found(args, task, model, *rest):
        metrics, scores = evaluate(args, task, model, *rest)
        saved.append({name: weight.clone() for name, weight in model.state_dict().items()})
        return metrics | {"eval/accuracy": next(accuracies)}, scores

    monkeypatch.setattr(script, "evaluate", found)
    script.main(script.Args(**fields))
    best = AutoModelForCausalLM.from_pretrained(tmp_path / "run" / "best").state_dict()
    assert all(torch.equal(best[name], weight) for name, weight in saved[2].items() if name in best)
    assert any(not torch.equal(best[name], saved[3][name]) for name in best)
    assert torch.load(tmp_path / "run" / "checkpoint.pt")["state"]["best"] == 0.75
    assert AutoTokenizer.from_pretrained(tmp_path / "run" / "best").eos_token_id is not None


def test_a_second_set_to_evaluate_on(monkeypatch, tmp_path):
    """Its problems are answered by the same model: a set equal to the first has the same metrics."""
    monkeypatch.chdir(tmp_path)
    test = Path(small_recipe(grpo)["dataset"]) / "test.jsonl"
    (tmp_path / "second.jsonl").write_text("".join(test.open().readlines()[:4]))
    _, metrics = small_run(monkeypatch, tmp_path, "second")
    names = [name for name in metrics[0] if name.startswith("eval/") and "second" not in name]
    assert "eval/accuracy" in names
    for record in metrics:
        for name in names:
            assert record[name.replace("/", "/second_")] == record[name]


def test_eight_samples_per_problem_in_an_evaluation(monkeypatch, tmp_path):
    """Each problem has a score in eighths, and the length is that of one response."""
    _, metrics = small_run(monkeypatch, tmp_path, "samples")
    evaluations = read_lines(tmp_path / "run" / "evaluations.jsonl")
    assert [len(x["scores"]) for x in evaluations] == [4] * 4
    scores = sum([x["scores"] for x in evaluations], [])
    assert all(8 * score == int(8 * score) for score in scores) and set(scores) - {0, 1}
    for record, evaluation in zip(metrics, evaluations, strict=True):
        assert record["eval/accuracy"] == pytest.approx(sum(evaluation["scores"]) / 4)
        assert record["eval/accuracy_lenient"] >= record["eval/accuracy"]
        assert 5 < record["eval/response_len"] <= small_recipe(grpo)["max_new_tokens"]
    # Each score is that of its own problem.
    script = sys.modules["samples"]
    task = types.SimpleNamespace(REWARDS=[first_digit])
    args = script.Args(**small_recipe(script) | dict(eval_size=4, device="cpu"))
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    _, problems = script.load_data(args, task, tokenizer)
    model, eos_ids = script.load_model(args, tokenizer)
    _, scores = script.evaluate(args, task, model, tokenizer, problems, eos_ids)
    assert scores == pytest.approx([int(x["columns"]["question"][0]) / 10 for x in problems])
    assert len(set(scores)) > 1


def first_digit(completions, question, **columns):
    return [int(text[0]) / 10 for text in question]


def test_training_on_one_set_and_evaluating_on_another(monkeypatch, tmp_path, capsys):
    """The page's program makes one folder of a csv file and of a set with more columns and texts as answers."""
    section = PAGE.partition("**Training on one set")[2].partition("\n## ")[0]
    (program,) = re.findall(r"```python\n(.*?)```", section, re.DOTALL)
    program = program.replace('"openai/gsm8k", "main"', '"json", data_files={"test": "gsm.jsonl"}')
    monkeypatch.chdir(tmp_path)
    Path("mine.csv").write_text("question,answer,source\n12+34=,46,x\n1+2=,3,y\n")
    row = {"answer": "so #### 1,085", "question": "1000+85=", "extra": [1]}
    Path("gsm.jsonl").write_text(json.dumps(row) + "\n")
    subprocess.run([sys.executable, "-c", program], check=True, env=OFFLINE)
    args = dataclasses.replace(grpo.BUNDLED, dataset="both")
    tokenizer = AutoTokenizer.from_pretrained(args.model)
    train, test = grpo.load_data(args, default_task(grpo), tokenizer)
    assert [x["columns"]["answer"] for x in train] == ["46", "3"]
    assert [x["columns"] for x in test] == [{"question": "1000+85=", "answer": "so #### 1,085"}]
    # What the page warns of.
    (tmp_path / "csv").mkdir()
    shutil.copy("mine.csv", "csv/train.csv")
    Path("csv/test.csv").write_text("question,answer,source\n1000+85=,so #### 1085,z\n")
    with pytest.raises(Exception, match="An error occurred while generating the dataset"):
        grpo.load_splits(dataclasses.replace(args, dataset="csv"))


def test_a_trained_tool_answers_in_ask(monkeypatch, tmp_path, capsys):
    """The page's lines in ask.py: the model's calls are answered as in training."""
    script, page = grpo_tools, (ROOT / "docs" / "train.md").read_text(encoding="utf-8")
    fields = vars(script.BUNDLED) | dict(num_steps=1, num_prompts=2, eval_size=2, device="cpu")
    script.main(script.Args(**fields | dict(runs_dir=str(tmp_path), run_name="run")))
    (ask,) = re.findall(r"```python\n([^`]*?find_eos_ids\(model, tokenizer\),\n[^`]*?)```", page)
    (own,) = re.findall(r"```python\n(eos_ids = torch[^`]*?)```", PAGE)
    head = ask.partition("ids = torch")[0].replace("import grpo", "import grpo_tools as grpo")
    head = head.replace("runs/first", str(tmp_path / "run"))
    # This model has yet to learn to call, so the question begins a call.
    question = 'question = "47+38=<think><calc>"'
    head = re.sub(r"^question = .*$", question, head, flags=re.MULTILINE)
    head = head.replace("torch.bfloat16", "torch.float32")
    capsys.readouterr()
    exec(head + own, {})
    assert capsys.readouterr().out.startswith("47+38</calc>=85")


@pytest.mark.parametrize("name", BLOCKS)
def test_an_example_runs_as_it_stands(name, tmp_path, capsys):
    rows, given = ROWS[name]
    task, metrics, samples = run_task(tmp_path, BLOCKS[name], rows, **given)
    if "examples" in given:
        assert all(text in samples[0]["prompt"] for example in task.EXAMPLES for text in example)
    out = capsys.readouterr().out
    assert "train data: 18 problems\n" in out
    for record in (metrics[0], metrics[-1]):
        means = [record[f"eval/{reward.__name__}"] for reward in task.REWARDS]
        assert record["eval/reward_mean"] == pytest.approx(sum(means))
        assert record["eval/accuracy"] == record[f"eval/{task.REWARDS[0].__name__}"]
        assert ("eval/accuracy_lenient" in record) == (grpo.accuracy_reward in task.REWARDS)
    assert f"after: accuracy {metrics[-1]['eval/accuracy']:.3f}" in out
    if name == "word_reward":
        for record in metrics[1:]:
            mine = [sample["scores"] for sample in samples if sample["step"] == record["step"]]
            right = sum(mine, [])
            assert record["rollout/accuracy"] == pytest.approx(sum(right) / len(right))


@pytest.mark.skipif(find_spec("trl") is None, reason="needs trl")
def test_a_reward_of_trl_itself(tmp_path):
    """The wrapper of the page gives TRL's function chats. Without the wrapper, the function ends in a TypeError."""
    from trl.rewards import think_format_reward

    (own,) = re.findall(r"```python\n(from trl.*?)```", PAGE, re.DOTALL)
    wrapped = BLOCKS["as_chats"] + own
    task, metrics, samples = run_task(tmp_path, wrapped, [SUM])
    assert [reward.__name__ for reward in task.REWARDS][1] == "think_format_reward"
    texts = [text for sample in samples if sample["step"] == 1 for text in sample["completions"]]
    expected = think_format_reward([[{"role": "assistant", "content": text}] for text in texts])
    assert 0 < sum(expected)
    mean = sum(expected) / len(expected)
    assert metrics[1]["rollout/think_format_reward"] == pytest.approx(mean)
    (tmp_path / "bare").mkdir()
    bare = wrapped.replace("as_chats(think_format_reward)", "think_format_reward")
    with pytest.raises(TypeError):
        run_task(tmp_path / "bare", bare, [SUM])


@pytest.mark.skipif(find_spec("math_verify") is None, reason="needs math-verify")
def test_the_run_on_math(tmp_path, capsys):
    """The task of the page. A solution ends in a box, and one gold answer can't be read."""
    (block,) = re.findall(r"```python\n(from utils.math_reward.*?)```", PAGE, re.DOTALL)
    rows = [
        {"problem": "12+34=", "solution": r"It is $\boxed{\frac{\sqrt{2}}{2}}$."},
        {"problem": "1+2=", "solution": r"So $\boxed{0.\overline{3}}$."},
    ]
    given = dict(question_column="problem", answer_column="solution")
    run_task(tmp_path, block, rows, **given)
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
    rows = [json.loads(line) for line in (tmp_path / "gcd.jsonl").open()]
    assert len(rows) == 5 and all(len(row["question"]) == 7 for row in rows)
    (reward,) = page_task(tmp_path, judge).REWARDS
    columns = {name: [row[name] for row in rows] for name in rows[0]}
    assert reward(completions=columns["answer"], **columns) == [1.0] * 5
    assert max(reward(completions=["I think that x = 3"] * 5, **columns)) < 1


def import_copy(name, folder, home, in_package):
    """The body of a forked process: the copy takes masked_mean from the folder `home`."""
    for loaded in [x for x in sys.modules if x.split(".")[0] in ("grpo", "utils")]:
        del sys.modules[loaded]
    sys.path.insert(0, str(folder))
    copied = importlib.import_module(name)
    assert Path(sys.modules[copied.masked_mean.__module__].__file__).parent == home
    task = copied.load_task(copied.Args(task=str(home / "task.py")))
    assert task.REWARDS[0] is copied.accuracy_reward
    assert in_package or copied.Args().task == str(home / "task.py")


@pytest.mark.parametrize("in_package", [True, False])
def test_a_script_in_another_repository(tmp_path, in_package):
    """Beside a utils/ of its own, or inside a package, as the page says: with its task, in each case."""
    home = tmp_path / ("package" if in_package else "utils")
    home.mkdir()
    for name in ("masking.py", "rewards.py", "task.py"):
        shutil.copy(ROOT / "utils" / name, home)
    (home / "__init__.py").write_text("MINE = 1\n")
    source = (ROOT / "grpo.py").read_text(encoding="utf-8")
    if in_package:
        (home / "grpo.py").write_text(source.replace("from utils.", "from ."), encoding="utf-8")
        task = (home / "task.py").read_text(encoding="utf-8")
        (home / "task.py").write_text(
            task.replace("from utils.", "from package."), encoding="utf-8"
        )
    else:
        (tmp_path / "grpo.py").write_text(source, encoding="utf-8")
    name = "package.grpo" if in_package else "grpo"
    process = FORK.Process(target=import_copy, args=(name, tmp_path, home, in_package), daemon=True)
    process.start()
    assert ended(process) == 0

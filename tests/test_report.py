"""report.py: it reads damaged runs, marks broken ones, compares runs, and shows all in a browser.

Statistics are checked by hand and by enumeration. Text of a model stays text, and a mistake gets one line. The page's
tests need plotly, playwright and a browser.
"""

import itertools
import json
import math
import shutil
import statistics
import sys
from dataclasses import replace
from pathlib import Path

import lessons
import pytest
import tyro
from conftest import ROOT

import grpo
import report

CHROMIUM = next(
    filter(None, map(shutil.which, ("chromium", "chromium-browser", "google-chrome"))), None
)
OPTIONS = ["--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking"]
OPTIONS += ["--disable-component-update", "--disable-sync"]

HOSTILE = (
    "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
)
HOSTILE += "<!--<script> & <b>bold</b> \u2028 $& \\u003c"


def metric(step, **values):
    """The record of a healthy step, with some values replaced."""
    names = dict(reward_mean=1.0, accuracy=0.5, eos_frac=1.0, zero_std_frac=0.1)
    record = {f"rollout/{name}": values.pop(name, x) for name, x in names.items()}
    entropy, kl, skipped = (
        values.pop("entropy", 0.5),
        values.pop("kl", 0.01),
        values.pop("skipped", 0),
    )
    assert not values
    record |= {"policy/entropy": entropy, "kl/ref": kl, "optim/skipped": skipped}
    return {"step": step, "episodes": 8 * step, "tokens": 100 * step} | record


def group(step, prompt, answer, completions, rewards, advantages=None, ended=None):
    advantages = advantages or [x - sum(rewards) / len(rewards) for x in rewards]
    sides = {"completions": completions, "rewards": rewards, "advantages": advantages}
    sides["ended"] = ended or [True] * len(completions)
    return {"step": step, "prompt": prompt, "answer": answer} | sides


def write_run(folder, metrics=(), samples=(), evaluations=None, **args):
    """Write a run's folder with these records."""
    folder.mkdir(parents=True)
    (folder / "grpo.py").write_text("")
    args = {"seed": 1, "beta": 0.01} | args
    (folder / "args.json").write_text(json.dumps(args))
    files = {"metrics.jsonl": metrics, "samples.jsonl": samples}
    if evaluations is not None:
        files["evaluations.jsonl"] = evaluations
    for name, records in files.items():
        (folder / name).write_text("".join(json.dumps(record) + "\n" for record in records))
    return folder


@pytest.fixture(scope="module")
def chromium():
    pytest.importorskip("plotly", reason="plotly: pip install -r tests/requirements.txt")
    pytest.importorskip(
        "playwright", reason="playwright drives the browser: pip install playwright"
    )
    from playwright.sync_api import sync_playwright

    if CHROMIUM is None:
        pytest.skip("no browser: apt-get install chromium")
    with sync_playwright() as driver:
        browser = driver.chromium.launch(executable_path=CHROMIUM, args=OPTIONS)
        yield browser
        browser.close()


def open_report(chromium, folders):
    """Open the page of these runs. Return the page and a list that collects its console errors."""
    page, errors = chromium.new_page(), []
    page.on("console", lambda line: line.type == "error" and errors.append(line.text))
    page.on("pageerror", lambda error: errors.append(str(error)))
    page.goto(report.main(report.Args(folders)).as_uri())
    return page, errors


# ---- reading runs


def test_the_marks_of_a_broken_run():
    """The test checks each mark at its limit and just beyond the limit."""
    edge = dict(eos_frac=0.5, zero_std_frac=0.9)
    healthy = [metric(step, entropy=0.05 if step > 1 else 0.5, **edge) for step in range(1, 30)]
    assert report.marks([{"step": 0, "eval/accuracy": 0.5}, *healthy], {}) == []

    metrics = [
        metric(1, eos_frac=0.49),
        metric(2),
        metric(3, eos_frac=0.1),
        metric(4, eos_frac=None),
        metric(20),
    ]
    assert report.marks(metrics, {}) == [
        "rollout/eos_frac is below 0.5 (most responses are cut) in 2 of 4 steps, first in step 1"
    ]
    # A run of fewer than 20 steps is a trial.
    assert report.marks(metrics[:4], {}) == []
    metrics = [metric(1), metric(2, zero_std_frac=0.91, skipped=1), metric(20)]
    found = report.marks(metrics, {})
    assert [line.split(" (")[0] for line in found] == [
        "rollout/zero_std_frac is above 0.9",
        "optim/skipped is above 0",
    ]
    assert all(line.endswith("in 1 of 3 steps, first in step 2") for line in found)
    # distill.py and self_distill.py don't need rewards.
    assert report.marks(metrics, {"teacher": "x"}) == found[1:]
    assert report.marks(metrics, {"teacher_rate": 0.05}) == found[1:]
    # In float16, the first five steps may have such updates.
    float16 = {"precision": "float16"}
    assert report.marks(metrics, float16) == found[:1]
    assert len(report.marks([metric(1), metric(6, skipped=1), metric(20)], float16)) == 1


def test_entropy_has_collapsed_if_it_stays_low():
    low = {step: 0.049 for step in (13, 14, 15, 16, 18, 19, 20, 21, 22, 23)}
    metrics = [metric(step, entropy=low.get(step, 0.5)) for step in range(11, 25)]
    (line,) = report.marks(metrics, {})
    assert "policy/entropy" in line and line.endswith("first in steps 18 to 22")
    assert report.marks(metrics[:11], {}) == []
    solved = [record | {"rollout/accuracy": 0.95} for record in metrics]
    assert report.marks(solved, {}) == []


def test_the_mark_of_the_entropy_finds_the_recorded_runs_that_collapsed():
    """The mark flags all three collapsed runs and no other run, as docs/metrics.md says."""
    found, seeds = set(), 0
    for record in lessons.read_records().values():
        entropy = record["curves"]["policy/entropy"]
        pairs = zip(entropy, record["curves"]["rollout/accuracy"], strict=True)
        metrics = [metric(k, entropy=x, accuracy=y) for k, (x, y) in enumerate(pairs, 1)]
        if report.marks(metrics, {}):
            found.add(record["command"])
            seeds += 1
    arms = lessons.LESSONS["broken"].arms
    assert found == {arms["PPO, collapsed"]} and seeds == 3


def test_another_copy_of_the_script_is_another_configuration(tmp_path):
    folders = [write_run(tmp_path / name, [metric(1)]) for name in "abc"]
    (folders[2] / "grpo.py").write_text("REWARDS = [another_reward]")
    copies = [report.read_run(folder, folder.name)["args"]["copy"] for folder in folders]
    assert copies[0] == copies[1] != copies[2]


def test_another_task_is_another_configuration(tmp_path):
    """The same content is the same task, wherever it lies. Two tasks of one name differ by their digest."""
    folders = []
    for name, digest, seed in (("a", "1", 1), ("b", "1", 2), ("c", "2", 1)):
        args = {"task": f"/{name}/mine.py", "task.py": digest * 64, "seed": seed}
        folders.append(write_run(tmp_path / name, [metric(1)], **args))
        (folders[-1] / "task.py").write_text("")
    runs = [report.read_run(folder, folder.name) for folder in folders]
    assert {run["args"]["script"] for run in runs} == {"grpo.py"}
    configs = report.configurations(runs)
    assert [config["settings"]["task"] for config in configs] == ["mine 1111111", "mine 2222222"]


def test_a_note_on_rewards_of_one_name_in_two_tasks(tmp_path):
    """Both may be called accuracy_reward, and compute something else."""
    folders = []
    for name in "ab":
        given = {
            "task": f"{name}.py",
            "task.py": name * 64,
            "rewards": ["mine"],
            "data": "d",
            "eval_size": 2,
        }
        evaluations = [{"step": step, "scores": [0.0, 1.0]} for step in (0, 1)]
        metrics = [metric(0) | {"eval/accuracy": 0.5}, metric(1) | {"eval/accuracy": 0.5}]
        folders.append(write_run(tmp_path / name, metrics, evaluations=evaluations, **given))
    assert "another task than the first one's. Do both have the same mine?" in notes_of(
        read_configs(*folders)
    )


def test_what_is_missing_is_said_and_the_rest_is_read(tmp_path):
    records = [metric(1), metric(2)]
    folder = write_run(tmp_path / "half", records, [group(1, "1+1=", "2", ["2"], [0.2])])
    with open(folder / "metrics.jsonl", "a") as file:
        file.write('not json\n[1]\n{"episodes": 3}\n' + json.dumps(metric(3))[:-9])
    (folder / "samples.jsonl").unlink()
    run = report.read_run(folder, "half")
    assert run["metrics"] == records
    assert run["gaps"] == [
        "metrics.jsonl: 3 unreadable lines are left out",
        "metrics.jsonl: the last line is half-written and left out",
        "samples.jsonl is missing",
    ]
    for text in ('{"seed": 1, "be', "[" * 100_000):
        (folder / "args.json").write_text(text)
        assert "args.json is missing or unreadable" in report.read_run(folder, "half")["gaps"]
    (folder / "metrics.jsonl").write_text(
        '{"step": 1, "kl/ref": 1e999}\n{"step": 2, "x": ' + "[" * 100_000 + "\n"
    )
    run = report.read_run(folder, "half")
    assert "metrics.jsonl: 1 unreadable lines are left out" in run["gaps"]
    # JSON has no number for infinity, so the report keeps the text.
    assert run["metrics"] == [{"step": 1, "kl/ref": "1e999"}]
    (folder / "samples.jsonl").write_text('{"step": 1, "completions": ["x"], "ended": null}\n')
    assert report.read_run(folder, "half")["samples"][0]["cut"] == []


@pytest.mark.parametrize("out", ["", "nowhere/page.html"])
def test_a_page_that_cannot_be_written(tmp_path, capsys, monkeypatch, out):
    pytest.importorskip("plotly", reason="plotly: pip install -r tests/requirements.txt")
    monkeypatch.chdir(tmp_path)
    with pytest.raises(SystemExit) as end:
        report.main(report.Args([write_run(tmp_path / "a", [metric(1)])], Path(out)))
    line = capsys.readouterr().err
    assert end.value.code == 2 and line.startswith(f"error: --out {Path(out)}: ")
    assert line.count("\n") == 1


def test_right_and_cut(tmp_path):
    """A response is right if the tags contain the right number, and cut if it did not end.

    Older runs don't record the ends, so the report shows no cuts.
    """
    texts = ["<answer>4</answer>", "<answer>5</answer>\n", "<answer>4</answer> and", "4"]
    ended = [True, True, False, False]
    samples = [group(x, "2+2=", "#### 4", texts, [1.4, 0.4, 1.4, 0.0], ended=ended) for x in (1, 2)]
    del samples[1]["ended"]
    folder = write_run(tmp_path / "a", [metric(1), metric(2)], samples)
    one, two = report.read_run(folder, "a")["samples"]
    assert one["scores"] == two["scores"] == [1, 0, 1, 0]
    assert one["cut"] == [False, False, True, True]
    assert two["cut"] == []


def test_without_plotly_a_line_says_how_to_install_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(SystemExit) as end:
        report.main(report.Args([write_run(tmp_path / "a")]))
    assert end.value.code == 2
    line = capsys.readouterr().err
    assert line == "error: report.py draws with plotly: pip install -r report/requirements.txt\n"
    assert "plotly==" in (ROOT / "report" / "requirements.txt").read_text()


def test_runs_inside_a_folder_are_found_and_files_are_left_out(tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path / "runs" / name, [metric(1)])
    (tmp_path / "runs" / "report.html").write_text("an earlier report")
    (tmp_path / "runs" / "empty").mkdir()
    found = [tmp_path / "runs" / name for name in ("a", "b")]
    assert report.find_runs([tmp_path / "runs"]) == found
    assert report.find_runs(sorted((tmp_path / "runs").iterdir())) == found


def test_without_a_run_no_page_is_written(tmp_path, capsys):
    pytest.importorskip("plotly", reason="plotly: pip install -r tests/requirements.txt")
    (tmp_path / "empty").mkdir()
    (tmp_path / "report.html").write_text("a good page")
    with pytest.raises(SystemExit) as end:
        report.main(report.Args([tmp_path]))
    assert end.value.code == 2
    assert capsys.readouterr().err.startswith(f"error: no run in {tmp_path}; give folders of runs")
    assert (tmp_path / "report.html").read_text() == "a good page"


@pytest.mark.parametrize("names", [[], ["a", "nothing"]])
def test_a_folder_that_is_not_there(tmp_path, capsys, names):
    pytest.importorskip("plotly", reason="plotly: pip install -r tests/requirements.txt")
    write_run(tmp_path / "a")
    with pytest.raises(SystemExit) as end:
        report.main(report.Args([tmp_path / name for name in names]))
    assert end.value.code == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1 and all(str(tmp_path / name) in line for name in names[1:])


# ---- configurations compared

STEPS = [
    {"step": 0, "eval/accuracy": 0.5},
    {"step": 1, "time/rollout_s": 1.25, "time/update_s": 2.0, "eval/accuracy": 0.625},
    {
        "step": 2,
        "time/rollout_s": 1.0,
        "time/reward_s": 0.5,
        "time/update_s": 2.25,
        "eval/accuracy": 0.75,
    },
    {
        "step": 3,
        "time/rollout_s": 90.0,
        "time/reward_s": 9.0,
        "time/update_s": 90.0,
    },  # not evaluated yet
]


def write_evaluated(folder, right, before="1100", **args):
    """A run whose problems are right (1) or wrong (0) before training and after two steps."""
    evaluations = [
        {"step": step, "scores": [float(x) for x in digits]}
        for step, digits in ((0, before), (2, right))
        if digits
    ]
    args = {"data": "d1", "eval_size": 4, "num_prompts": 2} | args
    args = {name: value for name, value in args.items() if value is not None}
    return write_run(folder, STEPS, evaluations=evaluations, **args)


def read_configs(*folders):
    return report.configurations([report.read_run(folder, folder.name) for folder in folders])


def notes_of(configs, columns=report.COLUMNS):
    return " ".join(report.notes_on(configs, columns))


def test_a_mean_and_its_standard_error():
    """Numbers worked by hand, the formula for right and wrong, and all possible bootstrap samples."""
    assert report.mean_and_error([2, 4, 9]) == pytest.approx((5, math.sqrt(13 / 3)))
    assert report.mean_and_error([True, True, True, False]) == pytest.approx((0.75, 0.25))
    assert report.mean_and_error([0.5, 0.5]) == (0.5, 0)
    assert report.mean_and_error([1]) == (1, None)
    right = [1] * 37 + [0] * 163
    p = 37 / 200
    assert report.mean_and_error(right) == pytest.approx((p, math.sqrt(p * (1 - p) / 199)))
    values = [1, -1, 0.5, 0, 0]
    means = [sum(sample) / 5 for sample in itertools.product(values, repeat=5)]
    center = sum(means) / len(means)
    spread = math.sqrt(sum((x - center) ** 2 for x in means) / len(means))
    # The bootstrap's spread divides by n, and not by n - 1.
    assert report.mean_and_error(values) == pytest.approx((center, spread * math.sqrt(5 / 4)))


def test_the_sign_test():
    """Numbers worked by hand, and every outcome of up to nine tosses of a coin."""
    assert report.sign_test(0, 0) == report.sign_test(1, 1) == 1
    assert report.sign_test(5, 0) == report.sign_test(0, 5) == 2 / 32
    assert report.sign_test(3, 1) == (1 + 4 + 4 + 1) / 16
    assert report.sign_test(1500, 500) < 1e-100
    for n in range(1, 10):
        splits = [abs(2 * sum(tosses) - n) for tosses in itertools.product((0, 1), repeat=n)]
        for won in range(n + 1):
            as_uneven = sum(split >= abs(2 * won - n) for split in splits)
            assert report.sign_test(won, n - won) == pytest.approx(as_uneven / 2**n)


def test_two_runs_are_compared_problem_by_problem(tmp_path):
    """Four problems by hand: two won, one lost. The other way round, all signs change."""
    first, other = read_configs(
        write_evaluated(tmp_path / "a", "1100"), write_evaluated(tmp_path / "b", "1011", beta=0)
    )
    found = report.compare(first, other)
    error = math.sqrt((0.25**2 + 1.25**2 + 0.75**2 + 0.75**2) / 3 / 4)  # of 0, -1, 1, 1
    assert found["difference"] == 0.25 and found["error"] == pytest.approx(error)
    assert found["interval"] == pytest.approx((0.25 - 1.96 * error, 0.25 + 1.96 * error))
    assert (found["won"], found["lost"], found["p"]) == (2, 1, 1)
    assert found["per_seed"] == {"1": 0.25} and found["over_seeds"] == (0.25, None)
    back = report.compare(other, first)
    assert (back["difference"], back["won"], back["lost"]) == (-0.25, 1, 2)
    assert back["interval"] == pytest.approx((-found["interval"][1], -found["interval"][0]))


def test_several_seeds_are_averaged_per_problem_and_compared_per_seed(tmp_path):
    """By hand. The means are 1, 1/2, 0, 0 and 1, 1, 1/2, 1/2, so the differences 0, 1/2, 1/2, 1/2."""
    folders = [
        write_evaluated(tmp_path / "a1", "1100"),
        write_evaluated(tmp_path / "b2", "1101", beta=0, seed=2),
        write_evaluated(tmp_path / "a2", "1000", seed=2),
        write_evaluated(tmp_path / "b1", "1110", beta=0),
    ]
    first, other = read_configs(*folders)
    found = report.compare(first, other)
    assert (found["difference"], found["error"]) == pytest.approx((0.375, 0.125))
    assert (found["won"], found["lost"], found["p"]) == (3, 0, 0.25)
    assert found["per_seed"] == {"1": 0.25, "2": 0.5}
    texts = report.comparison_texts(found)
    assert texts["sign-test"] == "p = 0.250"
    assert report.comparison_texts(found | {"p": 0.00099})["sign-test"] == "p < 0.001"
    assert found["over_seeds"] == pytest.approx((0.375, 0.125))
    # Other seeds, and another number of them: over the problems alone.
    first, other = read_configs(*folders, write_evaluated(tmp_path / "b3", "0100", beta=0, seed=3))
    found = report.compare(first, other)
    assert found["difference"] == pytest.approx((7 / 3 - 1.5) / 4)
    assert (found["won"], found["lost"]) == (3, 1)  # 2/3, 1, 1/3, 1/3 and 1, 1/2, 0, 0
    assert found["per_seed"] == {} and found["over_seeds"] is None
    assert "other seeds than the first" in notes_of([first, other])


def test_the_notes_of_one_seed_and_of_several(tmp_path):
    """With several seeds, more problems can be lost while the mean rises. The note says why."""
    before, folders = "1" * 60 + "0" * 25 + "1" * 15, []
    for seed in (1, 2, 3):  # 60 problems are lost in one seed each, and 25 are won in all
        lost = "".join("0" if i % 3 == seed - 1 else "1" for i in range(60))
        for name, right in (("a", before), ("b", lost + "1" * 40)):
            given = dict(seed=seed, before=before, eval_size=100, beta=float(name == "b"))
            folders.append(write_evaluated(tmp_path / f"{name}{seed}", right, **given))
    result = report.compare(*read_configs(*folders))
    assert result["difference"] == pytest.approx(25 / 100 - 20 / 100)
    assert (result["won"], result["lost"]) == (25, 60) and result["p"] < 0.001
    notes = notes_of(read_configs(*folders))
    assert "it may disagree with the sign of the difference" in notes
    assert "trust the test" not in notes
    assert "(1, 2, 3) share prompts" in notes and "about as precise" in notes
    notes = notes_of(read_configs(*folders[:2]))
    assert "trust the test" not in notes and "disagree" not in notes
    pair = [
        write_evaluated(tmp_path / x, y, beta=ord(x[0])) for x, y in (("c", "1100"), ("d", "1011"))
    ]
    assert "won 2 and lost 1 problems. With so few, trust the test" in notes_of(read_configs(*pair))
    # One configuration alone has no difference, and no test.
    notes = notes_of(read_configs(*folders[::2]))
    assert "12.7 of these errors" in notes and " test " not in notes and "difference" not in notes
    # The standard error with several seeds is that of the problems' means.
    shares = report.problem_means([{"scores": [1, 1, 0]}, {"right": [True, False, False]}])
    assert shares == [1, 0.5, 0]
    assert report.mean_and_error(shares)[1] == pytest.approx(0.5 / math.sqrt(3))


def test_equal_configurations_often_look_different_with_one_seed():
    """The three percentages of docs/train.md: a normal approximation, with 30 % of the problems won or lost."""
    normal = statistics.NormalDist()
    found = []
    for n in (50, 200, 500):
        over_problems = math.sqrt(0.3 / n)  # the standard error that the report knows
        over_seeds = math.sqrt(2) * 0.046
        z = 1.96 * over_problems / math.hypot(over_problems, over_seeds)
        found.append(200 * normal.cdf(-z))
    assert found == pytest.approx([12, 31, 48], abs=1.5)
    text = " ".join((ROOT / "docs" / "train.md").read_text(encoding="utf-8").split())
    assert "in some 12, 31 and 48 % of comparisons on 50, 200 and 500 problems" in text


def test_a_run_compared_with_itself(tmp_path):
    folder = write_evaluated(tmp_path / "a", "1101")
    _, rows = report.comparison(read_configs(folder, folder))
    assert rows[1]["difference"] == "+0.000 (+0.000 to +0.000)"
    assert (rows[1]["won-lost"], rows[1]["sign-test"]) == ("0, 0", "p = 1.000")


@pytest.mark.parametrize(
    ("args", "sentence"),
    [
        ({"data": "d2"}, "args.json doesn't have the same data"),
        ({"data": None}, "args.json doesn't have the same data"),
        ({"eval_size": 5}, "args.json doesn't have the same eval_size"),
        ({"right": "10110"}, "the evaluations have 4 and 5 problems"),
        ({"right": ""}, "b.py, seed 1 has no usable evaluation after step 0"),
        ({"right": "", "before": ""}, "b.py, seed 1 has no usable evaluation after step 0"),
    ],
)
def test_other_problems_are_not_compared(tmp_path, args, sentence):
    args = {"right": "1011"} | args
    folders = [write_evaluated(tmp_path / "a", "1100"), write_evaluated(tmp_path / "b", **args)]
    (folders[1] / "grpo.py").rename(folders[1] / "b.py")
    configs = read_configs(*folders)
    columns, _ = report.comparison(configs)
    assert not {"difference", "won-lost", "sign-test", "per-seed", "over-seeds"} & set(columns)
    notes = report.notes_on(configs, columns)
    (note,) = [note for note in notes if note.startswith("Not compared: b.py, seed 1, because ")]
    assert sentence in note and note.endswith(".")
    assert note in report.table_for_paper(configs, "markdown")


def test_digests_that_both_runs_lack_do_not_make_the_problems_equal(tmp_path):
    args = {"data": None, "eval_size": None}
    first, other = read_configs(
        write_evaluated(tmp_path / "a", "1100", **args),
        write_evaluated(tmp_path / "b", "1100", **args, beta=0),
    )
    assert "same data" in report.obstacle(first, other)


def test_evaluations_that_are_damaged(tmp_path):
    """A line counts if it has a number for each problem. An older run has true or false, or no file at all."""
    folder = write_evaluated(tmp_path / "a", "1100")
    with open(folder / "evaluations.jsonl", "a") as file:
        for scores in ("[0.5, NaN]", '["1", 0]', "[]", '"1100"', "null"):
            file.write(f'{{"step": 4, "scores": {scores}}}\n')
        file.write('{"step": 2, "right": [true, false]}\n{"step": 4, "right": [true')
    run = report.read_run(folder, "a")
    assert [record["step"] for record in run["evaluations"]] == [0, 2, 2]
    assert report.scores_of(run["evaluations"][2]) == [1, 0]
    assert [gap for gap in run["gaps"] if "evaluations" in gap] == [
        "evaluations.jsonl: 5 unreadable lines are left out",
        "evaluations.jsonl: the last line is half-written and left out",
    ]
    (folder / "evaluations.jsonl").unlink()
    run = report.read_run(folder, "a")
    assert run["evaluations"] == [] and not any("evaluations" in gap for gap in run["gaps"])
    # Two seeds with other numbers of problems can't be averaged.
    write_evaluated(tmp_path / "b", "1100")
    write_evaluated(tmp_path / "c", "110", seed=2)
    (config,) = read_configs(tmp_path / "b", tmp_path / "c")
    assert report.evaluated(config, after=True) == {}
    assert len(report.evaluated(config, after=False)) == 2


def test_a_seed_that_has_only_begun_is_left_out(tmp_path):
    folders = [
        write_evaluated(tmp_path / "a", "1111"),
        write_evaluated(tmp_path / "a2", "", seed=2),
    ]
    configs = read_configs(*folders)
    _, (row,) = report.comparison(configs)
    assert (row["seeds"], row["after"]) == ("1", "1.000 ± 0.000")
    assert "seed 2 is left out" in notes_of(configs)


def test_runs_that_share_prompts_and_random_numbers(tmp_path):
    folders = [
        write_run(tmp_path / "a", seed=1, data="x", num_prompts=2),
        write_run(tmp_path / "a2", seed=2, data="x", num_prompts=2),
        write_run(tmp_path / "b", seed=2, data="x", num_prompts=2, beta=0),
        write_run(tmp_path / "c", seed=1, data="x", num_prompts=3),  # other prompts per step
        write_run(tmp_path / "d", seed=1, data="y", num_prompts=2),  # other data
        write_run(tmp_path / "e", seed=1, data="x", num_prompts=2, temperature=0.5),
    ]
    assert report.shared_seeds(read_configs(*folders)) == ["2"]
    assert report.shared_seeds(read_configs(*folders[:2])) == []


def test_another_judge_is_named(tmp_path):
    judges = [["one", "format"], ["two"]]
    folders = [write_evaluated(tmp_path / x[0], "1100", rewards=x) for x in judges]
    assert "the accuracy is that of two, in the first one." in notes_of(read_configs(*folders))


# ---- the table for a paper


def print_table(capsys, *words):
    """What the command prints."""
    assert report.main(tyro.cli(report.Args, args=[str(word) for word in words])) is None
    return capsys.readouterr().out.splitlines()


@pytest.fixture
def four_runs(tmp_path):
    """Two configurations with two seeds each. The differences of the second are -1/2, -1/2, 0 and 1/2."""
    same = dict(versions={"torch": "2.13.0", "transformers": "5.23.0"}, model="org/a_model")
    same |= {"device_name": "NVIDIA_H100 80 GB", "utils/rewards.py": "c0"}
    one, two = dict(same, learning_rate=1e-5), dict(same, learning_rate=3e-5, examples=False)
    return [
        write_evaluated(tmp_path / "a1", "1100", examples=True, **one),
        write_evaluated(tmp_path / "a2", "1000", examples=True, **one, seed=2),
        write_evaluated(tmp_path / "b1", "0000", **two),
        write_evaluated(tmp_path / "b2", "1001", **two, seed=2),
    ]


def test_all_columns_of_the_table(four_runs, capsys, monkeypatch):
    """Each cell by hand, in Markdown and in LaTeX. The seconds end with the last evaluation."""
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    given = (*four_runs, "--columns", *report.COLUMNS, "--table")
    header, line, *rows = print_table(capsys, *given)[:4]
    assert header == (
        "| configuration | seeds | steps | problems | accuracy before | accuracy after | s.e. over seeds "
        "| difference (95 % interval) | won, lost | sign test | difference per seed "
        "| difference over seeds | seconds | torch | transformers | device |"
    )
    assert line == "|" + " --- |" * 16
    assert rows[0] == (
        "| examples, learning-rate 1e-5 | 1, 2 | 2 | 4 | 0.500 ± 0.289 | 0.375 ± 0.239 "
        "| 0.125 | - | - | - | - | - | 14 | 2.13.0 | 5.23.0 | NVIDIA\\_H100 80 GB |"
    )
    assert rows[1] == (
        "| no-examples, learning-rate 3e-5 | 1, 2 | 2 | 4 | 0.500 ± 0.289 "
        "| 0.250 ± 0.144 | 0.250 | -0.125 (-0.594 to +0.344) | 1, 2 | p = 1.000 "
        "| -0.500 (seed 1), +0.250 (seed 2) | -0.125 ± 0.375 | 14 | 2.13.0 | 5.23.0 "
        "| NVIDIA\\_H100 80 GB |"
    )
    lines = print_table(capsys, *given, "latex")
    table = [line for line in lines if not line.startswith("% ")]
    assert table[0] == "\\begin{tabular}{@{}" + 16 * "l" + "@{}}" and table[-1] == "\\end{tabular}"
    assert (table[1], table[3], table[-2]) == ("\\toprule", "\\midrule", "\\bottomrule")
    assert "difference (95 \\% interval)" in table[2]
    assert table[5] == (
        "no-examples, learning-rate 3e-5 & 1, 2 & 2 & 4 & 0.500 $\\pm$ 0.289 "
        "& 0.250 $\\pm$ 0.144 & 0.250 & $-$0.125 ($-$0.594 to +0.344) & 1, 2 & p = 1.000 "
        "& $-$0.500 (seed 1), +0.250 (seed 2) & $-$0.125 $\\pm$ 0.375 & 14 & 2.13.0 & 5.23.0 "
        "& NVIDIA\\_H100 80 GB \\\\"
    )
    assert not list(four_runs[0].parent.glob("*.html"))


def test_the_table_fits_a_page(four_runs, capsys):
    """By default, what all rows share is a note, and with several seeds there is no test over the problems."""
    table = print_table(capsys, *four_runs, "--table")
    assert [table[0], *table[2:5]] == [
        "| configuration | accuracy after | difference (95 % interval) | difference over seeds |",
        "| examples, learning-rate 1e-5 | 0.375 ± 0.239 | - | - |",
        "| no-examples, learning-rate 3e-5 | 0.250 ± 0.144 | -0.125 (-0.594 to +0.344) | -0.125 ± 0.375 |",
        "",
    ]
    assert table[5] == (
        "All rows: grpo.py; seeds 1, 2; steps 2; problems 4; accuracy before 0.500 ± 0.289; "
        "torch 2.13.0; transformers 5.23.0; device NVIDIA_H100 80 GB."
    )
    notes = "\n".join(table)
    assert "sign test" not in notes and "seconds" not in notes and "1.96 standard" in notes
    # Another number of steps is a column, and one seed has the test.
    lines = (four_runs[2] / "evaluations.jsonl").read_text().replace('"step": 2', '"step": 1')
    (four_runs[2] / "evaluations.jsonl").write_text(lines)
    table = print_table(capsys, four_runs[0], four_runs[2], "--table")
    columns = "configuration | steps | accuracy after | difference (95 % interval) | sign test"
    assert table[0] == f"| {columns} |"
    assert "seeds 1; problems 4;" in table[5] and "The sign test" in "".join(table)
    # A single row keeps its accuracy before training.
    table = print_table(capsys, *four_runs[:2], "--table")
    assert table[2] == "| grpo.py | 1, 2 | 0.500 ± 0.289 | 0.375 ± 0.239 | 0.125 |"


def test_chosen_columns_and_names(four_runs, capsys):
    given = (*four_runs, "--labels", "few", "many_b", "--columns", "after", "seconds", "--table")
    table = print_table(capsys, *given)
    assert table[:4] == [
        "| configuration | accuracy after | seconds |",
        "| --- | --- | --- |",
        "| few | 0.375 ± 0.239 | 14 |",
        "| many\\_b | 0.250 ± 0.144 | 14 |",
    ]
    assert table[5].startswith(
        "All rows: grpo.py; seeds 1, 2; steps 2; problems 4; accuracy before"
    )
    notes = "".join(table)
    assert "problem by problem" not in notes and "all seeds together" in notes
    # A formula stays one in LaTeX.
    labels = ("--labels", r"$\beta = 0$", "many_b")
    assert print_table(capsys, *four_runs, *labels, "--table")[2].startswith(r"| $\beta = 0$ |")
    names = [
        line.split(" & ")[0]
        for line in print_table(capsys, *four_runs, *labels, "--table", "latex")
    ]
    assert names[-4:-2] == [r"$\beta = 0$", r"many\_b"]
    for words in (
        ("--labels", "few", "--table"),
        ("--labels", "few", "many"),
        ("--labels", "few", "few", "--table"),
        ("--columns", "after"),
        ("--columns", "--table"),
        ("--out", "table.md", "--table"),
    ):
        with pytest.raises(SystemExit) as end:
            print_table(capsys, *four_runs, *words)
        line = capsys.readouterr().err
        assert end.value.code == 2 and line.startswith(f"error: {words[0]}")
        assert line.count("\n") == 1


def test_a_seed_that_is_not_finished_is_told(four_runs, capsys):
    """Its last evaluation counts, but a reader has to know, whatever the columns are."""
    for folder in four_runs:
        args = json.loads((folder / "args.json").read_text())
        (folder / "args.json").write_text(json.dumps(args | {"num_steps": 20}))
        if folder.name != "b2":
            lines = (folder / "evaluations.jsonl").read_text().replace('"step": 2', '"step": 20')
            (folder / "evaluations.jsonl").write_text(lines)
    notes = print_table(capsys, *four_runs, "--columns", "after", "--table")
    found = [note for note in notes if "isn't finished" in note]
    # A note calls a configuration as the table does.
    name = "no-examples, learning-rate 3e-5"
    assert found == [f"{name}: seed 2 isn't finished. Its last evaluation is after step 2 of 20."]


def test_short_names_of_settings(tmp_path):
    """Small numbers have an exponent, and a path of this disk its last part alone."""
    assert [report.text_of(x) for x in (1e-4, 3e-5, 1.5e-4, 0.04, 0.0, -2e-7)] == [
        "1e-4", "3e-5", "1.5e-4", "0.04", "0", "-2e-7",
    ]  # fmt: skip
    folders = [write_run(tmp_path / x, STEPS, dataset=f"/home/me/{x}.csv") for x in "ab"]
    names = report.names_for_paper(read_configs(*folders))
    assert names == ["dataset a.csv", "dataset b.csv"]


def test_only_a_given_name_is_a_formula(tmp_path, drawn, capsys):
    """A setting with dollars stays a text, in LaTeX and in the figure."""
    files = [r"a$\foo$.csv", "b.csv"]
    folders = [write_run(tmp_path / x[0], [metric(1)], dataset=x) for x in files]
    lines = print_table(capsys, *folders, "--columns", "steps", "--table", "latex")
    assert any(line.startswith(r"dataset a\$\textbackslash{}foo\$.csv &") for line in lines)
    figure, _, _ = drawn(folders, ["kl/ref"])
    (legend,) = figure.legends
    assert legend.get_texts()[0].get_text() == r"dataset a\$\foo\$.csv"


def test_the_scripts_are_named_where_they_differ(tmp_path):
    for name in ("a", "b"):
        write_run(tmp_path / name, STEPS, beta=ord(name))
    (tmp_path / "b" / "grpo.py").rename(tmp_path / "b" / "rloo.py")
    configs = read_configs(tmp_path / "a", tmp_path / "b")
    assert report.names_for_paper(configs) == ["grpo.py, beta 97", "rloo.py, beta 98"]
    assert not any("All rows: grpo" in line for line in report.table_for_paper(configs, "markdown"))


def test_the_table_of_older_runs(tmp_path, capsys):
    """Without evaluations.jsonl, the accuracy comes from the metrics, and has no standard error."""
    for name, seed in (("a", 1), ("b", 1), ("b2", 2)):
        write_run(tmp_path / name, STEPS, seed=seed, beta=ord(name[0]))
    header, _, *rows = print_table(capsys, tmp_path, "--table")[:4]
    assert header == "| configuration | seeds | accuracy after |"
    assert rows == ["| beta 97 | 1 | 0.750 |", "| beta 98 | 1, 2 | 0.750 |"]


def test_special_characters_stay_text_in_a_table(tmp_path, capsys):
    text = "a_b%c#d&e{f}~g^h\\i$j|k`l<m>*n\no -- --p -1 x-1"
    for k, name in enumerate("ab"):
        write_run(tmp_path / name, STEPS, beta=k, device_name=text)
    given = (tmp_path, "--columns", "device", "--table")
    lines = print_table(capsys, *given, "latex")
    cells = lines[-3].split(" & ")
    assert cells[-1] == (
        "a\\_b\\%c\\#d\\&e\\{f\\}\\textasciitilde{}g\\textasciicircum{}h\\textbackslash{}i\\$j"
        "\\textbar{}k`l$<$m$>$*n o -{}- -{}-p $-$1 x-1 \\\\"
    )
    lines = print_table(capsys, *given, "markdown")
    assert lines[2].endswith("| a\\_b%c#d&e{f}~g^h\\\\i$j\\|k\\`l\\<m\\>\\*n o -- --p -1 x-1 |")
    # In a note, a line break would end a comment of LaTeX.
    assert (
        f"device {' '.join(text.split())}." in print_table(capsys, tmp_path, "--table", "latex")[0]
    )


def test_a_flag_that_only_one_script_has_is_not_shown(tmp_path):
    """A flag is shown where another configuration has it with another value."""
    folders = [
        write_run(tmp_path / "a", STEPS, beta=1, clip_eps=0.2),
        write_run(tmp_path / "b", STEPS, beta=0, clip_eps=0.2, clip_low=0.1),
        write_run(tmp_path / "c", STEPS, beta=0, clip_eps=0.2, clip_low=0.3),
        write_run(tmp_path / "d", STEPS, beta=0, clip_eps=0.2, vf_clip=0.3),
    ]
    configs = read_configs(*folders)
    assert [", ".join(report.flags_of(config, configs)) for config in configs] == [
        "beta 1",
        "beta 0, clip-low 0.1",
        "beta 0, clip-low 0.3",
        "beta 0",
    ]


def test_equal_flags_are_told_apart_by_the_names_of_the_runs(tmp_path, capsys):
    folders = [
        write_evaluated(tmp_path / name, "1100", **{"utils/rewards.py": name}) for name in "ab"
    ]
    lines = print_table(capsys, *folders, "--table")
    names = [f"{tmp_path.name}/{name}".replace("_", "\\_") for name in "ab"]
    assert [line.split(" | ")[0] for line in lines[2:4]] == [f"| grpo.py ({x})" for x in names]
    # A run that is given twice counts once.
    assert print_table(capsys, *folders, folders[0], "--table") == lines


def test_grades_are_compared_as_they_are(tmp_path, capsys):
    """By hand: a first reward with grades. The scores are 0.9, 0.4, 0.5 and 0.8, 0.6, 1."""
    folders, grades = [], {"a": [0.9, 0.4, 0.5], "b": [0.8, 0.6, 1.0]}
    for name, scores in grades.items():
        evaluations = [{"step": 0, "scores": [0.5, 0.25, 0.0]}, {"step": 2, "scores": scores}]
        samples = [group(1, "x", "y", ["one"], [0.9])]
        same = dict(evaluations=evaluations, samples=samples, data="d", eval_size=3)
        folders.append(write_run(tmp_path / name, STEPS, **same, beta=ord(name)))
    given = (*folders, "--columns", "before", "after", "difference", "won-lost", "--table")
    one, two = print_table(capsys, *given)[2:4]
    assert one == "| beta 97 | 0.250 ± 0.144 | 0.600 ± 0.153 | - | - |"
    assert two.startswith("| beta 98 | 0.250 ± 0.144 | 0.800 ± 0.115 | +0.200 (-0.1")
    assert two.endswith(" | 2, 1 |")
    assert report.page_data([report.read_run(folders[0], "a")])["runs"][0]["first"] == "0.250"


# ---- the figure for a paper


@pytest.fixture
def drawn(tmp_path):
    """Draw metrics of these folders: the figure's panels, its notes and the file."""
    pytest.importorskip("matplotlib", reason="matplotlib: pip install -r tests/requirements.txt")

    def draw(folders, metrics, smooth=1, name="figure.svg", width=3.15):
        out = tmp_path / name
        configs = read_configs(*folders)
        report.name_for_paper(configs, None)
        figure, notes = report.figure_for_paper(configs, metrics, width, smooth, out)
        return figure, " ".join(notes), out

    return draw


def test_the_figure_has_the_mean_and_the_band_of_each_configuration(tmp_path, drawn):
    """By hand: two seeds, of which one has a step more, beside a run without a metric."""
    rewards = {1: [0, 1, 2, 3, 4, 10], 2: [2, 3, 4, 5, 6]}
    folders = []
    for seed, values in rewards.items():
        metrics = [metric(k + 1, reward_mean=x) for k, x in enumerate(values)]
        metrics.insert(0, {"step": 0, "eval/accuracy": seed / 4})
        folders.append(write_run(tmp_path / f"s{seed}", metrics, seed=seed))
    folders.append(write_run(tmp_path / "x", [metric(1), metric(2)], beta=0.5))
    folders.append(write_run(tmp_path / "y", [], beta=0.5, seed=2))
    figure, notes, _ = drawn(folders, ["rollout/reward_mean", "eval/accuracy"])
    rewards, accuracies = figure.axes
    pooled, alone = rewards.lines
    assert pooled.get_xydata().tolist() == [[1, 1], [2, 2], [3, 3], [4, 4], [5, 5]]
    (band,) = rewards.collections
    corners = {tuple(corner) for corner in band.get_paths()[0].vertices.tolist()}
    assert corners == {(k, k + side) for k in range(1, 6) for side in (-1, 1)}
    assert alone.get_xydata().tolist() == [[1, 1], [2, 1]]
    (line,) = accuracies.lines
    assert line.get_xydata().tolist() == [[0, 0.375]]
    assert [rewards.get_ylabel(), accuracies.get_ylabel()] == ["mean reward", "held-out accuracy"]
    (legend,) = figure.legends
    assert [text.get_text() for text in legend.get_texts()] == ["beta 0.01", "beta 0.5"]
    assert "rollout/reward_mean is drawn at 5 of 6 steps, which all seeds have." in notes
    assert "beta 0.5: no eval/accuracy." in notes
    assert "seed 2 has no rollout/reward_mean yet" in notes
    assert "from the lowest to the highest seed" in notes and "last" not in notes
    # As in the page, only sampled metrics are smoothed.
    with open(folders[0] / "metrics.jsonl", "a") as file:
        file.write('{"step": 7, "eval/accuracy": 0.75}\n')
    figure, notes, _ = drawn(folders[:1], ["rollout/reward_mean", "eval/accuracy"], smooth=5)
    assert figure.axes[0].lines[0].get_ydata().tolist() == [0, 0.5, 1, 1.5, 2, 4]
    assert figure.axes[1].lines[0].get_ydata().tolist() == [0.25, 0.75]
    assert "rollout/reward_mean: for each seed the mean of the last 5 steps" in notes
    assert "Bands" not in notes


def test_curves_differ_without_colors(tmp_path, drawn):
    folders = [write_run(tmp_path / f"{k}", [metric(1), metric(2)], beta=k) for k in range(20)]
    figure, _, out = drawn(folders, ["kl/ref"], name="figure.pdf")
    looks = {(line.get_linestyle(), line.get_marker()) for line in figure.axes[0].lines}
    assert len(looks) == 20
    # Where curves lie on each other, their marks don't.
    starts = [report.marked_points(k, 12, 100)[0] for k in range(12)]
    assert len(set(starts)) == 12 and report.marked_points(3, 12, 5) == (0, 1)
    # Conferences refuse Type 3 fonts.
    assert b"/Type3" not in out.read_bytes() and b"/CIDFontType2" in out.read_bytes()


@pytest.mark.parametrize("width", [3.15, 6.5])
@pytest.mark.parametrize("rates", [[1e-5, 2e-5], [0.12345, 0.54321], [*range(1, 13)]])
def test_nothing_is_cut_off(tmp_path, drawn, rates, width):
    """The border of the picture is white, with short, long and many names. A wide figure has two panels in a row."""
    folders = [write_run(tmp_path / f"{x}", [metric(1)], learning_rate=x) for x in rates]
    metrics = ["kl/ref", "rollout/accuracy", "policy/entropy"]
    figure, _, out = drawn(folders, metrics, name="figure.png", width=width)
    from matplotlib.image import imread

    pixels = imread(out)[..., :3]
    for edge in (pixels[0], pixels[-1], pixels[:, 0], pixels[:, -1]):
        assert edge.min() == 1
    figure.canvas.draw()
    boxes = [panel.get_position() for panel in figure.axes]
    assert len({round(box.x0, 1) for box in boxes}) == (1 if width < 5 else 2)
    assert min(box.height for box in boxes) * figure.get_size_inches()[1] > 1.2
    assert [panel.get_xlabel() for panel in figure.axes][1:] == [
        "" if width < 5 else "step",
        "step",
    ]


@pytest.mark.parametrize("name", ["figure.svg", "figure.png", None])
def test_the_command_writes_a_figure(tmp_path, capsys, name):
    pytest.importorskip("matplotlib", reason="matplotlib: pip install -r tests/requirements.txt")
    for seed in (1, 2):
        write_run(tmp_path / "runs" / f"s{seed}", [metric(1) | {"eval/accuracy": 0.5}], seed=seed)
    out = tmp_path / "runs" / (name or "figure.pdf")
    words = ["--out", out] if name else []
    printed = print_table(capsys, tmp_path / "runs", "--figure", *words)
    start = {".pdf": b"%PDF", ".png": b"\x89PNG", ".svg": b"<?xml"}[out.suffix]
    assert out.read_bytes().startswith(start)
    assert printed[0] == str(out) and "Bands go" in printed[1]


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        (
            ["--figure", "x/y"],
            "error: --figure x/y: no run has it; the metrics are eval/accuracy, ",
        ),
        (["--figure", "--out", "a.b"], "error: --out a.b: a figure is one of .pdf, .svg, .png"),
        (["--figure", "--smooth", "0"], "error: --smooth and --width must be at least 1"),
        (["--figure", "--width", "0.5"], "error: --smooth and --width must be at least 1"),
        (["--figure", "--labels", "$\\foo$"], "error: --figure: "),
        (["--figure", "--labels", "_a"], "error: --labels: the names must differ"),
        (["--figure", "--out", "a"], "error: --out a: a figure is one of .pdf, .svg, .png"),
        (["--figure", "--out", "nowhere/a.pdf"], "error: --out nowhere/a.pdf: No such file"),
    ],
)
def test_a_figure_that_cannot_be_drawn(tmp_path, monkeypatch, capsys, words, sentence):
    pytest.importorskip("matplotlib", reason="matplotlib: pip install -r tests/requirements.txt")
    monkeypatch.chdir(tmp_path)
    write_run(tmp_path / "a", [metric(1) | {"eval/accuracy": 0.5}])
    with pytest.raises(SystemExit) as end:
        print_table(capsys, "a", *words)
    line = capsys.readouterr().err
    assert end.value.code == 2 and line.startswith(sentence) and line.count("\n") == 1


def test_without_matplotlib_a_line_says_how_to_install_it(tmp_path, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(SystemExit) as end:
        print_table(capsys, write_run(tmp_path / "a"), "--figure")
    assert end.value.code == 2
    assert capsys.readouterr().err.endswith("pip install -r report/requirements.txt\n")


# ---- the page: curves


def test_seeds_are_a_mean_and_a_band(chromium, tmp_path):
    """Two seeds of one configuration, worked by hand, beside another configuration."""
    rewards = {1: [0, 1, 2, 3, 4, 10], 2: [2, 3, 4, 5, 6, 14]}
    folders = [
        write_run(
            tmp_path / f"s{seed}",
            [metric(k + 1, reward_mean=x) for k, x in enumerate(values)],
            seed=seed,
        )
        for seed, values in rewards.items()
    ]
    folders.append(write_run(tmp_path / "x", [metric(1, reward_mean=None), metric(2)], beta=0.5))
    page, errors = open_report(chromium, folders)
    labels = ["grpo.py, beta 0.01, seeds 1, 2", "grpo.py, beta 0.5, seed 1"]
    assert page.locator("#legend label").all_inner_texts() == labels
    differing = page.inner_text("#runs details >> nth=0")
    assert "beta" in differing
    page.wait_for_selector("#first .main-svg")

    def curves(axis="y"):
        return page.evaluate(
            f"document.querySelector('#first .chart').data.map(trace => trace.{axis})"
        )

    # Each seed's curve is the mean of the last five steps. The band is the lowest and highest seed.
    low, high = [0, 0.5, 1, 1.5, 2, 4], [2, 2.5, 3, 3.5, 4, 6.4]
    assert curves()[:3] == [low, high, [1, 1.5, 2, 2.5, 3, 5.2]]
    page.uncheck("#smooth")
    assert curves() == [rewards[1], rewards[2], [1, 2, 3, 4, 5, 12], [None, 1]]
    page.uncheck("#band")
    assert curves() == [rewards[1], rewards[2], [None, 1]]
    page.select_option("#across", "episodes")
    assert curves("x") == [[8, 16, 24, 32, 40, 48]] * 2 + [[8, 16]]
    page.uncheck("#legend input >> nth=0")
    assert curves() == [[None, 1]]
    # The page draws a curve when the user opens its group.
    assert page.locator("#all .main-svg").count() == 0
    page.click("#all summary >> nth=0")
    page.wait_for_selector("#all .main-svg")
    page.close()
    assert errors == []


def test_a_chart_is_saved_as_svg(chromium, tmp_path):
    folder = write_run(tmp_path / "run", [metric(1), metric(2)])
    page, errors = open_report(chromium, [folder])
    page.hover("#first .chart >> nth=0")
    with page.expect_download() as download:
        page.click("#first .chart .modebar-btn >> nth=0")
    assert download.value.suggested_filename == "rollout-reward_mean.svg"
    text = download.value.path().read_text()
    assert text.startswith("<svg") and "rollout/reward_mean" in text and 'class="lines"' in text
    page.close()
    assert errors == []


def test_grades_are_neither_right_nor_wrong(chromium, tmp_path):
    """A grade is shown as it is. A group of grades is neither all right nor all wrong."""
    samples = [group(1, "x", "y", ["one", "two"], [0.9, 0.2]) | {"scores": [0.8, 0.2]}]
    evaluations = [{"step": 0, "scores": [0.9, 0.0]}]
    folder = write_run(tmp_path / "run", [metric(1)], samples, evaluations)
    page, errors = open_report(chromium, [folder])
    shown = page.inner_text("#groups")
    assert "0.80\nreward 0.90" in shown and "0 of 2 right" in shown
    assert "✓" not in shown and "✗" not in shown
    assert "0.450" in page.inner_text("#runs")
    for kind in ("right", "wrong", "mixed"):
        page.select_option("#kind", kind)
        assert page.locator("#groups .group").count() == 0
    page.close()
    assert errors == []


def test_the_question_is_seen_and_the_worked_examples_are_folded(chromium, tmp_path):
    """Also: a run without a KL to the reference isn't told that it lacks one."""
    examples = "".join(f"user: example {k}\nassistant: {k}\n" for k in range(40))
    prompts = [f"{examples}user: What is {k} + 1?\nassistant:" for k in range(3)]
    metrics = [metric(step) for step in range(3)]
    for record in metrics:
        del record["kl/ref"]
    samples = [
        group(k + 1, prompt, "1", ["1", "2"], [1.0, 0.0]) for k, prompt in enumerate(prompts)
    ]
    write_run(tmp_path / "run", metrics, samples, beta=0.0)
    report.main(report.Args([tmp_path / "run"], tmp_path / "report.html"))
    page = chromium.new_page()
    page.goto((tmp_path / "report.html").as_uri())
    shown = page.locator("#groups .group").first.inner_text()
    assert "user: What is 0 + 1?\nassistant:" in shown and "example" not in shown
    page.locator("#groups summary").first.click()
    assert "user: example 39" in page.locator("#groups .group").first.inner_text()
    assert "kl/ref" not in page.inner_text("#runs")
    page.close()


def test_equal_seeds_are_never_pooled(chromium, tmp_path):
    paths = [f"/data/of/the/experiment/train_{name}.csv" for name in ("easy", "hard")]
    folders = [write_run(tmp_path / f"s{k}", [metric(1)], dataset=paths[0]) for k in (1, 2)]
    folders.append(write_run(tmp_path / "other", [metric(1)], dataset=paths[1]))
    page, errors = open_report(chromium, folders)
    ends = [f"dataset …{path[-23:]}" for path in paths]
    names = [f"{folder.parent.name}/{folder.name}" for folder in folders]
    assert page.locator("#legend label").all_inner_texts() == [
        f"grpo.py, {ends[0]}, {names[0]}, seed 1",
        f"grpo.py, {ends[0]}, {names[1]}, seed 1",
        f"grpo.py, {ends[1]}, seed 1",
    ]
    page.close()
    assert errors == []


def test_the_arguments_that_separate_the_configurations_name_them(chromium, tmp_path):
    """Only a, b or c together with z tell these arms apart. The box of a chart begins with the value."""
    same = [dict(a=1, b=1, c=1), dict(a=2, b=2, c=2)]
    folders = [
        write_run(
            tmp_path / f"{x}", [metric(k) for k in range(1, 50)], **same[x % 2], z=x // 2, beta=""
        )
        for x in range(4)
    ]
    page, errors = open_report(chromium, folders)
    labels = page.locator("#legend label").all_inner_texts()
    names = [f"a {1 + x % 2}, z {x // 2}, b {1 + x % 2}" for x in range(4)]
    assert labels == [f"grpo.py, {name}, seed 1" for name in names]
    page.wait_for_selector("#first .main-svg")
    page.hover("#first .chart >> nth=0")
    page.wait_for_selector(".hoverlayer .legendtext")
    shown = page.locator(".hoverlayer .legendtext").all_text_contents()
    values = [f"{1 + x % 2}, {x // 2}, {1 + x % 2}" for x in range(4)]
    assert sorted(shown) == sorted(f"1  grpo, {value}" for value in values)
    page.close()
    assert errors == []


@pytest.mark.parametrize("width", [390, 1280])
def test_the_page_fits_the_screen(chromium, tmp_path, width):
    """Nothing is wider than the screen, except tables, which scroll. No word breaks into lines of some letters."""
    name = "grpo__adder__1__20261123-051727-9d1a9e"
    given = dict(instructions="Solve the problem step by step. " * 12, dataset="/home/" + "x" * 60)
    folders = [
        write_run(tmp_path / f"{name}{k}", [metric(1)], GROUPS, learning_rate=k, **given)
        for k in range(5)
    ]
    page, errors = open_report(chromium, folders)
    page.set_viewport_size({"width": width, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") == width
    broken = page.evaluate("""
        [...document.querySelectorAll("#runs th, #runs td")].filter(cell => {
            const range = document.createRange();
            range.selectNodeContents(cell);
            const isWord = cell.checkVisibility() && /^\\S{1,20}$/.test(cell.textContent);
            return isWord && range.getClientRects().length > 1;
        }).map(cell => cell.textContent)""")
    assert broken == []
    page.close()
    assert errors == []


def test_the_comparison_on_the_page(chromium, tmp_path):
    """Standard errors beside the runs, and a column for each configuration. Older runs have neither."""
    folders = [
        write_evaluated(tmp_path / "a", "1100"),
        write_evaluated(tmp_path / "b", "1011", instructions=HOSTILE),
    ]
    page, errors = open_report(chromium, folders)
    assert "0.750\u00a0±\u00a00.250\u00a0(n\u00a0=\u00a04)" in page.inner_text(
        "#runs table >> nth=0"
    )
    assert "sqrt(p (1 - p) / (n - 1))" in page.inner_text("#runs")
    cells = [
        row.locator("th, td").all_text_contents() for row in page.locator("#comparison tr").all()
    ]
    assert cells[0] == ["", *page.locator("#legend label").all_text_contents()]
    assert ["difference (95 % interval)", "-", "+0.250 (-0.688 to +1.188)"] in cells
    assert ["won, lost", "-", "2, 1"] in cells and ["steps", "2", "2"] in cells
    notes = page.inner_text("#comparison")
    assert "with other problems" in notes and "with the same seed (1) share prompts" in notes
    assert page.locator("h2 >> text=Comparison").is_visible()
    page.set_viewport_size({"width": 390, "height": 900})
    assert page.evaluate("document.documentElement.scrollWidth") == 390
    for folder in folders:
        (folder / "evaluations.jsonl").unlink()
    page.goto(report.main(report.Args(folders)).as_uri())
    assert not page.locator("text=Comparison").first.is_visible()
    assert page.inner_text("#comparison") == "" and "±" not in page.inner_text("#runs")
    page.close()
    assert errors == []


# ---- the page: samples

RIGHT, WRONG = "<answer>4</answer>", "<think>2</think>"
GROUPS = [
    group(1, "2+2=", "4", [RIGHT, WRONG], [1.4, 0.2]),
    group(2, "1+3=", "4", [WRONG, WRONG], [0.2, 0.2], ended=[False, True]),
    group(3, "3+1=", "4", [RIGHT, RIGHT], [1.4, 1.4], [[0.5, -0.5, 1.0], [0.1]]),
    group(4, "2+2=", "4", [RIGHT, "<answer>Five</answer>"], [1.4, 0.4]),
    group(5, "4+0=", "4", [RIGHT, RIGHT], [1.4, 1.3]),
]
HOSTILE_NAME = "<img src=x onerror=alert(1)>"


@pytest.fixture(scope="module")
def report_page(chromium, tmp_path_factory):
    """One page with many runs, because the browser needs a second to read plotly."""
    home = tmp_path_factory.mktemp("runs")
    many = [
        group(k // 16, f"{k}+1=", str(k + 1), [f"number {k} " + "x" * 200], [k % 2])
        for k in range(10_000)
    ]
    hostile = [group(1, HOSTILE, HOSTILE, [HOSTILE, "5"], [0.0, float("nan")])]
    sizes = dict(num_prompts=2, num_generations=2, num_steps=2, eval_size=2, device="cpu")
    grpo.main(replace(grpo.BUNDLED, runs_dir=str(home), run_name="real", **sizes))
    (home / "empty").mkdir()
    (home / "empty" / "samples.jsonl").touch()
    old_metrics = [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}]
    folders = [
        write_run(home / "many", [metric(1)], many),
        write_run(
            home / "few", [metric(k, eos_frac=0.4 if k == 2 else 1.0) for k in range(1, 21)], GROUPS
        ),
        write_run(home / HOSTILE_NAME, [metric(1)], hostile, instructions=HOSTILE),
        home / "real",
        home / "empty",
        write_run(home / "started", [{"step": 0, "eval/accuracy": 0.5}]),
        write_run(
            home / "old",
            old_metrics,
            [{"step": 1, "completions": [3]}, {"step": 1, "completions": 3}],
        ),
    ]
    page, errors = open_report(chromium, folders)
    yield page, errors, f"{home.name}/"
    page.close()


@pytest.fixture
def look(report_page):
    """A function that shows a run's samples without a filter."""
    page, errors, prefix = report_page

    def look(name):
        page.evaluate(
            "document.querySelectorAll('#filters input').forEach(x => { x.value = ''; x.checked = false; })"
        )
        page.select_option("#kind", "")
        page.select_option("#run", label=prefix + name)
        return page

    look.notes = lambda name: [
        note.removeprefix(f"{prefix}{name}: ")
        for note in page.locator("#runs .note").all_inner_texts()
        if note.startswith(f"{prefix}{name}: ")
    ]
    yield look
    assert errors == []


def steps_shown(page):
    return [int(text.removeprefix("step ")) for text in page.locator(".group b").all_inner_texts()]


def test_ten_thousand_groups_are_shown_in_three_seconds(look, report_page):
    page = report_page[0]
    assert page.evaluate("performance.getEntriesByName('samples are shown')[0].startTime") < 3000
    look("many")
    assert len(steps_shown(page)) == 20
    page.click("#on")
    assert "21 to 40 of 10000" in page.inner_text("#count")
    page.fill("#search", "number 9999")
    assert steps_shown(page) == [9999 // 16]


def test_a_run_of_a_script(look):
    """The page finds everything that it needs in a real run of grpo.py."""
    page = look("real")
    assert steps_shown(page) == [1, 1, 2, 2]
    for text in ("^reward -?[0-9]", "^adv. [+-][0-9]"):
        assert page.locator(f".card span:text-matches('{text}')").count() == 8
    assert not any(".jsonl" in note or "args" in note for note in look.notes("real"))
    cells = (
        page.locator("#runs table >> nth=0").locator("tr:has-text('/real') td").all_inner_texts()
    )
    assert cells[1:4] == ["grpo.py", "1", "2 of 2"]
    assert "-" not in cells[:-1] and cells[-1] == "-"  # a run on a CPU has no peak of memory
    first = page.eval_on_selector_all("#first .chart", "charts => charts.map(x => x.dataset.name)")
    assert first == report.FIRST


@pytest.mark.parametrize(
    ("field", "value", "steps"),
    [
        ("step-from", "4", [4, 5]),
        ("step-to", "2", [1, 2]),
        ("reward-to", "0.3", [1, 2]),
        ("reward-from", "1.35", [1, 3, 4, 5]),
        ("search", "FIVE", [4]),
        ("search", "1+3", [2]),
        ("search", "nowhere", []),
        ("kind", "right", [3, 5]),
        ("kind", "wrong", [2]),
        ("kind", "mixed", [1, 4]),
        ("kind", "equal", [2, 3]),
        ("cut", True, [2]),
        ("repeated", True, [1, 4]),
    ],
)
def test_a_filter_filters(look, field, value, steps):
    page = look("few")
    assert steps_shown(page) == [1, 2, 3, 4, 5]
    if field == "kind":
        page.select_option("#kind", value)
    elif value is True:
        page.check(f"#{field}")
    else:
        page.fill(f"#{field}", value)
    assert steps_shown(page) == steps
    if field == "reward-to":
        # The group's other response is pale.
        assert page.locator(".card.out").count() == 1


def test_the_mark_and_the_advantages_of_tokens(look):
    page = look("few")
    (note,) = look.notes("few")
    assert note.startswith("rollout/eos_frac is below 0.5")
    assert page.locator(".strip").count() == 4
    assert "adv. +0.33" in page.inner_text(".group >> nth=2")


def test_text_of_a_model_stays_text(look):
    page = look(HOSTILE_NAME)
    assert page.text_content(".card .text >> nth=0") == HOSTILE
    assert page.text_content(".prompt") == HOSTILE
    assert page.title() == "PlainRL: runs"
    assert page.locator("#groups img, #groups script, .text b, #runs img, #legend img").count() == 0
    assert "NaN" in page.inner_text(".card >> nth=1")


def test_runs_that_have_nothing_yet(look):
    """For a run with one empty file, one without steps and one of another version, the page names what is missing."""
    page = look("empty")
    assert "no samples" in page.inner_text("#count")
    missing = [
        "args.json is missing or unreadable",
        "metrics.jsonl is missing",
        "samples.jsonl has no record",
    ]
    assert look.notes("empty") == missing
    assert look.notes("started") == ["samples.jsonl has no record"]
    assert look.notes("old") == [
        "samples.jsonl: 1 unreadable lines are left out",
        f"metrics.jsonl has no {', '.join(report.FIRST)}",
    ]
    assert look("old").inner_text(".card .text") == "3"

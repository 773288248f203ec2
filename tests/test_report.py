"""report.py: what it reads of a run, and its page in a browser."""

import json
import sys

import pytest
from conftest import ROOT

import grpo
import report

sys.path.insert(0, str(ROOT / "benchmark"))
import report_pictures

HOSTILE = "</script><script>document.title='owned'</script><img src=x onerror=\"document.title='owned'\">"
HOSTILE += "<!--<script> & <b>bold</b> \u2028 $& \\u003c"


def metric(step, **values):
    """A record of a healthy step, with these values instead."""
    names = dict(reward_mean=1.0, accuracy=0.5, eos_frac=1.0, zero_std_frac=0.1)
    record = {f"rollout/{name}": values.pop(name, x) for name, x in names.items()}
    entropy, kl, skipped = values.pop("entropy", 0.5), values.pop("kl", 0.01), values.pop("skipped", 0)
    assert not values
    record |= {"policy/entropy": entropy, "kl/ref": kl, "optim/skipped": skipped}
    return {"step": step, "episodes": 8 * step, "tokens": 100 * step} | record


def group(step, prompt, answer, completions, rewards, advantages=None):
    advantages = advantages or [x - sum(rewards) / len(rewards) for x in rewards]
    sides = {"completions": completions, "rewards": rewards, "advantages": advantages}
    return {"step": step, "prompt": prompt, "answer": answer} | sides


@pytest.fixture
def write_run(tmp_path):
    """A function that writes the folder of a run."""

    def write(name, metrics=(), samples=(), script="grpo", **args):
        folder = tmp_path / "runs" / name
        folder.mkdir(parents=True)
        (folder / f"{script}.py").write_text("")
        versions = {"versions": {"torch": "2.13.0"}}
        (folder / "args.json").write_text(json.dumps({"seed": 1, "beta": 0.01} | args | versions))
        for file, records in {"metrics.jsonl": metrics, "samples.jsonl": samples}.items():
            (folder / file).write_text("".join(json.dumps(record) + "\n" for record in records))
        return folder

    return write


@pytest.fixture(scope="module")
def chromium():
    pytest.importorskip("plotly", reason="plotly: pip install -r benchmark/requirements.txt")
    pytest.importorskip("playwright", reason="playwright drives the browser: pip install playwright")
    if report_pictures.CHROMIUM is None:
        pytest.skip("no browser: apt-get install chromium")
    with report_pictures.browser() as browser:
        yield browser


@pytest.fixture
def look(chromium):
    """A function that opens the report of these runs; in the end there is no error in the console."""
    pages, errors = [], []

    def look(*folders):
        page = chromium.new_page()
        pages.append(page)
        page.on("console", lambda line: line.type == "error" and errors.append(line.text))
        page.on("pageerror", lambda error: errors.append(str(error)))
        page.goto(report.main(report.Args(list(folders))).as_uri())
        return page

    yield look
    for page in pages:
        page.close()
    assert errors == []


def steps_shown(page):
    return [int(text.removeprefix("step ")) for text in page.locator(".group b").all_inner_texts()]


# ---- what is read


def test_the_marks_of_a_broken_run():
    """Each at its limit and just beyond it."""
    edge = dict(eos_frac=0.5, zero_std_frac=0.9)
    healthy = [metric(step, entropy=0.05 if step > 1 else 0.5, **edge) for step in range(1, 9)]
    assert report.marks([{"step": 0, "eval/accuracy": 0.5}, *healthy]) == []

    metrics = [metric(1, eos_frac=0.49), metric(2), metric(3, eos_frac=0.1), metric(4, eos_frac=None)]
    assert report.marks(metrics) == [
        "rollout/eos_frac is below 0.5 (most responses are cut) in 2 of 3 steps, first in step 1"
    ]
    metrics = [metric(1), metric(2, zero_std_frac=0.91, skipped=1)]
    found = report.marks(metrics)
    assert [line.split(" (")[0] for line in found] == [
        "rollout/zero_std_frac is above 0.9",
        "optim/skipped is above 0",
    ]
    assert all(line.endswith("in 1 of 2 steps, first in step 2") for line in found)


def test_entropy_has_collapsed_if_it_stays_low():
    low = {step: 0.049 for step in (3, 4, 5, 6, 8, 9, 10, 11, 12, 13)}
    metrics = [metric(step, entropy=low.get(step, 0.5)) for step in range(1, 15)]
    (line,) = report.marks(metrics)
    assert "policy/entropy" in line and line.endswith("first in steps 8 to 12")
    assert report.marks(metrics[:11]) == []


def test_what_is_missing_is_said_and_the_rest_is_read(write_run):
    records = [metric(1), metric(2)]
    folder = write_run("half", records, [group(1, "1+1=", "2", ["2"], [0.2])])
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
    (folder / "args.json").write_text('{"seed": 1, "be')
    assert "args.json is missing or unreadable" in report.read_run(folder, "half")["gaps"]


def test_right_and_cut(write_run):
    """Right is the number in the answer tags; cut, in a step where not all ended, no </answer> at the end."""
    texts = ["<answer>4</answer>", "<answer>5</answer>\n", "<answer>4</answer> and", "4"]
    samples = [group(step, "2+2=", "#### 4", texts, [1.4, 0.4, 1.4, 0.0]) for step in (1, 2)]
    folder = write_run("a", [metric(1, eos_frac=0.5), metric(2)], samples)
    one, two = report.read_run(folder, "a")["samples"]
    assert one["right"] == two["right"] == [1, 0, 1, 0]
    assert one["cut"] == [False, False, True, True]
    assert two["cut"] == [False] * 4


def test_the_first_six_are_those_of_the_page_on_metrics():
    text = (ROOT / "docs" / "metrics.md").read_text(encoding="utf-8")
    section = text.split("## Watch these six first")[1].split("\n## ")[0]
    assert [line.split("`")[1] for line in section.splitlines() if line[:3] == "- `"] == report.FIRST


def test_without_plotly_a_line_says_how_to_install_it(write_run, monkeypatch, capsys):
    monkeypatch.setitem(sys.modules, "plotly.offline", None)
    with pytest.raises(SystemExit) as end:
        report.main(report.Args([write_run("a")]))
    assert end.value.code == 2
    line = capsys.readouterr().err
    (pin,) = [x for x in (ROOT / "benchmark/requirements.txt").read_text().split() if "plotly" in x]
    assert line.startswith("error: ") and line.endswith(f"pip install {pin}\n")


def test_a_folder_that_is_not_there(tmp_path, capsys):
    pytest.importorskip("plotly", reason="plotly: pip install -r benchmark/requirements.txt")
    with pytest.raises(SystemExit) as end:
        report.main(report.Args([tmp_path / "nothing"]))
    assert end.value.code == 2
    assert capsys.readouterr().err.count("\n") == 1


# ---- the page


def test_a_run_of_a_script(look, tmp_path):
    """What grpo.py writes is what the page reads: rows, curves, samples, and nothing is missing."""
    sizes = dict(num_prompts=2, num_generations=2, num_steps=2, eval_size=2, device="cpu")
    grpo.main(grpo.Args(runs_dir=str(tmp_path), run_name="a", **sizes))
    page = look(tmp_path / "a")
    assert (tmp_path / "a" / "report.html").is_file()
    assert page.locator("#runs .note.dim").count() == 0
    assert "2 of 2" in page.inner_text("#runs table >> nth=0")
    names = page.eval_on_selector_all(".chart", "charts => charts.map(x => x.layout.title.text)")
    assert names == report.FIRST
    assert page.eval_on_selector_all(".chart", "charts => charts.every(x => x.data.length)")
    assert steps_shown(page) == [1, 1, 2, 2]
    assert page.locator(".card .head").count() == 8
    assert page.locator(".card span:text-matches('^reward')").count() == 8
    assert page.locator(".card span:text-matches('^adv')").count() == 8


def test_seeds_are_a_mean_and_a_band(look, write_run):
    """Two seeds of one configuration, by hand, and another configuration beside them."""
    rewards = {1: [0.0, 1.0, 2.0], 2: [1.0, 2.0, 6.0]}
    folders = [
        write_run(f"s{seed}", [metric(k + 1, reward_mean=x) for k, x in enumerate(values)], seed=seed)
        for seed, values in rewards.items()
    ]
    folders.append(write_run("other", [metric(1, reward_mean=None), metric(2)], beta=0.5, run_name="x"))
    page = look(*folders)
    curves = "document.querySelector('#first .chart').data.map(trace => trace.y)"
    labels = ["grpo.py, beta 0.01, seeds 1, 2", "grpo.py, beta 0.5, seed 1"]
    assert page.locator("#legend label").all_inner_texts() == labels
    differing = page.inner_text("#runs details >> nth=0")
    assert "beta" in differing and "torch" not in differing

    # Mean of the last steps of each seed, then lowest, highest and mean over the seeds.
    assert page.evaluate(curves)[:3] == [[0, 0.5, 1], [1, 1.5, 3], [0.5, 1, 2]]
    page.uncheck("#smooth")
    assert page.evaluate(curves) == [[0, 1, 2], [1, 2, 6], [0.5, 1.5, 4], [None, 1]]
    page.uncheck("#band")
    assert page.evaluate(curves) == [[0, 1, 2], [1, 2, 6], [None, 1]]
    page.select_option("#across", "episodes")
    assert page.evaluate("document.querySelector('#first .chart').data[0].x") == [8, 16, 24]
    page.uncheck("#legend input >> nth=0")
    assert page.evaluate(curves) == [[None, 1]]
    page.click("#all summary >> nth=0")
    page.wait_for_selector("#all .chart .main-svg")


def test_filters(look, write_run):
    right, wrong = "<answer>4</answer>", "<think>2</think>"
    samples = [
        group(1, "2+2=", "4", [right, wrong], [1.4, 0.2]),
        group(2, "1+3=", "4", [wrong, wrong], [0.2, 0.2]),
        group(3, "3+1=", "4", [right, right], [1.4, 1.4], [[0.5, -0.5, 1.0], [0.1]]),
        group(4, "2+2=", "4", [right, "<answer>Five</answer>"], [1.4, 0.4]),
        group(5, "4+0=", "4", [right, right], [1.4, 1.3]),
    ]
    metrics = [metric(step, eos_frac=0.5 if step == 2 else 1.0) for step in range(1, 6)]
    page = look(write_run("a", metrics, samples))
    assert steps_shown(page) == [1, 2, 3, 4, 5]
    assert page.locator(".strip").count() == 4  # a token each
    for field, value, expected in [
        ("step-from", "4", [4, 5]),
        ("step-to", "2", [1, 2]),
        ("reward-to", "0.3", [1, 2]),
        ("reward-from", "1.35", [1, 3, 4, 5]),
        ("search", "FIVE", [4]),
        ("search", "1+3", [2]),
        ("search", "nowhere", []),
    ]:
        page.fill(f"#{field}", value)
        assert steps_shown(page) == expected, (field, value)
        page.fill(f"#{field}", "")
    kinds = {"right": [3, 5], "wrong": [2], "mixed": [1, 4], "equal": [2, 3]}
    for kind, expected in kinds.items():
        page.select_option("#kind", kind)
        assert steps_shown(page) == expected, kind
    page.select_option("#kind", "")
    page.check("#cut")
    assert steps_shown(page) == [2]
    page.uncheck("#cut")
    page.check("#repeated")
    assert steps_shown(page) == [1, 4]
    page.fill("#reward-to", "0.3")  # the other response of the group stays, but pale
    assert page.locator(".card.out").count() == 1


def test_text_of_a_model_stays_text(look, write_run):
    samples = [group(1, HOSTILE, HOSTILE, [HOSTILE, "5"], [0.0, float("nan")])]
    page = look(write_run("<img src=x onerror=alert(1)>", [metric(1)], samples, system_prompt=HOSTILE))
    assert page.text_content(".card .text >> nth=0") == HOSTILE
    assert page.text_content(".prompt") == HOSTILE
    assert page.title() == "PlainRL: runs"
    assert page.locator("#groups img, #groups script, #groups b:has-text('bold'), #runs img").count() == 0
    assert "NaN" in page.inner_text(".card >> nth=1")


def test_ten_thousand_groups_load_in_three_seconds(look, write_run):
    samples = [group(k // 16, f"{k}+1=", str(k + 1), [f"number {k}", "x" * 200], [0.0, 1.0]) for k in range(10_000)]
    page = look(write_run("a", [metric(1)], samples))
    assert page.evaluate("performance.getEntriesByType('navigation')[0].loadEventEnd") < 3000
    assert len(steps_shown(page)) == 20
    page.click("#on")
    assert "21 to 40 of 10000" in page.inner_text("#count")
    page.fill("#search", "number 9999")
    assert steps_shown(page) == [9999 // 16]


def test_runs_that_have_nothing_yet(look, write_run, tmp_path):
    """An empty folder, one without steps, one of another version: the page says what they lack."""
    empty = tmp_path / "runs" / "empty"
    empty.mkdir(parents=True)
    started = write_run("started", [{"step": 0, "eval/accuracy": 0.5}])
    old = write_run("old", [{"step": 1, "loss": 1.0}, {"step": 2, "loss": 2.0}], [{"step": 1, "completions": [3]}])
    page = look(empty, started, old)
    notes = page.locator("#runs .note").all_inner_texts()
    missing = [f"runs/empty: {name}" for name in ("args.json is missing or unreadable", "metrics.jsonl is missing")]
    assert set(missing) <= set(notes)
    assert "runs/started: samples.jsonl has no record" in notes
    assert f"runs/old: metrics.jsonl has no {', '.join(report.FIRST)}" in notes
    assert "no samples" in page.inner_text("#count")
    page.select_option("#run", label="runs/old")
    assert page.inner_text(".card .text") == "3"
